"""``Unique``: a stable sort, where its runs begin, and as many results as there are of these."""

from __future__ import annotations

from math import prod

import numpy as np

from mlc.frontend.onnx_expand import Nodes

__all__ = ["unique"]

_BOOL, _INT32, _INT64 = 9, 6, 7  # of onnx.TensorProto
#: numbers of what is compared as one, each of which is sorted by itself
_MOST_KEYS = 64


def unique(nodes: Nodes) -> list[str]:
    """``Y, indices, inverse_indices, counts`` of a tensor's elements, or of what lies at each index of an axis."""
    x, given = nodes.inputs(1)[0], nodes.attributes()
    shape = tuple(nodes.fixed_size(x, axis, "input") for axis in range(nodes.rank_of(x, "input")))
    axis = given.get("axis")
    if axis is None:
        x, shape, axis = str(nodes("Reshape", x, nodes.constant([-1]))), (prod(shape),), 0
    axis = int(axis) % len(shape)
    count, others = shape[axis], [each for each in range(len(shape)) if each != axis]
    keys = prod(shape[each] for each in others)
    if keys > _MOST_KEYS:
        raise nodes.refused(f"what it compares must be of at most {_MOST_KEYS} numbers, got {keys}; end the model "
                            "before it")

    def along(operator: str, *inputs: str) -> str:
        return str(nodes(operator, *inputs, axis=0))

    def part(value: str, begin: int, end: int) -> str:
        return str(nodes("Slice", value, nodes.constant([begin]), nodes.constant([end]), nodes.constant([0])))

    def numbered(flags: str) -> str:
        """How many flags are before each place, and at it, less one."""
        return str(nodes("Sub", nodes("CumSum", flags, nodes.constant(np.array(0))), nodes.constant([1])))

    def places(flags: str) -> str:
        return str(nodes("Reshape", nodes("NonZero", flags), nodes.constant([-1])))

    rows = nodes("Reshape", nodes("Transpose", x, perm=[axis, *others]), nodes.constant([count, keys]))
    if nodes.dtype_of(nodes.node.input[0]).kind == "b":
        rows = nodes("Cast", rows, to=_INT32)
    order = _order(nodes, str(rows), count, keys)
    flags = nodes.constant([1])
    if count > 1:
        ordered = along("Gather", str(rows), order)
        same = nodes("Equal", part(ordered, 1, count), part(ordered, 0, count - 1))
        other = nodes.reduced("ReduceMax", str(nodes("Cast", nodes("Not", same), to=_INT32)), [1])
        flags = along("Concat", flags, str(nodes("Reshape", nodes("Cast", other, to=_INT64), nodes.constant([-1]))))
    rank, zeros = numbered(flags), nodes.constant(np.zeros(count, "int64"))
    kind = along("ScatterElements", zeros, order, rank)  # of each index in the input
    # where each kind begins in the order; what begins none is written behind the last
    target = nodes("Where", nodes("Cast", flags, to=_BOOL), rank, nodes.constant([count]))
    begins = along("ScatterElements", nodes.constant(np.full(count + 1, count)), str(target),
                   nodes.constant(np.arange(count)))
    many = str(nodes("Sub", part(begins, 1, count + 1), part(begins, 0, count)))
    if given.get("sorted", 1):
        chosen = places(flags)
        indices, counts = along("Gather", order, chosen), along("Gather", along("Gather", many, rank), chosen)
    else:
        first = along("ScatterElements", zeros, order, flags)
        indices = places(first)
        counts = along("Gather", along("Gather", many, kind), indices)
        kind = along("Gather", numbered(first), along("Gather", order, along("Gather", begins, kind)))
    made = [str(nodes("Gather", x, indices, axis=axis)), indices, kind, counts]
    return made[:len(nodes.node.output)]


def _order(nodes: Nodes, rows: str, count: int, keys: int) -> str:
    """The indices of rows in their order, equal ones as they come: sorted by the last column, and by each before."""
    order = ""
    for column in reversed(range(keys)):
        key = nodes("Gather", rows, nodes.constant(np.array(column)), axis=1)
        if order:
            key = nodes("Gather", key, order, axis=0)
        _, found = nodes("TopK", key, nodes.constant([count]), outputs=2, axis=0, largest=0, sorted=1)
        order = str(nodes("Gather", order, found, axis=0)) if order else str(found)
    return order
