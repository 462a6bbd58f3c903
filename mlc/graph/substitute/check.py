"""Compares two term graphs over the same leaves numerically, on random inputs.

Rules are proved; this looks at what was made of them as a whole. Results of opaque leaves are random inputs, and what
the two graphs hand to them is compared like outputs. Over the reals up to rounding, or exactly over the prime field,
where a wrong polynomial passes with a probability below 1e-12. Graphs with free sizes are compared at some that are
admitted: the smallest and the largest among them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import FIELD, REAL, STRICT, STRICT_SINGLE, Arithmetic
from mlc.operators.evaluate import evaluate
from mlc.shapes import Free
from mlc.sizes import Size, depends_on, evaluated, in_scope
from mlc.substitution.terms import CONSTANT, INPUT, OPAQUE, Term, TermGraph, freeze

__all__ = ["agree", "difference", "identical", "same_where_changed"]

#: the values of a leaf by its operator, its number and its shape
_Leaf: TypeAlias = Callable[[str, int, tuple[int, ...]], np.ndarray]

#: largest relative difference in float64
_ROUNDING = 1e-9
#: and between a graph that was taken and the model's own, which may sum long products in another order
_TAKEN = 1e-7
#: the same in float32
_ROUNDED = 1e-4
#: multiplications and elements of all tensors up to which a graph that was taken is compared with the model's own: two
#: tenths of a second in float32 for each graph on two cores, a part of what the search of such a model takes
_MOST_PRODUCTS, _MOST_ELEMENTS = 1e10, 2**27
#: multiplications up to which graphs are evaluated over the field as well, whose arithmetic is some 100 times slower
_EXACT = 2e7
#: how many random numbers there are for the leaves of a graph that was taken
_ROW = 262139


def agree(ours: TermGraph, theirs: TermGraph) -> bool:
    """Whether both are the same up to rounding, and exactly over the field where that takes seconds only."""
    return all(_agree(*each) for each in _sized(ours, theirs))


def _agree(ours: TermGraph, theirs: TermGraph) -> bool:
    if difference(ours, theirs) > _ROUNDING:
        return False
    return max(_products(ours), _products(theirs)) > _EXACT or identical(ours, theirs)


def same_where_changed(own: TermGraph, taken: TermGraph) -> bool | None:
    """Whether two graphs with the same leaves agree on random inputs, some of them 0, wherever the first is finite.

    What both compute in the same way of what does not bear on where they differ is drawn instead of computed, and
    where an operator outside of the language stands between, each side of it is compared on its own. It takes float32
    to say yes, as rounding is small beside what a wrong graph changes, and float64 to say no. None where even that
    would take long, at the largest sizes perhaps: nothing is said of such graphs.
    """
    found = [_same_where_changed(*each) for each in _sized(own, taken)]
    return False if False in found else None if None in found else True


def _sized(own: TermGraph, taken: TermGraph) -> Iterator[tuple[TermGraph, TermGraph]]:
    """The graphs with numbers for free sizes, at points of what these admit."""
    names = {name for graph in (own, taken) for term in graph.terms for size in _free(term.shape)
             for name in depends_on(size.expr)}
    for point in _points([in_scope()[name] for name in sorted(names)]):
        yield _at(own, point), _at(taken, point)


def _points(free: Sequence[Free]) -> list[dict[str, int]]:
    """All the smallest, all the usual, all the largest sizes; of several, each by itself the largest among the
    smallest; and one between the ends of all. Just one point where nothing is free."""
    rng = np.random.default_rng(len(free))
    low, high = {each.name: each.range.low for each in free}, {each.name: each.range.high for each in free}
    between = {each.name: int(rng.integers(each.range.low, each.range.high, endpoint=True)) for each in free}
    found = [low, {each.name: each.usual for each in free}, high, between,
             *({**low, each.name: each.range.high} for each in free)]
    return [point for place, point in enumerate(found) if point not in found[:place]]


def _free(value: Any) -> Iterator[Size]:
    """The sizes that are no numbers in a shape or in attributes."""
    if isinstance(value, Size):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _free(each)


def _at(graph: TermGraph, sizes: Mapping[str, int]) -> TermGraph:
    """The graph for free dimensions of these sizes."""
    if not sizes:
        return graph
    known = {size: evaluated(size.expr, sizes)
             for term in graph.terms for size in _free((term.shape, term.attributes))}

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(number, value))
        return known[value] if isinstance(value, Size) else value

    return TermGraph(tuple(Term(t.op, t.inputs, number(t.attributes), number(t.shape)) for t in graph.terms),
                     graph.outputs)


def _same_where_changed(own: TermGraph, taken: TermGraph) -> bool | None:
    """:func:`same_where_changed` of graphs whose sizes are numbers."""
    graphs = own.live(), taken.live()
    # what was drawn may hang together, so that only a whole comparison says no
    for cutting, arithmetic, most in ((True, STRICT_SINGLE, _ROUNDED), (True, STRICT, _TAKEN), (False, STRICT, _TAKEN)):
        ours, theirs = _compared(*graphs, cutting)
        if max(map(_products, (ours, theirs))) > _MOST_PRODUCTS or max(map(_elements, (ours, theirs))) > _MOST_ELEMENTS:
            return None
        leaf = _indexed(_leaves(arithmetic), (ours, theirs), arithmetic)
        with np.errstate(all="ignore"):
            pairs = zip(_values(ours, leaf, arithmetic), _values(theirs, leaf, arithmetic), strict=True)
            if all(_close(a, b, most) for a, b in pairs):
                return True
    return False


def _leaves(arithmetic: Arithmetic) -> _Leaf:
    """Random elements, one of each leaf 0. A leaf is a part of one row of numbers, begun anew after its prime length:
    to draw large weights would take longer than to multiply them."""
    row = arithmetic.random(np.random.default_rng(1), (_ROW,))

    @cache
    def leaf(op: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
        begin, count = zlib.crc32(f"{op} {number}".encode()) % _ROW, math.prod(shape)
        values = np.resize(np.roll(row, -begin) if begin + count > _ROW else row[begin : begin + count], shape)
        if count > 1:
            values.flat[begin % count] = 0.0
        return values

    return leaf


def _indexed(leaf: _Leaf, graphs: Sequence[TermGraph], arithmetic: Arithmetic) -> _Leaf:
    """The leaves, of which those that the graphs gather at are indices of the shortest of the axes."""
    extents: dict[tuple[str, int], int] = {}

    def note(graph: TermGraph, place: int, extent: int) -> None:
        term = graph.terms[place]
        if term.leaf:
            key = term.op, term["id"]
            extents[key] = min(extent, extents.get(key, extent))
        for source in () if term.leaf else term.inputs[:1] if term.op == "gather" else term.inputs:
            note(graph, source, extent)

    for graph in graphs:
        for term in graph.terms:
            if term.op == "gather":
                table, indices = term.inputs
                note(graph, indices, graph.terms[table].shape[term["axis"]])

    def drawn(op: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
        if (op, number) not in extents:
            return leaf(op, number, shape)
        seed = [zlib.crc32(f"{op} {number}".encode()), extents[op, number]]
        return arithmetic.integers(np.random.default_rng(seed).integers(0, extents[op, number], shape))

    return drawn


def _close(own: np.ndarray, taken: np.ndarray, most: float) -> bool:
    finite = np.isfinite(own)
    scale = max(float(np.abs(own[finite]).max(initial=0.0)), 1e-30)
    return bool((np.abs(own - taken)[finite] <= most * scale).all())


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
            term = Term(INPUT, (), freeze(id=-1 - names[place]), term.shape)  # not the number of an input of the model
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
    worst, leaf = 0.0, _indexed(_independent(seed, REAL), (ours, theirs), REAL)
    for a, b in zip(_values(ours, leaf, REAL), _values(theirs, leaf, REAL), strict=True):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            worst = max(worst, 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf"))
        elif a.size:
            worst = max(worst, float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst


def identical(ours: TermGraph, theirs: TermGraph, seed: int = 0) -> bool:
    """Whether both give the same elements of the field of 2^61 - 1 elements."""
    leaf = _indexed(_independent(seed, FIELD), (ours, theirs), FIELD)
    pairs = zip(_values(ours, leaf, FIELD), _values(theirs, leaf, FIELD), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _independent(seed: int, arithmetic: Arithmetic) -> _Leaf:
    """Random elements, each drawn for itself."""
    kinds = (INPUT, CONSTANT, OPAQUE)
    return lambda op, number, shape: arithmetic.random(np.random.default_rng([seed, kinds.index(op), number]), shape)


def _values(graph: TermGraph, leaf: _Leaf, arithmetic: Arithmetic) -> list[np.ndarray]:
    """The outputs, and after them what opaque leaves are given, by the leaves' ids; ``leaf`` gives the leaves."""
    graph = graph.live()
    last = {source: place for place, term in enumerate(graph.terms) for source in term.inputs}
    values: dict[int, np.ndarray] = {}
    handed: dict[int, list[np.ndarray]] = {}
    for place, term in enumerate(graph.terms):
        inputs = [values[source] for source in term.inputs]
        if term.leaf:
            values[place] = leaf(term.op, term["id"], term.shape)
            if term.op == OPAQUE:
                handed[term["id"]] = inputs
        else:
            values[place] = evaluate(term.op, inputs, dict(term.attributes), arithmetic)[0]
        for source in term.inputs:  # large models would not fit whole
            if last[source] == place and source not in graph.outputs:
                values.pop(source, None)
    return [values[place] for place in graph.outputs] + [v for _, each in sorted(handed.items()) for v in each]
