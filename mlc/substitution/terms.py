"""A graph in the rule language: operators of the table over leaves, with concrete shapes.

Leaves are inputs of the region, constants, and the results of operators that the table lacks. Of those the operands
are known too, so that one graph holds a whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mlc.operators import OPERATORS
from mlc.operators.shapes import fixed

__all__ = ["CONSTANT", "INPUT", "LEAVES", "OPAQUE", "Attributes", "Term", "TermBuilder", "TermGraph", "freeze", "whole"]

#: an attribute: an integer, a word or a tuple of integers, by name and in the order of the names
Attributes: TypeAlias = "tuple[tuple[str, Any], ...]"

#: the operators of leaves; the attribute ``id`` says which, and ``whole=0`` that elements of it may be undefined
LEAVES = INPUT, CONSTANT, OPAQUE = "input", "constant", "opaque"


def whole(op: str, attributes: Attributes, inputs: Iterable[bool]) -> bool:
    """Whether all elements of a term are defined (finite, but for overflow), given whether those of its inputs are."""
    known = OPERATORS.get(op)
    return all(inputs) and not (known is not None and known.partial) and ("whole", 0) not in attributes


def freeze(**attributes: Any) -> Attributes:
    """Attributes as they are kept: sorted by name, sequences as tuples."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list | tuple) else v) for k, v in attributes.items()))


@dataclass(frozen=True)
class Term:
    """An operator applied to earlier terms of a graph, by their places. ``shape`` is what comes out: numbers, and
    expressions of free dimensions (:class:`mlc.sizes.Size`)."""

    op: str
    inputs: tuple[int, ...]
    attributes: Attributes
    shape: tuple[int, ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def leaf(self) -> bool:
        """Whether it is no operator of the table."""
        return self.op in LEAVES


@dataclass(frozen=True)
class TermGraph:
    """``terms`` in topological order and the places of what the graph returns."""

    terms: tuple[Term, ...]
    outputs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.terms)

    def operators(self) -> set[tuple[str, int]]:
        """The operators of the table that are in it, with the ranks of their results."""
        return {(term.op, len(term.shape)) for term in self.terms if not term.leaf}

    def readers(self) -> dict[int, list[int]]:
        """For each term, the indices of the terms that read it."""
        found: dict[int, list[int]] = {i: [] for i in range(len(self.terms))}
        for place, term in enumerate(self.terms):
            for source in term.inputs:
                found[source].append(place)
        return found

    def constant_places(self) -> set[int]:
        """The places whose value depends on constants alone; what has a free size is none."""
        known: set[int] = set()
        for place, term in enumerate(self.terms):
            made = not term.leaf and fixed(term.shape) and all(source in known for source in term.inputs)
            if term.op == CONSTANT or made:
                known.add(place)
        return known

    def whole_places(self) -> set[int]:
        """The places of tensors whose elements are all defined."""
        known: set[int] = set()
        for place, term in enumerate(self.terms):
            if whole(term.op, term.attributes, (source in known for source in term.inputs)):
                known.add(place)
        return known

    def live(self) -> TermGraph:
        """The graph without terms that no output depends on; others keep their order."""
        needed = set(self.outputs)
        for place in range(len(self.terms) - 1, -1, -1):
            if place in needed:
                needed.update(self.terms[place].inputs)
        image = {place: i for i, place in enumerate(sorted(needed))}
        terms = (self.terms[place] for place in sorted(needed))
        return TermGraph(
            tuple(Term(t.op, tuple(image[s] for s in t.inputs), t.attributes, t.shape) for t in terms),
            tuple(image[place] for place in self.outputs),
        )


@dataclass
class TermBuilder:
    """Adds terms to a graph; an equal one is added once."""

    terms: list[Term] = field(default_factory=list)
    _places: dict[Term, int] = field(default_factory=dict)

    def add(self, op: str, inputs: Sequence[int], sizes: Sequence[int], /, **attributes: Any) -> int:
        """The place of a term with a shape of ``sizes``."""
        return self.put(Term(op, tuple(inputs), freeze(**attributes), tuple(sizes)))

    def put(self, term: Term) -> int:
        if term not in self._places:
            self._places[term] = len(self.terms)
            self.terms.append(term)
        return self._places[term]

    def forget(self, count: int) -> None:
        """Keep the first ``count`` terms only."""
        for term in self.terms[count:]:
            del self._places[term]
        del self.terms[count:]

    def shape(self, place: int) -> tuple[int, ...]:
        return self.terms[place].shape

    def graph(self, outputs: Sequence[int]) -> TermGraph:
        return TermGraph(tuple(self.terms), tuple(outputs))
