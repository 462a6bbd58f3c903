"""The steps of a certificate, played on the terms of source minus target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from mlc.operators.index import Condition, Poly
from mlc.substitution.check.terms import (
    Term,
    changed,
    fresh_name,
    inequalities,
    make_term,
    negated,
    opposites,
    substituted,
    symbols_of,
    undefined,
)
from mlc.substitution.check.witness import (
    Reader,
    as_quotient,
    check_condition,
    check_division,
    check_witness,
    need,
    swapped,
)
from mlc.substitution.codec import parse_size

__all__ = ["Play"]


class Play:
    """Plays steps on the terms of ``terms - others``, which have to end empty.

    ``others`` come from the target: what may be undefined there does not cancel among them.
    """

    def __init__(self, context: Sequence[str], facts: Sequence[Poly], terms: Sequence[Term] = (),
                 others: Sequence[Term] = ()) -> None:
        self.context, self.facts = list(context), list(facts)
        self.terms = dict(enumerate([*terms, *negated(others)]))
        self.next = len(self.terms)
        self.new = set(range(len(terms), self.next))

    def run(self, steps: Sequence[Any]) -> None:
        for name, *words in steps:
            method = getattr(self, "do_" + str(name).replace(" ", "_"), None)
            need(method is not None, f"unknown step {name!r}")
            assert method is not None
            method(*words)
        need(not self.terms, f"{len(self.terms)} terms are left")

    def reader(self, names: Sequence[str] = ()) -> Reader:
        """Reads texts in which ``@k`` is variable k of the context and ``$k`` variable k of ``names``."""
        values = {f"@{k}": Poly.symbol(n) for k, n in enumerate(self.context)}
        values |= {f"${k}": Poly.symbol(n) for k, n in enumerate(names)}

        def read(text: str) -> Poly:
            poly = parse_size(text)
            odd = [s for s in poly.symbols if s[0] in "$@" and s not in values]
            need(not odd, f"{odd} are no variables here")
            return poly.substitute(values)

        return read

    def at(self, i: int) -> tuple[Term, list[Poly], Reader]:
        term = self.terms[i]
        return term, [*self.facts, *inequalities(term.guards)], self.reader(term.names)

    def add(self, origin: int, term: Term) -> None:
        if origin in self.new:
            self.new.add(self.next)
        self.terms[self.next] = term
        self.next += 1

    def do_drop(self, i: int, witness: Any) -> None:
        term, facts, read = self.at(i)
        if witness is None:
            need(term.factor == 0, f"term {i} is not zero")
        else:
            check_witness(witness, None, facts, read)
        del self.terms[i]

    def do_division(self, i: int, quotient: str, by: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        atom, value = as_quotient(read(quotient)), read(by)
        check_division(atom, value, low, high, facts, read)
        self.terms[i] = changed(term, lambda p: swapped(p, atom, value))

    def do_divide_variable(self, i: int, k: int, divisor: str, witness: Any) -> None:
        term, facts, read = self.at(i)
        d, old, q, r = read(divisor), term.names[k], fresh_name(), fresh_name()
        need(old not in d.symbols, "a divisor must not depend on the variable")
        check_witness(witness, d - 1, facts, read)
        new = substituted(term, {old: d * Poly.symbol(q) + Poly.symbol(r)})
        names = [*(q if n == old else n for n in term.names), r]
        ranges = (Condition(Poly.symbol(r), ">="), Condition(d - 1 - Poly.symbol(r), ">="))
        self.terms[i] = make_term(new.factor, names, (*new.guards, *ranges), new.atoms)

    def do_guard(self, i: int, poly: str, relation: str, witnesses: Any) -> None:
        term, facts, read = self.at(i)
        guard = _condition(read(poly), relation)
        check_condition(guard, witnesses, facts, read)
        self.terms[i] = term._replace(guards=(*term.guards, guard))

    def do_split(self, i: int, poly: str, relation: str) -> None:
        term, _, read = self.at(i)
        guard = _condition(read(poly), relation)
        cases = [make_term(term.factor, term.names, (*term.guards, *case), term.atoms)
                 for case in ((guard,), *opposites([guard]))]
        self.terms[i] = cases[0]
        for case in cases[1:]:
            self.add(i, case)

    def do_fix(self, i: int, k: int, value: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        name, poly = term.names[k], read(value)
        need(name not in poly.symbols, "a variable must not be fixed by itself")
        check_witness(low, poly - Poly.symbol(name), facts, read)
        check_witness(high, Poly.symbol(name) - poly, facts, read)
        new = substituted(term, {name: poly})
        self.terms[i] = make_term(new.factor, [n for n in term.names if n != name], new.guards, new.atoms)

    def do_count(self, i: int, k: int, witness: Any) -> None:
        term, _, read = self.at(i)
        name = term.names[k]
        using = [g for g in term.guards if name in g.poly.symbols]
        need(len(using) == 2 and using[0] == Condition(Poly.symbol(name), ">=") and using[1].relation == ">=",
             "a counted variable must have a plain range")
        extent = using[1].poly + Poly.symbol(name) + 1
        need(name not in extent.symbols and not any(name in symbols_of(a) for a in term.atoms),
             "a counted variable must not be read")
        rest = [g for g in term.guards if g not in using]
        check_witness(witness, extent, [*self.facts, *inequalities(rest)], read)
        del self.terms[i]
        for monomial, factor in extent.terms:
            sizes = [("number", Poly.atom(a), False) for a in monomial]
            names = [n for n in term.names if n != name]
            self.add(i, make_term(term.factor * factor, names, rest, [*term.atoms, *sizes]))

    def do_merge(self, i: int, j: int, mapping: Any, inverse: Any, forth: Any, back: Any, pairing: Any, equal: Any
                 ) -> None:
        need(i != j, "a term is not merged with itself")
        need(not (i in self.new and j in self.new and undefined(self.terms[i].atoms)),
             "what may be undefined in the target must be in the source")
        one, facts, read = self.at(i)
        other, _, read_other = self.at(j)
        names = [fresh_name() for _ in other.names]
        there = dict(zip(other.names, map(Poly.symbol, names), strict=True))
        into = dict(zip(names, map(read, mapping), strict=True))
        outof = {n: read_other(t).substitute(there) for n, t in zip(one.names, inverse, strict=True)}
        moved = self.moved(one.names, substituted(other, there), names, into, outof)
        self.implied(moved.guards, forth, facts, read)
        self.implied(one.guards, back, [*self.facts, *inequalities(moved.guards)], read)
        need(sorted(pairing) == list(range(len(one.atoms))) and len(pairing) == len(moved.atoms) == len(equal),
             "atoms must meet in pairs")
        inner = Play([*self.context, *one.names], facts)
        for atom, partner, proof in zip(moved.atoms, pairing, equal, strict=True):
            inner.same(one.atoms[partner], atom, proof, read)
        factor = one.factor + self.terms.pop(j).factor
        if j not in self.new:
            self.new.discard(i)
        if factor:
            self.terms[i] = one._replace(factor=factor)
        else:
            del self.terms[i]

    @staticmethod
    def moved(names: Sequence[str], other: Term, others: Sequence[str], into: Mapping[str, Poly],
              outof: Mapping[str, Poly]) -> Term:
        """``other`` in the variables ``names``, for a bijection between all integers of the one and of the other."""
        need(len(names) == len(others), "terms must have as many variables")
        need(all(p.substitute(outof) == Poly.symbol(n) for n, p in into.items())
             and all(p.substitute(into) == Poly.symbol(n) for n, p in outof.items()), "variables must map one to one")
        return substituted(other, into)

    @staticmethod
    def implied(guards: Sequence[Condition], witnesses: Sequence[Any], facts: Sequence[Poly], read: Reader) -> None:
        need(len(guards) == len(witnesses), "every guard must be implied")
        for guard, found in zip(guards, witnesses, strict=True):
            check_condition(guard, found, facts, read)

    def same(self, a: Any, b: Any, proof: Any, read: Reader) -> None:
        """Two atoms are equal, given the facts."""
        need(a[0] == b[0], "atoms must be of one kind")
        if a[0] in ("read", "number"):
            rows, columns = (a[2], b[2]) if a[0] == "read" else ((a[1],), (b[1],))
            need(a[1] == b[1] if a[0] == "read" else a[2] == b[2], "reads must be of one tensor")
            need(len(rows) == len(columns) == len(proof), "every index must be equal")
            for x, y, witnesses in zip(rows, columns, proof, strict=True):
                check_condition(Condition(x - y, "=="), witnesses, self.facts, read)
        elif a[0] == "call":
            order, proofs = proof
            plain = list(range(len(a[2])))
            need(a[1] == b[1] and len(b[2]) == len(plain) == len(proofs), "functions must be the same")
            need(order == plain or (a[1] == "max" and order == [1, 0]), "arguments must be in order")
            for x, k, steps in zip(a[2], order, proofs, strict=True):
                Play(self.context, self.facts, x, b[2][k]).run(steps)
        else:
            self.same_largest(a, b, proof)

    def same_largest(self, a: Any, b: Any, proof: Any) -> None:
        mapping, inverse, forth, back, steps = proof
        names = [fresh_name() for _ in b[1]]
        there = dict(zip(b[1], map(Poly.symbol, names), strict=True))
        inner = Play([*self.context, *a[1]], [*self.facts, *inequalities(a[2])])
        read = inner.reader()
        into = dict(zip(names, map(read, mapping), strict=True))
        outof = {n: self.reader(names)(t) for n, t in zip(a[1], inverse, strict=True)}
        whole = Term(Fraction(1), tuple(names), b[2], (("call", "", (b[3],)),))
        moved = self.moved(a[1], substituted(whole, there), names, into, outof)
        self.implied(moved.guards, forth, inner.facts, read)
        self.implied(a[2], back, [*self.facts, *inequalities(moved.guards)], read)
        Play(inner.context, inner.facts, a[3], moved.atoms[0][2][0]).run(steps)

    def everywhere(self, of: Callable[[Poly], Poly]) -> None:
        self.facts = [of(p) for p in self.facts]
        self.terms = {i: changed(t, of) for i, t in self.terms.items()}

    def do_context_division(self, quotient: str, by: str, low: Any, high: Any) -> None:
        read = self.reader()
        atom, value = as_quotient(read(quotient)), read(by)
        check_division(atom, value, low, high, self.facts, read)
        self.everywhere(lambda p: swapped(p, atom, value))

    def do_context_split(self, k: int, divisor: str, witness: Any) -> None:
        read = self.reader()
        d, old, q, r = read(divisor), self.context[k], fresh_name(), fresh_name()
        need(old not in d.symbols, "a divisor must not depend on the variable")
        check_witness(witness, d - 1, self.facts, read)
        change = {old: d * Poly.symbol(q) + Poly.symbol(r)}
        self.everywhere(lambda p: p.substitute(change))
        self.context[k] = q
        self.context.append(r)
        self.facts += [Poly.symbol(r), d - 1 - Poly.symbol(r)]

    def do_context_fact(self, poly: str, witness: Any) -> None:
        read = self.reader()
        check_witness(witness, read(poly), self.facts, read)
        self.facts.append(read(poly))


def _condition(poly: Poly, relation: str) -> Condition:
    need(relation in ("==", ">="), f"unknown relation {relation!r}")
    return Condition(poly, relation)
