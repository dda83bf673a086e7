"""What the benchmark scripts share: the machine, tables, files, sessions that leave no trace."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sac_search.device import describe_device, find_device, free_cached_memory
from sac_search.worker.session import Session, SessionSettings, open_session

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the figures were taken on."""

    cpu: str
    """The processor's product name."""
    cores: int
    """Processors that this process may use."""
    device: str
    """The device that was measured."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    date: str
    """When the run began, in UTC."""


def describe_machine(device: str | None) -> Machine:
    """Returns the machine, and the device of that name on it (the accelerator when None)."""
    # macOS lets no process choose its processors.
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cpu=describe_device(torch.device("cpu")).name,
        cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        device=describe_device(find_device(device)).name,
        torch=str(torch.__version__),
        python=platform.python_version(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def machine_line(machine: Machine) -> str:
    """Returns the machine in one line, to stand above a table."""
    on = "" if machine.device == machine.cpu else f"{machine.device}, "
    return (
        f"{on}{machine.cpu} ({machine.cores} cores), torch {machine.torch}, "
        f"Python {machine.python}, {machine.date[:10]}"
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; what would end a cell or a line in it is replaced."""
    lines = [_line(header), "| --- " * len(header) + "|"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    cleaned = (" ".join(cell.split()).replace("|", "/") or "–" for cell in cells)
    return f"| {' | '.join(cleaned)} |"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--markdown`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here too")


def write_outputs(options: argparse.Namespace, document: Any, tables: str) -> None:
    """Prints the tables, and writes what the options of `add_output_options` ask for."""
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(tables + "\n")
    print(tables)


def to_plain(record: Any) -> Any:
    """Returns a dataclass as dicts and lists, ready for JSON."""
    return dataclasses.asdict(record)


def say(text: str) -> None:
    """Says on stderr what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Returns an error as one line with its type."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def in_session(settings: SessionSettings, use: Callable[[Session], T]) -> T:
    """Returns what `use` returns for a session of its own; its memory is free again afterwards.

    Peaks are of everything that is alive in the process, so no two sessions may be.
    """
    with memory_freed(settings.device):
        return use(open_session(settings))


@contextmanager
def memory_freed(device: str | None) -> Iterator[None]:
    """Frees, after the block, what it left behind; torch's threads are as many as before."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        free_cached_memory(find_device(device))
