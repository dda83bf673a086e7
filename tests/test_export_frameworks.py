"""The exported module in the frameworks that people train with: found behind wrappers, on once.

What needs more than torch and transformers runs where that library is installed, and is skipped
elsewhere.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import json
import pickle
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    HIDDEN,
    MM,
    NORM,
    RELEASE,
    Block,
    Run,
    Stack,
    assert_same,
    loss_of,
    recomputed,
    run,
    stack,
    tokens,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from sac_search.export import exported, render_module
from sac_search.policy import LayerChoice, Policy, Tier, checkpoint_layers

BOTH = ("blocks.0", "blocks.1")
ADDMM = "aten.addmm.default"


def two_tiers(first: str, second: str) -> Policy:
    """Saves the matmuls of one layer and recomputes those of the other."""
    return Policy(
        tiers=(Tier(ops=(ADDMM, MM)), Tier()),
        layers=(LayerChoice(name=first, tier=0), LayerChoice(name=second, tier=1)),
    )


def policy_text(policy: Policy) -> str:
    environment = {"torch_version": torch.__version__, "device": "cpu", "device_name": "this CPU"}
    return render_module(
        policy, meta={"study_name": "tiny", "environment": environment}, headline=["A policy."]
    )


def export(policy: Policy) -> Any:
    module = types.ModuleType("exported_policy")
    sys.modules[module.__name__] = module  # as an import would, for pickles
    exec(compile(policy_text(policy), "exported_policy", "exec"), module.__dict__)  # noqa: S102
    return module


@pytest.fixture
def policy() -> Any:
    return export(two_tiers(*BOTH))


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skips where one of the libraries is missing: CI has transformers alone."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def checkpointed(model: nn.Module) -> list[str]:
    return [n for n, module in model.named_modules() if hasattr(type(module), "_sac_checkpointed")]


def state_of(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    return [(type(module), dict(vars(module))) for module in model.modules()]


def on(model: nn.Module) -> list[str]:
    """Returns the modules whose own checkpointing is switched on."""
    return [n for n, m in model.named_modules() if vars(m).get("gradient_checkpointing")]


# --- names behind wrappers ------------------------------------------------------------------------


class Held(nn.Module):
    """A wrapper that holds the model under the given name."""

    def __init__(self, name: str, held: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, held)

    def forward(self, *args: Any) -> Any:
        return getattr(self, self.name)(*args)


def lora(model: nn.Module) -> nn.Module:
    return Held("base_model", Held("model", model))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def each_block(wrap: Any) -> Any:
    def wrapped(model: Any) -> Any:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return model

    return wrapped


WRAPPED = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled blocks": each_block(compiled),
    "data parallel": nn.DataParallel,
    "FSDP1": lambda model: Held("_fsdp_wrapped_module", each_block(fsdp1)(model)),
    "offloaded": each_block(offload_wrapper),
    "LoRA": lora,
    "prompts": functools.partial(Held, "base_model"),
    "all": lambda model: nn.DataParallel(compiled(lora(each_block(compiled)(model)))),
    "inside": lambda model: Held("base_model", nn.DataParallel(Held("model", model))),
}


def fsdp1(model: nn.Module) -> nn.Module:
    return Held("_fsdp_wrapped_module", model)


PAIRS = sorted(
    {pair for name in WRAPPED for pair in ((name, "plain"), ("plain", name), (name, "all"))}
)


@pytest.mark.parametrize(("made_on", "used_on"), PAIRS)
def test_layers_are_found_behind_wrappers_in_both_directions(made_on: str, used_on: str) -> None:
    names = [n for n, m in WRAPPED[made_on](stack()).named_modules() if type(m) is Block]
    policy = export(two_tiers(*names))
    model = WRAPPED[used_on](stack())
    assert policy.apply(model) is model
    layers = [m for n, m in model.named_modules() if isinstance(m, Block)]
    assert checkpointed(model) == [n for n, m in model.named_modules() if m in layers]
    assert [type(layer)._sac_checkpointed[1] for layer in layers] == [policy.context_fn, None]
    assert policy.remove(model) is model
    assert checkpointed(model) == []


names_of_modules = st.lists(
    st.sampled_from(["model", "layers", "0", "1", "blocks", "encoder"]), min_size=1, max_size=5
)
wrapping = st.sampled_from(
    [[w] for w in sorted(exported._WRAPPERS)] + [["base_model", "model"], ["base_model"]]
)


@given(parts=names_of_modules, data=st.data())
def test_wrappers_anywhere_in_a_name_are_seen_through(parts: list[str], data: Any) -> None:
    def wrapped() -> str:
        peft = data.draw(st.booleans())
        name = [*(data.draw(wrapping) if peft else []), *parts]
        for _ in range(data.draw(st.integers(0, 3))):
            position = data.draw(st.integers(0, len(name)))
            if position == 0 or name[position - 1] != "base_model":
                name.insert(position, data.draw(st.sampled_from(sorted(exported._WRAPPERS))))
        return ".".join(name)

    name, other = wrapped(), wrapped()
    assert exported._match(name, exported._index([other])) == [other]
    last = f"{other}x"
    assert exported._match(name, exported._index([last])) == []


def test_a_models_own_child_called_module_is_no_wrapper() -> None:
    model = Stack(Held("module", Block()), Held("module", Block()))
    outer, inner = BOTH, tuple(f"{name}.module" for name in BOTH)
    for names in (outer, inner):
        for wrap in (nn.Identity, nn.DataParallel):
            policy = export(checkpoint_layers(names))
            wrapped = Stack(*model.blocks) if wrap is nn.Identity else wrap(model)
            policy.apply(wrapped)
            prefix = "" if wrap is nn.Identity else "module."
            assert checkpointed(wrapped) == [prefix + name for name in names]
            policy.remove(wrapped)


def test_a_name_that_can_mean_two_layers_is_refused_with_both() -> None:
    model = nn.ModuleDict({"module": stack(), "_orig_mod": stack()})
    before = state_of(model)
    policy = export(checkpoint_layers(["_fsdp_wrapped_module.blocks.0"]))
    with pytest.raises(
        ValueError, match="can mean more than one layer of this ModuleDict"
    ) as caught:
        policy.apply(model)
    message = str(caught.value)
    assert message.startswith("_fsdp_wrapped_module.blocks.0 can")  # as the user knows it
    assert "module.blocks.0, _orig_mod.blocks.0. Apply" in message
    assert state_of(model) == before
    assert checkpointed(export(checkpoint_layers(["module.blocks.0"])).apply(model)) == [
        "module.blocks.0"
    ]


def test_a_layer_of_a_larger_model_is_pointed_at(policy: Any) -> None:
    with pytest.raises(
        ValueError, match=r"no layer blocks\.0, blocks\.1\. It has net\.blocks\.0: "
    ):
        policy.apply(nn.ModuleDict({"net": stack()}))


def test_a_layer_of_a_part_is_pointed_at() -> None:
    policy = export(checkpoint_layers(["net.blocks.0"]))  # searched as a LightningModule's, say
    with pytest.raises(
        ValueError, match=r"no layer net\.blocks\.0\. It has blocks\.0: apply .* to what holds"
    ):
        policy.apply(stack())


def test_applying_again_does_nothing(policy: Any) -> None:
    model = policy.apply(stack())
    wrapped = compiled(model)
    before = state_of(model)
    policy.apply(wrapped)  # as Lightning's configure_model() may
    assert state_of(model) == before
    with pytest.raises(ValueError, match="checkpointed already"):
        export(two_tiers(*BOTH)).apply(model)  # another module, though of the same text
    with pytest.raises(ValueError, match="checkpointed already"):
        export(checkpoint_layers(BOTH[:1])).apply(model)
    assert state_of(model) == before
    plain = export(checkpoint_layers(BOTH))
    other = export(checkpoint_layers(BOTH))
    model = plain.apply(stack())
    with pytest.raises(ValueError, match="checkpointed already"):
        other.apply(model)


# --- torch's own wrappers -------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["apply first", "shard first"])
def test_fsdp2_trains_the_same_in_either_order(
    order: str, process_group: None, policy: Any
) -> None:
    model = stack()
    plain = run(model, tokens())
    if order == "apply first":
        policy.apply(model)
    shard(model)
    policy.apply(model)  # and once more, as configure_model() may
    policy.apply(model)
    sharded = run(model, tokens())
    for name, expected in plain.gradients.items():
        assert torch.equal(sharded.gradients[name].full_tensor(), expected)  # type: ignore[union-attr]
    assert [recomputed(plain, sharded)[op] for op in (MM, NORM)] == [3, 4]
    if order == "apply first":
        with pytest.raises(ValueError, match="became a FSDPBlock after it was checkpointed"):
            policy.remove(model)
    else:
        policy.remove(model)
        assert NORM not in recomputed(plain, run(model, tokens()))


def test_ddp_trains_the_same_in_either_order(process_group: None, policy: Any) -> None:
    plain = run(stack(), tokens())
    for first in (True, False):
        model = policy.apply(stack()) if first else stack()
        wrapped = policy.apply(nn.parallel.DistributedDataParallel(model))
        trained = run(wrapped, tokens())
        for name, expected in plain.gradients.items():
            assert torch.equal(trained.gradients[f"module.{name}"], expected)  # type: ignore[arg-type]
        assert recomputed(plain, trained)[MM] == 3
        policy.remove(wrapped)
        assert [type(block) for block in model.blocks] == [Block, Block]


@pytest.mark.skipif(RELEASE < (2, 12), reason="dynamo of torch 2.9 takes no object here")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("blockwise", [False, True])
def test_a_model_that_ran_compiled_is_compiled_anew(blockwise: bool, policy: Any) -> None:
    matmuls: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        matmuls.append(sum(str(node.target) == MM for node in graph.graph.nodes))
        return make_boxed_func(graph)

    partition = torch._functorch.partitioners.min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=count, partition_fn=partition)
    torch._dynamo.reset()
    model: Any = stack()
    plain = run(copy.deepcopy(model), tokens())
    wrap = functools.partial(torch.compile, backend=backend)
    model = each_block(wrap)(model) if blockwise else wrap(model)

    def step() -> None:
        model.zero_grad()
        loss_of(model(tokens())).backward()
        for name, parameter in model.named_parameters():
            expected = plain.gradients[name.replace("_orig_mod.", "")]
            torch.testing.assert_close(parameter.grad, expected)

    step()
    before = sum(matmuls)
    policy.apply(model)
    matmuls.clear()
    step()
    assert (before, sum(matmuls)) == (24, 24 + 3)


@pytest.mark.parametrize("left_alone", [False, True])
def test_the_class_of_one_layer_holds_for_all_of_them(left_alone: bool) -> None:
    """As accelerate and FSDP look for what to shard: by the first class that has the name."""
    policy = export(checkpoint_layers(BOTH[:1]) if left_alone else two_tiers(*BOTH))
    model = policy.apply(stack())
    first, second = (type(block) for block in model.blocks)
    assert first is not second
    for block in model.blocks:
        assert isinstance(block, first)
        assert isinstance(block, second)
        assert not isinstance(model, (first, second))
        assert not isinstance(block.norm, (first, second))

    class Other(Block):
        """Is a kind of block."""

    sharded = type("FSDPBlock", (first,), {})
    assert isinstance(Other(), first)
    assert not isinstance(nn.Linear(1, 1), first)
    assert not isinstance(model.blocks[1], sharded)  # a class of another library is itself
    assert not isinstance(model.blocks[0], sharded)
    model.blocks[0].__class__ = sharded
    assert isinstance(model.blocks[0], sharded)


def test_torchs_function_applies_the_policy_by_check_fn_and_wrapper_fn(policy: Any) -> None:
    model = stack()
    plain, names = run(model, tokens()), [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model, policy.wrapper_fn_for(model), policy.check_fn_for(model))
    assert [name for name, _ in model.named_parameters()] == names
    applied = run(model, tokens())
    assert_same(plain, applied)
    assert [recomputed(plain, applied)[op] for op in (MM, NORM)] == [3, 4]
    policy.remove(model)
    assert recomputed(plain, run(model, tokens())) == {}


def test_check_fn_knows_the_model_behind_its_wrappers(policy: Any) -> None:
    model = nn.DataParallel(stack(3))
    check_fn = policy.check_fn_for(model)
    assert [name for name, module in model.named_modules() if check_fn(module)] == [
        "module.blocks.0",
        "module.blocks.1",
    ]
    assert not check_fn(stack().blocks[0])  # of another model
    with pytest.raises(TypeError, match=r"use check_fn=check_fn_for\(model\)"):
        apply_activation_checkpointing(stack(), check_fn=policy.check_fn)
    with pytest.raises(
        ValueError, match=r"this LayerNorm is no layer of the policy: give check_fn"
    ):
        apply_activation_checkpointing(model, policy.wrapper_fn_for(model))


# --- layer by layer -------------------------------------------------------------------------------


def test_wrap_checkpoints_one_layer_under_its_tier(policy: Any) -> None:
    plain, model = run(stack(3), tokens()), stack(3)
    for index, block in enumerate(model.blocks):
        assert policy.wrap(block, f"blocks.{index}") is block
    wrapped = run(model, tokens())
    assert_same(plain, wrapped)
    assert [recomputed(plain, wrapped)[op] for op in (MM, NORM)] == [3, 4]
    assert checkpointed(model) == ["blocks.0", "blocks.1"]
    assert state_of(policy.apply(model)) == state_of(model)  # it is what apply() does
    policy.remove(model)
    assert checkpointed(model) == []


def test_wrap_sees_through_wrappers_too(policy: Any) -> None:
    block: Any = torch.compile(Block(), backend="eager")
    policy.wrap(block, "module.base_model.model.blocks.1")
    assert checkpointed(block) == ["_orig_mod"]
    both = export(checkpoint_layers(["module.blocks.0", "_orig_mod.blocks.0"]))
    with pytest.raises(ValueError, match=r"blocks\.0 can mean more than one layer of the policy"):
        both.wrap(Block(), "blocks.0")


def test_wrap_refuses_half_a_name(policy: Any) -> None:
    block = Block()
    with pytest.raises(ValueError, match=r"^1 is a part of a name: say blocks\.1, if that is"):
        policy.wrap(block, "1")
    assert type(block) is Block
    assert type(policy.wrap(block, "2")) is Block


class Hooked(Stack):
    """Runs its blocks through a function that it is given, as diffusers' models do."""

    def __init__(self, given: Any) -> None:
        super().__init__(*stack().blocks)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the last block returns."""
        for block in self.blocks:
            x = self.function(*self.given(block, x))
        return x


def closure(block: nn.Module) -> Any:
    def custom_forward(*inputs: Any) -> Any:
        return block(*inputs)

    return custom_forward


GIVEN = {
    "module": lambda block, x: (block, x),
    "method": lambda block, x: (block.__call__, x),
    "partial of a method": lambda block, x: (functools.partial(block.forward, x=x),),
    "partial of a function": lambda block, x: (functools.partial(type(block).forward, block), x),
    "closure": lambda block, x: (closure(block), x),
    "compiled": lambda block, x: (compiled(block), x),
}


@pytest.mark.parametrize("given_as", GIVEN)
def test_checkpoint_fn_finds_the_layer_in_what_it_is_given(given_as: str, policy: Any) -> None:
    model = Hooked(GIVEN[given_as])
    model.function = lambda function, *args: function(*args)
    plain = run(model, tokens())
    model.function = policy.checkpoint_fn_for(model)
    hooked = run(model, tokens())
    assert_same(plain, hooked)
    assert [recomputed(plain, hooked)[op] for op in (MM, NORM)] == [3, 4]
    calls: list[Any] = []
    checkpoint = policy.checkpoint

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return checkpoint(*args, **kwargs)

    policy.checkpoint = count
    with torch.no_grad():
        model(tokens())
    assert calls == []
    policy.apply(model)  # what is checkpointed already just runs
    assert_same(plain, run(model, tokens()))
    assert len(calls) == 2


def test_checkpoint_fn_runs_other_modules_and_warns_where_that_loses_a_layer() -> None:
    model = nn.ModuleDict({"part": stack(), "head": nn.Linear(HIDDEN, HIDDEN)})
    policy = export(checkpoint_layers(["part.blocks.0"]))
    x = tokens()
    function = policy.checkpoint_fn_for(model)
    for other in (model["head"], model["part"].blocks[1]):  # silently
        assert torch.equal(function(other, x), other(x))
    cases: list[tuple[Any, str]] = [
        (model["part"], "Stack"),  # around a layer
        (model["part"].blocks[0].norm, "LayerNorm"),  # inside one
        (copy.deepcopy(model["part"].blocks[0]), "Block"),  # of a copy
        (torch.sin, "built-in method sin"),
    ]
    for other, name in cases:
        function = policy.checkpoint_fn_for(model)
        with pytest.warns(
            UserWarning, match=f"{name}.* is no layer of it, so it just runs"
        ) as seen:
            assert torch.equal(function(other, x), other(x))
        assert seen[0].filename == __file__
        function(other, x)  # once


def test_checkpoint_fn_takes_the_options_of_torchs_function(policy: Any) -> None:
    model = stack(3)
    function = policy.checkpoint_fn_for(model)
    options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    for block in model.blocks:  # under each tier, and left alone
        expected = block(x=tokens())
        assert torch.equal(function(block, x=tokens(), **options), expected)
    with pytest.raises(ValueError, match="reentrant checkpoints take no policy"):
        function(model.blocks[0], tokens(), use_reentrant=True)


# --- checkpointing twice --------------------------------------------------------------------------


def switch_on(*names: str, **keywords: Any) -> Any:
    """Returns what switches on a library's own checkpointing of some modules."""

    def switch(model: nn.Module) -> nn.Module:
        for name in names:
            module: Any = model.get_submodule(name)
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = functools.partial(print, **keywords)
        return model

    return switch


def timms(model: Any) -> nn.Module:
    model.grad_checkpointing = True
    return model  # type: ignore[no-any-return]


def wrap_blocks(**options: Any) -> Any:
    return each_block(functools.partial(checkpoint_wrapper, **options))


TWICE = {
    "the layer": (
        switch_on("blocks.1"),
        r"^Block blocks\.1 is .* already\. .* switch that off",
    ),
    "the model": (switch_on("", "blocks.2"), r"^Stack is checkpointed already\. "),
    "a part": (switch_on("blocks.0.norm"), r"^LayerNorm blocks\.0\.norm is"),
    "reentrant": (
        switch_on("blocks.1", use_reentrant=True),
        "already, reentrantly, which takes no",
    ),
    "timm": (timms, r"set_grad_checkpointing\(False\) in timm"),
    "wrapper": (
        wrap_blocks(),
        r"^CheckpointWrapper blocks\.0 is .* already\. .* leave CheckpointW",
    ),
    "reentrant wrapper": (
        wrap_blocks(checkpoint_impl=CheckpointImpl.REENTRANT),
        "already, reentrantly, which",
    ),
    "outer wrapper": (
        checkpoint_wrapper,
        r"^CheckpointWrapper is checkpointed already",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.9 warns of reentrant wrappers
@pytest.mark.parametrize("how", TWICE)
def test_checkpointing_twice_is_refused_and_changes_nothing(how: str, policy: Any) -> None:
    prepare, message = TWICE[how]
    model = prepare(stack(3))
    before = state_of(model)
    for apply in (policy.apply, policy.wrapper_fn_for):
        with pytest.raises(ValueError, match=message):
            apply(model)
    assert state_of(model) == before


@pytest.mark.parametrize("prepare", [switch_on("norm"), checkpoint_wrapper])
def test_wrapping_twice_is_refused(prepare: Any, policy: Any) -> None:
    block = prepare(Block())
    for _ in range(2):
        with pytest.raises(ValueError, match="is checkpointed already"):
            policy.wrap(block, "blocks.0")
    assert checkpointed(block) == []
    assert policy.wrap(block, "blocks.2") is block


def test_checkpointing_of_other_layers_is_nobodys_business(policy: Any) -> None:
    model = stack(4)
    switch_on("blocks.2")(model)
    model.blocks[3] = checkpoint_wrapper(model.blocks[3])
    plain = run(stack(4), tokens())
    assert checkpointed(policy.apply(model)) == list(BOTH)
    mixed = run(model, tokens())
    assert torch.equal(mixed.loss, plain.loss)
    assert recomputed(plain, mixed)[NORM] == 4 + 2


# --- Hugging Face models, with transformers alone -------------------------------------------------

LLAMA = ("model.layers.0", "model.layers.1")
SWITCHES = ("gradient_checkpointing_enable", "activation_checkpointing_enable")


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    return module


@pytest.fixture
def llama(transformers: Any) -> Any:
    """Makes the same tiny model every time."""

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
            pad_token_id=0, **options,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return make


@pytest.fixture
def llama_policy() -> Any:
    return export(two_tiers(*LLAMA))


def token_ids() -> Tensor:
    return torch.arange(1, 13).reshape(2, 6)


def run_hf(model: nn.Module) -> Run:
    return run(Logits(model), token_ids())


class Logits(nn.Module):
    """Returns the logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Returns [batch, sequence, vocabulary]."""
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:sac-search policy")
@pytest.mark.parametrize("switch", SWITCHES)
def test_hf_checkpointing_stays_off_whatever_a_trainer_switches_on(
    switch: str, llama: Any, llama_policy: Any
) -> None:
    model = llama()
    plain = run_hf(model)
    llama_policy.apply_hf(model)
    before = state_of(model)
    with pytest.warns(UserWarning, match=rf"policy 'tiny': {switch}\(\) does nothing") as caught:
        getattr(model, switch)({"use_reentrant": True})
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it said so once
        getattr(model.model, switch)(**{f"{switch.removesuffix('_enable')}_kwargs": None})
    assert state_of(model) == before
    applied = run_hf(model)
    assert_same(plain, applied)
    assert [recomputed(plain, applied)[op] for op in (MM, "aten.silu.default")] == [6, 2]


def test_hf_caches_are_switched_off_aloud(llama: Any, llama_policy: Any) -> None:
    model = llama()
    with pytest.warns(UserWarning, match="use_cache of LlamaConfig is off until remove") as caught:
        assert llama_policy.apply_hf(model) is model
    assert [warning.filename for warning in caught] == [__file__]
    assert model.config.use_cache is False
    before = state_of(model)
    llama_policy.apply_hf(model)  # nothing more to say or do
    assert state_of(model) == before
    llama_policy.remove(model)
    assert model.config.use_cache is True
    model.config.use_cache = False
    llama_policy.apply_hf(model)  # silently
    llama_policy.remove(model)
    assert model.config.use_cache is False


@pytest.mark.skipif(RELEASE < (2, 12), reason="torch 2.9 raises nothing here")
def test_hf_models_with_a_cache_fail_without_it(llama: Any, llama_policy: Any) -> None:
    """Why there is `apply_hf`. When this no longer fails, its docstring says too much."""
    model = llama_policy.apply(llama())
    with pytest.raises(RuntimeError, match="not found in storage"):
        run_hf(model)


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_hf_models_are_put_back_exactly(llama: Any, llama_policy: Any) -> None:
    model = llama()
    before, config = state_of(model), model.config.to_dict()
    switches = [getattr(type(model), name) for name in SWITCHES]
    llama_policy.apply_hf(model)
    assert [type(module).__qualname__ for module in model.modules()] == [
        layer_class.__qualname__ for layer_class, _ in before
    ]
    for name in SWITCHES:  # PEFT looks for keywords in them
        assert inspect.signature(getattr(model, name)) == inspect.signature(
            getattr(type(model).__mro__[1], name).__get__(model)
        )
    llama_policy.remove(model)
    assert state_of(model) == before
    assert model.config.to_dict() == config
    assert [getattr(type(model), name) for name in SWITCHES] == switches
    model.activation_checkpointing_enable()
    assert on(model) == ["model", "model.layers.0", "model.layers.1", "model.layers.2"]


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_hf_models_are_saved_under_their_own_name(
    llama: Any, llama_policy: Any, tmp_path: Path
) -> None:
    model = llama_policy.apply_hf(llama())
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["architectures"], saved["use_cache"]) == (["LlamaForCausalLM"], False)
    loaded = type(llama()).from_pretrained(tmp_path)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_copies_and_pickles_of_hf_models_are_what_they_should_be(
    llama: Any, llama_policy: Any
) -> None:
    model = llama_policy.apply_hf(llama())
    duplicate, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301
    duplicate.activation_checkpointing_enable()
    assert on(duplicate) == []
    assert checkpointed(duplicate) == list(LLAMA)
    llama_policy.remove(duplicate)
    assert (duplicate.config.use_cache, model.config.use_cache) == (True, False)
    assert checkpointed(model) == list(LLAMA)
    assert checkpointed(loaded) == []
    assert type(loaded) is type(model).__mro__[1]


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_a_frozen_base_needs_no_gradients_of_its_inputs(llama: Any, llama_policy: Any) -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".q_proj." in name)
    plain = run_hf(model)
    llama_policy.apply_hf(model)
    assert_same(plain, run_hf(model))
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_generating_still_uses_its_cache(llama: Any, llama_policy: Any) -> None:
    model, ids = llama(), token_ids()
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    llama_policy.apply_hf(model)
    assert torch.equal(model.generate(ids, **options), expected)
    cached = model.generate(ids, return_dict_in_generate=True, **options).past_key_values
    assert cached is not None


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_models_inside_models_are_quiet_too(transformers: Any) -> None:
    """T5's stacks have switches of their own and may be layers themselves."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = transformers.T5ForConditionalGeneration(config)
    policy = export(checkpoint_layers(["encoder", "decoder.block.0"]))
    before = state_of(model)
    caches = [stack.config.use_cache for stack in (model, model.encoder, model.decoder)]

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = step()
    policy.apply_hf(model)
    for part in (model, model.encoder, model.decoder):
        part.activation_checkpointing_enable()
        assert part.config.use_cache is False
    assert on(model) == []
    assert checkpointed(model) == ["encoder", "decoder.block.0"]
    actual = step()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    copy.deepcopy(model)
    policy.remove(model)
    assert state_of(model) == before
    assert [s.config.use_cache for s in (model, model.encoder, model.decoder)] == caches


def test_hf_checkpointing_that_is_on_is_refused(llama: Any, llama_policy: Any) -> None:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": True})
    before = state_of(model)
    message = r"^LlamaModel model is checkpointed already, reentrantly, which takes no policy\. "
    for apply in (llama_policy.apply, llama_policy.apply_hf):
        with pytest.raises(ValueError, match=message + ".*gradient_checkpointing_disable"):
            apply(model)
    assert state_of(model) == before
    assert model.config.use_cache is True
    model.activation_checkpointing_disable()
    llama_policy.apply(model)


def test_diffusers_switch_is_as_quiet(policy: Any) -> None:
    class Diffuser(Stack):
        def enable_gradient_checkpointing(self, function: Any = None) -> None:
            raise AssertionError("switched on")

    model = policy.apply_hf(Diffuser(*stack().blocks))
    with pytest.warns(UserWarning, match="enable_gradient_checkpointing.* does nothing"):
        model.enable_gradient_checkpointing()
    assert checkpointed(model) == list(BOTH)
    policy.remove(model)
    assert type(model) is Diffuser


def test_apply_hf_wants_a_hugging_face_model(policy: Any) -> None:
    model = stack()
    with pytest.raises(ValueError, match=r"Stack is no Hugging Face model: use apply\(model\)"):
        policy.apply_hf(model)
    assert checkpointed(model) == []


@pytest.mark.filterwarnings("ignore:sac-search policy")
def test_hf_models_hold_in_a_compiled_model(llama: Any, llama_policy: Any) -> None:
    model = llama()
    plain = run_hf(model)
    llama_policy.apply_hf(model)
    torch._dynamo.reset()
    logits = torch.compile(model, backend="eager", fullgraph=True)(input_ids=token_ids()).logits
    model.zero_grad()
    loss_of(logits).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.gradients[f"model.{name}"])


SUBPROCESS = """
import json, sys, warnings

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sac_search":
            raise ImportError("sac_search was imported")

sys.meta_path.insert(0, Blocked())
sys.path[:0] = [{folder!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from tiny import assert_same, recomputed, run, stack, tokens
import exported
plain = run(stack(), tokens())

def count(model):
    got = run(model, tokens())
    assert_same(plain, got)
    return recomputed(plain, got)["aten.mm.default"]

model = stack()
found = dict(
    apply=count(exported.apply(torch.nn.DataParallel(model)).module),
    remove=len(recomputed(plain, run(exported.remove(model), tokens()))),
)
for index, block in enumerate(model.blocks):
    exported.wrap(block, f"blocks.{{index}}")
found["wrap"] = count(model)
exported.remove(model)
for module in filter(exported.check_fn_for(model), list(model.modules())):
    exported.wrapper_fn_for(model)(module)
found["wrapper_fn"] = count(model)
exported.remove(model)
function = exported.checkpoint_fn_for(model)
x = tokens()
for block in model.blocks:
    x = function(block, x)
found["checkpoint_fn"] = len(str(x.grad_fn)) > 0

class Model(type(model)):
    def gradient_checkpointing_enable(self):
        raise RuntimeError("switched on")

model.__class__ = Model
exported.apply_hf(model)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.gradient_checkpointing_enable()
found["apply_hf"] = [count(model), len(caught)]
assert not any(name.partition(".")[0] == "sac_search" for name in sys.modules)
print(json.dumps(found))
"""


def test_all_of_it_works_where_sac_search_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "exported.py").write_text(policy_text(two_tiers(*BOTH)), encoding="utf-8")
    script = SUBPROCESS.format(folder=str(tmp_path), tests=str(Path(__file__).parent))
    ended = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "apply": 3,
        "remove": 0,
        "wrap": 3,
        "wrapper_fn": 3,
        "checkpoint_fn": True,
        "apply_hf": [3, 1],
    }


def test_the_docstring_names_functions_that_are_there(policy: Any) -> None:
    text = policy.__dict__["__doc__"]
    used = set(re.findall(r"policy\.(\w+)\(", text))
    assert used == {
        *("apply", "apply_hf", "remove", "wrap"),
        *("check_fn_for", "wrapper_fn_for", "checkpoint_fn_for"),
    }
    assert all(callable(getattr(policy, name)) for name in used)
    for framework in (
        *("Trainer", "TRL", "PEFT", "accelerate", "Lightning", "diffusers", "timm", "torchtitan"),
        *("torch.compile", "DDP", "FSDP2"),
    ):
        assert f"\n  {framework}" in text or f", {framework}" in text


# --- the libraries themselves, where they are installed -------------------------------------------

real = pytest.mark.filterwarnings("ignore")
"""These libraries warn of much; what our own module says is asked for by `pytest.warns`."""


@pytest.fixture
def train(transformers: Any, tmp_path: Path) -> Any:
    """Trains three steps with transformers' Trainer and returns losses and gradient norms."""

    def train(model: Any, **options: Any) -> list[tuple[float, float]]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        samples = [{"input_ids": row, "labels": row} for row in token_ids().repeat(3, 1)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        assert json.loads(arguments.to_json_string())["max_steps"] == 3
        return [
            (entry["loss"], entry["grad_norm"])
            for entry in trainer.state.log_history
            if "loss" in entry
        ]

    return train


@needs("transformers", "accelerate")
@real
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_trainer_trains_the_same_and_checkpoints_once(
    kwargs: Any, llama: Any, llama_policy: Any, train: Any
) -> None:
    expected = train(llama())
    model = llama()
    llama_policy.apply_hf(model)
    with pytest.warns(UserWarning, match="activation_checkpointing_enable.* does nothing"):
        actual = train(model, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    assert actual == expected
    assert (on(model), checkpointed(model)) == ([], list(LLAMA))
    llama_policy.remove(model)
    assert model.config.use_cache is True
    assert checkpointed(model) == []


@needs("transformers", "accelerate", "peft")
@real
@pytest.mark.parametrize("order", ["policy first", "LoRA first"])
def test_trainer_trains_lora_on_a_frozen_base_the_same(
    order: str, llama: Any, llama_policy: Any, train: Any
) -> None:
    import peft

    def adapt(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))

    expected = train(adapt(llama()))
    if order == "LoRA first":
        model = llama_policy.apply_hf(adapt(llama()))
    else:
        model = adapt(llama_policy.apply_hf(llama()))
    assert train(model, activation_checkpointing=True) == expected
    assert on(model) == []
    assert checkpointed(model) == [f"base_model.model.{name}" for name in LLAMA]
    llama_policy.remove(model)
    assert checkpointed(model) == []
    made_on_lora = export(two_tiers(*(f"base_model.model.{name}" for name in LLAMA)))
    assert checkpointed(made_on_lora.apply(llama())) == list(LLAMA)


@needs("transformers", "peft")
@real
def test_preparing_for_quantized_training_does_not_switch_it_on(
    llama: Any, llama_policy: Any
) -> None:
    import peft

    model = llama_policy.apply_hf(llama())
    model.is_loaded_in_4bit = True  # as bitsandbytes marks a model
    peft.prepare_model_for_kbit_training(model)
    assert on(model) == []
    prompts = peft.get_peft_model(
        llama(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    assert checkpointed(llama_policy.apply_hf(prompts)) == [f"base_model.{name}" for name in LLAMA]


@needs("transformers", "accelerate", "peft", "trl", "datasets")
@real
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing_kwargs": {"selective": True}}])
@pytest.mark.parametrize("lora", [False, True])
def test_trl_trains_the_same_by_its_own_defaults(
    lora: bool, options: Any, llama: Any, llama_policy: Any, transformers: Any, tmp_path: Path
) -> None:
    import datasets
    import peft
    import pyarrow
    import tokenizers
    import trl

    ids = token_ids().repeat(3, 1).tolist()
    # With a name of its own, so that datasets does not try to pickle it for one.
    table = datasets.table.InMemoryTable(pyarrow.table({"input_ids": ids, "labels": ids}))
    samples = datasets.Dataset(table, fingerprint="tokens")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "[END]": 1}, unk_token="[UNK]")  # noqa: S106
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words),
        pad_token="[UNK]",  # noqa: S106
        eos_token="[END]",  # noqa: S106
    )

    def train(model: Any, **options: Any) -> list[tuple[float, float]]:
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True}, **options,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=model, args=arguments, train_dataset=samples, processing_class=tokenizer,
            peft_config=peft.LoraConfig(target_modules=["q_proj"], r=2) if lora else None,
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        arguments.to_json_string()
        assert on(trainer.model) == []
        history = trainer.state.log_history
        return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]

    expected = train(llama(), gradient_checkpointing=False)
    assert len(expected) == 3
    assert train(llama_policy.apply_hf(llama()), **options) == expected


@needs("accelerate")
@real
def test_accelerate_trains_the_same(policy: Any) -> None:
    import accelerate

    def train(model: nn.Module) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01)
        )
        losses = []
        for _ in range(3):
            loss = loss_of(prepared(tokens()))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(policy.apply(stack())) == train(stack())


@needs("accelerate")
@real
def test_accelerate_shards_every_layer_whatever_its_tier(policy: Any) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    model = policy.apply(stack(3))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    plugin.set_auto_wrap_policy(model)
    shards = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [n for n, m in model.named_modules() if shards(m)] == [
        *("blocks.0", "blocks.1", "blocks.2")
    ]


@needs("lightning")
@real
def test_lightning_trains_the_same_and_configures_again(policy: Any, tmp_path: Path) -> None:
    import lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, apply: Any) -> None:
            super().__init__()
            self.net, self.apply_policy, self.losses = stack(), apply, []

        def configure_model(self) -> None:
            self.apply_policy(self.net)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = loss_of(self.net(batch))
            self.losses.append(loss.item())
            return loss

        def test_step(self, batch: Tensor, index: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def train(apply: Any) -> Any:
        module = Lit(apply)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        batches = [tokens()[0] for _ in range(6)]
        loader = torch.utils.data.DataLoader(batches, batch_size=2)  # type: ignore[arg-type]
        trainer.fit(module, loader)
        trainer.test(module, loader, verbose=False)
        return module

    expected, actual = train(lambda net: net), train(policy.apply)
    assert actual.losses == expected.losses
    assert len(actual.losses) == 3
    assert checkpointed(actual.net) == list(BOTH)


@needs("diffusers")
@real
@pytest.mark.parametrize("way", ["apply_hf", "checkpoint_fn_for"])
def test_diffusers_trains_the_same_in_either_way(way: str) -> None:
    import diffusers

    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    ).train()  # fmt: skip
    inputs = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}
    policy = export(two_tiers("transformer_blocks.0", "transformer_blocks.1"))

    def step() -> Run:
        return run(
            model, torch.linspace(0, 1, 512).reshape(2, 4, 8, 8), return_dict=False, **inputs
        )

    plain = step()
    model.enable_gradient_checkpointing()
    full = recomputed(plain, step())[ADDMM]
    with pytest.raises(ValueError, match=r"disable_gradient_checkpointing\(\) in diffusers"):
        policy.apply_hf(model)
    model.disable_gradient_checkpointing()
    if way == "apply_hf":
        policy.apply_hf(model)
        with pytest.warns(UserWarning, match="enable_gradient_checkpointing.* does nothing"):
            model.enable_gradient_checkpointing()
    else:
        model.enable_gradient_checkpointing(policy.checkpoint_fn_for(model))
    applied = step()
    assert_same(plain, applied)
    assert recomputed(plain, applied)[ADDMM] == full / 3


def test_timm_trains_the_same_once_its_own_checkpointing_is_off() -> None:
    try:
        timm = pytest.importorskip("timm")
    except RuntimeError as error:  # torchvision's wheels do not load beside every build of torch
        pytest.skip(f"timm cannot be imported: {error}")
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=32, num_heads=2, num_classes=4
    )
    images = torch.linspace(0, 1, 6144).reshape(2, 3, 32, 32)
    plain = run(model, images)
    policy = export(two_tiers(*BOTH))
    model.set_grad_checkpointing()
    with pytest.raises(ValueError, match=r"set_grad_checkpointing\(False\) in timm"):
        policy.apply(model)
    model.set_grad_checkpointing(False)
    applied = run(policy.apply(model), images)
    assert_same(plain, applied)
    assert recomputed(plain, applied)["aten.gelu.default"] == 2


@needs("torchtitan")
@real
def test_torchtitan_wraps_its_blocks_by_the_policy() -> None:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    class SearchedAC(ActivationCheckpointing):  # type: ignore[misc]
        def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
            return policy.wrap(module, base_fqn)  # type: ignore[no-any-return]

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(stack(3).blocks)})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    policy = export(two_tiers("layers.0", "layers.1"))
    model = Decoder()
    plain = run(model, tokens())
    SearchedAC(ActivationCheckpointing.Config()).apply(model)
    wrapped = run(model, tokens())
    assert_same(plain, wrapped)
    assert [recomputed(plain, wrapped)[op] for op in (MM, NORM)] == [3, 4]
