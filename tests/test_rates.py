"""What an op would take, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sac_search.errors import UsageError
from sac_search.rates import (
    ACHIEVABLE_BANDWIDTH_FRACTION,
    ACHIEVABLE_FLOPS_FRACTION,
    DEVICE_RATES,
    LAUNCH_SECONDS,
    DeviceRates,
    StepPrice,
    default_rates,
    find_rates,
    op_seconds,
)

# Bytes cost nothing on the first of them and arithmetic nothing on the second.
COMPUTE = DeviceRates(
    name="compute",
    half_flops=8e3 / ACHIEVABLE_FLOPS_FRACTION,
    tf32_flops=4e3 / ACHIEVABLE_FLOPS_FRACTION,
    fp32_flops=1e3 / ACHIEVABLE_FLOPS_FRACTION,
    bandwidth_bytes=1e30,
    memory_bytes=2**30,
    source="",
)
MEMORY = DeviceRates(
    name="memory",
    half_flops=1e30,
    tf32_flops=None,
    fp32_flops=1e30,
    bandwidth_bytes=1e3 / ACHIEVABLE_BANDWIDTH_FRACTION,
    memory_bytes=2**30,
    source="",
)


class Prices(TorchDispatchMode):
    """The price of every op that costs something, in kilo-flops at fp32's rate or in kilobytes."""

    def __init__(self, rates: DeviceRates) -> None:
        super().__init__()
        self.prices: dict[str, float] = {}
        self.launches = 0
        self._rates = rates

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        seconds = op_seconds(func, args, kwargs or {}, output, self._rates)
        if seconds:
            self.launches += 1
            name = str(func).removeprefix("aten.")
            self.prices[name] = self.prices.get(name, 0.0) + seconds - LAUNCH_SECONDS
        return output


def prices(rates: DeviceRates, run: Callable[[], Any]) -> dict[str, float]:
    with Prices(rates) as watched:
        run()
    return {name: pytest.approx(price, abs=1e-9) for name, price in watched.prices.items()}


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["H100 SXM", "h100sxm", "H100-SXM", "NVIDIA H100_sxm"])
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert find_rates(name).name == "H100 SXM"


def test_the_beginning_of_a_name_will_do() -> None:
    assert find_rates("H100").name == "H100 SXM"
    assert find_rates("nvidia a100").name == "A100 80GB"
    assert find_rates("V100").name == "V100"  # which is also how another begins


def test_the_default_is_the_smallest_that_holds_the_budget() -> None:
    assert default_rates(22 * 2**30).name == "RTX 4090"
    assert default_rates(70 * 2**30).name == "H100 SXM"
    assert default_rates(10_000 * 2**30).name == "B200"


@pytest.mark.parametrize("name", ["", "GeForce", "A100 8GB"])
def test_an_unknown_name_is_answered_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UsageError, match=r"not known; name one of: .*, A100 40GB, ") as raised:
        find_rates(name)
    assert all(rates.name in str(raised.value) for rates in DEVICE_RATES)


def test_each_name_finds_its_own_rates() -> None:
    assert [find_rates(rates.name.lower()) for rates in DEVICE_RATES] == list(DEVICE_RATES)


@pytest.mark.parametrize("rates", DEVICE_RATES, ids=[rates.name for rates in DEVICE_RATES])
def test_rates_are_of_one_order_whatever_the_unit(rates: DeviceRates) -> None:
    assert 50e12 < rates.half_flops < 5e15
    assert 5e12 < rates.fp32_flops < rates.half_flops
    assert rates.tf32_flops is None or rates.fp32_flops <= rates.tf32_flops < rates.half_flops
    assert 250e9 < rates.bandwidth_bytes < 10e12
    assert 14 * 2**30 < rates.memory_bytes < 300 * 2**30
    # Dense: with sparsity a matmul of this size would be bound by memory on none of them.
    assert 50 < rates.half_flops / rates.bandwidth_bytes < 450
    assert rates.source


def test_the_h200_as_its_datasheet_has_it() -> None:
    h200 = find_rates("h200")
    found = (h200.half_flops, h200.tf32_flops, h200.fp32_flops, h200.bandwidth_bytes)
    assert found == pytest.approx((989.4e12, 494.7e12, 66.9e12, 4.8e12))


# --- arithmetic -----------------------------------------------------------------------------------


def test_a_matmul_costs_its_multiplications_and_additions() -> None:
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    flops = 2 * 10 * 20 * 30
    assert prices(COMPUTE, lambda: a @ b) == {"mm.default": flops / 1e3}
    bias = torch.ones(30)
    assert prices(COMPUTE, lambda: torch.addmm(bias, a, b)) == {"addmm.default": flops / 1e3}
    half = prices(COMPUTE, lambda: a.bfloat16() @ b.bfloat16())
    assert half["mm.default"] == flops / 8e3


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("precision")
def test_tf32_counts_where_it_is_switched_on() -> None:
    a = torch.ones(10, 10)
    image, kernel = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)
    conv_flops = 2 * 2 * 3 * 3 * 3 * 3 * 3

    def run() -> None:
        torch.mm(a, a)
        functional.conv2d(image, kernel)

    assert prices(COMPUTE, run) == {"mm.default": 2.0, "convolution.default": conv_flops / 4e3}
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    assert prices(COMPUTE, run) == {"mm.default": 0.5, "convolution.default": conv_flops / 1e3}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_costs_two_matmuls_forward_and_five_backward(causal: bool) -> None:
    shape = (2, 3, 16, 8)
    q, k, v = (torch.ones(shape, requires_grad=True) for _ in range(3))
    flops = 2 * (2 * 2 * 3 * 16 * 16 * 8) / (2 if causal else 1)

    def run() -> None:
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        attended.backward(torch.ones(shape))

    name = "_scaled_dot_product_flash_attention_for_cpu"
    found = prices(COMPUTE, run)
    assert found[f"{name}.default"] == flops / 1e3
    assert found[f"{name}_backward.default"] == 2.5 * flops / 1e3


def test_attention_of_grouped_queries_counts_every_query() -> None:
    q, k = torch.ones(2, 4, 16, 8), torch.ones(2, 2, 16, 8)
    found = prices(
        COMPUTE, lambda: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    )
    assert found == {
        "_scaled_dot_product_flash_attention_for_cpu.default": 2 * 2 * 2 * 4 * 16 * 16 * 8 / 1e3
    }


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        ("_addmm_activation", [(30,), (10, 20), (20, 30)], 2 * 10 * 20 * 30),
        ("_grouped_mm", [(10, 20), (3, 20, 30), (3,)], 2 * 10 * 20 * 30),
        ("_grouped_mm", [(3, 10, 20), (3, 20, 30)], 3 * 2 * 10 * 20 * 30),
        ("_grouped_mm", [(10, 20), (20, 30), (3,)], 2 * 10 * 20 * 30),
        ("_grouped_mm", [(3, 10, 20), (20, 30), (3,)], 2 * 10 * 20 * 30),
    ],
)
def test_matmuls_that_torch_does_not_count(
    op: str, shapes: list[tuple[int, ...]], flops: int
) -> None:
    args = tuple(torch.empty(shape, device="meta") for shape in shapes)
    func = getattr(torch.ops.aten, op).default
    seconds = op_seconds(func, args, {}, torch.empty(10, 30, device="meta"), COMPUTE)
    assert seconds - LAUNCH_SECONDS == pytest.approx(flops / 1e3)


def test_a_backward_pass_costs_two_matmuls() -> None:
    layer, x = nn.Linear(20, 30, bias=False), torch.ones(10, 20, requires_grad=True)
    found = prices(COMPUTE, lambda: layer(x).backward(torch.ones(10, 30)))
    assert found["mm.default"] == 3 * 2 * 10 * 20 * 30 / 1e3


# --- bytes ----------------------------------------------------------------------------------------

KB = 250
"""Elements of fp32 in a thousand bytes."""
LONG = torch.long
MOVED = {
    "reads both and writes": (lambda x: x + torch.add(x, 1), {"add.Tensor": 2 + 3}),
    "reads once what comes twice": (lambda x: x * x, {"mul.Tensor": 2}),
    "in place reads and writes": (lambda x: x.mul_(2), {"mul_.Tensor": 2}),
    "copies": (lambda x: x.copy_(x.new_empty(KB)), {"copy_.default": 2}),
    "overwrites": (lambda x: x.zero_(), {"zero_.default": 1}),
    "only writes": (lambda x: torch.zeros_like(x), {"zeros_like.default": 1}),
    "views": (lambda x: x.view(5, -1).t()[2:].detach().expand(3, -1, -1), {}),
    "allocates": (lambda x: (torch.empty(9), torch.empty_like(x), x.new_empty(9)), {}),
    "reads an expanded tensor once": (
        lambda x: x.view(1, KB).expand(100, KB).sum(),
        {"sum.default": 1.004},
    ),
    "reads the rows that it gathers": (
        lambda x: torch.ops.aten.embedding(x.view(-1, 1), torch.zeros(2, dtype=LONG)),
        {"embedding.default": 0.016 + 2 * 0.008, "zeros.default": 0.016},
    ),
    "writes the rows that it scatters": (
        lambda x: x.index_add_(0, torch.zeros(2, dtype=LONG), torch.ones(2)),
        {"index_add_.default": 2 * 0.024, "zeros.default": 0.016, "ones.default": 0.008},
    ),
    "many tensors at once": (
        lambda x: torch._foreach_add_([x, x.clone()], 1.0),
        {"_foreach_add_.Scalar": 4, "clone.default": 2},
    ),
}


@pytest.mark.parametrize(("run", "kilobytes"), MOVED.values(), ids=MOVED.keys())
def test_bytes_in_and_out_of_memory(
    run: Callable[[Tensor], Any], kilobytes: dict[str, float]
) -> None:
    assert prices(MEMORY, lambda: run(torch.empty(KB))) == kilobytes


def test_the_longer_of_both_counts_and_the_launch_on_top() -> None:
    a = torch.ones(100, 100)
    func = torch.ops.aten.mm.default
    both = DeviceRates(
        name="both",
        half_flops=1.0,
        tf32_flops=None,
        fp32_flops=2e6 / ACHIEVABLE_FLOPS_FRACTION,
        bandwidth_bytes=1e5 / ACHIEVABLE_BANDWIDTH_FRACTION,
        memory_bytes=1,
        source="",
    )
    # Two million operations take a second, 80,000 bytes take 0.8.
    assert op_seconds(func, (a, a), {}, a @ a, both) == pytest.approx(1 + LAUNCH_SECONDS)


def test_a_step_costs_what_its_ops_cost() -> None:
    layer, x = nn.Linear(20, 30), torch.ones(10, 20)
    with StepPrice(MEMORY) as price, Prices(MEMORY) as watched:
        layer(x).sum().backward()
    assert watched.launches > 3
    expected = sum(watched.prices.values()) + watched.launches * LAUNCH_SECONDS
    assert price.seconds == pytest.approx(expected)
