"""What a peak is made of: parts that come to it, each the timeline's own, and what is left over."""

from __future__ import annotations

import dataclasses

import pytest
from results import TRIAL, make_result
from scripted import MIB
from tracing import check_traced, sentences

from sac_search.policy import Policy
from sac_search.records import Evidence, Phase
from sac_search.report import facts
from sac_search.report.explain import explain
from sac_search.report.facts import Fact
from sac_search.study.result import SearchResult
from sac_search.study.timelines import PolicyTimeline
from sac_search.timeline import MemoryKind, Timeline

PEAK = "What holds the peak"
LIMITS = "What limits it, and what to do"
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIPPING, Phase.OPTIMIZER)
KINDS = {
    MemoryKind.PARAMETERS: 60,
    MemoryKind.OPTIMIZER: 120,
    MemoryKind.OTHER: 1,
    MemoryKind.SAVED: 500,
    MemoryKind.RECOMPUTED: 200,
    MemoryKind.TEMPORARY: 118,
}


def drawn(
    peak_phase: Phase = Phase.BACKWARD, gradients: tuple[int, ...] = (0, 0, 1, 60, 60), **kinds: int
) -> Timeline:
    """Returns a step of a point in each phase, whose peak holds so many MiB of each kind."""
    index = PHASES.index(peak_phase)
    at_peak = KINDS | {MemoryKind[name.upper()]: mib for name, mib in kinds.items()}
    curves = {
        kind: tuple(mib * MIB if at == index else 0 for at in range(len(PHASES)))
        for kind, mib in at_peak.items()
    }
    curves[MemoryKind.GRADIENTS] = tuple(mib * MIB for mib in gradients)
    return Timeline(
        ops=tuple(range(len(PHASES))),
        phases=PHASES,
        layers=("", "", "h.1" if index == 2 else "", "", ""),
        kind_bytes=curves,
        peak_index=index,
    )


def result_with(timeline: Timeline, **changes: object) -> SearchResult:
    entry = PolicyTimeline(name=TRIAL.name, policy_key=TRIAL.policy.key, timeline=timeline)
    other = PolicyTimeline(name="none", policy_key=Policy().key, timeline=drawn(saved=900))
    return make_result(best=TRIAL, timelines=(other, entry), **changes)


def fact_with(result: SearchResult, word: str) -> Fact:
    facts_told = [f for s in explain(result).sections for f in s.facts]
    (found,) = [fact for fact in facts_told if word in fact.sentence]
    return found


# --- what the peak is made of ---------------------------------------------------------------------


def test_the_parts_are_told_from_the_largest_and_the_small_ones_together() -> None:
    assert fact_with(result_with(drawn()), "A dry run").text == (
        "A dry run has its highest point, 1000.0 MiB, in backward, h.1: 500.0 MiB (50%) of saved "
        "activations, 200.0 MiB (20%) of recompute working set, 120.0 MiB (12%) of optimizer "
        "state, 118.0 MiB (12%) of temporaries, 60.0 MiB (6.0%) of parameters, 2.0 MiB (0.2%) of "
        "the rest: batch and other, gradients (believed)."
    )


@pytest.mark.parametrize("phase", PHASES)
def test_the_parts_come_to_the_peak_and_their_shares_to_one(phase: Phase) -> None:
    timeline = drawn(phase)
    figures = {
        f.name: f.quantity.value for f in fact_with(result_with(timeline), "A dry run").figures
    }
    parts = [value for name, value in figures.items() if name.startswith("part")]
    shares = [value for name, value in figures.items() if name.startswith("share")]
    assert sum(parts) == figures["peak"] == timeline.peak_bytes
    assert sum(shares) == pytest.approx(1)
    check_traced(result_with(timeline))


def test_of_a_forecast_it_is_a_forecast() -> None:
    assert TRIAL.measurement is not None
    forecast = dataclasses.replace(TRIAL.measurement, evidence=Evidence.FORECAST)
    best = dataclasses.replace(
        TRIAL, outcome=dataclasses.replace(TRIAL.outcome, measurement=forecast)
    )
    result = dataclasses.replace(result_with(drawn()), best=best, evidence=Evidence.FORECAST)
    assert fact_with(result, "A dry run").sentence.endswith("(forecast).")


def test_a_dry_run_that_peaks_in_another_phase_says_so() -> None:
    advice = fact_with(result_with(drawn(Phase.LOSS)), "A dry run").advice
    assert advice.startswith("What was measured peaks in another phase")
    assert not fact_with(result_with(drawn()), "A dry run").advice


def test_without_a_timeline_of_the_policy_nothing_is_said_of_parts() -> None:
    without = dataclasses.replace(
        result_with(drawn()), timelines=result_with(drawn()).timelines[:1]
    )
    told = facts.to_text(explain(without))
    assert "highest point" not in told and "zero_grad" not in told


def test_where_nothing_fits_it_is_the_smallest_peak_that_is_taken_apart() -> None:
    result = result_with(drawn())
    smallest = next(c for c in result.candidates if c.name == "full")
    entry = PolicyTimeline(name="full", policy_key=smallest.policy.key, timeline=drawn(saved=100))
    result = dataclasses.replace(result, best=None, budget_bytes=MIB, timelines=(entry,))
    assert "100.0 MiB (17%) of saved activations" in fact_with(result, "A dry run").sentence
    check_traced(result)


# --- gradients of the step before -----------------------------------------------------------------


def test_gradients_that_are_gone_are_not_to_be_freed() -> None:
    result = result_with(drawn())
    assert sentences(explain(result), PEAK)[2] == (
        "When the step begins 0.0 MiB of gradients are left from the step before: "
        "zero_grad(set_to_none=True) has nothing more to free (believed)."
    )
    assert not [text for text in sentences(explain(result), LIMITS) if "zero_grad" in text]


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        (Phase.FORWARD, "lowers the peak as far as no other moment is as high"),
        (Phase.LOSS, "lowers the peak as far as no other moment is as high"),
        (Phase.BACKWARD, "the ones that are made later are spared"),
        (Phase.CLIPPING, "would not lower the peak"),
        (Phase.OPTIMIZER, "would not lower the peak"),
    ],
)
def test_gradients_that_are_left_are_judged_by_the_phase_of_the_peak(
    phase: Phase, advice: str
) -> None:
    result = result_with(drawn(phase, gradients=(60, 60, 60, 60, 60)))
    told = [text for text in sentences(explain(result), LIMITS) if "zero_grad" in text]
    assert len(told) == 1 and advice in told[0]
    assert told[0].startswith("When the step begins 60.0 MiB of gradients are alive, left from")
    assert "there are 60.0 MiB (believed)" in told[0]
    check_traced(result)


def test_a_step_without_gradients_says_nothing_of_them() -> None:
    assert "zero_grad" not in facts.to_text(explain(result_with(drawn(gradients=(0,) * 5))))


# --- the optimizer's state ------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "is_told"), [(120, True), (10, False)])
def test_state_is_told_as_the_timeline_has_it(mib: int, is_told: bool) -> None:
    # The floor is most of the peak, which is when state is worth a remedy.
    result = result_with(drawn(optimizer=mib), floor_bytes=4 * 2**30)
    told = [text for text in sentences(explain(result), LIMITS) if "8-bit" in text]
    assert bool(told) is is_told
    if told:
        assert told[0].startswith(
            "The optimizer keeps 120.0 MiB from step to step, 12% of the highest point of a dry run"
        )
    check_traced(result)
