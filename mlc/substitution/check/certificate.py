"""A rule against its certificate: sizes and shapes first, then every output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.operators import OPERATORS, Requirements, ShapeError, Tensor, tensor_input
from mlc.operators.index import Condition, Poly, as_poly
from mlc.substitution.check.defined import Cover, demands_of, divisors_of
from mlc.substitution.check.elements import WITHIN, terms_of
from mlc.substitution.check.integers import (
    CertificateError,
    Expr,
    Guard,
    bounded,
    guard_of,
    name,
    need,
    parse,
    translated,
)
from mlc.substitution.check.play import Play
from mlc.substitution.check.ranks import check_blocks, expanded
from mlc.substitution.check.size import check_size
from mlc.substitution.check.terms import Term, fresh_name
from mlc.substitution.check.witness import as_quotient, check_division, check_guard, check_witness, swapped
from mlc.substitution.codec import RuleError, content_hash, load_rule, parse_size
from mlc.substitution.graph import Graph
from mlc.substitution.rule import Rule

__all__ = ["FORMAT", "check", "check_rule"]

FORMAT = 3
_MOST_STEPS = 200


def check(data: Mapping[str, Any]) -> None:
    """Checks the certificate of a rule in JSON; raises :class:`CertificateError` with the reason it is not valid, and
    :class:`~mlc.substitution.codec.RuleError` where the rule itself can't be read."""
    check_rule(load_rule(data))


def check_rule(rule: Rule) -> None:
    """:func:`check` of a rule that was read."""
    certificate = rule.certificate
    try:
        if not isinstance(certificate, Mapping):
            raise CertificateError("it has no certificate")
        check_size(certificate)
        with bounded():
            (_instance if "general" in certificate else _proved)(rule, certificate)
    except CertificateError as error:
        raise CertificateError(f"rule {rule.name}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RuleError,
            ShapeError) as error:
        raise CertificateError(f"rule {rule.name}: the certificate is malformed: {type(error).__name__}: "
                               f"{str(error)[:200]}") from error


def _proved(rule: Rule, certificate: Mapping[str, Any]) -> None:
    need(certificate.get("format") == FORMAT, f"its certificate must have the format {FORMAT}; prove it again")
    need(certificate.get("rule") == content_hash(rule), "it was made for another rule: the hash differs")
    if rule.blocks:
        check_blocks(rule)
    _Check(rule).run(certificate)


def _instance(rule: Rule, certificate: Mapping[str, Any]) -> None:
    """The rule is a general one at the ranks that the certificate names, and shows what the general one's shows."""
    general = load_rule(certificate["general"])
    proof = general.certificate
    need(isinstance(proof, Mapping) and general.blocks and not rule.blocks, "it must be of a proved rule with blocks")
    assert proof is not None
    _proved(general, proof)
    need(content_hash(expanded(general, certificate["axes"])) == content_hash(rule),
         "the general rule says something else at these ranks")
    need(certificate["whole"] == proof["whole"] and (certificate["backward"] is None) == (proof["backward"] is None),
         "it must claim what the general rule's certificate claims")


@dataclass
class _Side:
    outputs: list[Tensor]
    demands: list[Condition]


class _Check:
    """``values`` are the sizes that were solved for, ``facts`` what is at least 0 of the others, ``sizes``."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        need(not any(s[0] in "$@" for s in rule.symbols), "sizes must have names that begin with letters")
        need(WITHIN not in rule.shapes, f"no input may be called {WITHIN!r}")
        self.sizes = set(rule.symbols)
        self.values: dict[str, Poly] = {}
        self.facts = [name(s) - 1 for s in rule.symbols]

    def run(self, certificate: Mapping[str, Any]) -> None:
        self.assume(certificate["assume"])
        source, target = self.side(self.rule.source), self.side(self.rule.target)
        self.demanded(target.demands, certificate["demands"], "what the target demands of sizes")
        proofs, backward = certificate["outputs"], certificate["backward"]
        whole = {way: _names(certificate["whole"][way]) for way in ("forward", "backward")}
        need(whole["forward"] | whole["backward"] <= self.rule.shapes.keys(), "what is whole must be an input")
        need(len(source.outputs) == len(target.outputs) == len(proofs), "the sides differ in their number of outputs")
        for place, (one, other, proof) in enumerate(zip(source.outputs, target.outputs, proofs, strict=True)):
            need(len(one.shape) == len(other.shape), "outputs differ in rank")
            equal = [Condition(a - b, "==") for a, b in zip(one.shape, other.shape, strict=True)]
            self.demanded(equal, proof["shape"], "the equality of output shapes")
            self.equal(one, other, proof["steps"])
            self.defined(one, other, proof["defined"], whole["forward"])
            if backward is not None:
                self.defined(other, one, backward[place], whole["backward"])

    # --- sizes -------------------------------------------------------------------------------------------------------

    def read(self, text: Any) -> Expr:
        return parse(text, {}, self.sizes)

    def side(self, graph: Graph) -> _Side:
        """The side's tensors at the sizes, and what its operators demand."""
        def put(value: Any) -> Any:
            if isinstance(value, Poly):
                return value.substitute(self.values)
            return tuple(put(v) for v in value) if isinstance(value, tuple) else value

        unbound = {s for node in graph.nodes for v in node.attributes.values() for s in _free(v)} - {*self.rule.symbols}
        need(not unbound, f"the sizes {sorted(unbound)} are unbound")
        require = Requirements()
        at: dict[Any, Tensor] = {n: tensor_input(n, [as_poly(s).substitute(self.values) for s in shape])
                                 for n, shape in self.rule.shapes.items()}
        for place, node in enumerate(graph.nodes):
            given = {k: put(v) for k, v in node.attributes.items()}
            for k, tensor in enumerate(OPERATORS[node.op](require, [at[r] for r in node.inputs], given)):
                at[place, k] = tensor
        return _Side([at[r] for r in graph.outputs], [c for c, _ in require.conditions])

    def assume(self, steps: Sequence[Any]) -> None:
        """What holds of all sizes that the rule admits and for which its source is well-formed."""
        need(len(steps) <= _MOST_STEPS, f"there must be at most {_MOST_STEPS} assumptions")
        for word, place, *words in steps:
            conditions = [c.substitute(self.values) for c in self.rule.conditions] + self.side(self.rule.source).demands
            condition = conditions[place]
            if word == "fact":
                expr = self.divided(translated(condition.poly), words[0])
                self.facts += [expr] if condition.relation == ">=" else [expr, -expr]
                continue
            need(condition.relation == "==" and word in ("multiple", "equal"), "an equality must be solved")
            (self.multiple if word == "multiple" else self.solved)(condition, *words)

    def multiple(self, condition: Condition, size: str, divisor: str, whole: str, witness: Any) -> None:
        """``size % divisor == 0``: the size is ``divisor * whole``."""
        value = self.read(divisor)
        said, expr = Poly.symbol(size) % parse_size(divisor), translated(condition.poly)
        need(size in self.sizes and expr in (translated(said), -translated(said)),
             f"{condition} does not say that {divisor} divides {size}")
        need(whole not in self.sizes and whole.isidentifier(), f"{whole} must be a new name")
        check_witness(witness, value - 1, self.facts, self.read)
        self.sizes.add(whole)
        self.replace(size, parse_size(divisor) * Poly.symbol(whole))
        self.facts.append(name(whole) - 1)

    def solved(self, condition: Condition, size: str, text: str, divisions: Any) -> None:
        """``size == text``."""
        value = self.read(text)
        expr = self.divided(translated(condition.poly), divisions)
        need(size in self.sizes and expr in (name(size) - value, value - name(size)), f"{condition} is not {size}=…")
        self.replace(size, parse_size(text))

    def replace(self, size: str, value: Poly) -> None:
        need(size not in value.symbols, f"{size} must not be solved by itself")
        self.values = {n: p.substitute({size: value}) for n, p in self.values.items()} | {size: value}
        self.facts = [p.substituted({size: translated(value)}) for p in self.facts]
        self.sizes.discard(size)

    def divided(self, expr: Expr, steps: Sequence[Any]) -> Expr:
        need(len(steps) <= _MOST_STEPS, f"there must be at most {_MOST_STEPS} quotients")
        for quotient, by, low, high in steps:
            atom, value = as_quotient(self.read(quotient)), self.read(by)
            check_division(atom, value, low, high, self.facts, self.read)
            expr = swapped(expr, atom, value)
        return expr

    def demanded(self, conditions: Sequence[Condition], proofs: Sequence[Any], what: str) -> None:
        need(len(conditions) == len(proofs), f"{what} has no proof")
        for condition, (divisions, witnesses) in zip(conditions, proofs, strict=True):
            guard = guard_of(condition)
            check_guard(Guard(self.divided(guard.expr, divisions), guard.relation), witnesses, self.facts, self.read)

    # --- elements ----------------------------------------------------------------------------------------------------

    def anywhere(self, tensor: Tensor) -> tuple[list[str], tuple[Poly, ...], list[Expr]]:
        """Variables for an element of a tensor, its indices, and the facts about both."""
        context = [fresh_name() for _ in tensor.shape]
        ranges = [p for n, s in zip(context, tensor.shape, strict=True) for p in (name(n), translated(s) - 1 - name(n))]
        return context, tuple(map(Poly.symbol, context)), [*self.facts, *ranges]

    def equal(self, one: Tensor, other: Tensor, steps: Sequence[Any]) -> None:
        """``other`` is ``one`` wherever that is defined: there, what it divides by is not 0."""
        context, indices, facts = self.anywhere(one)
        left, right = terms_of(one[indices], {}), terms_of(other[indices], {})
        divisors = divisors_of(demands_of(one[indices], {}))
        Play(frozenset(self.sizes), context, facts, divisors, left, right).run(steps)

    def defined(self, one: Tensor, other: Tensor, proofs: Mapping[str, Any], whole: set[str]) -> None:
        """``other`` is defined wherever ``one`` is: its reads, tensor by tensor but for those of ``whole``, and its
        partial functions, which stand under the empty name."""
        context, indices, facts = self.anywhere(one)
        given, wanted = demands_of(one[indices], {}), demands_of(other[indices], {})
        for group in sorted(set(map(_group, wanted)) - whole):
            theirs, ours = ([t for t in terms if _group(t) == group] for terms in (wanted, given))
            Cover(frozenset(self.sizes), context, facts, theirs, ours, divisors_of(given)).run(proofs[group])


def _group(demand: Term) -> str:
    """The tensor that is read; empty for a function."""
    [atom] = demand.atoms
    return str(atom[1]) if atom[0] == "read" else ""


def _names(texts: Any) -> set[str]:
    need(isinstance(texts, list) and all(isinstance(t, str) and t for t in texts), "tensors must be named")
    return set(texts)


def _free(value: Any) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _free(v)} if isinstance(value, tuple) else set()

