"""Small graphs of operators: the two sides of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mlc.operators.index import Poly
from mlc.operators.operator import OPERATORS, Attributes

__all__ = ["Graph", "Node", "Ref", "concrete"]

#: an input by its name, or an output of a node as (place of the node, place of the output)
Ref: TypeAlias = "str | tuple[int, int]"


@dataclass(frozen=True)
class Node:
    """An operator applied to inputs. Attributes may hold :class:`~mlc.operators.index.Poly` over the rule's sizes."""

    op: str
    inputs: tuple[Ref, ...]
    attributes: Attributes = field(default_factory=dict)

    @property
    def completed(self) -> Attributes:
        """All attributes, those with defaults too; "valid" is no padding."""
        given = {**OPERATORS[self.op].defaults, **self.attributes}
        return {**given, "padding": (0, 0, 0, 0)} if given.get("padding") == "valid" else given


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order and what the graph returns."""

    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that are read, in order of first use."""
        refs = [ref for node in self.nodes for ref in node.inputs] + list(self.outputs)
        return tuple(dict.fromkeys(ref for ref in refs if isinstance(ref, str)))


#: shapes of inputs by name: a size is an integer, or an expression over the rule's size symbols
Shapes: TypeAlias = Mapping[str, "tuple[object, ...]"]


def concrete(value: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with its symbols replaced by integers, or by sizes that behave as such."""
    if isinstance(value, Poly):
        return value.evaluate(sizes)
    return tuple(concrete(v, sizes) for v in value) if isinstance(value, tuple) else value
