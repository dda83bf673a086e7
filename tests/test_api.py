"""The pipeline from baselines to files, with a measurer that follows a script."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import (
    ENVIRONMENT,
    MIB,
    Listener,
    ScriptedMeasurer,
    make_candidate,
    make_failed,
    make_layers,
)
from torch import Tensor, nn

from sac_search import api
from sac_search.api import (
    SearchOptions,
    default_study_name,
    run_search,
    search_spec,
)
from sac_search.artifacts import load_result, render_policy
from sac_search.compiling import CompileOptions
from sac_search.device import Clock
from sac_search.errors import (
    EnvironmentMismatch,
    NoPolicyFits,
    StudyFileError,
    StudyNotFound,
    UsageError,
    WorkloadError,
)
from sac_search.policy import Policy
from sac_search.records import SCHEMA_VERSION, FailureKind, Outcome, Phase
from sac_search.report import page, rows
from sac_search.space import EAGER_ONLY, LayerChoiceMode, RunMode
from sac_search.study import store as store_module
from sac_search.study.baselines import BASELINE_NAMES, EVERY_SECOND, FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult, find_candidate, floor_of
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study
from sac_search.workload import Workload

pytestmark = pytest.mark.usefixtures("only_new_objects")

BUDGET_MIB = 120  # none peaks at 173.2 MiB, full at 74.2 MiB


def search(
    root: Path,
    measurer: ScriptedMeasurer,
    *,
    budget_mib: float = BUDGET_MIB,
    listener: Listener | None = None,
    **changes: Any,
) -> SearchResult:
    options = SearchOptions(
        **{
            "budget_gb": budget_mib / 1024,
            "root": root,
            "trials": 3,
            "sampler": SamplerName.RANDOM,
            **changes,
        }
    )
    return run_search(measurer, "gpt", options, listener or Listener())


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the studies in memory, which is ten times quicker; other tests keep them on disk."""
    storages: dict[Path, optuna.storages.InMemoryStorage] = {}

    def storage(path: Path) -> optuna.storages.InMemoryStorage:
        path.touch()
        return storages.setdefault(path, optuna.storages.InMemoryStorage())

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    monkeypatch.setattr(store_module, "storage_at", storage)
    monkeypatch.setattr(store_module, "is_made", storages.__contains__)


def document(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (root / "gpt" / "result.json").read_text(), parse_constant=pytest.fail
    )
    return found


# --- the whole of it ------------------------------------------------------------------------------


def test_a_search_ends_with_a_policy_on_disk(tmp_path: Path) -> None:
    measurer, listener = ScriptedMeasurer(notes=("Mind the gap.",)), Listener()

    result = search(tmp_path, measurer, listener=listener)

    assert listener.phases == [
        "load",
        "baselines",
        "plan",
        "baselines",
        "search",
        "confirm",
        "verify",
        "export",
    ]
    assert listener.notes == ["Mind the gap."]
    assert len(listener.candidates) == len(BASELINE_NAMES) + 3
    assert result.best is not None and result.best.fits(result.budget_bytes)
    assert result.verification is not None and result.verification.passed
    assert measurer.verified == [result.best.policy.key]
    assert (result.study_name, result.folder) == ("gpt", tmp_path / "gpt")
    assert result.layer_count == 6
    assert not result.interrupted and result.notes == ("Mind the gap.",)
    assert [c.name for c in result.candidates[: len(BASELINE_NAMES)]] == list(BASELINE_NAMES)
    text = (tmp_path / "gpt" / "policy.py").read_text()
    namespace: dict[str, Any] = {"__name__": "policy"}
    with (
        pytest.warns(UserWarning, match=r"made with torch 2\.13\.0")
        if _other_torch()
        else (_nothing())
    ):
        exec(text, namespace)  # noqa: S102
    assert namespace["LAYERS"] == dict.fromkeys(result.best.policy.layer_names, 0)
    assert namespace["META"]["figures"]["peak_bytes"] == result.best.measurement.peak_bytes


def test_the_report_lies_beside_the_result(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    result = search(tmp_path, ScriptedMeasurer())
    path = tmp_path / "gpt" / "report.html"
    stored = load_result(tmp_path / "gpt")
    assert (stored.stop_reason, stored.report_path) == (result.stop_reason, path)
    assert result.report_path == path and str(path) in rows.closing_lines(result)[-2]
    text = path.read_text()
    assert "sac-search paper.py:workload --budget-gb" in text and "--sampler random" in text
    search(tmp_path / "without", ScriptedMeasurer(), report=False)
    assert not (tmp_path / "without" / "gpt" / "report.html").exists()


def test_without_plotly_the_search_goes_on_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_packed_plotly", page._packed_plotly.__wrapped__)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    listener = Listener()
    assert search(tmp_path, ScriptedMeasurer(), listener=listener).best is not None
    assert listener.notes == [
        "No report was written: the report needs plotly, which is not installed: "
        "pip install 'sac-search[report]'"
    ]
    assert (tmp_path / "gpt" / "policy.py").is_file()


def _other_torch() -> bool:
    import torch

    return not torch.__version__.startswith("2.13.")


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_the_result_can_be_read_again(tmp_path: Path) -> None:
    result = search(tmp_path, ScriptedMeasurer(noise_fraction=0.005))

    loaded = load_result(tmp_path / "gpt")

    assert loaded.best == result.best
    assert loaded.verification == result.verification
    assert loaded.candidates == result.candidates
    assert loaded.floor_bytes == result.floor_bytes
    assert render_policy(loaded)
    with pytest.raises(StudyNotFound):
        load_result(tmp_path / "other")


def test_a_study_without_a_winner_renders_no_policy(tmp_path: Path) -> None:
    with pytest.raises(NoPolicyFits):
        search(tmp_path, ScriptedMeasurer(), budget_mib=50)

    with pytest.raises(UsageError, match="'gpt' has no verified policy yet"):
        render_policy(load_result(tmp_path / "gpt"))


# --- result.json ----------------------------------------------------------------------------------

ENTRY_FIELDS = {
    "name",
    "policy",
    "state",
    "reason",
    "step_seconds",
    "peak_bytes",
    "forecast_peak_bytes",
    "evidence",
}


def test_the_result_file_has_the_fields_that_were_promised(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(device_bytes=150 * MIB)
    result = search(tmp_path, measurer)

    found = document(tmp_path)

    assert found.keys() == {
        "schema_version",
        "study_name",
        "evidence",
        "budget_bytes",
        "environment",
        "baselines",
        "trials",
        "best",
        "lower_bound_seconds",
        "floor_bytes",
        "verification",
    }
    assert found["schema_version"] == SCHEMA_VERSION
    assert (found["study_name"], found["evidence"]) == ("gpt", "measured")
    assert found["budget_bytes"] == BUDGET_MIB * MIB
    assert found["environment"]["torch_version"] == ENVIRONMENT.torch_version
    assert found["environment"].keys() == set(ENVIRONMENT.__slots__)
    assert found["floor_bytes"] == result.floor_bytes
    assert found["verification"] == {
        "passed": True,
        "loss_difference": 0.0,
        "worst_gradient_difference": 0.0,
        "reference": "none",
    }
    assert [entry["name"] for entry in found["baselines"]] == list(BASELINE_NAMES)
    assert len(found["trials"]) == 3
    for entry in found["baselines"] + found["trials"]:
        assert entry.keys() == ENTRY_FIELDS
        assert entry["evidence"] == "measured"
    assert found["best"].keys() == ENTRY_FIELDS | {"overhead", "checkpointed_layers"}


def test_the_entries_say_what_came_of_each_policy(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(device_bytes=150 * MIB)
    result = search(tmp_path, measurer)
    assert result.best is not None

    found = document(tmp_path)

    entries = {entry["name"]: entry for entry in found["baselines"]}
    assert entries[NONE] == {
        "name": NONE,
        "policy": {"tiers": [], "layers": [], "schema_version": SCHEMA_VERSION},
        "state": "failed",
        "reason": "out of memory: on paper",
        "step_seconds": None,
        "peak_bytes": None,
        "forecast_peak_bytes": None,
        "evidence": "measured",
    }
    full = entries[FULL]
    assert (full["state"], full["reason"]) == ("fits", None)
    assert full["peak_bytes"] == measurer.peak_bytes(measurer.full)
    assert full["step_seconds"] == pytest.approx(measurer.step_seconds(measurer.full))
    measured = [e for e in [*found["baselines"], *found["trials"]] if e["state"] != "failed"]
    states = {e["state"]: e["peak_bytes"] <= BUDGET_MIB * MIB for e in measured}
    assert states == {"fits": True, "over budget": False}
    assert found["best"]["name"] == result.best.name
    assert found["best"]["overhead"] is None  # none ran out of memory
    assert found["best"]["checkpointed_layers"] == len(result.best.policy.layers)


def test_an_entry_that_was_ruled_out_by_forecast_says_so(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(forecast_factor=1.0)
    search(tmp_path, measurer, trials=6)

    trials = document(tmp_path)["trials"]

    ruled_out = [entry for entry in trials if entry["evidence"] == "forecast"]
    assert ruled_out and len(trials) - len(ruled_out) == 6
    for entry in ruled_out:
        assert entry["state"] == "failed"
        assert entry["reason"].startswith("forecast over the budget: ")
        assert entry["peak_bytes"] is None
        assert entry["forecast_peak_bytes"] > BUDGET_MIB * MIB
    for entry in trials + document(tmp_path)["baselines"]:
        if entry["evidence"] == "measured":
            assert entry["forecast_peak_bytes"] == entry["peak_bytes"]


def test_the_overhead_is_above_the_step_without_checkpointing(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer()
    result = search(tmp_path, measurer)
    assert result.best is not None

    expected = measurer.step_seconds(result.best.policy) / measurer.step_seconds(Policy()) - 1
    assert document(tmp_path)["best"]["overhead"] == pytest.approx(expected)


def test_whoever_listens_is_told_what_a_continued_study_holds(tmp_path: Path) -> None:
    first, second = Listener(), Listener()
    search(tmp_path, ScriptedMeasurer(), listener=first)
    search(tmp_path, ScriptedMeasurer(), listener=second)

    assert first.known == [] and second.candidates == []
    assert sorted(second.known) == sorted(first.candidates)


# --- budgets that bind not or cannot be met -------------------------------------------------------


def test_a_budget_over_the_step_without_checkpointing_takes_two_measurements(
    tmp_path: Path,
) -> None:
    measurer, listener = ScriptedMeasurer(), Listener()

    result = search(tmp_path, measurer, budget_mib=180, listener=listener)

    assert result.needs_no_checkpointing
    assert result.best is not None and result.best.name == NONE
    assert result.stop_reason == "the step fits without checkpointing"
    assert len(measurer.order) == 2
    assert measurer.compared == []
    assert measurer.verified == [Policy().key]
    assert listener.phases == ["load", "baselines", "verify", "export"]
    assert document(tmp_path)["best"]["checkpointed_layers"] == 0
    assert (tmp_path / "gpt" / "policy.py").is_file()


def test_a_budget_under_the_floor_is_refused_after_two_measurements(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer()

    with pytest.raises(NoPolicyFits) as caught:
        search(tmp_path, measurer, budget_mib=50)

    # The floor is the loss's peak without the layers' inputs: 70.2 - 6 * 2 MiB.
    lines = str(caught.value).splitlines()
    assert lines[0] == "no policy fits 0.049 GiB."
    assert lines[1] == (
        "The smallest peak is 0.072 GiB, by full (6 layers: recompute all); "
        "its peak is in the phase: backward."
    )
    assert lines[2].startswith("No checkpointing policy can go under 0.057 GiB:")
    assert len(measurer.order) == 2
    found = document(tmp_path)
    assert found["best"] is None and found["verification"] is None
    assert found["floor_bytes"] == pytest.approx(58.2 * MIB, abs=1)
    assert [entry["state"] for entry in found["baselines"]] == ["over budget"] * 2
    assert not (tmp_path / "gpt" / "policy.py").exists()


@pytest.mark.parametrize(
    ("loss", "clipping", "optimizer", "floor"),
    [
        (20, 0, 7, 16),  # the loss, without the inputs of the layers: 2 * 2 MiB
        (20, 17, 7, 17),
        (20, 17, 18, 18),
    ],
)
def test_the_floor_is_the_highest_of_what_no_policy_changes(
    loss: int, clipping: int, optimizer: int, floor: int
) -> None:
    full = make_candidate(FULL, policy=Policy(), peak_bytes=100 * MIB)
    assert full.measurement is not None
    peaks = {
        Phase.BACKWARD: 100 * MIB,
        Phase.LOSS: loss * MIB,
        Phase.CLIPPING: clipping * MIB,
        Phase.OPTIMIZER: optimizer * MIB,
    }
    measurement = dataclasses.replace(full.measurement, phase_peak_bytes=peaks)
    full = dataclasses.replace(full, outcome=Outcome(measurement=measurement))

    assert floor_of(full, make_layers(2)) == floor * MIB


def test_without_full_checkpointing_the_floor_is_not_known() -> None:
    failed = Candidate(name=FULL, policy=Policy(), outcome=make_failed(), step_seconds=None)

    assert floor_of(None, make_layers(2)) is None
    assert floor_of(failed, make_layers(2)) is None


def test_a_budget_between_floor_and_full_is_searched_and_refused(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer()

    with pytest.raises(NoPolicyFits, match="The smallest peak is"):
        search(tmp_path, measurer, budget_mib=65)

    assert len(measurer.order) == len(BASELINE_NAMES) + 3
    assert measurer.verified == []
    assert not (tmp_path / "gpt" / "policy.py").exists()


def test_when_everything_runs_out_of_memory_it_says_so(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(device_bytes=MIB)

    with pytest.raises(NoPolicyFits, match="every policy that was tried ran out of memory"):
        search(tmp_path, measurer)

    assert {entry["state"] for entry in document(tmp_path)["baselines"]} == {"failed"}


def test_when_nothing_passes_verification_it_says_so(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(wrong_gradients=lambda policy: True)
    listener = Listener()

    with pytest.raises(NoPolicyFits) as caught:
        search(tmp_path, measurer, listener=listener)

    message = str(caught.value)
    assert message.startswith("policies fit 0.117 GiB, but none passed verification: ")
    assert "full: wrong gradients, h.0.weight off by 5.0e-01" in message
    assert "full did not pass verification; the next best follows." in listener.notes
    assert document(tmp_path)["best"] is None
    assert not (tmp_path / "gpt" / "policy.py").exists()


def test_when_a_policy_fails_verification_the_next_best_is_exported(tmp_path: Path) -> None:
    first = search(tmp_path / "right", ScriptedMeasurer()).policy
    measurer = ScriptedMeasurer(wrong_gradients=lambda policy: policy.key == first.key)

    result = search(tmp_path / "wrong", measurer)

    assert result.policy.key != first.key
    assert len(result.rejected) == 1 and "wrong gradients" in result.rejected[0]
    assert result.policy.key == measurer.verified[-1]


# --- a workload that fails ------------------------------------------------------------------------


def test_a_workload_that_fails_either_way_is_the_workloads_fault(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(fail=lambda policy: FailureKind.USER_ERROR)

    with pytest.raises(WorkloadError) as caught:
        search(tmp_path, measurer)

    assert "neither the step without checkpointing nor the one with runs" in str(caught.value)
    assert "step raised" in str(caught.value) and "on paper" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert len(measurer.order) == 2


def test_baselines_that_fail_alike_end_the_search(tmp_path: Path) -> None:
    def fail(policy: Policy) -> FailureKind | None:
        return FailureKind.CRASH if any(t.classes for t in policy.tiers) else None

    measurer = ScriptedMeasurer(fail=fail)
    with pytest.raises(WorkloadError, match="3 baselines failed in the same way") as caught:
        search(tmp_path, measurer)
    assert "worker crashed" in str(caught.value)
    assert "add --fresh" in str(caught.value)
    # What did run is kept, and so are the three failures.
    failures = [c.failure for c in open_study(tmp_path / "gpt").candidates()]
    assert len(failures) == len(measurer.order)
    assert sum(failure is not None for failure in failures) == 3


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.OUT_OF_MEMORY,
        FailureKind.HOST_OUT_OF_MEMORY,
        # Plain checkpointing runs, so that there is an answer without a policy function.
        FailureKind.MUTATED_SAVED_TENSOR,
        FailureKind.NOT_IN_STORAGE,
        FailureKind.RECOMPUTE_MISMATCH,
    ],
)
def test_baselines_whose_policies_cannot_be_used_do_not(tmp_path: Path, kind: FailureKind) -> None:
    def fail(policy: Policy) -> FailureKind | None:
        return kind if any(t.classes for t in policy.tiers) else None

    assert search(tmp_path, ScriptedMeasurer(fail=fail)).best is not None


@pytest.mark.parametrize(("usable_bytes", "is_said"), [(10 * MIB, True), (2**40, False)])
def test_a_budget_above_what_the_device_has_left_is_said(
    tmp_path: Path, usable_bytes: int, is_said: bool
) -> None:
    listener = Listener()
    result = search(tmp_path, ScriptedMeasurer(usable_bytes=usable_bytes), listener=listener)
    said = [note for note in listener.notes if "will run out of memory" in note]
    assert len(said) == is_said
    assert list(result.notes) == said


def test_one_end_that_runs_is_enough(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(
        fail=lambda policy: None if policy.layers else FailureKind.USER_ERROR
    )

    assert search(tmp_path, measurer).best is not None


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_the_best_so_far_is_verified_and_exported_when_interrupted(tmp_path: Path) -> None:
    measurer, listener = ScriptedMeasurer(interrupt_at=9), Listener()

    result = search(tmp_path, measurer, listener=listener)

    assert result.interrupted and result.stop_reason == "interrupted"
    assert result.best is not None
    assert measurer.verified == [result.best.policy.key]
    assert measurer.compared == []
    assert "Interrupted" in listener.notes[0]
    assert document(tmp_path)["best"]["name"] == result.best.name
    assert (tmp_path / "gpt" / "policy.py").is_file()


@pytest.mark.parametrize("method", ["compare", "verify"])
def test_the_best_is_exported_when_interrupted_in_the_last_stages(
    tmp_path: Path, method: str
) -> None:
    measurer = ScriptedMeasurer(interrupt_in=frozenset({method}))

    result = search(tmp_path, measurer)

    assert result.interrupted and result.best is not None
    assert measurer.verified == [result.best.policy.key]
    assert (tmp_path / "gpt" / "policy.py").is_file()

    again = search(tmp_path, measurer)
    assert not again.interrupted and again.best is not None
    assert len(measurer.order) == len(BASELINE_NAMES) + 3


def test_interrupted_before_anything_fits_there_is_nothing_to_export(tmp_path: Path) -> None:
    result = search(tmp_path, ScriptedMeasurer(interrupt_at=1))

    assert result.interrupted and result.best is None
    assert document(tmp_path)["baselines"] == []
    assert not (tmp_path / "gpt" / "policy.py").exists()


def test_interrupted_twice_it_gives_up_and_keeps_what_was_measured(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(interrupt_at=5, interrupt_in=frozenset({"verify"}))

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, measurer)

    assert len(load_result(tmp_path / "gpt").candidates) == 4
    measurer.interrupt_at = None
    assert search(tmp_path, measurer).best is not None
    assert sum(count > 1 for count in measurer.measured.values()) == 1


def test_interrupted_later_it_keeps_the_figures_that_were_confirmed(tmp_path: Path) -> None:
    slower = {"compared_seconds": lambda policy: 1.2}
    first = search(tmp_path, ScriptedMeasurer(**slower))
    assert first.best is not None

    result = search(tmp_path, ScriptedMeasurer(interrupt_at=1, **slower), trials=9)

    assert result.interrupted and result.best is not None
    by_name = {candidate.name: candidate for candidate in result.candidates}
    assert result.best == by_name[result.best.name]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_gb": 0}, "budget is 0 GiB"),
        ({"budget_gb": -1}, "budget is -1 GiB"),
        ({"budget_gb": float("nan")}, "budget is nan GiB"),
        ({"budget_gb": float("inf")}, "budget is inf GiB"),
        ({"trials": -1}, "trials is -1; it must be 0 or more"),
        ({"steps": 0}, "steps is 0; it must be 1 or more"),
        ({"threads": 0}, "threads is 0; it must be 1 or more"),
        ({"batch_size": 0}, "batch_size is 0; it must be 1 or more"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0; it must be more than 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
        ({"trial_timeout_seconds": -5}, "trial_timeout_seconds is -5"),
        ({"compile_backend": "eager"}, "add --compile on or --compile search"),
        ({"compile_mode": "max-autotune"}, "but nothing is compiled"),
        ({"compile_dynamic": False}, "but nothing is compiled"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SearchOptions(**{"budget_gb": 1, **changes})


def test_the_least_options_are_allowed() -> None:
    options = SearchOptions(budget_gb=1e-9, trials=0, steps=1, threads=1, timeout_seconds=1e-3)

    assert options.budget_bytes == 1
    assert SearchOptions(budget_gb=22).budget_bytes == 22 * 2**30


def test_what_is_compiled_is_not_forecast() -> None:
    with pytest.raises(UsageError, match="cannot be forecast, only measured"):
        api.forecast("sac_search.builtin:workload", budget_gb=22, compile="search")
    with pytest.raises(UsageError, match="'maybe' is not a valid Compile"):
        api.forecast("sac_search.builtin:workload", budget_gb=22, compile="maybe")


def test_options_say_how_the_model_may_run() -> None:
    off, on, free = (SearchOptions(budget_gb=1, compile=compiling) for compiling in api.Compile)
    assert (off.run_modes, off.compile_options) == (EAGER_ONLY, None)
    assert set(free.run_modes) == set(RunMode) == {*on.run_modes, RunMode.EAGER}
    assert RunMode.EAGER not in on.run_modes
    assert api.session_settings("train.py", off).compile is None
    settings = api.session_settings(
        "train.py", dataclasses.replace(on, compile_mode="max-autotune")
    )
    assert settings.compile == CompileOptions(mode="max-autotune")


def test_options_from_python_may_be_text() -> None:
    options = api._options(
        1, {"sampler": "tpe", "layer_choice": "each", "clock": "wall", "root": "runs"}
    )

    assert (options.sampler, options.layer_choice) == (SamplerName.TPE, LayerChoiceMode.EACH)
    assert (options.clock, options.root) == (Clock.WALL, Path("runs"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trails": 3}, "search\\(\\) takes no 'trails'; it takes budget_gb, study"),
        ({"sampler": "nsga"}, "'nsga' is not a valid SamplerName"),
    ],
)
def test_options_from_python_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        api._options(1, options)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("gpt-22gib", "gpt-22gib"),
        ("../x", "_x"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("/etc/passwd", "_etc_passwd"),
        ("a/b", "a_b"),
        ("a\\b", "a_b"),
        ("my 'best' \"run\"", "my_best_run_"),
        (".hidden", "hidden"),
        ("café", "café"),
        ("a\0b\nc", "a_b_c"),
        ("v1.0+cu12", "v1.0+cu12"),
        ("; rm -rf *", "_rm_-rf_"),
    ],
)
def test_names_of_studies_are_made_safe(name: str, folder: str) -> None:
    assert api._safe_name(name) == folder


@pytest.mark.parametrize(("root", "study"), [("a file", "gpt"), ("studies", "x" * 300)])
def test_a_folder_that_cannot_be_made_is_named_before_anything_is_loaded(
    tmp_path: Path, root: str, study: str
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "train.py").write_text("raise SystemExit('loaded')")
    options = SearchOptions(budget_gb=1, root=tmp_path / root, study=study)

    with pytest.raises(StudyFileError, match=rf"{root}/{study}/study\.db: "):
        search_spec(str(tmp_path / "train.py"), options, Listener())


@pytest.mark.parametrize("name", ["", ".", "..", "..."])
def test_names_that_cannot_be_made_safe_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a study"):
        api._study_name(SearchOptions(budget_gb=1, study=name), "default")


@given(st.text())
def test_no_name_leads_out_of_the_folder_of_studies(name: str) -> None:
    try:
        folder = Path("studies") / api._safe_name(name)
    except UsageError:
        return
    assert folder.parent == Path("studies")
    assert folder.name not in ("", ".", "..")
    assert folder.resolve().parent == Path("studies").resolve()


@pytest.mark.parametrize(
    ("spec", "budget_gb", "name"),
    [
        ("train.py", 22, "train-22gib"),
        ("some/where/train.py:workload", 0.5, "train-0.5gib"),
        ("train.py:small", 22, "train-small-22gib"),
    ],
)
def test_a_study_is_named_after_workload_and_budget(spec: str, budget_gb: float, name: str) -> None:
    assert default_study_name(spec, budget_gb) == name
    assert api._study_name(SearchOptions(budget_gb=budget_gb), name) == name


def test_an_old_policy_makes_way_when_nothing_fits_any_more(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer()
    search(tmp_path, measurer)
    folder = tmp_path / "gpt"
    text = (folder / "policy.py").read_text()

    measurer.wrong_gradients = lambda policy: True
    open_study(folder).write("verified", [])
    with pytest.raises(NoPolicyFits):
        search(tmp_path, measurer)

    assert not (folder / "policy.py").exists()
    assert (folder / "policy.old.py").read_text() == text


# --- in this process ------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def workload_here(rows: int = 256, loss_fn: Any = mean_square) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, loss_fn, torch.ones(rows, 16), optimizer)


HERE = {"trials": 0, "steps": 1, "study": "here"}


def test_the_study_of_another_workload_is_not_continued(tmp_path: Path) -> None:
    first = api.search(workload_here(), budget_gb=1, root=tmp_path, **HERE)
    again = api.search(workload_here(), budget_gb=1, root=tmp_path, **HERE)
    assert again.candidates == first.candidates
    for other in (workload_here(rows=512), workload_here(loss_fn=lambda m, x: m(x).abs().mean())):
        with pytest.raises(EnvironmentMismatch, match="workload source"):
            api.search(other, budget_gb=1, root=tmp_path, **HERE)


@pytest.mark.parametrize("option", [{"isolate": "trial"}, {"trial_timeout_seconds": 5.0}])
def test_what_needs_a_process_of_its_own_is_refused_here(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="leave isolate and trial_timeout_seconds out"):
        api.search(workload_here(), budget_gb=1, root=tmp_path, **HERE, **option)


def test_one_policy_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    def diverging(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        checkpointed = [hasattr(type(layer), "_sac_layer_class") for layer in model]
        if checkpointed == [True, False, True]:  # every second layer, and nothing else here
            return loss * float("nan")
        return loss

    workload = workload_here(loss_fn=diverging)
    before = copy.deepcopy(workload.model.state_dict())
    peaks = api.search(workload, budget_gb=1, root=tmp_path, **HERE)
    none, full = (find_candidate(peaks.candidates, name) for name in (NONE, FULL))
    assert none is not None and none.measurement is not None
    assert full is not None and full.measurement is not None
    budget_gb = (none.measurement.peak_bytes + full.measurement.peak_bytes) / 2**31

    options = {"trials": 0, "steps": 1, "study": "other"}
    result = api.search(workload, budget_gb=budget_gb, root=tmp_path, **options)

    failed = [c.name for c in result.candidates if c.failure is not None]
    assert failed == [EVERY_SECOND]
    assert result.best is not None
    assert str(workload.model.state_dict()) == str(before)
