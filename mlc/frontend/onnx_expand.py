"""Operators that are expanded to standard ones within the ONNX graph, so that shape inference and constant folding see
these.

A quantised operator (``QLinearConv`` and its like, and those that onnxruntime's quantiser writes) becomes the operator
in float32 between ``DequantizeLinear`` and ``QuantizeLinear``: one language for all quantised models. Its result is
within one step of that of integer arithmetic, since the sums in float32 differ by less than a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import ModelError

if TYPE_CHECKING:
    import onnx

__all__ = ["STANDARD", "Expand", "Nodes", "expanded"]

_FLOAT = 1  # onnx.TensorProto.FLOAT


@dataclass
class Nodes:
    """The standard nodes that stand for one node. Values are named by text; the empty text is one left out.

    ``constant_of`` gives the elements of a value where it is constant, ``types`` element type and shape where known in
    full, ``ranked`` those whose rank is known: numbers, names of free dimensions, None for what is not known.
    """

    node: onnx.NodeProto
    opset: int
    constant_of: Callable[[str], np.ndarray | None]
    types: Mapping[str, tuple[int, tuple[int, ...]]]
    ranked: Mapping[str, tuple[int, tuple[int | str | None, ...]]] = field(default_factory=dict)
    made: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; the name of its output, or a list of them where ``outputs`` says how many."""
        from onnx import helper

        base = f"{self._output}/{operator}_{len(self.made)}"
        names = [base] if outputs == 1 else [f"{base}_{i}" for i in range(outputs)]
        self.made.append(helper.make_node(operator, list(inputs), names, name=self._name, **attributes))
        return names[0] if outputs == 1 else names

    @property
    def _name(self) -> str:
        return self.node.name or next((o for o in self.node.output if o), "an unnamed node")

    @property
    def _output(self) -> str:
        """The name of a new value: nodes that an expansion creates share the name of the one they replace."""
        return next((o for o in self.node.output if o), "node")

    def constant(self, array: np.ndarray | float | list[int], like: str = "") -> str:
        """A new constant's name; a number is of the type of ``like`` where that is known, else of float32."""
        if isinstance(array, float):
            array = np.array(array, self.dtype_of(like))
        elif isinstance(array, list):
            array = np.array(array, "int64")
        name = f"{self._output}/constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def cast(self, value: str, dtype: np.dtype[Any]) -> str:
        """The value in another type."""
        from onnx import helper

        return str(self("Cast", value, to=int(helper.np_dtype_to_tensor_dtype(dtype))))

    def inputs(self, count: int) -> list[str]:
        """The node's inputs, filled up with empty texts."""
        return [*self.node.input, *[""] * (count - len(self.node.input))]

    def attributes(self, *names: str) -> dict[str, Any]:
        """The node's attributes, those of these names where any are given."""
        from onnx import helper

        return {a.name: helper.get_attribute_value(a) for a in self.node.attribute if not names or a.name in names}

    def known(self, name: str, what: str) -> np.ndarray:
        """The elements of a constant; raises :class:`ModelError` where it is none."""
        array = self.constant_of(name)
        if array is None:
            raise self.refused(f"its {what} must be constant; make it an initializer")
        return array

    def value_of(self, name: str) -> np.ndarray | None:
        """The elements of a constant, be it one that was made here; None of any other value."""
        return self.constants[name] if name in self.constants else self.constant_of(name)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The element type where it is known, else float32."""
        from onnx import helper

        array = self.value_of(name)
        if array is not None:
            return array.dtype
        kind, _ = self.types.get(name) or self.ranked.get(name) or (_FLOAT, ())
        return np.dtype(helper.tensor_dtype_to_np_dtype(kind))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        array = self.value_of(name)
        return array.shape if array is not None else self.types[name][1] if name in self.types else None

    def known_shape(self, name: str, what: str) -> tuple[int, ...]:
        shape = self.shape_of(name)
        if shape is None:
            raise self.refused(f"the shape of its {what} must be known; run onnx's shape inference on the model")
        return shape

    def fixed_size(self, name: str, axis: int, what: str) -> int:
        """A size that must be a number; raises :class:`ModelError` where it is free or not known."""
        size = self.size_of(name, axis)
        if size is None:
            raise self.refused(f"axis {axis} of its {what} must be a number; export the model with that fixed")
        return size

    def check_sizes(self, name: str, what: str) -> None:
        """Raise :class:`ModelError` where a size is neither a number nor a free one."""
        shape = self._ranked_shape(name)
        if shape is None or None in shape:
            raise self.refused(f"the shape of its {what} must be known; run onnx's shape inference on the model")

    def rank_of(self, name: str, what: str) -> int:
        shape = self._ranked_shape(name)
        if shape is None:
            raise self.refused(f"the rank of its {what} must be known; run onnx's shape inference on the model")
        return len(shape)

    def size_of(self, name: str, axis: int) -> int | None:
        """A size that is a number; None where it is free or not known."""
        size = self.dimension(name, axis)
        return size if isinstance(size, int) else None

    def dimension(self, name: str, axis: int) -> int | str | None:
        """A size that is a number, or the name of a free one; None where it is not known."""
        shape = self._ranked_shape(name)
        return shape[axis] if shape else None

    def _ranked_shape(self, name: str) -> tuple[int | str | None, ...] | None:
        shape = self.shape_of(name)
        return self.ranked[name][1] if shape is None and name in self.ranked else shape

    def size(self, name: str, axis: int) -> str:
        """A size as a value without axes, for what is free; a number where it is known."""
        return str(self("Gather", self("Shape", name), self.constant(np.array(axis)), axis=0))

    def counted(self, name: str, axis: int, rank: int) -> str:
        """The numbers from 0 along an axis of a value, as many as it is long, of ``rank`` axes."""
        shape, size = [-1 if i == axis else 1 for i in range(rank)], self.size_of(name, axis)
        if size is not None:
            return self.constant(np.arange(size).reshape(shape))
        zero, one = self.constant(np.array(0)), self.constant(np.array(1))
        return str(self("Reshape", self("Range", zero, self.size(name, axis), one), self.constant(shape)))

    def refused(self, reason: str) -> ModelError:
        domain = "" if self.node.domain in ("", "ai.onnx") else f"{self.node.domain}."
        operator = domain + self.node.op_type
        return ModelError(f"every node must be importable, but {operator} ({self._name}) is not: {reason}")

    def reduced(self, operator: str, x: str, axes: list[int]) -> str:
        """A reduction that keeps its axes, which are an input since opset 18 (of ``ReduceSum`` since 13)."""
        if self.opset >= (13 if operator == "ReduceSum" else 18):
            return str(self(operator, x, self.constant(axes), keepdims=1))
        return str(self(operator, x, axes=axes, keepdims=1))

    # What quantised operators are made of

    def dequantised(self, x: str, scale: str, zero_point: str = "", axis: int | None = None, **attributes: Any) -> str:
        if axis is not None:
            attributes["axis"] = axis
        return str(self("DequantizeLinear", x, scale, *([zero_point] if zero_point else []), **attributes))

    def quantised(self, x: str, scale: str, zero_point: str, like: str) -> str:
        """``x`` in integers, those of ``like`` where there is no zero point to say which."""
        from onnx import helper

        if not zero_point:
            array = self.constant_of(like)
            if array is None and like not in self.types:
                raise self.refused("the type of its input must be known; run onnx's shape inference on the model")
            dtype = helper.tensor_dtype_to_np_dtype(self.types[like][0]) if array is None else array.dtype
            zero_point = self.constant(np.zeros((), dtype))
        return str(self("QuantizeLinear", x, scale, zero_point))

    def product(self, a: str, b: str) -> str:
        """``a * b``; of constants, a constant."""
        first, second = self.constant_of(a), self.constant_of(b)
        if first is None or second is None:
            return str(self("Mul", a, b))
        return self.constant(np.asarray(first * second))


#: a node's stand-in --> the names of its outputs
Expand = Callable[[Nodes], "str | Sequence[str]"]


def expanded(nodes: Nodes, expand: Expand) -> tuple[list[onnx.NodeProto], Mapping[str, np.ndarray]]:
    """The nodes whose outputs are named as those of the node they stand for, and their constants.

    Raises :class:`ModelError` where the node cannot be expanded, or not yet: a shape that it must know may follow.
    """
    try:
        results = expand(nodes)
    except ModelError:
        raise
    except Exception as error:  # an attribute or an input that must be there is not, or is of another kind
        raise nodes.refused(f"its inputs and attributes must be those of the operator ({type(error).__name__}: "
                            f"{error}); export the model again") from error
    names = [results] if isinstance(results, str) else list(results)
    made = {output for each in nodes.made for output in each.output}
    renamed: dict[str, str] = {}
    for inner, outer in zip(names, nodes.node.output, strict=False):
        if inner and outer:  # a value of the graph's keeps its name, and so does the first of two that are one
            renamed[inner if inner in made and inner not in renamed else nodes("Identity", inner)] = outer
    for node in nodes.made:
        for values in (node.input, node.output):
            for i, value in enumerate(values):
                values[i] = renamed.get(value, value)
    return nodes.made, nodes.constants


def _qlinear_conv(nodes: Nodes) -> str:
    """``x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, bias``: the bias is of int32 and
    in steps of ``x_scale * w_scale``."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = nodes.inputs(9)
    inputs = [nodes.dequantised(x, x_scale, x_zero), nodes.dequantised(w, w_scale, w_zero, 0)]
    if bias:
        inputs.append(nodes.dequantised(bias, nodes.product(x_scale, w_scale), axis=0))
    result = nodes("Conv", *inputs, **nodes.attributes())
    return nodes.quantised(result, y_scale, y_zero, x)


def _qlinear_matmul(nodes: Nodes) -> str:
    """``a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point``; a scale of ``a`` may be one for
    each row, of ``b`` one for each column."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = nodes.inputs(8)
    sides = _factor(nodes, a, a_scale, a_zero, -2), _factor(nodes, b, b_scale, b_zero, -1)
    result = nodes("MatMul", *sides)
    return nodes.quantised(result, _in_float32(nodes, y_scale), y_zero, a)


def _factor(nodes: Nodes, value: str, scale: str, zero_point: str, axis: int) -> str:
    """A factor in float32, with a scale of one number, one for each index of ``axis``, or of the factor's rank."""
    shape = nodes.shape_of(scale)
    scale = _in_float32(nodes, scale)
    if shape is None or len(shape) < 2:
        return nodes.dequantised(value, scale, zero_point, axis)
    wide = nodes("Cast", value, to=_FLOAT)
    if zero_point:
        wide = nodes("Sub", wide, nodes("Cast", zero_point, to=_FLOAT))
    return str(nodes("Mul", wide, scale))


def _in_float32(nodes: Nodes, scale: str) -> str:
    """A scale as float32; where its elements are not known, as it is."""
    array = nodes.constant_of(scale)
    if array is None:
        return str(nodes("Cast", scale, to=_FLOAT))
    return scale if array.dtype == np.float32 else nodes.constant(array.astype("float32"))


#: standard operator --> what it is made of
STANDARD: Mapping[str, Expand] = {"QLinearConv": _qlinear_conv, "QLinearMatMul": _qlinear_matmul}
