"""Tells whether two training steps in a user's own process are the same one.

There is no file whose text could be compared, so what they are made of is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sac_search.state import random_states_kept
from sac_search.workload import Workload

# Batches that are drawn to see which of their sizes stay the same.
_DRAWN = 3
# Settings of an optimizer that a schedule moves, and that no step's memory or time depends on.
_MOVING = frozenset({"params", "lr", "initial_lr"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def fingerprint_of(workload: Workload) -> str:
    """Returns a hash of what a step runs: model, loss, batch, optimizer, as far as can be told.

    Draws a few batches where they come from a callable: sizes that change from one to the next do
    not count. Known limits: of what functions refer to, only plain values (numbers, strings,
    dtypes) and other functions are looked at, and what they call is not followed.
    """
    model, optimizer = workload.model, workload.optimizer
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    parts = [
        repr(model),
        *(
            f"{name} {tuple(p.shape)} {p.dtype} {p.device.type} {p.requires_grad}"
            for name, p in model.named_parameters()
        ),
        *(f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()),
        *map(_describe_config, configs.values()),
        *map(_source, dict.fromkeys(type(module) for module in model.modules())),
        str([module.training for module in model.modules()]),
        _describe_batches(workload),
        _describe(workload.loss_fn),
        _describe(workload.step),
        type(optimizer).__qualname__,
        *([] if optimizer is None else map(_describe_group, optimizer.param_groups)),
        repr(workload.layers),
        repr((workload.batch_size, workload.sequence_length)),
    ]
    text = _ADDRESS.sub("", "\n".join(parts))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def _describe_config(config: Any) -> str:
    """Returns the settings of a transformers or diffusers model, which its modules do not show."""
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    attention = getattr(config, "_attn_implementation", "")
    return f"{type(config).__qualname__} {attention} {settings!r}"


def _describe_group(group: dict[str, Any]) -> str:
    settings = {
        name: value if isinstance(value, (*_PLAIN, tuple, list)) else type(value).__name__
        for name, value in sorted(group.items())
        if name not in _MOVING
    }
    return f"{len(group['params'])} parameters, {settings!r}"


def _describe_batches(workload: Workload) -> str:
    if not callable(workload.batch):
        return str(_shapes(workload.batch))
    try:
        with random_states_kept():
            drawn = [_shapes(workload.next_batch()) for _ in range(_DRAWN)]
    except Exception as error:
        return f"none: {type(error).__qualname__}"  # the search says what is wrong
    if len({len(leaves) for leaves in drawn}) > 1:
        return "batches of several kinds"
    return f"drawn: {[_shared(leaf) for leaf in zip(*drawn, strict=True)]}"


def _shapes(batch: Any) -> list[Any]:
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in pytree.tree_leaves(batch)
    ]


def _shared(leaves: tuple[Any, ...]) -> Any:
    """Returns what one leaf of every batch has in common; sizes that differ are left out."""
    if not all(isinstance(leaf, tuple) for leaf in leaves):
        return leaves[0] if len(set(leaves)) == 1 else "several kinds"
    shapes = [shape for shape, _ in leaves]
    if len({len(shape) for shape in shapes}) > 1:
        return "several kinds"
    sizes = [found[0] if len(set(found)) == 1 else "*" for found in zip(*shapes, strict=True)]
    return sizes, leaves[0][1]


def _describe(function: Any, seen: frozenset[int] = frozenset()) -> str:
    """Returns what a callable does, as far as its text and the values that it holds tell."""
    if id(function) in seen:
        return ""
    seen = seen | {id(function)}
    if isinstance(function, functools.partial):
        held = [function.func, *function.args, *sorted(function.keywords.items())]
        return f"partial {[_describe_value(value, seen) for value in held]}"
    parts = [_source(function)]
    function = inspect.unwrap(function) if callable(function) else function
    parts += map(repr, filter(_is_plain, getattr(function, "__defaults__", None) or ()))
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            parts.append(f"{name}={_describe_value(cell.cell_contents, seen)}")
        except ValueError:  # not filled yet
            continue
    return " ".join(parts)


def _describe_value(value: Any, seen: frozenset[int]) -> str:
    if _is_plain(value):
        return repr(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_describe_value(value[1], seen)}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return _describe(value, seen)
    return type(value).__qualname__


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _source(thing: Callable[..., Any] | type | None) -> str:
    """Returns the text of a function or class where there is one, else its name."""
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return str(getattr(thing, "__qualname__", type(thing).__qualname__))
