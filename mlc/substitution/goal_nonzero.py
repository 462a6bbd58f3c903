"""Proofs that something is nonzero: quotients of what the source divides by, and positive sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement, islice, product
from typing import Any, NamedTuple
from zlib import crc32

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS
from mlc.operators.scalar import Read
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_divide import NOT_ZERO, add_divisors, guesses, never_zero, replace_term, vanishes
from mlc.substitution.goal_tools import Tools, others
from mlc.substitution.maxima import not_negative
from mlc.substitution.normal import (
    Atom,
    Function,
    Largest,
    Member,
    Normal,
    Number,
    Stuck,
    Term,
    apart,
    collected,
    divisor_of,
    free_names,
    make_term,
    reciprocal,
    refreshed,
    substituted,
    times,
)

__all__ = ["find_defined", "find_nonzero"]

#: divisors at values that are multiplied, quotients that are tried to be proved, and values of a product's variables
_DIVISORS, _PROOFS, _VALUES = 12, 4, 30
#: numbers that stand for elements
_POINTS = (1, 2)


class _At(NamedTuple):
    """A divisor by its place, at values of its variables, with witnesses of its guards, and what it is of there."""

    place: int
    values: list[str]
    guards: list[Any]
    argument: Normal

    @property
    def words(self) -> list[Any]:
        return [self.place, self.values, self.guards]


def find_nonzero(goal: Goal, tools: Tools) -> bool:
    """One more divisor, or a quotient in place of a reciprocal; False where nothing is found."""
    found = _follows(goal, tools) or _quotient(goal, tools) or _above(goal, tools)
    if found:  # what could not be made simpler before may be now
        goal.still = {each for each in goal.still if each[0] in ("parts", "less")}
    return found


def find_defined(goal: Goal, tools: Tools) -> bool:
    """The same for terms that are definedness demands: discharges one, or records what else is defined where the source
    is."""
    before = len(goal.divisors)
    if _follows(goal, tools):
        for divisor in goal.divisors[before:]:
            goal.append(-1, divisor)
        return True
    for number in sorted(goal.terms.keys() - goal.new):
        term = goal.terms[number]
        [atom] = term.atoms
        if not isinstance(atom, Function) or atom.name != "1/":
            continue
        way = _as_quotient(goal, term, atom, tools)
        words = ["ratio", number, 0, *way[0]] if way else None
        if words is None:
            some = _some(goal, term, atom, tools)
            words = ["some", number, 0, *some] if some else None
        if words is not None:
            goal.step(*words)
            del goal.terms[number]
            return True
    return False


# --- what follows of one divisor ------------------------------------------------------------------------------------


def _follows(goal: Goal, tools: Tools) -> bool:
    """More divisors: the members of maxima, what roots are of, sums that are multiplied, what products have alike."""
    if add_divisors(goal, [each for number in sorted(goal.terms) for each in _reciprocals(goal.terms[number])]):
        return True
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        if not isinstance(function, Function) or function.name not in NOT_ZERO or ("follows", divisor) in goal.held:
            continue
        goal.held.add(("follows", divisor))
        for number, atom in enumerate(function.arg[0].atoms if len(function.arg) > 1 else ()):
            part = Term(Fraction(1), atoms=(divisor_of(atom) or atom,))
            if not function.arg[0].variables and vanishes(function.arg, atom) and _with(divisor, part) not in (
                    goal.divisors):
                goal.held.discard(("follows", divisor))
                goal.step("nonzero", place, [0, number])
                goal.divisors = (*goal.divisors, _with(divisor, part))
                return True
        for words, more in _following(goal, place, divisor, collected(function.arg), tools):
            new = [each for each in more if each not in goal.divisors]
            if new:
                goal.step(*words)
                goal.divisors = (*goal.divisors, *more)
                return True
    return False


def _reciprocals(term: Term) -> Iterator[Function]:
    """Those in a term, and in what its factors are of."""
    for atom in term.atoms:
        if isinstance(atom, Function):
            if atom.name == "1/":
                yield atom
            for each in atom.arg:
                yield from _reciprocals(each)
        elif isinstance(atom, Largest):
            for member in atom.members:
                for each in member.body:
                    yield from _reciprocals(each)


def _following(goal: Goal, place: int, divisor: Term, argument: Normal, tools: Tools
               ) -> Iterator[tuple[list[Any], list[Term]]]:
    if len(argument) == 1:
        [term] = argument
        if not term.variables:
            for p, atom in enumerate(term.atoms):
                for k in _alone_above(atom):
                    assert isinstance(atom, Largest)
                    yield ["larger", place, p, k], [dataclasses.replace(
                        divisor, guards=(*divisor.guards, *term.guards),
                        atoms=(Function("log", atom.members[k].body),))]
        if term == Term(term.factor, atoms=term.atoms) and len(term.atoms) == 1:
            [root] = term.atoms
            kind = divisor.atoms[0].name if isinstance(divisor.atoms[0], Function) else ""
            if isinstance(root, Function) and (root.name == "sqrt" or (
                    kind == "log" and term.factor > 0 and root.name in LAWS and LAWS[root.name].zero
                    and LAWS[root.name].grows_continued)):
                yield ["rooted", place], [dataclasses.replace(divisor, atoms=(Function("log", root.arg),))]
        _, rest = apart(argument)
        groups = _groups(rest)
        if len(groups) > 1:
            outer = [g for g in rest.guards if g.poly.symbols.isdisjoint(rest.variables)]
            parts = [make_term(Fraction(1), [n for n in rest.variables if n in names],
                               [g for g in rest.guards if g in outer or g.poly.symbols & names],
                               [a for a in rest.atoms if free_names(a) & names]) for names in groups]
            yield ["groups", place], [_with(divisor, part) for part in parts]
    elif 1 < len(argument) <= 4 and all(t.variables for t in argument):
        first, *more = [apart((each,))[1] for each in argument]
        facts, fresh = [*goal.facts, *inequalities(divisor.guards)], goal.expander.fresh
        proofs = []
        for other in more:
            steps = _zero(goal, divisor.variables, facts, (refreshed(first, fresh),), (refreshed(other, fresh),), tools)
            if steps is None:
                return
            proofs.append(steps)
        yield ["common", place, proofs], [_with(divisor, first)]


def _with(divisor: Term, part: Term) -> Term:
    return dataclasses.replace(divisor, atoms=(Function("1/", (part,)),))


def _alone_above(atom: Atom) -> Iterator[int]:
    """The members of a maximum that are above 0 if it is not 0, since no other is and it is not below 0."""
    if not isinstance(atom, Largest):
        return
    for k, member in enumerate(atom.members):
        rest = [m for place, m in enumerate(atom.members) if place != k]
        if not (member.variables or member.guards) and rest and all(
                not_negative(dataclasses.replace(t, factor=-t.factor) for t in _kept(m)) for m in rest) and any(
                not_negative(_kept(m)) for m in rest):
            yield k


def _kept(member: Member) -> Normal:
    """A member without products of which a factor is a function of 0 that is 0."""
    return tuple(t for t in member.body if not any(
        isinstance(a, Function) and not a.arg and (
            a.name in ("1/", "sqrt") or (a.name in LAWS and LAWS[a.name].zero)) for a in t.atoms))


def _groups(term: Term) -> list[set[str]]:
    """The variables of a product, those together that an atom or a guard depends on together."""
    found: list[set[str]] = [{name} for name in term.variables]
    for used in [*(set(g.poly.symbols) for g in term.guards), *map(free_names, term.atoms)]:
        met = [group for group in found if group & used]
        if len(met) > 1:
            found = [group for group in found if group not in met] + [set[str]().union(*met)]
    return found


# --- quotients -------------------------------------------------------------------------------------------------------


def _quotient(goal: Goal, tools: Tools) -> bool:
    """Puts what it is as a quotient of divisors in place of a reciprocal."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Function) and atom.name == "1/" and ("ratio", atom) not in goal.held:
                way = _as_quotient(goal, term, atom, tools)
                if way is None:
                    goal.held.add(("ratio", atom))
                    continue
                words, sums = way
                goal.step("ratio", number, place, *words)
                replace_term(goal, number, others(term, place), sums)
                return True
    return False


def _as_quotient(goal: Goal, term: Term, atom: Function, tools: Tools) -> tuple[list[Any], Normal] | None:
    """Divisors whose quotient the reciprocal is, as the words of a step, and the quotient."""
    wanted = [_number(atom.arg, point) for point in _POINTS]
    if None in wanted or len(collected(atom.arg)) < 2:
        return None
    known = [each for each in islice(_known(goal, term, {*NOT_ZERO, "sqrt", ""}), _DIVISORS)
             if all(_number(each.argument, point) for point in _POINTS)]
    below = [each for each in known if _name(goal, each) in NOT_ZERO]
    tried = 0
    for over in ((), *((each,) for each in known)):
        for under in (each for count in (1, 2) for each in combinations_with_replacement(below, count)):
            if any(each in under for each in over):
                continue
            ratios = {_ratio(wanted[k], over, under, point) for k, point in enumerate(_POINTS)}
            [ratio, *more] = ratios
            if more or not ratio or max(abs(ratio.numerator), ratio.denominator) > 64:
                continue
            if not over and len(under) == 1 and ratio == 1 and under[0].argument == atom.arg:
                return None  # it is one of them
            fresh = goal.expander.fresh
            steps = _zero(goal, term.variables, [*goal.facts, *inequalities(term.guards)],
                          _product(goal, [atom.arg, *(each.argument for each in over)]),
                          _product(goal, [(Term(ratio),), *(each.argument for each in under)]), tools)
            tried += 1
            if steps is not None:
                sums = _product(goal, [(Term(1 / ratio),), *(each.argument for each in over),
                                       *(reciprocal(each.argument, fresh) for each in under)])
                return [[each.words for each in over], [each.words for each in under], str(ratio), steps], sums
            if tried == _PROOFS:
                return None
    return None


def _name(goal: Goal, at: _At) -> str:
    [function] = goal.divisors[at.place].atoms
    assert isinstance(function, Function)
    return function.name


def _ratio(wanted: Fraction | None, over: Sequence[_At], under: Sequence[_At], point: int) -> Fraction:
    """What the wanted sum times those over is of the product of those under, at numbers that stand for elements."""
    found = wanted or Fraction(0)
    for each in over:
        found *= _number(each.argument, point) or 0
    for each in under:
        found /= _number(each.argument, point) or 1
    return found


def _product(goal: Goal, sums: Sequence[Normal]) -> Normal:
    fresh = goal.expander.fresh
    found: Normal = (Term(Fraction(1)),)
    for each in sums:
        found = tuple(times(refreshed(a, fresh), refreshed(b, fresh)) for a in found for b in each)
    return found


def _known(goal: Goal, term: Term, kinds: set[str]) -> Iterator[_At]:
    """Divisors at values where the term stands."""
    known = goal.known(term.guards)
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        if not isinstance(function, Function) or function.name not in kinds:
            continue
        for guess in guesses(goal, term, len(divisor.variables)):
            moved = substituted(dataclasses.replace(divisor, variables=()),
                                dict(zip(divisor.variables, guess, strict=True)))
            witnesses = [known.holds(guard) for guard in moved.guards]
            [function] = moved.atoms
            if all(each is not None for each in witnesses) and isinstance(function, Function):
                yield _At(place, [goal.text(each, term.variables) for each in guess],
                          [[goal.witness_text(w, term.variables) for w in ws or ()] for ws in witnesses], function.arg)


def _number(terms: Normal, point: int) -> Fraction | None:
    """A number that sums have which are equal as quotients of polynomials; None of those over variables."""
    total = Fraction(0)
    for term in terms:
        if term.variables or term.guards:
            return None
        value = term.factor
        for atom in term.atoms:
            found = _of_atom(atom, point)
            if found is None:
                return None
            value *= found
        total += value
    return total


def _of_atom(atom: Atom, point: int) -> Fraction | None:
    if isinstance(atom, Function):
        inner = _number(atom.arg, point)
        if inner is None:
            return None
        return (1 / inner if inner else inner) if atom.name == "1/" else _drawn(f"{atom.name} {inner}", point)
    if isinstance(atom, Number):
        value = _drawn(str(atom.value), point)
        return 1 / value if atom.inverse else value
    if isinstance(atom, Read):
        return _drawn(str(atom), point)
    bodies = [None if m.variables or m.guards else _number(m.body, point) for m in atom.members]
    return None if None in bodies else _drawn(f"max {sorted(map(str, bodies))}", point)


def _drawn(text: str, point: int) -> Fraction:
    return Fraction(crc32(f"{point} {text}".encode()) % 9973 + 2)


# --- what is above 0 -------------------------------------------------------------------------------------------------


def _above(goal: Goal, tools: Tools) -> bool:
    """A divisor for the reciprocal of a sum of what is at least 0, if it is not 0."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not isinstance(atom, Function) or atom.name != "1/" or ("above", atom) in goal.held:
                continue
            goal.held.add(("above", atom))
            more = Term(Fraction(1), term.variables, term.guards, (atom,))
            if more in goal.divisors:
                continue
            words = _some(goal, term, atom, tools)
            if words is not None:
                goal.step("some", number, place, *words)
                goal.divisors = (*goal.divisors, more)
                return True
    return False


def _some(goal: Goal, term: Term, atom: Function, tools: Tools) -> list[Any] | None:
    """What shows of a sum of what is at least 0 that it is not 0: a divisor that would be."""
    for at in _known(goal, term, set(NOT_ZERO)):
        meets = [_meeting(goal, term, each, atom.arg) for each in collected(at.argument)]
        if not meets or None in meets:
            continue
        signs = []
        for each in (refreshed(t, goal.expander.fresh) for t in atom.arg):
            inner = Goal(goal.expander, [*goal.context, *term.variables, *each.variables],
                         [*goal.facts, *inequalities(term.guards), *inequalities(each.guards)],
                         (Term(each.factor, atoms=each.atoms),), (), goal.divisors, goal.depth + 1)
            try:
                signs.append(tools.at_least(inner))
            except Stuck:
                return None
        return [*at.words, signs, meets]
    return None


def _meeting(goal: Goal, term: Term, one: Term, argument: Normal) -> list[Any] | None:
    """A product of ``argument``, at values of its variables, such that ``one`` is 0 where that is."""
    known, names = goal.known((*term.guards, *one.guards)), (*term.variables, *one.variables)
    values = [*map(Poly.symbol, (*one.variables, *term.variables, *goal.context)), Poly({})]
    for k, other in enumerate(argument):
        for guess in islice(product(values, repeat=len(other.variables)), _VALUES):
            at = dict(zip(other.variables, guess, strict=True))
            moved = substituted(dataclasses.replace(other, variables=()), at)
            if not moved.factor or not all(never_zero(a) or any(
                    vanishes((Term(Fraction(1), atoms=(b,)),), a) for b in one.atoms) for a in moved.atoms):
                continue
            witnesses = [known.holds(guard) for guard in moved.guards]
            if all(each is not None for each in witnesses):
                return [k, [goal.text(each, names) for each in guess],
                        [[goal.witness_text(w, names) for w in ws or ()] for ws in witnesses]]
    return None


def _zero(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], one: Normal, other: Normal, tools: Tools
          ) -> list[Any] | None:
    """The steps that show two sums to be equal."""
    try:
        return tools.equal(Goal(goal.expander, [*goal.context, *variables], facts, one, other, goal.divisors,
                                goal.depth + 1))
    except Stuck:
        return None
