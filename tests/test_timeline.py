"""Memory over a step: the peak to the byte, what bytes are for, and which layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_forecast import CPU, WORKLOADS, frozen_with_accumulation, mlp, routed
from tiny import HIDDEN, MM, stack, tokens

from sac_search import records
from sac_search.forecast import Forecast, forecast_step, track_step
from sac_search.policy import NO_CHECKPOINTING, Policy, Tier, checkpoint_layers
from sac_search.records import Phase
from sac_search.timeline import MOST_POINTS, MemoryKind, Timeline, thinned
from sac_search.workload import Workload
from sac_search.workspaces import WorkspaceKey

LAYERS = tuple(f"blocks.{number}" for number in range(4))
POLICIES = {
    "none": NO_CHECKPOINTING,
    "full": checkpoint_layers(LAYERS),
    "save matmul": checkpoint_layers(LAYERS, Tier(ops=(MM,))),
}


def transformer() -> Workload:
    model = stack(len(LAYERS))
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(
        model, lambda model, batch: model(batch).square().mean(), tokens(), optimizer
    )
    workload.run_step()
    return workload


def dry_run(workload: Workload, policy: Policy, **options: object) -> Forecast:
    names = tuple(options.pop("layer_names", LAYERS))
    return forecast_step(workload, policy, layer_names=names, with_timeline=True, **options)


def timeline_of(workload: Workload, policy: Policy, **options: object) -> Timeline:
    timeline = dry_run(workload, policy, **options).timeline
    assert timeline is not None
    return timeline


def parameter_bytes(workload: Workload) -> int:
    return sum(p.nbytes for p in workload.parameters())


# --- the peak -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_the_peak_is_that_of_the_forecast(policy: Policy) -> None:
    workload = transformer()
    plain = forecast_step(workload, policy, layer_names=LAYERS)
    drawn = dry_run(workload, policy)
    assert drawn.timeline is not None and plain.timeline is None
    assert drawn.peak_bytes == plain.peak_bytes == drawn.timeline.peak_bytes
    assert plain.peak_phase == drawn.timeline.peak_phase
    assert max(drawn.timeline.total_bytes) == drawn.timeline.peak_bytes
    assert drawn.phase_peak_bytes == plain.phase_peak_bytes
    assert drawn.layer_bytes == plain.layer_bytes


def test_the_peak_of_full_checkpointing_is_where_the_last_layer_is_made_again() -> None:
    timeline = timeline_of(transformer(), POLICIES["full"])
    assert (timeline.peak_phase, timeline.peak_layer) == (Phase.BACKWARD, LAYERS[-1])
    assert timeline.kind_bytes[MemoryKind.RECOMPUTED][timeline.peak_index] > 0


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_drawing_a_step_changes_no_figure_of_its_forecast(make: Callable[[], Workload]) -> None:
    workload, names = make(), ("0", "1", "2")
    workload.run_step()
    dear = Tier(ops=("aten.addmm.default", "aten.convolution.default"))
    for policy in (NO_CHECKPOINTING, checkpoint_layers(names[:2], dear)):
        plain = forecast_step(workload, policy, layer_names=names)
        drawn = dry_run(workload, policy, layer_names=names)
        assert drawn.timeline is not None
        assert drawn.timeline.peak_bytes == plain.peak_bytes
        assert replace(drawn, timeline=None) == plain


def test_workspaces_and_foreign_tensors_are_in_the_peak() -> None:
    workload = transformer()
    keys: list[WorkspaceKey] = []

    class Every(dict[WorkspaceKey, int]):
        def get(self, key: WorkspaceKey, default: int = 0) -> int:  # type: ignore[override]
            keys.append(key)
            return 1 << 20

        def __bool__(self) -> bool:
            return True

    drawn = dry_run(workload, POLICIES["full"], workspaces=Every(), foreign_bytes=4096)
    assert drawn.timeline is not None and keys
    assert drawn.timeline.peak_bytes == drawn.peak_bytes
    assert drawn.timeline.kind_bytes[MemoryKind.TEMPORARY][drawn.timeline.peak_index] >= 1 << 20
    assert drawn.timeline.kind_bytes[MemoryKind.OTHER][0] == 4096 + tokens().nbytes


def test_a_step_with_accumulation_and_clipping() -> None:
    workload = frozen_with_accumulation()
    workload.run_step()
    drawn = dry_run(workload, checkpoint_layers(["1", "2"]), layer_names=("1", "2"))
    assert drawn.timeline is not None
    assert drawn.timeline.peak_bytes == drawn.peak_bytes
    order = [phase for phase, _ in groupby(drawn.timeline.phases)]
    assert order.count(Phase.BACKWARD) == 2 and order[-1] is Phase.OPTIMIZER
    trained = sum(p.nbytes for p in workload.parameters() if p.requires_grad)
    gradients = drawn.timeline.kind_bytes[MemoryKind.GRADIENTS]
    assert gradients[drawn.timeline.phases.index(Phase.OPTIMIZER)] == trained


def test_a_step_that_is_counted_while_it_runs() -> None:
    workload = routed()
    workload.run_step()
    names = ("0", "1", "2", "3")
    drawn = track_step(
        workload, checkpoint_layers(names), device=CPU, layer_names=names, with_timeline=True
    )
    assert drawn.timeline is not None
    assert drawn.timeline.peak_bytes == drawn.peak_bytes
    assert set(drawn.timeline.layers) == {"", *names}
    hooks = [p._post_accumulate_grad_hooks for p in workload.parameters()]
    assert not any(hooks)


# --- what bytes are for ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_byte_is_of_the_kind_that_it_is_for(policy: Policy) -> None:
    workload = transformer()
    timeline = timeline_of(workload, policy)
    size, kinds = parameter_bytes(workload), timeline.kind_bytes
    assert set(kinds[MemoryKind.PARAMETERS]) == {size}
    counts = 4 * len(workload.parameters())
    assert set(kinds[MemoryKind.OPTIMIZER]) == {2 * size + counts}
    assert set(kinds[MemoryKind.OTHER]) == {tokens().nbytes}
    for index, phase in enumerate(timeline.phases):
        gradients = kinds[MemoryKind.GRADIENTS][index]
        if phase in (Phase.FORWARD, Phase.LOSS):
            assert gradients == 0
        if phase is not Phase.BACKWARD:
            assert kinds[MemoryKind.RECOMPUTED][index] == 0
    assert kinds[MemoryKind.GRADIENTS][timeline.phases.index(Phase.OPTIMIZER)] == size
    assert bool(any(kinds[MemoryKind.RECOMPUTED])) == bool(policy.layers)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_step_leaves_are_there_when_the_next_begins(set_to_none: bool) -> None:
    def step(workload: Workload) -> torch.Tensor:
        loss = workload.loss_fn(workload.model, workload.next_batch())
        loss.backward()
        assert workload.optimizer is not None
        workload.optimizer.step()
        workload.optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    workload = replace(transformer(), step=step)
    workload.run_step()
    gradients = timeline_of(workload, POLICIES["full"]).kind_bytes[MemoryKind.GRADIENTS]
    assert gradients[0] == (0 if set_to_none else parameter_bytes(workload))


def test_what_a_tier_saves_is_saved() -> None:
    workload = transformer()
    saved = {
        name: max(timeline_of(workload, policy).kind_bytes[MemoryKind.SAVED])
        for name, policy in POLICIES.items()
    }
    # Four matmuls of each block: qkv, out, up and down.
    outputs = 4 * tokens().nbytes * (3 + 1 + 2 + 1)
    assert saved["save matmul"] - saved["full"] == pytest.approx(outputs, abs=64 * HIDDEN)


def test_optimizer_state_that_the_dry_run_makes_is_optimizer_state() -> None:
    with torch.device("meta"):
        model = stack(2)
        batch = torch.empty(2, 4, HIDDEN)
    optimizer = torch.optim.AdamW(model.parameters())
    on_meta = Workload(model, lambda model, batch: model(batch).square().mean(), batch, optimizer)
    timeline = timeline_of(on_meta, NO_CHECKPOINTING, layer_names=("blocks.0",))
    counts = 4 * len(on_meta.parameters())
    assert set(timeline.kind_bytes[MemoryKind.OPTIMIZER]) == {2 * parameter_bytes(on_meta) + counts}


def test_the_layers_run_forward_and_then_back() -> None:
    for policy in POLICIES.values():
        timeline = timeline_of(transformer(), policy)
        places = zip(timeline.phases, timeline.layers, strict=True)
        order = [layer for (_, layer), _ in groupby(places) if layer]
        assert order == [*LAYERS, *reversed(LAYERS)]


# --- the points -----------------------------------------------------------------------------------


def test_a_long_step_has_few_points() -> None:
    timeline = timeline_of(mlp(), NO_CHECKPOINTING, layer_names=("0",))
    assert len(timeline.ops) <= MOST_POINTS
    assert timeline.ops == tuple(sorted(set(timeline.ops)))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(6, 40))
def test_what_is_left_of_a_curve_has_its_ends_and_its_peak(totals: list[int], most: int) -> None:
    kept = thinned(totals, most)
    assert kept == sorted(set(kept)) and len(kept) <= most
    assert {0, len(totals) - 1, totals.index(max(totals))} <= set(kept)
    if len(totals) <= most:  # a point may go only where the curve is flat on both sides
        for index in set(range(len(totals))) - set(kept):
            assert totals[index - 1] == totals[index] == totals[index + 1]


def test_a_timeline_is_written_and_read() -> None:
    timeline = timeline_of(transformer(), POLICIES["full"])
    assert records.decode(records.encode(timeline), Timeline) == timeline


@pytest.mark.parametrize(
    "changes", [{"peak_index": 9}, {"layers": ()}, {"ops": (), "phases": (), "layers": ()}]
)
def test_a_damaged_timeline_is_refused(changes: dict[str, object]) -> None:
    whole = {"ops": (0,), "phases": (Phase.LOSS,), "layers": ("",), "peak_index": 0}
    kinds = {} if changes.get("ops") == () else {MemoryKind.SAVED: (1,)}
    with pytest.raises(ValueError, match="timeline"):
        Timeline(**(whole | {"kind_bytes": kinds} | changes))
