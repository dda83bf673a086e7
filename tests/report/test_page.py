"""The page: its figures are the study's, its text is nobody's markup, and it loads nothing."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from pages import Page, trace_named
from results import BITWISE, FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from scripted import (
    make_candidate,
    make_failed,
    make_layers,
    make_op,
    make_timeline,
    other_environment,
)

from sac_search import units
from sac_search.compiling import CompileOptions
from sac_search.errors import UsageError
from sac_search.policy import Compiled, Policy, Tier, checkpoint_layers
from sac_search.records import Evidence, FailureKind, Phase
from sac_search.report.page import _packed_plotly, render_page, search_command
from sac_search.study.baselines import COMPILE, FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.importance import Importance
from sac_search.study.insights import FrontierEstimate, Insights
from sac_search.study.result import SearchResult
from sac_search.study.timelines import PolicyTimeline
from sac_search.timeline import MOST_POINTS, MemoryKind, Timeline

pytest.importorskip("plotly", reason="an optional extra")

HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)>\"' &amp; %{y}"
RULED_OUT = Candidate(
    name="trial 8",
    policy=checkpoint_layers(["h.0"]),
    outcome=dataclasses.replace(
        make_failed(FailureKind.FORECAST_OVER_BUDGET), forecast_peak_bytes=9 * GIB
    ),
    step_seconds=None,
)
CRASHED = Candidate(
    name="trial 9",
    policy=checkpoint_layers(["h.1"]),
    outcome=make_failed(FailureKind.CRASH),
    step_seconds=None,
)
FRONTIER = tuple(
    FrontierEstimate(
        budget_bytes=size * GIB, peak_bytes=size * GIB - 7, overhead_seconds=s, policy=TRIAL.policy
    )
    for size, s in ((8, 0.0), (4, 0.06), (6, 0.015))
)
TIMELINES = (
    PolicyTimeline(
        name=NONE, policy_key="a", timeline=make_timeline(forward=900, backward=0, layer="")
    ),
    PolicyTimeline(name=FULL, policy_key="b", timeline=make_timeline(forward=100, backward=70)),
    PolicyTimeline(name="trial 7", policy_key="c", timeline=make_timeline(forward=300, backward=9)),
)


def full_result(**changes: object) -> SearchResult:
    fields = {
        "best": TRIAL,
        "bound_overhead_seconds": 0.01,
        "insights": Insights(saves=(), layers=(), frontier=FRONTIER),
        "timelines": TIMELINES,
        "arguments": ("--budget-gb", "6.0", "--trials", "3"),
        **changes,
    }
    return make_result(NONE_CANDIDATE, FULL_CANDIDATE, TRIAL, RULED_OUT, CRASHED, **fields)


def page_of(result: SearchResult, weights: tuple[Importance, ...] = ()) -> Page:
    return Page(render_page(result, weights))


# --- the figures are the study's ------------------------------------------------------------------


def test_every_measured_policy_is_a_point_at_its_peak_and_step_time() -> None:
    figure = page_of(full_result()).figures["trade-off"]
    points = {
        (x, y)
        for trace in figure["data"]
        if trace["mode"] == "markers"
        for x, y in zip(trace["x"], trace["y"], strict=True)
    }
    assert points == {
        (c.measurement.peak_bytes / GIB, c.step_seconds * 1e3)
        for c in (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL)
    }
    assert trace_named(figure, "best")["hovertext"] == [
        "trial 7<br>2 layers: save matmul<br>220.0 ms (+10.0%), peak 5.000 GiB"
    ]
    budget, bound = figure["layout"]["shapes"]
    assert budget["x0"] == budget["x1"] == 6.0
    assert bound["y0"] == bound["y1"] == pytest.approx(210.0)


def test_the_frontier_is_the_planners_above_the_plain_step() -> None:
    result = full_result()
    frontier = trace_named(page_of(result).figures["trade-off"], "planner's frontier")
    by_peak = sorted(FRONTIER, key=lambda estimate: estimate.peak_bytes)
    assert frontier["x"] == [estimate.peak_bytes / GIB for estimate in by_peak]
    assert result.none is not None and result.none.step_seconds is not None
    assert frontier["y"] == [
        (result.none.step_seconds + estimate.overhead_seconds) * 1e3 for estimate in by_peak
    ]


def test_memory_is_stacked_by_kind_and_its_peak_is_marked() -> None:
    found = page_of(full_result()).figures
    assert {name for name in found if name.startswith("memory")} == {
        "memory-0",
        "memory-1",
        "memory-2",
    }
    for number, entry in enumerate(TIMELINES):
        figure, timeline = found[f"memory-{number}"], entry.timeline
        stacked = {t["name"]: t for t in figure["data"] if t.get("stackgroup") == "memory"}
        assert set(stacked) == {str(k) for k, sizes in timeline.kind_bytes.items() if any(sizes)}
        for name, trace in stacked.items():
            assert trace["x"] == list(timeline.ops)
            assert trace["y"] == [n / GIB for n in timeline.kind_bytes[MemoryKind(name)]]
        peak = trace_named(figure, "peak")
        assert (peak["x"], peak["y"]) == (
            [timeline.ops[timeline.peak_index]],
            [timeline.peak_bytes / GIB],
        )
    assert "backward, h.1" in trace_named(found["memory-1"], "peak")["hovertext"][0]
    assert "outside the layers" in trace_named(found["memory-0"], "peak")["hovertext"][0]


def test_what_holds_the_peak_is_said_without_a_plot() -> None:
    timeline = make_timeline(forward=3 * GIB, backward=GIB)
    named = PolicyTimeline(name=FULL, policy_key="a", timeline=timeline)
    assert (
        "peak 4.000 GiB in backward, h.1: saved activations 3.000 GiB, recompute working set "
        "1.000 GiB"
    ) in page_of(full_result(timelines=(named,))).visible


def test_a_budget_far_above_all_peaks_is_said_and_not_drawn() -> None:
    page = page_of(make_result(NONE_CANDIDATE, best=NONE_CANDIDATE, budget_bytes=80 * GIB))
    assert page.figures["trade-off"]["layout"]["shapes"] == []
    assert "All are far under the budget of 80.00 GiB." in page.visible


def test_beliefs_are_said_to_be_of_eager_steps_where_some_are_compiled() -> None:
    figure = page_of(full_result(compile_options=CompileOptions())).figures["trade-off"]
    assert trace_named(figure, "planner's frontier, eager")["x"]


def test_the_search_is_told_in_its_order() -> None:
    figure = page_of(full_result()).figures["trials"]
    assert trace_named(figure, "fits")["x"] == [2, 3]
    assert trace_named(figure, "over the budget")["x"] == [1]
    assert trace_named(figure, "ruled out by forecast")["x"] == [4]
    assert trace_named(figure, "failed")["hovertext"] == ["trial 9<br>worker crashed"]
    best = trace_named(figure, "best so far")
    assert (best["x"], best["y"]) == ([2, 3, 4, 5], [260.0, 220.0, 220.0, 220.0])


def test_the_headline_is_the_results() -> None:
    page = page_of(full_result())
    for figure in ("5.000 GiB", "+10.0%", "3.000 GiB", "+4.8%", "83.3% of the budget of 6.000 GiB"):
        assert figure in page.visible
    assert "-37.5% against 8.000 GiB without checkpointing" in page.visible
    assert "Loss and every gradient are bitwise those of no checkpointing." in page.visible


def test_every_policy_is_in_a_table_and_the_winner_stands_out() -> None:
    page = page_of(full_result())
    assert "All 5 policies" in page.visible
    for told in ("trial 8 – – – forecast over the budget", "trial 9 – – – worker crashed"):
        assert told in page.visible
    assert [a["class"] for a in page.has("tr") if a.get("class") == "best"] == ["best", "best"]


def test_importance_is_shown_most_important_first() -> None:
    weights = tuple(Importance(name=f"save.{n}", fraction=(20 - n) / 200) for n in range(14))
    page = page_of(full_result(), weights)
    assert "save.0 10.0%" in page.visible and "save.13" not in page.visible
    assert "2 others come to 7.5%" in page.visible
    assert "Which decisions mattered" not in page_of(full_result()).visible


def test_the_op_table_has_what_can_be_saved_and_why_not() -> None:
    page = page_of(full_result())
    assert "aten.addmm.default matmul 1 6.00 6.000 save.matmul" in page.visible
    assert "no: a view costs nothing" in page.visible


def test_the_environment_and_the_command_are_there() -> None:
    result = full_result()
    page = page_of(result)
    for label, value in result.environment.labelled():
        assert label in page.visible and value in page.visible
    assert "sac-search paper.py:workload --budget-gb 6.0 --trials 3" in page.visible
    assert "sac-search report studies/gpt" in page.visible


def test_a_study_without_arguments_is_searched_by_its_budget() -> None:
    assert search_command(full_result(arguments=())) == (
        "sac-search paper.py:workload --budget-gb 6.0"
    )
    from_python = full_result(arguments=(), environment=other_environment(workload="GPT"))
    assert search_command(from_python).startswith("sac_search.search(workload, budget_gb=6.0)")


# --- it is safe and alone -------------------------------------------------------------------------


def test_the_page_loads_nothing() -> None:
    text = render_page(full_result())
    page = Page(text)
    assert "http://" not in text and "https://" not in text
    assert not page.has("link") and not page.has("img") and not page.has("iframe")
    assert all("src" not in attributes for attributes in page.has("script"))
    assert "@import" not in text and "url(" not in text
    (policy,) = (a["content"] for a in page.has("meta") if "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; ")


def test_names_of_users_are_text() -> None:
    layers = make_layers(
        2, [make_op("aten.mm.default", site=HOSTILE)], kind=HOSTILE, prefix=HOSTILE
    )
    policy = checkpoint_layers(
        [layer.name for layer in layers], Tier(classes=(HOSTILE,), ops=("aten.mm.default",))
    )
    best = make_candidate(HOSTILE, policy=policy, seconds=0.22, peak_bytes=5 * GIB)
    timeline = make_timeline(forward=10, backward=3, layer=HOSTILE)
    result = make_result(
        NONE_CANDIDATE,
        best,
        best=best,
        study_name=HOSTILE,
        folder=Path("studies") / HOSTILE.replace("/", "|"),
        environment=other_environment(device_name=HOSTILE, workload=HOSTILE, driver=HOSTILE),
        layers=layers,
        notes=(HOSTILE,),
        rejected=(HOSTILE,),
        stop_reason=HOSTILE,
        arguments=(HOSTILE,),
        verification=dataclasses.replace(
            BITWISE, worst_parameter=HOSTILE, note=HOSTILE, buffers_differing=(HOSTILE,)
        ),
        timelines=(PolicyTimeline(name=HOSTILE, policy_key="a", timeline=timeline),),
    )
    page = page_of(result, (Importance(name=HOSTILE, fraction=1.0),))
    plain = page_of(full_result(), (Importance(name="save.matmul", fraction=1.0),))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements}
    assert len(page.has("script")) == len(plain.has("script")) == 3
    names = {name for _, attributes in page.elements for name in attributes}
    assert names == {name for _, attributes in plain.elements for name in attributes}
    assert page.visible.count(HOSTILE) > 10
    for hover in trace_named(page.figures["trade-off"], "best")["hovertext"]:
        assert "<script" not in hover and "&lt;/script&gt;" in hover
        assert set(re.findall(r"<[^>]*>", hover)) == {"<br>"}


# --- every kind of study --------------------------------------------------------------------------


def test_a_study_in_which_nothing_fits() -> None:
    page = page_of(make_result(NONE_CANDIDATE, FULL_CANDIDATE, budget_bytes=2 * GIB))
    assert "Smallest peak 4.000 GiB by full" in page.visible
    assert "Floor 2.000 GiB" in page.visible
    assert "there is no winner" in page.visible
    assert "What is saved, layer by layer" not in page.visible
    assert "policy.apply" not in page.visible


def test_a_study_in_which_nothing_ran() -> None:
    page = page_of(make_result(CRASHED, floor_bytes=None))
    assert page.figures == {}
    assert "worker crashed" in page.visible and not page.has("canvas")


def test_a_study_in_which_nothing_was_tried() -> None:
    page = page_of(dataclasses.replace(make_result(stop_reason=""), candidates=()))
    assert page.figures == {}
    assert "Nothing was tried yet for 6.000 GiB." in page.visible
    assert "Policies" not in page.visible and "Stopped" not in page.visible


def test_a_study_that_lost_its_step_times_has_a_page() -> None:
    untimed = [
        dataclasses.replace(c, step_seconds=None) for c in (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL)
    ]
    page = page_of(make_result(*untimed, best=untimed[-1]))
    assert "no step time" in page.visible and "the step time is not known" in page.visible
    assert page.figures == {}


def test_figures_that_no_step_has_do_not_keep_a_page_from_being_written() -> None:
    endless = dataclasses.replace(TRIAL, step_seconds=float("inf"))
    changes = {"best": endless, "budget_bytes": 0, "bound_overhead_seconds": float("inf")}
    page = page_of(make_result(NONE_CANDIDATE, endless, **changes))
    assert [len(trace["x"]) for trace in page.figures["trade-off"]["data"]] == [1]
    result = make_result(endless, best=endless, environment=other_environment(clock="sundial"))
    assert page_of(result).figures == {} and "Clock: sundial." in page_of(result).visible


def test_without_baselines_all_policies_are_listed_at_once() -> None:
    page = page_of(make_result(CRASHED))
    assert page.visible.count("trial 9") == 1 and not page.has("details")


def test_what_the_planner_believes_is_told_only_where_it_is_drawn() -> None:
    empty = Insights(saves=(), layers=(), frontier=())
    assert "dotted line" in page_of(full_result()).visible
    assert "dotted line" not in page_of(full_result(insights=empty)).visible


def test_parts_of_a_small_peak_are_told_in_mib() -> None:
    timeline = make_timeline(forward=9 * units.MIB, backward=units.MIB)
    entry = PolicyTimeline(name=NONE, policy_key="a", timeline=timeline)
    page = page_of(full_result(timelines=(entry,)))
    assert "saved activations 9.0 MiB, recompute working set 1.0 MiB" in page.visible


def test_the_budget_is_a_line_above_a_step_only_where_it_can_be_seen() -> None:
    for budget_bytes, is_drawn in ((1500, True), (6 * GIB, False)):
        page = page_of(full_result(budget_bytes=budget_bytes, best=None))
        assert ("The dashed line is the budget." in page.visible) is is_drawn
        assert ("The budget, 6.000 GiB, is far above." in page.visible) is not is_drawn
        levels = [shape.get("y0") for shape in page.figures["memory-0"]["layout"]["shapes"]]
        assert (budget_bytes / GIB in levels) is is_drawn


def test_the_winners_memory_is_called_the_bests() -> None:
    keys = (Policy().key, FULL_CANDIDATE.policy.key, TRIAL.policy.key)
    timelines = tuple(
        dataclasses.replace(t, policy_key=key) for t, key in zip(TIMELINES, keys, strict=True)
    )
    page = page_of(full_result(timelines=timelines))
    places = [a["aria-label"] or "" for a in page.has("div") if a.get("role") == "img"]
    named = [label.partition(": ")[2].partition(",")[0] for label in places if "Memory" in label]
    assert named == ["none", "best (trial 7)", "full"]


def test_a_phase_is_named_where_there_is_room_for_its_name() -> None:
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.CLIPPING, Phase.CLIPPING)
    timeline = dataclasses.replace(TIMELINES[0].timeline, phases=phases, ops=(0, 11, 80, 100))
    page = page_of(full_result(timelines=(dataclasses.replace(TIMELINES[0], timeline=timeline),)))
    notes = page.figures["memory-0"]["layout"]["annotations"]
    assert [note["text"] for note in notes[:-1]] == ["forward", "backward"]


def test_a_deep_model_folds_out() -> None:
    layers = make_layers(500)
    policy = checkpoint_layers([layer.name for layer in layers])
    best = make_candidate("trial 1", policy=policy, seconds=0.22, peak_bytes=5 * GIB)
    page = page_of(make_result(NONE_CANDIDATE, best, best=best, layers=layers))
    assert "The other 452 layers" in page.visible
    assert len([a for a in page.has("div") if a.get("class") == "strip"]) == 500


def test_a_step_that_needs_no_checkpointing() -> None:
    page = page_of(make_result(NONE_CANDIDATE, best=NONE_CANDIDATE, budget_bytes=9 * GIB))
    assert "No checkpointing needed" in page.visible
    assert "Overhead +0.0%" in page.visible
    assert page.visible.count("left alone") == 1 + 2  # the legend, and both layers


def test_a_plain_step_that_does_not_run_is_held_against_by_its_forecast() -> None:
    none = Candidate(
        name=NONE,
        policy=Policy(),
        outcome=dataclasses.replace(make_failed(), forecast_peak_bytes=10 * GIB),
        step_seconds=None,
        is_baseline=True,
    )
    page = page_of(make_result(none, FULL_CANDIDATE, TRIAL, best=TRIAL))
    assert "-50.0% against 10.00 GiB without checkpointing by forecast" in page.visible
    assert "Overhead – 220.0 ms a step" in page.visible


def test_a_forecast_says_that_it_is_one() -> None:
    page = page_of(full_result(evidence=Evidence.FORECAST, verification=None))
    assert "forecast for paper" in page.visible and "by forecast" in page.visible
    assert "This is a forecast: no step was run" in page.visible
    assert "Nothing was verified: no step was run." in page.visible
    assert "How the search went" not in page.visible
    assert "200.0 ms without checkpointing, by forecast" in page.visible
    assert "8.000 GiB without checkpointing, by forecast" in page.visible
    assert "seconds by the published rates of paper." in page.visible


def test_compiled_policies() -> None:
    alone = make_candidate(COMPILE, policy=Policy(compiled=Compiled()), is_baseline=True)
    best = make_candidate(
        "trial 3",
        policy=Policy(compiled=Compiled(memory_budget=0.5)),
        seconds=0.2,
        peak_bytes=5 * GIB,
    )
    page = page_of(make_result(NONE_CANDIDATE, alone, best, best=best, timelines=TIMELINES[:1]))
    assert "what its graph keeps is torch's own choice" in page.visible
    assert set(page.figures) == {"trade-off", "memory-0", "trials"}


def test_what_is_saved_and_recomputed_is_drawn_op_by_op() -> None:
    policy = checkpoint_layers(["h.0"], Tier(classes=("matmul",), ops=("aten.addmm.default",)))
    best = make_candidate("trial 1", policy=policy, seconds=0.22, peak_bytes=5 * GIB)
    page = page_of(make_result(NONE_CANDIDATE, best, best=best))
    drawn = [a for a in page.has("i") if (a.get("title") or "").startswith("aten.")]
    saved = [a["title"] for a in drawn if a["class"] == "saved"]
    assert saved == ["aten.addmm.default: saved, 6.0 MiB, 6.0 ms"]
    assert len([a for a in drawn if a["class"] == "recomputed"]) == 4
    assert len([a for a in drawn if a["class"] == "left-alone"]) == 5
    assert "6.0 MiB saved, 6.8 ms again" in page.visible


def test_a_study_of_sixty_trials_is_a_small_file() -> None:
    names = [f"layer.{number}" for number in range(96)]
    trials = [
        make_candidate(
            f"trial {number}",
            policy=checkpoint_layers(names[: number + 1], Tier(ops=("aten.mm.default",))),
            seconds=0.2 + number / 1e3,
            peak_bytes=5 * GIB + number,
        )
        for number in range(60)
    ]
    long = Timeline(
        ops=tuple(range(MOST_POINTS)),
        phases=make_timeline(forward=1, backward=1).phases[:1] * MOST_POINTS,
        layers=("model.layers.95",) * MOST_POINTS,
        kind_bytes={k: tuple(range(2**36, 2**36 + MOST_POINTS)) for k in MemoryKind},
        peak_index=MOST_POINTS - 1,
    )
    result = make_result(
        NONE_CANDIDATE,
        FULL_CANDIDATE,
        *trials,
        best=trials[0],
        layers=make_layers(96, make_layers(1)[0].ops * 5, prefix="layer"),
        timelines=tuple(dataclasses.replace(t, timeline=long) for t in TIMELINES),
    )
    text = render_page(result)
    assert len(text.encode()) < 3 * units.MIB
    assert len(trace_named(Page(text).figures["trade-off"], "trials that fit")["x"]) == 59


# --- plotly ---------------------------------------------------------------------------------------


def test_without_plotly_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _packed_plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'sac-search[report]'")):
        render_page(full_result())
