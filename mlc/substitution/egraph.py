"""Equality saturation over operator graphs with concrete shapes, on egglog (Zhang et al., PLDI 2023).

An :class:`EGraph` holds terms: inputs with integer shapes, and operators applied to terms. Rules of
:mod:`mlc.substitution.rule` become egglog rules (:mod:`mlc.substitution.egraph_rule`): sizes are read from the shapes
of the matched inputs, the precondition is checked among the premises, and the shapes of new nodes are those that the
operators' specifications give. Rules with several outputs match all their source patterns at once.

    graph = EGraph(rules)                                   # refuses a rule without a certificate
    x, w = graph.add_input("x", (8, 64)), graph.add_input("w", (64, 32), weight=True)
    y = graph.add("matmul", (x, w))
    report = graph.run(Limits(seconds=5))                   # why it stopped, sizes, how often each rule matched
    classes = graph.export()                                # {class: EClass(shape, weight, nodes)}
    graph.equal(y, other); graph.find(y)                    # a term's class in the export
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlc.operators import Attributes, infer
from mlc.substitution.egraph_rule import rule_program
from mlc.substitution.egraph_symbols import Symbols
from mlc.substitution.rule import Rule

__all__ = ["EClass", "EGraph", "ENode", "Limits", "SaturationReport", "Term"]

_PRELUDE = """
(sort T)
(sort Shape (Vec i64))
(constructor input (String) T)
(function shape (T) Shape :no-merge)
(relation weight (T))
(ruleset analysis)
(ruleset shrink)
(ruleset grow)
"""


@dataclass(frozen=True)
class Term:
    """A handle of a term that was added; ``shape`` are its sizes."""

    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ENode:
    """An operator applied to classes, or an input (``op`` is "input", its ``attributes`` hold its name)."""

    op: str
    inputs: tuple[int, ...]
    attributes: Attributes = field(default_factory=dict)
    #: the rule that built it first, None for what was added
    rule: str | None = None


@dataclass(frozen=True)
class EClass:
    """Equal terms. ``weight`` is True where the value depends on constants and weights only."""

    shape: tuple[int, ...]
    weight: bool
    nodes: tuple[ENode, ...]


@dataclass(frozen=True)
class Limits:
    """When to stop: whichever comes first. ``grow`` bounds the rounds of the rules that only add alternatives
    (several outputs, commutation, what introduces operators); the others run to saturation after each round.
    """

    iterations: int = 12
    nodes: int = 50_000
    seconds: float = 30.0
    grow: int = 3


@dataclass(frozen=True)
class SaturationReport:
    """Why a run ended ("saturated", or the limit that was reached: a field of :class:`Limits`) and what it did."""

    reason: str
    iterations: int
    nodes: int
    seconds: float
    matches: Mapping[str, int]


class EGraph:
    """Terms and what is known to be equal. Not safe for threads."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        from egglog import bindings

        self._egg = bindings.EGraph()
        self._syntax = bindings
        self._symbols = Symbols()
        self._rules: list[str] = []
        self._terms: list[Term] = []
        self._by_text: dict[str, Term] = {}
        self._do(_PRELUDE)
        for rule in rules:
            self.add_rule(rule)

    # -- what is in it ------------------------------------------------------------------------------------------

    def add_input(self, name: str, shape: Sequence[int], *, weight: bool = False) -> Term:
        """An input, or the term that an earlier call with this name made; ``weight`` marks constants of the model."""
        term = self._let(f'(input "{_quoted(name)}")', tuple(shape))
        if weight:
            self._do(f"(weight $t{term.number})")
        return term

    def add(self, op: str, inputs: Sequence[Term] = (), attributes: Attributes | None = None) -> Term:
        """``op`` applied to terms; raises :class:`~mlc.operators.tensor.ShapeError` where the operands do not fit."""
        [shape] = infer(op, [term.shape for term in inputs], attributes or {})
        call = self._symbols.call(op, [term.shape for term in inputs], attributes or {})
        self._declare()
        sizes = [str(size.constant) for size in call.sizes]
        constants = tuple(int(size.constant or 0) for size in shape)
        words = [call.symbol, *(f"$t{term.number}" for term in inputs), *sizes]
        return self._let(f"({' '.join(words)})", constants)

    def add_rule(self, rule: Rule) -> None:
        """Refuses, with a ValueError, what has no certificate and what its source does not determine."""
        text = rule_program(rule, self._symbols, len(self._rules))
        self._rules.append(rule.name)
        self._declare()
        self._do(text)

    # -- saturation ---------------------------------------------------------------------------------------------

    def run(self, limits: Limits | None = None) -> SaturationReport:
        """Apply the rules until nothing changes or a limit is reached."""
        limits = limits or Limits()
        start, matches = time.monotonic(), dict.fromkeys(self._rules, 0)
        iterations, grown, reason = 0, 0, ""
        while not reason:
            changed = self._step("shrink", matches)
            iterations += 1
            if not changed:
                if grown == limits.grow:
                    reason = "grow"
                elif not self._step("grow", matches):
                    reason = "saturated"
                grown += 1
            if self.size >= limits.nodes:
                reason = "nodes"
            elif time.monotonic() - start >= limits.seconds:
                reason = "seconds"
            elif iterations >= limits.iterations:
                reason = reason or "iterations"
        self._do("(run-schedule (saturate (run analysis)))")
        return SaturationReport(reason, iterations, self.size, time.monotonic() - start, matches)

    def equal(self, a: Term, b: Term) -> bool:
        """Whether the two are known to be equal."""
        return self.find(a) == self.find(b)

    @property
    def size(self) -> int:
        """How many operator nodes there are."""
        [output] = self._do("(print-size)")
        return sum(count for name, count in output.sizes if name in self._symbols.operators)

    # -- what came of it ----------------------------------------------------------------------------------------

    def find(self, term: Term) -> int:
        """The class of a term, as :meth:`export` numbers it."""
        _, value = self._egg.eval_expr(self._syntax.Var(self._syntax.PanicSpan(), f"$t{term.number}"))
        return _number(value)

    def export(self) -> dict[int, EClass]:
        """All classes."""
        tables = self._egg.freeze().functions
        shapes = {_number(row.inputs[0]): tuple(self._egg.value_to_i64(v) for v in self._egg.value_to_vec(row.output))
                  for row in tables["shape"].rows}
        weights = {_number(row.inputs[0]) for row in tables["weight"].rows}
        nodes: dict[int, list[ENode]] = {number: [] for number in shapes}
        for row in tables["input"].rows:
            name = self._egg.value_to_string(row.inputs[0])
            nodes[_number(row.output)].append(ENode("input", (), {"name": name}))
        for symbol, form in self._symbols.operators.items():
            if symbol not in tables:
                continue
            made = {tuple(row.inputs): self._rules[self._egg.value_to_i64(row.output)]
                    for row in tables[f"made:{symbol}"].rows}
            for row in tables[symbol].rows:
                inputs = tuple(_number(value) for value in row.inputs[: form.arity])
                sizes = [self._egg.value_to_i64(value) for value in row.inputs[form.arity:]]
                rule = made.get(tuple(row.inputs))
                nodes[_number(row.output)].append(ENode(form.op, inputs, form.attributes(sizes), rule))
        return {number: EClass(shapes[number], number in weights, tuple(nodes[number])) for number in shapes}

    # -- egglog -------------------------------------------------------------------------------------------------

    def _let(self, text: str, shape: tuple[int, ...]) -> Term:
        if text not in self._by_text:
            term = Term(len(self._terms), shape)
            vector = f"(vec-of {' '.join(map(str, shape))})" if shape else "(vec-empty)"
            self._do(f"(let $t{term.number} {text}) (set (shape $t{term.number}) {vector})")
            self._terms.append(term)
            self._by_text[text] = term
        return self._by_text[text]

    def _declare(self) -> None:
        for text in self._symbols.take_declarations():
            self._do(text)

    def _step(self, ruleset: str, matches: dict[str, int]) -> bool:
        """One pass of a ruleset; whether anything changed."""
        [output] = self._do(f"(run {ruleset} 1)")
        for name, count in output.report.num_matches_per_rule.items():
            matches[self._rules[int(name.rpartition("#")[2])]] += count
        return bool(output.report.updated)

    def _do(self, text: str) -> list[Any]:
        return list(self._egg.run_program(*self._egg.parse_program(text)))


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: Any) -> int:
    return int(str(value).removeprefix("Value(").removesuffix(")"))
