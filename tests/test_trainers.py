"""The studies of trainers: searched from the trainer's own step, then trained by the trainer.

Each runs where its library is installed, and is skipped elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
STEPS = 5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study of a trainer, and what it needs."""

    budget_gb: float
    """Half-way between full and no checkpointing."""
    on_cpu: dict[str, Any]
    """What keeps its `train` on the CPU."""
    libraries: Sequence[str]


STUDIES = {
    "trainer_transformers": Study(
        budget_gb=0.0186, on_cpu={"use_cpu": True}, libraries=("transformers", "accelerate")
    ),
    "sft_trl": Study(budget_gb=0.0456, on_cpu={"use_cpu": True}, libraries=("trl", "peft")),
    "module_lightning": Study(
        budget_gb=0.028, on_cpu={"accelerator": "cpu"}, libraries=("lightning",)
    ),
    "unet_diffusers": Study(
        budget_gb=0.0314, on_cpu={"cpu": True}, libraries=("diffusers", "accelerate")
    ),
}
each_study = pytest.mark.parametrize("name", STUDIES)

# Peaks are counted here by means that the search does not use: over the whole training, from before
# there is a model on.
TRAIN = """
import importlib, json, sys
import torch

tests, studies, name, policy_path, on_cpu = sys.argv[1:]
sys.path[:0] = [tests, studies]
from peaks import counted_peak
torch.set_num_threads(1)
study = importlib.import_module(name)
policy = study.load_policy(policy_path)

def train(policy):
    return counted_peak(lambda: study.train(policy, **json.loads(on_cpu)))

plain_losses, plain_peak = train(None)
losses, peak = train(policy)
first = float(study.workload(torch.device("cpu")).run_step())
found = dict(first=first, plain=plain_losses, policy=losses, plain_peak=plain_peak, peak=peak)
print(json.dumps(found))
"""


def run(folder: Path, *command: str) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def skip_without(*libraries: str) -> None:
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


@each_study
def test_it_is_searched_and_trained(name: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    skip_without(*study.libraries)
    file = ROOT / "studies" / f"{name}.py"
    options = ("--device", "cpu", "--trials", "1", "--steps", "1", "--json")
    found = json.loads(
        run(
            tmp_path,
            *("-m", "sac_search", str(file), "--budget-gb", str(study.budget_gb), *options),
        )
    )
    budget_bytes = study.budget_gb * GIB
    peaks = {row["name"]: row["peak_bytes"] for row in found["baselines"]}
    assert budget_bytes == pytest.approx((peaks["none"] + peaks["full"]) / 2, rel=0.03)
    assert found["best"]["peak_bytes"] <= budget_bytes
    assert found["verification"]["passed"]
    assert found["verification"]["worst_gradient_difference"] == 0

    policy_path = tmp_path / "studies" / found["study_name"] / "policy.py"
    arguments = (
        str(ROOT / "tests"),
        str(file.parent),
        name,
        str(policy_path),
        json.dumps(study.on_cpu),
    )
    trained = json.loads(run(tmp_path, "-c", TRAIN, *arguments).splitlines()[-1])
    assert len(trained["plain"]) == STEPS
    assert trained["policy"] == trained["plain"]
    assert trained["first"] == trained["plain"][0]  # the workload's step is the trainer's
    assert trained["plain"][-1] < trained["plain"][0]
    # The data set, and what a trainer logs, are in these peaks and not in those of a step.
    assert trained["plain_peak"] == pytest.approx(peaks["none"], rel=0.02)
    assert trained["peak"] == pytest.approx(found["best"]["peak_bytes"], rel=0.02)
    assert trained["plain_peak"] > budget_bytes

    typed = run(tmp_path, str(file), str(policy_path)).splitlines()[-1]  # as its docstring says
    assert len(json.loads(typed)) == STEPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["trainer_transformers", "sft_trl"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_moves_the_parameters_as_the_trainers_does(
    name: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(*STUDIES[name].libraries)
    monkeypatch.syspath_prepend(ROOT / "studies")
    study = importlib.import_module(name)
    monkeypatch.setattr(study, "STEPS", 1)
    monkeypatch.setattr(study, "ACCUMULATION", accumulation)
    trainer = study.make_trainer(2, use_cpu=True)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    workload = study.workload(torch.device("cpu"), 2)
    assert workload.batch_size == 2 * accumulation
    assert float(workload.run_step()) == study.losses_of(trainer)[0]
    moved = list(trainer.model.parameters())
    assert not all(map(torch.equal, before, moved))
    assert all(map(torch.equal, workload.model.parameters(), moved))
