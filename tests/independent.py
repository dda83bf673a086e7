"""Tries an exported policy by means of its own: no code of the search measures or verifies here.

    python independent.py STUDY_FILE POLICY_FILE LAYER_NAMES_AS_JSON

prints, as JSON, peaks in bytes and step times under the policy and under full checkpointing
(torch.utils.checkpoint around the forward of each layer that is named), and how far the policy's
loss and gradients are from those of the plain model.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

STEPS = 9


def load(path, name):
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(workload):
    loss = workload.loss_fn(workload.model, workload.batch)
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)


def gradients(workload):
    torch.manual_seed(7)
    loss = workload.loss_fn(workload.model, workload.batch)
    loss.backward()
    found = {n: p.grad.clone() for n, p in workload.model.named_parameters() if p.grad is not None}
    workload.optimizer.zero_grad(set_to_none=True)
    return float(loss), found


def resident(workload):
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    for state in workload.optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    batch = workload.batch
    tensors += batch.values() if isinstance(batch, dict) else [batch]
    flat = [t for x in tensors for t in (x if isinstance(x, list | tuple) else [x])]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat}.values()
    )


def peak(workload):
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(workload)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = resident(workload)
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def checkpoint_everything(model, names):
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def drop_forwards(model, names):
    for name in names:
        del model.get_submodule(name).__dict__["forward"]


def seconds(workload):
    start = time.process_time()
    step(workload)
    return time.process_time() - start


def main():
    torch.set_num_threads(1)
    study = load(sys.argv[1], "study")
    policy = load(sys.argv[2], "policy")
    names = json.loads(sys.argv[3])
    workload = study.workload(torch.device("cpu"))
    buffers = {n: b.clone() for n, b in workload.model.named_buffers()}

    def restore_buffers():
        for name, buffer in workload.model.named_buffers():
            buffer.data.copy_(buffers[name])

    loss, expected = gradients(workload)
    restore_buffers()
    policy.apply(workload.model)
    policy_loss, found = gradients(workload)
    restore_buffers()
    step(workload)
    policy_peak = peak(workload)
    ratios = []
    for _ in range(STEPS):
        mine = seconds(workload)
        policy.remove(workload.model)
        checkpoint_everything(workload.model, names)
        ratios.append(mine / seconds(workload))
        drop_forwards(workload.model, names)
        policy.apply(workload.model)
    policy.remove(workload.model)
    checkpoint_everything(workload.model, names)
    full_peak = peak(workload)
    worst = max(
        float((found[n] - g).abs().max() / g.abs().max().clamp_min(1e-30))
        for n, g in expected.items()
    )
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    report = {
        "same_parameters": found.keys() == expected.keys(),
        "loss_difference": abs(loss - policy_loss),
        "worst_gradient_difference": worst,
        "policy_peak_bytes": policy_peak,
        "full_peak_bytes": full_peak,
        "seconds_over_full": middle,
        "noise": 1.2533 * spread / STEPS**0.5,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
