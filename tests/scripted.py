"""A measurer that measures nothing: a model on paper, with noise and faults on demand.

The model has layers of one or two kinds. A step takes the forward pass three times over (once
forward, twice backward) and, in checkpointed layers, what is recomputed. Its peak is in the
backward pass, in whichever layer it is highest: what stays resident, what this layer and the
earlier ones keep, and the working set of this one's recomputation. Both depend on the policy alone,
so the best policy is known by counting.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from sac_search.failures import make_failure
from sac_search.forecaster import ProfileRequest
from sac_search.opclasses import OpClass, classify
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.profile import KindProfile, Profile, RowSample
from sac_search.records import (
    Environment,
    FailureKind,
    Measurement,
    Outcome,
    Phase,
    Verification,
)
from sac_search.space import (
    EAGER_ONLY,
    Granularity,
    LayerChoiceMode,
    RunMode,
    build_space,
    label_of,
)
from sac_search.study.candidate import Candidate
from sac_search.study.goal import SPEED, Goal
from sac_search.study.search import Search, SearchSettings
from sac_search.study.store import StudyStore
from sac_search.timeline import MemoryKind, Timeline
from sac_search.trace import LayerTrace, OpTrace
from sac_search.worker.session import Description, ForecastPeak, Verdict

MIB = 2**20
RESIDENT_BYTES = 40 * MIB
INPUT_BYTES = 2 * MIB

ENVIRONMENT = Environment(
    torch_version="2.13.0",
    device="cpu",
    device_name="paper",
    device_memory_bytes=2**34,
    driver=None,
    dtype="float32",
    batch_size=4,
    sequence_length=128,
    compile_settings="eager",
    allocator_settings="",
    precision_settings="highest",
    threads=1,
    clock="cpu",
    parameter_count=1000,
    workload="paper.py:workload",
    workload_source_hash="0123456789abcdef",
)


def make_op(
    name: str, *, milliseconds: float = 1.0, mib: float = 1.0, site: str = "", **flags: bool
) -> OpTrace:
    return OpTrace(
        op=name,
        site=site,
        op_class=classify(name),
        calls=1,
        output_bytes=round(mib * MIB),
        seconds=milliseconds / 1e3,
        **flags,
    )


BLOCK_OPS = (
    make_op("aten.native_layer_norm.default", milliseconds=0.6, mib=2),
    make_op("aten.addmm.default", milliseconds=6.0, mib=6),
    make_op("aten.view.default", milliseconds=0.0, mib=0, view=True),
    make_op("aten._scaled_dot_product_flash_attention_for_cpu.default", milliseconds=4.0, mib=2.2),
    make_op("aten.gelu.default", milliseconds=1.5, mib=8),
    make_op("aten.add.Tensor", milliseconds=0.7, mib=4),
)
SITE_OPS = (
    make_op("aten.native_layer_norm.default", milliseconds=0.6, mib=2, site="512"),
    make_op("aten.addmm.default", milliseconds=3.0, mib=6, site="512x1536"),
    make_op("aten.addmm.default", milliseconds=1.0, mib=2, site="512x512"),
    make_op("aten.addmm.default", milliseconds=4.0, mib=8, site="512x2048"),
    make_op("aten.addmm.default", milliseconds=4.0, mib=2, site="2048x512"),
    make_op("aten.view.default", milliseconds=0.0, mib=0, view=True),
    make_op("aten._scaled_dot_product_flash_attention_for_cpu.default", milliseconds=4.0, mib=2.2),
    make_op("aten.gelu.default", milliseconds=1.5, mib=8, site="2048"),
    make_op("aten.add.Tensor", milliseconds=0.7, mib=4, site="512"),
)
CONVOLUTION_OPS = (
    make_op("aten.convolution.default", milliseconds=5.0, mib=5),
    make_op("aten.native_batch_norm.default", milliseconds=1.0, mib=5, output_mutated=True),
    make_op("aten.relu.default", milliseconds=0.8, mib=5),
    make_op("aten.add_.Tensor", milliseconds=0.3, mib=0, mutates=True),
)
DROPOUT_OPS = (
    make_op("aten.addmm.default", milliseconds=6.0, mib=6),
    make_op(
        "aten._scaled_dot_product_efficient_attention.default",
        milliseconds=4.0,
        mib=2.2,
        random=True,
    ),
    make_op("aten.native_dropout.default", milliseconds=1.0, mib=3, random=True),
    make_op("aten.gelu.default", milliseconds=1.5, mib=8),
)


def make_layers(
    count: int = 6,
    ops: Sequence[OpTrace] = BLOCK_OPS,
    *,
    kind: str = "Block",
    prefix: str = "h",
) -> tuple[LayerTrace, ...]:
    return tuple(
        LayerTrace(
            name=f"{prefix}.{index}",
            kind=kind,
            class_name=kind,
            parameter_count=1000,
            calls=1,
            input_bytes=INPUT_BYTES,
            ops=tuple(ops),
        )
        for index in range(count)
    )


def saving_class(policy: Policy, op_class: OpClass) -> bool:
    saved = [name.partition("[")[0] for tier in policy.tiers for name in tier.classes]
    return op_class in saved


@dataclass(slots=True)
class ScriptedMeasurer:
    """A `Measurer` by the model above. Says what it was asked, and fails when told to."""

    layers: tuple[LayerTrace, ...] = field(default_factory=make_layers)
    environment: Environment = ENVIRONMENT
    noise_fraction: float = 0.0
    """Relative spread of a step time; the same policy always draws the same."""
    seed: int = 0
    device_bytes: int | None = None
    """A step that peaks above this runs out of memory."""
    fail: Callable[[Policy], FailureKind | None] = lambda policy: None
    """Why the step of a policy fails."""
    wrong_gradients: Callable[[Policy], bool] = lambda policy: False
    """Which policies give wrong gradients."""
    verify_fails: Callable[[Policy], FailureKind | None] = lambda policy: None
    """Why the verification of a policy fails."""
    compared_seconds: Callable[[Policy], float] = lambda policy: 1.0
    """Factor on the step time when it is measured side by side."""
    compared_bytes: Callable[[Policy], float] = lambda policy: 1.0
    """Factor on the peak when it is measured side by side."""
    interrupt_at: int | None = None
    """The user stops the search in this measurement, counted from 1."""
    interrupt_in: frozenset[str] = frozenset()
    """The user stops the search once in these methods: `compare`, `verify`."""
    sleep_seconds: float = 0.0
    """How long a measurement takes."""
    log_path: Path | None = None
    """Where each measured key is written."""
    drift: float = 0.0
    """How much slower the machine becomes from one measurement to the next."""
    measured: Counter[str] = field(default_factory=Counter)
    order: list[Policy] = field(default_factory=list)
    compared: list[tuple[int, list[str]]] = field(default_factory=list)
    """The steps and the keys of every comparison."""
    verified: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    usable_bytes: int | None = None
    """Memory that the process could get."""
    forecast_factor: float | None = None
    """How far forecasts of the peak are off; None when peaks cannot be told without measuring."""
    compiled_seconds: Callable[[Policy], float] = lambda policy: 0.8
    """Step time of a compiled policy over that of the same choices run eagerly."""
    budget_bytes: Callable[[float], float] = lambda part: 1.0 if part == 0 else 0.5 + 0.5 * part
    """Peak under torch's memory budget over that of no checkpointing: it need not be monotonic."""
    price_factor: Callable[[str], float] = lambda label: 1.0
    """How far the traced seconds of a label are off."""
    profiled: list[ProfileRequest] = field(default_factory=list)
    timelines: Callable[[Policy], Timeline | None] = lambda policy: None
    """Memory over a step; None where it cannot be told."""

    # --- the protocol -----------------------------------------------------------------------------

    def describe(self) -> Description:
        return Description(
            environment=self.environment,
            layers=self.layers,
            reference="full",
            notes=self.notes,
            usable_bytes=self.usable_bytes,
        )

    def measure(self, policy: Policy) -> Outcome:
        self.measured[policy.key] += 1
        self.order.append(policy)
        time.sleep(self.sleep_seconds)
        if self.interrupt_at is not None and self.measured.total() == self.interrupt_at:
            raise KeyboardInterrupt
        self._write_log(policy.key)
        forecast = self.forecast(policy)
        return dataclasses.replace(self._outcome(policy), forecast_peak_bytes=forecast.peak_bytes)

    def compare(self, policies: Sequence[Policy], steps: int) -> list[Outcome]:
        self._interrupt_once("compare")
        self.compared.append((steps, [policy.key for policy in policies]))
        return [
            self._outcome(policy, self.compared_seconds(policy), self.compared_bytes(policy))
            for policy in policies
        ]

    def forecast(self, policy: Policy) -> ForecastPeak:
        if self.forecast_factor is None or policy.compiled is not None:
            return ForecastPeak(problem="on paper")
        peaks = self._phase_peaks(round(self.peak_bytes(policy) * self.forecast_factor))
        return ForecastPeak(peak_bytes=peaks[Phase.BACKWARD], phase_peak_bytes=peaks)

    def timeline(self, policy: Policy) -> Timeline | None:
        return self.timelines(policy)

    def profile(self, request: ProfileRequest) -> Profile | None:
        self.profiled.append(request)
        if self.forecast_factor is None:
            return None
        names = tuple(layer.name for layer in self.layers)
        kinds = {layer.kind: layer for layer in self.layers}
        most, least = self.forecast(NO_CHECKPOINTING), self.forecast(self.full)
        return Profile(
            layers=names,
            kinds=tuple(self._kind_profile(k, request.granularity) for k in kinds.values()),
            order=tuple(list(kinds).index(layer.kind) for layer in self.layers),
            granularity=request.granularity,
            most_kept=RowSample(left_alone=names, phase_peak_bytes=most.phase_peak_bytes),
            least_kept=RowSample(left_alone=(), phase_peak_bytes=least.phase_peak_bytes),
            policy_call_seconds=25e-6,
        )

    def verify(self, policy: Policy) -> Verdict:
        self._interrupt_once("verify")
        self.verified.append(policy.key)
        kind = self.verify_fails(policy)
        if kind is not None:
            return Verdict(failure=make_failure(kind, "on paper"))
        wrong = self.wrong_gradients(policy)
        return Verdict(
            verification=Verification(
                passed=not wrong,
                bitwise=not wrong,
                reference="none",
                loss_difference=0.25 if wrong else 0.0,
                worst_gradient_difference=0.5 if wrong else 0.0,
                worst_parameter="h.0.weight" if wrong else None,
                noise=0.0,
                tolerance=1e-4,
            )
        )

    # --- the model --------------------------------------------------------------------------------

    def step_seconds(self, policy: Policy) -> float:
        """Returns the true step time."""
        if policy.compiled is not None:
            part = policy.compiled.memory_budget
            factor = self.compiled_seconds(policy) * (1.3 - 0.3 * part)
            return factor * self.step_seconds(policy.eager)
        forward = sum(op.seconds for layer in self.layers for op in layer.ops)
        seconds = 3 * forward
        for layer, tier in self._tiers(policy):
            if tier is not None:
                recomputed = sum(op.seconds * (1 - _saved_part(op, tier)) for op in layer.ops)
                seconds += recomputed + (0 if tier.is_plain else 1e-4)
        return seconds

    def peak_bytes(self, policy: Policy) -> int:
        """Returns the true peak."""
        if policy.compiled is not None:
            part = policy.compiled.memory_budget
            factor = 0.95 if part == 1 else self.budget_bytes(part)
            return round(factor * self.peak_bytes(policy.eager))
        kept, highest = 0.0, 0.0
        for layer, tier in self._tiers(policy):
            whole = sum(op.output_bytes for op in layer.ops if not op.view)
            if tier is None:
                kept += whole
                highest = max(highest, kept)
            else:
                saved = sum(op.output_bytes * _saved_part(op, tier) for op in layer.ops)
                kept += layer.input_bytes + saved
                highest = max(highest, kept + whole - saved)
        return RESIDENT_BYTES + round(highest)

    @property
    def full(self) -> Policy:
        return checkpoint_layers(layer.name for layer in self.layers)

    def _phase_peaks(self, peak_bytes: int) -> dict[Phase, int]:
        return {
            Phase.FORWARD: peak_bytes - 5 * MIB,
            Phase.LOSS: peak_bytes - 4 * MIB,
            Phase.BACKWARD: peak_bytes,
            Phase.OPTIMIZER: RESIDENT_BYTES,
        }

    def _kind_profile(self, layer: LayerTrace, granularity: Granularity) -> KindProfile:
        space = build_space(self.layers, granularity=granularity)
        labels = tuple(s.label for s in space.saves if s.kind == layer.kind)
        ops = {
            label: [op for op in layer.ops if label_of(op, granularity) == label]
            for label in labels
        }
        seconds = {
            label: sum(op.seconds for op in ops[label]) * self.price_factor(label)
            for label in labels
        }
        return KindProfile(
            name=layer.kind,
            labels=labels,
            label_bytes=tuple(sum(op.output_bytes for op in ops[label]) for label in labels),
            label_seconds=tuple(seconds.values()),
            other_seconds=max(0.0, sum(op.seconds for op in layer.ops) - sum(seconds.values())),
            plain_bytes=layer.input_bytes,
            alone_bytes=sum(op.output_bytes for op in layer.ops if not op.view),
            gradient_bytes=0,
            policy_calls=len(layer.ops),
        )

    def _tiers(self, policy: Policy) -> list[tuple[LayerTrace, Tier | None]]:
        chosen = {choice.name: policy.tiers[choice.tier] for choice in policy.layers}
        return [(layer, chosen.get(layer.name)) for layer in self.layers]

    def _outcome(
        self, policy: Policy, seconds_factor: float = 1.0, bytes_factor: float = 1.0
    ) -> Outcome:
        kind = self.fail(policy)
        if kind is not None:
            return Outcome(failure=make_failure(kind, "on paper"))
        peak = round(self.peak_bytes(policy) * bytes_factor)
        if self.device_bytes is not None and peak > self.device_bytes:
            return Outcome(failure=make_failure(FailureKind.OUT_OF_MEMORY, "on paper"))
        generator = random.Random(f"{self.seed} {policy.key}")  # noqa: S311
        factor = seconds_factor * (1 + generator.gauss(0, self.noise_fraction))
        slowness = (1 + self.drift) ** self.measured.total()
        seconds = self.step_seconds(policy) * factor
        reference = self.step_seconds(self.full)
        return Outcome(
            measurement=Measurement(
                peak_bytes=peak,
                allocated_bytes=peak,
                peak_phase=Phase.BACKWARD,
                phase_peak_bytes=self._phase_peaks(peak),
                step_seconds=seconds * slowness,
                step_noise_fraction=self.noise_fraction,
                reference_seconds=reference * slowness,
                relative_seconds=seconds / reference if reference else 1.0,
                steps=5,
                loss=1.0,
                compile_seconds=2.0 if policy.compiled is not None else None,
            )
        )

    def _write_log(self, key: str) -> None:
        if self.log_path is not None:
            handle = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{key}\n".encode())
            os.close(handle)

    def _interrupt_once(self, method: str) -> None:
        if method in self.interrupt_in:
            self.interrupt_in -= {method}
            raise KeyboardInterrupt


def _saved_part(op: OpTrace, tier: Tier) -> float:
    if op.view or op.mutates:
        return 0.0
    if op.random:
        return float(tier.save_random)
    if op.op not in tier.ops and op.site_name not in tier.ops:
        return 0.0
    return 0.5 if tier.every_second_matmul and op.op_class is OpClass.MATMUL else 1.0


def make_timeline(*, forward: int, backward: int, layer: str = "h.1") -> Timeline:
    """Returns the memory of a step of four points, that saves `forward` bytes."""
    nothing = (0, 0, 0, 0)
    return Timeline(
        ops=(0, 10, 20, 30),
        phases=(Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
        layers=("", "h.0", layer, ""),
        kind_bytes=dict.fromkeys(MemoryKind, nothing)
        | {
            MemoryKind.PARAMETERS: (5, 5, 5, 5),
            MemoryKind.SAVED: (0, forward // 2, forward, 0),
            MemoryKind.RECOMPUTED: (0, 0, backward, 0),
        },
        peak_index=2,
    )


def other_environment(**changes: object) -> Environment:
    return dataclasses.replace(ENVIRONMENT, **changes)


def make_outcome(
    *, seconds: float = 1.0, peak_bytes: int = 100, noise: float = 0.0, reference: float = 1.0
) -> Outcome:
    """Returns figures made to measure; the reference step takes a second."""
    return Outcome(
        measurement=Measurement(
            peak_bytes=peak_bytes,
            allocated_bytes=peak_bytes,
            peak_phase=Phase.BACKWARD,
            phase_peak_bytes={Phase.BACKWARD: peak_bytes},
            step_seconds=seconds,
            step_noise_fraction=noise,
            reference_seconds=reference,
            relative_seconds=seconds / reference,
            steps=5,
            loss=1.0,
        )
    )


def make_failed(kind: FailureKind = FailureKind.OUT_OF_MEMORY) -> Outcome:
    return Outcome(failure=make_failure(kind, "on paper"))


def make_candidate(
    name: str,
    *,
    policy: Policy,
    seconds: float = 1.0,
    peak_bytes: int = 100,
    noise: float = 0.0,
    is_baseline: bool = False,
) -> Candidate:
    return Candidate(
        name=name,
        policy=policy,
        outcome=make_outcome(seconds=seconds, peak_bytes=peak_bytes, noise=noise),
        step_seconds=seconds,
        is_baseline=is_baseline,
    )


def memory_store(measurer: ScriptedMeasurer, budget_bytes: int, goal: Goal = SPEED) -> StudyStore:
    """Returns a study that is kept in memory, for tests of what is done with it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name="memory", directions=goal.directions)
    store = StudyStore(study, Path("memory"))
    store.write("goal", goal)
    store.write("budget_bytes", budget_bytes)
    store.write("environment", measurer.environment)
    store.write("layers", measurer.layers)
    return store


def make_search(
    measurer: ScriptedMeasurer,
    budget_bytes: int,
    *,
    store: StudyStore | None = None,
    goal: Goal = SPEED,
    mode: LayerChoiceMode = LayerChoiceMode.COUNT,
    granularity: Granularity = Granularity.CLASS,
    tiers: int = 1,
    run_modes: tuple[RunMode, ...] = EAGER_ONLY,
    **settings: object,
) -> Search:
    return Search(
        store=store or memory_store(measurer, budget_bytes, goal),
        space=build_space(measurer.layers, mode, granularity, tiers, run_modes),
        measurer=measurer,
        settings=SearchSettings(**settings),
    )


class Listener:
    """Writes down what a search says."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.candidates: list[str] = []
        self.known: list[str] = []
        self.estimates: list[float] = []

    def on_phase(self, name: str, total: int | None = None) -> None:
        self.phases.append(name)

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_known(
        self, candidates: Sequence[Candidate], trials_done: int, budget_bytes: int
    ) -> None:
        self.known += [candidate.name for candidate in candidates]

    def on_candidate(self, candidate: object, trials_done: int, budget_bytes: int) -> None:
        self.candidates.append(candidate.name)

    def on_estimate(self, none_seconds: float) -> None:
        self.estimates.append(none_seconds)
