"""The built-in workloads: a GPT and a Llama-shaped decoder that need torch alone.

They are small on the CPU, but for `wide_gpt`. On an accelerator their size follows the device's
memory, and their batch is chosen so that the step does not fit without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sac_search.device import device_memory
from sac_search.workload import Workload

_OVERFILL = 1.15
"""What the step needs without checkpointing, over the device's memory."""
_LOSS_BYTES_PER_LOGIT = 12
"""In fp32: the log-softmax and, at the start of backward, two gradients."""
_RMS_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What both decoders have in common."""

    layers: int
    """Blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    vocabulary: int = 32_768
    """Distinct tokens."""
    sequence_length: int = 1024
    """Tokens in a sample."""
    batch_size: int | None = None
    """Samples in a step; None for as many as overfill the device."""

    @property
    def block_bytes_per_token(self) -> int:
        """What one block saves for backward per token, in mixed precision or bf16, in bytes."""
        raise NotImplementedError

    @property
    def bytes_per_sample(self) -> int:
        """What a step without checkpointing needs on top of its state, in bytes per sample."""
        loss_bytes = _LOSS_BYTES_PER_LOGIT * self.vocabulary
        return self.sequence_length * (self.layers * self.block_bytes_per_token + loss_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """The size of a `GPT`."""

    @property
    def block_bytes_per_token(self) -> int:
        """What one block saves for backward per token, in mixed precision, in bytes."""
        # fp32: inputs of both norms. bf16: their outputs, q, k, v, attention, both sides of GELU.
        return (4 * 2 + 2 * (2 + 3 + 1 + 8)) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The size of a `Llama`."""

    key_value_heads: int
    """Heads of keys and values; divides `heads`."""
    intermediate: int
    """Width of the MLP."""

    @property
    def block_bytes_per_token(self) -> int:
        """What one block saves for backward per token, in bf16, in bytes."""
        # Inputs and outputs of both norms, q, and attention output; k and v; four in the MLP.
        keys_and_values = 2 * self.hidden * self.key_value_heads // self.heads
        return 2 * ((4 + 1 + 1) * self.hidden + keys_and_values + 4 * self.intermediate)


CPU_GPT = GPTConfig(
    layers=6, hidden=192, heads=3, vocabulary=512, sequence_length=128, batch_size=8
)
WIDE_GPT = GPTConfig(
    layers=8, hidden=512, heads=8, vocabulary=512, sequence_length=128, batch_size=8
)
CPU_LLAMA = LlamaConfig(
    layers=6,
    hidden=192,
    heads=6,
    key_value_heads=2,
    intermediate=512,
    vocabulary=512,
    sequence_length=128,
    batch_size=8,
)
LLAMA_1B = LlamaConfig(
    layers=16, hidden=2048, heads=32, key_value_heads=8, intermediate=8192, sequence_length=2048
)
# Least memory in GiB, and the model for it. Devices report less than their name says.
GPT_SIZES = (
    (36, GPTConfig(layers=24, hidden=2048, heads=16)),  # 1.3B parameters
    (20, GPTConfig(layers=24, hidden=1536, heads=16)),  # 760M
    (10, GPTConfig(layers=24, hidden=1024, heads=16)),  # 350M
    (0, GPTConfig(layers=12, hidden=768, heads=12)),  # 124M
)


def workload(
    device: torch.device, batch_size: int | None = None, *, device_memory_bytes: int | None = None
) -> Workload:
    """Returns a GPT's training step: fp32 on the CPU, else fp32 parameters under bf16 autocast.

    `device_memory_bytes` sizes it for an accelerator of that memory, whatever `device` is.
    """
    if device.type == "cpu" and device_memory_bytes is None:
        return _build_workload(GPT, CPU_GPT, next_token_loss, device, batch_size)
    total_bytes = device_memory_bytes or device_memory(device)[1]
    return _build_workload(
        GPT, gpt_config(total_bytes), autocast_loss, device, batch_size, total_bytes=total_bytes
    )


def llama(
    device: torch.device,
    batch_size: int | None = None,
    *,
    config: LlamaConfig | None = None,
    dtype: torch.dtype | None = None,
) -> Workload:
    """Returns a Llama-shaped training step: small and fp32 on the CPU, else 1B in bf16.

    `config` and `dtype` (of the parameters) replace these choices.
    """
    on_cpu = device.type == "cpu"
    config = config or (CPU_LLAMA if on_cpu else LLAMA_1B)
    dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
    return _build_workload(Llama, config, next_token_loss, device, batch_size, dtype)


def wide_gpt(device: torch.device, batch_size: int | None = None) -> Workload:
    """Returns the step of an fp32 GPT that is wide enough for its matmuls to dominate on a CPU."""
    return _build_workload(GPT, WIDE_GPT, next_token_loss, device, batch_size)


def gpt_config(total_bytes: int) -> GPTConfig:
    """Returns the largest GPT of `GPT_SIZES` that trains on a device with that much memory."""
    return next(config for gib, config in GPT_SIZES if total_bytes >= gib * 2**30)


def overfilling_batch_size(config: DecoderConfig, state_bytes: int, total_bytes: int) -> int:
    """Returns the batch size that needs a little more than the device has without checkpointing.

    `state_bytes` are those of parameters, gradients and optimizer state.
    """
    return max(1, int((_OVERFILL * total_bytes - state_bytes) / config.bytes_per_sample))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each next token; `tokens` is [batch, sequence + 1]."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def autocast_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns `next_token_loss` computed under bf16 autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return next_token_loss(model, tokens)


def _build_workload(
    model_class: Callable[..., Decoder],
    config: DecoderConfig,
    loss_fn: Callable[[nn.Module, Tensor], Tensor],
    device: torch.device,
    batch_size: int | None,
    dtype: torch.dtype = torch.float32,
    total_bytes: int | None = None,
) -> Workload:
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(config).to(dtype)
    batch_size = batch_size or config.batch_size
    if batch_size is None:
        state_bytes = 4 * sum(p.nbytes for p in model.parameters())  # AdamW holds two of the four
        total_bytes = total_bytes or device_memory(device)[1]
        batch_size = overfilling_batch_size(config, state_bytes, total_bytes)
    shape = (batch_size, config.sequence_length + 1)
    generator = torch.Generator().manual_seed(0)
    return Workload(
        model=model,
        loss_fn=loss_fn,
        batch=torch.randint(config.vocabulary, shape, generator=generator).to(device),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        batch_size=batch_size,
        sequence_length=config.sequence_length,
    )


class Decoder(nn.Module):
    """Token embedding, pre-norm blocks, final norm and head; subclasses add the positions."""

    def __init__(self, config: DecoderConfig, block: type[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = norm
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def decode(self, x: Tensor, *block_inputs: Tensor) -> Tensor:
        """Returns logits [batch, sequence, vocabulary] of embeddings [batch, sequence, hidden]."""
        for block in self.blocks:
            x = block(x, *block_inputs)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def init_weights(self) -> None:
        """Draws all matrices from a narrow normal distribution, as GPT-2 does."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)


class GPT(Decoder):
    """GPT-2's architecture: LayerNorm, learned positions, multi-head attention, GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, GPTBlock, nn.LayerNorm(config.hidden))
        self.positions = nn.Embedding(config.sequence_length, config.hidden)
        self.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [batch, sequence, vocabulary] of tokens [batch, sequence]."""
        return self.decode(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])


class GPTBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream [batch, sequence, hidden] after this block."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Llama(Decoder):
    """Llama's architecture: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    rotary: Tensor  # cosines and sines, [2, sequence, head size]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, LlamaBlock, nn.RMSNorm(config.hidden, eps=_RMS_EPSILON))
        head_size = config.hidden // config.heads
        frequencies = 10_000.0 ** (-torch.arange(0, head_size, 2) / head_size)
        angles = torch.outer(torch.arange(config.sequence_length), frequencies).repeat(1, 2)
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [batch, sequence, vocabulary] of tokens [batch, sequence]."""
        return self.decode(self.tokens(tokens), self.rotary[:, : tokens.shape[1]])


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.head_size = hidden // config.heads
        key_value_size = config.key_value_heads * self.head_size
        self.attention_norm = nn.RMSNorm(hidden, eps=_RMS_EPSILON)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, key_value_size, bias=False)
        self.value = nn.Linear(hidden, key_value_size, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=_RMS_EPSILON)
        self.gate = nn.Linear(hidden, config.intermediate, bias=False)
        self.up = nn.Linear(hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Returns the residual stream [batch, sequence, hidden] after this block."""
        y = self.attention_norm(x)
        q, k, v = (
            projection(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(
            _rotate(q, rotary), _rotate(k, rotary), v, is_causal=True, enable_gqa=True
        )
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]
