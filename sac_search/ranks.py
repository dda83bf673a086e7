"""This process among the ranks of a distributed job: which one it is, what all have to agree on.

Starts no process group: that is for the user's code. What ranks agree on goes through the store
that they were started with, so that no collective of the user's is in its way.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sac_search.errors import UsageError

# Whoever waits for another rank is ended from outside when that takes too long.
_FOREVER = datetime.timedelta(days=1)
_PREFIX = "sac_search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What `torchrun` says to each of its processes."""

    rank: int
    """Which one this is, counted from 0 over all machines."""
    world_size: int
    """How many there are."""
    local_rank: int
    """Which one this is on its machine."""
    local_world_size: int
    """How many there are on this machine."""
    master_address: str
    """The machine of rank 0."""
    master_port: int
    """Where the store of all ranks listens there."""
    has_store: bool
    """Whether that store is there already; else rank 0 makes it."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_world_size == self.world_size


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns what `torchrun` started this process as; None when it did not.

    Raises:
        UsageError: its variables are there, but not as it sets them.
    """
    # Others set RANK and WORLD_SIZE as well, some in every shell of a container; only under
    # torchrun it is certain that the other ranks run the same program.
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        return Launch(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            master_address=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"this process was started by torchrun, but its environment is not torchrun's: {error}"
        ) from None


# --- what all ranks agree on ----------------------------------------------------------------------


class Peers:
    """The ranks that run the same steps at the same time. By default there is only this one."""

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1) -> None:
        self.size = size
        """How many they are, this one included."""
        self._store = store
        self._rank = rank
        self._round = 0

    def any(self, flag: bool = False) -> bool:
        """Returns whether `flag` is set on any rank, once every rank has asked."""
        if self.size == 1:
            return flag
        self._round += 1
        self._store.set(self._key(self._rank), str(int(flag)))
        keys = [self._key(rank) for rank in range(self.size)]
        found = [int(self._store.get(key)) for key in keys]
        # Whoever is in this round has read all of the one before.
        self._store.delete_key(f"{self._round - 1}/{self._rank}")
        return any(found)

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"


ALONE = Peers()


def find_peers() -> Peers:
    """Returns the ranks that this process is one of; `ALONE` when `torchrun` started no others."""
    launch = launched()
    if launch is None or launch.world_size == 1:
        return ALONE
    return Peers(open_store(launch), launch.rank, launch.world_size)


def open_store(launch: Launch) -> Any:
    """Returns the store of all ranks, for what is sac-search's own."""
    distributed: Any = torch.distributed
    store = distributed.TCPStore(
        launch.master_address,
        launch.master_port,
        is_master=launch.rank == 0 and not launch.has_store,
        wait_for_workers=False,
    )
    store.set_timeout(_FOREVER)
    return distributed.PrefixStore(_PREFIX, store)


def device_of_rank(device: torch.device, launch: Launch | None, *, is_named: bool) -> torch.device:
    """Returns the accelerator that this rank has to itself; `device` when there are no others.

    `is_named` says that the user named `device` with its number.

    Raises:
        UsageError: there are not enough of them, or all ranks would have the one that was named.
    """
    if launch is None or launch.local_world_size == 1 or device.type == "cpu":
        return device
    if is_named:
        raise UsageError(
            f"--device {device} is one device, but {launch.local_world_size} ranks need one each; "
            f"say --device {device.type}, and each takes that of its LOCAL_RANK"
        )
    count = torch.accelerator.device_count()
    if count == 1:  # a launcher may show each rank its own device alone
        return device
    if launch.local_rank >= count:
        raise UsageError(
            f"rank {launch.rank} needs {device.type}:{launch.local_rank}, but this machine has "
            f"{count}; give torchrun --nproc-per-node {count}"
        )
    return torch.device(device.type, launch.local_rank)


# --- models that are spread over ranks ------------------------------------------------------------


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside of DistributedDataParallel, by whose names layers are known."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def is_distributed(tensor: Any) -> bool:
    """Whether this is a distributed tensor (`DTensor`), of which each rank holds a part."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Any) -> Any:
    """Returns the part of a distributed tensor that this rank holds; anything else as it is."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def is_on_its_way(value: Any) -> bool:
    """Returns whether a tensor is what a collective returns, and nobody has waited for it yet."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor)


def unawaited_collectives() -> int:
    """Returns how many collectives were started that nobody has waited for; each holds memory."""
    if not torch.distributed.is_available():
        return 0
    return int(torch._C._distributed_c10d._get_work_registry_size())


def describe_parallelism(model: torch.nn.Module) -> str:
    """Returns how a model is spread over the ranks: `FSDP2 of 5 modules, mesh 2, S(0)`."""
    parts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            parts[_describe_ddp(module)] += 1
        elif _is_fully_sharded(module):
            parts["FSDP2"] += 1
    described = [f"{part} of {n} modules" if n > 1 else part for part, n in parts.items()]
    described += dict.fromkeys(_describe_mesh(p) for p in model.parameters() if is_distributed(p))
    return ", ".join(described)


def _describe_ddp(module: DistributedDataParallel) -> str:
    options = {
        "bucket views": module.gradient_as_bucket_view,
        "static graph": module.static_graph,
        "unused parameters": module.find_unused_parameters,
    }
    chosen = ", ".join(name for name, is_set in options.items() if is_set)
    return f"DDP ({chosen})" if chosen else "DDP"


def _is_fully_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _describe_mesh(parameter: Any) -> str:
    shape = "x".join(str(size) for size in parameter.device_mesh.shape)
    return f"mesh {shape} {''.join(str(placement) for placement in parameter.placements)}"
