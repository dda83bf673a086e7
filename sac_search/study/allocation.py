"""Which batch sizes to look at, and at which of them the next trials are worth most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sac_search.errors import UsageError
from sac_search.study.candidate import Candidate

AUTO = "auto"
LARGEST_BATCH_SIZE = 2**20
"""Beyond it `auto` does not look; a list may."""
PATIENCE = 5
"""A size is settled after so many trials in a row that brought nothing there."""
PATIENCE_WITH_LEADER = 10
"""The same for the size that leads."""

# `auto` begins with the largest power of two that fits, and so many halvings of it.
_HALVINGS = 4
# It looks between two sizes that are further apart than this part of the larger.
_SMALLEST_GAP_FRACTION = 1 / 8
# A bound is of costs that are believed, which may be off by as much.
_SMALLEST_MARGIN_FRACTION = 0.01
# A gain has to be larger than this, or than the noise.
_SMALLEST_GAIN_FRACTION = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one batch size does so far."""

    batch_size: int
    """The batch size."""
    samples_per_second: float | None
    """Of the best policy that fits; None while none does."""
    noise_fraction: float
    """Standard error of that, as a fraction."""
    bound_samples_per_second: float
    """What no policy at this size is believed to exceed."""
    idle_trials: int
    """Trials in a row, the last ones, that brought nothing."""
    is_done: bool
    """Whether nothing is left to measure at this size."""


def parse_batch_sizes(given: str | Iterable[int]) -> tuple[int, ...] | None:
    """Returns the batch sizes of `4,8,16`, smallest first; None for `auto`.

    Raises:
        UsageError: they are no whole numbers above 0.
    """
    if isinstance(given, str):
        words = [word.strip() for word in given.split(",")]
        if words == [AUTO]:
            return None
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise _no_sizes_message(given)
        given = [int(word) for word in words]
    sizes = sorted(set(given))
    if not sizes or any(not isinstance(s, int) or not 1 <= s < 2**31 for s in sizes):
        raise _no_sizes_message(", ".join(map(str, sizes)))
    return tuple(sizes)


def _no_sizes_message(given: str) -> UsageError:
    return UsageError(
        f"{given!r} are no batch sizes; give whole numbers above 0 with commas between, such as "
        "4,8,16, or auto"
    )


def least_peak(known: Mapping[int, int], batch_size: int) -> int | None:
    """Returns bytes that the peak at `batch_size` is not under, given peaks at smaller sizes.

    The peak is the highest of several moments, each of which grows in proportion, so a line through
    the two nearest smaller sizes never says too much. None where fewer are known.
    """
    smaller = sorted(size for size in known if size < batch_size)[-2:]
    if len(smaller) < 2:
        return None
    low, high = smaller
    slope = (known[high] - known[low]) / (high - low)
    return math.floor(known[high] + slope * (batch_size - high))


def first_sizes(largest: int) -> tuple[int, ...]:
    """Returns the powers of two to begin with, where `largest` is the largest that fits."""
    return tuple(largest >> n for n in range(_HALVINGS, -1, -1) if largest >> n)


def sizes_between(tried: Iterable[int], best: int) -> list[int]:
    """Returns the untried sizes half-way between the best and its neighbours.

    Half of the best where it is the smallest. Sizes that were ruled out count as tried.
    """
    sizes = sorted(set(tried))
    place = sizes.index(best)
    lower = sizes[place - 1] if place else 0
    found = [(lower + best) // 2] if _is_gap(lower, best) else []
    if place + 1 < len(sizes) and _is_gap(best, sizes[place + 1]):
        found.append((best + sizes[place + 1]) // 2)
    return [size for size in found if size > 0 and size not in sizes]


def _is_gap(low: int, high: int) -> bool:
    return high - low > max(1.0, _SMALLEST_GAP_FRACTION * high)


def next_size(standings: Sequence[Standing]) -> int | None:
    """Returns the size at which the next trials are worth most; None when none is.

    That is the one with the highest bound. Sizes whose bound is under the best that was measured,
    and sizes at which nothing was gained for long, are left alone.
    """
    best = leader(standings)
    open_sizes = [
        standing
        for standing in standings
        if not standing.is_done
        and standing.idle_trials < (PATIENCE_WITH_LEADER if standing is best else PATIENCE)
        and not is_beaten(standing, best)
    ]
    highest = max(open_sizes, key=lambda s: s.bound_samples_per_second, default=None)
    return None if highest is None else highest.batch_size


def leader(standings: Iterable[Standing]) -> Standing | None:
    """Returns the standing with the highest measured throughput."""
    measured = [s for s in standings if s.samples_per_second is not None]
    return max(measured, key=lambda s: s.samples_per_second or 0.0, default=None)


def is_beaten(standing: Standing, best: Standing | None) -> bool:
    """Returns whether the size's bound is under the best measured throughput, noise allowed for."""
    if best is None or standing is best or best.samples_per_second is None:
        return False
    noise = 2 * math.hypot(best.noise_fraction, standing.noise_fraction)
    margin = max(_SMALLEST_MARGIN_FRACTION, noise)
    return standing.bound_samples_per_second * (1 + margin) < best.samples_per_second


def idle_trials(candidates: Iterable[Candidate], budget_bytes: int) -> int:
    """Returns how many of the last trials brought no gain beyond their noise."""
    best_seconds = math.inf
    idle = 0
    for candidate in candidates:
        gained = False
        if candidate.fits(budget_bytes) and candidate.step_seconds is not None:
            assert candidate.measurement is not None
            noise = max(_SMALLEST_GAIN_FRACTION, candidate.measurement.step_noise_fraction)
            gained = candidate.step_seconds < best_seconds * (1 - noise)
            best_seconds = min(best_seconds, candidate.step_seconds)
        if not candidate.is_baseline and not candidate.is_ruled_out:
            idle = 0 if gained else idle + 1
    return idle


def none_seconds_by(
    full_seconds: float, smaller: Sequence[tuple[float, float]], recompute_seconds: float | None
) -> float:
    """Returns the step time without checkpointing where that does not run, rather too little.

    `smaller` are step times without and with full checkpointing at sizes where both ran, nearest
    last; `recompute_seconds` is what full checkpointing recomputes here, as traced.
    """
    if smaller:
        none, full = smaller[-1]
        return full_seconds * none / full if full else 0.0
    if recompute_seconds is not None:
        return max(0.0, full_seconds - recompute_seconds)
    # Recomputing is one forward pass more, which is hardly ever more than a third of the rest.
    return 0.6 * full_seconds
