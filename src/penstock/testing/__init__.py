"""Testing: the kit we test Penstock with, given to users too.

A conformance suite for stores (`conformance`), real object stores on loopback (`servers`), a proxy
that gives a store the weather of a bad network (`shaper`), an http server with scripted faults
(`http_server`), stores that fail or count (`faults`), and random step programs with random rewrites
(`programs`, `rewrites`). Nothing here is imported by the rest of the package.
"""
