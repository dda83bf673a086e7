"""How a user's file becomes a workload, and what is said when it cannot."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sac_search
from sac_search import errors
from sac_search.errors import WorkloadError, WorkloadNotFound
from sac_search.workload import (
    Factory,
    Workload,
    build_workload,
    check_workload,
    hash_sources,
    load_factory,
    require,
    require_file,
    split_spec,
    with_largest_batch,
)

CPU = torch.device("cpu")
PACKAGE = str(Path(sac_search.__file__).parent)
TINY = """
    import torch
    from torch import nn
    from sac_search import Workload

    def make(**sizes):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return Workload(model, lambda m, b: m(b).sum(), torch.ones(1, 2), **sizes)
"""

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _imports_undone() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [n for n in sys.modules if n.startswith(("sac_test", "_sac_", "train"))]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "train.py", *, after: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text) + textwrap.dedent(after))
        return path

    return write


def tiny_workload(**changes: Any) -> Workload:
    model = nn.Linear(2, 2)
    fields: dict[str, Any] = {
        "model": model,
        "loss_fn": lambda m, b: m(b).sum(),
        "batch": torch.ones(1, 2),
    }
    return Workload(**(fields | changes))


def factory_of(function: Callable[..., Any]) -> Factory:
    return Factory(function=function, name="train.py:workload")


# --- finding the factory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("train.py", ("train.py", "workload")),
        ("train.py:small", ("train.py", "small")),
        ("a/b.py:small", ("a/b.py", "small")),
        ("package.module:small", ("package.module", "small")),
        ("package.module", ("package.module", "workload")),
        ("train.py:", ("train.py:", "workload")),
        ("train.py:no-name", ("train.py:no-name", "workload")),
        (":small", (":small", "workload")),
    ],
)
def test_a_spec_is_split_at_its_last_colon(spec: str, expected: tuple[str, str]) -> None:
    assert split_spec(spec) == expected


def test_the_factory_of_a_file(write: Write) -> None:
    path = write(TINY, after="def workload(device): return make()")
    factory = load_factory(str(path))
    assert factory.name == f"{path}:workload"
    assert hash_sources(factory) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert isinstance(build_workload(factory, CPU), Workload)


def test_a_named_factory_of_a_file(write: Write) -> None:
    path = write(TINY, after="def other(): return make(batch_size=3)")
    assert build_workload(load_factory(f"{path}:other"), CPU).batch_size == 3


def test_a_factory_of_a_package_in_the_current_folder(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", "sac_test_package/__init__.py")
    write(TINY, "sac_test_package/module.py", after="def small(): return make(batch_size=4)")
    monkeypatch.chdir(write("").parent)
    factory = load_factory("sac_test_package.module:small")
    assert factory.name == "sac_test_package.module:small"
    assert build_workload(factory, CPU).batch_size == 4


def test_neighbours_of_the_file_can_be_imported(write: Write) -> None:
    write("VALUE = 5", "sac_test_neighbour.py")
    path = write(TINY, after="import sac_test_neighbour\ndef workload(): return make(batch_size=5)")
    assert build_workload(load_factory(str(path)), CPU).batch_size == 5
    assert sys.modules["sac_test_neighbour"].VALUE == 5


def test_the_module_has_the_name_of_its_file(write: Write) -> None:
    path = write(TINY, "sac_test_named.py", after="def workload(): return make()")
    assert load_factory(str(path)).function.__module__ == "sac_test_named"
    assert "sac_test_named" in sys.modules  # for pickle, dataclasses and typing


@pytest.mark.parametrize("name", ["queue.py", "torch.py", "json.py", "no-identifier.py"])
def test_a_file_named_like_a_module_hides_none(write: Write, name: str) -> None:
    known = {n: sys.modules.get(n) for n in ("queue", "torch", "json")}
    path = write(TINY, name, after="def workload(): return make(batch_size=6)")
    factory = load_factory(str(path))
    assert build_workload(factory, CPU).batch_size == 6
    assert factory.function.__module__ == "_sac_workload"
    assert {n: sys.modules.get(n) for n in known} == known


@pytest.mark.parametrize("spec", ["missing.py", "missing.py:other", "no/such/folder/train"])
def test_a_missing_file(spec: str) -> None:
    for find in (load_factory, require_file):
        with pytest.raises(WorkloadNotFound, match=r"there is no file '[^']*(missing|train)"):
            find(spec)


def test_a_present_file_and_a_module_are_not_asked_for_more(write: Write) -> None:
    require_file(str(write("raise RuntimeError")))
    require_file("some.module:factory")


@pytest.mark.parametrize(
    "spec", ["sac_no_such_module", "sac_no_such.module:f", ".", "..x:f", "os.nothing", "a b"]
)
def test_a_missing_module(spec: str) -> None:
    with pytest.raises(WorkloadNotFound, match="neither a file nor a module"):
        load_factory(spec)


def test_a_module_without_a_file_has_no_workload() -> None:
    with pytest.raises(WorkloadNotFound, match="sys has no function 'workload'"):
        load_factory("sys")


def test_a_package_whose_import_fails_is_not_missing(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("import sac_not_installed", "sac_test_broken/__init__.py")
    write("", "sac_test_broken/module.py")
    monkeypatch.chdir(write("").parent)
    with pytest.raises(WorkloadError, match="No module named 'sac_not_installed'") as raised:
        load_factory("sac_test_broken.module:f")
    assert "import sac_not_installed" in raised.value.user_traceback


def test_a_missing_factory_names_the_candidates(write: Write) -> None:
    path = write(
        """
        from os.path import join
        SIZE = 3
        def small(): ...
        def large(): ...
        def _hidden(): ...
        """
    )
    with pytest.raises(WorkloadNotFound) as raised:
        load_factory(str(path))
    assert "has no function 'workload'; it has: small, large." in str(raised.value)
    with pytest.raises(WorkloadNotFound, match="has no function 'SIZE'"):
        load_factory(f"{path}:SIZE")


def test_a_file_without_functions_names_none(write: Write) -> None:
    with pytest.raises(WorkloadNotFound, match=r"has no function 'workload'\. Write one"):
        load_factory(str(write("x = 1")))


# --- code that raises -----------------------------------------------------------------------------


def assert_only_user_frames(error: WorkloadError, *expected: str) -> None:
    text = error.user_traceback
    assert PACKAGE not in text
    assert "importlib" not in text
    for part in expected:
        assert part in text


def test_an_import_error_in_the_file(write: Write) -> None:
    path = write("import os\nimport sac_not_installed\n")
    with pytest.raises(WorkloadError, match=r"importing .*train\.py raised Module") as raised:
        load_factory(str(path))
    assert raised.value.user_traceback.startswith("Traceback (most recent call last):\n")
    assert_only_user_frames(
        raised.value,
        f'File "{path}", line 2',
        "ModuleNotFoundError: No module named 'sac_not_installed'",
    )


def test_a_syntax_error_in_the_file(write: Write) -> None:
    path = write("def workload(:\n")
    with pytest.raises(WorkloadError, match="raised SyntaxError") as raised:
        load_factory(str(path))
    assert raised.value.user_traceback == (
        f'  File "{path}", line 1\n    def workload(:\n                 ^\n'
        "SyntaxError: invalid syntax\n"
    )


@pytest.mark.parametrize("text", ["import sys; sys.exit(2)", "raise SystemExit(2)"])
def test_a_file_that_exits(write: Write, text: str) -> None:
    with pytest.raises(WorkloadError, match="raised SystemExit: 2"):
        load_factory(str(write(text)))


def test_a_file_that_raises_our_own_error_keeps_it(write: Write) -> None:
    path = write("from sac_search import WorkloadError\nraise WorkloadError('as written')")
    with pytest.raises(WorkloadError, match=r"^as written$"):
        load_factory(str(path))


def test_a_factory_that_raises(write: Write) -> None:
    path = write(
        """
        def helper():
            raise KeyError("no such size")

        def workload(device):
            try:
                helper()
            except KeyError as error:
                raise ValueError("cannot be built") from error
        """
    )
    with pytest.raises(WorkloadError, match="workload raised ValueError: cannot be") as raised:
        build_workload(load_factory(str(path)), CPU)
    assert_only_user_frames(
        raised.value, "in workload", "ValueError: cannot be built", "KeyError: 'no such size'"
    )
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_factory_that_exits() -> None:
    def workload() -> None:
        sys.exit("no data here")

    with pytest.raises(WorkloadError, match="raised SystemExit: no data here"):
        build_workload(factory_of(workload), CPU)


def test_a_factory_that_raises_our_own_error_keeps_it() -> None:
    def workload() -> None:
        raise WorkloadError("as written")

    with pytest.raises(WorkloadError, match=r"^as written$"):
        build_workload(factory_of(workload), CPU)


def test_a_factory_that_wants_more_than_it_is_given() -> None:
    def workload(device: torch.device, config: str) -> None: ...

    with pytest.raises(WorkloadError, match=r"missing 1 required positional .*'config'") as raised:
        build_workload(factory_of(workload), CPU)
    assert PACKAGE not in raised.value.user_traceback


# --- what the factory takes -----------------------------------------------------------------------


def test_the_factory_gets_what_it_takes() -> None:
    given: list[dict[str, Any]] = []

    def note(**keywords: Any) -> Workload:
        given.append(keywords)
        return tiny_workload()

    def nothing() -> Workload:
        return note()

    def device_only(device: torch.device) -> Workload:
        return note(device=device)

    def both(device: torch.device, batch_size: int | None = None) -> Workload:
        return note(device=device, batch_size=batch_size)

    def keyword_only(*, batch_size: int = 7) -> Workload:
        return note(batch_size=batch_size)

    for function in (nothing, device_only, both, keyword_only, note):
        build_workload(factory_of(function), CPU)
    assert given == [
        {},
        {"device": CPU},
        {"device": CPU, "batch_size": None},
        {"batch_size": 7},
        {"device": CPU},
    ]
    given.clear()
    for function in (both, keyword_only, note):
        build_workload(factory_of(function), CPU, batch_size=2)
    assert given == [
        {"device": CPU, "batch_size": 2},
        {"batch_size": 2},
        {"device": CPU, "batch_size": 2},
    ]


def test_a_batch_size_for_a_factory_that_takes_none() -> None:
    def workload(device: torch.device) -> Workload:
        raise AssertionError("must not be called")

    with pytest.raises(WorkloadNotFound, match=r"--batch-size 2 .*takes no batch_size"):
        build_workload(factory_of(workload), CPU, batch_size=2)


# --- what the factory returns ---------------------------------------------------------------------


def frozen_model() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned a NoneType; it must return a sac_search.Workload"),
        ((1, 2), "returned a tuple"),
        (tiny_workload(model=3), "model is a int, not a torch.nn.Module"),
        (tiny_workload(loss_fn=torch.ones(1)), "loss_fn is a Tensor; it must be a function"),
        (tiny_workload(optimizer="adam"), "optimizer is a str, not a torch.optim.Optimizer"),
        (tiny_workload(model=frozen_model()), "no parameter requires grad"),
    ],
)
def test_what_is_no_workload_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as raised:
        build_workload(factory_of(lambda: returned), CPU)
    assert str(raised.value).startswith("train.py:workload")


def test_a_frozen_model_with_one_open_parameter_can_be_trained() -> None:
    model = frozen_model()
    model.bias.requires_grad_(True)
    check_workload(tiny_workload(model=model), "x")


def test_a_prompt_that_only_the_optimizer_knows_can_be_trained() -> None:
    prompt = nn.Parameter(torch.zeros(2))
    model = frozen_model()
    workload = tiny_workload(model=model, optimizer=torch.optim.SGD([prompt], lr=0.1))
    check_workload(workload, "x")
    assert [id(p) for p in workload.parameters()] == [
        *(id(p) for p in model.parameters()),
        id(prompt),
    ]


# --- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: m(b).sum().item(), "the loss is a float, not a tensor.*loss_fn"),
        (lambda m, b: (m(b).sum(),), "the loss is a tuple"),
        (lambda m, b: m(b), r"the loss has shape \[1, 2\], but must be one number"),
        (lambda m, b: m(b).sum().detach(), "does not require grad"),
    ],
)
def test_a_loss_without_a_backward_pass_is_refused(
    loss_fn: Callable[..., Any], message: str
) -> None:
    workload = tiny_workload(loss_fn=loss_fn)
    for run in (workload.run_loss, workload.run_step):
        with pytest.raises(WorkloadError, match=message):
            run()


@pytest.mark.parametrize(
    ("loss", "message"),
    [(None, "the loss is a NoneType.*from step"), (torch.ones(2), r"shape \[2\]")],
)
def test_a_step_that_returns_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        tiny_workload(step=lambda workload: loss).run_step()


def test_the_default_step_trains_and_drops_the_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    workload = tiny_workload(model=model, optimizer=optimizer, batch=torch.tensor([[1.0, 2.0]]))
    loss = workload.run_step()
    assert loss.item() == 3.0
    assert not loss.requires_grad
    assert model.weight.tolist() == [[0.5, 0.0]]
    assert model.weight.grad is None


def test_without_an_optimizer_the_step_drops_the_gradients_itself() -> None:
    workload = tiny_workload()
    before = workload.model.weight.clone()
    workload.run_step()
    assert workload.model.weight.grad is None
    assert torch.equal(workload.model.weight, before)


def test_a_loss_of_one_element_is_a_number() -> None:
    assert tiny_workload(loss_fn=lambda m, b: m(b).sum().reshape(1, 1)).run_step().shape == (1, 1)


def test_a_step_of_ones_own_replaces_the_default_one() -> None:
    seen: list[Workload] = []

    def step(workload: Workload) -> torch.Tensor:
        seen.append(workload)
        return workload.loss_fn(workload.model, workload.next_batch())

    workload = tiny_workload(step=step)
    assert not workload.run_step().requires_grad
    assert seen == [workload]
    assert workload.model.weight.grad is None  # no backward pass but the user's


def drawn(*lengths: int) -> Workload:
    """Returns a workload whose batches have these lengths, in turn."""
    batches = itertools.cycle(
        {"x": [Pair(left=torch.full((length, 2), float(length)), right=None)]} for length in lengths
    )
    return tiny_workload(batch=lambda: next(batches))


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None


def test_of_unlike_batches_the_largest_is_taken_for_all_steps() -> None:
    workload = with_largest_batch(drawn(2, 5, 3))
    batches = [workload.next_batch() for _ in range(4)]
    assert [len(batch.pop("x")[0].left) for batch in batches] == [5, 5, 5, 5]  # each its own copy
    assert len(workload.next_batch()["x"]) == 1
    (note,) = workload.notes
    assert "the largest of the first 16" in note


def test_batches_of_one_size_are_drawn_on() -> None:
    workload = drawn(3)
    assert with_largest_batch(workload) is workload
    plain = tiny_workload()
    assert with_largest_batch(plain) is plain


def test_a_loader_that_ends_is_taken_as_far_as_it_goes() -> None:
    batches = iter(torch.ones(length, 2) for length in (1, 3, 2))
    workload = with_largest_batch(tiny_workload(batch=lambda: next(batches)))
    assert [len(workload.next_batch()) for _ in range(3)] == [3, 3, 3]
    assert "the largest of the first 3," in workload.notes[0]
    ended = with_largest_batch(tiny_workload(batch=lambda: next(iter(()))))
    with pytest.raises(StopIteration):
        ended.next_batch()


def test_batches_from_a_callable_follow_each_other() -> None:
    batches = iter(torch.full((1, 2), value) for value in (1.0, 2.0))
    workload = tiny_workload(batch=lambda: next(batches))
    assert [workload.next_batch().sum().item() for _ in range(2)] == [2.0, 4.0]


# --- extras ---------------------------------------------------------------------------------------


def test_every_extra_that_is_named_is_one_of_the_packages() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    files = [*(root / "sac_search").rglob("*.py"), *(root / "studies").glob("*.py")]
    named = {extra for file in files for extra in re.findall(r'extra="([^"]+)"', file.read_text())}
    assert "transformers" in named
    assert named <= project["optional-dependencies"].keys()


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"pip install 'sac-search\[transformers\]'"):
        require("sac_not_installed", "transformers")
    assert require("json", "transformers") is sys.modules["json"]


def test_an_extra_that_is_broken_says_so_itself(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("import sac_not_installed", "sac_test_extra.py")
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(ModuleNotFoundError, match="sac_not_installed"):
        require("sac_test_extra", "transformers")


def test_exit_codes_of_the_errors() -> None:
    assert WorkloadNotFound.exit_code == errors.UsageError.exit_code == 2
    assert WorkloadError.exit_code == 4


# --- the forward pass of a step -------------------------------------------------------------------


def test_the_forward_of_a_step_of_ones_own_ends_where_backward_begins() -> None:
    model = nn.Linear(2, 1)
    seen: list[str] = []

    def step(workload: Workload) -> torch.Tensor:
        for micro_batch in workload.next_batch():
            seen.append("forward")
            loss = workload.loss_fn(workload.model, micro_batch)
            loss.backward()
            seen.append("backward")
        return loss

    batches = [{"x": torch.ones(3, 2)}, {"x": torch.ones(3, 2)}]
    workload = Workload(model, lambda m, b: m(b["x"]).mean(), batches, step=step)
    backward = torch.autograd.backward
    workload.run_forward()
    with torch.no_grad():
        workload.run_forward()
    assert seen == ["forward", "forward"]
    assert torch.autograd.backward is backward
    assert model.weight.grad is None
    workload.run_step()
    assert seen == ["forward"] * 2 + ["forward", "backward"] * 2
    assert model.weight.grad is not None


def test_a_step_of_ones_own_may_use_the_workloads_loss_without_gradients() -> None:
    def step(workload: Workload) -> torch.Tensor:
        loss = workload.run_loss()
        loss.backward()
        raise AssertionError("backward must not be passed")

    with torch.no_grad():
        tiny_workload(step=step).run_forward()


def test_an_error_in_the_forward_of_a_step_is_not_hidden() -> None:
    def step(workload: Workload) -> torch.Tensor:
        raise ZeroDivisionError("of the step's own")

    workload = Workload(nn.Linear(1, 1), lambda m, b: m(b), torch.ones(1), step=step)
    backward = torch.autograd.backward
    with pytest.raises(ZeroDivisionError):
        workload.run_forward()
    assert torch.autograd.backward is backward
