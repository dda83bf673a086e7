"""sac-search finds the activation-checkpointing policy that fits a memory budget.

`search` is the whole of it; `Workload` is what a user's factory returns.
"""

import importlib
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
    from sac_search.api import search, search_throughput
    from sac_search.auto import AppliedPolicy, auto_checkpoint, remove_checkpointing
    from sac_search.options import SearchOptions
    from sac_search.study.result import SearchResult
    from sac_search.study.throughput_result import ThroughputResult

__all__ = [
    "search",
    "search_throughput",
    "auto_checkpoint",
    "remove_checkpointing",
    "Workload",
    "SearchOptions",
    "SearchResult",
    "ThroughputResult",
    "AppliedPolicy",
    "Policy",
    "SacSearchError",
    "UsageError",
    "StudyError",
    "NoPolicyFits",
    "WorkloadError",
    "__version__",
]


_PLACES = {
    "search": "sac_search.api",
    "search_throughput": "sac_search.api",
    "auto_checkpoint": "sac_search.auto",
    "remove_checkpointing": "sac_search.auto",
    "AppliedPolicy": "sac_search.auto",
    "SearchOptions": "sac_search.options",
    "SearchResult": "sac_search.study.result",
    "ThroughputResult": "sac_search.study.throughput_result",
}


def __getattr__(name: str) -> Any:
    # Loaded when first asked for: a worker that imports a user's file needs no Optuna.
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'sac_search' has no attribute {name!r}")
