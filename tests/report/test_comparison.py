"""Two studies or policies side by side: what differs, and what is not compared."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from results import FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from scripted import make_candidate, make_layers, other_environment

from sac_search import cli
from sac_search.artifacts import render_policy
from sac_search.errors import UsageError
from sac_search.export import read_meta
from sac_search.policy import Compiled, LayerChoice, Policy, Tier, checkpoint_layers
from sac_search.records import Evidence
from sac_search.report import comparison
from sac_search.report.comparison import Comparison, LayerRow, Row, compare, side_of
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult

OTHER = make_candidate(
    "trial 9",
    policy=checkpoint_layers(["h.0"], Tier(classes=("attention",), ops=("aten.sdpa.default",))),
    seconds=0.231,
    peak_bytes=6 * GIB,
)
ONE_RESULT = make_result(best=TRIAL, study_name="one")
OTHER_RESULT = make_result(
    NONE_CANDIDATE, FULL_CANDIDATE, OTHER, best=OTHER, study_name="other", budget_bytes=7 * GIB
)


def found_between(one: SearchResult, other: SearchResult) -> Comparison:
    return compare(side_of(one), side_of(other))


def row(found: Comparison, what: str) -> Row:
    return next(row for row in found.figures if row.what == what)


def with_best(policy: Policy, **changes: Any) -> SearchResult:
    best = make_candidate("trial", policy=policy, seconds=0.22, peak_bytes=5 * GIB)
    return make_result(NONE_CANDIDATE, FULL_CANDIDATE, best, best=best, **changes)


# --- figures --------------------------------------------------------------------------------------


def test_figures_of_one_environment_are_compared() -> None:
    found = found_between(ONE_RESULT, OTHER_RESULT)

    assert found.environment == ()
    assert [row.cells for row in found.figures] == [
        ("budget", "6.000 GiB", "7.000 GiB", "+16.7%"),
        ("evidence", "measured", "measured", ""),
        ("step time", "220.0 ms", "231.0 ms", "+5.0%"),
        ("without checkpointing", "200.0 ms", "200.0 ms", "+0.0%"),
        ("overhead", "+10.0%", "+15.5%", "+5.5 points"),
        ("peak", "5.000 GiB", "6.000 GiB", "+20.0%"),
        ("checkpointed layers", "2", "1", "-1"),
        ("policy", "2 layers: save matmul", "1 layer: save attention", ""),
    ]


def test_times_of_two_environments_are_not_compared() -> None:
    environment = other_environment(torch_version="2.14.0", device_name="H100")
    found = found_between(ONE_RESULT, make_result(best=TRIAL, environment=environment))

    assert [r.cells for r in found.environment] == [
        ("torch", "2.13.0", "2.14.0", ""),
        ("device", "paper", "H100", ""),
    ]
    assert found.tables[0][0] == "Environments"
    assert [row(found, name).difference for name in ("step time", "overhead")] == [None, None]
    assert row(found, "step time").cells[-1] == "not compared"
    assert row(found, "peak").difference == 0
    assert found.notes[0].startswith("These are two environments")


@pytest.mark.parametrize(
    "change", [{"batch_size": 8}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"world_size": 2}]
)
def test_peaks_of_steps_of_other_sizes_are_not_compared(change: dict[str, Any]) -> None:
    found = found_between(
        ONE_RESULT, make_result(best=TRIAL, environment=other_environment(**change))
    )
    assert row(found, "peak").cells[-1] == "not compared"


def test_a_forecast_is_not_compared_with_a_measurement() -> None:
    found = found_between(ONE_RESULT, make_result(best=TRIAL, evidence=Evidence.FORECAST))
    assert {row(found, name).remark for name in ("step time", "overhead", "peak")} == {
        "not compared"
    }
    assert any("a forecast is not compared" in note for note in found.notes)


def test_a_difference_within_the_noise_is_called_one() -> None:
    noisy = make_candidate(
        "trial 9", policy=OTHER.policy, seconds=0.222, peak_bytes=5 * GIB, noise=0.01
    )
    found = found_between(ONE_RESULT, make_result(best=noisy))
    assert row(found, "step time").cells[-1] == "+0.9% (within the noise)"


def test_overheads_within_the_noise_are_called_so() -> None:
    noisy = make_candidate(
        "trial 9", policy=OTHER.policy, seconds=0.222, peak_bytes=5 * GIB, noise=0.01
    )
    found = found_between(ONE_RESULT, make_result(best=noisy))
    assert row(found, "overhead").cells[-1] == "+1.0 points (within the noise)"


def on_slower_machine(result: SearchResult, factor: float) -> SearchResult:
    def slower(candidate: Candidate | None) -> Candidate | None:
        if candidate is None or candidate.step_seconds is None:
            return candidate
        return dataclasses.replace(candidate, step_seconds=factor * candidate.step_seconds)

    candidates = tuple(filter(None, map(slower, result.candidates)))
    return dataclasses.replace(result, candidates=candidates, best=slower(result.best))


def test_step_times_of_a_machine_at_two_speeds_are_not_compared() -> None:
    found = found_between(ONE_RESULT, on_slower_machine(OTHER_RESULT, 1.5))
    assert row(found, "step time").cells[-1] == "not compared"
    assert row(found, "without checkpointing").cells[1:] == ("200.0 ms", "300.0 ms", "+50.0%")
    assert row(found, "overhead").cells[-1] == "+5.5 points"
    assert found.notes == (
        "The same step, without checkpointing, took 200.0 ms in one and 300.0 ms in other: the "
        "machine ran at two speeds, so step times are not compared; overheads are, since each is "
        "over its own study's step.",
    )


def test_on_a_noisy_machine_a_small_difference_is_no_other_speed() -> None:
    noisy = make_candidate(
        "trial 9", policy=OTHER.policy, seconds=0.222, peak_bytes=5 * GIB, noise=0.03
    )
    slower = on_slower_machine(make_result(best=noisy, study_name="other"), 1.05)
    assert found_between(ONE_RESULT, slower).notes == ()
    assert found_between(ONE_RESULT, on_slower_machine(OTHER_RESULT, 1.05)).notes != ()


def test_where_the_plain_step_does_not_run_speeds_are_told_by_full_checkpointing() -> None:
    one = make_result(FULL_CANDIDATE, TRIAL, best=TRIAL, study_name="one")
    found = found_between(one, on_slower_machine(one, 1.5))
    assert row(found, "step time").cells[-1] == "not compared"
    assert found.notes[0].startswith("The same step, with every layer checkpointed, took 260.0 ms")
    assert "overheads" not in found.notes[0]
    assert row(found_between(one, one), "step time").difference == 0


def test_a_study_without_a_winner_has_no_figures() -> None:
    found = found_between(ONE_RESULT, make_result())
    assert row(found, "step time").cells == ("step time", "220.0 ms", "–", "")
    assert row(found, "policy").other == "none verified yet"
    assert found.layers == ()


# --- layers ---------------------------------------------------------------------------------------


def test_layers_that_differ_are_told_with_what_each_saves() -> None:
    found = found_between(ONE_RESULT, OTHER_RESULT)
    assert [layer_row.cells for layer_row in found.layers] == [
        ("h.0", "save matmul", "save attention", "- matmul; + attention"),
        ("h.1", "save matmul", "left alone", "- matmul"),
    ]


def test_layers_in_a_row_stand_together_and_those_alike_not_at_all() -> None:
    layers = make_layers(4)
    names = [layer.name for layer in layers]
    attention = Tier(classes=("attention",), ops=("aten.sdpa.default",))
    one = with_best(checkpoint_layers(names), layers=layers)
    other = with_best(
        Policy(
            tiers=(Tier(), attention),
            layers=tuple(
                LayerChoice(name=name, tier=int(index > 0)) for index, name in enumerate(names)
            ),
        ),
        layers=layers,
    )
    assert found_between(one, other).layers == (
        LayerRow(
            layers=("h.1", "h.2", "h.3"),
            one="recompute all",
            other="save attention",
            only_other=("attention",),
        ),
    )
    assert found_between(one, other).layers[0].cells[0] == "h.1 … h.3 (3)"


def test_what_a_tier_is_called_does_not_count() -> None:
    ops = ("aten.mm.default",)
    found = found_between(
        with_best(checkpoint_layers(["h.0"], Tier(classes=("matmul",), ops=ops))),
        with_best(checkpoint_layers(["h.0"], Tier(ops=ops))),
    )
    assert found.layers == ()
    assert found.notes == ("Both policies do the same with every layer.",)


def test_models_without_a_layer_in_common() -> None:
    other = with_best(checkpoint_layers(["s.0"]), layers=make_layers(2, prefix="s"))
    found = found_between(ONE_RESULT, other)
    assert found.layers == () and "The two have no layer in common." in found.notes


def test_under_torchs_own_budget_no_layer_is_left_alone() -> None:
    found = found_between(ONE_RESULT, with_best(Policy(compiled=Compiled(memory_budget=0.5))))
    assert {layer_row.other for layer_row in found.layers} == {"as torch's memory budget has it"}


# --- exported policies ----------------------------------------------------------------------------


def test_an_exported_policy_is_a_side_like_its_study(tmp_path: Path) -> None:
    path = tmp_path / "policy.py"
    path.write_text(render_policy(OTHER_RESULT) + "\nraise SystemExit('was run')\n")

    side = comparison.side_of_module("policy.py", read_meta(path))

    assert side == dataclasses.replace(
        side_of(OTHER_RESULT),
        name="policy.py",
        noise_fraction=None,
        full_seconds=None,
        layers=(),
    )
    found = compare(side_of(ONE_RESULT), side)
    assert [r.cells[0] for r in found.layers] == ["h.0", "h.1"]


@pytest.mark.parametrize("text", ["x = 1", "META = 3", "META = {}.keys()", "def f(:", "\0"])
def test_what_is_no_exported_policy_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.py"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not a policy that sac-search exported"):
        read_meta(path)


def test_a_meta_that_lacks_something_is_refused() -> None:
    with pytest.raises(UsageError, match="META is not that of an exported policy"):
        comparison.side_of_module("policy.py", {"figures": {}})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_meta(tmp_path / "policy.py")


# --- formats --------------------------------------------------------------------------------------


def test_every_format_holds_the_same() -> None:
    found = found_between(ONE_RESULT, OTHER_RESULT)

    document = json.loads(comparison.render(found, "json"))
    table = list(csv.reader(comparison.render(found, "csv").splitlines()))
    markdown = comparison.render(found, "md").splitlines()

    peak = document["figures"][5]
    assert (peak["one"], peak["other"], peak["unit"]) == (5 * GIB, 6 * GIB, "bytes")
    assert peak["difference"] == pytest.approx(0.2)
    assert ["figures", "peak", str(5 * GIB), str(6 * GIB), "bytes"] == table[6][:5]
    assert "| peak | 5.000 GiB | 6.000 GiB | +20.0% |" in markdown
    assert markdown[0] == "# one and other"


def test_the_command_prints_both_on_paper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = {
        "one": ONE_RESULT,
        "other": make_result(best=TRIAL, environment=other_environment(torch_version="2.14.0")),
    }
    monkeypatch.setattr(cli, "_find_study", lambda name, root, storage: Path(name))
    monkeypatch.setattr(cli.artifacts, "load_result", lambda folder, storage: results[folder.name])

    assert cli.main(["compare", "one", "other", "--root", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("These are two environments")
    assert [line.split()[0] for line in lines if line][2:5] == ["Environments", "torch", "Figures"]
