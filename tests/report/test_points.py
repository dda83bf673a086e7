"""The points of plots and strips: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

import dataclasses

import pytest
from results import FULL_CANDIDATE, GIB, NONE_CANDIDATE, TRIAL, make_result
from scripted import (
    BLOCK_OPS,
    CONVOLUTION_OPS,
    DROPOUT_OPS,
    make_candidate,
    make_layers,
    make_timeline,
)

from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.records import Phase
from sac_search.report.points import (
    Ending,
    Group,
    peak_name,
    peak_parts,
    phase_spans,
    policy_points,
    trial_points,
)
from sac_search.report.strips import Treatment, layer_strips
from sac_search.timeline import MemoryKind, Timeline


def test_every_policy_that_ran_is_of_one_group() -> None:
    over = make_candidate("trial 8", policy=checkpoint_layers(["h.0"]), peak_bytes=7 * GIB)
    other = make_candidate("trial 9", policy=checkpoint_layers(["h.1"]), peak_bytes=4 * GIB)
    result = make_result(NONE_CANDIDATE, FULL_CANDIDATE, TRIAL, over, other, best=TRIAL)
    assert [point.group for point in policy_points(result)] == [
        Group.BASELINE,
        Group.BASELINE,
        Group.BEST,
        Group.OVER,
        Group.FITTING,
    ]


def test_what_cannot_be_exported_is_never_the_best_so_far() -> None:
    counting = Tier(ops=("aten.addmm.default",), every_second_matmul=True)
    quick = make_candidate("rule", policy=checkpoint_layers(["h.0"], counting), seconds=0.1)
    eager = dataclasses.replace(
        make_candidate("eager", policy=checkpoint_layers(["h.1"]), seconds=0.1), is_reference=True
    )
    found = trial_points(make_result(quick, eager, TRIAL, best=TRIAL))
    assert [point.ending for point in found] == [Ending.FITS] * 3
    assert [point.best_seconds for point in found] == [None, None, TRIAL.step_seconds]


def test_phases_follow_each_other_to_the_end() -> None:
    timeline = make_timeline(forward=10, backward=5)
    spans = phase_spans(timeline)
    assert [(span.phase, span.first_op, span.last_op) for span in spans] == [
        (Phase.FORWARD, 0, 20),
        (Phase.BACKWARD, 20, 30),
        (Phase.OPTIMIZER, 30, 30),
    ]


def test_a_peak_is_named_by_its_phase_and_layer() -> None:
    assert peak_name(make_timeline(forward=1, backward=1)) == "backward, h.1"
    alone = make_timeline(forward=1, backward=1, layer="")
    assert peak_name(alone) == "backward, outside the layers"
    assert peak_name(dataclasses.replace(alone, peak_index=3)) == "optimizer"


def test_what_holds_a_peak_comes_to_the_peak() -> None:
    timeline = make_timeline(forward=500, backward=300)
    assert peak_parts(timeline) == [(MemoryKind.SAVED, 500), (MemoryKind.RECOMPUTED, 300)]
    sizes = {kind: (20 + number,) for number, kind in enumerate(MemoryKind)}
    whole = Timeline(ops=(0,), phases=(Phase.LOSS,), layers=("",), kind_bytes=sizes, peak_index=0)
    assert sum(size for _, size in peak_parts(whole)) == whole.peak_bytes


# --- strips ---------------------------------------------------------------------------------------


def test_every_byte_and_second_of_a_layer_is_treated_once() -> None:
    for ops in (BLOCK_OPS, CONVOLUTION_OPS, DROPOUT_OPS):
        layers = make_layers(2, ops)
        tier = Tier(ops=("aten.addmm.default", "aten.convolution.default", "aten.add_.Tensor"))
        checkpointed, alone = layer_strips(layers, checkpoint_layers(["h.0"], tier))
        for strip, layer in ((checkpointed, layers[0]), (alone, layers[1])):
            treated = sum(strip.bytes_that_are(treatment) for treatment in Treatment)
            assert treated == strip.output_bytes == sum(op.output_bytes for op in layer.ops)
            seconds = sum(op.seconds for op in layer.ops)
            assert sum(strip.seconds.values()) == pytest.approx(seconds)
        assert {part.treatment for part in alone.parts} == {Treatment.LEFT_ALONE}
        saved = {part.op for part in checkpointed.parts if part.treatment is Treatment.SAVED}
        assert saved <= {"aten.addmm.default", "aten.convolution.default"} and saved


def test_random_ops_are_saved_together_or_not_at_all() -> None:
    layers = make_layers(1, DROPOUT_OPS)
    random_ops = {op.op for op in DROPOUT_OPS if op.random}
    named = Tier(ops=tuple(sorted(op.op for op in DROPOUT_OPS)))
    for tier in (named, dataclasses.replace(named, save_random=True)):
        (strip,) = layer_strips(layers, checkpoint_layers(["h.0"], tier))
        saved = {part.op for part in strip.parts if part.treatment is Treatment.SAVED}
        assert bool(saved & random_ops) is tier.save_random


def test_without_a_policy_everything_is_left_alone() -> None:
    (strip,) = layer_strips(make_layers(1), Policy())
    assert strip.bytes_that_are(Treatment.LEFT_ALONE) == strip.output_bytes > 0
