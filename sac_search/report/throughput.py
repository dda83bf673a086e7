"""What a search over batch sizes has to show: its table, its sentences, its page. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from html import escape
from typing import Any

from sac_search import units
from sac_search.report import rows
from sac_search.report.figures import Figure, hover, plot_layout
from sac_search.report.markup import bullets, named_values, plot, section, table
from sac_search.report.page import html_page
from sac_search.study.batches import SizeState, size_folder
from sac_search.study.candidate import Candidate
from sac_search.study.throughput_result import SizeResult, ThroughputResult

_COLUMNS = (
    ("batch size", "figure"),
    ("samples/s", "figure"),
    ("tokens/s", "figure"),
    ("without checkpointing", "figure"),
    ("full", "figure"),
    ("step", "figure"),
    ("peak", "figure"),
    ("outcome", ""),
    ("policy", "wide"),
)
_WIDTH_OF_NAMES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """A batch size in the table."""

    batch_size: str
    """The size."""
    samples: str
    """Samples per second of its best policy."""
    tokens: str
    """The same in tokens, where the sequence length is known."""
    none: str
    """Samples per second without checkpointing, in brackets where that is over the budget."""
    full: str
    """The same with full checkpointing."""
    step: str
    """Step time of its best policy."""
    peak: str
    """Its peak."""
    outcome: str
    """`best`, why it was left out, or why no further trials went to it."""
    policy: str
    """What its best policy does."""
    is_best: bool
    """Whether it is the winner."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells, in the order of `SIZE_COLUMNS`."""
        return (
            self.batch_size,
            self.samples,
            self.tokens,
            self.none,
            self.full,
            self.step,
            self.peak,
            self.outcome,
            self.policy,
        )


SIZE_COLUMNS = tuple(name for name, _ in _COLUMNS)
"""The heads of the table."""


def size_rows(result: ThroughputResult) -> list[SizeRow]:
    """Returns a row per batch size, smallest first."""
    return [_size_row(result, size) for size in result.sizes]


def _size_row(result: ThroughputResult, size: SizeResult) -> SizeRow:
    best = size.best
    is_best = size is result.best
    peak = best.measurement.peak_bytes if best is not None and best.measurement is not None else 0
    outcome = f"{size.record.state}: {size.record.reason}"
    if size.record.state is SizeState.MEASURED:
        outcome = size.record.reason
    return SizeRow(
        batch_size=str(size.batch_size),
        samples=format_rate(size.samples_per_second),
        tokens=format_rate(result.tokens(size.samples_per_second)),
        none=_end(result, size, size.none),
        full=_end(result, size, size.full),
        step="–" if size.step_seconds is None else units.format_seconds(size.step_seconds),
        peak=units.format_gib(peak) if peak else "–",
        outcome="best" if is_best else outcome,
        policy="–" if best is None else best.policy.describe(),
        is_best=is_best,
    )


def _end(result: ThroughputResult, size: SizeResult, end: Candidate | None) -> str:
    text = format_rate(size.samples_per_second_of(end))
    if end is None or end.measurement is None or end.fits(result.budget_bytes):
        return text
    return f"({text})"


def format_rate(per_second: float | None) -> str:
    """Returns a throughput with as many digits as tell two of them apart."""
    if per_second is None:
        return "–"
    digits = 2 if per_second < 100 else 1 if per_second < 1000 else 0
    return f"{per_second:,.{digits}f}"


def candidate_line(
    batch_size: int, candidate: Candidate, samples: float | None, fits: bool, is_best: bool
) -> str:
    """Returns the line that a search over batch sizes prints when it has measured a policy."""
    head = f"  {batch_size:>6}  {candidate.name:<{_WIDTH_OF_NAMES}}"
    if candidate.measurement is None:
        assert candidate.failure is not None
        return f"{head} {candidate.failure.kind}: {candidate.failure.line}"
    peak = units.format_gib(candidate.measurement.peak_bytes)
    verdict = "fits" if fits else "over"
    line = f"{head} {format_rate(samples):>10} samples/s  {peak:>11}  {verdict}"
    return line + ("  * best so far" if is_best else "")


def throughput_headline(result: ThroughputResult) -> list[str]:
    """Returns the outcome in a few sentences."""
    best, winner = result.best, result.winner
    budget = units.format_gib(result.budget_bytes)
    if best is None or winner is None or best.best is None or best.step_seconds is None:
        return [f"No policy of any batch size was found and verified that fits {budget}."]
    candidate = best.best
    assert candidate.measurement is not None
    tokens = result.tokens_per_second
    rate = f"{format_rate(best.samples_per_second)} samples/s"
    rate += f" ({format_rate(tokens)} tokens/s)" if tokens is not None else ""
    lines = [
        f"Batch size {best.batch_size}, {candidate.policy.describe()}: {rate}, "
        f"{units.format_seconds(best.step_seconds)} per step, "
        f"peak {units.format_gib(candidate.measurement.peak_bytes)} of {budget}.",
        _against_none(result, best),
        _against_full(best),
        where_larger_stops_paying(result),
    ]
    if winner.verification is not None:
        lines.append(rows.verification_line(winner))
    return [line for line in lines if line]


def _against_none(result: ThroughputResult, best: SizeResult) -> str:
    other = result.best_without_checkpointing
    if other is None:
        return "Without checkpointing no batch size fits."
    if other is best and best.best is not None and best.best.policy.changes_nothing:
        return "No policy at another batch size is faster than this one without checkpointing."
    change = _gain(best.samples_per_second, other.samples_per_second_of(other.none))
    return (
        f"Against the best batch size without checkpointing, {other.batch_size}: "
        f"throughput {change}."
    )


def _against_full(best: SizeResult) -> str:
    full = best.samples_per_second_of(best.full)
    if full is None or best.best is None or best.full is None:
        return ""
    if best.best.policy.key == best.full.policy.key:
        return ""
    change = _gain(best.samples_per_second, full)
    return f"Against full checkpointing at batch size {best.batch_size}: throughput {change}."


def _gain(ours: float | None, theirs: float | None) -> str:
    return "–" if not ours or not theirs else units.format_percent(ours / theirs - 1)


def where_larger_stops_paying(result: ThroughputResult) -> str:
    """Returns at which batch size throughput ends to grow, and why, in a sentence."""
    best = result.best
    if best is None:
        return ""
    larger = [size for size in result.sizes if size.batch_size > best.batch_size]
    measured = [size for size in larger if size.samples_per_second is not None]
    if not larger:
        return f"No larger batch size than {best.batch_size} was looked at."
    if not measured:
        told = ", ".join(f"{size.batch_size} ({size.record.state})" for size in larger)
        return f"No larger batch size can be used: {told}."
    after = measured[0]
    change = _gain(after.samples_per_second, best.samples_per_second)
    told = f"Larger stops paying at {best.batch_size}: {after.batch_size} gives {change}"
    is_more = (after.samples_per_second or 0.0) > (best.samples_per_second or 0.0)
    return f"{told}, which is within the noise, or of another hour." if is_more else f"{told}."


def throughput_closing_lines(result: ThroughputResult) -> list[str]:
    """Returns why the search stopped, where the files are, and what to type next."""
    count = sum(bool(size.candidates) for size in result.sizes)
    lines = [
        f"Stopped after {result.measured} policies at {count} batch "
        f"size{'' if count == 1 else 's'}: {result.stop_reason}."
    ]
    compared = [str(size.batch_size) for size in result.sizes if size.compared is not None]
    if compared:
        lines.append(
            f"Measured again side by side, there and back: batch sizes {', '.join(compared)}. "
            "Figures of the others are from their own trials."
        )
    if result.winner is not None:
        lines += [f"Rejected: {reason}" for reason in result.winner.rejected]
    if result.best is None:
        return lines
    names = ("policy.py", "result.json", "study.db")
    files = [result.folder / name for name in names]
    files += [] if result.report_path is None else [result.report_path]
    lines += [
        f"Files: {', '.join(map(str, files))}",
        f"The study of batch size {result.best.batch_size}: "
        f"{size_folder(result.folder, result.best.batch_size)}",
        f"Next: copy {result.folder / 'policy.py'} beside your training script; import policy; "
        f"policy.apply(model); and train with batch size {result.best.batch_size}",
    ]
    return lines


# --- the page -------------------------------------------------------------------------------------


def render_throughput_page(result: ThroughputResult) -> str:
    """Returns the report of a study over batch sizes as a page of HTML.

    Raises:
        UsageError: plotly is not installed.
    """
    drawn = {"throughput": throughput_figure(result)}
    parts = [
        _opening(result),
        section(
            "Throughput against batch size",
            "The best policy of each size that was measured; hollow marks are over the budget.",
            plot("throughput", "Throughput against batch size"),
        ),
        section("Batch sizes", _TABLE_CAPTION, _table(result)),
        section(
            "Environment",
            "All figures of this page belong to it; another one has other figures.",
            named_values([p for p in result.environment.labelled() if p[0] != "batch size"]),
        ),
        _reproduction(result),
    ]
    return html_page(f"{result.study_name}: throughput", "\n".join(parts), drawn)


_TABLE_CAPTION = (
    "Samples per second of the best policy that fits, without checkpointing, and with full "
    "checkpointing; in brackets what is over the budget."
)


def _opening(result: ThroughputResult) -> str:
    environment = result.environment
    where = f"{environment.workload} on {environment.device_name}, torch"
    sentences = "\n".join(f"<p>{escape(line)}</p>" for line in throughput_headline(result))
    closing = bullets([*throughput_closing_lines(result), *result.notes])
    return (
        f"<h1>{escape(result.study_name)}</h1>\n"
        f'<p class="muted">{escape(f"{where} {environment.torch_version}")}</p>\n'
        "<noscript>Without JavaScript there are no plots; the table has the most of it."
        f"</noscript>\n<section>{sentences}\n{closing}</section>"
    )


def _table(result: ThroughputResult) -> str:
    return table(
        _COLUMNS, [("best" if row.is_best else "", row.cells) for row in size_rows(result)]
    )


def _reproduction(result: ThroughputResult) -> str:
    workload = result.environment.workload
    body = f"<pre>{escape(shlex.join(['sac-search', workload, *result.arguments]))}</pre>"
    if result.best is not None:
        size = result.best.batch_size
        folder = str(size_folder(result.folder, size))
        body += (
            f"<p>Everything that is known of batch size {size}:</p>"
            f"<pre>{escape(shlex.join(['sac-search', 'explain', folder]))}\n"
            f"{escape(shlex.join(['sac-search', 'report', folder]))}</pre>"
        )
    caption = "The same command again continues the study, with other batch sizes, too."
    return section("How to reproduce", caption, body)


def throughput_figure(result: ThroughputResult) -> Figure:
    """Returns samples per second against batch size, and which sizes were left out."""
    measured = [size for size in result.sizes if size.samples_per_second is not None]
    traces = [_best_trace(result, measured)] if measured else []
    traces += _end_traces(result)
    lowest = min((rate for t in traces for rate in t["y"]), default=0.0)
    left_out = [size for size in result.sizes if size.samples_per_second is None]
    if left_out:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "left out",
                "x": [size.batch_size for size in left_out],
                # What has no throughput lies at the bottom.
                "y": [lowest] * len(left_out),
                "hovertext": [
                    hover((f"batch size {s.batch_size}: {s.record.state}", s.record.reason))
                    for s in left_out
                ],
                "hoverinfo": "text",
                "marker": {"symbol": "x", "size": 10, "color": "--budget"},
            }
        )
    best = result.best
    if best is not None and best.samples_per_second is not None:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "best",
                "x": [best.batch_size],
                "y": [best.samples_per_second],
                "hoverinfo": "skip",
                "marker": {"symbol": "star", "size": 17, "color": "--best"},
            }
        )
    layout = plot_layout(x="batch size", y="samples per second")
    sizes = [size.batch_size for size in result.sizes]
    layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": [str(s) for s in sizes]}
    return {"data": traces, "layout": layout}


def _best_trace(result: ThroughputResult, measured: list[SizeResult]) -> dict[str, Any]:
    texts = []
    for row, size in zip(size_rows(result), result.sizes, strict=True):
        if size.samples_per_second is not None:
            lines = [f"batch size {row.batch_size}: {row.samples} samples/s", row.policy]
            lines.append(f"{row.step} a step, peak {row.peak}")
            texts.append(hover([*lines, row.outcome]))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "best policy",
        "x": [size.batch_size for size in measured],
        "y": [size.samples_per_second for size in measured],
        "hovertext": texts,
        "hoverinfo": "text",
        "line": {"width": 2, "color": "--trial"},
        "marker": {"symbol": "circle", "size": 10, "color": "--trial"},
    }


def _end_traces(result: ThroughputResult) -> list[dict[str, Any]]:
    """Returns the throughput without and with full checkpointing; hollow over the budget."""
    traces = []
    for name, end, color in (
        ("no checkpointing", "none", "--baseline"),
        ("full checkpointing", "full", "--frontier"),
    ):
        found = []
        for size in result.sizes:
            candidate: Candidate | None = getattr(size, end)
            rate = size.samples_per_second_of(candidate)
            if candidate is not None and rate is not None:
                found.append((size.batch_size, rate, candidate.fits(result.budget_bytes)))
        if found:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": [size for size, _, _ in found],
                    "y": [rate for _, rate, _ in found],
                    "hovertext": [
                        hover((f"{name} at {size}: {format_rate(rate)} samples/s",))
                        for size, rate, _ in found
                    ],
                    "hoverinfo": "text",
                    "line": {"dash": "dot", "width": 1.5, "color": color},
                    "marker": {
                        "symbol": ["square" if fits else "square-open" for _, _, fits in found],
                        "size": 8,
                        "color": color,
                    },
                }
            )
    return traces
