"""One worker process as its parent sees it: starting it, exchanging messages, ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from mlc import subprocesses, threads
from mlc.measure.protocol import Message, MessageReader, send

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """A process that takes one job at a time.

    Plain pipes and no shared locks: a worker that is killed at any moment leaves nothing behind for the others.
    It runs in a session of its own, so that Ctrl-C reaches the parent alone, and it ends by itself when its parent
    is gone: between jobs by the end of its input, within a job by its own alarm. Its temporary files are in ``folder``,
    which it removes if the parent could not.
    """

    def __init__(self, threads_each: int, folder: Path, kind: str = "compiling") -> None:
        """``kind`` is one of :data:`mlc.measure.worker.RUNNERS`."""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        self._process = subprocess.Popen(
            subprocesses.command("mlc.measure.worker", str(folder), kind), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True, bufsize=0,
            env=subprocesses.environment(**threads.environment(threads_each), TMPDIR=str(folder)),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = MessageReader(self.fileno())
        self.ready = False  # it has said that it is set up
        self.started = time.monotonic()
        self.runs = 0  # how many candidates ran in it
        self.ran: set[int] = set()  # which: the code of some of them it still has
        self.prepared: set[Path] = set()  # references of the tasks whose inputs it has drawn
        self.baselines: dict[str, bool] = {}  # those that it has, and those that it could not build

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The file descriptor to wait on for :meth:`receive`."""
        return self._stdout.fileno()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: Message) -> None:
        """Give it a job; raises :class:`Broken` if it has died."""
        send(self._stdin.fileno(), message)

    def receive(self) -> Message | None:
        """Its answer if complete; raises :class:`Broken` if it has died."""
        return self._reader.receive()

    def bury(self) -> str:
        """Kill it if it lives, collect it, and say how it ended: ``SIGSEGV``, or ``exit code 3``, with last words."""
        try:
            code = self._process.wait(0.5)  # after end of file it is about to be gone by itself
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        words = "" if how == "SIGSEGV" else self.last_words()  # TVM ends that one with a meaningless stack frame
        self._close()
        return f"{how}: {words}" if words else how

    def interrupt(self) -> None:
        """Kill the process and leave the rest, which another thread may be reading, to :meth:`bury`."""
        self._process.kill()

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._close()

    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        try:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - 4096))
            lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            return ""
        return lines[-1].strip()[:300] if lines else ""

    def _close(self) -> None:
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()


