"""The search itself: the baselines first, then what a sampler proposes, until nothing is gained."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import optuna

from sac_search import records, units
from sac_search.failures import make_failure
from sac_search.forecaster import Planned, PlanRequest
from sac_search.policy import Policy
from sac_search.records import FailureKind, Outcome
from sac_search.space import Assignment, SearchSpace
from sac_search.study.baselines import FULL, NONE, Baseline, baselines
from sac_search.study.candidate import Candidate, drift_free_seconds, rank
from sac_search.study.measurer import Measurer
from sac_search.study.sampler import SamplerName, make_sampler, suggest
from sac_search.study.stopping import WINDOW, has_converged
from sac_search.study.store import CONSTRAINT, Bound, StudyStore, storage_errors_named

# A trial without figures is told as this many times the reference step: worse than full
# checkpointing can be, so that samplers turn away from it.
_FAILED_STEP_FACTOR = 2.0
# Budgets to plan for, in parts of the study's.
_PLAN_FRACTIONS = (1.0, 0.95, 0.9, 1.05, 1.1)
_SMALLEST_FORECAST_ERROR = 0.01
# After so many proposals in a row that were measured before, a neighbour of the best is taken.
_PATIENCE_WITH_REPEATS = 3
_NEIGHBOUR_ATTEMPTS = 300
# After so many proposals in a row that were ruled out by forecast there is nothing left that fits.
_PATIENCE_WITH_RULED_OUT = 50
# Of spaces up to this size every policy is known in advance, and so is the last one.
_LISTABLE_SIZE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How long and how to search."""

    trials: int = 40
    """Trials to measure beyond the baselines."""
    timeout_seconds: float | None = None
    """Stop after this time."""
    tiers: int = 2
    """Save sets that layers of one kind may have in a plan; 0 for no plans."""
    sampler: SamplerName = SamplerName.GP
    """Who proposes."""
    seed: int = 0
    """Of the sampler."""


OnCandidate = Callable[[Candidate, int], None]


@dataclass(slots=True)
class Search:
    """One run of the search over a study, new or continued.

    Raises:
        StudyError: the study searches other decisions.
    """

    store: StudyStore
    """Where it is kept."""
    space: SearchSpace
    """What may be tried."""
    measurer: Measurer
    """Who measures."""
    settings: SearchSettings
    """How long and how."""
    on_candidate: OnCandidate = lambda candidate, trials_done: None
    """Told of every new candidate and of the trials done so far."""
    _deadline: float | None = None
    _known: dict[str, Candidate] = field(default_factory=dict)
    _listed: dict[str, Assignment] = field(default_factory=dict)
    _repeats: int = 0
    _ruled_out: int = 0
    _stop_reason: str = ""

    def __post_init__(self) -> None:
        self.store.keep_decisions(self.space.decisions)
        self.store.fail_abandoned_trials()
        self._known = {c.policy.key: c for c in self.store.candidates()}
        if self.space.size <= _LISTABLE_SIZE:
            self._listed = {self.space.policy_for(a).key: a for a in self.space.assignments()}
        if self.settings.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.settings.timeout_seconds

    def measure_first(self) -> dict[str, Candidate]:
        """Measures full and no checkpointing, which tell whether there is anything to search.

        Full first: it fits if anything does, so its time is there when a failure is to be told.
        """
        ends = {b.name: b for b in baselines(self.space) if b.name in (NONE, FULL)}
        for name in (FULL, NONE):
            if name in ends:
                self._measure_baseline(ends[name])
        return {c.name: c for c in self._known.values() if c.name in (NONE, FULL)}

    def measure_plans(self) -> None:
        """Measures what the planner holds to be fastest at the budget, and a little off it.

        The forecast is exact in bytes where it is, but a step may reserve more than it allocates,
        and prices are rough: so budgets a little smaller and larger are tried as well.
        """
        if self.settings.tiers == 0 or self.store.bound is not None:
            return
        request = PlanRequest(
            budgets_bytes=self._plan_budgets(),
            tiers=self.settings.tiers,
            full_overhead_seconds=self._full_overhead_seconds(),
            # Of a search that is short of time, half is for measuring.
            most_seconds=(
                None
                if self._deadline is None
                else max(1.0, (self._deadline - time.monotonic()) / 2)
            ),
        )
        plans = self._named_plans(self.measurer.plan(request))
        for fraction, planned in plans:
            if self._is_out_of_time():
                return
            within = planned.peak_bytes <= self._highest_forecast()
            if within and planned.policy.key not in self._known and planned.policy.layers:
                name = f"plan at {fraction:.0%}"
                outcome = self._measure(planned.policy)
                self.store.write_plan(name, planned.policy, outcome)
                self._remember(name, planned.policy, outcome, is_baseline=False)
        for fraction, planned in plans:
            if fraction == 1 and planned.bound_seconds is not None:
                bound = Bound(
                    overhead_seconds=planned.bound_seconds,
                    planned_overhead_seconds=planned.overhead_seconds,
                )
                self.store.write("bound", bound)

    def run(self) -> str:
        """Measures plans and the baselines that are left, and searches. Returns why it stopped."""
        self.measure_first()
        self.measure_plans()
        for baseline in baselines(self.space):
            if self._is_out_of_time():
                return self._stop_reason
            self._measure_baseline(baseline)
        if self.is_finished():
            return self._stop_reason
        self._optimize(self._propose, count=None, callbacks=[self._stop_when_finished])
        return self._stop_reason

    def is_finished(self) -> bool:
        """Whether the study needs no further trials; the reason is then known."""
        trials = self.trial_candidates()
        if self._is_out_of_time():
            return True
        if len(trials) >= self.settings.trials:
            self._stop_reason = f"{len(trials)} trials measured (--trials {self.settings.trials})"
        elif self._listed and self._listed.keys() <= self._known.keys():
            self._stop_reason = f"all {len(self._listed)} policies of the search space tried"
        elif self._ruled_out >= _PATIENCE_WITH_RULED_OUT:
            self._stop_reason = f"the last {self._ruled_out} proposals were over by forecast"
        elif self._has_converged(trials):
            self._stop_reason = f"no gain beyond the noise in the last {WINDOW} trials"
        return bool(self._stop_reason)

    def trial_candidates(self) -> list[Candidate]:
        """Returns the candidates beyond the baselines that this study measured."""
        return [
            c
            for c in self._known.values()
            if not (c.is_baseline or c.is_ruled_out or c.imported_from is not None)
        ]

    def _plan_budgets(self) -> tuple[int, ...]:
        """Returns the planner's budgets, which are for allocated bytes, as those of a study.

        A study's budget may be for reserved bytes: what the caching allocator reserves beyond that
        is taken from what full checkpointing was measured to need.
        """
        full = next((c for c in self._known.values() if c.name == FULL), None)
        measurement = full.measurement if full is not None else None
        ratio = measurement.allocated_bytes / measurement.peak_bytes if measurement else 1.0
        return tuple(round(f * ratio * self.store.budget_bytes) for f in _PLAN_FRACTIONS)

    def _named_plans(self, plans: Sequence[Planned]) -> list[tuple[float, Planned]]:
        fractions = dict(zip(self._plan_budgets(), _PLAN_FRACTIONS, strict=True))
        return [(fractions.get(plan.budget_bytes, 1.0), plan) for plan in plans]

    def _full_overhead_seconds(self) -> float | None:
        seconds = {c.name: c.step_seconds for c in self._known.values() if c.name in (NONE, FULL)}
        none, full = seconds.get(NONE), seconds.get(FULL)
        return full - none if none is not None and full is not None else None

    def _measure(self, policy: Policy) -> Outcome:
        """Measures a policy, unless its forecast is over the budget beyond doubt."""
        forecast = self.measurer.forecast(policy)
        if forecast.peak_bytes is None or forecast.peak_bytes <= self._highest_forecast():
            self._ruled_out = 0
            return self.measurer.measure(policy)
        self._ruled_out += 1
        message = (
            f"forecast {units.format_gib(forecast.peak_bytes)}, budget "
            f"{units.format_gib(self.store.budget_bytes)}"
        )
        return Outcome(
            failure=make_failure(FailureKind.FORECAST_OVER_BUDGET, message),
            forecast_peak_bytes=forecast.peak_bytes,
        )

    def _highest_forecast(self) -> float:
        """Returns the forecast above which a policy is over the budget beyond doubt.

        That is the budget and as much as forecasts have been too high; a hundredth at least.
        """
        errors = [_SMALLEST_FORECAST_ERROR]
        for candidate in self._known.values():
            measurement, forecast = candidate.measurement, candidate.outcome.forecast_peak_bytes
            if measurement is not None and forecast is not None:
                errors.append(forecast / measurement.allocated_bytes - 1)
        return self.store.budget_bytes * (1 + max(errors))

    # --- baselines --------------------------------------------------------------------------------

    def _measure_baseline(self, baseline: Baseline) -> None:
        if baseline.policy.key in self._known:
            return
        if baseline.assignment is None:
            outcome = self.measurer.measure(baseline.policy)
            self.store.write_baseline(baseline.name, baseline.policy, outcome)
            self._remember(baseline.name, baseline.policy, outcome, is_baseline=True)
            return
        assignment = baseline.assignment
        with storage_errors_named(self.store.path):
            trials = self.store.study.get_trials(deepcopy=False)
            if not any(_is_waiting(trial, baseline) for trial in trials):
                self.store.study.enqueue_trial(
                    self._parameters(assignment), user_attrs={"baseline": baseline.name}
                )
        # Trials that an earlier run left in the queue come first.
        for _ in range(1 + len(trials)):
            self._optimize(self._propose, count=1, callbacks=[])
            if baseline.policy.key in self._known:
                return

    def _parameters(self, assignment: Assignment) -> dict[str, object]:
        return {
            d.name: assignment[d.name] if d.is_count else bool(assignment[d.name])
            for d in self.space.decisions
        }

    # --- trials -----------------------------------------------------------------------------------

    def _optimize(
        self,
        objective: Callable[[optuna.Trial], float],
        count: int | None,
        callbacks: list[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]],
    ) -> None:
        study = self.store.study
        with storage_errors_named(self.store.path), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = make_sampler(
                self.settings.sampler,
                self.settings.seed,
                len(study.get_trials(deepcopy=False)),
                startup_trials=max(8, len(self.space.decisions)),
            )
            study.optimize(objective, n_trials=count, callbacks=callbacks)

    def _propose(self, trial: optuna.Trial) -> float:
        assignment = {decision.name: suggest(trial, decision) for decision in self.space.decisions}
        policy = self.space.policy_for(assignment)
        known = self._known.get(policy.key)
        trial.set_user_attr("policy", records.to_builtins(policy))
        trial.set_user_attr("policy_text", policy.describe())
        if known is None:
            self._repeats = 0
            is_baseline = "baseline" in trial.user_attrs
            outcome = self.measurer.measure(policy) if is_baseline else self._measure(policy)
        else:
            self._repeats += 1
            outcome = known.outcome
            trial.set_user_attr("same_as", known.name)
        return self._write(trial, policy, outcome, is_new=known is None)

    def _write(
        self, trial: optuna.Trial, policy: Policy, outcome: Outcome, *, is_new: bool
    ) -> float:
        self.store.keep_anchor(outcome)
        if is_new:
            trial.set_user_attr("outcome", records.to_builtins(outcome))
            baseline = trial.user_attrs.get("baseline")
            name = baseline or f"trial {trial.number}"
            self._remember(name, policy, outcome, is_baseline=baseline is not None)
        seconds, excess_gib = self._told(outcome)
        for name, value in self._readable(outcome, seconds).items():
            trial.set_user_attr(name, value)
        # The list under "constraints" is what optuna-dashboard (0.21) reads, the other is Optuna's.
        trial.storage.set_trial_system_attr(trial._trial_id, "constraints", [excess_gib])
        # Last of all: a completed trial without its constraint would count as feasible.
        trial.set_constraint(CONSTRAINT, excess_gib)
        return seconds

    def _told(self, outcome: Outcome) -> tuple[float, float]:
        """Returns the value and the constraint that the sampler learns from."""
        anchor_seconds = self.store.anchor_seconds or 1.0
        budget_bytes = self.store.budget_bytes
        if outcome.failure is not None:
            excess_bytes = budget_bytes
            if outcome.failure.kind is FailureKind.FORECAST_OVER_BUDGET:
                assert outcome.forecast_peak_bytes is not None
                excess_bytes = outcome.forecast_peak_bytes - budget_bytes
            return _FAILED_STEP_FACTOR * anchor_seconds, excess_bytes / units.GIB
        seconds = drift_free_seconds(outcome, anchor_seconds)
        assert seconds is not None and outcome.measurement is not None
        return seconds, (outcome.measurement.peak_bytes - budget_bytes) / units.GIB

    def _readable(self, outcome: Outcome, seconds: float) -> dict[str, object]:
        measurement = outcome.measurement
        if measurement is None:
            assert outcome.failure is not None
            return {"outcome_text": f"{outcome.failure.kind}: {outcome.failure.advice}"}
        fits = measurement.peak_bytes <= self.store.budget_bytes
        readable: dict[str, object] = {
            "outcome_text": "fits" if fits else "over the budget",
            "peak_gib": round(measurement.peak_bytes / units.GIB, 4),
            "peak_phase": str(measurement.peak_phase),
        }
        if outcome.forecast_peak_bytes is not None:
            readable["forecast_peak_gib"] = round(outcome.forecast_peak_bytes / units.GIB, 4)
        none = next((c for c in self._known.values() if c.name == NONE), None)
        if none is not None and none.step_seconds is not None:
            readable["overhead_percent"] = round(100 * (seconds / none.step_seconds - 1), 2)
        return readable

    def _remember(self, name: str, policy: Policy, outcome: Outcome, *, is_baseline: bool) -> None:
        candidate = Candidate(
            name=name,
            policy=policy,
            outcome=outcome,
            step_seconds=drift_free_seconds(outcome, self.store.anchor_seconds or 1.0),
            is_baseline=is_baseline,
        )
        self._known[policy.key] = candidate
        self.on_candidate(candidate, len(self.trial_candidates()))

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_when_finished(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if self.is_finished():
            study.stop()
        elif self._repeats >= _PATIENCE_WITH_REPEATS and not self._enqueue_neighbour():
            self._stop_reason = "every policy near the best has been measured"
            study.stop()

    def _is_out_of_time(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop_reason = f"--timeout {self.settings.timeout_seconds:g} s is over"
            return True
        return False

    def _has_converged(self, trials: list[Candidate]) -> bool:
        given = (c for c in self._known.values() if c.is_baseline or c.imported_from is not None)
        before = rank(given, self.store.budget_bytes)
        best = min((c.step_seconds for c in before if c.step_seconds is not None), default=None)
        history: list[float | None] = []
        noises = []
        for candidate in trials:
            if candidate.fits(self.store.budget_bytes):
                assert candidate.step_seconds is not None and candidate.measurement is not None
                best = min(candidate.step_seconds, best or candidate.step_seconds)
                noises.append(candidate.measurement.step_noise_fraction)
            history.append(best)
        noise = sorted(noises)[len(noises) // 2] if noises else 0.0
        return has_converged(history, noise)

    def _enqueue_neighbour(self) -> bool:
        """Enqueues an unmeasured policy next to one of the best. Returns whether there is one."""
        generator = random.Random(f"{self.settings.seed} {len(self._known)}")  # noqa: S311
        best = rank(self._known.values(), self.store.budget_bytes)[:5] or list(self._known.values())
        starts = [a for a in (self._assignment_of(c) for c in best) if a is not None]
        decisions = self.space.decisions
        for attempt in range(_NEIGHBOUR_ATTEMPTS if starts else 0):
            assignment = dict(generator.choice(starts))
            for decision in generator.sample(decisions, min(len(decisions), 1 + attempt // 60)):
                assignment[decision.name] = generator.randint(0, decision.highest)
            if self.space.policy_for(assignment).key not in self._known:
                return self._enqueue(assignment)
        unmeasured = (a for key, a in self._listed.items() if key not in self._known)
        remaining = next(unmeasured, None)
        return remaining is not None and self._enqueue(remaining)

    def _enqueue(self, assignment: Assignment) -> bool:
        self.store.study.enqueue_trial(self._parameters(assignment))
        self._repeats = 0
        return True

    def _assignment_of(self, candidate: Candidate) -> Assignment | None:
        classes = [str(op_class) for tier in candidate.policy.tiers for op_class in tier.classes]
        return self.space.assignment_for(candidate.policy.layer_names, classes)


def _is_waiting(trial: optuna.trial.FrozenTrial, baseline: Baseline) -> bool:
    waiting = trial.state is optuna.trial.TrialState.WAITING
    return waiting and trial.user_attrs.get("baseline") == baseline.name
