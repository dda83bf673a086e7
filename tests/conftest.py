"""Lies here so that every test can import the modules beside it, such as `scripted`."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy
import torch
import torch._dynamo
import torch.fx.experimental.symbolic_shapes
import torch.profiler

# As in a worker: measurements collect garbage often, and need not look at what torch has imported.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, which are slow, as a worker does."""
    gc.freeze()
    yield
    gc.unfreeze()


@sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
def do_not_wait_for_the_disk(connection: Any, record: Any) -> None:
    # A study in a test has to survive a killed process, not a power cut.
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
