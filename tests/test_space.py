"""Which decisions a trace gives, and which policy a set of them stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BLOCK_OPS, CONVOLUTION_OPS, DROPOUT_OPS, make_layers, make_op

from sac_search.opclasses import OpClass
from sac_search.policy import NO_CHECKPOINTING
from sac_search.space import (
    Decision,
    LayerChoiceMode,
    SearchSpace,
    build_space,
    unsavable_ops,
)
from sac_search.trace import LayerTrace, OpTrace

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def decision_names(space: SearchSpace) -> list[str]:
    return [decision.name for decision in space.decisions]


# --- decisions ------------------------------------------------------------------------------------


def test_a_transformer_block_gives_a_decision_per_class_and_a_count_of_layers() -> None:
    space = build_space(make_layers(6))

    assert space.decisions == [
        Decision(name="save.activation", highest=1),
        Decision(name="save.attention", highest=1),
        Decision(name="save.elementwise", highest=1),
        Decision(name="save.matmul", highest=1),
        Decision(name="save.normalization", highest=1),
        Decision(name="layers.Block", highest=6),
    ]
    assert [d.is_count for d in space.decisions] == [False] * 5 + [True]
    assert space.saves["save.matmul"] == ("aten.addmm.default",)
    assert space.size == 2**5 * 7


def test_layer_choice_each_gives_a_decision_per_layer() -> None:
    space = build_space(make_layers(3), LayerChoiceMode.EACH)

    assert decision_names(space)[-3:] == ["layer.h.0", "layer.h.1", "layer.h.2"]
    assert {d.highest for d in space.decisions} == {1}
    assert not any(d.is_count for d in space.decisions)
    assert space.size == 2**5 * 2**3


def test_every_layer_kind_has_its_own_count() -> None:
    blocks = make_layers(4)
    stages = make_layers(2, CONVOLUTION_OPS, kind="Stage", prefix="s")

    space = build_space([blocks[0], *stages, *blocks[1:]])

    assert decision_names(space)[-2:] == ["layers.Block", "layers.Stage"]
    assert space.kinds == {"Block": ["h.0", "h.1", "h.2", "h.3"], "Stage": ["s.0", "s.1"]}


def test_assignments_are_all_there_is_and_each_once() -> None:
    space = build_space(make_layers(2, BLOCK_OPS[:2]))

    found = [tuple(assignment.items()) for assignment in space.assignments()]

    assert len(set(found)) == len(found) == space.size == 2 * 2 * 3


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (make_op("aten.view.default", view=True), "view"),
        (make_op("aten.add_.Tensor", mutates=True), "in place"),
        (make_op("aten.mean.dim", output_mutated=True), "changed in place later"),
        (make_op("mylib.magic.default"), "unknown"),
        (make_op("_c10d_functional.all_gather_into_tensor.default"), "communication"),
        (make_op("aten.gelu.default", mib=0), "nothing new"),
    ],
)
def test_what_cannot_be_saved_gets_no_decision(op: OpTrace, reason: str) -> None:
    layers = make_layers(2, [make_op("aten.mm.default"), op])

    assert reason in unsavable_ops(layers)[op.op]
    assert decision_names(build_space(layers)) == ["save.matmul", "layers.Block"]


def test_an_op_that_is_unsavable_in_one_layer_is_so_in_all() -> None:
    safe = make_layers(1, [make_op("aten.add.Tensor"), make_op("aten.mul.Tensor")])
    unsafe = make_layers(1, [make_op("aten.add.Tensor", output_mutated=True)], prefix="g")

    space = build_space([*safe, *unsafe])

    assert space.saves == {"save.elementwise": ("aten.mul.Tensor",)}


def test_a_class_that_takes_next_to_no_time_gets_no_decision() -> None:
    dear = make_op("aten.mm.default", milliseconds=1000)
    under = make_op("aten.gelu.default", milliseconds=2.9)
    over = make_op("aten.gelu.default", milliseconds=3.1)

    assert decision_names(build_space(make_layers(1, [dear, under]))) == [
        "save.matmul",
        "layers.Block",
    ]
    assert "save.activation" in decision_names(build_space(make_layers(1, [dear, over])))


# --- randomness -----------------------------------------------------------------------------------


def test_attention_with_dropout_is_decided_with_the_other_random_ops() -> None:
    space = build_space(make_layers(2, DROPOUT_OPS))

    assert decision_names(space) == [
        "save.activation",
        "save.matmul",
        "save.random",
        "layers.Block",
    ]
    policy = space.policy_for(
        {"save.activation": 0, "save.matmul": 1, "save.random": 1, "layers.Block": 2}
    )
    assert policy.tiers[0].save_random
    assert policy.tiers[0].ops == ("aten.addmm.default",)
    assert policy.tiers[0].classes == (OpClass.MATMUL, OpClass.RANDOM)


def test_one_random_op_that_cannot_be_saved_ties_all_others() -> None:
    in_place = make_op("aten.bernoulli_.float", random=True, mutates=True)
    layers = make_layers(2, [*DROPOUT_OPS, in_place])

    reasons = unsavable_ops(layers)

    assert reasons["aten.bernoulli_.float"] == "changes its input in place"
    assert "tied" in reasons["aten.native_dropout.default"]
    assert "tied" in reasons["aten._scaled_dot_product_efficient_attention.default"]
    assert "save.random" not in decision_names(build_space(layers))


def test_attention_with_dropout_in_one_kind_and_without_in_another() -> None:
    quiet = make_layers(1, [make_op(FLASH)], kind="Quiet", prefix="q")
    noisy = make_layers(1, [make_op(FLASH, random=True)], kind="Noisy", prefix="n")
    space = build_space([*quiet, *noisy])
    none_saved = {"save.attention": 0, "save.random": 0, "layers.Quiet": 0, "layers.Noisy": 1}

    assert decision_names(space) == list(none_saved)
    # Only the noisy layer is checkpointed, where nothing but `save.random` saves attention.
    without = space.policy_for(none_saved)
    assert space.policy_for(none_saved | {"save.attention": 1}).key == without.key
    assert space.policy_for(none_saved | {"save.random": 1}).key != without.key


# --- policies -------------------------------------------------------------------------------------


def test_the_earliest_layers_of_a_kind_are_checkpointed() -> None:
    space = build_space(make_layers(4))
    nothing = dict.fromkeys(space.saves, 0)

    policy = space.policy_for(nothing | {"layers.Block": 3})

    assert policy.layer_names == ("h.0", "h.1", "h.2")
    assert policy.tiers[0].is_plain


def test_no_layer_is_no_checkpointing_whatever_is_saved() -> None:
    space = build_space(make_layers(4))

    policy = space.policy_for(dict.fromkeys(space.saves, 1) | {"layers.Block": 0})

    assert policy == NO_CHECKPOINTING


def test_saving_attention_saves_its_kernels_of_other_devices() -> None:
    space = build_space(make_layers(1))
    nothing = dict.fromkeys(space.saves, 0)

    ops = space.policy_for(nothing | {"save.attention": 1, "layers.Block": 1}).tiers[0].ops

    assert FLASH in ops
    assert "aten._scaled_dot_product_flash_attention.default" in ops
    assert "aten._scaled_dot_product_cudnn_attention.default" in ops
    assert ops == tuple(sorted(ops))
    assert "aten.addmm.default" not in ops


def test_what_no_checkpointed_layer_runs_is_left_out_of_the_tier() -> None:
    stages = make_layers(2, CONVOLUTION_OPS, kind="Stage", prefix="s")
    space = build_space([*make_layers(2), *stages])
    only_stages = dict.fromkeys(space.saves, 1) | {"layers.Block": 0, "layers.Stage": 1}

    policy = space.policy_for(only_stages)

    assert policy.tiers[0].classes == (OpClass.ACTIVATION, OpClass.CONVOLUTION)
    assert policy.tiers[0].ops == ("aten.convolution.default", "aten.relu.default")


# --- assignments ----------------------------------------------------------------------------------


def test_a_set_of_layers_that_no_count_stands_for_has_no_assignment() -> None:
    layers = make_layers(4)
    count, each = build_space(layers), build_space(layers, LayerChoiceMode.EACH)

    assert count.assignment_for(["h.0", "h.2"], []) is None
    assert count.assignment_for(["h.1"], []) is None
    assert count.assignment_for(["h.1", "h.0"], []) is not None
    found = each.assignment_for(["h.0", "h.2"], [])
    assert found is not None
    assert each.policy_for(found).layer_names == ("h.0", "h.2")


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_layers_that_the_space_lacks_have_no_assignment(mode: LayerChoiceMode) -> None:
    space = build_space(make_layers(2), mode)

    assert space.assignment_for(["h.0", "g.0"], []) is None


OP_POOL: list[Callable[[], OpTrace]] = [
    lambda: make_op("aten.mm.default"),
    lambda: make_op("aten.addmm.default"),
    lambda: make_op(FLASH),
    lambda: make_op(FLASH, random=True),
    lambda: make_op("aten.native_dropout.default", random=True),
    lambda: make_op("aten.gelu.default"),
    lambda: make_op("aten.gelu.default", output_mutated=True),
    lambda: make_op("aten.silu.default"),
    lambda: make_op("aten.view.default", view=True),
    lambda: make_op("mylib.magic.default"),
]


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    layers: list[LayerTrace] = []
    for index in range(draw(st.integers(1, 3))):
        makers = draw(st.lists(st.sampled_from(OP_POOL), min_size=1, max_size=5))
        ops = {op.op: op for op in (make() for make in makers)}
        count = draw(st.integers(1, 3))
        layers += make_layers(count, list(ops.values()), kind=f"Kind{index}", prefix=f"kind{index}")
    order = draw(st.permutations(layers))
    return build_space(order, draw(st.sampled_from(LayerChoiceMode)))


@st.composite
def spaces_and_assignments(draw: st.DrawFn, count: int) -> tuple[SearchSpace, list[dict[str, int]]]:
    space = draw(spaces())
    assignments = [
        {d.name: draw(st.integers(0, d.highest)) for d in space.decisions} for _ in range(count)
    ]
    return space, assignments


def what_runs(space: SearchSpace, assignment: dict[str, int]) -> dict[str, set[str]]:
    """Says for each checkpointed layer which of its ops are saved, straight from the rules."""
    reasons = unsavable_ops(space.layers)
    left = {name: count for name, count in assignment.items() if name.startswith("layers.")}
    runs: dict[str, set[str]] = {}
    for layer in space.layers:
        if space.mode is LayerChoiceMode.EACH:
            chosen = assignment[f"layer.{layer.name}"] == 1
        else:
            chosen = left[f"layers.{layer.kind}"] > 0
            left[f"layers.{layer.kind}"] -= 1
        if chosen:
            runs[layer.name] = {
                op.op
                for op in layer.ops
                if not reasons[op.op]
                and assignment.get(f"save.{'random' if op.random else op.op_class}") == 1
            }
    return runs


@settings(max_examples=150, deadline=None)
@given(spaces_and_assignments(2))
def test_keys_are_equal_exactly_when_two_assignments_run_alike(
    drawn: tuple[SearchSpace, list[dict[str, int]]],
) -> None:
    space, (first, second) = drawn

    # Both assignments, and each with one decision changed, so that likes are met often.
    found = [first, second]
    for name in first:
        found.append(first | {name: second[name]})
    for other in found[1:]:
        same_key = space.policy_for(first).key == space.policy_for(other).key
        assert same_key == (what_runs(space, first) == what_runs(space, other))


@settings(max_examples=150, deadline=None)
@given(spaces_and_assignments(1))
def test_an_assignment_comes_back_from_its_policy(
    drawn: tuple[SearchSpace, list[dict[str, int]]],
) -> None:
    space, (assignment,) = drawn
    policy = space.policy_for(assignment)

    found = space.assignment_for(
        policy.layer_names, policy.tiers[0].classes if policy.tiers else ()
    )

    assert found is not None
    assert space.policy_for(found).key == policy.key
    # The layers are the same; a save decision may be missing where it changed nothing.
    assert {n: v for n, v in found.items() if not n.startswith("save.")} == {
        n: v for n, v in assignment.items() if not n.startswith("save.")
    }
    assert all(found[name] <= assignment[name] for name in space.saves)
