"""Reports: what a trace means, what limits the run, and what to change.

Pure: a trace goes in, values come out. Start with `analysis.analyze`; the values it returns are in
`values`. Recording is `trace`, drawing pages is `page`, predictions come from `model`.
"""
