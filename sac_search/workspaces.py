"""What kernels need beyond their outputs while they run, read from a profiled step.

A convolution reorders its inputs, a reduction keeps partial sums: memory that is taken and given
back inside one op, which a forecast from storages alone cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

# The op's packet (`aten.convolution_backward`) and the shapes of its tensors, scalars left out.
WorkspaceKey = tuple[str, tuple[tuple[int, ...], ...]]

# Less than this is not worth a row.
_SMALLEST_BYTES = 4096


def learn_workspaces(run_step: Callable[[], Any], device: torch.device) -> dict[WorkspaceKey, int]:
    """Runs `run_step` once under the profiler. Returns the largest workspace per op and shapes."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as profiled:
        run_step()
    wanted = DeviceType.CPU if device.type == "cpu" else getattr(DeviceType, device.type.upper())
    events = [
        _Event(
            name=event.name(),
            start_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            size_bytes=event.nbytes(),
            shapes=event.shapes(),
            thread=event.start_thread_id(),
        )
        for event in profiled.profiler.kineto_results.events()
        if event.name().startswith("aten::")
        or (event.name() == "[memory]" and event.device_type() == wanted)
    ]
    return workspaces_of(events)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    name: str
    start_ns: int
    end_ns: int
    size_bytes: int
    shapes: list[Any]
    thread: int


@dataclass(slots=True)
class _OpenOp:
    event: _Event
    live_bytes: int = 0
    highest_bytes: int = 0


def workspaces_of(events: Iterable[_Event]) -> dict[WorkspaceKey, int]:
    """Returns the largest workspace of each op and shapes among the profiler's events."""
    found: dict[WorkspaceKey, int] = {}
    open_ops: dict[int, list[_OpenOp]] = {}
    # An op begins before the memory that it takes, and an outer op before an inner one.
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        stack = open_ops.setdefault(event.thread, [])
        while stack and stack[-1].event.end_ns < event.start_ns:
            _close(stack.pop(), found)
        if event.name != "[memory]":
            stack.append(_OpenOp(event))
            continue
        for op in stack:
            op.live_bytes += event.size_bytes
            op.highest_bytes = max(op.highest_bytes, op.live_bytes)
    for stack in open_ops.values():
        for op in stack:
            _close(op, found)
    return found


def workspace_key(op: str, args: Any) -> WorkspaceKey:
    """Returns the key of a call as a dispatch mode sees it: `aten.mm.default` and its arguments."""
    namespace, packet, *_ = op.split(".")
    shapes = (tuple(x.shape) for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
    return f"{namespace}.{packet}", tuple(shape for shape in shapes if shape)


def _close(op: _OpenOp, found: dict[WorkspaceKey, int]) -> None:
    workspace_bytes = op.highest_bytes - max(op.live_bytes, 0)
    if workspace_bytes >= _SMALLEST_BYTES:
        key = (op.event.name.replace("::", "."), tuple(_flat_shapes(op.event.shapes)))
        found[key] = max(workspace_bytes, found.get(key, 0))


def _flat_shapes(shapes: Iterable[Any]) -> Iterable[tuple[int, ...]]:
    for shape in shapes:
        if shape and isinstance(shape[0], list | tuple):
            yield from _flat_shapes(shape)
        elif shape:
            yield tuple(shape)
