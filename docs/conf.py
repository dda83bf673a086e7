"""How Sphinx builds the site: `scripts/docs`. Needs no network."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _docs  # noqa: E402

from sac_search import __version__  # noqa: E402

# The reference describes an exported module, so one has to be there to be imported.
_exported = Path(tempfile.mkdtemp(prefix="sac-search-docs-"))
(_exported / "policy.py").write_text(_docs.policy_module_text())
sys.path.insert(0, str(_exported))

project = "sac-search"
author = "The sac-search authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "sac-search"
html_show_sourcelink = False
html_show_copyright = False
smartquotes_action = "D"

default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
add_module_names = False


_SECTION = re.compile(r"^(\s*)Raises:$")
_ERROR = re.compile(r"^\s+([\w., ]+): (.*)$")


def _as_restructured_text(
    app: Any, what: str, name: str, about: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are Markdown with a section `Raises:`; what autodoc reads is another markup."""
    in_section = False
    for number, line in enumerate(lines):
        parts = line.split("`")
        # Outside of backticks an asterisk is an asterisk.
        parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
        text = "`".join(parts)
        error = _ERROR.match(text) if in_section else None
        if _SECTION.match(line):
            in_section, text = True, ""
        elif error:
            text = f":raises {error[1]}: {error[2]}"
        elif in_section and line and not line.startswith(" "):
            in_section = False
        lines[number] = text


def setup(app: Any) -> None:
    """Registers what Sphinx calls."""
    app.connect("autodoc-process-docstring", _as_restructured_text)
