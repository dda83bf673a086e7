"""Keeps the state of a training run while its steps are tried out in the same process."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from sac_search.workload import Workload


@contextlib.contextmanager
def training_state_kept(workload: Workload) -> Iterator[None]:
    """Puts everything that steps change back as it was, bit for bit.

    Parameters, buffers, gradients, optimizer state, `training` flags and the random states of
    Python, NumPy and torch. The copies are held in main memory, not on the device. What only the
    workload's own callables hold (a data loader's position, a gradient scaler) is theirs to keep.
    """
    model, optimizer = workload.model, workload.optimizer
    parameters = workload.parameters()
    values = [_host_copy(p) for p in parameters]
    gradients = [None if p.grad is None else _host_copy(p.grad) for p in parameters]
    buffers = {name: (buffer, _host_copy(buffer)) for name, buffer in model.named_buffers()}
    flags = [(module, module.training) for module in model.modules()]
    optimizer_state = _optimizer_copy(optimizer)
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with _torch_random_states_kept():
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.copy_(value)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            for buffer, value in buffers.values():
                buffer.copy_(value)
        for module, training in flags:
            module.training = training
        _restore_optimizer(optimizer, optimizer_state)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _optimizer_copy(optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    state = optimizer.state_dict()
    return {
        "state": {
            index: {
                name: _host_copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for name, value in entries.items()
            }
            if isinstance(entries, dict)
            else copy.deepcopy(entries)
            for index, entries in state["state"].items()
        },
        "param_groups": copy.deepcopy(state["param_groups"]),
    }


def _restore_optimizer(
    optimizer: torch.optim.Optimizer | None, state: dict[str, Any] | None
) -> None:
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)


@contextlib.contextmanager
def _torch_random_states_kept() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        with torch.random.fork_rng(devices=[]):
            yield
        return
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices=devices, device_type=accelerator.type):
        yield
