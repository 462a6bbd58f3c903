"""Make an ONNX graph static: fix its input shapes, fold what depends on shapes and constants alone, drop the rest.

Dimensions that calls decide stay symbols; what follows from them is left for :mod:`mlc.frontend.onnx_sizes`.

Exporters compute reshapes' arguments from ``Shape``, ``Gather``, ``Concat``; TVM's importer fails on many of these
chains. With static inputs they are numbers. Weights stay out of the graph that is worked on: large ones are inputs
of known type while shapes are inferred, so that no pass copies them and models beyond protobuf's 2 GB are no case of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import ModelError, UsageError
from mlc.frontend.model import merge_shapes
from mlc.frontend.onnx_containers import kind_of, tensor_type_of
from mlc.frontend.onnx_dimensions import Agreed, AtLeast, Place, make_one, ranges_that_begin, without_symbols
from mlc.frontend.onnx_expand import Nodes, expanded
from mlc.frontend.onnx_grouped import DOMAIN, define_operators
from mlc.frontend.onnx_operators import expansion_of, functions_to_inline, walk_nodes
from mlc.frontend.onnx_quantised import wrong_scale
from mlc.frontend.onnx_sequences import resolved
from mlc.frontend.onnx_weights import Model, Weight
from mlc.shapes import Free, Linear, Shape, parse_shape

if TYPE_CHECKING:
    import onnx

__all__ = ["Graph", "make_static"]

_SMALL = 1 << 12  # bytes: constants up to here may be shapes and are shown to shape inference
_LARGEST_FOLDED = 1 << 30  # bytes, of one value and of all together
_SLIGHT = 1 << 16  # bytes of inputs: even an outer product of them can be had
_LONGEST_VECTOR = 1 << 16  # elements that are followed one by one, since they may be a shape
# Operators whose result may be of any size, whatever theirs is.
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"})
_NEVER_FOLDED = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
    "If", "Loop", "Scan",
    "DequantizeLinear",  # folding would hide that the weights are 8 bits wide
    "GRU", "LSTM", "RNN",  # the reference passes over their activations and clip
})
_FLOATS = frozenset({1, 10, 16})  # of onnx.TensorProto: FLOAT, FLOAT16, BFLOAT16
_NARROW = frozenset({"int4", "uint4", "int2", "uint2"})
# Old files name the mask of a dropout and the like without using it.
_OPTIONAL_OUTPUTS = frozenset({"BatchNormalization", "Dropout", "LayerNormalization", "MaxPool"})


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
    if array.dtype.name not in _NARROW:
        return array
    return array.astype("uint8" if array.dtype.name.startswith("u") else "int8")


def make_static(
    model: Model, shapes: Mapping[str, Shape], name: str, agreed: Sequence[Agreed | AtLeast] = ()
) -> Graph:
    """The model's graph with the sizes and ranges of ``shapes`` for its inputs' free dimensions, and everything folded
    that depends on constants and static shapes alone. Dimensions that are ``agreed`` are one, whatever the model calls
    them, or begin later unless ``shapes`` says their range.

    Functions are inlined where TVM has no converter for them. Raises :class:`ModelError` for an input that is no tensor
    and :class:`UsageError` for ``shapes`` that do not fit.
    """
    graph = _take_apart(model)
    for each in agreed:
        if isinstance(each, Agreed):
            make_one(graph.inputs, each)
    _fix_inputs(graph, shapes, name, [each for each in agreed if isinstance(each, AtLeast)])
    if graph.functions:
        _inline(graph, None, name)
    _fold(graph, name)
    _expand(graph, name)
    while wanted := functions_to_inline(graph.nodes, graph.opsets):
        before = [node.op_type for node in graph.nodes]
        _inline(graph, wanted, name)
        _fold(graph, name)
        _expand(graph, name)
        if [node.op_type for node in graph.nodes] == before:
            break  # ONNX defines them by themselves; check_supported reports what is left
    _name_narrow_types(graph)
    return graph


def _take_apart(given: Model) -> Graph:
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


def _fix_inputs(graph: Graph, shapes: Mapping[str, Shape], name: str, later: Sequence[AtLeast]) -> None:
    from onnx import helper

    unknown = shapes.keys() - {i.name for i in graph.inputs}
    if unknown:
        names = ", ".join(i.name for i in graph.inputs)
        raise UsageError(f"shapes must name inputs of {name} ({names}), got {', '.join(sorted(unknown))}")
    for value in graph.inputs:
        if not value.type.HasField("tensor_type"):
            kind = value.type.WhichOneof("value") or "value of unknown type"
            raise ModelError(f"every input must be a tensor, but {value.name} of {name} is a {kind}; export it without")
    defaults = ranges_that_begin(graph.inputs, later, shapes)
    own = {value.name: _dims(value) or () for value in graph.inputs}
    merged = merge_shapes(own, {each: parse_shape(shape) for each, shape in shapes.items()}, defaults)
    free = (d for shape in merged.values() for d in shape if isinstance(d, Free))
    graph.free = {d.name: d for d in free if Linear.parse(d.name) is None}
    for value in graph.inputs:
        _set_dims(value, merged[value.name])
        sizes = [d for d in merged[value.name] if isinstance(d, int)]
        if 0 in sizes and len(sizes) == len(merged[value.name]):  # a constant: kernels are of tensors with elements
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            graph.folded[value.name] = np.zeros(sizes, dtype)


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Numbers, names of symbolic dimensions, or ``None`` for an unnamed one; ``None`` for an unknown rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        int(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or None
        for d in tensor.shape.dim
    )


def _set_dims(value: onnx.ValueInfoProto, dims: Sequence[int | Free]) -> None:
    tensor = value.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()
    for d in dims:
        if isinstance(d, Free):
            tensor.shape.dim.add(dim_param=d.name)
        else:
            tensor.shape.dim.add(dim_value=d)


# Quantised operators


def _expand(graph: Graph, name: str) -> None:
    """Replace the operators that are made of others. What an expansion must know may follow from another's result."""
    while any(expansion_of(node) for node in graph.nodes):
        inferred = _infer(graph, name)
        known = _known(inferred)
        kept: list[onnx.NodeProto] = []
        reason: ModelError | None = None
        progressed = False
        for node in graph.nodes:
            expand = expansion_of(node)
            if expand is None:
                kept.append(node)
                continue
            try:
                made, constants = expanded(Nodes(node, graph.opset, graph.constant_or_none, known, inferred), expand)
            except ModelError as error:
                kept.append(node)
                reason = reason or error
                continue
            kept.extend(made)
            graph.folded.update(constants)
            progressed = True
            if any(each.domain == DOMAIN for each in made):
                define_operators()
                graph.opsets[DOMAIN] = 1
        if reason is not None and not progressed:
            raise reason
        graph.nodes = kept
        _fold(graph, name)


def _name_narrow_types(graph: Graph) -> None:
    """Say in ``QuantizeLinear`` which integers of less than 8 bits are its result; its zero point becomes a byte."""
    from onnx import helper

    for node in graph.nodes:
        if node.op_type != "QuantizeLinear" or len(node.input) < 3 or not graph.is_constant(node.input[2]):
            continue
        dtype = graph.constant(node.input[2]).dtype
        if dtype.name in _NARROW and not any(a.name == "output_dtype" and a.i for a in node.attribute):
            node.attribute.append(helper.make_attribute("output_dtype", helper.np_dtype_to_tensor_dtype(dtype)))


# Protobuf views of the graph, for the ONNX library's own passes


def _as_model(graph: Graph) -> onnx.ModelProto:
    """The graph with small constants as initializers and the large ones as inputs."""
    import onnx
    from onnx import helper, numpy_helper

    inputs, small = list(graph.inputs), []
    for name, array in graph.folded.items():
        if array.nbytes <= _SMALL:
            small.append(numpy_helper.from_array(array, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, list(array.shape)))
    for name, tensor in graph.weights.items():
        if name not in graph.outside and tensor.ByteSize() <= _SMALL:
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


def _inline(graph: Graph, functions: set[tuple[str, str]] | None, name: str) -> None:
    """Replace calls of the model's own functions (``None``) or of the given standard ones by their bodies."""
    from onnx import helper, inliner

    model = _as_model(graph)
    model.graph.value_info.extend(  # the inliner wants the type of every input of a function, and looks here
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in model.graph.initializer)
    try:
        if functions is None:
            model = inliner.inline_local_functions(model, convert_version=True)
        else:
            model = inliner.inline_selected_functions(model, sorted(functions), inline_schema_functions=True)
    except RuntimeError as error:  # an assertion of the inliner's own, over an input that is left out, say
        called = "its functions" if functions is None else ", ".join(sorted(operator for _, operator in functions))
        raise ModelError(f"{called} of {name} must be made of simpler operators, but onnx's inliner failed: "
                         f"{' '.join(str(error).split())}; export the model with these written out") from error
    graph.nodes = list(model.graph.node)
    graph.functions = list(model.functions)
    graph.opsets = {o.domain: o.version for o in model.opset_import}


def _infer(graph: Graph, name: str) -> dict[str, tuple[int, tuple[int | str | None, ...]]]:
    """Value -> (element type, shape) for every value whose rank is known: numbers, names of free dimensions, and None
    for what inference cannot tell."""
    import onnx

    model = _as_model(graph)
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
    free = {dim for value in graph.inputs for dim in _dims(value) or () if isinstance(dim, str)}
    for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = _dims(value) if value.type.HasField("tensor_type") else None
        if dims is not None:
            known = tuple(dim if isinstance(dim, int) or dim in free else None for dim in dims)
            found[value.name] = (value.type.tensor_type.elem_type, known)
    return found


def _known(inferred: Mapping[str, tuple[int, tuple[Any, ...]]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The values whose shapes are known in full."""
    return {name: found for name, found in inferred.items() if all(isinstance(size, int) for size in found[1])}


def _has_long_vectors(graph: onnx.GraphProto) -> bool:
    """Whether a vector might be too long to follow its elements, each of which inference makes an object of."""
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    grown = (values.get(node.output[0]) for node in walk_nodes(graph.node) if node.op_type in _GROWING and node.output)
    return any(_is_long(value) for value in values.values()) or any(value is None or None in (_dims(value) or [None])
                                                                     for value in grown)


def _is_long(value: onnx.ValueInfoProto) -> bool:
    dims = _dims(value) if value.type.HasField("tensor_type") else None
    return dims is not None and len(dims) == 1 and isinstance(dims[0], int) and dims[0] > _LONGEST_VECTOR


# Folding


def _fold(graph: Graph, name: str) -> None:
    """Fold until nothing changes: folding a reshape's argument lets inference see further."""
    _drop_dead(graph)
    while True:
        before = len(graph.folded), [node.op_type for node in graph.nodes]
        inferred = _infer(graph, name)
        _fold_once(graph, _known(inferred))
        _resolve_sequences(graph, inferred)
        _drop_dead(graph)
        if (len(graph.folded), [node.op_type for node in graph.nodes]) == before:
            return


def _resolve_sequences(graph: Graph, inferred: Mapping[str, tuple[int, tuple[int | str | None, ...]]]) -> None:
    known = _known(inferred)
    containers = [value.name for value in graph.outputs if kind_of(value.type) not in ("", "tensor")]
    graph.nodes, constants, held = resolved(
        graph.nodes, lambda node: Nodes(node, graph.opset, graph.constant_or_none, known, inferred), containers)
    graph.folded.update(constants)
    for name, tensors in held.items():
        _give_tensors(graph, name, tensors)


def _give_tensors(graph: Graph, name: str, tensors: Sequence[str] | None) -> None:
    """Replace an output that holds tensors by these. Raises :class:`ModelError` where their names are taken."""
    from onnx import helper

    place = next(i for i, value in enumerate(graph.outputs) if value.name == name)
    kind = graph.outputs[place].type
    if tensors is not None and not tensors and kind_of(kind) == "optional sequence":
        raise ModelError(f"an optional that is an output must hold nothing or some tensors, but {name} holds a "
                         "sequence of none; give the sequence itself out")
    given = [f"{name}/{i}" for i in range(len(tensors or ()))]
    taken = {output for node in graph.nodes for output in node.output} | {value.name for value in graph.inputs} | {
        value.name for value in graph.outputs}
    if twice := next((each for each in (*given, f"{name}/{len(given)}") if each in taken), None):
        raise ModelError(f"the tensors of {name} are outputs by names such as {twice}, which is there already; rename "
                         "it in the model")
    element = tensor_type_of(kind).tensor_type.elem_type
    graph.outputs[place:place + 1] = [helper.make_tensor_value_info(each, element, None) for each in given]
    graph.nodes.extend(helper.make_node("Identity", [inner], [outer])
                       for inner, outer in zip(tensors or (), given, strict=True))


def _fold_once(graph: Graph, known: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
    kept: list[onnx.NodeProto] = []
    pending = list(reversed(graph.nodes))
    while pending:
        node = pending.pop()
        taken = _taken_branch(node, graph)
        if taken is not None:
            pending.extend(reversed(taken))
            continue
        _give_axes_an_axis(node, graph)
        values = _evaluate(node, graph, known)
        if values is None:
            _pin_shape(node, graph, known)
            kept.append(node)
        else:
            graph.folded.update({o: v for o, v in zip(node.output, values, strict=False) if o})
            graph.folded_bytes += sum(value.nbytes for value in values)
    graph.nodes = kept


def _evaluate(
    node: onnx.NodeProto, graph: Graph, known: Mapping[str, tuple[int, tuple[int, ...]]]
) -> list[np.ndarray] | None:
    """The node's outputs if they follow from constants and static shapes, else ``None``."""
    from onnx import helper

    if node.op_type in ("Shape", "Size") and node.domain == "" and node.input[0] in known:
        shape = known[node.input[0]][1]
        if node.op_type == "Size":
            return [np.array(math.prod(shape), dtype=np.int64)]
        bounds = {a.name: a.i for a in node.attribute}
        return [np.array(shape[bounds.get("start", 0):bounds.get("end")], dtype=np.int64)]
    if not all(graph.is_constant(i) for i in node.input if i):
        return None
    if node.op_type in _NEVER_FOLDED and not _is_one_dequantised(node, graph):
        return None
    if _narrowed(node, graph):
        return None
    if node.op_type == "QuantizeLinear" and not _is_quantised_right(node, graph):
        return None
    if not all(output in known for output in node.output if output) and not _is_slight(node, graph):
        return None  # the next round knows how large they are
    sizes = (math.prod(shape) * helper.tensor_dtype_to_np_dtype(kind).itemsize
             for kind, shape in (known[output] for output in node.output if output in known))
    if sum(sizes) + graph.folded_bytes > _LARGEST_FOLDED:
        raise ModelError(f"what follows from constants alone must take at most {_LARGEST_FOLDED >> 30} GiB, but with "
                         f"{node.op_type} ({node.name or node.output[0]}) it takes more; make that an input")
    return _run_reference(node, graph)


def _is_quantised_right(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether the reference saturates these numbers: it converts them to int32 first. The converter refuses scales."""
    x, scale = (graph.constant(name).astype("float64") for name in node.input[:2])
    return scale.size > 0 and wrong_scale(scale) is None and bool(np.all(np.abs(x) < scale.min() * (1 << 30)))


def _is_one_dequantised(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether it dequantises one number, as a ``Pad`` pads with, whose width hides nothing. The converter refuses what
    is wrong with its inputs."""
    if node.op_type != "DequantizeLinear" or node.domain not in ("", "ai.onnx"):
        return False
    x, scale, *zero = (graph.constant(name) for name in node.input if name)
    return (x.size == scale.size == 1 and scale.ndim <= x.ndim and wrong_scale(scale) is None
            and all(z.shape == scale.shape and z.dtype == x.dtype != np.int32 for z in zero))


def _narrowed(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether it makes floating-point numbers of many integers that 8 bits hold, which then are of 8 bits: such
    weights, unpacked from words and about to be scaled, are to stay integers."""
    if node.op_type != "Cast" or node.domain != "":
        return False
    readers = {reader.op_type for reader in walk_nodes(graph.nodes) if node.output[0] in reader.input}
    if not readers or readers - {"Mul", "Sub"} or node.output[0] in {output.name for output in graph.outputs}:
        return False
    array = graph.constant(node.input[0])
    to = next(attribute.i for attribute in node.attribute if attribute.name == "to")
    if array.dtype.kind not in "iu" or array.size < _SMALL or to not in _FLOATS:
        return False
    if array.min() < -128 or array.max() > 127:
        return False
    name = f"{node.output[0]}/integers"
    graph.folded[name] = array.astype(np.int8)
    node.input[0] = name
    return True


def _is_slight(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether the node's outputs fit in memory whatever it computes of its (constant) inputs."""
    if node.op_type in _GROWING:
        return False
    return sum(graph.constant(name).nbytes for name in node.input if name) <= _SLIGHT


def _run_reference(node: onnx.NodeProto, graph: Graph) -> list[np.ndarray] | None:
    """Evaluate with ONNX's own reference; what it has no implementation for stays in the graph."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    feeds = {i: graph.constant(i) for i in node.input if i}
    borders = ([helper.make_empty_tensor_value_info(n) for n in names if n] for names in (feeds, node.output))
    one_node = helper.make_graph([node], "node", *borders)
    try:
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(one_node, opsets=graph.opsets).run(None, feeds)
    except Exception:
        return None
    by_name = dict(zip((o for o in node.output if o), values, strict=True))
    arrays = [by_name[o] for o in node.output if o]
    if len(arrays) != len(node.output) or not all(isinstance(a, np.ndarray | np.generic) for a in arrays):
        return None
    return [np.ascontiguousarray(a).reshape(np.shape(a)) for a in arrays]


def _taken_branch(node: onnx.NodeProto, graph: Graph) -> list[onnx.NodeProto] | None:
    """The nodes of the branch that an ``If`` with a constant condition takes. Names are unique across a model."""
    from onnx import helper

    if node.op_type != "If" or node.domain != "" or not graph.is_constant(node.input[0]):
        return None
    wanted = "then_branch" if bool(graph.constant(node.input[0]).reshape(-1)[0]) else "else_branch"
    branch = next(a.g for a in node.attribute if a.name == wanted)
    graph.weights.update({tensor.name: tensor for tensor in branch.initializer})
    results = [
        helper.make_node("Identity", [inner.name], [outer])
        for inner, outer in zip(branch.output, node.output, strict=True) if outer
    ]
    return [*branch.node, *results]


def _give_axes_an_axis(node: onnx.NodeProto, graph: Graph) -> None:
    """Make a vector of constant axes without an axis of their own, where TVM's converters fail or take no axes."""
    if node.domain != "" or len(node.input) < 2 or not (
            node.op_type in ("Squeeze", "Unsqueeze") or node.op_type.startswith("Reduce")):
        return
    axes = graph.constant_or_none(node.input[1]) if node.input[1] else None
    if axes is not None and axes.ndim == 0:
        name = f"{node.output[0]}/axes"
        graph.folded[name] = axes.reshape(1)
        node.input[1] = name


def _pin_shape(node: onnx.NodeProto, graph: Graph, known: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
    """Give ``Reshape`` and ``Expand`` their inferred output shape: no -1 or 0, and no ``Expand`` below its input.

    TVM's converter takes ``Expand``'s argument for the output shape, where ONNX broadcasts both ways.
    """
    if node.domain != "" or node.op_type not in ("Reshape", "Expand") or node.output[0] not in known:
        return
    shape = known[node.output[0]][1]
    if len(node.input) < 2 or 0 in shape:  # opset 1 keeps the shape in an attribute; empty tensors keep theirs
        return
    name = f"{node.output[0]}/static_shape"
    if node.input[1] != name:
        graph.folded[name] = np.array(shape, dtype=np.int64)
        node.input[1] = name


def _drop_dead(graph: Graph) -> None:
    """Drop the nodes that no output needs, and optional outputs that nobody reads."""
    needed = {o.name for o in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(i for inner in walk_nodes([node]) for i in inner.input)
            needed.update(o.name for a in node.attribute for g in (a.g, *a.graphs) for o in g.output)
            if node.op_type in _OPTIONAL_OUTPUTS:
                while len(node.output) > 1 and node.output[-1] not in needed:
                    node.output.pop()
    graph.nodes = kept[::-1]
