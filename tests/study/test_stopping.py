"""When a search has found what it will find."""

from __future__ import annotations

import pytest

from sac_search.study.stopping import (
    FEWEST_TRIALS,
    SMALLEST_GAIN_FRACTION,
    WINDOW,
    has_converged,
)


def test_a_few_trials_are_never_enough() -> None:
    assert not has_converged([1.0] * (FEWEST_TRIALS - 1), 0.0)
    assert has_converged([1.0] * FEWEST_TRIALS, 0.0)


@pytest.mark.parametrize(
    ("gain", "noise", "converged"),
    [
        (SMALLEST_GAIN_FRACTION * 0.99, 0.0, True),
        (SMALLEST_GAIN_FRACTION * 1.01, 0.0, False),
        (0.01, 0.009, False),
        (0.01, 0.011, True),  # a gain inside the noise is none
        (0.001, 0.0001, True),  # the smallest gain counts however quiet the machine is
    ],
)
def test_the_gain_over_the_window_decides(gain: float, noise: float, converged: bool) -> None:
    history = [2.0] * 8 + [2.0 * (1 - gain)] * WINDOW

    assert has_converged(history, noise) == converged


def test_only_the_window_counts() -> None:
    late = [1.0] * 20 + [0.5] * (WINDOW - 1)
    early = [1.0] * 20 + [0.5] * (WINDOW + 1)

    assert not has_converged(late, 0.0)
    assert has_converged(early, 0.0)


def test_while_nothing_fits_it_goes_on_for_longer() -> None:
    assert not has_converged([None] * (FEWEST_TRIALS + WINDOW - 1), 0.0)
    assert has_converged([None] * (FEWEST_TRIALS + WINDOW), 0.0)


def test_the_first_fit_begins_a_window() -> None:
    nothing: list[float | None] = [None] * 20

    assert not has_converged([*nothing, *[1.0] * WINDOW], 0.0)
    assert has_converged([*nothing, *[1.0] * (WINDOW + 1)], 0.0)
