"""The steps of a certificate, played on terms: what is to be shown, and what a step starts to show within it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlc.substitution.check.atoms import Atoms
from mlc.substitution.check.attained import both
from mlc.substitution.check.bounds import Bounds
from mlc.substitution.check.integers import Expr, Guard, name, need, positive
from mlc.substitution.check.known import NOT_ZERO
from mlc.substitution.check.maxima import VANISHING, at_least_zero, called, largest
from mlc.substitution.check.parts import implied, member_of, one_to_one
from mlc.substitution.check.steps import Steps
from mlc.substitution.check.terms import (
    Member,
    Term,
    collected,
    filled,
    free_names,
    inequalities,
    make_term,
    names_of,
    negated,
    reciprocal,
    refreshed,
    renamed,
    times,
    unshared,
)
from mlc.substitution.check.witness import check_guard, check_witness
from mlc.substitution.codec import parse_fraction

__all__ = ["AtLeast", "Nested", "Play", "Within"]


class Nested(Steps):
    """Shows what a step demands of sums within it, by steps of its own."""

    def do_inside(self, i: int, p: int, steps: Any) -> None:
        """Atom p of the term is the same of what it is of, rewritten under the term's guards."""
        term, facts, _ = self.at(i)
        need(type(p) is int and 0 <= p < len(term.atoms), "a product has no such factor")
        atom, sums = term.atoms[p], list[Term]()
        if atom[0] == "call":
            argument = self.rewritten(term.names, facts, atom[2], steps)
            if atom[1] == "1/":
                sums = reciprocal(argument)
            elif atom[1]:
                sums = called(atom[1], argument)
            else:  # a member of a maximum
                sums = [member_of(collected(argument))]
        else:
            need(atom[0] == "max", "only functions and maxima are of something")
            members = [member_of(m.body)._replace(names=m.names, guards=m.guards) for m in map(renamed, atom[1])]
            found = self.rewritten(term.names, facts, members, steps, Inside)
            sums = largest(Member(t.names, t.guards, t.atoms[0][2]) for t in found)
        self.put(i, [*term.atoms[:p], *term.atoms[p + 1:]], sums)

    def rewritten(self, names: Sequence[str], facts: Sequence[Expr], terms: Sequence[Term], steps: Any,
                  kind: type[Play] | None = None) -> tuple[Term, ...]:
        """The same sum, or members that are the same one by one, for all values of ``names`` that the facts admit."""
        inner = (kind or Within)(self.sizes, [*self.context, *names], facts, self.divisors, terms, (), self.depth + 1)
        inner.run(steps)
        return tuple(inner.terms.values())

    def equal(self, names: Sequence[str], facts: Sequence[Expr], one: Sequence[Term], other: Sequence[Term], steps: Any
              ) -> None:
        """Shows that two sums are equal."""
        Play(self.sizes, [*self.context, *names], facts, self.divisors, one, other, self.depth + 1).run(steps)

    def at_least(self, names: Sequence[str], facts: Sequence[Expr], one: Sequence[Term], other: Sequence[Term],
                 steps: Any) -> None:
        """Shows that a sum is at least another one."""
        AtLeast(self.sizes, [*self.context, *names], facts, self.divisors, one, other, self.depth + 1).run(steps)


class Play(Atoms, Nested):
    """Shows that ``terms - others`` is 0, whatever the context's variables are: no term may be left."""

    def __init__(self, sizes: frozenset[str], context: Sequence[str], facts: Sequence[Expr], divisors: Sequence[Term],
                 terms: Sequence[Term] = (), others: Sequence[Term] = (), depth: int = 0) -> None:
        super().__init__(sizes, context, facts, [*terms, *negated(others)], divisors, depth)

    def end(self) -> None:
        need(not self.terms, f"{len(self.terms)} terms are left")

    def do_drop(self, i: int, witness: Any) -> None:
        if witness is not None:
            super().do_drop(i, witness)
            return
        zero = any(atom[0] == "call" and atom[1] in VANISHING and not atom[2] for atom in self.terms[i].atoms)
        need(self.terms[i].factor == 0 or zero, f"term {i} is not zero")
        del self.terms[i]

    def do_both(self, forth: Any, back: Any) -> None:
        both(self, AtLeast, forth, back)

    def do_count(self, i: int, k: int, witness: Any) -> None:
        term, _, read = self.look(i)
        old = term.names[k]
        using = [g for g in term.guards if old in g.expr.names]
        need(len(using) == 2 and using[0] == Guard(name(old), ">=") and using[1].relation == ">=",
             "a counted variable must have a plain range")
        extent = using[1].expr + name(old) + 1
        need(old not in extent.names and not any(old in names_of(a) for a in term.atoms),
             "a counted variable must not be read")
        rest = [g for g in term.guards if g not in using]
        check_witness(witness, extent, [*self.facts, *inequalities(rest)], read)
        need(positive(extent) or all(map(filled, term.atoms)), "a maximum may be of nothing where none are counted")
        del self.terms[i]
        for monomial, factor in extent.ordered():
            numbers = [("number", Expr({(a,): 1}), False) for a in monomial]
            names = [n for n in term.names if n != old]
            self.add(i, make_term(term.factor * factor, names, rest, [*term.atoms, *numbers]))

    def do_unit(self, i: int, j: int, mapping: Any, guards: Any) -> None:
        """The term times ``a * (1/a)``, which is 1: for all values of the term's variables, ``1/a`` is divisor j at the
        values that ``mapping`` gives that one's variables, so that ``a`` is not 0."""
        term, facts, read = self.at(i)
        argument = self.known(j, NOT_ZERO, mapping, guards, facts, read)
        inverse = reciprocal(argument)
        self.put(i, term.atoms, [times(a, refreshed(b)) for a in map(refreshed, argument) for b in inverse])

    def do_positive(self, i: int, p: int, k: int, mapping: Any, guards: Any) -> None:
        """What atom p of the term, a reciprocal, is of is plainly above 0: a divisor more."""
        term = self.terms[i]
        need(type(p) is int and 0 <= p < len(term.atoms), "a product has no such factor")
        self.above_zero(i, term.atoms[p], k, mapping, guards)
        self.divisors.append(unshared(Term(Fraction(1), term.names, term.guards, (term.atoms[p],))))

    def do_insert(self, i: int, atoms: Any, variables: Any, factor: str, mapping: Any, guards: Any) -> None:
        """A term and its opposite, which are 0 together: of term i without some atoms and variables. It stands where
        that one stands: at values of those variables that meet their guards."""
        term = self.terms[i]
        need(isinstance(atoms, list) and isinstance(variables, list), "atoms and variables must be numbered")
        gone = [term.names[k] for k in variables]
        using = [g for g in term.guards if not g.expr.names.isdisjoint(gone)]
        left = [a for k, a in enumerate(term.atoms) if k not in atoms]
        need(all(free_names(a).isdisjoint(gone) for a in left), "what stays must not depend on what goes")
        new = make_term(parse_fraction(factor), [n for n in term.names if n not in gone],
                        [g for g in term.guards if g not in using], left)
        read = self.reader(new.names)
        values = dict(zip(gone, map(read, mapping), strict=True))
        implied([Guard(g.expr.substituted(values), g.relation) for g in using], guards,
                [*self.facts, *inequalities(new.guards)], read)
        self.add(i, refreshed(new))
        self.add(i, refreshed(new._replace(factor=-new.factor)))

    def do_loosen(self, i: int, k: int, witnesses: Any) -> None:
        """A guard that the others imply, and that is on no variable of the term, goes."""
        term, _, read = self.look(i)
        need(type(k) is int and 0 <= k < len(term.guards), "there is no such guard")
        guard = term.guards[k]
        need(guard.expr.names.isdisjoint(term.names), "what is summed over keeps its ranges")
        rest = [*term.guards[:k], *term.guards[k + 1:]]
        check_guard(guard, witnesses, [*self.facts, *inequalities(rest)], read)
        self.terms[i] = term._replace(guards=tuple(rest))

    def do_merge(self, i: int, j: int, mapping: Any, inverse: Any, forth: Any, back: Any, pairing: Any, equal: Any
                 ) -> None:
        need(i != j, "a term is not merged with itself")
        one, facts, read = self.at(i)
        other, _, read_other = self.look(j)
        into = dict(zip(other.names, map(read, mapping), strict=True))
        outof = {n: read_other(t) for n, t in zip(one.names, inverse, strict=True)}
        moved = one_to_one(one.names, other, other.names, into, outof)
        implied(moved.guards, forth, facts, read)
        implied(one.guards, back, [*self.facts, *inequalities(moved.guards)], read)
        need(sorted(pairing) == list(range(len(one.atoms))) and len(pairing) == len(moved.atoms) == len(equal),
             "atoms must meet in pairs")
        for atom, partner, proof in zip(moved.atoms, pairing, equal, strict=True):
            self.same(facts, one.names, one.atoms[partner], atom, proof)
        factor = one.factor + self.terms.pop(j).factor
        if factor:
            self.terms[i] = one._replace(factor=factor)
        else:
            del self.terms[i]


class Within(Play):
    """Rewrites what a function is of, by the steps that leave the sum what it is and name no more variables."""

    WORDS = frozenset({"drop", "division", "divide variable", "guard", "split", "fix", "count", "merge", "unit", "odd",
                       "nonzero", "positive", "absorb", "square", "largest", "inside", "divisor inside", "insert",
                       "extract", "value", "lose", "parts", "negate", "loosen", "part", "climb", "ratio", "some",
                       "larger", "rooted", "groups", "common"})

    def run(self, steps: Sequence[Any]) -> None:
        need(all(isinstance(step[0], str) and step[0] in self.WORDS for step in steps), "that is no step within atoms")
        super().run(steps)

    def end(self) -> None:
        """Whatever the sum is, the atom is of that."""


class Inside(Within):
    """Rewrites the members of a maximum, each of them a term: by the steps alone that leave as many terms, each of them
    what it is, and every range of a member some values."""

    WORDS = frozenset({"fix", "inside"})


class AtLeast(Bounds, Play):
    """Shows that ``terms - others`` is at least 0: what is left is so by its signs."""

    def end(self) -> None:
        need(at_least_zero(self.terms.values()), "every term must be plainly at least 0")
