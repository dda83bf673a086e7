"""Which decisions mattered, in studies whose answer is known."""

from __future__ import annotations

import pytest
from scripted import MIB, SITE_OPS, ScriptedMeasurer, make_layers, make_search

from sac_search.study.importance import importances
from sac_search.study.sampler import SamplerName
from sac_search.study.store import StudyStore


def searched(trials: int, *, budget_mib: int = 400, **changes: object) -> StudyStore:
    measurer = ScriptedMeasurer(layers=make_layers(6, SITE_OPS), **changes)
    search = make_search(
        measurer,
        budget_mib * MIB,
        trials=trials,
        sampler=SamplerName.RANDOM,
    )
    search.run()
    return search.store


def test_what_takes_the_time_matters_most() -> None:
    found = importances(searched(40))
    fractions = [importance.fraction for importance in found]
    assert fractions == sorted(fractions, reverse=True)
    assert sum(fractions) == pytest.approx(1.0)
    # Matmuls are most of a layer; the copies and additions are next to nothing.
    assert [importance.name for importance in found[:2]] == ["save.matmul", "layers.Block"]
    assert found[0].fraction > 0.3 > 0.05 > found[-1].fraction


def test_a_few_trials_tell_nothing() -> None:
    assert importances(searched(5)) == ()


def test_where_nothing_fits_nothing_is_told() -> None:
    assert importances(searched(40, budget_mib=60)) == ()


def test_where_little_fits_that_is_what_counts() -> None:
    found = importances(searched(40, budget_mib=140))
    assert len({importance.fraction for importance in found}) > 1
