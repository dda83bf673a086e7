"""From the best trials to one winner: measured again side by side, then verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sac_search.records import Verification
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, rank
from sac_search.study.measurer import Measurer
from sac_search.study.store import Confirmation, StudyStore, Verified
from sac_search.worker.session import Verdict

FINALISTS = 5
CONFIRMING_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The outcome of the last stage."""

    best: Candidate | None
    """The best candidate that passed; None when none did."""
    verification: Verification | None
    """Its figures."""
    rejected: tuple[str, ...]
    """Candidates that did not pass, each with the reason."""


def confirm(
    store: StudyStore, measurer: Measurer, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Measures the best few again, interleaved, and returns them with the new figures, best first.

    No and full checkpointing are measured along with them, since the winner is held against those.
    The figures are kept in the study, so that a continued search whose finalists are the same does
    not measure them once more.
    """
    finalists = rank(candidates, store.budget_bytes)[:FINALISTS]
    if not finalists:
        return []
    ends = [c for c in candidates if c.name in (NONE, FULL) and c.measurement is not None]
    compared = {candidate.policy.key: candidate for candidate in [*finalists, *ends]}
    keys = tuple(compared)
    confirmation = store.confirmation
    if confirmation is None or confirmation.keys != keys:
        outcomes = measurer.compare([c.policy for c in compared.values()], CONFIRMING_STEPS)
        store.write("confirmation", Confirmation(keys=keys, outcomes=tuple(outcomes)))
    kept = {candidate.policy.key for candidate in finalists}
    confirmed = with_confirmed_figures(store, candidates)
    return rank((c for c in confirmed if c.policy.key in kept), store.budget_bytes)


def with_confirmed_figures(store: StudyStore, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates, those measured side by side with the figures of that."""
    confirmation, anchor_seconds = store.confirmation, store.anchor_seconds
    if confirmation is None or anchor_seconds is None:
        return list(candidates)
    newer = dict(zip(confirmation.keys, confirmation.outcomes, strict=True))
    return [
        candidate.with_outcome(newer.get(candidate.policy.key, candidate.outcome), anchor_seconds)
        for candidate in candidates
    ]


def choose_winner(
    store: StudyStore,
    measurer: Measurer,
    ranked: Sequence[Candidate],
    on_verdict: Callable[[Candidate, Verdict], None] = lambda candidate, verdict: None,
) -> Winner:
    """Returns the first of `ranked` whose gradients are those of the run without checkpointing."""
    rejected: list[str] = []
    known = {entry.key: entry.verification for entry in store.verified}
    for candidate in ranked:
        verification = known.get(candidate.policy.key)
        if verification is None:
            verdict = measurer.verify(candidate.policy)
            on_verdict(candidate, verdict)
            verification = verdict.verification
            if verification is None:
                assert verdict.failure is not None
                rejected.append(f"{candidate.name}: {verdict.failure.kind}")
                continue
            entry = Verified(key=candidate.policy.key, verification=verification)
            store.write("verified", [*store.verified, entry])
        if verification.passed:
            return Winner(best=candidate, verification=verification, rejected=tuple(rejected))
        rejected.append(
            f"{candidate.name}: wrong gradients, {verification.worst_parameter} off by "
            f"{verification.worst_gradient_difference:.1e}"
        )
    return Winner(best=None, verification=None, rejected=tuple(rejected))


def stored_winner(store: StudyStore) -> Winner:
    """Returns the winner of a study that was searched before, without measuring anything."""
    verified = {entry.key: entry.verification for entry in store.verified}
    confirmed = with_confirmed_figures(store, store.candidates())
    for candidate in rank(confirmed, store.budget_bytes):
        verification = verified.get(candidate.policy.key)
        if verification is not None and verification.passed:
            return Winner(best=candidate, verification=verification, rejected=())
    return Winner(best=None, verification=None, rejected=())
