"""Forecasts and plans for one loaded workload: what the planner needs, gathered once.

Prices are in seconds as traced. They are rescaled by what full checkpointing was measured to cost.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sac_search.apply import applied
from sac_search.forecast import Forecast, forecast_step, foreign_tensor_bytes, record_values
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.profile import Profile, build_profile, plan_policy, rescaled
from sac_search.trace import LayerTrace
from sac_search.workload import Workload
from sac_search.workspaces import learn_workspaces

# What the dispatch modes of a policy cost per op, forward and recompute together, in seconds.
# Measured on the CPU of a narrow decoder: 20 to 30 microseconds.
_SECONDS_PER_POLICY_OP = 25e-6
# The trace is of one forward pass, and a step may have many; beyond this something is wrong.
_LARGEST_RESCALING = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Budgets to plan for."""

    budgets_bytes: tuple[int, ...] = ()
    """For the highest allocated bytes of a step."""
    points: int = 0
    """So many budgets more, evenly from the peak of full checkpointing to that of none."""
    tiers: int = 2
    """Save sets that layers of one kind may have."""
    most_seconds: float | None = None
    """After this time no further budget is begun; the first is always planned for."""
    full_overhead_seconds: float | None = None
    """What full checkpointing was measured to add to a step; None when it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for one budget."""

    budget_bytes: int
    """The budget that it was made for."""
    policy: Policy
    """The policy."""
    overhead_seconds: float
    """Step time above that without checkpointing, forecast."""
    peak_bytes: int
    """Highest allocated bytes, forecast."""
    bound_seconds: float | None
    """Overhead that no policy of this form can go under, by the same prices."""


class Forecaster:
    """Forecasts steps of one workload. Learns from one real step, under full checkpointing."""

    def __init__(
        self, workload: Workload, layers: Sequence[LayerTrace], device: torch.device
    ) -> None:
        self._workload = workload
        self._layers = tuple(layers)
        self._names = tuple(layer.name for layer in layers)
        full = checkpoint_layers(self._names)
        with applied(workload.model, full):
            with record_values() as values:
                workload.run_forward()
            self._values = tuple(values)
            self._workspaces = learn_workspaces(workload.run_step, device)
        # A step that drops gradients at its start leaves them behind; the forecast makes its own.
        workload.drop_gradients()
        gc.collect()
        self._foreign_bytes = foreign_tensor_bytes(workload, device)
        self._profile: Profile | None = None
        self._forecasts: dict[str, Forecast] = {}
        self.full = self.forecast(full)

    def forecast(self, policy: Policy) -> Forecast:
        """Returns what a step under `policy` would need. Each policy is dry-run once.

        Raises:
            CannotForecast: the step reads values that are not known.
        """
        # A plan's dry run, the check before a trial and the trial's record ask for the same one.
        if policy.key not in self._forecasts:
            self._forecasts[policy.key] = forecast_step(
                self._workload,
                policy,
                workspaces=self._workspaces,
                values=self._values,
                layer_names=self._names,
                foreign_bytes=self._foreign_bytes,
            )
        return self._forecasts[policy.key]

    def plan(self, request: PlanRequest) -> list[Planned]:
        """Returns the fastest policy for each budget, those left out that nothing fits."""
        profile = self._scaled_profile(request.full_overhead_seconds)
        plans: list[Planned] = []
        started = time.monotonic()
        for budget_bytes in (*request.budgets_bytes, *self.budgets(request.points)):
            over = time.monotonic() - started >= (request.most_seconds or float("inf"))
            if plans and over:
                break
            plan = plan_policy(profile, budget_bytes, self.forecast, tiers=request.tiers)
            if plan is not None:
                plans.append(
                    Planned(
                        budget_bytes=budget_bytes,
                        policy=plan.policy,
                        overhead_seconds=plan.overhead_seconds,
                        peak_bytes=plan.forecast.peak_bytes,
                        bound_seconds=plan.bound_seconds,
                    )
                )
        return plans

    def budgets(self, count: int) -> tuple[int, ...]:
        """Returns `count` budgets, evenly from the peak of full checkpointing to that of none."""
        if count == 0:
            return ()
        low = self.full.peak_bytes
        high = self.forecast(NO_CHECKPOINTING).peak_bytes
        steps = max(1, count - 1)
        return tuple(round(low + step * (high - low) / steps) for step in range(count))

    def _scaled_profile(self, full_overhead_seconds: float | None) -> Profile:
        if self._profile is None:
            self._profile = build_profile(
                self._layers,
                self._gradient_bytes(),
                self.forecast,
                seconds_per_policy_op=_SECONDS_PER_POLICY_OP,
            )
        profile = self._profile
        traced_seconds = sum(
            profile.kinds[kind][1].option.overhead_seconds for kind in profile.problem.order
        )
        if full_overhead_seconds is None or full_overhead_seconds <= 0 or traced_seconds <= 0:
            return profile
        factor = full_overhead_seconds / traced_seconds
        factor = min(max(factor, 1 / _LARGEST_RESCALING), _LARGEST_RESCALING)
        return rescaled(profile, factor)

    def _gradient_bytes(self) -> dict[str, int]:
        return {
            name: sum(
                p.numel() * p.element_size()
                for p in self._workload.model.get_submodule(name).parameters()
                if p.requires_grad
            )
            for name in self._names
        }
