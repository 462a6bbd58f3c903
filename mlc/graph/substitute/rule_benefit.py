"""The benefit of a rule, from its two sides alone.

What counts is what is left at run time: operators that depend on constants alone are evaluated when the model is
compiled, and a reshape is another view of the same elements. So a rule may be of no use as it stands, and of use where
some of its inputs are constant: ``(x @ a) @ b --> x @ (a @ b)`` leaves one product of two if ``a`` and ``b`` are.

Searches take the rules in the order of their benefits. Those that leave fewer products come first, then those that take
a sum, a mean or a largest element before what else is done with it, or repeat what was computed once; those whose
products are fewer multiplications at the sizes at hand, as another order of three may be; and those that take apart
what is repeated and what is not, so that a product of it can be computed once. They leave slices and concatenations
behind, which the next carry towards the outputs and the constants, and cancel; what only says the same otherwise could
go on without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

from mlc.operators import OPERATORS
from mlc.substitution.egraph import PRODUCTS
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.rule import Rule

__all__ = ["DOUBTFUL", "Benefit", "benefit_of", "benefits_of"]


#: of a side, the operators with what they read, and the outputs
_Operators: TypeAlias = "tuple[tuple[tuple[str, tuple[Ref, ...]], ...], tuple[Ref, ...]]"


class Benefit(IntEnum):
    """``JOIN``: fewer products, of what they share if the rule has several outputs; ``SMALLER``: products or
    elementwise operators of what a reduction leaves that were of what it reads, or operators of what is not yet
    repeated; ``CHEAPER``: as many products, or more that correct what one computes otherwise, which may be fewer
    multiplications, as sizes say; ``APART``: a product or a reshape of each part of a concatenation, of use where a
    part is repeated; ``SHORTER``: fewer operators, or slices taken later, or indices viewed
    and not rows; ``NONE``: none of these. At run time, each.
    """

    JOIN = 0
    SMALLER = 1
    CHEAPER = 2
    APART = 3
    SHORTER = 4
    NONE = 5


def benefit_of(rule: Rule) -> Benefit:
    """The benefit whatever is constant, else the best that constants make of it."""
    return min(benefits_of(rule).values(), default=Benefit.NONE)


def benefits_of(rule: Rule) -> dict[frozenset[str], Benefit]:
    """The smallest sets of inputs that must be constant for a rule to be of use, with the benefit that it has then."""
    names = tuple(name for name in rule.source.inputs if name in rule.shapes)
    return dict(_benefits(_operators(rule.source), _operators(rule.target), names))


def _operators(side: Graph) -> _Operators:
    return tuple((node.op, node.inputs) for node in side.nodes), side.outputs


@lru_cache(maxsize=1 << 12)
def _benefits(before: _Operators, after: _Operators, names: Sequence[str]) -> Mapping[frozenset[str], Benefit]:
    """Cached by the operators of both sides, since a rule has the same benefit at every rank."""
    source, target = (_Side(Graph(tuple(Node(op, inputs) for op, inputs in nodes), outputs))
                      for nodes, outputs in (before, after))
    found: dict[frozenset[str], Benefit] = {}
    for count in range(len(names)):
        for chosen in combinations(names, count):
            constant = frozenset(chosen)
            # what sizes or neighbours decide may not be had, and constants are then of use nonetheless
            if not any(smaller <= constant and each not in DOUBTFUL for smaller, each in found.items()):
                benefit = _benefit(source, target, constant)
                if benefit is not Benefit.NONE and benefit not in (each for n, each in found.items() if n <= constant):
                    found[constant] = benefit
    return found


_WINDOWS = "avg_pool2d"
#: the benefits of a rule that not every match has
DOUBTFUL = (Benefit.CHEAPER, Benefit.APART)


class _Side:
    """A side of a rule with what each of its operators depends on."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reads: list[frozenset[str]] = []
        for node in graph.nodes:
            self.reads.append(frozenset[str]().union(*map(self.of, node.inputs)))
        self.reduces = any(_reduces(node.op) for node in graph.nodes)

    def of(self, ref: Ref) -> frozenset[str]:
        return frozenset((ref,)) if isinstance(ref, str) else self.reads[ref[0]]

    def left(self, constant: frozenset[str]) -> list[int]:
        """The places of the operators that are left at run time."""
        return [place for place, reads in enumerate(self.reads)
                if reads - constant and self.graph.nodes[place].op != "reshape"]

    def products(self, left: Iterable[int]) -> list[int]:
        return [place for place in left if self.graph.nodes[place].op in PRODUCTS]

    def before_reductions(self, left: Iterable[int]) -> int:
        """How many of the operators that compute something compute it of what no reduction has made smaller."""
        behind = self._behind(_reduces)
        return sum(not behind[place] and _computes(self.graph.nodes[place].op) for place in left)

    def of_repeated(self) -> int:
        """How many of the operators, reshapes among them, read what was repeated."""
        behind = self._behind(lambda op: op == "expand")
        return sum(behind) - sum(node.op == "expand" for node in self.graph.nodes)

    def _behind(self, holds: Callable[[str], bool]) -> list[bool]:
        """For each operator, whether something holds for it or for one that it is computed from."""
        found: list[bool] = []
        for node in self.graph.nodes:
            found.append(holds(node.op) or any(found[ref[0]] for ref in node.inputs if not isinstance(ref, str)))
        return found

    def count(self, op: str) -> int:
        """How often an operator is there."""
        return sum(node.op == op for node in self.graph.nodes)

    def last(self, constant: frozenset[str]) -> set[str]:
        """The operators of the outputs; empty for one that is no operator at run time."""
        return {
            "" if isinstance(o, str) or not self.of(o) - constant else self.graph.nodes[o[0]].op
            for o in self.graph.outputs
        }


def _benefit(source: _Side, target: _Side, constant: frozenset[str]) -> Benefit:
    if not all(side.of(output) - constant for side in (source, target) for output in side.graph.outputs):
        return Benefit.NONE
    before, after = source.left(constant), target.left(constant)
    products, fewer = source.products(before), len(target.products(after))
    if fewer < len(products):
        operands = [set(source.graph.nodes[place].inputs) for place in products]
        shared = len(source.graph.outputs) == 1 or set.intersection(*operands)
        return Benefit.JOIN if shared else Benefit.NONE
    if fewer == len(products) and len(after) <= len(before) and target.reduces and (
            target.before_reductions(after) < source.before_reductions(before)):
        return Benefit.SMALLER
    if fewer == len(products) and len(after) <= len(before) and target.of_repeated() < source.of_repeated():
        return Benefit.SMALLER
    if 1 < fewer == len(products) and len(after) <= len(before) and all(
            _computes(node.op) for side in (source, target) for node in side.graph.nodes):
        return Benefit.CHEAPER
    if 0 < fewer == len(products) and len(after) <= len(before) and source.count(_WINDOWS):
        return Benefit.CHEAPER
    if _corrects(source, target):
        return Benefit.CHEAPER
    if _taken_apart(source, target):
        return Benefit.APART
    cuts_later = target.last(constant) == {"slice"} and "slice" not in source.last(constant)
    views_earlier = _viewed(source.graph) and not _viewed(target.graph)
    if len(after) < len(before) or (len(after) == len(before) and (cuts_later or views_earlier)):
        return Benefit.SHORTER if fewer == len(products) else Benefit.NONE
    return Benefit.NONE


def _viewed(side: Graph) -> bool:
    """Whether rows that were gathered are viewed otherwise, not the indices: what is done with them next no longer
    reads rows."""
    return any(node.op == "reshape" and not isinstance(ref, str) and side.nodes[ref[0]].op == "gather"
               for node in side.nodes for ref in node.inputs)


def _reduces(op: str) -> bool:
    """Whether an operator leaves less than it reads: means of windows seldom come at every place."""
    return OPERATORS[op].reduction or op == _WINDOWS


def _computes(op: str) -> bool:
    return OPERATORS[op].pointwise or OPERATORS[op].product


def _corrects(source: _Side, target: _Side) -> bool:
    """Whether the target joins what it computes otherwise with what it computes as the source does. Of one product
    alone nothing is multiplied less: what corrects it comes on top."""
    [(last, *_), (root, *_)] = (side.graph.outputs for side in (source, target))
    if isinstance(last, str) or isinstance(root, str) or target.graph.nodes[root[0]].op != "concat":
        return False
    op = source.graph.nodes[last[0]].op
    multiplies = len(source.graph.nodes) > 1 and any(OPERATORS[node.op].product for node in source.graph.nodes)
    return multiplies and op != "concat" and target.count("slice") > 0 and target.count(op) > 0


def _taken_apart(source: _Side, target: _Side) -> bool:
    """Whether one operator of a concatenation becomes one of each part: a product, whose sum is left, or a reshape."""
    if len(source.graph.nodes) != 2 or not source.count("concat"):
        return False
    op = source.graph.nodes[-1].op
    if target.count(op) != 2:
        return False
    return not target.count("concat") if OPERATORS[op].product else op == "reshape" and target.count("concat") == 1
