"""What a search over batch sizes leaves behind: its result, its files, and what to say.

Made from what the studies hold; nothing is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sac_search import units
from sac_search.artifacts import (
    OLD_POLICY_FILE,
    POLICY_FILE,
    REPORT_FILE,
    RESULT_FILE,
    make_result,
    render_policy,
    write_files,
)
from sac_search.export import write_whole
from sac_search.report.throughput import render_throughput_page
from sac_search.study.batches import BatchStore, open_batches, size_folder
from sac_search.study.finish import stored_winner
from sac_search.study.store import open_study
from sac_search.study.throughput_result import (
    SizeResult,
    ThroughputResult,
    sizes_of,
    to_document,
)


def make_throughput_result(
    store: BatchStore, reason: str, *, interrupted: bool = False, notes: tuple[str, ...] = ()
) -> ThroughputResult:
    """Returns the result of a study over batch sizes, from what it and its sizes hold."""
    batch_size = store.best_batch_size
    winner = None
    if batch_size is not None:
        study = open_study(size_folder(store.folder, batch_size))
        winner = make_result(study, stored_winner(study), reason, interrupted, ())
    has_winner = winner is not None and winner.best is not None
    path = store.folder / REPORT_FILE
    return ThroughputResult(
        study_name=store.name,
        folder=store.folder,
        budget_bytes=store.budget_bytes,
        environment=store.environment,
        sizes=sizes_of(store),
        winner=winner if has_winner else None,
        batch_size=batch_size if has_winner else None,
        stop_reason=reason,
        notes=notes,
        interrupted=interrupted,
        arguments=store.arguments,
        report_path=path if path.is_file() else None,
    )


def load_throughput(folder: Path) -> ThroughputResult:
    """Returns the result of a study over batch sizes, without measuring anything.

    Raises:
        StudyNotFound, StudyError: there is no such study, or it cannot be read.
    """
    store = open_batches(folder)
    return make_throughput_result(store, store.stop_reason or "read from the study")


def write_throughput_files(result: ThroughputResult) -> None:
    """Writes `result.json` and, with a winner, `policy.py`, here and in the winner's study.

    Without a winner an older policy makes way.
    """
    text = json.dumps(to_document(result), indent=1)
    write_whole(result.folder / RESULT_FILE, text + "\n")
    policy_path = result.folder / POLICY_FILE
    if result.winner is not None and result.winner.folder is not None:
        write_files(result.winner, result.winner.folder)
        write_whole(policy_path, render_policy(result.winner))
    elif policy_path.exists():
        policy_path.replace(result.folder / OLD_POLICY_FILE)


def write_throughput_report(result: ThroughputResult, path: Path) -> ThroughputResult:
    """Writes the report of a study over batch sizes. Returns the result, which then knows of it.

    Raises:
        UsageError: plotly is not installed, or the file cannot be written.
    """
    write_whole(path, render_throughput_page(result))
    return replace(result, report_path=path)


def no_size_message(budget_bytes: int, sizes: Iterable[SizeResult]) -> str:
    """Returns why nothing fits at any batch size."""
    reasons = "\n".join(map(_reason_line, sizes))
    return (
        f"no batch size fits {units.format_gib(budget_bytes)}:\n{reasons}\n"
        "Use a larger budget, smaller batch sizes, or an optimizer with less state."
    )


def _reason_line(size: SizeResult) -> str:
    return f"  batch size {size.batch_size}: {size.record.state}; {size.record.reason}"
