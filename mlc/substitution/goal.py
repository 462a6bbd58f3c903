"""A proof goal: a sum of terms that must be zero for all indices, and the steps taken so far.

The steps are the calculus of the certificate (:mod:`mlc.substitution.check` states each and checks it again). Terms
keep their numbers; a new one takes the next. In the texts of steps ``@k`` is the context's variable k and ``$k`` the
term's variable k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from mlc.operators.index import Condition, Poly
from mlc.operators.scalar import Read
from mlc.substitution.entailment import Facts
from mlc.substitution.expand import Expander
from mlc.substitution.normal import Atom, Function, Normal, Number, Stuck, Term, make_term, mapped, negations

__all__ = ["ALL_STEPS", "Goal", "inequalities"]

#: steps of a goal, and of all goals of a second attempt, those that led nowhere among them
_STEPS, ALL_STEPS = 400, 1_500


class Goal:
    """To show: ``terms - others`` is zero whatever the ``context`` variables are, as far as ``facts`` admit.

    Functions that are not defined everywhere are taken as 0 elsewhere. ``divisors`` are reciprocals, each the one atom
    of a term, that are defined wherever anything is to be shown, so that each times what it is of is 1. Where
    ``counts`` is False, the terms stand for the instances of their atoms rather than for sums
    (:mod:`mlc.substitution.goal_defined`): then no variable may become the number of its values. Among the divisors
    are logarithms too, roots, and functions of no name: what these are of is at least 0. ``tightens`` is
    whether bounds are looked for that rational reasoning can't see, which takes long.
    """

    def __init__(self, expander: Expander, context: Sequence[str], facts: Sequence[Poly], terms: Normal,
                 others: Normal = (), divisors: Normal = (), depth: int = 0, counts: bool = True,
                 tightens: bool = True) -> None:
        self.expander, self.context, self.depth, self.counts = expander, list(context), depth, counts
        self.facts, self.divisors, self.tightens = list(facts), divisors, tightens
        self.terms = dict(enumerate((*terms, *_negative(others))))
        #: numbers of the terms that come from ``others``
        self.new = set(range(len(terms), len(self.terms)))
        self.steps: list[list[Any]] = []
        #: terms with guards that were looked for, found or not
        self.tried: set[tuple[int, Condition]] = set()
        #: numbers of the divisors within which no variable has one value any more
        self.settled: set[int] = set()
        #: divisors, atoms where terms stand, and maxima that can be made no simpler
        self.reduced: set[Term] = set()
        self.still: set[Any] = set()
        self.held: set[Any] = set()
        #: how many cases are around, and which members of which maxima they compare
        self.cases = 0
        self.ordered: set[Any] = set()
        #: the number of the next term
        self.count = len(self.terms)
        self._cache: dict[tuple[Condition, ...], Facts] = {}

    def known(self, guards: tuple[Condition, ...] = ()) -> Facts:
        """The facts of the context, then those of the guards."""
        if guards not in self._cache:
            self._cache[guards] = Facts([*self.facts, *inequalities(guards)])
        return self._cache[guards]

    def said(self) -> Any:
        """What is to be shown of what is known; goals that differ in the names of variables say the same."""
        names, numbers = {n: Poly.symbol(f"$a{k}") for k, n in enumerate(self.context)}, count()
        sums = [_said(terms, names, numbers) for terms in (self.terms.values(), self.divisors)]
        return tuple(poly.substitute(names) for poly in self.facts), *sums

    def fresh_facts(self) -> None:
        """Forgets what followed from fewer facts."""
        self._cache = {}

    def assume(self, *polys: Poly) -> None:
        """More facts of the context."""
        self.facts += polys
        self._cache.clear()

    def change(self, of: Callable[[Poly], Poly]) -> None:
        """``of`` each polynomial in its place, in facts and terms."""
        self.facts = [of(p) for p in self.facts]
        self.terms = {n: mapped(t, of) for n, t in self.terms.items()}
        self.divisors = tuple(mapped(t, of) for t in self.divisors)
        self._cache.clear()

    # --- texts -----------------------------------------------------------------------------------------------------

    def text(self, poly: Poly, variables: Sequence[str] = ()) -> str:
        """The polynomial with positions in place of names."""
        names = {n: Poly.symbol(f"@{k}") for k, n in enumerate(self.context)}
        names |= {n: Poly.symbol(f"${k}") for k, n in enumerate(variables)}
        return str(poly.substitute(names))

    def guard_text(self, guard: Condition, variables: Sequence[str]) -> list[str]:
        """The guard with positions in place of names."""
        return [self.text(guard.poly, variables), guard.relation]

    def witness_text(self, witness: Any, variables: Sequence[str] = ()) -> Any:
        """The witness with positions in place of names in its quotients."""
        def ref(r: Any) -> Any:
            if not isinstance(r, list):
                return r
            return [r[0], self.text(r[1], variables), *(self.witness_text(w, variables) for w in r[2:])]

        return [[factor, [ref(r) for r in refs]] for factor, refs in witness]

    def show(self, term: Term) -> str:
        """The term for the reason of a search that is stuck."""
        def atom(a: Atom) -> str:
            if isinstance(a, Read):
                return f"{a.tensor}[{', '.join(map(str, a.indices))}]"
            if isinstance(a, Number):
                return f"{'1/' if a.inverse else ''}({a.value})"
            if isinstance(a, Function):
                return f"{a.name}({' + '.join(map(self.show, a.arg))})"
            return f"max({'; '.join(' + '.join(map(self.show, m.body)) for m in a.members)})"

        guards = " and ".join(map(str, term.guards))
        return f"{term.factor} * {' * '.join(map(atom, term.atoms)) or 1}" + (f" where {guards}" if guards else "")

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, *words: Any) -> None:
        """Notes a step; raises :class:`Stuck` where there are too many."""
        self.steps.append(list(words))
        self.expander.steps += self.expander.thorough
        if len(self.steps) > _STEPS or self.expander.steps > ALL_STEPS:
            raise Stuck("too many steps")

    def add_guard(self, number: int, guard: Condition) -> None:
        """A guard that the others are seen to imply."""
        term = self.terms[number]
        witnesses = self.known(term.guards).holds(guard)
        if witnesses is not None and guard not in term.guards:
            self.step("guard", number, *self.guard_text(guard, term.variables),
                      [self.witness_text(w, term.variables) for w in witnesses])
            self.terms[number] = replace(term, guards=(*term.guards, guard))

    def append(self, origin: int, term: Term) -> None:
        """A term that was a part of number ``origin``; below 0, one more of ``others``."""
        if origin in self.new or origin < 0:
            self.new.add(self.count)
        self.terms[self.count] = term
        self.count += 1

    def split(self, number: int, guard: Condition) -> None:
        """One term where the guard holds and one or two where it does not."""
        term = self.terms[number]
        self.step("split", number, *self.guard_text(guard, term.variables))
        self.terms[number] = make_term(term.factor, term.variables, (*term.guards, guard), term.atoms)
        for part in negations([guard]):
            self.append(number, make_term(term.factor, term.variables, (*term.guards, *part), term.atoms))


def inequalities(guards: Sequence[Condition]) -> list[Poly]:
    """Each ``>=`` as one polynomial, each ``==`` as two."""
    return [p for g in guards for p in ((g.poly,) if g.relation == ">=" else (g.poly, -g.poly))]


def _negative(terms: Normal) -> Normal:
    return tuple(replace(t, factor=-t.factor) for t in terms)


def _said(terms: Iterable[Term], names: Mapping[str, Poly], numbers: Iterator[int]) -> Any:
    """A sum in names by the order in which they are bound."""
    found = []
    for term in terms:
        inner = {**names, **{v: Poly.symbol(f"$b{next(numbers)}") for v in term.variables}}
        found.append((term.factor, len(term.variables), _guards_said(term.guards, inner),
                      tuple(_atom_said(atom, inner, numbers) for atom in term.atoms)))
    return tuple(found)


def _guards_said(guards: Iterable[Condition], names: Mapping[str, Poly]) -> Any:
    return tuple((guard.poly.substitute(names), guard.relation) for guard in guards)


def _atom_said(atom: Atom, names: Mapping[str, Poly], numbers: Iterator[int]) -> Any:
    if isinstance(atom, Read):
        return atom.tensor, *(index.substitute(names) for index in atom.indices)
    if isinstance(atom, Number):
        return atom.inverse, atom.value.substitute(names)
    if isinstance(atom, Function):
        return atom.name, _said(atom.arg, names, numbers)
    members = []
    for member in atom.members:
        inner = {**names, **{v: Poly.symbol(f"$b{next(numbers)}") for v in member.variables}}
        members.append((len(member.variables), _guards_said(member.guards, inner), _said(member.body, inner, numbers)))
    return "max", tuple(members)
