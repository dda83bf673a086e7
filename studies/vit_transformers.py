"""A vision transformer from transformers: images instead of text.

You learn that nothing in a workload is about language: the batch is any object that `loss_fn`
understands, here a pair of images and labels, and positions are patches. There is no vocabulary,
so the layers hold nearly all of the memory that can be saved. Type:

    sac-search studies/vit_transformers.py --device cpu --budget-gb 0.08
"""

from __future__ import annotations

import torch

from sac_search import Workload
from sac_search.workload import require

transformers = require("transformers", extra="transformers")

BATCH_SIZE = 16
IMAGE_SIZE = 64
PATCH_SIZE = 8
CLASSES = 10


def image_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the cross-entropy of `(images, labels)`."""
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the training step of a small ViT on random images."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    model = transformers.ViTForImageClassification(config).to(device)
    batch_size = batch_size or BATCH_SIZE
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    labels = torch.randint(CLASSES, (batch_size,), generator=generator)
    return Workload(
        model=model,
        loss_fn=image_loss,
        batch=(images.to(device), labels.to(device)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch_size=batch_size,
        sequence_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 + 1,  # the class token is one more
    )
