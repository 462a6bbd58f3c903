"""Jobs and results as JSON text, for devices in other processes or on other machines; parsing executes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlc.errors import MeasureError
from mlc.measure.executor import Job
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult

__all__ = [
    "Board", "Description", "board_of", "description_of", "job_of", "job_text", "results_of", "results_text",
]

#: raised when what a session asks of a board, or what that answers, changes
BOARD_PROTOCOL = 2


@dataclass(frozen=True)
class Description:
    """What a device says of itself: which machine it is, the versions under which a schedule means the same, and what
    TVM's target for all that its CPU shows is, as JSON."""

    machine: str
    versions: str
    native: str

    def text(self) -> str:
        """Inverse of :func:`description_of`."""
        return json.dumps(asdict(self))


def description_of(text: str) -> Description:
    """Raises :class:`MeasureError` for a text that is no description."""
    return _read(text, lambda fields: Description(**{name: _text(fields[name])
                                                     for name in ("machine", "versions", "native")}))


@dataclass(frozen=True)
class Board:
    """What a device says of itself that has no compiler: which machine it is, its TVM's version, its CPU as
    :class:`mlc.cpu.HostCpu` has it (``cpu`` is LLVM's name, empty where the device cannot tell; no ``flags``: they are
    not to be read), the sizes of its caches as in a target's ``model``, its cores, and what numpy draws there, as
    :func:`mlc.measure.data.draws` says it."""

    machine: str
    tvm: str
    architecture: str
    cpu: str
    flags: tuple[str, ...]
    caches: str
    cores: int
    draws: int
    protocol: int = BOARD_PROTOCOL

    def text(self) -> str:
        """Inverse of :func:`board_of`."""
        return json.dumps(asdict(self))


def board_of(text: str) -> Board:
    """Raises :class:`MeasureError` for a text that is no description of a board, or one of another version."""

    def build(fields: dict[str, Any]) -> Board:
        if fields["protocol"] != BOARD_PROTOCOL:
            raise ValueError(f"protocol {fields['protocol']} instead of {BOARD_PROTOCOL}")
        machine, tvm, architecture, cpu, caches = (
            _text(fields[name]) for name in ("machine", "tvm", "architecture", "cpu", "caches"))
        flags = tuple(map(_text, fields["flags"]))
        return Board(machine, tvm, architecture, cpu, flags, caches, max(1, int(fields["cores"])), int(fields["draws"]))

    return _read(text, build)


def job_text(job: Job) -> str:
    """Inverse of :func:`job_of`."""
    return json.dumps(asdict(job))


def job_of(text: str) -> Job:
    """Raises :class:`MeasureError` for a text that is no job."""
    return _read(text, lambda fields: Job(
        _text(fields["id"]), tuple(_request(request) for request in fields["requests"]),
        MeasureOptions(**fields["options"]), int(fields["rounds"]),
    ))


def results_text(results: list[MeasureResult]) -> str:
    """Inverse of :func:`results_of`."""
    return json.dumps([asdict(result) for result in results])


def results_of(text: str) -> tuple[MeasureResult, ...]:
    """Raises :class:`MeasureError` for a text that holds no results, or times that cannot be."""
    return _read(text, lambda results: tuple(map(_result, results)))


def _request(fields: dict[str, Any]) -> MeasureRequest:
    return MeasureRequest(**{**fields, "constants": tuple(fields["constants"])})


def _result(fields: dict[str, Any]) -> MeasureResult:
    times = tuple(float(seconds) for seconds in fields["times"])
    if not all(0 < seconds < math.inf for seconds in times):
        raise ValueError(f"times must be positive, got {times}")
    failure, detail, code_hash = (_text(fields[name]) for name in ("failure", "detail", "code_hash"))
    build, run, slowness = (float(fields[name]) for name in ("build_seconds", "run_seconds", "slowness"))
    return MeasureResult(times, failure, detail, build, run, slowness, code_hash)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is needed, got {type(value).__name__}")
    return value


def _read(text: str, build: Callable[[Any], Any]) -> Any:
    try:
        return build(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MeasureError(f"a device must answer as this version of mlc does, but sent something else ({error}); "
                           "install the same version on both sides") from error
