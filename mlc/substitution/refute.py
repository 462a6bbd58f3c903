"""Counterexamples: small sizes and integer values at which both sides differ, or the target is ill-formed.

Both sides are evaluated by the operators' evaluation over float64 at small integers, where sums of products are exact.
Elements of the source that are not defined (a division by zero, the logarithm of a negative number) count for nothing,
but the target's must be defined wherever the source's are: inputs of 0 are among those tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.operators import OPERATORS, ShapeError
from mlc.operators.evaluate import STRICT, evaluate
from mlc.operators.index import Condition, Poly, as_poly
from mlc.substitution.assume import assumed
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.graph import Graph
from mlc.substitution.indices import extents, random_indices
from mlc.substitution.rule import Rule

__all__ = ["Refuted", "at_sizes", "compared", "defined_somewhere", "draw_sizes", "find_counterexample", "judge", "run",
           "spoiling"]

_CHOICES = (1, 1, 2, 2, 3, 3, 4, 5, 6)
_ELEMENTS, _TOLERANCE = 4000, 1e-6
#: elements of all inputs together up to which each input is tried as zeros alone
_FEW = 64
#: draws of values for a rule of few sizes
_SEEDS = 12


@dataclass(frozen=True)
class Refuted:
    """A counterexample: ``sizes`` by symbol, ``shapes`` and ``values`` of the inputs (nested lists; none if the target
    is ill-formed), and in ``reason`` what differs."""

    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Any]
    reason: str


def find_counterexample(rule: Rule, tries: int = 60, seed: int = 0) -> Refuted | None:
    """The counterexample with the fewest elements of those that ``tries`` random sizes give, None if none does."""
    drawn = draw_sizes(rule, tries, seed)
    for again in range(max(1, _SEEDS // max(1, len(drawn)))):
        for sizes in drawn:
            found = judge(rule, sizes, again)
            if isinstance(found, Refuted):
                return found
    return None


def draw_sizes(rule: Rule, number: int, seed: int = 0) -> list[dict[str, int]]:
    """Sizes that the rule admits and at which its source is well-formed, few elements first.

    Well-formed as the rule writes it: where it adds tensors of equal sizes, none of them broadcasts, though numbers
    would. So does the matcher find it.
    """
    given = assumed(rule)
    _, demands = compose(rule.source, rule.shapes)
    free = sorted({s for p in given.values.values() for s in p.symbols} | (set(given.symbols) - set(given.values)))
    rng = random.Random(seed)
    found: dict[tuple[int, ...], dict[str, int]] = {}
    for attempt in range(number * 12):
        if len(found) >= number:
            break
        if attempt % 3:
            drawn = {s: rng.choice(_CHOICES) for s in free}
        else:
            few = rng.sample((1, 2, 3, 4, 5), 2)
            drawn = {s: rng.choice(few) for s in free}
        sizes = {s: int(given.values[s].evaluate(drawn)) if s in given.values else drawn[s] for s in given.symbols}
        if min(sizes.values(), default=1) < 1 or not _admitted(rule, sizes, demands):
            continue
        found[tuple(sizes.values())] = sizes
    return sorted(found.values(), key=lambda s: (_elements(rule, s), sum(s.values())))


def _elements(rule: Rule, sizes: Mapping[str, int]) -> int:
    return sum(int(np.prod([as_poly(d).evaluate(sizes) for d in shape])) for shape in rule.shapes.values())


def _admitted(rule: Rule, sizes: Mapping[str, int], demands: Sequence[Condition]) -> bool:
    if any(as_poly(d).evaluate(sizes) < 0 for shape in rule.shapes.values() for d in shape):
        return False  # no tensor has such a shape
    if _elements(rule, sizes) > _ELEMENTS or not all(c.evaluate(sizes) for c in (*rule.conditions, *demands)):
        return False
    solved = at_sizes(rule, sizes)
    try:
        compose(solved.source, solved.shapes)
    except ShapeError:
        return False
    return True


def at_sizes(rule: Rule, sizes: Mapping[str, int]) -> Rule:
    """The rule at concrete sizes, its attributes integers."""
    solved = with_sizes(rule, {s: as_poly(v) for s, v in sizes.items()})

    def plain(value: Any) -> Any:
        if isinstance(value, Poly) and value.constant is not None:
            return value.constant
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    def graph(side: Graph) -> Graph:
        nodes = tuple(type(n)(n.op, n.inputs, {k: plain(v) for k, v in n.attributes.items()}) for n in side.nodes)
        return Graph(nodes, side.outputs)

    return Rule(rule.name, solved.shapes, graph(solved.source), graph(solved.target))


def judge(rule: Rule, sizes: Mapping[str, int], seed: int = 0) -> Refuted | bool:
    """At concrete sizes: a counterexample, or whether anything was compared at all."""
    solved = at_sizes(rule, sizes)
    shapes = {name: tuple(int(d.constant or 0) for d in shape) for name, shape in solved.shapes.items()}
    found = False
    for values in _inputs(shapes, seed, _indices(solved)):
        answer = compared(solved, sizes, values)
        if answer is None or isinstance(answer, Refuted):
            return answer or False
        found |= answer
    return found


def compared(solved: Rule, sizes: Mapping[str, int], values: Mapping[str, Any]) -> Refuted | bool | None:
    """A rule at concrete sizes on values: a counterexample, whether anything was compared, None where the source is
    ill-formed."""
    shapes = {name: np.shape(v) for name, v in values.items()}
    with np.errstate(all="ignore"):
        try:
            source = run(solved.source, values)
        except ShapeError:
            return None
        try:
            target = run(solved.target, values)
        except ShapeError as error:
            return Refuted(dict(sizes), shapes, {}, f"the target is ill-formed: {error}")
    found = False
    for place, (one, other) in enumerate(zip(source, target, strict=True)):
        if one.shape != other.shape:
            return Refuted(dict(sizes), shapes, {}, f"output {place} has the shape {list(one.shape)} in the source "
                           f"and {list(other.shape)} in the target")
        valid = np.isfinite(one)
        found |= bool(valid.any())
        with np.errstate(invalid="ignore"):
            wrong = valid & ~(np.abs(one - other) <= _TOLERANCE * (1 + np.abs(one)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            lists = {n: [None if v != v else _plain(v) for v in np.ravel(a)] if np.isnan(a).any() else
                     np.vectorize(_plain, otypes=[object])(a).tolist() for n, a in values.items()}
            theirs = f"{other[at]:.9g}" if np.isfinite(other[at]) else "not defined"
            return Refuted(dict(sizes), shapes, lists, f"output {place} at {list(at)} is {one[at]:.9g} in the "
                           f"source and {theirs} in the target")
    return found


def _plain(value: float) -> int | float:
    """A number as it is written, without a point where it needs none."""
    return int(value) if value == int(value) else float(value)


def spoiling(rule: Rule, tries: int = 8) -> tuple[set[str], set[str]]:
    """The inputs of which one undefined element leaves an element of the target undefined that the source has, and
    those of which it does so the other way round, as far as a few sizes show."""
    forward, backward = set[str](), set[str]()
    rng = np.random.default_rng(0)
    for sizes in draw_sizes(rule, tries):
        solved = at_sizes(rule, sizes)
        shapes = {name: tuple(int(d.constant or 0) for d in shape) for name, shape in solved.shapes.items()}
        indices = _indices(solved)
        for name in (each for each in shapes if each not in indices):
            values = {n: rng.integers(1, 5, s).astype(float) for n, s in shapes.items()}
            values |= {n: random_indices(rng, shapes[n], extent) for n, extent in indices.items()}
            for place in rng.integers(values[name].size, size=min(2, values[name].size)):
                spoilt = {**values, name: values[name].copy()}
                spoilt[name].flat[place] = np.nan
                with np.errstate(all="ignore"):
                    try:
                        sides = run(solved.source, spoilt), run(solved.target, spoilt)
                    except ShapeError:
                        continue
                for one, other in zip(*sides, strict=True):
                    if one.shape == other.shape:
                        forward |= {name} if (np.isnan(other) & ~np.isnan(one)).any() else set()
                        backward |= {name} if (np.isnan(one) & ~np.isnan(other)).any() else set()
    return forward, backward


def _indices(solved: Rule) -> dict[str, int]:
    """The inputs of a rule at concrete sizes that its source gathers at, with the extents."""
    try:
        return extents(solved.source, solved.shapes)
    except ShapeError:
        return {}


def _inputs(shapes: Mapping[str, tuple[int, ...]], seed: int, indices: Mapping[str, int] | None = None
            ) -> Iterator[dict[str, Any]]:
    """Values of all inputs: those of :func:`_numbers`, and for ``indices`` integers up to their extents; the extent
    itself among them now and then, which is none."""
    indices = indices or {}
    rng = np.random.default_rng((seed, len(indices)))
    for place, numbers in enumerate(_numbers(shapes, seed)):
        yield numbers | {name: random_indices(rng, shapes[name], extent + (place == 1))
                         for name, extent in indices.items()}


def _numbers(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[dict[str, Any]]:
    """Small integers of both signs but 0, positive ones for functions that are defined there alone, few with many zeros
    among them, where reciprocals are not defined, quarters about 0, where functions cross that do not among integers,
    eighths nearer to it, where erf is steeper than 1, and each tensor of zeros alone beside positive ones."""
    for low, high, zero in ((-4, 5, 3), (1, 5, 3), (-1, 3, 0)):
        rng = np.random.default_rng((seed, low + 4))
        drawn = {name: rng.integers(low, high, shape) for name, shape in shapes.items()}
        yield {name: np.where(v == 0, zero, v).astype(float) for name, v in drawn.items()}
        if low == 1:
            positive = {name: v.astype(float) for name, v in drawn.items()}
    for steps, of in ((8, 4), (4, 8)):
        rng = np.random.default_rng((seed, 1))
        yield {name: rng.integers(1 - steps, steps, shape) / of for name, shape in shapes.items()}
    if sum(v.size for v in positive.values()) <= _FEW:
        for name, value in positive.items():
            yield {**positive, name: np.zeros_like(value)}


def defined_somewhere(rule: Rule) -> bool:
    """Whether an element of the source is seen to be defined at all: of one that divides by 0 nothing is said."""
    if not any(OPERATORS[node.op].partial for node in rule.source.nodes):
        return True
    for sizes in draw_sizes(rule, 3):
        solved = at_sizes(rule, sizes)
        shapes = {name: tuple(int(d.constant or 0) for d in shape) for name, shape in solved.shapes.items()}
        large = {name: np.random.default_rng(0).uniform(20, 90, shape) for name, shape in shapes.items()}
        indices = {name: np.zeros(shapes[name]) for name in _indices(solved)}
        for values in (*_inputs(shapes, 0, _indices(solved)), large | indices,
                       {name: value / 100 for name, value in large.items()} | indices):
            with np.errstate(all="ignore"):
                if any(np.isfinite(each).any() for each in run(solved.source, values)):
                    return True
    return False


def run(graph: Graph, values: Mapping[str, Any]) -> list[Any]:
    """The outputs of a graph with concrete attributes, in float64."""
    known: dict[Any, Any] = dict(values)
    for place, node in enumerate(graph.nodes):
        try:
            results = evaluate(node.op, [known[r] for r in node.inputs], node.attributes, STRICT)
        except ZeroDivisionError as error:
            raise ShapeError(f"{node.op} divides by a size of 0") from error
        for output, array in enumerate(results):
            known[place, output] = np.asarray(array)
    return [known[ref] for ref in graph.outputs]
