"""The end of a search over batch sizes: the best of the best sizes measured again, one verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from sac_search.records import Outcome
from sac_search.study.batches import BatchStore, Compared
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.finish import Winner, choose_winner, confirm, known_as_wrong
from sac_search.study.size_search import SizeSearch, noise_of
from sac_search.study.throughput_result import SizeResult, ranked_candidates, sizes_of
from sac_search.worker.session import Verdict

# Sizes whose best is this close to the best of all are measured again beside it, so many at most.
_CLOSE_FRACTION = 0.03
_MOST_COMPARED = 4
# A larger difference than this is believed, however noisy the machine.
_LARGEST_TIE_FRACTION = 0.01

FreeDevice = Callable[[SizeSearch], None]
"""Ends the workers of all sizes but one."""


def compare_sizes(
    store: BatchStore, sizes: Sequence[SizeSearch], steps: int, free_device: FreeDevice
) -> None:
    """Measures the best policies of the best sizes again, there and back.

    And of the best size without checkpointing, which the winner is held against. A device gets
    slower as it warms up, and a machine is shared: there and back, each size is measured early and
    late. Before, the best few policies of each are measured side by side. Comparisons are kept, so
    that a continued search does not measure them once more.
    """
    chosen = _finalists(sizes)
    known = {entry.batch_size: entry.key for entry in store.compared}
    is_known = known == {size.batch_size: _best_of(size).policy.key for size in chosen}
    outcomes: dict[int, list[Outcome]] = {size.batch_size: [] for size in chosen}

    def measure(size: SizeSearch) -> None:
        free_device(size)
        outcomes[size.batch_size] += size.measurer.compare([_best_of(size).policy], steps)

    for size in chosen:
        if not _best_of(size).policy.changes_nothing:
            free_device(size)
            sound = _sound(size)
            confirm(size.store, size.measurer, sound, steps=steps)
        if not is_known and len(chosen) > 1:
            measure(size)
    if is_known or len(chosen) < 2:
        return
    for size in reversed(chosen):
        measure(size)
    compared = (
        Compared(
            batch_size=size.batch_size,
            key=_best_of(size).policy.key,
            outcomes=tuple(outcomes[size.batch_size]),
        )
        for size in chosen
    )
    store.write("compared", tuple(compared))


def choose_size(
    store: BatchStore,
    sizes: Sequence[SizeSearch],
    free_device: FreeDevice,
    on_verdict: Callable[[Candidate, Verdict], None],
) -> tuple[SizeSearch, Winner] | None:
    """Returns the fastest size whose best policy passes verification, with the policy.

    Where the best policy of a size does not pass, the next of that size competes with the others.
    """
    results = {result.batch_size: result for result in sizes_of(store)}
    passed: list[tuple[_Merit, SizeSearch, Winner]] = []
    for size in _ranked(results, sizes):
        result = results[size.batch_size]
        if passed and max(entry[0] for entry in passed) >= _merit_of(result, size.best):
            break
        free_device(size)
        wrong = known_as_wrong(size.store, size.store.candidates())
        candidates = [*wrong, *ranked_candidates(size.store)]
        winner = choose_winner(size.store, size.measurer, candidates, on_verdict)
        if winner.best is not None:
            passed.append((_merit_of(result, winner.best), size, winner))
    if not passed:
        return None
    _, size, winner = max(passed, key=lambda entry: entry[0])
    return size, winner


_Merit = tuple[bool, float]


def _merit_of(result: SizeResult, candidate: Candidate | None) -> _Merit:
    """Returns what sizes are ranked by: whether it was in the comparison, and samples per second.

    Those that were in it come first: how fast others would have been at that time is not known.
    """
    return result.compared is not None, result.samples_per_second_of(candidate) or 0.0


def _finalists(sizes: Sequence[SizeSearch]) -> list[SizeSearch]:
    """Returns the sizes to measure again, smallest first."""
    fitting = [(size.throughput(size.best) or 0.0, size) for size in sizes if size.best is not None]
    if not fitting:
        return []
    fitting.sort(key=lambda entry: -entry[0])
    first, fastest = fitting[0]
    least = first * (1 - max(_CLOSE_FRACTION, 2 * noise_of(fastest.best)))
    close = [size for throughput, size in fitting[:_MOST_COMPARED] if throughput >= least]
    plain = [size for _, size in fitting if _best_of(size).policy.changes_nothing]
    chosen = {size.batch_size: size for size in [*close, *plain[:1]]}
    return [chosen[batch_size] for batch_size in sorted(chosen)]


def _ranked(results: Mapping[int, SizeResult], sizes: Sequence[SizeSearch]) -> list[SizeSearch]:
    """Returns the sizes at which something fits, best first.

    Of those within the noise of the fastest, the one with the lowest peak comes first.
    """
    fitting = [size for size in sizes if size.best is not None]
    merits = {s.batch_size: _merit_of(results[s.batch_size], s.best) for s in fitting}
    fitting.sort(key=lambda size: merits[size.batch_size], reverse=True)
    if not fitting:
        return []
    is_compared, most = merits[fitting[0].batch_size]

    def is_alike(size: SizeSearch) -> bool:
        noise = 2 * math.hypot(noise_of(size.best), noise_of(fitting[0].best))
        least = most * (1 - min(noise, _LARGEST_TIE_FRACTION))
        return merits[size.batch_size] >= (is_compared, least)

    first = min(filter(is_alike, fitting), key=lambda size: peak_of(_best_of(size)))
    return [first, *(size for size in fitting if size is not first)]


def _sound(size: SizeSearch) -> list[Candidate]:
    candidates = size.store.candidates()
    wrong = known_as_wrong(size.store, candidates)
    return [candidate for candidate in candidates if candidate not in wrong]


def _best_of(size: SizeSearch) -> Candidate:
    best = size.best
    assert best is not None
    return best
