"""Equality saturation of a model's terms; the result is a list of options for every e-class.

Each round goes through the rules that leave less to compute, in the order of
:class:`~mlc.graph.substitute.rule_benefit.Benefit`, and applies the oldest matches of each up to a budget; a rule with
more matches is banned for some rounds, each time for longer (egg's back-off scheduler). The other rules (commutation,
growth and the like) are left out: they would use up the node budget of those that gain.

A rule that joins products takes them in the order of the model, from left to right: of products 1, 2, 3 of one tensor
come 1+2, then (1+2)+3, but neither 2+1 nor 1+1; and of more than a few, one chain from the first to the last.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, pairwise
from operator import or_

from mlc.graph.substitute.fold import foldable
from mlc.graph.substitute.hints import add_hints, hinted
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.rule_benefit import Benefit
from mlc.graph.substitute.sums import arrange
from mlc.substitution.egraph import PRODUCTS, EGraph, ENode, Limits
from mlc.substitution.rewrite import Match, relevant
from mlc.substitution.rule import Rule
from mlc.substitution.terms import TermGraph

__all__ = ["Choices", "Report", "folds", "saturate"]

#: matches that a rule may have in a round before it has to wait
_BUDGET = 400
#: pairs of products with an operand in common up to which all are joined; of more, a chain is
_PAIRS = 3


@dataclass(frozen=True)
class Report:
    """Why it stopped (``saturated``, ``nodes``, ``rounds``, ``work``; ``seconds``: it should not have), sizes, the work
    that was done in the units of :class:`Limits`, and how often each rule matched. ``unproved`` are the rules that were
    applied before their certificates were checked."""

    reason: str
    rounds: int
    nodes: int
    work: float
    seconds: float
    matches: Mapping[str, int] = field(default_factory=dict)
    unproved: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Choices:
    """``options`` and ``shapes`` by class: of a class its nodes, each with the rule that brought it (None: the model).
    ``constant`` are the classes that depend on constants alone; ``roots`` the classes of the outputs, and ``original``
    the node that the graph had in each of its classes."""

    options: dict[int, dict[ENode, str | None]]
    shapes: dict[int, tuple[int, ...]]
    constant: frozenset[int]
    roots: tuple[int, ...]
    original: dict[int, ENode]


def saturate(graph: TermGraph, rules: Sequence[Pattern | Rule], limits: Limits | None = None) -> tuple[Choices, Report]:
    """What ``rules`` make equal to the terms of ``graph`` within ``limits``.

    Raises ValueError for a rule without a certificate.
    """
    return _Saturation(graph, [r if isinstance(r, Pattern) else Pattern(r) for r in rules], limits or Limits()).run()


def folds(graph: TermGraph, patterns: Sequence[Pattern]) -> bool:
    """Whether there is something to do away with before products are joined: constants let a rule be applied, or a
    sum has products of one tensor or many products."""
    return _Saturation(graph, patterns, Limits()).folds()


class _Saturation:
    def __init__(self, graph: TermGraph, patterns: Sequence[Pattern], limits: Limits) -> None:
        self._graph, self._limits = graph, limits
        self._egraph, self._found = EGraph.of(graph)
        self._egraph.unproved = {}
        self._matches: Counter[str] = Counter()
        self._resting: dict[int, int] = {}  # the round in which a rule takes part again
        self._strikes: Counter[int] = Counter()
        self._done: set[tuple[object, ...]] = set()
        self._covered: defaultdict[object, int] = defaultdict(int)  # the products that a chain has, by what they share
        self._arranged = arrange(self._egraph, graph, self._found, patterns)
        self._sums = self._arranged.shared
        self._matches.update(self._arranged.laws)
        present = graph.operators() | hinted(self._sums)
        repeats = any(op in ("expand", "gather") for op, _ in present)
        useful = [pattern for pattern in patterns if pattern.benefit is not Benefit.NONE
                  and (repeats or pattern.benefit is not Benefit.APART)]
        self._patterns = sorted(relevant(useful, present), key=lambda pattern: pattern.benefit)

    def folds(self) -> bool:
        by_constants = [pattern for pattern in self._patterns if any(pattern.benefits)]
        return bool(self._sums) or self._arranged.products > _PAIRS or any(
            pattern.folding(self._egraph, match) for pattern in by_constants for match in pattern.matches(self._egraph))

    def run(self) -> tuple[Choices, Report]:
        started = time.monotonic()
        reason, number = "rounds", 0
        add_hints(self._egraph, self._sums)
        for number in range(1, self._limits.rounds + 1):
            learnt, waiting = self._round(number, started)
            learnt |= add_hints(self._egraph, self._sums)
            self._egraph.rebuild()
            if len(self._egraph) >= self._limits.nodes:
                reason = "nodes"
                break
            if over := self._over(started):
                reason = over
                break
            if not learnt and not waiting:
                reason = "saturated"
                break
        report = Report(reason, number, len(self._egraph), self._egraph.work, time.monotonic() - started,
                        dict(self._matches), tuple((self._egraph.unproved or {}).values()))
        return self._choices(), report

    def _over(self, started: float) -> str | None:
        """Which limit is reached that is looked at after each rule."""
        if self._egraph.work >= self._limits.work:
            return "work"
        return "seconds" if time.monotonic() - started > self._limits.seconds else None

    def _round(self, number: int, started: float) -> tuple[bool, bool]:
        """Whether a rule had something new to say, and whether one has to wait."""
        learnt = waiting = False
        for place, pattern in enumerate(self._patterns):
            if self._resting.get(place, 0) > number:
                waiting = True
                continue
            budget = _BUDGET << self._strikes[place]
            found = list(islice(self._fresh(place, pattern), budget))
            if len(found) == budget:
                self._strikes[place] += 1
                self._resting[place] = number + (1 << self._strikes[place])
                waiting = True
            while found:
                for match in self._chained(pattern, found) if pattern.joins else found:
                    if pattern.build(self._egraph, match):
                        learnt = True
                        self._matches[pattern.rule.name] += 1
                    self._done.add(self._key(place, match))
                    if len(self._egraph) >= self._limits.nodes:
                        return learnt, waiting
                if not pattern.joins:
                    break
                self._egraph.rebuild()  # a chain goes on where it stopped
                found = list(islice(self._fresh(place, pattern), budget))
            if self._over(started):
                break
        return learnt, waiting

    def _key(self, place: int, match: Match) -> tuple[object, ...]:
        return (place, *(self._egraph.find(each) for each in match.classes.values()), *match.sizes.values())

    def _fresh(self, place: int, pattern: Pattern) -> Iterator[Match]:
        """Matches that were not built yet; of rules that join, those that may be joined."""
        for match in pattern.matches(self._egraph):
            if self._key(place, match) in self._done:
                continue
            if not pattern.joins or self._joinable(pattern, match):
                yield match

    def _joinable(self, pattern: Pattern, match: Match) -> bool:
        """Whether the products come in the model's order, the rule made none but the first, and none needs another."""
        graph = self._egraph
        outputs = [graph.find(match.classes[output]) for output in pattern.rule.source.outputs]
        members = [graph.members[each] for each in outputs]
        if not all(members) or any(graph.joined.get(each) == pattern.rule.name for each in outputs[1:]):
            return False
        if any(a & b or a & -a > b & -b for a, b in pairwise(members)):
            return False
        whole = reduce(or_, members)
        if self._covered.get(self._group(pattern, match), 0) & whole == whole:
            return False
        below = [graph.below[each] for each in outputs]
        return not any(b & m for i, b in enumerate(below) for j, m in enumerate(members) if i != j)

    def _group(self, pattern: Pattern, match: Match) -> tuple[object, ...]:
        """The key of products that a rule could join in any order."""
        return (pattern.rule.name, *(self._egraph.find(match.classes[name]) for name in pattern.shared))

    def _chained(self, pattern: Pattern, found: Sequence[Match]) -> Iterator[Match]:
        """All of a few; of many with an operand in common, the longest chain from the first with the next."""
        groups: dict[object, list[Match]] = defaultdict(list)
        for match in found:
            groups[self._group(pattern, match)].append(match)
        for key, group in groups.items():
            group.sort(key=self._order)
            if len(group) <= _PAIRS and key not in self._covered:
                yield from group
                continue
            yield group[0]
            self._covered[key] |= reduce(or_, self._members(group[0]))

    def _order(self, match: Match) -> tuple[int, list[int]]:
        first, *others = self._members(match)
        return first & -first, [-first.bit_count(), *(m & -m for m in others)]

    def _members(self, match: Match) -> list[int]:
        graph = self._egraph
        return [graph.members[graph.find(each)] for ref, each in match.classes.items() if not isinstance(ref, str)]

    def _choices(self) -> Choices:
        graph, found = self._egraph, [self._egraph.find(each) for each in self._found]
        options = {each: self._options(each) for each in graph.nodes}
        original: dict[int, ENode] = {}
        for place, term in enumerate(self._graph.terms):
            own = ENode(term.op, tuple(found[i] for i in term.inputs), term.attributes)
            original.setdefault(found[place], own)
        return Choices(
            options, dict(graph.shapes), frozenset(each for each in graph.nodes if graph.constant[each]),
            tuple(found[place] for place in self._graph.outputs), original,
        )

    def _options(self, each: int) -> dict[ENode, str | None]:
        graph, found = self._egraph, dict[ENode, str | None]()
        for node, rule in graph.nodes[each].items():
            if any(graph.find(source) == each for source in node.inputs):
                continue  # made of itself
            if node.op in PRODUCTS and rule is not None and self._joined_further(each):
                continue
            if node.leaf or not graph.constant[each] or foldable(node.op):
                found.setdefault(ENode(node.op, tuple(map(graph.find, node.inputs)), node.attributes), rule)
        return found

    def _joined_further(self, each: int) -> bool:
        """Whether a product is only a step of a chain: there is all of it to choose, or none."""
        graph, rule, last = self._egraph, self._egraph.joined.get(each), each
        while rule is not None:
            above = (graph.find(node.inputs[0]) for node, by in graph.nodes[last].items() if by == rule)
            further = [a for a in above if graph.members[last] & ~graph.members[a] == 0 and a in graph.joined
                       and graph.members[a] != graph.members[last]]
            if not further:
                break
            last = further[0]
        return last != each and graph.members[last].bit_count() > _PAIRS
