"""A helper to write ONNX graphs node by node, with seeded random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = ["GraphWriter"]

_OPSET = 20


class GraphWriter:
    """An ONNX graph under construction; every method that adds nodes returns the name of its result."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self.rng = name, np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        result = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [result], **attributes))
        return result

    def constant(self, values: np.ndarray) -> str:
        from onnx import numpy_helper

        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def weight(self, *shape: int, fan_in: int, gain: float = 1.0) -> str:
        return self.constant((self.rng.standard_normal(shape) * math.sqrt(gain / fan_in)).astype(np.float32))

    def bias(self, size: int) -> str:
        return self.constant((0.1 * self.rng.standard_normal(size)).astype(np.float32))

    def conv(self, x: str, inputs: int, outputs: int, kernel: int | Sequence[int] = 1, stride: int | Sequence[int] = 1,
             groups: int = 1, relu: bool = True, gain: float = 2.0, bias: bool = True, dilation: int = 1,
             padded: bool = True) -> str:
        """A convolution over as many axes as ``kernel`` has extents (one number: over two), ``padded`` so that a stride
        of 1 keeps the image's size."""
        extents = [kernel] * 2 if isinstance(kernel, int) else list(kernel)
        strides = [stride] * len(extents) if isinstance(stride, int) else list(stride)
        fan_in = inputs // groups * math.prod(extents)
        filters = self.weight(outputs, inputs // groups, *extents, fan_in=fan_in, gain=gain)
        more = {"dilations": [dilation] * len(extents)} if dilation > 1 else {}
        found = self.node("Conv", x, filters, *([self.bias(outputs)] if bias else []), kernel_shape=extents,
                          group=groups, strides=strides, pads=_around(extents, padded * dilation), **more)
        return self.node("Relu", found) if relu else found

    def pool(self, op: str, x: str, kernel: int = 3, stride: int = 1, padded: bool = True) -> str:
        extents = [kernel] * 2
        return self.node(op, x, kernel_shape=extents, strides=[stride] * 2, pads=_around(extents, int(padded)))

    def normalised(self, x: str, channels: int) -> str:
        """A batch normalisation with statistics of its own."""
        given = [self.rng.uniform(0.5, 1.5, channels), 0.1 * self.rng.standard_normal(channels),
                 0.1 * self.rng.standard_normal(channels), self.rng.uniform(0.5, 1.5, channels)]
        return self.node("BatchNormalization", x, *(self.constant(values.astype(np.float32)) for values in given),
                         epsilon=1e-5)

    def dense(self, x: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        product = self.node("MatMul", x, self.weight(inputs, outputs, fan_in=inputs, gain=gain))
        return self.node("Add", product, self.bias(outputs))

    def model(self, inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
        from onnx import TensorProto, checker, helper

        def values(border: Mapping[str, Sequence[int]]) -> list[Any]:
            return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in border.items()]

        graph = helper.make_graph(self.nodes, self.name, values(inputs), values(outputs), self.weights)
        made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", _OPSET)])
        checker.check_model(made)
        return made


def _around(extents: Sequence[int], times: int) -> list[int]:
    """The padding that a window needs on either side of an image, ``times`` over."""
    return [extent // 2 * times for extent in extents] * 2
