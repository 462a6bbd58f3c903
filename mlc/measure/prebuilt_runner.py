"""A worker's runner without a compiler: it loads candidates that were built on another machine.

A job's ``func`` is then the text of an :class:`Interface`, and its ``scheduled`` the path of a library.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from mlc import runtime
from mlc.measure.data import Param
from mlc.measure.gauge import arrays, clock_of
from mlc.measure.protocol import Message
from mlc.measure.runner import Runner

__all__ = ["Interface", "PrebuiltRunner"]


@dataclass(frozen=True)
class Interface:
    """What is needed to call a task's function: its parameters, and the paths of its reference outputs and of the
    library of the speed gauge."""

    params: tuple[Param, ...]
    reference: str
    gauge: str

    def text(self) -> str:
        """Inverse of :func:`interface`."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=64)
def interface(text: str) -> Interface:
    """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for a text that is none."""
    fields = json.loads(text)
    params = tuple(
        Param(tuple(map(int, p["shape"])), str(p["dtype"]), bool(p["output"]), tuple(map(int, p["limits"])))
        for p in fields["params"]
    )
    return Interface(params, str(fields["reference"]), str(fields["gauge"]))


class PrebuiltRunner(Runner):
    """Needs TVM's runtime library and numpy."""

    def __init__(self, thread_count: int) -> None:
        runtime.load()
        super().__init__(thread_count)

    def reference(self, job: Message) -> Message:
        """Take the reference outputs that came with the task."""
        shutil.copyfile(interface(job["func"]).reference, job["path"])
        return {}

    def _module(self, job: Message) -> tuple[Any, str]:
        return _load(job["scheduled"]), Path(job["scheduled"]).stem

    def _params(self, job: Message) -> tuple[Param, ...]:
        return interface(job["func"]).params

    def _clock(self, job: Message) -> Callable[[], float]:
        function = self._entry(_load(interface(job["func"]).gauge))
        return clock_of(partial(function, *(self._tensor(array, job) for array in arrays(self._threads))))


def _load(path: str) -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(path)
