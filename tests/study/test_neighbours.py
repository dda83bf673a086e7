"""Policies near those that were measured."""

from __future__ import annotations

import random

from scripted import BLOCK_OPS, SITE_OPS, make_layers

from sac_search.space import Assignment, Granularity, LayerChoiceMode, build_space
from sac_search.study.neighbours import all_neighbours, neighbour

SPACE = build_space(make_layers(4), tiers=2)
START: Assignment = {d.name: 0 for d in SPACE.decisions} | {"layers.Block": 3}


def changed(found: Assignment) -> list[str]:
    return [name for name in START if found[name] != START[name]]


def test_a_neighbour_differs_in_one_decision() -> None:
    known = {SPACE.policy_for(START).key}
    names = set()
    for seed in range(40):
        found = neighbour(SPACE, [START], known, random.Random(seed))  # noqa: S311
        assert found is not None
        assert SPACE.policy_for(found).key not in known
        assert all(0 <= found[d.name] <= d.highest for d in SPACE.decisions)
        names |= {*changed(found)}
        assert len(changed(found)) == 1
    assert "layers.Block" in names
    assert "save.matmul" in names
    # Nothing follows from what a second tier saves that no layer has.
    assert "tier2.save.matmul" not in names


def test_the_start_stays_as_it_was() -> None:
    before = dict(START)
    neighbour(SPACE, [START], {SPACE.policy_for(START).key}, random.Random(0))  # noqa: S311
    assert before == START


def test_where_all_near_ones_are_known_it_looks_further() -> None:
    near = [START | {d.name: value} for d in SPACE.decisions for value in range(d.highest + 1)]
    known = {SPACE.policy_for(assignment).key for assignment in near}
    found = neighbour(SPACE, [START], known, random.Random(0))  # noqa: S311
    assert found is not None
    assert SPACE.policy_for(found).key not in known
    assert len(changed(found)) >= 2


def test_every_start_has_neighbours() -> None:
    space = build_space(make_layers(30), LayerChoiceMode.EACH)
    nothing = {d.name: 0 for d in space.decisions}
    starts = [nothing | {"layer.h.3": 1}, nothing | {f"layer.h.{i}": 1 for i in range(30)}]
    known = {space.policy_for(start).key for start in starts}
    sizes = set()
    for seed in range(20):
        found = neighbour(space, starts, known, random.Random(seed))  # noqa: S311
        assert found is not None
        sizes.add(len(space.policy_for(found).layers))
    assert min(sizes) <= 2
    assert max(sizes) >= 29


def test_nothing_is_left_where_all_is_known() -> None:
    space = build_space(make_layers(2, BLOCK_OPS[:2]))
    known = {space.policy_for(assignment).key for assignment in space.assignments()}
    start = next(iter(space.assignments()))
    assert neighbour(space, [start], known, random.Random(0)) is None  # noqa: S311
    assert neighbour(space, [], set(), random.Random(0)) is None  # noqa: S311


def test_all_neighbours_differ_in_one_decision() -> None:
    space = build_space(make_layers(3, SITE_OPS), granularity=Granularity.SITE, tiers=2)
    start = {decision.name: 0 for decision in space.decisions} | {"layers.Block": 1}
    found = list(all_neighbours(space, start))
    for assignment in found:
        changed = [name for name in start if assignment[name] != start[name]]
        assert len(changed) == 1
        assert all(0 <= assignment[d.name] <= d.highest for d in space.decisions)
    counts = sorted(a["layers.Block"] for a in found if a["layers.Block"] != 1)
    assert counts == [0, 2, 3]
    saves = sum(d.highest == 1 for d in space.decisions)
    assert len(found) == saves + len(counts) + 2  # the second tier's count may be 1 or 2
