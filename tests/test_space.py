"""Which decisions a trace gives, and which policy a set of them stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    BLOCK_OPS,
    CONVOLUTION_OPS,
    DROPOUT_OPS,
    SITE_OPS,
    make_layers,
    make_op,
)

from sac_search.opclasses import OpClass
from sac_search.policy import (
    COMPILE_ALONE,
    NO_CHECKPOINTING,
    LayerChoice,
    Policy,
    Tier,
    checkpoint_layers,
)
from sac_search.policy_runtime import SAVE, SaveSet
from sac_search.space import (
    EAGER_ONLY,
    Assignment,
    Decision,
    DecisionType,
    Granularity,
    LayerChoiceMode,
    RunMode,
    SaveDecision,
    SearchSpace,
    build_space,
    saved_name,
    unsavable_ops,
)
from sac_search.trace import LayerTrace, OpTrace

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
COUNT, EACH = LayerChoiceMode.COUNT, LayerChoiceMode.EACH
CLASS, SITE = Granularity.CLASS, Granularity.SITE


def decision_names(space: SearchSpace) -> list[str]:
    return [decision.name for decision in space.decisions]


def nothing(space: SearchSpace, **values: int) -> dict[str, int]:
    """Returns the assignment of zeros, but for `values`; `__` stands for a dot in their names."""
    changes = {name.replace("__", "."): value for name, value in values.items()}
    assert changes.keys() <= set(decision_names(space))
    return dict.fromkeys(decision_names(space), 0) | changes


# --- decisions ------------------------------------------------------------------------------------


def test_a_transformer_block_gives_a_decision_per_class_and_a_count_of_layers() -> None:
    space = build_space(make_layers(6))

    classes = ["activation", "attention", "elementwise", "matmul", "normalization"]
    assert space.decisions == [
        *(Decision(name=f"save.{c}", highest=1, type=DecisionType.SAVE) for c in classes),
        Decision(name="layers.Block", highest=6, type=DecisionType.COUNT),
    ]
    assert space.saves[3] == SaveDecision(
        name="save.matmul",
        label="matmul",
        kind="Block",
        op_class=OpClass.MATMUL,
        saved=("aten.addmm.default",),
    )
    assert space.size == 2**5 * 7


def test_sites_have_decisions_of_their_own() -> None:
    space = build_space(make_layers(2, SITE_OPS), granularity=SITE)

    saved = {save.label: save.saved for save in space.saves}
    assert saved == {
        "activation[2048]": ("aten.gelu.default[2048]",),
        "attention": (FLASH,),
        "elementwise[512]": ("aten.add.Tensor[512]",),
        "matmul[2048x512]": ("aten.addmm.default[2048x512]",),
        "matmul[512x1536]": ("aten.addmm.default[512x1536]",),
        "matmul[512x2048]": ("aten.addmm.default[512x2048]",),
        "matmul[512x512]": ("aten.addmm.default[512x512]",),
        "normalization[512]": ("aten.native_layer_norm.default[512]",),
    }
    assert [save.label for save in space.saves] == list(saved)
    # By class they are one decision, sites or not.
    by_class = build_space(make_layers(2, SITE_OPS))
    assert [s.saved for s in by_class.saves if s.label == "matmul"] == [("aten.addmm.default",)]


def test_attention_and_random_ops_have_no_sites() -> None:
    ops = [
        make_op(FLASH, site="8x64"),
        make_op("aten.native_dropout.default", site="512", random=True),
        make_op("aten.rand_like.default", site="64", random=True),
    ]

    space = build_space(make_layers(1, ops), granularity=SITE)

    assert {save.label: save.saved for save in space.saves} == {
        "attention": (FLASH,),
        "random": ("aten.native_dropout.default", "aten.rand_like.default"),
    }


def test_a_second_tier_has_the_same_decisions_again() -> None:
    layers = make_layers(3, BLOCK_OPS[:2])

    assert decision_names(build_space(layers, tiers=2)) == [
        "save.matmul",
        "save.normalization",
        "tier2.save.matmul",
        "tier2.save.normalization",
        "layers.Block",
        "tier2.layers.Block",
    ]
    each = build_space(layers, EACH, tiers=2)
    assert each.decisions[-3:] == [
        Decision(name=f"layer.h.{i}", highest=2, type=DecisionType.LAYER) for i in range(3)
    ]
    assert each.size == 2**4 * 3**3


def test_layer_choice_each_gives_a_decision_per_layer() -> None:
    space = build_space(make_layers(3), EACH)

    assert decision_names(space)[-3:] == ["layer.h.0", "layer.h.1", "layer.h.2"]
    assert {d.highest for d in space.decisions} == {1}
    assert {d.type for d in space.decisions} == {DecisionType.SAVE, DecisionType.LAYER}
    assert space.size == 2**5 * 2**3


def test_every_layer_kind_has_its_own_count() -> None:
    blocks = make_layers(4)
    stages = make_layers(2, CONVOLUTION_OPS, kind="Stage", prefix="s")

    space = build_space([blocks[0], *stages, *blocks[1:]])

    assert decision_names(space)[-2:] == ["layers.Block", "layers.Stage"]
    assert space.kinds == {"Block": ["h.0", "h.1", "h.2", "h.3"], "Stage": ["s.0", "s.1"]}


def test_what_several_kinds_have_is_decided_for_each_of_them() -> None:
    mixer = make_layers(2, BLOCK_OPS[:2], kind="Mixer", prefix="m")

    space = build_space([*make_layers(2), *mixer])

    assert [save.name for save in space.saves] == [
        "save.activation",
        "save.attention",
        "save.elementwise",
        "save.matmul@Block",
        "save.matmul@Mixer",
        "save.normalization@Block",
        "save.normalization@Mixer",
    ]
    assert [save.kind for save in space.saves if save.label == "matmul"] == ["Block", "Mixer"]


def test_a_label_is_shared_only_where_both_kinds_decide_about_it() -> None:
    cheap = [make_op("aten.mm.default"), make_op("aten.gelu.default", milliseconds=0.001)]
    others = make_layers(1, cheap, kind="Cheap", prefix="c")

    space = build_space([*make_layers(1), *others])

    assert {"save.matmul@Block", "save.matmul@Cheap"} <= set(decision_names(space))
    assert "save.activation" in decision_names(space)
    assert [save.kind for save in space.saves if save.label == "activation"] == ["Block"]


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
@pytest.mark.parametrize("granularity", Granularity)
def test_what_cannot_be_saved_gets_no_decision(
    op: OpTrace, reason: str, granularity: Granularity
) -> None:
    layers = make_layers(2, [make_op("aten.mm.default"), op])

    assert reason in unsavable_ops(layers, granularity)[op.op]
    space = build_space(layers, granularity=granularity)
    assert decision_names(space) == ["save.matmul", "layers.Block"]


def test_an_op_that_is_unsavable_in_one_layer_is_so_in_all() -> None:
    safe = make_layers(1, [make_op("aten.add.Tensor"), make_op("aten.mul.Tensor")])
    unsafe = make_layers(1, [make_op("aten.add.Tensor", output_mutated=True)], prefix="g")

    space = build_space([*safe, *unsafe])

    assert [save.saved for save in space.saves] == [("aten.mul.Tensor",)]


def test_an_unsavable_site_spares_the_other_sites() -> None:
    ops = [
        make_op("aten.add.Tensor", site="512"),
        make_op("aten.add.Tensor", site="2048", output_mutated=True),
    ]
    layers = make_layers(1, ops)

    space = build_space(layers, granularity=SITE)

    assert [save.saved for save in space.saves] == [("aten.add.Tensor[512]",)]
    # The name without its site would save the other as well.
    policy = space.policy_of({"h.0": frozenset(["elementwise[512]"])})
    assert policy.tiers[0].ops == ("aten.add.Tensor[512]",)
    assert build_space(layers, granularity=CLASS).saves == ()


def test_an_op_without_a_site_cannot_be_told_from_its_other_sites() -> None:
    layers = make_layers(1, [make_op("aten.mul.Tensor", site="512"), make_op("aten.mul.Tensor")])

    assert unsavable_ops(layers, SITE) == {
        "aten.mul.Tensor[512]": "",
        "aten.mul.Tensor": "cannot be told from its other sites",
    }
    assert unsavable_ops(layers, CLASS) == {"aten.mul.Tensor": ""}
    space = build_space(layers, granularity=SITE)
    assert [save.label for save in space.saves] == ["elementwise[512]"]
    policy = space.policy_of({"h.0": frozenset(["elementwise[512]"])})
    assert policy.tiers[0].ops == ("aten.mul.Tensor[512]",)


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
    assert "tied" in reasons[EFFICIENT]
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

    policy = space.policy_for(nothing(space, layers__Block=3))

    assert policy.layer_names == ("h.0", "h.1", "h.2")
    assert policy.tiers[0].is_plain


@pytest.mark.parametrize(
    ("first", "second", "saving"),
    [
        (1, 2, [True, False, False]),
        (0, 3, [False] * 3),
        (2, 0, [True] * 2),
        (4, 4, [True] * 4 + [False]),
        (5, 5, [True] * 5),
    ],
)
def test_the_second_tier_follows_the_first(first: int, second: int, saving: list[bool]) -> None:
    """Counts together end at the number of layers; the first tier has what it asks for."""
    space = build_space(make_layers(5), tiers=2)

    policy = space.policy_for(
        nothing(space, save__matmul=1, layers__Block=first, tier2__layers__Block=second)
    )

    assert policy.layer_names == tuple(f"h.{i}" for i in range(len(saving)))
    assert [not policy.tiers[choice.tier].saves_nothing for choice in policy.layers] == saving
    assert len(policy.tiers) == len(set(saving))


def test_no_layer_is_no_checkpointing_whatever_is_saved() -> None:
    space = build_space(make_layers(4))

    policy = space.policy_for(dict.fromkeys(decision_names(space), 1) | {"layers.Block": 0})

    assert policy == NO_CHECKPOINTING


def test_saving_attention_saves_its_kernels_of_other_devices() -> None:
    space = build_space(make_layers(1))

    ops = space.policy_for(nothing(space, save__attention=1, layers__Block=1)).tiers[0].ops

    assert FLASH in ops
    assert "aten._scaled_dot_product_flash_attention.default" in ops
    assert "aten._scaled_dot_product_cudnn_attention.default" in ops
    assert ops == tuple(sorted(ops))
    assert "aten.addmm.default" not in ops


def test_what_no_checkpointed_layer_runs_is_left_out_of_the_tier() -> None:
    stages = make_layers(2, CONVOLUTION_OPS, kind="Stage", prefix="s")
    space = build_space([*make_layers(2), *stages])
    everything = dict.fromkeys(decision_names(space), 1)

    policy = space.policy_for(everything | {"layers.Block": 0, "layers.Stage": 1})

    assert policy.tiers[0].classes == (OpClass.ACTIVATION, OpClass.CONVOLUTION)
    assert policy.tiers[0].ops == ("aten.convolution.default", "aten.relu.default")


def test_an_op_is_written_without_its_sites_where_all_of_them_are_saved() -> None:
    space = build_space(make_layers(1, SITE_OPS), granularity=SITE)
    matmuls = [save.label for save in space.saves if save.op_class is OpClass.MATMUL]
    assert len(matmuls) == 4

    (whole,) = space.policy_of({"h.0": frozenset(matmuls)}).tiers
    (most,) = space.policy_of({"h.0": frozenset(matmuls[1:])}).tiers

    assert whole == Tier(classes=("matmul",), ops=("aten.addmm.default",))
    assert most.classes == tuple(matmuls[1:])
    assert most.ops == tuple(f"aten.addmm.default{label[6:]}" for label in matmuls[1:])


def test_a_kind_with_other_sites_keeps_an_op_from_losing_its_own() -> None:
    """Two kinds share a tier, and one of them has a site of the op that is not saved."""
    narrow = make_layers(1, [make_op("aten.mm.default", site="8x8")], kind="Narrow", prefix="n")
    wide = make_layers(
        1,
        [make_op("aten.mm.default", site="8x8"), make_op("aten.mm.default", site="64x64")],
        kind="Wide",
        prefix="w",
    )
    space = build_space([*narrow, *wide], granularity=SITE)
    square = frozenset(["matmul[8x8]"])

    alone = space.policy_of({"n.0": square})
    shared = space.policy_of({"n.0": square, "w.0": square})
    both = space.policy_of({"n.0": square, "w.0": square | {"matmul[64x64]"}})

    assert [tier.ops for tier in alone.tiers] == [("aten.mm.default",)]
    assert [tier.ops for tier in shared.tiers] == [("aten.mm.default[8x8]",)]
    assert [tier.ops for tier in both.tiers] == [("aten.mm.default",)]


def test_kinds_share_a_tier_only_where_that_changes_nothing() -> None:
    blocks = make_layers(2, [make_op("aten.mm.default"), make_op("aten.gelu.default")])
    stages = make_layers(1, [make_op("aten.mm.default")], kind="Stage", prefix="s")
    space = build_space([*blocks, *stages])
    matmul, activation = frozenset(["matmul"]), frozenset(["activation"])

    same = space.policy_of({"h.0": matmul, "h.1": matmul, "s.0": matmul})
    different = space.policy_of({"h.0": matmul, "s.0": frozenset()})
    foreign = space.policy_of({"h.0": activation, "s.0": frozenset()})

    assert len(same.tiers) == 1
    assert [choice.tier for choice in different.layers] == [0, 1]
    # The stage has no activation that the tier could save.
    assert foreign == checkpoint_layers(
        ["h.0", "s.0"], Tier(classes=("activation",), ops=("aten.gelu.default",))
    )


def test_kinds_with_different_attention_kernels() -> None:
    blocks = make_layers(1, [make_op(FLASH)])
    cross = make_layers(1, [make_op(EFFICIENT)], kind="Cross", prefix="c")
    space = build_space([*blocks, *cross])
    saved, plain = frozenset(["attention"]), frozenset[str]()

    together = space.policy_of({"h.0": saved, "c.0": saved})
    apart = space.policy_of({"h.0": saved, "c.0": plain})

    assert len(together.tiers) == 1
    assert {FLASH, EFFICIENT} <= set(together.tiers[0].ops)
    # Saving attention means all kernels, so a layer that recomputes another one has its own tier.
    assert [choice.tier for choice in apart.layers] == [0, 1]
    assert apart.tiers[1].is_plain


def test_an_attention_kernel_that_cannot_be_saved_is_saved_by_nobody() -> None:
    blocks = make_layers(1, [make_op(FLASH)])
    cross = make_layers(1, [make_op(EFFICIENT, output_mutated=True)], kind="Cross", prefix="c")
    space = build_space([*blocks, *cross])

    assert [save.kind for save in space.saves] == ["Block"]
    policy = space.policy_of({"h.0": frozenset(["attention"]), "c.0": frozenset()})
    assert FLASH in policy.tiers[0].ops
    assert not any(EFFICIENT in tier.ops for tier in policy.tiers)


# --- assignments of policies ----------------------------------------------------------------------


def test_a_set_of_layers_that_no_count_stands_for_has_no_assignment() -> None:
    layers = make_layers(4)
    count, each = build_space(layers), build_space(layers, EACH)

    assert count.assignment_of(count.choices_of_classes(["h.0", "h.2"])) is None
    assert count.assignment_of(count.choices_of_classes(["h.1"])) is None
    assert count.assignment_of(count.choices_of_classes(["h.1", "h.0"])) is not None
    found = each.assignment_of(each.choices_of_classes(["h.0", "h.2"]))
    assert found is not None
    assert each.policy_for(found).layer_names == ("h.0", "h.2")


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_layers_that_the_space_lacks_have_no_assignment(mode: LayerChoiceMode) -> None:
    space = build_space(make_layers(2), mode)

    assert space.assignment_of({"h.0": frozenset(), "g.0": frozenset()}) is None


def test_more_save_sets_than_tiers_have_no_assignment() -> None:
    layers = make_layers(4)
    choices = {"h.0": frozenset[str](), "h.1": frozenset(["matmul"]), "h.2": frozenset(["matmul"])}

    assert build_space(layers).assignment_of(choices) is None
    two = build_space(layers, tiers=2)
    found = two.assignment_of(choices)
    assert found == nothing(two, tier2__save__matmul=1, layers__Block=1, tier2__layers__Block=2)
    assert two.assignment_of(choices | {"h.3": frozenset(["activation"])}) is None
    # Tiers that take turns are not a count of each.
    taking_turns = choices | {"h.2": frozenset()}
    assert two.assignment_of(taking_turns) is None
    each = build_space(layers, EACH, tiers=2)
    found = each.assignment_of(taking_turns)
    assert found is not None
    assert [found[f"layer.h.{i}"] for i in range(4)] == [1, 2, 1, 0]


def test_classes_are_chosen_in_all_their_sites() -> None:
    space = build_space(make_layers(3, SITE_OPS), granularity=SITE)

    choices = space.choices_of_classes(["h.1"], [OpClass.MATMUL, OpClass.ATTENTION])

    assert choices == {
        "h.1": frozenset(f"matmul[{s}]" for s in ("2048x512", "512x1536", "512x2048", "512x512"))
        | {"attention"}
    }


def test_a_policy_that_counts_calls_has_no_choices() -> None:
    space = build_space(make_layers(1))
    counting = Tier(ops=("aten.addmm.default",), every_second_matmul=True)

    assert space.choices_of(checkpoint_layers(["h.0"], counting)) is None


def test_the_choices_of_a_policy_that_was_written_by_hand() -> None:
    space = build_space(make_layers(2, SITE_OPS), granularity=SITE)
    tiers = (
        Tier(ops=("aten.addmm.default",), through_policy=True),
        Tier(ops=("aten.addmm.default[512x512]", "aten.mm.default")),
    )
    policy = Policy(tiers=tiers, layers=(LayerChoice(name="h.0"), LayerChoice(name="h.1", tier=1)))

    choices = space.choices_of(policy)

    assert choices == {
        "h.0": space.choices_of_classes(["h.0"], [OpClass.MATMUL])["h.0"],
        "h.1": {"matmul[512x512]"},
    }


# --- all spaces -----------------------------------------------------------------------------------

OP_POOL: list[OpTrace] = [
    make_op("aten.mm.default", site="8x8"),
    make_op("aten.mm.default", site="8x32"),
    make_op("aten.addmm.default", site="8x8"),
    make_op("aten.addmm.default", site="32x8"),
    make_op("aten.addmm.default", site="32x8", output_mutated=True),
    make_op("aten.gelu.default", site="8"),
    make_op("aten.gelu.default", site="32"),
    make_op("aten.gelu.default"),
    make_op("aten.silu.default", site="32", milliseconds=0.001),
    make_op("aten.silu.default", site="8"),
    make_op("aten.silu.default", site="8", output_mutated=True),
    make_op("aten.view.default", site="8", view=True),
    make_op("aten.relu_.default", site="8", mutates=True),
    make_op("aten._fft_r2c.default", site="8"),
    make_op(FLASH, site="4x8"),
    make_op(FLASH, site="4x8", random=True),
    make_op(EFFICIENT, site="4x8"),
    make_op(EFFICIENT, site="4x8", output_mutated=True),
    make_op("aten.native_dropout.default", site="8", random=True),
    make_op("aten.rand_like.default", site="32", random=True),
]


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    layers: list[LayerTrace] = []
    for index in range(draw(st.integers(1, 3))):
        drawn = draw(st.lists(st.sampled_from(OP_POOL), min_size=1, max_size=6))
        ops = {op.site_name: op for op in drawn}
        count = draw(st.integers(1, 3))
        layers += make_layers(count, list(ops.values()), kind=f"Kind{index}", prefix=f"kind{index}")
    return build_space(
        draw(st.permutations(layers)),
        draw(st.sampled_from(LayerChoiceMode)),
        draw(st.sampled_from(Granularity)),
        draw(st.integers(1, 2)),
    )


@st.composite
def spaces_and_assignments(draw: st.DrawFn, count: int) -> tuple[SearchSpace, list[dict[str, int]]]:
    space = draw(spaces())
    assignments = [
        {d.name: draw(st.integers(0, d.highest)) for d in space.decisions} for _ in range(count)
    ]
    return space, assignments


Runs = Mapping[str, set[str]]
"""For each checkpointed layer the names and sites of its ops that are saved."""


def what_is_asked(space: SearchSpace, assignment: Assignment) -> Runs:
    """Says what an assignment means, straight from the rules."""
    reasons = unsavable_ops(space.layers, space.granularity)
    decisions = {(save.kind, save.label): save.name for save in space.saves}
    runs: dict[str, set[str]] = {}
    for layer in space.layers:
        prefix = tier_prefix(space, assignment, layer)
        if prefix is None:
            continue
        runs[layer.name] = set()
        for op in layer.ops:
            label = "random" if op.random else str(op.op_class)
            if space.granularity is SITE and label not in ("random", "attention") and op.site:
                label += f"[{op.site}]"
            name = decisions.get((layer.kind, label))
            is_savable = not reasons[saved_name(op, space.granularity)]
            if is_savable and name is not None and assignment[prefix + name]:
                runs[layer.name].add(op.site_name)
    return runs


def tier_prefix(space: SearchSpace, assignment: Assignment, layer: LayerTrace) -> str | None:
    if space.mode is EACH:
        return {0: None, 1: "", 2: "tier2."}[assignment[f"layer.{layer.name}"]]
    alike = [other.name for other in space.layers if other.kind == layer.kind]
    places = [""] * assignment[f"layers.{layer.kind}"]
    if space.tiers == 2:
        places += ["tier2."] * assignment[f"tier2.layers.{layer.kind}"]
    place = alike.index(layer.name)
    return places[place] if place < len(places) else None


def what_is_saved(policy: Policy, layers: Sequence[LayerTrace]) -> Runs:
    """Says what the runtime saves, by asking it about every op with tensors of its sizes."""
    tier_of = {choice.name: policy.tiers[choice.tier] for choice in policy.layers}
    return {
        layer.name: {op.site_name for op in layer.ops if is_saved(op, tier_of[layer.name])}
        for layer in layers
        if layer.name in tier_of
    }


def is_saved(op: OpTrace, tier: Tier) -> bool:
    namespace, packet, overload = op.op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return SaveSet(tier.ops, save_random=tier.save_random).decide(function, *call_of(op)) is SAVE


def call_of(op: OpTrace) -> tuple[tuple[torch.Tensor, ...], dict[str, float]]:
    sizes = [int(size) for size in op.site.split("x")] if op.site else []
    if op.op_class is OpClass.ATTENTION:
        return (torch.empty(1, 4, 2, 8, device="meta"),) * 3, {"dropout_p": 0.5 * op.random}
    tensor = torch.empty(sizes, device="meta")
    if op.op_class is OpClass.MATMUL:
        return (tensor,) * 3, {}
    return (tensor,), {}


def test_the_runtime_sees_the_sites_of_the_pool() -> None:
    for op in OP_POOL:
        everything = Tier(ops=(op.op,), save_random=True)
        here, elsewhere = Tier(ops=(op.site_name,)), Tier(ops=(f"{op.op}[7x7]",))
        assert is_saved(op, everything) == (not op.view and not op.mutates)
        assert not is_saved(op, elsewhere)
        if not op.random and op.op_class is not OpClass.ATTENTION:
            assert is_saved(op, here) == is_saved(op, everything)


@settings(max_examples=200, deadline=None)
@given(spaces_and_assignments(2))
def test_keys_are_equal_exactly_when_two_assignments_run_alike(
    drawn: tuple[SearchSpace, list[dict[str, int]]],
) -> None:
    space, (first, second) = drawn

    # Both assignments, and each with one decision changed, so that likes are met often.
    found = [second, *(first | {name: second[name]} for name in first)]
    asked, policy = what_is_asked(space, first), space.policy_for(first)
    # Neither sharing tiers nor leaving out sites changes what any layer saves.
    assert what_is_saved(policy, space.layers) == asked
    for other in found:
        same_key = policy.key == space.policy_for(other).key
        assert same_key == (asked == what_is_asked(space, other))


@settings(max_examples=200, deadline=None)
@given(spaces_and_assignments(1))
def test_an_assignment_comes_back_from_its_choices(
    drawn: tuple[SearchSpace, list[dict[str, int]]],
) -> None:
    space, (assignment,) = drawn
    choices = space.choices_for(assignment)

    found = space.assignment_of(choices)

    assert found is not None
    assert [*found] == decision_names(space)
    assert all(0 <= found[d.name] <= d.highest for d in space.decisions)
    assert space.choices_for(found) == choices
    assert space.policy_for(found) == space.policy_for(assignment)
    if space.tiers == 1:
        # The layers are the same; a save decision may be missing where it changed nothing.
        assert {n: v for n, v in found.items() if not n.startswith("save.")} == {
            n: v for n, v in assignment.items() if not n.startswith("save.")
        }
        assert all(found[save.name] <= assignment[save.name] for save in space.saves)


@settings(max_examples=200, deadline=None)
@given(spaces_and_assignments(1))
def test_choices_come_back_from_their_policy(
    drawn: tuple[SearchSpace, list[dict[str, int]]],
) -> None:
    space, (assignment,) = drawn
    choices = space.choices_for(assignment)
    policy = space.policy_of(choices)

    found = space.choices_of(policy)

    assert found == choices
    assert space.policy_of(found).key == policy.key


@settings(max_examples=100, deadline=None)
@given(spaces_and_assignments(1))
def test_a_policy_has_no_tier_too_many(drawn: tuple[SearchSpace, list[dict[str, int]]]) -> None:
    space, (assignment,) = drawn
    policy = space.policy_for(assignment)

    assert {choice.tier for choice in policy.layers} == set(range(len(policy.tiers)))
    assert len(policy.tiers) <= space.tiers * len(space.kinds)
    assert len(set(policy.tiers)) == len(policy.tiers)
    order = [layer.name for layer in space.layers if layer.name in policy.layer_names]
    assert list(policy.layer_names) == order


def test_the_size_of_a_space_is_the_number_of_its_assignments() -> None:
    space = build_space(make_layers(2, BLOCK_OPS[:2]), tiers=2)

    assert space.size == math.prod(d.highest + 1 for d in space.decisions) == 144
    assert sum(1 for _ in space.assignments()) == 144


# --- how the model runs ---------------------------------------------------------------------------

ALL_MODES = tuple(RunMode)


def test_modes_and_a_memory_budget_are_decisions_beside_the_others() -> None:
    plain, space = (build_space(make_layers(2), run_modes=m) for m in (EAGER_ONLY, ALL_MODES))
    added = [d for d in space.decisions if d not in plain.decisions]
    assert [(d.name, d.highest) for d in added] == [
        ("compile", 3),
        ("activation_memory_budget", 100),
        ("activation_memory_budget_solver", 2),
    ]
    assert added[0].names == tuple(map(str, ALL_MODES))
    assert added[2].names == ("dp", "greedy", "ilp")
    assert [d for d in space.decisions if d not in added] == plain.decisions


@pytest.mark.parametrize("mode", [m for m in RunMode if m.has_layers])
def test_choices_are_found_again_in_their_mode(mode: RunMode) -> None:
    space = build_space(make_layers(3), run_modes=ALL_MODES)
    choices = space.choices_of_classes(["h.0", "h.1"], [OpClass.MATMUL])
    assignment = space.assignment_of(choices, mode)
    assert assignment is not None and space.mode_in(assignment) is mode
    policy = space.policy_for(assignment)
    assert policy == space.policy_of(choices, mode)
    assert space.mode_of(policy) is mode
    assert space.choices_of(policy) == choices
    assert assignment["activation_memory_budget"] == 0


def test_what_means_nothing_is_zero() -> None:
    space = build_space(make_layers(3), run_modes=ALL_MODES)
    ones = dict.fromkeys((d.name for d in space.decisions), 1)
    for index, mode in enumerate(ALL_MODES):
        found = space.completed(ones | {"compile": index})
        meant = {d.name for d in space.decisions_in(mode)} | {"compile"}
        assert {name for name, value in found.items() if value} <= meant
        assert all(found[name] == 1 for name in meant - {"compile"})
        assert space.completed(found) == found


def test_a_memory_budget_is_in_hundredths() -> None:
    space = build_space(make_layers(3), run_modes=ALL_MODES)
    found = {space.policy_for(space.budget_assignment(h)).key for h in range(101)}
    assert len(found) == 101
    assert space.policy_for(space.budget_assignment(100)).key == COMPILE_ALONE.key


def test_torch_measures_ops_where_it_can() -> None:
    plain, space = (
        build_space(make_layers(2), run_modes=ALL_MODES, can_profile=can) for can in (False, True)
    )
    assert [d.name for d in space.decisions if d not in plain.decisions] == [
        "activation_memory_budget_runtime_estimator"
    ]
    assert plain.budget_settings == [("dp", "flops"), ("greedy", "flops"), ("ilp", "flops")]
    assert {estimator for _, estimator in space.budget_settings} == {"flops", "profile"}


@pytest.mark.parametrize("can_profile", [False, True])
def test_every_setting_of_a_memory_budget_is_a_policy_of_its_own(can_profile: bool) -> None:
    space = build_space(make_layers(2), run_modes=ALL_MODES, can_profile=can_profile)
    found = {}
    for setting in space.budget_settings:
        compiled = space.policy_for(space.budget_assignment(40, setting)).compiled
        assert (compiled.memory_budget, compiled.solver, compiled.estimator) == (0.4, *setting)
        found[Policy(compiled=compiled).key] = setting
        # Without a budget they mean nothing.
        whole = space.policy_for(space.budget_assignment(100, setting))
        assert whole.key == COMPILE_ALONE.key
    assert len(found) == len(space.budget_settings)


def test_where_a_mode_is_not_searched_nothing_stands_for_it() -> None:
    space = build_space(make_layers(3), run_modes=ALL_MODES[1:])
    assert space.assignment_of({}) is None
    assert space.assignment_of({}, RunMode.COMPILE) is not None
    assert {space.mode_in(a) for a in space.assignments()} == set(ALL_MODES[1:])
    assert sum(1 for _ in space.assignments()) == space.size
