"""The device: peaks to the byte on the CPU, and what is asked of an accelerator."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_search import device as devices
from sac_search.device import (
    Clock,
    MemoryEvent,
    OpTimer,
    PeakReading,
    live_tensor_bytes,
    mark_phase,
    phase_peaks,
    phases_marked,
    read_peak,
    time_call,
)
from sac_search.errors import UsageError
from sac_search.records import Phase
from sac_search.workload import Workload

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SCALAR = 4
"""Bytes of a loss, and of the gradient that backward begins with."""
NUMBER = 8 + 4
"""Bytes of a Python number beside a tensor: a double, and what it is cast to."""
WEIGHT = 4 * 1000
"""Bytes of the weight; of its gradient, its input and its product as well."""
HUNGER = 4 * 50_000
"""Bytes that one phase takes and gives back."""


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, which are slow, as the worker does."""
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()


def take(size_bytes: int) -> None:
    torch.ones(size_bytes // 4)


def nothing() -> None:
    pass


def resident_bytes() -> int:
    """Returns what a step that does nothing reads: everything that is alive beside the step."""
    return read_peak(nothing, nothing, CPU).allocated_bytes


# --- the peak on the CPU: tensors by hand ---------------------------------------------------------


def test_the_peak_is_the_largest_sum_of_live_tensors() -> None:
    def step() -> None:
        a = torch.ones(1000)
        mark_phase(Phase.LOSS)
        b = torch.ones(2000)
        del a
        mark_phase(Phase.BACKWARD)
        c = torch.ones(250)
        del b, c
        mark_phase(Phase.OPTIMIZER)

    base = resident_bytes()
    reading = read_peak(step, nothing, CPU)
    assert reading.phase_peak_bytes == {
        Phase.FORWARD: base + 4000,
        Phase.LOSS: base + 12_000,
        Phase.BACKWARD: base + 9000,
        Phase.OPTIMIZER: base,
    }
    assert reading.allocated_bytes == reading.limited_bytes == base + 12_000
    assert reading.peak_phase is Phase.LOSS
    assert reading.reserved_bytes is reading.device_bytes is None


def test_only_the_second_of_two_steps_counts() -> None:
    sizes = iter([5000, 10])
    base = resident_bytes()
    reading = read_peak(lambda: torch.ones(next(sizes)), nothing, CPU)
    assert reading.allocated_bytes == base + 40


def test_what_a_step_keeps_for_the_next_one_counts_as_long_as_it_lives() -> None:
    kept: dict[str, Tensor] = {}

    def step() -> None:
        new = torch.ones(1000)
        mark_phase(Phase.LOSS)
        kept["last"] = new  # frees the one before

    base = resident_bytes()
    step()
    reading = read_peak(step, nothing, CPU)
    assert reading.phase_peak_bytes == {Phase.FORWARD: base + 8000, Phase.LOSS: base + 8000}


def test_garbage_in_a_cycle_does_not_count_from_step_to_step() -> None:
    def step() -> None:
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        base = resident_bytes()
        reading = read_peak(step, nothing, CPU)
    finally:
        gc.enable()
    assert reading.allocated_bytes == base + 4000


def test_views_and_tensors_in_place_take_nothing() -> None:
    x = torch.ones(1000)

    def step() -> None:
        x.view(10, 100).transpose(0, 1)
        x.relu_()
        x.detach()

    base = resident_bytes()
    assert read_peak(step, nothing, CPU).allocated_bytes == base


def test_gradients_are_dropped_before_the_first_step() -> None:
    calls: list[str] = []
    read_peak(lambda: calls.append("step"), lambda: calls.append("drop"), CPU)
    assert calls == ["drop", "step", "step"]


def test_a_step_that_raises_leaves_no_listener() -> None:
    def step() -> None:
        raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"):
        read_peak(step, nothing, CPU)
    assert devices._phase_listeners == []


# --- the peak on the CPU: training steps ----------------------------------------------------------


class Hungry(nn.Module):
    """`weight * x`, which takes and gives back so many bytes in forward and in backward."""

    def __init__(self, forward_bytes: int = 0, backward_bytes: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WEIGHT // 4))
        self.forward_bytes = forward_bytes
        self.backward_bytes = backward_bytes

    def forward(self, x: Tensor) -> Tensor:
        product = self.weight * x
        take(self.forward_bytes)
        return _HungryBackward.apply(product, self.backward_bytes)


class _HungryBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size_bytes: int) -> Tensor:
        ctx.size_bytes = size_bytes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        take(ctx.size_bytes)
        return gradient, None


class HungryOptimizer(torch.optim.Optimizer):
    """Changes nothing and takes so many bytes for it."""

    def __init__(self, parameters: Any, size_bytes: int) -> None:
        super().__init__(parameters, {})
        self.size_bytes = size_bytes

    def step(self, closure: Any = None) -> None:
        take(self.size_bytes)


def hungry_workload(hungry: Phase | None = None, **fields: Any) -> Workload:
    """Returns a step of which one phase takes HUNGER bytes and gives them back."""

    def in_phase(phase: Phase) -> int:
        return HUNGER if phase is hungry else 0

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        product = model(x)
        take(in_phase(Phase.LOSS))
        return product.sum()

    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        loss.backward()
        take(in_phase(Phase.CLIPPING))
        assert workload.optimizer is not None
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return loss

    model = Hungry(in_phase(Phase.FORWARD), in_phase(Phase.BACKWARD))
    optimizer = HungryOptimizer(model.parameters(), in_phase(Phase.OPTIMIZER))
    given = {"step": step if hungry is Phase.CLIPPING else None} | fields
    return Workload(model, loss_fn, torch.ones(WEIGHT // 4), optimizer, **given)


def read_workload(workload: Workload) -> PeakReading:
    with phases_marked(workload.model):
        return read_peak(workload.run_step, workload.drop_gradients, CPU)


FORWARD_END = WEIGHT
"""Over what is resident: the product."""
BACKWARD_END = SCALAR + WEIGHT
"""Over what is resident: the loss and the gradient."""
LEAN = {
    Phase.FORWARD: FORWARD_END,
    Phase.LOSS: FORWARD_END + SCALAR,
    Phase.BACKWARD: SCALAR + SCALAR + WEIGHT,
    Phase.CLIPPING: BACKWARD_END,
    Phase.OPTIMIZER: BACKWARD_END,
}


def over_base(reading: PeakReading, base: int) -> dict[Phase, int]:
    return {phase: size_bytes - base for phase, size_bytes in reading.phase_peak_bytes.items()}


def test_the_peaks_of_a_step_to_the_byte() -> None:
    workload = hungry_workload()
    assert over_base(read_workload(workload), resident_bytes()) == LEAN


@pytest.mark.parametrize(
    ("hungry", "beside"),
    [
        (Phase.FORWARD, FORWARD_END),
        (Phase.LOSS, FORWARD_END),
        (Phase.BACKWARD, SCALAR + SCALAR),
        (Phase.CLIPPING, BACKWARD_END),
        (Phase.OPTIMIZER, BACKWARD_END),
    ],
)
def test_each_phase_can_hold_the_peak(hungry: Phase, beside: int) -> None:
    workload = hungry_workload(hungry)
    reading = read_workload(workload)
    assert over_base(reading, resident_bytes()) == LEAN | {hungry: beside + HUNGER}
    assert reading.peak_phase is hungry


def test_gradients_that_are_never_dropped_stay_in_the_peak() -> None:
    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        loss.backward()
        return loss

    workload = hungry_workload(step=step)
    base = resident_bytes()
    reading = read_workload(workload)
    # The second gradient is made in full before it is added to the first.
    assert over_base(reading, base) == {
        Phase.FORWARD: WEIGHT + FORWARD_END,
        Phase.LOSS: WEIGHT + FORWARD_END + SCALAR,
        Phase.BACKWARD: WEIGHT + SCALAR + SCALAR + WEIGHT,
        Phase.CLIPPING: WEIGHT + SCALAR,
    }


def test_gradients_from_before_do_not_count_twice() -> None:
    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        loss.backward()
        return loss

    workload = hungry_workload(step=step)
    first = read_workload(workload)
    assert workload.model.weight.grad is not None
    assert read_workload(workload).phase_peak_bytes == first.phase_peak_bytes


def test_a_step_that_drops_gradients_at_its_start() -> None:
    def step(workload: Workload) -> Tensor:
        workload.optimizer.zero_grad()
        loss = workload.run_loss()
        loss.backward()
        workload.optimizer.step()
        return loss

    workload = hungry_workload(step=step)
    base = resident_bytes()
    reading = read_workload(workload)
    assert over_base(reading, base) == LEAN


def test_accumulation_adds_each_gradient_to_the_first() -> None:
    def step(workload: Workload) -> Tensor:
        for _ in range(3):
            loss = workload.run_loss()
            loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return loss

    workload = hungry_workload(step=step)
    base = resident_bytes()
    reading = read_workload(workload)
    # The loss of the step before is alive until the next one takes its name.
    assert over_base(reading, base) == {
        Phase.FORWARD: SCALAR + WEIGHT + FORWARD_END,
        Phase.LOSS: SCALAR + WEIGHT + FORWARD_END + SCALAR,
        Phase.BACKWARD: WEIGHT + SCALAR + SCALAR + WEIGHT,
        Phase.CLIPPING: WEIGHT + SCALAR,
        Phase.OPTIMIZER: WEIGHT + SCALAR,
    }


def test_clipping_is_a_phase_of_its_own() -> None:
    def step(workload: Workload) -> Tensor:
        loss = workload.run_loss()
        loss.backward()
        torch.nn.utils.clip_grad_value_(workload.model.parameters(), 0.5, foreach=False)
        held = workload.model.weight.grad.abs()  # as a norm does
        del held
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return loss

    workload = hungry_workload(step=step)
    base = resident_bytes()
    assert over_base(read_workload(workload), base) == LEAN | {
        Phase.CLIPPING: BACKWARD_END + WEIGHT
    }


def test_adamw_takes_two_weights_for_its_denominator() -> None:
    workload = hungry_workload()
    optimizer = torch.optim.AdamW(workload.model.parameters(), foreach=False)
    workload = Workload(workload.model, workload.loss_fn, workload.batch, optimizer)
    before = resident_bytes()
    workload.run_step()  # makes the optimizer's state
    base = resident_bytes()
    assert base - before == 2 * WEIGHT + SCALAR
    reading = read_workload(workload)
    assert over_base(reading, base)[Phase.OPTIMIZER] == BACKWARD_END + 2 * WEIGHT + NUMBER
    assert reading.peak_phase is Phase.OPTIMIZER


def test_two_linear_layers_by_hand() -> None:
    batch, width, hidden = 64, 32, 128
    model = nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False)
    )
    workload = Workload(model, lambda m, x: m(x).sum(), torch.ones(batch, width))
    base = resident_bytes()
    reading = read_workload(workload)
    activation = 4 * batch * hidden
    output = 4 * batch * width
    weight = 4 * width * hidden
    peaks = over_base(reading, base)
    # The first product lives until the ReLU, whose result is saved, has been made.
    assert peaks[Phase.FORWARD] == max(2 * activation, activation + output)
    assert peaks[Phase.LOSS] == activation + output + SCALAR
    # Saved result, gradient behind the ReLU, gradient before it, gradient of the second weight.
    assert peaks[Phase.BACKWARD] == 3 * activation + weight + SCALAR + SCALAR


# --- a profile's events ---------------------------------------------------------------------------


def test_phases_count_from_the_start_mark_on() -> None:
    events = [
        MemoryEvent(0, address=1, size_bytes=500),
        MemoryEvent(1, address=1, size_bytes=-500),
        MemoryEvent(2, phase="START"),
        MemoryEvent(3, address=1, size_bytes=100),
        MemoryEvent(4, phase="BACKWARD"),
        MemoryEvent(5, address=2, size_bytes=30),
        MemoryEvent(6, address=1, size_bytes=-100),
        MemoryEvent(7, phase="OPTIMIZER"),
    ]
    assert phase_peaks(events, 10) == {
        Phase.FORWARD: 110,
        Phase.BACKWARD: 140,
        Phase.OPTIMIZER: 40,
    }


def test_what_another_thread_gave_back_is_gone_once_its_address_is_taken_anew() -> None:
    taken = [MemoryEvent(i, address=7, size_bytes=100) for i in range(1, 20)]
    returned = [
        MemoryEvent(20, address=7, size_bytes=-100),
        MemoryEvent(21, address=8, size_bytes=5),
    ]
    events = [MemoryEvent(0, phase="START"), *taken, *returned]
    assert phase_peaks(events, 0) == {Phase.FORWARD: 100}


def test_blocks_that_another_thread_frees_do_not_pile_up() -> None:
    megabyte = 2**20 // 4

    def run_step() -> None:
        mark_phase(Phase.FORWARD)
        for _ in range(40):
            held = [torch.empty(megabyte)]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

    before = live_tensor_bytes(CPU)
    # The allocator hands out a few addresses in turn.
    assert read_peak(run_step, nothing, CPU).allocated_bytes - before < 10 * 2**20


# --- phases ---------------------------------------------------------------------------------------


def test_marks_are_gone_afterwards_even_after_an_error() -> None:
    model = nn.Linear(1, 1)
    backward = torch.autograd.backward

    def fail() -> None:
        with phases_marked(model):
            assert torch.autograd.backward is not backward
            raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"):
        fail()
    assert torch.autograd.backward is backward
    assert not model._forward_hooks and not model._forward_pre_hooks
    heard: list[Phase] = []
    with devices.listening_to_phases(heard.append):
        model(torch.ones(1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert heard == []


def test_phases_in_the_order_of_a_step() -> None:
    workload = hungry_workload()
    heard: list[Phase] = []
    with phases_marked(workload.model), devices.listening_to_phases(heard.append):
        workload.run_step()
    assert heard == list(Phase)


# --- live tensors ---------------------------------------------------------------------------------


def gained(make: Callable[[], Any]) -> int:
    gc.collect()
    before = live_tensor_bytes(CPU)
    made = make()
    size_bytes = live_tensor_bytes(CPU) - before
    assert made is not None
    return size_bytes


def with_gradient() -> Tensor:
    parameter = nn.Parameter(torch.ones(10))
    parameter.sum().backward()
    return parameter


@pytest.mark.parametrize(
    ("make", "size_bytes"),
    [
        (lambda: torch.ones(10), 40),
        (lambda: torch.ones(10, dtype=torch.float64), 80),
        (lambda: nn.Parameter(torch.ones(10)), 40),
        (lambda: [t := torch.ones(10), t, t.view(2, 5), t[3:], t.detach()], 40),
        (lambda: torch.ones(10)[3:4], 40),
        (lambda: torch.ones(1).expand(1000), 4),
        (with_gradient, 80),
        (lambda: torch.ones(10, device="meta"), 0),
        (lambda: torch.empty(0), 0),
        (lambda: nn.Linear(3, 2), 4 * (6 + 2)),
    ],
)
def test_live_tensors_count_each_storage_once(make: Callable[[], Any], size_bytes: int) -> None:
    assert gained(make) == size_bytes


def test_live_tensors_without_a_storage_do_not_disturb() -> None:
    assert gained(lambda: torch.ones(2, 2).to_sparse()) >= 0


# --- time -----------------------------------------------------------------------------------------


class FakeTime:
    """Two clocks that move only when told to; the one of the process runs at half the speed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(time, "process_time", lambda: self.seconds / 2)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_clock_is_processor_time_on_the_cpu_and_elapsed_time_elsewhere() -> None:
    assert devices.default_clock(CPU) is Clock.CPU
    assert devices.default_clock(CUDA) is Clock.WALL


def test_a_call_is_timed_by_the_chosen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    assert time_call(lambda: fake.sleep(3), CPU, Clock.WALL) == 3.0
    assert time_call(lambda: fake.sleep(3), CPU, Clock.CPU) == 1.5


def test_ops_on_the_cpu_are_timed_by_the_chosen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    for clock, expected in ((Clock.WALL, [1.0, 2.0]), (Clock.CPU, [0.5, 1.0])):
        timer = OpTimer(CPU, clock)
        for seconds in (1, 2):
            timer.start()
            fake.sleep(seconds)
            timer.stop()
            fake.sleep(10)
        assert timer.seconds() == expected


# --- accelerators ---------------------------------------------------------------------------------


class FakeAccelerator:
    """A CUDA-like device: an allocator with its counters, and a record of what was called."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, count: int = 2, current: int = 0
    ) -> None:
        self.calls: list[str] = []
        self.allocated = self.allocated_peak = 1000
        self.reserved = self.reserved_peak = 3000
        self.retries = 7
        self.total = 10_000
        self.elsewhere = 500
        self.current = current
        accelerator = torch.accelerator
        for name, value in {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device_index": lambda: self.current,
            "set_device_index": self._set_index,
            "synchronize": lambda device=None: self.calls.append("synchronize"),
        }.items():
            monkeypatch.setattr(accelerator, name, value)
        for name, value in {
            "empty_cache": self._empty_cache,
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.allocated_peak,
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_reserved": lambda device=None: self.reserved_peak,
            "reset_peak_memory_stats": self._reset,
            "memory_stats": lambda device=None: {"num_alloc_retries": self.retries},
            "get_memory_info": lambda device=None: (
                self.total - self.reserved - self.elsewhere,
                self.total,
            ),
        }.items():
            monkeypatch.setattr(accelerator.memory, name, value, raising=False)

    def allocate(self, size_bytes: int) -> None:
        """Takes memory in whole kilobytes from the device, as a caching allocator does."""
        self.allocated += size_bytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        while self.reserved < self.allocated:
            self.reserved += 1000
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def free(self, size_bytes: int) -> None:
        self.allocated -= size_bytes

    def _empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.reserved = -(-self.allocated // 1000) * 1000

    def _reset(self, device: Any = None) -> None:
        self.calls.append("reset")
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def _set_index(self, index: int) -> None:
        self.current = index


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch)


def test_an_accelerators_peak_is_read_phase_by_phase(accelerator: FakeAccelerator) -> None:
    def step() -> None:
        accelerator.calls.append("step")
        accelerator.allocate(2200)
        mark_phase(Phase.LOSS)
        accelerator.allocate(300)
        accelerator.free(2000)
        mark_phase(Phase.BACKWARD)
        accelerator.allocate(3500)
        accelerator.retries += 1
        accelerator.free(3500)
        mark_phase(Phase.OPTIMIZER)
        accelerator.free(500)

    reading = read_peak(step, lambda: accelerator.calls.append("drop"), CUDA)
    assert reading.phase_peak_bytes == {
        Phase.FORWARD: 3200,
        Phase.LOSS: 3500,
        Phase.BACKWARD: 5000,
        Phase.OPTIMIZER: 1500,
    }
    assert reading.peak_phase is Phase.BACKWARD
    assert reading.allocated_bytes == 5000
    assert reading.reserved_bytes == reading.limited_bytes == 5000
    assert reading.device_bytes == 5000 + 500
    assert reading.alloc_retries == 1
    # Gradients and cached blocks of earlier steps go first; the first step is not counted.
    steps = [i for i, call in enumerate(accelerator.calls) if call == "step"]
    assert accelerator.calls[: steps[0]] == ["drop", "synchronize", "empty_cache"]
    assert accelerator.calls[steps[0] + 1 : steps[1]] == ["synchronize", "empty_cache", "reset"]
    assert accelerator.calls[steps[1] + 1 :] == ["reset"] * 3 + ["synchronize", "reset"]


def test_the_budget_limits_what_is_reserved_not_what_is_allocated(
    accelerator: FakeAccelerator,
) -> None:
    def step() -> None:
        accelerator.allocate(1500)
        accelerator.reserved += 4000  # a block that is split badly
        accelerator.reserved_peak = max(accelerator.reserved_peak, accelerator.reserved)
        mark_phase(Phase.BACKWARD)
        accelerator.reserved -= 4000  # given back before the next phase
        accelerator.free(1500)
        mark_phase(Phase.OPTIMIZER)

    reading = read_peak(step, nothing, CUDA)
    assert reading.allocated_bytes == 2500
    assert reading.limited_bytes == reading.reserved_bytes == 3000 + 4000


def test_a_phase_that_comes_twice_keeps_its_highest_peak(accelerator: FakeAccelerator) -> None:
    def step() -> None:
        for size_bytes in (2000, 100):
            mark_phase(Phase.FORWARD)
            accelerator.allocate(size_bytes)
            mark_phase(Phase.BACKWARD)
            accelerator.free(size_bytes)

    reading = read_peak(step, nothing, CUDA)
    assert reading.phase_peak_bytes == {Phase.FORWARD: 3000, Phase.BACKWARD: 3000}


def test_a_call_on_an_accelerator_is_timed_between_two_waits(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTime(monkeypatch)

    def synchronize(device: Any = None) -> None:
        accelerator.calls.append("synchronize")
        fake.sleep(1.0)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    seconds = time_call(lambda: accelerator.calls.append("call"), CUDA, Clock.WALL)
    assert accelerator.calls == ["synchronize", "call", "synchronize"]
    assert seconds == 1.0  # the device's work after the call, not the work before it


def test_ops_on_an_accelerator_are_timed_by_events(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_milliseconds = iter([0.0, 2.0, 5.0, 9.0])

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device == CUDA
            assert enable_timing

        def record(self) -> None:
            accelerator.calls.append("record")
            self.at = next(device_milliseconds)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch, "Event", Event)
    timer = OpTimer(CUDA, Clock.WALL)
    for _ in range(2):
        timer.start()
        timer.stop()
    assert timer.seconds() == [0.002, 0.004]
    assert accelerator.calls == ["record"] * 4 + ["synchronize"]  # one wait, at the end


def test_cached_memory_is_given_back_only_once_the_device_is_idle(
    accelerator: FakeAccelerator,
) -> None:
    devices.free_cached_memory(CUDA)
    assert accelerator.calls == ["synchronize", "empty_cache"]
    devices.free_cached_memory(CPU)
    devices.synchronize(CPU)
    assert len(accelerator.calls) == 2


def test_an_accelerator_is_described_by_its_own_module(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = SimpleNamespace(get_device_name=lambda device: f"Model {device.index}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: names)
    figures = devices.describe_device(CUDA)
    assert (figures.name, figures.total_bytes) == ("Model 0", 10_000)


def test_memory_on_torch_2_9_comes_from_the_devices_module(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.accelerator.memory, "get_memory_info")
    old = SimpleNamespace(mem_get_info=lambda device: (1, 2))
    monkeypatch.setattr(torch, "get_device_module", lambda device: old)
    assert devices.device_memory(CUDA) == (1, 2)


def test_the_cpu_describes_itself() -> None:
    figures = devices.describe_device(CPU)
    assert figures.name
    assert figures.driver is None
    free_bytes, total_bytes = devices.device_memory(CPU)
    assert 0 < free_bytes < total_bytes == figures.total_bytes


def test_allocator_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert devices.allocator_settings(CUDA) == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert devices.allocator_settings(CPU) == ""


# --- finding it -----------------------------------------------------------------------------------


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_there_is_the_cpu_when_asked_for() -> None:
    assert devices.find_device("cpu") == devices.find_device("cpu:0") == CPU
    with pytest.raises(UsageError, match="no accelerator that torch can use; add --device cpu"):
        devices.find_device(None)
    with pytest.raises(UsageError, match="--device cuda: torch can use the CPU only"):
        devices.find_device("cuda")
    with pytest.raises(UsageError, match="--device meta: torch can use the CPU only"):
        devices.find_device("meta")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:0:1", "17 GPUs"])
def test_what_is_no_device_at_all(name: str) -> None:
    with pytest.raises(UsageError, match=f"^--device {name}: .") as raised:
        devices.find_device(name)
    assert "\n" not in str(raised.value)


def test_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator(monkeypatch, count=2, current=1)
    assert devices.find_device(None) == torch.device("cuda:1")
    assert devices.find_device("cuda") == torch.device("cuda:1")
    assert devices.find_device("cuda:0") == torch.device("cuda:0")
    assert devices.find_device("cpu") == CPU
    with pytest.raises(UsageError, match="--device cuda:2: this machine has 2 of them"):
        devices.find_device("cuda:2")
    with pytest.raises(UsageError, match=r"--device xpu: .*an accelerator of type cuda on this"):
        devices.find_device("xpu")
    devices.use_device(torch.device("cuda:0"))
    assert fake.current == 0
    devices.use_device(CPU)
    assert fake.current == 0
