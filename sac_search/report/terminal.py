"""Prints rows as tables, and progress while a search runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sac_search import units
from sac_search.report.rows import CandidateRow, FrontierRow, OpRow
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult


def candidate_table(rows: Sequence[CandidateRow]) -> Table:
    """Returns the table of baselines and winner."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("overhead", justify="right", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("budget", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for row in rows:
        style = "bold green" if row.is_best else ""
        cells = (row.name, row.step, row.overhead, row.peak, row.verdict, row.description)
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def op_table(rows: Sequence[OpRow]) -> Table:
    """Returns the table of ops."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer kind", "op", "class"):
        table.add_column(name, overflow="fold")
    for name in ("calls", "MiB", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("can it be saved", overflow="fold")
    previous = None
    for row in rows:
        kind = row.kind if row.kind != previous else ""
        previous = row.kind
        figures = (str(row.calls), f"{row.mib:.2f}", f"{row.milliseconds:.3f}")
        style = "" if row.savable else "dim"
        cells = (kind, row.op, row.op_class, *figures, row.saved_by)
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def frontier_table(rows: Sequence[FrontierRow], *, measured: bool) -> Table:
    """Returns the table of a workload's trade-off."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ["budget", "overhead (forecast)", "peak (forecast)"]
    names += ["overhead (measured)", "peak (measured)"] if measured else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for row in rows:
        cells = [row.budget, row.overhead, row.peak]
        cells += [row.measured_overhead, row.measured_peak] if measured else []
        table.add_row(*(Text(cell) for cell in [*cells, row.description]))
    return table


def study_table(results: Sequence[SearchResult]) -> Table:
    """Returns the table of studies."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("study", "workload", "device"):
        table.add_column(name, overflow="fold")
    for name in ("budget", "measured", "best step", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for result in results:
        best = result.best
        step = peak = "–"
        policy = "none verified yet"
        if best is not None and best.measurement is not None and best.step_seconds is not None:
            step = units.format_seconds(best.step_seconds)
            peak = units.format_gib(best.measurement.peak_bytes)
            policy = best.policy.describe()
        cells = (
            result.study_name,
            result.environment.workload,
            result.environment.device_name,
            units.format_gib(result.budget_bytes),
            str(len(result.candidates)),
            step,
            peak,
            policy,
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def comparison_table(
    title: str, names: tuple[str, str], rows: Sequence[tuple[str, str, str, str]]
) -> Table:
    """Returns one of the tables of two studies side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, *names, "difference"):
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


class SearchProgress:
    """A progress bar on a terminal, plain lines elsewhere. Told by the search what happens."""

    def __init__(self, console: Console, *, quiet: bool, verbose: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose
        self._live = console.is_terminal and not quiet
        self._best_seconds: float | None = None
        self._best_peak_bytes: int | None = None
        self._note_at_start = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total} trials"),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._progress.add_task("load", total=None, best="")

    def __enter__(self) -> SearchProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def note_at_start(self, text: str) -> None:
        """Something that the user should read, unless the arguments turn out to be wrong."""
        self._note_at_start = text

    def on_phase(self, name: str, total: int | None = None) -> None:
        """A new stage begins; `total` is the number of trials it may take."""
        if self._note_at_start:
            self._print(self._note_at_start)
            self._note_at_start = ""
        self._progress.update(self._task, description=name)
        if total is not None:
            self._progress.update(self._task, total=total)
        if self._verbose and not self._live:
            self._print(f"{name} …")

    def on_note(self, text: str) -> None:
        """Something that the user should read."""
        self._print(text)

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        """A policy was measured."""
        better = self._note_best(candidate, budget_bytes)
        self._progress.update(self._task, completed=trials_done, best=self._best_text())
        if self._verbose or better or candidate.is_baseline:
            self._print(_candidate_line(candidate, budget_bytes, better))

    def _note_best(self, candidate: Candidate, budget_bytes: int) -> bool:
        if not candidate.fits(budget_bytes) or not candidate.policy.exportable:
            return False
        assert candidate.step_seconds is not None and candidate.measurement is not None
        if self._best_seconds is not None and candidate.step_seconds >= self._best_seconds:
            return False
        self._best_seconds = candidate.step_seconds
        self._best_peak_bytes = candidate.measurement.peak_bytes
        return True

    def _best_text(self) -> str:
        if self._best_seconds is None or self._best_peak_bytes is None:
            return "nothing fits yet"
        peak = units.format_gib(self._best_peak_bytes)
        return f"best {units.format_seconds(self._best_seconds)}, peak {peak}"

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _candidate_line(candidate: Candidate, budget_bytes: int, better: bool) -> str:
    name = f"{candidate.name:<38}"
    if candidate.measurement is None or candidate.step_seconds is None:
        assert candidate.failure is not None
        return f"  {name} {candidate.failure.kind}: {candidate.failure.advice}"
    step = units.format_seconds(candidate.step_seconds)
    peak = units.format_gib(candidate.measurement.peak_bytes)
    verdict = "fits" if candidate.fits(budget_bytes) else "over"
    line = f"  {name} {step:>10}  {peak:>11}  {verdict}"
    if candidate.measurement.compile_seconds is not None:
        line += f"  (compiled in {units.format_duration(candidate.measurement.compile_seconds)})"
    return line + ("  * best so far" if better and not candidate.is_baseline else "")
