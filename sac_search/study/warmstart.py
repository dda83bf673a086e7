"""Starts a study from what others measured: peak and step time do not depend on the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from sac_search import records, units
from sac_search.errors import StudyError
from sac_search.space import Decision
from sac_search.study.baselines import NONE
from sac_search.study.candidate import Candidate, drift_free_seconds
from sac_search.study.dashboard import readable_policy
from sac_search.study.storage import storage_errors_named
from sac_search.study.store import StudyStore, list_studies, open_study
from sac_search.trace import LayerTrace


def adopt_trace(store: StudyStore, root: Path, storage: str | None = None) -> None:
    """Takes over the traced layers of a study that others of this environment can start from.

    Traced seconds differ from one trace to the next, and with them the decisions that are worth
    something; a study that has not begun loses nothing by having those of another.
    """
    if store.decisions is not None or store.candidates():
        return
    for other in _others(store, root, storage):
        if _shape_of(other.layers) == _shape_of(store.layers):
            store.replace_layers(other.layers)
            return


def _shape_of(layers: Sequence[LayerTrace]) -> list[tuple[str, str, list[str]]]:
    return [(la.name, la.kind, [op.site_name for op in la.ops]) for la in layers]


def _others(store: StudyStore, root: Path, storage: str | None) -> Iterator[StudyStore]:
    """Yields the studies beside this one that were measured in the same environment."""
    for folder in list_studies(root, storage):
        if folder.resolve() == store.folder.resolve():
            continue
        try:
            other = open_study(folder, storage)
            if not other.environment.differences(store.environment):
                yield other
        except StudyError:  # damaged, or of another release: it has nothing to give
            continue


def start_from_others(
    store: StudyStore, root: Path, decisions: Sequence[Decision], storage: str | None = None
) -> list[str]:
    """Copies into a new study what the studies beside it measured in the same environment.

    Those with other layers or other decisions are left out. Returns the names of the studies that
    something was taken from.
    """
    if store.candidates():
        return []
    taken: list[str] = []
    known: set[str] = set()
    for other in _others(store, root, storage):
        try:
            copied = _has_same_decisions(other, store, decisions) and _copy(other, store, known)
        except StudyError:
            continue
        if copied:
            taken.append(other.name)
    return taken


def _has_same_decisions(
    other: StudyStore, store: StudyStore, decisions: Sequence[Decision]
) -> bool:
    return [layer.name for layer in other.layers] == [
        layer.name for layer in store.layers
    ] and other.decisions == {decision.name: decision.highest for decision in decisions}


def _copy(other: StudyStore, store: StudyStore, known: set[str]) -> bool:
    measured = {
        c.policy.key: c
        for c in other.candidates()
        if c.measurement is not None and c.policy.key not in known
    }
    if not measured:
        return False
    with storage_errors_named(other.label):
        trials = other.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    as_trials = {c.policy.key: t for t in trials if (c := other.trial_candidate(t)) is not None}
    none = next((c for c in measured.values() if c.name == NONE), None)
    for key, candidate in measured.items():
        trial = as_trials.get(key)
        if trial is None and not candidate.is_baseline:
            continue  # measured in a trial that was killed before its end
        store.keep_anchor(candidate.outcome)
        if trial is not None:
            _add_trial(store, candidate, trial, other.name, none)
        else:
            store.write_baseline(candidate.name, candidate.policy, candidate.outcome)
        known.add(key)
    return True


def _add_trial(
    store: StudyStore,
    candidate: Candidate,
    trial: FrozenTrial,
    other_name: str,
    none: Candidate | None,
) -> None:
    measurement, anchor_seconds = candidate.measurement, store.anchor_seconds
    assert measurement is not None and anchor_seconds is not None
    seconds = drift_free_seconds(candidate.outcome, anchor_seconds)
    own = replace(candidate, step_seconds=seconds)
    limits = store.limits_for(
        [] if none is None else [none.with_outcome(none.outcome, anchor_seconds)]
    )
    told = store.goal.told(
        candidate.outcome,
        seconds,
        limits,
        anchor_seconds=anchor_seconds,
        highest_peak_bytes=measurement.peak_bytes,
    )
    attributes = {
        "policy": records.to_builtins(candidate.policy),
        **readable_policy(candidate.policy),
        "outcome": records.to_builtins(candidate.outcome),
        "outcome_text": store.goal.verdict(own, limits),
        "peak_gib": round(measurement.peak_bytes / units.GIB, 4),
        "imported_from": other_name,
    }
    for name in ("baseline", "plan"):
        if name in trial.user_attrs:
            attributes[name] = trial.user_attrs[name]
    store.add_trial(
        told=told,
        parameters=trial.params,
        distributions=trial.distributions,
        attributes=attributes,
    )
