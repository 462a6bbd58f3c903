"""Steps about maxima that end a goal: one of the members is the maximum; none of them is above a sum; two bounds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

from mlc.substitution.check.integers import need
from mlc.substitution.check.maxima import GENTLE, GROWING, at_least_zero, called
from mlc.substitution.check.terms import (
    Member,
    Term,
    collected,
    filled,
    free_names,
    inequalities,
    make_term,
    negated,
    refreshed,
    renamed,
)

__all__ = ["attain", "both", "each_member", "gentle", "rise"]

#: a goal and its steps as :mod:`mlc.substitution.check.play` has them, which imports this module
Steps: TypeAlias = Any
#: the same for a sum that is to be shown at least 0
AtLeast: TypeAlias = Any

#: numbers of a path, three for each level of functions
_LONGEST = 36


def attain(play: Steps, path: Any, k: Any, mapping: Any, guards: Any, proofs: Any) -> None:
    """Of finitely many values, of which there are some, one is the largest: what is to be shown is shown for each
    member of a maximum of the context, of which any values of its variables may be those where it is.

    That there are some is shown by values of member ``k``, so that the maximum may stand anywhere: in sums, and where
    guards are; but there, the maxima inside of it must be of something even where those guards do not hold. The claim
    is about the context that was; the variables that it gets are of that maximum alone.
    """
    members, always = _maximum(play.terms, path)
    need(always or all(map(filled, (a for m in members for t in m.body for a in t.atoms))),
         "a maximum inside of it may be of nothing")
    need(free_names(("max", members)) <= {*play.context, *play.sizes}, "the maximum must be of the context")
    play.member(members, k, mapping, guards, play.facts, play.reader())
    need(isinstance(proofs, list) and len(proofs) == len(members), "every member may be the largest")
    for one, steps in zip(map(renamed, members), proofs, strict=True):
        known = [Term(Fraction(1), m.names, m.guards, (("call", "", collected(
            [*map(refreshed, one.body), *negated(m.body)])),)) for m in map(renamed, members)]
        branch = play.branch(inequalities(one.guards), known)
        branch.context += one.names
        branch.run(steps)
    play.terms.clear()


def both(play: Steps, kind: type[AtLeast], forth: Any, back: Any) -> None:
    """A sum that is at least 0, and at most, is 0."""
    terms = list(play.terms.values())
    for part, steps in ((terms, forth), (negated(terms), back)):
        kind(play.sizes, play.context, play.facts, play.divisors, part, (), play.depth + 1).run(steps)
    play.terms.clear()


def each_member(play: AtLeast, i: int, p: Any, proofs: Any) -> None:
    """What a maximum is taken away from is at least 0 if it is for each of the members in its place, for all values of
    that one's variables: a product of it with what is at least 0 is the largest of the members' products."""
    term = play.terms[i]
    need(type(p) is int and 0 <= p < len(term.atoms) and term.atoms[p][0] == "max", "a product has no such maximum")
    need(term.factor < 0 and not term.names and not term.guards, "a maximum must be taken away, and in no sum")
    atoms = [*term.atoms[:p], *term.atoms[p + 1:]]
    need(at_least_zero([Term(Fraction(1), (), (), (atom,)) for atom in atoms]), "a factor must be at least 0")
    rest = [other for number, other in play.terms.items() if number != i]
    need(isinstance(proofs, list) and len(proofs) == len(term.atoms[p][1]), "no member may be above the rest")
    for member, steps in zip(map(renamed, term.atoms[p][1]), proofs, strict=True):
        products = [make_term(term.factor * one.factor, one.names, one.guards, (*atoms, *one.atoms))
                    for one in map(refreshed, member.body)]
        type(play)(play.sizes, [*play.context, *member.names], [*play.facts, *inequalities(member.guards)],
                   play.divisors, [*rest, *products], (), play.depth + 1).run(steps)
    play.terms.clear()


def rise(play: AtLeast, i: int, j: int, steps: Any, above: Any) -> None:
    """A positive multiple of f(x) is at least that of f(y), where f grows and x is at least y: what the term j is of,
    which stands in no sum. A logarithm does where y is above 0."""
    term, facts, _ = play.at(i)
    other = play.terms[j]
    [atom], [lower] = term.atoms, other.atoms
    need(term.factor > 0, "a negative multiple is not above what is below")
    need(atom[0] == lower[0] == "call" and atom[1] == lower[1], "functions must be the same")
    need(not other.names and not other.guards, "what is below must be of the context")
    if atom[1] == "log":
        play.above_known(term.names, facts, lower[2], *above)
    else:
        need(atom[1] in GROWING, "it is not known to grow")
    type(play)(play.sizes, [*play.context, *term.names], facts, play.divisors, atom[2], lower[2], play.depth + 1).run(
        steps)
    play.put(i, (), [Term(Fraction(1), (), (), (lower,))])


def gentle(play: AtLeast, i: int, j: int) -> None:
    """``f(x) - f(y)`` is at most the larger of ``x - y`` and 0, where f grows no faster than what it is of: so that is
    taken away in place of it."""
    one, other = play.terms[i], play.terms[j]
    [upper], [lower] = one.atoms, other.atoms
    need(one.factor < 0 and one.factor == -other.factor, "a difference must be taken away")
    need(not (one.names or one.guards or other.names or other.guards), "the difference must be in no sum")
    need(upper[0] == lower[0] == "call" and upper[1] == lower[1] and upper[1] in GENTLE, "it may grow faster")
    del play.terms[j]
    play.put(i, (), called("relu", [*map(refreshed, upper[2]), *map(refreshed, negated(lower[2]))]))


def _maximum(terms: Any, path: Any, always: bool = True) -> tuple[tuple[Member, ...], bool]:
    """The members of the maximum at a place, numbers of terms, atoms and members in turn; and whether it is evaluated
    whatever the context's variables are: it stands in no sum and under no guards."""
    need(isinstance(path, list) and len(path) <= _LONGEST and all(type(k) is int and k >= 0 for k in path),
         "a path must be of few numbers")
    term, place, *rest = path
    atom, always = terms[term].atoms[place], always and not terms[term].names and not terms[term].guards
    if atom[0] == "call":
        return _maximum(atom[2], rest, always)
    need(atom[0] == "max", "only of a maximum is one member the largest")
    members: tuple[Member, ...] = atom[1]
    return _maximum(members[rest[0]].body, rest[1:], always) if rest else (members, always)
