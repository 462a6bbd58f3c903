"""The rules that compilation applies: the applicable ones of the library, in both directions where a rule has two."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from tvm import relax

from mlc.graph.ir.rewrite import bindings
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.rule_benefit import Benefit, benefit_of
from mlc.substitution.applicable import directions
from mlc.substitution.graph import Graph
from mlc.substitution.ranks import RANK, instances
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules

__all__ = ["Patterns", "patterns", "rank_for", "ready", "shipped_patterns", "uncollected"]

#: the lowest rank that a model's rules are made ready for: few models have no tensor of it
_COMMON = 4
#: operators that a search adds by itself to a graph of convolutions (:mod:`mlc.graph.substitute.hints`)
_HINTED = ("enlarge", "identity_kernel")


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looks for garbage, which there is little of: beside a whole model each takes longer than many a rule."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def rank_for(function: relax.Function) -> int:
    """Up to which rank a model wants rules: that of its tensors, but within what is usual. Every rank more has a
    choice of axes more for each block of a rule."""
    variables = [*function.params, *(binding.var for binding in bindings(function))]
    shapes = (getattr(each.ty, "shape", None) for each in variables)  # tuples have none
    return min(RANK, max([_COMMON, *(len(shape.values) for shape in shapes if shape is not None)]))


@cache
def shipped_patterns(rank: int = RANK) -> Patterns:
    """The rules of the library; those for many ranks for tensors of up to ``rank``."""
    return Patterns(shipped_rules(), rank)


def patterns(rules: Iterable[Rule], rank: int = RANK) -> tuple[Pattern, ...]:
    """Rules with a certificate, both ways where they are; those that leave fewer products first."""
    return tuple(Patterns(rules, rank))


def ready(given: Sequence[Pattern], operators: Iterable[str]) -> Sequence[Pattern]:
    """Of patterns that are made when they are asked for, those for a graph of these operators; others as they are."""
    return given.among(operators) if isinstance(given, Patterns) else given


class Patterns(Sequence[Pattern]):
    """The patterns of rules with a certificate, both ways where they are, those that leave fewer products first.

    They are made ready when they are asked for, since it takes longer than to look whether a graph has their operators.
    """

    def __init__(self, rules: Iterable[Rule], rank: int = RANK) -> None:
        self._rules, self._rank = [rule for rule in rules if rule.certificate is not None], rank
        self._made: dict[int, list[Pattern]] = {}
        #: the same for the same rules at the same ranks
        self.name = f"{rank} {' '.join(rule.name for rule in self._rules)}"

    def among(self, operators: Iterable[str]) -> tuple[Pattern, ...]:
        """All that could apply where these operators are, or to what others make of them."""
        known, before, found = set(operators), -1, set[int]()
        if "conv2d" in known:
            known.update(_HINTED)
        while len(known) > before:
            before = len(known)
            for place, ways in enumerate(self._ways):
                for asked, brought in ways:
                    if asked <= known:
                        known |= brought
                        found.add(place)
        return self._patterns(sorted(found))

    @cached_property
    def _ways(self) -> list[list[tuple[frozenset[str], frozenset[str]]]]:
        """For each rule and direction, the operators that it matches and those that it introduces."""
        ways = []
        for rule in self._rules:
            both = (rule.turned if turned else rule for turned in _directions(rule))
            ways.append([(_operators(one.source), _operators(one.target)) for one in both])
        return ways

    @cached_property
    def _all(self) -> tuple[Pattern, ...]:
        return self._patterns(range(len(self._rules)))

    def _patterns(self, places: Iterable[int]) -> tuple[Pattern, ...]:
        with uncollected():  # all of it stays
            found = [pattern for place in places for pattern in self._of(place)]
        return tuple(sorted(found, key=lambda pattern: pattern.benefit))

    def _of(self, place: int) -> list[Pattern]:
        if place not in self._made:
            self._made[place] = [Pattern(one, turned=turned) for one in instances([self._rules[place]], self._rank)
                                 for turned in _directions(one)]
        return self._made[place]

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, place: Any) -> Any:
        return self._all[place]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self._all)


def _operators(side: Graph) -> frozenset[str]:
    return frozenset(node.op for node in side.nodes)


def _directions(rule: Rule) -> Iterable[bool]:
    """Whether it is turned, for each direction in which it is applied."""
    return (turned for turned in directions(rule) if not _grows(rule.turned if turned else rule))


def _grows(rule: Rule) -> bool:
    """Whether a rule of one output makes more of less, at run time too: without end, so that it would use up the nodes
    of others."""
    more = len(rule.source.outputs) == 1 and len(rule.target.nodes) > len(rule.source.nodes)
    return more and benefit_of(rule) is Benefit.NONE
