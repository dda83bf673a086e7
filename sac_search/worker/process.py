"""One worker process and its pipes: starts it, asks it, times it out, ends it."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sac_search import interrupts
from sac_search.failures import make_failure
from sac_search.records import Failure, FailureKind, encode
from sac_search.worker.protocol import Reply, Request

# Set in the worker's environment, so that a file that searches when it is imported is noticed.
IN_WORKER = "SAC_SEARCH_IN_WORKER"
_LOG_TAIL_LINES = 8
_LOG_TAIL_BYTES = 2**16
_POLL_SECONDS = 1.0
_PACKAGE_ROOT = Path(__file__).parents[2]
# With the current folder last in the path instead of first: a user's random.py or profile.py must
# not be what torch imports.
_START = (
    "import sys; sys.path += [sys.argv.pop(), '']; "
    "from sac_search.{}.__main__ import main; sys.exit(main())"
)


def start_command(package: str) -> list[str]:
    """Returns what starts a package of sac-search in a process of its own, as `python -m` does."""
    return [sys.executable, "-P", "-c", _START.format(package), str(_PACKAGE_ROOT)]


class WorkerLost(Exception):
    """The worker hung, died or wrote nonsense."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class WorkerProcess:
    """One child process and its pipes.

    Linux ends the process with the thread that made this, so that has to be one that stays.
    """

    def __init__(self, log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log_path = log_path
        self._number = 0
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._child = subprocess.Popen(
                start_command("worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {}), IN_WORKER: "1"},
                start_new_session=True,
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._requests: BinaryIO = self._child.stdin  # type: ignore[assignment]
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(
            target=_read_lines, args=(self._child.stdout, self._lines), daemon=True
        ).start()

    def exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Reply:
        """Sends a request and returns the reply to it.

        Raises:
            WorkerLost: the process hung, died or wrote nonsense.
        """
        self._number += 1
        request = Request(
            number=self._number, method=method, argument=msgspec.Raw(encode(argument))
        )
        try:
            self._requests.write(encode(request) + b"\n")
            self._requests.flush()
        except OSError:
            raise WorkerLost(self._death()) from None
        try:
            line = self._next_line(timeout_seconds)
        except queue.Empty:
            message = f"no answer within {timeout_seconds:.0f} s"
            raise WorkerLost(make_failure(FailureKind.TIMEOUT, message)) from None
        if not line:
            raise WorkerLost(self._death())
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except msgspec.DecodeError as error:
            raise WorkerLost(nonsense(error)) from None
        if reply.number != self._number:
            raise WorkerLost(make_failure(FailureKind.CRASH, "its answers are out of order"))
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
            size = self._log_path.stat().st_size
            log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
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


def nonsense(error: Exception) -> Failure:
    """Returns the failure of a worker whose answer cannot be read."""
    return make_failure(FailureKind.CRASH, f"its answer made no sense: {error}")
