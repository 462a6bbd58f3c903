"""The rules that compiling applies: those of the library that can be, in both directions where a rule has two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from mlc.graph.substitute.egraph import PRODUCTS
from mlc.graph.substitute.match import Pattern
from mlc.substitution.library import library
from mlc.substitution.rule import Rule

__all__ = ["patterns", "shipped_patterns"]


@cache
def shipped_patterns() -> tuple[Pattern, ...]:
    """The rules of the library."""
    return patterns(library())


def patterns(rules: Iterable[Rule]) -> tuple[Pattern, ...]:
    """Rules with a certificate, both ways where they are; those about products first, since they save most."""
    found = [each for rule in rules if rule.certificate is not None for each in _directions(rule)]
    found.sort(key=lambda rule: not any(node.op in PRODUCTS for node in rule.source.nodes))
    return tuple(Pattern(rule) for rule in found)


def _directions(rule: Rule) -> Iterable[Rule]:
    if _applies(rule):
        yield rule
    turned = replace(rule, name=f"{rule.name} turned", source=rule.target, target=rule.source)
    if rule.two_way and _applies(turned):
        yield turned


def _applies(rule: Rule) -> bool:
    """Whether the target reads nothing that the source does not, and every source output is an operator's result."""
    operators = not any(isinstance(output, str) for output in rule.source.outputs)
    return operators and set(rule.target.inputs) <= set(rule.source.inputs)
