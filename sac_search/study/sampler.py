"""The samplers that a search may use, one of our own among them."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from sac_search.space import Assignment, Decision, DecisionType, SearchSpace

WORKER = "worker"
"""The user attribute of a trial that says which search runs it."""

Propose = Callable[[np.random.Generator], Assignment | None]


class SamplerName(enum.StrEnum):
    """A sampler, as named on the command line."""

    PLANNER = "planner"
    """Our own: draws costs from what the measurements say and solves for them exactly."""
    GREEDY = "greedy"
    """The same, but takes the most seconds per byte again and again instead of solving."""
    GP = "gp"
    """Gaussian process with the constraint in its acquisition function."""
    TPE = "tpe"
    """Tree-structured Parzen estimator."""
    NSGA2 = "nsga2"
    """Genetic algorithm; meant for several objectives at once."""
    RANDOM = "random"
    """Uniform draws: what any sampler has to beat."""

    @property
    def plans(self) -> bool:
        """Whether it knows what the decisions mean."""
        return self in (SamplerName.PLANNER, SamplerName.GREEDY)


class PlannerSampler(optuna.samplers.BaseSampler):
    """Asks for a whole assignment at once; what is not a decision of the space is drawn at random.

    It remembers nothing: whoever proposes knows the study.
    """

    def __init__(self, decisions: Sequence[Decision], propose: Propose, seed: int) -> None:
        self._decisions = {d.name: d for d in decisions}
        self._distributions = {d.name: distribution_of(d) for d in decisions}
        self._propose = propose
        self._generator = np.random.default_rng(seed)
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        """Makes copies in other threads or processes draw differently."""
        self._generator = np.random.default_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Returns the decisions, which are the same from the first trial to the last."""
        if "fixed_params" in trial.system_attrs:  # enqueued: somebody has decided already
            return {}
        return dict(self._distributions)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Returns a value for each variable of `search_space`."""
        assignment: Mapping[str, int] | None = None
        if search_space and search_space == self._distributions:
            assignment = self._propose(self._generator)
        return {
            name: (
                self.sample_independent(study, trial, name, distribution)
                if assignment is None
                else _parameter_of(self._decisions[name], assignment[name])
            )
            for name, distribution in search_space.items()
        }

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Returns a uniform draw."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)


class SignedSampler(optuna.samplers.BaseSampler):
    """Another sampler, whose trials say who runs them before anything else: others look on.

    `worker` tells who that is now: a search that was taken for dead goes on under another name.
    """

    def __init__(self, sampler: optuna.samplers.BaseSampler, worker: Callable[[], str]) -> None:
        self._sampler = sampler
        self._worker = worker

    def reseed_rng(self) -> None:
        """Makes copies in other threads or processes draw differently."""
        self._sampler.reseed_rng()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Signs the trial."""
        study._storage.set_trial_user_attr(trial._trial_id, WORKER, self._worker())
        self._sampler.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Tells the sampler."""
        self._sampler.after_trial(study, trial, state, values)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Returns what the sampler draws at once."""
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Returns what the sampler draws at once."""
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Returns what the sampler draws one by one."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)


def make_sampler(
    name: SamplerName,
    seed: int,
    trial_count: int,
    *,
    decisions: Sequence[Decision],
    propose: Propose,
) -> optuna.samplers.BaseSampler:
    """Returns the sampler, seeded so that a continued study does not replay its first draws.

    `propose` is for those that plan. The others draw so many trials at random before their model
    takes over as there are decisions, 8 at least; enqueued trials count.
    """
    seed = (seed + trial_count) % 2**32
    startup_trials = max(8, len(decisions))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name.plans:
            return PlannerSampler(decisions, propose, seed)
        if name is SamplerName.GP:
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup_trials)
        if name is SamplerName.TPE:
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=True, n_startup_trials=startup_trials
            )
        if name is SamplerName.NSGA2:
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=startup_trials)
        return optuna.samplers.RandomSampler(seed=seed)


def distribution_of(decision: Decision) -> BaseDistribution:
    """Returns where Optuna draws a decision from.

    Yes and no, a whole number, a layer's tier, one of several names, or a part of one in
    hundredths.
    """
    if decision.type is DecisionType.COUNT:
        return IntDistribution(0, decision.highest)
    if decision.type is DecisionType.PART:
        return FloatDistribution(0.0, 1.0, step=1 / decision.highest)
    if decision.names:
        return CategoricalDistribution(decision.names)
    if decision.highest == 1:
        return CategoricalDistribution([False, True])
    return CategoricalDistribution(list(range(decision.highest + 1)))


def parameters_of(decisions: Sequence[Decision], assignment: Assignment) -> dict[str, Any]:
    """Returns what an assignment says of these decisions as Optuna's parameters."""
    return {d.name: _parameter_of(d, assignment[d.name]) for d in decisions}


def assignment_in(space: SearchSpace, trial: FrozenTrial) -> Assignment | None:
    """Returns the assignment that a trial's parameters stand for, or None if they are another's."""
    known = {decision.name: decision for decision in space.decisions}
    if not trial.params.keys() <= known.keys():
        return None
    try:
        values = {name: _value_of(known[name], value) for name, value in trial.params.items()}
    except ValueError:
        return None
    assignment = space.completed(values)
    names = {decision.name for decision in space.decisions_for(assignment)}
    return assignment if trial.params.keys() == names else None


def suggest_assignment(trial: optuna.Trial, space: SearchSpace) -> Assignment:
    """Returns the trial's assignment; only what means something is asked of the sampler."""
    modes = [d for d in space.decisions if d.type is DecisionType.MODE]
    values = {decision.name: suggest(trial, decision) for decision in modes}
    for decision in space.decisions_in(space.mode_in(values)):
        values[decision.name] = suggest(trial, decision)
    return space.completed(values)


def _parameter_of(decision: Decision, value: int) -> Any:
    if decision.type is DecisionType.PART:
        return value / decision.highest
    return distribution_of(decision).to_external_repr(value)


def _value_of(decision: Decision, parameter: Any) -> int:
    if decision.type is DecisionType.PART:
        return round(float(parameter) * decision.highest)
    return decision.names.index(parameter) if decision.names else int(parameter)


def suggest(trial: optuna.Trial, decision: Decision) -> int:
    """Returns the trial's value of a decision."""
    distribution = distribution_of(decision)
    if isinstance(distribution, FloatDistribution):
        part = trial.suggest_float(
            decision.name, distribution.low, distribution.high, step=distribution.step
        )
        return _value_of(decision, part)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(decision.name, distribution.low, distribution.high)
    assert isinstance(distribution, CategoricalDistribution)
    return _value_of(decision, trial.suggest_categorical(decision.name, distribution.choices))
