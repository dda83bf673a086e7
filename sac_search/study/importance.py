"""Which decisions of a study mattered: for being among its fastest policies under the budget."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from sac_search.study.goal import SPEED
from sac_search.study.storage import storage_errors_named
from sac_search.study.store import StudyStore

# With fewer trials, or fewer that fit, any two decisions look alike by chance.
_LEAST_TRIALS = 20
_LEAST_FITTING = 5
_BEST_FRACTION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """What one decision of the search space counted for."""

    name: str
    """Name of the decision, as the trials have it: `save.matmul`, `layers.Block`."""
    fraction: float
    """Its part; those of all decisions come to 1."""


def importances(store: StudyStore) -> tuple[Importance, ...]:
    """Returns the decisions of a study, what counts most first; none where trials are too few.

    By PED-ANOVA over the trials that ended: how differently the best quarter of them decides, or
    all that fit where those are fewer. What does not fit counts as slower than all that does.
    """
    if store.goal != SPEED:
        return ()  # they are of a policy's speed
    with storage_errors_named(store.label):
        trials = store.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    found = [(trial, store.trial_candidate(trial)) for trial in trials]
    seconds = {
        trial.number: candidate.step_seconds
        for trial, candidate in found
        if candidate is not None and candidate.fits(store.budget_bytes)
    }
    fitting = [s for s in seconds.values() if s is not None]
    if len(trials) < _LEAST_TRIALS or len(fitting) < _LEAST_FITTING:
        return ()
    slowest = 2 * max(fitting)
    # Beyond those that fit all are alike, so none of them may be among the best.
    best_fraction = min(_BEST_FRACTION, len(fitting) / len(trials))

    def target(trial: FrozenTrial) -> float:
        return seconds.get(trial.number) or slowest

    evaluator = PedAnovaImportanceEvaluator(target_quantile=best_fraction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its being experimental, and of parameters without use
        try:
            found_fractions = get_param_importances(store.study, evaluator=evaluator, target=target)
        except (ValueError, RuntimeError):
            return ()  # nothing differs, or no decision is in all of the trials
    return tuple(Importance(name=n, fraction=f) for n, f in found_fractions.items())
