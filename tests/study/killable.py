"""Runs searches in processes of their own, one per line on standard input, to be killed from
outside. Prints the process id of each, then how it ended.

Usage: killable.py ROOT LOG TRIALS
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import conftest  # noqa: F401  the same settings of SQLite as in the tests
from scripted import MIB, Listener, ScriptedMeasurer, make_layers

from sac_search.api import SearchOptions, run_search
from sac_search.study import search as search_module
from sac_search.study.sampler import SamplerName


def search(root: Path, log_path: Path | None, trials: int) -> None:
    search_module.has_converged = lambda history, noise: False
    measurer = ScriptedMeasurer(
        layers=make_layers(12), sleep_seconds=0.03 if log_path else 0, log_path=log_path
    )
    options = SearchOptions(
        budget_gb=160 * MIB / 2**30, root=root, trials=trials, sampler=SamplerName.TPE
    )
    result = run_search(measurer, "gpt", options, Listener())
    assert result.best is not None


# Once beforehand, so that all that is imported late is there for every process.
with tempfile.TemporaryDirectory() as scratch:
    search(Path(scratch), None, trials=2)

for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            search(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
