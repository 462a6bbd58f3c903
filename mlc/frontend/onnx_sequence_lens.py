"""Recurrent layers over sequences of different lengths (``sequence_lens``), composed of layers over all steps.

What a layer gives for a step does not depend on later ones, so that a sequence may go on behind its end: its results
there are set to 0, and its last state is the one at its last step. Backwards, each sequence is turned round before and
after. The cell of an LSTM is known at the last step alone; a feature more, 1 behind a sequence's end, opens the gate
that keeps it and closes the one that adds to it, so that the cell stays as it is from there on.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from mlc.frontend.onnx_expand import Nodes

__all__ = ["sequences"]

#: where a sigmoid is 0 or 1 to the last bit, whatever states of at most 1 add; float16 has it
_SHUT = 1e4
#: of an LSTM's gates (input, output, forget, cell), what the further feature adds
_KEEPS = (-_SHUT, 0.0, _SHUT, 0.0)
_INPUTS = 8
#: the opset from which Squeeze and Unsqueeze have their axes as an input
_AXES_AS_INPUT = 13


def sequences(nodes: Nodes) -> list[str]:
    """``X, W, R, B, sequence_lens, initial_h, initial_c, P`` --> ``Y, Y_h, Y_c`` (the last of an LSTM alone)."""
    operator, given, inputs = nodes.node.op_type, nodes.attributes(), nodes.inputs(_INPUTS)
    lengths = inputs[4]
    inputs[4] = ""
    time = 1 if given.get("layout", 0) else 0
    steps, known = nodes.size_of(inputs[0], time), nodes.constant_of(lengths)
    if known is not None and steps is not None and (known == steps).all():
        return list(nodes(operator, *inputs, outputs=3 if operator == "LSTM" else 2, **given))
    if known is not None and (known.min() < 0 or (steps is not None and known.max() > steps)):
        most = f", {steps}" if steps is not None else ""
        raise nodes.refused(f"sequence_lens must be from 0 to the number of steps{most}, but are "
                            f"{known.min()} to {known.max()}; correct the model")
    layer = _Lengths(nodes, lengths, time)
    ways = _directions(nodes, given)
    results = [layer.run(operator, layer.of(way, inputs, len(ways)), {**given, **own}, backwards)
               for way, (backwards, own) in enumerate(ways)]
    axes = (1 + time, time, time)  # of directions: Y has them behind the steps, states in their place
    return [nodes("Concat", *each, axis=axis) if len(each) > 1 else each[0]
            for each, axis in zip(zip(*results, strict=True), axes, strict=False)]


def _directions(nodes: Nodes, given: dict[str, Any]) -> list[tuple[bool, dict[str, Any]]]:
    """For each direction, whether it runs backwards, and the attributes of a layer of that direction."""
    direction = given.get("direction", b"forward").decode()
    if direction != "bidirectional":
        return [(direction == "reverse", {"direction": "forward"})]
    names = given.get("activations", [])
    if any(given.get(f"activation_{each}") for each in ("alpha", "beta")):
        raise nodes.refused("with sequence_lens and both directions its activations must have no parameters of their "
                            "own; make a layer of each direction")
    half = len(names) // 2
    return [(backwards, {"direction": "forward", **({"activations": names[half * backwards:][:half]} if names else {})})
            for backwards in (False, True)]


class _Lengths:
    """Nodes that know how long each sequence is."""

    def __init__(self, nodes: Nodes, lengths: str, time: int) -> None:
        self._nodes, self._lengths, self._time, self._batch = nodes, lengths, time, 1 - time

    def of(self, way: int, inputs: list[str], ways: int) -> list[str]:
        """A direction's own part of the inputs."""
        if ways == 1:
            return inputs
        axes = {1: 0, 2: 0, 3: 0, 5: self._time, 6: self._time, 7: 0}
        return [self._cut(value, axes[place], way) if value and place in axes else value
                for place, value in enumerate(inputs)]

    def _cut(self, value: str, axis: int, index: int) -> str:
        constant = self._nodes.constant
        return str(self._nodes("Slice", value, constant([index]), constant([index + 1]), constant([axis])))

    def run(self, operator: str, inputs: list[str], given: dict[str, Any], backwards: bool) -> list[str]:
        """One direction's ``Y`` and last states."""
        nodes, data = self._nodes, inputs[0]
        if backwards:
            data = self._turned(data)
        keeps = operator == "LSTM" and len(nodes.node.output) > 2 and bool(nodes.node.output[2])
        x, weights = self._kept(data, inputs[1], given) if keeps else (data, inputs[1])
        every, *states = nodes(operator, x, weights, *inputs[2:], outputs=3 if operator == "LSTM" else 2, **given)
        every = self._axis("Squeeze", every)  # of directions
        last = self._last(every, inputs[5])
        every = nodes("Where", self._inside, every, nodes.constant(0.0, data))
        return [self._axis("Unsqueeze", self._turned(every) if backwards else every), last, *states[1:]]

    def _axis(self, operator: str, value: str) -> str:
        """Without the axis of the one direction, or with it."""
        nodes, axis = self._nodes, 1 + self._time
        if nodes.opset < _AXES_AS_INPUT:
            return str(nodes(operator, value, axes=[axis]))
        return str(nodes(operator, value, nodes.constant([axis])))

    def _turned(self, value: str) -> str:
        return str(self._nodes("ReverseSequence", value, self._lengths, batch_axis=self._batch, time_axis=self._time))

    @cached_property
    def _inside(self) -> str:
        """Which steps a sequence has: ``[steps, batch, 1]``, or ``[batch, steps, 1]``."""
        nodes = self._nodes
        steps = nodes.cast(nodes.counted(nodes.node.input[0], self._time, 3), np.dtype("int32"))
        return str(nodes("Less", steps, self._count))

    @cached_property
    def _count(self) -> str:
        """The lengths, along the axis of the batch."""
        shape = [1, 1, 1]
        shape[self._batch] = -1
        count = self._nodes.cast(self._lengths, np.dtype("int32"))
        return str(self._nodes("Reshape", count, self._nodes.constant(shape)))

    def _last(self, every: str, initial: str) -> str:
        """The result at each sequence's last step, ``[1, batch, hidden]`` or ``[batch, 1, hidden]``; the initial state
        of one that has none."""
        nodes, time, zero = self._nodes, self._time, self._nodes.constant([0])
        empty = nodes("Equal", self._count, nodes.constant(np.array(0, "int32")))
        found = nodes("Slice", self._turned(every), zero, nodes.constant([1]), nodes.constant([time]))
        return str(nodes("Where", empty, initial or nodes.constant(0.0, every), found))

    def _kept(self, data: str, weights: str, given: dict[str, Any]) -> tuple[str, str]:
        """Data and weights with the feature that keeps the cell."""
        nodes, names = self._nodes, [name.lower() for name in given.get("activations", ())]
        if given.get("clip") or (names and (names[0] != b"sigmoid" or not {b"sigmoid", b"tanh"}.issuperset(names))):
            raise nodes.refused("with sequence_lens its gates must be sigmoids that are not clipped, and its states at "
                                "most 1, for its last cell to be known; leave Y_c out")
        dtype = nodes.dtype_of(data)
        data = nodes("Where", self._inside, data, nodes.constant(0.0, data))  # padding may be anything
        behind = nodes.cast(nodes("Not", self._inside), dtype)
        hidden = int(given["hidden_size"]) if "hidden_size" in given else nodes.known_shape(weights, "weights")[1] // 4
        column = np.repeat(np.array(_KEEPS, dtype), hidden).reshape(1, -1, 1)
        return (nodes("Concat", data, behind, axis=2), nodes("Concat", weights, nodes.constant(column), axis=2))
