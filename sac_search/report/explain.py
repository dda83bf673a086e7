"""A study in plain words: what holds the peak, what memory buys, what limits it. Pure.

Says what the study's figures say and nothing else: a remedy is named where a figure asks for it.
"""

from __future__ import annotations

from sac_search.policy import Policy
from sac_search.records import Evidence, Phase
from sac_search.report.composition import gradients_spared, parts_of_peak
from sac_search.report.facts import (
    Basis,
    Explanation,
    Fact,
    Quantity,
    Section,
    Unit,
    change,
    exactly,
    state,
)
from sac_search.report.limits import floor_phase, limits
from sac_search.report.quantities import Quantities, Tried
from sac_search.report.rows import SMALLEST_NOISE_FRACTION, beats_bound
from sac_search.report.trading import more_memory, saving
from sac_search.study.candidate import rank
from sac_search.study.goal import GoalKind
from sac_search.study.result import SearchResult

# What is alive in each phase of a step.
_ALIVE = {
    Phase.FORWARD: (
        "in the forward pass: what the layers keep so far, what one of them works with and, where "
        "the model computes its loss itself, that"
    ),
    Phase.LOSS: (
        "between the model's output and the backward pass: all that the layers keep, and what the "
        "loss makes of the output"
    ),
    Phase.BACKWARD: (
        "in the backward pass: what the layers still keep, the gradients so far, and what one "
        "layer {does}"
    ),
    Phase.CLIPPING: (
        "after the backward pass, before the optimizer: parameters, gradients, optimizer state, "
        "and what clipping needs"
    ),
    Phase.OPTIMIZER: (
        "in the optimizer's step: parameters, gradients, optimizer state, and what updating them "
        "needs"
    ),
}


_CONTINUE = "The search was interrupted, or it still runs: the same command continues it."
_MEASURE = "The same command on the device, without --forecast, measures and verifies."


def explain(result: SearchResult) -> Explanation:
    """Returns what a study's figures say."""
    quantities = Quantities(result)
    sections = (
        Section(title="Where it stands", facts=tuple(_standing(quantities))),
        Section(title="What holds the peak", facts=tuple(_peak(quantities))),
        Section(title="What saving buys", facts=tuple(saving(quantities))),
        Section(title="What more memory would buy", facts=tuple(more_memory(quantities))),
        Section(title="What limits it, and what to do", facts=tuple(limits(quantities))),
    )
    return Explanation(
        title=f"Study {result.study_name}: {result.environment.workload}, "
        f"{result.environment.device_name}",
        sections=tuple(section for section in sections if section.facts),
    )


# --- where it stands ------------------------------------------------------------------------------


def _standing(found: Quantities) -> list[Fact]:
    best, result = found.best, found.result
    if best is None:
        return _without_winner(found)
    if result.goal.kind is not GoalKind.SPEED:
        return _standing_of_goal(found, best)
    if result.needs_no_checkpointing:
        facts = [
            state(
                "No checkpointing is needed: the step without it takes {step} and peaks at {peak}, "
                "{left} under the budget of {budget}",
                step=(best.seconds, Unit.SECONDS),
                peak=(best.peak, Unit.GIB),
                left=(found.budget - best.peak, Unit.GIB),
                budget=(found.budget, Unit.GIB),
            )
        ]
        return facts + _where_budgets_bind(found)
    is_measured = result.evidence is Evidence.MEASURED
    facts = [
        state(
            "The fastest policy under {budget} is {name} ({policy}): "
            + ("{step} ±{noise}" if is_measured else "{step}")
            + " per step, peak {peak}, so {left} of the budget is not used",
            budget=(found.budget, Unit.GIB),
            name=best.name,
            policy=best.candidate.policy.describe(),
            step=(best.seconds, Unit.SECONDS),
            **({"noise": (best.noise, Unit.SHARE)} if is_measured else {}),
            peak=(best.peak, Unit.GIB),
            left=(found.budget - best.peak, Unit.GIB),
        )
    ]
    facts += _against(found, best)
    facts += _against_bound(found, best)
    if not is_measured:
        sentence = (
            "Nothing was measured or verified, and a part of the budget is left for what a caching "
            "allocator reserves beyond tensors."
        )
        facts.append(Fact(sentence=sentence, advice=_MEASURE))
    return facts


def _standing_of_goal(found: Quantities, best: Tried) -> list[Fact]:
    result = found.result
    which = "The fastest" if result.goal.kind is GoalKind.PARETO else "The policy"
    facts = [
        state(
            "Searched for: {goal}. {which} is {name} ({policy}): peak {peak}, {step} per step",
            which=which,
            goal=result.goal.describe(),
            name=best.name,
            policy=best.candidate.policy.describe(),
            peak=(best.peak, Unit.GIB),
            step=(best.seconds, Unit.SECONDS),
        ),
        *_front(found),
        *_estimate(found),
        *_against(found, best),
    ]
    if result.evidence is not Evidence.MEASURED:
        facts.append(Fact(sentence="Nothing was measured or verified.", advice=_MEASURE))
    return facts


def _front(found: Quantities) -> list[Fact]:
    if found.result.goal.kind is not GoalKind.PARETO:
        return []
    points = found.result.front()
    least = next((t for t in found.tried if points and t.candidate is points[0]), None)
    if least is None:
        return []
    verified = sum(found.result.is_verified(c) for c in points)
    return [
        state(
            "Its front has {count} points, {verified} of them verified; the least peak on it is "
            "{peak}, at {step} per step",
            "sac-search export STUDY --at SIZE writes any that is verified.",
            count=(exactly(len(points)), Unit.COUNT),
            verified=(exactly(verified), Unit.COUNT),
            peak=(least.peak, Unit.GIB),
            step=(least.seconds, Unit.SECONDS),
        )
    ]


def _estimate(found: Quantities) -> list[Fact]:
    result = found.result
    if result.none_estimate_seconds is None:
        return []
    estimate = Quantity(result.none_estimate_seconds, "none_estimate_seconds", Basis.FORECAST)
    return [
        state(
            "Overheads are held against {none}, what the planner believes of the step without "
            "checkpointing, which does not run here",
            none=(estimate, Unit.SECONDS),
        )
    ]


def _against(found: Quantities, best: Tried) -> list[Fact]:
    facts = []
    names = {"no checkpointing": found.none, "full checkpointing": found.full}
    names["compile alone"] = found.compile_alone
    for what, other in names.items():
        if other is None or _is_same(other, best) or not other.seconds.value:
            continue
        facts.append(
            state(
                "Against {what} ({other_step}, {other_peak}) its step time is {step} and its peak "
                "{peak}",
                what=what,
                other_step=(other.seconds, Unit.SECONDS),
                other_peak=(other.peak, Unit.GIB),
                step=(change(best.seconds, other.seconds), Unit.CHANGE),
                peak=(change(best.peak, other.peak), Unit.CHANGE),
            )
        )
    if found.none is None and found.result.none is not None and found.result.none.failure:
        kind = str(found.result.none.failure.kind)
        facts.append(
            state("The step without checkpointing gave no figures: {kind}", kind=kind),
        )
    known = _best_known(found)
    if known is not None and not _is_same(known, best):
        facts.append(
            state(
                "Against {name}, the fastest known recipe that fits, its step time is {step}",
                name=known.name,
                step=(change(best.seconds, known.seconds), Unit.CHANGE),
            )
        )
    return facts


def _best_known(found: Quantities) -> Tried | None:
    """Returns the best baseline that fits; none where that is one of the ends, told already."""
    baselines = [t.candidate for t in found.tried if t.candidate.is_baseline]
    ranked = rank(baselines, found.result.budget_bytes)
    ends = [end.candidate for end in (found.none, found.full, found.compile_alone) if end]
    if not ranked or ranked[0] in ends:
        return None
    return next((t for t in found.tried if t.candidate is ranked[0]), None)


def _against_bound(found: Quantities, best: Tried) -> list[Fact]:
    bound = found.bound
    if bound is None or not bound.value:
        return []
    distance = change(best.seconds, bound)
    if beats_bound(distance.value, best.candidate):
        return [
            state(
                "The planner's bound, {bound}, says nothing here: the winner's step time is "
                "{distance} against it, so the prices behind it are off",
                bound=(bound, Unit.SECONDS),
                distance=(distance, Unit.CHANGE),
            )
        ]
    noise = max(best.noise.value, SMALLEST_NOISE_FRACTION)
    is_near = distance.value <= noise and found.result.evidence is Evidence.MEASURED
    return [
        state(
            "No policy of this kind is faster than {bound}, if prices are right and add up; the "
            "winner's is {distance} against that",
            "More trials will hardly find a faster one; more memory, or less work, will."
            if is_near
            else "",
            bound=(bound, Unit.SECONDS),
            distance=(distance, Unit.CHANGE),
        )
    ]


def _where_budgets_bind(found: Quantities) -> list[Fact]:
    full, none = found.full, found.none
    if full is None or none is None:
        return []
    if full.peak.value >= none.peak.value:
        return [
            state(
                "Checkpointing every layer peaks at {full}, no lower: these layers hold none of "
                "the peak",
                full=(full.peak, Unit.GIB),
            )
        ]
    return [
        state(
            "Checkpointing every layer would peak at {full} and take {step} more time, so budgets "
            "between the two peaks are worth a search",
            full=(full.peak, Unit.GIB),
            step=(change(full.seconds, none.seconds), Unit.CHANGE),
        )
    ]


def _without_winner(found: Quantities) -> list[Fact]:
    result = found.result
    if not found.tried:
        return [_nothing_tried(found)]
    first = found.best_so_far
    if result.goal.kind is not GoalKind.SPEED:
        return _without_winner_of_goal(found, first)
    if first is None:
        smallest = found.smallest
        assert smallest is not None
        return [
            state(
                "No policy fits {budget}: the smallest peak is {peak}, by {name} ({policy}), "
                "{excess} too much",
                budget=(found.budget, Unit.GIB),
                peak=(smallest.peak, Unit.GIB),
                name=smallest.name,
                policy=smallest.candidate.policy.describe(),
                excess=(smallest.peak - found.budget, Unit.GIB),
            )
        ]
    fact = state(
        "No policy is verified yet; the fastest so far that fits {budget} is {name} ({policy}): "
        "{step} per step, peak {peak}",
        _CONTINUE,
        budget=(found.budget, Unit.GIB),
        name=first.name,
        policy=first.candidate.policy.describe(),
        step=(first.seconds, Unit.SECONDS),
        peak=(first.peak, Unit.GIB),
    )
    return [fact, *_rejected(result)]


def _nothing_tried(found: Quantities) -> Fact:
    what = "that was tried{under} gave figures"
    if not found.result.candidates:
        what = "was tried yet{under}"
    if not found.result.goal.has_budget:
        return state(f"Nothing {what.format(under='')}")
    return state(f"Nothing {what.format(under=' under {budget}')}", budget=(found.budget, Unit.GIB))


def _without_winner_of_goal(found: Quantities, first: Tried | None) -> list[Fact]:
    goal = found.result.goal
    if first is None:
        fact = state("No policy is within what was searched for: {goal}", goal=goal.describe())
        return [fact, *_estimate(found), *_rejected(found.result)]
    fact = state(
        "No policy is verified yet; the best so far for what was searched ({goal}) is {name} "
        "({policy}): peak {peak}, {step} per step",
        _CONTINUE,
        goal=goal.describe(),
        name=first.name,
        policy=first.candidate.policy.describe(),
        peak=(first.peak, Unit.GIB),
        step=(first.seconds, Unit.SECONDS),
    )
    return [fact, *_estimate(found), *_rejected(found.result)]


def _rejected(result: SearchResult) -> list[Fact]:
    return [Fact(sentence=f"Rejected: {reason}.", names=(reason,)) for reason in result.rejected]


def _is_same(one: Tried, other: Tried) -> bool:
    return one.candidate.policy.key == other.candidate.policy.key


# --- what holds the peak --------------------------------------------------------------------------


def _peak(found: Quantities) -> list[Fact]:
    tried = found.subject
    if tried is None:
        return []
    phase = tried.measurement.peak_phase
    does = "recomputes and works with" if tried.candidate.policy.layers else "works with"
    return [
        state(
            "The peak of {name}, {allocated} of tensors, is {alive}",
            name=tried.name,
            alive=_ALIVE[phase].format(does=does),
            allocated=(tried.allocated, Unit.GIB),
        ),
        *_phases(tried),
        *parts_of_peak(found, tried),
        *gradients_spared(found, tried),
        *_kept(found, tried),
        *_fixed(found, tried),
        *_floor(found),
    ]


def _phases(tried: Tried) -> list[Fact]:
    peaks = {phase: tried.phase(phase) for phase in Phase}
    known = {str(phase): peak for phase, peak in peaks.items() if peak is not None}
    if len(known) < 2:
        return []
    template = "Phase by phase it comes to " + ", ".join(
        f"{{{name.replace(' ', '_')}}} ({name})" for name in known
    )
    figures = {name.replace(" ", "_"): (peak, Unit.GIB) for name, peak in known.items()}
    return [state(template, **figures)]


def _kept(found: Quantities, tried: Tried) -> list[Fact]:
    kept = found.kept_by_layers(tried.candidate.policy)
    alone = found.kept_by_layers(Policy())
    if kept is None or alone is None:
        return []
    when = "all of it is alive when the backward pass begins"
    return [
        state(
            "From forward to backward the layers keep {kept}, {share} of the peak's size; left "
            f"alone they would keep {{alone}}; {when}",
            kept=(kept, Unit.MIB),
            share=(kept / tried.allocated, Unit.SHARE),
            alone=(alone, Unit.MIB),
        )
    ]


def _fixed(found: Quantities, tried: Tried) -> list[Fact]:
    parameters = found.parameters
    optimizer = tried.phase(Phase.OPTIMIZER)
    if optimizer is None:
        return []
    if parameters is None:
        return [
            state(
                "While the optimizer steps {optimizer} are alive: parameters, gradients, optimizer "
                "state, what updating them needs, and all else that outlives the backward pass",
                optimizer=(optimizer, Unit.GIB),
            )
        ]
    return [
        state(
            "While the optimizer steps {optimizer} are alive: {parameters} of parameters ({count} "
            "of {dtype}), and {others} of gradients, optimizer state, what updating them needs, "
            "and all else that outlives the backward pass",
            optimizer=(optimizer, Unit.GIB),
            parameters=(parameters, Unit.GIB),
            count=(found.parameter_count, Unit.COUNT),
            dtype=found.result.environment.dtype,
            others=(optimizer - parameters, Unit.GIB),
        )
    ]


def _floor(found: Quantities) -> list[Fact]:
    floor, phase = found.floor, floor_phase(found)
    if floor is None or phase is None:
        return []
    return [
        state(
            "No checkpointing policy goes under {floor}, since that much is alive {when}, "
            "whatever the layers do",
            floor=(floor, Unit.GIB),
            when=_WHEN[phase],
        )
    ]


_WHEN = {
    Phase.LOSS: "while the loss is computed",
    Phase.CLIPPING: "while gradients are clipped",
    Phase.OPTIMIZER: "while the optimizer steps",
}
