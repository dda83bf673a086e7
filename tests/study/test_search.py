"""The search over a study in memory, with a measurer that follows a script."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from scripted import (
    BLOCK_OPS,
    CONVOLUTION_OPS,
    MIB,
    ScriptedMeasurer,
    make_layers,
    make_op,
    make_search,
    memory_store,
    saving_class,
)

from sac_search.opclasses import OpClass
from sac_search.policy import Policy, checkpoint_layers
from sac_search.records import FailureKind, Outcome
from sac_search.space import LayerChoiceMode, build_space
from sac_search.study import neighbours
from sac_search.study import search as search_module
from sac_search.study.baselines import BASELINE_NAMES, EVERY_SECOND, FULL, NONE, TORCHTITAN
from sac_search.study.candidate import rank
from sac_search.study.goal import BUDGET_CONSTRAINT
from sac_search.study.sampler import SamplerName
from sac_search.study.search import Search

BUDGET_BYTES = 120 * MIB  # between full checkpointing (74 MiB) and none (173 MiB)
RANDOM = SamplerName.RANDOM
# One savable class and one layer: four assignments, three policies (no layer saves nothing).
SMALLEST = make_layers(1, [make_op("aten.mm.default", milliseconds=5, mib=5)])
# The same with two layers: nothing, one or two layers, each with matmul saved or not.
SMALL = make_layers(2, [make_op("aten.mm.default", milliseconds=5, mib=5)])


def trials_of(search: Search) -> list[optuna.trial.FrozenTrial]:
    return search.store.study.get_trials()


class Stubborn(optuna.samplers.RandomSampler):
    """Always proposes the same."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if isinstance(distribution, optuna.distributions.IntDistribution):
            return distribution.high
        return False


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "make_sampler", lambda *args, **kwargs: Stubborn())


def mixed_faults(policy: Policy) -> FailureKind | None:
    if saving_class(policy, OpClass.NORMALIZATION):
        return FailureKind.MUTATED_SAVED_TENSOR
    if saving_class(policy, OpClass.ACTIVATION):
        return FailureKind.TIMEOUT
    if len(policy.layers) == 3:
        return FailureKind.CRASH
    return None


# --- what is measured -----------------------------------------------------------------------------


def test_full_and_no_checkpointing_come_first_and_then_the_ladder() -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, trials=0)

    first = search.measure_first()

    assert [p.key for p in measurer.order] == [measurer.full.key, Policy().key]
    assert set(first) == {NONE, FULL}
    assert first[NONE].policy == Policy()
    assert search.run() == "0 trials measured (--trials 0)"
    assert {c.name for c in search.store.candidates()} == set(BASELINE_NAMES)
    assert set(measurer.measured.values()) == {1}
    assert len(measurer.order) == len(BASELINE_NAMES)


def test_a_workload_without_layers_has_one_policy() -> None:
    search = make_search(ScriptedMeasurer(layers=()), BUDGET_BYTES, trials=5)

    assert list(search.measure_first()) == [NONE]


@pytest.mark.parametrize("sampler", SamplerName)
def test_every_sampler_searches(sampler: SamplerName) -> None:
    measurer = ScriptedMeasurer(noise_fraction=0.002)
    search = make_search(measurer, BUDGET_BYTES, trials=6, sampler=sampler)

    reason = search.run()

    assert reason == "6 trials measured (--trials 6)"
    assert len(search.trial_candidates()) == 6
    assert len(measurer.order) == len(BASELINE_NAMES) + 6
    assert set(measurer.measured.values()) == {1}


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_no_policy_is_measured_twice_and_only_measured_ones_count(mode: LayerChoiceMode) -> None:
    # 28 policies, of which 20 are asked for: random draws hit known ones again and again.
    layers = make_layers(3, BLOCK_OPS[1:4])
    measurer = ScriptedMeasurer(layers=layers)
    search = make_search(measurer, BUDGET_BYTES, trials=4, sampler=RANDOM, mode=mode)

    reason = search.run()

    assert reason == "4 trials measured (--trials 4)"
    assert set(measurer.measured.values()) == {1}
    repeats = [t for t in trials_of(search) if "same_as" in t.user_attrs]
    in_space = [t for t in trials_of(search) if "outcome" in t.user_attrs]
    assert len(in_space) + len(repeats) == len(trials_of(search))
    assert len(search.trial_candidates()) == 4


def test_a_repeated_proposal_is_told_what_is_known(stubborn: None) -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, trials=2)
    search.run()

    by_number = {t.number: t for t in trials_of(search)}
    repeats = [t for t in by_number.values() if "same_as" in t.user_attrs]
    full = next(t for t in by_number.values() if t.user_attrs.get("baseline") == FULL)

    assert repeats
    for trial in repeats:
        assert trial.user_attrs["same_as"] == FULL
        assert "outcome" not in trial.user_attrs
        assert (trial.value, trial.constraints) == (full.value, full.constraints)


def test_the_listener_hears_every_new_candidate_and_the_count_of_trials() -> None:
    heard: list[tuple[str, int]] = []
    search = make_search(ScriptedMeasurer(), BUDGET_BYTES, trials=3, sampler=RANDOM)
    search.on_candidate = lambda candidate, done: heard.append((candidate.name, done))

    search.run()

    assert sorted(name for name, _ in heard[:-3]) == sorted(BASELINE_NAMES)
    assert [done for _, done in heard] == [0] * len(BASELINE_NAMES) + [1, 2, 3]


def test_drift_of_the_machine_does_not_reach_the_figures() -> None:
    search = make_search(ScriptedMeasurer(drift=0.05), BUDGET_BYTES, trials=4, sampler=RANDOM)
    steady = ScriptedMeasurer()

    search.run()

    anchor = search.store.anchor_seconds
    assert anchor == pytest.approx(steady.step_seconds(steady.full) * 1.05)
    for candidate in search.store.candidates():
        expected = steady.step_seconds(candidate.policy) * 1.05
        assert candidate.step_seconds == pytest.approx(expected)


# --- what is told ---------------------------------------------------------------------------------


def test_every_completed_trial_has_its_constraint_for_optuna_and_for_the_dashboard() -> None:
    measurer = ScriptedMeasurer(device_bytes=150 * MIB, fail=mixed_faults)
    search = make_search(measurer, BUDGET_BYTES, trials=12, sampler=RANDOM)

    search.run()

    trials = trials_of(search)
    assert {t.state for t in trials} == {TrialState.COMPLETE}
    kinds = {c.failure.kind for c in search.store.candidates() if c.failure}
    assert kinds >= {
        FailureKind.OUT_OF_MEMORY,
        FailureKind.MUTATED_SAVED_TENSOR,
        FailureKind.TIMEOUT,
    }
    known = {c.name: c for c in search.store.candidates()}
    for trial in trials:
        name = trial.user_attrs.get("same_as") or trial.user_attrs.get("baseline")
        candidate = known[name or f"trial {trial.number}"]
        value = trial.constraints[BUDGET_CONSTRAINT]
        assert trial.system_attrs["constraints"] == [value]
        assert (value <= 0) == candidate.fits(BUDGET_BYTES)
        if candidate.measurement is not None:
            excess_bytes = candidate.measurement.peak_bytes - BUDGET_BYTES
            assert value == pytest.approx(excess_bytes / 2**30)
            assert trial.value == pytest.approx(candidate.step_seconds)


def test_the_best_trial_of_optuna_is_the_fastest_that_fits() -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, trials=6, sampler=RANDOM)

    search.run()

    fitting = [
        c.step_seconds
        for c in search.store.candidates()
        if c.fits(BUDGET_BYTES) and c.name not in (EVERY_SECOND, TORCHTITAN)  # no trials
    ]
    assert search.store.study.best_value == pytest.approx(min(fitting))


def test_out_of_memory_is_told_as_infeasible_and_slower_than_anything_that_ran() -> None:
    measurer = ScriptedMeasurer(device_bytes=150 * MIB)
    search = make_search(measurer, BUDGET_BYTES, trials=3, sampler=RANDOM)

    search.run()

    # No checkpointing is the fastest when there is memory for it; its failure must not look fast.
    failed = [t for t in trials_of(search) if t.user_attrs["outcome_text"].startswith("out of mem")]
    ran = [t for t in trials_of(search) if t not in failed]
    assert NONE in [t.user_attrs.get("baseline") for t in failed]
    reference = measurer.step_seconds(measurer.full)
    for trial in failed:
        assert trial.value == pytest.approx(2 * reference)
        assert trial.value > max(t.value for t in ran)
        assert trial.constraints[BUDGET_CONSTRAINT] > max(
            t.constraints[BUDGET_CONSTRAINT] for t in ran
        )


@pytest.mark.parametrize("sampler", SamplerName)
def test_a_search_in_which_everything_fails_ends(sampler: SamplerName) -> None:
    measurer = ScriptedMeasurer(fail=lambda policy: FailureKind.OUT_OF_MEMORY)
    search = make_search(measurer, BUDGET_BYTES, trials=6, sampler=sampler)

    assert search.run() == "6 trials measured (--trials 6)"
    assert {t.state for t in trials_of(search)} == {TrialState.COMPLETE}
    assert all(t.constraints[BUDGET_CONSTRAINT] > 0 for t in trials_of(search))
    assert rank(search.store.candidates(), BUDGET_BYTES) == []


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_every_trial_has_every_variable(mode: LayerChoiceMode) -> None:
    search = make_search(ScriptedMeasurer(), BUDGET_BYTES, trials=4, sampler=RANDOM, mode=mode)

    search.run()

    wanted = {d.name: d.highest for d in search.space.decisions}
    for trial in trials_of(search):
        assert trial.params.keys() == wanted.keys()
        for name, distribution in trial.distributions.items():
            if name.startswith("layers."):
                assert distribution == optuna.distributions.IntDistribution(0, wanted[name])
            else:
                expected = optuna.distributions.CategoricalDistribution([False, True])
                assert distribution == expected


def test_attributes_of_a_trial_can_be_read_by_people() -> None:
    search = make_search(ScriptedMeasurer(), BUDGET_BYTES, trials=0)

    search.run()

    attributes = {t.user_attrs["baseline"]: t.user_attrs for t in trials_of(search)}
    assert attributes[FULL]["policy_text"] == "6 layers: recompute all"
    assert attributes[FULL]["outcome_text"] == "fits"
    assert attributes[FULL]["peak_phase"] == "backward"
    assert attributes[NONE]["policy_text"] == "no checkpointing"
    assert attributes[NONE]["outcome_text"] == "over the budget"
    assert attributes[NONE]["peak_gib"] == pytest.approx(173.2 / 1024, abs=1e-4)
    assert attributes["save matmul"]["overhead_percent"] == pytest.approx(17.97, abs=0.01)


def test_an_unexpected_error_ends_the_search() -> None:
    def raise_error(policy: Policy) -> FailureKind | None:
        if saving_class(policy, OpClass.MATMUL):
            raise ValueError("not the policy's fault")
        return None

    search = make_search(ScriptedMeasurer(fail=raise_error), BUDGET_BYTES, trials=3)

    with pytest.raises(ValueError, match="not the policy's fault"):
        search.run()


# --- why it stops ---------------------------------------------------------------------------------


def test_it_stops_when_its_time_is_over_and_begins_no_further_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measurer = ScriptedMeasurer()
    # A clock on which a measurement takes a second and all else no time.
    clock = SimpleNamespace(monotonic=lambda: float(measurer.measured.total()))
    monkeypatch.setattr(search_module, "time", clock)
    search = make_search(measurer, BUDGET_BYTES, trials=1000, sampler=RANDOM, timeout_seconds=11.5)

    assert search.run() == "--timeout 11.5 s is over"
    assert len(measurer.order) == 12


def test_it_stops_among_the_baselines_when_its_time_is_over() -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, timeout_seconds=1e-9)
    search.measure_first()

    assert search.run() == "--timeout 1e-09 s is over"
    assert len(measurer.order) == 2


def test_it_stops_when_every_policy_is_measured() -> None:
    measurer = ScriptedMeasurer(layers=SMALLEST)
    search = make_search(measurer, BUDGET_BYTES, sampler=RANDOM)

    assert search.space.size == 4
    # None, full and save matmul are the whole space; two more baselines lie outside it.
    assert search.run() == "all 3 policies of the search space tried"
    assert search.trial_candidates() == []


def test_policies_outside_the_space_do_not_count_as_its_policies() -> None:
    measurer = ScriptedMeasurer(layers=SMALL)
    search = make_search(measurer, BUDGET_BYTES, sampler=RANDOM)

    reason = search.run()

    # Two baselines are no points of the space; all five policies that are get measured.
    assert reason == "all 5 policies of the search space tried"
    keys = {search.space.policy_for(a).key for a in search.space.assignments()}
    assert len(keys) == 5
    assert keys <= measurer.measured.keys()
    assert len(measurer.order) == 7


def test_it_stops_when_the_last_trials_brought_nothing() -> None:
    search = make_search(ScriptedMeasurer(), 76 * MIB, trials=60, sampler=RANDOM)

    assert search.run() == "no gain beyond the noise in the last 10 trials"
    assert 15 <= len(search.trial_candidates()) < 60


def test_a_stubborn_sampler_is_led_to_neighbours_of_the_best(stubborn: None) -> None:
    measurer = ScriptedMeasurer()
    search = make_search(measurer, BUDGET_BYTES, trials=5)

    assert search.run() == "5 trials measured (--trials 5)"
    assert set(measurer.measured.values()) == {1}
    # Three repeats, then a neighbour, five times over.
    assert [t.user_attrs.get("same_as") for t in trials_of(search)[-20:]] == 5 * [
        *[FULL] * 3,
        None,
    ]


def test_neighbours_lie_near_the_best(stubborn: None) -> None:
    search = make_search(ScriptedMeasurer(), BUDGET_BYTES, trials=6)
    search.run()

    names = [d.name for d in search.space.decisions]
    best = rank(search.store.candidates(), BUDGET_BYTES)
    for trial in (t for t in trials_of(search) if t.number >= len(BASELINE_NAMES)):
        if "same_as" in trial.user_attrs:
            continue
        starts = [search._asked.get(c.policy.key) for c in best]
        changes = [sum(int(trial.params[n]) != s[n] for n in names) for s in starts if s]
        # Itself is among `best` when it fits; another lies one decision away.
        assert sorted(changes)[:2] in ([0, 1], [1, 1], [1, 2])


def test_a_stubborn_sampler_ends_when_there_is_nothing_else(stubborn: None) -> None:
    measurer = ScriptedMeasurer(layers=SMALL)
    search = make_search(measurer, BUDGET_BYTES)

    assert search.run() == "all 5 policies of the search space tried"


def test_in_a_space_too_large_to_list_it_ends_when_no_neighbour_is_new(
    stubborn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "_LISTABLE_SIZE", 0)
    measurer = ScriptedMeasurer(layers=SMALL)
    search = make_search(measurer, BUDGET_BYTES)

    assert search.run() == "every policy near the best has been measured"
    assert len(measurer.order) == 7


def test_a_space_that_can_be_listed_is_searched_to_its_last_policy(
    stubborn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_ATTEMPTS", 0)
    measurer = ScriptedMeasurer(layers=SMALL)
    search = make_search(measurer, BUDGET_BYTES)

    assert search.run() == "all 5 policies of the search space tried"
    assert len(measurer.order) == 7


# --- how good it is -------------------------------------------------------------------------------

MIXER_OPS = (
    make_op("aten.convolution.default", milliseconds=5, mib=5),
    make_op("aten.relu.default", milliseconds=0.8, mib=5),
    make_op("aten.mm.default", milliseconds=2, mib=6),
)


def regrets(
    sampler: SamplerName, seeds: range, make: Callable[..., ScriptedMeasurer]
) -> list[float]:
    """Returns how far the best of each run is above the true optimum, as a fraction of it."""
    found = []
    for seed in seeds:
        measurer = make(seed=seed)
        budget_bytes = 110 * MIB
        search = make_search(measurer, budget_bytes, trials=8, sampler=sampler, seed=seed)
        policies = [search.space.policy_for(a) for a in search.space.assignments()]
        optimum = min(
            measurer.step_seconds(p) for p in policies if measurer.peak_bytes(p) <= budget_bytes
        )
        search.run()
        best = rank(search.trial_candidates(), budget_bytes)
        reached = measurer.step_seconds(best[0].policy) if best else float("inf")
        found.append(reached / optimum - 1)
    return found


def test_the_gaussian_process_comes_nearer_to_the_optimum_than_chance() -> None:
    layers = make_layers(4) + make_layers(3, MIXER_OPS, kind="Mixer", prefix="m")

    def make(seed: int) -> ScriptedMeasurer:
        return ScriptedMeasurer(layers=layers, noise_fraction=0.002, seed=seed)

    chance = regrets(RANDOM, range(8), make)
    process = regrets(SamplerName.GP, range(2), make)

    assert max(process) < 0.05, process
    assert statistics.median(process) < statistics.median(chance), (process, chance)
    assert sum(regret < 0.05 for regret in chance) <= len(chance) // 2, chance


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5, 9, 12])
def test_only_the_interrupted_trial_fails_and_the_rest_goes_on(at: int) -> None:
    measurer = ScriptedMeasurer(interrupt_at=at)
    store = memory_store(measurer, BUDGET_BYTES)
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=6, sampler=RANDOM)

    with pytest.raises(KeyboardInterrupt):
        search.run()
    states = [t.state for t in trials_of(search)]
    assert states.count(TrialState.FAIL) <= 1
    assert len(store.candidates()) == at - 1

    measurer.interrupt_at = None
    interrupted = measurer.order[-1].key
    again = make_search(measurer, BUDGET_BYTES, store=store, trials=6, sampler=RANDOM)
    assert again.run() == "6 trials measured (--trials 6)"
    measured_twice = {key for key, count in measurer.measured.items() if count > 1}
    assert measured_twice <= {interrupted}
    assert len(again.trial_candidates()) == 6
    assert {c.name for c in store.candidates() if c.is_baseline} == set(BASELINE_NAMES)


def test_a_trial_that_was_killed_after_its_measurement_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)

    def die(*arguments: object) -> None:
        raise SystemExit  # Optuna lets it pass, so the trial stays as a killed process leaves it

    make_search(measurer, BUDGET_BYTES, store=store, trials=2, sampler=RANDOM).run()
    monkeypatch.setattr(Search, "_told", die)
    killed = make_search(measurer, BUDGET_BYTES, store=store, trials=3, sampler=RANDOM)
    with pytest.raises(SystemExit):
        killed.run()
    monkeypatch.undo()
    assert trials_of(killed)[-1].state is TrialState.RUNNING
    assert len(store.candidates()) == len(BASELINE_NAMES) + 3

    for number in store.running_trials():
        store.give_up_trial(number)
    again = make_search(measurer, BUDGET_BYTES, store=store, trials=3, sampler=RANDOM)

    assert again.run() == "3 trials measured (--trials 3)"
    assert set(measurer.measured.values()) == {1}
    # What a killed run left running would count as a pending trial with the sampler for ever.
    assert store.study.get_trials(states=(TrialState.RUNNING,)) == []


def test_a_trial_that_was_killed_while_measuring_is_measured_again() -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=0)
    search.measure_first()
    names = list(search.store.study.get_trials()[0].params)
    # Asked for and never told.
    store.study.enqueue_trial(dict.fromkeys(names, False) | {"layers.Block": 5})
    trial = store.study.ask()
    assert trial.number == 2

    for number in store.running_trials():
        store.give_up_trial(number)
    again = make_search(measurer, BUDGET_BYTES, store=store, trials=1, sampler=RANDOM)
    again.run()

    assert store.study.get_trials()[2].state is TrialState.FAIL
    assert checkpoint_layers(f"h.{i}" for i in range(5)).key not in {
        c.policy.key for c in store.candidates() if c.name == "trial 2"
    }


def test_a_baseline_that_waits_in_the_queue_is_not_queued_again() -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)
    space = build_space(measurer.layers)
    full = dict.fromkeys((s.name for s in space.saves), False) | {"layers.Block": 6}
    store.study.enqueue_trial(full, user_attrs={"baseline": FULL})

    search = make_search(measurer, BUDGET_BYTES, store=store, trials=0)
    search.measure_first()
    search.run()

    assert [t.user_attrs["baseline"] for t in trials_of(search)].count(FULL) == 1
    assert not any("same_as" in t.user_attrs for t in trials_of(search))


def test_a_proposal_left_in_the_queue_is_measured_and_the_baselines_still_are() -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)
    space = build_space(measurer.layers)
    store.study.enqueue_trial(
        dict.fromkeys((s.name for s in space.saves), False) | {"layers.Block": 5}
    )

    search = make_search(measurer, BUDGET_BYTES, store=store, trials=1)

    assert set(search.measure_first()) == {NONE, FULL}
    assert search.run() == "1 trials measured (--trials 1)"
    assert {c.name for c in store.candidates() if c.is_baseline} == set(BASELINE_NAMES)
    assert [c.policy.layer_names[-1] for c in search.trial_candidates()] == ["h.4"]


def test_a_continued_search_does_not_replay_its_first_draws() -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)
    drawn = []
    for trials in (3, 6):
        before = len(store.study.get_trials())
        make_search(
            measurer, BUDGET_BYTES, store=store, trials=trials, sampler=RANDOM, seed=7
        ).run()
        new = store.study.get_trials()[before:]
        drawn.append([t.params for t in new if "baseline" not in t.user_attrs])

    assert len(drawn[0]) >= 3
    assert drawn[1][:3] != drawn[0][:3]


def test_a_trial_that_others_gave_up_at_its_very_end_keeps_its_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, BUDGET_BYTES)
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=4, sampler=RANDOM)
    original = Search._write

    def write(self: Search, trial: optuna.Trial, *arguments: Any, **keywords: Any) -> Any:
        told = original(self, trial, *arguments, **keywords)
        if measurer.measured.total() == len(BASELINE_NAMES) + 2:
            store.give_up_trial(trial.number)
        return told

    monkeypatch.setattr(Search, "_write", write)

    assert search.run() == "4 trials measured (--trials 4)"
    assert set(measurer.measured.values()) == {1}
    assert {c.policy.key for c in store.candidates()} == set(measurer.measured)


def test_convolution_networks_are_searched_as_well() -> None:
    measurer = ScriptedMeasurer(layers=make_layers(5, CONVOLUTION_OPS, kind="Stage"))
    search = make_search(measurer, 90 * MIB, trials=40, sampler=RANDOM)

    # Two classes (batch norm cannot be saved) and five counts: 2 * 2 * 5 and none.
    assert search.run() in (
        "all 21 policies of the search space tried",
        "no gain beyond the noise in the last 10 trials",
    )
    assert rank(search.store.candidates(), 90 * MIB)


@pytest.mark.parametrize("at", [1, 4, len(BASELINE_NAMES) + 2])
def test_a_trial_that_others_gave_up_meanwhile_is_written_anew(at: int) -> None:
    class Asleep(ScriptedMeasurer):
        def measure(self, policy: Policy) -> Outcome:
            outcome = super().measure(policy)
            if self.measured.total() == at:
                for number in store.running_trials():  # what another search does after a while
                    store.give_up_trial(number)
            return outcome

    measurer = Asleep()
    store = memory_store(measurer, BUDGET_BYTES)
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=4, sampler=RANDOM)

    assert search.run() == "4 trials measured (--trials 4)"
    assert set(measurer.measured.values()) == {1}
    assert {c.policy.key for c in store.candidates()} == set(measurer.measured)
    assert {c.name for c in store.candidates() if c.is_baseline} == set(BASELINE_NAMES)
    complete = store.study.get_trials(states=(TrialState.COMPLETE,))
    assert all(BUDGET_CONSTRAINT in trial.constraints for trial in complete)
