"""Grouped matrix products: rows in groups, each multiplied by its own matrix, as the experts of a mixture; the group of
a row is data-dependent.

No operator of ONNX says that, so there is one here, :data:`DOMAIN`'s ``GroupedMatMul``. The rows of each group are cut
into tiles of a few, the last of which may be ragged; a tile's sums stay in registers while its matrix passes by. There
are as many tiles as rows at most, and no more than there may be of whole ones and one ragged one a group, so that no
matrix is read of which there is no row.

``GroupedMatMulNBits`` is of matrices of 2, 4 or 8 bits with a scale for each column and block of rows: the integers are
what is read from memory, and become ``(integer - zero) * scale`` in registers, once for all rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mlc.frontend.onnx_sizes import as_tensor
from mlc.frontend.onnx_values import array_of, dtype_of, emitter, input_at
from mlc.sizes import Size, size_of

__all__ = ["DOMAIN", "GROUPED", "GROUPED_BITS", "define_operators", "grouped_mat_mul", "grouped_mat_mul_nbits"]

#: of operators that no other domain has
DOMAIN = "mlc"
GROUPED, GROUPED_BITS = "GroupedMatMul", "GroupedMatMulNBits"
#: rows of a tile, which with two vectors of 8 columns leave 4 of 16 registers; of integers, whose scales and zero
#: points take another 4: with a sixth row, LLVM moves a sum between registers for 3 of 4 multiply-adds
_ROWS, _INTEGER_ROWS = 6, 5
#: columns that lie beside each other in a constant matrix
_COLUMNS = 16
#: functions that nothing is fused with, and those that what follows is fused with: TVM's kOpaque and kInjective
_OPAQUE, _INJECTIVE = 8, 2
#: of places, which are indices as they are read
_PLACES = "int32"


@cache
def define_operators() -> None:
    """Tell onnx of the operators.

    ``GroupedMatMul``: ``x [rows, depth], matrices [groups, depth, columns], ends [groups]`` --> ``[rows, columns]``.
    Rows from the end of the group before on belong to a group; those behind the last are 0. ``GroupedMatMulNBits``: of
    float32 alone, with matrices of uint8, which are below ``2**bits``, and behind the ends ``scales [groups, blocks,
    columns]`` and zero points of uint8 of the same shape, which are half of that range where they are left out.
    """
    from onnx import TypeProto, defs

    parameter, optional = defs.OpSchema.FormalParameter, defs.OpSchema.FormalParameterOption.Optional
    floats = [f"tensor({kind})" for kind in ("float", "float16", "bfloat16", "double")]
    ends = ("I", ["tensor(int32)", "tensor(int64)"], "")
    schemas = [
        defs.OpSchema(
            GROUPED, DOMAIN, 1, inputs=[parameter("x", "T"), parameter("matrices", "T"), parameter("ends", "I")],
            outputs=[parameter("y", "T")], type_constraints=[("T", floats, ""), ends]),
        defs.OpSchema(
            GROUPED_BITS, DOMAIN, 1,
            inputs=[parameter("x", "T"), parameter("matrices", "B"), parameter("ends", "I"), parameter("scales", "T"),
                    parameter("zeros", "B", param_option=optional)],
            outputs=[parameter("y", "T")], attributes=[defs.OpSchema.Attribute("bits", defs.OpSchema.AttrType.INT, "")],
            type_constraints=[("T", floats[:1], ""), ("B", ["tensor(uint8)"], ""), ends]),
    ]

    def infer(context: Any) -> None:
        x, matrices = (context.get_input_type(i).tensor_type for i in (0, 1))
        found = TypeProto()
        found.tensor_type.elem_type = x.elem_type
        if len(x.shape.dim) == 2 and len(matrices.shape.dim) == 3:
            found.tensor_type.shape.dim.extend([x.shape.dim[0], matrices.shape.dim[2]])
        context.set_output_type(0, found)

    for schema in schemas:
        schema.set_type_and_shape_inference_function(infer)
        defs.register_schema(schema)


def grouped_mat_mul(bb: Any, inputs: Sequence[Any], _attrs: Mapping[str, Any]) -> Any:
    """``GroupedMatMul`` as functions: which tiles there are, their products, and the rows where they belong.

    Raises ``ValueError`` for shapes that are not those of :func:`define_operators`.
    """
    x, matrices, ends = inputs
    tiles, columns = _tiled(x, matrices, ends)
    packed, blocked = _packed(matrices)
    product = _products(tiles.rows, columns, "float64" if dtype_of(x) == "float64" else "float32", blocked)
    return _multiplied(bb, x, [packed], ends, tiles, product, _placed(columns, dtype_of(x), blocked))


def grouped_mat_mul_nbits(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``GroupedMatMulNBits`` as functions, those of :func:`grouped_mat_mul`.

    Raises ``ValueError`` for shapes that are not those of :func:`define_operators`, for matrices, scales and zero
    points that are not constant, and for blocks that are not of whole bytes.
    """
    from tvm import relax

    x, matrices, ends, scales = inputs[:4]
    tiles, columns = _tiled(x, matrices, ends, _INTEGER_ROWS)
    integers, steps, zeros = (array_of(each) for each in (matrices, scales, input_at(inputs, 4)))
    if integers is None or steps is None or (zeros is None and input_at(inputs, 4) is not None):
        raise ValueError("matrices of integers, their scales and their zero points must be constant")
    (groups, depth, _), bits = integers.shape, int(attrs["bits"])
    blocks = steps.shape[1] if steps.ndim == 3 else 0
    if steps.shape != (groups, blocks, columns) or not blocks or depth % blocks:
        raise ValueError(f"its scales must be [{groups}, blocks, {columns}], equal blocks of {depth} rows, "
                         f"got {list(steps.shape)}")
    if zeros is not None and zeros.shape != steps.shape:
        raise ValueError(f"its zero points must have the shape of its scales, {list(steps.shape)}, "
                         f"got {list(zeros.shape)}")
    if bits not in (2, 4, 8) or depth // blocks * bits % 8:
        raise ValueError(f"its blocks must be of whole bytes of 2, 4 or 8 bits, got {depth // blocks} integers of "
                         f"{bits}")
    operands = [relax.const(each) for each in (_in_bytes(integers, bits, blocks), _panels(steps))]
    operands += [] if zeros is None else [relax.const(_panels(zeros))]
    return _multiplied(bb, x, operands, ends, tiles, _integer_products(tiles.rows, bits),
                       _placed(columns, dtype_of(x), True))


def _tiled(x: Any, matrices: Any, ends: Any, most: int = _ROWS) -> tuple[_Tiles, int]:
    """The tiles of the rows, ``most`` in each, and how many columns there are."""
    shapes = [[size_of(n) for n in each.ty.shape] for each in (x, matrices, ends)]
    ranks = [len(shape) for shape in shapes]
    if ranks != [2, 3, 1]:
        raise ValueError(f"x, matrices and ends must have 2, 3 and 1 axes, got {ranks}")
    (rows, depth), (groups, inner, columns), (count,) = shapes
    if depth != inner or count != groups or any(isinstance(n, Size) for n in (depth, groups, columns)):
        raise ValueError("x, matrices and ends must be [rows, depth], [groups, depth, columns] and [groups], where "
                         f"rows alone may be free, got {', '.join(str(list(shape)) for shape in shapes)}")
    return _Tiles(most if isinstance(rows, Size) else max(1, min(most, rows)), rows, groups), columns


def _multiplied(
    bb: Any, x: Any, operands: Sequence[Any], ends: Any, tiles: _Tiles, product: Any, placed: Any
) -> Any:
    """The products of the tiles, and their rows where they belong."""
    owner, sources, tile, row, inside = tiles.places(bb, ends)
    made = bb.emit(bb.call_te(product, x, *operands, owner, sources, primfunc_name_hint="grouped_mat_mul",
                              primfunc_attrs={"op_pattern": _OPAQUE}))
    return bb.call_te(placed, made, tile, row, inside, primfunc_name_hint="placed",
                      primfunc_attrs={"op_pattern": _INJECTIVE})


@dataclass(frozen=True)
class _Tiles:
    """Tiles of ``rows`` rows each, of so many in all in so many groups."""

    rows: int
    size: Any
    groups: int

    @property
    def most(self) -> Any:
        """How many there may be: whole ones and one ragged one a group, each of a row at least."""
        from tvm import tirx

        if not isinstance(self.size, Size):
            return min(self.size, (self.size + (self.rows - 1) * self.groups) // self.rows)
        size = self.size.expr
        return size_of(tirx.min(size, tirx.floordiv(size + (self.rows - 1) * self.groups, self.rows)))

    def places(self, bb: Any, ends: Any) -> tuple[Any, Any, Any, Any, Any]:
        """``owner [tiles]``, the group of each tile; ``sources [tiles, rows]``, its rows; ``tile, row, inside [size]``,
        where each row lies, and whether in any group. Whatever ``ends`` says, they are places that there are."""
        from tvm import relax

        emit = emitter(bb)

        def number(n: int) -> Any:
            return relax.const(n, _PLACES)

        def size(n: Any) -> Any:
            return emit("astype", as_tensor(bb, n), _PLACES) if isinstance(n, Size) else number(n)

        def counted(n: Any) -> Any:
            if isinstance(n, Size):
                return emit("astype", emit("arange", 0, n.expr, 1, "int64"), _PLACES)
            return relax.const(np.arange(n, dtype=_PLACES))

        def clipped(value: Any, n: Any) -> Any:
            """Between 0 and ``n - 1``."""
            return emit("maximum", emit("minimum", value, emit("subtract", size(n), number(1))), number(0))

        def owned(lasts: Any, places: Any) -> Any:
            """How many groups end at each place or before."""
            ended = emit("less_equal", emit("expand_dims", lasts, 0), emit("expand_dims", places, 1))
            return emit("sum", emit("astype", ended, _PLACES), 1)

        def of(values: Any, owner: Any) -> Any:
            return emit("take", values, owner, 0)

        each = number(self.rows)
        last = emit("maximum", emit("minimum", emit("astype", ends, _PLACES), size(self.size)), number(0))
        first = relax.const(np.zeros(1, _PLACES))
        if self.groups > 1:
            first = emit("concat", [first, emit("strided_slice", last, axes=[0], begin=[0], end=[self.groups - 1])])
        many = emit("maximum", emit("subtract", last, first), number(0))
        many = emit("floor_divide", emit("add", many, number(self.rows - 1)), each)
        until = relax.const(np.tri(self.groups, dtype=_PLACES))
        lasts = bb.emit(emit("sum", emit("multiply", emit("expand_dims", many, 0), until), 1))
        firsts = emit("subtract", lasts, many)

        tiles, rows = counted(self.most), counted(self.size)
        owner = bb.emit(clipped(owned(lasts, tiles), self.groups))
        begin = emit("add", of(first, owner), emit("multiply", emit("subtract", tiles, of(firsts, owner)), each))
        within = relax.const(np.arange(self.rows, dtype=_PLACES)[None])
        sources = clipped(emit("add", emit("expand_dims", begin, 1), within), self.size)

        group = bb.emit(owned(last, rows))
        inside, group = emit("less", group, number(self.groups)), clipped(group, self.groups)
        place = emit("maximum", emit("subtract", rows, of(first, group)), number(0))
        tile = clipped(emit("add", of(firsts, group), emit("floor_divide", place, each)), self.most)
        found = owner, sources, tile, emit("floor_mod", place, each), inside
        return tuple(bb.emit(value) for value in found)


def _products(rows: int, columns: int, wide: str, blocked: bool) -> Any:
    """``x, matrices, owner, sources`` --> ``[tiles, blocks, rows, columns of a block]``, or ``[tiles, rows, columns]``
    of matrices that are not blocked. A place is read as it is: arithmetic on it would be of 64 bits."""
    from tvm import te, tirx

    def products(x: te.Tensor, matrices: te.Tensor, owner: te.Tensor, sources: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, x.shape[1]), "k")

        def product(p: Any, r: Any, *at: Any) -> Any:
            return te.sum(tirx.Cast(wide, x[sources[p, r], k]) * tirx.Cast(wide, matrices[(owner[p], *at)]), k)

        if blocked:
            shape = owner.shape[0], matrices.shape[1], rows, _COLUMNS
            return te.compute(shape, lambda p, b, r, c: product(p, r, b, k, c), name="grouped_mat_mul")
        return te.compute((owner.shape[0], rows, columns), lambda p, r, c: product(p, r, k, c), name="grouped_mat_mul")

    return products


def _integer_products(rows: int, bits: int) -> Any:
    """``x, bytes, scales, zero points where there are some, owner, sources`` --> ``[tiles, panels, rows, columns of a
    panel]``; bytes are those of :func:`_in_bytes`, scales and zero points :func:`_panels`."""
    from tvm import te, tirx

    each = 8 // bits

    def products(x: te.Tensor, packed: te.Tensor, scales: te.Tensor, *others: te.Tensor) -> te.Tensor:
        *zeros, owner, sources = others
        groups, panels, blocks, steps, _ = packed.shape

        def weight(g: Any, p: Any, b: Any, s: Any, f: Any, c: Any) -> Any:
            number = packed[g, p, b, s, c].astype("uint32")
            if each > 1:
                number = number >> (f * bits).astype("uint32") & tirx.const((1 << bits) - 1, "uint32")
            zero = zeros[0][g, p, b, c].astype("int32") if zeros else tirx.const(1 << (bits - 1), "int32")
            return (number.astype("int32") - zero).astype("float32") * scales[g, p, b, c]

        weights = te.compute((groups, panels, blocks, steps, each, _COLUMNS), weight, name="weights")
        rb, rs, rf = (te.reduce_axis((0, extent), name)
                      for extent, name in ((blocks, "rb"), (steps, "rs"), (each, "rf")))

        def product(t: Any, p: Any, r: Any, c: Any) -> Any:
            place = (rb * steps + rs) * each + rf
            return te.sum(x[sources[t, r], place] * weights[owner[t], p, rb, rs, rf, c], axis=[rb, rs, rf])

        return te.compute((owner.shape[0], panels, rows, _COLUMNS), product, name="grouped_mat_mul")

    return products


def _placed(columns: int, dtype: str, blocked: bool) -> Any:
    """``tiles, tile, row, inside`` --> ``[rows, columns]``, zeros where a row is in no group."""
    from tvm import te, tirx

    def placed(tiles: te.Tensor, tile: te.Tensor, row: te.Tensor, inside: te.Tensor) -> te.Tensor:
        def element(t: Any, n: Any) -> Any:
            value = tiles[tile[t], n // _COLUMNS, row[t], n % _COLUMNS] if blocked else tiles[tile[t], row[t], n]
            return tirx.Cast(dtype, tirx.Select(inside[t], value, tirx.const(0, tiles.dtype)))

        return te.compute((tile.shape[0], columns), element, name="placed")

    return placed


def _packed(matrices: Any) -> tuple[Any, bool]:
    """Constant matrices in :func:`_panels`, which are read in their order, and True; others as they are, and False."""
    from tvm import relax

    array = array_of(matrices)
    return (matrices, False) if array is None else (relax.const(_panels(array), dtype_of(matrices)), True)


def _panels(array: np.ndarray) -> np.ndarray:
    """``[groups, rows, columns]`` as ``[groups, panels, rows, columns of a panel]``, filled up with zeros."""
    groups, rows, columns = array.shape
    array = np.pad(array, [(0, 0), (0, 0), (0, -columns % _COLUMNS)])
    return np.ascontiguousarray(array.reshape(groups, rows, -1, _COLUMNS).swapaxes(1, 2))


def _in_bytes(integers: np.ndarray, bits: int, blocks: int) -> np.ndarray:
    """uint8 ``[groups, depth, columns]`` as ``[groups, panels, blocks, bytes, columns of a panel]``: a byte holds
    neighbours of a column, the first in its lowest bits."""
    groups, _, columns = integers.shape
    fields = integers.reshape(groups, -1, 8 // bits, columns)
    shifts = np.arange(0, 8, bits, dtype="uint8")[:, None]
    panels = _panels(np.bitwise_or.reduce(fields << shifts, axis=2))
    return panels.reshape(groups, panels.shape[1], blocks, -1, _COLUMNS)
