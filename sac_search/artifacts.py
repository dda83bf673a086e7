"""What a search leaves behind: its result, the policy module, `result.json`, and what to say.

Made from what the study holds; nothing is measured.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import replace
from pathlib import Path

from sac_search import records, units
from sac_search._version import __version__
from sac_search.errors import StudyFileError, UsageError
from sac_search.export import render_module, write_whole
from sac_search.records import Evidence
from sac_search.report import rows
from sac_search.report.page import render_page
from sac_search.study.baselines import BASELINE_NAMES, COMPILED_NAMES, FULL
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.finish import Winner, known_candidates, stored_winner
from sac_search.study.importance import importances
from sac_search.study.result import SearchResult, find_candidate, floor_of, to_document
from sac_search.study.store import StudyStore, open_study

REPORT_FILE = "report.html"
POLICY_FILE = "policy.py"
OLD_POLICY_FILE = "policy.old.py"
RESULT_FILE = "result.json"


def make_result(
    store: StudyStore, winner: Winner, reason: str, interrupted: bool, notes: tuple[str, ...]
) -> SearchResult:
    """Returns the result of a study, from what it holds."""
    candidates = sorted(known_candidates(store), key=_reading_order)
    return SearchResult(
        study_name=store.name,
        folder=store.folder,
        budget_bytes=store.budget_bytes,
        environment=store.environment,
        candidates=tuple(candidates),
        best=winner.best,
        verification=winner.verification,
        layers=store.layers,
        floor_bytes=floor_of(find_candidate(candidates, FULL), store.layers),
        stop_reason=reason,
        evidence=store.evidence,
        bound_overhead_seconds=store.bound_overhead_seconds,
        rejected=winner.rejected,
        notes=notes,
        interrupted=interrupted,
        compile_options=store.compile_options,
        insights=store.insights,
        arguments=store.arguments,
        timelines=store.timelines,
        goal=store.goal,
        verifications={entry.key: entry.verification for entry in store.verified},
        none_estimate_seconds=store.none_estimate_seconds,
    )


def _reading_order(candidate: Candidate) -> int:
    names = (*BASELINE_NAMES, *COMPILED_NAMES)
    return names.index(candidate.name) if candidate.name in names else len(names)


def load_result(folder: Path, storage: str | None = None) -> SearchResult:
    """Returns the result of a study on disk, or in `storage`, without measuring anything.

    Raises:
        StudyNotFound, StudyFileError: there is no such study, or it cannot be read.
    """
    store = open_study(folder, storage)
    result = make_result(store, stored_winner(store), store.stop_reason or "", False, ())
    path = store.folder / REPORT_FILE
    return replace(result, report_path=path) if os.path.isfile(path) else result


def render_policy(result: SearchResult, module_name: str = "policy") -> str:
    """Returns the text of the exported module.

    Raises:
        UsageError: the study has no verified policy yet.
        StudyFileError: its best policy, or a figure of it, cannot be written as a module.
    """
    if result.best is None or result.best.measurement is None:
        raise UsageError(
            f"study {result.study_name!r} has no verified policy yet; run its search to the end"
        )
    figures = {
        "step_seconds": result.best.step_seconds,
        "peak_bytes": result.best.measurement.peak_bytes,
        "overhead": result.overhead_of(result.best),
    }
    meta = {
        "sac_search_version": __version__,
        "study_name": result.study_name,
        "evidence": str(result.evidence),
        "budget_bytes": result.budget_bytes,
        "figures": figures,
        "verification": records.to_builtins(result.verification),
        "environment": records.to_builtins(result.environment),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    environment = [f"  {label}: {value}" for label, value in result.environment.labelled()]
    headline = [
        f"Activation-checkpointing policy, found by sac-search {__version__}.",
        "",
        *rows.headline(result),
        "",
        (
            "Measured in this environment:"
            if result.evidence is Evidence.MEASURED
            else "Forecast, never run, for:"
        ),
        *environment,
    ]
    try:
        return render_module(
            result.best.policy,
            meta=meta,
            headline=headline,
            module_name=module_name,
            compile_arguments=(
                result.compile_options.arguments() if result.compile_options is not None else None
            ),
        )
    except ValueError as error:
        raise StudyFileError(
            f"the best policy in {result.folder or result.study_name} cannot be exported: {error}; "
            "add --fresh to search again"
        ) from error


def no_fit_message(result: SearchResult) -> str:
    """Returns why nothing fits: the smallest peak, the floor, and the phase that holds the peak."""
    budget = units.format_gib(result.budget_bytes)
    measured = [c for c in result.candidates if c.measurement is not None]
    if not measured:
        return (
            f"no policy fits {budget}: every policy that was tried ran out of memory. "
            "Use a smaller batch, or a device with more memory"
        )
    smallest = min(measured, key=lambda c: c.measurement.peak_bytes if c.measurement else 0)
    assert smallest.measurement is not None
    if result.goal.max_overhead_fraction is not None and smallest.fits(result.budget_bytes):
        return _too_slow_message(result)
    if smallest.fits(result.budget_bytes):
        return f"policies fit {budget}, but none passed verification: {'; '.join(result.rejected)}"
    lines = [
        f"no policy fits {budget}.",
        f"The smallest peak is {units.format_gib(smallest.measurement.peak_bytes)}, by "
        f"{smallest.name} ({smallest.policy.describe()}); its peak is in the phase: "
        f"{smallest.measurement.peak_phase}.",
    ]
    if result.floor_bytes is not None and result.compile_options is None:
        lines.append(
            f"No checkpointing policy can go under {units.format_gib(result.floor_bytes)}: "
            "parameters, gradients, optimizer state and its temporaries, and the loss."
        )
    lines.append("Use a larger budget, a smaller batch, or an optimizer with less state.")
    return "\n".join(lines)


def _too_slow_message(result: SearchResult) -> str:
    """Returns why no policy is within the overhead: the least that was reached, and by which."""
    limit, limits = result.goal.limit_text, result.limits
    if any(result.fits(c) for c in result.candidates):
        reasons = "; ".join(result.rejected)
        return (
            f"policies are within an overhead of {limit}, but none passed verification: {reasons}"
        )
    known = [
        (overhead, c)
        for c in result.candidates
        if c.fits(result.budget_bytes)
        and (overhead := result.goal.overhead_of(c, limits)) is not None
    ]
    if not limits.none_seconds:
        return (
            f"no policy is known to be within an overhead of {limit}: the step without "
            "checkpointing does not run here, and its time could not be estimated. Search with "
            "--budget-gb alone, or use a smaller batch"
        )
    lines = [f"no policy is within an overhead of {limit}."]
    for overhead, least in sorted(known, key=lambda pair: pair[0])[:1]:
        lines.append(
            f"The least overhead is {units.format_percent(overhead)}, by {least.name} "
            f"({least.policy.describe()}), with a peak of {units.format_gib(peak_of(least))}."
        )
    lines += [
        *rows.estimate_lines(result),
        "Allow a larger --max-overhead or --budget-gb, or use a smaller batch.",
    ]
    return "\n".join(lines)


def write_files(result: SearchResult, folder: Path) -> None:
    """Writes `result.json` and, with a winner, `policy.py`; an older one makes way without."""
    write_whole(folder / RESULT_FILE, json.dumps(to_document(result), indent=1) + "\n")
    policy_path = folder / POLICY_FILE
    if result.best is not None:
        write_whole(policy_path, render_policy(result))
    elif policy_path.exists():
        policy_path.replace(folder / OLD_POLICY_FILE)


def write_report(result: SearchResult, store: StudyStore, path: Path) -> SearchResult:
    """Writes the report of a study, a page that needs nothing beside it.

    Returns the result, which then knows where its report is.

    Raises:
        UsageError: plotly is not installed, or the file cannot be written.
    """
    write_whole(path, render_page(result, importances(store)))
    return replace(result, report_path=path)
