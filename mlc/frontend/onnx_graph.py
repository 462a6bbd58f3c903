"""An ONNX graph as Python values, and the conversions to and from the protobuf that ONNX's own passes work on.

Weights stay out of the graph that is worked on: large ones are inputs of known type while shapes are inferred, so that
no pass copies them and models beyond protobuf's 2 GB are no case of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import ModelError
from mlc.frontend.onnx_dimensions import Place, without_symbols
from mlc.frontend.onnx_grouped import DOMAIN
from mlc.frontend.onnx_operators import walk_nodes
from mlc.frontend.onnx_weights import Model, Weight
from mlc.shapes import Free

if TYPE_CHECKING:
    import onnx

__all__ = ["GROWING", "NARROW", "SMALL", "Graph", "as_model", "dims_of", "infer", "known_shapes", "set_dims",
           "take_apart"]

#: bytes: constants up to here may be shapes and are shown to shape inference
SMALL = 1 << 12
_LONGEST_VECTOR = 1 << 16  # elements that are followed one by one, since they may be a shape
#: operators whose result may be of any size, whatever theirs is
GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"})
#: integers that numpy holds in bytes
NARROW = frozenset({"int4", "uint4", "int2", "uint2"})


@dataclass
class Graph:
    """A graph taken apart. ``nodes`` are in topological order; ``weights`` are protobuf tensors, those ``outside``
    without elements, ``folded`` arrays.

    ``free`` are the dimensions that calls decide, by name, as inputs' shapes have them.
    """

    inputs: list[onnx.ValueInfoProto]
    outputs: list[onnx.ValueInfoProto]
    nodes: list[onnx.NodeProto]
    weights: dict[str, onnx.TensorProto]
    opsets: dict[str, int]
    functions: list[onnx.FunctionProto]
    outside: Mapping[str, Weight] = field(default_factory=dict)
    folded: dict[str, np.ndarray] = field(default_factory=dict)
    free: dict[str, Free] = field(default_factory=dict)
    folded_bytes: int = 0

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators."""
        return self.opsets.get("", self.opsets.get("ai.onnx", 1))

    def is_constant(self, name: str) -> bool:
        """Whether the value is a weight or was folded."""
        return name in self.weights or name in self.folded

    def constant(self, name: str) -> np.ndarray:
        """The constant as an array (a view of the file's bytes where it can be)."""
        from onnx import numpy_helper

        if name in self.folded:
            return self.folded[name]
        if name in self.outside:
            return self.outside[name].array()
        tensor = self.weights[name]
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ModelError(f"every weight must hold the elements that its shape and type say, but {name} of shape "
                             f"{list(tensor.dims)} does not ({error}); export the model again") from None

    def constant_or_none(self, name: str) -> np.ndarray | None:
        return self.constant(name) if self.is_constant(name) else None

    def place(self, free: str) -> Place:
        """The first input and axis that has a free dimension of this name."""
        return next((value.name, axis) for value in self.inputs
                    for axis, dim in enumerate(value.type.tensor_type.shape.dim) if dim.dim_param == free)

    def used_constants(self) -> Iterator[tuple[str, np.ndarray]]:
        """The constants that some node or output reads, with their names."""
        names = {i for node in walk_nodes(self.nodes) for i in node.input} | {o.name for o in self.outputs}
        names -= {i.name for i in self.inputs}
        return ((name, _in_bytes(self.constant(name))) for name in sorted(names) if self.is_constant(name))


def _in_bytes(array: np.ndarray) -> np.ndarray:
    """Integers of 4 and 2 bits as int8 and uint8; other elements as they are."""
    if array.dtype.name not in NARROW:
        return array
    return array.astype("uint8" if array.dtype.name.startswith("u") else "int8")


def take_apart(given: Model) -> Graph:
    """A model's graph, which may be changed without changing the model."""
    model = given.proto
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    return Graph(
        inputs=[_copy(i) for i in model.graph.input if i.name not in weights],
        outputs=[_copy(o) for o in model.graph.output],
        nodes=[without_symbols(_copy(node)) for node in model.graph.node],
        weights=weights,
        opsets={o.domain: o.version for o in model.opset_import},
        functions=list(model.functions),
        outside=given.weights,
    )


def _copy(proto: Any) -> Any:
    copied = type(proto)()
    copied.CopyFrom(proto)
    return copied


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Numbers, names of symbolic dimensions, or ``None`` for an unnamed one; ``None`` for an unknown rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        int(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or None
        for d in tensor.shape.dim
    )


def set_dims(value: onnx.ValueInfoProto, dims: Sequence[int | Free]) -> None:
    """Give a tensor these dimensions, free ones by their names."""
    tensor = value.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()
    for d in dims:
        if isinstance(d, Free):
            tensor.shape.dim.add(dim_param=d.name)
        else:
            tensor.shape.dim.add(dim_value=d)


def as_model(graph: Graph) -> onnx.ModelProto:
    """The graph with small constants as initializers and the large ones as inputs."""
    import onnx
    from onnx import helper, numpy_helper

    inputs, small = list(graph.inputs), []
    for name, array in graph.folded.items():
        if array.nbytes <= SMALL:
            small.append(numpy_helper.from_array(array, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, list(array.shape)))
    for name, tensor in graph.weights.items():
        if name not in graph.outside and tensor.ByteSize() <= SMALL:
            small.append(tensor)
        else:
            inputs.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    outputs = [_copy(o) for o in graph.outputs]
    for output in outputs:  # the file's may be symbolic, or from before the inputs were fixed
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    body = helper.make_graph(graph.nodes, "main", inputs, outputs, small)
    opsets = [helper.make_opsetid(d, v) for d, v in graph.opsets.items()]
    version = max(8, onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    return helper.make_model(body, opset_imports=opsets, functions=graph.functions, ir_version=version)


def infer(graph: Graph, name: str) -> dict[str, tuple[int, tuple[int | str | None, ...]]]:
    """Value -> (element type, shape) for every value whose rank is known: numbers, names of free dimensions, and None
    for what inference cannot tell."""
    import onnx

    model = as_model(graph)
    # other domains have no inference, and an optional may be what is in it, of which older opsets know nothing
    strict = all(node.domain in ("", "ai.onnx", DOMAIN) for node in graph.nodes) and not any(
        node.op_type.startswith("Optional") for node in walk_nodes(graph.nodes))
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=strict)
        if not _has_long_vectors(inferred.graph):
            with suppress(onnx.shape_inference.InferenceError):  # over data of which it knows no more than the rank
                inferred = onnx.shape_inference.infer_shapes(model, strict_mode=strict, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the shapes of {name} must fit together, but: {reason}; check the input shapes") from None
    found = {}
    free = {dim for value in graph.inputs for dim in dims_of(value) or () if isinstance(dim, str)}
    for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = dims_of(value) if value.type.HasField("tensor_type") else None
        if dims is not None:
            known = tuple(dim if isinstance(dim, int) or dim in free else None for dim in dims)
            found[value.name] = (value.type.tensor_type.elem_type, known)
    return found


def known_shapes(inferred: Mapping[str, tuple[int, tuple[Any, ...]]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The values whose shapes are known in full."""
    return {name: found for name, found in inferred.items() if all(isinstance(size, int) for size in found[1])}


def _has_long_vectors(graph: onnx.GraphProto) -> bool:
    """Whether a vector might be too long to follow its elements, each of which inference makes an object of."""
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    grown = (values.get(node.output[0]) for node in walk_nodes(graph.node) if node.op_type in GROWING and node.output)
    return any(_is_long(value) for value in values.values()) or any(value is None or None in (dims_of(value) or [None])
                                                                     for value in grown)


def _is_long(value: onnx.ValueInfoProto) -> bool:
    dims = dims_of(value) if value.type.HasField("tensor_type") else None
    return dims is not None and len(dims) == 1 and isinstance(dims[0], int) and dims[0] > _LONGEST_VECTOR
