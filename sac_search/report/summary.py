"""What a report opens with: the figures that matter, each with what it is held against. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sac_search import units
from sac_search.records import Evidence, Measurement
from sac_search.report import rows
from sac_search.study.candidate import Candidate
from sac_search.study.goal import GoalKind
from sac_search.study.result import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One figure of the headline."""

    label: str
    """What it is."""
    value: str
    """The figure; a dash where it is not known."""
    note: str
    """What it is held against."""


def cards(result: SearchResult) -> list[Card]:
    """Returns the headline's figures: peak, overhead, saved memory, distance to the bound."""
    best = result.best
    if best is None or best.measurement is None:
        return _cards_of_nothing(result)
    return [
        _peak(result, best.measurement),
        _overhead(result, best),
        _saved_memory(result, best.measurement),
        _distance_to_bound(result, best),
    ]


def _peak(result: SearchResult, measurement: Measurement) -> Card:
    note = f"{result.goal.describe()}{_by_forecast(result)}"
    if result.goal.kind is GoalKind.SPEED:
        part = measurement.peak_bytes / max(1, result.budget_bytes)
        budget = units.format_gib(result.budget_bytes)
        note = f"{100 * part:.1f}% of the budget of {budget}{_by_forecast(result)}"
    return Card(label="Peak of the step", value=units.format_gib(measurement.peak_bytes), note=note)


def _by_forecast(result: SearchResult) -> str:
    return "" if result.evidence is Evidence.MEASURED else ", by forecast"


def _overhead(result: SearchResult, best: Candidate) -> Card:
    overhead, none = result.overhead_of(best), result.none
    value, note = "–", "the step without checkpointing did not run, so there is no overhead"
    if best.step_seconds is None:
        return Card(label="Overhead", value=value, note="the step time is not known")
    if overhead is not None and none is not None and none.step_seconds is not None:
        value = rows.overhead_text(result, best)
        note = (
            f"{units.format_seconds(best.step_seconds)} a step, "
            f"{units.format_seconds(none.step_seconds)} without checkpointing{_by_forecast(result)}"
        )
    elif result.estimated_overhead_of(best) is not None:
        value = rows.overhead_text(result, best)
        note = f"{units.format_seconds(best.step_seconds)} a step; against a forecast, for {note}"
        note = note.removesuffix(", so there is no overhead")
    else:
        note = f"{units.format_seconds(best.step_seconds)} a step; {note}"
    return Card(label="Overhead", value=value, note=note)


def _saved_memory(result: SearchResult, measurement: Measurement) -> Card:
    none = result.none
    if none is not None and none.measurement is not None:
        before_bytes, own_bytes = none.measurement.peak_bytes, measurement.peak_bytes
        where = f"without checkpointing{_by_forecast(result)}"
    elif none is not None and none.outcome.forecast_peak_bytes is not None:
        # A forecast is of live tensors, so it is held against those.
        before_bytes, own_bytes = none.outcome.forecast_peak_bytes, measurement.allocated_bytes
        where = "without checkpointing by forecast, which does not run here"
    else:
        note = "it is not known what the step without checkpointing needs"
        return Card(label="Saved memory", value="–", note=note)
    change = own_bytes / before_bytes - 1 if before_bytes else 0.0
    return Card(
        label="Saved memory",
        value=units.format_gib(before_bytes - own_bytes),
        note=f"{units.format_percent(change)} against {units.format_gib(before_bytes)} {where}",
    )


def _distance_to_bound(result: SearchResult, best: Candidate) -> Card:
    bound_seconds = result.lower_bound_seconds
    if not bound_seconds or best.step_seconds is None:
        return Card(label="Distance to the bound", value="–", note="the planner has no bound")
    bound = units.format_seconds(bound_seconds)
    distance = best.step_seconds / bound_seconds - 1
    if rows.beats_bound(distance, best):
        return Card(
            label="Distance to the bound",
            value="–",
            note=(f"{-100 * distance:.1f}% faster than the planner's {bound}: its costs are rough"),
        )
    return Card(
        label="Distance to the bound",
        value=units.format_percent(distance),
        note=f"no policy is faster than {bound} by the planner",
    )


def _cards_of_nothing(result: SearchResult) -> list[Card]:
    note = "no policy was found that stays under it and is verified"
    found = [Card(label="Budget", value=units.format_gib(result.budget_bytes), note=note)]
    if result.goal.kind is not GoalKind.SPEED:
        note = "no policy was found that is within it and is verified"
        found = [Card(label="Limit", value=rows.limit_text(result), note=note)]
    peaks = {c.name: c.measurement.peak_bytes for c in result.candidates if c.measurement}
    if peaks:
        name = min(peaks, key=lambda name: peaks[name])
        value, note = units.format_gib(peaks[name]), f"by {name}"
        found.append(Card(label="Smallest peak", value=value, note=note))
    if result.floor_bytes is not None:
        found.append(
            Card(
                label="Floor",
                value=units.format_gib(result.floor_bytes),
                note="parameters, gradients, optimizer state and the loss, whatever is recomputed",
            )
        )
    return found
