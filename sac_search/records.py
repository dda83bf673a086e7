"""What is written down: measurements, failures, verifications and the environment they belong to.

Plain frozen data with a schema version. `encode` and `decode` are the only way to JSON and back;
decoding checks every field.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

import msgspec

from sac_search import units

SCHEMA_VERSION = 1

T = TypeVar("T")

Bytes = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""A number of bytes. Within these bounds (8 PiB) floating point holds every one exactly."""


class Evidence(enum.StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    FORECAST = "forecast"


class Phase(enum.StrEnum):
    """A part of the training step, in the order in which they run."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIPPING = "gradient clipping"
    OPTIMIZER = "optimizer"


class FailureKind(enum.StrEnum):
    """Why a trial gave no figures."""

    OUT_OF_MEMORY = "out of memory"
    HOST_OUT_OF_MEMORY = "out of host memory"
    TIMEOUT = "timeout"
    CRASH = "worker crashed"
    RECOMPUTE_MISMATCH = "recompute mismatch"
    MUTATED_SAVED_TENSOR = "saved tensor mutated"
    NOT_IN_STORAGE = "op not found in recompute"
    UNAWAITED_COLLECTIVE = "collective not waited for"
    NON_FINITE_LOSS = "loss not finite"
    USER_ERROR = "step raised"
    FORECAST_OVER_BUDGET = "forecast over the budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A trial that gave no figures, and why."""

    kind: FailureKind
    """What happened."""
    message: str
    """The first lines of the error."""
    advice: str
    """One sentence: what it means and what to do."""

    @property
    def line(self) -> str:
        """What to say of it in a line: the advice, and of an error without any its own words."""
        if self.kind is not FailureKind.USER_ERROR:
            return self.advice
        return self.message.partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one policy costs on the device, or would by forecast."""

    peak_bytes: Bytes
    """The peak that the budget limits: reserved on accelerators, allocated on the CPU."""
    allocated_bytes: Bytes
    """Highest bytes in live tensors during the step."""
    reserved_bytes: Bytes | None = None
    """Highest bytes that the caching allocator held; None where there is none."""
    device_bytes: Bytes | None = None
    """Bytes in use on the whole device after the step, other processes included."""
    peak_phase: Phase
    """The phase that holds the peak of allocated bytes."""
    phase_peak_bytes: dict[Phase, Bytes]
    """Highest allocated bytes in each phase."""
    step_seconds: float
    """Median step time."""
    step_noise_fraction: float
    """Standard error of `step_seconds`, as a fraction of it."""
    reference_seconds: float
    """Median time of the reference policy's steps, run in turn with these."""
    relative_seconds: float
    """Median of the ratios of each step to the reference step beside it: free of drift."""
    steps: int
    """Timed steps."""
    loss: float | None
    """The last step's loss; None by forecast."""
    alloc_retries: int = 0
    """How often the allocator had to free its cache and try again: a sign of a full device."""
    compile_seconds: float | None = None
    """Elapsed time of compiling, before any step was timed; None where nothing is compiled."""
    recompiles: tuple[str, ...] = ()
    """Why something was compiled once more while steps were timed; those were run again."""
    rank_peak_bytes: tuple[Bytes, ...] = ()
    """`peak_bytes` of every rank, where there are several; the highest of them is the peak."""
    evidence: Evidence = Evidence.MEASURED
    """Where the figures come from. By forecast no step was run, and seconds are those of published
    rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one trial: figures, or a failure."""

    measurement: Measurement | None = None
    """The figures, when the step ran."""
    failure: Failure | None = None
    """The reason, when it did not."""
    forecast_peak_bytes: Bytes | None = None
    """Highest bytes in live tensors by the forecast, where there is one."""

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError("an outcome is either a measurement or a failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A policy's loss, gradients and buffers against a reference's, with the same seeds."""

    passed: bool
    """Whether the loss and every gradient are equal within the tolerance."""
    bitwise: bool
    """Whether they are equal bit for bit."""
    reference: str
    """What it was compared with: `none`, or `full` when no step without checkpointing fits;
    `compile`, or `compile, full`, for what is compiled."""
    loss_difference: float
    """Absolute difference of the losses."""
    worst_gradient_difference: float
    """Largest of each gradient's max|a-b| / max|b|."""
    worst_parameter: str | None
    """The parameter whose gradient that is."""
    noise: float
    """The same figure between two runs of the reference: the device's own noise."""
    tolerance: float
    """The largest difference that passes."""
    buffers_differing: tuple[str, ...] = ()
    """Buffers that end up with other values; running statistics move twice when recomputed."""
    note: str = ""
    """What a reader should know, in a sentence or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that a comparison of two figures has to hold equal."""

    torch_version: str = field(metadata={"label": "torch"})
    device: str = field(metadata={"label": "device type"})
    device_name: str = field(metadata={"label": "device"})
    device_memory_bytes: Bytes = field(metadata={"label": "device memory", "format": "gib"})
    driver: str | None = field(metadata={"label": "driver"})
    dtype: str = field(metadata={"label": "parameter dtypes"})
    batch_size: int | None = field(metadata={"label": "batch size"})
    sequence_length: int | None = field(metadata={"label": "sequence length"})
    compile_settings: str = field(metadata={"label": "compile"})
    allocator_settings: str = field(metadata={"label": "allocator"})
    precision_settings: str = field(metadata={"label": "float32 matmul precision, determinism"})
    threads: int = field(metadata={"label": "CPU threads of torch"})
    clock: str = field(metadata={"label": "clock"})
    parameter_count: int = field(metadata={"label": "parameters"})
    workload: str = field(metadata={"label": "workload"})
    workload_source_hash: str = field(metadata={"label": "workload source"})
    world_size: int = field(default=1, metadata={"label": "ranks"})
    parallelism: str = field(default="", metadata={"label": "parallelism"})

    def labelled(self) -> list[tuple[str, str]]:
        """Returns each value with the name that people read."""
        names = {f.name: f.metadata["label"] for f in fields(self)}
        if self.world_size == 1:
            del names["world_size"], names["parallelism"]
        return [(label, self._format(name)) for name, label in names.items()]

    def differing(self, other: Environment) -> list[tuple[str, str, str]]:
        """Returns each value in which `other` differs: its name, what it is here, and there."""
        return [
            (f.metadata["label"], self._format(f.name), other._format(f.name))
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]

    def differences(self, other: Environment) -> list[str]:
        """Returns a line per value in which `other` differs: `torch: 2.13.0 -> 2.14.1`."""
        return [f"{label}: {ours} -> {theirs}" for label, ours, theirs in self.differing(other)]

    def _format(self, name: str) -> str:
        value = getattr(self, name)
        if value is None:
            return "not known"
        if name == "device_memory_bytes":
            return units.format_gib(value)
        if name == "workload_source_hash":
            return str(value)[:12]
        if name == "parallelism":
            return str(value) or "none"
        return str(value)


def encode(record: Any) -> bytes:
    """Returns the record as JSON."""
    return msgspec.json.encode(record)


def decode(text: bytes | str, record_type: type[T]) -> T:
    """Returns the record that `encode` wrote.

    Raises:
        ValueError: the text is not JSON, or a field is missing or of another type.
    """
    return msgspec.json.decode(text, type=record_type)


def spell_out(text: str) -> str:
    """Returns the text with what no record can hold, half a surrogate pair, as an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_builtins(record: Any) -> Any:
    """Returns the record as dicts, lists, strings and numbers, as `encode` would write them."""
    return msgspec.to_builtins(record)
