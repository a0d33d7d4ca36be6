"""The model of a run: constants that were calibrated from its trace, and what follows from them.

>>> from penstock.trace import read_trace                                    # doctest: +SKIP
>>> model = calibrate(read_trace("runs/today"))                              # doctest: +SKIP
>>> model.predict(WhatIf(nodes=64, ranks_per_node=8)).samples_s              # doctest: +SKIP
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from penstock.report.model.bands import FIT_MAX, RANKS_SEEN, Quantity, doubt, half_band
from penstock.report.model.constants import RunConstants
from penstock.report.model.foreign_run import played_foreign
from penstock.report.model.observed import MeasuredRun
from penstock.report.model.penstock_run import LINK_BYTES_S, played_penstock
from penstock.report.model.played import RunDeviation, SimulatedRun
from penstock.report.model.settings import RunSettings
from penstock.report.model.what_if import Forecast, WhatIf

STEPS_FEW = 8
"""An epoch of fewer steps is mostly its beginning: batches that were read ahead."""
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
    second_misfit: float = 0.0
    """How much of that is beyond chance."""

    @property
    def loader(self) -> str:
        """The loader of the run: `penstock`, `torch`, or another one that works like torch's."""
        return self.settings.loader

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the calibration: contended cores, missing rows, misfit."""
        error = self.self_check()
        if self.fits:
            return self.constants.notes
        place = "waiting for batches" if self.measured.stall_share > 0.2 else "the loop's own work"
        return (
            *self.constants.notes,
            f"the model does not fit this run: its replay is {error:+.0%} off the measured step "
            f"time, most of which is {place}; bands are wider for it",
        )

    def predict(self, what_if: WhatIf | None = None) -> Forecast:
        """Return what a run with some changes comes to; None: the same run again."""
        what_if = what_if or WhatIf()
        made = self._played(what_if)
        halves = {
            quantity: half_band(quantity, self.loader, doubt)
            for quantity, doubt in self._doubts(what_if, made).items()
        }
        return self._forecast(what_if, made, halves)

    def doubts(self, what_if: WhatIf | None = None) -> dict[Quantity, float]:
        """Return the doubt of each quantity of a forecast; bands are so many times as wide."""
        what_if = what_if or WhatIf()
        return self._doubts(what_if, self._played(what_if))

    def outline(self, what_if: WhatIf | None = None) -> Forecast:
        """Return a forecast without a band, in a fraction of the time."""
        what_if = what_if or WhatIf()
        return self._forecast(what_if, self._played(what_if), {})

    def self_check(self) -> float:
        """Return predicted over measured step time of the traced run itself, minus 1.

        Beyond 3 % the model does not fit the run; its forecasts say so and have wider bands.
        """
        return self._self_error

    @cached_property
    def _self_error(self) -> float:
        return self._own_played.step_s / self.measured.step_s - 1

    @property
    def fits(self) -> bool:
        """Whether the model reproduces its own run, as far as a run is not chance."""
        return self.misfit <= FIT_MAX

    @property
    def own_chance(self) -> RunDeviation:
        """How far a run with the settings of the traced one lies from the mean of many such."""
        return self._own_played.chance

    @property
    def misfit(self) -> float:
        """How far the model is off on its own run, as far as that is not chance."""
        return math.sqrt(max(0.0, self.self_check() ** 2 - self.own_chance.step**2))

    @cached_property
    def _own_played(self) -> SimulatedRun:
        return self._played(WhatIf())

    @cached_property
    def _own_moves(self) -> dict[Quantity, float]:
        return self._moves(WhatIf(), self._own_played)

    def _played(self, what_if: WhatIf) -> SimulatedRun:
        settings = self.settings.changed(what_if)
        play = played_penstock if self.loader == "penstock" else played_foreign
        return play(self.constants, settings, what_if)

    def _doubts(self, what_if: WhatIf, made: SimulatedRun) -> dict[Quantity, float]:
        ranks = self.settings.changed(what_if).num_ranks
        # Of large jobs the doubt about their size outweighs that about constants by far.
        is_large = ranks > max(RANKS_SEEN, self.settings.num_ranks)
        moves = self._own_moves if is_large else self._moves(what_if, made)
        chances: dict[Quantity, float] = {
            "step_s": made.chance.step,
            "first_epoch_s": made.chance.first_epoch,
            "stall_share": made.chance.stall_share,
        }
        misfit = max(self.misfit, self.second_misfit)
        # Only what is not waiting turns into waiting.
        misfits = {"stall_share": misfit * (1 - made.stall_share)}
        return {
            quantity: doubt(
                quantity,
                spread=math.hypot(chances.get(quantity, 0.0), moves.get(quantity, 0.0)),
                misfit=misfits.get(quantity, misfit),
                ranks=ranks,
            )
            for quantity in get_args(Quantity)
        }

    def _moves(self, what_if: WhatIf, made: SimulatedRun) -> dict[Quantity, float]:
        """Return how far the errors of constants move a forecast: standard deviations.

        Those of times are logarithms, that of the stall share is a difference.
        """
        moves: dict[Quantity, list[float]] = {}
        for name, factor in _FACTORS.items():
            error = self.constants.errors.get(name, 0.0)
            if error >= _ERROR_LEAST:
                value = getattr(what_if, factor) * (1 + error)
                moved = self._played(replace(what_if, **{factor: value}))
                first = moved.epoch_s[0] / made.epoch_s[0]
                moves.setdefault("step_s", []).append(math.log(moved.step_s / made.step_s))
                moves.setdefault("first_epoch_s", []).append(math.log(first))
                moves.setdefault("stall_share", []).append(moved.stall_share - made.stall_share)
        return {quantity: math.hypot(*values) for quantity, values in moves.items()}

    def _forecast(
        self, what_if: WhatIf, made: SimulatedRun, halves: dict[Quantity, float]
    ) -> Forecast:
        settings = self.settings.changed(what_if)
        low = {quantity: math.exp(-half) for quantity, half in halves.items()}
        high = {quantity: math.exp(half) for quantity, half in halves.items()}
        step_low, step_high = low.get("step_s", 1.0), high.get("step_s", 1.0)
        points = halves.get("stall_share", 0.0)
        samples_s = settings.batch_size * settings.num_ranks / made.step_s
        # The last epoch of one is its first: it begins with all that the others have behind them.
        last: Quantity = "step_s" if settings.epochs > 1 else "first_epoch_s"
        return Forecast(
            step_s=made.step_s,
            step_s_low=made.step_s * step_low,
            step_s_high=made.step_s * step_high,
            samples_s=samples_s,
            samples_s_low=samples_s * step_low,
            samples_s_high=samples_s * step_high,
            epoch_s=made.epoch_s,
            epoch_s_low=made.epoch_s[-1] * low.get(last, 1.0),
            epoch_s_high=made.epoch_s[-1] * high.get(last, 1.0),
            first_epoch_s_low=made.epoch_s[0] * low.get("first_epoch_s", 1.0),
            first_epoch_s_high=made.epoch_s[0] * high.get("first_epoch_s", 1.0),
            stall_share=made.stall_share,
            stall_share_low=max(0.0, made.stall_share - points),
            stall_share_high=min(1.0, made.stall_share + points),
            store_bytes=made.store_bytes,
            store_bytes_low=made.store_bytes * low.get("store_bytes", 1.0),
            store_bytes_high=made.store_bytes * high.get("store_bytes", 1.0),
            peer_bytes=made.peer_bytes,
            peer_bytes_low=made.peer_bytes * low.get("peer_bytes", 1.0),
            peer_bytes_high=made.peer_bytes * high.get("peer_bytes", 1.0),
            memory_bytes=made.memory_bytes,
            disk_bytes=float(settings.disk_cache_bytes or 0),
            store_bytes_s=settings.dataset_bytes / made.epoch_s[0],
            link_bytes_s=made.peer_bytes / settings.nodes / sum(made.epoch_s),
            limit=made.limit,
            num_ranks=settings.num_ranks,
            notes=(*self.notes, *self._question_notes(what_if)),
        )

    def _question_notes(self, what_if: WhatIf) -> tuple[str, ...]:
        """Return what the run does not show that this question needs."""
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
        if settings.steps_per_epoch < STEPS_FEW <= self.settings.steps_per_epoch:
            steps = "step" if settings.steps_per_epoch == 1 else "steps"
            out.append(
                f"with {settings.num_ranks:,} ranks the {settings.num_samples:,} samples are "
                f"{settings.steps_per_epoch} {steps} an epoch, in which loaders hardly begin; "
                "--samples says the size of the data set that such a job would have"
            )
        if settings.batch_size != self.settings.batch_size and not constants.compute_fixed_s:
            out.append("the time of a step is taken to grow with its batch")
        return tuple(out)
