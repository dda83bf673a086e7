"""What several ranks answered to one request, as one answer: that of the worst of them.

Pure. A policy is as slow as its slowest rank, fits where it fits on every rank, and is right when
every rank's gradients are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sac_search.errors import WorkloadError
from sac_search.profile import Profile
from sac_search.records import Failure, Outcome
from sac_search.timeline import Timeline
from sac_search.worker.protocol import RemoteError
from sac_search.worker.session import Description, ForecastPeak, Verdict

# What a rank says whose peer is gone: seldom the cause of anything. (gloo, NCCL, torch's store.)
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by|Broken pipe|[Ss]ocket closed|closed the connection"
    r"|remote process exited|DistNetworkError|DistStoreError|NCCL communicator was aborted"
)


def failure_of(result: Any) -> Failure | None:
    """Returns why a rank has no figures; after that it may have left the others in their step."""
    if isinstance(result, Outcome | Verdict):
        return result.failure
    if isinstance(result, list):
        return next((failure for outcome in result if (failure := failure_of(outcome))), None)
    return None


def cause_of(failures: Sequence[tuple[int, Failure]], ranks: int) -> Failure:
    """Returns the failure of the rank that failed first, which its message then names.

    `failures` are ranks and their failures, in the order in which they came. Those that only tell
    of a lost peer come last. A failure that all `ranks` share names none.
    """
    causes = [f for f in failures if not _LOST_PEER.search(f[1].message)] or failures
    rank, first = causes[0]
    if len(failures) == ranks and all(failure == first for _, failure in failures):
        return first
    return replace(first, message=f"rank {rank}: {first.message}")


def error_of(errors: Sequence[tuple[int, RemoteError]], ranks: int) -> RemoteError:
    """Returns the error of the rank that failed first, as `cause_of` does."""
    causes = [e for e in errors if not _LOST_PEER.search(e[1].message)] or errors
    rank, first = causes[0]
    if len(errors) == ranks and all(error.message == first.message for _, error in errors):
        return first
    return replace(first, message=f"rank {rank}: {first.message}")


def combine(results: Sequence[Any]) -> Any:
    """Returns one result of the ranks' results, none of which has failed.

    Raises:
        WorkloadError: the ranks do not run the same layers.
        ValueError: they did not run the same steps.
    """
    first = results[0]
    if len(results) == 1 or isinstance(first, bool):
        return first
    if isinstance(first, Description):
        return _combine_descriptions(results)
    if isinstance(first, Outcome):
        return _combine_outcomes(results)
    if isinstance(first, Verdict):
        return _combine_verdicts(results)
    if isinstance(first, list):
        return [combine(outcomes) for outcomes in zip(*results, strict=True)]
    if isinstance(first, ForecastPeak):
        return _highest_forecast(results)
    if any(result is None for result in results):
        return None  # what one rank cannot tell, none can
    if isinstance(first, Timeline):
        return max(results, key=lambda timeline: timeline.peak_bytes)
    profiles: list[Profile] = list(results)
    return max(profiles, key=lambda profile: max(profile.most_kept.phase_peak_bytes.values()))


def _combine_descriptions(descriptions: Sequence[Description]) -> Description:
    first = descriptions[0]
    layers = [(layer.name, layer.kind) for layer in first.layers]
    notes = list(dict.fromkeys(note for d in descriptions for note in d.notes))
    for rank, other in enumerate(descriptions):
        others = [(layer.name, layer.kind) for layer in other.layers]
        if others != layers:
            example, _ = min(set(others) ^ set(layers), default=layers[0])
            raise WorkloadError(
                f"rank {rank} runs other layers than rank 0 ({len(others)} and {len(layers)}; "
                f"{example} is not the same on both); a policy is one for all ranks, so pipeline "
                "stages have to be searched one by one"
            )
        differences = first.environment.differences(other.environment)
        if differences:
            notes.append(f"Rank {rank} is not like rank 0: {'; '.join(differences)}.")
    usable = [d.usable_bytes for d in descriptions if d.usable_bytes is not None]
    return replace(first, notes=tuple(notes), usable_bytes=min(usable, default=None))


def _combine_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    measured = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    if len({measurement.steps for measurement in measured}) > 1:
        raise ValueError("the ranks did not run as many steps")
    slowest = max(measured, key=lambda m: m.step_seconds)
    fullest = max(measured, key=lambda m: m.peak_bytes)
    device_bytes = [m.device_bytes for m in measured if m.device_bytes is not None]
    forecasts = [outcome.forecast_peak_bytes for outcome in outcomes]
    known = [forecast for forecast in forecasts if forecast is not None]
    return Outcome(
        measurement=replace(
            fullest,
            device_bytes=max(device_bytes, default=None),
            step_seconds=slowest.step_seconds,
            step_noise_fraction=slowest.step_noise_fraction,
            reference_seconds=slowest.reference_seconds,
            relative_seconds=slowest.relative_seconds,
            loss=measured[0].loss,
            alloc_retries=max(m.alloc_retries for m in measured),
            compile_seconds=max(
                (m.compile_seconds for m in measured if m.compile_seconds is not None), default=None
            ),
            recompiles=tuple(dict.fromkeys(reason for m in measured for reason in m.recompiles)),
            rank_peak_bytes=tuple(m.peak_bytes for m in measured),
        ),
        forecast_peak_bytes=max(known) if len(known) == len(forecasts) else None,
    )


def _combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    found = [verdict.verification for verdict in verdicts if verdict.verification is not None]
    worst = max(
        range(len(found)),
        key=lambda rank: (
            not found[rank].passed,
            not found[rank].bitwise,
            found[rank].worst_gradient_difference,
        ),
    )
    note = found[worst].note
    return Verdict(
        verification=replace(
            found[worst],
            loss_difference=max(v.loss_difference for v in found),
            noise=max(v.noise for v in found),
            buffers_differing=tuple(dict.fromkeys(b for v in found for b in v.buffers_differing)),
            note=note if not note or found[worst].passed else f"On rank {worst}: {note}",
        )
    )


def _highest_forecast(forecasts: Sequence[ForecastPeak]) -> ForecastPeak:
    for forecast in forecasts:
        if forecast.peak_bytes is None:
            return forecast
    return max(forecasts, key=lambda forecast: forecast.peak_bytes or 0)
