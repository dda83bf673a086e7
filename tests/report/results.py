"""Results made by hand, for the tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripted import ENVIRONMENT, make_candidate, make_layers

from sac_search import units
from sac_search.opclasses import OpClass
from sac_search.policy import Policy, Tier, checkpoint_layers
from sac_search.records import Verification
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate
from sac_search.study.result import SearchResult

GIB = units.GIB
BITWISE = Verification(
    passed=True,
    bitwise=True,
    reference="none",
    loss_difference=0.0,
    worst_gradient_difference=0.0,
    worst_parameter=None,
    noise=0.0,
    tolerance=1e-4,
)
NONE_CANDIDATE = make_candidate(
    NONE, policy=Policy(), seconds=0.2, peak_bytes=8 * GIB, noise=0.004, is_baseline=True
)
FULL_CANDIDATE = make_candidate(
    FULL,
    policy=checkpoint_layers(["h.0", "h.1"]),
    seconds=0.26,
    peak_bytes=4 * GIB,
    noise=0.006,
    is_baseline=True,
)
TRIAL = make_candidate(
    "trial 7",
    policy=checkpoint_layers(
        ["h.0", "h.1"], Tier(classes=(OpClass.MATMUL,), ops=("aten.mm.default",))
    ),
    seconds=0.22,
    peak_bytes=5 * GIB,
)


def make_result(
    *candidates: Candidate, best: Candidate | None = None, **changes: Any
) -> SearchResult:
    return SearchResult(
        **{
            "study_name": "gpt",
            "folder": Path("studies/gpt"),
            "budget_bytes": 6 * GIB,
            "environment": ENVIRONMENT,
            "candidates": candidates or (NONE_CANDIDATE, FULL_CANDIDATE, TRIAL),
            "best": best,
            "verification": BITWISE if best else None,
            "layers": make_layers(2),
            "floor_bytes": 2 * GIB,
            "stop_reason": "3 trials measured (--trials 3)",
            **changes,
        }
    )
