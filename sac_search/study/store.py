"""A study on disk: Optuna's SQLite file, and what sac-search keeps beside the trials in it.

Everything is stored as validated JSON in user attributes, so the file opens in any Optuna tool.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy.exc
from optuna.trial import FrozenTrial

from sac_search import records, units
from sac_search.errors import EnvironmentMismatch, StudyError, StudyFileError, StudyNotFound
from sac_search.policy import Policy
from sac_search.records import SCHEMA_VERSION, Environment, Outcome, Verification
from sac_search.study.candidate import Candidate, drift_free_seconds
from sac_search.trace import LayerTrace

DATABASE_NAME = "study.db"
_HEARTBEAT_SECONDS = 15
_LOCK_TIMEOUT_SECONDS = 60
_REFERENCE_PREFIX = "baseline: "

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The last candidates, measured again side by side."""

    keys: tuple[str, ...]
    """Keys of their policies."""
    outcomes: tuple[Outcome, ...]
    """Their figures, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A policy whose gradients were compared."""

    key: str
    """Key of the policy."""
    verification: Verification
    """The figures."""


class StudyStore:
    """One study on disk."""

    def __init__(self, study: optuna.Study, path: Path) -> None:
        self.study = study
        self.path = path

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return self.path.parent

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study.study_name

    @property
    def budget_bytes(self) -> int:
        """The budget that the study was made for."""
        return int(self._attribute("budget_bytes", int))

    @property
    def environment(self) -> Environment:
        """The environment that its figures belong to."""
        return self._attribute("environment", Environment)

    @property
    def layers(self) -> tuple[LayerTrace, ...]:
        """The layers as they were traced when the study began."""
        return self._attribute("layers", tuple[LayerTrace, ...])

    @property
    def anchor_seconds(self) -> float | None:
        """What the reference policy's step took when the study began; None before any step ran."""
        return self._optional("anchor_seconds", float)

    @property
    def confirmation(self) -> Confirmation | None:
        """The last side-by-side measurement."""
        return self._optional("confirmation", Confirmation)

    @property
    def verified(self) -> list[Verified]:
        """All verifications so far."""
        return self._optional("verified", list[Verified]) or []

    def write(self, name: str, value: Any) -> None:
        """Stores `value` under a user attribute of the study."""
        with _errors_named(self.path):
            self.study.set_user_attr(name, records.to_builtins(value))

    def write_baseline(self, name: str, policy: Policy, outcome: Outcome) -> None:
        """Stores a baseline that is no point of the search space."""
        if self.anchor_seconds is None and outcome.measurement is not None:
            self.write("anchor_seconds", outcome.measurement.reference_seconds)
        self.write(_REFERENCE_PREFIX + name, {"policy": policy, "outcome": outcome})

    def candidates(self) -> list[Candidate]:
        """Returns every policy that was measured, each once, in the order of measuring."""
        found: dict[str, Candidate] = {}
        for name, stored in self.study.user_attrs.items():
            if name.startswith(_REFERENCE_PREFIX):
                baseline = self._candidate(stored, name.removeprefix(_REFERENCE_PREFIX), True)
                found.setdefault(baseline.policy.key, baseline)
        for trial in self.study.get_trials(deepcopy=False):
            candidate = self._trial_candidate(trial)
            if candidate is not None:
                found.setdefault(candidate.policy.key, candidate)
        return list(found.values())

    def _trial_candidate(self, trial: FrozenTrial) -> Candidate | None:
        # A trial that was killed between measuring and telling has its figures and counts as well.
        if "outcome" not in trial.user_attrs:
            return None
        baseline = trial.user_attrs.get("baseline")
        name = baseline or f"trial {trial.number}"
        return self._candidate(trial.user_attrs, name, baseline is not None)

    def _candidate(self, stored: dict[str, Any], name: str, is_baseline: bool) -> Candidate:
        policy = self._decode(stored["policy"], Policy)
        outcome = self._decode(stored["outcome"], Outcome)
        seconds = (
            drift_free_seconds(outcome, self.anchor_seconds)
            if self.anchor_seconds is not None
            else None
        )
        return Candidate(
            name=name, policy=policy, outcome=outcome, step_seconds=seconds, is_baseline=is_baseline
        )

    def _attribute(self, name: str, value_type: type[T]) -> T:
        found = self._optional(name, value_type)
        if found is None:
            raise StudyFileError(
                f"{self.path} holds a study {self.name!r} that sac-search did not write "
                f"(it has no {name}); name another one with --study"
            )
        return found

    def _optional(self, name: str, value_type: type[T]) -> T | None:
        stored = self.study.user_attrs.get(name)
        return None if stored is None else self._decode(stored, value_type)

    def _decode(self, stored: Any, value_type: type[T]) -> T:
        try:
            return records.decode(json.dumps(stored), value_type)
        except (ValueError, TypeError) as error:
            raise StudyFileError(f"{self.path}: study {self.name!r} is damaged: {error}") from error


def create_study(
    folder: Path, *, budget_bytes: int, environment: Environment, layers: Sequence[LayerTrace]
) -> StudyStore:
    """Makes a new study in `folder`, named like it.

    Raises:
        StudyFileError: the file cannot be written.
    """
    path = folder / DATABASE_NAME
    with _errors_named(path):
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=_storage(path),
            study_name=folder.name,
            direction="minimize",
            load_if_exists=True,  # one that was killed before it had begun
        )
        with _experimental_allowed():
            study.set_metric_names(["step_seconds"])
    store = StudyStore(study, path)
    store.write("budget_bytes", budget_bytes)
    store.write("environment", environment)
    store.write("layers", tuple(layers))
    # Last of all: a study without it was never begun.
    store.write("schema_version", SCHEMA_VERSION)
    return store


def open_study(folder: Path) -> StudyStore:
    """Opens the study in `folder`.

    Raises:
        StudyNotFound: there is none.
        StudyFileError: it cannot be read, or a newer sac-search wrote it.
    """
    path = folder / DATABASE_NAME
    if not path.is_file():
        raise StudyNotFound(f"there is no study in {folder} (no {DATABASE_NAME})")
    with _errors_named(path):
        storage = _storage(path)
        names = [study.study_name for study in storage.get_all_studies()]
        if not names:
            raise StudyNotFound(f"{path} holds no study")
        study = optuna.load_study(study_name=names[0], storage=storage)
        version = study.user_attrs.get("schema_version")
    if version is None:
        # Killed while it was being made: nothing was measured, so nothing is lost.
        raise StudyNotFound(f"{path} holds a study that was never begun")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StudyFileError(
            f"{path} has schema version {version}, written by a newer sac-search; "
            f"this one reads up to {SCHEMA_VERSION}. Upgrade sac-search, or use another --study"
        )
    return StudyStore(study, path)


def check_same(store: StudyStore, environment: Environment, budget_bytes: int) -> None:
    """Refuses to continue a study under other conditions.

    Raises:
        EnvironmentMismatch: times from the two cannot be compared; says what differs.
        StudyError: the study is for another budget.
    """
    differences = store.environment.differences(environment)
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise EnvironmentMismatch(
            f"study {store.name!r} was measured in another environment:\n{lines}\n"
            "Add --fresh to begin a new study beside it, or name another one with --study"
        )
    if store.budget_bytes != budget_bytes:
        raise StudyError(
            f"study {store.name!r} is for a budget of {units.format_gib(store.budget_bytes)}, not "
            f"{units.format_gib(budget_bytes)}; add --fresh, or name another one with --study"
        )


def newest_folder(root: Path, name: str) -> Path | None:
    """Returns the folder of the newest study of the series `name`, `name-2`, `name-3`, …"""
    series = [folder for folder in _series(root, name) if (folder / DATABASE_NAME).is_file()]
    return series[-1] if series else None


def unused_folder(root: Path, name: str) -> Path:
    """Returns the first folder of the series that holds no study."""
    series = _series(root, name)
    return (
        series[-1]
        if not (series[-1] / DATABASE_NAME).exists()
        else _numbered(root, name, len(series) + 1)
    )


def list_studies(root: Path) -> list[Path]:
    """Returns the folders below `root` that hold a study."""
    if not root.is_dir():
        return []
    return sorted(f for f in root.iterdir() if (f / DATABASE_NAME).is_file())


def _series(root: Path, name: str) -> list[Path]:
    folders = [root / name]
    while _numbered(root, name, len(folders) + 1).exists():
        folders.append(_numbered(root, name, len(folders) + 1))
    return folders


def _numbered(root: Path, name: str, number: int) -> Path:
    return root / f"{name}-{number}"


def _storage(path: Path) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _experimental_allowed():
        return optuna.storages.RDBStorage(
            f"sqlite:///{path.resolve()}",
            engine_kwargs={"connect_args": {"timeout": _LOCK_TIMEOUT_SECONDS}},
            heartbeat_interval=_HEARTBEAT_SECONDS,
        )


@contextlib.contextmanager
def _experimental_allowed() -> Iterator[None]:
    """Silences Optuna's warning that an interface (heartbeats, metric names) may still change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turns errors of the file system and the database into one that names the file."""
    try:
        yield
    except OSError as error:
        raise StudyFileError(f"{path}: {error.strerror or error}") from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise StudyFileError(
            f"{path} cannot be used as a study: {cause}. Nothing in it was changed; free it, mend "
            "it, or name another study with --study"
        ) from error
