"""Sizes and prices of a workload's layers for the planner, and policies out of its plans.

Sizes come from forecasts: what a layer keeps when it is left alone, when all of it is recomputed,
and when one op site more is saved, with storages counted once. Prices come from the trace: the
seconds of each op site, as far as the backward pass really runs it again (early stop leaves out a
region's tail).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sac_search.forecast import Forecast
from sac_search.planner import (
    Kind,
    Option,
    Plan,
    Problem,
    lower_bound,
    overhead_of,
    solve,
    useful_options,
    with_phase_peaks,
)
from sac_search.policy import (
    NO_CHECKPOINTING,
    PLAIN_TIER,
    LayerChoice,
    Policy,
    Tier,
    checkpoint_layers,
)
from sac_search.records import Phase
from sac_search.space import (
    Granularity,
    SearchSpace,
    build_space,
    decision_name,
    make_tier,
    saved_name,
)
from sac_search.trace import LayerTrace

# Save sets are enumerated over this many decisions of a kind at most, those that cost most time.
_MOST_DECISIONS = 14
# How often a plan for one budget is dry-run and corrected.
_MOST_DRY_RUNS = 8
# How far over the budget, by its rows, a plan may be and still be worth a dry run.
_OPTIMISM = 0.02

Forecaster = Callable[[Policy], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSetOption:
    """What a layer may do, and the tier that does it."""

    tier: Tier | None
    """None leaves the layer alone."""
    option: Option
    """Its price and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that a plan is made from."""

    layers: tuple[str, ...]
    """FQNs in the order in which they run."""
    kinds: tuple[tuple[SaveSetOption, ...], ...]
    """For each kind, what its layers may do; the first leaves them alone."""
    problem: Problem
    """The same as the planner sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPolicy:
    """A plan as a policy, dry-run."""

    policy: Policy
    """The policy."""
    overhead_seconds: float
    """Step time above that without checkpointing, by the profile's prices."""
    forecast: Forecast
    """Its dry run."""
    bound_seconds: float | None
    """Overhead that no policy of this form can go under, by the same prices."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """Saves the ops of a class that have one size."""

    name: str
    space: SearchSpace

    def tier(self) -> Tier:
        return make_tier([self.name], self.space.saves)

    def keys_in(self, layer: LayerTrace) -> list[tuple[str, str]]:
        """Returns op and site of all that it saves in `layer`."""
        saved = self.space.saves[self.name]
        return [
            (op.op, op.site)
            for op in layer.ops
            if decision_name(op, Granularity.SITE) == self.name
            and saved_name(op, Granularity.SITE) in saved
        ]


def build_profile(
    layers: Sequence[LayerTrace],
    gradient_bytes: dict[str, int],
    forecast: Forecaster,
    *,
    seconds_per_policy_op: float,
) -> Profile:
    """Returns sizes and prices of the traced layers.

    `gradient_bytes` are those of each layer's own parameters. `seconds_per_policy_op` is what a
    policy function costs per op of a layer, both passes together.
    """
    names = tuple(layer.name for layer in layers)
    by_kind: dict[str, list[LayerTrace]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    plain = forecast(checkpoint_layers(names))
    alone = forecast(NO_CHECKPOINTING)
    space = build_space(layers, granularity=Granularity.SITE)
    decisions = [_Decision(name, space) for name in space.saves]
    grown = _bytes_per_decision(by_kind, decisions, plain, forecast)
    kinds, options = [], []
    for kind, members in by_kind.items():
        first = members[0].name
        found = _options_of(
            members,
            [d for d in decisions if (kind, d.name) in grown],
            {d.name: grown[kind, d.name] for d in decisions if (kind, d.name) in grown},
            plain=plain,
            alone_bytes=alone.layer_bytes[first].saved_bytes,
            seconds_per_policy_op=seconds_per_policy_op,
        )
        options.append(found)
        kinds.append(
            Kind(
                options=tuple(o.option for o in found),
                activation_bytes=alone.layer_bytes[first].saved_bytes,
                gradient_bytes=gradient_bytes[first],
            )
        )
    order = tuple(list(by_kind).index(layer.kind) for layer in layers)
    empty = Problem(
        kinds=tuple(kinds),
        order=order,
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=0,
        backward_bytes=0,
        fixed_bytes=0,
    )
    # With nothing checkpointed the first backward holds the peak, with everything an inner one may.
    start = _corrected(empty, _every_layer(order, 0), alone)
    both = _corrected(replace(start, backward_bytes=2**50), _every_layer(order, 1), plain)
    # The forward of a layer needs more than it keeps, how much more is its tier's own. What is too
    # little here is put right by the dry runs; what is too much would hide good plans from them.
    problem = replace(
        both,
        forward_bytes=min(start.forward_bytes, both.forward_bytes),
        loss_bytes=min(start.loss_bytes, both.loss_bytes),
    )
    return Profile(layers=names, kinds=tuple(options), problem=problem)


def plan_policy(
    profile: Profile, budget_bytes: int, forecast: Forecaster, *, tiers: int = 2
) -> PlannedPolicy | None:
    """Returns the fastest policy whose dry run stays under the budget, or None if none does.

    Every plan is dry-run, and the rows corrected so that they give the peak that it really has.
    """
    problem = profile.problem
    best: tuple[Plan, Policy, Forecast] | None = None
    tried: set[tuple[int, ...]] = set()
    optimism = 0.0
    for _ in range(_MOST_DRY_RUNS):
        plan = solve(problem, round(budget_bytes * (1 + optimism)), tiers=tiers)
        if plan is None or plan.options in tried:
            break
        if best is not None and plan.overhead_seconds >= best[0].overhead_seconds:
            break
        tried.add(plan.options)
        policy = policy_of(profile, plan.options)
        dry = forecast(policy)
        problem = _corrected(problem, plan, dry)
        # Rows may say too much as well as too little: once something fits, a plan a little over
        # the budget by the rows is tried, and kept if its dry run is under it.
        optimism = 0.0
        if dry.peak_bytes <= budget_bytes:
            best = (plan, policy, dry)
            optimism = _OPTIMISM
    if best is None:
        # At the very end of the frontier the rows may need more dry runs than there are; what is
        # left to try is recomputing everything.
        best = _recompute_all(profile, budget_bytes, forecast)
    if best is None:
        return None
    plan, policy, dry = best
    return PlannedPolicy(
        policy=policy,
        overhead_seconds=plan.overhead_seconds,
        forecast=dry,
        # For a little more than the budget, since the rows may say a little too much.
        bound_seconds=lower_bound(problem, round(budget_bytes * (1 + _OPTIMISM))),
    )


def _recompute_all(
    profile: Profile, budget_bytes: int, forecast: Forecaster
) -> tuple[Plan, Policy, Forecast] | None:
    options = _every_layer(profile.problem.order, 1).options
    policy = policy_of(profile, options)
    dry = forecast(policy)
    if dry.peak_bytes > budget_bytes:
        return None
    seconds = overhead_of(profile.problem, options)
    plan = Plan(options=options, overhead_seconds=seconds, peak_bytes=dry.peak_bytes)
    return plan, policy, dry


def policy_of(profile: Profile, options: Sequence[int]) -> Policy:
    """Returns the policy of a choice of options, one per layer in the order in which they run."""
    tiers: list[Tier] = []
    chosen: list[LayerChoice] = []
    for name, kind, option in zip(profile.layers, profile.problem.order, options, strict=True):
        tier = profile.kinds[kind][option].tier
        if tier is None:
            continue
        if tier not in tiers:
            tiers.append(tier)
        chosen.append(LayerChoice(name=name, tier=tiers.index(tier)))
    return Policy(tiers=tuple(tiers), layers=tuple(chosen))


def _every_layer(order: Sequence[int], option: int) -> Plan:
    return Plan(options=(option,) * len(order), overhead_seconds=0.0, peak_bytes=0)


def _corrected(problem: Problem, plan: Plan, dry: Forecast) -> Problem:
    peaks = dry.phase_peak_bytes
    return with_phase_peaks(
        problem,
        plan,
        forward=peaks.get(Phase.FORWARD, 0),
        loss=peaks.get(Phase.LOSS, 0),
        backward=peaks.get(Phase.BACKWARD, 0),
        fixed=max(peaks.get(Phase.CLIPPING, 0), peaks.get(Phase.OPTIMIZER, 0)),
    )


def _bytes_per_decision(
    by_kind: dict[str, list[LayerTrace]],
    decisions: Sequence[_Decision],
    plain: Forecast,
    forecast: Forecaster,
) -> dict[tuple[str, str], int]:
    """Returns what one layer of a kind keeps more for each decision.

    Alike layers try one decision each, so that a few dry runs answer for all.
    """
    waiting = {
        kind: [d for d in decisions if d.keys_in(members[0])] for kind, members in by_kind.items()
    }
    grown: dict[tuple[str, str], int] = {}
    while any(waiting.values()):
        tried: dict[str, tuple[str, _Decision]] = {}
        tiers: list[Tier] = []
        choices: list[LayerChoice] = []
        for kind, members in by_kind.items():
            for layer in members:
                tier = PLAIN_TIER
                if waiting[kind]:
                    decision = waiting[kind].pop()
                    tried[layer.name] = (kind, decision)
                    tier = decision.tier()
                if tier not in tiers:
                    tiers.append(tier)
                choices.append(LayerChoice(name=layer.name, tier=tiers.index(tier)))
        dry = forecast(Policy(tiers=tuple(tiers), layers=tuple(choices)))
        for name, (kind, decision) in tried.items():
            saved = dry.layer_bytes[name].saved_bytes
            grown[kind, decision.name] = max(0, saved - plain.layer_bytes[name].saved_bytes)
    return grown


def _options_of(
    members: Sequence[LayerTrace],
    decisions: Sequence[_Decision],
    grown: dict[str, int],
    *,
    plain: Forecast,
    alone_bytes: int,
    seconds_per_policy_op: float,
) -> tuple[SaveSetOption, ...]:
    layer = members[0]
    replayed = _replayed_fraction(members, plain)
    recompute_seconds = sum(
        np.median([_seconds_of(member, key) for member in members]) * fraction
        for key, fraction in replayed.items()
    )
    gains = {
        d.name: float(
            sum(
                np.median([_seconds_of(member, key) for member in members]) * replayed[key]
                for key in d.keys_in(layer)
            )
        )
        for d in decisions
    }
    worthwhile = sorted((d for d in decisions if gains[d.name] > 0), key=lambda d: -gains[d.name])
    worthwhile = worthwhile[:_MOST_DECISIONS]
    plain_bytes = plain.layer_bytes[layer.name].saved_bytes
    policy_seconds = seconds_per_policy_op * sum(op.calls for op in layer.ops)
    subsets = [
        subset
        for size in range(1, len(worthwhile) + 1)
        for subset in itertools.combinations(worthwhile, size)
    ]
    alone = Option(overhead_seconds=0.0, saved_bytes=alone_bytes, is_tier=False)
    recompute = Option(
        overhead_seconds=float(recompute_seconds), saved_bytes=plain_bytes, is_tier=True
    )
    saving = [
        Option(
            overhead_seconds=float(recompute_seconds)
            + policy_seconds
            - sum(gains[d.name] for d in subset),
            saved_bytes=plain_bytes + sum(grown[d.name] for d in subset),
            is_tier=True,
        )
        for subset in subsets
    ]
    options = [alone, recompute, *saving]
    kept = [index for index in useful_options(options) if index > 1]
    return (
        SaveSetOption(tier=None, option=alone),
        SaveSetOption(tier=PLAIN_TIER, option=recompute),
        *(
            SaveSetOption(tier=_tier_of(subsets[index - 2]), option=options[index])
            for index in kept
        ),
    )


def _tier_of(decisions: Sequence[_Decision]) -> Tier:
    parts = [decision.tier() for decision in sorted(decisions, key=lambda d: d.name)]
    return Tier(
        classes=tuple(name for part in parts for name in part.classes),
        ops=tuple(sorted({op for part in parts for op in part.ops})),
        save_random=any(part.save_random for part in parts),
    )


def _replayed_fraction(
    members: Sequence[LayerTrace], plain: Forecast
) -> dict[tuple[str, str], float]:
    """Returns for each op site of a kind how many of its calls plain checkpointing runs again."""
    replayed = plain.recomputed[members[0].name]
    return {
        (op.op, op.site): min(1.0, replayed.get((op.op, op.site), 0) / op.calls)
        for op in members[0].ops
    }


def _seconds_of(layer: LayerTrace, key: tuple[str, str]) -> float:
    return next((op.seconds for op in layer.ops if (op.op, op.site) == key), 0.0)


def rescaled(profile: Profile, factor: float) -> Profile:
    """Returns the profile with all prices multiplied: the traced seconds are roughly right."""
    kinds = tuple(
        tuple(
            replace(
                o, option=replace(o.option, overhead_seconds=factor * o.option.overhead_seconds)
            )
            for o in options
        )
        for options in profile.kinds
    )
    problem = replace(
        profile.problem,
        kinds=tuple(
            replace(kind, options=tuple(o.option for o in options))
            for kind, options in zip(profile.problem.kinds, kinds, strict=True)
        ),
    )
    return replace(profile, kinds=kinds, problem=problem)
