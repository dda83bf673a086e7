"""What a result holds, as quantities that know their source. Pure; rounds and formats nothing."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

from sac_search.policy import Policy
from sac_search.records import Evidence, Measurement, Phase
from sac_search.report.facts import Basis, Quantity, exactly, total
from sac_search.space import Granularity, LayerChoiceMode, SearchSpace, build_space
from sac_search.study.candidate import Candidate
from sac_search.study.insights import FrontierEstimate, LayerPrice, SavePrice
from sac_search.study.result import SearchResult
from sac_search.timeline import MemoryKind, Timeline

_BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_BASES = {Evidence.MEASURED: Basis.MEASURED, Evidence.FORECAST: Basis.FORECAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of one kind that a policy treats alike."""

    kind: str
    """The kind."""
    labels: frozenset[str] | None
    """What they save; None when they are left alone."""
    layers: int
    """How many they are."""
    has_last: bool = False
    """Whether the layer that runs last is one of them."""


class Tried:
    """A candidate that ran, or was forecast."""

    def __init__(self, result: SearchResult, candidate: Candidate) -> None:
        assert candidate.measurement is not None and candidate.step_seconds is not None
        self.candidate = candidate
        self.measurement: Measurement = candidate.measurement
        self._basis = _BASES[candidate.evidence]
        self._path = _path_of(result, candidate)
        self.seconds = self._quantity("step_seconds", candidate.step_seconds)
        self.peak = self._quantity("measurement.peak_bytes", self.measurement.peak_bytes)
        self.allocated = self._quantity(
            "measurement.allocated_bytes", self.measurement.allocated_bytes
        )
        self.noise = self._quantity(
            "measurement.step_noise_fraction", self.measurement.step_noise_fraction
        )
        self.retries = self._quantity("measurement.alloc_retries", self.measurement.alloc_retries)

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.candidate.name

    @property
    def reserved(self) -> Quantity | None:
        """What the caching allocator held; None where there is none."""
        found = self.measurement.reserved_bytes
        return None if found is None else self._quantity("measurement.reserved_bytes", found)

    @property
    def compiling(self) -> Quantity | None:
        """What compiling took; None where nothing is compiled."""
        found = self.measurement.compile_seconds
        return None if found is None else self._quantity("measurement.compile_seconds", found)

    def phase(self, phase: Phase) -> Quantity | None:
        """Returns the highest allocated bytes in a phase; None where the step has no such phase."""
        found = self.measurement.phase_peak_bytes.get(phase)
        path = f"measurement.phase_peak_bytes[{str(phase)!r}]"
        return None if found is None else self._quantity(path, found)

    def rank_peaks(self) -> list[Quantity]:
        """Returns the peak of every rank, where there are several."""
        peaks = self.measurement.rank_peak_bytes
        return [
            self._quantity(f"measurement.rank_peak_bytes[{rank}]", peak)
            for rank, peak in enumerate(peaks)
        ]

    def _quantity(self, field: str, value: float) -> Quantity:
        return Quantity(value, f"{self._path}.{field}", self._basis)


class Drawn:
    """The memory of one step under a policy, as its dry run has it."""

    def __init__(self, timeline: Timeline, path: str, basis: Basis) -> None:
        self.timeline = timeline
        self._path = path
        self._basis = basis
        self.peak = Quantity(timeline.peak_bytes, f"{path}.peak_bytes", basis)

    @property
    def kinds(self) -> tuple[MemoryKind, ...]:
        """What there is to tell apart."""
        return tuple(self.timeline.kind_bytes)

    def at_peak(self, kind: MemoryKind) -> Quantity:
        """Returns what is alive of a kind at the highest point."""
        return self._alive(kind, self.timeline.peak_index, f"{self._path}.peak_index")

    @property
    def gradients_at_start(self) -> Quantity:
        """What is alive of gradients once the first op has run."""
        return self._alive(MemoryKind.GRADIENTS, 0, "0")

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients at any point."""
        return any(self.timeline.kind_bytes.get(MemoryKind.GRADIENTS, ()))

    def _alive(self, kind: MemoryKind, index: int, index_source: str) -> Quantity:
        source = f"{self._path}.kind_bytes[{str(kind)!r}][{index_source}]"
        return Quantity(self.timeline.kind_bytes[kind][index], source, self._basis)


class Quantities:
    """What one result holds."""

    def __init__(self, result: SearchResult) -> None:
        self.result = result
        self.budget = Quantity(result.budget_bytes, "budget_bytes", Basis.GIVEN)
        self.device_memory = Quantity(
            result.environment.device_memory_bytes, "environment.device_memory_bytes", Basis.GIVEN
        )
        self.parameter_count = Quantity(
            result.environment.parameter_count, "environment.parameter_count", Basis.GIVEN
        )
        self.best = self._tried(result.best)
        self.none = self._tried(result.none)
        self.full = self._tried(result.full)
        self.compile_alone = self._tried(result.compile_alone)

    @functools.cached_property
    def tried(self) -> list[Tried]:
        """All candidates with figures."""
        return [found for c in self.result.candidates if (found := self._tried(c)) is not None]

    @property
    def smallest(self) -> Tried | None:
        """The candidate with the smallest peak; None when none has figures."""
        return min(self.tried, key=lambda tried: tried.peak.value, default=None)

    @functools.cached_property
    def best_so_far(self) -> Tried | None:
        """The best so far that is within the limits, verified or not; None when nothing is."""
        ranked = self.result.goal.rank((t.candidate for t in self.tried), self.result.limits)
        return next((t for t in self.tried if ranked and t.candidate is ranked[0]), None)

    @property
    def subject(self) -> Tried | None:
        """Whose peak is explained: the winner's, else the best so far's, else the smallest."""
        return self.best or self.best_so_far or self.smallest

    @property
    def parameters(self) -> Quantity | None:
        """Bytes of the parameters; None where dtypes are mixed or several ranks may share them."""
        environment = self.result.environment
        size = _BYTES_OF_DTYPE.get(environment.dtype)
        if size is None or environment.world_size > 1:
            return None
        return self.parameter_count * exactly(size)

    @property
    def floor(self) -> Quantity | None:
        """The peak that no checkpointing goes under; None where compiling may go there as well."""
        if self.result.compile_options is not None:
            return None
        found = self.result.floor_bytes
        basis = self.full.peak.basis if self.full is not None else Basis.MEASURED
        return None if found is None else Quantity(found, "floor_bytes", basis)

    @property
    def bound(self) -> Quantity | None:
        """The step time that no policy goes under, by the prices."""
        found = self.result.lower_bound_seconds
        path = "lower_bound_seconds"
        return None if found is None else Quantity(found, path, self.price_basis)

    @property
    def price_basis(self) -> Basis:
        """What stands behind prices and dry runs: beliefs, or forecasts where nothing ran."""
        is_forecast = self.result.evidence is Evidence.FORECAST
        return Basis.FORECAST if is_forecast else Basis.BELIEVED

    def drawn(self, policy: Policy) -> Drawn | None:
        """Returns the memory of a step under a policy; None where it was not drawn."""
        for index, entry in enumerate(self.result.timelines):
            if entry.policy_key == policy.key:
                return Drawn(entry.timeline, f"timelines[{index}].timeline", self.price_basis)
        return None

    # --- what the search believes -----------------------------------------------------------------

    @property
    def layer_prices(self) -> dict[str, tuple[LayerPrice, str]]:
        """The price of each layer kind, with its path."""
        insights = self.result.insights
        prices = () if insights is None else insights.layers
        return {p.kind: (p, f"insights.layers[{i}]") for i, p in enumerate(prices)}

    @property
    def save_prices(self) -> dict[tuple[str, str], tuple[SavePrice, str]]:
        """The price of each kind and label, with its path, most seconds first."""
        insights = self.result.insights
        prices = () if insights is None else insights.saves
        return {(p.kind, p.label): (p, f"insights.saves[{i}]") for i, p in enumerate(prices)}

    @property
    def frontier(self) -> list[tuple[FrontierEstimate, str]]:
        """The trade-off, from the smallest budget on, each point with its path."""
        insights = self.result.insights
        points = () if insights is None else insights.frontier
        return [(point, f"insights.frontier[{i}]") for i, point in enumerate(points)]

    def save(self, kind: str, label: str, field: str) -> Quantity:
        """Returns a field of what one layer of a kind gains or keeps by saving a label."""
        price, path = self.save_prices[kind, label]
        return Quantity(getattr(price, field), f"{path}.{field}", self.price_basis)

    def layer(self, kind: str, field: str) -> Quantity:
        """Returns a field of what checkpointing one layer of a kind costs, or frees."""
        price, path = self.layer_prices[kind]
        return Quantity(getattr(price, field), f"{path}.{field}", self.price_basis)

    def kept(self, group: LayerGroup) -> Quantity:
        """Returns what one layer of a group keeps from its forward to its backward."""
        if group.labels is None:
            return self.layer(group.kind, "alone_bytes")
        saved = [
            self.save(group.kind, label, "kept_bytes")
            for label in sorted(group.labels)
            if (group.kind, label) in self.save_prices
        ]
        return total([self.layer(group.kind, "plain_bytes"), *saved])

    def recomputed(self, group: LayerGroup) -> Quantity:
        """Returns the step time that one checkpointed layer of a group costs."""
        assert group.labels is not None
        found = self.layer(group.kind, "recompute_seconds")
        for label in sorted(group.labels):
            if (group.kind, label) in self.save_prices:
                found -= self.save(group.kind, label, "seconds")
        return found + self.layer(group.kind, "policy_seconds") if group.labels else found

    def kept_by_layers(self, policy: Policy) -> Quantity | None:
        """Returns what all layers keep under a policy; None where it has no prices."""
        groups = self.groups(policy)
        if not groups:
            return None
        return total([self.kept(group) * exactly(group.layers) for group in groups])

    def groups(self, policy: Policy) -> list[LayerGroup]:
        """Returns the layers as an eager policy treats them; none where they have no prices."""
        choices = self._space.choices_of(policy)
        if policy.compiled is not None or choices is None or not self.layer_prices:
            return []
        treated = [(layer.kind, choices.get(layer.name)) for layer in self.result.layers]
        return [
            LayerGroup(
                kind=kind, labels=labels, layers=count, has_last=(kind, labels) == treated[-1]
            )
            for (kind, labels), count in Counter(treated).items()
            if kind in self.layer_prices
        ]

    @functools.cached_property
    def _space(self) -> SearchSpace:
        layers = self.result.layers
        has_sites = any("[" in label for _, label in self.save_prices)
        granularity = Granularity.SITE if has_sites else Granularity.CLASS
        return build_space(layers, LayerChoiceMode.EACH, granularity, tiers=max(1, len(layers)))

    def _tried(self, candidate: Candidate | None) -> Tried | None:
        if candidate is None or candidate.measurement is None:
            return None
        # Steps without time or memory are those of a broken clock or file: nothing is told by them.
        measurement = candidate.measurement
        if not math.isfinite(candidate.step_seconds or 0.0):
            return None
        if not (candidate.step_seconds and measurement.allocated_bytes and measurement.peak_bytes):
            return None
        return Tried(self.result, candidate)


def _path_of(result: SearchResult, candidate: Candidate) -> str:
    for name in ("best", "none", "full", "compile_alone"):
        if getattr(result, name) is candidate:
            return name
    return f"candidates[{result.candidates.index(candidate)}]"
