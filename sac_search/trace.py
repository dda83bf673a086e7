"""What each layer runs: its ops, their class, bytes, seconds, and whether they can be saved.

The forward pass runs once for warming up and a few times for timing, under plain checkpointing of
all layers, so it needs no more memory than that. No backward pass is run. On fake tensors, where
there is nothing to time, it runs once, and each op gets a price.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search.apply import applied
from sac_search.device import Clock, OpTimer
from sac_search.fake import FAKE_DEVICE
from sac_search.layers import Layer, group_layers
from sac_search.opclasses import OpClass, classify
from sac_search.policy import checkpoint_layers
from sac_search.policy_runtime import HIDDEN_VIEWS, site_of
from sac_search.ranks import is_on_its_way
from sac_search.records import Bytes
from sac_search.workload import Workload

# Seconds of one call, from the op, its arguments and keywords, and what it returned.
PriceOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]

# torch has no annotations for it.
_refer_weakly: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTrace:
    """All calls of one op at one site in one layer."""

    op: str
    """The overload: `aten.mm.default`."""
    site: str = ""
    """What tells its uses apart: the shape of the weight, or the feature size."""
    op_class: OpClass
    """Its class."""
    calls: int
    """Calls in one pass through the layer."""
    output_bytes: Bytes
    """Bytes of the new storages that these calls return."""
    seconds: float
    """Seconds of these calls in one forward pass."""
    random: bool = False
    """Draws random numbers (attention: only when its dropout is not zero)."""
    mutates: bool = False
    """Its schema says that it changes an argument."""
    view: bool = False
    """Returns a view, which costs nothing to make again."""
    output_mutated: bool = False
    """The output of some call is changed in place later on."""
    awaits: bool = False
    """Some call is the first to read what a collective returns, and so makes it be waited for."""
    compiled: bool = False
    """Runs inside a part of the layer that the workload compiles: no policy can tell it apart."""

    @property
    def site_name(self) -> str:
        """The op site: `aten.mm.default[2048x8192]`."""
        return f"{self.op}[{self.site}]" if self.site else self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """One layer of the model as it runs."""

    name: str
    """FQN."""
    kind: str
    """The kind that it belongs to: same class, parameter shapes and ops."""
    class_name: str
    """Class of the module."""
    parameter_count: int
    """Parameters inside."""
    calls: int
    """How often one forward pass runs it."""
    input_bytes: Bytes
    """Bytes of the tensors that go in: what checkpointing keeps in place of the activations."""
    ops: tuple[OpTrace, ...]
    """Its ops, in the order of their first call."""


@dataclass(slots=True)
class _OpRecord:
    calls: int = 0
    output_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    random: bool = False
    mutates: bool = False
    view: bool = False
    output_mutated: bool = False
    awaits: bool = False


@dataclass(slots=True)
class _LayerRecord:
    ops: dict[tuple[str, str], _OpRecord] = field(default_factory=dict)
    calls: int = 0
    input_bytes: int = 0
    sequence: list[tuple[str, str]] = field(default_factory=list)
    """What runs, op by op: the op with its site, and the shapes that come out."""
    shapes_depend_on_values: bool = False
    """Routing, boolean masks: shapes are another batch's, or another layer's, otherwise."""

    @property
    def signature(self) -> str:
        """A hash that alike layers share."""
        lines = [op if self.shapes_depend_on_values else op + out for op, out in self.sequence]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def trace_layers(
    workload: Workload,
    layers: Sequence[Layer],
    device: torch.device,
    clock: Clock,
    *,
    repeats: int = 3,
) -> list[LayerTrace]:
    """Returns what each of `layers` runs in one forward pass, in the order in which they run."""
    passes = [
        _trace_once(workload, layers, _TimedOps(OpTimer(device, clock))) for _ in range(repeats + 1)
    ]
    return _layer_traces(layers, passes[1:])


def price_layers(
    workload: Workload, layers: Sequence[Layer], price_op: PriceOp
) -> list[LayerTrace]:
    """Returns the same as `trace_layers`, but for the seconds: those are what `price_op` says.

    Fake tensors will do; their mode has to be active.
    """
    return _layer_traces(layers, [_trace_once(workload, layers, _PricedOps(price_op))])


def _layer_traces(
    layers: Sequence[Layer], passes: Sequence[dict[str, _LayerRecord]]
) -> list[LayerTrace]:
    last = passes[-1]
    signatures = {layer.name: last[layer.name].signature for layer in layers}
    kind_of = {
        name: kind for kind, names in group_layers(layers, signatures).items() for name in names
    }
    return [
        LayerTrace(
            name=layer.name,
            kind=kind_of[layer.name],
            class_name=layer.class_name,
            parameter_count=layer.parameter_count,
            calls=last[layer.name].calls,
            input_bytes=last[layer.name].input_bytes,
            ops=tuple(
                _finish_op(key, record, [_seconds_in(one[layer.name], key) for one in passes])
                for key, record in last[layer.name].ops.items()
            ),
        )
        for layer in layers
    ]


def _seconds_in(record: _LayerRecord, key: tuple[str, str]) -> float:
    return sum(record.ops[key].seconds) if key in record.ops else 0.0


def _finish_op(key: tuple[str, str], record: _OpRecord, seconds: list[float]) -> OpTrace:
    op, site = key
    return OpTrace(
        op=op,
        site=site,
        op_class=classify(op),
        calls=record.calls,
        output_bytes=record.output_bytes,
        seconds=statistics.median(seconds),
        random=record.random,
        mutates=record.mutates,
        view=record.view,
        output_mutated=record.output_mutated,
        awaits=record.awaits,
    )


def _trace_once(
    workload: Workload, layers: Sequence[Layer], clock: _OpClock
) -> dict[str, _LayerRecord]:
    recorder = _Recorder(clock)
    policy = checkpoint_layers(layer.name for layer in layers)
    model = workload.bare_model
    with applied(model, policy), recorder.watching(model, layers), recorder:
        workload.run_forward()
    recorder.fill_in_seconds()
    return recorder.records


class _OpClock(Protocol):
    """Tells how long ops take."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op and returns its output."""

    def seconds(self) -> list[float]:
        """Returns the seconds of each op that was run, in order."""


class _TimedOps:
    def __init__(self, timer: OpTimer) -> None:
        self._timer = timer

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._timer.start()
        output = func(*args, **kwargs)
        self._timer.stop()
        return output

    def seconds(self) -> list[float]:
        return self._timer.seconds()


class _PricedOps:
    def __init__(self, price_op: PriceOp) -> None:
        self._price_op = price_op
        self._seconds: list[float] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        self._seconds.append(self._price_op(func, args, kwargs, output))
        return output

    def seconds(self) -> list[float]:
        return self._seconds


class _Recorder(TorchDispatchMode):
    """Writes down every op that runs inside a watched layer."""

    supports_higher_order_operators = True

    def __init__(self, clock: _OpClock) -> None:
        super().__init__()
        self.records: dict[str, _LayerRecord] = {}
        self._clock = clock
        self._timed: list[_OpRecord] = []
        self._running: list[str] = []
        # By storages, held weakly: an address is soon another tensor's.
        self._producers: dict[Any, _OpRecord] = {}

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module, layers: Sequence[Layer]) -> Iterator[None]:
        modules = dict(model.named_modules())
        handles = []
        for layer in layers:
            self.records[layer.name] = _LayerRecord()
            enter = self._enter_hook(layer.name)
            handles.append(modules[layer.name].register_forward_pre_hook(enter, with_kwargs=True))
            # Before other hooks: what FSDP2 does after a layer is none of its ops.
            handles.append(
                modules[layer.name].register_forward_hook(
                    self._leave_hook, prepend=True, always_call=True
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fill_in_seconds(self) -> None:
        for record, seconds in zip(self._timed, self._clock.seconds(), strict=True):
            record.seconds.append(seconds)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is FAKE_DEVICE:
            return func(*args, **kwargs)
        if not self._running:
            self._note_mutations(func, args, kwargs)
            return func(*args, **kwargs)
        output = self._clock.run(func, args, kwargs)
        self._write(func, args, kwargs, output)
        return output

    def _enter_hook(self, name: str) -> Any:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            record = self.records[name]
            record.calls += 1
            record.input_bytes += _new_bytes(pytree.tree_leaves((args, kwargs)), set())
            self._running.append(name)

        return enter

    def _leave_hook(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _write(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer = self.records[self._running[0]]
        name = str(func)
        site = site_of(name, args)
        record = layer.ops.setdefault((name, site), _OpRecord())
        record.calls += 1
        self._timed.append(record)
        self._note_mutations(func, args, kwargs)
        schema = getattr(func, "_schema", None)
        record.mutates |= schema is not None and schema.is_mutable
        record.view |= name in HIDDEN_VIEWS or (
            schema is not None
            and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        )
        record.random |= _draws_random(func, args, kwargs)
        record.awaits |= any(map(is_on_its_way, pytree.tree_leaves((args, kwargs))))
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        shapes = str([list(tensor.shape) for tensor in outputs])
        layer.sequence.append((f"{name}[{site}] ", shapes))
        tags = getattr(func, "tags", ())
        layer.shapes_depend_on_values |= torch.Tag.dynamic_output_shape in tags
        if record.mutates or record.view:
            return
        taken = {
            _storage_key(leaf)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        record.output_bytes += _new_bytes(outputs, taken)
        for tensor in outputs:
            if _storage_key(tensor) not in taken:
                self._producers[_storage_of(tensor)] = record

    def _note_mutations(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    producer = self._producers.get(_storage_of(leaf))
                    if producer is not None:
                        producer.output_mutated = True


def _draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(value)
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _storage_key(tensor: torch.Tensor) -> int:
    # Not by its address, which fake tensors have none of. As long as both are alive.
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return 0


def _storage_of(tensor: torch.Tensor) -> Any:
    try:
        return _refer_weakly(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def _new_bytes(leaves: Sequence[Any], known: set[int]) -> int:
    seen = set(known)
    total_bytes = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            key = _storage_key(leaf)
            if key and key not in seen:
                seen.add(key)
                total_bytes += leaf.untyped_storage().nbytes()
    return total_bytes
