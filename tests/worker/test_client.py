"""The worker with real processes: user code may print, die, hang or leak; the search goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import make_timeline

from sac_search import errors
from sac_search.failures import make_failure
from sac_search.forecaster import ProfileRequest
from sac_search.policy import COMPILE_ALONE, NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import FailureKind, Measurement, Outcome, Phase
from sac_search.space import Granularity
from sac_search.worker.client import WorkerClient
from sac_search.worker.process import WorkerLost, WorkerProcess
from sac_search.worker.session import ForecastPeak, SessionSettings, Verdict

FULL = checkpoint_layers(["0", "1"])
SAVE_MATMUL = checkpoint_layers(["0", "1"], Tier(ops=("aten.addmm.default",)))
TRAIN = '''
"""Does what the file `trigger` says, once, and is noisy whatever it says."""
import ctypes, os, pathlib, subprocess, sys, time

import torch
from torch import nn
from sac_search import Workload

HERE = pathlib.Path(__file__).parent
LEAKED = []

print("import: printed")
print("import: printed to stderr", file=sys.stderr)
os.write(1, b"import: written\\n")
sys.__stdout__.write("import: written past sys.stdout\\n"); sys.__stdout__.flush()
subprocess.run(["echo", "import: echoed"], check=True)
try:
    input()
except EOFError:
    print("import: no input")


def act(place):
    """Returns what the loss is multiplied with."""
    trigger = HERE / "trigger"
    action = trigger.read_text() if trigger.exists() else ""
    if not action.startswith(place):
        return 1.0
    trigger.unlink()
    match action.split()[1]:
        case "exit":
            print("last words")
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            time.sleep(60)
        case "fork":
            forked = os.fork()
            if forked == 0:
                time.sleep(60)
            (HERE / "pid").write_text(str(forked))
            os._exit(5)
        case "memory":
            raise MemoryError
        case "raise":
            raise ValueError("of the user")
        case "leak":
            LEAKED.append(torch.ones(16 * 2**20))
            raise ValueError("after a leak")
        case "nan":
            return float("nan")
        case "babble":
            for handle in range(3, 20):
                try:
                    os.write(handle, b"nonsense\\n")
                except OSError:
                    pass
    return 1.0


def loss_fn(model, x):
    print("step")
    pid, path = str(os.getpid()), HERE / "pid"
    if not path.exists() or path.read_text() != pid:  # it may be killed at any moment
        path.write_text(pid)
    return model(x).square().mean() * act("step")


def workload():
    act("load")
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model = nn.Sequential(block(), block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, loss_fn, torch.ones(2, 4), optimizer)
'''
MODULE = """
LAYERS = {"0": 0}
META = {}

def apply(model):
    model[0].register_forward_hook(lambda module, args, output: output * SCALE)

def remove(model):
    model[0]._forward_hooks.clear()

SCALE = 1.0
"""


class Place:
    """A folder with a workload in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        # What torch would import in their place if the folder came first.
        for name in ("random.py", "profile.py", "queue.py"):
            (folder / name).write_text("raise RuntimeError('not this one')")

    @property
    def spec(self) -> str:
        return str(self.folder / "train.py")

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    @property
    def log(self) -> Path:
        return self.folder / "logs" / "worker.log"

    def trigger(self, action: str) -> None:
        (self.folder / "trigger").write_text(action)

    def client(self, **fields: Any) -> WorkerClient:
        settings = SessionSettings(spec=self.spec, steps=2)
        return WorkerClient(settings, self.log, **fields)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def shared(place: Place) -> Iterator[WorkerClient]:
    """One client for all tests; each test leaves it with or without a worker."""
    before = Path.cwd()
    os.chdir(place.folder)
    try:
        with place.client() as client:
            yield client
    finally:
        os.chdir(before)


@pytest.fixture
def client(place: Place, shared: WorkerClient) -> WorkerClient:
    with contextlib.suppress(FileNotFoundError):
        (place.folder / "trigger").unlink()
    shared._trial_timeout_seconds = None
    return shared


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def measured(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None, outcome.failure
    return outcome.measurement


def failed(outcome: Outcome) -> tuple[FailureKind, str]:
    assert outcome.failure is not None
    return outcome.failure.kind, outcome.failure.message


# --- a worker that behaves ------------------------------------------------------------------------


def test_a_noisy_workload_is_described_measured_compared_and_verified(
    place: Place, client: WorkerClient
) -> None:
    description = client.describe()
    assert [layer.name for layer in description.layers] == ["0", "1"]
    assert description.reference == "full"
    assert description.environment.device == "cpu"
    assert description.environment.threads == 1
    full, none = measured(client.measure(FULL)), measured(client.measure(NO_CHECKPOINTING))
    assert full.steps == none.steps == 2
    assert full.peak_phase in set(Phase)
    outcomes = client.compare([FULL, SAVE_MATMUL], steps=3)
    assert [measured(outcome).steps for outcome in outcomes] == [3, 3]
    verdict = client.verify(SAVE_MATMUL)
    assert verdict.verification is not None
    assert verdict.verification.bitwise
    assert is_running(place.pid)
    log = place.log.read_text()
    words = ("printed", "printed to stderr", "written", "written past sys.stdout", "echoed")
    for word in (*words, "no input"):
        assert re.search(f"^import: {word}$", log, re.MULTILINE)
    assert "step\n" in log


def test_exported_modules_are_tried_by_their_own_code(place: Place, client: WorkerClient) -> None:
    for scale, right in ((1.0, True), (1.5, False)):
        path = place.folder / "policy.py"
        path.write_text(MODULE.replace("SCALE = 1.0", f"SCALE = {scale}"))
        verdict, outcome = client.try_module(path)
        assert verdict.verification is not None
        assert verdict.verification.passed is right
        measured(outcome)


def test_a_file_that_is_no_policy_is_wrong_usage(place: Place, client: WorkerClient) -> None:
    path = place.folder / "no_policy.py"
    path.write_text("x = 1")
    with pytest.raises(errors.UsageError, match="is not a policy that sac-search exported"):
        client.try_module(path)


# --- a worker that does not -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("exit", FailureKind.CRASH, "exit code 3; .*worker.log ends with: .*last words"),
        ("segfault", FailureKind.CRASH, "killed by SIGSEGV; .*worker.log ends with: .*in act"),
        ("fork", FailureKind.CRASH, "exit code 5; "),
        ("babble", FailureKind.CRASH, "its answer made no sense"),
    ],
)
def test_a_worker_that_dies_costs_one_trial(
    place: Place, client: WorkerClient, action: str, kind: FailureKind, message: str
) -> None:
    measured(client.measure(FULL))
    first = place.pid
    place.trigger(f"step {action}")
    started = time.monotonic()
    found_kind, found_message = failed(client.measure(FULL))
    assert time.monotonic() - started < 20
    assert found_kind is kind
    assert re.search(message, found_message, re.DOTALL)
    last = place.pid  # the worker, or what it started
    assert wait_until(lambda: not is_running(first) and not is_running(last), 5)
    measured(client.measure(FULL))
    assert place.pid not in (first, last)


def test_a_step_that_hangs_costs_one_trial(place: Place, client: WorkerClient) -> None:
    measured(client.measure(FULL))
    first = place.pid
    place.trigger("step hang")
    client._trial_timeout_seconds = 1.0
    started = time.monotonic()
    assert failed(client.measure(FULL)) == (FailureKind.TIMEOUT, "no answer within 1 s")
    assert 1.0 <= time.monotonic() - started < 10
    assert not is_running(first)
    client._trial_timeout_seconds = None
    measured(client.measure(FULL))


@pytest.mark.parametrize(
    ("action", "kind"),
    [("memory", FailureKind.HOST_OUT_OF_MEMORY), ("raise", FailureKind.USER_ERROR)],
)
def test_a_step_that_raises_keeps_its_worker(
    place: Place, client: WorkerClient, action: str, kind: FailureKind
) -> None:
    measured(client.measure(FULL))
    first = place.pid
    place.trigger(f"step {action}")
    assert failed(client.measure(FULL))[0] is kind
    measured(client.measure(FULL))
    assert place.pid == first


def test_a_worker_that_keeps_memory_is_replaced(place: Place, client: WorkerClient) -> None:
    measured(client.measure(FULL))
    first = place.pid
    place.trigger("step leak")
    assert failed(client.measure(FULL))[0] is FailureKind.USER_ERROR
    assert not is_running(first)
    measured(client.measure(FULL))
    assert place.pid != first


def test_a_loss_that_diverged_is_tried_again_from_the_first_parameters(
    place: Place, client: WorkerClient
) -> None:
    measured(client.measure(FULL))
    first = place.pid
    place.trigger("step nan")
    measured(client.measure(FULL))
    assert place.pid != first


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("exit", "the process that loads the workload died .exit code 3; .*last words"),
        ("segfault", "the process that loads the workload died .killed by SIGSEGV"),
    ],
)
def test_a_factory_that_dies_is_an_error_of_the_workload(
    tmp_path: Path, action: str, message: str
) -> None:
    place = Place(tmp_path)
    place.trigger(f"load {action}")
    with place.client() as client, pytest.raises(errors.WorkloadError, match=message):
        client.describe()


# --- the end --------------------------------------------------------------------------------------


def test_closing_ends_the_worker_and_can_be_done_twice(place: Place, client: WorkerClient) -> None:
    measured(client.measure(FULL))
    pid = place.pid
    assert is_running(pid)
    for _ in range(2):
        client.close()
        assert not is_running(pid)
    measured(client.measure(FULL))  # and it can be used again
    WorkerClient(SessionSettings(spec="x"), place.log).close()


def test_an_interrupt_ends_the_worker(
    place: Place, client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(client.measure(FULL))
    pid = place.pid
    place.trigger("step hang")

    def interrupt(process: Any, timeout_seconds: float | None) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcess, "_next_line", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        client.measure(FULL)
    assert not is_running(pid)
    assert time.monotonic() - started < 10  # also when the step never ends


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.trigger("step hang")
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from sac_search.worker.client import WorkerClient
        from sac_search.worker.session import SessionSettings
        WorkerClient(SessionSettings(spec={place.spec!r}), Path({str(place.log)!r})).describe()
        """
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", script])
    try:
        assert wait_until((tmp_path / "pid").exists, 60)
        assert wait_until(lambda: not (tmp_path / "trigger").exists(), 60)
        assert is_running(place.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_until(lambda: not is_running(place.pid), 5)
    finally:
        parent.kill()
        parent.wait()


# --- time limits, without processes ---------------------------------------------------------------


class Scripted(WorkerClient):
    """Gives the answers that it is told to, and keeps what it was asked."""

    def __init__(self, *answers: Any, clock: Iterator[float] | None = None, **fields: Any) -> None:
        super().__init__(SessionSettings(spec="x"), Path("x"), **fields)
        self.answers = list(answers)
        self.asked: list[tuple[str, float | None]] = []

    def _ask(self, method: str, argument: Any, timeout_seconds: float | None) -> Any:
        self.asked.append((method, timeout_seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


MEASURED = Outcome(
    measurement=Measurement(
        peak_bytes=1,
        allocated_bytes=1,
        peak_phase=Phase.LOSS,
        phase_peak_bytes={Phase.LOSS: 1},
        step_seconds=1.0,
        step_noise_fraction=0.0,
        reference_seconds=1.0,
        relative_seconds=1.0,
        steps=1,
        loss=1.0,
    )
)


def failure(kind: FailureKind) -> Outcome:
    return Outcome(failure=make_failure(kind, "as told"))


OUT_OF_MEMORY = failure(FailureKind.OUT_OF_MEMORY)
DIVERGED = failure(FailureKind.NON_FINITE_LOSS)


def clock_of(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    readings = iter(seconds)
    monkeypatch.setattr(time, "monotonic", lambda: next(readings, 1e6))


def test_the_first_policy_that_runs_says_how_long_others_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first runs out of memory at once; the second takes from second 10 to second 40.
    clock_of(monkeypatch, 0, 10, 40)
    client = Scripted(OUT_OF_MEMORY, MEASURED, MEASURED, [MEASURED] * 3, Verdict())
    for _ in range(3):
        client.measure(FULL)
    client.compare([FULL] * 3, steps=10)
    client.verify(FULL)
    assert client.asked == [
        ("run_steps", None),
        ("run_steps", None),
        ("run_steps", 600.0),
        ("compare", 6 * 600.0),
        ("verify", 2 * 600.0),
    ]


def test_short_steps_have_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_of(monkeypatch, 0, 0.1)
    client = Scripted(MEASURED, MEASURED)
    client.measure(FULL)
    client.measure(FULL)
    assert client.asked[1] == ("run_steps", 60.0)


def test_a_dry_run_is_no_part_of_a_trial() -> None:
    client = Scripted(MEASURED, ForecastPeak(peak_bytes=7), trial_timeout_seconds=7.0)
    client._load_seconds = 20.0
    client._process = object()  # it lives on
    assert client.measure(FULL).forecast_peak_bytes == 7
    assert client.asked == [("run_steps", 7.0), ("forecast", 400.0)]


def test_a_worker_that_is_lost_while_it_draws_a_timeline_draws_none() -> None:
    client = Scripted(lost(), make_timeline(forward=1, backward=2))
    assert client.timeline(FULL) is None
    assert client.timeline(FULL) == make_timeline(forward=1, backward=2)


def test_a_profile_gets_a_second_chance() -> None:
    client = Scripted(lost(), None)
    request = ProfileRequest(layers=(), granularity=Granularity.SITE)
    assert client.profile(request) is None
    assert [method for method, _ in client.asked] == ["profile", "profile"]
    client = Scripted(lost(), lost())
    assert client.profile(request) is None


def test_a_limit_of_the_users_counts_from_the_first() -> None:
    client = Scripted(MEASURED, [MEASURED], Verdict(), trial_timeout_seconds=7.0)
    client.measure(FULL)
    client.compare([FULL], steps=5)
    client.verify(FULL)
    assert [timeout for _, timeout in client.asked] == [7.0, 7.0, 14.0]


# --- second chances, without processes ------------------------------------------------------------


def lost() -> Exception:
    return WorkerLost(make_failure(FailureKind.CRASH, "as told"))


def test_policies_whose_comparison_was_lost_are_measured_one_by_one() -> None:
    client = Scripted(lost(), MEASURED, OUT_OF_MEMORY)
    assert client.compare([FULL, NO_CHECKPOINTING], steps=5) == [MEASURED, OUT_OF_MEMORY]
    assert [method for method, _ in client.asked] == ["compare", "run_steps", "run_steps"]


def test_only_policies_that_diverged_in_a_comparison_are_measured_again() -> None:
    client = Scripted([MEASURED, DIVERGED, OUT_OF_MEMORY], MEASURED)
    policies: list[Policy] = [FULL, SAVE_MATMUL, NO_CHECKPOINTING]
    assert client.compare(policies, steps=5) == [MEASURED, MEASURED, OUT_OF_MEMORY]
    assert [method for method, _ in client.asked] == ["compare", "run_steps"]


def test_a_policy_that_always_diverges_gets_two_chances() -> None:
    client = Scripted(DIVERGED, DIVERGED)
    assert client.measure(FULL) == DIVERGED
    verdict = Verdict(failure=make_failure(FailureKind.NON_FINITE_LOSS, "as told"))
    client = Scripted(verdict, verdict)
    assert client.verify(FULL) == verdict
    assert len(client.asked) == 2


def test_a_lost_worker_is_an_outcome_of_every_method(tmp_path: Path) -> None:
    for failing in (
        lambda client: client.measure(FULL).failure,
        lambda client: client.verify(FULL).failure,
        lambda client: client.try_module(tmp_path)[0].failure,
        lambda client: client.try_module(tmp_path)[1].failure,
    ):
        found = failing(Scripted(lost()))
        assert found is not None
        assert found.kind is FailureKind.CRASH


def test_compiling_has_a_time_of_its_own() -> None:
    client = Scripted(MEASURED, MEASURED, [MEASURED] * 3, Verdict())
    client._load_seconds = 1.0
    client.measure(FULL)
    client.measure(COMPILE_ALONE)
    client.compare([FULL, COMPILE_ALONE, COMPILE_ALONE], steps=5)
    client.verify(COMPILE_ALONE)
    eager, compiled, compared, verified = [timeout for _, timeout in client.asked]
    assert eager == 300.0
    assert compiled == 60.0 + 1800
    assert compared == 3 * 60.0 + 2 * 1800
    assert verified == 2 * 60.0 + 2 * 1800  # the reference is compiled as well
