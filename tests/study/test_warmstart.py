"""A search at another budget starts from what was already measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optuna
import pytest
from scripted import ENVIRONMENT, Listener, ScriptedMeasurer

from sac_search.api import SearchOptions, run_search
from sac_search.space import LayerChoiceMode
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.goal import BUDGET_CONSTRAINT
from sac_search.study.result import SearchResult
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study


def search(
    root: Path,
    measurer: ScriptedMeasurer,
    budget_mib: float,
    listener: Listener | None = None,
    **changes: Any,
) -> SearchResult:
    options = SearchOptions(
        **{
            "budget_gb": budget_mib / 1024,
            "root": root,
            "trials": 4,
            "sampler": SamplerName.RANDOM,
            **changes,
        }
    )
    return run_search(measurer, f"gpt-{budget_mib:g}", options, listener or Listener())


def test_another_budget_starts_from_what_was_measured(tmp_path: Path) -> None:
    first = ScriptedMeasurer()
    before = search(tmp_path, first, 120)
    second, listener = ScriptedMeasurer(), Listener()
    after = search(tmp_path, second, 100, listener)

    assert not set(first.measured) & set(second.measured)
    assert any("gpt-120" in note for note in listener.notes)
    known = {c.policy.key: c for c in after.candidates}
    for candidate in before.candidates:
        copied = known[candidate.policy.key]
        assert copied.outcome == candidate.outcome
        assert copied.is_baseline == candidate.is_baseline
    baselines = [c.name for c in after.candidates if c.is_baseline]
    assert sorted(baselines) == sorted(c.name for c in before.candidates if c.is_baseline)
    assert set(baselines) <= set(BASELINE_NAMES)
    # What was taken over does not count: as many trials are measured as were asked for.
    assert sum(second.measured.values()) == 4


def test_copied_trials_teach_the_sampler_under_the_new_budget(tmp_path: Path) -> None:
    search(tmp_path, ScriptedMeasurer(), 120)
    search(tmp_path, ScriptedMeasurer(), 90)
    trials = open_study(tmp_path / "gpt-90").study.get_trials(
        states=(optuna.trial.TrialState.COMPLETE,)
    )
    spaces = {frozenset(trial.distributions) for trial in trials}
    assert len(spaces) == 1
    copied = [trial for trial in trials if "imported_from" in trial.user_attrs]
    assert len(copied) >= 8
    for trial in trials:
        if "peak_gib" in trial.user_attrs:
            excess_gib = trial.constraints[BUDGET_CONSTRAINT]
            assert excess_gib == pytest.approx(trial.user_attrs["peak_gib"] - 90 / 1024, abs=1e-4)
            assert trial.system_attrs["constraints"] == [excess_gib]


def test_the_same_command_again_continues_and_copies_nothing_more(tmp_path: Path) -> None:
    search(tmp_path, ScriptedMeasurer(), 120)
    search(tmp_path, ScriptedMeasurer(), 100)
    trials = len(open_study(tmp_path / "gpt-100").study.trials)
    again = ScriptedMeasurer()
    search(tmp_path, again, 100)
    assert not again.measured
    assert len(open_study(tmp_path / "gpt-100").study.trials) == trials


@pytest.mark.parametrize("change", ["environment", "fresh", "layer choice"])
def test_nothing_is_taken_from_what_cannot_be_compared(tmp_path: Path, change: str) -> None:
    first = ScriptedMeasurer()
    search(tmp_path, first, 120)
    other = dataclasses.replace(ENVIRONMENT, batch_size=8)
    second = ScriptedMeasurer(environment=other if change == "environment" else ENVIRONMENT)
    options: dict[str, Any] = {}
    if change == "fresh":
        options["fresh"] = True
    if change == "layer choice":
        options["layer_choice"] = LayerChoiceMode.EACH
    search(tmp_path, second, 100, **options)
    assert set(first.measured) & set(second.measured)


def test_a_damaged_study_beside_it_does_not_matter(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "study.db").write_bytes(b"no database")
    result = search(tmp_path, ScriptedMeasurer(), 120)
    assert result.best is not None
    assert (broken / "study.db").read_bytes() == b"no database"
