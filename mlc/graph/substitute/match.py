"""The rules of a search, restricted to where a rewrite reduces the work at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from operator import le, lt
from typing import Any

from mlc.graph.substitute.rule_benefit import DOUBTFUL, Benefit, benefits_of
from mlc.operators import OPERATORS
from mlc.operators.index import Poly, as_poly
from mlc.sizes import usual_size
from mlc.substitution.compose import compose
from mlc.substitution.egraph import EGraph
from mlc.substitution.graph import Graph, Ref
from mlc.substitution.rewrite import Match, Rewrite
from mlc.substitution.rule import Rule

__all__ = ["Pattern", "repeated"]


class Pattern(Rewrite):
    """A rewrite that matches only where it is of use."""

    def __init__(self, rule: Rule, *, turned: bool = False) -> None:
        super().__init__(rule, turned=turned)
        rule = self.rule
        #: what must be constant for it to be of use, and what is gained then
        self.benefits = benefits_of(rule)
        self.benefit = min(self.benefits.values(), default=Benefit.NONE)
        self._constant = frozenset.intersection(*self.benefits) if self.benefits else frozenset[str]()
        #: the inputs that the target joins with each other
        self._pairs = [(a, b) for node in rule.target.nodes if node.op == "concat"
                       for a, b in (node.inputs,) if isinstance(a, str) and isinstance(b, str)]
        #: whether it undoes slices and concatenations by themselves: then it is for constants as well
        self._undoes = len(rule.target.nodes) < len(rule.source.nodes) and all(
            node.op in ("slice", "concat") for node in rule.source.nodes)
        #: the inputs that the source joins
        self._parts = [ref for node in rule.source.nodes if node.op == "concat" for ref in node.inputs
                       if isinstance(ref, str)]
        #: the inputs that all outputs read directly
        self.shared = tuple(
            name for name in rule.source.inputs
            if all(not isinstance(o, str) and name in self.source[o[0]].inputs for o in rule.source.outputs)
        )

    def matches(self, graph: EGraph) -> Iterator[Match]:
        return (match for match in super().matches(graph) if self._useful(graph, match))

    def _admits(self, graph: EGraph, ref: Ref, each: int) -> bool:
        if isinstance(ref, str):
            return ref not in self._constant or graph.constant[each]
        return self._undoes or not graph.constant[each]

    def _useful(self, graph: EGraph, match: Match) -> bool:
        """Whether enough is constant, and the target neither joins a tensor with itself nor says what is known."""
        if any(match.classes[a] == match.classes[b] and not graph.constant[match.classes[a]] for a, b in self._pairs):
            return False
        if self.benefits.get(frozenset(), Benefit.NONE) not in (*DOUBTFUL, Benefit.NONE):
            return True
        constant = {name for name in self.rule.source.inputs if graph.constant[graph.find(match.classes[name])]}
        benefit = min((each for names, each in self.benefits.items() if names <= constant), default=Benefit.NONE)
        if benefit is Benefit.CHEAPER:
            return self._multiplied(match, lt)
        if benefit is Benefit.APART:
            return any(repeated(graph, match.classes[part]) for part in self._parts)
        if benefit is Benefit.NONE or self._known(graph, match, constant):
            return False
        # one product for another is of use if it is no larger; one for two is for extraction to judge
        return benefit is Benefit.JOIN or not self._work or self._multiplied(match, le)

    def folding(self, graph: EGraph, match: Match) -> bool:
        """Whether constants are what makes a match of use."""
        if self.benefits.get(frozenset(), Benefit.NONE) not in (*DOUBTFUL, Benefit.NONE):
            return False
        constant = {name for name in self.rule.source.inputs if graph.constant[graph.find(match.classes[name])]}
        return any(names and names <= constant for names in self.benefits)

    def _multiplied(self, match: Match, holds: Callable[[Any, Any], bool]) -> bool:
        """Whether something holds of the numbers of multiplications, the target's and the source's."""
        assert self._work is not None
        usual = {name: usual_size(size) for name, size in match.sizes.items()}
        return bool(holds(self._work[1].evaluate(usual), self._work[0].evaluate(usual)))

    def _known(self, graph: EGraph, match: Match, constant: set[str]) -> bool:
        """Whether the class has the target's operator over the same operands of run time already."""
        for output, source in zip(self.rule.target.outputs, self.rule.source.outputs, strict=True):
            node = self.target[output[0]] if not isinstance(output, str) else None
            if node is None:
                return False
            left = {match.classes[ref] if isinstance(ref, str) else None for ref in node.inputs
                    if self._left(ref, constant)}
            each = graph.find(match.classes[source])
            if None in left or not any(
                known.op == node.op and {i for i in map(graph.find, known.inputs) if not graph.constant[i]} == left
                for known in graph.nodes[each]
            ):
                return False
        return True

    def _left(self, ref: Ref, constant: set[str]) -> bool:
        """Whether a term of the target is left at run time."""
        if isinstance(ref, str):
            return ref not in constant
        return any(self._left(source, constant) for source in self.target[ref[0]].inputs)

    @cached_property
    def _work(self) -> tuple[Poly, Poly] | None:
        """The multiplications of both sides' products; None without products."""
        sides = [_multiplications(side, self.rule) for side in (self.rule.source, self.rule.target)]
        return (sides[0], sides[1]) if sides[0].terms or sides[1].terms else None


def repeated(graph: EGraph, each: int) -> bool:
    """Whether a class is what an ``expand`` has repeated, rows of a constant, or joined or viewed of such: what a
    product makes of each part is made once, or when the model is compiled."""
    seen, pending = set[int](), [each]
    while pending:
        found = graph.find(pending.pop())
        if found not in seen:
            seen.add(found)
            for node in graph.nodes[found]:
                if node.op == "expand" or (node.op == "gather" and graph.constant[graph.find(node.inputs[0])]):
                    return True
                if node.op in ("concat", "reshape"):
                    pending.extend(node.inputs)
    return False


def _multiplications(side: Graph, rule: Rule) -> Poly:
    """How many the products of a side take."""
    total = as_poly(0)
    for place, node in enumerate(side.nodes):
        products = OPERATORS[node.op].products
        if products is not None:
            (result, *operands), _ = compose(Graph(side.nodes, ((place, 0), *node.inputs)), rule.shapes)
            number = as_poly(products(*(operand.shape for operand in operands)))
            for size in result.shape:
                number = number * size
            total = total + number
    return total
