"""Searches of one study over machines: a real PostgreSQL, a proxy, and a file that is shared."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from databases import free_port, postgresql
from optuna.trial import TrialState
from scripted import ENVIRONMENT, MIB, Listener, ScriptedMeasurer, make_layers, other_environment

from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result
from sac_search.errors import (
    EnvironmentMismatch,
    StudyError,
    StudyFileError,
    StudyNotFound,
    UsageError,
)
from sac_search.policy import Policy
from sac_search.records import Outcome, encode
from sac_search.study import attendance
from sac_search.study import search as search_module
from sac_search.study.attendance import Attendance, taking_part
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.sampler import SamplerName
from sac_search.study.storage import shared_storage
from sac_search.study.store import StudyStore, create_study, list_studies, open_study

BUDGET_GB = 160 * MIB / 2**30
BUDGET_BYTES = 160 * MIB


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgresql() as address:
        yield address


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    port = free_port()
    storage = f"sqlite:///{tmp_path_factory.mktemp('proxy')}/studies.db"
    command = [sys.executable, "-W", "ignore", "-m", "sac_search", "serve", "--storage", storage]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert f"grpc://127.0.0.1:{port} now" in server.stdout.readline().decode()
        try:
            yield f"grpc://127.0.0.1:{port}"
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.fixture(params=["file", "database", "proxy"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"sqlite:///{tmp_path}/shared.db"
    address: str = request.getfixturevalue(request.param)
    return address


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A study's name that no other test has."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def create(folder: Path, storage: str) -> StudyStore:
    return create_study(
        folder,
        budget_bytes=BUDGET_BYTES,
        environment=ENVIRONMENT,
        layers=make_layers(3),
        storage=storage,
    )


def states(storage: str, name: str) -> Counter[TrialState]:
    study = optuna.load_study(study_name=name, storage=shared_storage(storage))
    return Counter(trial.state for trial in study.get_trials(deepcopy=False))


def test_long_values_are_split_and_found_whole(tmp_path: Path, storage: str, name: str) -> None:
    layers = make_layers(60)
    store = create_study(
        tmp_path / name,
        budget_bytes=BUDGET_BYTES,
        environment=ENVIRONMENT,
        layers=layers,
        storage=storage,
    )
    assert open_study(tmp_path / name, storage).layers == layers
    others = make_layers(70)
    store.replace_layers(others)
    assert open_study(tmp_path / name, storage).layers == others
    stored = {key: len(json.dumps(value)) for key, value in store.study.user_attrs.items()}
    assert max(stored.values()) < 2**16  # what MySQL takes
    assert sum(stored.values()) < 1.5 * len(encode(others))  # the first ones are gone
    store.replace_layers(make_layers(1))
    assert open_study(tmp_path / name, storage).layers == make_layers(1)


def test_a_lost_part_is_told(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db"
    store = create(tmp_path / "gpt", storage)
    store.replace_layers(make_layers(60))
    part = next(key for key in store.study.user_attrs if key.startswith("part "))
    store.study.set_user_attr(part, None)
    with pytest.raises(StudyFileError, match="a part of layers is missing"):
        _ = open_study(tmp_path / "gpt", storage).layers


# --- who takes part -------------------------------------------------------------------------------


def test_a_study_is_kept_where_it_is_said_and_found_there(
    tmp_path: Path, storage: str, name: str
) -> None:
    with pytest.raises(StudyNotFound, match="no study"):
        open_study(tmp_path / name, storage)
    create(tmp_path / name, storage)

    found = open_study(tmp_path / name, storage)

    assert (found.name, found.budget_bytes, found.layers) == (name, BUDGET_BYTES, make_layers(3))
    assert found.folder == tmp_path / name
    assert not (tmp_path / name / "study.db").exists()
    assert tmp_path / name in list_studies(tmp_path, storage)


def test_who_takes_part_is_seen_by_the_others(tmp_path: Path, storage: str, name: str) -> None:
    with Attendance(storage, name) as one:
        assert not one.has_others()
        with Attendance(storage, name) as other:
            assert one.worker != other.worker
            assert one.has_others()
            assert other.has_others()
        assert not one.has_others()
    assert list_studies(tmp_path, storage) == [
        folder for folder in list_studies(tmp_path, storage) if "workers" not in folder.name
    ]


def test_one_has_the_turn_and_who_came_first_is_first(storage: str, name: str) -> None:
    order: list[str] = []

    def wait_for_it(who: str) -> None:
        with Attendance(storage, name) as me, me.turn(lambda: order.append(f"{who} waits")):
            order.append(f"{who} has it")

    threads = [threading.Thread(target=wait_for_it, args=(who,)) for who in ("one", "two")]
    with Attendance(storage, name) as first, first.turn(lambda: order.append("never")):
        for count, thread in enumerate(threads, start=1):
            thread.start()
            deadline = time.monotonic() + 20
            while len(order) < count and time.monotonic() < deadline:
                time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert order == ["one waits", "two waits", "one has it", "two has it"]


HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from sac_search.study.attendance import Attendance\n"
    "from sac_search.study.store import open_study\n"
    "storage, name = sys.argv[1:]\n"
    "with Attendance(storage, name) as me, me.turn(lambda: None):\n"
    "    trial = open_study(Path(name), storage).study.ask()\n"
    "    trial.set_user_attr('worker', me.worker)\n"
    "    print(me.worker, flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.mark.parametrize("is_on_this_machine", [True, False])
def test_a_killed_one_lets_go_of_its_turn_and_its_trial(
    tmp_path: Path,
    storage: str,
    name: str,
    is_on_this_machine: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = create(tmp_path / name, storage)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, storage, name],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        worker = holder.stdout.readline().strip()
        with Attendance(storage, name) as me:
            if not is_on_this_machine:
                monkeypatch.setattr(attendance, "_this_machine", lambda: "another")
                monkeypatch.setattr(attendance, "SILENT_SECONDS", 7.0)
            me.reclaim(store, store.running_trials())
            assert store.running_trials() == {0: worker}
            holder.kill()
            started = time.monotonic()
            with me.turn(lambda: None):
                waited_seconds = time.monotonic() - started
                me.reclaim(store, store.running_trials())
    assert store.running_trials() == {}
    # Of another machine it is only known that nothing was said.
    assert (waited_seconds > 6.5) is not is_on_this_machine
    assert states(storage, name) == {TrialState.FAIL: 1}


def test_who_goes_on_saying_so_is_not_taken_for_dead(
    storage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(attendance, "SILENT_SECONDS", 1.0)
    with Attendance(storage, name) as other, Attendance(storage, name) as me:
        monkeypatch.setattr(attendance, "_this_machine", lambda: "another")
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert me.has_others()
            time.sleep(0.1)
        other._stopped.set()  # it stands still
        time.sleep(0.3)
        assert me.has_others()
        time.sleep(1.2)
        assert not me.has_others()


def test_who_was_taken_for_dead_joins_again(
    storage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_SECONDS", 0.1)
    with Attendance(storage, name) as slow, Attendance(storage, name) as me:
        before = slow.worker
        slow._finish(slow._member_id, TrialState.FAIL, None)
        deadline = time.monotonic() + 20
        while slow.worker == before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert slow.worker != before
        assert me.has_others()


def test_who_was_taken_for_dead_searches_on_under_another_name(
    tmp_path: Path, storage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_SECONDS", 0.1)

    class Asleep(ScriptedMeasurer):
        def measure(self, policy: Policy) -> Outcome:
            outcome = super().measure(policy)
            if self.measured.total() == 11:  # in the trials
                with Attendance(storage, name) as other:
                    [me] = [t for t in other._running() if "beat" in t.user_attrs][:1]
                    other._finish(me._trial_id, TrialState.FAIL, None)
                    other.reclaim(store(), store().running_trials())
                time.sleep(1)
            return outcome

    def store() -> StudyStore:
        return open_study(tmp_path / name, storage)

    measurer = Asleep()
    monkeypatch.setattr(search_module, "has_converged", lambda history, noise: False)
    options = SearchOptions(
        budget_gb=BUDGET_GB, root=tmp_path, storage=storage, trials=8, sampler=SamplerName.RANDOM
    )
    run_search(measurer, name, options, Listener())

    assert set(measurer.measured.values()) == {1}
    assert {c.policy.key for c in store().candidates()} == set(measurer.measured)
    trials = store().study.get_trials(deepcopy=False)
    # What it had measured meanwhile is written as a trial that nobody has signed.
    workers = {t.user_attrs.get("worker") for t in trials if t.state is TrialState.COMPLETE}
    assert len(workers - {None}) == 2
    assert [t.state for t in trials].count(TrialState.FAIL) == 1


def test_who_lost_the_turn_is_told(storage: str, name: str) -> None:
    with Attendance(storage, name) as me, me.turn(lambda: None):
        [ticket] = [t for t in me._running() if t.user_attrs["kind"] == "turn"]
        me._finish(ticket._trial_id, TrialState.FAIL, None)
        with pytest.raises(StudyError, match="stood still"):
            me._is_first(ticket._trial_id)


# --- searches -------------------------------------------------------------------------------------


def search(
    root: Path, storage: str, name: str, log_path: Path, trials: int, **script: float
) -> None:
    # Each as on a machine of its own: with a folder of its own.
    search_module.has_converged = lambda history, noise: False
    measurer = ScriptedMeasurer(layers=make_layers(12), log_path=log_path, **script)
    options = SearchOptions(
        budget_gb=1.25 * BUDGET_GB,
        root=root / f"machine-{os.getpid()}",
        storage=storage,
        trials=trials,
        sampler=SamplerName.RANDOM,
    )
    result = run_search(measurer, name, options, Listener())
    with log_path.with_suffix(".ends").open("a") as file:
        file.write(f"{len(measurer.compared)} {len(measurer.verified)}\n")
    os._exit(0 if result.best is not None else 1)


def test_workers_share_a_study_and_a_killed_one_loses_nothing(
    tmp_path: Path, storage: str, name: str
) -> None:
    log_path, workers = tmp_path / "log", 4
    trials = 60 if storage.startswith("postgresql") else 20
    log_path.touch()
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(
            target=search,
            args=(tmp_path, storage, name, log_path, trials),
            kwargs={"sleep_seconds": 0.1},
        )
        for _ in range(workers)
    ]
    for child in children:
        child.start()
    wait_for_lines(log_path, len(BASELINE_NAMES) + trials // 3)
    children[1].kill()
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    assert codes == [0, -signal.SIGKILL, 0, 0]

    store = open_study(tmp_path / name, storage)
    found = states(storage, name)
    assert store.claims() == set()
    assert not found[TrialState.WAITING]
    # What was measured is there, once; what the killed one was at is measured by another.
    candidates = store.candidates()
    measured = Counter(log_path.read_text().splitlines())
    keys = {candidate.policy.key for candidate in candidates}
    lost = measured.keys() - keys
    doubled = {key for key, count in measured.items() if count > 1}
    assert len(lost | doubled) <= 1  # what the killed one had not told yet
    assert {c.name for c in candidates if c.is_baseline} == set(BASELINE_NAMES)
    beyond = sum(not c.is_baseline for c in candidates)
    assert trials <= beyond <= trials + workers - 1
    assert are_at_once(store)
    # One measures the finalists and verifies, and all end with the same.
    ends = [line.split() for line in log_path.with_suffix(".ends").read_text().splitlines()]
    assert sorted(ends) == [["0", "0"], ["0", "0"], ["1", "1"]]
    results = [load_result(folder / name, storage) for folder in tmp_path.glob("machine-*")]
    policies = {
        (path / name / "policy.py").read_text().partition("META")[0]
        for path in tmp_path.glob("machine-*")
        if (path / name / "policy.py").is_file()
    }
    assert len(policies) == 1
    assert len({result.policy.key for result in results}) == 1


def are_at_once(store: StudyStore) -> bool:
    """Whether trials of two workers ran at the same time."""
    trials = [t for t in store.study.get_trials() if t.state is TrialState.COMPLETE]
    return any(
        one.datetime_start < other.datetime_start < one.datetime_complete
        for one, other in itertools.permutations(trials, 2)
        if one.user_attrs["worker"] != other.user_attrs["worker"]
    )


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"no {count} measurements in time"
        time.sleep(0.01)


def test_another_environment_may_not_join(tmp_path: Path, storage: str, name: str) -> None:
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path, trials=1, storage=storage)
    run_search(ScriptedMeasurer(), name, options, Listener())
    other = ScriptedMeasurer(environment=other_environment(device_name="another GPU"))

    with pytest.raises(EnvironmentMismatch, match="another GPU"):
        run_search(other, name, options, Listener())
    assert other.order == []


def test_a_search_continues_from_another_folder(tmp_path: Path, storage: str, name: str) -> None:
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path / "a", trials=3, storage=storage)
    first, second = ScriptedMeasurer(), ScriptedMeasurer()
    one = run_search(first, name, options, Listener())
    options = SearchOptions(budget_gb=BUDGET_GB, root=tmp_path / "b", trials=3, storage=storage)

    two = run_search(second, name, options, Listener())

    assert first.order
    assert second.order == second.compared == second.verified == []
    assert one.policy == two.policy
    assert (tmp_path / "b" / name / "policy.py").is_file()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["nonsense", "http://host", "postgresql://host", "sqlite://", "grpc://", "x y://z"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"is no address; it looks like postgresql\+psycopg"):
        SearchOptions(budget_gb=1, storage=address)


def test_a_database_that_nobody_serves_is_named_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    address = f"postgresql+psycopg://me:secret@127.0.0.1:{free_port()}/studies"
    with pytest.raises(StudyFileError, match="refused") as caught:
        open_study(tmp_path / "gpt", address)
    assert "secret" not in str(caught.value)
    assert "me:***@127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("driver", ["pymysql", "nosuchdriver"])
def test_a_missing_driver_is_told_with_what_to_type(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(UsageError, match=r"needs more: pip install 'sac-search\[mysql\]'"):
        open_study(tmp_path / "gpt", f"mysql+{driver}://me@127.0.0.1/studies")


def test_a_password_is_not_written_down() -> None:
    options = SearchOptions(budget_gb=1, storage="postgresql+psycopg://me:secret@host/studies")
    assert options.arguments()[-2:] == ("--storage", "postgresql+psycopg://me:***@host/studies")


def test_a_folder_and_a_storage_are_told_apart(tmp_path: Path) -> None:
    with taking_part(tmp_path / "gpt", None) as membership:
        assert not isinstance(membership, Attendance)
