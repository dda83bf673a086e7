"""How to run the model next, and what to try there: for searches that compile it, too.

Nothing here believes that less memory for torch's own budget means a lower peak or a slower step:
neither is so. A budget says what the partitioner may keep by its own estimate, of one graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable
from collections.abc import Set as AbstractSet

from sac_search.failures import OF_MEMORY
from sac_search.space import Assignment, RunMode, SearchSpace
from sac_search.study.baselines import COMPILED_NAMES
from sac_search.study.candidate import Candidate, rank

FIRST_BUDGETS = (70, 50, 30, 10)
"""Memory budgets to begin with, in hundredths; compile alone is the hundredth."""
COMPILED_PLAN_FRACTIONS = (1.0, 0.9)
"""Budgets to plan the first compiled policies for, in parts of the study's."""

# A mode whose best is slower by this is drawn a third as often.
_SLOWER_FRACTION = 0.03
_LEAST_WEIGHT = 0.05
# Between two budgets this close there is nothing to find; away from the best, only a wide gap is
# looked into.
_SMALLEST_GAP = 2
_WIDE_GAP = 12
_HUNDREDTHS = 100


def mode_weights(
    space: SearchSpace, candidates: Iterable[Candidate], budget_bytes: int
) -> dict[RunMode, float]:
    """Returns how often to draw each mode that works, by how good the best that fits in it is."""
    known = list(candidates)
    best = {
        mode: min(
            (
                c.step_seconds
                for c in known
                if space.mode_of(c.policy) is mode
                and c.fits(budget_bytes)
                and c.step_seconds is not None
            ),
            default=None,
        )
        for mode in space.run_modes
    }
    if best.get(RunMode.PREFER) is None and RunMode.PREFER in best:
        best[RunMode.PREFER] = best.get(RunMode.COMPILE)
    found = [seconds for seconds in best.values() if seconds is not None]
    fastest = min(found, default=1.0) or 1.0
    weights = {
        mode: _LEAST_WEIGHT
        if seconds is None
        else max(_LEAST_WEIGHT, math.exp(-(seconds / fastest - 1) / _SLOWER_FRACTION))
        for mode, seconds in best.items()
    }
    if compile_failure(known) is None:
        return weights
    return {mode: w for mode, w in weights.items() if mode is RunMode.EAGER}


def compile_failure(candidates: Iterable[Candidate]) -> Candidate | None:
    """Returns a compiled baseline that failed, if both did and memory was not the reason."""
    ends = [c for c in candidates if c.is_baseline and c.name in COMPILED_NAMES]
    failed = [c for c in ends if c.failure is not None and c.failure.kind not in OF_MEMORY]
    return failed[0] if len(failed) == 2 else None


def next_budget(
    space: SearchSpace, candidates: Iterable[Candidate], budget_bytes: int, taken: Container[str]
) -> Assignment | None:
    """Returns a memory budget that was not tried, or a tried one with another solver, or None.

    Beside the best that fits: a wide gap between those tried first, the larger one of two; then
    torch's other solvers and estimators at the best itself; then the narrower gaps. Elsewhere only
    wide gaps.
    """
    tried = {
        (round(_HUNDREDTHS * compiled.memory_budget), (compiled.solver, compiled.estimator)): c
        for c in candidates
        if (compiled := c.policy.compiled) is not None and not c.policy.layers
    }
    best = rank(tried.values(), budget_bytes)[:1]
    place, setting = next(
        (at for at, candidate in tried.items() if best and candidate is best[0]),
        (None, space.budget_settings[0]),
    )
    gaps = sorted(_gaps({hundredths for hundredths, _ in tried}), key=_width)
    wide = [gap for gap in gaps if gap[1] - gap[0] >= _WIDE_GAP]
    beside = [gap for gap in gaps if place in gap and gap[1] - gap[0] > _SMALLEST_GAP]
    proposals = [
        *((_middle(gap), setting) for gap in beside if gap in wide),
        *((place, other) for other in space.budget_settings if place not in (None, _HUNDREDTHS)),
        *((_middle(gap), setting) for gap in beside + wide),
    ]
    for hundredths, with_setting in proposals:
        assignment = space.budget_assignment(hundredths, with_setting)
        if space.policy_for(assignment).key not in taken:
            return assignment
    return None


def next_preference(
    space: SearchSpace, candidates: Iterable[Candidate], budget_bytes: int, taken: Container[str]
) -> Assignment | None:
    """Returns the best compiled policy that was not tried as preferences yet, or None."""
    binding = [c for c in candidates if space.mode_of(c.policy) is RunMode.COMPILE]
    for candidate in rank(binding, budget_bytes):
        choices = space.choices_of(candidate.policy)
        if choices is None:
            continue
        assignment = space.assignment_of(choices, RunMode.PREFER)
        if assignment is not None and space.policy_for(assignment).key not in taken:
            return assignment
    return None


def _gaps(tried: AbstractSet[int]) -> list[tuple[int, int]]:
    # Zero and the whole are ends of the range whether they were tried or not.
    points = sorted({-1, *tried, 101})
    return [(low, high) for low, high in itertools.pairwise(points) if high - low > 1]


def _middle(gap: tuple[int, int]) -> int:
    return (gap[0] + gap[1]) // 2


def _width(gap: tuple[int, int]) -> int:
    return gap[0] - gap[1]
