"""Conversion between mlc's log and the JSON database of TVM's MetaSchedule.

What carries over: schedules of functions that both graphs contain, with their measured times. Plain TVM looks a
function up as its own passes leave it, with 64-bit indices and an operator pattern among its attributes, while our
tasks have 32-bit ones; each function is therefore written in both forms, and a trace, which names blocks and loops and
not types, replays on either. What does not: functions that only our graph has (blocked layouts, packed weights,
Winograd), and what our lowering adds to some schedules (prefetches, polynomials for exp and tanh), so times under plain
TVM may differ a little from those written. Their records come in as schedules of the space ``metaschedule``: compiled
from where they are a task's best, and rivals of what is tuned here, but nothing that our strategies can vary.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from mlc.errors import LogError
from mlc.graph.task import Task, from_json, normalise, task_key, to_json, versions
from mlc.log.record import Record
from mlc.log.store import TuningLog
from mlc.log.workload import Workload
from mlc.target import Target
from schedules.language import parse_trace
from schedules.size_limits import check_inlining
from schedules.space import InvalidDecision
from schedules.trace import replay, trace_json
from schedules.tvm_json import check_graph

__all__ = ["SPACE", "Conversion", "export_database", "import_database", "is_database"]

#: the space of records that another tuner made
SPACE = "metaschedule"
_WORKLOADS, _RECORDS = "database_workload.json", "database_tuning_record.json"
_MOST_PARAMETERS = 64
_BEST = 8  # records of a task that are exported
_FAILED = 1e9  # MetaSchedule's time of a failure, and anything longer


@dataclass
class Conversion:
    """``records`` were written, ``skipped`` were not, by reason."""

    records: int = 0
    tasks: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"records": self.records, "tasks": self.tasks, "skipped": dict(self.skipped)}

    def __str__(self) -> str:
        text = f"{self.records} records of {self.tasks} tasks"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
        return f"{text}; left out: {reasons}" if reasons else text


def is_database(path: Path) -> bool:
    """Whether ``path`` is a folder with MetaSchedule's two files."""
    return (path / _WORKLOADS).is_file() and (path / _RECORDS).is_file()


def export_database(log: TuningLog, folder: str | Path) -> Conversion:
    """Add the eight fastest records of each task to the database in ``folder``, which is made if need be."""
    from tvm.s_tir.meta_schedule.database import TuningRecord
    from tvm.s_tir.meta_schedule.database import Workload as TheirWorkload

    database, done = _open(Path(folder)), Conversion()
    for summary in log.tasks():
        workload = log.workload(summary.task_key)
        if workload is None:
            done.skipped["without what their tasks compute"] += summary.records
            continue
        try:
            task = workload.task()
        except ValueError:
            done.skipped["whose functions are damaged"] += summary.records
            continue
        records = sorted((r for r in log.records(summary.task_key) if r.ok), key=lambda r: r.seconds)[:_BEST]
        written = 0
        for form in _forms(task.func):
            entry = database.commit_workload(tvm.IRModule({"main": form}))
            assert isinstance(entry, TheirWorkload)
            for record in records:
                with contextlib.suppress(InvalidDecision):
                    trace = replay(form, record.trace, task.target.tvm).trace
                    database.commit_tuning_record(TuningRecord(trace, entry, list(record.times), task.target.tvm))
                    written += form.same_as(task.func)
        done.skipped["that do not replay"] += len(records) - written
        done.records, done.tasks = done.records + written, done.tasks + 1
    done.skipped = +done.skipped
    return done


def import_database(log: TuningLog, folder: str | Path, target: Target) -> Conversion:
    """Append the database's records of ``target``'s kind, as measured on ``target``, and what their tasks compute."""
    if not is_database(Path(folder)):
        raise LogError(f"a MetaSchedule database is a folder with {_WORKLOADS} and {_RECORDS}, but {folder} is not")
    done = Conversion()
    tasks: dict[str, Task] = {}
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as name:
        done.skipped["that are damaged or say what no search space says"] = _copy_sound(Path(folder), Path(name))
        entries = list(_open(Path(name)).get_all_tuning_records())
    for entry in entries:
        record, task = _record(entry, target)
        if isinstance(record, str):
            done.skipped[record] += 1
        elif task is not None:
            tasks.setdefault(task.key, task)
            records.append(record)
    log.append(records)
    log.put_workloads(map(Workload.of, tasks.values()))
    done.records, done.tasks = len(records), len(tasks)
    done.skipped = +done.skipped
    return done


def _copy_sound(folder: Path, into: Path) -> int:
    """Copy a database without the records that must not reach TVM, which applies each trace as it reads it.

    Returns how many were left out. The functions of the others must be what TVM writes; see :func:`check_graph`.
    """
    try:
        workloads = (folder / _WORKLOADS).read_text(errors="replace").splitlines()
        records = (folder / _RECORDS).read_text(errors="replace").splitlines()
    except OSError as error:
        raise LogError(f"a MetaSchedule database must be readable, but {folder} is not ({error.strerror})") from error
    known = [_functions(line) for line in workloads]
    if workloads and not any(each is not None for each in known):
        raise LogError(f"a MetaSchedule database must be whole, but no function in {folder} can be read; copy it again")
    kept = [line for line in records if _is_sound_record(line, known)]
    places = {old: new for new, old in enumerate(i for i, each in enumerate(known) if each is not None)}
    renumbered = [json.dumps([places[place], rest]) for place, rest in map(json.loads, kept)]
    sound = [line for line, each in zip(workloads, known, strict=True) if each is not None]
    (into / _WORKLOADS).write_text("".join(f"{line}\n" for line in sound))
    (into / _RECORDS).write_text("".join(f"{line}\n" for line in renumbered))
    return sum(1 for line in records if line.strip()) - len(kept)


def _functions(line: str) -> list[tirx.PrimFunc] | None:
    """The functions of a workload; None for one that must not be handed to TVM."""
    try:
        _digest, packed = json.loads(line)
        data = base64.b64decode(packed, validate=True)
        text = data[8:].decode()  # after its length
        check_graph(text)
        if int.from_bytes(data[:8], "little") != len(data) - 8:
            return None
        module = tvm.ir.load_json(text)
    except Exception:  # TVM reports what is no graph of its objects with whatever its readers raise
        return None
    if not isinstance(module, tvm.IRModule):
        return None
    return [func for _, func in module.functions_items() if isinstance(func, tirx.PrimFunc)]


def _is_sound_record(line: str, workloads: Sequence[list[tirx.PrimFunc] | None]) -> bool:
    try:
        place, (trace, seconds, target, arguments) = json.loads(line)
        steps = parse_trace(json.dumps(trace), _MOST_PARAMETERS)
        functions = workloads[place] if type(place) is int and 0 <= place < len(workloads) else None
        for func in functions or ():
            check_inlining(func, steps[0])
    except (ValueError, TypeError, RecursionError, InvalidDecision):
        return False
    times = seconds is None or (isinstance(seconds, list) and all(type(s) in (int, float) for s in seconds))
    return functions is not None and times and isinstance(target, dict | str) and arguments is None


def _open(folder: Path) -> Any:
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return JSONDatabase(work_dir=str(folder))
    except OSError as error:
        raise LogError(f"the folder of a database must be writable, but {folder} is not ({error.strerror})") from error
    except Exception as error:  # a torn line, say
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise LogError(f"a MetaSchedule database must be whole, but TVM cannot read {folder} ({lines[-1]})") from error


def _record(entry: Any, target: Target) -> tuple[Record | str, Task | None]:
    """The record of a tuning record, or why it is none."""
    times = tuple(float(t) for t in entry.run_secs or ())
    if not times or not all(0 < t < _FAILED and math.isfinite(t) for t in times):
        return "failed", None
    if entry.target is not None and not _serves(entry.target, target):
        return "of another target", None
    functions = [f for _, f in entry.workload.mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    if len(functions) != 1:
        return "of several functions", None
    func = normalise(functions[0])
    trace = json.dumps(json.loads(json.dumps(entry.trace.as_json(), default=_number)), separators=(",", ":"))
    try:
        trace = trace_json(replay(func, trace, target.tvm))
    except InvalidDecision:
        return "that do not replay", None
    name = str(functions[0].attrs["global_symbol"]) if "global_symbol" in (functions[0].attrs or {}) else "main"
    task = Task(name, func, target)
    return Record(task_key(func, target), name, SPACE, {}, trace, times=times, versions=versions(),
                  extra={"source": SPACE}), task


def _serves(theirs: tvm.target.Target, ours: Target) -> bool:
    """Whether times on one target say something about the other: the same kind and the same CPU or architecture."""
    attrs = ("mcpu", "arch")
    same = theirs.kind.name == ours.kind
    return same and all(str(theirs.attrs.get(a, "")) == str(ours.tvm.attrs.get(a, "")) for a in attrs)


def _number(value: Any) -> Any:
    return float(value.value) if isinstance(value, tirx.FloatImm) else int(value.value)


def _forms(func: tirx.PrimFunc) -> Iterator[tirx.PrimFunc]:
    """The function as our tasks have it, and as plain TVM's graph does: fused, or alone with the pattern it notes."""
    yield func
    wide = _widened(func)
    if wide is not None:
        fused = wide.with_attr("s_tir", True)
        yield fused
        noted = relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"main": fused}))["main"]
        if "op_pattern" in (noted.attrs or {}):
            yield noted


def _widened(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The inverse of :func:`mlc.graph.ir.int32_indices.narrowed`; None where 32-bit integers are also data."""
    wide = from_json(to_json(func).replace('"int32"', '"int64"'))
    same = tvm_ffi.structural_hash(normalise(wide), map_free_vars=True)
    return wide if same == tvm_ffi.structural_hash(func, map_free_vars=True) else None
