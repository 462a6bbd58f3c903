"""A sum of terms that is to be zero for all indices, and the search for the steps that show it.

The steps are the calculus of the certificate (:mod:`mlc.substitution.check` states each and checks it again). Terms
keep their numbers; a new one takes the next. In the texts of steps ``@k`` is the context's variable k and ``$k`` the
term's variable k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlc.operators.index import Condition, FloorDiv, Poly, Symbol
from mlc.operators.scalar import Read
from mlc.substitution.matching import inverse_of, mappings, skeleton
from mlc.substitution.normal import (
    Atom,
    Expander,
    Function,
    Largest,
    Normal,
    Number,
    Term,
    make_term,
    mapped,
    negations,
    partial_functions,
    replaced,
    substituted,
)
from mlc.substitution.quotients import divided, resolve
from mlc.substitution.solve import Facts, quotients

__all__ = ["Goal", "Stuck"]

_MERGES, _STEPS, _DEPTH = 80, 400, 6
#: changes of variables that are tried for one output
_WORK = 2500


class Stuck(Exception):
    """The search ends without a proof; the reason."""


class Goal:
    """Shows that ``terms - others`` is zero whatever the ``context`` variables are, as far as ``facts`` admit.

    ``others`` come from the target. What may be undefined in them (a reciprocal, say) must meet the same in ``terms``;
    it never cancels among them, so that the target is defined wherever the source is.
    """

    def __init__(self, expander: Expander, context: Sequence[str], facts: Sequence[Poly], terms: Normal,
                 others: Normal = (), depth: int = 0) -> None:
        self.expander, self.context, self.depth = expander, list(context), depth
        self.facts = list(facts)
        self.terms = dict(enumerate((*terms, *_negative(others))))
        self._new = set(range(len(terms), len(self.terms)))
        self.steps: list[list[Any]] = []
        self._count = len(self.terms)
        self._cache: dict[tuple[Condition, ...], Facts] = {}
        self._tried: set[tuple[int, Condition]] = set()

    def prove(self) -> list[list[Any]]:
        """The steps; raises :class:`Stuck`."""
        if self.depth > _DEPTH:
            raise Stuck("functions are nested too deeply")
        self._settle_context()
        while self._simplify_all():
            self._settle_context()
        for _ in range(_MERGES):
            if not self.terms:
                return self.steps
            self._merge_one()
            while self._simplify_all():
                self._settle_context()
        raise Stuck(f"too many cases; left over is {self._show(next(iter(self.terms.values())))}")

    # --- facts and names -------------------------------------------------------------------------------------------

    def known(self, guards: tuple[Condition, ...] = ()) -> Facts:
        """The facts of the context, then those of the guards."""
        if guards not in self._cache:
            self._cache[guards] = Facts([*self.facts, *inequalities(guards)])
        return self._cache[guards]

    def _text(self, poly: Poly, variables: Sequence[str] = ()) -> str:
        names = {n: Poly.symbol(f"@{k}") for k, n in enumerate(self.context)}
        names |= {n: Poly.symbol(f"${k}") for k, n in enumerate(variables)}
        return str(poly.substitute(names))

    def _guard(self, guard: Condition, variables: Sequence[str]) -> list[str]:
        return [self._text(guard.poly, variables), guard.relation]

    def _witness(self, witness: Any, variables: Sequence[str] = ()) -> Any:
        """The witness with the names of quotients as positions."""
        def ref(r: Any) -> Any:
            if not isinstance(r, list):
                return r
            return [r[0], self._text(r[1], variables), *(self._witness(w, variables) for w in r[2:])]

        return [[factor, [ref(r) for r in refs]] for factor, refs in witness]

    def _step(self, *words: Any) -> None:
        self.steps.append(list(words))
        if len(self.steps) > _STEPS:
            raise Stuck("too many steps")

    def _show(self, term: Term) -> str:
        def atom(a: Atom) -> str:
            if isinstance(a, Read):
                return f"{a.tensor}[{', '.join(map(str, a.indices))}]"
            if isinstance(a, Number):
                return f"{'1/' if a.inverse else ''}({a.value})"
            if isinstance(a, Function):
                return f"{a.name}({'; '.join(' + '.join(map(self._show, arg)) for arg in a.args)})"
            return f"max({' + '.join(map(self._show, a.body))})"

        guards = " and ".join(map(str, term.guards))
        return f"{term.factor} * {' * '.join(map(atom, term.atoms)) or 1}" + (f" where {guards}" if guards else "")

    # --- simplification --------------------------------------------------------------------------------------------

    def _settle_context(self) -> None:
        """Resolves quotients of context variables, splitting an index into quotient and remainder where one asks."""
        for _ in range(20):
            scope = set(self.context)
            polys = [*self.facts, *(p for t in self.terms.values() for p in t.polys())]
            for quotient in quotients(polys):
                if not _inside(quotient, scope):
                    continue
                found = resolve(quotient, self.known())
                if found is not None:
                    by, low, high = found
                    self._step("context division", self._text(Poly.atom(quotient)), self._text(by),
                               self._witness(low), self._witness(high))
                    self._change(partial(replaced, quotient=quotient, by=by))
                    break
                split = self._divisible(quotient, self.context, self.known())
                if split is not None:
                    self._split_context(*split)
                    break
            else:
                return

    def _change(self, change: Any) -> None:
        self.facts = [change(p) for p in self.facts]
        self.terms = {n: mapped(t, change) for n, t in self.terms.items()}
        self._cache.clear()

    def _split_context(self, name: str, divisor: Poly, quotient_range: Poly) -> None:
        witness = self.known().entails(divisor - 1)
        if witness is None:
            raise Stuck(f"{divisor} must be at least 1")
        place = self.context.index(name)
        q, r = self.expander.fresh(), self.expander.fresh()
        self._step("context split", place, self._text(divisor), self._witness(witness))
        whole = {name: Poly.symbol(q) * divisor + Poly.symbol(r)}
        self._change(lambda p: p.substitute(whole))
        self.context[place] = q
        self.context.append(r)
        self.facts += [Poly.symbol(r), divisor - 1 - Poly.symbol(r)]
        for poly in (Poly.symbol(q), quotient_range - 1 - Poly.symbol(q)):
            witness = self.known().entails(poly)
            if witness is not None:
                self._step("context fact", self._text(poly), self._witness(witness))
                self.facts.append(poly)
                self._cache.clear()

    @staticmethod
    def _divisible(quotient: FloorDiv, names: Sequence[str], facts: Facts) -> tuple[str, Poly, Poly] | None:
        """A variable to write as quotient and remainder: its name, the divisor, the number of quotients."""
        n, d = quotient.numerator, quotient.denominator
        for name in names:
            whole, rest = divided(n, Poly.symbol(name))
            if not whole.terms or name in rest.symbols or name in whole.symbols:
                continue
            divisor, left = divided(d, whole)
            if left.terms or divisor == 1:
                continue
            for poly in facts.polys:
                bound = dict(poly.terms).get((Symbol(name),))
                if bound == -1:
                    extent = poly + Poly.symbol(name) + 1
                    parts, over = divided(extent, divisor)
                    if not over.terms and name not in extent.symbols and parts != 1:
                        return name, divisor, parts
        return None

    def _simplify_all(self) -> bool:
        changed = False
        for number in list(self.terms):
            for _ in range(60):
                if number not in self.terms or not self._simplify(number):
                    break
                changed = True
        return changed

    def _simplify(self, number: int) -> bool:
        """One step that makes a term simpler; False if there is none."""
        term = self.terms[number]
        facts = self.known(term.guards)
        witness = facts.contradictory()
        if term.factor == 0 or witness is not None:
            self._step("drop", number, self._witness(witness, term.variables) if witness is not None else None)
            del self.terms[number]
            return True
        return (self._resolve(number, term, facts) or self._fix(number, term, facts) or self._count_free(number, term)
                or self._tighten(number, term)
                or self._split_nested(number, term, facts))

    def _resolve(self, number: int, term: Term, facts: Facts) -> bool:
        scope = {*self.context, *term.variables}
        for quotient in quotients(term.polys()):
            if not _inside(quotient, scope):
                continue
            found = resolve(quotient, facts)
            if found is not None:
                by, low, high = found
                self._step("division", number, self._text(Poly.atom(quotient), term.variables),
                           self._text(by, term.variables), self._witness(low, term.variables),
                           self._witness(high, term.variables))
                self.terms[number] = mapped(term, partial(replaced, quotient=quotient, by=by))
                return True
            split = self._divisible(quotient, term.variables, facts)
            if split is not None and facts.entails(split[1] - 1) is not None:
                self._split_variable(number, term, facts, *split)
                return True
        return False

    def _split_variable(self, number: int, term: Term, facts: Facts, name: str, divisor: Poly, parts: Poly) -> None:
        place = term.variables.index(name)
        self._step("divide variable", number, place, self._text(divisor, term.variables),
                   self._witness(facts.entails(divisor - 1), term.variables))
        q, r = self.expander.fresh(), self.expander.fresh()
        changed = substituted(term, {name: Poly.symbol(q) * divisor + Poly.symbol(r)})
        variables = [*term.variables, r]
        variables[place] = q
        guards = (*changed.guards, Condition(Poly.symbol(r), ">="), Condition(divisor - 1 - Poly.symbol(r), ">="))
        self.terms[number] = make_term(term.factor, variables, guards, changed.atoms)
        for poly in (Poly.symbol(q), parts - 1 - Poly.symbol(q)):
            self._add_guard(number, Condition(poly, ">="))

    def _add_guard(self, number: int, guard: Condition) -> None:
        term = self.terms[number]
        witnesses = self.known(term.guards).holds(guard)
        if witnesses is not None and guard not in term.guards:
            self._step("guard", number, *self._guard(guard, term.variables),
                       [self._witness(w, term.variables) for w in witnesses])
            self.terms[number] = replace(term, guards=(*term.guards, guard))

    def _tighten(self, number: int, term: Term) -> bool:
        """From ``size*p + r >= 0`` with ``r < size`` follows ``p >= 0``, which rational reasoning can't see."""
        known = self.known(term.guards)
        for guard in term.guards:
            if guard.relation != ">=":
                continue
            place = known.polys.index(guard.poly)
            for size in sorted(n for n in guard.poly.symbols if n[0] not in "$@"):
                part, rest = divided(guard.poly, Poly.symbol(size))
                if not rest.terms or not any(n[0] in "$@" for n in part.symbols):
                    continue
                for tight in (part - 1, part):
                    new = Condition(tight, ">=")
                    if new in term.guards or (number, new) in self._tried:
                        continue
                    self._tried.add((number, new))
                    if known.tightened(tight, Poly.symbol(size), place) is not None:
                        self._add_guard(number, new)
                        return True
        return False

    def _fix(self, number: int, term: Term, facts: Facts) -> bool:
        """Replaces a variable that the guards leave one value."""
        for name in term.variables:
            for value in _values(term, name):
                low, high = facts.entails(value - Poly.symbol(name)), facts.entails(Poly.symbol(name) - value)
                if low is None or high is None:
                    continue
                place = term.variables.index(name)
                self._step("fix", number, place, self._text(value, term.variables),
                           self._witness(low, term.variables), self._witness(high, term.variables))
                changed = substituted(term, {name: value})
                variables = [v for v in term.variables if v != name]
                self.terms[number] = make_term(term.factor, variables, changed.guards, changed.atoms)
                return True
        return False

    def _count_free(self, number: int, term: Term) -> bool:
        """A variable that nothing reads becomes the number of its values."""
        for name in term.variables:
            using = [g for g in term.guards if name in g.poly.symbols]
            symbol = Poly.symbol(name)
            if len(using) != 2 or using[0] != Condition(symbol, ">=") or using[1].relation != ">=":
                continue
            extent = using[1].poly + symbol + 1
            if name in extent.symbols or any(name in p.symbols for a in term.atoms
                                             for p in Term(term.factor, atoms=(a,)).polys()):
                continue
            witness = self.known(tuple(g for g in term.guards if g not in using)).entails(extent)
            if witness is None:
                continue
            place = term.variables.index(name)
            self._step("count", number, place, self._witness(witness, term.variables))
            del self.terms[number]
            for monomial, factor in extent.terms:
                atoms = [Number(Poly.atom(a)) for a in monomial]
                self._append(number, make_term(term.factor * factor, (v for v in term.variables if v != name),
                                       (g for g in term.guards if g not in using), (*term.atoms, *atoms)))
            return True
        return False

    def _split_nested(self, number: int, term: Term, facts: Facts) -> bool:
        """Splits a term where a guard inside a function depends on nothing bound there."""
        scope = {*self.context, *term.variables}
        for guard in (g for a in term.atoms for g in _nested_guards(a)):
            if not all(n in scope or n[0] not in "$@" for n in guard.poly.symbols):
                continue
            if facts.holds(guard) is not None or self.known((*term.guards, guard)).contradictory() is not None:
                continue
            self._split(number, guard)
            return True
        return False

    def _append(self, origin: int, term: Term) -> None:
        if origin in self._new:
            self._new.add(self._count)
        self.terms[self._count] = term
        self._count += 1

    def _split(self, number: int, guard: Condition) -> None:
        term = self.terms[number]
        self._step("split", number, *self._guard(guard, term.variables))
        self.terms[number] = make_term(term.factor, term.variables, (*term.guards, guard), term.atoms)
        for part in negations([guard]):
            self._append(number, make_term(term.factor, term.variables, (*term.guards, *part), term.atoms))

    # --- merging ---------------------------------------------------------------------------------------------------

    def _merge_one(self) -> None:
        """Adds two terms that sum the same, or splits one so that a part of it can be added next."""
        reason = ""
        for i in sorted(self.terms):
            shape = sorted(map(skeleton, self.terms[i].atoms))
            for j in sorted(self.terms):
                if j <= i or sorted(map(skeleton, self.terms[j].atoms)) != shape:
                    continue
                if self._merge(i, j):
                    return
            reason = reason or self._show(self.terms[i])
        raise Stuck(f"no other term cancels {reason}")

    def _merge(self, i: int, j: int) -> bool:
        one = self.terms[i]
        if i in self._new and j in self._new and partial_functions(one.atoms):
            return False
        fresh = {v: Poly.symbol(f"{v}$") for v in self.terms[j].variables}
        other = replace(substituted(self.terms[j], fresh), variables=tuple(f"{v}$" for v in self.terms[j].variables))
        for mapping, pairing in mappings(one, other):
            inverse = inverse_of(mapping, one.variables)
            if inverse is None:
                continue
            self.expander.work += 1
            if self.expander.work > _WORK:
                raise Stuck("too many pairs of terms to compare")
            moved = substituted(other, mapping)
            here = self.known(one.guards)
            missing = [g for g in moved.guards if here.holds(g) is None]
            both = self.known((*one.guards, *missing))
            if both.contradictory() is not None or not self._plausible(one, moved, pairing, both):
                continue
            if missing:
                self._split(i, missing[0])
                return True
            there = self.known(moved.guards)
            missing = [g for g in one.guards if there.holds(g) is None]
            if missing:
                back = {f"{v}$": Poly.symbol(v) for v in self.terms[j].variables}
                poly = missing[0].poly.substitute(inverse).substitute(back)
                self._split(j, Condition(poly, missing[0].relation))
                return True
            proofs = self._equal_atoms(one, moved, pairing)
            if proofs is None:
                continue
            names = {f"{v}$": Poly.symbol(v) for v in self.terms[j].variables}
            self._step(
                "merge", i, j,
                [self._text(mapping[f"{v}$"], one.variables) for v in self.terms[j].variables],
                [self._text(inverse[v].substitute(names), self.terms[j].variables) for v in one.variables],
                [[self._witness(w, one.variables) for w in here.holds(g) or ()] for g in moved.guards],
                [[self._witness(w, one.variables) for w in there.holds(g) or ()] for g in one.guards],
                list(pairing), proofs,
            )
            factor = one.factor + self.terms.pop(j).factor
            if j not in self._new:
                self._new.discard(i)
            if factor:
                self.terms[i] = replace(one, factor=factor)
            else:
                del self.terms[i]
            return True
        return False

    def _plausible(self, one: Term, moved: Term, pairing: tuple[int, ...], facts: Facts) -> bool:
        """Whether reads that meet read the same element; functions are proved when it matters."""
        for place, partner in enumerate(pairing):
            a, b = one.atoms[partner], moved.atoms[place]
            if isinstance(a, (Read, Number)) and _equal_polys(a, b, facts) is None:
                return False
        return True

    def _equal_atoms(self, one: Term, moved: Term, pairing: tuple[int, ...]) -> list[Any] | None:
        facts = self.known(one.guards)
        proofs: list[Any] = []
        for place, partner in enumerate(pairing):
            proof = self._equal(one.atoms[partner], moved.atoms[place], one, facts)
            if proof is None:
                return None
            proofs.append(proof)
        return proofs

    def _equal(self, a: Atom, b: Atom, one: Term, facts: Facts) -> Any:
        """What shows that two atoms are equal wherever the guards of ``one`` hold."""
        if isinstance(a, (Read, Number)):
            found = _equal_polys(a, b, facts)
            return None if found is None else [[self._witness(w, one.variables) for w in ws] for ws in found]
        context, base = [*self.context, *one.variables], [*self.facts, *inequalities(one.guards)]
        if isinstance(a, Function):
            assert isinstance(b, Function)
            orders = [tuple(range(len(a.args)))] + ([(1, 0)] if a.name == "max" else [])
            for order in orders:
                try:
                    return [list(order), [self._zero(context, base, x, b.args[k])
                                          for x, k in zip(a.args, order, strict=True)]]
                except Stuck:
                    continue
            return None
        assert isinstance(a, Largest) and isinstance(b, Largest)
        return self._equal_largest(a, b, one, context, base)

    def _equal_largest(self, a: Largest, b: Largest, one: Term, context: list[str], base: list[Poly]) -> Any:
        fresh = {v: Poly.symbol(f"{v}$") for v in b.variables}
        whole = Term(one.factor, b.variables, b.guards, (Function("", (b.body,)),))
        other = replace(substituted(whole, fresh), variables=tuple(f"{v}$" for v in b.variables))
        for mapping, _ in mappings(Term(one.factor, a.variables, a.guards, (Function("", (a.body,)),)), other):
            inverse = inverse_of(mapping, a.variables)
            if inverse is None:
                continue
            moved = substituted(other, mapping)
            here, there = Facts([*base, *inequalities(a.guards)]), Facts([*base, *inequalities(moved.guards)])
            forth, back = [here.holds(g) for g in moved.guards], [there.holds(g) for g in a.guards]
            if any(w is None for w in (*forth, *back)):
                continue
            body = moved.atoms[0]
            assert isinstance(body, Function)
            inner = [*context, *a.variables]
            try:
                steps = self._zero(inner, [*base, *inequalities(a.guards)], a.body, body.args[0])
            except Stuck:
                continue
            nested = Goal(self.expander, inner, [*base, *inequalities(a.guards), *inequalities(moved.guards)], ())
            own = {f"{v}$": Poly.symbol(v) for v in b.variables}
            outer = {n: Poly.symbol(f"@{k}") for k, n in enumerate(context)}
            texts = {v: Poly.symbol(f"${k}") for k, v in enumerate(b.variables)}
            return [
                [nested._text(mapping[f"{v}$"]) for v in b.variables],
                [str(inverse[v].substitute(own).substitute({**outer, **texts})) for v in a.variables],
                [[nested._witness(w) for w in ws or ()] for ws in forth],
                [[nested._witness(w) for w in ws or ()] for ws in back], steps,
            ]
        return None

    def _zero(self, context: Sequence[str], facts: Sequence[Poly], terms: Normal, others: Normal) -> list[list[Any]]:
        return Goal(self.expander, context, facts, terms, others, self.depth + 1).prove()


def inequalities(guards: Sequence[Condition]) -> list[Poly]:
    """Each ``>=`` as one polynomial, each ``==`` as two."""
    return [p for g in guards for p in ((g.poly,) if g.relation == ">=" else (g.poly, -g.poly))]


def _negative(terms: Normal) -> Normal:
    return tuple(replace(t, factor=-t.factor) for t in terms)


def _inside(quotient: FloorDiv, scope: set[str]) -> bool:
    names = quotient.numerator.symbols | quotient.denominator.symbols
    return all(n in scope or n[0] not in "$@" for n in names)


def _values(term: Term, name: str) -> Iterator[Poly]:
    """Values that a variable may be forced to: by an equality, or by ranges that meet."""
    symbol = (Symbol(name),)
    for guard in term.guards:
        factor = dict(guard.poly.terms).get(symbol, 0)
        rest = guard.poly - Poly({symbol: factor})
        if abs(factor) != 1 or name in rest.symbols:
            continue
        value = -rest if factor == 1 else rest
        if guard.relation == "==" or factor == -1:
            yield value


def _nested_guards(atom: Atom) -> Iterator[Condition]:
    nested: list[Term] = []
    if isinstance(atom, Function):
        nested = [t for arg in atom.args for t in arg]
    elif isinstance(atom, Largest):
        yield from atom.guards
        nested = list(atom.body)
    for term in nested:
        yield from term.guards
        for inner in term.atoms:
            yield from _nested_guards(inner)


def _equal_polys(a: Atom, b: Atom, facts: Facts) -> list[Any] | None:
    """For every index that both have, the witnesses that it is the same; None if one isn't."""
    if isinstance(a, Read) and isinstance(b, Read) and a.tensor == b.tensor and len(a.indices) == len(b.indices):
        pairs = list(zip(a.indices, b.indices, strict=True))
    elif isinstance(a, Number) and isinstance(b, Number) and a.inverse == b.inverse:
        pairs = [(a.value, b.value)]
    else:
        return None
    found = []
    for x, y in pairs:
        witnesses = facts.holds(Condition(x - y, "=="))
        if witnesses is None:
            return None
        found.append(witnesses)
    return found
