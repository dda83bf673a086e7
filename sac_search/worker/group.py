"""The workers of all ranks of a distributed job, asked as if they were one.

`torchrun` starts this program once per rank. Rank 0 leads: it holds the study, and whatever it asks
its own worker, every other rank asks its worker at the same time, so that the step's collectives
run for real. The answers come together here. As soon as one rank fails, the others may wait for it
in a collective for ever, and no process group survives a lost member: so the workers of all ranks
are ended then, and started again, with a store of their own, for the next request.

The ranks' programs talk over sockets, as a program and its worker over pipes: one JSON object per
line. Whoever is gone is noticed by the end of its stream.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch

from sac_search import interrupts
from sac_search.errors import WorkerError
from sac_search.failures import make_failure
from sac_search.ranks import Launch, open_store
from sac_search.records import Failure, FailureKind, encode
from sac_search.worker.combine import cause_of, combine, error_of, failure_of
from sac_search.worker.process import WorkerLost, WorkerProcess, nonsense
from sac_search.worker.protocol import METHODS, RemoteError, Reply

_ADDRESS_KEY = "leader"
_CONNECT_SECONDS = 300.0
_HELLO_SECONDS = 10.0
_HELLO_BYTES = 4096
_POLL_SECONDS = 1.0
# How long the others may take to say what they saw, once a rank has failed.
_GRACE_SECONDS = 5.0
# A machine that is gone does not end its streams; this is how soon it is missed.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
_LOST_RANK_EXIT_CODE = 1

T = TypeVar("T")


# --- messages -------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first that a rank says to rank 0."""

    rank: int
    """Which one it is."""
    token: str
    """What only ranks of this job know."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks a rank to start a worker."""

    generation: int
    """Counts up; the answers of this worker carry the same."""
    port: int
    """Where the store of this generation's workers listens, on the machine of rank 0."""
    log_path: str
    """The log of rank 0's worker."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks a rank to ask its worker."""

    method: str
    """A key of METHODS."""
    argument: msgspec.Raw
    """Of the method's argument type."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks a rank to end its worker."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last that rank 0 says."""

    exit_code: int
    """Its own exit code, and everybody's."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's worker answered."""

    generation: int
    """Which of its workers."""
    reply: Reply | None = None
    """Its reply; None when it was lost."""
    lost: Failure | None = None
    """How it was lost."""


class Channel:
    """A stream of messages from this program to another rank's, and back."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Sends a message. One that does not arrive is noticed by whoever reads."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(encode(message) + b"\n")

    def read(self, message_type: Any, *, most_bytes: int = -1) -> Any:
        """Returns the next message; None when the other side is gone, or talks nonsense."""
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            line = self._lines.readline(most_bytes)
            if line:
                return msgspec.json.decode(line, type=message_type)
        return None

    def wait_at_most(self, seconds: float | None) -> None:
        """Takes a side that is silent for so long for gone."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Ends the stream, also for whoever reads from it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()


# --- rank 0 ---------------------------------------------------------------------------------------


class Group:
    """All ranks of this job, led by this process."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        """How this process was started."""
        self.answers: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        """What ranks answered, each with its rank; None from one that is gone."""
        self._channels: dict[int, Channel] = {}
        self._gone: list[int] = []
        self._complete = threading.Event()
        self._generation = 0
        self._store: Any = None
        if launch.world_size == 1:
            self._complete.set()
        else:
            self._invite()

    def start(self, log_path: Path) -> GroupWorker:
        """Starts a worker on every rank.

        Raises:
            WorkerError: a rank is not there.
        """
        self._wait_for_all(_CONNECT_SECONDS)
        self.refuse_gone()
        self._generation += 1
        return GroupWorker(self, self._generation, log_path)

    def send(self, message: Start | Ask | Stop | End) -> None:
        """Sends a message to all other ranks."""
        for channel in self._channels.values():
            channel.send(message)

    def refuse_gone(self) -> None:
        """Raises WorkerError if a rank is gone: without it no step can run any more."""
        if self._gone:
            raise WorkerError(
                f"rank {self._gone[0]} is gone: its process was ended, or its machine does not "
                "answer. What was measured is kept; the same command continues"
            )

    def end(self, exit_code: int) -> None:
        """Lets all other ranks end, too, with this exit code."""
        with contextlib.suppress(WorkerError, KeyboardInterrupt):
            self._wait_for_all(_CONNECT_SECONDS)
        self.send(End(exit_code=exit_code))
        for channel in self._channels.values():
            channel.close()

    def _invite(self) -> None:
        self._store = open_store(self.launch)
        if self.launch.is_on_one_machine:
            server = socket.create_server(("127.0.0.1", 0))
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        token = secrets.token_hex(16)
        threading.Thread(target=self._welcome, args=(server, token), daemon=True).start()
        self._store.set(_ADDRESS_KEY, f"{server.getsockname()[1]} {token}")

    def _welcome(self, server: socket.socket, token: str) -> None:
        with server:
            while len(self._channels) < self.launch.world_size - 1:
                connection, _ = server.accept()
                channel = Channel(connection)
                channel.wait_at_most(_HELLO_SECONDS)
                hello = channel.read(Hello, most_bytes=_HELLO_BYTES)
                if hello is None or not self._is_invited(hello, token):
                    channel.close()
                    continue
                channel.wait_at_most(None)
                self._channels[hello.rank] = channel
                threading.Thread(
                    target=self._listen, args=(hello.rank, channel), daemon=True
                ).start()
        self._complete.set()

    def _is_invited(self, hello: Hello, token: str) -> bool:
        is_missing = 0 < hello.rank < self.launch.world_size and hello.rank not in self._channels
        return is_missing and secrets.compare_digest(hello.token.encode(), token.encode())

    def _listen(self, rank: int, channel: Channel) -> None:
        while (answer := channel.read(Answer)) is not None:
            self.answers.put((rank, answer))
        channel.close()
        self._gone.append(rank)
        self.answers.put((rank, None))

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._complete.wait(_POLL_SECONDS):
            interrupts.raise_if_unseen()
            if time.monotonic() > deadline:
                missing = set(range(1, self.launch.world_size)) - set(self._channels)
                raise WorkerError(
                    f"rank {', '.join(map(str, sorted(missing)))} did not connect within "
                    f"{seconds:.0f} s; was the same command started on every machine?"
                )


@dataclass(slots=True)
class _Answers:
    """The answers to one request so far, in the order in which they came."""

    method: str
    results: dict[int, Any]
    failures: list[tuple[int, Failure]]
    errors: list[tuple[int, RemoteError]]
    is_healthy: bool = True
    has_problem: bool = False

    @property
    def count(self) -> int:
        return len(self.results) + len(self.failures) + len(self.errors)

    def add(self, rank: int, answer: Answer) -> None:
        reply = answer.reply
        if reply is None:
            self.failures.append((rank, answer.lost or nonsense(ValueError("it is empty"))))
        elif reply.error is not None:
            self.errors.append((rank, reply.error))
        else:
            self._add_result(rank, reply)

    def _add_result(self, rank: int, reply: Reply) -> None:
        try:
            result = msgspec.json.decode(reply.result, type=METHODS[self.method].result_type)
        except msgspec.DecodeError as error:
            self.failures.append((rank, nonsense(error)))
            return
        self.is_healthy &= reply.healthy
        failure = failure_of(result)
        if failure is not None:
            self.failures.append((rank, failure))
            return
        self.results[rank] = result
        # It may have left its step before the others, who then wait for it.
        self.has_problem |= result is None or bool(getattr(result, "problem", ""))


class GroupWorker:
    """One worker on every rank, as if they were one `WorkerProcess`."""

    def __init__(self, group: Group, generation: int, log_path: Path) -> None:
        distributed: Any = torch.distributed
        self._group = group
        self._generation = generation
        launch = group.launch
        # Whatever the user's code leaves in its store is gone with it.
        self._store = distributed.TCPStore(
            launch.master_address, 0, is_master=True, wait_for_workers=False
        )
        start = Start(generation=generation, port=self._store.port, log_path=str(log_path))
        group.send(start)
        self._process = WorkerProcess(log_path, _worker_environment(start))

    def exchange(self, method: str, argument: Any, timeout_seconds: float | None) -> Reply:
        """Sends a request to all workers and returns what their replies come to.

        Raises:
            WorkerLost: the workers cannot go on: one hung, died, wrote nonsense, or has no figures.
            WorkerError: a rank is gone, its worker's parent with it.
        """
        ask = Ask(method=method, argument=msgspec.Raw(encode(argument)))
        self._group.send(ask)
        threading.Thread(
            target=_answer,
            args=(self._process, self._generation, ask, self._put_own),
            daemon=True,
        ).start()
        size = self._group.launch.world_size
        answers = self._gather(method, size, timeout_seconds)
        if answers.errors:
            return Reply(number=0, error=error_of(answers.errors, size), healthy=False)
        if answers.failures:
            raise WorkerLost(cause_of(answers.failures, size))
        if answers.count < size:
            missing = [rank for rank in range(size) if rank not in answers.results]
            raise WorkerLost(_no_answer(missing, timeout_seconds, answers.has_problem))
        try:
            result = combine([answers.results[rank] for rank in range(size)])
        except ValueError as error:
            raise WorkerLost(make_failure(FailureKind.CRASH, str(error))) from None
        return Reply(number=0, result=msgspec.Raw(encode(result)), healthy=answers.is_healthy)

    def stop(self) -> None:
        """Ends the workers of all ranks, and whatever they started."""
        self._group.send(Stop())
        self._process.stop()
        self._store = None

    def _put_own(self, answer: Answer) -> None:
        self._group.answers.put((0, answer))

    def _gather(self, method: str, size: int, timeout_seconds: float | None) -> _Answers:
        answers = _Answers(method=method, results={}, failures=[], errors=[])
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        is_graced = False
        while answers.count < size and (left_seconds := deadline - time.monotonic()) > 0:
            interrupts.raise_if_unseen()
            self._group.refuse_gone()
            try:
                rank, answer = self._group.answers.get(timeout=min(_POLL_SECONDS, left_seconds))
            except queue.Empty:
                continue
            if answer is None or answer.generation != self._generation:
                continue  # of a worker that was ended before it had answered
            answers.add(rank, answer)
            if not is_graced and (answers.failures or answers.errors or answers.has_problem):
                is_graced = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers


def _no_answer(ranks: list[int], timeout_seconds: float | None, has_problem: bool) -> Failure:
    named = f"rank {', '.join(map(str, ranks))}"
    if has_problem or timeout_seconds is None:
        return make_failure(FailureKind.CRASH, f"{named} did not answer as the others did")
    message = f"no answer within {timeout_seconds:.0f} s from {named}"
    return make_failure(FailureKind.TIMEOUT, message)


# --- which ranks this process leads ---------------------------------------------------------------

_leading: Group | None = None


def current_group() -> Group | None:
    """Returns the ranks that this process leads; None when it is alone."""
    return _leading


@contextlib.contextmanager
def leading(launch: Launch) -> Iterator[Group]:
    """Makes this process lead all ranks, for as long as this lasts; `Group.end` lets them go."""
    global _leading
    _leading = Group(launch)
    try:
        yield _leading
    finally:
        _leading = None


# --- the other ranks ------------------------------------------------------------------------------


def follow(launch: Launch) -> int:
    """Asks this rank's workers what rank 0 says. Returns rank 0's exit code when that ends.

    Ctrl-C, and a first SIGTERM, are left to rank 0: it has got them as well, and may want to verify
    the best policy so far, which takes all ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = connect(launch)
    with _one_signal_ignored(signal.SIGTERM):
        return serve(launch, channel)


def connect(launch: Launch) -> Channel:
    """Returns the channel to rank 0, which says where it listens."""
    store = open_store(launch)
    store.wait([_ADDRESS_KEY], datetime.timedelta(seconds=_CONNECT_SECONDS))
    port, token = store.get(_ADDRESS_KEY).decode().split()
    host = "127.0.0.1" if launch.is_on_one_machine else launch.master_address
    channel = Channel(socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS))
    channel.wait_at_most(None)
    channel.send(Hello(rank=launch.rank, token=token))
    return channel


def serve(launch: Launch, channel: Channel) -> int:
    """Does what rank 0 says until it ends. Returns its exit code."""
    return _Follower(launch, channel).serve()


class _Follower:
    """One rank's part: it has a worker as long as rank 0 wants it to."""

    def __init__(self, launch: Launch, channel: Channel) -> None:
        self._launch = launch
        self._channel = channel
        self._process: WorkerProcess | None = None
        self._generation = 0
        self._log_path: Path | None = None
        self._leader_log_path: Path | None = None

    def serve(self) -> int:
        """Does what rank 0 says until it ends. Returns its exit code."""
        try:
            while (message := self._channel.read(Start | Ask | Stop | End)) is not None:
                match message:
                    case Start():
                        self._start(message)
                    case Ask():
                        self._ask(message)
                    case Stop():
                        self._stop()
                    case End(exit_code=exit_code):
                        self._drop_log_of_nothing(exit_code)
                        return exit_code
        finally:
            self._stop()
            self._channel.close()
        self._write_error("rank 0 is gone: its process was ended, or its machine does not answer")
        return _LOST_RANK_EXIT_CODE

    def _start(self, start: Start) -> None:
        self._stop()
        self._generation = start.generation
        path = self._leader_log_path = Path(start.log_path)
        self._log_path = path.with_name(f"{path.stem}.rank{self._launch.rank}{path.suffix}")
        # Without a worker whatever is asked next fails, and rank 0 is told why.
        with contextlib.suppress(OSError):
            self._process = WorkerProcess(self._log_path, _worker_environment(start))

    def _ask(self, ask: Ask) -> None:
        if self._process is None:
            message = f"its worker could not be started; it would write to {self._log_path}"
            lost = make_failure(FailureKind.CRASH, message)
            self._channel.send(Answer(generation=self._generation, lost=lost))
            return
        # Not here, where the next message may be that the worker has to end.
        threading.Thread(
            target=_answer,
            args=(self._process, self._generation, ask, self._channel.send),
            daemon=True,
        ).start()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _drop_log_of_nothing(self, exit_code: int) -> None:
        """Removes this rank's log where rank 0 has removed its own."""
        if self._log_path is None or self._leader_log_path is None:
            return
        if exit_code == 0 and self._launch.is_on_one_machine and not self._leader_log_path.exists():
            self._log_path.unlink(missing_ok=True)

    def _write_error(self, text: str) -> None:
        line = f"sac-search: rank {self._launch.rank}: {text}\n"
        if self._log_path is None:
            sys.stderr.write(line)
            return
        with contextlib.suppress(OSError), self._log_path.open("a") as log:
            log.write(line)


def _answer(
    process: WorkerProcess, generation: int, ask: Ask, send: Callable[[Answer], None]
) -> None:
    """Asks a worker and sends its answer, whatever happens. Rank 0 watches the time."""
    try:
        answer = Answer(
            generation=generation, reply=process.exchange(ask.method, ask.argument, None)
        )
    except WorkerLost as lost:
        answer = Answer(generation=generation, lost=lost.failure)
    except BaseException as error:
        lost_by = make_failure(FailureKind.CRASH, f"{type(error).__name__}: {error}")
        answer = Answer(generation=generation, lost=lost_by)
    send(answer)


def _worker_environment(start: Start) -> dict[str, str]:
    """Returns what a worker finds of the job: its own rank, and a store that nobody has used."""
    return {
        "MASTER_PORT": str(start.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


@contextlib.contextmanager
def _one_signal_ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.getsignal(number)

    def ignore(_: int, frame: FrameType | None) -> None:
        signal.signal(number, end)

    def end(_: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(number, ignore)
    try:
        yield
    finally:
        signal.signal(number, before)
