"""The search from Python: from a workload, a factory or the place of one."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sac_search.device import find_device
from sac_search.distributed import (
    refuse_forecast_of_ranks,
    refuse_process_group,
    refuse_ranks_apart,
)
from sac_search.errors import UsageError
from sac_search.fingerprint import fingerprint_of
from sac_search.options import Compile, Listener, SearchOptions
from sac_search.pipeline import run_forecast, run_search, study_folder
from sac_search.rates import default_rates, find_rates
from sac_search.recipe import parse_recipe
from sac_search.state import training_state_kept
from sac_search.study.allocation import AUTO, parse_batch_sizes
from sac_search.study.candidate import Candidate
from sac_search.study.goal import SPEED, GoalKind
from sac_search.study.result import SearchResult
from sac_search.study.sharing import is_shared
from sac_search.study.store import make_folder
from sac_search.study.throughput_result import ThroughputResult
from sac_search.throughput import run_throughput
from sac_search.worker.client import Isolation, WorkerClient
from sac_search.worker.group import current_group
from sac_search.worker.process import IN_WORKER
from sac_search.worker.scout import Scout
from sac_search.worker.session import Session, SessionSettings, set_threads
from sac_search.workload import (
    BUILTIN_SPEC,
    DEFAULT_FACTORY,
    Factory,
    Workload,
    build_workload,
    check_workload,
    require_file,
    split_spec,
)

LOG_FILE = "worker.log"


class _Silence:
    def on_phase(self, name: str, total: int | None = None) -> None: ...

    def on_note(self, text: str) -> None: ...

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None: ...

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None: ...

    def on_estimate(self, none_seconds: float) -> None: ...


def search(
    workload: Workload | str | Callable[..., Workload],
    *,
    budget_gb: float | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> SearchResult:
    """Finds the policy that makes the workload's step fastest with its peak under the budget.

    `workload` is a `Workload`, a factory that returns one, or the place of a factory
    (`train.py:workload`). A factory that can be imported runs in a worker process, as from the
    command line. A `Workload` is measured in this process, and everything that training steps
    change is put back afterwards.

    `budget_gb` is in GiB; `options` are the fields of `SearchOptions`. With `minimize="memory",
    max_overhead=0.05` it is the policy of least peak whose step takes at most 5% more than without
    checkpointing, and a budget may be left out. With `pareto=True` it is the whole trade-off: the
    result's `front()` has the points, its best is the fastest.

    Raises:
        NoPolicyFits: nothing that was measured is within the limits.
        WorkloadError: the workload itself fails.
        UsageError: an argument cannot be used, or the study is of another environment.
    """
    if os.environ.get(IN_WORKER):
        raise UsageError(
            "search() was called while a worker imported this file to find its workload; put the "
            "call under if __name__ == '__main__':"
        )
    _require_budget("search", budget_gb, options)
    settings = _options(budget_gb, options)
    told = listener or _Silence()
    if isinstance(workload, Workload):
        if settings.device is not None or settings.batch_size is not None:
            raise UsageError(
                "device and batch_size are for factories; a Workload is on its device, with its "
                "batch, already"
            )
        return search_here(workload, settings, told)
    spec = workload if isinstance(workload, str) else _spec_of(workload)
    if spec is None:
        assert not isinstance(workload, str)
        name = getattr(workload, "__qualname__", "the factory")
        factory = Factory(function=workload, name=name)
        device = find_device(settings.device) if factory.takes_device else torch.device("cpu")
        return search_here(build_workload(factory, device, settings.batch_size), settings, told)
    return search_spec(spec, settings, told)


def search_spec(
    spec: str, options: SearchOptions, listener: Listener, folder: Path | None = None
) -> SearchResult:
    """Searches the workload that `spec` names, in a worker process, or one of every rank.

    `folder` is the study's, where that was chosen before.
    """
    refuse_ranks_apart()
    name, newest = name_and_folder(spec, options)
    is_one_of_several = folder is not None or is_shared(newest)
    folder = folder or newest
    # Each search of a study has a log of its own, or the last words in it could be another's.
    log_name = f"worker.{os.getpid()}.log" if is_one_of_several else LOG_FILE
    with WorkerClient(
        session_settings(spec, options),
        folder / log_name,
        trial_timeout_seconds=options.trial_timeout_seconds,
        isolation=options.isolate,
    ) as client:
        return run_search(client, name, options, listener, folder)


def search_throughput(
    workload: str | Callable[..., Workload],
    *,
    budget_gb: float,
    batch_sizes: str | Iterable[int] = AUTO,
    listener: Listener | None = None,
    **options: Any,
) -> ThroughputResult:
    """Finds the batch size and the policy with the most samples per second under the budget.

    `workload` is a factory at the top level of a file that takes `batch_size`, or its place
    (`train.py:workload`). `batch_sizes` are those to look at, or `"auto"`: powers of two and then
    sizes between the best of them, as far as the forecast allows. `options` are the fields of
    `SearchOptions`; `trials` are those of all sizes together.

    Raises:
        NoPolicyFits: nothing fits the budget at any batch size.
        WorkloadError: the workload itself fails, or does not do what a batch size asks for.
        UsageError: an argument cannot be used, or the study is of another environment.
    """
    if os.environ.get(IN_WORKER):
        raise UsageError(
            "search_throughput() was called while a worker imported this file to find its "
            "workload; put the call under if __name__ == '__main__':"
        )
    spec = workload if isinstance(workload, str) else _spec_of(workload)
    if spec is None:
        raise UsageError(
            "search_throughput() builds the workload anew for each batch size, in a process of its "
            "own, so it takes the place of a factory (train.py:workload), or a factory at the top "
            "level of a file"
        )
    settings = _options(budget_gb, options)
    return throughput_spec(spec, settings, batch_sizes, listener or _Silence())


def throughput_spec(
    spec: str, options: SearchOptions, batch_sizes: str | Iterable[int], listener: Listener
) -> ThroughputResult:
    """Searches batch size and policy of the workload that `spec` names, in worker processes."""
    refuse_ranks_apart()
    if current_group() is not None:
        raise UsageError(
            "batch sizes are searched in one process, not over ranks: search them without torchrun"
        )
    if options.goal != SPEED:
        raise UsageError(
            "batch sizes are searched for speed under a budget; leave --minimize, --max-overhead "
            "and --pareto out, or search one --batch-size with them"
        )
    if options.compile is not Compile.OFF:
        raise UsageError(
            "batch sizes are searched for eager steps; leave --compile out, and search the best "
            "batch size once more with it"
        )
    if options.batch_size is not None:
        raise UsageError(
            f"--batch-size {options.batch_size} leaves nothing to search; name the sizes with "
            "--batch-sizes, or leave --maximize throughput out"
        )
    sizes = parse_batch_sizes(batch_sizes)
    require_file(spec)
    name = _study_name(options, f"{default_study_name(spec, options.budget_gb)}-throughput")
    folder = study_folder(name, options)
    make_folder(folder)
    with _SizeWorkers(spec, options, folder) as workers:
        return run_throughput(workers, name, options, sizes, listener)


class _SizeWorkers:
    """Worker processes of one workload at several batch sizes."""

    def __init__(self, spec: str, options: SearchOptions, folder: Path) -> None:
        self._spec = spec
        self._options = options
        assert options.budget_bytes is not None
        rates = default_rates(options.budget_bytes)
        settings = session_settings(spec, options, forecast_device=rates.name)
        is_on_cpu = (options.device or "").startswith("cpu") or not torch.accelerator.is_available()
        device = "cpu" if is_on_cpu else None
        self._scout = Scout(replace(settings, device=device), folder / "forecast.log")

    def __enter__(self) -> _SizeWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._scout.close()

    def full_peak_bytes(self, batch_size: int) -> int | None:
        """Returns the peak under full checkpointing by a dry run."""
        return self._scout.full_peak_bytes(batch_size)

    def open(self, batch_size: int, folder: Path) -> WorkerClient:
        """Returns a worker; its process starts when it is first asked."""
        # Forecasts hold no device, but memory of the machine.
        self._scout.close()
        return WorkerClient(
            session_settings(self._spec, replace(self._options, batch_size=batch_size)),
            folder / LOG_FILE,
            trial_timeout_seconds=self._options.trial_timeout_seconds,
            isolation=self._options.isolate,
        )


def forecast(
    workload: str | Callable[..., Workload],
    *,
    budget_gb: float | None = None,
    device: str | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> SearchResult:
    """Finds the policy that should be fastest, without measuring anything.

    The workload is built without memory where its factory takes a device, so that it may be far
    larger than this machine. `device` names an accelerator whose published rates price the ops; one
    that has the budget's memory when None. The result's evidence is `forecast`, its study continues
    with measured trials once the same search runs on a device.

    Raises:
        NoPolicyFits: by forecast nothing stays under the budget.
        WorkloadError: the workload itself fails, or cannot be forecast.
        UsageError: an argument cannot be used, or the study holds measured trials.
    """
    spec = workload if isinstance(workload, str) else _spec_of(workload)
    if spec is None:
        raise UsageError(
            "forecast() builds its workload in a process of its own, so it takes the place of a "
            "factory (train.py:workload), or a factory at the top level of a file"
        )
    _require_budget("forecast", budget_gb, options)
    settings = _options(budget_gb, options)
    return forecast_spec(spec, settings, device, listener or _Silence())


def forecast_spec(
    spec: str, options: SearchOptions, device: str | None, listener: Listener
) -> SearchResult:
    """Forecasts the workload that `spec` names, in a worker process."""
    refuse_ranks_apart()
    refuse_forecast_of_ranks()
    if options.compile is not Compile.OFF:
        raise UsageError(
            "what torch.compile does to a step cannot be forecast, only measured; leave --compile "
            "out, or --forecast (and without an accelerator say --device cpu)"
        )
    if device is None and options.budget_bytes is None:
        raise UsageError(
            "without a budget there is no telling which device to forecast for; name one, as in "
            "--forecast H100, or add --budget-gb (to measure on this machine: --device cpu)"
        )
    if device is None:
        assert options.budget_bytes is not None
        rates = default_rates(options.budget_bytes)
    else:
        rates = find_rates(device)
    name, folder = name_and_folder(spec, options)
    settings = session_settings(spec, options, forecast_device=rates.name)
    with WorkerClient(settings, folder / LOG_FILE) as client:
        return run_forecast(client, name, options, listener)


def session_settings(
    spec: str, options: SearchOptions, *, forecast_device: str | None = None
) -> SessionSettings:
    """Returns the part of the options that the worker needs."""
    return SessionSettings(
        spec=spec,
        device=options.device,
        layers=options.layers,
        batch_size=options.batch_size,
        clock=options.clock,
        threads=options.threads,
        steps=options.steps,
        forecast_device=forecast_device,
        compile=options.compile_options,
    )


def search_here(
    workload: Workload,
    options: SearchOptions,
    listener: Listener | None = None,
    source_hash: str = "",
) -> SearchResult:
    """Searches a workload in this process, and puts back what training steps change.

    `source_hash` stands for what the workload is made of, as far as can be told when it is not
    given: a study is continued for the same only.

    Raises:
        UsageError: an option needs a process of its own.
    """
    if options.isolate is not Isolation.SEARCH or options.trial_timeout_seconds is not None:
        raise UsageError(
            "a Workload is measured in this process, where no trial can be isolated or ended from "
            "outside: leave isolate and trial_timeout_seconds out, or give a factory in a file"
        )
    check_workload(workload, "search()")
    refuse_process_group()
    model_name = type(workload.model).__name__
    name = _study_name(options, model_name + _name_of_goal(options))
    device = workload.parameters()[0].device
    settings = session_settings(model_name, options)
    source_hash = source_hash or fingerprint_of(workload)
    with training_state_kept(workload) as restore, _threads_kept(settings, device):
        session = Session(workload, settings, device, source_hash, restore=restore)
        return run_search(session, name, options, listener or _Silence())


def name_and_folder(spec: str, options: SearchOptions) -> tuple[str, Path]:
    """Returns the name under which a workload's study is continued, and its folder, now made."""
    name = _study_name(options, default_study_name(spec) + _name_of_goal(options))
    require_file(spec)
    folder = study_folder(name, options)
    make_folder(folder)
    return name, folder


# --- names ----------------------------------------------------------------------------------------


def default_study_name(spec: str, budget_gb: float | None = None) -> str:
    """Returns the name of a study when the user gives none: workload and, if any, budget."""
    recipe = parse_recipe(spec)
    location, factory = split_spec(spec)
    stem = "builtin" if spec == BUILTIN_SPEC else Path(location).stem
    if recipe is not None:
        stem = recipe.title
    elif factory != DEFAULT_FACTORY:
        stem = f"{stem}-{factory}"
    return stem if budget_gb is None else f"{stem}-{budget_gb:g}gib"


def _name_of_goal(options: SearchOptions) -> str:
    """Returns what the name of a study says of its goal: studies of two goals are two studies."""
    goal = options.goal
    name = ""
    if goal.kind is GoalKind.MEMORY:
        name = f"-memory-{goal.limit_text.removesuffix('%')}pct"
    elif goal.kind is GoalKind.PARETO:
        name = "-pareto"
    return name if options.budget_gb is None else f"{name}-{options.budget_gb:g}gib"


def _study_name(options: SearchOptions, default: str) -> str:
    return _safe_name(default if options.study is None else options.study)


def _safe_name(name: str) -> str:
    safe = re.sub(r"[^\w.+-]+", "_", name).strip(".")
    if not safe:
        raise UsageError(f"{name!r} cannot be the name of a study; use letters and digits")
    return safe


def _spec_of(factory: Callable[..., Workload]) -> str | None:
    """Returns the place of a factory that a worker can import, or None."""
    name = getattr(factory, "__qualname__", "")
    try:
        path = inspect.getsourcefile(factory)
    except TypeError:
        return None
    if not path or not name.isidentifier() or not Path(path).is_file():
        return None
    return f"{path}:{name}"


def _require_budget(function: str, budget_gb: float | None, options: dict[str, Any]) -> None:
    if budget_gb is None and not options.keys() & {"minimize", "max_overhead", "pareto"}:
        raise TypeError(f"{function}() missing 1 required keyword-only argument: 'budget_gb'")


def _options(budget_gb: float | None, options: dict[str, Any]) -> SearchOptions:
    known = {field.name: field for field in dataclasses.fields(SearchOptions)}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"search() takes no {unknown[0]!r}; it takes {', '.join(known)}")
    if isinstance(options.get("root"), str):
        options["root"] = Path(options["root"])
    return SearchOptions(budget_gb=budget_gb, **options)


@contextlib.contextmanager
def _threads_kept(settings: SessionSettings, device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    set_threads(settings, device)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
