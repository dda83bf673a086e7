"""Which of a study's policies to export for a memory that it was not searched for."""

from __future__ import annotations

from dataclasses import replace

from sac_search import units
from sac_search.errors import UsageError
from sac_search.records import Evidence
from sac_search.study.candidate import Candidate, peak_of, rank
from sac_search.study.goal import SPEED
from sac_search.study.result import SearchResult


def result_at(result: SearchResult, most_bytes: int) -> SearchResult:
    """Returns the result with the fastest verified policy that peaks at `most_bytes` at the most.

    Step times within the noise of each other count as equal; then the lower peak is taken.

    Raises:
        UsageError: no such policy was verified; says what there is instead.
    """
    verified = [c for c in result.candidates if result.is_verified(c)]
    ranked = rank(verified, most_bytes)
    if not ranked:
        raise UsageError(_nothing_at(result, verified, most_bytes))
    best = ranked[0]
    return replace(
        result,
        best=best,
        verification=result.verifications[best.policy.key],
        budget_bytes=most_bytes,
        bound_overhead_seconds=None,  # of another budget
        goal=SPEED,
    )


def faster_at(result: SearchResult, most_bytes: int) -> Candidate | None:
    """Returns a measured policy that is faster than the result's best there; it is not verified."""
    ranked = rank((c for c in result.candidates if not result.was_rejected(c)), most_bytes)
    if not ranked or result.best is None or result.is_verified(ranked[0]):
        return None
    return ranked[0]


def _nothing_at(result: SearchResult, verified: list[Candidate], most_bytes: int) -> str:
    at = units.format_gib(most_bytes)
    if result.evidence is Evidence.FORECAST:
        return (
            f"study {result.study_name!r} holds forecasts alone, and nothing of it is verified; "
            "search it on a device, or leave --at out"
        )
    lines = [f"study {result.study_name!r} has no verified policy that peaks at {at} or less."]
    if verified:
        least = min(verified, key=peak_of)
        lines.append(
            f"The smallest that is verified peaks at {units.format_gib_up(peak_of(least))}: "
            f"{least.name} ({least.policy.describe()})."
        )
    others = rank((c for c in result.candidates if not result.was_rejected(c)), most_bytes)
    if others:
        first = others[0]
        assert first.step_seconds is not None
        lines.append(
            f"{first.name} ({first.policy.describe()}) peaks at "
            f"{units.format_gib(peak_of(first))} and takes "
            f"{units.format_seconds(first.step_seconds)}, but it was never verified: search with "
            f"--budget-gb {most_bytes / units.GIB:.6g}, or with --pareto."
        )
    else:
        lines.append("Nothing that was measured peaks so low.")
    return "\n".join(lines)
