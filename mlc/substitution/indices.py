"""Which inputs of a graph are indices, and their ranges, as gathers and evaluations require them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlc.operators import OPERATORS, infer
from mlc.operators.index import integer
from mlc.substitution.graph import Graph, Ref

__all__ = ["extents", "random_indices"]


def extents(graph: Graph, shapes: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """By name of an input that is gathered at, the extent of the shortest axis that it is for. The attributes and the
    ``shapes`` are numbers; raises :class:`~mlc.operators.ShapeError` where the graph is ill-formed."""
    known: dict[Any, Any] = dict(shapes)
    found: dict[str, int] = {}
    if all(node.op != "gather" for node in graph.nodes):
        return found
    for place, node in enumerate(graph.nodes):
        operands = [known[ref] for ref in node.inputs]
        [known[place, 0]] = infer(node.op, operands, node.attributes)
        if node.op == "gather":
            axis: Any = node.completed["axis"]
            extent = integer(operands[0][axis])
            for name in _moved(graph, node.inputs[1]):
                found[name] = min(found.get(name, extent), extent)
    return found


def _moved(graph: Graph, ref: Ref) -> set[str]:
    """The inputs whose elements a tensor of indices has."""
    if isinstance(ref, str):
        return {ref}
    node = graph.nodes[ref[0]]
    if not OPERATORS[node.op].movement:
        return set()
    return set().union(*(_moved(graph, each) for each in (node.inputs[:1] if node.op == "gather" else node.inputs)))


def random_indices(rng: np.random.Generator, shape: Sequence[int], extent: int) -> Any:
    """Indices of an axis, as float64; often one of them is there more than once."""
    return rng.integers(0, extent, tuple(shape)).astype(np.float64)
