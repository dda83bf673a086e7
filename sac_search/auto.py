"""Checkpoints a model in the script that trains it: measures, picks, verifies, applies."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sac_search import device as devices
from sac_search import units
from sac_search.api import search_here
from sac_search.apply import apply_policy, remove_policy
from sac_search.artifacts import load_result
from sac_search.errors import StudyError, UsageError
from sac_search.options import Listener, SearchOptions
from sac_search.policy import Policy
from sac_search.report import rows
from sac_search.study.result import SearchResult
from sac_search.worker.session import SessionSettings, environment_of
from sac_search.workload import Workload, check_workload

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_TRIALS = 25
_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPolicy:
    """The policy that `auto_checkpoint` applied, and its figures."""

    policy: Policy
    """The policy; without layers where the step fits as it is."""
    result: SearchResult
    """Everything that was measured: baselines, trials, verification, environment."""
    from_cache: bool
    """Whether an earlier search of the same environment had found it."""

    @property
    def peak_bytes(self) -> int:
        """Its measured peak, as the budget limits it."""
        best = self.result.best
        assert best is not None and best.measurement is not None
        return best.measurement.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Its measured step time."""
        best = self.result.best
        assert best is not None and best.step_seconds is not None
        return best.step_seconds

    @property
    def overhead(self) -> float | None:
        """Step time above that without checkpointing, as a fraction; None where that never ran."""
        assert self.result.best is not None
        return self.result.overhead_of(self.result.best)

    def __str__(self) -> str:
        return "\n".join(rows.headline(self.result))


def auto_checkpoint(
    model: torch.nn.Module,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    memory_budget: str | int,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[Workload], torch.Tensor] | None = None,
    layers: str | None = None,
    trials: int = _TRIALS,
    steps: int = _STEPS,
    cache: str | os.PathLike[str] | None = None,
    listener: Listener | None = None,
) -> AppliedPolicy:
    """Makes `model` train under `memory_budget`, as fast as checkpointing allows.

    Measures training steps in this process, verifies the gradients of the fastest policy whose peak
    stays under the budget, applies it to `model`, and puts everything else back bit for bit:
    parameters, buffers, gradients, optimizer state, random states, modes. Call it before
    `torch.compile`, DDP or `fully_shard`; `sac_search.remove_checkpointing(model)` undoes it.

    `loss_fn(model, batch)` returns the scalar loss. `batch` is one batch on the model's device, or
    a callable that returns one: the largest that training will meet. `step(workload)` replaces the
    default step (forward, backward, optimizer) where yours has a scaler, autocast or accumulation.
    `memory_budget` limits the peak of the whole step: "8GB" (10^9 bytes each), "22GiB" (2^30),
    "80%" of the device's memory, or a number of bytes. A model in evaluation mode is measured in
    training mode.

    With `cache`, a folder, a second run in the same environment (model, shapes, budget, torch,
    device, …) applies what the first one found without running a step; an interrupted one goes on.

    Raises:
        NoPolicyFits: no policy stays under the budget; nothing is applied.
        WorkloadError: the step itself fails.
        UsageError: an argument cannot be used.
    """
    workload = Workload(
        model, loss_fn, batch, optimizer, step, layers, batch_size=_leading_size(batch)
    )
    check_workload(workload, "auto_checkpoint()")
    _refuse_ranks()
    device = workload.parameters()[0].device
    budget_bytes = parse_budget(memory_budget, devices.device_memory(device)[1])
    fingerprint = _fingerprint(workload, device)
    with contextlib.ExitStack() as stack:
        if cache is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sac-search-")))
        else:
            root = Path(cache)
        options = SearchOptions(
            budget_gb=budget_bytes / units.GIB,
            study=f"{type(model).__name__}-{fingerprint[:10]}-{budget_bytes}",
            root=root,
            layers=layers,
            trials=trials,
            steps=steps,
        )
        result = _stored(options)
        from_cache = result is not None
        if result is None:
            stack.enter_context(_training(model))
            result = search_here(workload, options, listener, fingerprint)
    devices.free_cached_memory(device)
    if not result.policy.changes_nothing:
        apply_policy(model, result.policy)
    return AppliedPolicy(policy=result.policy, result=result, from_cache=from_cache)


def remove_checkpointing(model: torch.nn.Module) -> int:
    """Undoes `auto_checkpoint` exactly. Returns how many layers were checkpointed.

    Raises:
        UsageError: another library changed a layer's class since.
    """
    return remove_policy(model)


def parse_budget(budget: str | int, total_bytes: int) -> int:
    """Returns a budget in bytes; a share is one of `total_bytes`.

    Raises:
        UsageError: it is not a size, or not more than nothing.
    """
    found: int | None = None
    if isinstance(budget, int) and not isinstance(budget, bool):
        found = budget
    elif isinstance(budget, str):
        share = _SHARE.fullmatch(budget)
        found = (
            round(float(share[1]) / 100 * total_bytes)
            if share is not None
            else units.parse_bytes(budget)
        )
    if found is None or found <= 0:
        raise UsageError(
            f"memory_budget is {budget!r}; it must be a size such as '8GB' or '22GiB', a share of "
            "the device's memory such as '80%', or a number of bytes"
        )
    return found


def _refuse_ranks() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise UsageError(
                f"auto_checkpoint() measures in one process, and this one is of {ranks} ranks, "
                "whose steps wait for each other; call it before init_process_group on one rank's "
                "share, or search with torchrun and apply the exported policy"
            )


def _stored(options: SearchOptions) -> SearchResult | None:
    """Returns what an earlier search to the end found; None where there was none."""
    assert options.study is not None
    try:
        result = load_result(options.root / options.study)
    except StudyError:
        return None  # none, or a damaged one: the search says so
    return result if result.best is not None else None


@contextlib.contextmanager
def _training(model: torch.nn.Module) -> Iterator[None]:
    """Puts a model that is in evaluation mode into training mode, and back.

    One in training mode stays as it is, with the parts that its owner keeps in evaluation mode.
    """
    flags = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _leading_size(batch: Any) -> int | None:
    """Returns the first dimension of the batch's first tensor: samples in a step, as a rule."""
    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    return int(tensors[0].shape[0]) if tensors else None


def _fingerprint(workload: Workload, device: torch.device) -> str:
    """Returns a hash of all that a policy depends on: what steps run, on what, and where."""
    model, optimizer = workload.model, workload.optimizer
    environment = environment_of(
        workload,
        SessionSettings(spec=type(model).__name__),
        "",
        device=device.type,
        figures=devices.describe_device(device),
        clock=str(devices.default_clock(device)),
        allocator_settings=devices.allocator_settings(device),
    )
    parts = [
        repr(environment),
        repr(model),
        *(
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in model.named_parameters()
        ),
        "a callable" if callable(workload.batch) else _shapes(workload.batch),
        _source(workload.loss_fn),
        _source(workload.step),
        *map(_source, dict.fromkeys(type(module) for module in model.modules())),
        type(optimizer).__name__,
        repr(None if optimizer is None else sorted(optimizer.defaults)),
        repr(None if optimizer is None else optimizer.defaults.get("foreach")),
        repr(workload.layers),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _shapes(batch: Any) -> str:
    leaves, structure = pytree.tree_flatten(batch)
    kinds = [
        f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{structure} {kinds}"


def _source(thing: Any) -> str:
    """Returns the text of a function or class where there is one, else its name."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return str(getattr(thing, "__qualname__", type(thing).__qualname__))
