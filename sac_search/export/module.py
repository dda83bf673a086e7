"""The exported module: the runtime's own text, then the policy's data, then how to use it.

Names of layers, ops, devices and studies reach the module only as Python literals, so whatever they
contain cannot change its code.
"""

from __future__ import annotations

import ast
import inspect
import pprint
from collections.abc import Mapping, Sequence
from typing import Any

from sac_search import policy_runtime, records
from sac_search.policy import Policy, Tier, describe_tier

_USAGE = """
In the training script, before torch.compile, DDP or fully_shard:

    import {module}
    {module}.apply(model)

or by hand, layer by layer:

    from torch.utils.checkpoint import checkpoint
    out = checkpoint(layer, x, use_reentrant=False{context_fn})
"""

_TAIL = '''

# The layers that are checkpointed (fully qualified names), each with the index of its tier.
LAYERS = {layers}

# Where these figures come from: environment, budget, evidence.
META = {meta}

TIERS = ({tiers})
{functions}

def apply(model: torch.nn.Module) -> torch.nn.Module:
    """Checkpoints the policy's layers of `model` and returns the model.

    Parameter names, state-dict keys and `isinstance` answers stay as they are.

    Raises:
        ValueError: the model lacks some of the layers, or one of them is checkpointed already or
            has a forward of its own. Nothing is changed then.
    """
    modules = dict(model.named_modules())
    missing = [name for name in LAYERS if name not in modules]
    if missing:
        raise ValueError(
            f"{{type(model).__name__}} has no layer {{', '.join(missing[:5])}}"
            + (f" and {{len(missing) - 5}} more" if len(missing) > 5 else "")
            + ". The policy was made for a model with these names: apply it before the model is "
            "wrapped, or search again for this one."
        )
    _warn_of_device(model)
    done = []
    try:
        for name, tier in LAYERS.items():
            checkpoint_layer(modules[name], _CONTEXT_FNS[tier])
            done.append(modules[name])
    except BaseException:
        for module in done:
            restore_layer(module)
        raise
    return model


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `apply` exactly and returns the model.

    Raises:
        ValueError: another library changed a layer's class since.
    """
    for module in model.modules():
        restore_layer(module)
    return model


def _warn_of_device(model: torch.nn.Module) -> None:
    device = next((parameter.device for parameter in model.parameters()), None)
    made_for = META["environment"]
    if device is None or device.type == "meta":
        return
    if device.type != made_for["device"]:
        _warn(f"it was measured on {{made_for['device_name']}}, and this model is on {{device}}", 4)
    elif device.type != "cpu":
        try:
            name = torch.get_device_module(device).get_device_name(device)
        except (AttributeError, RuntimeError):  # a backend that tells no name
            return
        if name != made_for["device_name"]:
            _warn(f"it was measured on {{made_for['device_name']}}, and this is {{name}}", 4)


def _warn(difference: str, stacklevel: int = 3) -> None:
    warnings.warn(
        f"sac-search policy {{META['study_name']!r}}: {{difference}}. Results stay right; memory "
        "and time may differ.",
        stacklevel=stacklevel,
    )


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


if _release(torch.__version__) != _release(META["environment"]["torch_version"]):
    _warn(
        f"it was made with torch {{META['environment']['torch_version']}}, and this is "
        f"{{torch.__version__}}"
    )
'''

_TIER_FUNCTIONS = '''

def policy_fn{suffix}(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Says for one op: save it, or recompute it. {description}"""
    return TIERS[{index}].decide(op, args, kwargs)


def context_fn{suffix}() -> Any:
    """Is the `context_fn` of torch.utils.checkpoint.checkpoint."""
    return create_selective_checkpoint_contexts(policy_fn{suffix})
'''


def render_module(
    policy: Policy,
    *,
    meta: Mapping[str, Any],
    headline: Sequence[str],
    module_name: str = "policy",
) -> str:
    """Returns the text of the module.

    `headline` are the lines of figures for its docstring; `meta` is plain data with at least
    `study_name` and `environment`.

    Raises:
        ValueError: the policy counts calls and can only be measured, not shipped; or `meta` holds
            something that is not plain data.
    """
    if not policy.exportable:
        raise ValueError("this policy counts calls, so it is a reference and cannot be exported")
    tiers = policy.tiers or (Tier(),)
    layers = {choice.name: choice.tier for choice in policy.layers}
    full_meta = {**meta, "policy": records.to_builtins(policy)}
    functions = "".join(
        _TIER_FUNCTIONS.format(
            suffix="" if index == 0 else f"_{index + 1}",
            index=index,
            description=_escape(f"This tier: {describe_tier(tier)}.").replace("\n", " "),
        )
        for index, tier in enumerate(tiers)
    )
    tail = _TAIL.format(
        layers=_literal(layers),
        meta=_literal(full_meta),
        tiers="\n    " + "\n    ".join(_render_tier(tier) for tier in tiers) + "\n",
        functions=functions + _render_context_fns(tiers),
    )
    # By hand, too, a tier that saves nothing is plain checkpointing.
    context_fn = "" if tiers[0].is_plain else f", context_fn={module_name}.context_fn"
    usage = _USAGE.format(module=module_name, context_fn=context_fn)
    text = _docstring("\n".join(headline) + "\n" + usage) + _runtime_text() + tail
    ast.parse(text)
    return text


def _runtime_text() -> str:
    source = inspect.getsource(policy_runtime)
    body = source.split("from __future__ import annotations\n", 1)[1]
    return "from __future__ import annotations\n" + body.replace(
        "import functools\n", "import functools\nimport warnings\n", 1
    )


def _render_tier(tier: Tier) -> str:
    return f"SaveSet({_literal(list(tier.ops), indent=8)}, save_random={tier.save_random!r}),"


def _render_context_fns(tiers: Sequence[Tier]) -> str:
    names = [
        "None" if tier.is_plain else f"context_fn{'' if index == 0 else f'_{index + 1}'}"
        for index, tier in enumerate(tiers)
    ]
    return (
        "\n\n# None is plain checkpointing: a policy that saves nothing would only cost time.\n"
        f"_CONTEXT_FNS = ({', '.join(names)},)\n"
    )


def _literal(value: Any, indent: int = 0) -> str:
    text = pprint.pformat(value, width=96 - indent, sort_dicts=False)
    try:
        equal = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):  # NaN, infinity, an object
        equal = False
    if not equal:
        raise ValueError(f"{value!r} cannot be written as a Python literal")
    return text.replace("\n", "\n" + " " * indent)


def _docstring(text: str) -> str:
    return f'"""{_escape(text).rstrip()}\n"""\n\n'


def _escape(text: str) -> str:
    printable = "".join(c if c == "\n" or c.isprintable() else "?" for c in text)
    return printable.replace("\\", "\\\\").replace('"', '\\"')
