"""The steps that put something equal in the place of an atom: what is known of functions and of maxima."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from mlc.substitution.check.integers import Guard, need
from mlc.substitution.check.maxima import ODD, VALUES, called, largest
from mlc.substitution.check.parts import apart, implied, make_guard
from mlc.substitution.check.steps import Steps
from mlc.substitution.check.terms import (
    Term,
    collected,
    inequalities,
    make_term,
    negated,
    opposites,
    reciprocal,
    refreshed,
    renamed,
    times,
)
from mlc.substitution.check.witness import check_witness

__all__ = ["Atoms"]


class Atoms(Steps):
    """The steps of one atom, wherever its term stands."""

    def do_absorb(self, i: int, j: int) -> None:
        """``c * max(x, y) + t`` is ``c * max(x + t/c, y + t/c)``."""
        one, other = self.terms[i], self.terms[j]
        need(i != j and one.factor and not one.names and not one.guards and [a[0] for a in one.atoms] == ["max"],
             "what is added goes into a multiple of a maximum")
        [(_, members)] = one.atoms
        del self.terms[i], self.terms[j]
        for part in largest(m._replace(body=(*m.body, refreshed(other._replace(factor=other.factor / one.factor))))
                            for m in map(renamed, members)):
            self.add(i, part._replace(factor=part.factor * one.factor))

    def do_part(self, i: int, p: int, k: int, expr: str, relation: str, cases: Any) -> None:
        """Member k of a maximum is taken apart by a guard into members that have some values, which are named, and into
        what contradicts itself."""
        term, facts, _ = self.at(i)
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max", "a product has no such maximum")
        members = term.atoms[p][1]
        need(type(k) is int and 0 <= k < len(members), "a maximum has no such member")
        member = members[k]
        read = self.reader([*term.names, *member.names])
        guard = make_guard(read(expr), relation)
        found = []
        for case, (word, *shown) in zip(((guard,), *opposites([guard])), cases, strict=True):
            part = member._replace(guards=(*member.guards, *case))
            if word == "none":
                check_witness(shown[0], None, [*facts, *inequalities(part.guards)], read)
                continue
            outer = self.reader(term.names)
            values = dict(zip(member.names, map(outer, shown[0]), strict=True))
            implied([Guard(g.expr.substituted(values), g.relation) for g in part.guards], shown[1], facts, outer)
            found.append(part)
        sums = largest(map(renamed, [*members[:k], *found, *members[k + 1:]]))
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], sums)

    def do_climb(self, i: int, p: int, proofs: Any) -> None:
        """The logarithm of a maximum is that of its members, if all of these are above 0."""
        term, facts, _ = self.at(i)
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][:2] == ("call", "log"), "it is no logarithm")
        [inner] = term.atoms[p][2]
        need(inner.factor > 0 and not inner.names and not inner.guards and [a[0] for a in inner.atoms] == ["max"],
             "it must be of a maximum")
        members = list(map(renamed, inner.atoms[0][1]))
        bodies = [tuple(t._replace(factor=t.factor * inner.factor) for t in m.body) for m in members]
        for member, body, proof in zip(members, bodies, proofs, strict=True):
            self.above_known([*term.names, *member.names], [*facts, *inequalities(member.guards)], body, *proof)
        sums = largest(m._replace(body=tuple(called("log", b))) for m, b in zip(members, bodies, strict=True))
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], sums)

    def do_extract(self, i: int, p: int) -> None:
        """``1 / sum(x * y)`` is ``1/x * 1 / sum(y)`` for an x that does not depend on what is summed over."""
        term = self.terms[i]
        need(type(p) is int and 0 <= p < len(term.atoms), "a product has no such factor")
        need(term.atoms[p][:2] == ("call", "1/"), "only a reciprocal is taken apart")
        whole, rest = apart(term.atoms[p][2])
        inner = ("call", "1/", (rest,))
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]],
                 [times(t, Term(Fraction(1), (), (), (inner,))) for t in reciprocal((whole,))])

    def do_value(self, i: int, p: int) -> None:
        """Of some functions, values are known; the logarithm of ``exp(x)`` is x."""
        term = self.terms[i]
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "call", "nothing is known of it")
        _, function, argument = term.atoms[p]
        argument = collected(argument)
        need(len(argument) <= 1, "it must be of a number, or the logarithm of one function")
        one = argument[0] if argument else Term(Fraction(0), (), (), ())
        need(one == Term(one.factor, (), (), one.atoms), "it must be of a number, or the logarithm of one function")
        if function == "log" and one.factor == 1 and [each[:2] for each in one.atoms] == [("call", "exp")]:
            found = one.atoms[0][2]
        else:
            need(not one.atoms and (function, one.factor) in VALUES, "its value is not known")
            found = (Term(VALUES[function, one.factor], (), (), ()),)
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], [t for t in found if t.factor])

    def do_odd(self, i: int, p: int) -> None:
        """f(-x) is -f(x)."""
        term = self.terms[i]
        need(type(p) is int and 0 <= p < len(term.atoms), "a product has no such factor")
        atom = term.atoms[p]
        need(atom[0] == "call" and atom[1] in ODD, "nothing is known of the opposite")
        sums = called(atom[1], negated(atom[2]))
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], negated(sums))

    def do_square(self, i: int, p: int) -> None:
        """``x * max(x, 0)`` is ``max(x, 0)`` twice: where x is below 0, both are 0."""
        term = self.terms[i]
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max", "a product has no such maximum")
        bodies = sorted((m.body for m in term.atoms[p][1] if not m.names and not m.guards), key=len)
        need(list(map(len, bodies)) == [0, 1] and len(term.atoms[p][1]) == 2, "the maximum must be that of x and 0")
        [inner] = bodies[1]
        need(not inner.names and not inner.guards and inner.factor, "x must be a product without variables")
        left = [*term.atoms[:p], *term.atoms[p + 1:]]
        for atom in inner.atoms:
            need(atom in left, "x must be among the factors")
            left.remove(atom)
        self.terms[i] = make_term(term.factor / inner.factor, term.names, term.guards, [*left, *[term.atoms[p]] * 2])

    def do_largest(self, i: int, p: int, k: int, mapping: Any, guards: Any, proofs: Any) -> None:
        """Atom p of the term, a maximum, is its member k at the values that ``mapping`` gives that one's variables:
        for all values of theirs, no member is above that."""
        term, facts, read = self.at(i)
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max", "a product has no such maximum")
        members = term.atoms[p][1]
        value = self.member(members, k, mapping, guards, facts, read)
        need(len(proofs) == len(members), "no member of a maximum may be above the largest")
        for member, steps in zip(map(renamed, members), proofs, strict=True):
            inner = [*term.names, *member.names], [*facts, *inequalities(member.guards)]
            self.at_least(*inner, value, member.body, steps)
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], value)

    def do_lose(self, i: int, p: int, k: int, steps: Any) -> None:
        """Atom p of the term, a maximum, is that of its members but k, which for no values is above the others."""
        term, facts, _ = self.at(i)
        need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max", "a product has no such maximum")
        members = term.atoms[p][1]
        need(type(k) is int and 0 <= k < len(members) and len(members) > 1, "a maximum has no such member")
        member, rest = renamed(members[k]), largest(map(renamed, [*members[:k], *members[k + 1:]]))
        self.at_least([*term.names, *member.names], [*facts, *inequalities(member.guards)], rest, member.body, steps)
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], rest)
