"""The commands on a study that is in a storage which machines share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import MIB, Listener, ScriptedMeasurer

from sac_search import cli
from sac_search.api import SearchOptions, run_search

BUDGET_GB = 160 * MIB / 2**30


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage with one study, that was searched in another folder."""
    address = f"sqlite:///{tmp_path}/shared.db"
    options = SearchOptions(
        budget_gb=BUDGET_GB, root=tmp_path / "elsewhere", trials=2, storage=address
    )
    run_search(ScriptedMeasurer(), "gpt", options, Listener())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return address


def test_studies_are_listed(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["studies", "--storage", storage, "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert entry["study_name"] == "gpt"
    assert cli.main(["studies", "--storage", f"{storage}.other"]) == 0
    assert "There is no study in sqlite:///" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("explain", "gpt"), "under 0.156 GiB"),
        (("compare", "gpt", "gpt"), "matmul"),
        (("export", "gpt"), "policy.py: "),
    ],
)
def test_a_study_is_read(
    command: tuple[str, ...], shown: str, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--storage", storage]) == 0
    assert shown in capsys.readouterr().out


def test_a_report_is_written_here(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    assert cli.main(["report", "gpt", "--storage", storage]) == 0
    assert "gpt" in Path("studies/gpt/report.html").read_text()


def test_the_environment_names_it_as_well(
    storage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAC_SEARCH_STORAGE", storage)
    assert cli.main(["explain", "gpt"]) == 0
    assert cli.main(["explain", "another"]) == 2
    error = capsys.readouterr().err
    assert "there is no study 'another' in sqlite:///" in error
    assert error.rstrip().endswith("there are: gpt")


@pytest.mark.parametrize("command", [("explain", "gpt"), ("studies",), ("--budget-gb", "1")])
def test_what_is_no_address_is_refused(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--root", str(tmp_path), "--storage", "nonsense"]) == 2
    assert "'nonsense' is no address" in capsys.readouterr().err
