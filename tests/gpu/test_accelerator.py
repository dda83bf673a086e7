"""What only an accelerator can show: its allocator, its clock, its kernels."""

from __future__ import annotations

import pytest
import torch

from sac_search import device as devices
from sac_search.builtin import GPT, GPTConfig
from sac_search.device import Clock
from sac_search.measure import StepMeter
from sac_search.opclasses import OpClass
from sac_search.policy import NO_CHECKPOINTING, Tier, checkpoint_layers
from sac_search.records import FailureKind
from sac_search.worker.session import Session, SessionSettings
from sac_search.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


@pytest.fixture
def device() -> torch.device:
    return devices.find_device(None)


@pytest.fixture
def workload(device: torch.device) -> Workload:
    torch.manual_seed(0)
    config = GPTConfig(layers=4, hidden=512, heads=8, vocabulary=1024, sequence_length=512)
    model = GPT(config).to(device)
    tokens = torch.randint(config.vocabulary, (8, config.sequence_length + 1), device=device)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    return Workload(model, loss_fn, tokens, torch.optim.AdamW(model.parameters()))


def _layer_names(workload: Workload) -> list[str]:
    return [f"blocks.{index}" for index in range(len(workload.model.blocks))]


def test_peak_is_what_the_allocator_says(device: torch.device, workload: Workload) -> None:
    meter = StepMeter(workload=workload, device=device, clock=Clock.WALL, steps=3)
    meter.run_untimed_step(NO_CHECKPOINTING)
    measured = meter.measure(NO_CHECKPOINTING, NO_CHECKPOINTING).measurement
    assert measured is not None
    devices.free_cached_memory(device)
    torch.accelerator.memory.reset_peak_memory_stats(device)
    workload.run_step()
    torch.accelerator.synchronize(device)
    peak_bytes = torch.accelerator.memory.max_memory_allocated(device)
    assert measured.allocated_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert measured.reserved_bytes is not None
    assert measured.peak_bytes == measured.reserved_bytes >= measured.allocated_bytes


def test_checkpointing_lowers_the_peak_and_saving_raises_it(
    device: torch.device, workload: Workload
) -> None:
    names = _layer_names(workload)
    session = Session(workload, SessionSettings(spec="gpt", steps=3), device)
    matmuls = Tier(ops=("aten.addmm.default", "aten.mm.default"))
    peaks = []
    for policy in (checkpoint_layers(names), checkpoint_layers(names, matmuls), NO_CHECKPOINTING):
        measurement = session.measure(policy).measurement
        assert measurement is not None
        peaks.append(measurement.allocated_bytes)
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]


def test_attention_of_this_device_is_known(device: torch.device, workload: Workload) -> None:
    session = Session(workload, SessionSettings(spec="gpt"), device)
    description = session.describe()
    classes = {op.op_class for op in description.layers[0].ops}
    assert {OpClass.MATMUL, OpClass.ATTENTION, OpClass.NORMALIZATION} <= classes
    seconds = sum(op.seconds for op in description.layers[0].ops)
    assert 0 < seconds < 1


def test_gradients_are_those_of_the_plain_model(device: torch.device, workload: Workload) -> None:
    names = _layer_names(workload)
    session = Session(workload, SessionSettings(spec="gpt"), device)
    verdict = session.verify(checkpoint_layers(names, Tier(ops=("aten.addmm.default",))))
    assert verdict.verification is not None
    assert verdict.verification.passed


def test_out_of_memory_is_an_outcome_and_memory_comes_back(
    device: torch.device, workload: Workload
) -> None:
    session = Session(workload, SessionSettings(spec="gpt"), device)
    hog: list[torch.Tensor] = []

    class Greedy:
        def apply(self, model: torch.nn.Module) -> None:
            free_bytes, _ = devices.device_memory(device)
            hog.append(torch.empty(2 * free_bytes, dtype=torch.uint8, device=device))

        def remove(self, model: torch.nn.Module) -> None:
            hog.clear()

    meter = StepMeter(workload=workload, device=device, clock=Clock.WALL, steps=3)
    outcome = meter.measure(Greedy(), NO_CHECKPOINTING)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.OUT_OF_MEMORY
    assert session.is_healthy()
