"""Whatever a study's file holds, it is read or refused by name, and no name in it is ever run."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import json
import math
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pytest
from hostile import (
    FULL,
    HOSTILE,
    NONE,
    PAYLOAD,
    POLICIES,
    RAW,
    SAVE_MATMUL,
    any_texts,
    cases,
    documents,
    is_unicode,
    make_study,
    mutations,
    numbers,
    texts,
)
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from scripted import ENVIRONMENT, make_failed

from sac_search import artifacts, records
from sac_search.errors import SacSearchError
from sac_search.export import render_module
from sac_search.policy import (
    LayerChoice,
    Policy,
    Tier,
    checkpoint_layers,
    policy_document,
)
from sac_search.records import Evidence
from sac_search.report import facts, rows, terminal
from sac_search.report.comparison import compare, render, side_of
from sac_search.report.explain import explain
from sac_search.report.figures import figures
from sac_search.report.summary import cards
from sac_search.study import store as store_module
from sac_search.study.finish import stored_winner
from sac_search.study.result import SearchResult, to_document
from sac_search.study.store import StudyStore, open_study


class Place(NamedTuple):
    """Where a study keeps a record."""

    trial: int | None
    """The trial's number; None for a record of the study itself."""
    name: str
    """The record's name."""


FAILED = records.to_builtins(make_failed())
Texts = dict[Place, str | bytes]


class Template:
    """A small valid study, any of whose records can be replaced."""

    def __init__(self, folder: Path, evidence: Evidence) -> None:
        self.folder = folder
        self.path = make_study(folder, evidence).path
        self.texts: Texts = {}
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            query = "select null, key, value_json from study_user_attributes"
            self.texts.update({Place(a, b): c for a, b, c in connection.execute(query)})
            query = "select trial_id, key, value_json from trial_user_attributes"
            self.texts.update({Place(a, b): c for a, b, c in connection.execute(query)})
        self.places = list(self.texts)

    @contextlib.contextmanager
    def on_disk(self, texts: Texts, study_name: str = "") -> Iterator[Path]:
        """Gives the study's file these records; they are put back afterwards."""
        try:
            self._write(texts, study_name or self.folder.name)
            yield self.folder
        finally:
            self._write({place: self.texts[place] for place in texts}, self.folder.name)

    def _write(self, texts: Texts, study_name: str) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("pragma synchronous = off")
            connection.execute("update studies set study_name = ?", (study_name,))
            for (trial, name), text in texts.items():
                owner = "study" if trial is None else "trial"
                connection.execute(
                    f"update {owner}_user_attributes set value_json = ? "  # noqa: S608
                    f"where key = ? and {owner}_id = ?",
                    (text, name, trial or 1),
                )

    def in_memory(self, documents: Mapping[Place, Any], study_name: str = "gpt") -> StudyStore:
        """Returns the study with these records, which is far quicker to make than a file."""
        study = optuna.create_study(study_name=study_name)
        trials: dict[int, dict[str, Any]] = {}
        for place, text in self.texts.items():
            value = documents[place] if place in documents else json.loads(text)
            if place.trial is None:
                study.set_user_attr(place.name, value)
            else:
                trials.setdefault(place.trial, {})[place.name] = value
        for attributes in trials.values():
            study.add_trial(optuna.create_trial(value=1.0, user_attrs=attributes))
        return StudyStore(study, self.path)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Template]]:
    root = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as monkeypatch:
        # One connection for all cases: most of the time goes into making it.
        monkeypatch.setattr(store_module, "storage_at", functools.cache(store_module.storage_at))
        found = [Template(root / str(evidence), evidence) for evidence in Evidence]
        for template in found:
            assert read_file(template.folder) is not None
            assert read_store(template.in_memory({})) is not None
        yield found


def read_file(folder: Path) -> str | None:
    """Reads a study's file in every way. Returns the exported module, or None if it is refused."""
    with refused_by_name(folder):
        open_study(folder).candidates()
        result = artifacts.load_result(folder)
        show(result)
        return artifacts.render_policy(result)
    return None


def read_store(store: StudyStore) -> str | None:
    """Does with an open study what `load_result` does, and renders what came of it."""
    with refused_by_name(store.folder):
        store.candidates()
        result = artifacts.make_result(store, stored_winner(store), "read", False, ())
        show(result)
        return artifacts.render_policy(result)
    return None


@contextlib.contextmanager
def refused_by_name(folder: Path) -> Iterator[None]:
    message = str(folder)
    try:
        yield
    except SacSearchError as error:
        message = str(error)
    # Only a study without a winner is refused for another reason than its file.
    assert str(folder) in message or "has no verified policy yet" in message


def show(result: SearchResult) -> None:
    """Prints what the commands print of a result, to where only Unicode can go."""
    json.dumps(to_document(result))
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=output, width=100)
    console.print(terminal.study_table([result]))
    console.print(terminal.candidate_table(rows.candidate_rows(result)))
    lines = [*rows.headline(result), *rows.closing_lines(result)]
    side = side_of(result)
    for text in (
        *lines,
        facts.to_text(explain(result)),
        *(render(compare(side, side), name) for name in ("md", "json", "csv")),
        json.dumps(figures(result), allow_nan=False),
        *(card.note for card in cards(result)),
    ):
        output.write(text)


IMPORTS = {
    "__future__",
    "collections.abc",
    "copy",
    "functools",
    "torch",
    "torch.utils.checkpoint",
    "typing",
    "warnings",
    "weakref",
}


def run_module(text: str) -> dict[str, Any]:
    """Runs an exported module where there is only torch and the standard library.

    It imports what every exported module imports; a payload would import something else.
    """
    imported: set[str] = set()

    def note_import(name: str, *arguments: Any) -> Any:
        imported.add(name)
        assert name in IMPORTS
        return builtins.__import__(name, *arguments)

    own_builtins = {**vars(builtins), "__import__": note_import}
    namespace: dict[str, Any] = {"__name__": "exported", "__builtins__": own_builtins}
    code = compile(text.encode("utf-8"), "exported", "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # made with another torch
        exec(code, namespace)  # noqa: S102
    assert imported == IMPORTS
    return namespace


@cases(70)
@given(data=st.data())
def test_a_record_on_disk_may_hold_anything(templates: list[Template], data: st.DataObject) -> None:
    template = data.draw(st.sampled_from(templates))
    place = data.draw(st.sampled_from(template.places))
    text = data.draw(
        st.one_of(
            st.sampled_from(RAW),
            documents.map(json.dumps),
            mutations(json.loads(template.texts[place])).map(json.dumps),
        )
    )
    with template.on_disk({place: text}) as folder:
        read_file(folder)


@pytest.mark.parametrize("text", RAW)
def test_a_policy_that_is_not_json_is_refused_by_name(
    templates: list[Template], text: str | bytes
) -> None:
    template = templates[0]
    for place in (Place(1, "policy"), Place(None, f"baseline: {FULL}"), Place(None, "winner")):
        with template.on_disk({place: text}) as folder:
            assert read_file(folder) is None


@cases(300)
@given(data=st.data())
def test_records_may_be_nearly_right(templates: list[Template], data: st.DataObject) -> None:
    template = data.draw(st.sampled_from(templates))
    places = data.draw(st.lists(st.sampled_from(template.places), min_size=1, max_size=3))
    changed = {place: data.draw(mutations(json.loads(template.texts[place]))) for place in places}
    winner = data.draw(st.sampled_from(list(POLICIES.values())))
    changed.setdefault(Place(None, "winner"), winner.key)
    module = read_store(template.in_memory(changed))
    if module is not None:
        run_module(module)


@pytest.mark.parametrize(
    ("index", "place", "change"),
    [
        (0, Place(None, "confirmation"), lambda record: record["outcomes"].pop()),
        (0, Place(None, "confirmation"), lambda record: record["keys"].pop()),
        (0, Place(None, f"baseline: {FULL}"), lambda record: record.update(outcome={})),
        (0, Place(1, "policy"), lambda record: record["layers"].append(record["layers"][0])),
        (0, Place(1, "policy"), lambda record: record["layers"][0].update(tier=1)),
        (0, Place(1, "policy"), lambda record: record["layers"][0].update(tier=-1)),
        (0, Place(1, "policy"), lambda record: record.update(schema_version=2)),
        (1, Place(None, f"forecast: {FULL}"), lambda record: record.update(outcome=FAILED)),
    ],
)
def test_records_that_contradict_themselves_are_refused_by_name(
    templates: list[Template], index: int, place: Place, change: Callable[[Any], None]
) -> None:
    record = json.loads(templates[index].texts[place])
    change(record)
    assert read_store(templates[index].in_memory({place: record})) is None


def test_a_trials_name_that_is_no_text_is_refused_by_name(templates: list[Template]) -> None:
    assert read_store(templates[0].in_memory({Place(1, "plan"): {"plan": 1}})) is None


def test_a_winner_that_counts_calls_is_refused_by_name(templates: list[Template]) -> None:
    # It has the key of full checkpointing, since it saves nothing.
    policy = checkpoint_layers(["h.0", "h.1"], Tier(every_second_matmul=True))
    assert policy.key == POLICIES[FULL].key
    template = templates[0]
    place = Place(None, f"baseline: {FULL}")
    record = json.loads(template.texts[place]) | {"policy": records.to_builtins(policy)}
    store = template.in_memory({place: record, Place(None, "winner"): policy.key})
    assert read_store(store) is None


OUTCOMES = [
    [Place(None, f"baseline: {NONE}"), Place(None, f"baseline: {FULL}"), Place(1, "outcome")],
    [Place(None, f"forecast: {name}") for name in POLICIES],
]


@cases(180)
@given(
    index=st.sampled_from([0, 1]),
    winner=st.sampled_from([NONE, FULL, "plan at 95%"]),
    seconds=st.lists(numbers, min_size=3, max_size=3),
    peaks_bytes=st.lists(numbers, min_size=3, max_size=3),
    study_figures=st.fixed_dictionaries(
        {},
        optional={
            "anchor_seconds": numbers,
            "bound_overhead_seconds": numbers,
            "budget_bytes": numbers,
        },
    ),
)
@example(0, FULL, [0.0, 0.5, 0.5], [9, 8, 7], {})
@example(0, "plan at 95%", [0.5, 0.0, 0.5], [9, 8, 7], {})
@example(0, "plan at 95%", [0.5, 0.5, 0.5], [9, 0, 7], {})
@example(
    0,
    "plan at 95%",
    [1.0, 1.0, 1.0],
    [9, 8, 7],
    {"bound_overhead_seconds": -1.0, "anchor_seconds": 1.0},
)
@example(0, NONE, [0.5, 0.5, 0.5], [2**62 + 1, 2**62, 7], {"budget_bytes": 2**63})
@example(0, "plan at 95%", [1e300, 0.5, 0.5], [9, 8, 7], {"anchor_seconds": 1e300})
@example(0, FULL, [0.5, 0.5, 0.5], [10**400, -(10**400), 7], {})
@example(0, FULL, [0.5, 0.5, 0.5], [9, 8, 7], {"budget_bytes": 10**400})
@example(1, FULL, [math.nan, math.inf, 0.5], [10**400, 2**64, 7], {})
def test_figures_may_be_any_numbers(
    templates: list[Template],
    index: int,
    winner: str,
    seconds: list[float],
    peaks_bytes: list[float],
    study_figures: dict[str, float],
) -> None:
    template = templates[index]
    changed: dict[Place, Any] = {Place(None, name): value for name, value in study_figures.items()}
    changed |= {Place(None, "winner"): POLICIES[winner].key, Place(None, "confirmation"): None}
    for place, second, peak_bytes in zip(OUTCOMES[index], seconds, peaks_bytes, strict=True):
        changed[place] = record = json.loads(template.texts[place])
        measurement = record.get("outcome", record)["measurement"]
        measurement |= {"step_seconds": second, "relative_seconds": second}
        measurement |= {"peak_bytes": peak_bytes}
    module = read_store(template.in_memory(changed))
    if module is not None:
        run_module(module)


@cases(180)
@given(
    names=st.lists(any_texts, min_size=2, max_size=2, unique=True),
    ops=st.lists(any_texts, min_size=1, max_size=3),
    study_name=texts,
    environment=st.fixed_dictionaries(
        dict.fromkeys(
            ("torch_version", "device", "device_name", "driver", "dtype", "workload"), any_texts
        )
        | {"clock": any_texts, "batch_size": st.none() | st.integers(-(2**63), 2**63)}
    ),
)
@example(
    names=[PAYLOAD, f'"""\n{PAYLOAD}\n"""'],
    ops=[f"')]}}\n{PAYLOAD}\n("],
    study_name=f'"""\n{PAYLOAD}',
    environment={"device_name": f"\\\n{PAYLOAD}", "torch_version": f"{{{PAYLOAD}}}"},
)
@example(names=["h.\ud800", "h.0"], ops=["aten.mm.default"], study_name="gpt", environment={})
def test_names_stay_data(
    templates: list[Template],
    names: list[str],
    ops: list[str],
    study_name: str,
    environment: dict[str, Any],
) -> None:
    policy = Policy(
        tiers=(Tier(ops=tuple(ops), classes=tuple(ops)), Tier()),
        layers=(LayerChoice(name=names[0], tier=0), LayerChoice(name=names[1], tier=1)),
    )
    surroundings = {**records.to_builtins(ENVIRONMENT), **environment}
    is_text = all(is_unicode(t) for t in [*names, *ops, *environment.values()])
    changed = {
        Place(1, "policy"): records.to_builtins(policy),
        Place(None, "winner"): policy.key if is_text else SAVE_MATMUL.key,
        Place(None, "environment"): surroundings,
        Place(None, "verified"): [],
    }
    module = read_store(templates[0].in_memory(changed, study_name))
    assert (module is not None) == is_text
    if module is not None:
        check_data(run_module(module), policy, study_name, surroundings)


def check_data(
    module: dict[str, Any], policy: Policy, study_name: str, environment: dict[str, Any]
) -> None:
    assert module["LAYERS"] == {choice.name: choice.tier for choice in policy.layers}
    assert [tier.ops for tier in module["TIERS"]] == [set(tier.ops) for tier in policy.tiers]
    assert [tier.save_random for tier in module["TIERS"]] == [False] * len(policy.tiers)
    assert module["META"]["policy"] == policy_document(policy)
    assert module["META"]["study_name"] == study_name
    assert module["META"]["environment"] == environment


@pytest.mark.parametrize("name", [name for name in HOSTILE if name])
def test_a_study_may_have_any_name(templates: list[Template], name: str) -> None:
    with templates[0].on_disk({}, name) as folder:
        module = read_file(folder)
    assert module is not None
    assert run_module(module)["META"]["study_name"] == name


@cases(100)
@given(
    names=st.lists(any_texts, min_size=1, max_size=4, unique=True),
    ops=st.lists(any_texts, max_size=4),
    headline=st.lists(any_texts, max_size=3),
    module_name=any_texts,
    study_name=any_texts,
)
def test_the_exporter_takes_any_names(
    names: list[str], ops: list[str], headline: list[str], module_name: str, study_name: str
) -> None:
    policy = checkpoint_layers(names, Tier(ops=tuple(ops), classes=tuple(headline)))
    environment = {"torch_version": study_name, "device": "cpu", "device_name": module_name}
    meta = {"study_name": study_name, "environment": environment}
    text = render_module(policy, meta=meta, headline=headline, module_name=module_name)
    check_data(run_module(text), policy, study_name, environment)


def test_a_payload_is_noticed() -> None:
    text = render_module(
        SAVE_MATMUL, meta={"study_name": "", "environment": {"torch_version": ""}}, headline=[]
    )
    run_module(text)
    with pytest.raises(AssertionError):
        run_module(f"{text}\n{PAYLOAD}\n")
