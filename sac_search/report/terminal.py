"""Prints rows as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from sac_search import units
from sac_search.report.rows import (
    CandidateRow,
    FrontierRow,
    FrontRow,
    OpRow,
    lack_of_winner,
    limit_text,
)
from sac_search.report.throughput import SIZE_COLUMNS, SizeRow
from sac_search.study.result import SearchResult


def candidate_table(rows: Sequence[CandidateRow]) -> Table:
    """Returns the table of baselines and winner."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", overflow="fold")
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


def front_table(rows: Sequence[FrontRow]) -> Table:
    """Returns the table of a front, from the least peak to the fastest step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("peak", "step", "overhead", "verified"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for row in rows:
        cells = (row.peak, row.step, row.overhead, row.verified, row.description)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def study_table(results: Sequence[SearchResult]) -> Table:
    """Returns the table of studies."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("study", "workload", "device"):
        table.add_column(name, overflow="fold")
    for name in ("budget", "tried", "best step", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("evidence", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for result in results:
        best = result.best
        step = peak = "–"
        policy = lack_of_winner(result)
        if best is not None and best.measurement is not None and best.step_seconds is not None:
            step = units.format_seconds(best.step_seconds)
            peak = units.format_gib(best.measurement.peak_bytes)
            policy = best.policy.describe()
        cells = (
            result.study_name,
            result.environment.workload,
            result.environment.device_name,
            limit_text(result),
            str(len(result.candidates)),
            step,
            peak,
            str(result.evidence),
            policy,
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def size_table(rows: Sequence[SizeRow]) -> Table:
    """Returns the table of batch sizes; columns that nothing is known for are left out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [n for n in range(len(SIZE_COLUMNS)) if any(row.cells[n] != "–" for row in rows)]
    for number in shown:
        name = SIZE_COLUMNS[number]
        is_text = name in ("outcome", "policy")
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        style = "bold green" if row.is_best else ""
        table.add_row(*(Text(row.cells[number]) for number in shown), style=style)
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
