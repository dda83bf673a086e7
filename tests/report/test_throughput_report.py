"""What is printed and drawn of a search over batch sizes."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from pages import Page, trace_named
from results import make_result as make_search_result
from rich.console import Console
from scripted import ENVIRONMENT, make_candidate, make_failed, make_outcome

from sac_search import units
from sac_search.policy import Policy, checkpoint_layers
from sac_search.report.terminal import size_table
from sac_search.report.throughput import (
    candidate_line,
    format_rate,
    render_throughput_page,
    size_rows,
    throughput_closing_lines,
    throughput_figure,
    throughput_headline,
    where_larger_stops_paying,
)
from sac_search.study.baselines import FULL, NONE
from sac_search.study.batches import Compared, SizeRecord, SizeState
from sac_search.study.candidate import Candidate
from sac_search.study.throughput_result import SizeResult, ThroughputResult

GIB = units.GIB
BUDGET_GIB = 6
ONE_LAYER = checkpoint_layers(["h.0"])


def make_size(
    size: int, *, none: float, full: float, best: float | None = None, peaks: tuple[int, int]
) -> SizeResult:
    """Returns a size with step times in seconds, and peaks in GiB of none and of full."""
    ends = {
        NONE: make_candidate(NONE, policy=Policy(), seconds=none, peak_bytes=peaks[0] * GIB),
        FULL: make_candidate(
            FULL, policy=checkpoint_layers(["h.0", "h.1"]), seconds=full, peak_bytes=peaks[1] * GIB
        ),
    }
    trial = None
    if best is not None:
        trial = make_candidate("trial 3", policy=ONE_LAYER, seconds=best, peak_bytes=5 * GIB)
    fitting = [c for c in (ends[NONE], trial, ends[FULL]) if c is not None]
    fitting = [c for c in fitting if c.fits(BUDGET_GIB * GIB)]
    return SizeResult(
        record=SizeRecord(
            batch_size=size,
            samples=size,
            state=SizeState.MEASURED if fitting else SizeState.TOO_LARGE,
            reason="the step fits without checkpointing" if peaks[0] <= BUDGET_GIB else "over",
        ),
        candidates=(*ends.values(), *([trial] if trial is not None else [])),
        best=fitting[0] if fitting else None,
        none=ends[NONE],
        full=ends[FULL],
    )


def ruled_out(size: int) -> SizeResult:
    return SizeResult(
        record=SizeRecord(
            batch_size=size, samples=size, state=SizeState.RULED_OUT, reason="its peak is 9 <GiB>"
        )
    )


FOUR = make_size(4, none=0.1, full=0.13, peaks=(5, 3))
EIGHT = make_size(8, none=0.16, full=0.2, best=0.17, peaks=(9, 4))
SIXTEEN = make_size(16, none=0.4, full=0.5, best=0.41, peaks=(17, 6))


def make_result(*sizes: SizeResult, best: int | None = None, **changes: Any) -> ThroughputResult:
    chosen = next((size for size in sizes if size.batch_size == best), None)
    winner = None
    if chosen is not None:
        winner = make_search_result(*chosen.candidates, best=chosen.best)
    return ThroughputResult(
        **{
            "study_name": "gpt-6gib-throughput",
            "folder": Path("studies/gpt-6gib-throughput"),
            "budget_bytes": BUDGET_GIB * GIB,
            "environment": ENVIRONMENT,
            "sizes": sizes,
            "winner": winner,
            "batch_size": best,
            "stop_reason": "no batch size promises more than the best one",
            "arguments": ("--budget-gb", "6.0", "--maximize", "throughput"),
            **changes,
        }
    )


RESULT = make_result(FOUR, EIGHT, SIXTEEN, ruled_out(32), best=8)


def test_the_headline_says_what_is_won_and_against_what() -> None:
    assert throughput_headline(RESULT) == [
        "Batch size 8, 1 layer: recompute all: 47.06 samples/s (6,024 tokens/s), 170.0 ms per "
        "step, peak 5.000 GiB of 6.000 GiB.",
        "Against the best batch size without checkpointing, 4: throughput +17.6%.",
        "Against full checkpointing at batch size 8: throughput +17.6%.",
        "Larger stops paying at 8: 16 gives -17.1%.",
        "Loss and every gradient are bitwise those of no checkpointing.",
    ]


def test_tokens_are_left_out_where_their_number_is_not_known() -> None:
    unknown = dataclasses.replace(ENVIRONMENT, sequence_length=None)
    result = make_result(FOUR, EIGHT, best=8, environment=unknown)
    assert "tokens" not in throughput_headline(result)[0]
    text = _printed(result)
    assert "tokens/s" not in text
    assert "samples/s" in text


@pytest.mark.parametrize(
    ("sizes", "best", "told"),
    [
        ((FOUR, EIGHT), 8, "No larger batch size than 8 was looked at."),
        ((FOUR, EIGHT, ruled_out(32)), 8, "No larger batch size can be used: 32 (ruled out)."),
        ((FOUR, EIGHT, SIXTEEN), 8, "Larger stops paying at 8: 16 gives -17.1%."),
        (
            (FOUR, EIGHT, make_size(16, none=0.3, full=0.339, peaks=(17, 6))),
            8,
            "Larger stops paying at 8: 16 gives +0.3%, which is within the noise, or of another "
            "hour.",
        ),
        ((FOUR, EIGHT), None, ""),
    ],
)
def test_where_larger_stops_paying(
    sizes: tuple[SizeResult, ...], best: int | None, told: str
) -> None:
    assert where_larger_stops_paying(make_result(*sizes, best=best)) == told


def test_the_winner_may_need_no_checkpointing() -> None:
    lines = throughput_headline(make_result(FOUR, SIXTEEN, best=4))
    assert lines[0].startswith("Batch size 4, no checkpointing: 40.00 samples/s")
    assert "No policy at another batch size is faster" in lines[1]
    nothing_fits = make_result(EIGHT, SIXTEEN, best=8)
    assert "Without checkpointing no batch size fits." in throughput_headline(nothing_fits)


def test_nothing_was_found() -> None:
    result = make_result(ruled_out(32))
    assert throughput_headline(result) == [
        "No policy of any batch size was found and verified that fits 6.000 GiB."
    ]
    assert throughput_closing_lines(result) == [
        "Stopped after 0 policies at 0 batch sizes: no batch size promises more than the best one."
    ]


def test_rows_have_what_fits_and_in_brackets_what_does_not() -> None:
    four, eight, _, last = size_rows(RESULT)
    assert (four.samples, four.none, four.full) == ("40.00", "40.00", "30.77")
    assert (eight.samples, eight.none, eight.full) == ("47.06", "(50.00)", "40.00")
    assert (four.outcome, eight.outcome) == ("the step fits without checkpointing", "best")
    assert last.outcome == "ruled out: its peak is 9 <GiB>"
    assert set(last.cells) == {"32", "–", last.outcome}


def test_the_comparison_moves_all_policies_of_a_size_alike() -> None:
    """Policies of a size are held against each other by the steps that ran beside theirs."""
    slower = [make_outcome(seconds=seconds) for seconds in (0.18, 0.16 + 0.04)]
    compared = Compared(batch_size=8, key=ONE_LAYER.key, outcomes=tuple(slower))
    size = SizeResult(
        record=EIGHT.record, best=EIGHT.best, none=EIGHT.none, full=EIGHT.full, compared=compared
    )
    assert size.step_seconds == pytest.approx(0.19)
    assert size.step_seconds_of(size.full) == pytest.approx(0.2 * 0.19 / 0.17)
    failed = Compared(batch_size=8, key=ONE_LAYER.key, outcomes=(slower[0], make_failed()))
    other = SizeResult(record=EIGHT.record, best=EIGHT.best, compared=failed)
    assert other.step_seconds == pytest.approx(0.17)


def test_the_lines_at_the_end_name_the_files_and_what_to_do() -> None:
    text = "\n".join(throughput_closing_lines(RESULT))
    assert "studies/gpt-6gib-throughput/policy.py" in text
    assert "The study of batch size 8: studies/gpt-6gib-throughput/batch-8" in text
    assert "train with batch size 8" in text
    assert "Stopped after 8 policies at 3 batch sizes" in text


def test_the_line_of_a_policy() -> None:
    full = EIGHT.full
    assert full is not None
    line = candidate_line(8, full, 40.0, True, True)
    assert line.split() == [
        "8",
        "full",
        "40.00",
        "samples/s",
        "4.000",
        "GiB",
        "fits",
        *["*", "best", "so", "far"],
    ]
    failed = Candidate(name="none", policy=Policy(), outcome=make_failed(), step_seconds=None)
    assert "out of memory: The device ran out" in candidate_line(8, failed, None, False, False)


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "–"), (1.234, "1.23"), (123.45, "123.5"), (12345.6, "12,346")]
)
def test_rates(rate: float | None, text: str) -> None:
    assert format_rate(rate) == text


def test_the_page_has_the_plot_the_table_and_what_to_type() -> None:
    page = Page(render_throughput_page(RESULT))
    assert "Larger stops paying at 8" in page.visible
    assert "ruled out: its peak is 9 <GiB>" in page.visible
    assert "sac-search paper.py:workload --budget-gb 6.0 --maximize throughput" in page.visible
    assert [d["class"] for d in page.has("tr") if d.get("class") == "best"] == ["best"]
    assert set(page.figures) == {"throughput"}
    places = [d["data-figure"] for d in page.has("div") if "data-figure" in d]
    assert places == ["throughput"]


def test_the_plot_has_every_size() -> None:
    figure = throughput_figure(RESULT)
    best = trace_named(figure, "best policy")
    assert best["x"] == [4, 8, 16]
    assert best["y"] == pytest.approx([40, 8 / 0.17, 16 / 0.41])
    assert trace_named(figure, "left out")["x"] == [32]
    assert "its peak is 9 &lt;GiB&gt;" in trace_named(figure, "left out")["hovertext"][0]
    none = trace_named(figure, "no checkpointing")
    assert none["marker"]["symbol"] == ["square", "square-open", "square-open"]
    assert trace_named(figure, "best")["x"] == [8]
    assert figure["layout"]["xaxis"]["ticktext"] == ["4", "8", "16", "32"]


def _printed(result: ThroughputResult) -> str:
    output = io.StringIO()
    Console(width=200, file=output).print(size_table(size_rows(result)))
    return output.getvalue()
