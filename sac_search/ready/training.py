"""What ready workloads have in common: precision, images, LoRA, optimizer, and their story."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sac_search.errors import UsageError, WorkloadError
from sac_search.recipe import Autocast, OptimizerName, Recipe
from sac_search.workload import Workload, format_user_traceback, require

BATCH_SIZE = 8
"""Samples in a step when nobody says."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Small enough for random data to leave every loss finite, in every precision that is taken.
_LEARNING_RATE = 1e-4
_LINEAR = ("Linear", "Conv1D")
"""Classes that peft has adapters for; transformers calls GPT-2's linear layers convolutions."""

LossFunction = Callable[[nn.Module, Any], Tensor]


def import_library(name: str, extra: str, advice: str = "") -> ModuleType:
    """Returns the library, or says how to install or to mend it.

    Raises:
        WorkloadError: it is not installed, or its import fails.
    """
    try:
        return require(name, extra)
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{name} is installed, but its import raised {type(error).__name__}: {error}{advice}",
            user_traceback=format_user_traceback(error),
        ) from error


def parameter_dtype(recipe: Recipe, own: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype of the parameters; `own` is the one that the model's config asks for."""
    if recipe.dtype is not None:
        return _DTYPES[recipe.dtype]
    if recipe.autocast is not None or own is None:
        return torch.float32
    return own


def in_precision(loss_fn: LossFunction, autocast: Autocast | None) -> LossFunction:
    """Returns `loss_fn`, computed under autocast if that is asked for."""
    if autocast is None:
        return loss_fn
    return functools.partial(_autocast_loss, loss_fn=loss_fn, dtype=_DTYPES[autocast])


def _autocast_loss(
    model: nn.Module, batch: Any, *, loss_fn: LossFunction, dtype: torch.dtype
) -> Tensor:
    with torch.autocast(next(model.parameters()).device.type, dtype):
        return loss_fn(model, batch)


def seeded() -> torch.Generator:
    """Returns the generator of a batch: every build draws the same numbers, on any device."""
    return torch.Generator(device="cpu").manual_seed(0)


def random_images(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns normal pixels [batch, channels, height, width] in fp32, on the CPU."""
    return torch.randn(*shape, generator=generator, device="cpu")


def random_classes(shape: Sequence[int], count: int, generator: torch.Generator) -> Tensor:
    """Returns class numbers under `count`, on the CPU."""
    return torch.randint(count, tuple(shape), generator=generator, device="cpu")


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    heads: Iterable[nn.Module | None] = (),
    task_type: str | None = None,
) -> nn.Module:
    """Freezes the model and returns it with LoRA adapters on its linear layers outside `heads`.

    Raises:
        UsageError: the model has no such layer.
    """
    peft = import_library("peft", extra="peft")
    inside = {module for head in heads if head is not None for module in head.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in _LINEAR and module not in inside
    ]
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no linear layer outside its head, so lora_rank={rank} has "
            "no place in it; leave it out"
        )
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type=task_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that it corrects by itself
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def make_optimizer(
    name: OptimizerName, model: nn.Module, adafactor: Callable[..., torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """Returns the optimizer of that name over what the model trains.

    `adafactor` makes the library's own: torch's reads a norm of every parameter in Python, which
    no forecast can follow.

    Raises:
        UsageError: the optimizer diverges in the precision of the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    squares = name not in (OptimizerName.SGD, OptimizerName.NONE)
    if squares and any(p.dtype is torch.float16 for p in parameters):
        raise UsageError(
            f"{name} keeps squares of gradients, which vanish in fp16, so that the second step "
            "gives NaN: take --dtype bf16, --autocast fp16 on fp32 parameters, or --optimizer sgd"
        )
    if name is OptimizerName.ADAMW:
        return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)
    if name is OptimizerName.SGD:
        return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9)
    if name is OptimizerName.ADAFACTOR:
        return adafactor(parameters, lr=_LEARNING_RATE)
    return None


def make_workload(
    recipe: Recipe,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    adafactor: Callable[..., torch.optim.Optimizer],
    origin: str,
    parts: Sequence[str],
    samples: str,
    batch_size: int,
    sequence_length: int | None = None,
) -> Workload:
    """Returns the workload, with a note of what it was made of.

    `origin` says which model was chosen and why, `parts` what is special about it, `samples` what
    one sample of the batch is.
    """
    model.train()
    facts = [*_story(recipe, model), *parts, f"{batch_size} x {samples}"]
    return Workload(
        model=model,
        loss_fn=in_precision(loss_fn, recipe.autocast),
        batch=batch,
        optimizer=make_optimizer(recipe.optimizer, model, adafactor),
        batch_size=batch_size,
        sequence_length=sequence_length,
        notes=(f"{origin} {', '.join(facts)}.",),
    )


def _story(recipe: Recipe, model: nn.Module) -> Iterator[str]:
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    yield f"{_count(model.parameters())} random parameters in {dtypes}"
    if recipe.lora_rank is not None:
        trained = _count(p for p in model.parameters() if p.requires_grad)
        yield f"{trained} of them trained (LoRA of rank {recipe.lora_rank})"
    if recipe.autocast is not None:
        yield f"{recipe.autocast} autocast"
    has_optimizer = recipe.optimizer is not OptimizerName.NONE
    yield recipe.optimizer if has_optimizer else "no optimizer"


def _count(parameters: Iterable[nn.Parameter]) -> str:
    count = float(sum(p.numel() for p in parameters))
    for unit in ("", " thousand", " million"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} billion" if count < 999.5 else f"{count:.0f} billion"
