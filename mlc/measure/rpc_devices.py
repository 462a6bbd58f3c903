"""Devices behind TVM's RPC tracker, one thread each, since an RPC call blocks until its job is done.

Devices need no compiler: candidates are built here, while others are measured, and sent as libraries.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlc import runtime
from mlc.config import get
from mlc.errors import MeasureError, UsageError
from mlc.measure.data import draws
from mlc.measure.executor import Job
from mlc.measure.export import Exported, Exporter
from mlc.measure.fleet import Answered, Gone, Joined
from mlc.measure.local_executor import build_workers
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.measure.prebuilt_runner import Interface
from mlc.measure.rpc_protocol import Tracker, endpoint, proof
from mlc.measure.wire import Board, board_of, job_text, results_of

__all__ = ["RpcDevices", "native_target", "run_on"]

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
        self._exporter = Exporter(build_workers())
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

    def expect(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._exporter.expect(job.requests, job.options)

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
        self._exporter.close()
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
            self._threads[name] = _Device(name, self._place, self._key, self._happened, self._exporter)


class _Device:
    """One session with one device."""

    def __init__(
        self, name: str, place: tuple[str, int], key: str, happened: queue.SimpleQueue[Happening], exporter: Exporter
    ) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name, self._place, self._key, self._tell = name, place, key, happened
        self._exporter = exporter
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
        said = board_of(str(session.get_function("mlc.board.describe")()))
        if said.tvm != runtime.version():
            raise MeasureError(f"it must have TVM {runtime.version()} as the session has, but has {said.tvm}; install "
                               f"apache-tvm=={runtime.version()} there")
        if said.draws != draws():
            raise MeasureError("it must draw the same random numbers as the session, but its numpy draws others; "
                               f"install numpy=={np.__version__} there")
        self._tell.put(Joined(self._name, f"{self._key}: {said.machine}", native_target(said)))
        while not self._ended.is_set():
            job = self.jobs.get()
            if job is not None:
                self._tell.put(Answered(self._name, job.id, run_on(session, self._exporter, job)))


def run_on(session: Any, exporter: Exporter, job: Job) -> tuple[MeasureResult, ...]:
    """Have the board behind a session run what of a job could be built."""
    built = [exporter.get(request, job.options) for request in job.requests]
    sent = [i for i, exported in enumerate(built) if not exported.failure]
    results = [MeasureResult(failure=exported.failure, detail=exported.detail) for exported in built]
    if sent:
        files = {file.name: file.data for i in sent for file in built[i].files}
        for name in json.loads(str(session.get_function("mlc.board.missing")(json.dumps(list(files))))):
            session.get_function("mlc.board.put")(name, bytearray(files[name]))
        requests = tuple(_given(job.requests[i], built[i]) for i in sent)
        found = results_of(str(session.get_function("mlc.board.run")(job_text(replace(job, requests=requests)))))
        for i, result in zip(sent, found, strict=True):
            results[i] = replace(result, code_hash=built[i].code_hash, build_seconds=built[i].build_seconds)
    return tuple(results)


def _given(request: MeasureRequest, exported: Exported) -> MeasureRequest:
    """A request as :class:`mlc.measure.board.Board` takes it."""
    assert exported.binary is not None and exported.reference is not None and exported.gauge is not None
    interface = Interface(exported.params, exported.reference.name, exported.gauge.name)
    return replace(request, func=interface.text(), target="", trace="", scheduled=exported.binary.name)


def native_target(board: Board) -> str:
    """The attributes of TVM's target for all that a board's CPU shows, as JSON."""
    from mlc.cpu import HostCpu, cpu_model, host_cpu, native_attrs

    here = host_cpu()
    name = board.cpu
    if not name and board.architecture == here.architecture and board.machine.startswith(f"{cpu_model()}, "):
        name = here.name  # the same CPU as this machine's, and LLVM is here
    cpu = HostCpu(board.architecture, name, frozenset(board.flags) if board.flags else None)
    triple = "" if board.architecture == here.architecture else f"{board.architecture}-linux-gnu"
    attrs = {"kind": "llvm", "num-cores": board.cores, **native_attrs(cpu, triple)}
    attrs |= {"mtriple": triple} if triple else {}
    attrs |= {"model": board.caches} if board.caches else {}
    return json.dumps(attrs, sort_keys=True)
