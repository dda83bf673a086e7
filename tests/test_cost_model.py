"""What is learnt of costs: against formulas, and against models whose costs are known."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planning import TWO_KINDS, Paper

from sac_search.cost_model import CostModel, Gaussian, Observation, PeakModel, PeakObservation
from sac_search.planning import Prices, overhead_of
from sac_search.profile import Profile
from sac_search.space import Choices

GIB = 2**30
TWO_KINDS_PAPER = Paper(layers=TWO_KINDS)


# --- normal distributions -------------------------------------------------------------------------


def some_gaussian(generator: np.random.Generator, size: int) -> Gaussian:
    root = generator.normal(size=(size, size))
    return Gaussian(generator.normal(size=size), root @ root.T + 0.1 * np.eye(size))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 5), count=st.integers(1, 7))
def test_a_posterior_is_that_of_the_precision_form(seed: int, size: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    prior = some_gaussian(generator, size)
    rows, values = generator.normal(size=(count, size)), generator.normal(size=count)
    noise = generator.uniform(0.1, 2.0, size=count)

    posterior = prior.given(rows, values, noise)

    # Precisions add up, and so do precisions times means.
    precision = np.linalg.inv(prior.covariance) + rows.T @ np.diag(noise**-2) @ rows
    covariance = np.linalg.inv(precision)
    weighted = np.linalg.solve(prior.covariance, prior.mean) + rows.T @ (values / noise**2)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-8)
    np.testing.assert_allclose(posterior.mean, covariance @ weighted, atol=1e-8)
    np.testing.assert_array_equal(posterior.covariance, posterior.covariance.T)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.integers(0, 4))
def test_it_is_the_same_whether_seen_at_once_or_in_parts(seed: int, split: int) -> None:
    generator = np.random.default_rng(seed)
    prior = some_gaussian(generator, 3)
    rows, values = generator.normal(size=(4, 3)), generator.normal(size=4)
    noise = generator.uniform(0.1, 2.0, size=4)

    at_once = prior.given(rows, values, noise)
    in_parts = prior.given(rows[:split], values[:split], noise[:split]).given(
        rows[split:], values[split:], noise[split:]
    )

    np.testing.assert_allclose(in_parts.mean, at_once.mean, atol=1e-8)
    np.testing.assert_allclose(in_parts.covariance, at_once.covariance, atol=1e-8)


def test_nothing_seen_leaves_the_prior() -> None:
    prior = some_gaussian(np.random.default_rng(0), 2)
    assert prior.given(np.zeros((0, 2)), np.zeros(0), np.zeros(0)) is prior


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_draws_have_the_mean_and_the_covariance(spread: float) -> None:
    generator = np.random.default_rng(0)
    gaussian = some_gaussian(generator, 3)
    draws = np.array([gaussian.draw(generator, spread) for _ in range(20_000)])
    deviation = spread * np.sqrt(np.diag(gaussian.covariance))
    np.testing.assert_allclose(draws.mean(axis=0), gaussian.mean, atol=0.03 * deviation.max())
    np.testing.assert_allclose(
        np.cov(draws.T), spread**2 * gaussian.covariance, atol=0.04 * deviation.max() ** 2
    )


def test_what_is_certain_is_drawn_as_it_is() -> None:
    mean = np.array([1.0, 2.0])
    # A little below zero, as rounding leaves it.
    gaussian = Gaussian(mean, np.diag([0.0, -1e-18]))
    np.testing.assert_array_equal(gaussian.draw(np.random.default_rng(0)), mean)


# --- step times -----------------------------------------------------------------------------------


def observed(paper: Paper, choices: Choices, noise: float = 0.0) -> Observation:
    seconds = paper.measurer.step_seconds(paper.space.policy_of(choices))
    return Observation(choices=choices, through_policy=False, seconds=seconds, noise_fraction=noise)


def full_of(paper: Paper, *labels: str) -> Choices:
    return dict.fromkeys(paper.profile.layers, frozenset(labels))


def traced_too_low(paper: Paper) -> Profile:
    """Returns the profile of one forward pass, where the step has three of them."""
    kinds = tuple(
        replace(
            kind,
            label_seconds=tuple(seconds / 3 for seconds in kind.label_seconds),
            other_seconds=kind.other_seconds / 3,
        )
        for kind in paper.profile.kinds
    )
    return replace(paper.profile, kinds=kinds)


def some_choices(paper: Paper, count: int, seed: int = 0) -> list[Choices]:
    generator = random.Random(seed)  # noqa: S311
    return [
        paper.space.choices_for(
            {d.name: generator.randint(0, d.highest) for d in paper.space.decisions}
        )
        for _ in range(count)
    ]


def overheads(paper: Paper, prices: Prices, tried: list[Choices]) -> np.ndarray:
    return np.array([overhead_of(paper.profile, choices, prices) for choices in tried])


def test_without_observations_prices_are_as_traced() -> None:
    paper = Paper(layers=TWO_KINDS)
    model = CostModel(paper.profile, [])
    for kind, prices in zip(paper.profile.kinds, model.prices(), strict=True):
        assert prices.label_seconds == pytest.approx(kind.label_seconds)
        assert prices.other_seconds == pytest.approx(kind.other_seconds + 50e-6)
        assert prices.policy_seconds == pytest.approx(25e-6 * kind.policy_calls)


def test_prices_come_near_the_truth_as_steps_are_measured() -> None:
    factors = {"matmul[512x2048]": 0.4, "normalization[512]": 2.5, "activation[2048]": 0.7}
    paper = Paper(layers=TWO_KINDS, price_factor=lambda label: factors.get(label, 1.3))
    held_out = some_choices(paper, 30, seed=1)
    truth = np.array([paper.overhead_seconds(paper.space.policy_of(c)) for c in held_out])
    seen = [{}, full_of(paper), *some_choices(paper, 60)]

    errors, spreads = [], []
    for count in (0, 2, 15, 62):
        model = CostModel(paper.profile, [observed(paper, c) for c in seen[:count]])
        found = overheads(paper, model.prices(), held_out)
        errors.append(float(np.abs(found - truth).mean()))
        spreads.append(float(np.trace(model.posterior.covariance[1:-3, 1:-3])))
    # The largest overhead is near a fifth of a second.
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 0.01 * truth.max()
    assert spreads[1] > spreads[2] > spreads[3]


def test_the_scale_is_what_full_checkpointing_was_measured_to_add() -> None:
    paper = Paper()
    truth = paper.overhead_seconds(paper.measurer.full)
    ends = [observed(paper, {}), observed(paper, full_of(paper))]
    low = traced_too_low(paper)

    blind, scaled = CostModel(low, []), CostModel(low, ends)

    whole = [full_of(paper)]
    assert overheads(paper, blind.prices(), whole)[0] == pytest.approx(truth / 3, rel=0.01)
    assert overheads(paper, scaled.prices(), whole)[0] == pytest.approx(truth, rel=0.01)
    (kind,), (prices,) = paper.profile.kinds, scaled.prices()
    assert prices.label_seconds == pytest.approx(kind.label_seconds, rel=0.01)


@pytest.mark.parametrize("missing", [0, 1])
def test_without_both_ends_there_is_no_scale(missing: int) -> None:
    paper = Paper()
    ends = [observed(paper, {}), observed(paper, full_of(paper))]
    model = CostModel(traced_too_low(paper), [])
    assert model._scale(ends) == pytest.approx(3)
    assert model._scale([ends[missing]]) == 1.0  # the trace as it is


def test_full_through_a_policy_is_not_taken_for_full() -> None:
    paper = Paper()
    none = observed(paper, {})
    through = Observation(
        choices=full_of(paper), through_policy=True, seconds=9.0, noise_fraction=0.0
    )
    partial = observed(paper, {"h.0": frozenset()})
    assert CostModel(paper.profile, [])._scale([none, through, partial]) == 1.0


def test_what_a_policy_function_costs_is_learnt_from_recomputing_all_through_one() -> None:
    paper = Paper()
    (kind,) = paper.profile.kinds
    full = observed(paper, full_of(paper))
    call_seconds = 40e-6  # the guess is 25
    added = 6 * kind.policy_calls * call_seconds
    through = Observation(
        choices=full_of(paper),
        through_policy=True,
        seconds=full.seconds + added,
        noise_fraction=0.0,
    )

    (before,) = CostModel(paper.profile, [observed(paper, {}), full]).prices()
    (after,) = CostModel(paper.profile, [observed(paper, {}), full, through]).prices()

    truth = kind.policy_calls * call_seconds
    assert abs(after.policy_seconds - truth) < 0.5 * abs(before.policy_seconds - truth)
    # Full checkpointing costs what it did.
    assert after.label_seconds == pytest.approx(before.label_seconds, rel=0.02)


def test_what_checkpointing_anything_costs_is_not_taken_for_the_price_of_a_layer() -> None:
    paper = Paper()
    start_seconds = 0.02 * observed(paper, {}).seconds

    def seen(count: int) -> Observation:
        names = paper.profile.layers[:count]
        found = observed(paper, dict.fromkeys(names, frozenset()))
        return replace(found, seconds=found.seconds + start_seconds * bool(count))

    model = CostModel(paper.profile, [seen(0), seen(1), seen(3), seen(6)])
    assert model.start_seconds == pytest.approx(start_seconds, rel=0.2)
    truth = [paper.overhead_seconds(paper.measurer.full)]
    assert overheads(paper, model.prices(), [full_of(paper)]) == pytest.approx(truth, rel=0.03)
    assert CostModel(paper.profile, [seen(0)]).start_seconds == 0
    # What costs less than nothing is noise.
    faster = replace(seen(1), seconds=0.9 * seen(0).seconds)
    assert CostModel(paper.profile, [seen(0), faster]).start_seconds == 0


def test_ops_of_one_class_are_more_alike_than_others() -> None:
    paper = Paper()
    (kind,) = paper.profile.kinds
    ends = [observed(paper, {}), observed(paper, full_of(paper))]
    dear = "matmul[512x2048]"
    saved = observed(paper, full_of(paper, dear))
    # Saving it won more than it was traced to take.
    won = Observation(
        choices=saved.choices,
        through_policy=False,
        seconds=saved.seconds - 0.01,
        noise_fraction=0.0,
    )

    (before,) = CostModel(paper.profile, [*ends, saved]).prices()
    (after,) = CostModel(paper.profile, [*ends, won]).prices()

    def growth(label: str) -> float:
        place = kind.labels.index(label)
        return after.label_seconds[place] / before.label_seconds[place]

    assert growth(dear) > 1.1
    assert growth(dear) > growth("matmul[2048x512]") > growth("attention")


def test_a_noisy_step_is_believed_less() -> None:
    paper = Paper(price_factor=lambda label: 2.0)

    def error(noise: float) -> float:
        seen = [observed(paper, {}, noise), observed(paper, full_of(paper, "attention"), noise)]
        tried = [full_of(paper, "attention")]
        truth = paper.overhead_seconds(paper.space.policy_of(tried[0]))
        return abs(overheads(paper, CostModel(paper.profile, seen).prices(), tried)[0] - truth)

    assert error(0.0) < error(0.05) < error(0.5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 20))
def test_prices_are_never_below_zero(seed: int, spread: float) -> None:
    paper = TWO_KINDS_PAPER
    generator = np.random.default_rng(seed)
    # Faster the more is recomputed, as nothing real is.
    senseless = [
        Observation(choices=c, through_policy=False, seconds=1 / (1 + len(c)), noise_fraction=0.0)
        for c in some_choices(paper, 5, seed)
    ]
    for observations in ([], senseless):
        model = CostModel(paper.profile, observations)
        for prices in (model.prices(), model.draw(generator, spread)):
            for kind in prices:
                assert min(*kind.label_seconds, kind.other_seconds, kind.policy_seconds) >= 0


def test_draws_are_about_what_is_likely() -> None:
    paper = Paper()
    ends = [observed(paper, {}), observed(paper, full_of(paper))]
    model, generator = CostModel(paper.profile, ends), np.random.default_rng(0)
    drawn = [model.draw(generator) for _ in range(200)]
    whole = [overheads(paper, prices, [full_of(paper)])[0] for prices in drawn]
    truth = paper.overhead_seconds(paper.measurer.full)
    # Full was measured, so all draws agree about it; about its parts they do not.
    assert float(np.mean(whole)) == pytest.approx(truth, rel=0.05)
    parts = np.array([prices[0].label_seconds for prices in drawn])
    assert (parts.std(axis=0) > 0.1 * parts.mean(axis=0)).all()
    exact = model.draw(generator, spread=0.0)
    assert exact[0].label_seconds == pytest.approx(model.prices()[0].label_seconds)


# --- peaks ----------------------------------------------------------------------------------------


def peaks(pairs: list[tuple[float, float]]) -> list[PeakObservation]:
    return [
        PeakObservation(forecast_bytes=round(f * GIB), measured_bytes=round(m * GIB))
        for f, m in pairs
    ]


def test_without_observations_a_forecast_is_believed() -> None:
    assert PeakModel([]).highest_forecast(3 * GIB) == 3 * GIB


@pytest.mark.parametrize("sizes", [[2.0], [1.0, 1.0], [1.0, 2.0, 3.0, 5.0]])
def test_exact_forecasts_leave_the_budget_as_it_is(sizes: list[float]) -> None:
    model = PeakModel(peaks([(size, size) for size in sizes]))
    for budget_gib in (0.8, 2.0, 6.0):
        budget_bytes = round(budget_gib * GIB)
        assert model.highest_forecast(budget_bytes) == pytest.approx(budget_bytes, rel=1e-3)


@pytest.mark.parametrize("factor", [0.7, 1.15, 2.0])
def test_a_constant_factor_is_learnt(factor: float) -> None:
    model = PeakModel(peaks([(size, factor * size) for size in (1.0, 2.0, 3.0)]))
    assert model.highest_forecast(2 * GIB) == pytest.approx(2 * GIB / factor, rel=1e-3)


def test_an_offset_is_learnt() -> None:
    sizes = np.linspace(1.0, 3.0, 12)
    model = PeakModel(peaks([(size, size + 0.05) for size in sizes]))
    for budget_gib in (1.2, 2.0, 2.8):
        found = model.highest_forecast(round(budget_gib * GIB))
        assert found == pytest.approx((budget_gib - 0.05) * GIB, rel=0.005)


def test_draws_of_the_highest_forecast_narrow() -> None:
    def spread(count: int, wider: float = 1.0) -> float:
        generator = np.random.default_rng(0)
        model = PeakModel(peaks([(1 + i / 10, 1 + i / 10) for i in range(count)]))
        draws = [model.highest_forecast(2 * GIB, generator, wider) for _ in range(200)]
        assert np.mean(draws) == pytest.approx(2 * GIB, rel=0.05)
        return float(np.std(draws)) / GIB

    assert spread(0) > 5 * spread(3) > 5 * spread(20) > 0
    assert spread(3, wider=3.0) == pytest.approx(3 * spread(3), rel=0.1)
