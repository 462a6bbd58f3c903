"""Near misses: graphs whose values differ only in slabs at the ends of axes, and the extents of these slabs.

A pair is told by the value in the middle of both tensors; around it is the box that agrees. How far it reaches is found
at several sizes, and told by an expression over the sizes that is right at most of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from mlc.operators import OPERATORS
from mlc.operators.index import Poly, as_poly
from mlc.operators.tensor import ShapeError
from mlc.substitution.enumerate import Counts, Term, graphs
from mlc.substitution.family import Family
from mlc.substitution.fingerprint import assignments, random_input, values_of
from mlc.substitution.rule import Rule

__all__ = ["Slabs", "near_pairs", "slabs"]

#: at how many sizes the ends of slabs are looked at, and at how many there must be a box that agrees
_SIZES, _ENOUGH = 40, 8
#: the part of the multiplications that a graph may need at most to leave room for a correction
_PART = 0.75


@dataclass(frozen=True)
class Slabs:
    """For each axis of the output, how many elements differ before and after those that agree."""

    before: tuple[Poly, ...]
    behind: tuple[Poly, ...]


def near_pairs(family: Family, counts: Counts) -> Iterator[tuple[Term, Term]]:
    """(one, another) for graphs that agree in the middle of an output of one shape and not in all of it, where the
    other multiplies at most ``_PART`` as much in the family's world, or as much with more operators; none whose first
    only moves what another such pair computes."""
    middles: dict[tuple[Any, ...], list[Term]] = {}
    for known, made in graphs(family, counts):
        if known is not None or made.value.ndim == 0:
            continue
        at = tuple(size // 2 for size in made.value.shape)
        others = middles.setdefault((*made.value.shape, int(made.value[at])), [])
        for other in others:
            more, less = sorted((other, made), key=lambda term: (-_multiplications(term), len(term.nodes)))
            products = _multiplications(more), _multiplications(less)
            if more.step is not None and not OPERATORS[more.step.op].movement and (
                    products[1] <= _PART * products[0] or products[0] == products[1]):
                yield more, less
        others.append(made)


def slabs(rule: Rule) -> Slabs | None:
    """Where both sides may differ, None where they do not agree in a box up to slabs whose extents an expression tells.
    That is so at most of the sizes that are looked at."""
    seen: list[tuple[Mapping[str, int], tuple[slice, ...], tuple[int, ...]]] = []
    for sizes in assignments(rule, _SIZES, largest=7):
        inputs = {name: random_input(name, tuple(int(s.evaluate(sizes)) for s in map(as_poly, shape)))
                  for name, shape in rule.shapes.items()}
        try:
            [one], [other] = values_of(rule.source, inputs, sizes), values_of(rule.target, inputs, sizes)
        except ShapeError:
            continue
        if one.shape != other.shape:
            return None
        same = one == other
        box = None if same.all() else _box(same)
        if box is not None:
            seen.append((sizes, box, one.shape))
    if len(seen) < _ENOUGH:
        return None
    axes = range(len(seen[0][2]))
    before = [_expression([(sizes, box[axis].start) for sizes, box, _ in seen]) for axis in axes]
    behind = [_expression([(sizes, shape[axis] - box[axis].stop) for sizes, box, shape in seen]) for axis in axes]
    ends = [(low, high) for low, high in zip(before, behind, strict=True) if low is not None and high is not None]
    if len(ends) < len(axes) or all(low == high == 0 for low, high in ends):
        return None
    return Slabs(*zip(*ends, strict=True))


def _box(same: np.ndarray) -> tuple[slice, ...] | None:
    """What is true around the middle, grown by one along each axis in turn; None where the middle is not."""
    box = [slice(size // 2, size // 2 + 1) for size in same.shape]
    if not same[tuple(box)].all():
        return None
    growing = True
    while growing:
        growing = False
        for axis, size in enumerate(same.shape):
            for before, behind in ((1, 0), (0, 1)):
                low, high = box[axis].start - before, box[axis].stop + behind
                if low >= 0 and high <= size and same[(*box[:axis], slice(low, high), *box[axis + 1:])].all():
                    box[axis], growing = slice(low, high), True
    return tuple(box)


def _expression(values: Sequence[tuple[Mapping[str, int], int]]) -> Poly | None:
    """The simplest sum of sizes and a small number of those that most values are; at least half of them must be. Where
    images are smaller than windows, or all of a window is padding, other elements agree."""
    names = sorted(values[0][0])
    best: tuple[int, Poly] | None = None
    for chosen in [()] + [c for count in (1, 2) for c in combinations(names, count)]:
        rest = Counter(value - sum(sizes[name] for name in chosen) for sizes, value in values)
        number, met = rest.most_common(1)[0]
        if abs(number) <= 2 and 2 * met >= len(values) and (best is None or met > best[0]):
            best = met, sum((Poly.symbol(name) for name in chosen), as_poly(number))
    return best[1] if best is not None else None


def _multiplications(term: Term) -> int:
    """How many the products of a graph take in the family's world."""
    seen: dict[int, Term] = {}
    pending = [term]
    while pending:
        each = pending.pop()
        if each.step is not None and each.number not in seen:
            seen[each.number] = each
            pending.extend(each.operands)
    return sum(prod(each.value.shape) * int(number(*(o.value.shape for o in each.operands))) for each in seen.values()
               if each.step is not None and (number := OPERATORS[each.step.op].products) is not None)
