"""The errors that torch really raises, and what is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from tiny import HIDDEN, MM, RELEASE, Stack, stack, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, set_checkpoint_debug_enabled

from sac_search.apply import applied
from sac_search.failures import NonFiniteLoss, failure_from, make_failure
from sac_search.policy import Tier, checkpoint_layers
from sac_search.records import FailureKind

says_something_else = pytest.mark.skipif(
    RELEASE < (2, 12), reason="torch 2.9 says: Trying to backward an extra time"
)


def error_of(step: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        step()
    return caught.value


def train(model: nn.Module, tier: Tier) -> None:
    with applied(model, checkpoint_layers(["blocks.0"], tier)):
        output = model(tokens())
        after = getattr(model.blocks[0], "after_forward", None)
        if after is not None:
            after()
        output.sum().backward()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.calls = 0


class InPlace(Layer):
    """Changes the output of its matmul in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x.flatten(0, 1)).relu_()).sin()


class BatchNormRelu(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.norm(self.linear(x)), inplace=True).sin()


class GrowingCache(Layer):
    """Keeps what it has seen, as a key/value cache does: the second run concatenates."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        keys = self.linear(x).detach()
        if self.cache:
            keys = torch.cat([*self.cache, keys], dim=1)
        self.cache.append(keys)
        return (self.linear(x) * keys.mean(1, keepdim=True)).sin()


class MoreMatmuls(Layer):
    """Runs ops more often in recompute than in forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            for _ in range(self.calls):
                x = x + self.linear(x)
        return self.linear(x).sin()


class OtherShape(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x[:, : 3 - self.calls]).sin().sum(1)


class FewerTensors(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        return y.sin().cos().exp() if self.calls == 1 else y.sin()


class ModeChanges(Layer):
    """Is put into another mode between forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        return y.cos().sin() if self.training else y

    def after_forward(self) -> None:
        self.eval()


SAVE_MM = Tier(ops=(MM,))


@pytest.mark.parametrize(
    ("layer", "tier", "kind", "message"),
    [
        (InPlace, SAVE_MM, FailureKind.MUTATED_SAVED_TENSOR, "has been mutated"),
        (
            BatchNormRelu,
            Tier(ops=("aten.native_batch_norm.default",)),
            FailureKind.MUTATED_SAVED_TENSOR,
            "has been mutated",
        ),
        pytest.param(
            *(GrowingCache, SAVE_MM, FailureKind.NOT_IN_STORAGE),
            "aten.cat.default encountered during",
            marks=says_something_else,
        ),
        pytest.param(
            *(MoreMatmuls, SAVE_MM, FailureKind.NOT_IN_STORAGE),
            "invocation index 1 encountered during",
            marks=says_something_else,
        ),
        (OtherShape, Tier(), FailureKind.RECOMPUTE_MISMATCH, "have different metadata"),
        (FewerTensors, Tier(), FailureKind.RECOMPUTE_MISMATCH, "A different number of tensors"),
        (ModeChanges, Tier(), FailureKind.RECOMPUTE_MISMATCH, "A different number of tensors"),
    ],
)
def test_what_checkpointing_raises_is_recognised(
    layer: type[Layer], tier: Tier, kind: FailureKind, message: str
) -> None:
    torch.manual_seed(0)
    error = error_of(lambda: train(Stack(layer()), tier))
    failure = failure_from(error)
    assert failure.kind is kind
    assert message in failure.message
    assert isinstance(error, CheckpointError) == (kind is FailureKind.RECOMPUTE_MISMATCH)


def test_the_same_layers_train_when_no_policy_is_on() -> None:
    # So the failures above are those of the policies.
    for layer in (InPlace, BatchNormRelu, GrowingCache, MoreMatmuls, OtherShape, FewerTensors):
        Stack(layer())(tokens()).sum().backward()
    train(Stack(InPlace()), Tier())


def test_a_mismatch_in_debug_mode_is_recognised() -> None:
    with set_checkpoint_debug_enabled(True):
        error = error_of(lambda: train(Stack(FewerTensors()), Tier()))
    assert failure_from(error).kind is FailureKind.RECOMPUTE_MISMATCH


def test_running_out_of_host_memory_is_recognised() -> None:
    error = error_of(lambda: torch.empty(2**50))
    assert type(error) is RuntimeError
    failure = failure_from(error)
    assert failure.kind is FailureKind.HOST_OUT_OF_MEMORY
    assert "DefaultCPUAllocator" in failure.message
    assert failure_from(error_of(lambda: bytearray(2**60))).kind is FailureKind.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        torch.cuda.OutOfMemoryError("anything"),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("XPU out of memory, please use `empty_cache`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.77 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=str,
)
def test_running_out_of_device_memory_is_recognised(error: Exception) -> None:
    assert failure_from(error).kind is FailureKind.OUT_OF_MEMORY


def test_a_loss_that_is_not_finite_is_recognised() -> None:
    failure = failure_from(NonFiniteLoss("the loss is nan"))
    assert failure.kind is FailureKind.NON_FINITE_LOSS
    assert "the loss is nan" in failure.message


def raise_from_user_code() -> None:
    raise KeyError("labels")


def backward_twice() -> None:
    loss = stack(1)(tokens()).sum()
    loss.backward()
    loss.backward()


@pytest.mark.parametrize(
    "step",
    [
        raise_from_user_code,
        backward_twice,
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: stack(1)(tokens().to(torch.float16)),
        functools.partial(train, stack(1, dropout=0.5), Tier(save_random=True)),
    ],
)
def test_other_errors_are_the_steps_own(step: Callable[[], object]) -> None:
    error = error_of(step)
    failure = failure_from(error)
    assert failure.kind is FailureKind.USER_ERROR
    assert type(error).__name__ in failure.message
    assert str(error)[:40] in failure.message


@pytest.mark.parametrize(
    "message",
    [
        "the config has been mutated since it was read",
        "blob 12 was not found in storage",
        "out of memory",
        "the run of CUDA kernels\nended: the queue is out of memory slots",
        "torch.utils.checkpoint needs use_reentrant",
    ],
)
def test_messages_that_only_sound_alike_are_the_steps_own(message: str) -> None:
    assert failure_from(RuntimeError(message)).kind is FailureKind.USER_ERROR


def test_long_messages_are_cut() -> None:
    failure = failure_from(RuntimeError("x" * 10_000))
    assert failure.message.startswith("RuntimeError: xxx")
    assert failure.message.endswith(" …")
    assert len(failure.message) < 700
    assert failure_from(RuntimeError("short")).message == "RuntimeError: short"


@pytest.mark.parametrize("kind", FailureKind, ids=str)
def test_every_kind_has_its_advice(kind: FailureKind) -> None:
    failure = make_failure(kind, "words")
    assert (failure.kind, failure.message) == (kind, "words")
    assert failure.advice.endswith(".")
    assert (
        failure.advice
        != make_failure(next(other for other in FailureKind if other is not kind), "words").advice
    )


def test_an_error_without_advice_speaks_for_itself() -> None:
    raised = make_failure(FailureKind.USER_ERROR, "ValueError: no such token\nat line 3")
    assert raised.line == "ValueError: no such token"
    full = make_failure(FailureKind.OUT_OF_MEMORY, "CUDA out of memory")
    assert full.line == full.advice
