"""What the documentation says of the code by itself: the command line, and an exported module.

python scripts/_docs.py    # writes docs/cli.md anew
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import cyclopts

from sac_search import cli
from sac_search.export import render_module
from sac_search.policy import Tier, checkpoint_layers
from sac_search.workload import BUILTIN_SPEC

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "cli.md"

_HEAD = """\
<!-- Written by scripts/docs --update, from the command line itself. -->

# Command line

`sac-search` without a command searches. Sizes are in GiB (2^30 bytes), times in seconds.
`sac-search --version` prints the release.

Exit codes: 0 a policy was found; 2 wrong usage; 3 no policy fits; 4 the workload itself fails, or
`verify` finds other gradients; 1 sac-search itself failed; 130 interrupted, and the best so far is
exported.
"""


def cli_page() -> str:
    """Returns the page of the command line: each command, with all that it takes."""
    names = [name for name in cli.app if not name.startswith("-")]
    return "\n".join([_HEAD, *_section("search", cli.app), *_commands(names)])


def _commands(names: list[str]) -> Iterator[str]:
    for name in names:
        yield from _section(name, cli.app[name])


def _section(name: str, app: cyclopts.App) -> Iterator[str]:
    arguments = [a for a in app.assemble_argument_collection() if a.show]
    words = ["sac-search", *([] if app is cli.app else [name])]
    for argument in arguments:
        if _is_positional(argument):
            words.append(_name(argument) if argument.required else f"[{_name(argument)}]")
        elif argument.required:
            words.append(f"{_name(argument)} {_value(argument)}")
    yield f"## {name}\n"
    yield inspect.cleandoc(app.default_command.__doc__) + "\n"
    yield f"```text\n{' '.join(words)} [OPTIONS]\n```\n"
    yield "| argument | value | default | meaning |\n| --- | --- | --- | --- |"
    yield from map(_row, arguments)
    yield ""


def _is_positional(argument: Any) -> bool:
    return argument.index is not None


def _name(argument: Any) -> str:
    name: str = argument.names[0]
    return name.lstrip("-").upper() if _is_positional(argument) else name


def _row(argument: Any) -> str:
    names = f"`{_name(argument)}`"
    if not _is_positional(argument):
        names = ", ".join(f"`{name}`" for name in argument.names)
    default = argument.field_info.default
    if argument.required:
        shown = "required"
    elif default is None or default is False:
        shown = ""
    elif default == BUILTIN_SPEC:
        shown = "a built-in GPT"
    else:
        shown = f"`{default}`"
    meaning = (argument.parameter.help or _OBVIOUS.get(argument.names[0], "")).replace("|", "\\|")
    return f"| {names} | {_values(argument)} | {shown} | {meaning} |"


# What the command line itself says nothing of.
_OBVIOUS = {
    "--quiet": "Print the outcome alone.",
    "--verbose": "Print every trial and every phase.",
}


def _values(argument: Any) -> str:
    choices = argument.get_choices()
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return _value(argument)


def _value(argument: Any) -> str:
    hint = argument.hint
    if get_origin(hint) is types.UnionType:
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    named = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH", bool: ""}
    return named.get(hint, str(getattr(hint, "__name__", hint)))


def policy_module_text() -> str:
    """Returns the text of an exported module, whose functions the reference describes."""
    return render_module(
        checkpoint_layers(["layers.0"], Tier(classes=("matmul",), ops=("aten.mm.default",))),
        meta={"study_name": "example", "environment": {"torch_version": _torch_version()}},
        headline=["What sac-search exports."],
    )


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page())
    sys.stdout.write(f"{CLI_PAGE.relative_to(ROOT)}\n")
