"""What ops cost, learnt from measured steps: Bayesian linear regression. Pure: numpy alone.

A step's seconds are linear in what a policy makes it do again: those of the step without
checkpointing, and for each kind and label the traced seconds that are recomputed, times a factor
that is learnt. So is a step's measured peak in its forecast. The prior is the profile: traced
seconds are roughly right, wrong together more than each alone, and ops of one class more alike than
others. The posterior of a linear model with Gaussian noise is Gaussian (Bishop, Pattern Recognition
and Machine Learning, section 3.3), in the form with one row per observation, since those are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sac_search.planning import KindPrices, Prices
from sac_search.profile import Profile
from sac_search.space import Choices

# How far traced seconds may be off, as a fraction: all together, a class, and each label.
_COMMON_SPREAD = 0.5
_CLASS_SPREAD = 0.2
_LABEL_SPREAD = 0.2
# The profile's cost of a policy function is a guess; "recompute all (policy)" will tell.
_POLICY_CALL_SPREAD = 4.0
# What entering and leaving a checkpointed region costs: saving the random state, hooks.
_REGION_SECONDS = 50e-6
# Checkpointing anything at all may cost something once, as a part of the step (3 to 4% were seen on
# a CPU, where buffers are freed and mapped in again in another order).
_START_SPREAD_FRACTION = 0.03
# A step's own noise is never believed to be smaller than this.
_SMALLEST_NOISE_FRACTION = 0.002
# How far a measured peak may be from its forecast: in proportion, and as a part of it that is
# always there. What remains beside the two is a caching allocator's rounding.
_PEAK_FACTOR_SPREAD = 0.1
_PEAK_OFFSET_SPREAD = 0.02
_PEAK_NOISE_FRACTION = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A measured step."""

    choices: Choices
    """What each checkpointed layer saved."""
    through_policy: bool
    """Whether a policy function was asked even where nothing was saved."""
    seconds: float
    """Its step time."""
    noise_fraction: float
    """Standard error of the step time, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakObservation:
    """A measured peak and its forecast."""

    forecast_bytes: int
    """Forecast of allocated bytes."""
    measured_bytes: int
    """What the budget limits, measured."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A multivariate normal distribution."""

    mean: np.ndarray
    """[parameters]"""
    covariance: np.ndarray
    """[parameters, parameters]"""

    def given(self, rows: np.ndarray, values: np.ndarray, noise: np.ndarray) -> Gaussian:
        """Returns the posterior after seeing `values` = `rows` @ parameters + noise.

        `rows` is [observations, parameters], `values` [observations], `noise` standard deviations
        [observations].
        """
        if len(values) == 0:
            return self
        shared = self.covariance @ rows.T
        gain = np.linalg.solve(rows @ shared + np.diag(noise**2), shared.T).T
        covariance = self.covariance - gain @ shared.T
        return Gaussian(
            self.mean + gain @ (values - rows @ self.mean), (covariance + covariance.T) / 2
        )

    def draw(self, generator: np.random.Generator, spread: float = 1.0) -> np.ndarray:
        """Returns one draw, `spread` times as far from the mean."""
        values, vectors = np.linalg.eigh(self.covariance)
        steps = np.sqrt(np.clip(values, 0, None)) * generator.standard_normal(len(values))
        return np.asarray(self.mean + spread * (vectors @ steps))


class CostModel:
    """Prices of one profile's ops, given what was measured."""

    def __init__(self, profile: Profile, observations: Sequence[Observation]) -> None:
        self._profile = profile
        self._labels = [
            (index, label) for index, kind in enumerate(profile.kinds) for label in kind.labels
        ]
        none = [o.seconds for o in observations if not o.choices]
        fastest = min((o.seconds for o in observations), default=0.0)
        prior = self._prior(none[0] if none else fastest, self._scale(observations))
        rows = np.array([self._features(o.choices, o.through_policy) for o in observations])
        self.posterior = prior.given(
            rows.reshape(len(observations), len(prior.mean)),
            np.array([o.seconds for o in observations]),
            np.array(
                [o.seconds * max(o.noise_fraction, _SMALLEST_NOISE_FRACTION) for o in observations]
            ),
        )

    def prices(self, parameters: np.ndarray | None = None) -> Prices:
        """Returns the prices that `parameters` stand for; the most likely ones by default.

        None is below zero.
        """
        values = np.clip(self.posterior.mean if parameters is None else parameters, 0.0, None)
        factors = dict(zip(self._labels, values[1:], strict=False))
        others = values[1 + len(self._labels) :]
        call_seconds, region_seconds, _ = values[-3:]
        return tuple(
            KindPrices(
                label_seconds=tuple(
                    float(factors[index, label] * seconds)
                    for label, seconds in zip(kind.labels, kind.label_seconds, strict=True)
                ),
                other_seconds=float(others[index] * kind.other_seconds + region_seconds),
                policy_seconds=float(call_seconds * kind.policy_calls),
            )
            for index, kind in enumerate(self._profile.kinds)
        )

    @property
    def none_seconds(self) -> float:
        """The step without checkpointing, measured or not."""
        return float(self.posterior.mean[0])

    @property
    def start_seconds(self) -> float:
        """What checkpointing anything at all costs beside the prices, whatever the policy."""
        return max(0.0, float(self.posterior.mean[-1]))

    def draw(self, generator: np.random.Generator, spread: float = 1.0) -> Prices:
        """Returns prices drawn from what is believed of them."""
        return self.prices(self.posterior.draw(generator, spread))

    # Parameters, in this order: seconds without checkpointing; a factor on each label's traced
    # seconds; one on each kind's other seconds; seconds per op that a policy is asked about; per
    # checkpointed layer; and for checkpointing anything.

    def _features(self, choices: Choices, through_policy: bool) -> np.ndarray:
        profile = self._profile
        labels = dict.fromkeys(self._labels, 0.0)
        others = np.zeros(len(profile.kinds))
        calls = 0
        for name, index in zip(profile.layers, profile.order, strict=True):
            if name not in choices:
                continue
            kind = profile.kinds[index]
            others[index] += kind.other_seconds
            for label, seconds in zip(kind.labels, kind.label_seconds, strict=True):
                if label not in choices[name]:
                    labels[index, label] += seconds
            if choices[name] or through_policy:
                calls += kind.policy_calls
        return np.array([1.0, *labels.values(), *others, calls, len(choices), bool(choices)])

    def _scale(self, observations: Sequence[Observation]) -> float:
        """Returns how many times the traced seconds full checkpointing was measured to add.

        A trace is of one forward pass, and a step may have many.
        """
        none = [o.seconds for o in observations if not o.choices]
        layers = set(self._profile.layers)
        full = [
            o.seconds
            for o in observations
            if set(o.choices) == layers and not any(o.choices.values()) and not o.through_policy
        ]
        traced = self._profile.recompute_seconds
        if not none or not full or traced <= 0 or full[0] <= none[0]:
            return 1.0
        return (full[0] - none[0]) / traced

    def _prior(self, none_seconds: float, scale: float) -> Gaussian:
        profile = self._profile
        classes = [label.partition("[")[0] for _, label in self._labels]
        classes += [f"others of {kind.name}" for kind in profile.kinds]
        count = len(classes)
        same = np.array([[a == b for b in classes] for a in classes]).reshape(count, count)
        factors = _COMMON_SPREAD**2 + _CLASS_SPREAD**2 * same + _LABEL_SPREAD**2 * np.eye(count)
        call_seconds = profile.policy_call_seconds
        mean = np.array([none_seconds, *[scale] * count, call_seconds, _REGION_SECONDS, 0.0])
        covariance = np.zeros((len(mean), len(mean)))
        covariance[0, 0] = (0.5 * none_seconds) ** 2
        covariance[1:-3, 1:-3] = scale**2 * factors
        covariance[-3, -3] = (_POLICY_CALL_SPREAD * call_seconds) ** 2
        covariance[-2, -2] = _REGION_SECONDS**2
        covariance[-1, -1] = (_START_SPREAD_FRACTION * none_seconds) ** 2
        return Gaussian(mean, covariance)


class PeakModel:
    """What a measured peak is, given its forecast: an offset and a factor, learnt."""

    def __init__(self, observations: Sequence[PeakObservation]) -> None:
        forecasts = np.array([o.forecast_bytes for o in observations], dtype=float)
        measured = np.array([o.measured_bytes for o in observations], dtype=float)
        # In parts of a typical forecast, for the sake of the numbers.
        self._unit = float(np.median(forecasts)) if len(forecasts) else 1.0
        factor = float(np.median(measured / forecasts)) if len(forecasts) else 1.0
        prior = Gaussian(
            np.array([0.0, factor]),
            np.diag([_PEAK_OFFSET_SPREAD**2, _PEAK_FACTOR_SPREAD**2]),
        )
        noise = max(
            _PEAK_NOISE_FRACTION,
            float(np.median(np.abs(measured / forecasts - factor))) if len(forecasts) else 0.0,
        )
        self._posterior = prior.given(
            np.stack([np.ones_like(forecasts), forecasts / self._unit], axis=1),
            measured / self._unit,
            noise * forecasts / self._unit,
        )

    def highest_forecast(
        self,
        budget_bytes: int,
        generator: np.random.Generator | None = None,
        spread: float = 1.0,
    ) -> int:
        """Returns the forecast up to which a step stays under `budget_bytes`.

        By the most likely parameters, or by a draw.
        """
        parameters = self._posterior.mean
        if generator is not None:
            parameters = self._posterior.draw(generator, spread)
        offset, factor = parameters
        highest = (budget_bytes / self._unit - offset) / max(factor, 0.1) * self._unit
        return round(float(highest))

    def expected(self, forecast_bytes: int) -> int:
        """Returns the measured peak that a forecast stands for, by the most likely parameters."""
        offset, factor = self._posterior.mean
        return round(float(offset * self._unit + max(factor, 0.1) * forecast_bytes))
