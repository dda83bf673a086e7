"""Forecasts the peak of a step without running it: fake tensors, their storages counted.

No device memory is used and no kernel runs. What is exact: every storage that an op returns, when
it is freed, and which phase holds the peak. What is modelled: gradients that the autograd engine
adds in place (under a dispatch mode it does not), and the workspaces inside kernels, which are
learnt from a profiled step. What is not: fragmentation of a caching allocator.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search import policy_runtime
from sac_search.apply import PolicyModule, applied
from sac_search.device import allocated_bytes, listening_to_phases, phases_marked
from sac_search.policy import Policy
from sac_search.policy_runtime import site_of
from sac_search.records import Phase
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The memory of one layer under the policy that was forecast."""

    saved_bytes: int
    """Growth of live bytes over its forward pass: what it keeps until its backward."""
    forward_peak_bytes: int
    """Highest bytes during its forward, over those at its beginning."""


class CannotForecast(Exception):
    """The step asks for values, which fake tensors do not have."""


def forecast_step(
    workload: Workload,
    policy: Policy | PolicyModule,
    *,
    workspaces: Mapping[WorkspaceKey, int] | None = None,
    values: Sequence[Any] = (),
    layer_names: tuple[str, ...] = (),
    foreign_bytes: int = 0,
) -> Forecast:
    """Returns what one step under `policy` would need.

    The optimizer's state must exist already. The model, optimizer and batch hold fake tensors while
    this runs and are as they were afterwards. `values` are those that a real step read in its
    forward (see `record_values`), handed out again in the same order. `foreign_bytes` are those of
    tensors that belong to neither model, optimizer nor batch but are there all the same.

    Raises:
        CannotForecast: the step reads values that are not known.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = StorageTracker(
        workspaces or {}, values, device_type=workload.parameters()[0].device.type
    )
    with _faked(workload, mode) as fake, _seen_as_real():
        for tensor in fake.tensors:
            tracker.note(tensor)
        tracker.live_bytes += foreign_bytes
        resident_bytes = tracker.live_bytes
        try:
            with (
                applied(workload.model, policy),
                phases_marked(workload.model),
                _random_states_noted(tracker),
                _layers_noted(tracker, workload.model),
                mode,
                tracker,
            ):
                fake.workload.run_step()
                tracker.begin()
                with (
                    listening_to_phases(tracker.enter_phase),
                    tracker.watching(workload.model, layer_names),
                ):
                    fake.workload.run_step()
        except DataDependentOutputException as error:
            raise CannotForecast(f"the step reads values: {error}") from error
        finally:
            workload.drop_gradients()
    peaks = tracker.phase_peak_bytes
    return Forecast(
        peak_bytes=max(peaks.values()),
        peak_phase=max(peaks, key=lambda phase: peaks[phase]),
        phase_peak_bytes=peaks,
        resident_bytes=resident_bytes,
        layer_bytes=tracker.layer_bytes,
        recomputed={name: dict(calls) for name, calls in tracker.recomputed.items()},
    )


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, per phase of the step."""

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
        self._producers: dict[int, object] = {}
        self._phase = Phase.FORWARD
        self._deferred = False
        self._highest_bytes = 0

    def begin(self) -> None:
        """Forgets the peaks so far: the step that counts begins."""
        self.phase_peak_bytes.clear()
        self.recomputed.clear()
        self._values_read = 0
        self._phase = Phase.FORWARD
        self._note_peak()

    def enter_phase(self, phase: Phase) -> None:
        """A phase of the step begins."""
        self._settle()
        if phase is Phase.BACKWARD:
            self._growth.clear()
        self._phase = phase

    def note(self, value: Any) -> None:
        """Counts the storage of `value`, if it is a tensor that was not seen before."""
        if not isinstance(value, torch.Tensor) or value.device.type != self._device_type:
            return
        try:
            storage = value.untyped_storage()
        except (RuntimeError, NotImplementedError):  # no storage of its own
            return
        key = storage._cdata
        if key in self._storages:
            return
        size_bytes = storage.nbytes()
        self.live_bytes += size_bytes

        def forget(_: object) -> None:
            del self._storages[key]
            self._producers.pop(key, None)
            self.live_bytes -= size_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self._producers[key] = _current_node()

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
        if self.running_layer and not _in_forward():
            calls = self.recomputed.setdefault(self.running_layer, collections.Counter())
            calls[str(func), site_of(str(func), args)] += 1
        output = func(*args, **kwargs)
        self._deferred = self._is_engine_sum(func, args)
        pytree.tree_map_(self.note, output)
        if not self._deferred:
            self._note_peak(self._workspace_of(func, args))
        return output

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
    own: list[Any] = [*workload.parameters(), *workload.model.buffers()]
    if workload.optimizer is not None:
        own += pytree.tree_leaves(list(workload.optimizer.state.values()))
    own += [] if callable(workload.batch) else pytree.tree_leaves(workload.batch)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in own
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type
    }
    return max(0, allocated_bytes(device) - sum(storages.values()))


# --- fake tensors in the place of real ones -------------------------------------------------------


@dataclass(slots=True)
class _Fake:
    workload: Workload
    tensors: list[torch.Tensor]


@contextlib.contextmanager
def _faked(workload: Workload, mode: FakeTensorMode) -> Iterator[_Fake]:
    """Puts fake tensors into the same model, optimizer and batch, and the real ones back."""
    swap = _Swap(mode)
    try:
        swap.fake_model(workload.model)
        if workload.optimizer is not None:
            swap.fake_optimizer(workload.optimizer)
        batch = swap.fake_tree(workload.next_batch())
        yield _Fake(workload=replace(workload, batch=batch), tensors=swap.tensors)
    finally:
        swap.put_back()


class _Swap:
    def __init__(self, mode: FakeTensorMode) -> None:
        self.tensors: list[torch.Tensor] = []
        self._mode = mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._undo: list[Callable[[], None]] = []

    def fake_model(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        self._undo.append(_setter(table, name, tensor))
                        table[name] = self.fake(tensor)  # type: ignore[assignment]

    def fake_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state
        fake_state: Any = collections.defaultdict(dict)
        for parameter, entries in state.items():
            fake_state[self.fake(parameter)] = {
                name: self._fake_state(value) for name, value in entries.items()
            }
        self._undo.append(lambda: setattr(optimizer, "state", state))
        optimizer.state = fake_state
        for group in optimizer.param_groups:
            self._undo.append(_setter(group, "params", group["params"]))
            group["params"] = [self.fake(parameter) for parameter in group["params"]]

    def fake_tree(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self.fake, tree)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._fakes:
            fake: torch.Tensor = self._mode.from_tensor(tensor.detach())
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._keep(tensor, fake)
        return self._fakes[id(tensor)]

    def put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _fake_state(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 and value.device.type == "cpu":
            # A step count is read with .item(), so it has to be a constant made inside the mode.
            number = value.item()
            with self._mode:
                constant = torch.tensor(number, dtype=value.dtype)
            self._keep(value, constant)
            return constant
        return self.fake(value)

    def _keep(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        self._fakes[id(tensor)] = fake
        self._originals.append(tensor)  # alive, so that its id stays its own
        self.tensors.append(fake)


def _setter(table: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(name, value)


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


@contextlib.contextmanager
def _seen_as_real() -> Iterator[None]:
    """Keeps transformers from taking another path because it sees fake tensors.

    It asks `is_tracing()`, true for fake tensors, whether it may skip building an attention mask; a
    real step skips it. The function is imported by name, so each module that has it is changed.
    """
    changed: list[tuple[Any, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("transformers."):
            continue
        for name in ("is_tracing", "is_fake_tensor"):
            function = vars(module).get(name)
            if callable(function):
                changed.append((module, name, function))
                setattr(module, name, lambda *args, **kwargs: False)
    try:
        yield
    finally:
        for module, name, function in changed:
            setattr(module, name, function)
