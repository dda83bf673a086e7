"""Runs a workload's step under policies and reads what it costs: peak bytes, then step seconds.

Steps of a reference policy run in turn with those of the policy that is measured, so that a slow
drift of the machine falls on both and cancels in their ratio. Where the step is that of several
ranks, all of them run the same steps, and start each at the same time. Compiled policies first run
until nothing is compiled any more; what that takes is told apart, and a step in which something is
compiled all the same is never counted.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from sac_search.apply import PolicyModule
from sac_search.compiling import CompileOptions, Compiler, compiled_by
from sac_search.device import (
    Clock,
    PeakReading,
    free_cached_memory,
    phases_marked,
    read_peak,
    time_call,
)
from sac_search.failures import NonFiniteLoss, UnawaitedCollective, failure_from
from sac_search.forecast import foreign_tensor_bytes, track_step
from sac_search.policy import Policy
from sac_search.ranks import ALONE, Peers, is_distributed, unawaited_collectives
from sac_search.records import Measurement, Outcome
from sac_search.workload import Workload
from sac_search.workspaces import WorkspaceKey, learn_workspaces

# Above this a step is long enough for its own noise to average out, and three steps are enough.
_LONG_STEP_SECONDS = 4.0
# A first step compiles, a second one may do so once more, where sizes turn out to change.
_MOST_WARM_UPS = 4
# So often a timed step is tried in which something is compiled.
_MOST_RECOMPILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeter:
    """Measures policies of one workload on one device."""

    workload: Workload
    """The step."""
    device: torch.device
    """Where it runs."""
    clock: Clock
    """What counts as its time."""
    steps: int = 5
    """Timed steps of each policy."""
    peers: Peers = ALONE
    """The ranks whose steps these are."""
    compiler: Compiler = None  # type: ignore[assignment]
    """Applies policies, and compiles the model where they say so; one of its own by default."""
    _learnt: list[dict[WorkspaceKey, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.compiler is None:
            own = Compiler(self.workload.bare_model, CompileOptions())
            object.__setattr__(self, "compiler", own)

    def measure(self, policy: Policy | PolicyModule, reference: Policy) -> Outcome:
        """Returns the peak and the step time of `policy`.

        Whatever the step raises becomes the outcome's failure, and the model is as it was.
        """
        return self.compare([policy], reference, steps=self.steps)[0]

    def compare(
        self, policies: Sequence[Policy | PolicyModule], reference: Policy, *, steps: int
    ) -> list[Outcome]:
        """Returns an outcome per policy, their timed steps interleaved.

        With several ranks, a failure on this one is that of all policies: further steps would not
        meet those that the others are in. Nothing that was compiled is left afterwards.
        """
        try:
            return self._compare(policies, reference, steps)
        finally:
            self.compiler.forget()

    def _compare(
        self, policies: Sequence[Policy | PolicyModule], reference: Policy, steps: int
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        readings: dict[int, PeakReading] = {}
        timings = _Timings()
        for index, policy in enumerate(policies):
            try:
                with _collectives_awaited(policy):
                    reading = self._read_peak(policy, timings.compiling(index))
                readings[index] = reading
            except Exception as error:
                outcomes[index] = self._failed(error)
                if self.peers.size > 1:
                    return [outcomes[index]] * len(policies)
        running = {index: policies[index] for index in readings}
        for _ in range(steps):
            if not running or self.peers.any(timings.is_long()):
                break
            for index, raised in self._time_round(running, reference, timings).items():
                outcomes[index] = self._failed(raised)
                del running[index]
                if self.peers.size > 1:
                    return [outcomes[index]] * len(policies)
        for index in running:
            outcomes[index] = Outcome(measurement=timings.measurement(index, readings[index]))
        return [outcomes[index] for index in range(len(policies))]

    def run_untimed_step(self, policy: Policy | PolicyModule) -> float:
        """Runs one step under `policy`, which makes the optimizer's state. Returns the loss."""
        with self.compiler.applied(policy):
            loss = float(self.workload.run_step())
        free_cached_memory(self.device)
        return loss

    def _read_peak(
        self, policy: Policy | PolicyModule, compiling: _Compiling | None = None
    ) -> PeakReading:
        if self._is_counted and compiled_by(policy) is None:
            return self._count_peak(policy)
        with self.compiler.applied(policy), phases_marked(self.workload.model):
            if compiling is not None and compiled_by(policy) is not None:
                compiling.seconds = self._warm_up()
            return read_peak(self._run_step, self.workload.drop_gradients, self.device)

    @property
    def _is_counted(self) -> bool:
        """Whether peaks are counted: those of parameters that are spread over ranks on the CPU.

        What such layers send is freed by threads of gloo, in which no profiler sees it: by its
        record a peak would be too high, by another amount each time.
        """
        is_spread = any(map(is_distributed, self.workload.parameters()))
        return is_spread and self.peers.size > 1 and self.device.type == "cpu"

    def _count_peak(self, policy: Policy | PolicyModule) -> PeakReading:
        """Counts the storages of a step."""
        if not self._learnt:
            with self.compiler.applied(policy):
                self._learnt.append(learn_workspaces(self._run_step, self.device))
            self.workload.drop_gradients()
        gc.collect()
        counted = track_step(
            self.workload,
            policy,
            device=self.device,
            foreign_bytes=foreign_tensor_bytes(self.workload, self.device),
            workspaces=self._learnt[0],
        )
        return PeakReading(phase_peak_bytes=counted.phase_peak_bytes)

    def _warm_up(self) -> float:
        """Runs steps until nothing is compiled any more. Returns the seconds of compiling."""
        before = self.compiler.graphs
        seconds: list[float] = []
        is_compiling = True
        while is_compiling and len(seconds) < _MOST_WARM_UPS:
            graphs = self.compiler.graphs
            seconds.append(time_call(self._run_step, self.device, Clock.WALL))
            is_compiling = self.peers.any(self.compiler.graphs > graphs)
        self.compiler.check_compiled_since(before)
        return sum(seconds) - len(seconds) * min(seconds)

    def _run_step(self) -> float:
        loss = float(self.workload.run_step())
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss is {loss}")
        return loss

    def _time_round(
        self, running: dict[int, Policy | PolicyModule], reference: Policy, timings: _Timings
    ) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        try:
            reference_seconds, _ = self._time_step(reference)
        except Exception as error:
            # It ran before, so something is wrong with the model or the device by now.
            return dict.fromkeys(running, error)
        timings.reference_seconds.append(reference_seconds)
        for index, policy in running.items():
            try:
                seconds, loss = self._time_compiled_step(policy, timings.compiling(index))
            except Exception as error:
                errors[index] = error
                if self.peers.size > 1:
                    break
                continue
            timings.add(index, seconds, loss)
        return errors

    def _time_compiled_step(
        self, policy: Policy | PolicyModule, compiling: _Compiling
    ) -> tuple[float, float]:
        """Times a step in which nothing is compiled; for eager policies, any."""
        if compiled_by(policy) is None:
            return self._time_step(policy)
        for _ in range(_MOST_RECOMPILED):
            graphs = self.compiler.graphs
            found = self._time_step(policy)
            if not self.peers.any(self.compiler.graphs > graphs):
                return found
            compiling.reasons[self.compiler.recompile_reason()] = None
        raise RecompilesAlways(
            f"every step compiles something anew: {'; '.join(compiling.reasons)}. Give the batches "
            "one shape, or compile with dynamic shapes (--compile-dynamic)"
        )

    def _time_step(self, policy: Policy | PolicyModule) -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        with self.compiler.applied(policy):
            self.peers.any()  # else a rank that is early would count its waiting as its step
            seconds = time_call(
                lambda: losses.append(self.workload.run_step()), self.device, self.clock
            )
        loss = float(losses[0])
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss is {loss}")
        return seconds, loss

    def _failed(self, error: Exception) -> Outcome:
        failure = failure_from(error)
        # The traceback holds the frames, and they hold the activations.
        error.__traceback__ = None
        error.__context__ = None
        error.__cause__ = None
        self.workload.drop_gradients()
        # A device that is broken for good raises here as well; `Session.is_healthy` will tell.
        with contextlib.suppress(Exception):
            free_cached_memory(self.device)
        return Outcome(failure=failure)


@contextlib.contextmanager
def _collectives_awaited(policy: Policy | PolicyModule) -> Iterator[None]:
    """Raises UnawaitedCollective where the block's steps leave collectives, for the policy's sake.

    A step that does so under plain checkpointing, or without any, is the user's own.
    """
    before = unawaited_collectives()
    yield
    left = unawaited_collectives() - before
    if left > 0 and not (isinstance(policy, Policy) and policy.saves_nothing):
        raise UnawaitedCollective(f"{left} collectives of two steps were never waited for")


class RecompilesAlways(Exception):
    """No step of a compiled policy could be timed without compiling something."""


@dataclass(slots=True)
class _Compiling:
    """What compiling one policy took."""

    seconds: float | None = None
    reasons: dict[str, None] = field(default_factory=dict)
    """Why there was more to compile while steps were timed, each reason once."""


class _Timings:
    """The seconds of every timed step, and their medians."""

    def __init__(self) -> None:
        self._compiling: dict[int, _Compiling] = {}
        self.reference_seconds: list[float] = []
        self._seconds: dict[int, list[float]] = {}
        self._losses: dict[int, float] = {}

    def add(self, index: int, seconds: float, loss: float) -> None:
        self._seconds.setdefault(index, []).append(seconds)
        self._losses[index] = loss

    def compiling(self, index: int) -> _Compiling:
        return self._compiling.setdefault(index, _Compiling())

    def is_long(self) -> bool:
        rounds = len(self.reference_seconds)
        return rounds >= 3 and min(self.reference_seconds) > _LONG_STEP_SECONDS

    def measurement(self, index: int, reading: PeakReading) -> Measurement:
        seconds = self._seconds[index]
        ratios = [a / b for a, b in zip(seconds, self.reference_seconds, strict=True)]
        return Measurement(
            peak_bytes=reading.limited_bytes,
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            device_bytes=reading.device_bytes,
            peak_phase=reading.peak_phase,
            phase_peak_bytes=reading.phase_peak_bytes,
            step_seconds=statistics.median(seconds),
            step_noise_fraction=noise_fraction(ratios),
            reference_seconds=statistics.median(self.reference_seconds),
            relative_seconds=statistics.median(ratios),
            steps=len(seconds),
            loss=self._losses[index],
            alloc_retries=reading.alloc_retries,
            compile_seconds=self.compiling(index).seconds,
            recompiles=tuple(self.compiling(index).reasons),
        )


def noise_fraction(values: Sequence[float]) -> float:
    """Returns the standard error of the median of `values`, as a fraction of it.

    The spread is estimated from the median absolute deviation, which one slow step cannot move.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values)) / middle
