"""The lines of the live display, from what is known of a search at a moment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from sac_search import units
from sac_search.study.candidate import Candidate
from sac_search.study.front import gain_of, spot_of
from sac_search.study.goal import SPEED, Goal, GoalKind, Limits

_PHASES = ("load", "baselines", "plan", "search", "confirm", "verify", "export")
_FORECAST_PHASES = ("load", "forecast", "export")
# What goes on in each phase, where it is not the trials.
_DOING = {
    "load": "loading the workload",
    "baselines": "measuring what people use today",
    "plan": "measuring the planner's first answers",
    "forecast": "following steps without running them",
    "confirm": "measuring the best again, side by side",
    "verify": "comparing gradients",
    "export": "writing the files",
}
# Under so many columns the short forms are taken.
_NARROW = 60
_LABEL_WIDTH = 8
_BAR_WIDTH = 20
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-=*#"


@dataclass(slots=True)
class Screen:
    """What is known of a search."""

    started: float
    """When it began, by the clock that `screen_lines` is given."""
    phase: str = ""
    """The phase that it is in."""
    seen: tuple[str, ...] = ()
    """The phases before this one."""
    total: int | None = None
    """Trials that there may be."""
    trials_done: int = 0
    """Trials that there have been."""
    budget_bytes: int | None = None
    """The budget."""
    none_seconds: float | None = None
    """Step time without checkpointing."""
    best: Candidate | None = None
    """The fastest that fits so far."""
    history: tuple[float, ...] = ()
    """Step time of the best so far, after each policy."""
    last: tuple[str, ...] = ()
    """The last outcomes in words, the newest first."""
    device_bytes: int | None = None
    """What was in use on the whole device after the last step."""
    first_count: tuple[float, int] | None = None
    """When trials were first counted in this phase, and how many there were."""
    last_count: tuple[float, int] | None = None
    """When they were counted last."""
    goal: Goal = SPEED
    """What is searched for."""
    front: tuple[Candidate, ...] = ()
    """What was not beaten when it was measured, where all of a front is searched."""

    def enter(self, phase: str, total: int | None) -> None:
        """Begins a phase."""
        if self.phase:
            self.seen = (*self.seen, self.phase)
        self.phase = phase
        self.total = self.total if total is None else total
        self.first_count = self.last_count = None

    def count(self, trials_done: int, now: float) -> None:
        """Notes how many trials there have been by now."""
        self.trials_done = trials_done
        self.last_count = (now, trials_done)
        self.first_count = self.first_count or self.last_count

    def is_better(self, candidate: Candidate) -> bool:
        """Whether a candidate is better than the best so far, fits and can be shipped."""
        if self.budget_bytes is None or not self.goal.fits(candidate, self.limits):
            return False
        if not candidate.policy.exportable or candidate.is_reference:
            return False
        if candidate.step_seconds is None:
            return False
        if self.goal.kind is GoalKind.PARETO:
            spots = [spot_of(known) for known in self.front]
            return gain_of(spot_of(candidate), spots) > 0
        return self.best is None or self.goal.is_better(candidate, self.best)

    def take(self, candidate: Candidate) -> None:
        """Makes a candidate the best so far, or one of the front."""
        if self.goal.kind is GoalKind.PARETO:
            self.front = (*self.front, candidate)
        if self.best is None or self.goal.is_better(candidate, self.best):
            self.best = candidate

    @property
    def limits(self) -> Limits:
        """What candidates are held against."""
        assert self.budget_bytes is not None
        return Limits(budget_bytes=self.budget_bytes, none_seconds=self.none_seconds)

    def seconds_left(self, now: float) -> float | None:
        """Returns how long the trials that are left will take; None where there is no telling.

        At the pace of those since the first that was counted.
        """
        if self.first_count is None or self.last_count is None or self.total is None:
            return None
        (first, first_done), (last, done) = self.first_count, self.last_count
        if self.phase != "search" or done <= first_done or done >= self.total:
            return None
        pace = (last - first) / (done - first_done)
        left = pace * (self.total - done) - (now - last)
        return left if left >= 1 else None


def screen_lines(screen: Screen, now: float, *, width: int, ascii_only: bool) -> list[Text]:
    """Returns the display's lines, none of which is wider than `width` columns."""
    narrow = width < _NARROW
    lines = [
        Text(),  # between the display and what was printed above it
        _phase_line(screen, narrow=narrow, ascii_only=ascii_only),
        _trials_line(screen, now, narrow=narrow, ascii_only=ascii_only),
    ]
    if screen.budget_bytes is not None:
        lines.append(_labelled("best", _best_words(screen, narrow=narrow)))
    # The label, and a few columns for the words behind it.
    sparks = sparkline(screen.history, width - _LABEL_WIDTH - 22, ascii_only=ascii_only)
    if len(set(screen.history)) > 1 and sparks:
        first, latest = screen.history[0], screen.history[-1]
        span = f"{units.format_seconds(first)} to {units.format_seconds(latest)}"
        lines.append(_labelled("", Text.assemble((sparks, "cyan"), f" {span}")))
    for number, words in enumerate(screen.last):
        lines.append(_labelled("last" if number == 0 else "", Text(words)))
    if screen.device_bytes is not None:
        in_use = units.format_gib(screen.device_bytes)
        lines.append(_labelled("device", Text(f"{in_use} in use after the last step")))
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return lines


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Returns a bar per value, or per stretch of values where they are more than `width`.

    The lowest value has the lowest bar. A stretch is as its last value is.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    shown = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    low, high = min(shown), max(shown)
    bars = _ASCII_SPARKS if ascii_only else _SPARKS
    if high == low:
        return bars[0] * count
    return "".join(bars[round((v - low) / (high - low) * (len(bars) - 1))] for v in shown)


def outcome_words(candidate: Candidate, verdict: str) -> str:
    """Returns what became of a candidate, in a few words."""
    if candidate.measurement is None or candidate.step_seconds is None:
        assert candidate.failure is not None
        return f"{candidate.name}: {candidate.failure.kind}"
    step = units.format_seconds(candidate.step_seconds)
    peak = units.format_gib(candidate.measurement.peak_bytes)
    return f"{candidate.name}: {verdict}, {step}, {peak}"


def _phase_line(screen: Screen, *, narrow: bool, ascii_only: bool) -> Text:
    forecasts = "forecast" in (screen.phase, *screen.seen)
    phases = _FORECAST_PHASES if forecasts else _PHASES
    if narrow:
        place = phases.index(screen.phase) + 1 if screen.phase in phases else 1
        return Text(f"{screen.phase} ({place} of {len(phases)})", style="bold")
    line = Text()
    for number, phase in enumerate(phases):
        if number:
            line.append(" > " if ascii_only else " › ", style="dim")
        if phase == screen.phase:  # told by more than its colour
            line.append(f"[{phase}]", style="bold")
        else:
            line.append(phase, style="green" if phase in screen.seen else "dim")
    return line


def _trials_line(screen: Screen, now: float, *, narrow: bool, ascii_only: bool) -> Text:
    elapsed = units.format_duration(now - screen.started)
    if screen.phase != "search" or screen.total is None:
        doing = _DOING.get(screen.phase, "")
        return Text(f"{elapsed}  {doing}".rstrip())
    left = screen.seconds_left(now)
    line = Text(f"{screen.trials_done} of {screen.total} trials  ")
    if not narrow:
        line.append_text(_bar(screen.trials_done / max(1, screen.total), ascii_only=ascii_only))
        line.append("  ")
    line.append(elapsed)
    if left is not None:
        short = units.format_duration(left)
        line.append(f", {short} left" if narrow else f", at most about {short} of trials left")
    return line


def _bar(fraction: float, *, ascii_only: bool) -> Text:
    filled = round(min(1.0, fraction) * _BAR_WIDTH)
    whole, rest = ("#", ".") if ascii_only else ("━", "─")
    return Text.assemble((whole * filled, "green"), (rest * (_BAR_WIDTH - filled), "dim"))


def _best_words(screen: Screen, *, narrow: bool) -> Text:
    best = screen.best
    if best is None or best.step_seconds is None or best.measurement is None:
        return Text("nothing fits yet")
    words = units.format_seconds(best.step_seconds)
    if screen.none_seconds:
        words += f" ({units.format_percent(best.step_seconds / screen.none_seconds - 1)})"
    peak = units.format_gib(best.measurement.peak_bytes)
    if narrow:
        return Text(f"{words}, {peak}", style="bold green")
    assert screen.budget_bytes is not None
    if screen.goal.has_budget:
        peak += f" of {units.format_gib(screen.budget_bytes)}"
    return Text.assemble((words, "bold green"), f", peak {peak}, {best.name}")


def _labelled(label: str, words: Text) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), words)
