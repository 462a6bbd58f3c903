"""Changes of variables that make two terms read the same elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, permutations, product

from mlc.operators.index import Poly, Symbol
from mlc.operators.scalar import Read
from mlc.substitution.normal import Atom, Function, Largest, Number, Term
from mlc.substitution.quotients import divided

__all__ = ["Mapping", "covers", "inverse_of", "mappings", "skeleton"]

_PAIRINGS, _GUESSES = 24, 30


def skeleton(atom: Atom) -> str:
    """What must be the same in atoms that are equal."""
    if isinstance(atom, Read):
        return f"{atom.tensor}[{len(atom.indices)}]"
    if isinstance(atom, Number):
        return "1/size" if atom.inverse else "size"
    if isinstance(atom, Function):
        return f"{atom.name}()"
    return "max"


def mappings(one: Term, other: Term) -> Iterator[tuple[dict[str, Poly], tuple[int, ...]]]:
    """Candidates: what each variable of ``other`` is in those of ``one``, and which atom of ``one`` each atom meets.

    The variables of the two must have different names. A candidate is a guess: nothing of it is proved here.
    """
    if len(one.variables) != len(other.variables) or len(one.atoms) != len(other.atoms):
        return
    maxima = any(isinstance(a, Largest) for a in one.atoms)
    for crossed in (False, True) if maxima and one.variables else (False,):  # members may be in another order
        for pairing in _pairings(one.atoms, other.atoms):
            equations = [e for i, j in enumerate(pairing) for e in _equations(one.atoms[j], other.atoms[i], crossed)]
            for mapping in _solutions(equations, one.variables, other.variables):
                yield mapping, pairing


def _pairings(ones: Sequence[Atom], others: Sequence[Atom]) -> Iterator[tuple[int, ...]]:
    """For every atom of ``others`` the place of its partner."""
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for place, atom in enumerate(ones):
        groups.setdefault(skeleton(atom), ([], []))[0].append(place)
    for place, atom in enumerate(others):
        groups.setdefault(skeleton(atom), ([], []))[1].append(place)
    if any(len(a) != len(b) for a, b in groups.values()):
        return
    for choice in islice(product(*(permutations(a) for a, _ in groups.values())), _PAIRINGS):
        pairing = [0] * len(others)
        for partners, (_, places) in zip(choice, groups.values(), strict=True):
            for partner, place in zip(partners, places, strict=True):
                pairing[place] = partner
        yield tuple(pairing)


def _equations(one: Atom, other: Atom, crossed: bool = False) -> list[Poly]:
    """Differences of indices that vanish if the atoms are equal; hints only. ``crossed`` is whether members of maxima
    that stand at different places are compared."""
    if isinstance(one, Read) and isinstance(other, Read):
        return [a - b for a, b in zip(one.indices, other.indices, strict=True)]
    if isinstance(one, Number) and isinstance(other, Number):
        return [one.value - other.value]
    if isinstance(one, Function) and isinstance(other, Function):
        # terms in their order first: what they tell is not told by others any more
        terms = sorted(product(enumerate(one.arg), enumerate(other.arg)), key=lambda pair: pair[0][0] != pair[1][0])
        return [e for (_, s), (_, t) in terms for e in _inner(s, t)]
    if isinstance(one, Largest) and isinstance(other, Largest):
        pairs = product(one.members, other.members) if crossed else zip(one.members, other.members, strict=False)
        return [e for a, b in pairs
                for s, t in zip(a.body, b.body, strict=False) for e in _inner(s, t)
                if e.symbols.isdisjoint((*a.variables, *b.variables))]
    return []


def _inner(one: Term, other: Term) -> list[Poly]:
    bound = {*one.variables, *other.variables}
    return [e for a, b in zip(one.atoms, other.atoms, strict=False) if skeleton(a) == skeleton(b)
            for e in _equations(a, b) if bound.isdisjoint(e.symbols)]


def _linear(equation: Poly, name: str) -> Poly | None:
    """What the symbol is if the equation is 0 and it occurs once, with factor 1 or -1."""
    symbol = (Symbol(name),)
    factor = dict(equation.terms).get(symbol, 0)
    if abs(factor) != 1:
        return None
    rest = equation - Poly({symbol: factor})
    return None if name in rest.symbols else (-rest if factor == 1 else rest)


def _solutions(equations: list[Poly], known: tuple[str, ...], wanted: tuple[str, ...]) -> Iterator[dict[str, Poly]]:
    found = _solved(equations, wanted, _linear)
    left = [n for n in wanted if n not in found]
    for guess in islice(permutations(known, len(left)), _GUESSES):
        values = {n: Poly.symbol(g) for n, g in zip(left, guess, strict=True)}
        yield {n: p.substitute(values) for n, p in found.items()} | values


def covers(one: Term, other: Term) -> Iterator[dict[str, Poly]]:
    """Candidates: values of the variables of ``other`` in those of ``one`` for which their atoms may be the same.

    Both sides of a rule often demand the same in other variables, numbered in the same order: that comes first.
    """
    if len(one.variables) == len(other.variables):
        yield dict(zip(other.variables, map(Poly.symbol, one.variables), strict=True))
    equations = _equations(one.atoms[0], other.atoms[0])
    found = _solved(equations, other.variables, _determined)
    left = [n for n in other.variables if n not in found]
    values = [*map(Poly.symbol, one.variables), Poly({})]
    for guess in islice(product(values, repeat=len(left)), _GUESSES):
        yield {n: p.substitute(dict(zip(left, guess, strict=True))) for n, p in found.items()} | dict(
            zip(left, guess, strict=True))


def _determined(equation: Poly, name: str) -> Poly | None:
    """What the symbol is if the equation is 0, where it stands in products as well, if that can be told."""
    symbol = Poly.symbol(name)
    factor, rest = divided(equation, symbol)
    if not factor.terms or name in factor.symbols or name in rest.symbols:
        return None
    value, over = divided(-rest, factor)
    return None if over.terms else value


def _solved(equations: list[Poly], wanted: tuple[str, ...], solve: Callable[[Poly, str], Poly | None]
            ) -> dict[str, Poly]:
    """Values of some of ``wanted`` for which some of the equations hold."""
    found: dict[str, Poly] = {}
    progress = True
    while progress and len(found) < len(wanted):
        progress = False
        # equations with a single unknown first: the others may need a guess
        for equation in sorted(equations, key=lambda e: len(e.symbols & set(wanted))):
            if len(equation.symbols & set(wanted)) > 1 and any(
                    len(e.symbols & set(wanted)) == 1 and any(solve(e, n) is not None for n in wanted)
                    for e in equations):
                break
            name = next((n for n in wanted if n not in found and solve(equation, n) is not None), None)
            if name is None:
                continue
            value = solve(equation, name)
            assert value is not None
            found = {n: p.substitute({name: value}) for n, p in found.items()} | {name: value}
            equations = [e.substitute({name: value}) for e in equations]
            progress = True
            break
    return found


def inverse_of(mapping: dict[str, Poly], known: tuple[str, ...]) -> dict[str, Poly] | None:
    """The variables ``known`` in those that the mapping defines, None where that isn't a bijection of integers."""
    equations = [Poly.symbol(name) - value for name, value in mapping.items()]
    found: dict[str, Poly] = {}
    for _ in known:
        hit = next(((e, n) for e in equations for n in known if n not in found and _linear(e, n) is not None), None)
        if hit is None:
            return None
        value = _linear(*hit)
        assert value is not None
        found = {n: p.substitute({hit[1]: value}) for n, p in found.items()} | {hit[1]: value}
        equations = [e.substitute({hit[1]: value}) for e in equations]
    if any(n in p.symbols for p in found.values() for n in known):
        return None
    same = all(p.substitute(found) == Poly.symbol(n) for n, p in mapping.items())
    back = all(p.substitute(mapping) == Poly.symbol(n) for n, p in found.items())
    return found if same and back else None
