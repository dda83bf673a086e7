"""The protocol through which the study measures: a worker, a session, a script in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sac_search.forecaster import ProfileRequest
from sac_search.planning import DryRun
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.records import Outcome
from sac_search.space import SearchSpace
from sac_search.timeline import Timeline
from sac_search.worker.session import Description, ForecastPeak, Verdict


class Measurer(Protocol):
    """Whatever can run the workload's step under a policy."""

    def describe(self) -> Description:
        """Returns the workload's environment and layers."""

    def measure(self, policy: Policy) -> Outcome:
        """Returns what `policy` costs. Never raises for what the policy does."""

    def compare(self, policies: Sequence[Policy], steps: int) -> list[Outcome]:
        """Returns what each policy costs, `steps` timed steps each, interleaved."""

    def forecast(self, policy: Policy) -> ForecastPeak:
        """Returns the peak that `policy` would have, without running it, where that can be told."""

    def timeline(self, policy: Policy) -> Timeline | None:
        """Returns the memory of a step under `policy`, op by op, where that can be told."""

    def profile(self, request: ProfileRequest) -> Profile | None:
        """Returns sizes and prices of the layers; None where there are no forecasts."""

    def verify(self, policy: Policy) -> Verdict:
        """Returns how far the policy's gradients are from those without checkpointing."""


def profile_of(measurer: Measurer, space: SearchSpace) -> Profile | None:
    """Returns sizes and prices of the layers of `space`; None where there are no forecasts."""
    request = ProfileRequest(
        layers=space.layers,
        granularity=space.granularity,
        save_collectives=space.save_collectives,
    )
    return measurer.profile(request)


def dry_runs(measurer: Measurer) -> DryRun:
    """Returns what tells a planner the peaks of a policy's step, by forecast."""
    return lambda policy: measurer.forecast(policy).phase_peak_bytes or None
