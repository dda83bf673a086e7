"""Holds an explanation against the study that it explains, for tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sac_search.report.explain import explain
from sac_search.report.facts import Explanation, Fact
from sac_search.study.result import SearchResult


class _Fields(Mapping[str, Any]):
    """The names that a source may use: a result's fields, and nothing else."""

    def __init__(self, result: SearchResult) -> None:
        self._result = result

    def __getitem__(self, name: str) -> Any:
        return getattr(self._result, name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def check_traced(result: SearchResult) -> None:
    """Works every figure out again as its source says, and looks for numbers that are none."""
    explanation = explain(result)
    for figure in explanation.figures:
        quantity = figure.quantity
        found = eval(quantity.source, {"__builtins__": {}}, _Fields(result))  # noqa: S307
        assert found == quantity.value, figure
    for section in explanation.sections:
        assert not any(digits_beside_figures(fact) for fact in section.facts)


def sentences(explanation: Explanation, title: str) -> list[str]:
    """Returns what a section says."""
    return [
        fact.text
        for section in explanation.sections
        if section.title == title
        for fact in section.facts
    ]


def digits_beside_figures(fact: Fact) -> str:
    """Returns a sentence without its figures and names, as far as it still has numbers."""
    left = f" {fact.sentence} "
    for known in sorted([*(f.text for f in fact.figures), *fact.names], key=len, reverse=True):
        left = left.replace(known, "")
    return left if re.search(r"\d", left) else ""
