"""The search itself: plans and baselines, then what a sampler proposes, until nothing is gained."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import optuna

from sac_search import interrupts, records, units
from sac_search.failures import make_failure
from sac_search.policy import Policy, checkpoint_layers
from sac_search.profile import Profile
from sac_search.records import Failure, FailureKind, Outcome
from sac_search.space import Assignment, Choices, RunMode, SearchSpace
from sac_search.study.advising import ADVISORS
from sac_search.study.advisor import Advisor
from sac_search.study.baselines import FULL, NONE, RECOMPUTE_ALL, Baseline, baselines
from sac_search.study.candidate import Candidate, drift_free_seconds, rank
from sac_search.study.dashboard import readable_policy
from sac_search.study.finish import (
    describe_rejected,
    known_as_wrong,
    verified,
    with_confirmed_figures,
)
from sac_search.study.goal import Limits, Told
from sac_search.study.measurer import Measurer, dry_runs, profile_of
from sac_search.study.neighbours import neighbour
from sac_search.study.running import (
    COMPILED_PLAN_FRACTIONS,
    FIRST_BUDGETS,
    compile_failure,
    mode_weights,
    next_budget,
    next_preference,
)
from sac_search.study.sampler import (
    SamplerName,
    SignedSampler,
    assignment_in,
    make_sampler,
    parameters_of,
    suggest_assignment,
)
from sac_search.study.sharing import Alone, Membership
from sac_search.study.stopping import WINDOW, has_converged
from sac_search.study.storage import storage_errors_named
from sac_search.study.store import StudyStore, TrialReader, name_of_trial

_SMALLEST_FORECAST_ERROR = 0.01
# Where the planner has nothing new, the neighbourhood of so many is searched.
_BEST_TO_LOOK_AROUND = 3
_BEST_TO_BEGIN_AT = 5
# After so many proposals in a row that were measured before, a neighbour of the best is taken.
_PATIENCE_WITH_REPEATS = 3
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
    sampler: SamplerName = SamplerName.PLANNER
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
    on_note: Callable[[str], None] = lambda text: None
    """Told what the user should know."""
    on_estimate: Callable[[float], None] = lambda none_seconds: None
    """Told of the step without checkpointing where it is estimated, since it does not run."""
    membership: Membership = field(default_factory=Alone)
    """Its part among the searches of the study."""
    _deadline: float | None = None
    _known: dict[str, Candidate] = field(default_factory=dict)
    _asked: dict[str, Assignment] = field(default_factory=dict)
    _profile: Profile | None = None
    _advisors: dict[RunMode, Advisor] = field(default_factory=dict)
    _cannot_plan: bool = False
    _has_news: bool = False
    _listed: dict[str, Assignment] = field(default_factory=dict)
    _repeats: int = 0
    _ruled_out: int = 0
    _stop_reason: str = ""
    _was_given_up: bool = False
    _reader: TrialReader = field(init=False)

    def __post_init__(self) -> None:
        self.store.keep_decisions(self.space.decisions)
        if RunMode.EAGER not in self.space.run_modes:
            self.store.write("is_compiled_only", True)
            self.store.__dict__.pop("is_compiled_only", None)
        self._reader = TrialReader(self.store)
        self._reader.skip()
        self._known = {c.policy.key: c for c in self._stored()}
        self._asked = self._assignments_asked()
        if self.space.size <= _LISTABLE_SIZE:
            self._listed = {self.space.policy_for(a).key: a for a in self.space.assignments()}
        if self.settings.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.settings.timeout_seconds

    def _stored(self) -> list[Candidate]:
        """Returns what the study has; for a limit on the overhead with the best figures it has."""
        candidates = self.store.candidates()
        if self.store.goal.is_met_by_none:
            return candidates
        return with_confirmed_figures(self.store, candidates)

    def go_on(self) -> str:
        """Searches on by what was measured side by side meanwhile. Returns why it stopped."""
        self._known = {c.policy.key: c for c in self._stored()}
        self._stop_reason = ""
        self.store.write("is_exhausted", False)
        return self.run_trials()

    def measure_first(self) -> dict[str, Candidate]:
        """Measures full and no checkpointing, which tell whether there is anything to search.

        Full first: it fits if anything does, so its time is there when a failure is to be told.
        """
        self._known.update((c.policy.key, c) for c in self._stored())
        ends = {b.name: b for b in baselines(self.space) if b.name in (NONE, FULL)}
        # Overheads are held against no checkpointing, so where they are limited it goes before.
        is_limited = self.store.goal.max_overhead_fraction is not None
        for name in (NONE, FULL) if is_limited else (FULL, NONE):
            if name in ends:
                self._measure_baseline(ends[name])
        return {c.name: c for c in self._known.values() if c.name in (NONE, FULL)}

    def measure_plans(self) -> None:
        """Measures what the planner holds to be fastest at the budget, and a little off it.

        The forecast is exact in bytes where it is, but a step may reserve more than it allocates,
        and prices are rough: so budgets a little smaller and larger are tried as well. What a
        policy function costs by itself is measured before, since it decides whether saving pays.
        """
        if not self.settings.sampler.plans or self.store.has_plans:
            return
        if RunMode.EAGER not in self.space.run_modes:
            return
        if self._ready_advisor() is None:
            return
        for baseline in baselines(self.space):
            if baseline.name == RECOMPUTE_ALL:
                self._measure_baseline(baseline)
        for fraction in self.store.goal.plan_fractions:
            advisor = self._ready_advisor()
            if advisor is None or self._is_out_of_time():
                return
            planned = advisor.plan(fraction)
            if planned is None or planned.policy.key in self._known:
                continue
            if planned.peak_bytes > self._highest_forecast() or not planned.choices:
                continue
            self._measure_plan(f"plan at {fraction:.0%}", planned.choices)
        # Without a policy function there is less that prices may be wrong about.
        advisor = self._ready_advisor()
        subset = None
        if advisor is not None and self.store.goal.has_budget:
            subset = advisor.layer_subset()
        if subset and not self._is_out_of_time():
            self._measure_plan("layer subset", subset)
        self.store.write("has_plans", True)

    def _measure_plan(self, name: str, choices: Choices, mode: RunMode = RunMode.EAGER) -> None:
        assignment = self.space.assignment_of(choices, mode)
        if assignment is not None and self.space.policy_of(choices, mode).key not in self._known:
            self._measure_enqueued(assignment, {"plan": name})

    def measure_compiled_plans(self) -> None:
        """Measures the first compiled policies: plans, and torch's memory budget at a few values.

        The best of those budgets is verified at once: if torch gets gradients wrong under it, no
        more of them are tried.
        """
        modes, plans = self.space.run_modes, self.settings.sampler.plans
        if RunMode.COMPILE not in modes or not plans or self.store.has_compiled_plans:
            return
        if compile_failure(self._known.values()) is not None:
            return
        for fraction in COMPILED_PLAN_FRACTIONS:
            advisor = self._ready_advisor(RunMode.COMPILE)
            if self._is_out_of_time():
                return
            planned = advisor.plan(fraction) if advisor is not None else None
            if planned is not None and planned.choices:
                name = f"compiled plan at {fraction:.0%}"
                self._measure_plan(name, planned.choices, RunMode.COMPILE)
        for hundredths in FIRST_BUDGETS if RunMode.BUDGET in modes else ():
            assignment = self.space.budget_assignment(hundredths)
            if self._is_out_of_time():
                return
            if self.space.policy_for(assignment).key not in self._known:
                name = f"memory budget {hundredths / 100:.2f}"
                self._measure_enqueued(assignment, {"plan": name})
        self._verify_best_budget()
        self.store.write("has_compiled_plans", True)

    def _verify_best_budget(self) -> None:
        budgets = [c for c in self._known.values() if self._mode_of(c) is RunMode.BUDGET]
        for best in rank(budgets, self.store.budget_bytes)[:1]:
            verification = verified(self.store, self.measurer, best)
            if not isinstance(verification, Failure) and not verification.passed:
                self.on_note(
                    "torch's activation_memory_budget is wrong here (as in pytorch issues 190758 "
                    "and 190717), so no more of it is tried: "
                    f"{describe_rejected(best, verification)}"
                )

    def measure_baselines(self, until: Callable[[list[Candidate]], None] = lambda _: None) -> None:
        """Measures the plans and every baseline, as far as time allows.

        `until` is given the baselines so far after each, and may raise. Only one search of a study
        at a time: see `sharing.turn`.
        """
        self.measure_first()
        self.measure_plans()
        for baseline in baselines(self.space):
            if not self._is_out_of_time():
                self._measure_baseline(baseline)
                until([c for c in self._known.values() if c.is_baseline])
        if self._has_news:
            self.estimate_none()
        self.measure_compiled_plans()

    def estimate_none(self) -> bool:
        """Estimates the step without checkpointing where a goal needs it and it does not run.

        Returns whether it is known by then. The more was measured, the better the estimate.
        """
        none = next((c for c in self._known.values() if c.name == NONE), None)
        if self.store.goal.max_overhead_fraction is None or none is None or none.failure is None:
            return True
        advisor = self._ready_advisor(self.space.run_modes[0])
        if advisor is None or all(c.measurement is None for c in self._known.values()):
            return False
        self.store.write("none_estimate_seconds", advisor.none_seconds)
        self.on_estimate(advisor.none_seconds)
        return True

    def run(self) -> str:
        """Measures plans and baselines, and searches. Returns why it stopped."""
        self.measure_baselines()
        return self.run_trials()

    def run_trials(self) -> str:
        """Searches beyond plans and baselines. Returns why it stopped."""
        if not self.is_finished():
            self._optimize(self._propose, count=None, callbacks=[self._stop_when_finished])
        self.write_beliefs()
        return self._stop_reason

    def run_some(self, count: int) -> str:
        """Measures `count` further trials. Returns why there are fewer; nothing otherwise."""
        self._stop_reason = ""
        wanted = len(self.trial_candidates()) + count
        self.settings = replace(self.settings, trials=wanted)
        if self.settings.sampler.plans:
            self._ready_advisor()  # or it would not be known that nothing can be planned
        if not self.is_finished():
            self._optimize(self._propose, count=None, callbacks=[self._stop_when_finished])
        return "" if len(self.trial_candidates()) >= wanted else self._stop_reason

    def lowest_overhead_seconds(self) -> float | None:
        """Returns seconds above no checkpointing that hardly any policy goes under, if planned."""
        advisor = self._ready_advisor() if self.settings.sampler.plans else None
        generator = np.random.default_rng(self.settings.seed)
        return None if advisor is None else advisor.lowest_overhead_seconds(generator)

    def recompute_seconds(self) -> float | None:
        """Returns what full checkpointing recomputes in one step, as traced, if planned."""
        advisor = self._ready_advisor() if self.settings.sampler.plans else None
        return None if advisor is None else advisor.recompute_seconds

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
        elif self.settings.sampler.plans and self.store.is_exhausted:
            self._stop_reason = f"nothing that could {self.store.goal.gain} is left to measure"
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

    # --- planning ---------------------------------------------------------------------------------

    def _ready_advisor(self, mode: RunMode = RunMode.EAGER) -> Advisor | None:
        """Returns a mode's advisor, who knows all that was measured; None without forecasts."""
        if self._profile is None and not self._cannot_plan:
            self._profile = profile_of(self.measurer, self.space)
            self._cannot_plan = self._profile is None
            if self._cannot_plan and self._has_forecasts():
                self.on_note(
                    "The layers could not be profiled, so that nothing is planned: a Gaussian "
                    "process proposes the trials."
                )
        if self._profile is None:
            return None
        if mode not in self._advisors:
            self._advisors[mode] = ADVISORS[self.store.goal.kind](
                space=self.space,
                profile=self._profile,
                dry_run=dry_runs(self.measurer),
                budget_bytes=self.store.budget_bytes,
                greedy=self.settings.sampler is SamplerName.GREEDY,
                mode=mode,
                goal=self.store.goal,
            )
        self._advisors[mode].learn(self._known.values())
        return self._advisors[mode]

    def _has_forecasts(self) -> bool:
        full = checkpoint_layers(layer.name for layer in self.space.layers)
        return self.measurer.forecast(full).peak_bytes is not None

    def _advise(self, generator: np.random.Generator) -> Assignment | None:
        with interrupts.allowed():  # to plan takes a while
            return self._planned(generator)

    def _planned(self, generator: np.random.Generator) -> Assignment | None:
        self._learn_from_others()
        if self._ready_advisor(self.space.run_modes[0]) is None:
            return None
        others = self._reader.claims()
        taken = self._known.keys() | others
        for mode in self._drawn_modes(generator):
            found = self._advise_in(mode, taken, generator)
            if found is not None:
                return found
        if not others:
            self.store.write("is_exhausted", True)
        return None

    def _drawn_modes(self, generator: np.random.Generator) -> list[RunMode]:
        """Returns the modes in the order in which to look for a proposal in them."""
        if len(self.space.run_modes) == 1:
            return list(self.space.run_modes)
        candidates, budget_bytes = list(self._known.values()), self.store.budget_bytes
        weights = mode_weights(self.space, candidates, budget_bytes)
        budgets = [c for c in candidates if self._mode_of(c) is RunMode.BUDGET]
        if known_as_wrong(self.store, budgets):
            weights.pop(RunMode.BUDGET, None)
        modes = list(weights)
        # The place of the first of several exponential clocks: drawn without putting back.
        times = generator.exponential(size=len(modes)) / np.array(list(weights.values()))
        return [modes[index] for index in np.argsort(times)]

    def _advise_in(
        self, mode: RunMode, taken: Container[str], generator: np.random.Generator
    ) -> Assignment | None:
        candidates, budget_bytes = list(self._known.values()), self.store.budget_bytes
        if mode is RunMode.BUDGET:
            return next_budget(self.space, candidates, budget_bytes, taken)
        if mode is RunMode.PREFER:
            return next_preference(self.space, candidates, budget_bytes, taken)
        advisor = self._ready_advisor(mode)
        if advisor is None:
            return None
        alike = [c for c in candidates if self._mode_of(c) is mode]
        best = self.store.goal.starts(alike, self._limits(), _BEST_TO_LOOK_AROUND)
        starts = [self._asked[c.policy.key] for c in best if c.policy.key in self._asked]
        return advisor.propose(taken, generator, starts)

    def _limits(self) -> Limits:
        return self.store.limits_for(self._known.values())

    def _mode_of(self, candidate: Candidate) -> RunMode:
        return self.space.mode_of(candidate.policy)

    def write_beliefs(self) -> None:
        """Keeps in the study what is believed of costs."""
        if not self._has_news or RunMode.EAGER not in self.space.run_modes:
            return
        advisor = self._ready_advisor()
        if len(self.space.run_modes) == 1:  # of eager steps: compiled ones may well be faster
            bound_seconds = None if advisor is None else advisor.bound_seconds()
            self.store.write("bound_overhead_seconds", bound_seconds)
        if advisor is not None:
            self.store.write("insights", advisor.insights())

    def _measure(self, policy: Policy) -> Outcome:
        """Measures a policy, unless its forecast is over the budget beyond doubt."""
        if policy.compiled is not None:
            self._ruled_out = 0
            return self.measurer.measure(policy)
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
        self._measure_enqueued(baseline.assignment, {"baseline": baseline.name})

    def _measure_enqueued(self, assignment: Assignment, attributes: dict[str, str]) -> None:
        """Measures an assignment as the next trial, which gets these user attributes."""
        key = self.space.policy_for(assignment).key
        with storage_errors_named(self.store.label):
            trials = self.store.study.get_trials(deepcopy=False)
            if not any(_is_waiting(trial, attributes) for trial in trials):
                self.store.study.enqueue_trial(
                    parameters_of(self.space.decisions_for(assignment), assignment),
                    user_attrs=attributes,
                )
        # Trials that an earlier run left in the queue come first.
        for _ in range(1 + len(trials)):
            self._optimize(self._propose, count=1, callbacks=[])
            if key in self._known or key in self.store.claims():
                return

    # --- trials -----------------------------------------------------------------------------------

    def _optimize(
        self,
        objective: Callable[[optuna.Trial], tuple[float, ...]],
        count: int | None,
        callbacks: list[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]],
    ) -> None:
        study = self.store.study
        with storage_errors_named(self.store.label), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            name = self.settings.sampler
            sampler = make_sampler(
                # Without forecasts there is nothing to plan with.
                SamplerName.GP if name.plans and self._cannot_plan else name,
                self.settings.seed,
                len(study.get_trials(deepcopy=False)),
                decisions=self.space.decisions,
                propose=self._advise,
            )
            study.sampler = SignedSampler(sampler, lambda: self.membership.worker)
            while True:
                try:
                    study.optimize(
                        objective, n_trials=count, callbacks=callbacks, catch=(_Claimed,)
                    )
                    return
                except (ValueError, AssertionError) as error:
                    if not self._was_given_up and not _is_of_ended_trial(error):
                        raise
                    self._was_given_up = False
                    if count is not None or self.is_finished():
                        return

    def _propose(self, trial: optuna.Trial) -> tuple[float, ...]:
        interrupts.raise_if_unseen()
        assignment = suggest_assignment(trial, self.space)
        policy = self.space.policy_for(assignment)
        self._asked[policy.key] = assignment
        self._claim(trial, policy)
        known = self._known.get(policy.key)
        if known is None:
            self._repeats = 0
            # Baselines are measured whatever their forecast says: all is held against them.
            is_baseline = "baseline" in trial.user_attrs
            with interrupts.allowed():
                outcome = self.measurer.measure(policy) if is_baseline else self._measure(policy)
        else:
            self._repeats += 1
            outcome = known.outcome
            trial.set_user_attr("same_as", known.name)
        return self._write(trial, policy, outcome, is_new=known is None)

    def _claim(self, trial: optuna.Trial, policy: Policy) -> None:
        """Says that this trial measures `policy`, unless another search is doing so.

        Baselines and plans are measured in any case: only one search at a time is at them, and one
        that was killed at it is no longer.
        """
        is_given = not {"baseline", "plan"}.isdisjoint(trial.user_attrs)
        with self.membership.claiming():
            trial.set_user_attr("policy", records.to_builtins(policy))
            self._learn_from_others()
            is_taken = not is_given and policy.key in self._reader.claims(but=trial.number)
        for name, value in readable_policy(policy).items():
            trial.set_user_attr(name, value)
        if is_taken and policy.key not in self._known:
            self._repeats += 1
            trial.set_user_attr("outcome_text", "another search of this study measures it")
            raise _Claimed

    def _learn_from_others(self) -> None:
        """Takes over what other searches of this study have measured by now."""
        found = self._reader.new()
        self.membership.reclaim(self.store, self._reader.running)
        for candidate in found:
            if candidate.policy.key not in self._known:
                self._known[candidate.policy.key] = candidate
                self._has_news = True
                self.on_candidate(candidate, len(self.trial_candidates()))

    def _write(
        self, trial: optuna.Trial, policy: Policy, outcome: Outcome, *, is_new: bool
    ) -> tuple[float, ...]:
        self.store.keep_anchor(outcome)
        try:
            if is_new:
                trial.set_user_attr("outcome", records.to_builtins(outcome))
                self._remember(
                    name_of_trial(trial),
                    policy,
                    outcome,
                    is_baseline="baseline" in trial.user_attrs,
                )
            told = self._told(outcome)
            for name, value in self._readable(policy, outcome).items():
                trial.set_user_attr(name, value)
            # The list under "constraints" is what optuna-dashboard (0.21) reads, the other is
            # Optuna's own.
            excesses = list(told.constraints.values())
            trial.storage.set_trial_system_attr(trial._trial_id, "constraints", excesses)
            # Last of all: a completed trial without its constraint would count as feasible.
            for name, excess in told.constraints.items():
                trial.set_constraint(name, excess)
        except optuna.exceptions.UpdateFinishedTrialError as error:
            # This process stood still for so long that another search took it for dead.
            self._was_given_up = True
            self._write_anew(trial, policy, outcome, is_new=is_new)
            raise _GivenUp from error
        return told.values

    def _write_anew(
        self, trial: optuna.Trial, policy: Policy, outcome: Outcome, *, is_new: bool
    ) -> None:
        """Writes what was measured as another trial, since this one has been ended."""
        measured = {"outcome": records.to_builtins(outcome)} if is_new else {}
        self.store.add_trial(
            told=self._told(outcome),
            parameters=trial.params,
            distributions=trial.distributions,
            attributes=trial.user_attrs | measured | self._readable(policy, outcome),
        )

    def _told(self, outcome: Outcome) -> Told:
        """Returns the values and the constraints that the sampler learns from."""
        anchor_seconds = self.store.anchor_seconds or 1.0
        if self._limits().none_seconds is None:
            self.estimate_none()
        peaks: Iterable[int] = ()
        if outcome.measurement is None:  # then what fails is told as more than all that ran
            peaks = (c.measurement.peak_bytes for c in self._known.values() if c.measurement)
        return self.store.goal.told(
            outcome,
            drift_free_seconds(outcome, anchor_seconds),
            self._limits(),
            anchor_seconds=anchor_seconds,
            highest_peak_bytes=max(peaks, default=0),
        )

    def _readable(self, policy: Policy, outcome: Outcome) -> dict[str, object]:
        measurement = outcome.measurement
        if measurement is None:
            assert outcome.failure is not None
            return {"outcome_text": f"{outcome.failure.kind}: {outcome.failure.advice}"}
        seconds = drift_free_seconds(outcome, self.store.anchor_seconds or 1.0)
        assert seconds is not None
        candidate = Candidate(name="", policy=policy, outcome=outcome, step_seconds=seconds)
        readable: dict[str, object] = {
            "outcome_text": self.store.goal.verdict(candidate, self._limits()),
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
            is_reference=self.store.is_compiled_only and policy.compiled is None,
        )
        self._known[policy.key] = candidate
        self._has_news = True
        self.on_candidate(candidate, len(self.trial_candidates()))

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_when_finished(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        interrupts.raise_if_unseen()
        self._learn_from_others()
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
        before = [c for c in self._known.values() if c.is_baseline or c.imported_from is not None]
        progress = self.store.goal.progress(before, trials, self._limits())
        return has_converged(progress.history, progress.noise_fraction)

    def _enqueue_neighbour(self) -> bool:
        """Enqueues an unmeasured policy next to one of the best. Returns whether there is one."""
        generator = random.Random(f"{self.settings.seed} {len(self._known)}")  # noqa: S311
        known = list(self._known.values())
        best = self.store.goal.starts(known, self._limits(), _BEST_TO_BEGIN_AT) or known
        starts = [self._asked[c.policy.key] for c in best if c.policy.key in self._asked]
        found = neighbour(self.space, starts, self._known, generator)
        if found is None:
            unmeasured = (a for key, a in self._listed.items() if key not in self._known)
            found = next(unmeasured, None)
        if found is None:
            return False
        self.store.study.enqueue_trial(parameters_of(self.space.decisions_for(found), found))
        self._repeats = 0
        return True

    def _assignments_asked(self) -> dict[str, Assignment]:
        """Returns the assignments of all trials so far, by the keys of their policies."""
        with storage_errors_named(self.store.label):
            trials = self.store.study.get_trials(deepcopy=False)
        asked = [assignment_in(self.space, trial) for trial in trials]
        return {self.space.policy_for(a).key: a for a in asked if a is not None}


class _GivenUp(Exception):
    """Another search ended this trial, since nothing was heard of it."""


class _Claimed(Exception):
    """Another search measures the same policy: this trial ends without figures."""


def _is_of_ended_trial(error: BaseException) -> bool:
    """Returns whether Optuna was to end a trial that others had ended already.

    At the very end of a trial, so that what it measured is in it.
    """
    errors = (error, error.__context__)
    return any("Cannot tell a FAIL trial" in str(e) for e in errors)


def _is_waiting(trial: optuna.trial.FrozenTrial, attributes: dict[str, str]) -> bool:
    waiting = trial.state is optuna.trial.TrialState.WAITING
    return waiting and attributes.items() <= trial.user_attrs.items()
