"""How far forecasts were off in runs that were made to find out.

Written by `python -m benchmarks.predict_runs --residuals`: log(measured / predicted) of the time of
a step, by loader and by what was asked. The configurations are others than
those of the error table in docs/guides/predict.md.
"""

RESIDUALS: dict[str, dict[str, tuple[float, ...]]] = {
    "torch": {
        "settings": (
            0.0965,
            -0.0022,
            -0.1253,
            0.011,
            -0.0032,
            -0.0794,
            0.0245,
            0.0206,
            0.1253,
            0.0534,
            0.0603,
            0.0503,
            0.0271,
        ),
        "store": (-0.1207, -0.162, 0.0276, -0.0002),
        "ranks": (-0.0136, -0.0632, -0.0397),
    },
    "penstock": {
        "cache": (0.071, 0.0167, 0.0143, 0.005, 0.0043, -0.0029),
        "store": (0.0066, -0.013, 0.0683, 0.0121),
        "ranks": (0.0774, -0.1884),
    },
}
