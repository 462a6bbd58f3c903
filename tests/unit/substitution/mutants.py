"""Rules made wrong on purpose, one change each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mlc.operators import OPERATORS
from mlc.operators.index import Poly
from mlc.substitution.graph import Graph, Node
from mlc.substitution.rule import Rule


def mutants(rules: list[Rule], seed: int) -> Iterator[tuple[str, Rule]]:
    """Without end: the kind of the change and the changed rule. Some are ill-formed, some are right by luck."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(sorted(KINDS))
        found = mutant(rng, rules, kind)
        if found is not None:
            yield kind, found


def mutant(rng: random.Random, rules: list[Rule], kind: str) -> Rule | None:
    """One of the rules with one change of a kind, None where it has no place for one."""
    rule = rng.choice(rules)
    changed = (KINDS | PARTIAL_KINDS)[kind](rng, replace(rule, certificate=None))
    if changed is None or (changed.shapes, changed.source, changed.target, changed.conditions) == (
            rule.shapes, rule.source, rule.target, rule.conditions):
        return None
    found: Rule = replace(changed, name=f"{rule.name} with another {kind}")
    return found


def _with_node(rng: random.Random, rule: Rule, wanted: Any, change: Any) -> Rule | None:
    """The rule with one node of one side changed, one for which ``wanted`` holds."""
    side = rng.choice(("target", "source"))
    graph: Graph = getattr(rule, side)
    places = [k for k, node in enumerate(graph.nodes) if wanted(node)]
    if not places:
        return None
    place = rng.choice(places)
    nodes = tuple(change(n) if k == place else n for k, n in enumerate(graph.nodes))
    return replace(rule, **{side: Graph(nodes, graph.outputs)})


def _attribute(name: str, values: Any) -> Any:
    def mutate(rng: random.Random, rule: Rule) -> Rule | None:
        def change(node: Node) -> Node:
            return Node(node.op, node.inputs, {**node.attributes, name: rng.choice(values(node))})

        return _with_node(rng, rule, lambda n: name in OPERATORS[n.op].defaults, change)

    return mutate


def _order(rng: random.Random, rule: Rule) -> Rule | None:
    return _with_node(rng, rule, lambda n: len(n.inputs) == 2, lambda n: Node(n.op, n.inputs[::-1], n.attributes))


def _input(rng: random.Random, rule: Rule) -> Rule | None:
    names = sorted(rule.shapes)
    return _with_node(rng, rule, lambda n: any(isinstance(r, str) for r in n.inputs), lambda n: Node(
        n.op, tuple(rng.choice(names) if isinstance(r, str) else r for r in n.inputs), n.attributes))


def _activation(rng: random.Random, rule: Rule) -> Rule | None:
    """A relu that is left out, or one more behind an output."""
    side = rng.choice(("target", "source"))
    graph: Graph = getattr(rule, side)
    relus = [k for k, node in enumerate(graph.nodes) if node.op in ("relu", "silu", "gelu", "exp")]
    if relus and rng.random() < 0.6:
        place = rng.choice(relus)
        return replace(rule, **{side: Graph(tuple(Node("neg", n.inputs) if k == place else n
                                                  for k, n in enumerate(graph.nodes)), graph.outputs)})
    extra = Node("relu", (graph.outputs[0],))
    return replace(rule, **{side: Graph((*graph.nodes, extra), ((len(graph.nodes), 0), *graph.outputs[1:]))})


def _operator(rng: random.Random, rule: Rule) -> Rule | None:
    other = {"add": "mul", "mul": "add", "sub": "add", "div": "mul", "max_pool2d": "avg_pool2d", "sum": "mean",
             "mean": "sum", "relu": "sigmoid", "max": "sum", "layer_norm": "batch_norm"}
    return _with_node(rng, rule, lambda n: n.op in other, lambda n: Node(other[n.op], n.inputs, n.attributes))


def _size(rng: random.Random, rule: Rule) -> Rule | None:
    """One occurrence of a size becomes a size of its own: an equality that is dropped."""
    if not rule.shapes:
        return None
    name = rng.choice(sorted(rule.shapes))
    shape = list(rule.shapes[name])
    places = [k for k, size in enumerate(shape) if size.symbols]
    if not places:
        return None
    place = rng.choice(places)
    shape[place] = shape[place].substitute({rng.choice(sorted(shape[place].symbols)): Poly.symbol("free")})
    return replace(rule, shapes={**rule.shapes, name: tuple(shape)})


def _condition(rng: random.Random, rule: Rule) -> Rule | None:
    """What would hold if two sizes were equal, without that condition: the target's attributes have one for the
    other."""
    told = sorted({name for node in rule.target.nodes for value in node.attributes.values() for name in _sizes(value)})
    if not told or len(rule.symbols) < 2:
        return None
    one = rng.choice(told)
    other = rng.choice([name for name in rule.symbols if name != one])

    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(put, value))
        return value.substitute({one: Poly.symbol(other)}) if isinstance(value, Poly) else value

    nodes = tuple(Node(n.op, n.inputs, {k: put(v) for k, v in n.attributes.items()}) for n in rule.target.nodes)
    return replace(rule, target=Graph(nodes, rule.target.outputs))


def _sizes(value: Any) -> set[str]:
    if isinstance(value, tuple):
        return {name for each in value for name in _sizes(each)}
    return set(value.symbols) if isinstance(value, Poly) else set()


def _behind_an_input(make: Any) -> Any:
    """An input of the target becomes what ``make(name)`` computes of it: the same but where it is undefined."""
    def mutate(rng: random.Random, rule: Rule) -> Rule | None:
        names = [n for n in rule.target.inputs if rule.shapes[n] or make is not _identity]
        if not names:
            return None
        name = rng.choice(names)
        new = make(name, rule.shapes[name])
        return None if new is None else replace(rule, target=_behind(rule.target, name, new))

    return mutate


def _behind(graph: Graph, name: str, new: list[Node]) -> Graph:
    """The graph of what the last of the new nodes computes in place of an input."""
    def moved(ref: Any) -> Any:
        if ref == name:
            return len(new) - 1, 0
        return ref if isinstance(ref, str) else (ref[0] + len(new), ref[1])

    nodes = tuple(Node(n.op, tuple(map(moved, n.inputs)), n.attributes) for n in graph.nodes)
    return Graph((*new, *nodes), tuple(map(moved, graph.outputs)))


def _behind_both(source: Any, target: Any) -> Any:
    """An input of the source becomes what ``source`` computes of it, and that of the target what ``target`` does (the
    input itself, if None): what divides by it, and what would cancel if it were something else."""
    def mutate(rng: random.Random, rule: Rule) -> Rule | None:
        names = [n for n in rule.target.inputs if n in rule.source.inputs and rule.shapes[n]]
        if not names:
            return None
        name = rng.choice(names)
        changed = replace(rule, source=_behind(rule.source, name, source(name, rule.shapes[name])))
        if target is None:
            return changed
        return replace(changed, target=_behind(rule.target, name, target(name, rule.shapes[name])))

    return mutate


def _chain(*words: str) -> Any:
    """Nodes from texts such as ``mul %0 x``, where ``x`` is the input and ``0`` the number."""
    def make(name: str, shape: Any) -> list[Node]:
        nodes = []
        for word in words:
            op, *refs = word.split()
            attributes: dict[str, Any] = {"value": Fraction(0)} if op == "scalar" else {}
            if op in ("sum", "max"):
                attributes = {"axes": (len(shape) - 1,), "keepdims": 1}
            inputs = tuple(name if r == "x" else (int(r[1:]), 0) for r in refs)
            nodes.append(Node(op, inputs, attributes))
        return nodes

    return make


def _identity(name: str, shape: Any) -> list[Node] | None:
    """x + 0 * (I @ (1/x)): one zero in a column spoils all of it."""
    if len(shape) != 2:
        return None
    return [Node("identity_matrix", (), {"size": shape[0]}), Node("reciprocal", (name,)),
            Node("matmul", ((0, 0), (1, 0))), Node("sub", ((2, 0), (2, 0))), Node("add", (name, (3, 0)))]


#: rules whose sides have equal values wherever both are defined, but whose target is undefined in more places
PARTIAL_KINDS: dict[str, Any] = {
    "zero times a reciprocal": _behind_an_input(_chain("scalar", "reciprocal x", "mul %1 %0", "add x %2")),
    "reciprocals that cancel": _behind_an_input(_chain("reciprocal x", "add x %0", "sub %1 %0")),
    "quotient that cancels": _behind_an_input(_chain("div x x", "sub %0 %0", "add x %1")),
    "logarithms that cancel": _behind_an_input(_chain("log x", "sub %0 %0", "add %1 x")),
    "roots that cancel": _behind_an_input(_chain("sqrt x", "neg %0", "add %0 %1", "add x %2")),
    "inverse roots that cancel": _behind_an_input(_chain("rsqrt x", "sub %0 %0", "sub x %1")),
    "zero times a root": _behind_an_input(_chain("neg x", "sqrt %0", "scalar", "mul %1 %2", "add %3 x")),
    "reciprocals in a product": _behind_an_input(
        _chain("reciprocal x", "sub x x", "mul %1 %0", "mul %0 %2", "add %3 x")),
    "identity matrix": _behind_an_input(_identity),
}

_ONE = ("div x x", "mul x %0")
#: rules whose source divides, so that something is not 0, but not what the target takes it for
PARTIAL_KINDS |= {
    "sums that do not cancel": _behind_both(
        _chain("sum x", "reciprocal x", "sum %1", "mul %0 %2", "mul x %3"), None),
    "sum of quotients": _behind_both(_chain("div x x", "sum %0", "mul x %1"), None),
    "half of a divisor": _behind_both(_chain("add x x", "div x %0", "mul x %1"), None),
    "divisor of another row": _behind_both(_chain("max x", "div %0 %0", "mul x %1"), _chain(*_ONE)),
    "divisor that is never 0": _behind_both(_chain("exp x", "div %0 %0", "mul x %1"), _chain(*_ONE)),
    "divisor that is 0 more often": _behind_both(_chain(*_ONE), _chain("relu x", "div %0 %0", "mul x %1")),
    "divisor that is a sum": _behind_both(_chain("sum x", "div x %0", "mul %0 %1"), _chain(*_ONE)),
    "reciprocal too many": _behind_both(_chain("reciprocal x", "reciprocal %0"), _chain("reciprocal x")),
}

KINDS: dict[str, Any] = {
    "axis": _attribute("axis", lambda node: (0, 1, 2)),
    "axes": _attribute("axes", lambda node: ((0,), (1,))),
    "perm": _attribute("perm", lambda node: ((0, 1), (1, 0), (0, 2, 1), (2, 1, 0), (1, 2, 0))),
    "stride": _attribute("stride", lambda node: ((2, 2), (1, 2), (2, 1), (1, 1))),
    "padding": _attribute("padding", lambda node: ("valid", "same", (1, 1, 0, 0), (0, 1, 0, 1))),
    "dilation": _attribute("dilation", lambda node: ((2, 2), (1, 2))),
    "group count": _attribute("groups", lambda node: (1, 2, 3, Poly.symbol("g"))),
    "beginning": _attribute("begin", lambda node: (0, 1)),
    "shape": _attribute("shape", lambda node: (node.attributes["shape"][::-1], (1, *node.attributes["shape"]))),
    "kernel": _attribute("kernel", lambda node: ((1, 1), (2, 2), (3, 1))),
    "operand order": _order, "input": _input, "activation": _activation, "operator": _operator, "size": _size,
    "condition": _condition,
    "largest of a row": _behind_both(_chain("max x", "maximum x %0"), None),
    "smaller of two": _behind_both(_chain("tanh x", "minimum x %0"), None),
    "larger of two": _behind_both(_chain("exp x", "maximum x %0"), None),
}
