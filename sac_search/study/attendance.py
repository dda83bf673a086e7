"""Several searches of one study over machines: who takes part, and whose turn it is.

By the one thing that every storage of Optuna does all at once, which is to make a trial: the trials
of a second study, `NAME.workers`, are who takes part and who waits for the turn. Each search says
every few seconds that it is there. One that has said nothing for a while, by the clock of whoever
waits, is taken for dead; machines' clocks need not agree. On one machine it is known at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from sac_search.errors import StudyError
from sac_search.study.sharing import Membership, joined, new_worker
from sac_search.study.storage import errors_named, shared_storage
from sac_search.study.store import StudyStore

SUFFIX = ".workers"
"""What the name of a study's second one ends in."""
SILENT_SECONDS = 60.0
"""A search that is silent for so long is taken for dead."""

_BEAT_SECONDS = 5.0
_POLL_SECONDS = 0.25


class Attendance:
    """One search's part in a study that is in a storage which machines share."""

    can_tell = True

    def __init__(self, storage: str, study_name: str) -> None:
        self._label = f"study {study_name + SUFFIX!r}"
        self._storage = shared_storage(storage)
        with errors_named(self._label), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(
                storage=self._storage, study_name=study_name + SUFFIX, load_if_exists=True
            )
        self._study_id = study._study_id
        self._started = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying_so, daemon=True)
        self._lock = threading.Lock()
        self._join()

    def __enter__(self) -> Attendance:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        # Where the storage is gone there is nobody to tell.
        with contextlib.suppress(Exception):
            self._finish(self._member_id, TrialState.COMPLETE, time.monotonic() - self._started)

    @property
    def worker(self) -> str:
        """Who this search is, as its trials say."""
        with self._lock:
            return self._worker

    def has_others(self) -> bool:
        """Returns whether others take part that are not silent."""
        return bool(self._living() - {self.worker})

    def reclaim(self, store: StudyStore, running: Mapping[int, str | None]) -> None:
        """Gives up the trials of searches that are gone."""
        # Who takes part is read after what runs: who ran a trial then was there before.
        if all(worker == self.worker for worker in running.values()):
            return
        living = self._living()
        is_alone = living == {self.worker}
        for number, worker in running.items():
            # Whoever has not said yet who it is has just begun.
            if worker is None:
                is_gone = is_alone or self._is_silent(-1 - number, 0)
            else:
                is_gone = worker not in living
            if is_gone:
                store.give_up_trial(number)

    @contextlib.contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Waits until no other search has the turn, and has it; who comes first is first."""
        with errors_named(self._label):
            ticket = self._create({"kind": "turn", "worker": self.worker})
        try:
            if not self._is_first(ticket):
                on_wait()
                while not self._is_first(ticket):
                    time.sleep(_POLL_SECONDS)
            yield
        finally:
            with errors_named(self._label):
                self._finish(ticket, TrialState.COMPLETE, 0.0)

    def claiming(self) -> contextlib.AbstractContextManager[None]:
        """Takes no lock.

        Each search says first what it measures and looks then what others do, so of two that say
        the same one at least sees the other, and leaves it.
        """
        return contextlib.nullcontext()

    # --- members ----------------------------------------------------------------------------------

    def _join(self) -> None:
        worker = new_worker()
        attributes = {
            "kind": "member",
            "worker": worker,
            "machine": _this_machine(),
            "process": os.getpid(),
            "beat": 0,
        }
        with errors_named(self._label):
            member_id = self._create(attributes)
        with self._lock:
            self._worker, self._member_id = worker, member_id

    def _keep_saying_so(self) -> None:
        number = 0
        while not self._stopped.wait(_BEAT_SECONDS):
            number += 1
            try:
                self._storage.set_trial_user_attr(self._member_id, "beat", number)
            except UpdateFinishedTrialError:
                # This process stood still for so long that another took it for dead.
                with contextlib.suppress(Exception):
                    self._join()
            except Exception:  # noqa: S112
                continue  # a storage that is away for a moment is none of this search's end

    def _living(self) -> set[str]:
        """Returns who takes part; the others' entries are ended."""
        living = {self.worker}
        with errors_named(self._label):
            trials = self._running()
            for trial in trials:
                attributes = trial.user_attrs
                if attributes.get("kind") != "member" or attributes["worker"] == self.worker:
                    continue
                if self._is_gone(trial):
                    self._finish(trial._trial_id, TrialState.FAIL, None)
                else:
                    living.add(attributes["worker"])
            for trial in trials:
                attributes = trial.user_attrs
                if attributes.get("kind") == "turn" and attributes["worker"] not in living:
                    self._finish(trial._trial_id, TrialState.FAIL, None)
        return living

    def _is_gone(self, entry: FrozenTrial) -> bool:
        attributes = entry.user_attrs
        if attributes["machine"] and attributes["machine"] == _this_machine():
            return not _is_running(attributes["process"])
        return self._is_silent(entry._trial_id, attributes["beat"])

    def _is_silent(self, key: int, said: int) -> bool:
        """Returns whether who is known by `key` has said nothing new for too long."""
        now = time.monotonic()
        before, since = self._seen.get(key, (None, now))
        if before != said:
            since = now
            self._seen[key] = (said, now)
        return now - since > SILENT_SECONDS

    def _is_first(self, ticket: int) -> bool:
        self._living()  # ends the tickets of those that are gone
        with errors_named(self._label):
            tickets = [t._trial_id for t in self._running() if t.user_attrs.get("kind") == "turn"]
            if ticket not in tickets:
                raise StudyError(
                    f"this search stood still for {SILENT_SECONDS:g} s or more, so that others "
                    "took it for dead; the same command continues"
                )
        return min(tickets) == ticket

    # --- entries ----------------------------------------------------------------------------------

    def _create(self, attributes: dict[str, Any]) -> int:
        entry = optuna.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        return self._storage.create_new_trial(self._study_id, template_trial=entry)

    def _running(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(
            self._study_id, deepcopy=False, states=(TrialState.RUNNING,)
        )

    def _finish(self, entry: int, state: TrialState, value: float | None) -> None:
        values = None if value is None else [value]
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(entry, state=state, values=values)


@functools.cache
def _this_machine() -> str:
    """Returns what processes have in common that see each other's numbers; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # One that ended counts until its parent has asked how.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


@contextlib.contextmanager
def taking_part(folder: Path, storage: str | None) -> Iterator[Membership]:
    """Takes part in the searches of the study in `folder`, or of the one of its name in `storage`.

    Raises:
        StudyFileError: the folder, or the storage, cannot be written.
    """
    # The folder as well: searches on this machine write their logs there.
    with joined(folder) as membership:
        if storage is None:
            yield membership
            return
        with Attendance(storage, folder.name) as attendance:
            yield attendance
