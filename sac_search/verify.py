"""Compares a policy's loss, gradients and buffers with a reference's, under the same seeds.

The reference runs twice first: what differs between those two runs is the device's own noise, not
the policy's fault. Parameters, buffers and random generators are what they were afterwards; the
optimizer does not step.

A compiled policy's reference is compiled as well, since compiled code rounds otherwise and draws
other random numbers. Where nothing is random, the reference itself is held against eager code.

Known limits: an optimizer that steps on a list of its own (LBFGS) steps all the same. What a user's
step keeps elsewhere (a data loader's position, a scaler's scale) moves on.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sac_search.apply import PolicyModule
from sac_search.compiling import CompileOptions, Compiler
from sac_search.device import free_cached_memory, synchronize
from sac_search.failures import NonFiniteLoss
from sac_search.policy import Policy
from sac_search.ranks import ALONE, Peers, is_distributed, local_tensor
from sac_search.records import Verification
from sac_search.state import buffers_kept, random_states_kept
from sac_search.workload import Workload, copied_batch

# Differences that recomputation may cause by summing in another order, relative to the largest
# value of a gradient. A wrong random stream or a stale tensor is off by far more.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# The same for compiled code, which keeps what it fuses in other formats, and recomputes it in
# another fusion than it was computed in; and for that against eager code, rounding included.
_COMPILED_FACTOR = 10
_COMPILED_AND_EAGER_FACTOR = 100
_MOST_TOLERANCE = 0.1
# Two runs of the reference that differ by more than this do not compute the same step.
_MOST_NOISE = 0.1
# A gradient that is zero but for rounding (the bias of attention's keys) is held against the
# largest gradient of the model instead of against itself.
_LEAST_SCALE_FRACTION = 1e-3
# What a gradient that is missing or not finite counts as: JSON has no infinity.
_WHOLLY_OFF = 1.0
# A gradient scaler begins at 2**16 and halves as long as gradients overflow.
_MOST_SCALINGS = 24
_SEED = 20_240_229
_OTHER_SEED = 20_240_301


def verify_policy(
    workload: Workload,
    policy: Policy | PolicyModule,
    reference: Policy,
    reference_name: str,
    device: torch.device,
    peers: Peers = ALONE,
    compiler: Compiler | None = None,
) -> Verification:
    """Returns how far `policy` is from `reference` in one step.

    `compiler` is of this workload's model; one of its own by default. What it compiled is dropped
    afterwards. Of tensors that are spread over ranks each rank compares its own part.

    Raises:
        NonFiniteLoss: the loss is NaN or infinite, under either policy.
        CompilesNothing: the policy is compiled, but torch leaves all of the model to eager code.
        Exception: whatever the step raises, under either policy.
    """
    fixed = _Fixed(
        _with_replayed_batches(workload),
        device,
        compiler or Compiler(workload.bare_model, CompileOptions()),
    )
    is_compiled = reference.compiled is not None
    eager_difference = None
    try:
        with random_states_kept():
            graphs = fixed.compiler.graphs
            first = _run_until_finite(fixed, reference, peers)
            if is_compiled:
                fixed.compiler.check_compiled_since(graphs)
            # One after the other: the gradients of three runs at once may not fit into main memory.
            noise = _compare(_run(fixed, reference), first)
            found = _compare(_run(fixed, policy), first)
            least = _tolerance(workload, fixed.compiler if is_compiled else None)
            if is_compiled and peers.size == 1:
                eager_difference = _eager_difference(fixed, reference.eager, first)
    finally:
        fixed.compiler.forget()
    tolerance = max(least, min(4 * noise.worst_difference, _MOST_NOISE))
    loss_tolerance = max(
        least * max(abs(first.loss), 1e-6),
        min(4 * noise.loss_difference, _MOST_NOISE * abs(first.loss)),
    )
    eager_tolerance = min(_COMPILED_AND_EAGER_FACTOR * least, _MOST_TOLERANCE)
    is_as_eager = eager_difference is None or eager_difference.worst_difference <= eager_tolerance
    passed = (
        bool(first.gradients)
        and first.is_finite()
        and found.worst_difference <= tolerance
        and found.loss_difference <= loss_tolerance
        and is_as_eager
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
        note=" ".join(
            note
            for note in (
                _note(passed, bitwise, first, found, noise),
                _eager_note(eager_difference, is_as_eager),
            )
            if note
        ),
    )


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A workload whose steps can be run again and again on the same data."""

    workload: Workload
    device: torch.device
    compiler: Compiler


@dataclass(slots=True)
class _Run:
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


@dataclass(frozen=True, slots=True)
class _Difference:
    loss_difference: float
    worst_difference: float
    worst_parameter: str | None
    buffers_differing: tuple[str, ...]


class _ReplayedBatches:
    """Draws each batch once and then gives the same ones again, run after run."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw
        self._drawn: list[Any] = []
        self._position = 0

    def __call__(self) -> Any:
        if self._position == len(self._drawn):
            self._drawn.append(self._draw())
        self._position += 1
        return copied_batch(self._drawn[self._position - 1])

    def rewind(self) -> None:
        self._position = 0


def _with_replayed_batches(workload: Workload) -> Workload:
    if not callable(workload.batch):
        return workload
    return replace(workload, batch=_ReplayedBatches(workload.batch))


def _run_until_finite(fixed: _Fixed, policy: Policy | PolicyModule, peers: Peers) -> _Run:
    """Runs a step; if gradients overflow, again, so that a gradient scaler finds its scale."""
    run = _run(fixed, policy)
    for _ in range(_MOST_SCALINGS):
        if not peers.any(not run.is_finite()):
            break
        run = _run(fixed, policy)
    return run


def _eager_difference(fixed: _Fixed, reference: Policy, compiled: _Run) -> _Difference | None:
    """Returns how far a compiled run is from the eager one; None where that cannot be told.

    Compiled code draws other random numbers. So a step that draws any, and with another seed has
    another loss, cannot be compared.
    """
    try:
        eager = _run(fixed, reference)
        other = _run(fixed, reference, seed=_OTHER_SEED)
    except (torch.OutOfMemoryError, MemoryError):  # compiled code may need less
        fixed.workload.drop_gradients()
        free_cached_memory(fixed.device)
        return None
    return _compare(compiled, eager) if other.loss == eager.loss else None


def _run(fixed: _Fixed, policy: Policy | PolicyModule, seed: int = _SEED) -> _Run:
    """Runs one step and returns its loss and, on the host, its gradients and buffers."""
    workload, device = fixed.workload, fixed.device
    if isinstance(workload.batch, _ReplayedBatches):
        workload.batch.rewind()
    with (
        fixed.compiler.applied(policy),
        _gradients_kept(workload) as gradients,
        buffers_kept(workload.model),
        _parameters_kept(workload),
    ):
        _seed_everything(seed)
        loss = float(workload.run_step())
        synchronize(device)
        buffers = {n: _host_copy(b) for n, b in workload.model.named_buffers()}
    free_cached_memory(device)
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the loss is {loss}")
    return _Run(loss=loss, gradients=gradients, buffers=buffers)


@contextlib.contextmanager
def _gradients_kept(workload: Workload) -> Iterator[dict[str, torch.Tensor]]:
    """Sums up on the host what reaches each parameter; the optimizer's step does nothing.

    What reaches it, not what is left in `.grad`: a step may clip that, or drop it at once.
    """
    gradients: dict[str, torch.Tensor] = {}
    names = {id(p): n for n, p in workload.bare_model.named_parameters()}

    def keep_as(name: str) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            kept = _host_copy(gradient)
            gradients[name] = gradients[name] + kept if name in gradients else kept

        return keep

    def keep_grad_as(name: str) -> Callable[[torch.Tensor], None]:
        keep = keep_as(name)
        return lambda parameter: keep(parameter.grad) if parameter.grad is not None else None

    workload.drop_gradients()
    handles = []
    for index, parameter in enumerate(workload.parameters()):
        name = names.get(id(parameter), f"parameter {index} of the optimizer")
        if is_distributed(parameter):
            # No backward pass goes through it: FSDP2 makes its gradient of what other tensors got.
            handles.append(parameter.register_post_accumulate_grad_hook(keep_grad_as(name)))
        elif parameter.requires_grad:
            handles.append(parameter.register_hook(keep_as(name)))
    with _optimizers_idle():
        try:
            yield gradients
        finally:
            for handle in handles:
                handle.remove()
            workload.drop_gradients()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    kept: torch.Tensor = local_tensor(tensor.detach()).to("cpu", copy=True)
    return kept if kept.layout is torch.strided else kept.to_dense()


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
def _parameters_kept(workload: Workload) -> Iterator[None]:
    """Puts the parameters back after a step of the user's own, which may change them by hand."""
    kept: list[torch.Tensor] = []
    if workload.step is not None:
        kept = [local_tensor(p.detach()).to("cpu", copy=True) for p in workload.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(workload.parameters(), kept, strict=False):
                local_tensor(parameter).copy_(value)


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _compare(run: _Run, reference: _Run) -> _Difference:
    worst, worst_parameter = 0.0, None
    largest = max(map(_largest, reference.gradients.values()), default=0.0)
    for name in reference.gradients | run.gradients:
        difference = _relative_difference(
            run.gradients.get(name), reference.gradients.get(name), _LEAST_SCALE_FRACTION * largest
        )
        if difference > worst:
            worst, worst_parameter = difference, name
    buffers = tuple(
        name
        for name, expected in reference.buffers.items()
        if not torch.equal(run.buffers.get(name, torch.empty(0)), expected)
    )
    return _Difference(abs(run.loss - reference.loss), worst, worst_parameter, buffers)


def _relative_difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, least_scale: float
) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return _WHOLLY_OFF
    if torch.equal(found, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = _largest(found.to(wide) - expected.to(wide))
    scale = max(_largest(expected), least_scale)
    if not math.isfinite(difference) or not math.isfinite(scale) or scale == 0:
        return _WHOLLY_OFF
    return difference / scale


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _tolerance(workload: Workload, compiler: Compiler | None) -> float:
    dtypes = {p.dtype for p in workload.parameters() if p.requires_grad}
    if compiler is None:
        return max(_TOLERANCES.get(dtype, 2e-2) for dtype in dtypes)
    dtypes |= compiler.dtypes
    return min(_MOST_TOLERANCE, _COMPILED_FACTOR * max(_TOLERANCES.get(d, 2e-2) for d in dtypes))


def _note(passed: bool, bitwise: bool, first: _Run, found: _Difference, noise: _Difference) -> str:
    parts = []
    if not first.gradients:
        parts.append("No gradient reached any parameter, so there was nothing to compare.")
    elif not first.is_finite():
        parts.append("The reference's own gradients are not finite, so nothing can be compared.")
    elif noise.worst_difference > _MOST_NOISE:
        parts.append(
            f"Two runs of the reference itself differ by {noise.worst_difference:.1e}, so nothing "
            "can be said of the policy: draw batches through workload.next_batch() and random "
            "numbers from the global generators, which are seeded alike before each run."
        )
    elif noise.worst_difference > 0 or noise.loss_difference > 0:
        parts.append(
            "Two runs of the reference itself differ: the step draws other data each time, or the "
            "device's kernels are not deterministic."
        )
    if not passed and found.worst_parameter is not None:
        parts.append(f"The gradient of {found.worst_parameter} differs most.")
    elif passed and not bitwise:
        parts.append("Equal within the tolerance, not bit for bit.")
    if found.buffers_differing:
        parts.append(
            "Buffers that a layer updates in its forward, such as the running statistics of "
            "BatchNorm, move twice per step in a layer that is recomputed."
        )
    return " ".join(parts)


def _eager_note(difference: _Difference | None, is_as_eager: bool) -> str:
    if difference is None:
        return ""
    off = difference.worst_difference
    if is_as_eager:
        return f"Compiled code itself is within {off:.1e} of eager code."
    return (
        f"Compiled code itself, with no policy on it, is off by {off:.1e} from eager code, in "
        f"{difference.worst_parameter}."
    )
