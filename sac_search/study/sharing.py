"""Several searches of one study at once: who takes part, and whose turn it is.

By locks of the file system, which the system lets go of when a process is killed. Where it has none
(some network file systems, Windows), Optuna's heartbeats alone tell who is still alive.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sac_search.study.store import DATABASE_NAME, errors_named, make_folder

if sys.platform != "win32":
    import fcntl

# Not the database itself: closing a second handle of that would end SQLite's own locks.
_LOCK_NAME = ".lock"
_TURN_NAME = ".turn"
_CLAIM_NAME = ".claim"
_POLL_SECONDS = 0.1


class Membership:
    """One search's part in a study; `joined` makes one."""

    def __init__(self, handle: int, *, is_locked: bool) -> None:
        self._handle = handle
        self.can_tell = is_locked
        """Whether the file system tells who else takes part."""

    def when_alone(self, action: Callable[[], None]) -> bool:
        """Runs `action` if no other search takes part, and nobody joins meanwhile.

        Returns whether it did. Never does where the file system cannot tell.
        """
        if not _lock(self._handle, shared=False, wait=False):
            _lock(self._handle, shared=True, wait=True)
            return False
        try:
            action()
        finally:
            _lock(self._handle, shared=True, wait=True)
        return True


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[Membership]:
    """Takes part in the searches of the study in `folder`.

    Raises:
        StudyFileError: the folder cannot be written.
    """
    handle = _open(folder, _LOCK_NAME)
    try:
        yield Membership(handle, is_locked=_lock(handle, shared=True, wait=True))
    finally:
        _release(handle)


def is_shared(folder: Path) -> bool:
    """Returns whether a search of the study in `folder` is running now, as far as can be told."""
    if not (folder / _LOCK_NAME).is_file():
        return False
    handle = _open(folder, _LOCK_NAME)
    try:
        alone = _lock(handle, shared=False, wait=False)
        return not alone and _lock(handle, shared=True, wait=False)
    finally:
        _release(handle)


@contextlib.contextmanager
def turn(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits until no other search has the turn, and has it; `on_wait` is called before waiting.

    For what only one should do at a time: make the study, measure its baselines, choose its winner.

    Raises:
        StudyFileError: the folder cannot be written.
    """
    with _exclusive(folder, _TURN_NAME, on_wait):
        yield


@contextlib.contextmanager
def claiming(folder: Path) -> Iterator[None]:
    """Lets only one search at a time say what it measures next, and see what others do."""
    with _exclusive(folder, _CLAIM_NAME, lambda: None):
        yield


@contextlib.contextmanager
def _exclusive(folder: Path, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    handle = _open(folder, name)
    try:
        if not _lock(handle, shared=False, wait=False):
            on_wait()
            _lock(handle, shared=False, wait=True)
        yield
    finally:
        _release(handle)


def _release(handle: int) -> None:
    # Not by closing alone: a process that was forked meanwhile, such as a data loader's, has the
    # handle as well, and would keep the lock for as long as it lives.
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _open(folder: Path, name: str) -> int:
    make_folder(folder)
    with errors_named(folder / DATABASE_NAME):
        return os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)


def _lock(handle: int, *, shared: bool, wait: bool) -> bool:
    """Returns whether the lock was taken. A wait polls, so that Ctrl-C ends it."""
    if sys.platform == "win32":
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False  # there are no locks here
        else:
            return True
