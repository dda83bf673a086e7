"""The policies that people use today: measured first, and what the winner is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sac_search.opclasses import OpClass, packets_of
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.space import Assignment, RunMode, SearchSpace, unsavable_ops

NONE = "none"
FULL = "full"
EVERY_SECOND = "every second layer"
RECOMPUTE_ALL = "recompute all (policy)"
SAVE_MATMUL = "save matmul"
SAVE_DEAR = "save matmul + attention + convolution"
TORCHTITAN = "torchtitan rule"
SAVE_ATTENTION = "save attention"
COMPILE = "compile"
COMPILE_FULL = "compile, full"

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
COMPILED_NAMES = (COMPILE, COMPILE_FULL)


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
    torchtitan's selective rule (every second matmul, attention, `max`); attention alone. Where the
    model may be compiled, that alone, and with full checkpointing; where it has to be, only no and
    full checkpointing are left of the others, to compare with.
    """
    names = [layer.name for layer in space.layers]
    found = _eager_baselines(space, names)
    if RunMode.EAGER not in space.run_modes:
        found = [
            Baseline(name=NONE, policy=NO_CHECKPOINTING, assignment=None),
            Baseline(name=FULL, policy=checkpoint_layers(names), assignment=None),
        ]
    if RunMode.COMPILE in space.run_modes:
        found += [
            _ladder(space, COMPILE, [], [], RunMode.COMPILE),
            _ladder(space, COMPILE_FULL, names, [], RunMode.COMPILE),
        ]
    unique: dict[str, Baseline] = {}
    for baseline in found:
        unique.setdefault(baseline.policy.key, baseline)
    return list(unique.values())


def _eager_baselines(space: SearchSpace, names: Sequence[str]) -> list[Baseline]:
    dear = [OpClass.MATMUL, OpClass.SCALED_MM, OpClass.ATTENTION, OpClass.CONVOLUTION]
    return [
        _ladder(space, NONE, [], []),
        _ladder(space, FULL, names, []),
        _ladder(space, EVERY_SECOND, names[::2], []),
        Baseline(
            name=RECOMPUTE_ALL,
            policy=checkpoint_layers(names, Tier(through_policy=True)),
            assignment=None,
        ),
        _ladder(space, SAVE_MATMUL, names, dear[:2]),
        _ladder(space, SAVE_DEAR, names, dear),
        Baseline(
            name=TORCHTITAN,
            policy=checkpoint_layers(names, _torchtitan_tier(space)),
            assignment=None,
        ),
        _ladder(space, SAVE_ATTENTION, names, [OpClass.ATTENTION]),
    ]


def _ladder(
    space: SearchSpace,
    name: str,
    layers: Sequence[str],
    classes: Sequence[OpClass],
    mode: RunMode = RunMode.EAGER,
) -> Baseline:
    """Returns the baseline that checkpoints `layers` and saves these op classes in each."""
    choices = space.choices_of_classes(layers, classes)
    return Baseline(
        name=name,
        policy=space.policy_of(choices, mode),
        assignment=space.assignment_of(choices, mode),
    )


def _torchtitan_tier(space: SearchSpace) -> Tier:
    names = [layer.name for layer in space.layers]
    reasons = unsavable_ops(space.layers, save_collectives=space.save_collectives)
    matmuls = {f"{packet}.default" for packet in packets_of(OpClass.MATMUL) if "." in packet}
    ops = {
        op.op
        for layer in space.layers
        for op in layer.ops
        if not reasons[op.op]
        and not op.random
        and (op.op in matmuls or op.op == "aten.max.default")
    }
    attention = _ladder(space, SAVE_ATTENTION, names, [OpClass.ATTENTION]).policy.tiers
    kernels = {op for tier in attention for op in tier.ops}
    if not ops:
        return Tier(classes=("attention",) if kernels else (), ops=tuple(sorted(kernels)))
    return Tier(ops=tuple(sorted(ops | kernels)), every_second_matmul=True)
