"""The front of step time against peak: which policies are on it, and where it is thin. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sac_search.study.candidate import Candidate

# Beyond the ends of a front, as a part of its extent, a policy may still win area.
_MARGIN_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A peak and a step time."""

    peak_bytes: float
    """The peak."""
    step_seconds: float
    """The step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What lies between two neighbours of the front: there may be better ones."""

    left: Spot
    """The one of less peak, the slower."""
    right: Spot
    """The one of more, the faster."""

    @property
    def area(self) -> float:
        """Bytes times seconds that a policy between them could win at the most."""
        width = self.right.peak_bytes - self.left.peak_bytes
        return width * (self.left.step_seconds - self.right.step_seconds)


def spot_of(candidate: Candidate) -> Spot:
    """Returns where a candidate that ran stands."""
    assert candidate.measurement is not None and candidate.step_seconds is not None
    return Spot(peak_bytes=candidate.measurement.peak_bytes, step_seconds=candidate.step_seconds)


def pareto_front(candidates: Iterable[Candidate], budget_bytes: int) -> list[Candidate]:
    """Returns the candidates that none other beats in peak and step time, the least peak first.

    Those alone that stay under the budget and can be exported; of equal ones the simplest.
    """
    usable = [c for c in candidates if _is_usable(c, budget_bytes)]
    usable.sort(key=lambda c: (spot_of(c).peak_bytes, spot_of(c).step_seconds, c.policy.complexity))
    front: list[Candidate] = []
    for candidate in usable:
        if not front or spot_of(candidate).step_seconds < spot_of(front[-1]).step_seconds:
            front.append(candidate)
    return front


def _is_usable(candidate: Candidate, budget_bytes: int) -> bool:
    has_figures = candidate.step_seconds is not None and math.isfinite(candidate.step_seconds)
    is_for_use = candidate.policy.exportable and not candidate.is_reference
    return candidate.fits(budget_bytes) and has_figures and is_for_use


def gaps_of(spots: Sequence[Spot]) -> list[Gap]:
    """Returns the gaps of a front whose spots are in order, the widest first."""
    found = [Gap(left=left, right=right) for left, right in itertools.pairwise(spots)]
    return sorted(found, key=lambda gap: -gap.area)


def gain_of(spot: Spot, spots: Sequence[Spot]) -> float:
    """Returns the area that `spot` would add to what the spots of a front dominate.

    The area ends a little beyond the front, so that a new end counts as well.
    """
    if not spots:
        return float("inf")
    peaks, seconds = [s.peak_bytes for s in spots], [s.step_seconds for s in spots]
    corner = Spot(
        peak_bytes=max(peaks) + _MARGIN_FRACTION * max(max(peaks) - min(peaks), 1.0),
        step_seconds=max(seconds) + _MARGIN_FRACTION * max(max(seconds) - min(seconds), 1e-9),
    )
    # A new end is worth something however slow it is, or however large.
    inside = Spot(
        peak_bytes=min(spot.peak_bytes, max(peaks)),
        step_seconds=min(spot.step_seconds, max(seconds)),
    )
    return _dominated([*spots, inside], corner) - _dominated(spots, corner)


def spread(front: Sequence[Candidate], most: int) -> list[Candidate]:
    """Returns so many of the front, its ends among them: those that keep the most of its area."""
    if len(front) <= most:
        return list(front)
    chosen = {0, len(front) - 1}
    spots = [spot_of(c) for c in front]
    while len(chosen) < most:
        kept = [spots[index] for index in sorted(chosen)]
        left = (index for index in range(len(front)) if index not in chosen)
        chosen.add(max(left, key=lambda index: gain_of(spots[index], kept)))
    return [front[index] for index in sorted(chosen)]


def undominated_fraction(spots: Iterable[Spot], ends: tuple[Spot, Spot]) -> float:
    """Returns the part of the box between full and no checkpointing that nothing dominates."""
    full, none = ends
    corner = Spot(peak_bytes=none.peak_bytes, step_seconds=full.step_seconds)
    whole = (corner.peak_bytes - full.peak_bytes) * (corner.step_seconds - none.step_seconds)
    if corner.peak_bytes <= full.peak_bytes or corner.step_seconds <= none.step_seconds:
        return 1.0
    inside = [
        Spot(
            peak_bytes=max(full.peak_bytes, s.peak_bytes),
            step_seconds=max(none.step_seconds, s.step_seconds),
        )
        for s in spots
    ]
    return 1.0 - _dominated(inside, corner) / whole


def _dominated(spots: Iterable[Spot], corner: Spot) -> float:
    """Returns the bytes times seconds between `corner` and the front of `spots`."""
    front: list[Spot] = []
    for spot in sorted(spots, key=lambda s: (s.peak_bytes, s.step_seconds)):
        is_inside = spot.peak_bytes < corner.peak_bytes and spot.step_seconds < corner.step_seconds
        if is_inside and (not front or spot.step_seconds < front[-1].step_seconds):
            front.append(spot)
    ends = [*(spot.peak_bytes for spot in front[1:]), corner.peak_bytes]
    return sum(
        (end - spot.peak_bytes) * (corner.step_seconds - spot.step_seconds)
        for spot, end in zip(front, ends, strict=True)
    )
