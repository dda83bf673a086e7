"""A loaded workload, and the server in front of it, in this process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sac_search import device as devices
from sac_search import measure, records
from sac_search.compiling import CompileOptions
from sac_search.device import Clock
from sac_search.errors import UsageError, WorkloadError, WorkloadNotFound
from sac_search.forecast import Forecast, track_step
from sac_search.forecaster import Forecaster, ProfileRequest
from sac_search.policy import (
    COMPILE_ALONE,
    NO_CHECKPOINTING,
    Compiled,
    Policy,
    checkpoint_layers,
)
from sac_search.records import FailureKind, Outcome
from sac_search.space import Granularity, build_space, unsavable_ops
from sac_search.worker.__main__ import _Server
from sac_search.worker.protocol import METHODS, Comparison, Reply, Request
from sac_search.worker.session import (
    Description,
    Session,
    SessionSettings,
    open_session,
    set_threads,
)
from sac_search.workload import Workload

CPU = torch.device("cpu")
FULL = checkpoint_layers(["blocks.0", "blocks.1"])
Loss = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, which are slow, as the worker does."""
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(1)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def count_checkpointed(model: nn.Module) -> int:
    return sum("_sac_layer_class" in type(block).__dict__ for block in model.blocks)


def session_of(
    loss_fn: Loss = mean_square, model: nn.Module | None = None, **fields: Any
) -> Session:
    model = model or tiny.stack(2)
    workload = Workload(model, loss_fn, tiny.tokens(), **fields)
    return Session(workload, SessionSettings(spec="here", steps=2), CPU, "hash")


class FailsWithout:
    """A loss that raises, from some step on, when a certain number of layers is checkpointed."""

    def __init__(self, error: BaseException | None, checkpointed: int) -> None:
        self.error = error
        self.checkpointed = checkpointed
        self.armed = False

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        if self.armed and count_checkpointed(model) == self.checkpointed:
            if self.error is None:
                return loss * float("nan")
            raise self.error
        return loss


# --- loading --------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SessionSettings]:
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(body: str, **fields: Any) -> SessionSettings:
        path = tmp_path / "sac_test_train.py"
        head = """
        import tiny, torch
        from sac_search import Workload

        def build(model=None, device=None, **fields):
            model = (model or tiny.stack(2)).to(device)
            loss_fn = lambda m, x: m(x).square().mean()
            return Workload(model, loss_fn, tiny.tokens().to(device), **fields)
        """
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return SessionSettings(spec=str(path), **fields)

    return write


def test_a_session_is_opened_from_a_file(write: Callable[..., SessionSettings]) -> None:
    settings = write(
        """
        def workload(device, batch_size=None):
            return build(device=device, batch_size=batch_size, sequence_length=4)
        """,
        device="cpu",
        batch_size=2,
    )
    session = open_session(settings)
    environment = session.environment()
    assert (environment.device, environment.clock, environment.threads) == ("cpu", "cpu", 1)
    assert (environment.batch_size, environment.sequence_length) == (2, 4)
    assert environment.dtype == "float32"
    assert environment.compile_settings == "eager"
    assert environment.torch_version == torch.__version__
    assert environment.workload == settings.spec
    assert len(environment.workload_source_hash) == 64
    assert environment.parameter_count == sum(p.numel() for p in tiny.stack(2).parameters())
    assert session.measure(NO_CHECKPOINTING).measurement is not None


def test_a_factory_that_takes_no_device_chooses_it(write: Callable[..., SessionSettings]) -> None:
    assert open_session(write("def workload(): return build()")).environment().device == "cpu"


def test_a_factory_that_takes_one_needs_it_named_without_an_accelerator(
    write: Callable[..., SessionSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = lambda check_available=False: None  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    with pytest.raises(UsageError, match="add --device cpu"):
        open_session(write("def workload(device): raise AssertionError"))
    with pytest.raises(UsageError, match="--device cuda: torch can use the CPU only"):
        open_session(write("def workload(): raise AssertionError", device="cuda"))


def test_a_model_on_another_device_is_refused(write: Callable[..., SessionSettings]) -> None:
    settings = write("def workload(device): return build(device='meta')", device="cpu")
    with pytest.raises(WorkloadError, match=r"blocks.0.norm.weight is on meta, but .* on cpu"):
        open_session(settings)


def test_layers_of_the_settings_come_before_those_of_the_workload(
    write: Callable[..., SessionSettings],
) -> None:
    body = "def workload(): return build(layers='blocks.0')"
    assert names(open_session(write(body))) == ["blocks.0"]
    assert names(open_session(write(body, layers="blocks.1"))) == ["blocks.1"]
    with pytest.raises(WorkloadError, match=r"no module of the model matches .*'h\.0'"):
        open_session(write(body, layers="h.0"))


def names(session: Session) -> list[str]:
    return [layer.name for layer in session.describe().layers]


@pytest.mark.parametrize(
    ("clock", "threads", "expected"),
    [
        (None, None, 1),
        (Clock.CPU, None, 1),
        (Clock.CPU, 3, 3),
        (Clock.WALL, None, 2),
        (Clock.WALL, 3, 3),
    ],
)
def test_processor_time_means_one_thread(
    clock: Clock | None, threads: int | None, expected: int
) -> None:
    torch.set_num_threads(2)
    set_threads(SessionSettings(spec="x", clock=clock, threads=threads), CPU)
    assert torch.get_num_threads() == expected


# --- a workload that fails ------------------------------------------------------------------------


def test_a_forward_pass_that_fails_is_shown_with_the_users_lines() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x[:, :, :1])

    with pytest.raises(WorkloadError, match="a forward pass without gradients fails") as raised:
        session_of(loss_fn)
    assert "return model(x[:, :, :1])" in raised.value.user_traceback
    assert "sac_search" not in raised.value.user_traceback.splitlines()[1]


def test_a_step_that_fails_with_and_without_checkpointing() -> None:
    def step(workload: Workload) -> Tensor:
        workload.run_loss().backward()
        raise ValueError("as it happens")

    with pytest.raises(
        WorkloadError, match="a training step without checkpointing fails"
    ) as raised:
        session_of(step=step)
    assert "ValueError: as it happens" in str(raised.value)
    assert 'raise ValueError("as it happens")' in raised.value.user_traceback


def test_a_step_that_fails_with_checkpointing_only() -> None:
    loss_fn = FailsWithout(ValueError("as it happens"), checkpointed=2)
    loss_fn.armed = True
    with pytest.raises(WorkloadError, match="runs without checkpointing, but not with its layers"):
        session_of(loss_fn)


def test_a_loss_that_is_none_is_said_as_it_is() -> None:
    with pytest.raises(WorkloadError, match=r"^the loss has shape"):
        session_of(lambda model, x: model(x))


def test_a_model_that_checkpoints_already_is_refused() -> None:
    model = tiny.stack(2)
    model.blocks[1].gradient_checkpointing = True
    with pytest.raises(WorkloadError, match=r"the model checkpoints blocks\.1 already"):
        session_of(model=model)


# --- what it does ---------------------------------------------------------------------------------


def test_a_description_is_whole_after_the_way_to_the_parent() -> None:
    description = session_of().describe()
    assert description.reference == "full"
    assert [layer.name for layer in description.layers] == ["blocks.0", "blocks.1"]
    assert description.notes == ()
    assert records.decode(records.encode(description), Description) == description


def test_a_crowded_accelerator_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    session.describe()
    session._device = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "device_memory", lambda device: (2 * 2**30, 10 * 2**30))
    assert "Other processes use 7.0 GiB" in session._notes(3 * 2**30)[0]
    assert session._notes(9.5 * 2**30) == []


def test_what_a_process_can_use_is_what_is_free_and_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "device_memory", lambda device: (2 * 2**30, 10 * 2**30))
    memory = torch.accelerator.memory
    monkeypatch.setattr(memory, "memory_reserved", lambda device: 3 * 2**30, raising=False)
    assert devices.usable_bytes(torch.device("cuda", 0), 2**30) == 5 * 2**30
    assert devices.usable_bytes(torch.device("cpu"), 2**30) == 3 * 2**30


def test_measurements_and_comparisons() -> None:
    session = session_of(optimizer=None)
    measurement = session.measure(FULL).measurement
    assert measurement is not None
    assert measurement.steps == 2
    outcomes = session.compare([FULL, NO_CHECKPOINTING], 3)
    assert [o.measurement.steps for o in outcomes if o.measurement] == [3, 3]


def peaks_with(batch: Any) -> set[int]:
    """Returns the peaks that some measurements of one policy gave."""
    workload = Workload(tiny.stack(), mean_square, batch)
    session = Session(workload, SessionSettings(spec="here", steps=1), CPU)
    notes = session.describe().notes
    assert any("differ in size" in note for note in notes) == callable(batch)
    verification = session.verify(FULL).verification
    assert verification is not None and verification.bitwise
    outcomes = [session.measure(FULL) for _ in range(3)]
    return {o.measurement.allocated_bytes for o in outcomes if o.measurement is not None}


def test_every_step_runs_on_the_largest_of_unlike_batches() -> None:
    lengths = itertools.cycle((4, 64, 16))
    found = peaks_with(lambda: tiny.tokens(2, next(lengths), tiny.HIDDEN))
    gc.collect()
    (expected,) = peaks_with(tiny.tokens(2, 64, tiny.HIDDEN))
    # The batch that every step gets a copy of stays beside it.
    assert found == {expected + 2 * 64 * tiny.HIDDEN * 4}


def test_a_verification_is_against_no_checkpointing() -> None:
    verification = session_of().verify(FULL).verification
    assert verification is not None
    assert (verification.reference, verification.bitwise) == ("none", True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_a_verification_is_against_full_checkpointing_when_no_other_fits(error: Exception) -> None:
    loss_fn = FailsWithout(error, checkpointed=0)
    session = session_of(loss_fn)
    loss_fn.armed = True
    verification = session.verify(checkpoint_layers(["blocks.0"])).verification
    assert verification is not None
    assert (verification.reference, verification.bitwise) == ("full", True)


def test_a_verification_that_fits_under_no_reference_is_a_failure() -> None:
    loss_fn = FailsWithout(torch.OutOfMemoryError("CUDA out of memory."), checkpointed=1)
    session = session_of(loss_fn)
    loss_fn.armed = True
    failure = session.verify(checkpoint_layers(["blocks.0"])).failure
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY


def test_a_verification_that_fails_for_another_reason_is_not_tried_again() -> None:
    loss_fn = FailsWithout(ValueError("as it happens"), checkpointed=0)
    session = session_of(loss_fn)
    loss_fn.armed = True
    failure = session.verify(FULL).failure
    assert failure is not None
    assert failure.kind is FailureKind.USER_ERROR
    assert all(p.grad is None for p in session._workload.parameters())


def request_of(session: Session) -> ProfileRequest:
    return ProfileRequest(layers=session.describe().layers, granularity=Granularity.SITE)


def test_a_profile_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    request = request_of(session)

    def broken(self: Forecaster, request: ProfileRequest) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Forecaster, "profile", broken)
    assert session.profile(request) is None


def test_a_timeline_is_that_of_the_forecast() -> None:
    session = session_of()
    session.describe()
    for policy in (NO_CHECKPOINTING, FULL):
        timeline = session.timeline(policy)
        assert timeline is not None
        assert timeline.peak_bytes == session.forecast(policy).peak_bytes
        assert "blocks.1" in timeline.layers
    assert session.timeline(COMPILE_ALONE) is None
    assert session.is_healthy()


@pytest.mark.skipif(tiny.RELEASE < (2, 12), reason="with torch 2.9 it has no forecast")
def test_a_timeline_of_a_step_that_runs_for_real_is_that_of_the_forecast() -> None:
    session = routed_session()
    full = checkpoint_layers(["0", "1", "2"])
    session.describe()
    timeline = session.timeline(full)
    assert timeline is not None
    assert timeline.peak_bytes == session.forecast(full).peak_bytes


def test_a_timeline_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    session.describe()

    def broken(self: Forecaster, policy: Policy) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Forecaster, "timeline", broken)
    assert session.timeline(FULL) is None


class Routed(nn.Module):
    """Runs half of its rows, whichever they are, so that shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach().sum(-1).flatten() > 0).nonzero().squeeze(-1)
        flat = x.flatten(0, -2)
        inner = self.down(torch.relu(self.up(flat[rows])))
        return x + torch.zeros_like(flat).index_add(0, rows, inner).view_as(x)


def routed_session(loss_fn: Loss | None = None) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(*(Routed() for _ in range(3)))

    def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    workload = Workload(
        model, loss_fn or square, torch.randn(32, 8, 16), torch.optim.SGD(model.parameters(), 0.0)
    )
    return Session(workload, SessionSettings(spec="here", steps=2), CPU, "hash")


@pytest.mark.skipif(tiny.RELEASE < (2, 12), reason="with torch 2.9 it has no forecast")
def test_a_step_that_fake_tensors_cannot_run_is_forecast_by_running_it() -> None:
    session = routed_session()
    (note,) = session.describe().notes
    assert "counted while its step runs" in note
    assert "nonzero" in note
    for policy in (NO_CHECKPOINTING, checkpoint_layers(["0", "1", "2"])):
        outcome = session.measure(policy)
        assert outcome.measurement is not None
        measured_bytes = outcome.measurement.allocated_bytes
        assert outcome.forecast_peak_bytes == pytest.approx(measured_bytes, rel=0.002)


def test_a_step_whose_ops_are_stricter_with_fake_tensors_is_forecast_by_running_it() -> None:
    def strict(model: nn.Module, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise RuntimeError("Expected inputs of BF16\nand so on")
        return mean_square(model, x)

    session = session_of(strict)
    (note,) = session.describe().notes
    assert "under fake tensors it raises RuntimeError: Expected inputs of BF16)" in note
    outcome = session.measure(FULL)
    assert outcome.measurement is not None
    assert outcome.forecast_peak_bytes == outcome.measurement.allocated_bytes


@pytest.mark.skipif(tiny.RELEASE < (2, 12), reason="with torch 2.9 it has no forecast")
def test_a_step_that_does_not_fit_plain_is_profiled_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = routed_session()
    whole = session.profile(request_of(session))
    assert whole is not None
    # Layers that route their rows differently are of one kind all the same.
    assert len(whole.kinds) == 1

    def track(workload: Workload, policy: Policy, **settings: Any) -> Forecast:
        if not policy.layers:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return track_step(workload, policy, **settings)

    monkeypatch.setattr("sac_search.forecaster.track_step", track)
    small = routed_session()
    problem = small.forecast(NO_CHECKPOINTING)
    assert problem.peak_bytes is None
    assert problem.problem.startswith("out of memory")
    profile = small.profile(request_of(small))
    assert profile is not None
    assert len(profile.most_kept.left_alone) == len(profile.kinds)
    assert whole.most_kept.left_alone == profile.layers
    for found, expected in zip(profile.kinds, whole.kinds, strict=True):
        assert found.alone_bytes == expected.alone_bytes > found.plain_bytes
        assert found.plain_bytes == expected.plain_bytes


MODULE = """
LAYERS = {}
META = {}

def apply(model):
    model.blocks[0].register_forward_hook(lambda module, args, output: output * SCALE)

def remove(model):
    model.blocks[0]._forward_hooks.clear()
"""


def test_an_exported_module_is_applied_by_its_own_code(tmp_path: Path) -> None:
    session = session_of()
    path = tmp_path / "policy.py"
    for scale, right in (("1.0", True), ("1.5", False)):
        path.write_text(f"{MODULE}\nSCALE = {scale}")
        verification = session.verify_module(str(path)).verification
        assert verification is not None
        assert verification.passed is right
        assert session.measure_module(str(path)).measurement is not None
    with pytest.raises(UsageError, match="there is no policy file"):
        session.verify_module(str(tmp_path / "missing.py"))


# --- health ---------------------------------------------------------------------------------------


def test_a_session_is_healthy_until_something_keeps_memory() -> None:
    session = session_of()
    session.measure(FULL)
    session.verify(FULL)
    assert session.is_healthy()
    leak = torch.ones(5 * 2**20)  # 20 MiB
    assert not session.is_healthy()
    del leak
    assert session.is_healthy()


@pytest.mark.parametrize(
    "ask",
    [
        lambda session: session.measure(FULL),
        lambda session: session.compare([NO_CHECKPOINTING, FULL], 1),
        lambda session: session.verify(FULL),
    ],
)
def test_a_session_whose_loss_diverged_is_not_healthy(ask: Callable[[Session], Any]) -> None:
    loss_fn = FailsWithout(None, checkpointed=2)
    session = session_of(loss_fn)
    loss_fn.armed = True
    ask(session)
    loss_fn.armed = False
    assert not session.is_healthy()


def test_a_session_whose_device_is_broken_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    loss_fn = FailsWithout(RuntimeError("CUDA error: device-side assert"), checkpointed=2)
    session = session_of(loss_fn)
    loss_fn.armed = True
    monkeypatch.setattr(devices, "free_cached_memory", broken)
    monkeypatch.setattr(measure, "free_cached_memory", broken)
    assert session.measure(FULL).failure is not None
    failure = session.verify(FULL).failure
    assert failure is not None
    assert "CUDA error: device-side assert" in failure.message
    assert not session.is_healthy()


# --- the server -----------------------------------------------------------------------------------


def ask(server: _Server, method: str, argument: Any, number: int = 1) -> Reply:
    request = Request(number=number, method=method, argument=msgspec.Raw(records.encode(argument)))
    # The way through the pipe and back.
    request = msgspec.json.decode(records.encode(request), type=Request)
    return msgspec.json.decode(records.encode(server.answer(request)), type=Reply)


def test_the_server_answers(write: Callable[..., SessionSettings]) -> None:
    server = _Server()
    settings = write("def workload(): return build()", steps=1)
    assert msgspec.json.decode(ask(server, "load", settings, 7).result) is True
    reply = ask(server, "run_steps", FULL, 8)
    assert (reply.number, reply.error, reply.healthy) == (8, None, True)
    outcome = msgspec.json.decode(reply.result, type=Outcome)
    assert outcome.measurement is not None
    comparison = Comparison(policies=(FULL, NO_CHECKPOINTING), steps=1)
    reply = ask(server, "compare", comparison)
    assert len(msgspec.json.decode(reply.result, type=METHODS["compare"].result_type)) == 2


def test_errors_of_ours_cross_the_pipe(write: Callable[..., SessionSettings]) -> None:
    server = _Server()
    error = ask(server, "load", SessionSettings(spec="missing.py")).error
    assert error is not None
    assert error.type_name == WorkloadNotFound.__name__
    assert "there is no file 'missing.py'" in error.message
    error = ask(server, "load", write("def workload(): raise ValueError('no')")).error
    assert error is not None
    assert error.type_name == "WorkloadError"
    assert "in workload" in error.user_traceback
    error = ask(server, "run_steps", FULL).error
    assert error is not None
    assert error.type_name == "WorkerError"


def test_errors_that_nobody_thought_of_replace_the_worker(
    write: Callable[..., SessionSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _Server()
    ask(server, "load", write("def workload(): return build()"))

    def broken(session: Session, policy: Any) -> Outcome:
        raise KeyError("nobody thought of it")

    monkeypatch.setattr(Session, "run_steps", broken)
    reply = ask(server, "run_steps", FULL)
    assert reply.error is not None
    assert reply.error.type_name == "WorkerError"
    assert "the worker failed in run_steps: KeyError: 'nobody thought of it'" in reply.error.message
    assert not reply.healthy


def test_a_session_that_is_not_healthy_says_so(write: Callable[..., SessionSettings]) -> None:
    server = _Server()
    ask(server, "load", write("def workload(): return build()"))
    leak = torch.ones(5 * 2**20)
    assert not ask(server, "run_steps", FULL).healthy
    del leak


# --- compiling ------------------------------------------------------------------------------------

EAGER_BACKEND = CompileOptions(backend="aot_eager")


def compiling_session(model: nn.Module | None = None) -> Session:
    workload = Workload(model or tiny.stack(2), mean_square, tiny.tokens())
    settings = SessionSettings(spec="here", steps=2, compile=EAGER_BACKEND)
    return Session(workload, settings, CPU, "hash")


def test_what_is_compiled_belongs_to_the_environment() -> None:
    assert session_of().environment().compile_settings == "eager"
    searched = compiling_session().environment().compile_settings
    assert searched == "searched, with aot_eager"


def test_compiled_policies_have_no_forecast_and_a_reference_of_their_own() -> None:
    session = compiling_session()
    session.describe()

    outcome = session.measure(COMPILE_ALONE)
    verdict = session.verify(dataclasses.replace(FULL, compiled=Compiled()))

    assert outcome.measurement is not None and outcome.forecast_peak_bytes is None
    assert session.forecast(COMPILE_ALONE).peak_bytes is None
    assert verdict.verification is not None
    assert (verdict.verification.passed, verdict.verification.reference) == (True, "compile")
    full = session.verify_with_full(COMPILE_ALONE).verification
    assert full is not None and full.reference == "compile, full"
    assert session.is_healthy()
    torch._dynamo.reset()


def test_a_workload_that_compiles_itself_is_not_compiled_once_more() -> None:
    for part in ("", "blocks.0", "blocks.1.up"):
        model = tiny.stack(2)
        model.get_submodule(part).compile(backend="eager")
        with pytest.raises(WorkloadError, match="search without --compile"):
            compiling_session(model)
    model = tiny.stack(2)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(WorkloadError, match="search without --compile"):
        compiling_session(model)
    torch._dynamo.reset()


# torch 2.14 looks at the gradient of what is no leaf while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_of_layers_that_hold_compiled_code_all_or_nothing_is_recomputed() -> None:
    model = tiny.stack(2)
    for block in model.blocks:
        block.up.compile(backend="eager")
    description = session_of(model=model).describe()

    assert description.environment.compile_settings == "compiled by the workload"
    assert any("2 of the layers, blocks.0 first, hold code" in note for note in description.notes)
    space = build_space(description.layers)
    assert space.saves == ()
    assert set(unsavable_ops(description.layers).values()) == {
        "runs inside compiled code, where no policy sees it"
    }
    torch._dynamo.reset()
