"""What a search does while it runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live

from sac_search import units
from sac_search.report.rows import short_verdict
from sac_search.report.screen import Screen, outcome_words, screen_lines
from sac_search.study.baselines import NONE
from sac_search.study.candidate import Candidate
from sac_search.study.goal import SPEED, Goal, GoalKind, Limits

# The outcomes that are shown.
_LAST_OUTCOMES = 3
_REFRESHES_PER_SECOND = 4
# Of the lines that stay: all of one, and the name in it.
_WIDTH_OF_LINES = 85
_WIDTH_OF_NAMES = 38
_LEAST_WIDTH_OF_NAMES = 12
# What is behind the best so far, and behind it where lines are shorter.
_MARK = "  * best so far"
_MARKS = (_MARK, "  * best")
_MARKS_OF_FRONT = ("  * on the front so far", "  * on the front", "  * front")


class SearchProgress:
    """Told by the search what happens; shows it.

    Lines that stay (notes, baselines, improvements) are printed above the live display, which is
    gone when the search ends, however it ends.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool,
        verbose: bool,
        live: bool = True,
        now: Callable[[], float] = time.monotonic,
        goal: Goal = SPEED,
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose
        self._now = now
        self._note_at_start = ""
        self._marks = _MARKS_OF_FRONT if goal.kind is GoalKind.PARETO else _MARKS
        self._screen = Screen(started=now(), goal=goal)
        self._live: Live | None = None
        if live and not quiet and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> SearchProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note_at_start(self, text: str) -> None:
        """Something that the user should read, unless the arguments turn out to be wrong."""
        self._note_at_start = text

    def on_phase(self, name: str, total: int | None = None) -> None:
        """A new stage begins; `total` is the number of trials it may take."""
        if self._note_at_start:
            self._print(self._note_at_start)
            self._note_at_start = ""
        self._screen.enter(name, total)
        if self._verbose and self._live is None:
            self._print(f"{name} …")

    def on_note(self, text: str) -> None:
        """Something that the user should read."""
        self._print(text)

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None:
        """A study is continued that holds these policies already."""
        self._screen.trials_done = trials_done
        for candidate in candidates:
            self._take(candidate, budget_bytes)

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        """A policy was measured."""
        self._screen.count(trials_done, self._now())
        better = self._take(candidate, budget_bytes)
        words = outcome_words(candidate, self._screen.goal.verdict(candidate, self._screen.limits))
        self._screen.last = (words, *self._screen.last)[:_LAST_OUTCOMES]
        if self._verbose or better or candidate.is_baseline:
            width = self._console.width if self._console.is_terminal else _WIDTH_OF_LINES
            verdict = self._screen.goal.verdict(candidate, self._screen.limits)
            self._print(
                _candidate_line(candidate, budget_bytes, better, width, verdict, self._marks)
            )

    def on_estimate(self, none_seconds: float) -> None:
        """The step without checkpointing does not run; this is what it would take."""
        self._screen.none_seconds = none_seconds

    def _take(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Takes a candidate into the figures. Returns whether it is the best so far."""
        screen = self._screen
        screen.budget_bytes = budget_bytes
        if candidate.name == NONE and candidate.step_seconds is not None:
            screen.none_seconds = candidate.step_seconds
        if candidate.measurement is not None and candidate.measurement.device_bytes is not None:
            screen.device_bytes = candidate.measurement.device_bytes
        is_better = screen.is_better(candidate)
        if is_better:
            screen.take(candidate)
        if screen.best is not None and screen.best.step_seconds is not None:
            screen.history = (*screen.history, screen.best.step_seconds)
        return is_better

    def _render(self) -> Group:
        options = self._console.options
        lines = screen_lines(
            self._screen, self._now(), width=options.max_width, ascii_only=options.ascii_only
        )
        return Group(*lines)

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _candidate_line(
    candidate: Candidate,
    budget_bytes: int,
    better: bool,
    width: int = _WIDTH_OF_LINES,
    verdict: str = "",
    marks: Sequence[str] = _MARKS,
) -> str:
    """Returns the line of a candidate; names get what the figures leave of `width` columns."""
    verdict = verdict or SPEED.verdict(candidate, Limits(budget_bytes=budget_bytes))
    figures_width = _WIDTH_OF_LINES - len(_MARK) - _WIDTH_OF_NAMES
    mark = next((m for m in marks if figures_width + _WIDTH_OF_NAMES + len(m) <= width), marks[-1])
    name_width = min(_WIDTH_OF_NAMES, width - figures_width - len(mark))
    if name_width < _LEAST_WIDTH_OF_NAMES:
        return f"  {outcome_words(candidate, verdict)}"
    name = f"{candidate.name:<{name_width}}"
    if candidate.measurement is None or candidate.step_seconds is None:
        assert candidate.failure is not None
        return f"  {name} {candidate.failure.kind}: {candidate.failure.line}"
    step = units.format_seconds(candidate.step_seconds)
    peak = units.format_gib(candidate.measurement.peak_bytes)
    line = f"  {name} {step:>10}  {peak:>11}  {short_verdict(verdict)}"
    if candidate.measurement.compile_seconds is not None:
        line += f"  (compiled in {units.format_duration(candidate.measurement.compile_seconds)})"
    return line + (mark if better and not candidate.is_baseline else "")
