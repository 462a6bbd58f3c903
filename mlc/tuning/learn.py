"""Training of the cost model: samples from logs, the stored model, and the shipped one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources
from pathlib import Path

from cost_model.features import SpaceFeatures
from cost_model.machine import cold_weights
from cost_model.pretrained import Pretrained
from cost_model.sample import Sample, sample
from mlc.errors import LogError
from mlc.graph.task import Task
from mlc.log import manifest
from mlc.log.record import Record
from mlc.log.shipped import family
from mlc.log.store import TuningLog
from mlc.log.workload import Workload
from mlc.target import Target
from mlc.tuning.candidate import TaskSpace
from schedules.trace import replay

__all__ = ["MODEL_FILE", "cold_of", "note_origin", "origins_of", "pretrained", "samples_of"]

#: the file in a target's folder of ``tuning_logs``
MODEL_FILE = "cost_model.npz"
#: the log's state that says which tasks a model has
_ORIGINS = "models"
#: what a sample counts as where its candidate failed or computed wrong numbers
_FAILED = math.inf


def cold_of(task: Task) -> tuple[int, ...]:
    """The parameters of a task that no cache holds when it is called."""
    return cold_weights(task.target.tvm, task.constants, task.constant_bytes)


def samples_of(log: TuningLog, kind: str | None = None) -> Iterator[Sample]:
    """One sample for each distinct schedule of each task whose workload the log has, oldest first.

    Of a schedule that was timed more than once the fastest counts: what disturbs only ever slows down. ``kind``
    leaves only targets of that kind (``llvm``). A trace that no longer replays is left out.
    """
    for workload in log.workloads():
        task = _task(workload)
        if task is None or kind not in (None, task.target.kind):
            continue
        for record in _fastest(log.records(workload.task_key)):
            try:
                module = replay(task.func, record.trace, task.target.tvm).mod
            except Exception:  # of another version of a space, or damaged: nothing can be learned from it
                continue
            yield sample(task.key, module, task.target.tvm, record.seconds if record.ok else _FAILED, cold_of(task),
                         _space_features(task, record))


def _space_features(task: Task, record: Record) -> SpaceFeatures | None:
    """What a record's space knows about it, on a GPU; None if the space no longer exists for the task."""
    if task.target.kind == "llvm":
        return None
    space = TaskSpace(task)
    candidate = space.recall(record)
    return None if candidate is None else space.features_of(candidate)


def _task(workload: Workload) -> Task | None:
    try:
        return workload.task()
    except Exception:  # a function of another TVM
        return None


def _fastest(records: Iterable[Record]) -> list[Record]:
    found: dict[str, Record] = {}
    for record in records:
        seen = found.get(record.trace)
        if seen is None or record.seconds < seen.seconds:
            found[record.trace] = record
    return list(found.values())


def note_origin(log: TuningLog, model: str, task_keys: Iterable[str]) -> None:
    """Keep which tasks a model has, beside what the log knows of other models."""
    known = _origins(log)
    known[model] = sorted(task_keys)
    log.put_state(_ORIGINS, json.dumps(known, sort_keys=True).encode())


def origins_of(log: TuningLog) -> dict[str, set[str]]:
    """The models that have a task, by its key, as far as that was noted."""
    found: dict[str, set[str]] = {}
    for model, keys in _origins(log).items():
        for key in keys:
            found.setdefault(key, set()).add(model)
    return found


def _origins(log: TuningLog) -> dict[str, list[str]]:
    try:
        return {str(model): [str(key) for key in keys] for model, keys in json.loads(
            log.get_state(_ORIGINS) or b"{}").items()}
    except (ValueError, TypeError, AttributeError, RecursionError):  # damaged: as good as not noted
        return {}


def pretrained(target: Target) -> tuple[Pretrained | None, str]:
    """The model that ships for ``target``, or None with the reason why it is not used (empty: there is none).

    Raises :class:`LogError` where its file is not what its checksum says.
    """
    file = resources.files("tuning_logs") / family(target) / MODEL_FILE
    if not file.is_file():
        return None, ""
    with resources.as_file(file) as path:
        return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, _changed: int) -> tuple[Pretrained | None, str]:
    manifest.check(path)
    try:
        return Pretrained.load(path.read_bytes()), ""
    except ValueError as error:
        return None, f"the shipped {path.name} is not used: {error}"
    except OSError as error:
        raise LogError(f"the shipped cost model must be readable, but {path} is not ({error.strerror}); "
                       "reinstall mlc") from error
