"""What a policy does with each layer, op by op: saved, recomputed, or left alone. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from sac_search.policy import Policy, Tier
from sac_search.trace import LayerTrace, OpTrace


class Treatment(enum.StrEnum):
    """What becomes of what an op returns, between the forward and the backward pass."""

    SAVED = "saved"
    """Kept, in a layer that is checkpointed."""
    RECOMPUTED = "recomputed"
    """Dropped, and made again in the backward pass."""
    LEFT_ALONE = "left alone"
    """In a layer that is not checkpointed: kept if the backward pass needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripPart:
    """All calls of one op at one site in one layer."""

    op: str
    """The op site."""
    output_bytes: int
    """Bytes that the calls return."""
    seconds: float
    """Seconds of the calls in one forward pass."""
    treatment: Treatment
    """What becomes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStrip:
    """One layer under a policy."""

    name: str
    """The layer's FQN."""
    parts: tuple[StripPart, ...]
    """Its ops that return bytes of their own, in the order in which they run."""
    seconds: dict[Treatment, float]
    """Forward seconds of all its ops, views included, by treatment."""

    @property
    def output_bytes(self) -> int:
        """Bytes that all ops return."""
        return sum(part.output_bytes for part in self.parts)

    def bytes_that_are(self, treatment: Treatment) -> int:
        """Returns the bytes of the ops that are treated like this."""
        return sum(part.output_bytes for part in self.parts if part.treatment is treatment)


def layer_strips(layers: Sequence[LayerTrace], policy: Policy) -> list[LayerStrip]:
    """Returns what `policy` does with each of the layers, in their order."""
    tiers = {choice.name: policy.tiers[choice.tier] for choice in policy.layers}
    return [_strip(layer, tiers.get(layer.name)) for layer in layers]


def _strip(layer: LayerTrace, tier: Tier | None) -> LayerStrip:
    treatments = [_treatment(op, tier) for op in layer.ops]
    seconds = dict.fromkeys(Treatment, 0.0)
    for op, treatment in zip(layer.ops, treatments, strict=True):
        seconds[treatment] += op.seconds
    return LayerStrip(
        name=layer.name,
        parts=tuple(
            StripPart(
                op=op.site_name,
                output_bytes=op.output_bytes,
                seconds=op.seconds,
                treatment=treatment,
            )
            for op, treatment in zip(layer.ops, treatments, strict=True)
            if op.output_bytes and not op.view
        ),
        seconds=seconds,
    )


def _treatment(op: OpTrace, tier: Tier | None) -> Treatment:
    if tier is None:
        return Treatment.LEFT_ALONE
    if op.view or op.mutates:
        return Treatment.RECOMPUTED
    saved = tier.save_random if op.random else op.op in tier.ops or op.site_name in tier.ops
    return Treatment.SAVED if saved else Treatment.RECOMPUTED
