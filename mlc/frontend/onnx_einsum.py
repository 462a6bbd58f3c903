"""Einstein sums that are matrix products.

``Einsum("bhlk,bhtk->bhlt", x, y)`` --> ``matmul(x, permute_dims(y, (0, 1, 3, 2)))``

Of two operands, labels that both have are summed over where the result lacks them, and count matrices where it has
them; the others are rows or columns. Axes of one kind become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlc.frontend.onnx_values import dtype_of, emitter
from mlc.sizes import size_of

__all__ = ["as_product"]

#: labels for axes that an ellipsis stands for, which no equation can have
_UNNAMED = "0123456789"


def as_product(bb: Any, inputs: Sequence[Any], equation: str) -> Any:
    """The product that makes ``equation`` of two tensors of floating-point numbers; None where there is none: other
    numbers of operands, diagonals, nothing to sum over, an axis of one operand to sum over, one that is repeated."""
    parsed = _parsed(equation.replace(" ", ""), [len(x.ty.shape) for x in inputs])
    if parsed is None or not all(dtype_of(x).startswith(("float", "bfloat")) for x in inputs):
        return None
    (left, right), out = parsed
    sizes: dict[str, Any] = {}
    for x, labels in zip(inputs, (left, right), strict=True):
        for label, extent in zip(labels, x.ty.shape, strict=True):
            if sizes.setdefault(label, size_of(extent)) != size_of(extent):
                return None
    summed = [label for label in left if label in right and label not in out]
    batch = [label for label in out if label in left and label in right]
    rows, columns = ([label for label in out if label in own and label not in batch] for own in (left, right))
    if not summed or len(left) + len(right) + len(out) != 2 * len(summed) + 3 * len(batch) + 2 * len(rows + columns):
        return None
    emit = emitter(bb)

    def arranged(x: Any, labels: str, *kinds: list[str]) -> Any:
        order = [labels.index(label) for label in [*batch, *(label for kind in kinds for label in kind)]]
        moved = x if order == sorted(order) else emit("permute_dims", x, order)
        shape = [*(sizes[label] for label in batch), *(math.prod(sizes[label] for label in kind) for kind in kinds)]
        return moved if all(len(kind) == 1 for kind in kinds) else emit("reshape", moved, shape)

    product = emit("matmul", arranged(inputs[0], left, rows, summed), arranged(inputs[1], right, summed, columns))
    made = [*batch, *rows, *columns]
    if not len(rows) == len(columns) == 1:
        product = emit("reshape", product, [sizes[label] for label in made])
    order = [made.index(label) for label in out]
    return product if order == sorted(order) else emit("permute_dims", product, order)


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[str], str] | None:
    """The labels of each of two operands and of the result; None for what no product can be."""
    given, arrow, out = equation.partition("->")
    operands = given.split(",")
    if len(operands) != 2 or len(ranks) != 2:
        return None
    if not arrow:
        named = given.replace(",", "").replace("...", "")
        out = "..." * ("..." in given) + "".join(sorted(label for label in set(named) if named.count(label) == 1))
    hidden = [rank - len(labels.replace("...", "")) for labels, rank in zip(operands, ranks, strict=True)]
    counts = {many for many, labels in zip(hidden, operands, strict=True) if "..." in labels}
    if len(counts) > 1 or any(many != 0 for many, labels in zip(hidden, operands, strict=True) if "..." not in labels):
        return None
    unnamed = _UNNAMED[: next(iter(counts), 0)]
    *whole, result = (labels.replace("...", unnamed) for labels in [*operands, out])
    if any(len(set(labels)) != len(labels) for labels in [*whole, result]):
        return None
    return whole, result
