"""Restricts a graph to a box of its output, computed from the necessary slices of its inputs.

A window over an image that reaches beyond what is cut keeps the padding there, and has none where it does not. What is
beyond is told by most of the sizes given: whoever uses the result has to prove it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mlc.operators import OPERATORS
from mlc.operators.index import Poly, as_poly
from mlc.substitution.compose import compose
from mlc.substitution.graph import Graph, Node, Ref

__all__ = ["NoPart", "Part", "cut", "part"]

#: by axis from where to where; None for all of it
Part: TypeAlias = "tuple[tuple[Poly, Poly] | None, ...]"

_POOLINGS = ("avg_pool2d", "max_pool2d")


class NoPart(Exception):
    """An operator of which nothing is known here."""


def part(nodes: list[Node], graph: Graph, shapes: Mapping[str, tuple[Poly, ...]], box: Part,
         sizes: Sequence[Mapping[str, int]]) -> Ref:
    """The only output of ``graph`` within a box, of operators that are added to ``nodes``; raises :class:`NoPart`."""
    return _Parts(nodes, graph, shapes, sizes).of(graph.outputs[0], box)


def cut(nodes: list[Node], ref: Ref, box: Part) -> Ref:
    """What is within a box of a tensor: a slice for each axis."""
    for axis, ends in enumerate(box):
        if ends is not None:
            nodes.append(Node("slice", (ref,), {"axis": axis, "begin": ends[0], "end": ends[1]}))
            ref = len(nodes) - 1, 0
    return ref


class _Parts:
    def __init__(self, nodes: list[Node], graph: Graph, shapes: Mapping[str, tuple[Poly, ...]],
                 sizes: Sequence[Mapping[str, int]]) -> None:
        self._nodes, self._graph, self._shapes, self._sizes = nodes, graph, shapes, sizes

    def of(self, ref: Ref, box: Part) -> Ref:
        if isinstance(ref, str):
            return cut(self._nodes, ref, box)
        node = self._graph.nodes[ref[0]]
        given: dict[str, Any] = dict(node.attributes)
        operands: list[Part]
        if OPERATORS[node.op].pointwise:
            operands = [self._broadcast(each, box) for each in node.inputs]
        elif node.op == "transpose":
            operands = [tuple(box[given["perm"].index(axis)] for axis in range(len(box)))]
        elif node.op == "matmul":
            operands = [(*box[:-1], None), (*box[:-2], None, box[-1])]
        elif node.op == "conv2d":
            operands = [(box[0], None, *self._windows(node, given, box)), (box[1], None, None, None)]
            if box[1] is not None and given.get("groups", 1) != 1:
                raise NoPart(f"some channels of {node.op} in groups")
        elif node.op in _POOLINGS:
            operands = [(*box[:2], *self._windows(node, given, box))]
        else:
            raise NoPart(f"a part of {node.op}")
        inputs = tuple(self.of(each, one) for each, one in zip(node.inputs, operands, strict=True))
        self._nodes.append(Node(node.op, inputs, given))
        return len(self._nodes) - 1, 0

    def _shape(self, ref: Ref) -> tuple[Poly, ...]:
        [tensor], _ = compose(Graph(self._graph.nodes, (ref,)), self._shapes)
        return tensor.shape

    def _broadcast(self, ref: Ref, box: Part) -> Part:
        shape = self._shape(ref)
        behind = box[len(box) - len(shape):]
        return tuple(None if size == 1 else ends for size, ends in zip(shape, behind, strict=True))

    def _windows(self, node: Node, given: dict[str, Any], box: Part) -> Part:
        """The rows and columns that windows read; writes into ``given`` what padding is left."""
        extents = self._shape(node.inputs[0])[2:]
        completed: Any = node.completed
        if isinstance(completed["padding"], str):
            raise NoPart(f"padding {completed['padding']} of {node.op}")
        kernel = self._shape(node.inputs[1])[2:] if node.op == "conv2d" else completed["kernel"]
        padding = list(map(as_poly, completed["padding"]))
        dilation = completed.get("dilation", (1, 1))
        found: list[tuple[Poly, Poly] | None] = []
        for axis in range(2):
            ends, extent = box[2 + axis], extents[axis]
            if ends is None:
                found.append(None)
                continue
            stride, apart = (as_poly(each[axis]) for each in (completed["stride"], dilation))
            begin = ends[0] * stride - padding[axis]
            end = (ends[1] - 1) * stride - padding[axis] + (as_poly(kernel[axis]) - 1) * apart + 1
            before, behind = self._beyond(-begin), self._beyond(end - extent)
            padding[axis], padding[2 + axis] = before, behind
            begin, end = begin + before, end - behind
            found.append(None if begin == 0 and end == extent else (begin, end))
        given["padding"] = tuple(padding)
        return tuple(found)

    def _beyond(self, number: Poly) -> Poly:
        """A number of elements beyond an end, 0 where it is none at most sizes."""
        signs = [number.evaluate(sizes) for sizes in self._sizes]
        return number if 2 * sum(sign > 0 for sign in signs) > len(signs) else as_poly(0)
