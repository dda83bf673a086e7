"""Reads a report back: its elements, its text and the figures in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

_VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})


class Page(HTMLParser):
    """A page of HTML, taken apart as a browser would."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def visible(self) -> str:
        """The text that people see."""
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> dict[str, Any]:
        """What plotly is given, by the name of its place."""
        found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', self.text)
        assert found is not None
        return json.loads(found[1])

    def has(self, tag: str) -> list[dict[str, str | None]]:
        """Returns the attributes of every element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]


def trace_named(figure: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the one trace of a figure that has this name."""
    (found,) = (trace for trace in figure["data"] if trace["name"] == name)
    return found
