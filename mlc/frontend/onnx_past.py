"""Language models that take the keys and values of former tokens: which inputs and outputs these are, and their sizes.

Exporters name the sizes as they like (``past_sequence_length``, ``total_sequence_length``); what they must be to each
other follows from what the inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from mlc.errors import ModelError
from mlc.shapes import Range

if TYPE_CHECKING:
    import onnx

__all__ = ["LENGTH", "PAST", "Decoder", "decoder", "role_of"]

#: names of the free sizes: tokens before a call, and tokens of a call
PAST, LENGTH = "past", "length"

#: operator --> the inputs that are pasts, each with the output that is its present
_PASTS = {
    "Attention": {4: 1, 5: 2},
    "GroupQueryAttention": {3: 1, 4: 2},
    "MultiHeadAttention": {6: 1, 7: 2},
}


@dataclass(frozen=True)
class Decoder:
    """A model whose border says what its sizes are; ``shapes`` are those of its inputs, ``states`` maps each past to
    the position of its present among the outputs."""

    model: onnx.ModelProto
    states: Mapping[str, int]
    shapes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def role_of(name: str) -> str:
    """``tokens``, ``mask`` or ``positions``, by what exporters call them; empty for any other input."""
    if "mask" in name:
        return "mask"
    if "position" in name:
        return "positions"
    return "tokens" if ("ids" in name or "token" in name) and "type" not in name else ""


def decoder(model: onnx.ModelProto, batch: int, capacity: int, name: str) -> Decoder:
    """The model for ``batch`` sequences of at most ``capacity`` tokens.

    Raises :class:`ModelError` for a model without a past, or with inputs of which nothing is known here.
    """
    joints = _joints(model.graph)
    if not joints:
        raise ModelError(f"{name} must take the keys and values of former tokens and give those and the new ones, but "
                         "has no such input; export it with past keys and values (use_cache=True)")
    copied = type(model)()
    copied.CopyFrom(model)
    weights = {tensor.name for tensor in copied.graph.initializer}
    shapes: dict[str, tuple[Any, ...]] = {}
    tokens = Range(1, capacity)
    for value in copied.graph.input:
        if value.name in weights:
            continue
        dims = value.type.tensor_type.shape.dim
        if value.name in joints:
            heads, width = _heads(copied.graph, value, joints[value.name][1])
            sizes: list[int | str] = [batch, heads, PAST, width]
            shapes[value.name] = (batch, heads, Range(0, capacity), width)
            if not heads or not width:
                raise ModelError(f"{value.name} of {name} must be (batch, heads, past, size) with numbers of heads and "
                                 "their size; export the model with those fixed")
        else:
            role = role_of(value.name)
            if not role or len(dims) != 2:
                raise ModelError(f"every input of {name} must be token ids, a mask, positions or a past, got "
                                 f"{value.name} of {len(dims)} axes; export the model without it, or compile it with "
                                 "mlc.compile and hand its state on from call to call")
            sizes = [batch, f"{PAST} + {LENGTH}" if role == "mask" else LENGTH]
            shapes[value.name] = (batch, Range(1, 2 * capacity) if role == "mask" else tokens)
        for dim, size in zip(dims, sizes, strict=True):
            dim.Clear()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    return Decoder(copied, {past: position for past, (position, _) in joints.items()}, shapes)


def _joints(graph: onnx.GraphProto) -> dict[str, tuple[int, onnx.NodeProto]]:
    """Each past among the inputs, which output is its present, and the node that joins it and the new rows."""
    made = {output: node for node in graph.node for output in node.output}
    inputs = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    found: dict[str, tuple[int, onnx.NodeProto]] = {}
    for position, value in enumerate(graph.output):
        name = value.name
        while _hands_on(node := made.get(name)):
            name = node.input[0]
        joint, past = node, _past_of(node, name) if node is not None else ""
        while _hands_on(node := made.get(past)):
            past = node.input[0]
        if joint is not None and past in inputs and past not in found:
            found[past] = position, joint
    return found


def _heads(graph: onnx.GraphProto, past: onnx.ValueInfoProto, joint: onnx.NodeProto) -> tuple[int, int]:
    """How many heads a past has, and their size; 0 for what is not a number.

    onnxruntime's builder leaves the size a name; it is that of what is put behind the past.
    """
    heads, size = (past.type.tensor_type.shape.dim[axis].dim_value if len(past.type.tensor_type.shape.dim) == 4 else 0
                   for axis in (1, 3))
    if heads and not size:
        widths = {value.name: value.type.tensor_type.shape.dim[-1].dim_value
                  for value in graph.value_info if value.type.tensor_type.shape.dim}
        given = {a.name: a.i for a in joint.attribute}
        if joint.op_type == "Concat":
            size = widths.get(joint.input[1], 0)
        elif joint.input[1]:
            place = 2 if joint.op_type == "MultiHeadAttention" and joint.input[7] == past.name else 1
            size = widths.get(joint.input[place], 0) // heads
        elif joint.op_type == "GroupQueryAttention":
            size = widths.get(joint.input[0], 0) // (given["num_heads"] + 2 * heads)
    return heads, size


def _hands_on(node: onnx.NodeProto | None) -> TypeGuard[onnx.NodeProto]:
    """Whether the node's result is its input; exporters also write a concatenation of one."""
    return node is not None and (node.op_type == "Identity" or (node.op_type == "Concat" and len(node.input) == 1))


def _past_of(node: onnx.NodeProto, present: str) -> str:
    if node.op_type == "Concat":
        return str(node.input[0]) if len(node.input) == 2 else ""
    for past, out in _PASTS.get(node.op_type, {}).items():
        if out < len(node.output) and node.output[out] == present and past < len(node.input):
            return str(node.input[past])
    return ""
