"""The inner step of a register tile: one float32 multiply-add, or a dot product of four 8-bit integers, two 16-bit
integers or two bfloat16.

Any step reads four bytes of the activations and four bytes of weights for every lane, so that a sum of ``K`` products
is to its tile what one of ``K / 4`` or ``K / 2`` float32 is: the same bytes, vectors and loops. What differs is written
down here, in units of one float32 multiply-add of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from schedules.analysis import BlockInfo
from schedules.intrin import select, use
from schedules.intrin.dot import BFLOATS, BYTES, QUADS, TAPS, WORDS, dot
from schedules.intrin.matrix import BFLOAT_PAIRS, BYTE_PAIRS, DEPTHS, ROWS
from schedules.machine import CpuMachine
from schedules.space import InvalidDecision

__all__ = ["FLOAT", "SATURATING", "TAPPED", "Step", "has_dot", "step_of", "with_dots"]


@dataclass(frozen=True)
class Step:
    """``form`` is that of a dot product, empty for a multiply-add, and ``axes`` how many of the sum's innermost axes
    lie within a step.

    ``multiply`` is the time of the vector units for each accumulator. ``held`` are the registers for what a step makes
    of its operands, ``busy`` the accumulators that hide the latency (0: those of a multiply-add). ``bytes`` are those
    that it takes of a row, and of a column. Of several ``rows`` an accumulator holds as many columns the fewer, and
    ``joined`` is the time of putting their operands together for each row.
    """

    form: str = ""
    axes: int = 0
    multiply: float = 1.0
    held: int = 0
    busy: int = 0
    bytes: int = 4
    rows: int = 1
    joined: float = 0.0

    def accumulators(self, machine: CpuMachine) -> float:
        """Vectors of independent sums that keep the units busy."""
        return self.busy or machine.busy_accumulators

    def fits(self, machine: CpuMachine, accumulators: int, vectors: int) -> bool:
        """Whether a tile of ``vectors`` of columns that would stay in registers with multiply-adds still does.

        Weights that several rows read must be held too. Measured on AVX2 with words: 4 x 2, 3 x 2 and 2 x 4 run at 0.85
        of the peak, 5 x 2, which spills two vectors, at 0.78, 6 x 2 at 0.66. With 32 registers LLVM hoists five loads
        of later steps.
        """
        if self.rows > 1:  # operands of all rows for two steps, and a vector of columns at a time (counted)
            return accumulators + accumulators // vectors + 2 <= machine.vector_registers
        free = machine.vector_registers - (5 if machine.vector_registers >= 32 else 0)
        return not self.held or accumulators + vectors + self.held <= free


FLOAT = Step()
#: a dot product of bytes is issued like a multiply-add
_QUADS, _BFLOATS = Step(QUADS, axes=1), Step(BFLOATS, axes=1)
#: beside a shuffle of what a step reads, on another unit
TAPPED = Step(TAPS, axes=1)
#: A multiplication, which two units take, and an addition of one cycle, which all take: of four units those begin in
#: 0.61 cycles (measured on Zen 3 in any order, since additions are given to the multipliers too), of three in 0.67
_WORDS = Step(WORDS, axes=1, multiply=1.25, held=5, busy=4)
#: two multiplications and an addition of four products, whose rate the two units of the former bound: 1.04 cycles each
SATURATING = Step(BYTES, axes=1, multiply=2.1, held=5, busy=4)
#: A product of 2 x 2 elements, of twice the products of a dot product in the same time. A load of half a register takes
#: a vector unit beside the one that loads
_PAIRS = {form: Step(form, axes=1, bytes=8, rows=ROWS, joined=0.5) for form in (BYTE_PAIRS, BFLOAT_PAIRS)}


def step_of(weight: tirx.Buffer) -> Step:
    """The step of a block that reads weights of this type, so many of each column at once."""
    pairs = next((form for form, (kind, depth) in DEPTHS.items()
                  if (kind, depth) == (str(weight.dtype), int(weight.shape[-1]))), "")
    if pairs:
        return _PAIRS[pairs]
    return {"int8": _QUADS, "int16": _WORDS, "bfloat16": _BFLOATS}.get(str(weight.dtype), FLOAT)


def has_dot(block: BlockInfo, step: Step, width: int, target: tvm.target.Target) -> bool:
    """Whether ``target`` has the instruction for a step of ``width`` lanes of a block of integers."""
    return block.reduces[-step.axes :] == (True,) * step.axes and select(dot(step.form, width), target) is not None


def with_dots(
    sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, start: s_tir.schedule.LoopRV, step: Step,
    target: tvm.target.Target,
) -> None:
    """Set the sums of ``block`` to zero before the loop ``start``, and make its innermost loops, over one vector of
    lanes and the products of a step, dot products.

    The block becomes one of whole vectors first: the condition of a ragged tile then stands outside of what must look
    like the intrinsic.
    """
    if not step.form:
        sch.decompose_reduction(block, start)
        return
    vector = sch.get_loops(block)[-1 - step.axes]
    lanes = int(sch.get(vector).extent)
    whole = sch.blockize(vector)
    initial = sch.decompose_reduction(whole, start)
    for outer in (initial, whole):
        (inner,) = sch.get_child_blocks(outer)
        loops = sch.get_loops(inner)
        if outer is initial:
            sch.vectorize(loops[-1])
        else:
            name = select(dot(step.form, lanes), target)
            if name is None:
                raise InvalidDecision(f"the target must have {dot(step.form, lanes)}, a dot product of {lanes} lanes")
            sch.tensorize(loops[0], use(name))
