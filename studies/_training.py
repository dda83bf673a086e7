"""What the studies of trainers share: a Trainer's own step as a workload, and a policy's file."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch

from sac_search import Workload


def workload_of(trainer: Any, sequence_length: int | None = None) -> Workload:
    """Returns the training step of a `transformers.Trainer`, or of one that is made from it.

    Model, batches, loss, optimizer, accumulation, mixed precision and clipping are the trainer's.
    The batches are its loader's first: where samples differ in length, let the longest come first.
    """
    arguments = trainer.args
    model = trainer.accelerator.prepare_model(trainer.model)
    batches, items = trainer.get_batch_samples(
        iter(trainer.get_train_dataloader()),
        arguments.gradient_accumulation_steps,
        arguments.device,
    )
    trainer.current_gradient_accumulation_steps = len(batches)

    def step(workload: Workload) -> torch.Tensor:
        losses = [
            trainer.training_step(model, inputs, items)  # with its backward pass
            for inputs in workload.next_batch()
        ]
        if arguments.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        workload.optimizer.step()
        model.zero_grad()
        return torch.stack(losses).sum()

    return Workload(
        model=model,
        loss_fn=trainer.compute_loss,
        batch=[trainer._prepare_inputs(inputs) for inputs in batches],
        optimizer=trainer.create_optimizer(),
        step=step,
        batch_size=arguments.per_device_train_batch_size * len(batches),
        sequence_length=sequence_length,
    )


def losses_of(trainer: Any) -> list[float]:
    """Returns the loss of each step that the trainer logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def load_policy(path: str) -> ModuleType:
    """Returns an exported policy, wherever it lies; beside your script, `import policy` does it."""
    spec = importlib.util.spec_from_file_location("policy", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
