"""The workload: one training step that can be run again and again, and how a file becomes one.

User code is imported here, so only the worker process calls these functions.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sac_search import records
from sac_search.errors import UsageError, WorkloadError, WorkloadNotFound
from sac_search.ranks import unwrapped
from sac_search.recipe import parse_recipe

DEFAULT_FACTORY = "workload"
BUILTIN_SPEC = "sac_search.builtin:workload"
# Enough to meet a long one where lengths vary, and no long wait for a data loader.
_DRAWN_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step: what it trains, on what, and how."""

    model: torch.nn.Module
    """The model, on its device."""
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor]
    """`loss_fn(model, batch)` returns a scalar tensor."""
    batch: Any
    """One batch, or a callable that returns one; the largest counts where they differ in size."""
    optimizer: torch.optim.Optimizer | None = None
    """Stepped, and its gradients dropped, at the end of every step when given."""
    step: Callable[[Workload], torch.Tensor] | None = None
    """`step(workload)` runs the whole step and returns the loss; replaces the default step."""
    layers: Sequence[str] | str | None = None
    """FQN patterns of the layers that may be checkpointed; found by themselves when None."""
    batch_size: int | None = field(default=None, kw_only=True)
    """Samples in a step, for the records."""
    sequence_length: int | None = field(default=None, kw_only=True)
    """Tokens (or positions) in a sample, for the records."""
    notes: Sequence[str] = field(default=(), kw_only=True)
    """Sentences about it that the user should read."""

    @property
    def bare_model(self) -> torch.nn.Module:
        """The model without DistributedDataParallel around it, by whose names layers are known."""
        return unwrapped(self.model)

    def next_batch(self) -> Any:
        """Returns the batch, or the next one when `batch` is a callable."""
        return self.batch() if callable(self.batch) else self.batch

    def run_step(self) -> torch.Tensor:
        """Runs one whole training step and returns its loss, detached."""
        if self.step is not None:
            return _check_loss(self.step(self), "step(workload)", needs_grad=False).detach()
        loss = self.run_loss()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.drop_gradients()
        return loss.detach()

    def run_loss(self) -> torch.Tensor:
        """Runs the forward pass and the loss, and returns it ready for backward."""
        loss = self.loss_fn(self.model, self.next_batch())
        return _check_loss(loss, "loss_fn(model, batch)", needs_grad=torch.is_grad_enabled())

    def run_forward(self) -> None:
        """Runs a step up to where its first backward pass would begin.

        Under `torch.no_grad()` nothing is kept for that backward pass.
        """
        if self.step is None:
            self.run_loss()
            return
        plain_backward = torch.autograd.backward

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _BackwardBegins

        torch.autograd.backward = stop
        try:
            self.step(self)
        except _BackwardBegins:
            pass
        finally:
            torch.autograd.backward = plain_backward

    def drop_gradients(self) -> None:
        """Frees every gradient of the model and of the optimizer's parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the model's parameters and those that only the optimizer knows, each once."""
        found = {id(p): p for p in self.model.parameters()}
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                found.update((id(p), p) for p in group["params"])
        return list(found.values())


def with_largest_batch(workload: Workload) -> Workload:
    """Returns the workload with the largest of its next batches where these differ in size.

    A budget has to hold for that one, and only steps on batches of one size can be compared. Each
    step gets a copy, for it may take its batch apart.
    """
    if not callable(workload.batch):
        return workload
    largest: Any = None
    sizes: list[int] = []
    for _ in range(_DRAWN_BATCHES):
        try:
            batch = workload.batch()
        except Exception:
            break  # whoever asks for the next one will be told
        sizes.append(_tensor_bytes(batch))
        if sizes[-1] == max(sizes):
            largest = batch
    if len(set(sizes)) < 2:
        return workload
    note = (
        f"Batches differ in size: every step runs on the largest of the first {len(sizes)}, so "
        "that the budget holds for that one. Let a larger one be among them if there is any."
    )
    return replace(workload, batch=lambda: copied_batch(largest), notes=(*workload.notes, note))


def copied_batch(batch: Any) -> Any:
    """Returns a copy that a step may take apart, as in `labels = batch.pop("labels")`."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple, set)):
        return sum(map(_tensor_bytes, value))
    if is_dataclass(value):
        return sum(_tensor_bytes(getattr(value, entry.name)) for entry in fields(value))
    return 0


class _BackwardBegins(Exception):
    """Leaves a user's step where its backward pass begins."""


def _check_loss(loss: Any, source: str, *, needs_grad: bool) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(
            f"the loss is a {type(loss).__name__}, not a tensor; "
            f"return the scalar loss tensor from {source}"
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"the loss has shape {list(loss.shape)}, but must be one number; "
            "reduce it, for example with .mean()"
        )
    if needs_grad and not loss.requires_grad:
        raise WorkloadError(
            "the loss does not require grad, so there is no backward pass to save memory in; "
            "is the forward under torch.no_grad(), or the loss detached?"
        )
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """A workload factory that was found, and where."""

    function: Callable[..., Any]
    """The user's function."""
    name: str
    """`train.py:workload`, as a person would type it."""
    path: Path | None = None
    """The file that holds it; None for one that was never in a file."""
    folder: Path | None = None
    """The folder of that file, or the one that holds its package."""
    release: str = ""
    """The release of the library that the workload is made by, where one is."""

    @property
    def takes_device(self) -> bool:
        """Whether the function lets its caller choose the device."""
        return "device" in _keywords(self.function)

    @property
    def takes_batch_size(self) -> bool:
        """Whether the function lets its caller choose the batch size."""
        return "batch_size" in _keywords(self.function)


def load_factory(spec: str) -> Factory:
    """Returns the factory that `spec` names.

    `spec` is `train.py`, `train.py:factory` or `package.module:factory`; the factory is called
    `workload` when none is named.

    Raises:
        WorkloadNotFound: no such file, module or factory.
        WorkloadError: importing the file raised.
    """
    require_file(spec)
    location, factory_name = split_spec(spec)
    is_file = _names_file(location)
    module = _import_file(Path(location)) if is_file else _import_module(location)
    function = _run_import(lambda: getattr(module, factory_name, None), location)
    if not callable(function):
        raise WorkloadNotFound(_no_factory_message(location, factory_name, module))
    # Not by what the module says of itself: its code may have changed that.
    path = Path(location).resolve() if is_file else _file_of(module)
    packages = 0 if is_file else location.count(".")
    packages += path is not None and path.name == "__init__.py"
    return Factory(
        function=function,
        name=f"{location}:{factory_name}",
        path=path,
        folder=path.parents[packages] if path is not None else None,
    )


def hash_sources(factory: Factory) -> str:
    """Returns the SHA-256 of the texts that the workload is made of, as far as they are loaded.

    That is the factory's file, the release of the library that it stands for, and the modules that
    lie beside or below it: not what is installed, and not exported policies, which a search may
    write anew.
    """
    found = hashlib.sha256(factory.path.read_bytes() if factory.path is not None else b"")
    found.update(factory.release.encode())
    if factory.path is None or factory.folder is None:
        return found.hexdigest()
    others = {
        path
        for module in list(sys.modules.values())
        if (path := _source_of(module)) is not None
        and path != factory.path
        and path.is_relative_to(factory.folder)
        and not {"site-packages", "dist-packages"} & set(path.parts)
        and not path.is_relative_to(Path(__file__).parent)
        and not _is_exported(module)
    }
    for path in sorted(others):
        found.update(os.fsencode(path.relative_to(factory.folder)))
        found.update(path.read_bytes())
    return found.hexdigest()


def _is_exported(module: ModuleType) -> bool:
    meta = vars(module).get("META")
    return isinstance(meta, dict) and "sac_search_version" in meta


def _source_of(module: ModuleType) -> Path | None:
    path = _file_of(module)
    return path if path is not None and path.suffix == ".py" else None


def _file_of(module: ModuleType) -> Path | None:
    name = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(name, str) or not os.path.isfile(name):
        return None
    return Path(name).resolve()


def canonical_spec(spec: str) -> str:
    """Returns one spelling of `spec`: `./train.py` and `train.py:workload` are `train.py`."""
    recipe = parse_recipe(spec)
    if recipe is not None:
        return recipe.canonical().spec
    location, factory_name = split_spec(spec)
    if not _names_file(location):
        return spec
    path, here = Path(location).resolve(), Path.cwd().resolve()
    location = (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    return location if factory_name == DEFAULT_FACTORY else f"{location}:{factory_name}"


def require_file(spec: str) -> None:
    """Raises UsageError if `spec` names a file that is not there, or no config; imports nothing."""
    recipe = parse_recipe(spec)
    if recipe is not None:
        recipe.require()
        return
    location, _ = split_spec(spec)
    if location != records.spell_out(location):
        raise WorkloadNotFound(
            f"the name {location!r} is not UTF-8, so it cannot be recorded; rename the file"
        )
    if _names_file(location) and not os.path.isfile(location):
        raise WorkloadNotFound(_no_file_message(Path(location)))


def split_spec(spec: str) -> tuple[str, str]:
    """Splits `train.py:factory` into file (or module) and factory name."""
    location, colon, name = spec.rpartition(":")
    if colon and location and name.isidentifier():
        return location, name
    return spec, DEFAULT_FACTORY


def build_workload(
    factory: Factory, device: torch.device, batch_size: int | None = None
) -> Workload:
    """Calls the factory and checks what it returns.

    Raises:
        WorkloadError: the factory raised, returned something else, or every parameter is frozen.
        UsageError: a batch size was asked for and the factory takes none, or a recipe cannot be
            followed.
    """
    keywords: dict[str, Any] = {}
    if factory.takes_device:
        keywords["device"] = device
    if batch_size is not None:
        if not factory.takes_batch_size:
            raise WorkloadNotFound(
                f"--batch-size {batch_size} was given, but {factory.name} takes no batch_size; "
                "add the keyword to the factory: def workload(device, batch_size=None)"
            )
        keywords["batch_size"] = batch_size
    try:
        workload = factory.function(**keywords)
    except (WorkloadError, UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _raised(factory.name, error) from error
    check_workload(workload, factory.name)
    return workload  # type: ignore[no-any-return]


def check_workload(workload: Any, name: str) -> None:
    """Raises WorkloadError unless `workload` can be trained."""
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{name} returned a {type(workload).__name__}; it must return a sac_search.Workload"
        )
    if not isinstance(workload.model, torch.nn.Module):
        raise WorkloadError(
            f"{name}: model is a {type(workload.model).__name__}, not a torch.nn.Module"
        )
    if not callable(workload.loss_fn):
        raise WorkloadError(
            f"{name}: loss_fn is a {type(workload.loss_fn).__name__}; "
            "it must be a function: loss_fn(model, batch) -> loss"
        )
    if workload.optimizer is not None and not hasattr(workload.optimizer, "param_groups"):
        raise WorkloadError(
            f"{name}: optimizer is a {type(workload.optimizer).__name__}, "
            "not a torch.optim.Optimizer"
        )
    try:
        are_trained = [p.requires_grad for p in workload.parameters()]
    except (AttributeError, KeyError, TypeError) as error:
        raise WorkloadError(
            f"{name}: the parameters of its model and optimizer cannot be listed "
            f"({type(error).__name__}: {error}); the model must have called super().__init__(), "
            "and optimizer.param_groups must be that of a torch.optim.Optimizer"
        ) from error
    if not any(are_trained):
        raise WorkloadError(
            f"{name}: no parameter requires grad, so there is nothing to train; "
            "unfreeze some with requires_grad_(True)"
        )


def format_user_traceback(error: BaseException) -> str:
    """Returns the traceback of `error` without the frames of this package."""
    report = traceback.TracebackException.from_exception(error)
    while report.stack and _is_ours(report.stack[0].filename):
        report.stack.pop(0)
    return "".join(report.format())


def _is_ours(filename: str) -> bool:
    package = Path(__file__).parent
    if Path(filename) == package / "builtin.py":  # a workload as a user would write it
        return False
    return Path(filename).is_relative_to(package) or filename.startswith("<frozen importlib.")


def _keywords(function: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a class or function written in C may not tell
        return set()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {"device", "batch_size"}
    return {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}


def _names_file(location: str) -> bool:
    return location.endswith(".py") or "/" in location or os.path.isfile(location)


def _no_file_message(path: Path) -> str:
    return (
        f"there is no file {str(path)!r}; name a Python file with a function "
        f"{DEFAULT_FACTORY}(device), or package.module:function"
    )


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    _allow_imports_from(str(path.parent))  # the file's neighbours
    name = path.stem if path.stem.isidentifier() and not _is_known(path.stem) else "_sac_workload"
    import_spec = importlib.util.spec_from_file_location(name, path)
    if import_spec is None or import_spec.loader is None:
        raise WorkloadNotFound(f"{str(path)!r} is not a Python file")
    module: ModuleType = _run_import(
        lambda: importlib.util.module_from_spec(import_spec), str(path)
    )
    sys.modules[name] = module
    _run_import(lambda: import_spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _allow_imports_from(folder: str) -> None:
    """Puts `folder` before installed packages, as `python train.py` would, but after Python's own.

    So a random.py or profile.py beside the user's file is not what torch imports later on.
    """
    if folder in sys.path:
        return
    library = str(Path(os.__file__).parent)
    own = [i for i, p in enumerate(sys.path) if p == library or p.endswith("lib-dynload")]
    sys.path.insert(max(own, default=-1) + 1, folder)


def _is_known(name: str) -> bool:
    return name in sys.modules or name in sys.stdlib_module_names


def _import_module(name: str) -> ModuleType:
    _allow_imports_from(str(Path.cwd()))
    if not _module_exists(name):
        raise WorkloadNotFound(_no_module_message(name))
    return _run_import(lambda: importlib.import_module(name), name)  # type: ignore[no-any-return]


def _module_exists(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # Is it the package itself that is missing, or something that it imports?
        return not f"{name}.".startswith(f"{error.name}.")
    except KeyboardInterrupt:
        raise
    except BaseException:
        return True  # the package raises, as the import will


def _no_module_message(name: str) -> str:
    return (
        f"there is neither a file nor a module {name!r}; name a Python file with a function "
        f"{DEFAULT_FACTORY}(device), or package.module:function"
    )


def _run_import(run: Callable[[], Any], name: str) -> Any:
    try:
        return run()
    except (WorkloadError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _raised(f"importing {name}", error) from error


def _raised(what: str, error: BaseException) -> WorkloadError:
    """Returns what is said of an exception of the user's code, whatever that is made of."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return WorkloadError(
        f"{what} raised {type(error).__name__}: {text}",
        user_traceback=format_user_traceback(error),
    )


def _no_factory_message(location: str, factory_name: str, module: ModuleType) -> str:
    candidates = [
        name
        for name, value in getattr(module, "__dict__", {}).items()
        if inspect.isfunction(value)
        and value.__module__ == getattr(module, "__name__", None)
        and not name.startswith("_")
    ]
    hint = f"; it has: {', '.join(candidates)}" if candidates else ""
    return (
        f"{location} has no function {factory_name!r}{hint}. "
        f"Write one that returns a sac_search.Workload, or name it: {location}:FUNCTION"
    )


def require(module_name: str, extra: str) -> ModuleType:
    """Returns the module, or says which extra of sac-search installs it.

    Raises:
        WorkloadError: the module is not installed.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module_name.partition(".")[0]:
            raise  # installed, but broken: its own error says more
        raise WorkloadError(
            f"this workload needs {module_name}, which is not installed; "
            f"install it with: pip install 'sac-search[{extra}]'"
        ) from error
