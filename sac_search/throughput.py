"""The search over batch sizes: an ordinary search per size, each next trial where it may win most.

A size is begun with full and no checkpointing and the planner's first answer. What no policy of a
size can exceed follows from its step time without checkpointing and the planner's bound; a size
whose bound is under the best that was measured is left alone. One worker lives at a time, since a
device holds one model.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from sac_search import interrupts
from sac_search.artifacts import REPORT_FILE
from sac_search.batch_artifacts import (
    make_throughput_result,
    no_size_message,
    write_throughput_files,
    write_throughput_report,
)
from sac_search.errors import NoPolicyFits, StudyNotFound, WorkloadError
from sac_search.options import Listener, SearchOptions
from sac_search.pipeline import reported, study_folder, telling_rejected
from sac_search.records import Environment
from sac_search.report.throughput import candidate_line
from sac_search.space import build_space
from sac_search.study.allocation import (
    LARGEST_BATCH_SIZE,
    PATIENCE,
    first_sizes,
    is_beaten,
    leader,
    least_peak,
    next_size,
    sizes_between,
)
from sac_search.study.batches import (
    BatchStore,
    SizeRecord,
    SizeState,
    open_batches,
    open_or_create_batches,
    size_folder,
)
from sac_search.study.candidate import Candidate
from sac_search.study.contest import choose_size, compare_sizes
from sac_search.study.search import Search, SearchSettings
from sac_search.study.sharing import turn
from sac_search.study.size_search import SizeMeasurer, SizeSearch, is_over, reason_of_peak
from sac_search.study.storage import DATABASE_NAME
from sac_search.study.store import StudyStore, check_same, create_study, open_study
from sac_search.study.throughput_result import ThroughputResult, size_result

# Trials at one size before the sizes are held against each other again: each change of the size
# loads the model anew.
_TRIALS_AT_ONCE = 4


class Workers(Protocol):
    """Makes what measures each batch size."""

    def full_peak_bytes(self, batch_size: int) -> int | None:
        """Returns the peak under full checkpointing without a device; None where it is not told."""

    def open(self, batch_size: int, folder: Path) -> SizeMeasurer:
        """Returns what measures a batch size; its log is in `folder`."""


def run_throughput(
    workers: Workers,
    name: str,
    options: SearchOptions,
    batch_sizes: Sequence[int] | None,
    listener: Listener,
) -> ThroughputResult:
    """Searches policies and batch sizes together. Returns the result, which is on disk by then.

    `batch_sizes` are those to look at beside the ones that the study has; None for powers of two,
    and then sizes between the best of them, as far as the forecast allows.

    Raises:
        NoPolicyFits: nothing fits the budget at any batch size.
        WorkloadError: the workload itself fails, or does not do what a batch size asks for.
        UsageError: the study is of another environment or budget.
    """
    folder = study_folder(name, options)

    def on_wait() -> None:
        listener.on_note(f"Waiting for another search of study {folder.name!r}.")

    with interrupts.listening(signal.SIGINT), turn(folder, on_wait):
        search = _ThroughputSearch(
            name=name,
            folder=folder,
            options=options,
            batch_sizes=batch_sizes,
            workers=workers,
            listener=listener,
        )
        try:
            result = search.run()
        finally:
            search.free_device()
    if result.winner is None and not result.interrupted:
        raise NoPolicyFits(no_size_message(result.budget_bytes, result.sizes))
    return result


@dataclass(slots=True, kw_only=True)
class _ThroughputSearch:
    """One search of a study over batch sizes, new or continued."""

    name: str
    folder: Path
    options: SearchOptions
    batch_sizes: Sequence[int] | None
    workers: Workers
    listener: Listener
    _store: BatchStore | None = None
    _sizes: dict[int, SizeSearch] = field(default_factory=dict)
    _left_out: dict[int, SizeRecord] = field(default_factory=dict)
    _peaks: dict[int, int] = field(default_factory=dict)
    _not_forecast: set[int] = field(default_factory=set)
    _cannot_forecast: bool = False
    _notes: list[str] = field(default_factory=list)
    _best_told: float = 0.0
    _deadline: float = math.inf

    @property
    def _budget_bytes(self) -> int:
        assert self.options.budget_bytes is not None
        return self.options.budget_bytes

    def run(self) -> ThroughputResult:
        if self.options.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.options.timeout_seconds
        reason = None
        try:
            reason = self._searched()
        except KeyboardInterrupt:
            self._acknowledge()
        try:
            if reason is not None:
                return self._finished(reason, interrupted=False)
        except KeyboardInterrupt:
            self._acknowledge()
        # Not inside `except`: there the interrupted step's tensors would still be alive.
        return self._finished("interrupted", interrupted=True)

    def free_device(self, but: SizeSearch | None = None) -> None:
        """Ends the workers of all sizes but one."""
        for size in self._sizes.values():
            if size is not but:
                size.measurer.close()

    def _acknowledge(self) -> None:
        interrupts.acknowledge()
        if self._store is None:
            raise KeyboardInterrupt  # nothing was measured that could be exported
        self.listener.on_note(
            "Interrupted: verifying and exporting the best so far (again to give up)."
        )

    # --- which sizes ------------------------------------------------------------------------------

    def _searched(self) -> str:
        """Measures. Returns why there are no more trials."""
        self._begin_all(self._first_sizes())
        if self._store is None:
            raise NoPolicyFits(self._nothing_fits_message())
        while True:
            reason = self._spend_trials()
            more = self._sizes_between() if self.batch_sizes is None and not reason else []
            if not more:
                return reason or "no batch size promises more than the best one"
            self._begin_all(more)

    def _first_sizes(self) -> list[int]:
        try:
            records = open_batches(self.folder).sizes
        except StudyNotFound:
            records = ()
        known = [record.batch_size for record in records]
        self._peaks = {
            record.batch_size: record.full_peak_bytes
            for record in records
            if record.full_peak_bytes is not None and self._is_begun(record.batch_size)
        }
        if self.batch_sizes is not None:
            return sorted({*self.batch_sizes, *known})
        largest = self._largest_power()
        # With the next one, which is too large, so that it is said why there is no larger one.
        return sorted({*first_sizes(largest), 2 * largest or 1, *known})

    def _largest_power(self) -> int:
        """Returns the largest power of two that fits by forecast, with every layer checkpointed."""
        self.listener.on_phase("forecast of batch sizes")
        size = 1
        while size <= LARGEST_BATCH_SIZE:
            peak_bytes = self._least_peak(size)
            if peak_bytes is None and size == 1:
                raise WorkloadError(
                    f"a step of batch size {size} cannot be forecast, so it is not known which "
                    "sizes fit; name them: --batch-sizes 4,8,16"
                )
            # One that cannot even be built is no larger than what fits.
            if peak_bytes is None or is_over(peak_bytes, self._budget_bytes):
                break
            size *= 2
        return size // 2

    def _least_peak(self, size: int) -> int | None:
        """Returns the peak under full checkpointing by forecast, or what it exceeds.

        None where it cannot be told. Sizes that are far too large are not forecast themselves.
        """
        if size in self._peaks or size in self._not_forecast or self._cannot_forecast:
            return self._peaks.get(size)
        least = least_peak(self._peaks, size)
        if least is not None and is_over(least, self._budget_bytes):
            return least
        peak_bytes = self.workers.full_peak_bytes(size)
        if peak_bytes is None:
            self._not_forecast.add(size)
            self._cannot_forecast = not self._peaks
            return None
        self._peaks[size] = peak_bytes
        return peak_bytes

    def _sizes_between(self) -> list[int]:
        best = leader(size.standing() for size in self._sizes.values())
        tried = {*self._sizes, *self._left_out}
        return [] if best is None else sizes_between(tried, best.batch_size)

    def _nothing_fits_message(self) -> str:
        left_out = [size_result(self._left_out[size], None) for size in sorted(self._left_out)]
        return no_size_message(self._budget_bytes, left_out)

    # --- one size ---------------------------------------------------------------------------------

    def _begin_all(self, sizes: Sequence[int]) -> None:
        # Forecasts first: they share a process, which makes room for the one that measures.
        self.free_device()
        self.listener.on_phase("forecast of batch sizes")
        for size in sizes:
            if not self._is_begun(size):
                self._least_peak(size)
        for size in sizes:
            self.listener.on_phase(f"batch size {size}")
            self._begin(size)

    def _is_begun(self, size: int) -> bool:
        return (size_folder(self.folder, size) / DATABASE_NAME).is_file()

    def _begin(self, size: int) -> None:
        """Begins a size, or continues it: rules it out, or measures its ends and the first plan."""
        peak_bytes = None if self._is_begun(size) else self._least_peak(size)
        if peak_bytes is not None and is_over(peak_bytes, self._budget_bytes):
            reason = reason_of_peak(peak_bytes, is_exact=size in self._peaks)
            self._leave_out(size, SizeState.RULED_OUT, reason, peak_bytes)
            return
        try:
            begun = self._opened(size)
        except WorkloadError as error:
            self._leave_out_failing(size, error)
            return
        self._refuse_ignored(begun)
        measured = len(begun.store.candidates())
        try:
            if not begun.done:
                begun.measure_ends(self._deadline, with_plan=self._trials_left() > 0)
        except WorkloadError as error:
            self._leave_out_failing(size, error)
            return
        if len(begun.store.candidates()) > measured:
            begun.update_bound(self._below(begun))
        self._keep(begun)

    def _leave_out_failing(self, size: int, error: WorkloadError) -> None:
        if not self._sizes.keys() - {size}:
            raise error  # the first: it is the workload, not its size
        self.free_device()
        self._sizes.pop(size, None)
        self._leave_out(size, SizeState.FAILED, str(error).partition("\n")[0])

    def _leave_out(
        self, size: int, state: SizeState, reason: str, peak_bytes: int | None = None
    ) -> None:
        record = SizeRecord(
            batch_size=size, samples=size, state=state, reason=reason, full_peak_bytes=peak_bytes
        )
        self._left_out[size] = record
        if self._store is not None:
            self._store.keep_size(record)
        self.listener.on_note(f"Batch size {size} {state}: {reason}.")

    def _opened(self, batch_size: int) -> SizeSearch:
        self.free_device()
        folder = size_folder(self.folder, batch_size)
        measurer = self.workers.open(batch_size, folder)
        try:
            store = self._study_of(folder, measurer)
        except BaseException:
            measurer.close()
            raise
        assert self._store is not None
        record = next((r for r in self._store.sizes if r.batch_size == batch_size), None)
        opened = SizeSearch(
            batch_size=batch_size,
            samples=store.environment.batch_size or batch_size,
            store=store,
            measurer=measurer,
            search=self._search_of(store, measurer),
            full_peak_bytes=self._peaks.get(batch_size),
        )
        if record is not None and record.state in (SizeState.MEASURED, SizeState.TOO_LARGE):
            opened.full_peak_bytes = record.full_peak_bytes
            opened.bound = record.bound_samples_per_second
            opened.done = record.reason if record.is_done else ""
        opened.search.on_candidate = lambda candidate, done: self._tell(opened, candidate)
        self._sizes[batch_size] = opened
        return opened

    def _search_of(self, store: StudyStore, measurer: SizeMeasurer) -> Search:
        options = self.options
        seconds_left = max(1e-3, self._deadline - time.monotonic())
        return Search(
            store=store,
            space=build_space(
                store.layers, options.layer_choice, options.granularity, options.tiers
            ),
            measurer=measurer,
            settings=SearchSettings(
                trials=options.trials,
                timeout_seconds=None if seconds_left == math.inf else seconds_left,
                sampler=options.sampler,
                seed=options.seed,
            ),
            on_note=self.listener.on_note,
        )

    def _study_of(self, folder: Path, measurer: SizeMeasurer) -> StudyStore:
        """Returns the study of one size, and makes the one over all sizes with the first.

        What is known of a size is not loaded again only to look at it, but for the first, which
        tells whether the environment is still the same.
        """
        budget_bytes = self._budget_bytes
        try:
            known = open_study(folder)
        except StudyNotFound:
            known = None
        if known is None or self._store is None:
            description = measurer.describe()
            self._note(description.notes)
            environment = description.environment
            self._store = self._store or self._study_over_sizes(environment)
            if known is not None:
                check_same(known, environment, budget_bytes, description.layers)
            else:
                known = create_study(
                    folder,
                    budget_bytes=budget_bytes,
                    environment=environment,
                    layers=description.layers,
                )
        check_same(self._store, _of_any_size(known.environment), budget_bytes)
        for number in known.running_trials():  # nobody else is at it
            known.give_up_trial(number)
        return known

    def _study_over_sizes(self, environment: Environment) -> BatchStore:
        store = open_or_create_batches(
            self.folder, self.name, self._budget_bytes, _of_any_size(environment)
        )
        for record in self._left_out.values():
            store.keep_size(record)
        return store

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self._notes:
                self._notes.append(note)
                self.listener.on_note(note)

    def _refuse_ignored(self, begun: SizeSearch) -> None:
        """Raises WorkloadError if the workload is that of another size."""
        workload = begun.store.environment.workload
        for other in self._sizes.values():
            if other is begun:
                continue
            if other.samples == begun.samples:
                raise WorkloadError(
                    f"{workload} was asked for a batch size of {begun.batch_size} and says that "
                    f"its step has {begun.samples} samples, as for {other.batch_size}; let the "
                    "batch follow batch_size, and Workload(batch_size=...) say how large it is"
                )
            if begun.store.layers and _traced_bytes(other.store) == _traced_bytes(begun.store):
                raise WorkloadError(
                    f"{workload} was asked for a batch size of {begun.batch_size}, and its layers "
                    f"compute as many bytes as for {other.batch_size}; let the batch follow "
                    "batch_size"
                )

    def _below(self, size: SizeSearch) -> list[SizeSearch]:
        return [self._sizes[n] for n in sorted(self._sizes) if n < size.batch_size]

    def _keep(self, size: SizeSearch, reason: str = "") -> None:
        assert self._store is not None
        record = size.record(reason)
        self._store.keep_size(record)
        self._store.take_over(record, size.store)

    def _tell(self, size: SizeSearch, candidate: Candidate) -> None:
        throughput = size.throughput(candidate)
        fits = candidate.fits(size.store.budget_bytes)
        is_best = fits and throughput is not None and throughput > self._best_told
        if is_best and throughput is not None:
            self._best_told = throughput
        if is_best or candidate.is_baseline:
            line = candidate_line(size.batch_size, candidate, throughput, fits, is_best)
            self.listener.on_note(line)

    # --- trials -----------------------------------------------------------------------------------

    def _spend_trials(self) -> str:
        """Measures trials where they may win most. Returns what ended it, unless no size may."""
        self.listener.on_phase("search", total=self.options.trials)
        while True:
            left = self._trials_left()
            if left <= 0:
                done = self.options.trials - left
                return f"{done} trials measured (--trials {self.options.trials})"
            if time.monotonic() >= self._deadline:
                return f"--timeout {self.options.timeout_seconds:g} s is over"
            chosen = next_size([size.standing() for size in self._sizes.values()])
            if chosen is None:
                return ""
            size = self._sizes[chosen]
            self.free_device(but=size)
            size.measure(min(_TRIALS_AT_ONCE, left), self._deadline)
            size.update_bound(self._below(size))
            self._keep(size)

    def _trials_left(self) -> int:
        return self.options.trials - sum(size.trials for size in self._sizes.values())

    # --- the end ----------------------------------------------------------------------------------

    def _finished(self, reason: str, *, interrupted: bool) -> ThroughputResult:
        store = self._store
        assert store is not None
        sizes = list(self._sizes.values())
        for size in sizes:
            self._keep(size)  # one that was interrupted is not known yet
        store.write("best_batch_size", None)  # what is known of it may be of another policy
        if not interrupted:
            self.listener.on_phase("confirm")
            compare_sizes(store, sizes, 2 * self.options.steps, self.free_device)
        self.listener.on_phase("verify")
        chosen = choose_size(store, sizes, self.free_device, telling_rejected(self.listener))
        self.listener.on_phase("export")
        self._keep_reasons()
        store.write("stop_reason", reason)
        store.write("arguments", self._arguments())
        if chosen is not None:
            self._end_study_of(chosen[0], reason, interrupted=interrupted)
            store.write("best_batch_size", chosen[0].batch_size)
        result = make_throughput_result(
            store, reason, interrupted=interrupted, notes=tuple(self._notes)
        )
        write_throughput_files(result)
        if not self.options.report:
            return result
        path = self.folder / REPORT_FILE
        return reported(result, lambda: write_throughput_report(result, path), self.listener)

    def _keep_reasons(self) -> None:
        """Keeps why each size got no further trials."""
        standings = {size: search.standing() for size, search in self._sizes.items()}
        best = leader(standings.values())
        for size in self._sizes.values():
            standing = standings[size.batch_size]
            reason = "the search ended before it was its turn"
            if is_beaten(standing, best):
                reason = "no policy is believed to reach the fastest size"
            elif standing.idle_trials >= PATIENCE:
                reason = f"its last {standing.idle_trials} trials brought no gain"
            self._keep(size, reason)

    def _end_study_of(self, size: SizeSearch, reason: str, *, interrupted: bool) -> None:
        """Ends the study of the best size as an ordinary search would."""
        if not interrupted:
            self.free_device(but=size)
            size.search.write_beliefs()
        options = replace(
            self.options,
            batch_size=size.batch_size,
            study=size.store.folder.name,
            root=self.folder,
        )
        size.store.write("arguments", options.arguments())
        size.store.write("stop_reason", reason)
        size.store.write("is_finished", not interrupted)

    def _arguments(self) -> tuple[str, ...]:
        sizes = "auto" if self.batch_sizes is None else ",".join(map(str, self.batch_sizes))
        goal = ("--maximize", "throughput", "--batch-sizes", sizes)
        return (*self.options.arguments(), *goal)


def _of_any_size(environment: Environment) -> Environment:
    return replace(environment, batch_size=None)


def _traced_bytes(store: StudyStore) -> int:
    return sum(op.output_bytes for layer in store.layers for op in layer.ops)
