"""The logs that ship with mlc, read for the target at hand.

``tuning_logs/<family>/*.jsonl`` (or ``.db``) holds the best record of each task of the benchmark models. A family is a
level of the x86 instruction set: where vector width and the number of vector registers agree, a schedule means the
same, so a record made for ``x86-64-v4`` on 2 cores serves ``native`` on any AVX-512 machine. What a level does not say
is whether there are dot products of bytes: files that end in ``-vnni`` are read where there are, and others in any
case, since products of bytes are other functions with them, of other keys. A record was timed elsewhere,
if at all: it replaces the untuned default and is the first candidate of a tuning run. Its time decides between
alternatives of a graph unless the times of its machine are below what arithmetic allows on this one, which is then
another kind of machine: what is faster there may be slower here (Winograd's 4x4 tiles, with half of the multipliers).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

import tvm_ffi
from tvm import s_tir, tirx

from cost_model.machine import Machine, machine
from mlc.errors import LogError
from mlc.graph.task import Task
from mlc.log import manifest
from mlc.log.codec import versions_of
from mlc.log.exchange import read_jsonl
from mlc.log.record import ELSEWHERE, Record
from mlc.log.store import TuningLog
from mlc.target import Target
from schedules.machine import cpu_machine
from schedules.registry import by_name
from schedules.space import InvalidDecision
from schedules.trace import replay

__all__ = ["VNNI", "family", "for_target", "is_shipped", "schedule_of", "shipped_records"]

#: the x86 level by bytes of a vector register and the number of them
_LEVELS = {(64, 32): "x86-64-v4", (32, 16): "x86-64-v3"}
#: what the names of files end in whose schedules use dot products of bytes
VNNI = "-vnni"
#: part of the cores that a schedule made for fewer of them must keep busy; below, the machine's own default is better
_BUSY = 0.7
#: part of a machine's times that are not below what arithmetic allows, at least, if it may be one like this (of what
#: ships, 0.97 where that is so, and 0.37 on a machine with half of the multipliers)
_WITHIN = 0.75


def family(target: Target) -> str:
    """The name of the folder with the records that serve ``target``."""
    if target.kind == "llvm":
        found = cpu_machine(target.tvm)
        level = _LEVELS.get((found.vector_bytes, found.vector_registers))
        if level:
            return level
    return target.canonical.replace("/", "-")


def for_target(records: Iterable[Record], target: Target) -> Iterator[Record]:
    """Shipped records as records of ``target``: under its keys, marked, and not as if compared on this machine."""
    for record in records:
        digest, _, rest = record.task_key.partition("-")
        versions = versions_of(record.task_key)
        made_for = rest.removesuffix(f"-{versions}")
        key = f"{digest}-{target.canonical}-{versions}"
        yield replace(record, task_key=key, verdict=None, made_for=made_for)


def shipped_records(target: Target) -> list[Record]:
    """Every shipped record that serves ``target``, file by file.

    Raises :class:`LogError` for a file that is damaged, is not what its checksum says, or is missing.
    """
    folder = resources.files("tuning_logs") / family(target)
    if not folder.is_dir():
        return []
    with resources.as_file(folder) as path:
        manifest.check_complete(path)
    found: list[Record] = []
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        with resources.as_file(item) as path:
            if path.suffix in (".db", ".jsonl") and (not path.stem.endswith(VNNI) or _has_dots(target)):
                records = list(for_target(_read(path, path.stat().st_mtime_ns), target))
                faster = _faster_machines(records, target)
                found.extend(replace(r, machine=ELSEWHERE) if r.machine in faster else r for r in records)
    return found


def _has_dots(target: Target) -> bool:
    return target.kind == "llvm" and cpu_machine(target.tvm).dot_per_cycle > 0


def _faster_machines(records: Iterable[Record], target: Target) -> set[str]:
    """The machines of records that compute more in a second, on as many cores and by the same instructions, than
    ``target`` can: in so many of them that it is not for operations that padding or a simplification saves."""
    if target.kind != "llvm":
        return set()
    on, within = machine(target.tvm), defaultdict[str, list[bool]](list)
    for record in records:
        if record.ok and record.flops:
            most = on.flops / on.cores * _rate(record.space, on) * _cores(record.made_for)
            within[record.machine].append(record.flops <= most * record.seconds)
    return {name for name, each in within.items() if sum(each) < _WITHIN * len(each)}


def _rate(space: str, on: Machine) -> float:
    """How many times the operations of float32 a machine does by the instructions that a space's schedules use."""
    found = by_name(space, "llvm")
    if found is None or not found.tensorizes:
        return 1.0
    special = {"tiles_": on.tiles, "matrix_": on.pairs}.get(found.tensorizes, 0.0)
    return max(1.0, on.dot, on.bfloat, special)


def is_shipped(record: Record) -> bool:
    """Whether the record came with mlc and not from a run on this machine."""
    return bool(record.made_for)


def schedule_of(task: Task, record: Record) -> s_tir.Schedule:
    """The record's schedule of the task's function.

    Raises :class:`InvalidDecision` where its trace does not fit, and for a shipped one that was made for fewer cores
    and whose parallel loops would leave too many of the target's idle.
    """
    sch = replay(task.func, record.trace, task.target.tvm)
    if is_shipped(record) and task.target.threads > _cores(record.made_for):
        for extent in _parallel_extents(sch.mod["main"]):
            busy = extent / (task.target.threads * math.ceil(extent / task.target.threads))
            if busy < _BUSY:
                raise InvalidDecision(
                    f"a schedule must keep the cores busy, but a parallel loop of {extent} does not fit "
                    f"{task.target.threads}"
                )
    return sch


def _cores(canonical: str) -> int:
    """``2`` of ``llvm/x86-64-v4/2``; a GPU's schedules know no cores."""
    words = canonical.split("/")
    return int(words[2]) if len(words) > 2 and words[2].isdigit() else 1 << 30


def _parallel_extents(func: tirx.PrimFunc) -> list[int]:
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, [(tirx.For, loops.append)])
    return [
        int(loop.extent) for loop in loops
        if loop.kind == tirx.ForKind.PARALLEL and isinstance(loop.extent, tirx.IntImm)
    ]


@lru_cache(maxsize=16)
def _read(path: Path, _changed: int) -> tuple[Record, ...]:
    manifest.check(path)
    if path.suffix == ".db":
        with TuningLog(path, readonly=True) as log:
            return tuple(record for key in log.tasks() if (record := log.best(key.task_key)) is not None)
    records: list[Record] = []
    for line, found in read_jsonl(path):
        if isinstance(found, str):
            raise LogError(f"a shipped tuning log must be whole, but {path} is not (line {line}: {found}); "
                           "reinstall mlc")
        if isinstance(found, Record):
            records.append(found)
    return tuple(records)
