"""The command line: exit codes, what goes where, and what is left on disk."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sac_search import api, cli, errors
from sac_search._version import __version__
from sac_search.apply import load_policy_module
from sac_search.device import Clock
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.records import Outcome
from sac_search.report import page
from sac_search.report.page import _packed_plotly
from sac_search.space import Granularity, LayerChoiceMode
from sac_search.study.sampler import SamplerName
from sac_search.units import GIB
from sac_search.workload import build_workload, load_factory

_PATIENCE_SECONDS = 240
LAYERS = [f"blocks.{index}" for index in range(3)]
TRAIN = """
import os, pathlib, sys, time

import torch
from torch import nn
from torch.nn import functional
from sac_search import Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, x):
    time.sleep(SLEEP)
    return model(x).square().mean()


def workload():
    print("printed by the workload")
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, loss_fn, torch.randn(256, 16), optimizer, batch_size=256)


def hanging():
    pathlib.Path("hanging.pid").write_text(str(os.getpid()))
    time.sleep(60)


def failing():
    sizes = {}
    return sizes["hidden"]


SLEEP = 0.0
"""


@dataclass(frozen=True)
class Ended:
    """A process that ended."""

    code: int
    output: str
    errors: str


class Project:
    """A folder with workloads, and the processes that run in it, two at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        (folder / "slow.py").write_text(TRAIN.replace("SLEEP = 0.0", "SLEEP = 0.05"))
        (folder / "trace.py").write_text(TRAIN)
        self.budget = self._budget_between()
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._running: dict[str, Future[Ended]] = {}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, name: str, *arguments: str, then: Callable[..., None] | None = None) -> None:
        """Starts `sac-search` as soon as there is room; `then` is called once it runs."""
        self._running[name] = self._pool.submit(self._run, name, arguments, then)

    def ended(self, name: str) -> Ended:
        return self._running[name].result(timeout=_PATIENCE_SECONDS)

    def run(self, *arguments: str) -> Ended:
        return self._run("now", arguments, None)

    def result(self, study: str) -> dict[str, Any]:
        return json.loads((self.folder / "studies" / study / "result.json").read_text())

    def _run(self, name: str, arguments: Any, then: Callable[..., None] | None) -> Ended:
        paths = [self.folder / f"{name}.{kind}" for kind in ("out", "err")]
        with paths[0].open("w") as output, paths[1].open("w") as error_output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sac_search", *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
            )
            try:
                if then is not None:
                    then(process, paths[0])
                code = process.wait(timeout=_PATIENCE_SECONDS)
            finally:
                process.kill()
                process.wait()
        return Ended(code, *(path.read_text() for path in paths))

    def _budget_between(self) -> str:
        """Returns a budget between no and full checkpointing, in GiB."""
        torch.set_num_threads(1)
        path = list(sys.path)
        workload = build_workload(load_factory(str(self.folder / "train.py")), torch.device("cpu"))
        sys.path[:] = path
        gc.freeze()  # tensors of other tests do not count
        meter = StepMeter(workload=workload, device=torch.device("cpu"), clock=Clock.CPU)
        full = checkpoint_layers(LAYERS)
        peaks = [
            outcome.measurement.peak_bytes
            for outcome in meter.compare([NO_CHECKPOINTING, full], full, steps=1)
            if outcome.measurement is not None
        ]
        gc.unfreeze()
        return repr((0.4 * peaks[0] + 0.6 * peaks[1]) / GIB)


def send(number: int, is_time: Callable[[Path], bool]) -> Callable[..., None]:
    def then(process: subprocess.Popen[bytes], output: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_time(output) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)

    return then


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    folder = project.folder
    few = ("--trials", "2", "--steps", "1", "--budget-gb", project.budget)
    project.start("search", "train.py", *few, "--study", "found")
    project.start("floor", "trace.py", "--budget-gb", "0.00001", "--steps", "1")
    project.start("missing", "missing.py", "--budget-gb", "1")
    project.start("failing", "train.py:failing", "--budget-gb", "1")
    project.start(
        "interrupted",
        *("slow.py", "--steps", "1", "--budget-gb", project.budget, "--study", "stopped"),
        then=send(signal.SIGINT, lambda output: " fits" in output.read_text()),
    )
    project.start(
        "terminated",
        *("train.py:hanging", "--budget-gb", "1"),
        then=send(signal.SIGTERM, lambda output: (folder / "hanging.pid").exists()),
    )
    yield project
    project.close()


# --- 0: a policy was found ------------------------------------------------------------------------


def test_a_search_finds_verifies_and_exports(project: Project) -> None:
    ended = project.ended("search")
    assert ended.code == 0, ended.errors
    assert "best (" in ended.output
    assert "bitwise those of no checkpointing" in ended.output
    assert "policy.apply(model)" in ended.output
    assert "printed by the workload" not in ended.output + ended.errors
    folder = project.folder / "studies" / "found"
    assert {path.name for path in folder.iterdir()} >= {
        "study.db",
        "policy.py",
        "result.json",
        "worker.log",
    }
    assert "printed by the workload" in (folder / "worker.log").read_text()
    result = project.result("found")
    assert result["best"]["peak_bytes"] <= result["budget_bytes"]
    assert result["verification"]["passed"] is True


def test_the_exported_policy_applies(project: Project) -> None:
    assert project.ended("search").code == 0
    module: Any = load_policy_module(project.folder / "studies" / "found" / "policy.py")
    assert set(module.LAYERS) <= set(LAYERS)
    assert module.LAYERS
    path = list(sys.path)
    model = build_workload(
        load_factory(str(project.folder / "train.py")), torch.device("cpu")
    ).model
    sys.path[:] = path
    plain = [type(block) for block in model.blocks]
    module.apply(model)
    assert [type(b) is not p for b, p in zip(model.blocks, plain, strict=True)] == [
        name in module.LAYERS for name in LAYERS
    ]
    module.remove(model)
    assert [type(block) for block in model.blocks] == plain


def test_the_same_command_again_continues_without_measuring(project: Project) -> None:
    first = project.ended("search")
    before = project.result("found")
    again = project.run(
        *("train.py", "--trials", "2", "--steps", "1", "--budget-gb", project.budget),
        *("--study", "found", "-q"),
    )
    assert again.code == first.code == 0, again.errors
    after = project.result("found")
    for key in ("baselines", "trials", "best"):
        assert after[key] == before[key]
    # Only the outcome is said.
    assert len(again.output.splitlines()) < 8
    assert before["best"]["name"] not in again.output.splitlines()[0].split()
    assert not again.errors


# --- 2, 3, 4 --------------------------------------------------------------------------------------


def test_a_missing_file_is_wrong_usage(project: Project) -> None:
    ended = project.ended("missing")
    assert ended.code == 2
    assert ended.output == ""
    assert ended.errors.startswith("sac-search: there is no file 'missing.py'")
    assert not (project.folder / "studies" / "missing-1gib").exists()


def test_a_budget_under_the_floor(project: Project) -> None:
    # The workload's file is named like a command and like a module of Python's.
    ended = project.ended("floor")
    assert ended.code == 3, ended.errors
    assert "sac-search: no policy fits" in ended.errors
    assert "The smallest peak is" in ended.errors
    assert "its peak is in the phase:" in ended.errors
    assert "No checkpointing policy can go under" in ended.errors
    assert not (project.folder / "studies" / "trace-1e-05gib" / "policy.py").exists()
    assert project.result("trace-1e-05gib")["best"] is None


def test_a_factory_that_raises_is_shown_with_its_own_traceback(project: Project) -> None:
    ended = project.ended("failing")
    assert ended.code == 4
    assert ended.output == ""
    lines = ended.errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith(", in failing")
    assert "KeyError: 'hidden'" in lines
    assert lines[-1] == "sac-search: train.py:failing raised KeyError: 'hidden'"


# --- 130: interrupted -----------------------------------------------------------------------------


def test_an_interrupt_exports_the_best_so_far(project: Project) -> None:
    ended = project.ended("interrupted")
    assert ended.code == 130, ended.errors
    assert "Interrupted: verifying and exporting the best so far" in ended.output
    result = project.result("stopped")
    assert result["best"] is not None
    assert result["best"]["peak_bytes"] <= result["budget_bytes"]
    assert (project.folder / "studies" / "stopped" / "policy.py").exists()
    assert len(result["baselines"]) + len(result["trials"]) < 7  # it was stopped on its way


def test_a_termination_while_loading_leaves_no_process(project: Project) -> None:
    ended = project.ended("terminated")
    assert ended.code == 130
    assert "sac-search: Interrupted." in ended.errors
    pid = int((project.folder / "hanging.pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


# --- the other commands ---------------------------------------------------------------------------


@pytest.fixture
def inside(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project's folder as the current one of this process, once the search is over."""
    assert project.ended("search").code == 0
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


Capture = pytest.CaptureFixture[str]


def left_logs() -> set[str]:
    folder = Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108
    return {path.name for path in folder.glob("sac-search-*.log")}


def test_a_policy_is_verified_against_a_workload(inside: Project, capsys: Capture) -> None:
    logs = left_logs()
    assert cli.main(["verify", "studies/found/policy.py", "train.py", "--steps", "1"]) == 0
    output = capsys.readouterr().out
    assert "Verification passed" in output
    assert "Peak " in output
    assert left_logs() == logs


def test_a_wrong_policy_fails_verification(inside: Project, capsys: Capture) -> None:
    path = inside.folder / "wrong.py"
    right = inside.folder / "studies" / "found" / "policy.py"
    spoil = """

    _right_apply = apply


    def apply(model):
        _right_apply(model)
        model.register_forward_hook(lambda module, args, output: output * 1.01)
    """
    path.write_text(right.read_text() + textwrap.dedent(spoil))
    arguments = ["verify", "wrong.py", "train.py", "--steps", "1", "--json"]
    assert cli.main(arguments) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["verification"]["passed"] is False


def test_a_trace_shows_layers_and_ops(empty: Path, capsys: Capture) -> None:
    (empty / "train.py").write_text(TRAIN)
    assert cli.main(["trace", "train.py", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in document["layers"]] == LAYERS
    matmuls = [op for op in document["layers"][0]["ops"] if op["op"] == "aten.addmm.default"]
    assert sum(op["calls"] for op in matmuls) == 2


def test_a_budget_over_the_peak_needs_no_checkpointing(empty: Path, capsys: Capture) -> None:
    (empty / "train.py").write_text(TRAIN)
    assert cli.main(["train.py", "--budget-gb", "1", "--steps", "1", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)  # which is all that is said
    assert captured.err == ""
    assert document["study_name"] == "train-1gib"
    assert document["best"]["name"] == "none"
    assert document == json.loads((empty / "studies" / "train-1gib" / "result.json").read_text())
    assert cli.main(["train.py", "--budget-gb", "1", "--steps", "1"]) == 0
    assert "No checkpointing needed" in capsys.readouterr().out


def test_studies_are_listed(inside: Project, capsys: Capture) -> None:
    assert cli.main(["studies"]) == 0
    assert "found" in capsys.readouterr().out
    assert cli.main(["studies", "--json"]) == 0
    names = {entry["study_name"] for entry in json.loads(capsys.readouterr().out)}
    assert "found" in names


@pytest.mark.parametrize("study", ["found", "studies/found"])
def test_a_study_is_exported_again(
    inside: Project, capsys: Capture, tmp_path: Path, study: str
) -> None:
    path = tmp_path / "mine.py"
    assert cli.main(["export", study, "-o", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    module: Any = load_policy_module(path)
    first: Any = load_policy_module(inside.folder / "studies" / "found" / "policy.py")
    assert module.LAYERS == first.LAYERS


def test_the_report_of_a_study_is_written_again(
    inside: Project, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    written = inside.folder / "studies" / "found" / "report.html"
    assert "Memory over one step" in written.read_text()
    written.unlink()
    assert cli.main(["report", "found"]) == 0
    assert capsys.readouterr().out.startswith(f"{written.relative_to(inside.folder)}: open it")
    other = tmp_path / "mine.html"
    assert cli.main(["report", "studies/found", "-o", str(other)]) == 0
    assert other.read_text().count("sac-search report studies/found") == 1
    monkeypatch.setattr(page, "_packed_plotly", _packed_plotly.__wrapped__)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert cli.main(["report", "found", "-o", str(tmp_path / "none.html")]) == 2
    assert "pip install 'sac-search[report]'" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_an_unknown_study_names_the_known_ones(inside: Project, capsys: Capture) -> None:
    assert cli.main(["export", "unknown"]) == 2
    error_output = capsys.readouterr().err
    assert "there is no study 'unknown' in studies; there are: " in error_output
    assert "found" in error_output


def test_without_studies(empty: Path, capsys: Capture) -> None:
    assert cli.main(["studies"]) == 0
    assert capsys.readouterr().out == "There is no study in studies.\n"
    assert cli.main(["studies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert cli.main(["export", "any"]) == 2


# --- wrong usage, in this process -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--budget-gb"),
        (["train.py", "--budget-gb", "-1"], "the budget is -1.0 GiB"),
        (["train.py", "--budget-gb", "0"], "the budget is 0.0 GiB"),
        (["train.py", "--budget-gb", "nan"], "the budget is nan GiB"),
        (["train.py", "--budget-gb", "inf"], "the budget is inf GiB"),
        (["train.py", "--budget-gb", "much"], "much"),
        (["train.py", "--budget-gb", "1", "--trials", "-1"], "trials is -1"),
        (["train.py", "--budget-gb", "1", "--steps", "0"], "steps is 0"),
        (["train.py", "--budget-gb", "1", "--clock", "sun"], "sun"),
        (["train.py", "--budget-gb", "1", "--no-such-option"], "--no-such-option"),
        (["train.py", "more.py", "--budget-gb", "1"], "more.py"),
        (["missing.py", "--budget-gb", "1"], "there is no file 'missing.py'"),
        (["trace", "missing.py"], "there is no file 'missing.py'"),
        (["verify", "missing.py"], "there is no policy file 'missing.py'"),
        (["verify", "train.py", "missing.py"], "there is no file 'missing.py'"),
        (["export"], "STUDY"),
    ],
)
def test_wrong_usage(empty: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    (empty / "train.py").write_text("raise RuntimeError('must not be imported')")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sac-search: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (empty / "studies").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.WorkerError("as told"), 1),
        (errors.UsageError("as told"), 2),
        (errors.EnvironmentMismatch("as told"), 2),
        (errors.NoPolicyFits("as told"), 3),
        (errors.WorkloadError("as told", user_traceback="Traceback: theirs\n"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(
    empty: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def search_spec(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(api, "search_spec", search_spec)
    assert cli.main(["train.py", "--budget-gb", "1"]) == code
    lines = capsys.readouterr().err.splitlines()
    if isinstance(error, errors.WorkloadError):
        assert lines == ["Traceback: theirs", "sac-search: as told"]
    elif isinstance(error, KeyboardInterrupt):
        assert lines == [
            "sac-search: Interrupted. What was measured is kept; the same command continues."
        ]
    else:
        assert lines == ["sac-search: as told"]


@pytest.mark.parametrize(
    "workload", ["trace.py", "./export", "verify.py:studies", "studies.verify:trace"]
)
def test_a_workload_that_is_called_like_a_command(
    empty: Path, monkeypatch: pytest.MonkeyPatch, workload: str
) -> None:
    searched: list[str] = []

    def search_spec(spec: str, *arguments: Any) -> None:
        searched.append(spec)
        raise errors.NoPolicyFits("as told")

    monkeypatch.setattr(api, "search_spec", search_spec)
    assert cli.main([workload, "--budget-gb", "1"]) == 3
    assert searched == [workload]


def test_options_reach_the_search(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def search_spec(spec: str, options: api.SearchOptions, progress: Any) -> None:
        given.append(options)
        raise errors.NoPolicyFits("as told")

    monkeypatch.setattr(api, "search_spec", search_spec)
    arguments = (
        "train.py --budget-gb 22 --trials 7 --timeout 60 --device cpu --layers h.* "
        "--layer-choice each --batch-size 3 --sampler random --seed 5 --steps 4 --clock wall "
        "--threads 2 --trial-timeout 9 --study mine --root elsewhere --fresh "
        "--granularity class --tiers 1 --compile search --compile-backend aot_eager "
        "--compile-mode fast --no-compile-dynamic"
    )
    assert cli.main(arguments.split()) == 3
    (options,) = given
    assert options == api.SearchOptions(
        budget_gb=22,
        trials=7,
        timeout_seconds=60,
        device="cpu",
        layers="h.*",
        layer_choice=LayerChoiceMode.EACH,
        batch_size=3,
        sampler=SamplerName.RANDOM,
        seed=5,
        steps=4,
        clock=Clock.WALL,
        threads=2,
        trial_timeout_seconds=9,
        study="mine",
        root=Path("elsewhere"),
        fresh=True,
        granularity=Granularity.CLASS,
        tiers=1,
        compile=api.Compile.SEARCH,
        compile_backend="aot_eager",
        compile_mode="fast",
        compile_dynamic=False,
    )
    assert options.budget_bytes == 22 * GIB
    # What a report says has to be typed is the same but for beginning anew.
    assert cli.main(["train.py", *options.arguments()]) == 3
    assert given[1] == replace(options, fresh=False)
    assert api.SearchOptions(budget_gb=0.085).arguments() == ("--budget-gb", "0.085")


Asked = list[tuple[str, str | None]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The workload and device of every search and forecast; `search` stands for a search."""
    found: Asked = []

    def search_spec(spec: str, *arguments: Any) -> None:
        found.append((spec, "search"))
        raise errors.NoPolicyFits("as told")

    def forecast_spec(spec: str, options: Any, device: str | None, progress: Any) -> None:
        found.append((spec, device))
        progress.on_phase("load")
        raise errors.NoPolicyFits("as told")

    monkeypatch.setattr(api, "search_spec", search_spec)
    monkeypatch.setattr(api, "forecast_spec", forecast_spec)
    monkeypatch.setattr(cli, "_has_accelerator", lambda: False)
    return found


@pytest.mark.parametrize("arguments", [[], ["--no-progress"]])
def test_progress_is_live_unless_told_otherwise(
    empty: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked, arguments: list[str]
) -> None:
    told: list[bool] = []

    class Recording(cli.SearchProgress):
        def __init__(self, *positional: Any, live: bool, **named: Any) -> None:
            told.append(live)
            super().__init__(*positional, live=live, **named)

    monkeypatch.setattr(cli, "SearchProgress", Recording)
    assert cli.main(["train.py", "--budget-gb", "1", *arguments]) == 3
    assert told == [not arguments]


def test_without_an_accelerator_the_built_in_model_is_forecast(
    empty: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    assert cli.main(["--budget-gb", "1"]) == 3
    assert "no accelerator that torch can use, so the built-in GPT is forecast" in (
        capsys.readouterr().out
    )
    assert cli.main(["--budget-gb", "1", "--device", "cpu"]) == 3
    assert cli.main(["train.py", "--budget-gb", "1"]) == 3
    monkeypatch.setattr(cli, "_has_accelerator", lambda: True)
    assert cli.main(["--budget-gb", "1"]) == 3
    built_in = cli.BUILTIN_SPEC
    assert asked == [
        (built_in, None),
        (built_in, "search"),
        ("train.py", "search"),
        (built_in, "search"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--budget-gb 1 --forecast", (cli.BUILTIN_SPEC, None)),
        ("--forecast --budget-gb 1", (cli.BUILTIN_SPEC, None)),
        ("train.py --forecast --budget-gb 1", ("train.py", None)),
        ("--forecast train.py --budget-gb 1", ("train.py", None)),
        ("--forecast here.train:make --budget-gb 1", ("here.train:make", None)),
        ("train.py --forecast H100 --budget-gb 1", ("train.py", "H100")),
        ("--budget-gb 1 --forecast A100-80GB train.py", ("train.py", "A100-80GB")),
    ],
)
def test_a_forecast_may_name_its_device(
    empty: Path, asked: Asked, arguments: str, expected: tuple[str, str | None]
) -> None:
    assert cli.main(["--quiet", *arguments.split()]) == 3
    assert asked == [expected]


def test_a_forecast_from_end_to_end(inside: Project, capsys: Capture, tmp_path: Path) -> None:
    arguments = ["train.py", "--forecast", "rtx 4090", "--root", str(tmp_path)]
    assert cli.main([*arguments, "--budget-gb", str(inside.budget)]) == 0
    printed = capsys.readouterr().out
    assert "This is a forecast: no step was run" in printed
    assert "RTX 4090" in printed
    (folder,) = tmp_path.iterdir()
    document = json.loads((folder / "result.json").read_text())
    assert document["evidence"] == "forecast"
    assert document["environment"]["device_name"] == "RTX 4090"
    assert document["best"]["peak_bytes"] <= document["budget_bytes"]
    assert load_policy_module(folder / "policy.py").META["evidence"] == "forecast"

    assert cli.main(["train.py", "--budget-gb", "1e-6", "--forecast", "--root", "below"]) == 3
    assert "No checkpointing policy can go under" in capsys.readouterr().err
    assert cli.main(["train.py", "--budget-gb", "1", "--forecast", "abacus"]) == 2
    assert "the rates of 'abacus' are not known" in capsys.readouterr().err
    assert cli.main(["train.py", "--budget-gb", "1", "--forecast", "--device", "cpu"]) == 2
    assert "--forecast measures nothing" in capsys.readouterr().err


def test_a_measured_study_takes_no_forecast(inside: Project, capsys: Capture) -> None:
    assert inside.ended("search").code == 0
    arguments = ["train.py", "--budget-gb", inside.budget, "--study", "found", "--forecast"]
    assert cli.main(arguments) == 2
    assert "holds measured trials, to which a forecast has nothing to add" in (
        capsys.readouterr().err
    )


def test_help_and_version(empty: Path, capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    for word in ("--budget-gb", "export", "report", "verify", "trace", "studies"):
        assert word in output
    assert cli.main(["verify", "--help"]) == 0
    assert "exported policy" in capsys.readouterr().out


def test_a_temporary_log_stays_when_the_workload_fails(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    logs: list[Path] = []

    class Client:
        def __init__(self, settings: Any, log_path: Path) -> None:
            logs.append(log_path)

        def __enter__(self) -> Any:
            return SimpleNamespace(describe=self.describe, try_module=self.try_module)

        def __exit__(self, *exception: object) -> None: ...

        def describe(self) -> None: ...

        def try_module(self, path: Path) -> tuple[Any, Outcome]:
            raise errors.WorkloadError(f"see {logs[0]}")

    monkeypatch.setattr(cli, "WorkerClient", Client)
    (empty / "policy.py").write_text("")
    (empty / "train.py").write_text("")
    assert cli.main(["verify", "policy.py", "train.py"]) == 4
    assert logs[0].exists()
    logs[0].unlink()
