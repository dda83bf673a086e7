"""A workload that never runs: described, forecast and priced under fake tensors.

For an accelerator that is not here, and for models that this machine could not hold. Nothing is
measured: bytes are counted, seconds are priced by the rates that the vendor publishes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from sac_search.builtin import workload as build_builtin
from sac_search.device import DeviceFigures
from sac_search.errors import CannotForecast, SacSearchError, WorkloadError
from sac_search.fake import FakeMode, any_device_as_cpu, faked
from sac_search.forecast import Forecast, fakes_refused, forecast_step
from sac_search.forecaster import ProfileRequest, profile_workload
from sac_search.layers import Layer, find_layers
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.rates import DeviceRates, StepPrice, op_seconds
from sac_search.ready import find_factory
from sac_search.records import Environment
from sac_search.timeline import Timeline
from sac_search.trace import price_layers
from sac_search.worker.session import (
    Description,
    ForecastPeak,
    SessionSettings,
    environment_of,
    refuse_own_checkpointing,
    step_error,
)
from sac_search.workload import (
    BUILTIN_SPEC,
    Factory,
    Workload,
    build_workload,
    hash_sources,
    with_largest_batch,
)

_META = torch.device("meta")


class DrySession:
    """One loaded workload, for the accelerator that `rates` name.

    The workload is built on the meta device where its factory allows it, so that it takes no
    memory, and the optimizer runs in the form that is the default on accelerators. With `cpu` as
    the device of `settings` it is built on the CPU, for a step that will run there.

    Known limits: the ops are those that the CPU runs, which fuses less than an accelerator
    (dropout, RMSNorm); the workspaces of kernels and the allocator's rounding are not counted.

    Raises:
        WorkloadError: the workload itself fails.
        CannotForecast: its step reads values, which are not there.
    """

    def __init__(self, settings: SessionSettings, rates: DeviceRates) -> None:
        self._settings = settings
        self._rates = rates
        factory = find_factory(settings.spec)
        is_for_cpu = settings.device == "cpu"
        if settings.spec == BUILTIN_SPEC and not is_for_cpu:
            sized = functools.partial(build_builtin, device_memory_bytes=rates.memory_bytes)
            factory = replace(factory, function=sized)
        build = _build_on_cpu if is_for_cpu else _build
        self.workload = with_largest_batch(build(factory, settings.batch_size))
        """The workload, its tensors on the meta device or, where that failed, on the CPU."""
        self._source_hash = hash_sources(factory)
        refuse_own_checkpointing(self.workload.model)
        if not is_for_cpu:
            _choose_foreach(self.workload)
        _make_optimizer_state(self.workload)
        self._forecasts: dict[str, Forecast] = {}
        self._layers = self._find_layers()

    def describe(self) -> Description:
        """Traces the layers. Returns what the parent needs to know."""
        with self._faked("a forward pass") as fake:
            layers = price_layers(
                fake, self._layers, functools.partial(op_seconds, rates=self._rates)
            )
        return Description(
            environment=self.environment(),
            layers=tuple(layers),
            reference="none",
            priced_step_seconds=self.step_seconds(),
            notes=(
                *self.workload.notes,
                "Nothing was measured: bytes are those of the ops that a CPU would run, seconds "
                f"come from the published rates of {self._rates.name} ({self._rates.source}).",
            ),
        )

    def forecast(self, policy: Policy) -> ForecastPeak:
        """Returns the peak of allocated bytes that `policy` would have."""
        try:
            dry = self.dry_run(policy)
        except Exception as error:
            return ForecastPeak(problem=str(error).partition("\n")[0])
        return ForecastPeak(peak_bytes=dry.peak_bytes, phase_peak_bytes=dry.phase_peak_bytes)

    def dry_run(self, policy: Policy) -> Forecast:
        """Returns what a step under `policy` would need. Each policy is run once.

        Raises:
            CannotForecast: the step reads values, or runs an op without fake form.
        """
        if policy.key not in self._forecasts:
            self._forecasts[policy.key] = self._dry_run(policy)
        return self._forecasts[policy.key]

    def timeline(self, policy: Policy) -> Timeline | None:
        """Returns the memory of a step under `policy`, op by op; None where it cannot be told."""
        try:
            return self._dry_run(policy, with_timeline=True).timeline
        except Exception:
            return None

    def step_seconds(self) -> float:
        """Returns the priced seconds of a whole step without checkpointing.

        Raises:
            CannotForecast: the step reads values, or runs an op without fake form.
        """
        with self._faked("a training step") as fake:
            fake.run_step()  # makes the optimizer's state
            price = StepPrice(self._rates)
            with price:
                fake.run_step()
        return price.seconds

    def profile(self, request: ProfileRequest) -> Profile:
        """Returns sizes and prices of the layers.

        Raises:
            CannotForecast: the step reads values, or runs an op without fake form.
        """
        return profile_workload(self.workload, request, self.dry_run, on_cpu=False)

    def is_healthy(self) -> bool:
        """Whether the session can go on: nothing runs, so nothing can be left behind."""
        return True

    def environment(self) -> Environment:
        """Returns what figures of this session belong to."""
        return environment_of(
            self.workload,
            self._settings,
            self._source_hash,
            device="forecast",
            figures=DeviceFigures(
                name=self._rates.name, total_bytes=self._rates.memory_bytes, driver=None
            ),
            clock="forecast",
            allocator_settings="",
        )

    def _dry_run(self, policy: Policy, *, with_timeline: bool = False) -> Forecast:
        with _errors_explained("a training step"), any_device_as_cpu():
            return forecast_step(
                self.workload,
                policy,
                layer_names=tuple(layer.name for layer in self._layers),
                with_timeline=with_timeline,
            )

    def _find_layers(self) -> list[Layer]:
        patterns = self._settings.layers or self.workload.layers
        with self._faked("a forward pass without gradients") as fake, torch.no_grad():
            return find_layers(fake.model, fake.run_forward, patterns)

    @contextlib.contextmanager
    def _faked(self, what: str) -> Iterator[Workload]:
        mode = FakeMode()
        with (
            _errors_explained(what),
            fakes_refused(),
            any_device_as_cpu(),
            faked(self.workload, mode) as fake,
            mode,
        ):
            yield fake


@contextlib.contextmanager
def _errors_explained(what: str) -> Iterator[None]:
    try:
        yield
    except (SacSearchError, CannotForecast):
        raise
    except Exception as error:
        raise step_error(error, f"{what} on fake tensors") from error


def _build(factory: Factory, batch_size: int | None) -> Workload:
    """Builds the workload on the meta device, or on the CPU where that does not work.

    A factory that does not take a device is asked for the CPU's.
    """
    if factory.takes_device:
        # What the factory makes before it moves it to its device is born on the meta device, too;
        # without that when it needs real values on the way.
        for default in (_META, contextlib.nullcontext()):
            with contextlib.suppress(WorkloadError), default:
                return build_workload(factory, _META, batch_size)
    return build_workload(factory, torch.device("cpu"), batch_size)


def _build_on_cpu(factory: Factory, batch_size: int | None) -> Workload:
    return build_workload(factory, torch.device("cpu"), batch_size)


def _choose_foreach(workload: Workload) -> None:
    """Makes the optimizer run over all tensors at once, as on accelerators by default.

    It is faster, and takes memory: a temporary of every parameter.
    """
    for group in workload.optimizer.param_groups if workload.optimizer is not None else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _make_optimizer_state(workload: Workload) -> None:
    """Makes the optimizer's state once, free on the meta device, so that no dry run has to."""
    parameters = workload.parameters()
    if workload.optimizer is None or any(p.device != _META for p in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    # An optimizer that looks at values cannot; then each dry run makes the state for itself.
    with contextlib.suppress(Exception):
        workload.optimizer.step()
    for parameter in parameters:
        parameter.grad = None
