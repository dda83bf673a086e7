"""The benchmark scripts: what they compute from figures, and one tiny run of each."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sac_search.opclasses import OpClass
from sac_search.planner import peak_of
from sac_search.policy import NO_CHECKPOINTING, Compiled, Policy, checkpoint_layers
from sac_search.records import Failure, FailureKind, Measurement, Outcome, Phase
from sac_search.study.store import list_studies, open_study
from sac_search.trace import LayerTrace, OpTrace

SCRIPTS = Path(__file__).parents[1] / "scripts"
MIB = 2**20
TINY = """
import torch
from sac_search import Workload

def workload(device):
    torch.manual_seed(0)
    block = lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16), torch.nn.LayerNorm(16)
    )
    model = torch.nn.Sequential(*(block() for _ in range(4))).to(device)
    return Workload(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.ones(64, 16, device=device),
        torch.optim.SGD(model.parameters(), lr=1e-3),
        layers="?",
    )
"""


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import the file that they share from their own folder."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield
    for name in {"_bench", *(path.stem for path in SCRIPTS.glob("bench_*"))} - known:
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> None:
    """Runs a script in a process of its own, where no other test's tensors are alive."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def peers() -> Any:
    return load("bench_peers")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny_step.py"
    path.write_text(TINY)
    return str(path)


def outcome(relative_seconds: float, peak_bytes: int, noise: float = 0.01) -> Outcome:
    measurement = Measurement(
        peak_bytes=peak_bytes,
        allocated_bytes=peak_bytes,
        peak_phase=Phase.BACKWARD,
        phase_peak_bytes={Phase.BACKWARD: peak_bytes},
        step_seconds=relative_seconds,
        step_noise_fraction=noise,
        reference_seconds=1.0,
        relative_seconds=relative_seconds,
        steps=5,
        loss=1.0,
    )
    return Outcome(measurement=measurement)


FAILED = Outcome(
    failure=Failure(kind=FailureKind.USER_ERROR, message="no such thing\nmore", advice="")
)


class TestBestPoint:
    def points(self, peers: Any, *figures: tuple[float, float | None, int | None]) -> list[Any]:
        return [
            peers.SweepPoint(setting=s, overhead_fraction=o, peak_bytes=p) for s, o, p in figures
        ]

    def test_is_the_fastest_that_keeps_the_budget(self, peers: Any) -> None:
        points = self.points(peers, (1.0, 0.0, 100), (0.5, 0.1, 60), (0.4, 0.05, 70), (0.1, 0.3, 9))
        assert peers.best_point(points, 70).setting == 0.4
        assert peers.best_point(points, 69).setting == 0.5
        assert peers.best_point(points, 100).setting == 1.0

    def test_is_none_where_nothing_keeps_it(self, peers: Any) -> None:
        assert peers.best_point(self.points(peers, (1.0, 0.0, 100)), 99) is None

    def test_leaves_out_points_that_failed(self, peers: Any) -> None:
        points = self.points(peers, (1.0, None, None), (0.5, 0.1, 60))
        assert peers.best_point(points, 1000).setting == 0.5

    def test_row_says_why_there_is_none(self, peers: Any) -> None:
        points = [
            peers.SweepPoint(setting=1.0, overhead_fraction=0.0, peak_bytes=5 * MIB, seconds=2.0),
            peers.SweepPoint(setting=0.5, reason="no compiler", seconds=1.0),
        ]
        row = peers.compiled_row(points, MIB)
        assert not row.keeps_budget
        assert row.seconds == 3.0
        assert row.note == (
            "no setting keeps the budget; the lowest peak is 5.0 MiB; "
            "1 of 2 settings failed: no compiler"
        )

    def test_row_compares_the_compiled_step_with_the_eager_one(self, peers: Any) -> None:
        point = peers.SweepPoint(
            setting=0.5,
            overhead_fraction=0.25,
            peak_bytes=5,
            step_seconds=1.0,
            eager_step_seconds=1.0,
        )
        assert "-20.0% of eager's" in peers.compiled_row([point], 5).note


class TestSweepPoint:
    def test_overhead_is_over_the_compiled_step(self, peers: Any) -> None:
        point = peers.sweep_point(0.5, [outcome(2.0, 90), outcome(1.0, 80), outcome(1.1, 50)])
        assert point.overhead_fraction == pytest.approx(0.1)
        assert (point.peak_bytes, point.eager_step_seconds) == (50, 2.0)

    def test_the_step_without_a_budget_has_none(self, peers: Any) -> None:
        point = peers.sweep_point(1.0, [FAILED, outcome(1.0, 80)])
        assert (point.overhead_fraction, point.noise_fraction) == (0.0, 0.0)
        assert point.eager_step_seconds is None

    def test_a_failure_is_a_reason(self, peers: Any) -> None:
        point = peers.sweep_point(0.5, [outcome(2.0, 90), outcome(1.0, 80), FAILED])
        assert point.reason == "step raised: no such thing"
        assert point.overhead_fraction is None


class TestFewestLayers:
    @pytest.mark.parametrize("guess", range(6))
    @pytest.mark.parametrize("needed", range(6))
    def test_is_found_from_any_forecast(self, peers: Any, guess: int, needed: int) -> None:
        found = peers.fewest_layers(5, lambda n: n >= guess, lambda n: n >= needed)
        assert found == needed

    def test_measures_little_where_the_forecast_is_right(self, peers: Any) -> None:
        measured: list[int] = []

        def fits(n: int) -> bool:
            measured.append(n)
            return n >= 3

        peers.fewest_layers(8, lambda n: n >= 3, fits)
        assert measured == [3, 2]

    def test_is_none_where_not_even_all_fit(self, peers: Any) -> None:
        assert peers.fewest_layers(4, lambda n: False, lambda n: False) is None


class TestRows:
    def rows(self, peers: Any, budget_bytes: int = 70, **policies: tuple[Any, Outcome]) -> Any:
        names = {
            "none": (NO_CHECKPOINTING, outcome(1.0, 100)),
            "full": (checkpoint_layers(["a", "b"]), outcome(1.3, 50)),
        } | policies
        proposals = [
            peers.Proposal(peer=peers.Peer[name.upper()], policy=policy, bound_fraction=0.05)
            for name, (policy, _) in names.items()
        ]
        outcomes = {
            peers._key(proposal): found
            for proposal, (_, found) in zip(proposals, names.values(), strict=True)
        }
        return peers.make_rows(proposals, outcomes, (), budget_bytes)

    def test_those_that_keep_the_budget_come_first(self, peers: Any) -> None:
        rows = self.rows(
            peers,
            gp=(checkpoint_layers(["a"]), outcome(1.1, 71)),
            tpe=(checkpoint_layers(["b"]), outcome(1.2, 70)),
            random=(checkpoint_layers(["c"]), FAILED),
        )
        assert [row.peer for row in rows] == ["TPE", "full", "none", "GP", "random"]
        assert [row.keeps_budget for row in rows] == [True, True, False, False, False]
        assert [row.is_winner for row in rows] == [True, False, False, False, False]

    def test_overhead_is_over_none(self, peers: Any) -> None:
        full = next(row for row in self.rows(peers) if row.peer == "full")
        assert full.overhead_fraction == pytest.approx(0.3)
        assert full.noise_fraction == pytest.approx(0.01 * 2**0.5)
        assert full.gap_fraction == pytest.approx(1.3 / 1.05 - 1)

    def test_overhead_is_over_full_where_none_does_not_run(self, peers: Any) -> None:
        rows = self.rows(peers, none=(NO_CHECKPOINTING, FAILED))
        assert [row.overhead_fraction for row in rows] == [0.0, None]
        assert rows[1].note == "step raised: no such thing"

    def test_peers_with_one_policy_win_together(self, peers: Any) -> None:
        same = (checkpoint_layers(["a"]), outcome(1.1, 60))
        rows = self.rows(peers, gp=same, tpe=same)
        assert [row.is_winner for row in rows] == [True, True, False, False]

    def test_a_peer_with_several_proposals_is_judged_by_its_best(self, peers: Any) -> None:
        found = [
            (peers.Peer.NONE, [], outcome(1.0, 100)),
            (peers.Peer.MILP, ["a"], outcome(1.1, 71)),
            (peers.Peer.MILP, ["b"], outcome(1.2, 70)),
            (peers.Peer.MILP, ["c"], outcome(1.25, 60)),
        ]
        proposals = [
            peers.Proposal(peer=peer, policy=checkpoint_layers(names)) for peer, names, _ in found
        ]
        outcomes = {peers._key(p): o for p, (_, _, o) in zip(proposals, found, strict=True)}
        rows = peers.make_rows(proposals, outcomes, (), 70)
        assert [(row.peer, row.step_seconds) for row in rows] == [
            ("torch sac_milp", 1.2),
            ("none", 1.0),
        ]

    def test_a_peer_without_a_policy_says_why(self, peers: Any) -> None:
        proposal = peers.Proposal(peer=peers.Peer.GREEDY, note="found no policy")
        (row,) = peers.make_rows([proposal], {}, (), 70)
        assert (row.overhead_fraction, row.note) == (None, "found no policy")

    def test_table(self, peers: Any) -> None:
        budget = peers.BudgetReport(
            fraction=0.5, budget_bytes=70 * MIB, rows=self.rows(peers, 70 * MIB)
        )
        report = peers.Report(
            workload="train.py",
            layers=2,
            none_peak_bytes=100 * MIB,
            full_peak_bytes=50 * MIB,
            budgets=(budget,),
        )
        lines = peers.tables([report, peers.Report(workload="b.py", reason="it | broke")])
        first, last = lines.split("\n\n### b.py\n\n")
        assert first.splitlines()[:3] == [
            "### train.py",
            "",
            "2 layers; peak of none: 100.0 MiB, of full: 50.0 MiB",
        ]
        cells = [line.strip("| ").split(" | ") for line in first.splitlines()[4:]]
        assert {len(row) for row in cells[0:1] + cells[2:]} == {10}
        assert cells[2][:5] == ["50%: 70.0 MiB", "**none** (best)", "+0.0% ±1.4", "0.0 MiB", "yes"]
        assert last == "No figures: it | broke"


class TestPeers:
    def test_are_named_by_their_members(self, peers: Any) -> None:
        assert peers.peer_named("ours-site") is peers.Peer.OURS_SITE
        with pytest.raises(ValueError, match="theirs"):
            peers.peer_named("theirs")
        with pytest.raises(ValueError, match="is for --compiled"):
            peers.peer_named("ours-compiled")

    def test_none_and_full_always_take_part(self, peers: Any) -> None:
        options = peers.make_parser().parse_args(["train.py", "--peers", "gp"])
        assert [peer.name for peer in peers.settings_of(options).peers] == ["NONE", "FULL", "GP"]

    def test_every_search_is_told_what_a_search_takes(self, peers: Any) -> None:
        for arguments in peers.SEARCH_ARGUMENTS.values():
            peers.api.SearchOptions(budget_gb=1, **arguments)

    def test_milp_says_what_it_needs(self, peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
        survey = peers.Survey(
            spec="train.py",
            layers=(),
            none_peak_bytes=2,
            full_peak_bytes=1,
            budgets={0.5: 1},
            subsets={},
        )
        (proposal,) = peers.milp_proposals(survey, "cpu")[0.5]
        assert proposal.policy is None
        assert proposal.note == "needs pulp and pwlf: pip install pulp pwlf"

    def test_a_process_that_dies_gives_its_last_words(self, peers: Any, tmp_path: Path) -> None:
        with pytest.raises(peers.ProcessFailed, match="there is no file"):
            peers.ask_process(
                str(tmp_path / "no.py"), "cpu", ["--compile-setting", "1.0"], timeout_seconds=60
            )


def layer(name: str) -> LayerTrace:
    ops = {
        "aten.mm.default": OpClass.MATMUL,
        "aten.gelu.default": OpClass.ACTIVATION,
        "aten.native_layer_norm.default": OpClass.NORMALIZATION,
        "aten.add.Tensor": OpClass.ELEMENTWISE,
    }
    return LayerTrace(
        name=name,
        kind="Block",
        class_name="Block",
        parameter_count=1,
        calls=1,
        input_bytes=8,
        ops=tuple(
            OpTrace(op=op, site="8", op_class=found, calls=1, output_bytes=8, seconds=1.0)
            for op, found in ops.items()
        ),
    )


class TestForecast:
    def test_ten_policies_each_once(self) -> None:
        forecasts = load("bench_forecast")
        policies = forecasts.choose_policies([layer(f"h.{n}") for n in range(6)])
        assert len(policies) == len({policy.key for policy in policies.values()}) == 10
        assert list(policies)[:2] == ["none", "full"]
        assert {"save normalization", "save activation", "two tiers"} <= set(policies)
        two = policies["two tiers"]
        assert {choice.tier for choice in two.layers} == {0, 1}
        assert len(two.layers) == 5

    def test_worst_ratio_is_the_farthest_from_one(self) -> None:
        forecasts = load("bench_forecast")
        ratios: Sequence[tuple[str, float | None]] = [("a", 1.02), ("b", 0.9), ("c", None)]
        assert forecasts.worst_ratio(ratios) == ("b", 0.9)
        assert forecasts.worst_ratio([("c", None)]) is None

    def test_tables(self) -> None:
        forecasts = load("bench_forecast")
        row = forecasts.Row(
            policy="none", measured_bytes=100 * MIB, corrected_bytes=101 * MIB, raw_bytes=90 * MIB
        )
        failed = forecasts.Row(policy="full", measured_bytes=100 * MIB, reason="reads values")
        reports = [
            forecasts.Report(workload="a.py", rows=(row, failed)),
            forecasts.Report(workload="b.py", reason="broke"),
        ]
        worst, each = forecasts.tables(reports).split("\n\n")
        assert worst.splitlines()[2:] == [
            "| a.py | 2 | 1.0100 (none) | 0.9000 (none) |",
            "| b.py | 0 | broke | – |",
        ]
        assert each.splitlines()[-1] == "| a.py | full | 100.0 MiB | – | – | reads values |"


class TestPlanner:
    def test_problems_repeat_themselves(self) -> None:
        planner = load("bench_planner")
        shape = planner.Shape(layers=5, kinds=2, decisions=3)
        assert planner.draw_problem(shape, 1) == planner.draw_problem(shape, 1)
        assert planner.draw_problem(shape, 1) != planner.draw_problem(shape, 2)

    def test_budgets_lie_between_full_and_none(self) -> None:
        planner = load("bench_planner")
        problem = planner.draw_problem(planner.Shape(layers=5, kinds=2, decisions=3), 0)
        full, none = peak_of(problem, [1] * 5), peak_of(problem, [0] * 5)
        budgets = planner.budgets_of(problem)
        assert full < min(budgets)
        assert max(budgets) < none

    def test_small_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        planner = load("bench_planner")
        path = tmp_path / "planner.json"
        planner.main(["--small", "--seeds", "1", "--json", str(path)])
        rows = json.loads(path.read_text())["rows"]
        assert len(rows) == 8
        for row in rows:
            assert row["unsolved"] == 0
            assert -1e-6 <= row["median_gap_fraction"] <= row["worst_gap_fraction"]
            if row["shape"]["kinds"] == 1:  # where kinds alternate, rows may leave a little out
                assert row["worst_gap_fraction"] <= row["worst_greedy_gap_fraction"] + 1e-6
        assert capsys.readouterr().out.count("\n| ") == 10


@pytest.mark.slow
class TestTinyRuns:
    def test_peers(self, tiny: str, tmp_path: Path) -> None:
        path, markdown = tmp_path / "peers.json", tmp_path / "peers.md"
        arguments = [tiny, "--device", "cpu", "--budgets", "0.5", "--steps", "1", "--trials", "1"]
        arguments += ["--peers", "every-second", "subset", "torchtitan", "ours"]
        run("bench_peers", *arguments, "--json", str(path), "--markdown", str(markdown))
        document = json.loads(path.read_text())
        assert document["machine"]["cores"] >= 1
        (workload,) = document["workloads"]
        assert workload["reason"] == ""
        assert workload["layers"] == 4
        assert workload["full_peak_bytes"] < workload["none_peak_bytes"]
        (budget,) = workload["budgets"]
        middle = (workload["full_peak_bytes"] + workload["none_peak_bytes"]) / 2
        assert budget["budget_bytes"] == pytest.approx(middle, abs=1)
        rows = {row["peer"]: row for row in budget["rows"]}
        assert set(rows) == {
            "none",
            "full",
            "every second layer",
            "best layer subset",
            "torchtitan rule",
            "ours, site, 2 tiers",
        }
        assert rows["none"]["overhead_fraction"] == 0
        assert not rows["none"]["keeps_budget"]
        for name in ("full", "best layer subset", "ours, site, 2 tiers"):
            assert rows[name]["keeps_budget"], rows[name]
            assert rows[name]["peak_bytes"] <= budget["budget_bytes"]
        assert rows["ours, site, 2 tiers"]["steps_run"] >= 3
        assert sum(row["is_winner"] for row in rows.values()) >= 1
        assert f"### {tiny}" in markdown.read_text()

    def test_milp(self, peers: Any, tiny: str) -> None:
        for package in peers.MILP_PACKAGES:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        answer = peers.ask_process(tiny, "cpu", ["--milp-budgets", "160000", "1"], 120)
        fits, does_not = (peers.MilpAnswer(**one) for one in answer["budgets"])
        assert fits.peak_bytes <= 160_000
        assert fits.calls
        assert fits.proposal(1.0).policy is not None
        assert does_not.proposal(1.0).note == "its solver finds nothing that fits"

    def test_a_workload_that_fails_is_a_reason(self, peers: Any, tmp_path: Path) -> None:
        options = peers.make_parser().parse_args(["no.py", "--device", "cpu"])
        report = peers.bench_workload(str(tmp_path / "no.py"), peers.settings_of(options))
        assert report.reason.startswith("WorkloadNotFound: there is no file")

    def test_forecast(self, tiny: str, tmp_path: Path) -> None:
        path = tmp_path / "forecast.json"
        run("bench_forecast", tiny, "--device", "cpu", "--small", "--json", str(path))
        (workload,) = json.loads(path.read_text())["workloads"]
        assert workload["reason"] == ""
        assert len(workload["rows"]) >= 3
        for row in workload["rows"]:
            assert row["corrected_ratio"] == pytest.approx(1, abs=0.05), row
            assert row["raw_ratio"] == pytest.approx(1, abs=0.05), row


def test_compiled_policies_are_held_against_each_other(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []

    def search_proposal(peer: Any, spec: str, budget_bytes: int, settings: Any) -> Any:
        searches.append(budget_bytes)
        policy = Policy(compiled=Compiled(memory_budget=0.5))  # one that is swept as well
        return peers.Proposal(peer=peer, policy=policy, description="ours")

    def compare(session: Any, proposals: Sequence[Any], steps: int) -> dict[str, Outcome]:
        assert len({peers._key(p) for p in proposals}) == len(proposals)
        seconds = {None: (1.0, 100), 1.0: (0.8, 100), 0.5: (0.9, 60), 0.3: (0.85, 80)}
        return {
            peers._key(p): outcome(*seconds[p.policy.compiled and p.policy.compiled.memory_budget])
            for p in proposals
            if p.policy is not None  # full, of no layers, is the same as none
        }

    monkeypatch.setattr(peers, "search_proposal", search_proposal)
    monkeypatch.setattr(peers, "measure_side_by_side", compare)
    monkeypatch.setattr(peers, "in_session", lambda settings, use: use(None))
    survey = peers.Survey(
        spec="train.py",
        layers=(),
        none_peak_bytes=100,
        full_peak_bytes=50,
        budgets={0.5: 75, 0.8: 90},
        subsets={},
    )
    options = peers.make_parser().parse_args(["train.py", "--compiled"])
    settings = dataclasses.replace(peers.settings_of(options), compile_settings=(1.0, 0.5, 0.3))

    reports = peers.compiled_reports(survey, settings)

    assert options.compiled and settings.compiled
    assert searches == [75, 90]
    best = [[row.peer for row in report.rows if row.is_winner] for report in reports]
    swept, ours = "torch.compile, budget swept", "ours, --compile search"
    assert best == [[swept, ours], [swept]]
    alone = next(row for row in reports[0].rows if row.peer == "torch.compile")
    assert (round(alone.overhead_fraction, 3), alone.keeps_budget) == (-0.2, False)
    text = peers.tables([peers.Report(workload="train.py", compiled=reports)])
    assert "Compiled, or free to be:" in text


def test_calls_are_saved_one_by_one(peers: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.GELU())
    model = torch.nn.Sequential(model, torch.nn.Linear(4, 1))
    batch = torch.ones(2, 4)
    model(batch).sum().backward()
    expected = [p.grad for p in model.parameters()]
    calls = (("t", False), ("mm", True), ("gelu", False))
    policy = peers.CallPolicy({"0": calls})
    model.zero_grad()
    policy.apply(model)
    model(batch).sum().backward()
    policy.remove(model)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


def test_calls_that_differ_from_the_estimate_are_refused(peers: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.GELU()))
    policy = peers.CallPolicy({"0": (("relu", True),)})
    policy.apply(model)
    with pytest.raises(RuntimeError, match=r"gelu\.default, where torch estimated relu"):
        model(torch.ones(2, requires_grad=True))
    policy.remove(model)


def test_a_policy_is_known_by_its_key(peers: Any) -> None:
    twice = [Policy(), checkpoint_layers([])]
    keys = {peers._key(peers.Proposal(peer=peers.Peer.GP, policy=policy)) for policy in twice}
    assert len(keys) == 1


# --- bench_report ---------------------------------------------------------------------------------


def test_the_made_up_study_is_as_large_as_it_is_asked_for() -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    report = load("bench_report")

    study = report.make_study(trials=60, layers=32)

    assert len(study.candidates) == 62 and len(study.layers) == 32
    assert study.best is not None and study.best.fits(study.budget_bytes)
    assert len(study.timelines) == 3
    assert len(report.page_of(None, 60, 32).encode()) < 5 * MIB


def test_medians_and_the_worst_of_all_loads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("bench_report")
    loads = iter(
        report.Loaded(ready_seconds=ready, drawn_seconds=drawn)
        for ready, drawn in ((0.1, 0.9), (0.5, 1.5), (0.2, 1.0))
    )
    monkeypatch.setattr(report, "load_once", lambda *_: next(loads))

    row = report.measure("browser", Path("page"), "telephone", 3)

    assert (row.median_ready_seconds, row.worst_ready_seconds) == (0.2, 0.5)
    assert (row.median_drawn_seconds, row.worst_drawn_seconds) == (1.0, 1.5)
    assert report.table([row], 2 * MIB).splitlines()[2] == (
        "| telephone, 390 x 844 | 3 | 2.0 MiB | 200.0 ms | 500.0 ms | 1000.0 ms | 1500.0 ms |"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="no Chromium is installed",
)
def test_a_page_is_timed_in_a_real_browser(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="an optional extra")
    file = tmp_path / "report.json"

    run("bench_report", "--runs", "1", "--trials", "5", "--layers", "2", "--json", str(file))

    rows = json.loads(file.read_text())["rows"]
    assert [row["screen"] for row in rows] == ["desk, 1440 x 900", "telephone, 390 x 844"]
    for row in rows:
        assert 0 < row["median_ready_seconds"] <= row["median_drawn_seconds"]


def test_a_search_over_batch_sizes_is_held_against_the_grid() -> None:
    bench = load("bench_throughput")

    def point(size: int, rate: float, peak: int, *layers: str) -> Any:
        return bench.Point(
            batch_size=size,
            policy=checkpoint_layers(layers),
            samples_per_second=rate,
            noise_fraction=0.03,
            peak_bytes=peak,
        )

    found, best = point(8, 100.0, 900, "0"), point(16, 104.0, 1000, "0", "1")
    grid = [point(8, 90.0, 500, "0", "1"), found, best, point(16, 130.0, 1001)]
    held = bench.Held(
        budget_bytes=1000,
        search_measured=1,
        search_seconds=9.0,
        grid=grid,
        grid_seconds=70.0,
        found=found,
        again=[found, best],
        rates=[100.0, 99.0],
    )
    text = held.tables()
    assert [p.samples_per_second for p in held.fitting] == [104.0, 100.0, 90.0]
    assert "measured 1 policies in 9s, the grid 4 in 1m 10s: 25%" in text
    assert "number 2 of the 3 that fit in the grid, whose best is +4.0% there" in text
    assert "| search | 8 | 1 layer: recompute all | 100.0 | 100.0 | +0.0% | 0.000 GiB |" in text
    assert "| grid | 16 | 2 layers: recompute all | 104.0 | 99.0 | -1.0% | 0.000 GiB |" in text
    assert "| 16 | 1 of 2 | 104.0 | 2 layers: recompute all |" in text


# --- bench_growth ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_trials_of_a_search_and_of_optuna_alone_are_timed_in_one_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = load("bench_growth")
    monkeypatch.setattr(growth.search_module, "has_converged", lambda history, noise: False)
    storage = f"sqlite:///{tmp_path}/studies.db"

    rows = growth.measure_study(storage, (20, 30), 1, tmp_path)

    assert [(row.storage, row.trials) for row in rows] == [("sqlite", 20), ("sqlite", 30)]
    for row in rows:
        figures = (row.search_seconds, row.optuna_seconds, row.open_seconds, row.report_seconds)
        assert min(figures) > 0
        assert row.ratio == row.search_seconds / row.optuna_seconds
    [name] = list_studies(tmp_path, storage)
    trials = open_study(name, storage).study.get_trials(deepcopy=False)
    assert len(trials) == 30 + 2 * growth.TRIALS_IN_A_ROUND
    # What is timed stores as much: the same attributes, the same constraint.
    searched, alone = trials[-2 * growth.TRIALS_IN_A_ROUND], trials[-1]
    assert alone.user_attrs.keys() == trials[-growth.TRIALS_IN_A_ROUND - 1].user_attrs.keys()
    assert alone.constraints.keys() == searched.constraints.keys()
    table = growth.study_table(rows)
    assert f"{rows[0].ratio:.2f}" in table
