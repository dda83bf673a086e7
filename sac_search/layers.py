"""Finds the layers of a model: the modules that can each be checkpointed as one region.

A layer is a transformer block, a residual block, a stage of a plain convolutional net. One forward
pass is watched, because a `ModuleList` does not say whether its modules run one after another (the
blocks of a stack) or side by side (the experts of a mixture, the heads of a detector). Needs torch
alone, holds no activation alive and changes nothing in the model.

Known limits: only calls through `module(...)` are seen, not `module.forward(...)` or those inside a
ScriptModule. Data that leaves torch between two blocks (NumPy, Python numbers) hides that one
depends on the other. Compiled code runs eagerly in this pass, flex_attention with its whole score
matrix.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sac_search.errors import WorkloadError
from sac_search.lineage import Calls, is_block_like, watch_calls

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Less than half of what a container holds: its blocks are the frame around something bigger.
_LEAST_CONTAINER_FRACTION = 0.5
# A stage may spend the rest on a downsampling or a norm of its own.
_LEAST_STAGE_FRACTION = 0.6
# Attributes of one class in a corner of the model (the convolutions of a stem) are no layers.
_LEAST_ATTRIBUTE_FRACTION = 0.1
_ADVICE = "name the layers with --layers 'model.layers.*' or Workload(layers=...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module that can be checkpointed as one region."""

    name: str
    """Fully qualified name, as in `model.named_modules()`."""
    class_name: str
    """The name of the module's class."""
    shape_key: str
    """Hash of the class and of the names and shapes of all parameters inside."""
    parameter_count: int
    """Elements in all parameters inside, each parameter once."""


def find_layers(
    model: nn.Module,
    run_forward: Callable[[], object],
    patterns: Sequence[str] | str | None = None,
) -> list[Layer]:
    """Returns the layers of `model`, in the order in which they first run.

    `run_forward()` runs one forward pass; it is called once, with hooks on every module. Whatever
    it raises goes through.

    `patterns` name the layers: `*` stands for anything within one segment of the name, `**` for any
    number of segments, a comma separates patterns. Of nested matches the outermost that runs is
    kept. Without patterns the layers are found: the blocks of every `ModuleList`, `Sequential` and
    `ModuleDict` (or modules of one class that are attributes of one parent) that run one after
    another, or one block that runs again and again. If those blocks are stages, made of a chain of
    alike blocks, the blocks of the stages are the layers.

    Raises:
        WorkloadError: no layer found, a pattern matches nothing, or no match ever runs.
    """
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    if patterns is None:
        calls = watch_calls(model, run_forward, follow_tensors=True)
        found = _Search(model, calls).find_layers()
        if not found:
            raise WorkloadError(_nothing_found_message(names, calls))
    else:
        matched = _match(model, names, _split_patterns(patterns))
        calls = watch_calls(model, run_forward, follow_tensors=False)
        found = [module for module in matched if calls[module]]
        if not found:
            raise WorkloadError(_never_runs_message([names[m] for m in matched], names, calls))
    found = _drop_nested(found, calls)
    return [_describe(names[m], m) for m in sorted(found, key=lambda m: calls[m][0].start)]


def group_layers(
    layers: Sequence[Layer], signatures: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Returns the names of the layers of each kind, both in the order of `layers`.

    Layers are of one kind when they share class, parameter shapes and, where `signatures` has one
    for them by name, signature. A kind is called after its class: `Block`, then `Block#2`.
    """
    kinds: dict[tuple[str, str, str | None], list[str]] = {}
    for layer in layers:
        signature = signatures.get(layer.name) if signatures else None
        kinds.setdefault((layer.class_name, layer.shape_key, signature), []).append(layer.name)
    named: dict[str, list[str]] = {}
    kinds_of_class: defaultdict[str, int] = defaultdict(int)
    for (class_name, _, _), layer_names in kinds.items():
        kinds_of_class[class_name] += 1
        number = kinds_of_class[class_name]
        named[class_name if number == 1 else f"{class_name}#{number}"] = layer_names
    return named


def _describe(name: str, module: nn.Module) -> Layer:
    # The module of the class is left out: it depends on how the user's file was imported.
    text = type(module).__qualname__
    for parameter_name, parameter in module.named_parameters():
        text += f"\n{parameter_name} {list(parameter.shape)}"
    return Layer(
        name=name,
        class_name=type(module).__name__,
        shape_key=hashlib.sha256(text.encode()).hexdigest()[:12],
        parameter_count=_count_parameters([module]),
    )


# --- finding layers ---


class _Search:
    """Finds the layers of a model whose forward pass was watched."""

    def __init__(self, model: nn.Module, calls: Calls) -> None:
        self._model = model
        self._calls = calls
        self._parameter_count = _count_parameters(m for m in model.children() if self._runs(m))

    def find_layers(self) -> list[nn.Module]:
        """Returns the layers of the model."""
        return self._find_at(self._model)

    def _find_at(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, _CONTAINERS):
            blocks = self._find_chain(module)
            stages = self._split_stages(blocks, _LEAST_STAGE_FRACTION)
            found = [layer for block in blocks for layer in stages.get(block, [block])]
            # A ModuleDict may hold a block beside the list of the others; that one never runs.
            others = [m for m in module.children() if not (blocks and self._calls[m])]
        else:
            found = []
            others = list(module.children())
            for blocks in self._find_alike_attributes(module):
                # Attributes are weak evidence, so any chain inside them goes first.
                stages = self._split_stages(blocks, 0)
                replaced = [block for block in blocks if block in stages] or blocks
                found += [layer for block in replaced for layer in stages.get(block, [block])]
                others = [m for m in others if m not in replaced]
        return found + [layer for child in others for layer in self._find_at(child)]

    def _find_chain(self, container: nn.Module) -> list[nn.Module]:
        """Returns the blocks of `container`, or nothing unless they run one after another."""
        children = list(dict.fromkeys(container.children()))
        blocks = [m for m in children if self._calls[m] and is_block_like(m)]
        # Beside real blocks an element-wise module (a norm of one's own) is no block.
        blocks = [m for m in blocks if _count_weights(m)] or blocks
        enough = self._hold_enough(blocks, children)
        return blocks if enough and self._is_chain(blocks) else []

    def _find_alike_attributes(self, parent: nn.Module) -> list[list[nn.Module]]:
        """Returns the chains of children that share a class, if they make up `parent`."""
        by_class: defaultdict[type, list[nn.Module]] = defaultdict(list)
        children = list(dict.fromkeys(parent.children()))
        for child in children:
            # A module with one weight is a linear layer by another name.
            composed = any(True for _ in child.children()) or _count_weights(child) > 1
            if self._calls[child] and composed and _count_weights(child):
                by_class[type(child)].append(child)
        chains = [m for m in by_class.values() if self._is_chain(m)]
        together = [member for chain in chains for member in chain]
        least = _LEAST_ATTRIBUTE_FRACTION * self._parameter_count
        if _count_parameters(together) < least or not self._hold_enough(together, children):
            return []
        return chains

    def _hold_enough(self, blocks: list[nn.Module], children: list[nn.Module]) -> bool:
        held = _count_parameters(child for child in children if self._runs(child))
        return _count_parameters(blocks) >= _LEAST_CONTAINER_FRACTION * held

    def _runs(self, module: nn.Module) -> bool:
        return any(self._calls[below] for below in module.modules())

    def _is_chain(self, blocks: list[nn.Module]) -> bool:
        calls = sorted((c for m in blocks for c in self._calls[m]), key=lambda c: c.start)
        pairs = list(itertools.pairwise(calls))
        return bool(pairs) and 2 * sum(a.feeds(b) for a, b in pairs) >= len(pairs)

    def _split_stages(
        self, blocks: list[nn.Module], least_fraction: float
    ) -> dict[nn.Module, list[nn.Module]]:
        """Returns the layers inside each of `blocks` that is a stage and not a layer itself."""
        chains = {block: self._find_inner_chains(block, least_fraction) for block in blocks}
        passing = [b for b in blocks if chains[b] and all(self._is_stage(b, c) for c in chains[b])]
        inner_classes = {type(chain[0]) for stage in passing for chain in chains[stage]}
        lone = {b: self._find_lone_blocks(b, inner_classes) for b in blocks if b not in passing}
        # Blocks of one class are split alike, so the majority decides.
        balance = Counter(type(block) for block in passing)
        balance.subtract(type(block) for block in lone if chains[block] and not lone[block])
        if not any(count > 0 for count in balance.values()):
            return {}
        layers: dict[nn.Module, list[nn.Module]] = {}
        for block in blocks:
            if inner := lone.get(block):
                layers[block] = inner
            elif chains[block] and balance[type(block)] > 0:
                layers[block] = [m for chain in chains[block] for m in self._flatten(chain)]
        return layers

    def _flatten(self, blocks: list[nn.Module]) -> list[nn.Module]:
        stages = self._split_stages(blocks, _LEAST_STAGE_FRACTION)
        return [layer for block in blocks for layer in stages.get(block, [block])]

    def _find_inner_chains(self, block: nn.Module, least_fraction: float) -> list[list[nn.Module]]:
        """Returns the chains of two or more blocks of one class that make up `block`."""
        chains = [
            chain
            for chain in self._walk_chains(block)
            if len(chain) > 1 and len({type(m) for m in chain}) == 1
        ]
        inside = _count_parameters(itertools.chain(*chains))
        return chains if inside >= least_fraction * _count_parameters([block]) else []

    def _walk_chains(self, module: nn.Module) -> Iterator[list[nn.Module]]:
        blocks = self._find_chain(module) if isinstance(module, _CONTAINERS) else []
        if blocks:
            yield blocks
        else:
            for child in module.children():
                yield from self._walk_chains(child)

    def _is_stage(self, block: nn.Module, chain: list[nn.Module]) -> bool:
        """Tells a stage of residual blocks from a residual block of a few convolutions.

        What the last block of a stage returns is what the stage returns, while a residual block
        still adds its input. A stage that adds something, too, is known by its blocks: there is
        more than one weight in each.
        """
        if all(_count_weights(m) > 1 for m in chain):
            return True
        last = max((c for m in chain for c in self._calls[m]), key=lambda c: c.end)
        return any(
            last.outputs & call.outputs for call in self._calls[block] if call.contains(last)
        )

    def _find_lone_blocks(self, stage: nn.Module, classes: set[type]) -> list[nn.Module]:
        """Returns the one block of a container in `stage`, if it is of one of `classes`."""
        if isinstance(stage, _CONTAINERS):
            blocks = [m for m in stage.children() if self._calls[m] and is_block_like(m)]
            if len(blocks) == 1 and type(blocks[0]) in classes:
                return blocks
        return [m for child in stage.children() for m in self._find_lone_blocks(child, classes)]


def _count_weights(module: nn.Module) -> int:
    """Counts the parameters that multiply (matrices, kernels), not those that scale or shift."""
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _count_parameters(modules: Iterable[nn.Module]) -> int:
    """Counts the elements of all parameters in `modules`, each parameter once."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def _drop_nested(found: list[nn.Module], calls: Calls) -> list[nn.Module]:
    """Leaves out modules that are part of, or run inside, another one: regions may not nest."""
    below = {below for module in found for below in module.modules() if below is not module}
    outer = [module for module in dict.fromkeys(found) if module not in below]
    spans = sorted((call for module in outer for call in calls[module]), key=lambda c: c.start)
    nested: set[nn.Module] = set()
    outermost = spans[0]
    for call in spans[1:]:
        if not outermost.contains(call):
            outermost = call
        elif call.module is not outermost.module:
            nested.add(call.module)
    return [module for module in outer if module not in nested]


# --- patterns ---


def _split_patterns(patterns: Sequence[str] | str) -> list[str]:
    given = [patterns] if isinstance(patterns, str) else patterns
    split = [part.strip() for pattern in given for part in pattern.split(",")]
    if not any(split):
        raise WorkloadError(f"the layer patterns {patterns!r} name nothing; {_ADVICE}")
    return [part for part in split if part]


def _match(model: nn.Module, names: dict[nn.Module, str], patterns: list[str]) -> list[nn.Module]:
    """Returns every module that one of `patterns` matches, under any of its names."""
    found: dict[nn.Module, None] = {}
    for pattern in patterns:
        segments = pattern.split(".")
        matched = [
            module
            for name, module in model.named_modules(remove_duplicate=False)
            if name and _matches(name.split("."), segments)
        ]
        if not matched:
            raise WorkloadError(_no_match_message(pattern, names))
        found.update(dict.fromkeys(matched))
    return list(found)


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return (
        bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
    )


# --- messages ---


def _generalise(name: str) -> str:
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


def _no_match_message(pattern: str, names: dict[nn.Module, str]) -> str:
    known = list(dict.fromkeys(_generalise(name) for name in names.values() if name))
    wanted = _generalise(pattern)
    near = [name for name in known if name.endswith(f".{wanted}")]
    near += difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {_join(dict.fromkeys(near), 3)}?"
    else:
        hint = f"the model has {_join(known, 5) if known else 'no submodules'}"
    return f"no module of the model matches the layer pattern {pattern!r}; {hint}"


def _never_runs_message(matched: list[str], names: dict[nn.Module, str], calls: Calls) -> str:
    inside = [
        _generalise(name)
        for module, name in names.items()
        if calls[module] and name.rpartition(".")[0] in matched
    ]
    hint = f"did you mean {_join(dict.fromkeys(inside), 3)}?" if inside else _ADVICE
    return (
        f"the layer patterns match {_join(matched, 3)}, but the forward pass calls none of them; "
        + hint
    )


def _nothing_found_message(names: dict[nn.Module, str], calls: Calls) -> str:
    if not any(calls.values()):
        return (
            "no layers found: the forward pass calls no module of the model; "
            "loss_fn must call the model that the workload names"
        )
    # Composed modules first: a region around a single linear layer gains nothing.
    running = [module for module, name in names.items() if name and calls[module]]
    running.sort(key=lambda module: not is_block_like(module))
    candidates = [f"{_generalise(names[m])} ({type(m).__name__})" for m in running]
    listed = _join(dict.fromkeys(candidates), 5) if candidates else "no submodule"
    return (
        "no layers found: looked for two or more blocks that run one after another, in a "
        "ModuleList, a Sequential, a ModuleDict or as attributes of one class; "
        f"{_ADVICE}; the forward pass runs {listed}"
    )


def _join(names: Iterable[str], most: int) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
