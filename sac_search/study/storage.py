"""Where Optuna keeps studies: a file for each, a database that machines share, or a proxy of one.

Knows nothing of what is in a study. Whatever goes wrong with a storage is told with its name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.storages import BaseStorage

from sac_search import interrupts
from sac_search.errors import StudyFileError, UsageError

DATABASE_NAME = "study.db"
"""The file of a study that has one of its own."""
PROXY_SCHEME = "grpc"
"""Of the address of a proxy, as `grpc://host:13000`."""
PROXY_PORT = 13000
"""Where a proxy listens unless it is told otherwise."""
INSTALL_PROXY = "pip install 'sac-search[grpc]'"

_LOCK_TIMEOUT_SECONDS = 60
# A search on a file says this often that it is alive; a trial of one that is silent for the grace
# period is given up by the others. Where they can lock files they know at once.
_HEARTBEAT_SECONDS = 60
_GRACE_SECONDS = 300
_CONNECT_SECONDS = 20
# Of two that make the tables of one database at once, the slower fails, and finds them made.
_TRIES_TO_MAKE_TABLES = 5
_EXTRAS = {
    "postgresql": "pip install 'sac-search[postgresql]'",
    "mysql": "pip install 'sac-search[mysql]'",
    "mariadb": "pip install 'sac-search[mysql]'",
    PROXY_SCHEME: INSTALL_PROXY,
}


def storage_at(path: Path) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a file.

    Raises:
        StudyFileError: the file is of another release of Optuna.
    """
    return _sqlite_storage(path, heartbeat_seconds=_HEARTBEAT_SECONDS)


def shared_storage(url: str) -> BaseStorage:
    """Returns Optuna's storage at an address: a database's, as SQLAlchemy writes it, or a proxy's.

    Raises:
        UsageError: the address cannot be one, or what it needs is not installed.
        StudyFileError: nothing answers there, or it is of another release of Optuna.
    """
    # A process that was forked must not use its parent's connections.
    return _shared_storage(url, os.getpid())


@functools.cache
def _shared_storage(url: str, process: int) -> BaseStorage:
    check_address(url)
    if urlsplit(url).scheme == PROXY_SCHEME:
        return _proxy(url)
    with storage_errors_named(address_without_password(url)):
        return _database(url)


def check_address(url: str) -> None:
    """Refuses what cannot be the address of a storage.

    Raises:
        UsageError: says what it may look like.
    """
    examples = (
        "postgresql+psycopg://user:password@host/database, mysql+pymysql://user:password@host/"
        f"database, sqlite:///file.db, or {PROXY_SCHEME}://host:{PROXY_PORT} for a proxy"
    )
    with contextlib.suppress(sqlalchemy.exc.ArgumentError, ValueError):
        address = sqlalchemy.make_url(url)
        is_proxy = address.drivername == PROXY_SCHEME
        if address.host if is_proxy else address.database not in (None, "", ":memory:"):
            return
    raise UsageError(f"the storage {url!r} is no address; it looks like {examples}")


def address_without_password(url: str) -> str:
    """Returns the address as it may be shown and written down.

    Raises:
        UsageError: it cannot be one.
    """
    check_address(url)
    return sqlalchemy.make_url(url).render_as_string(hide_password=True)


def is_made(path: Path) -> bool:
    """Returns whether Optuna has made its tables in the file.

    Opening a file in which it has not makes them, and two that do so at once meet: only whoever
    makes the study may.
    """
    with contextlib.closing(_connect(path)) as connection:
        try:
            [count] = connection.execute("SELECT COUNT(*) FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            return "no such table" not in str(error)
        except sqlite3.DatabaseError:  # no database: whoever opens it is told
            return True
    return bool(count)


@contextlib.contextmanager
def storage_errors_named(where: Path | str) -> Iterator[None]:
    """Turns errors of the storage into one that says where it is.

    An interrupt waits until the storage is left: a transaction that is left half done keeps others
    out, and Optuna forgets the interrupt when it comes while a trial is told.
    """
    try:
        with interrupts.put_off():
            yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise _unusable(where, error.__cause__ or error) from error
    except Exception as error:
        if not _is_of_proxy(error):
            raise
        raise _unusable(where, error) from error


@contextlib.contextmanager
def errors_named(where: Path | str) -> Iterator[None]:
    """Turns errors of the file system and the storage into one that says where it is."""
    try:
        with storage_errors_named(where):
            yield
    except OSError as error:
        raise StudyFileError(f"{where}: {error.strerror or error}") from error


def _unusable(where: Path | str, cause: BaseException) -> StudyFileError:
    details = getattr(cause, "details", None)
    text = str((details() if callable(details) else None) or cause)
    first = (text.splitlines() or [type(cause).__name__])[0]
    return StudyFileError(
        f"{where} cannot be used as a study: {first}. What it holds was left as it is; free it, "
        "mend it, or name another study with --study"
    )


def _is_of_proxy(error: Exception) -> bool:
    grpc = sys.modules.get("grpc")  # whoever has its errors has imported it
    return grpc is not None and isinstance(error, grpc.RpcError)


def _sqlite_storage(path: Path, heartbeat_seconds: int | None = None) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = optuna.storages.RDBStorage(
                "sqlite:///study.db",
                engine_kwargs={"creator": functools.partial(_connect, path.resolve())},
                heartbeat_interval=heartbeat_seconds,
                grace_period=None if heartbeat_seconds is None else _GRACE_SECONDS,
            )
    except RuntimeError as error:  # a database of another release of Optuna
        raise StudyFileError(f"{path} cannot be used as a study: {error}") from error
    sqlalchemy.event.listen(storage.engine, "begin", _begin_alone)
    return storage


def _begin_alone(connection: sqlalchemy.Connection) -> None:
    """Takes the write lock before anything is read.

    Optuna reads that a trial waits, and then writes that it runs; on other databases it locks the
    row between, which SQLite has not. Without this two searches may run one trial.
    """
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except sqlalchemy.exc.OperationalError as error:
        if "readonly" not in str(error):
            raise
        connection.exec_driver_sql("BEGIN")  # a file that may only be read


def _connect(path: Path) -> sqlite3.Connection:
    # The path itself, for in an address `?` and `%` would mean something. A transaction that only
    # asks for the write lock when it first writes fails at once, without waiting, when another
    # process does the same.
    return sqlite3.connect(
        path,
        timeout=_LOCK_TIMEOUT_SECONDS,
        check_same_thread=False,
        isolation_level="IMMEDIATE",
    )


def _database(url: str) -> BaseStorage:
    address = sqlalchemy.make_url(url)
    for number in range(_TRIES_TO_MAKE_TABLES):
        try:
            if address.get_backend_name() == "sqlite":
                assert address.database is not None
                return optuna.storages.get_storage(_sqlite_storage(Path(address.database)))
            return optuna.storages.get_storage(_server_storage(url))
        except (
            sqlalchemy.exc.IntegrityError,
            sqlalchemy.exc.ProgrammingError,
            sqlalchemy.exc.OperationalError,
        ) as error:
            is_last = number + 1 == _TRIES_TO_MAKE_TABLES
            if is_last or error.connection_invalidated or not _is_about_tables(error):
                raise
            time.sleep(0.2 * (number + 1))
    raise AssertionError("the last try returns or raises")


def _server_storage(url: str) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # A connection that the server has closed meanwhile, as after a night, is made anew.
        return optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
        raise _not_installed(url, error) from error
    except RuntimeError as error:  # a database of another release of Optuna
        label = address_without_password(url)
        raise StudyFileError(f"{label} cannot be used as a study: {error}") from error


def _is_about_tables(error: sqlalchemy.exc.SQLAlchemyError) -> bool:
    # As each database says it: a table or its type is there, or the version's row is.
    return any(word in str(error).lower() for word in ("already exists", "unique", "duplicate"))


def _proxy(url: str) -> BaseStorage:
    address = urlsplit(url)
    assert address.hostname is not None
    # gRPC writes of each lost connection to standard error, among what a search says.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            storage = optuna.storages.GrpcStorageProxy(
                host=address.hostname, port=address.port or PROXY_PORT
            )
            storage.wait_server_ready(_CONNECT_SECONDS)
        except ImportError as error:
            raise _not_installed(url, error) from error
        except ConnectionError as error:
            raise StudyFileError(
                f"nothing answers at {url} within {_CONNECT_SECONDS} s; start it with sac-search "
                "serve --storage ADDRESS"
            ) from error
    return storage


def _not_installed(url: str, error: Exception) -> UsageError:
    scheme = urlsplit(url).scheme
    extra = _EXTRAS.get(scheme.partition("+")[0], f"install what {scheme} needs")
    return UsageError(f"the storage {address_without_password(url)} needs more: {extra} ({error})")
