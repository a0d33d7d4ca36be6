"""The model of a run: constants that were calibrated from its trace, and what follows from them.

>>> from penstock.trace import read_trace                                    # doctest: +SKIP
>>> model = calibrate(read_trace("runs/today"))                              # doctest: +SKIP
>>> model.predict(WhatIf(nodes=64, ranks_per_node=8)).samples_s              # doctest: +SKIP
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.report.model.bands import FIT_MAX, RANKS_SEEN, half_band
from penstock.report.model.constants import RunConstants
from penstock.report.model.foreign_run import played_foreign
from penstock.report.model.observed import MeasuredRun
from penstock.report.model.penstock_run import LINK_BYTES_S, played_penstock
from penstock.report.model.played import Played
from penstock.report.model.settings import RunSettings
from penstock.report.model.what_if import Forecast, WhatIf

_ERROR_LEAST = 0.002
"""Constants whose relative error is smaller are not varied."""
_FACTORS = {"compute": "compute_factor", "fetch": "fetch_factor", "decode": "decode_factor"}


@dataclass(frozen=True)
class RunModel:
    """A run as the model knows it; `calibrate(trace)` makes one."""

    constants: RunConstants
    settings: RunSettings
    measured: MeasuredRun
    second_error: float = 0.0
    """How far the model is off on the second run that it was calibrated with."""

    @property
    def loader(self) -> str:
        """The loader of the run: `penstock`, `torch`, or another one that works like torch's."""
        return self.settings.loader

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the calibration: contended cores, missing rows, misfit."""
        error = self.self_check()
        if abs(error) <= FIT_MAX:
            return self.constants.notes
        place = "waiting for batches" if self.measured.stall_share > 0.2 else "the loop's own work"
        return (
            *self.constants.notes,
            f"the model does not fit this run: its replay is {error:+.0%} off the measured step "
            f"time, most of which is {place}; bands are wider by that much",
        )

    def predict(self, what_if: WhatIf | None = None) -> Forecast:
        """Return what a run with some changes comes to; None: the same run again."""
        what_if = what_if or WhatIf()
        made, ranks = self._played(what_if), self.settings.changed(what_if).num_ranks
        # Of large jobs the doubt about their size outweighs that about constants by far.
        is_large = ranks > max(RANKS_SEEN, self.settings.num_ranks)
        half = half_band(
            self.loader,
            what_if,
            spread=self._own_spread if is_large else self._spread(what_if, made),
            misfit=max(self.self_check(), self.second_error, key=abs),
            ranks=ranks,
        )
        return self._forecast(what_if, made, half)

    def outline(self, what_if: WhatIf | None = None) -> Forecast:
        """Return a forecast without a band, in a fraction of the time."""
        what_if = what_if or WhatIf()
        return self._forecast(what_if, self._played(what_if), 0.0)

    def self_check(self) -> float:
        """Return predicted over measured step time of the traced run itself, minus 1.

        Beyond 3 % the model does not fit the run; its forecasts say so and have wider bands.
        """
        return self._self_error

    @cached_property
    def _self_error(self) -> float:
        return self._played(WhatIf()).step_s / self.measured.step_s - 1

    @cached_property
    def _own_spread(self) -> float:
        return self._spread(WhatIf(), self._played(WhatIf()))

    def _played(self, what_if: WhatIf) -> Played:
        settings = self.settings.changed(what_if)
        play = played_penstock if self.loader == "penstock" else played_foreign
        return play(self.constants, settings, what_if)

    def _spread(self, what_if: WhatIf, made: Played) -> float:
        """Return how far the error of constants moves the answer: the standard error of its log."""
        total = 0.0
        for name, factor in _FACTORS.items():
            error = self.constants.errors.get(name, 0.0)
            if error >= _ERROR_LEAST:
                value = getattr(what_if, factor) * (1 + error)
                moved = self._played(replace(what_if, **{factor: value}))
                total += math.log(moved.step_s / made.step_s) ** 2
        return math.sqrt(total)

    def _forecast(self, what_if: WhatIf, made: Played, half: float) -> Forecast:
        settings = self.settings.changed(what_if)
        low, high = math.exp(-half), math.exp(half)
        samples_s = settings.batch_size * settings.num_ranks / made.step_s
        return Forecast(
            step_s=made.step_s,
            step_s_low=made.step_s * low,
            step_s_high=made.step_s * high,
            samples_s=samples_s,
            samples_s_low=samples_s * low,
            samples_s_high=samples_s * high,
            epoch_s=made.epoch_s,
            epoch_s_low=made.epoch_s[-1] * low,
            epoch_s_high=made.epoch_s[-1] * high,
            stall_share=made.stall_share,
            store_bytes=made.store_bytes,
            peer_bytes=made.peer_bytes,
            memory_bytes=made.memory_bytes,
            disk_bytes=float(settings.disk_cache_bytes or 0),
            store_bytes_s=settings.dataset_bytes / made.epoch_s[0],
            link_bytes_s=made.peer_bytes / settings.nodes / sum(made.epoch_s),
            limit=made.limit,
            num_ranks=settings.num_ranks,
            notes=(*self.notes, *self._question_notes(what_if)),
        )

    def _question_notes(self, what_if: WhatIf) -> tuple[str, ...]:
        """Return what the run could not tell of this question."""
        settings, constants, out = self.settings.changed(what_if), self.constants, []
        knows_link = what_if.link_bandwidth or constants.link_bytes_s
        if self.loader == "penstock" and settings.nodes > 1 and not knows_link:
            out.append(
                f"the run says nothing of links between nodes: {LINK_BYTES_S / 1e9:g} GB/s is "
                "assumed; --link-bandwidth says another"
            )
        store = constants.store_for(what_if)
        if store is not None and math.isinf(store.bytes_s) and settings != self.settings:
            out.append(
                "the run never filled the store's bandwidth: none is assumed; a second run that "
                "asks for more, or --store-bandwidth, would say"
            )
        if settings.batch_size != self.settings.batch_size and not constants.compute_fixed_s:
            out.append("the time of a step is taken to grow with its batch")
        return tuple(out)
