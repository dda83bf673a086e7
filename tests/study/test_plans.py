"""Plans seed the search and forecasts screen it; neither wins over a measurement."""

from __future__ import annotations

import itertools

import optuna
import pytest
from scripted import (
    MIB,
    SITE_OPS,
    ScriptedMeasurer,
    make_layers,
    make_op,
    make_search,
    memory_store,
)

from sac_search.policy import Policy
from sac_search.records import FailureKind
from sac_search.space import Granularity, LayerChoiceMode, SearchSpace
from sac_search.study import search as search_module
from sac_search.study.baselines import BASELINE_NAMES, FULL, NONE, RECOMPUTE_ALL
from sac_search.study.candidate import rank
from sac_search.study.goal import BUDGET_CONSTRAINT
from sac_search.study.sampler import SamplerName
from sac_search.study.search import Search

BUDGET_BYTES = 120 * MIB
RANDOM = SamplerName.RANDOM
TWO_KINDS = make_layers(4, SITE_OPS) + make_layers(3, kind="Mixer", prefix="m")


def plan_names(search: Search) -> list[str]:
    return [c.name for c in search.store.candidates() if c.name.startswith("plan")]


def site_search(measurer: ScriptedMeasurer, budget_bytes: int, **settings: object) -> Search:
    return make_search(
        measurer, budget_bytes, **{"granularity": Granularity.SITE, "tiers": 2, **settings}
    )


def site_measurer(**changes: object) -> ScriptedMeasurer:
    return ScriptedMeasurer(
        **{"layers": make_layers(6, SITE_OPS), "forecast_factor": 1.0} | changes
    )


def fastest(space: SearchSpace, measurer: ScriptedMeasurer, budget_bytes: int) -> float:
    """Returns the least step time of all one-tier policies under the budget, by counting."""
    (kind,) = space.kinds
    labels = [save.label for save in space.saves]
    names = space.kinds[kind]
    seconds = []
    for size in range(len(labels) + 1):
        for saved in itertools.combinations(labels, size):
            for count in range(len(names) + 1):
                policy = space.policy_of(dict.fromkeys(names[:count], frozenset(saved)))
                if measurer.peak_bytes(policy) <= budget_bytes:
                    seconds.append(measurer.step_seconds(policy))
    return min(seconds)


# --- plans ----------------------------------------------------------------------------------------


def test_plans_are_measured_before_the_ladder() -> None:
    measurer = site_measurer()
    search = site_search(measurer, BUDGET_BYTES, trials=3)

    search.run()

    name_of = {c.policy.key: c.name for c in search.store.candidates()}
    names = [name_of[policy.key] for policy in measurer.order]
    plans = plan_names(search)
    assert plans[0] == "plan at 100%"
    # What a policy function costs has to be known before.
    assert names[: 3 + len(plans)] == [FULL, NONE, RECOMPUTE_ALL, *plans]
    # They count as trials, for they were measured and are no baselines.
    assert [c.name for c in search.trial_candidates()][: len(plans)] == plans
    # All are trials of the study, with every variable and the policy in its attributes.
    for trial in search.store.study.get_trials():
        assert trial.params.keys() == {d.name for d in search.space.decisions}
        assert trial.user_attrs["policy"]["layers"] or trial.user_attrs.get("baseline") == NONE


def test_the_best_layer_subset_is_measured_whatever_the_prices_say() -> None:
    measurer = site_measurer()
    search = site_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    names = [layer.name for layer in measurer.layers]
    subsets = [search.space.policy_of(dict.fromkeys(names[:n], frozenset())) for n in range(7)]
    fewest = next(p for p in subsets if measurer.peak_bytes(p) <= BUDGET_BYTES)
    (subset,) = (c for c in search.store.candidates() if c.name == "layer subset")
    assert subset.policy.key == fewest.key
    assert subset in search.trial_candidates()


def test_the_first_plan_is_the_optimum_where_costs_are_known() -> None:
    measurer = site_measurer()
    search = site_search(measurer, BUDGET_BYTES, trials=0)

    search.run()

    plan = next(c for c in search.store.candidates() if c.name == "plan at 100%")
    optimum = fastest(search.space, measurer, BUDGET_BYTES)
    # Two tiers may beat the best of one.
    assert plan.fits(BUDGET_BYTES)
    assert measurer.step_seconds(plan.policy) <= optimum * 1.0001


def test_no_measured_policy_is_faster_than_the_bound() -> None:
    measurer = site_measurer()
    search = site_search(measurer, BUDGET_BYTES, trials=12)

    search.run()

    bound = search.store.bound_overhead_seconds
    assert bound is not None
    none = measurer.step_seconds(Policy())
    best = rank(search.store.candidates(), BUDGET_BYTES)[0]
    assert best.step_seconds is not None
    overhead = best.step_seconds - none
    assert bound <= overhead * 1.02
    assert overhead - bound <= 0.03 * none


@pytest.mark.parametrize("sampler", [SamplerName.GP, SamplerName.TPE, SamplerName.RANDOM])
def test_other_samplers_know_no_plans(sampler: SamplerName) -> None:
    search = site_search(site_measurer(), BUDGET_BYTES, trials=2, sampler=sampler)

    search.run()

    assert plan_names(search) == []


def test_without_forecasts_the_search_goes_on_by_measuring() -> None:
    measurer = site_measurer(forecast_factor=None)
    search = site_search(measurer, BUDGET_BYTES, trials=4)

    assert search.run() == "4 trials measured (--trials 4)"
    assert plan_names(search) == []
    assert len(measurer.profiled) == 1
    assert search.store.bound_overhead_seconds is None


def test_a_continued_search_does_not_plan_again() -> None:
    measurer = site_measurer()
    store = memory_store(measurer, BUDGET_BYTES)
    for trials in (5, 8):
        search = site_search(measurer, BUDGET_BYTES, store=store, trials=trials)
        search.run()

    assert len(plan_names(search)) <= 5
    assert set(measurer.measured.values()) == {1}


def test_an_interrupted_search_measures_the_plans_that_are_left() -> None:
    measurer = site_measurer(interrupt_at=5)
    store = memory_store(measurer, BUDGET_BYTES)
    with pytest.raises(KeyboardInterrupt):
        site_search(measurer, BUDGET_BYTES, store=store).run()
    assert not store.has_plans

    measurer.interrupt_at = None
    search = site_search(measurer, BUDGET_BYTES, store=store, trials=8)
    search.run()

    assert store.has_plans
    assert "plan at 100%" in plan_names(search)
    assert len(plan_names(search)) > 1


def test_a_search_ends_when_nothing_that_could_be_faster_is_left() -> None:
    measurer = site_measurer(layers=make_layers(2, SITE_OPS))
    store = memory_store(measurer, 80 * MIB)
    search = site_search(measurer, 80 * MIB, store=store, trials=200)

    reason = search.run()

    assert reason == "nothing that could be faster is left to measure"
    best = rank(store.candidates(), 80 * MIB)[0]
    optimum = fastest(search.space, measurer, 80 * MIB)
    assert measurer.step_seconds(best.policy) <= optimum * 1.0001
    measured = measurer.measured.total()
    assert site_search(measurer, 80 * MIB, store=store, trials=200).run() == reason
    assert measurer.measured.total() == measured


def test_without_forecasts_another_sampler_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[SamplerName] = []

    def make(name: SamplerName, *arguments: object, **keywords: object) -> object:
        names.append(name)
        return optuna.samplers.RandomSampler(seed=0)

    monkeypatch.setattr(search_module, "make_sampler", make)
    site_search(site_measurer(forecast_factor=None), BUDGET_BYTES, trials=2).run()

    assert names[-1] is SamplerName.GP


def test_one_tier_is_enough_where_one_is_asked_for() -> None:
    search = site_search(site_measurer(), BUDGET_BYTES, trials=8, tiers=1)

    search.run()

    assert all(len(c.policy.tiers) <= 1 for c in search.trial_candidates())


def test_each_kind_of_layers_has_its_own_tiers() -> None:
    measurer = site_measurer(layers=TWO_KINDS)
    search = site_search(measurer, 110 * MIB, trials=10)

    search.run()

    best = rank(search.store.candidates(), 110 * MIB)[0]
    others = [c for c in search.store.candidates() if c.is_baseline and c.fits(110 * MIB)]
    assert all(best.step_seconds <= other.step_seconds for other in others)
    assert {d.name for d in search.space.decisions} >= {
        "layers.Block",
        "tier2.layers.Mixer",
        "save.attention@Block",
        "tier2.save.attention@Mixer",
        "save.matmul[512x512]",
    }


@pytest.mark.parametrize("mode", LayerChoiceMode)
@pytest.mark.parametrize("granularity", Granularity)
def test_the_planner_works_in_every_kind_of_space(
    mode: LayerChoiceMode, granularity: Granularity
) -> None:
    search = site_search(
        site_measurer(), BUDGET_BYTES, trials=7, mode=mode, granularity=granularity
    )

    search.run()

    assert plan_names(search)
    assert search.trial_candidates()[0].fits(BUDGET_BYTES)


def test_wrong_prices_are_learnt() -> None:
    # The profile holds the dearest op for cheap and the cheapest for dear.
    factors = {"matmul[512x2048]": 0.2, "normalization[512]": 8.0, "elementwise[512]": 6.0}
    measurer = site_measurer(price_factor=lambda label: factors.get(label, 1.0))
    search = site_search(measurer, BUDGET_BYTES, trials=25)

    search.run()

    optimum = fastest(search.space, measurer, BUDGET_BYTES)
    best = rank(search.store.candidates(), BUDGET_BYTES)[0]
    assert measurer.step_seconds(best.policy) <= 1.01 * optimum
    assert len(search.trial_candidates()) <= 25


def test_the_planner_needs_fewer_trials_than_chance_and_than_a_gaussian_process() -> None:
    def reached(sampler: SamplerName, seed: int) -> float:
        measurer = site_measurer(noise_fraction=0.003, seed=seed)
        search = site_search(measurer, 110 * MIB, trials=8, sampler=sampler, seed=seed)
        search.run()
        best = rank(search.trial_candidates(), 110 * MIB)
        return measurer.step_seconds(best[0].policy) if best else float("inf")

    optimum = fastest(site_search(site_measurer(), 110 * MIB).space, site_measurer(), 110 * MIB)
    ours = [reached(SamplerName.PLANNER, seed) / optimum - 1 for seed in range(4)]
    chance = [reached(RANDOM, seed) / optimum - 1 for seed in range(6)]
    assert max(ours) < 0.01, ours
    assert min(chance) > 0.01, chance


def test_a_plan_may_be_the_first_step_that_runs() -> None:
    # What does not save anything fails, so the first plan's reference steps are the anchor.
    measurer = site_measurer(
        fail=lambda policy: (
            FailureKind.TIMEOUT if all(tier.saves_nothing for tier in policy.tiers) else None
        ),
    )
    search = site_search(measurer, BUDGET_BYTES, trials=3)

    search.run()

    plan = next(c for c in search.trial_candidates() if c.name == "plan at 100%")
    assert search.store.anchor_seconds == pytest.approx(measurer.step_seconds(measurer.full))
    assert plan.step_seconds == pytest.approx(measurer.step_seconds(plan.policy))


def test_a_device_that_reserves_more_than_it_allocates() -> None:
    measurer = site_measurer(forecast_factor=0.9)  # a ninth more is reserved
    search = site_search(measurer, BUDGET_BYTES, trials=8)

    search.run()

    plan = next(c for c in search.trial_candidates() if c.name == "plan at 100%")
    assert plan.measurement is not None
    assert 0.93 * BUDGET_BYTES < plan.measurement.peak_bytes <= 1.001 * BUDGET_BYTES


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
    search = make_search(measurer, BUDGET_BYTES, trials=0, sampler=RANDOM)

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
        assert trial.constraints[BUDGET_CONSTRAINT] == pytest.approx(excess_bytes / 2**30)
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
