"""Published rates of accelerators, and what an op would take on one by them.

A roofline: an op takes as long as its arithmetic at the achievable rate, or as its bytes at the
achievable bandwidth, whichever is longer, and the launch of a kernel on top. That is right within
a factor for large ops, and tells nothing of a device's quirks. Needs no device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sac_search.errors import UsageError
from sac_search.opclasses import OpClass, classify

ACHIEVABLE_FLOPS_FRACTION = 0.7
"""Of the peak of tensor cores: what large matmuls reach under their power limit."""
ACHIEVABLE_BANDWIDTH_FRACTION = 0.8
"""Of the memory's peak: what a streaming kernel reaches over reads and writes."""
LAUNCH_SECONDS = 4e-6
"""From the start of one small kernel to that of the next, when the host keeps up."""

# They take memory, or a constant, without running a kernel.
_NO_KERNEL = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty"}
    | {"aten.new_empty_strided", "aten.set_", "aten.resize_", "aten.lift_fresh"}
)
# They overwrite their first argument without reading it.
_OVERWRITES = frozenset(
    {"aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.bernoulli_"}
    | {"aten.random_", "aten.exponential_"}
)
# In backward as many matmuls as five to two in forward: scores once more, and four gradients.
_ATTENTION_BACKWARD_FACTOR = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a vendor publishes of an accelerator. Dense: without structured sparsity."""

    name: str
    """What it is called here."""
    half_flops: float
    """Of bf16 and fp16 matmuls that add in fp32, per second. On V100 and T4 of fp16 alone."""
    tf32_flops: float | None
    """Of fp32 matmuls in TF32 (on AMD in XF32), per second; None where there is no such thing."""
    fp32_flops: float
    """Of fp32 without it, per second."""
    bandwidth_bytes: float
    """Bytes that go in or out of its memory per second."""
    memory_bytes: int
    """Bytes of memory that torch reports; a little less than the name says."""
    source: str
    """Where the rates come from."""


def _rates(
    name: str,
    half_tflops: float,
    tf32_tflops: float | None,
    fp32_tflops: float,
    bandwidth_gb: float,
    memory_gib: float,
    source: str,
) -> DeviceRates:
    return DeviceRates(
        name=name,
        half_flops=half_tflops * 1e12,
        tf32_flops=None if tf32_tflops is None else tf32_tflops * 1e12,
        fp32_flops=fp32_tflops * 1e12,
        bandwidth_bytes=bandwidth_gb * 1e9,
        memory_bytes=round(memory_gib * 2**30),
        source=source,
    )


# Name, TFLOP/s in half precision, TF32 and fp32, GB/s, GiB. Datasheets that give the sparse rate
# alone are halved.
DEVICE_RATES = (
    _rates("B200", 2250, 1100, 75, 7700, 178.3, "NVIDIA HGX B200 datasheet"),
    _rates("H200", 989.4, 494.7, 66.9, 4800, 139.8, "NVIDIA H200 datasheet (SXM)"),
    _rates("H100 SXM", 989.4, 494.7, 66.9, 3350, 79.2, "NVIDIA H100 datasheet"),
    _rates("H100 NVL", 835.5, 417.5, 60, 3900, 93.1, "NVIDIA H100 NVL datasheet"),
    _rates("H100 PCIe", 756, 378, 51, 2000, 79.2, "NVIDIA H100 datasheet"),
    _rates("A100 80GB", 312, 156, 19.5, 2039, 79.2, "NVIDIA A100 datasheet (SXM)"),
    _rates("A100 40GB", 312, 156, 19.5, 1555, 39.4, "NVIDIA A100 datasheet"),
    _rates("L40S", 362, 183, 91.6, 864, 44.4, "NVIDIA L40S datasheet"),
    _rates("L4", 121, 60, 30.3, 300, 22.0, "NVIDIA L4 datasheet"),
    _rates("A40", 149.7, 74.8, 37.4, 696, 44.4, "NVIDIA A40 datasheet"),
    _rates("A10", 125, 62.5, 31.2, 600, 22.0, "NVIDIA A10 datasheet"),
    _rates("A10G", 70, 35, 35, 600, 22.0, "NVIDIA A10G datasheet"),
    _rates("V100", 125, None, 15.7, 900, 31.7, "NVIDIA V100 datasheet (SXM2, 32 GB)"),
    _rates("V100 16GB", 125, None, 15.7, 900, 15.8, "NVIDIA V100 datasheet (SXM2)"),
    _rates("T4", 65, None, 8.1, 320, 14.6, "NVIDIA T4 datasheet"),
    _rates("RTX 5090", 209.5, 104.8, 104.8, 1792, 31.4, "NVIDIA RTX Blackwell whitepaper"),
    _rates("RTX 4090", 165.2, 82.6, 82.6, 1008, 23.6, "NVIDIA Ada architecture whitepaper"),
    _rates("RTX 3090", 71, 35.6, 35.6, 936, 23.7, "NVIDIA GA102 architecture whitepaper"),
    _rates("MI325X", 1307.4, 653.7, 163.4, 6000, 255.7, "AMD Instinct MI325X datasheet"),
    _rates("MI300X", 1307.4, 653.7, 163.4, 5300, 191.7, "AMD Instinct MI300X datasheet"),
)


# One for each size of memory that people have.
_COMMON = ("T4", "RTX 4090", "RTX 5090", "L40S", "H100 SXM", "H200", "B200")


def find_rates(name: str) -> DeviceRates:
    """Returns the rates of the accelerator of that name; case, spaces and dashes do not matter.

    The beginning of a name will do (`H100`); the first in the table has it then.

    Raises:
        UsageError: the table does not know it.
    """
    wanted = _plain(name)
    exact = [r for r in DEVICE_RATES if _plain(r.name) == wanted]
    beginning = [
        rates for rates in DEVICE_RATES if wanted and _plain(rates.name).startswith(wanted)
    ]
    if exact or beginning:
        return (exact or beginning)[0]
    known = ", ".join(rates.name for rates in DEVICE_RATES)
    raise UsageError(f"the rates of {name!r} are not known; name one of: {known}")


def default_rates(budget_bytes: int) -> DeviceRates:
    """Returns the rates of a common accelerator whose memory holds the budget.

    The smallest of them; the largest when none is large enough.
    """
    common = sorted((find_rates(name) for name in _COMMON), key=lambda rates: rates.memory_bytes)
    fitting = (rates for rates in common if rates.memory_bytes >= budget_bytes)
    return next(fitting, common[-1])


def _plain(name: str) -> str:
    return re.sub(r"[\W_]|nvidia|geforce|amd|instinct", "", name.lower())


class StepPrice(TorchDispatchMode):
    """Adds up, in `seconds`, what all ops under it would take on a device of these rates."""

    supports_higher_order_operators = True

    def __init__(self, rates: DeviceRates) -> None:
        super().__init__()
        self.seconds = 0.0
        self._rates = rates

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.seconds += op_seconds(func, args, kwargs, output, self._rates)
        return output


def op_seconds(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, rates: DeviceRates
) -> float:
    """Returns the seconds that one call would take, from its arguments and what it returned.

    Views, allocations and the like cost nothing.
    """
    packet = _packet_name(func)
    written = _written(func, args, kwargs)
    inputs = _tensors((args, kwargs))
    known = {_storage_key(tensor) for tensor in inputs}
    fresh = [tensor for tensor in _tensors(output) if _storage_key(tensor) not in known]
    if packet in _NO_KERNEL or not (fresh or written):
        return 0.0
    moved_bytes = _moved_bytes(packet, inputs, written, fresh)
    bandwidth = rates.bandwidth_bytes * ACHIEVABLE_BANDWIDTH_FRACTION
    flops = _flops(func, args, kwargs, output)
    achievable_flops = _peak_flops(packet, inputs, rates) * ACHIEVABLE_FLOPS_FRACTION
    return LAUNCH_SECONDS + max(flops / achievable_flops, moved_bytes / bandwidth)


# --- bytes ----------------------------------------------------------------------------------------


def _moved_bytes(
    packet: str,
    inputs: list[torch.Tensor],
    written: list[torch.Tensor],
    fresh: list[torch.Tensor],
) -> int:
    others = [tensor for tensor in inputs if all(tensor is not other for other in written)]
    if packet.endswith("_like") or packet.startswith("aten.new_"):
        moved = fresh
    elif classify(packet) is OpClass.GATHER:
        # Of the tensor that is indexed, no more than what comes out or goes in.
        moved = [*others, *others] if written else [*inputs[1:], *fresh, *fresh]
    elif packet in _OVERWRITES:
        moved = [*others, *written]
    else:
        moved = [*inputs, *written, *fresh]
    return sum(_bytes(tensor) for tensor in moved)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [
        tensor
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = {id(x): x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)}
    return list(found.values())


def _bytes(tensor: torch.Tensor) -> int:
    size_bytes = tensor.numel() * tensor.element_size()
    try:
        # An expanded tensor has more elements than its storage.
        return min(size_bytes, int(tensor.untyped_storage().nbytes()))
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return size_bytes


def _storage_key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


# --- arithmetic -----------------------------------------------------------------------------------


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    attention = _attention_flops(func, args, kwargs)
    if attention is not None:
        return attention
    packet = getattr(func, "overloadpacket", func)  # a higher-order op is its own
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    name = _packet_name(func)
    if name == "aten._addmm_activation":
        return _matmul_flops(args[1], args[2])
    if name == "aten._grouped_mm":
        # The columns of a single right side are dealt out to the groups on the left.
        groups = args[0].shape[0] if args[0].dim() > args[1].dim() else 1
        return _matmul_flops(args[0], args[1]) / groups
    return 0.0


def _matmul_flops(left: torch.Tensor, right: torch.Tensor) -> float:
    return 2.0 * left.numel() * right.shape[-1]


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Returns the arithmetic of a fused attention, or None for any other op.

    Unlike torch's counter it knows the kernel of the CPU, by which a fake step runs, and leaves out
    the half that a causal kernel skips.
    """
    if not _packet_name(func).startswith("aten._scaled_dot_product_"):
        return None
    named = {argument.name: value for argument, value in _arguments(func, args, kwargs)}
    query, value = named["query"], named["value"]
    scores = math.prod(query.shape[:-1]) * value.shape[-2]
    forward: float = 2.0 * scores * (query.shape[-1] + value.shape[-1])
    if named.get("is_causal"):
        forward /= 2
    is_backward = "grad_out" in named or "grad_out_" in named
    return forward * (_ATTENTION_BACKWARD_FACTOR if is_backward else 1.0)


def _peak_flops(packet: str, inputs: list[torch.Tensor], rates: DeviceRates) -> float:
    dtype = next((x.dtype for x in inputs if x.is_floating_point()), torch.float32)
    if dtype.itemsize <= 2:  # fp8 would be twice as fast where there is such a kernel
        return rates.half_flops
    if dtype is torch.float32 and rates.tf32_flops is not None and _allows_tf32(packet):
        return rates.tf32_flops
    return rates.fp32_flops


def _allows_tf32(packet: str) -> bool:
    # Convolutions may by default, matmuls may not.
    backend: Any = torch.backends.cudnn if "convolution" in packet else torch.backends.cuda.matmul
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # the workload set the newer settings per backend, which exclude this one
        setting = backend.conv if "convolution" in packet else backend
        return bool(setting.fp32_precision == "tf32")


# --- the op ---------------------------------------------------------------------------------------


def _packet_name(func: Any) -> str:
    return ".".join(str(func).split(".")[:2])


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[tuple[Any, Any]]:
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield argument, value
