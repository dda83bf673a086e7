"""Fake tensors in the place of a workload's real ones, and back.

They have shapes, dtypes and storages, but no memory and no values. Tensors on the meta device
become fake tensors of the CPU, so that a step runs that was written for some accelerator.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from sac_search.workload import Workload

FAKE_DEVICE = torch.ops.prim.device.default
"""What a dispatch mode sees when someone asks a fake tensor for its device: no op of the step."""

_CPU = torch.device("cpu")
_READ_VALUE = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default
# Positions, and masks made of them; more would take time and memory that fakes are there to spare.
_MOST_KNOWN_ELEMENTS = 2**20


class FakeMode(FakeTensorMode):
    """Runs ops on fake tensors, and knows the values of those that come from constants alone.

    A model that looks at its positions (are these several sequences in one?) goes the way that it
    would go for real, although nobody knows its data. Known are small tensors that no parameter, no
    batch and no random number went into.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._values = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What a function mode makes of the step's calls is not for those made in here.
        with torch._C.DisableTorchFunction():
            if func is _READ_VALUE and args[0] in self._values:
                with no_dispatch():
                    return self._values[args[0]].item()
            output = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
                self._follow(func, args, kwargs, output)
        return output

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = func is _LIFT or all(tensor in self._values for tensor in tensors)
        if known and self._can_compute(func, output):
            with no_dispatch():
                real_args, real_kwargs = pytree.tree_map(self._value_of, (args, kwargs))
                real = func(*real_args, **real_kwargs)
            for fake, value in zip(
                pytree.tree_leaves(output), pytree.tree_leaves(real), strict=True
            ):
                if isinstance(fake, FakeTensor):
                    self._values[fake] = value
        elif func._schema.is_mutable:
            self._forget(tensors)

    def _can_compute(self, func: Any, output: Any) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__:
            return False
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        return sum(leaf.numel() for leaf in leaves) <= _MOST_KNOWN_ELEMENTS

    def _value_of(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _CPU
        if isinstance(leaf, FakeTensor):
            return self._values[leaf]
        # Only a constant that is lifted; what is done to its fake must not be done to it.
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        changed = {
            self._values[tensor].untyped_storage()._cdata
            for tensor in tensors
            if tensor in self._values
        }
        for fake, value in list(self._values.items()) if changed else ():
            if value.untyped_storage()._cdata in changed:
                del self._values[fake]


@contextlib.contextmanager
def faked(workload: Workload, mode: FakeTensorMode) -> Iterator[Workload]:
    """Puts fake tensors into the model, optimizer and batch, and the real ones back afterwards.

    What it gives is the workload with its batch faked as well; the step then runs under `mode`.
    """
    on_meta = workload.parameters()[0].is_meta
    swap = _Swap(mode, meta_on_cpu=on_meta)
    try:
        swap.fake_model(workload.model)
        if workload.optimizer is not None:
            swap.fake_optimizer(workload.optimizer)
        batch = swap.fake_tree(workload.next_batch())
        with _seen_as_real(), any_device_as_cpu() if on_meta else contextlib.nullcontext():
            yield replace(workload, batch=batch)
    finally:
        swap.put_back()


@contextlib.contextmanager
def any_device_as_cpu() -> Iterator[None]:
    """Takes every device that the step names for the CPU: in `device=`, `.to()` and autocast.

    A step written for an accelerator then runs on fake tensors of the CPU, wherever its own code
    remembers the device that it was built for.
    """
    autocast: Any = torch.amp.autocast_mode.autocast
    plain = autocast.__init__

    def start_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, "cpu", *args, **kwargs)

    autocast.__init__ = start_on_cpu
    try:
        with _OnCPU():
            yield
    finally:
        autocast.__init__ = plain


class _OnCPU(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], _CPU), {}
        elif func is torch.Tensor.to:
            args = tuple(_CPU if _names_device(value) else value for value in args)
        return func(*args, **kwargs)


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device | str)


class _Swap:
    def __init__(self, mode: FakeTensorMode, *, meta_on_cpu: bool) -> None:
        self._mode = mode
        self._meta_on_cpu = meta_on_cpu
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
            with torch._C.DisableTorchFunction():
                fake = self._fake_of(tensor.detach())
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._keep(tensor, fake)
        return self._fakes[id(tensor)]

    def put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._meta_on_cpu and type(tensor) is torch.Tensor and tensor.is_meta:
            on_cpu: torch.Tensor = FakeTensor(self._mode, tensor, _CPU)
            return on_cpu
        return self._mode.from_tensor(tensor)

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


def _setter(table: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    return lambda: table.__setitem__(name, value)


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
