"""Every workload that comes with sac-search trains, repeats itself and is worth searching."""

from __future__ import annotations

import fnmatch
import importlib.util
import math
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sac_search import search
from sac_search.device import read_peak
from sac_search.errors import WorkloadError
from sac_search.policy_runtime import checkpoint_layer
from sac_search.workload import Workload, build_workload, load_factory, require

CPU = torch.device("cpu")
STUDIES = Path(__file__).parents[1] / "studies"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is known of a workload."""

    layers: Sequence[str]
    """Patterns of the names of its layers."""
    count: int
    """How many layers there are."""
    libraries: Sequence[str] = ("transformers",)
    """What it imports."""
    extra: str = "transformers"
    """The extra that installs those."""
    full_fraction: float = 0.65
    """The most that is left of the peak when every layer is checkpointed."""


LLAMA = ("*model.layers.?",)
WORKLOADS = {
    "sac_search.builtin:workload": Study(layers=["blocks.?"], count=6, libraries=()),
    "sac_search.builtin:llama": Study(layers=["blocks.?"], count=6, libraries=()),
    "gpt2_transformers.py": Study(layers=["transformer.h.?"], count=6),
    "llama_transformers.py": Study(layers=LLAMA, count=6),
    "vit_transformers.py": Study(layers=["vit.layers.?"], count=6),
    "resnet_transformers.py": Study(layers=["resnet.encoder.stages.?.layers.?"], count=12),
    "trainer_transformers.py": Study(
        layers=LLAMA, count=4, libraries=("transformers", "accelerate"), extra="trainer"
    ),
    "sft_trl.py": Study(
        layers=LLAMA,
        count=6,
        libraries=("trl", "transformers", "peft", "datasets"),
        extra="trl",
        full_fraction=0.8,  # TRL's loss holds the most
    ),
    "module_lightning.py": Study(
        layers=["net.layers.?"], count=4, libraries=("lightning",), extra="lightning"
    ),
    "unet_diffusers.py": Study(
        layers=["down_blocks.?", "mid_block", "up_blocks.?"],
        count=5,
        libraries=("diffusers", "accelerate"),
        extra="diffusers",
    ),
}
FILES = [name for name in WORKLOADS if name.endswith(".py")]


def is_there(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def marks(name: str) -> list[pytest.MarkDecorator]:
    libraries = WORKLOADS[name].libraries
    missing = [library for library in libraries if not is_there(library)]
    found = [pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")]
    if set(libraries) - {"transformers"}:
        found.append(pytest.mark.filterwarnings("ignore"))  # trainers warn of much
    return found


each_workload = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in WORKLOADS]
)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading a file puts its folder on the path; and one thread is what steps are sized for."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, batch_size: int | None = None) -> Workload:
    spec = str(STUDIES / name) if name.endswith(".py") else name
    return build_workload(load_factory(spec), CPU, batch_size)


def batch_tensors(workload: Workload) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(workload.next_batch()) if isinstance(leaf, torch.Tensor)]


@each_workload
def test_loss_falls(name: str) -> None:
    workload = build(name)
    losses = [workload.run_step().item() for _ in range(4)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.1


@each_workload
def test_sizes_are_recorded(name: str) -> None:
    default, single = build(name), build(name, batch_size=1)
    assert {t.shape[0] for t in batch_tensors(default)} == {default.batch_size}
    assert {t.shape[0] for t in batch_tensors(single)} == {1}
    assert single.batch_size == 1
    assert default.batch_size is not None
    assert default.batch_size > 1
    # Only images have no sequence; the patches of a vision transformer are one.
    assert (default.sequence_length is None) == name.startswith(("resnet", "unet"))


@each_workload
def test_two_builds_are_equal(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, batch_size=2)
    torch.manual_seed(2)
    second = build(name, batch_size=2)
    for a, b in zip(batch_tensors(first), batch_tensors(second), strict=True):
        assert torch.equal(a, b)
    losses = []
    for workload in (first, second):
        torch.manual_seed(3)  # a step may draw noise
        losses.append(workload.run_step())
    assert torch.equal(*losses)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@each_workload
def test_checkpointing_lowers_the_peak(name: str) -> None:
    study, workload = WORKLOADS[name], build(name)
    names = [n for n, _ in workload.model.named_modules()]
    layer_names = [n for pattern in study.layers for n in fnmatch.filter(names, pattern)]
    assert len(layer_names) == study.count
    workload.run_step()
    plain = measure_peak(workload)
    for layer_name in layer_names:
        checkpoint_layer(workload.model.get_submodule(layer_name))
    assert measure_peak(workload) <= study.full_fraction * plain


def measure_peak(workload: Workload) -> int:
    return read_peak(workload.run_step, workload.drop_gradients, CPU).allocated_bytes


def test_every_study_is_tested() -> None:
    files = {path.name for path in STUDIES.glob("*.py") if not path.name.startswith("_")}
    assert files == set(FILES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", FILES)
def test_missing_libraries_say_how_to_install_them(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = WORKLOADS[file]
    extras = tomllib.loads((STUDIES.parent / "pyproject.toml").read_text())["project"]
    assert study.extra in extras["optional-dependencies"]
    for library in study.libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(WorkloadError, match=rf"pip install 'sac-search\[{study.extra}\]'"):
        load_factory(str(STUDIES / file))


def test_require_returns_the_module() -> None:
    assert require("fnmatch", extra="any") is fnmatch


def test_require_lets_a_broken_module_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        require("broken_package", extra="any")


@pytest.mark.parametrize(
    "name", [pytest.param("llama_transformers.py", marks=marks("llama_transformers.py"))]
)
def test_a_study_is_searched_compiled(name: str, tmp_path: Path) -> None:
    # Not with inductor, which takes a minute.
    result = search(
        str(STUDIES / name),
        budget_gb=0.015,
        device="cpu",
        compile="on",
        compile_backend="aot_eager",
        trials=0,
        steps=2,
        root=tmp_path,
        report=False,
    )
    assert result.best is not None and result.best.measurement is not None
    assert result.best.policy.compiled is not None
    assert result.best.measurement.peak_bytes <= result.budget_bytes
    assert result.verification is not None and result.verification.passed
    assert result.verification.reference == "compile"
