"""A search by several workers: starts them, shows what they find, and takes what they leave.

Never touches a device. Each worker is a search of its own that shares the study with the others, as
if the same command had been given on each device; so any of them may die, and any may be added.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sac_search import artifacts, interrupts, records
from sac_search.api import name_and_folder
from sac_search.distributed import refuse_ranks_apart
from sac_search.errors import NoPolicyFits, SacSearchError, StudyNotFound, UsageError, WorkerError
from sac_search.fleet.job import JobReport, JobRequest, options_to_json
from sac_search.fleet.launching import Job, JobLost, start_local, start_ray, start_slurm
from sac_search.options import Listener, SearchOptions
from sac_search.pipeline import reported
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult
from sac_search.study.store import StudyStore, TrialReader, open_study

_POLL_SECONDS = 1.0
_KINDS = ("ray", "slurm")
_EXAMPLES = "cuda:0,cuda:1, all, ray:4 or slurm:4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Where the workers of a search run."""

    devices: tuple[str, ...] = ()
    """Devices of this machine, one search on each."""
    kind: str | None = None
    """`ray` or `slurm`, where they are not on this machine."""
    count: int = 0
    """How many of that kind."""


def parse_workers(text: str) -> Workers:
    """Returns where workers run: `cuda:0,cuda:1`, `all`, `ray:4` or `slurm:4`.

    Raises:
        UsageError: it says nothing that can be meant.
    """
    kind, _, count = text.partition(":")
    if kind in _KINDS:
        if not count.isdigit() or int(count) < 1:
            raise UsageError(f"--workers {text}: how many? as {kind}:4")
        return Workers(kind=kind, count=int(count))
    if text == "all":
        return Workers(devices=_all_devices())
    devices = tuple(part.strip() for part in text.split(","))
    for device in devices:
        try:
            torch.device(device)
        except RuntimeError:
            raise UsageError(
                f"--workers {text}: {device!r} is no device; it looks like {_EXAMPLES}"
            ) from None
        if devices.count(device) > 1 and torch.device(device).type != "cpu":
            raise UsageError(
                f"--workers {text}: {device} is there twice; two searches on one device would "
                "measure each other"
            )
    return Workers(devices=devices)


def parse_parameters(text: str | None) -> dict[str, str] | None:
    """Returns parameters of submitit: `slurm_partition=gpu,timeout_min=240`.

    Raises:
        UsageError: there is one without a value.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise UsageError(
                f"--slurm {text}: expected NAME=VALUE,NAME=VALUE, as slurm_partition=gpu"
            )
    return {name: value for name, _, value in pairs}


def _all_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise UsageError("--workers all: this machine has no accelerator that torch can use")
    return tuple(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))


def search_with_workers(
    spec: str,
    options: SearchOptions,
    workers: Workers,
    listener: Listener,
    slurm: Mapping[str, str] | None = None,
) -> SearchResult:
    """Searches the workload that `spec` names with several workers. Returns what they found.

    `slurm` are parameters of submitit.

    Raises:
        NoPolicyFits, WorkloadError, UsageError: as `search` does, when no worker could search.
        WorkerError: every worker died.
    """
    refuse_ranks_apart()
    _refuse_contradictions(options, workers, slurm)
    series, folder = name_and_folder(spec, options)
    watch = _Watch(folder, options, listener)
    jobs = _started(spec, options, workers, slurm or {}, series, folder)
    try:
        watch.run(jobs)
    finally:
        for job in jobs:
            job.kill()
    result = watch.result()
    if not workers.devices:  # they left their files where they ran
        artifacts.write_files(result, folder)
        if options.report:
            path = folder / artifacts.REPORT_FILE

            def write(found: SearchResult = result) -> SearchResult:
                return artifacts.write_report(found, open_study(folder, options.storage), path)

            result = reported(result, write, listener)
    if result.best is None and not result.interrupted:
        raise NoPolicyFits(artifacts.no_fit_message(result))
    return result


def _refuse_contradictions(
    options: SearchOptions, workers: Workers, slurm: Mapping[str, str] | None
) -> None:
    if workers.devices and options.device is not None:
        raise UsageError(
            f"--workers {','.join(workers.devices)} says where to search already; leave --device "
            f"{options.device} out"
        )
    if workers.kind is not None and options.storage is None:
        raise UsageError(
            f"--workers {workers.kind}:{workers.count} may run on several machines, which share a "
            "study by a database: add --storage (see sac-search serve --help for a proxy of one)"
        )
    if slurm is not None and workers.kind != "slurm":
        raise UsageError("--slurm is for --workers slurm:COUNT")


def _started(
    spec: str,
    options: SearchOptions,
    workers: Workers,
    slurm: Mapping[str, str],
    series: str,
    folder: Path,
) -> Sequence[Job]:
    def request(device: str | None) -> str:
        there = replace(options, device=device, study=series, root=options.root.absolute())
        asked = JobRequest(
            spec=spec,
            options=options_to_json(there),
            study_name=folder.name,
            working_folder=str(Path.cwd()),
            keeps_files=bool(workers.devices),
        )
        return records.encode(asked).decode()

    if workers.devices:
        return start_local(workers.devices, [request(d) for d in workers.devices], folder)
    requests = [request(options.device)] * workers.count
    gpus = 0 if options.device == "cpu" else 1
    if workers.kind == "ray":
        return start_ray(requests, gpus=gpus)
    return start_slurm(requests, folder, gpus=gpus, parameters=slurm)


class _Watch:
    """Waits for the jobs and tells what they find meanwhile."""

    def __init__(self, folder: Path, options: SearchOptions, listener: Listener) -> None:
        self._running: list[Job] = []
        self._folder = folder
        self._options = options
        self._listener = listener
        self._store: StudyStore | None = None
        self._reader: TrialReader | None = None
        self._known: set[str] = set()
        self._trials_done = 0
        self._none_seconds: float | None = None
        self._notes: tuple[str, ...] = ()
        self._errors: list[SacSearchError] = []
        self._is_interrupted = False
        self._has_result = False
        store = self._opened()
        if store is not None:
            known = store.candidates()
            self._known = {candidate.policy.key for candidate in known}
            self._trials_done = sum(map(_counts, known))
            self._tell_estimate(store)
            listener.on_known(known, self._trials_done, store.budget_bytes)

    def run(self, jobs: Sequence[Job]) -> None:
        """Waits until all jobs have ended; Ctrl-C asks them to."""
        self._running = list(jobs)
        self._listener.on_phase("search", total=self._options.trials)
        while self._running:
            try:
                time.sleep(_POLL_SECONDS)
                self._look()
            except KeyboardInterrupt:
                if self._is_interrupted:
                    raise
                interrupts.acknowledge()
                self._is_interrupted = True
                self._listener.on_note(
                    "Interrupted: the workers verify and export the best so far (again to give up)."
                )
                for job in self._running:
                    job.stop()
        self._tell_candidates()

    def result(self) -> SearchResult:
        """Returns what the study holds in the end.

        Raises:
            SacSearchError: why no worker could search.
            KeyboardInterrupt: nothing was begun.
        """
        if not self._has_result and self._errors and not self._is_interrupted:
            raise self._errors[0]
        try:
            result = artifacts.load_result(self._folder, self._options.storage)
        except StudyNotFound:
            if self._is_interrupted:
                raise KeyboardInterrupt from None  # before anything was begun
            raise
        return replace(result, interrupted=self._is_interrupted, notes=self._notes)

    def _look(self) -> None:
        for job in list(self._running):
            try:
                text = job.poll()
            except JobLost as lost:
                self._running.remove(job)
                self._fail(job, WorkerError(str(lost)))
                continue
            if text is None:
                continue
            self._running.remove(job)
            report = records.decode(text, JobReport)
            error = None if report.error is None else report.error.local()
            if error is None or isinstance(error, NoPolicyFits):
                self._has_result = True
                self._notes = self._notes or report.notes
            else:
                self._fail(job, error)
        self._tell_candidates()

    def _fail(self, job: Job, error: SacSearchError) -> None:
        self._errors.append(error)
        if self._running or self._has_result:
            self._listener.on_note(
                f"The worker on {job.name} is gone, and the others go on: {error}"
            )

    def _tell_candidates(self) -> None:
        store = self._opened()
        if store is None:
            return
        assert self._reader is not None
        self._tell_estimate(store)
        for candidate in [*store.references(), *self._reader.new()]:
            if candidate.policy.key not in self._known:
                self._known.add(candidate.policy.key)
                self._trials_done += _counts(candidate)
                self._listener.on_candidate(candidate, self._trials_done, store.budget_bytes)

    def _tell_estimate(self, store: StudyStore) -> None:
        none_seconds = store.none_estimate_seconds
        if none_seconds is not None and none_seconds != self._none_seconds:
            self._none_seconds = none_seconds
            self._listener.on_estimate(none_seconds)

    def _opened(self) -> StudyStore | None:
        if self._store is not None:
            return self._store
        try:
            self._store = open_study(self._folder, self._options.storage)
        except StudyNotFound:
            return None  # no worker has made it yet
        self._reader = TrialReader(self._store)
        return self._store


def _counts(candidate: Candidate) -> bool:
    return not (
        candidate.is_baseline or candidate.is_ruled_out or candidate.imported_from is not None
    )
