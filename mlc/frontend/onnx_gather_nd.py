"""``GatherND`` of tensors with free sizes, whose indices may count from the end; ``ScatterND`` of rows in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import te, tirx

from mlc.frontend.onnx_selection import PLACES
from mlc.frontend.onnx_values import array_of

__all__ = ["gather_nd", "scatter_nd"]


def gather_nd(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """``data[index]`` for each row of indices, of which one that is negative counts from the end of its axis.

    TVM's converter counts with the sizes as data. Here they are sizes, where any index may be negative.
    """
    from tvm import relax

    data, indices = inputs[:2]
    batch = int(attrs.get("batch_dims", 0))
    if not _natural(bb, indices):
        indices = _from_start(bb, indices, list(data.ty.shape)[batch:])
    return relax.op.gather_nd(data, indices, batch)


def scatter_nd(bb: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """The updates between the rows before and behind them, where they are rows that follow each other, as PyTorch
    writes ``x[a:b] = updates``; None for all else."""
    from tvm import relax

    data, indices, updates = inputs[:3]
    places = array_of(indices)
    if places is None or places.ndim != 2 or places.shape[1] != 1 or not places.size:
        return None
    if attrs.get("reduction") not in (None, b"none", "none"):
        return None
    extent, first, last = data.ty.shape[0], int(places[0, 0]), int(places[-1, 0])
    if not isinstance(extent, tirx.IntImm) or first < 0 or (places[:, 0] != np.arange(first, last + 1)).any():
        return None
    sides = [(0, first), (last + 1, int(extent.value))]
    before, behind = ([bb.normalize(relax.op.strided_slice(data, [0], [begin], [end]))] if begin < end else []
                      for begin, end in sides)
    return relax.op.concat([*before, updates, *behind], axis=0)


def _from_start(bb: Any, indices: Any, extents: Sequence[Any]) -> Any:
    """Indices from 0 of those that may count from the end of axes with these ``extents``."""
    dtype, taken = str(indices.ty.dtype), int(indices.ty.shape[-1])

    def counted(given: te.Tensor, *sizes: Any) -> te.Tensor:
        def one(*place: Any) -> Any:
            extent: Any = tirx.Cast(dtype, sizes[-1])
            for axis in reversed(range(taken - 1)):
                extent = tirx.Select(place[-1] == axis, tirx.Cast(dtype, sizes[axis]), extent)
            index = given(*place)
            return tirx.Select(index < 0, index + extent, index)

        return te.compute(given.shape, one, name="from_start")

    return bb.emit_te(counted, indices, *extents[:taken], primfunc_name_hint="from_start")


#: operators that make no negative number of numbers that are not
_NATURAL = frozenset(f"relax.{name}" for name in ("add", "broadcast_to", "concat", "expand_dims", "maximum", "minimum",
                                                 "multiply", "permute_dims", "reshape", "squeeze", "strided_slice",
                                                 "take", "where"))


def _natural(bb: Any, expr: Any) -> bool:
    """Whether whole numbers are known to be 0 or more."""
    from tvm import relax

    array = array_of(expr)
    if array is not None:
        return bool((array >= 0).all())
    value = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
    if isinstance(value, relax.Tuple):
        return all(_natural(bb, field) for field in value.fields)
    if isinstance(value, relax.TupleGetItem):
        made = bb.lookup_binding(value.tuple_value) if isinstance(value.tuple_value, relax.Var) else value.tuple_value
        return isinstance(made, relax.Call) and str(getattr(made.args[0], "name_hint", "")).startswith(PLACES)
    name = getattr(getattr(value, "op", None), "name", "")
    if name == "relax.arange":
        return True  # of sizes, from a number that _range has seen, or of constants that were folded
    arguments = [a for a in value.args if not isinstance(a, relax.ShapeExpr)] if name in _NATURAL else []
    if name in ("relax.strided_slice", "relax.take"):
        arguments = arguments[:1]
    if name == "relax.where":
        arguments = arguments[1:]
    return bool(arguments) and all(_natural(bb, argument) for argument in arguments)
