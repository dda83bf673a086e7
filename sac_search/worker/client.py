"""The parent's side of the worker: starts it, asks it, times it out, replaces it.

Never touches a device. A worker that hangs, dies or writes nonsense costs one trial, not the
search.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sac_search import errors, interrupts
from sac_search.failures import make_failure
from sac_search.forecaster import ProfileRequest
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.records import Failure, FailureKind, Outcome, encode
from sac_search.worker.protocol import METHODS, Comparison, Reply, Request
from sac_search.worker.session import Description, ForecastPeak, SessionSettings, Verdict

_LOG_TAIL_LINES = 8
# Set in the worker's environment, so that a file that searches when it is imported is noticed.
IN_WORKER = "SAC_SEARCH_IN_WORKER"
_POLL_SECONDS = 1.0
_PACKAGE_ROOT = Path(__file__).parents[2]
# As `python -m sac_search.worker`, with the current folder last in the path instead of first: a
# user's random.py or profile.py must not be what torch imports.
_START = (
    "import sys; sys.path += [sys.argv.pop(), '']; "
    "from sac_search.worker.__main__ import main; sys.exit(main())"
)


class WorkerClient:
    """A `Measurer` that does its work in a child process."""

    def __init__(
        self,
        settings: SessionSettings,
        log_path: Path,
        *,
        trial_timeout_seconds: float | None = None,
        load_timeout_seconds: float | None = None,
    ) -> None:
        self._settings = settings
        self._log_path = log_path
        self._trial_timeout_seconds = trial_timeout_seconds
        self._load_timeout_seconds = load_timeout_seconds
        self._process: _Process | None = None
        self._was_loaded = False
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
            description: Description = self._ask("describe", True, self._load_timeout_seconds)
        except _WorkerLost as lost:
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
        """Returns what each policy costs, steps interleaved; measured one by one if that fails."""
        comparison = Comparison(policies=tuple(policies), steps=steps)
        try:
            outcomes: list[Outcome] = self._ask(
                "compare", comparison, self._timeout(max(1, len(policies) * steps // 5))
            )
        except _WorkerLost:
            return [self.measure(policy) for policy in policies]
        return [
            self._measure(policy) if _has_diverged(outcome.failure) else outcome
            for policy, outcome in zip(policies, outcomes, strict=True)
        ]

    def forecast(self, policy: Policy) -> ForecastPeak:
        """Returns the peak that `policy` would have, without running it."""
        try:
            peak: ForecastPeak = self._ask("forecast", policy, self._timeout(1))
        except _WorkerLost as lost:
            return ForecastPeak(problem=lost.failure.message)
        return peak

    def profile(self, request: ProfileRequest) -> Profile | None:
        """Returns sizes and prices of the layers; None where there are no forecasts."""
        try:
            profile: Profile | None = self._ask("profile", request, self._timeout(10))
        except _WorkerLost:
            return None
        return profile

    def verify(self, policy: Policy) -> Verdict:
        """Compares the policy's gradients with those of the run without checkpointing."""
        verdict = self._verify(policy)
        return self._verify(policy) if _has_diverged(verdict.failure) else verdict

    def try_module(self, path: Path) -> tuple[Verdict, Outcome]:
        """Verifies and measures an exported policy module, applied by its own code."""
        try:
            verdict: Verdict = self._ask("verify_module", str(path), self._timeout(2))
            outcome: Outcome = self._ask("measure_module", str(path), self._timeout(1))
        except _WorkerLost as lost:
            return Verdict(failure=lost.failure), Outcome(failure=lost.failure)
        return verdict, outcome

    def close(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _measure(self, policy: Policy) -> Outcome:
        started = time.monotonic()
        try:
            outcome: Outcome = self._ask("measure", policy, self._timeout(1))
        except _WorkerLost as lost:
            return Outcome(failure=lost.failure)
        # One that failed says nothing of how long the others take: it may have failed at once.
        if self._baseline_seconds is None and outcome.measurement is not None:
            self._baseline_seconds = time.monotonic() - started
        return outcome

    def _verify(self, policy: Policy) -> Verdict:
        try:
            verdict: Verdict = self._ask("verify", policy, self._timeout(2))
        except _WorkerLost as lost:
            return Verdict(failure=lost.failure)
        return verdict

    def _timeout(self, measurements: int) -> float | None:
        if self._trial_timeout_seconds is not None:
            return self._trial_timeout_seconds * measurements
        if self._baseline_seconds is None:
            return None
        return max(60.0, 20 * self._baseline_seconds) * measurements

    def _ask(self, method: str, argument: Any, timeout_seconds: float | None) -> Any:
        if self._process is None:
            self._process = _Process(self._log_path)
            self._load()
        return self._exchange(method, argument, timeout_seconds)

    def _load(self) -> None:
        try:
            self._exchange("load", self._settings, self._load_timeout_seconds)
        except errors.SacSearchError as error:
            if not self._was_loaded:
                raise
            # It could be loaded before, so the search goes on: the next trial tries again.
            message = f"the workload could not be loaded again: {error}"
            raise _WorkerLost(make_failure(FailureKind.CRASH, message)) from None
        self._was_loaded = True

    def _exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Any:
        assert self._process is not None
        try:
            reply = self._process.exchange(method, argument, timeout_seconds)
            if reply.error is not None:
                raise _local_error(reply)
            result = msgspec.json.decode(reply.result, type=METHODS[method].result_type)
        except msgspec.DecodeError as error:
            self.close()
            failure = make_failure(FailureKind.CRASH, f"its answer made no sense: {error}")
            raise _WorkerLost(failure) from None
        except BaseException:
            # Also when interrupted: an answer that nobody waits for must not meet the next request.
            self.close()
            raise
        if not reply.healthy:
            self.close()
        return result


class _WorkerLost(Exception):
    """The worker hung, died or wrote nonsense."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Process:
    """One child process and its pipes."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._number = 0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, IN_WORKER: "1"},
                start_new_session=True,
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._requests: BinaryIO = self._child.stdin  # type: ignore[assignment]
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(
            target=_read_lines, args=(self._child.stdout, self._lines), daemon=True
        ).start()

    def exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Reply:
        """Sends a request and returns the reply to it."""
        self._number += 1
        request = Request(
            number=self._number, method=method, argument=msgspec.Raw(encode(argument))
        )
        try:
            self._requests.write(encode(request) + b"\n")
            self._requests.flush()
        except OSError:
            raise _WorkerLost(self._death()) from None
        try:
            line = self._next_line(timeout_seconds)
        except queue.Empty:
            message = f"no answer within {timeout_seconds:.0f} s"
            raise _WorkerLost(make_failure(FailureKind.TIMEOUT, message)) from None
        if not line:
            raise _WorkerLost(self._death())
        reply = msgspec.json.decode(line, type=Reply)
        if reply.number != self._number:
            raise _WorkerLost(make_failure(FailureKind.CRASH, "its answers are out of order"))
        return reply

    def _next_line(self, timeout_seconds: float | None) -> bytes:
        """Returns the next line; an empty one when the process is dead.

        Raises:
            queue.Empty: there is none in time.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            interrupts.raise_if_unseen()
            dead = self._child.poll() is not None
            left_seconds = max(0.0, deadline - time.monotonic())
            try:
                return self._lines.get(timeout=min(_POLL_SECONDS, left_seconds))
            except queue.Empty:
                # Processes that user code started may hold the pipe open after the worker's death.
                if dead:
                    return b""
                if left_seconds <= _POLL_SECONDS:
                    raise

    def stop(self) -> None:
        """Closes the pipes and ends the process and whatever it started."""
        with contextlib.suppress(OSError):
            self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _death(self) -> Failure:
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return make_failure(FailureKind.CRASH, "it closed its pipe")
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        kind = FailureKind.HOST_OUT_OF_MEMORY if code == -signal.SIGKILL else FailureKind.CRASH
        return make_failure(kind, f"{ended}; {self._log_path} ends with: {self._log_tail()}")

    def _log_tail(self) -> str:
        """Returns the last words of this process: after a crash, where it happened."""
        with contextlib.suppress(OSError), self._log_path.open(errors="replace") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log if line.strip()]
            crashes = [i for i, line in enumerate(lines) if line.startswith("Current thread 0x")]
            start = crashes[-1] if crashes else max(0, len(lines) - _LOG_TAIL_LINES)
            return " | ".join(lines[start : start + _LOG_TAIL_LINES])
        return ""


def _read_lines(stream: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    with stream, contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _has_diverged(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.NON_FINITE_LOSS


def _local_error(reply: Reply) -> errors.SacSearchError:
    assert reply.error is not None
    error_type = getattr(errors, reply.error.type_name, errors.WorkerError)
    if error_type is errors.WorkloadError:
        return errors.WorkloadError(reply.error.message, user_traceback=reply.error.user_traceback)
    found: errors.SacSearchError = error_type(reply.error.message)
    return found
