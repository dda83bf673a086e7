"""Everything that a search can be told, and how it tells what it does."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from sac_search import units
from sac_search.compiling import CompileOptions
from sac_search.device import Clock
from sac_search.errors import UsageError
from sac_search.space import EAGER_ONLY, Granularity, LayerChoiceMode, RunMode
from sac_search.study.candidate import Candidate
from sac_search.study.goal import SPEED, Goal, GoalKind
from sac_search.study.sampler import SamplerName
from sac_search.study.storage import address_without_password, check_address
from sac_search.worker.client import Isolation

# In bytes it is a whole number that floating point, JSON and torch all hold exactly.
LARGEST_BUDGET_GB = 2**23
# What torch takes as a number of threads, or of samples.
LARGEST_COUNT = 2**31 - 1
# Options that have another name on the command line, or none.
_FLAGS = {"timeout_seconds": "timeout", "trial_timeout_seconds": "trial_timeout"}
_NOT_ARGUMENTS = frozenset({"fresh", "report"})


class Listener(Protocol):
    """Is told what a search does."""

    def on_phase(self, name: str, total: int | None = None) -> None:
        """A new stage begins."""

    def on_note(self, text: str) -> None:
        """Something that the user should read."""

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None:
        """A study is continued that holds these policies already."""

    def on_candidate(self, candidate: Candidate, trials_done: int, budget_bytes: int) -> None:
        """A policy was measured."""

    def on_estimate(self, none_seconds: float) -> None:
        """Overheads are limited and the step without checkpointing does not run: its estimate."""


class Compile(enum.StrEnum):
    """Whether the model is compiled."""

    OFF = "off"
    """Never."""
    ON = "on"
    """Always: under a policy, under torch's own memory budget, or under neither."""
    SEARCH = "search"
    """As is fastest: those, and eager policies."""


class Minimize(enum.StrEnum):
    """What a search makes small, when it is not the step time."""

    MEMORY = "memory"
    """The peak of the step."""


_COMPILED_MODES = (RunMode.COMPILE, RunMode.PREFER, RunMode.BUDGET)


_CHOICES: dict[str, type[enum.StrEnum]] = {
    "minimize": Minimize,
    "layer_choice": LayerChoiceMode,
    "isolate": Isolation,
    "granularity": Granularity,
    "sampler": SamplerName,
    "clock": Clock,
    "compile": Compile,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Everything that a search can be told, beside the workload."""

    budget_gb: float | None = None
    """The budget for the peak of the whole step, in GiB (2**30 bytes); only another goal than the
    fastest step goes without."""
    study: str | None = None
    """Name of the study; made of the workload and the budget when None."""
    root: Path = Path("studies")
    """The folder that holds the studies."""
    storage: str | None = None
    """Address of a database that searches on several machines share, as SQLAlchemy writes it, or of
    a proxy, `grpc://host:port`; a file in the study's folder when None."""
    fresh: bool = False
    """Begin anew under a new name; nothing is deleted."""
    minimize: Minimize | None = None
    """What to make small instead of the step time; it needs `max_overhead`."""
    max_overhead: float | str | None = None
    """The highest step time above that without checkpointing: `0.05`, or `"5%"`."""
    pareto: bool = False
    """Search the fastest step for every peak, instead of one answer; a budget is the highest."""
    device: str | None = None
    """`cpu`, `cuda:0`, …; the machine's accelerator when None."""
    layers: str | None = None
    """FQN patterns of the layers, such as `model.layers.*`; found by themselves when None."""
    layer_choice: LayerChoiceMode = LayerChoiceMode.COUNT
    """A number of layers per kind, or a decision per layer."""
    batch_size: int | None = None
    """Handed to the factory when given."""
    trials: int = 40
    """Trials to measure beyond the baselines."""
    timeout_seconds: float | None = None
    """Stop searching after this time."""
    trial_timeout_seconds: float | None = None
    """Give a trial up after this time; twenty baselines' worth when None."""
    isolate: Isolation = Isolation.SEARCH
    """What gets a process of its own: the search, or each trial."""
    granularity: Granularity = Granularity.SITE
    """What one save-or-recompute decision covers."""
    tiers: int = 2
    """Save sets that layers of one kind may have: 1 or 2."""
    save_collectives: bool = False
    """Whether what ranks send each other may be saved: then nothing is sent again in backward."""
    sampler: SamplerName = SamplerName.PLANNER
    """Who proposes."""
    seed: int = 0
    """Of the sampler."""
    clock: Clock | None = None
    """What counts as step time; processor time on the CPU, elapsed time elsewhere when None."""
    threads: int | None = None
    """CPU threads of torch; one for processor time when None."""
    steps: int = 5
    """Timed steps per trial; twice as many when the best are measured again side by side."""
    compile: Compile = Compile.OFF
    """Whether the model is compiled."""
    compile_backend: str = "inductor"
    """The backend of `torch.compile`."""
    compile_mode: str | None = None
    """Its mode, such as `max-autotune`; the backend's default when None."""
    compile_dynamic: bool | None = None
    """Whether sizes are symbols from the start; torch finds out by itself when None."""
    report: bool = True
    """Write `report.html` at the end."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            self._choose(name, choices)
        self._check_goal()
        if self.budget_gb is not None and not 0 < self.budget_gb <= LARGEST_BUDGET_GB:
            raise UsageError(
                f"the budget is {self.budget_gb} GiB; it must be more than nothing and at most "
                f"{LARGEST_BUDGET_GB} (8 PiB)"
            )
        for name in ("trials", "steps", "threads", "batch_size"):
            value = getattr(self, name)
            least = 0 if name == "trials" else 1
            if value is not None and not least <= value <= LARGEST_COUNT:
                raise UsageError(
                    f"{name} is {value}; it must be {least} or more, and at most {LARGEST_COUNT}"
                )
        if self.storage is not None:
            check_address(self.storage)
        if self.tiers not in (1, 2):
            raise UsageError(f"tiers is {self.tiers}; it must be 1 or 2")
        given = (self.compile_backend, self.compile_mode, self.compile_dynamic)
        if self.compile is Compile.OFF and given != ("inductor", None, None):
            raise UsageError(
                "a backend, a mode or dynamic shapes of torch.compile are given, but nothing is "
                "compiled; add --compile on or --compile search"
            )
        for name in ("timeout_seconds", "trial_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} is {value}; it must be more than 0")

    def _check_goal(self) -> None:
        if self.pareto and (self.minimize, self.max_overhead) != (None, None):
            raise UsageError(
                "--pareto is for the whole trade-off, --minimize memory for one point of it; leave "
                "one of them out"
            )
        if self.pareto:
            self._refuse_compiled()
            return
        if (self.minimize is None) != (self.max_overhead is None):
            raise UsageError(
                "--minimize memory and --max-overhead belong together: the least peak within a "
                "limit on the step time, as in --minimize memory --max-overhead 5%"
            )
        if self.minimize is None and self.budget_gb is None:
            raise UsageError(
                "there is neither a budget nor another goal; add --budget-gb, --pareto, or "
                "--minimize memory with --max-overhead"
            )
        if self.max_overhead is None:
            return
        fraction = units.parse_fraction(str(self.max_overhead))
        if fraction is None or (fraction > 1 and "%" not in str(self.max_overhead)):
            raise UsageError(
                f"max_overhead is {self.max_overhead!r}; it must be a part of the step time, as 5% "
                "or 0.05, and not below zero"
            )
        self._refuse_compiled()

    def _refuse_compiled(self) -> None:
        if self.compile is not Compile.OFF:
            raise UsageError(
                "compiled steps are searched for speed alone; leave --compile out, or search with "
                "--budget-gb alone"
            )

    def _choose(self, name: str, choices: type[enum.StrEnum]) -> None:
        """Takes a choice by its name as well: `compile="search"`."""
        value = getattr(self, name)
        if value is None and name in ("clock", "minimize"):
            return
        try:
            object.__setattr__(self, name, choices(value))
        except ValueError as error:
            raise UsageError(
                f"{name} is {value!r}; it must be one of: {', '.join(choices)} ({error})"
            ) from None

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None where none was given."""
        return None if self.budget_gb is None else units.gib_to_bytes(self.budget_gb)

    @property
    def goal(self) -> Goal:
        """What is searched for."""
        if self.pareto:
            return Goal(kind=GoalKind.PARETO, has_budget=self.budget_gb is not None)
        if self.minimize is None:
            return SPEED
        return Goal(
            kind=GoalKind.MEMORY,
            max_overhead_fraction=units.parse_fraction(str(self.max_overhead)),
            has_budget=self.budget_gb is not None,
        )

    def arguments(self) -> tuple[str, ...]:
        """Returns what says the same on the command line, but for beginning anew."""
        found: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _NOT_ARGUMENTS or value == field.default:
                continue
            flag = _FLAGS.get(field.name, field.name).replace("_", "-")
            if field.name == "storage":
                value = address_without_password(value)
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found += [f"--{flag}", str(value)]
        return tuple(found)

    @property
    def run_modes(self) -> tuple[RunMode, ...]:
        """How the model may run."""
        if self.compile is Compile.OFF:
            return EAGER_ONLY
        return _COMPILED_MODES if self.compile is Compile.ON else (*EAGER_ONLY, *_COMPILED_MODES)

    @property
    def compile_options(self) -> CompileOptions | None:
        """How what is compiled is compiled; None where nothing is."""
        if self.compile is Compile.OFF:
            return None
        return CompileOptions(
            backend=self.compile_backend, mode=self.compile_mode, dynamic=self.compile_dynamic
        )
