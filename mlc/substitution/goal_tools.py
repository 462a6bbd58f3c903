"""Shared by the modules of proof steps: sub-proofs, and undoing of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mlc.substitution.goal import Goal
from mlc.substitution.normal import Atom, Term

__all__ = ["Tools", "kept", "others", "restored"]


class Tools(NamedTuple):
    """What proves: adds two terms up if they are the same, without cases; shows that terms are at least 0; takes a
    member for a maximum; shows that terms are 0."""

    merge: Callable[[Goal, int, int], bool]
    at_least: Callable[[Goal], list[list[Any]]]
    choose: Callable[[Goal, Callable[[Goal], list[list[Any]]]], bool]
    equal: Callable[[Goal], list[list[Any]]]


def kept(goal: Goal) -> tuple[Any, ...]:
    """What :func:`restored` needs to undo steps."""
    return dict(goal.terms), list(goal.steps), set(goal.new), goal.count, goal.divisors, set(goal.settled)


def restored(goal: Goal, state: tuple[Any, ...]) -> None:
    """Undoes what was done since ``state``; of the context nothing may have changed."""
    terms, steps, new, goal.count, goal.divisors, settled = state
    goal.terms, goal.steps, goal.new, goal.settled = dict(terms), list(steps), set(new), set(settled)


def others(term: Term, place: int) -> tuple[Atom, ...]:
    """The atoms of a term but the one at ``place``."""
    return (*term.atoms[:place], *term.atoms[place + 1:])
