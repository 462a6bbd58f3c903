"""Whether two term graphs over the same leaves compute the same, on random inputs.

Rules are proved; this looks at what was made of them as a whole. Results of opaque leaves are random inputs, and what
the two graphs hand to them is compared like outputs. Over the reals up to rounding, or exactly over the prime field,
where a wrong polynomial passes with a probability below 1e-12.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlc.graph.substitute.terms import INPUT, OPAQUE, Term, TermGraph, freeze
from mlc.operators import OPERATORS
from mlc.operators.evaluate import FIELD, REAL, STRICT, evaluate

__all__ = ["agree", "difference", "identical", "same_where_changed"]

#: largest relative difference in float64
_ROUNDING = 1e-9
#: and between a graph that was taken and the model's own, which may sum long products in another order
_TAKEN = 1e-7
#: multiplications and elements of all tensors up to which a graph that was taken is compared with the model's own
_MOST_PRODUCTS, _MOST_ELEMENTS = 4e10, 2**27
#: multiplications up to which graphs are evaluated over the field as well, whose arithmetic is some 100 times slower
_EXACT = 2e7


def agree(ours: TermGraph, theirs: TermGraph) -> bool:
    """Whether both are the same up to rounding, and exactly over the field where that takes seconds only."""
    if difference(ours, theirs) > _ROUNDING:
        return False
    return max(_products(ours), _products(theirs)) > _EXACT or identical(ours, theirs)


def same_where_changed(own: TermGraph, taken: TermGraph) -> bool | None:
    """Whether two graphs with the same leaves agree on random inputs, some of them 0, wherever the first is finite.

    What both compute in the same way of what does not bear on where they differ is drawn instead of computed, and
    where an operator outside of the language stands between, each side of it is compared on its own. None where even
    that would take long: nothing is said of such graphs.
    """
    for cutting in (True, False):  # what was drawn may hang together, so that only a whole comparison says no
        ours, theirs = _compared(own.live(), taken.live(), cutting)
        if max(map(_products, (ours, theirs))) > _MOST_PRODUCTS or max(map(_elements, (ours, theirs))) > _MOST_ELEMENTS:
            return None
        with np.errstate(all="ignore"):
            pairs = zip(_values(ours, 1, STRICT, zeros=True), _values(theirs, 1, STRICT, zeros=True), strict=True)
            if all(_close(a, b) for a, b in pairs):
                return True
    return False


def _close(own: np.ndarray, taken: np.ndarray) -> bool:
    finite = np.isfinite(own)
    scale = max(float(np.abs(own[finite]).max(initial=0.0)), 1e-30)
    return bool((np.abs(own - taken)[finite] <= _TAKEN * scale).all())


def _elements(graph: TermGraph) -> int:
    return sum(math.prod(term.shape) for term in graph.terms)


def _compared(own: TermGraph, taken: TermGraph, cutting: bool) -> tuple[TermGraph, TermGraph]:
    """The graphs as far as they differ: outputs, and what opaque leaves are given, that are not the same term in both.
    Of the terms that both have, ``cutting`` makes those leaves that are computed of nothing that a differing term
    reads."""
    known: dict[Any, int] = {}

    def numbered(graph: TermGraph) -> list[int]:
        """A number for each term, the same for the same term; an opaque leaf is what it is whatever it is given."""
        found: list[int] = []
        for term in graph.terms:
            inputs = () if term.op == OPAQUE else tuple(found[i] for i in term.inputs)
            found.append(known.setdefault((term.op, inputs, term.attributes, term.shape), len(known)))
        return found

    def checked(graph: TermGraph, names: list[int]) -> list[tuple[int, int]]:
        handed = {t["id"]: t.inputs for t in graph.terms if t.op == OPAQUE}
        roots = [*graph.outputs, *(i for number in both for i in handed[number])]
        return [(place, names[place]) for place in roots]

    opaques = [{t["id"] for t in graph.terms if t.op == OPAQUE} for graph in (own, taken)]
    both = sorted(opaques[0] & opaques[1])

    one, other = numbered(own), numbered(taken)
    pairs = [(a, b) for (a, x), (b, y) in zip(checked(own, one), checked(taken, other), strict=True) if x != y]
    common = set(one) & set(other) if cutting else set[int]()
    read = {names[i] for graph, names in ((own, one), (taken, other)) for place, term in enumerate(graph.terms)
            if names[place] not in common for i in term.inputs} & common
    return tuple(_reduced(graph, names, [pair[side] for pair in pairs], common, read)  # type: ignore[return-value]
                 for side, (graph, names) in enumerate(((own, one), (taken, other))))


def _reduced(graph: TermGraph, names: list[int], roots: list[int], common: set[int], read: set[int]) -> TermGraph:
    """The graph of ``roots``, leaves for the common terms below which nothing stands that a differing term reads."""
    below: list[bool] = []  # whether a term that differing terms read is below, itself left out
    for term in graph.terms:
        inputs = () if term.op == OPAQUE else term.inputs
        below.append(any(below[i] or names[i] in read for i in inputs))
    terms = []
    for place, term in enumerate(graph.terms):
        if term.op == OPAQUE or (names[place] in common and not below[place]):
            term = Term(INPUT, (), freeze(id=names[place]), term.shape)
        terms.append(term)
    return TermGraph(tuple(terms), tuple(roots)).live()


def _products(graph: TermGraph) -> float:
    """Multiplications of the graph's matrix products and convolutions."""
    total = 0.0
    for term in graph.terms:
        products = None if term.leaf else OPERATORS[term.op].products
        if products is not None:
            total += math.prod(term.shape) * products(*(graph.terms[place].shape for place in term.inputs))
    return total


def difference(ours: TermGraph, theirs: TermGraph, seed: int = 0) -> float:
    """The largest difference in float64, relative to the largest element of the tensor that differs."""
    worst = 0.0
    for a, b in zip(_values(ours, seed, REAL), _values(theirs, seed, REAL), strict=True):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            worst = max(worst, 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf"))
        elif a.size:
            worst = max(worst, float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst


def identical(ours: TermGraph, theirs: TermGraph, seed: int = 0) -> bool:
    """Whether both give the same elements of the field of 2^61 - 1 elements."""
    return all(
        np.array_equal(a, b) for a, b in zip(_values(ours, seed, FIELD), _values(theirs, seed, FIELD), strict=True)
    )


def _values(graph: TermGraph, seed: int, arithmetic: object, zeros: bool = False) -> list[np.ndarray]:
    """The outputs, and after them what opaque leaves are given, by the leaves' ids. ``zeros``: each leaf has one."""
    graph = graph.live()
    last = {source: place for place, term in enumerate(graph.terms) for source in term.inputs}
    values: dict[int, np.ndarray] = {}
    handed: dict[int, list[np.ndarray]] = {}
    for place, term in enumerate(graph.terms):
        inputs = [values[source] for source in term.inputs]
        if term.leaf:
            names = {"input": 0, "constant": 1, "opaque": 2}
            rng = np.random.default_rng([seed, names[term.op], term["id"]])
            values[place] = arithmetic.random(rng, term.shape)  # type: ignore[attr-defined]
            if zeros and values[place].size > 1:
                values[place].flat[rng.integers(values[place].size)] = 0.0
            if term.op == OPAQUE:
                handed[term["id"]] = inputs
        else:
            values[place] = evaluate(term.op, inputs, dict(term.attributes), arithmetic)[0]  # type: ignore[arg-type]
        for source in term.inputs:  # large models would not fit whole
            if last[source] == place and source not in graph.outputs:
                values.pop(source, None)
    return [values[place] for place in graph.outputs] + [v for _, each in sorted(handed.items()) for v in each]
