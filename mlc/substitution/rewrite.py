"""A rule as a rewrite on an e-graph: matching its source, and building its target."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from mlc.errors import ModelError
from mlc.operators.index import Condition, Poly, as_poly
from mlc.operators.tensor import ShapeError
from mlc.substitution.applicable import Signature, signatures
from mlc.substitution.compose import compose
from mlc.substitution.egraph import COMMUTATIVE, PRODUCTS, EGraph, ENode
from mlc.substitution.graph import Graph, Node, Ref, concrete
from mlc.substitution.rule import Rule, symbols_of
from mlc.substitution.terms import freeze
from mlc.substitution.trust import trusted

__all__ = ["Match", "Rewrite", "relevant"]


@dataclass(frozen=True)
class Match:
    """The classes that a rule's inputs and source nodes are, and its sizes: numbers, or expressions of free dimensions
    (:class:`mlc.sizes.Size`) for whose every size the precondition holds."""

    classes: Mapping[Ref, int]
    sizes: Mapping[str, int]


class Rewrite:
    """A rule made ready, in one direction. ``turned``: the target is looked for.

    Raises ValueError for a rule without a certificate; one whose certificate is not valid builds nothing. Where a rule
    is ``assumed``, its certificate is not asked for: what follows from it is told, and nothing is compiled.
    """

    def __init__(self, rule: Rule, *, turned: bool = False, assumed: bool = False) -> None:
        if rule.certificate is None and not assumed:
            raise ValueError(f"the rule {rule.name} has no certificate: only proved rules are applied")
        self.proved, self.turned, self._assumed = rule, turned, assumed
        self.rule = rule = replace(rule.turned, name=f"{rule.name} turned") if turned else rule
        #: the operators that it needs and those that it brings, with their ranks
        self.needs, self.brings = signatures(rule.source, rule.shapes), signatures(rule.target, rule.shapes)
        self.source, self.target = ([replace(node, attributes=node.completed) for node in side.nodes]
                                    for side in (rule.source, rule.target))
        self._asked = [_asked(node) for node in self.source]
        self._shapes = {name: tuple(map(_form, shape)) for name, shape in rule.shapes.items()}
        self._wanted = symbols_of(tuple(v for node in self.target for v in node.attributes.values()))
        #: whether it joins several products that are all of one kind, which it could do in any order
        outputs = [self.source[o[0]].op for o in rule.source.outputs if not isinstance(o, str)]
        self.joins = len(outputs) > 1 and len(set(outputs)) == 1 and outputs[0] in PRODUCTS

    def matches(self, graph: EGraph) -> Iterator[Match]:
        """Every way in which the source is in the graph and the precondition holds, oldest classes first."""
        outputs = list(self.rule.source.outputs)
        if not any(isinstance(output, str) for output in outputs):
            yield from self._outputs(graph, outputs, {}, {}, [])

    def _admits(self, graph: EGraph, ref: Ref, each: int) -> bool:
        """Whether an input or output may be a class whatever the rest is."""
        return True

    def _outputs(
        self, graph: EGraph, left: list[Ref], classes: dict[Ref, int], sizes: dict[str, int], known: list[Any]
    ) -> Iterator[Match]:
        if not left:
            try:
                solved = _solved(sizes, known)
                holds = solved is not None and self._wanted <= solved.keys() and self._holds(solved)
            except ModelError:  # for some sizes of a free dimension, and for others it may not
                return
            if solved is not None and holds:
                yield Match(classes, solved)
            return
        output, rest = left[0], left[1:]
        for each in self._candidates(graph, output, classes):
            if not self._admits(graph, output, each):
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
            shape = self._shapes[ref]
            if len(shape) != len(graph.shapes[each]) or not self._admits(graph, ref, each):
                return
            bound = _bound(sizes, known, zip(shape, graph.shapes[each], strict=True))
            if bound is not None:
                yield {**classes, ref: each}, *bound
            return
        wanted = self.source[ref[0]]
        nodes = list(graph.nodes[each])
        graph.work += len(nodes)
        for node in nodes:
            if node.op != wanted.op or len(node.inputs) != len(wanted.inputs):
                continue
            bound = _attributes(self._asked[ref[0]], node, sizes, known)
            if bound is not None:
                given = ({**classes, ref: each}, *bound)
                yield from self._operands(graph, wanted.inputs, node.inputs, given)
                exchanged = node.op in graph.commutative and node.inputs[0] != node.inputs[1]
                if exchanged and ref[0] in self._exchanged:
                    yield from self._operands(graph, wanted.inputs, node.inputs[::-1], given)

    def _operands(
        self, graph: EGraph, wanted: tuple[Ref, ...], given: tuple[int, ...], state: tuple[Any, Any, Any]
    ) -> Iterator[tuple[Any, Any, Any]]:
        if not wanted:
            yield state
            return
        for further in self._at(graph, wanted[0], given[0], state):
            yield from self._operands(graph, wanted[1:], given[1:], further)

    def _holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes are such as the proof is about: the precondition holds, and both sides are well-formed as
        the rule says them. A source may be found where it is not: ``add(x, y)`` of equal sizes where one broadcasts."""
        return all(size >= 1 for size in sizes.values()) and all(
            condition.poly.symbols <= sizes.keys() and condition.evaluate(sizes)
            for condition in (*self.rule.conditions, *self._demands)
        )

    @cached_property
    def _exchanged(self) -> frozenset[int]:
        """The places of operators whose operands are tried in both orders: it says something else of each."""
        return frozenset(place for place, node in enumerate(self.source)
                         if node.op in COMMUTATIVE and _text(self.rule, place) != _text(self.rule))

    @cached_property
    def _demands(self) -> tuple[Condition, ...]:
        """What the operators of both sides demand of sizes; what never holds where a side is ill-formed."""
        try:
            both = [d for side in (self.rule.source, self.rule.target) for d in compose(side, self.rule.shapes)[1]]
        except ShapeError:
            return (Condition(as_poly(-1), ">="),)
        return tuple(dict.fromkeys(both))

    @cached_property
    def _trusted(self) -> bool:
        """Whether the certificate is valid, and for this direction."""
        return self._assumed or (trusted(self.proved) and self._claims)

    @cached_property
    def _claims(self) -> bool:
        """Whether the certificate, valid or not, says what it claims, and claims it for this direction."""
        certificate = self.proved.certificate
        if not isinstance(certificate, Mapping):
            return False
        whole = certificate.get("whole")
        said = isinstance(whole, Mapping) and all(isinstance(whole.get(way), list) for way in ("forward", "backward"))
        return said and "backward" in certificate and not (self.turned and certificate["backward"] is None)

    def _admitted(self, graph: EGraph) -> bool:
        """Whether it may be applied: its certificate is valid, or will be asked for."""
        if graph.unproved is None or self._assumed or not self._claims:
            return self._trusted
        graph.unproved[id(self.proved)] = self.proved
        return True

    @cached_property
    def _whole(self) -> tuple[str, ...]:
        """The inputs of which the target reads elements that the source does not: all must be defined."""
        if self._assumed:
            return ()
        assert self.proved.certificate is not None
        return tuple(self.proved.certificate["whole"]["backward" if self.turned else "forward"])

    def build(self, graph: EGraph, match: Match) -> bool:
        """Add the target and merge it with the source; whether the graph learnt anything. What it knows is not asked of
        the rule, so that a certificate is asked for only where something rests on it."""
        try:
            attributes = [freeze(**{k: concrete(v, match.sizes) for k, v in node.attributes.items()})
                          for node in self.target]
        except ShapeError:
            return False
        if self._told(graph, match, attributes) or not self._admitted(graph) or not all(
                graph.whole[graph.find(match.classes[name])] for name in self._whole if name in match.classes):
            return False
        before, mark, made = len(graph), graph.mark, dict(match.classes)
        origin = 0
        for place, node in enumerate(self.source):
            if node.op in PRODUCTS:
                origin |= graph.members[graph.find(match.classes[place, 0])]
        try:
            for place, node in enumerate(self.target):
                inputs = [made[ref] if isinstance(ref, str) else made[-1, ref[0]] for ref in node.inputs]
                made[-1, place] = each = graph.add(node.op, attributes[place], inputs, self.rule.name)
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
                learnt |= graph.refine(old, new, mark)
        return learnt

    def _told(self, graph: EGraph, match: Match, attributes: Sequence[Any]) -> bool:
        """Whether the graph has the target in the classes of the source, so that :meth:`build` would change nothing."""
        made = dict(match.classes)
        for place, (node, given) in enumerate(zip(self.target, attributes, strict=True)):
            inputs = [made[ref] if isinstance(ref, str) else made[-1, ref[0]] for ref in node.inputs]
            each = graph.known(node.op, given, inputs)
            if each is None or (node.op in PRODUCTS and not graph.members[each]):
                return False
            made[-1, place] = each
        return all(graph.find(made[target] if isinstance(target, str) else made[-1, target[0]])
                   == graph.find(match.classes[source])
                   for source, target in zip(self.rule.source.outputs, self.rule.target.outputs, strict=True))


def _text(rule: Rule, exchanged: int | None = None) -> str:
    """A text of a rule that is the same where it says the same: whatever the names of its inputs, and whatever the
    order in which the target adds or joins. The operands of the source's node ``exchanged`` are taken the other way
    round."""
    names: dict[str, str] = {}

    def text(graph: Graph, ref: Ref) -> str:
        if isinstance(ref, str):
            return names.setdefault(ref, f"x{len(names)}")
        node = graph.nodes[ref[0]]
        turned = graph is rule.source and ref[0] == exchanged
        operands = [text(graph, each) for each in (node.inputs[::-1] if turned else node.inputs)]
        if graph is rule.target and node.op in (*COMMUTATIVE, "concat"):
            operands.sort()
        attributes = ",".join(f"{k}={_plain(v)}" for k, v in sorted(node.attributes.items()))
        return f"{node.op}[{attributes}]({';'.join(operands)})"

    sides = [";".join(text(graph, output) for output in graph.outputs) for graph in (rule.source, rule.target)]
    shapes = ";".join(_plain(tuple(rule.shapes[name])) for name in names)
    known = {name: f"s{place}" for place, name in enumerate(dict.fromkeys(re.findall(r"[a-z_]+\d+", shapes)))}
    return re.sub(r"[a-z_]+\d+", lambda found: known.get(found[0], found[0]), f"{sides} {shapes}")


def _plain(value: Any) -> str:
    return f"({','.join(map(_plain, value))})" if isinstance(value, tuple) else str(value)


class _Form(NamedTuple):
    """A polynomial, the number that it is, and the symbol that it is."""

    poly: Poly
    number: int | None
    symbol: str | None


def _form(value: Poly | int) -> _Form:
    poly = as_poly(value)
    name = str(poly)
    return _Form(poly, poly.constant, name if name in poly.symbols else None)


def _asked(node: Node) -> tuple[tuple[str, Any], ...]:
    """What a node asks of attributes, by name: numbers as forms, and None for what no attribute can be."""
    numbers = (Poly, int)

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(_form, value)) if all(isinstance(each, numbers) for each in value) else None
        return _form(value) if isinstance(value, numbers) else value

    return tuple(sorted(((name, of(value)) for name, value in node.attributes.items()), key=lambda each: each[0]))


def _attributes(asked: tuple[tuple[str, Any], ...], node: ENode, sizes: Any, known: Any) -> tuple[Any, Any] | None:
    """What attributes say of sizes; None where they differ."""
    if len(asked) != len(node.attributes):
        return None
    pairs: list[tuple[_Form, int]] = []
    for (name, pattern), (other, value) in zip(asked, node.attributes, strict=True):
        if name != other:
            return None
        if isinstance(pattern, _Form):
            if isinstance(value, str | tuple):
                return None
            pairs.append((pattern, value))
        elif isinstance(pattern, tuple):
            if not isinstance(value, tuple) or len(pattern) != len(value):
                return None
            pairs += zip(pattern, value, strict=True)
        elif pattern != value:
            return None
    return _bound(sizes, known, pairs) if pairs else (sizes, known)


def _bound(
    sizes: dict[str, int], known: list[Any], pairs: Iterable[tuple[_Form, int]]
) -> tuple[Any, Any] | None:
    """Sizes with what ``pairs`` of polynomial and value add; None where they contradict each other."""
    fresh, later = dict(sizes), known
    for (poly, number, symbol), value in pairs:
        if number is not None:
            if number != value:
                return None
        elif symbol is not None:
            if fresh.setdefault(symbol, value) != value:
                return None
        else:
            later = [*later, (poly, value)]
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
    found: int = (value - at[0]) // slope
    return found


_Some = TypeVar("_Some", bound=Rewrite)


def relevant(rewrites: Sequence[_Some], present: Iterable[Signature]) -> list[_Some]:
    """Those that can apply where operators are ``present``, or to what others of them make of that."""
    known, found = _widened(present), [False] * len(rewrites)
    changed = True
    while changed:
        changed = False
        for place, one in enumerate(rewrites):
            if not found[place] and one.needs <= known:
                found[place] = changed = True
                known |= _widened(one.brings)
    return [one for place, one in enumerate(rewrites) if found[place]]


def _widened(found: Iterable[Signature]) -> set[Signature]:
    """``found``, each also for a rank that is not known."""
    return {place for op, rank in found for place in ((op, rank), (op, None))}
