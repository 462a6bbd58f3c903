"""Generalises a pair of equal graphs: what both sides compute alike becomes an input.

``relu(relu(matmul(a, b))) = relu(matmul(a, b))`` says no more than ``relu(relu(c)) = relu(c)``. Of a uniform
enumeration most pairs are such instances, so that the few laws behind them are judged once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mlc.operators import ShapeError
from mlc.operators.arithmetic import FIELD
from mlc.operators.evaluate import evaluate
from mlc.operators.index import Poly, as_poly
from mlc.substitution.enumerate import COMMUTATIVE, Term
from mlc.substitution.family import Family
from mlc.substitution.fingerprint import random_input
from mlc.substitution.graph import concrete

__all__ = ["abstracted", "law_text"]

#: sizes of new inputs, axis by axis
_LETTERS = "nchwe"


def abstracted(family: Family, one: Term, other: Term) -> tuple[Family, Term, Term]:
    """Both sides with their largest common parts as inputs, wherever they are equal whatever those are; and the family
    with these inputs, whose sizes are their own."""
    inputs = dict(family.inputs)
    ours = {term.number for term in _operators(one)}
    shared = sorted((term for term in _operators(other) if term.number in ours), key=lambda term: -len(term.nodes))
    for part in shared:
        shape = part.value.shape
        name = f"z{len(inputs)}"
        fresh = Term(-len(inputs), None, (), (name,), frozenset(), random_input(name, shape))
        try:
            left, right = (_with(term, part, fresh, family, {}) for term in (one, other))
        except ShapeError:
            continue
        if (left is not one or right is not other) and _same(left, right):
            one, other = left, right
            inputs[name] = tuple(as_poly(1) if size == 1 else Poly.symbol(letter)
                                 for size, letter in zip(shape, _LETTERS, strict=False))
    return replace(family, inputs=inputs), one, other


def law_text(one: Term, other: Term) -> str:
    """A text that pairs share which differ in the names of inputs, in the order of operands that may be exchanged, or
    in which side comes first."""
    texts = []
    for left, right in ((one, other), (other, one)):
        names: dict[str, str] = {}
        texts.append(f"{_text(left, names)}={_text(right, names)}")
    return min(texts)


def _same(one: Term, other: Term) -> bool:
    return one.value.shape == other.value.shape and bool(np.array_equal(one.value, other.value))


def _operators(term: Term) -> Iterator[Term]:
    """All terms of it that are no inputs, each once."""
    seen: dict[int, Term] = {}
    stack = [term]
    while stack:
        each = stack.pop()
        if each.step is not None and each.number not in seen:
            seen[each.number] = each
            stack.extend(each.operands)
    return iter(seen.values())


def _with(term: Term, part: Term, fresh: Term, family: Family, made: dict[int, Term]) -> Term:
    """The term with ``fresh`` for a part of it; itself where the part is not in it."""
    if term is part:
        return fresh
    if term.step is None:
        return term
    if term.number not in made:
        operands = tuple(_with(each, part, fresh, family, made) for each in term.operands)
        if all(new is old for new, old in zip(operands, term.operands, strict=True)):
            made[term.number] = term
        else:
            attributes = {name: concrete(value, dict(family.world)) for name, value in term.step.attributes.items()}
            [value] = evaluate(term.step.op, [each.value for each in operands], attributes, FIELD)
            inputs = tuple(dict.fromkeys(name for each in operands for name in each.inputs))
            made[term.number] = replace(term, operands=operands, inputs=inputs, value=value)
    return made[term.number]


def _text(term: Term, names: dict[str, str]) -> str:
    if term.step is None:
        [name] = term.inputs
        return names.setdefault(name, f"{len(names)}{list(term.value.shape)}")
    operands = list(term.operands)
    if term.step.op in COMMUTATIVE:
        operands.sort(key=_form)
    given = sorted((name, str(value)) for name, value in term.step.attributes.items())
    return f"{term.step.op}{given}({','.join(_text(each, names) for each in operands)})"


def _form(term: Term) -> str:
    """The operators of a term, whatever its inputs are."""
    return "" if term.step is None else f"{term.step.op}({','.join(map(_form, term.operands))})"
