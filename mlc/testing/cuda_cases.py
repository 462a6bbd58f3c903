"""Tensor functions that exercise every CUDA space, each with an independent reference in float64.

Shapes are small and mostly odd, so that no tile divides anything; what is regular is so on purpose (vector accesses).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mlc.testing.cases import Case
from mlc.testing.cuda_attention import ATTENTIONS
from mlc.testing.cuda_few_bits import FEW_BITS
from mlc.testing.cuda_images import IMAGES

__all__ = ["CASES", "epilogue_case", "product_case"]

#: sums in another order than the reference's, and the GPU's own exponentials
_TOLERANCE = 5e-5
#: of products of 16-bit floats, whose sums are float32 but whose results may be rounded to 16 bits
_TOLERANCES = {"float16": 1e-3, "bfloat16": 3e-3}


def _case(
    name: str, space: str, shapes: Sequence[tuple[int, ...]], build: Callable[..., Any], reference: Callable[..., Any],
    dtypes: Sequence[str] = (), index: str = "int64", high: Mapping[int, int] | None = None,
) -> Case:
    """``build`` makes the results of placeholders; indices are as Relax lowers them, a function written by hand has
    32-bit ones."""

    def tensors() -> list[Any]:
        from tvm import te

        types = dtypes or ("float32",) * len(shapes)
        inputs = [te.placeholder(s, t, f"p{i}") for i, (s, t) in enumerate(zip(shapes, types, strict=True))]
        built = build(*inputs)
        return [*inputs, *([built] if isinstance(built, te.Tensor) else built)]

    rtol = max([_TOLERANCE, *(_TOLERANCES.get(dtype, 0.0) for dtype in dtypes)])
    return Case(name, tensors, reference, rtol, high or {}, space=space, index=index)


def _conv(x: Any, w: Any, stride: int = 1, pad: int = 0, groups: int = 1, dilation: int = 1) -> np.ndarray:
    """Convolution from its definition, NCHW times OIHW."""
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    reach = (w.shape[2] - 1) * dilation + 1, (w.shape[3] - 1) * dilation + 1
    windows = sliding_window_view(padded, reach, axis=(2, 3))[:, :, ::stride, ::stride, ::dilation, ::dilation]
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    parts = [
        np.einsum("nchwrs,fcrs->nfhw", windows[:, g * per_in : (g + 1) * per_in], w[g * per_out : (g + 1) * per_out])
        for g in range(groups)
    ]
    return np.concatenate(parts, axis=1)


def _topi() -> Any:
    from tvm import topi

    return topi


def _conv_case(name: str, x: tuple[int, ...], w: tuple[int, ...], space: str = "cuda.conv", **options: int) -> Case:
    stride, pad = options.get("stride", 1), options.get("pad", 0)
    groups, dilation = options.get("groups", 1), options.get("dilation", 1)

    def build(data: Any, weight: Any) -> Any:
        return _topi_conv(data, weight, stride, pad, dilation, groups)

    return _case(name, space, (x, w), build, lambda a, b: _conv(a, b, stride, pad, groups, dilation))


def _topi_conv(data: Any, weight: Any, stride: int, pad: int, dilation: int = 1, groups: int = 1) -> Any:
    nn = _topi().nn
    if groups == 1:
        return nn.conv2d_nchw(data, weight, stride, pad, dilation)
    return nn.group_conv2d_nchw(data, weight, stride, pad, dilation, groups)


def _conv_bias_relu(data: Any, weight: Any, bias: Any) -> Any:
    topi = _topi()
    return topi.nn.relu(topi.add(_topi_conv(data, weight, 1, 1), bias))


def _conv_groups(data: Any, weight: Any, bias: Any) -> Any:
    topi = _topi()
    return topi.nn.relu(topi.add(_topi_conv(data, weight, 1, 1, 1, 4), bias))


def _conv_residual(data: Any, weight: Any, bias: Any, other: Any) -> Any:
    topi = _topi()
    return topi.nn.relu(topi.add(topi.add(_topi_conv(data, weight, 2, 1), bias), other))


def _product(
    transposed: bool = False, activation: bool = False, total: str = "", result: str = "",
) -> Callable[..., Any]:
    """Matrix product over the last two dimensions, leading ones broadcast; with bias and exact GELU on demand.
    ``total`` is the type of the sums where it is not the operands', ``result`` one that they are cast to."""

    def build(a: Any, b: Any, *bias: Any) -> Any:
        from tvm import te

        topi = _topi()
        depth = a.shape[-1]
        k = te.reduce_axis((0, depth), "k")
        columns = b.shape[-2] if transposed else b.shape[-1]
        lead = len(a.shape) - 2

        def point(*i: Any) -> Any:
            inner = (i[-1], k) if transposed else (k, i[-1])
            x, y = a[(*i[:-1], k)], b[(*i[lead - (len(b.shape) - 2) : lead], *inner)]
            return te.sum(x.astype(total) * y.astype(total) if total else x * y, axis=k)

        product = te.compute((*a.shape[:-1], columns), point, "product")
        if bias:
            product = topi.add(product, bias[0])
        if activation:
            from tvm import tirx

            half, root = tirx.const(0.5, "float32"), tirx.const(2**-0.5, "float32")
            product = te.compute(
                product.shape, lambda *i: product(*i) * half * (tirx.const(1.0, "float32") + te.erf(product(*i) * root))
            )
        return topi.cast(product, result) if result else product

    return build


def product_case(
    name: str, a: tuple[int, int], b: tuple[int, int], dtype: str, total: str, transposed: bool = False,
    space: str = "cuda.mma",
) -> Case:
    """A product of two matrices of ``dtype``, the second by columns if ``transposed``, added up in ``total``; of
    ``tf32``, float32 that may be rounded so."""
    if dtype == "tf32":
        plain = _case(name, "cuda.mma", (a, b), _product(transposed), lambda x, y: x @ (y.T if transposed else y))
        return _tf32(plain)

    def reference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        wide = [each.astype("int64") if total == "int32" else each for each in (x, y)]
        return wide[0] @ (wide[1].T if transposed else wide[1])

    return _case(name, space, (a, b), _product(transposed, total=total), reference, (dtype, dtype))


def epilogue_case(
    space: str, what: str, sizes: tuple[int, int, int], dtype: str, *, transposed: bool = False
) -> Case:
    """A product of ``(m, n, k)`` of 16-bit floats, the second operand by columns if ``transposed``, added up in float32
    and rounded to ``dtype``: after a bias and GELU (``gelu``), after a bias and before a matrix is added
    (``residual``), or at once (``cast``). Where the matrix is of float32 (``wide residual``), so is the result; of
    ``tf32`` all are."""
    m, n, k = sizes
    shapes = ((m, k), (n, k) if transposed else (k, n))
    if what == "wide residual":
        inner = "" if dtype == "tf32" else "float32"
        operand = dtype if inner else "float32"
        case = _case(what, space, (*shapes, (n,), (m, n)), lambda a, b, c, r: _topi().add(
            _product(transposed, total=inner)(a, b, c), r), lambda a, b, c, r: a @ (b.T if transposed else b) + c + r,
            (operand, operand, "float32", "float32"))
        return case if inner else _tf32(case)

    def product(*operands: Any) -> Any:
        return _product(transposed, what == "gelu", total="float32", result=dtype)(*operands)

    def wanted(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ (b.T if transposed else b)

    if what == "cast":
        return _case(what, space, shapes, product, wanted, (dtype, dtype))
    if what == "gelu":
        return _case(what, space, (*shapes, (n,)), product, lambda a, b, c: _gelu(wanted(a, b) + c),
                     (dtype, dtype, "float32"))
    return _case(what, space, (*shapes, (n,), (m, n)), lambda a, b, c, r: _topi().add(product(a, b, c), r),
                 lambda a, b, c, r: wanted(a, b) + c + r, (dtype, dtype, "float32", dtype))


def _rounded_swish(a: Any, b: Any) -> Any:
    """Product with the transposed ``b``, times its sigmoid, rounded to 16 bits: stages that two others read."""
    topi = _topi()
    y = _product(True, total="float32")(a, b)
    return topi.cast(topi.multiply(y, topi.sigmoid(y)), "float16")


def _tf32(case: Case) -> Case:
    """The same for tensor cores, whose operands may be rounded to tf32."""
    def build() -> Any:
        from schedules.cuda.contraction import with_tf32

        return with_tf32(case.func())

    return replace(case, build=build, rtol=1e-3)


def _columns_first(a: Any, b: Any) -> Any:
    """Product of ``a`` as ``[k, m]`` with ``b`` as ``[k, n]``, added up in float32."""
    from tvm import te

    k = te.reduce_axis((0, a.shape[0]), "k")
    return te.compute((a.shape[1], b.shape[1]), lambda i, j: te.sum(
        a[k, i].astype("float32") * b[k, j].astype("float32"), axis=k), "product")


def _conv_wide(pad: int) -> Callable[..., Any]:
    """Convolution of 16-bit floats added up in float32, with bias and ReLU, rounded to 16 bits."""
    def build(data: Any, weight: Any, bias: Any) -> Any:
        topi = _topi()
        product = topi.nn.conv2d_nchw(data, weight, 1, pad, 1, out_dtype="float32")
        return topi.cast(topi.nn.relu(topi.add(product, bias)), data.dtype)

    return build


def _gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return 0.5 * x * (1.0 + erf(x / np.sqrt(2.0)))


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * gamma + beta


def _pool(x: np.ndarray, size: int, stride: int, pad: int, how: str) -> np.ndarray:
    fill = -np.inf if how == "max" else 0.0
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=fill)
    windows = sliding_window_view(padded, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
    if how == "max":
        return windows.max((-2, -1))
    ones = np.pad(np.ones_like(x), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    count = sliding_window_view(ones, (size, size), axis=(2, 3))[:, :, ::stride, ::stride].sum((-2, -1))
    return windows.sum((-2, -1)) / count


def _variance(x: Any) -> Any:
    from tvm import te

    topi = _topi()
    n = float(int(x.shape[1]))
    mean = topi.divide(topi.sum(x, axis=1, keepdims=True), n)
    k = te.reduce_axis((0, x.shape[1]), "k")
    return te.compute((x.shape[0],), lambda i: te.sum((x[i, k] - mean[i, 0]) * (x[i, k] - mean[i, 0]), axis=k))


def _cumulative(x: Any) -> Any:
    """A running sum over the last dimension, as one block that TVM can't look into."""
    from tvm import te

    rows, columns = (int(s) for s in x.shape)

    def body(ins: Any, outs: Any) -> Any:
        from tvm.script.ir_builder import IRBuilder
        from tvm.script.ir_builder import tirx as builder

        with IRBuilder() as ib, builder.serial(0, rows) as i:
            builder.buffer_store(outs[0], ins[0][i, 0], [i, 0])
            with builder.serial(0, columns - 1) as j:
                builder.buffer_store(outs[0], outs[0][i, j] + ins[0][i, j + 1], [i, j + 1])
        return ib.get()

    return te.extern([x.shape], [_topi().add(x, 1.0)], body, name="scan", dtype="float32")


CASES: tuple[Case, ...] = (
    _conv_case("conv3x3_odd", (1, 5, 11, 13), (19, 5, 3, 3), pad=1),
    _conv_case("conv3x3_stride2_batch2", (2, 8, 14, 14), (16, 8, 3, 3), pad=1, stride=2),
    _conv_case("conv3x3_deep", (1, 96, 7, 7), (32, 96, 3, 3), pad=1),
    _conv_case("conv1x1_even", (1, 16, 12, 12), (32, 16, 1, 1)),
    _conv_case("conv1x1_stride2", (1, 16, 9, 9), (24, 16, 1, 1), stride=2),
    _conv_case("conv7x7_image", (1, 3, 23, 21), (16, 3, 7, 7), pad=3, stride=2),
    _conv_case("conv3x3_dilated", (1, 8, 12, 12), (9, 8, 3, 3), pad=2, dilation=2),
    _conv_case("conv3x3_groups", (1, 32, 9, 9), (48, 8, 3, 3), pad=1, groups=4),
    _conv_case("conv3x3_depthwise", (1, 12, 10, 10), (12, 1, 3, 3), "cuda.reduce", pad=1, groups=12),
    _case(
        "conv3x3_bias_relu", "cuda.conv", ((1, 16, 8, 8), (32, 16, 3, 3), (1, 32, 1, 1)), _conv_bias_relu,
        lambda x, w, b: np.maximum(_conv(x, w, 1, 1) + b, 0),
    ),
    _case(
        "conv3x3_groups_bias", "cuda.conv", ((1, 32, 9, 9), (48, 8, 3, 3), (1, 48, 1, 1)), _conv_groups,
        lambda x, w, b: np.maximum(_conv(x, w, 1, 1, 4) + b, 0),
    ),
    _case(
        "conv3x3_residual", "cuda.conv", ((1, 7, 15, 15), (18, 7, 3, 3), (1, 18, 1, 1), (1, 18, 8, 8)), _conv_residual,
        lambda x, w, b, r: np.maximum(_conv(x, w, 2, 1) + b + r, 0),
    ),
    _case("dense_odd", "cuda.gemm", ((33, 70), (70, 51)), _product(), lambda a, b: a @ b),
    _case(
        "dense_32bit_indices", "cuda.gemm", ((33, 70), (70, 51)), _product(), lambda a, b: a @ b, index="int32"
    ),
    _case("dense_even", "cuda.gemm", ((64, 128), (128, 64)), _product(), lambda a, b: a @ b),
    _case(
        "dense_bias_gelu", "cuda.gemm", ((40, 36), (36, 64), (64,)), _product(activation=True),
        lambda a, b, c: _gelu(a @ b + c),
    ),
    _case("dense_transposed", "cuda.gemm", ((17, 48), (52, 48)), _product(transposed=True), lambda a, b: a @ b.T),
    _case("dense_3d", "cuda.gemm", ((2, 19, 24), (24, 40)), _product(), lambda a, b: a @ b),
    _case("batched", "cuda.gemm", ((3, 17, 20), (3, 20, 29)), _product(), lambda a, b: a @ b),
    _case(
        "batched_4d_transposed", "cuda.gemm", ((2, 3, 16, 32), (2, 3, 24, 32)), _product(transposed=True),
        lambda a, b: a @ b.swapaxes(-1, -2),
    ),
    _case(
        "dense_then_transpose", "cuda.gemm", ((21, 30), (30, 37)),
        lambda a, b: _topi().transpose(_product()(a, b), (1, 0)), lambda a, b: (a @ b).T,
    ),
    _case("mma_f16_odd", "cuda.mma", ((67, 100), (100, 52), (52,)), _product(activation=True, total="float32"),
          lambda a, b, c: _gelu(a @ b + c), ("float16", "float16", "float32")),
    _case("mma_f16_single", "cuda.mma", ((35, 75), (75, 51)), _product(total="float32", result="float16"),
          lambda a, b: a @ b, ("float16", "float16")),
    _case("mma_f16_columns_first", "cuda.mma", ((96, 64), (96, 80)), _columns_first, lambda a, b: a.T @ b,
          ("float16", "float16")),
    _case("mma_f16_batched", "cuda.mma", ((2, 48, 64), (2, 64, 64)), _product(True, total="float32"),
          lambda a, b: a @ b.swapaxes(-1, -2), ("float16", "float16")),
    _case("mma_bf16", "cuda.mma", ((40, 136), (136, 64), (64,)), _product(total="float32"),
          lambda a, b, c: a @ b + c, ("bfloat16", "bfloat16", "float32")),
    _case("mma_s8_rows_first", "cuda.mma", ((40, 144), (144, 48)), _product(total="int32"),
          lambda a, b: a.astype("int64") @ b.astype("int64"), ("int8", "int8")),
    _tf32(_case("mma_tf32_odd", "cuda.mma", ((67, 101), (101, 52), (52,)), _product(activation=True),
                lambda a, b, c: _gelu(a @ b + c))),
    _tf32(_case("mma_tf32_columns", "cuda.mma", ((48, 64), (56, 64)), _product(True), lambda a, b: a @ b.T)),
    _tf32(_case("mma_tf32_columns_first", "cuda.mma", ((96, 64), (96, 80)), _columns_first, lambda a, b: a.T @ b,
                index="int32")),
    _tf32(_conv_case("mma_tf32_conv3x3", (1, 16, 9, 11), (24, 16, 3, 3), "cuda.mma", pad=1)),
    _case("mma_conv1x1", "cuda.mma", ((2, 64, 6, 10), (40, 64, 1, 1), (1, 40, 1, 1)), _conv_wide(0),
          lambda x, w, b: np.maximum(_conv(x, w) + b, 0), ("float16", "float16", "float32")),
    _case("mma_conv3x3", "cuda.mma", ((1, 16, 9, 11), (24, 16, 3, 3), (1, 24, 1, 1)), _conv_wide(1),
          lambda x, w, b: np.maximum(_conv(x, w, 1, 1) + b, 0), ("float16", "float16", "float32")),
    _case("mma_conv3x3_deep", "cuda.mma", ((1, 64, 5, 7), (24, 64, 3, 3), (1, 24, 1, 1)), _conv_wide(1),
          lambda x, w, b: np.maximum(_conv(x, w, 1, 1) + b, 0), ("float16", "float16", "float32"), index="int32"),
    _case("wgmma_f16_gelu", "cuda.wgmma", ((67, 104), (104, 72), (72,)), _product(activation=True, total="float32"),
          lambda a, b, c: _gelu(a @ b + c), ("float16", "float16", "float32")),
    _case("wgmma_f16_swish", "cuda.wgmma", ((70, 136), (75, 136)), _rounded_swish,
          lambda a, b: (a @ b.T) / (1.0 + np.exp(-(a @ b.T))), ("float16", "float16")),
    _case("wgmma_f16_columns_first", "cuda.wgmma", ((96, 64), (96, 80)), _columns_first, lambda a, b: a.T @ b,
          ("float16", "float16"), index="int32"),
    _case("wgmma_bf16_batched", "cuda.wgmma", ((2, 65, 72), (2, 72, 64), (2, 65, 64)), _product(total="float32"),
          lambda a, b, c: a @ b + c, ("bfloat16", "bfloat16", "float32")),
    _case("vector_matrix", "cuda.reduce", ((1, 100), (100, 33), (33,)), _product(), lambda a, b, c: a @ b + c),
    _case("vector_matrix_transposed", "cuda.reduce", ((1, 96), (35, 96)), _product(True), lambda a, b: a @ b.T),
    _case("row_matrix_f16", "cuda.columns", ((1, 96), (96, 40), (40,)), _product(total="float32", result="float16"),
          lambda a, b, c: a @ b + c, ("float16", "float16", "float32")),
    _case("row_matrix_bf16", "cuda.columns", ((2, 70), (70, 264)), _product(total="float32"), lambda a, b: a @ b,
          ("bfloat16", "bfloat16")),
    _case("mean_last", "cuda.columns", ((2, 7, 7, 40),), lambda x: _topi().divide(_topi().sum(x, [1, 2]), 49.0),
          lambda x: x.mean((1, 2))),
    _case(
        "max_pool_last", "cuda.columns", ((1, 15, 17, 12),),
        lambda x: _topi().nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max", layout="NHWC"),
        lambda x: _pool(x.transpose(0, 3, 1, 2), 3, 2, 1, "max").transpose(0, 2, 3, 1),
    ),
    _case(
        "depthwise_last", "cuda.columns", ((1, 9, 8, 16), (3, 3, 16, 1)),
        lambda x, w: _topi().nn.depthwise_conv2d_nhwc(x, w, (2, 2), (1, 1), (1, 1)),
        lambda x, w: _conv(x.transpose(0, 3, 1, 2), w.transpose(2, 3, 0, 1), 2, 1, 16).transpose(0, 2, 3, 1),
    ),
    _case("max_middle_f16", "cuda.columns", ((3, 21, 24),), lambda x: _topi().max(x, axis=1), lambda x: x.max(1),
          ("float16",)),
    _case("sum_even_columns", "cuda.columns", ((98, 34),), lambda x: _topi().sum(x, axis=0), lambda x: x.sum(0)),
    _case("softmax", "cuda.rows", ((3, 5, 37),), lambda x: _topi().nn.softmax(x), lambda x: _softmax(x, -1)),
    _case("softmax_wide", "cuda.rows", ((2, 1000),), lambda x: _topi().nn.softmax(x), lambda x: _softmax(x, -1)),
    _case("softmax_middle", "cuda.rows", ((2, 10, 7),), lambda x: _topi().nn.softmax(x, 1), lambda x: _softmax(x, 1)),
    _case(
        "log_softmax", "cuda.rows", ((4, 33),), lambda x: _topi().nn.log_softmax(x), lambda x: np.log(_softmax(x, -1))
    ),
    _case(
        "layer_norm", "cuda.rows", ((2, 3, 50), (50,), (50,)), lambda x, g, b: _topi().nn.layer_norm(x, g, b, [2]),
        _layer_norm,
    ),
    _case(
        "max_pool", "cuda.reduce", ((1, 5, 15, 17),),
        lambda x: _topi().nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max"),
        lambda x: _pool(x, 3, 2, 1, "max"),
    ),
    _case(
        "avg_pool", "cuda.reduce", ((1, 4, 12, 12),),
        lambda x: _topi().nn.pool2d(x, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), "avg", count_include_pad=False),
        lambda x: _pool(x, 3, 1, 1, "avg"),
    ),
    _case(
        "global_pool", "cuda.reduce", ((2, 9, 13, 13),), lambda x: _topi().nn.global_pool(x, "avg"),
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    _case("sum_columns", "cuda.reduce", ((101, 33),), lambda x: _topi().sum(x, axis=0), lambda x: x.sum(0)),
    _case("sum_all", "cuda.reduce", ((13, 57),), lambda x: _topi().sum(x), lambda x: x.sum()),
    _case("max_rows_relu", "cuda.reduce", ((6, 700),), lambda x: _topi().nn.relu(_topi().max(x, axis=1)),
         lambda x: np.maximum(x.max(1), 0)),
    _case("argmax", "cuda.fallback", ((7, 45),), lambda x: _topi().argmax(x, axis=1), lambda x: x.argmax(1)),
    _case("variance", "cuda.fallback", ((9, 31),), _variance, lambda x: ((x - x.mean(1, keepdims=True)) ** 2).sum(1)),
    _case("scan", "cuda.fallback", ((3, 12),), _cumulative, lambda x: np.cumsum(x + 1, axis=1)),
    _case(
        "add_relu", "cuda.elementwise", ((3, 16, 20), (16, 1)), lambda x, y: _topi().nn.relu(_topi().add(x, y)),
        lambda x, y: np.maximum(x + y, 0),
    ),
    _case(
        "sigmoid_odd", "cuda.elementwise", ((3, 5, 7),), lambda x: _topi().multiply(x, _topi().sigmoid(x)),
        lambda x: x / (1 + np.exp(-x)),
    ),
    _case(
        "transpose", "cuda.elementwise", ((2, 5, 12, 8),), lambda x: _topi().transpose(x, (0, 2, 1, 3)),
        lambda x: x.transpose(0, 2, 1, 3),
    ),
    _case(
        "concatenate", "cuda.elementwise", ((1, 6, 5, 5), (1, 9, 5, 5)), lambda x, y: _topi().concatenate([x, y], 1),
        lambda x, y: np.concatenate([x, y], 1),
    ),
    _case("relu_f16", "cuda.elementwise", ((7, 64), (7, 64)), lambda x, y: _topi().nn.relu(_topi().add(x, y)),
          lambda x, y: np.maximum(x + y, 0), ("float16", "float16")),
    _case(
        "split", "cuda.elementwise", ((4, 18),), lambda x: _topi().split(x, [5, 9], 1),
        lambda x: np.split(x, [5, 9], 1),
    ),
    _case(
        "gather", "cuda.elementwise", ((5, 16), (3, 4)), lambda x, i: _topi().take(x, i, axis=0),
        lambda x, i: x[i], ("float32", "int64"), high={1: 5},
    ),
    _case(
        "where", "cuda.elementwise", ((6, 11), (6, 11), (6, 11)), lambda c, x, y: _topi().where(c, x, y),
        lambda c, x, y: np.where(c, x, y), ("bool", "float32", "float32"),
    ),
    _case("cast", "cuda.elementwise", ((9, 13),), lambda x: _topi().cast(x, "int64"), lambda x: x.astype("float32"),
         ("int32",)),
    *ATTENTIONS,
    *FEW_BITS,
    *IMAGES,
)
