"""The search over batch sizes with scripted workers: what it finds, costs and keeps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from scripted import ENVIRONMENT, MIB, Listener
from scripted_sizes import ScriptedWorkers, full_grid, in_proportion

from sac_search.apply import load_policy_module
from sac_search.batch_artifacts import load_throughput
from sac_search.errors import (
    EnvironmentMismatch,
    NoPolicyFits,
    StudyError,
    StudyFileError,
    WorkloadError,
)
from sac_search.options import SearchOptions
from sac_search.pipeline import run_search
from sac_search.study.baselines import FULL, NONE
from sac_search.study.batches import SizeState, open_batches, winner_folder
from sac_search.study.dashboard import attach_files
from sac_search.study.store import open_study
from sac_search.study.throughput_result import ThroughputResult
from sac_search.throughput import run_throughput
from sac_search.units import GIB

POWERS = (4, 8, 16, 32)
BUDGET_MIB = 300  # 4 samples fit without checkpointing, 16 with all of it, 32 do not


def search(
    workers: ScriptedWorkers,
    root: Path,
    sizes: tuple[int, ...] | None = POWERS,
    *,
    budget_mib: float = BUDGET_MIB,
    listener: Listener | None = None,
    **changes: object,
) -> ThroughputResult:
    given = {"granularity": "class", "tiers": 1, "report": False, **changes}
    options = SearchOptions(budget_gb=budget_mib * MIB / GIB, root=root, **given)  # type: ignore[arg-type]
    return run_throughput(workers, "gpt", options, sizes, listener or Listener())


def with_setup(size: int) -> float:
    """Larger pays, less and less: each step has a part that no sample adds to."""
    return 6.0 + size


def saturating(size: int) -> float:
    """Larger stops paying from about 7 on."""
    return 3.0 + size + size * size / 16


def cliff(size: int) -> float:
    """From 9 on every sample takes half as long again."""
    return 3.0 + size + max(0, size - 8) * 0.6


def in_waves(size: int) -> float:
    """Samples run four at a time."""
    return 1.0 + 4 * math.ceil(size / 4)


CURVES = (in_proportion, with_setup, saturating, cliff, in_waves)
SIZES = (POWERS, (2, 6, 10, 14, 18), (1, 3, 5, 7, 12, 24))


@pytest.mark.parametrize(
    ("curve", "sizes"),
    [
        (in_proportion, POWERS),
        (with_setup, POWERS),
        (saturating, SIZES[1]),
        (saturating, SIZES[2]),
        (cliff, SIZES[1]),
        (in_waves, SIZES[2]),
    ],
)
def test_finds_what_the_full_grid_finds_with_a_third_of_its_trials(
    curve: Callable[[int], float], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    workers = ScriptedWorkers(seconds=curve)

    result = search(workers, tmp_path, sizes)

    grid = full_grid(workers, sizes, result.budget_bytes)
    assert result.batch_size == grid.batch_size
    assert result.policy.key in grid.policy_keys
    assert result.samples_per_second == pytest.approx(grid.samples_per_second)
    assert workers.measured + workers.compared <= grid.trials / 3


@pytest.mark.parametrize("seed", range(6))
def test_finds_it_within_the_noise_though_prices_are_off(seed: int, tmp_path: Path) -> None:
    noise = (0.003, 0.01)[seed % 2]
    off = (0.5, 0.7, 1.5, 2.0)[seed % 4]
    workers = ScriptedWorkers(
        seconds=CURVES[seed % len(CURVES)],
        layer_count=3 + seed % 3,
        noise_fraction=noise,
        seed=seed,
        price_factor=lambda label: off if label == "matmul" else 1.0,
    )
    budget_mib = (180, 260, 360)[seed // 2]

    result = search(workers, tmp_path, SIZES[seed % len(SIZES)], budget_mib=budget_mib)

    grid = full_grid(workers, SIZES[seed % len(SIZES)], result.budget_bytes)
    assert result.batch_size is not None
    true_seconds = workers.make(result.batch_size).step_seconds(result.policy)
    assert result.batch_size / true_seconds >= grid.samples_per_second * (1 - 2 * noise)
    assert workers.measured + workers.compared <= grid.trials / 3


def test_finds_it_without_any_forecast(tmp_path: Path) -> None:
    workers = ScriptedWorkers(seconds=with_setup, can_forecast=False, forecast_factor=None)

    result = search(workers, tmp_path, trials=60)

    grid = full_grid(workers, POWERS, result.budget_bytes)
    assert result.batch_size == grid.batch_size
    assert result.samples_per_second == pytest.approx(grid.samples_per_second)
    assert set(workers.opened) == set(POWERS)
    assert result.sizes[-1].record.state is SizeState.TOO_LARGE


# --- sizes ----------------------------------------------------------------------------------------


def test_what_cannot_fit_is_ruled_out_before_anything_is_loaded(tmp_path: Path) -> None:
    workers = ScriptedWorkers()

    result = search(workers, tmp_path, (4, 64, 32, 128))

    assert set(workers.opened) == {4}
    states = {size.batch_size: size.record.state for size in result.sizes}
    assert states == {4: SizeState.MEASURED} | dict.fromkeys((32, 64, 128), SizeState.RULED_OUT)
    # The third is known from the two before it.
    assert workers.forecast_sizes == [4, 32]
    reasons = [size.record.reason for size in result.sizes[1:]]
    assert "by forecast its peak is 0.383 GiB with" in reasons[0]
    assert all("by forecast its peak is more than" in reason for reason in reasons[1:])


def test_nothing_is_loaded_when_no_size_fits(tmp_path: Path) -> None:
    workers = ScriptedWorkers()

    with pytest.raises(NoPolicyFits, match=r"no batch size fits .*\n  batch size 4: ruled out; by"):
        search(workers, tmp_path, budget_mib=41)

    assert not workers.opened
    assert not (tmp_path / "gpt" / "study.db").exists()


def test_a_size_that_fits_as_it_is_takes_no_trials(tmp_path: Path) -> None:
    workers = ScriptedWorkers()

    result = search(workers, tmp_path, (1, 2), budget_mib=500)

    assert [m.measured.total() for m in workers.opened.values()] == [2, 2]
    assert all(size.best == size.none for size in result.sizes)
    assert result.best_without_checkpointing is result.best


def test_auto_takes_powers_of_two_and_then_looks_between(tmp_path: Path) -> None:
    # The best size of all is 12, the largest that fits without checkpointing.
    workers = ScriptedWorkers(seconds=lambda size: 2 + size + size * size / 80)

    result = search(workers, tmp_path, None, budget_mib=330)

    sizes = [size.batch_size for size in result.sizes]
    assert set(sizes) > {1, 2, 4, 8, 16, 32}
    assert result.sizes[-1].record.state is SizeState.RULED_OUT
    grid = full_grid(workers, range(1, 33), result.budget_bytes)
    assert result.batch_size == grid.batch_size == 12
    assert workers.measured + workers.compared <= grid.trials / 3


def test_auto_ends_where_the_workload_can_be_built_no_larger(tmp_path: Path) -> None:
    result = search(ScriptedWorkers(broken=frozenset({8})), tmp_path, None)
    states = {size.batch_size: size.record.state for size in result.sizes}
    assert states[8] is SizeState.FAILED
    assert max(states) == 8
    assert {states[size] for size in (1, 2, 4)} == {SizeState.MEASURED}


def test_auto_says_when_nothing_fits_or_nothing_can_be_forecast(tmp_path: Path) -> None:
    with pytest.raises(NoPolicyFits, match="batch size 1: ruled out"):
        search(ScriptedWorkers(), tmp_path, None, budget_mib=41)
    with pytest.raises(WorkloadError, match=r"cannot be forecast.*--batch-sizes 4,8,16"):
        search(ScriptedWorkers(can_forecast=False), tmp_path, None)


def test_a_size_that_does_not_run_is_left_out(tmp_path: Path) -> None:
    listener = Listener()

    result = search(ScriptedWorkers(broken=frozenset({8})), tmp_path, listener=listener)

    failed = next(size for size in result.sizes if size.batch_size == 8)
    assert (failed.record.state, failed.samples_per_second) == (SizeState.FAILED, None)
    assert failed.record.reason == "a training step fails (step raised). Mend it."
    assert "Batch size 8 failed: a training step fails (step raised). Mend it.." in listener.notes
    assert result.batch_size in (4, 16)


def test_a_workload_that_does_not_run_at_the_first_size_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="a training step fails"):
        search(ScriptedWorkers(broken=frozenset({4})), tmp_path)


def test_a_workload_that_ignores_the_batch_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"batch size of 8 and says .* 4 samples, as for 4"):
        search(ScriptedWorkers(samples=lambda size: 4), tmp_path / "says")
    for samples in (lambda size: size, lambda size: None):
        workers = ScriptedWorkers(bytes_of=lambda size: 4, samples=samples)
        with pytest.raises(WorkloadError, match="its layers compute as many bytes as for 4"):
            search(workers, tmp_path / f"bytes-{samples(8)}")
        assert workers.opened[8].measured.total() == 0


def test_samples_are_those_that_the_workload_says(tmp_path: Path) -> None:
    """A step may accumulate: the factory's batch size is not what it trains on then."""
    plain = search(ScriptedWorkers(), tmp_path / "plain")
    accumulating = search(ScriptedWorkers(samples=lambda size: 3 * size), tmp_path / "three")
    assert plain.samples_per_second is not None
    assert accumulating.batch_size == plain.batch_size
    assert accumulating.samples_per_second == pytest.approx(3 * plain.samples_per_second)
    assert accumulating.tokens_per_second == pytest.approx(3 * 128 * plain.samples_per_second)


# --- trials ---------------------------------------------------------------------------------------


def test_trials_are_those_of_all_sizes_together(tmp_path: Path) -> None:
    workers = ScriptedWorkers(seconds=with_setup)

    result = search(workers, tmp_path, trials=3)

    trials = [
        c for size in result.sizes for c in size.candidates if not (c.is_baseline or c.is_ruled_out)
    ]
    assert len(trials) == 3
    assert result.stop_reason == "3 trials measured (--trials 3)"


def test_a_time_limit_ends_it_with_what_there_is(tmp_path: Path) -> None:
    result = search(ScriptedWorkers(seconds=with_setup), tmp_path, timeout_seconds=1e-3)
    assert result.stop_reason == "--timeout 0.001 s is over"
    assert result.batch_size is not None
    assert not any(size.record.is_done and size.none is None for size in result.sizes)


def test_the_winner_passes_verification_or_the_next_takes_its_place(tmp_path: Path) -> None:
    sound = search(ScriptedWorkers(seconds=with_setup), tmp_path / "sound")
    wrong_key = sound.policy.key
    workers = ScriptedWorkers(
        seconds=with_setup, wrong_gradients=lambda policy: policy.key == wrong_key
    )
    listener = Listener()

    result = search(workers, tmp_path / "wrong", listener=listener)

    assert result.policy.key != wrong_key
    assert result.winner is not None and result.winner.verification is not None
    assert result.winner.verification.passed
    assert any("did not pass verification" in note for note in listener.notes)
    assert result.samples_per_second is not None and sound.samples_per_second is not None
    assert result.samples_per_second <= sound.samples_per_second


def test_the_best_sizes_are_measured_again_there_and_back(tmp_path: Path) -> None:
    workers = ScriptedWorkers(seconds=with_setup)
    result = search(workers, tmp_path, (4, 14, 15, 16))

    compared = {entry.batch_size: entry for entry in open_batches(tmp_path / "gpt").compared}
    assert result.batch_size in compared
    assert len(compared) > 1
    assert all(len(entry.outcomes) == 2 for entry in compared.values())
    # And the best that runs without checkpointing, which the winner is held against.
    plain = result.best_without_checkpointing
    assert plain is not None and plain.batch_size in compared


# --- continuing -----------------------------------------------------------------------------------


def test_the_same_search_again_measures_nothing_and_loads_one_model(tmp_path: Path) -> None:
    first = search(ScriptedWorkers(seconds=with_setup), tmp_path)
    again = ScriptedWorkers(seconds=with_setup)

    second = search(again, tmp_path)

    assert again.measured + again.compared == 0
    assert sum(measurer.loads for measurer in again.opened.values()) == 1
    assert (second.batch_size, second.policy) == (first.batch_size, first.policy)
    assert second.samples_per_second == first.samples_per_second
    assert [s.record for s in second.sizes] == [s.record for s in first.sizes]


def test_other_sizes_may_join_later(tmp_path: Path) -> None:
    first = search(ScriptedWorkers(seconds=with_setup), tmp_path, (4, 8))
    assert first.batch_size == 8
    workers = ScriptedWorkers(seconds=with_setup)

    result = search(workers, tmp_path, (16, 32))

    whole = search(ScriptedWorkers(seconds=with_setup), tmp_path / "whole", POWERS)
    assert [size.batch_size for size in result.sizes] == list(POWERS)
    assert (result.batch_size, result.policy.key) == (whole.batch_size, whole.policy.key)
    assert all(workers.opened[size].measured.total() == 0 for size in (4,))


def test_more_trials_go_on_where_fewer_ended(tmp_path: Path) -> None:
    few = ScriptedWorkers(seconds=with_setup)
    search(few, tmp_path, trials=2)
    more = ScriptedWorkers(seconds=with_setup)

    result = search(more, tmp_path, trials=40)

    grid = full_grid(more, POWERS, result.budget_bytes)
    assert result.policy.key in grid.policy_keys
    for size in POWERS[:3]:
        assert not few.opened[size].measured.keys() & more.opened[size].measured.keys()


@pytest.mark.parametrize(("size", "number"), [(4, 2), (8, 1), (16, 2), (16, 4)])
def test_an_interrupt_exports_the_best_so_far_and_the_search_goes_on(
    size: int, number: int, tmp_path: Path
) -> None:
    listener = Listener()
    workers = ScriptedWorkers(seconds=with_setup, interrupt_at={size: number})

    stopped = search(workers, tmp_path, listener=listener)

    assert stopped.interrupted
    assert any(note.startswith("Interrupted: verifying") for note in listener.notes)
    assert stopped.winner is not None
    assert (tmp_path / "gpt" / "policy.py").exists()
    result = search(ScriptedWorkers(seconds=with_setup), tmp_path)
    grid = full_grid(workers, POWERS, result.budget_bytes)
    assert (result.batch_size, result.interrupted) == (grid.batch_size, False)
    assert result.policy.key in grid.policy_keys


def test_an_interrupt_before_anything_was_measured_ends_it(tmp_path: Path) -> None:
    class Impatient(ScriptedWorkers):
        def full_peak_bytes(self, batch_size: int) -> int | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(Impatient(), tmp_path)


def test_another_budget_or_environment_is_refused(tmp_path: Path) -> None:
    search(ScriptedWorkers(), tmp_path)
    with pytest.raises(StudyError, match="is for a budget of"):
        search(ScriptedWorkers(), tmp_path, budget_mib=400)
    other = dataclasses.replace(ENVIRONMENT, device_name="stone")
    with pytest.raises(EnvironmentMismatch, match="device: paper -> stone"):
        search(ScriptedWorkers(environment=other), tmp_path)
    with pytest.raises(EnvironmentMismatch, match="device: paper -> stone"):
        search(ScriptedWorkers(environment=other), tmp_path, (16,))
    fresh = search(ScriptedWorkers(environment=other), tmp_path, fresh=True)
    assert fresh.study_name == "gpt-2"


def test_a_study_of_one_size_and_one_over_sizes_are_no_mistake_for_each_other(
    tmp_path: Path,
) -> None:
    search(ScriptedWorkers(), tmp_path)
    measurer = ScriptedWorkers().make(4)
    options = SearchOptions(budget_gb=1, root=tmp_path, report=False)
    with pytest.raises(StudyFileError, match="over batch sizes: continue it with --maximize"):
        run_search(measurer, "gpt", options, Listener())
    run_search(measurer, "one", options, Listener())
    with pytest.raises(StudyError, match="holds a study of one batch size"):
        run_throughput(ScriptedWorkers(), "one", options, POWERS, Listener())


# --- what it leaves behind ------------------------------------------------------------------------


def test_each_trial_of_the_study_is_a_batch_size_with_a_policy(tmp_path: Path) -> None:
    workers = ScriptedWorkers(seconds=with_setup)
    result = search(workers, tmp_path)

    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'gpt' / 'study.db'}")
    study = optuna.load_study(study_name="gpt", storage=storage)

    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["samples_per_second"]
    trials = study.get_trials()
    assert len(trials) == workers.measured == result.measured
    assert len({(t.params["batch_size"], t.user_attrs["policy_key"]) for t in trials}) == len(
        trials
    )
    assert {t.state for t in trials} == {TrialState.COMPLETE}
    best = study.best_trial
    assert best.params["batch_size"] == result.batch_size
    assert best.user_attrs["policy_text"] == result.policy.describe()
    assert best.params["layers.Block"] == len(result.policy.layers)
    assert best.user_attrs["tokens_per_second"] == pytest.approx(result.tokens_per_second)
    over = [t for t in trials if t.user_attrs["outcome_text"] == "over the budget"]
    assert over
    assert all(t.user_attrs["peak_gib"] > best.user_attrs["peak_gib"] for t in over)


def test_each_size_has_an_ordinary_study_that_can_be_continued(tmp_path: Path) -> None:
    workers = ScriptedWorkers(seconds=with_setup)
    result = search(workers, tmp_path)
    assert result.batch_size is not None
    folder = tmp_path / "gpt" / f"batch-{result.batch_size}"

    names = {candidate.name for candidate in open_study(folder).candidates()}

    assert {NONE, FULL} < names
    assert winner_folder(tmp_path / "gpt") == folder
    measurer = workers.make(result.batch_size)
    options = SearchOptions(
        budget_gb=result.budget_bytes / GIB,
        root=tmp_path / "gpt",
        granularity="class",  # type: ignore[arg-type]
        tiers=1,
        report=False,
    )
    continued = run_search(measurer, folder.name, options, Listener())
    assert continued.policy.key == result.policy.key
    assert not measurer.measured.keys() & workers.opened[result.batch_size].measured.keys()


def test_files_tell_the_same_as_the_result(tmp_path: Path) -> None:
    result = search(ScriptedWorkers(seconds=with_setup), tmp_path)

    document = json.loads((tmp_path / "gpt" / "result.json").read_text())
    assert document["best"]["batch_size"] == result.batch_size
    assert document["best"]["samples_per_second"] == result.samples_per_second
    assert [entry["state"] for entry in document["sizes"]] == ["measured"] * 3 + ["ruled out"]
    assert document["environment"]["batch_size"] is None
    rates = [entry["samples_per_second"] for entry in document["sizes"]]
    assert rates[:-1] == [size.samples_per_second for size in result.sizes[:-1]]
    assert rates[-1] is None
    module = load_policy_module(tmp_path / "gpt" / "policy.py")
    assert module.META["environment"]["batch_size"] == result.batch_size  # type: ignore[attr-defined]
    loaded = load_throughput(tmp_path / "gpt")
    assert dataclasses.replace(loaded, notes=result.notes) == result


def test_files_are_attached_for_the_dashboard(tmp_path: Path) -> None:
    search(ScriptedWorkers(), tmp_path)
    store = open_batches(tmp_path / "gpt")

    attach_files(store, [tmp_path / "gpt" / "policy.py", tmp_path / "gpt" / "report.html"])

    assert set(open_batches(tmp_path / "gpt").artifacts) == {"policy.py"}


def test_a_study_without_a_winner_names_those_of_its_sizes(tmp_path: Path) -> None:
    workers = ScriptedWorkers(wrong_gradients=lambda policy: True)
    with pytest.raises(NoPolicyFits, match="no batch size fits"):
        search(workers, tmp_path)
    with pytest.raises(StudyError, match=r"has no winner yet; .*batch-4, .*batch-8"):
        winner_folder(tmp_path / "gpt")


def test_bounds_hold_for_every_policy(tmp_path: Path) -> None:
    """On paper costs are what they are traced as, so no policy may exceed what is believed."""
    workers = ScriptedWorkers(seconds=with_setup, layer_count=4)
    result = search(workers, tmp_path, (2, 6, 10, 14, 18))
    bounds = {size.batch_size: size.record.bound_samples_per_second for size in result.sizes}
    known = {size: bound for size, bound in bounds.items() if bound is not None}
    assert len(known) > 2
    for size, bound in known.items():
        best = full_grid(workers, [size], result.budget_bytes)
        assert best.samples_per_second <= bound * 1.001
