"""The planner against brute force: always equal, the bound below both, and greedy above."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_search import planner
from sac_search.planner import (
    Kind,
    Option,
    Plan,
    Problem,
    lower_bound,
    overhead_of,
    peak_of,
    solve,
    solve_greedily,
    useful_options,
    with_phase_peaks,
)

MIB = 2**20


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    activation_mib = draw(st.integers(5, 40))
    options = [
        Option(overhead_seconds=0.0, saved_bytes=activation_mib * MIB, is_tier=False),
        Option(overhead_seconds=draw(st.integers(5, 20)) * 1e-3, saved_bytes=MIB, is_tier=True),
    ]
    for _ in range(draw(st.integers(0, 2))):
        options.append(
            Option(
                overhead_seconds=draw(st.integers(0, 12)) * 1e-3,
                saved_bytes=draw(st.integers(1, activation_mib + 3)) * MIB,
                is_tier=True,
            )
        )
    return Kind(
        options=tuple(options),
        activation_bytes=activation_mib * MIB,
        gradient_bytes=draw(st.sampled_from([0, 1, 8, 30])) * MIB,
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to five layers of one or two kinds, one kind after the other."""
    found = draw(st.lists(kinds(), min_size=1, max_size=2))
    order = sorted(draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=5)))
    sizes = {
        name: draw(st.integers(5, 60)) * MIB
        for name in (
            "forward_bytes",
            "loss_bytes",
            "backward_start_bytes",
            "backward_bytes",
            "fixed_bytes",
        )
    }
    return Problem(kinds=tuple(found), order=tuple(order), **sizes)


def brute_force(problem: Problem, budget_bytes: int, tiers: int) -> float | None:
    best = None
    for options in itertools.product(
        *(range(len(problem.kinds[kind].options)) for kind in problem.order)
    ):
        used: dict[int, set[int]] = {}
        for kind, option in zip(problem.order, options, strict=True):
            if problem.kinds[kind].options[option].is_tier:
                used.setdefault(kind, set()).add(option)
        if any(len(found) > tiers for found in used.values()):
            continue
        if peak_of(problem, options) <= budget_bytes:
            seconds = overhead_of(problem, options)
            best = seconds if best is None else min(best, seconds)
    return best


def budget_between(problem: Problem, fraction: float) -> int:
    layers = len(problem.order)
    low, high = peak_of(problem, [1] * layers), peak_of(problem, [0] * layers)
    return int(low + fraction * (high - low))


@settings(deadline=None, max_examples=150)
@given(problem=problems(), fraction=st.floats(-0.1, 1.1), tiers=st.sampled_from([1, 2]))
def test_equals_brute_force(problem: Problem, fraction: float, tiers: int) -> None:
    budget_bytes = budget_between(problem, fraction)
    plan = solve(problem, budget_bytes, tiers=tiers)
    expected = brute_force(problem, budget_bytes, tiers)
    if expected is None:
        assert plan is None
        return
    assert plan is not None
    assert plan.overhead_seconds == pytest.approx(expected, abs=1e-9)
    assert plan.peak_bytes <= budget_bytes
    assert plan.peak_bytes == peak_of(problem, plan.options)


@settings(deadline=None, max_examples=60)
@given(problem=problems(), fraction=st.floats(0, 1))
def test_bound_is_below_every_plan(problem: Problem, fraction: float) -> None:
    budget_bytes = budget_between(problem, fraction)
    bound = lower_bound(problem, budget_bytes)
    expected = brute_force(problem, budget_bytes, tiers=5)
    if expected is not None:
        assert bound is not None
        assert bound <= expected + 1e-9


@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_a_larger_budget_is_never_slower(problem: Problem) -> None:
    plans = [solve(problem, budget_between(problem, step / 6)) for step in range(7)]
    seconds = [plan.overhead_seconds for plan in plans if plan is not None]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(seconds))


def two_layers() -> Problem:
    kind = Kind(
        options=(
            Option(overhead_seconds=0.0, saved_bytes=5 * MIB, is_tier=False),
            Option(overhead_seconds=0.005, saved_bytes=MIB, is_tier=True),
        ),
        activation_bytes=5 * MIB,
        gradient_bytes=0,
    )
    return Problem(
        kinds=(kind,),
        order=(0, 0),
        forward_bytes=5 * MIB,
        loss_bytes=5 * MIB,
        backward_start_bytes=5 * MIB,
        backward_bytes=5 * MIB,
        fixed_bytes=5 * MIB,
    )


def test_leaving_the_last_layer_alone_makes_no_group_of_others() -> None:
    plan = solve(two_layers(), 11 * MIB)
    assert plan is not None
    assert plan.options == (1, 0)


def test_what_the_solver_prints_past_python_is_no_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = planner.milp

    def loud(*arguments: Any, **keywords: Any) -> Any:
        os.write(1, b"HighsMipSolverData")
        return plain(*arguments, **keywords)

    monkeypatch.setattr(planner, "milp", loud)
    assert solve(two_layers(), 11 * MIB) is not None
    print("after")
    assert capfd.readouterr() == ("after\n", "HighsMipSolverData")


def _ramp(count: int, activation_bytes: int) -> tuple[Option, ...]:
    tiers = [
        Option(
            overhead_seconds=0.01 * (1 - step / count) ** 1.5,
            saved_bytes=round(activation_bytes * (0.05 + 0.95 * step / count)),
            is_tier=True,
        )
        for step in range(count)
    ]
    return (Option(overhead_seconds=0, saved_bytes=activation_bytes, is_tier=False), *tiers)


def _large_problem(layers: int, options: int) -> Problem:
    kind = Kind(
        options=_ramp(options, 400 * MIB), activation_bytes=400 * MIB, gradient_bytes=30 * MIB
    )
    return Problem(
        kinds=(kind, kind),
        order=tuple(index * 2 // layers for index in range(layers)),
        forward_bytes=1000 * MIB,
        loss_bytes=2000 * MIB,
        backward_start_bytes=1000 * MIB,
        backward_bytes=1000 * MIB,
        fixed_bytes=1000 * MIB,
    )


def test_many_equal_layers_do_not_make_it_slow() -> None:
    problem = _large_problem(layers=128, options=125)
    budget_bytes = budget_between(problem, 0.5)
    started = time.perf_counter()
    plan = solve(problem, budget_bytes)
    seconds = time.perf_counter() - started
    bound = lower_bound(problem, budget_bytes)
    assert plan is not None
    assert bound is not None
    assert seconds < 5
    assert bound <= plan.overhead_seconds <= 1.02 * bound


def test_alternating_kinds_keep_the_budget() -> None:
    problem = _large_problem(layers=12, options=10)
    alternating = Problem(
        kinds=(
            problem.kinds[0],
            Kind(options=_ramp(6, 90 * MIB), activation_bytes=90 * MIB, gradient_bytes=300 * MIB),
        ),
        order=(0, 1) * 6,
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=100 * MIB,
        backward_bytes=100 * MIB,
        fixed_bytes=0,
    )
    for step in range(1, 8):
        budget_bytes = budget_between(alternating, step / 8)
        plan = solve(alternating, budget_bytes)
        assert plan is not None
        assert plan.peak_bytes <= budget_bytes


def test_rows_that_leave_out_how_kinds_alternate_are_made_up_for() -> None:
    """The first solution leaves all layers of the second kind alone, and is over by 1 MiB."""
    alone = Option(overhead_seconds=0.0, saved_bytes=5 * MIB, is_tier=False)
    plain = Option(overhead_seconds=0.005, saved_bytes=MIB, is_tier=True)
    free = Option(overhead_seconds=0.0, saved_bytes=6 * MIB, is_tier=True)
    kinds = (
        Kind(
            options=(replace(alone, saved_bytes=10 * MIB), plain, free),
            activation_bytes=10 * MIB,
            gradient_bytes=0,
        ),
        Kind(options=(alone, plain), activation_bytes=5 * MIB, gradient_bytes=0),
    )
    problem = Problem(
        kinds=kinds,
        order=(0, 1, 1, 0, 1),
        forward_bytes=5 * MIB,
        loss_bytes=5 * MIB,
        backward_start_bytes=5 * MIB,
        backward_bytes=8 * MIB,
        fixed_bytes=5 * MIB,
    )
    plan = solve(problem, 28 * MIB)
    assert plan is not None
    assert plan.options == (1, 1, 0, 2, 0)
    assert plan.peak_bytes <= 28 * MIB
    assert plan.overhead_seconds == pytest.approx(brute_force(problem, 28 * MIB, 2))


@settings(deadline=None, max_examples=60)
@given(problem=problems(), fraction=st.floats(0, 1), data=st.data())
def test_plans_for_kinds_in_any_order_keep_the_budget(
    problem: Problem, fraction: float, data: st.DataObject
) -> None:
    mixed = replace(problem, order=tuple(data.draw(st.permutations(problem.order))))
    budget_bytes = budget_between(mixed, fraction)
    expected = brute_force(mixed, budget_bytes, 2)
    for solver in (solve, solve_greedily):
        plan = solver(mixed, budget_bytes)
        if plan is not None:
            assert expected is not None
            assert plan.peak_bytes == peak_of(mixed, plan.options) <= budget_bytes
            assert plan.overhead_seconds >= expected - 1e-9


def test_the_last_layer_is_free_to_leave_alone() -> None:
    kind = Kind(
        options=(
            Option(overhead_seconds=0, saved_bytes=10 * MIB, is_tier=False),
            Option(overhead_seconds=1, saved_bytes=MIB, is_tier=True),
        ),
        activation_bytes=10 * MIB,
        gradient_bytes=0,
    )
    problem = Problem(
        kinds=(kind,),
        order=(0, 0, 0, 0),
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=0,
        backward_bytes=0,
        fixed_bytes=0,
    )
    plan = solve(problem, peak_of(problem, (1, 1, 1, 1)))
    assert plan is not None
    assert plan.options == (1, 1, 1, 0)


def test_a_peak_that_no_layer_moves_cannot_be_planned_away() -> None:
    problem = _large_problem(layers=8, options=5)
    assert solve(problem, problem.fixed_bytes - 1) is None
    assert lower_bound(problem, problem.fixed_bytes - 1) is None


def test_useful_options_are_those_that_nothing_beats() -> None:
    options = [
        Option(overhead_seconds=0.0, saved_bytes=10, is_tier=False),
        Option(overhead_seconds=9.0, saved_bytes=1, is_tier=True),
        Option(overhead_seconds=5.0, saved_bytes=4, is_tier=True),
        Option(
            overhead_seconds=6.0, saved_bytes=5, is_tier=True
        ),  # larger and slower than the last
        Option(overhead_seconds=0.5, saved_bytes=12, is_tier=True),  # worse than leaving it alone
    ]
    assert sorted(useful_options(options)) == [0, 1, 2]


@settings(deadline=None, max_examples=60)
@given(problem=problems(), data=st.data())
def test_corrected_rows_give_the_peaks_of_the_dry_run(
    problem: Problem, data: st.DataObject
) -> None:
    options = tuple(
        data.draw(st.integers(0, len(problem.kinds[kind].options) - 1)) for kind in problem.order
    )
    plan = Plan(
        options=options,
        overhead_seconds=overhead_of(problem, options),
        peak_bytes=peak_of(problem, options),
    )
    phases = {
        name: data.draw(st.integers(200, 400)) * MIB
        for name in ("forward", "loss", "backward", "fixed")
    }
    corrected = with_phase_peaks(problem, plan, **phases)
    assert peak_of(corrected, options) == max(phases.values())


# --- greedily -------------------------------------------------------------------------------------


def tiers_used(problem: Problem, plan: Plan) -> int:
    """Returns the most tiers that one kind of layers has."""
    used: dict[int, set[int]] = {kind: set() for kind in problem.order}
    for kind, option in zip(problem.order, plan.options, strict=True):
        if problem.kinds[kind].options[option].is_tier:
            used[kind].add(option)
    return max(len(found) for found in used.values())


def kept_bytes(problem: Problem, plan: Plan, kind: int) -> list[int]:
    return [
        problem.kinds[kind].options[option].saved_bytes
        for k, option in zip(problem.order, plan.options, strict=True)
        if k == kind
    ]


@settings(deadline=None, max_examples=150)
@given(problem=problems(), fraction=st.floats(-0.1, 1.1), tiers=st.sampled_from([1, 2]))
def test_greedy_keeps_the_budget_and_never_beats_the_optimum(
    problem: Problem, fraction: float, tiers: int
) -> None:
    budget_bytes = budget_between(problem, fraction)
    plan = solve_greedily(problem, budget_bytes, tiers=tiers)
    optimum = solve(problem, budget_bytes, tiers=tiers)
    # Recomputing everything keeps least, so there is a plan where any fits.
    assert (plan is None) == (optimum is None)
    if plan is None or optimum is None:
        return
    assert plan.peak_bytes == peak_of(problem, plan.options) <= budget_bytes
    assert plan.overhead_seconds == pytest.approx(overhead_of(problem, plan.options))
    assert plan.overhead_seconds >= optimum.overhead_seconds - 1e-9
    assert plan.overhead_seconds <= overhead_of(problem, [1] * len(problem.order)) + 1e-9
    assert tiers_used(problem, plan) <= tiers
    for found in set(problem.order):
        kept = kept_bytes(problem, plan, found)
        assert kept == sorted(kept)


@settings(deadline=None, max_examples=60)
@given(kind=kinds(), count=st.integers(1, 6), fraction=st.floats(-0.1, 1.1), data=st.data())
def test_greedy_is_exact_where_layers_are_alone_or_not(
    kind: Kind, count: int, fraction: float, data: st.DataObject
) -> None:
    """All that is open is how many of equal layers are left alone: as many as fit."""
    rows = ("forward_bytes", "loss_bytes", "backward_start_bytes", "backward_bytes", "fixed_bytes")
    problem = Problem(
        kinds=(replace(kind, options=kind.options[:2]),),
        order=(0,) * count,
        **{name: data.draw(st.integers(5, 60)) * MIB for name in rows},
    )
    budget_bytes = budget_between(problem, fraction)
    plan, optimum = solve_greedily(problem, budget_bytes), solve(problem, budget_bytes)
    assert (plan is None) == (optimum is None)
    if plan is not None and optimum is not None:
        assert plan.options == optimum.options


def test_greedy_takes_the_most_seconds_per_byte_first() -> None:
    kind = Kind(
        options=(
            Option(overhead_seconds=0.0, saved_bytes=20 * MIB, is_tier=False),
            Option(overhead_seconds=10.0, saved_bytes=0, is_tier=True),
            Option(overhead_seconds=7.0, saved_bytes=MIB, is_tier=True),  # 3 s for 1 MiB
            Option(overhead_seconds=2.0, saved_bytes=4 * MIB, is_tier=True),  # 8 s for 4 MiB
        ),
        activation_bytes=0,
        gradient_bytes=0,
    )
    problem = Problem(
        kinds=(kind,),
        order=(0,),
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=0,
        backward_bytes=0,
        fixed_bytes=0,
    )
    two = replace(problem, order=(0, 0))
    assert solve_greedily(two, 4 * MIB).options == (2, 2)  # type: ignore[union-attr]
    assert solve(two, 4 * MIB).options == (1, 3)  # type: ignore[union-attr]
    # One tier is not left again by a single layer, unless that leaves the other tier empty.
    assert solve_greedily(two, 5 * MIB, tiers=1).options == (1, 1)  # type: ignore[union-attr]
    assert solve_greedily(problem, 5 * MIB, tiers=1).options == (3,)  # type: ignore[union-attr]
    assert solve_greedily(two, 40 * MIB).options == (0, 0)  # type: ignore[union-attr]


def test_greedy_gives_each_kind_tiers_of_its_own() -> None:
    options = (
        Option(overhead_seconds=0.0, saved_bytes=20 * MIB, is_tier=False),
        Option(overhead_seconds=2.0, saved_bytes=MIB, is_tier=True),
        Option(overhead_seconds=1.0, saved_bytes=2 * MIB, is_tier=True),
    )
    kind = Kind(options=options, activation_bytes=0, gradient_bytes=0)
    problem = Problem(
        kinds=(kind, kind),
        order=(0, 1),
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=0,
        backward_bytes=0,
        fixed_bytes=0,
    )
    assert solve_greedily(problem, 4 * MIB, tiers=1).options == (2, 2)  # type: ignore[union-attr]
