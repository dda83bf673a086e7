"""optuna-dashboard on a study, with the study's policy and report attached to it."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterable
from pathlib import Path
from wsgiref import simple_server

import optuna

from sac_search.errors import UsageError
from sac_search.policy import Policy
from sac_search.study.storage import storage_errors_named
from sac_search.study.store import StudyStore

HOST = "127.0.0.1"
"""Whoever reaches the dashboard may change the study, so it listens to this machine alone."""

_FOLDER = "artifacts"
_POLL_SECONDS = 0.5
_INSTALL = "pip install 'sac-search[dashboard]'"


def readable_policy(policy: Policy) -> dict[str, object]:
    """Returns what a trial's attributes say of its policy, for people."""
    saved = dict.fromkeys(
        str(label) for choice in policy.layers for label in policy.tiers[choice.tier].classes
    )
    return {
        "policy_text": policy.describe(),
        "checkpointed_layers": len(policy.layers),
        "saved": ", ".join(saved) or "nothing",
    }


def attach_files(store: StudyStore, paths: Iterable[Path]) -> None:
    """Attaches those of `paths` that exist to the study, as artifacts of Optuna.

    A file that was attached before is replaced.
    """
    folder = store.folder / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = optuna.artifacts.FileSystemArtifactStore(folder)
    attached = dict(store.artifacts)
    with storage_errors_named(store.label):
        for path in filter(Path.is_file, paths):
            known = attached.get(path.name)
            if known is not None and _is_there(artifacts, known):
                with path.open("rb") as content:
                    artifacts.write(known, content)
                continue
            attached[path.name] = optuna.artifacts.upload_artifact(
                artifact_store=artifacts, file_path=str(path), study_or_trial=store.study
            )
    store.write("artifact_ids", attached)


def serve(store: StudyStore, port: int) -> None:
    """Serves the dashboard of the study until it is interrupted.

    Raises:
        UsageError: optuna-dashboard is not installed, or the port is taken.
    """
    try:
        import optuna_dashboard
    except ModuleNotFoundError:
        raise UsageError(f"the dashboard needs optuna-dashboard: {_INSTALL}") from None
    artifacts = optuna.artifacts.FileSystemArtifactStore(store.folder / _FOLDER)
    app = optuna_dashboard.wsgi(store.storage, artifact_store=artifacts)
    try:
        server = simple_server.make_server(
            HOST, port, app, server_class=_Server, handler_class=_Handler
        )
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be used ({error}); name another --port") from None
    # Not in this thread: wsgiref takes an interrupt that comes while it answers for a failed
    # request, and goes on.
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with server:
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    # A browser that keeps a connection open does not hold up the end.
    block_on_close = False


class _Handler(simple_server.WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing: a page asks every few seconds."""


def _is_there(artifacts: optuna.artifacts.FileSystemArtifactStore, artifact_id: str) -> bool:
    # The dashboard lets people delete what is attached.
    try:
        artifacts.open_reader(artifact_id).close()
    except optuna.artifacts.exceptions.ArtifactNotFound:
        return False
    return True
