"""From the best trials to one winner: measured again side by side, then verified."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sac_search.records import Evidence, Failure, Verification
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, rank
from sac_search.study.measurer import Measurer
from sac_search.study.store import Confirmation, StudyStore, Verified
from sac_search.worker.session import Verdict

FINALISTS = 5
CONFIRMING_STEPS = 10
# On a noisy machine more steps tell the finalists apart, up to so many times as many.
_NOISE_WANTED_FRACTION = 0.01
_MOST_TIMES_STEPS = 4


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
    store: StudyStore,
    measurer: Measurer,
    candidates: Sequence[Candidate],
    steps: int = CONFIRMING_STEPS,
) -> list[Candidate]:
    """Measures the best few again, interleaved, and returns all that fit, those few in front.

    The best few are in the order of their new figures; the others follow, should none of them pass
    verification. No and full checkpointing are measured along with them, since the winner is held
    against those. Each takes `steps` steps; more, where steps have been so noisy that as many would
    not tell a hundredth. The figures are kept in the study, so that a continued search whose
    finalists are the same does not measure them once more, unless one of them failed.
    """
    finalists = rank(candidates, store.budget_bytes)[:FINALISTS]
    if not finalists:
        return []
    ends = [c for c in candidates if c.name in (NONE, FULL) and c.measurement is not None]
    compared = {candidate.policy.key: candidate for candidate in [*finalists, *ends]}
    keys = tuple(compared)
    first = {candidate.policy.key for candidate in finalists}
    confirmation = store.confirmation
    if confirmation is None or confirmation.keys != keys or not confirmation.is_whole:
        policies = [c.policy for c in compared.values()]
        found = measurer.compare(policies, enough_steps(finalists, steps))
        outcomes = dict(zip(keys, found, strict=True))
        # Where no finalist runs, though all of them did, the moment is a bad one (another process
        # fills the device): the figures stay as they were. The ends keep theirs in any case.
        if any(outcomes[key].measurement is not None for key in first):
            kept = {k: o for k, o in outcomes.items() if k in first or o.measurement is not None}
            store.write(
                "confirmation", Confirmation(keys=tuple(kept), outcomes=tuple(kept.values()))
            )
    confirmed = with_confirmed_figures(store, candidates)
    return [
        *rank((c for c in confirmed if c.policy.key in first), store.budget_bytes),
        *rank((c for c in confirmed if c.policy.key not in first), store.budget_bytes),
    ]


def enough_steps(finalists: Sequence[Candidate], steps: int) -> int:
    """Returns how many steps make the finalists' noise small, going by that of their trials."""
    measured = [c.measurement for c in finalists if c.measurement is not None]
    wanted = [m.steps * (m.step_noise_fraction / _NOISE_WANTED_FRACTION) ** 2 for m in measured]
    middle = statistics.median(wanted) if wanted else 0.0
    return round(min(max(steps, middle), _MOST_TIMES_STEPS * steps))


def known_candidates(store: StudyStore) -> list[Candidate]:
    """Returns everything that the study's results are made of: measured, or forecast."""
    if store.evidence is Evidence.FORECAST:
        return store.forecasts()
    return with_confirmed_figures(store, store.candidates())


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
    """Returns the first of `ranked` whose gradients are those of the run without checkpointing.

    The study remembers it.
    """
    rejected: list[str] = []
    for candidate in ranked:
        verification = verified(store, measurer, candidate, on_verdict)
        if isinstance(verification, Failure):
            rejected.append(f"{candidate.name}: {verification.kind}")
            continue
        if verification.passed:
            store.write("winner", candidate.policy.key)
            return Winner(best=candidate, verification=verification, rejected=tuple(rejected))
        rejected.append(describe_rejected(candidate, verification))
    store.write("winner", None)
    return Winner(best=None, verification=None, rejected=tuple(rejected))


def verified(
    store: StudyStore,
    measurer: Measurer,
    candidate: Candidate,
    on_verdict: Callable[[Candidate, Verdict], None] = lambda candidate, verdict: None,
) -> Verification | Failure:
    """Returns the verification of a candidate, which the study keeps, or why its step did not run.

    Verified once and for all; `on_verdict` is told of a new one.
    """
    for entry in store.verified:
        if entry.key == candidate.policy.key:
            return entry.verification
    verdict = measurer.verify(candidate.policy)
    on_verdict(candidate, verdict)
    if verdict.verification is None:
        assert verdict.failure is not None
        return verdict.failure
    verification = _finite(verdict.verification)
    entry = Verified(key=candidate.policy.key, verification=verification)
    store.write("verified", [*store.verified, entry])
    return verification


def known_as_wrong(store: StudyStore, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns those of `candidates` that were verified before and did not pass."""
    wrong = {entry.key for entry in store.verified if not entry.verification.passed}
    return [candidate for candidate in candidates if candidate.policy.key in wrong]


def stored_winner(store: StudyStore) -> Winner:
    """Returns the winner of a study that was searched before, without measuring anything."""
    verified = {entry.key: entry.verification for entry in store.verified}
    best, rejected, winner = None, [], store.winner
    for candidate in known_candidates(store):
        verification = verified.get(candidate.policy.key)
        if candidate.policy.key == winner:
            best = candidate
        elif verification is not None and not verification.passed:
            rejected.append(describe_rejected(candidate, verification))
    return Winner(
        best=best,
        verification=verified.get(best.policy.key) if best is not None else None,
        rejected=tuple(rejected),
    )


def describe_rejected(candidate: Candidate, verification: Verification) -> str:
    """Returns why a candidate is not to be used, in a sentence."""
    text = (
        f"{candidate.name}: wrong gradients, {verification.worst_parameter} off by "
        f"{verification.worst_gradient_difference:.1e}"
    )
    return f"{text} ({verification.note})" if verification.note else text


def _finite(verification: Verification) -> Verification:
    """Returns the verification with figures that JSON can hold: a NaN gradient is off by a lot."""

    def finite(value: float) -> float:
        return value if math.isfinite(value) else sys.float_info.max

    return replace(
        verification,
        loss_difference=finite(verification.loss_difference),
        worst_gradient_difference=finite(verification.worst_gradient_difference),
        noise=finite(verification.noise),
        tolerance=finite(verification.tolerance),
    )
