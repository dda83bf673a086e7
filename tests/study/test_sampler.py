"""The planner as a sampler of Optuna's: its conformance suites, and what is asked of whom."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.testing import pytest_samplers as conformance
from scripted import BLOCK_OPS, MIB, make_layers
from test_planning import Paper

from sac_search.space import (
    Assignment,
    Decision,
    DecisionType,
    LayerChoiceMode,
    RunMode,
    SearchSpace,
    build_space,
)
from sac_search.study.advisor import Advisor
from sac_search.study.sampler import (
    PlannerSampler,
    Propose,
    SamplerName,
    assignment_in,
    distribution_of,
    make_sampler,
    parameters_of,
    suggest,
    suggest_assignment,
)

BUDGET_BYTES = 150 * MIB
SPACE = build_space(make_layers(3, BLOCK_OPS), tiers=2)
DECISIONS = SPACE.decisions
PAPER = Paper()


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


# --- Optuna's own suites --------------------------------------------------------------------------


class Planning:
    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        paper = PAPER
        advisor = Advisor(
            space=paper.space,
            profile=paper.profile,
            dry_run=paper.dry_run,
            budget_bytes=BUDGET_BYTES,
        )
        known: dict[str, None] = {}
        return lambda: PlannerSampler(
            paper.space.decisions, lambda generator: advisor.propose(known, generator), seed=0
        )


class TestBasics(Planning, conformance.BasicSamplerTestCase):
    pass


class TestRelativeSampling(Planning, conformance.RelativeSamplerTestCase):
    pass


class TestSeveralObjectives(Planning, conformance.MultiObjectiveSamplerTestCase):
    pass


# --- what is asked of whom ------------------------------------------------------------------------


def zeros(**values: int) -> dict[str, int]:
    changes = {name.replace("__", "."): value for name, value in values.items()}
    return {d.name: 0 for d in DECISIONS} | changes


class Asked:
    """Proposes what it was told to, and counts."""

    def __init__(self, proposal: Assignment | None = None) -> None:
        self.proposal = proposal
        self.draws: list[float] = []

    def __call__(self, generator: np.random.Generator) -> Assignment | None:
        self.draws.append(float(generator.random()))
        return self.proposal


def study_of(propose: Propose, seed: int = 0) -> optuna.Study:
    return optuna.create_study(sampler=PlannerSampler(DECISIONS, propose, seed))


def ask(study: optuna.Study) -> dict[str, int]:
    trial = study.ask()
    found = {decision.name: suggest(trial, decision) for decision in DECISIONS}
    study.tell(trial, 1.0)
    return found


def test_a_trial_is_what_was_proposed() -> None:
    proposal = zeros(save__matmul=1, tier2__save__attention=1, layers__Block=2)
    asked = Asked(proposal)
    study = study_of(asked)

    assert ask(study) == proposal
    assert ask(study) == proposal
    assert len(asked.draws) == 2
    assert study.trials[0].params == parameters_of(DECISIONS, proposal)
    # Yes and no, not one and zero.
    distributions = {decision.name: distribution_of(decision) for decision in DECISIONS}
    values = study.sampler.sample_relative(study, study.trials[0], distributions)
    assert values["save.matmul"] is True
    assert values["save.attention"] is False


def test_enqueued_trials_do_not_ask() -> None:
    asked = Asked(zeros())
    study = study_of(asked)
    assignment = zeros(save__matmul=1, layers__Block=3)
    study.enqueue_trial(parameters_of(DECISIONS, assignment))

    assert ask(study) == assignment
    assert asked.draws == []
    assert ask(study) == zeros()
    assert len(asked.draws) == 1


def test_what_an_enqueued_trial_leaves_open_is_drawn() -> None:
    asked = Asked(zeros())
    study = study_of(asked)
    for _ in range(10):
        study.enqueue_trial({"layers.Block": 3})

    found = [ask(study) for _ in range(10)]

    assert asked.draws == []
    assert {f["layers.Block"] for f in found} == {3}
    assert len({f["save.matmul"] for f in found}) == 2


def test_without_a_proposal_all_is_drawn_at_random() -> None:
    asked = Asked(None)
    study = study_of(asked)

    found = [ask(study) for _ in range(40)]

    assert len(asked.draws) == 40
    for decision in DECISIONS:
        values = {f[decision.name] for f in found}
        assert values == set(range(decision.highest + 1)), decision.name


def test_variables_of_another_space_are_drawn_at_random() -> None:
    asked = Asked(zeros())
    study = study_of(asked)

    values = {study.ask({"x": IntDistribution(0, 3)}).params["x"] for _ in range(30)}
    fewer = {DECISIONS[0].name: distribution_of(DECISIONS[0])}
    part = study.sampler.sample_relative(study, study.get_trials()[0], fewer)

    assert values == {0, 1, 2, 3}
    assert part.keys() == fewer.keys()
    assert study.sampler.sample_relative(study, study.get_trials()[0], {}) == {}
    # Once for each trial, since the decisions are its own whatever else it draws.
    assert len(asked.draws) == 30


@pytest.mark.parametrize("proposal", [None, zeros(layers__Block=1)])
def test_samplers_of_one_seed_agree(proposal: Assignment | None) -> None:
    def drawn(seed: int) -> tuple[list[float], list[dict[str, int]]]:
        asked = Asked(proposal)
        study = study_of(asked, seed)
        found = [ask(study) for _ in range(6)]
        return asked.draws, found

    assert drawn(7) == drawn(7)
    assert drawn(7)[0] != drawn(8)[0]
    assert (drawn(7)[1] != drawn(8)[1]) == (proposal is None)


def test_reseeding_makes_copies_differ() -> None:
    def drawn(*, reseed: bool) -> tuple[list[float], list[dict[str, int]]]:
        asked = Asked(None)
        study = study_of(asked)
        if reseed:
            study.sampler.reseed_rng()
        found = [ask(study) for _ in range(6)]
        return asked.draws, found

    assert drawn(reseed=False) == drawn(reseed=False)
    first, second = drawn(reseed=True), drawn(reseed=True)
    assert first[0] != second[0]
    assert first[1] != second[1]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "distribution"),
    [
        (
            Decision(name="layers.Block", highest=1, type=DecisionType.COUNT),
            IntDistribution(0, 1),
        ),
        (
            Decision(name="save.matmul", highest=1, type=DecisionType.SAVE),
            CategoricalDistribution([False, True]),
        ),
        (
            Decision(name="layer.h.0", highest=1, type=DecisionType.LAYER),
            CategoricalDistribution([False, True]),
        ),
        (
            Decision(name="layer.h.0", highest=2, type=DecisionType.LAYER),
            CategoricalDistribution([0, 1, 2]),
        ),
    ],
)
def test_decisions_are_drawn_from(decision: Decision, distribution: object) -> None:
    assert distribution_of(decision) == distribution


def spaces() -> st.SearchStrategy[SearchSpace]:
    return st.builds(
        lambda count, mode, tiers: build_space(make_layers(count), mode, tiers=tiers),
        st.integers(1, 4),
        st.sampled_from(LayerChoiceMode),
        st.integers(1, 2),
    )


@settings(max_examples=40, deadline=None)
@given(space=spaces(), data=st.data())
def test_an_assignment_comes_back_from_optuna(space: SearchSpace, data: st.DataObject) -> None:
    assignment = {d.name: data.draw(st.integers(0, d.highest)) for d in space.decisions}
    parameters = parameters_of(space.decisions, assignment)
    trial = optuna.trial.FixedTrial(parameters)

    found = {decision.name: suggest(trial, decision) for decision in space.decisions}

    assert found == assignment
    assert all(type(value) is int for value in found.values())
    for decision in space.decisions:
        # As a study keeps it.
        assert int(parameters[decision.name]) == assignment[decision.name]
        assert distribution_of(decision)._contains(
            distribution_of(decision).to_internal_repr(parameters[decision.name])
        )


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SamplerName)
def test_every_sampler_can_be_made(name: SamplerName) -> None:
    asked = Asked(zeros(layers__Block=1))
    sampler = make_sampler(name, 0, 5, decisions=DECISIONS, propose=asked)
    study = optuna.create_study(sampler=sampler)

    found = ask(study)

    assert (found == zeros(layers__Block=1)) == name.plans
    assert len(asked.draws) == name.plans
    assert name.plans == (name in (SamplerName.PLANNER, SamplerName.GREEDY))


def test_a_continued_study_does_not_replay_its_first_draws() -> None:
    def drawn(trials: int) -> float:
        asked = Asked(zeros())
        sampler = make_sampler(SamplerName.PLANNER, 3, trials, decisions=DECISIONS, propose=asked)
        ask(optuna.create_study(sampler=sampler))
        return asked.draws[0]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


# --- how the model runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RunMode)
def test_only_what_means_something_is_asked_and_it_is_read_again(mode: RunMode) -> None:
    space = build_space(make_layers(3), run_modes=tuple(RunMode))
    values = {d.name: d.highest for d in space.decisions}
    wanted = space.completed(values | {"compile": space.run_modes.index(mode)})
    sampler = PlannerSampler(space.decisions, lambda generator: wanted, seed=0)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(parameters_of(space.decisions_for(wanted), wanted))

    for _ in range(2):  # enqueued, then proposed
        trial = study.ask()
        assert suggest_assignment(trial, space) == wanted
        study.tell(trial, 1.0)

    names = {decision.name for decision in space.decisions_for(wanted)}
    for trial in study.trials:
        assert trial.params.keys() == names
        assert trial.params["compile"] == str(mode)
        assert assignment_in(space, trial) == wanted


def test_parameters_of_another_space_are_no_assignment() -> None:
    space = build_space(make_layers(3), run_modes=tuple(RunMode))
    distributions = {d.name: distribution_of(d) for d in space.decisions}
    for parameters in ({"x": 1.0}, {"compile": "compile, memory budget"}, {"compile": "eager"}):
        known = {
            n: distributions.get(n, optuna.distributions.FloatDistribution(0, 1))
            for n in parameters
        }
        trial = optuna.create_trial(value=1.0, params=parameters, distributions=known)
        assert assignment_in(space, trial) is None


def test_a_memory_budget_is_drawn_in_hundredths() -> None:
    space = build_space(make_layers(3), run_modes=tuple(RunMode))
    budget = next(d for d in space.decisions if d.type is DecisionType.PART)
    assert distribution_of(budget) == optuna.distributions.FloatDistribution(0, 1, step=0.01)
    assert [parameters_of([budget], {budget.name: h})[budget.name] for h in (0, 7, 100)] == [
        0.0,
        0.07,
        1.0,
    ]
