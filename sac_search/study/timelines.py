"""Memory over one step of the policies that people compare, kept in the study when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sac_search.policy import Policy
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTimeline:
    """The memory of a step under one policy, by its dry run."""

    name: str
    """Name of the candidate: `none`, `full`, `trial 17`."""
    policy_key: str
    """Key of its policy."""
    timeline: Timeline
    """Live bytes over the step."""


def draw_timelines(
    candidates: Iterable[Candidate],
    best: Candidate | None,
    known: Iterable[PolicyTimeline],
    draw: Callable[[Policy], Timeline | None],
    *,
    must_run: bool,
) -> tuple[PolicyTimeline, ...]:
    """Returns the memory of no and of full checkpointing and of the winner, as far as it is told.

    Those in `known` are not drawn once more. With `must_run` no policy is drawn whose step does not
    run: where steps are counted while they run, one rank that fails leaves the others waiting.
    """
    named = {candidate.name: candidate for candidate in candidates}
    wanted = {named[name].policy.key: named[name] for name in (NONE, FULL) if name in named}
    if best is not None:
        wanted.setdefault(best.policy.key, best)
    timelines = {entry.policy_key: entry.timeline for entry in known}
    found = []
    for key, candidate in wanted.items():
        timeline = timelines.get(key)
        if timeline is None and (candidate.measurement is not None or not must_run):
            timeline = draw(candidate.policy)
        if timeline is not None:
            found.append(PolicyTimeline(name=candidate.name, policy_key=key, timeline=timeline))
    return tuple(found)
