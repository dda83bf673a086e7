"""One search for each kind of model there is: the budget kept, gradients exact, training the same.

The exported policy is tried in a process where sac-search cannot be imported, one for all of them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from shapes import LENGTHS, SHAPES, build
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search import Workload, search
from sac_search.apply import applied
from sac_search.device import read_peak
from sac_search.layers import find_layers
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.space import unsavable_ops
from sac_search.worker.session import Session, SessionSettings

CPU = torch.device("cpu")
GIB = 2**30
TOPK = "aten.topk.default"
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.usefixtures("only_new_objects"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # libraries warn of much
]


def workload_of(name: str) -> Workload:
    shape = build(name)
    return Workload(
        model=shape.model,
        loss_fn=shape.loss_fn,
        batch=shape.batch,
        optimizer=torch.optim.AdamW(shape.model.parameters(), lr=1e-2),
    )


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Any]]:
    """Trains a shape under an exported policy and without it, in a process of its own."""
    log = tmp_path_factory.mktemp("training") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-I", str(HERE / "train_shapes.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def train(name: str, policy: Path) -> Any:
            print(json.dumps([name, str(policy)]), file=requests, flush=True)
            answer = answers.readline()
            assert answer, log.read_text()
            return json.loads(answer)

        yield train
        requests.close()
        assert process.wait() == 0


def budget_of(name: str) -> int:
    """Returns the bytes half-way between the peaks of full and of no checkpointing."""
    workload = workload_of(name)
    layers = find_layers(workload.model, workload.run_forward)
    workload.run_step()  # makes the optimizer's state
    plain = peak_under(workload, NO_CHECKPOINTING)
    full = peak_under(workload, checkpoint_layers([layer.name for layer in layers]))
    assert full < plain
    return (plain + full) // 2


def peak_under(workload: Workload, policy: Policy) -> int:
    """Returns the highest of the peaks of as many steps as there are batches."""
    peaks = []
    with applied(workload.model, policy):
        # The second of two steps is read, so that an odd number of lengths is met in as many turns.
        for _ in LENGTHS if callable(workload.batch) else range(1):
            reading = read_peak(workload.run_step, workload.drop_gradients, CPU)
            peaks.append(reading.allocated_bytes)
    return max(peaks)


_NO_GROUPED_MM = "the grouped matmul of torch 2.9 takes bf16 alone"


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_searched_and_trains_the_same(
    name: str, train: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    missing = [n for n in SHAPES[name][1] if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    for library in SHAPES[name][1]:
        try:
            importlib.import_module(library)
        except RuntimeError as error:  # timm, where torchvision's wheel does not load
            pytest.skip(f"{library} cannot be imported: {error}")
    if name == "mixture of experts" and tiny.RELEASE < (2, 12):
        pytest.skip(_NO_GROUPED_MM)
    build(name)  # imports what it needs
    gc.collect()
    gc.freeze()
    budget_bytes = budget_of(name)
    gc.collect()  # what lives in this process counts as resident

    found = search(
        workload_of(name), budget_gb=budget_bytes / GIB, trials=1, steps=1, root=tmp_path
    )
    assert found.best is not None and found.best.measurement is not None
    assert found.best.measurement.peak_bytes <= budget_bytes
    assert found.best.policy.layers
    assert found.verification is not None
    assert found.verification.bitwise, found.verification

    trained = train(name, tmp_path / found.study_name / "policy.py")
    assert trained["policy"]["losses"] == trained["plain"]["losses"]
    assert trained["policy"]["end"] == trained["plain"]["end"]
    assert trained["plain"]["peak_bytes"] > budget_bytes
    assert trained["policy"]["peak_bytes"] <= budget_bytes


class Chosen(TorchDispatchMode):
    """Keeps the experts that each call of topk chooses."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.experts: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func) == TOPK:
            self.experts.append(found[1].clone())
        return found


@pytest.mark.skipif(tiny.RELEASE < (2, 12), reason=_NO_GROUPED_MM)
def test_a_token_goes_to_the_same_experts_when_they_are_chosen_again() -> None:
    """Mixtral scales the weights that topk returns in place, so they can't be saved: it runs again.

    That a token's experts stay the same is then up to the ops before it, which repeat bit by bit.
    """
    pytest.importorskip("transformers")
    workload = workload_of("mixture of experts")
    session = Session(workload, SessionSettings(spec="here", steps=1), CPU)
    layers = session.describe().layers
    assert unsavable_ops(layers)[TOPK] == "its output is changed in place later"
    policy = checkpoint_layers([layer.name for layer in layers])
    with applied(workload.model, policy):
        with Chosen() as forward:
            loss = workload.run_loss()
        with Chosen() as backward:
            loss.backward()
    chosen = forward.experts[: len(layers)]  # the loss that balances them chooses once more
    assert len(chosen) == len(backward.experts) == len(layers)
    assert all(map(torch.equal, chosen, reversed(backward.experts)))
    assert not torch.equal(chosen[0], chosen[-1])  # so each is compared with its own layer's
