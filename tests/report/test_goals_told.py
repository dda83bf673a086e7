"""What is said of studies for other goals, in every state that one can be in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from results import FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from rich.console import Console

from sac_search.report import rows, terminal
from sac_search.report.comparison import compare, render, side_of
from sac_search.report.explain import explain
from sac_search.report.figures import figures
from sac_search.report.page import render_page
from sac_search.report.points import Group, budget_is_near, policy_points
from sac_search.report.summary import cards
from sac_search.study.candidate import Candidate
from sac_search.study.goal import Goal, GoalKind
from sac_search.study.result import SearchResult

MEMORY = Goal(kind=GoalKind.MEMORY, max_overhead_fraction=0.15, has_budget=False)
MEMORY_IN_BUDGET = dataclasses.replace(MEMORY, has_budget=True)
FRONT = Goal(kind=GoalKind.PARETO, has_budget=False)
FRONT_IN_BUDGET = dataclasses.replace(FRONT, has_budget=True)
GOALS = (MEMORY, MEMORY_IN_BUDGET, FRONT, FRONT_IN_BUDGET)


def result_for(goal: Goal, *candidates: Candidate, **changes: Any) -> SearchResult:
    budget_bytes = 6 * GIB if goal.has_budget else 16 * GIB
    return make_result(*candidates, **{"goal": goal, "budget_bytes": budget_bytes} | changes)


@pytest.mark.parametrize(
    ("goal", "changes", "said"),
    [
        (
            MEMORY,
            {},
            "No policy is verified yet. The best so far that has an overhead of at most 15% is "
            "trial 7: 220.0 ms per step, peak 5.000 GiB.",
        ),
        (
            MEMORY_IN_BUDGET,
            {"rejected": ("trial 7: wrong gradients",)},
            "No policy that has an overhead of at most 15% and fits 6.000 GiB has passed "
            "verification.",
        ),
        (
            MEMORY_IN_BUDGET,
            {"budget_bytes": 3 * GIB},
            "No policy has an overhead of at most 15% and fits 3.000 GiB.",
        ),
        (
            MEMORY,
            {"interrupted": True},
            "Interrupted before a policy that has an overhead of at most 15% was found and "
            "verified.",
        ),
        (
            FRONT,
            {},
            "No policy is verified yet. The fastest so far that fits the device is none: 200.0 ms "
            "per step, peak 8.000 GiB.",
        ),
        (FRONT_IN_BUDGET, {"budget_bytes": 3 * GIB}, "No policy fits 3.000 GiB."),
    ],
)
def test_why_there_is_no_winner_is_told(goal: Goal, changes: dict[str, Any], said: str) -> None:
    assert rows.headline(result_for(goal, **changes)) == [said]


def test_nothing_is_within_a_limit_when_no_overhead_is_known() -> None:
    result = result_for(MEMORY, FULL_CANDIDATE, TRIAL)
    assert rows.lack_of_winner(result) == "nothing is within the limits"
    assert side_of(result).lack == "nothing is within the limits"
    assert rows.lack_of_winner(dataclasses.replace(result, candidates=())) == "nothing tried yet"


def test_what_is_too_slow_is_not_called_over_the_budget() -> None:
    groups = {p.name: p.group for p in policy_points(result_for(MEMORY))}
    assert groups["trial 7"] is Group.FITTING
    slow = dataclasses.replace(TRIAL, name="trial 8", step_seconds=0.3)
    points = policy_points(result_for(MEMORY, NONE_CANDIDATE, slow))
    assert {p.name: p.group for p in points}["trial 8"] is Group.SLOW


def test_what_the_device_has_is_no_budget() -> None:
    assert not budget_is_near(result_for(MEMORY, budget_bytes=8 * GIB))
    assert budget_is_near(result_for(MEMORY_IN_BUDGET, budget_bytes=8 * GIB))
    assert "budget" not in str(figures(result_for(FRONT, budget_bytes=8 * GIB))["trade-off"])


def with_seconds(seconds: float | None) -> tuple[Candidate, ...]:
    known = (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL)
    return tuple(dataclasses.replace(c, step_seconds=seconds) for c in known)


STATES: dict[str, tuple[Candidate, ...]] = {
    "whole": (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL),
    "no step without checkpointing": (FULL_CANDIDATE, TRIAL),
    "one": (TRIAL,),
    "without step times": with_seconds(None),
    "without ends of step times": with_seconds(math.inf),
    "with a coarse clock": with_seconds(0.0),
}


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.describe())
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("has_best", [True, False])
def test_every_state_can_be_printed(goal: Goal, state: str, has_best: bool) -> None:
    candidates = STATES[state]
    best = candidates[-1] if has_best else None
    for changes in ({}, {"none_estimate_seconds": 0.19}):
        result = result_for(goal, *candidates, best=best, **changes)
        assert all(rows.headline(result)) and all(rows.closing_lines(result))
        assert cards(result)
        assert explain(result).sections
        figures(result)
        render(compare(side_of(result), side_of(result)), "json")
        with Console(file=None, quiet=True) as console:
            console.print(terminal.study_table([result]))
            console.print(terminal.candidate_table(rows.candidate_rows(result)))
            console.print(terminal.front_table(rows.front_rows(result)))
        assert "gpt" in render_page(result)
