"""Runs one job in this process: its request comes as a line on standard input.

When that ends, whoever started the job wants it to stop, or is gone. The report goes to standard
output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from sac_search import interrupts
from sac_search.fleet.job import NOTHING_DONE, run_job


def main() -> int:
    """Runs the job."""
    request = sys.stdin.readline()
    # What the user's code prints must not meet the report.
    output = os.dup(1)
    os.dup2(2, 1)
    report = NOTHING_DONE
    # Also when it comes before the job has begun.
    with contextlib.suppress(KeyboardInterrupt), interrupts.listening(signal.SIGINT):
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
        report = run_job(request)
    with os.fdopen(output, "w") as stream:
        stream.write(report)
    return 0


def _stop_at_end_of_input() -> None:
    while sys.stdin.read(1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
