"""The whole trade-off of a workload: how fast a step can be under each budget.

Forecast from a few measured steps; `measured` says what the policies really cost, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from sac_search.errors import WorkloadError
from sac_search.forecaster import Planned, PlanRequest
from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.records import Environment, Evidence, Measurement, Outcome
from sac_search.study.measurer import Measurer


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


def find_frontier(
    measurer: Measurer, *, points: int, tiers: int, measure: bool, steps: int = 10
) -> Frontier:
    """Returns the fastest policies for `points` budgets from full checkpointing to none.

    Full and no checkpointing are measured first, since they set the prices. With `measure` every
    policy is measured as well, `steps` timed steps each, interleaved.

    Raises:
        WorkloadError: full checkpointing does not run, or the workload cannot be forecast.
    """
    description = measurer.describe()
    full_policy = checkpoint_layers(layer.name for layer in description.layers)
    full, none = measurer.measure(full_policy), measurer.measure(NO_CHECKPOINTING)
    if full.measurement is None:
        assert full.failure is not None
        raise WorkloadError(
            f"the step does not run with its layers checkpointed ({full.failure.kind}). "
            f"{full.failure.advice}\n{full.failure.message}"
        )
    overhead_seconds = _overhead_seconds(full.measurement, none.measurement)
    request = PlanRequest(points=points, tiers=tiers, full_overhead_seconds=overhead_seconds)
    plans = measurer.plan(request)
    if not plans:
        raise WorkloadError(" ".join(description.notes) or "no policy could be planned")
    found = [_point(plan, full.measurement, none.measurement) for plan in plans]
    if measure:
        found = _measured(found, measurer, steps)
    return Frontier(
        environment=description.environment,
        evidence=Evidence.MEASURED if measure else Evidence.FORECAST,
        none=none,
        full=full,
        points=tuple(found),
    )


def _overhead_seconds(full: Measurement, none: Measurement | None) -> float | None:
    """Returns what full checkpointing adds to a step, in seconds of the full measurement."""
    if none is None:
        return None
    return full.reference_seconds * (full.relative_seconds - none.relative_seconds)


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
