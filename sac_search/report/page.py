"""One page with everything that a study has to show. It opens offline and loads nothing.

Plots are drawn by plotly, which lies compressed in the page. All text of users is escaped.
"""

from __future__ import annotations

import base64
import functools
import gzip
import importlib.resources
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape

from sac_search import units
from sac_search._version import __version__
from sac_search.errors import UsageError
from sac_search.records import Evidence
from sac_search.report import rows
from sac_search.report.facts import Unit, format_value
from sac_search.report.figures import KIND_COLORS, Figure, figures, is_in_sight
from sac_search.report.markup import bullets, named_values, plot, section, table
from sac_search.report.points import (
    budget_is_near,
    frontier_spots,
    most_seconds,
    peak_name,
    peak_parts,
    without_figures,
)
from sac_search.report.strips import LayerStrip, StripPart, Treatment, layer_strips
from sac_search.report.summary import Card, cards
from sac_search.study.baselines import FULL
from sac_search.study.goal import GoalKind
from sac_search.study.importance import Importance
from sac_search.study.result import SearchResult
from sac_search.study.timelines import PolicyTimeline

_INSTALL = "pip install 'sac-search[report]'"
# Nothing is loaded from anywhere, not even by mistake.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_MOST_WEIGHTS = 12
# So many layers are seen at once; those of a deeper model fold out.
_MOST_STRIPS = 48
_TREATMENT_CLASSES = {
    Treatment.SAVED: "saved",
    Treatment.RECOMPUTED: "recomputed",
    Treatment.LEFT_ALONE: "left-alone",
}
_CANDIDATE_COLUMNS = (
    ("policy", "name"),
    ("step", "figure"),
    ("overhead", "figure"),
    ("peak", "figure"),
    ("budget", ""),
    ("what it does", "wide"),
)
_FRONT_COLUMNS = (
    ("peak", "figure"),
    ("step", "figure"),
    ("overhead", "figure"),
    ("verified", ""),
    ("what it does", "wide"),
)
_OP_COLUMNS = (
    ("layer kind", ""),
    ("op", "wide"),
    ("class", ""),
    ("calls", "figure"),
    ("MiB", "figure"),
    ("ms", "figure"),
    ("can it be saved", ""),
)


def render_page(result: SearchResult, weights: Sequence[Importance] = ()) -> str:
    """Returns the report of a study as a page of HTML.

    Raises:
        UsageError: plotly is not installed.
    """
    title = f"{result.study_name}: activation checkpointing"
    drawn = figures(result)
    parts = (
        _opening(result),
        _trade_off(result, drawn),
        _memory(result),
        _layers(result),
        _policies(result),
        _trials(result, drawn),
        _importance(weights),
        _ops(result),
        _verification(result),
        _environment(result),
        _reproduction(result),
    )
    return html_page(title, "\n".join(filter(None, parts)), drawn)


def html_page(title: str, body: str, drawn: Mapping[str, Figure]) -> str:
    """Returns a whole page around `body`, with the figures that it has places for.

    Raises:
        UsageError: plotly is not installed.
    """
    plotly = _packed_plotly()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<main>
{body}
<p class="caption" style="margin-top: 20px">Written by sac-search {escape(__version__)}.</p>
</main>
<script type="application/json" id="figures">{_json_in_html(drawn)}</script>
<script type="text/plain" id="plotly">{plotly}</script>
<script>
{_resource("page.js")}</script>
</body>
</html>
"""


@functools.cache
def _packed_plotly() -> str:
    """Returns plotly's script, compressed: it would be nearly all of the page otherwise."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise UsageError(f"the report needs plotly, which is not installed: {_INSTALL}") from None
    script: str = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _resource(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _json_in_html(value: object) -> str:
    """Returns JSON that no text in it can break out of."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- sections -------------------------------------------------------------------------------------


def _opening(result: SearchResult) -> str:
    environment = result.environment
    where = f"{environment.workload} on {environment.device_name}"
    if result.evidence is Evidence.FORECAST:
        where = f"{environment.workload}, forecast for {environment.device_name}"
    sentences = "\n".join(f"<p>{escape(line)}</p>" for line in rows.headline(result))
    return (
        f"<h1>{escape(result.study_name)}</h1>\n"
        f'<p class="muted">{escape(where)}, torch {escape(environment.torch_version)}</p>\n'
        "<noscript>Without JavaScript there are no plots; captions and tables have the most of "
        "it.</noscript>\n"
        f'<div class="cards">\n{_cards(result)}\n</div>\n<section>{sentences}\n'
        f"{bullets(_closing_lines(result))}</section>"
    )


def _cards(result: SearchResult) -> str:
    return "\n".join(_card(card) for card in cards(result))


def _card(card: Card) -> str:
    return (
        f'<div class="card"><span class="label">{escape(card.label)}</span>'
        f'<span class="value">{escape(card.value)}</span><small>{escape(card.note)}</small></div>'
    )


def _closing_lines(result: SearchResult) -> list[str]:
    return [*rows.closing_lines(result), *result.notes]


def _trade_off(result: SearchResult, drawn: Mapping[str, Figure]) -> str:
    if "trade-off" not in drawn:
        return ""
    lacking = without_figures(result)
    caption = "Each mark is a policy: further left needs less memory, lower is faster."
    if budget_is_near(result):
        caption += " What is left of the budget's line fits."
    elif result.goal.has_budget:
        caption += f" All are far under the budget of {units.format_gib(result.budget_bytes)}."
    if most_seconds(result) is not None:
        caption += " What is under the line of the highest overhead is fast enough."
    if frontier_spots(result):
        caption += " The dotted line is what the planner believes possible, measured or not."
    if lacking:
        caption += f" Not shown: {len(lacking)} without figures, listed below."
    body = plot("trade-off", "Step time against peak") + _front(result)
    return section("Step time against peak", caption, body)


def _front(result: SearchResult) -> str:
    lines = [
        ("", (row.peak, row.step, row.overhead, row.verified, row.description))
        for row in rows.front_rows(result)
    ]
    return table(_FRONT_COLUMNS, lines) if lines else ""


def _memory(result: SearchResult) -> str:
    if not result.timelines:
        return ""
    legend = "".join(
        f'<li><i style="background: var({color})"></i>{escape(kind)}</li>'
        for kind, color in KIND_COLORS.items()
    )
    plots = "\n".join(
        _memory_plot(entry, _name_of(result, entry), f"memory-{number}")
        for number, entry in sorted(enumerate(result.timelines), key=_comes_last)
    )
    highest_bytes = max(entry.timeline.peak_bytes for entry in result.timelines)
    caption = (
        "Live tensors while one step runs, op by op, as the forecast counts them; what the "
        "allocator holds beyond them is not in it."
    )
    if result.goal.has_budget:
        caption += (
            " The dashed line is the budget."
            if is_in_sight(result.budget_bytes, highest_bytes)
            else f" The budget, {units.format_gib(result.budget_bytes)}, is far above."
        )
    body = f'<ul class="legend">{legend}</ul>\n<div class="steps">\n{plots}\n</div>'
    return section("Memory over one step", caption, body)


def _name_of(result: SearchResult, entry: PolicyTimeline) -> str:
    is_best = result.best is not None and entry.policy_key == result.best.policy.key
    return f"best ({entry.name})" if is_best else entry.name


def _memory_plot(entry: PolicyTimeline, title: str, place: str) -> str:
    peak = units.format_gib(entry.timeline.peak_bytes)
    told = f"peak {peak} in {peak_name(entry.timeline)}"
    parts = ", ".join(
        f"{kind} {format_value(size, Unit.MIB)}" for kind, size in peak_parts(entry.timeline)
    )
    return (
        f'<div><h3>{escape(title)}</h3><p class="caption">{escape(told)}: {escape(parts)}</p>'
        f"{plot(place, f'Memory over one step: {title}, {told}')}</div>"
    )


def _comes_last(entry: tuple[int, PolicyTimeline]) -> bool:
    """Puts full checkpointing behind no checkpointing and the winner, which people compare."""
    return entry[1].name == FULL


def _layers(result: SearchResult) -> str:
    best = result.best
    if best is None or not result.layers:
        return ""
    if best.policy.compiled is not None and not best.policy.layers:
        caption = "The model is compiled; what its graph keeps is torch's own choice."
        return section("What is saved, layer by layer", caption, "")
    strips = layer_strips(result.layers, best.policy)
    widest = max(1, *(strip.output_bytes for strip in strips))
    legend = "".join(
        f'<li><i class="{_TREATMENT_CLASSES[treatment]}"></i>{escape(treatment)}</li>'
        for treatment in Treatment
        if any(part.treatment is treatment for strip in strips for part in strip.parts)
    )
    lines = [_strip(strip, widest) for strip in strips]
    caption = (
        f"{best.policy.describe()}. A piece is an op, as wide as what it returns; what comes after "
        "is how much of that is saved, and the forward time that is spent again."
    )
    body = f'<ul class="legend">{legend}</ul>\n{_strips(lines[:_MOST_STRIPS])}'
    if len(lines) > _MOST_STRIPS:
        rest = lines[_MOST_STRIPS:]
        body += f"<details><summary>The other {len(rest)} layers</summary>{_strips(rest)}</details>"
    return section("What is saved, layer by layer", caption, body)


def _strips(lines: Sequence[str]) -> str:
    told = "\n".join(lines)
    return f'<div class="strips">\n{told}\n</div>'


def _strip(strip: LayerStrip, widest: int) -> str:
    pieces = "".join(_piece(part) for part in strip.parts)
    width = 100 * strip.output_bytes / widest
    if strip.seconds[Treatment.LEFT_ALONE] or strip.bytes_that_are(Treatment.LEFT_ALONE):
        told = "left alone"
    else:
        saved_bytes = strip.bytes_that_are(Treatment.SAVED)
        saved = f"{units.format_mib(saved_bytes)} saved" if saved_bytes else "nothing saved"
        told = f"{saved}, {units.format_seconds(strip.seconds[Treatment.RECOMPUTED])} again"
    # The marks keep a name whole that is cut at its beginning.
    return (
        f'<div class="strip"><span title="{escape(strip.name)}">&lrm;{escape(strip.name)}&lrm;'
        f'</span><span class="bar" style="width: {width:.2f}%">{pieces}</span>'
        f"<span>{escape(told)}</span></div>"
    )


def _piece(part: StripPart) -> str:
    title = (
        f"{part.op}: {part.treatment}, {units.format_mib(part.output_bytes)}, "
        f"{units.format_seconds(part.seconds)}"
    )
    return (
        f'<i class="{_TREATMENT_CLASSES[part.treatment]}" style="flex: {part.output_bytes} 0 0" '
        f'title="{escape(title)}"></i>'
    )


def _policies(result: SearchResult) -> str:
    short = rows.candidate_rows(result)
    every = rows.every_candidate_row(result)
    if not every:
        return ""
    body = _candidates(short or every)
    if len(every) > len(short) and short:
        body += (
            f"<details><summary>All {len(every)} policies</summary>{_candidates(every)}</details>"
        )
    return section("Policies", "", body)


def _candidates(found: Sequence[rows.CandidateRow]) -> str:
    lines = [
        (
            "best" if row.is_best else "",
            (row.name, row.step, row.overhead, row.peak, row.verdict, row.description),
        )
        for row in found
    ]
    return table(_CANDIDATE_COLUMNS, lines)


def _trials(result: SearchResult, drawn: Mapping[str, Figure]) -> str:
    if "trials" not in drawn or result.evidence is Evidence.FORECAST:
        return ""
    best = "fastest" if result.goal.kind is GoalKind.SPEED else "best"
    caption = (
        "Every policy, baselines first and then trials as they were run, and the "
        f"{best} so far that fits."
    )
    return section("How the search went", caption, plot("trials", "How the search went", "low"))


def _importance(weights: Sequence[Importance]) -> str:
    if not weights:
        return ""
    highest = max(weight.fraction for weight in weights) or 1.0
    lines = "\n".join(
        f'<span class="name">{escape(weight.name)}</span>'
        f'<span class="meter"><i style="width: {100 * weight.fraction / highest:.1f}%"></i></span>'
        f'<span class="figure">{100 * weight.fraction:.1f}%</span>'
        for weight in weights[:_MOST_WEIGHTS]
    )
    caption = (
        "How differently the best trials decide, a quarter at the most, by PED-ANOVA; trials that "
        "do not fit count as slow."
    )
    if len(weights) > _MOST_WEIGHTS:
        rest = sum(weight.fraction for weight in weights[_MOST_WEIGHTS:])
        caption += f" {len(weights) - _MOST_WEIGHTS} others come to {100 * rest:.1f}%."
    return section("Which decisions mattered", caption, f'<div class="weights">{lines}</div>')


def _ops(result: SearchResult) -> str:
    found = rows.op_rows(result.layers)
    if not found:
        return ""
    lines = [
        (
            "" if row.savable else "dim",
            (
                row.kind,
                row.op,
                row.op_class,
                str(row.calls),
                f"{row.mib:.2f}",
                f"{row.milliseconds:.3f}",
                row.saved_by,
            ),
        )
        for row in found
    ]
    caption = " ".join(f"{line}." for line in rows.layer_lines(result.layers))
    caption += " Figures are of the forward pass of one layer"
    if result.evidence is Evidence.FORECAST:
        caption += f", seconds by the published rates of {result.environment.device_name}"
    return section("Ops of each layer", f"{caption}.", table(_OP_COLUMNS, lines))


def _verification(result: SearchResult) -> str:
    verification = result.verification
    if verification is None:
        told = "Nothing was verified: no step was run."
        if result.evidence is Evidence.MEASURED:
            told = "Nothing was verified: there is no winner."
        return section("Verification", "", f"<p>{told}</p>{bullets(result.rejected)}")
    pairs = [
        ("outcome", "passed" if verification.passed else "failed"),
        ("held against", verification.reference),
        ("difference of the losses", f"{verification.loss_difference:.3g}"),
        ("worst gradient", f"{verification.worst_gradient_difference:.3g} of its largest value"),
        ("noise of the device", f"{verification.noise:.3g}"),
        ("tolerance", f"{verification.tolerance:.3g}"),
    ]
    if verification.worst_parameter is not None:
        pairs.append(("worst parameter", verification.worst_parameter))
    if verification.buffers_differing:
        pairs.append(("buffers that differ", ", ".join(verification.buffers_differing)))
    body = f"<p>{escape(rows.verification_line(result))}</p>{named_values(pairs)}"
    return section("Verification", "", body + bullets(result.rejected))


def _environment(result: SearchResult) -> str:
    caption = "All figures of this page belong to it; another one has other figures."
    return section("Environment", caption, named_values(result.environment.labelled()))


def _reproduction(result: SearchResult) -> str:
    body = f"<pre>{escape(search_command(result))}</pre>"
    if result.best is not None and result.best.measurement is not None:
        body += (
            "<p>The policy, in a training script, with <code>policy.py</code> beside it:</p>"
            "<pre>import policy\n\npolicy.apply(model)</pre>"
        )
    if result.folder is not None:
        body += (
            "<p>This page, from the study:</p>"
            f"<pre>{escape(shlex.join(['sac-search', 'report', str(result.folder)]))}</pre>"
        )
    caption = "The same command again continues the study; --fresh begins a new one."
    return section("How to reproduce", caption, body)


def search_command(result: SearchResult) -> str:
    """Returns what to type, or to call, for the search that the study holds."""
    workload = result.environment.workload
    if ":" in workload or workload.endswith(".py"):
        return shlex.join(["sac-search", workload, *(result.arguments or _limits(result))])
    options = []
    if result.goal.kind is GoalKind.MEMORY:
        options += ['minimize="memory"', f"max_overhead={result.goal.max_overhead_fraction}"]
    if result.goal.kind is GoalKind.PARETO:
        options.append("pareto=True")
    if result.goal.has_budget:
        options.insert(0, f"budget_gb={_budget(result)[1]}")
    return f"sac_search.search(workload, {', '.join(options)})  # a {workload}"


def _budget(result: SearchResult) -> tuple[str, ...]:
    return ("--budget-gb", str(result.budget_bytes / units.GIB))


def _limits(result: SearchResult) -> tuple[str, ...]:
    """Returns the options that say what the study was searched for."""
    goal = result.goal
    budget = _budget(result) if goal.has_budget else ()
    if goal.kind is GoalKind.MEMORY:
        return ("--minimize", "memory", "--max-overhead", goal.limit_text, *budget)
    return ("--pareto", *budget) if goal.kind is GoalKind.PARETO else budget
