"""Runs a model compiled under policies, and leaves nothing of that behind.

A policy is put on the model as it is eagerly, by the classes of its layers; around that the model's
own call is compiled in place, so that the policy's functions run once, when the graph is made.

Two things that dynamo does decide the form of this. It finds a compiled graph again by the code,
its guards and the backend, and looks at no config, so two policies that differ in a config value
only would share one: each gets a backend object of its own. And it guards on the classes of
modules, so a policy that is put on again has to bring the very same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sac_search.apply import PolicyModule, applied, apply_layers, remove_policy
from sac_search.device import MarkedForward
from sac_search.errors import UsageError
from sac_search.policy import Compiled, Policy
from sac_search.policy_runtime import compiled_inside

# Beyond its own limits dynamo runs eagerly without a word; a search compiles the same code often.
_NO_LIMIT = 2**20
_CALL = "_compiled_call_impl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What holds for all compiled policies of a search: arguments of `torch.compile`."""

    backend: str = "inductor"
    """The name of a backend."""
    mode: str | None = None
    """The backend's mode, such as `max-autotune`; its default when None."""
    dynamic: bool | None = None
    """Whether sizes are symbols from the start; torch finds out by itself when None."""

    def describe(self) -> str:
        """Returns the options in a few words, as records have them: `inductor, max-autotune`."""
        sizes = {None: [], True: ["dynamic shapes"], False: ["static shapes"]}[self.dynamic]
        return ", ".join([self.backend, *([self.mode] if self.mode else []), *sizes])

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `torch.compile` that say this."""
        given = dataclasses.asdict(self).items()
        return {name: value for name, value in given if value is not None}


class CompilesNothing(Exception):
    """The model runs eagerly all the same."""


class Compiler:
    """Compiles one model in place under policies, each as long as `applied` lasts.

    What was compiled is found again when the same policy is applied again, until `forget`.

    Known limits: the model has to be called as `model(...)`; loss, optimizer and whatever else the
    step runs stay eager.
    """

    def __init__(self, model: torch.nn.Module, options: CompileOptions) -> None:
        self._model = model
        self._options = options
        self._forwards: dict[object, MarkedForward] = {}
        self.graphs = 0
        """How many graphs were compiled so far."""
        self.dtypes: set[torch.dtype] = set()
        """Floating-point formats that the compiled graphs compute in."""

    @contextlib.contextmanager
    def applied(self, policy: Policy | PolicyModule) -> Iterator[None]:
        """Applies a policy, or an exported module's, inside the block only; compiled if it says so.

        Raises:
            UsageError: the policy cannot be applied, or there is no such backend.
            RuntimeError: the step never called the model, so nothing was compiled.
        """
        compiled = compiled_by(policy)
        if compiled is None:
            with applied(self._model, policy):
                yield
            return
        forward = self._forward(policy)
        calls = forward.calls
        with (
            _layers_applied(self._model, policy),
            _called_through(self._model, forward),
            _config_patched(compiled),
        ):
            yield
        if forward.calls == calls:
            raise RuntimeError(
                f"the step never calls the model ({type(self._model).__name__}) itself, so nothing "
                "of it is compiled; in loss_fn or step, call model(...) and none of its methods"
            )

    def check_compiled_since(self, graphs: int) -> None:
        """Raises CompilesNothing if no graph was compiled since `graphs` was so many."""
        if self.graphs == graphs:
            raise CompilesNothing(
                "torch.compile compiles nothing of the model; TORCH_LOGS=graph_breaks says why"
            )

    def recompile_reason(self) -> str:
        """Returns why the last graph was compiled, as far as torch tells."""
        metrics = torch._dynamo.utils.get_compilation_metrics()
        reason = metrics[-1].recompile_reason if metrics else None
        return (reason or "another graph").partition("\n")[0]

    def forget(self) -> None:
        """Drops all that was compiled, here and in torch's caches of this process."""
        if self._forwards:
            self._forwards.clear()
            self.dtypes.clear()
            torch._dynamo.reset()

    def _forward(self, policy: Policy | PolicyModule) -> MarkedForward:
        key = policy.key if isinstance(policy, Policy) else policy
        if not self._forwards:
            # Code that dynamo gave up compiling before, for whatever reason, would run eagerly.
            torch._dynamo.reset()
        if key not in self._forwards:
            options = self._options
            if not isinstance(policy, Policy):
                options = CompileOptions(**(getattr(policy, "COMPILE", None) or {}))
            call = torch.compile(
                self._model._call_impl,
                backend=_Backend(_find_backend(options), self._note_graph),
                dynamic=options.dynamic,
            )
            self._forwards[key] = MarkedForward(call)
        return self._forwards[key]

    def _note_graph(self, graph: torch.fx.GraphModule) -> None:
        self.graphs += 1
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.dtypes.add(value.dtype)


def compiled_by(policy: Policy | PolicyModule) -> Compiled | None:
    """Returns how a policy, or an exported module's, is compiled; None if it is not."""
    if isinstance(policy, Policy):
        return policy.compiled
    if getattr(policy, "COMPILE", None) is None:
        return None
    return Compiled.of_settings(getattr(policy, "SETTINGS", {}))


def is_compiled(model: torch.nn.Module) -> bool:
    """Returns whether the model, or a part of it, is compiled by somebody already."""
    return vars(model).get(_CALL) is not None or compiled_inside(model) is not None


class _Backend:
    """One policy's backend: the real one, but equal to no other policy's."""

    def __init__(
        self, backend: Callable[..., Any], note_graph: Callable[[torch.fx.GraphModule], None]
    ) -> None:
        self._backend = backend
        self._note_graph = note_graph

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self._note_graph(graph)
        return self._backend(graph, inputs, **options)

    def reset(self) -> None:
        """Is called by `torch._dynamo.reset`."""
        if hasattr(self._backend, "reset"):
            self._backend.reset()


def _find_backend(options: CompileOptions) -> Callable[..., Any]:
    try:
        if options.backend == "inductor":
            found: Callable[..., Any] = torch._TorchCompileInductorWrapper(
                options.mode, None, options.dynamic
            )
            return found
        backend: Callable[..., Any] = torch._dynamo.lookup_backend(options.backend)
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise UsageError(f"torch.compile takes no {options.describe()}: {message}") from error
    if options.mode is not None:
        raise UsageError(f"the backend {options.backend} has no modes: leave {options.mode} out")
    return backend


@contextlib.contextmanager
def _layers_applied(model: torch.nn.Module, policy: Policy | PolicyModule) -> Iterator[None]:
    if isinstance(policy, Policy):
        apply_layers(model, policy)
    else:
        policy.apply(model, compile=False)  # type: ignore[call-arg]
    try:
        yield
    finally:
        if isinstance(policy, Policy):
            remove_policy(model)
        else:
            policy.remove(model)


@contextlib.contextmanager
def _called_through(model: torch.nn.Module, forward: MarkedForward) -> Iterator[None]:
    state = vars(model)
    before = {_CALL: state[_CALL]} if _CALL in state else {}
    state[_CALL] = forward
    try:
        yield
    finally:
        del state[_CALL]
        state.update(before)


@contextlib.contextmanager
def _config_patched(compiled: Compiled) -> Iterator[None]:
    # Both load a compiler's worth of modules.
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    with (
        functorch_config.patch(compiled.settings),
        dynamo_config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT),
    ):
        yield
