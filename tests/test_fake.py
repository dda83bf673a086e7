"""Fake tensors: what they take the place of, what they know, and that nothing is left behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from sac_search.fake import FakeMode, any_device_as_cpu, faked
from sac_search.workload import Workload

META = torch.device("meta")


def make_workload(device: torch.device, optimizer: type[torch.optim.Optimizer]) -> Workload:
    with device:
        model = tiny.Stack(tiny.Block(), tiny.Block())
        batch = torch.empty(2, 4, tiny.HIDDEN)
    return Workload(model, mean_square, batch, optimizer(model.parameters(), lr=0.1))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_meta_tensors_become_fakes_of_the_cpu() -> None:
    workload = make_workload(META, torch.optim.SGD)
    before = dict(workload.model.named_parameters())
    with faked(workload, FakeMode()) as fake:
        for tensor in (*fake.parameters(), fake.batch):
            assert isinstance(tensor, FakeTensor)
            assert tensor.device.type == "cpu"
        assert fake.parameters()[0].untyped_storage().nbytes() == 4 * tiny.HIDDEN
        names = [name for name, _ in fake.model.named_parameters()]
        assert names == list(before)
    after = dict(workload.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_the_storages_of_views_and_of_tied_weights_stay_one() -> None:
    with META:
        model = nn.Module()
        model.tied = model.weight = nn.Parameter(torch.empty(4, 4))
        model.register_buffer("row", model.weight.detach()[1])
    workload = Workload(model, lambda m, x: m.weight.sum(), None)
    with faked(workload, FakeMode()):
        assert model.tied is model.weight
        storages = {x.untyped_storage()._cdata for x in (model.weight, model.row)}
        assert len(storages) == 1


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_whole_steps_run_on_meta_and_make_the_optimizers_state_among_the_fakes(
    optimizer: type[torch.optim.Optimizer], foreach: bool
) -> None:
    workload = make_workload(META, optimizer)
    assert workload.optimizer is not None
    workload.optimizer.param_groups[0]["foreach"] = foreach
    parameters = workload.parameters()
    state = dict(workload.optimizer.state)
    mode = FakeMode()
    with faked(workload, mode) as fake, mode:
        for _ in range(2):
            assert isinstance(fake.run_step(), FakeTensor)
        entries = workload.optimizer.state[fake.parameters()[-1]]
        assert all(isinstance(x, FakeTensor) for x in entries.values() if x is not None)
        if "step" in entries:
            assert entries["step"].item() == 2
    assert dict(workload.optimizer.state) == state
    assert all(a is b for a, b in zip(workload.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in workload.parameters())


def test_what_is_real_is_put_back_after_an_error() -> None:
    workload = make_workload(torch.device("cpu"), torch.optim.AdamW)
    before = workload.parameters()
    with pytest.raises(ZeroDivisionError), faked(workload, FakeMode()):
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(workload.parameters(), before, strict=True))
    assert type(workload.batch) is Tensor


# --- values ---------------------------------------------------------------------------------------


KNOWN = {
    "a range": lambda data: torch.arange(5)[3],
    "a mask of positions": lambda data: (torch.arange(5).diff() == 1).all(),
    "a number": lambda data: torch.tensor(3.5),
    "a constant changed in place": lambda data: torch.ones(2).add_(torch.tensor(2)).sum(),
    "a constant changed through a view": lambda data: _fill_first(torch.zeros(3), 4.0).sum(),
    "over many tensors at once": lambda data: torch._foreach_add([torch.ones(2)], 1.0)[0].sum(),
    "cast": lambda data: torch.arange(5, dtype=torch.int32).to(torch.float64).max(),
}
UNKNOWN = {
    "the data": lambda data: data.sum(),
    "its shape alone": lambda data: torch.empty(2).sum(),
    "random numbers": lambda data: torch.rand(3).sum(),
    "a constant that data went into": lambda data: torch.zeros(8).add_(data[0]).sum(),
    "a view of a constant that data went into": lambda data: _fill_first(
        torch.zeros(3), data.sum()
    ).sum(),
    "random numbers in the place of a constant": lambda data: torch.zeros(3).normal_().sum(),
    "more than is worth knowing": lambda data: torch.zeros(2**20 + 1).sum(),
}


def _fill_first(tensor: Tensor, value: Any) -> Tensor:
    view = tensor[:1]
    view.add_(value)
    return tensor


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN.keys())
def test_values_from_constants_alone_are_known(make: Callable[[Tensor], Tensor]) -> None:
    expected = make(torch.zeros(2, 8)).item()
    mode = FakeMode()
    data = mode.from_tensor(torch.zeros(2, 8))
    with mode:
        computed = make(data)
        assert isinstance(computed, FakeTensor)
        assert computed.item() == expected


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_other_values_are_not(make: Callable[[Tensor], Tensor]) -> None:
    mode = FakeMode()
    data = mode.from_tensor(torch.zeros(2, 8))
    with mode:
        computed = make(data)
        with pytest.raises(DataDependentOutputException):
            computed.item()


def test_a_real_tensor_is_not_changed_by_what_its_fake_goes_through() -> None:
    real = torch.zeros(3)
    with FakeMode():
        real.view(-1).add_(1)
        torch.ops.aten.lift_fresh(real).add_(1)
    assert torch.equal(real, torch.zeros(3))


def test_values_die_with_their_fakes() -> None:
    mode = FakeMode()
    with mode:
        fake = torch.arange(5)
        value = weakref.ref(mode._values[fake])
        assert value() is not None
        del fake
    assert value() is None


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["meta", "cuda", "cuda:3", "cpu"])
def test_any_device_that_the_step_names_is_the_cpu(name: str) -> None:
    mode = FakeMode()
    with any_device_as_cpu(), mode:
        made = torch.ones(2, 2, device=name)
        moved = made.to(name).to(torch.device(name), torch.bfloat16)
        with torch.autocast(name.partition(":")[0], torch.bfloat16):
            product = made @ made
    assert {x.device.type for x in (made, moved, product)} == {"cpu"}
    assert (moved.dtype, product.dtype) == (torch.bfloat16, torch.bfloat16)


def test_cuda_is_a_way_to_name_a_device() -> None:
    with any_device_as_cpu(), FakeMode():
        assert torch.ones(2).cuda().device.type == "cpu"


def test_afterwards_devices_are_what_they_are() -> None:
    before = torch.autocast.__init__
    with pytest.raises(ZeroDivisionError), any_device_as_cpu():
        raise ZeroDivisionError
    assert torch.autocast.__init__ is before
    assert torch.ones(1, device="meta").is_meta
