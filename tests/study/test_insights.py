"""What a search believes at its end, from a scripted device whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripted import MIB, SITE_OPS, Listener, ScriptedMeasurer, make_layers

from sac_search import records
from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result
from sac_search.study.insights import Insights, budgets_along
from sac_search.study.result import SearchResult
from sac_search.units import GIB


@pytest.fixture(scope="module")
def measurer() -> ScriptedMeasurer:
    return ScriptedMeasurer(layers=make_layers(6, SITE_OPS), forecast_factor=0.98)


@pytest.fixture(scope="module")
def result(measurer: ScriptedMeasurer, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    options = SearchOptions(
        budget_gb=140 / 1024, root=tmp_path_factory.mktemp("studies"), trials=12
    )
    return run_search(measurer, "scripted", options, Listener())


@pytest.fixture(scope="module")
def insights(result: SearchResult) -> Insights:
    assert result.insights is not None
    return result.insights


def test_they_are_in_the_study(result: SearchResult, insights: Insights) -> None:
    assert result.folder is not None
    assert load_result(result.folder).insights == insights
    assert records.decode(records.encode(insights), Insights) == insights


def test_prices_are_those_of_the_device(measurer: ScriptedMeasurer, insights: Insights) -> None:
    [layer] = insights.layers
    traced = {}
    for op in measurer.layers[0].ops:
        traced[op.op_class] = traced.get(op.op_class, 0.0) + op.seconds
    assert layer.layers == 6
    assert layer.recompute_seconds == pytest.approx(sum(traced.values()), rel=0.05)
    saves = [save.label for save in insights.saves]
    assert len(saves) == len(set(saves)) > 3
    assert [save.seconds for save in insights.saves] == sorted(
        (save.seconds for save in insights.saves), reverse=True
    )
    whole = sum(save.seconds for save in insights.saves)
    assert whole + layer.fixed_seconds == pytest.approx(layer.recompute_seconds)


def test_the_frontier_is_true_at_every_point(
    measurer: ScriptedMeasurer, insights: Insights, result: SearchResult
) -> None:
    frontier = insights.frontier
    assert result.budget_bytes in {point.budget_bytes for point in frontier}
    none_seconds = measurer.step_seconds(replace(frontier[0].policy, tiers=(), layers=()))
    for point in frontier:
        assert measurer.peak_bytes(point.policy) == pytest.approx(point.peak_bytes, rel=0.01)
        assert point.peak_bytes <= point.budget_bytes * 1.01
        seconds = measurer.step_seconds(point.policy) - none_seconds
        assert seconds == pytest.approx(point.overhead_seconds, abs=0.01 * none_seconds)
    overheads = [point.overhead_seconds for point in frontier]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == pytest.approx(0.0, abs=0.01 * none_seconds)


def test_without_a_planner_there_are_none(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(layers=make_layers(6), forecast_factor=None)
    options = SearchOptions(budget_gb=140 / 1024, root=tmp_path, trials=3)
    assert run_search(measurer, "scripted", options, Listener()).insights is None


class TestBudgetsAlong:
    def test_the_studys_own_comes_first_and_a_little_more_next(self) -> None:
        budgets = budgets_along(140 * MIB, 100 * MIB, 180 * MIB)
        assert budgets[:4] == [140 * MIB, 148 * MIB, 180 * MIB, 100 * MIB]
        assert sorted(budgets) == [
            m * MIB for m in (100, 110, 120, 130, 140, 148, 150, 160, 170, 180)
        ]

    def test_more_is_a_gib_at_the_most(self) -> None:
        assert budgets_along(40 * GIB, 10 * GIB, 70 * GIB)[1] == 41 * GIB

    def test_a_budget_beyond_the_ends_stays_alone(self) -> None:
        assert budgets_along(50 * MIB, 100 * MIB, 180 * MIB)[0] == 50 * MIB
        assert max(budgets_along(200 * MIB, 100 * MIB, 180 * MIB)) == 200 * MIB

    def test_where_there_is_nothing_to_trade_few_are_left(self) -> None:
        assert budgets_along(100 * MIB, 100 * MIB, 100 * MIB) == [100 * MIB]
