"""A search over two ranks: real processes, as `torchrun` starts them, with gloo on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from sac_search import cli, distributed
from sac_search.artifacts import load_result
from sac_search.distributed import run_on_all_ranks
from sac_search.errors import EnvironmentMismatch, UsageError
from sac_search.ranks import Launch
from sac_search.records import FailureKind
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult
from sac_search.study.store import check_same, open_study
from sac_search.worker.group import connect, leading, serve

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif("SAC_SEARCH_SLOW" not in os.environ, reason="SAC_SEARCH_SLOW=1 runs it"),
]

RANKS = 2
# What a script needs to train: torch alone.
MODEL = '''
"""A model over ranks, and a step that adds up three batches' gradients before it sends any."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
PARTS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))  # DDP sends it in every forward
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def bare():
    torch.manual_seed(0)
    return Net()


def wrapped(model, how):
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def batches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(PARTS, 512, WIDTH, generator=generator)


def run_step(model, optimizer, batches, loss_fn):
    for index, batch in enumerate(batches):
        is_last = index == PARTS - 1
        if isinstance(model, DistributedDataParallel):
            sending = contextlib.nullcontext() if is_last else model.no_sync()
        else:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            sending = contextlib.nullcontext()
        with sending:
            loss = loss_fn(model, batch)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def loss_fn(model, batch):
    return model(batch).square().mean() / PARTS
'''
TRAIN = '''
"""Rank 1 does what the file `faults` says, line by line, in steps that leave a layer alone."""
import ctypes, os, pathlib, sys, time, traceback

import torch
import torch.distributed as dist
import spread
from sac_search import Workload

HERE = pathlib.Path(__file__).parent


def is_of_a_trial(model):
    checkpointed = [hasattr(type(block), "_sac_layer_class") for block in model.blocks]
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe())]
    return "_read_peak" in frames and len(set(checkpointed)) == 2


def act(model):
    faults = HERE / "faults"
    if os.environ["RANK"] != "1" or not faults.exists() or not is_of_a_trial(model):
        return
    fault, _, rest = faults.read_text().partition("\\n")
    faults.write_text(rest)
    match fault:
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("of the user")
        case "hang":
            time.sleep(600)
        case "fork and hang in C":
            if os.fork() == 0:
                time.sleep(600)
            (HERE / "hanging").touch()
            ctypes.PyDLL(None).sleep(600)


def loss_fn(model, batch):
    act(getattr(model, "module", model))
    return spread.loss_fn(model, batch)


def step(workload):
    return spread.run_step(workload.model, workload.optimizer, workload.next_batch(), loss_fn)


def make(how):
    dist.init_process_group("gloo")
    model = spread.wrapped(spread.bare(), how)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return Workload(model, loss_fn, spread.batches(), optimizer, step=step)


def ddp():
    return make("ddp")


def fsdp():
    return make("fsdp")


def tp():
    return make("tp")
'''
FRESH = '''
"""Trains with the exported policies and without them: five steps, the same losses."""
import importlib, json, pathlib, sys

import torch
import torch.distributed as dist
import spread

HERE = pathlib.Path(__file__).parent


def losses(how, apply):
    model = apply(spread.bare())
    model = spread.wrapped(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    data = spread.batches()
    return [
        spread.run_step(model, optimizer, data, spread.loss_fn).item() for _ in range(5)
    ]


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = {
    how: [losses(how, lambda m: m), losses(how, importlib.import_module(f"policy_{how}").apply)]
    for how in sys.argv[1:]
}
assert "sac_search" not in sys.modules
(HERE / f"losses{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()
'''


@dataclass
class Place:
    """A folder with the workload, in which jobs are run. Every process of them has its mark."""

    folder: Path
    mark: str = field(default_factory=lambda: f"sac-search-test-{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        for name, text in (("spread", MODEL), ("train", TRAIN), ("fresh", FRESH)):
            (self.folder / f"{name}.py").write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(RANKS), *arguments),
            ],
            cwd=self.folder,
            env={**os.environ, "SAC_SEARCH_TEST": self.mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def search(self, how: str, *arguments: str) -> subprocess.Popen[str]:
        return self.start(
            *("-m", "sac_search", f"train.py:{how}", "--device", "cpu", "--study", how),
            *("--steps", "2", *arguments),
        )

    def processes(self, **variables: str) -> list[int]:
        """Returns all living processes of the place's jobs, with these environment variables."""
        wanted = [f"SAC_SEARCH_TEST={self.mark}", *(f"{n}={v}" for n, v in variables.items())]
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                known = (folder / "environ").read_text(errors="replace").split("\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and all(variable in known for variable in wanted):
                    found.append(int(folder.name))
        return found

    def programs(self, rank: int) -> list[int]:
        """Returns the process of a rank that torchrun started: not its worker."""
        workers = self.processes(RANK=str(rank), SAC_SEARCH_IN_WORKER="1")
        return [pid for pid in self.processes(RANK=str(rank)) if pid not in workers]


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def finished(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    return output


def stop(place: Place, job: subprocess.Popen[str]) -> str:
    """Ends what a failed test may have left."""
    for pid in place.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return job.communicate()[0]


@dataclass(frozen=True)
class Searched:
    """A search that came to its end."""

    place: Place
    output: str
    result: SearchResult

    @property
    def failed(self) -> list[Candidate]:
        return [c for c in self.result.candidates if c.failure is not None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def ddp(place: Place) -> Searched:
    """A search in which rank 1 dies, hangs and raises, once each."""
    (place.folder / "faults").write_text("exit\nhang\nraise\n")
    job = place.search("ddp", "--budget-gb", "0.0022", "--trials", "8", "--trial-timeout", "6")
    try:
        output = finished(job)
    finally:
        stop(place, job)
    return Searched(place, output, load_result(place.folder / "studies" / "ddp"))


@pytest.fixture(scope="module")
def fsdp(place: Place) -> Searched:
    """A search whose rank 0 is killed; the same command continues it, and Ctrl-C ends it."""
    (place.folder / "faults").write_text("fork and hang in C\n")
    arguments = ("--budget-gb", "0.0022", "--trials", "30")
    job = place.search("fsdp", *arguments)
    try:
        wait_for((place.folder / "hanging").exists)
        (leader,) = place.programs(rank=0)
        assert len(place.processes()) == 1 + 2 * RANKS + 1  # with what rank 1's worker started
        os.kill(leader, signal.SIGKILL)
        wait_for(lambda: not place.processes(), 30)
    finally:
        stop(place, job)
    folder = place.folder / "studies" / "fsdp"
    before = len(open_study(folder).candidates())
    job = place.search("fsdp", *arguments)
    try:
        wait_for(lambda: len(open_study(folder).candidates()) > before)
        job.send_signal(signal.SIGINT)
        output = job.communicate(timeout=60)[0]
        wait_for(lambda: not place.processes(), 10)
    finally:
        stop(place, job)
    assert (folder / "policy.py").exists(), output
    return Searched(place, output, load_result(folder))


# --- DDP ------------------------------------------------------------------------------------------


def test_a_step_over_ranks_is_searched(ddp: Searched) -> None:
    environment, best = ddp.result.environment, ddp.result.best
    assert (environment.world_size, environment.parallelism) == (2, "DDP")
    assert best is not None and best.measurement is not None
    assert best.measurement.peak_bytes <= ddp.result.budget_bytes
    assert len(best.measurement.rank_peak_bytes) == RANKS
    assert max(best.measurement.rank_peak_bytes) == best.measurement.peak_bytes
    assert set(best.policy.layer_names) <= {f"blocks.{index}" for index in range(4)}
    verification = ddp.result.verification
    assert verification is not None
    assert verification.bitwise
    assert "  ranks: 2\n  parallelism: DDP" in (ddp.result.folder / "policy.py").read_text()


def test_what_rank_1_does_costs_one_trial_each(ddp: Searched) -> None:
    found = [(c.failure.kind, c.failure.message) for c in ddp.failed if c.failure is not None]
    expected = [
        (FailureKind.CRASH, r"rank 1: exit code 3; .*worker.rank1.log ends with"),
        (FailureKind.TIMEOUT, r"no answer within 6 s from rank 0, 1"),
        (FailureKind.USER_ERROR, r"rank 1: ValueError: of the user"),
    ]
    assert len(found) == len(expected), found
    for kind, pattern in expected:
        assert any(k is kind and re.match(pattern, message) for k, message in found), found
    assert len(ddp.result.candidates) >= 3 + len(expected)


def test_its_forecasts_are_right(ddp: Searched) -> None:
    # Each rank's step runs under fake tensors, where no rank waits for another.
    for candidate in ddp.result.candidates:
        if candidate.measurement is not None and candidate.is_baseline:
            forecast = candidate.outcome.forecast_peak_bytes
            assert forecast == pytest.approx(candidate.measurement.allocated_bytes, rel=0.01)


def test_its_memory_over_a_step_is_that_of_the_forecasts(ddp: Searched) -> None:
    forecasts = {
        c.policy.key: c.outcome.forecast_peak_bytes
        for c in ddp.result.candidates
        if c.measurement is not None
    }
    assert len(ddp.result.timelines) >= 2
    for entry in ddp.result.timelines:
        assert entry.timeline.peak_bytes == forecasts[entry.policy_key]
        assert "blocks.3" in entry.timeline.layers


def test_only_rank_0_prints(ddp: Searched) -> None:
    assert ddp.output.count("Loss and every gradient are bitwise") == 1
    log = (ddp.result.folder / "worker.rank1.log").read_text()
    assert "sac-search:" not in log


def test_another_number_of_ranks_is_another_environment(ddp: Searched) -> None:
    store = open_study(ddp.result.folder)
    alone = dataclasses.replace(ddp.result.environment, world_size=1, parallelism="")
    with pytest.raises(EnvironmentMismatch, match="ranks: 2 -> 1\n  parallelism: DDP -> none"):
        check_same(store, alone, store.budget_bytes)


# --- FSDP2 ----------------------------------------------------------------------------------------


def test_a_sharded_step_is_searched_and_continued(fsdp: Searched) -> None:
    result = fsdp.result
    assert result.environment.parallelism == "FSDP2 of 5 modules, mesh 2 S(0)"
    assert result.best is not None and result.best.measurement is not None
    assert result.best.measurement.peak_bytes <= result.budget_bytes
    assert result.verification is not None
    assert result.verification.bitwise
    assert "counted while its step runs" in fsdp.output


def test_its_forecasts_are_counted(fsdp: Searched) -> None:
    found = [c for c in fsdp.result.candidates if c.measurement is not None]
    for candidate in found:
        assert candidate.measurement is not None
        forecast = candidate.outcome.forecast_peak_bytes
        # What a thread of gloo gives back is seen late: see `phase_peaks`.
        assert forecast == pytest.approx(candidate.measurement.allocated_bytes, rel=0.03)


def test_an_interrupt_ends_all_ranks_and_keeps_the_best(fsdp: Searched) -> None:
    assert "Interrupted: verifying and exporting the best so far" in fsdp.output
    assert fsdp.output.count("bitwise those of no checkpointing") == 1


# --- what is exported -----------------------------------------------------------------------------


def test_exported_policies_train_alike_in_a_fresh_program(ddp: Searched, fsdp: Searched) -> None:
    for how, searched in (("ddp", ddp), ("fsdp", fsdp)):
        text = (searched.result.folder / "policy.py").read_text()
        (ddp.place.folder / f"policy_{how}.py").write_text(text)
    for plain, checkpointed in trained(ddp.place):
        assert plain == checkpointed
        assert plain[0] > plain[-1]


def test_layers_that_are_split_are_searched_and_train_alike(tmp_path: Path) -> None:
    place = Place(tmp_path)
    job = place.search("tp", "--budget-gb", "0.0025", "--trials", "2", "--save-collectives")
    try:
        finished(job)
    finally:
        stop(place, job)
    result = load_result(tmp_path / "studies" / "tp")
    assert result.best is not None and result.best.measurement is not None
    assert result.best.measurement.peak_bytes <= result.budget_bytes
    assert result.verification is not None and result.verification.bitwise
    for candidate in result.candidates:
        assert candidate.measurement is not None and candidate.outcome.forecast_peak_bytes
        allocated_bytes = candidate.measurement.allocated_bytes
        # How long gloo holds what it sends is another time each time.
        assert candidate.outcome.forecast_peak_bytes == pytest.approx(allocated_bytes, rel=0.1)
    text = (result.folder / "policy.py").read_text()
    (tmp_path / "policy_tp.py").write_text(text)
    for plain, checkpointed in trained(place):
        assert plain == checkpointed
        assert plain[0] > plain[-1]


def test_compiled_steps_of_ranks_are_searched_and_train_alike(tmp_path: Path) -> None:
    place = Place(tmp_path)
    compiling = ("--compile", "on", "--compile-backend", "aot_eager")
    for how in ("ddp", "fsdp"):
        job = place.search(how, "--budget-gb", "0.003", "--trials", "0", *compiling)
        try:
            finished(job)
        finally:
            stop(place, job)
        result = load_result(tmp_path / "studies" / how)
        assert result.best is not None and result.best.measurement is not None
        assert result.best.policy.compiled is not None
        assert result.best.measurement.peak_bytes <= result.budget_bytes
        assert result.verification is not None and result.verification.passed
        assert result.verification.reference == "compile"
        text = (result.folder / "policy.py").read_text()
        (tmp_path / f"policy_{how}.py").write_text(text)
    for plain, compiled in trained(place):
        assert compiled == pytest.approx(plain, rel=1e-4)
        assert plain[0] > plain[-1]


def trained(place: Place) -> list[list[list[float]]]:
    """Returns for each rank and model the losses without the exported policy, and with it."""
    policies = sorted(place.folder.glob("policy_*.py"))
    job = place.start("fresh.py", *(path.stem.partition("_")[2] for path in policies))
    try:
        finished(job)
    finally:
        stop(place, job)
    files = [place.folder / f"losses{rank}.json" for rank in range(RANKS)]
    return [pair for file in files for pair in json.loads(file.read_text()).values()]


# --- the command line -----------------------------------------------------------------------------


def launch_of(rank: int, port: int) -> Launch:
    return Launch(
        rank=rank,
        world_size=RANKS,
        local_rank=rank,
        local_world_size=RANKS,
        master_address="127.0.0.1",
        master_port=port,
        has_store=True,
    )


def test_all_ranks_exit_as_rank_0_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [launch_of(rank, store.port) for rank in range(RANKS)]
    codes: list[int] = []
    other = threading.Thread(target=lambda: codes.append(serve(launches[1], connect(launches[1]))))
    other.start()
    monkeypatch.setattr(distributed, "launched", lambda: launches[0])
    codes.append(run_on_all_ranks(lambda: cli.main(["missing.py", "--budget-gb", "1"])))
    other.join(10)
    assert codes == [2, 2]
    assert capsys.readouterr().err.count("there is no file 'missing.py'") == 1


def test_a_forecast_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.refuse_forecast_of_ranks()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        leading(launch_of(0, store.port)),
        pytest.raises(UsageError, match="a forecast runs nothing"),
    ):
        distributed.refuse_forecast_of_ranks()


def test_without_torchrun_the_command_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "launched", lambda: None)
    assert run_on_all_ranks(lambda: 7) == 7


def test_ranks_that_would_search_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.refuse_ranks_apart()
    monkeypatch.setattr(distributed, "launched", lambda: launch_of(0, 1))
    with pytest.raises(UsageError, match="2 of these programs, which would each search by itself"):
        distributed.refuse_ranks_apart()
