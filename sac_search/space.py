"""The search space: which decisions there are, and the policy that a set of them stands for.

One variable per op class that can be saved (`save.matmul`), one per layer kind for how many of its
layers are checkpointed, earliest first (`layers.GPT2Block`), or one per layer (`layer.h.3`).
Pure: no Optuna, no device.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sac_search.opclasses import OpClass, packets_of
from sac_search.policy import LayerChoice, Policy, Tier
from sac_search.trace import LayerTrace, OpTrace

# Classes that are never saved: an op that nobody knows, and communication.
_NEVER_SAVED = frozenset({OpClass.OTHER, OpClass.COLLECTIVE})
# A class that takes less than this part of the layers' time is not worth a variable.
_WORTH_FRACTION = 0.003


class Granularity(enum.StrEnum):
    """What one save-or-recompute decision covers."""

    CLASS = "class"
    """All ops of a class."""
    SITE = "site"
    """The ops of a class that have weights, or features, of one size."""


class LayerChoiceMode(enum.StrEnum):
    """How the set of checkpointed layers is searched."""

    COUNT = "count"
    """A number per layer kind: the earliest so many are checkpointed."""
    EACH = "each"
    """A decision per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variable of the search."""

    name: str
    """`save.matmul`, `layers.GPT2Block`, `layer.h.3`."""
    highest: int
    """Decisions are whole numbers from 0 to this; for save and layer decisions it is 1."""

    @property
    def is_count(self) -> bool:
        """Whether it counts layers, rather than saying yes or no."""
        return self.name.startswith("layers.")


Assignment = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The decisions for one workload."""

    layers: tuple[LayerTrace, ...]
    """The layers, in the order in which they run."""
    saves: Mapping[str, tuple[str, ...]]
    """For each `save.…` decision, the exact ops or op sites that it saves."""
    mode: LayerChoiceMode
    """How layers are chosen."""
    granularity: Granularity = Granularity.CLASS
    """What one decision covers."""

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Layer kinds, each with its layers in the order in which they run."""
        kinds: dict[str, list[str]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer.name)
        return kinds

    @property
    def decisions(self) -> list[Decision]:
        """All variables, always in the same order."""
        found = [Decision(name=name, highest=1) for name in self.saves]
        if self.mode is LayerChoiceMode.EACH:
            found += [Decision(name=f"layer.{layer.name}", highest=1) for layer in self.layers]
        else:
            found += [
                Decision(name=f"layers.{kind}", highest=len(names))
                for kind, names in self.kinds.items()
            ]
        return found

    @property
    def size(self) -> int:
        """How many assignments there are."""
        return math.prod(decision.highest + 1 for decision in self.decisions)

    def assignments(self) -> Iterator[Assignment]:
        """Yields every assignment; many of them may stand for one policy."""
        decisions = self.decisions
        for values in itertools.product(*(range(d.highest + 1) for d in decisions)):
            yield {d.name: value for d, value in zip(decisions, values, strict=True)}

    def policy_for(self, assignment: Assignment) -> Policy:
        """Returns the policy that the assignment stands for.

        Assignments that would run the same way give policies with equal keys: what no checkpointed
        layer runs is left out of the tier.
        """
        chosen = self._checkpointed(assignment)
        if not chosen:
            return Policy()
        names = [name for name in self.saves if assignment[name]]
        occurring = {
            (decision_name(op, self.granularity), saved_name(op, self.granularity))
            for layer in self.layers
            if layer.name in chosen
            for op in layer.ops
        }
        tier = make_tier(names, self.saves, occurring)
        layers = tuple(LayerChoice(name=la.name) for la in self.layers if la.name in chosen)
        return Policy(tiers=(tier,), layers=layers)

    def assignment_for(
        self, layer_names: Sequence[str], classes: Sequence[str]
    ) -> Assignment | None:
        """Returns the assignment that checkpoints exactly these layers, or None if none does."""
        wanted = set(layer_names)
        if not wanted.issubset(la.name for la in self.layers):
            return None
        assignment = {
            name: int(name.removeprefix("save.") in classes or class_of(name) in classes)
            for name in self.saves
        }
        if self.mode is LayerChoiceMode.EACH:
            assignment |= {f"layer.{la.name}": int(la.name in wanted) for la in self.layers}
        else:
            for kind, names in self.kinds.items():
                count = len(wanted.intersection(names))
                if wanted.intersection(names) != set(names[:count]):
                    return None
                assignment[f"layers.{kind}"] = count
        return assignment

    def _checkpointed(self, assignment: Assignment) -> set[str]:
        if self.mode is LayerChoiceMode.EACH:
            return {la.name for la in self.layers if assignment[f"layer.{la.name}"]}
        return {
            name
            for kind, names in self.kinds.items()
            for name in names[: assignment[f"layers.{kind}"]]
        }


def build_space(
    layers: Sequence[LayerTrace],
    mode: LayerChoiceMode = LayerChoiceMode.COUNT,
    granularity: Granularity = Granularity.CLASS,
) -> SearchSpace:
    """Returns the decisions for traced layers."""
    reasons = unsavable_ops(layers, granularity)
    total_seconds = sum(op.seconds for layer in layers for op in layer.ops)
    seconds: dict[str, float] = {}
    ops: dict[str, set[str]] = {}
    for layer in layers:
        for op in layer.ops:
            saved = saved_name(op, granularity)
            if reasons.get(saved):
                continue
            name = decision_name(op, granularity)
            ops.setdefault(name, set()).add(saved)
            seconds[name] = seconds.get(name, 0.0) + op.seconds
    worthwhile = [name for name in sorted(ops) if seconds[name] >= _WORTH_FRACTION * total_seconds]
    return SearchSpace(
        layers=tuple(layers),
        saves={name: tuple(sorted(ops[name])) for name in worthwhile},
        mode=mode,
        granularity=granularity,
    )


def decision_name(op: OpTrace, granularity: Granularity) -> str:
    """Returns the decision that `op` belongs to: `save.matmul`, or `save.matmul[2048x8192]`."""
    name = f"save.{decision_class(op)}"
    return f"{name}[{op.site}]" if _has_sites(op, granularity) else name


def saved_name(op: OpTrace, granularity: Granularity) -> str:
    """Returns what a tier names to save `op`: the op, or its site."""
    return op.site_name if _has_sites(op, granularity) else op.op


def class_of(decision: str) -> OpClass:
    """Returns the op class of a `save.…` decision."""
    return OpClass(decision.removeprefix("save.").partition("[")[0])


def _has_sites(op: OpTrace, granularity: Granularity) -> bool:
    # Attention has one site in a layer, and a kernel of another name on another device. Random ops
    # go together.
    if granularity is Granularity.CLASS or not op.site:
        return False
    return decision_class(op) not in (OpClass.ATTENTION, OpClass.RANDOM)


def decision_class(op: OpTrace) -> OpClass:
    """Returns the class that decides about `op`: all random ops go together."""
    return OpClass.RANDOM if op.random else op.op_class


def unsavable_ops(
    layers: Sequence[LayerTrace], granularity: Granularity = Granularity.CLASS
) -> dict[str, str]:
    """Returns for each traced op, or op site, why it cannot be saved; empty when it can.

    A reason holds for all calls of one name, since a policy cannot tell them apart.
    """
    reasons: dict[str, str] = {}
    random_names = set()
    for layer in layers:
        for op in layer.ops:
            name = saved_name(op, granularity)
            reasons[name] = reasons.get(name) or _own_reason(op)
            if op.random:
                random_names.add(name)
    if any(reasons[name] for name in random_names):
        for name in random_names:
            reasons[name] = reasons[name] or "tied to a random op that cannot be saved"
    return reasons


def _own_reason(op: OpTrace) -> str:
    if op.mutates:
        return "changes its input in place"
    if op.view:
        return "a view costs nothing"
    if op.output_mutated:
        return "its output is changed in place later"
    if op.op_class in _NEVER_SAVED and not op.random:
        return "communication" if op.op_class is OpClass.COLLECTIVE else "unknown op"
    if op.output_bytes == 0:
        return "returns nothing new"
    return ""


def make_tier(
    names: Sequence[str],
    saves: Mapping[str, tuple[str, ...]],
    occurring: AbstractSet[tuple[str, str]] | None = None,
) -> Tier:
    """Returns the tier that saves what the decisions `names` stand for.

    Of `saves` only `occurring` ops count, each with the decision that covers it. When attention
    is saved, its kernels of other devices and shapes are saved as well, for torch chooses among
    them at run time.
    """
    ops: set[str] = set()
    classes: list[str] = []
    save_random = False
    for name in names:
        op_class = class_of(name)
        present = {op for op in saves[name] if occurring is None or (name, op) in occurring}
        if not present:
            continue
        classes.append(name.removeprefix("save."))
        if op_class is OpClass.RANDOM:
            save_random = True
            continue
        ops |= present
        if op_class is OpClass.ATTENTION:
            ops |= {f"{packet}.default" for packet in packets_of(op_class) if "." in packet}
    return Tier(classes=tuple(classes), ops=tuple(sorted(ops)), save_random=save_random)
