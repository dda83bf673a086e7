"""Forecasts for one loaded workload, and its profile: what the planner needs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sac_search.apply import applied
from sac_search.errors import CannotForecast
from sac_search.failures import failure_from
from sac_search.forecast import (
    Forecast,
    forecast_step,
    foreign_tensor_bytes,
    record_values,
    track_step,
)
from sac_search.policy import Policy, checkpoint_layers
from sac_search.profile import DryRun, Profile, build_profile
from sac_search.ranks import ALONE, Peers
from sac_search.space import Granularity
from sac_search.timeline import Timeline
from sac_search.trace import LayerTrace
from sac_search.workload import Workload
from sac_search.workspaces import learn_workspaces

# What the dispatch modes of a policy cost per op, forward and recompute together, in seconds: a
# guess to begin with, for "recompute all (policy)" tells. On the CPU of a narrow decoder it was 20
# to 30 microseconds; an accelerator works on while the host asks.
_CPU_POLICY_CALL_SECONDS = 25e-6
_ACCELERATOR_POLICY_CALL_SECONDS = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to profile."""

    layers: tuple[LayerTrace, ...]
    """The layers as they were traced when the study began."""
    granularity: Granularity
    """What one decision covers."""
    save_collectives: bool = False
    """Whether what ranks send each other may be saved."""


class Forecaster:
    """Forecasts steps of one workload. Learns from one real step, under full checkpointing.

    Where fake tensors cannot take the step's path, since shapes depend on values, the step runs for
    real and is counted while it runs: as exact, but it needs the memory that it counts. Several
    ranks, which have to do alike, never find that out by trying: only where `why_tracked` gives a
    reason from the start are their steps counted like that, by all of them together.

    Raises:
        CannotForecast: not even that can be done, or with several ranks, not on all of them.
    """

    def __init__(
        self,
        workload: Workload,
        layers: Sequence[LayerTrace],
        device: torch.device,
        peers: Peers = ALONE,
        *,
        why_tracked: str = "",
    ) -> None:
        self._workload = workload
        self._device = device
        self._names = tuple(layer.name for layer in layers)
        full = checkpoint_layers(self._names)
        with applied(workload.bare_model, full):
            with record_values() as values:
                workload.run_forward()
            self._values = tuple(values)
            self._workspaces = learn_workspaces(workload.run_step, device)
        # A step that drops gradients at its start leaves them behind; the forecast makes its own.
        workload.drop_gradients()
        gc.collect()
        self._foreign_bytes = foreign_tensor_bytes(workload, device)
        self._forecasts: dict[str, Forecast] = {}
        self.why_tracked = why_tracked
        """Why steps are counted while they run for real; empty where they need not be."""
        if peers.size > 1:
            self._try_on_all_ranks(full, peers)
            return
        try:
            self.forecast(full)
        except CannotForecast as error:
            self.why_tracked = str(error)
            self.forecast(full)
        except Exception as error:  # a fake form may be stricter than the op itself
            first_line = str(error).partition("\n")[0]
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.why_tracked = f"under fake tensors it raises {type(error).__name__}: {first_line}"
            self.forecast(full)

    def forecast(self, policy: Policy) -> Forecast:
        """Returns what a step under `policy` would need. Each policy is dry-run once.

        Raises:
            CannotForecast: the step reads values that are not known, or does not fit when it runs.
        """
        # A plan's dry run, the check before a trial and the trial's record ask for the same one.
        if policy.key not in self._forecasts:
            forecast = self._track if self.why_tracked else self._forecast
            self._forecasts[policy.key] = forecast(policy)
        return self._forecasts[policy.key]

    def timeline(self, policy: Policy) -> Timeline | None:
        """Returns the memory of a step under `policy`, op by op.

        Raises:
            CannotForecast: as `forecast` does.
        """
        count = self._track if self.why_tracked else self._forecast
        return count(policy, with_timeline=True).timeline

    def profile(self, request: ProfileRequest) -> Profile:
        """Returns sizes and prices of the layers.

        Raises:
            CannotForecast: the step reads values that are not known.
        """
        return profile_workload(
            self._workload, request, self.forecast, on_cpu=self._device.type == "cpu"
        )

    def _try_on_all_ranks(self, policy: Policy, peers: Peers) -> None:
        problem = ""
        try:
            self.forecast(policy)
        except Exception as error:  # anything: whoever does not ask below is waited for
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        if peers.any(bool(problem)):
            raise CannotForecast(problem or "another rank's step cannot be forecast")

    def _forecast(self, policy: Policy, *, with_timeline: bool = False) -> Forecast:
        return forecast_step(
            self._workload,
            policy,
            workspaces=self._workspaces,
            values=self._values,
            layer_names=self._names,
            foreign_bytes=self._foreign_bytes,
            with_timeline=with_timeline,
        )

    def _track(self, policy: Policy, *, with_timeline: bool = False) -> Forecast:
        try:
            return track_step(
                self._workload,
                policy,
                device=self._device,
                workspaces=self._workspaces,
                layer_names=self._names,
                foreign_bytes=self._foreign_bytes,
                with_timeline=with_timeline,
            )
        except Exception as error:
            failure = failure_from(error)
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._workload.drop_gradients()
            raise CannotForecast(f"{failure.kind}: {failure.message}") from None


def profile_workload(
    workload: Workload, request: ProfileRequest, dry_run: DryRun, *, on_cpu: bool
) -> Profile:
    """Returns sizes and prices of a workload's layers.

    Raises:
        CannotForecast: the step cannot be dry-run.
    """
    return build_profile(
        request.layers,
        _gradient_bytes(workload, [layer.name for layer in request.layers]),
        dry_run,
        granularity=request.granularity,
        save_collectives=request.save_collectives,
        policy_call_seconds=(
            _CPU_POLICY_CALL_SECONDS if on_cpu else _ACCELERATOR_POLICY_CALL_SECONDS
        ),
    )


def _gradient_bytes(workload: Workload, names: Sequence[str]) -> dict[str, int]:
    return {
        name: sum(
            p.numel() * p.element_size()
            for p in workload.bare_model.get_submodule(name).parameters()
            if p.requires_grad
        )
        for name in names
    }
