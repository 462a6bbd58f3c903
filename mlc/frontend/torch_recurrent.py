"""PyTorch's ``LSTM``, ``GRU`` and ``RNN`` whole, from tracing to ONNX.

PyTorch takes its recurrent layers apart while it traces: an LSTM becomes an operator of one library, the others as many
operators as there are steps. :data:`WHOLE` has operators that stay as they are, also where batch and steps are free;
:data:`TRANSLATIONS` says for these, and for those of PyTorch that :func:`torch.export` keeps, what they are in ONNX: a
recurrent operator for each layer, which compiles to one kernel over its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import library

__all__ = ["TAKEN_APART", "TRANSLATIONS", "WHOLE"]


class _Kind(NamedTuple):
    operator: str  #: in ONNX
    gates: tuple[int, ...]  #: PyTorch's, in ONNX's order: ``i f g o`` as ``i o f g``, ``r z n`` as ``z r n``
    attributes: dict[str, Any]
    states: int = 1


_KINDS = {
    "lstm": _Kind("LSTM", (0, 3, 1, 2), {}, 2),
    "gru": _Kind("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh": _Kind("RNN", (0,), {"activations": ["Tanh", "Tanh"]}),
    "rnn_relu": _Kind("RNN", (0,), {"activations": ["Relu", "Relu"]}),
}

# Operators that stay whole


def _whole_operator(name: str) -> Any:
    """``mlc::NAME`` with the arguments of PyTorch's ``torch.NAME``, which it calls."""
    schema = getattr(torch.ops.aten, name).input._schema
    qualified, several = f"mlc::{name}", _KINDS[name].states > 1

    def shaped(x: Any, hx: Any, *others: Any) -> tuple[Any, ...]:
        states, (both, batch_first) = hx if several else [hx], others[-2:]
        width = states[0].shape[2] * (2 if both else 1)  # of the output: the projected size where there is one
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
        output = x.new_empty((steps, batch, width))
        return (output.transpose(0, 1) if batch_first else output,
                *(state.new_empty(state.shape) for state in states))

    library.define(qualified, str(schema).removeprefix(f"aten::{name}.input"))
    library.impl(qualified, "default", getattr(torch, name))
    library.register_fake(qualified, shaped)
    return getattr(torch.ops.mlc, name).default


#: PyTorch's function -> the operator that stays whole, for inference; packed sequences are not its arguments
WHOLE: dict[Callable[..., Any], Any] = {getattr(torch, name): _whole_operator(name) for name in _KINDS}

#: the operators that stay whole -> what takes them apart, as decompositions are given
TAKEN_APART: dict[Any, Callable[..., Any]] = {whole: function for function, whole in WHOLE.items()}

# What they are in ONNX


def _translation(kind: _Kind) -> Callable[..., Any]:
    def translated(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        if train and dropout and num_layers > 1:
            raise ValueError(f"{kind.operator} must not drop elements at random between its layers; call eval() first")
        states = hx if kind.states > 1 else [hx]
        return _layers(kind, x, states, params, has_biases, num_layers, bidirectional, batch_first)

    return translated


def _layers(
    kind: _Kind, x: Any, states: Sequence[Any], weights: Sequence[Any], biases: bool, layers: int, both: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """``(output, final states ...)`` of all layers, each an operator of both directions."""
    from onnxscript import opset18

    op: Any = opset18  # whose operators take Python's numbers, which their types do not say
    count, directions = len(weights) // layers, 2 if both else 1
    each = count // directions
    hidden, own = weights[1].shape[1], weights[1].shape[0]
    if each != (4 if biases else 2) or own != len(kind.gates) * hidden:
        raise ValueError(f"{kind.operator} must be without a projection (proj_size=0)")
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    finals: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        parts = [weights[layer * count + i * each : layer * count + (i + 1) * each] for i in range(directions)]
        matrices = [_joined(op, [op.Unsqueeze(_reordered(op, part[i], kind, hidden), [0]) for part in parts])
                    for i in (0, 1)]
        bias = None
        if biases:
            bias = _joined(op, [op.Unsqueeze(op.Concat(
                *(_reordered(op, part[i], kind, hidden) for i in (2, 3)), axis=0), [0]) for part in parts])
        span = (layer * directions, (layer + 1) * directions)
        initial = [state if layers == 1 else op.Slice(state, [span[0]], [span[1]], [0]) for state in states]
        attributes = dict(kind.attributes)
        if "activations" in attributes:
            attributes["activations"] = attributes["activations"][:directions]
        y, *last = getattr(op, kind.operator)(
            x, *matrices, bias, None, *initial, hidden_size=hidden,
            direction="bidirectional" if both else "forward", **attributes)
        # [steps, directions, batch, hidden] --> [steps, batch, directions * hidden]
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1]) if both else op.Squeeze(y, [1])
        for final, state in zip(finals, last, strict=True):
            final.append(state)
    output = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return (output, *(_joined(op, final) for final in finals))


def _joined(op: Any, parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def _reordered(op: Any, weight: Any, kind: _Kind, hidden: int) -> Any:
    """The gates in ONNX's order along the first axis."""
    if len(kind.gates) == 1:
        return weight
    return op.Concat(*(op.Slice(weight, [i * hidden], [(i + 1) * hidden], [0]) for i in kind.gates), axis=0)


#: for ``torch.onnx.export(custom_translation_table=...)``
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator: _translation(kind) for name, kind in _KINDS.items()
    for operator in (getattr(torch.ops.mlc, name).default, getattr(torch.ops.aten, name).input)
}
