"""The policies that people use today: measured first, and what the winner is held against."""

from __future__ import annotations

from dataclasses import dataclass

from sac_search.opclasses import OpClass, packets_of
from sac_search.policy import NO_CHECKPOINTING, PLAIN_TIER, Policy, Tier, checkpoint_layers
from sac_search.space import Assignment, SearchSpace, make_tier, unsavable_ops

NONE = "none"
FULL = "full"
EVERY_SECOND = "every second layer"
RECOMPUTE_ALL = "recompute all (policy)"
SAVE_MATMUL = "save matmul"
SAVE_DEAR = "save matmul + attention + convolution"
TORCHTITAN = "torchtitan rule"
SAVE_ATTENTION = "save attention"

BASELINE_NAMES = (
    NONE,
    FULL,
    EVERY_SECOND,
    RECOMPUTE_ALL,
    SAVE_MATMUL,
    SAVE_DEAR,
    TORCHTITAN,
    SAVE_ATTENTION,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A policy with a name that people know."""

    name: str
    """The name."""
    policy: Policy
    """The policy."""
    assignment: Assignment | None
    """The same as an assignment of the search space, where there is one."""


def baselines(space: SearchSpace) -> list[Baseline]:
    """Returns the baselines of a workload, each policy once, in the order in which to measure them.

    No checkpointing; full checkpointing of all layers and of every second one; the ladder
    (recompute everything through a policy, save matmuls, save attention and convolutions too);
    torchtitan's selective rule (every second matmul, attention, `max`); attention alone.
    """
    names = [layer.name for layer in space.layers]
    dear = [OpClass.MATMUL, OpClass.SCALED_MM, OpClass.ATTENTION, OpClass.CONVOLUTION]
    found = [
        Baseline(name=NONE, policy=NO_CHECKPOINTING, assignment=space.assignment_for([], [])),
        _plain(space, FULL, names),
        _plain(space, EVERY_SECOND, names[::2]),
        Baseline(
            name=RECOMPUTE_ALL,
            policy=checkpoint_layers(names, Tier(through_policy=True)),
            assignment=None,
        ),
        _ladder(space, SAVE_MATMUL, dear[:2]),
        _ladder(space, SAVE_DEAR, dear),
        Baseline(
            name=TORCHTITAN,
            policy=checkpoint_layers(names, _torchtitan_tier(space)),
            assignment=None,
        ),
        _ladder(space, SAVE_ATTENTION, [OpClass.ATTENTION]),
    ]
    unique: dict[str, Baseline] = {}
    for baseline in found:
        unique.setdefault(baseline.policy.key, baseline)
    return list(unique.values())


def _plain(space: SearchSpace, name: str, layers: list[str]) -> Baseline:
    return Baseline(
        name=name,
        policy=checkpoint_layers(layers, PLAIN_TIER),
        assignment=space.assignment_for(layers, []),
    )


def _ladder(space: SearchSpace, name: str, classes: list[OpClass]) -> Baseline:
    assignment = space.assignment_for([la.name for la in space.layers], classes)
    assert assignment is not None
    return Baseline(name=name, policy=space.policy_for(assignment), assignment=assignment)


def _torchtitan_tier(space: SearchSpace) -> Tier:
    reasons = unsavable_ops(space.layers)
    matmuls = {f"{packet}.default" for packet in packets_of(OpClass.MATMUL) if "." in packet}
    ops = {
        op.op
        for layer in space.layers
        for op in layer.ops
        if not reasons[op.op]
        and not op.random
        and (op.op in matmuls or op.op == "aten.max.default")
    }
    attention = make_tier([n for n in space.saves if n == "save.attention"], space.saves)
    if not ops:
        return attention
    return Tier(ops=tuple(sorted(ops | set(attention.ops))), every_second_matmul=True)
