"""Trains shapes under exported policies, in a process where sac-search cannot be imported.

Each line that comes in is a JSON list of a shape's name and a policy's file; each line that goes
out tells of both trainings, without the policy and with it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


class Blocked:
    """Finds no sac-search."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "sac_search":
            raise ImportError("sac_search was imported")


sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]

import torch  # noqa: E402
from peaks import counted_peak  # noqa: E402
from shapes import Shape, build  # noqa: E402

STEPS = 5


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("policy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec.loader.exec_module(module)
    return module


def train(name: str, policy: Any) -> dict[str, Any]:
    """Returns the loss of each step, the peak, and a sum over what the parameters have become."""

    def steps() -> tuple[list[float], Shape]:
        shape = build(name)
        if policy is not None:
            policy.apply(shape.model)
        optimizer = torch.optim.AdamW(shape.model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            batch = shape.batch() if callable(shape.batch) else shape.batch
            loss = shape.loss_fn(shape.model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses, shape

    (losses, shape), peak_bytes = counted_peak(steps)
    parameters = [p.detach().double().abs().sum() for p in shape.model.parameters()]
    return {"losses": losses, "peak_bytes": peak_bytes, "end": torch.stack(parameters).tolist()}


def main() -> None:
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print
    for line in sys.stdin:
        name, path = json.loads(line)
        plain, policy = train(name, None), train(name, load(path))
        print(json.dumps({"plain": plain, "policy": policy}), file=answers, flush=True)


if __name__ == "__main__":
    main()
