"""Models of many kinds, tiny, each with a loss and batches. Needs no part of sac-search."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 64
CLASSES = 4
LENGTHS = (24, 40, 8)
"""Of the batches that differ in length, in turn."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a training step is made of."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Any
    """One batch, or a callable that returns one."""


def random_tokens(*shape: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(2, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def random_values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def text(model: nn.Module, *, length: int = 32) -> Shape:
    """Returns the step of a causal language model of transformers."""
    ids = random_tokens(4, length)
    return Shape(model=model, loss_fn=own_loss, batch={"input_ids": ids, "labels": ids})


def images(model: nn.Module, size: int = 32) -> Shape:
    """Returns the step of an image classifier of transformers."""
    labels = torch.arange(8) % CLASSES
    batch = {"pixel_values": random_values(8, 3, size, size), "labels": labels}
    return Shape(model=model, loss_fn=own_loss, batch=batch)


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> Shape:
    """Dropout everywhere; the head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=4, n_head=2, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return text(model)


def llama_autocast() -> Shape:
    """Two query heads to a key; norms that are chains of small ops; bf16 autocast."""
    plain = text(small_llama())

    def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model, batch)

    return Shape(model=plain.model, loss_fn=autocast_loss, batch=plain.batch)


def lora() -> Shape:
    """Adapters with dropout on a frozen base."""
    import peft

    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    return text(peft.get_peft_model(small_llama(), config))


class SwiGLU(torch.autograd.Function):
    """Keeps its inputs alone, and computes the rest again in its backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        by_gate = sigmoid * (1 + gate * (1 - sigmoid))
        return gradient * up * by_gate, gradient * gate * sigmoid


class CustomBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(SwiGLU.apply(self.gate(y), self.up(y)))  # type: ignore[no-untyped-call]


class LinearAttentionBlock(nn.Module):
    """Attention whose state is a sum over the past, updated step by step with a decay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.decay = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        decay = self.decay.sigmoid().unsqueeze(-1)
        state = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
        outputs = []
        for step in range(x.shape[1]):
            state = state * decay + k[:, step].unsqueeze(-1) * v[:, step].unsqueeze(-2)
            outputs.append((q[:, step].unsqueeze(-2) @ state).squeeze(-2))
        return x + self.out(torch.stack(outputs, 1))


class Decoder(nn.Module):
    """Embeds tokens, runs its blocks, and returns logits."""

    def __init__(self, width: int, *blocks: nn.Module, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def custom_function() -> Shape:
    """An autograd.Function of one's own inside each block."""
    model = Decoder(32, *(CustomBlock(32) for _ in range(4)))
    return Shape(model=model, loss_fn=next_token_loss, batch=random_tokens(4, 32))


def mixture() -> Shape:
    """Experts that each token is routed to, with the loss that balances them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    return text(MixtralForCausalLM(config))


def vit() -> Shape:
    """A vision transformer whose blocks are left out at random, sample by sample."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=4, num_attention_heads=2,
        mlp_ratio=4, drop_path_rate=0.3, num_labels=CLASSES,
    )  # fmt: skip
    return images(Dinov2ForImageClassification(config))


def convnext() -> Shape:
    """Stages of unlike sizes, blocks left out at random."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        image_size=32, hidden_sizes=[16, 32], depths=[2, 3], num_stages=2, patch_size=2,
        drop_path_rate=0.2, num_labels=CLASSES,
    )  # fmt: skip
    return images(ConvNextForImageClassification(config))


def resnet() -> Shape:
    """BatchNorm, ReLUs in place, and shortcuts that are added in place."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck",
        num_labels=CLASSES,
    )  # fmt: skip
    shape = images(ResNetForImageClassification(config), size=64)
    for module in shape.model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return shape


def timm_shape(name: str, **options: Any) -> Shape:
    """Returns the step of an image classifier of timm."""
    import timm

    model = timm.create_model(name, num_classes=CLASSES, **options)
    labels = torch.arange(8) % CLASSES

    def image_loss(model: nn.Module, images: Tensor) -> Tensor:
        return functional.cross_entropy(model(images), labels)

    return Shape(model=model, loss_fn=image_loss, batch=random_values(8, 3, 32, 32))


def timm_vit() -> Shape:
    """A vision transformer whose blocks are left out at random."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return timm_shape("vit_tiny_patch16_224", drop_path_rate=0.3, **options)


def timm_convnext() -> Shape:
    """Stages of unlike sizes."""
    options = {"depths": (2, 2, 2, 1), "dims": (16, 24, 32, 40)}
    return timm_shape("convnext_atto", drop_path_rate=0.2, **options)


def flux() -> Shape:
    """Blocks of two kinds: with text and image apart, then with both as one sequence."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    places = torch.arange(64.0)
    batch = {
        "hidden_states": random_values(2, 64, 4),
        "encoder_hidden_states": random_values(2, 16, 32),
        "pooled_projections": random_values(2, 16),
        "timestep": torch.tensor([0.25, 0.75]),
        "img_ids": torch.stack([torch.zeros(64), places // 8, places % 8], -1),
        "txt_ids": torch.zeros(16, 3),
    }

    def flow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(**batch).sample, batch["hidden_states"])

    return Shape(model=model.train(), loss_fn=flow_loss, batch=batch)


def mamba() -> Shape:
    """A state-space model, its scan a loop over positions."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=3, use_cache=False
    )
    return text(MambaForCausalLM(config), length=12)


def linear_attention() -> Shape:
    """Linear attention, its state carried from position to position."""
    model = Decoder(16, *(LinearAttentionBlock(16) for _ in range(3)))
    return Shape(model=model, loss_fn=next_token_loss, batch=random_tokens(4, 12))


def lengths() -> Shape:
    """Batches of other lengths in turn, and a vocabulary that outweighs the layers."""
    model = Decoder(32, *(CustomBlock(32) for _ in range(6)), vocabulary=512)
    batches = itertools.cycle([random_tokens(4, n, vocabulary=512) for n in LENGTHS])
    return Shape(model=model, loss_fn=next_token_loss, batch=lambda: next(batches))


def t5() -> Shape:
    """An encoder and a decoder with masks, called by keyword; layers share a position bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        dropout_rate=0.1, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    mask = (torch.arange(32) < torch.tensor([[32], [20], [8], [26]])).long()
    labels = random_tokens(4, 24)
    batch = {
        "input_ids": random_tokens(4, 32),
        "attention_mask": mask,
        "labels": labels.masked_fill(torch.arange(24) >= 20, -100),
        "decoder_attention_mask": (torch.arange(24) < 20).long().expand(4, -1),
    }
    return Shape(model=T5ForConditionalGeneration(config), loss_fn=own_loss, batch=batch)


SHAPES: dict[str, tuple[Callable[[], Shape], tuple[str, ...]]] = {
    "GPT-2 with dropout": (gpt2, ("transformers",)),
    "Llama under autocast": (llama_autocast, ("transformers",)),
    "LoRA": (lora, ("transformers", "peft")),
    "custom function": (custom_function, ()),
    "mixture of experts": (mixture, ("transformers",)),
    "vision transformer": (vit, ("transformers",)),
    "ConvNeXt": (convnext, ("transformers",)),
    "ResNet": (resnet, ("transformers",)),
    "vision transformer of timm": (timm_vit, ("timm",)),
    "ConvNeXt of timm": (timm_convnext, ("timm",)),
    "Flux": (flux, ("diffusers",)),
    "Mamba": (mamba, ("transformers",)),
    "linear attention": (linear_attention, ()),
    "batches of other lengths": (lengths, ()),
    "T5": (t5, ("transformers",)),
}
"""Each kind, and the libraries that it needs."""


def build(name: str) -> Shape:
    """Returns the shape with the same weights every time, in training mode."""
    torch.manual_seed(0)
    shape = SHAPES[name][0]()
    shape.model.train()
    return shape
