"""Proposes policies that widen the front of step time against peak.

Where the measured front has its widest gaps the planner is asked for the fastest policy of a peak
in between; first by the most likely costs, then by draws of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterable, Sequence

import numpy as np

from sac_search.planning import PlannedPolicy
from sac_search.space import Assignment, Choices
from sac_search.study.advisor import Advisor
from sac_search.study.candidate import Candidate
from sac_search.study.front import Gap, Spot, gain_of, gaps_of, pareto_front, spot_of

# Places in a gap to plan for, as parts of its width.
_PLACES = (0.5, 0.25, 0.75, 0.999)
_WIDEST_GAPS = 6
_MOST_DRAWS = 4
_SPREAD_PER_DRAW = 0.35
_DRY_RUNS = 2
_MOST_SECONDS = 20.0
_MOST_NEIGHBOURS = 12
# A gain of a smaller part of what the front spans is not worth a trial.
_SMALLEST_GAIN_FRACTION = 1e-6


class FrontAdvisor(Advisor):
    """The advisor of a search for the whole front."""

    def learn(self, candidates: Iterable[Candidate]) -> None:
        """Makes `candidates` all that is known."""
        self._candidates: list[Candidate] = list(candidates)
        super().learn(self._candidates)

    def plan(self, budget_fraction: float = 1.0) -> PlannedPolicy | None:
        """Returns the fastest policy by likely costs, so far from full to no checkpointing."""
        lowest, highest = self._forecast_ends
        limit = round(lowest + budget_fraction * (highest - lowest))
        highest_forecast = self._peaks.highest_forecast(self._budget_bytes)
        return self._planner.plan(min(limit, highest_forecast), self._costs.prices())

    def propose(
        self,
        known: Container[str],
        generator: np.random.Generator,
        best: Sequence[Assignment] = (),
    ) -> Assignment | None:
        """Returns a policy that could be on the front and whose key is not in `known`."""
        deadline = time.monotonic() + _MOST_SECONDS
        front = pareto_front(self._candidates, self._budget_bytes)
        spots = [spot_of(candidate) for candidate in front]
        least_gain = _SMALLEST_GAIN_FRACTION * _extent(spots)
        gaps = self._gaps(spots)
        for number in range(_MOST_DRAWS):
            prices = self._costs.prices()
            if number > 0:
                prices = self._costs.draw(generator, 1 + _SPREAD_PER_DRAW * (number - 1))
            places = _PLACES if number == 0 else (generator.uniform(0.05, 1.0),)
            for gap, place in itertools.product(gaps, places):
                if number > 1 and time.monotonic() > deadline:
                    break
                limit = self._limit_in(gap, place)
                planned = self._planner.plan(limit, prices, dry_runs=_DRY_RUNS)
                if planned is None or not planned.choices or self._key(planned.choices) in known:
                    continue
                spot = self._expected(planned.peak_bytes, planned.overhead_seconds)
                if gain_of(spot, spots) > least_gain:
                    return self._space.assignment_of(planned.choices, self._mode)
        return self._near_front(best, known, spots)

    def _gaps(self, spots: Sequence[Spot]) -> list[Gap]:
        """Returns the widest gaps, and the room that is left below the smallest peak."""
        gaps = gaps_of(spots)[:_WIDEST_GAPS]
        lowest = self._peaks.expected(self._forecast_ends[0])
        if spots and lowest < spots[0].peak_bytes:
            slow = Spot(peak_bytes=lowest, step_seconds=spots[0].step_seconds)
            gaps.append(Gap(left=slow, right=spots[0]))
        return gaps

    def _limit_in(self, gap: Gap, place: float) -> int:
        width = gap.right.peak_bytes - gap.left.peak_bytes
        return self._peaks.highest_forecast(round(gap.left.peak_bytes + place * width))

    def _expected(self, peak_bytes: int, overhead_seconds: float) -> Spot:
        seconds = self._costs.none_seconds + self._costs.start_seconds + overhead_seconds
        return Spot(peak_bytes=self._peaks.expected(peak_bytes), step_seconds=seconds)

    def _near_front(
        self, best: Sequence[Assignment], known: Container[str], spots: Sequence[Spot]
    ) -> Assignment | None:
        """Returns the unknown neighbour of the front that should gain most, dry-run."""
        planner, prices = self._planner, self._costs.prices()
        found: dict[str, tuple[float, Choices, Assignment]] = {}
        for start in best:
            before = self._space.choices_for(start)
            peak_bytes = planner.peak_bytes(before)
            if peak_bytes is None:
                continue
            for assignment in self._neighbours([start]):
                choices = self._space.choices_for(assignment)
                key = self._key(choices)
                if not choices or key in known or key in found:
                    continue
                # What more is kept between forward and backward is about what more it peaks.
                more_bytes = planner.kept_bytes(choices) - planner.kept_bytes(before)
                overhead_seconds = planner.overhead_of(choices, prices)
                gain = gain_of(self._expected(peak_bytes + more_bytes, overhead_seconds), spots)
                found[key] = (gain, choices, assignment)
        promising = sorted(found.values(), key=lambda entry: -entry[0])[:_MOST_NEIGHBOURS]
        least_gain = _SMALLEST_GAIN_FRACTION * _extent(spots)
        for _, choices, assignment in promising:
            peak_bytes = planner.peak_bytes(choices)
            if peak_bytes is None:
                continue
            spot = self._expected(peak_bytes, planner.overhead_of(choices, prices))
            within = spot.peak_bytes <= self._budget_bytes
            if within and gain_of(spot, spots) > least_gain:
                return assignment
        return None

    def bound_seconds(self) -> float | None:
        """Returns None: there is no one budget to bound the step time under."""
        return None

    def _budget_of_frontier(self, lowest_bytes: int, highest_bytes: int) -> int:
        return min(self._budget_bytes, highest_bytes)


def _extent(spots: Sequence[Spot]) -> float:
    """Returns the bytes times seconds that a front spans."""
    if not spots:
        return 0.0
    left, right = spots[0], spots[-1]
    return (right.peak_bytes - left.peak_bytes) * (left.step_seconds - right.step_seconds)
