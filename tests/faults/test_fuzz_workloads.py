"""Whatever a workload's file holds, loading it ends in a workload or in what is said of it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import PAYLOAD, RAW, any_texts, cases, documents, is_unicode, texts
from hypothesis import example, given
from hypothesis import strategies as st

from sac_search import records
from sac_search import workload as workload_module
from sac_search.errors import SacSearchError, UsageError, WorkloadError
from sac_search.failures import failure_from
from sac_search.worker.protocol import RemoteError, Reply
from sac_search.workload import build_workload, canonical_spec, load_factory, require_file

CPU = torch.device("cpu")
PRELUDE = """
import asyncio, functools, sys
import torch
from sac_search import Workload, WorkloadError
from sac_search.errors import UsageError

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("mute")

class Unlike(BaseException):
    pass

class Hollow(torch.nn.Module):
    def __init__(self):
        pass

class Strange:
    __signature__ = 5
    def __call__(self):
        return make()

def make(**changes):
    fields = dict(
        model=torch.nn.Linear(2, 2), loss_fn=lambda m, b: m(b).sum(), batch=torch.ones(1, 2)
    )
    return Workload(**(fields | changes))
"""
VALUES = [
    "None",
    "5",
    "(1, 2)",
    "make",
    "make()",
    "make(model=5)",
    "make(model=torch.nn.ReLU())",
    "make(model=torch.nn.Linear)",
    "make(loss_fn=None)",
    "make(optimizer='adam')",
    "make(optimizer=torch.nn.ReLU())",
    "make(optimizer=type('O', (), {'param_groups': 5})())",
    "make(optimizer=type('O', (), {'param_groups': [{}]})())",
    "make(optimizer=type('O', (), {'param_groups': [{'params': [5]}]})())",
    "dict",
    "type",
    "print",
    "max",
    "Workload",
    "Workload.run_step",
    "Strange",
    "Strange()",
    "torch.nn.LazyLinear(3)",
    "make(model=torch.nn.LazyLinear(3))",
    "make(model=Hollow())",
    "functools.partial(make)",
    "functools.partial(make, model=5)",
    "lambda: make()",
    "lambda device, batch_size: make()",
    "lambda device, /: make()",
    "lambda *a, **k: make()",
    "lambda x: make()",
    "torch.nn.Linear(2, 2)",
    "sys.exit",
]
EXCEPTIONS = [
    "RuntimeError('x')",
    "RuntimeError('\\ud800')",
    "RuntimeError(PAYLOAD)",
    "Mute()",
    "Mute",
    "Unlike('x')",
    "SystemExit",
    "SystemExit(0)",
    "SystemExit(Mute())",
    "GeneratorExit",
    "StopIteration",
    "asyncio.CancelledError('x')",
    "MemoryError",
    "RecursionError",
    "KeyError('x')",
    "UnicodeDecodeError('utf-8', b'', 0, 1, 'x')",
    "ExceptionGroup('x', [ValueError(1)])",
    "BaseExceptionGroup('x', [SystemExit(1)])",
    "WorkloadError('x')",
    "WorkloadError('\\ud800')",
    "UsageError('x')",
    "'no exception'",
    "ModuleNotFoundError(name=5)",
]
LINES = [
    "workload = undefined",
    "print('said')",
    "sys.exit()",
    "exit(3)",
    "__file__ = 5",
    "__file__ = None",
    "__file__ = '\\0'",
    "__name__ = 'a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z'",
    "__name__ = 5",
    "del __name__",
    "del __file__",
    "import no_such_module",
    "import train",
    "from . import train",
    "from train import workload",
    "class workload: pass",
    "def workload(): return workload()",
    "def workload(): yield make()",
    "def workload(device): make().run_step(); return make()",
    "def workload(:",
    "  indented",
    "sys.modules[__name__] = 5",
    "del sys.modules[__name__]",
    "\x00",
    "'\\N{nothing}'",
    "(" * 300,
    "-" * 5000 + "1",
    "9" * 5000,
    *(f"workload = {value}" for value in VALUES),
    *(f"def workload(): return {value}" for value in VALUES),
    *(f"def workload(device, batch_size=2): return {value}" for value in VALUES),
    *(f"raise {exception}" for exception in EXCEPTIONS),
    *(f"def workload(device=None): raise {exception}" for exception in EXCEPTIONS),
    *(f"def __getattr__(name): raise {exception}" for exception in EXCEPTIONS),
    *(f"class workload:\n    def __new__(cls): raise {exception}" for exception in EXCEPTIONS),
]


def file_of(lines: Sequence[str]) -> bytes:
    return "\n".join([PRELUDE, f"PAYLOAD = {PAYLOAD!r}", *lines]).encode()


contents = st.one_of(
    st.lists(st.sampled_from(LINES), min_size=1, max_size=3).map(file_of),
    st.sampled_from(
        [
            b"",
            b"\xff\xfe",
            b"\x7fELF\x02\x01\x01",
            b"\xef\xbb\xbfdef workload(): ...",
            b"# coding: latin-1\nname = '\xe9'",
            b"# coding: no-such-coding\n",
            b"# coding: rot13\n",
            b"name = '\xe9'",
            "def workload(): ...".encode("utf-16"),
            b"PK\x03\x04",
            b"\x00" * 100,
        ]
    ),
    st.binary(max_size=40),
    texts.map(lambda text: text.encode()),
)
FILE_NAMES = [
    "train.py",
    "train",
    "train.txt",
    "train.pyc",
    "train.so",
    "train.cpython-311-x86_64-linux-gnu.so",
    "torch.py",
    "no-identifier.py",
    "a:b.py",
    "train.py:workload",
    "sp ace.py",
    "\N{SNOWMAN}.py",
    "caf\udce9.py",
    "new\nline.py",
    ".py",
    "y" * 250 + ".py",
    "__init__.py",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # A file that is written twice in a second would be taken for the first one.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        yield tmp_path_factory.mktemp("files")


@contextlib.contextmanager
def imports_undone() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules]:
            del sys.modules[name]


def load_and_build(spec: str, batch_size: int | None = None) -> SacSearchError | None:
    """Does with a workload what the worker does. Returns the error that came of it.

    Only two kinds may, and they can be sent to the parent.
    """
    found: WorkloadError | UsageError | None = None
    with imports_undone(), contextlib.redirect_stdout(io.StringIO()):
        try:
            build_workload(load_factory(spec), CPU, batch_size)
        except (WorkloadError, UsageError) as error:
            found = error
    if found is not None:
        remote = RemoteError.of(found)
        assert remote.message
        assert str(Path(workload_module.__file__)) not in remote.user_traceback
        records.encode(Reply(number=1, error=remote))
    return found


@cases(300)
@given(
    content=contents,
    name=st.one_of(st.just("train.py"), st.sampled_from(FILE_NAMES)),
    ending=st.sampled_from(["", "", ":workload", ":other", ":", ":no-name"]),
    batch_size=st.sampled_from([None, None, 3]),
)
def test_a_workloads_file_may_hold_anything(
    files: Path, content: bytes, name: str, ending: str, batch_size: int | None
) -> None:
    path = files / name
    path.write_bytes(content)
    try:
        load_and_build(f"{path}{ending}", batch_size)
    finally:
        path.unlink()


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_workloads_file_may_have_any_name(files: Path, name: str) -> None:
    path = files / name
    path.write_bytes(file_of(["def workload(): return make()"]))
    error = load_and_build(str(path))
    path.unlink()
    assert (error is None) == (name.endswith(".py") and is_unicode(name))


@pytest.mark.parametrize("line", LINES)
def test_a_workloads_file_may_hold_any_line(files: Path, line: str) -> None:
    path = files / "train.py"
    for lines in ([line], [line, "def workload(): return make()"]):
        path.write_bytes(file_of(lines))
        load_and_build(str(path))


MODULES = [
    "sys",
    "os.path",
    "json.nothing",
    "no_such.module",
    "sac_search.builtin:nothing",
    ":",
    "::f",
    ".",
    "..",
    "/",
    "",
    "a b",
    "\N{SNOWMAN}",
    "x" * 300,
    "x/" * 3000,
    "x" * 300 + ".py:f",
    "\x00",
    "a\x00.py",
    "\ud800",
    "caf\udce9.py",
]


@cases(120)
@given(location=st.one_of(st.sampled_from(MODULES), any_texts), ending=st.sampled_from(["", ":no"]))
def test_a_workload_may_have_any_place(location: str, ending: str) -> None:
    load_and_build(location + ending)


@cases(100)
@given(
    library=st.sampled_from(["hf:", "timm:"]),
    model=st.one_of(any_texts, st.just("config.json"), st.text("%?&=+;#/.0a", max_size=9)),
    settings=st.one_of(
        st.just(""),
        any_texts.map("?{}".format),
        any_texts.map("?dtype={}".format),
        any_texts.map("?sequence_length={}".format),
        st.integers().map("?lora_rank={}".format),
    ),
)
@example("hf:", "x" * 300, "")
@example("hf:", "\x00", "")
@example("timm:", "vit", "?sequence_length=" + "9" * 5000)
def test_a_recipe_may_be_any_text(library: str, model: str, settings: str) -> None:
    spec = library + model + settings
    with contextlib.suppress(UsageError):
        require_file(spec)
        assert canonical_spec(spec) == canonical_spec(canonical_spec(spec))


@cases(100)
@given(content=st.one_of(st.sampled_from(RAW), documents.map(json.dumps), st.binary(max_size=9)))
def test_a_models_config_may_hold_anything(files: Path, content: str | bytes) -> None:
    path = files / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        require_file(f"hf:{path}")
    except UsageError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_a_step_may_raise_anything(exception: str) -> None:
    namespace: dict[str, Any] = {}
    exec(file_of([f"def step(): raise {exception}"]), namespace)  # noqa: S102
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        namespace["step"]()
    records.encode(failure_from(raised.value))
