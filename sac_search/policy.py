"""A policy: for every layer, left alone or checkpointed under a tier; compiled or not. Pure data.

Frozen and hashable; policies that run the same way have the same key, however they are written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sac_search import records

# A release that does not know what is compiled would run it eagerly, so it must not read it.
COMPILED_SCHEMA_VERSION = 2
# What torch takes if nobody says.
DEFAULT_SOLVER = "dp"
DEFAULT_ESTIMATOR = "flops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One save set: what a checkpointed layer keeps instead of recomputing it."""

    classes: tuple[str, ...] = ()
    """What it saves, for people: op classes, or classes at a site, such as `matmul[2048x8192]`."""
    ops: tuple[str, ...] = ()
    """The exact overloads or op sites that it saves, sorted: `aten.mm.default`,
    `aten.mm.default[2048x8192]`. This is what counts."""
    save_random: bool = False
    """Saves every random op (attention with dropout among them); they go together or not at all."""
    through_policy: bool = False
    """Runs a tier that saves nothing through a policy function, to show what that alone costs."""
    every_second_matmul: bool = False
    """Saves the first, third, … matmul of a region only. It counts calls, so it is a reference to
    compare with and is never exported."""

    @property
    def saves_nothing(self) -> bool:
        """Whether everything is recomputed."""
        return not self.ops and not self.save_random

    @property
    def is_plain(self) -> bool:
        """Whether plain checkpointing does the same, without a policy function."""
        return self.saves_nothing and not self.through_policy


PLAIN_TIER = Tier()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """A checkpointed layer and its tier."""

    name: str
    """The layer's FQN."""
    tier: int = 0
    """Index into the policy's tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """How a policy's model is compiled, beside what holds for all compiled policies of a search."""

    memory_budget: float = 1.0
    """torch's `activation_memory_budget`: the part of the saved activations that its partitioner
    may keep, by its own estimate. 1 leaves the choice to compile's default."""
    solver: str = DEFAULT_SOLVER
    """torch's `activation_memory_budget_solver`: who chooses what to keep under that budget."""
    estimator: str = DEFAULT_ESTIMATOR
    """torch's `activation_memory_budget_runtime_estimator`: by which seconds."""
    prefer: bool = False
    """Gives what the tiers say as preferences (PREFER_SAVE), which the partitioner may override."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_budget <= 1:
            raise ValueError(f"the memory budget is {self.memory_budget}; it is a part, 0 to 1")

    @property
    def settings(self) -> dict[str, float | str]:
        """torch's settings that this says, by their names in `torch._functorch.config`."""
        found: dict[str, float | str] = {"activation_memory_budget": self.memory_budget}
        if self.memory_budget < 1:
            found |= {
                "activation_memory_budget_solver": self.solver,
                "activation_memory_budget_runtime_estimator": self.estimator,
            }
        if not self.is_default:
            # torch 2.13's cache of compiled graphs tells neither of the two apart.
            found["enable_autograd_cache"] = False
        return found

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Compiled:
        """Returns what torch's settings say, as `settings` has them; of a file that is exported."""
        return cls(
            memory_budget=settings.get("activation_memory_budget", 1.0),
            solver=settings.get("activation_memory_budget_solver", DEFAULT_SOLVER),
            estimator=settings.get("activation_memory_budget_runtime_estimator", DEFAULT_ESTIMATOR),
        )

    @property
    def is_default(self) -> bool:
        """Whether solver and estimator are torch's own choice, or mean nothing."""
        own = (self.solver, self.estimator) == (DEFAULT_SOLVER, DEFAULT_ESTIMATOR)
        return own or self.memory_budget == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which layers are checkpointed, what each of them saves, and whether the model is compiled."""

    tiers: tuple[Tier, ...] = ()
    """One or two save sets."""
    layers: tuple[LayerChoice, ...] = ()
    """The checkpointed layers, in the order in which they run."""
    schema_version: int = records.SCHEMA_VERSION
    """The version of this format: a newer one for what is compiled, whatever is given."""
    compiled: Compiled | None = None
    """How the model is compiled; None runs it eagerly."""

    def __post_init__(self) -> None:
        newest = records.SCHEMA_VERSION if self.compiled is None else COMPILED_SCHEMA_VERSION
        if self.schema_version > newest:
            raise ValueError(
                f"this policy has schema version {self.schema_version}, written by a newer "
                f"sac-search; this one reads up to {newest}"
            )
        if self.compiled is not None:
            object.__setattr__(self, "schema_version", COMPILED_SCHEMA_VERSION)
        names = [choice.name for choice in self.layers]
        if len(set(names)) != len(names):
            raise ValueError("a layer is listed twice in the policy")
        if any(not 0 <= choice.tier < len(self.tiers) for choice in self.layers):
            raise ValueError("a layer names a tier that the policy does not have")

    @property
    def key(self) -> str:
        """A short hash, equal for policies that run the same way."""
        used: list[tuple[object, ...]] = [
            (choice.name, _tier_key(self.tiers[choice.tier]))
            for choice in sorted(self.layers, key=lambda choice: choice.name)
        ]
        if self.compiled is not None:
            prefers = self.compiled.prefer and not self.saves_nothing
            used.append(("compiled", round(self.compiled.memory_budget, 6), prefers))
            if not self.compiled.is_default:
                used.append((self.compiled.solver, self.compiled.estimator))
        return hashlib.sha256(records.encode(used)).hexdigest()[:16]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """FQNs of the checkpointed layers."""
        return tuple(choice.name for choice in self.layers)

    @property
    def changes_nothing(self) -> bool:
        """Whether the step is the plain one: eager, and without checkpointing."""
        return not self.layers and self.compiled is None

    @property
    def saves_nothing(self) -> bool:
        """Whether all that is checkpointed is recomputed."""
        return all(self.tiers[choice.tier].saves_nothing for choice in self.layers)

    @property
    def eager(self) -> Policy:
        """The same layers and tiers, run eagerly."""
        if self.compiled is None:
            return self
        return Policy(tiers=self.tiers, layers=self.layers)

    @property
    def exportable(self) -> bool:
        """Whether it can be shipped: references that count calls cannot."""
        return not any(self.tiers[choice.tier].every_second_matmul for choice in self.layers)

    @property
    def through_policy(self) -> bool:
        """Whether a policy function is asked even though nothing is saved, as a reference."""
        return any(tier.through_policy for tier in self.tiers)

    @property
    def complexity(self) -> int:
        """How much there is to read: of two policies equally good, the simpler one wins."""
        used = {choice.tier for choice in self.layers}
        parts = sum(1 + len(self.tiers[tier].ops) for tier in used) + bool(self.layers)
        if self.compiled is None:
            return parts
        compiled = self.compiled
        settings = 1 + (compiled.memory_budget < 1) + (not compiled.is_default) + compiled.prefer
        return parts + settings

    def describe(self) -> str:
        """Returns the policy in a few words: `7 layers: save matmul, attention`."""
        what = self._describe_layers()
        if self.compiled is None:
            return what
        words = ["compiled"]
        if self.compiled.memory_budget < 1:
            words.append(f"memory budget {self.compiled.memory_budget:.2f}")
            if not self.compiled.is_default:
                words[-1] += f" ({self.compiled.solver}, {self.compiled.estimator})"
        if self.compiled.prefer:
            words.append("as preferences")
        if self.layers or len(words) == 1:
            words.append(what)
        return ", ".join(words)

    def _describe_layers(self) -> str:
        if not self.layers:
            return "no checkpointing"
        parts = []
        for index, tier in enumerate(self.tiers):
            count = sum(choice.tier == index for choice in self.layers)
            if count:
                parts.append(f"{count} layer{'s' if count > 1 else ''}: {describe_tier(tier)}")
        return "; ".join(parts)


NO_CHECKPOINTING = Policy()
COMPILE_ALONE = Policy(compiled=Compiled())


def policy_document(policy: Policy) -> dict[str, Any]:
    """Returns the policy as files for others have it: eager ones as all releases know them."""
    found: dict[str, Any] = records.to_builtins(policy)
    if policy.compiled is None:
        del found["compiled"]
    return found


def checkpoint_layers(names: Iterable[str], tier: Tier = PLAIN_TIER) -> Policy:
    """Returns the policy that checkpoints `names` under one tier."""
    layers = tuple(LayerChoice(name=name) for name in names)
    return Policy(tiers=(tier,) if layers else (), layers=layers)


def describe_tier(tier: Tier) -> str:
    """Returns what a tier saves, in a few words."""
    if tier.every_second_matmul:
        return "save every second matmul, attention (counts calls)"
    if tier.saves_nothing:
        return "recompute all" + (" through a policy" if tier.through_policy else "")
    named = [str(op_class) for op_class in tier.classes]
    if tier.save_random and "random" not in named:
        named.append("random")
    return "save " + (", ".join(named) if named else f"{len(tier.ops)} ops")


def _tier_key(tier: Tier) -> list[object]:
    # A site says nothing more where the whole op is saved.
    ops = sorted({op for op in tier.ops if op == _whole(op) or _whole(op) not in tier.ops})
    if tier.saves_nothing:
        return [ops, tier.through_policy]
    return [ops, tier.save_random, tier.every_second_matmul]


def _whole(op: str) -> str:
    return op.partition("[")[0]
