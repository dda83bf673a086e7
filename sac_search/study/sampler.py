"""The samplers that a search may use."""

from __future__ import annotations

import enum
import warnings

import optuna

from sac_search.space import Decision


class SamplerName(enum.StrEnum):
    """A sampler, as named on the command line."""

    GP = "gp"
    """Gaussian process with the constraint in its acquisition function."""
    TPE = "tpe"
    """Tree-structured Parzen estimator."""
    RANDOM = "random"
    """Uniform draws: what any sampler has to beat."""


def make_sampler(
    name: SamplerName, seed: int, trial_count: int, startup_trials: int
) -> optuna.samplers.BaseSampler:
    """Returns the sampler, seeded so that a continued study does not replay its first draws.

    `startup_trials` of them are drawn at random before the model takes over; enqueued trials count.
    """
    seed = (seed + trial_count) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name is SamplerName.GP:
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup_trials)
        if name is SamplerName.TPE:
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=True, n_startup_trials=startup_trials
            )
        return optuna.samplers.RandomSampler(seed=seed)


def suggest(trial: optuna.Trial, decision: Decision) -> int:
    """Returns the trial's value of a decision: categorical for yes and no, a whole number else."""
    if decision.is_count:
        return trial.suggest_int(decision.name, 0, decision.highest)
    return int(trial.suggest_categorical(decision.name, [False, True]))
