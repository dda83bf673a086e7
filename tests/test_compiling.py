"""Compiled policies: what is compiled, what is left of it, and what torch's memory budget does.

On the backend `aot_eager`, which partitions graphs as inductor does and compiles in no time.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from functorch.compile import make_boxed_func
from scripted import Listener
from tiny import HIDDEN, MM
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from sac_search.api import search
from sac_search.apply import applied, apply_policy, load_policy_module
from sac_search.compiling import CompileOptions, Compiler, CompilesNothing, is_compiled
from sac_search.device import Clock
from sac_search.errors import UsageError
from sac_search.measure import StepMeter
from sac_search.policy import (
    COMPILE_ALONE,
    NO_CHECKPOINTING,
    Compiled,
    Policy,
    Tier,
    checkpoint_layers,
)
from sac_search.records import FailureKind, Phase, Verification
from sac_search.study import search as search_module
from sac_search.verify import verify_policy
from sac_search.workload import Workload

traces_policies = pytest.mark.skipif(
    tiny.RELEASE < (2, 12), reason="dynamo of torch 2.9 takes no object in a policy function"
)

CPU = torch.device("cpu")
EAGER = CompileOptions(backend="aot_eager")
LAYERS = ["blocks.0", "blocks.1", "blocks.2"]
FULL = checkpoint_layers(LAYERS)
SAVE_MM = checkpoint_layers(LAYERS, Tier(ops=(MM,)))
TOKENS = tiny.tokens(4, 64, HIDDEN)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Leaves what torch and pytest made out of collections, and torch's caches as they were."""
    torch.set_num_threads(1)
    traces = logging.getLogger("torch.__trace")  # pytest would keep all that it says
    level = traces.level
    traces.setLevel(logging.WARNING)
    gc.freeze()
    yield
    gc.unfreeze()
    traces.setLevel(level)
    torch._dynamo.reset()


Register = Callable[[Callable[..., Any]], str]


@pytest.fixture
def register() -> Iterator[Register]:
    """Makes a function a backend of torch's, by a name, as long as the test runs."""
    registry = torch._dynamo.backends.registry
    known = registry._COMPILER_FNS
    names = [f"of_tests_{number}" for number in range(20)]

    def register(backend: Callable[..., Any]) -> str:
        name = next(name for name in names if name not in known)
        torch._dynamo.register_backend(backend, name=name)  # type: ignore[arg-type]
        return name

    yield register
    for name in names:
        known.pop(name, None)
        registry._BACKENDS.pop(name, None)


def compiled(policy: Policy, **fields: Any) -> Policy:
    return dataclasses.replace(policy, compiled=Compiled(**fields))


def budget(memory_budget: float) -> Policy:
    return Policy(compiled=Compiled(memory_budget=memory_budget))


def workload(model: nn.Module | None = None, batch: Any = TOKENS) -> Workload:
    model = model or tiny.stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Workload(model, lambda model, x: model(x).square().mean(), batch, optimizer)


def meter_of(work: Workload, steps: int = 3, options: CompileOptions = EAGER) -> StepMeter:
    compiler = Compiler(work.model, options)
    return StepMeter(workload=work, device=CPU, clock=Clock.CPU, steps=steps, compiler=compiler)


def cached_graphs() -> int:
    """Returns how many graphs dynamo holds for a stack's forward."""
    return len(_debug_get_cache_entry_list(tiny.Stack.forward.__code__))


# --- putting it on and taking it off --------------------------------------------------------------


@traces_policies
def test_a_policy_that_comes_back_is_found_compiled() -> None:
    model = tiny.stack(3)
    compiler = Compiler(model, EAGER)
    policies = [COMPILE_ALONE, compiled(SAVE_MM), compiled(FULL), budget(0.5)]

    def run(policy: Policy) -> None:
        with compiler.applied(policy):
            tiny.loss_of(model(tiny.tokens())).backward()

    for _ in range(3):
        for policy in policies:
            run(policy)
            tiny.loss_of(model(tiny.tokens())).backward()  # eager, in between

    assert compiler.graphs == len(policies)


@traces_policies
def test_nothing_is_left_on_the_model_in_the_config_or_in_the_caches() -> None:
    model = tiny.stack(3)
    compiler = Compiler(model, EAGER)
    attributes, classes = dict(vars(model)), [type(module) for module in model.modules()]
    configs = [functorch_config, torch._dynamo.config]
    before = [config.get_config_copy() for config in configs]
    policies = [
        compiled(SAVE_MM),
        budget(0.25),
        Policy(compiled=Compiled(memory_budget=0.25, solver="greedy")),
    ]

    for policy in policies:
        with compiler.applied(policy):
            assert is_compiled(model)
            assert policy.compiled.settings.items() <= functorch_config.get_config_copy().items()
            model(tiny.tokens())
        assert dict(vars(model)) == attributes
        assert [type(module) for module in model.modules()] == classes
        assert [config.get_config_copy() for config in configs] == before
    assert cached_graphs() == 3

    compiler.forget()

    assert cached_graphs() == 0


def test_a_call_that_the_model_had_before_is_put_back() -> None:
    model = tiny.stack(1)
    model.compile(backend="eager")
    call = model._compiled_call_impl
    with Compiler(model, EAGER).applied(COMPILE_ALONE):
        model(tiny.tokens())
    assert model._compiled_call_impl is call


def test_budgets_do_not_share_what_was_compiled() -> None:
    work = workload()
    peaks = [o.measurement.peak_bytes for o in compare(work, [budget(1), budget(0.5)])]
    assert peaks[1] < 0.8 * peaks[0]
    # The other way around: the second is no more found in the first one's place.
    assert (
        peaks == [o.measurement.peak_bytes for o in compare(work, [budget(0.5), budget(1)])][::-1]
    )


def compare(work: Workload, policies: list[Policy]) -> list[Any]:
    return meter_of(work).compare(policies, FULL, steps=2)


def test_an_eager_policy_runs_eagerly() -> None:
    model = tiny.stack(3)
    compiler = Compiler(model, EAGER)
    with compiler.applied(SAVE_MM):
        model(tiny.tokens())
    assert compiler.graphs == 0


def test_a_compiled_policy_is_never_run_eagerly_by_mistake() -> None:
    model = tiny.stack(3)
    with pytest.raises(UsageError, match="for a compiled model"):
        apply_policy(model, compiled(SAVE_MM))
    with pytest.raises(UsageError, match="for a compiled model"), applied(model, COMPILE_ALONE):
        pass


def test_a_model_that_is_never_called_is_told() -> None:
    model = tiny.stack(1)
    with (
        pytest.raises(RuntimeError, match="never calls the model"),
        Compiler(model, EAGER).applied(COMPILE_ALONE),
    ):
        model.forward(tiny.tokens())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CompileOptions(backend="no_such"), "takes no no_such"),
        (CompileOptions(mode="fastest"), "takes no inductor, fastest"),
        (CompileOptions(backend="aot_eager", mode="max-autotune"), "has no modes"),
    ],
)
def test_what_torch_does_not_take_is_told(options: CompileOptions, message: str) -> None:
    with (
        pytest.raises(UsageError, match=message),
        Compiler(tiny.stack(1), options).applied(COMPILE_ALONE),
    ):
        pass


def test_options_say_what_they_are() -> None:
    assert CompileOptions().describe() == "inductor"
    assert CompileOptions().arguments() == {"backend": "inductor"}
    options = CompileOptions(mode="max-autotune", dynamic=True)
    assert options.describe() == "inductor, max-autotune, dynamic shapes"
    assert options.arguments() == {"backend": "inductor", "mode": "max-autotune", "dynamic": True}
    assert CompileOptions(dynamic=False).describe() == "inductor, static shapes"


# --- measuring ------------------------------------------------------------------------------------


def test_compiling_is_told_apart_and_phases_are_marked() -> None:
    work = workload()
    eager, found = compare(work, [NO_CHECKPOINTING, COMPILE_ALONE])

    assert eager.measurement.compile_seconds is None
    assert found.measurement.compile_seconds > 20 * found.measurement.step_seconds
    assert found.measurement.recompiles == ()
    # aot_eager runs the same ops, so memory is that of the eager step, phase by phase.
    assert found.measurement.phase_peak_bytes == eager.measurement.phase_peak_bytes
    assert found.measurement.loss == pytest.approx(eager.measurement.loss, rel=1e-2)
    assert cached_graphs() == 0


def test_a_step_that_compiles_is_named_and_never_counted() -> None:
    sizes = iter([64] * 6 + [32] * 100)
    lengths: list[int] = []

    def batch() -> Tensor:
        lengths.append(next(sizes))
        return tiny.tokens(4, lengths[-1], HIDDEN)

    (found,) = meter_of(workload(batch=batch)).compare([COMPILE_ALONE], FULL, steps=2)

    (reason,) = found.measurement.recompiles
    assert "size mismatch" in reason or "dynamic" in reason
    # Two to warm up, two for the peak, then two timed steps, each beside one of the reference, and
    # the one that was run again.
    assert len(lengths) == 9
    assert found.measurement.steps == 2


def test_a_step_that_always_compiles_fails_with_the_reason() -> None:
    sizes = iter(range(4, 200))
    work = workload(batch=lambda: tiny.tokens(2, next(sizes), HIDDEN))
    options = CompileOptions(backend="aot_eager", dynamic=False)

    (found,) = meter_of(work, options=options).compare([COMPILE_ALONE], FULL, steps=2)

    assert found.failure.kind is FailureKind.USER_ERROR
    assert "every step compiles something anew" in found.failure.message
    assert cached_graphs() == 0


def test_what_cannot_be_compiled_fails_and_leaves_nothing(register: Register) -> None:
    def refuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("not this one")

    work = workload()
    meter = meter_of(work, options=CompileOptions(backend=register(refuse)))
    found, eager = meter.compare([COMPILE_ALONE, NO_CHECKPOINTING], FULL, steps=2)

    assert found.failure.kind is FailureKind.USER_ERROR
    assert "not this one" in found.failure.message
    assert eager.measurement is not None
    assert not is_compiled(work.model)
    assert cached_graphs() == 0


def test_what_torch_leaves_to_eager_code_is_not_taken_for_compiled() -> None:
    class Skipped(tiny.Stack):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    work = workload(Skipped(tiny.Block()))
    (found,) = meter_of(work).compare([COMPILE_ALONE], NO_CHECKPOINTING, steps=2)
    assert "torch.compile compiles nothing" in found.failure.message


# --- the ends of torch's memory budget ------------------------------------------------------------


class Graphs:
    """A backend that writes down what it is given to run, after partitioning."""

    def __init__(self, register: Register) -> None:
        self.backward: list[Counter[str]] = []
        self._register = register

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(
            fw_compiler=lambda g, _: make_boxed_func(g.forward),
            bw_compiler=self._note,
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)

    def _note(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.backward.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def matmuls(self, policy: Policy | None) -> int:
        """Returns how many matmuls the backward pass has; by compile's own default for None."""
        model = tiny.stack(3)
        if policy is None:
            tiny.loss_of(torch.compile(model, backend=self)(TOKENS)).backward()
            return self.backward[-1][MM]
        compiler = Compiler(model, CompileOptions(backend=self._register(self)))
        with compiler.applied(policy):
            tiny.loss_of(model(TOKENS)).backward()
        compiler.forget()
        return self.backward[-1][MM]


@pytest.fixture
def graphs(register: Register) -> Graphs:
    return Graphs(register)


def test_a_budget_of_one_is_compiles_default(graphs: Graphs) -> None:
    assert graphs.matmuls(budget(1)) == graphs.matmuls(None)
    assert graphs.backward[0] == graphs.backward[1]


def test_a_budget_of_zero_recomputes_what_checkpointing_does(graphs: Graphs) -> None:
    least, most = graphs.matmuls(budget(1)), graphs.matmuls(budget(0))
    plain = graphs.matmuls(compiled(FULL))
    # Of each block four matmuls, of which the last of all is needed by no gradient.
    assert most - least >= plain - least > 0


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="what 2.13 does (pytorch issue 197838)"
)
def test_a_budget_of_zero_does_not_have_the_peak_of_checkpointing() -> None:
    none, half, zero, full = (
        outcome.measurement
        for outcome in compare(workload(), [budget(1), budget(0.5), budget(0), compiled(FULL)])
    )
    # Up to the loss next to nothing is kept; then backward makes all of it again at once.
    assert zero.phase_peak_bytes[Phase.LOSS] < full.phase_peak_bytes[Phase.LOSS]
    assert full.peak_bytes < half.peak_bytes < zero.peak_bytes
    assert zero.peak_bytes > 0.9 * none.peak_bytes


@traces_policies
def test_what_a_tier_saves_is_not_recomputed(graphs: Graphs) -> None:
    saved = graphs.matmuls(compiled(SAVE_MM))
    assert saved == graphs.matmuls(budget(1)) < graphs.matmuls(compiled(FULL))


def test_solvers_keep_different_things_under_one_budget(graphs: Graphs) -> None:
    def saved(solver: str) -> list[int]:
        work = workload(tiny.stack(4))
        policies = [Policy(compiled=Compiled(memory_budget=b, solver=solver)) for b in (0.3, 0.2)]
        return [outcome.measurement.peak_bytes for outcome in compare(work, policies)]

    assert len({tuple(saved(solver)) for solver in ("dp", "greedy", "ilp")}) > 1


def test_a_setting_that_torch_does_not_have_fails_with_its_words() -> None:
    unknown = Policy(compiled=Compiled(memory_budget=0.2, solver="magic"))
    [outcome] = compare(workload(), [unknown])
    assert outcome.failure is not None and "magic" in outcome.failure.message


# --- verification ---------------------------------------------------------------------------------


def verify(policy: Policy, dropout: float = 0.0, reference: Policy = COMPILE_ALONE) -> Verification:
    work = workload(tiny.stack(3, dropout))
    compiler = Compiler(work.model, EAGER)
    return verify_policy(work, policy, reference, "compile", CPU, compiler=compiler)


@pytest.mark.parametrize(
    "policy",
    [
        compiled(FULL),
        pytest.param(compiled(SAVE_MM), marks=traces_policies),
        pytest.param(compiled(SAVE_MM, prefer=True), marks=traces_policies),
        budget(0.5),
    ],
)
def test_right_gradients_pass_and_compile_is_held_against_eager(policy: Policy) -> None:
    found = verify(policy)
    assert found.passed
    assert found.note.startswith("Compiled code itself is within")
    assert cached_graphs() == 0


@traces_policies
def test_with_dropout_compile_is_not_held_against_eager() -> None:
    found = verify(compiled(SAVE_MM), dropout=0.1)
    assert found.passed
    assert "eager" not in found.note


def test_wrong_gradients_under_a_memory_budget_are_caught() -> None:
    # pytorch issues 190758 and 190717: dropout is drawn anew where it is recomputed.
    found = verify(budget(0.5), dropout=0.1)
    assert not found.passed
    assert found.worst_gradient_difference > 0.1


def test_compiled_code_that_is_wrong_does_not_pass() -> None:
    class Wrong(tiny.Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)

    work = workload(Wrong(tiny.Block(), tiny.Block()))
    compiler = Compiler(work.model, EAGER)
    found = verify_policy(work, budget(0.9), COMPILE_ALONE, "compile", CPU, compiler=compiler)
    assert not found.passed
    assert "Compiled code itself, with no policy on it, is off by" in found.note


def test_what_runs_eagerly_is_not_verified_as_compiled() -> None:
    class Left(tiny.Stack):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    work = workload(Left(tiny.Block()))
    compiler = Compiler(work.model, EAGER)
    with pytest.raises(CompilesNothing, match="compiles nothing of the model"):
        verify_policy(work, budget(0.5), COMPILE_ALONE, "compile", CPU, compiler=compiler)


# --- layers that hold compiled code ---------------------------------------------------------------


def test_ops_of_compiled_code_inside_a_layer_cannot_be_told_apart() -> None:
    model = tiny.stack(2)
    model.blocks[1].up.compile(backend="eager")
    model.blocks[1].down = torch.compile(model.blocks[1].down, backend="eager")
    apply_policy(model, checkpoint_layers(["blocks.0", "blocks.1"]))  # all of it: no op to tell
    model.blocks[0].__class__ = model.blocks[1].__class__ = tiny.Block
    with pytest.raises(UsageError, match=r"blocks\.1 holds compiled code \(up\)"):
        apply_policy(model, checkpoint_layers(["blocks.0", "blocks.1"], Tier(ops=(MM,))))
    assert type(model.blocks[0]) is tiny.Block


# --- the whole search -----------------------------------------------------------------------------


def test_a_search_catches_wrong_gradients_by_itself_and_takes_the_next_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "FIRST_BUDGETS", (50, 10))  # wrong, both of them
    work = workload(tiny.stack(3, 0.1))
    peaks = [o.measurement.peak_bytes for o in compare(work, [budget(0.5), budget(0.1)])]
    listener = Listener()

    result = search(
        work,
        budget_gb=1.1 * max(peaks) / 2**30,  # both fit, the parameters that are kept included
        compile="search",
        compile_backend="aot_eager",
        granularity="class",
        tiers=1,
        trials=0,  # beyond the baselines and the first plans and budgets
        steps=1,
        root=tmp_path,
        listener=listener,
    )

    (note,) = [note for note in listener.notes if "activation_memory_budget is wrong" in note]
    assert "wrong gradients" in note
    assert any(reason.startswith("memory budget") for reason in result.rejected)
    assert result.best is not None and result.verification is not None
    assert result.verification.passed
    compiled = result.best.policy.compiled
    assert compiled is None or compiled.memory_budget == 1.0
    assert cached_graphs() == 0 and not is_compiled(work.model)
    exported = load_policy_module(tmp_path / result.study_name / "policy.py")
    assert (exported.COMPILE is None) == (compiled is None)


@pytest.mark.slow
@traces_policies
def test_inductor_runs_what_was_found() -> None:
    work = workload(tiny.stack(2))
    policies = [COMPILE_ALONE, compiled(checkpoint_layers(LAYERS[:2], Tier(ops=(MM,))))]
    meter = meter_of(work, options=CompileOptions())

    alone, saving = meter.compare(policies, NO_CHECKPOINTING, steps=2)
    found = verify_policy(work, policies[1], COMPILE_ALONE, "compile", CPU, compiler=meter.compiler)

    assert alone.measurement is not None and saving.measurement is not None
    assert saving.measurement.peak_bytes < alone.measurement.peak_bytes
    assert found.passed
    assert "Compiled code itself is within" in found.note
    assert cached_graphs() == 0
