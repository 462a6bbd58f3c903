"""Products of float32 with weights of few bits, made float32 on the way to the multiply-add.

With few rows the weights' bytes are all that counts: each vector of them is unpacked where it is used, and read once.
With many rows a chunk's columns are unpacked into panels that stay in the second cache, and the product is that of
float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.analysis import analyse
from schedules.cpu.gemm import Gemm, Tile
from schedules.cpu.gemm_seeds import columns, gemm_seeds, rows
from schedules.cpu.gemm_shape import GemmShape, gemm_shape
from schedules.cpu.tiling import divisors, vectors_in
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, InvalidDecision, Knob

__all__ = ["GEMM_WEIGHT_ONLY"]

#: the annotation of the product, and the name of the block that makes its weight
_PRODUCT, _UNPACKED = "dense_weight_only", "unpacked"
#: rows of the product up to which unpacking in registers, once for each tile of rows, costs less than panels
_FEW_ROWS = 16
#: rows that are unpacked by one loop body: all of a word of 4 bits, so that it is loaded once and shifts are constants
_WORD_ROWS = 8
#: the time of unpacking a vector, in multiply-adds
_UNPACK = 4
#: registers for what is on its way from a word to a multiply-add
_TEMPORARY = 2


class WeightOnlyGemm(Gemm):
    """The knobs of :class:`Gemm`, and ``staged``: whether a chunk unpacks its columns before it multiplies."""

    name = "cpu.gemm_weight_only"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        return self.shape(func) is not None

    def shape(self, func: tirx.PrimFunc) -> GemmShape | None:
        if not any(block.annotation == _PRODUCT for block in analyse(func).blocks):
            return None
        return gemm_shape(func)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        return (*super().knobs(func, target), Knob("staged", (0, 1)))

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        shape, machine = self.shape(func), cpu_machine(target)
        assert shape is not None
        names = {knob.name for knob in self.knobs(func, target)}
        whole = {name: 1 for name in ("parts", "chains", "kb") if name in names}
        inline = ({**seed, **whole, "staged": 0} for seed in _streaming(shape, machine))
        panels = ({**seed, "staged": 1} for seed in gemm_seeds(shape, machine) if _stageable(shape, seed))
        first, second = (inline, panels) if shape.m <= _FEW_ROWS else (panels, inline)
        yield from first
        yield from second

    def stage(self, sch: s_tir.Schedule, block: SBlockRV, tile: Tile) -> SBlockRV | None:
        if tile.staged and tile.parts > 1:
            raise InvalidDecision("a sum in parts must unpack its weight in registers")
        staged = None
        for producer in sch.get_producers(block):
            if tile.staged and str(sch.get(producer).name_hint) == _UNPACKED:
                staged = producer
            else:
                sch.compute_inline(producer)
        return staged

    def place(self, sch: s_tir.Schedule, stage: SBlockRV, chunk: LoopRV, machine: CpuMachine) -> None:
        """Unpack what a chunk, or a part of its sum, reads of the weight."""
        sch.compute_at(stage, chunk, preserve_unit_loops=True)
        *_, row, column = sch.get_loops(stage)
        extent = int(sch.get(row).extent)
        each = max(divisors(extent, _WORD_ROWS))
        count, width = vectors_in(int(sch.get(column).extent), machine.lanes())
        _, inner = sch.split(row, [None, each])
        vectors, vector = sch.split(column, [count, width])
        sch.reorder(vectors, inner, vector)
        sch.unroll(inner)
        sch.vectorize(vector)


def _streaming(shape: GemmShape, machine: CpuMachine) -> Iterator[Decisions]:
    """Register tiles by the arithmetic of a step of the sum: multiply-adds, unpacked vectors and broadcast values."""
    lanes, options = machine.lanes(), []
    for m in rows(shape):
        for n in columns(shape, machine):
            vectors = n // lanes
            if n % lanes or (m + 2) * vectors + _TEMPORARY > machine.vector_registers:  # sums, words and scales
                continue
            waiting = max(1.0, machine.busy_accumulators / (m * vectors + _UNPACK * vectors))
            step = (m + _UNPACK) * vectors * waiting + m
            options.append((step * -(-shape.m // m) * -(-shape.n // n), m, n))
    options.sort()
    k = max(divisors(shape.k, _WORD_ROWS))
    for _, m, n in options[:4]:
        mb = max(divisors(-(-shape.m // m), 64))
        for nb in _chunks_of(-(-shape.n // n), machine.cores):
            yield {"m": m, "n": n, "mb": mb, "nb": nb, "k": k, "order": 1, "inner": 1, "prefetch": 0, "pack": 0}


def _chunks_of(tiles: int, cores: int) -> list[int]:
    """Tiles of columns in a chunk: about four chunks for a core, then one, as far as they can be cut so."""
    found = []
    for wanted in (4 * cores, cores, tiles):
        nb = max((d for d in divisors(tiles, 64) if tiles // d >= min(wanted, tiles)), default=1)
        if nb not in found:
            found.append(nb)
    return found


def _stageable(shape: GemmShape, seed: Decisions) -> bool:
    """Whether a chunk's columns are whole panels of the weight, and its sums whole."""
    return int(seed["nb"]) * int(seed["n"]) % shape.packed == 0 and int(seed.get("parts", 1)) == 1


GEMM_WEIGHT_ONLY = WeightOnlyGemm()
