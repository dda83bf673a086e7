"""Faults injected into real processes: each costs at most a trial, and is told as what it is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sac_search.api import search
from sac_search.errors import WorkloadError
from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.records import Failure, FailureKind
from sac_search.study import search as search_module
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study
from sac_search.worker.client import Isolation, WorkerClient
from sac_search.worker.session import SessionSettings

FAULTY = Path(__file__).with_name("faulty.py")
LAYERS = [str(i) for i in range(4)]
# Trials that may pass without meeting a fault.
PATIENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    action: str
    """What `faulty.py` is told."""
    seen: FailureKind | None
    """As what it is recorded; None where nothing is lost."""


FAULTS = [
    Fault(action="now segfault", seen=FailureKind.CRASH),
    Fault(action="now abort", seen=FailureKind.CRASH),
    Fault(action="now exit", seen=FailureKind.CRASH),
    Fault(action="now babble", seen=FailureKind.CRASH),
    Fault(action="now close pipe", seen=FailureKind.CRASH),
    # As the kernel does when the machine's memory is exhausted.
    Fault(action="now killed", seen=FailureKind.HOST_OUT_OF_MEMORY),
    Fault(action="now hang", seen=FailureKind.TIMEOUT),
    Fault(action="now hang in C", seen=FailureKind.TIMEOUT),
    Fault(action="now device memory", seen=FailureKind.OUT_OF_MEMORY),
    Fault(action="now host memory", seen=FailureKind.HOST_OUT_OF_MEMORY),
    Fault(action="now leak", seen=FailureKind.USER_ERROR),
    Fault(action="now raise", seen=FailureKind.USER_ERROR),
    Fault(action="always nan", seen=FailureKind.NON_FINITE_LOSS),
    Fault(action="always mismatch", seen=FailureKind.RECOMPUTE_MISMATCH),
    Fault(action="always mutate", seen=FailureKind.MUTATED_SAVED_TENSOR),
    Fault(action="always grow", seen=FailureKind.NOT_IN_STORAGE),
    Fault(action="now nan", seen=None),
    Fault(action="now fork", seen=None),
    Fault(action="now print", seen=None),
]


class Injecting:
    """Listens to a search and injects one fault after the other once the baselines are measured."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._path = folder / "fault"
        self._faults = list(faults)
        self._patience = PATIENCE
        self.candidates: list[Candidate] = []
        self.seen: dict[str, list[FailureKind]] = {}

    def on_phase(self, name: str, total: int | None = None) -> None:
        if name in ("confirm", "verify"):
            self._path.unlink(missing_ok=True)

    def on_note(self, text: str) -> None: ...

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None: ...

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        self.candidates.append(candidate)
        if candidate.is_ruled_out:
            return
        if candidate.is_baseline:
            assert candidate.failure is None
        elif self.seen:
            self._note(candidate.failure)
        if trials_done >= 1 and self._faults and not self._path.exists():
            self._inject(self._faults.pop(0))

    def _inject(self, fault: Fault) -> None:
        self.seen[fault.action] = []
        self._patience = PATIENCE
        self._path.write_text(fault.action)

    def _note(self, failure: Failure | None) -> None:
        action = list(self.seen)[-1]
        if failure is not None:
            self.seen[action].append(failure.kind)
        self._patience -= 1
        # Not every policy meets every fault.
        if action.startswith("always") and (failure is not None or not self._patience):
            self._path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    shutil.copy(FAULTY, tmp_path / "train.py")
    yield tmp_path
    for name in ("pid", "forked"):
        assert not (tmp_path / name).exists() or is_gone(tmp_path / name), f"{name} is an orphan"


def is_gone(path: Path) -> bool:
    """Whether the process whose number is in the file is dead, or soon is."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state[0] == "Z":
            return True
        time.sleep(0.05)
    return False


Record = Callable[[str, object], None]


def searched(folder: Path, budget_gb: float, told: Injecting, *, trials: int) -> SearchResult:
    return search(
        str(folder / "train.py"),
        budget_gb=budget_gb,
        listener=told,
        root=folder / "studies",
        study="faulty",
        device="cpu",
        trials=trials,
        steps=1,
        sampler=SamplerName.RANDOM,
        trial_timeout_seconds=4.0,
    )


def test_each_fault_costs_one_trial_and_the_search_goes_on(
    folder: Path, budget_gb: float, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    monkeypatch.setattr(search_module, "has_converged", lambda history, noise: False)
    told = Injecting(folder, FAULTS)

    result = searched(folder, budget_gb, told, trials=len(FAULTS) + 12)

    stored = open_study(folder / "studies" / "faulty").candidates()
    assert {c.policy.key: c.outcome for c in stored} == {
        c.policy.key: c.outcome for c in told.candidates
    }
    for fault in FAULTS:
        seen = told.seen.get(fault.action)
        record_property(
            "fault",
            f"{fault.action:<16} injected: {'no' if seen is None else 'yes':<4} "
            f"seen: {', '.join(map(str, seen or ())) or 'nothing lost'}",
        )
    record_property(
        "fault",
        f"search finished: {'yes' if result.best is not None else 'no'}; "
        f"trials kept: {len(stored)} of {len(told.candidates)}",
    )
    # Which of the two a recompute that differs is depends on what the policy saves.
    alike = {FailureKind.RECOMPUTE_MISMATCH, FailureKind.NOT_IN_STORAGE}
    for fault in FAULTS:
        seen = told.seen[fault.action]
        expected = [] if fault.seen is None else [fault.seen]
        assert seen == expected or (fault.seen in alike and len(seen) == 1 and seen[0] in alike)
    assert result.best is not None and not result.interrupted
    assert result.verification is not None and result.verification.passed


def test_each_trial_in_a_process_of_its_own(folder: Path, record_property: Record) -> None:
    settings = SessionSettings(spec=str(folder / "train.py"), device="cpu", steps=1)
    policies = [checkpoint_layers(LAYERS), NO_CHECKPOINTING, checkpoint_layers(LAYERS[:2])]
    pids = set()
    with WorkerClient(settings, folder / "log", isolation=Isolation.TRIAL) as client:
        for policy in policies:
            assert client.measure(policy).measurement is not None
            assert client.forecast(policy).peak_bytes is not None  # in the same process
            pids.add((folder / "pid").read_text())
    record_property("fault", f"--isolate trial: {len(pids)} processes for {len(policies)} trials")
    assert len(pids) == len(policies)


def test_a_workload_that_cannot_be_loaded_again_costs_a_trial(
    folder: Path, record_property: Record
) -> None:
    settings = SessionSettings(spec=str(folder / "train.py"), device="cpu", steps=1)
    full = checkpoint_layers(LAYERS)
    with WorkerClient(settings, folder / "log") as client:
        client.describe()
        (folder / "fault").write_text("now exit")
        first = client.measure(full)
        (folder / "fault").write_text("once load")
        second = client.measure(full)
        third = client.measure(full)
    failures = [outcome.failure for outcome in (first, second) if outcome.failure is not None]
    record_property("fault", f"{'once load':<16} seen: {failures[1].message[:60]}")
    assert [failure.kind for failure in failures] == [FailureKind.CRASH] * 2
    assert "could not be loaded again: train.py:workload raised" in failures[1].message.replace(
        str(folder) + "/", ""
    )
    assert third.measurement is not None


def test_baselines_that_fail_alike_are_the_workloads_fault(folder: Path, budget_gb: float) -> None:
    class BreakingAtOnce(Injecting):
        def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
            self.candidates.append(candidate)
            (folder / "fault").write_text("always raise")

    told = BreakingAtOnce(folder, [])

    with pytest.raises(WorkloadError, match="3 baselines failed in the same way: step raised"):
        searched(folder, budget_gb, told, trials=2)
    (folder / "fault").unlink()

    # Full checkpointing, measured before, and the three.
    assert [c.failure is not None for c in told.candidates] == [False, True, True, True]
