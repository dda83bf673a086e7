"""Ctrl-C and SIGTERM, so that none is lost.

Python drops an exception that is raised inside a callback of the garbage collector or in a
finalizer, a KeyboardInterrupt too: it prints "Exception ignored in" and goes on. So an interrupt is
also remembered, and raised again at the next `raise_if_unseen`. Knows nothing of what it ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_unseen = threading.Event()


@contextlib.contextmanager
def listening(*signals: signal.Signals) -> Iterator[None]:
    """Raises KeyboardInterrupt on `signals`, and remembers it, as long as this lasts.

    Only the main thread can listen; elsewhere, and for a signal that somebody else handles or that
    is ignored (as under `nohup`), nothing is changed.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        ours_to_take = (signal.SIG_DFL, signal.default_int_handler)
        before = {s: h for s in signals if (h := signal.getsignal(s)) in ours_to_take}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:
            _unseen.clear()


def raise_if_unseen() -> None:
    """Raises KeyboardInterrupt if one was raised that nobody has caught."""
    if _unseen.is_set():
        raise KeyboardInterrupt


def acknowledge() -> None:
    """Says that the interrupt was caught: the next one counts anew."""
    _unseen.clear()


def _interrupt(number: int, frame: Any) -> None:
    _unseen.set()
    raise KeyboardInterrupt
