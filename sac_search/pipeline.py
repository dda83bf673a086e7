"""The search with any measurer: load, baselines, search, confirm, verify, export."""

from __future__ import annotations

import collections
import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sac_search import interrupts, units
from sac_search.artifacts import (
    REPORT_FILE,
    make_result,
    no_fit_message,
    write_files,
    write_report,
)
from sac_search.errors import (
    NoPolicyFits,
    SacSearchError,
    StudyError,
    StudyNotFound,
    WorkloadError,
)
from sac_search.failures import OF_MEMORY
from sac_search.options import Compile, Listener, SearchOptions
from sac_search.records import Evidence, Failure, FailureKind
from sac_search.space import EAGER_ONLY, build_space
from sac_search.study.attendance import taking_part
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, rank
from sac_search.study.final import FinalStage
from sac_search.study.finish import (
    Winner,
    choose_winner,
    confirm,
    known_as_wrong,
    known_candidates,
    with_confirmed_figures,
)
from sac_search.study.forecasting import ForecastStudy
from sac_search.study.goal import GoalKind
from sac_search.study.measurer import Measurer
from sac_search.study.result import SearchResult, find_candidate, floor_of
from sac_search.study.running import compile_failure
from sac_search.study.search import Search, SearchSettings
from sac_search.study.sharing import Membership
from sac_search.study.store import (
    StudyStore,
    check_same,
    check_same_budget,
    check_same_goal,
    create_study,
    newest_folder,
    open_study,
    unused_folder,
)
from sac_search.study.timelines import draw_timelines
from sac_search.study.warmstart import adopt_trace, start_from_others
from sac_search.worker.session import Description, Verdict

R = TypeVar("R")

_POLL_SECONDS = 0.5
# Baselines that fail in the same way, after which the workload is at fault.
_MOST_ALIKE_FAILURES = 3
# So often a search goes on, since its best turned out to be above the limit side by side.
_MOST_RETURNS = 2
# What a policy function may well do, and plain checkpointing not.
_OF_POLICY_FUNCTIONS = frozenset(
    {
        FailureKind.RECOMPUTE_MISMATCH,
        FailureKind.MUTATED_SAVED_TENSOR,
        FailureKind.NOT_IN_STORAGE,
    }
)


def run_search(
    measurer: Measurer,
    name: str,
    options: SearchOptions,
    listener: Listener,
    folder: Path | None = None,
) -> SearchResult:
    """Runs all stages. Returns the result, which is on disk by then.

    `folder` is the study's, where that was chosen before; the newest of the series else.

    Raises:
        NoPolicyFits, WorkloadError, UsageError: as `search` does.
    """
    with interrupts.listening(signal.SIGINT):
        description = _described(measurer, options, listener)
        folder = folder or study_folder(name, options)
        with taking_part(folder, options.storage) as membership:
            stages = _Stages(
                name=name,
                folder=folder,
                description=description,
                measurer=measurer,
                options=options,
                listener=listener,
                membership=membership,
            )
            result = stages.run()
    if result.best is None and not result.interrupted:
        raise NoPolicyFits(no_fit_message(result))
    return result


def run_forecast(
    measurer: Measurer, name: str, options: SearchOptions, listener: Listener
) -> SearchResult:
    """Forecasts instead of measuring. Returns the result, which is on disk by then.

    Raises:
        NoPolicyFits: by forecast nothing stays under the budget.
        WorkloadError: the workload itself fails, or cannot be forecast.
        UsageError: the study holds measured trials.
    """
    description = _described(measurer, options, listener)
    assert description.priced_step_seconds is not None
    folder = study_folder(name, options)
    with taking_part(folder, options.storage) as membership, _turn(membership, folder, listener):
        store = _open_or_create(folder, name, options, description, listener)
        listener.on_phase("forecast")
        study = ForecastStudy(
            store,
            build_space(store.layers, options.layer_choice, options.granularity, options.tiers),
            measurer,
            description.priced_step_seconds,
            lambda candidate: listener.on_candidate(candidate, 0, store.budget_bytes),
        )
        winner = study.run()
        store.write(
            "arguments", (*options.arguments(), "--forecast", store.environment.device_name)
        )
        listener.on_phase("export")
        if options.report:
            _draw(store, measurer, winner, listener)
        result = make_result(store, winner, "forecast", False, description.notes)
        write_files(result, store.folder)
        if options.report:
            result = _reported_in_folder(result, store, listener)
    if result.best is None:
        raise NoPolicyFits(no_fit_message(result))
    return result


def study_folder(name: str, options: SearchOptions) -> Path:
    """Returns the folder of the study that a search continues, or begins."""
    if options.fresh:
        return unused_folder(options.root, name, options.storage)
    return newest_folder(options.root, name, options.storage) or options.root / name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """One search of a study, which others may search at the same time.

    They take turns at what only one should do: making the study, the baselines, and the end.
    """

    name: str
    folder: Path
    description: Description
    measurer: Measurer
    options: SearchOptions
    listener: Listener
    membership: Membership

    def run(self) -> SearchResult:
        with self._turn():
            store = _open_or_create(
                self.folder, self.name, self.options, self.description, self.listener
            )
            self.membership.reclaim(store, store.running_trials())
            if self.membership.has_others():
                self.listener.on_note(
                    f"Another search of study {store.name!r} is running; the two share their "
                    "trials. On the same device each slows the other's steps."
                )
            search = self._search_of(store)
        reason = self._searched_or_interrupted(search)
        try:
            if reason is not None:
                return self._finished(store, reason, interrupted=False)
        except KeyboardInterrupt:
            self._acknowledge()
        # Not inside `except`: there the interrupted step's tensors would still be alive.
        return self._finished(store, "interrupted", interrupted=True)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        return _turn(self.membership, self.folder, self.listener)

    def _searched_or_interrupted(self, search: Search) -> str | None:
        try:
            return self._searched(search)
        except KeyboardInterrupt:
            self._acknowledge()
            self._give_up_own_trials(search.store)
            return None

    def _give_up_own_trials(self, store: StudyStore) -> None:
        for number, worker in store.running_trials().items():
            if worker == self.membership.worker:
                store.give_up_trial(number)

    def _acknowledge(self) -> None:
        interrupts.acknowledge()
        self.listener.on_note(
            "Interrupted: verifying and exporting the best so far (again to give up)."
        )

    def _search_of(self, store: StudyStore) -> Search:
        options = self.options
        if options.compile_options is not None:
            store.write("compile_options", options.compile_options)
        if not options.fresh:
            adopt_trace(store, options.root, options.storage)
        space = build_space(
            store.layers,
            options.layer_choice,
            options.granularity,
            options.tiers,
            options.run_modes,
            can_profile=store.environment.device != "cpu",
            save_collectives=options.save_collectives,
        )
        if not options.fresh:
            for other in start_from_others(store, options.root, space.decisions, options.storage):
                self.listener.on_note(
                    f"Starting from what study {other!r} measured in this environment."
                )
        return Search(
            store=store,
            space=space,
            measurer=self.measurer,
            settings=SearchSettings(
                trials=options.trials,
                timeout_seconds=options.timeout_seconds,
                sampler=options.sampler,
                seed=options.seed,
            ),
            on_candidate=lambda candidate, done: self.listener.on_candidate(
                candidate, done, store.budget_bytes
            ),
            on_note=self.listener.on_note,
            # Asked for when there is one: listeners of before the limit on overheads have it not.
            on_estimate=lambda none_seconds: self.listener.on_estimate(none_seconds),
            membership=self.membership,
        )

    def _searched(self, search: Search) -> str:
        """Measures baselines and trials. Returns why there are no more."""
        with self._turn():
            known = search.store.candidates()
            if search.store.none_estimate_seconds is not None:
                self.listener.on_estimate(search.store.none_estimate_seconds)
            if known:
                trials_done = len(search.trial_candidates())
                self.listener.on_known(known, trials_done, search.store.budget_bytes)
            self.listener.on_phase("baselines", total=self.options.trials)
            first = search.measure_first()
            none = first.get(NONE)
            is_eager = self.options.run_modes == EAGER_ONLY  # else there is more than memory to win
            is_met = search.store.goal.is_met_by_none and is_eager
            if is_met and none is not None and none.fits(search.store.budget_bytes):
                return "the step fits without checkpointing"
            _refuse_failing_ends(first.values())
            floor_bytes = floor_of(first.get(FULL), search.store.layers)
            if is_eager and floor_bytes is not None and floor_bytes > search.store.budget_bytes:
                return "the budget is under the floor"
            if not search.estimate_none():
                assert none is not None and none.failure is not None
                raise NoPolicyFits(
                    f"the step without checkpointing does not run here ({none.failure.kind}), and "
                    "its time cannot be estimated either, since its layers cannot be forecast; so "
                    "no overhead is known. Search with --budget-gb alone, or use a smaller batch"
                )
            self.listener.on_phase("plan")
            search.measure_plans()
            self.listener.on_phase("baselines")
            search.measure_baselines(until=_refuse_failures_alike)
            self._refuse_to_compile(search)
        self.listener.on_phase("search")
        reason = search.run_trials()
        self._await_others(search.store)
        for _ in range(_MOST_RETURNS if search.store.goal.kind is GoalKind.MEMORY else 0):
            self.listener.on_phase("confirm")
            with self._turn():
                has_changed = self._final_stage(search.store).settle()
            if not has_changed:
                break
            self.listener.on_phase("search")
            reason = search.go_on()
            self._await_others(search.store)
        return reason

    def _await_others(self, store: StudyStore) -> None:
        """Waits for the trials that other searches are at, so that all choose from the same.

        Not for those that they begin meanwhile.
        """
        if not self.membership.can_tell:
            return
        awaited = self._trials_of_others(store)
        if awaited:
            self.listener.on_note("Waiting for the last trials of the study's other searches.")
        while awaited:
            time.sleep(_POLL_SECONDS)
            awaited &= self._trials_of_others(store)

    def _trials_of_others(self, store: StudyStore) -> set[int]:
        self.membership.reclaim(store, store.running_trials())
        running = store.running_trials()
        return {n for n, worker in running.items() if worker and worker != self.membership.worker}

    def _refuse_to_compile(self, search: Search) -> None:
        failed = compile_failure(search.store.candidates())
        if failed is None:
            return
        assert failed.failure is not None
        if self.options.compile is Compile.ON:
            raise _failing(failed.failure, "the step does not run compiled")
        self.listener.on_note(
            "The step does not run compiled, so only eager policies are searched: "
            f"{failed.failure.message}"
        )

    def _finished(self, store: StudyStore, reason: str, *, interrupted: bool) -> SearchResult:
        with self._turn():
            winner = self._winner(store, interrupted)
            store.write("arguments", self.options.arguments())
            store.write("stop_reason", reason)
            self.listener.on_phase("export")
            if self.options.report and not interrupted:
                _draw(store, self.measurer, winner, self.listener)
            result = make_result(store, winner, reason, interrupted, self.description.notes)
            write_files(result, store.folder)
            store.write("is_finished", not interrupted)
            if self.options.report:
                result = _reported_in_folder(result, store, self.listener)
        return result

    def _winner(self, store: StudyStore, interrupted: bool) -> Winner:
        if store.goal.kind is not GoalKind.SPEED:
            return self._winner_of_goal(store, interrupted)
        candidates = store.candidates()
        none = find_candidate(candidates, NONE)
        is_eager = self.options.run_modes == EAGER_ONLY
        wrong = known_as_wrong(store, rank(candidates, store.budget_bytes))
        if is_eager and none is not None and none.fits(store.budget_bytes):
            ranked = [none]
        elif interrupted:
            ranked = rank(with_confirmed_figures(store, candidates), store.budget_bytes)
        else:
            self.listener.on_phase("confirm")
            sound = [candidate for candidate in candidates if candidate not in wrong]
            steps = 2 * self.options.steps
            ranked = [*wrong, *confirm(store, self.measurer, sound, steps=steps)]
        self.listener.on_phase("verify")
        return choose_winner(store, self.measurer, ranked, telling_rejected(self.listener))

    def _winner_of_goal(self, store: StudyStore, interrupted: bool) -> Winner:
        if not interrupted:
            self.listener.on_phase("confirm")
        return self._final_stage(store, interrupted=interrupted).run()

    def _final_stage(self, store: StudyStore, *, interrupted: bool = False) -> FinalStage:
        return FinalStage(
            store=store,
            measurer=self.measurer,
            steps=0 if interrupted else 2 * self.options.steps,
            on_verify=lambda: self.listener.on_phase("verify"),
            on_verdict=telling_rejected(self.listener),
        )


def _draw(store: StudyStore, measurer: Measurer, winner: Winner, listener: Listener) -> None:
    """Keeps the memory over a step of the policies that people compare; no search fails for it."""
    try:
        drawn = draw_timelines(
            known_candidates(store),
            winner.best,
            store.timelines,
            measurer.timeline,
            must_run=store.environment.world_size > 1,
        )
    except SacSearchError as error:
        listener.on_note(f"The memory over a step is not in the report: {error}")
        return
    store.write("timelines", drawn)


def telling_rejected(listener: Listener) -> Callable[[Candidate, Verdict], None]:
    """Returns what tells a listener of each candidate that does not pass verification."""

    def on_verdict(candidate: Candidate, verdict: Verdict) -> None:
        if verdict.verification is None or not verdict.verification.passed:
            listener.on_note(f"{candidate.name} did not pass verification; the next best follows.")

    return on_verdict


def _reported_in_folder(
    result: SearchResult, store: StudyStore, listener: Listener
) -> SearchResult:
    """Writes the report of a study beside its other files, as `reported` does."""
    path = store.folder / REPORT_FILE
    return reported(result, lambda: write_report(result, store, path), listener)


def reported(result: R, write: Callable[[], R], listener: Listener) -> R:
    """Writes the report; what stands in its way is said, and the search has its answer anyway."""
    try:
        return write()
    except Exception as error:
        listener.on_note(f"No report was written: {error}")
        return result


def _turn(
    membership: Membership, folder: Path, listener: Listener
) -> contextlib.AbstractContextManager[None]:
    def on_wait() -> None:
        listener.on_note(
            f"Waiting for another search of study {folder.name!r}, which measures the baselines or "
            "chooses its winner."
        )

    return membership.turn(on_wait)


def _described(measurer: Measurer, options: SearchOptions, listener: Listener) -> Description:
    listener.on_phase("load")
    description = measurer.describe()
    usable_bytes, budget_bytes = description.usable_bytes, options.budget_bytes
    if usable_bytes is not None and budget_bytes is not None and budget_bytes > usable_bytes:
        note = (
            f"The budget is {units.format_gib(budget_bytes)}, but the device has only "
            f"{units.format_gib(usable_bytes)} that this process can use: policies between the two "
            "will run out of memory."
        )
        description = replace(description, notes=(*description.notes, note))
    for note in description.notes:
        listener.on_note(note)
    return description


def _refuse_failing_ends(candidates: Iterable[Candidate]) -> None:
    failures = [c.failure for c in candidates]
    others = [f for f in failures if f is not None and f.kind not in OF_MEMORY]
    if None not in failures and others:
        raise _failing(others[0], "neither the step without checkpointing nor the one with runs")


def _refuse_failures_alike(baselines: Iterable[Candidate]) -> None:
    tried = list(baselines)
    failures = [c.failure for c in tried if c.failure is not None]
    # Where layers can be checkpointed, what a policy function cannot do leaves those policies.
    runs_checkpointed = any(c.measurement is not None and c.policy.layers for c in tried)
    of_policies = OF_MEMORY | (_OF_POLICY_FUNCTIONS if runs_checkpointed else frozenset())
    counts = collections.Counter(f.kind for f in failures if f.kind not in of_policies)
    for kind, count in counts.most_common(1):
        if count >= _MOST_ALIKE_FAILURES:
            failure = next(f for f in failures if f.kind is kind)
            raise _failing(failure, f"{count} baselines failed in the same way")


def _failing(failure: Failure, what: str) -> WorkloadError:
    return WorkloadError(
        f"{what}: {failure.kind}. {failure.advice}\n{failure.message}\n"
        "The study remembers it: when the cause is mended, add --fresh."
    )


def _open_or_create(
    folder: Path,
    name: str,
    options: SearchOptions,
    description: Description,
    listener: Listener,
) -> StudyStore:
    is_forecast = description.priced_step_seconds is not None
    evidence = Evidence.FORECAST if is_forecast else Evidence.MEASURED
    try:
        store = open_study(folder, options.storage)
    except StudyNotFound:
        return create_study(
            folder,
            storage=options.storage,
            budget_bytes=_budget_of(options, description),
            environment=description.environment,
            layers=description.layers,
            series=name,
            evidence=evidence,
            goal=options.goal,
        )
    if is_forecast and store.candidates():
        raise StudyError(
            f"study {store.name!r} holds measured trials, to which a forecast has nothing to add; "
            "leave --forecast out to continue it, or name another one with --study"
        )
    check_same_goal(store, options.goal)
    if options.budget_bytes is not None:
        check_same_budget(store, options.budget_bytes)
    if is_forecast or store.evidence is Evidence.FORECAST:
        if not is_forecast:
            listener.on_note(f"Study {store.name!r} was forecast so far; now it is measured.")
        # Forecasts stay in the study, apart; its environment becomes that of what comes now.
        store.begin_anew(description.environment, description.layers, evidence)
        if options.budget_bytes is None:
            store.replace_budget(_budget_of(options, description))
    check_same(store, description.environment, _budget_of(options, description), description.layers)
    return store


def _budget_of(options: SearchOptions, description: Description) -> int:
    """Returns the budget; all that the device has where none was given."""
    if options.budget_bytes is not None:
        return options.budget_bytes
    return description.environment.device_memory_bytes
