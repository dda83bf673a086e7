"""The options that several commands share, and the workload that some of them name."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sac_search.device import Clock
from sac_search.errors import UsageError
from sac_search.recipe import Attention, Autocast, Library, OptimizerName, Precision, Recipe
from sac_search.workload import BUILTIN_SPEC

Device = Annotated[
    str | None, Parameter(help="cpu, cuda, cuda:1, …; by default the machine's accelerator.")
]
Layers = Annotated[
    str | None,
    Parameter(help="Names of the layers, as 'model.layers.*'; by default found by themselves."),
]
BatchSize = Annotated[
    int | None, Parameter(help="Handed to the workload's factory; 8 where there is no file.")
]
Root = Annotated[Path, Parameter(help="The folder that holds the studies.")]
Storage = Annotated[
    str | None,
    Parameter(
        env_var="SAC_SEARCH_STORAGE",
        help=(
            "Address of a database that machines share, as postgresql+psycopg://user@host/name, or "
            "of a proxy, as grpc://host:13000; by default a file in the study's folder."
        ),
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, for programs.")]


class OutputFormat(enum.StrEnum):
    """How a command prints what it found."""

    TEXT = "text"
    """For a terminal."""
    MD = "md"
    """Markdown."""
    JSON = "json"
    """For programs: bytes, seconds and fractions, each with where it comes from."""
    CSV = "csv"
    """A table, a row per figure."""


Format = Annotated[OutputFormat, Parameter(name="--format", help="text, md, json or csv.")]
Threads = Annotated[
    int | None, Parameter(help="CPU threads of torch; by default one when processor time counts.")
]
ClockOption = Annotated[
    Clock | None,
    Parameter(help="cpu: processor time, default on the CPU. wall: elapsed time."),
]


@Parameter(name="*", group="Workload without a file")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyOptions:
    """A workload that is made from a library's model, and how."""

    hf_config: Annotated[
        str | None,
        Parameter(help="Train the model of a transformers config file, with random weights."),
    ] = None
    timm: Annotated[
        str | None, Parameter(help="Train the model that timm has under this name.")
    ] = None
    dtype: Annotated[
        Precision | None,
        Parameter(help="Of the weights; by default the config's own, else fp32."),
    ] = None
    autocast: Annotated[
        Autocast | None, Parameter(help="Compute under autocast; the weights are fp32 then.")
    ] = None
    attention: Annotated[
        Attention | None, Parameter(help="By default what the library chooses.")
    ] = None
    sequence_length: Annotated[
        int | None, Parameter(help="Tokens in a sample; by default all positions, 2048 at most.")
    ] = None
    image_size: Annotated[
        int | None, Parameter(help="Height and width of the images; by default the model's own.")
    ] = None
    optimizer: Annotated[
        OptimizerName | None, Parameter(help="By default adamw. sgd has momentum.")
    ] = None
    lora_rank: Annotated[
        int | None, Parameter(help="Freeze the model and train LoRA adapters of this rank.")
    ] = None

    def spec(self, workload: str) -> str:
        """Returns the text that names the workload: the file, or else the recipe.

        Raises:
            UsageError: these options contradict the file or each other.
        """
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        named = [name for name in given if name in ("hf_config", "timm")]
        settings = {name: getattr(self, name) for name in given if name not in named}
        if settings and not named:
            raise UsageError(
                f"{_option(next(iter(settings)))} is for --hf-config and --timm; another workload "
                "chooses for itself, in its file"
            )
        if len(named) + (workload != BUILTIN_SPEC) > 1:
            one, other = [*(_option(name) for name in named), workload][:2]
            raise UsageError(f"{one} and {other} are two workloads; give one of them")
        if self.hf_config is not None:
            return Recipe(library=Library.HF, model=self.hf_config, **settings).spec
        if self.timm is not None:
            return Recipe(library=Library.TIMM, model=self.timm, **settings).spec
        return workload


NOT_READY = ReadyOptions()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
