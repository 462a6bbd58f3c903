"""Exact products by an instruction that saturates: what it is given never does, and the rest is added."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
import tvm
from harness import CORES, TARGET, Case, SpaceContract, pytest_generate_tests
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import te

import mlc
from mlc.graph.estimate import Estimate
from mlc.graph.kernels.integer import pack_conv, pack_dense
from mlc.graph.kernels.saturating import (
    Split,
    conv2d_nchwc_bytes,
    dense_bytes,
    has_bytes,
    pack_remainder,
    remainder,
    split,
)
from mlc.graph.layout.remainders import pays
from mlc.target import resolve
from mlc.testing.targets import runs
from schedules.cpu.conv import CONV2D_BYTES
from schedules.cpu.gemm import GEMM_BYTES
from schedules.cpu.remainder import REMAINDER
from schedules.intrin import select
from schedules.intrin.dot import BYTES, QUADS, dot
from schedules.lowering import PIPELINE
from schedules.space import first_seed

__all__ = ["pytest_generate_tests"]

HAS_BYTES = any(select(dot(BYTES, lanes), TARGET) for lanes in (8, 16))
needs_bytes = pytest.mark.skipif(not HAS_BYTES, reason="this machine has no pmaddubsw")
#: AVX2 and no dot product of bytes, whichever CPU runs the tests
V3 = "x86-64-v3"
runs_v3 = pytest.mark.skipif(not runs(V3), reason=f"this machine does not run code for {V3}")


def _normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float = 38.0) -> np.ndarray:
    return np.clip(np.rint(rng.standard_normal(shape) * deviation), -128, 127).astype("int8")


def _ends(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.where(rng.random(shape) < 1 / 3, rng.choice([low, high], shape), rng.integers(low, high + 1, shape)
                    ).astype(dtype)


def _saturated(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """``[M, K] x [K, N]`` with pairs of products cut to 16 bits."""
    terms = x.astype("int64")[:, :, None] * weight.astype("int64")[None]
    return terms.reshape(len(x), -1, 2, weight.shape[1]).sum(axis=2).clip(-(2**15), 2**15 - 1).sum(axis=1)


# -- the split


@pytest.mark.parametrize("shape", [(64, 48), (7, 3), (1, 1), (130, 20)])
@pytest.mark.parametrize("kind", ["normal", "ends", "lowest", "highest", "zero"])
def test_a_weight_is_the_sum_of_its_parts(kind: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(zlib.crc32(repr((kind, shape)).encode()))
    weight = {"normal": _normal(rng, shape), "ends": _ends(rng, shape, "int8"), "zero": np.zeros(shape, "int8"),
              "lowest": np.full(shape, -128, "int8"), "highest": np.full(shape, 127, "int8")}[kind]
    kept, rest = split(weight)
    assert kept.dtype == rest.dtype == np.int8
    np.testing.assert_array_equal(kept.astype(int) + rest, weight)
    pairs = np.pad(kept.astype(int), ((0, shape[0] % 2), (0, 0))).reshape(-1, 2, shape[1])
    assert 255 * np.maximum(pairs, 0).sum(axis=1).max() < 2**15
    assert 255 * np.minimum(pairs, 0).sum(axis=1).min() >= -(2**15)
    both = np.pad(rest, ((0, shape[0] % 2), (0, 0))).reshape(-1, 2, shape[1]).astype(bool).sum(axis=1)
    assert both.max() <= 1
    same = np.pad(weight.astype(int), ((0, shape[0] % 2), (0, 0))).reshape(-1, 2, shape[1])
    excess = np.maximum(np.maximum(same, 0).sum(axis=1), -np.minimum(same, 0).sum(axis=1)) > 128
    assert np.count_nonzero(rest) == np.count_nonzero(excess), "no more than must be"


def test_few_rows_and_many_remainders_stay_whole() -> None:
    rng, estimate = np.random.default_rng(0), Estimate(resolve(V3, threads=CORES).tvm, 0.0)
    usual, heavy = (Split.of(_normal(rng, (512, 512), deviation)) for deviation in (38.0, 100.0))
    assert pays(usual, 128, estimate)
    assert not pays(usual, 1, estimate)
    assert not pays(heavy, 128, estimate)
    assert not pays(Split.of(_normal(rng, (64, 64))), 128, estimate), "to begin the kernels takes longer"
    assert pays(Split.of(np.full((64, 64), 64, "int8")), 1, estimate), "nothing is left out"


def test_machines_that_multiply_bytes_so() -> None:
    assert has_bytes(resolve(V3))
    assert has_bytes(resolve("x86-64-v4"))
    for other in ("x86-64-v2", "x86-64-v4 -mattr=+avx512vnni", "llvm -mcpu=alderlake"):
        assert not has_bytes(resolve(other)), other


# -- the kernels


def _product(m: int, n: int, k: int, rest: bool = False, batch: tuple[int, ...] = ()) -> Case:
    rng = np.random.default_rng(zlib.crc32(repr((m, n, k)).encode()))
    x, weight = _ends(rng, (*batch, m, k), "uint8"), _ends(rng, (k, n), "int8")
    x[..., 0, :], weight[:, 0], weight[:, 1] = 255, -128, 127
    packed, other = pack_dense(weight, QUADS), rng.integers(-(2**20), 2**20, (n, x.size // k)).astype("int32")
    a, b = te.placeholder(x.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
    c = te.placeholder(other.shape, "int32", name="rest")
    tensors = [a, b, c, dense_bytes(a, b, c)] if rest else [a, b, dense_bytes(a, b)]
    func = te.create_prim_func(tensors)
    expected = _saturated(x.reshape(-1, k), weight) + (other.T if rest else 0)
    arrays = [x, packed, *([other] if rest else [])]
    return Case(f"{m}x{n}x{k}{'_rest' if rest else ''}", lambda: func,
                lambda *_: expected.reshape(*x.shape[:-1], n).astype("int32"), data=lambda: arrays)


@needs_bytes
class TestProduct(SpaceContract):
    space = GEMM_BYTES
    cases = (_product(50, 96, 64), _product(128, 64, 256, rest=True), _product(9, 32, 128, rest=True, batch=(2,)),
             _product(5, 48, 12))


def _images(n: int, channels: int, filters: int, size: tuple[int, int]) -> Case:
    rng = np.random.default_rng(zlib.crc32(repr((n, channels, filters, size)).encode()))
    pixels, weight = _ends(rng, (n * size[0] * size[1], channels), "uint8"), _ends(rng, (channels, filters), "int8")
    pixels[0], weight[:, 0], weight[:, 1] = 255, -128, 127
    x = pixels.reshape(n, *size, -1, 16).transpose(0, 3, 1, 2, 4)
    packed = pack_conv(weight.T[:, :, None, None], 16, 16, 1, QUADS)
    a, b = te.placeholder(x.shape, "uint8", name="x"), te.placeholder(packed.shape, "int8", name="w")
    func = te.create_prim_func([a, b, conv2d_nchwc_bytes(a, b)])
    expected = _saturated(pixels, weight).reshape(n, *size, -1, 16).transpose(0, 3, 1, 2, 4).astype("int32")
    return Case(f"{n}x{channels}x{filters}x{size}", lambda: func, lambda *_: expected,
                data=lambda: [np.ascontiguousarray(x), packed])


@needs_bytes
class TestConv2d(SpaceContract):
    space = CONV2D_BYTES
    cases = (_images(1, 64, 48, (7, 7)), _images(2, 32, 64, (9, 5)), _images(1, 128, 32, (14, 14)))


def _sparse(depth: int, rows: int, columns: int, part: float) -> Case:
    rng = np.random.default_rng(zlib.crc32(repr((depth, rows, columns)).encode()))
    x, weight = _ends(rng, (depth, rows), "uint8"), _ends(rng, (depth, columns), "int8")
    weight[rng.random(weight.shape) >= part] = 0
    weight[:, 0], weight[:, columns // 2] = 0, -128  # a column without a value, and one of nothing but them
    packed = pack_remainder(weight)
    func = remainder(depth, rows, columns, len(packed[-1]))
    return Case(f"{depth}x{rows}x{columns}", lambda: func,
                lambda *_: (weight.astype("int64").T @ x.astype("int64")).astype("int32"),
                data=lambda: [x, *packed])


class TestRemainder(SpaceContract):
    space = REMAINDER
    cases = (_sparse(64, 128, 48, 0.02), _sparse(40, 48, 64, 0.1), _sparse(1024, 160, 96, 0.01))


def test_instructions_of_a_product() -> None:
    """Each step one multiplication of bytes, one that adds their pairs and one addition; nothing is spilt."""
    on = resolve(V3, threads=CORES).tvm
    sch, seed = first_seed(GEMM_BYTES, _product(240, 192, 1024).func(), on)
    assembly = tvm.compile(sch.mod, target=on, tir_pipeline=PIPELINE).mod.inspect_source("s")
    hot = max(re.split(r"\n(?=\.L\w+:)", assembly), key=lambda block: block.count("vpmaddubsw"))
    loop = re.split(r"\tj\w+\t\.L", hot)[0]
    steps = seed["m"] * seed["n"] // 8 * seed["k"]
    for word in ("vpmaddubsw", "vpmaddwd", "vpaddd"):
        assert len(re.findall(rf"\s{word}\s", loop)) == steps, word
    assert not re.search(r"mov\w*\s+%ymm\d+, .*\(%rsp", loop)


# -- models


@runs_v3
@pytest.mark.parametrize(("rows", "depth"), [((2, 96), 512), ((131,), 770)])
def test_integer_products_of_a_model(rows: tuple[int, ...], depth: int) -> None:
    """As ONNX's reference evaluator has them, whatever the activations; the remainder's rows may be padded."""
    rng = np.random.default_rng(depth)
    weights = [_normal(rng, (depth, columns)) for columns in (512, 32, 480)]
    weights[0][:2, 3], weights[0][:2, 4], weights[1][:] = 127, -128, np.clip(weights[1], -64, 64)
    nodes = [helper.make_node("MatMulInteger", ["x", f"w{i}", "z"], [f"y{i}"]) for i in range(3)]
    graph = helper.make_graph(
        nodes, "products", [helper.make_tensor_value_info("x", TensorProto.UINT8, [*rows, depth])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.INT32, [*rows, w.shape[1]]) for i, w in enumerate(weights)],
        [*(numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)),
         numpy_helper.from_array(np.array(131, "uint8"), "z")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    exe, reference = mlc.compile(model, V3, log=False, threads=CORES), ReferenceEvaluator(model)
    spaces = [entry["space"] for entry in exe.metadata["functions"]]
    assert spaces.count("cpu.gemm_bytes") == 3
    assert spaces.count("cpu.remainder") == 2, "the second weight has none"
    for x in (_ends(rng, (*rows, depth), "uint8"), *(np.full((*rows, depth), end, "uint8") for end in (0, 128, 255))):
        for got, want in zip(exe(x), reference.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, want)


@runs_v3
@pytest.mark.parametrize(("images", "channels"), [((2, 9, 7), 48), ((1, 12, 11), 34)])
def test_pointwise_convolutions_of_a_model(images: tuple[int, int, int], channels: int) -> None:
    """By bytes where no pair can saturate, else by words; channels that fill no block are padding."""
    rng, (n, *size) = np.random.default_rng(channels), images
    weights = [_normal(rng, (filters, channels, 1, 1)) for filters in (32, 48)]
    weights[0][:], weights[1][4, :2] = np.clip(weights[0], -64, 64), -128
    nodes = [helper.make_node("ConvInteger", ["x", f"w{i}", "z"], [f"y{i}"]) for i in range(2)]
    graph = helper.make_graph(
        nodes, "convolutions", [helper.make_tensor_value_info("x", TensorProto.UINT8, [n, channels, *size])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.INT32, [n, len(w), *size]) for i, w in enumerate(weights)],
        [*(numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)),
         numpy_helper.from_array(np.array(77, "uint8"), "z")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    exe, reference = mlc.compile(model, V3, log=False, threads=CORES), ReferenceEvaluator(model)
    spaces = [entry["space"] for entry in exe.metadata["functions"]]
    assert spaces.count("cpu.conv2d_bytes") == spaces.count("cpu.conv2d_integer") == 1
    for x in (_ends(rng, (n, channels, *size), "uint8"), np.full((n, channels, *size), 255, "uint8")):
        for got, want in zip(exe(x), reference.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, want)
