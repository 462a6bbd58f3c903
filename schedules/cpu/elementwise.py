"""Elementwise chains and data movement: broadcasts, transposes, layout changes, concatenation, gather, slices, pads.

Every block of the function is injective. Producers are inlined, so that each output is one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import analyse, remembered
from schedules.cpu.common import (
    InjectiveTile,
    collapse,
    inline_injective,
    is_transposed,
    parallel_work,
    parallelise,
    schedule_injective,
    work,
)
from schedules.intrin import use
from schedules.intrin.transpose import transpose
from schedules.machine import CpuMachine, cpu_machine
from schedules.space import Decisions, Knob, Pick, Space

__all__ = ["ELEMENTWISE"]

#: part of a way of the first cache that is a short row: one of which a tile of 16 lies in two ways
_SHORT = 8


class Elementwise(Space):
    """Knobs: ``vector`` registers a step, ``parallel`` (only where there is enough work to doubt it), and for
    transpositions ``tile`` elements along the reads and ``across`` (1: the vector runs along the reads); where nothing
    but the last two axes change places, ``shuffle`` (1, 2: square tiles are turned in registers, one after the other
    along the rows of the result, or along those of the input)."""

    name = "cpu.elementwise"
    target_kind = "llvm"

    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        info = analyse(func)
        return info.plain and all(b.kind == "injective" for b in info.blocks)

    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        transposed, amount = _look(func)
        machine = cpu_machine(target)
        knobs = [Knob("vector", (1, 2, 4))]
        if transposed:
            knobs += [Knob("tile", (4, 8, 16, 32)), Knob("across", (0, 1))]
        if _turns(func, machine.lanes()):
            knobs.append(Knob("shuffle", (0, 1, 2)))
        if amount >= parallel_work(machine) // 4:
            knobs.append(Knob("parallel", (0, 1)))
        return tuple(knobs)

    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        names = {k.name for k in self.knobs(func, target)}
        machine = cpu_machine(target)
        parallel = int(_look(func)[1] >= parallel_work(machine))
        tiles = ((2, 8, 1), (2, 16, 0), (4, 16, 1)) if "tile" in names else ((2, 0, 0), (4, 0, 0), (1, 0, 0))
        for shuffle in _turn_order(func, machine) if "shuffle" in names else (0,):
            for vector, tile, across in tiles[:1] if shuffle else tiles:
                full = {"vector": vector, "tile": tile, "across": across, "parallel": parallel, "shuffle": shuffle}
                yield {name: value for name, value in full.items() if name in names}

    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        func = sch.mod["main"]
        names = {k.name for k in self.knobs(func, target)}
        info = analyse(func)
        tile = InjectiveTile(
            vector=pick("vector"),
            tile=pick("tile") if "tile" in names else 1,
            across=bool(pick("across")) if "across" in names else False,
            parallel=bool(pick("parallel")) if "parallel" in names else False,
        )
        machine = cpu_machine(target)
        shuffle = pick("shuffle") if "shuffle" in names else 0
        if shuffle:
            cores = machine.cores if tile.parallel else 1
            _turn(sch, sch.get_sblock(info.outputs[0].name), machine.lanes(), cores, along_reads=shuffle == 2)
            return
        stored = inline_injective(sch, info)
        for block in (*stored, *info.outputs):
            schedule_injective(sch, sch.get_sblock(block.name), machine, tile)


@remembered
def _look(func: tirx.PrimFunc) -> tuple[bool, int]:
    """After inlining: whether any output is transposed, and the work of the largest one in element steps."""
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="fast")
    info = analyse(func)
    inline_injective(sch, info)
    nests = [collapse(sch, sch.get_sblock(block.name))[0] for block in info.outputs]
    amount = max(work(b.elements, n.expensive) for b, n in zip(info.outputs, nests, strict=True))
    return any(is_transposed(n) for n in nests), amount


@remembered
def _turns(func: tirx.PrimFunc, lanes: int) -> bool:
    """Whether the function is ``B[.., i, j] = A[.., j, i]`` of 32-bit floats and made of whole square tiles."""
    blocks = analyse(func).blocks
    store = blocks[0].block.body
    if len(blocks) != 1 or not isinstance(store.value, TensorLoad) or str(store.buffer.dtype) != "float32":
        return False
    rows, columns = (list(indices)[-2:] for indices in (store.indices, store.value.indices))
    turned = len(rows) == len(columns) == 2 and rows[0].same_as(columns[1]) and rows[1].same_as(columns[0])
    return turned and all(extent % lanes == 0 for extent in blocks[0].extents[-2:])


def _turn_order(func: tirx.PrimFunc, machine: CpuMachine) -> tuple[int, ...]:
    """The values of ``shuffle``, best first.

    Lines that share a set displace each other from the first cache. Where only one side has them, and rows
    of the other are short, the tiles follow each other along the former; a tile that writes such lines at once is
    better written in smaller pieces.
    """
    rows, columns = (4 * extent for extent in analyse(func).blocks[0].extents[-2:])  # bytes of a row read, and written
    way, short = machine.way_bytes, machine.way_bytes // _SHORT
    if columns % way == 0 and rows <= short:
        return (0, 1, 2)
    return (2, 1, 0) if rows % way == 0 and columns <= short else (1, 2, 0)


def _turn(
    sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, lanes: int, cores: int, along_reads: bool
) -> None:
    """Every line of a square tile is read once and written once, so that it does not matter which lines of the cache
    the others would displace: with rows a power of two apart, that is most of them."""
    *rest, row, column = sch.get_loops(block)
    row_out, row_in = sch.split(row, [None, lanes])
    column_out, column_in = sch.split(column, [None, lanes])
    outer = [column_out, row_out] if along_reads else [row_out, column_out]
    sch.reorder(*rest, *outer, row_in, column_in)
    sch.tensorize(row_in, use(transpose(lanes)))
    parallelise(sch, [*rest, *outer], cores)


ELEMENTWISE = Elementwise()
