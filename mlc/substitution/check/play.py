"""The steps of a certificate, played on terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from fractions import Fraction
from typing import Any, Self

from mlc.substitution.check.attained import attain, both, each_member, gentle, rise
from mlc.substitution.check.integers import Expr, Guard, name, need, parse, positive, spend
from mlc.substitution.check.known import NOT_NEGATIVE, NOT_ZERO, Known
from mlc.substitution.check.maxima import (
    AT_MOST_ONE,
    BELOW,
    CONTRACTING,
    EXCEEDING,
    GROWING,
    ODD,
    VALUES,
    VANISHING,
    at_least_zero,
    called,
    largest,
)
from mlc.substitution.check.parts import apart, implied, make_guard, maximum_at, member_of, one_to_one
from mlc.substitution.check.terms import (
    Member,
    Term,
    changed,
    collected,
    filled,
    free_names,
    fresh_name,
    inequalities,
    make_term,
    names_of,
    negated,
    opposites,
    reciprocal,
    refreshed,
    renamed,
    substituted,
    times,
    unshared,
)
from mlc.substitution.check.witness import Reader, as_quotient, check_division, check_guard, check_witness, swapped
from mlc.substitution.codec import parse_fraction

__all__ = ["AtLeast", "Play", "Steps", "Within"]

_MOST_STEPS, _DEPTH = 1_000, 12


class Steps(Known):
    """Terms under facts about the variables of a context, and the steps that keep what each term sums.

    Keeping a sum, these keep the instances of the atoms too: for which values of the variables which atom is met.
    """

    def __init__(self, sizes: frozenset[str], context: Sequence[str], facts: Sequence[Expr], terms: Sequence[Term],
                 divisors: Sequence[Term], depth: int = 0) -> None:
        """``divisors`` are terms of one atom each, a function of what is known wherever anything is to be shown: of
        ``1/`` and ``log`` that it is not 0, of ``log``, ``sqrt`` and the empty name that it is at least 0."""
        need(depth <= _DEPTH, "functions are nested too deep")
        spend(1 + len(terms) + len(divisors))
        self.sizes, self.depth = sizes, depth
        self.context, self.facts, self.divisors = list(context), list(facts), list(divisors)
        self.terms = dict(enumerate(terms))
        self.next = len(self.terms)

    def run(self, steps: Sequence[Any]) -> None:
        need(len(steps) <= _MOST_STEPS, f"there must be at most {_MOST_STEPS} steps")
        for word, *words in steps:
            method = getattr(self, "do_" + str(word)[:40].replace(" ", "_"), None)
            if method is None:
                need(False, f"{str(word)[:40]!r} is no step here")
            else:
                method(*words)
        self.end()

    def end(self) -> None:
        """What must be so after the last step."""
        raise NotImplementedError

    def reader(self, names: Sequence[str] = ()) -> Reader:
        """Reads texts in which ``@k`` is variable k of the context and ``$k`` variable k of ``names``."""
        values = {f"@{k}": name(n) for k, n in enumerate(self.context)} | {f"${k}": name(n)
                                                                           for k, n in enumerate(names)}
        return lambda text: parse(text, values, self.sizes)

    def at(self, i: int) -> tuple[Term, list[Expr], Reader]:
        """Term i, what holds where it stands, and a reader of texts about its variables. These may become a context's,
        and texts about them be put into atoms, so that no divisor, no other term and no atom may bind them: what is
        known of them there is not of others."""
        self.terms[i] = unshared(self.terms[i])
        return self.look(i)

    def look(self, i: int) -> tuple[Term, list[Expr], Reader]:
        """The same for a step that only looks at the term, or adds guards to it: the variables keep their names."""
        term = self.terms[i]
        spend(len(self.facts) + 2 * len(term.guards))
        return term, [*self.facts, *inequalities(term.guards)], self.reader(term.names)

    def add(self, origin: int, term: Term) -> None:
        """A term that was a part of number ``origin``."""
        self.terms[self.next] = term
        self.next += 1

    def do_drop(self, i: int, witness: Any) -> None:
        _, facts, read = self.look(i)
        check_witness(witness, None, facts, read)
        del self.terms[i]

    def do_division(self, i: int, quotient: str, by: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        atom, value = as_quotient(read(quotient)), read(by)
        check_division(atom, value, low, high, facts, read)
        new = changed(term, lambda p: swapped(p, atom, value))
        # guards that say what the quotient is say it no more: what is left must still leave it no other value
        left = [*self.facts, *(swapped(p, atom, value) for p in inequalities(term.guards))]
        check_division(atom, value, low, high, left, read)
        self.terms[i] = new

    def do_divide_variable(self, i: int, k: int, divisor: str, witness: Any) -> None:
        term, facts, read = self.at(i)
        d, old, q, r = read(divisor), term.names[k], fresh_name(), fresh_name()
        need(old not in d.names, "a divisor must not depend on the variable")
        check_witness(witness, d - 1, facts, read)
        new = substituted(term, {old: d * name(q) + name(r)})
        names = [*(q if n == old else n for n in term.names), r]
        ranges = (Guard(name(r), ">="), Guard(d - 1 - name(r), ">="))
        self.terms[i] = make_term(new.factor, names, (*new.guards, *ranges), new.atoms)

    def do_guard(self, i: int, expr: str, relation: str, witnesses: Any) -> None:
        term, facts, read = self.look(i)
        guard = make_guard(read(expr), relation)
        check_guard(guard, witnesses, facts, read)
        self.terms[i] = term._replace(guards=(*term.guards, guard))

    def do_split(self, i: int, expr: str, relation: str) -> None:
        term, _, read = self.look(i)
        guard = make_guard(read(expr), relation)
        cases = [make_term(term.factor, term.names, (*term.guards, *case), term.atoms)
                 for case in ((guard,), *opposites([guard]))]
        self.terms[i] = cases[0]
        for case in cases[1:]:
            self.add(i, case)

    def do_fix(self, i: int, k: int, value: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        old, expr = term.names[k], read(value)
        need(old not in expr.names, "a variable must not be fixed by itself")
        check_witness(low, expr - name(old), facts, read)
        check_witness(high, name(old) - expr, facts, read)
        new = substituted(term, {old: expr})
        self.terms[i] = make_term(new.factor, [n for n in term.names if n != old], new.guards, new.atoms)

    def everywhere(self, of: Callable[[Expr], Expr]) -> None:
        self.facts = [of(p) for p in self.facts]
        self.terms = {i: changed(t, of) for i, t in self.terms.items()}
        self.divisors = [changed(t, of) for t in self.divisors]

    def do_context_division(self, quotient: str, by: str, low: Any, high: Any) -> None:
        read = self.reader()
        atom, value = as_quotient(read(quotient)), read(by)
        check_division(atom, value, low, high, self.facts, read)
        self.everywhere(lambda p: swapped(p, atom, value))

    def do_context_split(self, k: int, divisor: str, witness: Any) -> None:
        read = self.reader()
        d, old, q, r = read(divisor), self.context[k], fresh_name(), fresh_name()
        need(old not in d.names, "a divisor must not depend on the variable")
        check_witness(witness, d - 1, self.facts, read)
        change = {old: d * name(q) + name(r)}
        self.everywhere(lambda p: p.substituted(change))
        self.context[k] = q
        self.context.append(r)
        self.facts += [name(r), d - 1 - name(r)]

    def do_context_fact(self, expr: str, witness: Any) -> None:
        read = self.reader()
        check_witness(witness, read(expr), self.facts, read)
        self.facts.append(read(expr))

    # --- within atoms ------------------------------------------------------------------------------------------------

    def put(self, i: int, atoms: Sequence[Any], sums: Sequence[Term]) -> None:
        """The term with a sum beside ``atoms``, which are all that it keeps."""
        term = self.terms.pop(i)
        for part in map(refreshed, sums):
            self.add(i, make_term(term.factor * part.factor, (*term.names, *part.names),
                                  (*term.guards, *part.guards), (*atoms, *part.atoms)))

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

    # --- cases -------------------------------------------------------------------------------------------------------

    def do_case(self, expr: str, relation: str, proofs: Any) -> None:
        """What is to be shown is shown where a guard on the context holds, and where it does not."""
        guard = make_guard(self.reader()(expr), relation)
        for case, steps in zip(((guard,), *opposites([guard])), proofs, strict=True):
            self.branch(inequalities(case), ()).run(steps)
        self.terms.clear()

    def do_order(self, path: Any, witnesses: Any, chosen: Any, proofs: Any) -> None:
        """What is to be shown is shown where the largest of the ``chosen`` members of a maximum is not below that of
        the others, and where it is not above: one of both is so. The guards of the terms that it stands in hold."""
        members, guards = maximum_at(self.terms, path)
        implied(guards, witnesses, self.facts, self.reader())
        need(free_names(("max", members)) <= {*self.context, *self.sizes}, "what is compared must be of the context")
        need(isinstance(chosen, list) and all(type(k) is int and 0 <= k < len(members) for k in chosen)
             and 0 < len(set(chosen)) < len(members), "some members must be compared with the others")
        sides = [[m for k, m in enumerate(members) if (k in chosen) is first] for first in (True, False)]
        for (one, other), steps in zip((sides, sides[::-1]), proofs, strict=True):
            whole = largest(map(renamed, one))
            self.branch((), [Term(Fraction(1), m.names, m.guards, (("call", "", collected(
                [*map(refreshed, whole), *negated(m.body)])),)) for m in map(renamed, other)]).run(steps)
        self.terms.clear()

    def do_attain(self, path: Any, k: Any, mapping: Any, guards: Any, proofs: Any) -> None:
        attain(self, path, k, mapping, guards, proofs)

    def branch(self, facts: Sequence[Expr], divisors: Sequence[Term]) -> Self:
        """The same to show, of which more is known."""
        spend(1 + len(self.terms) + len(self.divisors))
        other = copy(self)
        other.context, other.facts = list(self.context), [*self.facts, *facts]
        other.terms, other.divisors = dict(self.terms), [*self.divisors, *divisors]
        other.depth += 1
        need(other.depth <= _DEPTH, "cases are nested too deep")
        return other

    # --- atoms that are equal ----------------------------------------------------------------------------------------

    def same(self, facts: Sequence[Expr], names: Sequence[str], a: Any, b: Any, proof: Any) -> None:
        """Two atoms are equal for all values of ``names``, given the facts."""
        read, context = self.reader(names), [*self.context, *names]
        need(a[0] == b[0], "atoms must be of one kind")
        if a[0] in ("read", "number"):
            rows, columns = (a[2], b[2]) if a[0] == "read" else ((a[1],), (b[1],))
            need(a[1] == b[1] if a[0] == "read" else a[2] == b[2], "reads must be of one tensor")
            need(len(rows) == len(columns) == len(proof), "every index must be equal")
            for x, y, witnesses in zip(rows, columns, proof, strict=True):
                check_guard(Guard(x - y, "=="), witnesses, facts, read)
        elif a[0] == "call":
            need(a[1] == b[1], "functions must be the same")
            Play(self.sizes, context, facts, self.divisors, a[2], b[2], self.depth + 1).run(proof)
        else:
            forth, back = proof
            self.covered(facts, context, a[1], b[1], forth)
            self.covered(facts, context, b[1], a[1], back)

    def covered(self, facts: Sequence[Expr], context: Sequence[str], ones: Sequence[Member], others: Sequence[Member],
                proofs: Any) -> None:
        """Every value of a maximum is one of another maximum's, so that it is at most that."""
        need(len(proofs) == len(ones), "every member of a maximum must be covered")
        for one, proof in zip(map(renamed, ones), proofs, strict=True):
            self.met(facts, context, one, others, proof)

    def met(self, facts: Sequence[Expr], context: Sequence[str], one: Member, others: Sequence[Member], proof: Any,
            depth: int = 0) -> None:
        """For all values of its variables the member is a member of ``others``, at the values that ``mapping`` gives
        that one's variables; in cases, of which one may not occur."""
        need(depth <= _DEPTH, "cases are nested too deep")
        inner = Play(self.sizes, [*context, *one.names], [*facts, *inequalities(one.guards)], self.divisors)
        read = inner.reader()
        if proof[0] == "none":
            check_witness(proof[1], None, inner.facts, read)
            return
        if proof[0] == "split":
            _, expr, relation, parts = proof
            guard = make_guard(read(expr), relation)
            for case, part in zip(((guard,), *opposites([guard])), parts, strict=True):
                self.met(facts, context, one._replace(guards=(*one.guards, *case)), others, part, depth + 1)
            return
        k, mapping, guards, steps = proof
        value = self.member(others, k, mapping, guards, inner.facts, read)
        Play(self.sizes, inner.context, inner.facts, self.divisors, one.body, value, self.depth + 1).run(steps)

    def member(self, members: Sequence[Member], k: Any, mapping: Any, guards: Any, facts: Sequence[Expr], read: Reader
               ) -> tuple[Term, ...]:
        """Member k at the values that ``mapping`` gives its variables, which meet its guards."""
        need(type(k) is int and 0 <= k < len(members), "a maximum has no such member")
        there = renamed(members[k])
        values = dict(zip(there.names, map(read, mapping), strict=True))
        moved = substituted(Term(Fraction(1), (), there.guards, (("call", "", there.body),)), values)
        implied(moved.guards, guards, facts, read)
        return tuple(map(refreshed, moved.atoms[0][2]))


class Play(Steps):
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


class AtLeast(Play):
    """Shows that ``terms - others`` is at least 0: what is left is so by its signs."""

    def end(self) -> None:
        need(at_least_zero(self.terms.values()), "every term must be plainly at least 0")

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
