"""Prepares an ONNX graph for import: fixes input shapes, folds constants and shape computations, drops unused nodes.

Dimensions that calls decide stay symbols; what follows from them is left for :mod:`mlc.frontend.onnx_sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlc.errors import ModelError, UsageError
from mlc.frontend.model import merge_shapes
from mlc.frontend.onnx_dimensions import Agreed, AtLeast, make_one, ranges_that_begin
from mlc.frontend.onnx_expand import Nodes, expanded
from mlc.frontend.onnx_fold import fold
from mlc.frontend.onnx_graph import NARROW, Graph, as_model, dims_of, infer, known_shapes, set_dims, take_apart
from mlc.frontend.onnx_grouped import DOMAIN, define_operators
from mlc.frontend.onnx_operators import expansion_of, functions_to_inline
from mlc.frontend.onnx_weights import Model
from mlc.shapes import Free, Linear, Shape, parse_shape

if TYPE_CHECKING:
    import onnx

__all__ = ["make_static"]


def make_static(
    model: Model, shapes: Mapping[str, Shape], name: str, agreed: Sequence[Agreed | AtLeast] = ()
) -> Graph:
    """The model's graph with the sizes and ranges of ``shapes`` for its inputs' free dimensions, and everything folded
    that depends on constants and static shapes alone. Dimensions that are ``agreed`` are one, whatever the model calls
    them, or begin later unless ``shapes`` says their range.

    Functions are inlined where TVM has no converter for them. Raises :class:`ModelError` for an input that is no tensor
    and :class:`UsageError` for ``shapes`` that do not fit.
    """
    graph = take_apart(model)
    for each in agreed:
        if isinstance(each, Agreed):
            make_one(graph.inputs, each)
    _fix_inputs(graph, shapes, name, [each for each in agreed if isinstance(each, AtLeast)])
    if graph.functions:
        _inline(graph, None, name)
    fold(graph, name)
    _expand(graph, name)
    while wanted := functions_to_inline(graph.nodes, graph.opsets):
        before = [node.op_type for node in graph.nodes]
        _inline(graph, wanted, name)
        fold(graph, name)
        _expand(graph, name)
        if [node.op_type for node in graph.nodes] == before:
            break  # ONNX defines them by themselves; check_supported reports what is left
    _name_narrow_types(graph)
    return graph


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
    own = {value.name: dims_of(value) or () for value in graph.inputs}
    merged = merge_shapes(own, {each: parse_shape(shape) for each, shape in shapes.items()}, defaults)
    free = (d for shape in merged.values() for d in shape if isinstance(d, Free))
    graph.free = {d.name: d for d in free if Linear.parse(d.name) is None}
    for value in graph.inputs:
        set_dims(value, merged[value.name])
        sizes = [d for d in merged[value.name] if isinstance(d, int)]
        if 0 in sizes and len(sizes) == len(merged[value.name]):  # a constant: kernels are of tensors with elements
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            graph.folded[value.name] = np.zeros(sizes, dtype)


def _expand(graph: Graph, name: str) -> None:
    """Replace the operators that are made of others. What an expansion must know may follow from another's result."""
    while any(expansion_of(node) for node in graph.nodes):
        inferred = infer(graph, name)
        known = known_shapes(inferred)
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
        fold(graph, name)


def _name_narrow_types(graph: Graph) -> None:
    """Say in ``QuantizeLinear`` which integers of less than 8 bits are its result; its zero point becomes a byte."""
    from onnx import helper

    for node in graph.nodes:
        if node.op_type != "QuantizeLinear" or len(node.input) < 3 or not graph.is_constant(node.input[2]):
            continue
        dtype = graph.constant(node.input[2]).dtype
        if dtype.name in NARROW and not any(a.name == "output_dtype" and a.i for a in node.attribute):
            node.attribute.append(helper.make_attribute("output_dtype", helper.np_dtype_to_tensor_dtype(dtype)))


def _inline(graph: Graph, functions: set[tuple[str, str]] | None, name: str) -> None:
    """Replace calls of the model's own functions (``None``) or of the given standard ones by their bodies."""
    from onnx import helper, inliner

    model = as_model(graph)
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
