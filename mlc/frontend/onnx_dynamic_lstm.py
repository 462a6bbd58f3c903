"""onnxruntime's ``DynamicQuantizeLSTM``: integer products at every step, of states that are quantised by their range.

The input is quantised as a whole, and so is the hidden state of a batch at each step, as onnxruntime does on one
thread; on several it may take the range of each thread's rows. The steps are written out one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_products import integer_to_float
from mlc.frontend.onnx_quantised import wrong_scale

__all__ = ["dynamic_quantize_lstm"]

#: for each direction, whether it goes backwards
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class _Weight:
    """A direction's weight of integers: names of constants."""

    integers: str
    scale: str
    zero_point: str

    def product(self, nodes: Nodes, x: Sequence[str]) -> str:
        """The product with quantised numbers, given their scale and zero point."""
        scale = nodes.product(x[1], self.scale)
        return integer_to_float(nodes, x[0], self.integers, scale, (x[2], self.zero_point), "")


def dynamic_quantize_lstm(nodes: Nodes) -> list[str]:
    """``X, W, R, B, sequence_lens, initial_h, initial_c, P, W_scale, W_zero_point, R_scale, R_zero_point``
    --> ``Y, Y_h, Y_c``."""
    x, _, recurrent, bias, lengths, *initial = nodes.inputs(12)[:7]
    backwards, clip = _checked(nodes)
    steps, (count, hidden, _) = nodes.fixed_size(x, 0, "X"), nodes.known_shape(recurrent, "R")
    if lengths and np.any(nodes.known(lengths, "sequence_lens") != steps):
        raise nodes.refused(f"sequence_lens must all be the number of steps, {steps}; leave it out")
    weights, inner = (_weights(nodes, name, place, len(backwards), hidden) for name, place in (("W", 1), ("R", 2)))
    biases = nodes.known(bias, "B").reshape(count, 2, 4 * hidden).sum(1) if bias else None
    peeps = nodes.known(nodes.inputs(12)[7], "P").reshape(count, 3, hidden) if nodes.inputs(12)[7] else None
    given = nodes("DynamicQuantizeLinear", x, outputs=3)
    results = []
    for way, back in enumerate(backwards):
        gates = weights[way].product(nodes, given)
        if biases is not None:
            gates = str(nodes("Add", gates, nodes.constant(biases[way])))
        state = [nodes("Gather", each, nodes.constant(np.array(way)), axis=0) if each else "" for each in initial]
        cell = _Cell(nodes, hidden, inner[way], clip, None if peeps is None else peeps[way])
        made = [""] * steps
        for t in reversed(range(steps)) if back else range(steps):
            state = cell.step(nodes("Gather", gates, nodes.constant(np.array(t)), axis=0), *state)
            made[t] = state[0]
        results.append((made, *state))
    every, last, cells = zip(*results, strict=True)
    rows = [_joined(nodes, each, [1, 1, -1, hidden], 1) for each in zip(*every, strict=True)]
    return [str(nodes("Concat", *rows, axis=0)), *(_joined(nodes, each, [1, -1, hidden], 0) for each in (last, cells))]


def _checked(nodes: Nodes) -> tuple[tuple[bool, ...], float]:
    """The directions and the bound of what goes into gates, 0 for none; raises :class:`ModelError`."""
    given = nodes.attributes()
    direction = given.get("direction", b"forward").decode()
    if direction not in _DIRECTIONS:
        raise nodes.refused(f"direction must be one of {', '.join(_DIRECTIONS)}, got {direction}; write the model "
                            "again")
    wanted = ["Sigmoid", "Tanh", "Tanh"]
    names = [name.decode() for name in given.get("activations", [])]
    if any(name.lower() != wanted[place % 3].lower() for place, name in enumerate(names)):
        raise nodes.refused(f"activations must be {', '.join(wanted)}, got {', '.join(names)}; quantise a layer of "
                            "these")
    if given.get("input_forget", 0):
        raise nodes.refused("input_forget must be 0; quantise a layer without it")
    return _DIRECTIONS[direction], float(given.get("clip", 0.0))


def _weights(nodes: Nodes, name: str, place: int, count: int, hidden: int) -> list[_Weight]:
    """The weights of each direction; raises :class:`ModelError` if they are invalid."""
    inputs = nodes.inputs(12)
    integers = nodes.known(inputs[place], name)
    if integers.dtype not in (np.int8, np.uint8) or integers.shape != (count, integers.shape[1], 4 * hidden):
        raise nodes.refused(f"{name} must be int8 or uint8 of {count} directions and 4 gates of {hidden}, got "
                            f"{integers.dtype} of {list(integers.shape)}; quantise the layer again")
    scale, zero = (nodes.known(inputs[6 + 2 * place + each], f"{name}_{what}")
                   for each, what in enumerate(("scale", "zero_point")))
    for array, what in ((scale, "scale"), (zero, "zero_point")):
        if array.shape not in ((count,), (count, 4 * hidden)):
            raise nodes.refused(f"{name}_{what} must be of {[count]} or {[count, 4 * hidden]}, got "
                                f"{list(array.shape)}; quantise the layer again")
    wrong = wrong_scale(scale)
    if wrong is not None:
        raise nodes.refused(f"{name}_scale must be finite and positive, got {wrong:g}; quantise the layer again")
    if zero.dtype != integers.dtype:
        raise nodes.refused(f"{name}_zero_point must be of the type of {name}, {integers.dtype}, got {zero.dtype}; "
                            "quantise the layer again")
    return [_Weight(*(nodes.constant(np.asarray(array[way])) for array in (integers, scale, zero)))
            for way in range(count)]


def _joined(nodes: Nodes, parts: Sequence[str], shape: list[int], axis: int) -> str:
    """Each direction's part in that shape, one after the other."""
    shaped = [str(nodes("Reshape", part, nodes.constant(shape))) for part in parts]
    return str(nodes("Concat", *shaped, axis=axis)) if len(shaped) > 1 else shaped[0]


@dataclass(frozen=True, eq=False)
class _Cell:
    """A direction's step; ``peeps`` are what the cell adds to the input, output and forget gates."""

    nodes: Nodes
    hidden: int
    weight: _Weight
    clip: float
    peeps: np.ndarray | None

    def step(self, gates: str, hidden: str, cell: str) -> list[str]:
        """The hidden state and the cell after it; states that are left out are zero, and so are their products."""
        nodes = self.nodes
        if hidden:
            quantised = nodes("DynamicQuantizeLinear", hidden, outputs=3)
            gates = str(nodes("Add", gates, self.weight.product(nodes, quantised)))
        sizes = [self.hidden] * 4
        into, out, forget, candidate = (
            nodes("Split", gates, nodes.constant(sizes), outputs=4, axis=-1) if nodes.opset >= 13
            else nodes("Split", gates, outputs=4, axis=-1, split=sizes))
        after = nodes("Mul", self._activated("Sigmoid", into, 0, cell), self._activated("Tanh", candidate))
        if cell:
            after = nodes("Add", nodes("Mul", self._activated("Sigmoid", forget, 2, cell), cell), after)
        opened = self._activated("Sigmoid", out, 1, after)
        return [str(nodes("Mul", opened, nodes("Tanh", after))), str(after)]

    def _activated(self, function: str, gate: str, peep: int = 0, cell: str = "") -> str:
        nodes = self.nodes
        if cell and self.peeps is not None:
            gate = nodes("Add", gate, nodes("Mul", nodes.constant(self.peeps[peep]), cell))
        if self.clip:
            gate = nodes("Clip", gate, nodes.constant(-self.clip), nodes.constant(self.clip))
        return str(nodes(function, gate))
