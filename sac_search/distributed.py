"""The program under `torchrun`: rank 0 runs the command line, the other ranks follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from sac_search.errors import UsageError
from sac_search.ranks import launched
from sac_search.worker.group import current_group, follow, leading

_COMMAND = "torchrun --nproc-per-node N -m sac_search train.py --budget-gb GB"


def run_on_all_ranks(run: Callable[[], int]) -> int:
    """Calls `run` on rank 0, whose workers are then those of all ranks. Returns its exit code.

    Without `torchrun` it just calls `run`.
    """
    try:
        launch = launched()
    except UsageError as error:
        sys.stderr.write(f"sac-search: {error}\n")
        return error.exit_code
    if launch is None:
        return run()
    if launch.rank > 0:
        return follow(launch)
    with leading(launch) as group:
        exit_code = 1
        try:
            exit_code = run()
        finally:
            group.end(exit_code)
    return exit_code


def refuse_ranks_apart() -> None:
    """Raises UsageError where each of several ranks would search by itself.

    Their steps wait for each other, while each search would measure another policy.
    """
    launch = launched()
    if launch is not None and launch.world_size > 1 and current_group() is None:
        raise UsageError(
            f"torchrun started {launch.world_size} of these programs, which would each search by "
            f"itself; a search over ranks is started with: {_COMMAND}"
        )


def refuse_process_group() -> None:
    """Raises UsageError where this process is one of several ranks whose steps wait for it."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        raise UsageError(
            f"this process is one of {ranks} ranks, and a Workload is measured in one process; "
            f"put it into a factory in a file and start: {_COMMAND}"
        )


def refuse_forecast_of_ranks() -> None:
    """Raises UsageError where a forecast, which runs nothing, would be of several ranks."""
    group = current_group()
    if group is not None and group.launch.world_size > 1:
        raise UsageError(
            "a forecast runs nothing, so it knows nothing of what ranks send each other; search "
            "with all ranks and without --forecast, or forecast one rank's part without torchrun"
        )
