"""A search that was stopped goes on where it stopped, whatever stopped it."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted import (
    ENVIRONMENT,
    MIB,
    Listener,
    ScriptedMeasurer,
    make_layers,
    other_environment,
)

from sac_search.api import SearchOptions, run_search
from sac_search.errors import EnvironmentMismatch, StudyError, StudyNotFound
from sac_search.policy import checkpoint_layers
from sac_search.records import Outcome
from sac_search.space import LayerChoiceMode
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.result import SearchResult
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study

BUDGET_GB = 120 * MIB / 2**30


def search(
    root: Path, measurer: ScriptedMeasurer, name: str = "gpt", **changes: object
) -> SearchResult:
    options = SearchOptions(
        **{
            "budget_gb": BUDGET_GB,
            "root": root,
            "trials": 4,
            "sampler": SamplerName.RANDOM,
            **changes,
        }
    )
    return run_search(measurer, name, options, Listener())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of studies with one that is finished; not to be changed."""
    root = tmp_path_factory.mktemp("finished")
    search(root, ScriptedMeasurer())
    return root


def test_a_finished_study_is_read_and_nothing_measured_again(finished: Path) -> None:
    measurer = ScriptedMeasurer()

    result = search(finished, measurer)

    assert (measurer.order, measurer.compared, measurer.verified) == ([], [], [])
    assert len(result.candidates) == len(BASELINE_NAMES) + 4
    assert result.best is not None and result.verification is not None
    assert result.stop_reason == "4 trials measured (--trials 4)"


def test_more_trials_continue_the_same_study(tmp_path: Path) -> None:
    first, second = ScriptedMeasurer(), ScriptedMeasurer()
    search(tmp_path, first, trials=2)

    result = search(tmp_path, second, trials=5)

    assert len(second.order) == 3
    assert not set(first.measured) & set(second.measured)
    assert sum(not c.is_baseline for c in result.candidates) == 5


@pytest.mark.parametrize("at", [1, 2, 4, 10])
def test_an_interrupted_search_is_continued(tmp_path: Path, at: int) -> None:
    first, second = ScriptedMeasurer(interrupt_at=at), ScriptedMeasurer()

    stopped = search(tmp_path, first)
    result = search(tmp_path, second)

    assert stopped.interrupted and not result.interrupted
    assert len(stopped.candidates) == at - 1
    # A baseline is taken up again; a sampler's proposal may or may not be.
    in_flight = {first.order[-1].key}
    again = set(first.measured) & set(second.measured)
    assert again == in_flight if at <= len(BASELINE_NAMES) else again <= in_flight
    assert set(second.measured.values()) == {1}
    assert len(result.candidates) == len(BASELINE_NAMES) + 4
    assert {c.name for c in result.candidates if c.is_baseline} == set(BASELINE_NAMES)


def test_another_environment_is_refused(finished: Path) -> None:
    other = ScriptedMeasurer(environment=other_environment(torch_version="2.14.1", threads=8))

    with pytest.raises(EnvironmentMismatch) as caught:
        search(finished, other)

    assert "  torch: 2.13.0 -> 2.14.1\n  CPU threads of torch: 1 -> 8\n" in str(caught.value)
    assert other.order == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_gb": BUDGET_GB * 2}, r"budget of 0\.117 GiB, not 0\.234 GiB"),
        ({"layer_choice": LayerChoiceMode.EACH}, "searches other decisions"),
    ],
)
def test_other_options_are_refused(
    finished: Path, changes: dict[str, object], message: str
) -> None:
    measurer = ScriptedMeasurer()

    with pytest.raises(StudyError, match=message):
        search(finished, measurer, **changes)
    assert measurer.order == []


def test_other_layers_are_refused(finished: Path) -> None:
    measurer = ScriptedMeasurer(layers=make_layers(3))

    with pytest.raises(StudyError, match="about other layers"):
        search(finished, measurer)
    assert measurer.order == []


def test_layers_traced_anew_take_another_time_and_are_the_same(finished: Path) -> None:
    layers = tuple(
        dataclasses.replace(
            layer, ops=tuple(dataclasses.replace(op, seconds=op.seconds * 1.1) for op in layer.ops)
        )
        for layer in make_layers()
    )

    assert search(finished, ScriptedMeasurer(layers=layers)).best is not None


def test_fresh_begins_beside_it_and_the_plain_command_continues_the_newest(
    tmp_path: Path,
) -> None:
    search(tmp_path, ScriptedMeasurer(), trials=1)
    before = (tmp_path / "gpt" / "study.db").read_bytes()
    fresh, plain = ScriptedMeasurer(), ScriptedMeasurer()

    second = search(tmp_path, fresh, trials=1, fresh=True)
    continued = search(tmp_path, plain, trials=2)

    assert second.study_name == continued.study_name == "gpt-2"
    assert len(fresh.order) == len(BASELINE_NAMES) + 1
    assert len(plain.order) == 1
    assert (tmp_path / "gpt" / "study.db").read_bytes() == before


def test_fresh_is_a_way_out_of_another_environment(tmp_path: Path) -> None:
    search(tmp_path, ScriptedMeasurer(), trials=0)
    newer = ScriptedMeasurer(environment=other_environment(torch_version="2.14.1"))

    result = search(tmp_path, newer, trials=0, fresh=True)

    assert (result.study_name, result.environment.torch_version) == ("gpt-2", "2.14.1")
    assert open_study(tmp_path / "gpt").environment == ENVIRONMENT


# --- killed ---------------------------------------------------------------------------------------


def outcomes_in(folder: Path) -> dict[str, Outcome]:
    """Returns what the study knows; nothing when it was never begun."""
    try:
        return {c.policy.key: c.outcome for c in open_study(folder).candidates()}
    except StudyNotFound:
        return {}


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"no {count} measurements within a minute"
        time.sleep(0.005)


def test_a_search_that_is_killed_again_and_again_loses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    log_path, folder, trials = tmp_path / "log", tmp_path / "gpt", 90
    log_path.touch()
    generator = random.Random(2024)  # noqa: S311
    script = Path(__file__).with_name("killable.py")
    environment = {
        **os.environ,
        "PYTHONPATH": str(script.parents[1]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    kills, known, in_flight = 0, {}, set()
    with subprocess.Popen(
        [sys.executable, script, tmp_path, log_path, str(trials)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        while kills < 30:
            logged_before = len(log_path.read_text().splitlines())
            print("search", file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            # The first four are killed while they start and make the study, the others after a
            # few measurements.
            if kills >= 4:
                wait_for_lines(log_path, logged_before + generator.randint(1, 3))
            time.sleep(generator.uniform(0, 0.4 if kills < 4 else 0.12))
            os.kill(child, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL, "it ended before the kill"
            kills += 1

            logged = log_path.read_text().splitlines()[logged_before:]
            now = outcomes_in(folder)
            # What was known is known still, unchanged; of what this process measured, at most the
            # last was not yet on disk.
            assert {key: now.get(key) for key in known} == known
            missing = [key for key in logged if key not in now]
            assert missing in ([], logged[-1:])
            in_flight.update(missing)
            known = now
        assert 4 <= len(known) < len(BASELINE_NAMES) + trials
        print("search", file=server.stdin, flush=True)
        server.stdout.readline()
        assert int(server.stdout.readline()) == 0
        server.stdin.close()

    logged = log_path.read_text().splitlines()
    assert {key for key in logged if logged.count(key) > 1} <= in_flight
    found = open_study(folder).candidates()
    # What was in flight may never be proposed again.
    assert set(logged) - in_flight <= {c.policy.key for c in found} <= set(logged)
    assert {key: c.outcome for c in found if (key := c.policy.key) in known} == known
    assert sum(not c.is_baseline for c in found) == trials
    assert {c.name for c in found if c.is_baseline} == set(BASELINE_NAMES)
    assert checkpoint_layers(f"h.{i}" for i in range(12)).key in known
    assert (folder / "policy.py").is_file()
