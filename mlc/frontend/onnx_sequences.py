"""Sequences and optionals of known length inside a graph: they become lists of tensor names while the graph is read.

What makes them stays a node until nobody reads it; what takes tensors out of them becomes nodes of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np
import onnx

from mlc.frontend.onnx_control import copied, stacked
from mlc.frontend.onnx_expand import Nodes, expanded

__all__ = ["resolved"]

#: the names of a sequence's tensors
Held = list[str]
_AXES_AS_INPUT = 13


def resolved(
    nodes: list[onnx.NodeProto], made_of: Callable[[onnx.NodeProto], Nodes], outputs: Iterable[str] = ()
) -> tuple[list[onnx.NodeProto], Mapping[str, np.ndarray], Mapping[str, Held | None]]:
    """The nodes without what takes tensors out of sequences, new constants, and what sequences and optionals among
    ``outputs`` hold, of those of which it is known; ``made_of`` is a node's helper.

    The same list where there is nothing to resolve. Raises :class:`mlc.errors.ModelError` for places outside of a
    sequence.
    """
    kinds = _KINDS.keys() - {"Identity"}
    if not any(node.op_type in kinds and node.domain in ("", "ai.onnx") for node in nodes):
        return nodes, {}, {}
    reader, kept, constants, changed = _Reader(), list[onnx.NodeProto](), dict[str, np.ndarray](), False
    for node in nodes:
        helper = made_of(node)
        expand = reader.read(helper) if node.domain in ("", "ai.onnx") else None
        if expand is None:
            kept.append(node)
            continue
        made, more = expanded(helper, expand)
        kept.extend(made)
        constants.update(more)
        changed = True
        for each in made:
            reader.read(made_of(each))
    found = {name: held for name in outputs for held in reader.held(name)}
    return (kept, constants, found) if changed else (nodes, {}, found)


class _Reader:
    """Tracks the contents of sequences and optionals, node by node."""

    def __init__(self) -> None:
        self._sequences: dict[str, Held] = {}
        self._optionals: dict[str, str | None] = {}

    def read(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        """The replacement of a node that produces tensors; None for one that produces a sequence, which is recorded,
        and for others."""
        rule = _KINDS.get(nodes.node.op_type)
        return rule(self, nodes) if rule is not None else None

    def held(self, name: str) -> list[Held | None]:
        """The contents of a sequence or an optional, if known; None for an empty optional."""
        if name in self._sequences:
            return [self._sequences[name]]
        if name in self._optionals:
            tensor = self._optionals[name]
            return [[tensor] if tensor is not None else None]
        return []

    def _held(self, nodes: Nodes) -> Held | None:
        return self._sequences.get(nodes.node.input[0]) if nodes.node.input else None

    # what makes a sequence

    def construct(self, nodes: Nodes) -> None:
        self._sequences[nodes.node.output[0]] = list(nodes.node.input)

    def insert(self, nodes: Nodes) -> None:
        held = self._held(nodes)
        place = _place(nodes, 2, len(held), True) if held is not None else None
        if held is not None and place is not None:
            self._sequences[nodes.node.output[0]] = [*held[:place], nodes.node.input[1], *held[place:]]

    def erase(self, nodes: Nodes) -> None:
        held = self._held(nodes)
        place = _place(nodes, 1, len(held), False) if held is not None else None
        if held is not None and place is not None:
            self._sequences[nodes.node.output[0]] = [*held[:place], *held[place + 1:]]

    def same(self, nodes: Nodes) -> None:
        name, output = nodes.node.input[0], nodes.node.output[0]
        if name in self._sequences:
            self._sequences[output] = self._sequences[name]
        if name in self._optionals:
            self._optionals[output] = self._optionals[name]

    def optional(self, nodes: Nodes) -> None:
        given = nodes.inputs(1)[0]
        self._optionals[nodes.node.output[0]] = given or None
        if given in self._sequences:
            self._sequences[nodes.node.output[0]] = self._sequences[given]

    # what takes tensors out of one, or puts them in

    def split(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        x, given = nodes.inputs(2)
        attributes = nodes.attributes()
        axis, keeps = int(attributes.get("axis", 0)), bool(attributes.get("keepdims", 1)) or bool(given)
        known = nodes.constant_of(given) if given else np.array(1)
        size = nodes.size_of(x, axis)
        if known is None or size is None:
            return None
        if known.ndim:
            parts = known.astype("int64").tolist()
            if sum(parts) != size or min(parts) < 0:
                raise nodes.refused(f"its parts must add up to the {size} of axis {axis}, got {parts}; correct the "
                                    "model")
        else:
            step = int(known)
            if step < 1:
                raise nodes.refused(f"its parts must be of at least 1, got {step}; correct the model")
            parts = [min(step, size - begin) for begin in range(0, size, step)]

        def made(nodes: Nodes) -> list[str]:
            ends = np.cumsum([0, *parts]).tolist()
            pieces = [nodes("Slice", x, nodes.constant([begin]), nodes.constant([end]), nodes.constant([axis]))
                      for begin, end in pairwise(ends)] if len(parts) > 1 else [x]
            return [nodes("SequenceConstruct", *(piece if keeps else _squeezed(nodes, piece, axis)
                                                 for piece in pieces))]

        return made

    def at(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        held = self._held(nodes)
        place = _place(nodes, 1, len(held), False) if held is not None else None
        return None if held is None or place is None else lambda nodes: [nodes("Identity", held[place])]

    def length(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        held = self._held(nodes)
        return None if held is None else lambda nodes: [nodes.constant(np.array(len(held)))]

    def concat(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        held, attributes = self._held(nodes), nodes.attributes()
        if held is None:
            return None
        if not held:
            raise nodes.refused("its sequence must hold a tensor, but is empty; correct the model")
        axis = int(attributes["axis"])
        if attributes.get("new_axis", 0):
            return lambda nodes: [stacked(nodes, held, axis)]
        return lambda nodes: [nodes("Concat", *held, axis=axis)]

    def map(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        """A body for each element, of sequences that are as long, beside tensors that all have."""
        first, *others = nodes.node.input
        if first not in self._sequences:
            return None
        count, body = len(self._sequences[first]), nodes.attributes()["body"]
        for name in others:
            if len(self._sequences.get(name, range(count))) != count:
                raise nodes.refused(f"its sequences must be of one length, got {count} and "
                                    f"{len(self._sequences[name])}; correct the model")

        def made(nodes: Nodes) -> list[str]:
            results = []
            for number in range(count):
                given = [self._sequences[name][number] if name in self._sequences else name
                         for name in (first, *others)]
                names = dict(zip((value.name for value in body.input), given, strict=True))
                results.append(copied(nodes, body, names, str(number)))
            return [nodes("SequenceConstruct", *each) for each in zip(*results, strict=True)]

        return made if count else None

    def element(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        name = nodes.node.input[0]
        if name in self._sequences:
            self._sequences[nodes.node.output[0]] = self._sequences[name]
            return None
        held = self._optionals.get(name, name)
        if held is None:
            raise nodes.refused("its optional must hold a tensor, but holds nothing; correct the model")
        known = name in self._optionals or name in nodes.ranked or nodes.constant_of(name) is not None
        return (lambda nodes: [nodes("Identity", held)]) if known else None

    def has(self, nodes: Nodes) -> Callable[[Nodes], list[str]] | None:
        name = nodes.inputs(1)[0]
        known = not name or name in self._optionals or name in self._sequences or name in nodes.ranked
        there = bool(name) and self._optionals.get(name, name) is not None
        return (lambda nodes: [nodes.constant(np.array(there))]) if known else None


def _place(nodes: Nodes, place: int, length: int, end: bool) -> int | None:
    """The place in a sequence that an input says, the last one (``end``: behind it) where it is left out; None where it
    is not known."""
    given = nodes.inputs(place + 1)[place]
    most = length if end else length - 1
    if not given:
        return most if most >= 0 else None
    known = nodes.constant_of(given)
    if known is None:
        return None
    number = int(known.reshape(-1)[0])
    number = number + length if number < 0 else number
    if not 0 <= number <= most:
        raise nodes.refused(f"its position must be within a sequence of {length}, got {int(known.reshape(-1)[0])}; "
                            "correct the model")
    return number


def _squeezed(nodes: Nodes, value: str, axis: int) -> str:
    if nodes.opset < _AXES_AS_INPUT:
        return str(nodes("Squeeze", value, axes=[axis]))
    return str(nodes("Squeeze", value, nodes.constant([axis])))


_KINDS: Mapping[str, Callable[[_Reader, Nodes], Callable[[Nodes], list[str]] | None]] = {
    "ConcatFromSequence": _Reader.concat, "Identity": _Reader.same, "Optional": _Reader.optional,
    "OptionalGetElement": _Reader.element, "OptionalHasElement": _Reader.has, "SequenceAt": _Reader.at,
    "SequenceConstruct": _Reader.construct, "SequenceEmpty": _Reader.construct, "SequenceErase": _Reader.erase,
    "SequenceInsert": _Reader.insert, "SequenceLength": _Reader.length, "SequenceMap": _Reader.map,
    "SplitToSequence": _Reader.split,
}
