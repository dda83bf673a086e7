"""A workload that a library's model makes, with no Python written: what model, and its settings.

    hf:llama.json?dtype=bf16&lora_rank=8       the model of a transformers config file
    timm:vit_base_patch16_224?autocast=bf16    a model of timm, by its name

This text names the workload wherever a file would: on the command line, to the worker, in a study.
Nothing but that file is read here, and no library is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from sac_search.errors import UsageError, WorkloadNotFound

_CONFIG_FILE = "config.json"
# What torch takes as the size of a dimension.
_LARGEST = 2**31 - 1
_HOW_TO_GET_ONE = (
    "expected the config.json that lies beside the weights of a transformers model, or its folder; "
    "`hf download ORGANIZATION/MODEL config.json` fetches one"
)


class Library(StrEnum):
    """Where the model's code comes from."""

    HF = "hf"
    TIMM = "timm"


class Precision(StrEnum):
    """A floating-point format of parameters."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Autocast(StrEnum):
    """The format in which `torch.autocast` computes matmuls and convolutions."""

    BF16 = "bf16"
    FP16 = "fp16"


class Attention(StrEnum):
    """The code that computes attention."""

    SDPA = "sdpa"
    EAGER = "eager"
    FLASH_ATTENTION_2 = "flash_attention_2"


class OptimizerName(StrEnum):
    """What updates the parameters."""

    ADAMW = "adamw"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a workload is made from."""

    library: Library
    """Where the model's code comes from."""
    model: str
    """A config file of transformers (or the folder that holds it), or a name that timm knows."""
    dtype: Precision | None = None
    """Of the parameters. None: fp32 under autocast, else what the config says, else fp32."""
    autocast: Autocast | None = None
    """Computes the forward pass in this format, the parameters staying as they are."""
    attention: Attention | None = None
    """The library's own choice when None."""
    sequence_length: int | None = None
    """Tokens in a sample; up to 2048, as many as the model has positions, when None."""
    image_size: int | None = None
    """Height and width of the images; the model's own when None."""
    optimizer: OptimizerName = OptimizerName.ADAMW
    """What updates the parameters."""
    lora_rank: int | None = None
    """Trains LoRA adapters of this rank on all linear layers, and nothing else."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "image_size", "lora_rank"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _LARGEST:
                raise UsageError(f"{name} is {value}; it must be 1 or more, and at most {_LARGEST}")
        if self.library is Library.TIMM and self.sequence_length is not None:
            raise UsageError(
                f"the models of timm take images, so sequence_length={self.sequence_length} has "
                "nothing to do; leave it out, or choose an image_size"
            )
        if self.library is Library.TIMM and self.attention is Attention.FLASH_ATTENTION_2:
            raise UsageError(
                "the models of timm cannot be told to use flash_attention_2; with sdpa torch takes "
                "its flash kernel where it can"
            )

    @property
    def spec(self) -> str:
        """The text that names this workload, and no other."""
        settings = {
            name: str(value)
            for name in _SETTINGS
            if (value := getattr(self, name)) not in (None, OptimizerName.ADAMW)
        }
        model = self.model.replace("%", "%25").replace("?", "%3F")
        query = f"?{urlencode(settings)}" if settings else ""
        return f"{self.library}:{model}{query}"

    @property
    def title(self) -> str:
        """A short name for people: of the model, without its settings."""
        if self.library is Library.TIMM:
            return self.model
        path = self.config_path
        for part in path.parts:  # the cache of Hugging Face's hub
            if part.startswith("models--"):
                return part.rpartition("--")[2]
        return path.resolve().parent.name or path.stem if path.name == _CONFIG_FILE else path.stem

    @property
    def config_path(self) -> Path:
        """The config file of a model of transformers."""
        path = Path(self.model)
        return path / _CONFIG_FILE if os.path.isdir(path) else path

    def canonical(self) -> Recipe:
        """Returns the one spelling of this recipe: the file relative to the current folder."""
        if self.library is Library.TIMM:
            return self
        path, here = self.config_path.resolve(), Path.cwd().resolve()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        return replace(self, model=path.as_posix())

    def read_config(self) -> dict[str, Any]:
        """Returns what the config file holds.

        Raises:
            WorkloadNotFound: there is no such file.
            UsageError: it is not the config of a model of transformers.
        """
        path = self.config_path
        if not os.path.isfile(path):
            raise WorkloadNotFound(f"there is no file {str(path)!r}; {_HOW_TO_GET_ONE}")
        try:
            config = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{str(path)!r} is not JSON ({error}); {_HOW_TO_GET_ONE}") from error
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise UsageError(f"{str(path)!r} names no model_type; {_HOW_TO_GET_ONE}")
        return config

    def require(self) -> None:
        """Raises UsageError if the config file cannot be used; imports nothing."""
        if self.library is Library.HF:
            self.read_config()


_SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "dtype": Precision,
    "autocast": Autocast,
    "attention": Attention,
    "sequence_length": int,
    "image_size": int,
    "optimizer": OptimizerName,
    "lora_rank": int,
}


def parse_recipe(spec: str) -> Recipe | None:
    """Returns the recipe that `spec` is the text of; None if it names a file or a module.

    Raises:
        UsageError: a setting is unknown, or its value is.
    """
    library, colon, rest = spec.partition(":")
    if not colon or library not in list(Library):
        return None
    model, _, query = rest.partition("?")
    if not model:
        raise UsageError(f"{spec!r} names no model; expected hf:config.json or timm:MODEL")
    settings: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _SETTINGS:
            raise UsageError(f"{spec!r}: there is no {name!r}; there are {', '.join(_SETTINGS)}")
        settings[name] = _read_setting(spec, name, text)
    return Recipe(library=Library(library), model=unquote(model), **settings)


def _read_setting(spec: str, name: str, text: str) -> Any:
    convert = _SETTINGS[name]
    try:
        return convert(text)
    except ValueError:
        choices = "a whole number" if convert is int else "one of " + ", ".join(convert)  # type: ignore[arg-type]
        raise UsageError(f"{spec!r}: {name} is {text!r}; it must be {choices}") from None
