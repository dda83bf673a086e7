"""Checkpointing in the user's own script: what is applied, and that nothing else is left behind."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Listener
from torch import Tensor, nn

import sac_search
from sac_search import auto
from sac_search.auto import auto_checkpoint, parse_budget, remove_checkpointing
from sac_search.device import Clock
from sac_search.errors import NoPolicyFits, UsageError, WorkloadError
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, checkpoint_layers
from sac_search.study.baselines import FULL, NONE
from sac_search.workload import Workload

CALLS: Counter[str] = Counter()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    CALLS["steps"] += 1
    loss: Tensor = model(x).square().mean()
    return loss


def make() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    return model, torch.randn(512, 32), torch.optim.AdamW(model.parameters())


def peaks() -> dict[str, int]:
    model, batch, optimizer = make()
    meter = StepMeter(
        workload=Workload(model, loss_fn, batch, optimizer),
        device=torch.device("cpu"),
        clock=Clock.CPU,
        steps=1,
    )
    found = {}
    for name, policy in ((NONE, NO_CHECKPOINTING), (FULL, checkpoint_layers("0123"))):
        meter.run_untimed_step(policy)
        measurement = meter.measure(policy, policy).measurement
        assert measurement is not None
        found[name] = measurement.peak_bytes
    return found


@pytest.fixture(scope="module")
def budget_bytes() -> int:
    found = peaks()
    return (found[NONE] + found[FULL]) // 2


FEW = {"trials": 2, "steps": 1}


def trained(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def checkpointed(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if hasattr(type(m), "_sac_layer_class")]


def test_training_goes_on_under_the_budget_and_is_the_same(
    budget_bytes: int, tmp_path: Path
) -> None:
    expected = trained(*make())
    model, batch, optimizer = make()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    applied = auto_checkpoint(
        model, loss_fn, batch, optimizer=optimizer, memory_budget=budget_bytes, **FEW
    )

    assert not applied.from_cache
    assert applied.peak_bytes <= budget_bytes
    assert applied.step_seconds > 0
    assert set(checkpointed(model)) == set(applied.policy.layer_names) != set()
    assert "Loss and every gradient are bitwise" in str(applied)
    assert str(model.state_dict()) == str(state[0])
    assert optimizer.state_dict() == state[1]
    assert trained(model, batch, optimizer) == expected
    assert remove_checkpointing(model) == len(applied.policy.layer_names)
    assert checkpointed(model) == []
    assert list(tmp_path.iterdir()) == []  # without a cache nothing is written
    assert applied.result.folder is None


def test_what_was_found_is_applied_at_once_the_next_time(budget_bytes: int, tmp_path: Path) -> None:
    def run(batch_rows: int = 512) -> tuple[auto.AppliedPolicy, int]:
        model, batch, optimizer = make()
        CALLS.clear()
        found = auto_checkpoint(
            model,
            loss_fn,
            batch[:batch_rows],
            optimizer=optimizer,
            memory_budget=budget_bytes,
            cache=tmp_path,
            **FEW,
        )
        assert set(checkpointed(model)) == set(found.policy.layer_names)
        return found, CALLS["steps"]

    first, steps = run()
    again, steps_again = run()
    assert steps > 0 and steps_again == 0
    assert again.from_cache and not first.from_cache
    assert again.policy == first.policy
    assert again.peak_bytes == first.peak_bytes
    other, steps = run(batch_rows=128)  # which fits
    assert steps > 0 and not other.from_cache


def test_an_interrupted_search_applies_nothing_and_goes_on_next_time(
    budget_bytes: int, tmp_path: Path
) -> None:
    def run(interrupt_after: int | None) -> auto.AppliedPolicy:
        model, batch, optimizer = make()
        left = [interrupt_after]

        class Told(Listener):
            def on_candidate(self, *arguments: object) -> None:
                super().on_candidate(*arguments)
                if len(self.candidates) == left[0]:
                    raise KeyboardInterrupt

        try:
            return auto_checkpoint(
                model,
                loss_fn,
                batch,
                optimizer=optimizer,
                memory_budget=budget_bytes,
                cache=tmp_path,
                listener=Told(),
                **FEW,
            )
        finally:
            if interrupt_after is not None:
                assert checkpointed(model) == []

    with pytest.raises(KeyboardInterrupt):
        run(interrupt_after=3)  # by now there is one that fits
    found = run(interrupt_after=None)
    assert not found.from_cache
    assert len(found.result.candidates) > 3
    assert run(interrupt_after=None).from_cache


def test_the_model_inside_data_parallel_is_checkpointed(budget_bytes: int) -> None:
    model, batch, _ = make()
    wrapped = nn.DataParallel(model)
    found = auto_checkpoint(wrapped, loss_fn, batch, memory_budget="70%", trials=0, steps=1)
    assert found.policy == NO_CHECKPOINTING  # it fits
    optimizer = torch.optim.AdamW(wrapped.parameters())
    found = auto_checkpoint(
        wrapped, loss_fn, batch, optimizer=optimizer, memory_budget=budget_bytes, **FEW
    )
    assert set(checkpointed(model)) == set(found.policy.layer_names) != set()
    assert remove_checkpointing(wrapped) == len(found.policy.layer_names)


def test_what_checkpoints_itself_is_refused_also_when_a_policy_is_known() -> None:
    model, batch, _ = make()
    model.gradient_checkpointing = True
    with pytest.raises(WorkloadError, match="checkpoints itself already"):
        auto_checkpoint(model, loss_fn, batch, memory_budget="2GiB", **FEW)


def test_a_step_that_fits_is_left_alone() -> None:
    model, batch, optimizer = make()
    applied = auto_checkpoint(
        model, loss_fn, batch, optimizer=optimizer, memory_budget="2 GiB", **FEW
    )
    assert applied.policy == NO_CHECKPOINTING
    assert checkpointed(model) == []
    assert applied.overhead == 0
    assert "No checkpointing needed" in str(applied)


@pytest.mark.parametrize("budget", ["1KB", 4096])
def test_nothing_is_applied_when_nothing_fits(budget: str | int) -> None:
    model, batch, optimizer = make()
    with pytest.raises(NoPolicyFits, match="no policy fits"):
        auto_checkpoint(model, loss_fn, batch, optimizer=optimizer, memory_budget=budget, **FEW)
    assert checkpointed(model) == []


def test_a_model_in_evaluation_mode_is_measured_in_training_mode(budget_bytes: int) -> None:
    seen = set()

    def watched(model: nn.Module, x: Tensor) -> Tensor:
        seen.add(model.training)
        return loss_fn(model, x)

    model, batch, _ = make()
    model.eval()
    auto_checkpoint(model, watched, batch, memory_budget="2GiB", **FEW)
    assert seen == {True}
    assert not any(module.training for module in model.modules())

    model.train()
    model[1].eval()  # kept there on purpose
    auto_checkpoint(model, watched, batch, memory_budget="2GiB", **FEW)
    assert [m.training for m in model] == [True, False, True, True]


def test_a_step_of_ones_own_is_what_is_measured(budget_bytes: int) -> None:
    def accumulate(workload: Workload) -> Tensor:
        CALLS["own"] += 1
        for part in workload.batch.chunk(2):
            loss = loss_fn(workload.model, part) / 2
            loss.backward()
        workload.drop_gradients()
        return loss

    model, batch, _ = make()
    auto_checkpoint(model, loss_fn, batch, step=accumulate, memory_budget="2GiB", **FEW)
    assert CALLS["own"] > 2


def test_a_batch_may_be_a_callable(budget_bytes: int) -> None:
    model, batch, _ = make()
    applied = auto_checkpoint(model, loss_fn, lambda: batch, memory_budget="2GiB", **FEW)
    assert applied.result.environment.batch_size is None


def test_one_of_many_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(UsageError, match="one of 4 ranks"):
        auto_checkpoint(*make()[:1], loss_fn, torch.ones(2, 32), memory_budget="1GB")


def test_what_is_no_loss_function_is_told() -> None:
    model, batch, _ = make()
    with pytest.raises(WorkloadError, match="loss_fn is a int"):
        auto_checkpoint(model, 3, batch, memory_budget="1GB")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("22GiB", 22 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("512KB", 512_000),
        ("100B", 100),
        ("80%", 8 * 10**10),
        (" 12.5 % ", 125 * 10**8),
        (12345, 12345),
    ],
)
def test_budgets(budget: str | int, expected: int) -> None:
    assert parse_budget(budget, 10**11) == expected


@pytest.mark.parametrize(
    "budget", ["", "8", "GB", "8GX", "-8GB", "0GB", "0%", "eight GB", 0, -5, True, 1.5, None, "8Gi"]
)
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises(UsageError, match=r"memory_budget is .*'8GB' or '22GiB'"):
        parse_budget(budget, 10**11)


def test_the_package_offers_it() -> None:
    assert sac_search.auto_checkpoint is auto_checkpoint
    assert sac_search.remove_checkpointing is remove_checkpointing
