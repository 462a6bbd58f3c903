"""A rule against its certificate: sizes and shapes first, then every output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

__all__ = ["FORMAT", "check", "check_instance", "check_proof", "check_rule", "general_of"]

FORMAT = 3
_MOST_STEPS = 200


def check(data: Mapping[str, Any]) -> None:
    """Checks the certificate of a rule in JSON; raises :class:`CertificateError` with the reason it is not valid, and
    :class:`~mlc.substitution.codec.RuleError` where the rule itself can't be read."""
    check_rule(load_rule(data))


def check_rule(rule: Rule) -> None:
    """:func:`check` of a rule that was read."""
    general = general_of(rule)
    if general is not None:
        check_proof(general)
        check_instance(rule, general)
    else:
        check_proof(rule)


def check_proof(rule: Rule) -> None:
    """The certificate proves the rule, if :func:`general_of` finds that it is a proof or has found the rule in one."""
    with _explained(rule):
        assert rule.certificate is not None
        _proved(rule, rule.certificate)


def general_of(rule: Rule) -> Rule | None:
    """The rule for many ranks of which the certificate says that this one is an instance, itself to be checked; None
    if it is a proof."""
    with _explained(rule):
        certificate = rule.certificate
        if not isinstance(certificate, Mapping):
            raise CertificateError("it has no certificate")
        check_size(certificate)
        if "general" not in certificate:
            return None
        general = load_rule(certificate["general"])
        need(isinstance(general.certificate, Mapping) and "general" not in general.certificate and general.blocks
             and not rule.blocks, "it must be of a proved rule with blocks")
        return general
    return None


def check_instance(rule: Rule, general: Rule) -> None:
    """The rule is the one of :func:`general_of` at the ranks that the certificate names, and claims what that one's
    certificate claims."""
    certificate, proof = rule.certificate, general.certificate
    assert certificate is not None and proof is not None
    with _explained(rule):
        need(content_hash(expanded(general, certificate["axes"])) == content_hash(rule),
             "the general rule says something else at these ranks")
        one_way = [each["backward"] is None for each in (certificate, proof)]
        need(certificate["whole"] == proof["whole"] and one_way[0] == one_way[1],
             "it must claim what the general rule's certificate claims")


@contextmanager
def _explained(rule: Rule) -> Iterator[None]:
    """Bounds what is checked inside, and says of which rule it is that something is wrong."""
    try:
        with bounded():
            yield
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


@dataclass
class _Side:
    outputs: list[Tensor]
    demands: list[Condition]


@dataclass
class _Element:
    """Any element of an output: ``facts`` about its indices and the sizes, what it is a sum of, and what must be
    defined for it to be."""

    facts: list[Expr]
    terms: list[Term]
    demands: list[Term]


class _Check:
    """``values`` are the sizes that were solved for, ``facts`` what is at least 0 of the others, ``sizes``."""

    def __init__(self, rule: Rule) -> None:
        self.rule, symbols = rule, rule.symbols
        need(not any(s[0] in "$@" for s in symbols), "sizes must have names that begin with letters")
        need(WITHIN not in rule.shapes, f"no input may be called {WITHIN!r}")
        self.symbols, self.sizes = frozenset(symbols), set(symbols)
        self.values: dict[str, Poly] = {}
        self.facts = [name(s) - 1 for s in symbols]
        self._source: _Side | None = None

    def run(self, certificate: Mapping[str, Any]) -> None:
        self.assume(certificate["assume"])
        source, target = self.source(), self.side(self.rule.target)
        self.demanded(target.demands, certificate["demands"], "what the target demands of sizes")
        proofs, backward = certificate["outputs"], certificate["backward"]
        whole = {way: _names(certificate["whole"][way]) for way in ("forward", "backward")}
        need(whole["forward"] | whole["backward"] <= self.rule.shapes.keys(), "what is whole must be an input")
        need(len(source.outputs) == len(target.outputs) == len(proofs), "the sides differ in their number of outputs")
        for place, (one, other, proof) in enumerate(zip(source.outputs, target.outputs, proofs, strict=True)):
            need(len(one.shape) == len(other.shape), "outputs differ in rank")
            equal = [Condition(a - b, "==") for a, b in zip(one.shape, other.shape, strict=True)]
            self.demanded(equal, proof["shape"], "the equality of output shapes")
            context = [fresh_name() for _ in one.shape]
            left, right = self.element(one, context), self.element(other, context)
            divisors = divisors_of(left.demands)
            Play(frozenset(self.sizes), context, left.facts, divisors, left.terms, right.terms).run(proof["steps"])
            self.defined(context, left, right, proof["defined"], whole["forward"])
            if backward is not None:
                self.defined(context, right, left, backward[place], whole["backward"])

    # --- sizes -------------------------------------------------------------------------------------------------------

    def read(self, text: Any) -> Expr:
        return parse(text, {}, self.sizes)

    def side(self, graph: Graph) -> _Side:
        """The side's tensors at the sizes, and what its operators demand."""
        def put(value: Any) -> Any:
            if isinstance(value, Poly):
                return value.substitute(self.values)
            return tuple(put(v) for v in value) if isinstance(value, tuple) else value

        unbound = {s for node in graph.nodes for v in node.attributes.values() for s in _free(v)} - self.symbols
        need(not unbound, f"the sizes {sorted(unbound)} are unbound")
        require = Requirements()
        at: dict[Any, Tensor] = {n: tensor_input(n, [as_poly(s).substitute(self.values) for s in shape])
                                 for n, shape in self.rule.shapes.items()}
        for place, node in enumerate(graph.nodes):
            given = {k: put(v) for k, v in node.attributes.items()}
            for k, tensor in enumerate(OPERATORS[node.op](require, [at[r] for r in node.inputs], given)):
                at[place, k] = tensor
        return _Side([at[r] for r in graph.outputs], [c for c, _ in require.conditions])

    def source(self) -> _Side:
        """:meth:`side` of the rule's source, at the sizes as they are."""
        if self._source is None:
            self._source = self.side(self.rule.source)
        return self._source

    def assume(self, steps: Sequence[Any]) -> None:
        """What holds of all sizes that the rule admits and for which its source is well-formed."""
        need(len(steps) <= _MOST_STEPS, f"there must be at most {_MOST_STEPS} assumptions")
        for word, place, *words in steps:
            need(type(place) is int and place >= 0, "conditions are numbered from 0")
            conditions = self.rule.conditions
            of_rule = place < len(conditions)
            condition = (conditions[place].substitute(self.values) if of_rule
                         else self.source().demands[place - len(conditions)])
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
        self._source = None

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

    def element(self, tensor: Tensor, context: Sequence[str]) -> _Element:
        """The element at variables, which are its indices."""
        ranges = [p for n, s in zip(context, tensor.shape, strict=True) for p in (name(n), translated(s) - 1 - name(n))]
        value = tensor[tuple(map(Poly.symbol, context))]
        return _Element([*self.facts, *ranges], terms_of(value, {}), demands_of(value, {}))

    def defined(self, context: Sequence[str], one: _Element, other: _Element, proofs: Mapping[str, Any],
                whole: set[str]) -> None:
        """``other`` is defined wherever ``one`` is: its reads, tensor by tensor but for those of ``whole``, and its
        partial functions, which stand under the empty name."""
        for group in sorted(set(map(_group, other.demands)) - whole):
            theirs, ours = ([t for t in each.demands if _group(t) == group] for each in (other, one))
            Cover(frozenset(self.sizes), context, one.facts, theirs, ours, divisors_of(one.demands)).run(proofs[group])


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

