"""Sizes and prices of the layers of real, small models."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from sac_search import profile as profile_module
from sac_search.apply import applied
from sac_search.device import Clock
from sac_search.errors import CannotForecast
from sac_search.forecast import Forecast, forecast_step
from sac_search.forecaster import Forecaster, ProfileRequest
from sac_search.layers import find_layers
from sac_search.policy import NO_CHECKPOINTING, Policy, checkpoint_layers
from sac_search.policy_runtime import SaveSet
from sac_search.profile import Profile, build_profile
from sac_search.records import Phase
from sac_search.space import Granularity, LayerChoiceMode, SearchSpace, build_space
from sac_search.trace import LayerTrace, trace_layers
from sac_search.workload import Workload

CPU = torch.device("cpu")
CLASS, SITE = Granularity.CLASS, Granularity.SITE
LAYERS = 5
WIDTH = 48
ROWS = 256
UP, DOWN = f"matmul[{WIDTH}x{4 * WIDTH}]", f"matmul[{4 * WIDTH}x{WIDTH}]"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gate(nn.Module):
    """Another kind, which has a matmul of its own and one site that is a `Block`'s as well."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x)) * self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True, eq=False)
class Model:
    """A workload with its layers traced. Each policy is dry-run once."""

    workload: Workload
    layers: tuple[LayerTrace, ...]
    forecasts: dict[str, Forecast] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def kinds(self) -> dict[str, list[LayerTrace]]:
        kinds: dict[str, list[LayerTrace]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        return kinds

    @property
    def gradients(self) -> dict[str, int]:
        return {layer.name: 4 * layer.parameter_count for layer in self.layers}

    @property
    def full(self) -> Policy:
        return checkpoint_layers(self.names)

    def forecast(self, policy: Policy) -> Forecast:
        if policy.key not in self.forecasts:
            dry = forecast_step(self.workload, policy, layer_names=self.names)
            self.forecasts[policy.key] = dry
        return self.forecasts[policy.key]

    def build(self, dry_run: Callable[[Policy], Forecast], granularity: Granularity) -> Profile:
        return build_profile(
            self.layers,
            self.gradients,
            dry_run,
            granularity=granularity,
            policy_call_seconds=1e-6,
        )

    def space(self, granularity: Granularity = SITE, tiers: int = 2) -> SearchSpace:
        return build_space(self.layers, LayerChoiceMode.COUNT, granularity, tiers)


def make_workload(*modules: type[nn.Module]) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(module() for module in modules))
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.randn(ROWS, WIDTH),
        optimizer,
    )


def make_model(*modules: type[nn.Module]) -> Model:
    workload = make_workload(*modules)
    layers = find_layers(workload.model, workload.run_loss)
    workload.run_step()
    return Model(workload, tuple(trace_layers(workload, layers, CPU, Clock.CPU, repeats=1)))


@functools.cache
def one_kind() -> Model:
    return make_model(*[Block] * LAYERS)


@functools.cache
def two_kinds() -> Model:
    return make_model(Block, Gate, Block, Gate, Block)


MODELS = [one_kind, two_kinds]


@functools.cache
def profile(model: Model, granularity: Granularity = SITE) -> Profile:
    return model.build(model.forecast, granularity)


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param()  # type: ignore[no-any-return]


# --- sizes ----------------------------------------------------------------------------------------


def test_layers_keep_what_dry_runs_say(model: Model) -> None:
    none, full = model.forecast(NO_CHECKPOINTING), model.forecast(model.full)
    for kind, members in zip(profile(model).kinds, model.kinds.values(), strict=True):
        for layer in members:
            assert kind.alone_bytes == none.layer_bytes[layer.name].saved_bytes
            assert kind.plain_bytes == full.layer_bytes[layer.name].saved_bytes
            assert kind.gradient_bytes == 4 * layer.parameter_count


@pytest.mark.parametrize("granularity", Granularity)
def test_the_bytes_of_a_label_are_those_of_a_dry_run(
    model: Model, granularity: Granularity
) -> None:
    found = profile(model, granularity)
    space = model.space(granularity)
    for kind, members in zip(found.kinds, model.kinds.values(), strict=True):
        assert len(kind.labels) >= 2
        for label, more_bytes in zip(kind.labels, kind.label_bytes, strict=True):
            # Of this kind alone, all other layers recompute everything.
            choices = dict.fromkeys(model.names, frozenset[str]())
            choices |= dict.fromkeys([layer.name for layer in members], frozenset([label]))
            dry = model.forecast(space.policy_of(choices))
            for layer in members:
                saved_bytes = dry.layer_bytes[layer.name].saved_bytes
                assert saved_bytes == kind.plain_bytes + more_bytes, (kind.name, label)


def test_a_saved_matmul_keeps_its_output() -> None:
    outputs = {UP: 4 * WIDTH, DOWN: WIDTH, f"matmul[{WIDTH}x{WIDTH}]": WIDTH}
    _, gate = profile(two_kinds()).kinds
    for label, features in outputs.items():
        assert gate.label_bytes[gate.labels.index(label)] == 4 * features * ROWS


def test_labels_together_keep_the_sum_of_what_each_of_them_does(model: Model) -> None:
    found = profile(model)
    labels = {kind.name: frozenset(kind.labels) for kind in found.kinds}
    everything = {layer.name: labels[layer.kind] for layer in model.layers}
    dry = model.forecast(model.space().policy_of(everything))
    for kind, members in zip(found.kinds, model.kinds.values(), strict=True):
        saved_bytes = dry.layer_bytes[members[0].name].saved_bytes
        assert saved_bytes == kind.plain_bytes + sum(kind.label_bytes)


def test_rows_are_sampled_where_most_and_least_is_kept(model: Model) -> None:
    found = profile(model)
    assert found.most_kept.left_alone == model.names
    assert found.most_kept.phase_peak_bytes == model.forecast(NO_CHECKPOINTING).phase_peak_bytes
    assert found.least_kept.left_alone == ()
    assert found.least_kept.phase_peak_bytes == model.forecast(model.full).phase_peak_bytes
    assert found.most_kept.phase_peak_bytes.keys() >= {Phase.FORWARD, Phase.BACKWARD}


def test_layers_come_in_the_order_in_which_they_run() -> None:
    found = profile(two_kinds())
    assert found.layers == ("0", "1", "2", "3", "4")
    assert [kind.name for kind in found.kinds] == ["Block", "Gate"]
    assert found.order == (0, 1, 0, 1, 0)


def test_alike_layers_share_the_dry_runs() -> None:
    asked: list[Policy] = []

    def dry_run(policy: Policy) -> Forecast:
        asked.append(policy)
        return one_kind().forecast(policy)

    found = one_kind().build(dry_run, SITE)
    # All layers left alone, all recomputed, and five decisions in five layers at once.
    assert len(one_kind().space().saves) == LAYERS
    assert len(asked) == 3
    assert found == profile(one_kind())


@pytest.mark.parametrize("granularity", Granularity)
def test_where_a_step_without_checkpointing_has_no_dry_run(
    model: Model, granularity: Granularity
) -> None:
    """One layer of each kind is left alone instead, and says the same."""

    def dry_run(policy: Policy) -> Forecast:
        if len(policy.layers) < len(model.layers) - len(model.kinds):
            raise CannotForecast("out of memory, on a device that counts real steps")
        return model.forecast(policy)

    found, normal = model.build(dry_run, granularity), profile(model, granularity)

    assert found.kinds == normal.kinds
    assert found.least_kept == normal.least_kept
    firsts = tuple(members[0].name for members in model.kinds.values())
    assert found.most_kept.left_alone == firsts
    others = [name for name in model.names if name not in firsts]
    peaks = model.forecast(checkpoint_layers(others)).phase_peak_bytes
    assert found.most_kept.phase_peak_bytes == peaks


def test_a_step_that_cannot_be_dry_run_at_all_has_no_profile() -> None:
    def dry_run(policy: Policy) -> Forecast:
        raise CannotForecast("it reads values")

    with pytest.raises(CannotForecast):
        one_kind().build(dry_run, SITE)


# --- prices ---------------------------------------------------------------------------------------


def replayed_seconds(model: Model, kind: str) -> dict[str, float]:
    """Returns for each op site of a kind the seconds that plain checkpointing spends on it again"""
    first, *_ = members = model.kinds[kind]
    recomputed = model.forecast(model.full).recomputed[first.name]
    seconds = {}
    for op in first.ops:
        of_all = [o.seconds for layer in members for o in layer.ops if o.site_name == op.site_name]
        again = Counter(recomputed)[op.op, op.site] / op.calls
        seconds[op.site_name] = again * statistics.median(of_all)
    return seconds


@pytest.mark.parametrize("granularity", Granularity)
def test_seconds_are_those_of_what_is_recomputed(model: Model, granularity: Granularity) -> None:
    found = profile(model, granularity)
    for kind in found.kinds:
        seconds = replayed_seconds(model, kind.name)
        total = kind.other_seconds + sum(kind.label_seconds)
        assert total == pytest.approx(sum(seconds.values()))
        assert kind.label_seconds == tuple(sorted(kind.label_seconds, reverse=True))
        assert min(kind.label_seconds) > 0
        matmuls = [kind.labels.index(name) for name in kind.labels if name.startswith("matmul")]
        assert sum(kind.label_seconds[i] for i in matmuls) == pytest.approx(
            sum(s for name, s in seconds.items() if name.startswith("aten.addmm.default"))
        )
    assert found.recompute_seconds == pytest.approx(
        sum(sum(replayed_seconds(model, layer.kind).values()) for layer in model.layers)
    )


def test_what_early_stop_drops_has_no_label() -> None:
    """The last matmul of a block is not run again, so saving it costs memory and buys nothing."""
    (kind,) = profile(one_kind()).kinds
    assert {save.label for save in one_kind().space().saves} >= {UP, DOWN}
    assert replayed_seconds(one_kind(), "Block")[f"aten.addmm.default[{4 * WIDTH}x{WIDTH}]"] == 0
    assert UP in kind.labels
    assert DOWN not in kind.labels
    # In the other kind a product follows, which needs that matmul's output.
    _, gate = profile(two_kinds()).kinds
    assert {UP, DOWN} <= set(gate.labels)


def test_a_class_is_its_sites_together() -> None:
    (by_class,) = profile(one_kind(), CLASS).kinds
    (by_site,) = profile(one_kind()).kinds
    assert set(by_class.labels) == {label.partition("[")[0] for label in by_site.labels}
    seconds = dict(zip(by_class.labels, by_class.label_seconds, strict=True))
    site_seconds = dict(zip(by_site.labels, by_site.label_seconds, strict=True))
    assert seconds["matmul"] == pytest.approx(site_seconds[UP])
    # The dead matmul is saved as well, for the class is one decision.
    sizes = dict(zip(by_class.labels, by_class.label_bytes, strict=True))
    assert sizes["matmul"] == (4 * WIDTH + WIDTH) * ROWS * 4
    assert by_class.plain_bytes == by_site.plain_bytes


def test_the_cheapest_decisions_go_with_the_rest_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (every,) = profile(one_kind()).kinds
    monkeypatch.setattr(profile_module, "MOST_LABELS", 2)
    (most,) = one_kind().build(one_kind().forecast, SITE).kinds
    assert most.labels == every.labels[:2]
    assert most.label_bytes == every.label_bytes[:2]
    left_out = sum(every.label_seconds[2:])
    assert left_out > 0
    assert most.other_seconds == pytest.approx(every.other_seconds + left_out)


@pytest.mark.skipif(tiny.RELEASE < (2, 12), reason="it is asked in the recompute as well there")
def test_a_policy_is_asked_as_often_as_the_profile_says(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    decide = SaveSet.decide

    def count(self: SaveSet, *call: Any) -> Any:
        nonlocal asked
        asked += 1
        return decide(self, *call)

    monkeypatch.setattr(SaveSet, "decide", count)
    choices = {layer.name: frozenset([UP]) for layer in model.layers}
    with applied(model.workload.model, model.space().policy_of(choices)):
        model.workload.run_forward()
    found = profile(model)
    assert asked == sum(found.kinds[kind].policy_calls for kind in found.order)
    assert found.policy_call_seconds == 1e-6


# --- the forecaster -------------------------------------------------------------------------------


def test_a_forecaster_makes_the_profile_of_its_workload() -> None:
    workload = make_workload(Block, Block)
    workload.model.get_submodule("0.norm").requires_grad_(False)
    workload.model.get_submodule("1.norm").requires_grad_(False)
    workload.run_step()
    layers = find_layers(workload.model, workload.run_loss)
    traced = tuple(trace_layers(workload, layers, CPU, Clock.CPU, repeats=1))
    forecaster = Forecaster(workload, traced, CPU)

    found = forecaster.profile(ProfileRequest(layers=traced, granularity=CLASS))

    (kind,) = found.kinds
    assert found.granularity is CLASS
    assert "matmul" in kind.labels
    # Without those of the frozen norm.
    assert kind.gradient_bytes == 4 * (traced[0].parameter_count - 2 * WIDTH)
    full = forecaster.forecast(checkpoint_layers(["0", "1"]))
    assert found.least_kept.phase_peak_bytes == full.phase_peak_bytes
