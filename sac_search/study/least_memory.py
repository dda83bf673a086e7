"""Proposes policies that could have the least peak within a limit on the overhead.

The planner answers the other question, the fastest policy under a budget. Its overhead grows as the
budget shrinks, so the smallest budget whose plan is within the limit is found by halving.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence

import numpy as np

from sac_search.planning import PlannedPolicy, PolicyPlanner, Prices
from sac_search.space import Assignment
from sac_search.study.advisor import Advisor
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.goal import Limits

# A part of the range between full and no checkpointing to which the smallest budget is found.
_RESOLUTION_FRACTION = 0.004
_MOST_HALVINGS = 8
# For each budget; what a draw of the costs leads to need not be so exact.
_DRY_RUNS = 3
_DRY_RUNS_OF_DRAWS = 1
_MOST_DRAWS = 6
_SPREAD_PER_DRAW = 0.35
_MOST_SECONDS = 20.0
_MOST_NEIGHBOURS = 12


def least_plan(
    planner: PolicyPlanner,
    prices: Prices,
    most_seconds: float,
    ends: tuple[int, int],
    *,
    start_seconds: float = 0.0,
    dry_runs: int = _DRY_RUNS,
) -> PlannedPolicy | None:
    """Returns the policy of least peak whose overhead is at most `most_seconds` by the prices.

    `ends` are the smallest and the largest budget to plan for, `start_seconds` is what
    checkpointing anything costs beside the prices. None when not even the largest budget has
    such a plan.
    """
    low, high = ends
    resolution = max(1, round(_RESOLUTION_FRACTION * (high - low)))
    planner.plan(high, prices, dry_runs=dry_runs)
    for _ in range(_MOST_HALVINGS):
        found = planner.least(most_seconds, prices, start_seconds=start_seconds)
        if found is not None:
            high = min(high, found.peak_bytes)
        if high - low <= resolution:
            break
        middle = (low + high) // 2
        planned = planner.plan(middle, prices, dry_runs=dry_runs)
        if planned is None or planned.overhead_seconds + start_seconds > most_seconds:
            low = middle
    return planner.least(most_seconds, prices, start_seconds=start_seconds)


class LeastMemoryAdvisor(Advisor):
    """The advisor of a search for the least peak."""

    def learn(self, candidates: Iterable[Candidate]) -> None:
        """Makes `candidates` all that is known."""
        self._candidates: list[Candidate] = list(candidates)
        super().learn(self._candidates)

    def plan(self, budget_fraction: float = 1.0) -> PlannedPolicy | None:
        """Returns the policy of least peak by likely costs, for a part of the highest overhead."""
        return self._least(self._costs.prices(), budget_fraction * self._most_seconds)

    def propose(
        self,
        known: Container[str],
        generator: np.random.Generator,
        best: Sequence[Assignment] = (),
    ) -> Assignment | None:
        """Returns a policy whose peak could be the least and whose key is not in `known`.

        By the most likely costs, then by draws of them, then next to `best`. Peaks are known so
        much better than seconds that what cannot lower the peak is never proposed.
        """
        deadline = time.monotonic() + _MOST_SECONDS
        highest_bytes = self._highest_worth()
        for number in range(_MOST_DRAWS):
            if number > 1 and time.monotonic() > deadline:
                break
            prices, dry_runs = self._costs.prices(), _DRY_RUNS
            if number > 0:
                prices = self._costs.draw(generator, 1 + _SPREAD_PER_DRAW * (number - 1))
                dry_runs = _DRY_RUNS_OF_DRAWS
            planned = self._least(prices, self._most_seconds, dry_runs)
            if planned is None or self._peaks.expected(planned.peak_bytes) >= highest_bytes:
                continue
            if planned.choices and self._key(planned.choices) not in known:
                return self._space.assignment_of(planned.choices, self._mode)
        return self._near(best, known)

    def _near(self, best: Sequence[Assignment], known: Container[str]) -> Assignment | None:
        """Returns an unknown neighbour of `best` within the limit whose dry run peaks lower."""
        planner, prices, highest_bytes = self._planner, self._costs.prices(), self._highest_worth()
        most_seconds = self._most_seconds - self._costs.start_seconds
        found: dict[str, tuple[int, Assignment]] = {}
        for assignment in self._neighbours(best):
            choices = self._space.choices_for(assignment)
            key = self._key(choices)
            if (
                choices
                and key not in known
                and planner.overhead_of(choices, prices) <= most_seconds
            ):
                found.setdefault(key, (planner.kept_bytes(choices), assignment))
        promising = sorted(found.values(), key=lambda pair: pair[0])[:_MOST_NEIGHBOURS]
        for _, assignment in promising:
            peak_bytes = planner.peak_bytes(self._space.choices_for(assignment))
            if peak_bytes is not None and self._peaks.expected(peak_bytes) < highest_bytes:
                return assignment
        return None

    def bound_seconds(self) -> float | None:
        """Returns None: there is no budget to bound the step time under."""
        return None

    @property
    def none_seconds(self) -> float:
        """The step without checkpointing: measured, or what the costs say of it."""
        measured = (c.step_seconds for c in self._candidates if c.policy.changes_nothing)
        return next((s for s in measured if s is not None), self._costs.none_seconds)

    @property
    def _most_seconds(self) -> float:
        assert self._goal.max_overhead_fraction is not None
        return self._goal.max_overhead_fraction * self.none_seconds

    def _highest_worth(self) -> float:
        """Returns the least peak that was measured within the limits: only less is worth a step."""
        limits = Limits(budget_bytes=self._budget_bytes, none_seconds=self.none_seconds)
        ranked = self._goal.rank(self._candidates, limits)
        return peak_of(ranked[0]) if ranked else self._budget_bytes

    def _least(
        self, prices: Prices, most_seconds: float, dry_runs: int = _DRY_RUNS
    ) -> PlannedPolicy | None:
        lowest, highest = self._forecast_ends
        limit = self._peaks.highest_forecast(self._budget_bytes)
        ends = (lowest, max(lowest, min(highest, limit)))
        return least_plan(
            self._planner,
            prices,
            most_seconds,
            ends,
            start_seconds=self._costs.start_seconds,
            dry_runs=dry_runs,
        )

    def _budget_of_frontier(self, lowest_bytes: int, highest_bytes: int) -> int:
        return min(self._budget_bytes, highest_bytes)
