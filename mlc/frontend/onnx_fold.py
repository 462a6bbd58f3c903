"""Constant folding of what depends only on constants and static shapes, and removal of unused nodes.

Exporters compute reshapes' arguments from ``Shape``, ``Gather``, ``Concat``; TVM's importer fails on many of these
chains. With static inputs they are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlc.errors import ModelError
from mlc.frontend.onnx_containers import kind_of, tensor_type_of
from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_graph import GROWING, SMALL, Graph, infer, known_shapes
from mlc.frontend.onnx_operators import walk_nodes
from mlc.frontend.onnx_quantised import wrong_scale
from mlc.frontend.onnx_sequences import resolved

if TYPE_CHECKING:
    import onnx

__all__ = ["fold"]

_LARGEST_FOLDED = 1 << 30  # bytes, of one value and of all together
_SLIGHT = 1 << 16  # bytes of inputs: even an outer product of them can be had
_NEVER_FOLDED = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
    "If", "Loop", "Scan",
    "DequantizeLinear",  # folding would hide that the weights are 8 bits wide
    "GRU", "LSTM", "RNN",  # the reference passes over their activations and clip
})
_FLOATS = frozenset({1, 10, 16})  # of onnx.TensorProto: FLOAT, FLOAT16, BFLOAT16
# Old files name the mask of a dropout and the like without using it.
_OPTIONAL_OUTPUTS = frozenset({"BatchNormalization", "Dropout", "LayerNormalization", "MaxPool"})


def fold(graph: Graph, name: str) -> None:
    """Fold until nothing changes: folding a reshape's argument lets inference see further."""
    _drop_dead(graph)
    while True:
        before = len(graph.folded), [node.op_type for node in graph.nodes]
        inferred = infer(graph, name)
        _fold_once(graph, known_shapes(inferred))
        _resolve_sequences(graph, inferred)
        _drop_dead(graph)
        if (len(graph.folded), [node.op_type for node in graph.nodes]) == before:
            return


def _resolve_sequences(graph: Graph, inferred: Mapping[str, tuple[int, tuple[int | str | None, ...]]]) -> None:
    known = known_shapes(inferred)
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
    if array.dtype.kind not in "iu" or array.size < SMALL or to not in _FLOATS:
        return False
    if array.min() < -128 or array.max() > 127:
        return False
    name = f"{node.output[0]}/integers"
    graph.folded[name] = array.astype(np.int8)
    node.input[0] = name
    return True


def _is_slight(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether the node's outputs fit in memory whatever it computes of its (constant) inputs."""
    if node.op_type in GROWING:
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
