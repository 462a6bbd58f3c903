"""Fingerprints of graphs: their values at random points of the prime field of 2^61 - 1 elements.

Two graphs that differ as polynomials differ at a random point with probability at least 1 - degree / 2^61 (Schwartz,
Zippel). Several assignments of sizes, all distinct and some ones, tell apart what agrees only where sizes coincide.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import FIELD
from mlc.operators.evaluate import evaluate
from mlc.operators.index import as_poly
from mlc.operators.tensor import ShapeError
from mlc.substitution.graph import Graph, concrete
from mlc.substitution.indices import extents, random_indices
from mlc.substitution.prove import Refuted
from mlc.substitution.refute import at_sizes, judge
from mlc.substitution.rule import Rule
from mlc.substitution.unify import products

__all__ = ["agree", "assignments", "random_input", "values_of"]

Array = Any


def random_input(name: str, shape: tuple[int, ...], extent: int | None = None) -> Array:
    """The field elements of the input ``name``: the same for equal names and shapes; indices where it has an extent."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *shape])
    return FIELD.random(rng, shape) if extent is None else random_indices(rng, shape, extent).astype(FIELD.dtype)


def values_of(graph: Graph, inputs: Mapping[str, Array], sizes: Mapping[str, int]) -> list[Array]:
    """The outputs over the field; raises :class:`~mlc.operators.ShapeError` where the graph is ill-formed."""
    known: dict[Any, Array] = dict(inputs)
    for place, node in enumerate(graph.nodes):
        attributes = {name: concrete(value, sizes) for name, value in node.attributes.items()}
        [known[place, 0]] = evaluate(node.op, [known[ref] for ref in node.inputs], attributes, FIELD)
    return [known[ref] for ref in graph.outputs]


def assignments(rule: Rule, count: int, seed: int = 0, largest: int = 5) -> Iterator[dict[str, int]]:
    """Different sizes that the precondition admits, small ones and with few repetitions; one of them is often 1."""
    rng = np.random.default_rng(seed)
    names = rule.symbols
    equations = [sides for c in rule.conditions if c.relation == "==" and (sides := products(c.poly))]
    seen: set[tuple[int, ...]] = set()
    for attempt in range(60 * count):
        if len(seen) == count:
            return
        if attempt % 2 == 0 and len(names) <= 2 * largest and not equations:
            drawn = rng.permutation(max(largest, len(names)))[: len(names)] + 1
        else:
            # most are 1 or 2 in some rounds, so that demands on many sizes together are met
            drawn = rng.integers(1, 3 + attempt % (largest - 1), len(names))
        # extents of images leave room for windows
        drawn = np.where([name[0] in "hw" for name in names], drawn + attempt % 7, drawn)
        sizes = dict(zip(names, map(int, drawn), strict=True))
        for left, right in equations:
            _equalise(left, right, sizes, rng)
        shapes = [size.evaluate(sizes) for shape in rule.shapes.values() for size in map(as_poly, shape)]
        fits = all(1 <= size <= 24 for size in shapes) and all(c.evaluate(sizes) for c in rule.conditions)
        if fits and tuple(sizes.values()) not in seen:
            seen.add(tuple(sizes.values()))
            yield sizes


def _equalise(left: Sequence[str], right: Sequence[str], sizes: dict[str, int], rng: np.random.Generator) -> None:
    """Draws the sizes of ``right`` anew so that their product is that of ``left``, if they are others."""
    if set(left) & set(right) or len(set(right)) < len(right):
        return
    rest, factor = prod(sizes[name] for name in left), 2
    sizes |= dict.fromkeys(right, 1)
    while rest > 1:
        if rest % factor:
            factor += 1
            continue
        rest //= factor
        sizes[right[int(rng.integers(len(right)))]] *= factor


def agree(rule: Rule, sizes: Mapping[str, int]) -> bool:
    """Whether both sides are well-formed and equal at a random point for these sizes, and the target is defined at
    points with zeros wherever the source is."""
    shapes = {n: tuple(int(s.evaluate(sizes)) for s in map(as_poly, shape)) for n, shape in rule.shapes.items()}
    try:
        indices = extents(at_sizes(rule, sizes).source, shapes)
        inputs = {name: random_input(name, shape, indices.get(name)) for name, shape in shapes.items()}
        left, right = values_of(rule.source, inputs, sizes), values_of(rule.target, inputs, sizes)
    except ShapeError:
        return False
    if not all(a.shape == b.shape and np.array_equal(a, b) for a, b in zip(left, right, strict=True)):
        return False
    partial = any(OPERATORS[node.op].partial for node in rule.target.nodes)
    return not partial or not isinstance(judge(rule, sizes), Refuted)
