"""onnxruntime's own operators (domain ``com.microsoft``) that its quantiser and its optimiser write."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlc.frontend.onnx_decoder import DECODER
from mlc.frontend.onnx_dynamic_lstm import dynamic_quantize_lstm
from mlc.frontend.onnx_expand import Expand, Nodes
from mlc.frontend.onnx_gather_blocks import gather_block_quantized
from mlc.frontend.onnx_heads import multi_head_attention
from mlc.frontend.onnx_moe import mixture, quantised_mixture
from mlc.frontend.onnx_products import PRODUCTS, integer_to_float, scale_of_product

__all__ = ["MICROSOFT"]

_FLOAT = 1  # onnx.TensorProto.FLOAT


# Of two quantised tensors


def _binary(nodes: Nodes, operator: str) -> str:
    """``A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point``."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = nodes.inputs(8)
    result = nodes(operator, nodes.dequantised(a, a_scale, a_zero), nodes.dequantised(b, b_scale, b_zero))
    return nodes.quantised(result, y_scale, y_zero, a)


def _where(nodes: Nodes) -> str:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = nodes.inputs(9)
    sides = [nodes.dequantised(x, x_scale, x_zero), nodes.dequantised(y, y_scale, y_zero)]
    return nodes.quantised(nodes("Where", condition, *sides), z_scale, z_zero, x)


def _concat(nodes: Nodes) -> str:
    """``Y_scale, Y_zero_point``, and a tensor, its scale and its zero point for each part."""
    y_scale, y_zero, *parts = nodes.inputs(2)
    if not parts or len(parts) % 3:
        raise nodes.refused(f"its inputs after the first two must be threes of a tensor, a scale and a zero point, "
                            f"got {len(parts)}; write the model again")
    tensors = [nodes.dequantised(parts[i], parts[i + 1], parts[i + 2]) for i in range(0, len(parts), 3)]
    return nodes.quantised(nodes("Concat", *tensors, **nodes.attributes("axis")), y_scale, y_zero, parts[0])


# Of one quantised tensor


def _unary(nodes: Nodes, operator: str, **defaults: Any) -> str:
    """``X, X_scale, X_zero_point, Y_scale, Y_zero_point``; ``defaults`` are of the attributes that are passed on."""
    x, x_scale, x_zero, y_scale, y_zero = nodes.inputs(5)
    given = {**defaults, **nodes.attributes(*defaults)}
    result = nodes(operator, nodes.dequantised(x, x_scale, x_zero), **given)
    return nodes.quantised(result, y_scale, y_zero, x)


def _pool(nodes: Nodes, operator: str) -> str:
    attributes = nodes.attributes()
    if attributes.pop("channels_last", 0):
        raise nodes.refused("channels_last must be 0; save the model before onnxruntime's layout optimisation")
    x, x_scale, x_zero, y_scale, y_zero = nodes.inputs(5)
    result = nodes(operator, nodes.dequantised(x, x_scale, x_zero), **attributes)
    return nodes.quantised(result, y_scale, y_zero, x)


def _reduce_mean(nodes: Nodes) -> str:
    x, x_scale, x_zero, y_scale, y_zero = nodes.inputs(5)
    attributes = nodes.attributes("keepdims")
    axes = nodes.attributes("axes").get("axes")
    inputs = [nodes.dequantised(x, x_scale, x_zero)]
    if axes is not None and nodes.opset >= 18:
        inputs.append(nodes.constant(list(axes)))
    elif axes is not None:
        attributes["axes"] = axes
    return nodes.quantised(nodes("ReduceMean", *inputs, **attributes), y_scale, y_zero, x)


def _softmax(nodes: Nodes) -> str:
    """Before opset 13, which the attribute ``opset`` tells, over all axes from ``axis`` on."""
    x, x_scale, x_zero, y_scale, y_zero = nodes.inputs(5)
    attributes = nodes.attributes()
    flat = attributes.get("opset", nodes.opset) < 13
    axis = attributes.get("axis", 1 if flat else -1)
    shape = nodes.shape_of(x)
    last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    value = nodes.dequantised(x, x_scale, x_zero)
    if last or flat == (nodes.opset < 13):
        result = nodes("Softmax", value, axis=axis)
    elif flat:
        rows = nodes("Softmax", nodes("Flatten", value, axis=axis), axis=1)
        result = nodes("Reshape", rows, nodes("Shape", value))
    else:
        raise nodes.refused(f"its axis must be the last in a model of opset {nodes.opset}, got {axis}; convert the "
                            "model to opset 13")
    return nodes.quantised(result, y_scale, y_zero, x)


# Attention


def _q_attention(nodes: Nodes) -> str:
    """``input, weight, bias, input_scale, weight_scale, mask_index, input_zero_point, weight_zero_point, past``:
    :func:`_attention` whose product with the weights is of integers."""
    x, w, bias, x_scale, w_scale, mask, x_zero, w_zero, past = nodes.inputs(9)
    projected = integer_to_float(nodes, x, w, scale_of_product(nodes, x_scale, w_scale), (x_zero, w_zero), bias)
    return _self_attention(nodes, projected, w, mask, past)


def _attention(nodes: Nodes) -> str:
    """``input, weights, bias, mask_index, past, attention_bias``."""
    x, w, bias, mask, past, added, length = nodes.inputs(7)
    projected = str(nodes("MatMul", x, w))
    if bias:
        projected = str(nodes("Add", projected, bias))
    return _self_attention(nodes, projected, w, mask, past or length, added)


def _self_attention(nodes: Nodes, projected: str, weight: str, mask: str, past: str, added: str = "") -> str:
    """Attention of the tokens of each sequence to each other.

    The input is (batch, length, hidden), ``projected`` its products with the columns of ``weight`` for query, key and
    value, one behind the other. ``added`` is added to the scores.
    """
    attributes = nodes.attributes()
    if past or any(nodes.node.output[1:]):
        raise nodes.refused("it must be without past and present keys; export the model without them")
    if attributes.get("do_rotary", 0):
        raise nodes.refused("do_rotary must be 0; export the model without onnxruntime's fusion of attention")
    heads, columns = int(attributes["num_heads"]), nodes.known_shape(weight, "weight")[1]
    sizes = list(attributes.get("qkv_hidden_sizes") or [columns // 3] * 3)
    if sum(sizes) != columns or any(size % heads for size in sizes) or sizes[0] != sizes[1]:
        raise nodes.refused(f"the {columns} columns of its weight must be those of query, key and value for {heads} "
                            f"heads, got {sizes}; export the model again")
    scale = float(attributes.get("scale", 0.0)) or (sizes[0] // heads) ** -0.5
    query, key, value = _heads(nodes, projected, heads, sizes)
    scores = nodes("Mul", nodes("MatMul", query, key), nodes.constant(scale, projected))
    if mask:
        scores = nodes("Add", scores, _mask(nodes, mask, float(attributes.get("mask_filter_value", -10000.0))))
    if added:
        scores = nodes("Add", scores, added)
    if attributes.get("unidirectional", 0):
        scores = nodes("Add", scores, _causal(nodes))
    seen = nodes("MatMul", nodes("Softmax", scores, axis=3), value)
    joined = nodes("Transpose", seen, perm=[0, 2, 1, 3])
    return str(nodes("Reshape", joined, nodes.constant([0, 0, sizes[2]])))


def _heads(nodes: Nodes, projected: str, heads: int, sizes: list[int]) -> list[str]:
    """Query (batch, heads, length, size), key (batch, heads, size, length) and value (as the query)."""
    if nodes.opset >= 13:
        parts = nodes("Split", projected, nodes.constant(sizes), outputs=3, axis=2)
    else:
        parts = nodes("Split", projected, outputs=3, axis=2, split=sizes)
    result = []
    for part, size, order in zip(parts, sizes, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
        split = nodes("Reshape", part, nodes.constant([0, 0, heads, size // heads]))
        result.append(str(nodes("Transpose", split, perm=order)))
    return result


def _mask(nodes: Nodes, mask: str, forbidden: float) -> str:
    """What is added to the scores (batch, heads, length, length): ``forbidden`` where nothing is to be seen.

    The mask is (batch,) of lengths, or of ones where there is something, (batch, length) or (batch, length, length).
    """
    shape, (batch, length) = nodes.known_shape(mask, "mask_index"), nodes.known_shape(nodes.node.input[0], "input")[:2]
    if shape == (batch,):
        places = nodes.constant(np.arange(length, dtype="int32").reshape(1, length))
        mask = nodes("Less", places, nodes("Reshape", mask, nodes.constant([batch, 1])))
    elif shape not in ((batch, length), (batch, length, length)):
        raise nodes.refused(f"mask_index must be of {[batch]}, {[batch, length]} or {[batch, length, length]}, got "
                            f"{list(shape)}; export the model with such a mask")
    seen = nodes("Cast", mask, to=_FLOAT)
    added = nodes("Mul", nodes("Sub", nodes.constant(1.0), seen), nodes.constant(forbidden))
    rows = length if len(shape) == 3 else 1
    return str(nodes("Reshape", added, nodes.constant([batch, 1, rows, length])))


def _causal(nodes: Nodes) -> str:
    length = nodes.known_shape(nodes.node.input[0], "input")[1]
    lowest = np.finfo("float32").min
    return nodes.constant(np.triu(np.full((length, length), lowest, "float32"), 1))


# Layer normalisation


def _layer_norm(nodes: Nodes, x: str, gamma: str, beta: str) -> str:
    """``(x - mean) / sqrt(variance + epsilon) * gamma + beta`` along the last axis."""
    epsilon = float(nodes.attributes().get("epsilon", 1e-12))
    if nodes.opset >= 17:
        return str(nodes("LayerNormalization", x, gamma, *([beta] if beta else []), axis=-1, epsilon=epsilon))
    centred = nodes("Sub", x, nodes("ReduceMean", x, axes=[-1]))
    variance = nodes("ReduceMean", nodes("Mul", centred, centred), axes=[-1])
    deviation = nodes("Sqrt", nodes("Add", variance, nodes.constant(epsilon, x)))
    scaled = str(nodes("Mul", nodes("Div", centred, deviation), gamma))
    return str(nodes("Add", scaled, beta)) if beta else scaled


def _skip_layer_norm(nodes: Nodes) -> list[str]:
    """``input, skip, gamma, beta, bias``; the last of four outputs is the sum that is normalised."""
    x, skip, gamma, beta, bias = nodes.inputs(5)
    if any(nodes.node.output[1:3]):
        raise nodes.refused("its mean and deviation must not be used; export the model without them")
    total = str(nodes("Add", x, skip))
    if bias:
        total = str(nodes("Add", total, bias))
    return [_layer_norm(nodes, total, gamma, beta), "", "", total]


def _embed_layer_norm(nodes: Nodes) -> list[str]:
    """``input_ids, segment_ids, word, position and segment embedding, gamma, beta, mask, position_ids``."""
    ids, segments, word, position, segment, gamma, beta, mask, places = nodes.inputs(9)
    parts = [nodes("Gather", word, ids), _positions(nodes, position, ids, places)]
    if segments:
        parts.append(nodes("Gather", segment, segments))
    return _embedded(nodes, parts, gamma, beta, ids, mask)


def _q_embed_layer_norm(nodes: Nodes) -> list[str]:
    """As :func:`_embed_layer_norm`, with tables of bytes, then their scales, then their zero points; rows are taken
    before they are made float32."""
    names = nodes.inputs(18)
    ids, segments, mask = names[0], names[1], names[7]
    word, position, segment, gamma, beta = zip(names[2:7], names[8:13], names[13:18], strict=True)
    parts = [nodes.dequantised(nodes("Gather", word[0], ids), *word[1:]),
             nodes.dequantised(_positions(nodes, position[0], ids, ""), *position[1:])]
    if segments:
        parts.append(nodes.dequantised(nodes("Gather", segment[0], segments), *segment[1:]))
    return _embedded(nodes, parts, nodes.dequantised(*gamma), nodes.dequantised(*beta), ids, mask)


def _positions(nodes: Nodes, table: str, ids: str, places: str) -> str:
    if places:
        return str(nodes("Gather", table, places))
    length = nodes.known_shape(ids, "input_ids")[1]
    return str(nodes("Slice", table, *(nodes.constant([number]) for number in (0, length, 0))))


def _embedded(nodes: Nodes, parts: list[str], gamma: str, beta: str, ids: str, mask: str) -> list[str]:
    """The normalised sum of the parts, the length of each sequence by its mask, and the sum."""
    total = functools.reduce(lambda a, b: str(nodes("Add", a, b)), parts)
    if not mask:
        lengths = nodes("Identity", nodes.constant(np.zeros(nodes.known_shape(ids, "input_ids")[:1], "int32")))
    elif nodes.opset >= 13:
        lengths = nodes("ReduceSum", mask, nodes.constant([1]), keepdims=0)
    else:
        lengths = nodes("ReduceSum", mask, axes=[1], keepdims=0)
    return [_layer_norm(nodes, total, gamma, beta), lengths, total]


# Of float32


def _fused_matmul(nodes: Nodes) -> str:
    """``alpha * A' @ B'``; ``transBatch`` moves the first axis before the last."""
    attributes = nodes.attributes()
    sides = []
    for name, side in zip("AB", nodes.inputs(2), strict=True):
        turned, moved = (attributes.get(f"{kind}{name}", 0) for kind in ("trans", "transBatch"))
        if turned or moved:
            rank = len(nodes.known_shape(side, name))
            order = list(range(rank))
            if moved and rank > 2:
                order = [*order[1:-1], 0, order[-1]]
            if turned and rank > 1:
                order[-2:] = order[:-3:-1]
            side = nodes("Transpose", side, perm=order)
        sides.append(side)
    return _scaled(nodes, nodes("MatMul", *sides), float(attributes.get("alpha", 1.0)), nodes.node.input[0])


def _scaled(nodes: Nodes, value: str, by: float, like: str) -> str:
    return value if by == 1.0 else str(nodes("Mul", value, nodes.constant(by, like)))


_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Elu": ("alpha",),
}


def _activated(nodes: Nodes, value: str, name: Any, numbers: list[float]) -> str:
    """The activation of that name, with its parameters in their order."""
    name = name.decode() if isinstance(name, bytes) else str(name)
    if not name:
        return value
    if name == "Clip":
        bounds = [nodes.constant(float(number)) for number in numbers]
        return str(nodes("Clip", value, *bounds))
    if name not in _ACTIVATIONS:
        raise nodes.refused(f"its activation must be one of {', '.join(sorted({*_ACTIVATIONS, 'Clip'}))}, got {name}; "
                            "save the model without onnxruntime's optimisation")
    given: dict[str, Any] = dict(zip(_ACTIVATIONS[name], numbers, strict=False))
    return str(nodes(name, value, **given))


def _fused_conv(nodes: Nodes) -> str:
    """``activation(Conv(X, W, B) + Z)``."""
    x, w, b, z = nodes.inputs(4)
    attributes = nodes.attributes()
    name, numbers = attributes.pop("activation", ""), list(attributes.pop("activation_params", []))
    result = str(nodes("Conv", x, w, *([b] if b else []), **attributes))
    return _activated(nodes, str(nodes("Add", result, z)) if z else result, name, numbers)


def _fused_gemm(nodes: Nodes) -> str:
    attributes = nodes.attributes()
    names = [f"activation_{letter}" for letter in ("alpha", "beta", "gamma")]
    numbers = [attributes.pop(name) for name in names if name in attributes]
    activation = attributes.pop("activation", "")
    return _activated(nodes, str(nodes("Gemm", *nodes.node.input, **attributes)), activation, numbers)


def _quick_gelu(nodes: Nodes) -> str:
    (x,) = nodes.inputs(1)
    scaled = nodes("Mul", x, nodes.constant(float(nodes.attributes().get("alpha", 1.702)), x))
    return str(nodes("Mul", x, nodes("Sigmoid", scaled)))


def _gelu(nodes: Nodes, bias: bool = False) -> str:
    """``x * (1 + erf(x / sqrt(2))) / 2`` of ``A + B`` or of ``X``."""
    x = nodes("Add", *nodes.node.input) if bias else nodes.node.input[0]
    like = nodes.node.input[0]
    error = nodes("Erf", nodes("Mul", x, nodes.constant(2 ** -0.5, like)))
    doubled = nodes("Mul", x, nodes("Add", error, nodes.constant(1.0, like)))
    return str(nodes("Mul", doubled, nodes.constant(0.5, like)))


def _fast_gelu(nodes: Nodes) -> str:
    """``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2`` of ``X + bias``."""
    like, bias = nodes.inputs(2)
    x = nodes("Add", like, bias) if bias else like
    cubed = nodes("Mul", nodes("Mul", nodes("Mul", x, x), x), nodes.constant(0.044715, like))
    inner = nodes("Mul", nodes("Add", x, cubed), nodes.constant((2 / np.pi) ** 0.5, like))
    doubled = nodes("Mul", x, nodes("Add", nodes("Tanh", inner), nodes.constant(1.0, like)))
    return str(nodes("Mul", doubled, nodes.constant(0.5, like)))


def _as_standard(nodes: Nodes, operator: str) -> str:
    """onnxruntime's name for the standard operator, of types that the model's opset may not have."""
    return str(nodes(operator, *nodes.node.input, **nodes.attributes()))


#: operator of ``com.microsoft`` --> what it is made of
MICROSOFT: Mapping[str, Expand] = {
    **DECODER,
    **PRODUCTS,
    "Attention": _attention,
    "BiasGelu": functools.partial(_gelu, bias=True),
    "DequantizeLinear": functools.partial(_as_standard, operator="DequantizeLinear"),
    "DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "GatherBlockQuantized": gather_block_quantized,
    "Gelu": _gelu,
    "MoE": mixture,
    "MultiHeadAttention": multi_head_attention,
    "QAttention": _q_attention,
    "QEmbedLayerNormalization": _q_embed_layer_norm,
    "QLinearAdd": functools.partial(_binary, operator="Add"),
    "QLinearAveragePool": functools.partial(_pool, operator="AveragePool"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": functools.partial(_pool, operator="GlobalAveragePool"),
    "QLinearLeakyRelu": functools.partial(_unary, operator="LeakyRelu", alpha=0.01),
    "QLinearMul": functools.partial(_binary, operator="Mul"),
    "QLinearReduceMean": _reduce_mean,
    "QLinearSigmoid": functools.partial(_unary, operator="Sigmoid"),
    "QLinearSoftmax": _softmax,
    "QLinearWhere": _where,
    "QMoE": quantised_mixture,
    "QuantizeLinear": functools.partial(_as_standard, operator="QuantizeLinear"),
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_layer_norm,
}
