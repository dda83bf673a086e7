"""What an exported module does with its policy: puts it on a model, for each framework its way.

The text of this file, from the line that begins with `# ---` on, ends every exported module. Above
it is what stands before that text there: the runtime, and the policy's data. It needs torch alone.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from sac_search.policy_runtime import (
    checkpoint_layer,
    compiled_inside,
    replace_class,
    restore_layer,
)

LAYERS: dict[str, int] = {}
COMPILE: dict[str, Any] | None = None
SETTINGS: dict[str, Any] = {}
META: dict[str, Any] = {"study_name": "", "environment": {"torch_version": torch.__version__}}
_CONTEXT_FNS: tuple[Callable[[], Any] | None, ...] = ()

# --- putting the policy on a model ----------------------------------------------------------------

# What wrappers put into names: torch.compile, FSDP1, CheckpointWrapper; DDP and DataParallel.
_CERTAIN_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = frozenset((*_CERTAIN_WRAPPERS, "module"))
# The switches of Hugging Face models' own checkpointing, and those of diffusers' models.
_ENABLERS = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
)
# What torch.utils.checkpoint.checkpoint takes for itself.
_OPTIONS = frozenset(("preserve_rng_state", "determinism_check", "debug", "early_stop"))
# The models that `apply` compiled, each with the settings and the call that it had before.
_COMPILED = weakref.WeakKeyDictionary[torch.nn.Module, tuple[dict[str, Any], Any]]()
# What to do when a model is checkpointed already.
_WRAPPED = "leave CheckpointWrapper out, the policy takes its place."
_SWITCHED_ON = (
    "switch that off first, by gradient_checkpointing_disable() in transformers, "
    "disable_gradient_checkpointing() in diffusers, set_grad_checkpointing(False) in timm."
)


def apply(model: torch.nn.Module, compile: bool = True) -> torch.nn.Module:  # noqa: A002
    """Checkpoints the policy's layers of `model` and returns the model.

    A policy that was found for a compiled model compiles it, too, by `model.compile(**COMPILE)`,
    and sets SETTINGS (torch's `activation_memory_budget` above all) in `torch._functorch.config`
    until `remove`; with `compile=False` both are left to you. Other policies compile nothing.

    Parameter names, state-dict keys and `isinstance` answers stay as they are. Layers are found by
    their names, also behind the wrappers of torch.compile, DDP, FSDP and PEFT, whether these wrap
    `model` or wrapped the model that the policy was made for. Does nothing where this policy is on.
    For a transformers model take `apply_hf`: its cache makes checkpoints fail.

    Raises:
        ValueError: the model lacks some of the layers, a name can mean several, or a layer is
            checkpointed in another way or has a forward of its own, or holds compiled code. Nothing
            is changed then.
    """
    _apply(model, compile)
    return model


def apply_hf(model: torch.nn.Module, compile: bool = True) -> torch.nn.Module:  # noqa: A002
    """Is `apply` for Hugging Face models, PEFT around them or not: the policy stays the only one.

    From then on the model's `gradient_checkpointing_enable()` and its like, which Trainer and TRL
    call, do nothing but warn once, whatever their arguments. `config.use_cache` is off, since a
    cache would grow once more in the recomputation; `remove` puts it back, so call that before
    `save_pretrained` writes the config. `enable_input_require_grads()` is not needed on a frozen
    base: these checkpoints are not reentrant.

    Raises:
        ValueError: as `apply`, or there is no such model.
    """
    owners = [
        module
        for module in model.modules()
        if any(hasattr(type(module), name) for name in _ENABLERS)
    ]
    if not owners:
        raise ValueError(f"{type(model).__name__} is no Hugging Face model: use apply(model)")
    _apply(model, compile)
    warned: list[bool] = []
    configs = []
    for owner in owners:
        if hasattr(type(owner), "_sac_undo"):
            continue
        config = getattr(owner, "config", None)
        use_cache = getattr(config, "use_cache", None)
        if use_cache:
            config.use_cache = False  # type: ignore[union-attr]
            configs.append(type(config).__name__)
        quiet = {
            name: _ignored(getattr(type(owner), name), warned)
            for name in _ENABLERS
            if hasattr(type(owner), name)
        }
        undo = functools.partial(_put_back, use_cache)
        replace_class(owner, {**quiet, "_sac_undo": undo})
    if configs:
        _warn(f"use_cache of {', '.join(configs)} is off until remove(model)", 3)
    return model


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes what the functions here did to the model, exactly, and returns it.

    Raises:
        ValueError: another library changed a layer's class since.
    """
    for module in model.modules():
        restore_layer(module)
        _undo_compile(module)
    return model


def wrap(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Checkpoints one layer, for code that builds or wraps its model layer by layer.

    `name` is the layer's whole name in the model. Returns the module, which is left untouched where
    the policy leaves that layer alone.

    Raises:
        ValueError: the name can mean several layers or is a part of one, or the layer is
            checkpointed already.
    """
    found = _match(name, _index(LAYERS))
    if len(found) > 1:
        raise ValueError(f"{name} can mean more than one layer of the policy: {', '.join(found)}")
    if found:
        layer = _unwrapped(module)[0]
        context_fn = _CONTEXT_FNS[LAYERS[found[0]]]
        _refuse_twice(module, {layer: _Found("", context_fn)})
        _refuse_compiled({layer: _Found(found[0], context_fn)})
        checkpoint_layer(layer, context_fn)
        return module
    for whole in LAYERS:
        if whole.endswith(f".{name}"):
            raise ValueError(f"{name} is a part of a name: say {whole}, if that is the layer")
    return module


def check_fn(module: torch.nn.Module) -> bool:
    """Always raises, to say that torch's `check_fn` has to know the model: see `check_fn_for`.

    Such functions get modules, and a module does not know its name in the model.
    """
    raise TypeError("a module does not know its name: use check_fn=check_fn_for(model)")


def check_fn_for(model: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
    """Returns the `check_fn` of torch's `apply_activation_checkpointing` for this very model."""
    return _find_layers(model).__contains__


def wrapper_fn_for(model: torch.nn.Module) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Returns the `checkpoint_wrapper_fn` of torch's `apply_activation_checkpointing`.

    It checkpoints a layer under its tier, as `apply` does: no name changes, `remove` undoes it.
    """
    layers = _find_layers(model)
    _refuse_twice(model, layers)
    _refuse_compiled(layers)

    def wrapper_fn(module: torch.nn.Module) -> torch.nn.Module:
        if module not in layers:
            raise ValueError(
                f"this {type(module).__name__} is no layer of the policy: give "
                "check_fn=check_fn_for(model) too"
            )
        checkpoint_layer(module, layers[module].context_fn)
        return module

    return wrapper_fn


def checkpoint_fn_for(model: torch.nn.Module) -> Callable[..., Any]:
    """Returns a function that runs `function(*args, **kwargs)`, checkpointed if it is a layer's.

    This is what diffusers' `enable_gradient_checkpointing` takes and `_gradient_checkpointing_func`
    of transformers is, and it can replace torch.utils.checkpoint.checkpoint in a model's own code.
    The layer is the module that is given, or whose method, partial or closure is. Anything else
    just runs, with one warning where that leaves a layer of the policy without its checkpoint. It
    belongs to this very model: a copy needs its own.
    """
    layers = _find_layers(model)
    others = {m for name, m in model.named_modules() if not _overlaps(name, layers)}
    warned: list[bool] = []

    def checkpoint_fn(
        function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any
    ) -> Any:
        if use_reentrant:
            raise ValueError("reentrant checkpoints take no policy: leave use_reentrant=True out")
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        given = _modules_of(function)
        layer = next((module for module in given if module in layers), None)
        if layer is None:
            if not warned and not any(module in others for module in given):
                warned.append(True)
                what = type(given[0]).__name__ if given else str(function)
                _warn(f"{what} is no layer of it, so it just runs; apply(model) needs no hooks", 3)
        elif not hasattr(type(layer), "_sac_checkpointed") and torch.is_grad_enabled():
            if layers[layer].context_fn is not None:
                options["context_fn"] = layers[layer].context_fn
            return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        return function(*args, **kwargs)

    return checkpoint_fn


def _apply(model: torch.nn.Module, compile: bool) -> None:  # noqa: A002
    layers = _find_layers(model)
    there = {
        module: type(module)._sac_checkpointed  # type: ignore[attr-defined]
        for module in model.modules()
        if hasattr(type(module), "_sac_checkpointed")
    }
    if there != {layer: (checkpoint_layer, found.context_fn) for layer, found in layers.items()}:
        _checkpoint(model, layers)
    is_compiled = any(module in _COMPILED for module in model.modules())
    if compile and COMPILE is not None and not is_compiled:
        _compile(model, COMPILE)


def _checkpoint(model: torch.nn.Module, layers: dict[torch.nn.Module, _Found]) -> None:
    _refuse_twice(model, layers)
    _refuse_compiled(layers)
    _warn_of_device(model)
    done = []
    try:
        for layer, found in layers.items():
            checkpoint_layer(layer, found.context_fn)
            done.append(layer)
    except BaseException:
        for layer in done:
            restore_layer(layer)
        raise


def _compile(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    from torch._functorch import config

    before = {name: getattr(config, name) for name in SETTINGS}
    _COMPILED[model] = (before, vars(model).get("_compiled_call_impl"))
    _set_settings(SETTINGS)
    model.compile(**arguments)


def _undo_compile(module: torch.nn.Module) -> None:
    if module not in _COMPILED:
        return
    settings, call = _COMPILED.pop(module)
    _set_settings(settings)
    del module._compiled_call_impl
    if call is not None:
        module._compiled_call_impl = call


def _set_settings(settings: dict[str, Any]) -> None:
    from torch._functorch import config

    # They stay, since torch compiles when the model first runs. Graphs that were compiled before
    # would be found again whatever these say, so they are dropped.
    if any(getattr(config, name) != value for name, value in settings.items()):
        for name, value in settings.items():
            setattr(config, name, value)
        torch.compiler.reset()


def _refuse_compiled(layers: dict[torch.nn.Module, _Found]) -> None:
    """Raises where ops would have to be told apart in what is one piece of compiled code."""
    for layer, found in layers.items():
        inside = compiled_inside(layer)
        if found.context_fn and inside is not None:
            raise ValueError(
                f"{type(layer).__name__} {found.name} holds compiled code ({inside}), whose ops "
                "no policy around it can tell apart. Apply the policy first, then compile the "
                "whole model."
            )


class _Found(NamedTuple):
    name: str
    context_fn: Callable[[], Any] | None


def _find_layers(model: torch.nn.Module) -> dict[torch.nn.Module, _Found]:
    """Returns the policy's layers in `model`, each with its name there."""
    modules = dict(model.named_modules())
    index = _index(modules)
    layers = {}
    missing = []
    for name, tier in LAYERS.items():
        names = _match(name, index)
        if len(names) > 1:
            raise ValueError(
                f"{name} can mean more than one layer of this {type(model).__name__}: "
                f"{', '.join(names)}. Apply the policy to the part that it was made for."
            )
        if names:
            layer, held_as = _unwrapped(modules[names[0]])
            layers[layer] = _Found(names[0] + held_as, _CONTEXT_FNS[tier])
        else:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        near = [name for name in modules if name.endswith(f".{missing[0]}")]
        hint = f"It has {', '.join(near[:3])}: apply the policy to that part. " if near else ""
        held = [name for name in modules if "." in name and missing[0].endswith(f".{name}")]
        if held:
            hint = f"It has {held[0]}: apply the policy to what holds this model. "
        raise ValueError(
            f"{type(model).__name__} has no layer {', '.join(missing[:5])}{more}. {hint}"
            "The policy was made for a model with these names; search again for another one."
        )
    return layers


def _index(names: Iterable[str]) -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    for name in names:
        for spelling in _spellings(name):
            index.setdefault(spelling, []).append(name)
    return index


def _match(name: str, index: dict[str, list[str]]) -> list[str]:
    """Returns the names that mean the same layer: this one, or one that only has a prefix more."""
    same = {other: True for spelling in _spellings(name) for other in index.get(spelling, ())}
    if name in same:
        return [name]
    ends = [other for other in same if f".{other}".endswith(f".{name}")]
    ends += [other for other in same if name.endswith(f".{other}")]
    # A wrapper around a layer has the layer's name too; `_unwrapped` looks into it.
    return ends or [
        other
        for other in same
        if other.rpartition(".")[2] not in _CERTAIN_WRAPPERS or other.rpartition(".")[0] not in same
    ]


def _spellings(name: str) -> set[str]:
    """Returns a name without what wrappers put into it, in the two ways in which PEFT may have."""
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    plain = "".join(f".{part}" for part in parts) + "."
    return {plain.replace(".base_model.model.", "."), plain.replace(".base_model.", ".")}


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Returns what the wrappers around one layer hold, and what that adds to its name."""
    suffix = ""
    while held := [name for name in _CERTAIN_WRAPPERS if name in module._modules]:
        module, suffix = module.get_submodule(held[0]), f"{suffix}.{held[0]}"
    return module, suffix


def _inside(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def _overlaps(name: str, layers: dict[torch.nn.Module, _Found]) -> bool:
    """Whether a module is a layer, inside one, or around one."""
    return any(_inside(name, found.name) or _inside(found.name, name) for found in layers.values())


def _refuse_twice(model: torch.nn.Module, layers: dict[torch.nn.Module, _Found]) -> None:
    """Raises where a layer, what holds it or what it holds is checkpointed in another way."""
    for name, module in model.named_modules():
        state = vars(module)
        on = state.get("gradient_checkpointing") is True or state.get("grad_checkpointing") is True
        wrapper = any(base.__name__ == "CheckpointWrapper" for base in type(module).__mro__)
        if not (on or wrapper) or not _overlaps(name, layers):
            continue
        function = state.get("_gradient_checkpointing_func")
        reentrant = (
            getattr(function, "keywords", {}).get("use_reentrant")
            or getattr(state.get("checkpoint_impl"), "name", "") == "REENTRANT"
        )
        raise ValueError(
            f"{type(module).__name__} {name}".rstrip() + " is checkpointed already"
            f"{', reentrantly, which takes no policy' if reentrant else ''}. With the policy, "
            f"layers would be checkpointed twice: {_WRAPPED if wrapper else _SWITCHED_ON}"
        )


def _ignored(enable: Callable[..., Any], warned: list[bool]) -> Callable[..., None]:
    @functools.wraps(enable)
    def ignore(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not warned:
            warned.append(True)
            _warn(f"{enable.__name__}() does nothing while it is on; remove(model) ends that", 3)

    return ignore


def _put_back(use_cache: Any, owner: torch.nn.Module) -> None:
    if use_cache:
        owner.config.use_cache = use_cache  # type: ignore[union-attr]


def _modules_of(function: Any) -> list[torch.nn.Module]:
    """Returns the modules that a function may be of, the likeliest first."""
    if isinstance(function, functools.partial):
        held = [*_modules_of(function.func), *function.args]
    else:
        held = [function, getattr(function, "__self__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
    return [_unwrapped(value)[0] for value in held if isinstance(value, torch.nn.Module)]


def _warn_of_device(model: torch.nn.Module) -> None:
    device = next((parameter.device for parameter in model.parameters()), None)
    made_for = META["environment"]
    if device is None or device.type == "meta":
        return
    if META.get("evidence") == "forecast":
        _warn(
            f"it is a forecast for {made_for['device_name']}: nothing was measured or verified", 5
        )
        return
    here = ""
    if device.type != made_for["device"]:
        here = f"this model is on {device}"
    elif device.type != "cpu":
        try:
            name = torch.get_device_module(device).get_device_name(device)
        except (AttributeError, RuntimeError):  # a backend that tells no name
            return
        if name != made_for["device_name"]:
            here = f"this is {name}"
    if here:
        _warn(f"it was measured on {made_for['device_name']}, and {here}{_STILL_RIGHT}", 6)


def _warn(text: str, stacklevel: int) -> None:
    warnings.warn(f"sac-search policy {META['study_name']!r}: {text}.", stacklevel=stacklevel)


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


_STILL_RIGHT = ". Results stay right; memory and time may differ"
if _release(torch.__version__) != _release(META["environment"]["torch_version"]):
    _warn(
        f"it was made with torch {META['environment']['torch_version']}, and this is "
        f"{torch.__version__}{_STILL_RIGHT}",
        3,
    )
