"""Workloads from the config files of transformers: which class of model, and how it is built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sac_search.errors import UsageError
from sac_search.ready.tasks import (
    CAUSAL,
    IMAGE_CLASSES,
    IMAGES_AND_TEXT,
    MASKED,
    SEQ2SEQ,
    TASKS,
    TEXT_CLASSES,
    TOKEN_CLASSES,
    Batch,
    Sizes,
    Task,
    default_sequence_length,
    image_shape,
    positions_of,
)
from sac_search.ready.training import (
    BATCH_SIZE,
    add_lora,
    import_library,
    make_workload,
    parameter_dtype,
    seeded,
)
from sac_search.recipe import Attention, Recipe
from sac_search.workload import Factory, Workload

_CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier", "score", "qa_outputs")
"""What transformers calls the heads that are no part of the pretrained model."""
_WRITE_A_FILE = "write a workload file (sac-search train.py --budget-gb N; studies/ has examples)"
_HEADLESS = ("MODEL_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES")
"""Tables of transformers whose models have no loss, or one that pretraining alone knows."""
# Of a type that has models for several tasks, the first is what it is pretrained for.
_BY_TYPE = (MASKED, CAUSAL, IMAGE_CLASSES, SEQ2SEQ, TEXT_CLASSES, TOKEN_CLASSES, IMAGES_AND_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The class of model that a config stands for."""

    class_name: str
    """In transformers."""
    task: Task
    """What it is trained to do."""
    reason: str
    """Why this one, for people."""


def find_factory(recipe: Recipe) -> Factory:
    """Returns the factory of a config file's model.

    Raises:
        UsageError: the file is no config that can be built, or a setting does not go with it.
        WorkloadError: a library is missing.
    """
    fields = recipe.read_config()
    transformers = import_library("transformers", extra="transformers")
    if recipe.lora_rank is not None:
        import_library("peft", extra="peft")
    config = _make_config(recipe, fields, transformers)
    choice = choose_model(config, str(recipe.config_path))
    _refuse_settings(recipe, choice, config)
    return Factory(
        function=functools.partial(_build, recipe=recipe, choice=choice),
        name=recipe.spec,
        path=recipe.config_path.resolve(),
        release=f"transformers {transformers.__version__}",
    )


def choose_model(config: Any, file_name: str) -> Choice:
    """Returns the class that the config's `architectures` name, else the one of its type.

    Raises:
        UsageError: it stands for none that can be trained on a synthetic batch.
    """
    named = list(config.architectures or ())
    for name in named:
        for task in TASKS:
            if _holds(task.mapping, name):
                return Choice(class_name=name, task=task, reason="as its architectures say")
    # Of a model without a head, and of one that this release does not know, the type tells more.
    others = [n for n in named if _is_known(n) and not any(_holds(m, n) for m in _HEADLESS)]
    for task in () if others else _tasks_by_type(config):
        classes = _table(task.mapping)
        if config.model_type in classes:
            return Choice(
                class_name=_class_names(classes[config.model_type])[0],
                task=task,
                reason=f"for its type {config.model_type!r}"
                + (f" (nothing here trains {', '.join(named)})" if named else ""),
            )
    raise UsageError(
        f"{file_name!r}: {', '.join(named) or f'a model of the type {config.model_type!r}'} is "
        f"none of what can be built from a config alone ({', '.join(task.name for task in TASKS)});"
        f" {_WRITE_A_FILE}"
    )


def _tasks_by_type(config: Any) -> Iterable[Task]:
    if config.is_encoder_decoder:
        return (SEQ2SEQ, *_BY_TYPE)
    return (CAUSAL, *_BY_TYPE) if getattr(config, "is_decoder", False) else _BY_TYPE


def _table(name: str) -> Mapping[str, Any]:
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    classes: Mapping[str, Any] = getattr(module, name, {})
    return classes


def _holds(table: str, class_name: str) -> bool:
    return any(class_name in _class_names(entry) for entry in _table(table).values())


def _is_known(class_name: str) -> bool:
    return hasattr(importlib.import_module("transformers"), class_name)


def _class_names(entry: str | Iterable[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _make_config(recipe: Recipe, fields: dict[str, Any], transformers: Any) -> Any:
    """Returns the config, set up for training on images of the recipe's size."""
    file_name, model_type = str(recipe.config_path), fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{file_name!r}: transformers {transformers.__version__} knows no model of the type "
            f"{model_type!r}; update it (pip install -U transformers), or, for a model with code "
            f"of its own, {_WRITE_A_FILE}"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    try:
        config = config_class.from_dict(dict(fields))
    except Exception as error:  # each release checks other fields, in its own way
        raise UsageError(
            f"{file_name!r} is no {config_class.__name__}: {_one_line(error)}; correct the file"
        ) from error
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # a cache would grow again when a layer is recomputed
    if recipe.image_size is not None:
        config.image_size = recipe.image_size
    return config


def _refuse_settings(recipe: Recipe, choice: Choice, config: Any) -> None:
    """Raises UsageError for a setting that does not go with the model."""
    wrong = "sequence_length" if choice.task.takes_images else "image_size"
    if getattr(recipe, wrong) is not None:
        raise UsageError(
            f"{choice.class_name} is {choice.task.name}, so {wrong}={getattr(recipe, wrong)} has "
            "nothing to do; leave it out"
        )
    positions = positions_of(config)
    if recipe.sequence_length and positions and recipe.sequence_length > positions:
        raise UsageError(
            f"sequence_length={recipe.sequence_length} is more than the {positions} positions of "
            f"the model; choose less, or let {recipe.model!r} have more"
        )


def _build(
    device: torch.device, batch_size: int | None = None, *, recipe: Recipe, choice: Choice
) -> Workload:
    transformers = import_library("transformers", extra="transformers")
    config = _make_config(recipe, recipe.read_config(), transformers)
    if choice.task is TEXT_CLASSES and config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = 0  # the end of a text is where padding begins
    own_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    torch.manual_seed(0)
    model = _make_model(recipe, choice, config, device, parameter_dtype(recipe, own_dtype))
    sizes = Sizes(
        config=config,
        batch_size=batch_size or BATCH_SIZE,
        sequence_length=recipe.sequence_length or default_sequence_length(config),
        generator=seeded(),
    )
    batch = {
        name: tensor.to(device, model.dtype if tensor.is_floating_point() else None)
        for name, tensor in choice.task.make_batch(sizes).items()
    }
    parts = list(_peculiarities(model, config))
    if recipe.lora_rank is not None:
        heads = [module for name, module in model.named_children() if name in _CLASSIFIERS]
        heads.append(model.get_output_embeddings())
        model = add_lora(model, recipe.lora_rank, heads=heads, task_type=choice.task.peft_type)
    takes_images, tokens = choice.task.takes_images, sizes.sequence_length
    pixels = " x ".join(str(n) for n in image_shape(config))
    return make_workload(
        recipe,
        model,
        _own_loss,
        batch,
        adafactor=functools.partial(  # as its Trainer makes it
            transformers.Adafactor, scale_parameter=False, relative_step=False
        ),
        origin=(
            f"{recipe.model} is built as {choice.class_name}, {choice.task.name}, {choice.reason}."
        ),
        parts=parts,
        samples=f"{pixels} random pixels" if takes_images else f"{tokens} random tokens",
        batch_size=sizes.batch_size,
        sequence_length=None if takes_images else tokens,
    )


def _peculiarities(model: nn.Module, config: Any) -> Iterator[str]:
    if any("Attention" in type(module).__name__ for module in model.modules()):
        yield f"{config.get_text_config()._attn_implementation} attention"
    if getattr(config, "quantization_config", None) is not None:
        yield "not quantized as the config asks"


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _make_model(
    recipe: Recipe, choice: Choice, config: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    transformers = import_library("transformers", extra="transformers")
    model_class = getattr(transformers, choice.class_name)
    keywords = {} if recipe.attention is None else {"attn_implementation": str(recipe.attention)}
    try:
        with torch.device(device):
            return model_class._from_config(config, dtype=dtype, **keywords)
    except (ValueError, ImportError) as error:  # what transformers raises to be read by people
        advice = "correct the file, or choose another attention"
        if recipe.attention is Attention.FLASH_ATTENTION_2:
            advice = (
                "flash_attention_2 needs an NVIDIA device, bf16 or fp16, and its own package (pip "
                "install flash-attn --no-build-isolation); attention=sdpa has a flash kernel, too"
            )
        raise UsageError(
            f"{choice.class_name} cannot be built from {recipe.model!r}: "
            f"{_one_line(error).partition('. ')[0]}; {advice}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
