"""A model's outputs in float64, by a route that shares nothing with any engine that is timed.

The ONNX graph is evaluated node by node by the ``onnx`` package's reference evaluator, after every float32 constant,
type and cast in it became float64. Its loops over windows in Python take minutes for real networks, so convolutions
and pooling are numpy here: sums over the window's positions, each a matrix product or a maximum of slices. So are a few
operators that it reads differently from the specification's older versions, or computes in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

__all__ = ["float64_model", "float64_outputs"]


def float64_outputs(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in the model's order; float inputs are widened, whole numbers stay."""
    feeds = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in inputs.items()}
    evaluator = ReferenceEvaluator(float64_model(model), new_ops=_OPERATORS)
    return list(evaluator.run(None, feeds))


def float64_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in which float32 became float64 everywhere."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for tensor in graph.initializer:
        _widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            if node.op_type == "Constant" and attribute.name == "value_float":
                value = helper.make_attribute("value", numpy_helper.from_array(np.array(attribute.f, np.float64)))
                attribute.CopyFrom(value)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return wide


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), name))


class Conv(OpRun):
    """Of any number of dimensions, grouped, strided, dilated."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, auto_pad: str | None = None,
        dilations: Sequence[int] | None = None, group: int | None = None, kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        ones = (1,) * (x.ndim - 2)
        strides, dilations, groups = strides or ones, dilations or ones, group or 1
        padded = _padded(x, w.shape[2:], strides, dilations, pads, auto_pad, 0.0)
        views = _windows(padded, w.shape[2:], strides, dilations)
        batch, size = x.shape[0], views[0][1].shape[2:]
        weights = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        out = np.zeros((batch, groups, weights.shape[1], math.prod(size)), x.dtype)
        for place, view in views:
            columns = np.ascontiguousarray(view).reshape(batch, groups, -1, math.prod(size))
            out += weights[(slice(None), slice(None), slice(None), *place)] @ columns
        out = out.reshape(batch, w.shape[0], *size)
        return (out if b is None else out + b.reshape(-1, *ones),)


class MaxPool(OpRun):
    """Of any number of dimensions; values alone, no indices."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, auto_pad: str | None = None, ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None, kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None, storage_order: int | None = None, strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        assert kernel_shape is not None and not ceil_mode
        strides, dilations = (given or (1,) * (x.ndim - 2) for given in (strides, dilations))
        padded = _padded(x, kernel_shape, strides, dilations, pads, auto_pad, -np.inf)
        return (np.maximum.reduce([view for _, view in _windows(padded, kernel_shape, strides, dilations)]),)


class AveragePool(OpRun):
    """Of any number of dimensions; padding counts only where the model says so."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, auto_pad: str | None = None, ceil_mode: int | None = None,
        count_include_pad: int | None = None, dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        assert kernel_shape is not None and not ceil_mode
        strides, dilations = (given or (1,) * (x.ndim - 2) for given in (strides, dilations))

        def total(values: np.ndarray, fill: float) -> np.ndarray:
            padded = _padded(values, kernel_shape, strides, dilations, pads, auto_pad, fill)
            return np.add.reduce([view for _, view in _windows(padded, kernel_shape, strides, dilations)])

        return (total(x, 0.0) / total(np.ones((1, 1, *x.shape[2:])), float(count_include_pad or 0)),)


class LayerNormalization(OpRun):
    """The evaluator's own computes in float32, as the operator's ``stash_type`` asks."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None, axis: int | None = None,
        epsilon: float | None = None, stash_type: int | None = None,
    ) -> tuple[np.ndarray]:
        axes = tuple(range((-1 if axis is None else axis) % x.ndim, x.ndim))
        centred = x - x.mean(axes, keepdims=True)
        spread = np.sqrt((centred**2).mean(axes, keepdims=True) + (1e-5 if epsilon is None else epsilon))
        out = centred / spread * scale
        return (out if bias is None else out + bias,)


class BatchNormalization(OpRun):
    """At inference, as of every version."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray, mean: np.ndarray, variance: np.ndarray,
        **attributes: object,
    ) -> tuple[np.ndarray]:
        epsilon = next((a.f for a in self.onnx_node.attribute if a.name == "epsilon"), 1e-5)
        shape = (-1, *[1] * (x.ndim - 2))
        factor = scale / np.sqrt(variance + epsilon)
        return (x * factor.reshape(shape) + (bias - mean * factor).reshape(shape),)


class LRN(OpRun):
    """Across channels."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, alpha: float | None = None, beta: float | None = None, bias: float | None = None,
        size: int | None = None,
    ) -> tuple[np.ndarray]:
        assert size is not None
        before, squares = (size - 1) // 2, x**2
        wide = np.pad(squares, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        total = sum(wide[:, i : i + x.shape[1]] for i in range(size))
        base = (1.0 if bias is None else bias) + (1e-4 if alpha is None else alpha) / size * total
        return (x / base ** (0.75 if beta is None else beta),)


class Softmax(OpRun):
    """Over one axis; before version 13 over all axes from ``axis`` on."""

    def _run(self, x: np.ndarray, **attributes: object) -> tuple[np.ndarray]:  # type: ignore[override]
        old = self.run_params["opsets"][""] < 13
        axis = next((a.i for a in self.onnx_node.attribute if a.name == "axis"), 1 if old else -1) % x.ndim
        axes = tuple(range(axis, x.ndim)) if old else (axis,)
        powers = np.exp(x - x.max(axes, keepdims=True))
        return (powers / powers.sum(axes, keepdims=True),)


_OPERATORS = [Conv, MaxPool, AveragePool, LayerNormalization, BatchNormalization, LRN, Softmax]


def _padded(
    x: np.ndarray, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[int] | None, auto_pad: str | None, fill: float,
) -> np.ndarray:
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        needed = [max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
                  for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True)]
        low = [n // 2 if auto_pad == "SAME_UPPER" else -(-n // 2) for n in needed]
        border = [(a, n - a) for a, n in zip(low, needed, strict=True)]
    else:
        half = x.ndim - 2
        flat = list(pads or (0,) * (2 * half))
        border = list(zip(flat[:half], flat[half:], strict=True))
    return np.pad(x, [(0, 0), (0, 0), *border], constant_values=fill)


def _windows(
    padded: np.ndarray, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """For each position in the window, the elements that all windows have there: ``[N, C, …]`` views."""
    counts = [(extent - (k - 1) * d - 1) // s + 1
              for extent, k, s, d in zip(padded.shape[2:], kernel, strides, dilations, strict=True)]

    def view(place: tuple[int, ...]) -> np.ndarray:
        cuts = [slice(i * d, i * d + (count - 1) * s + 1, s)
                for i, count, s, d in zip(place, counts, strides, dilations, strict=True)]
        return padded[(slice(None), slice(None), *cuts)]

    return [(place, view(place)) for place in itertools.product(*map(range, kernel))]
