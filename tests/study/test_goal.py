"""Goals: limits, order, and what Optuna is told."""

from __future__ import annotations

import pytest
from scripted import make_candidate, make_failed, make_outcome

from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import FailureKind, Outcome
from sac_search.study.baselines import NONE
from sac_search.study.candidate import Candidate
from sac_search.study.goal import (
    BUDGET_CONSTRAINT,
    OVERHEAD_CONSTRAINT,
    SPEED,
    Goal,
    GoalKind,
    Limits,
    Told,
)
from sac_search.units import GIB

MEMORY = Goal(kind=GoalKind.MEMORY, max_overhead_fraction=0.05, has_budget=False)
LIMITS = Limits(budget_bytes=1000, none_seconds=1.0)


def policy(count: int) -> Policy:
    return checkpoint_layers(f"h.{index}" for index in range(count))


def candidate(count: int, seconds: float, peak_bytes: int, noise: float = 0.0) -> Candidate:
    return make_candidate(
        f"{count}", policy=policy(count), seconds=seconds, peak_bytes=peak_bytes, noise=noise
    )


def told(goal: Goal, outcome: Outcome, limits: Limits = LIMITS) -> Told:
    seconds = None if outcome.measurement is None else outcome.measurement.step_seconds
    return goal.told(outcome, seconds, limits, anchor_seconds=2.0, highest_peak_bytes=800)


def test_the_least_peak_within_the_overhead_comes_first() -> None:
    slow = candidate(4, seconds=1.0501, peak_bytes=100)
    large = candidate(1, seconds=1.0, peak_bytes=900)
    small = candidate(3, seconds=1.05, peak_bytes=200)
    over = candidate(2, seconds=1.01, peak_bytes=1001)
    assert MEMORY.rank([slow, large, small, over], LIMITS) == [small, large]
    assert [MEMORY.verdict(c, LIMITS) for c in (slow, small, over)] == [
        "too slow",
        "fits",
        "over the budget",
    ]


def test_of_equal_peaks_the_faster_comes_first_and_within_noise_the_simpler() -> None:
    slower = candidate(1, seconds=1.04, peak_bytes=200)
    faster = candidate(2, seconds=1.0, peak_bytes=200)
    assert MEMORY.rank([slower, faster], LIMITS) == [faster, slower]
    saving = checkpoint_layers(["h.0"], Tier(ops=("aten.mm.default",)))
    intricate = make_candidate("saving", policy=saving, seconds=1.0, peak_bytes=200, noise=0.01)
    simple = candidate(1, seconds=1.002, peak_bytes=200, noise=0.01)
    assert MEMORY.rank([intricate, simple], LIMITS) == [simple, intricate]


def test_nothing_is_within_an_overhead_that_is_not_known() -> None:
    limits = Limits(budget_bytes=1000)
    assert MEMORY.rank([candidate(1, seconds=1.0, peak_bytes=100)], limits) == []
    assert SPEED.rank([candidate(1, seconds=1.0, peak_bytes=100)], limits)


def test_noise_leaves_a_little_doubt_and_no_more() -> None:
    none = make_candidate(NONE, policy=NO_CHECKPOINTING, seconds=1.0, peak_bytes=900, noise=0.003)
    near = candidate(1, seconds=1.055, peak_bytes=100, noise=0.003)
    far = candidate(2, seconds=1.101, peak_bytes=100, noise=0.1)
    assert MEMORY.rank([none, near, far], LIMITS) == [none]
    assert MEMORY.rank_with_doubt([none, near, far], LIMITS) == [near, none]


def test_a_trial_is_told_its_peak_and_what_its_overhead_is_over_the_limit() -> None:
    found = told(MEMORY, make_outcome(seconds=1.2, peak_bytes=2 * GIB))
    assert found.values == (2.0,)
    assert found.constraints == {OVERHEAD_CONSTRAINT: pytest.approx(0.15)}


def test_a_budget_is_a_constraint_besides() -> None:
    both = Goal(kind=GoalKind.MEMORY, max_overhead_fraction=0.05)
    limits = Limits(budget_bytes=3 * GIB, none_seconds=1.0)
    found = told(both, make_outcome(seconds=1.0, peak_bytes=2 * GIB), limits)
    assert found.constraints == {OVERHEAD_CONSTRAINT: -0.05, BUDGET_CONSTRAINT: -1.0}


def test_a_failure_is_told_as_worse_than_all_that_ran() -> None:
    found = told(MEMORY, make_failed())
    assert found.values == (1600 / GIB,)
    assert found.constraints[OVERHEAD_CONSTRAINT] > 0
    ruled_out = Outcome(
        failure=make_failed(FailureKind.FORECAST_OVER_BUDGET).failure, forecast_peak_bytes=GIB
    )
    assert told(MEMORY, ruled_out).values == (1.0,)


def test_the_goal_of_all_older_studies_tells_what_it_always_told() -> None:
    assert SPEED.metric_names == ("step_seconds",)
    assert told(SPEED, make_outcome(seconds=1.2, peak_bytes=1000 - GIB)) == Told(
        values=(1.2,), constraints={BUDGET_CONSTRAINT: -1.0}
    )
    assert told(SPEED, make_failed()) == Told(
        values=(4.0,), constraints={BUDGET_CONSTRAINT: 1000 / GIB}
    )
