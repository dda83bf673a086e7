"""A policy is pure data: its key, its words, and its way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_search import records
from sac_search.opclasses import OpClass
from sac_search.policy import (
    COMPILE_ALONE,
    COMPILED_SCHEMA_VERSION,
    NO_CHECKPOINTING,
    PLAIN_TIER,
    Compiled,
    LayerChoice,
    Policy,
    Tier,
    checkpoint_layers,
    describe_tier,
    policy_document,
)

MM = "aten.mm.default"
BMM = "aten.bmm.default"
SAVE_MM = Tier(classes=(OpClass.MATMUL,), ops=(MM,))


def choices(**tiers: int) -> tuple[LayerChoice, ...]:
    return tuple(LayerChoice(name=name, tier=tier) for name, tier in tiers.items())


# --- key ------------------------------------------------------------------------------------------

SAME = {
    "preferences where nothing is saved": (
        Policy(compiled=Compiled(prefer=True)),
        Policy(compiled=Compiled()),
    ),
    "no layers": (NO_CHECKPOINTING, Policy(tiers=(SAVE_MM,))),
    "order of layers": (
        checkpoint_layers(["a", "b"], SAVE_MM),
        checkpoint_layers(["b", "a"], SAVE_MM),
    ),
    "order of tiers": (
        Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=0, b=1)),
        Policy(tiers=(PLAIN_TIER, SAVE_MM), layers=choices(a=1, b=0)),
    ),
    "tiers that are the same": (
        Policy(tiers=(SAVE_MM, SAVE_MM), layers=choices(a=0, b=1)),
        checkpoint_layers(["a", "b"], SAVE_MM),
    ),
    "tier that no layer has": (
        Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=0)),
        checkpoint_layers(["a"], SAVE_MM),
    ),
    "classes, which are words": (
        checkpoint_layers(["a"], SAVE_MM),
        checkpoint_layers(["a"], Tier(ops=(MM,))),
    ),
    "order of ops": (
        checkpoint_layers(["a"], Tier(ops=(MM, BMM))),
        checkpoint_layers(["a"], Tier(ops=(BMM, MM, MM))),
    ),
    "a site of an op that is saved everywhere": (
        checkpoint_layers(["a"], Tier(ops=(MM, f"{MM}[8x8]"))),
        checkpoint_layers(["a"], Tier(ops=(MM,))),
    ),
    "through_policy of a tier that needs one": (
        checkpoint_layers(["a"], SAVE_MM),
        checkpoint_layers(["a"], dataclasses.replace(SAVE_MM, through_policy=True)),
    ),
    "every second of nothing": (
        checkpoint_layers(["a"]),
        checkpoint_layers(["a"], Tier(every_second_matmul=True)),
    ),
}
DIFFERENT = {
    "none": NO_CHECKPOINTING,
    "plain": checkpoint_layers(["a"]),
    "through a policy": checkpoint_layers(["a"], Tier(through_policy=True)),
    "another layer": checkpoint_layers(["b"]),
    "two layers": checkpoint_layers(["a", "b"]),
    "a name like two": checkpoint_layers(['a", "b']),
    "matmul": checkpoint_layers(["a"], SAVE_MM),
    "another matmul": checkpoint_layers(["a"], Tier(ops=(BMM,))),
    "both": checkpoint_layers(["a"], Tier(ops=(BMM, MM))),
    "matmul at a site": checkpoint_layers(["a"], Tier(ops=(f"{MM}[8x8]",))),
    "matmul at another site": checkpoint_layers(["a"], Tier(ops=(f"{MM}[8x9]",))),
    "one name like both": checkpoint_layers(["a"], Tier(ops=(f'{BMM}","{MM}',))),
    "random": checkpoint_layers(["a"], Tier(save_random=True)),
    "random, matmul": checkpoint_layers(["a"], dataclasses.replace(SAVE_MM, save_random=True)),
    "alternate": checkpoint_layers(["a"], dataclasses.replace(SAVE_MM, every_second_matmul=True)),
    "tiers": Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=0, b=1)),
    "tiers swapped": Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=1, b=0)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_policies_that_run_the_same_have_one_key(one: Policy, other: Policy) -> None:
    assert one.key == other.key


def test_policies_that_run_differently_have_different_keys() -> None:
    keys = {name: policy.key for name, policy in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys)


def test_a_key_is_the_same_in_every_process() -> None:
    # Studies on disk are looked up by it: changing it makes them measure again.
    assert DIFFERENT["tiers"].key == "4a9ec5a3e4a8518b"


# --- what a policy is -----------------------------------------------------------------------------


def test_policies_are_frozen_and_hashable() -> None:
    policy = checkpoint_layers(["a"], SAVE_MM)
    assert len({policy, checkpoint_layers(["a"], SAVE_MM)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.layers = ()  # type: ignore[misc]


def test_a_layer_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        checkpoint_layers(["a", "a"])


@pytest.mark.parametrize("tier", [1, -1])
def test_a_tier_that_does_not_exist_is_refused(tier: int) -> None:
    with pytest.raises(ValueError, match="names a tier that the policy does not have"):
        Policy(tiers=(SAVE_MM,), layers=choices(a=tier))


def test_no_layers_make_no_tiers() -> None:
    assert checkpoint_layers([], SAVE_MM) == NO_CHECKPOINTING


@pytest.mark.parametrize(
    ("tier", "saves_nothing", "is_plain"),
    [
        (Tier(), True, True),
        (Tier(through_policy=True), True, False),
        (Tier(every_second_matmul=True), True, True),
        (SAVE_MM, False, False),
        (Tier(save_random=True), False, False),
    ],
)
def test_what_is_plain_checkpointing(tier: Tier, saves_nothing: bool, is_plain: bool) -> None:
    assert (tier.saves_nothing, tier.is_plain) == (saves_nothing, is_plain)


def test_only_policies_that_count_calls_cannot_be_exported() -> None:
    unexportable = {name for name, policy in DIFFERENT.items() if not policy.exportable}
    assert unexportable == {"alternate"}


def test_of_two_policies_the_one_with_less_to_read_is_simpler() -> None:
    names = ["none", "plain", "matmul", "both"]
    complexities = [DIFFERENT[name].complexity for name in names]
    assert complexities == sorted(set(complexities))
    assert DIFFERENT["tiers"].complexity > DIFFERENT["matmul"].complexity


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (NO_CHECKPOINTING, "no checkpointing"),
        (checkpoint_layers(["a"]), "1 layer: recompute all"),
        (
            checkpoint_layers("abc", Tier(through_policy=True)),
            "3 layers: recompute all through a policy",
        ),
        (checkpoint_layers("ab", SAVE_MM), "2 layers: save matmul"),
        (
            checkpoint_layers("ab", Tier(classes=(OpClass.MATMUL, OpClass.ATTENTION), ops=(MM,))),
            "2 layers: save matmul, attention",
        ),
        (checkpoint_layers("a", Tier(ops=(MM, BMM))), "1 layer: save 2 ops"),
        (checkpoint_layers("a", Tier(save_random=True)), "1 layer: save random"),
        (
            checkpoint_layers("a", Tier(classes=(OpClass.RANDOM,), save_random=True)),
            "1 layer: save random",
        ),
        (
            DIFFERENT["alternate"],
            "1 layer: save every second matmul, attention (counts calls)",
        ),
        (
            Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=0, b=1, c=1)),
            "1 layer: save matmul; 2 layers: recompute all",
        ),
        (
            Policy(tiers=(SAVE_MM, PLAIN_TIER), layers=choices(a=1)),
            "1 layer: recompute all",
        ),
    ],
)
def test_it_is_described_in_a_few_words(policy: Policy, words: str) -> None:
    assert policy.describe() == words


def test_layer_names_keep_their_order() -> None:
    assert checkpoint_layers(["b", "a"]).layer_names == ("b", "a")


# --- JSON -----------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tiers = st.builds(
    Tier,
    classes=st.lists(st.sampled_from(OpClass), max_size=3).map(tuple),
    ops=st.lists(names, max_size=3).map(tuple),
    save_random=st.booleans(),
    through_policy=st.booleans(),
    every_second_matmul=st.booleans(),
)


@st.composite
def policies(draw: Any) -> Policy:
    drawn = draw(st.lists(tiers, min_size=1, max_size=2))
    layer_names = draw(st.lists(names, unique=True, max_size=4))
    indices = st.integers(0, len(drawn) - 1)
    layers = tuple(LayerChoice(name=name, tier=draw(indices)) for name in layer_names)
    return Policy(tiers=tuple(drawn), layers=layers)


@given(policies())
def test_json_gives_back_the_same_policy(policy: Policy) -> None:
    text = records.encode(policy)
    assert records.decode(text, Policy) == policy
    assert records.decode(text, Policy).key == policy.key
    assert records.decode(json.dumps(json.loads(text)), Policy) == policy


@given(policies())
def test_the_words_never_fail(policy: Policy) -> None:
    assert policy.describe()
    assert all(describe_tier(tier) for tier in policy.tiers)


@given(policies(), st.randoms(use_true_random=False))
def test_the_key_does_not_depend_on_any_order(policy: Policy, random: Any) -> None:
    order = list(range(len(policy.tiers)))
    random.shuffle(order)
    layers = [
        LayerChoice(name=choice.name, tier=order.index(choice.tier)) for choice in policy.layers
    ]
    random.shuffle(layers)
    shuffled = Policy(tiers=tuple(policy.tiers[index] for index in order), layers=tuple(layers))
    assert shuffled.key == policy.key


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["tiers", "layers", "schema_version", "name", "tier", "ops"]), inner
            )
        ),
    )
)
def test_json_of_another_shape_is_refused_or_means_a_policy(document: Any) -> None:
    text = json.dumps(document, allow_nan=True)
    try:
        policy = records.decode(text, Policy)
    except ValueError:
        return
    assert isinstance(document, dict)
    assert isinstance(policy, Policy)
    assert [choice.name for choice in policy.layers] == [
        choice["name"] for choice in document.get("layers", [])
    ]


BAD = {
    "no JSON": "{",
    "empty": "",
    "list": "[]",
    "null": "null",
    "number as name": '{"tiers": [{}], "layers": [{"name": 1}]}',
    "number as op": '{"tiers": [{"ops": [1]}]}',
    "text as ops": '{"tiers": [{"ops": "aten.mm.default"}]}',
    "text as truth": '{"tiers": [{"save_random": "yes"}]}',
    "number as truth": '{"tiers": [{"save_random": 1}]}',
    "fraction as tier": '{"tiers": [{}], "layers": [{"name": "a", "tier": 0.5}]}',
    "truth as tier": '{"tiers": [{}], "layers": [{"name": "a", "tier": true}]}',
    "no name": '{"tiers": [{}], "layers": [{}]}',
    "no such tier": '{"tiers": [{}], "layers": [{"name": "a", "tier": 1}]}',
    "twice": '{"tiers": [{}], "layers": [{"name": "a"}, {"name": "a"}]}',
    "no Unicode": b'{"tiers": [{"ops": ["\xff"]}]}',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        records.decode(text, Policy)


def test_a_newer_schema_is_refused_with_its_number() -> None:
    newer = records.SCHEMA_VERSION + 1
    with pytest.raises(ValueError, match=f"schema version {newer}, written by a newer sac-search"):
        Policy(schema_version=newer)
    with pytest.raises(ValueError, match=f"schema version {newer}, written by a newer sac-search"):
        records.decode(json.dumps({"schema_version": newer}), Policy)
    assert records.decode("{}", Policy) == NO_CHECKPOINTING


# --- compiled -------------------------------------------------------------------------------------

COMPILED = dataclasses.replace(checkpoint_layers(["a", "b"], SAVE_MM), compiled=Compiled())
PREFERRED = dataclasses.replace(COMPILED, compiled=Compiled(prefer=True))
BUDGET = Policy(compiled=Compiled(memory_budget=0.5))


def test_what_is_compiled_is_another_policy() -> None:
    policies = (COMPILED, PREFERRED, BUDGET, COMPILE_ALONE, COMPILED.eager, NO_CHECKPOINTING)
    assert len({policy.key for policy in policies}) == len(policies)
    assert COMPILED.eager == checkpoint_layers(["a", "b"], SAVE_MM)
    assert [policy.changes_nothing for policy in policies] == [False] * 5 + [True]


def test_the_key_of_an_eager_policy_is_that_of_earlier_releases() -> None:
    assert NO_CHECKPOINTING.key == "4f53cda18c2baa0c"
    assert "compiled" not in policy_document(NO_CHECKPOINTING)


def test_a_compiled_policy_is_described() -> None:
    assert COMPILED.describe() == "compiled, 2 layers: save matmul"
    assert PREFERRED.describe() == "compiled, as preferences, 2 layers: save matmul"
    assert BUDGET.describe() == "compiled, memory budget 0.50"
    assert COMPILE_ALONE.describe() == "compiled, no checkpointing"


@pytest.mark.parametrize("policy", [COMPILED, PREFERRED, BUDGET, COMPILE_ALONE])
def test_a_compiled_policy_survives_json_and_says_that_older_releases_must_not_read_it(
    policy: Policy,
) -> None:
    assert records.decode(records.encode(policy), Policy) == policy
    document = policy_document(policy)
    assert document["schema_version"] == COMPILED_SCHEMA_VERSION > records.SCHEMA_VERSION
    del document["compiled"]  # as a release reads it that does not know what that is
    with pytest.raises(ValueError, match="written by a newer sac-search"):
        records.decode(json.dumps(document), Policy)


def test_a_setting_of_torchs_budget_counts_where_there_is_a_budget() -> None:
    greedy = Policy(compiled=Compiled(memory_budget=0.5, solver="greedy"))
    profiled = Policy(compiled=Compiled(memory_budget=0.5, estimator="profile"))
    assert len({BUDGET.key, greedy.key, profiled.key}) == 3
    assert Policy(compiled=Compiled(solver="greedy")).key == COMPILE_ALONE.key
    assert greedy.describe() == "compiled, memory budget 0.50 (greedy, flops)"
    assert profiled.describe() == "compiled, memory budget 0.50 (dp, profile)"
    assert greedy.complexity > BUDGET.complexity


@pytest.mark.parametrize(
    "compiled",
    [
        Compiled(),
        Compiled(memory_budget=0.5),
        Compiled(memory_budget=0.5, solver="greedy"),
        Compiled(memory_budget=0.0, estimator="profile"),
    ],
)
def test_torchs_settings_are_read_back(compiled: Compiled) -> None:
    assert Compiled.of_settings(compiled.settings) == compiled


def test_no_cached_graph_is_taken_for_one_of_another_solver() -> None:
    # torch 2.13 looks up compiled graphs by the budget, but not by who keeps to it.
    assert Compiled(memory_budget=0.5, solver="ilp").settings["enable_autograd_cache"] is False
    assert "enable_autograd_cache" not in Compiled(memory_budget=0.5).settings
    assert Compiled().settings == {"activation_memory_budget": 1.0}


def test_simpler_is_what_says_less() -> None:
    ladder = [NO_CHECKPOINTING, COMPILE_ALONE, BUDGET, COMPILED, PREFERRED]
    assert [p.complexity for p in ladder] == sorted({p.complexity for p in ladder})


@pytest.mark.parametrize("memory_budget", [-0.01, 1.01, float("nan")])
def test_a_memory_budget_is_a_part(memory_budget: float) -> None:
    with pytest.raises(ValueError, match="it is a part, 0 to 1"):
        Compiled(memory_budget=memory_budget)
