"""Terms under facts, and the steps that rewrite terms, take cases apart and show that atoms are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from fractions import Fraction
from typing import Any, Self

from mlc.substitution.check.attained import attain
from mlc.substitution.check.integers import Expr, Guard, name, need, parse, spend
from mlc.substitution.check.known import Known
from mlc.substitution.check.maxima import largest
from mlc.substitution.check.parts import implied, make_guard, maximum_at
from mlc.substitution.check.terms import (
    Member,
    Term,
    changed,
    collected,
    free_names,
    fresh_name,
    inequalities,
    make_term,
    negated,
    opposites,
    refreshed,
    renamed,
    substituted,
    unshared,
)
from mlc.substitution.check.witness import Reader, as_quotient, check_division, check_guard, check_witness, swapped

__all__ = ["Steps", "reader"]

_MOST_STEPS, _DEPTH = 1_000, 12


def reader(sizes: frozenset[str], context: Sequence[str], names: Sequence[str] = ()) -> Reader:
    """Reads texts in which ``@k`` is variable k of the context and ``$k`` variable k of ``names``."""
    variables, values = (("@", tuple(context)), ("$", tuple(names))), dict[str, Expr]()

    def read(text: Any) -> Expr:
        if not values:  # many a step has no texts
            values.update((f"{sign}{k}", name(n)) for sign, some in variables for k, n in enumerate(some))
        return parse(text, values, sizes)

    return read


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
        return reader(self.sizes, self.context, names)

    def at(self, i: int) -> tuple[Term, list[Expr], Reader]:
        """Term i, what holds where it stands, and a reader of texts about its variables. These may become a context's,
        and texts about them be put into atoms, so that no divisor, no other term and no atom may bind them: what is
        known of them there is not of others."""
        if not self.alone(i):
            self.terms[i] = unshared(self.terms[i])
        return self.look(i)

    def alone(self, i: int) -> bool:
        """Whether term i binds its names alone, as is plain where no atom binds any: then they need not be others."""
        term, others = self.terms[i], [*(t for k, t in self.terms.items() if k != i), *self.divisors]
        if not term.names:
            return True
        spend(1 + len(others))
        bound = {*self.context, *self.sizes}.union(*(t.names for t in others))
        return len({*term.names}) == len(term.names) and bound.isdisjoint(term.names) and all(
            atom[0] in ("read", "number") for t in (term, *others) for atom in t.atoms)

    def look(self, i: int) -> tuple[Term, list[Expr], Reader]:
        """The same for a step that only looks at the term, or adds guards to it: the variables keep their names."""
        term = self.terms[i]
        spend(len(self.facts) + 2 * len(term.guards))
        return term, [*self.facts, *inequalities(term.guards)], self.reader(term.names)

    def add(self, origin: int, term: Term) -> None:
        """A term that was a part of number ``origin``."""
        self.terms[self.next] = term
        self.next += 1

    def put(self, i: int, atoms: Sequence[Any], sums: Sequence[Term]) -> None:
        """The term with a sum beside ``atoms``, which are all that it keeps."""
        term = self.terms.pop(i)
        for part in map(refreshed, sums):
            self.add(i, make_term(term.factor * part.factor, (*term.names, *part.names),
                                  (*term.guards, *part.guards), (*atoms, *part.atoms)))

    # --- variables and guards -----------------------------------------------------------------------------------------

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

    # --- the context --------------------------------------------------------------------------------------------------

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
        fact = read(expr)
        check_witness(witness, fact, self.facts, read)
        self.facts.append(fact)

    # --- cases --------------------------------------------------------------------------------------------------------

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

    # --- atoms that are equal -----------------------------------------------------------------------------------------

    def same(self, facts: Sequence[Expr], names: Sequence[str], a: Any, b: Any, proof: Any) -> None:
        """Two atoms are equal for all values of ``names``, given the facts."""
        read = self.reader(names)
        need(a[0] == b[0], "atoms must be of one kind")
        if a[0] in ("read", "number"):
            rows, columns = (a[2], b[2]) if a[0] == "read" else ((a[1],), (b[1],))
            need(a[1] == b[1] if a[0] == "read" else a[2] == b[2], "reads must be of one tensor")
            need(len(rows) == len(columns) == len(proof), "every index must be equal")
            for x, y, witnesses in zip(rows, columns, proof, strict=True):
                check_guard(Guard(x - y, "=="), witnesses, facts, read)
        elif a[0] == "call":
            need(a[1] == b[1], "functions must be the same")
            self.equal(names, facts, a[2], b[2], proof)
        else:
            forth, back = proof
            self.covered(facts, names, a[1], b[1], forth)
            self.covered(facts, names, b[1], a[1], back)

    def covered(self, facts: Sequence[Expr], names: Sequence[str], ones: Sequence[Member], others: Sequence[Member],
                proofs: Any) -> None:
        """Every value of a maximum is one of another maximum's, so that it is at most that."""
        need(len(proofs) == len(ones), "every member of a maximum must be covered")
        for one, proof in zip(map(renamed, ones), proofs, strict=True):
            self.met(facts, names, one, others, proof)

    def met(self, facts: Sequence[Expr], names: Sequence[str], one: Member, others: Sequence[Member], proof: Any,
            depth: int = 0) -> None:
        """For all values of its variables the member is a member of ``others``, at the values that ``mapping`` gives
        that one's variables; in cases, of which one may not occur."""
        need(depth <= _DEPTH, "cases are nested too deep")
        spend(1 + len(self.divisors))
        known, read = [*facts, *inequalities(one.guards)], reader(self.sizes, [*self.context, *names, *one.names])
        if proof[0] == "none":
            check_witness(proof[1], None, known, read)
            return
        if proof[0] == "split":
            _, expr, relation, parts = proof
            guard = make_guard(read(expr), relation)
            for case, part in zip(((guard,), *opposites([guard])), parts, strict=True):
                self.met(facts, names, one._replace(guards=(*one.guards, *case)), others, part, depth + 1)
            return
        k, mapping, guards, steps = proof
        value = self.member(others, k, mapping, guards, known, read)
        self.equal([*names, *one.names], known, one.body, value, steps)

    def member(self, members: Sequence[Member], k: Any, mapping: Any, guards: Any, facts: Sequence[Expr], read: Reader
               ) -> tuple[Term, ...]:
        """Member k at the values that ``mapping`` gives its variables, which meet its guards."""
        need(type(k) is int and 0 <= k < len(members), "a maximum has no such member")
        there = renamed(members[k])
        values = dict(zip(there.names, map(read, mapping), strict=True))
        moved = substituted(Term(Fraction(1), (), there.guards, (("call", "", there.body),)), values)
        implied(moved.guards, guards, facts, read)
        return tuple(map(refreshed, moved.atoms[0][2]))
