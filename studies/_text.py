"""Batches of byte-level tokens from `text.txt`: real text without a tokenizer to download."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 256
"""Every byte is a token."""


def text_batch(batch_size: int, sequence_length: int) -> torch.Tensor:
    """Returns tokens [batch, sequence], cut from the text at the same random places every time."""
    text = torch.tensor(list(Path(__file__).with_name("text.txt").read_bytes()))
    windows = text.unfold(0, sequence_length, 1)
    generator = torch.Generator().manual_seed(0)
    return windows[torch.randint(len(windows), (batch_size,), generator=generator)]
