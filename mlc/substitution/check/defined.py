"""What has to be defined for an element to be: the reads and the partial functions that it is computed of.

An element is defined where everything is that is evaluated for it, whatever it is multiplied with: ``0 * (1/x)`` is
not where ``x`` is 0, nor is a sum with such a term. So the demands of an element are collected before anything
cancels. Those of the target have to be among those of the source, or to hold anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Self

from mlc.operators.laws import LAWS
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum, Within
from mlc.substitution.check.elements import WITHIN, bind, terms_of
from mlc.substitution.check.integers import Expr, Guard, guard_of, need, positive, translated
from mlc.substitution.check.maxima import above_zero, at_least_zero
from mlc.substitution.check.parts import apart, implied
from mlc.substitution.check.play import Nested
from mlc.substitution.check.terms import Term, collected, divisor_of, is_size, make_term, opposites, substituted, under

__all__ = ["Cover", "demands_of", "divisors_of"]

_MOST = 400


def demands_of(value: Scalar, names: Mapping[str, Expr]) -> list[Term]:
    """Terms of one atom each, a read or a call of a function that is not defined everywhere: for all values of its
    variables that the guards admit, the atom must be defined for the scalar to be."""
    found = list(_demands(value, names))
    need(len(found) <= _MOST, f"an element must read at most {_MOST} others")
    return list(dict.fromkeys(found))


def _demands(value: Scalar, names: Mapping[str, Expr]) -> Iterator[Term]:
    match value:
        case Const() | Size():
            pass
        case Read(tensor, indices):
            places = tuple(translated(i).substituted(names) for i in indices)
            yield Term(Fraction(1), (), (), (("read", tensor, places),))
        case Add(parts) | Mul(parts) | Call("max", parts):
            for part in parts:
                yield from _demands(part, names)
        case Select(conditions, then, otherwise):
            guards = [Guard(g.expr.substituted(names), g.relation) for g in map(guard_of, conditions)]
            yield from (under(t, guards) for t in _demands(then, names))
            others = list(_demands(otherwise, names))
            yield from (under(t, case) for case in (opposites(guards) if others else ()) for t in others)
        case Within(index, extent, there):
            places = tuple(translated(p).substituted(names) for p in (index, extent))
            yield Term(Fraction(1), (), (), (("read", WITHIN, places),))
            yield from _demands(there, names)
        case Sum(variables, body):
            yield from _bound(variables, (), body, names)
        case Max(variables, conditions, body):
            yield from _bound(variables, conditions, body, names)
        case Reciprocal(divisor):
            yield from _demands(divisor, names)
            sized = isinstance(divisor, Size) and positive(translated(divisor.poly).substituted(names))
            if not sized and not (isinstance(divisor, Const) and divisor.value):
                yield _calls("1/", divisor, names)
        case Call(function, (argument,)):
            yield from _demands(argument, names)
            if LAWS[function].domain:
                yield _calls(function, argument, names)


def _calls(function: str, argument: Scalar, names: Mapping[str, Expr]) -> Term:
    return Term(Fraction(1), (), (), (("call", function, tuple(terms_of(argument, names))),))


def divisors_of(demands: Iterable[Term]) -> list[Term]:
    """Those among them, in their order, that are of what is not 0: a reciprocal, a logarithm; then the roots, of what
    is at least 0."""
    calls = [term for term in demands if term.atoms[0][0] == "call"]
    return [t for t in calls if t.atoms[0][1] in ("1/", "log")] + [t for t in calls if t.atoms[0][1] == "sqrt"]


def _bound(variables: Any, conditions: Any, body: Scalar, names: Mapping[str, Expr]) -> Iterator[Term]:
    bound, inner, ranges = bind(variables, names)
    ranges += [Guard(g.expr.substituted(inner), g.relation) for g in map(guard_of, conditions)]
    for term in _demands(body, inner):
        yield make_term(term.factor, (*bound, *term.names), (*ranges, *term.guards), term.atoms)


class Cover(Nested):
    """Shows that every demand of ``wanted`` is one of ``given`` or holds anyway: none of ``wanted`` may be left."""

    def __init__(self, sizes: frozenset[str], context: Sequence[str], facts: Sequence[Expr], wanted: Sequence[Term],
                 given: Sequence[Term], divisors: Sequence[Term]) -> None:
        super().__init__(sizes, context, facts, [*wanted, *given], divisors)
        self.wanted = set(range(len(wanted)))

    def add(self, origin: int, term: Term) -> None:
        if origin in self.wanted:
            self.wanted.add(self.next)
        super().add(origin, term)

    def branch(self, facts: Sequence[Expr], divisors: Sequence[Term]) -> Self:
        other = super().branch(facts, divisors)
        other.wanted = set(self.wanted)
        return other

    def end(self) -> None:
        left = self.wanted & self.terms.keys()
        need(not left, f"{len(left)} demands of the target are left")

    def do_cover(self, i: int, j: int, mapping: Any, guards: Any, equal: Any) -> None:
        """For all values of its variables, demand i is demand j at the values that ``mapping`` gives j's variables."""
        need(i in self.wanted and j not in self.wanted, "a demand of the target is covered by one of the source")
        one, facts, read = self.at(i)
        other = self.terms[j]  # whose names are others than those that one was just given
        moved = substituted(other, dict(zip(other.names, map(read, mapping), strict=True)))
        implied(moved.guards, guards, facts, read)
        [ours], [theirs] = one.atoms, moved.atoms
        self.same(facts, one.names, ours, theirs, equal)
        del self.terms[i]

    def do_sign(self, i: int) -> None:
        """The function's argument is in its domain by its signs alone."""
        need(i in self.wanted, "only what the target demands is to be shown")
        [atom] = self.terms[i].atoms
        need(atom[0] == "call", "a read is not defined by a sign")
        need(at_least_zero(atom[2]), "every term must be plainly at least 0")
        need(atom[1] == "sqrt" or above_zero(atom[2]), "a term must be plainly above 0")
        del self.terms[i]

    def do_nonzero(self, j: int, path: Any) -> None:
        """So the reciprocal of that part is defined where the source is."""
        super().do_nonzero(j, path)
        self.terms[self.next] = self.divisors[-1]
        self.next += 1

    def do_inside(self, i: int, p: int, steps: Any) -> None:
        """Defined is a function of a sum where it is of the same sum, rewritten; it stays one demand."""
        term, facts, _ = self.at(i)
        [atom] = term.atoms
        need(p == 0 and atom[0] == "call", "only a function is of something")
        argument = collected(self.rewritten(term.names, facts, atom[2], steps))
        self.terms[i] = term._replace(atoms=(("call", atom[1], argument),))

    def do_divisor_inside(self, j: int, steps: Any) -> None:
        """So the function of that sum is defined where the source is."""
        super().do_divisor_inside(j, steps)
        self.terms[self.next] = self.divisors[-1]
        self.next += 1

    def do_positive(self, i: int, k: int, mapping: Any, guards: Any) -> None:
        """What the reciprocal is of is plainly above 0."""
        need(i in self.wanted, "only what the target demands is to be shown")
        self.above_zero(i, self.terms[i].atoms[0], k, mapping, guards)
        del self.terms[i]

    def do_ratio(self, i: int, p: int, over: Any, under: Any, factor: str, steps: Any) -> None:
        """What the reciprocal is of is a quotient of what is not 0."""
        need(i in self.wanted, "only what the target demands is to be shown")
        self.quotient(i, p, over, under, factor, steps)
        del self.terms[i]

    def do_some(self, i: int, p: int, *words: Any) -> None:
        """What the reciprocal is of is a sum of what is at least 0, and not 0."""
        need(i in self.wanted, "only what the target demands is to be shown")
        self.some(i, p, *words)
        del self.terms[i]

    def do_larger(self, j: int, p: int, k: int) -> None:
        """So the logarithm of that member is defined where the source is."""
        super().do_larger(j, p, k)
        self.given(1)

    def do_rooted(self, j: int) -> None:
        """So the logarithm of what the root is of is defined where the source is."""
        super().do_rooted(j)
        self.given(1)

    def do_groups(self, j: int) -> None:
        """So the reciprocals of the sums are defined where the source is."""
        before = len(self.divisors)
        super().do_groups(j)
        self.given(len(self.divisors) - before)

    def do_common(self, j: int, proofs: Any) -> None:
        """So the reciprocal of the common factor is defined where the source is."""
        super().do_common(j, proofs)
        self.given(1)

    def given(self, count: int) -> None:
        """The last divisors, among what is defined where the source is."""
        for divisor in self.divisors[len(self.divisors) - count:]:
            self.terms[self.next] = divisor
            self.next += 1

    def do_above(self, i: int, given: Any, steps: Any) -> None:
        """What a root is of is at least 0; what a reciprocal or a logarithm is of is above 0."""
        need(i in self.wanted, "only what the target demands is to be shown")
        term, facts, _ = self.at(i)
        [atom] = term.atoms
        need(atom[0] == "call", "a read is not defined by a sign")
        if atom[1] == "sqrt":
            self.at_least(term.names, facts, atom[2], (), steps)
        else:
            j, mapping, guards = given
            self.above_known(term.names, facts, atom[2], j, mapping, guards, steps)
        del self.terms[i]

    def do_parts(self, j: int) -> None:
        """So the reciprocals of the factors are defined where the source is."""
        before = len(self.divisors)
        super().do_parts(j)
        for divisor in self.divisors[before:]:
            self.terms[self.next] = divisor
            self.next += 1

    def do_negate(self, j: int) -> None:
        """So the reciprocal of the opposite is defined where the source is."""
        super().do_negate(j)
        self.terms[self.next] = self.divisors[-1]
        self.next += 1

    def do_factors(self, i: int) -> None:
        """The reciprocal of a product is defined where those of its factors are, and that of 1/x where that of x is."""
        term = self.terms[i]
        [atom] = term.atoms
        need(atom[:2] == ("call", "1/"), "only a reciprocal is taken apart")
        product, rest = apart(atom[2])
        del self.terms[i]
        for atom in product.atoms:
            if atom[0] != "number" or not is_size(atom[1]):
                factor = Term(Fraction(1), (), (), (divisor_of(atom) or atom,))
                self.add(i, term._replace(atoms=(("call", "1/", (factor,)),)))
        if rest.names or rest.guards:
            self.add(i, term._replace(atoms=(("call", "1/", (rest,)),)))
