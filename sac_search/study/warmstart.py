"""Starts a study from what others measured: peak and step time do not depend on the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from sac_search import records, units
from sac_search.errors import StudyError
from sac_search.space import Decision
from sac_search.study.candidate import Candidate, drift_free_seconds
from sac_search.study.store import (
    CONSTRAINT,
    StudyStore,
    list_studies,
    open_study,
    storage_errors_named,
)


def start_from_others(store: StudyStore, root: Path, decisions: Sequence[Decision]) -> list[str]:
    """Copies into a new study what the studies beside it measured in the same environment.

    Those with other layers or other decisions are left out. Returns the names of the studies that
    something was taken from.
    """
    if store.candidates():
        return []
    taken: list[str] = []
    known: set[str] = set()
    for folder in list_studies(root):
        if folder.resolve() == store.folder.resolve():
            continue
        try:
            other = open_study(folder)
            fits = _is_alike(other, store, decisions)
            copied = fits and _copy(other, store, known)
        except StudyError:  # damaged, or of another release: it has nothing to give
            continue
        if copied:
            taken.append(other.name)
    return taken


def _is_alike(other: StudyStore, store: StudyStore, decisions: Sequence[Decision]) -> bool:
    return (
        not other.environment.differences(store.environment)
        and [layer.name for layer in other.layers] == [layer.name for layer in store.layers]
        and other.decisions == {decision.name: decision.highest for decision in decisions}
    )


def _copy(other: StudyStore, store: StudyStore, known: set[str]) -> bool:
    measured = {
        c.policy.key: c
        for c in other.candidates()
        if c.measurement is not None and c.policy.key not in known
    }
    if not measured:
        return False
    with storage_errors_named(other.path):
        trials = other.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    as_trials = {c.policy.key: t for t in trials if (c := other.trial_candidate(t)) is not None}
    for key, candidate in measured.items():
        store.keep_anchor(candidate.outcome)
        trial = as_trials.get(key)
        if trial is not None:
            _add_trial(store, candidate, trial, other.name)
        elif candidate.is_baseline:
            store.write_baseline(candidate.name, candidate.policy, candidate.outcome)
        else:
            name = f"{candidate.name} of {other.name}"
            store.write_plan(name, candidate.policy, candidate.outcome, imported_from=other.name)
        known.add(key)
    return True


def _add_trial(
    store: StudyStore, candidate: Candidate, trial: FrozenTrial, other_name: str
) -> None:
    measurement, anchor_seconds = candidate.measurement, store.anchor_seconds
    assert measurement is not None and anchor_seconds is not None
    excess_gib = (measurement.peak_bytes - store.budget_bytes) / units.GIB
    attributes = {
        "policy": records.to_builtins(candidate.policy),
        "policy_text": candidate.policy.describe(),
        "outcome": records.to_builtins(candidate.outcome),
        "outcome_text": "fits" if excess_gib <= 0 else "over the budget",
        "peak_gib": round(measurement.peak_bytes / units.GIB, 4),
        "imported_from": other_name,
    }
    if candidate.is_baseline:
        attributes["baseline"] = candidate.name
    with storage_errors_named(store.path):
        store.study.add_trial(
            optuna.create_trial(
                value=drift_free_seconds(candidate.outcome, anchor_seconds),
                params=trial.params,
                distributions=trial.distributions,
                user_attrs=attributes,
                # As the search writes them: one for Optuna, one for the dashboard.
                system_attrs={"constraints": [excess_gib]},
                constraints={CONSTRAINT: excess_gib},
            )
        )
