"""Devices behind TVM's RPC tracker: a thread speaks with each, since a call lasts as long as its job."""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from typing import Any

from mlc.config import get
from mlc.errors import MeasureError, UsageError
from mlc.measure.executor import Job
from mlc.measure.fleet import Answered, Gone, Joined
from mlc.measure.rpc_protocol import Tracker, endpoint, proof
from mlc.measure.wire import description_of, job_text, results_of

__all__ = ["RpcDevices"]

#: seconds between two looks for devices that have come
_LOOK = 2.0

Happening = Joined | Gone | Answered


class RpcDevices:
    """Implements :class:`mlc.measure.fleet.Devices` with the devices of ``key`` at the tracker ``place`` (HOST:PORT).

    Raises :class:`UsageError` without a token or for an address elsewhere, and :class:`MeasureError` where no tracker
    answers or it knows no such device.
    """

    def __init__(self, place: str, key: str) -> None:
        self._place, self._key = endpoint(place), key
        if not get("MLC_TOKEN"):
            raise UsageError("MLC_TOKEN must hold the secret of the workers, but is not set; export the one that they "
                             "were started with")
        self._tracker: Tracker | None = Tracker(*self._place)
        if not self._tracker.count(key):
            known = ", ".join(self._tracker.keys()) or "none at all"
            self._tracker.close()
            raise MeasureError(f"a device must be registered under {key!r}, but the tracker at {place} has {known}; "
                               f"start one with `mlc worker --rpc {place}/{key}`")
        self._happened: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._threads: dict[str, _Device] = {}
        self._numbers = 0
        self._looked = -_LOOK
        self._closed = threading.Event()

    def poll(self, timeout: float) -> list[Happening]:
        deadline = time.monotonic() + timeout
        while True:
            self._look()
            found: list[Happening] = []
            with contextlib.suppress(queue.Empty):
                found.append(self._happened.get(timeout=max(0.0, min(deadline - time.monotonic(), _LOOK))))
                while True:
                    found.append(self._happened.get_nowait())
            if found or time.monotonic() >= deadline:
                for happening in found:
                    if isinstance(happening, Gone):
                        self._threads.pop(happening.device, None)
                return found

    def begin(self, device: str, job: Job) -> None:
        self._threads[device].jobs.put(job)

    def drop(self, device: str) -> None:
        thread = self._threads.pop(device, None)
        if thread is not None:
            thread.end()

    def close(self) -> None:
        self._closed.set()
        for name in list(self._threads):
            self.drop(name)
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _look(self) -> None:
        """Ask the tracker for as many devices as it has. One that is gone for a while is looked for again."""
        if time.monotonic() - self._looked < _LOOK or self._closed.is_set():
            return
        self._looked = time.monotonic()
        try:
            self._tracker = self._tracker or Tracker(*self._place)
            count = self._tracker.count(self._key)
        except (OSError, MeasureError):  # devices that measure go on without it
            if self._tracker is not None:
                self._tracker.close()
            self._tracker = None
            return
        while len(self._threads) < count:
            name = f"{self._key}/{self._numbers}"
            self._numbers += 1
            self._threads[name] = _Device(name, self._place, self._key, self._happened)


class _Device:
    """One session with one device."""

    def __init__(
        self, name: str, place: tuple[str, int], key: str, happened: queue.SimpleQueue[Happening]
    ) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name, self._place, self._key, self._tell = name, place, key, happened
        self._ended = threading.Event()
        threading.Thread(target=self._speak, name=f"mlc-rpc-{name}", daemon=True).start()

    def end(self) -> None:
        """Say no more; the call that is under way ends with the process, or when the device answers."""
        self._ended.set()
        self.jobs.put(None)

    def _speak(self) -> None:
        try:
            session = self._connect()
            if session is None:
                return
            self._serve(session)
        except MeasureError as error:
            self._gone(str(error))
        except Exception as error:  # TVM raises its own for each way of losing a peer
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._gone(f"it is gone ({lines[-1].strip()[:120]})")

    def _gone(self, why: str) -> None:
        if not self._ended.is_set():
            self._tell.put(Gone(self._name, why))

    def _connect(self) -> Any:
        """A session with whichever device is free first; None where it is no longer wanted."""
        from tvm import rpc

        tracker = Tracker(*self._place)
        try:
            tracker.request(self._key)
            while not select.select([tracker], [], [], _LOOK)[0]:
                if self._ended.is_set():
                    return None
            host, port, nonce = tracker.granted()
        finally:
            tracker.close()
        return rpc.connect(host, port, key=proof(nonce))

    def _serve(self, session: Any) -> None:
        from mlc.graph.task import versions

        said = description_of(str(session.get_function("mlc.node.describe")()))
        if said.versions != versions():
            raise MeasureError(f"it must have the versions of the session, {versions()}, but has {said.versions}; "
                               "install the same mlc there")
        run = session.get_function("mlc.node.run")
        self._tell.put(Joined(self._name, f"{self._key}: {said.machine}", said.native))
        while not self._ended.is_set():
            job = self.jobs.get()
            if job is not None:
                self._tell.put(Answered(self._name, job.id, results_of(str(run(job_text(job))))))
