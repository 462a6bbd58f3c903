"""One rule for every rank: a size that stands for a block of axes, and the rules that come of it.

A block is proved as one axis, which is what it is if its elements are numbered in row-major order. That renumbering
may be done before an operator or after it, for the operators of :func:`_result` and where they say so; for every other
one a block is refused. ``tutorials/guides/checker.md`` has the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any, TypeAlias

from mlc.operators import OPERATORS, Requirements, Tensor, tensor_input
from mlc.operators.index import Poly, as_poly
from mlc.substitution.check.integers import need
from mlc.substitution.codec import content_hash
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.rule import Rule

__all__ = ["Axis", "Ranked", "check_blocks", "expanded", "ranked"]

#: what an axis of a rule's tensor stands for: one axis (None), a block's axes, or as many of length 1 (``True``)
Axis: TypeAlias = "tuple[str, bool] | None"
_Layout: TypeAlias = "tuple[Axis, ...]"
#: pointwise operators that others define; of the rest the specification says that an element is one of elements
_FUNCTIONS = ("gelu", "silu")
_REDUCTIONS = ("sum", "mean", "max")
#: over the last axis of the first operand, with parameters of rank 1 for it
_NORMS = ("layer_norm", "rms_norm")
_MOST_AXES = 8
_MOST_KNOWN = 1024
_known: dict[str, Ranked] = {}


def check_blocks(rule: Rule) -> None:
    """Raises :class:`CertificateError` unless both sides of a rule mean the same whatever its blocks' axes are."""
    ranked(rule)


def expanded(rule: Rule, axes: Mapping[str, Sequence[str]]) -> Rule:
    """The rule at one choice of ranks: ``axes`` names the sizes of each block's axes, which may be none.

    It has neither blocks nor a certificate. Raises :class:`CertificateError` where that is no rule, and for names that
    are not new or not distinct.
    """
    return ranked(rule).at(axes)


def ranked(rule: Rule) -> Ranked:
    """The rule, or one that says the same under another name; made once for all its ranks."""
    content = content_hash(rule)
    found = _known.get(content)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()  # which another thread may do at any time
        found = _known[content] = Ranked(rule)
    return found


class Ranked:
    """A rule with blocks, and what the axes of its tensors stand for; for errors see :func:`check_blocks`."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.source, self.target = _sides(rule)

    def rank(self, lengths: Mapping[str, int]) -> int:
        """The highest of its tensors, for blocks of so many axes."""
        return max(sum(1 if axis is None else lengths[axis[0]] for axis in layout)
                   for side in (self.source, self.target) for layout in side.values())

    def at(self, axes: Mapping[str, Sequence[str]]) -> Rule:
        """:func:`expanded`."""
        rule = self.rule
        need(axes.keys() == rule.blocks.keys(), f"sizes must be named for the blocks {', '.join(rule.blocks)}")
        names = [name for each in axes.values() for name in each]
        kept = {*rule.symbols} - axes.keys()
        need(all(isinstance(n, str) and n.isidentifier() for n in names), "sizes' names must begin with letters")
        need(len({*names, *kept}) == len(names) + len(kept), "the sizes of blocks must be named apart")
        need(all(len(each) <= _MOST_AXES for each in axes.values()), f"a block may have at most {_MOST_AXES} axes")
        whole = {block: reduce(mul, map(Poly.symbol, each), as_poly(1)) for block, each in axes.items()}
        put = _Put(axes, whole)
        shapes = {name: put.shape(shape, self.source[name]) for name, shape in rule.shapes.items()}
        conditions = tuple(c.substitute(whole) for c in rule.conditions)
        return replace(rule, shapes=shapes, source=put.graph(rule.source, self.source),
                       target=put.graph(rule.target, self.target), conditions=conditions, certificate=None, blocks={})


def _sides(rule: Rule) -> tuple[dict[Ref, _Layout], dict[Ref, _Layout]]:
    """What the axes of all tensors of both sides stand for."""
    need(all(name in rule.shapes for places in rule.blocks.values() for name in places), "ones are axes of inputs")
    given = {name: _input(rule, name) for name in rule.shapes}
    source, target = _layouts(rule, rule.source, given), _layouts(rule, rule.target, given)
    told = {axis[0] for layout in source.values() for axis in layout if axis and not axis[1]}
    need(rule.blocks.keys() <= told, "every block must be one of axes of the source's tensors")
    need([source[r] for r in rule.source.outputs] == [target[r] for r in rule.target.outputs],
         "the outputs of both sides must have a block's axes in the same places")
    return source, target


def _input(rule: Rule, name: str) -> _Layout:
    found: list[Axis] = []
    ones = {axis: block for block, places in rule.blocks.items() for each, axis in places.items() if each == name}
    for place, size in enumerate(map(as_poly, rule.shapes[name])):
        need(place not in ones or size == 1, f"axis {place} of {name} must have size 1 to stand for ones")
        whole = _whole(size, rule.blocks)
        found.append((ones[place], True) if place in ones else (whole, False) if whole else None)
    need(all(0 <= place < len(found) for place in ones), f"{name} must have the axes that stand for ones")
    return tuple(found)


def _whole(size: Any, blocks: Mapping[str, Any]) -> str | None:
    """The block that a size is, as it stands."""
    text = str(size)
    return text if text in blocks and size == Poly.symbol(text) else None


def _layouts(rule: Rule, graph: Graph, given: Mapping[str, _Layout]) -> dict[Ref, _Layout]:
    require = Requirements()
    found: dict[Ref, _Layout] = {name: given[name] for name in graph.inputs}
    tensors: dict[Ref, Tensor] = {name: tensor_input(name, rule.shapes[name]) for name in graph.inputs}
    for place, node in enumerate(graph.nodes):
        operands = [tensors[ref] for ref in node.inputs]
        results = OPERATORS[node.op](require, operands, node.attributes)
        need(len(results) == 1, f"{node.op} must have one result")
        tensors[place, 0] = results[0]
        layout = _result(node, [found[ref] for ref in node.inputs], [x.shape for x in operands], results[0].shape,
                         rule.blocks)
        need(len(layout) == results[0].rank, f"{node.op} must have an axis for each of its result")
        found[place, 0] = layout
    return found


def _result(node: Node, operands: Sequence[_Layout], shapes: Sequence[tuple[Poly, ...]], shape: tuple[Poly, ...],
            blocks: Mapping[str, Any]) -> _Layout:
    """What the axes of a result stand for. Refuses a block wherever the operator, applied to the block's axes, does not
    give the very elements that it gives of one axis, in the same order."""
    op, given = node.op, node.completed
    x: _Layout = operands[0] if operands else ()
    if OPERATORS[op].scalar is not None or op in _FUNCTIONS:
        return reduce(lambda a, b: _together(op, a, b), operands)
    if op == "reshape":  # row-major order is what a block is numbered by
        return tuple((whole, False) if (whole := _whole(size, blocks)) else None for size in shape)
    if op == "expand":
        return tuple(_repeated(axis, size, blocks) for axis, size in zip(x, shape, strict=True))
    if op == "transpose":
        return tuple(x[axis] for axis in given["perm"])  # type: ignore[union-attr, index]
    if op in ("concat", "slice", "softmax"):
        axis = _axis(given["axis"], len(x))
        need(all(each[axis] is None for each in operands), f"{op} must be along one axis, not along a block")
        need(all(_others(each, axis) == _others(x, axis) for each in operands), f"{op} must have equal other axes")
        return x
    if op == "gather":
        axis = _axis(given["axis"], len(x))
        need(x[axis] is None, "gather must be along one axis, not along a block")
        return (*x[:axis], *operands[1], *x[axis + 1:])
    if op in _NORMS:
        need(all(each[-1] is None for each in operands), f"{op} must be along one axis, not along a block")
        return x
    if op in _REDUCTIONS:
        gone = {_axis(axis, len(x)) for axis in given["axes"]}  # type: ignore[union-attr]
        if given["keepdims"]:
            return tuple((axis[0], True) if axis and place in gone else axis for place, axis in enumerate(x))
        return tuple(axis for place, axis in enumerate(x) if place not in gone)
    if op == "matmul":
        need(all(axis is None for each in operands for axis in each[-2:]), "matmul multiplies axes, no blocks")
        need(operands[0][:-2] == operands[1][:-2], "matmul must have the same batch axes on both sides")
        return x
    need(not any(axis for each in operands for axis in each), f"{op} is not known to take a block of axes")
    return (None,) * len(shape)


def _together(op: str, one: _Layout, other: _Layout) -> _Layout:
    """Of two operands: axis by axis, or one of rank 0. A block meets itself, or ones in its place."""
    if not one or not other:
        return one or other
    found: list[Axis] = []
    for left, right in zip(one, other, strict=True):
        same = left == right or (left and right and left[0] == right[0])
        need(same, f"{op} must have a block's axes in the same places of its operands")
        found.append((left[0], left[1] and right[1]) if left and right else None)
    return tuple(found)


def _repeated(axis: Axis, size: Poly, blocks: Mapping[str, Any]) -> Axis:
    if axis is None or (axis[1] and size == 1):
        return axis
    need(_whole(size, blocks) == axis[0], "expand must repeat ones as the whole block that they stand for")
    return axis[0], False


def _axis(axis: Any, rank: int) -> int:
    place = as_poly(axis).constant
    need(place is not None and -rank <= place < rank, f"an axis must be a number from {-rank} to {rank - 1}")
    assert place is not None
    return place % rank


def _others(layout: _Layout, axis: int) -> _Layout:
    return (*layout[:axis], *layout[axis + 1:])


class _Put:
    """Replaces blocks by their axes. ``whole`` is how many elements each has."""

    def __init__(self, axes: Mapping[str, Sequence[str]], whole: Mapping[str, Poly]) -> None:
        self.axes, self.whole = axes, whole

    def shape(self, sizes: Sequence[Any], layout: _Layout) -> tuple[Any, ...]:
        found: list[Any] = []
        for size, axis in zip(sizes, layout, strict=True):
            if axis is None:
                found.append(self.value(size))
            else:
                found += [as_poly(1) if axis[1] else Poly.symbol(name) for name in self.axes[axis[0]]]
        return tuple(found)

    def value(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        return value.substitute(self.whole) if isinstance(value, Poly) else value

    def places(self, layout: _Layout) -> list[list[int]]:
        """Of every axis, the axes that it stands for."""
        found: list[list[int]] = []
        at = 0
        for axis in layout:
            found.append(list(range(at, at + (1 if axis is None else len(self.axes[axis[0]])))))
            at += len(found[-1])
        return found

    def graph(self, graph: Graph, layouts: Mapping[Ref, _Layout]) -> Graph:
        return Graph(tuple(self.node(node, layouts[node.inputs[0]] if node.inputs else (), layouts[place, 0])
                           for place, node in enumerate(graph.nodes)), graph.outputs)

    def node(self, node: Node, operand: _Layout, result: _Layout) -> Node:
        given, places = {key: self.value(value) for key, value in node.attributes.items()}, self.places(operand)
        if node.op in ("reshape", "expand"):
            given["shape"] = self.shape(node.attributes["shape"], result)  # type: ignore[arg-type]
        if node.op == "transpose":
            given["perm"] = tuple(each for axis in node.attributes["perm"] for each in places[axis])  # type: ignore
        if node.op in ("concat", "slice", "softmax", "gather"):
            [given["axis"]] = places[_axis(node.completed["axis"], len(operand))]
        if node.op in _REDUCTIONS:
            axes = [each for axis in node.attributes["axes"] for each in places[_axis(axis, len(operand))]]  # type: ignore
            need(axes, f"{node.op} must have an axis that it goes over")
            given["axes"] = tuple(axes)
        return replace(node, attributes=given)
