"""Shape inputs: inputs whose values decide shapes, such as the sizes of a ``Reshape`` or the axes of a ``ReduceSum``.

Code is made for shapes, so these inputs must be known when a model is compiled; they become constants of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import UsageError

if TYPE_CHECKING:
    import onnx

__all__ = ["decisive_inputs", "missing_values", "with_values"]

#: operator --> the positions of those inputs that must be known
_POSITIONS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,),
    "CumProd": (1,), "CumSum": (1,), "DFT": (1, 2), "Dropout": (1, 2), "Expand": (1,),
    "HammingWindow": (0,), "HannWindow": (0,), "Loop": (0, 1), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1, 2, 3, 4),
    "OneHot": (1, 2), "Pad": (1, 2, 3), "Range": (0, 1, 2), "Reshape": (1,), "Resize": (1, 2, 3), "STFT": (1, 3),
    "SequenceAt": (1,), "SequenceErase": (1,), "SequenceInsert": (2,), "Slice": (1, 2, 3, 4), "Split": (1,),
    "SplitToSequence": (1,), "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,),
    "Unsqueeze": (1,), "Upsample": (1,),
    **{f"Reduce{kind}": (1,) for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                                          "SumSquare")},
}
#: what reads an input's shape alone
_OF_SHAPES = frozenset({"Shape", "Size"})


def decisive_inputs(model: onnx.ModelProto) -> list[str]:
    """The model's inputs of at most one axis that decide shapes, in its order.

    What a larger input decides with others (as the boxes of a detector do) is not among them: such a shape depends on
    data.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: _is_small(value) for value in model.graph.input if value.name not in weights}
    made = {output: node for node in model.graph.node for output in node.output if output}
    found: set[str] = set()
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        for position in (0,) if _gives_container(node) else _POSITIONS.get(node.op_type, ()):
            if position < len(node.input) and node.input[position]:
                origins = _origins(node.input[position], made, inputs)
                if all(inputs[name] for name in origins):
                    found |= origins
    return [name for name in inputs if name in found]


def missing_values(model: onnx.ModelProto, values: Container[str]) -> list[str]:
    """The inputs that decide shapes and are not in ``values``."""
    return [each for each in decisive_inputs(model) if each not in values]


def with_values(model: onnx.ModelProto, values: Mapping[str, Any], name: str) -> onnx.ModelProto:
    """The model with these inputs as constants.

    Raises :class:`UsageError` for values that are no inputs or do not fit them.
    """
    from onnx import numpy_helper

    if not values:
        return model
    inputs = {value.name: value for value in model.graph.input}
    if unknown := sorted(values.keys() - inputs.keys()):
        raise UsageError(f"values must name inputs of {name} ({', '.join(inputs)}), got {', '.join(unknown)}")
    changed = type(model)()
    changed.CopyFrom(model)
    del changed.graph.input[:]
    changed.graph.input.extend(value for value in model.graph.input if value.name not in values)
    changed.graph.initializer.extend(
        numpy_helper.from_array(_fitting(values[each], inputs[each], name), each) for each in values)
    return changed


def _gives_container(node: onnx.NodeProto) -> bool:
    """Whether a node chooses between sequences or optionals, which may hold as many as they like."""
    return node.op_type == "If" and any(
        value.type.HasField("sequence_type") or value.type.HasField("optional_type")
        for branch in node.attribute for value in branch.g.output)


def _is_small(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return value.type.HasField("tensor_type") and tensor.HasField("shape") and len(tensor.shape.dim) <= 1


def _origins(name: str, made: Mapping[str, onnx.NodeProto], inputs: Iterable[str]) -> set[str]:
    """The inputs of which a value's numbers are computed."""
    found, seen, pending = set[str](), set[str](), [name]
    known = set(inputs)
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in known:
            found.add(each)
        elif each in made and made[each].op_type not in _OF_SHAPES:
            pending.extend(filter(None, made[each].input))
    return found


def _fitting(value: Any, spec: onnx.ValueInfoProto, name: str) -> np.ndarray:
    """``value`` in the type and shape of an input; a list of one number may stand for a number."""
    from onnx import helper

    tensor = spec.type.tensor_type
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    try:
        array = np.asarray(value)
        if not sizes and array.size == 1:
            array = array.reshape(())
        fits = array.ndim == len(sizes) and all(s in (None, n) for s, n in zip(sizes, array.shape, strict=True))
        whole = array.size == 0 or array.dtype == dtype or bool(np.all(array.astype(dtype) == array))
    except (TypeError, ValueError, OverflowError):
        fits = whole = False
    if not fits or not whole:
        shape = ", ".join("?" if s is None else str(s) for s in sizes)
        raise UsageError(f"values[{spec.name!r}] of {name} must be {dtype.name} of the shape ({shape}), got {value!r}")
    return array.astype(dtype)
