"""Workers of several batch sizes that measure nothing: models on paper, one for each size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripted import ENVIRONMENT, MIB, ScriptedMeasurer, make_layers, make_op

from sac_search.errors import WorkloadError
from sac_search.policy import Policy
from sac_search.records import Environment
from sac_search.space import SearchSpace, build_space
from sac_search.trace import OpTrace
from sac_search.worker.session import Description

# One sample of one layer: what each op takes in milliseconds, and what it returns in MiB.
OPS = (
    ("aten.native_layer_norm.default", 0.3, 1.0),
    ("aten.addmm.default", 6.0, 3.0),
    ("aten.gelu.default", 1.0, 4.0),
)
SecondsOfSize = Callable[[int], float]
"""Factor on the milliseconds of one sample: what a step of that batch size takes."""


def in_proportion(size: int) -> float:
    return float(size)


@dataclass(slots=True)
class SizedMeasurer(ScriptedMeasurer):
    """A measurer of one size, which knows whether it holds the device."""

    workers: ScriptedWorkers | None = None
    batch_size: int = 0
    loads: int = 0
    is_loaded: bool = False

    def close(self) -> None:
        self.is_loaded = False

    def describe(self) -> Description:
        self._load()
        if self.workers is not None and self.batch_size in self.workers.broken:
            raise WorkloadError("a training step fails (step raised). Mend it.\non paper")
        return ScriptedMeasurer.describe(self)

    def measure(self, policy: Policy):  # type: ignore[no-untyped-def]
        self._load()
        return ScriptedMeasurer.measure(self, policy)

    def compare(self, policies: Sequence[Policy], steps: int):  # type: ignore[no-untyped-def]
        self._load()
        return ScriptedMeasurer.compare(self, policies, steps)

    def verify(self, policy: Policy):  # type: ignore[no-untyped-def]
        self._load()
        return ScriptedMeasurer.verify(self, policy)

    def _load(self) -> None:
        assert self.workers is not None
        others = [m for m in self.workers.opened.values() if m is not self and m.is_loaded]
        assert not others, "two models are on the device at once"
        self.loads += not self.is_loaded
        self.is_loaded = True


@dataclass(slots=True)
class ScriptedWorkers:
    """`Workers` on paper. Bytes grow with the batch; seconds as `seconds` says."""

    seconds: SecondsOfSize = in_proportion
    layer_count: int = 3
    ops: Sequence[tuple[str, float, float]] = OPS
    can_forecast: bool = True
    forecast_factor: float | None = 1.0
    """Of the measurers; None where these cannot forecast, either."""
    noise_fraction: float = 0.0
    seed: int = 0
    price_factor: Callable[[str], float] = lambda label: 1.0
    samples: Callable[[int], int | None] = lambda size: size
    """What the workload says of itself."""
    bytes_of: Callable[[int], int] = lambda size: size
    """The batch size by which bytes grow."""
    broken: frozenset[int] = frozenset()
    """Sizes at which the workload raises."""
    wrong_gradients: Callable[[Policy], bool] = lambda policy: False
    environment: Environment = ENVIRONMENT
    interrupt_at: dict[int, int] = field(default_factory=dict)
    """At a size, in this measurement, the user stops the search."""
    opened: dict[int, SizedMeasurer] = field(default_factory=dict)
    forecast_sizes: list[int] = field(default_factory=list)

    def full_peak_bytes(self, batch_size: int) -> int | None:
        assert not any(m.is_loaded for m in self.opened.values())
        if not self.can_forecast or batch_size in self.broken:
            return None
        self.forecast_sizes.append(batch_size)
        measurer = self.make(batch_size)
        return measurer.peak_bytes(measurer.full)

    def open(self, batch_size: int, folder: Path) -> SizedMeasurer:
        assert batch_size not in self.opened
        self.opened[batch_size] = self.make(batch_size)
        return self.opened[batch_size]

    def make(self, size: int) -> SizedMeasurer:
        """Returns the model on paper of one size."""
        ops: list[OpTrace] = [
            make_op(
                name,
                milliseconds=milliseconds * self.seconds(size),
                mib=mib * self.bytes_of(size),
            )
            for name, milliseconds, mib in self.ops
        ]
        layers = tuple(
            dataclasses.replace(layer, input_bytes=self.bytes_of(size) * MIB)
            for layer in make_layers(self.layer_count, ops)
        )
        return SizedMeasurer(
            layers=layers,
            environment=dataclasses.replace(self.environment, batch_size=self.samples(size)),
            forecast_factor=self.forecast_factor,
            noise_fraction=self.noise_fraction,
            seed=self.seed + size,
            price_factor=self.price_factor,
            wrong_gradients=self.wrong_gradients,
            interrupt_at=self.interrupt_at.get(size),
            workers=self,
            batch_size=size,
        )

    @property
    def measured(self) -> int:
        """Policies measured so far, at all sizes together."""
        return sum(m.measured.total() for m in self.opened.values())

    @property
    def compared(self) -> int:
        """Policies measured again at the end."""
        return sum(len(keys) for m in self.opened.values() for _, keys in m.compared)


@dataclass(frozen=True)
class GridBest:
    """The best of every batch size with every policy."""

    batch_size: int
    policy_keys: frozenset[str]
    samples_per_second: float
    trials: int


def full_grid(workers: ScriptedWorkers, sizes: Sequence[int], budget_bytes: int) -> GridBest:
    """Measures all policies of all sizes; all of the space, where that is of op classes."""
    found: list[tuple[float, int, str]] = []
    trials = 0
    for size in sizes:
        measurer = workers.make(size)
        for policy in all_policies(space_of(measurer)).values():
            trials += 1
            if measurer.peak_bytes(policy) <= budget_bytes:
                found.append((size / measurer.step_seconds(policy), size, policy.key))
    best, size, _ = max(found, key=lambda entry: (entry[0], -entry[1]))
    alike = frozenset(key for rate, at, key in found if at == size and rate >= best * (1 - 1e-9))
    return GridBest(size, alike, best, trials)


def space_of(measurer: ScriptedMeasurer) -> SearchSpace:
    return build_space(measurer.layers, granularity="class", tiers=1)  # type: ignore[arg-type]


def all_policies(space: SearchSpace) -> dict[str, Policy]:
    return {p.key: p for p in map(space.policy_for, space.assignments())}
