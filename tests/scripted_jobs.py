"""A fleet's jobs that measure nothing: the model on paper stands for the workload."""

from __future__ import annotations

import os
import time
from pathlib import Path

import conftest  # noqa: F401  the same settings of SQLite as in the tests
from scripted import BLOCK_OPS, ScriptedMeasurer, make_layers

from sac_search import api
from sac_search.fleet.job import run_job
from sac_search.study import search as search_module


class PaperClient(ScriptedMeasurer):
    """Takes the place of a worker process. Each measurement takes a moment, as on a device."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        super().__init__(layers=make_layers(3, BLOCK_OPS[:4]), sleep_seconds=0.05)

    def __enter__(self) -> PaperClient:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def measure(self, policy: object) -> object:
        outcome = super().measure(policy)
        marks = os.environ.get("PAPER_MARKS")
        if marks:  # who measured what
            with Path(marks).open("a") as file:
                file.write(f"{os.getpid()} {policy.key}\n")
        if os.environ.get("PAPER_DIES") == str(self.measured.total()):
            os._exit(9)
        return outcome


def run_paper_job(text: str) -> str:
    """Runs a job on paper, in a process of its own: until every policy was tried."""
    api.WorkerClient = PaperClient
    search_module.has_converged = lambda history, noise: False
    return run_job(text)


def wait_until_interrupted(text: str) -> str:
    """A job that does nothing until it is told to end."""
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return "interrupted"
    return "slept"
