"""Terms that are put up for rules to look at: a rule can only find what is there.

Products that were joined leave neighbouring slices of one tensor. Where each is combined with a constant of its own (a
bias, a scale), the constants joined and cut again are offered: ``concat(u, v)`` and its slices. That these are ``u``
and ``v``, and that the sums are slices of one sum, rules have to say.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlc.graph.substitute.egraph import EGraph
from mlc.graph.substitute.terms import freeze

__all__ = ["offer"]

_COMBINING = ("add", "sub", "mul", "div", "maximum", "minimum")


def offer(graph: EGraph) -> bool:
    """Add what is missing; whether anything was."""
    before = len(graph)
    for axis, left, right in list(_neighbours(graph)):
        theirs = {(op, side): other for op, side, other in _combined(graph, right, axis)}
        for op, side, u in _combined(graph, left, axis):
            v = theirs.get((op, side))
            if v is None or _fixed(graph, u, axis) != _fixed(graph, v, axis):
                continue
            whole = graph.add("concat", freeze(axis=axis), (u, v))
            cut, end = graph.shapes[u][axis], graph.shapes[whole][axis]
            for ends in ((0, cut), (cut, end)):
                graph.add("slice", freeze(axis=axis, begin=ends[0], end=ends[1]), (whole,))
    return len(graph) > before


def _neighbours(graph: EGraph) -> Iterator[tuple[int, int, int]]:
    """``(axis, left, right)`` of the classes that are the two parts of a tensor that is computed."""
    parts: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
    for each in graph.classes("slice"):
        for node in graph.nodes[each]:
            if node.op == "slice" and not graph.constant[each]:
                given = dict(node.attributes)
                where = graph.find(node.inputs[0]), given["axis"]
                parts.setdefault(where, {})[given["begin"], given["end"]] = each
    for (source, axis), cuts in parts.items():
        extent = graph.shapes[source][axis]
        for (begin, end), each in cuts.items():
            if begin == 0 and (end, extent) in cuts:
                yield axis, each, cuts[end, extent]


def _combined(graph: EGraph, each: int, axis: int) -> Iterator[tuple[str, int, int]]:
    """``(operator, side, constant)`` of what combines a class with a constant that has all its length of an axis."""
    for node in list(graph.parents[each]):
        if node.op in _COMBINING and len(node.inputs) == 2:
            side = 0 if graph.find(node.inputs[0]) == each else 1
            other = graph.find(node.inputs[1 - side])
            shape = graph.shapes[other]
            if graph.constant[other] and len(shape) > axis and shape[axis] == graph.shapes[each][axis]:
                yield node.op, side, other


def _fixed(graph: EGraph, each: int, axis: int) -> tuple[int, ...]:
    shape = graph.shapes[each]
    return (*shape[:axis], *shape[axis + 1 :])
