"""Several ranks in one process: real sockets between them, and workers that are scripted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from scripted import make_failed, make_layers, make_outcome
from test_combine import VERIFICATION, described

from sac_search import errors, ranks
from sac_search.failures import make_failure
from sac_search.policy import NO_CHECKPOINTING
from sac_search.ranks import Launch
from sac_search.records import FailureKind, encode
from sac_search.worker import group as group_module
from sac_search.worker.client import WorkerClient
from sac_search.worker.group import Group, connect, leading, serve
from sac_search.worker.process import WorkerLost
from sac_search.worker.protocol import RemoteError, Reply
from sac_search.worker.session import ForecastPeak, SessionSettings, Verdict

SIZE = 3
Script = Callable[["ScriptedProcess", str], Any]


class ScriptedProcess:
    """A worker that answers as its rank's script says."""

    made: list[ScriptedProcess]
    scripts: dict[int, Script]

    def __init__(self, log_path: Path, environment: dict[str, str]) -> None:
        _, _, rank = log_path.stem.partition(".rank")
        self.rank = int(rank or 0)
        self.environment = environment
        self.stopped = threading.Event()
        self.made.append(self)

    def exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Reply:
        assert timeout_seconds is None  # rank 0 watches the time of all
        if method == "load":
            result: Any = True
        elif method == "describe":
            result = described()
        else:
            result = self.scripts.get(self.rank, lambda process, method: make_outcome())(
                self, method
            )
        if isinstance(result, Reply):
            return result
        return Reply(number=0, result=msgspec.Raw(encode(result)))

    def hang(self) -> None:
        self.stopped.wait(30)
        raise lost("ended while it hung")

    def stop(self) -> None:
        self.stopped.set()


def lost(message: str) -> WorkerLost:
    return WorkerLost(make_failure(FailureKind.CRASH, message))


def hangs(process: ScriptedProcess, method: str) -> None:
    process.hang()


def says(result: Any) -> Script:
    return lambda process, method: result


def crashes(process: ScriptedProcess, method: str) -> None:
    raise lost("exit code 3")


def launch_of(rank: int, store: Any, size: int = SIZE) -> Launch:
    return Launch(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_address="127.0.0.1",
        master_port=store.port,
        has_store=True,
    )


@pytest.fixture
def store() -> Any:
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Job:
    """A group of ranks: the leader here, the others in threads."""

    def __init__(self, store: Any, log_path: Path) -> None:
        self.log_path = log_path
        self.exit_codes: dict[int, int] = {}
        self.channels = {}
        self.threads = []
        self.group = Group(launch_of(0, store))
        for rank in range(1, SIZE):
            launch = launch_of(rank, store)
            self.channels[rank] = connect(launch)
            thread = threading.Thread(target=self._serve, args=(launch,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _serve(self, launch: Launch) -> None:
        self.exit_codes[launch.rank] = serve(launch, self.channels[launch.rank])

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def job(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(group_module, "WorkerProcess", ScriptedProcess)
    monkeypatch.setattr(group_module, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(ScriptedProcess, "made", [], raising=False)
    monkeypatch.setattr(ScriptedProcess, "scripts", {}, raising=False)
    job = Job(store, tmp_path / "worker.log")
    monkeypatch.setattr(group_module, "_leading", job.group)
    yield job
    job.group.end(0)
    job.join()


@pytest.fixture
def client(job: Job) -> WorkerClient:
    return WorkerClient(SessionSettings(spec="x"), job.log_path)


def fails(client: WorkerClient) -> tuple[FailureKind, str]:
    failure = client.measure(NO_CHECKPOINTING).failure
    assert failure is not None
    return failure.kind, failure.message


# --- what all ranks answer ------------------------------------------------------------------------


def test_every_rank_is_asked_and_the_worst_counts(job: Job, client: WorkerClient) -> None:
    for rank, (seconds, peak_bytes) in enumerate([(1.0, 200), (3.0, 100), (2.0, 300)]):
        ScriptedProcess.scripts[rank] = says(make_outcome(seconds=seconds, peak_bytes=peak_bytes))
    assert client.describe() == described()
    found = client.measure(NO_CHECKPOINTING).measurement
    assert found is not None
    assert (found.step_seconds, found.peak_bytes) == (3.0, 300)
    assert found.rank_peak_bytes == (200, 100, 300)
    assert sorted(process.rank for process in ScriptedProcess.made) == [0, 1, 2]
    # They find a store that is theirs alone, and that somebody keeps for them.
    ports = {process.environment["MASTER_PORT"] for process in ScriptedProcess.made}
    assert len(ports) == 1
    assert all(p.environment["TORCHELASTIC_USE_AGENT_STORE"] == "True" for p in job_processes())


def job_processes() -> list[ScriptedProcess]:
    return ScriptedProcess.made


def test_a_worker_that_kept_memory_is_replaced_with_all_others(
    job: Job, client: WorkerClient
) -> None:
    result = msgspec.Raw(encode(make_outcome()))
    ScriptedProcess.scripts[1] = says(Reply(number=0, result=result, healthy=False))
    assert client.measure(NO_CHECKPOINTING).measurement is not None
    client.measure(NO_CHECKPOINTING)
    assert len(ScriptedProcess.made) == 2 * SIZE
    first, second = ScriptedProcess.made[:SIZE], ScriptedProcess.made[SIZE:]
    assert all(process.stopped.is_set() for process in first)
    ports = {process.environment["MASTER_PORT"] for process in (*first, *second)}
    assert len(ports) == 2


# --- one rank that fails --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (
            says(make_failed(FailureKind.OUT_OF_MEMORY)),
            FailureKind.OUT_OF_MEMORY,
            "rank 1: on paper",
        ),
        (crashes, FailureKind.CRASH, "rank 1: exit code 3"),
        (says("nonsense"), FailureKind.CRASH, "rank 1: its answer made no sense"),
    ],
)
def test_who_waits_for_a_rank_that_failed_is_ended(
    job: Job, client: WorkerClient, script: Script, kind: FailureKind, message: str
) -> None:
    ScriptedProcess.scripts = {0: hangs, 1: script, 2: hangs}
    started = time.monotonic()
    found_kind, found_message = fails(client)
    assert time.monotonic() - started < 5
    assert found_kind is kind
    assert found_message.startswith(message)
    ScriptedProcess.scripts.clear()
    assert client.measure(NO_CHECKPOINTING).measurement is not None  # with new workers
    assert len(ScriptedProcess.made) == 2 * SIZE


def test_an_echo_of_the_failure_may_come_first(job: Job, client: WorkerClient) -> None:
    echo = make_failure(FailureKind.USER_ERROR, "RuntimeError: Connection closed by peer")

    def crashes_later(process: ScriptedProcess, method: str) -> None:
        process.stopped.wait(0.1)
        raise lost("exit code 3")

    ScriptedProcess.scripts = {0: says(Verdict(failure=echo)), 1: crashes_later, 2: hangs}
    failure = client.verify(NO_CHECKPOINTING).failure
    assert failure is not None
    assert failure.message == "rank 1: exit code 3"


def test_a_comparison_in_which_a_rank_failed_is_done_again_one_by_one(
    job: Job, client: WorkerClient
) -> None:
    def script(process: ScriptedProcess, method: str) -> Any:
        return [make_failed(), make_outcome()] if method == "compare" else make_outcome()

    ScriptedProcess.scripts[0] = lambda _, method: (
        [make_outcome()] * 2 if method == "compare" else make_outcome()
    )
    ScriptedProcess.scripts[1] = script
    ScriptedProcess.scripts[2] = ScriptedProcess.scripts[0]
    outcomes = client.compare([NO_CHECKPOINTING] * 2, steps=4)
    assert all(outcome.measurement is not None for outcome in outcomes)
    assert len(ScriptedProcess.made) == 2 * SIZE


def test_a_rank_that_cannot_forecast_ends_the_waiting(job: Job, client: WorkerClient) -> None:
    ScriptedProcess.scripts = {0: hangs, 1: says(ForecastPeak(problem="no")), 2: hangs}
    started = time.monotonic()
    assert client.forecast(NO_CHECKPOINTING).problem == "rank 0, 2 did not answer as the others did"
    assert time.monotonic() - started < 5
    for rank in range(SIZE):
        ScriptedProcess.scripts[rank] = says(ForecastPeak(problem="no"))
    assert client.forecast(NO_CHECKPOINTING).problem == "no"


def test_a_step_that_ends_nowhere_is_out_of_time(job: Job) -> None:
    client = WorkerClient(SessionSettings(spec="x"), job.log_path, trial_timeout_seconds=0.5)
    ScriptedProcess.scripts = {0: hangs, 2: hangs}
    assert fails(client) == (FailureKind.TIMEOUT, "no answer within 0 s from rank 0, 2")


def test_answers_of_workers_that_were_ended_are_not_heard(job: Job, client: WorkerClient) -> None:
    ScriptedProcess.scripts = {0: hangs, 1: says(make_failed()), 2: hangs}
    fails(client)
    ScriptedProcess.scripts.clear()
    for _ in range(3):
        found = client.measure(NO_CHECKPOINTING).measurement
        assert found is not None
        assert len(found.rank_peak_bytes) == SIZE


def test_an_error_names_its_rank(job: Job, client: WorkerClient) -> None:
    error = RemoteError(type_name="WorkloadError", message="no", user_traceback="line 1")
    ScriptedProcess.scripts = {0: hangs, 1: hangs, 2: says(Reply(number=0, error=error))}
    with pytest.raises(errors.WorkloadError, match=r"^rank 2: no$") as raised:
        client.measure(NO_CHECKPOINTING)
    assert raised.value.user_traceback == "line 1"


def test_a_reference_that_does_not_fit_gives_way_on_all_ranks_together(
    job: Job, client: WorkerClient
) -> None:
    def script(process: ScriptedProcess, method: str) -> Any:
        if method == "verify" and process.rank == 1:
            return Verdict(failure=make_failed(FailureKind.OUT_OF_MEMORY).failure)
        if method == "verify":
            return process.hang()
        assert method == "verify_with_full"
        return Verdict(verification=VERIFICATION)

    ScriptedProcess.scripts = dict.fromkeys(range(SIZE), script)
    assert client.verify(NO_CHECKPOINTING).verification == VERIFICATION
    assert len(ScriptedProcess.made) == 2 * SIZE


# --- one rank that is gone ------------------------------------------------------------------------


def test_without_one_rank_the_search_cannot_go_on(job: Job, client: WorkerClient) -> None:
    ScriptedProcess.scripts = dict.fromkeys(range(SIZE), hangs)
    threading.Timer(0.2, job.channels[2].close).start()
    with pytest.raises(errors.WorkerError, match="rank 2 is gone"):
        client.measure(NO_CHECKPOINTING)
    with pytest.raises(errors.WorkerError, match="rank 2 is gone"):
        client.measure(NO_CHECKPOINTING)


def test_no_rank_outlives_rank_0(job: Job, client: WorkerClient) -> None:
    client.measure(NO_CHECKPOINTING)
    for channel in job.group._channels.values():
        channel.close()
    job.join()
    assert job.exit_codes == {1: 1, 2: 1}
    assert all(process.stopped.is_set() for process in ScriptedProcess.made if process.rank)
    log = job.log_path.with_name("worker.rank2.log").read_text()
    assert log.startswith("sac-search: rank 2: rank 0 is gone")


def test_all_ranks_end_with_rank_0s_exit_code(job: Job, client: WorkerClient) -> None:
    client.measure(NO_CHECKPOINTING)
    job.group.end(3)
    job.join()
    assert job.exit_codes == {1: 3, 2: 3}


def test_a_log_that_rank_0_does_not_keep_no_rank_keeps(job: Job, client: WorkerClient) -> None:
    logs = [job.log_path, *(job.log_path.with_name(f"worker.rank{n}.log") for n in (1, 2))]
    client.measure(NO_CHECKPOINTING)
    for log in logs:
        log.touch()
    job.log_path.unlink()
    job.group.end(0)
    job.join()
    assert not any(log.exists() for log in logs)


def test_whoever_does_not_know_the_job_is_not_let_in(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_HELLO_SECONDS", 0.2)
    group = Group(launch_of(0, store, size=2))
    port, token = ranks.open_store(launch_of(0, store)).get("leader").decode().split()
    silent = socket.create_connection(("127.0.0.1", int(port)))
    wrong = socket.create_connection(("127.0.0.1", int(port)))
    wrong.sendall(b'{"rank":1,"token":"guessed"}\n')
    strangers = [silent, wrong]
    for text in ('{"rank":1,"token":"\u00e9"}\n', f'{{"rank":7,"token":"{token}"}}\n', "x" * 2**16):
        strangers.append(socket.create_connection(("127.0.0.1", int(port))))
        strangers[-1].sendall(text.encode())
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    assert not group._complete.is_set()
    right = socket.create_connection(("127.0.0.1", int(port)))
    right.sendall(f'{{"rank":1,"token":"{token}"}}\n'.encode())
    assert group._complete.wait(5)
    right.close()
    group.end(0)


def test_a_rank_that_never_comes_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(group_module, "_POLL_SECONDS", 0.1)
    with leading(launch_of(0, store, size=2)) as group:
        with pytest.raises(errors.WorkerError, match="rank 1 did not connect within 0 s"):
            group.start(Path("x"))
        group.end(1)
    assert group_module.current_group() is None


def test_layers_that_differ_are_told(job: Job, client: WorkerClient) -> None:
    plain = ScriptedProcess.exchange

    def exchange(process: ScriptedProcess, method: str, *rest: Any) -> Reply:
        if method == "describe" and process.rank == 2:
            return Reply(number=0, result=msgspec.Raw(encode(described(layers=make_layers(5)))))
        return plain(process, method, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ScriptedProcess, "exchange", exchange)
        with pytest.raises(errors.WorkloadError, match="rank 2 runs other layers than rank 0"):
            client.describe()
