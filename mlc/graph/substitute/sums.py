"""Orders the terms of sums such that rules can join them.

A rule sees two terms of a sum only where they stand next to each other: the products of one tensor must come together
before they can become one, and so must the constants. Every order of a sum follows from commutation and association,
step by step, but the steps are far too many to keep them all: of twenty terms there are 10^25 orders. So one order is
put beside the model's own: products of one tensor first, in pairs of pairs, and constants last. Whether association
holds for the shapes that meet is asked of the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import TypeAlias

from mlc.graph.substitute.match import Pattern
from mlc.sizes import usual_size
from mlc.substitution.egraph import COMMUTATIVE, PRODUCTS, EGraph
from mlc.substitution.rewrite import Rewrite
from mlc.substitution.terms import INPUT, TermGraph, freeze

__all__ = ["Arranged", "Shared", "arrange", "shared"]

#: sums of more terms stay in the model's order: no network has them
_MOST_TERMS = 256
#: a term of a sum by its place, or the sum of two
Tree: TypeAlias = "int | tuple[Tree, Tree]"


@dataclass(frozen=True)
class Shared:
    """The classes of terms of one sum that are made of one tensor, some by products: ``image`` is its class."""

    image: int
    terms: tuple[int, ...]


@dataclass(frozen=True)
class Arranged:
    """The products of one tensor in sums; the rule for each sum that was put in order; the most products of those."""

    shared: tuple[Shared, ...]
    laws: tuple[str, ...]
    products: int


def arrange(egraph: EGraph, graph: TermGraph, classes: Sequence[int], rules: Sequence[Pattern]) -> Arranged:
    """Put the sums of ``graph``, whose terms are ``classes``, in order."""
    reading, laws, products = _Reading(graph), _Laws(rules), 0
    found, said = list[Shared](), list[str]()
    for root, terms in reading.sums():
        op, tree, groups = graph.terms[root].op, reading.tree(root), reading.groups(terms)
        found += [Shared(egraph.find(classes[image]), tuple(classes[each] for each in group))
                  for image, group in groups.items() if op == "add" and len(group) > 1]
        ordered = reading.ordered(terms, groups)
        if ordered is None or _unordered(ordered) == _unordered(tree):
            continue
        law = laws.associative(op, [graph.terms[each].shape for each in terms])
        if law is not None:
            egraph.merge(classes[root], _built(egraph, op, ordered, classes, law))
            said.append(law)
            products = max(products, sum(map(len, groups.values())))
    egraph.rebuild()
    return Arranged(tuple(found), tuple(said), products)


def shared(graph: TermGraph) -> list[list[int]]:
    """The places of terms of one sum that are made of one tensor."""
    reading = _Reading(graph)
    return [group for root, terms in reading.sums() if graph.terms[root].op == "add"
            for group in reading.groups(terms).values() if len(group) > 1]


def _built(egraph: EGraph, op: str, tree: Tree, classes: Sequence[int], law: str) -> int:
    if isinstance(tree, int):
        return classes[tree]
    return egraph.add(op, (), [_built(egraph, op, part, classes, law) for part in tree], law)


def _unordered(tree: Tree) -> str:
    """A text of a tree whatever the order of operands."""
    return str(tree) if isinstance(tree, int) else f"({' '.join(sorted(map(_unordered, tree)))})"


class _Reading:
    """The sums of a graph, and its other commutative operators."""

    def __init__(self, graph: TermGraph) -> None:
        self._terms, self._outputs = graph.terms, set(graph.outputs)
        self._readers, self._constant = graph.readers(), graph.constant_places()

    def sums(self) -> Iterator[tuple[int, list[int]]]:
        """``(root, terms)`` of all that are no part of a longer one."""
        for place, term in enumerate(self._terms):
            if term.op in COMMUTATIVE and place not in self._constant and not any(
                self._inner(place, reader) for reader in self._readers[place]
            ) and self._short(place):
                yield place, list(self._leaves(self.tree(place)))

    def _short(self, root: int) -> bool:
        """Whether a sum has few enough terms to be read one within the other."""
        met, sums = 0, [root]
        while sums and met < _MOST_TERMS:
            place = sums.pop()
            met += 1
            sums += [each for each in self._terms[place].inputs if self._inner(each, place)]
        return not sums

    def _inner(self, place: int, reader: int) -> bool:
        alone = len(self._readers[place]) == 1 and place not in self._outputs
        return alone and self._terms[reader].op == self._terms[place].op and place not in self._constant

    def tree(self, root: int) -> Tree:
        left, right = (self.tree(each) if self._inner(each, root) else each for each in self._terms[root].inputs)
        return left, right

    def _leaves(self, tree: Tree) -> Iterator[int]:
        if isinstance(tree, int):
            yield tree
        else:
            for part in tree:
                yield from self._leaves(part)

    def groups(self, terms: Sequence[int]) -> dict[int, list[int]]:
        """The terms that are products by constants, by the tensor that they are made of; this itself and multiples of
        it with them."""
        made = {self._image(each) for each in terms if self._product(each)}
        found: dict[int, list[int]] = {}
        for each in terms:
            if each not in self._constant and self._image(each) in made:
                found.setdefault(self._image(each), []).append(each)
        return found

    def ordered(self, terms: Sequence[int], groups: dict[int, list[int]]) -> Tree | None:
        """Products, then others, then constants; None where nothing is gained."""
        constants = [each for each in terms if each in self._constant]
        joined = {each for group in groups.values() for each in group}
        if len(constants) < 2 and len(joined) < 2:
            return None
        others = [each for each in terms if each not in joined and each not in self._constant]
        parts = [_balanced(group) for group in groups.values()]
        found: list[Tree] = [_balanced(parts)] if parts else []
        found += others
        if constants:
            found.append(_chain(constants))
        return _chain(found)

    def _product(self, place: int) -> bool:
        term = self._terms[place]
        if term.op == "mul" and any(source in self._constant for source in term.inputs):
            return any(source not in self._constant and self._product(source) for source in term.inputs)
        return term.op in PRODUCTS and term.inputs[1] in self._constant

    def _image(self, place: int) -> int:
        """The term that a product with constants is ultimately computed from, through multiples and matrix products;
        others are their own."""
        term = self._terms[place]
        if term.op == "mul" and any(source in self._constant for source in term.inputs):
            other = next((source for source in term.inputs if source not in self._constant), place)
            return self._image(other) if self._product(other) else other
        if not self._product(place):
            return place
        source = term.inputs[0]
        inner = term.op == "matmul" and self._terms[source].op == "matmul" and self._product(source)
        return self._image(source) if inner else source


def _balanced(parts: Sequence[Tree]) -> Tree:
    """Sums of two, sums of two of those: few steps from the first to the last."""
    while len(parts) > 1:
        pairs: list[Tree] = [(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(parts) - len(parts) % 2:]]
    return parts[0]


def _chain(parts: Sequence[Tree]) -> Tree:
    whole = parts[0]
    for part in parts[1:]:
        whole = (whole, part)
    return whole


class _Laws:
    """The shapes for which rules say that operators associate."""

    def __init__(self, rules: Sequence[Pattern]) -> None:
        self._rules: dict[tuple[str, int], list[Pattern]] = {}
        for rule in rules:
            nodes = [*rule.rule.source.nodes, *rule.rule.target.nodes]
            ranks = {len(shape) for shape in rule.rule.shapes.values()}
            if len(nodes) == 4 and len(rule.rule.shapes) == 3 and len(ranks) == 1 and len({n.op for n in nodes}) == 1:
                self._rules.setdefault((nodes[0].op, ranks.pop()), []).append(rule)
        self._known: dict[tuple[object, ...], str | None] = {}

    def associative(self, op: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A rule by which terms of these shapes can be taken in any order, if others where they are needed are too."""
        met = set(shapes)
        while len(more := met | {_broadcast(a, b) for a in met for b in met}) > len(met):
            met = more
        names = [self._holds(op, three) for three in combinations_with_replacement(sorted(met, key=_order), 3)]
        return names[0] if all(names) else None

    def _holds(self, op: str, shapes: tuple[tuple[int, ...], ...]) -> str | None:
        """The rule that makes the three ways to combine three tensors one."""
        key = (op, *shapes)
        if key in self._known:
            return self._known[key]
        graph = EGraph()
        x, y, z = (graph.leaf(INPUT, freeze(id=i), shape) for i, shape in enumerate(shapes))
        ways = [graph.add(op, (), (graph.add(op, (), (a, b)), c)) for a, b, c in ((x, y, z), (x, z, y), (y, z, x))]
        name = None
        for rule in self._rules.get((op, len(shapes[0])), ()):
            law = _unconditional(rule)
            if any([law.build(graph, match) for match in list(law.matches(graph))]):
                name = rule.rule.name
            graph.rebuild()
        one = len({graph.find(way) for way in ways}) == 1
        self._known[key] = name if one else None
        return self._known[key]


@cache
def _unconditional(rule: Pattern) -> Rewrite:
    """The rule as it matches whatever is constant."""
    return Rewrite(rule.proved, turned=rule.turned)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast shape of shapes that broadcast."""
    rank = max(len(a), len(b))
    a, b = ((1,) * (rank - len(each)) + each for each in (a, b))
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def _order(shape: tuple[int, ...]) -> tuple[object, ...]:
    return tuple((usual_size(size), str(size)) for size in shape)
