"""Operators expanded to their definitions in the ONNX standard, where onnx's own inliner fails.

That is over an input that is left out, and over an attribute that has its default, which the definition refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from mlc.frontend.onnx_expand import Nodes

if TYPE_CHECKING:
    import onnx

__all__ = ["fails_to_inline", "from_function"]


def fails_to_inline(node: onnx.NodeProto) -> bool:
    """Whether ONNX defines the operator by others, but the node leaves out what its inliner wants."""
    names = _defaults(node.op_type)
    return names is not None and (not all(node.input) or not names <= {each.name for each in node.attribute})


@cache
def _defaults(operator: str) -> frozenset[str] | None:
    """The attributes that have a default; None for an operator without a definition by others."""
    from onnx import defs

    try:
        schema = defs.get_schema(operator)
    except defs.SchemaError:
        return None
    if not (schema.has_function or schema.has_context_dependent_function):
        return None
    return frozenset(name for name, each in schema.attributes.items() if each.default_value.name)


def from_function(nodes: Nodes) -> list[str]:
    """The nodes of the operator's definition at the model's opset."""
    from onnx import FunctionProto, NodeProto, defs

    schema = defs.get_schema(nodes.node.op_type, nodes.opset)
    node = NodeProto()
    node.CopyFrom(nodes.node)
    given = {each.name for each in node.attribute}
    node.attribute.extend(each.default_value for name, each in schema.attributes.items()
                          if name not in given and each.default_value.name)
    body = FunctionProto()
    if versions := [each for each in schema.function_opset_versions if each <= nodes.opset]:
        body.ParseFromString(schema.get_function_with_opset_version(max(versions)))
    else:
        versions = [each for each in schema.context_dependent_function_opset_versions if each <= nodes.opset]
        if not versions:
            raise nodes.refused(f"ONNX has no definition of it in opset {nodes.opset}; export the model for another")
        types = [_type(nodes, value) for value in node.input]
        body.ParseFromString(schema.get_context_dependent_function_with_opset_version(
            max(versions), node.SerializeToString(), types))
    attributes = {each.name: each for each in node.attribute}
    names = {"": "", **dict.fromkeys(body.input, ""), **dict(zip(body.input, node.input, strict=False))}
    prefix = f"{next(each for each in node.output if each)}/{node.op_type}/"
    nodes.made.extend(_renamed(each, names, attributes, prefix) for each in body.node)
    return [prefix + each for each in body.output]


def _type(nodes: Nodes, value: str) -> bytes:
    from onnx import TypeProto, helper

    if not value:
        return TypeProto().SerializeToString()
    known = nodes.types.get(value) or nodes.ranked.get(value)
    array = nodes.value_of(value)
    if array is not None:
        known = int(helper.np_dtype_to_tensor_dtype(array.dtype)), array.shape
    if known is None:
        raise nodes.refused(f"the type of {value} must be known; run onnx's shape inference on the model")
    return helper.make_tensor_type_proto(*known).SerializeToString()


def _renamed(
    node: onnx.NodeProto, outer: Mapping[str, str], attributes: Mapping[str, Any], prefix: str
) -> onnx.NodeProto:
    """A node of a definition with its values named as in the graph, and its attributes those of the operator's node
    where it refers to them. Values in nested graphs, too, have names that are theirs alone."""
    from onnx import AttributeProto, NodeProto

    made = NodeProto()
    made.CopyFrom(node)
    for values in (made.input, made.output):
        values[:] = [outer.get(each, prefix + each) for each in values]
    made.ClearField("attribute")
    for attribute in node.attribute:
        if attribute.ref_attr_name and attribute.ref_attr_name not in attributes:
            continue
        new = AttributeProto()
        new.CopyFrom(attributes[attribute.ref_attr_name] if attribute.ref_attr_name else attribute)
        new.name = attribute.name
        if new.HasField("g"):
            for values in (new.g.input, new.g.output, new.g.initializer, new.g.value_info):
                for value in values:
                    value.name = outer.get(value.name, prefix + value.name)
            inner = [_renamed(each, outer, attributes, prefix) for each in new.g.node]
            new.g.ClearField("node")
            new.g.node.extend(inner)
        made.attribute.append(new)
    return made
