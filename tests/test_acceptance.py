"""The whole job on the workloads of studies/: searched, exported, tried by independent means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def sac_search(folder: Path, *arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "sac_search", *arguments, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# Tolerances: bitwise everywhere. Recomputation repeats the same kernels on the same numbers, also
# under autocast; BatchNorm's gradients use the batch's statistics, not the running ones.
# Budgets, in GiB, are half-way between full and no checkpointing.
@pytest.mark.parametrize(
    ("study", "budget_gb"),
    [
        ("gpt2_transformers", 0.114),
        ("llama_transformers", 0.0153),
        ("vit_transformers", 0.0814),
        ("resnet_transformers", 0.106),
    ],
)
def test_search_export_and_train(study: str, budget_gb: float, tmp_path: Path) -> None:
    workload = str(ROOT / "studies" / f"{study}.py")
    common = ("--device", "cpu", "--steps", "3", "--trials", "1")
    found = sac_search(tmp_path, workload, "--budget-gb", str(budget_gb), *common)
    budget_bytes = budget_gb * GIB
    peaks = {row["name"]: row["peak_bytes"] for row in found["baselines"]}
    assert budget_bytes == pytest.approx((peaks["none"] + peaks["full"]) / 2, rel=0.03)
    assert found["best"]["peak_bytes"] <= budget_bytes
    assert found["verification"]["passed"]
    policy_path = tmp_path / "studies" / found["study_name"] / "policy.py"
    full = next(row for row in found["baselines"] if row["name"] == "full")
    layer_names = [choice["name"] for choice in full["policy"]["layers"]]
    tried = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "independent.py"),
            workload,
            str(policy_path),
            json.dumps(layer_names),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    report = json.loads(tried.stdout.splitlines()[-1])
    assert report["same_parameters"]
    assert report["loss_difference"] == 0
    assert report["worst_gradient_difference"] == 0
    assert report["policy_peak_bytes"] <= budget_bytes
    assert report["policy_peak_bytes"] == pytest.approx(found["best"]["peak_bytes"], rel=0.01)
    assert report["seconds_over_full"] + report["noise"] < 1, report
