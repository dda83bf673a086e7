"""Tables on a console."""

from __future__ import annotations

import dataclasses
import io

from results import BITWISE, TRIAL, make_result
from rich.console import Console
from scripted import make_candidate

from sac_search.records import Evidence
from sac_search.report import rows, terminal

# Markup, an emoji code, a tag that closes nothing and a backslash at the end.
NASTY = "[red]h.0[/red] :bomb: [/bold] \\"


def printed(table: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


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


def test_on_eighty_columns_nothing_is_cut_off() -> None:
    recipe = make_candidate(
        "save matmul + attention + convolution", policy=TRIAL.policy, seconds=0.25
    )
    result = make_result(dataclasses.replace(recipe, is_baseline=True), TRIAL, best=TRIAL)
    text = printed(terminal.candidate_table(rows.candidate_rows(result)), 80)
    assert "…" not in text
    assert " ".join(text.split()).startswith("policy step overhead peak budget what it does")
    assert "convolution" in text and "250.0 ms ±0.0%" in text


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
    results = [
        make_result(best=TRIAL),
        make_result(study_name="unfinished"),
        make_result(study_name="on paper", best=TRIAL, evidence=Evidence.FORECAST),
    ]
    text = printed(terminal.study_table(results))

    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == (
        "gpt paper.py:workload paper 6.000 GiB 3 220.0 ms 5.000 GiB measured 2 layers: save matmul"
    )
    assert lines[2] == (
        "unfinished paper.py:workload paper 6.000 GiB 3 – – measured none verified yet"
    )
    assert "220.0 ms 5.000 GiB forecast" in lines[3]


def test_the_verification_of_the_result_is_the_one_in_the_headline() -> None:
    result = make_result(best=TRIAL)

    assert rows.verification_line(result) == rows.describe_verification(BITWISE)
    assert rows.verification_line(result) in rows.headline(result)
