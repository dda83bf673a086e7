"""Sizes and prices of a workload's layers: what the planner and the cost model start from.

Sizes come from dry runs: what a layer keeps when it is left alone, when all of it is recomputed,
and when it saves what one decision stands for, with storages counted once. Prices come from the
trace: the seconds of each op, as far as the backward pass really runs it again (early stop leaves
out a region's tail, so what is saved there buys nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sac_search.errors import CannotForecast
from sac_search.forecast import Forecast
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.records import Phase
from sac_search.space import (
    Choices,
    Granularity,
    LayerChoiceMode,
    SaveDecision,
    SearchSpace,
    build_space,
    label_of,
)
from sac_search.trace import LayerTrace, OpTrace

# Save sets are enumerated over this many decisions of a kind at most, those that cost most time.
MOST_LABELS = 14

DryRun = Callable[[Policy], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProfile:
    """One layer of a kind; bytes and seconds are those of a single layer."""

    name: str
    """The kind."""
    labels: tuple[str, ...]
    """Decisions that are worth something, most seconds first: `matmul[2048x8192]`."""
    label_bytes: tuple[int, ...]
    """For each of them, what the layer keeps more when it saves that."""
    label_seconds: tuple[float, ...]
    """For each of them, what recomputing it takes, as traced."""
    other_seconds: float
    """What is recomputed whatever is saved, as traced."""
    plain_bytes: int
    """What the layer keeps when all of it is recomputed."""
    alone_bytes: int
    """What it keeps when it is left alone."""
    gradient_bytes: int
    """Gradients of its parameters."""
    policy_calls: int
    """Ops that a policy function is asked about in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """The peaks of one dry run, which place the planner's rows."""

    left_alone: tuple[str, ...]
    """The layers that were left alone; all others recomputed everything."""
    phase_peak_bytes: dict[Phase, int]
    """Highest bytes in each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that a plan is made from."""

    layers: tuple[str, ...]
    """FQNs in the order in which they run."""
    kinds: tuple[KindProfile, ...]
    """The layer kinds, in the order of their first layers."""
    order: tuple[int, ...]
    """The kind of each layer, as an index."""
    granularity: Granularity
    """What one label covers."""
    most_kept: RowSample
    """A dry run with layers left alone: all of them, where that fits."""
    least_kept: RowSample
    """The dry run with everything recomputed."""
    policy_call_seconds: float
    """What a policy function costs per op, forward and recompute together: a rough guess."""

    @property
    def recompute_seconds(self) -> float:
        """What full checkpointing recomputes in one step, as traced."""
        return sum(
            self.kinds[kind].other_seconds + sum(self.kinds[kind].label_seconds)
            for kind in self.order
        )


def build_profile(
    layers: Sequence[LayerTrace],
    gradient_bytes: dict[str, int],
    dry_run: DryRun,
    *,
    granularity: Granularity,
    policy_call_seconds: float,
    save_collectives: bool = False,
) -> Profile:
    """Returns sizes and prices of the traced layers.

    `gradient_bytes` are those of each layer's own parameters.

    Raises:
        CannotForecast: even full checkpointing cannot be dry-run.
    """
    names = tuple(layer.name for layer in layers)
    by_kind: dict[str, list[LayerTrace]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    plain = dry_run(checkpoint_layers(names))
    left_alone, alone = _with_layers_alone(by_kind, names, dry_run)
    space = build_space(
        layers,
        LayerChoiceMode.EACH,
        granularity,
        tiers=len(names),
        save_collectives=save_collectives,
    )
    grown = _bytes_per_decision(by_kind, space, plain, dry_run)
    kinds = tuple(
        _kind_profile(
            kind,
            members,
            [save for save in space.saves if save.kind == kind],
            grown,
            plain=plain,
            alone_bytes=alone.layer_bytes[members[0].name].saved_bytes,
            gradient_bytes=gradient_bytes[members[0].name],
        )
        for kind, members in by_kind.items()
    )
    return Profile(
        layers=names,
        kinds=kinds,
        order=tuple(list(by_kind).index(layer.kind) for layer in layers),
        granularity=granularity,
        most_kept=RowSample(left_alone=left_alone, phase_peak_bytes=alone.phase_peak_bytes),
        least_kept=RowSample(left_alone=(), phase_peak_bytes=plain.phase_peak_bytes),
        policy_call_seconds=policy_call_seconds,
    )


def _with_layers_alone(
    by_kind: dict[str, list[LayerTrace]], names: tuple[str, ...], dry_run: DryRun
) -> tuple[tuple[str, ...], Forecast]:
    """Returns a dry run with all layers left alone, or with one of each kind where that fails."""
    try:
        return names, dry_run(NO_CHECKPOINTING)
    except CannotForecast:
        alone = tuple(members[0].name for members in by_kind.values())
        return alone, dry_run(checkpoint_layers(name for name in names if name not in alone))


def _bytes_per_decision(
    by_kind: dict[str, list[LayerTrace]], space: SearchSpace, plain: Forecast, dry_run: DryRun
) -> dict[str, int]:
    """Returns what one layer keeps more for each decision, by the decision's name.

    Alike layers try one decision each, so that a few dry runs answer for all.
    """
    waiting = {kind: [s for s in space.saves if s.kind == kind] for kind in by_kind}
    grown: dict[str, int] = {}
    while any(waiting.values()):
        tried: dict[str, SaveDecision] = {}
        choices: Choices = {}
        for kind, members in by_kind.items():
            for layer in members:
                labels: frozenset[str] = frozenset()
                if waiting[kind]:
                    tried[layer.name] = waiting[kind].pop()
                    labels = frozenset([tried[layer.name].label])
                choices = {**choices, layer.name: labels}
        dry = dry_run(space.policy_of(choices))
        for name, save in tried.items():
            saved_bytes = dry.layer_bytes[name].saved_bytes
            grown[save.name] = max(0, saved_bytes - plain.layer_bytes[name].saved_bytes)
    return grown


def _kind_profile(
    kind: str,
    members: Sequence[LayerTrace],
    saves: Sequence[SaveDecision],
    grown: dict[str, int],
    *,
    plain: Forecast,
    alone_bytes: int,
    gradient_bytes: int,
) -> KindProfile:
    layer = members[0]
    seconds = _replayed_seconds(members, plain)
    gains = {save.name: sum(seconds[key] for key in _keys_in(save, layer)) for save in saves}
    worthwhile = sorted((s for s in saves if gains[s.name] > 0), key=lambda s: -gains[s.name])
    worthwhile = worthwhile[:MOST_LABELS]
    return KindProfile(
        name=kind,
        labels=tuple(save.label for save in worthwhile),
        label_bytes=tuple(grown[save.name] for save in worthwhile),
        label_seconds=tuple(gains[save.name] for save in worthwhile),
        other_seconds=max(0.0, sum(seconds.values()) - sum(gains[s.name] for s in worthwhile)),
        plain_bytes=plain.layer_bytes[layer.name].saved_bytes,
        alone_bytes=alone_bytes,
        gradient_bytes=gradient_bytes,
        policy_calls=sum(op.calls for op in layer.ops),
    )


def _keys_in(save: SaveDecision, layer: LayerTrace) -> list[tuple[str, str]]:
    """Returns op and site of all that a decision saves in `layer`."""

    def is_saved(op: OpTrace) -> bool:
        if not {op.op, op.site_name}.intersection(save.saved):
            return False
        return save.label in (label_of(op, Granularity.SITE), label_of(op, Granularity.CLASS))

    return [(op.op, op.site) for op in layer.ops if is_saved(op)]


def _replayed_seconds(
    members: Sequence[LayerTrace], plain: Forecast
) -> dict[tuple[str, str], float]:
    """Returns for each op site of a kind what plain checkpointing spends on running it again."""
    replayed = plain.recomputed[members[0].name]
    seconds: dict[tuple[str, str], float] = {}
    for op in members[0].ops:
        key = (op.op, op.site)
        fraction = min(1.0, replayed.get(key, 0) / op.calls)
        seconds[key] = fraction * float(np.median([_seconds_of(m, key) for m in members]))
    return seconds


def _seconds_of(layer: LayerTrace, key: tuple[str, str]) -> float:
    return next((op.seconds for op in layer.ops if (op.op, op.site) == key), 0.0)
