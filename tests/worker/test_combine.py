"""What the answers of several ranks come to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scripted import ENVIRONMENT, make_failed, make_layers, make_outcome, make_timeline

from sac_search.errors import WorkloadError
from sac_search.failures import make_failure
from sac_search.policy import NO_CHECKPOINTING
from sac_search.profile import Profile, RowSample
from sac_search.records import Failure, FailureKind, Outcome, Phase, Verification
from sac_search.space import Granularity
from sac_search.timeline import Timeline
from sac_search.worker.combine import cause_of, combine, error_of, failure_of
from sac_search.worker.protocol import RemoteError
from sac_search.worker.session import Description, ForecastPeak, Verdict

VERIFICATION = Verification(
    passed=True,
    bitwise=True,
    reference="none",
    loss_difference=0.0,
    worst_gradient_difference=0.0,
    worst_parameter=None,
    noise=0.0,
    tolerance=1e-4,
)


def changed(outcome: Outcome, **changes: Any) -> Outcome:
    assert outcome.measurement is not None
    return dataclasses.replace(
        outcome, measurement=dataclasses.replace(outcome.measurement, **changes)
    )


def verdict(**changes: Any) -> Verdict:
    return Verdict(verification=dataclasses.replace(VERIFICATION, **changes))


def failure(message: str, kind: FailureKind = FailureKind.USER_ERROR) -> Failure:
    return make_failure(kind, message)


# --- figures --------------------------------------------------------------------------------------


def test_a_policy_costs_what_its_worst_rank_says() -> None:
    slow = make_outcome(seconds=2.0, peak_bytes=100, noise=0.1, reference=4.0)
    full = changed(make_outcome(seconds=1.0, peak_bytes=300), loss=7.0, alloc_retries=2)
    found = combine([slow, full, make_outcome(seconds=0.5, peak_bytes=200)]).measurement
    assert found.peak_bytes == found.allocated_bytes == 300
    assert found.phase_peak_bytes == {Phase.BACKWARD: 300}
    assert found.rank_peak_bytes == (100, 300, 200)
    assert (found.step_seconds, found.reference_seconds, found.relative_seconds) == (2.0, 4.0, 0.5)
    assert found.step_noise_fraction == 0.1
    assert found.loss == 1.0  # rank 0's
    assert found.alloc_retries == 2


def test_one_rank_alone_is_left_as_it_is() -> None:
    outcome = make_outcome()
    assert combine([outcome]) is outcome


def test_forecasts_are_known_where_every_rank_knows() -> None:
    known = [ForecastPeak(peak_bytes=5), ForecastPeak(peak_bytes=9)]
    unknown = ForecastPeak(problem="on paper")
    assert combine(known).peak_bytes == 9
    assert combine([*known, unknown]) == unknown
    outcomes = [dataclasses.replace(make_outcome(), forecast_peak_bytes=n) for n in (5, 9)]
    assert combine(outcomes).forecast_peak_bytes == 9
    assert combine([*outcomes, make_outcome()]).forecast_peak_bytes is None


def test_ranks_that_ran_other_steps_measured_nothing() -> None:
    with pytest.raises(ValueError, match="did not run as many steps"):
        combine([make_outcome(), changed(make_outcome(), steps=3)])


def test_comparisons_are_combined_policy_by_policy() -> None:
    one, two = make_outcome(seconds=1.0), make_outcome(seconds=2.0)
    assert [o.measurement.step_seconds for o in combine([[one, two], [two, one]])] == [2.0, 2.0]


# --- verdicts -------------------------------------------------------------------------------------


def test_all_ranks_have_to_pass() -> None:
    wrong = verdict(
        passed=False,
        bitwise=False,
        worst_gradient_difference=0.5,
        note="The gradient of w.",
        noise=1,
    )
    near = verdict(bitwise=False, worst_gradient_difference=1e-6, buffers_differing=("b",))
    assert combine([verdict(), verdict()]).verification == VERIFICATION
    found = combine([verdict(), near]).verification
    assert (found.passed, found.bitwise, found.worst_gradient_difference) == (True, False, 1e-6)
    found = combine([near, wrong, verdict()]).verification
    assert (found.passed, found.bitwise, found.worst_gradient_difference) == (False, False, 0.5)
    assert found.note == "On rank 1: The gradient of w."
    assert (found.noise, found.buffers_differing) == (1, ("b",))


# --- descriptions and profiles --------------------------------------------------------------------


def described(**changes: Any) -> Description:
    fields = {"environment": ENVIRONMENT, "layers": make_layers(2), "reference": "full"}
    return Description(**{**fields, **changes})


def test_a_description_is_rank_0s_with_what_others_say_besides() -> None:
    other = dataclasses.replace(ENVIRONMENT, device_name="older")
    found = combine(
        [
            described(notes=("one", "two"), usable_bytes=9),
            described(notes=("two",), usable_bytes=5, environment=other),
        ]
    )
    assert found.environment == ENVIRONMENT
    assert found.usable_bytes == 5
    assert found.notes == ("one", "two", "Rank 1 is not like rank 0: device: paper -> older.")


def test_ranks_with_other_layers_cannot_be_searched_together() -> None:
    with pytest.raises(WorkloadError, match=r"rank 1 runs other layers than rank 0 \(3 and 2; h.2"):
        combine([described(), described(layers=make_layers(3))])


def test_a_profile_is_that_of_the_fullest_rank() -> None:
    def profile(peak_bytes: int) -> Profile:
        sample = RowSample(left_alone=(), phase_peak_bytes={Phase.LOSS: peak_bytes})
        return Profile(
            layers=(),
            kinds=(),
            order=(),
            granularity=Granularity.SITE,
            most_kept=sample,
            least_kept=sample,
            policy_call_seconds=0.0,
        )

    assert combine([profile(1), profile(3), profile(2)]) == profile(3)
    assert combine([profile(1), None]) is None


def test_the_memory_over_a_step_is_that_of_the_fullest_rank() -> None:
    def timeline(size_bytes: int) -> Timeline:
        return make_timeline(forward=size_bytes, backward=2)

    assert combine([timeline(3), timeline(9), timeline(5)]) == timeline(9)
    assert combine([timeline(3), None]) is None
    assert combine([None, timeline(3)]) is None
    assert combine([None, None]) is None


# --- failures -------------------------------------------------------------------------------------


def test_failures_are_found_in_every_kind_of_answer() -> None:
    failed = make_failed()
    assert failure_of(failed) == failed.failure
    assert failure_of([make_outcome(), failed]) == failed.failure
    assert failure_of(Verdict(failure=failed.failure)) == failed.failure
    for sound in (make_outcome(), [make_outcome()], verdict(), None, True, NO_CHECKPOINTING):
        assert failure_of(sound) is None


def test_the_first_failure_counts_and_names_its_rank() -> None:
    found = cause_of([(2, failure("first")), (0, failure("second"))], 4)
    assert found.message == "rank 2: first"


@pytest.mark.parametrize(
    "echo",
    [
        "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9",
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a ...",
    ],
)
def test_who_only_lost_a_peer_is_not_the_cause(echo: str) -> None:
    crash = failure("exit code 3", FailureKind.CRASH)
    assert cause_of([(0, failure(echo)), (1, crash)], 2).message == "rank 1: exit code 3"
    assert cause_of([(0, failure(echo))], 2).message == f"rank 0: {echo}"


def test_what_all_ranks_say_is_no_single_ranks_fault() -> None:
    same = failure("out of memory", FailureKind.OUT_OF_MEMORY)
    assert cause_of([(1, same), (0, same)], 2) == same
    assert cause_of([(1, same), (0, same)], 3).message == "rank 1: out of memory"


def test_errors_are_chosen_like_failures() -> None:
    def error(message: str) -> RemoteError:
        return RemoteError(type_name="WorkloadError", message=message)

    assert error_of([(1, error("no file")), (0, error("no file"))], 2) == error("no file")
    assert error_of([(1, error("no file")), (0, error("other"))], 2) == error("rank 1: no file")
    lost = error("RuntimeError: Connection closed by peer")
    assert error_of([(0, lost), (1, error("no file"))], 2) == error("rank 1: no file")
