"""What a search over batch sizes found: every size with its best policy, and the best of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sac_search import records
from sac_search.policy import Policy, policy_document
from sac_search.records import Bytes, Environment
from sac_search.study.baselines import FULL, NONE
from sac_search.study.batches import (
    BATCHES_SCHEMA_VERSION,
    BatchStore,
    Compared,
    SizeRecord,
    SizeState,
    size_folder,
)
from sac_search.study.candidate import Candidate, peak_of, rank
from sac_search.study.finish import known_as_wrong, known_candidates
from sac_search.study.result import SearchResult, find_candidate
from sac_search.study.store import StudyStore, open_study


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One batch size in the result."""

    record: SizeRecord
    """What became of it."""
    candidates: tuple[Candidate, ...] = ()
    """Everything that was measured at this size."""
    best: Candidate | None = None
    """The best of them that fits; None where none does."""
    none: Candidate | None = None
    """The step without checkpointing."""
    full: Candidate | None = None
    """The step with every layer checkpointed."""
    compared: Compared | None = None
    """The best in the comparison with other sizes; None where it was not in it."""

    @property
    def batch_size(self) -> int:
        """The batch size."""
        return self.record.batch_size

    @property
    def step_seconds(self) -> float | None:
        """Step time of the best."""
        return self.step_seconds_of(self.best)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the best."""
        return self.samples_per_second_of(self.best)

    def step_seconds_of(self, candidate: Candidate | None) -> float | None:
        """Returns the step time of a candidate of this size.

        Where its best was in the comparison, as it would have been in that: policies of one size
        are held against each other by the steps that ran beside theirs.
        """
        if candidate is None or candidate.step_seconds is None:
            return None
        best, compared = self.best, self.compared
        if best is None or not best.step_seconds or compared is None:
            return candidate.step_seconds
        if compared.key != best.policy.key or compared.step_seconds is None:
            return candidate.step_seconds
        return candidate.step_seconds * compared.step_seconds / best.step_seconds

    def samples_per_second_of(self, candidate: Candidate | None) -> float | None:
        """Returns the throughput of a candidate of this size."""
        seconds = self.step_seconds_of(candidate)
        return self.record.samples / seconds if seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What a search over batch sizes found."""

    study_name: str
    """Name of the study."""
    folder: Path
    """Where its files are; the study of each size is in a folder `batch-N` below."""
    budget_bytes: Bytes
    """The budget."""
    environment: Environment
    """What all figures belong to; its batch size is None."""
    sizes: tuple[SizeResult, ...]
    """Every batch size, smallest first."""
    winner: SearchResult | None
    """The study of the best batch size, with the policy that was verified; None without any."""
    batch_size: int | None
    """The best batch size; None when nothing fits, or nothing passed verification."""
    stop_reason: str
    """Why the search stopped."""
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""
    interrupted: bool = False
    """Whether the user stopped it."""
    arguments: tuple[str, ...] = ()
    """What says on the command line, behind the workload, how it was searched."""
    report_path: Path | None = None
    """Its report; None where none was written."""

    @property
    def best(self) -> SizeResult | None:
        """What is known of the best batch size."""
        return next((s for s in self.sizes if s.batch_size == self.batch_size), None)

    @property
    def policy(self) -> Policy:
        """The winner's policy.

        Raises:
            ValueError: nothing fits the budget.
        """
        if self.winner is None:
            raise ValueError("no policy fits the budget")
        return self.winner.policy

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the winner."""
        return None if self.best is None else self.best.samples_per_second

    @property
    def tokens_per_second(self) -> float | None:
        """The same in tokens, where the sequence length is known."""
        return self.tokens(self.samples_per_second)

    @property
    def best_without_checkpointing(self) -> SizeResult | None:
        """The batch size that is fastest without checkpointing, of those where that fits."""
        fitting = [s for s in self.sizes if s.none is not None and s.none.fits(self.budget_bytes)]
        return max(fitting, key=lambda s: s.samples_per_second_of(s.none) or 0.0, default=None)

    @property
    def measured(self) -> int:
        """Policies that were measured, at all sizes together."""
        return sum(not c.is_ruled_out for size in self.sizes for c in size.candidates)

    def tokens(self, samples: float | None) -> float | None:
        """Returns as many tokens as are in these samples, where the sequence length is known."""
        length = self.environment.sequence_length
        return None if samples is None or length is None else samples * length


def sizes_of(store: BatchStore) -> tuple[SizeResult, ...]:
    """Returns every size of a study, from the studies of the sizes."""
    compared = {entry.batch_size: entry for entry in store.compared}
    found = []
    for record in store.sizes:
        study = None
        if record.state in (SizeState.MEASURED, SizeState.TOO_LARGE):
            study = open_study(size_folder(store.folder, record.batch_size))
        is_best = study is not None and record.batch_size == store.best_batch_size
        best_key = study.winner if is_best and study is not None else None
        found.append(size_result(record, study, compared.get(record.batch_size), best_key))
    return tuple(found)


def size_result(
    record: SizeRecord,
    store: StudyStore | None,
    compared: Compared | None = None,
    best_key: str | None = None,
) -> SizeResult:
    """Returns one size of a result, from the study of that size.

    Its best is the policy of `best_key`, which was verified, or else the best that was measured.
    """
    if store is None:
        return SizeResult(record=record)
    candidates = known_candidates(store)
    best = next((c for c in candidates if c.policy.key == best_key), None)
    return SizeResult(
        record=record,
        candidates=tuple(candidates),
        best=best or next(iter(ranked_candidates(store)), None),
        none=find_candidate(candidates, NONE),
        full=find_candidate(candidates, FULL),
        compared=compared,
    )


def ranked_candidates(store: StudyStore) -> list[Candidate]:
    """Returns what fits in the study of one size, best first.

    Without policies that did not pass verification; no checkpointing alone where that fits, which
    nothing is faster than but by noise.
    """
    candidates = known_candidates(store)
    none = find_candidate(candidates, NONE)
    if none is not None and none.fits(store.budget_bytes):
        return [none]
    wrong = known_as_wrong(store, candidates)
    return rank((c for c in candidates if c not in wrong), store.budget_bytes)


def to_document(result: ThroughputResult) -> dict[str, Any]:
    """Returns `result.json` of a study over batch sizes."""
    best = result.best
    return {
        "schema_version": BATCHES_SCHEMA_VERSION,
        "study_name": result.study_name,
        "maximize": "throughput",
        "evidence": "measured",
        "budget_bytes": result.budget_bytes,
        "environment": records.to_builtins(result.environment),
        "sizes": [_entry(result, size) for size in result.sizes],
        "best": None if best is None else _entry(result, best),
        "measured_policies": result.measured,
        "stop_reason": result.stop_reason,
    }


def _entry(result: ThroughputResult, size: SizeResult) -> dict[str, Any]:
    best, samples = size.best, size.samples_per_second
    record = size.record
    return {
        "batch_size": size.batch_size,
        "samples": record.samples,
        "state": str(record.state),
        "reason": record.reason,
        "samples_per_second": samples,
        "tokens_per_second": result.tokens(samples),
        "step_seconds": size.step_seconds,
        "peak_bytes": None if best is None or best.measurement is None else peak_of(best),
        "policy": None if best is None else policy_document(best.policy),
        "samples_per_second_without_checkpointing": size.samples_per_second_of(size.none),
        "samples_per_second_with_full_checkpointing": size.samples_per_second_of(size.full),
        "bound_samples_per_second": record.bound_samples_per_second,
        "forecast_full_peak_bytes": record.full_peak_bytes,
        "measured_policies": sum(not c.is_ruled_out for c in size.candidates),
    }
