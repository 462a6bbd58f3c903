"""Small graphs of operators: the two sides of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mlc.operators.operator import Attributes

__all__ = ["Graph", "Node", "Ref"]

#: an input by its name, or an output of a node as (place of the node, place of the output)
Ref: TypeAlias = "str | tuple[int, int]"


@dataclass(frozen=True)
class Node:
    """An operator applied to inputs. Attributes may hold :class:`~mlc.operators.index.Poly` over the rule's sizes."""

    op: str
    inputs: tuple[Ref, ...]
    attributes: Attributes = field(default_factory=dict)


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
