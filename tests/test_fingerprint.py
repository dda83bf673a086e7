"""What tells two training steps apart that have no file, and what does not."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_search.fingerprint import fingerprint_of
from sac_search.workload import Workload

ROWS = 64


def loss_fn(model: nn.Module, x: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    loss: Tensor = model(x).to(dtype).square().mean()
    return loss


def other_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).abs().mean()
    return loss


def scaled_loss(factor: float) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: factor * loss_fn(model, x)


def make_model(attention: str = "sdpa", dropout: float = 0.0) -> nn.Module:
    class Config:
        def __init__(self) -> None:
            self._attn_implementation = attention

        def to_dict(self) -> dict[str, Any]:
            return {"layers": 2}

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8))
    model.config = Config()
    return model


def fingerprint(**changes: Any) -> str:
    model = changes.pop("model", None) or make_model()
    make_optimizer = changes.pop("optimizer", torch.optim.AdamW)
    optimizer = make_optimizer(model.parameters())
    given = {"loss_fn": loss_fn, "batch": torch.ones(ROWS, 8), **changes}
    return fingerprint_of(Workload(model, optimizer=optimizer, **given))


def rows(*counts: int) -> Callable[[], Tensor]:
    endless = itertools.cycle(counts)
    return lambda: torch.ones(next(endless), 8)


def frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def test_what_a_policy_depends_on_tells_steps_apart() -> None:
    def sgd(**settings: Any) -> Callable[..., torch.optim.Optimizer]:
        return functools.partial(torch.optim.SGD, lr=0.1, **settings)

    found = [
        fingerprint(),
        fingerprint(batch=torch.ones(ROWS + 1, 8)),
        fingerprint(batch=torch.ones(ROWS, 8, dtype=torch.float64)),
        fingerprint(batch=rows(ROWS)),
        fingerprint(batch=rows(4096)),
        fingerprint(batch=rows(1, 2, 3)),
        fingerprint(loss_fn=other_loss),
        fingerprint(loss_fn=functools.partial(loss_fn, dtype=torch.float16)),
        fingerprint(loss_fn=functools.partial(loss_fn, dtype=torch.bfloat16)),
        fingerprint(loss_fn=scaled_loss(1.0)),
        fingerprint(loss_fn=scaled_loss(2.0)),
        fingerprint(optimizer=functools.partial(torch.optim.AdamW, amsgrad=True)),
        fingerprint(optimizer=functools.partial(torch.optim.AdamW, foreach=False)),
        fingerprint(optimizer=sgd()),
        fingerprint(optimizer=sgd(momentum=0.9)),
        fingerprint(model=make_model("eager")),
        fingerprint(model=make_model(dropout=0.1)),
        fingerprint(model=make_model().to(torch.bfloat16)),
        fingerprint(model=make_model().eval()),
        fingerprint(model=frozen()),
        fingerprint(layers="0"),
        fingerprint(step=lambda workload: other_loss(workload.model, workload.batch)),
    ]
    assert len(set(found)) == len(found)


def test_what_it_does_not_depend_on_does_not() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint(batch=rows(ROWS)) == fingerprint(batch=rows(ROWS))
    # A schedule moves the learning rate.
    slow = functools.partial(torch.optim.AdamW, lr=1e-6)
    assert fingerprint(optimizer=slow) == fingerprint()
    # Lengths that change from batch to batch are the same step whichever come first.
    assert fingerprint(batch=rows(1, 2, 3)) == fingerprint(batch=rows(5, 9, 7))


def test_random_states_are_left_alone_by_drawing() -> None:
    workload = Workload(make_model(), loss_fn, lambda: torch.randn(4, 8))
    before = torch.get_rng_state()
    fingerprint_of(workload)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [RuntimeError("of the loader"), StopIteration()])
def test_a_loader_that_fails_is_for_the_search_to_tell(error: Exception) -> None:
    def fail() -> Tensor:
        raise error

    assert fingerprint(batch=fail)


def test_an_empty_cell_and_a_function_that_refers_to_itself_are_no_trouble() -> None:
    def recursive(model: nn.Module, x: Tensor) -> Tensor:
        return recursive(model, x) if x is None else late(model, x)

    first = fingerprint(loss_fn=recursive)
    late = loss_fn
    assert fingerprint(loss_fn=recursive) != first


def test_it_is_the_same_in_another_process() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import functools, torch, test_fingerprint as t\n"
        "print(t.fingerprint(loss_fn=functools.partial(t.scaled_loss(2.0), 1)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1
