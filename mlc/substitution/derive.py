"""Whether rules follow from others by equality saturation: both sides in one e-graph at concrete generic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlc.operators.index import as_poly
from mlc.substitution.egraph import EGraph, Limits, Term
from mlc.substitution.fingerprint import assignments, concrete
from mlc.substitution.graph import Graph
from mlc.substitution.rule import Rule

__all__ = ["derivable", "kinds_of"]

#: limits of one saturation; what needs more counts as not derived
LIMITS = Limits(iterations=9, nodes=12_000, seconds=3.0, grow=4)


#: an operator with its axis and a rank of the rule's inputs: what must be met for a rule to match at all
Kind = tuple[str, str, int]


def kinds_of(rule: Rule, *sides: Graph) -> frozenset[Kind]:
    """The kinds of the operators of sides (both); where a reshape changes ranks, each at the rank that it is met at."""
    if any(node.op == "reshape" for side in sides or (rule.source, rule.target) for node in side.nodes):
        return frozenset(kind for side in sides or (rule.source, rule.target) for kind in _ranked(rule, side))
    ranks = {len(shape) for shape in rule.shapes.values() if shape}
    return frozenset((node.op, str(node.attributes.get("axis", "")), rank) for rank in ranks
                     for side in sides or (rule.source, rule.target) for node in side.nodes)


def _ranked(rule: Rule, side: Graph) -> Iterator[Kind]:
    ranks: dict[Any, int] = {name: len(shape) for name, shape in rule.shapes.items()}
    for place, node in enumerate(side.nodes):
        rank = max((ranks[ref] for ref in node.inputs), default=0)
        yield node.op, str(node.attributes.get("axis", "")), rank
        shape = node.attributes.get("shape")
        ranks[place, 0] = len(shape) if isinstance(shape, tuple) else rank


def derivable(rules: Sequence[Rule], candidates: Sequence[Rule], limits: Limits = LIMITS,
              sizes: Sequence[Mapping[str, int] | None] | None = None) -> list[bool]:
    """For each candidate, whether its sides become equal under ``rules``; candidates share no inputs.

    ``sizes`` are those to look at; left out, they are drawn so that the precondition holds and sizes differ.
    """
    used = frozenset[Kind]().union(*map(kinds_of, candidates))
    # rules with several outputs only bring together what is apart: sliced, both sides show the same without them
    rules = [rule for rule in rules if len(rule.source.outputs) == 1]
    # a rule that needs an operator which nothing can introduce matches nothing
    reachable = _reachable(used, rules)
    graph = EGraph(rule for rule in rules if _fits(rule, reachable))
    sides: list[tuple[list[Term], list[Term]] | None] = []
    for place, rule in enumerate(candidates):
        given = sizes[place] if sizes else next(assignments(rule, 1, largest=7), None)
        sides.append(None if given is None else _add(graph, rule, given, f"{place}."))
    graph.run(limits)
    return [both is not None and all(map(graph.equal, *both)) for both in sides]


def _reachable(used: frozenset[Kind], rules: Sequence[Rule]) -> frozenset[Kind]:
    while True:
        more = used.union(*(kinds_of(rule) for rule in rules if _fits(rule, used)))
        if more == used:
            return used
        used = more


def _fits(rule: Rule, used: frozenset[Kind]) -> bool:
    """Whether all operators of a side are there, at the rule's ranks."""
    return any(kinds_of(rule, side) <= used for side in (rule.source, rule.target) if side.nodes)


def _add(graph: EGraph, rule: Rule, sizes: Mapping[str, int], prefix: str) -> tuple[list[Term], list[Term]]:
    inputs = {name: graph.add_input(prefix + name, tuple(int(s.evaluate(sizes)) for s in map(as_poly, shape)))
              for name, shape in rule.shapes.items()}
    return _terms(graph, rule.source, inputs, sizes), _terms(graph, rule.target, inputs, sizes)


def _terms(graph: EGraph, side: Graph, inputs: Mapping[str, Term], sizes: Mapping[str, int]) -> list[Term]:
    known: dict[Any, Term] = dict(inputs)
    for place, node in enumerate(side.nodes):
        attributes = {name: concrete(value, sizes) for name, value in node.attributes.items()}
        known[place, 0] = graph.add(node.op, [known[ref] for ref in node.inputs], attributes)
    return [known[ref] for ref in side.outputs]
