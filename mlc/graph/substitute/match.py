"""Where a rule applies in an e-graph, and what it builds there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlc.graph.substitute.egraph import PRODUCTS, EGraph, Node
from mlc.graph.substitute.kinds import kind_of, places
from mlc.graph.substitute.terms import freeze
from mlc.operators import OPERATORS
from mlc.operators.index import Poly, as_poly
from mlc.operators.tensor import ShapeError
from mlc.substitution.graph import Node as RuleNode
from mlc.substitution.graph import Ref
from mlc.substitution.rule import Rule

__all__ = ["Match", "Pattern"]


@dataclass(frozen=True)
class Match:
    """The classes that a rule's inputs and source nodes are, and its sizes."""

    classes: Mapping[Ref, int]
    sizes: Mapping[str, int]


class Pattern:
    """A rule made ready: attributes with their defaults. Raises ValueError for one without a certificate."""

    def __init__(self, rule: Rule) -> None:
        if rule.certificate is None:
            raise ValueError(f"the rule {rule.name} has no certificate: only proved rules are applied")
        self.rule = rule
        self.kind = kind_of(rule)
        #: the operators that it needs and those that it brings, with their ranks
        self.needs, self.brings = places(rule.source, rule.shapes), places(rule.target, rule.shapes)
        #: whether it undoes slices and concatenations by themselves: then it is for constants as well
        self.undoes = len(rule.target.nodes) < len(rule.source.nodes) and all(
            node.op in ("slice", "concat") for node in rule.source.nodes)
        self.source = [_completed(node) for node in rule.source.nodes]
        self.target = [_completed(node) for node in rule.target.nodes]
        #: whether it joins several products that are all of one kind, which it could do in any order
        outputs = [self.source[o[0]].op for o in rule.source.outputs if not isinstance(o, str)]
        self.joins = len(outputs) > 1 and len(set(outputs)) == 1 and outputs[0] in PRODUCTS
        self._wanted = {s for node in self.target for s in _symbols(tuple(node.attributes.values()))}
        #: the inputs that all outputs read directly
        self.shared = tuple(
            name for name in rule.source.inputs
            if all(not isinstance(o, str) and name in self.source[o[0]].inputs for o in rule.source.outputs)
        )

    def matches(self, graph: EGraph) -> Iterator[Match]:
        """Every way in which the source is in the graph and the precondition holds, oldest classes first."""
        outputs = list(self.rule.source.outputs)
        if any(isinstance(output, str) for output in outputs):
            return
        yield from self._outputs(graph, outputs, {}, {}, [])

    def _outputs(
        self, graph: EGraph, left: list[Ref], classes: dict[Ref, int], sizes: dict[str, int], known: list[Any]
    ) -> Iterator[Match]:
        if not left:
            solved = _solved(sizes, known)
            if solved is not None and self._wanted <= solved.keys() and self._holds(solved):
                yield Match(classes, solved)
            return
        output, rest = left[0], left[1:]
        for each in self._candidates(graph, output, classes):
            if graph.constant[each] and not self.undoes:
                continue
            for state in self._at(graph, output, each, (classes, sizes, known)):
                yield from self._outputs(graph, rest, *state)

    def _candidates(self, graph: EGraph, ref: Ref, classes: Mapping[Ref, int]) -> Iterator[int]:
        """The classes that a node of the source may be, by what of its operands is known."""
        if ref in classes:
            return iter([graph.find(classes[ref])])
        assert not isinstance(ref, str)
        node = self.source[ref[0]]
        for source in node.inputs:
            if source in classes:
                return graph.readers(classes[source], node.op)
        for source in node.inputs:
            if not isinstance(source, str) and self._anchored(source, classes):
                below = list(self._candidates(graph, source, classes))
                return iter(dict.fromkeys(r for b in below for r in graph.readers(b, node.op)))
        return graph.classes(node.op)

    def _anchored(self, ref: Ref, classes: Mapping[Ref, int]) -> bool:
        if ref in classes or isinstance(ref, str):
            return ref in classes
        return any(self._anchored(source, classes) for source in self.source[ref[0]].inputs)

    def _at(self, graph: EGraph, ref: Ref, each: int, state: tuple[Any, Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
        """How the source below ``ref`` can be at a class, given what is known."""
        classes, sizes, known = state
        each = graph.find(each)
        if ref in classes:
            if graph.find(classes[ref]) == each:
                yield state
            return
        if isinstance(ref, str):
            shape = self.rule.shapes[ref]
            if len(shape) != len(graph.shapes[each]):
                return
            bound = _bound(sizes, known, [*zip(map(as_poly, shape), graph.shapes[each], strict=True)])
            if bound is not None:
                yield {**classes, ref: each}, *bound
            return
        wanted = self.source[ref[0]]
        for node in list(graph.nodes[each]):
            if node.op != wanted.op or len(node.inputs) != len(wanted.inputs):
                continue
            bound = _attributes(wanted, node, sizes, known)
            if bound is not None:
                yield from self._operands(graph, wanted, node, 0, ({**classes, ref: each}, *bound))

    def _operands(
        self, graph: EGraph, wanted: RuleNode, node: Node, place: int, state: tuple[Any, Any, Any]
    ) -> Iterator[tuple[Any, Any, Any]]:
        if place == len(wanted.inputs):
            yield state
            return
        for further in self._at(graph, wanted.inputs[place], node.inputs[place], state):
            yield from self._operands(graph, wanted, node, place + 1, further)

    def _holds(self, sizes: Mapping[str, int]) -> bool:
        return all(size >= 1 for size in sizes.values()) and all(
            condition.poly.symbols <= sizes.keys() and condition.evaluate(sizes) for condition in self.rule.conditions
        )

    def build(self, graph: EGraph, match: Match) -> bool:
        """Add the target and merge it with the source; whether the graph learnt anything."""
        before, made = len(graph), dict(match.classes)
        origin = 0
        for place, node in enumerate(self.source):
            if node.op in PRODUCTS:
                origin |= graph.members[graph.find(match.classes[place, 0])]
        try:
            for place, node in enumerate(self.target):
                inputs = [made[ref] if isinstance(ref, str) else made[-1, ref[0]] for ref in node.inputs]
                attributes = freeze(**{k: _value(v, match.sizes) for k, v in node.attributes.items()})
                made[-1, place] = each = graph.add(node.op, attributes, inputs, self.rule.name)
                if node.op in PRODUCTS and not graph.members[each]:
                    graph.members[each] = origin
                    if self.joins:
                        graph.joined[each] = self.rule.name
        except ShapeError:
            return False  # a precondition that says too little; nothing is concluded
        learnt = len(graph) > before
        for source, target in zip(self.rule.source.outputs, self.rule.target.outputs, strict=True):
            new = made[target] if isinstance(target, str) else made[-1, target[0]]
            old = match.classes[source]
            if graph.shapes[graph.find(old)] == graph.shapes[graph.find(new)]:
                learnt |= graph.merge(old, new)
        return learnt


def _symbols(value: Any) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _symbols(v)} if isinstance(value, tuple) else set()


def _completed(node: RuleNode) -> RuleNode:
    given = {**OPERATORS[node.op].defaults, **node.attributes}
    if given.get("padding") == "valid":
        given["padding"] = (0, 0, 0, 0)
    return RuleNode(node.op, node.inputs, given)


def _attributes(wanted: RuleNode, node: Node, sizes: Any, known: Any) -> tuple[Any, Any] | None:
    """What attributes say of sizes; None where they differ."""
    given = dict(node.attributes)
    pairs: list[tuple[Poly, int]] = []
    if given.keys() != wanted.attributes.keys():
        return None
    for name, pattern in wanted.attributes.items():
        value = given[name]
        if isinstance(pattern, tuple) != isinstance(value, tuple):
            return None
        if isinstance(pattern, tuple):
            if len(pattern) != len(value):
                return None
            if not all(isinstance(p, Poly | int) for p in pattern):
                return None
            pairs += [(as_poly(p), v) for p, v in zip(pattern, value, strict=True) if isinstance(p, Poly | int)]
        elif isinstance(pattern, Poly | int) and isinstance(value, int):
            pairs.append((as_poly(pattern), value))
        elif pattern != value:
            return None
    return _bound(sizes, known, pairs)


def _bound(sizes: dict[str, int], known: list[Any], pairs: list[tuple[Poly, int]]) -> tuple[Any, Any] | None:
    """Sizes with what ``pairs`` of polynomial and value add; None where they contradict each other."""
    fresh, later = dict(sizes), list(known)
    for poly, value in pairs:
        if poly.constant is not None:
            if poly.constant != value:
                return None
            continue
        name = str(poly)
        if name in poly.symbols:
            if fresh.setdefault(name, value) != value:
                return None
        else:
            later.append((poly, value))
    return fresh, later


def _solved(sizes: dict[str, int], known: list[tuple[Poly, int]]) -> dict[str, int] | None:
    """All sizes, where one unknown at a time follows from ``known``; None where they contradict each other."""
    solved, left = dict(sizes), list(known)
    while left:
        for item in left:
            unknown = item[0].symbols - solved.keys()
            if len(unknown) > 1:
                continue
            if unknown:
                value = _root(item[0], next(iter(unknown)), item[1], solved)
                if value is None:
                    return None
                solved[next(iter(unknown))] = value
            elif item[0].evaluate(solved) != item[1]:
                return None
            left.remove(item)
            break
        else:
            return None
    return solved


def _root(poly: Poly, name: str, value: int, sizes: Mapping[str, int]) -> int | None:
    """The size for which a polynomial that is linear in it has a value."""
    at = [poly.evaluate({**sizes, name: x}) for x in (0, 1, 2)]
    slope = at[1] - at[0]
    if not slope or at[2] - at[1] != slope or (value - at[0]) % slope:
        return None
    return int((value - at[0]) // slope)


def _value(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, Poly):
        return int(value.evaluate(sizes))
    return tuple(_value(v, sizes) for v in value) if isinstance(value, tuple) else value
