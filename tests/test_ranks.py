"""Ranks: who this process is, what all agree on, and models that are spread over them.

A process group of one rank shards, gathers and reduces like any other, in this process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sac_search import ranks
from sac_search.apply import applied, apply_policy
from sac_search.device import Clock, read_peak
from sac_search.errors import UsageError
from sac_search.export.module import render_module
from sac_search.layers import find_layers
from sac_search.measure import StepMeter
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.ranks import ALONE, Launch, Peers, describe_parallelism, launched, unwrapped
from sac_search.records import Measurement, Outcome
from sac_search.trace import trace_layers
from sac_search.verify import verify_policy
from sac_search.worker.session import Session, SessionSettings
from sac_search.workload import Workload

pytestmark = pytest.mark.usefixtures("only_new_objects")

CPU = torch.device("cpu")
LAYERS = ["blocks.0", "blocks.1", "blocks.2"]
FULL = checkpoint_layers(LAYERS)
# With torch 2.9 peaks under FSDP2 were 2176 bytes apart; why was not looked into.
FREED_LATER_BYTES = 0 if tiny.RELEASE >= (2, 12) else 4096
SAVE_MATMUL = checkpoint_layers(LAYERS[:2], Tier(ops=(tiny.MM,)))
ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
LAUNCH = Launch(
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    master_address="node0",
    master_port=29500,
    has_store=True,
)


# --- who this is ----------------------------------------------------------------------------------


def test_torchrun_says_which_rank_this_is() -> None:
    assert launched(ENVIRONMENT) == LAUNCH
    assert not LAUNCH.is_on_one_machine
    assert launched({**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "False"}) != LAUNCH


def test_only_torchrun_counts() -> None:
    others = {name: v for name, v in ENVIRONMENT.items() if name != "TORCHELASTIC_RUN_ID"}
    assert launched(others) is None
    assert launched({}) is None


@pytest.mark.parametrize("change", [{"RANK": "first"}, {"WORLD_SIZE": ""}])
def test_an_environment_that_is_not_torchruns_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="its environment is not torchrun's"):
        launched({**ENVIRONMENT, **change})


def test_without_other_ranks_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert ranks.find_peers() is ALONE
    assert ALONE.any(True)
    assert not ALONE.any(False)


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    first, own = torch.device("cuda:0"), torch.device("cuda:1")
    assert ranks.device_of_rank(first, LAUNCH, is_named=False) == own
    assert ranks.device_of_rank(first, None, is_named=True) == first
    assert ranks.device_of_rank(CPU, LAUNCH, is_named=False) == CPU
    with pytest.raises(UsageError, match="--device cuda:0 is one device, but 4 ranks need one"):
        ranks.device_of_rank(first, LAUNCH, is_named=True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert ranks.device_of_rank(first, LAUNCH, is_named=False) == first
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="rank 5 needs cuda:1, but this machine has 0"):
        ranks.device_of_rank(first, LAUNCH, is_named=False)


# --- what all agree on ----------------------------------------------------------------------------


def test_all_ranks_hear_what_any_of_them_says() -> None:
    store = dist.HashStore()
    said = [[False, False], [True, False], [False, True], [True, True], [False, False]]
    heard: dict[int, list[bool]] = {}

    def ask(rank: int) -> None:
        peers = Peers(store, rank, size=2)
        heard[rank] = [peers.any(flags[rank]) for flags in said]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert heard == {0: [any(f) for f in said], 1: [any(f) for f in said]}
    assert store.num_keys() <= 4  # what was heard is not kept


class Scripted(Peers):
    """Other ranks that say what they are told to, and are only counted."""

    def __init__(self, *said: bool) -> None:
        super().__init__(size=2)
        self.said = list(said)
        self.asked = 0

    def any(self, flag: bool = False) -> bool:
        self.asked += 1
        return (self.said.pop(0) if self.said else False) or flag


def meter_of(peers: Peers, loss_fn: Any = None) -> StepMeter:
    model = tiny.stack(3)
    workload = Workload(model, loss_fn or mean_square, tiny.tokens())
    return StepMeter(workload=workload, device=CPU, clock=Clock.CPU, steps=5, peers=peers)


def measured(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None, outcome.failure
    return outcome.measurement


def test_a_rank_with_long_steps_ends_the_timing_of_all() -> None:
    # Asked before each round, and before each of its two steps.
    peers = Scripted(False, False, False, False, False, False, True)
    assert measured(meter_of(peers).measure(FULL, FULL)).steps == 2
    assert peers.asked == 7


def test_a_rank_that_failed_runs_no_further_step() -> None:
    calls = Counter[str]()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        layers = sum("_sac_layer_class" in type(block).__dict__ for block in model.blocks)
        calls[str(layers)] += 1
        if layers == 3 and calls["3"] > allowed:
            raise ValueError("of the user")
        return mean_square(model, x)

    policies = [FULL, checkpoint_layers(LAYERS[:1])]
    for allowed in (0, 2):  # in its first step, and in its first timed one
        calls.clear()
        outcomes = meter_of(Scripted(), loss_fn).compare(policies, NO_CHECKPOINTING, steps=3)
        assert [outcome.measurement for outcome in outcomes] == [None, None]
        assert calls["3"] == allowed + 1
        assert calls["1"] == (0 if allowed == 0 else 2)
    outcomes = meter_of(ALONE, loss_fn).compare(policies, NO_CHECKPOINTING, steps=3)
    assert measured(outcomes[1]).steps == 3


# --- models that are spread over ranks ------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "ddp views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=how != "fsdp kept")
    return fully_shard(model)


HOWS = ["ddp", "ddp views", "fsdp", "fsdp kept"]


def workload_of(how: str, policy: Policy = NO_CHECKPOINTING) -> Workload:
    """Returns a workload whose model is wrapped after the policy was applied, as a user would."""
    model = tiny.stack(3)
    apply_policy(model, policy)
    model = wrap(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, mean_square, tiny.tokens(), optimizer)


def losses(workload: Workload, steps: int = 3) -> list[float]:
    return [float(workload.run_step()) for _ in range(steps)]


@pytest.mark.parametrize("how", HOWS)
def test_layers_are_known_by_the_names_of_the_model_inside(how: str) -> None:
    workload = workload_of(how)
    found = find_layers(workload.bare_model, workload.run_loss)
    assert [layer.name for layer in found] == LAYERS
    traces = trace_layers(workload, found, CPU, Clock.CPU, repeats=1)
    # FSDP2 gathers before a layer's region begins, and frees after it.
    plain = Workload(tiny.stack(3), mean_square, workload.batch)
    expected = trace_layers(plain, find_layers(plain.model, plain.run_loss), CPU, Clock.CPU)
    for trace, other in zip(traces, expected, strict=True):
        assert [op.site_name for op in trace.ops] == [op.site_name for op in other.ops]
        assert [op.output_bytes for op in trace.ops] == [op.output_bytes for op in other.ops]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("policy", [FULL, SAVE_MATMUL], ids=["full", "save matmul"])
def test_measured_on_the_wrapped_model_it_is_what_the_exported_policy_does(
    how: str, policy: Policy
) -> None:
    plain, exported, measured_on = workload_of(how), workload_of(how, policy), workload_of(how)
    expected = losses(plain)
    assert losses(exported) == expected
    with applied(measured_on.bare_model, policy):
        assert losses(measured_on) == expected
    # And it is as if nothing had been applied.
    assert losses(measured_on, 1) == losses(plain, 1)


@pytest.mark.parametrize("how", HOWS)
def test_both_orders_run_the_same_ops_and_take_the_same_memory(how: str) -> None:
    def cost_of(workload: Workload) -> tuple[Counter[str], int]:
        workload.run_step()
        workload.run_step()  # DDP makes its buckets anew in the second
        peak = read_peak(workload.run_step, workload.drop_gradients, CPU)
        with tiny.OpCounter() as counter:
            workload.run_step()
        return counter.counts, peak.allocated_bytes

    plain, _ = cost_of(workload_of(how))
    early, early_bytes = cost_of(workload_of(how, SAVE_MATMUL))
    workload = workload_of(how)
    with applied(workload.bare_model, SAVE_MATMUL):
        late, late_bytes = cost_of(workload)
    assert late == early
    assert late_bytes == pytest.approx(early_bytes, abs=FREED_LATER_BYTES)
    # Nothing is sent once more: what is recomputed lies between gathering and freeing.
    sent = {op: n for op, n in plain.items() if op.startswith(("c10d.", "_c10d", "fsdp."))}
    assert sent
    assert {op: late[op] for op in sent} == sent
    assert late[tiny.GELU] == plain[tiny.GELU] + 2


@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_compared_and_a_wrong_one_is_seen(how: str) -> None:
    class Wrong:
        """An exported policy whose layer is off by a little."""

        def apply(self, model: nn.Module) -> None:
            self.handle = model.blocks[1].register_forward_hook(lambda m, args, out: out * 1.01)

        def remove(self, model: nn.Module) -> None:
            self.handle.remove()

    workload = workload_of(how)
    workload.run_step()
    right = verify_policy(workload, SAVE_MATMUL, NO_CHECKPOINTING, "none", CPU)
    assert right.bitwise, right
    wrong = verify_policy(workload, Wrong(), NO_CHECKPOINTING, "none", CPU)
    assert not wrong.passed
    assert wrong.worst_parameter is not None
    assert wrong.worst_parameter.startswith("blocks.")


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp kept"])
def test_a_session_takes_a_wrapped_model_and_exports_names_of_the_bare_one(how: str) -> None:
    session = Session(workload_of(how), SessionSettings(spec="here", steps=2), CPU)
    description = session.describe()
    assert [layer.name for layer in description.layers] == LAYERS
    found = session.measure(SAVE_MATMUL)
    assert measured(found).steps == 2
    assert session.verify(SAVE_MATMUL).verification is not None
    # Fake tensors reach none of DDP's buckets, and it adds nothing to them; what FSDP2 gathers and
    # frees is counted while the step runs, but for a few integers of its own.
    unseen_bytes = 0 if how == "ddp" else 64 + FREED_LATER_BYTES
    assert found.forecast_peak_bytes == pytest.approx(
        measured(found).allocated_bytes, abs=unseen_bytes
    )
    assert any("counted while its step runs" in note for note in description.notes) == bool(
        unseen_bytes
    )
    text = render_module(SAVE_MATMUL, meta=META, headline=["For a test."])
    namespace: dict[str, Any] = {}
    exec(compile(text, "policy.py", "exec"), namespace)  # noqa: S102
    model = tiny.stack(3)
    namespace["apply"](model)
    assert [hasattr(block, "_sac_layer_class") for block in model.blocks] == [True, True, False]


META = {
    "study_name": "test",
    "environment": {"torch_version": torch.__version__, "device": "cpu", "device_name": "paper"},
}


def test_the_parallel_setting_is_written_down() -> None:
    assert describe_parallelism(tiny.stack(1)) == ""
    assert describe_parallelism(wrap(tiny.stack(1), "ddp")) == "DDP"
    assert describe_parallelism(wrap(tiny.stack(1), "ddp views")) == "DDP (bucket views)"
    assert describe_parallelism(wrap(tiny.stack(2), "fsdp")) == "FSDP2 of 3 modules, mesh 1 S(0)"


def test_only_wrappers_are_taken_off() -> None:
    model = tiny.stack(1)
    assert unwrapped(model) is model
    assert unwrapped(wrap(model, "ddp")) is model
