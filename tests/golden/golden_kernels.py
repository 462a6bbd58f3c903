"""One small function for each search space, as the graph hands them to it."""

from __future__ import annotations

from functools import cache

import numpy as np
import tvm
from tvm import relax, te, tirx

from mlc.graph.algorithms.winograd_integer import conv2d_winograd_integer, transform_integers
from mlc.graph.kernels import bfloat, integer, saturating
from mlc.graph.kernels.digits import dense_digits
from mlc.graph.kernels.lookup import dense_lookup
from mlc.graph.kernels.query_blocks import Sizes, attention
from mlc.graph.kernels.recurrent import Cell, Recurrence, recurrent
from mlc.graph.kernels.rounded import dense_rounded
from mlc.graph.kernels.weight_only import dense_weight_only
from mlc.graph.pipeline import lower
from mlc.graph.task import normalise
from mlc.options import DEFAULT_OPTIONS
from mlc.target import Target, resolve
from mlc.testing.cuda_cases import CASES
from schedules.intrin.matrix import BYTE_PAIRS
from schedules.registry import find

__all__ = ["CPU_TARGETS", "CUDA_TARGET", "NEEDS", "function_of", "target_named"]

#: both vector widths; the threads are part of the target, so that parallel loops are the same everywhere
CPU_TARGETS = ("x86-64-v3", "x86-64-v4")
CUDA_TARGET = "cuda:sm_80"
#: spaces for instructions that none of those has, with a CPU or a GPU that does
NEEDS = {
    **dict.fromkeys(("cpu.conv2d_bfloat", "cpu.depthwise_integer", "cpu.gemm_bfloat"), "llvm -mcpu=znver4"),
    "cpu.gemm_matrix": "aarch64:neoverse-v1",
    "cpu.gemm_tiles": "llvm -mcpu=sapphirerapids",
    "cuda.attention_wgmma": "cuda:sm_90a",
    "cuda.wgmma": "cuda:sm_90a",
}
_THREADS = 2


def target_named(name: str) -> Target:
    """A CPU target has a fixed number of threads."""
    return resolve(name, threads=None if name.startswith("cuda") else _THREADS)


def function_of(space: str, target: Target) -> tirx.PrimFunc:
    """What ``space`` schedules; raises ``KeyError`` for a space that no function here is for."""
    if target.kind == "cuda":
        return {case.space: case for case in reversed(CASES)}[space].func()
    return _by_space(target)[space]


@cache
def _by_space(target: Target) -> dict[str, tirx.PrimFunc]:
    """Of the network's tasks and their alternatives, the first that each CPU space takes."""
    form = integer.dot_form(target)
    found = {  # in the network, blocked layouts leave no plain convolution
        "cpu.attention_few": _decoding_step(),
        "cpu.contraction": _plain_convolution(),
        "cpu.conv2d_bfloat": _bfloat_convolution(),
        "cpu.conv2d_bytes": _saturating_convolution(),
        "cpu.conv2d_integer": _integer_convolution(form),
        "cpu.conv2d_winograd_integer": _integer_transforms(),
        "cpu.depthwise_integer": _integer_depthwise(),
        "cpu.gemm_bfloat": _bfloat_product(),
        "cpu.gemm_bytes": _saturating_product(),
        "cpu.gemm_digits": _product_of_digits(),
        "cpu.gemm_integer": _integer_product(form),
        "cpu.gemm_lookup": _product_of_codes(),
        "cpu.gemm_matrix": _integer_product(BYTE_PAIRS),
        "cpu.gemm_rounded": _rounded_product(),
        "cpu.gemm_tiles": _tiled_convolution(),
        "cpu.gemm_weight_only": _weight_only_product(),
        "cpu.recurrent": _gated_recurrence(),
        "cpu.remainder": saturating.remainder(64, 48, 96, 192),
    }
    for task in lower(_network(), target, options=DEFAULT_OPTIONS).with_alternatives():
        found.setdefault(find(task.func, target.tvm).name, task.func)
    return found


def _decoding_step() -> tirx.PrimFunc:
    """One query of four heads over a cache of 48 keys, of which two heads share each."""
    q = te.placeholder((1, 4, 32), name="q")
    k, v = (te.placeholder((48, 2, 32), name=name) for name in "kv")
    out = attention(Sizes((4,), 1, 48, 32, 32), 0.25, lambda h, i, d: q[i, h, d], lambda h, j, d: k[j, h // 2, d],
                    lambda h, j, d: v[j, h // 2, d], None, (1, 0, 2))
    return normalise(te.create_prim_func([q, k, v, out]))


def _plain_convolution() -> tirx.PrimFunc:
    """3x3 over ``NCHW``, 8 channels to 16."""
    data, weight = te.placeholder((1, 8, 18, 18), name="data"), te.placeholder((16, 8, 3, 3), name="weight")
    c, i, j = (te.reduce_axis((0, extent), name) for extent, name in ((8, "c"), (3, "i"), (3, "j")))
    result = te.compute(
        (1, 16, 16, 16), lambda n, f, y, x: te.sum(data[n, c, y + i, x + j] * weight[f, c, i, j], axis=[c, i, j]),
        name="conv2d",
    )
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


def _integer_convolution(form: str) -> tirx.PrimFunc:
    """3x3 over a padded image, 32 channels to 64."""
    data = te.placeholder((1, 2, 14, 14, 16), "uint8", name="data")
    packed = integer.pack_conv(np.zeros((64, 32, 3, 3), "int8"), 16, 16, 1, form)
    weight = te.placeholder(packed.shape, str(packed.dtype), name="weight")
    sums = integer.conv2d_nchwc_integer(data, weight, (1, 1), (1, 1, 1, 1), (1, 1), 1, zero=128)
    return te.create_prim_func([data, weight, sums])


def _tiled_convolution() -> tirx.PrimFunc:
    """Windows that are gathered, and pixels that make no whole tiles."""
    data = te.placeholder((1, 4, 9, 9, 16), "uint8", name="data")
    packed = integer.pack_dense(np.zeros((9 * 64, 64), "int8"), "quads")
    weight = te.placeholder(packed.shape, "int8", name="weight")
    sums = integer.conv2d_nchwc_tiles(data, weight, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 0, 16)
    return te.create_prim_func([data, weight, sums])


def _integer_depthwise() -> tirx.PrimFunc:
    """3x3 over a padded image of 32 channels."""
    data = te.placeholder((1, 2, 14, 14, 16), "uint8", name="data")
    weight = te.placeholder((2, 1, 3, 1, 1, 16, 4), "int8", name="weight")
    return te.create_prim_func(
        [data, weight, integer.depthwise_nchwc_taps(data, weight, 3, (1, 1), (1, 1, 1, 1), zero=128)])


def _integer_transforms() -> tirx.PrimFunc:
    """3x3 over an image, 32 channels to 32, as products of transformed tiles."""
    data, filters = te.placeholder((1, 2, 8, 8, 16), "uint8", name="data"), np.zeros((32, 32, 3, 3), "int8")
    weight = te.placeholder(transform_integers(filters, 2).shape, "int16", name="weight")
    return te.create_prim_func([data, weight, conv2d_winograd_integer(data, weight, 2, (1, 1, 1, 1))])


def _weight_only_product() -> tirx.PrimFunc:
    """A row by 4-bit weights with a scale for each 32."""
    data = te.placeholder((1, 256), name="data")
    words, scale = te.placeholder((4, 32, 32), "uint32", name="words"), te.placeholder((4, 8, 32), name="scale")
    return te.create_prim_func([data, words, scale, dense_weight_only(data, words, scale, None, 4, 32)])


def _product_of_codes() -> tirx.PrimFunc:
    """Two rows by codes of 4 bits with a scale for each 64."""
    data = te.placeholder((2, 256), name="data")
    words, table = te.placeholder((4, 32, 32), "uint32", name="words"), te.placeholder((16,), name="table")
    scale = te.placeholder((4, 4, 32), name="scale")
    return te.create_prim_func([data, words, scale, table, dense_lookup(data, words, scale, table, 64)])


def _rounded_product() -> tirx.PrimFunc:
    """A few rows, rounded to 8 bits, by 4-bit weights with a scale for each 32."""
    data = te.placeholder((4, 256), name="data")
    weight, scale = te.placeholder((4, 32, 32, 4), "uint8", name="w"), te.placeholder((4, 8, 32), name="scale")
    return te.create_prim_func([data, weight, scale, dense_rounded(data, weight, scale, None, 4, 32)])


def _product_of_digits() -> tirx.PrimFunc:
    """A row of three digits for each number, by 4-bit weights with a scale and a zero point for each 32."""
    data = te.placeholder((1, 256), name="data")
    weight = te.placeholder((4, 32, 32, 4), "uint8", name="w")
    scale, zero = (te.placeholder((4, 8, 32), name=name) for name in ("scale", "zero"))
    return te.create_prim_func([data, weight, scale, zero, dense_digits(data, weight, scale, zero, 4, 32)])


def _gated_recurrence() -> tirx.PrimFunc:
    """Eight steps forwards of a unit with one gate that mixes the old state with the new."""
    cell = Cell(
        2, lambda x, p, e, before: tirx.tanh(x[0] + p[0]),
        lambda x, p, e, inner, before: inner + tirx.sigmoid(x[1] + p[1]) * (before - inner), hidden_before=True)
    return recurrent(Recurrence(8, 1, 32, (False,)), cell)


def _integer_product(form: str) -> tirx.PrimFunc:
    """Rows that no tile divides, and sums that become uint8 again."""
    data = te.placeholder((50, 64), "uint8", name="data")
    packed = integer.pack_dense(np.zeros((64, 96), "int8"), form)
    weight = te.placeholder(packed.shape, str(packed.dtype), name="weight")
    scale = te.placeholder((96,), name="scale")
    sums = integer.dense_integer(data, weight)

    def requantised(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        value = tirx.round(sums[i, j].astype("float32") * scale[j])
        low, high = tirx.const(0.0, "float32"), tirx.const(255.0, "float32")
        return tirx.max(tirx.min(value, high), low).astype("uint8")

    result = te.compute(sums.shape, requantised, name="requantised")
    return te.create_prim_func([data, weight, scale, result])


def _saturating_product() -> tirx.PrimFunc:
    """Rows that no tile divides, and a remainder that is added."""
    data, weight = te.placeholder((50, 64), "uint8", "data"), te.placeholder((6, 16, 16, 4), "int8", "weight")
    rest = te.placeholder((96, 64), "int32", "rest")
    return te.create_prim_func([data, weight, rest, saturating.dense_bytes(data, weight, rest)])


def _saturating_convolution() -> tirx.PrimFunc:
    """1x1, 32 channels to 64, and a remainder that is added."""
    data = te.placeholder((1, 2, 14, 14, 16), "uint8", "data")
    weight = te.placeholder((4, 2, 1, 1, 4, 16, 4), "int8", "weight")
    return te.create_prim_func([data, weight, saturating.conv2d_nchwc_bytes(data, weight)])


def _bfloat_product() -> tirx.PrimFunc:
    """Rows that no tile divides."""
    data, weight = te.placeholder((50, 64), "bfloat16", "data"), te.placeholder((6, 32, 16, 2), "bfloat16", "weight")
    return te.create_prim_func([data, weight, bfloat.dense_bfloat(data, weight)])


def _bfloat_convolution() -> tirx.PrimFunc:
    """3x3, 32 channels to 64."""
    data = te.placeholder((1, 2, 16, 16, 16), "bfloat16", name="data")
    weight = te.placeholder((4, 2, 3, 3, 8, 16, 2), "bfloat16", name="weight")
    return te.create_prim_func([data, weight, bfloat.conv2d_nchwc_bfloat(
        data, weight, (1, 1), (1, 1), 1)])


def _network() -> tvm.IRModule:
    """An image through convolutions and pooling, a product with a weight, attention, and what has no template."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> relax.Expr:
        return relax.const(rng.standard_normal(shape).astype("float32"))

    op, bb = relax.op, relax.BlockBuilder()
    image = relax.Var("image", relax.TensorType((1, 64, 28, 28), "float32"))
    query, key, value = (relax.Var(name, relax.TensorType((1, 4, 128, 32), "float32")) for name in ("q", "k", "v"))
    rows = relax.Var("rows", relax.TensorType((24, 48), "float32"))
    with bb.function("main", [image, query, key, value, rows]):
        with bb.dataflow():
            x = bb.emit(op.nn.relu(bb.emit(op.nn.conv2d(image, weight(64, 64, 3, 3), padding=1))))
            x = bb.emit(op.nn.relu(bb.emit(op.nn.conv2d(x, weight(64, 1, 3, 3), padding=1, groups=64))))
            x = bb.emit(op.nn.max_pool2d(x, pool_size=(2, 2), strides=(2, 2)))
            x = bb.emit(op.mean(x, axis=[2, 3]))
            scores = bb.emit(op.add(bb.emit(op.matmul(x, weight(64, 96))), weight(96)))
            turned = bb.emit(op.permute_dims(key, [0, 1, 3, 2]))
            weights = bb.emit(op.nn.softmax(bb.emit(op.matmul(query, turned))))
            attended = bb.emit(op.matmul(weights, value))
            scaled = bb.emit(op.tanh(rows))
            summed = bb.emit(op.cumsum(rows, axis=1))
            result = bb.emit_output(relax.Tuple([scores, attended, scaled, summed]))
        bb.emit_func_output(result)
    return bb.finalize()
