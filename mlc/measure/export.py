"""Candidates built here for devices without a compiler: libraries, and what is needed to check and time them.

Reference outputs are computed here, from the unscheduled function built for this machine's own CPU, so that what a
device computes is compared with what another one has.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from mlc.config import physical_cores
from mlc.errors import MeasureError
from mlc.measure.data import Param
from mlc.measure.measurer import MeasureOptions, MeasureRequest
from mlc.measure.pool import Job, Pool
from mlc.measure.protocol import Message
from mlc.target import Target, resolve

__all__ = ["Exported", "Exporter", "File"]

_K = TypeVar("_K")
_T = TypeVar("_T")

#: seconds for the unscheduled function of a task, and for the code that a device's speed is read with
_REFERENCE_SECONDS, _GAUGE_SECONDS = 300.0, 60.0
#: libraries, and tasks' references, that are kept for whoever asks again
_KEPT, _TASKS_KEPT = 1024, 64


@dataclass(frozen=True)
class File:
    """Bytes, under the digest of them."""

    name: str
    data: bytes

    @staticmethod
    def of(path: Path) -> File:
        """Read a file, and remove it."""
        data = path.read_bytes()
        path.unlink()
        return File(hashlib.blake2b(data, digest_size=16).hexdigest() + path.suffix, data)


@dataclass(frozen=True)
class Exported:
    """A candidate's ``binary``, and for calls of it: its parameters, the reference outputs, the gauge's library.
    Where ``failure`` is not empty there is none of these; it is as in a result."""

    binary: File | None = None
    params: tuple[Param, ...] = ()
    reference: File | None = None
    gauge: File | None = None
    code_hash: str = ""
    build_seconds: float = 0.0
    failure: str = ""
    detail: str = ""

    @property
    def files(self) -> list[File]:
        """The files that a device needs to run it."""
        return [file for file in (self.binary, self.reference, self.gauge) if file is not None]


@dataclass(frozen=True)
class _Task:
    params: tuple[Param, ...] = ()
    reference: File | None = None
    problem: str = ""


class Exporter:
    """Builds with ``workers`` processes, candidates in the order in which they are expected. To be closed."""

    def __init__(self, workers: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mlc-export-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._threads = ThreadPoolExecutor(workers, "mlc-export")
        self._own = threading.local()
        self._pools: list[Pool] = []
        self._numbers = count()
        self._lock = threading.Lock()
        self._built: OrderedDict[tuple[str, ...], Future[Exported]] = OrderedDict()
        self._tasks: OrderedDict[tuple[str, str], Future[_Task]] = OrderedDict()
        self._gauges: OrderedDict[tuple[str, int], Future[File]] = OrderedDict()
        self._closed = False

    def expect(self, requests: Iterable[MeasureRequest], options: MeasureOptions) -> None:
        """Build what will be asked for."""
        for request in requests:
            self._begin(request, options)

    def get(self, request: MeasureRequest, options: MeasureOptions) -> Exported:
        """A candidate, built now if it has not been."""
        return self._begin(request, options).result()

    def close(self) -> None:
        """Abandon what is under way. Idempotent."""
        with self._lock:
            self._closed = True
            pools = list(self._pools)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.interrupt()  # each thread closes its own
        self._remove()

    def _begin(self, request: MeasureRequest, options: MeasureOptions) -> Future[Exported]:
        key = (request.func, request.target, request.trace, request.scheduled)
        with self._lock:
            found = self._built.pop(key, None)
            if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
                found = self._threads.submit(self._candidate, request, options)
            self._built[key] = found
            _shorten(self._built, _KEPT)
            return found

    def _candidate(self, request: MeasureRequest, options: MeasureOptions) -> Exported:
        task = self._shared(self._tasks, (request.func, request.target), lambda: self._reference(request))
        if task.problem:
            return Exported(failure="run", detail=task.problem)
        gauge = self._shared(self._gauges, (request.target, options.threads), lambda: self._gauge(request, options))
        path = self._path(".so")
        message = {**asdict(request), **self._export(request, path, options), "gauge": False}
        answer = self._serve(message, options.timeout)
        if "failure" in answer:
            return Exported(failure=answer["failure"], detail=answer["detail"])
        return Exported(File.of(path), task.params, task.reference, gauge, answer["code_hash"],
                        answer["build_seconds"])

    def _export(self, request: MeasureRequest, path: Path, options: MeasureOptions) -> Message:
        architecture = Target("", request.target).architecture
        return {"job": "export", "target": request.target, "path": str(path), "architecture": architecture,
                "threads": options.threads}

    def _reference(self, request: MeasureRequest) -> _Task:
        path = self._path(".npz")
        message = {"job": "reference", "func": request.func, "target": resolve("native").attrs, "path": str(path)}
        answer = self._serve(message, _REFERENCE_SECONDS)
        if "failure" in answer:
            return _Task(problem=f"the task's reference output could not be computed ({answer['detail']})")
        params = tuple(Param(tuple(p["shape"]), p["dtype"], p["output"], tuple(p["limits"])) for p in answer["params"])
        return _Task(params, File.of(path))

    def _gauge(self, request: MeasureRequest, options: MeasureOptions) -> File:
        path = self._path(".so")
        answer = self._serve({**self._export(request, path, options), "gauge": True}, _GAUGE_SECONDS)
        if "failure" in answer:
            raise MeasureError(f"code must build for {request.target}, but does not: {answer['detail']}")
        return File.of(path)

    def _shared(self, known: OrderedDict[_K, Future[_T]], key: _K, make: Callable[[], _T]) -> _T:
        """A value that the first thread that asks computes while others wait; after a failure the next one tries."""
        with self._lock:
            found = known.pop(key, None)
            own = found is None
            known[key] = found = found or Future()
            _shorten(known, _TASKS_KEPT)
        if own:
            try:
                found.set_result(make())
            except BaseException as error:
                found.set_exception(error)
                with self._lock:
                    known.pop(key, None)
        return found.result()

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{next(self._numbers)}{suffix}"

    def _serve(self, message: Message, limit: float) -> Message:
        """Have this thread's own process do a job."""
        pool = getattr(self._own, "pool", None)
        if pool is None:
            pool = self._own.pool = Pool(1, physical_cores(), self._folder)
            with self._lock:
                self._pools.append(pool)
        if self._closed:
            pool.close()
            raise MeasureError("candidates must be asked for before the end, but nothing is built any more")
        answers: list[Message] = []
        pool.serve([Job(message, limit, lambda _worker, answer: answers.append(answer))])
        return answers[0]


def _shorten(known: OrderedDict[Any, Future[Any]], most: int) -> None:
    """Forget what was not asked for the longest, and is done."""
    while len(known) > most and next(iter(known.values())).done():
        known.popitem(last=False)
