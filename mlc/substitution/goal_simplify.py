"""Proof steps that simplify single terms of a goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mlc.operators.index import Condition, FloorDiv, Poly, Symbol
from mlc.substitution.entailment import Facts, quotients
from mlc.substitution.goal import Goal
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Number,
    Stuck,
    Term,
    filled,
    holds_at_zero,
    make_term,
    mapped,
    replaced,
    substituted,
)
from mlc.substitution.quotients import divided, resolve

__all__ = ["fix", "nested_guards", "settle_context", "simplify_all"]


def settle_context(goal: Goal) -> None:
    """Resolves quotients of context variables, splitting an index into quotient and remainder where one asks."""
    for _ in range(20):
        scope = set(goal.context)
        polys = [*goal.facts, *(p for t in goal.terms.values() for p in t.polys())]
        for quotient in quotients(polys):
            if not _inside(quotient, scope):
                continue
            found = resolve(quotient, goal.known())
            if found is not None:
                by, low, high = found
                goal.step("context division", goal.text(Poly.atom(quotient)), goal.text(by),
                          goal.witness_text(low), goal.witness_text(high))
                goal.change(partial(replaced, quotient=quotient, by=by))
                break
            split = _divisible(quotient, goal.context, goal.known())
            if split is not None:
                _split_context(goal, *split)
                break
        else:
            return


def _split_context(goal: Goal, name: str, divisor: Poly, quotient_range: Poly) -> None:
    witness = goal.known().entails(divisor - 1)
    if witness is None:
        raise Stuck(f"{divisor} must be at least 1")
    place = goal.context.index(name)
    q, r = goal.expander.fresh(), goal.expander.fresh()
    goal.step("context split", place, goal.text(divisor), goal.witness_text(witness))
    whole = {name: Poly.symbol(q) * divisor + Poly.symbol(r)}
    goal.change(lambda p: p.substitute(whole))
    goal.context[place] = q
    goal.context.append(r)
    goal.assume(Poly.symbol(r), divisor - 1 - Poly.symbol(r))
    for poly in (Poly.symbol(q), quotient_range - 1 - Poly.symbol(q)):
        witness = goal.known().entails(poly)
        if witness is not None:
            goal.step("context fact", goal.text(poly), goal.witness_text(witness))
            goal.assume(poly)


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


def simplify_all(goal: Goal) -> bool:
    """Makes every term as simple as it gets; False if all were."""
    changed = False
    for number in list(goal.terms):
        for _ in range(60):
            if number not in goal.terms or not _simplify(goal, number):
                break
            changed = True
    return changed


def _simplify(goal: Goal, number: int) -> bool:
    """One step that makes a term simpler; False if there is none."""
    term = goal.terms[number]
    facts = goal.known(term.guards)
    witness = facts.contradictory()
    if term.factor == 0 or witness is not None:
        goal.step("drop", number, goal.witness_text(witness, term.variables) if witness is not None else None)
        del goal.terms[number]
        return True
    return (_resolve(goal, number, term, facts) or fix(goal, number, term, facts) or _count_free(goal, number, term)
            or _tighten(goal, number, term) or _split_nested(goal, number, term, facts))


def _resolve(goal: Goal, number: int, term: Term, facts: Facts) -> bool:
    scope = {*goal.context, *term.variables}
    for quotient in quotients(term.polys()):
        if not _inside(quotient, scope):
            continue
        found = resolve(quotient, facts)
        if found is not None:
            by, low, high = found
            goal.step("division", number, goal.text(Poly.atom(quotient), term.variables),
                      goal.text(by, term.variables), goal.witness_text(low, term.variables),
                      goal.witness_text(high, term.variables))
            goal.terms[number] = mapped(term, partial(replaced, quotient=quotient, by=by))
            return True
        split = _divisible(quotient, term.variables, facts)
        if split is not None and facts.entails(split[1] - 1) is not None:
            _split_variable(goal, number, term, facts, *split)
            return True
    return False


def _split_variable(goal: Goal, number: int, term: Term, facts: Facts, name: str, divisor: Poly, parts: Poly) -> None:
    place = term.variables.index(name)
    goal.step("divide variable", number, place, goal.text(divisor, term.variables),
              goal.witness_text(facts.entails(divisor - 1), term.variables))
    q, r = goal.expander.fresh(), goal.expander.fresh()
    changed = substituted(term, {name: Poly.symbol(q) * divisor + Poly.symbol(r)})
    variables = [*term.variables, r]
    variables[place] = q
    guards = (*changed.guards, Condition(Poly.symbol(r), ">="), Condition(divisor - 1 - Poly.symbol(r), ">="))
    goal.terms[number] = make_term(term.factor, variables, guards, changed.atoms)
    for poly in (Poly.symbol(q), parts - 1 - Poly.symbol(q)):
        goal.add_guard(number, Condition(poly, ">="))


def _tighten(goal: Goal, number: int, term: Term) -> bool:
    """From ``size*p + r >= 0`` with ``r < size`` follows ``p >= 0``, which rational reasoning can't see."""
    if not goal.tightens:
        return False
    known = goal.known(term.guards)
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
                if new in term.guards or (number, new) in goal.tried:
                    continue
                goal.tried.add((number, new))
                if known.tightened(tight, Poly.symbol(size), place) is not None:
                    goal.add_guard(number, new)
                    return True
    return False


def fix(goal: Goal, number: int, term: Term, facts: Facts) -> bool:
    """Replaces a variable that the guards leave one value."""
    for name in term.variables:
        for value in _values(term, name):
            low, high = facts.entails(value - Poly.symbol(name)), facts.entails(Poly.symbol(name) - value)
            if low is None or high is None:
                continue
            place = term.variables.index(name)
            goal.step("fix", number, place, goal.text(value, term.variables),
                      goal.witness_text(low, term.variables), goal.witness_text(high, term.variables))
            changed = substituted(term, {name: value})
            variables = [v for v in term.variables if v != name]
            goal.terms[number] = make_term(term.factor, variables, changed.guards, changed.atoms)
            return True
    return False


def _count_free(goal: Goal, number: int, term: Term) -> bool:
    """A variable that nothing reads becomes the number of its values."""
    if not goal.counts:
        return False
    for name in term.variables:
        using = [g for g in term.guards if name in g.poly.symbols]
        symbol = Poly.symbol(name)
        if len(using) != 2 or using[0] != Condition(symbol, ">=") or using[1].relation != ">=":
            continue
        extent = using[1].poly + symbol + 1
        if name in extent.symbols or any(name in p.symbols for a in term.atoms
                                         for p in Term(term.factor, atoms=(a,)).polys()):
            continue
        witness = goal.known(tuple(g for g in term.guards if g not in using)).entails(extent)
        some = holds_at_zero(Condition(extent - 1, ">="), ()) or all(map(filled, term.atoms))
        if witness is None or not some:  # a maximum may be of nothing where none are counted
            continue
        place = term.variables.index(name)
        goal.step("count", number, place, goal.witness_text(witness, term.variables))
        del goal.terms[number]
        for monomial, factor in extent.terms:
            atoms = [Number(Poly.atom(a)) for a in monomial]
            goal.append(number, make_term(term.factor * factor, (v for v in term.variables if v != name),
                                          (g for g in term.guards if g not in using), (*term.atoms, *atoms)))
        return True
    return False


def _split_nested(goal: Goal, number: int, term: Term, facts: Facts) -> bool:
    """Splits a term where a guard inside a function depends on nothing bound there."""
    scope = {*goal.context, *term.variables}
    for guard in (g for a in term.atoms for g in nested_guards(a)):
        if not all(n in scope or n[0] not in "$@" for n in guard.poly.symbols):
            continue
        if facts.holds(guard) is not None or goal.known((*term.guards, guard)).contradictory() is not None:
            continue
        goal.split(number, guard)
        return True
    return False


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


def nested_guards(atom: Atom) -> Iterator[Condition]:
    """The guards within an atom."""
    nested: list[Term] = []
    if isinstance(atom, Function):
        nested = list(atom.arg)
    elif isinstance(atom, Largest):
        for member in atom.members:
            yield from member.guards
            nested += member.body
    for term in nested:
        yield from term.guards
        for inner in term.atoms:
            yield from nested_guards(inner)
