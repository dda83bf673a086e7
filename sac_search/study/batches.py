"""A study over batch sizes: one ordinary study per size, and above them one of samples per second.

In the folder of the study lies its own database, in which each trial is a batch size with a policy,
and below it a folder `batch-8` for each size, which holds a study like any other.
"""

from __future__ import annotations

import enum
import os
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from sac_search import units
from sac_search.errors import StudyError, StudyFileError, StudyNotFound
from sac_search.records import Bytes, Environment, Outcome
from sac_search.study.candidate import Candidate
from sac_search.study.dashboard import readable_policy
from sac_search.study.goal import BUDGET_CONSTRAINT
from sac_search.study.storage import (
    DATABASE_NAME,
    errors_named,
    storage_at,
    storage_errors_named,
)
from sac_search.study.store import (
    BATCHES_MARK,
    StudyStore,
    check_same,
    holds_batches,
    make_folder,
    open_study,
)

BATCHES_SCHEMA_VERSION = 1
_METRIC = "samples_per_second"
_BATCH_SIZE = IntDistribution(1, 2**31 - 1, log=True)


class SizeState(enum.StrEnum):
    """What became of a batch size."""

    MEASURED = "measured"
    """Policies were measured and at least one fits."""
    RULED_OUT = "ruled out"
    """By forecast no policy fits; nothing was built or measured."""
    TOO_LARGE = "too large"
    """Measured, and nothing fits."""
    FAILED = "failed"
    """The workload does not run at this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """What the study keeps of one batch size, beside the study of that size."""

    batch_size: int
    """What the factory was asked for."""
    samples: int
    """Samples in a step, as the workload says itself."""
    state: SizeState
    """What became of it."""
    reason: str
    """Why it was ruled out or failed, or why it got no further trials."""
    is_done: bool = False
    """Whether nothing is left to measure at this size, however many trials there are."""
    full_peak_bytes: Bytes | None = None
    """Peak under full checkpointing, by forecast."""
    bound_samples_per_second: float | None = None
    """What no policy is believed to exceed at this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The best policy of a size, measured again on the way there and on the way back."""

    batch_size: int
    """The size."""
    key: str
    """Key of the policy."""
    outcomes: tuple[Outcome, ...]
    """What came of it each time."""

    @property
    def step_seconds(self) -> float | None:
        """The mean of its step times; None where one is lacking."""
        seconds = [o.measurement.step_seconds for o in self.outcomes if o.measurement is not None]
        return statistics.mean(seconds) if len(seconds) == len(self.outcomes) > 0 else None


def size_folder(folder: Path, batch_size: int) -> Path:
    """Returns the folder of the study of one batch size."""
    return folder / f"batch-{batch_size}"


class BatchStore(StudyStore):
    """One study over batch sizes, on disk."""

    @property
    def sizes(self) -> tuple[SizeRecord, ...]:
        """What became of every batch size, smallest first."""
        return self._optional("sizes", tuple[SizeRecord, ...]) or ()

    def keep_size(self, record: SizeRecord) -> None:
        """Stores what became of a batch size, in place of what was known of it."""
        others = [known for known in self.sizes if known.batch_size != record.batch_size]
        self.write("sizes", tuple(sorted([*others, record], key=lambda r: r.batch_size)))

    @property
    def compared(self) -> tuple[Compared, ...]:
        """The last comparison of the best policies of several sizes."""
        return self._optional("compared", tuple[Compared, ...]) or ()

    @property
    def best_batch_size(self) -> int | None:
        """The batch size of the winner; None before there is one."""
        return self._optional("best_batch_size", int)

    def take_over(self, record: SizeRecord, store: StudyStore) -> None:
        """Adds a trial for each policy that the study of a size has and this one has not."""
        with storage_errors_named(self.label):
            ours = self.study.get_trials(deepcopy=False)
            trials = store.study.get_trials(deepcopy=False)
        known = {
            trial.user_attrs.get("policy_key")
            for trial in ours
            if trial.params.get("batch_size") == record.batch_size
        }
        as_trials = {
            candidate.policy.key: trial
            for trial in trials
            if (candidate := store.trial_candidate(trial)) is not None
        }
        for candidate in store.candidates():
            if candidate.policy.key not in known and not candidate.is_ruled_out:
                self._add(record, candidate, as_trials.get(candidate.policy.key))

    def _add(self, record: SizeRecord, candidate: Candidate, trial: FrozenTrial | None) -> None:
        parameters: dict[str, Any] = {"batch_size": record.batch_size}
        distributions: dict[str, BaseDistribution] = {"batch_size": _BATCH_SIZE}
        if trial is not None:
            parameters |= trial.params
            distributions |= trial.distributions
        attributes: dict[str, Any] = {
            "policy_key": candidate.policy.key,
            "name": candidate.name,
            **readable_policy(candidate.policy),
        }
        measurement, seconds = candidate.measurement, candidate.step_seconds
        if measurement is None or not seconds:
            assert candidate.failure is not None
            attributes["outcome_text"] = f"{candidate.failure.kind}: {candidate.failure.advice}"
            self._create(parameters, distributions, attributes, state=TrialState.FAIL)
            return
        excess_gib = (measurement.peak_bytes - self.budget_bytes) / units.GIB
        throughput = record.samples / seconds
        attributes |= {
            "outcome_text": "fits" if excess_gib <= 0 else "over the budget",
            "step_ms": round(1e3 * seconds, 3),
            "peak_gib": round(measurement.peak_bytes / units.GIB, 4),
        }
        if self.environment.sequence_length is not None:
            attributes["tokens_per_second"] = throughput * self.environment.sequence_length
        self._create(
            parameters,
            distributions,
            attributes,
            value=throughput,
            system_attrs={"constraints": [excess_gib]},
            constraints={BUDGET_CONSTRAINT: excess_gib},
        )

    def _create(
        self,
        parameters: dict[str, Any],
        distributions: dict[str, BaseDistribution],
        attributes: dict[str, Any],
        **outcome: Any,
    ) -> None:
        with storage_errors_named(self.label), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self.study.add_trial(
                optuna.create_trial(
                    params=parameters,
                    distributions=distributions,
                    user_attrs=attributes,
                    **outcome,
                )
            )


def open_batches(folder: Path) -> BatchStore:
    """Opens the study over batch sizes in `folder`.

    Raises:
        StudyNotFound: there is none, or one that was never begun.
        StudyError: the study there is of one batch size.
        StudyFileError: a newer sac-search wrote it, or it cannot be read.
    """
    path = folder / DATABASE_NAME
    if not os.path.isfile(path):
        raise StudyNotFound(f"there is no study in {folder} (no {DATABASE_NAME})")
    if not holds_batches(path):
        open_study(folder)
        raise StudyError(
            f"{path} holds a study of one batch size; name another one with --study for a search "
            "over batch sizes"
        )
    with errors_named(path):
        storage = storage_at(path)
        found = storage.get_all_studies()
        chosen = next(study for study in found if BATCHES_MARK in study.user_attrs)
        study = optuna.load_study(study_name=chosen.study_name, storage=storage)
        version = chosen.user_attrs[BATCHES_MARK]
    if not isinstance(version, int) or version > BATCHES_SCHEMA_VERSION:
        raise StudyFileError(
            f"{path} has schema version {version}, written by a newer sac-search; "
            f"this one reads up to {BATCHES_SCHEMA_VERSION}. Upgrade sac-search, or use another "
            "--study"
        )
    store = BatchStore(study, path)
    if "environment" not in chosen.user_attrs:
        raise StudyNotFound(f"{path} holds no study that was begun")
    return store


def open_or_create_batches(
    folder: Path, name: str, budget_bytes: int, environment: Environment
) -> BatchStore:
    """Opens the study over batch sizes in `folder`, or makes it; `environment` has no batch size.

    Raises:
        EnvironmentMismatch: the study is of another environment.
        StudyError: it is for another budget, or of one batch size.
    """
    try:
        store = open_batches(folder)
    except StudyNotFound:
        return _create_batches(folder, name, budget_bytes, environment)
    check_same(store, environment, budget_bytes)
    return store


def _create_batches(
    folder: Path, name: str, budget_bytes: int, environment: Environment
) -> BatchStore:
    path = folder / DATABASE_NAME
    make_folder(folder)
    with errors_named(path):
        study = optuna.create_study(
            storage=storage_at(path),
            study_name=folder.name,
            direction="maximize",
            load_if_exists=True,  # one that was killed before it had begun
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([_METRIC])
    store = BatchStore(study, path)
    # First of all, so that no ordinary search takes it for its own.
    store.write(BATCHES_MARK, BATCHES_SCHEMA_VERSION)
    store.write("series", name)
    store.write("budget_bytes", budget_bytes)
    store.write("layers", ())  # each size has its own
    store.write("environment", environment)
    return store


def winner_folder(folder: Path) -> Path:
    """Returns the folder of the ordinary study that stands for the one in `folder`.

    That is itself, or for a study over batch sizes the study of the best of them.

    Raises:
        StudyError: it has no winner yet.
    """
    if not holds_batches(folder / DATABASE_NAME):
        return folder
    store = open_batches(folder)
    if store.best_batch_size is not None:
        return size_folder(folder, store.best_batch_size)
    known = ", ".join(str(size_folder(folder, record.batch_size)) for record in store.sizes)
    raise StudyError(
        f"study {store.name!r} is over batch sizes and has no winner yet; continue its search, or "
        f"name the study of one size: {known or 'none yet'}"
    )
