"""Right policies pass bit for bit, wrong ones are caught, and nothing is changed by looking."""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sac_search import records
from sac_search.failures import NonFiniteLoss
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.policy_runtime import checkpoint_layer, restore_layer
from sac_search.records import Verification
from sac_search.verify import verify_policy
from sac_search.workload import Workload

CPU = torch.device("cpu")
LAYERS = ("blocks.0", "blocks.1")
FULL = checkpoint_layers(LAYERS)
SAVE_MATMUL = checkpoint_layers(LAYERS, Tier(ops=(tiny.MM, tiny.ATTENTION)))
SAVE_ALL = checkpoint_layers(LAYERS, Tier(ops=(tiny.MM, tiny.ATTENTION, tiny.NORM, tiny.GELU)))


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, which are slow, as the worker does."""
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()


def workload_of(model: nn.Module | None = None, **fields: Any) -> Workload:
    given: dict[str, Any] = {
        "model": model or tiny.stack(2),
        "loss_fn": lambda m, x: m(x).square().mean(),
        "batch": tiny.tokens(),
    }
    return Workload(**(given | fields))


def verify(
    workload: Workload, policy: Any = FULL, reference: Policy = NO_CHECKPOINTING
) -> Verification:
    found = verify_policy(workload, policy, reference, "none", CPU)
    # It has to survive the way from the worker to the parent and into the study.
    assert records.decode(records.encode(found), Verification) == found
    return found


def assert_bitwise(found: Verification) -> None:
    assert found.passed and found.bitwise
    assert (found.loss_difference, found.worst_gradient_difference, found.noise) == (0, 0, 0)
    assert found.worst_parameter is None


def assert_wrong(found: Verification, parameter: str | None = None) -> None:
    assert not found.passed and not found.bitwise
    assert found.noise == 0
    assert found.worst_gradient_difference > 100 * found.tolerance
    assert found.worst_parameter is not None
    assert parameter in (None, found.worst_parameter)
    assert f"gradient of {found.worst_parameter} differs most" in found.note


# --- right policies -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FULL, SAVE_MATMUL, SAVE_ALL, NO_CHECKPOINTING])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_right_policies_pass_bit_for_bit(policy: Policy, dropout: float) -> None:
    found = verify(workload_of(tiny.stack(2, dropout)), policy)
    assert_bitwise(found)
    assert found.reference == "none"
    assert found.note == ""
    assert found.tolerance == 1e-4


def test_the_tolerance_is_that_of_the_least_precise_trained_dtype() -> None:
    model = tiny.stack(2).to(torch.float64)
    workload = workload_of(model, batch=tiny.tokens().double())
    assert verify(workload).tolerance == 1e-9
    model.blocks[0].to(torch.bfloat16).requires_grad_(False)
    model.blocks[0].to(torch.float64)
    assert verify(workload).tolerance == 1e-9


# --- wrong policies -------------------------------------------------------------------------------


class Module:
    """A policy module that does to the layers whatever the test wants."""

    def __init__(
        self,
        context_fn: Callable[[], Any] | None = None,
        *,
        also: Callable[[nn.Module], Callable[[], None]] | None = None,
        layers: Sequence[str] = LAYERS,
    ) -> None:
        self.context_fn = context_fn
        self.also = also
        self.layers = layers
        self.undo: Callable[[], None] = lambda: None

    def apply(self, model: nn.Module) -> None:
        for name in self.layers:
            checkpoint_layer(model.get_submodule(name), self.context_fn)
        if self.also is not None:
            self.undo = self.also(model)

    def remove(self, model: nn.Module) -> None:
        self.undo()
        for name in self.layers:
            restore_layer(model.get_submodule(name))


class TwoDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)
        self.second = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        # As CUDA's native_dropout: a random op that can be saved.
        x = self.first(x) * torch.rand_like(x)
        return self.second(x) * torch.rand_like(x)


def save_first_random_op() -> Any:
    """Saves one random op of a region and recomputes the other: the stream is shifted."""
    calls = {False: 0, True: 0}

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.rand_like.default:
            calls[ctx.is_recompute] += 1
            if calls[ctx.is_recompute] == 1:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy_fn)


def test_a_shifted_random_stream_is_caught() -> None:
    model = tiny.Stack(TwoDropouts(), TwoDropouts())
    assert_bitwise(verify(workload_of(model), FULL))
    assert_wrong(verify(workload_of(model), Module(save_first_random_op)))


class Scaled(nn.Module):
    """A layer that reads a buffer, which recomputation may find changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x) * self.scale.clone())


def change_after_forward(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], Any]:
    """Lets a policy module change the model between forward and recomputation."""

    def also(model: nn.Module) -> Callable[[], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            change(module)

        return model.register_forward_hook(hook).remove

    return also


def test_a_stale_buffer_is_caught() -> None:
    model = tiny.Stack(Scaled(), Scaled())
    change = change_after_forward(lambda m: m.blocks[0].scale.mul_(3))
    assert_bitwise(verify(workload_of(model), Module()))
    found = verify(workload_of(model), Module(also=change))
    assert_wrong(found)
    assert found.buffers_differing == ("blocks.0.scale",)
    assert model.blocks[0].scale.item() == 1.0


def test_a_wrong_scale_in_recompute_is_caught() -> None:
    model = tiny.Stack(Scaled(), Scaled())

    def also(model: nn.Module) -> Callable[[], None]:
        plain = functional.gelu
        calls = iter(range(100))

        def gelu(x: Tensor) -> Tensor:
            return plain(x if next(calls) < 2 else 1.01 * x)

        functional.gelu = gelu
        return lambda: setattr(functional, "gelu", plain)

    plain = functional.gelu
    found = verify(workload_of(model), Module(also=also))
    assert functional.gelu is plain
    assert not found.passed
    assert found.loss_difference == 0  # only gradients tell
    assert found.worst_gradient_difference > found.tolerance


def test_a_wrong_forward_is_caught_by_the_loss() -> None:
    def also(model: nn.Module) -> Callable[[], None]:
        return model.register_forward_hook(lambda m, a, out: out + 1.0).remove

    found = verify(workload_of(loss_fn=lambda m, x: m(x).mean()), Module(also=also))
    assert not found.passed
    assert found.worst_gradient_difference == 0  # only the loss tells
    assert found.loss_difference == pytest.approx(1.0)


def test_a_gradient_that_is_wrong_in_the_first_of_several_batches_is_caught() -> None:
    model = tiny.stack(2)
    calls = iter(range(100))

    def also(model: nn.Module) -> Callable[[], None]:
        def spoil(gradient: Tensor) -> Tensor:
            return gradient * 2 if next(calls) == 0 else gradient

        return model.blocks[0].up.weight.register_hook(spoil).remove

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = workload_of(model, optimizer=optimizer, step=accumulating_step)
    assert_wrong(verify(workload, Module(also=also)), "blocks.0.up.weight")


def test_a_missing_gradient_is_caught() -> None:
    def freeze(model: nn.Module) -> Callable[[], None]:
        def set_grad(required: bool) -> None:
            model.blocks[1].up.weight.requires_grad_(required)

        hook = model.register_forward_pre_hook(lambda *_: set_grad(False))

        def undo() -> None:
            hook.remove()
            set_grad(True)

        return undo

    found = verify(workload_of(), Module(also=freeze))
    assert_wrong(found, "blocks.1.up.weight")
    assert found.worst_gradient_difference == 1.0


def test_a_gradient_too_many_is_caught() -> None:
    model = tiny.stack(2)
    unused = nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)

    def use(model: nn.Module) -> Callable[[], None]:
        return model.register_forward_hook(lambda m, a, out: out + 0 * unused).remove

    found = verify(workload_of(model), Module(also=use))
    assert_wrong(found, "unused")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_caught(value: float) -> None:
    def spoil(model: nn.Module) -> Callable[[], None]:
        weight = model.blocks[0].qkv.weight
        return weight.register_hook(lambda gradient: gradient * value).remove

    assert_wrong(verify(workload_of(), Module(also=spoil)), "blocks.0.qkv.weight")


def test_the_worst_parameter_is_the_one_that_is_off_most() -> None:
    def spoil(model: nn.Module) -> Callable[[], None]:
        handles = [
            model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 1.1),
            model.blocks[1].down.weight.register_hook(lambda gradient: gradient * 1.5),
            model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 1.2),
        ]
        return lambda: [handle.remove() for handle in handles] and None

    found = verify(workload_of(), Module(also=spoil))
    assert_wrong(found, "blocks.1.down.weight")
    assert found.worst_gradient_difference == pytest.approx(0.5)


def test_a_small_difference_passes_within_the_tolerance() -> None:
    def spoil(model: nn.Module) -> Callable[[], None]:
        weight = model.blocks[1].down.weight
        return weight.register_hook(lambda gradient: gradient * (1 + 1e-5)).remove

    found = verify(workload_of(), Module(also=spoil))
    assert found.passed and not found.bitwise
    assert found.worst_gradient_difference == pytest.approx(1e-5, rel=0.1)
    assert found.note == "Equal within the tolerance, not bit for bit."


def test_rounding_in_a_gradient_that_is_zero_is_no_difference() -> None:
    # As the bias of attention's keys: zero on paper, and something else with every kernel.
    model = tiny.stack(2)
    bias = nn.Parameter(torch.zeros(4))
    model.register_parameter("bias", bias)
    rounding = iter([1e-9, 1e-9, -1e-9])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + next(rounding) * bias.sum()

    found = verify(workload_of(model, loss_fn=loss_fn))
    assert found.passed
    assert 0 < found.worst_gradient_difference < found.tolerance


# --- the reference's own noise --------------------------------------------------------------------


def noisy_step(size: float) -> Callable[[Workload], Tensor]:
    """Returns a step whose loss is scaled from a generator that nobody seeds."""
    generator = torch.Generator().manual_seed(0)

    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss() * (1 + size * torch.rand((), generator=generator))
        loss.backward()
        return loss

    return step


def test_a_step_with_some_noise_passes_with_a_wider_tolerance() -> None:
    found = verify(workload_of(step=noisy_step(1e-3)))
    assert found.passed and not found.bitwise
    assert 1e-5 < found.noise < 1e-3
    assert found.tolerance == pytest.approx(max(1e-4, 4 * found.noise))
    assert "Two runs of the reference itself differ" in found.note


def test_a_wrong_policy_is_caught_in_spite_of_some_noise() -> None:
    model = tiny.Stack(TwoDropouts(), TwoDropouts())
    found = verify(workload_of(model, step=noisy_step(1e-3)), Module(save_first_random_op))
    assert not found.passed
    assert found.worst_gradient_difference > 10 * found.noise


def test_gradients_that_are_never_the_same_cannot_be_verified() -> None:
    scales = iter([1.0, 2.0, 3.0])

    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        (loss * next(scales)).backward()
        return loss  # which is always the same

    found = verify(workload_of(step=step))
    assert not found.passed
    assert found.noise == 1.0
    assert found.tolerance == 0.1


def test_a_step_that_is_never_the_same_cannot_be_verified() -> None:
    batches = iter(torch.randn(10, *tiny.tokens().shape))

    def step(workload: Workload) -> Tensor:
        loss = workload.loss_fn(workload.model, next(batches))  # past workload.next_batch()
        loss.backward()
        return loss

    found = verify(workload_of(step=step))
    assert not found.passed
    assert found.noise > 0.1
    assert "draw batches through workload.next_batch()" in found.note


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_of_the_reference_that_are_not_finite_prove_nothing(value: float) -> None:
    model = tiny.stack(2)
    model.blocks[0].up.weight.register_hook(lambda g: torch.full_like(g, value))
    found = verify(workload_of(model), NO_CHECKPOINTING)
    assert not found.passed
    assert "The reference's own gradients are not finite" in found.note


def test_a_step_without_gradients_proves_nothing() -> None:
    found = verify(workload_of(step=lambda workload: workload.run_loss()), NO_CHECKPOINTING)
    assert not found.passed
    assert "No gradient reached any parameter" in found.note


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_failure(value: float) -> None:
    with pytest.raises(NonFiniteLoss):
        verify(workload_of(loss_fn=lambda m, x: m(x).sum() * value))


def test_what_the_step_raises_goes_through_and_the_model_is_as_it_was() -> None:
    model = tiny.stack(2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"):
        verify(workload_of(model, loss_fn=loss_fn))
    assert all(type(block) is tiny.Block for block in model.blocks)


# --- buffers --------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)
        self.norm = nn.BatchNorm1d(tiny.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def test_statistics_that_move_twice_are_told_but_pass() -> None:
    model = tiny.Stack(Normed(), Normed())
    before = copy.deepcopy(model.state_dict())
    found = verify(
        workload_of(model, batch=tiny.tokens(16, tiny.HIDDEN)), checkpoint_layers(["blocks.1"])
    )
    assert found.passed and found.bitwise
    assert found.buffers_differing == tuple(
        f"blocks.1.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    assert "running statistics of BatchNorm, move twice" in found.note
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_buffers_without_a_dense_storage() -> None:
    model = tiny.stack(2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    model.register_buffer("mask", torch.ones(1).expand(5))
    assert_bitwise(verify(workload_of(model)))


def test_a_buffer_that_the_forward_replaces_comes_back() -> None:
    model = tiny.stack(2)
    cache = torch.zeros(2)
    model.register_buffer("cache", cache)

    def grow(model: nn.Module, args: Any) -> None:
        model.cache = torch.cat([model.cache, torch.ones(1)])

    model.register_forward_pre_hook(grow)
    assert_bitwise(verify(workload_of(model)))
    assert model.cache is cache


# --- steps of all sorts ---------------------------------------------------------------------------


def clipping_step(workload: Workload) -> Tensor:
    loss = workload.run_loss()
    loss.backward()
    nn.utils.clip_grad_norm_(workload.model.parameters(), 1e-3)
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss


def accumulating_step(workload: Workload) -> Tensor:
    total = torch.zeros(())
    for _ in range(3):
        loss = workload.run_loss() / 3
        loss.backward()
        total = total + loss.detach()
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=False)
    return total


def zeroing_first_step(workload: Workload) -> Tensor:
    workload.optimizer.zero_grad()
    loss = workload.run_loss()
    loss.backward()
    workload.optimizer.step()
    return loss


def closure_step(workload: Workload) -> Tensor:
    def closure() -> Tensor:
        workload.optimizer.zero_grad()
        loss = workload.run_loss()
        loss.backward()
        return loss

    return workload.optimizer.step(closure)


def step_by_hand(workload: Workload) -> Tensor:
    loss = workload.run_loss()
    loss.backward()
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss


STEPS = [None, clipping_step, accumulating_step, zeroing_first_step, closure_step, step_by_hand]


@pytest.mark.parametrize("step", STEPS)
def test_right_and_wrong_are_told_apart_in_every_step(step: Any) -> None:
    def workload() -> Workload:
        torch.manual_seed(3)
        model = tiny.Stack(TwoDropouts(), TwoDropouts())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return workload_of(model, optimizer=optimizer, step=step)

    assert_bitwise(verify(workload()))
    assert_wrong(verify(workload(), Module(save_first_random_op)))


def test_a_step_whose_gradients_never_stay_is_verified_as_well() -> None:
    # An optimizer that steps inside backward, as memory savers do.
    model = tiny.Stack(TwoDropouts(), TwoDropouts())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    before = copy.deepcopy(model.state_dict())
    assert_bitwise(verify(workload_of(model)))
    assert_wrong(verify(workload_of(model), Module(save_first_random_op)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_that_only_the_optimizer_knows_are_compared() -> None:
    model = tiny.stack(2)
    prompt = nn.Parameter(torch.zeros(tiny.HIDDEN))
    optimizer = torch.optim.SGD([prompt, *model.parameters()], lr=0.1)
    workload = workload_of(
        model, optimizer=optimizer, loss_fn=lambda m, x: m(x + prompt).square().mean()
    )
    assert_bitwise(verify(workload))

    def spoil(model: nn.Module) -> Callable[[], None]:
        return prompt.register_hook(lambda gradient: gradient * 2).remove

    found = verify(workload, Module(also=spoil))
    assert_wrong(found)
    assert found.worst_parameter is not None
    assert found.worst_parameter.endswith("of the optimizer")


def test_sparse_gradients() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, tiny.HIDDEN, sparse=True)
            self.blocks = tiny.stack(2).blocks

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return x

    model = Embedded()
    workload = workload_of(model, batch=torch.tensor([[1, 2, 1]]))
    assert_bitwise(verify(workload))

    def spoil(model: nn.Module) -> Callable[[], None]:
        return model.embedding.weight.register_hook(lambda gradient: gradient * 2).remove

    assert_wrong(verify(workload, Module(also=spoil)), "embedding.weight")


class Scaler:
    """What matters of a gradient scaler: too large a scale at first, halved until it is not."""

    def __init__(self, scale: float, most: float) -> None:
        self.scale = scale
        self.most = most

    def step(self, workload: Workload) -> Tensor:
        loss = workload.run_loss()
        scale = self.scale if self.scale <= self.most else math.inf
        (loss * scale).backward()
        gradients = [p.grad for p in workload.model.parameters()]
        if all(bool(g.isfinite().all()) for g in gradients):
            torch._foreach_div_(gradients, self.scale)
            workload.optimizer.step()
        else:
            self.scale /= 2
        workload.optimizer.zero_grad()
        return loss


def test_a_scaler_finds_its_scale_before_anything_is_compared() -> None:
    model = tiny.stack(2)
    scaler = Scaler(scale=2.0**16, most=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_bitwise(verify(workload_of(model, optimizer=optimizer, step=scaler.step)))
    assert scaler.scale == 2.0**10


def test_torchs_own_scaler() -> None:
    model = tiny.stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    before = copy.deepcopy(model.state_dict())
    assert_bitwise(verify(workload_of(model, optimizer=optimizer, step=step)))
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- batches --------------------------------------------------------------------------------------


def test_batches_of_a_callable_are_drawn_once_and_given_again() -> None:
    drawn: list[Tensor] = []
    seen: list[float] = []

    def draw() -> Tensor:
        drawn.append(torch.randn(2, 4, tiny.HIDDEN))
        return drawn[-1]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.sum().item())
        return model(x).square().mean()

    model = tiny.stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = workload_of(
        model, optimizer=optimizer, step=accumulating_step, batch=draw, loss_fn=loss_fn
    )
    assert_bitwise(verify(workload))
    assert len(drawn) == 3
    assert seen == [x.sum().item() for x in drawn] * 3


def test_a_batch_that_the_step_takes_apart_is_whole_again() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return (model(batch.pop("x").mul_(0.5)) - labels).square().mean()

    def draw() -> dict[str, Tensor]:
        return {"x": tiny.tokens(), "labels": tiny.tokens()}

    assert_bitwise(verify(workload_of(batch=draw, loss_fn=loss_fn)))


def test_a_constant_batch_is_the_users_own_object() -> None:
    batch = tiny.tokens()

    def step(workload: Workload) -> Tensor:
        assert workload.batch is batch
        loss = workload.loss_fn(workload.model, workload.batch)
        loss.backward()
        return loss

    assert_bitwise(verify(workload_of(batch=batch, step=step)))


# --- nothing is changed ---------------------------------------------------------------------------


def snapshot(workload: Workload) -> list[Any]:
    optimizer = workload.optimizer
    assert optimizer is not None
    return copy.deepcopy(
        [
            list(workload.model.parameters()),
            list(workload.model.named_buffers()),
            optimizer.state_dict(),
            [len(group["params"]) for group in optimizer.param_groups],
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state(),
        ]
    )


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, numpy.ndarray):
        assert (actual == expected).all()
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


class Everything(nn.Module):
    """Dropout and running statistics; draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(numpy.random.rand())  # noqa: S311
        return functional.dropout(self.norm(self.linear(x)), 0.1) * scale


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed_by_looking(step: Any, fails: bool) -> None:
    torch.manual_seed(4)
    model = tiny.Stack(Everything(), Everything())
    failing = iter([False, False, fails])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if next(failing, False):
            raise ValueError("in the third step")
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    workload = workload_of(model, optimizer=optimizer)
    workload.run_step()  # so that the optimizer has a state
    workload = workload_of(model, optimizer=optimizer, step=step, loss_fn=loss_fn)
    before = snapshot(workload)
    if fails:
        with pytest.raises(ValueError, match="in the third step"):
            verify(workload, NO_CHECKPOINTING)
    else:
        assert_bitwise(verify(workload, NO_CHECKPOINTING))
    assert_equal(snapshot(workload), before)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_steps(name: str) -> None:
    model = tiny.stack(2)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(model.state_dict())
    assert_bitwise(verify(workload_of(model, optimizer=optimizer)))
    assert all(
        value.item() == 0 for entries in optimizer.state.values() for value in [entries["step"]]
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    workload_of(model, optimizer=optimizer).run_step()  # and later they do again
    assert not all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
