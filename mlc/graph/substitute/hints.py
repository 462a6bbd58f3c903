"""Hints: terms added to the e-graph, equal to nothing yet, because a rule only matches terms that exist.

Products that were joined leave neighbouring slices of one tensor. Where each is combined with a constant of its own (a
bias, a scale), the constants joined and cut again are added: ``concat(u, v)`` and its slices. That these are ``u`` and
``v``, and that the sums are slices of one sum, rules have to say.

In a sum of convolutions of one image, those with smaller windows are added with the largest one, zeros around their
filters; and the image itself as a convolution with the kernel that leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlc.graph.substitute.sums import Shared
from mlc.operators import operators_where
from mlc.substitution.egraph import EGraph, ENode
from mlc.substitution.terms import freeze

__all__ = ["add_hints", "hinted"]

_COMBINING = operators_where(lambda each: each.pointwise and each.arity == 2)


def hinted(sums: Sequence[Shared]) -> set[tuple[str, int]]:
    """The operators that hints may add for sums."""
    return {("enlarge", 4), ("identity_kernel", 4), ("conv2d", 4)} if sums else set()


def add_hints(graph: EGraph, sums: Sequence[Shared] = ()) -> bool:
    """Add the hints that are missing; whether any was."""
    before = len(graph)
    for each in sums:
        _add_windows(graph, graph.find(each.image), [*dict.fromkeys(map(graph.find, each.terms))])
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


def _add_windows(graph: EGraph, image: int, terms: Sequence[int]) -> None:
    """Convolutions of one image with the largest window among them, where padding and all else allow it."""
    found = [node for each in terms for node in graph.nodes[each] if _convolves(graph, node, image)]
    if not found:
        return
    largest = max(found, key=lambda node: (sum(_window(graph, node)), node.attributes, node.inputs))
    if any(_kept(graph, each, image) for each in terms):
        given = dict(largest.attributes)
        kernel = freeze(channels=graph.shapes[graph.find(largest.inputs[1])][1], kernel=(1, 1), groups=1)
        if given["stride"] == (1, 1):
            filters = graph.add("identity_kernel", kernel, ())
            graph.add("conv2d", freeze(**{**given, "padding": (0, 0, 0, 0)}), (image, filters))
    window = _window(graph, largest)
    for node in found:
        if _window(graph, node) != window and _widened(graph, node, window) == dict(largest.attributes):
            filters = graph.add("enlarge", freeze(kernel=window), (node.inputs[1],))
            graph.add("conv2d", largest.attributes, (image, filters))


def _kept(graph: EGraph, each: int, image: int) -> bool:
    """Whether a term is the image itself, or a constant multiple of it."""
    return each == image or any(
        node.op == "mul" and image in node.inputs and any(graph.constant[i] for i in node.inputs)
        for node in graph.nodes[each]
    )


def _convolves(graph: EGraph, node: ENode, image: int) -> bool:
    if node.op != "conv2d" or graph.find(node.inputs[0]) != image or not graph.constant[graph.find(node.inputs[1])]:
        return False
    given = dict(node.attributes)
    return given["groups"] == 1 and not isinstance(given["padding"], str)


def _window(graph: EGraph, node: ENode) -> tuple[int, ...]:
    return graph.shapes[graph.find(node.inputs[1])][2:]


def _widened(graph: EGraph, node: ENode, window: tuple[int, ...]) -> dict[str, Any] | None:
    """The attributes with which zeros around the filter change nothing; None where they cannot be centred."""
    given, around = dict(node.attributes), []
    for large, small, apart in zip(window, _window(graph, node), given["dilation"], strict=True):
        if large < small or (large - small) % 2:
            return None
        around.append((large - small) // 2 * apart)
    padding = tuple(p + more for p, more in zip(given["padding"], around * 2, strict=True))
    return {**given, "padding": padding}


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
