"""What the parts of a step are called where people read them."""

from __future__ import annotations

from penstock.report.analysis.values import Evidence
from penstock.units import show_bytes, show_seconds

LABELS = {
    "fetch": "wait: fetching bytes",
    "open": "wait: opening files",
    "decode": "wait: decoding",
    "queue": "wait: too few workers or batches ahead",
    "head-of-line": "wait: an earlier batch is late",
    "hand-over": "wait: hand-over",
    "cpu-starved": "wait: workers without a core",
    "loader": "wait: cause not traced",
    "copy": "copy to the device",
    "launch": "issuing kernels",
    "compute": "compute",
    "communicate": "communication",
    "barrier": "waiting for another rank",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "between-epochs": "between epochs",
    "interference": "slowed by the loader",
    "unexplained": "unexplained",
}
"""Of each category of a step's time (`values.CATEGORIES`)."""


def percent(share: float) -> str:
    """Return a share for people.

    >>> percent(0.4312), percent(0.004), percent(0.0)
    ('43 %', '0.4 %', '0 %')
    """
    figure = 100 * share
    return f"{figure:.1f} %" if 0.05 <= abs(figure) < 9.95 else f"{figure:.0f} %"


def gain_text(gain: float, low: float, high: float) -> str:
    """Return a predicted gain with its band.

    >>> gain_text(0.23, 0.18, 0.27), gain_text(1.6, 1.4, 1.9)
    ('+23 % (+18 to +27 %)', '2.6 times (2.4 to 2.9)')
    """
    if gain < 1:
        return f"{gain:+.0%} ({low:+.0%} to {high:+.0%})".replace("% to", " to").replace("%", " %")
    return f"{1 + gain:.1f} times ({1 + low:.1f} to {1 + high:.1f})"


def evidence_text(evidence: Evidence) -> tuple[str, str]:
    """Return what was observed and its figure; the words of the observation name the unit.

    >>> evidence_text(Evidence(sentence="median latency of a request, s", value=0.0203))
    ('median latency of a request', '20.3 ms')
    >>> evidence_text(Evidence(sentence="busy share of the workers", value=0.934))
    ('busy share of the workers', '93 %')
    """
    text, value = evidence.sentence, evidence.value
    if text.endswith(", s"):
        return text.removesuffix(", s"), show_seconds(value)
    if text.startswith("seconds more"):
        return text.replace("seconds more", "longer", 1), show_seconds(value)
    if "share" in text or text.startswith("hits"):
        return text, percent(value)
    if "median bytes" in text:
        return text.replace("median bytes", "median size", 1), show_bytes(value)
    return text, f"{value:.3g}"


def cannot_see_text(sentences: tuple[str, ...]) -> str:
    """Return what a trace does not hold as one sentence; "" where it holds all.

    >>> cannot_see_text(("pages of mapped files", "Reads of io_uring."))
    'Not seen: pages of mapped files; reads of io_uring.'
    """
    if not sentences:
        return ""
    said = [f"{text[:1].lower()}{text[1:].rstrip('. ')}" for text in sentences]
    return f"Not seen: {'; '.join(said)}."
