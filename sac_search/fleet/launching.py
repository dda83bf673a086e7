"""Starts jobs: on the devices of this machine, as Ray tasks, or as jobs of Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sac_search.errors import UsageError
from sac_search.worker.process import start_command

_LOG_TAIL_LINES = 8
_MINUTES = 24 * 60


class JobLost(Exception):
    """A job ended without a report."""


class Job(Protocol):
    """A search that was started."""

    @property
    def name(self) -> str:
        """Where it runs, for people."""

    def poll(self) -> str | None:
        """Returns its report; None while it runs.

        Raises:
            JobLost: it ended without one.
        """

    def stop(self) -> None:
        """Asks it to end with the best so far."""

    def kill(self) -> None:
        """Ends it at once, if it runs."""


class LocalJob:
    """A search in a process of this machine."""

    def __init__(self, name: str, request: str, log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  `kill` closes it
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                start_command("fleet"),
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for whoever started it
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `poll` says so
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> str | None:
        """Returns its report; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.seek(0)
        report = self._output.read().decode()
        if code == 0 and report:
            return report
        lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise JobLost("\n".join([f"it ended by {how}; the end of {self._log_path}:", *lines]))

    def stop(self) -> None:
        """Asks it to end with the best so far."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends it at once, if it runs."""
        self.stop()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


class RayJob:
    """A search as a Ray task."""

    def __init__(self, name: str, request: str, ray: Any, gpus: int) -> None:
        from sac_search.fleet.job import run_job

        self.name = name
        self._ray = ray
        task = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=0)(run_job)
        self._reference = task.remote(request)

    def poll(self) -> str | None:
        """Returns its report; None while it runs."""
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            report: str = self._ray.get(self._reference)
        except Exception as error:
            raise JobLost(str(error)) from error
        return report

    def stop(self) -> None:
        """Asks it to end with the best so far."""
        self._ray.cancel(self._reference)

    def kill(self) -> None:
        """Ends it at once, if it runs."""
        self._ray.cancel(self._reference, force=True)


class SlurmJob:
    """A search as a job of Slurm, or of what else submitit knows."""

    def __init__(self, name: str, job: Any) -> None:
        self.name = f"{name}, job {job.job_id}"
        self._job = job

    def poll(self) -> str | None:
        """Returns its report; None while it runs."""
        if not self._job.done():
            return None
        try:
            report: str = self._job.result()
        except Exception as error:
            raise JobLost(str(error)) from error
        return report

    def stop(self) -> None:
        """Ends it: Slurm has no way to tell it that submitit leaves open."""
        self._job.cancel(check=False)

    def kill(self) -> None:
        """Ends it at once, if it runs."""
        if not self._job.done():
            self._job.cancel(check=False)


def start_local(devices: Sequence[str], requests: Sequence[str], folder: Path) -> list[Job]:
    """Starts a search on each device of this machine; their logs are `search.1.log`, …"""
    return [
        LocalJob(device, request, folder / f"search.{number}.log")
        for number, (device, request) in enumerate(zip(devices, requests, strict=True), start=1)
    ]


def start_ray(requests: Sequence[str], *, gpus: int) -> list[Job]:
    """Starts searches as Ray tasks, on the cluster that RAY_ADDRESS names, or on this machine.

    Raises:
        UsageError: ray is not installed, or has not that many devices.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("workers as Ray tasks need ray: pip install 'sac-search[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    there = int(ray.cluster_resources().get("GPU", 0))
    if gpus and there < len(requests):
        raise UsageError(
            f"{len(requests)} workers want a GPU each, and the Ray cluster has {there}; ask for "
            "fewer, or add --device cpu"
        )
    return [
        RayJob(f"Ray task {number}", request, ray, gpus)
        for number, request in enumerate(requests, start=1)
    ]


def start_slurm(
    requests: Sequence[str], folder: Path, *, gpus: int, parameters: Mapping[str, str]
) -> list[Job]:
    """Submits searches to Slurm; its files and logs land in `folder`.

    `parameters` are submitit's, as `slurm_partition`; with `cluster=local` they run here.

    Raises:
        UsageError: submitit is not installed, there is no Slurm, or it takes no such parameter.
    """
    try:
        import submitit
    except ModuleNotFoundError:
        raise UsageError(
            "workers as Slurm jobs need submitit: pip install 'sac-search[slurm]'"
        ) from None
    from sac_search.fleet.job import run_job

    given = {name: _number_or_text(value) for name, value in parameters.items()}
    cluster = given.pop("cluster", "slurm")
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise UsageError(
            "there is no sbatch here, so that nothing can be submitted to Slurm; run this where "
            "there is, or try it on this machine with --slurm cluster=local"
        )
    executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=str(cluster))
    # What a job needs however it is asked for; `parameters` go before.
    usual: dict[str, Any] = {"timeout_min": _MINUTES, "name": "sac-search", "cpus_per_task": 2}
    if gpus:
        usual["gpus_per_node"] = gpus
    try:
        executor.update_parameters(**{**usual, **given})
    except (NameError, TypeError, ValueError) as error:
        raise UsageError(f"submitit does not take these parameters of --slurm: {error}") from None
    jobs = [executor.submit(run_job, request) for request in requests]
    return [SlurmJob(f"worker {number}", job) for number, job in enumerate(jobs, start=1)]


def _number_or_text(value: str) -> int | str:
    return int(value) if value.lstrip("-").isdigit() else value
