"""Searches for a whole front: found, confirmed, verified, exported at any size, continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import (
    MIB,
    SITE_OPS,
    Listener,
    ScriptedMeasurer,
    make_layers,
    make_search,
)

from sac_search import units
from sac_search.artifacts import load_result
from sac_search.errors import StudyError, UsageError
from sac_search.options import SearchOptions
from sac_search.pipeline import run_search
from sac_search.policy import NO_CHECKPOINTING
from sac_search.report import rows
from sac_search.space import Granularity, SearchSpace
from sac_search.study.candidate import peak_of
from sac_search.study.final import MOST_POINTS
from sac_search.study.front import pareto_front, spot_of
from sac_search.study.goal import Goal, GoalKind
from sac_search.study.points_at import faster_at, result_at
from sac_search.study.result import SearchResult, to_document
from sac_search.study.sampler import SamplerName

DEVICE_BYTES = 2**34
PARETO = Goal(kind=GoalKind.PARETO, has_budget=False)


def measurer(**changes: Any) -> ScriptedMeasurer:
    return ScriptedMeasurer(**{"layers": make_layers(3), "forecast_factor": 1.0} | changes)


def run(root: Path, on: ScriptedMeasurer, **options: Any) -> SearchResult:
    given = {"pareto": True, "report": False, "tiers": 1, "trials": 8, "root": root}
    return run_search(on, "gpt", SearchOptions(**(given | options)), Listener())


def counted(space: SearchSpace, on: ScriptedMeasurer) -> list[tuple[int, float]]:
    """Returns the front of all policies of a space, by counting."""
    policies = [space.policy_for(assignment) for assignment in space.assignments()]
    places = sorted({(on.peak_bytes(p), round(on.step_seconds(p), 12)) for p in policies})
    front: list[tuple[int, float]] = []
    for peak, seconds in places:
        if not front or seconds < front[-1][1] - 1e-12:
            front.append((peak, seconds))
    return front


@pytest.mark.parametrize(
    ("layers", "granularity"),
    [(make_layers(3), Granularity.CLASS), (make_layers(4, SITE_OPS), Granularity.SITE)],
)
def test_the_front_is_that_of_counting_and_takes_a_fraction_of_the_trials(
    layers: Any, granularity: Granularity
) -> None:
    on = measurer(layers=layers)
    search = make_search(on, DEVICE_BYTES, goal=PARETO, granularity=granularity)
    search.run()
    found = pareto_front(search.store.candidates(), DEVICE_BYTES)
    places = [(peak_of(c), round(on.step_seconds(c.policy), 12)) for c in found]
    assert places == counted(search.space, on)
    assert len(search.trial_candidates()) < search.space.size / 6


@pytest.mark.parametrize("sampler", SamplerName)
def test_every_sampler_takes_two_objectives(sampler: SamplerName) -> None:
    on = measurer(fail=lambda policy: None)
    search = make_search(on, DEVICE_BYTES, goal=PARETO, sampler=sampler, trials=12)
    search.run()
    study = search.store.study
    best = {tuple(trial.values) for trial in study.best_trials}
    front = pareto_front(search.store.candidates(), DEVICE_BYTES)
    ours = {(spot_of(c).step_seconds, peak_of(c) / 2**30) for c in front}
    assert best == ours


def test_points_are_spread_confirmed_and_verified(tmp_path: Path) -> None:
    on = measurer()
    result = run(tmp_path, on, trials=20)
    points = result.front()
    verified = [c for c in points if result.is_verified(c)]
    assert len(pareto_front(result.candidates, DEVICE_BYTES)) > MOST_POINTS
    assert len(verified) == MOST_POINTS
    assert {points[0].policy.key, points[-1].policy.key} <= set(on.verified)
    confirmed = {key for _, keys in on.compared for key in keys}
    assert {c.policy.key for c in verified} <= confirmed
    assert result.best is not None and result.best.policy == NO_CHECKPOINTING
    assert to_document(result)["best"]["peak_bytes"] == on.peak_bytes(NO_CHECKPOINTING)


def test_a_budget_is_the_highest_peak(tmp_path: Path) -> None:
    result = run(tmp_path, measurer(), budget_gb=100 / 1024)
    assert result.best is not None
    assert all(peak_of(c) <= 100 * MIB for c in result.front())
    assert peak_of(result.best) == max(peak_of(c) for c in result.front())
    assert "front up to 0.098 GiB" in rows.limit_text(result)


def test_wrong_gradients_leave_the_front(tmp_path: Path) -> None:
    on = measurer(wrong_gradients=lambda policy: 0 < len(policy.layers) < 3)
    result = run(tmp_path, on)
    assert all(len(c.policy.layers) in (0, 3) for c in result.front() if result.is_verified(c))
    assert any("wrong gradients" in reason for reason in result.rejected)
    assert not any(result.was_rejected(c) for c in result.front())


def test_luck_in_a_trial_does_not_stay_on_the_front(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", measurer())
    lucky = plain.front()[len(plain.front()) // 2]
    on = measurer(compared_seconds=lambda policy: 3.0 if policy.key == lucky.policy.key else 1.0)
    result = run(tmp_path / "lucky", on)
    assert lucky.policy.key in {key for _, keys in on.compared for key in keys}
    assert lucky.policy.key not in {c.policy.key for c in result.front()}


def test_continuing_measures_nothing_again(tmp_path: Path) -> None:
    first = run(tmp_path, measurer())
    on = measurer()
    again = run(tmp_path, on)
    assert [c.policy.key for c in again.front()] == [c.policy.key for c in first.front()]
    assert (on.measured.total(), on.compared, on.verified) == (0, [], [])
    assert [c.policy.key for c in load_result(tmp_path / "gpt").front()] == [
        c.policy.key for c in first.front()
    ]


def test_an_interrupted_search_verifies_the_fastest_and_goes_on(tmp_path: Path) -> None:
    on = measurer(interrupt_at=5)
    stopped = run(tmp_path, on)
    assert stopped.interrupted and len(on.verified) == 1
    result = run(tmp_path, measurer())
    assert sum(map(result.is_verified, result.front())) > 3


@pytest.mark.parametrize(
    "options", [{"pareto": False, "budget_gb": 1}, {"budget_gb": 1}], ids=["speed", "capped"]
)
def test_another_goal_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    run(tmp_path, measurer(), trials=1)
    with pytest.raises(StudyError, match="is for another goal"):
        run(tmp_path, measurer(), **options)


def test_where_the_step_does_not_run_without_checkpointing_there_is_a_front(tmp_path: Path) -> None:
    on = measurer(device_bytes=105 * MIB)
    assert on.peak_bytes(NO_CHECKPOINTING) > 105 * MIB
    result = run(tmp_path, on)
    assert result.best is not None
    assert all(row.overhead == "–" for row in rows.front_rows(result))


# --- export at a size -----------------------------------------------------------------------------


def test_the_fastest_verified_is_taken_at_every_boundary(tmp_path: Path) -> None:
    result = run(tmp_path, measurer())
    points = [c for c in result.front() if result.is_verified(c)]
    assert len(points) > 3
    for slower, point in zip([None, *points], points, strict=False):
        exactly = result_at(result, peak_of(point))
        assert exactly.best is not None and exactly.best.policy.key == point.policy.key
        assert exactly.verification is not None and exactly.verification.passed
        assert exactly.budget_bytes == peak_of(point)
        if slower is None:
            with pytest.raises(UsageError, match="has no verified policy that peaks at"):
                result_at(result, peak_of(point) - 1)
            continue
        below = result_at(result, peak_of(point) - 1)
        assert below.best is not None and below.best.policy.key == slower.policy.key


def test_a_peak_as_it_is_shown_takes_the_point_that_it_is_shown_for(tmp_path: Path) -> None:
    result = run(tmp_path, measurer())
    for row in rows.front_rows(result):
        most_bytes = units.parse_memory(row.peak)
        assert most_bytes is not None
        if row.verified == "yes":
            found = result_at(result, most_bytes).best
            assert found is not None
            assert rows.overhead_text(result, found) == row.overhead
            assert peak_of(found) <= most_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("18", 18 * 2**30),
        ("18.5GiB", round(18.5 * 2**30)),
        ("900MiB", 900 * MIB),
        (" .5 ", 2**29),
        ("8GB", 8 * 10**9),
        ("18GiB less", None),
        ("-1", None),
        ("", None),
    ],
)
def test_a_size_is_read(text: str, size: int | None) -> None:
    assert units.parse_memory(text) == size


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (2**30, "1.000 GiB"),
        (2**30 + 1, "1.001 GiB"),
        (10 * 2**30 - 1, "10.000 GiB"),
        (2**20 + 1, "0.00098 GiB"),
    ],
)
def test_a_limit_is_shown_rounded_up(size: int, shown: str) -> None:
    assert units.format_gib_up(size) == shown


def test_what_was_never_verified_is_refused_with_what_there_is(tmp_path: Path) -> None:
    options = SearchOptions(budget_gb=100 / 1024, root=tmp_path, report=False, tiers=1, trials=4)
    result = run_search(measurer(), "fast", options, Listener())
    assert result.best is not None
    least = min(peak_of(c) for c in result.candidates if c.measurement is not None)
    assert least < peak_of(result.best)
    with pytest.raises(UsageError) as raised:
        result_at(result, least)
    said = str(raised.value)
    assert "it was never verified: search with --budget-gb" in said
    smallest = units.format_gib_up(peak_of(result.best))
    assert f"The smallest that is verified peaks at {smallest}" in said
    with pytest.raises(UsageError, match="Nothing that was measured peaks so low"):
        result_at(result, least - 1)
    # With room for no checkpointing, that is faster, and was not verified.
    found = result_at(result, DEVICE_BYTES)
    assert found.best is not None and found.best.policy.key == result.best.policy.key
    faster = faster_at(found, DEVICE_BYTES)
    assert faster is not None and faster.policy == NO_CHECKPOINTING
    lines = rows.exported_lines(found, faster)
    assert "measured, verified." in lines[0]
    assert "but it was never verified" in lines[1]


def test_at_the_size_of_its_own_search_the_winner_is_taken(tmp_path: Path) -> None:
    options = SearchOptions(budget_gb=100 / 1024, root=tmp_path, report=False, tiers=1, trials=4)
    result = run_search(measurer(), "fast", options, Listener())
    found = result_at(result, 100 * MIB)
    assert found.best is not None and result.best is not None
    assert found.best.policy.key == result.best.policy.key
    assert faster_at(found, 100 * MIB) is None
