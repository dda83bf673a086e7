"""The whole trade-off of a workload: how fast a step can be under each budget.

Forecast from a few measured steps; `measured` says what the policies really cost, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from sac_search.cost_model import CostModel, Observation
from sac_search.errors import WorkloadError
from sac_search.planning import PolicyPlanner
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import Environment, Evidence, Measurement, Outcome
from sac_search.space import Granularity, SearchSpace, build_space
from sac_search.study.measurer import Measurer, dry_runs, profile_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The fastest policy under one budget."""

    planned: Planned
    """The plan, forecast."""
    overhead: float | None
    """Step time above that without checkpointing, forecast, as a fraction; None if that is not
    known."""
    outcome: Outcome | None = None
    """What the policy was measured to cost."""
    measured_overhead: float | None = None
    """The same fraction, measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The trade-off between peak and step time."""

    environment: Environment
    """What the figures belong to."""
    evidence: Evidence
    """Whether the points were measured."""
    none: Outcome
    """The step without checkpointing, measured."""
    full: Outcome
    """The step with every layer checkpointed, measured."""
    points: tuple[FrontierPoint, ...]
    """From the smallest budget to the largest."""
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""


def find_frontier(
    measurer: Measurer, *, points: int, tiers: int, measure: bool, steps: int = 10
) -> Frontier:
    """Returns the fastest policies for `points` budgets from full checkpointing to none.

    Full and no checkpointing are measured first, and full checkpointing through a policy function,
    since they set the prices. With `measure` every policy is measured as well, `steps` timed steps
    each, interleaved.

    Raises:
        WorkloadError: full checkpointing does not run, or the workload cannot be forecast.
    """
    description = measurer.describe()
    space = build_space(description.layers, granularity=Granularity.SITE, tiers=tiers)
    names = [layer.name for layer in description.layers]
    ends = (
        checkpoint_layers(names),
        NO_CHECKPOINTING,
        checkpoint_layers(names, Tier(through_policy=True)),
    )
    outcomes = [measurer.measure(policy) for policy in ends]
    full, none = outcomes[0], outcomes[1]
    if full.measurement is None:
        assert full.failure is not None
        raise WorkloadError(
            f"the step does not run with its layers checkpointed ({full.failure.kind}). "
            f"{full.failure.advice}\n{full.failure.message}"
        )
    observations = [
        _observation(space, policy, outcome.measurement, full.measurement)
        for policy, outcome in zip(ends, outcomes, strict=True)
        if outcome.measurement is not None
    ]
    plans = _plans(measurer, space, observations, points)
    if not plans:
        raise WorkloadError(" ".join((*description.notes, "No policy could be planned.")))
    found = [_point(plan, full.measurement, none.measurement) for plan in plans]
    if measure:
        found = _measured(found, measurer, steps)
    return Frontier(
        environment=description.environment,
        evidence=Evidence.MEASURED if measure else Evidence.FORECAST,
        none=none,
        full=full,
        points=tuple(found),
        notes=description.notes,
    )


def _observation(
    space: SearchSpace, policy: Policy, measurement: Measurement, full: Measurement
) -> Observation:
    choices = space.choices_of(policy)
    assert choices is not None
    return Observation(
        choices=choices,
        through_policy=policy.through_policy,
        seconds=full.reference_seconds * measurement.relative_seconds,
        noise_fraction=measurement.step_noise_fraction,
    )


def _plans(
    measurer: Measurer, space: SearchSpace, observations: list[Observation], points: int
) -> list[Planned]:
    profile = profile_of(measurer, space)
    if profile is None:
        return []
    planner = PolicyPlanner(profile, space, dry_runs(measurer))
    prices = CostModel(profile, observations).prices()
    lowest = max(profile.least_kept.phase_peak_bytes.values())
    highest = max(profile.most_kept.phase_peak_bytes.values())
    plans = []
    for index in range(points):
        budget_bytes = round(lowest + index * (highest - lowest) / max(1, points - 1))
        planned = planner.plan(budget_bytes, prices)
        if planned is not None:
            plan = Planned(
                budget_bytes=budget_bytes,
                policy=planned.policy,
                overhead_seconds=planned.overhead_seconds,
                peak_bytes=planned.peak_bytes,
            )
            plans.append(plan)
    return plans


def _point(plan: Planned, full: Measurement, none: Measurement | None) -> FrontierPoint:
    if none is None:
        return FrontierPoint(planned=plan, overhead=None)
    none_seconds = full.reference_seconds * none.relative_seconds
    return FrontierPoint(planned=plan, overhead=plan.overhead_seconds / none_seconds)


def _measured(points: list[FrontierPoint], measurer: Measurer, steps: int) -> list[FrontierPoint]:
    policies = [NO_CHECKPOINTING, *(point.planned.policy for point in points)]
    none, *outcomes = measurer.compare(policies, steps)
    return [
        FrontierPoint(
            planned=point.planned,
            overhead=point.overhead,
            outcome=outcome,
            measured_overhead=_relative(outcome.measurement, none.measurement),
        )
        for point, outcome in zip(points, outcomes, strict=True)
    ]


def _relative(measurement: Measurement | None, none: Measurement | None) -> float | None:
    if measurement is None or none is None:
        return None
    return measurement.relative_seconds / none.relative_seconds - 1
