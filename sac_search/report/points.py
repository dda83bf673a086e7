"""The points of the report's plots, in bytes and seconds as the study has them. Pure."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sac_search import units
from sac_search.records import Phase
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult
from sac_search.timeline import MemoryKind, Timeline

# A budget above all peaks by more than this would leave them a corner of the plot.
_NEAR = 1.5
# A kind of memory with less of the peak than this is not worth a word.
_LEAST_PART = 0.01


class Group(enum.StrEnum):
    """What kind of policy a point is."""

    BASELINE = "baselines"
    """What people use today."""
    FITTING = "trials that fit"
    """Trials whose peak is under the budget."""
    OVER = "trials over the budget"
    """Trials whose peak is not."""
    SLOW = "trials that are too slow"
    """Trials under the budget whose overhead is above the highest, or not known."""
    BEST = "best"
    """The winner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPoint:
    """A policy that ran: its peak and its step time."""

    name: str
    """Name of the candidate."""
    group: Group
    """What kind it is."""
    peak_bytes: int
    """The peak that the budget limits."""
    step_seconds: float
    """Step time, drift taken out."""
    lines: tuple[str, ...]
    """What is to know of it."""


def policy_points(result: SearchResult) -> list[PolicyPoint]:
    """Returns a point for every policy that has figures, in the result's order."""
    found = []
    for candidate in result.candidates:
        measurement, step_seconds = candidate.measurement, _drawn_seconds(candidate)
        if measurement is None or step_seconds is None:
            continue
        found.append(
            PolicyPoint(
                name=candidate.name,
                group=_group(result, candidate),
                peak_bytes=measurement.peak_bytes,
                step_seconds=step_seconds,
                lines=tuple(_lines(result, candidate, measurement.peak_bytes)),
            )
        )
    return found


def _drawn_seconds(candidate: Candidate) -> float | None:
    """Returns the step time, where there is one that a plot can hold."""
    seconds = candidate.step_seconds
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _group(result: SearchResult, candidate: Candidate) -> Group:
    if _is_best(result, candidate):
        return Group.BEST
    if candidate.is_baseline:
        return Group.BASELINE
    if not candidate.fits(result.budget_bytes):
        return Group.OVER
    return Group.FITTING if result.fits(candidate) else Group.SLOW


def _is_best(result: SearchResult, candidate: Candidate) -> bool:
    return result.best is not None and candidate.policy.key == result.best.policy.key


def _lines(result: SearchResult, candidate: Candidate, peak_bytes: int) -> list[str]:
    assert candidate.step_seconds is not None
    overhead = result.overhead_of(candidate)
    step = units.format_seconds(candidate.step_seconds)
    if overhead is not None:
        step += f" ({units.format_percent(overhead)})"
    return [
        candidate.name,
        candidate.policy.describe(),
        f"{step}, peak {units.format_gib(peak_bytes)}",
        *(["imported from " + candidate.imported_from] if candidate.imported_from else []),
    ]


def budget_is_near(result: SearchResult) -> bool:
    """Whether the budget can be seen beside the policies, and is not far above all of them."""
    if not result.goal.has_budget:
        return False
    highest_bytes = max((point.peak_bytes for point in policy_points(result)), default=0)
    return result.budget_bytes <= _NEAR * highest_bytes


def most_seconds(result: SearchResult) -> float | None:
    """Returns the step time that the highest overhead allows; None where there is none to draw."""
    most_fraction, none_seconds = result.goal.max_overhead_fraction, result.limits.none_seconds
    if most_fraction is None or none_seconds is None:
        return None
    found = (1 + most_fraction) * none_seconds
    return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierSpot:
    """The fastest policy under one budget, by the planner."""

    peak_bytes: int
    """Its peak."""
    step_seconds: float
    """Its step time."""
    lines: tuple[str, ...]
    """What is to know of it."""


def frontier_spots(result: SearchResult) -> list[FrontierSpot]:
    """Returns the planner's trade-off by rising peak; none where the plain step did not run."""
    none = result.none
    none_seconds = None if none is None else _drawn_seconds(none)
    if result.insights is None or none_seconds is None:
        return []
    found = []
    for estimate in sorted(result.insights.frontier, key=lambda e: e.peak_bytes):
        seconds = none_seconds + estimate.overhead_seconds
        peak = units.format_gib(estimate.peak_bytes)
        found.append(
            FrontierSpot(
                peak_bytes=estimate.peak_bytes,
                step_seconds=seconds,
                lines=(
                    f"planned for {units.format_gib(estimate.budget_bytes)}, not measured",
                    estimate.policy.describe(),
                    f"{units.format_seconds(seconds)}, peak {peak}",
                ),
            )
        )
    return found


class Ending(enum.StrEnum):
    """How the trial of a policy ended."""

    FITS = "fits"
    """Its peak is under the budget."""
    OVER = "over the budget"
    """Its peak is not."""
    SLOW = "too slow"
    """Its overhead is above the highest."""
    RULED_OUT = "ruled out by forecast"
    """It was not run, since its forecast is over the budget."""
    FAILED = "failed"
    """Its step did not run to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPoint:
    """One policy of a search, in the order of the study."""

    number: int
    """Counted from 1, baselines first."""
    name: str
    """Name of the candidate."""
    ending: Ending
    """How it ended."""
    told: str
    """The same in a few words, with its step time or its reason."""
    step_seconds: float | None
    """Its step time; None where it has none."""
    best_seconds: float | None
    """Step time of the best policy so far that fits and can be exported."""


def trial_points(result: SearchResult) -> list[TrialPoint]:
    """Returns how the search went, baselines first, then trials in the order of measuring."""
    found: list[TrialPoint] = []
    best: Candidate | None = None
    for number, candidate in enumerate(result.candidates, 1):
        ending, seconds = _ending(result, candidate), _drawn_seconds(candidate)
        counts = candidate.policy.exportable and not candidate.is_reference
        is_better = best is None or result.goal.is_better(candidate, best)
        if ending is Ending.FITS and counts and seconds is not None and is_better:
            best = candidate
        told = str(ending) if candidate.failure is None else str(candidate.failure.kind)
        found.append(
            TrialPoint(
                number=number,
                name=candidate.name,
                ending=ending,
                told=told if seconds is None else f"{units.format_seconds(seconds)}, {told}",
                step_seconds=seconds,
                best_seconds=None if best is None else best.step_seconds,
            )
        )
    return found


def _ending(result: SearchResult, candidate: Candidate) -> Ending:
    if candidate.is_ruled_out:
        return Ending.RULED_OUT
    if candidate.measurement is None:
        return Ending.FAILED
    if not candidate.fits(result.budget_bytes):
        return Ending.OVER
    return Ending.FITS if result.fits(candidate) else Ending.SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A stretch of a timeline that is in one phase."""

    phase: Phase
    """The phase."""
    first_op: int
    """Where it begins."""
    last_op: int
    """Where the next one begins, or the last point."""


def phase_spans(timeline: Timeline) -> list[PhaseSpan]:
    """Returns the phases of a step, in the order in which they run."""
    runs = itertools.groupby(zip(timeline.phases, timeline.ops, strict=True), key=lambda at: at[0])
    starts: list[tuple[Phase, int]] = [(phase, next(points)[1]) for phase, points in runs]
    ends = [*(op for _, op in starts[1:]), timeline.ops[-1]]
    return [
        PhaseSpan(phase=phase, first_op=first, last_op=last)
        for (phase, first), last in zip(starts, ends, strict=True)
    ]


def peak_name(timeline: Timeline) -> str:
    """Returns where the peak is: `backward, h.3`."""
    phase, layer = timeline.peak_phase, timeline.peak_layer
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        return f"{phase}, {layer or 'outside the layers'}"
    return str(phase)


def peak_parts(timeline: Timeline) -> list[tuple[MemoryKind, int]]:
    """Returns what holds the peak, most bytes first; what is next to nothing is left out."""
    parts = {kind: sizes[timeline.peak_index] for kind, sizes in timeline.kind_bytes.items()}
    least = _LEAST_PART * timeline.peak_bytes
    kinds = sorted(parts, key=lambda kind: parts[kind], reverse=True)
    return [(kind, parts[kind]) for kind in kinds if parts[kind] > least]


def without_figures(result: SearchResult) -> Sequence[Candidate]:
    """Returns the policies that have no figures and so no point."""
    return [c for c in result.candidates if c.measurement is None or _drawn_seconds(c) is None]
