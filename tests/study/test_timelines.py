"""Which steps have their memory drawn, and that the study keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripted import (
    Listener,
    ScriptedMeasurer,
    make_candidate,
    make_failed,
    make_layers,
    make_timeline,
)

from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result
from sac_search.errors import WorkerError
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.study.baselines import FULL, NONE
from sac_search.study.result import SearchResult
from sac_search.study.timelines import draw_timelines
from sac_search.timeline import Timeline

DRAWN = make_timeline(forward=100, backward=10)


def search(root: Path, measurer: ScriptedMeasurer, **options: object) -> SearchResult:
    chosen = SearchOptions(**{"budget_gb": 120 / 1024, "root": root, "trials": 2, **options})
    return run_search(measurer, "gpt", chosen, Listener())


def test_no_and_full_checkpointing_and_the_winner_are_drawn_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def draw(policy: Policy) -> Timeline:
        asked.append(policy.key)
        return make_timeline(forward=len(asked), backward=10)

    result = search(tmp_path, ScriptedMeasurer(timelines=draw))
    assert result.none is not None and result.full is not None and result.best is not None
    assert [t.name for t in result.timelines] == [NONE, FULL, result.best.name]
    assert (
        asked
        == [t.policy_key for t in result.timelines]
        == [
            result.none.policy.key,
            result.full.policy.key,
            result.best.policy.key,
        ]
    )
    assert result.folder is not None
    assert load_result(result.folder).timelines == result.timelines
    again = search(tmp_path, ScriptedMeasurer(timelines=draw))
    assert again.timelines == result.timelines and len(asked) == 3


def test_a_step_whose_memory_cannot_be_told_is_left_out(tmp_path: Path) -> None:
    def draw(policy: Policy) -> Timeline | None:
        return DRAWN if policy.layers else None

    result = search(tmp_path, ScriptedMeasurer(timelines=draw))
    assert NONE not in [t.name for t in result.timelines]
    assert len(result.timelines) == 2


def test_a_worker_that_breaks_while_it_draws_is_noted(tmp_path: Path) -> None:
    def draw(policy: Policy) -> Timeline:
        raise WorkerError("it broke")

    listener = Listener()
    options = SearchOptions(budget_gb=120 / 1024, root=tmp_path, trials=1)
    result = run_search(ScriptedMeasurer(timelines=draw), "gpt", options, listener)
    assert result.best is not None and result.timelines == ()
    assert "The memory over a step is not in the report: it broke" in listener.notes


def test_nothing_is_drawn_without_a_report(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(timelines=lambda policy: pytest.fail("drawn"))
    assert search(tmp_path, measurer, report=False).timelines == ()


def test_an_interrupted_search_draws_nothing(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(timelines=lambda policy: pytest.fail("drawn"), interrupt_at=4)
    assert search(tmp_path, measurer).interrupted


@pytest.mark.parametrize(("must_run", "names"), [(True, [FULL]), (False, [NONE, FULL])])
def test_where_ranks_wait_for_each_other_only_what_runs_is_drawn(
    must_run: bool, names: list[str]
) -> None:
    layers = [layer.name for layer in make_layers(2)]
    none = replace(
        make_candidate(NONE, policy=NO_CHECKPOINTING), outcome=make_failed(), step_seconds=None
    )
    full = make_candidate(FULL, policy=checkpoint_layers(layers))
    drawn = draw_timelines([none, full], full, (), lambda policy: DRAWN, must_run=must_run)
    assert [entry.name for entry in drawn] == names
