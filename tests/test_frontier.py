"""The trade-off of a workload, forecast and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import MIB, ScriptedMeasurer, make_failed

from sac_search import cli
from sac_search.errors import WorkloadError
from sac_search.forecaster import Planned
from sac_search.frontier import find_frontier
from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.records import Evidence
from sac_search.report.rows import frontier_rows

TRAIN = """
import torch
from torch import nn

from sac_search import Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def workload(device):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(device)
    micro_batches = [{"x": torch.randn(64, 32)} for _ in range(2)]

    def loss_fn(model, batch):
        return model(batch["x"]).square().mean()

    optimizer = torch.optim.AdamW(model.parameters())

    def step(workload):
        for micro_batch in workload.next_batch():
            loss = workload.loss_fn(workload.model, micro_batch) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Workload(model, loss_fn, micro_batches, optimizer, step)
"""


class PlanningMeasurer(ScriptedMeasurer):
    """Plans one policy per point, as if the first layers were checkpointed."""

    def plan(self, request):
        names = [layer.name for layer in self.layers]
        policies = [checkpoint_layers(names[:count]) for count in range(len(names), 0, -3)]
        self.plan_requests.append(request)
        return [
            Planned(
                budget_bytes=(100 + index) * MIB,
                policy=policy,
                overhead_seconds=0.01 * len(policy.layers),
                peak_bytes=self.peak_bytes(policy),
                bound_seconds=0.0,
            )
            for index, policy in enumerate(policies)
        ]


def test_a_forecast_frontier_measures_the_two_ends_only() -> None:
    measurer = PlanningMeasurer()
    found = find_frontier(measurer, points=4, tiers=2, measure=False)
    assert found.evidence is Evidence.FORECAST
    assert sum(measurer.measured.values()) == 2
    (request,) = measurer.plan_requests
    assert (request.points, request.tiers) == (4, 2)
    none_seconds = measurer.step_seconds(NO_CHECKPOINTING)
    full = checkpoint_layers(layer.name for layer in measurer.layers)
    expected = measurer.step_seconds(full) - none_seconds
    assert request.full_overhead_seconds == pytest.approx(expected)
    for point in found.points:
        assert point.overhead == pytest.approx(point.planned.overhead_seconds / none_seconds)
        assert point.outcome is None
    assert {row.measured_overhead for row in frontier_rows(found)} == {"–"}


def test_a_measured_frontier_compares_every_policy_with_none() -> None:
    measurer = PlanningMeasurer()
    found = find_frontier(measurer, points=4, tiers=2, measure=True)
    assert found.evidence is Evidence.MEASURED
    none_seconds = measurer.step_seconds(NO_CHECKPOINTING)
    for point in found.points:
        seconds = measurer.step_seconds(point.planned.policy)
        assert point.measured_overhead == pytest.approx(seconds / none_seconds - 1)
    assert all("%" in row.measured_overhead for row in frontier_rows(found))


def test_a_workload_that_cannot_be_checkpointed_or_planned_says_so() -> None:
    failing = PlanningMeasurer(fail=lambda policy: make_failed().failure.kind)
    with pytest.raises(WorkloadError, match="does not run with its layers checkpointed"):
        find_frontier(failing, points=4, tiers=2, measure=False)
    with pytest.raises(WorkloadError, match="no policy could be planned"):
        find_frontier(ScriptedMeasurer(), points=4, tiers=2, measure=False)


def test_the_command_on_a_step_that_accumulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step hands the loss one micro-batch at a time, which is not what `batch` is."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["frontier", "train.py", "--device", "cpu", "--points", "4", "--measure"]) == 0
    table = capsys.readouterr().out
    assert "measured side by side" in table
    document = json.loads((tmp_path / "studies" / "train-frontier.json").read_text())
    assert document["evidence"] == "measured"
    assert len(document["points"]) == 4
    for point in document["points"]:
        planned, measured = point["planned"], point["outcome"]["measurement"]
        assert planned["peak_bytes"] <= planned["budget_bytes"]
        assert measured["allocated_bytes"] == pytest.approx(planned["peak_bytes"], rel=0.01)
    assert not document["points"][-1]["planned"]["policy"]["layers"]


def test_points_and_tiers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frontier", "train.py", "--points", "1"]) == 2
    assert "--points 1" in capsys.readouterr().err
