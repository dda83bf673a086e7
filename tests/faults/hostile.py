"""What a program of ours may meet: names that look like code, texts that are none, odd documents.

And a small valid study, to put them into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from scripted import ENVIRONMENT, MIB, ScriptedMeasurer, make_failed, make_layers

from sac_search import records
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import Evidence, Outcome
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.finish import choose_winner, confirm
from sac_search.study.store import StudyStore, create_study

PAYLOAD = "__import__('os').system('exit 1')"


def cases(count: int) -> Callable[..., Any]:
    """Runs so many cases, however long they take on a busy machine."""
    health = [HealthCheck.too_slow]
    return settings(deadline=None, max_examples=count, suppress_health_check=health)


HOSTILE = [
    PAYLOAD,
    f'"""\n{PAYLOAD}\n"""',
    f"')]}}\n{PAYLOAD}\n(",
    f"{{{PAYLOAD}}}",
    f"\\\n{PAYLOAD}",
    f"\r{PAYLOAD}\r\n",
    f"\N{LINE SEPARATOR}{PAYLOAD}",
    "'''",
    "\\",
    '\\"""',
    "\\N{SNOWMAN}",
    "{}",
    "{0!r:{1}}",
    "%s%n",
    "",
    " ",
    "\x00",
    "\x1b[2J",
    "\ufeff",
    "\N{RIGHT-TO-LEFT OVERRIDE}evil\N{LEFT-TO-RIGHT ISOLATE}",
    "\N{COMBINING ACUTE ACCENT}" * 40,
    "\N{PILE OF POO}",
    "# coding: latin-1",
    "[bold]/path[/bold]",
    "a.b" * 2000,
    "h.0",
]
SURROGATES = ["\ud800", "\udcff.py", "a\udfff\ud800b"]
texts = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=20), st.text("\"'\\{}\n$%#()", max_size=9)
)
any_texts = st.one_of(texts, st.sampled_from(SURROGATES))
numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**53, 2**63, -(2**63), 2**64, 10**400, 5e-324, 1.7e308, -0.0]),
)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, any_texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(any_texts, inner, max_size=4)
    ),
    max_leaves=12,
)
# What no JSON encoder writes, and what Python's decoder does not read or reads all the same.
RAW = [
    "",
    " ",
    "nul",
    "{",
    "[1,]",
    '"\\ud800"',
    "NaN",
    "-Infinity",
    "9" * 5000,
    "-1e999",
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000,
    '{"tiers": [], "tiers": 1}',
    "\x00",
    "\ufeff{}",
    b"\xff\xfe\x00",
    b"{}",
]


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """Draws JSON that differs from `document` in one to three places."""
    for _ in range(draw(st.integers(1, 3))):
        slots = list(slots_of(document))
        if not slots:
            return draw(documents)
        container, key = draw(st.sampled_from(slots))
        is_object = isinstance(container, dict)
        changes = ["drop", "duplicate", "number", "text", "anything"]
        match draw(st.sampled_from([*changes, "rename"] if is_object else changes)):
            case "drop":
                del container[key]
            case "rename":
                container[draw(any_texts)] = container.pop(key)
            case "duplicate" if is_object:
                container[draw(any_texts)] = copy.deepcopy(container[key])
            case "duplicate":
                container.insert(key, copy.deepcopy(container[key]))
            case "number":
                container[key] = draw(numbers)
            case "text":
                container[key] = draw(any_texts)
            case "anything":
                container[key] = draw(documents)
    return document


def slots_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every place in a document that holds a value: the container and the key."""
    items = list(value.items()) if isinstance(value, dict) else []
    items += list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items:
        yield value, key
        yield from slots_of(inner)


def is_unicode(value: Any) -> bool:
    """Whether UTF-8 can hold the value, if it is a text."""
    return not isinstance(value, str) or not any("\ud800" <= c <= "\udfff" for c in value)


# --- a study --------------------------------------------------------------------------------------

LAYERS = make_layers(2)
SAVE_MATMUL = checkpoint_layers(
    [layer.name for layer in LAYERS], Tier(classes=("matmul",), ops=("aten.addmm.default",))
)
SAVE_NORMS = checkpoint_layers(["h.1"], Tier(ops=("aten.native_layer_norm.default",)))
POLICIES = {
    NONE: NO_CHECKPOINTING,
    FULL: checkpoint_layers(["h.0", "h.1"]),
    "plan at 95%": SAVE_MATMUL,
}


def make_study(folder: Path, evidence: Evidence) -> StudyStore:
    """Makes a study with baselines, trials, a confirmation and a verified winner."""
    measurer = ScriptedMeasurer(layers=LAYERS)
    store = create_study(
        folder,
        budget_bytes=200 * MIB,
        environment=ENVIRONMENT,
        layers=LAYERS,
        evidence=evidence,
    )
    store.write("bound_overhead_seconds", 0.001)
    for name, policy in POLICIES.items():
        outcome = measurer.measure(policy)
        if evidence is Evidence.FORECAST:
            store.write_forecast(
                Candidate(name=name, policy=policy, outcome=outcome, step_seconds=1.0)
            )
        elif name in (NONE, FULL):
            store.write_baseline(name, policy, outcome)
        else:
            add_trial(store, policy, outcome, plan=name, imported_from="another")
    if evidence is Evidence.FORECAST:
        store.write("winner", SAVE_MATMUL.key)
        return store
    add_trial(store, SAVE_NORMS, make_failed(), baseline="save norms")
    ranked = [c for c in confirm(store, measurer, store.candidates()) if c.policy.layers]
    choose_winner(store, measurer, ranked)
    return store


def add_trial(store: StudyStore, policy: Policy, outcome: Outcome, **attributes: str) -> None:
    kept = {"policy": records.to_builtins(policy), "outcome": records.to_builtins(outcome)}
    store.study.add_trial(optuna.create_trial(value=1.0, user_attrs={**kept, **attributes}))
