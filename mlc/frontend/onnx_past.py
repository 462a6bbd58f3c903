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
    return "tokens" if "ids" in name or "token" in name else ""


def decoder(model: onnx.ModelProto, batch: int, capacity: int, name: str) -> Decoder:
    """The model for ``batch`` sequences of at most ``capacity`` tokens.

    Raises :class:`ModelError` for a model without a past, or with inputs of which nothing is known here.
    """
    states = _states(model.graph)
    if not states:
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
        if value.name in states:
            sizes: list[int | str] = [batch, dims[1].dim_value, PAST, dims[3].dim_value]
            shapes[value.name] = (batch, dims[1].dim_value, Range(0, capacity), dims[3].dim_value)
            if len(dims) != 4 or not all(dims[axis].dim_value for axis in (1, 3)):
                raise ModelError(f"{value.name} of {name} must be (batch, heads, past, size) with numbers of heads and "
                                 "their size; export the model with those fixed")
        else:
            role = role_of(value.name)
            if not role or len(dims) != 2:
                raise ModelError(f"every input of {name} must be token ids, a mask, positions or a past, got "
                                 f"{value.name} of {len(dims)} axes; export the model without it")
            sizes = [batch, f"{PAST} + {LENGTH}" if role == "mask" else LENGTH]
            shapes[value.name] = (batch, Range(1, 2 * capacity) if role == "mask" else tokens)
        for dim, size in zip(dims, sizes, strict=True):
            dim.Clear()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    return Decoder(copied, states, shapes)


def _states(graph: onnx.GraphProto) -> dict[str, int]:
    """Each past among the inputs, and which output is its present."""
    made = {output: node for node in graph.node for output in node.output}
    inputs = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    found: dict[str, int] = {}
    for position, value in enumerate(graph.output):
        name = value.name
        while _hands_on(node := made.get(name)):
            name = node.input[0]
        past = _past_of(node, name) if node is not None else ""
        while _hands_on(node := made.get(past)):
            past = node.input[0]
        if past in inputs and past not in found:
            found[past] = position
    return found


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
