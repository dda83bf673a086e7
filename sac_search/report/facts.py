"""Sentences whose every figure says where it comes from, as text, Markdown, JSON and CSV. Pure.

A figure is worked out of what a result holds, and its source is that same working: an expression
over the fields of `SearchResult`, such as `best.step_seconds / none.step_seconds - 1`.
"""

from __future__ import annotations

import csv
import enum
import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sac_search import units

_WIDTH = 100
# Smaller rates, in ms per MiB, are told in µs.
_SMALL_RATE = 0.1
# Smaller parts are told to a tenth of a hundredth.
_SMALL_SHARE = 0.1
# Less is told in MiB.
_SMALLEST_GIB = 0.01


class Basis(enum.StrEnum):
    """What stands behind a figure, the surest first."""

    GIVEN = "given"
    """It was asked for, or counted: a budget, a number of layers."""
    MEASURED = "measured"
    """Steps were run."""
    FORECAST = "forecast"
    """A step was followed without being run, and priced by published rates."""
    BELIEVED = "believed"
    """The search believes it after all its trials: prices that were fitted to measured steps,
    peaks of dry runs."""


_ORDER = list(Basis)


class Unit(enum.StrEnum):
    """What a figure counts."""

    GIB = "GiB"
    """Bytes of a whole step, printed in GiB unless that is next to nothing."""
    MIB = "MiB"
    """Bytes of a part of it, printed in MiB unless they are many."""
    SECONDS = "seconds"
    """Seconds of a step."""
    CHANGE = "change"
    """A fraction more or less, printed with its sign."""
    SHARE = "share"
    """A part of a whole."""
    RATE = "seconds per byte"
    """Step time for memory, printed in ms or µs per MiB."""
    COUNT = "count"
    """Things."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value, the working that gave it, and what stands behind it. Reckons like a number."""

    value: float
    """The value, in bytes, seconds, or as it is."""
    source: str
    """The working."""
    basis: Basis
    """The least sure of all that went into it."""

    def __add__(self, other: Quantity) -> Quantity:
        return self._with(other, "+", self.value + other.value)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._with(other, "-", self.value - other.value)

    def __mul__(self, other: Quantity) -> Quantity:
        return self._with(other, "*", self.value * other.value)

    def __truediv__(self, other: Quantity) -> Quantity:
        return self._with(other, "/", self.value / other.value)

    def _with(self, other: Quantity, sign: str, value: float) -> Quantity:
        basis = max(self.basis, other.basis, key=_ORDER.index)
        return Quantity(value, f"({self.source} {sign} {other.source})", basis)


def exactly(number: int) -> Quantity:
    """Returns a number that needs no source."""
    return Quantity(number, str(number), Basis.GIVEN)


def total(parts: Sequence[Quantity]) -> Quantity:
    """Returns the sum of `parts`."""
    found = exactly(0)
    for index, part in enumerate(parts):
        found = part if index == 0 else found + part
    return found


def change(new: Quantity, old: Quantity) -> Quantity:
    """Returns how much more `new` is, as a fraction of `old`."""
    return new / old - exactly(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number in a sentence."""

    name: str
    """What it is, in a word or two."""
    quantity: Quantity
    """The number and where it comes from."""
    unit: Unit
    """What it counts."""

    @property
    def text(self) -> str:
        """The number as people read it."""
        return format_value(self.quantity.value, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A sentence, and the figures in it."""

    sentence: str
    """The sentence; says of its figures what stands behind them."""
    figures: tuple[Figure, ...] = ()
    """Every number in it."""
    names: tuple[str, ...] = ()
    """What the study calls things in it: policies, layer kinds, op sites."""
    advice: str = ""
    """What to do about it."""

    @property
    def text(self) -> str:
        """The sentence and the advice."""
        return f"{self.sentence} {self.advice}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Facts about one thing."""

    title: str
    """What about."""
    facts: tuple[Fact, ...]
    """The facts, the weightiest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A study in plain words."""

    title: str
    """What is explained."""
    sections: tuple[Section, ...]
    """What there is to say."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every number in it."""
        return tuple(f for s in self.sections for fact in s.facts for f in fact.figures)


def state(template: str, advice: str = "", /, **parts: tuple[Quantity, Unit] | str) -> Fact:
    """Returns the fact that `template` says, its fields filled with figures and names.

    A sentence whose figures all stand on the same says so once, at its end; otherwise each says it
    for itself. What was given is not marked.
    """
    figures = {
        name: Figure(name=name.replace("_", " "), quantity=part[0], unit=part[1])
        for name, part in parts.items()
        if not isinstance(part, str)
    }
    names = {name: part for name, part in parts.items() if isinstance(part, str)}
    bases = {f.quantity.basis for f in figures.values()} - {Basis.GIVEN}
    marks = {
        name: f" ({f.quantity.basis})"
        if len(bases) > 1 and f.quantity.basis is not Basis.GIVEN
        else ""
        for name, f in figures.items()
    }
    sentence = template.format(
        **{name: figure.text + marks[name] for name, figure in figures.items()}, **names
    )
    if len(bases) == 1:
        sentence = f"{sentence} ({next(iter(bases))})"
    return Fact(
        sentence=f"{sentence}.",
        figures=tuple(figures.values()),
        names=tuple(names.values()),
        advice=advice,
    )


def format_value(value: float, unit: Unit) -> str:
    """Returns a number as people read it."""
    return _FORMATS[unit](value)


# --- formats --------------------------------------------------------------------------------------


def render(explanation: Explanation, name: str, *, width: int) -> str:
    """Returns an explanation in a format: `text`, `md`, `json` or `csv`.

    `width` is that of the terminal; text that nobody would like to read in such long lines is
    narrower.
    """
    if name == "text":
        return to_text(explanation, min(width, _WIDTH))
    return {"md": to_markdown, "json": to_json, "csv": to_csv}[name](explanation)


def to_text(explanation: Explanation, width: int = _WIDTH) -> str:
    """Returns an explanation for a terminal of `width` columns."""
    lines = [explanation.title]
    for section in explanation.sections:
        lines += ["", section.title]
        for fact in section.facts:
            lines += textwrap.wrap(
                fact.text,
                width,
                initial_indent="  - ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join([*lines, "", *textwrap.wrap(_legend(explanation), width)]).rstrip()


def to_markdown(explanation: Explanation) -> str:
    """Returns an explanation as Markdown."""
    lines = [f"# {escape_markdown(explanation.title)}"]
    for section in explanation.sections:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- {escape_markdown(fact.text)}" for fact in section.facts]
    return "\n".join([*lines, "", _legend(explanation)]).rstrip()


def to_json(explanation: Explanation) -> str:
    """Returns an explanation for programs: every figure in bytes, seconds or as a fraction."""
    document = {
        "title": explanation.title,
        "sections": [
            {
                "title": section.title,
                "facts": [
                    {
                        "sentence": fact.sentence,
                        "advice": fact.advice,
                        "figures": [_figure_document(figure) for figure in fact.figures],
                    }
                    for fact in section.facts
                ],
            }
            for section in explanation.sections
        ],
    }
    return json.dumps(document, indent=1)


def to_csv(explanation: Explanation) -> str:
    """Returns an explanation as a table with a row per figure."""
    header = ["section", "fact", "figure", "value", "unit", "evidence", "source"]
    rows = [
        [section.title, str(number), *map(str, _figure_document(figure).values())]
        for section in explanation.sections
        for number, fact in enumerate(section.facts, 1)
        for figure in fact.figures
    ]
    return csv_table([header, *rows])


def csv_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as comma-separated values."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().rstrip("\n")


def escape_markdown(text: str) -> str:
    """Returns the text with what Markdown would take for its own."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)


def _figure_document(figure: Figure) -> dict[str, Any]:
    quantity = figure.quantity
    source = quantity.source
    if source.startswith("("):
        source = source[1:-1]  # a working has brackets around it, a field has none
    return {
        "name": figure.name,
        "value": quantity.value,
        "unit": "bytes" if figure.unit in (Unit.GIB, Unit.MIB) else str(figure.unit),
        "evidence": str(quantity.basis),
        "source": source,
    }


def _legend(explanation: Explanation) -> str:
    """Returns what the marks mean, of those that occur."""
    found = {figure.quantity.basis for figure in explanation.figures}
    return " ".join(text for basis, text in _LEGEND.items() if basis in found)


_LEGEND = {
    Basis.MEASURED: "measured: steps were run.",
    Basis.FORECAST: (
        "forecast: no step was run; bytes are those of a dry run, seconds those of published rates."
    ),
    Basis.BELIEVED: (
        "believed: by the prices that the search fitted to its measured steps and by dry runs; "
        "single prices are rough, and are added as if they were independent."
    ),
}


def _format_gib(size_bytes: float) -> str:
    is_small = abs(size_bytes) < _SMALLEST_GIB * units.GIB
    return units.format_mib(size_bytes) if is_small else units.format_gib(size_bytes)


def _format_mib(size_bytes: float) -> str:
    is_large = abs(size_bytes) >= units.GIB
    return units.format_gib(size_bytes) if is_large else units.format_mib(size_bytes)


def _format_rate(seconds_per_byte: float) -> str:
    milliseconds = seconds_per_byte * units.MIB * 1e3
    if abs(milliseconds) < _SMALL_RATE:
        return f"{milliseconds * 1e3:.1f} µs per MiB"
    return f"{milliseconds:.3f} ms per MiB"


_FORMATS = {
    Unit.GIB: _format_gib,
    Unit.MIB: _format_mib,
    Unit.SECONDS: units.format_seconds,
    Unit.CHANGE: units.format_percent,
    Unit.SHARE: lambda part: f"{part * 100:.1f}%" if part < _SMALL_SHARE else f"{part * 100:.0f}%",
    Unit.RATE: _format_rate,
    Unit.COUNT: lambda count: f"{count:,.0f}",
}
