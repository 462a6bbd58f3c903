"""Few rows padded to a fixed number: a function of up to 64 rows becomes one of 64, of which a call uses some.

All sizes are then constants: for tiles, for split reductions, and for the grid. Missing rows are read as zeros and not
stored (:func:`opened`, with which lowering begins).
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import replaced, uses, walk
from schedules.free import SIZES, specialised, variables
from schedules.merged import MERGED

__all__ = ["CAPPED", "capped", "of_most_rows", "opened"]

#: the attribute of such a function: for each parameter the axis of the rows, -1 for none
CAPPED = "mlc.capped"


def of_most_rows(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[int]] | None:
    """A function of one free size for the most, and the axis of it that each parameter has, -1 for none; None where a
    row depends on others, or on how many there are."""
    free = variables(func)
    if len(free) != 1 or any(isinstance(param.ty, tvm.ir.PrimType) for param in func.params):
        return None
    blocks: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, blocks.append))
    inside = [part for block in blocks if block.iter_vars for part in (block.body, block.init) if part is not None]
    reduced = [each.dom.extent for block in blocks for each in block.iter_vars
               if each.iter_type == tirx.IterVar.CommReduce]
    plain = all(isinstance(block.body, tirx.BufferStore) for block in blocks if block.iter_vars)
    if not plain or any(uses(part, free) for part in (*inside, *reduced)):
        return None
    axes = [_axis(param, free[0]) for param in func.params]
    if None in axes or axes[-1] == -1:
        return None
    most = int(func.attrs[SIZES][0][1])
    return specialised(func, {free[0]: most}).without_attr(MERGED), [int(axis) for axis in axes if axis is not None]


def _axis(param: Any, rows: tirx.Var) -> int | None:
    """The axis that has so many elements, -1 where none depends on them, None where another one does."""
    found = [axis for axis, size in enumerate(param.shape) if uses(size, [rows])]
    if not found:
        return -1
    return found[0] if len(found) == 1 and param.shape[found[0]].same_as(rows) else None


def capped(func: tirx.PrimFunc, axes: list[int]) -> tirx.PrimFunc:
    """A scheduled function for the most rows as one for up to so many."""
    return func.with_attr(CAPPED, axes)


def opened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A capped function as its callers call it, with as many rows as its tensors have; others as they are.

    ::

        tile[i] = x[r, k]; ..; y[r, n] = f(sum)
        -->
        tile[i] = x[r, k] if r < rows else 0; ..; y[r, n] = f(sum) where r < rows
    """
    if not (func.attrs and CAPPED in func.attrs):
        return func
    axes = dict(zip(func.params, map(int, func.attrs[CAPPED]), strict=True))
    kind = next(str(param.shape[axis].ty) for param, axis in axes.items() if axis >= 0)
    rows = tirx.Var("rows", kind)

    def there(index: Any) -> Any:
        return index < rows.astype(str(index.ty.dtype))

    def read(load: TensorLoad) -> Any:
        axis = axes.get(load.source, -1)
        zero = tirx.const(0, str(load.source.dtype))
        return load if axis < 0 else tirx.if_then_else(there(load.indices[axis]), load, zero)

    def stored(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        block = realize.block
        axis = axes.get(block.body.buffer, -1) if isinstance(block.body, tirx.BufferStore) else -1
        if axis < 0:
            return realize
        values = dict(zip((each.var for each in block.iter_vars), realize.iter_values, strict=True))
        predicate = tirx.all(realize.predicate, there(replaced(block.body.indices[axis], values)))
        return s_tir.SBlockRealize(realize.iter_values, predicate, block)

    def tested(store: tirx.BufferStore) -> tirx.Stmt:
        axis = axes.get(store.buffer, -1)
        return store if axis < 0 else tirx.IfThenElse(there(store.indices[axis]), store, None)

    blocks: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, blocks.append))
    scheduled = any(block.iter_vars for block in blocks)  # else the kernel is written out
    writes = (s_tir.SBlockRealize, stored) if scheduled else (tirx.BufferStore, tested)
    body = tvm_ffi.structural_map(func.body, [(TensorLoad, read), writes], order="post")
    image = {}
    for param, axis in axes.items():
        if axis >= 0:
            shape = [rows if i == axis else size for i, size in enumerate(param.shape)]
            image[param] = tirx.decl_buffer(shape, str(param.dtype), name=str(param.name), scope=str(param.scope()),
                                            data_alignment=int(param.data_alignment))
    made = tirx.PrimFunc([image.get(param, param) for param in func.params], replaced(body, image), func.ret_type)
    for key, value in dict(func.attrs).items():
        made = made.with_attr(key, value) if key != CAPPED else made
    return made
