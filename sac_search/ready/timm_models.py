"""Workloads from the names of timm's models: random images, cross-entropy."""

from __future__ import annotations

import difflib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sac_search.errors import UsageError, WorkloadNotFound
from sac_search.ready.training import (
    BATCH_SIZE,
    add_lora,
    import_library,
    make_workload,
    parameter_dtype,
    random_classes,
    random_images,
    seeded,
)
from sac_search.recipe import Attention, Recipe
from sac_search.workload import Factory, Workload

_CLASSES = 1000
"""Of a model that is published without a head."""
_TORCHVISION = (
    "; timm needs the torchvision that was built for this torch "
    f"({torch.__version__}): pip install --force-reinstall torch torchvision"
)


def find_factory(recipe: Recipe) -> Factory:
    """Returns the factory of a model of timm.

    Raises:
        WorkloadNotFound: timm knows no such model.
        WorkloadError: a library is missing.
    """
    timm = _part()
    if recipe.lora_rank is not None:
        import_library("peft", extra="peft")
    if not timm.is_model(recipe.model):
        raise WorkloadNotFound(_unknown_message(timm, recipe.model))
    return Factory(
        function=functools.partial(_build, recipe=recipe),
        name=recipe.spec,
        release=f"timm {timm.__version__}",
    )


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean cross-entropy of `(images, classes)` over all heads of the model."""
    images, classes = batch
    output = model(images)
    heads = output if isinstance(output, tuple | list) else [output]
    losses = [nn.functional.cross_entropy(head.float(), classes) for head in heads]
    return torch.stack(losses).mean()


def _build(device: torch.device, batch_size: int | None = None, *, recipe: Recipe) -> Workload:
    timm = _part()
    batch_size = batch_size or BATCH_SIZE
    torch.manual_seed(0)
    model = _make_model(timm, recipe, device)
    channels, *size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    height, width = (recipe.image_size,) * 2 if recipe.image_size else size
    generator = seeded()
    images = random_images((batch_size, channels, height, width), generator)
    classes = random_classes((batch_size,), model.num_classes, generator)
    batch = images.to(device, parameter_dtype(recipe)), classes.to(device)
    if recipe.lora_rank is not None:
        head = model.get_classifier()
        heads = head if isinstance(head, tuple | list) else [head]
        model = add_lora(model, recipe.lora_rank, heads=heads)
    return make_workload(
        recipe,
        model,
        image_loss,
        batch,
        origin=f"{recipe.model} is built by timm {timm.__version__}.",
        adafactor=functools.partial(_part("optim").Adafactor, scale_parameter=False),
        parts=(),
        samples=f"{channels} x {height} x {width} random pixels",
        batch_size=batch_size,
    )


def _make_model(timm: Any, recipe: Recipe, device: torch.device) -> Any:
    published = timm.get_pretrained_cfg(recipe.model, allow_unregistered=True)
    keywords: dict[str, Any] = {}
    if published is None or not published.num_classes:
        keywords["num_classes"] = _CLASSES
    if recipe.image_size is not None and published is not None and published.fixed_input_size:
        keywords["img_size"] = recipe.image_size
    if recipe.attention is not None:
        _part("layers").set_fused_attn(recipe.attention is Attention.SDPA)
    try:
        with torch.device(device):
            model = timm.create_model(recipe.model, pretrained=False, **keywords)
    except (AssertionError, ValueError) as error:
        raise UsageError(
            f"{recipe.model} cannot be built with images of {recipe.image_size} pixels: {error}"
        ) from error
    return model.to(parameter_dtype(recipe))


def _part(name: str = "") -> ModuleType:
    return import_library(f"timm.{name}" if name else "timm", extra="timm", advice=_TORCHVISION)


def _unknown_message(timm: Any, name: str) -> str:
    alike = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(alike)}?" if alike else "timm.list_models() names them all"
    return f"timm {timm.__version__} has no model {name!r}; {hint}"
