"""The table of faults at the end of a test run: injected, seen, search finished, trials kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.units import GIB
from sac_search.worker.client import WorkerClient
from sac_search.worker.session import SessionSettings

FAULTY = Path(__file__).with_name("faulty.py")
PROPERTY = "fault"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if lines:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def budget_gb(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("budget")
    shutil.copy(FAULTY, folder / "train.py")
    settings = SessionSettings(spec=str(folder / "train.py"), device="cpu", steps=1)
    with WorkerClient(settings, folder / "worker.log") as client:
        outcomes = [client.measure(p) for p in (NO_CHECKPOINTING, checkpoint_layers("0123"))]
    peaks = [o.measurement.peak_bytes for o in outcomes if o.measurement is not None]
    # Nearly everything fits, and is run.
    return (0.95 * max(peaks) + 0.05 * min(peaks)) / GIB
