"""A policy with the figures that were measured for it, and which of several is best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sac_search.policy import Policy
from sac_search.records import Evidence, Failure, FailureKind, Measurement, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy that was tried."""

    name: str
    """`none`, `full`, `save matmul` or `trial 17`."""
    policy: Policy
    """The policy."""
    outcome: Outcome
    """What came of it."""
    step_seconds: float | None
    """Its step time, drift taken out; None when it failed."""
    is_baseline: bool = False
    """Whether it is one of the policies that people use today."""
    imported_from: str | None = None
    """The study that measured it, when that is another one of the same environment."""
    is_reference: bool = False
    """Whether it is only there to compare with: eager, where the model has to be compiled."""

    @property
    def measurement(self) -> Measurement | None:
        """The figures, when the step ran."""
        return self.outcome.measurement

    @property
    def failure(self) -> Failure | None:
        """The reason, when it did not."""
        return self.outcome.failure

    @property
    def evidence(self) -> Evidence:
        """Where its figures, or its failure, come from."""
        if self.measurement is not None:
            return self.measurement.evidence
        return Evidence.FORECAST if self.is_ruled_out else Evidence.MEASURED

    @property
    def is_ruled_out(self) -> bool:
        """Whether it was never run, since its forecast is over the budget."""
        return self.failure is not None and self.failure.kind is FailureKind.FORECAST_OVER_BUDGET

    def fits(self, budget_bytes: int) -> bool:
        """Whether it was measured to stay under the budget."""
        return self.measurement is not None and self.measurement.peak_bytes <= budget_bytes

    def with_outcome(self, outcome: Outcome, anchor_seconds: float) -> Candidate:
        """Returns the same policy with newer figures; a forecast that they lack is kept."""
        if outcome.forecast_peak_bytes is None:
            outcome = replace(outcome, forecast_peak_bytes=self.outcome.forecast_peak_bytes)
        seconds = drift_free_seconds(outcome, anchor_seconds)
        return replace(self, outcome=outcome, step_seconds=seconds)


def drift_free_seconds(outcome: Outcome, anchor_seconds: float) -> float | None:
    """Returns the step time as it would have been when the anchor was measured.

    `anchor_seconds` is what the reference policy's step took then; each measurement knows its own
    ratio to the reference steps that ran beside it.
    """
    if outcome.measurement is None:
        return None
    return outcome.measurement.relative_seconds * anchor_seconds


def rank(candidates: Iterable[Candidate], budget_bytes: int) -> list[Candidate]:
    """Returns the candidates that fit, best first.

    Faster is better. Of those that are within the noise of the fastest, the one with the lower peak
    comes first, and of equal peaks the simpler policy.
    """
    fitting = [
        c for c in candidates if c.fits(budget_bytes) and c.policy.exportable and not c.is_reference
    ]
    ranked: list[Candidate] = []
    while fitting:
        fastest = min(fitting, key=_seconds)
        alike = [c for c in fitting if _within_noise(c, fastest)]
        chosen = min(alike, key=lambda c: (peak_of(c), c.policy.complexity, _seconds(c)))
        ranked.append(chosen)
        fitting.remove(chosen)
    return ranked


# On a noisy machine nearly everything is within the noise; a larger gap than this is believed.
_LARGEST_TIE_FRACTION = 0.01


def _within_noise(candidate: Candidate, fastest: Candidate) -> bool:
    assert candidate.measurement is not None and fastest.measurement is not None
    noise = 2 * math.hypot(
        candidate.measurement.step_noise_fraction, fastest.measurement.step_noise_fraction
    )
    return _seconds(candidate) <= _seconds(fastest) * (1 + min(noise, _LARGEST_TIE_FRACTION))


def _seconds(candidate: Candidate) -> float:
    assert candidate.step_seconds is not None
    return candidate.step_seconds


def peak_of(candidate: Candidate) -> int:
    """Returns the measured peak of a candidate that ran."""
    assert candidate.measurement is not None
    return candidate.measurement.peak_bytes
