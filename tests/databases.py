"""A PostgreSQL of its own for a test: in a temporary folder, on a free port, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_USER = "postgres"


def _folders() -> list[Path]:
    found = shutil.which("initdb")
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    return [*([Path(found).parent] if found else []), *sorted(versions, reverse=True)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Yields the address of an empty database; skips the test where there is no PostgreSQL."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    binaries = next((f for f in _folders() if (f / "initdb").is_file()), None)
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    # It refuses to run as root. Its socket's path must be short.
    as_user = ["runuser", "-u", _USER, "--"] if os.getuid() == 0 else []
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    port = free_port()

    def run(*command: str) -> None:
        subprocess.run(
            [*as_user, str(binaries / command[0]), *command[1:]],
            check=True,
            cwd="/",
            stdout=subprocess.DEVNULL,
        )

    if as_user:
        shutil.chown(folder, _USER)
    data, log = str(folder / "data"), str(folder / "log")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    try:
        run("initdb", "-A", "trust", "-U", _USER, "-N", "-D", data)
        run("pg_ctl", "-w", "-D", data, "-l", log, "-o", options, "start")
        try:
            yield f"postgresql+psycopg://{_USER}@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "-D", data, "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
