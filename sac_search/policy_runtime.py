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
_VERDICTS = {
    None: (SAVE, RECOMPUTE),
    False: (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
    True: (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
}
# Overloads that return a view of their input although their schema does not say so.
HIDDEN_VIEWS = frozenset(
    {
        "aten._unsafe_view.default",
        "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default",
        "aten.lift.default",
    }
)
# The argument that holds an op's weight; its shape tells one use of the op from another.
WEIGHT_ARGUMENTS = {
    "aten.mm.default": 1,
    "aten.addmm.default": 2,
    "aten._addmm_activation.default": 2,
    "aten.linear.default": 1,
    "aten._scaled_mm.default": 1,
    "aten._grouped_mm.default": 1,
    "aten.convolution.default": 1,
}


class SaveSet:
    """The ops that one tier saves.

    `ops` are exact overload names such as `aten.mm.default`, for every call of it, or op sites such
    as `aten.mm.default[2048x8192]`, for the calls with a weight of that shape. Whatever the names
    say, an op that mutates or returns a view is recomputed, and so is an op that the set does not
    know.

    An output that the program changes in place later may not be named: torch raises in backward, or
    notices nothing when the change goes through one of `HIDDEN_VIEWS`, and gradients are wrong.

    `save_random` is the one decision for all random ops of a region, attention with dropout among
    them: saving one and recomputing another would shift the random stream and give wrong gradients.

    `prefer` is for compiled models, whose partitioner has a mind of its own: True lets it override
    what is said here, False does not. Eager code does the same whatever it is.
    """

    def __init__(
        self, ops: Iterable[str], *, save_random: bool = False, prefer: bool | None = None
    ) -> None:
        self.ops = frozenset(ops)
        self.save_random = save_random
        self._save, self._recompute = _VERDICTS[prefer]
        # For each op the sites that are saved; None stands for all of them.
        self._sites: dict[str, frozenset[str] | None] = {}
        for name in self.ops:
            op_name, bracket, site = name.partition("[")
            known = self._sites.get(op_name, frozenset())
            if bracket and known is not None:
                self._sites[op_name] = known | {site.removesuffix("]")}
            else:
                self._sites[op_name] = None
        # What is remembered depends on the op alone, so it is not state of the policy.
        self._decisions: dict[Any, Any] = {}

    def decide(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
        """Returns what to do with the output of one call of `op`."""
        decision = self._decisions.get(op)
        if decision is None:
            decision = self._decisions[op] = self._classify(op)
        return _settle(decision, args, kwargs)

    def _classify(self, op: Any) -> Any:
        save, recompute = self._save, self._recompute
        schema = getattr(op, "_schema", None)
        name = str(op)
        named = name in self._sites
        if schema is None:  # a higher-order op, such as flex_attention
            return save if named else recompute
        savable = not schema.is_mutable and not _returns_view(op)
        if_certain: Any = save if named and savable else recompute
        sites = self._sites.get(name)
        if if_certain is save and sites is not None:
            if_certain = functools.partial(_decide_site, name, sites, save, recompute)
        if_random: Any = recompute
        if self.save_random:
            if_random = save if savable else functools.partial(_refuse_random, str(op))
        dropout = _dropout_argument(schema)
        if dropout is not None:
            return functools.partial(_decide_attention, *dropout, if_random, if_certain)
        return if_random if torch.Tag.nondeterministic_seeded in op.tags else if_certain


def _returns_view(op: Any) -> bool:
    aliases = any(value.alias_info is not None for value in op._schema.returns)
    return aliases or str(op) in HIDDEN_VIEWS


def _dropout_argument(schema: Any) -> tuple[int, float] | None:
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            default = argument.default_value if argument.has_default_value() else 0.0
            return position, default
    return None


def _decide_attention(
    position: int,
    default: float,
    if_random: Any,
    if_certain: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CheckpointPolicy:
    dropout_p = args[position] if len(args) > position else kwargs.get("dropout_p", default)
    return _settle(if_random if dropout_p else if_certain, args, kwargs)


def _decide_site(
    name: str,
    sites: frozenset[str],
    save: CheckpointPolicy,
    recompute: CheckpointPolicy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CheckpointPolicy:
    return save if site_of(name, args) in sites else recompute


def site_of(name: str, args: tuple[Any, ...]) -> str:
    """Returns what tells one use of an op from another, whatever the batch: `2048x8192`.

    The shape of the weight where there is one. For batched matmuls, the two dimensions that are
    multiplied. Else the size of the features: the last dimension of the first tensor, with the
    channels before it in front for images. Empty when no tensor comes first.
    """
    weight = WEIGHT_ARGUMENTS.get(name)
    if weight is not None and len(args) > weight:
        return _by_x(args[weight].shape)
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return ""
    if name in ("aten.bmm.default", "aten.baddbmm.default"):
        return _by_x(args[-1].shape[-2:])
    if first.dim() == 4:
        return _by_x((first.shape[1], first.shape[3]))
    return str(int(first.shape[-1]))


def _by_x(sizes: Iterable[Any]) -> str:
    return "x".join([str(int(size)) for size in sizes])  # a list, for speed


def _settle(decision: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
    if type(decision) is CheckpointPolicy:
        return decision
    return decision(args, kwargs)  # type: ignore[no-any-return]


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


def checkpoint_layer(layer: torch.nn.Module, context_fn: Callable[[], Any] | None = None) -> None:
    """Makes `layer` run under activation checkpointing from now on.

    Without a `context_fn` everything in it is recomputed (plain checkpointing). The layer's class
    becomes a subclass of the same name: parameter names, state-dict keys and `isinstance` answers
    stay, and `restore_layer` undoes it exactly.

    Raises:
        ValueError: the layer is checkpointed already, or another library replaced its forward.
    """
    layer_class = type(layer)
    if hasattr(layer_class, "_sac_checkpointed"):
        raise ValueError(f"this {layer_class.__name__} is checkpointed already; restore it first")
    if "forward" in layer.__dict__:
        raise ValueError(
            f"this {layer_class.__name__} has a forward of its own, set on the instance by some "
            "other library, which would hide the checkpointed one; apply the policy before that"
        )
    layer.__class__ = _checkpointed_class(layer_class, context_fn)  # type: ignore[arg-type]


def restore_layer(layer: torch.nn.Module) -> bool:
    """Undoes `checkpoint_layer`, and `replace_class`. Returns whether there was anything to undo.

    Raises:
        ValueError: another library changed the layer's class since, so it cannot be undone.
    """
    replaced = False
    while hasattr(layer_class := type(layer), "_sac_layer_class"):
        if "_sac_layer_class" not in layer_class.__dict__:
            raise ValueError(
                f"this layer became a {layer_class.__name__} after it was checkpointed; undo that "
                "first"
            )
        layer.__class__ = layer_class._sac_layer_class
        replaced = True
        if "_sac_undo" in layer_class.__dict__:
            layer_class._sac_undo(layer)  # type: ignore[attr-defined]
    return replaced


@functools.lru_cache(maxsize=256)
def _checkpointed_class(
    layer_class: type[torch.nn.Module], context_fn: Callable[[], Any] | None
) -> type[torch.nn.Module]:
    @functools.wraps(layer_class.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer_class.forward(self, *args, **kwargs)
        # All by position: checkpoint() has keywords of its own, and it restores the random state
        # of those devices only on which it finds positional arguments.
        function = functools.partial(_run_forward, layer_class.forward, self, tuple(kwargs))
        inputs = (*args, *kwargs.values())
        if context_fn is None:
            return checkpoint(function, *inputs, use_reentrant=False)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=context_fn)

    # Says by which copy of this file and how, so that one policy can tell its own layers.
    checkpointed = (checkpoint_layer, context_fn)
    return _subclass(layer_class, {"forward": forward, "_sac_checkpointed": checkpointed})


def replace_class(module: torch.nn.Module, members: dict[str, Any]) -> None:
    """Gives one module the members of a class; nothing else about it changes.

    A member `_sac_undo` is called with the module when `restore_layer` undoes this.
    """
    module.__class__ = _subclass(type(module), members)


def _subclass(layer_class: type[torch.nn.Module], members: dict[str, Any]) -> type[torch.nn.Module]:
    def __reduce_ex__(self: torch.nn.Module, protocol: Any) -> Any:
        # A pickled layer is a plain one: the subclass lives in this process only.
        reduced = layer_class.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        parts = (function, *arguments)
        make, *plain = (layer_class if part is type(self) else part for part in parts)
        # Bound in a partial, since pickle insists that `__newobj__` makes the very class it saves.
        return functools.partial(make, *plain), (), *rest

    def __copy__(self: torch.nn.Module) -> Any:
        return _copy_checkpointed(self, layer_class, copy.copy)

    def __deepcopy__(self: torch.nn.Module, memo: dict[int, Any]) -> Any:
        return _copy_checkpointed(self, layer_class, functools.partial(copy.deepcopy, memo=memo))

    def __instancecheck__(cls: type, instance: Any) -> bool:
        # Some libraries take the class of the first layer that has a name, and shard its instances:
        # that has to be every layer, however it is checkpointed and if not at all.
        if "_sac_layer_class" in cls.__dict__:
            return isinstance(instance, layer_class)
        return super(same, cls).__instancecheck__(instance)  # type: ignore[no-any-return]

    namespace = {
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        "__doc__": layer_class.__doc__,
        "_sac_layer_class": layer_class,
        "__reduce_ex__": __reduce_ex__,
        "__copy__": __copy__,
        "__deepcopy__": __deepcopy__,
        **members,
    }
    same: Any = type("Same", (type(layer_class),), {"__instancecheck__": __instancecheck__})
    return same(layer_class.__name__, (layer_class,), namespace)  # type: ignore[no-any-return]


def compiled_inside(layer: torch.nn.Module) -> str | None:
    """Returns what is compiled inside a layer, `mlp` or the layer's whole content; None if nothing.

    A policy around compiled code sees none of its ops, or all of them as one.
    """
    for name, module in layer.named_modules():
        if "_orig_mod" in module._modules:  # torch.compile(module)
            return str(name) or "all of it"
        if name and vars(module).get("_compiled_call_impl") is not None:  # module.compile()
            return str(name)
    return None


def _run_forward(
    forward: Callable[..., Any], layer: torch.nn.Module, keywords: tuple[str, ...], *inputs: Any
) -> Any:
    split = len(inputs) - len(keywords)
    named = dict(zip(keywords, inputs[split:], strict=True))
    return forward(layer, *inputs[:split], **named)


def _copy_checkpointed(
    layer: torch.nn.Module,
    layer_class: type[torch.nn.Module],
    copy_plain: Callable[[torch.nn.Module], Any],
) -> Any:
    checkpointed_class = type(layer)
    layer.__class__ = layer_class
    try:
        duplicate = copy_plain(layer)
    finally:
        layer.__class__ = checkpointed_class
    duplicate.__class__ = checkpointed_class
    return duplicate
