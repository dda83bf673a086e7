"""A GPT so small that its optimizer and its host time matter: larger batches pay on a CPU, too."""

from __future__ import annotations

import torch

from sac_search import Workload
from sac_search.builtin import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(layers=2, hidden=128, heads=2, vocabulary=512, sequence_length=16)


def workload(device: torch.device, batch_size: int = 4) -> Workload:
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    shape = (batch_size, CONFIG.sequence_length + 1)
    return Workload(
        model,
        next_token_loss,
        torch.randint(CONFIG.vocabulary, shape).to(device),
        torch.optim.AdamW(model.parameters()),
        batch_size=batch_size,
        sequence_length=CONFIG.sequence_length,
    )
