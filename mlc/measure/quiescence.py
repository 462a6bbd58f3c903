"""Waits until a process is quiescent: thread pools keep spinning after their work, TVM's for 0.1 s."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

__all__ = ["wait_until_quiescent"]

_LOOK = 0.002  # seconds between looks at a process that should become quiescent
_QUIET_LOOKS = 5


def wait_until_quiescent(pid: int, timeout: float = 2.0) -> None:
    """Wait until no thread of the process runs, so that it takes no core from the next one that is timed."""
    deadline, quiet = time.monotonic() + timeout, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        quiet = 0 if _runnable_threads(pid) else quiet + 1
        time.sleep(_LOOK)


def _runnable_threads(pid: int) -> int:
    """Threads of the process that run or would, were a core free; 0 where the system does not say."""
    count = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that just ended
            # "id (name) state ...": a name may hold anything, so the state follows the last parenthesis.
            count += stat.read_text().rpartition(")")[2].split()[0] == "R"
    return count
