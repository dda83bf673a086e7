"""Checkpoints a model in the script that trains it: measures, picks, verifies, applies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sac_search import device as devices
from sac_search import units
from sac_search.api import search_here
from sac_search.apply import apply_policy, remove_policy
from sac_search.artifacts import load_result
from sac_search.distributed import refuse_process_group
from sac_search.errors import StudyError, UsageError
from sac_search.fingerprint import fingerprint_of
from sac_search.options import Listener, SearchOptions
from sac_search.policy import Policy
from sac_search.report import rows
from sac_search.study.result import SearchResult
from sac_search.study.store import open_study
from sac_search.worker.session import (
    SessionSettings,
    environment_of,
    refuse_own_checkpointing,
)
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
    refuse_process_group()
    refuse_own_checkpointing(model)
    device = workload.parameters()[0].device
    budget_bytes = parse_budget(memory_budget, devices.device_memory(device)[1])
    fingerprint = fingerprint_of(workload)
    place = _place_hash(workload, device, fingerprint)
    with contextlib.ExitStack() as stack:
        if cache is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sac-search-")))
        else:
            root = Path(cache)
        options = SearchOptions(
            budget_gb=budget_bytes / units.GIB,
            study=f"{type(model).__name__}-{place}-{budget_bytes}",
            root=root,
            layers=layers,
            trials=trials,
            steps=steps,
            report=cache is not None,
        )
        result = _stored(options)
        from_cache = result is not None
        if result is None:
            stack.enter_context(_training(model))
            result = search_here(workload, options, listener, fingerprint)
            if cache is None:
                result = replace(result, folder=None)
    devices.free_cached_memory(device)
    if result.interrupted:
        raise KeyboardInterrupt  # what was measured is kept in the cache, and goes on next time
    if not result.policy.changes_nothing:
        apply_policy(workload.bare_model, result.policy)
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


def _stored(options: SearchOptions) -> SearchResult | None:
    """Returns what an earlier search to the end found; None where there was none."""
    assert options.study is not None
    try:
        is_finished = open_study(options.root / options.study, options.storage).is_finished
        result = load_result(options.root / options.study, options.storage)
    except StudyError:
        return None  # none, or a damaged one: the search says so
    return result if is_finished and result.best is not None else None


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


def _place_hash(workload: Workload, device: torch.device, fingerprint: str) -> str:
    """Returns a short hash of a step and of where it runs."""
    environment = environment_of(
        workload,
        SessionSettings(spec=type(workload.model).__name__),
        fingerprint,
        device=device.type,
        figures=devices.describe_device(device),
        clock=str(devices.default_clock(device)),
        allocator_settings=devices.allocator_settings(device),
    )
    return hashlib.sha256(repr(environment).encode()).hexdigest()[:10]
