"""Two hundred trials leave processes, open files and memory where they were."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sac_search.api import search
from sac_search.study import search as search_module
from sac_search.study.candidate import Candidate
from sac_search.study.sampler import SamplerName

FAULTY = Path(__file__).with_name("faulty.py")
TRIALS = 200
# From here on nothing should grow: torch, Optuna and the database's cache have what they need.
SETTLED = 80


@dataclass(frozen=True, slots=True)
class Footprint:
    processes: int
    open_files: int
    resident_mib: float


class Watching:
    """Listens to a search, and looks at the processes that run it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.parent: dict[int, Footprint] = {}
        self.worker: dict[int, Footprint] = {}

    def on_phase(self, name: str, total: int | None = None) -> None: ...

    def on_note(self, text: str) -> None: ...

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None: ...

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        if trials_done:
            self.parent[trials_done] = footprint(os.getpid())
            self.worker[trials_done] = footprint(int((self._folder / "pid").read_text()))


def footprint(pid: int) -> Footprint:
    folder = Path("/proc", str(pid))
    pages = int((folder / "statm").read_text().split()[1])
    return Footprint(
        processes=len((folder / "task" / str(pid) / "children").read_text().split()),
        open_files=len(list((folder / "fd").iterdir())),
        resident_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


@pytest.mark.slow
@pytest.mark.skipif("SAC_SEARCH_SLOW" not in os.environ, reason="SAC_SEARCH_SLOW=1 runs it")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_trials_leave_no_trace(
    tmp_path: Path,
    budget_gb: float,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr(search_module, "has_converged", lambda history, noise: False)
    shutil.copy(FAULTY, tmp_path / "train.py")
    told = Watching(tmp_path)

    search(
        str(tmp_path / "train.py"),
        budget_gb=budget_gb,
        listener=told,
        root=tmp_path / "studies",
        device="cpu",
        trials=TRIALS,
        steps=1,
        sampler=SamplerName.RANDOM,
        layer_choice="each",
    )

    assert max(told.parent) == TRIALS
    for who, seen in (("parent", told.parent), ("worker", told.worker)):
        settled = [seen[i] for i in range(SETTLED, SETTLED + 20) if i in seen]
        last = [seen[i] for i in range(TRIALS - 19, TRIALS + 1) if i in seen]
        before, after = settled[0], last[-1]
        growth = min(f.resident_mib for f in last) - min(f.resident_mib for f in settled)
        record_property(
            "fault",
            f"soak, {who}: trials {SETTLED} to {TRIALS}: "
            f"processes {before.processes} to {after.processes}, "
            f"open files {before.open_files} to {after.open_files}, "
            f"resident {before.resident_mib:.0f} to {after.resident_mib:.0f} MiB",
        )
        assert after.processes == before.processes
        assert after.open_files == before.open_files
        assert growth < 8
