"""optuna-dashboard opens a study: names, constraints and attributes as people read them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from databases import free_port
from scripted import MIB, Listener, ScriptedMeasurer

from sac_search import interrupts
from sac_search.api import SearchOptions, run_search
from sac_search.errors import UsageError
from sac_search.policy import NO_CHECKPOINTING, LayerChoice, Policy, Tier
from sac_search.study.baselines import FULL
from sac_search.study.dashboard import attach_files, readable_policy, serve
from sac_search.study.result import SearchResult
from sac_search.study.sampler import SamplerName
from sac_search.study.store import StudyStore, open_study

optuna_dashboard = pytest.importorskip("optuna_dashboard", reason="an optional extra")


def get(app: Any, path: str) -> Any:
    environment: dict[str, Any] = {"PATH_INFO": path, "QUERY_STRING": "after=0"}
    setup_testing_defaults(environment)
    environment["wsgi.input"] = io.BytesIO()
    statuses: list[str] = []
    body = b"".join(app(environment, lambda status, headers, *more: statuses.append(status)))
    assert statuses == ["200 OK"], (statuses, body[:300])
    return json.loads(body)


pytestmark = pytest.mark.filterwarnings("ignore")  # its own


def searched(root: Path) -> SearchResult:
    options = SearchOptions(budget_gb=120 / 1024, root=root, trials=3, report=False)
    return run_search(ScriptedMeasurer(device_bytes=150 * MIB), "gpt", options, Listener())


def test_the_dashboard_shows_the_study(tmp_path: Path) -> None:
    options = SearchOptions(
        budget_gb=120 / 1024, root=tmp_path, trials=3, sampler=SamplerName.RANDOM, tiers=1
    )
    measurer = ScriptedMeasurer(device_bytes=150 * MIB)
    result = run_search(measurer, "gpt", options, Listener())
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'gpt' / 'study.db'}")
    app = optuna_dashboard.wsgi(storage)

    studies = get(app, "/api/studies")["study_summaries"]
    study = get(app, f"/api/studies/{studies[0]['study_id']}")

    assert [s["study_name"] for s in studies] == ["gpt"]
    assert study["directions"] == ["minimize"]
    assert study["objective_names"] == ["step_seconds"]
    names = [parameter["name"] for parameter in study["union_search_space"]]
    assert sorted(names) == [
        "layers.Block",
        "save.activation",
        "save.attention",
        "save.elementwise",
        "save.matmul",
        "save.normalization",
    ]
    # The same variables in every trial, or the dashboard's plots (and samplers) lose some.
    assert sorted(p["name"] for p in study["intersection_search_space"]) == sorted(names)
    assert {trial["state"] for trial in study["trials"]} == {"Complete"}

    known = {candidate.name: candidate for candidate in result.candidates}
    for trial in study["trials"]:
        attributes = {a["key"]: a["value"] for a in trial["user_attrs"]}
        name = attributes.get("same_as", attributes.get("baseline", f"trial {trial['number']}"))
        candidate = known[name.strip('"')]
        assert len(trial["constraints"]) == 1
        assert (trial["constraints"][0] <= 0) == candidate.fits(result.budget_bytes)
        assert candidate.policy.describe() in attributes["policy_text"]
    full = next(
        {a["key"]: a["value"] for a in trial["user_attrs"]}
        for trial in study["trials"]
        if any(FULL in a["value"] for a in trial["user_attrs"] if a["key"] == "baseline")
    )
    assert "fits" in full["outcome_text"]
    assert float(full["peak_gib"]) == pytest.approx(74.2 / 1024, abs=1e-4)
    assert "backward" in full["peak_phase"]


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        ({"minimize": "memory", "max_overhead": "20%"}, ["peak_gib"]),
        ({"pareto": True}, ["step_seconds", "peak_gib"]),
        ({"pareto": True, "budget_gb": 150 / 1024}, ["step_seconds", "peak_gib"]),
    ],
)
def test_the_dashboard_opens_studies_of_other_goals(
    goal: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    options = SearchOptions(
        root=tmp_path, trials=3, sampler=SamplerName.RANDOM, tiers=1, report=False, **goal
    )
    run_search(ScriptedMeasurer(), "gpt", options, Listener())
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'gpt' / 'study.db'}")
    app = optuna_dashboard.wsgi(storage)
    found = get(app, "/api/studies")["study_summaries"][0]
    study = get(app, f"/api/studies/{found['study_id']}")
    assert study["objective_names"] == names
    assert study["directions"] == ["minimize" for _ in names]
    count = int("minimize" in goal) + int("budget_gb" in goal)
    for trial in study["trials"]:
        assert len(trial["values"]) == len(names)
        assert len(trial["constraints"]) == count


def test_trials_say_what_is_checkpointed_and_saved() -> None:
    tiers = (Tier(classes=("matmul", "attention"), ops=("aten.mm.default",)), Tier())
    layers = tuple(LayerChoice(name=f"h.{i}", tier=i % 2) for i in range(4))
    found = readable_policy(Policy(tiers=tiers, layers=layers))
    assert found["checkpointed_layers"] == 4
    assert found["saved"] == "matmul, attention"
    assert readable_policy(NO_CHECKPOINTING)["saved"] == "nothing"


def test_attributes_of_a_study_read_well(tmp_path: Path) -> None:
    result = searched(tmp_path)
    store = open_study(tmp_path / "gpt")
    policies = {candidate.policy.describe(): candidate.policy for candidate in result.candidates}
    for trial in store.study.get_trials():
        policy = policies[trial.user_attrs["policy_text"]]
        assert trial.user_attrs["checkpointed_layers"] == len(policy.layers)
        assert trial.user_attrs["saved"]


class TestAttachedFiles:
    def shown(self, store: StudyStore) -> dict[str, bytes]:
        """Returns what the dashboard has attached to the study, through its own pages."""
        folder = store.folder / "artifacts"
        storage = optuna.storages.RDBStorage(f"sqlite:///{store.path}")
        app = optuna_dashboard.wsgi(
            storage, artifact_store=optuna.artifacts.FileSystemArtifactStore(folder)
        )
        [summary] = get(app, "/api/studies")["study_summaries"]
        found = get(app, f"/api/studies/{summary['study_id']}")["artifacts"]
        return {a["filename"]: (folder / a["artifact_id"]).read_bytes() for a in found}

    def test_are_shown_once_and_as_they_are_now(self, tmp_path: Path) -> None:
        searched(tmp_path)
        folder = tmp_path / "gpt"
        (folder / "report.html").write_text("the report")
        files = [folder / name for name in ("policy.py", "report.html", "missing.txt")]
        attach_files(open_study(folder), files)
        first = self.shown(open_study(folder))
        assert first == {path.name: path.read_bytes() for path in files[:2]}

        (folder / "report.html").write_text("another")
        attach_files(open_study(folder), files)

        assert self.shown(open_study(folder)) == first | {"report.html": b"another"}

    def test_come_back_when_somebody_deleted_them(self, tmp_path: Path) -> None:
        searched(tmp_path)
        folder = tmp_path / "gpt"
        attach_files(open_study(folder), [folder / "policy.py"])
        [artifact_id] = open_study(folder).artifacts.values()
        (folder / "artifacts" / artifact_id).unlink()
        attach_files(open_study(folder), [folder / "policy.py"])
        [other] = open_study(folder).artifacts.values()
        assert (folder / "artifacts" / other).read_bytes() == (folder / "policy.py").read_bytes()


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    searched(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"port \d+ cannot be used .*name another --port"):
            serve(open_study(tmp_path / "gpt"), taken.getsockname()[1])


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_in_the_middle_of_a_request_ends_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(environment: object, start_response: Callable[..., object]) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        yield b"done"

    searched(tmp_path)
    monkeypatch.setattr(optuna_dashboard, "wsgi", lambda *_, **__: answers)
    port = free_port()

    def visit() -> None:
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
                return
            time.sleep(0.05)

    visitor = threading.Thread(target=visit)
    visitor.start()
    with interrupts.listening(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        serve(open_study(tmp_path / "gpt"), port)
    visitor.join(10)
    assert not visitor.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    searched(tmp_path)
    port = free_port()
    command = [*(sys.executable, "-W", "ignore", "-m", "sac_search", "dashboard", "gpt")]
    command += ["--root", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert f"http://127.0.0.1:{port}/dashboard shows study 'gpt'" in job.stdout.readline()
        try:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies").read()
                    break
                time.sleep(0.1)
            assert json.loads(page)["study_summaries"][0]["study_name"] == "gpt"
            job.send_signal(signal.SIGINT)
            assert job.wait(60) == 0
        finally:
            job.kill()
