"""The report in a real browser: it draws every plot, loads nothing and fits a telephone."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_page import full_result

from sac_search.report.page import render_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytest.importorskip("plotly", reason="an optional extra")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]

# Shows the page in a frame as wide as a telephone or a desk, and says what came of it.
FRAME = """<!doctype html><html><body><iframe src="report.html" width="{width}" height="900">
</iframe><script>
const frame = document.querySelector("iframe");
setInterval(() => {{
  const inside = frame.contentDocument?.documentElement;
  if (!inside?.dataset.drawn && !inside?.dataset.failed) return;
  const text = (selector) => [...inside.querySelectorAll(selector)].map((e) => e.textContent);
  document.documentElement.dataset.told = JSON.stringify({{
    ...inside.dataset,
    drawn: Boolean(inside.dataset.drawn),
    plots: inside.querySelectorAll(".plot").length,
    empty: [...inside.querySelectorAll(".plot")].filter((p) => !p.querySelector("svg")).length,
    width: inside.scrollWidth,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((r) => r.name),
    annotations: text(".annotation-text"),
  }});
}}, 100);
</script></body></html>"""


def told_by_browser(folder: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
    (folder / "report.html").write_text(render_page(full_result()))
    (folder / "frame.html").write_text(FRAME.format(width=width))
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=10000",
        "--window-size=1300,1000",
        "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    _, _, rest = ended.stdout.partition('data-told="')
    assert rest, "the page has not drawn itself"
    found: dict[str, Any] = json.loads(html.unescape(rest.partition('"')[0]))
    return found


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_every_plot_is_drawn(tmp_path: Path, width: int, dark: bool) -> None:
    told = told_by_browser(tmp_path, width, dark=dark)
    assert told["drawn"] and "failed" not in told
    assert (told["plots"], told["empty"]) == (5, 0)
    assert told["loaded"] == []
    assert told["width"] <= width
    assert {"budget", "planner's bound"} <= set(told["annotations"])
    assert any("backward, h.1" in note for note in told["annotations"])
