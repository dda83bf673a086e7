"""Proposes policies that could be the fastest, given everything that was measured so far.

Costs are drawn from what is believed of them, and the planner solves for the drawn costs (Thompson
sampling over an exact solver): a policy is proposed as often as it is likely to be the best.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sac_search.cost_model import CostModel, Observation, PeakModel, PeakObservation
from sac_search.planner import solve, solve_greedily
from sac_search.planning import DryRun, PlannedPolicy, PolicyPlanner, Prices
from sac_search.profile import Profile
from sac_search.space import Assignment, Choices, RunMode, SearchSpace
from sac_search.study.candidate import Candidate
from sac_search.study.goal import SPEED, Goal
from sac_search.study.insights import (
    FrontierEstimate,
    Insights,
    budgets_along,
    plan_frontier,
    price_list,
)
from sac_search.study.neighbours import all_neighbours

# Draws until a policy is met that was not measured; each is drawn from further afield.
_MOST_DRAWS = 10
_SPREAD_PER_DRAW = 0.35
# No further draw begins after this: a trial costs about as much.
_MOST_SECONDS = 20.0
# Dry runs for one draw; what they teach is kept for the next.
_DRY_RUNS = 3
# Sums of bytes are lumpy: a plan for a little less may be another one, and as good.
_SMALLEST_DRAWN_BUDGET = 0.97
# Beliefs about costs that a bound is to hold under.
_BOUND_DRAWS = 8
# Neighbours of the best to dry-run, the most promising first.
_MOST_NEIGHBOURS = 12


class Advisor:
    """What is believed of one workload's costs, and the planner that solves for them.

    In one mode: what runs compiled has other costs than what runs eagerly. Dry runs are eager; the
    peaks of a compiled step are held against those of the same choices.
    """

    def __init__(
        self,
        *,
        space: SearchSpace,
        profile: Profile,
        dry_run: DryRun,
        budget_bytes: int,
        greedy: bool = False,
        mode: RunMode = RunMode.EAGER,
        goal: Goal = SPEED,
    ) -> None:
        self._goal = goal
        self._space = space
        self._mode = mode
        self._profile = profile
        self._budget_bytes = budget_bytes
        if mode is not RunMode.EAGER:  # the policy is asked when the graph is made, not in a step
            profile = self._profile = replace(profile, policy_call_seconds=0.0)
        solver = solve_greedily if greedy else solve
        self._planner = PolicyPlanner(profile, space, dry_run, solver=solver)
        self.learn([])

    @property
    def none_seconds(self) -> float:
        """The step without checkpointing, by what is believed of costs."""
        return self._costs.none_seconds

    def learn(self, candidates: Iterable[Candidate]) -> None:
        """Makes `candidates` all that is known; those of other modes are left out."""
        steps, peaks = [], []
        for candidate in candidates:
            if self._space.mode_of(candidate.policy) is not self._mode:
                continue
            measurement = candidate.measurement
            choices = self._space.choices_of(candidate.policy)
            if measurement is None or candidate.step_seconds is None or choices is None:
                continue
            observation = Observation(
                choices=choices,
                through_policy=candidate.policy.through_policy,
                seconds=candidate.step_seconds,
                noise_fraction=measurement.step_noise_fraction,
            )
            steps.append(observation)
            forecast_bytes = candidate.outcome.forecast_peak_bytes
            if self._mode is not RunMode.EAGER:
                forecast_bytes = self._planner.peak_bytes(choices)
            if forecast_bytes is not None:
                peak = PeakObservation(
                    forecast_bytes=forecast_bytes, measured_bytes=measurement.peak_bytes
                )
                peaks.append(peak)
        self._costs = CostModel(self._profile, steps)
        self._peaks = PeakModel(peaks)

    def plan(self, budget_fraction: float = 1.0) -> PlannedPolicy | None:
        """Returns the fastest policy by the most likely costs, for a part of the budget."""
        limit = round(budget_fraction * self._peaks.highest_forecast(self._budget_bytes))
        return self._planner.plan(limit, self._costs.prices())

    def layer_subset(self) -> Choices | None:
        """Returns the fewest layers of plain checkpointing that keep the budget by dry run."""
        return self._planner.layer_subset(self._peaks.highest_forecast(self._budget_bytes))

    def propose(
        self,
        known: Container[str],
        generator: np.random.Generator,
        best: Sequence[Assignment] = (),
    ) -> Assignment | None:
        """Returns a policy that could be the fastest and whose key is not in `known`.

        First by the most likely costs, then by draws; when all of them lead to known ones, what is
        most promising next to `best`. None when nothing there fits, either.
        """
        deadline = time.monotonic() + _MOST_SECONDS
        for number in range(_MOST_DRAWS):
            if number > 1 and time.monotonic() > deadline:
                break
            prices = self._costs.prices()
            limit = self._peaks.highest_forecast(self._budget_bytes)
            if number > 0:
                spread = 1 + _SPREAD_PER_DRAW * (number - 1)
                prices = self._costs.draw(generator, spread)
                limit = self._peaks.highest_forecast(self._budget_bytes, generator, spread)
                limit = round(limit * generator.uniform(_SMALLEST_DRAWN_BUDGET, 1.0))
            planned = self._planner.plan(limit, prices, dry_runs=_DRY_RUNS)
            if planned is not None and self._key(planned.choices) not in known:
                return self._space.assignment_of(planned.choices, self._mode)
        return self._near(best, known)

    def _near(self, best: Sequence[Assignment], known: Container[str]) -> Assignment | None:
        """Returns the most promising unknown neighbour of `best` whose dry run fits."""
        planner, prices = self._planner, self._costs.prices()
        limit = self._peaks.highest_forecast(self._budget_bytes)
        found: dict[str, tuple[float, Assignment]] = {}
        for start in best:
            before = self._space.choices_for(start)
            peak_bytes = planner.peak_bytes(before)
            if peak_bytes is None:
                continue
            # Where the peak is at the start of backward it grows with all that is kept.
            most_kept = planner.kept_bytes(before) + max(0, limit - peak_bytes)
            for assignment in all_neighbours(self._space, start):
                choices = self._space.choices_for(assignment)
                key = self._key(choices)
                if choices and key not in known and planner.kept_bytes(choices) <= most_kept:
                    found.setdefault(key, (planner.overhead_of(choices, prices), assignment))
        promising = sorted(found.values(), key=lambda pair: pair[0])[:_MOST_NEIGHBOURS]
        for _, assignment in promising:
            peak_bytes = planner.peak_bytes(self._space.choices_for(assignment))
            if peak_bytes is not None and peak_bytes <= limit:
                return assignment
        return None

    def _neighbours(self, starts: Sequence[Assignment]) -> Iterator[Assignment]:
        return (near for start in starts for near in all_neighbours(self._space, start))

    def _key(self, choices: Choices) -> str:
        return self._space.policy_of(choices, self._mode).key

    def bound_seconds(self) -> float | None:
        """Returns overhead seconds that no policy of this form can go under, by likely costs."""
        limit = self._peaks.highest_forecast(self._budget_bytes)
        bound_seconds = self._planner.bound(limit, self._costs.prices())
        # Nothing that has to be checkpointed goes without the start; a bound of zero may.
        return bound_seconds and bound_seconds + self._costs.start_seconds

    def lowest_overhead_seconds(self, generator: np.random.Generator) -> float | None:
        """Returns the least of the bounds that several beliefs about costs lead to."""
        limit = self._peaks.highest_forecast(self._budget_bytes)
        beliefs = [self._costs.prices()]
        beliefs += [self._costs.draw(generator) for _ in range(_BOUND_DRAWS)]
        bounds = [self._planner.bound(limit, prices) for prices in beliefs]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def recompute_seconds(self) -> float:
        """What full checkpointing recomputes in one step, as traced."""
        return self._profile.recompute_seconds

    def insights(self) -> Insights:
        """Returns what is believed of costs, and the trade-off as far as it is planned in time."""
        prices = self._costs.prices()
        saves, layers = price_list(self._profile, prices)
        return Insights(saves=saves, layers=layers, frontier=self._frontier(prices))

    @property
    def _forecast_ends(self) -> tuple[int, int]:
        """The forecast peaks of full and of no checkpointing."""
        least, most = self._profile.least_kept, self._profile.most_kept
        return max(least.phase_peak_bytes.values()), max(most.phase_peak_bytes.values())

    def _budget_of_frontier(self, lowest_bytes: int, highest_bytes: int) -> int:
        """Returns the budget whose surroundings the trade-off shows closest."""
        return self._budget_bytes

    def _frontier(self, prices: Prices) -> tuple[FrontierEstimate, ...]:
        lowest, highest = (self._peaks.expected(end) for end in self._forecast_ends)

        def estimate(budget_bytes: int, planned: PlannedPolicy) -> FrontierEstimate:
            start_seconds = self._costs.start_seconds if planned.choices else 0.0
            return FrontierEstimate(
                budget_bytes=budget_bytes,
                peak_bytes=self._peaks.expected(planned.peak_bytes),
                overhead_seconds=planned.overhead_seconds + start_seconds,
                policy=planned.policy,
            )

        return plan_frontier(
            self._planner,
            prices,
            budgets_along(self._budget_of_frontier(lowest, highest), lowest, highest),
            limit_of=self._peaks.highest_forecast,
            estimate=estimate,
        )
