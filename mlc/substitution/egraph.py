"""An e-graph over operators, with shapes, constness and origins as analyses.

After Willsey et al., "egg: fast and extensible equality saturation" (2021): hash-consing, a union-find, congruence
restored by rebuilding. Who applies rules draws the matches of a :class:`~mlc.substitution.rewrite.Rewrite` one at a
time, in an order and within budgets of its own: on 24 products of one matrix a single round of a rule that joins two
of them has 552 matches, and all of the next round 10^5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlc.errors import ModelError
from mlc.operators import operators_where
from mlc.operators.shapes import fixed, inferred
from mlc.operators.sliding import explicit
from mlc.operators.tensor import ShapeError
from mlc.substitution.rule import Rule
from mlc.substitution.terms import LEAVES, Attributes, TermGraph, freeze, whole

__all__ = ["COMMUTATIVE", "PATIENCE", "PRODUCTS", "EGraph", "ENode", "Limits"]

#: operators that take time, and whose places in the model are kept
PRODUCTS = operators_where(lambda each: each.product)
#: operators whose operands may be exchanged, which is a law of the library
COMMUTATIVE = operators_where(lambda each: each.commutative)

#: seconds after which a search is stopped that its work should have ended long before: for whoever would wait for ever
PATIENCE = 1800.0


@dataclass(frozen=True)
class Limits:
    """When a saturation stops, whichever comes first: at so many ``nodes``, after so many ``rounds``, or when so much
    ``work`` is done (:attr:`EGraph.work`). What is found does not depend on the machine, nor on what else it does:
    ``seconds`` are there to end what hangs, and far beyond what the work takes."""

    nodes: int = 4_000
    rounds: int = 12
    work: float = 1e6
    seconds: float = PATIENCE


class ENode(NamedTuple):
    """An operator or leaf over classes."""

    op: str
    inputs: tuple[int, ...]
    attributes: Attributes

    @property
    def leaf(self) -> bool:
        """Whether it is no operator of the table."""
        return self.op in LEAVES


class EGraph:
    """Classes are numbers; :meth:`find` gives the one that stands for a number after merging. A node of a
    ``commutative`` operator is known in either order.

    ``members`` and ``below`` are sets of places in the model, as bits: of the products that a class is or is joined
    of, and of those that it was computed from when it came up. Two products of which one is computed from the other
    cannot become one.

    A size is a number, or an expression of free dimensions (:class:`mlc.sizes.Size`): one object for all that are equal
    whatever the free dimensions are. A tensor with such a size is no constant: there is none to fold when compiling.

    Whatever a class has for nodes is defined at least where the model's own term is: a rule says so of its sides. So a
    class of the model may have no node of another one that is defined in fewer places (:meth:`refine`).

    Rules are applied if their certificates are valid. With ``unproved`` that is asked for later: of whoever takes a
    graph out of it, who must check the rules that are in ``unproved`` then, by their identities.
    """

    def __init__(self, commutative: Collection[str] = COMMUTATIVE) -> None:
        self.commutative = frozenset(commutative)
        self.unproved: dict[int, Rule] | None = None
        self._parent: list[int] = []
        self._known: dict[ENode, int] = {}
        self._pending: list[int] = []
        self._shape_rule: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._sizes: list[Any] = []  # those that are free
        #: what was done so far, in comparisons of a node with an operator of a rule: the same on every machine
        self.work = 0
        #: by class: its nodes, each with the rule that brought it (None for the model's own)
        self.nodes: dict[int, dict[ENode, str | None]] = {}
        #: by class: the nodes that read it and their classes
        self.parents: dict[int, dict[ENode, int]] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.constant: dict[int, bool] = {}
        #: by class: whether all elements are defined
        self.whole: dict[int, bool] = {}
        self.members: dict[int, int] = {}
        self.below: dict[int, int] = {}
        #: by class: the rule that joined products to it, if one did
        self.joined: dict[int, str] = {}
        #: by operator: every class that has had a node of it
        self.having: dict[str, dict[int, None]] = {}

    @classmethod
    def of(cls, graph: TermGraph) -> tuple[EGraph, list[int]]:
        """The terms of a graph, and the class of each; a product is a member of its own class."""
        made, constant = cls(), graph.constant_places()
        classes: list[int] = []
        for place, term in enumerate(graph.terms):
            inputs = [classes[i] for i in term.inputs]
            if term.leaf:
                each = made.leaf(term.op, term.attributes, term.shape, inputs, constant=place in constant)
            else:
                each = made.add(term.op, term.attributes, inputs)
            if term.op in PRODUCTS and not made.members[each]:
                made.members[each] = 1 << place
            classes.append(each)
        made.rebuild()
        return made, classes

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._known)

    def find(self, each: int) -> int:
        while self._parent[each] != each:
            self._parent[each] = self._parent[self._parent[each]]
            each = self._parent[each]
        return each

    def leaf(self, op: str, attributes: Attributes, shape: tuple[int, ...], inputs: Sequence[int] = (), *,
             constant: bool = False) -> int:
        """The class of a leaf; ``inputs`` are what an opaque one is computed from, which no rule sees."""
        return self._put(ENode(op, tuple(map(self.find, inputs)), attributes), self._one(shape), constant, None)

    def add(self, op: str, attributes: Attributes, inputs: Sequence[int], rule: str | None = None) -> int:
        """The class of an operator over classes. Raises :class:`~mlc.operators.tensor.ShapeError` where they do not
        fit it. A padding is kept in numbers; one that "same" comes to is entered under this name too, so that what a
        rule says of one holds for the other."""
        node = self._node(op, attributes, inputs)
        if self._key(node) in self._known:
            return self.find(self._known[self._key(node)])
        shape = self._shape(node)
        constant = fixed(shape) and all(self.constant[i] for i in node.inputs)
        made, *others = [self._put(each, shape, constant, rule) for each in self._paddings(node)]
        for other in others:
            self.merge(made, other)
        return self.find(made)

    def known(self, op: str, attributes: Attributes, inputs: Sequence[int]) -> int | None:
        """The class of an operator over classes, if it has one."""
        each = self._known.get(self._key(self._node(op, attributes, inputs)))
        return None if each is None else self.find(each)

    def _node(self, op: str, attributes: Attributes, inputs: Sequence[int]) -> ENode:
        return ENode(op, tuple(map(self.find, inputs)), self._one(attributes) if self._sizes else attributes)

    def _put(self, node: ENode, shape: tuple[int, ...], constant: bool, rule: str | None) -> int:
        key = self._key(node)
        if key in self._known:
            return self.find(self._known[key])
        each = len(self._parent)
        self._parent.append(each)
        self._known[key] = each
        self.nodes[each], self.parents[each] = {node: rule}, {}
        self.shapes[each], self.constant[each], self.members[each] = shape, constant, 0
        self.below[each] = 0
        self.whole[each] = whole(node.op, node.attributes, (self.whole[i] for i in node.inputs))
        for source in node.inputs:
            self.parents[source][node] = each
            self.below[each] |= self.below[source] | self.members[source]
        self.having.setdefault(node.op, {})[each] = None
        return each

    def _key(self, node: ENode) -> ENode:
        """What equal nodes share."""
        if node.op in self.commutative and node.inputs[0] > node.inputs[1]:
            return ENode(node.op, node.inputs[::-1], node.attributes)
        return node

    def _shape(self, node: ENode) -> tuple[int, ...]:
        shapes = tuple(self.shapes[i] for i in node.inputs)
        key = (node.op, node.attributes, shapes)
        if key not in self._shape_rule:
            self._shape_rule[key] = self._one(inferred(node.op, shapes, dict(node.attributes)))
        return self._shape_rule[key]

    def _one(self, value: Any) -> Any:
        """A shape or attributes with the one object for each free size: what is made of equal shapes has equal ones."""
        if isinstance(value, tuple):
            return value if fixed(value) else tuple(map(self._one, value))
        if isinstance(value, int | str):
            return value
        for known in self._sizes:
            if known == value:
                return known
        self._sizes.append(value)
        return value

    def _paddings(self, node: ENode) -> list[ENode]:
        """The node with its padding in numbers, and by name if "same" comes to these numbers."""
        given = dict(node.attributes)
        if "padding" not in given:
            return [node]
        extents = self.shapes[node.inputs[0]][2:]
        window = self.shapes[node.inputs[1]][2:] if node.op == "conv2d" else given["kernel"]
        try:
            padding, same = explicit(given, extents, window), freeze(**{**given, "padding": "same"})
        except ModelError as error:
            raise ShapeError(f"a padding must be the same for every size of an image: {error}") from error
        numbers = ENode(node.op, node.inputs, freeze(**{**given, "padding": padding}))
        try:
            named = explicit(dict(same), extents, window) == padding
        except ModelError:  # for some sizes only
            named = False
        return [numbers, ENode(node.op, node.inputs, same)] if named else [numbers]

    @property
    def mark(self) -> int:
        """The number of the next class."""
        return len(self._parent)

    def refine(self, source: int, target: int, mark: int) -> bool:
        """Merge a class with what a rule says may stand for it; whether anything was learnt. A class from before
        ``mark`` that is defined elsewhere than ``source`` is left alone: it may not be replaced by it."""
        source, target = self.find(source), self.find(target)
        defined = self.whole[source]
        if target < mark and self.whole[target] != defined:
            return False
        learnt = self.merge(source, target)
        self.whole[self.find(source)] = defined
        return learnt

    def merge(self, a: int, b: int) -> bool:
        """Make two classes one; whether they were two. :meth:`rebuild` must follow."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return False
        assert self.shapes[a] == self.shapes[b], "equal tensors have equal shapes"
        a, b = min(a, b), max(a, b)  # what was there first keeps its origins
        self._parent[b] = a
        self.nodes[a].update({n: r for n, r in self.nodes.pop(b).items() if n not in self.nodes[a]})
        self.parents[a].update(self.parents.pop(b))
        self.constant[a] = self.constant[a] or self.constant[b]
        self.members[a] = self.members[a] or self.members[b]
        self.whole[a] = self.whole[a] and self.whole[b]
        self._pending.append(a)
        return True

    def rebuild(self) -> None:
        """Restore congruence: operators over equal operands are equal."""
        while self._pending:
            todo = dict.fromkeys(map(self.find, self._pending))
            self._pending.clear()
            for each in todo:
                self._repair(self.find(each))

    def _repair(self, each: int) -> None:
        renewed: dict[ENode, int] = {}
        for node, owner in list(self.parents[each].items()):
            self._known.pop(self._key(node), None)
            fresh = ENode(node.op, tuple(map(self.find, node.inputs)), node.attributes)
            owner = self.find(owner)
            rule = self.nodes[owner].pop(node, None)
            self.nodes[owner].setdefault(fresh, rule)
            key = self._key(fresh)
            twin = self._known.get(key)
            if twin is not None:
                self.merge(owner, twin)
            self._known[key] = self.find(owner)
            for source in map(self.find, fresh.inputs):  # an operand may be what was just merged
                self.parents[source].pop(node, None)
                if source != self.find(each):
                    self.parents[source][fresh] = self.find(owner)
            renewed[fresh] = self.find(owner)
            owner = self.find(owner)
            if all(self.constant[i] for i in fresh.inputs) and not self.constant[owner] and fresh.inputs:
                self.constant[owner] = fresh.op not in ("opaque",) and fixed(self.shapes[owner])
        self.parents[self.find(each)].update(renewed)

    def classes(self, op: str) -> Iterator[int]:
        """The classes with a node of an operator, oldest first."""
        found = dict.fromkeys(map(self.find, self.having.get(op, ())))
        self.having[op] = found
        return iter(list(found))

    def readers(self, each: int, op: str) -> Iterator[int]:
        """The classes of the nodes of an operator that read a class."""
        found = dict.fromkeys(self.find(o) for n, o in self.parents[self.find(each)].items() if n.op == op)
        return iter(list(found))
