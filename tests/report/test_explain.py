"""A study in plain words: every figure is the study's own, and what is said is what it says."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from results import FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from scripted import (
    ENVIRONMENT,
    MIB,
    SITE_OPS,
    Listener,
    ScriptedMeasurer,
    make_candidate,
    make_failed,
    make_layers,
)
from tracing import check_traced, sentences

from sac_search import cli
from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result
from sac_search.compiling import CompileOptions
from sac_search.policy import COMPILE_ALONE, LayerChoice, Policy, Tier, checkpoint_layers
from sac_search.records import Evidence, FailureKind, Outcome, Phase
from sac_search.report import facts
from sac_search.report.explain import explain
from sac_search.study.baselines import COMPILE, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.insights import FrontierEstimate, Insights, LayerPrice, SavePrice
from sac_search.study.result import SearchResult

STANDING = "Where it stands"
PEAK = "What holds the peak"
SAVING = "What saving buys"
MORE = "What more memory would buy"
LIMITS = "What limits it, and what to do"


def changed(candidate: Candidate, **figures: Any) -> Candidate:
    """Returns a candidate with other figures."""
    measurement = candidate.measurement
    assert measurement is not None
    if "peak_bytes" in figures:
        figures.setdefault("allocated_bytes", figures["peak_bytes"])
    return dataclasses.replace(
        candidate, outcome=Outcome(measurement=dataclasses.replace(measurement, **figures))
    )


def phases(peak_phase: Phase, **peaks: float) -> dict[str, Any]:
    """Returns the figures of a step whose phases come to so many GiB."""
    found = {Phase[name.upper()]: round(peak * GIB) for name, peak in peaks.items()}
    return {
        "peak_phase": peak_phase,
        "phase_peak_bytes": found,
        "peak_bytes": max(found.values()),
    }


def said(result: SearchResult, title: str, word: str) -> list[str]:
    return [text for text in sentences(explain(result), title) if word in text]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    measurer = ScriptedMeasurer(layers=make_layers(6, SITE_OPS), forecast_factor=0.98)
    options = SearchOptions(
        budget_gb=140 / 1024, root=tmp_path_factory.mktemp("studies"), trials=12
    )
    result = run_search(measurer, "scripted", options, Listener())
    assert result.folder is not None
    return load_result(result.folder)


INSIGHTS = Insights(
    saves=(
        SavePrice(kind="Block", label="matmul", layers=2, seconds=0.02, kept_bytes=100 * MIB),
        SavePrice(kind="Block", label="attention", layers=2, seconds=0.008, kept_bytes=20 * MIB),
        SavePrice(kind="Block", label="activation", layers=2, seconds=0.004, kept_bytes=0),
    ),
    layers=(
        LayerPrice(
            kind="Block",
            layers=2,
            recompute_seconds=0.035,
            fixed_seconds=0.003,
            policy_seconds=0.001,
            plain_bytes=10 * MIB,
            alone_bytes=300 * MIB,
        ),
    ),
    frontier=(
        FrontierEstimate(
            budget_bytes=5 * GIB, peak_bytes=5 * GIB, overhead_seconds=0.04, policy=TRIAL.policy
        ),
        FrontierEstimate(
            budget_bytes=6 * GIB, peak_bytes=6 * GIB, overhead_seconds=0.02, policy=TRIAL.policy
        ),
        FrontierEstimate(
            budget_bytes=7 * GIB, peak_bytes=7 * GIB, overhead_seconds=0.01, policy=TRIAL.policy
        ),
        FrontierEstimate(
            budget_bytes=8 * GIB, peak_bytes=8 * GIB, overhead_seconds=0.0, policy=Policy()
        ),
    ),
)
# What the traced layers run is addmm.
SAVING_TRIAL = dataclasses.replace(
    TRIAL,
    policy=checkpoint_layers(
        ["h.0", "h.1"], Tier(classes=("matmul",), ops=("aten.addmm.default",))
    ),
)
FAILED_NONE = Candidate(
    name=NONE, policy=Policy(), outcome=make_failed(), step_seconds=None, is_baseline=True
)
FAILED_FULL = dataclasses.replace(
    FAILED_NONE, name="full", policy=FULL_CANDIDATE.policy, outcome=make_failed()
)
COMPILED = dataclasses.replace(
    changed(TRIAL, compile_seconds=12.0),
    name="compiled",
    policy=dataclasses.replace(TRIAL.policy, compiled=COMPILE_ALONE.compiled),
)
FORECAST = changed(TRIAL, evidence=Evidence.FORECAST)
RANKS = changed(TRIAL, rank_peak_bytes=(4 * GIB, 5 * GIB))
ON_CUDA = dataclasses.replace(ENVIRONMENT, device="cuda", device_memory_bytes=24 * GIB)

RESULTS = {
    "winner": make_result(best=TRIAL, bound_overhead_seconds=0.01),
    "prices": make_result(best=SAVING_TRIAL, insights=INSIGHTS),
    "plain winner": make_result(best=FULL_CANDIDATE, insights=INSIGHTS),
    "none fits, measured": make_result(budget_bytes=3 * GIB, insights=INSIGHTS),
    "nothing ran": make_result(FAILED_NONE, FAILED_FULL),
    "nothing tried": dataclasses.replace(make_result(), candidates=()),
    "no time": dataclasses.replace(
        make_result(best=TRIAL, bound_overhead_seconds=0.0),
        candidates=tuple(
            dataclasses.replace(c, step_seconds=0.0) for c in (NONE_CANDIDATE, FULL_CANDIDATE)
        ),
    ),
    "untimed": make_result(
        *(
            dataclasses.replace(c, step_seconds=None)
            for c in (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL)
        )
    ),
    "endless": make_result(
        NONE_CANDIDATE, dataclasses.replace(FULL_CANDIDATE, step_seconds=float("inf")), best=TRIAL
    ),
    "untimed baseline": make_result(
        dataclasses.replace(NONE_CANDIDATE, step_seconds=None), TRIAL, best=TRIAL
    ),
    "no memory": make_result(
        changed(NONE_CANDIDATE, peak_bytes=0),
        changed(FULL_CANDIDATE, peak_bytes=0),
        best=changed(TRIAL, peak_bytes=0),
        insights=INSIGHTS,
        floor_bytes=0,
    ),
    "not verified": make_result(rejected=("trial 5: wrong gradients, h.0.weight off by 5.0e-01",)),
    "no checkpointing": make_result(best=NONE_CANDIDATE, budget_bytes=9 * GIB, insights=INSIGHTS),
    "none failed": make_result(FAILED_NONE, FULL_CANDIDATE, TRIAL, best=TRIAL),
    "compiled": make_result(
        NONE_CANDIDATE,
        FULL_CANDIDATE,
        make_candidate(COMPILE, policy=COMPILE_ALONE, seconds=0.19, peak_bytes=7 * GIB),
        COMPILED,
        best=COMPILED,
        insights=INSIGHTS,
        compile_options=CompileOptions(),
    ),
    "forecast": make_result(
        changed(NONE_CANDIDATE, evidence=Evidence.FORECAST),
        changed(FULL_CANDIDATE, evidence=Evidence.FORECAST),
        FORECAST,
        best=FORECAST,
        evidence=Evidence.FORECAST,
        verification=None,
        bound_overhead_seconds=0.01,
    ),
    "ranks": make_result(
        best=RANKS,
        environment=dataclasses.replace(ENVIRONMENT, world_size=2, parallelism="DDP"),
    ),
    "accelerator": make_result(
        best=changed(TRIAL, reserved_bytes=6 * GIB, peak_bytes=6 * GIB, allocated_bytes=5 * GIB),
        environment=ON_CUDA,
    ),
    "optimizer": make_result(
        NONE_CANDIDATE,
        changed(FULL_CANDIDATE, **phases(Phase.OPTIMIZER, backward=3, optimizer=4)),
        best=changed(TRIAL, **phases(Phase.OPTIMIZER, forward=3, backward=4, optimizer=5)),
        floor_bytes=4 * GIB,
        environment=dataclasses.replace(ENVIRONMENT, parameter_count=GIB // 4),
    ),
    "loss": make_result(
        NONE_CANDIDATE,
        changed(FULL_CANDIDATE, **phases(Phase.LOSS, loss=4, backward=3, optimizer=1)),
        best=changed(TRIAL, **phases(Phase.LOSS, forward=4, loss=5, backward=4, optimizer=1)),
        floor_bytes=4 * GIB - 2**22,
    ),
}


# --- every figure is the study's ------------------------------------------------------------------


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_is_worked_out_of_the_study_and_every_number_is_one(name: str) -> None:
    check_traced(RESULTS[name])


def test_the_same_holds_of_a_study_on_disk(searched: SearchResult) -> None:
    check_traced(searched)
    explanation = explain(searched)
    assert [section.title for section in explanation.sections] == [
        STANDING,
        PEAK,
        SAVING,
        MORE,
        LIMITS,
    ]


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_says_what_stands_behind_it(name: str) -> None:
    for section in explain(RESULTS[name]).sections:
        for fact in section.facts:
            bases = {f.quantity.basis for f in fact.figures} - {facts.Basis.GIVEN}
            assert all(f"({basis})" in fact.sentence for basis in bases)


# --- where it stands ------------------------------------------------------------------------------


def test_a_winner_is_held_against_the_ends_and_the_bound() -> None:
    assert sentences(explain(RESULTS["winner"]), STANDING) == [
        "The fastest policy under 6.000 GiB is trial 7 (2 layers: save matmul): 220.0 ms ±0.0% per "
        "step, peak 5.000 GiB, so 1.000 GiB of the budget is not used (measured).",
        "Against no checkpointing (200.0 ms, 8.000 GiB) its step time is +10.0% and its peak "
        "-37.5% (measured).",
        "Against full checkpointing (260.0 ms, 4.000 GiB) its step time is -15.4% and its peak "
        "+25.0% (measured).",
        "No policy of this kind is faster than 210.0 ms, if prices are right and add up; the "
        "winner's is +4.8% against that (believed).",
    ]


def test_at_the_bound_more_trials_are_not_recommended() -> None:
    [line] = said(make_result(best=TRIAL, bound_overhead_seconds=0.02), STANDING, "No policy of")
    assert line.endswith("more memory, or less work, will.")


def test_a_bound_that_the_winner_beats_says_nothing() -> None:
    [line] = said(make_result(best=TRIAL, bound_overhead_seconds=0.04), STANDING, "bound")
    assert line == (
        "The planner's bound, 240.0 ms, says nothing here: the winner's step time is -8.3% against "
        "it, so the prices behind it are off (believed)."
    )


def test_the_best_recipe_that_fits_is_named() -> None:
    recipe = make_candidate(
        "save attention",
        policy=checkpoint_layers(["h.0"]),
        seconds=0.25,
        peak_bytes=5 * GIB,
        is_baseline=True,
    )
    result = make_result(NONE_CANDIDATE, FULL_CANDIDATE, recipe, TRIAL, best=TRIAL)
    assert said(result, STANDING, "save attention") == [
        "Against save attention, the fastest known recipe that fits, its step time is -12.0% "
        "(measured)."
    ]


def test_a_step_without_checkpointing_that_did_not_run_is_told() -> None:
    assert said(RESULTS["none failed"], STANDING, "gave no figures") == [
        "The step without checkpointing gave no figures: out of memory."
    ]


def test_a_budget_that_does_not_bind() -> None:
    explanation = explain(RESULTS["no checkpointing"])
    assert sentences(explanation, STANDING) == [
        "No checkpointing is needed: the step without it takes 200.0 ms and peaks at 8.000 GiB, "
        "1.000 GiB under the budget of 9.000 GiB (measured).",
        "Checkpointing every layer would peak at 4.000 GiB and take +30.0% more time, so budgets "
        "between the two peaks are worth a search (measured).",
    ]
    assert {s.title for s in explanation.sections} == {STANDING, PEAK}


def test_without_checkpointing_nothing_is_recomputed() -> None:
    for name, words in (("no checkpointing", "works with"), ("winner", "recomputes and works")):
        [line] = said(RESULTS[name], PEAK, "The peak of")
        assert f"what one layer {words}" in line


def test_nothing_fits() -> None:
    assert sentences(explain(RESULTS["none fits, measured"]), STANDING) == [
        "No policy fits 3.000 GiB: the smallest peak is 4.000 GiB, by full (2 layers: recompute "
        "all), 1.000 GiB too much (measured)."
    ]


def test_nothing_ran() -> None:
    explanation = explain(RESULTS["nothing ran"])
    assert sentences(explanation, LIMITS) == [
        "Even the steps with all layers checkpointed gave no figures. Use a smaller batch, or a "
        "device with more memory."
    ]
    assert not sentences(explanation, PEAK)


def test_what_was_not_run_is_not_said_to_have_failed() -> None:
    explanation = explain(RESULTS["nothing tried"])
    assert sentences(explanation, STANDING) == ["Nothing was tried yet under 6.000 GiB."]
    assert {section.title for section in explanation.sections} == {STANDING}


def test_what_full_checkpointing_failed_by_is_what_to_look_at() -> None:
    crashed = dataclasses.replace(FAILED_FULL, outcome=make_failed(FailureKind.CRASH))
    [line] = sentences(explain(make_result(FAILED_NONE, crashed)), LIMITS)
    assert "smaller batch" not in line and line.endswith("its log has the last words.")


def test_before_a_policy_is_verified_it_is_the_best_so_far_that_is_explained() -> None:
    assert said(RESULTS["not verified"], PEAK, "The peak of trial 7, 5.000 GiB of tensors")


def test_a_search_that_was_stopped_tells_the_best_so_far() -> None:
    first, second = sentences(explain(RESULTS["not verified"]), STANDING)
    assert first.startswith("No policy is verified yet; the fastest so far that fits 6.000 GiB is")
    assert first.endswith("the same command continues it.")
    assert second == "Rejected: trial 5: wrong gradients, h.0.weight off by 5.0e-01."


def test_a_forecast_is_called_one() -> None:
    explanation = explain(RESULTS["forecast"])
    lines = sentences(explanation, STANDING)
    assert lines[-1].startswith("Nothing was measured or verified")
    assert "220.0 ms per step" in lines[0]
    assert {str(f.quantity.basis) for f in explanation.figures} == {"given", "forecast"}
    assert "(measured)" not in facts.to_text(explanation)


# --- what saving buys -----------------------------------------------------------------------------


def test_what_is_saved_is_priced_over_all_its_layers() -> None:
    assert said(RESULTS["prices"], SAVING, "matmul, saved") == [
        "matmul, saved in 2 layers of Block, spares 40.0 ms of recomputing in a step and keeps "
        "200.0 MiB: 0.200 ms per MiB (believed)."
    ]
    assert said(RESULTS["prices"], SAVING, "Asking the policy") == [
        "Asking the policy about every op, in 2 layers that save something, takes 2.0 ms of a step "
        "(believed)."
    ]


def test_the_best_buys_come_first_and_those_for_nothing_before_them() -> None:
    first, second = said(RESULTS["prices"], SAVING, "Next, a layer")
    assert "activation as well" in first and "0.0 MiB more: for no memory at all" in first
    assert "attention as well" in second and "0.400 ms per MiB" in second


def test_the_first_save_of_a_layer_brings_the_policy_function_with_it() -> None:
    [line] = said(RESULTS["plain winner"], SAVING, "could save attention")
    assert line.startswith("Next, a layer of Block that recomputes all could save attention, which")
    assert "spares 7.0 ms" in line


def test_a_layer_may_do_as_others_do() -> None:
    mixed = dataclasses.replace(
        SAVING_TRIAL,
        policy=Policy(
            tiers=(Tier(), *SAVING_TRIAL.policy.tiers),
            layers=(LayerChoice(name="h.0"), LayerChoice(name="h.1", tier=1)),
        ),
    )
    result = make_result(best=mixed, insights=INSIGHTS)
    [line] = said(result, SAVING, "recomputes all could save matmul")
    assert "spares 19.0 ms and keeps 100.0 MiB more" in line
    check_traced(result)


def test_what_the_prices_say_of_the_whole_is_held_against_what_was_measured() -> None:
    # Two layers of 20 ms each, less 1 ms each for the policy; full takes 260 ms, the winner 220.
    assert said(RESULTS["prices"], SAVING, "Against recomputing") == [
        "Against recomputing all of every layer the winner spares 38.0 ms (believed) of a step by "
        "the prices that follow, and was 40.0 ms (measured) faster."
    ]


def test_prices_that_explain_little_are_called_rough() -> None:
    lines = [
        said(dataclasses.replace(RESULTS["prices"], best=best), SAVING, "far apart")
        for best in (SAVING_TRIAL, dataclasses.replace(SAVING_TRIAL, step_seconds=0.16))
    ]
    assert [len(found) for found in lines] == [0, 1]


def test_where_the_policy_function_costs_more_than_saving_spares() -> None:
    dear = dataclasses.replace(INSIGHTS.layers[0], policy_seconds=0.04)
    insights = dataclasses.replace(INSIGHTS, layers=(dear,))
    result = make_result(best=FULL_CANDIDATE, insights=insights)
    assert said(result, SAVING, "Saving pays in no layer") == [
        "Saving pays in no layer of Block: asking the policy about its ops takes 40.0 ms, and all "
        "that could be saved spares 32.0 ms (believed)."
    ]
    assert not said(result, SAVING, "Next, a layer")
    check_traced(result)


def test_what_leaving_a_layer_alone_buys() -> None:
    [line] = said(RESULTS["prices"], SAVING, "Leaving alone")
    # 35 ms less 20 ms for what is saved, and 1 ms for the policy; 300 MiB less 10 and 100.
    assert "would spare 16.0 ms and keep 190.0 MiB more: 84.2 µs per MiB" in line
    assert "The last layer is the one to begin with" in line


@pytest.mark.parametrize(("left_mib", "fits"), [(30, True), (10, False)])
def test_what_fits_what_is_left_of_the_budget_is_told(left_mib: int, fits: bool) -> None:
    tight = dataclasses.replace(RESULTS["prices"], budget_bytes=5 * GIB + left_mib * MIB)
    [line] = said(tight, SAVING, "attention as well")
    assert line.endswith("That much is left of the budget.") is fits


@pytest.mark.parametrize(
    ("count", "checkpointed", "line"),
    [
        (
            2,
            ["h.1"],
            "1 layer of Block is left alone: checkpointing it would keep 290.0 MiB less and cost "
            "35.0 ms of a step (believed).",
        ),
        (
            2,
            ["h.0"],
            "The last layer, of Block, is left alone: its backward comes first, so that "
            "checkpointing it would cost 35.0 ms of a step and hardly lower the peak (believed).",
        ),
        (
            3,
            ["h.0"],
            "2 layers of Block are left alone: checkpointing one of them would keep 290.0 MiB less "
            "and cost 35.0 ms of a step (believed). Not so the last one: its backward comes first, "
            "so what it would recompute is needed at once.",
        ),
    ],
)
def test_a_layer_that_is_left_alone_is_priced_the_other_way(
    count: int, checkpointed: list[str], line: str
) -> None:
    one = make_candidate(
        "one", policy=checkpoint_layers(checkpointed), seconds=0.21, peak_bytes=5 * GIB
    )
    result = make_result(
        NONE_CANDIDATE, FULL_CANDIDATE, one, best=one, insights=INSIGHTS, layers=make_layers(count)
    )
    assert said(result, SAVING, "left alone") == [line]
    check_traced(result)


def test_compiled_code_has_no_prices() -> None:
    explanation = explain(RESULTS["compiled"])
    assert len(sentences(explanation, SAVING)) == 2
    assert sentences(explanation, MORE)[0].endswith("what follows is of eager steps.")
    assert not said(RESULTS["compiled"], PEAK, "No checkpointing policy")


# --- what more memory would buy -------------------------------------------------------------------


def test_the_next_budgets_up_and_down() -> None:
    up, most, down = sentences(explain(RESULTS["prices"]), MORE)
    assert up.startswith("1.000 GiB more (7.000 GiB) would spare 10.0 ms of a step, with")
    assert "10.0 ms above no checkpointing instead of the 20.0 ms that" in up
    assert most.startswith("2.000 GiB more (8.000 GiB) would spare 20.0 ms of a step, with no")
    assert down.startswith("1.000 GiB less (5.000 GiB) would cost 20.0 ms of a step")


def test_of_smaller_budgets_the_first_that_costs_something_is_told() -> None:
    own = INSIGHTS.frontier[1]
    near = dataclasses.replace(own, budget_bytes=own.budget_bytes - MIB)
    insights = dataclasses.replace(INSIGHTS, frontier=(INSIGHTS.frontier[0], near, own))
    result = make_result(best=SAVING_TRIAL, insights=insights)
    assert [line[:40] for line in sentences(explain(result), MORE)] == [
        "1.000 GiB less (5.000 GiB) would cost 20"
    ]
    free = dataclasses.replace(INSIGHTS.frontier[0], overhead_seconds=own.overhead_seconds)
    result = dataclasses.replace(
        result, insights=dataclasses.replace(insights, frontier=(free, near, own))
    )
    [line] = sentences(explain(result), MORE)
    assert line.startswith("1.000 GiB less (5.000 GiB) would cost 0.0 ms")
    assert line.endswith("less than a measurement shows (believed).")


def test_a_gain_within_the_noise_is_called_one() -> None:
    noisy = changed(TRIAL, step_noise_fraction=0.1)
    lines = sentences(explain(dataclasses.replace(RESULTS["prices"], best=noisy)), MORE)
    assert "would buy 10.0 ms of a step: less than a measurement shows" in lines[0]


def test_a_budget_under_all_plans_is_told_the_smallest() -> None:
    [line] = sentences(explain(RESULTS["none fits, measured"]), MORE)
    assert line.startswith("The smallest budget for which there is a plan is 5.000 GiB: 40.0 ms")


# --- what limits it -------------------------------------------------------------------------------


def test_an_optimizer_that_holds_the_peak() -> None:
    lines = sentences(explain(RESULTS["optimizer"]), LIMITS)
    assert "fused=True" in lines[0]
    assert lines[1] == (
        "Until the layers hold the peak they may keep 1.000 GiB more, at no cost in memory "
        "(measured)."
    )
    [state] = said(RESULTS["optimizer"], LIMITS, "8-bit")
    assert state.startswith("While the optimizer steps 3.000 GiB are alive beside the parameters")


def test_a_loss_that_holds_the_peak_and_the_floor() -> None:
    lines = said(RESULTS["loss"], LIMITS, "chunked cross-entropy")
    assert lines[0].startswith(
        "What the model's output and the loss add to the forward pass is 1.000 GiB at the least, "
        "which holds the peak (measured). If the loss is a cross-entropy"
    )
    assert lines[1].startswith("While the loss is computed 2.996 GiB more is alive")


@pytest.mark.parametrize(("loss", "is_told"), [(4.5, True), (4.1, False)])
def test_a_loss_that_is_there_when_the_backward_pass_begins(loss: float, is_told: bool) -> None:
    best = changed(TRIAL, **phases(Phase.BACKWARD, forward=4, loss=loss, backward=5, optimizer=1))
    found = said(make_result(best=best), LIMITS, "may still be there when the backward pass")
    assert bool(found) is is_told


@pytest.mark.parametrize(("backward", "is_told"), [(4.0, True), (2.0, False)])
def test_what_is_too_much_for_a_layer_lies_outside(backward: float, is_told: bool) -> None:
    # State of 1 GiB, layers that keep 220 MiB, and 300 MiB of activations in each.
    best = changed(
        SAVING_TRIAL, **phases(Phase.BACKWARD, forward=backward, backward=backward, optimizer=1)
    )
    result = make_result(best=best, insights=INSIGHTS)
    found = said(result, LIMITS, "lies outside the layers")
    assert bool(found) is is_told
    if found:
        assert found[0].startswith("At the peak 2.785 GiB at the least is neither state nor kept")
        assert "cross-entropy" in found[0]
    check_traced(result)


@pytest.mark.parametrize("word", ["8-bit", "cross-entropy", "fused=True", "expandable_segments"])
def test_no_remedy_is_named_that_no_figure_asks_for(word: str) -> None:
    assert word not in facts.to_text(explain(RESULTS["prices"]))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ("", "PYTORCH_ALLOC_CONF=expandable_segments:True may win it back."),
        ("expandable_segments:True", "Expandable segments are on already"),
    ],
)
def test_fragmented_memory(settings: str, advice: str) -> None:
    result = RESULTS["accelerator"]
    environment = dataclasses.replace(result.environment, allocator_settings=settings)
    [line] = said(dataclasses.replace(result, environment=environment), LIMITS, "allocator holds")
    assert "6.000 GiB for 5.000 GiB of tensors: 1.000 GiB is lost" in line and advice in line


def test_a_device_with_room_to_spare() -> None:
    [line] = said(RESULTS["accelerator"], LIMITS, "The device has")
    assert line.startswith("The device has 24.00 GiB, 18.00 GiB more than the budget.")
    assert not said(RESULTS["winner"], LIMITS, "The device has")


def test_the_fullest_rank_decides() -> None:
    [line] = said(RESULTS["ranks"], LIMITS, "fullest rank")
    assert line.startswith("The fullest rank peaks at 5.000 GiB, +25.0% against the emptiest")


def test_layers_that_keep_next_to_nothing() -> None:
    [line] = said(RESULTS["plain winner"], LIMITS, "hardly anything is left")
    assert line.startswith("The layers keep 20.0 MiB, 0.5% of the peak's size")


def test_retries_of_the_allocator() -> None:
    result = make_result(best=changed(TRIAL, alloc_retries=3))
    assert said(result, LIMITS, "tried again 3 times")


# --- formats --------------------------------------------------------------------------------------


def test_text_fits_the_width() -> None:
    text = facts.render(explain(RESULTS["prices"]), "text", width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.endswith("as if they were independent.")


def test_markdown_has_a_bullet_per_fact_and_keeps_names_as_they_are() -> None:
    result = make_result(best=TRIAL, study_name="[x](y) <b>")
    text = facts.render(explain(result), "md", width=80)
    facts_count = sum(len(section.facts) for section in explain(result).sections)
    assert len([line for line in text.splitlines() if line.startswith("- ")]) == facts_count
    assert r"\[x\](y) \<b\>" in text


def test_json_and_csv_hold_the_same_figures() -> None:
    explanation = explain(RESULTS["prices"])
    document = json.loads(facts.render(explanation, "json", width=80))
    figures = [f for s in document["sections"] for fact in s["facts"] for f in fact["figures"]]
    rows = list(csv.DictReader(facts.render(explanation, "csv", width=80).splitlines()))
    assert [f["source"] for f in figures] == [row["source"] for row in rows]
    assert figures[0] == {
        "name": "budget",
        "value": 6 * GIB,
        "unit": "bytes",
        "evidence": "given",
        "source": "budget_bytes",
    }
    assert rows[1]["value"] == "0.22" and rows[1]["source"] == "best.step_seconds"


def test_an_old_study_is_explained_as_far_as_it_goes(tmp_path: Path) -> None:
    old = Path(__file__).parent.parent / "study" / "old" / "schema-1.db.gz"
    (tmp_path / "study.db").write_bytes(gzip.decompress(old.read_bytes()))
    result = load_result(tmp_path)
    check_traced(result)
    assert not sentences(explain(result), SAVING)


@pytest.mark.parametrize(("name", "start"), [("text", "Study gpt"), ("json", "{"), ("md", "# S")])
def test_the_command_prints_the_format_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, start: str
) -> None:
    monkeypatch.setattr(cli, "_find_study", lambda study, root, storage: Path(study))
    monkeypatch.setattr(cli.artifacts, "load_result", lambda folder, storage: RESULTS["prices"])

    assert cli.main(["explain", "gpt", "--format", name]) == 0

    assert capsys.readouterr().out.startswith(start)
