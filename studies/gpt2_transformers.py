"""GPT-2 from transformers: the smallest complete study.

You learn what a workload file needs (a model, a loss, a batch and an optimizer) and that a model
from a library needs no change: sac-search finds its layers, `transformer.h.*`, by itself. Type:

    sac-search studies/gpt2_transformers.py --device cpu --budget-gb 0.1

Then set DROPOUT to 0.1 and search again. All random ops of a layer must be treated alike, or the
gradients would be wrong, so there is less to choose from.
"""

from __future__ import annotations

import torch
from _text import VOCABULARY, text_batch

from sac_search import Workload
from sac_search.workload import require

transformers = require("transformers", extra="transformers")

BATCH_SIZE = 8
SEQUENCE_LENGTH = 128
DROPOUT = 0.0  # GPT-2's own is 0.1


def next_token_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of each next token."""
    logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the training step of a small GPT-2 on byte-level text."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE_LENGTH,
        n_embd=192,
        n_layer=6,
        n_head=6,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        resid_pdrop=DROPOUT,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # a cache would grow again when a layer is recomputed
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    batch_size = batch_size or BATCH_SIZE
    return Workload(
        model=model,
        loss_fn=next_token_loss,
        batch=text_batch(batch_size, SEQUENCE_LENGTH).to(device),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch_size=batch_size,
        sequence_length=SEQUENCE_LENGTH,
    )
