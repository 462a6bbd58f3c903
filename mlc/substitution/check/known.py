"""What is known wherever a goal is to be shown: divisors, which are not 0, and what follows of others."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlc.substitution.check.integers import Expr, need
from mlc.substitution.check.maxima import GROWING, VANISHING, at_least_zero, never_zero, vanishes
from mlc.substitution.check.parts import apart, implied, part_at
from mlc.substitution.check.terms import (
    Member,
    Term,
    collected,
    divisor_of,
    free_names,
    inequalities,
    is_size,
    make_term,
    negated,
    reciprocal,
    refreshed,
    substituted,
    times,
    unshared,
)
from mlc.substitution.check.witness import Reader
from mlc.substitution.codec import parse_fraction

__all__ = ["NOT_NEGATIVE", "NOT_ZERO", "Known"]

#: of which functions what they are of is not 0, and is at least 0, where they are defined; of the empty name by cases
NOT_ZERO, NOT_NEGATIVE = frozenset({"1/", "log"}), frozenset({"log", "sqrt", ""})
_ANY = NOT_ZERO | NOT_NEGATIVE
#: sums that are multiplied with each other, and terms of their product
_FACTORS, _TERMS = 4, 200


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

    def equal(self, names: Sequence[str], facts: Sequence[Expr], one: Sequence[Term], other: Sequence[Term], steps: Any
              ) -> None:
        """Shows by steps that two sums are equal for all values of ``names`` that the facts admit."""
        raise NotImplementedError

    def put(self, i: int, atoms: Sequence[Any], sums: Sequence[Term]) -> None:
        """Term i with a sum beside ``atoms``, which are all that it keeps."""
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
        divisor = unshared(self.divisors[j])
        [(_, function, argument)] = divisor.atoms
        facts = [*self.facts, *inequalities(divisor.guards)]
        more = ("call", function, collected(self.rewritten(divisor.names, facts, argument, steps)))
        self.divisors.append(divisor._replace(atoms=(more,)))

    def do_void(self, j: int, mapping: Any, guards: Any) -> None:
        """What is known not to be 0 is 0, at some values: that cannot be, so nothing is to be shown."""
        need(not collected(self.known(j, NOT_ZERO, mapping, guards, self.facts, self.reader())), "it must be 0")
        self.terms.clear()

    # --- what else is not 0 ------------------------------------------------------------------------------------------

    def quotient(self, i: int, p: Any, over: Any, under: Any, factor: str, steps: Any) -> list[Term]:
        """What atom p of term i, a reciprocal ``1/g``, is as a quotient: ``g`` times the sums that divisors ``over``
        are of is ``factor`` times those that ``under`` are of, none of which is 0. So ``g`` is not 0 either."""
        term, facts, read = self.at(i)
        argument = self.divided_by(i, p)
        need(len(over) + len(under) <= _FACTORS, f"at most {_FACTORS} sums are multiplied")
        tops = [self.known(j, _ANY, mapping, guards, facts, read) for j, mapping, guards in over]
        bottoms = [self.known(j, NOT_ZERO, mapping, guards, facts, read) for j, mapping, guards in under]
        number = parse_fraction(factor)
        need(number != 0, "a factor must not be 0")
        self.equal(term.names, facts, product([argument, *tops]), product([_number(number), *bottoms]), steps)
        return product([_number(1 / number), *tops, *map(reciprocal, bottoms)])

    def divided_by(self, i: int, p: Any) -> tuple[Term, ...]:
        """What atom p of term i, a reciprocal, is of."""
        atoms = self.terms[i].atoms
        need(type(p) is int and 0 <= p < len(atoms) and atoms[p][:2] == ("call", "1/"), "there is no such reciprocal")
        return tuple(atoms[p][2])

    def do_ratio(self, i: int, p: int, over: Any, under: Any, factor: str, steps: Any) -> None:
        """A reciprocal as a quotient of what is known."""
        found = self.quotient(i, p, over, under, factor, steps)
        atoms = self.terms[i].atoms
        self.put(i, [*atoms[:p], *atoms[p + 1:]], found)

    def some(self, i: int, p: int, j: Any, mapping: Any, guards: Any, signs: Any, meets: Any) -> None:
        """What atom p of term i, a reciprocal, is of is not 0: none of its products is ever below 0, so that all are 0
        if the sum is; and then every product of divisor j is."""
        term, facts, read = self.at(i)
        argument = self.divided_by(i, p)
        need(len(signs) == len(argument), "no product may be below 0")
        for each, steps in zip(map(refreshed, argument), signs, strict=True):
            inner = [*term.names, *each.names], [*facts, *inequalities(each.guards)]
            self.at_least(*inner, (each._replace(names=(), guards=()),), (), steps)
        other = collected(self.known(j, NOT_ZERO, mapping, guards, facts, read))
        need(len(meets) == len(other), "every product of the divisor must be 0")
        for one, (k, values, witnesses) in zip(map(refreshed, other), meets, strict=True):
            need(type(k) is int and 0 <= k < len(argument), "there is no such product")
            there, inside = refreshed(argument[k]), self.reader([*term.names, *one.names])
            moved = substituted(there._replace(names=()), dict(zip(there.names, map(inside, values), strict=True)))
            implied(moved.guards, witnesses, [*facts, *inequalities(one.guards)], inside)
            need(moved.factor != 0 and all(never_zero(_alone(a)) or any(vanishes((_alone(b),), a) for b in one.atoms)
                                           for a in moved.atoms), "the product must be 0 where that one is")

    def do_some(self, i: int, p: int, *words: Any) -> None:
        """A sum of what is at least 0 that is not 0: a divisor more."""
        self.some(i, p, *words)
        term = self.terms[i]
        self.divisors.append(unshared(Term(Fraction(1), term.names, term.guards, (term.atoms[p],))))

    def do_larger(self, j: int, p: int, k: int) -> None:
        """A maximum is not 0 and not below 0, and its members but k are not above 0: so member k is above 0. A divisor
        more, of which that is known."""
        divisor = self.divisor(j, NOT_ZERO)
        [term] = collected(divisor.atoms[0][2])
        need(not term.names and type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max",
             "it must have a maximum for a factor")
        members = term.atoms[p][1]
        need(type(k) is int and 0 <= k < len(members) and not members[k].names and not members[k].guards,
             "the member must have one value")
        rest = [m for place, m in enumerate(members) if place != k]
        need(all(map(_at_most_zero, rest)) and any(at_least_zero(_kept(m.body)) for m in rest),
             "the others must be at most 0, and one must be 0")
        self.divisors.append(divisor._replace(guards=(*divisor.guards, *term.guards),
                                              atoms=(("call", "log", members[k].body),)))

    def do_rooted(self, j: int) -> None:
        """A root is not 0, or an f(x) is above 0 where f grows and f(0) is 0: what it is of is above 0. A divisor more,
        of which that is known."""
        divisor = self.divisor(j, NOT_ZERO)
        [(_, kind, argument)] = divisor.atoms
        [term] = collected(argument)
        need(term == Term(term.factor, (), (), term.atoms) and [a[0] for a in term.atoms] == ["call"],
             "it must be of a function")
        [(_, function, inner)] = term.atoms
        need(function == "sqrt" or (kind == "log" and term.factor > 0 and function in GROWING & VANISHING),
             "that is not known of it")
        self.divisors.append(divisor._replace(atoms=(("call", "log", inner),)))

    def do_groups(self, j: int) -> None:
        """A sum of products over variables that no factor and no guard has together is a product of sums, none of which
        is 0: each a divisor more."""
        divisor = self.divisor(j, NOT_ZERO)
        _, rest = apart(divisor.atoms[0][2])
        outer = [g for g in rest.guards if g.expr.names.isdisjoint(rest.names)]
        for names in _groups(rest):
            inside = tuple(n for n in rest.names if n in names)
            part = make_term(Fraction(1), inside, [g for g in rest.guards if g in outer or g.expr.names & names],
                             [a for a in rest.atoms if free_names(a) & names])
            self.divisors.append(divisor._replace(atoms=(("call", "1/", (part,)),)))

    def do_common(self, j: int, proofs: Any) -> None:
        """Every product of what divisor j is of has the same sum for a factor, which is not 0 either: a divisor
        more."""
        divisor = unshared(self.divisor(j, NOT_ZERO))
        facts = [*self.facts, *inequalities(divisor.guards)]
        first, *others = [apart((each,))[1] for each in collected(divisor.atoms[0][2])]
        for other, steps in zip(others, proofs, strict=True):
            self.equal(divisor.names, facts, (refreshed(first),), (refreshed(other),), steps)
        self.divisors.append(divisor._replace(atoms=(("call", "1/", (first,)),)))


def product(sums: Sequence[Sequence[Term]]) -> list[Term]:
    """The sums multiplied out."""
    found = [Term(Fraction(1), (), (), ())]
    for each in sums:
        need(len(found) * len(each) <= _TERMS, f"a product must have at most {_TERMS} terms")
        found = [times(refreshed(a), refreshed(b)) for a in found for b in each]
    return found


def _number(value: Fraction) -> tuple[Term, ...]:
    return (Term(value, (), (), ()),)


def _alone(atom: Any) -> Term:
    return Term(Fraction(1), (), (), (atom,))


def _kept(body: Sequence[Term]) -> list[Term]:
    """A sum without products of which a factor is a function of 0 that is 0."""
    return [t for t in body if not any(a[0] == "call" and a[1] in VANISHING and not a[2] for a in t.atoms)]


def _at_most_zero(member: Member) -> bool:
    return at_least_zero(negated(_kept(member.body)))


def _groups(term: Term) -> list[set[str]]:
    """The variables that a product is summed over, those together that a factor or a guard depends on together."""
    found: list[set[str]] = [{name} for name in term.names]
    for used in [*(set(g.expr.names) for g in term.guards), *map(free_names, term.atoms)]:
        met = [group for group in found if group & used]
        if len(met) > 1:
            found = [group for group in found if group not in met] + [set().union(*met)]
    return found
