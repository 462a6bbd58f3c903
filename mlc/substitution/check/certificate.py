"""A rule against its certificate: sizes and shapes first, then every output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlc.operators import OPERATORS, Requirements, ShapeError, Tensor, tensor_input
from mlc.operators.index import Condition, Poly, as_poly
from mlc.substitution.check.play import Play
from mlc.substitution.check.terms import fresh_name, terms_of
from mlc.substitution.check.witness import (
    CertificateError,
    as_quotient,
    check_condition,
    check_division,
    check_witness,
    need,
    swapped,
    without_remainders,
)
from mlc.substitution.codec import RuleError, content_hash, load_rule, parse_size
from mlc.substitution.graph import Graph
from mlc.substitution.rule import Rule

__all__ = ["check"]


def check(data: Mapping[str, Any]) -> None:
    """Checks the certificate of a rule in JSON; raises :class:`CertificateError` with the reason it is not valid, and
    :class:`~mlc.substitution.codec.RuleError` where the rule itself can't be read."""
    rule = load_rule(data)
    certificate = rule.certificate
    need(isinstance(certificate, Mapping), f"rule {rule.name}: it has no certificate")
    assert certificate is not None
    try:
        need(certificate.get("format") == 1, "its format must be 1")
        need(certificate.get("rule") == content_hash(rule), "it was made for another rule: the hash differs")
        _check_side(rule, certificate)
    except CertificateError as error:
        raise CertificateError(f"rule {rule.name}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError, RuleError,
            ShapeError) as error:
        raise CertificateError(f"rule {rule.name}: the certificate is malformed: {type(error).__name__}: {error}"
                               ) from error


def _check_side(rule: Rule, certificate: Mapping[str, Any]) -> None:
    values, facts = _assume(rule, rule.source, certificate["assume"])
    sources, _ = _outputs(rule, rule.source, values)
    targets, demands = _outputs(rule, rule.target, values)
    _demands(facts, demands, certificate["demands"], "the target's demand")
    need(len(sources) == len(targets) == len(certificate["outputs"]), "the sides differ in their number of outputs")
    for source, target, proof in zip(sources, targets, certificate["outputs"], strict=True):
        need(len(source.shape) == len(target.shape), "outputs differ in rank")
        equal = [Condition(a - b, "==") for a, b in zip(source.shape, target.shape, strict=True)]
        _demands(facts, equal, proof["shape"], "the equality of output shapes")
        context = [fresh_name() for _ in source.shape]
        indices = tuple(map(Poly.symbol, context))
        ranges = [p for i, s in zip(indices, source.shape, strict=True) for p in (i, without_remainders(s) - 1 - i)]
        left, right = terms_of(source[indices], {}), terms_of(target[indices], {})
        Play(context, [*facts, *ranges], left, right).run(proof["steps"])
    reverse = certificate.get("reverse")
    if reverse is not None:
        values, facts = _assume(rule, rule.target, reverse["assume"])
        _demands(facts, _outputs(rule, rule.source, values)[1], reverse["demands"], "the source's demand")


def _outputs(rule: Rule, graph: Graph, values: Mapping[str, Poly]) -> tuple[list[Tensor], list[Condition]]:
    """The side's tensors at sizes ``values``, and what its operators demand."""
    def put(value: Any) -> Any:
        if isinstance(value, Poly):
            return value.substitute(values)
        return tuple(put(v) for v in value) if isinstance(value, tuple) else value

    unbound = {s for node in graph.nodes for v in node.attributes.values() for s in _free(v)} - set(rule.symbols)
    need(not unbound, f"the sizes {sorted(unbound)} are unbound")
    require = Requirements()
    at: dict[Any, Tensor] = {n: tensor_input(n, [as_poly(s).substitute(values) for s in shape])
                             for n, shape in rule.shapes.items()}
    for place, node in enumerate(graph.nodes):
        given = {k: put(v) for k, v in node.attributes.items()}
        for k, tensor in enumerate(OPERATORS[node.op](require, [at[r] for r in node.inputs], given)):
            at[place, k] = tensor
    return [at[r] for r in graph.outputs], [c for c, _ in require.conditions]


def _free(value: Any) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _free(v)} if isinstance(value, tuple) else set()


def _assume(rule: Rule, graph: Graph, steps: Sequence[Any]) -> tuple[dict[str, Poly], list[Poly]]:
    """What holds of all sizes that the rule admits and for which a side is well-formed: solved, and as facts."""
    symbols = rule.symbols
    names = set(symbols)
    values: dict[str, Poly] = {}
    facts = [Poly.symbol(s) - 1 for s in symbols]
    need(not any(s[0] in "$@" for s in symbols), "sizes must have names that begin with letters")
    for step in steps:
        conditions = [c.substitute(values) for c in rule.conditions] + _outputs(rule, graph, values)[1]
        condition = conditions[step[1]]
        if step[0] == "fact":
            poly = _divided(condition.poly, facts, step[2])
            facts += [poly] if condition.relation == ">=" else [poly, -poly]
            continue
        name, value = step[2], parse_size(step[3])
        need(condition.relation == "==" and name not in value.symbols, "an equality must be solved")
        if step[0] == "multiple":
            said = Poly.symbol(name) % value
            need(condition.poly in (said, -said), f"{condition} does not say that {value} divides {name}")
            need(step[4] not in names and step[4][0] not in "$@", f"{step[4]} must be a new name")
            check_witness(step[5], value - 1, facts)
            names.add(step[4])
            change = {name: value * Poly.symbol(step[4])}
        else:
            need(step[0] == "equal", f"unknown step {step[0]!r}")
            poly = _divided(condition.poly, facts, step[4])
            need(poly in (Poly.symbol(name) - value, value - Poly.symbol(name)), f"{condition} is not {name}={value}")
            change = {name: value}
        values = {n: p.substitute(change) for n, p in values.items()} | change
        facts = [p.substitute(change) for p in facts]
        if step[0] == "multiple":
            facts.append(Poly.symbol(step[4]) - 1)
    return values, facts


def _divided(poly: Poly, facts: Sequence[Poly], steps: Sequence[Any]) -> Poly:
    poly = without_remainders(poly)
    for quotient, by, low, high in steps:
        atom, value = as_quotient(parse_size(quotient)), parse_size(by)
        check_division(atom, value, low, high, facts, parse_size)
        poly = swapped(poly, atom, value)
    return poly


def _demands(facts: Sequence[Poly], conditions: Sequence[Condition], proofs: Sequence[Any], what: str) -> None:
    need(len(conditions) == len(proofs), f"{what} has no proof")
    for condition, (divisions, witnesses) in zip(conditions, proofs, strict=True):
        poly = _divided(condition.poly, facts, divisions)
        check_condition(Condition(poly, condition.relation), witnesses, facts)
