"""The steps that put something smaller in the place of a term, in a sum that is to be shown at least 0."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from mlc.substitution.check.attained import each_member, gentle, rise
from mlc.substitution.check.integers import Expr, need
from mlc.substitution.check.known import NOT_NEGATIVE
from mlc.substitution.check.maxima import AT_MOST_ONE, BELOW, CONTRACTING, EXCEEDING, GROWING, VALUES, called
from mlc.substitution.check.steps import Steps
from mlc.substitution.check.terms import Term, inequalities, refreshed
from mlc.substitution.check.witness import check_witness
from mlc.substitution.codec import parse_fraction

__all__ = ["Bounds"]


class Bounds(Steps):
    """The steps after which the sum is at most what it was: if it is at least 0 then, it was."""

    def do_each(self, i: int, p: Any, proofs: Any) -> None:
        each_member(self, i, p, proofs)

    def do_lower(self, i: int, k: int, mapping: Any, guards: Any) -> None:
        """A positive multiple of a maximum is at least that of its member k; one of f(x), where no value of f is below
        its argument, at least that of x."""
        term, facts, read = self.at(i)
        [atom] = term.atoms
        need(term.factor > 0, "a negative multiple is not above what is below")
        if atom[0] == "max":
            self.put(i, (), self.member(atom[1], k, mapping, guards, facts, read))
        else:
            need(atom[0] == "call" and atom[1] in EXCEEDING, "nothing is known to be below it")
            self.put(i, (), atom[2])

    def do_below(self, i: int, function: Any) -> None:
        """A positive multiple of g(x) is at least that of f(x), where f is never above g."""
        term = self.terms[i]
        [atom] = term.atoms
        need(term.factor > 0, "a negative multiple is not above what is below")
        need(atom[0] == "call" and (function, atom[1]) in BELOW, "nothing is known to be below it")
        self.put(i, (), called(function, atom[2]))

    def do_given(self, i: Any, j: int, mapping: Any, guards: Any, factor: str) -> None:
        """Less a positive multiple of what is known to be at least 0, or of its sum over what a term goes over: if that
        is at least 0, so is the whole."""
        over = Term(Fraction(1), (), (), ()) if i is None else refreshed(self.terms[i]._replace(atoms=()))
        facts = [*self.facts, *inequalities(over.guards)]
        argument = self.known(j, NOT_NEGATIVE, mapping, guards, facts, self.reader(over.names))
        need(parse_fraction(factor) > 0, "what is at least 0 is taken away")
        for term in map(refreshed, argument):
            less = Term(-term.factor * parse_fraction(factor), (*over.names, *term.names),
                        (*over.guards, *term.guards), term.atoms)
            self.add(-1, refreshed(less))

    def do_sizes(self, places: Any, witness: Any) -> None:
        """Less products of sizes and indices whose sum, an integer, is witnessed to be at least 0."""
        need(isinstance(places, list) and len(set(places)) == len(places), "terms must be named once")
        total = Expr({})
        for i in places:
            term = self.terms.pop(i)
            need(not term.names and not term.guards and term.factor.denominator == 1
                 and all(a[0] == "number" and not a[2] for a in term.atoms), "only of products of sizes is that known")
            value = Expr({(): term.factor.numerator})
            for _, number, _ in term.atoms:
                value = value * number
            total = total + value
        check_witness(witness, total, self.facts, self.reader())

    def do_grow(self, i: int, steps: Any) -> None:
        """A multiple of f(x) is at least that of f(0), where f grows and x is at least 0, or for a negative multiple at
        most 0."""
        term, facts, _ = self.at(i)
        [atom] = term.atoms
        need(atom[0] == "call" and atom[1] in GROWING, "it is not known to grow")
        one, other = (atom[2], ()) if term.factor > 0 else ((), atom[2])
        self.at_least(term.names, facts, one, other, steps)
        value = VALUES.get((atom[1], 0))
        self.put(i, (), called(atom[1], ()) if value is None else [Term(value, (), (), ())])

    def do_rise(self, i: int, j: int, steps: Any, above: Any) -> None:
        rise(self, i, j, steps, above)

    def do_gentle(self, i: int, j: int) -> None:
        gentle(self, i, j)

    def do_bound(self, i: int) -> None:
        """A negative multiple of f(x), where f is at most 1, is at least that of 1."""
        term = self.terms[i]
        [atom] = term.atoms
        need(term.factor < 0 and atom[0] == "call" and atom[1] in AT_MOST_ONE, "nothing is known to be above it")
        self.put(i, (), [Term(Fraction(1), (), (), ())])

    def do_root(self, i: int) -> None:
        """A positive multiple of ``sqrt(f(x))``, where f is at most 1, is at least that of f(x)."""
        term = self.terms[i]
        [atom] = term.atoms
        need(term.factor > 0 and atom[:2] == ("call", "sqrt"), "a negative multiple is not above what is below")
        [inner] = atom[2]
        need(inner == Term(Fraction(1), (), (), inner.atoms) and len(inner.atoms) == 1
             and inner.atoms[0][0] == "call" and inner.atoms[0][1] in AT_MOST_ONE, "nothing is known to be below it")
        self.put(i, (), atom[2])

    def do_raise(self, i: int) -> None:
        """A negative multiple of f(x), where f(x) is at most the larger of x and 0, is at least that of the larger."""
        term = self.terms[i]
        [atom] = term.atoms
        need(term.factor < 0, "a positive multiple is not above what is above")
        need(atom[0] == "call" and atom[1] in CONTRACTING, "nothing is known to be above it")
        self.put(i, (), called("relu", atom[2]))
