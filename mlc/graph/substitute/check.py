"""Whether two term graphs over the same leaves compute the same, on random inputs.

Rules are proved; this looks at what was made of them as a whole. Results of opaque leaves are random inputs, and what
the two graphs hand to them is compared like outputs. Over the reals up to rounding, or exactly over the prime field,
where a wrong polynomial passes with a probability below 1e-12.
"""

from __future__ import annotations

import math

import numpy as np

from mlc.graph.substitute.terms import OPAQUE, TermGraph
from mlc.operators.evaluate import FIELD, REAL, evaluate

__all__ = ["agree", "difference", "identical"]

#: largest relative difference in float64
_ROUNDING = 1e-9
#: multiplications up to which graphs are evaluated over the field as well, whose arithmetic is some 100 times slower
_EXACT = 2e7


def agree(ours: TermGraph, theirs: TermGraph) -> bool:
    """Whether both are the same up to rounding, and exactly over the field where that takes seconds only."""
    if difference(ours, theirs) > _ROUNDING:
        return False
    return max(_products(ours), _products(theirs)) > _EXACT or identical(ours, theirs)


def _products(graph: TermGraph) -> float:
    """Multiplications of the graph's matrix products and convolutions."""
    total = 0.0
    for term in graph.terms:
        if term.op in ("matmul", "conv2d"):
            weight = graph.terms[term.inputs[1]].shape
            total += math.prod(term.shape) * (weight[-2] if term.op == "matmul" else math.prod(weight[1:]))
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


def _values(graph: TermGraph, seed: int, arithmetic: object) -> list[np.ndarray]:
    """The outputs, and after them what opaque leaves are given, by the leaves' ids."""
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
            if term.op == OPAQUE:
                handed[term["id"]] = inputs
        else:
            values[place] = evaluate(term.op, inputs, dict(term.attributes), arithmetic)[0]  # type: ignore[arg-type]
        for source in term.inputs:  # large models would not fit whole
            if last[source] == place and source not in graph.outputs:
                values.pop(source, None)
    return [values[place] for place in graph.outputs] + [v for _, each in sorted(handed.items()) for v in each]
