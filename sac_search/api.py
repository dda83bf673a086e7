"""The search from Python: load, baselines, search, confirm, verify, export, stage by stage."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from sac_search import interrupts, units
from sac_search.artifacts import make_result, no_fit_message, write_files
from sac_search.device import Clock, find_device
from sac_search.errors import NoPolicyFits, StudyError, StudyNotFound, UsageError, WorkloadError
from sac_search.rates import default_rates, find_rates
from sac_search.records import Evidence, FailureKind
from sac_search.space import Granularity, LayerChoiceMode, build_space
from sac_search.state import training_state_kept
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, rank
from sac_search.study.finish import (
    Winner,
    choose_winner,
    confirm,
    with_confirmed_figures,
)
from sac_search.study.forecasting import ForecastStudy
from sac_search.study.measurer import Measurer
from sac_search.study.result import SearchResult, find_candidate, floor_of
from sac_search.study.sampler import SamplerName
from sac_search.study.search import Search, SearchSettings
from sac_search.study.store import (
    StudyStore,
    check_same,
    create_study,
    held,
    make_folder,
    newest_folder,
    open_study,
    unused_folder,
)
from sac_search.study.warmstart import adopt_trace, start_from_others
from sac_search.worker.client import IN_WORKER, WorkerClient
from sac_search.worker.session import Description, Session, SessionSettings, Verdict, set_threads
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


class Listener(Protocol):
    """Is told what a search does."""

    def on_phase(self, name: str, total: int | None = None) -> None:
        """A new stage begins."""

    def on_note(self, text: str) -> None:
        """Something that the user should read."""

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        """A policy was measured."""


class _Silence:
    def on_phase(self, name: str, total: int | None = None) -> None: ...

    def on_note(self, text: str) -> None: ...

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Everything that a search can be told, beside the workload."""

    budget_gb: float
    """The budget for the peak of the whole step, in GiB (2**30 bytes)."""
    study: str | None = None
    """Name of the study; made of the workload and the budget when None."""
    root: Path = Path("studies")
    """The folder that holds the studies."""
    fresh: bool = False
    """Begin anew under a new name; nothing is deleted."""
    device: str | None = None
    """`cpu`, `cuda:0`, …; the machine's accelerator when None."""
    layers: str | None = None
    """FQN patterns of the layers, such as `model.layers.*`; found by themselves when None."""
    layer_choice: LayerChoiceMode = LayerChoiceMode.COUNT
    """A number of layers per kind, or a decision per layer."""
    batch_size: int | None = None
    """Handed to the factory when given."""
    trials: int = 40
    """Trials to measure beyond the baselines."""
    timeout_seconds: float | None = None
    """Stop searching after this time."""
    trial_timeout_seconds: float | None = None
    """Give a trial up after this time; twenty baselines' worth when None."""
    granularity: Granularity = Granularity.SITE
    """What one save-or-recompute decision covers."""
    tiers: int = 2
    """Save sets that layers of one kind may have: 1 or 2."""
    sampler: SamplerName = SamplerName.PLANNER
    """Who proposes."""
    seed: int = 0
    """Of the sampler."""
    clock: Clock | None = None
    """What counts as step time; processor time on the CPU, elapsed time elsewhere when None."""
    threads: int | None = None
    """CPU threads of torch; one for processor time when None."""
    steps: int = 5
    """Timed steps per trial; twice as many when the best are measured again side by side."""

    def __post_init__(self) -> None:
        if not 0 < self.budget_gb < float("inf"):
            raise UsageError(f"the budget is {self.budget_gb} GiB; it must be more than nothing")
        for name in ("trials", "steps", "threads", "batch_size"):
            value = getattr(self, name)
            least = 0 if name == "trials" else 1
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}; it must be {least} or more")
        if self.tiers not in (1, 2):
            raise UsageError(f"tiers is {self.tiers}; it must be 1 or 2")
        for name in ("timeout_seconds", "trial_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} is {value}; it must be more than 0")

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return units.gib_to_bytes(self.budget_gb)


def search(
    workload: Workload | str | Callable[..., Workload],
    *,
    budget_gb: float,
    listener: Listener | None = None,
    **options: Any,
) -> SearchResult:
    """Finds the policy that makes the workload's step fastest with its peak under the budget.

    `workload` is a `Workload`, a factory that returns one, or the place of a factory
    (`train.py:workload`). A factory that can be imported runs in a worker process, as from the
    command line. A `Workload` is measured in this process, and everything that training steps
    change is put back afterwards.

    `budget_gb` is in GiB; `options` are the fields of `SearchOptions`.

    Raises:
        NoPolicyFits: nothing that was measured stays under the budget.
        WorkloadError: the workload itself fails.
        UsageError: an argument cannot be used, or the study is of another environment.
    """
    if os.environ.get(IN_WORKER):
        raise UsageError(
            "search() was called while a worker imported this file to find its workload; put the "
            "call under if __name__ == '__main__':"
        )
    settings = _options(budget_gb, options)
    told = listener or _Silence()
    if isinstance(workload, Workload):
        if settings.device is not None or settings.batch_size is not None:
            raise UsageError(
                "device and batch_size are for factories; a Workload is on its device, with its "
                "batch, already"
            )
        return _search_here(workload, settings, told)
    spec = workload if isinstance(workload, str) else _spec_of(workload)
    if spec is None:
        assert not isinstance(workload, str)
        name = getattr(workload, "__qualname__", "the factory")
        factory = Factory(function=workload, name=name, source_hash="")
        device = find_device(settings.device) if factory.takes_device else torch.device("cpu")
        return _search_here(build_workload(factory, device, settings.batch_size), settings, told)
    return search_spec(spec, settings, told)


def search_spec(spec: str, options: SearchOptions, listener: Listener) -> SearchResult:
    """Searches the workload that `spec` names, in a worker process."""
    name, folder = _name_and_folder(spec, options)
    with WorkerClient(
        session_settings(spec, options),
        folder / LOG_FILE,
        trial_timeout_seconds=options.trial_timeout_seconds,
    ) as client:
        return run_search(client, name, options, listener)


def forecast(
    workload: str | Callable[..., Workload],
    *,
    budget_gb: float,
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
    settings = _options(budget_gb, options)
    return forecast_spec(spec, settings, device, listener or _Silence())


def forecast_spec(
    spec: str, options: SearchOptions, device: str | None, listener: Listener
) -> SearchResult:
    """Forecasts the workload that `spec` names, in a worker process."""
    rates = default_rates(options.budget_bytes) if device is None else find_rates(device)
    name, folder = _name_and_folder(spec, options)
    settings = session_settings(spec, options, forecast_device=rates.name)
    with WorkerClient(settings, folder / LOG_FILE) as client, held(folder):
        description = _described(client, listener)
        store = _open_or_create(folder, name, options, description, listener)
        result = _forecast_study(store, client, description, options, listener)
    if result.best is None:
        raise NoPolicyFits(no_fit_message(result))
    return result


def _forecast_study(
    store: StudyStore,
    measurer: Measurer,
    description: Description,
    options: SearchOptions,
    listener: Listener,
) -> SearchResult:
    listener.on_phase("forecast")
    assert description.priced_step_seconds is not None
    space = build_space(store.layers, options.layer_choice, options.granularity, options.tiers)
    study = ForecastStudy(
        store,
        space,
        measurer,
        description.priced_step_seconds,
        lambda candidate: listener.on_candidate(candidate, 0, store.budget_bytes),
    )
    winner = study.run()
    result = make_result(store, winner, "forecast", False, description.notes)
    write_files(result, store.folder)
    return result


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
    )


def _search_here(workload: Workload, options: SearchOptions, listener: Listener) -> SearchResult:
    check_workload(workload, "search()")
    model_name = type(workload.model).__name__
    name = _study_name(options, f"{model_name}-{options.budget_gb:g}gib")
    device = workload.parameters()[0].device
    settings = session_settings(model_name, options)
    with training_state_kept(workload), _threads_kept(settings, device):
        session = Session(workload, settings, device)
        return run_search(session, name, options, listener)


def run_search(
    measurer: Measurer, name: str, options: SearchOptions, listener: Listener
) -> SearchResult:
    """Runs all stages with any measurer. Returns the result, which is on disk by then.

    Raises:
        NoPolicyFits, WorkloadError, UsageError: as `search` does.
    """
    with interrupts.listening(signal.SIGINT):
        description = _described(measurer, listener)
        folder = _study_folder(name, options)
        with held(folder):
            store = _open_or_create(folder, name, options, description, listener)
            result = _search_study(store, measurer, options, listener, description.notes)
    if result.best is None and not result.interrupted:
        raise NoPolicyFits(no_fit_message(result))
    return result


def _described(measurer: Measurer, listener: Listener) -> Description:
    listener.on_phase("load")
    description = measurer.describe()
    for note in description.notes:
        listener.on_note(note)
    return description


def _search_study(
    store: StudyStore,
    measurer: Measurer,
    options: SearchOptions,
    listener: Listener,
    notes: tuple[str, ...],
) -> SearchResult:
    if not options.fresh:
        adopt_trace(store, options.root)
    space = build_space(store.layers, options.layer_choice, options.granularity, options.tiers)
    if not options.fresh:
        for other in start_from_others(store, options.root, space.decisions):
            listener.on_note(f"Starting from what study {other!r} measured in this environment.")
    run = Search(
        store=store,
        space=space,
        measurer=measurer,
        settings=SearchSettings(
            trials=options.trials,
            timeout_seconds=options.timeout_seconds,
            sampler=options.sampler,
            seed=options.seed,
        ),
        on_candidate=lambda candidate, done: listener.on_candidate(
            candidate, done, store.budget_bytes
        ),
    )
    interrupted = False
    try:
        reason = _search_until_done(run, listener, options)
        winner = _finish(store, measurer, listener, options, interrupted)
    except KeyboardInterrupt:
        interrupts.acknowledge()
        interrupted, reason = True, "interrupted"
        listener.on_note("Interrupted: verifying and exporting the best so far (again to give up).")
        winner = _finish(store, measurer, listener, options, interrupted)
    result = make_result(store, winner, reason, interrupted, tuple(notes))
    write_files(result, store.folder)
    return result


def _search_until_done(run: Search, listener: Listener, options: SearchOptions) -> str:
    listener.on_phase("baselines", total=options.trials)
    first = run.measure_first()
    none = first.get(NONE)
    if none is not None and none.fits(run.store.budget_bytes):
        return "the step fits without checkpointing"
    _refuse_failing_workload(list(first.values()))
    floor_bytes = floor_of(first.get(FULL), run.store.layers)
    if floor_bytes is not None and floor_bytes > run.store.budget_bytes:
        return "the budget is under the floor"
    listener.on_phase("search")
    return run.run()


def _refuse_failing_workload(candidates: list[Candidate]) -> None:
    memory = (FailureKind.OUT_OF_MEMORY, FailureKind.HOST_OUT_OF_MEMORY)
    failures = [c.failure for c in candidates if c.failure is not None]
    others = [failure for failure in failures if failure.kind not in memory]
    if len(failures) == len(candidates) and others:
        raise WorkloadError(
            f"neither the step without checkpointing nor the one with runs: {others[0].kind}. "
            f"{others[0].advice}\n{others[0].message}\n"
            "The study remembers it: when the cause is mended, add --fresh."
        )


def _finish(
    store: StudyStore,
    measurer: Measurer,
    listener: Listener,
    options: SearchOptions,
    interrupted: bool,
) -> Winner:
    candidates = store.candidates()
    none = find_candidate(candidates, NONE)
    if none is not None and none.fits(store.budget_bytes):
        ranked = [none]
    elif interrupted:
        ranked = rank(with_confirmed_figures(store, candidates), store.budget_bytes)
    else:
        listener.on_phase("confirm")
        ranked = confirm(store, measurer, candidates, steps=2 * options.steps)
    listener.on_phase("verify")

    def on_verdict(candidate: Candidate, verdict: Verdict) -> None:
        verification = verdict.verification
        if verification is None or not verification.passed:
            listener.on_note(f"{candidate.name} did not pass verification; the next best follows.")

    return choose_winner(store, measurer, ranked, on_verdict)


def _open_or_create(
    folder: Path,
    name: str,
    options: SearchOptions,
    description: Description,
    listener: Listener,
) -> StudyStore:
    is_forecast = description.priced_step_seconds is not None
    evidence = Evidence.FORECAST if is_forecast else Evidence.MEASURED
    try:
        store = open_study(folder)
    except StudyNotFound:
        return create_study(
            folder,
            budget_bytes=options.budget_bytes,
            environment=description.environment,
            layers=description.layers,
            series=name,
            evidence=evidence,
        )
    if is_forecast and store.candidates():
        raise StudyError(
            f"study {store.name!r} holds measured trials, to which a forecast has nothing to add; "
            "leave --forecast out to continue it, or name another one with --study"
        )
    if is_forecast or store.evidence is Evidence.FORECAST:
        if not is_forecast:
            listener.on_note(f"Study {store.name!r} was forecast so far; now it is measured.")
        # Forecasts stay in the study, apart; its environment becomes that of what comes now.
        store.begin_anew(description.environment, description.layers, evidence)
    check_same(store, description.environment, options.budget_bytes, description.layers)
    return store


def _name_and_folder(spec: str, options: SearchOptions) -> tuple[str, Path]:
    """Returns the name of a workload's study and its folder, which is made."""
    name = _study_name(options, default_study_name(spec, options.budget_gb))
    require_file(spec)
    folder = _study_folder(name, options)
    make_folder(folder)
    return name, folder


def _study_folder(name: str, options: SearchOptions) -> Path:
    if options.fresh:
        return unused_folder(options.root, name)
    return newest_folder(options.root, name) or options.root / name


# --- names ----------------------------------------------------------------------------------------


def default_study_name(spec: str, budget_gb: float | None = None) -> str:
    """Returns the name of a study when the user gives none: workload and, if any, budget."""
    location, factory = split_spec(spec)
    stem = "builtin" if spec == BUILTIN_SPEC else Path(location).stem
    if factory != DEFAULT_FACTORY:
        stem = f"{stem}-{factory}"
    return stem if budget_gb is None else f"{stem}-{budget_gb:g}gib"


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


def _options(budget_gb: float, options: dict[str, Any]) -> SearchOptions:
    known = {field.name: field for field in dataclasses.fields(SearchOptions)}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"search() takes no {unknown[0]!r}; it takes {', '.join(known)}")
    enums: dict[str, Callable[[str], Any]] = {
        "sampler": SamplerName,
        "layer_choice": LayerChoiceMode,
        "granularity": Granularity,
        "clock": Clock,
        "root": Path,
    }
    for name, convert in enums.items():
        if isinstance(options.get(name), str):
            try:
                options[name] = convert(options[name])
            except ValueError as error:
                raise UsageError(str(error)) from None
    return SearchOptions(budget_gb=budget_gb, **options)


@contextlib.contextmanager
def _threads_kept(settings: SessionSettings, device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    set_threads(settings, device)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
