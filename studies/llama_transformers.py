"""Llama from transformers under bf16 autocast: mixed precision in a study.

You learn where autocast belongs: inside `loss_fn`, around the forward pass only, as in any training
script. Recomputed layers run under the same autocast. Casts save copies of their own, and RMSNorm
and rotary embeddings are chains of small ops that are cheap to recompute. Type:

    sac-search studies/llama_transformers.py --device cpu --budget-gb 0.015

Chains of small ops are what torch.compile fuses. Let the search choose whether to compile, and what
to recompute then:

    sac-search studies/llama_transformers.py --device cpu --budget-gb 0.015 --compile search
"""

from __future__ import annotations

import torch
from _text import VOCABULARY, text_batch

from sac_search import Workload
from sac_search.workload import require

transformers = require("transformers", extra="transformers")

BATCH_SIZE = 6
SEQUENCE_LENGTH = 128


def autocast_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the loss of the next token, computed in bf16 where that is safe."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return model(input_ids=tokens, labels=tokens).loss


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the training step of a small Llama on byte-level text."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE_LENGTH,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # a cache would grow again when a layer is recomputed
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    batch_size = batch_size or BATCH_SIZE
    return Workload(
        model=model,
        loss_fn=autocast_loss,
        batch=text_batch(batch_size, SEQUENCE_LENGTH).to(device),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch_size=batch_size,
        sequence_length=SEQUENCE_LENGTH,
    )
