"""The rules that compiling applies: those of the library that can be, in both directions where a rule has two."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import cache

from tvm import relax

from mlc.graph.ir.rewrite import bindings
from mlc.graph.substitute.benefit import Benefit, benefit_of
from mlc.graph.substitute.match import Pattern
from mlc.substitution.applicable import directions
from mlc.substitution.ranks import RANK, instances
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules

__all__ = ["patterns", "rank_for", "shipped_patterns"]

#: the lowest rank that a model's rules are made ready for: few models have no tensor of it
_COMMON = 4


def rank_for(function: relax.Function) -> int:
    """Up to which rank a model wants rules: that of its tensors, but within what is usual. Every rank more has a
    choice of axes more for each block of a rule."""
    variables = [*function.params, *(binding.var for binding in bindings(function))]
    shapes = (getattr(each.ty, "shape", None) for each in variables)  # tuples have none
    return min(RANK, max([_COMMON, *(len(shape.values) for shape in shapes if shape is not None)]))


@cache
def shipped_patterns(rank: int = RANK) -> tuple[Pattern, ...]:
    """The rules of the library; those for many ranks for tensors of up to ``rank``."""
    collects = gc.isenabled()
    gc.disable()  # all of it stays: to look through it for garbage again and again would take as long as to make it
    try:
        return patterns(shipped_rules(), rank)
    finally:
        if collects:
            gc.enable()


def patterns(rules: Iterable[Rule], rank: int = RANK) -> tuple[Pattern, ...]:
    """Rules with a certificate, both ways where they are; those that leave fewer products first."""
    found = [Pattern(rule, turned=turned) for rule in instances(rules, rank) if rule.certificate is not None
             for turned in _directions(rule)]
    return tuple(sorted(found, key=lambda pattern: pattern.benefit))


def _directions(rule: Rule) -> Iterable[bool]:
    """Whether it is turned, for each direction in which it is applied."""
    return (turned for turned in directions(rule) if not _grows(rule.turned if turned else rule))


def _grows(rule: Rule) -> bool:
    """Whether a rule of one output makes more of less, at run time too: without end, so that it would use up the nodes
    of others."""
    more = len(rule.source.outputs) == 1 and len(rule.target.nodes) > len(rule.source.nodes)
    return more and benefit_of(rule) is Benefit.NONE
