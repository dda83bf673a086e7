"""Memory over one step: the bytes of each kind, op by op, and where they are highest.

A log is told of storages by whoever counts them; what a storage was for shows later, when the
forward pass is over or a parameter has its gradient, so kinds are settled while the log is kept and
the curve is made of it at the end.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sac_search.records import Bytes, Phase
from sac_search.workload import Workload

MOST_POINTS = 300
"""Points of a timeline at the most."""


class MemoryKind(enum.StrEnum):
    """What bytes are for."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    OPTIMIZER = "optimizer state"
    """What the optimizer keeps from step to step."""
    OTHER = "batch and other"
    """The batch, and whatever else was there before the step."""
    GRADIENTS = "gradients"
    """Gradients of parameters."""
    SAVED = "saved activations"
    """What the forward pass leaves behind for the backward pass."""
    RECOMPUTED = "recompute working set"
    """What checkpointed layers make again in the backward pass."""
    TEMPORARY = "temporaries"
    """What comes and goes: gradients of activations, an op's workspace, the optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over one step. All columns have an entry for each point."""

    ops: tuple[int, ...]
    """How many ops had run at the point."""
    phases: tuple[Phase, ...]
    """The phase of the step."""
    layers: tuple[str, ...]
    """The layer that runs, forward or backward; empty between layers."""
    kind_bytes: dict[MemoryKind, tuple[Bytes, ...]]
    """Live bytes of every kind."""
    peak_index: int
    """The point that holds the peak."""

    def __post_init__(self) -> None:
        columns = (self.phases, self.layers, *self.kind_bytes.values())
        if not self.ops or any(len(column) != len(self.ops) for column in columns):
            raise ValueError("the columns of a timeline have as many points, and at least one")
        if not 0 <= self.peak_index < len(self.ops):
            raise ValueError("the peak of a timeline is one of its points")

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Live bytes at each point."""
        return tuple(map(sum, zip(*self.kind_bytes.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of the step."""
        return self.total_bytes[self.peak_index]

    @property
    def peak_phase(self) -> Phase:
        """The phase that holds them."""
        return self.phases[self.peak_index]

    @property
    def peak_layer(self) -> str:
        """The layer that runs then; empty where none does."""
        return self.layers[self.peak_index]


@dataclass(slots=True)
class _Life:
    """A storage, from the point where it is first seen to the one where it is not seen any more."""

    size_bytes: int
    kind: MemoryKind
    born: int
    died: int | None = None


class StepLog:
    """What happens to storages in a step, as a `StorageTracker` tells it.

    Known limits: a gradient that is used and dropped as soon as it is there, by an optimizer that
    steps within the backward pass, counts as temporary; so does optimizer state that is made in the
    step that counts and dropped in it; parameters that FSDP2 gathers count as other.
    """

    def __init__(
        self, workload: Workload, key_of: Callable[[Any], int | None], foreign_bytes: int
    ) -> None:
        self._workload = workload
        self._key_of = key_of
        self._foreign_bytes = foreign_bytes
        self._layer = ""
        self._lives: list[_Life] = []
        self._alive: dict[int, _Life] = {}
        self._points: list[tuple[Phase, str]] = []
        self._workspaces: dict[int, int] = {}

    def begin(self) -> None:
        """The step that counts begins: what is alive was there before it."""
        self._lives = list(self._alive.values())
        self._points.clear()
        self._workspaces.clear()
        for life in self._lives:
            life.kind, life.born = MemoryKind.OTHER, 0
        self._note_optimizer()
        self._note_gradients()
        own = [*self._workload.parameters(), *self._workload.model.buffers()]
        for tensor in own:
            self.note_kind(tensor, MemoryKind.PARAMETERS)

    def enter_phase(self, phase: Phase) -> None:
        """A phase of the step begins."""
        self._layer = ""
        self._note_gradients()
        if phase is not Phase.BACKWARD:
            return
        for life in self._alive.values():
            if life.kind is MemoryKind.TEMPORARY:
                life.kind = MemoryKind.SAVED

    def add(self, key: int, size_bytes: int, *, recomputed: bool) -> None:
        """A storage is there, made by a layer that runs again or by something else."""
        kind = MemoryKind.RECOMPUTED if recomputed else MemoryKind.TEMPORARY
        self._add(key, size_bytes, kind)

    def remove(self, key: int) -> None:
        """A storage is gone."""
        self._alive.pop(key).died = len(self._points)

    def resize(self, key: int, size_bytes: int) -> None:
        """A storage has another size from now on."""
        kind = self._alive[key].kind
        self.remove(key)
        self._add(key, size_bytes, kind)

    def reach(self, phase: Phase, workspace_bytes: int) -> None:
        """An op has run; while it did it took `workspace_bytes` beyond what is alive now."""
        if workspace_bytes:
            self._workspaces[len(self._points)] = workspace_bytes
        self._points.append((phase, self._layer))

    def note_kind(self, value: Any, kind: MemoryKind) -> None:
        """Says what the storage of a tensor is for."""
        key = self._key_of(value)
        if key in self._alive:
            self._alive[key].kind = kind

    @contextlib.contextmanager
    def following(self, layer_names: Sequence[str]) -> Iterator[None]:
        """Notes which of the layers runs, and which storages become gradients."""
        handles: list[Any] = []
        for name in layer_names:
            layer = self._workload.bare_model.get_submodule(name)
            enter, leave = self._layer_hooks(name)
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(leave))
        for parameter in self._workload.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handles.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def timeline(self) -> Timeline:
        """Returns the curve, its highest point exact, of `MOST_POINTS` points at the most."""
        self._note_optimizer()
        count = len(self._points)
        changes = {kind: [0] * (count + 1) for kind in MemoryKind}
        changes[MemoryKind.OTHER][0] += self._foreign_bytes
        for life in self._lives:
            changes[life.kind][life.born] += life.size_bytes
            if life.died is not None:
                changes[life.kind][life.died] -= life.size_bytes
        curves = {kind: list(itertools.accumulate(c[:count])) for kind, c in changes.items()}
        for point, workspace_bytes in self._workspaces.items():
            curves[MemoryKind.TEMPORARY][point] += workspace_bytes
        totals = [sum(column) for column in zip(*curves.values(), strict=True)]
        kept = thinned(totals, MOST_POINTS)
        return Timeline(
            ops=tuple(kept),
            phases=tuple(self._points[i][0] for i in kept),
            layers=tuple(self._points[i][1] for i in kept),
            kind_bytes={kind: tuple(curve[i] for i in kept) for kind, curve in curves.items()},
            peak_index=kept.index(_highest(totals, range(count))),
        )

    def _add(self, key: int, size_bytes: int, kind: MemoryKind) -> None:
        life = _Life(size_bytes=size_bytes, kind=kind, born=len(self._points))
        self._alive[key] = life
        self._lives.append(life)

    def _note_optimizer(self) -> None:
        if self._workload.optimizer is None:
            return
        for entry in pytree.tree_leaves(list(self._workload.optimizer.state.values())):
            self.note_kind(entry, MemoryKind.OPTIMIZER)

    def _note_gradients(self) -> None:
        for parameter in self._workload.parameters():
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.note_kind(parameter.grad, MemoryKind.GRADIENTS)

    def _layer_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        # In the backward pass a layer begins when the gradient of its output is there, and ends
        # with that of its input, unless that is where the layer before it has begun.
        def begin_backward(gradient: torch.Tensor) -> None:
            self._layer = name

        def end_backward(gradient: torch.Tensor) -> None:
            if self._layer == name:
                self._layer = ""

        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            _on_gradients((args, kwargs), end_backward)
            self._layer = name

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            _on_gradients(output, begin_backward)
            self._layer = ""

        return enter, leave


def _on_gradients(values: Any, hook: Callable[[torch.Tensor], None]) -> None:
    for value in pytree.tree_leaves(values):
        # A leaf outlives the step, and so would its hook.
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            value.register_hook(hook)


def thinned(totals: Sequence[int], most: int) -> list[int]:
    """Returns the indices of at most `most` points that have the shape of the curve.

    Both ends and the first of the highest points are among them, and of every stretch of the curve
    its lowest and its highest point.
    """
    last = len(totals) - 1
    changing = [i for i in range(1, last) if not totals[i - 1] == totals[i] == totals[i + 1]]
    ends = {0, last, _highest(totals, range(len(totals)))}
    if len(ends.union(changing)) > most:
        stretches = (most - len(ends)) // 2
        bounds = [round(len(changing) * i / stretches) for i in range(stretches + 1)]
        parts = [changing[low:high] for low, high in itertools.pairwise(bounds)]
        changing = [i for part in parts for i in (_lowest(totals, part), _highest(totals, part))]
    return sorted(ends.union(changing))


def _highest(totals: Sequence[int], indices: Sequence[int]) -> int:
    return max(indices, key=lambda i: totals[i])


def _lowest(totals: Sequence[int], indices: Sequence[int]) -> int:
    return min(indices, key=lambda i: totals[i])
