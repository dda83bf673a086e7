"""The command line: arguments, exit codes and printing.

0 a policy was found; 2 wrong usage; 3 no policy fits; 4 the workload itself fails; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console

from sac_search import api, artifacts, interrupts, records, units
from sac_search._version import __version__
from sac_search.arguments import (
    NOT_READY,
    BatchSize,
    ClockOption,
    Device,
    Format,
    Json,
    Layers,
    OutputFormat,
    ReadyOptions,
    Root,
    Storage,
    Threads,
)
from sac_search.batch_artifacts import load_throughput, write_throughput_report
from sac_search.errors import SacSearchError, StudyError, UsageError, WorkloadError
from sac_search.export import read_meta, require_writable, write_whole
from sac_search.fleet.search import parse_parameters, parse_workers, search_with_workers
from sac_search.frontier import find_frontier
from sac_search.options import Compile, Minimize, SearchOptions
from sac_search.report import comparison, facts, rows, terminal
from sac_search.report.explain import explain as explain_result
from sac_search.report.progress import SearchProgress
from sac_search.report.throughput import (
    size_rows,
    throughput_closing_lines,
    throughput_headline,
)
from sac_search.space import Granularity, LayerChoiceMode
from sac_search.study import batches
from sac_search.study.allocation import AUTO
from sac_search.study.dashboard import HOST, attach_files, serve
from sac_search.study.points_at import faster_at, result_at
from sac_search.study.proxy import PROXY_HOST, serve_storage
from sac_search.study.result import SearchResult, to_document
from sac_search.study.sampler import SamplerName
from sac_search.study.storage import DATABASE_NAME, PROXY_PORT, address_without_password
from sac_search.study.store import holds_batches, list_studies, newest_folder, open_study
from sac_search.study.throughput_result import ThroughputResult
from sac_search.study.throughput_result import to_document as to_throughput_document
from sac_search.worker.client import Isolation, WorkerClient
from sac_search.workload import BUILTIN_SPEC, require_file

INTERRUPTED = 130
_WIDTH_OF_FILES = 150
# Behind a `--forecast` that names no device.
_ANY_DEVICE = "any"
_PROXY_IS_UP = "Searches reach the storage with --storage grpc://{}:{} now; Ctrl-C ends it."


class Maximize(enum.StrEnum):
    """What a search makes as large as can be, instead of making the step fast."""

    THROUGHPUT = "throughput"
    """Samples per second."""


app = cyclopts.App(
    name="sac-search",
    help=(
        "Finds the activation-checkpointing policy that makes a PyTorch training step fastest "
        "while its peak memory stays under a budget.\n\n"
        "    sac-search train.py --budget-gb 22\n\n"
        "searches; the same command again continues. A config needs no file:\n\n"
        "    sac-search --hf-config config.json --budget-gb 22 --dtype bf16\n\n"
        "Without either it searches a built-in GPT."
    ),
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() says what is kept
)


@app.default
def search(
    workload: Annotated[
        str, Parameter(help="train.py, train.py:factory or package.module:factory.")
    ] = BUILTIN_SPEC,
    /,
    *,
    budget_gb: Annotated[
        float | None,
        Parameter(
            help=(
                "Budget for the peak of the whole step, in GiB (2^30 bytes). Only another goal "
                "than the fastest step goes without."
            )
        ),
    ] = None,
    minimize: Annotated[
        Minimize | None,
        Parameter(help="memory: the least peak within --max-overhead, with a budget or without."),
    ] = None,
    max_overhead: Annotated[
        str | None,
        Parameter(help="Highest step time above that without checkpointing, as 5% or 0.05."),
    ] = None,
    pareto: Annotated[
        bool,
        Parameter(
            negative="",
            help="Search the fastest step for every peak; a budget is the highest of them.",
        ),
    ] = False,
    ready: ReadyOptions = NOT_READY,
    trials: Annotated[int, Parameter(help="Trials to measure beyond the baselines.")] = 40,
    timeout: Annotated[float | None, Parameter(help="Stop searching after SECONDS.")] = None,
    forecast: Annotated[
        str | None,
        Parameter(
            help=(
                "Measure nothing: forecast for DEVICE (H100, 'RTX 4090', …) by its published "
                "rates; without a name, for one that has the budget's memory."
            ),
        ),
    ] = None,
    device: Device = None,
    workers: Annotated[
        str | None,
        Parameter(
            help=(
                "Search on several devices at once: cuda:0,cuda:1, all, or as tasks of a cluster, "
                "ray:4 or slurm:4."
            )
        ),
    ] = None,
    slurm: Annotated[
        str | None,
        Parameter(help="Parameters of submitit, as slurm_partition=gpu,timeout_min=240."),
    ] = None,
    layers: Layers = None,
    compiling: Annotated[
        Compile,
        Parameter(
            name="--compile",
            help="off: eager. on: compiled, by torch.compile. search: whatever is fastest.",
        ),
    ] = Compile.OFF,
    compile_backend: Annotated[str, Parameter(help="Of torch.compile.")] = "inductor",
    compile_mode: Annotated[
        str | None, Parameter(help="Of the backend, as max-autotune; by default its own.")
    ] = None,
    compile_dynamic: Annotated[
        bool | None, Parameter(help="Whether sizes are symbols; by default as torch finds out.")
    ] = None,
    layer_choice: Annotated[
        LayerChoiceMode,
        Parameter(help="count: how many layers of each kind. each: a decision per layer."),
    ] = LayerChoiceMode.COUNT,
    batch_size: BatchSize = None,
    maximize: Annotated[
        Maximize | None,
        Parameter(help="throughput: search the batch size, too, for the most samples per second."),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        Parameter(help="Of --maximize throughput: 4,8,16, or auto (default), by the forecast."),
    ] = None,
    granularity: Annotated[
        Granularity,
        Parameter(help="site: ops of each weight shape apart. class: all ops of a class together."),
    ] = Granularity.SITE,
    tiers: Annotated[
        int, Parameter(help="Save sets that layers of one kind may have, 1 or 2.")
    ] = 2,
    save_collectives: Annotated[
        bool, Parameter(negative="", help="Allow to save what ranks send each other.")
    ] = False,
    sampler: Annotated[
        SamplerName, Parameter(help="Who proposes the trials; planner knows what they mean.")
    ] = SamplerName.PLANNER,
    seed: Annotated[int, Parameter(help="Of the sampler.")] = 0,
    steps: Annotated[int, Parameter(help="Timed steps per trial.")] = 5,
    clock: ClockOption = None,
    threads: Threads = None,
    trial_timeout: Annotated[float | None, Parameter(help="Give a trial up after SECONDS.")] = None,
    isolate: Annotated[
        Isolation,
        Parameter(help="trial: a new process for each trial. search: one, as long as it is sound."),
    ] = Isolation.SEARCH,
    study: Annotated[str | None, Parameter(help="Name of the study.")] = None,
    root: Root = Path("studies"),
    storage: Storage = None,
    fresh: Annotated[
        bool, Parameter(negative="", help="Begin anew under a new name; nothing is deleted.")
    ] = False,
    json_output: Json = False,
    no_progress: Annotated[
        bool, Parameter(negative="", help="Plain lines, as where there is no terminal.")
    ] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"], negative="")] = False,
) -> int:
    """Search the fastest policy under a budget, verify it and export it."""
    if budget_gb is None and minimize is None and max_overhead is None and not pareto:
        raise UsageError(
            "Parameter --budget-gb requires an argument.\nType sac-search --help for what there is."
        )
    workload = ready.spec(workload)
    if forecast is not None and device is not None:
        raise UsageError(
            f"--forecast measures nothing, so --device {device} has nothing to do; name the device "
            "to forecast for with --forecast DEVICE"
        )
    options = SearchOptions(
        budget_gb=budget_gb,
        minimize=minimize,
        max_overhead=max_overhead,
        pareto=pareto,
        study=study,
        root=root,
        storage=storage,
        fresh=fresh,
        device=device,
        layers=layers,
        layer_choice=layer_choice,
        batch_size=batch_size,
        trials=trials,
        timeout_seconds=timeout,
        trial_timeout_seconds=trial_timeout,
        isolate=isolate,
        granularity=granularity,
        tiers=tiers,
        save_collectives=save_collectives,
        sampler=sampler,
        seed=seed,
        clock=clock,
        threads=threads,
        steps=steps,
        compile=compiling,
        compile_backend=compile_backend,
        compile_mode=compile_mode,
        compile_dynamic=compile_dynamic,
    )
    _refuse_batch_sizes(maximize, batch_sizes, forecast)
    progress = SearchProgress(
        Console(stderr=json_output),
        quiet=quiet or json_output,
        verbose=verbose,
        live=not no_progress,
        goal=options.goal,
    )
    if maximize is not None:
        if storage is not None or workers is not None:
            raise UsageError(
                "--maximize throughput searches one size after the other, on one device, in files "
                "of its own; leave --storage and --workers out"
            )
        options = replace(options, device=_device_for(workload, device))
        with progress:
            found = api.throughput_spec(workload, options, batch_sizes or AUTO, progress)
        if json_output:
            print_text(json.dumps(to_throughput_document(found), indent=1))
        else:
            _print_throughput(found, quiet=quiet)
        return INTERRUPTED if found.interrupted else 0
    if slurm is not None and workers is None:
        raise UsageError("--slurm is for --workers slurm:COUNT")
    if workers is not None:
        if forecast is not None:
            raise UsageError("--forecast measures nothing, so that --workers have nothing to do")
        where, parameters = parse_workers(workers), parse_parameters(slurm)
        with progress:
            result = search_with_workers(workload, options, where, progress, parameters)
        return _shown(result, json_output=json_output, quiet=quiet)
    if forecast is None and _device_for(workload, device) != device:
        progress.note_at_start(
            "This machine has no accelerator that torch can use, so the built-in GPT is forecast. "
            "Add --device cpu to search a small one by measuring on the CPU."
        )
        forecast = _ANY_DEVICE
    with progress:
        if forecast is None:
            result = api.search_spec(workload, options, progress)
        else:
            named = None if forecast == _ANY_DEVICE else forecast
            result = api.forecast_spec(workload, options, named, progress)
    return _shown(result, json_output=json_output, quiet=quiet)


@app.command
def export(
    study: Annotated[str, Parameter(help="Name of a study, or its folder.")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The module to write.")] = Path(
        "policy.py"
    ),
    at: Annotated[
        str | None,
        Parameter(
            help=(
                "Take the fastest verified policy that peaks at SIZE or less, as 18GiB, 900MiB or "
                "18 (GiB); by default the study's best."
            )
        ),
    ] = None,
    root: Root = Path("studies"),
    storage: Storage = None,
) -> int:
    """Write a study's best policy as a Python module that needs torch alone."""
    if at is not None:
        return _export_at(study, at, output, root, storage)
    result = artifacts.load_result(_find_study(study, root, storage), storage)
    write_whole(output, artifacts.render_policy(result, module_name=output.stem))
    print_text(f"{output}: {result.policy.describe()}")
    return 0


def _export_at(study: str, at: str, output: Path, root: Path, storage: str | None) -> int:
    most_bytes = units.parse_memory(at)
    if not most_bytes:
        raise UsageError(f"--at {at!r} is no size; write it as 18GiB, 900MiB, or 18 for GiB")
    result = artifacts.load_result(_find_study(study, root, storage), storage)
    found = result_at(result, most_bytes)
    write_whole(output, artifacts.render_policy(found, module_name=output.stem))
    print_text(f"{output}: {found.policy.describe()}")
    for line in rows.exported_lines(found, faster_at(found, most_bytes)):
        print_text(line)
    return 0


@app.command
def report(
    study: Annotated[str, Parameter(help="Name of a study, or its folder.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="The page to write; by default in the study."),
    ] = None,
    root: Root = Path("studies"),
    storage: Storage = None,
) -> int:
    """Write a study's report: one page with plots that opens in any browser, offline."""
    folder = _find_any_study(study, root, storage)
    path = output or folder / artifacts.REPORT_FILE
    if _is_over_sizes(folder):
        write_throughput_report(load_throughput(folder), path)
        print_text(f"{path}: open it in a browser; it needs no network.")
        return 0
    store = open_study(folder, storage)
    artifacts.write_report(artifacts.load_result(folder, storage), store, path)
    print_text(f"{path}: open it in a browser; it needs no network.")
    return 0


@app.command
def explain(
    study: Annotated[str, Parameter(help="Name of a study, or its folder.")],
    /,
    *,
    root: Root = Path("studies"),
    storage: Storage = None,
    output_format: Format = OutputFormat.TEXT,
) -> int:
    """Say in plain words what holds a study's peak, what memory buys, and what limits it."""
    found = explain_result(artifacts.load_result(_find_study(study, root, storage), storage))
    print_text(facts.render(found, output_format, width=_output().width))
    return 0


@app.command
def compare(
    one: Annotated[str, Parameter(help="A study, its folder, or an exported policy module.")],
    other: Annotated[str, Parameter(help="Another one.")],
    /,
    *,
    root: Root = Path("studies"),
    storage: Storage = None,
    output_format: Format = OutputFormat.TEXT,
) -> int:
    """Show two studies or policies side by side: environments, figures, and what layers do."""
    found = comparison.compare(_side(one, root, storage), _side(other, root, storage))
    if output_format is not OutputFormat.TEXT:
        print_text(comparison.render(found, output_format))
        return 0
    console = _output()
    for note in found.notes:
        console.print(note, markup=False, highlight=False)
        console.print()
    for title, table_rows in found.tables:
        console.print(terminal.comparison_table(title, (found.one, found.other), table_rows))
        console.print()
    return 0


@app.command
def verify(
    policy: Annotated[Path, Parameter(help="An exported policy module.")],
    workload: Annotated[str, Parameter(help="train.py or train.py:factory.")] = BUILTIN_SPEC,
    /,
    *,
    ready: ReadyOptions = NOT_READY,
    device: Device = None,
    batch_size: BatchSize = None,
    clock: ClockOption = None,
    threads: Threads = None,
    steps: Annotated[int, Parameter(help="Timed steps.")] = 5,
    json_output: Json = False,
) -> int:
    """Apply an exported policy to a workload; compare gradients, measure peak and time."""
    workload = ready.spec(workload)
    if not os.path.isfile(policy):
        raise UsageError(f"there is no policy file {str(policy)!r}")
    options = SearchOptions(
        budget_gb=1,
        device=_device_for(workload, device),
        batch_size=batch_size,
        clock=clock,
        threads=threads,
        steps=steps,
    )
    with _temporary_client(workload, options) as client:
        description = client.describe()
        verdict, outcome = client.try_module(policy.resolve())
    if json_output:
        document = {"verdict": verdict, "outcome": outcome}
        print_text(json.dumps(records.to_builtins(document), indent=1))
    else:
        _print_notes(description.notes)
        print_text("\n".join(rows.verification_lines(verdict, outcome)))
    passed = verdict.verification is not None and verdict.verification.passed
    return 0 if passed else WorkloadError.exit_code


@app.command
def trace(
    workload: Annotated[str, Parameter(help="train.py or train.py:factory.")] = BUILTIN_SPEC,
    /,
    *,
    ready: ReadyOptions = NOT_READY,
    device: Device = None,
    layers: Layers = None,
    batch_size: BatchSize = None,
    clock: ClockOption = None,
    threads: Threads = None,
    json_output: Json = False,
) -> int:
    """Show what each layer runs: ops, class, calls, MiB, ms, and whether it can be saved."""
    workload = ready.spec(workload)
    options = SearchOptions(
        budget_gb=1,
        device=_device_for(workload, device),
        layers=layers,
        batch_size=batch_size,
        clock=clock,
        threads=threads,
    )
    with _temporary_client(workload, options) as client:
        description = client.describe()
    if json_output:
        print_text(json.dumps(records.to_builtins(description), indent=1))
        return 0
    _print_notes(description.notes)
    console = _output()
    for line in rows.layer_lines(description.layers):
        _print_line(console, line)
    console.print()
    console.print(terminal.op_table(rows.op_rows(description.layers)))
    return 0


@app.command
def frontier(
    workload: Annotated[str, Parameter(help="train.py or train.py:factory.")] = BUILTIN_SPEC,
    *,
    ready: ReadyOptions = NOT_READY,
    points: Annotated[int, Parameter(help="Budgets, from full checkpointing to none.")] = 12,
    tiers: Annotated[int, Parameter(help="Save sets per layer kind: 1 or 2.")] = 2,
    measure: Annotated[
        bool, Parameter(negative="", help="Measure every policy, side by side.")
    ] = False,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="The JSON file; by default under studies/."),
    ] = None,
    device: Device = None,
    layers: Layers = None,
    batch_size: BatchSize = None,
    clock: ClockOption = None,
    threads: Threads = None,
    steps: Annotated[int, Parameter(help="Timed steps.")] = 5,
    root: Root = Path("studies"),
    json_output: Json = False,
) -> int:
    """Show how fast a step can be under each budget: the whole trade-off, forecast or measured."""
    workload = ready.spec(workload)
    if points < 2 or tiers not in (1, 2):
        raise UsageError(
            f"--points {points} --tiers {tiers}: it takes 2 points or more, 1 or 2 tiers"
        )
    options = SearchOptions(
        budget_gb=1,
        device=_device_for(workload, device),
        layers=layers,
        batch_size=batch_size,
        clock=clock,
        threads=threads,
        steps=steps,
    )
    path = output or root / f"{api.default_study_name(workload)}-frontier.json"
    require_file(workload)
    require_writable(path)
    with _temporary_client(workload, options) as client:
        found = find_frontier(client, points=points, tiers=tiers, measure=measure)
    text = json.dumps(records.to_builtins(found), indent=1)
    write_whole(path, text + "\n")
    if json_output:
        print_text(text)
        return 0
    _print_notes(found.notes)
    console = _output()
    table = terminal.frontier_table(rows.frontier_rows(found), measured=measure)
    console.print(table)
    evidence = "measured side by side" if measure else "forecast; add --measure to measure them"
    print_text(f"The policies are {evidence}. File: {path}")
    return 0


@app.command
def dashboard(
    study: Annotated[str, Parameter(help="Name of a study, or its folder.")],
    /,
    *,
    port: Annotated[int, Parameter(help="Of 127.0.0.1, where it listens.")] = 8080,
    root: Root = Path("studies"),
    storage: Storage = None,
) -> int:
    """Open a study in optuna-dashboard, its policy and its report attached; Ctrl-C ends it."""
    folder = _find_any_study(study, root, storage)
    is_over_sizes = _is_over_sizes(folder)
    store = batches.open_batches(folder) if is_over_sizes else open_study(folder, storage)
    attach_files(store, [folder / artifacts.POLICY_FILE, folder / artifacts.REPORT_FILE])
    print_now(f"http://{HOST}:{port}/dashboard shows study {store.name!r}; Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        serve(store, port)
    return 0


@app.command(name="serve")
def serve_command(
    *,
    storage: Annotated[
        str,
        Parameter(env_var="SAC_SEARCH_STORAGE", help="Address of the database that it stands for."),
    ],
    host: Annotated[
        str,
        Parameter(help="Where it listens. Whoever reaches it may read and change every study."),
    ] = PROXY_HOST,
    port: Annotated[int, Parameter(help="Where it listens.")] = PROXY_PORT,
) -> int:
    """Stand between a database and many workers, as --storage grpc://HOST:PORT; Ctrl-C ends it."""
    with contextlib.suppress(KeyboardInterrupt):
        serve_storage(storage, host, port, lambda: print_now(_PROXY_IS_UP.format(host, port)))
    return 0


@app.command
def studies(
    *, root: Root = Path("studies"), storage: Storage = None, json_output: Json = False
) -> int:
    """List the studies, each with its budget, trials and best policy."""
    entries, problems = [], []
    for folder in list_studies(root, storage):
        try:
            chosen = folder if storage is not None else batches.winner_folder(folder)
            entry = artifacts.load_result(chosen, storage)
            name = entry.study_name if chosen == folder else f"{folder.name}/{entry.study_name}"
            entries.append(replace(entry, study_name=name))
        except StudyError as error:
            problems.append(str(error))
    if json_output:
        print_text(json.dumps([to_document(entry) for entry in entries], indent=1))
    elif entries:
        _output().print(terminal.study_table(entries))
    else:
        print_text(f"There is no study in {_where(root, storage)}.")
    for problem in problems:
        print_error(problem)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    with interrupts.listening(signal.SIGINT, signal.SIGTERM):
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    try:
        _refuse_unwritable(arguments)
        code = app(
            _with_any_device(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except cyclopts.CycloptsError as error:
        print_error(f"{_usage_message(error)}\nType sac-search --help for what there is.")
        return UsageError.exit_code
    except WorkloadError as error:
        sys.stderr.write(error.user_traceback)
        print_error(str(error))
        return error.exit_code
    except SacSearchError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("Interrupted. What was measured is kept; the same command continues.")
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def print_text(text: str) -> None:
    """Writes a line to standard output."""
    sys.stdout.write(text + "\n")


def print_now(text: str) -> None:
    """Writes a line to standard output, also where that is a pipe and more follows late."""
    print_text(text)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"sac-search: {text}\n")


def _output() -> Console:
    # Tables that go into a file or a pipe need not fit a terminal.
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_FILES)


def _print_line(console: Console, line: str) -> None:
    """Prints a line, broken between words on a terminal and not at all elsewhere."""
    console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print_text(note)


def _usage_message(error: cyclopts.CycloptsError) -> str:
    return " ".join(str(error).split())


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _refuse_unwritable(arguments: Sequence[str]) -> None:
    """Raises UsageError for an argument that can be no name in a study, in JSON or on a screen."""
    for argument in arguments:
        if "\0" in argument or argument != records.spell_out(argument):
            raise UsageError(
                f"the argument {argument!r} is not UTF-8 text; rename the file or folder that it "
                "names"
            )


def _with_any_device(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with a value behind a `--forecast` that has none.

    `--forecast train.py` names no device either: no device has a dot or a colon in its name.
    """
    completed: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        completed.append(argument)
        names_device = not following.startswith("-") and not {".", ":", "/"} & set(following)
        if argument == "--forecast" and not names_device:
            completed.append(_ANY_DEVICE)
    return completed


def _device_for(workload: str, device: str | None) -> str | None:
    if workload == BUILTIN_SPEC and device is None and not _has_accelerator():
        return "cpu"
    return device


@contextlib.contextmanager
def _temporary_client(workload: str, options: SearchOptions) -> Iterator[WorkerClient]:
    require_file(workload)
    handle, name = tempfile.mkstemp(prefix="sac-search-", suffix=".log")
    os.close(handle)
    log_path = Path(name)
    try:
        with WorkerClient(api.session_settings(workload, options), log_path) as client:
            yield client
    except BaseException as error:
        if str(log_path) not in str(error):  # else it stays, to be read
            log_path.unlink(missing_ok=True)
        raise
    log_path.unlink(missing_ok=True)


def _find_study(study: str, root: Path, storage: str | None) -> Path:
    """Returns the folder of a study; of one over batch sizes, that of the best size's study."""
    found = _find_any_study(study, root, storage)
    return found if storage is not None else batches.winner_folder(found)


def _find_any_study(study: str, root: Path, storage: str | None) -> Path:
    # The study of one batch size has a name of two parts: train-22gib-throughput/batch-8.
    folders = [Path(study), *([root / study] if "/" in study else [])]
    for folder in filter(os.path.isdir, folders if storage is None else []):
        if not _is_over_sizes(folder):
            open_study(folder)
        return folder
    found = newest_folder(root, study, storage)
    if found is None:
        known = ", ".join(folder.name for folder in list_studies(root, storage)) or "none"
        where = _where(root, storage)
        raise UsageError(f"there is no study {study!r} in {where}; there are: {known}")
    return found


def _is_over_sizes(folder: Path) -> bool:
    return holds_batches(folder / DATABASE_NAME)


def _refuse_batch_sizes(
    maximize: Maximize | None, batch_sizes: str | None, forecast: str | None
) -> None:
    if maximize is None and batch_sizes is not None:
        raise UsageError(
            f"--batch-sizes {batch_sizes} is for --maximize throughput; add that, or name one size "
            "with --batch-size"
        )
    if maximize is not None and forecast is not None:
        raise UsageError(
            "--maximize throughput measures, so it cannot be forecast; leave --forecast out, or "
            "forecast one --batch-size at a time"
        )


def _where(root: Path, storage: str | None) -> str:
    return str(root) if storage is None else address_without_password(storage)


def _side(name: str, root: Path, storage: str | None) -> comparison.Side:
    if os.path.isfile(name):
        return comparison.side_of_module(name, read_meta(Path(name)))
    folder = _find_study(name, root, storage)
    return comparison.side_of(artifacts.load_result(folder, storage))


def _shown(result: SearchResult, *, json_output: bool, quiet: bool) -> int:
    """Prints a result and returns the exit code."""
    if json_output:
        print_text(json.dumps(to_document(result), indent=1))
    else:
        _print_result(result, quiet=quiet)
    return INTERRUPTED if result.interrupted else 0


def _print_throughput(result: ThroughputResult, *, quiet: bool) -> None:
    console = _output()
    if not quiet:
        console.print()
        console.print(terminal.size_table(size_rows(result)))
        console.print()
    lines = throughput_headline(result)
    for line in lines if quiet else [*lines, *throughput_closing_lines(result)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_result(result: SearchResult, *, quiet: bool) -> None:
    console = _output()
    if not quiet:
        console.print()
        console.print(terminal.candidate_table(rows.candidate_rows(result)))
        console.print()
    for line in rows.headline(result):
        _print_line(console, line)
    if quiet:
        return
    if front := rows.front_rows(result):
        console.print()
        console.print(terminal.front_table(front))
        console.print()
    for line in rows.closing_lines(result):
        _print_line(console, line)
