"""What is proposed: policies that could be the fastest, by all that was measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted import MIB, make_candidate, make_failed
from test_planning import TWO_KINDS, Paper, one_tier_choices

from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.space import LayerChoiceMode
from sac_search.study import advisor as advisor_module
from sac_search.study.advisor import Advisor
from sac_search.study.candidate import Candidate

BUDGET_BYTES = 150 * MIB


def make_advisor(
    paper: Paper, budget_bytes: int = BUDGET_BYTES, *, greedy: bool = False
) -> Advisor:
    return Advisor(
        space=paper.space,
        profile=paper.profile,
        dry_run=paper.dry_run,
        budget_bytes=budget_bytes,
        greedy=greedy,
    )


def measured(paper: Paper, policy: Policy, name: str = "trial 1", **changes: object) -> Candidate:
    """Returns a policy with its true figures."""
    outcome = paper.measurer.measure(policy)
    seconds = paper.measurer.step_seconds(policy)
    candidate = Candidate(name=name, policy=policy, outcome=outcome, step_seconds=seconds)
    return dataclasses.replace(candidate, **changes)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- proposals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LayerChoiceMode)
def test_the_first_proposal_is_the_optimum_by_the_most_likely_costs(mode: LayerChoiceMode) -> None:
    paper = Paper(tiers=1, mode=mode)
    advisor = make_advisor(paper)
    ends = [measured(paper, Policy()), measured(paper, paper.measurer.full)]
    advisor.learn(ends)

    planned, assignment = advisor.plan(), advisor.propose({}, generator())

    assert planned is not None and assignment is not None
    assert paper.space.policy_for(assignment).key == planned.policy.key
    policies = [paper.space.policy_of(choices) for choices in one_tier_choices(paper.profile)]
    optimum = min(
        paper.measurer.step_seconds(policy)
        for policy in policies
        if paper.measurer.peak_bytes(policy) <= BUDGET_BYTES
    )
    # The traced seconds are the true ones here; what a policy function costs is a guess.
    assert paper.measurer.step_seconds(planned.policy) <= 1.005 * optimum


def test_proposals_are_never_among_the_known() -> None:
    paper = Paper(layers=TWO_KINDS)
    advisor, draws = make_advisor(paper), generator()
    known: dict[str, Candidate] = {}
    for number in range(12):
        assignment = advisor.propose(known, draws)
        if assignment is None:
            break
        assert assignment.keys() == {d.name for d in paper.space.decisions}
        policy = paper.space.policy_for(assignment)
        assert policy.key not in known
        # What it was dry-run to need may be over by what forecasts were seen to be off.
        assert paper.measurer.peak_bytes(policy) <= 1.05 * BUDGET_BYTES
        known[policy.key] = measured(paper, policy, f"trial {number}")
        advisor.learn(known.values())
    assert len(known) >= 6


def test_draws_differ_and_the_same_draws_agree() -> None:
    paper = Paper()
    first = make_advisor(paper).propose({}, generator())
    assert first is not None
    known = {paper.space.policy_for(first).key}

    def drawn(seed: int) -> dict[str, int] | None:
        found = make_advisor(Paper()).propose(known, generator(seed))
        return None if found is None else dict(found)

    found = [drawn(seed) for seed in range(8)]
    assert None not in found
    assert found == [drawn(seed) for seed in range(8)]
    assert len({tuple(sorted(f.items())) for f in found if f is not None}) > 2


def test_nothing_is_proposed_where_every_draw_leads_to_what_is_known() -> None:
    class All:
        def __contains__(self, key: object) -> bool:
            return True

    paper = Paper()
    assert make_advisor(paper).propose(All(), generator()) is None


def test_nothing_is_proposed_where_nothing_can_be_planned() -> None:
    paper = Paper()
    for advisor in (make_advisor(paper, 10 * MIB), make_advisor(Paper(forecast_factor=1.0), MIB)):
        assert advisor.plan() is None
        assert advisor.propose({}, generator()) is None
        assert advisor.bound_seconds() is None
    blind = Advisor(
        space=paper.space,
        profile=paper.profile,
        dry_run=lambda policy: None,
        budget_bytes=BUDGET_BYTES,
    )
    assert blind.propose({}, generator()) is None


def test_a_part_of_the_budget() -> None:
    paper = Paper()
    advisor = make_advisor(paper)
    seconds = []
    for fraction in (0.8, 1.0, 1.2):
        planned = advisor.plan(fraction)
        assert planned is not None
        assert planned.peak_bytes <= fraction * BUDGET_BYTES
        seconds.append(planned.overhead_seconds)
    assert seconds[0] > seconds[1] > seconds[2]


def test_the_bound_is_under_the_plan() -> None:
    paper = Paper(layers=TWO_KINDS)
    advisor = make_advisor(paper)
    planned, bound_seconds = advisor.plan(), advisor.bound_seconds()
    assert planned is not None and bound_seconds is not None
    assert 0 < bound_seconds <= planned.overhead_seconds


def test_the_greedy_one_does_not_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError

    exact = make_advisor(Paper()).plan()
    monkeypatch.setattr(advisor_module, "solve", refuse)
    greedy = make_advisor(Paper(), greedy=True).plan()

    assert exact is not None and greedy is not None
    assert greedy.peak_bytes <= BUDGET_BYTES
    assert greedy.overhead_seconds >= exact.overhead_seconds - 1e-9
    with pytest.raises(AssertionError):
        make_advisor(Paper()).plan()


# --- learning -------------------------------------------------------------------------------------


def price_of(advisor: Advisor, label: str, paper: Paper) -> float:
    (kind,), (prices,) = paper.profile.kinds, advisor._costs.prices()
    return prices.label_seconds[kind.labels.index(label)]


@pytest.mark.parametrize("imported_from", [None, "another study"])
@pytest.mark.parametrize("is_baseline", [False, True])
def test_measured_steps_teach_prices(imported_from: str | None, is_baseline: bool) -> None:
    paper = Paper()
    advisor = make_advisor(paper)
    before = price_of(advisor, "attention", paper)
    layers = paper.profile.layers
    twice = [
        measured(paper, Policy()),
        measured(paper, checkpoint_layers(layers), is_baseline=is_baseline),
    ]
    slow = dataclasses.replace(
        twice[1], step_seconds=2 * twice[1].step_seconds, imported_from=imported_from
    )

    advisor.learn([twice[0], slow])

    assert price_of(advisor, "attention", paper) > 2 * before
    # Each time anew: what is gone is forgotten.
    advisor.learn([])
    assert price_of(advisor, "attention", paper) == before


def test_baselines_outside_of_the_space_teach_as_well() -> None:
    paper = Paper()
    advisor = make_advisor(paper)
    ends = [measured(paper, Policy()), measured(paper, paper.measurer.full)]
    through = checkpoint_layers(paper.profile.layers, Tier(through_policy=True))
    full_seconds = paper.measurer.step_seconds(paper.measurer.full)
    dear = measured(paper, through, "recompute all (policy)", step_seconds=full_seconds + 0.006)

    advisor.learn(ends)
    (before,) = advisor._costs.prices()
    advisor.learn([*ends, dear])
    (after,) = advisor._costs.prices()

    # A millisecond in each of six layers: four times the guess, so it is half believed.
    assert before.policy_seconds < 0.0003
    assert 0.0006 < after.policy_seconds < 0.001


def test_what_did_not_run_or_counts_calls_teaches_nothing() -> None:
    paper = Paper()
    advisor = make_advisor(paper)
    layers = paper.profile.layers
    failed = Candidate(
        name="trial 1", policy=paper.measurer.full, outcome=make_failed(), step_seconds=None
    )
    counting = make_candidate(
        "torchtitan rule",
        policy=checkpoint_layers(
            layers, Tier(ops=("aten.addmm.default",), every_second_matmul=True)
        ),
        seconds=77.0,
    )
    (before,) = advisor._costs.prices()

    advisor.learn([failed, counting])

    assert advisor._costs.prices() == (before,)
    assert advisor.plan() is not None


def test_a_device_that_reserves_more_leaves_less_for_the_plan() -> None:
    paper = Paper(forecast_factor=0.8)  # a quarter more is reserved than was forecast
    advisor = make_advisor(paper)
    before = advisor.plan()
    ends = [measured(paper, Policy()), measured(paper, paper.measurer.full)]
    advisor.learn(ends)
    after = advisor.plan()
    assert before is not None and after is not None
    assert before.peak_bytes > 0.9 * BUDGET_BYTES
    assert paper.measurer.peak_bytes(before.policy) > BUDGET_BYTES
    assert paper.measurer.peak_bytes(after.policy) <= 1.001 * BUDGET_BYTES
    # Steps without a forecast say nothing of it.
    blind = [
        dataclasses.replace(c, outcome=dataclasses.replace(c.outcome, forecast_peak_bytes=None))
        for c in ends
    ]
    advisor.learn(blind)
    again = advisor.plan()
    assert again is not None
    assert paper.measurer.peak_bytes(again.policy) > BUDGET_BYTES
