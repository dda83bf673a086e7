"""Several workers on one study: processes here, Ray tasks, jobs of submitit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_jobs
import torch
from scripted import MIB, Listener

from sac_search import cli
from sac_search.api import run_search
from sac_search.artifacts import load_result
from sac_search.errors import EnvironmentMismatch, NoPolicyFits, UsageError, WorkerError
from sac_search.fleet import job as job_module
from sac_search.fleet import launching
from sac_search.fleet import search as fleet
from sac_search.fleet.job import JobRequest, options_from_json, options_to_json, run_job
from sac_search.fleet.launching import JobLost, LocalJob
from sac_search.fleet.search import (
    Workers,
    parse_parameters,
    parse_workers,
    search_with_workers,
)
from sac_search.options import Compile, SearchOptions
from sac_search.policy import policy_document
from sac_search.records import decode, encode
from sac_search.space import Granularity
from sac_search.study import search as search_module
from sac_search.study.result import SearchResult
from sac_search.study.store import open_study

HERE = Path(__file__).parent
RUN_PAPER_JOB = (
    "import sys; import scripted_jobs; from sac_search.fleet import __main__;"
    "__main__.run_job = scripted_jobs.run_paper_job; sys.exit(__main__.main())"
)
BUDGET_GB = 64 * MIB / 2**30


def starting(code: str) -> list[str]:
    return [sys.executable, "-P", "-c", code]


def options(root: Path, **changes: object) -> SearchOptions:
    given = {"budget_gb": BUDGET_GB, "root": root, "study": "gpt", "trials": 2000}
    return SearchOptions(
        **given | {"granularity": Granularity.CLASS, "tiers": 1, "sampler": "random"} | changes
    )


@pytest.fixture
def train(tmp_path: Path) -> str:
    """A file that no job on paper reads."""
    path = tmp_path / "train.py"
    path.write_text("def workload(): ...")
    return str(path)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes jobs run on paper. Returns where they write what they measure."""
    path = f"{HERE}{os.pathsep}{HERE.parent}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PAPER_MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(launching, "start_command", lambda package: starting(RUN_PAPER_JOB))
    monkeypatch.setattr(job_module, "run_job", scripted_jobs.run_paper_job)
    return tmp_path / "marks"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """What one worker finds, that tries every policy there is."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as context:
        context.setattr(search_module, "has_converged", lambda history, noise: False)
        return run_search(scripted_jobs.PaperClient(), "gpt", options(root), Listener())


def check_same(result: SearchResult, alone: SearchResult, marks: Path) -> None:
    """All was measured once, by more than one worker, and the answer is the same."""
    assert result.policy == alone.policy
    assert {c.policy.key for c in result.candidates} == {c.policy.key for c in alone.candidates}
    measured = [line.split() for line in marks.read_text().splitlines()]
    assert set(Counter(key for _, key in measured).values()) == {1}
    assert len({process for process, _ in measured}) > 1
    assert result.folder is not None
    assert (result.folder / "policy.py").is_file()
    document = json.loads((result.folder / "result.json").read_text())
    assert document["best"]["policy"] == json.loads(json.dumps(policy_document(alone.policy)))


# --- on this machine ------------------------------------------------------------------------------


def test_workers_here_find_what_one_finds(
    tmp_path: Path, train: str, paper: Path, alone: SearchResult
) -> None:
    told = Listener()
    result = search_with_workers(
        train, options(tmp_path / "studies"), parse_workers("cpu,cpu"), told
    )
    check_same(result, alone, paper)
    assert sorted(told.candidates) == sorted(c.name for c in result.candidates)
    assert told.notes == []
    assert result.report_path is not None


def test_the_same_command_continues_and_measures_nothing_anew(
    tmp_path: Path, train: str, paper: Path
) -> None:
    for _ in range(2):
        told = Listener()
        search_with_workers(train, options(tmp_path / "studies"), parse_workers("cpu,cpu"), told)
    assert told.candidates == []
    assert told.known
    measured = Counter(line.split()[1] for line in paper.read_text().splitlines())
    assert set(measured.values()) == {1}


def test_a_worker_that_dies_loses_nothing(
    tmp_path: Path, train: str, paper: Path, alone: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of them dies with its second measurement, before that is written down.
    monkeypatch.setattr(fleet, "start_local", dying_starter(fleet.start_local, monkeypatch, "2"))
    told = Listener()
    result = search_with_workers(
        train, options(tmp_path / "studies"), parse_workers("cpu,cpu"), told
    )
    assert result.policy == alone.policy
    assert {c.policy.key for c in result.candidates} == {c.policy.key for c in alone.candidates}
    [note] = told.notes
    assert "worker on cpu is gone" in note
    assert "exit code 9" in note
    assert open_study(tmp_path / "studies" / "gpt").running_trials() == {}


def dying_starter(start: Any, monkeypatch: pytest.MonkeyPatch, dies_at: str) -> Any:
    def starts(devices: Any, requests: Any, folder: Path) -> list[Any]:
        with monkeypatch.context() as context:
            context.setenv("PAPER_DIES", dies_at)
            first = start(devices[:1], requests[:1], folder)
        return [*first, *start(devices[1:], requests[1:], folder / "..")]

    return starts


def test_all_dead_is_an_error(
    tmp_path: Path, train: str, paper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAPER_DIES", "1")
    with pytest.raises(WorkerError, match=r"exit code 9; the end of .*search\.[12]\.log"):
        search_with_workers(
            train, options(tmp_path / "studies"), parse_workers("cpu,cpu"), Listener()
        )


def test_fresh_makes_one_new_study_for_all(tmp_path: Path, train: str, paper: Path) -> None:
    root = tmp_path / "studies"
    for fresh in (False, True, False):
        result = search_with_workers(
            train, options(root, trials=2, fresh=fresh), parse_workers("cpu,cpu"), Listener()
        )
    assert result.study_name == "gpt-2"
    assert sorted(path.name for path in root.iterdir()) == ["gpt", "gpt-2"]
    assert open_study(root / "gpt-2").series == "gpt"


def test_nothing_fits_is_said_as_by_one(tmp_path: Path, train: str, paper: Path) -> None:
    with pytest.raises(NoPolicyFits, match="smallest peak"):
        search_with_workers(
            train,
            options(tmp_path / "studies", budget_gb=50 * MIB / 2**30),
            parse_workers("cpu,cpu"),
            Listener(),
        )


def test_an_error_of_all_is_raised_as_by_one(
    tmp_path: Path, train: str, paper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "studies"
    other = dataclasses.replace(scripted_jobs.PaperClient().environment, device_name="another GPU")
    measurer = scripted_jobs.PaperClient()
    measurer.environment = other
    run_search(measurer, "gpt", options(root, trials=0), Listener())
    with pytest.raises(EnvironmentMismatch, match="another GPU"):
        search_with_workers(train, options(root), parse_workers("cpu,cpu"), Listener())


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_exports_the_best_so_far(tmp_path: Path, train: str, paper: Path) -> None:
    script = (
        "import sys, scripted_jobs, test_fleet\n"
        "from pathlib import Path\n"
        "from sac_search import interrupts\n"
        "import signal\n"
        "test_fleet.launching.start_command = (\n"
        "    lambda package: test_fleet.starting(test_fleet.RUN_PAPER_JOB))\n"
        "with interrupts.listening(signal.SIGINT):\n"
        "    result = test_fleet.search_with_workers(sys.argv[1],\n"
        "        test_fleet.options(Path(sys.argv[2])), test_fleet.parse_workers('cpu,cpu'),\n"
        "        test_fleet.Listener())\n"
        "print(result.interrupted, result.best is not None)\n"
    )
    root = tmp_path / "studies"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, train, str(root)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 100
        while not paper.exists() or len(paper.read_text().splitlines()) < 14:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    assert output == "True True\n"
    assert (root / "gpt" / "policy.py").is_file()
    assert load_result(root / "gpt").best is not None


def test_a_job_whose_starter_is_gone_ends(
    tmp_path: Path, paper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launching,
        "start_command",
        lambda package: starting(RUN_PAPER_JOB.replace("run_paper_job", "wait_until_interrupted")),
    )
    job = LocalJob("cpu", "{}", tmp_path / "log")
    try:
        assert job.poll() is None
        job.stop()
        deadline = time.monotonic() + 60
        while (report := job.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Or it was told so before it had begun.
        assert report in ("interrupted", job_module.NOTHING_DONE)
    finally:
        job.kill()


def test_a_job_without_a_report_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise SystemExit('what it said')"
    monkeypatch.setattr(launching, "start_command", lambda package: starting(code))
    job = LocalJob("cpu", "{}", tmp_path / "log")
    try:
        job._process.wait(60)
        with pytest.raises(JobLost, match=r"exit code 1; .*log:\nwhat it said"):
            job.poll()
    finally:
        job.kill()


# --- a cluster ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parent}")
        context.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
        yield
        ray.shutdown()


def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shared.db"


@pytest.mark.slow
def test_ray_tasks_find_what_one_worker_finds(
    tmp_path: Path, train: str, paper: Path, alone: SearchResult, ray_cluster: None
) -> None:
    result = search_with_workers(
        train,
        options(tmp_path / "studies", storage=storage(tmp_path), device="cpu"),
        parse_workers("ray:2"),
        Listener(),
    )
    assert result.policy == alone.policy
    assert {c.policy.key for c in result.candidates} == {c.policy.key for c in alone.candidates}
    assert result.report_path is not None


def test_ray_without_gpus_says_so(
    tmp_path: Path, train: str, paper: Path, ray_cluster: None
) -> None:
    with pytest.raises(UsageError, match=r"2 workers want a GPU each.* has 0; .*--device cpu"):
        search_with_workers(
            train,
            options(tmp_path / "studies", storage=storage(tmp_path)),
            parse_workers("ray:2"),
            Listener(),
        )


@pytest.mark.slow
def test_submitted_jobs_find_what_one_worker_finds(
    tmp_path: Path, train: str, paper: Path, alone: SearchResult
) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    result = search_with_workers(
        train,
        options(tmp_path / "studies", storage=storage(tmp_path), device="cpu"),
        parse_workers("slurm:2"),
        Listener(),
        parse_parameters("cluster=local,timeout_min=5"),
    )
    check_same(result, alone, paper)


def test_slurm_is_told_what_it_does_not_take(
    tmp_path: Path, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    given = options(tmp_path / "studies", storage=storage(tmp_path), device="cpu")
    workers = parse_workers("slurm:2")
    monkeypatch.setattr(launching.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="there is no sbatch here"):
        search_with_workers(train, given, workers, Listener())
    with pytest.raises(UsageError, match=r"does not take these parameters .*nonsense"):
        search_with_workers(
            train, given, workers, Listener(), {"cluster": "local", "nonsense": "1"}
        )


@pytest.mark.parametrize(("module", "workers"), [("ray", "ray:2"), ("submitit", "slurm:2")])
def test_what_is_not_installed_is_told_with_what_to_type(
    tmp_path: Path, train: str, module: str, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = workers.partition(":")[0]
    with pytest.raises(UsageError, match=rf"need {module}: pip install 'sac-search\[{extra}\]'"):
        search_with_workers(
            train,
            options(tmp_path / "studies", storage=storage(tmp_path)),
            parse_workers(workers),
            Listener(),
        )


# --- what is asked for ----------------------------------------------------------------------------


def test_where_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_workers("cuda:0, cuda:1") == Workers(devices=("cuda:0", "cuda:1"))
    assert parse_workers("cpu,cpu") == Workers(devices=("cpu", "cpu"))
    assert parse_workers("ray:4") == Workers(kind="ray", count=4)
    assert parse_workers("slurm:12") == Workers(kind="slurm", count=12)
    monkeypatch.setattr(
        fleet.torch.accelerator, "current_accelerator", lambda: fleet.torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert parse_workers("all").devices == ("cuda:0", "cuda:1", "cuda:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no device"),
        ("nonsense", "'nonsense' is no device; it looks like cuda:0"),
        ("cpu,", "'' is no device"),
        ("ray:", "how many"),
        ("slurm:x", "how many"),
        ("ray:0", "how many"),
        ("cuda:0,cuda:0", "cuda:0 is there twice"),
    ],
)
def test_what_is_no_worker_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_workers(text)


def test_all_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(UsageError, match="no accelerator"):
        parse_workers("all")


def test_parameters_of_slurm() -> None:
    assert parse_parameters(None) is None
    assert parse_parameters("a=1,b=x=y") == {"a": "1", "b": "x=y"}
    for text in ("", "a", "a=", "=1", "a=1,"):
        with pytest.raises(UsageError, match="expected NAME=VALUE"):
            parse_parameters(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "cpu,cpu", "--device", "cpu"], "says where to search already"),
        (["--workers", "ray:2"], "share a study by a database: add --storage"),
        (["--workers", "cpu", "--slurm", "a=1"], "--slurm is for --workers slurm"),
        (["--slurm", "a=1"], "--slurm is for --workers slurm"),
        (["--workers", "cpu", "--forecast"], "--forecast measures nothing"),
    ],
)
def test_what_contradicts_is_refused(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--budget-gb", "1", "--root", str(tmp_path), *arguments]
    assert cli.main(command) == UsageError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "goal",
    [
        {"budget_gb": 1.5, "compile": Compile.SEARCH, "compile_dynamic": False},
        {"minimize": "memory", "max_overhead": 0.05},
        {"minimize": "memory", "max_overhead": "150%", "budget_gb": 2},
        {"pareto": True},
    ],
)
def test_options_survive_json(goal: dict[str, Any]) -> None:
    given = SearchOptions(**goal, root=Path("a b"), timeout_seconds=2.5, storage="sqlite:///x.db")
    assert options_from_json(json.loads(json.dumps(options_to_json(given)))) == given


def test_a_job_tells_what_it_was_told(tmp_path: Path) -> None:
    request = JobRequest(
        spec=str(tmp_path / "missing.py"),
        options=options_to_json(options(tmp_path)),
        study_name="gpt",
        working_folder=str(tmp_path),
        keeps_files=True,
    )
    here = os.getcwd()
    try:
        report = decode(run_job(encode(request).decode()), job_module.JobReport)
    finally:
        os.chdir(here)
    assert report.error is not None
    assert report.error.type_name == "WorkloadNotFound"


# --- for real -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_search_a_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--budget-gb", "0.08", "--root", str(tmp_path), "--workers", "cpu,cpu"]
    assert cli.main([*command, "--study", "gpt", "--trials", "8", "--steps", "1"]) == 0
    assert "every gradient are bitwise those of no checkpointing" in capsys.readouterr().out
    store = open_study(tmp_path / "gpt")
    workers = {trial.user_attrs["worker"] for trial in store.study.get_trials(deepcopy=False)}
    assert len(workers) == 2
    assert load_result(tmp_path / "gpt").verification.passed
