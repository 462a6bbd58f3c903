"""What a rule does to a graph, and where it can apply at all: from its two sides alone, whatever its name.

Searches take the rules in the order of their kinds. Those that leave fewer products come first; they leave slices and
concatenations behind, which the second kind carries towards the outputs and the constants, and cancels; what only says
the same otherwise could go on without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeAlias

from mlc.graph.substitute.egraph import PRODUCTS
from mlc.graph.substitute.terms import TermGraph
from mlc.operators.index import Poly
from mlc.substitution.graph import Graph, Ref
from mlc.substitution.rule import Rule

__all__ = ["Kind", "Place", "kind_of", "places", "present", "widened"]

#: an operator and the rank of its result; None for a rank that is not known
Place: TypeAlias = "tuple[str, int | None]"


class Kind(IntEnum):
    """``JOIN``: fewer products, of what they share if the rule has several outputs; ``SHORTER``: fewer operators, or
    slices taken later; ``OTHER``: all else."""

    JOIN = 0
    SHORTER = 1
    OTHER = 2


def kind_of(rule: Rule) -> Kind:
    source, target = rule.source, rule.target
    if _products(target) < _products(source):
        return Kind.JOIN if len(source.outputs) == 1 or _shared(source) else Kind.OTHER
    fewer = len(target.nodes) < len(source.nodes)
    if fewer or (len(target.nodes) == len(source.nodes) and _cuts_later(source, target)):
        return Kind.SHORTER if _products(target) == _products(source) else Kind.OTHER
    return Kind.OTHER


def _products(graph: Graph) -> int:
    return sum(node.op in PRODUCTS for node in graph.nodes)


def _shared(graph: Graph) -> bool:
    """Whether an input is an operand of every product."""
    operands = [set(node.inputs) for node in graph.nodes if node.op in PRODUCTS]
    return bool(set.intersection(*operands))


def _cuts_later(source: Graph, target: Graph) -> bool:
    def last(graph: Graph) -> set[str]:
        return {graph.nodes[o[0]].op if not isinstance(o, str) else "" for o in graph.outputs}

    return last(target) == {"slice"} and "slice" not in last(source)


def places(graph: Graph, shapes: Mapping[str, tuple[Poly, ...]]) -> frozenset[Place]:
    """The operators of a side of a rule with their ranks."""
    ranks: dict[Ref, int | None] = {name: len(shape) for name, shape in shapes.items()}
    for place, node in enumerate(graph.nodes):
        operands = [ranks.get(ref) for ref in node.inputs]
        ranks[place, 0] = _rank(node.op, dict(node.attributes), operands)
    return frozenset((node.op, ranks[place, 0]) for place, node in enumerate(graph.nodes))


def _rank(op: str, attributes: Mapping[str, object], operands: list[int | None]) -> int | None:
    shape, axes = attributes.get("shape"), attributes.get("axes")
    if isinstance(shape, tuple):
        return len(shape)
    if op == "identity_matrix":
        return 2
    if op == "identity_kernel":
        return 4
    if not operands or any(rank is None for rank in operands):
        return None
    rank = max(rank for rank in operands if rank is not None)
    if isinstance(axes, tuple) and attributes.get("keepdims") == 0:
        return rank - len(axes)
    return rank


def present(graph: TermGraph) -> set[Place]:
    """The operators of a model with their ranks, each also for a rank that is not known."""
    return widened((term.op, len(term.shape)) for term in graph.terms if not term.leaf)


def widened(found: Iterable[Place]) -> set[Place]:
    """``found``, each also for a rank that is not known."""
    return {place for op, rank in found for place in ((op, rank), (op, None))}
