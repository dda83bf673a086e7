"""What a search believes at its end: what saving each op buys, and the whole trade-off.

Beliefs, not measurements: prices are those of the cost model after all trials, peaks those of dry
runs, corrected by the measured ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sac_search.planning import PlannedPolicy, PolicyPlanner, Prices
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.records import Bytes
from sac_search.units import GIB

# Budgets along the trade-off, ends included.
_POINTS = 9
# What more there might be is asked for in steps of this, or of a part of the whole range.
_MORE_BYTES = GIB
_MORE_FRACTION = 0.1
# Of the whole trade-off: seconds for all of it, and dry runs for each budget.
_MOST_SECONDS = 20.0
_DRY_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePrice:
    """What saving the ops of one label buys in one layer of a kind, and what it costs."""

    kind: str
    """The layer kind."""
    label: str
    """An op class, or a class at a site: `matmul[2048x8192]`."""
    layers: int
    """Layers of the kind."""
    seconds: float
    """Step time that recomputing them takes, in one layer."""
    kept_bytes: Bytes
    """What one layer keeps more when it saves them, each storage once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrice:
    """What checkpointing one layer of a kind costs, and what it frees."""

    kind: str
    """The layer kind."""
    layers: int
    """Layers of the kind."""
    recompute_seconds: float
    """Step time that recomputing all of one layer takes."""
    fixed_seconds: float
    """The part of it that is paid whatever is saved."""
    policy_seconds: float
    """What a policy function costs one layer that saves anything."""
    plain_bytes: Bytes
    """What one layer keeps when all of it is recomputed."""
    alone_bytes: Bytes
    """What it keeps when it is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierEstimate:
    """The fastest policy under one budget, by the planner."""

    budget_bytes: Bytes
    """The budget."""
    peak_bytes: Bytes
    """The policy's peak, by its dry run and what measured peaks say of those."""
    overhead_seconds: float
    """Step time above that without checkpointing, by the prices."""
    policy: Policy
    """The policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insights:
    """What a search believes at its end. Of eager steps."""

    saves: tuple[SavePrice, ...]
    """What can be saved, per layer kind, most seconds first."""
    layers: tuple[LayerPrice, ...]
    """The layer kinds, in the order in which they run."""
    frontier: tuple[FrontierEstimate, ...]
    """The trade-off, from the smallest budget to the largest; the study's own among them."""


def price_list(
    profile: Profile, prices: Prices
) -> tuple[tuple[SavePrice, ...], tuple[LayerPrice, ...]]:
    """Returns what saving buys and what checkpointing costs, in each kind of a profile's layers."""
    kinds = [
        (kind, price, profile.order.count(index))
        for index, (kind, price) in enumerate(zip(profile.kinds, prices, strict=True))
    ]
    saves = tuple(
        SavePrice(kind=kind.name, label=label, layers=count, seconds=seconds, kept_bytes=kept)
        for kind, price, count in kinds
        for seconds, label, kept in sorted(
            zip(price.label_seconds, kind.labels, kind.label_bytes, strict=True), reverse=True
        )
    )
    layers = tuple(
        LayerPrice(
            kind=kind.name,
            layers=count,
            recompute_seconds=price.other_seconds + sum(price.label_seconds),
            fixed_seconds=price.other_seconds,
            policy_seconds=price.policy_seconds,
            plain_bytes=kind.plain_bytes,
            alone_bytes=kind.alone_bytes,
        )
        for kind, price, count in kinds
    )
    return saves, layers


def plan_frontier(
    planner: PolicyPlanner,
    prices: Prices,
    budgets: list[int],
    *,
    limit_of: Callable[[int], int],
    estimate: Callable[[int, PlannedPolicy], FrontierEstimate],
) -> tuple[FrontierEstimate, ...]:
    """Returns the fastest policies under `budgets`, as many of the first as are planned in time.

    `limit_of` says which forecast stands for a budget, `estimate` what a plan for it is worth.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    found = []
    for budget_bytes in budgets:
        if time.monotonic() > deadline:
            break
        planned = planner.plan(limit_of(budget_bytes), prices, dry_runs=_DRY_RUNS)
        if planned is not None:
            found.append(estimate(budget_bytes, planned))
    return tuple(sorted(found, key=lambda point: point.budget_bytes))


def budgets_along(budget_bytes: int, lowest_bytes: int, highest_bytes: int) -> list[int]:
    """Returns budgets to plan for, between the peaks of full and of no checkpointing.

    The study's own comes first, then a little more than that, then the ends and what is between.
    """
    width = max(0, highest_bytes - lowest_bytes)
    more = budget_bytes + min(_MORE_BYTES, round(_MORE_FRACTION * width))
    steps = [lowest_bytes + round(width * i / (_POINTS - 1)) for i in range(_POINTS)]
    wanted = [budget_bytes, min(more, highest_bytes), steps[-1], steps[0], *steps[1:-1]]
    return [b for b in dict.fromkeys(wanted) if b == budget_bytes or b >= lowest_bytes]
