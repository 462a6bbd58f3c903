"""What is known wherever a goal is to be shown: divisors, which are not 0, and what follows of others."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlc.substitution.check.integers import Expr, need
from mlc.substitution.check.maxima import VANISHING, at_least_zero, never_zero, vanishes
from mlc.substitution.check.parts import apart, implied, part_at
from mlc.substitution.check.terms import (
    Term,
    collected,
    divisor_of,
    inequalities,
    is_size,
    negated,
    refreshed,
    substituted,
)
from mlc.substitution.check.witness import Reader

__all__ = ["NOT_NEGATIVE", "NOT_ZERO", "Known"]

#: of which functions what they are of is not 0, and is at least 0, where they are defined; of the empty name by cases
NOT_ZERO, NOT_NEGATIVE = frozenset({"1/", "log"}), frozenset({"log", "sqrt", ""})


class Known:
    """The steps that are about divisors: terms of one atom each, a function of what is known to be defined."""

    sizes: frozenset[str]
    depth: int
    context: list[str]
    facts: list[Expr]
    divisors: list[Term]
    terms: dict[int, Term]

    def reader(self, names: Sequence[str] = ()) -> Reader:
        """Reads texts about the context and ``names``."""
        raise NotImplementedError

    def at(self, i: int) -> tuple[Term, list[Expr], Reader]:
        """Term i, what holds where it stands, and a reader of texts about its variables."""
        raise NotImplementedError

    def rewritten(self, names: Sequence[str], facts: Sequence[Expr], terms: Sequence[Term], steps: Any
                  ) -> tuple[Term, ...]:
        """The same sum for all values of ``names`` that the facts admit, by steps."""
        raise NotImplementedError

    def at_least(self, names: Sequence[str], facts: Sequence[Expr], one: Sequence[Term], other: Sequence[Term],
                 steps: Any) -> None:
        """Shows by steps that a sum is at least another one for all values of ``names`` that the facts admit."""
        raise NotImplementedError

    def above_zero(self, i: int, atom: Any, k: int, mapping: Any, guards: Any) -> None:
        """What the atom, a reciprocal, is of is above 0 wherever the guards of term i hold: no product is below 0, and
        product k is above 0 at values of its variables that meet its guards."""
        _, facts, read = self.at(i)
        need(atom[:2] == ("call", "1/"), "only a reciprocal is of what must not be 0")
        need(at_least_zero(atom[2]), "every term must be plainly at least 0")
        one = refreshed(atom[2][k])
        moved = substituted(one._replace(names=()), dict(zip(one.names, map(read, mapping), strict=True)))
        implied(moved.guards, guards, facts, read)
        need(never_zero(moved), "the term must be plainly above 0")

    def divisor(self, j: Any, kinds: frozenset[str]) -> Term:
        """Divisor j, whose function must be one of ``kinds``."""
        need(type(j) is int and 0 <= j < len(self.divisors), "there is no such divisor")
        need(self.divisors[j].atoms[0][1] in kinds, "that is not known of it")
        return self.divisors[j]

    def known(self, j: Any, kinds: frozenset[str], mapping: Any, guards: Any, facts: Sequence[Expr], read: Reader
              ) -> tuple[Term, ...]:
        """What divisor j is of, at the values that ``mapping`` gives its variables, which meet its guards."""
        divisor = refreshed(self.divisor(j, kinds))
        moved = substituted(divisor._replace(names=()), dict(zip(divisor.names, map(read, mapping), strict=True)))
        implied(moved.guards, guards, facts, read)
        [(_, _, argument)] = moved.atoms
        return tuple(argument)

    def do_nonzero(self, j: int, path: Sequence[Any]) -> None:
        """What divisor j divides by is 0 where a part of it is, so that this part is not 0 either: a divisor more."""
        divisor = self.divisor(j, NOT_ZERO)
        [(_, _, argument)] = divisor.atoms
        part = part_at(argument, path)
        need(vanishes(argument, part), "what is divided by must be 0 where the part is")
        whole = Term(Fraction(1), (), (), (divisor_of(part) or part,))
        self.divisors.append(divisor._replace(atoms=(("call", "1/", (whole,)),)))

    def do_parts(self, j: int) -> None:
        """A product is not 0: nor are its factors, each a divisor more, nor what a factor is of that is 0 of 0, nor the
        sum that is left of it."""
        divisor = self.divisor(j, NOT_ZERO)
        whole, rest = apart(divisor.atoms[0][2])
        found: list[tuple[Term, ...]] = []
        for atom in whole.atoms:
            if atom[0] != "number" or not is_size(atom[1]):
                found.append((Term(Fraction(1), (), (), (divisor_of(atom) or atom,)),))
            if atom[0] == "call" and atom[1] in VANISHING and atom[2]:
                found.append(collected(atom[2]))
        if rest.names or rest.guards:
            found.append((rest,))
        self.divisors += [divisor._replace(atoms=(("call", "1/", each),)) for each in found]

    def do_negate(self, j: int) -> None:
        """What is not 0, negated: a divisor more."""
        divisor = self.divisor(j, NOT_ZERO)
        self.divisors.append(divisor._replace(atoms=(("call", "1/", tuple(negated(divisor.atoms[0][2]))),)))

    def above_known(self, names: Sequence[str], facts: Sequence[Expr], argument: Sequence[Term], j: Any, mapping: Any,
                    guards: Any, steps: Any) -> None:
        """A sum is above 0: it is at least something of which the source takes a logarithm, or a root that is not 0."""
        read = self.reader(names)
        other = self.known(j, NOT_ZERO, mapping, guards, facts, read)
        if self.divisors[j].atoms[0][1] == "1/":
            [root] = collected(other)
            need(root == Term(root.factor, (), (), root.atoms) and [a[:2] for a in root.atoms] == [("call", "sqrt")],
                 "only of a root is it known that what it is of is above 0")
            other = root.atoms[0][2]
        self.at_least(names, facts, argument, other, steps)

    def do_divisor_inside(self, j: int, steps: Any) -> None:
        """What divisor j is of, rewritten under its guards: a divisor more."""
        need(type(j) is int and 0 <= j < len(self.divisors), "there is no such divisor")
        divisor = self.divisors[j]
        [(_, function, argument)] = divisor.atoms
        facts = [*self.facts, *inequalities(divisor.guards)]
        more = ("call", function, collected(self.rewritten(divisor.names, facts, argument, steps)))
        self.divisors.append(divisor._replace(atoms=(more,)))

    def do_void(self, j: int, mapping: Any, guards: Any) -> None:
        """What is known not to be 0 is 0, at some values: that cannot be, so nothing is to be shown."""
        need(not collected(self.known(j, NOT_ZERO, mapping, guards, self.facts, self.reader())), "it must be 0")
        self.terms.clear()
