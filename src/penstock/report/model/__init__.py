"""Models of runs: calibrated from a trace, asked with a `WhatIf`, they answer with a `Forecast`.

`calibrate` makes a `RunModel` of one trace or of two. Runs with Penstock are played by the
simulators of `penstock.simulate`, in which the loader's own code decides; runs with torch's
DataLoader and loaders like it by a replay of its rules (`foreign`).
"""

from penstock.report.model.calibrate import calibrate
from penstock.report.model.run_model import RunModel
from penstock.report.model.what_if import Forecast, WhatIf

__all__ = ["Forecast", "RunModel", "WhatIf", "calibrate"]
