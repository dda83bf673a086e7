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

from sac_search import policy_runtime
from sac_search.export import exported
from sac_search.policy import Compiled, Policy, Tier, describe_tier, policy_document

_USAGE = """
In the training script, before torch.compile, DDP or fully_shard:

    import {module}
    {module}.apply(model)  # {module}.remove(model) undoes it

A transformers model wants {module}.apply_hf(model) instead. Leave the frameworks' own checkpointing
off; then, in

  Trainer, TRL, PEFT    {module}.apply_hf(model)  # the PEFT model, or what it will wrap
                        Trainer(model, args)  # gradient_checkpointing=True does nothing now
  accelerate            {module}.apply(model)  # FSDP2: leave fsdp_activation_checkpointing false
                        model, optimizer = accelerator.prepare(model, optimizer)
  Lightning             def configure_model(self):
                            {module}.apply(self.net)
  diffusers             {module}.apply_hf(pipeline.transformer)
    by its hooks        unet.enable_gradient_checkpointing({module}.checkpoint_fn_for(unet))
  timm                  model = timm.create_model(...)  # and no set_grad_checkpointing()
                        {module}.apply(model)
  torchtitan            {module}.apply(model)  # in parallelize_fn, in place of ac_config's
    layer by layer      def _wrap_block(self, module, *, base_fqn=None):
                            return {module}.wrap(module, base_fqn)
  torch.compile         {compile}
  DDP                   {module}.apply(model)
                        model = DistributedDataParallel(model)
  FSDP2                 {module}.apply(model)  # then torch.compile, then
                        for layer in model.layers: fully_shard(layer)
  torch's own way       apply_activation_checkpointing(
                            model, {module}.wrapper_fn_for(model), {module}.check_fn_for(model))

or by hand, layer by layer:

    from torch.utils.checkpoint import checkpoint
    out = checkpoint(layer, x, use_reentrant=False{context_fn})
"""

_EAGER_USAGE = """{module}.apply(model)
                        model = torch.compile(model)"""
_COMPILED_USAGE = """{module}.apply(model)  # compiles it, too: call no torch.compile
    compiled by you     {module}.apply(model, compile=False)"""

_DATA = """

# The layers that are checkpointed (fully qualified names), each with the index of its tier.
LAYERS = {layers}

# What apply(model) gives model.compile(), and sets in torch._functorch.config meanwhile; None
# leaves compiling to others.
COMPILE = {compile}
SETTINGS = {settings}

# Where these figures come from: environment, budget, evidence.
META = {meta}

TIERS = ({tiers})
{functions}
"""

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
    compile_arguments: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of the module.

    `compile_arguments` are those of `torch.compile`, for a policy that is compiled.

    `headline` are the lines of figures for its docstring; `meta` is plain data with at least
    `study_name` and `environment`.

    Raises:
        ValueError: the policy counts calls and can only be measured, not shipped; or `meta` holds
            something that is not plain data.
    """
    if not policy.exportable:
        raise ValueError("this policy counts calls, so it is a reference and cannot be exported")
    compiled = policy.compiled
    arguments = None if compiled is None else dict(compile_arguments or {})
    tiers = policy.tiers or (Tier(),)
    layers = {choice.name: choice.tier for choice in policy.layers}
    full_meta = {**meta, "policy": policy_document(policy)}
    functions = "".join(
        _TIER_FUNCTIONS.format(
            suffix="" if index == 0 else f"_{index + 1}",
            index=index,
            description=_escape(f"This tier: {describe_tier(tier)}.").replace("\n", " "),
        )
        for index, tier in enumerate(tiers)
    )
    data = _DATA.format(
        layers=_literal(layers),
        compile=_literal(arguments),
        settings=_literal({} if compiled is None else compiled.settings),
        meta=_literal(full_meta),
        tiers="\n    " + "\n    ".join(_render_tier(tier, compiled) for tier in tiers) + "\n",
        functions=functions + _render_context_fns(tiers),
    )
    # By hand, too, a tier that saves nothing is plain checkpointing.
    context_fn = "" if tiers[0].is_plain else f", context_fn={module_name}.context_fn"
    usage = _USAGE.format(
        module=module_name,
        context_fn=context_fn,
        compile=(_COMPILED_USAGE if compiled is not None else _EAGER_USAGE).format(
            module=module_name
        ),
    )
    text = (
        _docstring("\n".join(headline) + "\n" + usage) + _runtime_text() + data + _functions_text()
    )
    ast.parse(text)
    return text


def _runtime_text() -> str:
    body = inspect.getsource(policy_runtime).split("from __future__ import annotations\n", 1)[1]
    for old, new in (
        ("import functools\n", "import functools\nimport warnings\nimport weakref\n"),
        ("from typing import Any\n", "from typing import Any, NamedTuple\n"),
    ):
        assert old in body
        body = body.replace(old, new, 1)
    return "from __future__ import annotations\n" + body


def _functions_text() -> str:
    return inspect.getsource(exported).partition("\n\n# ---")[2].partition("\n\n")[2]


def _render_tier(tier: Tier, compiled: Compiled | None) -> str:
    prefer = "" if compiled is None else f", prefer={compiled.prefer!r}"
    ops = _literal(list(tier.ops), indent=8)
    return f"SaveSet({ops}, save_random={tier.save_random!r}{prefer}),"


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
