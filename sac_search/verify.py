"""Compares a policy's loss, gradients and buffers with a reference's, under the same seeds.

The reference runs twice first: what differs between those two runs is the device's own noise, not
the policy's fault. Parameters and buffers are what they were afterwards; the optimizer does not
step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sac_search.apply import PolicyModule, applied
from sac_search.device import free_cached_memory, synchronize
from sac_search.policy import Policy
from sac_search.records import Verification
from sac_search.workload import Workload

# Differences that recomputation may cause by summing in another order, relative to the largest
# value of a gradient. A wrong random stream or a stale tensor is off by far more.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_SEED = 20_240_229


def verify_policy(
    workload: Workload,
    policy: Policy | PolicyModule,
    reference: Policy,
    reference_name: str,
    device: torch.device,
) -> Verification:
    """Returns how far `policy` is from `reference` in one step.

    Raises:
        Exception: whatever the step raises, under either policy.
    """
    fixed = replace(workload, batch=_ReplayedBatches(workload))
    with _state_kept(workload):
        first = _run(fixed, reference, device)
        second = _run(fixed, reference, device)
        candidate = _run(fixed, policy, device)
    noise = _compare(second, first)
    found = _compare(candidate, first)
    tolerance = max(4 * noise.worst_difference, _tolerance(workload))
    passed = (
        candidate.gradients.keys() == first.gradients.keys()
        and found.worst_difference <= tolerance
        and found.loss_difference
        <= max(4 * noise.loss_difference, _loss_tolerance(first, workload))
    )
    bitwise = passed and found.loss_difference == 0 and found.worst_difference == 0
    return Verification(
        passed=passed,
        bitwise=bitwise,
        reference=reference_name,
        loss_difference=found.loss_difference,
        worst_gradient_difference=found.worst_difference,
        worst_parameter=found.worst_parameter,
        noise=noise.worst_difference,
        tolerance=tolerance,
        buffers_differing=found.buffers_differing,
        note=_note(passed, bitwise, found, noise),
    )


@dataclass(slots=True)
class _Run:
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Difference:
    loss_difference: float
    worst_difference: float
    worst_parameter: str | None
    buffers_differing: tuple[str, ...]


class _ReplayedBatches:
    """Draws each batch once and then gives the same ones again, run after run."""

    def __init__(self, workload: Workload) -> None:
        self._draw: Callable[[], Any] = workload.next_batch
        self._drawn: list[Any] = []
        self._position = 0

    def __call__(self) -> Any:
        if self._position == len(self._drawn):
            self._drawn.append(self._draw())
        self._position += 1
        return self._drawn[self._position - 1]

    def rewind(self) -> None:
        self._position = 0


def _run(workload: Workload, policy: Policy | PolicyModule, device: torch.device) -> _Run:
    """Runs one step and returns its loss and, on the host, its gradients and buffers."""
    workload.batch.rewind()
    with (
        applied(workload.model, policy),
        _gradients_kept(workload) as gradients,
        _buffers_restored(workload.model),
    ):
        _seed_everything()
        loss = float(workload.run_step())
        synchronize(device)
        buffers = {n: b.detach().cpu().clone() for n, b in workload.model.named_buffers()}
    free_cached_memory(device)
    return _Run(loss=loss, gradients=gradients, buffers=buffers)


@contextlib.contextmanager
def _gradients_kept(workload: Workload) -> Iterator[dict[str, torch.Tensor]]:
    """Copies every gradient to the host when it is complete; the optimizer's step does nothing."""
    gradients: dict[str, torch.Tensor] = {}
    names = {id(p): n for n, p in workload.model.named_parameters()}

    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            name = names.get(id(parameter), f"parameter {id(parameter)}")
            gradients[name] = parameter.grad.detach().to("cpu", copy=True)

    workload.drop_gradients()
    handles = [
        p.register_post_accumulate_grad_hook(keep) for p in workload.parameters() if p.requires_grad
    ]
    with _optimizers_idle():
        try:
            yield gradients
        finally:
            for handle in handles:
                handle.remove()
            workload.drop_gradients()


@contextlib.contextmanager
def _optimizers_idle() -> Iterator[None]:
    """Makes every optimizer's step a no-op, those that only the user's step knows included."""

    def skip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            held.append((group, group["params"]))
            group["params"] = []

    def put_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while held:
            group, parameters = held.pop()
            group["params"] = parameters

    held: list[tuple[dict[str, Any], list[torch.nn.Parameter]]] = []
    handles = [
        register_optimizer_step_pre_hook(skip),
        register_optimizer_step_post_hook(put_back),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while held:
            group, parameters = held.pop()
            group["params"] = parameters


@contextlib.contextmanager
def _buffers_restored(model: torch.nn.Module) -> Iterator[None]:
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and buffer.shape == kept[name].shape:
                    buffer.copy_(kept[name])


@contextlib.contextmanager
def _state_kept(workload: Workload) -> Iterator[None]:
    """Puts random generators and, after a step of the user's own, parameters back."""
    kept: list[torch.Tensor] = []
    if workload.step is not None:
        kept = [p.detach().to("cpu", copy=True) for p in workload.parameters()]
    with torch.random.fork_rng(devices=_accelerator_devices(), device_type=_accelerator_type()):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(workload.parameters(), kept, strict=False):
                    parameter.copy_(value)


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cuda"


def _accelerator_devices() -> list[int]:
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return []
    return [torch.accelerator.current_device_index()]


def _seed_everything() -> None:
    import random

    import numpy

    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy.random.seed(_SEED % 2**32)


def _compare(run: _Run, reference: _Run) -> _Difference:
    worst, worst_parameter = 0.0, None
    for name, expected in reference.gradients.items():
        difference = _relative_difference(run.gradients.get(name), expected)
        if difference > worst or math.isnan(difference):
            worst, worst_parameter = (math.inf if math.isnan(difference) else difference), name
    buffers = tuple(
        name
        for name, expected in reference.buffers.items()
        if not torch.equal(run.buffers.get(name, torch.empty(0)), expected)
    )
    return _Difference(abs(run.loss - reference.loss), worst, worst_parameter, buffers)


def _relative_difference(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    scale = float(expected.abs().max())
    difference = float((found.double() - expected.double()).abs().max())
    return difference / scale if scale > 0 else math.inf


def _tolerance(workload: Workload) -> float:
    dtypes = {p.dtype for p in workload.parameters() if p.requires_grad}
    return max(_TOLERANCES.get(dtype, 2e-2) for dtype in dtypes)


def _loss_tolerance(first: _Run, workload: Workload) -> float:
    return _tolerance(workload) * max(abs(first.loss), 1e-6)


def _note(passed: bool, bitwise: bool, found: _Difference, noise: _Difference) -> str:
    parts = []
    if noise.worst_difference > 0 or noise.loss_difference > 0:
        parts.append(
            "Two runs of the reference itself differ: the step draws other data each time, or the "
            "device's kernels are not deterministic."
        )
    if not passed:
        parts.append(f"The gradient of {found.worst_parameter} differs most.")
    elif not bitwise:
        parts.append("Equal within the tolerance, not bit for bit.")
    if found.buffers_differing:
        parts.append(
            "Buffers that a layer updates in its forward, such as the running statistics of "
            "BatchNorm, move twice per step in a layer that is recomputed."
        )
    return " ".join(parts)
