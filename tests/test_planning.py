"""Plans for a real, small model, and for one on paper whose best policies are known by counting."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted import MIB, RESIDENT_BYTES, SITE_OPS, ScriptedMeasurer, make_layers, make_op
from test_profile import CPU, WIDTH, Model, make_workload, one_kind, profile, two_kinds
from torch import Tensor, nn
from torch.nn import functional

from sac_search.device import Clock
from sac_search.forecast import foreign_tensor_bytes
from sac_search.forecaster import ProfileRequest
from sac_search.layers import find_layers
from sac_search.measure import StepMeter
from sac_search.planner import Plan, Problem, solve
from sac_search.planning import (
    MOST_DRY_RUNS,
    DryRun,
    KindPrices,
    PhasePeaks,
    PlannedPolicy,
    PolicyPlanner,
    Prices,
    overhead_of,
)
from sac_search.policy import NO_CHECKPOINTING, Policy
from sac_search.profile import Profile, RowSample
from sac_search.records import Phase
from sac_search.space import Choices, Granularity, LayerChoiceMode, SearchSpace, build_space
from sac_search.trace import trace_layers
from sac_search.verify import verify_policy

CALL_SECONDS = 1e-6
TWO_KINDS = make_layers(4, SITE_OPS) + make_layers(3, kind="Mixer", prefix="m")


def traced_prices(found: Profile, policy_seconds: float | None = None) -> Prices:
    return tuple(
        KindPrices(
            label_seconds=kind.label_seconds,
            other_seconds=kind.other_seconds,
            policy_seconds=(
                CALL_SECONDS * kind.policy_calls if policy_seconds is None else policy_seconds
            ),
        )
        for kind in found.kinds
    )


class CountedDryRuns:
    """Dry-runs policies, and knows which."""

    def __init__(self, dry_run: DryRun) -> None:
        self.policies: list[Policy] = []
        self._dry_run = dry_run

    def __call__(self, policy: Policy) -> PhasePeaks | None:
        self.policies.append(policy)
        return self._dry_run(policy)


# --- a real model ---------------------------------------------------------------------------------


def peaks_of(model: Model) -> DryRun:
    return lambda policy: model.forecast(policy).phase_peak_bytes


def real_planner(model: Model, tiers: int = 2) -> PolicyPlanner:
    return PolicyPlanner(profile(model), model.space(tiers=tiers), peaks_of(model))


def between(model: Model, fraction: float) -> int:
    low = model.forecast(model.full).peak_bytes
    high = model.forecast(NO_CHECKPOINTING).peak_bytes
    return round(low + fraction * (high - low))


@pytest.mark.parametrize(
    ("make", "fraction"),
    [(one_kind, 0.1), (one_kind, 0.4), (one_kind, 0.6), (one_kind, 0.9), (two_kinds, 0.5)],
)
def test_a_plan_keeps_its_budget_when_it_is_run(make: Callable[[], Model], fraction: float) -> None:
    model = make()
    budget_bytes = between(model, fraction)
    planner, prices = real_planner(model), traced_prices(profile(model))
    plan = planner.plan(budget_bytes, prices)
    assert plan is not None
    assert len(plan.policy.tiers) <= 2 * len(model.kinds)
    assert plan.peak_bytes == model.forecast(plan.policy).peak_bytes <= budget_bytes
    meter = StepMeter(workload=model.workload, device=CPU, clock=Clock.CPU, steps=1)
    reading = meter._read_peak(plan.policy)
    measured_bytes = reading.allocated_bytes - foreign_tensor_bytes(model.workload, CPU)
    assert measured_bytes == pytest.approx(plan.peak_bytes, rel=0.002)
    bound_seconds = planner.bound(budget_bytes, prices)
    assert bound_seconds is not None
    assert bound_seconds <= plan.overhead_seconds
    verification = verify_policy(model.workload, plan.policy, NO_CHECKPOINTING, "none", CPU)
    assert verification.bitwise


def test_a_larger_budget_is_never_slower() -> None:
    planner, prices = real_planner(one_kind()), traced_prices(profile(one_kind()))
    plans = [planner.plan(between(one_kind(), step / 5), prices) for step in range(6)]
    seconds = [plan.overhead_seconds for plan in plans if plan is not None]
    assert len(seconds) == 6
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(seconds))
    assert seconds[0] > seconds[-1] == 0


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8])
def test_one_tier_is_at_most_as_good_as_two(fraction: float) -> None:
    budget_bytes = between(one_kind(), fraction)
    prices = traced_prices(profile(one_kind()))
    one = real_planner(one_kind(), tiers=1).plan(budget_bytes, prices)
    two = real_planner(one_kind()).plan(budget_bytes, prices)
    assert one is not None
    assert two is not None
    assert len(one.policy.tiers) <= 1
    assert two.overhead_seconds <= one.overhead_seconds + 1e-12


def test_nothing_fits_below_the_floor() -> None:
    low = between(one_kind(), 0)
    prices = traced_prices(profile(one_kind()))
    assert real_planner(one_kind()).plan(low // 2, prices) is None
    assert real_planner(one_kind()).bound(low // 2, prices) is None


def test_at_the_floor_there_is_a_plan() -> None:
    low = between(one_kind(), 0)
    prices = traced_prices(profile(one_kind()))
    plan = real_planner(one_kind()).plan(low, prices)
    assert plan is not None
    assert plan.peak_bytes <= low
    # The last layer's backward comes first, so it may be left alone for nothing.
    assert plan.overhead_seconds <= overhead_of(
        profile(one_kind()), dict.fromkeys(one_kind().names, frozenset()), prices
    )


def test_a_plan_is_the_best_of_all_dry_runs() -> None:
    """No save set in the earliest layers has a lower price and a dry run under the budget."""
    found, space = profile(one_kind()), one_kind().space(tiers=1)
    prices = traced_prices(found)
    tried = [c for c in one_tier_choices(found) if len(c) in (2, 4, 5)]
    peaks = [one_kind().forecast(space.policy_of(choices)).peak_bytes for choices in tried]
    for fraction in (0.25, 0.55):
        budget_bytes = between(one_kind(), fraction)
        plan = real_planner(one_kind(), tiers=1).plan(budget_bytes, prices)
        assert plan is not None
        best = min(
            overhead_of(found, choices, prices)
            for choices, peak_bytes in zip(tried, peaks, strict=True)
            if peak_bytes <= budget_bytes
        )
        assert plan.overhead_seconds <= best + 1e-12


class Reader(nn.Module):
    """Reads ahead with attention, whose recomputing costs most and frees next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).view(1, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(q, k, v)
        mixed = x + read.transpose(1, 2).reshape(x.shape)
        return mixed + self.out(functional.gelu(self.mix(mixed)))


class Head(nn.Sequential):
    """Logits, which are gone by the time the last layer is recomputed."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.LogSoftmax(-1))


@functools.cache
def readers() -> Model:
    workload = make_workload(Reader, Reader, Reader, Reader, Head)
    layers = find_layers(workload.model, workload.run_loss, [str(index) for index in range(4)])
    workload.run_step()
    return Model(workload, tuple(trace_layers(workload, layers, CPU, Clock.CPU, repeats=1)))


def prices_by_work(found: Profile) -> Prices:
    """Attention costs ten times what any other op does, and those cost alike."""
    return tuple(
        KindPrices(
            label_seconds=tuple(10.0 if "attention" in la else 1.0 for la in kind.labels),
            other_seconds=0.1,
            policy_seconds=0.01,
        )
        for kind in found.kinds
    )


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5])
def test_no_plan_for_less_is_better(fraction: float) -> None:
    """A planner that knows nothing yet is as good as what all budgets below it have taught."""
    found, model = profile(readers()), readers()
    prices = prices_by_work(found)
    fresh = real_planner(model).plan(between(model, fraction), prices)
    taught = real_planner(model)
    plans = [taught.plan(between(model, f), prices) for f in (0.01, 0.03, 0.06, 0.1, fraction)]
    assert fresh is not None and plans[-1] is not None
    assert fresh.overhead_seconds <= 1.05 * plans[-1].overhead_seconds
    bound_seconds = taught.bound(between(model, fraction), prices)
    assert bound_seconds is not None
    assert bound_seconds <= plans[-1].overhead_seconds + 1e-9


def test_little_memory_goes_where_it_spares_most() -> None:
    found, model = profile(readers()), readers()
    prices = prices_by_work(found)
    [kind] = found.kinds
    attention_bytes = dict(zip(kind.labels, kind.label_bytes, strict=True))["attention"]
    budget_bytes = between(model, 0) + 4 * attention_bytes
    plan = real_planner(model).plan(budget_bytes, prices)
    assert plan is not None
    saved = [
        name for name in model.space().policy_of(plan.choices).layer_names if plan.choices[name]
    ]
    assert len(saved) >= 3
    assert all("attention" in plan.choices[name] for name in saved)


def one_tier_choices(found: Profile) -> list[Choices]:
    """Returns all choices of a profile with one kind that checkpoint the earliest layers alike."""
    (kind,) = found.kinds
    return [
        dict.fromkeys(found.layers[:count], frozenset(labels))
        for size in range(len(kind.labels) + 1)
        for labels in itertools.combinations(kind.labels, size)
        for count in range(len(found.layers) + 1)
    ]


# --- a model on paper -----------------------------------------------------------------------------


class Paper:
    """A scripted model, its profile, and a planner for it."""

    def __init__(
        self,
        *,
        tiers: int = 2,
        granularity: Granularity = Granularity.SITE,
        mode: LayerChoiceMode = LayerChoiceMode.COUNT,
        **changes: object,
    ) -> None:
        measurer = {"layers": make_layers(6, SITE_OPS), "forecast_factor": 1.0} | changes
        self.measurer = ScriptedMeasurer(**measurer)
        self.space: SearchSpace = build_space(self.measurer.layers, mode, granularity, tiers)
        request = ProfileRequest(layers=self.space.layers, granularity=granularity)
        found = self.measurer.profile(request)
        assert found is not None
        self.profile: Profile = found
        self.prices = traced_prices(found, policy_seconds=1e-4)
        self.dry_run = CountedDryRuns(
            lambda policy: self.measurer.forecast(policy).phase_peak_bytes
        )
        self.planner = PolicyPlanner(found, self.space, self.dry_run)

    @property
    def budgets(self) -> list[int]:
        low = self.measurer.peak_bytes(self.measurer.full)
        high = self.measurer.peak_bytes(NO_CHECKPOINTING)
        return [round(low + step / 6 * (high - low)) for step in range(7)]

    def plan(self, budget_bytes: int) -> PlannedPolicy:
        plan = self.planner.plan(budget_bytes, self.prices)
        assert plan is not None
        return plan

    def overhead_seconds(self, policy: Policy) -> float:
        none = self.measurer.step_seconds(NO_CHECKPOINTING)
        return self.measurer.step_seconds(policy) - none


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("layers", [make_layers(6, SITE_OPS), TWO_KINDS], ids=["one", "two"])
@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_a_plan_is_what_it_says(tiers: int, layers: tuple, mode: LayerChoiceMode) -> None:
    paper = Paper(tiers=tiers, layers=layers, mode=mode)
    for budget_bytes in paper.budgets[1::2]:
        plan = paper.plan(budget_bytes)
        assert plan.policy.key == paper.space.policy_of(plan.choices).key
        assert plan.peak_bytes == paper.measurer.peak_bytes(plan.policy) <= budget_bytes
        assert plan.overhead_seconds == pytest.approx(paper.overhead_seconds(plan.policy))
        assert overhead_of(paper.profile, plan.choices, paper.prices) == plan.overhead_seconds
        # A search of this space can ask for it.
        assignment = paper.space.assignment_of(plan.choices)
        assert assignment is not None
        assert paper.space.policy_for(assignment).key == plan.policy.key


def test_plans_are_as_fast_as_counting_finds() -> None:
    one, two = Paper(tiers=1), Paper()
    found = [(c, one.space.policy_of(c)) for c in one_tier_choices(one.profile)]
    peaks = {p.key: one.measurer.peak_bytes(p) for _, p in found}
    for budget_bytes in one.budgets:
        best = min(
            overhead_of(one.profile, choices, one.prices)
            for choices, policy in found
            if peaks[policy.key] <= budget_bytes
        )
        plan = one.plan(budget_bytes)
        assert plan.overhead_seconds == pytest.approx(best, abs=1e-9)
        assert two.plan(budget_bytes).overhead_seconds <= best + 1e-9


def test_a_budget_for_everything_is_no_checkpointing() -> None:
    paper = Paper()
    plan = paper.plan(paper.budgets[-1])
    assert plan.policy == NO_CHECKPOINTING
    assert plan.choices == {}
    assert plan.overhead_seconds == 0


def test_no_plan_is_under_the_bound() -> None:
    paper = Paper(layers=TWO_KINDS)
    for budget_bytes in paper.budgets:
        before = paper.planner.bound(budget_bytes, paper.prices)
        plan = paper.plan(budget_bytes)
        after = paper.planner.bound(budget_bytes, paper.prices)
        assert before is not None and after is not None
        assert before <= plan.overhead_seconds + 1e-9
        assert after <= plan.overhead_seconds + 1e-9
    assert paper.planner.bound(RESIDENT_BYTES // 2, paper.prices) is None


def test_what_dry_runs_teach_is_kept() -> None:
    paper = Paper()
    budget_bytes = paper.budgets[3]
    first = paper.plan(budget_bytes)
    asked = len(paper.dry_run.policies)
    assert 1 <= asked <= MOST_DRY_RUNS

    assert paper.plan(budget_bytes) == first
    assert len(paper.dry_run.policies) == asked
    # A budget next to it starts from there, and no policy is dry-run twice.
    paper.plan(budget_bytes + MIB // 2)
    assert len(paper.dry_run.policies) - asked <= asked
    keys = [policy.key for policy in paper.dry_run.policies]
    assert len(set(keys)) == len(keys)


def test_plans_of_other_prices_have_all_dry_runs_to_choose_from() -> None:
    """A planner that may not dry-run any more still chooses by the prices of the day."""
    paper = Paper()
    budget_bytes = paper.budgets[3]
    first = paper.plan(budget_bytes)
    (kind,) = paper.prices
    free = (replace(kind, label_seconds=(0.0,) * len(kind.label_seconds)),)

    cheaper = paper.planner.plan(budget_bytes, free, dry_runs=0)

    assert cheaper is not None
    dry = {p.key: p for p in paper.dry_run.policies}
    fitting = [
        overhead_of(paper.profile, choices, free)
        for p in dry.values()
        if paper.measurer.peak_bytes(p) <= budget_bytes
        and (choices := paper.space.choices_of(p)) is not None
    ]
    assert cheaper.overhead_seconds == min(fitting) <= first.overhead_seconds
    assert paper.planner.plan(budget_bytes, paper.prices, dry_runs=0) == first


@pytest.mark.parametrize("dry_runs", [0, 1, 3])
def test_dry_runs_are_limited(dry_runs: int) -> None:
    paper = Paper()
    plan = paper.planner.plan(paper.budgets[2], paper.prices, dry_runs=dry_runs)
    # Recomputing everything is tried when nothing that was dry-run fits.
    assert len(paper.dry_run.policies) <= dry_runs + 1
    assert plan is not None
    assert plan.peak_bytes <= paper.budgets[2]
    if dry_runs == 0:
        assert plan.policy == paper.measurer.full


def held_for_low(paper: Paper) -> Profile:
    """Returns the profile with peaks that are too low by a fifth."""

    def lower(sample: RowSample) -> RowSample:
        peaks = {p: round(0.8 * peak) for p, peak in sample.phase_peak_bytes.items()}
        return replace(sample, phase_peak_bytes=peaks)

    found = paper.profile
    return replace(found, most_kept=lower(found.most_kept), least_kept=lower(found.least_kept))


def test_wrong_rows_are_corrected() -> None:
    """Dry runs tell that the profile's peaks are too low, so plans keep the budget."""
    paper = Paper()
    planner = PolicyPlanner(held_for_low(paper), paper.space, paper.dry_run)
    budget_bytes = paper.budgets[3]
    plan = planner.plan(budget_bytes, paper.prices)
    assert plan is not None
    assert plan.peak_bytes <= budget_bytes
    first, *later = [paper.measurer.peak_bytes(policy) for policy in paper.dry_run.policies]
    assert first > 1.05 * budget_bytes
    assert len(later) < MOST_DRY_RUNS
    assert plan.overhead_seconds <= 0.5 * paper.overhead_seconds(paper.measurer.full)
    # What was learnt holds for a budget next to it.
    planner.plan(budget_bytes - 4 * MIB, paper.prices)
    new = paper.dry_run.policies[1 + len(later) :]
    assert new
    assert all(paper.measurer.peak_bytes(policy) < 1.05 * budget_bytes for policy in new)


def test_once_something_fits_a_little_more_is_tried() -> None:
    """Rows may say too much as well: a plan a little over by them may be under by its dry run."""
    paper = Paper()
    budget_bytes = paper.budgets[3]
    limits: list[int] = []

    def solver(problem: Problem, limit: int, *, tiers: int) -> Plan | None:
        limits.append(limit)
        return solve(problem, limit, tiers=tiers)

    def dry_run(policy: Policy) -> PhasePeaks:
        # All but the first plan need a hundredth less than its rows say.
        factor = 1.0 if len(limits) == 1 else 0.99
        peaks = paper.measurer.forecast(policy).phase_peak_bytes
        return {phase: round(factor * peak) for phase, peak in peaks.items()}

    planner = PolicyPlanner(paper.profile, paper.space, dry_run, solver=solver)
    plan = planner.plan(budget_bytes, paper.prices)
    assert plan is not None
    assert limits[:2] == [budget_bytes, round(1.02 * budget_bytes)]
    assert plan.peak_bytes <= budget_bytes < paper.measurer.peak_bytes(plan.policy)
    assert plan.overhead_seconds < paper.plan(budget_bytes).overhead_seconds


def test_no_policy_is_dry_run_twice() -> None:
    paper = Paper()

    def solver(problem: Problem, limit: int, *, tiers: int) -> Plan | None:
        return Plan(options=(0,) * 6, overhead_seconds=0.0, peak_bytes=0)

    planner = PolicyPlanner(paper.profile, paper.space, paper.dry_run, solver=solver)
    for budget_bytes in paper.budgets[:3]:
        plan = planner.plan(budget_bytes, paper.prices)
        assert plan is not None
        assert plan.policy == paper.measurer.full
    assert paper.dry_run.policies == [NO_CHECKPOINTING, paper.measurer.full]


def test_phases_that_no_layer_changes_count_as_well() -> None:
    paper = Paper()
    optimizer_bytes = paper.budgets[4]

    def dry_run(policy: Policy) -> PhasePeaks:
        peaks = paper.measurer.forecast(policy).phase_peak_bytes
        return peaks | {Phase.OPTIMIZER: optimizer_bytes, Phase.CLIPPING: 0}

    planner = PolicyPlanner(paper.profile, paper.space, dry_run)
    plan = planner.plan(optimizer_bytes, paper.prices)
    assert plan is not None
    assert plan.peak_bytes == optimizer_bytes
    assert planner.plan(optimizer_bytes - 1, paper.prices) is None
    # Nor is there a bound then; it is for a fiftieth more.
    assert planner.bound(round(0.99 * optimizer_bytes), paper.prices) is not None
    assert planner.bound(round(0.97 * optimizer_bytes), paper.prices) is None


# --- when there is nothing to go by ---------------------------------------------------------------


def test_recomputing_everything_is_left_when_the_solver_finds_nothing() -> None:
    paper = Paper()
    limits: list[tuple[int, int]] = []

    def solver(problem: Problem, limit: int, *, tiers: int) -> Plan | None:
        limits.append((limit, tiers))
        return None

    planner = PolicyPlanner(paper.profile, paper.space, paper.dry_run, solver=solver)
    low = paper.budgets[0]
    plan = planner.plan(low, paper.prices)
    assert plan is not None
    assert plan.policy == paper.measurer.full
    assert plan.choices == dict.fromkeys(paper.profile.layers, frozenset())
    assert plan.overhead_seconds == pytest.approx(paper.overhead_seconds(paper.measurer.full))
    assert planner.plan(low - 1, paper.prices) is None
    assert limits == [(low, 2), (low - 1, 2)]


def test_a_planner_without_dry_runs_plans_nothing() -> None:
    paper = Paper()
    dry_run = CountedDryRuns(lambda policy: None)
    planner = PolicyPlanner(paper.profile, paper.space, dry_run)
    assert planner.plan(paper.budgets[3], paper.prices) is None
    # The plan, and recomputing everything.
    assert len(dry_run.policies) == 2
    assert dry_run.policies[1] == paper.measurer.full


def test_a_dry_run_that_fails_leaves_what_was_known() -> None:
    """A step that is counted while it runs may not have the memory to be dry-run."""
    paper = Paper()
    full = paper.measurer.full

    def dry_run(policy: Policy) -> PhasePeaks | None:
        return paper.dry_run(policy) if policy == full else None

    planner = PolicyPlanner(paper.profile, paper.space, dry_run)
    plan = planner.plan(paper.budgets[3], paper.prices)
    assert plan is not None
    assert plan.policy == full


def test_the_solver_is_the_one_that_was_given() -> None:
    paper = Paper(tiers=1)
    tiers_asked: set[int] = set()

    def solver(problem: Problem, limit: int, *, tiers: int) -> Plan | None:
        tiers_asked.add(tiers)
        return solve(problem, limit, tiers=tiers)

    planner = PolicyPlanner(paper.profile, paper.space, paper.dry_run, solver=solver)
    assert planner.plan(paper.budgets[3], paper.prices) == paper.plan(paper.budgets[3])
    assert tiers_asked == {1}


# --- prices ---------------------------------------------------------------------------------------


def test_the_overhead_of_choices() -> None:
    layers = make_layers(3, [make_op("aten.mm.default"), make_op("aten.gelu.default")])
    paper = Paper(layers=layers, granularity=Granularity.CLASS)
    (kind,) = paper.profile.kinds
    assert kind.labels == ("activation", "matmul")
    prices = (KindPrices(label_seconds=(1.0, 10.0), other_seconds=100.0, policy_seconds=1000.0),)
    activation, both = frozenset(["activation"]), frozenset(["activation", "matmul"])

    def overhead(choices: Choices) -> float:
        return overhead_of(paper.profile, choices, prices)

    assert overhead({}) == 0
    assert overhead({"h.0": frozenset()}) == 111
    assert overhead({"h.0": activation}) == 1110
    assert overhead({"h.0": both, "h.2": frozenset()}) == 1100 + 111
    # Something that has no label in the profile is saved through a policy, and wins nothing.
    assert overhead({"h.1": frozenset(["normalization"])}) == 1111


def test_saving_must_win_more_than_a_policy_function_costs() -> None:
    paper = Paper()
    dear = traced_prices(paper.profile, policy_seconds=1.0)
    plan = paper.planner.plan(paper.budgets[3], dear)
    assert plan is not None
    assert all(tier.is_plain for tier in plan.policy.tiers)
    assert 0 < len(plan.policy.layers) < 6
