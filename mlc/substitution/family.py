"""A family: the inputs, sizes and operators of which graphs are enumerated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mlc.operators.index import Poly
from mlc.substitution.codec import parse_size
from mlc.substitution.graph import Graph, Node, Ref

__all__ = ["Call", "Family", "Step", "family", "size", "stated"]

#: a step and its operands: names of inputs, or calls
Call: TypeAlias = "tuple[str, *tuple[Call | str, ...]]"


@dataclass(frozen=True)
class Step:
    """An operator with the attributes that a family gives it; sizes among them are polynomials over capitals."""

    op: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.op, str(sorted(self.attributes.items()))))


@dataclass(frozen=True)
class Family:
    """``depth`` is the largest number of operators of a side; ``world`` the value of each letter."""

    name: str
    inputs: Mapping[str, tuple[Poly, ...]]
    steps: tuple[Step, ...]
    depth: int
    world: Mapping[str, int]
    #: at most this many uses of an operator in a graph
    uses: Mapping[str, int] = field(default_factory=dict)
    #: names of filters, which are not convolved with others and do not meet images elsewhere; none where all may meet
    filters: frozenset[str] = frozenset()
    #: whether graphs of the last size are looked at with their inputs in every order
    all_orders: bool = False
    #: places of steps that a graph has once at most
    once: frozenset[int] = frozenset()
    #: whether its rules are kept though others derive them: a search takes only steps that leave less to do, and those
    #: that lead from one to another may do the same otherwise
    derived: bool = False
    #: whether it is a part of the table searched uniformly: of pairs that are instances of one law that law is judged
    uniform: bool = False
    #: inputs that are indices, and of how many elements: they are only moved, gathered and gathered at
    indices: Mapping[str, int] = field(default_factory=dict)
    #: whether near misses are looked for, and made rules by correcting what differs; nothing else is then
    near: bool = False
    #: the sides of the one pair that a family states; nothing is enumerated then
    sides: tuple[Graph, Graph] | None = None
    #: the part of the library that its rules go to
    area: str = ""


def size(text: str | int) -> Poly:
    return parse_size(text)


def family(name: str, depth: int, inputs: Mapping[str, str], steps: str, world: Mapping[str, int] | None = None,
           **uses: int) -> Family:
    """Steps are written as ``op`` or ``op attribute=value …`` separated by semicolons; tuples by commas."""
    letters = {"n": 2, "m": 3, "c": 4, "h": 5, "w": 6, "k": 3, **(world or {})}
    shapes = {label: tuple(size(word) for word in text.split()) for label, text in inputs.items()}
    return Family(name, shapes, tuple(_step(text) for text in steps.split(";")), depth, letters, uses)


def stated(name: str, inputs: Mapping[str, str], source: Call, target: Call) -> Family:
    """The family of one pair, which is proved and kept although others derive it: what no search gets to, since a step
    on the way leaves more to do, or no enumeration, since it has too many operators."""
    made = family(name, 0, inputs, "add")
    return replace(made, steps=(), sides=(_graph(source), _graph(target)))


def _graph(call: Call) -> Graph:
    nodes: list[Node] = []

    def visit(each: Call | str) -> Ref:
        if isinstance(each, str):
            return each
        step, operands = _step(each[0]), tuple(map(visit, each[1:]))
        nodes.append(Node(step.op, operands, dict(step.attributes)))
        return len(nodes) - 1, 0

    output = visit(call)
    return Graph(tuple(nodes), (output,))


def _step(text: str) -> Step:
    op, *words = text.split()
    attributes: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        parts = tuple(_value(part) for part in value.rstrip(",").split(","))
        attributes[name] = parts if "," in value else parts[0]
    return Step(op, attributes)


def _value(text: str) -> Any:
    value = size(text)
    return value if value.constant is None else value.constant
