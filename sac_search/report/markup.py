"""Pieces of HTML: sections, tables and lists of text, which is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, caption: str, body: str) -> str:
    """Returns a part of the page under a title; `body` is HTML, the others are text."""
    told = f'<p class="caption">{escape(caption)}</p>\n' if caption else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{told}{body}\n</section>"


def plot(name: str, label: str, size: str = "") -> str:
    """Returns the place that the figure of this name is drawn in; `label` is for screen readers."""
    return (
        f'<div class="plot waiting {size}" data-figure="{name}" role="img" '
        f'aria-label="{escape(label)}"></div>'
    )


def bullets(lines: Iterable[str]) -> str:
    """Returns a list, or nothing where there is nothing in it."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def named_values(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns names with their values; an empty value is a dash."""
    lines = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value) or '–'}</dd>" for name, value in pairs
    )
    return f"<dl>{lines}</dl>"


def table(columns: Sequence[tuple[str, str]], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Returns a table that scrolls sideways.

    A column is its head and the CSS class of its cells, a line the class of its row and its cells.
    """
    heads = "".join(f'<th class="{name}">{escape(head)}</th>' for head, name in columns)
    body = "\n".join(f'<tr class="{name}">{_cells(columns, cells)}</tr>' for name, cells in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(columns: Sequence[tuple[str, str]], cells: Sequence[str]) -> str:
    return "".join(
        f'<td class="{name}">{escape(cell)}</td>'
        for (_, name), cell in zip(columns, cells, strict=True)
    )
