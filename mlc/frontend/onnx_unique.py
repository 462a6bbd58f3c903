"""``Unique`` as a stable sort: the result has one element for each run of equal elements."""

from __future__ import annotations

from math import prod

import numpy as np

from mlc.frontend.onnx_expand import Nodes

__all__ = ["unique"]

_BOOL, _INT32, _INT64 = 9, 6, 7  # of onnx.TensorProto
#: bytes of the narrowest whole numbers that can be sorted
_SORTED_FROM = 4
#: numbers of what is compared as one, each of which is sorted by itself
_MOST_KEYS = 64


def unique(nodes: Nodes) -> list[str]:
    """``Y, indices, inverse_indices, counts`` of a tensor's elements, or of what lies at each index of an axis. How
    many are compared may be free, but not how many numbers each has."""
    x, given = nodes.inputs(1)[0], nodes.attributes()
    rank, axis = nodes.rank_of(x, "input"), given.get("axis")
    if axis is None:
        nodes.check_sizes(x, "input")
        rows = x = str(nodes("Reshape", x, nodes.constant([-1])))
        axis, keys = 0, 1
    else:
        axis = int(axis) % rank
        others = [each for each in range(rank) if each != axis]
        keys = prod(nodes.fixed_size(x, each, "input") for each in others)
        if keys > _MOST_KEYS:
            raise nodes.refused(f"what it compares must be of at most {_MOST_KEYS} numbers, got {keys}; end the model "
                                "before it")
        rows = nodes("Transpose", x, perm=[axis, *others]) if axis else x
    rows = str(nodes("Reshape", rows, nodes.constant([-1, keys])))
    dtype = nodes.dtype_of(nodes.node.input[0])
    if dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize < _SORTED_FROM):
        rows = str(nodes("Cast", rows, to=_INT32))
    zero, one = nodes.constant(np.array(0)), nodes.constant(np.array(1))
    order = _order(nodes, rows, keys)
    # places in the order, as many as there are; arithmetic on them keeps the size
    places = str(nodes("Range", zero, nodes("Squeeze", nodes("Shape", order)), one))
    count, none = nodes("Add", nodes.reduced("ReduceMax", places, [0]), one), str(nodes("Mul", places, zero))

    def along(operator: str, *inputs: str) -> str:
        return str(nodes(operator, *inputs, axis=0))

    def numbered(flags: str) -> str:
        """How many flags are before each place, and at it, less one."""
        return str(nodes("Sub", nodes("CumSum", flags, zero), one))

    def flagged(flags: str) -> str:
        return str(nodes("Reshape", nodes("NonZero", flags), nodes.constant([-1])))

    ordered = along("Gather", rows, order)
    before = along("Gather", ordered, str(nodes("Max", nodes("Sub", places, one), zero)))
    other = str(nodes("Cast", nodes("Not", nodes("Equal", ordered, before)), to=_INT32))
    other = nodes("Reshape", nodes.reduced("ReduceMax", other, [1]), nodes.constant([-1]))
    new = nodes("Or", nodes("Cast", other, to=_BOOL), nodes("Equal", places, zero))
    flags = str(nodes("Cast", new, to=_INT64))
    number = numbered(flags)
    kind = along("ScatterElements", none, order, number)  # of each index in the input
    kinds = nodes("Add", nodes.reduced("ReduceMax", number, [0]), one)
    # where each kind begins in the order; what begins none is written behind the last, each to a place of its own
    rest = nodes("Add", kinds, numbered(str(nodes("Sub", one, flags))))
    begins = along("ScatterElements", none, str(nodes("Where", new, number, rest)), places)
    following = nodes("Add", places, one)
    next_one = along("Gather", begins, str(nodes("Min", following, nodes("Sub", count, one))))
    many = str(nodes("Sub", nodes("Where", nodes("Less", following, kinds), next_one, count), begins))
    if given.get("sorted", 1):
        chosen = flagged(flags)
        indices, counts = along("Gather", order, chosen), along("Gather", along("Gather", many, number), chosen)
    else:
        first = along("ScatterElements", none, order, flags)
        indices = flagged(first)
        counts = along("Gather", along("Gather", many, kind), indices)
        kind = along("Gather", numbered(first), along("Gather", order, along("Gather", begins, kind)))
    made = [str(nodes("Gather", x, indices, axis=axis)), indices, kind, counts]
    return made[:len(nodes.node.output)]


def _order(nodes: Nodes, rows: str, keys: int) -> str:
    """The indices of rows in their order, equal ones as they come: sorted by the last column, and by each before."""
    order = ""
    for column in reversed(range(keys)):
        key = nodes("Gather", rows, nodes.constant(np.array(column)), axis=1)
        if order:
            key = nodes("Gather", key, order, axis=0)
        _, found = nodes("TopK", key, nodes("Shape", key), outputs=2, axis=0, largest=0, sorted=1)
        order = str(nodes("Gather", order, found, axis=0)) if order else str(found)
    return order
