"""No policy that a search proposes gives other gradients without a word, and wrong ones are caught.

Models that do what recomputation is known to stumble over, each of them under every baseline, under
the policy that saves all that may be saved, and under policies drawn at random: told by `verify`,
and by losses of training steps that only this file computes. Then policies and models that are
wrong on purpose, most of them in ways that torch itself does not notice.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from sac_search import Workload, records
from sac_search.apply import PolicyModule, applied, load_policy_module
from sac_search.errors import WorkloadError
from sac_search.export import render_module
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import FailureKind, Verification
from sac_search.space import Granularity, LayerChoiceMode, build_space, unsavable_ops
from sac_search.study.baselines import FULL, baselines
from sac_search.trace import LayerTrace
from sac_search.worker.session import Session, SessionSettings, Verdict

CPU = torch.device("cpu")
# As many tokens as features: a tensor that is taken for another has the other's shape.
BATCH, SEQUENCE, HIDDEN = 2, 8, 16
CHANNELS, VOCABULARY = 4, 11
DRAWN = 6
"""Assignments drawn at random from each space."""
STEPS = 3
"""Steps of training without `verify`."""


pytestmark = pytest.mark.usefixtures("only_new_objects")


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


# --- models ---------------------------------------------------------------------------------------


def linear(width: int = HIDDEN, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(HIDDEN, width, bias=bias)


class Block(nn.Module):
    """A transformer block with dropout in attention, behind it, and twice in the MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = linear(3 * HIDDEN)
        self.out = linear()
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN),
            linear(2 * HIDDEN),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * HIDDEN, HIDDEN),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        attended = self.out(attended.transpose(1, 2).flatten(2))
        x = x + functional.dropout(attended, self.dropout)
        return x + self.mlp(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.norm(self.convolution(x)))


class InPlace(nn.Module):
    """Changes what two of its three matmuls return; without a bias, through a hidden view."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first = linear(bias=bias)
        self.up = linear(2 * HIDDEN, bias=bias)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.down(self.relu(self.up(functional.relu(x))))
        x += y
        return x


class InPlaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(CHANNELS, 6, 3, padding=1)
        self.down = nn.Conv2d(6, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.down(self.relu(self.up(x))))
        y += x
        return self.relu(y)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.stack = tiny.Stack(*blocks)
        self.head = linear(VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(ids)))


class Twice(nn.Module):
    """Runs one block twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(functional.dropout(self.block(x), 0.2))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down = linear(CHANNELS, bias=False)
        self.up = nn.Linear(CHANNELS, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.base(x) + self.up(self.down(functional.dropout(x, 0.1))))


def frozen_first() -> nn.Module:
    model = tiny.Stack(Adapted(), Adapted(), Adapted())
    model.blocks[0].requires_grad_(False)
    return model


class Gate(torch.autograd.Function):
    """Returns `x * sigmoid(gate)` and the sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        weight = gate.sigmoid()
        ctx.save_for_backward(x, weight)
        return x * weight, weight

    @staticmethod
    def backward(ctx: Any, d_product: Tensor, d_weight: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return d_product * weight, (d_product * x + d_weight) * weight * (1 - weight)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        product, weight = Gate.apply(self.up(x), self.gate(x))
        return x + self.down(product) * weight


class Routed(nn.Module):
    """Four experts, of which each token goes through two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = linear(4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(linear(2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, rank = (chosen == index).nonzero(as_tuple=True)
            y = expert(tokens.index_select(0, token)) * weights[token, rank].unsqueeze(-1)
            mixed.index_add_(0, token, y)
        return x + mixed.view_as(x)


class Masked(nn.Module):
    """Draws masks, noise, an order and a decision, each moving the random state of the next."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * (torch.rand(x.shape[:2]) < 0.7).unsqueeze(-1)
        y = y[:, torch.randperm(SEQUENCE)] + 0.1 * torch.randn_like(y)
        y = functional.dropout(y, self.dropout)
        if torch.rand(()) < 0.5:
            y = functional.gelu(y)
        return x + self.second(y) * torch.rand_like(x)


class Recurrent(nn.Module):
    """Holds its weights as parameters, and in a list that it makes anew when they change."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=0.2, batch_first=True)
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.recurrent(x)
        return x + self.linear(y)


class Keywords(nn.Module):
    """Takes keywords and None; returns a tuple with a tuple and None inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(
        self, x: Tensor, mask: Tensor | None, *, bias: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, tuple[Tensor, None]]:
        y = self.first(x).tanh() * scale
        y = y if mask is None else y * mask
        y = y if bias is None else y + bias
        return self.second(y), (y.square().mean(), None)


class KeywordStack(tiny.Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        y, (auxiliary, _) = first(x, None, bias=x)
        y, (more, _) = second(x + y, torch.ones(SEQUENCE, 1), scale=0.5)
        z, _ = third(y, mask=None)
        return y + z + auxiliary + more


# --- their steps ----------------------------------------------------------------------------------


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def autocast_loss(model: nn.Module, x: Tensor, *, cache: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return mean_square(model, x)


def accumulate(workload: Workload) -> Tensor:
    """Sums the gradients of two batches, clips them, and steps."""
    total = torch.zeros(())
    for _ in range(2):
        loss = workload.loss_fn(workload.model, workload.next_batch()) / 2
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0)
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return total


def accumulate_under_autocast(workload: Workload, *, cache: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return accumulate(workload)


def image() -> Tensor:
    return tiny.tokens(BATCH, CHANNELS, 6, 6)


def ids() -> Tensor:
    return torch.arange(BATCH * SEQUENCE).square().remainder(VOCABULARY).view(BATCH, SEQUENCE)


def draws() -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator)


def workload_of(model: nn.Module, batch: Any = None, **fields: Any) -> Workload:
    trained = [p for p in model.parameters() if p.requires_grad]
    fields = {"loss_fn": mean_square, "optimizer": torch.optim.AdamW(trained, lr=1e-2)} | fields
    batch = tiny.tokens(BATCH, SEQUENCE, HIDDEN) if batch is None else batch
    return Workload(model, batch=batch, **fields)


def stack_of(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    return tiny.Stack(*(make() for _ in range(count)))


dropping = functools.partial(Block, 0.2)
uncached_loss = functools.partial(autocast_loss, cache=False)
accumulate_uncached = functools.partial(accumulate_under_autocast, cache=False)

SHAPES: dict[str, Callable[[], Workload]] = {
    "dropout": lambda: workload_of(stack_of(dropping, 3)),
    "batch norm": lambda: workload_of(stack_of(Normed, 3), image()),
    "in place": lambda: workload_of(stack_of(functools.partial(InPlace, bias=True))),
    "in place, hidden view": lambda: workload_of(stack_of(functools.partial(InPlace, bias=False))),
    "in place, convolution": lambda: workload_of(stack_of(InPlaceResidual), image()),
    "tied": lambda: workload_of(Tied(dropping(), dropping()), ids(), loss_fn=next_token_loss),
    "shared block": lambda: workload_of(Twice(dropping())),
    "adapters": lambda: workload_of(stack_of(Adapted, 3)),
    "first layer frozen": lambda: workload_of(frozen_first()),
    "accumulation": lambda: workload_of(stack_of(Adapted), draws(), step=accumulate),
    "autograd function": lambda: workload_of(stack_of(Gated)),
    "autocast": lambda: workload_of(stack_of(dropping), loss_fn=autocast_loss),
    # Weights that autocast keeps cast across regions: see the tests of its cache below.
    "autocast, shared block": lambda: workload_of(Twice(Gated()), loss_fn=uncached_loss),
    "autocast around backward": lambda: workload_of(
        stack_of(Gated), draws(), step=accumulate_uncached
    ),
    "routing": lambda: workload_of(stack_of(Routed)),
    "random masks": lambda: workload_of(stack_of(Masked, 3)),
    # On the CPU dropout draws in place, so with it no random op may be saved; without it, all may.
    "random masks, dropout": lambda: workload_of(stack_of(functools.partial(Masked, 0.2))),
    "recurrence": lambda: workload_of(stack_of(Recurrent)),
    "keywords": lambda: workload_of(KeywordStack(Keywords(), Keywords(), Keywords())),
}


# --- every policy of a space ----------------------------------------------------------------------


def session_of(workload: Workload) -> Session:
    session = Session(workload, SessionSettings(spec="here", steps=2), CPU)
    gc.freeze()  # the first optimizer of a process imports a good part of torch
    return session


def export(policy: Policy, session: Session, path: Path) -> str:
    """Writes the policy's module to `path` and returns the path as text."""
    environment = records.to_builtins(session.environment())
    meta = {"study_name": "silent errors", "environment": environment}
    path.write_text(render_module(policy, meta=meta, headline=["A policy."]), encoding="utf-8")
    return str(path)


@dataclass(frozen=True, kw_only=True)
class Explored:
    """A workload, open, with the policies to try on it."""

    make: Callable[[], Workload]
    session: Session
    everything: Policy
    policies: dict[str, Policy]


@functools.cache
def explored(shape: str) -> Explored:
    def make() -> Workload:
        torch.manual_seed(0)
        return SHAPES[shape]()

    session = session_of(make())
    space = build_space(
        _weighed_alike(session.describe().layers), LayerChoiceMode.COUNT, Granularity.SITE, 2
    )
    everything = space.policy_of(
        {
            layer.name: frozenset(save.label for save in space.saves if save.kind == layer.kind)
            for layer in space.layers
        }
    )
    found = {baseline.name: baseline.policy for baseline in baselines(space)}
    found["everything"] = everything
    draw = random.Random(0)  # noqa: S311
    for index in range(DRAWN):
        drawn = {d.name: draw.randint(0, d.highest) for d in space.decisions}
        found[f"drawn {index}"] = space.policy_for(drawn)
    distinct: dict[str, tuple[str, Policy]] = {}
    for name, policy in found.items():
        distinct.setdefault(policy.key, (name, policy))
    return Explored(
        make=make,
        session=session,
        everything=everything,
        policies=dict(distinct.values()),
    )


def _weighed_alike(layers: Sequence[LayerTrace]) -> list[LayerTrace]:
    # Ops that take next to no time get no decision; here every op is to have one, on any machine.
    return [
        replace(layer, ops=tuple(replace(op, seconds=1.0) for op in layer.ops)) for layer in layers
    ]


def accepted(verdict: Verdict) -> Verification:
    assert verdict.failure is None, verdict.failure
    assert verdict.verification is not None
    assert verdict.verification.passed, verdict.verification
    return verdict.verification


def assert_bitwise(verdict: Verdict) -> Verification:
    found = accepted(verdict)
    assert found.bitwise
    assert found.noise == 0
    return found


def rejected(verdict: Verdict) -> Verification:
    """Returns the figures of a policy that ran without an error and was found wrong by them."""
    found = verdict.verification
    assert found is not None, verdict.failure
    assert not found.passed
    assert found.worst_gradient_difference > max(found.tolerance, 100 * found.noise)
    return found


# Bit for bit in every shape: on one thread of a CPU the same kernels run again on the same numbers.
@pytest.mark.parametrize("shape", SHAPES)
def test_every_policy_of_the_space_passes_bit_for_bit(shape: str) -> None:
    one = explored(shape)
    assert len(one.policies) > DRAWN
    buffers = dict(one.make().model.named_buffers())
    for name, policy in one.policies.items():
        found = assert_bitwise(one.session.verify(policy))
        # Running statistics move twice in a layer that is recomputed, and in no other.
        allowed = {b for b in buffers if b.startswith(tuple(f"{n}." for n in policy.layer_names))}
        assert set(found.buffers_differing) <= allowed
        assert name != FULL or set(found.buffers_differing) == buffers.keys()
        assert bool(found.buffers_differing) == ("move twice" in found.note)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exported_module_passes_bit_for_bit(shape: str, tmp_path: Path) -> None:
    one = explored(shape)
    path = export(one.everything, one.session, tmp_path / "policy.py")
    assert_bitwise(one.session.verify_module(path))


@dataclass(frozen=True)
class Training:
    """What a few steps gave."""

    losses: list[float]
    parameters: list[Tensor]
    computed: int


def train(workload: Workload, policy: Policy | PolicyModule) -> Training:
    """Trains for a few steps from a fixed seed, counting the ops that run."""
    torch.manual_seed(5)
    losses = []
    with applied(workload.model, policy), tiny.OpCounter() as counter:
        for _ in range(STEPS):
            if workload.step is not None:
                loss = workload.step(workload)
            else:
                loss = workload.loss_fn(workload.model, workload.batch)
                loss.backward()
                workload.optimizer.step()
                workload.optimizer.zero_grad()
            losses.append(loss.item())
    computed = sum(n for op, n in counter.counts.items() if op != "aten.detach.default")
    return Training(losses, list(workload.model.parameters()), computed)


@pytest.mark.parametrize("shape", SHAPES)
def test_three_steps_of_training_are_the_same_without_asking_verify(
    shape: str, tmp_path: Path
) -> None:
    one = explored(shape)
    plain = train(one.make(), NO_CHECKPOINTING)
    full = train(one.make(), one.policies[FULL])
    path = export(one.everything, one.session, tmp_path / "policy.py")
    exported = train(one.make(), load_policy_module(Path(path)))
    drawn = [p for name, p in one.policies.items() if name.startswith("drawn")]
    for found in (full, exported, *(train(one.make(), policy) for policy in drawn[-2:])):
        assert found.losses == plain.losses
        assert all(map(torch.equal, found.parameters, plain.parameters))
    # There was something to get wrong: it trains, some ops are recomputed, and others are not.
    assert len(set(plain.losses)) == STEPS
    assert plain.computed < exported.computed < full.computed


# --- wrong policies: the random stream ------------------------------------------------------------

RAND_LIKE, RANDN_LIKE = "aten.rand_like.default", "aten.randn_like.default"
ADDMM, MM, TO_COPY = "aten.addmm.default", "aten.mm.default", "aten._to_copy.default"
LAYERS = ("blocks.0", "blocks.1")
RECOMPUTED = checkpoint_layers(LAYERS)


def saving(*ops: str) -> Policy:
    return checkpoint_layers(LAYERS, Tier(ops=ops))


class Noisy(nn.Module):
    """Multiplies by one random tensor, then by another that is drawn after it."""

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = strength
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) * torch.rand_like(x))
        return x + (y * (1 + self.strength * torch.randn_like(y))).sin()


def splitting(saved: str, session: Session, path: Path) -> str:
    """Writes a module by hand that saves this random op and recomputes all others."""
    export(saving(saved), session, path)
    guard = "return if_random if torch.Tag.nondeterministic_seeded in op.tags else if_certain"
    text = path.read_text(encoding="utf-8")
    assert text.count(guard) == 1
    path.write_text(text.replace(guard, "return if_certain"), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("op", [RAND_LIKE, RANDN_LIKE])
def test_a_policy_cannot_say_that_one_random_op_is_saved_and_another_is_not(op: str) -> None:
    workload = workload_of(stack_of(Noisy))
    assert_bitwise(session_of(workload).verify(saving(op)))
    with tiny.OpCounter() as counter, applied(workload.model, saving(op)):
        workload.run_step()
    assert counter.counts[op] == 2 * len(LAYERS)  # once more in each: its name alone saves nothing


def test_a_module_that_says_so_is_caught_where_it_shifts_the_stream(tmp_path: Path) -> None:
    session = session_of(workload_of(stack_of(Noisy)))
    # Recomputation begins with the layer's random state. What draws first may be drawn again with
    # the second one saved; with the first one saved, the second draws the first one's numbers.
    assert_bitwise(session.verify_module(splitting(RANDN_LIKE, session, tmp_path / "right.py")))
    wrong = session.verify_module(splitting(RAND_LIKE, session, tmp_path / "wrong.py"))
    assert rejected(wrong).loss_difference == 0  # only gradients tell


@torch.library.custom_op("sac_search_tests::draw", mutates_args=())
def draw_like(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


draw_like.register_fake(torch.empty_like)


class NoisyInSecret(nn.Module):
    """Draws by an op of its own, too, which nothing marks as random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) * torch.rand_like(x)).sin() * draw_like(x.detach())


def test_an_op_that_draws_in_secret_is_caught() -> None:
    session = session_of(workload_of(stack_of(NoisyInSecret)))
    assert_bitwise(session.verify(RECOMPUTED))
    rejected(session.verify(checkpoint_layers(LAYERS, Tier(save_random=True))))


# --- wrong policies: saved tensors that change ----------------------------------------------------


class Mutating(nn.Module):
    """Changes what its first matmul returns."""

    def __init__(self, mutate: Callable[[Tensor], Any], *, bias: bool) -> None:
        super().__init__()
        self.mutate = mutate
        self.first, self.second = linear(bias=bias), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mutate(y)
        return x + self.second(y).sin()


def halve(tensor: Tensor) -> None:
    tensor.mul_(0.5)


def halve_past_autograd(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


def halve_past_torch(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array *= 0.5


@pytest.mark.parametrize(
    ("mutate", "op", "is_noticed"),
    [
        pytest.param(halve, ADDMM, True, id="in place"),
        # Three dimensions without a bias: mm, then a view that its schema does not call one.
        pytest.param(halve, MM, False, id="through a hidden view"),
        pytest.param(halve_past_autograd, ADDMM, False, id="past autograd"),
        pytest.param(halve_past_torch, ADDMM, False, id="past torch"),
    ],
)
def test_saving_what_is_changed_later_is_caught(
    mutate: Callable[[Tensor], None], op: str, is_noticed: bool
) -> None:
    make = functools.partial(Mutating, mutate, bias=op == ADDMM)
    session = session_of(workload_of(stack_of(make)))
    assert_bitwise(session.verify(RECOMPUTED))
    verdict = session.verify(saving(op))
    if is_noticed:
        assert verdict.failure is not None
        assert verdict.failure.kind is FailureKind.MUTATED_SAVED_TENSOR
    else:
        rejected(verdict)
    # The search does not propose it, unless torch never sees the change.
    reason = unsavable_ops(session.describe().layers)[op]
    assert (reason == "its output is changed in place later") == (mutate is not halve_past_torch)


class Shifting(nn.Module):
    """Adds to its own input, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(HIDDEN))
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return self.linear(x.sin())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_layer_that_changes_its_input_is_refused(needs_grad: bool) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x.clone().requires_grad_(needs_grad) * 1)

    with pytest.raises(WorkloadError, match="modified by an inplace operation"):
        session_of(workload_of(stack_of(Shifting), loss_fn=loss_fn))


# --- layers that are not the same when they run again ---------------------------------------------


class Changing(nn.Module):
    """Multiplies by what `factor` says in this call."""

    def __init__(self, factor: Callable[[Changing, Tensor], Any]) -> None:
        super().__init__()
        self.linear = linear()
        self.factor = factor
        self.calls = 0
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return functional.gelu(self.linear(x) * self.factor(self, x))


class Restarting(tiny.Stack):
    """Begins every forward pass alike, so that without checkpointing all steps are the same."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.calls = 0
            block.generator.manual_seed(0)
        return super().forward(x.clone())


class NormedBySpectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(linear())

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x))


class Remembering(nn.Module):
    """Adds to a list that its caller gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x.detach())
        return functional.gelu(self.linear(x) * torch.stack(seen).mean(0))


class RememberingStack(tiny.Stack):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return x


def restarting(factor: Callable[[Changing, Tensor], Any]) -> nn.Module:
    return Restarting(Changing(factor), Changing(factor))


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "counter": lambda: restarting(lambda block, x: block.calls),
    "generator of its own": lambda: restarting(
        lambda block, x: torch.rand((), generator=block.generator)
    ),
    "python's random": lambda: restarting(lambda block, x: random.random()),  # noqa: S311
    "input changed past autograd": lambda: restarting(lambda block, x: x.data.mul_(0.5)),
    "power iteration": lambda: stack_of(NormedBySpectrum),
    "list that grows": lambda: RememberingStack(Remembering(), Remembering()),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_layer_that_changes_between_forward_and_recompute_is_caught(kind: str) -> None:
    session = session_of(workload_of(CHANGING[kind]()))
    assert_bitwise(session.verify(NO_CHECKPOINTING))
    for policy in (RECOMPUTED, saving(ADDMM)):
        rejected(session.verify(policy))


def test_a_layer_that_runs_another_op_is_a_failure() -> None:
    model = restarting(lambda block, x: x.sin() if block.calls == 1 else x.cos())
    session = session_of(workload_of(model))
    assert_bitwise(session.verify(NO_CHECKPOINTING))
    rejected(session.verify(RECOMPUTED))
    verdict = session.verify(saving(ADDMM))
    if tiny.RELEASE < (2, 13):  # torch says nothing, so gradients have to
        rejected(verdict)
        return
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.NOT_IN_STORAGE


def test_a_layer_that_returns_to_another_shape_is_refused() -> None:
    model = restarting(lambda block, x: x[block.calls - 1 :].sin())
    with pytest.raises(WorkloadError, match="recompute mismatch"):
        session_of(workload_of(model))


def test_a_counter_that_nothing_sets_back_proves_nothing() -> None:
    session = session_of(workload_of(stack_of(lambda: Changing(lambda block, x: block.calls))))
    for policy in (NO_CHECKPOINTING, RECOMPUTED):
        found = session.verify(policy).verification
        assert found is not None
        assert not found.passed
        assert found.noise > found.tolerance


# --- what autocast caches -------------------------------------------------------------------------


class Square(nn.Module):
    """Casts nothing under autocast but inputs and weights, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linear(bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.linears:
            x = (layer(x) * self.scale).sin()
        return x


# Autocast keeps a weight that it has cast until its context ends. Recomputed inside that context,
# or run again in it, a layer casts less often than it did, and torch numbers the casts that it
# saved. Source: https://github.com/pytorch/pytorch/issues/193338
@pytest.mark.parametrize("cache", [False, True])
def test_a_cast_that_is_taken_for_another_is_caught(cache: bool) -> None:
    step = functools.partial(accumulate_under_autocast, cache=cache)
    batch = tiny.tokens(BATCH * SEQUENCE, HIDDEN)
    session = session_of(workload_of(stack_of(Square), batch, step=step))
    assert_bitwise(session.verify(RECOMPUTED))
    verdict = session.verify(saving(TO_COPY))
    if cache:
        rejected(verdict)
    else:
        assert_bitwise(verdict)


@pytest.mark.skipif(tiny.RELEASE < (2, 13), reason="torch 2.9 and 2.12 raise nothing here")
def test_a_layer_that_runs_twice_under_autocast_is_told_what_to_do() -> None:
    session = session_of(workload_of(Twice(Square()), loss_fn=autocast_loss))
    assert_bitwise(session.verify(checkpoint_layers(["block"])))
    failure = session.verify(checkpoint_layers(["block"], Tier(ops=(MM,)))).failure
    assert failure is not None
    assert failure.kind is FailureKind.NOT_IN_STORAGE
    assert "cache_enabled=False" in failure.advice


# --- kernels that are never the same --------------------------------------------------------------


class Jitter(torch.autograd.Function):
    """Moves a gradient by 1e-6 of itself, from a generator that no seed reaches."""

    generator = torch.Generator().manual_seed(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-6 * torch.randn(gradient.shape, generator=Jitter.generator))


class Jittery(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return Jitter.apply(super().forward(x))


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_noise_of_kernels_passes_and_an_error_far_above_it_does_not(
    strength: float, tmp_path: Path
) -> None:
    session = session_of(workload_of(stack_of(functools.partial(Jittery, strength))))
    for policy in (NO_CHECKPOINTING, RECOMPUTED, checkpoint_layers(LAYERS, Tier(save_random=True))):
        found = accepted(session.verify(policy))
        assert not found.bitwise
        assert 0 < found.noise < 1e-5
        assert 0 < found.worst_gradient_difference < 1e-5
    wrong = session.verify_module(splitting(RAND_LIKE, session, tmp_path / "wrong.py"))
    assert rejected(wrong).worst_gradient_difference > 1000 * found.noise
