"""Whatever steps change is put back bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from sac_search.state import buffers_kept, random_states_kept, training_state_kept
from sac_search.workload import Workload


class Everything(nn.Module):
    """Running statistics, dropout, and numbers from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)
        self.norm = nn.BatchNorm1d(tiny.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(numpy.random.rand())  # noqa: S311
        return functional.dropout(self.norm(self.linear(x)), 0.1) * scale


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
}


def workload_of(make_optimizer: Make | None = None) -> Workload:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(Everything(), Everything())
    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    batch = tiny.tokens(16, tiny.HIDDEN)
    return Workload(model, lambda m, x: m(x).square().mean(), batch, optimizer)


def snapshot(workload: Workload) -> list[Any]:
    model, optimizer = workload.model, workload.optimizer
    return copy.deepcopy(
        [
            dict(model.state_dict()),
            [p.grad for p in model.parameters()],
            [m.training for m in model.modules()],
            optimizer.state_dict() if optimizer else None,
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state(),
        ]
    )


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, numpy.ndarray):
        return bool((actual == expected).all())
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return bool(actual == expected)


def disturb(workload: Workload) -> None:
    """Changes all that a step can change."""
    workload.run_step()
    workload.run_loss().backward()  # gradients that stay
    workload.model.eval()
    if workload.optimizer is not None:
        workload.optimizer.param_groups[0]["lr"] = 7.0


@pytest.mark.parametrize("name", [None, *OPTIMIZERS])
@pytest.mark.parametrize("stepped", [False, True])
def test_everything_is_put_back(name: str | None, stepped: bool) -> None:
    workload = workload_of(OPTIMIZERS[name] if name else None)
    if stepped:
        workload.run_step()
    workload.model[0].linear.weight.grad = torch.ones(tiny.HIDDEN, tiny.HIDDEN)
    workload.model[1].norm.eval()
    before = snapshot(workload)
    with training_state_kept(workload):
        disturb(workload)
        changed = snapshot(workload)
    for index, (old, new) in enumerate(zip(before, changed, strict=True)):
        if old is not None:
            assert not same(new, old), f"part {index} was not disturbed: this test shows nothing"
    assert same(snapshot(workload), before)


def test_training_goes_on_as_if_nothing_had_been() -> None:
    def train(look: bool) -> list[float]:
        workload = workload_of(OPTIMIZERS["AdamW"])
        random.seed(1)
        numpy.random.seed(1)
        losses = [workload.run_step().item() for _ in range(2)]
        if look:
            with training_state_kept(workload):
                disturb(workload)
        return losses + [workload.run_step().item() for _ in range(3)]

    assert train(look=True) == train(look=False)


def test_an_error_puts_everything_back_too() -> None:
    workload = workload_of(OPTIMIZERS["AdamW"])
    workload.run_step()
    before = snapshot(workload)

    def interrupted() -> None:
        with training_state_kept(workload):
            disturb(workload)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert same(snapshot(workload), before)


def test_tensors_stay_the_objects_that_they_were() -> None:
    workload = workload_of(OPTIMIZERS["AdamW"])
    workload.run_step()
    optimizer = workload.optimizer
    assert optimizer is not None
    parameters = list(workload.model.parameters())
    before = [*parameters, *workload.model.buffers()]
    states = [value for p in parameters for value in optimizer.state[p].values()]
    with training_state_kept(workload):
        disturb(workload)
    after = [*workload.model.parameters(), *workload.model.buffers()]
    assert all(one is other for one, other in zip(after, before, strict=True))
    now = [value for p in parameters for value in optimizer.state[p].values()]
    assert all(one is other for one, other in zip(now, states, strict=True))


def test_an_optimizer_that_keeps_its_state_in_another_dtype() -> None:
    class Precise(torch.optim.Optimizer):
        """Keeps float32 sums, and a list of what it did, for bfloat16 parameters."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if "sum" not in state:
                        state["sum"] = torch.zeros(parameter.shape)
                        state["history"] = []
                    state["sum"] += parameter.grad.float() / 3
                    state["history"].append(state["sum"].norm())

    model = nn.Linear(3, 3).bfloat16()
    optimizer = Precise(model.parameters(), {"lr": 1.0})
    batch = torch.ones(1, 3, dtype=torch.bfloat16)
    workload = Workload(model, lambda m, x: m(x).square().sum(), batch, optimizer)
    workload.run_step()
    before = snapshot(workload)
    with training_state_kept(workload):
        workload.run_step()
    assert same(snapshot(workload), before)
    assert optimizer.state[model.weight]["sum"].dtype is torch.float32
    assert len(optimizer.state[model.weight]["history"]) == 1


def test_state_of_parameters_without_any_is_gone_again() -> None:
    workload = workload_of(OPTIMIZERS["AdamW"])
    with training_state_kept(workload):
        workload.run_step()
        assert workload.optimizer is not None
        assert workload.optimizer.state
    assert not workload.optimizer.state


def test_buffers_that_the_forward_replaces_or_that_share_memory() -> None:
    model = nn.Linear(2, 2)
    cache, mask = torch.zeros(2), torch.ones(1).expand(4)
    model.register_buffer("cache", cache)
    model.register_buffer("mask", mask)
    model.register_buffer("none", None)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with buffers_kept(model):
        model.cache.add_(1)
        model.cache = torch.ones(5)
        model.none = torch.ones(1)
        model.adjacency.mul_(2)
    assert model.cache is cache and cache.tolist() == [0, 0]
    assert model.mask is mask
    assert model.none is None
    assert torch.equal(model.adjacency.to_dense(), torch.eye(2))


def test_random_states_of_all_three_generators() -> None:
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]  # noqa: S311

    with random_states_kept():
        first = draw()
        draw()
    assert draw() == first
