"""A workload that does what the file `fault` beside it says, at its next real step.

`now ACTION` is done once, `always ACTION` in every step as long as the file is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
import time
import traceback

import torch
from torch import nn

from sac_search import Workload

HERE = pathlib.Path(__file__).parent
KEPT: list[torch.Tensor] = []


def fault() -> str:
    path = HERE / "fault"
    return path.read_text() if path.exists() else ""


def is_measured() -> bool:
    """Whether this step is a trial's, not one that loads, traces or forecasts."""
    frames = traceback.walk_stack(sys._getframe())
    return any(frame.f_code.co_name in ("_read_peak", "_time_step") for frame, _ in frames)


def is_recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        action = fault() if is_measured() else ""
        hidden = self.up(x)
        activated = nn.functional.gelu(hidden + 1.0)
        if action == "always mutate":
            hidden.mul_(1.0)  # nothing but a policy's own copy is kept of it
        if action == "always mismatch" and is_recomputing():
            activated = activated.sin()
        if action == "always grow" and is_recomputing():
            activated = activated + self.up(x).tanh()
        return x + self.down(activated)


def act(action: str) -> float:
    """Returns what the loss is multiplied with."""
    match action:
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(0)
        case "killed":
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(600)
        case "hang in C":
            ctypes.PyDLL(None).sleep(600)
        case "babble":
            for handle in range(3, 30):
                with contextlib.suppress(OSError):
                    os.write(handle, b"\xff not JSON\n")
        case "close pipe":
            os.closerange(3, 30)
        case "fork" | "fork and hang in C":
            if os.fork() == 0:
                (HERE / "forked").write_text(str(os.getpid()))
                time.sleep(600)
            if action != "fork":
                ctypes.PyDLL(None).sleep(600)
        case "device memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        case "host memory":
            torch.empty(2**58, dtype=torch.uint8)
        case "leak":
            KEPT.append(torch.ones(2**24))
            raise RuntimeError("after a leak")
        case "raise":
            raise ValueError("of the user's own")
        case "print":
            print("{" * 2**20)
        case "nan":
            return float("nan")
    return 1.0


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (HERE / "pid").write_text(str(os.getpid()))
    loss = model(x).square().mean()
    found = fault()
    if not found or not is_measured():
        return loss
    when, _, action = found.partition(" ")
    if when == "now":
        (HERE / "fault").unlink()
    return loss * act(action)


def workload() -> Workload:
    if fault() == "once load":
        (HERE / "fault").unlink()
        raise RuntimeError("the file system is away")
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, loss_fn, torch.randn(256, 64), optimizer)
