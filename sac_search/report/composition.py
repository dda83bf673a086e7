"""What a step's memory is made of, by the timelines that a study holds. Pure.

A timeline is that of a dry run, or of a step that is counted while it runs: it is told as what is
believed, and never as the measured peak.
"""

from __future__ import annotations

from sac_search.records import Phase
from sac_search.report.facts import Fact, Unit, state, total
from sac_search.report.points import peak_name
from sac_search.report.quantities import Quantities, Tried
from sac_search.timeline import MemoryKind

# Kinds of memory with less of the peak than this are told together.
_LEAST_FRACTION = 0.01
_OTHER_MOMENT = (
    "What was measured peaks in another phase, where the parts may be others: the two moments are "
    "nearly as high."
)
_ON_PURPOSE = "A step that adds to them on purpose needs them."
_FREED_ADVICE = {
    Phase.FORWARD: (
        "zero_grad(set_to_none=True) once the optimizer has stepped frees them, and lowers the "
        f"peak as far as no other moment is as high. {_ON_PURPOSE}"
    ),
    Phase.BACKWARD: (
        "zero_grad(set_to_none=True) once the optimizer has stepped frees them until the backward "
        "pass makes them, layer by layer: of those at that point, the ones that are made later are "
        f"spared. {_ON_PURPOSE}"
    ),
    Phase.OPTIMIZER: (
        "All gradients are needed at that moment, so zero_grad(set_to_none=True) would not lower "
        "the peak."
    ),
}
_FREED_ADVICE[Phase.LOSS] = _FREED_ADVICE[Phase.FORWARD]
_FREED_ADVICE[Phase.CLIPPING] = _FREED_ADVICE[Phase.OPTIMIZER]


def parts_of_peak(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns what each kind of memory has of the highest point; together they come to it."""
    drawn = found.drawn(tried.candidate.policy)
    if drawn is None or not drawn.peak.value:
        return []
    held = {kind: drawn.at_peak(kind) for kind in drawn.kinds}
    kinds = sorted((k for k in held if held[k].value), key=lambda k: -held[k].value)
    large = [k for k in kinds if held[k].value >= _LEAST_FRACTION * drawn.peak.value]
    small = [k for k in kinds if k not in large]
    parts = [(str(kind), held[kind]) for kind in large]
    if small:
        rest = ", ".join(map(str, small))
        name = f"the rest: {rest}" if len(small) > 1 else rest
        parts.append((name, total([held[kind] for kind in small])))
    told = [f"{{part_{i}}} ({{share_{i}}}) of {{kind_{i}}}" for i in range(len(parts))]
    figures = {f"part_{i}": (part, Unit.MIB) for i, (_, part) in enumerate(parts)}
    shares = {f"share_{i}": (p / drawn.peak, Unit.SHARE) for i, (_, p) in enumerate(parts)}
    is_elsewhere = drawn.timeline.peak_phase is not tried.measurement.peak_phase
    return [
        state(
            "A dry run has its highest point, {peak}, in {where}: " + ", ".join(told),
            _OTHER_MOMENT if is_elsewhere else "",
            peak=(drawn.peak, Unit.MIB),
            where=peak_name(drawn.timeline),
            **figures,
            **shares,
            **{f"kind_{i}": kind for i, (kind, _) in enumerate(parts)},
        )
    ]


def gradients_spared(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns that gradients of the step before are gone when a step begins, where they are."""
    drawn = found.drawn(tried.candidate.policy)
    if drawn is None or not drawn.has_gradients or drawn.gradients_at_start.value:
        return []
    return [
        state(
            "When the step begins {start} of gradients are left from the step before: "
            "zero_grad(set_to_none=True) has nothing more to free",
            start=(drawn.gradients_at_start, Unit.MIB),
        )
    ]


def gradients_kept(found: Quantities, tried: Tried) -> list[Fact]:
    """Returns which gradients of the step before are alive when a step begins, and at its peak."""
    drawn = found.drawn(tried.candidate.policy)
    if drawn is None or not drawn.has_gradients or not drawn.gradients_at_start.value:
        return []
    return [
        state(
            "When the step begins {start} of gradients are alive, left from the step before; at "
            "the highest point, in {where}, there are {peak}",
            _FREED_ADVICE[drawn.timeline.peak_phase],
            start=(drawn.gradients_at_start, Unit.MIB),
            where=peak_name(drawn.timeline),
            peak=(drawn.at_peak(MemoryKind.GRADIENTS), Unit.MIB),
        )
    ]
