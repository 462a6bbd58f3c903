"""The rules that compiling applies: those of the library that can be, in both directions where a rule has two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from mlc.graph.substitute.kinds import Kind, Place, kind_of, present, widened
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.terms import TermGraph
from mlc.operators.index import Poly, as_poly
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules

__all__ = ["patterns", "relevant", "shipped_patterns"]


@cache
def shipped_patterns() -> tuple[Pattern, ...]:
    """The rules of the library."""
    return patterns(shipped_rules())


def patterns(rules: Iterable[Rule]) -> tuple[Pattern, ...]:
    """Rules with a certificate, both ways where they are; those that leave fewer products first."""
    found = [Pattern(rule, turned=turned) for rule in rules if rule.certificate is not None
             for turned in _directions(rule)]
    return tuple(sorted(found, key=lambda pattern: pattern.kind))


def relevant(rules: Sequence[Pattern], graph: TermGraph, offered: Iterable[Place] = ()) -> list[Pattern]:
    """The rules that can apply to a graph or to what others of them make of it, by operators and ranks. ``offered``
    are operators that the graph lacks and that will be put up."""
    known, found = present(graph) | widened(offered), list[bool]([False] * len(rules))
    changed = True
    while changed:
        changed = False
        for place, rule in enumerate(rules):
            if not found[place] and rule.needs <= known:
                found[place] = changed = True
                known |= widened(rule.brings)
    return [rule for place, rule in enumerate(rules) if found[place]]


def _directions(rule: Rule) -> Iterable[bool]:
    """Whether it is turned, for each direction in which it is applied."""
    if _applies(rule):
        yield False
    if rule.two_way and _applies(replace(rule, source=rule.target, target=rule.source)):
        yield True


def _grows(rule: Rule) -> bool:
    """Whether a rule of one output makes more of less, at run time too: without end, so that it would use up the nodes
    of others."""
    more = len(rule.source.outputs) == 1 and len(rule.target.nodes) > len(rule.source.nodes)
    return more and kind_of(rule) is Kind.OTHER


def _applies(rule: Rule) -> bool:
    """Whether the source says all that the target needs, is no smaller, and has operators' results for outputs."""
    operators = not any(isinstance(output, str) for output in rule.source.outputs)
    if not operators or not set(rule.target.inputs) <= set(rule.source.inputs) or _grows(rule):
        return False
    known = {s for name in rule.source.inputs for size in rule.shapes[name] for s in as_poly(size).symbols}
    known |= _symbols([*(v for node in rule.source.nodes for v in node.attributes.values())])
    wanted = _symbols([*(v for node in rule.target.nodes for v in node.attributes.values())])
    return wanted <= known and all(condition.poly.symbols <= known for condition in rule.conditions)


def _symbols(value: object) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _symbols(v)} if isinstance(value, tuple | list) else set()
