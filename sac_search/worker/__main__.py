"""The worker process: reads requests on its standard input, owns the device, writes replies.

Whatever user code prints goes to standard error, which the parent sends to a log. The process ends
itself as soon as its standard input closes, so it cannot outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

import msgspec

from sac_search import errors
from sac_search.rates import find_rates
from sac_search.records import encode
from sac_search.worker.dry_session import DrySession
from sac_search.worker.protocol import METHODS, Comparison, RemoteError, Reply, Request
from sac_search.worker.session import Session, SessionSettings, open_session

_PARENT_GONE_EXIT_CODE = 70
_PR_SET_PDEATHSIG = 1
_IMPORTED_LATE = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch.profiler")


def main() -> int:
    """Serves requests until the parent closes the pipe."""
    # Ctrl-C is the parent's to handle; it ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    _die_with_parent()
    # What torch made on import is for good: collections, of which a measurement needs several, and
    # the search for live tensors need not look at it. Steps and forecasts would import the rest.
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    gc.freeze()
    requests, replies = _take_over_pipes()
    pending: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, pending), daemon=True).start()
    server = _Server()
    while True:
        line = pending.get()
        replies.write(encode(server.answer(msgspec.json.decode(line, type=Request))) + b"\n")
        replies.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    return requests, replies


def _read_requests(requests: BinaryIO, pending: queue.SimpleQueue[bytes]) -> None:
    for line in requests:
        pending.put(line)
    if os.name == "posix" and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and whatever user code has started
    os._exit(_PARENT_GONE_EXIT_CODE)


def _die_with_parent() -> None:
    """Asks Linux to kill this process with its parent, even while it hangs in C with the GIL."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Server:
    """Answers requests with the one session that it holds."""

    def __init__(self) -> None:
        self._session: Session | DrySession | None = None

    def answer(self, request: Request) -> Reply:
        method = METHODS[request.method]
        argument = msgspec.json.decode(request.argument, type=method.argument_type)
        try:
            result = self._run(request.method, argument)
        except errors.SacSearchError as error:
            return Reply(number=request.number, error=RemoteError.of(error))
        except Exception as error:
            traceback.print_exc()
            text = "".join(traceback.format_exception_only(error)).strip()
            broken = errors.WorkerError(f"the worker failed in {request.method}: {text}")
            return Reply(number=request.number, error=RemoteError.of(broken), healthy=False)
        healthy = request.method in ("load", "describe") or self._loaded().is_healthy()
        return Reply(number=request.number, result=msgspec.Raw(encode(result)), healthy=healthy)

    def _run(self, method: str, argument: Any) -> Any:
        if method == "load":
            self._session = _open(argument)
            return True
        session = self._loaded()
        if method == "describe":
            return session.describe()
        if isinstance(session, Session) and method == "compare":
            comparison: Comparison = argument
            return session.compare(comparison.policies, comparison.steps)
        return getattr(session, method)(argument)

    def _loaded(self) -> Session | DrySession:
        if self._session is None:
            raise errors.WorkerError("the worker was asked to measure before it loaded a workload")
        return self._session


def _open(settings: SessionSettings) -> Session | DrySession:
    if settings.forecast_device is None:
        return open_session(settings)
    return DrySession(settings, find_rates(settings.forecast_device))


if __name__ == "__main__":
    sys.exit(main())
