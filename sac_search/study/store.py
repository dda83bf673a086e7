"""A study on disk: Optuna's SQLite file, and what sac-search keeps beside the trials in it.

Everything is stored as validated JSON in user attributes, so the file opens in any Optuna tool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from sac_search import records, units
from sac_search.compiling import CompileOptions
from sac_search.errors import EnvironmentMismatch, StudyError, StudyFileError, StudyNotFound
from sac_search.policy import Policy
from sac_search.records import SCHEMA_VERSION, Bytes, Environment, Evidence, Outcome, Verification
from sac_search.space import Decision
from sac_search.study.attributes import joined_value, outdated_parts, split_value
from sac_search.study.baselines import NONE
from sac_search.study.candidate import Candidate, drift_free_seconds
from sac_search.study.goal import SPEED, Goal, Limits, Told
from sac_search.study.insights import Insights
from sac_search.study.sampler import WORKER
from sac_search.study.storage import (
    DATABASE_NAME,
    address_without_password,
    errors_named,
    is_made,
    shared_storage,
    storage_at,
    storage_errors_named,
)
from sac_search.study.timelines import PolicyTimeline
from sac_search.trace import LayerTrace

BATCHES_MARK = "batches_schema_version"
"""The attribute of a study over batch sizes: see `batches`."""
_REFERENCE_PREFIX = "baseline: "
_FORECAST_PREFIX = "forecast: "

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The last candidates, measured again side by side."""

    keys: tuple[str, ...]
    """Keys of their policies."""
    outcomes: tuple[Outcome, ...]
    """Their figures, in the same order."""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.outcomes):
            raise ValueError(f"{len(self.keys)} policies have {len(self.outcomes)} outcomes")

    @property
    def is_whole(self) -> bool:
        """Whether all of them ran."""
        return all(outcome.measurement is not None for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A policy whose gradients were compared."""

    key: str
    """Key of the policy."""
    verification: Verification
    """The figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    policy: Policy
    outcome: Outcome
    baseline: str | None = None
    plan: str | None = None
    imported_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    policy: Policy
    outcome: Outcome
    is_baseline: bool

    def __post_init__(self) -> None:
        if self.outcome.measurement is None:
            raise ValueError("a forecast has no figures")


class StudyStore:
    """One study on disk."""

    # What never changes is read once: Optuna copies all attributes, layers and all, on every read.

    def __init__(
        self,
        study: optuna.Study,
        path: Path,
        label: str | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.study = study
        self._is_shared = is_shared
        self.path = path
        """Its file; where it is in a storage that others share, the file it would have."""
        self.label = label or str(path)
        """Where it is, for people to read."""
        self._anchor_seconds: float | None = None

    @property
    def folder(self) -> Path:
        """The folder of the study's files."""
        return self.path.parent

    @property
    def storage(self) -> BaseStorage:
        """Optuna's storage, which holds it."""
        return self.study._storage

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study.study_name

    @functools.cached_property
    def budget_bytes(self) -> int:
        """The budget that the study was made for."""
        return self._attribute("budget_bytes", Bytes)

    @functools.cached_property
    def goal(self) -> Goal:
        """What it is for; a study of a release that had no other goal is for speed."""
        return self._optional("goal", Goal) or SPEED

    @property
    def none_estimate_seconds(self) -> float | None:
        """The step without checkpointing by the planner; None where it ran, or is not needed."""
        return self._optional("none_estimate_seconds", float)

    def limits_for(self, candidates: Iterable[Candidate]) -> Limits:
        """Returns what candidates are held against, by the figures of these."""
        measured = (c.step_seconds for c in candidates if c.name == NONE)
        none_seconds = next((s for s in measured if s is not None), None)
        if none_seconds is None and self.goal != SPEED:
            none_seconds = self.none_estimate_seconds
        return Limits(budget_bytes=self.budget_bytes, none_seconds=none_seconds)

    @functools.cached_property
    def environment(self) -> Environment:
        """The environment that its figures belong to."""
        return self._attribute("environment", Environment)

    @functools.cached_property
    def layers(self) -> tuple[LayerTrace, ...]:
        """The layers as they were traced when the study began."""
        return self._attribute("layers", tuple[LayerTrace, ...])

    @property
    def anchor_seconds(self) -> float | None:
        """What the reference policy's step took when the study began; None before any step ran."""
        if self._anchor_seconds is None:
            self._anchor_seconds = self._optional("anchor_seconds", float)
        return self._anchor_seconds

    @property
    def confirmation(self) -> Confirmation | None:
        """The last side-by-side measurement."""
        return self._optional("confirmation", Confirmation)

    @property
    def verified(self) -> list[Verified]:
        """All verifications so far."""
        return self._optional("verified", list[Verified]) or []

    @property
    def series(self) -> str:
        """The name under which it is continued."""
        return self._attribute("series", str)

    @property
    def winner(self) -> str | None:
        """Key of the policy that the last search to the end chose; None when none passed."""
        return self._optional("winner", str)

    def write(self, name: str, value: Any) -> None:
        """Stores `value` under a user attribute of the study."""
        stored = records.to_builtins(value)
        with errors_named(self.label):
            parts = split_value(name, stored) if self._is_shared else {name: stored}
            for part, text in parts.items():
                self.study.set_user_attr(part, text)
            if len(parts) > 1:
                for part in outdated_parts(name, parts, self.study.user_attrs):
                    self.study.set_user_attr(part, "")

    def replace_budget(self, budget_bytes: int) -> None:
        """Gives a study without a budget what another device has."""
        self.write("budget_bytes", budget_bytes)
        self.__dict__.pop("budget_bytes", None)

    def replace_layers(self, layers: Sequence[LayerTrace]) -> None:
        """Gives a study that has not begun other traces of its layers."""
        self.write("layers", tuple(layers))
        self.__dict__.pop("layers", None)

    @property
    def decisions(self) -> dict[str, int] | None:
        """Names of the search's variables, each with its highest value."""
        return self._optional("decisions", dict[str, int])

    def keep_decisions(self, decisions: Sequence[Decision]) -> None:
        """Makes `decisions` the study's own, once and for all.

        Raises:
            StudyError: it has others; a sampler cannot learn from trials of another space.
        """
        wanted = {decision.name: decision.highest for decision in decisions}
        known = self.decisions
        if known is None:
            self.write("decisions", wanted)
        elif known != wanted:
            names = sorted(n for n in known | wanted if known.get(n) != wanted.get(n))
            raise StudyError(
                f"study {self.name!r} searches other decisions ({', '.join(names[:3])}"
                f"{', …' if len(names) > 3 else ''}): --granularity, --tiers, --layer-choice, "
                "--compile or sac-search's release differs; add --fresh, or name another one with "
                "--study"
            )

    def running_trials(self) -> dict[int, str | None]:
        """Returns the numbers of the running trials, each with who runs it, as far as is known."""
        with errors_named(self.label):
            trials = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return {trial.number: trial.user_attrs.get(WORKER) for trial in trials}

    def give_up_trial(self, number: int) -> None:
        """Ends a trial that whoever ran it has left running. What it measured is kept."""
        # Others may end it at the same moment.
        with errors_named(self.label), contextlib.suppress(UpdateFinishedTrialError):
            self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def write_baseline(self, name: str, policy: Policy, outcome: Outcome) -> None:
        """Stores a baseline that is no point of the search space."""
        self.keep_anchor(outcome)
        self.write(_REFERENCE_PREFIX + name, {"policy": policy, "outcome": outcome})

    def write_forecast(self, candidate: Candidate) -> None:
        """Stores what a policy would cost by forecast, apart from everything that is measured."""
        value = {
            "policy": candidate.policy,
            "outcome": candidate.outcome,
            "is_baseline": candidate.is_baseline,
        }
        self.write(_FORECAST_PREFIX + candidate.name, value)

    def forecasts(self) -> list[Candidate]:
        """Returns every policy that was forecast, in that order."""
        with _reading(self.label):
            attributes = self.study.user_attrs
        found = []
        for name, stored in attributes.items():
            if name.startswith(_FORECAST_PREFIX):
                tried = self._decode(stored, _Forecast)
                assert tried.outcome.measurement is not None
                candidate = Candidate(
                    name=name.removeprefix(_FORECAST_PREFIX),
                    policy=tried.policy,
                    outcome=tried.outcome,
                    step_seconds=tried.outcome.measurement.step_seconds,
                    is_baseline=tried.is_baseline,
                )
                found.append(candidate)
        return found

    @property
    def evidence(self) -> Evidence:
        """What its results are made of: forecasts, until a first search on a device."""
        return self._optional("evidence", Evidence) or Evidence.MEASURED

    def begin_anew(
        self, environment: Environment, layers: Sequence[LayerTrace], evidence: Evidence
    ) -> None:
        """Makes a study that holds nothing but forecasts one of this environment."""
        self.write("evidence", evidence)
        for name in ("winner", "bound_overhead_seconds", "insights", "timelines"):
            self.write(name, None)
        self.write("environment", environment)
        self.__dict__.pop("environment", None)
        self.replace_layers(layers)

    def keep_anchor(self, outcome: Outcome) -> None:
        """Makes the first reference steps that were measured the anchor of all step times."""
        if self.anchor_seconds is None and outcome.measurement is not None:
            self.write("anchor_seconds", outcome.measurement.reference_seconds)

    @property
    def bound_overhead_seconds(self) -> float | None:
        """Step time above that of no checkpointing that no policy can go under, by the planner."""
        return self._optional("bound_overhead_seconds", float)

    @property
    def insights(self) -> Insights | None:
        """What the last search believed at its end; None where nothing could be planned."""
        return self._optional("insights", Insights)

    @property
    def timelines(self) -> tuple[PolicyTimeline, ...]:
        """Memory over one step, of the policies that people compare."""
        return self._optional("timelines", tuple[PolicyTimeline, ...]) or ()

    @property
    def artifacts(self) -> dict[str, str]:
        """The files that are attached to the study for the dashboard, each with Optuna's id."""
        return self._optional("artifact_ids", dict[str, str]) or {}

    @property
    def stop_reason(self) -> str | None:
        """Why the last search stopped; None before the end of any."""
        return self._optional("stop_reason", str)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What was typed behind the workload when it was last searched, or might have been."""
        return self._optional("arguments", tuple[str, ...]) or ()

    @functools.cached_property
    def is_compiled_only(self) -> bool:
        """Whether the model has to be compiled; eager policies are then there to compare with."""
        return self._optional("is_compiled_only", bool) or False

    @property
    def compile_options(self) -> CompileOptions | None:
        """How what is compiled is compiled; None where nothing is."""
        return self._optional("compile_options", CompileOptions)

    @property
    def has_compiled_plans(self) -> bool:
        """Whether the first compiled policies were measured."""
        return self._optional("has_compiled_plans", bool) or False

    @property
    def is_exhausted(self) -> bool:
        """Whether the planner had nothing left to propose."""
        return self._optional("is_exhausted", bool) or False

    @property
    def is_finished(self) -> bool:
        """Whether its last search came to its end, and was not interrupted."""
        return self._optional("is_finished", bool) or False

    @property
    def has_plans(self) -> bool:
        """Whether the planner's first answers were measured."""
        return self._optional("has_plans", bool) or False

    def candidates(self) -> list[Candidate]:
        """Returns every policy that was measured, each once, in the order of measuring."""
        found = {candidate.policy.key: candidate for candidate in self.references()}
        with _reading(self.label):
            trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            candidate = self.trial_candidate(trial)
            if candidate is not None:
                found.setdefault(candidate.policy.key, candidate)
        return list(found.values())

    def references(self) -> list[Candidate]:
        """Returns the baselines that are no points of the search space."""
        with _reading(self.label):
            attributes = self.study.user_attrs
        return [
            self._candidate(
                self._decode(stored, _Tried), name.removeprefix(_REFERENCE_PREFIX), True
            )
            for name, stored in attributes.items()
            if name.startswith(_REFERENCE_PREFIX)
        ]

    def claims(self) -> set[str]:
        """Returns the keys of the policies that running trials measure."""
        with _reading(self.label):
            trials = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return self.claims_of(trials)

    def claims_of(self, trials: Iterable[FrozenTrial]) -> set[str]:
        """Returns the keys of the policies that `trials`, which run, measure."""
        return {
            self._decode(trial.user_attrs["policy"], Policy).key
            for trial in trials
            if "policy" in trial.user_attrs and "outcome" not in trial.user_attrs
        }

    def trial_candidate(self, trial: FrozenTrial) -> Candidate | None:
        """Returns what a trial measured; None when it measured nothing."""
        # A trial that was killed between measuring and telling has its figures and counts as well.
        if "outcome" not in trial.user_attrs:
            return None
        tried = self._decode(trial.user_attrs, _Tried)
        return self._candidate(tried, name_of_trial(trial), "baseline" in trial.user_attrs)

    def add_trial(
        self,
        *,
        told: Told,
        parameters: dict[str, Any],
        distributions: dict[str, BaseDistribution],
        attributes: dict[str, Any],
    ) -> None:
        """Adds a complete trial that was not asked for: what was measured elsewhere, or before."""
        with storage_errors_named(self.label):
            self.study.add_trial(
                optuna.create_trial(
                    values=told.values,
                    params=parameters,
                    distributions=distributions,
                    user_attrs=attributes,
                    # As the search writes them: one for the dashboard, one for Optuna.
                    system_attrs={"constraints": list(told.constraints.values())},
                    constraints=told.constraints,
                )
            )

    def _candidate(self, tried: _Tried, name: str, is_baseline: bool) -> Candidate:
        anchor_seconds = self.anchor_seconds
        return Candidate(
            name=name,
            policy=tried.policy,
            outcome=tried.outcome,
            step_seconds=(
                drift_free_seconds(tried.outcome, anchor_seconds)
                if anchor_seconds is not None
                else None
            ),
            is_baseline=is_baseline,
            imported_from=tried.imported_from,
            is_reference=self.is_compiled_only and tried.policy.compiled is None,
        )

    def _attribute(self, name: str, value_type: type[T]) -> T:
        found = self._optional(name, value_type)
        if found is None:
            raise StudyFileError(
                f"{self.label} holds a study {self.name!r} that sac-search did not write "
                f"(it has no {name}); name another one with --study"
            )
        return found

    def _optional(self, name: str, value_type: type[T]) -> T | None:
        with _reading(self.label):
            stored = joined_value(name, self.study.user_attrs)
        return None if stored is None else self._decode(stored, value_type)

    def _decode(self, stored: Any, value_type: type[T]) -> T:
        try:
            # By way of JSON, so that what it cannot hold is refused: NaN, half a surrogate pair.
            return records.decode(records.encode(stored), value_type)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StudyFileError(
                f"{self.label}: study {self.name!r} is damaged: {error}"
            ) from error


class TrialReader:
    """Reads what the trials of a study measured, each once it is there, and which are running."""

    # Of thousands of trials nearly all have ended: they are looked at once.

    def __init__(self, store: StudyStore) -> None:
        self._store = store
        self._ended: set[int] = set()
        self._running: list[FrozenTrial] = []

    def skip(self) -> None:
        """Leaves out what has ended by now."""
        self._read()

    def new(self) -> list[Candidate]:
        """Returns what was measured since the last time; what has not ended yet may come again."""
        found = (self._store.trial_candidate(trial) for trial in self._read())
        return [candidate for candidate in found if candidate is not None]

    @property
    def running(self) -> dict[int, str | None]:
        """The numbers of the trials that ran when last read, each with who runs it, if known."""
        return {trial.number: trial.user_attrs.get(WORKER) for trial in self._running}

    def claims(self, *, but: int | None = None) -> set[str]:
        """Returns the keys of the policies that those measure, trial `but` left out."""
        return self._store.claims_of(trial for trial in self._running if trial.number != but)

    def _read(self) -> list[FrozenTrial]:
        with _reading(self._store.label):
            trials = self._store.study.get_trials(deepcopy=False)
        new = [trial for trial in trials if trial.number not in self._ended]
        self._ended.update(trial.number for trial in new if trial.state.is_finished())
        self._running = [trial for trial in new if trial.state is TrialState.RUNNING]
        return new


def name_of_trial(trial: FrozenTrial | optuna.Trial) -> str:
    """Returns what a trial is called: `save matmul`, `plan at 95%`, `trial 17`."""
    given = trial.user_attrs.get("baseline") or trial.user_attrs.get("plan")
    name = given or f"trial {trial.number}"
    other = trial.user_attrs.get("imported_from")
    return name if other is None or "baseline" in trial.user_attrs else f"{name} of {other}"


def create_study(
    folder: Path,
    *,
    budget_bytes: int,
    environment: Environment,
    layers: Sequence[LayerTrace],
    series: str | None = None,
    evidence: Evidence = Evidence.MEASURED,
    goal: Goal = SPEED,
    storage: str | None = None,
) -> StudyStore:
    """Makes a new study in `folder`, named like it; in `storage`, where one is given.

    `series` is the name under which it is continued, when the folder has a number besides.

    Raises:
        StudyFileError: the file, or the storage, cannot be written.
        StudyError: there is one of this name that holds something, and it is for another goal.
    """
    path = folder / DATABASE_NAME
    make_folder(folder)
    label = _label(folder, storage)
    with errors_named(label):
        where = storage_at(path) if storage is None else shared_storage(storage)
        study = optuna.create_study(
            storage=where,
            study_name=folder.name,
            directions=goal.directions,
            load_if_exists=True,  # one that was killed before it had begun
        )
        if len(study.directions) != len(goal.directions):  # and was for another goal
            _refuse_begun(study, label)
            optuna.delete_study(study_name=folder.name, storage=where)
            study = optuna.create_study(
                storage=where, study_name=folder.name, directions=goal.directions
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(goal.metric_names))
    store = StudyStore(study, path, label, is_shared=storage is not None)
    store.write("series", series or folder.name)
    store.write("budget_bytes", budget_bytes)
    store.write("environment", environment)
    store.write("layers", tuple(layers))
    store.write("evidence", evidence)
    if goal != SPEED or "goal" in study.user_attrs:
        store.write("goal", goal)
    # Last of all: a study without it was never begun.
    store.write("schema_version", SCHEMA_VERSION)
    return store


def _refuse_begun(study: optuna.Study, label: str) -> None:
    if "schema_version" in study.user_attrs or study.get_trials(deepcopy=False):
        raise StudyError(
            f"{label} holds a study {study.study_name!r} for another goal; add --fresh, or name "
            "another one with --study"
        )


def open_study(folder: Path, storage: str | None = None) -> StudyStore:
    """Opens the study in `folder`, or the one of that name in `storage`.

    Raises:
        StudyNotFound: there is none.
        StudyFileError: it cannot be read, or a newer sac-search wrote it.
    """
    label = _label(folder, storage)
    study = _open_file(folder) if storage is None else _open_shared(folder.name, storage)
    with _reading(label):
        version = study.user_attrs["schema_version"]
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StudyFileError(
            f"{label} has schema version {version}, written by a newer sac-search; "
            f"this one reads up to {SCHEMA_VERSION}. Upgrade sac-search, or use another --study"
        )
    return StudyStore(study, folder / DATABASE_NAME, label, is_shared=storage is not None)


def _open_file(folder: Path) -> optuna.Study:
    path = folder / DATABASE_NAME
    if not os.path.isfile(path):
        raise StudyNotFound(f"there is no study in {folder} (no {DATABASE_NAME})")
    if not is_made(path):
        raise StudyNotFound(f"{path} holds no study that was begun")
    with _reading(path):
        storage = optuna.storages.get_storage(storage_at(path))
        found = storage.get_all_studies()
        begun = [study for study in found if "schema_version" in study.user_attrs]
        if any(BATCHES_MARK in study.user_attrs for study in found):
            raise StudyFileError(
                f"{path} holds a study over batch sizes: continue it with --maximize throughput, "
                f"name the study of one size ({folder / 'batch-N'}), or another one with --study"
            )
        others = (s for s in found if s not in begun and storage.get_n_trials(s._study_id))
        foreign = None if begun else next(others, None)
        if foreign is not None:
            raise StudyFileError(
                f"{path} holds a study {foreign.study_name!r} that sac-search did not write; "
                "name another one with --study"
            )
        if not begun:
            # Killed while it was being made: nothing was measured, so nothing is lost.
            raise StudyNotFound(f"{path} holds no study that was begun")
        # A copied folder may have another name than the study in it.
        chosen = next((study for study in begun if study.study_name == folder.name), begun[0])
        return optuna.load_study(study_name=chosen.study_name, storage=storage)


def _open_shared(name: str, storage: str) -> optuna.Study:
    label = address_without_password(storage)
    with _reading(label):
        try:
            study = optuna.load_study(study_name=name, storage=shared_storage(storage))
        except KeyError:
            raise StudyNotFound(f"there is no study {name!r} in {label}") from None
        if "schema_version" in study.user_attrs:
            return study
        if study.get_trials(deepcopy=False):
            raise StudyFileError(
                f"{label} holds a study {name!r} that sac-search did not write; "
                "name another one with --study"
            )
    raise StudyNotFound(f"the study {name!r} in {label} was never begun")


def _label(folder: Path, storage: str | None) -> str:
    if storage is None:
        return str(folder / DATABASE_NAME)
    return f"study {folder.name!r} in {address_without_password(storage)}"


def holds_batches(path: Path) -> bool:
    """Returns whether the file holds a study over batch sizes."""
    if not os.path.isfile(path) or not is_made(path):
        return False
    with _reading(path):
        found = storage_at(path).get_all_studies()
    return any(BATCHES_MARK in study.user_attrs for study in found)


def check_same(
    store: StudyStore,
    environment: Environment,
    budget_bytes: int,
    layers: Sequence[LayerTrace] | None = None,
) -> None:
    """Refuses to continue a study under other conditions.

    Raises:
        EnvironmentMismatch: times from the two cannot be compared; says what differs.
        StudyError: the study is for another budget, or for other layers.
    """
    differences = store.environment.differences(environment)
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise EnvironmentMismatch(
            f"study {store.name!r} was measured in another environment:\n{lines}\n"
            "Add --fresh to begin a new study beside it, or name another one with --study"
        )
    check_same_budget(store, budget_bytes)
    known = {layer.name for layer in store.layers}
    asked = {layer.name for layer in layers} if layers is not None else known
    if asked != known:
        example = min(asked ^ known)
        raise StudyError(
            f"study {store.name!r} is about other layers ({len(known)}, now {len(asked)}; "
            f"{example} is in one of them only), since --layers or the workload's layers differ; "
            "add --fresh, or name another one with --study"
        )


def check_same_goal(store: StudyStore, goal: Goal) -> None:
    """Refuses to continue a study for another goal.

    Raises:
        StudyError: the study is for another one; its trials were told other values.
    """
    if store.goal != goal:
        budgets = ["" if g.has_budget else ", no budget" for g in (store.goal, goal)]
        raise StudyError(
            f"study {store.name!r} is for another goal ({store.goal.describe()}{budgets[0]}), not "
            f"for this one ({goal.describe()}{budgets[1]}); add --fresh, or name another one with "
            "--study"
        )


def check_same_budget(store: StudyStore, budget_bytes: int) -> None:
    """Refuses to continue a study under another budget.

    Raises:
        StudyError: the study is for another one.
    """
    if store.budget_bytes != budget_bytes:
        raise StudyError(
            f"study {store.name!r} is for a budget of {units.format_gib(store.budget_bytes)}, not "
            f"{units.format_gib(budget_bytes)}; add --fresh, or name another one with --study"
        )


def newest_folder(root: Path, name: str, storage: str | None = None) -> Path | None:
    """Returns the folder of the newest study of the series `name`, `name-2`, `name-3`, …

    A study that a user named `gpt-2` is none of the series `gpt`.
    """
    studies = reversed(_series(root, name, storage))
    return next((folder for folder in studies if _is_of_series(folder, name, storage)), None)


def unused_folder(root: Path, name: str, storage: str | None = None) -> Path:
    """Returns the folder for the next study of the series."""
    taken = [_number(folder, name) for folder in _series(root, name, storage)]
    if 1 not in taken and newest_folder(root, name, storage) is None:
        return root / name
    return root / f"{name}-{max(taken) + 1}"


def make_folder(folder: Path) -> None:
    """Makes the folder of a study, if it is not there.

    Raises:
        StudyFileError: it cannot be made.
    """
    with errors_named(folder / DATABASE_NAME):
        folder.mkdir(parents=True, exist_ok=True)


def list_studies(root: Path, storage: str | None = None) -> list[Path]:
    """Returns the folders below `root` that hold a study.

    Of a storage that is shared, those that its studies have here, whether they are made or not.

    Raises:
        StudyFileError: `root`, or the storage, cannot be read.
    """
    if storage is not None:
        with errors_named(address_without_password(storage)):
            found = shared_storage(storage).get_all_studies()
        ours = (study for study in found if "series" in study.user_attrs)
        return sorted(root / study.study_name for study in ours)
    if not os.path.isdir(root):
        return []
    with errors_named(root):
        return sorted(f for f in root.iterdir() if os.path.isfile(f / DATABASE_NAME))


def _series(root: Path, name: str, storage: str | None) -> list[Path]:
    """Returns the folders that hold a study and are numbered like the series, oldest first."""
    numbered = [folder for folder in list_studies(root, storage) if _number(folder, name)]
    return sorted(numbered, key=lambda folder: _number(folder, name))


def _is_of_series(folder: Path, name: str, storage: str | None) -> bool:
    if folder.name == name:
        return True
    try:
        return open_study(folder, storage).series == name
    except StudyNotFound:
        return True  # killed while it was being made
    except StudyFileError:
        return True  # whoever opens it is told


def _number(folder: Path, name: str) -> int:
    """Returns the folder's number in the series: 1 for `name`, 2 for `name-2`, 0 for others."""
    if folder.name == name:
        return 1
    match = re.fullmatch(re.escape(name) + r"-([1-9]\d*)", folder.name)
    return int(match[1]) if match and int(match[1]) > 1 else 0


@contextlib.contextmanager
def _reading(where: Path | str) -> Iterator[None]:
    """Turns what goes wrong when records are read into an error that says where they are."""
    try:
        with errors_named(where):
            yield
    except (ValueError, RecursionError) as error:
        raise StudyFileError(f"{where}: the study is damaged: {error}") from error
