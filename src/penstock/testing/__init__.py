"""Testing: what users of Penstock test their stores and programs with.

A conformance suite for stores (`conformance`), real object stores on loopback (`servers`), an http
server with scripted faults (`http_server`), and stores that fail or count (`faults`). Nothing here
is imported by the rest of the package.
"""
