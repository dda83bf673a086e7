"""The table of op classes: which role an operator overload plays, on any device.

Names only, no torch: `aten.mm.default` is matmul on every device, while attention has a name per
kernel. An op that the table does not know is `other`: it is listed, and recomputed.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache


class OpClass(enum.StrEnum):
    """The role of an op."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    NORMALIZATION = "normalization"
    ACTIVATION = "activation"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    GATHER = "gather"
    RANDOM = "random"
    COPY = "copy"
    COLLECTIVE = "collective"
    SCALED_MM = "scaled_mm"
    OTHER = "other"


# Packet names (`aten.mm`), per class. In-place forms (a trailing underscore) fall in the class of
# the op that they are the form of. Source: native_functions.yaml of torch 2.9 to 2.13.
_PACKETS: dict[OpClass, str] = {
    OpClass.MATMUL: """
        aten.mm aten.addmm aten.bmm aten.baddbmm aten.addbmm aten.addmv aten.mv aten.dot aten.vdot
        aten.matmul aten.linear aten.addr aten.outer aten._grouped_mm aten._foreach_mm aten.einsum
        aten.chain_matmul aten.linalg_matmul
        aten.bilinear aten._trilinear aten._addmm_activation aten.mkldnn_linear
        aten._int_mm aten._sparse_mm aten._sparse_addmm aten._sparse_sparse_matmul aten.hspmm
        aten.smm aten.sspaddmm aten.sparse_sampled_addmm aten._cslt_sparse_mm
        aten._sparse_semi_structured_mm
        aten._sparse_semi_structured_addmm aten._sparse_semi_structured_linear
        aten._weight_int8pack_mm aten._weight_int4pack_mm aten._weight_int4pack_mm_for_cpu
        aten._weight_int4pack_mm_with_scales_and_zeros aten._dyn_quant_matmul_4bit
        aten._mixed_dtypes_linear
        mkldnn._linear_pointwise mkl._mkl_linear
        aten.lstm aten.gru aten.rnn_tanh aten.rnn_relu aten.lstm_cell aten.gru_cell
        aten.rnn_tanh_cell aten.rnn_relu_cell aten._cudnn_rnn aten.miopen_rnn aten._lstm_mps
        aten.mkldnn_rnn_layer aten._thnn_fused_lstm_cell aten._thnn_fused_gru_cell
    """,
    OpClass.SCALED_MM: """
        aten._scaled_mm aten._scaled_grouped_mm aten._scaled_mm_v2 aten._scaled_grouped_mm_v2
    """,
    OpClass.ATTENTION: """
        aten.scaled_dot_product_attention aten._scaled_dot_product_attention_math
        aten._scaled_dot_product_attention_math_for_mps
        aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu
        aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention
        aten._scaled_dot_product_fused_attention_overrideable
        aten._flash_attention_forward aten._efficient_attention_forward
        aten._cudnn_attention_forward aten._native_multi_head_attention
        aten._triton_multi_head_attention aten._triton_scaled_dot_attention
        flash_attn._flash_attn_forward flash_attn._flash_attn_varlen_forward
        flash_attn_3._flash_attn_forward flash_attn_3.fwd
        xformers.efficient_attention_forward_cutlass xformers_flash.flash_fwd
        torch_attn._varlen_attn flex_attention
    """,
    OpClass.CONVOLUTION: """
        aten.convolution aten._convolution aten.convolution_overrideable aten.cudnn_convolution
        aten.cudnn_convolution_transpose aten.cudnn_convolution_relu
        aten.cudnn_convolution_add_relu aten.mkldnn_convolution aten.miopen_convolution
        aten.miopen_convolution_transpose aten.miopen_depthwise_convolution
        aten.miopen_convolution_relu aten.miopen_convolution_add_relu
        aten._nnpack_spatial_convolution
        aten._conv_depthwise2d aten.conv_depthwise3d aten.slow_conv3d aten.slow_conv3d_forward
        aten._slow_conv2d_forward aten.thnn_conv2d aten.slow_conv_dilated2d
        aten.slow_conv_dilated3d aten.slow_conv_transpose2d aten.slow_conv_transpose3d
        aten.conv1d aten.conv2d aten.conv3d aten.conv_transpose1d aten.conv_transpose2d
        aten.conv_transpose3d aten.conv_tbc aten._mps_convolution
        aten._mps_convolution_transpose
        mkldnn._convolution_pointwise mkldnn._convolution_transpose_pointwise
    """,
    OpClass.NORMALIZATION: """
        aten.native_layer_norm aten.layer_norm aten.native_group_norm aten.group_norm
        aten.native_batch_norm aten._native_batch_norm_legit
        aten._native_batch_norm_legit_no_training
        aten._native_batch_norm_legit_functional aten.batch_norm aten._batch_norm_impl_index
        aten._batch_norm_with_update aten._batch_norm_with_update_functional
        aten._batch_norm_no_update aten.cudnn_batch_norm aten.miopen_batch_norm
        aten.batch_norm_stats aten.batch_norm_elemt aten.batch_norm_gather_stats
        aten.batch_norm_gather_stats_with_counts aten.batch_norm_update_stats
        aten.instance_norm aten.rms_norm aten._fused_rms_norm
        aten.linalg_vector_norm aten.linalg_matrix_norm aten.linalg_norm aten.frobenius_norm
        aten.nuclear_norm aten.native_norm aten._foreach_norm aten.norm_except_dim
        aten._weight_norm_interface aten._weight_norm aten.norm aten.renorm quack._rmsnorm_fwd
    """,
    OpClass.ACTIVATION: """
        aten.relu aten.relu6 aten.gelu aten.silu aten.mish aten.sigmoid aten.tanh aten.softplus
        aten.elu aten.celu aten.selu aten.leaky_relu aten.prelu aten._prelu_kernel aten.hardswish
        aten.hardtanh aten.hardsigmoid aten.hardshrink aten.softshrink aten.threshold
        aten.log_sigmoid aten.log_sigmoid_forward aten.glu aten.logit
        aten.softmax aten._softmax aten._safe_softmax aten.log_softmax aten._log_softmax
        aten._masked_softmax aten._fused_moving_avg_obs_fq_helper
    """,
    OpClass.ELEMENTWISE: """
        aten.add aten.sub aten.rsub aten.mul aten.div aten.true_divide aten.floor_divide
        aten.remainder aten.fmod aten.neg aten.abs aten.sign aten.sgn aten.pow aten.sqrt aten.rsqrt
        aten.square aten.exp aten.exp2 aten.expm1 aten.log aten.log2 aten.log10 aten.log1p
        aten.logaddexp aten.sin aten.cos aten.tan aten.asin aten.acos aten.atan aten.atan2
        aten.sinh aten.cosh aten.erf aten.erfc aten.erfinv aten.reciprocal aten.clamp
        aten.clamp_min aten.clamp_max aten.clip aten.maximum aten.minimum aten.fmax aten.fmin
        aten.where aten.lerp aten.addcmul aten.addcdiv aten.masked_fill aten.eq aten.ne aten.lt
        aten.le aten.gt aten.ge aten.logical_and aten.logical_or aten.logical_not aten.logical_xor
        aten.bitwise_and aten.bitwise_or aten.bitwise_not aten.bitwise_xor aten.isnan aten.isinf
        aten.isfinite aten.nan_to_num aten.floor aten.ceil aten.round aten.trunc aten.frac
        aten.positive aten.tril aten.triu aten.conj_physical aten.polar aten.complex
        aten.__and__ aten.__or__ aten.xlogy aten.special_xlogy aten.hypot aten.copysign
        aten._foreach_add aten._foreach_mul aten.bitwise_left_shift aten.bitwise_right_shift
        prims.convert_element_type prims.fma
    """,
    OpClass.REDUCTION: """
        aten.sum aten.mean aten.prod aten.var aten.std aten.var_mean aten.std_mean aten.amax
        aten.amin aten.aminmax aten.max aten.min aten.argmax aten.argmin aten.any aten.all
        aten.logsumexp aten.cumsum aten.cumprod aten.logcumsumexp aten.cummax aten.cummin
        aten.topk aten.sort aten.argsort aten.median aten.kthvalue aten.count_nonzero
        aten.bincount aten.histc aten.nansum aten.nanmean aten.unique_dim aten._unique2
        aten._adaptive_avg_pool2d aten._adaptive_avg_pool3d aten.adaptive_max_pool2d
        aten.avg_pool1d aten.avg_pool2d aten.avg_pool3d aten.max_pool2d_with_indices
        aten.max_pool3d_with_indices aten.max_pool2d aten.mkldnn_max_pool2d
        aten.nll_loss aten.nll_loss_forward aten.nll_loss2d_forward aten.cross_entropy_loss
        aten.mse_loss aten.l1_loss aten.smooth_l1_loss aten.huber_loss aten.binary_cross_entropy
        aten.binary_cross_entropy_with_logits aten._ctc_loss aten.kl_div aten.trace
    """,
    OpClass.GATHER: """
        aten.embedding aten._embedding_bag aten._embedding_bag_forward_only aten.gather
        aten.index aten.index_select aten.index_add aten.index_put aten.index_copy aten.index_fill
        aten._index_put_impl aten.scatter aten.scatter_add aten.scatter_reduce aten.take
        aten.take_along_dim aten.masked_select aten.masked_scatter aten.nonzero
        aten.nonzero_static aten.one_hot aten.searchsorted aten.bucketize
        aten.segment_reduce aten.grid_sampler aten.grid_sampler_2d aten.grid_sampler_3d
        aten._unsafe_index aten._unsafe_index_put aten.upsample_nearest1d
        aten.upsample_nearest2d aten.upsample_nearest3d aten._upsample_nearest_exact1d
        aten._upsample_nearest_exact2d aten._upsample_nearest_exact3d
        aten.upsample_bilinear2d aten._upsample_bilinear2d_aa aten.upsample_bicubic2d
        aten._upsample_bicubic2d_aa aten.upsample_linear1d aten.upsample_trilinear3d
    """,
    OpClass.RANDOM: """
        aten.native_dropout aten.dropout aten.feature_dropout aten.alpha_dropout
        aten.feature_alpha_dropout
        aten._fused_dropout aten.bernoulli aten.rand aten.randn aten.randint aten.rand_like
        aten.randn_like aten.randint_like aten.randperm aten.normal aten.normal_functional
        aten.uniform aten.exponential aten.geometric aten.cauchy aten.log_normal aten.random
        aten.multinomial aten.poisson aten.binomial aten.rrelu_with_noise
        aten.rrelu_with_noise_functional aten.rrelu aten._standard_gamma aten._sample_dirichlet
        prims.normal prims.uniform rngprims.philox_rand
    """,
    OpClass.COPY: """
        aten.clone aten.copy aten._to_copy aten.contiguous aten.cat aten.stack aten.repeat
        aten.repeat_interleave aten.tile aten.constant_pad_nd aten.reflection_pad1d
        aten.reflection_pad2d aten.reflection_pad3d aten.replication_pad1d
        aten.replication_pad2d aten.replication_pad3d aten._pad_enum aten._pad_circular aten.roll
        aten.flip aten.fill aten.full aten.full_like aten.zeros aten.zeros_like aten.ones
        aten.ones_like aten.empty aten.empty_like aten.empty_strided aten.new_empty
        aten.new_empty_strided aten.new_full aten.new_zeros aten.new_ones aten.zero
        aten.scalar_tensor aten.arange aten.linspace aten.eye aten.lift_fresh_copy
        aten.select_scatter
        aten.slice_scatter aten.diagonal_scatter aten.as_strided_scatter aten.narrow_copy
        aten.pixel_shuffle aten.pixel_unshuffle aten.channel_shuffle aten._nested_tensor_from_mask
        aten._to_dense aten.col2im aten.im2col aten.tril_indices aten.triu_indices aten.view_copy
        aten.permute_copy aten.expand_copy aten.unbind_copy aten.split_copy
        aten.split_with_sizes_copy aten.set aten.resize aten._local_scalar_dense
        aten._resize_output
    """,
}
# Whole namespaces, where every op plays the same role.
_NAMESPACES = {
    "_c10d_functional": OpClass.COLLECTIVE,
    "_c10d_functional_autograd": OpClass.COLLECTIVE,
    "c10d": OpClass.COLLECTIVE,
    "c10d_functional": OpClass.COLLECTIVE,
    "symm_mem": OpClass.COLLECTIVE,
    "fsdp": OpClass.COLLECTIVE,
    "_dtensor": OpClass.COLLECTIVE,
    "cplib": OpClass.COLLECTIVE,  # context parallelism
}

_CLASS_OF_PACKET: dict[str, OpClass] = {
    packet: op_class for op_class, text in _PACKETS.items() for packet in text.split()
}
# Kernels published under hashed namespaces (`flash_attn_3_abc1234.fwd`) keep a telling name.
_ATTENTION_PATTERN = re.compile(
    r"flash_?attn|flash_attention|efficient_attention|sdpa|flex_attention"
)


_BACKWARD_PATTERN = re.compile(r"backward|bwd")


@lru_cache(maxsize=4096)
def classify(op_name: str) -> OpClass:
    """Returns the class of an op from its full name, such as `aten.mm.default`.

    A bare packet (`aten.mm`) and an in-place form (`aten.relu_.default`) are understood as well.
    """
    namespace, _, rest = op_name.partition(".")
    packet = rest.partition(".")[0]
    if not packet:  # a higher-order op has no namespace
        namespace, packet = "", namespace
    if namespace in _NAMESPACES:
        return _NAMESPACES[namespace]
    qualified = f"{namespace}.{packet}" if namespace else packet
    for candidate in (qualified, qualified.removesuffix("_")):
        if candidate in _CLASS_OF_PACKET:
            return _CLASS_OF_PACKET[candidate]
    if namespace != "aten" and _is_attention_kernel(qualified):
        return OpClass.ATTENTION
    return OpClass.OTHER


def _is_attention_kernel(qualified: str) -> bool:
    return bool(_ATTENTION_PATTERN.search(qualified) and not _BACKWARD_PATTERN.search(qualified))


def packets_of(op_class: OpClass) -> frozenset[str]:
    """Returns the packet names that the table holds for `op_class`."""
    return frozenset(packet for packet, known in _CLASS_OF_PACKET.items() if known is op_class)
