"""optuna-dashboard opens a study: names, constraints and attributes as people read them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from scripted import MIB, Listener, ScriptedMeasurer

from sac_search.api import SearchOptions, run_search
from sac_search.study.baselines import FULL
from sac_search.study.sampler import SamplerName

optuna_dashboard = pytest.importorskip("optuna_dashboard", reason="an optional extra")


def get(app: Any, path: str) -> Any:
    environment: dict[str, Any] = {"PATH_INFO": path, "QUERY_STRING": "after=0"}
    setup_testing_defaults(environment)
    environment["wsgi.input"] = io.BytesIO()
    statuses: list[str] = []
    body = b"".join(app(environment, lambda status, headers, *more: statuses.append(status)))
    assert statuses == ["200 OK"], (statuses, body[:300])
    return json.loads(body)


@pytest.mark.filterwarnings("ignore")  # its own
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
