"""Puts a policy on a model, and takes it off again."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sac_search.errors import UsageError
from sac_search.opclasses import OpClass, classify
from sac_search.policy import Policy, Tier
from sac_search.policy_runtime import (
    SaveSet,
    checkpoint_layer,
    compiled_inside,
    restore_layer,
    select_op,
    tier_contexts,
)


class PolicyModule(Protocol):
    """An exported policy module, as far as it is needed to try it."""

    def apply(self, model: torch.nn.Module) -> Any:  # and `compile`, of those that are compiled
        """Checkpoints the policy's layers."""

    def remove(self, model: torch.nn.Module) -> Any:
        """Undoes it."""


def apply_policy(model: torch.nn.Module, policy: Policy) -> None:
    """Makes the policy's layers run under checkpointing, from now on.

    Raises:
        UsageError: the model lacks some of the layers, or one of them is checkpointed already or
            cannot be, or the policy is for a compiled model (see `compiling`); then nothing is
            changed.
    """
    if policy.compiled is not None:
        raise UsageError("this policy is for a compiled model, and nothing compiles it here")
    apply_layers(model, policy)


def apply_layers(model: torch.nn.Module, policy: Policy) -> None:
    """Makes the policy's layers run under checkpointing, whether the model is compiled or not.

    Raises:
        UsageError: as `apply_policy`, save that it may be for a compiled model.
    """
    modules = dict(model.named_modules())
    missing = [name for name in policy.layer_names if name not in modules]
    if missing:
        raise UsageError(
            f"the model ({type(model).__name__}) has no layer {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            + "; the policy was made for another model, or the model is wrapped"
        )
    for choice in policy.layers:
        inside = compiled_inside(modules[choice.name])
        if inside is not None and not policy.tiers[choice.tier].saves_nothing:
            raise UsageError(f"{choice.name} {_HOLDS_COMPILED.format(inside)}")
    prefer = None if policy.compiled is None else policy.compiled.prefer
    context_fns = [context_fn_for(tier, prefer) for tier in policy.tiers]
    done: list[torch.nn.Module] = []
    try:
        for choice in policy.layers:
            checkpoint_layer(modules[choice.name], context_fns[choice.tier])
            done.append(modules[choice.name])
    except BaseException as error:
        for module in done:
            restore_layer(module)
        if isinstance(error, (ValueError, TypeError)):  # TypeError: a class that has no subclasses
            raise UsageError(f"{choice.name} cannot be checkpointed: {error}") from error
        raise


def remove_policy(model: torch.nn.Module) -> int:
    """Undoes `apply_policy` exactly. Returns how many layers were checkpointed.

    Raises:
        UsageError: another library changed a layer's class since.
    """
    try:
        return sum(restore_layer(module) for module in model.modules())
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def applied(model: torch.nn.Module, policy: Policy | PolicyModule) -> Iterator[None]:
    """Applies the policy, or an exported module's, inside the `with` block only."""
    if not isinstance(policy, Policy):
        policy.apply(model)
        try:
            yield
        finally:
            policy.remove(model)
        return
    apply_policy(model, policy)
    try:
        yield
    finally:
        remove_policy(model)


def load_policy_module(path: Path) -> PolicyModule:
    """Imports an exported module from its file.

    Raises:
        UsageError: there is no such file, or it is not an exported policy.
    """
    if not path.is_file():
        raise UsageError(f"there is no policy file {str(path)!r}")
    module = types.ModuleType("_sac_policy")
    module.__file__ = str(path)
    # As an import by name would, so that the module's classes can be pickled.
    sys.modules[module.__name__] = module
    try:
        # Not by a loader: it would leave a __pycache__ beside the study's files, and take a file
        # written again within the second for the old one.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in ("apply", "remove", "LAYERS", "META") if not hasattr(module, name)]
    if missing:
        raise UsageError(f"{path} is not a policy that sac-search exported: no {missing[0]} in it")
    loaded: PolicyModule = module
    return loaded


_HOLDS_COMPILED = (
    "holds compiled code ({}), whose ops no policy around it can tell apart: compile around the "
    "layers instead (the policy first, then torch.compile(model)), or recompute all of it"
)


@functools.lru_cache(maxsize=1024)
def context_fn_for(tier: Tier, prefer: bool | None = None) -> Callable[[], Any] | None:
    """Returns the tier's `context_fn`, or None where plain checkpointing does the same.

    Always the very same one, so that a compiled model whose policy is taken off and put on again
    finds what was compiled before. `prefer` is that of a `SaveSet`.
    """
    if tier.is_plain:
        return None
    save_set = SaveSet(tier.ops, save_random=tier.save_random, prefer=prefer)
    if tier.every_second_matmul:
        return functools.partial(_alternating_contexts, save_set)
    return functools.partial(tier_contexts, save_set)


def _alternating_contexts(save_set: SaveSet) -> Any:
    # One counter for the forward and one for the recompute: releases before 2.12 ask the policy in
    # both, and both have to see the same sequence.
    counts = {False: 0, True: 0}

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = select_op(save_set, ctx, op, *args, **kwargs)
        if classify(str(op)) is not OpClass.MATMUL:
            return decision
        counts[ctx.is_recompute] += 1
        if counts[ctx.is_recompute] % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return decision

    return create_selective_checkpoint_contexts(policy_fn)
