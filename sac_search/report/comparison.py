"""Two studies, or two exported policies, side by side. Pure.

Times of unlike environments, or of a machine that was not as fast, stand beside each other and are
not compared.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sac_search import records, units
from sac_search.errors import UsageError
from sac_search.policy import Policy, Tier, describe_tier
from sac_search.records import Environment, Evidence
from sac_search.report.facts import Unit, csv_table, escape_markdown, format_value
from sac_search.report.rows import lack_of_winner
from sac_search.study.goal import SPEED
from sac_search.study.result import SearchResult

_LEFT_ALONE = "left alone"
# Where the same step took longer by more than this, and than the noise, the machine was slower.
_SPEED_FRACTION = 0.03
# What the bytes of a step depend on, beside its policy and its workload's code.
_OF_SIZE = ("device", "dtype", "batch_size", "sequence_length", "parameter_count", "world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    """The study, or the module's file."""
    environment: Environment
    """What its figures belong to."""
    budget_bytes: int | None
    """The budget; None where none was given."""
    evidence: Evidence
    """Where its figures come from."""
    policy: Policy | None
    """The winner; None when there is none."""
    lack: str = ""
    """Why there is none, in a few words."""
    step_seconds: float | None = None
    """Its step time."""
    noise_fraction: float | None = None
    """Standard error of the step time, as a fraction of it; None where it is not known."""
    overhead: float | None = None
    """Its step time above that without checkpointing, as a fraction."""
    peak_bytes: int | None = None
    """Its peak."""
    full_seconds: float | None = None
    """Step time with every layer checkpointed, where known."""
    goal: str = SPEED.describe()
    """What it was searched for."""
    layers: tuple[str, ...] = ()
    """All layers that could be checkpointed, in the order in which they run, where known."""

    @property
    def plain_seconds(self) -> float | None:
        """Step time without checkpointing, where known."""
        if self.step_seconds is None or self.overhead is None or self.overhead <= -1:
            return None
        return self.step_seconds / (1 + self.overhead)

    @property
    def tiers(self) -> dict[str, Tier]:
        """The checkpointed layers, each with its tier."""
        if self.policy is None:
            return {}
        return {choice.name: self.policy.tiers[choice.tier] for choice in self.policy.layers}

    def describe(self, tier: Tier | None) -> str:
        """Returns what a layer of that tier does."""
        if tier is not None:
            return describe_tier(tier)
        compiled = None if self.policy is None else self.policy.compiled
        by_torch = compiled is not None and compiled.memory_budget < 1
        return "as torch's memory budget has it" if by_torch else _LEFT_ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of both."""

    what: str
    """What it is."""
    one: float | str | None
    """The first side's; None where it has none."""
    other: float | str | None
    """The second side's."""
    unit: Unit | None = None
    """What it counts; None for words."""
    difference: float | None = None
    """The second's over the first's, less one; of overheads and counts, their difference."""
    remark: str = ""
    """Why there is no difference, or what to think of it."""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as people read it."""
        difference = "" if self.difference is None else _describe_difference(self)
        together = f"{difference} ({self.remark})" if difference and self.remark else ""
        return (
            self.what,
            self._cell(self.one),
            self._cell(self.other),
            together or difference or self.remark,
        )

    def _cell(self, value: float | str | None) -> str:
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        assert self.unit is not None
        return format_value(value, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Layers, one after the other, with which the two policies do two things."""

    layers: tuple[str, ...]
    """Their names."""
    one: str
    """What the first policy does."""
    other: str
    """What the second does."""
    only_one: tuple[str, ...] = ()
    """What only the first saves."""
    only_other: tuple[str, ...] = ()
    """What only the second saves."""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as people read it."""
        first, last = self.layers[0], self.layers[-1]
        names = first if first == last else f"{first} … {last} ({len(self.layers)})"
        only = [
            f"{sign} {', '.join(labels)}"
            for sign, labels in (("-", self.only_one), ("+", self.only_other))
            if labels
        ]
        return names, self.one, self.other, "; ".join(only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides, and how they differ."""

    one: str
    """Name of the first."""
    other: str
    """Name of the second."""
    environment: tuple[Row, ...]
    """What differs between their environments."""
    figures: tuple[Row, ...]
    """Their figures."""
    layers: tuple[LayerRow, ...]
    """Where their policies differ."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def tables(self) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
        """The tables, each with its title and without those that are empty."""
        found: list[tuple[str, Sequence[Row] | Sequence[LayerRow]]] = [
            ("Environments", self.environment),
            ("Figures", self.figures),
            ("Layers", self.layers),
        ]
        return [(title, [row.cells for row in rows]) for title, rows in found if rows]


# --- the sides ------------------------------------------------------------------------------------


def side_of(result: SearchResult) -> Side:
    """Returns a study as one side."""
    side = Side(
        name=result.study_name,
        environment=result.environment,
        budget_bytes=result.budget_bytes if result.goal.has_budget else None,
        evidence=result.evidence,
        policy=None,
        lack=lack_of_winner(result),
        goal=result.goal.describe(),
        layers=tuple(layer.name for layer in result.layers),
    )
    best = result.best
    if best is None or best.measurement is None:
        return side
    return replace(
        side,
        policy=best.policy,
        lack="",
        step_seconds=best.step_seconds,
        noise_fraction=best.measurement.step_noise_fraction,
        overhead=result.overhead_of(best),
        peak_bytes=best.measurement.peak_bytes,
        full_seconds=None if result.full is None else result.full.step_seconds,
    )


def side_of_module(name: str, meta: Mapping[str, Any]) -> Side:
    """Returns an exported module as one side, by its META.

    Raises:
        UsageError: META lacks something, or has it in another form.
    """
    try:
        figures = meta["figures"]
        return Side(
            name=name,
            environment=records.decode(json.dumps(meta["environment"]), Environment),
            budget_bytes=meta["budget_bytes"],
            evidence=Evidence(meta["evidence"]),
            policy=records.decode(json.dumps(meta["policy"]), Policy),
            step_seconds=figures["step_seconds"],
            overhead=figures["overhead"],
            peak_bytes=figures["peak_bytes"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: its META is not that of an exported policy: {error}") from error


# --- side by side ---------------------------------------------------------------------------------


def compare(one: Side, other: Side) -> Comparison:
    """Returns how two sides differ, environments first."""
    environment = _environment(one, other)
    notes = []
    if environment:
        notes.append(
            "These are two environments, so step times are not compared: what differs between them "
            "may be the reason for any difference."
        )
    if one.evidence is not other.evidence:
        notes.append(
            f"{one.name} is {one.evidence}, {other.name} {other.evidence}: a forecast is not "
            "compared with a measurement."
        )
    elif not environment and (speeds := _unlike_speeds(one, other)):
        notes.append(speeds)
    layers: tuple[LayerRow, ...] = ()
    if one.policy is not None and other.policy is not None:
        if _are_of_one_model(one, other):
            layers = _layers(one, other)
            if not layers:
                notes.append("Both policies do the same with every layer.")
        else:
            notes.append("The two have no layer in common.")
    return Comparison(
        one=one.name,
        other=other.name,
        environment=environment,
        figures=_figures(one, other, are_alike=not environment),
        layers=layers,
        notes=tuple(notes),
    )


def _environment(one: Side, other: Side) -> tuple[Row, ...]:
    return tuple(
        Row(what=label, one=ours, other=theirs)
        for label, ours, theirs in one.environment.differing(other.environment)
    )


def _figures(one: Side, other: Side, *, are_alike: bool) -> tuple[Row, ...]:
    same_evidence = one.evidence is other.evidence
    can_time = are_alike and same_evidence
    same_speed = not _unlike_speeds(one, other)
    can_weigh = same_evidence and all(
        getattr(one.environment, name) == getattr(other.environment, name) for name in _OF_SIZE
    )
    count = (_checkpointed(one), _checkpointed(other))
    goals = Row(what="goal", one=one.goal, other=other.goal)
    return (
        *([goals] if {one.goal, other.goal} != {SPEED.describe()} else []),
        _row("budget", one.budget_bytes, other.budget_bytes, Unit.GIB),
        Row(what="evidence", one=str(one.evidence), other=str(other.evidence)),
        _within_noise(
            one,
            other,
            _row(
                "step time",
                one.step_seconds,
                other.step_seconds,
                Unit.SECONDS,
                can_compare=can_time and same_speed,
            ),
        ),
        _row(
            "without checkpointing",
            one.plain_seconds,
            other.plain_seconds,
            Unit.SECONDS,
            can_compare=can_time,
        ),
        _within_noise(
            one,
            other,
            _row("overhead", one.overhead, other.overhead, Unit.CHANGE, can_compare=can_time),
        ),
        _row("peak", one.peak_bytes, other.peak_bytes, Unit.GIB, can_compare=can_weigh),
        _row("checkpointed layers", *count, Unit.COUNT),
        Row(what="policy", one=_describe(one), other=_describe(other)),
    )


def _unlike_speeds(one: Side, other: Side) -> str:
    """Returns that the machine ran one study faster than the other; nothing where it did not."""
    what, ours, theirs = "without checkpointing", one.plain_seconds, other.plain_seconds
    instead = "; overheads are, since each is over its own study's step"
    if not ours or not theirs:
        what, ours, theirs = "with every layer checkpointed", one.full_seconds, other.full_seconds
        instead = ""
    if not ours or not theirs:
        return ""
    noise = 2 * math.hypot(one.noise_fraction or 0.0, other.noise_fraction or 0.0)
    if max(ours, theirs) / min(ours, theirs) - 1 <= max(_SPEED_FRACTION, noise):
        return ""
    return (
        f"The same step, {what}, took {units.format_seconds(ours)} in {one.name} and "
        f"{units.format_seconds(theirs)} in {other.name}: the machine ran at two speeds, so step "
        f"times are not compared{instead}."
    )


def _row(
    what: str,
    one: float | None,
    other: float | None,
    unit: Unit,
    *,
    can_compare: bool = True,
) -> Row:
    row = Row(what=what, one=one, other=other, unit=unit)
    if one is None or other is None:
        return row
    if not can_compare:
        return replace(row, remark="not compared")
    if unit in (Unit.CHANGE, Unit.COUNT):
        return replace(row, difference=other - one)
    return replace(row, difference=other / one - 1 if one else None)


def _within_noise(one: Side, other: Side, row: Row) -> Row:
    """Returns the row of a step time or an overhead, with its remark if the two are as good."""
    noises = []
    for side in (one, other):
        if side.noise_fraction is None:
            return row
        scale = 1 + (side.overhead or 0.0) if row.unit is Unit.CHANGE else 1.0
        noises.append(side.noise_fraction * scale)
    if row.difference is None or abs(row.difference) > 2 * math.hypot(*noises):
        return row
    return replace(row, remark="within the noise")


def _checkpointed(side: Side) -> int | None:
    return None if side.policy is None else len(side.policy.layers)


def _describe(side: Side) -> str:
    return side.lack if side.policy is None else side.policy.describe()


def _are_of_one_model(one: Side, other: Side) -> bool:
    names = [set(_names(one)), set(_names(other))]
    return not all(names) or not names[0].isdisjoint(names[1])


def _names(side: Side) -> tuple[str, ...]:
    if side.layers or side.policy is None:
        return side.layers
    return side.policy.layer_names


def _layers(one: Side, other: Side) -> tuple[LayerRow, ...]:
    """Returns the layers with which the two do two things, those in a row together."""
    names = dict.fromkeys((*_names(one), *_names(other)))
    tiers = (one.tiers, other.tiers)
    found = []
    for (ours, theirs), members in itertools.groupby(
        names, key=lambda name: (tiers[0].get(name), tiers[1].get(name))
    ):
        if _key(ours) != _key(theirs):
            saved = [set(_labels(tier)) for tier in (ours, theirs)]
            found.append(
                LayerRow(
                    layers=tuple(members),
                    one=one.describe(ours),
                    other=other.describe(theirs),
                    only_one=tuple(sorted(saved[0] - saved[1])),
                    only_other=tuple(sorted(saved[1] - saved[0])),
                )
            )
    return tuple(found)


def _key(tier: Tier | None) -> object:
    # What a tier is called does not count, only what it does.
    return None if tier is None else replace(tier, classes=())


def _labels(tier: Tier | None) -> tuple[str, ...]:
    return () if tier is None else tier.classes or tier.ops


def _describe_difference(row: Row) -> str:
    assert row.difference is not None
    if row.unit is Unit.CHANGE:
        return f"{row.difference * 100:+z.1f} points"
    if row.unit is Unit.COUNT:
        return f"{row.difference:+g}"
    return format_value(row.difference, Unit.CHANGE)


# --- formats --------------------------------------------------------------------------------------


def render(comparison: Comparison, name: str) -> str:
    """Returns a comparison in a format for files: `md`, `json` or `csv`."""
    return {"md": _to_markdown, "json": _to_json, "csv": _to_csv}[name](comparison)


def _to_markdown(comparison: Comparison) -> str:
    header = ("", comparison.one, comparison.other, "difference")
    lines = [f"# {escape_markdown(comparison.one)} and {escape_markdown(comparison.other)}"]
    lines += [part for note in comparison.notes for part in ("", escape_markdown(note))]
    for title, rows in comparison.tables:
        table = [f"| {' | '.join(map(escape_markdown, row))} |" for row in (header, *rows)]
        lines += ["", f"## {title}", "", table[0], "| --- | --- | --- | --- |", *table[1:]]
    return "\n".join(lines)


def _to_json(comparison: Comparison) -> str:
    document = records.to_builtins(comparison)
    for row in document["figures"]:
        if row["unit"] in (Unit.GIB, Unit.MIB):
            row["unit"] = "bytes"
    return json.dumps(document, indent=1)


def _to_csv(comparison: Comparison) -> str:
    document = json.loads(_to_json(comparison))
    rows = [["table", "what", comparison.one, comparison.other, "unit", "difference", "remark"]]
    for table in ("environment", "figures"):
        for row in document[table]:
            cells = (row[name] for name in ("what", "one", "other", "unit", "difference", "remark"))
            rows.append([table, *("" if cell is None else str(cell) for cell in cells)])
    for layer_row in comparison.layers:
        names, ours, theirs, only = layer_row.cells
        rows.append(["layers", names, ours, theirs, "", "", only])
    return csv_table(rows)
