"""The ladder of baselines: exactly these policies, each once."""

from __future__ import annotations

import pytest
from scripted import BLOCK_OPS, CONVOLUTION_OPS, DROPOUT_OPS, make_layers, make_op

from sac_search.opclasses import OpClass, packets_of
from sac_search.policy import NO_CHECKPOINTING, PLAIN_TIER, Tier
from sac_search.space import LayerChoiceMode, build_space
from sac_search.study.baselines import (
    BASELINE_NAMES,
    EVERY_SECOND,
    FULL,
    NONE,
    RECOMPUTE_ALL,
    SAVE_ATTENTION,
    SAVE_DEAR,
    SAVE_MATMUL,
    TORCHTITAN,
    Baseline,
    baselines,
)
from sac_search.trace import LayerTrace

ATTENTION_KERNELS = {f"{p}.default" for p in packets_of(OpClass.ATTENTION) if "." in p}
ALL = tuple(f"h.{index}" for index in range(6))


def ladder(layers: tuple[LayerTrace, ...]) -> dict[str, Baseline]:
    found = baselines(build_space(layers))
    assert len({b.policy.key for b in found}) == len(found)
    return {b.name: b for b in found}


def test_a_transformer_has_the_whole_ladder_in_order() -> None:
    found = ladder(make_layers(6))

    assert tuple(found) == BASELINE_NAMES
    assert found[NONE].policy == NO_CHECKPOINTING
    layer_names = {name: b.policy.layer_names for name, b in found.items()}
    assert layer_names == {
        **dict.fromkeys(BASELINE_NAMES, ALL),
        NONE: (),
        EVERY_SECOND: ("h.0", "h.2", "h.4"),
    }
    tiers = {name: b.policy.tiers[0] for name, b in found.items() if b.policy.tiers}
    assert tiers[FULL] == tiers[EVERY_SECOND] == PLAIN_TIER
    assert tiers[RECOMPUTE_ALL] == Tier(through_policy=True)
    assert tiers[SAVE_MATMUL] == Tier(classes=(OpClass.MATMUL,), ops=("aten.addmm.default",))
    assert set(tiers[SAVE_DEAR].ops) == {"aten.addmm.default"} | ATTENTION_KERNELS
    assert set(tiers[SAVE_ATTENTION].ops) == ATTENTION_KERNELS
    assert tiers[TORCHTITAN].every_second_matmul
    assert set(tiers[TORCHTITAN].ops) == {"aten.addmm.default"} | ATTENTION_KERNELS


def test_only_torchtitans_rule_cannot_be_exported() -> None:
    found = ladder(make_layers(6))

    assert [name for name, b in found.items() if not b.policy.exportable] == [TORCHTITAN]


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_an_assignment_stands_for_the_same_policy(mode: LayerChoiceMode) -> None:
    space = build_space(make_layers(6), mode)
    found = {b.name: b for b in baselines(space)}

    outside = {name for name, b in found.items() if b.assignment is None}
    every_second = {EVERY_SECOND} if mode is LayerChoiceMode.COUNT else set()
    assert outside == {RECOMPUTE_ALL, TORCHTITAN} | every_second
    for baseline in found.values():
        if baseline.assignment is not None:
            assert space.policy_for(baseline.assignment).key == baseline.policy.key


def test_a_convolution_network_has_no_rungs_of_matmul_and_attention() -> None:
    found = ladder(make_layers(6, CONVOLUTION_OPS))

    assert list(found) == [NONE, FULL, EVERY_SECOND, RECOMPUTE_ALL, SAVE_DEAR]
    assert found[SAVE_DEAR].policy.tiers[0].ops == ("aten.convolution.default",)


def test_attention_with_dropout_is_on_no_rung() -> None:
    found = ladder(make_layers(6, DROPOUT_OPS))

    assert list(found) == [NONE, FULL, EVERY_SECOND, RECOMPUTE_ALL, SAVE_MATMUL, TORCHTITAN]
    assert found[TORCHTITAN].policy.tiers[0] == Tier(
        ops=("aten.addmm.default",), every_second_matmul=True
    )
    assert not any(tier.save_random for b in found.values() for tier in b.policy.tiers)


def test_torchtitans_rule_saves_max_and_no_op_that_cannot_be_saved() -> None:
    ops = [
        *BLOCK_OPS,
        make_op("aten.mm.default", output_mutated=True),
        make_op("aten.max.default"),
        make_op("aten.max.dim"),
    ]

    tier = ladder(make_layers(6, ops))[TORCHTITAN].policy.tiers[0]

    assert set(tier.ops) - ATTENTION_KERNELS == {"aten.addmm.default", "aten.max.default"}


def test_with_attention_alone_torchtitans_rule_is_save_attention() -> None:
    ops = [op for op in BLOCK_OPS if op.op_class is not OpClass.MATMUL]

    found = ladder(make_layers(6, ops))

    assert list(found) == [NONE, FULL, EVERY_SECOND, RECOMPUTE_ALL, SAVE_DEAR]


def test_every_second_of_one_layer_is_full_checkpointing() -> None:
    found = ladder(make_layers(1))

    assert EVERY_SECOND not in found
    assert found[FULL].policy.layer_names == ("h.0",)
