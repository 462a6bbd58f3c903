"""Enumerates the graphs of a family by number of operators, at one set of sizes, with one representative per value.

A graph is only extended through the representatives of its parts; every other graph with the same value makes a pair
with the representative. Commutative operators take their operands in one order. Graphs of the last size
are looked at with their inputs in order of use, since permuting inputs of one shape gives the rest; where two such
graphs use them in different orders (an interchange), the family asks for all orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from mlc.operators import OPERATORS, operators_where
from mlc.operators.arithmetic import FIELD
from mlc.operators.evaluate import evaluate
from mlc.operators.tensor import ShapeError
from mlc.substitution.family import Family, Step
from mlc.substitution.fingerprint import random_input
from mlc.substitution.graph import Graph, Node, Ref, concrete

__all__ = ["Counts", "Term", "graphs", "pairs", "term_graph"]

COMMUTATIVE = operators_where(lambda each: each.commutative)


@dataclass(frozen=True, eq=False)
class Term:
    """A step applied to terms, or an input; ``nodes`` are the places of all operators in it, shared ones once."""

    number: int
    step: Step | None
    operands: tuple[Term, ...]
    inputs: tuple[str, ...]
    nodes: frozenset[int]
    value: Any


@dataclass
class Counts:
    """How many graphs were evaluated and how many values they have."""

    graphs: int = 0
    values: int = 0


def pairs(family: Family, counts: Counts) -> Iterator[tuple[Term, Term]]:
    """(representative, other) for graphs with equal values, those with few operators first."""
    return ((known, made) for known, made in graphs(family, counts) if known is not None)


def graphs(family: Family, counts: Counts) -> Iterator[tuple[Term | None, Term]]:
    """All graphs, those with few operators first, each behind the representative of its value: None where it is the
    first with it."""
    sizes = dict(family.world)
    known: dict[bytes, Term] = {}
    levels: list[list[Term]] = [[]]
    for name, shape in family.inputs.items():
        value = random_input(name, tuple(int(s.evaluate(sizes)) for s in shape), family.indices.get(name))
        term = Term(len(known), None, (), (name,), frozenset(), value)
        known[_key(value)] = term
        levels[0].append(term)
    number = len(known)
    for size in range(1, family.depth + 1):
        level: list[Term] = []
        for step, operands, nodes in _combinations(family, levels, size):
            inputs = tuple(dict.fromkeys(name for term in operands for name in term.inputs))
            if size == family.depth and not family.all_orders and not _in_order(family, inputs):
                continue
            attributes = {name: concrete(value, sizes) for name, value in step.attributes.items()}
            try:
                [value] = evaluate(step.op, [term.value for term in operands], attributes, FIELD)
            except ShapeError:
                continue
            counts.graphs += 1
            number += 1
            made = Term(number, step, operands, inputs, nodes | {number}, value)
            key = _key(value)
            yield known.get(key), made
            if key not in known:
                known[key] = made
                level.append(made)
        levels.append(level)
        counts.values += len(level)


def _combinations(family: Family, levels: list[list[Term]], size: int) -> Iterator[tuple[Step, Any, frozenset[int]]]:
    """Steps with operands such that all operators together are ``size``."""
    below = _Below(levels)
    for place, step in enumerate(family.steps):
        arity = OPERATORS[step.op].arity
        if arity == 0:
            if size == 1:
                yield step, (), frozenset()
            continue
        for operands in below.operands(arity, size - 1):
            nodes = operands[0].nodes if arity == 1 else operands[0].nodes | operands[1].nodes
            # two inputs in both orders, so that commutativity itself is found
            if step.op in COMMUTATIVE and operands[0].number > operands[1].number and size > 1:
                continue
            if family.indices and not _indices_fit(family.indices, step.op, operands):
                continue
            if family.filters and not _roles_fit(family.filters, step.op, operands):
                continue
            if place in family.once and any(step == part.step for part in _parts(operands)):
                continue
            if step.op in family.uses and _uses(step.op, operands) >= family.uses[step.op]:
                continue
            yield step, operands, nodes


class _Below:
    """The terms so far by their number of operators, and which have which."""

    def __init__(self, levels: list[list[Term]]) -> None:
        self._levels = levels
        self._with: list[dict[int, list[Term]]] = []
        self._of: dict[frozenset[int], list[Term]] = {}
        for level in levels:
            having: dict[int, list[Term]] = {}
            for term in level:
                self._of.setdefault(term.nodes, []).append(term)
                for node in term.nodes:
                    having.setdefault(node, []).append(term)
            self._with.append(having)

    def operands(self, arity: int, total: int) -> Iterator[tuple[Term, ...]]:
        """One or two terms that have ``total`` operators together, shared ones once, in the order of their numbers."""
        if arity == 1:
            yield from ((term,) for term in self._levels[total])
            return
        for one in (term for level in self._levels for term in level):
            for other in self._beside(one.nodes, total):
                yield one, other

    def _beside(self, nodes: frozenset[int], total: int) -> Iterator[Term]:
        fresh = total - len(nodes)
        for count, level in enumerate(self._levels):
            if count == fresh:
                yield from (term for term in level if nodes.isdisjoint(term.nodes))
            elif count > fresh == 0:
                parts = map(frozenset, combinations(nodes, count))
                yield from sorted((term for part in parts for term in self._of.get(part, ())),
                                  key=lambda term: term.number)
            elif count > fresh:
                shared = {term.number: term for node in nodes for term in self._with[count].get(node, ())
                          if len(nodes | term.nodes) == total}
                yield from (shared[number] for number in sorted(shared))


def _roles_fit(filters: frozenset[str], op: str, operands: tuple[Term, ...]) -> bool:
    """Whether convolutions take an image and a filter and no other convolution's result, and other operators only
    images or only filters."""
    roles = [all(name in filters for name in term.inputs) for term in operands]
    if op == "conv2d":
        return roles == [False, True] and not _uses(op, operands)
    return op == "mul" or len(set(roles)) == 1


def _indices_fit(indices: Mapping[str, int], op: str, operands: tuple[Term, ...]) -> bool:
    """Whether tensors of indices are only moved, with each other, and gathers are of others at such."""
    kinds = [_is_index(indices, term) for term in operands]
    if op == "gather":
        return kinds == [False, True]
    return not any(kinds) or (all(kinds) and OPERATORS[op].movement)


def _is_index(indices: Mapping[str, int], term: Term) -> bool:
    return term.inputs[0] in indices if term.step is None else _is_index(indices, term.operands[0])


def _uses(op: str, operands: tuple[Term, ...]) -> int:
    return sum(term.step is not None and term.step.op == op for term in _parts(operands))


def _parts(operands: tuple[Term, ...]) -> Iterable[Term]:
    """All terms below, each once."""
    seen: dict[int, Term] = {}
    stack = list(operands)
    while stack:
        term = stack.pop()
        if term.number not in seen:
            seen[term.number] = term
            stack.extend(term.operands)
    return seen.values()


def _in_order(family: Family, inputs: tuple[str, ...]) -> bool:
    """Whether inputs of one shape are first used in the order in which the family names them."""
    names, seen = list(family.inputs), set(inputs)
    for place, name in enumerate(inputs):
        for other in names[: names.index(name)]:
            if family.inputs[other] == family.inputs[name] and (other not in seen or inputs.index(other) > place):
                return False
    return True


def _key(value: Any) -> bytes:
    array = np.ascontiguousarray(value)
    return hashlib.blake2b(array.tobytes(), digest_size=16, salt=str(array.shape).encode()[:16]).digest()


def term_graph(*terms: Term) -> Graph:
    """The graph of terms, shared parts once, operators in the order of their numbers."""
    places: dict[int, Ref] = {}
    nodes: list[Node] = []

    def visit(term: Term) -> Ref:
        if term.step is None:
            return term.inputs[0]
        if term.number not in places:
            inputs = tuple(visit(operand) for operand in term.operands)
            nodes.append(Node(term.step.op, inputs, dict(term.step.attributes)))
            places[term.number] = (len(nodes) - 1, 0)
        return places[term.number]

    outputs = tuple(visit(term) for term in terms)
    return Graph(tuple(nodes), outputs)
