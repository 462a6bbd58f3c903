"""Products of float32 activations, split into three 8-bit digits, with weights of 4 and 8 bits.

The digits are made first, block by block, each a row's part that meets one scale. A register tile then goes through the
sum block by block, as in :mod:`schedules.cpu.gemm_rounded`, with three sums of integers for each of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.cpu.common import extent_of, parallel_work, parallelise
from schedules.cpu.few_bits import FewBits
from schedules.cpu.gemm_rounded import HALVES, OTHERS, RoundedGemm
from schedules.cpu.gemm_weight_only import AHEAD, STREAM, fold_producers
from schedules.cpu.tiling import vectors_in
from schedules.machine import CpuMachine

__all__ = ["GEMM_DIGITS"]

#: the names of the blocks that make the digits, in order, of which the first reads the activations
_STAGES = ("largest", "step", "inverses", "wholes", "digits", "upper", "lower", "upper_shift", "lower_shift")
_DIGITS = 3
#: Of a dot product's time, that of unpacking the vector of weights that all sums of a tile share, and of a digit
#: that its columns share (measured on AVX-512, 1 to 12 rows; sums of the next block hide what few of them wait)
_UNPACK, _BROADCAST = 0.4, 0.15
#: dot products in the time of putting three sums of a block together and adding them to the result
_ADDED = 4.5


class DigitsGemm(RoundedGemm):
    """Knobs are those of :class:`~schedules.cpu.gemm_weight_only.WeightOnlyGemm`."""

    name = "cpu.gemm_digits"
    op = "dense_digits"
    integers = "digits"
    ahead = AHEAD

    def registers(self, m: int, vectors: int) -> int:
        return ((_DIGITS + 1) * m + HALVES) * vectors + OTHERS

    def tile_cost(self, shape: FewBits, machine: CpuMachine, m: int, vectors: int) -> float:
        results, each = m * vectors, shape.fields // shape.taken
        streams = -(-vectors * machine.lanes() // shape.panel)
        products = _DIGITS * results + _UNPACK * vectors + _BROADCAST * _DIGITS * m
        return (shape.steps * each * products + _ADDED * results) * STREAM ** (streams - 1)

    def activations(
        self, sch: s_tir.Schedule, named: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine
    ) -> Callable[[], None]:
        found = {name: sch.get_sblock(name) for name in _STAGES}
        fold_producers(sch, found["largest"], None)
        fold_producers(sch, found["wholes"], found["inverses"])
        return lambda: _digits(sch, found, shape, machine)

    def parts(self, sch: s_tir.Schedule, parts: SBlockRV, at: LoopRV, k: int, lanes: int) -> LoopRV:
        """All digits meet a word of weights in turn, which is unpacked once."""
        steps = super().parts(sch, parts, at, k, lanes)
        *_, row, digit, _, step, one, _, _, _ = sch.get_loops(parts)
        sch.reorder(steps, step, row, digit, one)
        sch.unroll(row)
        sch.unroll(digit)
        return steps


def _digits(sch: s_tir.Schedule, found: Mapping[str, SBlockRV], shape: FewBits, machine: CpuMachine) -> None:
    """Make the digits of a block after the other, whole vectors at a time."""
    first, *others = (found[name] for name in _STAGES)
    *rows, block, within = sch.get_loops(first)
    for other in others:
        sch.reverse_compute_at(other, block, preserve_unit_loops=True)
    for name in ("inverses", "wholes", "upper", "lower"):
        sch.set_scope(found[name], 0, "local")
    for name in ("wholes", "digits"):
        *_, element = sch.get_loops(found[name])
        _, width = vectors_in(extent_of(sch, element), machine.lanes())
        _, vector = sch.split(element, [None, width])
        sch.vectorize(vector)
    *_, place, _, _ = sch.get_loops(found["digits"])
    sch.unroll(place)
    if shape.rows * shape.depth >= parallel_work(machine):
        parallelise(sch, [*rows, block], machine.cores)
    sch.decompose_reduction(first, within)
    for name in ("upper", "lower"):
        *_, added = sch.get_loops(found[name])
        sch.decompose_reduction(found[name], added)


GEMM_DIGITS = DigitsGemm()
