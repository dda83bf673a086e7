"""Layers that are split over ranks: what they send each other, and who waits for it.

In one process, on torch's fake process group: what is received is whatever is there, but ops,
storages and the registry of collectives are those of real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search.apply import applied
from sac_search.device import Clock
from sac_search.layers import find_layers
from sac_search.measure import StepMeter
from sac_search.opclasses import OpClass
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.ranks import unawaited_collectives
from sac_search.records import FailureKind
from sac_search.space import Granularity, build_space, unsavable_ops
from sac_search.trace import LayerTrace, trace_layers
from sac_search.worker.session import Session, SessionSettings
from sac_search.workload import Workload

pytestmark = pytest.mark.skipif(
    tiny.RELEASE < (2, 12), reason="on torch 2.9's fake process group the loss is NaN"
)

CPU = torch.device("cpu")
WIDTH = 16
LAYERS = ["blocks.0", "blocks.1"]
TANH = "aten.tanh.default"
COLLECTIVES = (
    "_c10d_functional._wrap_tensor_autograd.default",
    "_c10d_functional.all_reduce.default",
)
FULL = checkpoint_layers(LAYERS)
SAVE_TANH = checkpoint_layers(LAYERS, Tier(ops=(TANH,)))


class Block(nn.Module):
    held: ClassVar[list[Tensor]] = []
    """Real collectives hold their tensors until they are waited for; the fake ones do not, and the
    registry would take a new one for an old one at its address. So these are held for good."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        received = self.down(nn.functional.gelu(self.up(x)))
        self.held.append(received)
        return x + self.out(torch.tanh(received))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in LAYERS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def work() -> Iterator[Workload]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    yield Workload(
        net, lambda m, x: m(x).square().mean(), torch.ones(4, 8, WIDTH), optimizer, layers=LAYERS
    )
    dist.destroy_process_group()


@pytest.fixture
def layers(work: Workload) -> list[LayerTrace]:
    found = find_layers(work.model, work.run_forward, LAYERS)
    return trace_layers(work, found, CPU, Clock.CPU, repeats=1)


def left_by(work: Workload, policy: Policy) -> int:
    """Returns how many collectives a step leaves that nobody waits for."""
    before = unawaited_collectives()
    with applied(work.bare_model, policy):
        work.run_step()
    return unawaited_collectives() - before


def meter_of(work: Workload) -> StepMeter:
    return StepMeter(workload=work, device=CPU, clock=Clock.CPU, steps=2)


def test_what_reads_a_collectives_result_cannot_be_saved(layers: list[LayerTrace]) -> None:
    [tanh] = [op for op in layers[0].ops if op.op == TANH]
    assert tanh.awaits
    assert not any(op.awaits for op in layers[0].ops if op.op_class is OpClass.MATMUL)
    for granularity in Granularity:
        for save_collectives in (False, True):
            reasons = unsavable_ops(layers, granularity, save_collectives=save_collectives)
            [reason] = [r for name, r in reasons.items() if name.startswith(TANH)]
            assert reason == "without it nothing would wait for what ranks send"


def test_saved_all_the_same_it_leaves_memory_behind(work: Workload) -> None:
    # If this fails, torch waits by itself, and such ops can be saved.
    assert left_by(work, SAVE_TANH) == len(LAYERS)
    assert left_by(work, FULL) == left_by(work, NO_CHECKPOINTING) == 0


def test_a_policy_that_leaves_memory_behind_fails(work: Workload) -> None:
    bad, good = meter_of(work).compare([SAVE_TANH, FULL], NO_CHECKPOINTING, steps=2)
    assert bad.failure is not None
    assert bad.failure.kind is FailureKind.UNAWAITED_COLLECTIVE
    assert good.measurement is not None


def test_a_worker_that_holds_such_memory_is_given_up(work: Workload) -> None:
    session = Session(work, SessionSettings(spec="here", steps=2), CPU)
    assert session.measure(FULL).measurement is not None
    assert session.is_healthy()
    assert session.measure(SAVE_TANH).failure is not None
    assert not session.is_healthy()


def test_a_step_that_leaves_them_by_itself_is_measured(work: Workload) -> None:
    class Careless(Net):
        def forward(self, x: Tensor) -> Tensor:
            dist._functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
            return super().forward(x)

    work.model.__class__ = Careless
    assert left_by(work, NO_CHECKPOINTING) > 0
    for outcome in meter_of(work).compare([NO_CHECKPOINTING, FULL], FULL, steps=2):
        assert outcome.measurement is not None


def test_collectives_are_saved_only_if_asked(layers: list[LayerTrace]) -> None:
    plain, asked = (
        {save.label: save.saved for save in build_space(layers, save_collectives=asked).saves}
        for asked in (False, True)
    )
    assert "collective" not in plain
    assert asked.pop("collective") == COLLECTIVES
    assert asked == plain


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("save_collectives", [False, True])
def test_no_policy_of_the_space_leaves_memory_behind(
    work: Workload, layers: list[LayerTrace], granularity: Granularity, save_collectives: bool
) -> None:
    space = build_space(layers, granularity=granularity, save_collectives=save_collectives)
    labels = frozenset(save.label for save in space.saves)
    for saved in [*(frozenset([label]) for label in labels), labels]:
        policy = space.policy_of({layer.name: saved for layer in layers})
        assert left_by(work, policy) == 0, policy.describe()


def test_with_collectives_saved_nothing_is_sent_again(work: Workload) -> None:
    calls: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def sent(policy: Policy) -> int:
        calls.clear()
        with applied(work.bare_model, policy), Counting():
            work.run_step()
        return calls["_c10d_functional.all_reduce.default"]

    none = sent(NO_CHECKPOINTING)
    assert sent(checkpoint_layers(LAYERS, Tier(ops=COLLECTIVES))) == none
    assert sent(FULL) == none + len(LAYERS)
