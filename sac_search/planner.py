"""Which policy is fastest under a budget, from arrays alone: an exact planner and a lower bound.

A multiple-choice knapsack. Layers come in kinds; each kind has options (left alone, recompute all,
or one of many save sets), each option a price in seconds and a size in bytes. The unknowns are
whole numbers, how many layers of a kind take an option, so that equal layers bring no symmetry. One
row per phase of the step and per place in the backward pass keeps the peak under the budget. Solved
exactly by HiGHS through scipy; nothing here knows torch.

Within a kind, layers that keep less run earlier: that order is never worse, since when the backward
pass reaches a layer, what the earlier layers keep is still there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

_MEBIBYTE = 2.0**20
_MILLISECOND = 1e-3
# A kind's options are thinned to those that some budget could want; this much faster is faster.
_RELATIVE_EQUAL = 1e-9
# After this the best plan so far is taken; most are solved in a fraction of a second.
_MOST_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one layer of a kind may do."""

    overhead_seconds: float
    """Step time that it adds, against leaving the layer alone."""
    saved_bytes: int
    """What it keeps from its forward to its backward."""
    is_tier: bool
    """Whether it is one of the policy's tiers; False for leaving the layer alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers that are alike."""

    options: tuple[Option, ...]
    """What each of them may do; the first leaves it alone."""
    activation_bytes: int
    """What is alive of one layer when its backward begins, however it came there."""
    gradient_bytes: int
    """Gradients of one layer's parameters, alive from its backward on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model's layers and the memory that is there whatever they do."""

    kinds: tuple[Kind, ...]
    """The kinds."""
    order: tuple[int, ...]
    """The kind of each layer, in the order in which they run."""
    forward_bytes: int
    """The forward phase's peak, less what all layers keep."""
    loss_bytes: int
    """The loss phase's peak, less what all layers keep."""
    backward_start_bytes: int
    """The peak when the backward pass begins, less what all layers keep."""
    backward_bytes: int
    """The peak at a layer's backward, less its activations, what earlier layers keep, and the
    gradients of later layers."""
    fixed_bytes: int
    """The peak of the phases that no layer changes: gradient clipping and the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice for every layer."""

    options: tuple[int, ...]
    """The option of each layer, in the order in which they run."""
    overhead_seconds: float
    """Step time that it adds, by the problem's prices."""
    peak_bytes: int
    """The peak of the step, by the problem's rows."""


def solve(problem: Problem, budget_bytes: int, *, tiers: int = 2) -> Plan | None:
    """Returns the plan with the least overhead whose peak is at most `budget_bytes`.

    Each kind uses at most `tiers` options beside leaving layers alone. None if nothing fits.
    """
    model = _Model(problem, tiers)
    limit = budget_bytes
    for _ in range(8):
        options = model.solve(limit)
        if options is None:
            return None
        plan = _plan(problem, options)
        if plan.peak_bytes <= budget_bytes:
            return plan
        # Where kinds alternate, the rows leave out how one kind's layers lie between another's.
        limit -= plan.peak_bytes - budget_bytes
    return None


def solve_greedily(problem: Problem, budget_bytes: int, *, tiers: int = 2) -> Plan | None:
    """Returns a plan by taking, again and again, the change that wins most seconds per byte.

    It begins with every layer keeping least. What a search for the optimum has to beat.
    """
    least = [
        min(range(len(kind.options)), key=lambda o: kind.options[o].saved_bytes)
        for kind in problem.kinds
    ]
    options = [least[kind] for kind in problem.order]
    if peak_of(problem, options) > budget_bytes:
        return None
    while True:
        changes = sorted(_changes(problem, options), key=lambda change: -change[0])
        changed = (_arranged_by_size(problem, options, i, option) for _, i, option in changes)
        fitting = (
            plan
            for plan in changed
            if _most_tiers(problem, plan) <= tiers and peak_of(problem, plan) <= budget_bytes
        )
        better = next(fitting, None)
        if better is None:
            return _plan(problem, tuple(options))
        options = better


def _changes(problem: Problem, options: Sequence[int]) -> list[tuple[float, int, int]]:
    """Returns what one layer of each kind and option may change to: gain per byte, layer, option"""
    last = {(problem.order[i], option): i for i, option in enumerate(options)}
    changes = []
    for (kind, option), index in last.items():
        for other in useful_options(problem.kinds[kind].options):
            old, new = problem.kinds[kind].options[option], problem.kinds[kind].options[other]
            gain_seconds = old.overhead_seconds - new.overhead_seconds
            if gain_seconds > 0:
                more_bytes = max(1, new.saved_bytes - old.saved_bytes)
                changes.append((gain_seconds / more_bytes, index, other))
    return changes


def _arranged_by_size(
    problem: Problem, options: Sequence[int], index: int, option: int
) -> list[int]:
    changed = list(options)
    changed[index] = option
    for kind, members in _members(problem).items():
        sizes = problem.kinds[kind].options
        inside = sorted((changed[i] for i in members), key=lambda o: (sizes[o].saved_bytes, o))
        for i, found in zip(members, inside, strict=True):
            changed[i] = found
    return changed


def _members(problem: Problem) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for index, kind in enumerate(problem.order):
        members.setdefault(kind, []).append(index)
    return members


def _most_tiers(problem: Problem, options: Sequence[int]) -> int:
    used: dict[int, set[int]] = {}
    for index, option in enumerate(options):
        if _option(problem, index, option).is_tier:
            used.setdefault(problem.order[index], set()).add(option)
    return max((len(tiers) for tiers in used.values()), default=0)


def lower_bound(problem: Problem, budget_bytes: int) -> float | None:
    """Returns overhead seconds that no plan can go under, with any number of tiers.

    The linear relaxation: fractions of layers may take fractions of options, and only the rows that
    hold for every order are kept. None if not even that fits.
    """
    return _Model(problem, tiers=len(problem.order)).relaxed(budget_bytes)


def peak_of(problem: Problem, options: Sequence[int]) -> int:
    """Returns the peak of a choice of options, one per layer in the order in which they run."""
    total_bytes = sum(_option(problem, i, o).saved_bytes for i, o in enumerate(options))
    return max(
        problem.fixed_bytes,
        problem.forward_bytes + total_bytes,
        problem.loss_bytes + total_bytes,
        problem.backward_start_bytes + total_bytes,
        *(problem.backward_bytes + row for row in _backward_rows(problem, options)),
    )


def _backward_rows(problem: Problem, options: Sequence[int]) -> list[int]:
    """Returns what moves at each layer's backward."""
    rows = []
    earlier_bytes = 0
    later_gradients = sum(_kind(problem, i).gradient_bytes for i in range(len(options)))
    for index, option in enumerate(options):
        kind = _kind(problem, index)
        later_gradients -= kind.gradient_bytes
        rows.append(earlier_bytes + kind.activation_bytes + later_gradients)
        earlier_bytes += kind.options[option].saved_bytes
    return rows


def overhead_of(problem: Problem, options: Sequence[int]) -> float:
    """Returns the overhead seconds of a choice of options."""
    return sum(_option(problem, i, o).overhead_seconds for i, o in enumerate(options))


def useful_options(options: Sequence[Option]) -> list[int]:
    """Returns the indices of options that are not both slower and larger than another.

    The first, leaving the layer alone, is always among them.
    """
    by_size = sorted(
        range(len(options)), key=lambda i: (options[i].saved_bytes, options[i].overhead_seconds)
    )
    kept, least = [0], float("inf")
    for index in by_size:
        seconds = options[index].overhead_seconds
        if seconds < least - _RELATIVE_EQUAL * abs(least if least < float("inf") else 0):
            least = seconds
            if index != 0:
                kept.append(index)
    return kept


def _plan(problem: Problem, options: tuple[int, ...]) -> Plan:
    return Plan(
        options=options,
        overhead_seconds=overhead_of(problem, options),
        peak_bytes=peak_of(problem, options),
    )


def _kind(problem: Problem, index: int) -> Kind:
    return problem.kinds[problem.order[index]]


def _option(problem: Problem, index: int, option: int) -> Option:
    return _kind(problem, index).options[option]


@dataclass(frozen=True, slots=True)
class _Column:
    """A variable: how many of a kind's layers take an option, or whether the last layer does."""

    kind: int
    option: int
    is_last: bool


class _Model:
    """The rows and columns of a problem. Bytes in MiB and seconds in ms, for the solver's sake."""

    def __init__(self, problem: Problem, tiers: int) -> None:
        self._problem = problem
        self._tiers = tiers
        self._last_kind = problem.order[-1]
        # The last layer has a column of its own: its backward is the first, when nothing is later.
        self._counts = [problem.order[:-1].count(k) for k in range(len(problem.kinds))]
        self._columns = [
            _Column(k, o, is_last)
            for is_last in (False, True)
            for k, kind in enumerate(problem.kinds)
            for o in useful_options(kind.options)
            if (k == self._last_kind if is_last else self._counts[k] > 0)
        ]
        # Behind the counts come two sets of yes or no: which options a kind uses at all, for the
        # limit on tiers, and which groups there are before the last layer, for their rows.
        self._uses = sorted({(c.kind, c.option) for c in self._columns if self._of(c).is_tier})
        self._groups = [index for index, c in enumerate(self._columns) if not c.is_last]
        self._saved = np.array([self._of(c).saved_bytes / _MEBIBYTE for c in self._columns])
        self._seconds = np.array(
            [self._of(c).overhead_seconds / _MILLISECOND for c in self._columns]
        )

    def relaxed(self, budget_bytes: int) -> float | None:
        """Returns the least overhead of the linear relaxation, in seconds."""
        rows, highest = self._phase_rows(budget_bytes)
        if self._fixed_excess(budget_bytes) > 0:
            return None
        equal, totals = self._count_rows()
        with _solver_prints_as_errors():
            result = linprog(
                self._seconds, A_ub=rows, b_ub=highest, A_eq=equal, b_eq=totals, method="highs"
            )
        return float(result.fun) * _MILLISECOND if result.status == 0 else None

    def solve(self, budget_bytes: int) -> tuple[int, ...] | None:
        """Returns the option of each layer, or None if nothing fits."""
        if self._fixed_excess(budget_bytes) > 0:
            return None
        switches = len(self._uses) + len(self._groups)
        width = len(self._columns) + switches
        rows, highest = self._phase_rows(budget_bytes)
        equal, totals = self._count_rows()
        constraints = [
            LinearConstraint(_padded(rows, width), -np.inf, highest),
            LinearConstraint(_padded(equal, width), totals, totals),
        ]
        constraints += self._use_constraints(width)
        constraints += self._group_constraints(width, budget_bytes)
        with _solver_prints_as_errors():
            result = milp(
                np.concatenate([self._seconds, np.full(switches, 1e-9)]),
                constraints=constraints,
                integrality=np.ones(width),
                bounds=Bounds(0, np.concatenate([self._most(), np.ones(switches)])),
                options={"mip_rel_gap": 1e-6, "time_limit": _MOST_SECONDS},
            )
        if result.x is None:
            return None
        return self._arranged(np.round(result.x[: len(self._columns)]).astype(int))

    # --- rows -------------------------------------------------------------------------------------

    def _phase_rows(self, budget_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Forward, loss and the begin of the backward feel all layers; the last layer's backward,
        which is the first to run, feels all but that."""
        problem = self._problem
        not_last = np.array([0.0 if c.is_last else 1.0 for c in self._columns])
        rows = np.vstack([self._saved, self._saved, self._saved, self._saved * not_last])
        last = problem.kinds[self._last_kind]
        taken = np.array(
            [
                problem.forward_bytes,
                problem.loss_bytes,
                problem.backward_start_bytes,
                problem.backward_bytes + last.activation_bytes,
            ]
        )
        return rows, (budget_bytes - taken) / _MEBIBYTE

    def _count_rows(self) -> tuple[np.ndarray, np.ndarray]:
        kinds = range(len(self._problem.kinds))
        rows = [
            [float(c.kind == k and not c.is_last) for c in self._columns]
            for k in kinds
            if self._counts[k] > 0
        ]
        rows.append([float(c.is_last) for c in self._columns])
        totals = [float(self._counts[k]) for k in kinds if self._counts[k] > 0] + [1.0]
        return np.array(rows), np.array(totals)

    def _use_constraints(self, width: int) -> list[LinearConstraint]:
        """A column is above zero only where its switches are on; few options of a kind may be."""
        rows, most = [], self._most()
        for index, column in enumerate(self._columns):
            switches = [self._group_index(index)] if index in self._groups else []
            if self._of(column).is_tier:
                switches.append(self._use_index(column.kind, column.option))
            for switch in switches:
                row = np.zeros(width)
                row[index] = 1
                row[switch] = -most[index]
                rows.append(row)
        limits = []
        for kind in sorted({k for k, _ in self._uses}):
            row = np.zeros(width)
            for k, o in self._uses:
                if k == kind:
                    row[self._use_index(k, o)] = 1
            limits.append(row)
        constraints = [LinearConstraint(np.array(rows), -np.inf, 0)] if rows else []
        if limits:
            constraints.append(LinearConstraint(np.array(limits), -np.inf, self._tiers))
        return constraints

    def _group_constraints(self, width: int, budget_bytes: int) -> list[LinearConstraint]:
        """The backward of the first and last layer of each group, in force where it has layers."""
        rows, highest = [], []
        everything = self._everything_mib()
        for index in self._groups:
            for is_end in (True, False):
                row, taken_bytes = self._group_row(self._columns[index], is_end=is_end)
                padded = np.zeros(width)
                padded[: len(row)] = row
                padded[self._group_index(index)] = everything
                rows.append(padded)
                highest.append((budget_bytes - taken_bytes) / _MEBIBYTE + everything)
        return [LinearConstraint(np.array(rows), -np.inf, np.array(highest))] if rows else []

    def _group_row(self, column: _Column, *, is_end: bool) -> tuple[np.ndarray, float]:
        problem = self._problem
        own = problem.kinds[column.kind]
        own_saved = self._of(column).saved_bytes
        first_own = problem.order.index(column.kind)
        row = np.zeros(len(self._columns))
        taken = float(problem.backward_bytes + own.activation_bytes)
        for index, other in enumerate(self._columns):
            gradient_mib = problem.kinds[other.kind].gradient_bytes / _MEBIBYTE
            if other.is_last:
                row[index] = gradient_mib
            elif other.kind != column.kind:
                before = problem.order.index(other.kind) < first_own
                row[index] = self._saved[index] if before else gradient_mib
            else:
                saved = self._of(other).saved_bytes
                same = other.option == column.option
                earlier = saved < own_saved or (saved == own_saved and other.option < column.option)
                if earlier or (same and is_end):
                    row[index] = self._saved[index]
                else:
                    row[index] = gradient_mib
                if same:
                    # The layer itself is neither before nor after.
                    taken -= own_saved if is_end else own.gradient_bytes
        return row, taken

    def _everything_mib(self) -> float:
        problem = self._problem
        largest = sum(
            max(o.saved_bytes for o in problem.kinds[k].options) + problem.kinds[k].gradient_bytes
            for k in problem.order
        )
        activations = max(kind.activation_bytes for kind in problem.kinds)
        return (largest + activations + abs(problem.backward_bytes)) / _MEBIBYTE

    # --- columns ----------------------------------------------------------------------------------

    def _of(self, column: _Column) -> Option:
        return self._problem.kinds[column.kind].options[column.option]

    def _use_index(self, kind: int, option: int) -> int:
        return len(self._columns) + self._uses.index((kind, option))

    def _group_index(self, column: int) -> int:
        return len(self._columns) + len(self._uses) + self._groups.index(column)

    def _most(self) -> np.ndarray:
        return np.array([1.0 if c.is_last else float(self._counts[c.kind]) for c in self._columns])

    def _fixed_excess(self, budget_bytes: int) -> int:
        return self._problem.fixed_bytes - budget_bytes

    def _arranged(self, counts: np.ndarray) -> tuple[int, ...]:
        """Returns an option per layer: within a kind, those that keep less first."""
        queues: dict[int, list[int]] = {k: [] for k in range(len(self._problem.kinds))}
        for column, count in zip(self._columns, counts, strict=True):
            queues[column.kind] += [column.option] * int(count)
        for kind, queue in queues.items():
            options = self._problem.kinds[kind].options
            # The last layer among them: to keep less there instead of earlier would win nothing.
            queue.sort(key=lambda o: (options[o].saved_bytes, o))
        return tuple(queues[kind].pop(0) for kind in self._problem.order)


def _padded(rows: np.ndarray, width: int) -> np.ndarray:
    return np.hstack([rows, np.zeros((rows.shape[0], width - rows.shape[1]))])


def with_phase_peaks(
    problem: Problem, plan: Plan, *, forward: int, loss: int, backward: int, fixed: int
) -> Problem:
    """Returns the problem corrected so that its rows give the peaks that `plan` really has.

    The arguments are a plan's peaks per phase, in bytes, from a dry run.
    """
    total_bytes = sum(_option(problem, i, o).saved_bytes for i, o in enumerate(plan.options))
    inner_rows = _backward_rows(problem, plan.options)
    start = problem.backward_start_bytes + total_bytes
    inner = problem.backward_bytes + max(inner_rows)
    # One of the two rows holds the peak: the larger one. Neither may be above it.
    start = backward if start >= inner else min(start, backward)
    inner = backward if inner >= start else min(inner, backward)
    return replace(
        problem,
        forward_bytes=forward - total_bytes,
        loss_bytes=loss - total_bytes,
        backward_start_bytes=start - total_bytes,
        backward_bytes=inner - max(inner_rows),
        fixed_bytes=fixed,
    )


@contextlib.contextmanager
def _solver_prints_as_errors() -> Iterator[None]:
    """Sends to standard error what HiGHS prints past Python's `sys.stdout`, warnings of its own.

    On standard output it would spoil `--json`.
    """
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a process without these streams
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
