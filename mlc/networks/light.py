"""The ``light_*.onnx`` networks inside the ``onnx`` package, with seeded random weights.

Their weights are ``ConstantOfShape``, so every output element would be one constant and a wrong program would pass;
here each weight is drawn from a seeded generator, scaled for its role, so that activations stay near one from input to
logits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = ["LIGHT_MODELS", "light_model", "light_path"]

LIGHT_MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)
# A residual branch adds its variance to the trunk's; a smaller last scale keeps deep sums near one.
_RESIDUAL_SCALE = 0.3
_BATCH_NORM_ROLES = {1: "scale", 2: "bias", 3: "bias", 4: "variance"}


def light_path(name: str) -> Path:
    """The path of the original light model in the ``onnx`` package."""
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def light_model(name: str, seed: int = 0, batch: int = 1) -> onnx.ModelProto:
    """A light model whose parameters are all seeded random initializers, with one input, the image.

    ``name`` is one of :data:`LIGHT_MODELS`; the input is f32 ``(batch, 3, 224, 224)`` and meant to be standard normal.
    """
    import onnx

    if name not in LIGHT_MODELS:
        raise KeyError(f"a light model must be one of {', '.join(LIGHT_MODELS)}, got {name!r}")
    model = onnx.load(light_path(name))
    graph = model.graph
    roles = _parameter_roles(graph)
    shapes = _parameter_shapes(graph)
    given = {tensor.name: tensor for tensor in graph.initializer}
    used = {i for node in graph.node if node.op_type != "ConstantOfShape" for i in node.input}
    rng = np.random.default_rng(seed)
    filled = []
    for parameter in sorted(shapes.keys() & used):
        if parameter in roles:
            values = _draw(rng, roles[parameter], shapes[parameter])
            filled.append(_raw_tensor(parameter, values))
        else:
            filled.append(_batched(given[parameter], batch))  # the shape argument of a Reshape
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    inputs = [i for i in graph.input if i.name in used and i.name not in shapes]
    for value in (*inputs, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value *= batch
    filled_graph = onnx.helper.make_graph(nodes, name, inputs, graph.output, filled)
    # From IR version 4 on, initializers need not be listed as inputs.
    return onnx.helper.make_model(filled_graph, ir_version=8, opset_imports=model.opset_import)


def _batched(shape: onnx.TensorProto, batch: int) -> onnx.TensorProto:
    """The shape that a Reshape of activations wants, for ``batch`` images instead of one."""
    from onnx import numpy_helper

    dims = numpy_helper.to_array(shape).copy()
    if batch > 1 and dims[0] == 1:
        dims[0] = batch
    return numpy_helper.from_array(dims, shape.name)


def _parameter_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    from onnx import numpy_helper

    given = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {name: tuple(tensor.dims) for name, tensor in given.items()}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(int(d) for d in numpy_helper.to_array(given[node.input[0]]))
    return shapes


def _parameter_roles(graph: onnx.GraphProto) -> dict[str, tuple[str, float]]:
    """Parameter -> (role, gain), from the node that uses it."""
    summed = {i for node in graph.node if node.op_type == "Sum" for i in node.input}
    reshaped = {node.output[0]: node.input[0] for node in graph.node if node.op_type in ("Unsqueeze", "Reshape")}
    producers = {node.output[0]: node for node in graph.node}
    roles: dict[str, tuple[str, float]] = {}
    for node in graph.node:
        residual = _RESIDUAL_SCALE if node.output[0] in summed else 1.0
        if node.op_type in ("Conv", "Gemm"):
            transposed = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
            weight = reshaped.get(node.input[1], node.input[1])
            roles[weight] = ("weight" if transposed else "weight_transposed", _gain(node.input[0], producers))
            if len(node.input) > 2:
                roles[node.input[2]] = ("bias", 1.0)
        elif node.op_type == "BatchNormalization":
            for position, role in _BATCH_NORM_ROLES.items():
                roles[node.input[position]] = (role, residual if role == "scale" else 1.0)
        elif node.op_type in ("Mul", "Add"):  # a learned scale or shift of each channel
            for name in node.input:
                if name in reshaped:
                    roles[reshaped[name]] = ("scale" if node.op_type == "Mul" else "bias", 1.0)
    return roles


def _gain(value: str, producers: dict[str, onnx.NodeProto]) -> float:
    """He's factor for a weight that reads ``value``: a rectifier halves the second moment, a maximum doubles it."""
    node = producers.get(value)
    while node is not None and node.op_type in ("Concat", "Transpose", "Reshape", "Dropout", "LRN"):
        node = producers.get(node.input[0])
    return math.sqrt(2.0) if node is not None and node.op_type == "Relu" else 1.0


def _draw(rng: np.random.Generator, role: tuple[str, float], shape: tuple[int, ...]) -> np.ndarray:
    kind, gain = role
    if kind.startswith("weight"):
        shape_2d = shape[2:] if shape[:2] == (1, 1) else shape  # a classifier stored with two leading ones
        fan_in = math.prod(shape_2d[1:]) if kind == "weight" else shape_2d[0]
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(gain / math.sqrt(fan_in))
        return values
    if kind == "bias":
        return np.float32(0.1) * rng.standard_normal(shape, dtype=np.float32)
    if kind == "scale":
        return rng.uniform(0.8 * gain, 1.2 * gain, shape).astype(np.float32)
    return rng.uniform(0.6, 1.6, shape).astype(np.float32)  # a variance


def _raw_tensor(name: str, values: np.ndarray) -> onnx.TensorProto:
    import onnx

    # Half a gigabyte of VGG: bytes, never a Python list.
    return onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)
