"""A study of forecasts alone, and what becomes of it when it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    ENVIRONMENT,
    MIB,
    SITE_OPS,
    Listener,
    ScriptedMeasurer,
    make_layers,
    memory_store,
    other_environment,
)

from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result, make_result, render_policy, write_files
from sac_search.errors import StudyError, WorkloadError
from sac_search.policy import NO_CHECKPOINTING
from sac_search.records import Evidence
from sac_search.space import Granularity, build_space
from sac_search.study.baselines import FULL, NONE, RECOMPUTE_ALL, TORCHTITAN
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.finish import Winner
from sac_search.study.forecasting import RESERVE_FRACTION, ForecastStudy
from sac_search.study.front import pareto_front
from sac_search.study.goal import Goal, GoalKind
from sac_search.study.store import StudyStore, create_study, open_study

BUDGET_BYTES = 120 * MIB
PAPER = other_environment(device="forecast", device_name="H100 SXM", clock="forecast")


def measurer(**changes: Any) -> ScriptedMeasurer:
    return ScriptedMeasurer(
        **{"layers": make_layers(6, SITE_OPS), "forecast_factor": 1.0} | changes
    )


def forecast(
    script: ScriptedMeasurer, store: StudyStore, told: list[Candidate] | None = None
) -> Winner:
    space = build_space(script.layers, granularity=Granularity.SITE, tiers=2)
    seconds = script.step_seconds(NO_CHECKPOINTING)
    heard = (lambda candidate: None) if told is None else told.append
    return ForecastStudy(store, space, script, seconds, heard).run()


def test_nothing_is_measured_and_the_best_plan_wins() -> None:
    script = measurer()
    store = memory_store(script, BUDGET_BYTES)
    told: list[Candidate] = []

    winner = forecast(script, store, told)

    assert not script.measured
    assert store.candidates() == []
    found = store.forecasts()
    assert [c.name for c in found] == [c.name for c in told]
    assert {c.evidence for c in found} == {Evidence.FORECAST}
    assert winner.best is not None and winner.verification is None
    assert winner.best.name.startswith("plan at")
    fitting = [c for c in found if c.fits(round((1 - RESERVE_FRACTION) * BUDGET_BYTES))]
    assert winner.best.step_seconds == min(c.step_seconds for c in fitting)
    # Costs are as the profile has them, so the forecast's seconds are those of the script.
    for candidate in found:
        assert candidate.measurement is not None
        assert candidate.measurement.peak_bytes == script.peak_bytes(candidate.policy)
        expected = script.step_seconds(candidate.policy)
        assert candidate.step_seconds == pytest.approx(expected, rel=0.01)


def test_prices_and_the_trade_off_are_kept_by_the_rates() -> None:
    script = measurer()
    store = memory_store(script, BUDGET_BYTES)
    winner = forecast(script, store)

    insights = store.insights
    assert insights is not None and winner.best is not None
    traced = sum(op.seconds for op in script.layers[0].ops)
    [layer] = insights.layers
    assert layer.layers == 6
    assert layer.recompute_seconds == pytest.approx(traced, rel=0.01)
    assert {save.kind for save in insights.saves} == {layer.kind}
    none_seconds = script.step_seconds(NO_CHECKPOINTING)
    for point in insights.frontier:
        assert point.peak_bytes == script.peak_bytes(point.policy)
        assert point.peak_bytes <= round((1 - RESERVE_FRACTION) * point.budget_bytes)
        expected = script.step_seconds(point.policy) - none_seconds
        assert point.overhead_seconds == pytest.approx(expected, abs=0.01 * none_seconds)
    own = next(p for p in insights.frontier if p.budget_bytes == BUDGET_BYTES)
    assert own.policy.key == winner.best.policy.key
    assert insights.frontier[-1].policy == NO_CHECKPOINTING


def test_a_part_of_the_budget_is_left_for_what_is_reserved() -> None:
    script = measurer()
    winner = forecast(script, memory_store(script, BUDGET_BYTES))
    assert winner.best is not None and winner.best.measurement is not None
    assert winner.best.measurement.peak_bytes <= (1 - RESERVE_FRACTION) * BUDGET_BYTES


def test_baselines_that_can_be_priced_are_among_them() -> None:
    script = measurer()
    store = memory_store(script, BUDGET_BYTES)
    forecast(script, store)
    names = {c.name for c in store.forecasts() if c.is_baseline}
    assert {NONE, FULL, RECOMPUTE_ALL} <= names
    assert TORCHTITAN not in names  # it counts calls
    seconds = {c.name: c.step_seconds for c in store.forecasts()}
    assert seconds[RECOMPUTE_ALL] > seconds[FULL] > seconds[NONE]


def test_a_step_that_fits_needs_no_plans() -> None:
    script = measurer()
    store = memory_store(script, 4000 * MIB)
    winner = forecast(script, store)
    assert winner.best is not None and winner.best.name == NONE
    assert all(c.is_baseline for c in store.forecasts())


def test_nothing_fits_under_the_floor() -> None:
    script = measurer()
    assert forecast(script, memory_store(script, 50 * MIB)).best is None


def test_what_cannot_be_forecast_says_so() -> None:
    script = measurer(forecast_factor=None)
    with pytest.raises(WorkloadError, match="cannot be forecast"):
        forecast(script, memory_store(script, BUDGET_BYTES))


def forecast_on_disk(root: Path) -> StudyStore:
    script = measurer(environment=PAPER)
    store = create_study(
        root / "gpt",
        budget_bytes=BUDGET_BYTES,
        environment=PAPER,
        layers=script.layers,
        evidence=Evidence.FORECAST,
    )
    winner = forecast(script, store)
    write_files(make_result(store, winner, "forecast", False, ()), store.folder)
    return store


def test_the_same_artifacts_with_their_evidence(tmp_path: Path) -> None:
    forecast_on_disk(tmp_path)
    document = json.loads((tmp_path / "gpt" / "result.json").read_text())
    assert document["evidence"] == "forecast"
    entries = [*document["baselines"], *document["trials"], document["best"]]
    assert {entry["evidence"] for entry in entries} == {"forecast"}
    assert document["verification"] is None
    assert 40 * MIB <= document["floor_bytes"] < document["best"]["peak_bytes"]
    assert document["lower_bound_seconds"] <= document["best"]["step_seconds"]

    loaded = load_result(tmp_path / "gpt")
    assert loaded.evidence is Evidence.FORECAST
    assert loaded.best is not None
    assert loaded.best.policy.key == open_study(tmp_path / "gpt").winner
    assert (tmp_path / "gpt" / "policy.py").read_text().count("Forecast, never run, for:") == 1
    assert "'evidence': 'forecast'" in render_policy(loaded)


def test_a_forecast_study_goes_on_with_measured_trials(tmp_path: Path) -> None:
    forecast_on_disk(tmp_path)
    listener = Listener()
    script = measurer()
    result = run_search(
        script, "gpt", SearchOptions(budget_gb=120 / 1024, root=tmp_path, trials=6), listener
    )
    assert any("was forecast so far" in note for note in listener.notes)
    assert result.evidence is Evidence.MEASURED
    assert {c.evidence for c in result.candidates if c.measurement} == {Evidence.MEASURED}
    assert result.environment == ENVIRONMENT
    assert result.verification is not None and result.verification.passed
    store = open_study(tmp_path / "gpt")
    assert store.forecasts()  # they are still there, apart
    document = json.loads((tmp_path / "gpt" / "result.json").read_text())
    assert document["evidence"] == document["best"]["evidence"] == "measured"


def test_a_search_that_dies_before_its_first_figure_leaves_no_forecast_winner(
    tmp_path: Path,
) -> None:
    forecast_on_disk(tmp_path)
    script = measurer(interrupt_at=1)
    options = SearchOptions(budget_gb=120 / 1024, root=tmp_path, trials=6)
    result = run_search(script, "gpt", options, Listener())
    assert result.interrupted and not result.candidates
    assert open_study(tmp_path / "gpt").winner is None


def test_a_search_for_another_budget_leaves_the_forecasts_alone(tmp_path: Path) -> None:
    forecast_on_disk(tmp_path)
    before = load_result(tmp_path / "gpt")
    options = SearchOptions(budget_gb=200 / 1024, root=tmp_path, trials=6)
    with pytest.raises(StudyError, match="is for a budget of"):
        run_search(measurer(), "gpt", options, Listener())
    assert load_result(tmp_path / "gpt") == before
    assert before.best is not None


# --- other goals ----------------------------------------------------------------------------------


def test_the_least_peak_is_forecast_within_its_limit() -> None:
    script = measurer()
    goal = Goal(kind=GoalKind.MEMORY, max_overhead_fraction=0.05, has_budget=False)
    store = memory_store(script, 2**34, goal)
    best = forecast(script, store).best
    assert best is not None and best.step_seconds is not None
    assert best.step_seconds <= 1.05 * script.step_seconds(NO_CHECKPOINTING)
    within = [c for c in store.forecasts() if goal.fits(c, store.limits_for(store.forecasts()))]
    assert peak_of(best) == min(map(peak_of, within)) < script.peak_bytes(NO_CHECKPOINTING)
    assert store.bound_overhead_seconds is None


def test_a_front_is_forecast_from_full_to_no_checkpointing() -> None:
    script = measurer()
    store = memory_store(script, 2**34, Goal(kind=GoalKind.PARETO, has_budget=False))
    best = forecast(script, store).best
    assert best is not None and best.policy == NO_CHECKPOINTING
    front = pareto_front(store.forecasts(), 2**34)
    assert len(front) >= 5
    assert peak_of(front[0]) == min(peak_of(c) for c in store.forecasts())
    assert front[-1].policy == NO_CHECKPOINTING
