"""The correction of a saturating product, computed beside it: calls of :func:`mlc.graph.kernels.saturating.remainder`.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from mlc.graph.estimate import Estimate
from mlc.graph.ir.constants import constant
from mlc.graph.ir.patterns import OPAQUE
from mlc.graph.ir.rewrite import shape_of
from mlc.graph.kernels.saturating import ROWS, Split, remainder

__all__ = ["emit_remainder", "pays", "with_whole_rows"]

#: In the time of a product of 16-bit numbers: what one of bytes saves, what one of the remainder takes, and what it
#: takes to add an element of that, which lies across (measured on Zen 3).
_SAVED, _SPARSE, _ADDED = 1 / 3, 2.5, 16.0
#: The same that is saved where one unit multiplies both (45 products a nanosecond over 40 on a Zen 2), by how many
#: products of 8-bit integers such a machine does in the time of one of float32 at most
_SAVED_ALONE, _ALONE = 1 / 9, 1.0
#: Products of 16-bit numbers in the time of one of float32, where they are 1.6 at best; bytes that are moved in the
#: time in which one of the activations, which the remainder reads across, is; and what must be saved for each second
#: that this takes
_WORDS, _TURNED, _MARGIN = 1.37, 8.0, 1.5


def pays(split: Split, rows: int, estimate: Estimate) -> bool:
    """Whether a product of so many rows with a weight is faster in two, by arithmetic on what the rest has."""
    depth, columns = split.rest.shape
    values = np.count_nonzero(split.rest)
    if not values or rows < ROWS:
        return not values
    saved = _SAVED_ALONE if estimate.machine.dot <= _ALONE else _SAVED
    products = rows * (columns * (depth * saved - _ADDED) - values * _SPARSE)
    spent = estimate.copy(_TURNED * depth * rows) + estimate.machine.launch_seconds
    return 2.0 * products / (_WORDS * estimate.machine.dot / 1.6 * estimate.machine.flops) > _MARGIN * spent


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
