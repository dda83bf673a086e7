"""Searches for other goals than speed, for real: through the command line, on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sac_search import api, artifacts, cli
from sac_search.apply import load_policy_module
from sac_search.errors import UsageError
from sac_search.options import Minimize, SearchOptions
from sac_search.report import page
from sac_search.study.goal import Goal, GoalKind
from sac_search.study.store import open_study

FEW = ("--device", "cpu", "--batch-size", "1", "--trials", "1", "--steps", "1")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "_packed_plotly", lambda: "")
    return tmp_path


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_the_least_memory_is_found_continued_and_told(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*FEW, "--minimize", "memory", "--max-overhead", "25%"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "overhead of at most 25%" in printed
    folder = in_folder / "studies" / "builtin-memory-25pct"
    result = result_of(folder)
    assert result["best"]["overhead"] <= 0.25
    none = next(entry for entry in result["baselines"] if entry["name"] == "none")
    assert result["best"]["peak_bytes"] <= none["peak_bytes"]
    assert result["verification"]["passed"] is True
    assert load_policy_module(folder / "policy.py").META["figures"]["overhead"] <= 0.25
    assert open_study(folder).goal == Goal(
        kind=GoalKind.MEMORY, max_overhead_fraction=0.25, has_budget=False
    )
    assert "least peak, overhead at most 25%" in (folder / "report.html").read_text()

    for words, said in (
        (["studies"], "overhead ≤ 25%"),
        (["explain", "builtin-memory-25pct"], "least peak, overhead at most 25%"),
        (["compare", "builtin-memory-25pct", str(folder)], "goal"),
        (["report", "builtin-memory-25pct"], "open it in a browser"),
    ):
        assert cli.main(words) == 0
        assert said in capsys.readouterr().out

    other = ["--minimize", "memory", "--max-overhead", "0.3", "--study", "builtin-memory-25pct"]
    assert cli.main([*FEW, *other]) == 2
    assert "is for another goal" in capsys.readouterr().err
    assert os.path.isfile(folder / "policy.py")


def test_the_front_is_found_exported_and_told(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*FEW, "--pareto"]) == 0
    printed = capsys.readouterr().out
    assert "of step time against peak has" in printed
    assert re.search(r"peak +step +overhead +verified", printed)
    folder = in_folder / "studies" / "builtin-pareto"
    result = result_of(folder)
    assert result["verification"]["passed"] is True
    study = open_study(folder).study
    assert study.metric_names == ["step_seconds", "peak_gib"]
    assert len(study.directions) == 2
    found = artifacts.load_result(folder)
    points = found.front()
    assert points and all(map(found.is_verified, points))

    for point in points:
        assert point.measurement is not None
        at = f"{point.measurement.peak_bytes}B"
        assert cli.main(["export", "builtin-pareto", "--at", at, "-o", "at.py"]) == 0
        said = capsys.readouterr().out
        assert ", measured, verified." in said
        figures = load_policy_module(in_folder / "at.py").META["figures"]
        assert figures["peak_bytes"] <= point.measurement.peak_bytes
    assert cli.main(["export", "builtin-pareto", "--at", "1MiB"]) == 2
    said = capsys.readouterr().err
    assert "has no verified policy that peaks at" in said
    assert "The smallest that is verified peaks at" in said
    assert cli.main(["export", "builtin-pareto", "--at", "some"]) == 2
    assert "is no size" in capsys.readouterr().err

    for words, said in (
        (["studies"], " front "),
        (["explain", "builtin-pareto"], "Its front has"),
        (["compare", "builtin-pareto", str(folder)], "the fastest step for every peak"),
        (["report", "builtin-pareto"], "open it in a browser"),
    ):
        assert cli.main(words) == 0
        assert said in capsys.readouterr().out
    assert "the fastest step for every peak" in (folder / "report.html").read_text()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fraction"), [("5%", 0.05), ("0.05", 0.05), (0.05, 0.05), ("150%", 1.5), ("0", 0.0)]
)
def test_a_limit_is_read(given: str | float, fraction: float) -> None:
    options = SearchOptions(minimize="memory", max_overhead=given)  # type: ignore[arg-type]
    assert options.goal.max_overhead_fraction == pytest.approx(fraction)
    assert options.minimize is Minimize.MEMORY
    again = dict(zip(options.arguments()[::2], options.arguments()[1::2], strict=True))
    assert again["--minimize"] == "memory"
    typed = SearchOptions(minimize="memory", max_overhead=again["--max-overhead"])  # type: ignore[arg-type]
    assert typed.goal == options.goal
    assert dataclasses.replace(options, seed=1).goal == options.goal


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "neither a budget nor another goal"),
        ({"minimize": "memory"}, "belong together"),
        ({"pareto": True, "minimize": "memory", "max_overhead": "5%"}, "one of them out"),
        ({"pareto": True, "compile": "search"}, "speed alone"),
        ({"max_overhead": "5%"}, "belong together"),
        ({"budget_gb": 1, "max_overhead": "5%"}, "belong together"),
        ({"minimize": "speed", "max_overhead": "5%"}, "minimize is 'speed'"),
        ({"minimize": "memory", "max_overhead": "5"}, "max_overhead is '5'"),
        ({"minimize": "memory", "max_overhead": "-5%"}, "max_overhead is '-5%'"),
        ({"minimize": "memory", "max_overhead": float("nan")}, "max_overhead is nan"),
        ({"minimize": "memory", "max_overhead": "5%", "compile": "on"}, "speed alone"),
    ],
)
def test_what_makes_no_goal_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SearchOptions(**options)


def test_a_budget_is_missed_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train.py"]) == 2
    assert capsys.readouterr().err == (
        "sac-search: Parameter --budget-gb requires an argument.\n"
        "Type sac-search --help for what there is.\n"
    )
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'budget_gb'"):
        api.search("train.py:workload")
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'budget_gb'"):
        api.forecast("train.py:workload")


def test_a_forecast_without_a_budget_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--minimize", "memory", "--max-overhead", "5%", "--forecast"]) == 2
    assert "name one, as in --forecast H100" in capsys.readouterr().err
