"""Jobs and answers as text, for devices in other processes or on other machines: reading JSON executes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlc.errors import MeasureError
from mlc.measure.executor import Job
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult

__all__ = ["Description", "description_of", "job_of", "job_text", "results_of", "results_text"]


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
