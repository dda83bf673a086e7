"""One search of several: what it is asked for, what it says in the end, and how it runs.

Runs wherever whoever starts it wants: in a process here, in a Ray task, in a Slurm job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sac_search import api, interrupts, records
from sac_search.errors import SacSearchError
from sac_search.options import SearchOptions
from sac_search.study.candidate import Candidate
from sac_search.worker.protocol import RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job has to search."""

    spec: str
    """The workload."""
    options: dict[str, Any]
    """The search's options, as `options_to_json` writes them."""
    study_name: str
    """The study's name; that in the options is the one of its series."""
    working_folder: str
    """Where the workload is looked for."""
    keeps_files: bool
    """Whether it leaves the study's files where the options say; else nothing is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """How a job ended."""

    error: RemoteError | None = None
    """Why it could not search to the end."""
    notes: tuple[str, ...] = ()
    """What the user should know of the workload."""


NOTHING_DONE = records.encode(JobReport()).decode()
"""The report of a job that was told to end before it had begun."""


class Log:
    """A listener that writes to standard error, which whoever runs the job keeps somewhere."""

    def on_phase(self, name: str, total: int | None = None) -> None:
        """A new stage begins."""
        sys.stderr.write(f"{name} …\n")

    def on_note(self, text: str) -> None:
        """Something that the user should read."""
        sys.stderr.write(f"{text}\n")

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None:
        """A study is continued."""

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        """A policy was measured, here or elsewhere."""

    def on_estimate(self, none_seconds: float) -> None:
        """The step without checkpointing does not run here; this is what it would take."""


def options_to_json(options: SearchOptions) -> dict[str, Any]:
    """Returns the options as what JSON holds."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        name: str(value) if isinstance(value, str | Path) else value
        for name, value in values.items()
    }


def options_from_json(values: dict[str, Any]) -> SearchOptions:
    """Returns the options that `options_to_json` wrote."""
    return SearchOptions(**{**values, "root": Path(values["root"])})


def run_job(text: str) -> str:
    """Runs the search that `text`, a `JobRequest`, asks for. Returns a `JobReport`."""
    request = records.decode(text, JobRequest)
    report = JobReport()
    try:
        with interrupts.listening(signal.SIGINT, signal.SIGTERM), _root(request) as root:
            options = replace(options_from_json(request.options), root=root, fresh=False)
            result = api.search_spec(request.spec, options, Log(), folder=root / request.study_name)
        report = JobReport(notes=result.notes)
    except SacSearchError as error:
        report = JobReport(error=RemoteError.of(error))
    except KeyboardInterrupt:
        pass  # told twice: what was measured is in the study
    return records.encode(report).decode()


@contextlib.contextmanager
def _root(request: JobRequest) -> Iterator[Path]:
    """Yields the folder of the studies; one that is gone afterwards where nothing is to be kept."""
    with contextlib.suppress(OSError):  # a machine that has no such folder finds modules elsewhere
        os.chdir(request.working_folder)
    if request.keeps_files:
        yield Path(request.options["root"])
        return
    with tempfile.TemporaryDirectory(prefix="sac-search-") as root:
        yield Path(root)
