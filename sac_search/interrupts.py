"""Ctrl-C and SIGTERM, so that none is lost.

Python drops an exception that is raised inside a callback of the garbage collector or in a
finalizer, a KeyboardInterrupt too: it prints "Exception ignored in" and goes on. So an interrupt is
also remembered, and raised again at the next `raise_if_unseen`. What must not be left half done,
such as a transaction of a database, puts it off. Knows nothing of what it ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_unseen = threading.Event()
# One came while it was put off.
_waiting = threading.Event()
# How many put an interrupt off now. Only the main thread is ever interrupted.
_put_off = 0


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
            acknowledge()


def raise_if_unseen() -> None:
    """Raises KeyboardInterrupt if one was raised that nobody has caught."""
    if _unseen.is_set():
        raise KeyboardInterrupt


def acknowledge() -> None:
    """Says that the interrupt was caught: the next one counts anew."""
    _unseen.clear()
    _waiting.clear()


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Lets an interrupt that comes meanwhile wait until this ends; a second one does not wait."""
    global _put_off
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _put_off += 1
    try:
        yield
    finally:
        _put_off -= 1
    if not _put_off:
        _raise_if_waiting()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Lets an interrupt end this at once, although it is a part of what puts interrupts off."""
    global _put_off
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _put_off = _put_off, 0
    try:
        _raise_if_waiting()
        yield
    finally:
        _put_off = before


def _raise_if_waiting() -> None:
    if _waiting.is_set():
        _waiting.clear()
        raise KeyboardInterrupt


def _interrupt(number: int, frame: Any) -> None:
    is_second = _unseen.is_set()
    _unseen.set()
    if is_second or not _put_off:
        raise KeyboardInterrupt
    _waiting.set()
