"""The end of a search: the winner, everything that was tried, and what it all belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sac_search import records
from sac_search.compiling import CompileOptions
from sac_search.policy import Policy, policy_document
from sac_search.records import SCHEMA_VERSION, Environment, Evidence, Phase, Verification
from sac_search.study.baselines import COMPILE, FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.front import pareto_front, spot_of
from sac_search.study.goal import SPEED, Goal, Limits
from sac_search.study.insights import Insights
from sac_search.study.timelines import PolicyTimeline
from sac_search.trace import LayerTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found."""

    study_name: str
    """Name of the study."""
    folder: Path | None
    """Where its files are; None for a search that kept none."""
    budget_bytes: int
    """The budget."""
    environment: Environment
    """What all figures belong to."""
    candidates: tuple[Candidate, ...]
    """Everything that was measured, baselines first."""
    best: Candidate | None
    """The winner; None when nothing fits."""
    verification: Verification | None
    """Its gradients against those without checkpointing."""
    layers: tuple[LayerTrace, ...]
    """Checkpointable layers of the model, as they were traced."""
    floor_bytes: int | None
    """The peak that no policy can go under; None when full checkpointing was not measured."""
    stop_reason: str
    """Why the search stopped; empty where it has not ended."""
    evidence: Evidence = Evidence.MEASURED
    """Where all its figures come from."""
    bound_overhead_seconds: float | None = None
    """Step time above that without checkpointing that no policy can go under, by the planner."""
    rejected: tuple[str, ...] = ()
    """Names of candidates that did not pass verification, each with the reason."""
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""
    interrupted: bool = False
    """Whether the user stopped it."""
    compile_options: CompileOptions | None = None
    """How what is compiled is compiled; None where nothing is."""
    insights: Insights | None = None
    """What the search believed at its end; None where nothing could be planned."""
    arguments: tuple[str, ...] = ()
    """What says on the command line, behind the workload, how it was searched; empty for a study of
    a release that did not keep it."""
    report_path: Path | None = None
    """Its report; None where none was written."""
    timelines: tuple[PolicyTimeline, ...] = ()
    """Memory over one step: of no and full checkpointing and the winner, where it is known."""
    goal: Goal = SPEED
    """What was searched for."""
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    """What was verified, passed or not, by the keys of the policies."""
    none_estimate_seconds: float | None = None
    """The step without checkpointing by the planner, where overheads are limited and it does not
    run; None everywhere else."""

    @property
    def policy(self) -> Policy:
        """The winner's policy.

        Raises:
            ValueError: nothing is within the limits.
        """
        if self.best is None:
            raise ValueError("no policy fits the budget")
        return self.best.policy

    @property
    def layer_count(self) -> int:
        """Checkpointable layers of the model."""
        return len(self.layers)

    @property
    def none(self) -> Candidate | None:
        """The step without checkpointing."""
        return find_candidate(self.candidates, NONE)

    @property
    def full(self) -> Candidate | None:
        """The step with every layer checkpointed."""
        return find_candidate(self.candidates, FULL)

    @property
    def compile_alone(self) -> Candidate | None:
        """The compiled step without checkpointing; None where nothing is compiled."""
        return find_candidate(self.candidates, COMPILE)

    @property
    def needs_no_checkpointing(self) -> bool:
        """Whether the step fits the budget as it is, and nothing makes it faster."""
        return self.best is not None and self.best.policy.changes_nothing

    @property
    def lower_bound_seconds(self) -> float | None:
        """The step time that no policy can go under, by the planner; None where it cannot tell."""
        none = self.none
        if none is None or none.step_seconds is None or self.bound_overhead_seconds is None:
            return None
        return none.step_seconds + self.bound_overhead_seconds

    @property
    def limits(self) -> Limits:
        """What candidates are held against."""
        none = self.none
        none_seconds = None if none is None else none.step_seconds
        return Limits(
            budget_bytes=self.budget_bytes,
            none_seconds=self.none_estimate_seconds if none_seconds is None else none_seconds,
        )

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether a candidate is within the study's limits."""
        return self.goal.fits(candidate, self.limits)

    def is_verified(self, candidate: Candidate) -> bool:
        """Returns whether a candidate's gradients were compared and are right."""
        verification = self.verifications.get(candidate.policy.key)
        return verification is not None and verification.passed

    def was_rejected(self, candidate: Candidate) -> bool:
        """Returns whether a candidate's gradients were compared and are wrong."""
        verification = self.verifications.get(candidate.policy.key)
        return verification is not None and not verification.passed

    def front(self) -> list[Candidate]:
        """Returns the verified policies that none of them beats, and what could beat those.

        The least peak first. Measured once, a policy may be on the front by luck, so it pushes no
        verified one aside.
        """
        sound = [c for c in self.candidates if not self.was_rejected(c)]
        verified = pareto_front([c for c in sound if self.is_verified(c)], self.budget_bytes)
        others = [c for c in pareto_front(sound, self.budget_bytes) if not self.is_verified(c)]
        return sorted([*verified, *others], key=lambda c: spot_of(c).peak_bytes)

    def estimated_overhead_of(self, candidate: Candidate) -> float | None:
        """Returns the overhead against the planner's estimate; None where it can be measured."""
        if self.overhead_of(candidate) is not None or self.none_estimate_seconds is None:
            return None
        return self.goal.overhead_of(candidate, self.limits)

    def overhead_of(self, candidate: Candidate) -> float | None:
        """Returns the step time above that without checkpointing, as a fraction of it."""
        none = self.none
        if none is None or not none.step_seconds or candidate.step_seconds is None:
            return None  # a coarse clock may say that a step takes no time
        return candidate.step_seconds / none.step_seconds - 1


def find_candidate(candidates: Sequence[Candidate], name: str) -> Candidate | None:
    """Returns the candidate of that name."""
    return next((candidate for candidate in candidates if candidate.name == name), None)


def floor_of(full: Candidate | None, layers: Sequence[LayerTrace]) -> int | None:
    """Returns the bytes that no checkpointing policy can go under, from the step under `full`.

    Parameters, gradients, optimizer state and its temporaries are there whatever is checkpointed.
    So is what the loss needs, save for the layers' inputs, which that step keeps and another might
    not.
    """
    if full is None or full.measurement is None:
        return None
    peaks = full.measurement.phase_peak_bytes
    inputs_bytes = sum(layer.input_bytes for layer in layers)
    fixed = [peaks.get(Phase.OPTIMIZER, 0), peaks.get(Phase.CLIPPING, 0)]
    return max(*fixed, peaks.get(Phase.LOSS, 0) - inputs_bytes)


def to_document(result: SearchResult) -> dict[str, Any]:
    """Returns `result.json` as dicts and lists: these fields and no others.

    What else there is to know of a trial is in the study itself.
    """
    best = None
    if result.best is not None:
        best = _entry(result.best, result) | {
            "overhead": result.overhead_of(result.best),
            "checkpointed_layers": len(result.best.policy.layers),
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "study_name": result.study_name,
        "evidence": str(result.evidence),
        "budget_bytes": result.budget_bytes,
        "environment": records.to_builtins(result.environment),
        "baselines": [_entry(c, result) for c in result.candidates if c.is_baseline],
        "trials": [_entry(c, result) for c in result.candidates if not c.is_baseline],
        "best": best,
        "lower_bound_seconds": result.lower_bound_seconds,
        "floor_bytes": result.floor_bytes,
        "verification": _verification(result.verification),
    }


def _verification(verification: Verification | None) -> dict[str, Any] | None:
    if verification is None:
        return None
    return {
        "passed": verification.passed,
        "loss_difference": verification.loss_difference,
        "worst_gradient_difference": verification.worst_gradient_difference,
        "reference": verification.reference,
    }


def _entry(candidate: Candidate, result: SearchResult) -> dict[str, Any]:
    measurement, failure = candidate.measurement, candidate.failure
    if measurement is None:
        assert failure is not None
        state, reason = "failed", f"{failure.kind}: {failure.message}"
    elif result.fits(candidate):
        state, reason = "fits", None
    elif candidate.fits(result.budget_bytes):
        state, reason = "too slow", None
    else:
        state, reason = "over budget", None
    return {
        "name": candidate.name,
        "policy": policy_document(candidate.policy),
        "state": state,
        "reason": reason,
        "step_seconds": candidate.step_seconds,
        "peak_bytes": measurement.peak_bytes if measurement else None,
        "forecast_peak_bytes": candidate.outcome.forecast_peak_bytes,
        "evidence": str(candidate.evidence),
    }
