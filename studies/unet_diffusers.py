"""A UNet of diffusers with cross-attention, trained in a loop of one's own with accelerate.

You learn that blocks that are all unlike need no names either: resolution, channels and
cross-attention differ from block to block, each is a kind of its own, and the search weighs them
against each other. Noise and timesteps are drawn anew in every step, as they should be: what is
drawn outside the layers is the same with and without checkpointing. Install
`pip install '.[diffusers]'`, and type:

    sac-search studies/unet_diffusers.py --device cpu --budget-gb 0.03
    python studies/unet_diffusers.py studies/unet_diffusers-0.03gib/policy.py

Without the policy's path the second command trains without it. Then put your UNet or transformer
into `make_unet`, and your latents and prompts into `make_batch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from _training import load_policy

from sac_search import Workload
from sac_search.workload import require

accelerate = require("accelerate", extra="diffusers")
diffusers = require("diffusers", extra="diffusers")

BATCH_SIZE = 8
LATENT_SIZE = 16
CHANNELS = 4
PROMPT_LENGTH = 8
PROMPT_WIDTH = 32
CLIP = 1.0
STEPS = 5

scheduler = diffusers.DDPMScheduler()

Batch = tuple[torch.Tensor, torch.Tensor]


def make_unet() -> torch.nn.Module:
    """Returns a small UNet: two resolutions, the lower one with attention to the prompt."""
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=LATENT_SIZE,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=PROMPT_WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    ).train()


def make_batch(batch_size: int = BATCH_SIZE) -> Batch:
    """Returns latents [batch, channels, size, size] and prompts [batch, length, width]."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(batch_size, CHANNELS, LATENT_SIZE, LATENT_SIZE, generator=generator)
    prompts = torch.randn(batch_size, PROMPT_LENGTH, PROMPT_WIDTH, generator=generator)
    return latents, prompts


def noise_loss(unet: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Returns how far the UNet is from the noise that was added."""
    latents, prompts = batch
    noise = torch.randn_like(latents)
    last = scheduler.config.num_train_timesteps
    timesteps = torch.randint(last, (len(latents),), device=latents.device)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    predicted = unet(noisy, timesteps, encoder_hidden_states=prompts).sample
    return torch.nn.functional.mse_loss(predicted, noise)


def make_optimizer(unet: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer."""
    return torch.optim.AdamW(unet.parameters(), lr=1e-3)


def step(workload: Workload) -> torch.Tensor:
    """Does what `train` does for each batch."""
    loss = workload.run_loss()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(workload.model.parameters(), CLIP)
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss


def workload(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the training step of a small UNet on random latents."""
    unet = make_unet().to(device)
    latents, prompts = make_batch(batch_size or BATCH_SIZE)
    return Workload(
        model=unet,
        loss_fn=noise_loss,
        batch=(latents.to(device), prompts.to(device)),
        optimizer=make_optimizer(unet),
        step=step,
        batch_size=batch_size or BATCH_SIZE,
    )


def train(policy: ModuleType | None = None, *, cpu: bool = False) -> list[float]:
    """Trains a few steps, under the policy if there is one, and returns their losses."""
    accelerator = accelerate.Accelerator(cpu=cpu)
    unet = make_unet()
    if policy is not None:
        policy.apply_hf(unet)  # in your script: import policy; policy.apply_hf(unet)
    unet, optimizer = accelerator.prepare(unet, make_optimizer(unet))
    latents, prompts = (tensor.to(accelerator.device) for tensor in make_batch())
    losses: list[Any] = []
    for _ in range(STEPS):
        loss = noise_loss(unet, (latents, prompts))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(load_policy(sys.argv[1]) if len(sys.argv) > 1 else None))
