"""Tiny models for the tests of policies, and counters of what they run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

MM = "aten.mm.default"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
NORM = "aten.native_layer_norm.default"
GELU = "aten.gelu.default"
ADD = "aten.add.Tensor"
HIDDEN = 8
"""Width of the models."""
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Of torch: what is counted to the op are the ops of 2.13, and older ones run a few more."""
CHECKPOINT_RUNS_OPS = RELEASE < (2, 12)
"""Whether `checkpoint()` itself runs an op, an empty one, in each region: 2.9 does, 2.12 not."""


class Block(nn.Module):
    """A transformer block: 4 matmuls, 1 attention, 2 norms, 1 GELU and 2 additions a pass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, sequence, HIDDEN]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the last block returns."""
        for block in self.blocks:
            x = block(x)
        return x


def stack(count: int = 2, dropout: float = 0.0) -> Stack:
    """Returns `count` blocks with the same weights every time."""
    torch.manual_seed(0)
    return Stack(*(Block(dropout) for _ in range(count)))


def tokens(*shape: int) -> Tensor:
    """Returns the same input [2, 4, HIDDEN], or of another shape, every time."""
    shape = shape or (2, 4, HIDDEN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class OpCounter(TorchDispatchMode):
    """Counts the ops that really run: what comes out of a policy's storage does not."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Run:
    """What one forward and backward pass gave."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    forward_ops: Counter[str]
    backward_ops: Counter[str]


def loss_of(output: Any) -> Tensor:
    """Returns a loss in which every element of every output counts with its own weight."""
    if isinstance(output, Tensor):
        weights = torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape)
        return (output.float() * weights).sum()
    values = output.values() if isinstance(output, dict) else output
    return sum((loss_of(value) for value in values), torch.zeros(()))


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Runs both passes from a fixed seed, counting the ops of each."""
    model.zero_grad()
    torch.manual_seed(2)
    with OpCounter() as forward:
        loss = loss_of(model(*args, **kwargs))
    with OpCounter() as backward:
        loss.backward()
    gradients = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return Run(loss.detach(), gradients, forward.counts, backward.counts)


def recomputed(plain: Run, checkpointed: Run) -> dict[str, int]:
    """Returns how often each op ran once more in backward than without checkpointing."""
    extra = Counter(checkpointed.backward_ops)
    extra.subtract(plain.backward_ops)
    return {op: count for op, count in extra.items() if count and op != "aten.detach.default"}


def assert_same(plain: Run, checkpointed: Run) -> None:
    """Asserts that loss and gradients are equal bit for bit, and that there are gradients."""
    assert torch.equal(plain.loss, checkpointed.loss)
    assert plain.gradients.keys() == checkpointed.gradients.keys()
    assert any(gradient is not None and gradient.any() for gradient in plain.gradients.values())
    for name, expected in plain.gradients.items():
        actual = checkpointed.gradients[name]
        assert (expected is None) == (actual is None), name
        assert expected is None or (actual is not None and torch.equal(expected, actual)), name
