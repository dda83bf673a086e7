"""What may happen to the process that searches: it is killed, or its disk is full."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import MIB, Listener, ScriptedMeasurer

from sac_search.api import SearchOptions, run_search
from sac_search.errors import StudyFileError
from sac_search.study.baselines import BASELINE_NAMES
from sac_search.study.sampler import SamplerName
from sac_search.study.store import open_study

FAULTY = Path(__file__).with_name("faulty.py")
OPTIONS = {"budget_gb": 160 * MIB / 2**30, "sampler": SamplerName.RANDOM}

Record = Callable[[str, object], None]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(session: int) -> list[int]:
    """Returns the living processes of a session: the worker and whatever it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_search_not_even_one_that_hangs_in_c(
    tmp_path: Path, number: signal.Signals, record_property: Record
) -> None:
    shutil.copy(FAULTY, tmp_path / "train.py")
    # It starts a process, and then holds the interpreter's lock for ten minutes.
    (tmp_path / "fault").write_text("now fork and hang in C")
    with subprocess.Popen(
        [sys.executable, "-m", "sac_search", "train.py", "--budget-gb", "1", "--device", "cpu"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell's background jobs, these tests among them, may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as parent:
        wait_for((tmp_path / "forked").exists)
        session = int((tmp_path / "pid").read_text())
        wait_for(lambda: len(processes_of(session)) == 2)
        parent.send_signal(number)
    wait_for(lambda: session not in processes_of(session), 20)
    left = processes_of(session)
    for process in left:
        os.kill(process, signal.SIGKILL)
    record_property("fault", f"parent {number.name:<9} worker hanging in C: gone")
    # What user code started by itself is only reached by those who are still alive.
    assert number is signal.SIGKILL or not left


# --- the disk -------------------------------------------------------------------------------------


def search_with_room(root: Path, room_bytes: int | None) -> None:
    """Searches in a process whose files may not grow beyond `room_bytes`; exits with 3 if full."""
    if room_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    code = 1
    try:
        run_search(
            ScriptedMeasurer(), "gpt", SearchOptions(root=root, trials=8, **OPTIONS), Listener()
        )
        code = 0
    except StudyFileError as error:
        code = 3 if str(root / "gpt" / "study.db") in str(error) else 4
    finally:
        os._exit(code)


def exit_code(root: Path, room_bytes: int | None) -> int | None:
    child = multiprocessing.get_context("fork").Process(
        target=search_with_room, args=(root, room_bytes)
    )
    child.start()
    child.join()
    return child.exitcode


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, record_property: Record) -> None:
    run_search(
        ScriptedMeasurer(), "gpt", SearchOptions(root=tmp_path, trials=3, **OPTIONS), Listener()
    )
    folder = tmp_path / "gpt"
    known = {c.policy.key: c.outcome for c in open_study(folder).candidates()}
    size = (folder / "study.db").stat().st_size

    ends = [exit_code(tmp_path, size + room) for room in (0, 4096, 3 * 4096)]
    kept = {c.policy.key: c.outcome for c in open_study(folder).candidates()}
    assert ends == [3, 3, 3]
    assert {key: kept.get(key) for key in known} == known

    assert exit_code(tmp_path, None) == 0
    found = open_study(folder).candidates()
    record_property("fault", f"disk full        trials kept: {len(known)} of {len(known)}")
    assert {c.policy.key: c.outcome for c in found if c.policy.key in kept} == kept
    assert sum(not c.is_baseline for c in found) == 8
    assert {c.name for c in found if c.is_baseline} == set(BASELINE_NAMES)
