"""Renders a policy as a Python module that needs torch alone, and checks it."""

from sac_search.export.files import require_writable, write_whole
from sac_search.export.module import render_module
from sac_search.export.reading import read_meta

__all__ = ["read_meta", "render_module", "require_writable", "write_whole"]
