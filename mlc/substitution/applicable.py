"""Whether, in which directions and where a rule can be applied, from its two sides alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from mlc.operators import OPERATORS, Attributes, infer
from mlc.operators.index import Poly, Symbol, as_poly
from mlc.substitution.graph import Graph, Ref
from mlc.substitution.rule import Rule, symbols_of

__all__ = ["Signature", "determined", "directions", "signatures"]

#: an operator and the rank of its result; None for a rank that is not known
Signature: TypeAlias = "tuple[str, int | None]"


def directions(rule: Rule) -> Iterator[bool]:
    """Whether it is ``turned``, for each direction in which a rule can be applied: the source, whose outputs are
    operators' results, says all that the target needs."""
    for turned in (False, True):
        one = rule.turned if turned else rule
        operators = not any(isinstance(output, str) for output in one.source.outputs)
        if operators and set(one.target.inputs) <= set(one.source.inputs) and determined(one):
            yield turned


def determined(rule: Rule) -> bool:
    """Whether every size that the target and the conditions speak of follows from what the source meets: it is a size
    of the source, or the only one unknown, and linear, in one."""
    source, target = (_values(rule, side) for side in (rule.source, rule.target))
    known: set[str] = set()
    while True:
        found = {name for poly in source for name in _told(poly, known)} - known
        if not found:
            break
        known |= found
    return symbols_of(tuple(target)) <= known and all(each.poly.symbols <= known for each in rule.conditions)


def _values(rule: Rule, side: Graph) -> set[Poly]:
    """The sizes of a side: of the inputs that it reads, and among its attributes."""
    values: list[Any] = [size for name in side.inputs for size in rule.shapes[name]]
    for node in side.nodes:
        for value in node.attributes.values():
            values += value if isinstance(value, tuple) else (value,)
    return {as_poly(value) for value in values if not isinstance(value, str)}


def _told(poly: Poly, known: set[str]) -> Iterator[str]:
    """The size that the value of a polynomial tells."""
    unknown = poly.symbols - known
    if len(unknown) == 1:
        [name] = unknown
        if poly == Poly.symbol(name) or all(
                sum(name in Poly.atom(atom).symbols for atom in monomial) <= (Symbol(name) in monomial)
                for monomial, _ in poly.terms):
            yield name


def signatures(graph: Graph, shapes: Mapping[str, tuple[Poly, ...]]) -> frozenset[Signature]:
    """The operators of a side of a rule with their ranks."""
    ranks: dict[Ref, int | None] = {name: len(shape) for name, shape in shapes.items()}
    for place, node in enumerate(graph.nodes):
        operands = [ranks.get(ref) for ref in node.inputs]
        ranks[place, 0] = _rank(node.op, dict(node.completed), operands)
    return frozenset((node.op, ranks[place, 0]) for place, node in enumerate(graph.nodes))


def _rank(op: str, attributes: Attributes, operands: list[int | None]) -> int | None:
    known = OPERATORS[op]
    if not known.arity:
        return len(infer(op, (), attributes)[0])
    shape, axes = attributes.get("shape"), attributes.get("axes")
    if isinstance(shape, tuple):
        return len(shape)
    if any(rank is None for rank in operands):
        return None
    if op == "gather":
        return sum(rank for rank in operands if rank is not None) - 1
    rank = max(rank for rank in operands if rank is not None)
    if isinstance(axes, tuple) and attributes.get("keepdims") == 0:
        return rank - len(axes)
    return rank
