"""What docs/ says: its commands and its code run, its messages stand in the source, none is stale.

In a page, a comment above a block of code says what the block is:

    <!-- file: train.py -->     the text of that file
    <!-- patch: train.py -->    a change of it, as `diff` writes one
    <!-- exit code: 3 -->       commands that end with that code
    <!-- prints -->             a part of what the block before it prints, figures aside
    <!-- not run: why -->       commands or code that cannot run everywhere

All pages run in one folder, the tutorial first, so that the others can speak of its study. Searches
run with one trial, each of one step, since how good they are is for other tests.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sac_search
from sac_search import cli
from sac_search.records import FailureKind

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = "tutorial.md"
# What no machine without accelerators, ranks or a network can run, with the reason in the page.
NOT_RUN = {
    ("concepts/compile.md", "compiling takes long"),
    ("concepts/compile.md", "compiles for minutes"),
    ("concepts/ranks.md", "needs a process group"),
    ("reading.md", "serves until it is interrupted"),
    ("concepts/ranks.md", "needs several processes with accelerators"),
    ("concepts/workers.md", "needs several accelerators"),
    ("concepts/workers.md", "needs a database"),
    ("concepts/workers.md", "serves until it is interrupted"),
    ("concepts/workers.md", "needs a cluster"),
}

_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n\n?)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_RUN = ("sh", "python", "diff")
_INERT = ("text", "json", "{eval-rst}", "{toctree}")


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    page: str
    line: int
    language: str
    text: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_file(self) -> bool:
        return self.note.startswith("file: ")

    @property
    def is_run(self) -> bool:
        return (self.language in _RUN or self.is_file) and not self.note.startswith("not run: ")


@dataclass
class Ran:
    """What came of the blocks that were run."""

    printed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def pages() -> list[str]:
    """Returns the pages, the tutorial first."""
    found = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    return sorted(found, key=lambda page: page != TUTORIAL)


def blocks_of(page: str) -> list[Block]:
    text = (DOCS / page).read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"].split(" ")[0],
            text=match["text"],
            note=match["note"] or "",
        )
        for match in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in pages() for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.is_run]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs every block, once."""
    found = Ran()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("docs")
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        # Other tests look at the logs that are left where temporary files usually lie.
        patch.setattr(tempfile, "tempdir", str(folder))
        for page in pages():
            names: dict[str, Any] = {"__name__": "docs"}
            for block in (block for block in RUN if block.page == page):
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    try:
                        with contextlib.redirect_stderr(output):
                            run(block, names)
                    except Exception:
                        found.errors[block.place] = traceback.format_exc()
                found.printed[block.place] = output.getvalue()
    return found


def run(block: Block, names: dict[str, Any]) -> None:
    if block.is_file:
        Path(block.note.removeprefix("file: ")).write_text(block.text)
    elif block.language == "diff":
        change(Path(block.note.removeprefix("patch: ")), block.text)
    elif block.language == "python":
        code = compile("\n" * block.line + block.text, str(DOCS / block.page), "exec")
        with own_modules_forgotten():
            exec(code, names)  # noqa: S102
    else:
        wanted = int(block.note.removeprefix("exit code: ") or 0)
        lines = block.text.replace("\\\n", "").splitlines()
        for words in (shlex.split(line, comments=True) for line in lines):
            if words:
                assert run_command(words) == wanted, " ".join(words)


def run_command(words: list[str]) -> int:
    """Runs what a shell would run, in this process. Returns the exit code."""
    program, *arguments = words
    if program == "sac-search":
        return cli.main(quicker(arguments))
    if program == "python":
        with own_modules_forgotten():
            try:
                runpy.run_path(arguments[0], run_name="__main__")
            except Exception:
                traceback.print_exc()
                return 1
        return 0
    assert program == "cp", f"this test knows no {program}"
    shutil.copy(*arguments)
    return 0


def quicker(arguments: list[str]) -> list[str]:
    """Returns a search's arguments with fewer trials and steps: how good it is matters not here."""
    if "--trials" not in arguments:
        return arguments
    number = arguments.index("--trials") + 1
    return [*arguments[:number], "1", *arguments[number + 1 :], "--steps", "1"]


def change(path: Path, difference: str) -> None:
    """Applies one change to a file."""
    lines = difference.splitlines(keepends=True)
    old, new = ("".join(li[1:] for li in lines if li[0] in signs) for signs in (" -", " +"))
    text = path.read_text()
    assert text.count(old) == 1, f"{path} does not have once what is to be changed"
    path.write_text(text.replace(old, new))


@contextlib.contextmanager
def own_modules_forgotten() -> Iterator[None]:
    """Lets the next program import modules of the folder anew, as another process would."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file and Path(file).parent == Path.cwd():
                del sys.modules[name]


def test_every_block_is_known() -> None:
    """A block in a language that this test does not know would go unnoticed."""
    fences = sum((DOCS / page).read_text().count("```") for page in pages())
    assert fences == 2 * len(BLOCKS)
    unknown = [b.place for b in BLOCKS if b.language not in (*_RUN, *_INERT) and not b.is_file]
    assert not unknown


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.place)
def test_block_runs(block: Block, ran: Ran) -> None:
    assert block.place not in ran.errors, (
        f"{ran.errors[block.place]}\nIt printed:\n{ran.printed[block.place]}"
    )


# What depends on which trial won.
_VARIES = re.compile("trial|plan at|layer subset|best|Against|planner's bound|ms per step|^ {20}")
PRINTS = [(before, b) for before, b in itertools.pairwise(BLOCKS) if b.note == "prints"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "shown"), PRINTS, ids=lambda block: block.place)
def test_output_is_what_is_printed(source: Block, shown: Block, ran: Ran) -> None:
    printed = {plain(line) for line in ran.printed[source.place].splitlines()}
    wanted = {plain(li) for li in shown.text.splitlines() if li and not _VARIES.search(li)}
    assert wanted
    assert wanted - printed == set()


def plain(line: str) -> str:
    """Returns a line without its figures, and without the blanks of a table."""
    return " ".join(re.sub(r"[+-]?\d+(\.\d+)?", "#", line).split())


def test_what_is_not_run() -> None:
    left_out = {(b.page, b.note.removeprefix("not run: ")) for b in BLOCKS if "not run" in b.note}
    assert left_out == NOT_RUN


# --- commands and options in the text ------------------------------------------------------------

PROSE = {page: _FENCE.sub("", (DOCS / page).read_text()) for page in pages()}
MENTIONED = {code for text in PROSE.values() for code in re.findall("`([^`\n]+)`", text)}
COMMANDS = sorted(
    {code for code in MENTIONED if code.startswith("sac-search ")}
    | {line for b in BLOCKS if not b.is_run for line in re.findall("^sac-search .*", b.text, re.M)}
)
OPTIONS = sorted({code.split()[0] for code in MENTIONED if code.startswith("--")})


@pytest.mark.parametrize("command", COMMANDS)
def test_mentioned_command_is_one(command: str) -> None:
    words = shlex.split(command.replace("[OPTIONS]", "").replace("[WORKLOAD]", ""))[1:]
    if len(words) == 1:  # a command's name, or an option that stands for itself
        assert words[0] in set(cli.app)
        return
    words = ["1" if word == "NUMBER" else word for word in words]
    function, *_ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert function is not None


@pytest.mark.parametrize("option", OPTIONS)
def test_mentioned_option_is_one(option: str) -> None:
    commands = [cli.app, *(cli.app[name] for name in cli.app if not name.startswith("-"))]
    known = {
        name for app in commands for a in app.assemble_argument_collection() for name in a.names
    }
    assert option in known | {"--version"}


# --- messages -------------------------------------------------------------------------------------

TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^`(.+)`$", TROUBLESHOOTING, re.MULTILINE)
# Raised where a caller inside of sac-search is wrong, and never shown to a user.
_INTERNAL = {
    "module 'sac_search' has no attribute …",
    "this policy counts calls, so it is a reference and cannot be exported",
    "… cannot be written as a Python literal",
    "the memory budget is …; it is a part, 0 to 1",
    "the columns of a timeline have as many points, and at least one",
    "the peak of a timeline is one of its points",
    "… collectives of two steps were never waited for",
    "this policy has schema version …, written by a newer sac-search; this one reads up to …",
    "a layer is listed twice in the policy",
    "a layer names a tier that the policy does not have",
    "an outcome is either a measurement or a failure",
    "no policy fits the budget",
    "… policies have … outcomes",
    "a forecast has no figures",
    "the ranks did not run as many steps",
    "its answers are out of order",
    "the last try returns or raises",
}
# Parts of messages that are quoted under what they are a part of.
_PARTS = {
    "a part of … is missing",
    ", reentrantly, which takes no policy",
    "(its text cannot be made)",
    "; it has: …",
    "a forward pass without gradients",
    "a model of the type …",
    "a training step with its layers checkpointed",
    "a training step without checkpointing",
    "did you mean …?",
    "name the layers with --layers 'model.layers.*' or Workload(layers=...)",
    "the loss is …",
    "the model has …",
    "timm.list_models() names them all",
    "… on fake tensors",
}
_FUNCTIONS_THAT_SAY = re.compile(r"_message$|_unwritable$|_raised$|step_error$|_failing$")


def template_of(node: ast.AST) -> str:
    """Returns a string of the source, `…` in place of what is put into it; else nothing."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
        return re.sub("…+", "…", "".join(map(str, parts)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template_of(node.left) + (template_of(node.right) or "…")
    return ""


def sources() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "sac_search").rglob("*.py")):
        yield ast.parse(path.read_text())


def templates_in(node: ast.AST) -> set[str]:
    """Returns all strings in it that are no docstrings."""
    inner = list(ast.walk(node))
    docstrings = {id(n.value) for n in inner if isinstance(n, ast.Expr)}
    return {text for n in inner if id(n) not in docstrings and (text := template_of(n))}


def raised_templates() -> set[str]:
    """Returns what errors and warnings are made of, the longest strings only."""
    found: set[str] = set()
    for source in sources():
        for node in ast.walk(source):
            says = isinstance(node, ast.Raise) or (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "_warn"
            )
            if isinstance(node, ast.FunctionDef) and _FUNCTIONS_THAT_SAY.search(node.name):
                says = True
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ADVICE":
                says = True
            if says:
                texts = templates_in(node)
                whole = {t for t in texts if not any(t != u and t in u for u in texts)}
                found |= {t for t in whole if len(t.split()) > 3}
    return found


@pytest.fixture(scope="module")
def all_templates() -> set[str]:
    return set().union(*map(templates_in, sources()))


def test_there_are_quotes() -> None:
    assert len(QUOTES) > 100
    assert len(set(QUOTES)) == len(QUOTES)


@pytest.mark.parametrize("quote", QUOTES)
def test_quoted_message_stands_in_the_source(quote: str, all_templates: set[str]) -> None:
    assert any(quote in template for template in all_templates)


def test_every_message_is_quoted() -> None:
    missing = {
        template
        for template in raised_templates() - _INTERNAL - _PARTS
        if not any(quote in template for quote in QUOTES)
    }
    assert not missing


def test_what_need_not_be_quoted_is_raised() -> None:
    assert raised_templates() >= _INTERNAL | _PARTS


def test_every_kind_of_failure_has_a_heading() -> None:
    headings = set(re.findall(r"^### (.+)$", TROUBLESHOOTING, re.MULTILINE))
    assert {str(kind) for kind in FailureKind} <= headings


# --- the reference --------------------------------------------------------------------------------


def test_command_line_page_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    page = importlib.import_module("_docs").cli_page()
    assert (DOCS / "cli.md").read_text() == page, "run scripts/docs --update"


def test_public_names_are_in_the_reference() -> None:
    api, module = ((DOCS / page).read_text() for page in ("api.md", "policy-module.md"))
    assert set(re.findall(r"^\.\. auto\w+:: (\w+)$", api, re.MULTILINE)) == set(
        sac_search.__all__
    ) - {"__version__"}
    source = ast.parse((ROOT / "sac_search/export/exported.py").read_text())
    public = {
        node.name
        for node in source.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    described = re.findall(r"^\.\. autofunction:: policy\.(\w+)$", module, re.MULTILINE)
    assert set(described) == public | {"policy_fn", "context_fn"}


def test_every_page_is_reached() -> None:
    """A page in no list of contents fails the build; this tells without it."""
    contents = "".join(b.text for b in BLOCKS if b.language == "{toctree}").split()
    assert {f"{word}.md" for word in contents} >= set(pages()) - {"index.md"}
