"""The two sides of a rule as symbolic tensors, composed of the operators' specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlc.operators import OPERATORS, Requirements, ShapeError, Tensor, tensor_input
from mlc.operators.index import Condition, Poly, as_poly
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.rule import Rule

__all__ = ["compose", "with_sizes"]


def compose(graph: Graph, shapes: Mapping[str, Sequence[Poly | int]]) -> tuple[list[Tensor], list[Condition]]:
    """The outputs of a graph and what its operators demand of the sizes.

    Raises :class:`~mlc.operators.ShapeError` for an unknown operator, a wrong arity, unknown attributes, an unbound
    input, and for shapes that can't fit.
    """
    require = Requirements()
    known: dict[Ref, Tensor] = {name: tensor_input(name, shape) for name, shape in shapes.items()}

    def at(ref: Ref) -> Tensor:
        if ref not in known:
            raise ShapeError(f"every input must be bound, but {ref} is not")
        return known[ref]

    for place, node in enumerate(graph.nodes):
        if node.op not in OPERATORS:
            raise ShapeError(f"no operator is named {node.op}; there are {', '.join(sorted(OPERATORS))}")
        try:
            results = OPERATORS[node.op](require, [at(r) for r in node.inputs], node.attributes)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, ShapeError):
                raise
            raise ShapeError(f"{node.op} cannot take the attributes {dict(node.attributes)}: {error}") from error
        for output, tensor in enumerate(results):
            known[place, output] = tensor
    return [at(ref) for ref in graph.outputs], [condition for condition, _ in require.conditions]


def with_sizes(rule: Rule, values: Mapping[str, Poly]) -> Rule:
    """The rule with size symbols replaced; it has no certificate."""

    def of(value: Any) -> Any:
        if isinstance(value, Poly):
            return value.substitute(values)
        return tuple(map(of, value)) if isinstance(value, tuple) else value

    def graph(side: Graph) -> Graph:
        return Graph(tuple(Node(n.op, n.inputs, {k: of(v) for k, v in n.attributes.items()}) for n in side.nodes),
                     side.outputs)

    shapes = {name: tuple(as_poly(s).substitute(values) for s in shape) for name, shape in rule.shapes.items()}
    conditions = (c.substitute(values) for c in rule.conditions)
    return Rule(rule.name, shapes, graph(rule.source), graph(rule.target), tuple(conditions))
