"""Tables and progress on a console, and plain lines where there is no terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from results import BITWISE, FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from rich.console import Console
from scripted import make_candidate, make_failed

from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.records import Outcome
from sac_search.report import rows, terminal
from sac_search.study.candidate import Candidate

# Markup, an emoji code, a tag that closes nothing and a backslash at the end.
NASTY = "[red]h.0[/red] :bomb: [/bold] \\"


def printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def make_console(*, is_terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=120, force_terminal=is_terminal, color_system=None, _environ={}
    )


def nasty_candidate(name: str = NASTY) -> Candidate:
    return make_candidate(name, policy=Policy(), is_baseline=True)


# --- tables ---------------------------------------------------------------------------------------


def test_the_table_of_candidates_has_every_cell_on_one_line() -> None:
    text = printed(terminal.candidate_table(rows.candidate_rows(make_result(best=TRIAL))))

    lines = text.splitlines()
    assert lines[0].split() == [
        "policy",
        "step",
        "overhead",
        "peak",
        "budget",
        "what",
        "it",
        "does",
    ]
    assert [line.split("  ")[0] for line in lines[1:]] == ["none", "full", "best (trial 7)"]
    assert "200.0 ms ±0.4%" in lines[1] and "over" in lines[1]
    assert "2 layers: save matmul" in lines[3]


def test_the_winner_stands_out_on_a_terminal() -> None:
    console = Console(
        file=io.StringIO(), width=200, force_terminal=True, color_system="standard", _environ={}
    )
    console.print(terminal.candidate_table(rows.candidate_rows(make_result(best=TRIAL))))

    lines = console.file.getvalue().splitlines()
    bold_green = "\x1b[1;32m"
    assert [bold_green in line for line in lines] == [False, False, False, True]


def test_markup_in_names_is_printed_and_not_interpreted() -> None:
    row = rows.CandidateRow(
        name=NASTY, description=NASTY, step="1", overhead="2", peak="3", verdict="fits"
    )
    op = rows.OpRow(
        kind=NASTY,
        op=NASTY,
        op_class="matmul",
        calls=1,
        mib=1.0,
        milliseconds=1.0,
        saved_by=NASTY,
        savable=True,
    )
    result = make_result(best=TRIAL, study_name=NASTY)

    assert printed(terminal.candidate_table([row])).count(NASTY) == 2
    assert printed(terminal.op_table([op])).count(NASTY) == 3
    assert NASTY in printed(terminal.study_table([result]))


def test_the_table_of_ops_names_each_kind_once() -> None:
    def row(kind: str, op: str) -> rows.OpRow:
        return rows.OpRow(
            kind=kind,
            op=op,
            op_class="matmul",
            calls=3,
            mib=1.234,
            milliseconds=0.5,
            saved_by="save.matmul",
            savable=True,
        )

    text = printed(terminal.op_table([row("Block", "a"), row("Block", "b"), row("Stage", "c")]))

    firsts = [line.split("matmul")[0].split() for line in text.splitlines()[1:]]
    assert firsts == [["Block", "a"], ["b"], ["Stage", "c"]]
    assert "1.23" in text and "0.500" in text


def test_the_table_of_studies_tells_the_best_of_each() -> None:
    text = printed(
        terminal.study_table([make_result(best=TRIAL), make_result(study_name="unfinished")])
    )

    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == (
        "gpt paper.py:workload paper 6.000 GiB 3 220.0 ms 5.000 GiB 2 layers: save matmul"
    )
    assert lines[2] == "unfinished paper.py:workload paper 6.000 GiB 3 – – none verified yet"


# --- progress where there is no terminal ----------------------------------------------------------


def lines_of(
    *candidates: Candidate, quiet: bool = False, verbose: bool = False, budget_bytes: int = 6 * GIB
) -> list[str]:
    console = make_console()
    with terminal.SearchProgress(console, quiet=quiet, verbose=verbose) as progress:
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


@pytest.mark.parametrize("quiet", [False, True])
def test_on_a_terminal_there_is_a_bar_unless_quiet(quiet: bool) -> None:
    console = make_console(is_terminal=True)
    with terminal.SearchProgress(console, quiet=quiet, verbose=False) as progress:
        progress.on_phase("search", total=40)
        progress.on_candidate(NONE_CANDIDATE, 0, 6 * GIB)
        progress._progress.refresh()
        nothing_fits = console.file.getvalue()
        progress.on_candidate(TRIAL, 3, 6 * GIB)
        progress._progress.refresh()

    text = console.file.getvalue()
    if quiet:
        assert text == ""
        return
    assert "nothing fits yet" in nothing_fits
    assert "3/40 trials" in text
    assert "best 220.0 ms, peak 5.000 GiB" in text


def test_the_verification_of_the_result_is_the_one_in_the_headline() -> None:
    result = make_result(best=TRIAL)

    assert rows.verification_line(result) == rows.describe_verification(BITWISE)
    assert rows.verification_line(result) in rows.headline(result)


def test_what_compiling_took_stands_beside_a_compiled_policy() -> None:
    assert TRIAL.measurement is not None
    measurement = dataclasses.replace(TRIAL.measurement, compile_seconds=75.0)
    candidate = dataclasses.replace(TRIAL, outcome=Outcome(measurement=measurement))
    line = terminal._candidate_line(candidate, 6 * GIB, False)
    assert line.endswith("fits  (compiled in 1m 15s)")
    assert "compiled" not in terminal._candidate_line(TRIAL, 6 * GIB, False)
