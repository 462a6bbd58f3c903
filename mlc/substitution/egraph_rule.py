"""A rule as an egglog rule: patterns, sizes read from the inputs' shapes, the precondition as premises, new nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations

from mlc.operators import infer
from mlc.operators.index import Condition, FloorDiv, Poly, Symbol, as_poly
from mlc.substitution.egraph_symbols import Symbols
from mlc.substitution.graph import Graph, Ref
from mlc.substitution.rule import Rule

__all__ = ["Shape", "UndeterminedError", "graph_shapes", "rule_program"]

Shape = tuple[Poly, ...]


class UndeterminedError(ValueError):
    """A size in a target or a condition cannot be computed from what the source matched."""


def rule_program(rule: Rule, symbols: Symbols, number: int) -> str:
    """The egglog text of ``rule``, both ways where it can be; nodes that it builds are marked with ``number``.

    The way back is left out where it would match every tensor there is, or where the target does not tell all sizes.

    Raises ValueError for a rule without a certificate, for a target that reads what the source does not, and for a
    size that the matched source does not determine.
    """
    if rule.certificate is None:
        raise ValueError(f"the rule {rule.name} has no certificate: only proved rules are applied")
    if len(rule.source.outputs) != len(rule.target.outputs):
        raise ValueError(f"the rule {rule.name} replaces {len(rule.source.outputs)} outputs by "
                         f"{len(rule.target.outputs)}: they must be as many")
    unbound = sorted(set(rule.target.inputs) - set(rule.source.inputs))
    if unbound:
        raise ValueError(f"the target of the rule {rule.name} reads {', '.join(unbound)}, which its source does not")
    text = _one_way(rule, symbols, f"{rule.name}#{number}", number)
    if rule.two_way and not any(isinstance(ref, str) for ref in rule.target.outputs):
        back = replace(rule, source=rule.target, target=rule.source)
        with suppress(UndeterminedError):
            text += "\n" + _one_way(back, symbols, f"{rule.name} back#{number}", number)
    return text


def _one_way(rule: Rule, symbols: Symbols, name: str, number: int) -> str:
    premises = _Premises(rule, symbols)
    premises.match()
    actions = _build(rule.target, rule, symbols, number, premises)
    for source, target in zip(rule.source.outputs, rule.target.outputs, strict=True):
        actions.append(f"(union {_term(source)} {_new(target)})")
    ruleset = "grow" if grows(rule) else "shrink"
    return (f"(rule ({' '.join(premises.facts)})\n  ({' '.join(actions)})\n"
            f"  :ruleset {ruleset} :name \"{name}\")")


def grows(rule: Rule) -> bool:
    """Whether a rule can be applied without end or only permutes: several outputs, more nodes than before."""
    return len(rule.source.outputs) > 1 or len(rule.target.nodes) > len(rule.source.nodes)


@dataclass
class _Premises:
    """Collects facts; ``bound`` are the size symbols that have a variable."""

    rule: Rule
    symbols: Symbols
    facts: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    #: what is known of sizes: an egglog expression and the polynomial that it must equal
    pending: list[tuple[str, Poly]] = field(default_factory=list)

    def match(self) -> None:
        source, shapes = self.rule.source, graph_shapes(self.rule.source, self.rule.shapes)
        # a source output that is an input is not below an operator, whose name would tell its rank
        used = {ref for node in source.nodes for ref in node.inputs}
        for place, node in enumerate(source.nodes):
            call = self.symbols.call(node.op, [shapes[ref] for ref in node.inputs], node.attributes)
            words = [call.symbol, *(_term(ref) for ref in node.inputs)]
            for number, size in enumerate(call.sizes):
                words.append(self._size(f"?a{place}.{number}", size))
            self.facts.append(f"(= {_term((place, 0))} ({' '.join(words)}))")
        # outputs that are one term already have nothing to gain from each other: concat(w, w) and so on without end
        for one, other in combinations(dict.fromkeys(source.outputs), 2):
            self.facts.append(f"(!= {_term(one)} {_term(other)})")
        for name in source.inputs:
            self.facts.append(f"(= ?shape:{name} (shape {_term(name)}))")
            if name not in used:
                self.facts.append(f"(= {len(shapes[name])} (vec-length ?shape:{name}))")
            for axis, size in enumerate(shapes[name]):
                self._know(f"(vec-get ?shape:{name} {axis})", size)
        self._solve()
        for condition in self.rule.conditions:
            self._check(condition)

    def _size(self, variable: str, size: Poly) -> str:
        """The word of a size argument: its number, the symbol's variable at its first use, or one to be checked."""
        if size.constant is not None:
            return str(size.constant)
        name = _only_symbol(size)
        if name is not None and name not in self.bound:
            self.bound.add(name)
            self.facts.append(f"(>= {_variable(name)} 1)")
            return _variable(name)
        self._know(variable, size)
        return variable

    def _know(self, text: str, size: Poly) -> None:
        name = _only_symbol(size)
        if name is not None and name not in self.bound:
            self.bound.add(name)
            self.facts.append(f"(= {_variable(name)} {text})")
            if not text.startswith("(vec-get"):
                self.facts.append(f"(>= {_variable(name)} 1)")
        else:
            self.pending.append((text, size))

    def _solve(self) -> None:
        """Bind every symbol that is left by an equation in which it alone is unknown, and check the others."""
        while self.pending:
            ready = next((item for item in self.pending if item[1].symbols <= self.bound), None)
            if ready is not None:
                self.facts.append(f"(= {ready[0]} {expression(ready[1])})")
                self.pending.remove(ready)
                continue
            solved = next(filter(None, (self._isolate(*item) for item in self.pending)), None)
            if solved is None:
                self.need([size for _, size in self.pending])
                return
            name, facts = solved
            self.bound.add(name)
            self.facts.extend(facts)

    def _isolate(self, text: str, size: Poly) -> tuple[str, list[str]] | None:
        """``text = factor * symbol + rest`` solved for the symbol, if that is the only unknown."""
        unknown = size.symbols - self.bound
        if len(unknown) != 1:
            return None
        [name] = unknown
        factor: dict[tuple[object, ...], int] = {}
        rest: dict[tuple[object, ...], int] = {}
        for monomial, coefficient in size.terms:
            here = [atom for atom in monomial if name in Poly.atom(atom).symbols]
            if not here:
                rest[monomial] = coefficient
            elif here == [Symbol(name)]:
                factor[tuple(atom for atom in monomial if atom not in here)] = coefficient
            else:
                return None
        by, variable = expression(Poly(factor)), _variable(name)  # type: ignore[arg-type]
        difference = f"(- {text} {expression(Poly(rest))})"  # type: ignore[arg-type]
        return name, [f"(= {variable} (/ {difference} {by}))", f"(= {difference} (* {variable} {by}))",
                      f"(>= {variable} 1)"]

    def need(self, sizes: Iterable[Poly]) -> None:
        """Raise :class:`UndeterminedError` where a size is not known."""
        unknown = sorted({name for size in sizes for name in size.symbols} - self.bound)
        if unknown:
            names = ", ".join(unknown)
            raise UndeterminedError(f"the source of the rule {self.rule.name} does not determine {names}")

    def _check(self, condition: Condition) -> None:
        self.need([condition.poly])
        value = expression(condition.poly)
        self.facts.append(f"(= {value} 0)" if condition.relation == "==" else f"(>= {value} 0)")


def graph_shapes(graph: Graph, shapes: Mapping[str, Sequence[Poly | int]]) -> dict[Ref, Shape]:
    """The shape of every input and node of a graph."""
    known: dict[Ref, Shape] = {name: tuple(map(as_poly, shape)) for name, shape in shapes.items()}
    for place, node in enumerate(graph.nodes):
        [known[(place, 0)]] = infer(node.op, [known[ref] for ref in node.inputs], node.attributes)
    return known


def _build(target: Graph, rule: Rule, symbols: Symbols, number: int, premises: _Premises) -> list[str]:
    shapes = graph_shapes(target, rule.shapes)
    actions = []
    for place, node in enumerate(target.nodes):
        call = symbols.call(node.op, [shapes[ref] for ref in node.inputs], node.attributes)
        premises.need([*call.sizes, *shapes[(place, 0)]])
        words = [*(_new(ref) for ref in node.inputs), *(expression(size) for size in call.sizes)]
        name, text = _new((place, 0)), " ".join(words)
        actions.append(f"(let {name} ({call.symbol} {text}))")
        actions.append(f"(set (made:{call.symbol} {text}) {number})")
        actions.append(f"(set (shape {name}) {_vector(shapes[(place, 0)])})")
    return actions


def expression(poly: Poly) -> str:
    """A polynomial over bound symbols as an egglog integer expression."""
    total = ""
    for monomial, coefficient in poly.terms:
        text = str(coefficient)
        for atom in monomial:
            factor = _variable(atom.name) if isinstance(atom, Symbol) else _division(atom.numerator, atom.denominator,
                                                                                     isinstance(atom, FloorDiv))
            text = factor if text == "1" else f"(* {text} {factor})"
        total = f"(+ {total} {text})" if total else text
    return total or "0"


def _division(numerator: Poly, denominator: Poly, quotient: bool) -> str:
    """Rounded down: egglog's own division rounds towards zero."""
    above, below = expression(numerator), expression(denominator)
    remainder = f"(% (+ (% {above} {below}) {below}) {below})"
    return f"(/ (- {above} {remainder}) {below})" if quotient else remainder


def _only_symbol(size: Poly) -> str | None:
    """The symbol that a polynomial is, if it is no more than that."""
    if len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        atom = size.terms[0][0][0]
        return atom.name if isinstance(atom, Symbol) else None
    return None


def _vector(shape: Shape) -> str:
    return f"(vec-of {' '.join(map(expression, shape))})" if shape else "(vec-empty)"


def _variable(symbol: str) -> str:
    return f"?size:{symbol}"


def _term(ref: Ref) -> str:
    """The variable of a matched term."""
    return f"?in:{ref}" if isinstance(ref, str) else f"?src:{ref[0]}"


def _new(ref: Ref) -> str:
    """The variable of a built term."""
    return f"?in:{ref}" if isinstance(ref, str) else f"?dst:{ref[0]}"
