"""The forecast against what the allocator really does, to the byte."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from sac_search.apply import applied
from sac_search.device import Clock
from sac_search.errors import CannotForecast
from sac_search.forecast import (
    forecast_step,
    foreign_tensor_bytes,
    record_values,
    track_step,
)
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import Phase
from sac_search.workload import Workload
from sac_search.workspaces import learn_workspaces

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # 0.5 * h * (1 + h): h is needed twice, so the engine adds two gradients of it.
        h = self.up(self.norm(x))
        return x + self.down(0.5 * h * (1 + torch.tanh(h)))


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Gate(nn.Module):
    """Reads a value in its forward and takes one of two ways."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if bool((x.abs().sum() > 0).all()) else x


class Experts(nn.Module):
    """Sends each row to one of three blocks: shapes that depend on values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def under_autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def mlp(loss_fn: Callable[..., torch.Tensor] = mean_square) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(48) for _ in range(4)))
    batch = torch.randn(64, 48)
    return Workload(model, loss_fn, batch, torch.optim.AdamW(model.parameters()))


def with_dropout() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Block(32), nn.Dropout(0.1)) for _ in range(3)))
    return Workload(model, mean_square, torch.randn(64, 32), torch.optim.AdamW(model.parameters()))


def conv() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(ConvBlock(16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return Workload(model, mean_square, torch.randn(4, 16, 24, 24), optimizer)


def routed() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(32) for _ in range(4)))
    # At this rate rows stay with their experts from step to step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return Workload(model, mean_square, torch.randn(96, 32), optimizer)


def leaving_gradients() -> Workload:
    plain = mlp()
    assert plain.optimizer is not None
    optimizer = plain.optimizer

    def step(workload: Workload) -> torch.Tensor:
        loss = workload.run_loss()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return replace(plain, step=step)


def frozen_with_accumulation() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(48) for _ in range(4)))
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step(workload: Workload) -> torch.Tensor:
        for micro_batch in workload.next_batch():
            loss = mean_square(workload.model, micro_batch) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Workload(model, mean_square, torch.randn(2, 48, 48), optimizer, step)


WORKLOADS = {
    "mlp": mlp,
    "autocast": lambda: mlp(under_autocast),
    "dropout": with_dropout,
    "convolution": conv,
    "frozen, accumulation, clipping": frozen_with_accumulation,
}


def policies() -> dict[str, Policy]:
    names = ["0", "1", "2", "3"]
    dear = Tier(ops=("aten.addmm.default", "aten.convolution.default"))
    return {
        "none": NO_CHECKPOINTING,
        "full": checkpoint_layers(names[:3]),
        "every second": checkpoint_layers(names[:3:2]),
        "save matmuls": checkpoint_layers(names[:3], dear),
        "save pointwise": checkpoint_layers(names[:2], Tier(ops=("aten.mul.Tensor",))),
    }


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_forecast_is_the_measured_peak(make: Callable[[], Workload]) -> None:
    workload = make()
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU, steps=1)
    full = policies()["full"]
    meter.run_untimed_step(full)
    with applied(workload.model, full):
        workspaces = learn_workspaces(workload.run_step, CPU)
    for name, policy in policies().items():
        reading = meter._read_peak(policy)
        forecast = forecast_step(
            workload,
            policy,
            workspaces=workspaces,
            foreign_bytes=foreign_tensor_bytes(workload, CPU),
        )
        assert forecast.peak_bytes == pytest.approx(reading.allocated_bytes, rel=0.002), name
        assert forecast.peak_phase == reading.peak_phase, name


def test_forecast_changes_nothing() -> None:
    workload = mlp()
    workload.run_step()
    optimizer = workload.optimizer
    assert optimizer is not None
    before = {name: (p, p.clone()) for name, p in workload.model.named_parameters()}
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    forecast_step(workload, policies()["full"])
    for name, parameter in workload.model.named_parameters():
        original, value = before[name]
        assert parameter is original
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        for key, entry in optimizer.state[parameter].items():
            assert torch.equal(entry, state[id(parameter)][key])
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
        id(p) for p in workload.model.parameters()
    ]
    assert all(
        type(m) in (nn.Sequential, Block, nn.LayerNorm, nn.Linear) for m in workload.model.modules()
    )


def test_values_read_in_forward_are_handed_out_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gate(Block(32)) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, mean_square, torch.randn(64, 32), optimizer)
    workload.run_step()
    with pytest.raises(CannotForecast, match="reads values"):
        forecast_step(workload, NO_CHECKPOINTING)
    with record_values() as values:
        workload.run_loss()
    assert values == [True, True, True]
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU, steps=1)
    reading = meter._read_peak(NO_CHECKPOINTING)
    forecast = forecast_step(
        workload,
        NO_CHECKPOINTING,
        values=values,
        foreign_bytes=foreign_tensor_bytes(workload, CPU),
    )
    assert forecast.peak_bytes == pytest.approx(reading.allocated_bytes, rel=0.002)


def test_what_a_layer_keeps_is_counted_exactly() -> None:
    workload = mlp()
    workload.run_step()
    names = ("0", "1", "2", "3")
    plain = forecast_step(workload, NO_CHECKPOINTING, layer_names=names)
    full = forecast_step(workload, checkpoint_layers(names), layer_names=names)
    saved = forecast_step(
        workload, checkpoint_layers(names, Tier(ops=("aten.tanh.default",))), layer_names=names
    )
    hidden_bytes = 64 * 3 * 48 * 4
    for name in names:
        assert full.layer_bytes[name].saved_bytes < plain.layer_bytes[name].saved_bytes
        grown = saved.layer_bytes[name].saved_bytes - full.layer_bytes[name].saved_bytes
        assert grown == hidden_bytes


def test_model_far_larger_than_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(16_384) for _ in range(64)))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batch = torch.empty(4096, 16_384)
    workload = Workload(model, mean_square, batch, optimizer)
    forecast = forecast_step(workload, checkpoint_layers([str(i) for i in range(64)]))
    parameter_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert forecast.peak_bytes > 2 * parameter_bytes > 400 * 2**30


def test_tensors_that_nobody_knows_count_as_well() -> None:
    workload = mlp()
    workload.run_step()
    before = foreign_tensor_bytes(workload, CPU)
    kept = torch.zeros(1000)
    assert foreign_tensor_bytes(workload, CPU) == before + kept.nbytes
    plain = forecast_step(workload, NO_CHECKPOINTING)
    more = forecast_step(workload, NO_CHECKPOINTING, foreign_bytes=4000)
    assert more.peak_bytes == plain.peak_bytes + 4000


def test_micro_batches_one_after_the_other_count_once() -> None:
    """Each is freed by its own backward pass, so a layer keeps what one of them needs."""
    workload = frozen_with_accumulation()
    workload.run_step()
    twice = forecast_step(workload, NO_CHECKPOINTING, layer_names=("1", "2"))
    once = forecast_step(
        Workload(workload.model, mean_square, workload.batch[0], workload.optimizer),
        NO_CHECKPOINTING,
        layer_names=("1", "2"),
    )
    for name in ("1", "2"):
        assert twice.layer_bytes[name].saved_bytes == once.layer_bytes[name].saved_bytes


def test_tensors_of_another_device_do_not_count() -> None:
    workload = mlp()
    workload.run_step()
    plain = forecast_step(workload, NO_CHECKPOINTING)
    mixed = Workload(
        workload.model,
        lambda model, batch: mean_square(model, batch[0]),
        [workload.batch, torch.empty(10**9, device="meta")],
        workload.optimizer,
    )
    assert forecast_step(mixed, NO_CHECKPOINTING).peak_bytes == plain.peak_bytes


def test_optimizer_state_made_in_a_forecast_counts_from_the_start() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(48) for _ in range(4)))
        batch = torch.empty(64, 48)
    on_meta = Workload(model, mean_square, batch, torch.optim.AdamW(model.parameters()))
    workload = mlp()
    workload.run_step()
    for policy in (NO_CHECKPOINTING, policies()["full"]):
        assert forecast_step(on_meta, policy) == forecast_step(workload, policy)
    sizes = [p.numel() for p in model.parameters()]
    # AdamW keeps two tensors of each parameter's size, and a count.
    expected = 4 * (3 * sum(sizes) + len(sizes) + 64 * 48)
    assert forecast_step(on_meta, NO_CHECKPOINTING).resident_bytes == expected


def test_only_the_second_of_two_steps_counts() -> None:
    workload = mlp()
    workload.run_step()
    rows: list[int] = []

    def step(workload: Workload) -> torch.Tensor:
        rows.append(16 if rows else 64)
        loss = mean_square(workload.model, workload.batch[: rows[-1]])
        loss.backward()
        # What the layers keep here is gone before the next step, the gradients are not.
        workload.run_loss()
        if len(rows) > 1:
            workload.drop_gradients()
        return loss

    def short(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return mean_square(model, batch[:16])

    counted = forecast_step(
        replace(workload, step=step, loss_fn=short), NO_CHECKPOINTING, layer_names=("0", "1")
    )
    assert rows == [64, 16]
    expected = forecast_step(
        replace(workload, loss_fn=short), NO_CHECKPOINTING, layer_names=("0", "1")
    )
    assert counted.layer_bytes == expected.layer_bytes


def test_a_step_that_leaves_nothing_behind_runs_once() -> None:
    workload = mlp()
    runs: list[str] = []

    def step(workload: Workload) -> torch.Tensor:
        runs.append("step")
        loss = mean_square(workload.model, workload.batch)
        loss.backward()
        assert workload.optimizer is not None
        workload.optimizer.step()
        workload.drop_gradients()
        return loss

    counted = replace(workload, step=step)
    forecast_step(counted, NO_CHECKPOINTING)
    assert len(runs) == 2  # the optimizer's state was made in the first
    workload.run_step()
    forecast_step(counted, NO_CHECKPOINTING)
    assert len(runs) == 3


# --- what fakes cannot do -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0)[0],
        lambda x: x.unique(),
        lambda x: x.sum().item(),
        lambda x: x.sum(-1).tolist(),
        lambda x: torch.equal(x, x + 1),
    ],
)
def test_a_step_that_needs_values_has_no_forecast(read: Callable[[torch.Tensor], object]) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        read(batch)
        return mean_square(model, batch)

    workload = mlp(loss_fn)
    workload.run_step()
    with pytest.raises(CannotForecast, match=r"the step reads values: aten\."):
        forecast_step(workload, NO_CHECKPOINTING)
    assert type(next(workload.model.parameters())) is nn.Parameter


def test_an_op_without_fake_form_has_no_forecast() -> None:
    library = torch.library.Library("sac_forecast_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CPU")
    double = torch.ops.sac_forecast_test.double.default
    try:
        workload = mlp(lambda model, batch: mean_square(model, double(batch)))
        workload.run_step()
        with pytest.raises(CannotForecast, match=r"do not support the step.*double"):
            forecast_step(workload, NO_CHECKPOINTING)
    finally:
        library._destroy()


# --- real tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [mlp, functools.partial(mlp, under_autocast), conv, routed, leaving_gradients],
    ids=["mlp", "autocast", "convolution", "routed", "gradients left"],
)
def test_a_tracked_step_is_the_measured_peak(make: Callable[[], Workload]) -> None:
    workload = make()
    meter = StepMeter(workload=workload, device=CPU, clock=Clock.CPU, steps=1)
    full = policies()["full"]
    meter.run_untimed_step(full)
    with applied(workload.model, full):
        workspaces = learn_workspaces(workload.run_step, CPU)
    workload.drop_gradients()
    for name in ("none", "save matmuls"):
        reading = meter._read_peak(policies()[name])
        workload.drop_gradients()
        tracked = track_step(
            workload,
            policies()[name],
            device=CPU,
            workspaces=workspaces,
            foreign_bytes=foreign_tensor_bytes(workload, CPU),
        )
        assert tracked.peak_bytes == pytest.approx(reading.allocated_bytes, rel=0.002), name
        assert tracked.peak_phase == reading.peak_phase, name


@pytest.mark.parametrize(
    "make", [mlp, with_dropout, conv, frozen_with_accumulation, leaving_gradients]
)
def test_a_tracked_step_is_the_forecast_where_there_is_one(make: Callable[[], Workload]) -> None:
    workload = make()
    workload.run_step()
    workload.drop_gradients()
    for policy in policies().values():
        tracked = track_step(workload, policy, device=CPU, layer_names=("0", "1"))
        forecast = forecast_step(workload, policy, layer_names=("0", "1"))
        # A few numbers of the clipping are fakes in one and constants in the other.
        assert tracked.phase_peak_bytes == pytest.approx(forecast.phase_peak_bytes, abs=512)
        assert tracked == replace(forecast, phase_peak_bytes=tracked.phase_peak_bytes)


def test_a_tracked_step_counts_workspaces_and_foreign_tensors() -> None:
    workload = mlp()
    workload.run_step()
    plain = track_step(workload, NO_CHECKPOINTING, device=CPU)
    foreign = track_step(workload, NO_CHECKPOINTING, device=CPU, foreign_bytes=4000)
    assert foreign.peak_bytes == plain.peak_bytes + 4000
    assert foreign.resident_bytes == plain.resident_bytes + 4000
    linear = ("aten.addmm", ((144,), (64, 48), (48, 144)))
    more = track_step(workload, NO_CHECKPOINTING, device=CPU, workspaces={linear: 10**6})
    assert more.phase_peak_bytes[Phase.FORWARD] > plain.phase_peak_bytes[Phase.FORWARD] + 8 * 10**5


def test_a_tracked_step_trains_and_leaves_nothing_behind() -> None:
    workload = leaving_gradients()
    workload.run_step()
    before = [p.detach().clone() for p in workload.parameters()]
    track_step(workload, policies()["full"], device=CPU, layer_names=("0",))
    assert not torch.equal(before[0], workload.parameters()[0])
    assert all(p.grad is None for p in workload.parameters())
    for module in workload.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert {type(m) for m in workload.model} == {Block}


def test_one_step_is_enough_where_no_gradients_are_left() -> None:
    steps: list[int] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        return mean_square(model, batch)

    workload = mlp(loss_fn)
    workload.run_step()
    track_step(workload, NO_CHECKPOINTING, device=CPU)
    assert len(steps) == 2


def test_a_batch_that_is_called_for_is_called_for_once() -> None:
    workload = mlp()
    workload.run_step()
    plain = track_step(workload, NO_CHECKPOINTING, device=CPU)
    batches = iter([workload.batch])
    called = replace(workload, batch=lambda: next(batches))
    assert track_step(called, NO_CHECKPOINTING, device=CPU) == plain
