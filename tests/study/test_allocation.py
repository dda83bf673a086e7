"""Which batch sizes are looked at, and where the next trials go: by counting, without a study."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_candidate

from sac_search.errors import UsageError
from sac_search.policy import Policy, checkpoint_layers
from sac_search.study.allocation import (
    PATIENCE,
    PATIENCE_WITH_LEADER,
    Standing,
    first_sizes,
    idle_trials,
    is_beaten,
    least_peak,
    next_size,
    none_seconds_by,
    parse_batch_sizes,
    sizes_between,
)


def standing(size: int, measured: float | None, bound: float, **changes: object) -> Standing:
    given = {"noise_fraction": 0.0, "idle_trials": 0, "is_done": False, **changes}
    return Standing(
        batch_size=size,
        samples_per_second=measured,
        bound_samples_per_second=bound,
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4", (4,)), ("16,4, 8,4", (4, 8, 16)), ("auto", None), (" auto ", None), ([8, 2], (2, 8))],
)
def test_batch_sizes_are_read(text: str | list[int], sizes: tuple[int, ...] | None) -> None:
    assert parse_batch_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "4,", "4,x", "0", "-4", "4.5", "auto,4", "³", "9" * 12, []])
def test_what_is_no_batch_size_is_refused(text: str | list[int]) -> None:
    with pytest.raises(UsageError, match="are no batch sizes; give whole numbers above 0"):
        parse_batch_sizes(text)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=4),
    st.lists(st.integers(1, 500), min_size=3, max_size=6, unique=True),
)
def test_a_peak_is_never_less_than_what_it_is_said_to_exceed(
    moments: list[tuple[int, int]], sizes: list[int]
) -> None:
    """The peak of a step is the highest of moments that each grow in proportion."""
    *known, asked = sorted(sizes)
    peaks = {n: max(fixed + per_sample * n for fixed, per_sample in moments) for n in known}
    truth = max(fixed + per_sample * asked for fixed, per_sample in moments)

    least = least_peak(peaks, asked)

    assert least is not None
    assert least <= truth
    if len(moments) == 1:
        assert least in (truth, truth - 1)  # rounded down


def test_one_smaller_size_says_nothing_of_a_larger_one() -> None:
    assert least_peak({}, 8) is None
    assert least_peak({4: 100, 16: 300}, 8) is None


def test_auto_begins_with_the_largest_that_fits_and_four_halvings() -> None:
    assert first_sizes(64) == (4, 8, 16, 32, 64)
    assert first_sizes(4) == (1, 2, 4)
    assert first_sizes(1) == (1,)
    assert first_sizes(0) == ()


@pytest.mark.parametrize(
    ("tried", "best", "between"),
    [
        ((4, 8, 16), 8, [6, 12]),
        ((4, 8, 16), 16, [12]),
        ((4, 8, 16), 4, [2, 6]),
        ((1, 2, 4), 1, []),
        ((1, 2), 2, []),
        ((1, 2, 4), 2, [3]),
        ((28, 31, 34), 31, []),  # nearer than an eighth of the larger
        ((8, 12, 13, 16), 12, [10]),
    ],
)
def test_auto_goes_on_half_way_to_the_neighbours_of_the_best(
    tried: tuple[int, ...], best: int, between: list[int]
) -> None:
    assert sizes_between(tried, best) == between


def test_looking_between_sizes_comes_to_an_end() -> None:
    tried = {4, 8, 16, 32}
    while more := sizes_between(tried, 16):
        tried |= set(more)
    assert tried == {4, 8, 12, 14, 16, 18, 20, 24, 32}


# --- where the next trials go ---------------------------------------------------------------------


def test_the_highest_bound_is_next() -> None:
    sizes = [standing(4, 90, 95), standing(8, 100, 110), standing(16, 80, 130)]
    assert next_size(sizes) == 16


def test_a_size_without_a_bound_is_next() -> None:
    assert next_size([standing(4, 90, 99), standing(8, None, math.inf)]) == 8


def test_a_size_whose_bound_is_under_the_best_is_left_alone() -> None:
    best, beaten = standing(8, 100, 101), standing(16, 80, 98)
    assert next_size([replace_done(best), beaten]) is None
    assert is_beaten(beaten, best)


def test_what_is_within_the_noise_is_not_beaten() -> None:
    noisy = standing(16, 80, 98, noise_fraction=0.02)
    best = standing(8, 100, 101)
    assert not is_beaten(noisy, best)
    assert not is_beaten(best, best)
    assert not is_beaten(noisy, None)
    assert next_size([replace_done(best), noisy]) == 16


@pytest.mark.parametrize(
    ("size", "patience"), [(8, PATIENCE_WITH_LEADER), (16, PATIENCE)], ids=["leader", "other"]
)
def test_patience_comes_to_an_end(size: int, patience: int) -> None:
    def asked(idle: int) -> int | None:
        sizes = {8: standing(8, 100, 120), 16: standing(16, 90, 120)}
        sizes = {n: replace_done(s) if n != size else s for n, s in sizes.items()}
        open_one = standing(size, sizes[size].samples_per_second, 120, idle_trials=idle)
        return next_size([*(s for n, s in sizes.items() if n != size), open_one])

    assert asked(patience - 1) == size
    assert asked(patience) is None


def replace_done(found: Standing) -> Standing:
    return standing(
        found.batch_size, found.samples_per_second, found.bound_samples_per_second, is_done=True
    )


def test_idle_trials_are_those_since_the_last_gain() -> None:
    def trial(number: int, seconds: float, **changes: object):  # type: ignore[no-untyped-def]
        policy = checkpoint_layers([f"h.{n}" for n in range(number)])
        return make_candidate(f"trial {number}", policy=policy, seconds=seconds, **changes)  # type: ignore[arg-type]

    full = make_candidate("full", policy=Policy(), seconds=1.0, is_baseline=True)
    assert idle_trials([full], 100) == 0
    assert idle_trials([full, trial(1, 0.9), trial(2, 0.95)], 100) == 1
    assert idle_trials([full, trial(1, 0.9), trial(2, 0.95), trial(3, 0.8)], 100) == 0
    # Neither what is within the noise is a gain, nor what does not fit.
    assert idle_trials([full, trial(1, 0.99, noise=0.02)], 100) == 1
    assert idle_trials([full, trial(1, 0.5, peak_bytes=101)], 100) == 1


def test_step_time_without_checkpointing_where_it_does_not_run() -> None:
    assert none_seconds_by(1.3, [(0.5, 1.0), (1.0, 1.3)], 0.9) == pytest.approx(1.0)
    assert none_seconds_by(1.3, [], 0.4) == pytest.approx(0.9)
    assert none_seconds_by(1.0, [], None) == pytest.approx(0.6)
