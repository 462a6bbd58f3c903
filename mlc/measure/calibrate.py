"""Measures this machine: clock rate, execution units, caches, memory, and the cost of starting a parallel loop.

A few tiny kernels, each timed for some tens of milliseconds: chains of dependent instructions, independent ones, sums
over buffers of the size of each cache. What a core has for itself, its clock, units and first two caches, one thread
measures; what cores share, all threads do. Whatever disturbs a kernel makes it slower, so the fastest of several rounds
counts, each the median of a few calls; a figure that no second round confirms is left out, and what the target is
described by stays.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from mlc import subprocesses, threads
from mlc.calibration import Calibration, identity
from mlc.errors import MeasureError
from mlc.measure.machine import load_warning
from mlc.target import Target, resolve
from schedules.intrin.tiles import CONFIGURE, LOAD, PRODUCT, RELEASE, STORE, TILE, ZERO, called, in_turn
from schedules.lowering import PIPELINE
from schedules.machine import LINE_BYTES, cpu_machine, reference_machine

__all__ = ["Kernels", "Reading", "calibrate", "readings", "steady"]

#: rounds of each figure, and calls of a round
_ROUNDS, _CALLS = 7, 5
#: how much longer than the fastest round another one may take that confirms it
_CONFIRMED = 1.1
#: dependent steps of a chain, and bytes that a call reads from a cache: about a millisecond
_STEPS, _BYTES = 200_000, 48 << 20
#: bytes a cycle in whose multiples paths to a core are made
_PATH = 16.0
#: seconds after which a calibration has failed
_PATIENCE = 120.0
#: bytes that all threads together read from memory at most
_MOST_BYTES = 512 << 20
#: parallel loops started in one call of a round; and single ones that find the threads asleep, with the seconds before
_STARTS, _WAKES, _ASLEEP = 300, 4, 0.2
#: Dot products of 8-bit integers and of bfloat16, and products of pairs of rows, by LLVM's feature that has them and
#: the bytes of their vectors; and pairs of 16-bit products, which add to no sums
_DOTS = {
    "dot": {
        ("avx512vnni", 64): "llvm.x86.avx512.vpdpbusd.512", ("avxvnni", 32): "llvm.x86.avx512.vpdpbusd.256",
        ("dotprod", 16): "llvm.aarch64.neon.sdot.v4i32.v16i8",
    },
    "bfloat": {
        ("avx512bf16", 64): "llvm.x86.avx512bf16.dpbf16ps.512", ("bf16", 16): "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
    },
    "words": {
        ("avx512bw", 64): "llvm.x86.avx512.pmaddw.d.512", ("avx2", 32): "llvm.x86.avx2.pmadd.wd",
        ("sse2", 16): "llvm.x86.sse2.pmadd.wd",
    },
    "matrix": {("i8mm", 16): "llvm.aarch64.neon.smmla.v4i32.v16i8"},
}
#: products of a matrix unit's tiles by LLVM's feature that has them, and how many sums are added to in turn
_TILES, _SUMS = {"amx-int8": "tdpbusd", "amx-bf16": "tdpbf16ps"}, 4
#: types of what they multiply and of their sums; bfloat16 by its bits, as :mod:`schedules.lowering` has it
_DOT_TYPES = {
    "dot": ("int8", "int32"), "bfloat": ("uint16", "float32"), "words": ("int16", "int32"), "matrix": ("int8", "int32"),
}


@dataclass(frozen=True)
class Reading:
    """A figure by its name in :data:`schedules.machine.FACTS` (or ``wake``, in microseconds: a parallel loop whose
    threads have gone to sleep). ``confirmed``: a second round agreed."""

    name: str
    value: float
    confirmed: bool = True


def calibrate(target: Target) -> tuple[Calibration, list[Reading], str]:
    """Measure this machine for ``native`` code on the threads of ``target``, in a process of its own, whose thread pool
    nobody has used; takes a few seconds.

    Returns what may be kept, every reading, and a line that says what else kept the machine busy (empty: nothing).
    Raises :class:`MeasureError` where the process fails.
    """
    busy = load_warning()
    command = subprocesses.command("mlc.measure.calibrate", target.attrs)
    environment = subprocesses.environment(**threads.environment(target.threads))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE, env=environment)
        found = [Reading(**fields) for fields in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        raise MeasureError(f"calibration must run its kernels on this machine, but failed: {said[-1]}; "
                           "`mlc doctor` says what is wrong with the installation") from error
    kept = {r.name: r.value for r in found if r.confirmed and r.name != "wake"}
    return Calibration(identity(), kept), found, busy or load_warning()


def readings(target: Target) -> Iterator[Reading]:
    """Every figure, one after the other."""
    threads.configure(target.threads)
    kernels = Kernels(target)
    hz = kernels.clock()
    if not hz.confirmed:  # all else is in cycles of it
        yield Reading("ghz", hz.value / 1e9, confirmed=False)
        return
    yield Reading("ghz", hz.value / 1e9)
    yield from kernels.units(hz.value)
    yield from kernels.caches(hz.value)
    yield from kernels.memory()
    yield from kernels.starts()


def steady(call: Callable[[], object], calls: int = _CALLS) -> tuple[float, bool]:
    """Seconds of a call in the fastest round, and whether another round confirms it."""
    call()
    rounds = sorted(median(_timed(call) for _ in range(calls)) for _ in range(_ROUNDS))
    return rounds[0], rounds[1] <= _CONFIRMED * rounds[0]


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Kernels:
    """The kernels for one target, and what their times say."""

    def __init__(self, target: Target) -> None:
        self._target, self._on = target, cpu_machine(target.tvm)
        self._lanes, self._threads = self._on.lanes(), target.threads
        self._many = 3 * self._on.vector_registers // 4  # chains that keep every unit busy
        with target.tvm:
            has = tvm.target.codegen.llvm_cpu_has_features
            self._fused = reference_machine(target.tvm).fma_per_cycle > 1
            self._named = {kind: next((name for (feature, width), name in known.items()
                                       if width == self._on.vector_bytes and has(feature, target.tvm)), "")
                           for kind, known in _DOTS.items()}
            self._product = next((name for feature, name in _TILES.items() if has(feature, target.tvm)), "")

    def clock(self) -> Reading:
        """Cycles a second under vector load: dependent integer instructions, of one cycle each on every core, right
        after multiply-adds have set the frequency."""
        def step(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
            return (a + b) ^ b  # two instructions whose chain has no closed form

        load, chain = self._chains(_series, 8, self._lanes), self._chains(step, 1, 1, "int64")
        load()
        seconds, confirmed = steady(chain)
        return Reading("hz", 2 * _STEPS / seconds, confirmed)

    def units(self, hz: float) -> Iterator[Reading]:
        """Multiply-adds and dot products of whole vectors that begin in a cycle, and the latency of the former; what a
        matrix unit does in a cycle, and its latency."""
        if self._fused:
            seconds, confirmed = steady(self._chains(_series, 1, self._lanes))
            yield Reading("latency", round(seconds * hz / _STEPS), confirmed)
            rate, confirmed = self.multiply_adds()
            yield Reading("fma", _halves(rate / hz), confirmed)
        for kind, name in self._named.items():
            if name:
                rate, confirmed = self.dots(kind)
                yield Reading(kind, _halves(rate / hz), confirmed)
        if self._product:
            rate, confirmed = self.tiles()
            yield Reading("tile", _halves(rate / hz), confirmed)
            rate, confirmed = self.tiles(1)
            yield Reading("tilelatency", round(TILE * hz / rate), confirmed)

    def multiply_adds(self) -> tuple[float, bool]:
        """Multiply-adds of whole vectors that a core begins in a second, and whether a second round confirms that."""
        seconds, confirmed = steady(self._chains(_series, self._many, self._lanes))
        return self._many * _STEPS / seconds, confirmed

    def has_dots(self, kind: str) -> bool:
        """Whether the target has dot products of a kind."""
        return bool(self._named[kind])

    def dots(self, kind: str) -> tuple[float, bool]:
        """Dot products of whole vectors that a core begins in a second, of 8-bit integers (``dot``), of bfloat16
        (``bfloat``), of 16-bit integers (``words``, without the addition) or of pairs of rows of 8-bit ones
        (``matrix``), and whether a second round confirms that; the target must have them."""
        seconds, confirmed = steady(self._dots(self._many, kind))
        return self._many * _STEPS / seconds, confirmed

    def tiles(self, sums: int = _SUMS) -> tuple[float, bool]:
        """Rows of tiles that a core's matrix unit multiplies in a second, adding to so many ``sums`` in turn, and
        whether a second round confirms that; the target must have one."""
        seconds, confirmed = steady(self._tiles(sums))
        return TILE * sums * (_STEPS // _SUMS) / seconds, confirmed

    def caches(self, hz: float) -> Iterator[Reading]:
        """Bytes a cycle that a core reads from each level; of its own levels, how wide the path from there is, of the
        third one while the other cores do the same."""
        l1, l2, l3 = self._on.l1_bytes, self._on.l2_bytes, self._on.l3_bytes
        parts = {"l1rate": (l1 // 2, 1), "l2rate": (l2 // 2, 1)}
        if l3 // (2 * self._threads) >= 2 * l2:
            parts["l3rate"] = l3 // (2 * self._threads), self._threads
        elif l3 // 2 >= 2 * l2:
            parts["l3rate"] = l3 // 2, 1
        for name, (size, cores) in parts.items():
            rate, confirmed = self.read(size, cores)
            each = rate / cores / hz
            yield Reading(name, each if name == "l3rate" else _path(each), confirmed)

    def memory(self) -> Iterator[Reading]:
        """GB/s that one core and all cores read from memory."""
        last = self._on.l3_bytes
        for name, cores in (("core", 1), ("memory", self._threads)):
            rate, confirmed = self.read(min(4 * last if cores == 1 else 2 * last, _MOST_BYTES // cores), cores)
            yield Reading(name, rate / 1e9, confirmed)

    def starts(self) -> Iterator[Reading]:
        """Microseconds of a parallel loop beyond its work, on threads that are awake and on threads that sleep."""
        if self._threads < 2:
            return
        together, alone = self._region(parallel=True), self._region(parallel=False)
        times = [steady(_repeated(call, _STARTS), 3) for call in (together, alone)]
        difference = 1e6 * (times[0][0] - times[1][0]) / _STARTS
        if difference > 0.0:
            yield Reading("launch", difference, times[0][1])
        sleeping = []
        for call in (together, alone):
            waits = []
            for _ in range(_WAKES):
                together()
                time.sleep(_ASLEEP)  # TVM's threads spin for half of that
                waits.append(_timed(call))
            sleeping.append(min(waits))
        yield Reading("wake", max(1e6 * (sleeping[0] - sleeping[1]), 0.1))

    def read(self, size: int, cores: int) -> tuple[float, bool]:
        """Bytes a second of ``cores`` cores that each read ``size`` bytes of their own again and again, and whether a
        second round confirms that."""
        call, amount = self._reading(size, cores)
        seconds, confirmed = steady(call, 3)
        return amount / seconds, confirmed

    # -- the kernels

    def _chains(
        self, step: Callable[[Any, Any], Any], chains: int, lanes: int, dtype: str = "float32"
    ) -> Callable[[], object]:
        """``chains`` vectors, each the result of many dependent steps."""
        x = te.placeholder((lanes,), dtype=dtype, name="x")
        k = te.reduce_axis((0, _STEPS), name="k")
        series = te.comm_reducer(step, lambda t: tirx.const(0, t), name="series")
        y = te.compute((chains, lanes), lambda i, j: series(x[j], axis=k), name="y")
        sch = s_tir.Schedule(te.create_prim_func([x, y]))
        block = sch.get_sblock("y")
        self._in_registers(sch, block, sch.get_loops(sch.cache_write(block, 0, "local")), None, lanes)
        value = 0.5 if dtype.startswith("float") else 0x123456789ABCD
        return self._call(sch.mod, np.full(lanes, value, dtype), np.zeros((chains, lanes), dtype))

    def _dots(self, chains: int, kind: str) -> Callable[[], object]:
        """Like :meth:`_chains`, with a dot product of the target's."""
        lanes, name, (operand, total) = self._lanes, self._named[kind], _DOT_TYPES[kind]
        vector, width = f"{total}x{lanes}", self._on.lanes(operand)

        def added(sums: tirx.Expr, values: tirx.Expr) -> tirx.Expr:
            operands = [sums, values, values] if kind != "words" else [
                tirx.reinterpret(f"{operand}x{width}", sums), values]
            return tirx.call_llvm_pure_intrin(vector, name, *operands)

        @T.prim_func(s_tir=True)
        def main(a: T.handle, b: T.handle) -> None:
            x = T.match_buffer(a, (width,), operand)
            y = T.match_buffer(b, (chains * lanes,), total)
            with T.sblock("root"):
                sums = T.alloc_buffer((chains * lanes,), total, scope="local")
                for i in T.unroll(chains):
                    sums[T.Ramp(i * lanes, 1, lanes)] = T.Broadcast(T.Cast(total, 0), lanes)
                for _ in T.serial(_STEPS):
                    for i in T.unroll(chains):
                        sums[T.Ramp(i * lanes, 1, lanes)] = added(
                            sums[T.Ramp(i * lanes, 1, lanes)], x[T.Ramp(0, 1, width)])
                for i in T.unroll(chains):
                    y[T.Ramp(i * lanes, 1, lanes)] = sums[T.Ramp(i * lanes, 1, lanes)]

        return self._call(tvm.IRModule({"main": main}), np.ones(width, operand), np.zeros(chains * lanes, total))

    def _tiles(self, sums: int) -> Callable[[], object]:
        """Products of one pair of tiles, added to each of the ``sums`` in turn."""
        x, w = (tirx.decl_buffer((TILE, LINE_BYTES), "int8", name=name) for name in "xw")
        y = tirx.decl_buffer((sums * TILE, TILE), "int32", name="y")
        product = f"{PRODUCT}{self._product.removeprefix('tdp')}"
        step = [called(f"{product}_{tile}_4_6") for tile in range(sums)]
        loop = tirx.For(tirx.Var("i", "int32"), 0, _STEPS // _SUMS, tirx.ForKind.SERIAL, in_turn(step))
        body = in_turn([
            called(f"{CONFIGURE}_2_2_{TILE}"), *(called(f"{ZERO}_{tile}") for tile in range(sums)),
            *(called(f"{LOAD}_{number}", tirx.address_of(tirx.BufferLoad(each, [0, 0])), tirx.const(64, "int64"))
              for number, each in ((4, x), (6, w))),
            loop,
            *(called(f"{STORE}_{tile}", tirx.address_of(tirx.BufferLoad(y, [tile * TILE, 0])), tirx.const(64, "int64"))
              for tile in range(sums)),
            called(RELEASE),
        ])
        root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
        func = tirx.PrimFunc([x, w, y], root).with_attrs({"s_tir": True, "global_symbol": "main"})
        rng = np.random.default_rng(0)
        operands = [rng.integers(-128, 127, (TILE, LINE_BYTES), "int8", endpoint=True) for _ in range(2)]
        return self._call(tvm.IRModule({"main": func}), *operands, np.zeros((sums * TILE, TILE), "int32"))

    @cache  # noqa: B019 - as long as the kernels themselves: whoever asks again wants another time, not other code
    def _reading(self, size: int, cores: int) -> tuple[Callable[[], object], float]:
        """A call in which ``cores`` cores each read ``size`` bytes of their own several times, and all these bytes."""
        width = 8 * self._lanes  # independent sums, so that the latency of an addition is hidden
        count, repeats = size // 4 // width, max(2, _BYTES // size)
        x = te.placeholder((cores, count, width), dtype="int32", name="x")
        r, k = te.reduce_axis((0, repeats), name="r"), te.reduce_axis((0, count), name="k")
        y = te.compute((cores, width), lambda p, j: te.sum(x[p, k, j], axis=[r, k]), name="y")
        sch = s_tir.Schedule(te.create_prim_func([x, y]))
        block = sch.get_sblock("y")
        chunk, *loops = sch.get_loops(sch.cache_write(block, 0, "local"))
        if cores > 1:
            sch.parallel(chunk)
        self._in_registers(sch, block, loops, chunk, self._lanes)
        call = self._call(sch.mod, np.ones((cores, count, width), "int32"), np.zeros((cores, width), "int32"))
        return call, 4.0 * cores * count * width * repeats

    def _region(self, *, parallel: bool) -> Callable[[], object]:
        """A loop with next to nothing to do for each thread."""
        x = te.placeholder((self._threads, self._lanes), name="x")
        sch = s_tir.Schedule(te.create_prim_func([x, te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="y")]))
        i, j = sch.get_loops(sch.get_sblock("y"))
        sch.vectorize(j)
        if parallel:
            sch.parallel(i)
        shape = (self._threads, self._lanes)
        return self._call(sch.mod, np.ones(shape, "float32"), np.zeros(shape, "float32"))

    def _in_registers(
        self, sch: s_tir.Schedule, block: Any, copied: Sequence[Any], chunk: Any, lanes: int
    ) -> None:
        """Run ``block``'s reduction with its results in vectors of ``lanes``, once for each ``chunk`` of the copy."""
        self._vectors(sch, copied, lanes)
        outer = 0
        if chunk is not None:
            sch.compute_at(block, chunk)
            outer = 1
        loops = sch.get_loops(block)[outer:]
        reduced = sum(int(v.iter_type == tirx.IterVar.CommReduce) for v in sch.get(block).iter_vars)
        tile, steps = loops[:-reduced], loops[-reduced:]
        sch.reorder(*steps, *tile)
        self._vectors(sch, tile, lanes)
        sch.decompose_reduction(block, steps[0])
        sch.set_scope(block, 0, "local")

    def _vectors(self, sch: s_tir.Schedule, loops: Sequence[Any], lanes: int) -> None:
        *outer, last = loops
        vectors, lane = sch.split(last, [None, lanes])
        for loop in (*outer, vectors):
            sch.unroll(loop)
        sch.vectorize(lane)

    def _call(self, mod: tvm.IRModule, *arrays: np.ndarray) -> Callable[[], object]:
        function = tvm.compile(mod, target=self._target.tvm, tir_pipeline=PIPELINE).jit()["main"]
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        return lambda: function(*tensors)


def _series(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """A geometric series: no compiler finds its sum."""
    return a * b + b


def _repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def _path(rate: float) -> float:
    """Paths are multiples of 16 bytes wide, and deliver a little less."""
    return max(1, math.ceil(0.95 * rate / _PATH)) * _PATH


def _halves(units: float) -> float:
    """Units are whole, or shared by two; what is measured is a little less."""
    return max(0.5, round(2 * units) / 2)


if __name__ == "__main__":
    print(json.dumps([asdict(reading) for reading in readings(resolve(json.loads(sys.argv[1])))]))
