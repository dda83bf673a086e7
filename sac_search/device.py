"""The device: its name, its clock and its peak of memory. The only file with device-specific code.

Accelerators are reached through `torch.accelerator` (2.9 or later), never by vendor name. On the
CPU, where torch has no allocator statistics, the profiler's record of allocations is summed up.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from sac_search.errors import UsageError
from sac_search.records import Phase

_PHASE_PREFIX = "sac_search.phase."
# torch has no annotations for it.
_refer_weakly: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


class Clock(enum.StrEnum):
    """What a step time is."""

    CPU = "cpu"
    """Processor time of the process: steady on a loaded machine, right for one thread."""
    WALL = "wall"
    """Elapsed time, the device synchronized on both sides."""


def find_device(name: str | None) -> torch.device:
    """Returns the device of that name, or the machine's accelerator when `name` is None.

    Raises:
        UsageError: there is no such device here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        if accelerator is None:
            raise UsageError(
                "this machine has no accelerator that torch can use; "
                "add --device cpu to measure on the CPU"
            )
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        here = f"an accelerator of type {accelerator.type}" if accelerator else "the CPU only"
        raise UsageError(f"--device {name}: torch can use {here} on this machine")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise UsageError(f"--device {name}: this machine has {count} of them, counted from 0")
    return torch.device(device.type, index)


def use_device(device: torch.device) -> None:
    """Makes `device` the current one of this process."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def default_clock(device: torch.device) -> Clock:
    """Returns processor time on the CPU and elapsed time on accelerators."""
    return Clock.CPU if device.type == "cpu" else Clock.WALL


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Collects garbage and gives unused cached blocks back to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.memory.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What the device is."""

    name: str
    """The product name."""
    total_bytes: int
    """Its memory."""
    driver: str | None
    """The driver's version, where torch or the system tells it."""


def describe_device(device: torch.device) -> DeviceFigures:
    """Returns the device's name, memory and driver."""
    if device.type == "cpu":
        return DeviceFigures(name=_cpu_name(), total_bytes=_host_memory_bytes(), driver=None)
    module = torch.get_device_module(device)
    name = (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )
    return DeviceFigures(
        name=name, total_bytes=device_memory(device)[1], driver=_driver_version(device)
    )


def device_memory(device: torch.device) -> tuple[int, int]:
    """Returns free and total bytes of the device, all processes counted."""
    if device.type == "cpu":
        return _available_host_bytes(), _host_memory_bytes()
    if hasattr(torch.accelerator.memory, "get_memory_info"):
        free_bytes, total_bytes = torch.accelerator.memory.get_memory_info(device)
    else:  # torch 2.9
        free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def usable_bytes(device: torch.device, live_bytes: int) -> int:
    """Returns the bytes of the device that this process holds or could get beside all others.

    `live_bytes` are those in live tensors; what an allocator holds beyond them counts as well.
    """
    free_bytes, _ = device_memory(device)
    if device.type == "cpu":
        return free_bytes + live_bytes
    return free_bytes + int(torch.accelerator.memory.memory_reserved(device))


def allocator_settings(device: torch.device) -> str:
    """Returns the allocator settings of the environment, as text; empty on the CPU."""
    if device.type == "cpu":
        return ""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


# --- time -----------------------------------------------------------------------------------------


def time_call(call: Callable[[], Any], device: torch.device, clock: Clock) -> float:
    """Returns the seconds that `call` takes, the device idle before and after."""
    now = time.process_time if clock is Clock.CPU else time.perf_counter
    synchronize(device)
    start = now()
    call()
    synchronize(device)
    return now() - start


class OpTimer:
    """Times many small calls without waiting for the device after each.

    `start()` and `stop()` bracket a call; `seconds()` then gives one figure per bracket, in order.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._now = time.process_time if clock is Clock.CPU else time.perf_counter
        self._marks: list[Any] = []

    def start(self) -> None:
        """Marks the beginning of a call."""
        self._mark()

    def stop(self) -> None:
        """Marks its end."""
        self._mark()

    def seconds(self) -> list[float]:
        """Returns the seconds between each start and its stop."""
        synchronize(self._device)
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._device.type == "cpu":
            return [end - start for start, end in pairs]
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _mark(self) -> None:
        if self._device.type == "cpu":
            self._marks.append(self._now())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append(event)


# --- memory ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class PeakReading:
    """The highest bytes of one step. Filled when the step is over."""

    phase_peak_bytes: dict[Phase, int] = field(default_factory=dict)
    """Highest allocated bytes in each phase."""
    reserved_bytes: int | None = None
    """Highest bytes held by the caching allocator."""
    device_bytes: int | None = None
    """Bytes in use on the whole device at the end."""
    alloc_retries: int = 0
    """Allocator retries during the step."""

    @property
    def allocated_bytes(self) -> int:
        """Highest allocated bytes of the step."""
        return max(self.phase_peak_bytes.values())

    @property
    def peak_phase(self) -> Phase:
        """The phase that holds it."""
        return max(self.phase_peak_bytes, key=lambda phase: self.phase_peak_bytes[phase])

    @property
    def limited_bytes(self) -> int:
        """The peak that a budget limits: reserved where there is a caching allocator."""
        return self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes


def read_peak(
    run_step: Callable[[], Any], drop_gradients: Callable[[], None], device: torch.device
) -> PeakReading:
    """Runs `run_step` twice and returns the peak of the second, per phase.

    The optimizer's state must exist already. `run_step` calls `mark_phase` as it goes along.
    """
    meter = _read_cpu_peak if device.type == "cpu" else _read_accelerator_peak
    return meter(run_step, drop_gradients, device)


_phase_listeners: list[Callable[[Phase], None]] = []


def mark_phase(phase: Phase) -> None:
    """Says that `phase` begins; heard only while `read_peak` listens."""
    for listener in _phase_listeners:
        listener(phase)


@contextlib.contextmanager
def listening_to_phases(listener: Callable[[Phase], None]) -> Iterator[None]:
    """Tells `listener` of every phase that `mark_phase` is called with, inside the block."""
    _phase_listeners.append(listener)
    try:
        yield
    finally:
        _phase_listeners.remove(listener)


def _read_accelerator_peak(
    run_step: Callable[[], Any], drop_gradients: Callable[[], None], device: torch.device
) -> PeakReading:
    memory = torch.accelerator.memory
    drop_gradients()
    free_cached_memory(device)
    run_step()
    free_cached_memory(device)
    reading = PeakReading()
    current = Phase.FORWARD
    retries = _alloc_retries(device)
    highest_reserved = 0

    def close_phase(next_phase: Phase | None) -> None:
        # The allocator counts when memory is asked for, so no synchronization is needed here.
        nonlocal current, highest_reserved
        peak = int(memory.max_memory_allocated(device))
        reading.phase_peak_bytes[current] = max(peak, reading.phase_peak_bytes.get(current, 0))
        highest_reserved = max(highest_reserved, int(memory.max_memory_reserved(device)))
        memory.reset_peak_memory_stats(device)
        current = next_phase or current

    memory.reset_peak_memory_stats(device)
    with listening_to_phases(close_phase):
        run_step()
    synchronize(device)
    close_phase(None)
    free_bytes, total_bytes = device_memory(device)
    reading.reserved_bytes = highest_reserved
    reading.device_bytes = total_bytes - free_bytes
    reading.alloc_retries = _alloc_retries(device) - retries
    return reading


def _alloc_retries(device: torch.device) -> int:
    return int(torch.accelerator.memory.memory_stats(device).get("num_alloc_retries", 0))


def _read_cpu_peak(
    run_step: Callable[[], Any], drop_gradients: Callable[[], None], device: torch.device
) -> PeakReading:
    # Frees of blocks older than the profile are not recorded. So gradients go first, the first of
    # two profiled steps brings everything that lives from step to step into the record, and what
    # that step replaced (a tensor that the user's code keeps until the next step) is left out.
    drop_gradients()
    gc.collect()
    residents = [(_refer_weakly(s), s.nbytes()) for s in _live_storages(device)]

    def mark(phase: Phase) -> None:
        with record_function(_PHASE_PREFIX + phase.name):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run_step()
        gc.collect()
        resident_bytes = sum(size for storage, size in residents if not storage.expired())
        with record_function(_PHASE_PREFIX + "START"):
            pass
        with listening_to_phases(mark):
            run_step()
    events = list(_events_in(profiled.profiler.kineto_results.experimental_event_tree()))
    events.sort(key=lambda event: event.start_ns)  # stable: those of one nanosecond stay in order
    return PeakReading(phase_peak_bytes=phase_peaks(events, resident_bytes))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """A block of memory that is taken or given back, or the begin of a phase."""

    start_ns: int
    """When."""
    address: int = 0
    """Of the block."""
    size_bytes: int = 0
    """What is taken; below zero, what is given back."""
    phase: str = ""
    """The phase that begins, `START` for the step that counts; empty for memory."""


def _events_in(tree: Iterable[Any]) -> Iterator[MemoryEvent]:
    """Yields what a profiler's events say of the CPU's memory and of phases."""
    waiting = list(tree)[::-1]
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children[::-1])
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            if block.device.type == "cpu":
                yield MemoryEvent(event.start_time_ns, block.ptr, block.alloc_size)
        elif event.name.startswith(_PHASE_PREFIX):
            phase = event.name.removeprefix(_PHASE_PREFIX)
            yield MemoryEvent(event.start_time_ns, phase=phase)


def phase_peaks(events: Iterable[MemoryEvent], resident_bytes: int) -> dict[Phase, int]:
    """Returns the highest bytes in each phase from START on, from a profile's events in order.

    What a thread that is not profiled gives back is not recorded: gloo's threads may be the last to
    hold what ranks send each other. Such a block is seen to be gone once its address is taken anew.
    """
    live_bytes = resident_bytes
    blocks: dict[int, int] = {}
    started = False
    current = Phase.FORWARD
    peaks: dict[Phase, int] = {}
    for event in events:
        if event.phase == "START":
            started = True
        elif event.phase:
            current = Phase[event.phase]
        else:
            known_bytes = blocks.pop(event.address, 0)
            if event.size_bytes > 0:
                live_bytes -= known_bytes
                blocks[event.address] = event.size_bytes
            live_bytes += event.size_bytes
        if started:
            peaks[current] = max(live_bytes, peaks.get(current, 0))
    return peaks


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes in live tensors on `device`."""
    if device.type == "cpu":
        return live_tensor_bytes(device)
    return int(torch.accelerator.memory.memory_allocated(device))


def live_tensor_bytes(device: torch.device) -> int:
    """Returns the bytes of all storages on `device` that some Python object holds, each once."""
    return sum(storage.nbytes() for storage in _live_storages(device))


def _live_storages(device: torch.device) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):
            _add_storage(candidate, device, storages)
            if candidate.is_leaf and candidate.grad is not None:
                _add_storage(candidate.grad, device, storages)
    return list(storages.values())


def _add_storage(
    tensor: torch.Tensor, device: torch.device, storages: dict[int, torch.UntypedStorage]
) -> None:
    try:
        if tensor.device.type != device.type:
            return
        storage = tensor.untyped_storage()
        # A dry run may leave fake tensors in a module until its next forward, as in the list of
        # weights that nn.LSTM keeps: they only say that they are here, and have no address.
        if storage.device.type != device.type:
            return
        address = storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return  # no storage of its own: sparse, wrapper subclasses; no device: an undefined tensor
    if address:
        storages[address] = storage


# --- phases ---------------------------------------------------------------------------------------


class MarkedForward:
    """A compiled model's forward, which marks its phases by itself: hooks would be compiled too."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.calls = 0
        """How often it ran."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the forward returns."""
        self.calls += 1
        mark_phase(Phase.FORWARD)
        output = self._forward(*args, **kwargs)
        mark_phase(Phase.LOSS)
        return output


@contextlib.contextmanager
def phases_marked(model: torch.nn.Module) -> Iterator[None]:
    """Calls `mark_phase` as the steps of `model` go from phase to phase, inside the block."""
    plain_backward = torch.autograd.backward

    @functools.wraps(plain_backward)
    def backward(*args: Any, **kwargs: Any) -> None:
        mark_phase(Phase.BACKWARD)
        plain_backward(*args, **kwargs)
        mark_phase(Phase.CLIPPING)

    def on_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
        mark_phase(Phase.OPTIMIZER)

    removers = [register_optimizer_step_pre_hook(on_optimizer)]
    if not isinstance(vars(model).get("_compiled_call_impl"), MarkedForward):
        removers += [
            model.register_forward_pre_hook(lambda module, args: mark_phase(Phase.FORWARD)),
            model.register_forward_hook(lambda module, args, output: mark_phase(Phase.LOSS)),
        ]
    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain_backward
        for remover in removers:
            remover.remove()


# --- the machine ----------------------------------------------------------------------------------


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_host_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _host_memory_bytes()


def _driver_version(device: torch.device) -> str | None:
    with contextlib.suppress(OSError):
        if device.type == "cuda" and torch.version.cuda:
            return Path("/sys/module/nvidia/version").read_text().strip()
    return None
