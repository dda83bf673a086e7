"""Several searches of one study at once: who takes part, and whose turn it is.

On a file, by locks of the file system, which the system lets go of when a process is killed. Where
it has none (some network file systems, Windows), Optuna's heartbeats alone tell who is still alive.
In a storage that machines share, see `attendance`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from sac_search.study.storage import DATABASE_NAME, errors_named
from sac_search.study.store import StudyStore, make_folder

if sys.platform != "win32":
    import fcntl

# Not the database itself: closing a second handle of that would end SQLite's own locks.
_LOCK_NAME = ".lock"
_TURN_NAME = ".turn"
_CLAIM_NAME = ".claim"
_WORKERS_NAME = ".workers"
_POLL_SECONDS = 0.1


class Membership(Protocol):
    """One search's part in a study that others may search at the same time."""

    @property
    def worker(self) -> str:
        """Who this search is, as its trials say."""

    @property
    def can_tell(self) -> bool:
        """Whether it can be told who else takes part."""

    def has_others(self) -> bool:
        """Returns whether others take part, as far as can be told."""

    def reclaim(self, store: StudyStore, running: Mapping[int, str | None]) -> None:
        """Gives up the trials of searches that are gone, so that others measure them.

        `running` are the numbers of trials that run, each with who runs it, as far as is known.
        """

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Waits until no other search has the turn, and has it; `on_wait` is called before waiting.

        For what only one should do at a time: make the study, measure its baselines, choose its
        winner.
        """

    def claiming(self) -> contextlib.AbstractContextManager[None]:
        """Is held while a search says what it measures next, and sees what others do."""


class Alone:
    """The part of a search in a study that nobody else can reach."""

    worker = ""
    can_tell = False

    def has_others(self) -> bool:
        """Nobody."""
        return False

    def reclaim(self, store: StudyStore, running: Mapping[int, str | None]) -> None:
        """Has nothing to give up."""

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Has it always."""
        return contextlib.nullcontext()

    def claiming(self) -> contextlib.AbstractContextManager[None]:
        """Takes no lock."""
        return contextlib.nullcontext()


class FileMembership:
    """One search's part in a study that has a file of its own; `joined` makes one."""

    def __init__(self, folder: Path, handle: int, *, is_locked: bool, worker: str) -> None:
        self._folder = folder
        self._handle = handle
        self.worker = worker
        """Who this search is, as its trials say."""
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

    def has_others(self) -> bool:
        """Returns whether others take part, as far as the file system tells."""
        return self.can_tell and not self.when_alone(lambda: None)

    def reclaim(self, store: StudyStore, running: Mapping[int, str | None]) -> None:
        """Gives up the trials of searches that are gone.

        Also those of which it is not known who runs them, where nobody else takes part.
        """

        def give_up_unknown() -> None:
            for number, worker in running.items():
                if worker is None:
                    store.give_up_trial(number)

        for number, worker in running.items():
            if worker is not None and worker != self.worker and self._is_gone(worker):
                store.give_up_trial(number)
        if None in running.values():
            self.when_alone(give_up_unknown)

    def turn(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Waits until no other search has the turn, and has it."""
        return turn(self._folder, on_wait)

    def claiming(self) -> contextlib.AbstractContextManager[None]:
        """Lets only one search at a time say what it measures next."""
        return claiming(self._folder)

    def _is_gone(self, worker: str) -> bool:
        path = self._folder / _WORKERS_NAME / worker
        if not self.can_tell:
            return False
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return True  # it left, or it was killed and somebody has seen that before
        try:
            is_gone = _lock(handle, shared=False, wait=False)
        finally:
            _release(handle)
        if is_gone:
            path.unlink(missing_ok=True)
        return is_gone


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[FileMembership]:
    """Takes part in the searches of the study in `folder`.

    Raises:
        StudyFileError: the folder cannot be written.
    """
    worker = new_worker()
    with errors_named(folder / DATABASE_NAME):
        (folder / _WORKERS_NAME).mkdir(parents=True, exist_ok=True)
    own = _open(folder, f"{_WORKERS_NAME}/{worker}")
    handle = _open(folder, _LOCK_NAME)
    try:
        _lock(own, shared=False, wait=True)
        is_locked = _lock(handle, shared=True, wait=True)
        yield FileMembership(folder, handle, is_locked=is_locked, worker=worker)
    finally:
        _release(handle)
        with contextlib.suppress(OSError):
            (folder / _WORKERS_NAME / worker).unlink()
        _release(own)


def new_worker() -> str:
    """Returns a name for this search that no other has: its machine, its process, and a number."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


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
