"""``prove(rule)``: a proof for every size that the rule admits, a counterexample, or neither with the reason.

Source and target are composed from the operators' specifications into the scalar expression of one output element at
symbolic indices, over symbolic sizes of at least 1. Their difference becomes a sum of guarded terms
(:mod:`mlc.substitution.normal`), which changes of variables, case splits and cancellations take to zero
(:mod:`mlc.substitution.goal_merge`); every side condition has a witness (:mod:`mlc.substitution.entailment`). The steps
with their witnesses are the certificate, bound to the rule by the hash of its content; :mod:`mlc.substitution.check`
plays them again on its own. Elements are real numbers: rounding is not modelled. That the target is defined wherever
the source is, is proved apart (:mod:`mlc.substitution.goal_defined`): every element that the target reads and every
partial function that it evaluates, for an element of the output, is one that the source reads or evaluates for it. A
tensor of which the target reads more has to be defined as a whole for the rule to be applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mlc.operators import OPERATORS, ShapeError
from mlc.operators.index import Condition, FloorDiv, Mod, Poly, Symbol
from mlc.operators.scalar import Read
from mlc.substitution.codec import RuleError, condition_text, content_hash
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.entailment import Facts, quotients, without_remainders
from mlc.substitution.goal import Goal, Stuck
from mlc.substitution.goal_defined import prove_defined
from mlc.substitution.goal_merge import prove_goal
from mlc.substitution.normal import Expander, replaced
from mlc.substitution.quotients import resolve
from mlc.substitution.rule import Rule

__all__ = ["Assumptions", "Proof", "Proved", "Refuted", "Undecided", "assumed", "certified", "prove"]

FORMAT = 2


@dataclass(frozen=True)
class Proved:
    """Source and target are equal; ``certificate`` is JSON. ``reversible``: the source is defined wherever the target
    is, so that it may replace the target too where both are well-formed."""

    certificate: Mapping[str, Any]

    @property
    def reversible(self) -> bool:
        return self.certificate["backward"] is not None


@dataclass(frozen=True)
class Refuted:
    """A counterexample: ``sizes`` by symbol, ``shapes`` and ``values`` of the inputs (nested lists; none if the target
    is ill-formed), and in ``reason`` what differs."""

    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Undecided:
    reason: str


Proof: TypeAlias = Proved | Refuted | Undecided


def prove(rule: Rule, refute: bool = True) -> Proof:
    """Decides a rule. Raises :class:`RuleError` for one that means nothing: unknown operators, wrong arity, unbound
    inputs, shapes that can never fit. ``refute=False`` looks for no counterexample."""
    try:
        return Proved(_Prover(rule).certificate())
    except Stuck as stuck:
        reason = str(stuck)
    if refute:
        from mlc.substitution.refute import find_counterexample

        found = find_counterexample(rule)
        if found is not None:
            return found
    return Undecided(reason)


def certified(rule: Rule) -> Rule:
    """The rule with its certificate; raises :class:`RuleError` with the reason if it cannot be proved."""
    proof = prove(rule)
    if isinstance(proof, Proved):
        return replace(rule, certificate=proof.certificate)
    verdict = "it is wrong" if isinstance(proof, Refuted) else "it is not proved"
    raise RuleError(f"rule {rule.name}: {verdict}: {proof.reason}")


def assumed(rule: Rule) -> Assumptions:
    """What holds of the sizes wherever the rule applies: its conditions and the demands of its source, solved."""
    return _Prover(rule)._assume(rule.source)


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


def _anywhere(tensor: Any, facts: Sequence[Poly]) -> tuple[Expander, list[str], tuple[Poly, ...], list[Poly]]:
    """An expander, and for an element at any place the variables, the indices, and the facts about them."""
    context = [f"@{k}" for k in range(tensor.rank)]
    indices = tuple(map(Poly.symbol, context))
    ranges = [p for i, s in zip(indices, tensor.shape, strict=True) for p in (i, without_remainders(s) - 1 - i)]
    return Expander(), context, indices, [*facts, *ranges]


class _Defined:
    """Proofs that one side's elements are defined where the other's are; ``whole`` are the tensors of which more
    elements are read, so that all of them have to be defined."""

    def __init__(self, facts: Sequence[Poly], whole: Sequence[str] = ()) -> None:
        self.facts, self.whole = facts, list(whole)

    def prove(self, one: Any, other: Any) -> dict[str, Any]:
        """The steps by tensor, those for partial functions under the empty name; raises :class:`Stuck` for these."""
        expander, context, indices, facts = _anywhere(one, self.facts)
        given, wanted = expander.demands(one[indices]), expander.demands(other[indices])
        proofs: dict[str, Any] = {}
        for group in sorted({_group(t) for t in wanted} - set(self.whole)):
            theirs, ours = (tuple(t for t in terms if _group(t) == group) for terms in (wanted, given))
            for tightens in (False, True):
                goal = Goal(expander, context, facts, theirs, ours, counts=False, tightens=tightens)
                try:
                    proofs[group] = prove_defined(goal)
                    break
                except Stuck:
                    if tightens and not group:
                        raise
            else:
                self.whole.append(group)
        return proofs


def _group(demand: Any) -> str:
    """The tensor that is read; empty for a function."""
    [atom] = demand.atoms
    return atom.tensor if isinstance(atom, Read) else ""


class _Prover:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.symbols = list(rule.symbols)
        _check_structure(rule)

    def certificate(self) -> dict[str, Any]:
        given = self._assume(self.rule.source)
        solved = with_sizes(self.rule, given.values)
        outputs, _ = self._composed(solved.source, solved.shapes)
        try:
            others, demands = compose(solved.target, solved.shapes)
        except ShapeError as error:
            raise Stuck(f"the target is ill-formed: {error}") from error
        shapes = self._demand(given.facts, demands, "the target may be ill-formed: {} must hold")
        if len(outputs) != len(others):
            raise RuleError(f"rule {self.rule.name}: both sides must have as many outputs, "
                            f"but got {len(outputs)} and {len(others)}")
        proofs: list[dict[str, Any]] = []
        elements = []
        for place, (one, other) in enumerate(zip(outputs, others, strict=True)):
            if one.rank != other.rank:
                raise Stuck(f"output {place} has rank {one.rank} in the source and {other.rank} in the target")
            equal = [Condition(a - b, "==") for a, b in zip(one.shape, other.shape, strict=True)]
            sizes = self._demand(given.facts, equal, "output shapes must be equal: {} must hold")
            expander, context, indices, facts = _anywhere(one, given.facts)
            left, right = expander.expand(one[indices]), expander.expand(other[indices])
            proofs.append({"shape": sizes, "steps": prove_goal(Goal(expander, context, facts, left, right))})
            elements.append((one, other))
        from mlc.substitution.refute import spoiling

        forward, backward = (_Defined(given.facts, sorted(names)) for names in spoiling(self.rule))
        for proof, (one, other) in zip(proofs, elements, strict=True):
            proof["defined"] = forward.prove(one, other)
        turned: list[dict[str, Any]] | None = None
        with suppress(Stuck):
            turned = [backward.prove(other, one) for one, other in elements]
        found = {"format": FORMAT, "rule": content_hash(self.rule), "assume": given.steps, "demands": shapes,
                 "outputs": proofs, "backward": turned,
                 "whole": {"forward": forward.whole, "backward": backward.whole if turned is not None else []}}
        return dict(json.loads(json.dumps(found)))

    def _composed(self, graph: Any, shapes: Any) -> Any:
        try:
            return compose(graph, shapes)
        except ShapeError as error:
            raise RuleError(f"rule {self.rule.name}: its source is ill-formed: {error}") from error

    def _assume(self, graph: Any) -> Assumptions:
        """Solves the conditions of the rule and the demands of a side, one after the other."""
        given = Assumptions(self.symbols, facts=[Poly.symbol(s) - 1 for s in self.symbols])
        fresh = 0
        for _ in range(60):
            solved = with_sizes(self.rule, given.values)
            side = solved.source if graph is self.rule.source else solved.target
            conditions = [*solved.conditions, *self._composed(side, solved.shapes)[1]]
            for place, condition in enumerate(conditions):
                poly, divisions = self._settled(condition.poly, Facts(given.facts))
                if poly.constant is not None:
                    if not Condition(poly, condition.relation).evaluate({}):
                        raise RuleError(f"rule {self.rule.name}: no sizes are admitted, since "
                                        f"{condition_text(condition)} never holds")
                    continue
                if condition.relation != "==":
                    continue
                multiple = _multiple(condition.poly)
                if multiple is not None and Facts(given.facts).entails(multiple[1] - 1) is not None:
                    name, divisor = multiple
                    whole = f"{name}_{fresh}"
                    while whole in self.symbols:
                        whole += "_"
                    fresh += 1
                    witness = Facts(given.facts).entails(divisor - 1)
                    given.steps.append(["multiple", place, name, str(divisor), whole, _plain(witness)])
                    given.substitute({name: divisor * Poly.symbol(whole)})
                    given.facts.append(Poly.symbol(whole) - 1)
                    break
                found = _solvable(poly)
                if found is not None:
                    given.steps.append(["equal", place, found[0], str(found[1]), divisions])
                    given.substitute({found[0]: found[1]})
                    break
            else:
                self._rest(conditions, given)
                return given
        raise Stuck("the conditions are too many to be solved")

    def _rest(self, conditions: list[Condition], given: Assumptions) -> None:
        """What was not solved becomes facts."""
        for place, condition in enumerate(conditions):
            poly, divisions = self._settled(condition.poly, Facts(given.facts))
            if poly.constant is None:
                given.steps.append(["fact", place, divisions])
                given.facts += [poly] if condition.relation == ">=" else [poly, -poly]
        if Facts(given.facts).contradictory() is not None:
            raise RuleError(f"rule {self.rule.name}: its conditions exclude each other: no sizes are admitted")

    @staticmethod
    def _settled(poly: Poly, facts: Facts) -> tuple[Poly, list[Any]]:
        """The polynomial without remainders and without the quotients that facts resolve, with the steps."""
        poly, steps, progress = without_remainders(poly), [], True
        while progress:
            progress = False
            for quotient in quotients([poly]):
                found = resolve(quotient, facts)
                if found is not None:
                    by, low, high = found
                    steps.append([str(Poly.atom(quotient)), str(by), _plain(low), _plain(high)])
                    poly, progress = replaced(poly, quotient, by), True
                    break
        return poly, steps

    def _demand(self, facts: list[Poly], conditions: list[Condition], sentence: str) -> list[Any]:
        """What shows that conditions follow; raises :class:`Stuck` for the first that isn't shown to."""
        found, known = [], Facts(facts)
        for condition in conditions:
            poly, divisions = self._settled(condition.poly, known)
            witnesses = known.holds(Condition(poly, condition.relation))
            if witnesses is None:
                raise Stuck(sentence.format(condition_text(condition)))
            found.append([divisions, [_plain(w) for w in witnesses]])
        return found


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
            unbound = sorted(attribute_symbols(node.attributes) - set(rule.symbols))
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


def attribute_symbols(attributes: Mapping[str, Any]) -> set[str]:
    """The size symbols in attributes."""
    def of(value: Any) -> set[str]:
        if isinstance(value, Poly):
            return set(value.symbols)
        return set().union(*map(of, value)) if isinstance(value, tuple) else set()

    return set().union(*map(of, attributes.values()))


def _plain(witness: Any) -> Any:
    """A witness as JSON: quotients as texts."""
    def ref(r: Any) -> Any:
        return [r[0], str(r[1]), *(_plain(w) for w in r[2:])] if isinstance(r, list) else r

    return [[factor, [ref(r) for r in refs]] for factor, refs in witness]


def _multiple(poly: Poly) -> tuple[str, Poly] | None:
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


def _solvable(poly: Poly) -> tuple[str, Poly] | None:
    """A symbol that ``poly == 0`` determines, and its value; one whose value is plainly positive if possible."""
    options = []
    for monomial, factor in poly.terms:
        if len(monomial) != 1 or abs(factor) != 1 or isinstance(monomial[0], (FloorDiv, Mod)):
            continue
        rest = poly - Poly({monomial: factor})
        if monomial[0].name not in rest.symbols:
            value = -rest if factor == 1 else rest
            options.append((any(c < 0 for _, c in value.terms), monomial[0].name, value))
    return min(options, key=lambda o: (o[0], len(o[2].terms), o[1]))[1:] if options else None
