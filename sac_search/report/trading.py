"""What memory buys, in a study's own figures: per saved op, per layer, and at the next budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sac_search.report.facts import Basis, Fact, Quantity, Unit, exactly, state, total
from sac_search.report.quantities import LayerGroup, Quantities, Tried

# So many of each sort are named, the weightiest.
_MOST_ALIKE = 3
_OF_THE_LAST = (
    "Not so the last one: its backward comes first, so what it would recompute is needed at once."
)
_LAST_FIRST = (
    "The last layer is the one to begin with: its backward comes first, so what it would keep is "
    "needed at once in any case, and the peak hardly rises."
)
# Prices that are off by more than this part of what was measured are called rough.
_FAR_FRACTION = 0.25
# A gain of a smaller part of the step is not worth a sentence.
_SMALLEST_GAIN_FRACTION = 0.001


def saving(found: Quantities) -> list[Fact]:
    """Returns what the winner's decisions buy and cost, and what could be bought next."""
    best = found.best
    if best is None:
        return []
    if best.candidate.policy.compiled is not None:
        return _of_compiled(found)
    groups = found.groups(best.candidate.policy)
    checkpointed = [group for group in groups if group.labels is not None]
    if not checkpointed:
        return []
    return [
        *_all_together(found, groups, best),
        *_saved(found, checkpointed),
        *_policy_function(found, checkpointed),
        *_nothing_pays(found, checkpointed),
        *_left_alone(found, groups),
        *_offers(found, checkpointed, best),
        *_next_alone(found, checkpointed, best),
    ]


def _of_compiled(found: Quantities) -> list[Fact]:
    facts = [
        Fact(
            sentence=(
                "The winner is compiled, and what single ops cost inside compiled code is not "
                "known: it was measured as a whole."
            )
        )
    ]
    best = found.best
    if best is not None and best.compiling is not None:
        facts.append(
            state(
                "Compiling it takes {compiling}, once, before the first step",
                compiling=(best.compiling, Unit.SECONDS),
            )
        )
    return facts


def _all_together(found: Quantities, groups: list[LayerGroup], best: Tried) -> list[Fact]:
    """Returns what the winner spares against full checkpointing by the prices, and measured."""
    full = found.full
    if found.price_basis is Basis.FORECAST:
        return []  # the same prices on both sides
    if full is None or full.candidate.policy.key == best.candidate.policy.key:
        return []
    spared = []
    for group in groups:
        one = found.recomputed(replace(group, labels=frozenset()))
        if group.labels is not None:
            one -= found.recomputed(group)
        spared.append(one * exactly(group.layers))
    by_prices, measured = total(spared), full.seconds - best.seconds
    are_apart = abs(by_prices.value - measured.value) > _FAR_FRACTION * abs(measured.value)
    return [
        state(
            "Against recomputing all of every layer the winner spares {spared} of a step by the "
            "prices that follow, and was {measured} faster",
            "The two are far apart: trust the order of the prices more than their size."
            if are_apart
            else "",
            spared=(by_prices, Unit.SECONDS),
            measured=(measured, Unit.SECONDS),
        )
    ]


def _saved(found: Quantities, groups: list[LayerGroup]) -> list[Fact]:
    facts = []
    for kind, label in found.save_prices:
        saving_it = [g for g in groups if g.kind == kind and label in (g.labels or ())]
        count = exactly(sum(group.layers for group in saving_it))
        if not count.value:
            continue
        seconds = found.save(kind, label, "seconds") * count
        kept = found.save(kind, label, "kept_bytes") * count
        facts.append((seconds, kept, kind, label, count))
    facts.sort(key=lambda fact: -fact[0].value)
    return [
        state(
            "{label}, saved in {count} {layers} of {kind}, spares {seconds} of recomputing in a "
            "step and keeps {kept}: {rate}",
            label=label,
            layers=_layers(count.value),
            kind=kind,
            count=(count, Unit.COUNT),
            seconds=(seconds, Unit.SECONDS),
            kept=(kept, Unit.MIB),
            rate=_rate(seconds, kept),
        )
        for seconds, kept, kind, label, count in facts
    ]


def _policy_function(found: Quantities, groups: list[LayerGroup]) -> list[Fact]:
    saving_groups = [group for group in groups if group.labels]
    if not saving_groups:
        return []
    count = sum(group.layers for group in saving_groups)
    costs = [
        found.layer(group.kind, "policy_seconds") * exactly(group.layers) for group in saving_groups
    ]
    return [
        state(
            "Asking the policy about every op, in {count} {layers} that {save} something, takes "
            "{seconds} of a step",
            count=(exactly(count), Unit.COUNT),
            layers=_layers(count),
            save="save" if count > 1 else "saves",
            seconds=(total(costs), Unit.SECONDS),
        )
    ]


def _nothing_pays(found: Quantities, groups: list[LayerGroup]) -> list[Fact]:
    """Returns the kinds whose layers save nothing since asking the policy costs more."""
    facts: list[tuple[float, Fact]] = []
    for kind in dict.fromkeys(group.kind for group in groups if not group.labels):
        gain = found.layer(kind, "recompute_seconds") - found.layer(kind, "fixed_seconds")
        policy = found.layer(kind, "policy_seconds")
        if policy.value < gain.value:
            continue
        fact = state(
            "Saving pays in no layer of {kind}: asking the policy about its ops takes {policy}, "
            "and all that could be saved spares {gain}",
            kind=kind,
            policy=(policy, Unit.SECONDS),
            gain=(gain, Unit.SECONDS),
        )
        facts.append((policy.value, fact))
    return _weightiest(facts)


def _weightiest(facts: list[tuple[float, Fact]]) -> list[Fact]:
    """Returns the few facts that weigh most, of pairs of a weight and a fact."""
    return [fact for _, fact in sorted(facts, key=lambda pair: -pair[0])[:_MOST_ALIKE]]


def _left_alone(found: Quantities, groups: list[LayerGroup]) -> list[Fact]:
    facts: list[tuple[float, Fact]] = []
    for group in groups:
        if group.labels is not None:
            continue
        plain = replace(group, labels=frozenset())
        seconds = (found.recomputed(plain), Unit.SECONDS)
        less = found.kept(group) - found.kept(plain)
        if group.has_last and group.layers == 1:
            fact = state(
                "The last layer, of {kind}, is left alone: its backward comes first, so that "
                "checkpointing it would cost {seconds} of a step and hardly lower the peak",
                kind=group.kind,
                seconds=seconds,
            )
            facts.append((less.value, fact))
            continue
        fact = state(
            "{count} {layers} of {kind} {are} left alone: checkpointing {one} would keep {less} "
            "less and cost {seconds} of a step",
            _OF_THE_LAST if group.has_last else "",
            count=(exactly(group.layers), Unit.COUNT),
            layers=_layers(group.layers),
            are="are" if group.layers > 1 else "is",
            one="one of them" if group.layers > 1 else "it",
            kind=group.kind,
            less=(less, Unit.MIB),
            seconds=seconds,
        )
        facts.append((less.value, fact))
    return _weightiest(facts)


def _next_alone(found: Quantities, groups: list[LayerGroup], best: Tried) -> list[Fact]:
    facts: list[tuple[float, Fact]] = []
    for group in groups:
        alone = replace(group, labels=None)
        seconds, kept = found.recomputed(group), found.kept(alone) - found.kept(group)
        if seconds.value <= 0:
            continue
        parts: dict[str, tuple[Quantity, Unit] | str] = {
            "kind": group.kind,
            "what": _describe(group, plural=group.layers > 1),
            "seconds": (seconds, Unit.SECONDS),
            "kept": (kept, Unit.MIB),
            "rate": _rate(seconds, kept),
        }
        which = "the only layer"
        if group.layers > 1:
            which = "one of the {count} layers"
            parts["count"] = (exactly(group.layers), Unit.COUNT)
        fact = state(
            f"Leaving alone {which} of {{kind}} that {{what}} would spare {{seconds}} and keep "
            "{kept} more: {rate}",
            _LAST_FIRST if group.has_last else _fits_advice(found, best, kept),
            **parts,
        )
        facts.append((seconds.value / max(kept.value, 1), fact))
    return _weightiest(facts)


def _offers(found: Quantities, groups: list[LayerGroup], best: Tried) -> list[Fact]:
    """Returns the best buys: one layer saving one thing more, or doing as others do."""
    offers = []
    for group in groups:
        others = [g for g in groups if g.kind == group.kind and g.labels != group.labels]
        labels = {label for kind, label in found.save_prices if kind == group.kind}
        wider = [
            replace(group, labels=(group.labels or frozenset()) | {label})
            for label in sorted(labels - (group.labels or frozenset()))
        ]
        offers += [_Offer(found, group, to) for to in (*others, *wider)]
    least = _SMALLEST_GAIN_FRACTION * best.seconds.value
    worth = [o for o in offers if o.seconds.value * o.group.layers > least and o.kept.value >= 0]
    worth.sort(key=lambda offer: -offer.seconds.value / max(offer.kept.value, 1))
    different: dict[str, _Offer] = {}
    for offer in worth:  # the same for other layers of the kind says nothing new
        different.setdefault(f"{offer.group.kind}: {offer.added}", offer)
    return [
        state(
            "Next, a layer of {kind} that {what} could {instead}, which spares {seconds} and keeps "
            "{kept} more: {rate}",
            _fits_advice(found, best, offer.kept),
            kind=offer.group.kind,
            what=_describe(offer.group),
            instead=offer.instead,
            seconds=(offer.seconds, Unit.SECONDS),
            kept=(offer.kept, Unit.MIB),
            rate=_rate(offer.seconds, offer.kept),
        )
        for offer in list(different.values())[:_MOST_ALIKE]
    ]


class _Offer:
    """One checkpointed layer of a group, doing something else."""

    def __init__(self, found: Quantities, group: LayerGroup, to: LayerGroup) -> None:
        self.group = group
        self.seconds = found.recomputed(group) - found.recomputed(to)
        self.kept = found.kept(to) - found.kept(group)
        more, less = (to.labels or frozenset()), (group.labels or frozenset())
        self.added, dropped = ", ".join(sorted(more - less)), ", ".join(sorted(less - more))
        self.instead = f"save {self.added or 'nothing'}"
        if dropped:
            self.instead += f" and not {dropped}"
        elif less:
            self.instead += " as well"


def _rate(seconds: Quantity, kept: Quantity) -> tuple[Quantity, Unit] | str:
    return (seconds / kept, Unit.RATE) if kept.value > 0 else "for no memory at all"


def _fits_advice(found: Quantities, best: Tried, kept: Quantity) -> str:
    # What a caching allocator will reserve is not known of a forecast.
    if not found.result.goal.has_budget:
        return ""
    if found.price_basis is Basis.FORECAST or kept.value > found.budget.value - best.peak.value:
        return ""
    return "That much is left of the budget."


def _layers(count: float) -> str:
    return "layers" if count > 1 else "layer"


def _describe(group: LayerGroup, *, plural: bool = False) -> str:
    if not group.labels:
        return "recompute all" if plural else "recomputes all"
    return f"{'save' if plural else 'saves'} {', '.join(sorted(group.labels))}"


# --- the whole trade-off --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A budget, and what the fastest policy under it is believed to cost."""

    budget: Quantity
    overhead: Quantity
    policy: str


def more_memory(found: Quantities) -> list[Fact]:
    """Returns what the next budgets would buy, and what a smaller one would cost."""
    if found.result.needs_no_checkpointing:
        return []
    points = [
        _Point(
            budget=Quantity(point.budget_bytes, f"{path}.budget_bytes", Basis.GIVEN),
            overhead=Quantity(
                point.overhead_seconds, f"{path}.overhead_seconds", found.price_basis
            ),
            policy=point.policy.describe(),
        )
        for point, path in found.frontier
    ]
    own_bytes = found.result.budget_bytes
    own = next((point for point in points if point.budget.value == own_bytes), None)
    larger = [point for point in points if point.budget.value > own_bytes]
    smaller = [point for point in points if point.budget.value < own_bytes]
    if own is None:
        return [_least(point) for point in larger[:1]]
    steps = [*larger[:1], *(point for point in larger[1:] if point is larger[-1])]
    return [
        *_of_eager_steps(found),
        *(_step_up(found, own, point) for point in steps),
        *(_step_down(found, own, point) for point in _next_below(found, own, smaller)),
    ]


def _next_below(found: Quantities, own: _Point, smaller: list[_Point]) -> list[_Point]:
    """Returns the largest of the smaller budgets that costs time, or else the smallest of them."""
    least = own.overhead.value + _noise_seconds(found)
    dearer = [point for point in smaller if point.overhead.value > least]
    return dearer[-1:] or smaller[:1]


def _of_eager_steps(found: Quantities) -> list[Fact]:
    if found.best is None or found.best.candidate.policy.compiled is None:
        return []
    return [Fact(sentence="The winner is compiled; what follows is of eager steps.")]


def _least(point: _Point) -> Fact:
    return state(
        "The smallest budget for which there is a plan is {budget}: {overhead} per step above no "
        "checkpointing",
        budget=(point.budget, Unit.GIB),
        overhead=(point.overhead, Unit.SECONDS),
    )


def _step_up(found: Quantities, own: _Point, point: _Point) -> Fact:
    gain = own.overhead - point.overhead
    more = point.budget - own.budget
    if gain.value <= _noise_seconds(found):
        return state(
            "{more} more ({budget}) would buy {gain} of a step: less than a measurement shows",
            more=(more, Unit.MIB),
            budget=(point.budget, Unit.GIB),
            gain=(gain, Unit.SECONDS),
        )
    return state(
        "{more} more ({budget}) would spare {gain} of a step, with {policy}: {overhead} above no "
        "checkpointing instead of the {own} that the plan for the present budget has",
        more=(more, Unit.MIB),
        budget=(point.budget, Unit.GIB),
        gain=(gain, Unit.SECONDS),
        overhead=(point.overhead, Unit.SECONDS),
        own=(own.overhead, Unit.SECONDS),
        policy=point.policy,
    )


def _step_down(found: Quantities, own: _Point, point: _Point) -> Fact:
    loss = point.overhead - own.overhead
    is_little = loss.value <= _noise_seconds(found)
    return state(
        "{less} less ({budget}) would cost {loss} of a step, with {policy}"
        + (": less than a measurement shows" if is_little else ""),
        less=(own.budget - point.budget, Unit.MIB),
        budget=(point.budget, Unit.GIB),
        loss=(loss, Unit.SECONDS),
        policy=point.policy,
    )


def _noise_seconds(found: Quantities) -> float:
    best = found.best
    return 0.0 if best is None else best.noise.value * best.seconds.value
