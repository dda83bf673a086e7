"""Recognises why a step failed, by the error's type or by a tested pattern of its text."""

from __future__ import annotations

import re
import traceback

import torch
from torch.utils.checkpoint import CheckpointError

from sac_search.records import Failure, FailureKind, spell_out

_ADVICE = {
    FailureKind.OUT_OF_MEMORY: "The device ran out of memory; the policy saves too much for it.",
    FailureKind.HOST_OUT_OF_MEMORY: (
        "The machine ran out of main memory; close other programs or use a smaller batch."
    ),
    FailureKind.TIMEOUT: "The step took far longer than the baselines; see --trial-timeout.",
    FailureKind.CRASH: "The process that ran the step died; its log has the last words.",
    FailureKind.RECOMPUTE_MISMATCH: (
        "The layer computes something else when it is run again; look for state that changes in "
        "its forward, or leave it out with --layers."
    ),
    FailureKind.MUTATED_SAVED_TENSOR: (
        "The policy saves the output of an op that is changed in place later; such policies cannot "
        "be used, others can."
    ),
    FailureKind.NOT_IN_STORAGE: (
        "The layer runs other ops when it is run again; with a growing key/value cache, set "
        "use_cache=False in the model's config; where weights are used twice under autocast, give "
        "torch.autocast cache_enabled=False."
    ),
    FailureKind.UNAWAITED_COLLECTIVE: (
        "The policy saves what reads a collective's result: run again, the collective would be "
        "waited for by nobody, and its memory never be freed."
    ),
    FailureKind.NON_FINITE_LOSS: (
        "The loss is NaN or infinite; lower the learning rate of the workload, or check its data."
    ),
    FailureKind.USER_ERROR: "The training step raised; the message is its own.",
    FailureKind.FORECAST_OVER_BUDGET: (
        "Its peak is over the budget by the forecast, so it was not run."
    ),
}

# What a policy may well do, and another not.
OF_MEMORY = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.HOST_OUT_OF_MEMORY})

# Texts of torch 2.9 to 2.13, whole enough that no program's own message looks like them.
_PATTERNS = (
    (FailureKind.MUTATED_SAVED_TENSOR, r"selective activation checkpoint has been mutated"),
    (FailureKind.NOT_IN_STORAGE, r"encountered during backward,? but not found in\s+storage"),
    (FailureKind.HOST_OUT_OF_MEMORY, r"DefaultCPUAllocator: (can't|not enough) "),
    (FailureKind.OUT_OF_MEMORY, r"(CUDA|HIP|XPU|MPS|NPU)[^\n]{0,60}out of memory"),
    (FailureKind.OUT_OF_MEMORY, r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"),
)


def failure_from(error: BaseException) -> Failure:
    """Returns the failure that `error` stands for."""
    return make_failure(_kind_of(error), _first_lines(error))


def make_failure(kind: FailureKind, message: str) -> Failure:
    """Returns a failure with the advice that belongs to its kind."""
    return Failure(kind=kind, message=message, advice=_ADVICE[kind])


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, torch.OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, MemoryError):
        return FailureKind.HOST_OUT_OF_MEMORY
    if isinstance(error, NonFiniteLoss):
        return FailureKind.NON_FINITE_LOSS
    if isinstance(error, UnawaitedCollective):
        return FailureKind.UNAWAITED_COLLECTIVE
    if isinstance(error, CheckpointError):
        return FailureKind.RECOMPUTE_MISMATCH
    text = _text_of(error)
    for kind, pattern in _PATTERNS:
        if re.search(pattern, text, re.DOTALL):
            return kind
    return FailureKind.USER_ERROR


def _first_lines(error: BaseException, limit: int = 600) -> str:
    text = _text_of(error)
    return text if len(text) <= limit else text[:limit] + " …"


def _text_of(error: BaseException) -> str:
    # Unlike str(error), it never raises: the user's own exceptions may be made of anything.
    return spell_out("".join(traceback.format_exception_only(error)).strip())


class NonFiniteLoss(Exception):
    """The loss of a measured step is NaN or infinite."""


class UnawaitedCollective(Exception):
    """A measured step started collectives that nobody waited for."""
