"""Forecasts the peak of a step without running it: fake tensors, their storages counted.

No device memory is used and no kernel runs. What is exact: every storage that an op returns, when
it is freed, and which phase holds the peak. What is modelled: gradients that the autograd engine
adds in place (under a dispatch mode it does not), and the workspaces inside kernels, which are
learnt from a profiled step. What is not: fragmentation of a caching allocator.

A step whose shapes depend on its data has no forecast. `track_step` counts the same storages while
such a step runs for real.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search import policy_runtime
from sac_search.apply import PolicyModule, applied
from sac_search.device import allocated_bytes, listening_to_phases, phases_marked
from sac_search.errors import CannotForecast
from sac_search.fake import FAKE_DEVICE, FakeMode, faked
from sac_search.policy import Policy
from sac_search.policy_runtime import site_of
from sac_search.ranks import local_tensor
from sac_search.records import Phase
from sac_search.timeline import StepLog, Timeline
from sac_search.workload import Workload
from sac_search.workspaces import WorkspaceKey, workspace_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step would need."""

    peak_bytes: int
    """Highest bytes in live tensors."""
    peak_phase: Phase
    """The phase that holds it."""
    phase_peak_bytes: dict[Phase, int]
    """Highest bytes in each phase."""
    resident_bytes: int
    """Parameters, buffers, optimizer state and batch."""
    layer_bytes: dict[str, LayerBytes] = field(default_factory=dict)
    """What each watched layer keeps and needs."""
    recomputed: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    """For each checkpointed layer, calls of each op and site that the backward runs again."""
    timeline: Timeline | None = None
    """Live bytes by kind over the step; None where it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The memory of one layer under the policy that was forecast."""

    saved_bytes: int
    """Growth of live bytes over its forward pass: what it keeps until its backward."""
    forward_peak_bytes: int
    """Highest bytes during its forward, over those at its beginning."""


@contextlib.contextmanager
def fakes_refused() -> Iterator[None]:
    """Raises CannotForecast where the block needs more than fake tensors have."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotForecast(
            f"the step reads values: {error} needs them, and fake tensors have none"
        ) from error
    except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
        raise CannotForecast(f"fake tensors do not support the step: {error}") from error


def forecast_step(
    workload: Workload,
    policy: Policy | PolicyModule,
    *,
    workspaces: Mapping[WorkspaceKey, int] | None = None,
    values: Sequence[Any] = (),
    layer_names: tuple[str, ...] = (),
    foreign_bytes: int = 0,
    with_timeline: bool = False,
) -> Forecast:
    """Returns what one step under `policy` would need.

    Optimizer state that does not exist yet is made in a step before the one that counts. The model,
    optimizer and batch hold fake tensors while this runs and are as they were afterwards. Tensors
    on the meta device are taken for the CPU's. `values` are those that a real step read in its
    forward (see `record_values`), handed out again in the same order. `foreign_bytes` are those of
    tensors that belong to neither model, optimizer nor batch but are there all the same.

    Raises:
        CannotForecast: the step reads values that are not known, or runs an op without fake form.
    """
    mode = FakeMode()
    with fakes_refused(), faked(workload, mode) as fake:
        tracker = StorageTracker(
            workspaces or {}, values, device_type=fake.parameters()[0].device.type
        )
        return _count_step(
            fake, policy, tracker, mode, layer_names, foreign_bytes, with_timeline=with_timeline
        )


def track_step(
    workload: Workload,
    policy: Policy | PolicyModule,
    *,
    device: torch.device,
    layer_names: tuple[str, ...] = (),
    foreign_bytes: int = 0,
    workspaces: Mapping[WorkspaceKey, int] | None = None,
    with_timeline: bool = False,
) -> Forecast:
    """Returns what one step under `policy` needs, counted while it runs on real tensors.

    For steps that fake tensors cannot run, since shapes depend on values: boolean masks, routing to
    experts. The parameters move as in any step. The optimizer's state must exist already. A step
    that leaves its gradients to the next one runs twice; afterwards gradients are dropped. Whatever
    the step raises goes through, running out of memory included.

    Known limits: of the memory that a kernel takes while it runs, only learnt `workspaces` are
    seen; the batch that a callable returns is held for the whole step; and the count is for the
    routing of this very batch.
    """
    tracker = StorageTracker(workspaces or {}, device_type=device.type)
    workload.drop_gradients()
    gc.collect()
    real = replace(workload, batch=workload.next_batch())
    return _count_step(
        real,
        policy,
        tracker,
        contextlib.nullcontext(),
        layer_names,
        foreign_bytes,
        with_timeline=with_timeline,
    )


def _count_step(
    workload: Workload,
    policy: Policy | PolicyModule,
    tracker: StorageTracker,
    mode: contextlib.AbstractContextManager[Any],
    layer_names: tuple[str, ...],
    foreign_bytes: int,
    *,
    with_timeline: bool,
) -> Forecast:
    optimizer = workload.optimizer
    states = len(optimizer.state) if optimizer is not None else 0
    if with_timeline:
        tracker.log = StepLog(workload, tracker.key_of, foreign_bytes)
    for tensor in _own_tensors(workload):
        tracker.note(tensor)
    tracker.live_bytes += foreign_bytes
    tracker.begin()
    try:
        with (
            applied(workload.bare_model, policy),
            phases_marked(workload.model),
            _random_states_noted(tracker),
            _resizes_noted(tracker),
            _layers_noted(tracker, workload.bare_model),
            mode,
            tracker,
            listening_to_phases(tracker.enter_phase),
            tracker.watching(workload.bare_model, layer_names),
            tracker.log.following(layer_names) if tracker.log else contextlib.nullcontext(),
        ):
            workload.run_step()
            has_made_state = optimizer is not None and len(optimizer.state) > states
            if has_made_state or any(p.grad is not None for p in workload.parameters()):
                tracker.begin()
                workload.run_step()
    finally:
        workload.drop_gradients()
    peaks = tracker.phase_peak_bytes
    return Forecast(
        peak_bytes=max(peaks.values()),
        peak_phase=max(peaks, key=lambda phase: peaks[phase]),
        phase_peak_bytes=peaks,
        resident_bytes=foreign_bytes + tracker.bytes_of(_own_tensors(workload)),
        layer_bytes=tracker.layer_bytes,
        recomputed={name: dict(calls) for name, calls in tracker.recomputed.items()},
        timeline=tracker.log.timeline() if tracker.log else None,
    )


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, per phase of the step.

    The tensors may be fake or real. Known limits: memory that a kernel takes and gives back while
    it runs is seen as far as `workspaces` tell; allocators round sizes up, and hold more than what
    is alive; a storage that is made by code outside of torch's ops is not seen; sums of gradients
    in user code that look like the engine's own are taken for them.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        workspaces: Mapping[WorkspaceKey, int],
        values: Sequence[Any] = (),
        *,
        device_type: str = "cpu",
    ) -> None:
        super().__init__()
        self.live_bytes = 0
        self.log: StepLog | None = None
        self._device_type = device_type
        self.phase_peak_bytes: dict[Phase, int] = {}
        self.layer_bytes: dict[str, LayerBytes] = {}
        self.recomputed: dict[str, collections.Counter[tuple[str, str]]] = {}
        self.running_layer = ""
        self._growth: collections.Counter[str] = collections.Counter()
        self._workspaces = workspaces
        self._values = values
        self._values_read = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._producers: dict[int, object] = {}
        self._phase = Phase.FORWARD
        self._deferred = False
        self._highest_bytes = 0

    def begin(self) -> None:
        """Forgets the peaks so far: the step that counts begins."""
        self.phase_peak_bytes.clear()
        self.layer_bytes.clear()
        self.recomputed.clear()
        self._growth.clear()
        self._values_read = 0
        self._phase = Phase.FORWARD
        if self.log:
            self.log.begin()
        self._note_peak()

    def enter_phase(self, phase: Phase) -> None:
        """A phase of the step begins."""
        self._settle()
        if phase is Phase.BACKWARD:
            self._growth.clear()
        self._phase = phase
        if self.log:
            self.log.enter_phase(phase)

    def note(self, value: Any) -> None:
        """Counts the storage of `value`, if it is a tensor that was not seen before."""
        storage = self._storage_of(value)
        if storage is None or storage._cdata in self._storages:
            return
        key = storage._cdata
        self._sizes[key] = storage.nbytes()
        self.live_bytes += self._sizes[key]
        if self.log:
            again = bool(self.running_layer) and not _in_forward()
            self.log.add(key, self._sizes[key], recomputed=again)

        def forget(_: object) -> None:
            del self._storages[key]
            self._producers.pop(key, None)
            self.live_bytes -= self._sizes.pop(key)
            if self.log:
                self.log.remove(key)

        self._storages[key] = weakref.ref(storage, forget)
        self._producers[key] = _current_node()

    def note_size(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage by the size that it has now, if it was counted before."""
        if storage._cdata not in self._sizes:
            return
        self._settle()
        self.live_bytes += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()
        if self.log:
            self.log.resize(storage._cdata, storage.nbytes())
        self._note_peak()

    def key_of(self, value: Any) -> int | None:
        """Returns what tells the storage of `value` from others, if it has one that is counted."""
        storage = self._storage_of(value)
        return None if storage is None else storage._cdata

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of the storages of `tensors`, each once."""
        storages = (self._storage_of(tensor) for tensor in tensors)
        return sum({s._cdata: s.nbytes() for s in storages if s is not None}.values())

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module, layer_names: tuple[str, ...]) -> Iterator[None]:
        """Notes what each layer keeps and needs in its forward."""
        handles = []
        for name in layer_names:
            layer = model.get_submodule(name)
            enter, leave = self._layer_hooks(name)
            handles.append(layer.register_forward_pre_hook(enter))
            handles.append(layer.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._settle()
        if func is _READ_VALUE and _in_forward() and self._values_read < len(self._values):
            self._values_read += 1
            return self._values[self._values_read - 1]
        kwargs = kwargs or {}
        if func is FAKE_DEVICE:
            return func(*args, **kwargs)
        if self.running_layer and not _in_forward():
            calls = self.recomputed.setdefault(self.running_layer, collections.Counter())
            calls[str(func), site_of(str(func), args)] += 1
        output = func(*args, **kwargs)
        self._deferred = self._is_engine_sum(func, args)
        pytree.tree_map_(self.note, output)
        if not self._deferred:
            self._note_peak(self._workspace_of(func, args))
        return output

    def _storage_of(self, value: Any) -> torch.UntypedStorage | None:
        if not isinstance(value, torch.Tensor) or value.device.type != self._device_type:
            return None
        try:
            return cast("torch.Tensor", local_tensor(value)).untyped_storage()
        except (RuntimeError, NotImplementedError):  # no storage of its own
            return None

    def _layer_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        begun: list[int] = []

        def enter(module: torch.nn.Module, args: Any) -> None:
            begun.append(self.live_bytes)
            self._highest_bytes = self.live_bytes

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            before = begun.pop()
            # A layer that is called again before a backward pass keeps both calls' tensors.
            self._growth[name] += self.live_bytes - before
            known = self.layer_bytes.get(name, LayerBytes(saved_bytes=0, forward_peak_bytes=0))
            self.layer_bytes[name] = LayerBytes(
                saved_bytes=max(known.saved_bytes, self._growth[name]),
                forward_peak_bytes=max(known.forward_peak_bytes, self._highest_bytes - before),
            )

        return enter, leave

    def _settle(self) -> None:
        # The sum of two gradients: where the engine would have added in place, one of them is gone
        # by now, and the sum took its place.
        if self._deferred:
            self._deferred = False
            self._note_peak()

    def _note_peak(self, workspace_bytes: int = 0) -> None:
        reached = self.live_bytes + workspace_bytes
        if reached > self.phase_peak_bytes.get(self._phase, 0):
            self.phase_peak_bytes[self._phase] = reached
        if self.log:
            self.log.reach(self._phase, workspace_bytes)
        self._highest_bytes = max(self._highest_bytes, reached)

    def _workspace_of(self, func: Any, args: tuple[Any, ...]) -> int:
        if not self._workspaces:
            return 0
        return self._workspaces.get(workspace_key(str(func), args), 0)

    def _is_engine_sum(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the autograd engine itself adds two gradients of one tensor.

        It does so in place unless a dispatch mode is active (`InputBuffer::accumulate`, torch 2.13:
        `can_accumulate_inplace` is false for whatever looks like a tensor subclass.)
        """
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        node = _current_node()
        if node is None or not all(isinstance(a, torch.Tensor) for a in args[:2]):
            return False
        earlier, later = (self._producers.get(a.untyped_storage()._cdata) for a in args[:2])
        return later == node and earlier != node


_READ_VALUE = torch.ops.aten._local_scalar_dense.default


class _ValueRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is _READ_VALUE and _in_forward():
            self.values.append(output)
        return output


@contextlib.contextmanager
def record_values() -> Iterator[list[Any]]:
    """Records, inside the block, the values that Python code reads from tensors in a forward pass.

    Models that look at their data (is this mask all ones? which expert is idle?) take the same path
    in a forecast when the values that a real step read are handed to it.
    """
    recorder = _ValueRecorder()
    with recorder:
        yield recorder.values


def _in_forward() -> bool:
    return torch._C._current_graph_task_id() == -1


def _current_node() -> object:
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def foreign_tensor_bytes(workload: Workload, device: torch.device) -> int:
    """Returns the bytes on `device` in tensors that are not the workload's, between two steps."""
    tracker = StorageTracker({}, device_type=device.type)
    return max(0, allocated_bytes(device) - tracker.bytes_of(_own_tensors(workload)))


def _own_tensors(workload: Workload) -> list[torch.Tensor]:
    own: list[Any] = [*workload.parameters(), *workload.model.buffers()]
    if workload.optimizer is not None:
        own += pytree.tree_leaves(list(workload.optimizer.state.values()))
    own += [] if callable(workload.batch) else pytree.tree_leaves(workload.batch)
    return [tensor for tensor in own if isinstance(tensor, torch.Tensor)]


# --- what the tracker is told ---------------------------------------------------------------------


@contextlib.contextmanager
def _random_states_noted(tracker: StorageTracker) -> Iterator[None]:
    """Counts the generator's state, which each checkpointed region keeps on the CPU."""
    plain = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = plain()
        tracker.note(state)
        return state

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = plain


@contextlib.contextmanager
def _resizes_noted(tracker: StorageTracker) -> Iterator[None]:
    """Tells the tracker of storages that are resized: FSDP2 frees gathered parameters like this."""
    plain: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        tracker.note_size(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextlib.contextmanager
def _layers_noted(tracker: StorageTracker, model: torch.nn.Module) -> Iterator[None]:
    """Tells the tracker which checkpointed layer runs, also when it is recomputed."""
    names = {id(module): name for name, module in model.named_modules()}
    plain = policy_runtime._run_forward

    def run_forward(forward: Any, layer: torch.nn.Module, *rest: Any) -> Any:
        outer, tracker.running_layer = tracker.running_layer, names[id(layer)]
        try:
            return plain(forward, layer, *rest)
        finally:
            tracker.running_layer = outer

    policy_runtime._run_forward = run_forward  # type: ignore[assignment]
    try:
        yield
    finally:
        policy_runtime._run_forward = plain
