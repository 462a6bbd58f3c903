"""The facts about a rule's sizes wherever it applies: its conditions and the constraints of its source, solved.

Every step has a witness (:mod:`mlc.substitution.entailment`) and becomes part of the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlc.operators import OPERATORS, ShapeError
from mlc.operators.index import Condition, Mod, Poly, Symbol
from mlc.substitution.codec import RuleError, condition_text
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.entailment import Facts, quotients, without_remainders
from mlc.substitution.normal import Stuck, replaced
from mlc.substitution.quotients import resolve
from mlc.substitution.rule import Rule

__all__ = ["Assumptions", "assumed", "composed", "multiple", "plain", "settled", "solvable"]


@dataclass
class Assumptions:
    """The sizes of a rule with the equalities among its conditions solved, and what is then known.

    ``values`` replaces the symbols that were solved for; ``facts`` are polynomials of at least 0: first the sizes in
    alphabetical order, less 1, then what the steps add. ``steps`` says how it came about.
    """

    symbols: list[str]
    values: dict[str, Poly] = field(default_factory=dict)
    facts: list[Poly] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)

    def substitute(self, values: Mapping[str, Poly]) -> None:
        self.values = {n: p.substitute(values) for n, p in self.values.items()} | dict(values)
        self.facts = [p.substitute(values) for p in self.facts]


def assumed(rule: Rule) -> Assumptions:
    """What holds of the sizes wherever the rule applies: its conditions and the demands of its source, solved one after
    the other. Raises :class:`RuleError` for a rule that means nothing and :class:`Stuck` for too many conditions."""
    _check_structure(rule)
    symbols = list(rule.symbols)
    given = Assumptions(symbols, facts=[Poly.symbol(s) - 1 for s in symbols])
    fresh = 0
    for _ in range(60):
        solved = with_sizes(rule, given.values)
        conditions = [*solved.conditions, *composed(solved)[1]]
        for place, condition in enumerate(conditions):
            poly, divisions = settled(condition.poly, Facts(given.facts))
            if poly.constant is not None:
                if not Condition(poly, condition.relation).evaluate({}):
                    raise RuleError(f"rule {rule.name}: no sizes are admitted, since "
                                    f"{condition_text(condition)} never holds")
                continue
            if condition.relation != "==":
                continue
            divided = multiple(condition.poly)
            if divided is not None and Facts(given.facts).entails(divided[1] - 1) is not None:
                name, divisor = divided
                whole = f"{name}_{fresh}"
                while whole in symbols:
                    whole += "_"
                fresh += 1
                witness = Facts(given.facts).entails(divisor - 1)
                given.steps.append(["multiple", place, name, str(divisor), whole, plain(witness)])
                given.substitute({name: divisor * Poly.symbol(whole)})
                given.facts.append(Poly.symbol(whole) - 1)
                break
            found = solvable(poly)
            if found is not None:
                given.steps.append(["equal", place, found[0], str(found[1]), divisions])
                given.substitute({found[0]: found[1]})
                break
        else:
            _keep_unsolved(rule, conditions, given)
            return given
    raise Stuck("the conditions are too many to be solved")


def _keep_unsolved(rule: Rule, conditions: list[Condition], given: Assumptions) -> None:
    """What was not solved becomes facts."""
    for place, condition in enumerate(conditions):
        poly, divisions = settled(condition.poly, Facts(given.facts))
        if poly.constant is None:
            given.steps.append(["fact", place, divisions])
            given.facts += [poly] if condition.relation == ">=" else [poly, -poly]
    if Facts(given.facts).contradictory() is not None:
        raise RuleError(f"rule {rule.name}: its conditions exclude each other: no sizes are admitted")


def composed(solved: Rule) -> Any:
    """The outputs of a rule's source as tensors, and its demands; raises :class:`RuleError` where it is ill-formed."""
    try:
        return compose(solved.source, solved.shapes)
    except ShapeError as error:
        raise RuleError(f"rule {solved.name}: its source is ill-formed: {error}") from error


def settled(poly: Poly, facts: Facts) -> tuple[Poly, list[Any]]:
    """The polynomial without remainders and without the quotients that facts resolve, with the steps."""
    poly, steps, progress = without_remainders(poly), [], True
    while progress:
        progress = False
        for quotient in quotients([poly]):
            found = resolve(quotient, facts)
            if found is not None:
                by, low, high = found
                steps.append([str(Poly.atom(quotient)), str(by), plain(low), plain(high)])
                poly, progress = replaced(poly, quotient, by), True
                break
    return poly, steps


def _check_structure(rule: Rule) -> None:
    """Refuses what is wrong whatever the sizes are."""
    def refuse(reason: str) -> None:
        raise RuleError(f"rule {rule.name}: {reason}")

    if any(s[0] in "$@" for s in rule.symbols):
        refuse("the names of sizes begin with letters")
    for side, graph in (("source", rule.source), ("target", rule.target)):
        known = {*rule.shapes, *((k, 0) for k in range(len(graph.nodes)))}
        for place, node in enumerate(graph.nodes):
            found = OPERATORS.get(node.op)
            if found is None:
                refuse(f"no operator is named {node.op}; there are {', '.join(sorted(OPERATORS))}")
                continue
            if len(node.inputs) != found.arity:
                refuse(f"{node.op} takes {found.arity} inputs, but got {len(node.inputs)} in the {side}")
            odd = sorted(set(node.attributes) - set(found.defaults))
            if odd:
                refuse(f"{node.op} has the attributes {sorted(found.defaults)}, but got {odd}")
            unbound = sorted(_attribute_symbols(node.attributes) - set(rule.symbols))
            if unbound:
                refuse(f"the size {unbound[0]} of {node.op} is unbound")
            for ref in node.inputs:
                if ref not in known or (isinstance(ref, tuple) and ref[0] >= place):
                    refuse(f"the variable {ref} of {node.op} is unbound in the {side}")
        for ref in graph.outputs:
            if ref not in known:
                refuse(f"the output {ref} of the {side} is unbound")
    unread = sorted(set(rule.target.inputs) - set(rule.source.inputs))
    if unread:
        refuse(f"the variable {unread[0]} of the target is unbound: the source does not read it")
    if any(c.poly.symbols - set(rule.symbols) for c in rule.conditions):
        refuse("a condition has a size that is unbound")


def _attribute_symbols(attributes: Mapping[str, Any]) -> set[str]:
    """The size symbols in attributes."""
    def of(value: Any) -> set[str]:
        if isinstance(value, Poly):
            return set(value.symbols)
        return set().union(*map(of, value)) if isinstance(value, tuple) else set()

    return set().union(*map(of, attributes.values()))


def plain(witness: Any) -> Any:
    """A witness as JSON: quotients as texts."""
    def ref(r: Any) -> Any:
        return [r[0], str(r[1]), *(plain(w) for w in r[2:])] if isinstance(r, list) else r

    return [[factor, [ref(r) for r in refs]] for factor, refs in witness]


def multiple(poly: Poly) -> tuple[str, Poly] | None:
    """``(s, d)`` if the polynomial says that ``d`` divides the size ``s``."""
    if len(poly.terms) != 1 or len(poly.terms[0][0]) != 1 or abs(poly.terms[0][1]) != 1:
        return None
    atom = poly.terms[0][0][0]
    if not isinstance(atom, Mod) or len(atom.numerator.terms) != 1:
        return None
    monomial, factor = atom.numerator.terms[0]
    if factor != 1 or len(monomial) != 1 or not isinstance(monomial[0], Symbol):
        return None
    name = monomial[0].name
    return None if name in atom.denominator.symbols else (name, atom.denominator)


def solvable(poly: Poly) -> tuple[str, Poly] | None:
    """A symbol that ``poly == 0`` determines, and its value; one whose value is plainly positive if possible."""
    options = []
    for monomial, factor in poly.terms:
        if len(monomial) != 1 or abs(factor) != 1 or not isinstance(monomial[0], Symbol):
            continue
        rest = poly - Poly({monomial: factor})
        if monomial[0].name not in rest.symbols:
            value = -rest if factor == 1 else rest
            options.append((any(c < 0 for _, c in value.terms), monomial[0].name, value))
    return min(options, key=lambda o: (o[0], len(o[2].terms), o[1]))[1:] if options else None
