"""From the best trials to a winner: measured side by side, then verified."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import MIB, ScriptedMeasurer, make_search, memory_store

from sac_search.policy import Policy
from sac_search.records import FailureKind
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, rank
from sac_search.study.finish import (
    CONFIRMING_STEPS,
    FINALISTS,
    Winner,
    choose_winner,
    confirm,
    known_candidates,
    stored_winner,
    with_confirmed_figures,
)
from sac_search.study.sampler import SamplerName
from sac_search.study.store import StudyStore, create_study, open_study
from sac_search.worker.session import Verdict

BUDGET_BYTES = 140 * MIB


def searched(
    measurer: ScriptedMeasurer, store: StudyStore | None = None, trials: int = 8
) -> StudyStore:
    """Returns a study with its trials, in memory, and forgets that they were measured."""
    search = make_search(
        measurer, BUDGET_BYTES, store=store, trials=trials, sampler=SamplerName.RANDOM
    )
    search.run()
    measurer.measured.clear()
    measurer.order.clear()
    return search.store


def ranked_keys(store: StudyStore) -> list[str]:
    return [c.policy.key for c in rank(store.candidates(), BUDGET_BYTES)]


def finish(store: StudyStore, measurer: ScriptedMeasurer) -> Winner:
    return choose_winner(store, measurer, confirm(store, measurer, store.candidates()))


# --- measured side by side ------------------------------------------------------------------------


def test_the_best_few_are_measured_side_by_side_with_none_and_full() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    expected = ranked_keys(store)
    assert len(expected) > FINALISTS and measurer.full.key not in expected[:FINALISTS]

    confirmed = confirm(store, measurer, store.candidates())

    ends = [Policy().key, measurer.full.key]
    assert len(measurer.compared) == 1
    steps, keys = measurer.compared[0]
    assert steps == CONFIRMING_STEPS
    assert keys[:FINALISTS] == expected[:FINALISTS]
    assert sorted(keys[FINALISTS:]) == sorted(ends)
    # The others follow, should none of the finalists pass.
    assert [c.policy.key for c in confirmed] == expected
    assert measurer.order == []


def test_the_newer_figures_decide() -> None:
    measurer = ScriptedMeasurer(noise_fraction=0.0)
    store = searched(measurer)
    first, second = ranked_keys(store)[:2]
    measurer.compared_seconds = lambda policy: 2.0 if policy.key == first else 1.0

    confirmed = confirm(store, measurer, store.candidates())

    names = [c.policy.key for c in confirmed]
    assert names[0] == second
    # The finalists stay in front of the others, since only their figures are sure.
    assert names[FINALISTS - 1] == first
    slow = confirmed[FINALISTS - 1]
    assert slow.step_seconds == pytest.approx(2 * measurer.step_seconds(slow.policy))


def test_inside_the_noise_the_lower_peak_wins() -> None:
    measurer = ScriptedMeasurer(noise_fraction=0.0)
    store = searched(measurer)
    ranked = rank(store.candidates(), BUDGET_BYTES)[:FINALISTS]
    lean = min(ranked, key=lambda c: measurer.peak_bytes(c.policy))
    assert lean.policy.key != ranked[0].policy.key
    # Side by side they turn out to be alike, but for a noise of half a percent.
    measurer.noise_fraction = 0.005
    measurer.compared_seconds = lambda policy: 0.2 / measurer.step_seconds(policy)

    confirmed = confirm(store, measurer, store.candidates())

    assert confirmed[0].policy.key == lean.policy.key


@pytest.mark.parametrize(
    ("noise_fraction", "expected"),
    # The script's trials have five steps each.
    [(0.0, 8), (0.01, 8), (0.02, 20), (0.5, 32)],
)
def test_noisy_steps_are_confirmed_by_more_of_them(noise_fraction: float, expected: int) -> None:
    measurer = ScriptedMeasurer(noise_fraction=noise_fraction)
    store = searched(measurer)
    confirm(store, measurer, store.candidates(), steps=8)
    assert measurer.compared[0][0] == expected


def test_a_finalist_that_is_over_the_budget_this_time_is_out() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first, second = ranked_keys(store)[:2]
    measurer.compared_bytes = lambda policy: 2.0 if policy.key == first else 1.0

    confirmed = confirm(store, measurer, store.candidates())

    keys = [c.policy.key for c in confirmed]
    assert keys[0] == second
    assert first not in keys


def test_a_finalist_that_fails_this_time_is_out() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first = ranked_keys(store)[0]
    measurer.fail = lambda policy: FailureKind.TIMEOUT if policy.key == first else None

    confirmed = confirm(store, measurer, store.candidates())

    assert first not in [c.policy.key for c in confirmed]


def test_a_moment_in_which_nothing_runs_leaves_the_figures_as_they_were() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    expected = ranked_keys(store)
    measurer.fail = lambda policy: FailureKind.OUT_OF_MEMORY

    confirmed = confirm(store, measurer, store.candidates())

    assert [c.policy.key for c in confirmed] == expected
    assert all(c.failure is None for c in known_candidates(store))
    # And the next search tries again.
    measurer.fail = lambda policy: None
    confirm(store, measurer, store.candidates())
    assert len(measurer.compared) == 2


def test_ends_that_fail_this_time_keep_their_figures_and_are_measured_again() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    measurer.fail = lambda policy: None if policy.layers else FailureKind.OUT_OF_MEMORY

    for times in (1, 2):
        confirm(store, measurer, store.candidates())
        assert len(measurer.compared) == times
        none = next(c for c in known_candidates(store) if c.name == NONE)
        assert none.measurement is not None


def test_the_same_finalists_are_not_measured_once_more() -> None:
    measurer = ScriptedMeasurer(noise_fraction=0.01)
    store = searched(measurer)
    first = confirm(store, measurer, store.candidates())

    again = confirm(store, measurer, store.candidates())

    assert again == first
    assert len(measurer.compared) == 1


def test_new_finalists_are_measured() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    candidates = store.candidates()
    best = rank(candidates, BUDGET_BYTES)[0]
    confirm(store, measurer, [c for c in candidates if c is not best])

    confirm(store, measurer, candidates)

    assert len(measurer.compared) == 2
    assert measurer.compared[0][1] != measurer.compared[1][1]


def test_nothing_that_fits_is_nothing_to_measure() -> None:
    measurer = ScriptedMeasurer()
    store = memory_store(measurer, 70 * MIB)
    make_search(measurer, 70 * MIB, store=store, trials=2, sampler=SamplerName.RANDOM).run()

    assert confirm(store, measurer, store.candidates()) == []
    assert measurer.compared == []
    assert store.confirmation is None


def test_no_checkpointing_out_of_memory_is_not_measured_again() -> None:
    measurer = ScriptedMeasurer(device_bytes=150 * MIB)
    store = searched(measurer)

    confirm(store, measurer, store.candidates())

    assert Policy().key not in measurer.compared[0][1]


def test_figures_are_those_of_the_side_by_side_measurement() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    assert with_confirmed_figures(store, store.candidates()) == store.candidates()
    measurer.compared_seconds = lambda policy: 1.1
    confirm(store, measurer, store.candidates())

    found = {c.policy.key: c for c in with_confirmed_figures(store, store.candidates())}

    for key, candidate in found.items():
        factor = 1.1 if key in measurer.compared[0][1] else 1.0
        expected = factor * measurer.step_seconds(candidate.policy)
        assert candidate.step_seconds == pytest.approx(expected)


# --- verified -------------------------------------------------------------------------------------


def test_the_best_is_verified_and_wins() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)

    winner = finish(store, measurer)

    assert winner.best is not None and winner.verification is not None
    assert measurer.verified == [winner.best.policy.key] == ranked_keys(store)[:1]
    assert winner.verification.passed
    assert winner.rejected == ()


def test_after_wrong_gradients_the_next_best_follows() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first, second, third = ranked_keys(store)[:3]
    measurer.wrong_gradients = lambda policy: policy.key == first
    measurer.verify_fails = lambda p: FailureKind.RECOMPUTE_MISMATCH if p.key == second else None
    heard: list[tuple[Candidate, Verdict]] = []

    ranked = confirm(store, measurer, store.candidates())
    winner = choose_winner(store, measurer, ranked, lambda *both: heard.append(both))

    names = {c.policy.key: c.name for c in store.candidates()}
    assert winner.best is not None and winner.best.policy.key == third
    assert winner.rejected == (
        f"{names[first]}: wrong gradients, h.0.weight off by 5.0e-01",
        f"{names[second]}: recompute mismatch",
    )
    assert [c.policy.key for c, _ in heard] == [first, second, third]


def test_when_every_finalist_is_wrong_the_others_have_their_turn() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    finalists = ranked_keys(store)[:FINALISTS]
    measurer.wrong_gradients = lambda policy: policy.key in finalists

    winner = finish(store, measurer)

    assert len(winner.rejected) == FINALISTS
    assert winner.best is not None
    assert winner.best.policy.key == ranked_keys(store)[FINALISTS]


def test_when_none_passes_there_is_no_winner() -> None:
    measurer = ScriptedMeasurer(wrong_gradients=lambda policy: True)
    store = searched(measurer)

    winner = finish(store, measurer)

    assert (winner.best, winner.verification) == (None, None)
    assert len(winner.rejected) == len(ranked_keys(store))
    assert stored_winner(store).best is None


def test_what_was_verified_is_not_verified_again() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first = ranked_keys(store)[0]
    measurer.wrong_gradients = lambda policy: policy.key == first
    winner = finish(store, measurer)
    assert len(measurer.verified) == 2

    again = finish(store, measurer)

    assert again == winner
    assert len(measurer.verified) == 2


def test_a_verification_that_did_not_run_is_tried_again() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first = ranked_keys(store)[0]
    measurer.verify_fails = lambda p: FailureKind.TIMEOUT if p.key == first else None
    finish(store, measurer)

    measurer.verify_fails = lambda policy: None
    winner = finish(store, measurer)

    assert winner.best is not None and winner.best.policy.key == first


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_no_numbers_are_wrong_and_can_be_stored(
    tmp_path: Path, value: float
) -> None:
    measurer = ScriptedMeasurer()
    store = create_study(
        tmp_path / "gpt",
        budget_bytes=BUDGET_BYTES,
        environment=measurer.environment,
        layers=measurer.layers,
    )
    searched(measurer, store, trials=1)
    first = ranked_keys(store)[0]
    verify = measurer.verify

    class Broken:
        compare = measurer.compare

        def verify(self, policy: Policy) -> Verdict:
            verdict = verify(policy)
            if policy.key != first:
                return verdict
            assert verdict.verification is not None
            return Verdict(
                verification=dataclasses.replace(
                    verdict.verification,
                    passed=False,
                    loss_difference=value,
                    worst_gradient_difference=value,
                    worst_parameter="h.0.weight",
                )
            )

    broken: Any = Broken()
    winner = choose_winner(store, broken, confirm(store, broken, store.candidates()))

    opened = open_study(tmp_path / "gpt")
    assert winner.best is not None and winner.best.policy.key != first
    assert "h.0.weight off by 1.8e+308" in winner.rejected[0]
    assert [entry.verification.passed for entry in opened.verified] == [False, True]
    assert stored_winner(opened) == winner


# --- read from the study --------------------------------------------------------------------------


def test_the_stored_winner_is_the_one_that_the_search_named() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first, second = ranked_keys(store)[:2]
    measurer.wrong_gradients = lambda policy: policy.key == first
    winner = finish(store, measurer)
    assert winner.best is not None and winner.best.policy.key == second

    found = stored_winner(store)

    assert found == winner
    assert found.rejected == winner.rejected


def test_an_older_winner_does_not_come_back() -> None:
    # The first winner's time was good luck, and it is no finalist of the second search.
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    lucky = finish(store, measurer).best
    assert lucky is not None
    others = [c for c in store.candidates() if c.policy.key != lucky.policy.key]
    winner = choose_winner(store, measurer, confirm(store, measurer, others))
    assert winner.best is not None

    fastest = rank(with_confirmed_figures(store, store.candidates()), BUDGET_BYTES)[0]
    found = stored_winner(store)

    assert fastest.policy.key == lucky.policy.key
    assert found.best is not None
    assert found.best.policy.key == winner.best.policy.key


def test_the_last_winner_is_the_stored_one() -> None:
    measurer = ScriptedMeasurer()
    store = searched(measurer)
    first, second = rank(store.candidates(), BUDGET_BYTES)[:2]

    for candidate in (first, second, first):
        choose_winner(store, measurer, [candidate])
        assert stored_winner(store).best == candidate
    choose_winner(store, measurer, [])
    assert stored_winner(store).best is None


def test_a_study_that_was_never_finished_has_no_winner() -> None:
    store = searched(ScriptedMeasurer())

    assert stored_winner(store) == Winner(best=None, verification=None, rejected=())


def test_names_of_the_ends_are_those_of_the_baselines() -> None:
    store = searched(ScriptedMeasurer())

    names: Callable[[str], int] = [c.name for c in store.candidates()].count
    assert names(NONE) == names(FULL) == 1
