"""Progress of a search: a live display on a terminal, plain lines where there is none."""

from __future__ import annotations

import dataclasses
import io

import pytest
from results import FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL
from rich.console import Console
from scripted import make_candidate, make_failed

from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.records import Outcome
from sac_search.report import progress
from sac_search.report.progress import SearchProgress
from sac_search.report.screen import Screen, screen_lines, sparkline
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.candidate import Candidate

# Markup, an emoji code, a tag that closes nothing and a backslash at the end.
NASTY = "[red]h.0[/red] :bomb: [/bold] \\"
PHASES = "load › baselines › plan › [search] › confirm › verify › export"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def make_console(*, is_terminal: bool = False, width: int = 120, term: str = "xterm") -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=30,
        force_terminal=is_terminal,
        color_system=None,
        _environ={"TERM": term},
    )


def nasty_candidate(name: str = NASTY) -> Candidate:
    return make_candidate(name, policy=Policy(), is_baseline=True)


# --- progress where there is no terminal ----------------------------------------------------------


def lines_of(
    *candidates: Candidate, quiet: bool = False, verbose: bool = False, budget_bytes: int = 6 * GIB
) -> list[str]:
    console = make_console()
    with SearchProgress(console, quiet=quiet, verbose=verbose) as progress:
        progress.on_phase("baselines", total=40)
        progress.on_note("A note.")
        for number, candidate in enumerate(candidates):
            progress.on_candidate(candidate, number, budget_bytes)
    text = console.file.getvalue()
    assert "\x1b" not in text and "\r" not in text
    return text.rstrip().splitlines()  # rich 13.9 ended with an empty line


def test_baselines_and_improvements_are_plain_lines() -> None:
    slower = make_candidate("trial 8", policy=TRIAL.policy, seconds=0.23, peak_bytes=5 * GIB)
    over = make_candidate("trial 9", policy=TRIAL.policy, seconds=0.1, peak_bytes=7 * GIB)

    found = lines_of(NONE_CANDIDATE, FULL_CANDIDATE, TRIAL, slower, over)

    assert [" ".join(line.split()) for line in found] == [
        "A note.",
        "none 200.0 ms 8.000 GiB over",
        "full 260.0 ms 4.000 GiB fits",
        "trial 7 220.0 ms 5.000 GiB fits * best so far",
    ]


def test_verbose_tells_of_every_trial_and_phase() -> None:
    over = make_candidate("trial 9", policy=TRIAL.policy, seconds=0.1, peak_bytes=7 * GIB)
    failed = Candidate(
        name="trial 10", policy=TRIAL.policy, outcome=make_failed(), step_seconds=None
    )

    found = [" ".join(line.split()) for line in lines_of(over, failed, verbose=True)]

    assert found == [
        "baselines …",
        "A note.",
        "trial 9 100.0 ms 7.000 GiB over",
        "trial 10 out of memory: The device ran out of memory; the policy saves too much for it.",
    ]


def test_quiet_tells_nothing() -> None:
    assert lines_of(NONE_CANDIDATE, TRIAL, quiet=True) == []


def test_a_policy_that_cannot_be_shipped_is_never_the_best_so_far() -> None:
    counting = make_candidate(
        "torchtitan rule",
        policy=checkpoint_layers(["h.0"], Tier(ops=("aten.mm.default",), every_second_matmul=True)),
        seconds=0.1,
        peak_bytes=GIB,
        is_baseline=True,
    )

    found = lines_of(counting, TRIAL)

    assert "* best so far" in found[-1]


def test_markup_in_progress_lines_is_not_interpreted() -> None:
    found = lines_of(nasty_candidate(), verbose=True)

    assert found[-1].startswith(f"  {NASTY}")


def test_long_lines_are_not_folded() -> None:
    failed = Candidate(
        name="x" * 100,
        policy=Policy(),
        outcome=make_failed(),
        step_seconds=None,
        is_baseline=True,
    )

    assert len(lines_of(failed)) == 2


# --- progress on a terminal -----------------------------------------------------------------------


def shown(told: SearchProgress, width: int, *, ascii_only: bool = False) -> list[str]:
    """Returns the lines that a terminal of so many columns shows now."""
    console = make_console(width=width)
    now = told._now()
    for line in screen_lines(told._screen, now, width=width, ascii_only=ascii_only):
        console.print(line)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told(clock: Clock) -> SearchProgress:
    """A search after its third trial, an hour in, five minutes a trial."""
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_phase("load")
    told.on_phase("baselines", total=40)
    told.on_candidate(NONE_CANDIDATE, 0, 6 * GIB)
    told.on_candidate(FULL_CANDIDATE, 0, 6 * GIB)
    told.on_phase("plan")
    clock.seconds += 2700
    told.on_phase("search")
    failed = Candidate(
        name="trial 8", policy=TRIAL.policy, outcome=make_failed(), step_seconds=None
    )
    over = make_candidate("trial 9", policy=TRIAL.policy, seconds=0.1, peak_bytes=7 * GIB)
    for number, candidate in enumerate((TRIAL, failed, over), 1):
        clock.seconds += 300
        told.on_candidate(candidate, number, 6 * GIB)
    return told


def test_the_display_says_where_the_search_is(told: SearchProgress) -> None:
    assert shown(told, 100) == [
        "",
        PHASES,
        "3 of 40 trials  ━━──────────────────  1h 00m, at most about 3h 05m of trials left",
        "best    220.0 ms (+10.0%), peak 5.000 GiB of 6.000 GiB, trial 7",
        "        █▁▁▁ 260.0 ms to 220.0 ms",
        "last    trial 9: over the budget, 100.0 ms, 7.000 GiB",
        "        trial 8: out of memory",
        "        trial 7: fits, 220.0 ms, 5.000 GiB",
    ]


def test_what_is_left_grows_less_between_trials(told: SearchProgress, clock: Clock) -> None:
    clock.seconds += 600
    assert "1h 10m, at most about 2h 55m of trials left" in shown(told, 100)[2]


def test_when_all_trials_are_done_nothing_is_left(told: SearchProgress, clock: Clock) -> None:
    told.on_candidate(TRIAL, 40, 6 * GIB)
    assert shown(told, 100)[2].endswith("1h 00m")


def test_trials_that_take_longer_than_expected_are_not_promised(
    told: SearchProgress, clock: Clock
) -> None:
    told.on_candidate(TRIAL, 39, 6 * GIB)
    clock.seconds += 3600
    assert "left" not in shown(told, 100)[2]


def test_before_there_is_a_pace_nothing_is_promised(clock: Clock) -> None:
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_phase("search", total=40)
    assert "left" not in shown(told, 100)[2]
    clock.seconds += 60
    told.on_candidate(TRIAL, 21, 6 * GIB)  # of a study that had twenty
    assert shown(told, 100)[2].endswith("1m 00s")


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("load", "0s  loading the workload"),
        ("confirm", "0s  measuring the best again, side by side"),
        ("verify", "0s  comparing gradients"),
        ("export", "0s  writing the files"),
    ],
)
def test_every_phase_says_what_goes_on(clock: Clock, phase: str, words: str) -> None:
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_phase(phase)
    assert f"[{phase}]" in shown(told, 100)[1]
    assert shown(told, 100)[2] == words


def test_a_forecast_has_phases_of_its_own(clock: Clock) -> None:
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_phase("load")
    told.on_phase("forecast")
    assert shown(told, 100)[1] == "load › [forecast] › export"


def test_what_a_continued_study_holds_counts(clock: Clock) -> None:
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_known([NONE_CANDIDATE, FULL_CANDIDATE, TRIAL], 21, 6 * GIB)
    told.on_phase("search", total=40)
    lines = shown(told, 100)
    assert lines[2].startswith("21 of 40 trials")
    assert lines[3].endswith("trial 7")
    assert not any(line.startswith("last") for line in lines)


def test_a_reference_is_never_the_best(clock: Clock) -> None:
    told = SearchProgress(make_console(), quiet=True, verbose=False, now=clock)
    told.on_candidate(dataclasses.replace(TRIAL, is_reference=True), 1, 6 * GIB)
    assert "best    nothing fits yet" in shown(told, 100)


def test_memory_in_use_on_the_device_is_shown_where_it_is_known(told: SearchProgress) -> None:
    assert TRIAL.measurement is not None
    measurement = dataclasses.replace(TRIAL.measurement, device_bytes=20 * GIB)
    told.on_candidate(
        dataclasses.replace(TRIAL, outcome=Outcome(measurement=measurement)), 4, 6 * GIB
    )
    assert shown(told, 100)[-1] == "device  20.00 GiB in use after the last step"


@pytest.mark.parametrize("width", [80, 59, 40, 20, 5])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal(
    told: SearchProgress, width: int, ascii_only: bool
) -> None:
    told.on_candidate(nasty_candidate("x" * 200), 4, 6 * GIB)
    lines = shown(told, width, ascii_only=ascii_only)
    assert len(lines) == (8 if width > 30 else 7)  # there is no room for the bars
    assert max(map(len, lines)) <= width
    if ascii_only:
        assert all(line.isascii() for line in lines)


def test_a_narrow_terminal_gets_the_short_forms(told: SearchProgress) -> None:
    assert shown(told, 40)[1:5] == [
        "search (4 of 7)",
        "3 of 40 trials  1h 00m, 3h 05m left",
        "best    220.0 ms (+10.0%), 5.000 GiB",
        "        █▁▁▁ 260.0 ms to 220.0 ms",
    ]


class TestSparkline:
    def test_the_lowest_value_has_the_lowest_bar(self) -> None:
        assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 10) == "█▇▆▅▄▃▂▁"
        assert sparkline([2, 1], 10, ascii_only=True) == "#_"

    def test_more_values_than_columns_are_drawn_together(self) -> None:
        drawn = sparkline([float(100 - i) for i in range(100)], 8)
        assert drawn == "█▇▆▅▄▃▂▁"
        assert len(sparkline([3.0] * 50, 7)) == 7

    def test_nothing_to_draw(self) -> None:
        assert sparkline([], 10) == "" and sparkline([1.0], 0) == ""
        assert sparkline([1.0, 1.0], 10) == "▁▁"


def test_on_a_terminal_the_display_is_live_and_notes_stand_above_it() -> None:
    console = make_console(is_terminal=True)
    with SearchProgress(console, quiet=False, verbose=False) as told:
        told.on_phase("search", total=40)
        told.on_note("A note.")
        told.on_candidate(TRIAL, 3, 6 * GIB)
        assert told._live is not None
        told._live.refresh()
        text = console.file.getvalue()
        assert "A note." in text and "3 of 40 trials" in text
        assert text.index("A note.") < text.rindex("3 of 40 trials")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_ends_the_search_the_terminal_is_left_as_it_was(
    error: type[BaseException],
) -> None:
    console = make_console(is_terminal=True)
    told = SearchProgress(console, quiet=False, verbose=False)
    with pytest.raises(error), told:
        raise error
    text = console.file.getvalue()
    shown_cursor, hidden_cursor = "\x1b[?25h", "\x1b[?25l"
    assert text.count(hidden_cursor) == text.count(shown_cursor) == 1
    # Every line of the display is erased once the cursor is back.
    lines = len(screen_lines(Screen(started=0.0), 0.0, width=120, ascii_only=False))
    assert text[text.index(shown_cursor) :].count("\x1b[2K") >= lines - 1


@pytest.mark.parametrize(
    "how", [{"quiet": True}, {"live": False}, {"term": "dumb"}, {"is_terminal": False}]
)
def test_there_is_no_display_where_none_is_wanted(how: dict[str, object]) -> None:
    term = how.pop("term", "xterm")
    is_terminal = how.pop("is_terminal", True)
    console = make_console(is_terminal=is_terminal, term=term)
    with SearchProgress(console, **{"quiet": False, "verbose": False, **how}) as told:
        told.on_phase("search", total=40)
        told.on_candidate(TRIAL, 3, 6 * GIB)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert ("trial 7" in text) is ("quiet" not in how)


@pytest.mark.parametrize("width", [200, 85, 80, 60])
def test_the_line_of_an_improvement_fits_the_terminal(width: int) -> None:
    line = progress._candidate_line(TRIAL, 6 * GIB, True, width)
    mark = "best so far" if width >= 85 else "best"
    assert " ".join(line.split()) == f"trial 7 220.0 ms 5.000 GiB fits * {mark}"
    assert len(line) == {200: 85, 85: 85, 80: 78, 60: 60}[width]


def test_every_baselines_figures_stand_in_their_columns_on_eighty() -> None:
    lines = [
        progress._candidate_line(
            make_candidate(name, policy=TRIAL.policy, peak_bytes=5 * GIB), 6 * GIB, True, 80
        )
        for name in BASELINE_NAMES
    ]
    assert {line.index("5.000 GiB") for line in lines} == {lines[0].index("5.000 GiB")}


def test_on_a_narrow_terminal_a_line_has_no_columns() -> None:
    line = progress._candidate_line(TRIAL, 6 * GIB, True, 40)
    assert line == "  trial 7: fits, 220.0 ms, 5.000 GiB"


def test_what_compiling_took_stands_beside_a_compiled_policy() -> None:
    assert TRIAL.measurement is not None
    measurement = dataclasses.replace(TRIAL.measurement, compile_seconds=75.0)
    candidate = dataclasses.replace(TRIAL, outcome=Outcome(measurement=measurement))
    line = progress._candidate_line(candidate, 6 * GIB, False)
    assert line.endswith("fits  (compiled in 1m 15s)")
    assert "compiled" not in progress._candidate_line(TRIAL, 6 * GIB, False)
