"""What a trace means: parameters, phases, patterns, causes, the verdict and the advice.

Pure: a trace goes in, values come out (`values`). Start with `analyze.analyze`. Numbers that need a
model of the run come from `penstock.report.model`; drawing is `penstock.report.pages`.
"""
