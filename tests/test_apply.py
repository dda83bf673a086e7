"""Putting a policy on a model changes nothing that others look at, and is undone exactly."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tiny import (
    ATTENTION,
    MM,
    NORM,
    RELEASE,
    Block,
    Run,
    Stack,
    assert_same,
    recomputed,
    run,
    stack,
    tokens,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from sac_search.apply import (
    applied,
    apply_policy,
    context_fn_for,
    load_policy_module,
    remove_policy,
)
from sac_search.errors import UsageError
from sac_search.policy import NO_CHECKPOINTING, LayerChoice, Policy, Tier, checkpoint_layers

BOTH = ["blocks.0", "blocks.1"]
SAVE_MM = checkpoint_layers(BOTH, Tier(ops=(MM,)))
TWO_TIERS = Policy(
    tiers=(Tier(), Tier(ops=(MM,))),
    layers=(LayerChoice(name="blocks.0", tier=0), LayerChoice(name="blocks.1", tier=1)),
)


def recomputed_matmuls(model: nn.Module, plain: Run) -> int:
    checkpointed = run(model, tokens())
    assert_same(plain, checkpointed)
    return recomputed(plain, checkpointed).get(MM, 0)


# --- what stays as it was -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [checkpoint_layers(BOTH), SAVE_MM, TWO_TIERS])
def test_names_types_and_signatures_stay(policy: Policy) -> None:
    model = stack()
    before = {
        "state": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "modules": [name for name, _ in model.named_modules()],
        "identities": [id(parameter) for parameter in model.parameters()],
        "repr": repr(model),
        "attributes": sorted(vars(model.blocks[0])),
        "signature": inspect.signature(model.blocks[0].forward),
    }

    class Nested(Block):
        """Has a qualified name."""

    nested = Nested()
    apply_policy(Stack(nested), checkpoint_layers(["blocks.0"]))
    apply_policy(model, policy)
    layer = model.blocks[0]
    assert {
        "state": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "modules": [name for name, _ in model.named_modules()],
        "identities": [id(parameter) for parameter in model.parameters()],
        "repr": repr(model),
        "attributes": sorted(vars(layer)),
        "signature": inspect.signature(layer.forward),
    } == before
    assert isinstance(layer, Block)
    assert type(layer) is not Block
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(layer), attribute) == getattr(Block, attribute)
        assert getattr(type(nested), attribute) == getattr(Nested, attribute)
    assert type(model) is Stack


def test_it_is_undone_exactly() -> None:
    model = stack()
    classes = [type(module) for module in model.modules()]
    namespaces = [sorted(vars(module)) for module in model.modules()]
    plain = run(model, tokens())
    apply_policy(model, TWO_TIERS)
    assert recomputed_matmuls(model, plain) == 3
    assert remove_policy(model) == 2
    assert [type(module) for module in model.modules()] == classes
    assert [sorted(vars(module)) for module in model.modules()] == namespaces
    assert recomputed_matmuls(model, plain) == 0
    assert remove_policy(model) == 0


def test_applied_ends_with_its_block_and_after_an_error() -> None:
    model = stack()
    with applied(model, SAVE_MM):
        assert type(model.blocks[0]) is not Block
    assert type(model.blocks[0]) is Block
    with pytest.raises(KeyError), applied(model, SAVE_MM):
        raise KeyError
    assert type(model.blocks[0]) is Block


def test_no_checkpointing_changes_nothing() -> None:
    model = stack()
    apply_policy(model, NO_CHECKPOINTING)
    assert [type(block) for block in model.blocks] == [Block, Block]


def test_state_moves_between_applied_and_plain_models() -> None:
    applied_model, plain_model = stack(), Stack(Block(), Block())
    apply_policy(applied_model, SAVE_MM)
    plain_model.load_state_dict(applied_model.state_dict())
    assert_same(run(plain_model, tokens()), run(applied_model, tokens()))
    applied_model.load_state_dict(plain_model.state_dict())


def test_modules_move_and_convert_with_a_policy_on() -> None:
    model = stack()
    apply_policy(model, SAVE_MM)
    model.to(torch.bfloat16).train(False).requires_grad_(False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.blocks[0].training


@pytest.mark.parametrize("hooks_first", [True, False])
def test_hooks_fire_once_a_step(hooks_first: bool) -> None:
    model = stack()
    fired: Counter[str] = Counter()
    if not hooks_first:
        apply_policy(model, SAVE_MM)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: fired.update(["before"]))
        block.register_forward_hook(lambda *_: fired.update(["after"]))
        block.register_full_backward_hook(lambda *_: fired.update(["backward"]))
    if hooks_first:
        apply_policy(model, SAVE_MM)
    run(model, tokens().requires_grad_())
    assert fired == {"before": 2, "after": 2, "backward": 2}


def test_super_and_overridden_forwards_work() -> None:
    class Doubled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    torch.manual_seed(0)
    model = Stack(Doubled(), Block())
    plain = run(model, tokens())
    apply_policy(model, checkpoint_layers(BOTH))
    assert recomputed_matmuls(model, plain) == 6 + 1 - 1
    assert isinstance(model.blocks[0], Doubled)


# --- copies and pickles ---------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy])
def test_copies_keep_the_policy_and_the_original(copier: Any) -> None:
    layer = stack(1).blocks[0]
    model = Stack(layer)
    plain = run(model, tokens())
    apply_policy(model, checkpoint_layers(["blocks.0"], Tier(ops=(ATTENTION,))))
    duplicate = Stack(copier(layer))
    assert type(duplicate.blocks[0]) is type(layer)
    assert duplicate.blocks[0] is not layer
    assert recomputed_matmuls(duplicate, plain) == recomputed_matmuls(model, plain) == 3


def test_deep_copies_are_independent() -> None:
    model = stack()
    plain = run(model, tokens())
    apply_policy(model, SAVE_MM)
    duplicate = copy.deepcopy(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in duplicate.parameters()}
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert remove_policy(duplicate) == 2
    checkpointed = run(model, tokens())  # the original runs its own weights, still checkpointed
    assert_same(plain, checkpointed)
    assert recomputed(plain, checkpointed)[NORM] == 4


def test_deep_copies_keep_what_is_shared() -> None:
    layer = stack(1).blocks[0]
    model = Stack(layer, layer)
    apply_policy(model, checkpoint_layers(["blocks.0"]))
    duplicate = copy.deepcopy(model)
    assert duplicate.blocks[0] is duplicate.blocks[1]
    assert duplicate.blocks[0] is not layer


class Tracked(nn.Linear):
    """Says itself how to copy and pickle it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracked:
        duplicate = type(self)(self.in_features, self.out_features)
        duplicate.origin = "__deepcopy__"
        return duplicate

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), {"origin": "__reduce__"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_a_layers_own_way_to_copy_and_pickle_is_used() -> None:
    layer = Tracked(2, 3)
    apply_policy(Stack(layer), checkpoint_layers(["blocks.0"]))
    duplicate = copy.deepcopy(layer)
    assert duplicate.origin == "__deepcopy__"
    assert type(duplicate) is type(layer)
    loaded = pickle.loads(pickle.dumps(layer))  # noqa: S301
    assert loaded.origin == "__reduce__"
    assert type(loaded) is Tracked
    assert loaded.weight.shape == (3, 2)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_model_is_plain(protocol: int) -> None:
    model = stack()
    apply_policy(model, SAVE_MM)
    plain = pickle.loads(pickle.dumps(model, protocol))  # noqa: S301
    assert [type(block) for block in plain.blocks] == [Block, Block]
    assert_same(run(plain, tokens()), run(model, tokens()))
    assert type(model.blocks[0]) is not Block


def test_a_saved_model_loads_where_sac_search_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_model.py").write_text(
        "import torch\n"
        "class Layer(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(3, 3)\n"
        "    def forward(self, x):\n"
        "        return self.linear(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    layer_class = importlib.import_module("user_model").Layer
    model = nn.Sequential(layer_class(), layer_class())
    apply_policy(model, checkpoint_layers(["0", "1"], Tier(ops=(MM,))))
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    script = (
        "import sys\n"
        "sys.modules['sac_search'] = None\n"
        "sys.path.insert(0, '.')\n"
        "import torch\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "model.load_state_dict(torch.load('state.pt', weights_only=True))\n"
        "from user_model import Layer\n"
        "assert [type(layer) is Layer for layer in model] == [True, True]\n"
        "print(model(torch.ones(3)).tolist())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(model(torch.ones(3)).tolist())


# --- what is refused ------------------------------------------------------------------------------


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_missing_layers_are_listed_and_nothing_is_changed() -> None:
    model = stack()
    before = classes_of(model)
    names = ["blocks.0", *(f"h.{index}" for index in range(7))]
    with pytest.raises(UsageError) as caught:
        apply_policy(model, checkpoint_layers(names))
    message = str(caught.value)
    assert "the model (Stack) has no layer h.0, h.1, h.2, h.3, h.4 and 2 more" in message
    assert classes_of(model) == before


def test_applying_twice_is_refused_and_rolled_back() -> None:
    model = stack(3)
    apply_policy(model, checkpoint_layers(["blocks.2"], Tier(ops=(MM,))))
    before = classes_of(model)
    with pytest.raises(UsageError, match=r"blocks\.2 cannot be .* is checkpointed already"):
        apply_policy(model, checkpoint_layers(["blocks.0", "blocks.1", "blocks.2"]))
    assert classes_of(model) == before


def test_a_forward_set_on_the_instance_is_refused_and_rolled_back() -> None:
    model = stack()
    model.blocks[1].forward = model.blocks[1].forward  # as accelerate's hooks do
    before = classes_of(model)
    with pytest.raises(UsageError, match=r"blocks\.1 cannot be .* a forward of its own"):
        apply_policy(model, checkpoint_layers(BOTH))
    assert classes_of(model) == before


def test_a_class_without_subclasses_is_refused_and_rolled_back() -> None:
    class Final(Block):
        def __init_subclass__(cls) -> None:
            raise TypeError("Final is final")

    model = Stack(Block(), Final())
    before = classes_of(model)
    with pytest.raises(UsageError, match=r"blocks\.1 cannot be checkpointed: Final is final"):
        apply_policy(model, checkpoint_layers(BOTH))
    assert classes_of(model) == before


def test_removing_what_another_library_wrapped_is_refused() -> None:
    model = stack(1)
    apply_policy(model, checkpoint_layers(["blocks.0"]))
    layer = model.blocks[0]
    layer.__class__ = type("FSDPBlock", (type(layer),), {})
    with pytest.raises(UsageError, match="became a FSDPBlock after it was checkpointed"):
        remove_policy(model)


def test_a_policy_file_is_read_anew_each_time_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "policy.py"
    for answer in (1, 2, 3):
        path.write_text(f"LAYERS = META = remove = None\ndef apply(model): return {answer}\n")
        assert load_policy_module(path).apply(nn.Identity()) == answer
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no policy file"),
        ("import nothing_of_that_name\n", "cannot be imported: ModuleNotFoundError"),
        ("def apply(model): ...\n", "is not a policy that sac-search exported: no remove in it"),
        ("def broken(:\n", "cannot be imported: SyntaxError"),
    ],
)
def test_files_that_are_no_policy_are_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "policy.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_policy_module(path)


# --- tiers ----------------------------------------------------------------------------------------


def test_a_tier_that_saves_nothing_has_no_context_fn() -> None:
    assert context_fn_for(Tier()) is None
    assert context_fn_for(Tier(every_second_matmul=True)) is None
    assert context_fn_for(Tier(through_policy=True)) is not None
    assert context_fn_for(Tier(ops=(MM,))) is not None
    assert context_fn_for(Tier(save_random=True)) is not None


def test_a_context_fn_works_by_hand() -> None:
    model = stack(1)
    plain = run(model, tokens())

    class ByHand(Stack):
        def forward(self, x: Tensor) -> Tensor:
            context_fn = context_fn_for(Tier(ops=(MM,)))
            return checkpoint(self.blocks[0], x, use_reentrant=False, context_fn=context_fn)

    by_hand = run(ByHand(model.blocks[0]), tokens())
    assert_same(plain, by_hand)
    assert MM not in recomputed(plain, by_hand)
    assert recomputed(plain, by_hand)[NORM] == 2


# --- other libraries ------------------------------------------------------------------------------


def compiled_matmuls(model: nn.Module) -> tuple[int, int]:
    """Returns the matmuls in the compiled forward and backward, and checks the gradients."""
    counts = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(sum(str(node.target) == MM for node in graph.graph.nodes))
        return make_boxed_func(graph)

    partition = torch._functorch.partitioners.min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=count, partition_fn=partition)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = run(copy.deepcopy(model), tokens())
    torch.manual_seed(2)
    model.zero_grad()
    output = compiled(tokens())
    output.backward(torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.gradients[name])
    forward, backward = counts
    return forward, backward


@pytest.mark.parametrize(
    ("policy", "recomputed_in_backward"),
    [
        (checkpoint_layers(BOTH), 6),
        (SAVE_MM, 0),
        (checkpoint_layers(BOTH, Tier(through_policy=True)), 6),
        (TWO_TIERS, 3),
    ],
)
@pytest.mark.skipif(RELEASE < (2, 12), reason="dynamo of torch 2.9 takes no object here")
def test_the_policy_holds_in_a_compiled_model(policy: Policy, recomputed_in_backward: int) -> None:
    model = stack()
    apply_policy(model, policy)
    assert compiled_matmuls(model) == (8, 16 + recomputed_in_backward)


@pytest.mark.skipif(RELEASE < (2, 12), reason="dynamo of torch 2.9 takes no object here")
def test_compiled_gradients_are_those_of_the_plain_model() -> None:
    plain = run(stack(), tokens())
    model = stack()
    apply_policy(model, SAVE_MM)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(tokens())
    output.backward(torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.gradients[name])


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp_trains_the_same(process_group: None) -> None:
    model = stack()
    plain = run(model, tokens())
    apply_policy(model, SAVE_MM)
    wrapped = nn.parallel.DistributedDataParallel(model)
    checkpointed = run(wrapped, tokens())
    for name, expected in plain.gradients.items():
        assert torch.equal(checkpointed.gradients[f"module.{name}"], expected)
    assert recomputed(plain, checkpointed)[NORM] == 4
    assert MM not in recomputed(plain, checkpointed)


def test_fsdp2_trains_the_same(process_group: None) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = stack()
    plain = run(model, tokens())
    apply_policy(model, SAVE_MM)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    assert isinstance(model.blocks[0], Block)
    checkpointed = run(model, tokens())
    for name, expected in plain.gradients.items():
        gradient = checkpointed.gradients[name]
        assert torch.equal(gradient.full_tensor(), expected)
    assert recomputed(plain, checkpointed)[NORM] == 4
    assert MM not in recomputed(plain, checkpointed)
    with pytest.raises(UsageError, match="became a FSDPBlock"):
        remove_policy(model)
