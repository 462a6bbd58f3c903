"""The block of a direct convolution: its annotation, and the extents that its schedules depend on."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from schedules.analysis import BlockInfo, analyse, remembered
from schedules.cpu.steps import FLOAT, SATURATING, TAPPED, Step, step_of
from schedules.intrin.dot import WORDS

__all__ = ["BFLOAT", "BYTES", "FLOATS", "INTEGER", "INTEGER_PHASES", "PHASES", "TAPS", "Shape", "block_of", "shape_of"]

PHASES, INTEGER_PHASES = "conv2d_phases", "conv2d_phases_integer"
INTEGER, BYTES, BFLOAT = "conv2d_nchwc_integer", "conv2d_nchwc_bytes", "conv2d_nchwc_bfloat"
TAPS = "depthwise_nchwc_taps"
FLOATS = ("conv2d_nchwc", PHASES)
ALL = (*FLOATS, INTEGER, INTEGER_PHASES, BYTES, BFLOAT, TAPS)


@dataclass(frozen=True)
class Shape:
    """The extents of the convolution block's axes and whether its input is padded by a block of its own. ``ic`` are
    the steps of a block of input channels. Where the output is one ``line``, its pixels count as rows of one column."""

    n: int
    oc_blocks: int
    oh: int
    ow: int
    oc: int
    ic_blocks: int
    kh: int
    kw: int
    ic: int
    padded: bool
    stride: int
    per_group: int  # output blocks that read the same input channels
    weight: int  # number of the parameter that holds the weights, -1 if none does
    phases: tuple[int, int] = (1, 1)  # rows and columns that a transposed convolution interleaves
    step: Step = FLOAT
    line: bool = False
    least: int = 0  # pixels of the shortest row where rows are of free length, and each begins with a tile of its own
    phased: bool = False  # whether the block has axes of phases, be it of one

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.oc_blocks // self.per_group

    @property
    def flat(self) -> bool:
        """Whether the pixels that a row of tiles reads go on where the next row's begin, so that a tile may hold the
        end of one and the begin of the other."""
        made = self.padded and self.step.form != WORDS  # a block that widens leaves pixels where they are
        pointwise = self.kh == self.kw == self.stride == 1 and not made
        return self.line or (pointwise and not self.phased)

    @property
    def apart(self) -> bool:
        """Whether no two output blocks read the same channels, so that each chunk may pad what it reads."""
        return self.step is TAPPED

    @property
    def row(self) -> int:
        """Pixels of a row of the output as the block counts them."""
        return self.oh if self.line else self.ow

    def run(self, rows: int) -> int:
        """Pixels of the output that tiles of one row run along in a chunk of ``rows``."""
        if self.least:
            return self.row
        return rows * self.ow if self.flat else self.ow


@remembered
def shape_of(func: tirx.PrimFunc) -> Shape | None:
    """The shape of a function's direct convolution; None if it has none."""
    block = block_of(func)
    extra = 2 if block is not None and block.annotation in (PHASES, INTEGER_PHASES) else 0
    if block is None or len(block.extents) < 9 + extra:
        return None
    n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic = (block.extents[0], *block.extents[1 + extra :][:8])
    phases = (block.extents[1], block.extents[2]) if extra else (1, 1)
    output, column, lane = (position + extra for position in (1, 3, 4))
    tapped = block.annotation == TAPS  # where lanes share no pixels
    data = next(a for a in block.reads if (str(a.buffer.dtype) == "uint8" if tapped else not a.depends(lane)))
    stride = data.strides[column] or data.buffer.shape[-1]
    # the blocks of a group read the same channels: the index stays until the next group
    stays = data.strides[output] == 0
    per_group = 1 if tapped else oc_blocks if stays else data.periods[output] or 1
    padded = any(b.name != block.name for b in analyse(func).producers(block))
    weights = next(a.buffer for a in block.reads if a.depends(lane) and a is not data)
    weight = next((i for i, param in enumerate(func.params) if param.same_as(weights)), -1)
    line = oh == 1 < ow and not extra
    if line:
        oh, ow, kh, kw = ow, oh, kw, kh
    return Shape(
        n, oc_blocks, oh, ow, oc, ic_blocks, kh, kw, ic, padded, int(stride) // int(data.buffer.shape[-1]), per_group,
        weight, phases, {BYTES: SATURATING, TAPS: TAPPED}.get(block.annotation) or step_of(weights), line,
        phased=bool(extra),
    )


def block_of(func: tirx.PrimFunc) -> BlockInfo | None:
    """The block that is annotated as a direct convolution, None where there is none."""
    return next((b for b in analyse(func).blocks if b.annotation in ALL), None)
