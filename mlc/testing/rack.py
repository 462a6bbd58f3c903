"""TVM's tracker and mlc's workers as processes on this machine, for tests that kill them."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

import psutil

from mlc import subprocesses
from mlc.errors import MeasureError
from mlc.measure.rpc_protocol import LOOPBACK, Tracker

__all__ = ["Rack", "end", "free_port", "until"]

_KEY = "board"


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something; raises ``TimeoutError`` where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for has not come in {seconds:.0f} s")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


class Rack:
    """A tracker and ``count`` workers under one key; to be closed. ``environment`` is that of the workers beside this
    process's, ``command`` what starts one where it is not this Python, before the arguments of
    :mod:`mlc.measure.rpc_server`."""

    def __init__(
        self, count: int, token: str, *, environment: Mapping[str, str] | None = None,
        command: list[str] | None = None, tracked: bool = True,
    ) -> None:
        self.port = free_port()
        self._environment = subprocesses.environment(MLC_TOKEN=token) if environment is None else {
            **environment, "MLC_TOKEN": token}
        self._command = command or subprocesses.command("mlc.measure.rpc_server")
        self.tracker: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes] | None] = [None] * count
        if tracked:
            self.start()

    @property
    def executor(self) -> str:
        """As ``--executor`` takes it."""
        return f"rpc://{LOOPBACK}:{self.port}/{_KEY}"

    def devices(self, key: str = _KEY) -> int:
        """How many the tracker knows."""
        tracker = Tracker(LOOPBACK, self.port)
        try:
            return tracker.count(key)
        finally:
            tracker.close()

    def start(self) -> None:
        """Start whatever does not run, and wait until the tracker knows all workers."""
        if self.tracker is None or self.tracker.poll() is not None:
            where = [f"--host={LOOPBACK}", f"--port={self.port}", f"--port-end={self.port + 1}"]
            command = subprocesses.command("tvm.exec.rpc_tracker", *where)
            self.tracker = subprocess.Popen(command, env=subprocesses.environment(), stderr=subprocess.DEVNULL)
            until(self._answers)
        for i, worker in enumerate(self.workers):
            if worker is None or worker.poll() is not None:
                self.workers[i] = subprocess.Popen([*self._command, f"{LOOPBACK}:{self.port}/{_KEY}"],
                                                   env=self._environment, stderr=subprocess.DEVNULL)
        until(lambda: self.devices() >= len(self.workers))

    def kill_something(self, rng: random.Random) -> str:
        """Kill the tracker, a worker, or one of the processes of a worker; which."""
        worker = rng.choice([w for w in self.workers if w is not None])
        inside = psutil.Process(worker.pid).children(recursive=True) if worker.poll() is None else []
        victim = rng.choice(["tracker", "worker", "inside"] if inside else ["tracker", "worker"])
        if victim == "inside":
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(inside).kill()
        elif victim == "worker":
            end(worker)
        elif self.tracker is not None:
            end(self.tracker)
        return victim

    def close(self) -> None:
        """End all. Idempotent."""
        for process in [*self.workers, self.tracker]:
            if process is not None:
                end(process)

    def _answers(self) -> bool:
        try:
            Tracker(LOOPBACK, self.port).close()
        except MeasureError:
            return False
        return True
