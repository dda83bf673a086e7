"""Whatever the arguments are, the command line ends in the right exit code and says why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hostile import LAYERS, SAVE_MATMUL, any_texts, cases, is_unicode, make_study, numbers
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import ScriptedMeasurer

from sac_search import api, artifacts, cli, errors
from sac_search._version import __version__
from sac_search.frontier import Frontier, find_frontier
from sac_search.records import Evidence, Outcome
from sac_search.study import store as store_module
from sac_search.study.result import SearchResult
from sac_search.worker.session import Description, Verdict
from sac_search.workload import split_spec


class Option(NamedTuple):
    """An option of the command line."""

    name: str
    valid: Sequence[str]
    """Values that it takes; empty for a flag."""
    invalid: Sequence[str] = ()
    """Values that are wrong usage."""


NOT_NUMBERS = ["x", "", "nan", "½", "{}", "[1]", "1 2", "0x", "--", "9" * 5000]
NOT_COUNTS = [*NOT_NUMBERS, "-1", "-2147483648", "2147483648", "inf", "-inf", "1e400", "1e30"]
NOT_TIMES = [*NOT_NUMBERS, "0", "-1", "-0.5", "inf", "-inf", "1e400"]
NOT_TEXT = ["\ud800", "caf\udce9", "a\x00b"]
ANY_TEXT = ["a", "h.*", "two words", "\N{SNOWMAN}", "{}", "[]", "", "'", "#", "\n", "=", "0"]

BUDGET = Option("--budget-gb", ["22", "0.5", "1e-9", "8388608", "+3"], [*NOT_TIMES, "8388609"])
COMMON = [
    Option("--device", ["cpu", "cuda:1", "\N{SNOWMAN}"], NOT_TEXT),
    Option("--batch-size", ["1", "7", "2147483647"], [*NOT_COUNTS, "0"]),
    Option("--clock", ["cpu", "wall"], ["sun", "", "0"]),
    Option("--threads", ["1", "2"], [*NOT_COUNTS, "0"]),
]
LAYERS_OPTION = Option("--layers", ANY_TEXT, NOT_TEXT)
STEPS = Option("--steps", ["1", "20"], [*NOT_COUNTS, "0"])
TIERS = Option("--tiers", ["1", "2"], [*NOT_COUNTS, "0", "3"])
ROOT = Option("--root", ["studies", "./studies", "elsewhere"], ["train.py", "x" * 300, *NOT_TEXT])
JSON = Option("--json", [])
OPTIONS = {
    "search": [
        BUDGET,
        *COMMON,
        LAYERS_OPTION,
        STEPS,
        TIERS,
        ROOT,
        JSON,
        Option("--trials", ["0", "1", "2147483647"], NOT_COUNTS),
        Option("--timeout", ["1", "1e-3", "1e30"], NOT_TIMES),
        Option("--trial-timeout", ["1", "1e-3", "1e30"], NOT_TIMES),
        Option("--layer-choice", ["count", "each"], ["", "both"]),
        Option("--granularity", ["site", "class"], ["", "op"]),
        Option("--sampler", ["planner", "gp", "tpe", "random", "greedy"], ["", "best"]),
        Option("--isolate", ["trial", "search"], ["", "no"]),
        Option("--compile", ["off"], ["", "yes", "0"]),
        Option("--seed", ["0", "-5", "123456789012345678901234567890"], NOT_NUMBERS),
        Option("--study", ["a", "../a/b", "a b", "\N{SNOWMAN}1"], ["", "..", "x" * 300, *NOT_TEXT]),
        Option("--fresh", []),
        Option("--quiet", []),
        Option("-v", []),
    ],
    "verify": [*COMMON, STEPS, JSON],
    "trace": [*COMMON, LAYERS_OPTION, JSON],
    "frontier": [
        *COMMON,
        LAYERS_OPTION,
        STEPS,
        TIERS,
        Option("--root", ["studies", "elsewhere"], NOT_TEXT),  # --output may make it idle
        JSON,
        Option("--points", ["2", "12"], [*NOT_NUMBERS, "1", "0", "-1", "inf"]),
        Option("--measure", []),
        Option("-o", ["out.json", "elsewhere/out.json"], ["studies", "train.py/x", "x" * 300]),
    ],
    "export": [
        Option("--root", ["studies"], NOT_TEXT),  # of no use for a folder
        Option("--output", ["out.py", "elsewhere/out.py"], ["studies", "train.py/x", "x" * 300]),
    ],
    "studies": [ROOT._replace(invalid=NOT_TEXT), JSON],
}
STARTS = {
    "search": ["--budget-gb", "1"],
    "verify": ["verify", "policy.py"],
    "trace": ["trace"],
    "frontier": ["frontier"],
}
READY = [
    [["--timm", "vit"]],
    [["--timm=vit"], ["--image-size", "32"]],
    [["--hf-config", "config.json"]],
    [["--hf-config", "config.json"], ["--dtype", "bf16"], ["--lora-rank=8"]],
]
"""Instead of a file: models of libraries, with their settings."""
WORKLOADS = [[], ["train.py"], ["train.py:other"], ["./train.py"], ["package.module:factory"]]
MISSING = ["missing.py", "no/train", "train.py/x.py", "x" * 300 + ".py", "studies/", *NOT_TEXT]
POSITIONALS = {
    "search": WORKLOADS,
    "verify": [["policy.py", *workload] for workload in WORKLOADS],
    "trace": WORKLOADS,
    "frontier": WORKLOADS,
    "export": [["paper"], ["studies/paper"]],
    "studies": [[]],
}
ENDINGS = [
    None,
    errors.WorkerError("as told"),
    errors.UsageError("as told"),
    errors.EnvironmentMismatch("as told"),
    errors.NoPolicyFits("as told"),
    errors.WorkloadError("as told"),
    errors.CannotForecast("as told"),
    KeyboardInterrupt(),
]
EXIT_CODES = {0, 1, 2, 3, 4, 130}


class Stage:
    """The folder in which commands run, and how everything ends that would start a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.py", "policy.py"):
            (folder / name).write_text("raise AssertionError('must not be imported')")
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        self.study = make_study(folder / "studies" / "paper", Evidence.MEASURED).folder
        self.result = artifacts.load_result(self.study)
        self.measurer = ScriptedMeasurer(layers=LAYERS, forecast_factor=1.0)
        self.frontier = find_frontier(self.measurer, points=2, tiers=1, measure=False)
        self.ending: BaseException | None = None
        self.good = True
        self.is_reached = False

    def end(self) -> None:
        self.is_reached = True
        if self.ending is not None:
            raise self.ending

    @property
    def code(self) -> int:
        """The exit code of a command that started a process."""
        if self.ending is None:
            return 0
        return 130 if isinstance(self.ending, KeyboardInterrupt) else self.ending.exit_code

    def run(
        self, client: Any, name: str, options: Any, listener: Any, folder: Any = None
    ) -> SearchResult:
        assert options.budget_bytes < 2**63
        listener.on_phase("load")
        self.end()
        return dataclasses.replace(self.result, interrupted=not self.good)

    def find_frontier(self, *arguments: Any, **options: Any) -> Frontier:
        self.end()
        return self.frontier

    def client(self, *arguments: Any, **options: Any) -> Any:
        return contextlib.nullcontext(self)

    def describe(self) -> Description:
        self.end()
        return self.measurer.describe()

    def try_module(self, path: Path) -> tuple[Verdict, Outcome]:
        self.measurer.wrong_gradients = lambda policy: not self.good
        return self.measurer.verify(SAVE_MATMUL), self.measurer.measure(SAVE_MATMUL)


def is_text(argument: str) -> bool:
    return is_unicode(argument) and "\0" not in argument


class Ended(NamedTuple):
    """What a command left."""

    code: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(store_module, "storage_at", functools.cache(store_module.storage_at))
        stage = Stage(folder)
        for module in (api, cli):
            monkeypatch.setattr(module, "WorkerClient", stage.client)
        for name in ("run_search", "run_forecast"):
            monkeypatch.setattr(api, name, stage.run)
        monkeypatch.setattr(cli, "find_frontier", stage.find_frontier)
        monkeypatch.setattr(cli, "_has_accelerator", lambda: False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
        yield stage


def run_command(
    stage: Stage,
    arguments: list[str],
    ending: BaseException | None = None,
    *,
    good: bool = True,
) -> Ended:
    """Runs a command. Checks what holds for all of them, wrong or right."""
    stage.ending, stage.good, stage.is_reached = ending, good, False
    files = left_in(stage.folder)
    # As a terminal that knows Unicode, and nothing else.
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    error_output = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error_output):
        code = cli.main(arguments)
    texts_ = [stream.buffer.getvalue().decode() for stream in (output, error_output)]
    ended = Ended(code, *texts_)
    assert code in EXIT_CODES
    assert "Traceback" not in ended.errors
    if stage.is_reached:
        return ended
    assert code in (0, 2)
    if code == 2:
        assert ended.output == ""
        assert ended.errors.startswith("sac-search: ")
        assert left_in(stage.folder) == files
    return ended


def left_in(folder: Path) -> set[str]:
    return {str(path) for path in folder.glob("**/*")}


@st.composite
def commands(draw: st.DrawFn, options_at_most: int = 5) -> tuple[str, list[list[str]]]:
    """Draws a command that is right: its name, and its arguments in groups that stay together."""
    name = draw(st.sampled_from(list(OPTIONS)))
    positional = [[argument] for argument in draw(st.sampled_from(POSITIONALS[name]))]
    chosen = draw(
        st.lists(st.sampled_from(OPTIONS[name]), max_size=options_at_most, unique_by=lambda o: o[0])
    )
    if name == "search" and BUDGET not in chosen:
        chosen.append(BUDGET)
    groups = [draw(written(option, option.valid)) for option in chosen]
    if name in STARTS and len(positional) == len(POSITIONALS[name][0]) and draw(st.booleans()):
        groups += draw(st.sampled_from(READY))
    has_device = any(option.name == "--device" for option in chosen)
    if name == "search" and not has_device and draw(st.booleans()):
        groups.append(draw(st.sampled_from([["--forecast"], ["--forecast", "h100"]])))
    groups = draw(st.permutations(groups))
    for argument in reversed(positional):  # in this order, anywhere between the options
        where = draw(st.integers(0, len(groups))) if len(positional) == 1 else 0
        groups = [*groups[:where], argument, *groups[where:]]
    return name, groups if name == "search" else [[name], *groups]


@st.composite
def written(draw: st.DrawFn, option: Option, values: Sequence[str]) -> list[str]:
    """Draws one of the ways to write an option."""
    if not option.valid:
        return [option.name]
    value = draw(st.sampled_from(values))
    if option.name.startswith("--") and draw(st.booleans()):
        return [f"{option.name}={value}"]
    return [option.name, value]


def flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [argument for group in groups for argument in group]


@cases(100)
@given(command=commands(), ending=st.sampled_from(ENDINGS), good=st.booleans())
@example(("search", [["--budget-gb", "1"]]), errors.UsageError("as told"), True)
def test_right_arguments_end_as_what_they_start(
    stage: Stage,
    command: tuple[str, list[list[str]]],
    ending: BaseException | None,
    good: bool,
) -> None:
    name, groups = command
    ended = run_command(stage, flat(groups), ending, good=good)
    if name in ("export", "studies"):
        assert (ended.code, stage.is_reached) == (0, False)
        return
    assert stage.is_reached
    failed = {"search": 130, "verify": 4}.get(name, 0)
    assert ended.code == (failed if ending is None and not good else stage.code)


@cases(40)
@given(command=commands(), flag=st.sampled_from(["--help", "-h", "--version"]), data=st.data())
def test_help_and_version_may_stand_anywhere(
    stage: Stage, command: tuple[str, list[list[str]]], flag: str, data: st.DataObject
) -> None:
    arguments = flat(command[1])
    arguments.insert(data.draw(st.integers(0, len(arguments))), flag)
    ended = run_command(stage, arguments)
    assert (ended.code, ended.errors, stage.is_reached) == (0, "", False)
    assert ended.output.strip() == __version__ if flag == "--version" else "Usage" in ended.output


@st.composite
def wrong_commands(draw: st.DrawFn) -> list[str]:
    """Draws a command with exactly one mistake."""
    name, groups = draw(commands(options_at_most=3))
    options = OPTIONS[name]
    used = {group[0].partition("=")[0] for group in groups}
    unused = [option for option in options if option.name not in used]
    mistakes = ["unknown option", "too many", "not text"]
    wrong = [option for option in unused if option.invalid]
    mistakes += ["value"] * 6 if wrong else []
    with_value = [option for option in unused if option.valid]
    mistakes += ["no value"] if with_value else []
    repeated = [group for group in groups if group[0].startswith("-") and "--forecast" not in group]
    mistakes += ["twice"] if repeated else []
    mistakes += ["no budget"] if name == "search" else []
    mistakes += ["no file"] if name not in ("export", "studies") else []
    where = draw(st.integers(1, len(groups)))
    match draw(st.sampled_from(mistakes)):
        case "unknown option":
            group = draw(st.sampled_from([["--no-such"], ["-x"], ["--no-such=1"], ["---"], ["-"]]))
            groups.insert(where, group)
        case "too many":
            groups.append(["one"])
            groups.append(["two"])
            groups.append(["three"])
        case "not text":
            groups.insert(where, [draw(st.sampled_from(NOT_TEXT))])
        case "value":
            option = draw(st.sampled_from(wrong))
            groups.insert(where, draw(written(option, option.invalid)))
        case "no value":
            groups.append([draw(st.sampled_from(with_value)).name])
        case "twice":
            groups.append(draw(st.sampled_from(repeated)))
        case "no budget":
            groups = [group for group in groups if not group[0].startswith("--budget-gb")]
        case "no file":
            positional = {argument for groups_ in WORKLOADS for argument in groups_}
            groups = [group for group in groups if group[0] not in positional]
            groups.append([draw(st.sampled_from(MISSING))])
    return flat(groups)


@cases(220)
@given(arguments=wrong_commands())
@example(["--budget-gb", "1e300"])
@example(["--budget-gb", "1", "--study", ""])
@example(["--budget-gb", "1", "--batch-size", "99999999999999999999"])
@example(["train.py", "--budget-gb", "1", "--root", "train.py"])
@example(["x" * 300 + ".py", "--budget-gb", "1"])
@example(["trace", "x" * 5000 + "/train"])
@example(["verify", "x" * 300])
@example(["export", "x" * 300])
@example(["export", "paper", "--root", "x" * 300])
@example(["export", "paper", "--root", "elsewhere"])
@example(["studies", "--root", "caf\udce9"])
@example(["--budget-gb", "1", "--dtype", "bf16"])
@example(["--budget-gb", "1", "--timm", ""])
@example(["--budget-gb", "1", "--timm", "vit", "--dtype", "int8"])
@example(["--budget-gb", "1", "--timm", "vit", "--image-size", "0"])
@example(["--budget-gb", "1", "--timm", "vit", "--hf-config", "config.json"])
@example(["--budget-gb", "1", "--timm", "vit", "train.py"])
@example(["--budget-gb", "1", "--hf-config", "train.py"])
@example(["--budget-gb", "1", "--hf-config", "x" * 300])
@example(["trace", "--hf-config", "missing.json"])
@example(["studies", "--root", "a\x00b"])
@example(["frontier", "train.py", "--root", "train.py"])
@example(["frontier", "train.py", "-o", "studies"])
def test_wrong_arguments_are_wrong_usage_and_leave_nothing(
    stage: Stage, arguments: list[str]
) -> None:
    ended = run_command(stage, arguments)
    assert (ended.code, stage.is_reached) == (2, False)


PLACES = st.one_of(
    st.sampled_from(MISSING), any_texts, any_texts.map("{}.py".format), any_texts.map("a/{}".format)
)


@cases(80)
@given(command=st.sampled_from(list(STARTS)), place=PLACES, ending=st.sampled_from(["", ":f", ":"]))
def test_a_file_that_is_not_there_is_wrong_usage(
    stage: Stage, command: str, place: str, ending: str
) -> None:
    location, _ = split_spec(place + ending)
    is_module = is_text(place) and not location.endswith(".py") and "/" not in location
    if command in ("search", "frontier"):  # they write files that are named like it
        is_module &= len(place) < 200
    ended = run_command(stage, [*STARTS[command], "--", place + ending])
    assert (ended.code, stage.is_reached) == ((0, True) if is_module else (2, False))


def test_a_root_that_cannot_be_is_empty(stage: Stage) -> None:
    ended = run_command(stage, ["studies", "--root", "x" * 300])
    assert ended.code == 0
    assert ended.output.startswith("There is no study in xxx")


def test_a_root_that_cannot_be_read_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:  # root may read everywhere, so it is played
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    ended = run_command(stage, ["studies"])
    assert (ended.code, ended.errors) == (2, "sac-search: studies: Permission denied\n")


def tame(text: str) -> str:
    """Returns the text without the ways out of the folder: files are written by these names."""
    return text.replace("..", "").lstrip("/")


ALL_OPTIONS = sorted(
    {
        name
        for part in [cli.app, *(cli.app[name] for name in OPTIONS if name != "search")]
        for argument in part.assemble_argument_collection()
        for name in argument.names
        if name.startswith("-")
    }
)
ALL_VALUES = sorted(
    {
        value
        for options in OPTIONS.values()
        for option in options
        for value in (*option.valid, *option.invalid)
    }
)
arguments_of_any_kind = st.one_of(
    st.sampled_from(list(OPTIONS)),
    st.sampled_from([*ALL_OPTIONS, "--forecast", "--budget-gb=1", "--", "-", "-q", "-qv"]),
    st.sampled_from([*ALL_VALUES, *MISSING, "train.py", "policy.py", "paper"]).map(tame),
    st.tuples(st.sampled_from(ALL_OPTIONS), any_texts.map(tame)).map("=".join),
    any_texts.map(tame),
    numbers.map(lambda number: str(number) if number != 10**400 else "1e400"),
)


@cases(280)
@given(
    arguments=st.lists(arguments_of_any_kind, max_size=8),
    ending=st.sampled_from(ENDINGS),
)
def test_any_arguments_end_in_an_exit_code(
    stage: Stage, arguments: list[str], ending: BaseException | None
) -> None:
    ended = run_command(stage, arguments, ending)
    if stage.is_reached:
        assert ended.code == stage.code
