"""Steps for what is stuck: sums within atoms made as simple as they get, quotients that are numbers, parts that are
summed over for nothing, members of maxima that lose. Every one leaves a sum what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from mlc.operators.index import Condition, Poly, Symbol
from mlc.operators.laws import LAWS, VALUES
from mlc.substitution.goal import Goal, inequalities
from mlc.substitution.goal_divide import add_divisors, add_positive, guesses, kind_of, replace_term
from mlc.substitution.goal_simplify import nested_guards, simplify_all
from mlc.substitution.maxima import largest, made
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
    is_size,
    make_term,
    negations,
    reciprocal,
    refreshed,
    refreshed_member,
    substituted,
    times,
)

__all__ = ["Tools", "kept", "reduce_demands", "reduce_one", "restored", "settle_above",
           "settle_void"]

#: rounds within one sum, and how deep sums within sums are looked at
_ROUNDS, _DEPTH = 12, 6
#: units that are tried for one quotient
_UNITS = 8


class Tools(NamedTuple):
    """What proves: adds two terms up if they are the same, without cases; shows that terms are at least 0; takes a
    member for a maximum."""

    merge: Callable[[Goal, int, int], bool]
    at_least: Callable[[Goal], list[list[Any]]]
    choose: Callable[[Goal, Callable[[Goal], list[list[Any]]]], bool]


def reduce_one(goal: Goal, tools: Tools) -> bool:
    """Makes the goal simpler; False where nothing is found."""
    return (_simple(goal, tools) or _parts(goal) or reduce_divisors(goal, tools) or _inside(goal, tools)
            or _extract(goal) or _merged(goal, tools) or _quotient(goal, tools) or _lose(goal, tools))


def _simple(goal: Goal, tools: Tools) -> bool:
    return _zero(goal) or _value(goal) or _loosen(goal) or _climb(goal, tools) or _part(goal)


def settle_void(goal: Goal) -> bool:
    """Ends a goal in which something is 0 that is known not to be."""
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        if function.name in ("1/", "log") and not collected(function.arg):
            for guess in guesses(goal, Term(Fraction(1)), len(divisor.variables)):
                moved = substituted(dataclasses.replace(divisor, variables=()),
                                    dict(zip(divisor.variables, guess, strict=True)))
                witnesses = [goal.known().holds(guard) for guard in moved.guards]
                if all(each is not None for each in witnesses):
                    goal.step("void", place, [goal.text(each) for each in guess],
                              [[goal.witness_text(w) for w in each or ()] for each in witnesses])
                    goal.terms.clear()
                    return True
    return False


def kept(goal: Goal) -> tuple[Any, ...]:
    """What :func:`restored` needs to undo steps."""
    return dict(goal.terms), list(goal.steps), set(goal.new), goal.count, goal.divisors, set(goal.settled)


def restored(goal: Goal, state: tuple[Any, ...]) -> None:
    """Undoes what was done since ``state``; of the context nothing may have changed."""
    terms, steps, new, goal.count, goal.divisors, settled = state
    goal.terms, goal.steps, goal.new, goal.settled = dict(terms), list(steps), set(new), set(settled)


def _others(term: Term, place: int) -> tuple[Atom, ...]:
    return (*term.atoms[:place], *term.atoms[place + 1:])


def _zero(goal: Goal) -> bool:
    """Takes a term away that has a function of 0 which is 0."""
    for number in sorted(goal.terms):
        for atom in goal.terms[number].atoms:
            if isinstance(atom, Function) and not atom.arg and (
                    atom.name in ("1/", "sqrt") or (atom.name in LAWS and LAWS[atom.name].zero)):
                goal.step("drop", number, None)
                del goal.terms[number]
                return True
    return False


def _value(goal: Goal) -> bool:
    """Puts numbers in place of functions of numbers, and x in place of log(exp(x))."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            found = _known(atom)
            if found is not None:
                goal.step("value", number, place)
                replace_term(goal, number, _others(term, place), found)
                return True
    return False


def _known(atom: Atom) -> Normal | None:
    if not isinstance(atom, Function) or not atom.name:
        return None
    argument = collected(atom.arg)
    if len(argument) > 1:
        return None
    one = argument[0] if argument else Term(Fraction(0))
    if one != Term(one.factor, atoms=one.atoms):
        return None
    if not one.atoms:
        value = VALUES.get((atom.name, one.factor))
        return None if value is None else ((Term(value),) if value else ())
    [*rest] = one.atoms
    if atom.name == "log" and one.factor == 1 and len(rest) == 1 and isinstance(rest[0], Function) and (
            rest[0].name == "exp"):
        return rest[0].arg
    return None


def reduce_divisors(goal: Goal, tools: Tools) -> bool:
    """One more divisor for each that is of a sum which can be made simpler."""
    before = len(goal.divisors)
    for place in range(before):
        divisor = goal.divisors[place]
        if divisor in goal.reduced or goal.depth >= _DEPTH:
            continue
        goal.reduced.add(divisor)
        [function] = divisor.atoms
        assert isinstance(function, Function)
        facts = [*goal.facts, *inequalities(divisor.guards)]
        steps, terms = _sum(goal, divisor.variables, facts, function.arg, tools)
        if steps:
            more = dataclasses.replace(divisor, atoms=(Function(function.name, collected(terms)),))
            goal.step("divisor inside", place, steps)
            goal.divisors = (*goal.divisors, more)
            goal.reduced.add(more)
            goal.settled.add(len(goal.divisors) - 1)
    return len(goal.divisors) > before


def reduce_demands(goal: Goal, tools: Tools) -> bool:
    """The same where terms are demands, each of which stays one."""
    first = len(goal.divisors)
    changed = _parts(goal) or reduce_divisors(goal, tools)
    for divisor in goal.divisors[first:]:
        goal.append(-1, divisor)
    for number in sorted(goal.terms):
        term = goal.terms[number]
        [atom] = term.atoms
        if isinstance(atom, Function) and (atom, term.guards) not in goal.still:
            goal.still.add((atom, term.guards))
            facts = [*goal.facts, *inequalities(term.guards)]
            steps, terms = _sum(goal, term.variables, facts, atom.arg, tools)
            if steps:
                goal.step("inside", number, 0, steps)
                goal.terms[number] = dataclasses.replace(term, atoms=(Function(atom.name, collected(terms)),))
                changed = True
    return changed


def settle_above(goal: Goal, tools: Tools) -> bool:
    """Takes demands away of what is seen to be above 0, or at least 0 where that suffices."""
    for number in sorted(goal.terms.keys() - goal.new):
        term = goal.terms[number]
        [atom] = term.atoms
        if not isinstance(atom, Function):
            continue
        facts = [*goal.facts, *inequalities(term.guards)]
        if atom.name == "sqrt":
            try:
                steps = tools.at_least(Goal(goal.expander, [*goal.context, *term.variables], facts, atom.arg, (),
                                            goal.divisors, goal.depth + 1))
            except Stuck:
                continue
            goal.step("above", number, None, steps)
        else:
            found = above(goal, term.variables, facts, atom.arg, tools)
            if found is None:
                continue
            goal.step("above", number, found[:3], found[3])
        del goal.terms[number]
        return True
    return False


def _inside(goal: Goal, tools: Tools) -> bool:
    """Rewrites what one atom is of."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            steps, sums = _rewritten(goal, term, atom, tools)
            if steps:
                goal.step("inside", number, place, steps)
                replace_term(goal, number, _others(term, place), sums)
                return True
    return False


def _rewritten(goal: Goal, term: Term, atom: Atom, tools: Tools) -> tuple[list[Any], Normal]:
    """The steps within an atom of the term, and the sum that it is then."""
    fresh, facts = goal.expander.fresh, [*goal.facts, *inequalities(term.guards)]
    if isinstance(atom, Function):
        if (atom.name, atom.arg, term.guards) in goal.still:
            return [], ()
        steps, found = _sum(goal, term.variables, facts, atom.arg, tools)
        if not steps:
            goal.still.add((atom.name, atom.arg, term.guards))
            return steps, ()
        if atom.name == "1/":
            return steps, reciprocal(found, fresh)
        return steps, made(atom.name, found, fresh) if atom.name else (_member(collected(found)),)
    if not isinstance(atom, Largest) or (atom, term.guards) in goal.still:
        return [], ()
    members = [dataclasses.replace(_member(m.body), variables=m.variables, guards=m.guards)
               for m in (refreshed_member(one, fresh) for one in atom.members)]
    inner = Goal(goal.expander, [*goal.context, *term.variables], facts, tuple(members), (), goal.divisors,
                 goal.depth + 1)
    for number in sorted(inner.terms):
        each = inner.terms[number]
        steps, sums = _rewritten(inner, each, each.atoms[0], tools)
        if steps:
            inner.step("inside", number, 0, steps)
            replace_term(inner, number, (), sums)
    if not inner.steps:
        goal.still.add((atom, term.guards))
        return [], ()
    return inner.steps, largest([Member(t.variables, t.guards, t.atoms[0].arg) for _, t in sorted(inner.terms.items())
                                 if isinstance(t.atoms[0], Function)], fresh)


def _sum(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], terms: Sequence[Term], tools: Tools
         ) -> tuple[list[Any], Normal]:
    """The steps that make a sum simpler, and the sum then."""
    if goal.depth >= _DEPTH:
        return [], ()
    inner = Goal(goal.expander, [*goal.context, *variables], facts, tuple(terms), (), goal.divisors, goal.depth + 1)
    inner.reduced = set(goal.divisors)
    for _ in range(_ROUNDS):
        simplify_all(inner)
        if not (_simple(inner, tools) or _inside(inner, tools) or _extract(inner) or _merged(inner, tools)
                or _quotient(inner, tools) or tools.choose(inner, tools.at_least) or _lose(inner, tools)):
            break
    return inner.steps, tuple(t for _, t in sorted(inner.terms.items()))


def _member(body: Normal) -> Term:
    """A sum as the only atom of a term."""
    return Term(Fraction(1), atoms=(Function("", tuple(body)),))


def _extract(goal: Goal) -> bool:
    """Takes out of the reciprocal of a sum what does not depend on what is summed over."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Function) and atom.name == "1/" and len(collected(atom.arg)) == 1:
                whole, rest = apart(atom.arg)
                if (rest.variables or rest.guards) and whole != Term(Fraction(1)):
                    goal.step("extract", number, place)
                    inner = Term(Fraction(1), atoms=(Function("1/", (rest,)),))
                    replace_term(goal, number, _others(term, place),
                                 [times(each, inner) for each in reciprocal((whole,), goal.expander.fresh)])
                    return True
    return False


def _loosen(goal: Goal) -> bool:
    """Leaves out a guard on the context that holds anyway."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for k, guard in enumerate(term.guards):
            rest = (*term.guards[:k], *term.guards[k + 1:])
            if guard.poly.symbols.isdisjoint(term.variables):
                witnesses = goal.known(rest).holds(guard)
                if witnesses is not None:
                    goal.step("loosen", number, k, [goal.witness_text(w, term.variables) for w in witnesses])
                    goal.terms[number] = dataclasses.replace(term, guards=rest)
                    return True
    return False


def parts_of(divisor: Term) -> list[Term]:
    """The divisors that the factors of what one is of are."""
    [function] = divisor.atoms
    assert isinstance(function, Function)
    if function.name not in ("1/", "log") or len(collected(function.arg)) != 1:
        return []
    whole, rest = apart(function.arg)
    found: list[Normal] = []
    for atom in whole.atoms:
        if not (isinstance(atom, Number) and is_size(atom.value)):
            found.append((Term(Fraction(1), atoms=(divisor_of(atom) or atom,)),))
        if isinstance(atom, Function) and atom.arg and (
                atom.name in ("1/", "sqrt") or (atom.name in LAWS and LAWS[atom.name].zero)):
            found.append(collected(atom.arg))
    found += [(rest,)] if rest.variables or rest.guards else []
    return [dataclasses.replace(divisor, atoms=(Function("1/", each),)) for each in found]


def _parts(goal: Goal) -> bool:
    """One more divisor for each factor of one."""
    for place, divisor in enumerate(goal.divisors):
        more = parts_of(divisor)
        if any(each not in goal.divisors for each in more) and ("parts", divisor) not in goal.still:
            goal.still.add(("parts", divisor))
            goal.step("parts", place)
            goal.divisors = (*goal.divisors, *more)
            return True
    wanted = {a for t in goal.terms.values() for a in t.atoms if isinstance(a, Function) and a.name == "1/"}
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        less = Function("1/", tuple(dataclasses.replace(t, factor=-t.factor) for t in function.arg))
        more = [dataclasses.replace(divisor, atoms=(less,))]
        if function.name in ("1/", "log") and ("less", divisor) not in goal.still and more[0] not in goal.divisors and (
                any(set(less.arg) == set(each.arg) for each in wanted)):
            goal.still.add(("less", divisor))
            goal.step("negate", place)
            goal.divisors = (*goal.divisors, *more)
            return True
    return False


def above(goal: Goal, variables: Sequence[str], facts: Sequence[Poly], argument: Normal, tools: Tools
          ) -> list[Any] | None:
    """What shows that a sum is at least something that the source takes a logarithm of."""
    inner = Goal(goal.expander, [*goal.context, *variables], facts, (), (), goal.divisors, goal.depth + 1)
    known = inner.known()
    stand = Term(Fraction(1), tuple(variables))
    for place, divisor in enumerate(goal.divisors):
        [function] = divisor.atoms
        root = function.arg[0] if isinstance(function, Function) and len(function.arg) == 1 else None
        rooted = root is not None and root == Term(root.factor, atoms=root.atoms) and len(root.atoms) == 1 and (
            isinstance(root.atoms[0], Function) and root.atoms[0].name == "sqrt")
        if not isinstance(function, Function) or not (function.name == "log" or (function.name == "1/" and rooted)):
            continue
        for guess in guesses(goal, stand, len(divisor.variables)):
            moved = substituted(dataclasses.replace(divisor, variables=()),
                                dict(zip(divisor.variables, guess, strict=True)))
            witnesses = [known.holds(guard) for guard in moved.guards]
            if any(each is None for each in witnesses):
                continue
            [function] = moved.atoms
            assert isinstance(function, Function)
            least = function.arg
            if function.name == "1/":
                inside = least[0].atoms[0]
                assert isinstance(inside, Function)
                least = inside.arg
            try:
                steps = tools.at_least(Goal(goal.expander, [*goal.context, *variables], facts, argument, least,
                                            goal.divisors, goal.depth + 1))
            except Stuck:
                continue
            return [place, [goal.text(each, variables) for each in guess],
                    [[goal.witness_text(w, variables) for w in each or ()] for each in witnesses], steps]
    return None


def _climb(goal: Goal, tools: Tools) -> bool:
    """Makes the logarithm of a maximum one of logarithms."""
    if not any(isinstance(d.atoms[0], Function) and d.atoms[0].name == "log" for d in goal.divisors):
        return False
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not (isinstance(atom, Function) and atom.name == "log" and len(atom.arg) == 1) or atom in goal.held:
                continue
            [inner] = atom.arg
            if inner.factor <= 0 or inner.variables or inner.guards or len(inner.atoms) != 1 or not isinstance(
                    inner.atoms[0], Largest):
                continue
            goal.held.add(atom)
            members = [refreshed_member(m, goal.expander.fresh) for m in inner.atoms[0].members]
            bodies = [tuple(dataclasses.replace(t, factor=t.factor * inner.factor) for t in m.body) for m in members]
            proofs = []
            for m, body in zip(members, bodies, strict=True):
                facts = [*goal.facts, *inequalities(term.guards), *inequalities(m.guards)]
                proofs.append(above(goal, [*term.variables, *m.variables], facts, body, tools))
                if proofs[-1] is None:
                    break
            else:
                goal.step("climb", number, place, proofs)
                fresh = goal.expander.fresh
                replace_term(goal, number, _others(term, place), largest(
                    [dataclasses.replace(m, body=made("log", b, fresh)) for m, b in zip(members, bodies, strict=True)],
                    fresh))
                return True
    return False


def _part(goal: Goal) -> bool:
    """Takes a member of a maximum apart by a guard that may hold or not."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Largest) and ("part", atom, term.guards) not in goal.still:
                for k in range(len(atom.members)):
                    if _parted(goal, number, place, k):
                        return True
                goal.still.add(("part", atom, term.guards))
    return False


def _parted(goal: Goal, number: int, place: int, k: int) -> bool:
    term = goal.terms[number]
    atom = term.atoms[place]
    assert isinstance(atom, Largest)
    member, known = atom.members[k], goal.known(term.guards)
    here = goal.known((*term.guards, *member.guards))
    scope = {*goal.context, *term.variables, *member.variables}
    names = (*term.variables, *member.variables)
    for guard in (g for t in member.body for g in (*t.guards, *(g for a in t.atoms for g in nested_guards(a)))):
        if (guard.poly.symbols.isdisjoint(member.variables) or here.holds(guard) is not None
                or not all(n in scope or n[0] not in "$@" for n in guard.poly.symbols)):
            continue
        cases: list[Any] = []
        found = []
        for case in ((guard,), *negations([guard])):
            part = dataclasses.replace(member, guards=(*member.guards, *case))
            none = goal.known((*term.guards, *part.guards)).contradictory()
            if none is not None:
                cases.append(["none", goal.witness_text(none, names)])
                continue
            for guess in product(_points(goal, term, part), repeat=len(member.variables)):
                at = dict(zip(member.variables, guess, strict=True))
                witnesses = [known.holds(Condition(g.poly.substitute(at), g.relation)) for g in part.guards]
                if all(w is not None for w in witnesses):
                    cases.append(["some", [goal.text(v, term.variables) for v in guess],
                                  [[goal.witness_text(w, term.variables) for w in ws or ()] for ws in witnesses]])
                    found.append(part)
                    break
            else:
                break
        else:
            if len(found) < 2:
                continue
            goal.step("part", number, place, k, *goal.guard_text(guard, names), cases)
            fresh = goal.expander.fresh
            members = [refreshed_member(m, fresh) for m in (*atom.members[:k], *found, *atom.members[k + 1:])]
            replace_term(goal, number, _others(term, place), largest(members, fresh))
            return True
    return False


def _points(goal: Goal, term: Term, member: Member) -> list[Poly]:
    """Values that a variable of a member may have: 0, and the ends of its ranges."""
    found = [Poly({})]
    for guard in member.guards:
        for name in member.variables:
            factor = dict(guard.poly.terms).get((Symbol(name),), 0)
            rest = guard.poly - Poly({(Symbol(name),): factor})
            if factor == 1 and rest.symbols.isdisjoint(member.variables):
                found.append(-rest)
    return list(dict.fromkeys([*found, *map(Poly.symbol, (*goal.context, *term.variables))]))[:8]


def _merged(goal: Goal, tools: Tools) -> bool:
    """Adds two terms up that are the same."""
    return any(tools.merge(goal, i, j) for i in sorted(goal.terms) for j in sorted(goal.terms)
               if i < j and i in goal.terms and j in goal.terms)


def _quotient(goal: Goal, tools: Tools) -> bool:
    """Puts the rest of a product in place of ``x * 1/x * rest``: adds the rest and takes it away, and what is taken
    away becomes the product by a unit."""
    inverse = [atom for term in goal.terms.values() for atom in term.atoms
               if isinstance(atom, Function) and atom.name == "1/"]
    if not inverse:
        return False
    state = kept(goal)
    add_divisors(goal, inverse)
    add_positive(goal)
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if isinstance(atom, Function) and atom.name == "1/" and atom.arg and (
                    _cancelled(goal, number, term, place, atom, tools)):
                return True
    restored(goal, state)
    return False


def _cancelled(goal: Goal, number: int, term: Term, place: int, atom: Function, tools: Tools) -> bool:
    for part in collected(atom.arg):
        places = _matched(term, place, part)
        if places is None:
            continue
        left = [a for k, a in enumerate(term.atoms) if k not in places]
        free = set[str]().union(*map(free_names, left))
        gone = [v for v in term.variables if v not in free and any(v in free_names(term.atoms[k]) for k in places)]
        gone = gone if part.variables else []
        if len(gone) != len(part.variables):
            continue
        using = [g for g in term.guards if not g.poly.symbols.isdisjoint(gone)]
        rest = make_term(term.factor / part.factor, [v for v in term.variables if v not in gone],
                         [g for g in term.guards if g not in using], left)
        known = goal.known(rest.guards)
        for guess in guesses(goal, rest, len(gone)):
            moved = [substituted(Term(Fraction(1), guards=(g,)), dict(zip(gone, guess, strict=True))) for g in using]
            guards = [g for t in moved for g in t.guards]
            witnesses = [known.holds(g) for g in guards]
            if len(guards) != len(using) or any(w is None for w in witnesses):
                continue
            words = [[goal.text(each, rest.variables) for each in guess],
                     [[goal.witness_text(w, rest.variables) for w in ws or ()] for ws in witnesses]]
            return _replaced(goal, number, places, [term.variables.index(v) for v in gone], rest, atom, words, tools)
    return False


def _matched(term: Term, place: int, part: Term) -> list[int] | None:
    """The places of atoms of the kinds of a part's, and that of the reciprocal."""
    left = [k for k in range(len(term.atoms)) if k != place]
    found = [place]
    for atom in part.atoms:
        fit = [k for k in left if kind_of(term.atoms[k]) == kind_of(atom)]
        if not fit:
            return None
        one = next((k for k in fit if term.atoms[k] == atom), fit[0])
        found.append(one)
        left.remove(one)
    return found


def _replaced(goal: Goal, number: int, places: list[int], gone: list[int], rest: Term, atom: Function,
              words: list[Any], tools: Tools) -> bool:
    for place, values, guards, argument in _units(goal, rest, atom):
        state = kept(goal)
        try:
            goal.step("insert", number, sorted(places), gone, str(rest.factor), *words)
            first = goal.count
            goal.append(number, refreshed(rest, goal.expander.fresh))
            goal.append(number, refreshed(dataclasses.replace(rest, factor=-rest.factor), goal.expander.fresh))
            taken = goal.terms[first + 1]
            known = goal.known(taken.guards)
            moved = substituted(Term(Fraction(1), guards=guards), dict(zip(rest.variables, map(
                Poly.symbol, taken.variables), strict=True)))
            if len(moved.guards) == len(guards) and all(known.holds(g) is not None for g in moved.guards):
                names = dict(zip(rest.variables, map(Poly.symbol, taken.variables), strict=True))
                goal.step("unit", first + 1, place, [goal.text(v.substitute(names), taken.variables) for v in values],
                          [[goal.witness_text(w, taken.variables) for w in known.holds(g) or ()]
                           for g in moved.guards])
                argument = tuple(substituted(t, names) for t in argument)
                fresh = goal.expander.fresh
                begin = goal.count
                replace_term(goal, first + 1, taken.atoms, [
                    times(refreshed(a, fresh), refreshed(b, fresh)) for a in argument
                    for b in reciprocal(argument, fresh)])
                for new in range(begin, goal.count):
                    if not any(tools.merge(goal, other, new) for other in sorted(goal.terms)
                               if other not in (first, new) and other in goal.terms and other < begin):
                        break
                else:
                    if number not in goal.terms:
                        return True
        except Stuck:
            pass
        restored(goal, state)
    return False


def _units(goal: Goal, rest: Term, atom: Function) -> Iterator[tuple[int, tuple[Poly, ...], Any, Normal]]:
    """Divisors of the kind of a reciprocal, with values of their variables where the rest stands."""
    known, found = goal.known(rest.guards), []
    for place, divisor in sorted(enumerate(goal.divisors), key=lambda each: each[1].atoms[0] != atom):
        [function] = divisor.atoms
        assert isinstance(function, Function)
        if function.name not in ("1/", "log") or kind_of(Function("1/", function.arg)) != kind_of(atom):
            continue
        for guess in guesses(goal, rest, len(divisor.variables)):
            moved = substituted(dataclasses.replace(divisor, variables=()),
                                dict(zip(divisor.variables, guess, strict=True)))
            if any(known.holds(guard) is None for guard in moved.guards):
                continue
            [function] = moved.atoms
            assert isinstance(function, Function)
            found.append((place, guess, moved.guards, function.arg))
    yield from sorted(found, key=lambda way: way[3] != atom.arg)[:_UNITS]


def _lose(goal: Goal, tools: Tools) -> bool:
    """Takes a member away from a maximum that is known not to be above the others."""
    for number in sorted(goal.terms):
        term = goal.terms[number]
        for place, atom in enumerate(term.atoms):
            if not isinstance(atom, Largest) or not 1 < len(atom.members) <= 4 or atom in goal.held:
                continue
            for k, member in enumerate(atom.members):
                fresh = goal.expander.fresh
                rest = largest([refreshed_member(m, fresh) for m in (*atom.members[:k], *atom.members[k + 1:])], fresh)
                facts = [*goal.facts, *inequalities(term.guards), *inequalities(member.guards)]
                try:
                    steps = tools.at_least(Goal(goal.expander, [*goal.context, *term.variables, *member.variables],
                                                facts, rest, member.body, goal.divisors, goal.depth + 1))
                except Stuck:
                    continue
                goal.step("lose", number, place, k, steps)
                replace_term(goal, number, _others(term, place), rest)
                return True
            goal.held.add(atom)
    return False
