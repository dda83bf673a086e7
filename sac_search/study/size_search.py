"""The search at one batch size, as a search over batch sizes sees it: what it has, what it may win.

It measures with the ordinary `Search`, into a study like any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sac_search import units
from sac_search.errors import WorkloadError
from sac_search.failures import OF_MEMORY
from sac_search.policy import checkpoint_layers
from sac_search.study.allocation import Standing, idle_trials, none_seconds_by
from sac_search.study.baselines import FULL, NONE
from sac_search.study.batches import SizeRecord, SizeState
from sac_search.study.candidate import Candidate
from sac_search.study.measurer import Measurer
from sac_search.study.result import find_candidate, floor_of
from sac_search.study.search import Search
from sac_search.study.store import StudyStore
from sac_search.study.throughput_result import ranked_candidates

# By forecast over the budget beyond doubt.
_FORECAST_ERROR_FRACTION = 0.01


class SizeMeasurer(Measurer, Protocol):
    """Measures the step of one batch size. Takes up no device between `close` and the next use."""

    def close(self) -> None:
        """Lets the device go."""


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """The search at one batch size."""

    batch_size: int
    """What the factory is asked for."""
    samples: int
    """Samples in a step, as the workload says itself."""
    store: StudyStore
    """The study of this size."""
    search: Search
    """What measures into it."""
    measurer: SizeMeasurer
    """Who measures."""
    full_peak_bytes: int | None = None
    """Peak under full checkpointing, by forecast."""
    bound: float | None = None
    """Samples per second that no policy is believed to exceed; None where that is not known."""
    done: str = ""
    """Why nothing is left to measure at this size, however many trials there are."""

    @property
    def best(self) -> Candidate | None:
        """The best policy that fits."""
        return next(iter(ranked_candidates(self.store)), None)

    @property
    def trials(self) -> int:
        """Trials that were measured at this size."""
        return len(self.search.trial_candidates())

    def find(self, name: str) -> Candidate | None:
        """Returns the candidate of that name."""
        return find_candidate(self.store.candidates(), name)

    def throughput(self, candidate: Candidate | None) -> float | None:
        """Returns the samples per second of a candidate."""
        if candidate is None or not candidate.step_seconds:
            return None
        return self.samples / candidate.step_seconds

    def measure_ends(self, deadline: float, *, with_plan: bool) -> None:
        """Measures full and no checkpointing, and where these leave anything open, a plan.

        Raises:
            WorkloadError: neither step runs, and not for memory.
        """
        layers = [layer.name for layer in self.store.layers]
        if self.full_peak_bytes is None:
            self.full_peak_bytes = self.measurer.forecast(checkpoint_layers(layers)).peak_bytes
        budget_bytes = self.store.budget_bytes
        if self.full_peak_bytes is not None and is_over(self.full_peak_bytes, budget_bytes):
            self.done = reason_of_peak(self.full_peak_bytes)
            return
        first = self.search.measure_first()
        failures = [candidate.failure for candidate in first.values()]
        others = [f for f in failures if f is not None and f.kind not in OF_MEMORY]
        if None not in failures and others:
            raise WorkloadError(
                f"no step runs at batch size {self.batch_size}, neither with nor without "
                f"checkpointing: {others[0].kind}. {others[0].advice}\n{others[0].message}"
            )
        floor_bytes = floor_of(first.get(FULL), self.store.layers)
        none = first.get(NONE)
        if none is not None and none.fits(budget_bytes):
            self.done = "the step fits without checkpointing"
        elif floor_bytes is not None and floor_bytes > budget_bytes:
            self.done = f"its floor, {units.format_gib(floor_bytes)}, is over the budget"
        elif with_plan and not self.trials:
            self.measure(1, deadline)

    def measure(self, count: int, deadline: float) -> None:
        """Measures further trials; `deadline` is on the clock of `time.monotonic`."""
        reason = self.search.run_some(count)
        if time.monotonic() < deadline:  # else the time is over, and not what there is to measure
            self.done = reason

    def update_bound(self, smaller: Sequence[SizeSearch]) -> None:
        """Finds anew what no policy of this size is believed to exceed.

        `smaller` are the sizes below, the nearest last: what they lose by full checkpointing tells
        how fast this one would be without any, where that does not run.
        """
        known = self.throughput(self.best) or 0.0
        none, full = self.find(NONE), self.find(FULL)
        if none is not None and none.fits(self.store.budget_bytes):
            self.bound = known
            return
        if full is None or full.step_seconds is None:
            self.bound = None
            return
        if none is not None and none.step_seconds is not None:
            none_seconds = none.step_seconds
        else:
            ends = [(size.find(NONE), size.find(FULL)) for size in smaller]
            both = [
                (none.step_seconds, full.step_seconds)
                for none, full in ends
                if none is not None and none.step_seconds and full is not None and full.step_seconds
            ]
            recompute_seconds = self.search.recompute_seconds()
            none_seconds = none_seconds_by(full.step_seconds, both, recompute_seconds)
        seconds = none_seconds + (self.search.lowest_overhead_seconds() or 0.0)
        self.bound = max(known, self.samples / seconds) if seconds > 0 else None

    def standing(self) -> Standing:
        """Returns how this size does so far."""
        best = self.best
        throughput = self.throughput(best)
        return Standing(
            batch_size=self.batch_size,
            samples_per_second=throughput,
            noise_fraction=noise_of(best),
            # Where no bound is known, any throughput is possible.
            bound_samples_per_second=max(self.bound or math.inf, throughput or 0.0),
            idle_trials=idle_trials(self.store.candidates(), self.store.budget_bytes),
            is_done=bool(self.done),
        )

    def record(self, reason: str = "") -> SizeRecord:
        """Returns what the study over batch sizes keeps of this one."""
        return SizeRecord(
            batch_size=self.batch_size,
            samples=self.samples,
            state=SizeState.MEASURED if self.best is not None else SizeState.TOO_LARGE,
            reason=self.done or reason,
            is_done=bool(self.done),
            full_peak_bytes=self.full_peak_bytes,
            bound_samples_per_second=self.bound,
        )


def is_over(peak_bytes: int, budget_bytes: int) -> bool:
    """Returns whether a forecast peak is over the budget beyond doubt."""
    return peak_bytes > budget_bytes * (1 + _FORECAST_ERROR_FRACTION)


def reason_of_peak(peak_bytes: int, *, is_exact: bool = True) -> str:
    """Returns why no policy fits, by the forecast of full checkpointing, or by what it exceeds."""
    return (
        f"by forecast its peak is {'' if is_exact else 'more than '}"
        f"{units.format_gib(peak_bytes)} with every layer checkpointed"
    )


def noise_of(candidate: Candidate | None) -> float:
    """Returns the noise of a candidate's step time, as a fraction of it."""
    if candidate is None or candidate.measurement is None:
        return 0.0
    return candidate.measurement.step_noise_fraction
