"""What keeps a step from less memory or less time, and what to do about it, where figures say so.

A remedy is no promise: most of them make another workload or another environment, which wants
another search.
"""

from __future__ import annotations

from sac_search.records import FailureKind, Phase
from sac_search.report.composition import gradients_kept
from sac_search.report.facts import Fact, Unit, change, exactly, state
from sac_search.report.quantities import Quantities, Tried
from sac_search.report.rows import is_fragmented
from sac_search.study.goal import GoalKind
from sac_search.timeline import MemoryKind

# A floor, or what layers keep, of at least this part of the peak is most of it.
_MOST_FRACTION = 0.5
# What is worth a remedy, as a part of the peak.
_MUCH_FRACTION = 0.05
# What one layer works with, over what it keeps when it is left alone, at the very most.
_WORKING_FACTOR = 3
# Layers that keep less than this part of the peak hardly matter to it.
_LITTLE_FRACTION = 0.1
# Ranks that differ by more than this do so for a reason.
_UNEVEN_FRACTION = 0.05
# The device has more room than the budget when it is larger by this.
_ROOM_FRACTION = 0.1

_LOSS_ADVICE = (
    "If the loss is a cross-entropy over a large vocabulary, its logits are what to shrink: a "
    "fused or chunked cross-entropy never holds them all."
)
_STATE_ADVICE = (
    "As far as that is the optimizer's state, one with less (8-bit, or factored) lowers it, and "
    "what is spared is free for the layers."
)
_KNOWN_STATE_ADVICE = (
    "An optimizer with less of it (8-bit, or factored) lowers that, and what is spared is free for "
    "the layers."
)
_PARAMETERS_ADVICE = (
    "Parameters in fewer bits, or sharded over ranks, lower it, and what is spared is free for the "
    "layers."
)
_UPDATE_ADVICE = (
    "Unless it is so already, fused=True updates without temporaries, and foreach=False with those "
    "of one parameter at a time."
)
_CLIPPING_ADVICE = (
    "clip_grad_norm_(..., foreach=False) needs temporaries of one gradient at a time."
)


def limits(found: Quantities) -> list[Fact]:
    """Returns what limits the step, each with what to do about it."""
    tried = found.subject
    if tried is None:
        return _nothing_ran(found)
    return [
        *_floor_over_budget(found),
        *_peak_phase(found, tried),
        *gradients_kept(found, tried),
        *_floor_share(found, tried),
        *_smallest(found),
        *_allocator(found, tried),
        *_ranks(tried),
        *_room(found),
    ]


def floor_phase(found: Quantities) -> Phase | None:
    """Returns the phase of full checkpointing that holds the floor; None where it is not known."""
    full, floor = found.full, found.result.floor_bytes
    if full is None or floor is None:
        return None
    peaks = full.measurement.phase_peak_bytes
    held = [phase for phase in (Phase.OPTIMIZER, Phase.CLIPPING) if peaks.get(phase) == floor]
    return held[0] if held else Phase.LOSS


def _nothing_ran(found: Quantities) -> list[Fact]:
    full = found.result.full
    if full is None or full.failure is None:
        return []  # it may be that there was no time to run it
    return [
        Fact(
            sentence="Even the steps with all layers checkpointed gave no figures.",
            advice="Use a smaller batch, or a device with more memory."
            if full.failure.kind is FailureKind.OUT_OF_MEMORY
            else full.failure.line,
        )
    ]


def _floor_over_budget(found: Quantities) -> list[Fact]:
    floor = found.floor
    if floor is None or not found.result.goal.has_budget or floor.value <= found.budget.value:
        return []
    return [
        state(
            "The budget is {lacking} under the floor, which checkpointing does not change",
            "Use a larger budget, or a smaller batch.",
            lacking=(floor - found.budget, Unit.GIB),
        )
    ]


def _peak_phase(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns what the phase that holds the peak says about it."""
    phase = tried.measurement.peak_phase
    peak = (tried.allocated, Unit.GIB)
    if phase is Phase.OPTIMIZER:
        return [
            state("The optimizer's step holds the peak, {peak}", _UPDATE_ADVICE, peak=peak),
            *_free_to_keep(tried),
        ]
    if phase is Phase.CLIPPING:
        return [state("Gradient clipping holds the peak, {peak}", _CLIPPING_ADVICE, peak=peak)]
    return [*(_loss(tried) or _outside(found, tried)), *_layers_share(found, tried)]


def _loss(tried: Tried) -> list[Fact]:
    """Returns what the loss takes for itself, where that may be much of the peak."""
    forward, loss = tried.phase(Phase.FORWARD), tried.phase(Phase.LOSS)
    if forward is None or loss is None or tried.measurement.peak_phase is Phase.FORWARD:
        return []
    own = loss - forward
    if own.value < _MUCH_FRACTION * tried.allocated.value:
        return []
    where = "which holds the peak"
    if tried.measurement.peak_phase is Phase.BACKWARD:
        where = "and may still be there when the backward pass, which holds the peak, begins"
    return [
        state(
            "What the model's output and the loss add to the forward pass is {own} at the least, "
            + where,
            _LOSS_ADVICE,
            own=(own, Unit.GIB),
        )
    ]


def _outside(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns what is at the peak that is neither state nor kept by layers, where it is too much.

    Too much to be what one layer works with: its activations, their gradients and a few more.
    """
    kept = found.kept_by_layers(tried.candidate.policy)
    optimizer = tried.phase(Phase.OPTIMIZER)
    if kept is None or optimizer is None:
        return []
    rest = tried.allocated - kept - optimizer
    largest = max(
        (found.layer(kind, "alone_bytes") for kind in found.layer_prices),
        key=lambda quantity: quantity.value,
    )
    if rest.value < max(_MUCH_FRACTION * tried.allocated.value, _WORKING_FACTOR * largest.value):
        return []
    return [
        state(
            "At the peak {rest} at the least is neither state nor kept by layers, and the largest "
            "layer's activations are {largest}: so most of it lies outside the layers, in the "
            "model's output or the loss",
            _LOSS_ADVICE,
            rest=(rest, Unit.MIB),
            largest=(largest, Unit.MIB),
        )
    ]


def _free_to_keep(tried: Tried) -> list[Fact]:
    """Returns what layers could keep more before they hold the peak."""
    phases = (tried.phase(phase) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
    highest = max(filter(None, phases), key=lambda peak: peak.value, default=None)
    if highest is None:
        return []
    return [
        state(
            "Until the layers hold the peak they may keep {more} more, at no cost in memory",
            more=(tried.allocated - highest, Unit.MIB),
        )
    ]


def _layers_share(found: Quantities, tried: Tried) -> list[Fact]:
    kept = found.kept_by_layers(tried.candidate.policy)
    if kept is None or found.result.needs_no_checkpointing:
        return []
    share = kept / tried.allocated
    if share.value > _LITTLE_FRACTION:
        return []
    return [
        state(
            "The layers keep {kept}, {share} of the peak's size: hardly anything is left that "
            "recomputing more could free",
            "What one layer works with and what lies outside the layers is the rest: smaller "
            "layers (--layers), a smaller batch or shorter sequences lower it.",
            kept=(kept, Unit.MIB),
            share=(share, Unit.SHARE),
        )
    ]


def _floor_share(found: Quantities, tried: Tried) -> list[Fact]:
    floor, phase = found.floor, floor_phase(found)
    if floor is None or phase is None or found.result.needs_no_checkpointing:
        return []
    share = floor / tried.peak
    if share.value < _MOST_FRACTION:
        return []
    return [
        state(
            "The floor is {share} of the peak: that part is beyond the reach of checkpointing",
            _PARAMETERS_ADVICE,
            share=(share, Unit.SHARE),
        ),
        *_optimizer_state(found, tried),
        *_outside_the_layers(found, tried),
    ]


def _optimizer_state(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns what the optimizer holds beside parameters and gradients, where that is much."""
    drawn = found.drawn(tried.candidate.policy)
    if drawn is not None and MemoryKind.OPTIMIZER in drawn.kinds:
        kept = drawn.at_peak(MemoryKind.OPTIMIZER)
        if kept.value < _MUCH_FRACTION * drawn.peak.value:
            return []
        return [
            state(
                "The optimizer keeps {kept} from step to step, {share} of the highest point of a "
                "dry run",
                _KNOWN_STATE_ADVICE,
                kept=(kept, Unit.MIB),
                share=(kept / drawn.peak, Unit.SHARE),
            )
        ]
    parameters, optimizer = found.parameters, tried.phase(Phase.OPTIMIZER)
    if parameters is None or optimizer is None:
        return []
    others = optimizer - parameters * exactly(2)
    if others.value < _MUCH_FRACTION * tried.peak.value:
        return []
    return [
        state(
            "While the optimizer steps {others} are alive beside the parameters and gradients of "
            "their size",
            _STATE_ADVICE,
            others=(others, Unit.GIB),
        )
    ]


def _outside_the_layers(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns how far the floor would go down without what the loss needs, where that is much."""
    floor = found.floor
    optimizer = None if found.full is None else found.full.phase(Phase.OPTIMIZER)
    if floor is None or optimizer is None:
        return []
    more = floor - optimizer
    if more.value < _MUCH_FRACTION * tried.peak.value:
        return []
    return [
        state(
            "While the loss is computed {more} more is alive than the optimizer's step needs, "
            "whatever the layers do: the loss, and what else lies outside the layers, hold at "
            "least that much",
            _LOSS_ADVICE,
            more=(more, Unit.GIB),
        )
    ]


def _smallest(found: Quantities) -> list[Fact]:
    """Returns how far down checkpointing was seen to go, where something fits."""
    smallest = found.smallest
    if found.best is None or smallest is None or found.result.needs_no_checkpointing:
        return []
    if smallest.candidate.policy.key == found.best.candidate.policy.key:
        return []
    return [
        state(
            "The smallest peak that was seen is {peak}, by {name}, whose step takes {step} against "
            "the winner's",
            peak=(smallest.peak, Unit.GIB),
            name=smallest.name,
            step=(change(smallest.seconds, found.best.seconds), Unit.CHANGE),
        )
    ]


def _allocator(found: Quantities, tried: Tried) -> list[Fact]:
    facts = []
    reserved = tried.reserved
    if reserved is not None and is_fragmented(tried.measurement):
        is_set = "expandable_segments:True" in found.result.environment.allocator_settings
        facts.append(
            state(
                "The allocator holds {reserved} for {allocated} of tensors: {gap} is lost between "
                "them",
                "Expandable segments are on already; less variety in sizes would help."
                if is_set
                else "PYTORCH_ALLOC_CONF=expandable_segments:True may win it back.",
                reserved=(reserved, Unit.GIB),
                allocated=(tried.allocated, Unit.GIB),
                gap=(reserved - tried.allocated, Unit.GIB),
            )
        )
    if tried.measurement.alloc_retries:
        facts.append(
            state(
                "The allocator freed its cache and tried again {retries} times in a step",
                "The device is full: a smaller budget may be faster.",
                retries=(tried.retries, Unit.COUNT),
            )
        )
    return facts


def _ranks(tried: Tried) -> list[Fact]:
    peaks = tried.rank_peaks()
    if len(peaks) < 2:
        return []
    fullest = max(peaks, key=lambda peak: peak.value)
    emptiest = min(peaks, key=lambda peak: peak.value)
    gap = change(fullest, emptiest)
    if gap.value <= _UNEVEN_FRACTION:
        return []
    return [
        state(
            "The fullest rank peaks at {fullest}, {gap} against the emptiest: one policy serves "
            "all, so the fullest decides",
            "More even work over the ranks would leave more to save.",
            fullest=(fullest, Unit.GIB),
            gap=(gap, Unit.CHANGE),
        )
    ]


def _room(found: Quantities) -> list[Fact]:
    environment = found.result.environment
    memory = found.device_memory
    if found.result.goal.kind is not GoalKind.SPEED:
        return []  # it was not asked to be faster
    if environment.device == "cpu" or found.best is None or found.result.needs_no_checkpointing:
        return []
    if memory.value < found.budget.value * (1 + _ROOM_FRACTION):
        return []
    return [
        state(
            "The device has {memory}, {room} more than the budget",
            "A larger --budget-gb is the simplest way to a faster step.",
            memory=(memory, Unit.GIB),
            room=(memory - found.budget, Unit.GIB),
        )
    ]
