"""Watches a forward pass: which modules ran, and which of them worked on which others' outputs.

Holds no activation alive and changes nothing in the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Enough to see a loop; a cell called a million times must not cost a million records.
_MOST_CALLS = 16
# torch has no annotations for it.
_refer_weakly: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    start: int
    """Position among the starts and ends of all calls."""
    bit: int
    """Marks what was computed from this call's output; 0 when nobody will ask."""
    sources: int
    """The bits of the calls that this call's input was computed from."""
    end: int = sys.maxsize
    outputs: frozenset[tuple[Any, int]] = frozenset()
    """Storage and version of every tensor that came out."""

    def contains(self, other: Call) -> bool:
        """Returns whether `other` ran inside this call."""
        return self.start < other.start and other.end < self.end

    def feeds(self, other: Call) -> bool:
        """Returns whether `other` worked on what came out of this call."""
        return bool(self.bit & other.sources)


Calls = defaultdict[nn.Module, list[Call]]


class _Lineage(TorchFunctionMode):
    """Knows for every live storage from which calls' outputs it was computed.

    So a residual addition or a dropout between two blocks does not hide that they are a chain.
    Storages are held weakly: their memory is freed as always, and only their identity is kept from
    being used again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[Any, int] = {}
        self._sweep_at = 4096

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        changed = args[0] if func is torch.Tensor.__setitem__ else result
        if isinstance(changed, torch.Tensor | tuple | list) and type(changed) is not torch.Size:
            self.add(changed, self.find((args, kwargs)))
        return result

    def find(self, value: Any) -> int:
        """Returns the bits of the calls that the tensors in `value` were computed from."""
        sources = 0
        for storage, _ in _storages(value):
            sources |= self._sources.get(storage, 0)
        return sources

    def add(self, value: Any, sources: int) -> None:
        """Notes that the tensors in `value` were computed from these calls."""
        if not sources:
            return
        for storage, _ in _storages(value):
            self._sources[storage] = self._sources.get(storage, 0) | sources
        if len(self._sources) > self._sweep_at:
            self._sources = {s: bits for s, bits in self._sources.items() if not s.expired()}
            self._sweep_at = max(4096, 2 * len(self._sources))


def _storages(value: Any) -> list[tuple[Any, int]]:
    """Returns storage, held weakly, and version of every tensor in containers and dataclasses."""
    storages = []
    # Reading them must not itself be seen as an operation, nor wake a tensor subclass.
    with torch._C.DisableTorchFunction():
        for tensor in _tensors(value):
            try:
                storage = _refer_weakly(tensor.untyped_storage())
            except (NotImplementedError, RuntimeError):  # sparse or batched: it has none
                continue
            storages.append((storage, 0 if tensor.is_inference() else tensor._version))
    return storages


def _tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name, None), depth - 1)


def watch_calls(
    model: nn.Module, run_forward: Callable[[], object], *, follow_tensors: bool
) -> Calls:
    """Runs the forward pass and returns the first calls of every module, in order."""
    calls: Calls = defaultdict(list)
    open_calls: list[Call] = []
    clock = itertools.count()
    bits = (1 << position for position in itertools.count())
    lineage = _Lineage() if follow_tensors else None

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        recorded = len(calls[module]) < _MOST_CALLS
        call = Call(
            module=module,
            start=next(clock),
            bit=next(bits) if recorded and lineage and is_block_like(module) else 0,
            sources=lineage.find((args, kwargs)) if lineage else 0,
        )
        open_calls.append(call)
        if recorded:
            calls[module].append(call)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        # Calls above it were left by an exception that the model caught.
        while open_calls:
            call = open_calls.pop()
            if call.module is module:
                break
        else:
            return
        call.end = next(clock)
        if lineage:
            # Whatever runs inside unseen (a custom kernel), the output depends on the input.
            lineage.add(output, call.sources | call.bit)
            if call.bit:
                call.outputs = frozenset(_storages(output))

    with ExitStack() as stack:
        for module in list(model.modules()):
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            hook = module.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(after).remove)
        if "torch._dynamo" in sys.modules:  # compiled code would trace the hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if lineage:
            stack.enter_context(lineage)
        run_forward()
    return calls


def is_block_like(module: nn.Module) -> bool:
    """Whether the module has parameters and is more than a torch.nn leaf, or a leaf made of one."""
    if next(module.parameters(), None) is None:
        return False
    if next(module.children(), None) is not None:
        return True
    ancestors = type(module).__mro__
    return not any(c is not nn.Module and c.__module__.startswith("torch.nn.") for c in ancestors)
