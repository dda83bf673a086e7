"""A workload on its device, ready to be described, measured and verified.

The same session serves the worker process and, for `search(workload)` in a user's own program, the
calling process.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sac_search import device as devices
from sac_search.apply import PolicyModule, load_policy_module
from sac_search.compiling import CompileOptions, Compiler, compiled_by, is_compiled
from sac_search.device import Clock, DeviceFigures
from sac_search.errors import CannotForecast, NoPolicyFits, WorkloadError
from sac_search.failures import OF_MEMORY, failure_from
from sac_search.forecaster import Forecaster, ProfileRequest
from sac_search.layers import Layer, find_layers
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, Compiled, Policy, checkpoint_layers
from sac_search.policy_runtime import compiled_inside
from sac_search.profile import Profile
from sac_search.ranks import (
    ALONE,
    Peers,
    describe_parallelism,
    device_of_rank,
    find_peers,
    is_distributed,
    launched,
)
from sac_search.ready import find_factory
from sac_search.records import Environment, Failure, FailureKind, Outcome, Phase, Verification
from sac_search.timeline import Timeline
from sac_search.trace import LayerTrace, trace_layers
from sac_search.verify import verify_policy
from sac_search.workload import (
    Workload,
    build_workload,
    canonical_spec,
    format_user_traceback,
    hash_sources,
    with_largest_batch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What to load and how to measure it."""

    spec: str
    """The workload: `train.py:factory`."""
    device: str | None = None
    """`cpu`, `cuda:0`, …; the machine's accelerator when None."""
    layers: str | None = None
    """FQN patterns that replace those of the workload."""
    batch_size: int | None = None
    """Handed to the factory when given."""
    clock: Clock | None = None
    """The clock; the device's own when None."""
    threads: int | None = None
    """CPU threads of torch; one for processor time when None."""
    steps: int = 5
    """Timed steps of each policy."""
    forecast_device: str | None = None
    """A device whose published rates price the step; nothing is run then."""
    compile: CompileOptions | None = None
    """How compiled policies are compiled; None where no policy is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the parent knows of a loaded workload."""

    environment: Environment
    """What figures of this session belong to."""
    layers: tuple[LayerTrace, ...]
    """The checkpointable layers, in the order in which they run."""
    reference: str
    """The policy whose steps run beside every measured one: `full`, or `none`."""
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""
    priced_step_seconds: float | None = None
    """Step time without checkpointing by published rates; None where steps are measured."""
    usable_bytes: int | None = None
    """Memory of the device that this process has or could get; None where nothing is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPeak:
    """The forecast of one policy's peak."""

    peak_bytes: int | None = None
    """Highest bytes in live tensors; None when it cannot be told."""
    phase_peak_bytes: dict[Phase, int] = field(default_factory=dict)
    """Highest bytes in each phase."""
    problem: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a verification: figures, or why the step did not run."""

    verification: Verification | None = None
    """The figures."""
    failure: Failure | None = None
    """The reason."""


class Session:
    """One loaded workload. `open_session` builds one from a file."""

    def __init__(
        self,
        workload: Workload,
        settings: SessionSettings,
        device: torch.device,
        source_hash: str = "",
        peers: Peers = ALONE,
        restore: Callable[[], None] | None = None,
    ) -> None:
        workload = with_largest_batch(workload)
        self._workload = workload
        self._settings = settings
        self._device = device
        self._source_hash = source_hash
        self._peers = peers
        self._restore = restore
        self._diverged = False
        self._leaks = False
        clock = settings.clock or devices.default_clock(device)
        if settings.compile is not None:
            refuse_own_compiling(workload.model)
        self._meter = StepMeter(
            workload=workload,
            device=device,
            clock=clock,
            steps=settings.steps,
            peers=peers,
            compiler=Compiler(workload.bare_model, settings.compile or CompileOptions()),
        )
        refuse_own_checkpointing(workload.model)
        self._layers = self._find_layers()
        self._full = checkpoint_layers(layer.name for layer in self._layers)
        self._reference_name = self._run_first_step()
        self._resident_bytes = devices.allocated_bytes(self._device)
        self._forecaster: Forecaster | None = None
        self._forecast_problem: str | None = None

    def describe(self) -> Description:
        """Traces the layers. Returns what the parent needs to know."""
        layers = self._trace()
        usable_bytes = devices.usable_bytes(self._device, self._resident_bytes)
        self._prepare_forecasts(layers)
        devices.free_cached_memory(self._device)
        return Description(
            environment=self.environment(),
            layers=tuple(layers),
            reference=self._reference_name,
            notes=tuple(self._notes(usable_bytes)),
            usable_bytes=usable_bytes,
        )

    def measure(self, policy: Policy) -> Outcome:
        """Returns what `policy` costs, and its forecast."""
        outcome = self.run_steps(policy)
        return replace(outcome, forecast_peak_bytes=self.forecast(policy).peak_bytes)

    def run_steps(self, policy: Policy) -> Outcome:
        """Returns what `policy` costs, without its forecast."""
        outcome = self._noted(self._meter.measure(policy, self._reference))
        if self._restore is not None and self._diverged:
            # It may have been the steps before: those of a trial move the parameters on.
            self._start_over()
            outcome = self._noted(self._meter.measure(policy, self._reference))
            if self._diverged:
                self._start_over()
        return outcome

    def compare(self, policies: Sequence[Policy], steps: int) -> list[Outcome]:
        """Returns what each policy costs, their steps interleaved."""
        outcomes = self._meter.compare(policies, self._reference, steps=steps)
        found = [self._noted(outcome) for outcome in outcomes]
        if self._restore is None or not self._diverged:
            return found
        self._start_over()
        return [
            outcome if outcome.failure is None else self.run_steps(policy)
            for policy, outcome in zip(policies, found, strict=True)
        ]

    def forecast(self, policy: Policy) -> ForecastPeak:
        """Returns the peak of allocated bytes that `policy` would have, without running it."""
        if policy.compiled is not None:  # fake tensors do not tell what it needs
            return ForecastPeak(problem="a compiled step is not forecast")
        forecaster = self._ready_forecaster()
        if forecaster is None:
            return ForecastPeak(problem=self._forecast_problem or "")
        try:
            found = forecaster.forecast(policy)
        except Exception as error:
            return ForecastPeak(problem=str(error).partition("\n")[0])
        finally:
            self._free_cached_memory()
        return ForecastPeak(
            peak_bytes=found.peak_bytes, phase_peak_bytes=dict(found.phase_peak_bytes)
        )

    def timeline(self, policy: Policy) -> Timeline | None:
        """Returns the memory of a step under `policy`, op by op; None where it cannot be told."""
        forecaster = self._ready_forecaster() if policy.compiled is None else None
        if forecaster is None:
            return None
        try:
            return forecaster.timeline(policy)
        except Exception:
            traceback.print_exc()  # into the log; it is there to be looked at, and nothing needs it
            return None
        finally:
            self._free_cached_memory()

    def profile(self, request: ProfileRequest) -> Profile | None:
        """Returns sizes and prices of the layers; None where there are no forecasts."""
        forecaster = self._ready_forecaster()
        if forecaster is None:
            return None
        try:
            return forecaster.profile(request)
        except Exception:
            traceback.print_exc()  # into the log; without a profile the search goes on by measuring
            return None
        finally:
            self._free_cached_memory()

    def verify(self, policy: Policy | PolicyModule) -> Verdict:
        """Compares `policy` with no checkpointing, or with full if that is too big.

        What is compiled is compared with what is compiled, without checkpointing or with full. One
        of several ranks has a single try: what fails here may have run elsewhere.
        """
        try:
            return Verdict(verification=self._verify(policy, NO_CHECKPOINTING))
        except Exception as error:
            failure = self._failure(error)
        if failure.kind not in OF_MEMORY or self._peers.size > 1:
            return Verdict(failure=failure)
        return self.verify_with_full(policy)

    def verify_with_full(self, policy: Policy | PolicyModule) -> Verdict:
        """Compares `policy` with full checkpointing."""
        try:
            return Verdict(verification=self._verify(policy, self._full))
        except Exception as error:
            return Verdict(failure=self._failure(error))

    def measure_module(self, path: str) -> Outcome:
        """Returns what an exported policy module costs, applied by its own code."""
        return self._noted(self._meter.measure(load_policy_module(Path(path)), self._reference))

    def verify_module(self, path: str) -> Verdict:
        """Verifies an exported policy module, applied by its own code."""
        return self.verify(load_policy_module(Path(path)))

    def is_healthy(self) -> bool:
        """Whether the session can go on.

        Not when memory is not back to where it was before the first measurement, when a collective
        holds some for ever, when the loss was not finite (the parameters may not be, either), or
        when the device answers no more.
        """
        if self._diverged or self._leaks:
            return False
        try:
            devices.free_cached_memory(self._device)
            return devices.allocated_bytes(self._device) <= self._resident_bytes * 1.02 + 2**24
        except Exception:
            return False

    def environment(self) -> Environment:
        """Returns what figures of this session belong to."""
        return environment_of(
            self._workload,
            self._settings,
            self._source_hash,
            device=self._device.type,
            figures=devices.describe_device(self._device),
            clock=str(self._meter.clock),
            allocator_settings=devices.allocator_settings(self._device),
            world_size=self._peers.size,
        )

    @property
    def _reference(self) -> Policy:
        return self._full if self._reference_name == "full" else NO_CHECKPOINTING

    def _verify(self, policy: Policy | PolicyModule, reference: Policy) -> Verification:
        name = "full" if reference.layers else "none"
        if compiled_by(policy) is not None:
            reference = replace(reference, compiled=Compiled())
            name = "compile, full" if reference.layers else "compile"
        return verify_policy(
            self._workload,
            policy,
            reference,
            name,
            self._device,
            self._peers,
            self._meter.compiler,
        )

    def _failure(self, error: Exception) -> Failure:
        failure = failure_from(error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._diverged |= failure.kind is FailureKind.NON_FINITE_LOSS
        self._workload.drop_gradients()
        self._free_cached_memory()
        return failure

    def _free_cached_memory(self) -> None:
        # A device that is broken for good raises here as well; `is_healthy` will tell.
        with contextlib.suppress(Exception):
            devices.free_cached_memory(self._device)

    def _start_over(self) -> None:
        """Puts parameters and optimizer back, after a loss that was not finite."""
        assert self._restore is not None
        self._restore()
        self._diverged = False

    def _noted(self, outcome: Outcome) -> Outcome:
        if outcome.failure is not None:
            self._diverged |= outcome.failure.kind is FailureKind.NON_FINITE_LOSS
            self._leaks |= outcome.failure.kind is FailureKind.UNAWAITED_COLLECTIVE
        return outcome

    def _find_layers(self) -> list[Layer]:
        patterns = self._settings.layers or self._workload.layers

        def run_forward() -> None:
            with torch.no_grad():
                self._workload.run_forward()

        try:
            return find_layers(self._workload.bare_model, run_forward, patterns)
        except WorkloadError:
            raise
        except Exception as error:
            raise step_error(error, "a forward pass without gradients") from error

    def _trace(self) -> list[LayerTrace]:
        layers = trace_layers(self._workload, self._layers, self._device, self._meter.clock)
        holding = self._holding_compiled()
        return [
            replace(la, ops=tuple(replace(op, compiled=True) for op in la.ops))
            if la.name in holding
            else la
            for la in layers
        ]

    def _holding_compiled(self) -> list[str]:
        """Returns the layers in which the workload itself compiles something."""
        modules = dict(self._workload.bare_model.named_modules())
        return [la.name for la in self._layers if compiled_inside(modules[la.name])]

    def _run_first_step(self) -> str:
        try:
            self._meter.run_untimed_step(self._full)
            return "full"
        except WorkloadError:
            raise
        except Exception as error:
            if self._peers.size > 1:  # the others are not where another step would begin
                raise step_error(error, "a training step with its layers checkpointed") from error
            first_error = error
        self._workload.drop_gradients()
        devices.free_cached_memory(self._device)
        try:
            self._meter.run_untimed_step(NO_CHECKPOINTING)
        except Exception as error:
            if {failure_from(first_error).kind, failure_from(error).kind} <= OF_MEMORY:
                raise NoPolicyFits(
                    "the step runs out of memory even with every layer checkpointed: "
                    f"{failure_from(first_error).message}\nUse a smaller batch, an optimizer with "
                    "less state, or a device with more memory."
                ) from error
            raise step_error(error, "a training step without checkpointing") from error
        failure = failure_from(first_error)
        raise WorkloadError(
            "the step runs without checkpointing, but not with its layers checkpointed "
            f"({failure.kind}). {failure.advice}\n{failure.message}",
            user_traceback=format_user_traceback(first_error),
        ) from first_error

    def _prepare_forecasts(self, layers: Sequence[LayerTrace]) -> None:
        # A forecast is a help, never a need: whatever a model does under fake tensors, the search
        # goes on by measuring alone.
        is_sharded = any(map(is_distributed, self._workload.parameters()))
        why_tracked = "its parameters are sharded, and gathered in a real step only"
        try:
            self._forecaster = Forecaster(
                self._workload,
                layers,
                self._device,
                self._peers,
                why_tracked=why_tracked if is_sharded else "",
            )
        except Exception as error:
            if self._peers.size > 1 and not isinstance(error, CannotForecast):
                raise step_error(error, "a training step") from error
            self._forecast_problem = str(error).partition("\n")[0]

    def _ready_forecaster(self) -> Forecaster | None:
        # A worker that took another's place was not asked to describe anything.
        if self._forecaster is None and self._forecast_problem is None:
            try:
                self.describe()
            except Exception as error:
                self._forecast_problem = str(error).partition("\n")[0]
        return self._forecaster

    def _notes(self, usable_bytes: int) -> list[str]:
        notes = list(self._workload.notes)
        holding = self._holding_compiled()
        if holding:
            notes.append(
                f"{len(holding)} of the layers, {holding[0]} first, hold code that the workload "
                "compiles, in which no policy sees an op: of them all or nothing is recomputed. "
                "Compiled around the layers (--compile, and no torch.compile in the workload) "
                "there is more to choose."
            )
        if self._forecaster is None:
            notes.append(
                f"No forecasts for this workload ({self._forecast_problem}); the search measures "
                "alone."
            )
        elif self._forecaster.why_tracked:
            notes.append(
                "Forecasts of this workload are counted while its step runs, which takes the time "
                f"and the memory of the step ({self._forecaster.why_tracked})."
            )
        _, total_bytes = devices.device_memory(self._device)
        used_elsewhere = total_bytes - usable_bytes
        if self._device.type != "cpu" and used_elsewhere > 0.1 * total_bytes:
            notes.append(
                f"Other processes use {used_elsewhere / 2**30:.1f} GiB of the device: a policy "
                "that fits alone may not fit beside them."
            )
        return notes


def open_session(settings: SessionSettings) -> Session:
    """Loads the workload that `settings` name and readies it for measuring.

    Raises:
        UsageError: no such file, factory or device.
        WorkloadError: the workload itself fails.
    """
    factory = find_factory(settings.spec)
    if settings.device is None and not factory.takes_device:
        device = None
    else:
        device = device_of_rank(
            devices.find_device(settings.device), launched(), is_named=_has_number(settings.device)
        )
        devices.use_device(device)
    workload = build_workload(factory, device or torch.device("cpu"), settings.batch_size)
    if device is None:
        device = _device_of(workload)
        devices.use_device(device)
    set_threads(settings, device)
    _check_placement(workload, device)
    return Session(workload, settings, device, hash_sources(factory), find_peers())


def environment_of(
    workload: Workload,
    settings: SessionSettings,
    source_hash: str,
    *,
    device: str,
    figures: DeviceFigures,
    clock: str,
    allocator_settings: str,
    world_size: int = 1,
) -> Environment:
    """Returns everything that figures of a workload on a device belong to."""
    parameters = workload.parameters()
    return Environment(
        torch_version=str(torch.__version__),
        device=device,
        device_name=figures.name,
        device_memory_bytes=figures.total_bytes,
        driver=figures.driver,
        dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        batch_size=workload.batch_size,
        sequence_length=workload.sequence_length,
        compile_settings=_compile_settings(workload.model, settings.compile),
        allocator_settings=allocator_settings,
        precision_settings=_precision_settings(),
        threads=torch.get_num_threads(),
        clock=clock,
        parameter_count=sum(p.numel() for p in parameters),
        workload=canonical_spec(settings.spec),
        workload_source_hash=source_hash,
        world_size=world_size,
        parallelism=describe_parallelism(workload.model) if world_size > 1 else "",
    )


def set_threads(settings: SessionSettings, device: torch.device) -> None:
    """Sets torch's CPU threads: as the settings say, one for processor time, else as they are."""
    clock = settings.clock or devices.default_clock(device)
    if settings.threads is not None or clock is Clock.CPU:
        torch.set_num_threads(settings.threads or 1)


def _has_number(device: str | None) -> bool:
    return device is not None and ":" in device


def _device_of(workload: Workload) -> torch.device:
    return next(iter(workload.parameters())).device


def _check_placement(workload: Workload, device: torch.device) -> None:
    for name, parameter in workload.model.named_parameters():
        if parameter.device.type != device.type:
            raise WorkloadError(
                f"parameter {name} is on {parameter.device}, but the search runs on {device}; "
                "move the model with .to(device) in the factory"
            )


def refuse_own_checkpointing(model: torch.nn.Module) -> None:
    """Raises WorkloadError if the model checkpoints its layers by itself."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise WorkloadError(
                f"the model checkpoints {name or 'itself'} already (gradient_checkpointing is on); "
                "turn it off in the workload, for example with "
                "model.gradient_checkpointing_disable(), so that the search can decide"
            )


def refuse_own_compiling(model: torch.nn.Module) -> None:
    """Raises WorkloadError if the model, or a part of it, is compiled already."""
    if is_compiled(model):
        raise WorkloadError(
            "the workload compiles its model by itself, so the search cannot: leave torch.compile "
            "and model.compile() out of it, or search without --compile"
        )


def step_error(error: Exception, what: str) -> WorkloadError:
    """Returns an error that says what of the workload's own code failed, and why."""
    failure = failure_from(error)
    message = f"{what} fails ({failure.kind}). {failure.advice}\n{failure.message}"
    return WorkloadError(message, user_traceback=format_user_traceback(error))


def _compile_settings(model: torch.nn.Module, options: CompileOptions | None) -> str:
    if options is not None:
        return f"searched, with {options.describe()}"
    return "compiled by the workload" if is_compiled(model) else "eager"


def _precision_settings() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns of the older setting
            parts = [torch.get_float32_matmul_precision()]
    except RuntimeError:  # the workload set the newer settings per backend, which exclude this one
        parts = [torch.backends.cuda.matmul.fp32_precision]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    if torch.backends.cudnn.benchmark:
        parts.append("cudnn.benchmark")
    return ", ".join(parts)
