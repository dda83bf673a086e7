"""Several searches of one study, in processes of their own.

Who is alone, whose turn it is, and that no policy is measured twice.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from scripted import MIB, Listener, ScriptedMeasurer

from sac_search.api import SearchOptions, run_search
from sac_search.study import sharing
from sac_search.study.baselines import BASELINE_NAMES, FULL
from sac_search.study.sampler import SamplerName
from sac_search.study.sharing import claiming, is_shared, joined, turn
from sac_search.study.storage import storage_at
from sac_search.study.store import open_study

BUDGET_GB = 160 * MIB / 2**30
HOLD = (
    "import sys, time; from pathlib import Path\n"
    "from sac_search.study.sharing import joined, turn\n"
    "with {part}(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
)


def hold(part: str, folder: Path) -> subprocess.Popen[str]:
    """Returns a process that takes part, or has the turn, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(part=part), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


def test_whoever_is_alone_can_say_so(tmp_path: Path) -> None:
    done: list[int] = []
    with joined(tmp_path / "gpt") as first:
        assert first.when_alone(lambda: done.append(1))
        with joined(tmp_path / "gpt") as second:
            assert not first.when_alone(lambda: done.append(2))
            assert not second.when_alone(lambda: done.append(3))
            with joined(tmp_path / "other") as elsewhere:
                assert elsewhere.when_alone(lambda: done.append(4))
        assert first.when_alone(lambda: done.append(5))
    assert done == [1, 4, 5]


def test_nobody_joins_while_somebody_is_alone(tmp_path: Path) -> None:
    def join() -> None:
        with joined(tmp_path / "gpt"):
            order.append("joined")

    order: list[str] = []
    thread = threading.Thread(target=join)

    def clean_up() -> None:
        thread.start()
        time.sleep(0.3)
        order.append("cleaned up")

    with joined(tmp_path / "gpt") as first:
        assert first.when_alone(clean_up)
        thread.join()
    assert order == ["cleaned up", "joined"]


def test_whoever_was_killed_takes_no_part(tmp_path: Path) -> None:
    other = hold("joined", tmp_path)
    with joined(tmp_path) as first:
        assert not first.when_alone(lambda: None)
        kill(other)
        assert first.when_alone(lambda: None)


@pytest.mark.parametrize("take", [turn, claiming])
def test_one_has_the_turn(tmp_path: Path, take: object) -> None:
    order: list[str] = []

    def wait_for_it() -> None:
        with take(tmp_path):
            order.append("second")

    thread = threading.Thread(target=wait_for_it)
    with take(tmp_path):
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_whoever_waits_is_told_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    other, told = hold("turn", tmp_path), []

    def on_wait() -> None:
        told.append("waits")
        kill(other)

    with turn(tmp_path, on_wait):
        assert told == ["waits"]
    with turn(tmp_path, on_wait):
        assert told == ["waits"]


@pytest.mark.parametrize("take", [turn, claiming, joined])
def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path, take: object) -> None:
    with take(tmp_path):
        child = os.fork()  # as a data loader does
        if child == 0:
            time.sleep(60)
            os._exit(0)
    told: list[str] = []
    try:
        with turn(tmp_path, lambda: told.append("waits")), joined(tmp_path) as alone:
            assert alone.when_alone(lambda: None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert told == []


def test_a_search_that_runs_can_be_seen(tmp_path: Path) -> None:
    assert not is_shared(tmp_path / "gpt")
    with joined(tmp_path / "gpt"):
        assert is_shared(tmp_path / "gpt")
        assert not is_shared(tmp_path / "other")
    assert not is_shared(tmp_path / "gpt")


# --- searches -------------------------------------------------------------------------------------


def search(root: Path, log_path: Path, trials: int, seed: int, sampler: SamplerName) -> None:
    measurer = ScriptedMeasurer(sleep_seconds=0.02, log_path=log_path)
    options = SearchOptions(
        budget_gb=BUDGET_GB, root=root, trials=trials, sampler=sampler, seed=seed
    )
    result = run_search(measurer, "gpt", options, Listener())
    os._exit(0 if result.best is not None else 1)


@pytest.mark.parametrize(
    ("sampler", "searches"), [(SamplerName.RANDOM, 4), (SamplerName.PLANNER, 2)]
)
def test_searches_at_once_measure_nothing_twice(
    tmp_path: Path, sampler: SamplerName, searches: int
) -> None:
    log_path, trials = tmp_path / "log", 12
    context = multiprocessing.get_context("fork")
    # The same seed, so that they would all propose the same.
    children = [
        context.Process(target=search, args=(tmp_path, log_path, trials, 0, sampler))
        for _ in range(searches)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * searches

    measured = Counter(log_path.read_text().splitlines())
    assert set(measured.values()) == {1}
    store = open_study(tmp_path / "gpt")
    candidates = store.candidates()
    assert {c.name for c in candidates if c.is_baseline} == set(BASELINE_NAMES)
    # Each may begin its last trial before it sees the last ones of the others.
    beyond = sum(not c.is_baseline for c in candidates)
    assert beyond <= trials + searches - 1
    assert len(measured) == len(candidates)
    states = Counter(trial.state for trial in store.study.get_trials())
    assert not states[optuna.trial.TrialState.RUNNING]
    assert (tmp_path / "gpt" / "policy.py").is_file()


def take_waiting(path: Path, taken: Any) -> None:
    study = optuna.load_study(study_name="gpt", storage=storage_at(path))
    numbers = []
    while (number := study._pop_waiting_trial_id()) is not None:
        numbers.append(number)
    taken.put(numbers)


def test_a_waiting_trial_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = optuna.create_study(study_name="gpt", storage=storage_at(path))
    for value in range(40):
        study.enqueue_trial({"x": value})
    context = multiprocessing.get_context("fork")
    taken = context.SimpleQueue()
    children = [context.Process(target=take_waiting, args=(path, taken)) for _ in range(3)]
    for child in children:
        child.start()
    numbers = [number for _ in children for number in taken.get()]
    for child in children:
        child.join()
    assert sorted(numbers) == list(range(1, 41))


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_search_that_joins_says_so_and_leaves_the_others_trial_alone(tmp_path: Path) -> None:
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path, trials=2)
    run_search(ScriptedMeasurer(), "gpt", options, Listener())
    store = open_study(tmp_path / "gpt")
    others = store.study.ask()
    told = Listener()

    with joined(tmp_path / "gpt"):
        run_search(ScriptedMeasurer(), "gpt", options, told)
        state = store.study.get_trials()[others.number].state
    assert state is optuna.trial.TrialState.RUNNING
    assert any("Another search of study 'gpt' is running" in note for note in told.notes)

    alone = Listener()
    run_search(ScriptedMeasurer(), "gpt", options, alone)
    state = store.study.get_trials()[others.number].state
    assert state is optuna.trial.TrialState.FAIL
    assert not alone.notes


def test_where_files_have_no_locks_nobody_is_said_to_search_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_lock", lambda *arguments, **keywords: False)
    told = Listener()
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path, trials=2)
    run_search(ScriptedMeasurer(), "gpt", options, told)
    assert not any("Another search" in note for note in told.notes)
    assert not is_shared(tmp_path / "gpt")


def test_a_baseline_that_a_killed_search_was_at_is_measured_all_the_same(tmp_path: Path) -> None:
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path, trials=2)
    folder = tmp_path / "gpt"

    class Dying(ScriptedMeasurer):
        def measure(self, policy: object) -> object:
            os._exit(9)

    child = multiprocessing.get_context("fork").Process(
        target=run_search, args=(Dying(), "gpt", options, Listener())
    )
    child.start()
    child.join()
    running = open_study(folder).study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    assert [trial.user_attrs["baseline"] for trial in running] == [FULL]

    with joined(folder):  # so that nobody is alone, and the dead trial is taken for a running one
        run_search(ScriptedMeasurer(), "gpt", options, Listener())
    found = open_study(folder).candidates()
    assert {c.name for c in found if c.is_baseline} == set(BASELINE_NAMES)
