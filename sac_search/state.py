"""Keeps the state of a training run while its steps are tried out in the same process."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

from sac_search.workload import Workload


@contextlib.contextmanager
def training_state_kept(workload: Workload) -> Iterator[Callable[[], None]]:
    """Puts everything that steps change back as it was, bit for bit.

    Yields what puts parameters, buffers, gradients and the optimizer back at once, for a step that
    has spoilt them.

    Parameters, buffers, gradients, optimizer state, `training` flags, autocast settings and the
    random states of Python, NumPy and torch. The copies are held in main memory, not on the device.
    What only the workload's own callables hold (a data loader's position, a gradient scaler) is
    theirs to keep.
    """
    parameters = workload.parameters()
    values = [_host_copy(p) for p in parameters]
    gradients = [None if p.grad is None else _host_copy(p.grad) for p in parameters]
    flags = [(module, module.training) for module in workload.model.modules()]
    restore_optimizer = _optimizer_kept(workload.optimizer)
    restore_buffers = _buffers_kept(workload.model)

    def restore() -> None:
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.copy_(value)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        restore_optimizer()
        restore_buffers()

    try:
        with random_states_kept(), autocast_kept():
            yield restore
    finally:
        restore()
        for module, training in flags:
            module.training = training


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Puts the random states of Python, NumPy and torch (on every device) back."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = range(torch.accelerator.device_count()) if accelerator else range(0)
    try:
        with torch.random.fork_rng(
            devices, device_type=accelerator.type if accelerator else "cuda"
        ):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def autocast_kept() -> Iterator[None]:
    """Puts the autocast settings of every device type, and its cache's, back."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    types = ["cpu", *([accelerator.type] if accelerator else [])]
    before = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
    is_cached = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        for device_type, is_enabled, dtype in before:
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(is_cached)


@contextlib.contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Puts the buffers of `model` back: the same tensors with the same values."""
    restore = _buffers_kept(model)
    try:
        yield
    finally:
        restore()


def _buffers_kept(model: torch.nn.Module) -> Callable[[], None]:
    """Returns what puts the buffers back."""
    buffers = [(m._buffers, dict(m._buffers), _kept(m._buffers)) for m in model.modules()]

    def restore() -> None:
        with torch.no_grad():
            for held, objects, copies in buffers:
                held.update(objects)  # a forward may have put another tensor in its place
                _put_back(held, copies)

    return restore


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _host_copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in entries.items()
    }


def _put_back(entries: dict[str, Any], copies: Mapping[str, Any]) -> None:
    """Gives every entry its old value; a tensor is filled, not replaced: others may hold it too."""
    for name, value in copies.items():
        if isinstance(value, torch.Tensor):
            if not _is_expanded(entries[name]):
                entries[name].copy_(value)
        else:
            entries[name] = value


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that nothing can write to the tensor."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _optimizer_kept(optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Returns what puts the optimizer's state and settings back.

    By hand, because `load_state_dict` casts every state to its parameter's dtype.
    """
    if optimizer is None:
        return lambda: None
    groups = [
        (group, {name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    states = [
        (parameter, entries, dict(entries), _kept(entries))
        for parameter, entries in optimizer.state.items()
    ]

    def restore() -> None:
        for group, settings in groups:
            group.update(settings)
        optimizer.state.clear()
        for parameter, entries, objects, copies in states:
            entries.clear()
            entries.update(objects)
            with torch.no_grad():
                _put_back(entries, copies)
            optimizer.state[parameter] = entries

    return restore
