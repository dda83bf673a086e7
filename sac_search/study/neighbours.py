"""Policies near those that were measured, for when a sampler finds nothing new."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence

from sac_search.space import Assignment, DecisionType, SearchSpace

_ATTEMPTS = 300
# After so many attempts one decision more is changed at once.
_ATTEMPTS_PER_WIDTH = 60


def all_neighbours(space: SearchSpace, start: Assignment) -> Iterator[Assignment]:
    """Yields the assignments in which one decision is another, a count by one or two.

    The model runs as it does at the start.
    """
    for decision in space.decisions_in(space.mode_in(start)):
        value = start[decision.name]
        if decision.type in (DecisionType.COUNT, DecisionType.PART):
            values = {value + step for step in (-2, -1, 1, 2)}
        else:
            values = set(range(decision.highest + 1)) - {value}
        for other in sorted(values):
            if 0 <= other <= decision.highest:
                yield {**start, decision.name: other}


def neighbour(
    space: SearchSpace,
    starts: Sequence[Assignment],
    known: Container[str],
    generator: random.Random,
) -> Assignment | None:
    """Returns an assignment a few decisions away from one of `starts`, or None if none is found.

    `known` are the keys of policies that are not wanted.
    """
    decisions = space.decisions
    for attempt in range(_ATTEMPTS if starts else 0):
        assignment = dict(generator.choice(starts))
        width = min(len(decisions), 1 + attempt // _ATTEMPTS_PER_WIDTH)
        for decision in generator.sample(decisions, width):
            assignment[decision.name] = generator.randint(0, decision.highest)
        assignment = dict(space.completed(assignment))
        if space.policy_for(assignment).key not in known:
            return assignment
    return None
