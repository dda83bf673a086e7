"""Which of several measured policies is best."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_candidate, make_failed, make_outcome

from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.study.candidate import Candidate, drift_free_seconds, rank

PLAIN = checkpoint_layers(["h.0"])
SAVING = checkpoint_layers(["h.0"], Tier(ops=("aten.mm.default",)))
SAVING_MORE = checkpoint_layers(["h.0"], Tier(ops=("aten.addmm.default", "aten.mm.default")))


def ranked_names(*candidates: Candidate, budget_bytes: int = 1000) -> list[str]:
    return [candidate.name for candidate in rank(candidates, budget_bytes)]


def test_the_faster_is_better_when_the_difference_is_beyond_the_noise() -> None:
    fast = make_candidate("fast", policy=SAVING_MORE, seconds=1.0, peak_bytes=900, noise=0.01)
    slow = make_candidate("slow", policy=PLAIN, seconds=1.03, peak_bytes=100, noise=0.01)

    # Twice the hypotenuse of both is 2.83%.
    assert ranked_names(slow, fast) == ["fast", "slow"]


def test_inside_the_noise_the_lower_peak_is_better() -> None:
    fast = make_candidate("fast", policy=PLAIN, seconds=1.0, peak_bytes=900, noise=0.01)
    lean = make_candidate("lean", policy=SAVING_MORE, seconds=1.009, peak_bytes=100, noise=0.01)

    assert ranked_names(fast, lean) == ["lean", "fast"]


def test_noise_does_not_excuse_a_gap_of_more_than_a_hundredth() -> None:
    fast = make_candidate("fast", policy=PLAIN, seconds=1.0, peak_bytes=900, noise=0.05)
    lean = make_candidate("lean", policy=SAVING_MORE, seconds=1.011, peak_bytes=100, noise=0.05)
    assert [c.name for c in rank([fast, lean], 1000)] == ["fast", "lean"]


def test_of_equal_peaks_inside_the_noise_the_simpler_is_better() -> None:
    fast = make_candidate("fast", policy=SAVING_MORE, seconds=1.0, noise=0.01)
    simple = make_candidate("simple", policy=SAVING, seconds=1.004, noise=0.01)
    simplest = make_candidate("simplest", policy=PLAIN, seconds=1.008, noise=0.01)

    assert ranked_names(fast, simple, simplest) == ["simplest", "simple", "fast"]


def test_without_noise_and_all_else_equal_the_faster_is_better() -> None:
    first = make_candidate("first", policy=SAVING, seconds=1.0)
    second = make_candidate("second", policy=SAVING, seconds=1.0 + 1e-12)

    assert ranked_names(second, first) == ["first", "second"]


def test_the_budget_itself_still_fits() -> None:
    at = make_candidate("at", policy=PLAIN, seconds=2.0, peak_bytes=1000)
    over = make_candidate("over", policy=PLAIN, seconds=1.0, peak_bytes=1001)

    assert at.fits(1000) and not over.fits(1000)
    assert ranked_names(at, over) == ["at"]


def test_failures_and_what_cannot_be_exported_are_not_ranked() -> None:
    failed = Candidate(name="failed", policy=PLAIN, outcome=make_failed(), step_seconds=None)
    counting = make_candidate(
        "counting",
        policy=checkpoint_layers(["h.0"], Tier(ops=("aten.mm.default",), every_second_matmul=True)),
        seconds=0.5,
    )
    fine = make_candidate("fine", policy=PLAIN)

    assert failed.measurement is None and failed.failure is not None
    assert not failed.fits(10**9)
    assert ranked_names(failed, counting, fine) == ["fine"]


def test_no_checkpointing_is_a_candidate_like_others() -> None:
    none = make_candidate("none", policy=Policy(), seconds=1.0)
    full = make_candidate("full", policy=PLAIN, seconds=1.3)

    assert ranked_names(full, none) == ["none", "full"]


def test_step_times_are_as_of_the_anchor_whatever_the_machine_does() -> None:
    # The machine has become twice as slow, for the reference as well.
    outcome = make_outcome(seconds=3.0, reference=2.0)

    assert drift_free_seconds(outcome, anchor_seconds=1.0) == pytest.approx(1.5)
    assert drift_free_seconds(make_failed(), anchor_seconds=1.0) is None


def test_newer_figures_replace_the_older_ones() -> None:
    candidate = make_candidate("trial 3", policy=SAVING, is_baseline=True)

    newer = candidate.with_outcome(make_outcome(seconds=3.0, peak_bytes=7, reference=2.0), 1.0)
    failed = candidate.with_outcome(make_failed(), 1.0)

    assert (newer.step_seconds, newer.fits(7), newer.fits(6)) == (1.5, True, False)
    assert (newer.name, newer.policy, newer.is_baseline) == ("trial 3", SAVING, True)
    assert failed.step_seconds is None and not failed.fits(10**9)


def test_newer_figures_keep_a_forecast_that_they_lack() -> None:
    measured = dataclasses.replace(make_outcome(), forecast_peak_bytes=90)
    candidate = Candidate(name="trial 3", policy=SAVING, outcome=measured, step_seconds=1.0)

    again = candidate.with_outcome(make_outcome(seconds=2.0), 1.0)
    other = candidate.with_outcome(dataclasses.replace(make_outcome(), forecast_peak_bytes=80), 1.0)

    assert again.outcome.forecast_peak_bytes == 90
    assert other.outcome.forecast_peak_bytes == 80


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    figures = st.tuples(
        st.floats(0.5, 2.0), st.integers(1, 5), st.sampled_from([0.0, 0.01, 0.1]), st.integers(1, 4)
    )
    return [
        make_candidate(
            str(index),
            policy=checkpoint_layers([f"h.{i}" for i in range(layers)]),
            seconds=seconds,
            peak_bytes=peak,
            noise=noise,
        )
        for index, (seconds, peak, noise, layers) in enumerate(draw(st.lists(figures, max_size=8)))
    ]


@settings(max_examples=200, deadline=None)
@given(candidates(), st.integers(1, 5))
def test_every_fitting_candidate_is_ranked_once_and_none_is_beaten(
    drawn: list[Candidate], budget_bytes: int
) -> None:
    ranked = rank(drawn, budget_bytes)

    assert sorted(c.name for c in ranked) == sorted(c.name for c in drawn if c.fits(budget_bytes))
    for position, chosen in enumerate(ranked):
        rest = ranked[position:]
        fastest = min(rest, key=lambda c: c.step_seconds)

        def alike(c: Candidate, fastest: Candidate = fastest) -> bool:
            noise = 2 * math.hypot(
                c.measurement.step_noise_fraction, fastest.measurement.step_noise_fraction
            )
            return c.step_seconds <= fastest.step_seconds * (1 + min(noise, 0.01))

        assert alike(chosen)
        assert not any(c.fits(chosen.measurement.peak_bytes - 1) for c in rest if alike(c))


def test_the_order_of_asking_does_not_matter() -> None:
    drawn = [
        make_candidate(str(i), policy=PLAIN, seconds=1 + i * 0.004, peak_bytes=50 - i, noise=0.005)
        for i in range(6)
    ]

    assert ranked_names(*drawn) == ranked_names(*reversed(drawn))
