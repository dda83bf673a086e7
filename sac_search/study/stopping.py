"""When a search has found what it will find."""

from __future__ import annotations

from collections.abc import Sequence

# Over `WINDOW` trials in a row the best must have become better by more than this, or by more than
# the noise of the measurements, whichever is larger.
SMALLEST_GAIN_FRACTION = 0.003
WINDOW = 10
FEWEST_TRIALS = 15


def has_converged(best_seconds: Sequence[float | None], noise_fraction: float) -> bool:
    """Returns whether the last trials brought nothing.

    `best_seconds[i]` is the best feasible step time after trial i, None while there is none.
    """
    if len(best_seconds) < FEWEST_TRIALS:
        return False
    before, now = best_seconds[-WINDOW - 1], best_seconds[-1]
    if now is None:
        return len(best_seconds) >= FEWEST_TRIALS + WINDOW
    if before is None:
        return False
    return before - now <= max(SMALLEST_GAIN_FRACTION, noise_fraction) * before
