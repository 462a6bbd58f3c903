"""What the machine can do at most on the threads in use: multiply-adds, reading, copying; measured by own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, te

from mlc.target import Target
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine

__all__ = ["Rates", "best_of"]

_REPEATS = 12
_SHORTEST_MS = 8  # of one timed repeat
_CHUNKS_PER_CORE = 8
_MEMORY = 256 << 20  # bytes that no cache holds
_CACHED = 64 << 20  # larger footprints count as memory


def best_of(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


class Rates:
    """Ceilings of this machine for ``target``.

    The rates of memory are measured each time they are asked for: on a shared host they change from one minute to
    the next by half, and a kernel should be compared with what was possible when it ran.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._machine = target, cpu_machine(target.tvm)
        self._timers: dict[tuple[str, int], Callable[[], float]] = {}

    @cached_property
    def flops(self) -> float:
        """Multiplications and additions a second: independent chains of fused multiply-adds in registers."""
        lanes = self._machine.lanes()
        chains, steps, chunks = 3 * self._machine.vector_registers // 4, 20_000, self._machine.cores
        x = te.placeholder((lanes,), name="x")
        k = te.reduce_axis((0, steps), name="k")
        # a geometric series: no compiler finds its sum
        series = te.comm_reducer(lambda a, b: a * b + b, lambda t: tvm.tirx.const(0, t), name="series")
        y = te.compute((chunks, chains, lanes), lambda p, i, j: series(x[j], axis=k), name="y")
        sch = s_tir.Schedule(te.create_prim_func([x, y]))
        block = sch.get_sblock("y")
        p, i, j = sch.get_loops(sch.cache_write(block, 0, "local"))
        self._accumulate(sch, block, p, (i, j))
        timer = self._timer(sch, [np.full(lanes, 0.5, "float32")], (chunks, chains, lanes), 4 * _REPEATS)
        return 2.0 * chunks * chains * lanes * steps / timer()

    def read(self, size: int) -> float:
        """Bytes a second of reading ``size`` bytes again and again: from the nearest cache that holds them."""
        return self._rate("read", size, self._reading)

    def copy(self, size: int) -> float:
        """Bytes a second, read and written together, of copying where both sides are ``size`` bytes in all."""
        return self._rate("copy", size, self._copying)

    def _rate(self, name: str, size: int, build: Callable[[int], Callable[[], float]]) -> float:
        # few distinct sizes: powers of two, and one for everything beyond the caches
        rounded = _MEMORY if size > _CACHED else 1 << max(14, (size - 1).bit_length())
        if (name, rounded) not in self._timers:
            self._timers[name, rounded] = build(rounded)
        return rounded / self._timers[name, rounded]()

    def _reading(self, size: int) -> Callable[[], float]:
        parts = self._chunks(size)
        width = 8 * self._machine.lanes()  # independent sums, so that the latency of an addition is hidden
        x = te.placeholder((parts, size // 4 // parts // width, width), name="x")
        k = te.reduce_axis((0, int(x.shape[1])), name="k")
        y = te.compute((parts, width), lambda p, j: te.sum(x[p, k, j], axis=k), name="y")
        sch = s_tir.Schedule(te.create_prim_func([x, y]))
        block = sch.get_sblock("y")
        p, j = sch.get_loops(sch.cache_write(block, 0, "local"))
        self._accumulate(sch, block, p, (j,))
        return self._timer(sch, [np.ones([int(d) for d in x.shape], "float32")], (parts, width))

    def _copying(self, size: int) -> Callable[[], float]:
        parts, count = self._chunks(size), size // 8
        x = te.placeholder((parts, count // parts), name="x")
        sch = s_tir.Schedule(te.create_prim_func([x, te.compute(x.shape, lambda p, j: x[p, j], name="y")]))
        p, j = sch.get_loops(sch.get_sblock("y"))
        sch.parallel(p)
        _, j = sch.split(j, [None, 4 * self._machine.lanes()])
        self._vectors(sch, (j,))
        source = np.ones((parts, count // parts), "float32")
        own = self._timer(sch, [source], source.shape)
        if size < _MEMORY:
            return own
        library = self._memcpy(source)
        return lambda: min(own(), library())

    def _memcpy(self, source: np.ndarray) -> Callable[[], float]:
        """The C library's copy, which streams past the caches, on as many threads."""
        target, cores = np.zeros_like(source), self._machine.cores
        pieces = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
        pool = ThreadPoolExecutor(cores)
        return lambda: best_of(lambda: list(pool.map(lambda piece: np.copyto(*piece), pieces)))

    def _chunks(self, size: int) -> int:
        return self._machine.cores * _CHUNKS_PER_CORE if size >= 1 << 15 else 1

    def _accumulate(self, sch: s_tir.Schedule, block: Any, chunk: Any, copied: Sequence[Any]) -> None:
        """Run ``block``'s sum over one axis in registers, once for each parallel ``chunk``."""
        self._vectors(sch, copied)
        sch.parallel(chunk)
        sch.compute_at(block, chunk)
        *tile, step = sch.get_loops(block)[1:]
        sch.reorder(step, *tile)
        self._vectors(sch, tile)
        sch.decompose_reduction(block, step)

    def _vectors(self, sch: s_tir.Schedule, loops: Sequence[Any]) -> None:
        *outer, last = loops
        vectors, lane = sch.split(last, [None, self._machine.lanes()])
        for loop in (*outer, vectors):
            sch.unroll(loop)
        sch.vectorize(lane)

    def _timer(
        self, sch: s_tir.Schedule, inputs: list[np.ndarray], shape: tuple[int, ...], repeats: int = _REPEATS
    ) -> Callable[[], float]:
        """A function that gives the seconds of the fastest call of a scheduled kernel."""
        built = tvm.compile(sch.mod, target=self._target.tvm, tir_pipeline=PIPELINE).jit()
        arguments = [tvm.runtime.tensor(a) for a in inputs] + [tvm.runtime.tensor(np.zeros(shape, "float32"))]
        built["main"](*arguments)
        timed = built.time_evaluator("main", tvm.cpu(), number=1, repeat=repeats, min_repeat_ms=_SHORTEST_MS)
        return lambda: float(min(timed(*arguments).results))
