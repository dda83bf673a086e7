"""The exported module: what was measured is what ships, and whatever names are, they stay data."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import (
    ATTENTION,
    HIDDEN,
    MM,
    NORM,
    Stack,
    assert_same,
    loss_of,
    recomputed,
    run,
    stack,
    tokens,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sac_search import policy_runtime
from sac_search.apply import PolicyModule, applied, load_policy_module
from sac_search.errors import UsageError
from sac_search.export import render_module, write_whole
from sac_search.policy import (
    NO_CHECKPOINTING,
    Compiled,
    LayerChoice,
    Policy,
    Tier,
    checkpoint_layers,
)
from sac_search.worker.session import Session, SessionSettings
from sac_search.workload import Workload

BOTH = ["blocks.0", "blocks.1"]
SAVE_MM = checkpoint_layers(BOTH, Tier(ops=(MM,)))
TWO_TIERS = Policy(
    tiers=(Tier(ops=(MM, ATTENTION)), Tier()),
    layers=(LayerChoice(name="blocks.0", tier=0), LayerChoice(name="blocks.1", tier=1)),
)
RANDOM = checkpoint_layers(BOTH, Tier(ops=(MM,), save_random=True))
POLICIES = {
    "plain": checkpoint_layers(BOTH),
    "matmul": SAVE_MM,
    "one layer": checkpoint_layers(["blocks.1"], Tier(ops=(ATTENTION,))),
    "through a policy": checkpoint_layers(BOTH, Tier(through_policy=True)),
    "two tiers": TWO_TIERS,
    "plain first": Policy(tiers=TWO_TIERS.tiers[::-1], layers=TWO_TIERS.layers),
    "none": NO_CHECKPOINTING,
}


def make_meta(**environment: Any) -> dict[str, Any]:
    here = {"torch_version": torch.__version__, "device": "cpu", "device_name": "this CPU"}
    return {"study_name": "tiny", "budget_bytes": 1, "environment": {**here, **environment}}


def render(policy: Policy, meta: dict[str, Any] | None = None, **options: Any) -> str:
    options.setdefault("headline", ["A policy."])
    return render_module(policy, meta=meta or make_meta(), **options)


def load(folder: Path, policy: Policy, **options: Any) -> Any:
    path = folder / "exported.py"
    path.write_text(render(policy, **options), encoding="utf-8")
    return load_policy_module(path)


# --- it runs as the policy did --------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_it_recomputes_what_the_policy_recomputed(name: str, tmp_path: Path) -> None:
    policy, model = POLICIES[name], stack()
    plain = run(model, tokens())
    with applied(model, policy):
        expected = run(model, tokens())
    module = load(tmp_path, policy)
    assert module.apply(model) is model
    exported = run(model, tokens())
    assert_same(plain, exported)
    # A policy that saves nothing ships as plain checkpointing, which recomputes the same.
    assert recomputed(plain, exported) == recomputed(plain, expected)
    assert bool(recomputed(plain, exported)) == bool(policy.layers)
    assert exported.forward_ops == expected.forward_ops
    assert module.remove(model) is model
    assert recomputed(plain, run(model, tokens())) == {}


SUBPROCESS = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sac_search":
            raise ImportError("sac_search was imported")

sys.meta_path.insert(0, Blocked())
sys.path[:0] = [{folder!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from tiny import assert_same, recomputed, run, stack, tokens
counts = {{}}
for name in {names!r}:
    module = __import__(name)
    model = stack()
    plain = run(model, tokens())
    module.apply(model)
    exported = run(model, tokens())
    assert_same(plain, exported)
    counts[name] = recomputed(plain, exported)
assert not any(name.partition(".")[0] == "sac_search" for name in sys.modules)
print(json.dumps(counts))
"""


def test_it_runs_where_sac_search_cannot_be_imported(tmp_path: Path) -> None:
    expected = {}
    for position, (label, policy) in enumerate(POLICIES.items()):
        (tmp_path / f"exported_{position}.py").write_text(render(policy), encoding="utf-8")
        model = stack()
        plain = run(model, tokens())
        with applied(model, policy):
            expected[f"exported_{position}"] = recomputed(plain, run(model, tokens()))
        assert label
    script = SUBPROCESS.format(
        folder=str(tmp_path), tests=str(Path(__file__).parent), names=list(expected)
    )
    ended = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == expected
    assert len({str(counts) for counts in expected.values()}) > 3


class ByHand(Stack):
    """Checkpoints its blocks itself."""

    def __init__(self, stacked: Stack, context_fn: Any) -> None:
        super().__init__(*stacked.blocks)
        self.context_fn = context_fn

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return x


def test_policy_fn_and_context_fn_work_by_hand(tmp_path: Path) -> None:
    module = load(tmp_path, SAVE_MM)
    plain = run(stack(), tokens())

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(module.policy_fn)

    for context_fn in (module.context_fn, contexts):
        by_hand = run(ByHand(stack(), context_fn), tokens())
        assert_same(plain, by_hand)
        again = recomputed(plain, by_hand)
        assert [again.get(op, 0) for op in (MM, ATTENTION, NORM)] == [0, 2, 4]


def test_each_tier_has_its_functions(tmp_path: Path) -> None:
    module = load(tmp_path, TWO_TIERS)
    plain = run(stack(), tokens())
    matmuls = [
        recomputed(plain, run(ByHand(stack(), context_fn), tokens())).get(MM, 0)
        for context_fn in (module.context_fn, module.context_fn_2)
    ]
    assert matmuls == [0, 6]
    assert {"policy_fn", "policy_fn_2"} <= vars(module).keys()
    assert not hasattr(load(tmp_path, SAVE_MM), "context_fn_2")


def test_random_ops_are_saved_all_or_not_at_all(tmp_path: Path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y * torch.rand_like(y)).sin()

    torch.manual_seed(0)
    model = Stack(Noisy(8, 8, bias=False), Noisy(8, 8, bias=False))
    plain = run(model, tokens())
    drawn = []
    for position, policy in enumerate((SAVE_MM, RANDOM)):
        folder = tmp_path / str(position)
        folder.mkdir()
        module = load(folder, policy)
        checkpointed = run(module.apply(model), tokens())
        module.remove(model)
        assert_same(plain, checkpointed)
        drawn.append(recomputed(plain, checkpointed).get("aten.rand_like.default", 0))
    assert drawn == [2, 0]


def test_a_tier_that_saves_nothing_is_plain_checkpointing(tmp_path: Path) -> None:
    assert load(tmp_path, POLICIES["plain"])._CONTEXT_FNS == (None,)
    module = load(tmp_path, POLICIES["plain first"])
    assert (None, module.context_fn_2) == module._CONTEXT_FNS


def test_a_policy_without_layers_does_nothing(tmp_path: Path) -> None:
    module, model = load(tmp_path, NO_CHECKPOINTING), stack()
    classes = [type(part) for part in model.modules()]
    module.apply(model)
    assert [type(part) for part in model.modules()] == classes
    assert module.LAYERS == {}


def test_it_holds_in_a_compiled_model(tmp_path: Path) -> None:
    model = stack()
    plain = run(model, tokens())
    load(tmp_path, TWO_TIERS).apply(model)
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens())
    model.zero_grad()
    output.backward(torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.gradients[name])


def test_it_can_be_tried_as_a_policy(tmp_path: Path) -> None:
    module: PolicyModule = load(tmp_path, SAVE_MM)
    model = stack()
    plain = run(model, tokens())
    with applied(model, module):
        assert recomputed(plain, run(model, tokens()))[NORM] == 4
    assert recomputed(plain, run(model, tokens())) == {}


# --- what it refuses ------------------------------------------------------------------------------


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_missing_layers_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    names = ["blocks.0", *(f"h.{index}" for index in range(6))]
    module, model = load(tmp_path, checkpoint_layers(names)), stack()
    before = classes_of(model)
    with pytest.raises(ValueError, match=r"Stack has no layer h\.0, h\.1, h\.2, h\.3, h\.4 and 1"):
        module.apply(model)
    assert classes_of(model) == before


def test_applying_on_top_of_a_policy_is_refused_and_rolled_back(tmp_path: Path) -> None:
    module, model = load(tmp_path, SAVE_MM), stack()
    with applied(model, checkpoint_layers(["blocks.1"])):  # sac_search's own runtime
        before = classes_of(model)
        with pytest.raises(ValueError, match="checkpointed already"):
            module.apply(model)
        assert classes_of(model) == before
    module.apply(model)
    with pytest.raises(ValueError, match="checkpointed already"):  # another module's runtime
        load(tmp_path, TWO_TIERS).apply(model)


def test_a_class_without_subclasses_is_refused_and_rolled_back(tmp_path: Path) -> None:
    class Final(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("Final is final")

    model = Stack(nn.Linear(2, 2), Final(2, 2))
    before = classes_of(model)
    with pytest.raises(TypeError, match="Final is final"):
        load(tmp_path, SAVE_MM).apply(model)
    assert classes_of(model) == before


def test_reference_policies_are_not_exported() -> None:
    reference = checkpoint_layers(BOTH, Tier(ops=(MM,), every_second_matmul=True))
    with pytest.raises(ValueError, match="counts calls"):
        render(reference)


@pytest.mark.parametrize("value", [math.nan, math.inf, [math.nan], {"a": object()}, len, {1: set}])
def test_figures_that_are_no_literals_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be written as a Python literal"):
        render(SAVE_MM, {**make_meta(), "figure": value})


# --- warnings, never failures ---------------------------------------------------------------------


def test_it_is_silent_where_it_was_measured(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, SAVE_MM).apply(stack())


def test_another_patch_release_is_no_reason_to_warn(tmp_path: Path) -> None:
    major, minor, *_ = torch.__version__.split(".")
    load(tmp_path, SAVE_MM, meta=make_meta(torch_version=f"{major}.{minor}.99+cu999"))


def test_another_torch_warns_and_works(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"policy 'tiny': it was made with torch 9\.9\.0, and"):
        module = load(tmp_path, SAVE_MM, meta=make_meta(torch_version="9.9.0"))
    assert recomputed(run(stack(), tokens()), run(module.apply(stack()), tokens()))[NORM] == 4


def test_another_device_warns_and_works(tmp_path: Path) -> None:
    meta = make_meta(device="cuda", device_name="NVIDIA H200")
    module, model = load(tmp_path, SAVE_MM, meta=meta), stack()
    with pytest.warns(UserWarning, match="on NVIDIA H200, and this model is on cpu") as caught:
        module.apply(model)
    assert caught[0].filename == __file__  # it points at the caller
    assert recomputed(run(stack(), tokens()), run(model, tokens()))[NORM] == 4


class Elsewhere(nn.Module):
    """Says that its parameters are on an accelerator, without there being one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield self


@pytest.mark.parametrize("backend", ["named", "nameless", "broken", "absent"])
def test_an_accelerators_name_is_compared_where_it_has_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        if backend == "named":

            @staticmethod
            def get_device_name(device: Any) -> str:
                return f"GPU {device}"

        if backend == "broken":

            @staticmethod
            def get_device_name(device: Any) -> str:
                raise RuntimeError("no driver")

    def get_device_module(device: Any) -> Any:
        if backend == "absent":
            raise RuntimeError("no such backend")
        return Backend

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    same = load(tmp_path, SAVE_MM, meta=make_meta(device="cuda", device_name="GPU cuda:0"))
    other = load(tmp_path, SAVE_MM, meta=make_meta(device="cuda", device_name="GPU of old"))
    same.apply(Elsewhere("cuda:0"))
    if backend == "named":
        with pytest.warns(UserWarning, match="measured on GPU of old, and this is GPU cuda:0"):
            other.apply(Elsewhere("cuda:0"))
    else:
        other.apply(Elsewhere("cuda:0"))


def test_models_without_or_with_meta_parameters_do_not_warn(tmp_path: Path) -> None:
    module = load(tmp_path, SAVE_MM, meta=make_meta(device="cuda", device_name="NVIDIA H200"))
    module.apply(Stack(nn.Identity(), nn.Identity()))
    with torch.device("meta"):
        module.apply(Stack(nn.Linear(2, 2), nn.Linear(2, 2)))


# --- its text -------------------------------------------------------------------------------------

NASTY = [
    '"""',
    '"""\nimport os\n"""',
    "'''",
    "\\",
    '\\"""',
    'a"',
    "{x}",
    "{}",
    "{0}",
    "{{",
    "%s",
    "\n",
    "\r\n",
    "\x00",
    "\ud800",
    "\u2028",
    "\N{SNOWMAN}",
    "\\N{SNOWMAN}",
    "\\ud800",
    "# coding: latin-1",
    "')]}\nraise SystemExit",
]
SYNTAX = st.text("\"'\\{}\n$%#()", max_size=12)
texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=30), SYNTAX)
# Surrogates are no text of Hypothesis' own; files' names on Linux hold them.
texts = st.builds(lambda a, b: a + b, texts, st.sampled_from(["", "\ud800", "\udcff"]))
plain_data = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


def statements(text: str) -> list[str]:
    """Returns what the module consists of: each top-level statement's kind and name."""
    found = []
    for node in ast.parse(text).body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        found.append(f"{type(node).__name__} {name}")
    return found


EXPECTED_STATEMENTS = statements(render(TWO_TIERS))


@settings(deadline=None, max_examples=60)
@given(
    names=st.lists(texts, min_size=2, max_size=2, unique=True),
    op=texts,
    headline=st.lists(texts, max_size=3),
    study=texts,
    device=texts,
    extra=plain_data,
)
@example(
    names=['"""', "\\"], op="')]", headline=['"""', "\\", '"'], study="{x}", device='"', extra=None
)
def test_names_cannot_change_the_code(
    names: list[str], op: str, headline: list[str], study: str, device: str, extra: Any
) -> None:
    policy = Policy(
        tiers=(Tier(ops=(op,), classes=(op, device)), Tier()),
        layers=(LayerChoice(name=names[0], tier=0), LayerChoice(name=names[1], tier=1)),
    )
    meta = {**make_meta(device_name=device), "study_name": study, "extra": extra}
    text = render(policy, meta, headline=headline, module_name="policy")
    text.encode("utf-8")
    assert statements(text) == EXPECTED_STATEMENTS
    namespace: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported", "exec"), namespace)  # noqa: S102
    assert namespace["LAYERS"] == {names[0]: 0, names[1]: 1}
    assert list(namespace["LAYERS"]) == names
    loaded = namespace["META"]
    assert {key: loaded[key] for key in meta} == meta
    assert loaded.keys() == {*meta, "policy"}
    assert [tier.ops for tier in namespace["TIERS"]] == [{op}, set()]


@pytest.mark.parametrize("name", NASTY)
def test_nasty_module_names_stay_in_the_docstring(name: str) -> None:
    assert statements(render(TWO_TIERS, module_name=name)) == EXPECTED_STATEMENTS


def test_it_consists_of_what_the_design_promises() -> None:
    names = {statement.partition(" ")[2] for statement in statements(render(SAVE_MM))}
    assert {"policy_fn", "context_fn", "LAYERS", "META", "apply", "remove"} <= names
    kinds = {statement.partition(" ")[0] for statement in EXPECTED_STATEMENTS}
    assert kinds == {"Expr", "ImportFrom", "Import", "Assign", "ClassDef", "FunctionDef", "If"}
    assert EXPECTED_STATEMENTS[0] == "Expr "  # the docstring
    assert sum(statement.startswith("Expr") for statement in EXPECTED_STATEMENTS) == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_it_imports_the_standard_library_and_torch_only(policy: Policy) -> None:
    imported = set()
    for node in ast.walk(ast.parse(render(policy))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert "torch" in imported
    assert imported - {"torch"} <= sys.stdlib_module_names
    assert "sac_search." not in render(policy).replace("sac-search", "")


def test_its_runtime_is_the_text_that_was_measured() -> None:
    source = Path(policy_runtime.__file__).read_text()
    body = source.partition("class SaveSet")[2]
    assert body in render(SAVE_MM)


def test_the_docstring_says_how_to_use_it() -> None:
    text = ast.get_docstring(ast.parse(render(SAVE_MM, headline=["Line 1."], module_name="mine")))
    assert text is not None
    assert text.startswith("Line 1.")
    assert "import mine\n    mine.apply(model)" in text
    assert "use_reentrant=False, context_fn=mine.context_fn)" in text
    plain = ast.get_docstring(ast.parse(render(POLICIES["plain"])))
    assert plain is not None
    assert "checkpoint(layer, x, use_reentrant=False)" in plain


def test_meta_holds_the_whole_policy(tmp_path: Path) -> None:
    module = load(tmp_path, TWO_TIERS)
    assert [list(tier["ops"]) for tier in module.META["policy"]["tiers"]] == [[MM, ATTENTION], []]
    assert module.META["policy"]["layers"][1] == {"name": "blocks.1", "tier": 1}


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "policy.py"
    write_whole(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["policy.py"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_gets_the_users_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "policy.py", "")
        assert os.umask(umask) == umask  # and leaves it alone
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "policy.py").stat().st_mode) == mode


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "policy.py"
    write_whole(path, "old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    expected = UsageError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_whole(path, "new")
    if expected is UsageError:
        assert "policy.py cannot be written: No space left on device" in str(caught.value)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.py"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.py"
    write_whole(path, "old")
    seen = []
    replace = os.replace

    def watch(source: Any, target: Any) -> None:
        seen.append((path.read_text(), Path(source).read_text(), Path(source).parent))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write_whole(path, "new" * 10_000)
    assert seen == [("old", "new" * 10_000, tmp_path)]  # whole, and on the same file system
    assert path.read_text() == "new" * 10_000


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "policy.py", tmp_path, Path("/proc/nothing/policy.py")):
        with pytest.raises(UsageError, match="cannot be written: "):
            write_whole(path, "text")


def test_a_read_only_folder_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:  # root may write everywhere, so it is played
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(UsageError, match=r"policy\.py cannot be written: Permission denied"):
        write_whole(tmp_path / "policy.py", "text")


# --- compiled policies ----------------------------------------------------------------------------

COMPILED = dataclasses.replace(SAVE_MM, compiled=Compiled())
EAGER_BACKEND = {"backend": "aot_eager"}


@pytest.fixture
def settings_of_torch() -> Iterator[Callable[[], dict[str, Any]]]:
    from torch._functorch import config

    before = config.get_config_copy()
    yield config.get_config_copy
    assert config.get_config_copy() == before
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "policy",
    [
        COMPILED,
        Policy(compiled=Compiled(memory_budget=0.4)),
        Policy(compiled=Compiled(memory_budget=0.4, solver="greedy")),
    ],
)
def test_it_compiles_what_was_found_compiled_and_undoes_it(
    policy: Policy, tmp_path: Path, settings_of_torch: Callable[[], dict[str, Any]]
) -> None:
    model = stack()
    plain = run(model, tokens())
    attributes = dict(vars(model))
    module = load(tmp_path, policy, compile_arguments=EAGER_BACKEND)

    module.apply(model)
    module.apply(model)  # once is enough

    assert policy.compiled.settings.items() <= settings_of_torch().items()
    assert model._compiled_call_impl is not None
    assert_same(plain, run(model, tokens()))
    module.remove(model)
    assert dict(vars(model)) == attributes
    assert recomputed(plain, run(model, tokens())) == {}


def test_it_leaves_compiling_to_you_if_you_say_so(
    tmp_path: Path, settings_of_torch: Callable[[], dict[str, Any]]
) -> None:
    model = stack()
    module = load(tmp_path, COMPILED, compile_arguments=EAGER_BACKEND)
    module.apply(model, compile=False)
    assert "_compiled_call_impl" not in vars(model)
    # Its context function can be traced whole, and so can the layers.
    loss_of(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens())).backward()
    assert model._compiled_call_impl is None
    assert module.apply(model)._compiled_call_impl is not None  # unless you change your mind
    module.remove(model)


def test_a_model_that_was_compiled_before_is_so_afterwards(tmp_path: Path) -> None:
    model = stack()
    model.compile(backend="eager")
    call = model._compiled_call_impl
    module = load(tmp_path, COMPILED, compile_arguments=EAGER_BACKEND)
    assert module.apply(model)._compiled_call_impl is not call
    assert module.remove(model)._compiled_call_impl is call


def test_an_eager_policy_compiles_nothing(tmp_path: Path) -> None:
    model = stack()
    module = load(tmp_path, SAVE_MM)
    assert module.COMPILE is None
    assert "_compiled_call_impl" not in vars(module.apply(model))
    assert "prefer" not in render(SAVE_MM).partition("TIERS = ")[2].partition("\n\n")[0]


def test_its_docstring_says_who_compiles(tmp_path: Path) -> None:
    eager, compiled = (ast.get_docstring(ast.parse(render(p))) or "" for p in (SAVE_MM, COMPILED))
    assert "model = torch.compile(model)" in eager
    assert "compiles it, too: call no torch.compile" in compiled
    assert "policy.apply(model, compile=False)" in compiled


def test_preferences_ship_as_preferences(tmp_path: Path) -> None:
    prefers = dataclasses.replace(SAVE_MM, compiled=Compiled(prefer=True))
    for policy, verdict in ((prefers, "PREFER_SAVE"), (COMPILED, "MUST_SAVE")):
        module = load(tmp_path, policy)
        decision = module.policy_fn(None, torch.ops.aten.mm.default, torch.ones(2, 2))
        assert decision.name == verdict


def test_a_layer_that_holds_compiled_code_is_refused(tmp_path: Path) -> None:
    model = stack()
    model.blocks[1].up.compile(backend="eager")
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"blocks\.1 holds compiled code \(up\)"):
        load(tmp_path, SAVE_MM).apply(model)
    assert [type(module) for module in model.modules()] == classes
    load(tmp_path, checkpoint_layers(BOTH)).apply(model)  # all of it is recomputed


def test_its_figures_are_those_of_the_compiled_step(tmp_path: Path) -> None:
    path = tmp_path / "exported.py"
    policy = Policy(compiled=Compiled(memory_budget=0.4))
    path.write_text(render(policy, compile_arguments=EAGER_BACKEND), encoding="utf-8")
    model = stack(3)
    work = Workload(model, lambda m, x: m(x).square().mean(), tokens(4, 64, HIDDEN))
    session = Session(work, SessionSettings(spec="here", steps=2), torch.device("cpu"))

    outcome = session.measure_module(str(path))
    verdict = session.verify_module(str(path))

    assert outcome.measurement is not None and outcome.measurement.compile_seconds is not None
    none = session.measure(NO_CHECKPOINTING).measurement
    assert none is not None and outcome.measurement.peak_bytes < none.peak_bytes
    assert verdict.verification is not None and verdict.verification.passed
    assert verdict.verification.reference == "compile"
    assert "_compiled_call_impl" not in vars(model)
