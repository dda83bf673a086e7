"""A proxy of a storage: many workers reach one database by way of it, without its password."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import optuna

from sac_search.errors import UsageError
from sac_search.study.storage import INSTALL_PROXY, shared_storage

PROXY_HOST = "127.0.0.1"
"""Whoever reaches a proxy may change every study, so that it listens to this machine alone."""

# Each search asks from two threads: its own, and the one that says that it is there.
_THREADS = 32


def serve_storage(storage: str, host: str, port: int, on_start: Callable[[], None]) -> None:
    """Serves the storage until it is interrupted; `on_start` is called before.

    Raises:
        UsageError: grpcio is not installed, or nothing can listen there.
        StudyFileError: the storage cannot be reached.
    """
    if importlib.util.find_spec("grpc") is None:
        raise UsageError(f"a proxy needs grpcio: {INSTALL_PROXY}")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    found = shared_storage(storage)
    on_start()
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as pool:
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            optuna.storages.run_grpc_proxy_server(found, host=host, port=port, thread_pool=pool)
        except RuntimeError as error:
            raise UsageError(
                f"{host}:{port} cannot be listened at ({error}); name another --port or --host"
            ) from None
