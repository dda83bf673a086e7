"""Study files that earlier releases wrote are read, continued and exported."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from scripted import MIB, Listener, ScriptedMeasurer, make_layers

from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result, render_policy, write_report
from sac_search.errors import StudyError
from sac_search.records import Evidence
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study

# Written by the first release: by class, one tier, without forecasts.
OLD = Path(__file__).with_name("old") / "schema-1.db.gz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt"
    folder.mkdir()
    (folder / "study.db").write_bytes(gzip.decompress(OLD.read_bytes()))
    return folder


def test_an_old_file_is_read(old: Path) -> None:
    result = load_result(old)

    assert result.evidence is Evidence.MEASURED
    assert result.budget_bytes == 70 * MIB
    assert len(result.candidates) == 11
    assert result.best is not None and result.verification is not None
    assert result.bound_overhead_seconds is None
    compile(render_policy(result), "policy.py", "exec")


def test_an_old_file_is_reported_as_far_as_it_goes(old: Path) -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    result = load_result(old)
    assert (result.timelines, result.arguments) == ((), ())

    reported = write_report(result, open_study(old), old / "report.html")

    text = (old / "report.html").read_text()
    assert reported.report_path == old / "report.html"
    assert "Step time against peak" in text and "Memory over one step" not in text


def test_an_old_file_is_continued_or_its_reader_is_told_how(old: Path) -> None:
    before = {c.policy.key: c.outcome for c in open_study(old).candidates()}
    measurer = ScriptedMeasurer(layers=make_layers(2))
    options = SearchOptions(
        budget_gb=70 * MIB / 2**30,
        root=old.parent,
        trials=5,
        sampler=SamplerName.RANDOM,
        granularity="class",
        tiers=1,
    )

    result = run_search(measurer, "gpt", options, Listener())

    assert result.best is not None
    after = {c.policy.key: c.outcome for c in open_study(old).candidates()}
    assert before.items() <= after.items()
    assert not before.keys() & measurer.measured.keys()

    with pytest.raises(StudyError, match="searches other decisions"):
        run_search(
            measurer,
            "gpt",
            SearchOptions(budget_gb=70 * MIB / 2**30, root=old.parent),
            Listener(),
        )
