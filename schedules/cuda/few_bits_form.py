"""What a function of one product with packed weights computes, as a kernel that is written out needs to know it.

Such a function has a block that unpacks weights, as the annotation ``mlc.op`` says, and one that multiplies by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import BlockInfo, describe, linear_offset, loads, remembered, walk
from schedules.cuda.common import scratch
from schedules.cuda.contraction import K, M, N, contraction_of, inline_producers, normalise, operand
from schedules.cuda.emit import i64
from schedules.cuda.packed import Packing
from schedules.cuda.product import Stored, lies_of, marked, plain
from schedules.errors import InvalidDecision

__all__ = ["MARK", "PRODUCT", "WEIGHTS", "WEIGHTS_MARK", "FewBits", "Packed", "Rows", "check_marked_few_bits",
           "few_bits_of", "packed_of", "weights_of"]

_OP = "mlc.op"
#: the annotations of both blocks, and those by which schedules name the tiles of a product's kernel, and of one that
#: unpacks weights
PRODUCT, WEIGHTS, MARK, WEIGHTS_MARK = "dense_few_bits", "few_bits_weights", "mlc.few_bits", "mlc.few_bits_weights"
_TYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Packed:
    """Weights as a function has them: how they lie, and the parameters that hold words, scales and zero points."""

    packing: Packing
    words: tirx.Buffer
    scale: tirx.Buffer
    zero: tirx.Buffer | None

    @property
    def parameters(self) -> list[tirx.Buffer]:
        return [self.words, self.scale, *([self.zero] if self.zero is not None else [])]


@dataclass(frozen=True)
class Rows:
    """Activations ``[m, k]`` in ``buffer`` from the element ``offset`` on; rows lie so many elements apart, neighbours
    along ``k`` next to each other."""

    buffer: tirx.Buffer
    offset: int
    step: int

    def at(self, row: Any, k: Any) -> TensorLoad:
        """One of them."""
        place = i64(self.offset) + i64(row) * self.step + i64(k)
        shape = [int(extent) for extent in self.buffer.shape]
        indices: list[Any] = []
        for size in reversed(shape[1:]):
            indices.insert(0, place % size)
            place = place // size
        return tirx.BufferLoad(self.buffer, [place, *indices])

    def aligned(self, elements: int, depth: int) -> bool:
        """Whether so many neighbours that begin at a multiple of their number are one access, and either all there or
        none."""
        return not any(n % elements for n in (self.offset, self.step, depth))


@dataclass(frozen=True)
class FewBits(Stored):
    """The product of ``data`` of ``dtype`` with packed ``weights``, added up in float32, and what is stored of it."""

    dtype: str
    data: Rows
    weights: Packed

    @property
    def packing(self) -> Packing:
        return self.weights.packing


@remembered
def few_bits_of(func: tirx.PrimFunc) -> FewBits | None:
    """The product with packed weights that a function holds, alone; else None."""
    packed = packed_of(func)
    contraction = contraction_of(func) if packed is not None and _has(func, PRODUCT) else None
    if packed is None or contraction is None or contraction.types[2] != "float32" or contraction.size("b") != 1:
        return None
    sizes = (packed.packing.columns, packed.packing.depth)
    if contraction.types[0] not in _TYPES or (contraction.size(N), contraction.size(K)) != sizes:
        return None
    sch = scratch(func)
    normal = normalise(sch, contraction)
    data = _rows(sch, normal.main)
    out, sums = sch.get(normal.out), sch.get(normal.main).writes[0].source
    if normal.after or data is None or not any(p.same_as(data.buffer) for p in func.params):
        return None
    axes = tuple(v.var for v in out.iter_vars)
    if len(axes) != 3 or not isinstance(out.body, tirx.BufferStore):
        return None
    lies = lies_of(contraction, out.body, axes)
    return FewBits(contraction, sums, out.body, axes, lies, contraction.types[0], data, packed)


def _rows(sch: s_tir.Schedule, main: Any) -> Rows | None:
    fetch = sch.cache_read(main, operand(sch, main, M), "shared")
    inline_producers(sch, fetch)
    info = describe(sch.get(fetch))
    value = info.block.body.value
    found = linear_offset(value, info.variables, info.extents) if isinstance(value, TensorLoad) else None
    if found is None or len(found[0]) != 2 or (found[0][0] != 1 and info.extents[0] > 1):
        return None
    return Rows(value.source, found[1], found[0][1])


@remembered
def packed_of(func: tirx.PrimFunc) -> Packed | None:
    """The packed weights that a function unpacks, all of which its parameters hold; else None."""
    for block in _blocks(func):
        if str(block.annotations.get(_OP, "")) == WEIGHTS:
            return _packed(func, describe(block))
    return None


def weights_of(func: tirx.PrimFunc) -> Packed | None:
    """The packed weights that a function unpacks, if it does nothing else."""
    blocks = [block for block in _blocks(func) if block.iter_vars]
    found = packed_of(func) if len(blocks) == 1 else None
    store = blocks[0].body if found is not None else None
    alone = isinstance(store, tirx.BufferStore) and store.buffer.same_as(func.params[-1]) and all(
        each.var.same_as(index) for each, index in zip(blocks[0].iter_vars, store.indices, strict=True))
    return found if alone else None


def _packed(func: tirx.PrimFunc, info: BlockInfo) -> Packed | None:
    notes = info.block.annotations
    packing = Packing(int(notes["bits"]), int(notes["block"]), *info.extents)
    held: list[tirx.Buffer] = []
    for load in loads(info.block.body.value):
        if not any(load.source.same_as(each) for each in held):
            held.append(load.source)
    words = next((each for each in held if str(each.dtype) == "uint32"), None)
    scales = [each for each in held if each is not words]
    if words is None or packing.misfit or not all(any(p.same_as(each) for p in func.params) for each in held):
        return None
    shapes = [tuple(int(extent) for extent in each.shape) for each in (words, *scales)]
    if not 1 <= len(scales) <= 2 or shapes != [packing.words_shape, *[packing.scales_shape] * len(scales)]:
        return None
    *zero, scale = scales  # in the order in which they are used
    return Packed(packing, words, scale, zero[0] if zero else None)


def _blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, found.append))
    return found


def _has(func: tirx.PrimFunc, name: str) -> bool:
    return any(str(block.annotations.get(_OP, "")) == name for block in _blocks(func))


def check_marked_few_bits(before: tirx.PrimFunc, after: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` where a schedule of a function marks a product with packed weights, or these
    alone, and does more than move loops.

    The kernel that takes its place is made from what the blocks compute.
    """
    for mark, read in ((MARK, few_bits_of), (WEIGHTS_MARK, weights_of)):
        if marked(after, mark) is None:
            continue
        was, now = plain(before, mark), plain(after, mark)
        same = was is not None and now is not None and tvm_ffi.structural_equal(was, now)
        if not same or read(before) is None:
            raise InvalidDecision("the tiles of packed weights must be marked where their blocks are as they were")
