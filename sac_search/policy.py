"""A policy: for every layer, left alone or checkpointed under a tier. Pure data.

Frozen and hashable; policies that run the same way have the same key, however they are written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sac_search import records


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One save set: what a checkpointed layer keeps instead of recomputing it."""

    classes: tuple[str, ...] = ()
    """What it saves, for people: op classes, or classes at a site, such as `matmul[2048x8192]`."""
    ops: tuple[str, ...] = ()
    """The exact overloads or op sites that it saves, sorted: `aten.mm.default`,
    `aten.mm.default[2048x8192]`. This is what counts."""
    save_random: bool = False
    """Saves every random op (attention with dropout among them); they go together or not at all."""
    through_policy: bool = False
    """Runs a tier that saves nothing through a policy function, to show what that alone costs."""
    every_second_matmul: bool = False
    """Saves the first, third, … matmul of a region only. It counts calls, so it is a reference to
    compare with and is never exported."""

    @property
    def saves_nothing(self) -> bool:
        """Whether everything is recomputed."""
        return not self.ops and not self.save_random

    @property
    def is_plain(self) -> bool:
        """Whether plain checkpointing does the same, without a policy function."""
        return self.saves_nothing and not self.through_policy


PLAIN_TIER = Tier()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """A checkpointed layer and its tier."""

    name: str
    """The layer's FQN."""
    tier: int = 0
    """Index into the policy's tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which layers are checkpointed, and what each of them saves."""

    tiers: tuple[Tier, ...] = ()
    """One or two save sets."""
    layers: tuple[LayerChoice, ...] = ()
    """The checkpointed layers, in the order in which they run."""
    schema_version: int = records.SCHEMA_VERSION
    """The version of this format."""

    def __post_init__(self) -> None:
        if self.schema_version > records.SCHEMA_VERSION:
            raise ValueError(
                f"this policy has schema version {self.schema_version}, written by a newer "
                f"sac-search; this one reads up to {records.SCHEMA_VERSION}"
            )
        names = [choice.name for choice in self.layers]
        if len(set(names)) != len(names):
            raise ValueError("a layer is listed twice in the policy")
        if any(not 0 <= choice.tier < len(self.tiers) for choice in self.layers):
            raise ValueError("a layer names a tier that the policy does not have")

    @property
    def key(self) -> str:
        """A short hash, equal for policies that run the same way."""
        used = [
            (choice.name, _tier_key(self.tiers[choice.tier]))
            for choice in sorted(self.layers, key=lambda choice: choice.name)
        ]
        return hashlib.sha256(records.encode(used)).hexdigest()[:16]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """FQNs of the checkpointed layers."""
        return tuple(choice.name for choice in self.layers)

    @property
    def exportable(self) -> bool:
        """Whether it can be shipped: references that count calls cannot."""
        return not any(self.tiers[choice.tier].every_second_matmul for choice in self.layers)

    @property
    def through_policy(self) -> bool:
        """Whether a policy function is asked even though nothing is saved, as a reference."""
        return any(tier.through_policy for tier in self.tiers)

    @property
    def complexity(self) -> int:
        """How much there is to read: of two policies equally good, the simpler one wins."""
        used = {choice.tier for choice in self.layers}
        return sum(1 + len(self.tiers[tier].ops) for tier in used) + bool(self.layers)

    def describe(self) -> str:
        """Returns the policy in a few words: `7 layers: save matmul, attention`."""
        if not self.layers:
            return "no checkpointing"
        parts = []
        for index, tier in enumerate(self.tiers):
            count = sum(choice.tier == index for choice in self.layers)
            if count:
                parts.append(f"{count} layer{'s' if count > 1 else ''}: {describe_tier(tier)}")
        return "; ".join(parts)


NO_CHECKPOINTING = Policy()


def checkpoint_layers(names: Iterable[str], tier: Tier = PLAIN_TIER) -> Policy:
    """Returns the policy that checkpoints `names` under one tier."""
    layers = tuple(LayerChoice(name=name) for name in names)
    return Policy(tiers=(tier,) if layers else (), layers=layers)


def describe_tier(tier: Tier) -> str:
    """Returns what a tier saves, in a few words."""
    if tier.every_second_matmul:
        return "save every second matmul, attention (counts calls)"
    if tier.saves_nothing:
        return "recompute all" + (" through a policy" if tier.through_policy else "")
    named = [str(op_class) for op_class in tier.classes]
    if tier.save_random and "random" not in named:
        named.append("random")
    return "save " + (", ".join(named) if named else f"{len(tier.ops)} ops")


def _tier_key(tier: Tier) -> list[object]:
    # A site says nothing more where the whole op is saved.
    ops = sorted({op for op in tier.ops if op == _whole(op) or _whole(op) not in tier.ops})
    if tier.saves_nothing:
        return [ops, tier.through_policy]
    return [ops, tier.save_random, tier.every_second_matmul]


def _whole(op: str) -> str:
    return op.partition("[")[0]
