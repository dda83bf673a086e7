"""The rows of every table, as plain text and numbers. Pure: no terminal, no HTML."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from sac_search import units
from sac_search.frontier import Frontier, FrontierPoint
from sac_search.records import Evidence, Measurement, Outcome, Verification
from sac_search.space import Granularity, label_of, saved_name, unsavable_ops
from sac_search.study.baselines import COMPILE, COMPILE_FULL, FULL, NONE
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.goal import GoalKind
from sac_search.study.result import SearchResult
from sac_search.trace import LayerTrace
from sac_search.worker.session import Verdict

SMALLEST_NOISE_FRACTION = 0.005
"""Nearer than this to its bound a winner is at it, however steady its steps were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRow:
    """A policy in the final table."""

    name: str
    """Its name; the winner's is `best`."""
    description: str
    """The policy in a few words."""
    step: str
    """Step time with its spread: `312.4 ms ±0.6%`."""
    overhead: str
    """Step time above that without checkpointing."""
    peak: str
    """Peak of the step."""
    verdict: str
    """`fits`, `over`, or why there are no figures."""
    is_best: bool = False
    """Whether it is the winner."""


def candidate_rows(result: SearchResult) -> list[CandidateRow]:
    """Returns a row per baseline, in the order of the ladder, and the winner's last."""
    rows = [_candidate_row(result, c, c.name) for c in result.candidates if c.is_baseline]
    if result.best is not None:
        name = f"best ({result.best.name})"
        rows.append(_candidate_row(result, result.best, name, is_best=True))
    return rows


def every_candidate_row(result: SearchResult) -> list[CandidateRow]:
    """Returns a row per policy that was tried, in the result's order."""
    best_key = None if result.best is None else result.best.policy.key
    return [
        _candidate_row(result, c, c.name, is_best=c.policy.key == best_key)
        for c in result.candidates
    ]


def _candidate_row(
    result: SearchResult, candidate: Candidate, name: str, *, is_best: bool = False
) -> CandidateRow:
    measurement = candidate.measurement
    if measurement is None or candidate.step_seconds is None:
        failure = candidate.failure
        return CandidateRow(
            name=name,
            description=candidate.policy.describe(),
            step="–",
            overhead="–",
            peak="–",
            verdict="no step time" if failure is None else str(failure.kind),
            is_best=is_best,
        )
    noise = f" ±{100 * measurement.step_noise_fraction:.1f}%"
    if measurement.evidence is Evidence.FORECAST:
        noise = ""
    return CandidateRow(
        name=name,
        description=candidate.policy.describe(),
        step=f"{units.format_seconds(candidate.step_seconds)}{noise}",
        overhead=overhead_text(result, candidate),
        peak=units.format_gib(measurement.peak_bytes),
        verdict=short_verdict(result.goal.verdict(candidate, result.limits)),
        is_best=is_best,
    )


def overhead_text(result: SearchResult, candidate: Candidate) -> str:
    """Returns a candidate's overhead; against an estimate it is marked as about that."""
    overhead, estimated = result.overhead_of(candidate), result.estimated_overhead_of(candidate)
    if estimated is not None:
        return f"≈{units.format_percent(estimated)}"
    return "–" if overhead is None else units.format_percent(overhead)


def short_verdict(verdict: str) -> str:
    """Returns a verdict as it stands in a column."""
    return "over" if verdict == "over the budget" else verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An op in the table of `sac-search trace`, all layers of a kind together."""

    kind: str
    """Layer kind."""
    op: str
    """The overload."""
    op_class: str
    """Its class."""
    calls: int
    """Calls in one layer."""
    mib: float
    """MiB that one layer's calls return."""
    milliseconds: float
    """Forward milliseconds of one layer's calls, averaged over the layers of the kind."""
    saved_by: str
    """The decision that saves it, or why it cannot be saved."""
    savable: bool
    """Whether it can be saved."""


def op_rows(layers: Sequence[LayerTrace]) -> list[OpRow]:
    """Returns a row per layer kind and op, in the order in which they run."""
    reasons = unsavable_ops(layers, Granularity.SITE)
    by_kind: dict[str, list[LayerTrace]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    rows = []
    for kind, members in by_kind.items():
        for op in members[0].ops:
            same = [o for layer in members for o in layer.ops if o.site_name == op.site_name]
            seconds = [o.seconds for o in same]
            reason = reasons[saved_name(op, Granularity.SITE)]
            rows.append(
                OpRow(
                    kind=kind,
                    op=op.site_name,
                    op_class="view" if op.view else str(op.op_class),
                    calls=op.calls,
                    mib=op.output_bytes / units.MIB,
                    milliseconds=1e3 * sum(seconds) / len(seconds),
                    saved_by=f"no: {reason}"
                    if reason
                    else f"save.{label_of(op, Granularity.SITE)}",
                    savable=not reason,
                )
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierRow:
    """A budget in the table of `sac-search frontier`."""

    budget: str
    """The budget."""
    overhead: str
    """Step time above that without checkpointing, forecast."""
    peak: str
    """The peak, forecast."""
    measured_overhead: str
    """The same, measured."""
    measured_peak: str
    """The same, measured; allocated bytes, as the forecast's."""
    description: str
    """The policy in a few words."""


def frontier_rows(frontier: Frontier) -> list[FrontierRow]:
    """Returns a row per budget, from the smallest to the largest."""
    return [_frontier_row(point) for point in frontier.points]


def _frontier_row(point: FrontierPoint) -> FrontierRow:
    measurement = point.outcome.measurement if point.outcome is not None else None
    failure = point.outcome.failure if point.outcome is not None else None
    return FrontierRow(
        budget=units.format_gib(point.planned.budget_bytes),
        overhead=_percent_or_dash(point.overhead),
        peak=units.format_gib(point.planned.peak_bytes),
        measured_overhead=_percent_or_dash(point.measured_overhead),
        measured_peak=(
            units.format_gib(measurement.allocated_bytes)
            if measurement is not None
            else str(failure.kind)
            if failure is not None
            else "–"
        ),
        description=point.planned.policy.describe(),
    )


def _percent_or_dash(fraction: float | None) -> str:
    return "–" if fraction is None else units.format_percent(fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """A point of the front in the table of a search for all of it."""

    peak: str
    """Its peak, rounded up."""
    step: str
    """Its step time."""
    overhead: str
    """Step time above that without checkpointing."""
    verified: str
    """`yes` where its gradients were compared and are right."""
    description: str
    """The policy in a few words."""


def front_rows(result: SearchResult) -> list[FrontRow]:
    """Returns a row per point of the front, the least peak first; none for other goals."""
    if result.goal.kind is not GoalKind.PARETO:
        return []
    return [
        FrontRow(
            peak=units.format_gib_up(peak_of(candidate)),
            step=units.format_seconds(candidate.step_seconds or 0.0),
            overhead=overhead_text(result, candidate),
            verified="yes" if result.is_verified(candidate) else "no",
            description=candidate.policy.describe(),
        )
        for candidate in result.front()
    ]


def exported_lines(result: SearchResult, faster: Candidate | None) -> list[str]:
    """Returns what was exported for a memory: its figures, and what could be faster."""
    best = result.best
    assert best is not None and best.step_seconds is not None
    lines = [
        f"{best.name}: {units.format_seconds(best.step_seconds)} per step, peak "
        f"{units.format_gib(peak_of(best))} of {units.format_gib(result.budget_bytes)}, overhead "
        f"{overhead_text(result, best)}, {best.evidence}, verified."
    ]
    if faster is not None and faster.step_seconds is not None:
        lines.append(
            f"{faster.name} is faster there ({units.format_seconds(faster.step_seconds)}, peak "
            f"{units.format_gib(peak_of(faster))}), but it was never verified."
        )
    return lines


def headline(result: SearchResult) -> list[str]:
    """Returns the outcome in a few sentences."""
    if result.goal.kind is not GoalKind.SPEED:
        return _headline_of_goal(result)
    budget = units.format_gib(result.budget_bytes)
    best = result.best
    if best is None or best.measurement is None or best.step_seconds is None:
        return [_why_no_winner(result)]
    peak = units.format_gib(best.measurement.peak_bytes)
    if result.needs_no_checkpointing:
        lines = [
            f"No checkpointing needed: the step without it peaks at {peak}, "
            f"under the budget of {budget}.",
            _where_it_would_bind(result),
        ]
        return [line for line in lines if line]
    lines = [
        f"{best.policy.describe()}: {units.format_seconds(best.step_seconds)} per step, "
        f"peak {peak} of {budget}."
    ]
    lines += [line for name in (FULL, NONE, COMPILE) if (line := _against(result, name))]
    bound = _against_bound(result)
    if bound:
        lines.append(bound)
    if result.evidence is Evidence.FORECAST:
        lines.append(_forecast_line(result))
    if result.verification is not None:
        lines.append(verification_line(result))
    return lines


def lack_of_winner(result: SearchResult) -> str:
    """Returns why there is no winner, in the few words of a table's cell."""
    if not result.candidates:
        return "nothing tried yet"
    if not _within_limits(result):
        is_limited = result.goal.max_overhead_fraction is not None
        return "nothing is within the limits" if is_limited else "nothing fits"
    return "none verified" if result.rejected else "none verified yet"


def _within_limits(result: SearchResult) -> list[Candidate]:
    """Returns the candidates within the limits, best first; none is without a step time."""
    timed = (c for c in result.candidates if c.step_seconds is not None)
    return result.goal.rank(timed, result.limits)


def _why_no_winner(result: SearchResult) -> str:
    goal, does = result.goal, _what_limits_ask(result)
    if result.interrupted:
        return f"Interrupted before a policy that {does} was found and verified."
    if not result.candidates:
        if goal.kind is GoalKind.SPEED:
            return f"Nothing was tried yet for {units.format_gib(result.budget_bytes)}."
        return f"Nothing was tried yet: {goal.describe()}."
    ranked = _within_limits(result)
    if not ranked:
        return f"No policy {does}."
    if result.rejected:
        return f"No policy that {does} has passed verification."
    first = ranked[0]
    assert first.measurement is not None and first.step_seconds is not None
    best = "best" if goal.kind is GoalKind.MEMORY else "fastest"
    return (
        f"No policy is verified yet. The {best} so far that {does} is {first.name}: "
        f"{units.format_seconds(first.step_seconds)} per step, "
        f"peak {units.format_gib(first.measurement.peak_bytes)}."
    )


def _what_limits_ask(result: SearchResult) -> str:
    """Returns what a policy within the limits does: `fits 12.000 GiB`."""
    goal = result.goal
    fits = f"fits {units.format_gib(result.budget_bytes)}" if goal.has_budget else "fits the device"
    if goal.max_overhead_fraction is None:
        return fits
    within = f"has an overhead of at most {goal.limit_text}"
    return f"{within} and {fits}" if goal.has_budget else within


def limit_text(result: SearchResult) -> str:
    """Returns what a study was searched for, in the words of a table: a budget, or its goal."""
    budget = units.format_gib(result.budget_bytes)
    if result.goal.kind is GoalKind.SPEED:
        return budget
    goal = f"overhead ≤ {result.goal.limit_text}"
    if result.goal.kind is GoalKind.PARETO:
        return f"front up to {budget}" if result.goal.has_budget else "front"
    return f"{goal}, {budget}" if result.goal.has_budget else goal


def estimate_lines(result: SearchResult) -> list[str]:
    """Returns what overheads are held against, where no step without checkpointing runs."""
    if result.none_estimate_seconds is None or result.limits.none_seconds is None:
        return []
    return [
        "Overheads are held against "
        f"{units.format_seconds(result.limits.none_seconds)}, the planner's forecast of the step "
        "without checkpointing, which does not run here: they are estimates."
    ]


def _headline_of_goal(result: SearchResult) -> list[str]:
    goal, best = result.goal, result.best
    if best is None or best.measurement is None or best.step_seconds is None:
        return [_why_no_winner(result), *estimate_lines(result)]
    budget = f" of {units.format_gib(result.budget_bytes)}" if goal.has_budget else ""
    overhead = overhead_text(result, best)
    lines = [
        f"{best.policy.describe()}: peak {units.format_gib(peak_of(best))}{budget}, "
        f"{units.format_seconds(best.step_seconds)} per step.",
        f"The least peak with an overhead of at most {goal.limit_text} (its own: {overhead}).",
    ]
    if goal.kind is GoalKind.PARETO:
        lines = _headline_of_front(result, best)
    elif result.needs_no_checkpointing:
        lines[1] = (
            f"No policy with an overhead of at most {goal.limit_text} was found that peaks lower "
            "than the step without checkpointing."
        )
    lines += estimate_lines(result)
    lines += [line for name in (FULL, NONE) if (line := _against(result, name))]
    if result.evidence is Evidence.FORECAST:
        lines.append(_forecast_line(result))
    if result.verification is not None:
        lines.append(verification_line(result))
    return lines


def _headline_of_front(result: SearchResult, best: Candidate) -> list[str]:
    front = result.front()
    verified = sum(result.is_verified(c) for c in front)
    cap = f" under {units.format_gib(result.budget_bytes)}" if result.goal.has_budget else ""
    ends = " to ".join(
        f"{units.format_gib(peak_of(c))} at {units.format_seconds(c.step_seconds or 0.0)}"
        for c in (*front[:1], *front[-1:])
    )
    lines = [
        f"The front{cap} of step time against peak has {_counted(len(front), 'point')}"
        f"{f', from {ends}' if len(front) > 1 else ''}; "
        f"{verified} of them {'is' if verified == 1 else 'are'} verified.",
        f"The fastest is {best.policy.describe()}: "
        f"{units.format_seconds(best.step_seconds or 0.0)} per step, peak "
        f"{units.format_gib(peak_of(best))}.",
    ]
    if result.folder is not None and verified:
        where = units.format_gib_up(peak_of(front[len(front) // 2])).replace(" ", "")
        lines.append(f"For less memory: sac-search export {result.folder} --at SIZE (as {where})")
    return lines


def _forecast_line(result: SearchResult) -> str:
    return (
        "This is a forecast: no step was run and no gradient compared. Peaks are allocated bytes, "
        f"seconds are by the published rates of {result.environment.device_name}."
    )


def _against_bound(result: SearchResult) -> str:
    bound_seconds, best = result.lower_bound_seconds, result.best
    if not bound_seconds or best is None or best.step_seconds is None:
        return ""
    bound = units.format_seconds(bound_seconds)
    distance = best.step_seconds / bound_seconds - 1
    if beats_bound(distance, best):
        return (
            f"Faster than the planner's bound, {bound}, by {-100 * distance:.1f}%: what it takes "
            "ops to cost is rough, so it cannot tell what is left to find."
        )
    where = f"Within {100 * distance:.1f}% of the planner's bound"
    if distance <= 0:
        where = "At the planner's bound"
    source = "measured steps" if result.evidence is Evidence.MEASURED else "rates"
    return (
        f"{where}, {bound}: no policy that saves whole op sites in these layers can be faster, if "
        f"ops cost what the {source} say and their costs add up."
    )


def beats_bound(distance_fraction: float, best: Candidate) -> bool:
    """Returns whether a winner is so far under the bound that its noise is not the reason."""
    noise = 0.0 if best.measurement is None else best.measurement.step_noise_fraction
    return distance_fraction < -max(noise, SMALLEST_NOISE_FRACTION)


def _where_it_would_bind(result: SearchResult) -> str:
    full, none = result.full, result.none
    if full is None or full.measurement is None or none is None or none.measurement is None:
        return ""
    low, high = full.measurement.peak_bytes, none.measurement.peak_bytes
    if low >= high:
        return "Checkpointing every layer does not lower the peak, so no budget would bind."
    return (
        f"The budget does not bind. Between {units.format_gib(low)} (every layer checkpointed) and "
        f"{units.format_gib(high)} it would, for example: --budget-gb {_middle_gib(low, high)}"
    )


def _middle_gib(low_bytes: int, high_bytes: int) -> str:
    """Returns a budget between the two with as few digits as it takes."""
    middle_gib = (low_bytes + high_bytes) / 2 / units.GIB
    texts = [f"{middle_gib:.{digits}g}" for digits in range(2, 18)]
    between = (t for t in texts if low_bytes < float(t) * units.GIB < high_bytes)
    return next(between, texts[-1])


def _against(result: SearchResult, name: str) -> str:
    other = {FULL: result.full, NONE: result.none, COMPILE: result.compile_alone}[name]
    best = result.best
    if other is None or not other.step_seconds or best is None or best.step_seconds is None:
        return ""
    assert other.measurement is not None and best.measurement is not None
    if other.policy.key == best.policy.key or not other.measurement.peak_bytes:
        return ""
    change = units.format_percent(best.step_seconds / other.step_seconds - 1)
    saved = units.format_percent(best.measurement.peak_bytes / other.measurement.peak_bytes - 1)
    what = _REFERENCES[name]
    return f"Against {what}: step time {change}, peak {saved}."


def closing_lines(result: SearchResult) -> list[str]:
    """Returns why the search stopped, where the files are, and what to type next."""
    if result.evidence is Evidence.FORECAST:
        return _closing_lines_of_forecast(result)
    baseline_count = sum(candidate.is_baseline for candidate in result.candidates)
    ruled_out = sum(candidate.is_ruled_out for candidate in result.candidates)
    trials = len(result.candidates) - baseline_count - ruled_out
    imported = sum(candidate.imported_from is not None for candidate in result.candidates)
    counts = (
        f"{_counted(baseline_count, 'baseline')} and {_counted(trials, 'trial')}"
        f"{f', {imported} of them measured by other studies' if imported else ''}"
        f"{f', {ruled_out} more ruled out by forecast' if ruled_out else ''}"
    )
    lines = [
        f"Stopped after {counts}: {result.stop_reason}."
        if result.stop_reason
        else f"So far {counts}: the search has not ended, or was killed.",
        f"Clock: {_CLOCKS.get(result.environment.clock, result.environment.clock)}.",
    ]
    lines += _compile_lines(result)
    lines += _failure_lines(result)
    lines += _memory_lines(result)
    lines += [f"Rejected: {reason}" for reason in result.rejected]
    return lines + _file_lines(result)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _failure_lines(result: SearchResult) -> list[str]:
    """Returns a line per way in which trials failed: how many, and what to do about it."""
    failures = [
        c.failure for c in result.candidates if c.failure is not None and not c.is_ruled_out
    ]
    counts = collections.Counter(failure.kind for failure in failures)
    advice = {failure.kind: failure.line for failure in failures}
    return [f"Failed, {kind}: {count}. {advice[kind]}" for kind, count in counts.most_common()]


def _compile_lines(result: SearchResult) -> list[str]:
    """Returns what compiling took, and what was compiled when nothing should have been."""
    found = [(c, c.measurement) for c in result.candidates if c.measurement is not None]
    seconds = [m.compile_seconds for _, m in found if m.compile_seconds is not None]
    if not seconds:
        return []
    line = (
        f"Compiling took {units.format_duration(sum(seconds))} for {len(seconds)} "
        f"{'policies' if len(seconds) > 1 else 'policy'}, "
        f"{units.format_duration(max(seconds))} at the most; no step's time has any of it."
    )
    again = [(c.name, m.recompiles) for c, m in found if m.recompiles]
    lines = [
        f"{name} was compiled once more while its steps were timed ({'; '.join(reasons)}); those "
        "steps were run again."
        for name, reasons in again
    ]
    return [line, *lines]


def _memory_lines(result: SearchResult) -> list[str]:
    """Returns what the allocator's figures of the winner warn of."""
    measurement = None if result.best is None else result.best.measurement
    if measurement is None:
        return []
    lines = []
    if measurement.alloc_retries:
        lines.append(
            f"The allocator freed its cache and tried again {measurement.alloc_retries} times in "
            "the winner's step: the device is full. A smaller budget may be faster."
        )
    if measurement.reserved_bytes is not None and is_fragmented(measurement):
        lines.append(
            f"The allocator holds {units.format_gib(measurement.reserved_bytes)} for "
            f"{units.format_gib(measurement.allocated_bytes)} of tensors: memory is fragmented. "
            "PYTORCH_ALLOC_CONF=expandable_segments:True may lower the peak; it is another "
            "environment, so search anew with it."
        )
    return lines


def is_fragmented(measurement: Measurement) -> bool:
    """Returns whether the caching allocator holds much more than tensors take."""
    reserved_bytes, allocated_bytes = measurement.reserved_bytes, measurement.allocated_bytes
    return reserved_bytes is not None and reserved_bytes - allocated_bytes > max(
        _FRAGMENTED_FRACTION * allocated_bytes, _FRAGMENTED_BYTES
    )


def _closing_lines_of_forecast(result: SearchResult) -> list[str]:
    return [
        f"Forecast {len(result.candidates)} policies for {result.environment.device_name}.",
        *_file_lines(result),
        "To measure: the same command on that device, without --forecast; it continues this study.",
    ]


def _file_lines(result: SearchResult) -> list[str]:
    if result.folder is None or result.best is None:
        return []
    policy_path = result.folder / "policy.py"
    files = [policy_path, result.folder / "result.json", result.folder / "study.db"]
    files += [] if result.report_path is None else [result.report_path]
    instead = " in place of torch.compile" if result.best.policy.compiled is not None else ""
    return [
        f"Files: {', '.join(map(str, files))}",
        f"Next: copy {policy_path} beside your training script; import policy; "
        f"policy.apply(model){instead}",
    ]


# Reserved above allocated memory by more than this, the smaller of a part and bytes, is much.
_FRAGMENTED_FRACTION = 0.15
_FRAGMENTED_BYTES = 256 * 2**20

_REFERENCES = {
    NONE: "no checkpointing",
    FULL: "full checkpointing",
    COMPILE: "compile alone",
    COMPILE_FULL: "compile with full checkpointing",
}
_CLOCKS = {
    "cpu": "processor time of one process (--clock wall for elapsed time)",
    "wall": "elapsed time",
}


def verification_lines(verdict: Verdict, outcome: Outcome) -> list[str]:
    """Returns what `sac-search verify` found, for people."""
    lines = []
    if verdict.failure is not None:
        lines.append(f"FAILED: {verdict.failure.kind}. {verdict.failure.advice}")
        lines.append(verdict.failure.message)
    elif verdict.verification is not None:
        word = "passed" if verdict.verification.passed else "FAILED"
        lines.append(f"Verification {word}. {describe_verification(verdict.verification)}")
    measurement = outcome.measurement
    if measurement is not None:
        lines.append(
            f"Peak {units.format_gib(measurement.peak_bytes)} (in {measurement.peak_phase}), "
            f"{units.format_seconds(measurement.step_seconds)} per step "
            f"±{100 * measurement.step_noise_fraction:.1f}%, "
            f"{units.format_percent(measurement.relative_seconds - 1)} against full checkpointing."
        )
    elif outcome.failure is not None and verdict.failure is None:
        lines.append(f"Not measured: {outcome.failure.kind}. {outcome.failure.advice}")
    return lines


def layer_lines(layers: Sequence[LayerTrace]) -> list[str]:
    """Returns a line per layer kind: how many layers, which, and what they take in."""
    by_kind: dict[str, list[LayerTrace]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    lines = []
    for kind, members in by_kind.items():
        names = members[0].name if len(members) == 1 else f"{members[0].name} … {members[-1].name}"
        plural = "s" if len(members) > 1 else ""
        lines.append(
            f"{kind}: {len(members)} layer{plural} ({names}), "
            f"{members[0].parameter_count:,} parameters and "
            f"{units.format_mib(members[0].input_bytes)} of inputs each"
        )
    return lines


def verification_line(result: SearchResult) -> str:
    """Returns the winner's verification in a sentence or two."""
    assert result.verification is not None
    return describe_verification(result.verification)


def describe_verification(verification: Verification) -> str:
    """Returns a verification in a sentence or two."""
    what = _REFERENCES.get(verification.reference, verification.reference)
    if verification.bitwise:
        line = f"Loss and every gradient are bitwise those of {what}."
    elif not verification.passed:
        line = (
            f"The gradients are not those of {what}: {verification.worst_parameter} is off by "
            f"{verification.worst_gradient_difference:.1e} of its largest value, the loss by "
            f"{verification.loss_difference:.1e}."
        )
    else:
        line = (
            f"Loss and gradients agree with {what} within {verification.tolerance:.0e} "
            f"(worst {verification.worst_gradient_difference:.1e})."
        )
    return f"{line} {verification.note}".strip()
