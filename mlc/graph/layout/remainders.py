"""What a saturating product leaves out, computed beside it: calls of :func:`mlc.graph.kernels.saturating.remainder`."""

from __future__ import annotations

from tvm import relax

from mlc.graph.ir.constants import constant
from mlc.graph.ir.patterns import OPAQUE
from mlc.graph.ir.rewrite import shape_of
from mlc.graph.kernels.saturating import ROWS, Split, remainder

__all__ = ["emit_remainder", "with_whole_rows"]


def with_whole_rows(builder: relax.BlockBuilder, columns: relax.Expr) -> relax.Expr:
    """uint8 ``[K, M]`` with ``M`` padded to what the kernel takes at once."""
    short = -shape_of(columns)[1] % ROWS
    return builder.emit(relax.op.nn.pad(columns, [0, 0, 0, short])) if short else columns


def emit_remainder(builder: relax.BlockBuilder, columns: relax.Expr, split: Split) -> relax.Expr:
    """int32 ``[N, M]``: the product of the sparse part of a weight with activations :func:`with_whole_rows`."""
    (depth, rows), packed, filters = shape_of(columns), split.packed_rest, split.rest.shape[1]
    func = remainder(depth, rows, filters, len(packed[-1])).without_attr("global_symbol")  # a module has several
    arguments = relax.Tuple([columns, *map(constant, packed)])
    var = builder.add_func(func.with_attr("op_pattern", OPAQUE), "remainder")
    call = relax.call_tir(var, arguments, relax.TensorType((filters, rows), "int32"))
    return builder.emit(call)
