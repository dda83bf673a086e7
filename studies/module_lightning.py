"""A LightningModule: its `training_step` is the loss, and `configure_model` is where a policy goes.

You learn that a LightningModule is a workload as it stands (a model, a loss, an optimizer, a
loader), and that the policy needs one line in `configure_model`, which Lightning calls before a
strategy wraps the model. Install `pip install '.[lightning]'`, and type:

    sac-search studies/module_lightning.py --device cpu --budget-gb 0.03
    python studies/module_lightning.py studies/module_lightning-0.03gib/policy.py

Without the policy's path the second command trains without it. Then put your own module in the
place of `TextModule`: nothing else here is about this model.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from _text import VOCABULARY, text_batch
from _training import load_policy

from sac_search import Workload
from sac_search.workload import require

lightning = require("lightning", extra="lightning")

BATCH_SIZE = 16
SEQUENCE_LENGTH = 128
HIDDEN = 64
CLIP = 1.0
STEPS = 5


class TextNet(torch.nn.Module):
    """A small decoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(SEQUENCE_LENGTH, HIDDEN))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                HIDDEN, nhead=2, dim_feedforward=4 * HIDDEN, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(4)
        )  # fmt: skip
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, sequence, VOCABULARY]."""
        length = tokens.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


class TextModule(lightning.LightningModule):
    """Trains `TextNet` on byte-level text, under a policy if there is one."""

    def __init__(self, policy: ModuleType | None = None, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self.net = TextNet()
        self.policy = policy
        self.batch_size = batch_size
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Is called before a strategy wraps the model, and may be called again."""
        if self.policy is not None:
            self.policy.apply(self)  # in your script: import policy; policy.apply(self)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the mean cross-entropy of each next token."""
        logits = self.net(tokens)
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, index: int) -> None:
        """Keeps the loss."""
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        """Returns batches of tokens [batch, sequence]."""
        samples = text_batch(self.batch_size * STEPS, SEQUENCE_LENGTH)
        return torch.utils.data.DataLoader(samples, batch_size=self.batch_size)


def step(workload: Workload) -> torch.Tensor:
    """Does what Lightning's Trainer does for each batch."""
    loss = workload.run_loss()
    workload.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(workload.model.parameters(), CLIP)
    workload.optimizer.step()
    return loss


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the module's own training step."""
    torch.manual_seed(0)
    module = TextModule(batch_size=batch_size or BATCH_SIZE).to(device)
    return Workload(
        model=module,
        loss_fn=lambda module, batch: module.training_step(batch, 0),
        batch=next(iter(module.train_dataloader())).to(device),
        optimizer=module.configure_optimizers(),
        step=step,
        batch_size=module.batch_size,
        sequence_length=SEQUENCE_LENGTH,
    )


def train(policy: ModuleType | None = None, accelerator: str = "auto") -> list[float]:
    """Trains a few steps, under the policy if there is one, and returns their losses."""
    torch.manual_seed(0)
    module = TextModule(policy)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        accelerator=accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.losses


if __name__ == "__main__":
    print(train(load_policy(sys.argv[1]) if len(sys.argv) > 1 else None))
