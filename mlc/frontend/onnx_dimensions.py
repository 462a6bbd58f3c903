"""Free dimensions of a model's inputs that its nodes require to be equal, to be a certain number, or not too small.

What :mod:`mlc.frontend.onnx_size_constraints` found is written into the inputs before the graph is folded anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc.errors import UsageError
from mlc.shapes import DEFAULT_RANGE, Linear, Range, Shape

if TYPE_CHECKING:
    import onnx

__all__ = ["Agreed", "AtLeast", "Place", "make_one", "ranges_that_begin", "without_symbols"]

#: an input by its name, and an axis of it
Place = tuple[str, int]


@dataclass(frozen=True)
class Agreed:
    """A free dimension of an input that is the one at another place, or a number."""

    place: Place
    other: Place | int


@dataclass(frozen=True)
class AtLeast:
    """A free dimension of an input that begins at ``least``, for the sake of a node of ``operator``."""

    place: Place
    least: int
    operator: str


def ranges_that_begin(
    inputs: Sequence[onnx.ValueInfoProto], later: Sequence[AtLeast], shapes: Mapping[str, Shape]
) -> dict[str, Range]:
    """Ranges of the symbols that begin ``later``, which dimensions without a name are given one for."""
    ranges: dict[str, Range] = {}
    for each in later:
        dims = {(value.name, axis): dim for value in inputs
                for axis, dim in enumerate(value.type.tensor_type.shape.dim)}
        symbol = _symbol(dims, each.place)
        if any(dim.dim_param == symbol and name in shapes for (name, _), dim in dims.items()):
            raise UsageError(f"{symbol} must be at least {each.least}, of which {each.operator} leaves something; give "
                             "a range that begins there")
        ranges[symbol] = Range(each.least, max(each.least, DEFAULT_RANGE.high))
    return ranges


def make_one(inputs: Sequence[onnx.ValueInfoProto], agreed: Agreed) -> None:
    """Give a dimension, wherever it stands, the other one's name or its number."""
    dims = {(value.name, axis): dim for value in inputs
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)}
    other = agreed.other
    target = Linear((), other) if isinstance(other, int) else Linear(((_symbol(dims, other), 1),))
    symbol, dims[agreed.place].dim_param = dims[agreed.place].dim_param, str(target)
    for place, dim in dims.items():
        if place != agreed.place and symbol and dim.dim_param == symbol:
            dim.dim_param = str(target)
        elif (linear := Linear.parse(dim.dim_param)) and symbol:
            dim.dim_param = str(linear.replaced(symbol, target))
        if dim.dim_param.isdecimal():
            dim.dim_value = int(dim.dim_param)


def _symbol(dims: Mapping[Place, Any], place: Place) -> str:
    """The name of a free dimension; one without a name is given one."""
    dim, known = dims[place], {each.dim_param for each in dims.values()}
    if not dim.dim_param:
        name = "_".join(map(str, place))
        while name in known:
            name += "_"
        dim.dim_param = name
    return str(dim.dim_param)


def without_symbols(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node, whose branches and bodies say no names of sizes: inference would take what is called the same in both
    branches for the same."""
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for value in (*graph.output, *graph.value_info):
                for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
                    if dim.dim_param:
                        dim.ClearField("dim_param")
            for inner in graph.node:
                without_symbols(inner)
    return node
