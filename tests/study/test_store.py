"""A study on disk: what is kept, what is refused, and that a bad file is left alone."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from scripted import (
    ENVIRONMENT,
    MIB,
    ScriptedMeasurer,
    make_failed,
    make_layers,
    make_outcome,
    make_search,
    other_environment,
)

from sac_search import records
from sac_search.errors import (
    EnvironmentMismatch,
    StudyError,
    StudyFileError,
    StudyNotFound,
)
from sac_search.policy import Policy, checkpoint_layers
from sac_search.records import SCHEMA_VERSION
from sac_search.space import LayerChoiceMode, build_space
from sac_search.study import storage as storage_module
from sac_search.study.goal import SPEED, Goal, GoalKind
from sac_search.study.sampler import SamplerName
from sac_search.study.sharing import joined, turn
from sac_search.study.store import (
    StudyStore,
    check_same,
    create_study,
    list_studies,
    newest_folder,
    open_study,
    unused_folder,
)

BUDGET_BYTES = 120 * MIB
LAYERS = make_layers(3)
LEAST_MEMORY = Goal(kind=GoalKind.MEMORY, max_overhead_fraction=0.05)
FRONT = Goal(kind=GoalKind.PARETO)


def create(folder: Path, series: str | None = None) -> StudyStore:
    return create_study(
        folder, budget_bytes=BUDGET_BYTES, environment=ENVIRONMENT, layers=LAYERS, series=series
    )


@functools.cache
def template() -> bytes:
    with tempfile.TemporaryDirectory() as root:
        return create(Path(root) / "gpt").path.read_bytes()


def copied(root: Path) -> StudyStore:
    """Returns a new study `gpt`, which is quicker to copy than to make."""
    (root / "gpt").mkdir()
    (root / "gpt" / "study.db").write_bytes(template())
    return open_study(root / "gpt")


def foreign_study(folder: Path, name: str) -> optuna.Study:
    folder.mkdir(exist_ok=True)
    return optuna.create_study(storage=f"sqlite:///{folder / 'study.db'}", study_name=name)


@contextlib.contextmanager
def left_alone(path: Path) -> Iterator[None]:
    """Checks that not a byte of the file changes."""
    before = path.read_bytes()
    yield
    assert path.read_bytes() == before


# --- what is kept ---------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "gpt"
    created = create(folder)
    full, none = checkpoint_layers(["h.0"]), Policy()
    created.write_baseline("full", full, make_outcome(seconds=3.0, reference=2.0))
    created.write_baseline("none", none, make_failed())

    opened = open_study(folder)

    assert (opened.name, opened.folder, opened.series) == ("gpt", folder, "gpt")
    assert opened.budget_bytes == BUDGET_BYTES
    assert opened.environment == ENVIRONMENT
    assert opened.layers == LAYERS
    assert opened.anchor_seconds == 2.0
    assert (opened.confirmation, opened.verified, opened.winner) == (None, [], None)
    by_name = {candidate.name: candidate for candidate in opened.candidates()}
    assert by_name["full"].policy == full and by_name["full"].is_baseline
    assert by_name["full"].outcome == make_outcome(seconds=3.0, reference=2.0)
    assert by_name["full"].step_seconds == 3.0
    assert by_name["none"].outcome == make_failed()
    assert by_name["none"].step_seconds is None


@pytest.mark.parametrize("root", ["a b", "50%25", "what?", "a#b", "ä@host:c"])
def test_a_path_may_have_any_letters(tmp_path: Path, root: str) -> None:
    (tmp_path / root).mkdir()
    store = copied(tmp_path / root)
    store.write("winner", "x")

    assert open_study(store.folder).winner == "x"
    assert [path.name for path in tmp_path.iterdir()] == [root]


def test_trials_come_back_as_the_search_knew_them(tmp_path: Path) -> None:
    measurer = ScriptedMeasurer(layers=LAYERS, noise_fraction=0.01, device_bytes=105 * MIB)
    store = copied(tmp_path)
    search = make_search(measurer, BUDGET_BYTES, store=store, trials=3, sampler=SamplerName.RANDOM)
    search.run()

    found = open_study(tmp_path / "gpt").candidates()

    assert {c.policy.key: c for c in found} == search._known
    assert [c.name for c in found if not c.is_baseline] == [
        c.name for c in search.trial_candidates()
    ]
    assert any(c.failure for c in found)


def test_what_never_changes_is_read_from_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copied(tmp_path)
    reads = []
    original = StudyStore._optional
    monkeypatch.setattr(
        StudyStore,
        "_optional",
        lambda self, name, value_type: (reads.append(name), original(self, name, value_type))[1],
    )

    for _ in range(3):
        assert store.layers and store.budget_bytes and store.environment

    assert sorted(reads) == ["budget_bytes", "environment", "layers"]


# --- what is not there ----------------------------------------------------------------------------


def test_a_study_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(StudyNotFound, match="nowhere"):
        open_study(tmp_path / "nowhere")


def test_a_study_that_was_killed_while_it_was_made_is_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    half = foreign_study(folder, "gpt")
    half.set_user_attr("budget_bytes", 1)

    with pytest.raises(StudyNotFound):
        open_study(folder)
    assert newest_folder(tmp_path, "gpt") == folder
    create(folder)

    assert open_study(folder).budget_bytes == BUDGET_BYTES
    assert len(optuna.get_all_study_summaries(half._storage)) == 1


@pytest.mark.parametrize("killed_at", ["tables", "study"])
def test_a_file_in_any_stage_of_being_made_can_be_made_again(
    tmp_path: Path, killed_at: str
) -> None:
    (tmp_path / "gpt").mkdir()
    path = tmp_path / "gpt" / "study.db"
    if killed_at == "tables":
        path.touch()
    else:
        optuna.storages.RDBStorage(f"sqlite:///{path}")

    with pytest.raises(StudyNotFound):
        open_study(path.parent)
    create(path.parent)

    assert open_study(path.parent).environment == ENVIRONMENT


def test_a_file_that_another_process_is_making_is_only_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.commit()
        before = list(database.iterdump())

        with pytest.raises(StudyNotFound, match="no study that was begun"):
            open_study(folder)

        assert list(database.iterdump()) == before


# --- what is refused ------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    store = copied(tmp_path)
    store.write("schema_version", SCHEMA_VERSION + 1)

    with left_alone(store.path), pytest.raises(StudyFileError) as caught:
        open_study(tmp_path / "gpt")

    assert str(store.path) in str(caught.value)
    assert f"schema version {SCHEMA_VERSION + 1}" in str(caught.value)
    assert "Upgrade sac-search" in str(caught.value)


def test_a_study_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    study = foreign_study(tmp_path / "gpt", "theirs")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    path = tmp_path / "gpt" / "study.db"

    with left_alone(path), pytest.raises(StudyFileError, match="'theirs'") as caught:
        open_study(path.parent)

    assert str(path) in str(caught.value)


def test_a_study_of_another_program_beside_ours_does_no_harm(tmp_path: Path) -> None:
    foreign_study(tmp_path / "gpt", "theirs").optimize(lambda trial: 1.0, n_trials=1)
    create(tmp_path / "gpt")

    assert open_study(tmp_path / "gpt").name == "gpt"


def test_a_copied_folder_is_opened_under_its_old_name(tmp_path: Path) -> None:
    copied(tmp_path)
    shutil.copytree(tmp_path / "gpt", tmp_path / "kept")

    assert open_study(tmp_path / "kept").name == "gpt"


def overwrite_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000:-1000] = b"\xff" * (len(content) - 6000)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["text", "cut short", "middle overwritten"])
def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = copied(tmp_path).path
    if damage == "text":
        path.write_text("my notes about this study\n" * 50)
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:3000])
    else:
        overwrite_middle(path)

    for use in (open_study, create):
        with left_alone(path), pytest.raises(StudyFileError) as caught:
            use(path.parent)
        assert str(path) in str(caught.value)


def test_a_database_of_another_release_of_optuna_is_named_and_left_alone(tmp_path: Path) -> None:
    path = copied(tmp_path).path
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update alembic_version set version_num = 'v2.6.0.a'")

    with left_alone(path), pytest.raises(StudyFileError, match="storage upgrade") as caught:
        open_study(path.parent)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("environment", {"torch_version": "2.13.0"}),
        ("layers", "none"),
        ("baseline: full", {"policy": {"layers": []}}),
        ("baseline: full", "nonsense"),
        ("baseline: full", {"policy": {}, "outcome": {}}),
        ("verified", [{"key": 3}]),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, name: str, value: object) -> None:
    store = copied(tmp_path)
    store.study.set_user_attr(name, value)
    opened = open_study(tmp_path / "gpt")

    with pytest.raises(StudyFileError, match="'gpt' is damaged") as caught:
        _ = opened.environment, opened.layers, opened.candidates(), opened.verified
    assert str(store.path) in str(caught.value)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    foreign_study(tmp_path / "gpt", "gpt").set_user_attr("schema_version", 1)

    with pytest.raises(StudyFileError, match="no budget_bytes"):
        _ = open_study(tmp_path / "gpt").budget_bytes


def test_a_locked_database_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_LOCK_TIMEOUT_SECONDS", 0.05)
    store = copied(tmp_path)
    search = make_search(ScriptedMeasurer(), BUDGET_BYTES, store=store, trials=3)
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        attempts = [
            lambda: open_study(tmp_path / "gpt"),
            lambda: create(tmp_path / "gpt"),
            lambda: store.write("winner", "x"),
            store.candidates,
            store.running_trials,
            lambda: store.give_up_trial(0),
            search.run,
        ]
        for attempt in attempts:
            with left_alone(store.path), pytest.raises(StudyFileError, match="lock") as caught:
                attempt()
            assert str(store.path) in str(caught.value)
        other.execute("rollback")

    assert open_study(tmp_path / "gpt").budget_bytes == BUDGET_BYTES
    assert search.run()


def test_a_database_that_is_locked_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    store = copied(tmp_path)
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    with contextlib.closing(other):
        other.execute("begin exclusive")
        release = threading.Timer(0.3, other.execute, ["rollback"])
        release.start()
        store.write("winner", "x")
        release.join()

    assert open_study(tmp_path / "gpt").winner == "x"


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Runs as nobody where the tests run as root, whom no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)  # noqa: S103
        store = copied(Path(root))
        (Path(root) / "empty").mkdir()
        for folder in (Path(root) / "gpt", Path(root) / "empty", Path(root)):
            os.chmod(folder, 0o555)  # noqa: S103
        os.chmod(store.path, 0o444)
        for folder, use in [
            ("gpt", lambda f: joined(f).__enter__()),
            ("gpt", lambda f: open_study(f).write("winner", "x")),
            ("gpt", create),
            ("empty", create),
            ("new", create),
            ("new", lambda f: joined(f).__enter__()),
            ("new", lambda f: turn(f).__enter__()),
        ]:
            path = Path(root) / folder / "study.db"
            with without_privileges(), left_alone(store.path), pytest.raises(StudyFileError) as e:
                use(path.parent)
            assert str(path) in str(e.value)
        with without_privileges():
            assert open_study(Path(root) / "gpt").environment == ENVIRONMENT
        for folder in (Path(root), Path(root) / "gpt"):
            os.chmod(folder, 0o755)  # noqa: S103


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpt").write_text("notes")

    with pytest.raises(StudyFileError, match=r"gpt/study\.db"):
        create(tmp_path / "gpt")


# --- under which conditions it goes on ------------------------------------------------------------


def test_another_environment_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    store = copied(tmp_path)
    other = other_environment(
        torch_version="2.14.1", device_memory_bytes=2**33, batch_size=None, clock="wall"
    )

    with pytest.raises(EnvironmentMismatch) as caught:
        check_same(store, other, BUDGET_BYTES)

    lines = str(caught.value).splitlines()
    assert lines[1:5] == [
        "  torch: 2.13.0 -> 2.14.1",
        "  device memory: 16.00 GiB -> 8.000 GiB",
        "  batch size: 4 -> not known",
        "  clock: cpu -> wall",
    ]
    assert "'gpt'" in lines[0] and "--fresh" in lines[5]


def test_another_budget_is_refused(tmp_path: Path) -> None:
    store = copied(tmp_path)

    check_same(store, ENVIRONMENT, BUDGET_BYTES, LAYERS)
    with pytest.raises(StudyError, match=r"0\.117 GiB, not 0\.116 GiB"):
        check_same(store, ENVIRONMENT, BUDGET_BYTES - MIB)


def test_other_layers_are_refused(tmp_path: Path) -> None:
    store = copied(tmp_path)

    with pytest.raises(StudyError, match=r"3, now 4; h\.3 is in one"):
        check_same(store, ENVIRONMENT, BUDGET_BYTES, make_layers(4))


def test_other_decisions_are_refused(tmp_path: Path) -> None:
    store = copied(tmp_path)
    count = build_space(LAYERS).decisions
    each = build_space(LAYERS, LayerChoiceMode.EACH).decisions

    store.keep_decisions(count)
    opened = open_study(tmp_path / "gpt")
    opened.keep_decisions(count)
    with pytest.raises(StudyError, match=r"layer\.h\.0, layer\.h\.1, layer\.h\.2, …") as caught:
        opened.keep_decisions(each)
    assert "--layer-choice" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_trials_that_a_killed_run_left_running_are_ended_and_keep_their_figures(
    tmp_path: Path,
) -> None:
    store = copied(tmp_path)
    measured = store.study.ask()
    store.study.ask()
    measured.set_user_attr("policy", records.to_builtins(Policy()))
    measured.set_user_attr("outcome", records.to_builtins(make_outcome()))

    opened = open_study(tmp_path / "gpt")
    with joined(tmp_path / "gpt") as alone:
        alone.reclaim(opened, opened.running_trials())

    assert [t.state for t in opened.study.get_trials()] == [TrialState.FAIL, TrialState.FAIL]
    assert [(c.name, c.outcome) for c in opened.candidates()] == [("trial 0", make_outcome())]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_that_ends_while_it_is_given_up_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = copied(tmp_path), open_study(tmp_path / "gpt")
    number = store.study.ask().number
    original = store.study.tell

    def tell_late(*arguments: object, **keywords: object) -> object:
        other.study.tell(number, 1.0)
        monkeypatch.setattr(store.study._storage, "get_trial", lambda trial_id: running)
        return original(*arguments, **keywords)

    running = store.study.trials[number]
    monkeypatch.setattr(store.study, "tell", tell_late)
    store.give_up_trial(number)

    assert other.study.trials[number].state is TrialState.COMPLETE


# --- names of folders -----------------------------------------------------------------------------


def test_a_series_is_counted_on_and_its_newest_continued(tmp_path: Path) -> None:
    assert newest_folder(tmp_path, "gpt") is None
    assert unused_folder(tmp_path, "gpt") == tmp_path / "gpt"
    for name in ("gpt", "gpt-2", "gpt-3"):
        assert unused_folder(tmp_path, "gpt").name == name
        create(unused_folder(tmp_path, "gpt"), series="gpt")
        assert newest_folder(tmp_path, "gpt") == tmp_path / name


def test_folders_are_counted_by_number_and_gaps_are_not_filled(tmp_path: Path) -> None:
    copied(tmp_path)
    for name in ("gpt-9", "gpt-10"):
        shutil.copytree(tmp_path / "gpt", tmp_path / name)
    (tmp_path / "gpt-11").mkdir()  # no study in it

    assert newest_folder(tmp_path, "gpt") == tmp_path / "gpt-10"
    assert unused_folder(tmp_path, "gpt") == tmp_path / "gpt-11"
    shutil.rmtree(tmp_path / "gpt-9")
    assert newest_folder(tmp_path, "gpt") == tmp_path / "gpt-10"


def test_a_study_with_a_number_of_its_own_is_of_no_series(tmp_path: Path) -> None:
    copied(tmp_path)
    create(tmp_path / "gpt-2")  # named so with --study
    for name in ("gpt-0", "gpt-1", "gpt-02", "gpt-2b", "agpt", "gpt2"):
        shutil.copytree(tmp_path / "gpt-2", tmp_path / name)

    assert newest_folder(tmp_path, "gpt") == tmp_path / "gpt"
    assert newest_folder(tmp_path, "gpt-2") == tmp_path / "gpt-2"
    assert unused_folder(tmp_path, "gpt") == tmp_path / "gpt-3"
    create(tmp_path / "gpt-3", series="gpt")
    assert newest_folder(tmp_path, "gpt") == tmp_path / "gpt-3"


def test_a_damaged_study_is_still_the_newest_of_its_series(tmp_path: Path) -> None:
    copied(tmp_path)
    (tmp_path / "gpt-2").mkdir()
    (tmp_path / "gpt-2" / "study.db").write_text("not a database, and too long to be empty" * 9)

    assert newest_folder(tmp_path, "gpt") == tmp_path / "gpt-2"


def test_names_with_letters_that_patterns_know_are_taken_literally(tmp_path: Path) -> None:
    create(tmp_path / "a+b")
    create(tmp_path / "aab-2", series="a+b")

    assert newest_folder(tmp_path, "a+b") == tmp_path / "a+b"


def test_studies_are_listed(tmp_path: Path) -> None:
    assert list_studies(tmp_path / "nowhere") == []
    create(tmp_path / "b")
    create(tmp_path / "a")
    (tmp_path / "c").mkdir()

    assert list_studies(tmp_path) == [tmp_path / "a", tmp_path / "b"]


# --- goals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("before", [SPEED, LEAST_MEMORY, FRONT])
@pytest.mark.parametrize("after", [SPEED, LEAST_MEMORY, FRONT])
def test_a_study_that_was_never_begun_is_made_for_the_goal_that_is_asked(
    before: Goal, after: Goal, is_shared: bool, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db" if is_shared else None
    folder = tmp_path / "gpt"
    made = create_study(
        folder,
        budget_bytes=BUDGET_BYTES,
        environment=ENVIRONMENT,
        layers=LAYERS,
        goal=before,
        storage=storage,
    )
    # As it is where a search was killed just before it said that the study was made.
    attributes = made.study.user_attrs
    optuna.delete_study(study_name="gpt", storage=made.storage)
    half_made = optuna.create_study(
        study_name="gpt", storage=made.storage, directions=before.directions
    )
    for name, value in attributes.items():
        if name != "schema_version":
            half_made.set_user_attr(name, value)
    create_study(
        folder,
        budget_bytes=BUDGET_BYTES,
        environment=ENVIRONMENT,
        layers=LAYERS,
        goal=after,
        storage=storage,
    )
    found = open_study(folder, storage)
    assert found.goal == after
    assert found.study.metric_names == list(after.metric_names)
    assert len(found.study.directions) == len(after.directions)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_study_for_another_goal_is_never_made_anew(is_shared: bool, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db" if is_shared else None
    conditions = {"budget_bytes": BUDGET_BYTES, "environment": ENVIRONMENT, "layers": LAYERS}
    create_study(tmp_path / "gpt", **conditions, goal=FRONT, storage=storage)
    with pytest.raises(StudyError, match="for another goal"):
        create_study(tmp_path / "gpt", **conditions, storage=storage)
    assert open_study(tmp_path / "gpt", storage).goal == FRONT
