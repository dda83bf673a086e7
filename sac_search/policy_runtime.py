"""The policy function and the checkpointed layer: what runs inside a training step.

Needs torch alone (2.9 or later) and keeps no state between calls. This file's text is also the body
of every exported policy module, so that what was measured is what ships: it may not import anything
from sac_search.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

SAVE = CheckpointPolicy.MUST_SAVE
RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE


class SaveSet:
    """The ops that one tier saves.

    `ops` are exact overload names such as `aten.mm.default`. Whatever the names say, an op that
    mutates or returns a view is recomputed, and so is an op that the set does not know.

    `save_random` is the one decision for all random ops of a region, attention with dropout among
    them: saving one and recomputing another would shift the random stream and give wrong gradients.
    """

    def __init__(self, ops: Iterable[str], *, save_random: bool = False) -> None:
        self.ops = frozenset(ops)
        self.save_random = save_random
        # Decisions depend on the op alone, so remembering them is not state of the policy.
        self._decisions: dict[Any, Any] = {}

    def decide(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
        """Returns MUST_SAVE or PREFER_RECOMPUTE for one call of `op`."""
        decision = self._decisions.get(op)
        if decision is None:
            decision = self._decisions[op] = self._classify(op)
        if type(decision) is CheckpointPolicy:
            return decision
        return decision(args, kwargs)  # type: ignore[no-any-return]

    def _classify(self, op: Any) -> Any:
        schema = getattr(op, "_schema", None)
        named = str(op) in self.ops
        if schema is None:  # a higher-order op, such as flex_attention
            return SAVE if named else RECOMPUTE
        dropout = _dropout_argument(schema)
        if dropout is not None:
            position, default = dropout
            return functools.partial(_decide_attention, position, default, named, self.save_random)
        if torch.Tag.nondeterministic_seeded in op.tags:
            if not self.save_random:
                return RECOMPUTE
            if schema.is_mutable:
                return functools.partial(_refuse_random, str(op))
            return SAVE
        if schema.is_mutable or any(value.alias_info is not None for value in schema.returns):
            return RECOMPUTE
        return SAVE if named else RECOMPUTE


def _dropout_argument(schema: Any) -> tuple[int, float] | None:
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            default = argument.default_value if argument.has_default_value() else 0.0
            return position, default
    return None


def _decide_attention(
    position: int,
    default: float,
    named: bool,
    save_random: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CheckpointPolicy:
    dropout_p = args[position] if len(args) > position else kwargs.get("dropout_p", default)
    save = save_random if dropout_p else named
    return SAVE if save else RECOMPUTE


def _refuse_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
    raise RuntimeError(
        f"This policy saves random ops, but {name} is random and works in place, so it can only be "
        "recomputed; doing both would give wrong gradients without a word. The model or the device "
        "differs from the one that the policy was made for: search again here."
    )


def select_op(save_set: SaveSet, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Is a `policy_fn` once its first argument is bound: `partial(select_op, save_set)`."""
    return save_set.decide(op, args, kwargs)


def tier_contexts(save_set: SaveSet) -> Any:
    """Is a `context_fn` once its argument is bound: `partial(tier_contexts, save_set)`."""
    return create_selective_checkpoint_contexts(functools.partial(select_op, save_set))


class _Checkpointed:
    """Marks the subclass that a checkpointed layer gets; carries how to run and undo it."""

    _sac_layer_class: type[torch.nn.Module]
    _sac_context_fn: Callable[[], Any] | None


def checkpoint_layer(layer: torch.nn.Module, context_fn: Callable[[], Any] | None = None) -> None:
    """Makes `layer` run under activation checkpointing from now on.

    Without a `context_fn` everything in it is recomputed (plain checkpointing). The layer's class
    becomes a subclass of the same name: parameter names, state-dict keys and `isinstance` answers
    stay, and `restore_layer` undoes it exactly.
    """
    layer_class = type(layer)
    if issubclass(layer_class, _Checkpointed):
        raise ValueError(f"this {layer_class.__name__} is checkpointed already; restore it first")
    if "forward" in layer.__dict__:
        raise ValueError(
            f"this {layer_class.__name__} has a forward of its own, set on the instance by some "
            "other library, which would hide the checkpointed one; apply the policy before that"
        )
    layer.__class__ = _checkpointed_class(layer_class, context_fn)  # type: ignore[arg-type]


def restore_layer(layer: torch.nn.Module) -> bool:
    """Undoes `checkpoint_layer`. Returns whether there was anything to undo."""
    layer_class = type(layer)
    if "_sac_layer_class" not in layer_class.__dict__:
        return False
    layer.__class__ = layer_class._sac_layer_class  # type: ignore[attr-defined]
    return True


@functools.lru_cache(maxsize=256)
def _checkpointed_class(
    layer_class: type[torch.nn.Module], context_fn: Callable[[], Any] | None
) -> type[torch.nn.Module]:
    @functools.wraps(layer_class.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer_class.forward(self, *args, **kwargs)
        if not _CHECKPOINT_KEYWORDS.isdisjoint(kwargs):
            return _checkpoint(functools.partial(layer_class.forward, self, *args, **kwargs))
        return _checkpoint(functools.partial(layer_class.forward, self), *args, **kwargs)

    def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if context_fn is None:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    def __reduce_ex__(self: torch.nn.Module, protocol: Any) -> Any:
        # A pickled layer is a plain one: the subclass lives in this process only.
        return object.__new__, (layer_class,), self.__getstate__()

    def __deepcopy__(self: torch.nn.Module, memo: dict[int, Any]) -> Any:
        return _copy_checkpointed(self, layer_class, memo)

    namespace = {
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        "__doc__": layer_class.__doc__,
        "_sac_layer_class": layer_class,
        "_sac_context_fn": staticmethod(context_fn) if context_fn is not None else None,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__deepcopy__": __deepcopy__,
    }
    return type(layer_class.__name__, (layer_class, _Checkpointed), namespace)


_CHECKPOINT_KEYWORDS = frozenset(
    {
        "use_reentrant",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "preserve_rng_state",
    }
)


def _copy_checkpointed(
    layer: torch.nn.Module, layer_class: type[torch.nn.Module], memo: dict[int, Any]
) -> Any:
    checkpointed_class = type(layer)
    layer.__class__ = layer_class
    try:
        duplicate = copy.deepcopy(layer, memo)
    finally:
        layer.__class__ = checkpointed_class
    duplicate.__class__ = checkpointed_class
    return duplicate
