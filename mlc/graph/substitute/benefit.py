"""What is gained by a rule: from its two sides alone, whatever its name.

What counts is what is left at run time: operators that depend on constants alone are evaluated when the model is
compiled, and a reshape is another view of the same elements. So a rule may be of no use as it stands, and of use where
some of its inputs are constant: ``(x @ a) @ b --> x @ (a @ b)`` leaves one product of two if ``a`` and ``b`` are.

Searches take the rules in the order of their benefits. Those that leave fewer products come first, then those that take
a sum, a mean or a largest element before what else is done with it. They leave slices and concatenations behind, which
the next carry towards the outputs and the constants, and cancel; what only says the
same otherwise could go on without end.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import combinations

from mlc.operators import OPERATORS
from mlc.substitution.egraph import PRODUCTS
from mlc.substitution.graph import Graph, Ref
from mlc.substitution.rule import Rule

__all__ = ["Benefit", "benefit_of", "benefits_of"]


class Benefit(IntEnum):
    """``JOIN``: fewer products, of what they share if the rule has several outputs; ``SMALLER``: products or
    elementwise operators of what a reduction leaves that were of what it reads; ``SHORTER``: fewer operators, or slices
    taken later; ``NONE``: none of these. At run time, each."""

    JOIN = 0
    SMALLER = 1
    SHORTER = 2
    NONE = 3


def benefit_of(rule: Rule) -> Benefit:
    """The benefit whatever is constant, else the best that constants make of it."""
    return min(benefits_of(rule).values(), default=Benefit.NONE)


def benefits_of(rule: Rule) -> dict[frozenset[str], Benefit]:
    """The smallest sets of inputs that must be constant for a rule to be of use, with the benefit that it has then."""
    source, target = _Side(rule.source), _Side(rule.target)
    names = [name for name in rule.source.inputs if name in rule.shapes]
    found: dict[frozenset[str], Benefit] = {}
    for count in range(len(names)):
        for chosen in combinations(names, count):
            constant = frozenset(chosen)
            if not any(smaller <= constant for smaller in found):
                benefit = _benefit(source, target, constant)
                if benefit is not Benefit.NONE:
                    found[constant] = benefit
    return found


class _Side:
    """A side of a rule with what each of its operators depends on."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reads: list[frozenset[str]] = []
        for node in graph.nodes:
            self.reads.append(frozenset[str]().union(*map(self.of, node.inputs)))
        self.reduces = any(OPERATORS[node.op].reduction for node in graph.nodes)

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
        behind: list[bool] = []
        for node in self.graph.nodes:
            made = any(behind[ref[0]] for ref in node.inputs if not isinstance(ref, str))
            behind.append(made or OPERATORS[node.op].reduction)
        return sum(not behind[place] and (OPERATORS[self.graph.nodes[place].op].pointwise
                                          or OPERATORS[self.graph.nodes[place].op].product) for place in left)

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
    cuts_later = target.last(constant) == {"slice"} and "slice" not in source.last(constant)
    if len(after) < len(before) or (len(after) == len(before) and cuts_later):
        return Benefit.SHORTER if fewer == len(products) else Benefit.NONE
    return Benefit.NONE
