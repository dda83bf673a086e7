"""The search space: which decisions there are, and the policy that a set of them stands for.

For each kind of layers: a variable per op class, or per op site, that can be saved (`save.matmul`,
`save.matmul[2048x8192]`), and one for how many of its layers are checkpointed, earliest first
(`layers.GPT2Block`). A second tier has the same variables again (`tier2.save.…`,
`tier2.layers.GPT2Block`), for the layers that follow. Where each layer is chosen by itself, its
variable says which tier it has (`layer.h.3`). Where compiling is searched as well, one says how the
model runs (`compile`), one is torch's own memory budget (`activation_memory_budget`), and two are
its settings (`activation_memory_budget_solver`, `activation_memory_budget_runtime_estimator`).
Pure: no Optuna, no device.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sac_search.opclasses import OpClass, packets_of
from sac_search.policy import (
    DEFAULT_ESTIMATOR,
    DEFAULT_SOLVER,
    Compiled,
    LayerChoice,
    Policy,
    Tier,
)
from sac_search.trace import LayerTrace, OpTrace

# A decision over less than this part of its layers' time is not worth a variable.
_WORTH_FRACTION = 0.003
_TIER_PREFIXES = ("", "tier2.")
_MODE = "compile"
_BUDGET = "activation_memory_budget"
_SOLVER = "activation_memory_budget_solver"
_ESTIMATOR = "activation_memory_budget_runtime_estimator"
# The others that torch has find what the first finds, or are called experimental there.
_SOLVERS = (DEFAULT_SOLVER, "greedy", "ilp")
_ESTIMATORS = (DEFAULT_ESTIMATOR, "profile")
_HUNDREDTHS = 100


class Granularity(enum.StrEnum):
    """What one save-or-recompute decision covers."""

    CLASS = "class"
    """All ops of a class."""
    SITE = "site"
    """The ops of a class that have weights, or features, of one size."""


class LayerChoiceMode(enum.StrEnum):
    """How the set of checkpointed layers is searched."""

    COUNT = "count"
    """A number per layer kind and tier: the earliest so many are checkpointed."""
    EACH = "each"
    """A decision per layer."""


class RunMode(enum.StrEnum):
    """How the model runs, and who decides what is recomputed."""

    EAGER = "eager"
    """Eagerly, under a policy or none."""
    COMPILE = "compile"
    """Compiled, under a policy that binds the partitioner, or none."""
    PREFER = "compile, prefer"
    """Compiled, under a policy that the partitioner may override."""
    BUDGET = "compile, memory budget"
    """Compiled, without a policy, under torch's own `activation_memory_budget`."""

    @property
    def has_layers(self) -> bool:
        """Whether a policy checkpoints layers."""
        return self is not RunMode.BUDGET


EAGER_ONLY = (RunMode.EAGER,)


class DecisionType(enum.Enum):
    """What a variable says."""

    SAVE = enum.auto()
    """Whether a tier saves some ops: 0 or 1."""
    COUNT = enum.auto()
    """How many layers of a kind have a tier."""
    LAYER = enum.auto()
    """Which tier a layer has, counted from 1; 0 leaves it alone."""
    MODE = enum.auto()
    """Which of the space's modes the model runs in."""
    PART = enum.auto()
    """Hundredths of a whole."""
    NAME = enum.auto()
    """One of a few names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variable of the search: a whole number from 0 to `highest`."""

    name: str
    """`save.matmul`, `layers.GPT2Block`, `layer.h.3`."""
    highest: int
    """Its largest value."""
    type: DecisionType
    """What it says."""
    names: tuple[str, ...] = ()
    """What its values are called, if anything."""


Assignment = Mapping[str, int]
"""A value for every decision; 0 for one that has no meaning beside the others."""
Choices = Mapping[str, frozenset[str]]
"""For each checkpointed layer the labels of what it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Saves the ops of a class, or of a class at one site, in the layers of one kind."""

    name: str
    """`save.matmul[2048x8192]`; the layer kind follows where several kinds have it."""
    label: str
    """`matmul[2048x8192]`."""
    kind: str
    """The kind of layers."""
    op_class: OpClass
    """The class."""
    saved: tuple[str, ...]
    """The exact ops or op sites."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The decisions for one workload."""

    layers: tuple[LayerTrace, ...]
    """The layers, in the order in which they run."""
    saves: tuple[SaveDecision, ...]
    """What can be saved."""
    mode: LayerChoiceMode
    """How layers are chosen."""
    granularity: Granularity
    """What one decision covers."""
    tiers: int
    """Save sets that layers of one kind may have, 1 or 2."""
    run_modes: tuple[RunMode, ...] = EAGER_ONLY
    """How the model may run."""
    can_profile: bool = False
    """Whether torch's memory budget can go by seconds that torch measures: not on the CPU."""
    save_collectives: bool = False
    """Whether what ranks send each other may be saved."""

    @functools.cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Layer kinds, each with its layers in the order in which they run."""
        kinds: dict[str, list[str]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer.name)
        return kinds

    @functools.cached_property
    def decisions(self) -> list[Decision]:
        """All variables, always in the same order."""
        found = []
        if len(self.run_modes) > 1:
            highest, names = len(self.run_modes) - 1, tuple(map(str, self.run_modes))
            found.append(Decision(name=_MODE, highest=highest, type=DecisionType.MODE, names=names))
        if RunMode.BUDGET in self.run_modes:
            found += self._budget_decisions
        return found + self._layer_decisions

    @functools.cached_property
    def _budget_decisions(self) -> list[Decision]:
        named = {_SOLVER: _SOLVERS} | ({_ESTIMATOR: _ESTIMATORS} if self.can_profile else {})
        return [
            Decision(name=_BUDGET, highest=_HUNDREDTHS, type=DecisionType.PART),
            *(
                Decision(name=name, highest=len(names) - 1, type=DecisionType.NAME, names=names)
                for name, names in named.items()
            ),
        ]

    @functools.cached_property
    def _layer_decisions(self) -> list[Decision]:
        prefixes = _TIER_PREFIXES[: self.tiers]
        found = [
            Decision(name=prefix + save.name, highest=1, type=DecisionType.SAVE)
            for prefix in prefixes
            for save in self.saves
        ]
        if self.mode is LayerChoiceMode.EACH:
            return found + [
                Decision(name=f"layer.{la.name}", highest=self.tiers, type=DecisionType.LAYER)
                for la in self.layers
            ]
        return found + [
            Decision(name=f"{prefix}layers.{kind}", highest=len(names), type=DecisionType.COUNT)
            for prefix in prefixes
            for kind, names in self.kinds.items()
        ]

    def decisions_in(self, mode: RunMode) -> list[Decision]:
        """Returns the variables that mean something in a mode, the mode itself left out."""
        return self._layer_decisions if mode.has_layers else self._budget_decisions

    def decisions_for(self, assignment: Assignment) -> list[Decision]:
        """Returns the variables that mean something in an assignment."""
        modes = [d for d in self.decisions if d.type is DecisionType.MODE]
        return modes + self.decisions_in(self.mode_in(assignment))

    def mode_in(self, assignment: Assignment) -> RunMode:
        """Returns the mode that an assignment says."""
        return self.run_modes[assignment.get(_MODE, 0)]

    def mode_of(self, policy: Policy) -> RunMode:
        """Returns the mode that a policy runs in; compile alone is under a policy, of no layers."""
        if policy.compiled is None:
            return RunMode.EAGER
        if policy.compiled.memory_budget < 1:
            return RunMode.BUDGET
        return RunMode.PREFER if policy.compiled.prefer else RunMode.COMPILE

    def completed(self, values: Mapping[str, int]) -> Assignment:
        """Returns an assignment: these values, and 0 where one is lacking or means nothing."""
        mode = self.mode_in(values)
        kept = {decision.name for decision in self.decisions_in(mode)} | {_MODE}
        return {d.name: values.get(d.name, 0) if d.name in kept else 0 for d in self.decisions}

    @functools.cached_property
    def size(self) -> int:
        """How many assignments there are."""
        return sum(
            math.prod(decision.highest + 1 for decision in self.decisions_in(mode))
            for mode in self.run_modes
        )

    def assignments(self) -> Iterator[Assignment]:
        """Yields every assignment; many of them may stand for one policy."""
        for index, mode in enumerate(self.run_modes):
            decisions = self.decisions_in(mode)
            for values in itertools.product(*(range(d.highest + 1) for d in decisions)):
                chosen = {d.name: value for d, value in zip(decisions, values, strict=True)}
                yield self.completed(chosen | {_MODE: index})

    def policy_for(self, assignment: Assignment) -> Policy:
        """Returns the policy that the assignment stands for.

        Assignments that would run the same way give policies with equal keys.
        """
        mode = self.mode_in(assignment)
        if mode is RunMode.BUDGET:
            compiled = Compiled(
                memory_budget=assignment[_BUDGET] / _HUNDREDTHS,
                solver=_SOLVERS[assignment[_SOLVER]],
                estimator=_ESTIMATORS[assignment.get(_ESTIMATOR, 0)],
            )
            return Policy(compiled=compiled)
        return self.policy_of(self.choices_for(assignment), mode)

    def choices_for(self, assignment: Assignment) -> Choices:
        """Returns what each checkpointed layer saves; what comes to the same is written alike."""
        tiers = {
            (kind, number): frozenset(
                save.label
                for save in self.saves
                if save.kind == kind and assignment[prefix + save.name]
            )
            for number, prefix in enumerate(_TIER_PREFIXES[: self.tiers], 1)
            for kind in self.kinds
        }
        return {
            layer.name: tiers[layer.kind, number]
            for layer in self.layers
            if (number := self._tier_number(layer, assignment))
        }

    def policy_of(self, choices: Choices, mode: RunMode = RunMode.EAGER) -> Policy:
        """Returns the policy whose checkpointed layers save what `choices` say, in a mode.

        Layers share a tier wherever that changes nothing, and an op all of whose sites are saved is
        written without them.
        """
        groups: list[_Group] = []
        kind_of = {layer.name: layer.kind for layer in self.layers}
        group_of: dict[tuple[str, frozenset[str]], _Group] = {}
        for layer in self.layers:
            if layer.name not in choices:
                continue
            key = (layer.kind, choices[layer.name])
            if key in group_of:
                continue
            group = _Group({layer.kind: self._saved_by(*key)}, self._occurring)
            for other in groups:
                if other.can_take(group):
                    other.take(group)
                    group = other
                    break
            else:
                groups.append(group)
            group_of[key] = group
        chosen = [
            (name, group_of[kind_of[name], choices[name]]) for name in kind_of if name in choices
        ]
        found = Policy(
            tiers=tuple(self._tier(group) for group in groups),
            layers=tuple(LayerChoice(name=n, tier=groups.index(group)) for n, group in chosen),
        )
        if mode is RunMode.EAGER:
            return found
        return replace(found, compiled=Compiled(prefer=mode is RunMode.PREFER))

    def budget_assignment(
        self,
        hundredths: int,
        setting: tuple[str, str] = (DEFAULT_SOLVER, DEFAULT_ESTIMATOR),
    ) -> Assignment:
        """Returns the assignment that compiles under torch's own memory budget.

        `setting` is one of `budget_settings`.
        """
        solver, estimator = setting
        values = {
            _MODE: self.run_modes.index(RunMode.BUDGET),
            _BUDGET: hundredths,
            _SOLVER: _SOLVERS.index(solver),
            _ESTIMATOR: _ESTIMATORS.index(estimator),
        }
        return self.completed(values)

    @property
    def budget_settings(self) -> list[tuple[str, str]]:
        """Solvers and estimators of torch's memory budget, torch's own choice first."""
        estimators = _ESTIMATORS if self.can_profile else _ESTIMATORS[:1]
        return list(itertools.product(_SOLVERS, estimators))

    def assignment_of(self, choices: Choices, mode: RunMode = RunMode.EAGER) -> Assignment | None:
        """Returns the assignment that stands for `choices` in a mode, or None if none does."""
        if mode not in self.run_modes:
            return None
        kind_of = {layer.name: layer.kind for layer in self.layers}
        known = {(save.kind, save.label) for save in self.saves}
        for name, labels in choices.items():
            if name not in kind_of or any((kind_of[name], la) not in known for la in labels):
                return None
        assignment = {decision.name: 0 for decision in self.decisions}
        if _MODE in assignment:
            assignment[_MODE] = self.run_modes.index(mode)
        for kind, names in self.kinds.items():
            sets: list[frozenset[str]] = []
            for name in names:
                if name in choices and choices[name] not in sets:
                    sets.append(choices[name])
            if len(sets) > self.tiers:
                return None
            for prefix, labels in zip(_TIER_PREFIXES, sets, strict=False):
                for save in self.saves:
                    if save.kind == kind:
                        assignment[prefix + save.name] = int(save.label in labels)
            numbers = [sets.index(choices[n]) + 1 if n in choices else 0 for n in names]
            if self.mode is LayerChoiceMode.EACH:
                assignment |= {f"layer.{n}": i for n, i in zip(names, numbers, strict=True)}
                continue
            if numbers != sorted(numbers, key=lambda number: number or self.tiers + 1):
                return None
            for number, prefix in enumerate(_TIER_PREFIXES[: self.tiers], 1):
                assignment[f"{prefix}layers.{kind}"] = numbers.count(number)
        return assignment

    def choices_of(self, policy: Policy) -> Choices | None:
        """Returns what each checkpointed layer of a policy saves, where there are labels for it.

        None for a policy that counts calls.
        """
        if not policy.exportable:
            return None
        kind_of = {layer.name: layer.kind for layer in self.layers}
        return {
            choice.name: frozenset(
                save.label
                for save in self.saves
                if save.kind == kind_of.get(choice.name) and _saves(policy.tiers[choice.tier], save)
            )
            for choice in policy.layers
        }

    def choices_of_classes(
        self, layer_names: Sequence[str], classes: Sequence[OpClass] = ()
    ) -> Choices:
        """Returns the choices that checkpoint `layer_names` and save these op classes in each."""
        kind_of = {layer.name: layer.kind for layer in self.layers}
        return {
            name: frozenset(
                save.label
                for save in self.saves
                if save.kind == kind_of[name] and save.op_class in classes
            )
            for name in layer_names
        }

    def _tier_number(self, layer: LayerTrace, assignment: Assignment) -> int:
        """Returns which tier a layer has, counted from 1; 0 leaves it alone."""
        if self.mode is LayerChoiceMode.EACH:
            return assignment[f"layer.{layer.name}"]
        place = self.kinds[layer.kind].index(layer.name)
        for number, prefix in enumerate(_TIER_PREFIXES[: self.tiers], 1):
            place -= assignment[f"{prefix}layers.{layer.kind}"]
            if place < 0:
                return number
        return 0

    @functools.cached_property
    def _occurring(self) -> dict[str, frozenset[str]]:
        """Names of all ops, or op sites, in the layers of each kind."""
        return {
            kind: frozenset(
                _SYMBOLS.get(decision_class(op), saved_name(op, self.granularity))
                for layer in self.layers
                if layer.kind == kind
                for op in layer.ops
            )
            for kind in self.kinds
        }

    def _saved_by(self, kind: str, labels: frozenset[str]) -> frozenset[str]:
        found: set[str] = set()
        for save in self.saves:
            if save.kind == kind and save.label in labels:
                found |= _names_of(save)
        return frozenset(found)

    def _tier(self, group: _Group) -> Tier:
        saved = group.saved
        saves = [save for save in self.saves if save.kind in group.saved_by_kind]
        labels = {save.label for save in saves if _names_of(save) <= saved}
        classes: list[str] = []
        for op_class in sorted({save.op_class for save in saves}):
            of_class = {save.label for save in saves if save.op_class is op_class}
            classes += [op_class] if of_class <= labels else sorted(of_class & labels)
        ops = _without_sites(saved - set(_SYMBOLS.values()), group.occurring)
        if _SYMBOLS[OpClass.ATTENTION] in saved:
            ops |= self._attention_kernels
        return Tier(
            classes=tuple(str(name) for name in classes),
            ops=tuple(sorted(ops)),
            save_random=_SYMBOLS[OpClass.RANDOM] in saved,
        )

    @functools.cached_property
    def _attention_kernels(self) -> frozenset[str]:
        """All that can be saved: torch chooses among them at run time, by device and shape."""
        traced = {
            op.op
            for layer in self.layers
            for op in layer.ops
            if decision_class(op) is OpClass.ATTENTION
        }
        savable = {name for s in self.saves if s.op_class is OpClass.ATTENTION for name in s.saved}
        known = {f"{packet}.default" for packet in packets_of(OpClass.ATTENTION) if "." in packet}
        return frozenset(known | savable) - (traced - savable)


# Stand for all ops of these classes among the names of what is saved.
_SYMBOLS = {OpClass.ATTENTION: "all attention", OpClass.RANDOM: "all random ops"}


def _names_of(save: SaveDecision) -> set[str]:
    symbol = _SYMBOLS.get(save.op_class)
    return set(save.saved) if symbol is None else {symbol}


def _saves(tier: Tier, save: SaveDecision) -> bool:
    if save.op_class is OpClass.RANDOM:
        return tier.save_random
    return all(name in tier.ops or name.partition("[")[0] in tier.ops for name in save.saved)


@dataclass(eq=False, slots=True)
class _Group:
    """Layers that share a tier: what it saves in each of their kinds."""

    saved_by_kind: dict[str, frozenset[str]]
    occurring_by_kind: Mapping[str, frozenset[str]]

    @property
    def saved(self) -> frozenset[str]:
        return frozenset().union(*self.saved_by_kind.values())

    @property
    def occurring(self) -> frozenset[str]:
        return frozenset().union(*(self.occurring_by_kind[kind] for kind in self.saved_by_kind))

    def can_take(self, other: _Group) -> bool:
        """Whether one tier does for both what each of them has now."""
        saved = self.saved | other.saved
        return all(
            saved & self.occurring_by_kind[kind] == own
            for kind, own in [*self.saved_by_kind.items(), *other.saved_by_kind.items()]
        )

    def take(self, other: _Group) -> None:
        self.saved_by_kind |= other.saved_by_kind


def _without_sites(saved: frozenset[str], occurring: frozenset[str]) -> set[str]:
    """Returns the same ops, each without its sites where all sites that occur are saved."""
    by_op: dict[str, set[str]] = {}
    for name in occurring:
        by_op.setdefault(name.partition("[")[0], set()).add(name)
    whole = {op for op, names in by_op.items() if names <= saved}
    return {op if (op := name.partition("[")[0]) in whole else name for name in saved}


def build_space(
    layers: Sequence[LayerTrace],
    mode: LayerChoiceMode = LayerChoiceMode.COUNT,
    granularity: Granularity = Granularity.CLASS,
    tiers: int = 1,
    run_modes: tuple[RunMode, ...] = EAGER_ONLY,
    can_profile: bool = False,
    save_collectives: bool = False,
) -> SearchSpace:
    """Returns the decisions for traced layers."""
    reasons = unsavable_ops(layers, granularity, save_collectives=save_collectives)
    total_seconds: dict[str, float] = {}
    seconds: dict[tuple[str, str], float] = {}
    ops: dict[tuple[str, str], set[str]] = {}
    classes: dict[str, OpClass] = {}
    for layer in layers:
        for op in layer.ops:
            total_seconds[layer.kind] = total_seconds.get(layer.kind, 0.0) + op.seconds
            saved = saved_name(op, granularity)
            if reasons[saved]:
                continue
            label = label_of(op, granularity)
            key = (label, layer.kind)
            classes[label] = decision_class(op)
            ops.setdefault(key, set()).add(saved)
            seconds[key] = seconds.get(key, 0.0) + op.seconds
    worthwhile = [
        (label, kind)
        for label, kind in sorted(ops)
        if seconds[label, kind] >= _WORTH_FRACTION * total_seconds[kind]
    ]
    labels = [label for label, _ in worthwhile]
    return SearchSpace(
        layers=tuple(layers),
        saves=tuple(
            SaveDecision(
                name=f"save.{label}" + (f"@{kind}" if labels.count(label) > 1 else ""),
                label=label,
                kind=kind,
                op_class=classes[label],
                saved=tuple(sorted(ops[label, kind])),
            )
            for label, kind in worthwhile
        ),
        mode=mode,
        granularity=granularity,
        tiers=tiers,
        run_modes=run_modes,
        can_profile=can_profile,
        save_collectives=save_collectives,
    )


def label_of(op: OpTrace, granularity: Granularity) -> str:
    """Returns what a decision about `op` is called: `matmul`, or `matmul[2048x8192]`."""
    op_class = decision_class(op)
    return f"{op_class}[{op.site}]" if _has_sites(op, granularity) else str(op_class)


def saved_name(op: OpTrace, granularity: Granularity) -> str:
    """Returns what a tier names to save `op`: the op, or its site."""
    return op.site_name if _has_sites(op, granularity) else op.op


def _has_sites(op: OpTrace, granularity: Granularity) -> bool:
    # Attention has one site in a layer, and a kernel of another name on another device. Random ops
    # go together, and so do collectives, of which one may be half of another.
    if granularity is Granularity.CLASS or not op.site:
        return False
    return decision_class(op) not in (OpClass.ATTENTION, OpClass.RANDOM, OpClass.COLLECTIVE)


def decision_class(op: OpTrace) -> OpClass:
    """Returns the class that decides about `op`: all random ops go together."""
    return OpClass.RANDOM if op.random else op.op_class


def unsavable_ops(
    layers: Sequence[LayerTrace],
    granularity: Granularity = Granularity.CLASS,
    *,
    save_collectives: bool = False,
) -> dict[str, str]:
    """Returns for each traced op, or op site, why it cannot be saved; empty when it can.

    A reason holds for all calls of one name, since a policy cannot tell them apart.
    """
    reasons: dict[str, str] = {}
    random_names = set()
    for layer in layers:
        for op in layer.ops:
            name = saved_name(op, granularity)
            reasons[name] = reasons.get(name) or _own_reason(op, save_collectives)
            if op.random:
                random_names.add(name)
    for name, reason in reasons.items():
        # An op's name without a site stands for all its sites.
        if not reason and any(other.startswith(f"{name}[") for other in reasons):
            reasons[name] = "cannot be told from its other sites"
    if any(reasons[name] for name in random_names):
        for name in random_names:
            reasons[name] = reasons[name] or "tied to a random op that cannot be saved"
    return reasons


def _own_reason(op: OpTrace, save_collectives: bool) -> str:
    if op.compiled:
        return "runs inside compiled code, where no policy sees it"
    if op.mutates:
        return "changes its input in place"
    if op.view:
        return "a view costs nothing"
    if op.awaits:
        return "without it nothing would wait for what ranks send"
    if op.output_mutated:
        return "its output is changed in place later"
    if op.op_class is OpClass.COLLECTIVE and not save_collectives:
        return "communication (--save-collectives)"
    if op.op_class is OpClass.OTHER and not op.random:
        return "unknown op"
    if op.output_bytes == 0:
        return "returns nothing new"
    return ""
