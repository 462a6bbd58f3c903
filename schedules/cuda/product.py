"""What a function of one matrix product computes, as a kernel that is written out needs to know it.

The function is brought into normal form (:mod:`schedules.cuda.contraction`) and read: where each operand's elements
lie, and what is stored of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import describe, linear_offset, loads, remembered, replaced, uses, walk
from schedules.cuda.common import scratch
from schedules.cuda.contraction import BATCH, Contraction, K, M, N, contraction_of, inline_producers, normalise, operand
from schedules.cuda.emit import i64, substituted
from schedules.cuda.image import Image, image_of
from schedules.errors import InvalidDecision
from schedules.free import SIZES, specialised, variables

__all__ = ["MARK", "Operand", "Product", "Stored", "check_marked_product", "lies_of", "marked",
           "plain", "product_of"]

#: the annotation of the sum of products that names the tiles of its kernel
MARK = "mlc.wgmma"
#: of 16 bits
_TYPES = ("float16", "bfloat16")
#: of a tensor that boxes are copied of, every stride and the first element lie at multiples of so many bytes
_ALIGNED_BYTES = 16

Lies = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Operand:
    """A matrix ``[batch, rows, depth]`` in ``buffer`` from the element ``offset`` on, and the elements between
    neighbours; along ``depth`` or along its rows these are next to each other."""

    buffer: tirx.Buffer
    offset: int
    batch: int
    rows: Any
    depth: int
    batch_step: int
    row_step: int
    depth_step: int

    @property
    def across(self) -> bool:
        """Whether neighbours in memory are rows, not steps along ``depth``."""
        return self.depth_step != 1

    @property
    def first(self) -> TensorLoad:
        """The element at ``offset``."""
        rest = self.offset
        indices: list[Any] = []
        for size in reversed(self.buffer.shape):
            if not isinstance(size, tirx.IntImm):  # that of the rows, which comes first
                indices.insert(0, i64(rest))
                break
            indices.insert(0, i64(rest % int(size)))
            rest //= int(size)
        return tirx.BufferLoad(self.buffer, indices)

    @property
    def aligned(self) -> bool:
        """Whether boxes may begin where rows do."""
        steps = (self.depth_step if self.across else self.row_step, self.offset,
                 self.batch_step if self.batch > 1 else 0)
        return not any(2 * step % _ALIGNED_BYTES for step in steps)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """As :func:`schedules.cuda.hopper.encode` takes them: innermost first, the batch last where there is one."""
        inner = (self.rows, self.depth) if self.across else (self.depth, self.rows)
        return (*inner, self.batch) if self.batch > 1 else inner

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, without the innermost's."""
        outer = self.depth_step if self.across else self.row_step
        return tuple(2 * step for step in ((outer, self.batch_step) if self.batch > 1 else (outer,)))


def lies_of(contraction: Contraction, result: tirx.BufferStore, axes: Sequence[Any]) -> Lies | None:
    """Where a result lies whose variables number the batch, m and n (:attr:`Stored.lies`)."""
    sizes = [contraction.size(role) for role in (BATCH, M, N)]
    found = linear_offset(tirx.BufferLoad(result.buffer, result.indices), list(axes), sizes)
    return None if found is None or found[0][2] != 1 else (tuple(found[0]), found[1])


@dataclass(frozen=True)
class Stored:
    """A ``contraction`` in normal form, and what is stored of each of its ``sums``."""

    contraction: Contraction
    sums: tirx.Buffer
    result: tirx.BufferStore
    axes: tuple[Any, Any, Any]  # the result's variables that number the batch, m and n
    #: the elements between neighbours of the result along the batch, m and n, the last next to each other, and where
    #: the first one lies; None where it does not lie so
    lies: Lies | None

    @property
    def batch(self) -> int:
        return self.contraction.size(BATCH)

    @property
    def m(self) -> Any:
        return self.contraction.size(M)

    @property
    def n(self) -> int:
        return self.contraction.size(N)

    @property
    def k(self) -> int:
        return self.contraction.size(K)

    @property
    def result_bytes(self) -> int:
        """Of an element of the result."""
        return int(tvm.runtime.DataType(str(self.result.buffer.dtype)).bits) // 8

    def made_of(self, at: Sequence[Any], value: Any) -> Any:
        """What becomes of the sum ``value`` at a batch, a row and a column."""
        return substituted(self.result.value, dict(zip(self.axes, at, strict=True)), {self.sums: value})

    def place(self, at: Sequence[Any]) -> tirx.Expr:
        """The element of the result at a batch, a row and a column."""
        places = dict(zip(self.axes, at, strict=True))
        return tirx.BufferLoad(self.result.buffer, [substituted(i, places) for i in self.result.indices])

    def store(self, at: Sequence[Any], value: Any) -> tirx.Stmt:
        """Store what becomes of the sum ``value`` at a batch, a row and a column."""
        return tirx.BufferStore(self.result.buffer, self.made_of(at, value), self.place(at).indices)

    def neighbours(self, most: int) -> int:
        """How many neighbouring columns of the result, at most so many, one aligned store may take."""
        return min(most, self.contraction.vector_result)


@dataclass(frozen=True)
class Product(Stored):
    """``batch`` products of ``a`` ``[m, k]`` and ``b`` ``[n, k]``, both of ``dtype`` and added up in float32, and what
    is stored of each sum. Of a convolution ``m`` are pixels, and ``a`` is the image that windows of it are rows of."""

    dtype: str
    a: Operand | Image
    b: Operand
    #: how many rows there are, an expression, where a call says so
    rows: Any = None

    @property
    def m(self) -> Any:
        return super().m if self.rows is None else self.rows

    @property
    def depth(self) -> int:
        """Of what is copied along ``k``: of an image, zeros that the channels of each place are filled up with too."""
        return self.a.depth

    @property
    def results(self) -> Operand | None:
        """The result as a matrix that boxes of 16-bit numbers can be copied to, each made of its sum and of what all
        rows or all columns share; else None."""
        value = self.result.value
        matrices = [load for load in loads(value) if not load.source.same_as(self.sums)
                    and uses(load, [self.axes[2]]) and uses(load, list(self.axes[:2]))]
        found = self.lies
        if str(self.result.buffer.dtype) not in _TYPES or matrices or found is None:
            return None
        (batch_step, row_step, _), offset = found
        made = Operand(self.result.buffer, offset, self.batch, self.m, self.n, batch_step, row_step, 1)
        return made if made.aligned and row_step >= self.n else None


@remembered
def product_of(func: tirx.PrimFunc) -> Product | None:
    """The product of 16-bit floats that a function holds, alone, with operands that boxes can be copied of; else
    None. Of free sizes it may have one, which its rows are a multiple of."""
    return _product_of_rows(func) if func.attrs and SIZES in func.attrs else _fixed(func)


#: two sizes by which what depends on a size is told from what does not
_SOME = (521, 1031)


def _product_of_rows(func: tirx.PrimFunc) -> Product | None:
    """The product of a function whose one free size says how many rows A and the result have, and nothing else."""
    free = variables(func)
    if len(free) != 1 or any(isinstance(param.ty, tvm.ir.PrimType) for param in func.params):
        return None
    one, other = (_in_terms_of(func, free[0], size) for size in _SOME)
    if one is None or other is None or _fixed_part(one) != _fixed_part(other):
        return None
    multiple, rest = divmod(one.m, _SOME[0])
    names = {**dict(zip(other.axes, one.axes, strict=True)), other.sums: one.sums}
    same = tvm_ffi.structural_equal(one.result, replaced(other.result, names))
    if rest or multiple * _SOME[1] != other.m or not same:
        return None
    rows = (free[0] * multiple).astype("int32")
    return replace(one, a=replace(one.a, rows=rows), rows=rows)


def _in_terms_of(func: tirx.PrimFunc, size: tirx.Var, value: int) -> Product | None:
    """The product of a function for one value of its free size, of the tensors that it has for all; None where it has
    none, or one of images."""
    made = specialised(func, {size: value})
    found = _fixed(made)
    if found is None or not isinstance(found.a, Operand):
        return None
    image = dict(zip(made.params, func.params, strict=True))
    a, b = (replace(each, buffer=image[each.buffer]) for each in (found.a, found.b))
    return replace(found, a=a, b=b, result=replaced(found.result, image))


def _fixed_part(product: Product) -> tuple[Any, ...]:
    """Numbers of a product that do not follow from how many rows it has."""
    a, b = product.a, product.b
    assert isinstance(a, Operand)
    lie = [(each.offset, each.batch, each.depth, each.batch_step, each.row_step, each.depth_step) for each in (a, b)]
    return (*lie, b.rows, product.n, product.k, product.batch, product.lies)


def _fixed(func: tirx.PrimFunc) -> Product | None:
    """The product of a function whose sizes are numbers."""
    contraction = contraction_of(func)
    if contraction is None or contraction.types[2] != "float32" or contraction.types[0] != contraction.types[1]:
        return None
    if contraction.types[0] not in _TYPES:
        return None
    sch = scratch(func)
    normal = normalise(sch, contraction)
    if normal.before or normal.after:
        return None
    out, sums = sch.get(normal.out), sch.get(normal.main).writes[0].source
    b = _operand(sch, normal.main, N, contraction)
    outer = [role for role in contraction.roles if role != K]
    ordered = outer == sorted(outer, key=(BATCH, M, N).index)
    a = (_operand(sch, normal.main, M, contraction) if ordered else None) or image_of(contraction, func)
    if a is None or b is None or not all(any(p.same_as(each.buffer) for p in func.params) for each in (a, b)):
        return None
    if isinstance(a, Image) and a.depth != b.depth and b.across:  # the channels of a place are a dimension
        return None
    axes = tuple(v.var for v in out.iter_vars)
    if len(axes) != 3 or not isinstance(out.body, tirx.BufferStore):
        return None
    return Product(contraction, sums, out.body, axes, lies_of(contraction, out.body, axes), contraction.types[0], a, b)


def _operand(sch: s_tir.Schedule, main: Any, role: str, contraction: Contraction) -> Operand | None:
    fetch = sch.cache_read(main, operand(sch, main, role), "shared")
    inline_producers(sch, fetch)
    info = describe(sch.get(fetch))
    value = info.block.body.value
    found = linear_offset(value, info.variables, info.extents) if isinstance(value, TensorLoad) else None
    if found is None or len(loads(value)) != 1:
        return None
    batch_step, depth_step, row_step = found[0] if len(found[0]) == 3 else (0, *found[0])
    batch = contraction.size(BATCH) if len(found[0]) == 3 else 1
    made = Operand(value.source, found[1], batch, contraction.size(role), contraction.size(K), batch_step, row_step,
                   depth_step)
    inner, outer = (made.rows, made.depth_step) if made.across else (made.depth, made.row_step)
    runs = 1 in (row_step, depth_step) and outer >= inner and (batch == 1 or batch_step > 0)
    return made if runs and made.aligned else None


def marked(func: tirx.PrimFunc, mark: str = MARK) -> tuple[int, ...] | None:
    """The tiles that a scheduled function's product is marked with; None without a mark."""
    found: list[tuple[int, ...]] = []
    walk(func.body, (s_tir.SBlock, lambda b: found.append(
        tuple(int(v) for v in b.annotations[mark])) if mark in b.annotations else None))
    return found[0] if found else None


def plain(func: tirx.PrimFunc, mark: str = MARK) -> tirx.PrimFunc | None:
    """The function of the same blocks without a schedule, each in a loop for each of its iterators; None where blocks
    stand in blocks."""
    found: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, found.append))
    blocks, root = [b for b in found if b.iter_vars], func.body
    if not isinstance(root, s_tir.SBlockRealize) or len(blocks) + 1 != len(found):
        return None
    nests = [_nest(block, mark) for block in _in_order(blocks)]
    held = s_tir.SBlock([], [], [], "root", nests[0] if len(nests) == 1 else tirx.SeqStmt(nests),
                        alloc_buffers=list(root.block.alloc_buffers))
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), held))


def _in_order(blocks: Sequence[s_tir.SBlock]) -> list[s_tir.SBlock]:
    """What is read stands behind what writes it, else in the order of names."""
    waiting, done = list(blocks), []
    while waiting:
        written = [region.source for block in waiting for region in block.writes]
        ready = [b for b in waiting if not any(
            region.source.same_as(buffer) for region in b.reads for buffer in written
            if not any(own.source.same_as(buffer) for own in b.writes))]
        done.append(min(ready or waiting, key=lambda b: str(b.name_hint)))
        waiting = [b for b in waiting if not b.same_as(done[-1])]
    return done


def _nest(block: s_tir.SBlock, mark: str) -> tirx.Stmt:
    variables = [tirx.Var(f"i{n}", v.var.ty.dtype) for n, v in enumerate(block.iter_vars)]
    kept = {key: value for key, value in block.annotations.items() if key != mark}
    bare = s_tir.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init,
                        block.alloc_buffers, block.match_buffers, kept)
    nest: Any = s_tir.SBlockRealize(variables, tirx.const(True, "bool"), bare)
    for variable, iterator in reversed(list(zip(variables, block.iter_vars, strict=True))):
        nest = tirx.For(variable, iterator.dom.min, iterator.dom.extent, tirx.ForKind.SERIAL, nest)
    return nest


def check_marked_product(before: tirx.PrimFunc, after: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` where a schedule of a function marks a product and does more than move loops.

    The kernel that takes its place is made from what the blocks compute.
    """
    if marked(after) is None:
        return
    was, now = plain(before), plain(after)
    same = was is not None and now is not None and tvm_ffi.structural_equal(was, now)
    if not same or product_of(before) is None:
        raise InvalidDecision("the tiles of a product must be marked where its blocks are as they were")
