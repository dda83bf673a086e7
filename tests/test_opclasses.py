"""The table of op classes, held against the ops that this torch has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import tiny
import torch

from sac_search.opclasses import OpClass, classify, packets_of
from sac_search.policy_runtime import HIDDEN_VIEWS

# Registers torch_attn. Where it is missing, so are many other ops of the table.
pytest.importorskip("torch.nn.attention.varlen")

# Packets that no import of torch alone registers, and where they come from.
ELSEWHERE = {
    "flash_attn._flash_attn_forward": "flash-attn 2",
    "flash_attn._flash_attn_varlen_forward": "flash-attn 2",
    "flash_attn_3._flash_attn_forward": "flash-attn 3",
    "flash_attn_3.fwd": "flash-attn 3",
    "flex_attention": "a higher-order op of torch",
    "prims.fma": "torch._inductor",
    "quack._rmsnorm_fwd": "quack-kernels",
    "xformers.efficient_attention_forward_cutlass": "xformers",
    "xformers_flash.flash_fwd": "xformers",
}


def registered() -> dict[str, list[str]]:
    """Returns the packets of this torch, each with its overloads."""
    packets: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        packets.setdefault(f"{namespace}.{packet}", []).append(overload or "default")
    return packets


REGISTERED = registered()


def overload_of(name: str) -> object:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def table() -> Iterator[tuple[OpClass, str]]:
    for op_class in OpClass:
        for packet in packets_of(op_class):
            yield op_class, packet


@pytest.mark.skipif(tiny.RELEASE < (2, 13), reason="some ops of the table are newer")
def test_every_packet_in_the_table_exists() -> None:
    missing = {
        packet
        for _, packet in table()
        if packet not in REGISTERED and f"{packet}_" not in REGISTERED
    }
    assert missing - ELSEWHERE.keys() == set()
    assert ELSEWHERE.keys() <= {packet for _, packet in table()}
    assert torch.ops.higher_order.flex_attention.name() == "flex_attention"


def test_no_packet_has_two_classes() -> None:
    counts = Counter(packet for _, packet in table())
    assert counts.total() == len(counts) > 400


@pytest.mark.parametrize(
    "op_class", sorted(set(OpClass) - {OpClass.OTHER, OpClass.COLLECTIVE}), ids=str
)
def test_every_overload_of_a_packet_has_its_class(op_class: OpClass) -> None:
    for packet in packets_of(op_class):
        assert classify(packet) is op_class
        for overload in REGISTERED.get(packet, ["default"]):
            assert classify(f"{packet}.{overload}") is op_class
        for overload in REGISTERED.get(f"{packet}_", ["default"]):
            assert classify(f"{packet}_.{overload}") is op_class


# Names that look like a class and are none: what packs or converts weights, what asks or sizes,
# gradients, gamma functions, and quantized inference.
NOT_THE_OP = re.compile(
    r"backward|backwards|_grad|gamma|fbgemm|quantized|prepack|_pack|convert|reorder|flatten_weight|"
    r"_reduce_impl|_search|_mode|_choice|_helper|jagged_dummy|hamming|embedding_renorm|_jvp|_vjp|"
    r"compute_linear_combination|no_dropout_inplace|onednn|_philox|_double|commit"
)
LOOKS_LIKE = {
    OpClass.ATTENTION: r"attention|_attn|sdp",
    OpClass.CONVOLUTION: r"conv",
    OpClass.MATMUL: r"mm(_|$)|matmul|linear|rnn|lstm|gru|\.(mv|dot|vdot|einsum|outer|addr|addmv)$",
    OpClass.NORMALIZATION: r"_norm(_|$)|^aten\.norm(_|$)|renorm",
}
EXCEPTIONS = {
    "aten._scaled_mm": OpClass.SCALED_MM,
    "aten._scaled_mm_v2": OpClass.SCALED_MM,
    "aten._scaled_grouped_mm": OpClass.SCALED_MM,
    "aten._scaled_grouped_mm_v2": OpClass.SCALED_MM,
    "aten.upsample_linear1d": OpClass.GATHER,
    "aten.upsample_bilinear2d": OpClass.GATHER,
    "aten._upsample_bilinear2d_aa": OpClass.GATHER,
    "aten.upsample_trilinear3d": OpClass.GATHER,
}


@pytest.mark.parametrize("op_class", LOOKS_LIKE, ids=str)
def test_what_looks_like_a_class_by_its_name_is_in_it(op_class: OpClass) -> None:
    alike = {
        packet
        for packet in REGISTERED
        if packet.startswith(("aten.", "mkldnn.", "mkl."))
        and re.search(LOOKS_LIKE[op_class], packet)
        and not NOT_THE_OP.search(packet)
    }
    wrong = {
        packet: str(classify(packet))
        for packet in alike
        if classify(packet) is not EXCEPTIONS.get(packet, op_class)
    }
    assert wrong == {}
    assert len(alike) > 10


@pytest.mark.parametrize(
    ("name", "op_class"),
    [
        ("aten.mm.default", OpClass.MATMUL),
        ("aten.addmm.default", OpClass.MATMUL),
        ("aten._scaled_mm.default", OpClass.SCALED_MM),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", OpClass.ATTENTION),
        ("aten._scaled_dot_product_flash_attention.default", OpClass.ATTENTION),
        ("aten._scaled_dot_product_efficient_attention.default", OpClass.ATTENTION),
        ("aten._scaled_dot_product_cudnn_attention.default", OpClass.ATTENTION),
        ("torch_attn._varlen_attn.default", OpClass.ATTENTION),
        ("flex_attention", OpClass.ATTENTION),
        ("aten.convolution.default", OpClass.CONVOLUTION),
        ("aten.cudnn_convolution.default", OpClass.CONVOLUTION),
        ("aten.native_layer_norm.default", OpClass.NORMALIZATION),
        ("aten._fused_rms_norm.default", OpClass.NORMALIZATION),
        ("aten.native_batch_norm.default", OpClass.NORMALIZATION),
        ("aten.cudnn_batch_norm.default", OpClass.NORMALIZATION),
        ("aten.gelu.default", OpClass.ACTIVATION),
        ("aten.relu_.default", OpClass.ACTIVATION),
        ("aten.silu.default", OpClass.ACTIVATION),
        ("aten._softmax.default", OpClass.ACTIVATION),
        ("aten.add.Tensor", OpClass.ELEMENTWISE),
        ("aten.__and__.Tensor", OpClass.ELEMENTWISE),
        ("aten.mean.dim", OpClass.REDUCTION),
        ("aten.embedding.default", OpClass.GATHER),
        ("aten.native_dropout.default", OpClass.RANDOM),
        ("aten.bernoulli_.float", OpClass.RANDOM),
        ("aten.clone.default", OpClass.COPY),
        ("aten._to_copy.default", OpClass.COPY),
        ("_c10d_functional.all_gather_into_tensor.default", OpClass.COLLECTIVE),
        ("_c10d_functional.wait_tensor.default", OpClass.COLLECTIVE),
        ("fsdp.all_gather_copy_in.default", OpClass.COLLECTIVE),
        ("aten.view.default", OpClass.OTHER),
        ("aten._fft_r2c.default", OpClass.OTHER),
        ("aten.mm_and_more.default", OpClass.OTHER),
        ("somebody.mm.default", OpClass.OTHER),
        ("mm", OpClass.OTHER),
        ("", OpClass.OTHER),
        (".", OpClass.OTHER),
    ],
)
def test_ops_have_their_class(name: str, op_class: OpClass) -> None:
    assert classify(name) is op_class


@pytest.mark.parametrize(
    ("name", "op_class"),
    [
        ("_flash_attn3_48fe103_dirty.fwd.default", OpClass.ATTENTION),
        ("_vllm_flash_attn3_57c1461.fwd.default", OpClass.ATTENTION),
        ("kernels_sdpa_ab12.forward.default", OpClass.ATTENTION),
        ("_flash_attn3_48fe103_dirty.bwd.default", OpClass.OTHER),
        ("mylib.flash_attention_backward.default", OpClass.OTHER),
        ("_activation_63b875f.silu_and_mul.default", OpClass.OTHER),
    ],
)
def test_attention_under_hashed_namespaces_is_recognised(name: str, op_class: OpClass) -> None:
    assert classify(name) is op_class


def test_every_random_op_of_torch_is_random_or_attention_or_recurrent() -> None:
    # By its tag; what has another class draws only with dropout, and goes by its arguments.
    others = set()
    for packet, overloads in REGISTERED.items():
        if packet.startswith("prims.inductor_"):  # registered once something was compiled
            continue
        for overload in overloads:
            try:
                tags = overload_of(f"{packet}.{overload}").tags  # type: ignore[attr-defined]
            except (AttributeError, RuntimeError):
                continue
            if torch.Tag.nondeterministic_seeded in tags and "backward" not in packet:
                others.add(packet)
    known = {OpClass.RANDOM, OpClass.ATTENTION, OpClass.MATMUL}
    assert {packet for packet in others if classify(packet) not in known} == {
        "aten._cudnn_init_dropout_state",
        "aten._fill_mem_eff_dropout_mask_",
        "aten._flash_attention_forward_no_dropout_inplace",
        "aten._fused_sdp_choice",
        "aten._nested_tensor_softmax_with_shape",
    }
    assert {packet for packet in packets_of(OpClass.RANDOM) if packet in REGISTERED} <= others


def test_hidden_views_are_overloads_of_this_torch() -> None:
    for name in HIDDEN_VIEWS:
        assert str(overload_of(name)) == name
