"""What a search is for: the one place that says which policy is better than another.

A goal is pure data with the rules that follow from it: what Optuna is told, which policies are
within its limits, and in which order they come. How to find them is the advisors' part.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sac_search import units
from sac_search.records import FailureKind, Outcome
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, peak_of, rank
from sac_search.study.front import pareto_front, spot_of, undominated_fraction

# Names of the constraints in every trial: at most zero when the policy is within the limit.
BUDGET_CONSTRAINT = "peak_over_budget_gib"
OVERHEAD_CONSTRAINT = "overhead_over_limit_fraction"

# A trial without figures is told as this many times the reference step, or the highest peak: worse
# than anything that ran, so that samplers turn away from it.
_FAILED_FACTOR = 2.0
# What is told of the overhead of a trial that has none.
_FAILED_OVERHEAD = 1.0
# Noise is no excuse for more overhead than this above the limit.
_LARGEST_DOUBT_FRACTION = 0.05
# Of a front, the last trials have to win more than this part of what is left.
_SMALLEST_FRONT_GAIN = 0.01
_ROUNDING = 1e-12


class GoalKind(enum.StrEnum):
    """What is wanted."""

    SPEED = "speed"
    """The fastest step under a budget."""
    MEMORY = "memory"
    """The least peak within a limit on the overhead."""
    PARETO = "pareto"
    """The fastest step for every peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the candidates of a study are held against."""

    budget_bytes: int
    """The budget, or all that the device has where none was given."""
    none_seconds: float | None = None
    """The step without checkpointing, measured or estimated; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What Optuna learns of a trial."""

    values: tuple[float, ...]
    """One for each of the goal's metrics."""
    constraints: dict[str, float]
    """By name; at most zero where the limit is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a search went, in the figure that its goal makes small."""

    history: tuple[float | None, ...]
    """The best after each trial; None while there is none."""
    noise_fraction: float
    """A gain smaller than this says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a search is for."""

    kind: GoalKind = GoalKind.SPEED
    """What is wanted."""
    max_overhead_fraction: float | None = None
    """The highest overhead, when the least peak is wanted."""
    has_budget: bool = True
    """Whether a budget was given; without one nothing but the device limits the peak."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the values that a trial is told; each is to be as small as can be."""
        if self.kind is GoalKind.PARETO:
            return ("step_seconds", "peak_gib")
        return ("peak_gib",) if self.kind is GoalKind.MEMORY else ("step_seconds",)

    @property
    def directions(self) -> list[Literal["minimize"]]:
        """Optuna's directions, one for each metric."""
        return ["minimize" for _ in self.metric_names]

    @property
    def plan_fractions(self) -> tuple[float, ...]:
        """What to plan for first: parts of the budget, or of the highest overhead, or of the way
        from full to no checkpointing."""
        if self.kind is GoalKind.PARETO:
            return (0.5, 0.25, 0.75, 0.1, 0.9)
        if self.kind is GoalKind.MEMORY:
            return (1.0, 0.95, 0.85, 1.05, 0.7)
        return (1.0, 0.95, 0.9, 1.05, 1.1)

    @property
    def is_met_by_none(self) -> bool:
        """Whether a step that fits without checkpointing leaves nothing to search."""
        return self.kind is GoalKind.SPEED

    def describe(self) -> str:
        """Returns the goal in a few words, its budget left out."""
        if self.kind is GoalKind.MEMORY:
            return f"least peak, overhead at most {self.limit_text}"
        if self.kind is GoalKind.PARETO:
            return "the fastest step for every peak"
        return "fastest step under a budget"

    @property
    def gain(self) -> str:
        """What another policy would have to do to be better: `be faster`."""
        if self.kind is GoalKind.PARETO:
            return "widen the front"
        return "peak lower" if self.kind is GoalKind.MEMORY else "be faster"

    @property
    def limit_text(self) -> str:
        """The highest overhead, for people."""
        return f"{100 * (self.max_overhead_fraction or 0.0):g}%"

    # --- limits -----------------------------------------------------------------------------------

    def overhead_of(self, candidate: Candidate, limits: Limits) -> float | None:
        """Returns the step time above that without checkpointing, as a fraction of it."""
        if candidate.step_seconds is None or not limits.none_seconds:
            return None
        return candidate.step_seconds / limits.none_seconds - 1

    def is_too_slow(self, candidate: Candidate, limits: Limits) -> bool:
        """Whether a candidate that ran is above the highest overhead."""
        return self._is_slower(candidate, limits, doubt=0.0)

    def _is_slower(self, candidate: Candidate, limits: Limits, doubt: float) -> bool:
        if self.max_overhead_fraction is None:
            return False
        if candidate.step_seconds is None or not limits.none_seconds:
            return True  # it cannot be told, and what is not known is not within
        highest = limits.none_seconds * (1 + self.max_overhead_fraction + doubt)
        return candidate.step_seconds > highest * (1 + _ROUNDING)

    def verdict(self, candidate: Candidate, limits: Limits) -> str:
        """Returns how a candidate that ran stands to the limits, in a few words."""
        if not candidate.fits(limits.budget_bytes):
            return "over the budget"
        return "too slow" if self.is_too_slow(candidate, limits) else "fits"

    def fits(self, candidate: Candidate, limits: Limits) -> bool:
        """Whether a candidate was measured to be within every limit."""
        return candidate.fits(limits.budget_bytes) and not self.is_too_slow(candidate, limits)

    def is_better(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether one of two candidates within the limits is better, noise left out."""
        one, two = self._figure(candidate), self._figure(other)
        return two is None or (one is not None and one < two)

    # --- order ------------------------------------------------------------------------------------

    def rank(self, candidates: Iterable[Candidate], limits: Limits) -> list[Candidate]:
        """Returns the candidates within the limits, best first; of a whole front the fastest."""
        if self.kind is not GoalKind.MEMORY:
            return rank(candidates, limits.budget_bytes)
        return _rank_by_peak((c for c in candidates if self.fits(c, limits)), limits)

    def starts(self, candidates: Iterable[Candidate], limits: Limits, most: int) -> list[Candidate]:
        """Returns the candidates to look around: the best few, or all of a front."""
        if self.kind is GoalKind.PARETO:
            return pareto_front(candidates, limits.budget_bytes)
        return self.rank(candidates, limits)[:most]

    def rank_with_doubt(self, candidates: Iterable[Candidate], limits: Limits) -> list[Candidate]:
        """Returns the candidates that are within the limits, or could be but for noise."""
        known = list(candidates)
        none = next((c for c in known if c.name == NONE), None)
        found = [
            c
            for c in known
            if c.fits(limits.budget_bytes) and not self._is_slower(c, limits, _doubt(c, none))
        ]
        return _rank_by_peak(found, limits)

    def progress(
        self, before: Iterable[Candidate], trials: Iterable[Candidate], limits: Limits
    ) -> Progress:
        """Returns how the best went down from trial to trial; `before` were known already."""
        if self.kind is GoalKind.PARETO:
            return _progress_of_front(list(before), trials, limits)
        ranked = self.rank(before, limits)
        figure = self._figure
        best = min((f for c in ranked if (f := figure(c)) is not None), default=None)
        history: list[float | None] = []
        noises = []
        for candidate in trials:
            if self.fits(candidate, limits):
                found = figure(candidate)
                assert found is not None and candidate.measurement is not None
                best = min(found, best or found)
                noises.append(candidate.measurement.step_noise_fraction)
            history.append(best)
        noise = sorted(noises)[len(noises) // 2] if noises else 0.0
        # A peak has no noise worth waiting for.
        return Progress(
            history=tuple(history), noise_fraction=noise if self.kind is GoalKind.SPEED else 0.0
        )

    def _figure(self, candidate: Candidate) -> float | None:
        if self.kind is not GoalKind.MEMORY:
            return candidate.step_seconds
        return None if candidate.measurement is None else candidate.measurement.peak_bytes

    # --- what Optuna is told ----------------------------------------------------------------------

    def told(
        self,
        outcome: Outcome,
        seconds: float | None,
        limits: Limits,
        *,
        anchor_seconds: float,
        highest_peak_bytes: int,
    ) -> Told:
        """Returns the values and constraints that samplers learn from.

        `highest_peak_bytes` is the highest peak that was measured so far; 0 before any.
        """
        excess_bytes, peak_bytes = limits.budget_bytes, None
        if outcome.measurement is not None:
            peak_bytes = outcome.measurement.peak_bytes
        elif outcome.failure is not None:
            if outcome.failure.kind is FailureKind.FORECAST_OVER_BUDGET:
                peak_bytes = outcome.forecast_peak_bytes
                assert peak_bytes is not None
            seconds = None
        if peak_bytes is not None:
            excess_bytes = peak_bytes - limits.budget_bytes
        excess_gib = excess_bytes / units.GIB
        if self.kind is GoalKind.SPEED:
            value = _FAILED_FACTOR * anchor_seconds if seconds is None else seconds
            return Told(values=(value,), constraints={BUDGET_CONSTRAINT: excess_gib})
        if peak_bytes is None:
            peak_bytes = round(_FAILED_FACTOR * (highest_peak_bytes or limits.budget_bytes))
        if self.kind is GoalKind.PARETO:
            value = _FAILED_FACTOR * anchor_seconds if seconds is None else seconds
            constraints = {BUDGET_CONSTRAINT: excess_gib} if self.has_budget else {}
            return Told(values=(value, peak_bytes / units.GIB), constraints=constraints)
        assert self.max_overhead_fraction is not None
        excess = _FAILED_OVERHEAD
        if seconds is not None:
            # What cannot be told yet is neither within nor above.
            overhead = seconds / limits.none_seconds - 1 if limits.none_seconds else None
            excess = 0.0 if overhead is None else overhead - self.max_overhead_fraction
        constraints = {OVERHEAD_CONSTRAINT: excess}
        if self.has_budget:
            constraints[BUDGET_CONSTRAINT] = excess_gib
        return Told(values=(peak_bytes / units.GIB,), constraints=constraints)


SPEED = Goal()
"""The fastest step under a budget."""


def _progress_of_front(
    before: Sequence[Candidate], trials: Iterable[Candidate], limits: Limits
) -> Progress:
    """Returns how what is left of the trade-off went down, from full to no checkpointing."""
    named = {c.name: c for c in before if c.measurement is not None}
    if not {NONE, FULL} <= named.keys():
        return Progress(history=(), noise_fraction=0.0)
    ends = (spot_of(named[FULL]), spot_of(named[NONE]))
    known = [spot_of(c) for c in before if c.fits(limits.budget_bytes)]
    history: list[float | None] = []
    for candidate in trials:
        if candidate.fits(limits.budget_bytes):
            known.append(spot_of(candidate))
        history.append(undominated_fraction(known, ends))
    return Progress(history=tuple(history), noise_fraction=_SMALLEST_FRONT_GAIN)


def _rank_by_peak(fitting: Iterable[Candidate], limits: Limits) -> list[Candidate]:
    """Returns the candidates, the least peak first; those of equal peaks as `rank` has them."""
    alike: dict[int, list[Candidate]] = {}
    for candidate in fitting:
        alike.setdefault(peak_of(candidate), []).append(candidate)
    return [c for peak in sorted(alike) for c in rank(alike[peak], limits.budget_bytes)]


def _doubt(candidate: Candidate, none: Candidate | None) -> float:
    noises = [
        c.measurement.step_noise_fraction
        for c in (candidate, none)
        if c is not None and c.measurement is not None
    ]
    return min(2 * math.hypot(*noises), _LARGEST_DOUBT_FRACTION)
