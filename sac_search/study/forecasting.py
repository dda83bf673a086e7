"""A study without measurements: baselines and plans by forecast, kept apart from what is measured.

Bytes come from dry runs. Seconds come from a device's published rates, so they are rough; policies
are compared with each other and never with a measured one.
"""

from __future__ import annotations

from collections.abc import Callable

from sac_search.cost_model import CostModel, Observation
from sac_search.errors import WorkloadError
from sac_search.planning import PhasePeaks, PlannedPolicy, PolicyPlanner, Prices, overhead_of
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.records import Evidence, Measurement, Outcome
from sac_search.space import Choices, SearchSpace
from sac_search.study.baselines import FULL, NONE, baselines
from sac_search.study.candidate import Candidate
from sac_search.study.finish import Winner
from sac_search.study.goal import GoalKind, Limits
from sac_search.study.insights import (
    FrontierEstimate,
    Insights,
    budgets_along,
    plan_frontier,
    price_list,
)
from sac_search.study.least_memory import least_plan
from sac_search.study.measurer import Measurer, dry_runs, profile_of
from sac_search.study.store import StudyStore

# The forecast is of allocated bytes. What a caching allocator reserves beyond that is not known
# before a step was run; this much of the budget is left for it.
RESERVE_FRACTION = 0.05
_PLAN_FRACTIONS = (0.95, 1.0, 0.9, 0.85)


class ForecastStudy:
    """Fills one study with forecasts."""

    def __init__(
        self,
        store: StudyStore,
        space: SearchSpace,
        measurer: Measurer,
        none_seconds: float,
        on_candidate: Callable[[Candidate], None],
    ) -> None:
        profile = profile_of(measurer, space)
        if profile is None:
            raise WorkloadError(
                "this workload cannot be forecast: its step reads values that it does not have "
                "without running; search it on a device, without --forecast"
            )
        self._store = store
        self._space = space
        self._dry_run = dry_runs(measurer)
        self._none_seconds = none_seconds
        self._on_candidate = on_candidate
        self._profile: Profile = profile
        self._planner = PolicyPlanner(profile, space, self._dry_run)
        none = Observation(
            choices={}, through_policy=False, seconds=none_seconds, noise_fraction=0.0
        )
        self._prices: Prices = CostModel(profile, [none]).prices()
        self._found: dict[str, Candidate] = {}

    def run(self) -> Winner:
        """Forecasts baselines and plans, keeps them in the study and returns the best.

        Without plans when the step fits as it is, or when nothing can fit.
        """
        for baseline in baselines(self._space):
            choices = self._space.choices_of(baseline.policy)
            if choices is not None:  # a policy that counts calls has no price
                self._add(baseline.name, baseline.policy, choices, is_baseline=True)
        named = {candidate.name: candidate for candidate in self._found.values()}
        best, goal = named.get(NONE), self._store.goal
        if best is None or not best.fits(self._limit_bytes) or not goal.is_met_by_none:
            self._add_plans()
            limits = Limits(budget_bytes=self._limit_bytes, none_seconds=self._none_seconds)
            ranked = goal.rank(self._found.values(), limits)
            best = ranked[0] if ranked else None
        bound = None
        if goal.is_met_by_none:
            bound = self._planner.bound(self._limit_bytes, self._prices)
        self._store.write("bound_overhead_seconds", bound)
        self._store.write("insights", self._insights())
        self._store.write("winner", best.policy.key if best is not None else None)
        return Winner(best=best, verification=None, rejected=())

    @property
    def _limit_bytes(self) -> int:
        return round((1 - RESERVE_FRACTION) * self._store.budget_bytes)

    def _add_plans(self) -> None:
        goal = self._store.goal
        for fraction in _PLAN_FRACTIONS if goal.is_met_by_none else goal.plan_fractions:
            planned = self._plan(fraction)
            if planned is not None and planned.policy.key not in self._found:
                name = f"plan at {fraction:.0%}"
                self._add(name, planned.policy, planned.choices, is_baseline=False)

    def _plan(self, fraction: float) -> PlannedPolicy | None:
        if self._store.goal.kind is GoalKind.PARETO:
            lowest, highest = self._forecast_ends
            limit = min(self._limit_bytes, round(lowest + fraction * (highest - lowest)))
            return self._planner.plan(limit, self._prices)
        most_fraction = self._store.goal.max_overhead_fraction
        if most_fraction is None:
            budget_bytes = round(fraction * self._store.budget_bytes)
            return self._planner.plan(budget_bytes, self._prices)
        lowest, highest = self._forecast_ends
        ends = (lowest, max(lowest, min(highest, self._limit_bytes)))
        most_seconds = fraction * most_fraction * self._none_seconds
        return least_plan(self._planner, self._prices, most_seconds, ends)

    @property
    def _forecast_ends(self) -> tuple[int, int]:
        least, most = self._profile.least_kept, self._profile.most_kept
        return max(least.phase_peak_bytes.values()), max(most.phase_peak_bytes.values())

    def _insights(self) -> Insights:
        """Returns what rates say of costs, and the trade-off as far as it is planned in time."""
        saves, layers = price_list(self._profile, self._prices)
        lowest, highest = (round(end / (1 - RESERVE_FRACTION)) for end in self._forecast_ends)
        budget_bytes = self._store.budget_bytes
        if not self._store.goal.is_met_by_none:
            budget_bytes = min(budget_bytes, highest)

        def estimate(budget_bytes: int, planned: PlannedPolicy) -> FrontierEstimate:
            return FrontierEstimate(
                budget_bytes=budget_bytes,
                peak_bytes=planned.peak_bytes,
                overhead_seconds=planned.overhead_seconds,
                policy=planned.policy,
            )

        frontier = plan_frontier(
            self._planner,
            self._prices,
            budgets_along(budget_bytes, lowest, highest),
            limit_of=lambda budget_bytes: round((1 - RESERVE_FRACTION) * budget_bytes),
            estimate=estimate,
        )
        return Insights(saves=saves, layers=layers, frontier=frontier)

    def _add(self, name: str, policy: Policy, choices: Choices, *, is_baseline: bool) -> None:
        peaks = self._dry_run(policy)
        if peaks is None:
            return
        seconds = self._none_seconds + overhead_of(self._profile, choices, self._prices)
        if policy.through_policy:
            kinds = zip(self._profile.layers, self._profile.order, strict=True)
            seconds += sum(self._prices[k].policy_seconds for name, k in kinds if name in choices)
        full = next((c for c in self._found.values() if c.name == FULL), None)
        reference_seconds = full.step_seconds if full is not None else None
        outcome = _outcome(peaks, seconds, reference_seconds or seconds)
        candidate = Candidate(
            name=name,
            policy=policy,
            outcome=outcome,
            step_seconds=seconds,
            is_baseline=is_baseline,
        )
        self._found[policy.key] = candidate
        self._store.write_forecast(candidate)
        self._on_candidate(candidate)


def _outcome(peaks: PhasePeaks, seconds: float, reference_seconds: float) -> Outcome:
    peak_phase = max(peaks, key=lambda phase: peaks[phase])
    measurement = Measurement(
        peak_bytes=peaks[peak_phase],
        allocated_bytes=peaks[peak_phase],
        peak_phase=peak_phase,
        phase_peak_bytes=dict(peaks),
        step_seconds=seconds,
        step_noise_fraction=0.0,
        reference_seconds=reference_seconds,
        relative_seconds=seconds / reference_seconds,
        steps=0,
        loss=None,
        evidence=Evidence.FORECAST,
    )
    return Outcome(measurement=measurement, forecast_peak_bytes=peaks[peak_phase])
