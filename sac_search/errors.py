"""Every exception that sac-search raises on purpose.

    SacSearchError
    ├── UsageError              wrong arguments                                   exit 2
    │   ├── WorkloadNotFound    no such file, module or factory
    │   └── StudyError          the study cannot be used as asked
    │       ├── StudyNotFound
    │       ├── StudyFileError  unreadable, locked, corrupt, or of a newer schema
    │       └── EnvironmentMismatch
    ├── NoPolicyFits            nothing measured stays under the budget           exit 3
    ├── WorkloadError           the user's workload itself fails                  exit 4
    │   └── CannotForecast      its step needs values, so it has to run
    └── WorkerError             the worker process broke in a way that is ours    exit 1

A message says what was seen, what was expected and what to do. Outcomes of a trial (out of memory,
timeout, mismatch, …) are not exceptions: see `records.Failure`.
"""

from __future__ import annotations


class SacSearchError(Exception):
    """The root of all errors raised on purpose."""

    exit_code = 1


class UsageError(SacSearchError):
    """The arguments cannot be used; nothing was started."""

    exit_code = 2


class WorkloadNotFound(UsageError):
    """The file, module or factory that names the workload does not exist."""


class StudyError(UsageError):
    """The study exists but cannot be used as asked."""


class StudyNotFound(StudyError):
    """There is no study of that name."""


class StudyFileError(StudyError):
    """A study's file cannot be read or written."""


class EnvironmentMismatch(StudyError):
    """The study was measured in another environment; its times cannot be compared with new ones."""


class NoPolicyFits(SacSearchError):
    """No policy that was measured stays under the budget."""

    exit_code = 3


class WorkloadError(SacSearchError):
    """The workload itself fails, with any policy.

    `user_traceback` holds the traceback of the user's own code when there is one.
    """

    exit_code = 4

    def __init__(self, message: str, *, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class CannotForecast(WorkloadError):
    """The step needs what fake tensors do not have: values, or an op that works on them."""


class WorkerError(SacSearchError):
    """The worker process broke, and not because of the workload."""
