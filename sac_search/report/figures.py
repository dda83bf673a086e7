"""The report's plots as plotly figures: plain dicts and lists. Pure; plotly is not needed for it.

Colors are names of the page's CSS variables, which its script replaces, so that one figure serves
light and dark. What plotly reads as markup is escaped here.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from sac_search import units
from sac_search.report.points import (
    Ending,
    Group,
    PolicyPoint,
    budget_is_near,
    frontier_spots,
    most_seconds,
    peak_name,
    phase_spans,
    policy_points,
    trial_points,
)
from sac_search.study.result import SearchResult
from sac_search.study.timelines import PolicyTimeline
from sac_search.timeline import MemoryKind

Figure = dict[str, Any]

KIND_COLORS = {
    MemoryKind.PARAMETERS: "--parameters",
    MemoryKind.OPTIMIZER: "--optimizer",
    MemoryKind.OTHER: "--other",
    MemoryKind.GRADIENTS: "--gradients",
    MemoryKind.SAVED: "--saved",
    MemoryKind.RECOMPUTED: "--recomputed",
    MemoryKind.TEMPORARY: "--temporary",
}
"""The color of each kind of memory, from the bottom of the stack to its top."""

# Baselines are squares, trials circles, the winner a star; over the budget is hollow.
_MARKERS = {
    Group.BASELINE: {"symbol": "square", "size": 10, "color": "--baseline"},
    Group.FITTING: {"symbol": "circle", "size": 9, "color": "--trial"},
    Group.OVER: {"symbol": "circle-open", "size": 9, "color": "--over"},
    Group.SLOW: {"symbol": "diamond-open", "size": 9, "color": "--over"},
    Group.BEST: {"symbol": "star", "size": 17, "color": "--best"},
}
_ENDINGS = {
    Ending.FITS: ("circle", "--trial"),
    Ending.OVER: ("circle-open", "--over"),
    Ending.SLOW: ("circle-open", "--over"),
    Ending.RULED_OUT: ("x-thin-open", "--over"),
    Ending.FAILED: ("x", "--budget"),
}
# As wide as a label that hovers over a point may be on a telephone.
_HOVER_WIDTH = 44
# So many policies can be numbered one by one.
_FEW_POLICIES = 10
# From here on seconds are easier to read than milliseconds.
_LONG_STEP_SECONDS = 10.0
# What a letter of a phase's name needs of the step: a phase that is shorter has no room for it.
_LETTER_FRACTION = 0.015
# A budget above the highest curve by more than this would leave that a corner of the plot.
_SIGHT = 2
# Above the highest curve, for the name of its peak.
_HEADROOM = 1.22


def figures(result: SearchResult) -> dict[str, Figure]:
    """Returns every plot that the study has figures for, by the name of its place in the page."""
    found = {}
    if policy_points(result):
        found["trade-off"] = trade_off(result)
    highest_bytes = max((t.timeline.peak_bytes for t in result.timelines), default=0)
    line_bytes = result.budget_bytes if result.goal.has_budget else None
    for number, entry in enumerate(result.timelines):
        found[f"memory-{number}"] = memory_over_step(entry, line_bytes, highest_bytes)
    if any(point.step_seconds is not None for point in trial_points(result)):
        found["trials"] = trials(result)
    return found


def trade_off(result: SearchResult) -> Figure:
    """Returns step time against peak: what was measured, and what the planner believes."""
    points, spots = policy_points(result), frontier_spots(result)
    scale, unit = _step_unit([point.step_seconds for point in points])
    traces: list[dict[str, Any]] = []
    if spots:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                # Beliefs are of eager steps; where some are compiled, that has to be said.
                "name": "planner's frontier" + (", eager" if result.compile_options else ""),
                "x": [spot.peak_bytes / units.GIB for spot in spots],
                "y": [spot.step_seconds * scale for spot in spots],
                "hovertext": [hover(spot.lines) for spot in spots],
                "hoverinfo": "text",
                "line": {"dash": "dot", "width": 2, "color": "--frontier"},
                "marker": {"symbol": "diamond", "size": 6, "color": "--frontier"},
            }
        )
    for group, marker in _MARKERS.items():
        alike = [point for point in points if point.group is group]
        if alike:
            traces.append(_policies(alike, group, marker, scale))
    shapes, notes = [], []
    if budget_is_near(result):
        shapes.append(_line(x=result.budget_bytes / units.GIB, color="--budget"))
        notes.append(_note("budget", x=result.budget_bytes / units.GIB, color="--budget"))
    highest_seconds = most_seconds(result)
    if highest_seconds is not None:
        shapes.append(_line(y=highest_seconds * scale, color="--budget"))
        notes.append(_note("highest overhead", y=highest_seconds * scale, color="--budget"))
    bound_seconds = result.lower_bound_seconds
    if bound_seconds is not None and math.isfinite(bound_seconds):
        shapes.append(_line(y=bound_seconds * scale, color="--bound"))
        notes.append(_note("planner's bound", y=bound_seconds * scale, color="--bound"))
    layout = plot_layout(x="peak of the step, GiB", y=f"step time, {unit}")
    return {"data": traces, "layout": layout | {"shapes": shapes, "annotations": notes}}


def _policies(
    points: Sequence[PolicyPoint], group: Group, marker: dict[str, Any], scale: float
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": str(group),
        "x": [point.peak_bytes / units.GIB for point in points],
        "y": [point.step_seconds * scale for point in points],
        "hovertext": [hover(point.lines) for point in points],
        "hoverinfo": "text",
        "marker": marker,
    }


def memory_over_step(entry: PolicyTimeline, budget_bytes: int | None, highest_bytes: int) -> Figure:
    """Returns live bytes over one step, stacked by kind, the peak marked and named.

    `highest_bytes` is the highest peak of all timelines, so that they can be compared by eye.
    """
    timeline = entry.timeline
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": str(kind),
            "stackgroup": "memory",
            "x": list(timeline.ops),
            "y": [size / units.GIB for size in timeline.kind_bytes[kind]],
            "line": {"width": 0, "color": color},
            "fillcolor": color,
            "hovertemplate": "%{y:.4f} GiB",
        }
        for kind, color in KIND_COLORS.items()
        if any(timeline.kind_bytes.get(kind, ()))
    ]
    at, peak_gib = timeline.ops[timeline.peak_index], timeline.peak_bytes / units.GIB
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak",
            "x": [at],
            "y": [peak_gib],
            "marker": {"symbol": "triangle-down", "size": 11, "color": "--text"},
            "hovertext": [hover((units.format_gib(timeline.peak_bytes), peak_name(timeline)))],
            "hoverinfo": "text",
        }
    )
    spans = phase_spans(timeline)
    length = max(1, timeline.ops[-1])
    notes = [
        _note(str(span.phase), x=(span.first_op + span.last_op) / 2, color="--muted", middle=True)
        for span in spans
        if (span.last_op - span.first_op) / length >= _LETTER_FRACTION * len(span.phase)
    ]
    is_late = at > length / 2
    notes.append(
        {
            "x": at,
            "y": peak_gib,
            "text": hover((f"peak {units.format_gib(timeline.peak_bytes)}", peak_name(timeline))),
            "showarrow": False,
            "xanchor": "right" if is_late else "left",
            "yanchor": "bottom",
            "xshift": -8 if is_late else 8,
            "align": "right" if is_late else "left",
            "font": {"color": "--text"},
            "bgcolor": "--card",
        }
    )
    shapes, top_bytes = [], highest_bytes
    if budget_bytes is not None and is_in_sight(budget_bytes, highest_bytes):
        shapes.append(_line(y=budget_bytes / units.GIB, color="--budget"))
        top_bytes = max(highest_bytes, budget_bytes)
    shapes += [_line(x=span.first_op, color="--grid", dash="solid") for span in spans[1:]]
    layout = plot_layout(x="ops that have run", y="live tensors, GiB")
    layout["yaxis"]["range"] = [0, _HEADROOM * top_bytes / units.GIB]
    layout["xaxis"]["range"] = [0, length]
    layout |= {
        "shapes": shapes,
        "annotations": notes,
        "showlegend": False,
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}


def is_in_sight(budget_bytes: int, highest_bytes: int) -> bool:
    """Returns whether the budget is drawn above steps that peak at `highest_bytes`."""
    return budget_bytes < _SIGHT * highest_bytes


def trials(result: SearchResult) -> Figure:
    """Returns how the search went: step time in the order of the study, and the best so far."""
    points = trial_points(result)
    ran_seconds = [point.step_seconds for point in points if point.step_seconds is not None]
    scale, unit = _step_unit(ran_seconds)
    lowest = min(ran_seconds, default=0.0)
    best = [point for point in points if point.best_seconds is not None]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [point.number for point in best],
            "y": [scale * point.best_seconds for point in best if point.best_seconds is not None],
            "line": {"shape": "hv", "width": 2, "color": "--best"},
            "hoverinfo": "skip",
        }
    ]
    for ending, (symbol, color) in _ENDINGS.items():
        alike = [point for point in points if point.ending is ending]
        # What has no step time lies at the bottom.
        seconds = [lowest if p.step_seconds is None else p.step_seconds for p in alike]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": str(ending),
                "x": [point.number for point in alike],
                "y": [scale * second for second in seconds],
                "hovertext": [hover((point.name, point.told)) for point in alike],
                "hoverinfo": "text",
                "marker": {"symbol": symbol, "size": 9, "color": color},
            }
        )
    layout = plot_layout(x="policies, baselines first", y=f"step time, {unit}")
    if len(points) <= _FEW_POLICIES:
        layout["xaxis"]["dtick"] = 1  # or there would be ticks between one policy and the next
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


# --- what all plots have --------------------------------------------------------------------------


def plot_layout(*, x: str, y: str) -> dict[str, Any]:
    """Returns what all plots have: axes of these titles, a legend above, the page's colors."""
    axis = {
        "gridcolor": "--grid",
        "linecolor": "--grid",
        "zeroline": False,
        "automargin": True,
    }
    return {
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom"},
        "margin": {"l": 8, "r": 12, "t": 30, "b": 8},
        "paper_bgcolor": "--clear",
        "plot_bgcolor": "--clear",
        "font": {"color": "--text", "size": 12},
        "hoverlabel": {
            "bgcolor": "--card",
            "bordercolor": "--grid",
            "font": {"color": "--text"},
            "align": "left",
        },
        "hovermode": "closest",
        "modebar": {"bgcolor": "--clear", "color": "--muted", "activecolor": "--text"},
    }


def _line(
    *, color: str, x: float | None = None, y: float | None = None, dash: str = "dash"
) -> dict[str, Any]:
    """Returns a line across the whole plot, upright at `x` or level at `y`."""
    line = {"color": color, "width": 1.5, "dash": dash}
    if x is not None:
        ends: dict[str, Any] = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    else:
        ends = {"y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1}
    return {"type": "line", "layer": "below", "line": line, **ends}


def _note(
    text: str, *, color: str, x: float | None = None, y: float | None = None, middle: bool = False
) -> dict[str, Any]:
    """Returns a word beside a level line, or above the plot: where a line or a stretch is."""
    note = {"text": html.escape(text), "showarrow": False, "font": {"color": color, "size": 11}}
    if x is not None:
        place = {"x": x, "yref": "paper", "y": 1, "yanchor": "bottom"}
        return note | place | {"xanchor": "center" if middle else "left"}
    return note | {"y": y, "xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom"}


def _step_unit(seconds: Iterable[float]) -> tuple[float, str]:
    """Returns what to multiply seconds with, and what they are then."""
    return (1.0, "s") if max(seconds, default=0.0) >= _LONG_STEP_SECONDS else (1e3, "ms")


def hover(lines: Iterable[str]) -> str:
    """Returns the text that hovers over a point, wrapped and escaped."""
    wrapped = (part for line in lines for part in textwrap.wrap(line, _HOVER_WIDTH) or [""])
    return "<br>".join(html.escape(part, quote=False) for part in wrapped)
