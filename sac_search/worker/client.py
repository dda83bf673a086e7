"""The parent's side of the worker: starts it, asks it, times it out, replaces it.

Never touches a device. A worker that hangs, dies or writes nonsense costs one trial, not the
search.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sac_search import errors
from sac_search.failures import OF_MEMORY, make_failure
from sac_search.forecaster import ProfileRequest
from sac_search.policy import COMPILE_ALONE, Policy
from sac_search.profile import Profile
from sac_search.records import Failure, FailureKind, Outcome
from sac_search.timeline import Timeline
from sac_search.worker.group import GroupWorker, current_group
from sac_search.worker.process import WorkerLost, WorkerProcess, nonsense
from sac_search.worker.protocol import METHODS, Comparison, Reply
from sac_search.worker.session import (
    Description,
    ForecastPeak,
    SessionSettings,
    Verdict,
)

_LONGEST_COMPILE_SECONDS = 1800.0
# Without a profile nothing is planned, so one lost worker is not the end of it.
_PROFILE_TRIES = 2


class Isolation(enum.StrEnum):
    """What gets a process of its own."""

    SEARCH = "search"
    TRIAL = "trial"


class WorkerClient:
    """A `Measurer` that does its work in a child process.

    Where this process leads the ranks of a distributed job, in one of every rank at the same time.
    """

    def __init__(
        self,
        settings: SessionSettings,
        log_path: Path,
        *,
        trial_timeout_seconds: float | None = None,
        isolation: Isolation = Isolation.SEARCH,
    ) -> None:
        self._settings = settings
        self._log_path = log_path
        self._trial_timeout_seconds = trial_timeout_seconds
        self._isolation = isolation
        self._process: WorkerProcess | GroupWorker | None = None
        self._load_seconds: float | None = None
        self._has_measured = False
        self._baseline_seconds: float | None = None

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def describe(self) -> Description:
        """Loads the workload and traces it.

        Raises:
            UsageError, WorkloadError: as `open_session` does.
        """
        try:
            started = time.monotonic()
            description: Description = self._ask("describe", True, None)
            self._load_seconds = time.monotonic() - started
        except WorkerLost as lost:
            raise errors.WorkloadError(
                f"the process that loads the workload died ({lost.failure.message})"
            ) from None
        return description

    def measure(self, policy: Policy) -> Outcome:
        """Returns what `policy` costs; a lost worker is an outcome too."""
        outcome = self._measure(policy)
        # The parameters may have diverged in the steps before; a new worker starts from the first.
        return self._measure(policy) if _has_diverged(outcome.failure) else outcome

    def compare(self, policies: Sequence[Policy], steps: int) -> list[Outcome]:
        """Returns what each policy costs, steps interleaved; measured one by one if that fails.

        Also one by one where each trial has a process of its own.
        """
        if self._isolation is Isolation.TRIAL:
            return [self.measure(policy) for policy in policies]
        comparison = Comparison(policies=tuple(policies), steps=steps)
        try:
            outcomes: list[Outcome] = self._ask(
                "compare", comparison, self._timeout(max(1, len(policies) * steps // 5), *policies)
            )
        except WorkerLost:
            return [self.measure(policy) for policy in policies]
        return [
            self._measure(policy) if _has_diverged(outcome.failure) else outcome
            for policy, outcome in zip(policies, outcomes, strict=True)
        ]

    def forecast(self, policy: Policy) -> ForecastPeak:
        """Returns the peak that `policy` would have, without running it."""
        try:
            peak: ForecastPeak = self._ask("forecast", policy, self._forecast_timeout(1))
        except WorkerLost as lost:
            return ForecastPeak(problem=lost.failure.message)
        return peak

    def timeline(self, policy: Policy) -> Timeline | None:
        """Returns the memory of a step under `policy`, op by op; None where it cannot be told."""
        with contextlib.suppress(WorkerLost):
            found: Timeline | None = self._ask("timeline", policy, self._forecast_timeout(1))
            return found
        return None

    def profile(self, request: ProfileRequest) -> Profile | None:
        """Returns sizes and prices of the layers; None where there are no forecasts."""
        for _ in range(_PROFILE_TRIES):
            with contextlib.suppress(WorkerLost):
                profile: Profile | None = self._ask("profile", request, self._forecast_timeout(10))
                return profile
        return None

    def verify(self, policy: Policy) -> Verdict:
        """Compares the policy's gradients with those of the run without checkpointing."""
        verdict = self._verify(policy)
        return self._verify(policy) if _has_diverged(verdict.failure) else verdict

    def try_module(self, path: Path) -> tuple[Verdict, Outcome]:
        """Verifies and measures an exported policy module, applied by its own code."""
        try:
            # Whether the module compiles is not known here.
            verdict: Verdict = self._ask(
                "verify_module", str(path), self._timeout(2, COMPILE_ALONE, COMPILE_ALONE)
            )
            outcome: Outcome = self._ask(
                "measure_module", str(path), self._timeout(1, COMPILE_ALONE)
            )
        except WorkerLost as lost:
            return Verdict(failure=lost.failure), Outcome(failure=lost.failure)
        return verdict, outcome

    def close(self) -> None:
        """Ends the worker."""
        self._has_measured = False
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _measure(self, policy: Policy) -> Outcome:
        self._begin_trial()
        started = time.monotonic()
        try:
            outcome: Outcome = self._ask("run_steps", policy, self._timeout(1, policy))
        except WorkerLost as lost:
            return Outcome(failure=lost.failure)
        # One that failed says nothing of how long the others take: it may have failed at once.
        if self._baseline_seconds is None and outcome.measurement is not None:
            self._baseline_seconds = time.monotonic() - started
        if self._process is None:  # it was ended: a new one is for the next trial
            return outcome
        return replace(outcome, forecast_peak_bytes=self.forecast(policy).peak_bytes)

    def _begin_trial(self) -> None:
        if self._isolation is Isolation.TRIAL and self._has_measured:
            self.close()
        self._has_measured = True

    def _verify(self, policy: Policy) -> Verdict:
        self._begin_trial()
        verdict = self._ask_verdict("verify", policy)
        failure = verdict.failure
        if current_group() is None or failure is None or failure.kind not in OF_MEMORY:
            return verdict
        # One rank cannot try again without the others; with new workers all of them do.
        return self._ask_verdict("verify_with_full", policy)

    def _ask_verdict(self, method: str, policy: Policy) -> Verdict:
        try:
            verdict: Verdict = self._ask(method, policy, self._timeout(2, policy, policy))
        except WorkerLost as lost:
            return Verdict(failure=lost.failure)
        return verdict

    @property
    def _load_limit_seconds(self) -> float | None:
        """What loading and tracing again may take; the first time ran a few steps as well."""
        return None if self._load_seconds is None else max(300.0, 20 * self._load_seconds)

    def _forecast_timeout(self, forecasts: int) -> float | None:
        # A dry run takes what Python takes for a step, and is no part of a trial.
        limit_seconds = self._load_limit_seconds
        return None if limit_seconds is None else limit_seconds * forecasts

    def _timeout(self, measurements: int, *policies: Policy) -> float | None:
        if self._trial_timeout_seconds is not None:
            return self._trial_timeout_seconds * measurements
        # How long compiling takes has nothing to do with how long a step does.
        compiling = _LONGEST_COMPILE_SECONDS * sum(p.compiled is not None for p in policies)
        if self._baseline_seconds is not None:
            return max(60.0, 20 * self._baseline_seconds) * measurements + compiling
        limit_seconds = self._load_limit_seconds
        return None if limit_seconds is None else limit_seconds * measurements + compiling

    def _ask(self, method: str, argument: Any, timeout_seconds: float | None) -> Any:
        if self._process is None:
            self._process = self._start()
            self._load()
        return self._exchange(method, argument, timeout_seconds)

    def _start(self) -> WorkerProcess | GroupWorker:
        group = current_group()
        return WorkerProcess(self._log_path) if group is None else group.start(self._log_path)

    def _load(self) -> None:
        try:
            timeout_seconds = self._load_limit_seconds
            self._exchange("load", self._settings, timeout_seconds)
            if timeout_seconds is None:
                return
            # What forecasts need; a trial's own time is not for this.
            self._exchange("describe", True, timeout_seconds)
        except errors.SacSearchError as error:
            if self._load_seconds is None:
                raise
            # It could be loaded before, so the search goes on: the next trial tries again.
            message = f"the workload could not be loaded again: {error}"
            raise WorkerLost(make_failure(FailureKind.CRASH, message)) from None

    def _exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Any:
        assert self._process is not None
        try:
            reply = self._process.exchange(method, argument, timeout_seconds)
            if reply.error is not None:
                raise local_error(reply)
            result = msgspec.json.decode(reply.result, type=METHODS[method].result_type)
        except msgspec.DecodeError as error:
            self.close()
            raise WorkerLost(nonsense(error)) from None
        except BaseException:
            # Also when interrupted: an answer that nobody waits for must not meet the next request.
            self.close()
            raise
        if not reply.healthy:
            self.close()
        return result


def _has_diverged(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.NON_FINITE_LOSS


def local_error(reply: Reply) -> errors.SacSearchError:
    """Returns the exception that the worker's side raised."""
    assert reply.error is not None
    error_type = getattr(errors, reply.error.type_name, errors.WorkerError)
    if error_type is errors.WorkloadError:
        return errors.WorkloadError(reply.error.message, user_traceback=reply.error.user_traceback)
    found: errors.SacSearchError = error_type(reply.error.message)
    return found
