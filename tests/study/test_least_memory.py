"""The least peak within an overhead: found, held against counting, confirmed and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import (
    MIB,
    SITE_OPS,
    Listener,
    ScriptedMeasurer,
    make_layers,
    make_search,
)

from sac_search.errors import NoPolicyFits, StudyError
from sac_search.options import SearchOptions
from sac_search.pipeline import run_search
from sac_search.policy import NO_CHECKPOINTING
from sac_search.report import rows
from sac_search.report.explain import explain
from sac_search.space import Granularity, SearchSpace
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import peak_of
from sac_search.study.final import FinalStage
from sac_search.study.goal import OVERHEAD_CONSTRAINT, Goal, GoalKind
from sac_search.study.result import SearchResult, to_document
from sac_search.study.sampler import SamplerName
from sac_search.study.search import Search
from sac_search.study.store import open_study

DEVICE_BYTES = 2**34


def measurer(**changes: Any) -> ScriptedMeasurer:
    return ScriptedMeasurer(
        **{"layers": make_layers(4, SITE_OPS), "forecast_factor": 1.0} | changes
    )


def goal(overhead: float, *, has_budget: bool = False) -> Goal:
    return Goal(kind=GoalKind.MEMORY, max_overhead_fraction=overhead, has_budget=has_budget)


def least(space: SearchSpace, on: ScriptedMeasurer, overhead: float) -> int:
    """Returns the least peak of all policies of the space within the overhead, by counting."""
    most_seconds = (1 + overhead) * on.step_seconds(NO_CHECKPOINTING) * (1 + 1e-12)
    policies = (space.policy_for(assignment) for assignment in space.assignments())
    return min(on.peak_bytes(p) for p in policies if on.step_seconds(p) <= most_seconds)


def search_for(on: ScriptedMeasurer, overhead: float, **settings: Any) -> Search:
    return make_search(
        on, DEVICE_BYTES, goal=goal(overhead), granularity=Granularity.SITE, **settings
    )


def run(root: Path, on: ScriptedMeasurer, listener: Any = None, **options: Any) -> SearchResult:
    given = {"minimize": "memory", "max_overhead": "5%", "report": False, "tiers": 1}
    return run_search(
        on, "gpt", SearchOptions(root=root, **(given | options)), listener or Listener()
    )


@pytest.mark.parametrize("overhead", [0.0, 0.01, 0.03, 0.05, 0.1, 0.2, 0.5])
def test_the_answer_is_that_of_counting_and_takes_a_fraction_of_the_trials(overhead: float) -> None:
    on = measurer()
    search = search_for(on, overhead)
    search.run()
    winner = FinalStage(store=search.store, measurer=on).run()
    assert winner.best is not None and winner.verification is not None
    assert peak_of(winner.best) == least(search.space, on, overhead)
    assert winner.verification.passed
    assert len(search.trial_candidates()) < search.space.size / 50


@pytest.mark.parametrize("sampler", SamplerName)
def test_every_sampler_keeps_the_limit(sampler: SamplerName) -> None:
    on = measurer(layers=make_layers(3))
    search = make_search(on, DEVICE_BYTES, goal=goal(0.1), sampler=sampler, trials=12)
    search.run()
    best = FinalStage(store=search.store, measurer=on).run().best
    assert best is not None
    overhead = on.step_seconds(best.policy) / on.step_seconds(NO_CHECKPOINTING) - 1
    assert overhead <= 0.1
    assert on.peak_bytes(best.policy) <= on.peak_bytes(NO_CHECKPOINTING)
    # Optuna's own best is the least of what is within.
    trial = search.store.study.best_trial
    assert trial.values[0] * 2**30 >= peak_of(best)


def test_the_study_says_what_it_is_about(tmp_path: Path) -> None:
    run(tmp_path, measurer(), trials=3)
    store = open_study(tmp_path / "gpt")
    assert store.goal == goal(0.05)
    assert store.study.metric_names == ["peak_gib"]
    assert [direction.name for direction in store.study.directions] == ["MINIMIZE"]
    trials = [t for t in store.study.get_trials() if t.state.is_finished()]
    assert all(t.constraints.keys() - {"0"} == {OVERHEAD_CONSTRAINT} for t in trials)
    texts = {t.user_attrs["outcome_text"] for t in trials}
    assert texts == {"fits", "too slow"}


def test_a_budget_still_holds(tmp_path: Path) -> None:
    on = measurer()
    with pytest.raises(NoPolicyFits, match="no policy is within an overhead of 5%") as raised:
        run(tmp_path, on, budget_gb=100 / 1024)
    assert "The least overhead is +" in str(raised.value)
    assert on.measured[NO_CHECKPOINTING.key] == 1


def test_wrong_gradients_make_way_for_the_next(tmp_path: Path) -> None:
    on = measurer()
    right = run(tmp_path / "right", on).best
    assert right is not None
    on = measurer(wrong_gradients=lambda policy: policy.key == right.policy.key)
    result = run(tmp_path / "wrong", on)
    assert result.best is not None
    assert peak_of(result.best) > peak_of(right)
    assert result.verification is not None and result.verification.passed
    assert any("wrong gradients" in reason for reason in result.rejected)


def test_a_lucky_trial_does_not_win(tmp_path: Path) -> None:
    on = measurer()
    lucky = run(tmp_path / "before", on).best
    assert lucky is not None
    # Side by side that policy turns out to be slower than the limit.
    on = measurer(compared_seconds=lambda policy: 1.05 if policy.key == lucky.policy.key else 1.0)
    result = run(tmp_path / "after", on)
    assert result.best is not None and result.best.policy.key != lucky.policy.key
    overhead = result.overhead_of(result.best)
    assert overhead is not None and overhead <= 0.05
    assert any(lucky.policy.key in keys for _, keys in on.compared)


def test_an_unlucky_trial_has_another_chance() -> None:
    # All are noisy; side by side all are as fast as they really are.
    on = measurer(noise_fraction=0.004)
    search = search_for(on, 0.05)
    search.run()
    on.noise_fraction = 0.0
    best = FinalStage(store=search.store, measurer=on).run().best
    tried = [c.policy for c in search.store.candidates() if c.measurement is not None]
    none_seconds = on.step_seconds(NO_CHECKPOINTING)
    within = [p for p in tried if on.step_seconds(p) <= 1.05 * none_seconds]
    assert best is not None
    assert on.peak_bytes(best.policy) == min(map(on.peak_bytes, within))


def test_continuing_measures_nothing_again(tmp_path: Path) -> None:
    first = run(tmp_path, measurer())
    on = measurer()
    again = run(tmp_path, on)
    assert again.best is not None and first.best is not None
    assert again.best.policy.key == first.best.policy.key
    assert (on.measured.total(), on.compared, on.verified) == (0, [], [])


def test_an_interrupted_search_goes_on_to_the_same_answer(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", measurer())
    stopped = run(tmp_path / "parts", measurer(interrupt_at=6))
    assert stopped.interrupted
    result = run(tmp_path / "parts", measurer())
    assert result.best is not None and whole.best is not None
    assert peak_of(result.best) == peak_of(whole.best)


def test_an_interrupted_search_prefers_what_it_measured_to_no_checkpointing() -> None:
    on = measurer()
    search = search_for(on, 0.1)
    search.run()
    stage = FinalStage(store=search.store, measurer=on)
    full = next(c for c in search.store.candidates() if c.name == FULL)
    assert stage.measure_again([full])  # too slow, so that of the confirmed only none is left

    winner = FinalStage(store=search.store, measurer=on, steps=0).run()

    assert winner.best is not None
    assert peak_of(winner.best) == least(search.space, on, 0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_overhead": "6%"},
        {"budget_gb": 1.0},
        {"minimize": None, "max_overhead": None, "budget_gb": 1.0},
    ],
)
def test_another_goal_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    run(tmp_path, measurer(), trials=1)
    on = measurer()
    with pytest.raises(StudyError, match="is for another goal") as raised:
        run(tmp_path, on, **options)
    assert "--fresh" in str(raised.value)
    assert on.measured.total() == 0


def test_a_new_study_starts_from_what_another_goal_measured(tmp_path: Path) -> None:
    speed = {"minimize": None, "max_overhead": None, "budget_gb": 120 / 1024}
    run_search(
        measurer(),
        "fast",
        SearchOptions(root=tmp_path, report=False, tiers=1, trials=5, **speed),
        Listener(),
    )
    on = measurer()
    result = run(tmp_path, on)
    assert NO_CHECKPOINTING.key not in on.measured
    assert result.best is not None
    fresh = run(tmp_path / "alone", measurer())
    assert fresh.best is not None and peak_of(result.best) == peak_of(fresh.best)


# --- where the step without checkpointing does not run --------------------------------------------


def test_overheads_are_held_against_an_estimate_which_is_said(tmp_path: Path) -> None:
    on = measurer(device_bytes=150 * MIB)
    assert on.peak_bytes(NO_CHECKPOINTING) > 150 * MIB
    listener = Listener()
    result = run(tmp_path, on, listener, max_overhead=0.15)
    truth = on.step_seconds(NO_CHECKPOINTING)
    assert result.none_estimate_seconds == pytest.approx(truth, rel=0.02)
    assert listener.estimates[-1] == result.none_estimate_seconds
    best = result.best
    assert best is not None
    assert on.step_seconds(best.policy) <= 1.17 * truth
    assert result.overhead_of(best) is None  # nothing was measured that it could be held against
    assert to_document(result)["best"]["overhead"] is None
    text = "\n".join(rows.headline(result))
    assert "the planner's forecast of the step without checkpointing" in text
    assert "≈+" in text
    facts = [fact for section in explain(result).sections for fact in section.facts]
    assert any("which does not run here" in fact.sentence for fact in facts)
    assert {c.name for c in result.candidates if c.failure is not None} >= {NONE}


def test_where_nothing_that_runs_is_within_the_limit_the_least_overhead_is_told(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoPolicyFits, match="no policy is within an overhead of 1%") as raised:
        run(tmp_path, measurer(device_bytes=110 * MIB), max_overhead=0.01, trials=4)
    said = str(raised.value)
    assert "The least overhead is +" in said
    assert "the planner's forecast of the step without checkpointing" in said


def test_without_an_estimate_it_is_refused(tmp_path: Path) -> None:
    on = measurer(device_bytes=150 * MIB, forecast_factor=None)
    with pytest.raises(NoPolicyFits, match="so no overhead is known"):
        run(tmp_path, on)


# --- what is said ---------------------------------------------------------------------------------


def test_the_headline_and_the_document_are_of_this_goal(tmp_path: Path) -> None:
    result = run(tmp_path, measurer(), trials=4)
    lines = rows.headline(result)
    assert "The least peak with an overhead of at most 5% (its own: +" in lines[1]
    assert "budget" not in " ".join(lines)
    states = {entry["state"] for entry in to_document(result)["baselines"]}
    assert states == {"fits", "too slow"}
    verdicts = {row.name: row.verdict for row in rows.candidate_rows(result)}
    assert (verdicts[NONE], verdicts[FULL]) == ("fits", "too slow")


def test_where_nothing_is_smaller_no_checkpointing_is_the_answer(tmp_path: Path) -> None:
    result = run(tmp_path, measurer(), max_overhead=0)
    assert result.needs_no_checkpointing
    assert "No policy with an overhead of at most 0% was found" in rows.headline(result)[1]
