"""Finds the most general sizes at which two graphs over the same inputs are well-formed and equal in shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlc.operators.index import Condition, FloorDiv, Mod, Poly, Symbol, as_poly, equal
from mlc.operators.tensor import ShapeError
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.quotients import divided
from mlc.substitution.rule import Rule

__all__ = ["generalise", "implied", "merged_sizes", "products", "renamed"]


#: capitals that are sizes of the same kind as others
_LETTERS = {"A": "d", "B": "d", "K": "k", "L": "l", "T": "s", "Q": "p", "U": "p", "V": "p", "D": "dilation",
            "E": "dilation", "G": "groups", "F": "groups"}


def generalise(rule: Rule) -> Rule | None:
    """``rule`` with size symbols replaced so that all demands that are equations hold; what is left of the demands
    are its conditions. None where the demands contradict each other or cannot be met by replacing symbols.

    Only ``a*b == c*d``, as a reshape asks for, stays a condition: it is met by ``p*q, r*s, p*r, q*s`` in place of the
    four sizes, but neither shape would tell p, q, r and s.
    """
    for _ in range(64):
        demands = _demands(rule)
        if demands is None:
            return None
        equations = [d.poly for d in demands if d.relation == "==" and not _has(d.poly, Mod)]
        open_ = [poly for poly in equations if poly.terms]
        if any(poly.constant not in (None, 0) for poly in open_):
            return None
        solutions = [s for poly in open_ for s in _solutions(poly)]
        if not solutions:
            reshapes = any(node.op == "reshape" for node in (*rule.source.nodes, *rule.target.nodes))
            if open_ and not (reshapes and all(map(products, open_))):
                return None
            conditions = _independent(d for d in demands if not implied(d))
            return Rule(rule.name, rule.shapes, rule.source, rule.target, conditions)
        _, _, values = min(solutions, key=lambda s: s[:2])
        rule = with_sizes(rule, values)
    return None


def _demands(rule: Rule) -> list[Condition] | None:
    try:
        left, needs = compose(rule.source, rule.shapes)
        right, more = compose(rule.target, rule.shapes)
    except ShapeError:
        return None
    found = [*needs, *more]
    for one, other in zip(left, right, strict=True):
        if one.rank != other.rank:
            return None
        found += [equal(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
    return found


def _solutions(poly: Poly) -> list[tuple[int, str, Mapping[str, Poly]]]:
    """Replacements that make ``poly`` zero (or nearer to it), each with how special it is, least first."""
    positive = [(m, c) for m, c in poly.terms if c > 0]
    negative = [(m, -c) for m, c in poly.terms if c < 0]
    found: list[tuple[int, str, Mapping[str, Poly]]] = []
    for monomial, coefficient in poly.terms:
        if abs(coefficient) == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            name = monomial[0].name
            rest = Poly({m: c * -coefficient for m, c in poly.terms if m != monomial})
            if name not in rest.symbols and all(c > 0 for _, c in rest.terms) and rest.terms:
                found.append((len(rest.terms), name, {name: rest}))
    if len(positive) == 1 and len(negative) == 1 and positive[0][1] == negative[0][1]:
        left, right = positive[0][0], negative[0][0]
        rest_l = [a for a in left if a not in right]
        rest_r = [a for a in right if a not in left]
        if len(rest_l) == len(rest_r) == 1:
            a, b = rest_l[0], rest_r[0]
            if isinstance(a, FloorDiv) and isinstance(b, FloorDiv) and a.denominator == b.denominator:
                found += _solutions(a.numerator - b.numerator)
            elif isinstance(a, Symbol) and isinstance(b, Symbol) and positive[0][1] > 0 and len(left) > 1:
                found.append((2, a.name, {max(a.name, b.name): Poly.symbol(min(a.name, b.name))}))
    # sums on both sides: those of one kind are made equal, such as heights with heights
    for more, _ in positive:
        for less, _ in negative:
            if len(more) == len(less) == 1 and isinstance(more[0], Symbol) and isinstance(less[0], Symbol):
                one, other = more[0].name, less[0].name
                if one.split("_")[0] == other.split("_")[0]:
                    found.append((9, one, {max(one, other): Poly.symbol(min(one, other))}))
    return found


def products(poly: Poly) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The factors of both sides if ``poly == 0`` says that two products of sizes are equal."""
    if len(poly.terms) != 2 or sorted(c for _, c in poly.terms) != [-1, 1]:
        return None
    if not all(m and all(isinstance(atom, Symbol) for atom in m) for m, _ in poly.terms):
        return None
    left, right = (tuple(map(str, monomial)) for monomial, _ in poly.terms)
    return left, right


def _independent(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions, each once, without equations of products that others make a chain for."""
    found: list[Condition] = []
    chains: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for condition in dict.fromkeys(conditions):
        sides = products(condition.poly) if condition.relation == "==" else None
        if sides is not None:
            left, right = (chains.get(side, {side}) for side in sides)
            if left is right:
                continue
            chains |= dict.fromkeys(left | right, left | right)
        found.append(condition)
    return tuple(found)


def _has(poly: Poly, kind: type) -> bool:
    return any(isinstance(atom, kind) for monomial, _ in poly.terms for atom in monomial)


def implied(condition: Condition) -> bool:
    """Whether it holds for all sizes of at least 1, plainly: every coefficient over sizes less one is positive."""
    poly = condition.poly
    if condition.relation == "==":
        return all(len(m) == 1 and isinstance(m[0], Mod) and _divisible(m[0]) for m, _ in poly.terms)
    if _has(poly, FloorDiv) or _has(poly, Mod):
        return False
    shifted = poly.substitute({name: Poly.symbol(name) + 1 for name in poly.symbols})
    return all(c > 0 for _, c in shifted.terms)


def _divisible(remainder: Mod) -> bool:
    """Whether the divisor is a factor of the dividend."""
    return not divided(remainder.numerator, remainder.denominator)[1].terms


def merged_sizes(rule: Rule) -> Rule:
    """A size that is a sum of symbols found nowhere else becomes one: ``a + b`` where nothing is cut at ``a``."""
    for size in dict.fromkeys(size for shape in rule.shapes.values() for size in map(as_poly, shape)):
        for monomial, coefficient in size.terms:
            if coefficient != 1 or len(size.terms) < 2 or len(monomial) != 1 or not isinstance(monomial[0], Symbol):
                continue
            name = monomial[0].name
            others = size.symbols - {name}
            whole = Poly.symbol(f"{name}'")
            try:
                found = with_sizes(rule, {name: whole - (size - Poly.symbol(name))})
            except ShapeError:
                continue
            if others and others.isdisjoint(found.symbols) and name not in found.symbols:
                return merged_sizes(found)
        if len(size.terms) == 1 and len(size.symbols) > 1:
            whole = Poly.symbol(f"{min(size.symbols, key=lambda name: (name.isupper(), name))}'")
            shapes = {n: tuple(whole if s == size else s for s in shape) for n, shape in rule.shapes.items()}
            found = Rule(rule.name, shapes, rule.source, rule.target, rule.conditions)
            if size.symbols.isdisjoint(found.symbols):
                return merged_sizes(found)
    return rule


def renamed(rule: Rule) -> Rule:
    """Size symbols named by their letter and a number, inputs in the order of their use in the source."""
    order = list(dict.fromkeys([*rule.source.inputs, *rule.target.inputs]))
    names: dict[str, Poly] = {}
    taken: dict[str, int] = {}
    sizes = [size for name in order for size in rule.shapes[name]]
    sizes += [v for node in rule.source.nodes for value in node.attributes.values()
              for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Poly)]
    for size in map(as_poly, sizes):
        for name in sorted(size.symbols):
            if name not in names:
                letter = _LETTERS.get(name[0], name[0].lower())
                number = taken[letter] = taken.get(letter, -1) + 1
                names[name] = Poly.symbol(f"{letter}{number}")
    conditions = tuple(c.substitute(names) for c in rule.conditions)
    clean = with_sizes(Rule(rule.name, {n: rule.shapes[n] for n in order}, rule.source, rule.target), names)
    return Rule(rule.name, clean.shapes, clean.source, clean.target, conditions)
