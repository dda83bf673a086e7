"""Counts the peak of memory by means that the search does not use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def counted_peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """Returns what `run` returns, and the most bytes that it held at once on the CPU.

    Only what it allocates itself counts, so it has to build its model, too.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return result, highest
