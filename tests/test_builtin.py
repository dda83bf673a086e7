"""The built-in models and how their size follows the device's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sac_search import builtin
from sac_search.builtin import (
    GPT,
    GPT_SIZES,
    DecoderConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    autocast_loss,
    gpt_config,
    next_token_loss,
    overfilling_batch_size,
)

GIB = 2**30
META = torch.device("meta")
SMALL_GPT = GPTConfig(layers=2, hidden=128, heads=2, vocabulary=32, sequence_length=64)
SMALL_LLAMA = LlamaConfig(
    layers=2,
    hidden=128,
    heads=4,
    key_value_heads=1,
    intermediate=256,
    vocabulary=32,
    sequence_length=64,
)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build_on_meta(config: GPTConfig) -> GPT:
    with META:
        return GPT(config)


@pytest.mark.parametrize(
    ("gib", "millions"),
    [
        (4, 136),
        (8, 136),
        (12, 370),
        (16, 370),
        (22.1, 782),
        (39.4, 1345),
        (79.1, 1345),
        (180, 1345),
    ],
)
def test_gpt_config_follows_memory(gib: float, millions: int) -> None:
    parameters = count_parameters(build_on_meta(gpt_config(int(gib * GIB))))
    assert round(parameters / 1e6) == millions


def test_gpt_sizes_grow_with_memory() -> None:
    thresholds = [gib for gib, _ in GPT_SIZES]
    parameters = [count_parameters(build_on_meta(config)) for _, config in GPT_SIZES]
    assert thresholds == sorted(set(thresholds), reverse=True)
    assert thresholds[-1] == 0
    assert parameters == sorted(set(parameters), reverse=True)


@pytest.mark.parametrize("gib", [6, 8, 10, 16, 20, 24, 36, 48, 80, 141, 192])
def test_gpt_fits_only_with_checkpointing(gib: int) -> None:
    total_bytes = gib * GIB
    config = gpt_config(total_bytes)
    parameter_bytes = 4 * count_parameters(build_on_meta(config))
    batch_size = overfilling_batch_size(config, 4 * parameter_bytes, total_bytes)

    plain = 4 * parameter_bytes + batch_size * config.bytes_per_sample
    layer_inputs = config.layers * config.sequence_length * 4 * config.hidden
    one_layer = config.sequence_length * config.block_bytes_per_token
    loss = config.sequence_length * 12 * config.vocabulary
    full = 4 * parameter_bytes + batch_size * (layer_inputs + one_layer + loss)
    optimizer_step = 5 * parameter_bytes  # a temporary of each parameter

    assert total_bytes <= plain <= 1.15 * total_bytes
    assert max(full, optimizer_step) <= 0.9 * total_bytes
    assert plain - full >= 0.25 * total_bytes


def test_overfilling_batch_size_is_never_zero() -> None:
    assert overfilling_batch_size(SMALL_GPT, state_bytes=2 * GIB, total_bytes=GIB) == 1


def saved_bytes(block: nn.Module, inputs: tuple[Tensor, ...], autocast: bool) -> int:
    """Returns the bytes of all tensors that `block` keeps for backward, each storage once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        output = block(*inputs)
    del output
    return sum(sizes.values())


def gpt_block() -> tuple[DecoderConfig, nn.Module, tuple[Tensor, ...]]:
    return SMALL_GPT, GPT(SMALL_GPT).blocks[0], ()


def llama_block() -> tuple[DecoderConfig, nn.Module, tuple[Tensor, ...]]:
    model = Llama(SMALL_LLAMA)
    block = model.blocks[0]
    # On the CPU an RMSNorm is a chain of fp32 ops. Accelerators fuse it, and then it saves what a
    # LayerNorm saves.
    block.attention_norm = nn.LayerNorm(SMALL_LLAMA.hidden, bias=False)
    block.mlp_norm = nn.LayerNorm(SMALL_LLAMA.hidden, bias=False)
    return SMALL_LLAMA, block.bfloat16(), (model.rotary.bfloat16(),)


@pytest.mark.parametrize("build_block", [gpt_block, llama_block])
def test_block_bytes_per_token_is_what_a_block_saves(
    build_block: Callable[[], tuple[DecoderConfig, nn.Module, tuple[Tensor, ...]]],
) -> None:
    config, block, rest = build_block()
    dtype = next(block.parameters()).dtype

    def measure(batch_size: int) -> int:
        shape = (batch_size, config.sequence_length, config.hidden)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        return saved_bytes(block, (x, *rest), autocast=dtype == torch.float32)

    # The difference of two batches, since weights are saved too.
    per_token = (measure(4) - measure(2)) / (2 * config.sequence_length)
    statistics = 2 * 2 * dtype.itemsize + 4 * config.heads  # of both norms and of attention
    assert per_token == config.block_bytes_per_token + statistics


def test_accelerators_get_a_large_gpt_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "device_memory", lambda device: (0, 80 * GIB))
    workload = builtin.workload(META)
    assert count_parameters(workload.model) > 1e9
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}
    assert workload.loss_fn is autocast_loss
    assert workload.batch_size is not None
    assert workload.batch_size > 20
    assert workload.batch.shape == (workload.batch_size, 1025)
    assert workload.batch.device == META


def test_accelerators_get_a_large_llama_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "device_memory", lambda device: (0, 80 * GIB))
    workload = builtin.llama(META)
    assert count_parameters(workload.model) == pytest.approx(1.1e9, rel=0.02)
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    assert workload.loss_fn is next_token_loss
    assert workload.batch_size is not None
    assert workload.batch.shape == (workload.batch_size, 2049)


def test_llama_takes_config_and_dtype() -> None:
    workload = builtin.llama(
        torch.device("cpu"), batch_size=3, config=SMALL_LLAMA, dtype=torch.bfloat16
    )
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    assert workload.batch.shape == (3, SMALL_LLAMA.sequence_length + 1)
    assert workload.run_step().isfinite()


@pytest.mark.parametrize("model", [GPT(SMALL_GPT), Llama(SMALL_LLAMA)], ids=["gpt", "llama"])
def test_later_tokens_do_not_change_earlier_logits(model: nn.Module) -> None:
    tokens = torch.arange(16).repeat(2, 1)
    changed = tokens.clone()
    changed[:, 8] = 31
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert not torch.allclose(after[:, 8:], before[:, 8:])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = Llama(SMALL_LLAMA).rotary
    query, key = torch.randn(
        2, 1, 1, 1, rotary.shape[-1], generator=torch.Generator().manual_seed(0)
    )

    def score(query_position: int, key_position: int) -> Tensor:
        rotated_query = builtin._rotate(query, rotary[:, query_position])
        rotated_key = builtin._rotate(key, rotary[:, key_position])
        return (rotated_query * rotated_key).sum()

    torch.testing.assert_close(score(5, 2), score(43, 40), rtol=1e-4, atol=1e-4)
    assert (score(5, 2) - score(6, 2)).abs() > 0.01


def test_autocast_loss_computes_in_bf16() -> None:
    model = GPT(SMALL_GPT)
    dtypes = []
    model.head.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    tokens = torch.zeros(1, 9, dtype=torch.long)
    assert autocast_loss(model, tokens).dtype == torch.float32
    assert next_token_loss(model, tokens).dtype == torch.float32
    assert dtypes == [torch.bfloat16, torch.float32]


def test_the_wide_gpt_is_wide_and_trains() -> None:
    workload = builtin.wide_gpt(torch.device("cpu"), batch_size=1)
    assert workload.model.blocks[0].attention_norm.weight.numel() >= 512
    assert torch.isfinite(workload.run_step())
