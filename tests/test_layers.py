"""Finding and grouping layers, on hand-made models and on tiny ones from transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from sac_search.errors import WorkloadError
from sac_search.layers import Layer, find_layers, group_layers

TOKENS = torch.arange(8).reshape(2, 4)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
VECTORS = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def find(
    model: nn.Module,
    *args: Any,
    patterns: list[str] | str | None = None,
    run: Callable[[], object] | None = None,
    **kwargs: Any,
) -> list[Layer]:
    with torch.no_grad():
        return find_layers(model, run or (lambda: model(*args, **kwargs)), patterns)


def names(layers: list[Layer]) -> list[str]:
    return [layer.name for layer in layers]


def found(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    return names(find(model, *args, **kwargs))


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# --- parts of hand-made models ---


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(functional.scaled_dot_product_attention(query, key, value))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Scale(nn.Module):
    """An element-wise module with parameters of its own, such as a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Direct(nn.Module):
    """A module with one weight, and no module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNorm(nn.Module):
    def __init__(self, width_in: int, width: int, kernel: int = 3, *, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.conv(x)))


class BasicBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride > 1
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class TorchvisionResNet(nn.Module):
    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        width = 4
        for number, depth in enumerate(depths, start=1):
            blocks = [BasicBlock(width, 2 * width, 2)]
            width *= 2
            blocks += [BasicBlock(width, width, 1) for _ in range(depth - 1)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.count = len(depths)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for number in range(1, self.count + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(x.mean((2, 3)))


class Experts(nn.Module):
    """A mixture whose experts each get the tokens that were routed to them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, count)
        self.experts = nn.ModuleList(Mlp() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 8)
        chosen = torch.arange(len(tokens)) % len(self.experts)
        gates = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero()[:, 0]
            out.index_add_(0, where, expert(tokens[where]) * gates[where, number, None])
        return out.reshape(x.shape)


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.moe = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.moe(x)


# --- what is a layer ---


def test_a_stack_of_blocks_gives_its_blocks_with_everything_about_them() -> None:
    layers = find(Stack(Block(), Block()), VECTORS)
    assert names(layers) == ["blocks.0", "blocks.1"]
    assert [layer.class_name for layer in layers] == ["Block", "Block"]
    attention, mlp = (8 + 1) * 24 + (8 + 1) * 8, (8 + 1) * 16 + (16 + 1) * 8
    assert [layer.parameter_count for layer in layers] == [attention + mlp] * 2
    assert layers[0].shape_key == layers[1].shape_key


def test_layers_come_in_the_order_in_which_they_run() -> None:
    class Backwards(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return x

    model = Backwards(Block(), Block(), Block())
    assert found(model, VECTORS) == ["blocks.2", "blocks.1", "blocks.0"]
    assert found(model, VECTORS, patterns="blocks.*") == ["blocks.2", "blocks.1", "blocks.0"]


def test_the_experts_of_a_mixture_are_no_layers() -> None:
    assert found(Stack(MoeBlock(), MoeBlock()), VECTORS) == ["blocks.0", "blocks.1"]
    with pytest.raises(WorkloadError, match=r"no layers found"):
        found(Experts(), VECTORS)


def test_experts_that_write_into_one_buffer_are_no_layers() -> None:
    class Buffered(Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.reshape(-1, 8)
            out = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                rows = slice(2 * number, 2 * number + 2)
                out[rows] = expert(tokens[rows])
            return out

    with pytest.raises(WorkloadError, match=r"no layers found"):
        found(Buffered(), VECTORS)


def test_a_buffer_written_by_index_links_the_blocks_that_read_it() -> None:
    class Buffered(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                buffer = torch.zeros(2, 4, 8)
                buffer[:, 1:] = block(x)[:, 1:]
                x = buffer
            return x

    assert found(Buffered(Block(), Block()), VECTORS) == ["blocks.0", "blocks.1"]


def test_parallel_heads_are_no_layers() -> None:
    class Heads(Stack):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.heads = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return torch.stack([head(x) for head in self.heads])

    assert found(Heads(), VECTORS) == ["blocks.0", "blocks.1"]


def test_heads_that_run_once_per_step_of_a_loop_are_no_layers() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([Mlp(), Mlp()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = self.heads[0](x) + self.heads[1](x)
            return x

    with pytest.raises(WorkloadError, match=r"no layers found"):
        found(Loop(), VECTORS)


def test_two_towers_side_by_side_give_the_blocks_of_both() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Stack(Block(), Block()), Stack(Block(), Block())])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.towers[0](x) + self.towers[1](x)

    expected = ["towers.0.blocks.0", "towers.0.blocks.1", "towers.1.blocks.0", "towers.1.blocks.1"]
    assert found(Towers(), VECTORS) == expected


def test_residuals_outside_the_blocks_do_not_hide_the_chain() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for attention, mlp in self.layers:
                x = functional.dropout(attention(x), 0.1) + x
                x = mlp(x).reshape(-1, 8).reshape(x.shape).add(x)
            return x

    assert found(Pairs(), VECTORS) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_tensors_travel_in_keywords_dicts_and_dataclasses() -> None:
    @dataclass
    class State:
        x: torch.Tensor
        note: str = ""

    class DataclassBlock(Mlp):
        def forward(self, *, state: dict[str, State]) -> dict[str, State]:  # type: ignore[override]
            return {"next": State(x=super().forward(state["next"].x))}

    class Keywords(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = {"next": State(x)}
            for block in self.blocks:
                state = block(state=state)
            return state["next"].x

    model = Keywords(DataclassBlock(), DataclassBlock())
    assert found(model, VECTORS) == ["blocks.0", "blocks.1"]


def test_a_module_passes_on_where_its_input_came_from() -> None:
    class Detour(nn.Module):
        """Computes where torch does not see it, as a kernel of one's own would."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor(x.tolist())

    class Detours(Stack):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.detour = Detour()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.detour(self.blocks[0](x)))

    assert found(Detours(), VECTORS) == ["blocks.0", "blocks.1"]


def test_a_block_may_hold_its_parameters_directly() -> None:
    assert found(nn.Sequential(Direct(), Direct()), VECTORS) == ["0", "1"]
    assert found(nn.Sequential(Scale(), Scale()), VECTORS) == ["0", "1"]


def test_leaves_are_no_blocks() -> None:
    class OwnLinear(nn.Linear):
        pass

    own = nn.Sequential(OwnLinear(8, 8), nn.GELU(), OwnLinear(8, 8))
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    for model in (own, plain):
        with pytest.raises(WorkloadError, match=r"no layers found"):
            found(model, VECTORS)


def test_an_elementwise_module_beside_blocks_is_no_block() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), Scale())
    assert found(model, VECTORS) == ["1", "2"]


def test_a_dict_of_everything_gives_the_list_inside() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(8, 8))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table[tokens]

    class NanoGpt(nn.Module):
        def __init__(self, *blocks: nn.Module) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(
                {"wte": Embedding(), "h": nn.ModuleList(blocks), "project": Mlp()}
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.transformer["wte"](tokens)
            for block in self.transformer["h"]:  # type: ignore[attr-defined]
                x = block(x)
            return self.transformer["project"](x)

    assert found(NanoGpt(Block(), Block()), TOKENS) == ["transformer.h.0", "transformer.h.1"]


def test_a_dict_may_hold_blocks_beside_a_list_of_blocks() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(
                {"first": Block(), "others": nn.ModuleList([Block(), Block()]), "last": Block()}
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts["first"](x)
            for block in self.parts["others"]:  # type: ignore[attr-defined]
                x = block(x)
            return self.parts["last"](x)

    expected = ["parts.first", "parts.others.0", "parts.others.1", "parts.last"]
    assert found(Mixed(), VECTORS) == expected


def test_a_block_called_twice_appears_once() -> None:
    shared = Block()
    assert found(Stack(shared, Block(), shared), VECTORS) == ["blocks.0", "blocks.1"]
    assert found(Stack(shared, shared), VECTORS) == ["blocks.0"]  # each call is a region


def test_one_block_that_runs_once_is_no_chain() -> None:
    with pytest.raises(WorkloadError, match=r"blocks\.\* \(Block\)"):
        found(Stack(Block()), VECTORS)


def test_a_stack_called_on_two_inputs_is_a_chain() -> None:
    class Contrast(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - super().forward(x + 1)

    assert found(Contrast(Block(), Block()), VECTORS) == ["blocks.0", "blocks.1"]


def test_one_block_called_on_two_inputs_is_no_chain() -> None:
    class Siamese(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) + self.blocks[0](x + 1)

    with pytest.raises(WorkloadError, match=r"no layers found"):
        found(Siamese(Block()), VECTORS)


def test_layers_that_never_run_are_left_out() -> None:
    class Branches(Stack):
        def __init__(self) -> None:
            super().__init__(*(Block() for _ in range(6)))
            self.unused = nn.Sequential(Block(), Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:2]:
                x = block(x)
            return x

    assert found(Branches(), VECTORS) == ["blocks.0", "blocks.1"]


# --- stages ---


def test_stages_of_plain_convolutions_are_layers() -> None:
    def stage(width_in: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width_in, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )

    model = nn.Sequential(
        stage(3, 4), stage(4, 8), stage(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    layers = find(model, IMAGES)
    assert names(layers) == ["0", "1", "2"]
    assert len({layer.shape_key for layer in layers}) == 3


def test_torchvision_resnet_gives_its_residual_blocks() -> None:
    expected = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert found(TorchvisionResNet(2, 2, 2, 2), IMAGES) == expected


def test_a_stage_of_one_block_follows_its_siblings() -> None:
    expected = ["layer1.0", "layer2.0", "layer2.1", "layer3.0"]
    assert found(TorchvisionResNet(1, 2, 1), IMAGES) == expected
    assert found(TorchvisionResNet(1, 1), IMAGES) == ["layer1", "layer2"]


def test_stages_in_a_sequential_give_their_blocks_beside_the_stem() -> None:
    class Stem(Mlp):
        pass

    model = nn.Sequential(
        Stem(), nn.Sequential(Block(), Block(), Block()), nn.Sequential(nn.Linear(8, 8), Block())
    )
    assert found(model, VECTORS) == ["0", "1.0", "1.1", "1.2", "2.1"]


def test_stages_of_stages_give_the_innermost_blocks() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(Block(), Block())

    model = nn.Sequential(nn.Sequential(stage(), stage()), nn.Sequential(stage(), stage()))
    expected = [f"{i}.{j}.{k}" for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    assert found(model, VECTORS) == expected


@pytest.mark.parametrize("inplace", [False, True])
def test_a_residual_block_of_convolutions_is_not_split(inplace: bool) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(ConvNorm(3, 3), ConvNorm(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.body(x)
            if inplace:
                out += x
                return out
            return out + x

    assert found(nn.Sequential(Residual(), Residual()), IMAGES) == ["0", "1"]
    stages = nn.Sequential(
        nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual())
    )
    assert found(stages, IMAGES) == ["0.0", "0.1", "1.0", "1.1"]


def test_most_blocks_decide_whether_their_class_is_split() -> None:
    class Fused(nn.Module):
        """Only the first block of a stage, which changes the shape, lacks the addition."""

        def __init__(self, *, first: bool = False) -> None:
            super().__init__()
            self.first = first
            self.body = nn.Sequential(ConvNorm(3, 3, stride=2 if first else 1), ConvNorm(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) if self.first else x + self.body(x)

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(ConvNorm(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    blocks = [Fused(first=True), Fused(), Fused(), Single()]
    assert found(nn.Sequential(*blocks), IMAGES) == ["0", "1", "2", "3"]
    stage = nn.Sequential(BasicBlock(3, 3, 1), BasicBlock(3, 3, 1))
    model = nn.Sequential(*blocks[:3], stage)
    assert found(model, IMAGES) == ["0", "1", "2", "3.0", "3.1"]


def test_a_stage_of_residual_blocks_of_one_weight_is_split() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + functional.relu(self.linear(x))

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(), Residual()])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            for block in self.blocks:
                x = block(x)
            return (x.reshape(-1, 4, 8),)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Stage(), Stage()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                (x,) = stage(x)
            return x

    expected = [f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)]
    assert found(Model(), VECTORS) == expected


def test_what_else_a_stage_holds_is_no_layer() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())
            self.tail = nn.Sequential(Attention(), Mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.blocks(x))

    expected = [f"{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1, 2)]
    assert found(nn.Sequential(Stage(), Stage()), VECTORS) == expected


def test_a_stage_of_one_other_block_stays_whole() -> None:
    stages = [nn.Sequential(Block(), Block()), nn.Sequential(nn.Linear(8, 8), Mlp())]
    assert found(nn.Sequential(*stages), VECTORS) == ["0.0", "0.1", "1"]


def test_a_chain_that_is_a_small_part_of_a_block_does_not_split_it() -> None:
    class Refined(Block):
        def __init__(self) -> None:
            super().__init__()
            self.refine = nn.Sequential(Mlp(), Mlp())  # 36 in 100 parameters

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.refine(super().forward(x))

    assert found(Stack(Refined(), Refined()), VECTORS) == ["blocks.0", "blocks.1"]


def test_a_block_of_unlike_parts_is_not_split() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Attention(), Mlp()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    assert found(Stack(Listed(), Listed()), VECTORS) == ["blocks.0", "blocks.1"]


# --- attributes ---


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()
        self.pool = nn.Linear(8, 8)
        self.block2 = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block2(self.pool(self.block1(x)))


def test_attributes_of_one_class_are_layers() -> None:
    assert found(Attributes(), VECTORS) == ["block1", "block2"]


def test_attributes_that_run_in_parallel_are_no_layers() -> None:
    class Parallel(Attributes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block1(x) + self.block2(x)

    # Neither are the attributes of a block, which are of different classes.
    with pytest.raises(WorkloadError, match=r"block1 \(Block\)"):
        found(Parallel(), VECTORS)


def test_attributes_that_are_only_a_linear_or_a_norm_are_no_layers() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    class Pair(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first = first
            self.second = second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    assert found(Pair(Mlp(), Mlp()), VECTORS) == ["first", "second"]
    for pair in (Pair(Direct(), Direct()), Pair(Norm(), Norm())):
        with pytest.raises(WorkloadError, match=r"no layers found"):
            found(pair, VECTORS)


def test_an_attribute_called_in_a_loop_is_a_layer() -> None:
    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(100):
                x = self.block(x)
            return x

    assert found(Universal(), VECTORS) == ["block"]


def test_stacks_inside_attributes_go_first() -> None:
    class EncoderDecoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), Block(), Block())
            self.decoder = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), Block(), Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.encoder(x))

    expected = ["encoder.2", "encoder.3", "decoder.2", "decoder.3"]
    assert found(EncoderDecoder(), VECTORS) == expected


def test_branches_inside_an_inception_module_are_no_layers() -> None:
    class Inception(nn.Module):
        def __init__(self, width_in: int) -> None:
            super().__init__()
            self.branch1 = ConvNorm(width_in, 4, 1)
            self.branch2 = nn.Sequential(ConvNorm(width_in, 4, 1), ConvNorm(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.branch1(x), self.branch2(x)], 1)

    class GoogLeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inception3a = Inception(3)
            self.inception3b = Inception(8)
            self.inception4a = Inception(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inception4a(functional.max_pool2d(self.inception3b(self.inception3a(x)), 2))

    assert found(GoogLeNet(), IMAGES) == ["inception3a", "inception3b", "inception4a"]


def test_attributes_in_a_corner_of_the_model_are_no_layers() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = ConvNorm(3, 3)
            self.second = ConvNorm(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Stem()
            self.blocks = nn.Sequential(Block(32), Block(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.stem(x).mean(1))

    assert found(Model(), IMAGES) == ["blocks.0", "blocks.1"]


# --- patterns ---


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Stack(Block(), Block())
        self.other = Stack(Block(), Block())
        self.unused = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other(x)
        return self.model(x)


BOTH_STACKS = ["other.blocks.0", "other.blocks.1", "model.blocks.0", "model.blocks.1"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("model.blocks.*", ["model.blocks.0", "model.blocks.1"]),
        (["model.blocks.1", "model.blocks.1"], ["model.blocks.1"]),
        ("model.blocks.[1-9]", ["model.blocks.1"]),
        ("m*.blocks.0 , other.head", ["other.head", "model.blocks.0"]),
        (["model.head,", "other.head"], ["other.head", "model.head"]),
        ("**.blocks.*", BOTH_STACKS),
        ("**.blocks.*,**.mlp,unused", BOTH_STACKS),  # the outermost, and not what never runs
        ("model.blocks.**", ["model.blocks.0", "model.blocks.1"]),  # the list itself never runs
        ("*", ["other", "model"]),
        ("**", ["other", "model"]),
        ("**.mlp", [f"{name}.mlp" for name in BOTH_STACKS]),
        ("model.**.blocks.0", ["model.blocks.0"]),
        ("model.**.up", ["model.blocks.0.mlp.up", "model.blocks.1.mlp.up"]),
    ],
)
def test_patterns_match_segment_by_segment(patterns: list[str] | str, expected: list[str]) -> None:
    assert found(Nested(), VECTORS, patterns=patterns) == expected


def test_a_pattern_may_use_either_name_of_a_shared_module() -> None:
    model = Attributes()
    model.block2 = model.block1
    assert found(model, VECTORS, patterns="block2") == ["block1"]


def test_a_module_that_runs_inside_another_one_is_left_out() -> None:
    class Borrower(Mlp):
        """Runs a module that is not below it."""

        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.borrowed = (other,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.borrowed[0](super().forward(x))

    inner = Block()
    model = nn.ModuleDict({"a": Borrower(inner), "b": inner, "c": Block()})
    layers = find(model, run=lambda: model["c"](model["a"](VECTORS)), patterns="*")
    assert names(layers) == ["a", "c"]


def test_a_module_below_another_one_is_left_out_though_it_runs_elsewhere() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    model["a"].aside = Mlp()  # run by the parent, not by the block
    layers = find(
        model, run=lambda: model["b"](model["a"].aside(model["a"](VECTORS))), patterns="**"
    )
    assert names(layers) == ["a", "b"]


def test_a_module_that_calls_itself_is_a_layer() -> None:
    class Recursive(Mlp):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    assert found(nn.Sequential(Recursive()), VECTORS, patterns="0") == ["0"]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.block.*", "did you mean model.blocks.*"),
        ("blocks.0", "did you mean model.blocks.*, other.blocks.*"),
        ("model.blocks", "did you mean model.blocks.*?"),
        ("unused", "--layers 'model.layers.*'"),
        ("zzz", "the model has model, model.blocks, model.blocks.*"),
        ("model.blocks.*.mlp.up.x", "did you mean model.blocks.*.mlp.up"),
        (" , ", "name nothing"),
    ],
)
def test_a_pattern_without_layers_is_an_error_that_helps(pattern: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        found(Nested(), VECTORS, patterns=["model.head", pattern] if pattern == "zzz" else pattern)
    assert pattern in str(caught.value)
    assert hint in str(caught.value)


# --- when nothing is found ---


def test_no_layers_is_an_error_that_names_candidates() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))
    with pytest.raises(WorkloadError) as caught:
        found(model, VECTORS)
    message = str(caught.value)
    assert "--layers 'model.layers.*'" in message
    assert "Workload(layers=...)" in message
    assert "ModuleList" in message
    assert "the forward pass runs * (Sequential), * (Linear)" in message


def test_a_forward_pass_without_the_model_is_an_error() -> None:
    with pytest.raises(WorkloadError, match=r"calls no module of the model"):
        find(Stack(Block(), Block()), run=lambda: None)


# --- the watched forward pass ---


def test_the_forward_pass_runs_once_and_leaves_no_hooks() -> None:
    model = Stack(Block(), Block())
    runs = []
    find(model, run=lambda: runs.append(model(VECTORS)))
    assert len(runs) == 1
    assert count_hooks(model) == 0


@pytest.mark.parametrize("patterns", [None, "blocks.*"])
def test_an_error_in_the_forward_pass_goes_through_and_leaves_no_hooks(
    patterns: str | None,
) -> None:
    model = Stack(Block(), Block(7))
    with pytest.raises(RuntimeError, match="shape"):
        found(model, VECTORS, patterns=patterns)
    assert count_hooks(model) == 0
    assert not torch.overrides._is_torch_function_mode_enabled()


def test_a_model_may_catch_an_error_of_its_own() -> None:
    class Fallback(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.up(self.down(x))
            except RuntimeError:
                return super().forward(x)

    layers = find(nn.Sequential(Fallback(), Fallback(), Fallback()), VECTORS)
    assert names(layers) == ["0", "1", "2"]


def test_no_activation_is_kept_alive() -> None:
    outputs: list[StorageWeakRef] = []
    alive: list[int] = []

    class Witness(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            alive.append(sum(not output.expired() for output in outputs))
            x = super().forward(x)
            outputs.append(StorageWeakRef(x.untyped_storage()))
            return x

    find(Stack(*(Witness() for _ in range(6))), VECTORS)
    assert alive == [0, 1, 1, 1, 1, 1]


def test_storages_at_one_address_do_not_make_a_chain() -> None:
    """Freed memory is used again; on the meta device every address is the same."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([head(x) for head in self.heads])

    with pytest.raises(WorkloadError, match=r"no layers found"):
        found(Heads().to("meta"), VECTORS.to("meta"))


def test_storages_that_died_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known = 0
    most_known = 0

    class Counted(StorageWeakRef):
        def __init__(self, storage: torch.UntypedStorage) -> None:
            nonlocal known, most_known
            super().__init__(storage)
            known += 1
            most_known = max(known, most_known)

        def __del__(self) -> None:
            nonlocal known
            super().__del__()
            known -= 1

    class Busy(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4000):
                x = x + 1
            return super().forward(x)

    monkeypatch.setattr("sac_search.lineage._refer_weakly", Counted)
    find(Stack(Mlp(), Busy(), Busy(), Busy()), VECTORS)
    assert 4000 < most_known < 5000


def test_inference_mode_and_meta_tensors_work() -> None:
    model = Stack(Block(), Block())
    with torch.inference_mode():
        assert names(find_layers(model, lambda: model(VECTORS))) == ["blocks.0", "blocks.1"]
    assert found(model.to("meta"), VECTORS.to("meta")) == ["blocks.0", "blocks.1"]


def test_compiled_blocks_are_seen_inside() -> None:
    model = Stack(Block(), Block())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert found(compiled, VECTORS) == ["_orig_mod.blocks.0", "_orig_mod.blocks.1"]  # type: ignore[arg-type]
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    assert found(model, VECTORS) == ["blocks.0", "blocks.1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_a_scripted_module_may_be_among_the_others() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert found(nn.Sequential(scripted, Block(), Block()), VECTORS) == ["1", "2"]


# --- kinds ---


def layer(name: str, class_name: str = "Block", shape_key: str = "a") -> Layer:
    return Layer(name=name, class_name=class_name, shape_key=shape_key, parameter_count=1)


def test_kinds_are_called_after_their_class_in_the_order_of_execution() -> None:
    layers = [
        layer("b.0", shape_key="x"),
        layer("a.0", shape_key="y"),
        layer("b.1", shape_key="x"),
        layer("m", class_name="Mlp", shape_key="x"),
        layer("a.1", shape_key="z"),
        layer("a.2", shape_key="y"),
    ]
    assert list(group_layers(layers).items()) == [
        ("Block", ["b.0", "b.1"]),
        ("Block#2", ["a.0", "a.2"]),
        ("Mlp", ["m"]),
        ("Block#3", ["a.1"]),
    ]
    assert group_layers([]) == {}


def test_signatures_split_kinds() -> None:
    layers = [layer("0"), layer("1"), layer("2")]
    kinds = group_layers(layers, {"0": "full", "1": "sliding", "2": "full"})
    assert kinds == {"Block": ["0", "2"], "Block#2": ["1"]}
    assert group_layers(layers, {}) == {"Block": ["0", "1", "2"]}


def test_shape_keys_tell_shapes_names_and_classes_apart() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.Linear(8, 16)
            self.under = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.under(self.over(x))

    class Subclass(Mlp):
        pass

    model = nn.Sequential(Mlp(), Mlp(), Renamed(), Subclass(), nn.Linear(8, 9), Mlp(9))
    keys = [layer.shape_key for layer in find(model, VECTORS, patterns="*")]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 5
    # Part of study files: may not change with the process or the release.
    assert keys[0] == "ec7f55ab88b1"


# --- transformers ---

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(model: str, config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**settings))
    assert isinstance(built, nn.Module)
    return built


def kinds_of(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    return group_layers(find(model, *args, **kwargs))


def test_gpt2() -> None:
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    model = build("GPT2LMHeadModel", "GPT2Config", **sizes, **special)
    expected = {"GPT2Block": [f"transformer.h.{i}" for i in range(3)]}
    assert kinds_of(model, TOKENS, labels=TOKENS) == expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        ("Mixtral", {"num_local_experts": 4}),
        (
            "Qwen2Moe",
            {
                "num_experts": 4,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 8,
            },
        ),
    ],
)
def test_decoders(family: str, settings: dict[str, Any]) -> None:
    model = build(f"{family}ForCausalLM", f"{family}Config", **DECODER, **settings)
    expected = {f"{family}DecoderLayer": [f"model.layers.{i}" for i in range(3)]}
    assert kinds_of(model, TOKENS, labels=TOKENS) == expected


def test_bert() -> None:
    settings = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    model = build("BertForMaskedLM", "BertConfig", **settings)
    expected = {"BertLayer": [f"bert.encoder.layer.{i}" for i in range(3)]}
    assert kinds_of(model, TOKENS, labels=TOKENS) == expected


def test_t5_gives_the_blocks_of_encoder_and_decoder() -> None:
    model = build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
    )
    # The first block of each stack holds the position bias.
    assert kinds_of(model, input_ids=TOKENS, labels=TOKENS) == {
        "T5Block": ["encoder.block.0"],
        "T5Block#2": ["encoder.block.1", "encoder.block.2"],
        "T5Block#3": ["decoder.block.0"],
        "T5Block#4": ["decoder.block.1", "decoder.block.2"],
    }


def test_albert_runs_one_group_again_and_again() -> None:
    settings = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    model = build("AlbertModel", "AlbertConfig", embedding_size=8, **settings)
    assert kinds_of(model, TOKENS) == {"AlbertLayerGroup": ["encoder.albert_layer_groups.0"]}


def test_vit() -> None:
    model = build(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    (kind,) = kinds_of(model, IMAGES).items()
    assert kind[0] == "ViTLayer"
    assert [name.rpartition(".")[2] for name in kind[1]] == ["0", "1", "2"]


def test_swin_gives_the_blocks_of_its_stages() -> None:
    model = build(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2, 2],
        num_heads=[1, 2, 4],
        window_size=4,
    )
    assert kinds_of(model, IMAGES) == {
        "SwinLayer": ["swin.encoder.layers.0.blocks.0"],
        "SwinLayer#2": [f"swin.encoder.layers.1.blocks.{i}" for i in range(2)],
        "SwinLayer#3": [f"swin.encoder.layers.2.blocks.{i}" for i in range(2)],
    }


@pytest.mark.parametrize(
    ("layer_type", "kind"), [("basic", "ResNetBasicLayer"), ("bottleneck", "ResNetBottleNeckLayer")]
)
def test_resnet_gives_its_residual_blocks(layer_type: str, kind: str) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "layer_type": layer_type}
    model = build("ResNetForImageClassification", "ResNetConfig", depths=[1, 3, 1], **sizes)
    stages = "resnet.encoder.stages"
    assert kinds_of(model, IMAGES) == {
        kind: [f"{stages}.0.layers.0"],
        f"{kind}#2": [f"{stages}.1.layers.0"],
        f"{kind}#3": [f"{stages}.1.layers.1", f"{stages}.1.layers.2"],
        f"{kind}#4": [f"{stages}.2.layers.0"],
    }


def test_convnext_gives_the_blocks_of_its_stages() -> None:
    sizes = {"hidden_sizes": [8, 16, 32], "depths": [1, 2, 2], "num_stages": 3, "image_size": 32}
    model = build("ConvNextForImageClassification", "ConvNextConfig", **sizes)
    stages = "convnext.encoder.stages"
    assert kinds_of(model, IMAGES) == {
        "ConvNextLayer": [f"{stages}.0.layers.0"],
        "ConvNextLayer#2": [f"{stages}.1.layers.{i}" for i in range(2)],
        "ConvNextLayer#3": [f"{stages}.2.layers.{i}" for i in range(2)],
    }
