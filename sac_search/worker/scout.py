"""Peaks of any batch size without a device: what cannot fit is known before anything is measured.

One child process builds the workload anew for each size and dry-runs it; no step is run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sac_search import errors
from sac_search.policy import Policy, checkpoint_layers
from sac_search.worker.process import WorkerLost, WorkerProcess, nonsense
from sac_search.worker.protocol import METHODS
from sac_search.worker.session import Description, ForecastPeak, SessionSettings

_MOST_SECONDS = 1800.0


class Scout:
    """Forecasts the peak of full checkpointing at any batch size.

    `settings.forecast_device` prices what nobody reads here; `settings.device` is `cpu` where the
    step will run on the CPU, so that the workload is built as it will be there.
    """

    def __init__(self, settings: SessionSettings, log_path: Path) -> None:
        self._settings = settings
        self._log_path = log_path
        self._process: WorkerProcess | None = None
        self._full: Policy | None = None

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def full_peak_bytes(self, batch_size: int) -> int | None:
        """Returns the peak of the step with every layer checkpointed; None where it is not told.

        Raises:
            UsageError: the workload cannot be asked for a batch size.
        """
        try:
            self._ask("load", replace(self._settings, batch_size=batch_size))
            if self._full is None:
                description: Description = self._ask("describe", True)
                self._full = checkpoint_layers(layer.name for layer in description.layers)
            peak: ForecastPeak = self._ask("forecast", self._full)
        except errors.UsageError:
            raise
        except (errors.SacSearchError, WorkerLost):
            return None  # whatever it is, the step itself will show it
        return peak.peak_bytes

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _ask(self, method: str, argument: Any) -> Any:
        if self._process is None:
            self._process = WorkerProcess(self._log_path)
        try:
            reply = self._process.exchange(method, argument, _MOST_SECONDS)
            if reply.error is not None:
                raise reply.error.local()
            return msgspec.json.decode(reply.result, type=METHODS[method].result_type)
        except msgspec.DecodeError as error:
            self.close()
            raise WorkerLost(nonsense(error)) from None
        except errors.SacSearchError:
            raise
        except BaseException:
            self.close()
            raise
