"""Peaks and step times of policies: whose steps run when, and what one failure does to the rest."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from sac_search import measure
from sac_search.device import Clock
from sac_search.measure import StepMeter, noise_fraction
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.policy_runtime import checkpoint_layer, restore_layer
from sac_search.records import FailureKind, Outcome, Phase
from sac_search.workload import Workload

CPU = torch.device("cpu")
LAYERS = ["blocks.0", "blocks.1", "blocks.2"]
NONE = NO_CHECKPOINTING
ONE, TWO, FULL = (checkpoint_layers(LAYERS[:n]) for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, which are slow, as the worker does."""
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()


class FakeTime:
    """Steps take as long as the script says for the number of layers that are checkpointed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, script: Callable[[int, int], float]
    ) -> None:
        self.timed: list[int] = []
        self.script = script
        self.model: nn.Module | None = None
        monkeypatch.setattr(measure, "time_call", self.time_call)

    def time_call(self, call: Callable[[], Any], device: torch.device, clock: Clock) -> float:
        assert (device, clock) == (CPU, Clock.CPU)
        call()
        checkpointed = count_checkpointed(self.model)
        self.timed.append(checkpointed)
        return self.script(checkpointed, len(self.timed) - 1)


def count_checkpointed(model: nn.Module) -> int:
    return sum("_sac_layer_class" in type(block).__dict__ for block in model.blocks)


def meter_of(step: Callable[[Workload], Tensor] | None = None, **fields: Any) -> StepMeter:
    model = tiny.stack(3)
    workload = Workload(model, lambda m, x: m(x).square().mean(), tiny.tokens(), step=step)
    return StepMeter(workload=workload, device=CPU, clock=Clock.CPU, **fields)


def default_step(workload: Workload) -> Tensor:
    loss = workload.run_loss()
    loss.backward()
    workload.drop_gradients()
    return loss


def failing_step(
    fails: Callable[[int], bool], error: BaseException | float
) -> Callable[[Workload], Tensor]:
    """Returns a step that raises, or gives that loss, when so many layers are checkpointed."""

    def step(workload: Workload) -> Tensor:
        loss = default_step(workload)
        if fails(count_checkpointed(workload.model)):
            if isinstance(error, float):
                return loss.detach() * error
            raise error
        return loss

    return step


def kinds(outcomes: list[Outcome]) -> list[FailureKind | None]:
    return [None if o.failure is None else o.failure.kind for o in outcomes]


def assert_untouched(meter: StepMeter, backward: Any) -> None:
    model = meter.workload.model
    assert count_checkpointed(model) == 0
    assert all(type(block) is tiny.Block for block in model.blocks)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch.autograd.backward is backward
    assert all(p.grad is None for p in model.parameters())


# --- order and time -------------------------------------------------------------------------------


def test_steps_of_all_policies_and_the_reference_take_turns() -> None:
    order: list[int] = []

    def step(workload: Workload) -> Tensor:
        order.append(count_checkpointed(workload.model))
        return default_step(workload)

    meter_of(step).compare([ONE, TWO], FULL, steps=3)
    peaks = [1, 1, 2, 2]
    assert order == peaks + [3, 1, 2] * 3


def test_measure_runs_one_policy_beside_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch, lambda checkpointed, index: 1.0)
    meter = meter_of(steps=2)
    fake.model = meter.workload.model
    outcome = meter.measure(ONE, FULL)
    assert fake.timed == [3, 1, 3, 1]
    assert outcome.measurement is not None
    assert outcome.measurement.steps == 2


def test_a_drift_of_the_machine_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every round is twice as slow as the one before.
    fake = FakeTime(monkeypatch, lambda n, index: {3: 1.0, 1: 0.5, 2: 0.75}[n] * 2 ** (index // 3))
    meter = meter_of()
    fake.model = meter.workload.model
    one, two = meter.compare([ONE, TWO], FULL, steps=5)
    assert one.measurement is not None and two.measurement is not None
    assert (one.measurement.relative_seconds, two.measurement.relative_seconds) == (0.5, 0.75)
    assert one.measurement.step_noise_fraction == 0.0
    assert one.measurement.step_seconds == 0.5 * 4
    assert one.measurement.reference_seconds == two.measurement.reference_seconds == 4.0


def test_noise_is_that_of_the_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 0.9, 1.0, 1.0, 1.0, 1.1])
    fake = FakeTime(monkeypatch, lambda n, index: next(seconds))
    meter = meter_of()
    fake.model = meter.workload.model
    (outcome,) = meter.compare([ONE], FULL, steps=3)
    assert outcome.measurement is not None
    assert outcome.measurement.step_noise_fraction == noise_fraction([0.9, 1.0, 1.1])


@pytest.mark.parametrize(("reference_seconds", "rounds"), [(4.1, 3), (3.9, 6)])
def test_of_long_steps_three_are_enough(
    monkeypatch: pytest.MonkeyPatch, reference_seconds: float, rounds: int
) -> None:
    fake = FakeTime(monkeypatch, lambda n, index: reference_seconds if n == 3 else 1.0)
    meter = meter_of()
    fake.model = meter.workload.model
    (outcome,) = meter.compare([ONE], FULL, steps=6)
    assert outcome.measurement is not None
    assert outcome.measurement.steps == rounds
    assert len(fake.timed) == 2 * rounds


def test_the_noise_of_a_median() -> None:
    assert noise_fraction([2.0, 2.0, 2.0]) == 0.0
    expected = 1.2533 * 1.4826 * 0.1 / math.sqrt(3) / 1.0
    assert noise_fraction([0.9, 1.0, 1.1]) == pytest.approx(expected)
    assert noise_fraction([9.0, 10.0, 11.0]) == pytest.approx(expected)
    assert noise_fraction([0.9, 1.0, 1.1, 0.9, 1.1, 1.0, 900.0]) < 0.1  # one slow step
    assert noise_fraction([1.0]) == 0.0


def test_a_measurement_on_the_cpu() -> None:
    meter = meter_of(steps=3)
    backward = torch.autograd.backward
    measured = meter.measure(TWO, FULL).measurement
    assert measured is not None
    assert measured.steps == 3
    assert measured.step_seconds > 0
    assert measured.relative_seconds > 0
    assert measured.loss == meter.workload.run_loss().item()
    assert measured.reserved_bytes is measured.device_bytes is None
    assert measured.alloc_retries == 0
    assert measured.peak_bytes == measured.allocated_bytes
    assert measured.phase_peak_bytes[measured.peak_phase] == measured.peak_bytes
    assert set(measured.phase_peak_bytes) == set(Phase) - {Phase.OPTIMIZER}  # there is none
    assert_untouched(meter, backward)


# --- peaks ----------------------------------------------------------------------------------------


def test_peaks_fall_in_the_order_in_which_policies_save() -> None:
    model = tiny.stack(6)
    workload = Workload(model, lambda m, x: m(x).square().mean(), tiny.tokens(16, 64, tiny.HIDDEN))
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU)
    layers = [f"blocks.{index}" for index in range(6)]
    save_matmul = checkpoint_layers(layers, Tier(ops=(tiny.MM,)))
    outcomes = meter.compare([checkpoint_layers(layers), save_matmul, NONE], NONE, steps=1)
    full, matmul, none = (o.measurement.peak_bytes for o in outcomes if o.measurement is not None)
    assert full < matmul < none
    # What a saved matmul costs: its output, in all six layers but for the one that is recomputed.
    activation = 4 * 16 * 64 * tiny.HIDDEN
    matmuls = (3 + 1 + 2 + 1) * activation
    assert 5 * matmuls <= matmul - full <= 6 * matmuls


def test_an_exported_module_applies_and_removes_itself() -> None:
    calls: list[str] = []

    class Module:
        def apply(self, model: nn.Module) -> None:
            calls.append("apply")
            checkpoint_layer(model.blocks[0])

        def remove(self, model: nn.Module) -> None:
            calls.append("remove")
            restore_layer(model.blocks[0])

    seen: list[int] = []

    def step(workload: Workload) -> Tensor:
        seen.append(count_checkpointed(workload.model))
        return default_step(workload)

    meter = meter_of(step)
    (outcome,) = meter.compare([Module()], NONE, steps=2)
    assert outcome.measurement is not None
    assert calls == ["apply", "remove"] * 3
    assert seen == [1, 1, 0, 1, 0, 1]
    assert count_checkpointed(meter.workload.model) == 0


def test_an_untimed_step_makes_the_optimizers_state() -> None:
    model = tiny.stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, lambda m, x: m(x).square().mean(), tiny.tokens(), optimizer)
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU)
    expected = workload.run_loss().item()
    assert meter.run_untimed_step(FULL) == expected
    assert len(optimizer.state) == len(list(model.parameters()))
    assert count_checkpointed(model) == 0


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("of the user"), FailureKind.USER_ERROR),
        (MemoryError(), FailureKind.HOST_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), FailureKind.OUT_OF_MEMORY),
        (math.nan, FailureKind.NON_FINITE_LOSS),
        (math.inf, FailureKind.NON_FINITE_LOSS),
    ],
)
def test_one_failure_does_not_disturb_the_others(
    error: BaseException | float, kind: FailureKind
) -> None:
    backward = torch.autograd.backward
    meter = meter_of(failing_step(lambda checkpointed: checkpointed == 2, error))
    outcomes = meter.compare([ONE, TWO, NONE], FULL, steps=2)
    assert kinds(outcomes) == [None, kind, None]
    assert [o.measurement.steps for o in outcomes if o.measurement] == [2, 2]
    assert_untouched(meter, backward)


@pytest.mark.parametrize("error", [ValueError("late"), math.nan])
def test_a_failure_in_a_timed_step_ends_that_policy_only(error: BaseException | float) -> None:
    steps = iter(range(1000))

    def fails(checkpointed: int) -> bool:
        # Its first two steps read the peak, the third is timed; the fourth fails.
        return checkpointed == 2 and next(steps) == 3

    order: list[int] = []
    failing = failing_step(fails, error)

    def step(workload: Workload) -> Tensor:
        order.append(count_checkpointed(workload.model))
        return failing(workload)

    outcomes = meter_of(step).compare([ONE, TWO], FULL, steps=4)
    assert kinds(outcomes)[0] is None
    assert outcomes[1].failure is not None
    assert outcomes[0].measurement is not None
    assert outcomes[0].measurement.steps == 4
    assert order == [1, 1, 2, 2, 3, 1, 2, 3, 1, 2, 3, 1, 3, 1]


def test_when_every_policy_failed_no_reference_step_runs() -> None:
    order: list[int] = []

    def step(workload: Workload) -> Tensor:
        order.append(count_checkpointed(workload.model))
        raise ValueError

    outcomes = meter_of(step).compare([ONE, TWO], FULL, steps=4)
    assert kinds(outcomes) == [FailureKind.USER_ERROR] * 2
    assert order == [1, 2]


@pytest.mark.parametrize("error", [ValueError("of the reference"), math.nan])
def test_a_reference_that_fails_is_an_outcome_too(error: BaseException | float) -> None:
    backward = torch.autograd.backward
    meter = meter_of(failing_step(lambda checkpointed: checkpointed == 3, error))
    outcomes = meter.compare([ONE, TWO], FULL, steps=4)
    assert all(o.failure is not None for o in outcomes)
    assert_untouched(meter, backward)


def test_a_policy_for_another_model_is_a_failure_and_changes_nothing() -> None:
    backward = torch.autograd.backward
    meter = meter_of()
    other = checkpoint_layers(["blocks.0", "blocks.9"])
    outcomes = meter.compare([other, ONE], FULL, steps=1)
    assert kinds(outcomes) == [FailureKind.USER_ERROR, None]
    assert outcomes[0].failure is not None
    assert "blocks.9" in outcomes[0].failure.message
    assert_untouched(meter, backward)


def test_a_policy_that_saves_what_is_mutated_later_is_a_failure() -> None:
    class Mutating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    workload = Workload(Mutating(), lambda m, x: m(x).sum(), torch.ones(2, 4))
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU)
    saving: Policy = checkpoint_layers(["blocks.0"], Tier(ops=("aten.addmm.default",)))
    outcomes = meter.compare([saving, NONE], checkpoint_layers(["blocks.0"]), steps=1)
    assert kinds(outcomes) == [FailureKind.MUTATED_SAVED_TENSOR, None]


def test_what_a_failed_step_held_is_freed_before_the_cache_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[Tensor]] = []
    freed: list[bool] = []
    monkeypatch.setattr(
        measure, "free_cached_memory", lambda device: freed.append(held[-1]() is None)
    )

    def step(workload: Workload) -> Tensor:
        activation = torch.ones(1000)
        held.append(weakref.ref(activation))
        workload.run_loss().backward()  # gradients that nobody drops
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("second") from error

    meter = meter_of(step)
    outcome = meter.measure(ONE, FULL)
    assert outcome.failure is not None
    assert len(held) == 1
    assert freed == [True]
    assert all(p.grad is None for p in meter.workload.model.parameters())


def test_a_device_that_is_broken_for_good_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    meter = meter_of(failing_step(lambda checkpointed: True, RuntimeError("CUDA error: assert")))
    monkeypatch.setattr(measure, "free_cached_memory", broken)
    outcome = meter.measure(ONE, FULL)
    assert outcome.failure is not None
    assert "CUDA error: assert" in outcome.failure.message
