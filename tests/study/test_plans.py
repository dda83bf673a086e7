"""Plans seed the search and forecasts screen it; neither wins over a measurement."""

from __future__ import annotations

import optuna
import pytest
from scripted import MIB, ScriptedMeasurer, make_layers, make_op, make_search, memory_store

from sac_search.forecaster import Planned
from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.records import FailureKind
from sac_search.study import search as search_module
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.candidate import rank
from sac_search.study.sampler import SamplerName
from sac_search.study.search import CONSTRAINT, Search
from sac_search.study.store import Bound

BUDGET_BYTES = 120 * MIB
RANDOM = SamplerName.RANDOM
SAVING = Tier(classes=("matmul[8x8]",), ops=("aten.addmm.default[8x8]",))


def make_plan(
    fraction: float, layers: int, *, bound: float | None = 0.01, peak_mib: float = 110
) -> Planned:
    return Planned(
        budget_bytes=round(fraction * BUDGET_BYTES),
        policy=checkpoint_layers((f"h.{i}" for i in range(layers)), SAVING),
        overhead_seconds=0.02,
        peak_bytes=round(peak_mib * MIB),
        bound_seconds=bound,
    )


def plan_names(search: Search) -> list[str]:
    return [c.name for c in search.store.candidates() if c.name.startswith("plan")]


# --- plans ----------------------------------------------------------------------------------------


def test_plans_are_measured_before_the_ladder() -> None:
    measurer = ScriptedMeasurer(plans=(make_plan(1.0, 6), make_plan(0.9, 5)))
    search = make_search(measurer, BUDGET_BYTES, trials=2, sampler=RANDOM)

    search.run()

    assert plan_names(search) == ["plan at 100%", "plan at 90%"]
    assert [p.key for p in measurer.order[2:4]] == [plan.policy.key for plan in measurer.plans]
    # They count as trials, for they were measured and are no baselines.
    assert [c.name for c in search.trial_candidates()] == ["plan at 100%", "plan at 90%"]
    assert search.store.bound == Bound(overhead_seconds=0.01, planned_overhead_seconds=0.02)


def test_the_planner_is_asked_for_budgets_around_the_studys_own() -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, trials=0, tiers=1)

    search.run()

    (request,) = measurer.plan_requests
    assert request.tiers == 1
    assert request.budgets_bytes == tuple(
        round(fraction * BUDGET_BYTES) for fraction in (1.0, 0.95, 0.9, 1.05, 1.1)
    )
    none, full = measurer.step_seconds(Policy()), measurer.step_seconds(measurer.full)
    assert request.full_overhead_seconds == pytest.approx(full - none)


def test_without_tiers_there_are_no_plans() -> None:
    measurer = ScriptedMeasurer(plans=(make_plan(1.0, 6),))
    search = make_search(measurer, BUDGET_BYTES, trials=0, tiers=0)

    search.run()

    assert measurer.plan_requests == []
    assert plan_names(search) == []


def test_a_continued_search_does_not_plan_again() -> None:
    measurer = ScriptedMeasurer(plans=(make_plan(1.0, 6),))
    store = memory_store(measurer, BUDGET_BYTES)
    for trials in (1, 2):
        make_search(measurer, BUDGET_BYTES, store=store, trials=trials, sampler=RANDOM).run()

    assert len(measurer.plan_requests) == 1
    assert set(measurer.measured.values()) == {1}


def test_an_interrupted_search_measures_the_plans_that_are_left() -> None:
    measurer = ScriptedMeasurer(plans=(make_plan(1.0, 6), make_plan(0.9, 5)), interrupt_at=4)
    store = memory_store(measurer, BUDGET_BYTES)
    with pytest.raises(KeyboardInterrupt):
        make_search(measurer, BUDGET_BYTES, store=store).run()
    assert store.bound is None

    measurer.interrupt_at = None
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=2)
    search.run()

    assert plan_names(search) == ["plan at 100%", "plan at 90%"]
    assert measurer.measured[measurer.plans[0].policy.key] == 1
    assert store.bound is not None


def test_the_bound_is_that_of_the_budget_itself() -> None:
    # Nothing is planned to fit but a tenth above the budget: what holds there is not the study's.
    measurer = ScriptedMeasurer(plans=(make_plan(1.1, 6),))
    search = make_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    assert search.store.bound is None


def test_a_plan_to_checkpoint_nothing_is_no_news() -> None:
    measurer = ScriptedMeasurer(plans=(make_plan(1.0, 0),))
    search = make_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    assert plan_names(search) == []


def test_the_first_plan_may_be_the_first_step_that_runs() -> None:
    # Full and no checkpointing fail, so the plan's reference steps are the anchor.
    ends = {ScriptedMeasurer().full.key, Policy().key}
    measurer = ScriptedMeasurer(
        plans=(make_plan(1.0, 6),),
        fail=lambda policy: FailureKind.TIMEOUT if policy.key in ends else None,
    )
    search = make_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    plan = next(c for c in search.trial_candidates() if c.name == "plan at 100%")
    assert search.store.anchor_seconds == pytest.approx(measurer.step_seconds(measurer.full))
    assert plan.step_seconds == pytest.approx(measurer.step_seconds(plan.policy))
    assert plan in search.store.candidates()


# --- forecasts ------------------------------------------------------------------------------------


def test_what_is_over_the_budget_by_forecast_is_not_measured() -> None:
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    search = make_search(measurer, BUDGET_BYTES, trials=6, sampler=RANDOM)

    reason = search.run()

    assert reason == "6 trials measured (--trials 6)"
    ruled_out = [c for c in search.store.candidates() if c.is_ruled_out]
    assert ruled_out
    for candidate in ruled_out:
        assert candidate.policy.key not in measurer.measured
        assert measurer.peak_bytes(candidate.policy) > BUDGET_BYTES
        assert candidate.outcome.forecast_peak_bytes == measurer.peak_bytes(candidate.policy)
    # Only trials that were measured count.
    trials = search.trial_candidates()
    assert len(trials) == 6
    assert all(measurer.measured[c.policy.key] == 1 for c in trials)
    assert all(c.fits(BUDGET_BYTES * 1.01) for c in trials)


def test_baselines_are_measured_whatever_their_forecast() -> None:
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    search = make_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    assert len(measurer.order) == len(BASELINE_NAMES)
    assert not any(c.is_ruled_out for c in search.store.candidates())


def test_a_ruled_out_trial_is_told_as_infeasible_by_its_forecast() -> None:
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    search = make_search(measurer, BUDGET_BYTES, trials=4, sampler=RANDOM)

    search.run()

    known = {c.name: c for c in search.store.candidates()}
    trials = {f"trial {t.number}": t for t in search.store.study.get_trials()}
    ruled_out = [name for name, c in known.items() if c.is_ruled_out]
    assert ruled_out
    for name in ruled_out:
        trial = trials[name]
        excess_bytes = measurer.peak_bytes(known[name].policy) - BUDGET_BYTES
        assert trial.constraints[CONSTRAINT] == pytest.approx(excess_bytes / 2**30)
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert trial.user_attrs["outcome_text"].startswith("forecast over the budget")


def test_forecasts_that_were_wrong_before_rule_out_less() -> None:
    # Half too high, as the first measurement shows: so nothing that fits is ruled out.
    measurer = ScriptedMeasurer(forecast_factor=1.5)
    search = make_search(measurer, BUDGET_BYTES, trials=30, sampler=RANDOM)

    search.run()

    assert any(
        1.5 * measurer.peak_bytes(c.policy) > 1.01 * BUDGET_BYTES and c.fits(BUDGET_BYTES)
        for c in search.trial_candidates()
    )
    for candidate in search.store.candidates():
        if candidate.is_ruled_out:
            assert measurer.peak_bytes(candidate.policy) > BUDGET_BYTES


def test_a_search_in_which_all_is_ruled_out_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_PATIENCE_WITH_RULED_OUT", 7)
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    # Under full checkpointing, over the floor.
    search = make_search(measurer, 70 * MIB, trials=1000, sampler=RANDOM)

    assert search.run() == "the last 7 proposals were over by forecast"
    assert search.trial_candidates() == []
    assert len(measurer.order) == len(BASELINE_NAMES)
    assert rank(search.store.candidates(), 70 * MIB) == []


def test_only_proposals_in_a_row_count_as_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[str, int]:
        measurer = ScriptedMeasurer(forecast_factor=1.0)
        search = make_search(measurer, BUDGET_BYTES, trials=6, sampler=RANDOM)
        return search.run(), sum(c.is_ruled_out for c in search.store.candidates())

    reason, in_total = run()
    assert in_total > 1
    monkeypatch.setattr(search_module, "_PATIENCE_WITH_RULED_OUT", in_total)

    assert run() == (reason, in_total) == ("6 trials measured (--trials 6)", in_total)


def test_a_space_is_searched_to_its_end_by_measuring_and_ruling_out() -> None:
    layers = make_layers(2, [make_op("aten.mm.default", milliseconds=5, mib=20)])
    measurer = ScriptedMeasurer(layers=layers, forecast_factor=1.0)
    search = make_search(measurer, 75 * MIB, trials=1000, sampler=RANDOM)

    assert search.run() == "all 5 policies of the search space tried"
    assert any(c.is_ruled_out for c in search.store.candidates())


def test_what_was_ruled_out_stays_so_when_continued() -> None:
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    store = memory_store(measurer, BUDGET_BYTES)
    make_search(measurer, BUDGET_BYTES, store=store, trials=3, sampler=RANDOM).run()
    before = [c for c in store.candidates() if c.is_ruled_out]

    search = make_search(measurer, BUDGET_BYTES, store=store, trials=6, sampler=RANDOM)

    assert search.run() == "6 trials measured (--trials 6)"
    after = {c.policy.key for c in store.candidates() if c.is_ruled_out}
    assert before and {c.policy.key for c in before} <= after
    assert set(measurer.measured.values()) == {1}
