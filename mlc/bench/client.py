"""The parent's side of an engine's worker process: start it, send it requests, and find out why it died."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from mlc import subprocesses
from mlc.measure.quiescence import wait_until_quiescent

__all__ = ["Worker", "WorkerFailed"]


class WorkerFailed(Exception):
    """The engine answered with a failure, or its process died or hung; the text says which."""


class Worker:
    """A process running :mod:`mlc.bench.worker`. After a failure that ended the process, ``alive`` is false."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # File, not pipe: nobody drains it, and its tail explains a crash.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (close ends it)
        self._process = subprocess.Popen(
            subprocesses.command("mlc.bench.worker", torch=True),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=subprocesses.environment(**environment),
            start_new_session=True,  # so that closing it takes its own children (a tuner's) along
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def ask(self, command: str, *arguments: Any, timeout: float) -> Any:
        """The reply's value; raises :class:`WorkerFailed`, and ends the process if it does not reply in time."""
        assert self._process.stdin is not None
        try:
            pickle.dump((command, *arguments), self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except (OSError, ValueError):  # a broken pipe, or one that was closed here
            raise WorkerFailed(self._obituary()) from None
        status, value = pickle.loads(self._read(timeout))
        if status == "failed":
            raise WorkerFailed(str(value))
        return value

    def settle(self, timeout: float = 2.0) -> None:
        """Wait until no thread of the process runs: pools spin on into the next turn."""
        wait_until_quiescent(self.pid, timeout)

    def close(self) -> None:
        """End the process and everything it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, timeout: float) -> bytes:
        """One reply: its length in eight bytes, then a pickle."""
        deadline = time.monotonic() + timeout
        (length,) = struct.unpack("<Q", self._read_bytes(8, deadline, timeout))
        return self._read_bytes(length, deadline, timeout)

    def _read_bytes(self, count: int, deadline: float, timeout: float) -> bytes:
        assert self._process.stdout is not None
        received = bytearray()
        while len(received) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.close()
                raise WorkerFailed(f"no answer within {timeout:.0f} s")
            chunk = os.read(self._process.stdout.fileno(), min(count - len(received), 1 << 20))
            if not chunk:
                raise WorkerFailed(self._obituary())
            received += chunk
        return bytes(received)

    def _obituary(self) -> str:
        code = self._process.wait()
        lines: list[str] = []
        if not self._errors.closed:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the process {how}" + (f": {lines[-1]}" if lines else "")
