"""An upper bound on what a search could gain, from the model's own graph, in a fraction of the time of a search.

Gains begin where a rule joins products, or takes a reduction before one; where another order of products is cheaper;
where a product is of what is repeated. What each pair of products that some rule could join would save if all else were
free, and all that leads from products to such a reduction, adds up to more than a search can find; where that is next
to nothing, there is nothing to search for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise

from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.match import Pattern, repeated
from mlc.graph.substitute.rule_benefit import Benefit
from mlc.graph.substitute.sums import shared
from mlc.operators.shapes import inferred
from mlc.operators.tensor import ShapeError
from mlc.substitution.egraph import PRODUCTS, EGraph, ENode
from mlc.substitution.graph import Ref, concrete
from mlc.substitution.rewrite import Match, relevant
from mlc.substitution.terms import TermGraph, freeze

__all__ = ["gain_bound"]

#: matches of a rule that are looked at; a model with more has enough to search for
_MATCHES = 500
#: what is saved around joined products besides, as part of what joining saves, and for each of them in calls of kernels
_AROUND, _EACH = 0.5, 2


def gain_bound(graph: TermGraph, patterns: Sequence[Pattern], costs: Costs) -> float:
    """The part of the graph's estimated time, from above, that joining its products or computing less of them could
    save; 0 where no rule can."""
    found = relevant(patterns, graph.operators())
    bound = _Bound(graph, costs)
    return bound.part([p for p in found if p.benefit is Benefit.JOIN],
                      [p for p in found if p.benefit is Benefit.SMALLER],
                      [p for p in found if Benefit.CHEAPER in p.benefits.values()])


class _Bound:
    def __init__(self, graph: TermGraph, costs: Costs) -> None:
        self._graph, self._costs = graph, costs
        self._egraph, self._classes = EGraph.of(graph)
        self._constant = {each for each in self._egraph.nodes if self._egraph.constant[each]}

    def part(self, patterns: Sequence[Pattern], earlier: Sequence[Pattern] = (),
             orders: Sequence[Pattern] = ()) -> float:
        """The bounds of rules that join products, that reduce or repeat something else, and that reassociate products.
        """
        best: dict[int, float] = {}
        group: dict[int, int] = {}
        for pattern in patterns:
            for match in islice(pattern.matches(self._egraph), _MATCHES):
                products = self._products(pattern, match)
                gain = self._gain(pattern, match) if products else 0.0
                if gain > 0.0:
                    for each in products:
                        best[each] = max(gain, best.get(each, 0.0))
                    _unite(group, products)
        sizes: dict[int, int] = {}
        for each in best:
            sizes[_root(group, each)] = sizes.get(_root(group, each), 0) + 1
        saved = sum(gain * (1.0 - 1.0 / sizes[_root(group, each)]) for each, gain in best.items())
        saved += self._sums() + self._reduced(earlier) + self._ordered(orders) + self._repeated() + self._looked_up()
        total = self._total()
        return saved / total if total else 0.0

    def _sums(self) -> float:
        """The gain if the terms of a sum that are computed from the same tensor became the longest of them."""
        saved = 0.0
        for group in shared(self._graph):
            seconds = [self._own(self._classes[place]) for place in group]
            saved += sum(sorted(seconds)[:-1]) * (1.0 + _AROUND) + _EACH * self._costs.call_seconds * (len(group) - 1)
        return saved

    def _reduced(self, patterns: Sequence[Pattern]) -> float:
        """The gain if products, and everything after them up to reductions that may move earlier, were free."""
        graph, nearest = self._egraph, set[int]()
        pending = [graph.find(match.classes[output]) for pattern in patterns
                   for match in islice(pattern.matches(graph), _MATCHES) for output in pattern.rule.source.outputs]
        while pending:
            each = pending.pop()
            if each in nearest or each in self._constant:
                continue
            nearest.add(each)
            node = next(iter(graph.nodes[each]))
            if node.op not in PRODUCTS:
                pending.extend(map(graph.find, node.inputs))
        return sum(self._own(each) for each in nearest) * (1.0 + _AROUND)

    def _ordered(self, patterns: Sequence[Pattern]) -> float:
        """The gain if each product of products took the cheapest order that is one step away; twice that if others are
        further away."""
        best: dict[int, float] = {}
        for pattern in patterns:
            for match in islice(pattern.matches(self._egraph), _MATCHES):
                gain = self._gain(pattern, match)
                for output in pattern.rule.source.outputs:
                    each = self._egraph.find(match.classes[output])
                    best[each] = max(gain, best.get(each, 0.0))
        return 2.0 * sum(best.values())

    def _repeated(self) -> float:
        """The gain if products of repeated operands were free."""
        if not any(node.op in ("expand", "gather") for nodes in self._egraph.nodes.values() for node in nodes):
            return 0.0
        return sum(self._own(each) for each, nodes in self._egraph.nodes.items() for node in nodes
                   if node.op in PRODUCTS and any(repeated(self._egraph, i) for i in node.inputs)) * (1.0 + _AROUND)

    def _looked_up(self) -> float:
        """The gain if everything that is computed row by row from gathered rows of constants were free."""
        rows: dict[int, bool] = {}
        for each in self._classes:  # operands first
            each = self._egraph.find(each)
            node = next(iter(self._egraph.nodes[each]))
            inputs = [i for i in map(self._egraph.find, node.inputs) if i not in self._constant]
            if node.op == "gather":
                rows[each] = self._egraph.find(node.inputs[0]) in self._constant
            elif each not in self._constant:
                alone = not node.leaf and (len(inputs) == 1 or node.op == "concat")
                rows[each] = alone and all(rows[i] for i in inputs)
        taken = (each for each, alone in rows.items() if alone)
        return sum(self._own(each) for each in taken
                   if next(iter(self._egraph.nodes[each])).op != "gather") * (1.0 + _AROUND)

    def _own(self, each: int) -> float:
        """Seconds of what makes a class, as a kernel of its own."""
        node = next(iter(self._egraph.nodes[each]))
        cost = self._costs.of(node, self._egraph.shapes[each], self._egraph.shapes, self._constant)
        return cost.seconds + cost.alone

    def _products(self, pattern: Pattern, match: Match) -> list[int]:
        """The products that would be joined, empty where they cannot be: one is computed from another."""
        graph = self._egraph
        found = [graph.find(match.classes[place, 0]) for place, n in enumerate(pattern.source) if n.op in PRODUCTS]
        members = [graph.members[each] for each in found]
        if not all(members) or (pattern.joins and any(a >= b for a, b in pairwise(members))):
            return []
        below = [graph.below[each] for each in found]
        needed = any(b & m for i, b in enumerate(below) for j, m in enumerate(members) if i != j)
        return [] if needed or len(set(found)) < len(found) else found

    def _gain(self, pattern: Pattern, match: Match) -> float:
        """The gain of a match if slices, concatenations and all else that it adds were free."""
        graph = self._egraph
        before = 0.0
        for place, wanted in enumerate(pattern.source):
            each = graph.find(match.classes[place, 0])
            node = next(n for n in graph.nodes[each] if n.op == wanted.op)
            cost = self._costs.of(node, graph.shapes[each], graph.shapes,
                                  self._constant)
            before += cost.seconds + cost.alone
        try:
            after = self._target(pattern, match)
        except ShapeError:
            return 0.0  # a precondition that says too little: nothing is concluded
        saved = before - after
        return saved * (1.0 + _AROUND) + _EACH * self._costs.call_seconds if saved > 0.0 else 0.0

    def _target(self, pattern: Pattern, match: Match) -> float:
        """Seconds of the products that a match brings."""
        graph, total = self._egraph, 0.0
        made: dict[Ref, int] = {ref: graph.find(each) for ref, each in match.classes.items() if isinstance(ref, str)}
        shapes = {each: graph.shapes[each] for each in made.values()}
        constant = {each for each in made.values() if graph.constant[each]}
        for place, node in enumerate(pattern.target):
            inputs = tuple(made[ref] for ref in node.inputs)
            attributes = freeze(**{k: concrete(v, match.sizes) for k, v in node.attributes.items()})
            sizes = inferred(node.op, tuple(shapes[i] for i in inputs), dict(attributes))
            made[place, 0] = each = -1 - place
            shapes[each] = sizes
            if all(i in constant for i in inputs):
                constant.add(each)
            elif node.op in PRODUCTS:
                total += self._costs.of(ENode(node.op, inputs, attributes), shapes[each], shapes, constant).seconds
        return total

    def _total(self) -> float:
        """The graph's time as extraction adds it up."""
        graph, constant = self._egraph, self._constant
        total, fusable = 0.0, set[int]()
        for each, nodes in graph.nodes.items():
            node = next(iter(nodes))
            if each in constant:
                continue
            cost = self._costs.of(node, graph.shapes[each], graph.shapes,
                                  constant)
            total += cost.seconds + (0.0 if fusable & {graph.find(i) for i in node.inputs} else cost.alone)
            if cost.fusable:
                fusable.add(each)
        return total


def _root(group: Mapping[int, int], each: int) -> int:
    while group.get(each, each) != each:
        each = group[each]
    return each


def _unite(group: dict[int, int], members: Sequence[int]) -> None:
    first = _root(group, members[0])
    for each in members[1:]:
        group[_root(group, each)] = first
