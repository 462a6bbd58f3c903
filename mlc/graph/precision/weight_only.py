"""Weight-only quantisation: products with weights of 2, 4 or 8 bits and a scale per block, whose integers stay in
memory.

``matmul(x, dequantise(W))``   -->   ``dense_weight_only(x, words of W, scales, zero points)``

``dequantise`` is what importers make of constant integers with a scale for each column, or for each column and block
of rows: a ``dequantize``, or its arithmetic on blocks or on every number, transposed and cut where the model does so.
Each weight is ``(integer - zero) * scale``, rounded to float32 once, as the model says; only the order of the sum is
the kernel's.

Where the model allows activations of 8 bits (:mod:`mlc.frontend.accuracy`), the options integers and the target has
dot products for them, the activations are rounded too:

``matmul(x, dequantise(W))``   -->   ``dense_rounded(x, bytes of W, scales, zero points)``

Codes of a table of 16 numbers, with scales in the same way, stay what is read too, where that takes less time than the
numbers (:func:`mlc.graph.kernels.lookup.has_lookup`):

``matmul(x, take(table, W) * scale)``   -->   ``dense_lookup(x, words of W, scales, table)``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax import op

from mlc.frontend.accuracy import INT8, level_of
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.movement import cuts, permutation
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name, rebuilt, shape_of
from mlc.graph.kernels.digits import dense_digits, has_digits
from mlc.graph.kernels.lookup import CODES, dense_lookup, has_lookup, pack_codes
from mlc.graph.kernels.rounded import dense_rounded, half_range, has_rounded, pack_bytes
from mlc.graph.kernels.weight_only import PANEL, dense_weight_only, moved_by, pack_columns, pack_words, rows_of_word
from mlc.graph.precision.affine import affine_of
from mlc.graph.precision.weight_only_gpu import activations, multiplied, multiplied_as, packing_of, uncast
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target
from schedules.cuda.packed import Packing

__all__ = ["WeightOnlyProducts"]

#: rows of a block at least: smaller ones have more bytes of scales than of integers
_SMALLEST_BLOCK = 16
_BITS = (2, 4, 8)


@dataclass(frozen=True, eq=False)
class _Weight:
    """``(integers - zero) * scale``: integers ``[R, C]``, of which each ``block`` (rows, columns) has a scale and a
    zero point, arrays of one element a block. With a ``table`` the integers are codes, and it is
    ``table[integers] * scale``. Rows and columns are those of the matrix in another ``order`` where there is one:
    row ``i`` is the matrix' ``order[0][i]``."""

    integers: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    block: tuple[int, int]
    table: np.ndarray | None = None
    order: tuple[np.ndarray | None, np.ndarray | None] = (None, None)

    @property
    def transposed(self) -> _Weight:
        return _Weight(self.integers.T, self.scale.T, self.zero.T, self.block[::-1], self.table, self.order[::-1])


@dataclass(frozen=True)
class _Kernel:
    """A product's tensor expression, how it packs weights, how far it moves integers of so many bits, and the fewest
    bits that it reads."""

    product: Callable[..., te.Tensor]
    pack: Callable[[np.ndarray, int, int], np.ndarray]
    moved: Callable[[int], int]
    least: int


_EXACT = _Kernel(dense_weight_only, pack_words, moved_by, 2)
_DIGITS = _Kernel(dense_digits, pack_bytes, half_range, 4)
_ROUNDED = _Kernel(dense_rounded, pack_bytes, half_range, 4)

_Bound = Mapping[relax.Var, relax.Expr]


def WeightOnlyProducts(
    target: Target, options: CompileOptions = DEFAULT_OPTIONS, *, converted: bool = False
) -> tvm.transform.Pass:
    """Module pass: products of float32 with constants of 2, 4 or 8 bits read the integers.

    ``converted``: on a GPU, only those of activations that the model converts from 16 bits."""

    @tvm.transform.module_pass(opt_level=0, name="WeightOnlyProducts")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _changed(mod, target, options) if target.kind == "llvm" else _changed_for_gpu(
            mod, options, converted)

    return run


def _changed_for_gpu(mod: tvm.IRModule, options: CompileOptions, converted: bool) -> tvm.IRModule:
    bound = {binding.var: binding.value for binding in bindings(mod["main"])}
    packed: dict[relax.Var, tuple[relax.Expr, relax.Call | None, _Weight, Packing, str]] = {}
    for var, value in bound.items():
        if not isinstance(value, relax.Call) or op_name(value) != "relax.matmul":
            continue
        data, taken = activations(value.args[0], bound)
        if converted and dtype_of(data) == dtype_of(value.args[0]):
            continue
        weight = _of_product(value, bound, uncast(value.args[1], bound))
        if weight is None or weight.table is not None:
            continue
        packing = packing_of(weight.integers, _bits(weight), weight.block[0])
        dtype = multiplied_as(data, weight, _bits(weight), options)
        if packing is not None and dtype is not None:
            packed[var] = data, taken, weight, packing, dtype
    if not packed:
        return mod

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in packed:
            return value
        data, taken, weight, packing, dtype = packed[var]
        data = image.get(data, data)
        if taken is not None:
            data = builder.emit(op.take(data, image.get(taken.args[1], taken.args[1]), axis=taken.attrs.axis))
        return multiplied(builder, data, shape_of(var), weight, packing, dtype)

    image: dict[Any, relax.Expr] = {param: param for param in mod["main"].params}
    return relax.transform.DeadCodeElimination()(rebuilt(mod, bound, change, image=image))


def _changed(mod: tvm.IRModule, target: Target, options: CompileOptions) -> tvm.IRModule:
    bound = {binding.var: binding.value for binding in bindings(mod["main"])}
    found = {var: weight for var, value in bound.items() if (weight := _of_product(value, bound)) is not None}
    coded = {var: weight.integers.size for var, weight in found.items() if weight.table is not None}
    for var, numbers in coded.items():
        if not has_lookup(target, prod(shape_of(var)[:-1]), numbers, sum(coded.values())):
            del found[var]
    if not found:
        return mod

    def kernel(var: relax.Var) -> _Kernel:
        weight, rows = found[var], prod(shape_of(var)[:-1])
        if not options.integers:
            return _EXACT
        bits = _bits(weight)
        if level_of(var.name, mod["main"].attrs) >= INT8 and has_rounded(target, max(bits, _ROUNDED.least)):
            return _ROUNDED
        if rows == 1 and bits < _DIGITS.least:  # the bytes are all that counts
            return _EXACT
        block = min(weight.block[0], weight.integers.shape[0])
        return _DIGITS if has_digits(target, max(bits, _DIGITS.least), rows, block) else _EXACT

    def change(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if var not in found:
            return value
        weight = found[var]
        taken = None if weight.table is not None else kernel(var)
        return _product(builder, value.args[0], shape_of(var), weight, taken)

    return relax.transform.DeadCodeElimination()(rebuilt(mod, bound, change))


def _product(
    builder: relax.BlockBuilder, data: relax.Expr, shape: tuple[int, ...], weight: _Weight, kernel: _Kernel | None
) -> relax.Expr:
    """The product, of that shape, as a kernel's, or by lookups without one; batches are more rows of it, so that the
    weight is read once."""
    depth, columns = weight.integers.shape
    rows = (prod(shape[:-1]),) if prod(shape[:-2]) != 1 else shape[:-1]
    if rows != shape[:-1]:
        data = builder.emit(op.reshape(data, (*rows, depth)))
    if weight.order[0] is not None:
        data = builder.emit(op.take(data, constant(weight.order[0]), axis=len(rows)))
    scale, block = constant(pack_columns(weight.scale)), weight.block[0]
    if kernel is None:
        assert weight.table is not None, "integers have a kernel"
        result = builder.emit(builder.call_te(
            dense_lookup, data, constant(pack_codes(weight.integers, block)), scale, constant(weight.table), block,
            primfunc_name_hint="dense_lookup",
        ))
    else:
        bits = max(_bits(weight), kernel.least)
        moved = weight.zero.astype(np.float32) + kernel.moved(bits)
        zero = constant(pack_columns(moved)) if weight.zero.any() else None
        result = builder.emit(builder.call_te(
            kernel.product, data, constant(kernel.pack(weight.integers, bits, block)), scale, zero, bits, block,
            primfunc_name_hint="dense_weight_only",
        ))
    if columns % PANEL:
        result = builder.emit(op.strided_slice(result, [len(rows)], [0], [columns]))
    return op.reshape(result, shape) if rows != shape[:-1] else result


def _bits(weight: _Weight) -> int:
    """How many bits the integers need, of those that there are kernels for: blocks are of whole words. 0 where there
    are none."""
    depth, rows = weight.integers.shape[0], weight.block[0]
    return next((bits for bits in _BITS if _fits(weight.integers, bits)
                 and (rows >= depth or rows % rows_of_word(bits) == 0)), 0)


def _fits(integers: np.ndarray, bits: int) -> bool:
    return bool(-(1 << (bits - 1)) <= integers.min() and integers.max() < 1 << (bits - 1))


def _of_product(value: relax.Expr, bound: _Bound, made: relax.Expr | None = None) -> _Weight | None:
    """The weight ``[K, N]`` that a product of float32 multiplies by, with a scale for each column in blocks of rows.
    ``made`` is what the weight is converted from where that does not matter."""
    if not isinstance(value, relax.Call) or op_name(value) != "relax.matmul" or dtype_of(value) != "float32":
        return None
    data, weight = value.args
    if not len(shape_of(data)) >= 2 or len(shape_of(weight)) != 2 or not all(shape_of(weight)):
        return None
    found = _weight(weight if made is None else made, bound)
    if found is None or found.block[1] != 1 or found.order[1] is not None:
        return None
    if found.block[0] < min(_SMALLEST_BLOCK, found.integers.shape[0]):
        return None
    if found.table is not None:
        rows, depth = found.block[0], len(found.integers)
        return found if rows >= depth or rows % rows_of_word(4) == 0 else None
    centred = _centred(found)
    return centred if _bits(centred) else None


def _centred(weight: _Weight) -> _Weight:
    """With signed integers: unsigned ones of the fewest bits move by half of their range, with their zero points. What
    had its zero points taken off may need more bits than are left of it where each block moves by itself."""
    integers = weight.integers.astype(np.int32)
    if weight.integers.dtype.kind == "u":
        half = next(half for bits in _BITS if _fits(integers - (half := 1 << (bits - 1)), bits))
        return replace(weight, integers=integers - half, zero=weight.zero - half)
    begins = np.arange(0, len(integers), weight.block[0])
    least, most = (reduce.reduceat(integers, begins, axis=0) for reduce in (np.minimum, np.maximum))
    bits = next((bits for bits in _BITS if (most - least).max() < 1 << bits), 8)
    if _fits(integers, bits) or weight.zero.any():
        return replace(weight, integers=integers)
    shift = least + (1 << (bits - 1))
    moved = integers - np.repeat(shift, weight.block[0], axis=0)[: len(integers)]
    return replace(weight, integers=moved, zero=weight.zero - shift)


def _weight(expr: relax.Expr, bound: _Bound) -> _Weight | None:
    """The integers that a matrix of constants is dequantised from."""
    if (call := _call(expr, bound, "dequantize")) is not None:
        return _dequantised(call, bound)
    if (call := _call(expr, bound, "reshape")) is not None:
        return _weight(call.args[0], bound) if shape_of(call.args[0]) == shape_of(call) else _in_blocks(call, bound)
    if (call := _call(expr, bound, "permute_dims")) is not None:
        inner = _weight(call.args[0], bound)
        return inner.transposed if inner is not None and permutation(call) == [1, 0] else inner
    if (call := _call(expr, bound, "strided_slice")) is not None:
        return _cut(call, _weight(call.args[0], bound))
    return _scaled(expr, bound)


def _product_of(expr: relax.Expr, bound: _Bound) -> tuple[relax.Expr, np.ndarray] | None:
    """The sides of a product with a constant of float32."""
    if (call := _call(expr, bound, "multiply")) is None:
        return None
    for side, other in (call.args, reversed(call.args)):
        scale = array_of(other)
        if scale is not None and scale.dtype == np.float32:
            return side, scale
    return None


def _scaled(expr: relax.Expr, bound: _Bound) -> _Weight | None:
    """``float(integers) * scale`` with a scale for each number, which those of a block have in common."""
    found = _product_of(expr, bound)
    cast = _call(found[0], bound, "astype") if found is not None else None
    integers = _integers(cast.args[0], bound) if cast is not None else None
    if found is None or integers is None or integers.ndim != 2 or not integers.size:
        return None
    if np.broadcast_shapes(found[1].shape, integers.shape) != integers.shape:  # few integers, which scales spread
        return None
    scale = np.broadcast_to(found[1], integers.shape)
    rows, columns = (_repeated(each) for each in (scale, scale.T))
    order: list[np.ndarray | None] = [None, None]
    if max(rows, columns) < min(_SMALLEST_BLOCK, *integers.shape):
        (first, rows), (second, columns) = (_sorted(each) for each in (scale, scale.T))
        axis, places = (0, first) if rows >= columns else (1, second)
        integers, scale, order[axis] = integers.take(places, axis), scale.take(places, axis), places
    block = (rows, 1) if rows >= columns else (1, columns)
    each = np.ascontiguousarray(scale[:: block[0], :: block[1]])
    return _Weight(integers, each, np.zeros(each.shape, np.float32), block, order=(order[0], order[1]))


def _repeated(array: np.ndarray) -> int:
    """The length of the parts that the rows come in, all alike in each."""
    changes = 1 + np.flatnonzero((array[1:] != array[:-1]).any(axis=1))
    return int(np.gcd.reduce([len(array), *changes]))


def _sorted(array: np.ndarray) -> tuple[np.ndarray, int]:
    """An order that brings equal rows together, as that of activations has them apart, and the length of the parts."""
    _, owner = np.unique(array, axis=0, return_inverse=True)
    order = np.argsort(owner, kind="stable").astype(np.int32)
    return order, _repeated(owner[order][:, None])


def _call(expr: relax.Expr, bound: _Bound, name: str) -> relax.Call | None:
    """The call of the operator ``name`` that the variable is bound to, if it is."""
    value = bound.get(expr) if isinstance(expr, relax.Var) else None
    return value if isinstance(value, relax.Call) and op_name(value) == f"relax.{name}" else None


def _cut(call: relax.Call, weight: _Weight | None) -> _Weight | None:
    """The part that a slice from the first row and column on keeps."""
    kept = cuts(call)
    if weight is None or kept is None or any(cut.begin or cut.step > 1 for cut in kept):
        return None
    if any(each is not None for each in weight.order):
        return None
    rows, columns = (cut.end for cut in kept)
    blocks = slice(-(-rows // weight.block[0])), slice(-(-columns // weight.block[1]))
    return replace(weight, integers=weight.integers[:rows, :columns], scale=weight.scale[blocks],
                   zero=weight.zero[blocks])


def _dequantised(call: relax.Call, bound: _Bound) -> _Weight | None:
    """One scale for each index of an axis, or for all: the other axis is one block."""
    integers, affine = _integers(call.args[0], bound), affine_of(call)
    if integers is None or affine is None or integers.ndim != 2:
        return None
    each = [extent if not affine.single and axis == affine.axis else 1 for axis, extent in enumerate(integers.shape)]
    scale, zero = (np.broadcast_to(a.reshape(-1), max(a.size, prod(each))).reshape(each)
                   for a in (affine.scale, affine.zero))
    if affine.single:  # a scale for each column is what kernels read
        columns = (1, integers.shape[1])
        return _Weight(integers, np.broadcast_to(scale, columns), np.broadcast_to(zero, columns), (len(integers), 1))
    return _Weight(integers, scale, zero, (1, integers.shape[1]) if affine.axis == 0 else (integers.shape[0], 1))


def _in_blocks(call: relax.Call, bound: _Bound) -> _Weight | None:
    """``reshape((float(reshape(integers)) - zero) * scale)`` as importers write blocks: the integers have an axis for
    the blocks and one behind it for what is in them."""
    shape, found = shape_of(call), _product_of(call.args[0], bound)
    if len(shape) != 2 or found is None:
        return None
    wide, scale = found
    zero: np.ndarray | None = np.zeros((1, 1, 1), np.float32)
    if (moved := _call(wide, bound, "subtract")) is not None:
        wide, zero = moved.args[0], array_of(moved.args[1])
    cast = _call(wide, bound, "astype")
    integers, table = (_integers(cast.args[0], bound), None) if cast is not None else _codes(wide, bound)
    if integers is None or zero is None or integers.ndim != 3 or scale.ndim != 3:
        return None
    whole, blocks = integers.shape, scale.shape
    axis = next((a for a in (0, 1) if _joined(whole, a) == shape and blocks == (*whole[: a + 1], 1, *whole[a + 2 :])),
                None)
    if axis is None:
        return None
    counts = _joined(blocks, axis)
    block = tuple(extent // count for extent, count in zip(shape, counts, strict=True))
    zero = np.broadcast_to(zero, blocks).reshape(counts).astype(np.float32)
    return _Weight(integers.reshape(shape), scale.reshape(counts), zero, (block[0], block[1]), table)


def _codes(expr: relax.Expr, bound: _Bound) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The codes and the table of ``take(table, codes)``, both constant."""
    call = _call(expr, bound, "take")
    if call is None:
        return None, None
    table, index = array_of(call.args[0]), _call(call.args[1], bound, "astype")
    if table is None or table.shape != (CODES,) or table.dtype != np.float32 or index is None:
        return None, None
    codes = _integers(index.args[0], bound)
    return (codes, table) if codes is not None and codes.min() >= 0 and codes.max() < CODES else (None, None)


def _joined(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape with an axis and the one behind it as one."""
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _integers(expr: relax.Expr, bound: _Bound) -> np.ndarray | None:
    """The elements of a constant of integers, which may be reshaped and transposed."""
    if (call := _call(expr, bound, "reshape")) is not None:
        inner = _integers(call.args[0], bound)
        return None if inner is None else inner.reshape(shape_of(call))
    if (call := _call(expr, bound, "permute_dims")) is not None:
        inner = _integers(call.args[0], bound)
        return None if inner is None else inner.transpose(permutation(call))
    array = array_of(expr)
    return array if array is not None and array.dtype.kind in "iu" and array.dtype.itemsize == 1 else None

