"""Options of a search: what is refused, and how choices may be said."""

from __future__ import annotations

import pytest

from sac_search.device import Clock
from sac_search.errors import UsageError
from sac_search.options import Compile, SearchOptions
from sac_search.space import Granularity, LayerChoiceMode
from sac_search.study.sampler import SamplerName
from sac_search.worker.client import Isolation


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("compile", "search", Compile.SEARCH),
        ("sampler", "random", SamplerName.RANDOM),
        ("granularity", "class", Granularity.CLASS),
        ("layer_choice", "each", LayerChoiceMode.EACH),
        ("isolate", "trial", Isolation.TRIAL),
        ("clock", "wall", Clock.WALL),
        ("clock", None, None),
    ],
)
def test_choices_may_be_given_by_name(name: str, value: str | None, meant: object) -> None:
    options = SearchOptions(budget_gb=1, **{name: value})  # type: ignore[arg-type]
    assert getattr(options, name) is meant


def test_a_choice_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="compile is 'yes'; it must be one of: off, on, search"):
        SearchOptions(budget_gb=1, compile="yes")  # type: ignore[arg-type]
