"""sac-search finds the activation-checkpointing policy that fits a memory budget.

`search` is the whole of it; `Workload` is what a user's factory returns.
"""

from typing import TYPE_CHECKING, Any

from sac_search._version import __version__
from sac_search.errors import (
    NoPolicyFits,
    SacSearchError,
    StudyError,
    UsageError,
    WorkloadError,
)
from sac_search.policy import Policy
from sac_search.workload import Workload

if TYPE_CHECKING:
    from sac_search.api import SearchOptions, search
    from sac_search.study.result import SearchResult

__all__ = [
    "search",
    "Workload",
    "SearchOptions",
    "SearchResult",
    "Policy",
    "SacSearchError",
    "UsageError",
    "StudyError",
    "NoPolicyFits",
    "WorkloadError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded when first asked for: a worker that imports a user's file needs no Optuna.
    if name in ("search", "SearchOptions"):
        from sac_search import api

        return getattr(api, name)
    if name == "SearchResult":
        from sac_search.study.result import SearchResult

        return SearchResult
    raise AttributeError(f"module 'sac_search' has no attribute {name!r}")
