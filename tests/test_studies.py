"""Every workload that comes with sac-search trains, repeats itself and is worth searching."""

from __future__ import annotations

import fnmatch
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sac_search.device import read_peak
from sac_search.errors import WorkloadError
from sac_search.policy_runtime import checkpoint_layer
from sac_search.workload import Workload, build_workload, load_factory, require

CPU = torch.device("cpu")
STUDIES = Path(__file__).parents[1] / "studies"
INSTALL = r"pip install 'sac-search\[transformers\]'"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
# The pattern of each workload's layers, and how many there are.
LAYERS = {
    "sac_search.builtin:workload": ("blocks.?", 6),
    "sac_search.builtin:llama": ("blocks.?", 6),
    "gpt2_transformers.py": ("transformer.h.?", 6),
    "llama_transformers.py": ("model.layers.?", 6),
    "vit_transformers.py": ("vit.layers.?", 6),
    "resnet_transformers.py": ("resnet.encoder.stages.?.layers.?", 12),
}
each_workload = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_transformers if name.endswith(".py") else ())
        for name in LAYERS
    ],
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
    batch = workload.next_batch()
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


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
    assert (default.sequence_length is None) == ("resnet" in name)


@each_workload
def test_two_builds_are_equal(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, batch_size=2)
    torch.manual_seed(2)
    second = build(name, batch_size=2)
    for a, b in zip(batch_tensors(first), batch_tensors(second), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.run_step(), second.run_step())
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


@each_workload
def test_checkpointing_lowers_the_peak(name: str) -> None:
    pattern, count = LAYERS[name]
    workload = build(name)
    layer_names = fnmatch.filter((n for n, _ in workload.model.named_modules()), pattern)
    assert len(layer_names) == count
    workload.run_step()
    plain = measure_peak(workload)
    for layer_name in layer_names:
        checkpoint_layer(workload.model.get_submodule(layer_name))
    assert measure_peak(workload) <= 0.65 * plain


def measure_peak(workload: Workload) -> int:
    return read_peak(workload.run_step, workload.drop_gradients, CPU).allocated_bytes


def test_every_study_is_tested() -> None:
    files = {path.name for path in STUDIES.glob("*.py") if not path.name.startswith("_")}
    assert files == {name for name in LAYERS if name.endswith(".py")}


@pytest.mark.parametrize("file", [n for n in LAYERS if n.endswith("_transformers.py")])
def test_missing_transformers_says_how_to_install_it(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WorkloadError, match=INSTALL):
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
