"""Messages between parent and worker: one JSON object per line, a request and then its reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sac_search import errors
from sac_search.forecaster import ProfileRequest
from sac_search.policy import Policy
from sac_search.profile import Profile
from sac_search.records import Outcome, spell_out
from sac_search.timeline import Timeline
from sac_search.worker.session import Description, ForecastPeak, SessionSettings, Verdict


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Asks the worker to do one thing."""

    number: int
    """Counts up; the reply carries the same."""
    method: str
    """A key of METHODS."""
    argument: msgspec.Raw
    """Of the method's argument type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """An exception of the worker's side that the parent raises again."""

    type_name: str
    """Its class, one of `sac_search.errors`."""
    message: str
    """Its text."""
    user_traceback: str = ""
    """The traceback of the user's own code."""

    @classmethod
    def of(cls, error: errors.SacSearchError) -> RemoteError:
        """Returns what stands for an exception here."""
        return cls(
            type_name=type(error).__name__,
            message=spell_out(str(error)),
            user_traceback=spell_out(getattr(error, "user_traceback", "")),
        )

    def local(self) -> errors.SacSearchError:
        """Returns the exception that it stands for."""
        error_type = getattr(errors, self.type_name, errors.WorkerError)
        if error_type is errors.WorkloadError:
            return errors.WorkloadError(self.message, user_traceback=self.user_traceback)
        found: errors.SacSearchError = error_type(self.message)
        return found


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request."""

    number: int
    """The request's number."""
    result: msgspec.Raw = msgspec.Raw(b"true")
    """Of the method's result type."""
    error: RemoteError | None = None
    """Set instead of a result."""
    healthy: bool = True
    """Whether memory is back to where it was, so that the worker can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The argument of `compare`."""

    policies: tuple[Policy, ...]
    """What to compare."""
    steps: int
    """Timed steps of each."""


@dataclass(frozen=True, slots=True)
class Method:
    """The types of one method."""

    argument_type: Any
    """What it takes."""
    result_type: Any
    """What it gives."""


METHODS = {
    "load": Method(SessionSettings, bool),
    "describe": Method(bool, Description),
    "run_steps": Method(Policy, Outcome),
    "compare": Method(Comparison, list[Outcome]),
    "forecast": Method(Policy, ForecastPeak),
    "timeline": Method(Policy, Timeline | None),
    "profile": Method(ProfileRequest, Profile | None),
    "verify": Method(Policy, Verdict),
    "verify_with_full": Method(Policy, Verdict),
    "measure_module": Method(str, Outcome),
    "verify_module": Method(str, Verdict),
}
