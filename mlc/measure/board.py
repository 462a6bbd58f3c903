"""The device's side of RPC: stores code that was built elsewhere in files, and checks and times it with a local
measurer.

Needs numpy and TVM's runtime library alone. What a job needs is sent once, under the digest of its bytes, and kept as
long as there is room.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from mlc import runtime
from mlc.config import physical_cores
from mlc.cpu import arm_core, machine_id, usable_flags
from mlc.errors import MeasureError
from mlc.measure import wire
from mlc.measure.data import draws
from mlc.measure.executor import Job
from mlc.measure.local import LocalMeasurer
from mlc.measure.measurer import MeasureRequest
from mlc.measure.prebuilt_runner import Interface, interface
from schedules.caches import native_caches

__all__ = ["Board"]

#: bytes of files that are kept beyond those of the job at hand
_ROOM = 512 << 20
_NAME = re.compile(r"[0-9a-f]{16,64}\.(so|npz)")


class Board:
    """Executes jobs whose requests hold the text of a :class:`mlc.measure.prebuilt_runner.Interface` as ``func`` and a
    library as ``scheduled``; paths in them are names of files that :meth:`put` has stored."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mlc-board-"))
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by name, those used last at the end
        self._measurer: LocalMeasurer | None = None

    def describe(self) -> str:
        """The text of a :class:`mlc.measure.wire.Board`."""
        return wire.Board(
            machine_id(), runtime.version(), platform.machine(), arm_core(), tuple(sorted(usable_flags() or ())),
            native_caches(), physical_cores(), draws(),
        ).text()

    def missing(self, names: str) -> str:
        """Those of the files that are not stored here, as JSON; room is made for them, and the others are kept."""
        wanted = [_checked(name) for name in json.loads(names)]
        for name in wanted:
            if name in self._files:
                self._files.move_to_end(name)
        others = [name for name in self._files if name not in wanted]
        while others and sum(self._files.values()) > _ROOM:
            gone = others.pop(0)
            del self._files[gone]
            (self._folder / gone).unlink(missing_ok=True)
        return json.dumps([name for name in wanted if name not in self._files])

    def put(self, name: str, data: bytes) -> None:
        """Keep a file."""
        (self._folder / _checked(name)).write_bytes(data)
        self._files[name] = len(data)

    def run(self, text: str) -> str:
        """Do a job; the text of its results."""
        job = wire.job_of(text)
        requests = [self._with_paths(request) for request in job.requests]
        measurer = self._ready(job)
        if job.rounds:
            return wire.results_text(measurer.compare(requests, job.rounds))
        return wire.results_text(measurer.measure(requests))

    def close(self) -> None:
        """Stop what measures and remove the files. Idempotent."""
        if self._measurer is not None:
            self._measurer.close()
            self._measurer = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _with_paths(self, request: MeasureRequest) -> MeasureRequest:
        named = interface(request.func)
        found = Interface(named.params, self._path(named.reference), self._path(named.gauge))
        return replace(request, func=found.text(), scheduled=self._path(request.scheduled))

    def _path(self, name: str) -> str:
        if _checked(name) not in self._files:
            raise MeasureError(f"a job must come after its files, but {name} is not here")
        return str(self._folder / name)

    def _ready(self, job: Job) -> LocalMeasurer:
        """The measurer for a job's options; one worker, since nothing is built."""
        if self._measurer is None or self._measurer.options != job.options:
            if self._measurer is not None:
                self._measurer.close()
            self._measurer = LocalMeasurer(job.options, 1, "loading")
        return self._measurer


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MeasureError(f"a file's name must be a digest and .so or .npz, got {str(name)[:80]!r}")
    return name
