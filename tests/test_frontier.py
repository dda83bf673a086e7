"""The trade-off of a workload, forecast and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import SITE_OPS, ScriptedMeasurer, make_layers

from sac_search import cli
from sac_search.errors import WorkloadError
from sac_search.frontier import find_frontier
from sac_search.policy import NO_CHECKPOINTING
from sac_search.records import Evidence, FailureKind
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


def paper() -> ScriptedMeasurer:
    return ScriptedMeasurer(layers=make_layers(6, SITE_OPS), forecast_factor=1.0)


def test_a_forecast_frontier_measures_the_ends_only() -> None:
    measurer = paper()
    found = find_frontier(measurer, points=5, tiers=2, measure=False)
    assert found.evidence is Evidence.FORECAST
    # Full, none, and full through a policy function.
    assert measurer.measured.total() == 3
    none_seconds = measurer.step_seconds(NO_CHECKPOINTING)
    assert len(found.points) == 5
    for point in found.points:
        planned = point.planned
        assert point.overhead == pytest.approx(planned.overhead_seconds / none_seconds)
        assert planned.peak_bytes == measurer.peak_bytes(planned.policy) <= planned.budget_bytes
        expected = measurer.step_seconds(planned.policy) - none_seconds
        assert planned.overhead_seconds == pytest.approx(expected, rel=0.05, abs=1e-4)
        assert point.outcome is None
    assert {row.measured_overhead for row in frontier_rows(found)} == {"–"}


def test_a_larger_budget_is_never_slower() -> None:
    found = find_frontier(paper(), points=8, tiers=2, measure=False)
    seconds = [point.planned.overhead_seconds for point in found.points]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0


def test_one_tier_where_one_is_asked_for() -> None:
    found = find_frontier(paper(), points=5, tiers=1, measure=False)
    assert {len(point.planned.policy.tiers) for point in found.points} == {0, 1}


def test_a_measured_frontier_compares_every_policy_with_none() -> None:
    measurer = paper()
    found = find_frontier(measurer, points=4, tiers=2, measure=True)
    assert found.evidence is Evidence.MEASURED
    none_seconds = measurer.step_seconds(NO_CHECKPOINTING)
    for point in found.points:
        seconds = measurer.step_seconds(point.planned.policy)
        assert point.measured_overhead == pytest.approx(seconds / none_seconds - 1)
    assert all("%" in row.measured_overhead for row in frontier_rows(found))


def test_a_workload_that_cannot_be_checkpointed_or_planned_says_so() -> None:
    failing = ScriptedMeasurer(fail=lambda policy: FailureKind.TIMEOUT)
    with pytest.raises(WorkloadError, match="does not run with its layers checkpointed"):
        find_frontier(failing, points=4, tiers=2, measure=False)
    with pytest.raises(WorkloadError, match="No policy could be planned"):
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
