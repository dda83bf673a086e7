"""The front of step time against peak, held against counting."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from scripted import make_candidate

from sac_search.policy import Tier, checkpoint_layers
from sac_search.study.candidate import Candidate
from sac_search.study.front import (
    Spot,
    gain_of,
    gaps_of,
    pareto_front,
    spot_of,
    spread,
    undominated_fraction,
)

SPOTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12)


def candidates(places: list[tuple[int, int]]) -> list[Candidate]:
    return [
        make_candidate(
            f"trial {number}",
            policy=checkpoint_layers(["h.0"], Tier(ops=(f"aten.op{number}.default",))),
            peak_bytes=peak,
            seconds=seconds,
        )
        for number, (peak, seconds) in enumerate(places)
    ]


def spots(*places: tuple[float, float]) -> list[Spot]:
    return [Spot(peak_bytes=peak, step_seconds=seconds) for peak, seconds in places]


@given(SPOTS)
def test_nothing_beats_what_is_on_the_front_and_all_else_is_beaten(
    places: list[tuple[int, int]],
) -> None:
    found = [
        (int(spot_of(c).peak_bytes), int(spot_of(c).step_seconds))
        for c in pareto_front(candidates(places), 10)
    ]
    under = {place for place in places if place[0] <= 10}
    expected = {
        one
        for one in under
        if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in under)
    }
    assert set(found) == expected
    assert len(found) == len(expected)
    assert found == sorted(found)


@given(SPOTS, st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_a_gain_is_that_of_counting_squares(
    places: list[tuple[int, int]], place: tuple[int, int]
) -> None:
    ends = spots((1, 13), (13, 1))
    front = [*ends, *spots(*places)]

    def squares(all_spots: list[Spot]) -> int:
        # Of the box between the ends: what lies above and to the right of any spot.
        return sum(
            any(s.peak_bytes <= x and s.step_seconds <= y for s in all_spots)
            for x, y in itertools.product(range(1, 13), range(1, 13))
        )

    more = squares([*front, *spots(place)]) - squares(front)
    left = undominated_fraction(front, (ends[0], ends[1]))
    after = undominated_fraction([*front, *spots(place)], (ends[0], ends[1]))
    assert round(144 * (left - after)) == more
    assert (gain_of(spots(place)[0], front) > 0) == (more > 0)


def test_a_new_end_is_a_gain_however_slow() -> None:
    front = spots((2, 3), (4, 1))
    assert gain_of(spots((1, 9))[0], front) > 0
    assert gain_of(spots((5, 0.5))[0], front) > 0
    assert gain_of(spots((5, 1))[0], front) == 0


def test_the_widest_gap_comes_first() -> None:
    gaps = gaps_of(spots((1, 10), (2, 9), (9, 2), (10, 1)))
    assert [(g.left.peak_bytes, g.right.peak_bytes) for g in gaps] == [(2, 9), (1, 2), (9, 10)]


@given(SPOTS, st.integers(2, 5))
def test_a_spread_keeps_the_ends_and_the_order(places: list[tuple[int, int]], most: int) -> None:
    front = pareto_front(candidates(places), 12)
    chosen = spread(front, most)
    assert len(chosen) == min(most, len(front))
    assert chosen[0] is front[0]
    assert chosen[-1] is front[-1]
    assert chosen == [c for c in front if c in chosen]


def test_a_spread_takes_what_keeps_most_of_the_area() -> None:
    front = candidates([(1, 10), (2, 9), (3, 3), (10, 1)])
    assert spread(front, 3) == [front[0], front[2], front[3]]


def test_without_a_box_nothing_is_dominated() -> None:
    full, none = spots((5, 2), (5, 1))
    assert undominated_fraction(spots((1, 1)), (full, none)) == 1.0
