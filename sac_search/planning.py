"""Plans for a profiled workload: solved by the planner, checked by dry runs, corrected.

Knows no torch and no device: dry runs are somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sac_search.planner import (
    Kind,
    Option,
    Plan,
    Problem,
    lower_bound,
    solve,
    with_phase_peaks,
)
from sac_search.policy import Policy
from sac_search.profile import KindProfile, Profile, RowSample
from sac_search.records import Phase
from sac_search.space import Choices, SearchSpace

# How often a plan for one budget is dry-run and corrected.
MOST_DRY_RUNS = 8
# How far over the budget, by its rows, a plan may be and still be worth a dry run.
_OPTIMISM = 0.02
_SMALLEST_GAIN = 1e-9

PhasePeaks = Mapping[Phase, int]
DryRun = Callable[[Policy], PhasePeaks | None]
"""Returns the peaks of each phase of a step under a policy; None where they cannot be told."""
Solver = Callable[..., Plan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPrices:
    """What one layer of a kind costs, in seconds of step time."""

    label_seconds: tuple[float, ...]
    """For each label of the kind's profile, recomputing it."""
    other_seconds: float
    """What checkpointing the layer costs whatever it saves."""
    policy_seconds: float
    """What a policy function costs, for a layer that saves anything."""


Prices = tuple[KindPrices, ...]
"""The prices of each kind of a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPolicy:
    """A plan as a policy, dry-run."""

    policy: Policy
    """The policy."""
    choices: Choices
    """The same, as what each checkpointed layer saves."""
    overhead_seconds: float
    """Step time above that without checkpointing, by the prices."""
    peak_bytes: int
    """Its peak, by its dry run."""


class PolicyPlanner:
    """Plans one workload's policies. What dry runs teach about its rows is kept between plans."""

    def __init__(
        self, profile: Profile, space: SearchSpace, dry_run: DryRun, *, solver: Solver = solve
    ) -> None:
        self._profile = profile
        self._space = space
        self._dry_run = dry_run
        self._solver = solver
        self._rows = _first_rows(profile)
        # Rows are right for the plan that taught them and nearly right for its likes: another
        # budget starts from what its own likes have taught.
        self._taught: dict[int, Problem] = {}
        self._dry: dict[str, _Dry] = {}

    def plan(
        self, budget_bytes: int, prices: Prices, *, dry_runs: int = MOST_DRY_RUNS
    ) -> PlannedPolicy | None:
        """Returns the fastest policy whose dry run stays under the budget, or None if none does.

        Of everything that was dry-run so far, for whatever budget: a larger budget never gives a
        slower plan.
        """
        sets, kinds = self._kinds(prices)
        problem = replace(self._rows_near(budget_bytes), kinds=kinds)
        tried: set[tuple[int, ...]] = set()
        optimism = 0.0
        for _ in range(dry_runs):
            plan = self._solver(
                problem, round(budget_bytes * (1 + optimism)), tiers=self._space.tiers
            )
            if plan is None or plan.options in tried:
                break
            best = self._best(budget_bytes, prices)
            if best is not None and plan.overhead_seconds > best.overhead_seconds - _SMALLEST_GAIN:
                break
            tried.add(plan.options)
            dry = self._checked(self._choices_of(plan.options, sets))
            if dry is None:
                break
            problem = _corrected(problem, plan, dry.peaks)
            self._taught[budget_bytes] = problem
            # Rows may say too much as well as too little: once something fits, a plan a little over
            # the budget by the rows is tried, and kept if its dry run is under it.
            optimism = _OPTIMISM if dry.peak_bytes <= budget_bytes else 0.0
        if self._best(budget_bytes, prices) is None:
            # At the very end of the frontier the rows may need more dry runs than there are; what
            # is left to try is keeping as little as can be.
            profiles = [self._profile.kinds[kind] for kind in self._profile.order]
            self._checked(
                {
                    name: frozenset()
                    for name, kind in zip(self._profile.layers, profiles, strict=True)
                    if kind.plain_bytes < kind.alone_bytes
                }
            )
        # Rows that are right for another plan, one over the budget above all, may be far too high.
        self._search_down(kinds, sets, budget_bytes, prices, (dry_runs + 1) // 2)
        return self._best(budget_bytes, prices)

    def least(
        self, most_overhead_seconds: float, prices: Prices, *, start_seconds: float = 0.0
    ) -> PlannedPolicy | None:
        """Returns the policy of least peak within an overhead, of everything that was dry-run.

        `start_seconds` is what checkpointing anything costs beside the prices.
        """
        within = [
            planned
            for planned in self._priced(prices)
            if planned.overhead_seconds + bool(planned.choices) * start_seconds
            <= most_overhead_seconds
        ]
        return min(within, key=lambda p: (p.peak_bytes, p.overhead_seconds), default=None)

    def _search_down(
        self,
        kinds: tuple[Kind, ...],
        sets: list[list[frozenset[str] | None]],
        budget_bytes: int,
        prices: Prices,
        dry_runs: int,
    ) -> None:
        """Dry-runs plans for less than the budget, by rows that are right for the best that fits.

        Halfway down to what that needs, as often as such a plan is over the budget.
        """
        best = self._best(budget_bytes, prices)
        limit = budget_bytes
        while dry_runs > 0 and best is not None and limit > best.peak_bytes:
            dry_runs -= 1
            problem = self._anchored(kinds, best, sets)
            if problem is None:
                return
            self._taught[budget_bytes] = problem
            plan = self._solver(problem, limit, tiers=self._space.tiers)
            if plan is None or plan.overhead_seconds > best.overhead_seconds - _SMALLEST_GAIN:
                return
            dry = self._checked(self._choices_of(plan.options, sets))
            if dry is not None and dry.peak_bytes <= budget_bytes:
                best, limit = self._best(budget_bytes, prices), budget_bytes
            else:
                limit = (best.peak_bytes + min(limit, plan.peak_bytes)) // 2

    def _anchored(
        self,
        kinds: tuple[Kind, ...],
        best: PlannedPolicy,
        sets: Sequence[Sequence[frozenset[str] | None]],
    ) -> Problem | None:
        """Returns the problem of these kinds with rows that are not too high for `best`.

        None where prices have changed since, and leave what it does out of the useful options.
        """
        options = []
        for name, kind in zip(self._profile.layers, self._profile.order, strict=True):
            wanted = best.choices.get(name)
            if wanted not in sets[kind]:
                return None
            options.append(sets[kind].index(wanted))
        plan = Plan(options=tuple(options), overhead_seconds=0.0, peak_bytes=best.peak_bytes)
        first = replace(self._rows, kinds=kinds)
        found = _corrected(first, plan, self._dry[best.policy.key].peaks)
        # What a layer needs beyond what it keeps is its own: too little shows in a dry run, too
        # much hides what is never dry-run.
        return replace(
            found,
            forward_bytes=min(first.forward_bytes, found.forward_bytes),
            loss_bytes=min(first.loss_bytes, found.loss_bytes),
        )

    def layer_subset(self, budget_bytes: int) -> Choices | None:
        """Returns the fewest layers, earliest first, that have to be checkpointed under the budget.

        All of them is recomputed. What people do by hand, and at times the best there is.
        """
        names = self._profile.layers
        fewest, most = 0, len(names)
        while fewest <= most:
            count = (fewest + most) // 2
            peak_bytes = self.peak_bytes(dict.fromkeys(names[:count], frozenset()))
            if peak_bytes is not None and peak_bytes <= budget_bytes:
                most = count - 1
            else:
                fewest = count + 1
        return dict.fromkeys(names[:fewest], frozenset()) if fewest <= len(names) else None

    def overhead_of(self, choices: Choices, prices: Prices) -> float:
        """Returns the step time that `choices` add, in seconds."""
        return overhead_of(self._profile, choices, prices)

    def peak_bytes(self, choices: Choices) -> int | None:
        """Returns the peak of `choices` by their dry run; None where it cannot be told."""
        dry = self._checked(choices)
        return None if dry is None else dry.peak_bytes

    def kept_bytes(self, choices: Choices) -> int:
        """Returns what all layers keep between forward and backward, by the profile."""
        total = 0
        for name, index in zip(self._profile.layers, self._profile.order, strict=True):
            kind = self._profile.kinds[index]
            if name not in choices:
                total += kind.alone_bytes
                continue
            sizes = zip(kind.labels, kind.label_bytes, strict=True)
            total += kind.plain_bytes + sum(b for label, b in sizes if label in choices[name])
        return total

    def bound(self, budget_bytes: int, prices: Prices) -> float | None:
        """Returns overhead seconds that no policy of this form can go under, by the prices.

        For a little more than the budget, since the rows may say a little too much; and by two sets
        of them: those of the last plan, and those that are right for the best that fits.
        """
        sets, kinds = self._kinds(prices)
        problem = replace(self._rows_near(budget_bytes), kinds=kinds)
        best = self._best(budget_bytes, prices)
        problems = [problem, *([self._anchored(kinds, best, sets)] if best is not None else [])]
        limit = round(budget_bytes * (1 + _OPTIMISM))
        bounds = [lower_bound(rows, limit) for rows in problems if rows is not None]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _rows_near(self, budget_bytes: int) -> Problem:
        if not self._taught:
            return self._rows
        nearest = min(self._taught, key=lambda taught: abs(taught - budget_bytes))
        return self._taught[nearest]

    def _kinds(self, prices: Prices) -> tuple[list[list[frozenset[str] | None]], tuple[Kind, ...]]:
        """Returns each kind's useful save sets (None leaves a layer alone) and their options."""
        sets, kinds = [], []
        for kind, price in zip(self._profile.kinds, prices, strict=True):
            found, options = _options_of(kind, price)
            sets.append(found)
            kinds.append(
                Kind(
                    options=options,
                    activation_bytes=kind.alone_bytes,
                    gradient_bytes=kind.gradient_bytes,
                )
            )
        return sets, tuple(kinds)

    def _choices_of(
        self, options: Sequence[int], sets: Sequence[Sequence[frozenset[str] | None]]
    ) -> Choices:
        chosen = zip(self._profile.layers, self._profile.order, options, strict=True)
        return {
            name: labels
            for name, kind, option in chosen
            if (labels := sets[kind][option]) is not None
        }

    def _checked(self, choices: Choices) -> _Dry | None:
        """Returns the dry run of `choices`, which is kept."""
        policy = self._space.policy_of(choices)
        if policy.key not in self._dry:
            peaks = self._dry_run(policy)
            if peaks is None:
                return None
            self._dry[policy.key] = _Dry(policy=policy, choices=choices, peaks=peaks)
        return self._dry[policy.key]

    def _best(self, budget_bytes: int, prices: Prices) -> PlannedPolicy | None:
        fitting = self._priced(prices, most_bytes=budget_bytes)
        return min(fitting, key=lambda p: (p.overhead_seconds, p.peak_bytes), default=None)

    def _priced(self, prices: Prices, *, most_bytes: float = float("inf")) -> list[PlannedPolicy]:
        """Returns everything that was dry-run and peaks at `most_bytes` or less."""
        return [
            PlannedPolicy(
                policy=dry.policy,
                choices=dry.choices,
                overhead_seconds=overhead_of(self._profile, dry.choices, prices),
                peak_bytes=dry.peak_bytes,
            )
            for dry in self._dry.values()
            if dry.peak_bytes <= most_bytes
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dry:
    policy: Policy
    choices: Choices
    peaks: PhasePeaks

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())


def overhead_of(profile: Profile, choices: Choices, prices: Prices) -> float:
    """Returns the step time that `choices` add, in seconds."""
    total = 0.0
    for name, kind in zip(profile.layers, profile.order, strict=True):
        if name not in choices:
            continue
        price = prices[kind]
        total += price.other_seconds + sum(
            seconds
            for label, seconds in zip(profile.kinds[kind].labels, price.label_seconds, strict=True)
            if label not in choices[name]
        )
        if choices[name]:
            total += price.policy_seconds
    return total


def _options_of(
    kind: KindProfile, prices: KindPrices
) -> tuple[list[frozenset[str] | None], tuple[Option, ...]]:
    """Returns the save sets of one kind that some budget could want, and their options.

    The first leaves a layer alone, the second recomputes all of it.
    """
    count = len(kind.labels)
    saves = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    kept = kind.plain_bytes + saves @ np.array(kind.label_bytes, dtype=np.int64)
    whole_seconds = prices.other_seconds + sum(prices.label_seconds)
    seconds = whole_seconds - saves @ np.array(prices.label_seconds) + prices.policy_seconds
    seconds[0] -= prices.policy_seconds  # saving nothing is plain checkpointing
    sets: list[frozenset[str] | None] = [None, frozenset()]
    options = [
        Option(overhead_seconds=0.0, saved_bytes=kind.alone_bytes, is_tier=False),
        Option(overhead_seconds=float(seconds[0]), saved_bytes=int(kept[0]), is_tier=True),
    ]
    least = min(float(seconds[0]), np.inf)
    for index in np.lexsort((seconds, kept)):
        is_larger_than_alone = kept[index] >= kind.alone_bytes
        if index == 0 or is_larger_than_alone or seconds[index] >= least - _SMALLEST_GAIN:
            continue
        least = float(seconds[index])
        sets.append(frozenset(kind.labels[i] for i in np.flatnonzero(saves[index])))
        options.append(Option(overhead_seconds=least, saved_bytes=int(kept[index]), is_tier=True))
    return sets, tuple(options)


def _first_rows(profile: Profile) -> Problem:
    """Returns the problem without prices, its rows placed by the profile's two dry runs."""
    nothing = KindPrices(label_seconds=(), other_seconds=0.0, policy_seconds=0.0)
    kinds = tuple(
        Kind(
            options=_options_of(replace(kind, labels=(), label_bytes=()), nothing)[1],
            activation_bytes=kind.alone_bytes,
            gradient_bytes=kind.gradient_bytes,
        )
        for kind in profile.kinds
    )
    empty = Problem(
        kinds=kinds,
        order=profile.order,
        forward_bytes=0,
        loss_bytes=0,
        backward_start_bytes=0,
        backward_bytes=0,
        fixed_bytes=0,
    )
    # With nothing checkpointed the first backward holds the peak, with everything an inner one may.
    start = _placed(empty, profile, profile.most_kept)
    both = _placed(replace(start, backward_bytes=2**50), profile, profile.least_kept)
    # The forward of a layer needs more than it keeps, how much more is its tier's own. What is too
    # little here is put right by the dry runs; what is too much would hide good plans from them.
    return replace(
        both,
        forward_bytes=min(start.forward_bytes, both.forward_bytes),
        loss_bytes=min(start.loss_bytes, both.loss_bytes),
    )


def _placed(problem: Problem, profile: Profile, sample: RowSample) -> Problem:
    options = tuple(0 if name in sample.left_alone else 1 for name in profile.layers)
    plan = Plan(options=options, overhead_seconds=0.0, peak_bytes=0)
    return _corrected(problem, plan, sample.phase_peak_bytes)


def _corrected(problem: Problem, plan: Plan, peaks: PhasePeaks) -> Problem:
    return with_phase_peaks(
        problem,
        plan,
        forward=peaks.get(Phase.FORWARD, 0),
        loss=peaks.get(Phase.LOSS, 0),
        backward=peaks.get(Phase.BACKWARD, 0),
        fixed=max(peaks.get(Phase.CLIPPING, 0), peaks.get(Phase.OPTIMIZER, 0)),
    )
