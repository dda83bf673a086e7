"""Sizes, prices and plans of a real, small model."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from sac_search.apply import applied
from sac_search.device import Clock
from sac_search.forecast import Forecast, forecast_step, foreign_tensor_bytes
from sac_search.forecaster import Forecaster, PlanRequest
from sac_search.layers import find_layers
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.profile import Profile, build_profile, plan_policy, policy_of, rescaled
from sac_search.trace import LayerTrace, trace_layers
from sac_search.verify import verify_policy
from sac_search.workload import Workload

CPU = torch.device("cpu")
LAYERS = 5
WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(
        model, lambda model, batch: model(batch).square().mean(), torch.randn(256, WIDTH), optimizer
    )


@functools.cache
def traced() -> tuple[Workload, tuple[LayerTrace, ...]]:
    workload = make_workload()
    layers = find_layers(workload.model, workload.run_loss)
    workload.run_step()
    return workload, tuple(trace_layers(workload, layers, CPU, Clock.CPU, repeats=1))


def forecast(policy: Policy) -> Forecast:
    workload, layers = traced()
    return forecast_step(workload, policy, layer_names=tuple(layer.name for layer in layers))


@functools.cache
def profile() -> Profile:
    _, layers = traced()
    gradients = {layer.name: 4 * layer.parameter_count for layer in layers}
    return build_profile(layers, gradients, forecast, seconds_per_policy_op=1e-6)


def names() -> tuple[str, ...]:
    return tuple(layer.name for layer in traced()[1])


def test_sizes_are_those_of_a_dry_run() -> None:
    (options,) = profile().kinds
    for index, found in enumerate(options):
        policy = policy_of(profile(), [index] * LAYERS)
        assert policy.layer_names == (() if found.tier is None else names())
        dry = forecast(policy)
        assert dry.layer_bytes["1"].saved_bytes == found.option.saved_bytes, found.tier


def test_what_early_stop_drops_is_never_saved() -> None:
    """The last matmul of a block is not run again, so saving it costs memory and buys nothing."""
    (options,) = profile().kinds
    saved = {op for found in options if found.tier is not None for op in found.tier.ops}
    assert f"aten.addmm.default[{WIDTH}x{4 * WIDTH}]" in saved
    assert f"aten.addmm.default[{4 * WIDTH}x{WIDTH}]" not in saved


def test_prices_fall_as_sizes_grow() -> None:
    (options,) = profile().kinds
    tiers = sorted((o.option for o in options[1:]), key=lambda o: o.saved_bytes)
    seconds = [option.overhead_seconds for option in tiers]
    assert seconds == sorted(seconds, reverse=True)
    assert options[0].option.overhead_seconds == 0 < seconds[-1]


@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.6, 0.9])
def test_a_plan_keeps_its_budget_when_it_is_run(fraction: float) -> None:
    workload, _ = traced()
    low = forecast(checkpoint_layers(names())).peak_bytes
    high = forecast(NO_CHECKPOINTING).peak_bytes
    budget_bytes = round(low + fraction * (high - low))
    plan = plan_policy(profile(), budget_bytes, forecast)
    assert plan is not None
    assert len(plan.policy.tiers) <= 2
    assert plan.forecast.peak_bytes <= budget_bytes
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU, steps=1)
    reading = meter._read_peak(plan.policy)
    measured_bytes = reading.allocated_bytes - foreign_tensor_bytes(workload, CPU)
    assert measured_bytes == pytest.approx(plan.forecast.peak_bytes, rel=0.002)
    assert plan.bound_seconds is not None
    assert plan.bound_seconds <= 1.02 * plan.overhead_seconds
    verification = verify_policy(workload, plan.policy, NO_CHECKPOINTING, "none", CPU)
    assert verification.bitwise


def test_a_larger_budget_is_never_slower() -> None:
    low = forecast(checkpoint_layers(names())).peak_bytes
    high = forecast(NO_CHECKPOINTING).peak_bytes
    plans = [
        plan_policy(profile(), round(low + step / 5 * (high - low)), forecast) for step in range(6)
    ]
    seconds = [plan.overhead_seconds for plan in plans if plan is not None]
    assert len(seconds) == 6
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(seconds))


def test_one_tier_is_at_most_as_good_as_two() -> None:
    low = forecast(checkpoint_layers(names())).peak_bytes
    high = forecast(NO_CHECKPOINTING).peak_bytes
    budget_bytes = round(low + 0.5 * (high - low))
    one = plan_policy(profile(), budget_bytes, forecast, tiers=1)
    two = plan_policy(profile(), budget_bytes, forecast, tiers=2)
    assert one is not None
    assert two is not None
    assert len(one.policy.tiers) <= 1
    assert two.overhead_seconds <= one.overhead_seconds + 1e-12


def test_recomputing_everything_is_left_when_no_other_plan_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    low = forecast(checkpoint_layers(names())).peak_bytes
    monkeypatch.setattr("sac_search.profile.solve", lambda problem, limit, tiers: None)
    plan = plan_policy(profile(), low, forecast)
    assert plan is not None
    assert plan.policy.key == checkpoint_layers(names()).key
    assert plan.overhead_seconds > 0
    assert plan_policy(profile(), low - 1, forecast) is None


def test_nothing_fits_below_the_floor() -> None:
    low = forecast(checkpoint_layers(names())).peak_bytes
    assert plan_policy(profile(), low // 2, forecast) is None


def test_rescaling_changes_prices_only() -> None:
    twice = rescaled(profile(), 2.0)
    for (old,), (new,) in [(profile().kinds, twice.kinds)]:
        for before, after in zip(old, new, strict=True):
            assert after.option.overhead_seconds == 2 * before.option.overhead_seconds
            assert after.option.saved_bytes == before.option.saved_bytes
            assert after.tier == before.tier
    assert twice.problem.order == profile().problem.order


def test_forecaster_plans_by_what_full_checkpointing_was_measured_to_cost() -> None:
    workload = make_workload()
    workload.run_step()
    layers = find_layers(workload.model, workload.run_loss)
    forecaster = Forecaster(workload, trace_layers(workload, layers, CPU, Clock.CPU), CPU)
    low, high = forecaster.full.peak_bytes, forecaster.forecast(NO_CHECKPOINTING).peak_bytes
    budget_bytes = (low + high) // 2
    (plain,) = forecaster.plan(PlanRequest(budgets_bytes=(budget_bytes,)))
    total = sum(
        forecaster._profile.kinds[k][1].option.overhead_seconds  # type: ignore[union-attr]
        for k in forecaster._profile.problem.order  # type: ignore[union-attr]
    )
    request = PlanRequest(budgets_bytes=(budget_bytes,), full_overhead_seconds=2 * total)
    (scaled,) = forecaster.plan(request)
    assert scaled.policy.key == plain.policy.key
    assert scaled.overhead_seconds == pytest.approx(2 * plain.overhead_seconds)
    assert forecaster.plan(PlanRequest(budgets_bytes=(low // 2,))) == []
    hurried = PlanRequest(budgets_bytes=(budget_bytes, high, low), most_seconds=1e-9)
    assert [plan.budget_bytes for plan in forecaster.plan(hurried)] == [budget_bytes]
    with applied(workload.model, scaled.policy):
        assert torch.isfinite(workload.run_step())


def test_the_plan_is_the_best_of_all_dry_runs() -> None:
    """No choice of options for the layers has a lower price and a dry run under the budget."""
    layers = len(names())
    low = forecast(checkpoint_layers(names())).peak_bytes
    high = forecast(NO_CHECKPOINTING).peak_bytes
    budget_bytes = round(low + 0.55 * (high - low))
    plan = plan_policy(profile(), budget_bytes, forecast)
    assert plan is not None
    (options,) = profile().kinds
    for alone in range(layers + 1):
        choice = [1] * (layers - alone) + [0] * alone
        seconds = sum(options[index].option.overhead_seconds for index in choice)
        if forecast(policy_of(profile(), choice)).peak_bytes <= budget_bytes:
            assert plan.overhead_seconds <= seconds + 1e-12
