"""Reads what an exported module says of itself, without running any of it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from sac_search.errors import UsageError


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the module's META: policy, figures, budget, environment, evidence.

    Raises:
        UsageError: there is no such file, or it is not an exported policy.
    """
    try:
        text = path.read_bytes()
        assigned = {
            target.id: node.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        meta = ast.literal_eval(assigned["META"])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is not a policy that sac-search exported") from error
    if not isinstance(meta, dict):
        raise UsageError(f"{path} is not a policy that sac-search exported")
    return meta
