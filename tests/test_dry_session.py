"""A session that runs nothing, against what a real step on the CPU does."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sac_search.builtin import gpt_config
from sac_search.device import Clock
from sac_search.errors import CannotForecast, WorkloadError, WorkloadNotFound
from sac_search.forecast import forecast_step
from sac_search.layers import find_layers
from sac_search.policy import NO_CHECKPOINTING, PLAIN_TIER, Policy, Tier, checkpoint_layers
from sac_search.rates import StepPrice, find_rates
from sac_search.records import Phase
from sac_search.trace import LayerTrace, trace_layers
from sac_search.worker.dry_session import DrySession
from sac_search.worker.session import SessionSettings
from sac_search.workload import (
    BUILTIN_SPEC,
    Workload,
    build_workload,
    hash_sources,
    load_factory,
)

RATES = find_rates("A10")
CPU = torch.device("cpu")

MODEL = """
import torch
from torch import nn
from sac_search import Workload

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

CPU = torch.device("cpu")

def square(model, batch):
    return model(batch).float().square().mean()

"""
# Names its device wherever a step may: in autocast, in what it makes, in what it moves.
FACTORY = """
def workload(device, batch_size=4):
    model = nn.Sequential(*(Block(16) for _ in range(3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(batch_size, 8, 16).to(device)

    def loss_fn(model, batch):
        positions = torch.arange(8, device=device).to(device)
        assert bool((positions.diff() == 1).all())
        with torch.autocast(device.type, torch.bfloat16):
            return square(model, batch + positions[:, None])

    return Workload(model, loss_fn, batch, optimizer, batch_size=batch_size)
"""


Write = Callable[..., SessionSettings]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, **settings: Any) -> SessionSettings:
        path = tmp_path / "dry_workload.py"
        path.write_text(MODEL + text)
        return SessionSettings(spec=str(path), **settings)

    return write


def on_cpu(settings: SessionSettings) -> Workload:
    """Returns the same workload for real, its optimizer's state made."""
    workload = build_workload(load_factory(settings.spec), CPU, settings.batch_size)
    assert workload.optimizer is not None
    workload.optimizer.param_groups[0]["foreach"] = True
    workload.run_step()
    return workload


def policies() -> list[Policy]:
    mixed = (Tier(ops=("aten.addmm.default[16x64]",)), PLAIN_TIER)
    return [
        NO_CHECKPOINTING,
        checkpoint_layers(["0", "1", "2"]),
        checkpoint_layers(["0", "2"], mixed[0]),
    ]


def without_seconds(layer: LayerTrace) -> LayerTrace:
    return replace(layer, ops=tuple(replace(op, seconds=0.0) for op in layer.ops))


# Its batches differ in length.
LENGTHS = """
import itertools

def workload(device, lengths=(2, 8, 4)):
    model = nn.Sequential(*(Block(16) for _ in range(3))).to(device)
    turns = itertools.cycle(lengths)
    batch = lambda: torch.randn(4, next(turns), 16).to(device)
    return Workload(model, square, batch)

def longest(device):
    return workload(device, lengths=(8,))
"""


# --- a user's workload ----------------------------------------------------------------------------


def test_of_unlike_batches_the_largest_is_forecast(write: Write) -> None:
    settings = write(LENGTHS)
    session = DrySession(settings, RATES)
    longest = DrySession(replace(settings, spec=f"{settings.spec}:longest"), RATES)
    for policy in policies():
        assert session.forecast(policy) == longest.forecast(policy)
    assert "differ in size" in session.describe().notes[0]


def test_a_timeline_is_that_of_the_forecast(write: Write) -> None:
    session = DrySession(write(FACTORY), RATES)
    for policy in policies():
        timeline = session.timeline(policy)
        assert timeline is not None
        assert timeline.peak_bytes == session.forecast(policy).peak_bytes


def test_a_dry_run_is_the_forecast_of_the_real_workload(write: Write) -> None:
    settings = write(FACTORY)
    session = DrySession(settings, RATES)
    assert all(p.is_meta for p in session.workload.parameters())
    workload = on_cpu(settings)
    for policy in policies():
        real = forecast_step(workload, policy, layer_names=("0", "1", "2"))
        assert session.dry_run(policy) == real
        found = session.forecast(policy)
        assert (found.peak_bytes, found.problem) == (real.peak_bytes, "")


def test_each_policy_is_run_once(write: Write) -> None:
    session = DrySession(write(FACTORY), RATES)
    assert session.dry_run(NO_CHECKPOINTING) is session.dry_run(Policy(tiers=(), layers=()))


def test_the_description_is_that_of_the_real_workload_on_another_device(write: Write) -> None:
    settings = write(FACTORY, batch_size=2)
    description = DrySession(settings, RATES).describe()
    workload = on_cpu(settings)
    layers = find_layers(workload.model, workload.run_loss)
    real = trace_layers(workload, layers, CPU, Clock.CPU, repeats=1)
    assert [without_seconds(x) for x in description.layers] == [without_seconds(x) for x in real]
    priced = {op.op: op.seconds for op in description.layers[0].ops}
    assert priced["aten.addmm.default"] > 0
    assert priced["aten.t.default"] == 0
    environment = description.environment
    assert (environment.device, environment.device_name) == ("forecast", "A10")
    assert (environment.clock, environment.driver) == ("forecast", None)
    assert environment.device_memory_bytes == RATES.memory_bytes
    assert (environment.batch_size, environment.dtype) == (2, "float32")
    assert environment.parameter_count == sum(p.numel() for p in workload.parameters())
    assert environment.workload_source_hash == hash_sources(load_factory(settings.spec))
    assert description.reference == "none"
    assert RATES.source in description.notes[0]


def test_the_seconds_of_a_step_are_those_of_its_ops(write: Write) -> None:
    settings = write(FACTORY)
    workload = on_cpu(settings)
    with StepPrice(RATES) as price:
        workload.run_step()
    assert DrySession(settings, RATES).step_seconds() == pytest.approx(price.seconds, rel=1e-6)


def test_the_optimizer_takes_a_temporary_of_every_parameter(write: Write) -> None:
    def peak_bytes(options: str) -> int:
        text = FACTORY.replace("parameters())", f"parameters(), {options})")
        dry = DrySession(write(text), RATES).dry_run(NO_CHECKPOINTING)
        return dry.phase_peak_bytes[Phase.OPTIMIZER]

    parameter_bytes = 4 * 3 * (2 * 4 * 16 * 16 + 16 + 4 * 16 + 2 * 16)
    largest_bytes = 4 * 4 * 16 * 16
    # Of two at a time where they go one by one.
    grown = peak_bytes("lr=0.1") - peak_bytes("foreach=False")
    assert grown == pytest.approx(parameter_bytes - 2 * largest_bytes, abs=1024)


def test_layers_are_those_that_the_settings_name(write: Write) -> None:
    session = DrySession(write(FACTORY, layers="0,2"), RATES)
    assert [layer.name for layer in session.describe().layers] == ["0", "2"]
    assert set(session.dry_run(NO_CHECKPOINTING).layer_bytes) == {"0", "2"}


# --- where it is built ----------------------------------------------------------------------------


def test_a_model_far_larger_than_memory(write: Write) -> None:
    text = FACTORY.replace("Block(16)", "Block(65_536)").replace("8, 16)", "8, 65_536)")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    session = DrySession(write(text), RATES)
    forecast = session.dry_run(checkpoint_layers(["0", "1", "2"]))
    assert forecast.resident_bytes > 3 * 4 * 3 * 8 * 65_536**2 > 2**40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before_kb + 2**19


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FACTORY, "meta"),
        # Real numbers on the way to the device.
        (FACTORY.replace("Block(16)", "Block(int(torch.tensor(16)))"), "meta"),
        (FACTORY.replace("model = ", "assert device.type == 'cpu'; model = "), "cpu"),
        (FACTORY.replace("(device, batch_size=4):", "():\n    device, batch_size = CPU, 4"), "cpu"),
    ],
    ids=["plain", "reads while it builds", "refuses meta", "takes no device"],
)
def test_it_is_built_on_meta_where_that_works(write: Write, text: str, kind: str) -> None:
    settings = write(text)
    session = DrySession(settings, RATES)
    assert {p.device.type for p in session.workload.parameters()} == {kind}
    expected = forecast_step(on_cpu(settings), NO_CHECKPOINTING, layer_names=("0", "1", "2"))
    assert session.dry_run(NO_CHECKPOINTING) == expected


def test_on_the_cpu_as_well_a_step_may_name_its_accelerator(write: Write) -> None:
    text = FACTORY.replace("model = ", "assert device.type == 'cpu'; model = ")
    named = text.replace("torch.autocast(device.type", "torch.autocast('cuda'")
    expected = DrySession(write(text), RATES).dry_run(NO_CHECKPOINTING)
    assert DrySession(write(named), RATES).dry_run(NO_CHECKPOINTING) == expected


def test_the_built_in_workload_is_that_of_the_named_device() -> None:
    small = replace(RATES, memory_bytes=6 * 2**30)
    session = DrySession(SessionSettings(spec=BUILTIN_SPEC), small)
    config = gpt_config(small.memory_bytes)
    assert len(session.describe().layers) == config.layers
    alone = session.dry_run(NO_CHECKPOINTING)
    full = session.dry_run(checkpoint_layers(f"blocks.{i}" for i in range(config.layers)))
    assert full.peak_bytes < 0.9 * small.memory_bytes
    assert 1.0 * small.memory_bytes < alone.peak_bytes < 1.3 * small.memory_bytes
    # Mixed precision: half of the bytes that fp32 would keep.
    kept_bytes = alone.layer_bytes["blocks.0"].saved_bytes
    tokens = (session.environment().batch_size or 0) * config.sequence_length
    weight_bytes = 2 * 12 * config.hidden**2
    expected = tokens * config.block_bytes_per_token + weight_bytes
    assert kept_bytes == pytest.approx(expected, rel=0.01)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_step_that_reads_its_data_cannot_be_forecast(write: Write) -> None:
    text = FACTORY.replace("positions.diff() == 1", "batch > -100")
    with pytest.raises(CannotForecast, match="the step reads values"):
        DrySession(write(text), RATES)


def test_values_read_after_backward_are_told_when_asked(write: Write) -> None:
    text = FACTORY.replace(
        "    return Workload(model, loss_fn, batch, optimizer, batch_size=batch_size)",
        "    def step(workload):\n"
        "        loss = workload.run_loss()\n"
        "        loss.backward()\n"
        "        assert loss.item() < 1e9\n"
        "        return loss\n"
        "    return Workload(model, loss_fn, batch, optimizer, step)",
    )
    session = DrySession(write(text), RATES)
    found = session.forecast(NO_CHECKPOINTING)
    assert found.peak_bytes is None
    assert found.problem.startswith("the step reads values")
    with pytest.raises(CannotForecast, match="the step reads values"):
        session.describe()


def test_a_step_that_fails_is_the_workloads_error(write: Write) -> None:
    text = FACTORY.replace("assert bool", "raise ValueError('as it happens'); bool")
    with pytest.raises(WorkloadError, match="fake tensors fails") as raised:
        DrySession(write(text), RATES)
    assert "as it happens" in str(raised.value)
    assert "ValueError" in raised.value.user_traceback


def test_a_factory_that_fails_everywhere_is_the_workloads_error(write: Write) -> None:
    text = FACTORY.replace("model = ", "raise ValueError('as it happens'); model = ")
    with pytest.raises(WorkloadError, match="as it happens"):
        DrySession(write(text), RATES)


def test_a_batch_size_that_the_factory_does_not_take_is_refused(write: Write) -> None:
    text = FACTORY.replace("device, batch_size=4):", "device):\n    batch_size = 4")
    with pytest.raises(WorkloadNotFound, match="takes no batch_size"):
        DrySession(write(text, batch_size=8), RATES)


def test_a_model_that_checkpoints_itself_is_refused(write: Write) -> None:
    text = FACTORY.replace("    batch =", "    model.gradient_checkpointing = True\n    batch =")
    with pytest.raises(WorkloadError, match="gradient_checkpointing is on"):
        DrySession(write(text), RATES)
