"""Whether a rule follows from others, by equality saturation of both sides at concrete generic sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeAlias

from mlc.operators.index import as_poly
from mlc.substitution.applicable import directions
from mlc.substitution.egraph import EGraph, Limits
from mlc.substitution.fingerprint import assignments
from mlc.substitution.graph import Graph, Ref, concrete
from mlc.substitution.ranks import RANK, instances
from mlc.substitution.rewrite import Rewrite, relevant
from mlc.substitution.rule import Rule
from mlc.substitution.terms import INPUT, freeze

__all__ = ["derivable"]

#: limits of one saturation; what needs more counts as not derived
LIMITS = Limits(rounds=13, nodes=12_000, work=5e5)
#: rounds of the rules that make more operators of fewer, each when the others have nothing more to say
_GROWTH = 4

#: the classes of an output on both sides
_Pair: TypeAlias = "tuple[int, int]"


def derivable(rules: Sequence[Rule], candidates: Sequence[Rule], limits: Limits = LIMITS,
              sizes: Sequence[Mapping[str, int] | None] | None = None) -> list[bool]:
    """For each candidate, whether its sides become equal under ``rules``; candidates share no inputs.

    ``rules`` are taken as right, whatever their certificates. ``sizes`` are those to look at; left out, they are drawn
    so that the precondition holds and sizes differ.
    """
    graph = EGraph(commutative=())  # a law like others, which may follow or not
    pairs: list[list[_Pair] | None] = []
    for place, rule in enumerate(candidates):
        given = sizes[place] if sizes else next(assignments(rule, 1, largest=7), None)
        pairs.append(None if given is None else _added(graph, rule, given, place))
    graph.rebuild()
    # rules with several outputs only bring together what is apart: sliced, both sides show the same without them
    rank = max([RANK, *map(len, graph.shapes.values())])
    single = [rule for rule in rules if len(rule.source.outputs) == 1]
    rewrites = [one for rule in instances(single, rank) for one in _rewrites(rule)]
    present = {(node.op, len(graph.shapes[each])) for each, nodes in graph.nodes.items() for node in nodes}
    _Saturation(graph, relevant(rewrites, present), limits, [p for each in pairs for p in each or ()]).run()
    return [each is not None and _equal(graph, each) for each in pairs]


@lru_cache(maxsize=1 << 15)
def _rewrites(rule: Rule) -> list[Rewrite]:
    return [Rewrite(rule, turned=turned, assumed=True) for turned in directions(rule)]


def _added(graph: EGraph, rule: Rule, sizes: Mapping[str, int], number: int) -> list[_Pair]:
    """The outputs of both sides of a rule; ``number`` tells its inputs from those of others."""
    known: dict[Ref, int] = {}
    for name, shape in rule.shapes.items():
        known[name] = graph.leaf(INPUT, freeze(id=(number, name)), tuple(int(s.evaluate(sizes)) for s in
                                                                         map(as_poly, shape)))

    def outputs(side: Graph) -> list[int]:
        made = dict(known)
        for place, node in enumerate(side.nodes):
            attributes = freeze(**{name: concrete(value, sizes) for name, value in node.completed.items()})
            made[place, 0] = graph.add(node.op, attributes, [made[ref] for ref in node.inputs])
        return [made[ref] for ref in side.outputs]

    return list(zip(outputs(rule.source), outputs(rule.target), strict=True))


def _equal(graph: EGraph, pairs: Sequence[_Pair]) -> bool:
    return all(graph.find(one) == graph.find(other) for one, other in pairs)


@dataclass
class _Saturation:
    """Applies rewrites until all ``pairs`` are equal, nothing is learnt or a limit is reached."""

    graph: EGraph
    rewrites: Sequence[Rewrite]
    limits: Limits
    pairs: Sequence[_Pair]

    def run(self) -> None:
        self._deadline = time.monotonic() + self.limits.seconds
        self._done: set[tuple[object, ...]] = set()
        growing = [len(one.target) > len(one.source) for one in self.rewrites]
        grown = 0
        for _ in range(self.limits.rounds):
            if self._over() or _equal(self.graph, self.pairs):
                return
            if not self._round([not grows for grows in growing]):
                if grown == _GROWTH or not self._round(growing):
                    return
                grown += 1

    def _over(self) -> bool:
        return len(self.graph) >= self.limits.nodes or self._spent()

    def _spent(self) -> bool:
        return self.graph.work >= self.limits.work or time.monotonic() > self._deadline

    def _round(self, chosen: Sequence[bool]) -> bool:
        """Apply the chosen rewrites wherever they match what there is; whether anything was learnt."""
        learnt, found = False, []
        for place, one in enumerate(self.rewrites):
            if chosen[place] and not self._spent():
                found += [(place, match) for match in islice(one.matches(self.graph), self.limits.nodes)]
        for place, match in found:
            key = (place, *(self.graph.find(each) for each in match.classes.values()), *match.sizes.values())
            if key not in self._done and len(self.graph) < self.limits.nodes:
                self._done.add(key)
                learnt |= self.rewrites[place].build(self.graph, match)
        self.graph.rebuild()
        return learnt
