"""Every kernel's time as a part of what the machine could do: ``make bench-kernels``.

    python -m tests.performance.bench_kernels [--match TEXT] [--target T] [--json] [--log FILE [--tune SECONDS]]

The roofline of a kernel that computes is the larger of its operations over the measured rate of multiply-adds and of
its bytes over the measured rate of reading them; that of a kernel that moves data is a copy of as many bytes, or the
reading of them where it writes next to nothing. Rates are measured at the kernel's own footprint, so that what fits a
cache is compared with that cache. A kernel whose numbers differ from float64's is an error. ``--target x86-64-v3``
compares code for AVX2 with what AVX2 can do here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx

from mlc import threads
from mlc.config import physical_cores
from mlc.graph.task import Task, normalise
from mlc.log import TuningLog
from mlc.log.record import Record
from mlc.measure.calibrate import Kernels, steady
from mlc.measure.machine import load_warning, machine_id
from mlc.report import format as fmt
from mlc.report.console import stderr_console, stdout_console
from mlc.report.tables import table
from mlc.target import Target, resolve
from schedules.cpu.gemm_tiles import GEMM_TILES
from schedules.lowering import PIPELINE
from schedules.machine import LINE_BYTES, TILE_LANES, cpu_machine
from schedules.math import expand_math
from schedules.registry import find
from schedules.space import first_seed
from schedules.trace import replay
from tests.performance.kernel import Kernel, bytes_of
from tests.performance.kernels import kernels

_TOLERANCE = 2e-5  # largest error, relative to the largest value of the reference
_BUDGET = 0.15  # seconds of timing a kernel
_FEW = 16  # a result that is a smaller part of all bytes than one in so many is as good as none
_COLD_BYTES = 96 << 20  # inputs that take turns so that none is left in a cache
_MEMORY = 256 << 20  # bytes that no cache holds
_CACHED = 64 << 20  # larger footprints count as memory
_SHARED = 1 << 15  # bytes that all threads work on together
_COPIED = 64 << 20  # bytes that one timed copy moves at least
_TURNS = 5  # of a kernel with cold inputs and of reading memory
_PRODUCTS = {"fma": 1, "dot": 4, "bfloat": 2}  # of one lane in one instruction


class _Rates:
    """What this machine can do at most on the threads in use, by the kernels that calibrate it.

    The rates of memory are measured each time they are asked for: on a shared host they change from one minute to
    the next by half, and a kernel should be compared with what was possible when it ran.
    """

    def __init__(self, target: Target) -> None:
        self._kernels, self._machine = Kernels(target), cpu_machine(target.tvm)

    @cache  # noqa: B019 - as long as the rates themselves
    def flops(self, kind: str = "fma", tiles: bool = False) -> float:
        """Multiplications and additions a second, of float32 or by dot products of a kind, or of the types of that kind
        by a matrix unit's ``tiles``."""
        if tiles:
            words = TILE_LANES * LINE_BYTES // 4
            return 2.0 * self._machine.cores * self._kernels.tiles()[0] * words * _PRODUCTS[kind]
        rate = self._kernels.multiply_adds()[0] if kind == "fma" else self._kernels.dots(kind)[0]
        return 2.0 * self._machine.cores * self._machine.lanes() * rate * _PRODUCTS[kind]

    def has(self, kind: str) -> bool:
        """Whether the target has arithmetic of the kind."""
        return kind == "fma" or self._kernels.has_dots(kind)

    def read(self, size: int) -> float:
        """Bytes a second of reading ``size`` bytes again and again: from the nearest cache that holds them."""
        size, cores = _rounded(size), self._machine.cores if size >= _SHARED else 1
        return self._kernels.read(size // cores, cores)[0]

    def copy(self, size: int) -> float:
        """Bytes a second, read and written together, of copying where both sides are ``size`` bytes in all: by the C
        library, which streams past the caches, on as many threads."""
        size, cores = _rounded(size), self._machine.cores if size >= _SHARED else 1
        source = np.ones(size // 8, "float32")
        pieces = list(zip(np.array_split(np.empty_like(source), cores), np.array_split(source, cores), strict=True))
        times = max(1, _COPIED // size)

        def repeated(piece: tuple[np.ndarray, np.ndarray]) -> None:
            for _ in range(times):
                np.copyto(*piece)

        with ThreadPoolExecutor(cores) as pool:
            return size * times / steady(lambda: list(pool.map(repeated, pieces)))[0]


def _rounded(size: int) -> int:
    """Few distinct sizes: powers of two, and one for everything beyond the caches."""
    return _MEMORY if size > _CACHED else 1 << max(14, (size - 1).bit_length())


@dataclass(frozen=True)
class _Row:
    """One line of the table; ``roofline`` is the part of it that was reached, ``goal`` the part to reach."""

    name: str
    space: str
    tuned: bool
    seconds: float
    flops: float
    bytes: int
    roofline: float
    goal: float | None
    error: float
    decisions: dict[str, int]


@dataclass
class _Built:
    """A kernel's code with its arguments, checked against the reference."""

    kernel: Kernel
    module: Any
    arguments: list[Any]
    space: str
    tuned: bool
    decisions: dict[str, int]
    error: float
    bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check every kernel, then time them; 1 where one computes wrong numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only kernels whose names hold this text (alternatives: a|b)")
    parser.add_argument("--log", type=Path, help="time the schedules of this tuning log where it has them")
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="tune the kernels into --log first")
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    args = parser.parse_args(argv)
    if args.tune and not args.log:
        parser.error("--tune needs --log FILE to write to")
    threads.configure(args.threads)
    target = resolve(args.target, threads=args.threads)
    rates = _Rates(target)
    chosen = [k for k in kernels() if rates.has(k.kind) and any(part in k.name for part in args.match.split("|"))]
    tasks = [Task(k.name, normalise(k.build(target)), target) for k in chosen]
    if args.tune:
        _tune(tasks, target, args.log, args.tune)
    lookup = _records(args.log)
    progress = stderr_console()
    with progress.status("building and checking"):
        built = [_build(k, task, lookup(task.key)) for k, task in zip(chosen, tasks, strict=True)]
    if warning := load_warning():
        print(warning, file=sys.stderr)
    with progress.status("timing"):
        rows = [_timed(each, rates) for each in built]
    _print(rows, rates, args.json, args.threads)
    wrong = [row for row in rows if not row.error <= _TOLERANCE]
    for row in wrong:
        print(f"{row.name}: the result must be within {_TOLERANCE} of float64's, got {row.error:.1e}", file=sys.stderr)
    return 1 if wrong else 0


def _tune(tasks: list[Task], target: Target, log: Path, seconds: float) -> None:
    from mlc.measure import LocalMeasurer, MeasureOptions
    from mlc.report.progress import listening
    from mlc.tuning import TuneOptions, tune_tasks

    measurer = LocalMeasurer(MeasureOptions(threads=target.threads), target.threads)
    try:
        with TuningLog(log) as records, listening(stderr_console()) as listener:
            tune_tasks(tasks, target, records, TuneOptions(seconds=seconds), measurer, listener)
    finally:
        measurer.close()


def _records(path: Path | None) -> Callable[[str], Record | None]:
    if path is None:
        return lambda _key: None
    with TuningLog(path) as log:
        best = {task.key: log.best(task.key) for task in log.tasks()}
    return best.get


def _build(kernel: Kernel, task: Task, record: Record | None) -> _Built:
    """Schedule and compile as the compiled model has it, and compare one run with the reference."""
    if record is not None:
        sch, space, decisions = replay(task.func, record.trace, task.target.tvm), record.space, dict(record.decisions)
    else:
        found = find(task.func, task.target.tvm)
        sch, decisions = first_seed(found, task.func, task.target.tvm)
        space = found.name
    func = expand_math(sch.mod["main"]).with_attr("global_symbol", "main")
    with task.target.tvm:
        module = tvm.compile(tvm.IRModule({"main": func}), task.target.tvm, tir_pipeline=PIPELINE).jit()
    inputs = _inputs(task.func)
    expected = kernel.reference(*(a.astype("float64") for a in inputs))
    output = np.zeros(expected.shape, task.func.params[-1].dtype)
    if output.dtype.kind == "f":
        output[...] = np.nan
    arguments = [tvm.runtime.tensor(a) for a in (*inputs, output)]
    module["main"](*arguments)
    found = arguments[-1].numpy().astype("float64")
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    return _Built(kernel, module, arguments, space, record is not None, decisions, error, bytes_of(task.func))


def _inputs(func: tirx.PrimFunc) -> list[np.ndarray]:
    """Normal floats; integers over the whole range of 8 or 32 bits, of those of 16 as many as 8 bits have."""
    rng = np.random.default_rng(0)

    def of(shape: list[int], dtype: str) -> np.ndarray:
        if "int" in dtype:
            few = np.iinfo("int8" if dtype == "int16" else dtype)
            return rng.integers(few.min, few.max, shape, dtype, endpoint=True)
        return rng.standard_normal(shape, dtype="float32").astype(getattr(ml_dtypes, dtype, dtype))

    return [of([int(d) for d in p.shape], str(p.dtype)) for p in list(func.params)[:-1]]


def _timed(built: _Built, rates: _Rates) -> _Row:
    kernel = built.kernel
    if kernel.cold:
        return _timed_cold(built, rates)
    seconds = _seconds(built)
    if kernel.flops:
        peak = rates.flops(kernel.kind, built.space == GEMM_TILES.name)
        bound = max(kernel.flops / peak, built.bytes / rates.read(built.bytes))
    elif _size(built.arguments[-1]) * _FEW > built.bytes:
        bound = built.bytes / rates.copy(built.bytes)
    else:
        bound = built.bytes / rates.read(built.bytes)
    return _row(built, seconds, bound / seconds)


def _timed_cold(built: _Built, rates: _Rates) -> _Row:
    """In turn with the reading of memory, whose rate does not stay the same: the median of what each turn reached."""
    kernel, turns = built.kernel, []
    cold = sum(_size(built.arguments[i]) for i in kernel.cold)
    for _ in range(_TURNS):
        memory = cold / rates.read(_COLD_BYTES * 4)
        seconds = _cold_seconds(built)
        turns.append((max(kernel.flops / rates.flops(kernel.kind), memory) / seconds, seconds))
    reached, times = zip(*turns, strict=True)
    return _row(built, float(np.median(times)), float(np.median(reached)))


def _row(built: _Built, seconds: float, reached: float) -> _Row:
    kernel = built.kernel
    return _Row(kernel.name, built.space, built.tuned, seconds, kernel.flops, built.bytes, reached, kernel.goal,
                built.error, built.decisions)


def _size(tensor: Any) -> int:
    return int(np.prod(tensor.shape)) * tvm.runtime.DataType(str(tensor.dtype)).bits // 8


def _seconds(built: _Built) -> float:
    """Seconds a call with everything in the caches that fits: the median of several."""
    evaluate = built.module.time_evaluator
    once = float(evaluate("main", tvm.cpu(), number=1, repeat=1)(*built.arguments).results[0])
    number = max(1, round(0.004 / once))
    repeats = max(5, min(25, round(_BUDGET / (number * once))))
    return float(np.median(evaluate("main", tvm.cpu(), number=number, repeat=repeats)(*built.arguments).results))


def _cold_seconds(built: _Built) -> float:
    """Seconds a call where the cold inputs were last used so long ago that no cache has them."""
    kernel, run = built.kernel, built.module["main"]
    sets = max(2, -(-_COLD_BYTES // sum(_size(built.arguments[i]) for i in kernel.cold)))
    calls = []
    for _ in range(sets):
        arguments = list(built.arguments)
        for position in kernel.cold:
            arguments[position] = tvm.runtime.tensor(built.arguments[position].numpy())
        calls.append(arguments)

    def turn() -> None:
        for arguments in calls:
            run(*arguments)

    return steady(turn, 2)[0] / sets


def _print(rows: Sequence[_Row], rates: _Rates, as_json: bool, thread_count: int) -> None:
    machine = {
        "machine": machine_id(), "threads": thread_count, "flops": rates.flops(),
        "read_bytes_per_second": rates.read(_COLD_BYTES * 4), "copy_bytes_per_second": rates.copy(_COLD_BYTES * 4),
    }
    if as_json:
        print(json.dumps({**machine, "kernels": [asdict(row) for row in rows]}))
        return
    cells = []
    for row in rows:
        amount = fmt.rate(row.flops, row.seconds) if row.flops else f"{fmt.bytes_(row.bytes / row.seconds)}/s"
        goal = "" if row.goal is None else f"{row.goal:.0%}"
        mark = "" if row.goal is None else "yes" if row.roofline >= row.goal else "no"
        cells.append((row.name, "log" if row.tuned else "seed", fmt.seconds(row.seconds), amount,
                      f"{row.roofline:.0%}", goal, mark, f"{row.error:.0e}"))
    right = ("time", "rate", "of roofline", "goal", "error")
    columns = ("kernel", "schedule", "time", "rate", "of roofline", "goal", "reached", "error")
    stdout_console().print(table(columns, cells, right=right))
    print(f"{machine['machine']}, {thread_count} threads: {fmt.rate(rates.flops(), 1)} of multiply-adds, "
          f"{fmt.bytes_(machine['read_bytes_per_second'])}/s read, "
          f"{fmt.bytes_(machine['copy_bytes_per_second'])}/s copied (both ways together)")


if __name__ == "__main__":
    sys.exit(main())
