"""Renders a policy as a Python module that needs torch alone, and checks it."""

from sac_search.export.files import require_writable, write_whole
from sac_search.export.module import render_module

__all__ = ["render_module", "require_writable", "write_whole"]
