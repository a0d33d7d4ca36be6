"""Reports: what a trace means, what limits the run, and what to change.

* `analysis` – from a trace to parameters, phases, causes, a verdict and advice
* `model` – predictions of other scales, caches, batches and stores
* `pages` – an analysis as a page or as text
* `live` – a run while it lasts: `penstock top`, Prometheus, OpenTelemetry, TensorBoard
* `charts` – charts and pages for every room; it knows neither traces nor reports

Recording a trace is `penstock.trace`.
"""
