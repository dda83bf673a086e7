"""What people read: the rows of each table and the sentences for each ending."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import BITWISE, FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from scripted import (
    CONVOLUTION_OPS,
    make_candidate,
    make_failed,
    make_layers,
    make_op,
    make_outcome,
    other_environment,
)

from sac_search import units
from sac_search.failures import make_failure
from sac_search.policy import Compiled, Policy
from sac_search.records import Evidence, FailureKind, Outcome
from sac_search.report import rows
from sac_search.report.comparison import side_of
from sac_search.report.summary import cards
from sac_search.study.baselines import COMPILE, FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.worker.session import Verdict

# --- the table of candidates ----------------------------------------------------------------------


def test_there_is_a_row_per_baseline_and_one_for_the_winner() -> None:
    failed = Candidate(
        name="save matmul",
        policy=TRIAL.policy,
        outcome=make_failed(),
        step_seconds=None,
        is_baseline=True,
    )
    other_trial = make_candidate("trial 6", policy=TRIAL.policy)

    found = rows.candidate_rows(
        make_result(NONE_CANDIDATE, FULL_CANDIDATE, failed, other_trial, TRIAL, best=TRIAL)
    )

    assert found == [
        rows.CandidateRow(
            name="none",
            description="no checkpointing",
            step="200.0 ms ±0.4%",
            overhead="+0.0%",
            peak="8.000 GiB",
            verdict="over",
        ),
        rows.CandidateRow(
            name="full",
            description="2 layers: recompute all",
            step="260.0 ms ±0.6%",
            overhead="+30.0%",
            peak="4.000 GiB",
            verdict="fits",
        ),
        rows.CandidateRow(
            name="save matmul",
            description="2 layers: save matmul",
            step="–",
            overhead="–",
            peak="–",
            verdict="out of memory",
        ),
        rows.CandidateRow(
            name="best (trial 7)",
            description="2 layers: save matmul",
            step="220.0 ms ±0.0%",
            overhead="+10.0%",
            peak="5.000 GiB",
            verdict="fits",
            is_best=True,
        ),
    ]


def test_without_the_step_without_checkpointing_there_is_no_overhead() -> None:
    failed = Candidate(
        name=NONE, policy=Policy(), outcome=make_failed(), step_seconds=None, is_baseline=True
    )

    found = rows.candidate_rows(make_result(failed, FULL_CANDIDATE, best=FULL_CANDIDATE))

    assert [row.overhead for row in found] == ["–", "–", "–"]
    assert [row.name for row in found] == ["none", "full", "best (full)"]


# --- the headline of each ending ------------------------------------------------------------------


def test_a_winner_is_held_against_full_and_no_checkpointing() -> None:
    assert rows.headline(make_result(best=TRIAL)) == [
        "2 layers: save matmul: 220.0 ms per step, peak 5.000 GiB of 6.000 GiB.",
        "Against full checkpointing: step time -15.4%, peak +25.0%.",
        "Against no checkpointing: step time +10.0%, peak -37.5%.",
        "Loss and every gradient are bitwise those of no checkpointing.",
    ]


@pytest.mark.parametrize(
    ("overhead_seconds", "expected"),
    [
        (0.01, "Within 4.8% of the planner's bound, 210.0 ms: no policy"),
        (0.0201, "At the planner's bound, 220.1 ms: no policy"),
    ],
)
def test_a_winner_is_held_against_the_bound(overhead_seconds: float, expected: str) -> None:
    result = make_result(best=TRIAL, bound_overhead_seconds=overhead_seconds)
    (line,) = (line for line in rows.headline(result) if "bound" in line)
    assert line.startswith(expected)
    assert "if ops cost what the measured steps say" in line
    forecast = make_result(
        best=TRIAL, bound_overhead_seconds=overhead_seconds, evidence=Evidence.FORECAST
    )
    assert any("if ops cost what the rates say" in line for line in rows.headline(forecast))


def test_of_a_bound_that_is_beaten_nothing_is_claimed() -> None:
    result = make_result(best=TRIAL, bound_overhead_seconds=0.03)
    (line,) = (line for line in rows.headline(result) if "bound" in line)
    assert line == (
        "Faster than the planner's bound, 230.0 ms, by 4.3%: what it takes ops to cost is rough, "
        "so it cannot tell what is left to find."
    )
    [card] = [card for card in cards(result) if "bound" in card.label]
    assert (card.value, card.note) == (
        "–",
        "4.3% faster than the planner's 230.0 ms: its costs are rough",
    )


def test_a_bound_that_is_beaten_within_the_noise_is_reached() -> None:
    noisy = make_candidate(
        "trial 7", policy=TRIAL.policy, seconds=0.22, peak_bytes=5 * GIB, noise=0.05
    )
    result = make_result(best=noisy, bound_overhead_seconds=0.03)
    assert any(
        line.startswith("At the planner's bound, 230.0 ms: no") for line in rows.headline(result)
    )


def test_what_other_studies_measured_is_counted_apart() -> None:
    imported = dataclasses.replace(FULL_CANDIDATE, imported_from="gpt-5gib")
    lines = rows.closing_lines(make_result(NONE_CANDIDATE, imported, TRIAL, best=TRIAL))
    assert lines[0] == (
        "Stopped after 2 baselines and 1 trial, 1 of them measured by other studies: "
        "3 trials measured (--trials 3)."
    )


def test_a_forecast_says_that_it_is_one() -> None:
    result = make_result(best=TRIAL, evidence=Evidence.FORECAST, verification=None)
    assert any(line.startswith("This is a forecast: no step") for line in rows.headline(result))
    closing = rows.closing_lines(result)
    assert closing[0] == "Forecast 3 policies for paper."
    assert closing[-1].startswith("To measure: the same command on that device")


def test_a_winner_is_not_held_against_itself_or_against_what_failed() -> None:
    failed = Candidate(
        name=NONE, policy=Policy(), outcome=make_failed(), step_seconds=None, is_baseline=True
    )

    found = rows.headline(make_result(failed, FULL_CANDIDATE, best=FULL_CANDIDATE))

    assert found == [
        "2 layers: recompute all: 260.0 ms per step, peak 4.000 GiB of 6.000 GiB.",
        "Loss and every gradient are bitwise those of no checkpointing.",
    ]


def test_a_budget_that_does_not_bind() -> None:
    assert rows.headline(make_result(best=NONE_CANDIDATE, budget_bytes=9 * GIB)) == [
        "No checkpointing needed: the step without it peaks at 8.000 GiB, under the budget of "
        "9.000 GiB.",
        "The budget does not bind. Between 4.000 GiB (every layer checkpointed) and 8.000 GiB it "
        "would, for example: --budget-gb 6",
    ]


def test_a_budget_that_does_not_bind_when_full_checkpointing_failed() -> None:
    found = rows.headline(make_result(NONE_CANDIDATE, best=NONE_CANDIDATE))

    assert len(found) == 1 and found[0].startswith("No checkpointing needed")


def test_no_budget_binds_when_checkpointing_does_not_help() -> None:
    full = make_candidate(FULL, policy=FULL_CANDIDATE.policy, peak_bytes=8 * GIB, is_baseline=True)

    found = rows.headline(make_result(NONE_CANDIDATE, full, best=NONE_CANDIDATE))

    assert found[1] == (
        "Checkpointing every layer does not lower the peak, so no budget would bind."
    )


@given(st.integers(1, 200 * GIB), st.integers(2, 10 * GIB))
def test_the_budget_that_is_suggested_lies_between_the_two_peaks(low: int, width: int) -> None:
    full = make_candidate(FULL, policy=FULL_CANDIDATE.policy, peak_bytes=low, is_baseline=True)
    none = make_candidate(NONE, policy=Policy(), peak_bytes=low + width, is_baseline=True)

    line = rows.headline(make_result(none, full, best=none))[1]

    suggested = units.gib_to_bytes(float(line.split("--budget-gb ")[1]))
    assert low <= suggested <= low + width


def test_nothing_fits() -> None:
    assert rows.headline(make_result(budget_bytes=3 * GIB)) == ["No policy fits 3.000 GiB."]


def test_what_fits_and_is_not_verified_is_told() -> None:
    assert rows.headline(make_result()) == [
        "No policy is verified yet. The fastest so far that fits 6.000 GiB is trial 7: 220.0 ms "
        "per step, peak 5.000 GiB."
    ]
    assert rows.headline(make_result(rejected=("trial 7: wrong gradients",))) == [
        "No policy that fits 6.000 GiB has passed verification."
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "none verified yet"),
        ({"budget_bytes": 3 * GIB}, "nothing fits"),
        ({"rejected": ("trial 7: wrong gradients",)}, "none verified"),
    ],
)
def test_why_there_is_no_winner_is_told_in_a_cell(changes: dict[str, Any], words: str) -> None:
    result = make_result(**changes)
    assert rows.lack_of_winner(result) == words
    assert side_of(result).lack == words
    nothing = dataclasses.replace(result, candidates=())
    assert rows.lack_of_winner(nothing) == "nothing tried yet"


def test_a_study_without_step_times_can_be_listed() -> None:
    untimed = dataclasses.replace(TRIAL, step_seconds=None)
    assert rows.lack_of_winner(make_result(untimed)) == "nothing fits"
    assert rows.headline(make_result(untimed)) == ["No policy fits 6.000 GiB."]


def test_a_search_that_was_not_begun_or_not_ended_is_not_called_stopped() -> None:
    result = make_result(stop_reason="")
    assert rows.closing_lines(result)[0] == (
        "So far 2 baselines and 1 trial: the search has not ended, or was killed."
    )
    nothing = dataclasses.replace(result, candidates=())
    assert rows.headline(nothing) == ["Nothing was tried yet for 6.000 GiB."]


def test_interrupted_before_anything_was_found() -> None:
    found = rows.headline(make_result(interrupted=True, stop_reason="interrupted"))

    assert found == ["Interrupted before a policy that fits 6.000 GiB was found and verified."]


def test_an_interrupted_search_with_a_winner_is_told_like_any_other() -> None:
    assert rows.headline(make_result(best=TRIAL, interrupted=True)) == rows.headline(
        make_result(best=TRIAL)
    )


# --- the closing lines ----------------------------------------------------------------------------


def test_the_closing_lines_say_why_where_and_what_next() -> None:
    found = rows.closing_lines(make_result(best=TRIAL, rejected=("trial 5: wrong gradients",)))

    assert found == [
        "Stopped after 2 baselines and 1 trial: 3 trials measured (--trials 3).",
        "Clock: processor time of one process (--clock wall for elapsed time).",
        "Rejected: trial 5: wrong gradients",
        "Files: studies/gpt/policy.py, studies/gpt/result.json, studies/gpt/study.db",
        "Next: copy studies/gpt/policy.py beside your training script; import policy; "
        "policy.apply(model)",
    ]


def test_what_was_ruled_out_by_forecast_is_counted_apart() -> None:
    ruled_out = Candidate(
        name="trial 8",
        policy=TRIAL.policy,
        outcome=make_failed(FailureKind.FORECAST_OVER_BUDGET),
        step_seconds=None,
    )

    found = rows.closing_lines(
        make_result(NONE_CANDIDATE, FULL_CANDIDATE, TRIAL, ruled_out, ruled_out)
    )

    assert found[0] == (
        "Stopped after 2 baselines and 1 trial, 2 more ruled out by forecast: "
        "3 trials measured (--trials 3)."
    )


def test_every_way_to_fail_is_counted_and_explained() -> None:
    failed = [
        dataclasses.replace(TRIAL, outcome=make_failed(kind))
        for kind in (FailureKind.TIMEOUT, FailureKind.CRASH, FailureKind.TIMEOUT)
    ]

    found = rows.closing_lines(make_result(NONE_CANDIDATE, FULL_CANDIDATE, TRIAL, *failed))

    assert found[2:4] == [
        "Failed, timeout: 2. The step took far longer than the baselines; see --trial-timeout.",
        "Failed, worker crashed: 1. The process that ran the step died; its log has the last "
        "words.",
    ]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, []),
        ({"alloc_retries": 2}, ["The allocator freed its cache and tried again 2 times"]),
        ({"reserved_bytes": 11 * GIB, "allocated_bytes": 10 * GIB}, []),
        (
            {"reserved_bytes": 12 * GIB, "allocated_bytes": 10 * GIB},
            ["The allocator holds 12.00 GiB for 10.00 GiB of tensors: memory is fragmented"],
        ),
        ({"reserved_bytes": 2 * 2**20, "allocated_bytes": 2**20}, []),
    ],
)
def test_the_allocators_troubles_are_said(figures: dict[str, int], expected: list[str]) -> None:
    measurement = dataclasses.replace(TRIAL.measurement, **figures)
    best = dataclasses.replace(
        TRIAL, outcome=dataclasses.replace(TRIAL.outcome, measurement=measurement)
    )

    found = rows.closing_lines(make_result(NONE_CANDIDATE, FULL_CANDIDATE, best, best=best))

    told = [line for line in found if line.startswith("The allocator")]
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected


def test_without_a_winner_there_is_nothing_to_copy() -> None:
    found = rows.closing_lines(
        make_result(NONE_CANDIDATE, environment=other_environment(clock="wall"))
    )

    assert found == [
        "Stopped after 1 baseline and 0 trials: 3 trials measured (--trials 3).",
        "Clock: elapsed time.",
    ]


# --- verification ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "Loss and every gradient are bitwise those of no checkpointing."),
        (
            {"reference": "full", "note": "Mind the buffers."},
            "Loss and every gradient are bitwise those of full checkpointing. Mind the buffers.",
        ),
        (
            {"bitwise": False, "worst_gradient_difference": 3e-6},
            "Loss and gradients agree with no checkpointing within 1e-04 (worst 3.0e-06).",
        ),
        (
            {
                "passed": False,
                "bitwise": False,
                "worst_gradient_difference": 0.5,
                "worst_parameter": "h.0.weight",
                "loss_difference": 0.25,
            },
            "The gradients are not those of no checkpointing: h.0.weight is off by 5.0e-01 of its "
            "largest value, the loss by 2.5e-01.",
        ),
    ],
)
def test_a_verification_in_a_sentence(changes: dict[str, Any], line: str) -> None:
    assert rows.describe_verification(dataclasses.replace(BITWISE, **changes)) == line


def test_a_policy_file_is_verified_and_measured() -> None:
    outcome = make_outcome(seconds=1.1, peak_bytes=GIB, noise=0.01)
    wrong = dataclasses.replace(BITWISE, passed=False, bitwise=False, worst_parameter="w")

    right = rows.verification_lines(Verdict(verification=BITWISE), outcome)
    failed = rows.verification_lines(Verdict(verification=wrong), outcome)

    assert right == [
        "Verification passed. Loss and every gradient are bitwise those of no checkpointing.",
        "Peak 1.000 GiB (in backward), 1100.0 ms per step ±1.0%, +10.0% against full "
        "checkpointing.",
    ]
    assert failed[0].startswith("Verification FAILED. The gradients are not those of")


def test_a_policy_file_that_does_not_run() -> None:
    failure = make_failure(FailureKind.CRASH, "exit code 3")

    both = rows.verification_lines(Verdict(failure=failure), make_failed())
    measured = rows.verification_lines(Verdict(verification=BITWISE), make_failed())

    assert both == [f"FAILED: worker crashed. {failure.advice}", "exit code 3"]
    assert measured[1].startswith("Not measured: out of memory. The device ran out")


# --- the trace ------------------------------------------------------------------------------------


def test_a_trace_has_a_row_per_kind_and_op_with_what_decides_about_it() -> None:
    quick = make_layers(1, [make_op("aten.mm.default", milliseconds=1, mib=3)])
    slow = make_layers(1, [make_op("aten.mm.default", milliseconds=3, mib=3)], prefix="g")
    stages = make_layers(2, CONVOLUTION_OPS, kind="Stage", prefix="s")

    found = rows.op_rows([*quick, *slow, *stages])

    assert found[0] == rows.OpRow(
        kind="Block",
        op="aten.mm.default",
        op_class="matmul",
        calls=1,
        mib=3.0,
        milliseconds=2.0,
        saved_by="save.matmul",
        savable=True,
    )
    assert [(row.kind, row.op_class, row.saved_by) for row in found[1:]] == [
        ("Stage", "convolution", "save.convolution"),
        ("Stage", "normalization", "no: its output is changed in place later"),
        ("Stage", "activation", "save.activation"),
        ("Stage", "elementwise", "no: changes its input in place"),
    ]


def test_a_view_is_called_a_view() -> None:
    layers = make_layers(1, [make_op("aten.view.default", view=True)])

    assert rows.op_rows(layers)[0].op_class == "view"


def test_layers_are_named_by_kind() -> None:
    layers = [*make_layers(3), *make_layers(1, kind="Stage", prefix="s")]

    assert rows.layer_lines(layers) == [
        "Block: 3 layers (h.0 … h.2), 1,000 parameters and 2.0 MiB of inputs each",
        "Stage: 1 layer (s.0), 1,000 parameters and 2.0 MiB of inputs each",
    ]


# --- compiled -------------------------------------------------------------------------------------


def compiled(candidate: Candidate, name: str, seconds: float, *reasons: str) -> Candidate:
    assert candidate.measurement is not None
    measurement = dataclasses.replace(
        candidate.measurement, compile_seconds=seconds, recompiles=reasons
    )
    return dataclasses.replace(
        candidate,
        name=name,
        policy=dataclasses.replace(candidate.policy, compiled=Compiled()),
        outcome=Outcome(measurement=measurement),
    )


COMPILE_CANDIDATE = compiled(NONE_CANDIDATE, COMPILE, 40.0)
COMPILED_TRIAL = compiled(TRIAL, "trial 9", 20.0, "size mismatch")


def test_a_compiled_winner_is_held_against_compile_alone() -> None:
    result = make_result(
        NONE_CANDIDATE, FULL_CANDIDATE, COMPILE_CANDIDATE, COMPILED_TRIAL, best=COMPILED_TRIAL
    )
    lines = rows.headline(result)
    assert lines[0].startswith("compiled, 2 layers: save matmul: 220.0 ms per step")
    assert "Against compile alone: step time +10.0%, peak -37.5%." in lines
    closing = rows.closing_lines(result)
    assert (
        "Compiling took 1m 00s for 2 policies, 40s at the most; no step's time has any of it."
    ) in closing
    assert any(line.startswith("trial 9 was compiled once more") for line in closing)
    assert any("(size mismatch)" in line for line in closing)
    assert closing[-1].endswith("policy.apply(model) in place of torch.compile")


def test_one_compiled_policy_is_one() -> None:
    result = make_result(NONE_CANDIDATE, FULL_CANDIDATE, COMPILED_TRIAL, best=COMPILED_TRIAL)
    assert any("20s for 1 policy, 20s at" in line for line in rows.closing_lines(result))


def test_where_nothing_is_compiled_nothing_is_said_of_it() -> None:
    result = make_result(best=TRIAL)
    text = " ".join([*rows.headline(result), *rows.closing_lines(result)])
    assert "ompil" not in text


@pytest.mark.parametrize(
    ("reference", "words"),
    [("compile", "compile alone"), ("compile, full", "compile with full checkpointing")],
)
def test_a_compiled_reference_is_named(reference: str, words: str) -> None:
    found = dataclasses.replace(BITWISE, reference=reference)
    line = f"Loss and every gradient are bitwise those of {words}."
    assert rows.describe_verification(found) == line
