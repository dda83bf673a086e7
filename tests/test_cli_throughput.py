"""A search over batch sizes through the command line, on the CPU, and what other commands say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
import test_cli
from test_cli import Ended

from sac_search import api, cli
from sac_search.errors import UsageError
from sac_search.workload import Workload

pytestmark = pytest.mark.timeout(300)
TRAIN = """
import torch
from torch import nn
from torch.nn import functional
from sac_search import Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def workload(device, batch_size=4):
    torch.manual_seed(0)
    model = Model().to(device)
    batch = torch.randn(batch_size, 64, 32, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(
        model, lambda model, x: model(x).square().mean(), batch, optimizer,
        batch_size=batch_size, sequence_length=64,
    )


def without(device):
    return workload(device)
"""
# 8 samples fit as they are, 32 with checkpointing, 512 do not.
BUDGET = "0.0075"
SIZES = "8,32,512"
STUDY = "train-0.0075gib-throughput"
GOAL = ("--maximize", "throughput", "--batch-sizes", SIZES)
FEW = ("--device", "cpu", "--steps", "1", "--trials", "2", "--granularity", "class")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("throughput")
    (found / "train.py").write_text(TRAIN)
    return found


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    return run(folder, "train.py", *FEW, "--budget-gb", BUDGET, *GOAL)


def run(folder: Path, *arguments: str) -> Ended:
    project = test_cli.Project.__new__(test_cli.Project)
    project.folder = folder
    return project.run(*arguments)


@pytest.fixture
def inside(folder: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert ended.code == 0, ended.errors
    monkeypatch.chdir(folder)
    return folder


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "studies" / STUDY / "result.json").read_text())


def test_a_search_finds_a_batch_size_and_a_policy(folder: Path, ended: Ended) -> None:
    assert ended.code == 0, ended.errors
    found = document(folder)
    states = {entry["batch_size"]: entry["state"] for entry in found["sizes"]}
    assert states == {8: "measured", 32: "measured", 512: "ruled out"}
    best = found["best"]
    assert best["peak_bytes"] <= found["budget_bytes"]
    assert best["tokens_per_second"] == pytest.approx(64 * best["samples_per_second"])
    assert f"Batch size {best['batch_size']}, " in ended.output
    assert "Batch size 512 ruled out: by forecast its peak is" in ended.output
    assert "bitwise those of" in ended.output
    names = {path.name for path in (folder / "studies" / STUDY).iterdir()}
    assert names >= {"study.db", "policy.py", "result.json", "report.html", "batch-8", "batch-32"}
    assert "batch-512" not in names


def test_the_same_command_again_measures_nothing(folder: Path, ended: Ended) -> None:
    before = document(folder)
    again = run(folder, "train.py", *FEW, "--budget-gb", BUDGET, *GOAL, "--json")
    assert again.code == 0, again.errors
    assert json.loads(again.output) == before
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'studies' / STUDY / 'study.db'}")
    study = optuna.load_study(study_name=STUDY, storage=storage)
    assert len(study.get_trials()) == before["measured_policies"]


def test_other_commands_take_the_study_of_the_best_size(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = document(inside)["best"]["batch_size"]
    assert cli.main(["export", STUDY, "-o", "exported.py"]) == 0
    assert (inside / "exported.py").read_text().count("def apply(") == 1
    assert cli.main(["explain", STUDY]) == 0
    assert f"Study batch-{size}: train.py" in capsys.readouterr().out
    assert cli.main(["compare", STUDY, f"{STUDY}/batch-{40 - size}"]) == 0
    assert "batch size" in capsys.readouterr().out
    assert cli.main(["studies"]) == 0
    assert f"{STUDY}/batch-{size}" in capsys.readouterr().out


def test_the_report_of_the_study_and_that_of_one_size(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    assert cli.main(["report", STUDY, "-o", "all.html"]) == 0
    assert cli.main(["report", f"{STUDY}/batch-8", "-o", "one.html"]) == 0
    assert "Throughput against batch size" in (inside / "all.html").read_text()
    assert "Throughput against batch size" not in (inside / "one.html").read_text()


def test_an_ordinary_search_does_not_touch_the_study(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["train.py", *FEW, "--budget-gb", BUDGET, "--study", STUDY])
    assert code == 2
    assert "holds a study over batch sizes: continue it with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "4,8"), "--batch-sizes 4,8 is for --maximize throughput"),
        (("--maximize", "throughput", "--batch-sizes", "4,x"), "'4,x' are no batch sizes"),
        (("--maximize", "throughput", "--batch-size", "4"), "--batch-size 4 leaves nothing"),
        (("--maximize", "throughput", "--compile", "on"), "searched for eager steps"),
        (("--maximize", "throughput", "--forecast", "H100"), "measures, so it cannot be forecast"),
        (("--maximize", "throughput", "--pareto"), "searched for speed under a budget"),
        (("--maximize", "throughput", "--workers", "cpu,cpu"), "leave --storage and --workers out"),
        (("--maximize", "throughput", "--storage", "sqlite:///x.db"), "in files of its own"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(
    arguments: tuple[str, ...], message: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train.py", "--budget-gb", BUDGET, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_factory_without_batch_size_is_wrong_usage(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train.py:without", "--device", "cpu", "--budget-gb", BUDGET, *GOAL]
    assert cli.main(arguments) == 2
    assert "takes no batch_size; add the keyword" in capsys.readouterr().err


def test_from_python_a_factory_is_needed() -> None:
    def local() -> Workload:
        raise AssertionError("is not called")

    with pytest.raises(UsageError, match="builds the workload anew for each batch size"):
        api.search_throughput(local, budget_gb=1, batch_sizes=[4, 8])
    with pytest.raises(UsageError, match="takes no 'budget'"):
        api.search_throughput("train.py", budget_gb=1, budget=1)
