"""Searches that compile: which ways of running are tried, and what of each, by a script."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import (
    MIB,
    SITE_OPS,
    Listener,
    ScriptedMeasurer,
    make_candidate,
    make_layers,
    make_search,
    other_environment,
)

from sac_search.api import SearchOptions, run_search
from sac_search.artifacts import load_result, render_policy
from sac_search.errors import EnvironmentMismatch, StudyError, WorkloadError
from sac_search.options import Compile
from sac_search.policy import (
    COMPILE_ALONE,
    NO_CHECKPOINTING,
    Compiled,
    Policy,
    checkpoint_layers,
)
from sac_search.records import FailureKind
from sac_search.report import rows
from sac_search.space import EAGER_ONLY, RunMode, SearchSpace, build_space
from sac_search.study.baselines import COMPILE, COMPILE_FULL, COMPILED_NAMES, FULL, NONE, baselines
from sac_search.study.candidate import Candidate, rank
from sac_search.study.running import (
    FIRST_BUDGETS,
    compile_failure,
    mode_weights,
    next_budget,
    next_preference,
)
from sac_search.study.sampler import SamplerName

ALL = tuple(RunMode)
COMPILED = ALL[1:]
BUDGET_BYTES = 140 * MIB


def space_of(modes: tuple[RunMode, ...] = ALL) -> SearchSpace:
    return build_space(make_layers(6), run_modes=modes)


def budget(part: float) -> Policy:
    return Policy(compiled=Compiled(memory_budget=part))


def with_setting(part: float, **setting: str) -> Policy:
    return Policy(compiled=Compiled(memory_budget=part, **setting))


def compiled(policy: Policy, *, prefer: bool = False) -> Policy:
    return dataclasses.replace(policy, compiled=Compiled(prefer=prefer))


def at(part: float, *, seconds: float = 1.0, peak: int = 100) -> Candidate:
    return make_candidate(f"at {part}", policy=budget(part), seconds=seconds, peak_bytes=peak)


def measurer_of(**fields: Any) -> ScriptedMeasurer:
    return ScriptedMeasurer(layers=make_layers(6, SITE_OPS), forecast_factor=1.0, **fields)


# --- what to try next -----------------------------------------------------------------------------


class TestNextBudget:
    def proposed(self, *candidates: Candidate, limit: int = 100, taken: Any = ()) -> float | None:
        space = space_of()
        found = next_budget(space, candidates, limit, taken)
        return None if found is None else space.policy_for(found).compiled.memory_budget

    def test_is_in_the_larger_gap_beside_the_best_that_fits(self) -> None:
        known = [at(0.1), at(0.3, seconds=0.8), at(0.7, seconds=0.9), at(1.0, peak=200)]
        assert self.proposed(*known) == 0.5
        assert self.proposed(*known, at(0.5, seconds=0.9)) == 0.2  # as wide, and the lower one

    def test_believes_no_order(self) -> None:
        # 0.3 needs more than 0.7 does, and is slower: the search goes on around 0.7.
        known = [at(0.3, seconds=2.0, peak=200), at(0.7, seconds=0.9), at(1.0, peak=200)]
        assert self.proposed(*known) == 0.5

    def test_is_in_the_widest_gap_when_nothing_fits(self) -> None:
        known = [at(p, peak=200) for p in (0.1, 0.3, 0.7, 1.0)]
        assert self.proposed(*known) == 0.5

    def test_is_none_when_all_gaps_are_narrow_and_all_solvers_tried(self) -> None:
        known = [at(h / 100, seconds=1 + abs(h - 50) / 100) for h in range(0, 101, 2)]
        others = {with_setting(0.5, solver=solver).key for solver in ("greedy", "ilp")}
        keys = {candidate.policy.key for candidate in known}
        assert self.proposed(*known, taken=keys) == 0.5
        assert self.proposed(*known, taken=keys | others) is None

    def test_has_other_solvers_at_the_best_once_no_wide_gap_is_beside_it(self) -> None:
        known = [at(0.4), at(0.5, seconds=0.8), at(0.6), at(0.8, peak=200)]
        assert [policy.describe() for policy in self.in_turn(known, 4)] == [
            "compiled, memory budget 0.50 (greedy, flops)",
            "compiled, memory budget 0.50 (ilp, flops)",
            "compiled, memory budget 0.45",
            "compiled, memory budget 0.55",
        ]

    def test_goes_on_with_the_solver_that_is_best(self) -> None:
        fast = make_candidate("fast", policy=with_setting(0.5, solver="ilp"), seconds=0.5)
        known = [at(0.4), at(0.5), at(0.6), fast]
        assert [policy.describe() for policy in self.in_turn(known, 3)] == [
            "compiled, memory budget 0.50 (greedy, flops)",
            "compiled, memory budget 0.45 (ilp, flops)",
            "compiled, memory budget 0.55 (ilp, flops)",
        ]

    def test_can_go_by_measured_seconds_on_an_accelerator(self) -> None:
        known = [at(0.4), at(0.5, seconds=0.8), at(0.6)]
        found = self.in_turn(known, 5, build_space(make_layers(6), run_modes=ALL, can_profile=True))
        assert [(p.compiled.solver, p.compiled.estimator) for p in found] == [
            ("dp", "profile"),
            ("greedy", "flops"),
            ("greedy", "profile"),
            ("ilp", "flops"),
            ("ilp", "profile"),
        ]

    def in_turn(
        self, known: list[Candidate], count: int, space: SearchSpace | None = None
    ) -> list[Policy]:
        space, taken, found = space or space_of(), {c.policy.key for c in known}, []
        for _ in range(count):
            assignment = next_budget(space, known, 100, taken)
            assert assignment is not None
            found.append(space.policy_for(assignment))
            taken.add(found[-1].key)
        return found

    def test_leaves_out_what_others_measure(self) -> None:
        known = [at(0.3), at(0.7, peak=200), at(1.0, peak=200)]
        assert self.proposed(*known) == 0.5
        assert self.proposed(*known, taken={budget(0.5).key}) == 0.14


def test_preferences_are_those_of_the_best_that_bind() -> None:
    space = space_of()
    layers = [layer.name for layer in space.layers]
    policies = [
        compiled(space.policy_of(space.choices_of_classes(layers[:n], ["matmul"]), RunMode.COMPILE))
        for n in (2, 3)
    ]
    known = [
        make_candidate("a", policy=policies[0], seconds=2.0),
        make_candidate("b", policy=policies[1], seconds=1.0),
    ]
    expected = [compiled(policy, prefer=True).key for policy in policies]

    first = next_preference(space, known, 100, set())
    second = next_preference(space, known, 100, {expected[1]})

    assert space.policy_for(first).key == expected[1]
    assert space.policy_for(second).key == expected[0]
    assert next_preference(space, known, 100, set(expected)) is None


def test_preferences_of_what_saves_nothing_are_nothing_new() -> None:
    space = space_of()
    full = compiled(checkpoint_layers([layer.name for layer in space.layers]))
    known = [make_candidate("full", policy=full)]
    assert next_preference(space, known, 100, {full.key}) is None


def test_modes_are_drawn_by_how_good_their_best_is() -> None:
    known = [
        make_candidate("eager", policy=NO_CHECKPOINTING, seconds=1.03),
        make_candidate("compile", policy=COMPILE_ALONE, seconds=1.0),
        at(0.5, seconds=2.0),
        at(0.4, seconds=0.1, peak=101),  # does not fit
    ]
    weights = mode_weights(space_of(), known, 100)
    assert weights[RunMode.COMPILE] == weights[RunMode.PREFER] == 1.0
    assert weights[RunMode.EAGER] == pytest.approx(np.exp(-1))
    assert weights[RunMode.BUDGET] == 0.05


# --- the whole search -----------------------------------------------------------------------------


def run(measurer: ScriptedMeasurer, modes: tuple[RunMode, ...] = ALL, **settings: Any) -> Any:
    fields = {"trials": 25, "seed": 1} | settings
    search = make_search(measurer, BUDGET_BYTES, run_modes=modes, tiers=1, **fields)
    search.run()
    return search


def test_compiled_baselines_and_first_compiled_policies_are_measured() -> None:
    measurer = measurer_of()
    search = run(measurer, trials=0)

    names = [candidate.name for candidate in search.store.candidates()]
    assert set(COMPILED_NAMES) <= set(names)
    assert {f"memory budget {h / 100:.2f}" for h in FIRST_BUDGETS} <= set(names)
    assert "compiled plan at 100%" in names and "plan at 100%" in names
    assert search.store.bound_overhead_seconds is None  # it would be of eager steps


def test_every_mode_is_tried_and_nothing_twice() -> None:
    measurer = measurer_of()
    search = run(measurer)

    modes = {search.space.mode_of(policy) for policy in measurer.order}
    assert modes == set(ALL)
    assert set(measurer.measured.values()) == {1}
    # Only what means something is a parameter of a trial, and every trial can be read again.
    for trial in search.store.study.trials:
        mode = trial.params["compile"]
        for name in ("activation_memory_budget", "activation_memory_budget_solver"):
            assert (name in trial.params) == (mode == RunMode.BUDGET)
        assert any(name.startswith("save.") for name in trial.params) == (mode != RunMode.BUDGET)
    assert len(search._assignments_asked()) >= len(search.trial_candidates())


def test_the_fastest_compiled_policy_wins_where_compiling_pays() -> None:
    measurer = measurer_of()
    best = _best(run(measurer))
    assert best.policy.compiled is not None
    assert best.step_seconds < min(
        c.step_seconds
        for c in run(measurer_of(), EAGER_ONLY).store.candidates()
        if c.fits(BUDGET_BYTES)
    )


def test_an_eager_policy_wins_where_compiling_does_not_pay() -> None:
    measurer = measurer_of(compiled_seconds=lambda policy: 1.5)
    search = run(measurer)
    assert _best(search).policy.compiled is None
    compiled_trials = [p for p in measurer.order if p.compiled is not None]
    assert len(compiled_trials) < len(measurer.order) / 2


def test_a_good_memory_budget_is_found_between_the_first_ones() -> None:
    # 0.61 alone is fast, and fits: no order leads there but that of its neighbours.
    measurer = measurer_of(
        compiled_seconds=lambda p: (
            0.5 + abs(p.compiled.memory_budget - 0.61) if p.compiled.memory_budget < 1 else 0.8
        ),
        budget_bytes=lambda part: 0.5,
    )
    best = _best(run(measurer, trials=30))
    assert best.policy.compiled.memory_budget == pytest.approx(0.61, abs=0.05)


def test_the_solver_that_is_good_here_is_found() -> None:
    measurer = measurer_of(
        compiled_seconds=lambda p: 0.4 if p.compiled.solver == "ilp" else 0.6,
        budget_bytes=lambda part: 0.5,
    )
    best = _best(run(measurer, trials=30))
    assert best.policy.compiled is not None and best.policy.compiled.solver == "ilp"


def test_an_eager_policy_is_only_compared_with_where_all_has_to_be_compiled() -> None:
    measurer = measurer_of(compiled_seconds=lambda policy: 2.0)
    search = run(measurer, COMPILED)

    eager = [p for p in measurer.order if p.compiled is None]
    assert [p.key for p in eager] == [measurer.full.key, NO_CHECKPOINTING.key]
    best = _best(search)
    assert best.policy.compiled is not None
    assert best.step_seconds > measurer.step_seconds(measurer.full)
    assert {c.name for c in search.store.candidates() if c.is_reference} == {NONE, FULL}


def _best(search: Any) -> Candidate:
    return rank(search.store.candidates(), BUDGET_BYTES)[0]


@pytest.mark.parametrize("sampler", [SamplerName.RANDOM, SamplerName.TPE, SamplerName.GP])
def test_other_samplers_search_it_too(sampler: SamplerName) -> None:
    measurer = measurer_of()
    search = run(measurer, sampler=sampler, trials=12)
    assert len(search.trial_candidates()) == 12
    assert {search.space.mode_of(p) for p in measurer.order} >= {RunMode.EAGER, RunMode.COMPILE}


def test_without_forecasts_it_is_searched_by_measuring() -> None:
    measurer = ScriptedMeasurer(layers=make_layers(6, SITE_OPS))
    search = run(measurer, trials=8)
    assert any(c.policy.compiled is not None for c in search.trial_candidates())


# --- the stages -----------------------------------------------------------------------------------


def options_of(tmp_path: Path, **changes: Any) -> SearchOptions:
    fields = {"trials": 14, "tiers": 1, "compile": "search"} | changes
    return SearchOptions(budget_gb=BUDGET_BYTES / 2**30, root=tmp_path, **_enums(fields))


def _enums(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"compile": Compile(fields["compile"])}


def searched(
    tmp_path: Path, measurer: ScriptedMeasurer, listener: Any = None, **changes: Any
) -> Any:
    return run_search(measurer, "gpt", options_of(tmp_path, **changes), listener or Listener())


def test_wrong_gradients_of_memory_budgets_are_caught_early_and_the_next_best_wins(
    tmp_path: Path,
) -> None:
    listener = Listener()
    measurer = measurer_of(
        compiled_seconds=lambda p: 0.5 if p.compiled.memory_budget < 1 else 0.8,
        wrong_gradients=lambda p: p.compiled is not None and p.compiled.memory_budget < 1,
    )

    result = searched(tmp_path, measurer, listener)

    assert result.best.policy.compiled.memory_budget == 1.0
    budgets = [p for p in measurer.order if p.compiled and p.compiled.memory_budget < 1]
    assert len(budgets) == len(FIRST_BUDGETS)  # and no more of them
    assert any("activation_memory_budget is wrong here" in note for note in listener.notes)
    assert all("wrong gradients" in reason for reason in result.rejected)
    assert all(reason.startswith("memory budget") for reason in result.rejected)
    # What is known to be wrong by then takes no place among those that are measured once more.
    _, keys = measurer.compared[0]
    assert measurer.verified[0] not in keys


def test_a_step_that_does_not_run_compiled_is_searched_eagerly_or_told(tmp_path: Path) -> None:
    def fail(policy: Policy) -> FailureKind | None:
        return FailureKind.USER_ERROR if policy.compiled is not None else None

    listener = Listener()
    measurer = measurer_of(fail=fail)
    result = searched(tmp_path, measurer, listener)
    assert result.best.policy.compiled is None
    assert sum(p.compiled is not None for p in measurer.order) == 2
    assert any("does not run compiled" in note for note in listener.notes)

    with pytest.raises(WorkloadError, match="does not run compiled"):
        searched(tmp_path, measurer_of(fail=fail), study="other", fresh=True, compile="on")


def test_a_step_that_fits_is_still_made_faster(tmp_path: Path) -> None:
    measurer = measurer_of()
    options = dataclasses.replace(options_of(tmp_path), budget_gb=1.0)
    result = run_search(measurer, "gpt", options, Listener())
    assert result.best.policy == COMPILE_ALONE
    assert not result.needs_no_checkpointing
    assert any("Against no checkpointing: step time -20.0%" in la for la in rows.headline(result))
    assert any(line.startswith("Compiling took") for line in rows.closing_lines(result))


def test_a_finished_search_goes_on_where_it_was(tmp_path: Path) -> None:
    first = measurer_of()
    searched(tmp_path, first)
    again = measurer_of()
    result = searched(tmp_path, again, trials=20)
    assert not again.measured.keys() & first.measured.keys()
    assert result.best is not None

    result = load_result(tmp_path / "gpt")
    assert result.compile_options is not None
    text = render_policy(result)
    assert "COMPILE = {'backend': 'inductor'}" in text


def test_it_is_another_search_and_another_environment(tmp_path: Path) -> None:
    searched(tmp_path, measurer_of(), compile="on")
    with pytest.raises(StudyError, match="--compile"):
        searched(tmp_path, measurer_of(), compile="search")
    environment = other_environment(compile_settings="searched, with inductor")
    with pytest.raises(EnvironmentMismatch, match="compile: eager -> searched, with inductor"):
        searched(tmp_path, measurer_of(environment=environment), compile="on")


def test_off_is_as_if_there_were_nothing_to_compile() -> None:
    space, plain = space_of(EAGER_ONLY), build_space(make_layers(6))
    assert space == plain
    assert [d.name for d in space.decisions] == [d.name for d in plain.decisions]
    assert not {COMPILE, COMPILE_FULL} & {b.name for b in baselines(space)}
    assert compile_failure([]) is None
