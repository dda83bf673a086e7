"""A ResNet from transformers: convolutions, and layers that are not alike.

You learn three things. Layers of different stages differ in what they save: the early ones hold
larger images, so checkpointing them saves most. BatchNorm updates its running statistics in every
forward pass, so a recomputed layer updates them twice; loss and gradients stay the same. And this
model adds its shortcuts in place, into the output of a BatchNorm, so that output can't be saved by
a policy: torch refuses it as mutated, and the search goes on without it. Type:

    sac-search studies/resnet_transformers.py --device cpu --budget-gb 0.1
"""

from __future__ import annotations

import torch

from sac_search import Workload
from sac_search.workload import require

transformers = require("transformers", extra="transformers")

BATCH_SIZE = 32
IMAGE_SIZE = 96
CLASSES = 10


def image_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the cross-entropy of `(images, labels)`."""
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the training step of a small ResNet on random images."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128, 256],
        depths=[4, 4, 4],
        layer_type="bottleneck",
        num_labels=CLASSES,
    )
    model = transformers.ResNetForImageClassification(config).to(device)
    batch_size = batch_size or BATCH_SIZE
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    labels = torch.randint(CLASSES, (batch_size,), generator=generator)
    return Workload(
        model=model,
        loss_fn=image_loss,
        batch=(images.to(device), labels.to(device)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        batch_size=batch_size,
    )
