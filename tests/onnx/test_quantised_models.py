"""Models that onnxruntime's quantiser writes, compiled untuned: within one step of the reference's numbers.

The reference is onnx's evaluator, or onnxruntime for its own operators, without its rewrites and without the products
of bytes that saturate on CPUs that lack VNNI. Compiled for AVX2, so that no CPU's instructions change what is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

import mlc
from mlc.graph.kernels.digits import has_digits
from mlc.graph.kernels.lookup import has_lookup
from mlc.target import resolve
from mlc.testing.targets import runs

#: AVX2 alone where there is more, so that numbers are the same on most machines
TARGET = "x86-64-v3" if runs("x86-64-v3") else "native"


class _Net:
    """A graph in the making, with seeded random weights."""

    def __init__(self, name: str) -> None:
        self.name, self.nodes, self.weights = name, [], []
        self._rng = np.random.default_rng(0)

    def weight(self, shape: Sequence[int], size: float, mean: float = 0.0) -> str:
        array = (self._rng.standard_normal(shape) * size + mean).astype("float32")
        return self.constant(array)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def conv(self, x: str, into: int, out: int, kernel: int, stride: int = 1, group: int = 1) -> str:
        weight = self.weight((out, into // group, kernel, kernel), np.sqrt(2 * group / into) / kernel)
        return self("Conv", x, weight, self.weight((out,), 0.1), kernel_shape=[kernel] * 2, strides=[stride] * 2,
                    pads=[kernel // 2] * 4, group=group)

    def linear(self, x: str, into: int, out: int) -> str:
        return self("Add", self("MatMul", x, self.weight((into, out), into ** -0.5)), self.weight((out,), 0.1))

    def norm(self, x: str, size: int) -> str:
        return self("LayerNormalization", x, self.weight((size,), 0.2, 1.0), self.weight((size,), 0.1), axis=-1)

    def model(self, x: onnx.ValueInfoProto, y: str, shape: Sequence[int]) -> onnx.ModelProto:
        result = helper.make_tensor_value_info(y, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, self.name, [x], [result], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _convolutions() -> onnx.ModelProto:
    """Strided, depthwise and 1x1 convolutions, a residual, a concatenation of different scales, pools, a classifier."""
    net = _Net("convolutions")
    stem = net("Relu", net.conv("x", 3, 16, 3, stride=2))
    six = [net.constant(np.float32(bound)) for bound in (0, 6)]
    depthwise = net("Clip", net.conv(stem, 16, 16, 3, group=16), *six)
    residual = net("Add", net.conv(depthwise, 16, 16, 1), stem)
    left, right = net.conv(residual, 16, 8, 1), net("Sigmoid", net.conv(residual, 16, 8, 3))
    pooled = net("AveragePool", net("Concat", left, right, axis=1), kernel_shape=[2, 2], strides=[2, 2])
    pooled = net("MaxPool", net("LeakyRelu", pooled, alpha=0.1), kernel_shape=[2, 2], strides=[2, 2])
    flat = net("Flatten", net("GlobalAveragePool", pooled))
    logits = net("Gemm", flat, net.weight((10, 16), 1.0), net.weight((10,), 0.1), transB=1)
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])
    return net.model(image, logits, [1, 10])


def _encoder(size: int = 32, length: int = 8, heads: int = 4) -> onnx.ModelProto:
    """A layer of BERT with its embedding."""
    net = _Net("encoder")
    x = net.norm(net("Gather", net.weight((50, size), 1.0), "x"), size)
    split, joined = net.constant(np.array([0, 0, heads, size // heads])), net.constant(np.array([0, 0, size]))
    query, key, value = (
        net("Transpose", net("Reshape", net.linear(x, size, size), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = net("Mul", net("MatMul", query, key), net.constant(np.float32((size / heads) ** -0.5)))
    seen = net("Transpose", net("MatMul", net("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    x = net.norm(net("Add", net.linear(net("Reshape", seen, joined), size, size), x), size)
    inner = net.linear(x, size, 4 * size)
    error = net("Erf", net("Mul", inner, net.constant(np.float32(0.5 ** 0.5))))
    gelu = net("Mul", net("Mul", inner, net("Add", error, net.constant(np.float32(1)))), net.constant(np.float32(0.5)))
    result = net.norm(net("Add", net.linear(gelu, 4 * size, size), x), size)
    tokens = helper.make_tensor_value_info("x", TensorProto.INT64, [1, length])
    return net.model(tokens, result, [1, length, size])


MODELS = {"convolutions": _convolutions, "encoder": _encoder}


def _feeds(name: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    if name == "encoder":
        return {"x": rng.integers(0, 50, (1, 8))}
    return {"x": rng.standard_normal((1, 3, 32, 32)).astype("float32")}


class _Calibration(CalibrationDataReader):
    def __init__(self, name: str) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = (_feeds(name, seed) for seed in range(1, 9))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


@functools.cache
def _float(name: str) -> onnx.ModelProto:
    return MODELS[name]()


def _static(name: str, folder: Path, **options: Any) -> onnx.ModelProto:
    onnx.save(_float(name), folder / "f32.onnx")
    quantize_static(folder / "f32.onnx", folder / "q.onnx", _Calibration(name), **options)
    return onnx.load(folder / "q.onnx")


def _step(model: onnx.ModelProto) -> float:
    """The scale of the last tensor that is quantised."""
    scales = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    quantised = [node.input for node in model.graph.node if node.op_type == "DequantizeLinear"]
    return max(float(scales[inputs[1]].max()) for inputs in quantised
               if model.graph.output[0].name in {o for node in model.graph.node for o in node.output
                                                 if list(node.input) == list(inputs)})


def _reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    if all(node.domain in ("", "ai.onnx") for node in model.graph.node):
        return np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0])


def _compare(name: str, model: onnx.ModelProto, atol: float) -> None:
    exe = mlc.compile(model, target=TARGET, log=False)
    whole = onnxruntime.InferenceSession(_float(name).SerializeToString())
    for seed in (11, 12):
        feeds = _feeds(name, seed)
        wanted, exact = _reference(model, feeds), whole.run(None, feeds)[0]
        assert np.abs(exe(**feeds)[0] - wanted).max() <= atol
        assert 0 < np.abs(wanted - exact).max() < 0.5 * np.abs(exact).max(), "quantised, and still the same model"


_TYPES = {"u8s8": (QuantType.QUInt8, QuantType.QInt8), "s8s8": (QuantType.QInt8, QuantType.QInt8),
          "u8u8": (QuantType.QUInt8, QuantType.QUInt8), "u16s8": (QuantType.QUInt16, QuantType.QInt8)}


_FORMS = [("QDQ", "u8s8", True), ("QDQ", "s8s8", False), ("QDQ", "u16s8", False), ("QOperator", "u8s8", False),
          ("QOperator", "u8u8", True)]
#: a compilation takes some seconds: of each kind one in the quick tests
_QUICK = (("convolutions", "QDQ", "u8s8"), ("encoder", "QOperator", "u8u8"))


def _all_forms() -> Iterator[object]:
    for name in MODELS:
        for form, types, channels in _FORMS:
            marks = [] if (name, form, types) in _QUICK else [pytest.mark.slow]
            yield pytest.param(name, form, types, channels, marks=marks)


@pytest.mark.parametrize(("name", "form", "types", "channels"), list(_all_forms()))
def test_static(name: str, form: str, types: str, channels: bool, tmp_path: Path) -> None:
    activations, weights = _TYPES[types]
    model = _static(name, tmp_path, quant_format=QuantFormat[form], activation_type=activations, weight_type=weights,
                    per_channel=channels)
    operators = {node.op_type for node in model.graph.node}
    assert ("QLinearMatMul" in operators or "QGemm" in operators) == (form == "QOperator")
    _compare(name, model, 1.001 * _step(model) if name == "convolutions" else 2e-2)


@pytest.mark.parametrize("weights", [QuantType.QInt8, pytest.param(QuantType.QUInt8, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["encoder", pytest.param("convolutions", marks=pytest.mark.slow)])
def test_dynamic(name: str, weights: QuantType, tmp_path: Path) -> None:
    """In the integers the same, so that only float32's rounding is left."""
    onnx.save(_float(name), tmp_path / "f32.onnx")
    quantize_dynamic(tmp_path / "f32.onnx", tmp_path / "q.onnx", weight_type=weights, per_channel=True)
    model = onnx.load(tmp_path / "q.onnx")
    assert {"MatMulInteger", "ConvInteger"} & {node.op_type for node in model.graph.node}
    _compare(name, model, 2e-2)


def _fused_encoder(size: int = 32, heads: int = 4) -> onnx.ModelProto:
    """A layer of BERT as onnxruntime's optimiser writes it."""
    net, fused = _Net("fused"), {"domain": "com.microsoft"}

    def norm() -> list[str]:
        return [net.weight((size,), 0.2, 1.0), net.weight((size,), 0.1)]

    tables = [net.weight((rows, size), 1.0) for rows in (50, 16, 2)]
    x = net("EmbedLayerNormalization", "x", "segments", *tables, *norm(), "mask", epsilon=1e-5, **fused)
    net.nodes[-1].output.append("lengths")
    seen = net("Attention", x, net.weight((size, 3 * size), size ** -0.5), net.weight((3 * size,), 0.1), "lengths",
               num_heads=heads, **fused)
    out = net("MatMul", seen, net.weight((size, size), size ** -0.5))
    x = net("SkipLayerNormalization", out, x, *norm(), net.weight((size,), 0.1), epsilon=1e-5, **fused)
    inner = net("BiasGelu", net("MatMul", x, net.weight((size, 4 * size), size ** -0.5)),
                net.weight((4 * size,), 0.1), **fused)
    out = net("MatMul", inner, net.weight((4 * size, size), (4 * size) ** -0.5))
    y = net("SkipLayerNormalization", out, x, *norm(), net.weight((size,), 0.1), epsilon=1e-5, **fused)
    tokens, segments, mask = (helper.make_tensor_value_info(name, TensorProto.INT32, [2, 8])
                              for name in ("x", "segments", "mask"))
    model = net.model(tokens, y, [2, 8, size])
    model.graph.input.extend([segments, mask])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_dynamic_with_fused_operators(tmp_path: Path) -> None:
    onnx.save(_fused_encoder(), tmp_path / "f32.onnx")
    # of 7 bits: where a CPU lacks VNNI, onnxruntime's products of larger weights saturate
    quantize_dynamic(tmp_path / "f32.onnx", tmp_path / "q.onnx", weight_type=QuantType.QInt8, reduce_range=True,
                     extra_options={"DefaultTensorType": TensorProto.FLOAT})
    model = onnx.load(tmp_path / "q.onnx")
    assert {"QAttention", "QEmbedLayerNormalization", "MatMulInteger"} <= {node.op_type for node in model.graph.node}
    rng = np.random.default_rng(5)
    feeds = {"x": rng.integers(0, 50, (2, 8)), "segments": rng.integers(0, 2, (2, 8)),
             "mask": np.arange(8) < np.array([[5], [8]])}
    feeds = {name: array.astype("int32") for name, array in feeds.items()}
    (found,) = mlc.compile(model, target=TARGET, log=False)(**feeds)
    wanted = _reference(model, feeds)
    assert wanted.std() > 0.3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-2)


@pytest.mark.parametrize("symmetric", [pytest.param(False, marks=pytest.mark.slow), True], ids=["offset", "symmetric"])
@pytest.mark.parametrize("form", ["QOperator", pytest.param("QDQ", marks=pytest.mark.slow)])
def test_weights_in_4_bits(form: str, symmetric: bool) -> None:
    """``MatMulNBits``, and the same as ``DequantizeLinear`` of int4 in blocks."""
    quantiser = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    given = onnx.ModelProto()
    given.CopyFrom(_float("encoder"))
    quantised = quantiser.MatMulNBitsQuantizer(given, block_size=32, is_symmetric=symmetric,
                                               quant_format=QuantFormat[form])
    quantised.process()
    model = quantised.model.model
    assert ("MatMulNBits" in {node.op_type for node in model.graph.node}) == (form == "QOperator")
    _compare("encoder", model, 1e-4)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("rows", [1, 7])
def test_weights_in_4_bits_stay_such_beside_floats_of_16(rows: int, kind: int) -> None:
    """The product is of the very numbers, added up in float32, and rounded once."""
    rng, depth, columns, block, dtype = np.random.default_rng(1), 256, 96, 32, helper.tensor_dtype_to_np_dtype(kind)
    packed = rng.integers(0, 256, (columns, depth // block, block // 2)).astype("uint8")
    scale, bias = rng.uniform(0.01, 0.1, columns * depth // block).astype(dtype), rng.normal(size=columns).astype(dtype)
    node = helper.make_node("MatMulNBits", ["x", "b", "s", "", "", "c"], ["y"], domain="com.microsoft", K=depth,
                            N=columns, bits=4, block_size=block)
    ends = [helper.make_tensor_value_info(*each) for each in (("x", kind, [rows, depth]), ("y", kind, [rows, columns]))]
    constants = [numpy_helper.from_array(array, name) for name, array in (("b", packed), ("s", scale), ("c", bias))]
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:], constants), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    x = rng.normal(size=(rows, depth)).astype(dtype)
    exe = mlc.compile(model, log=False)
    (found,) = exe(x)
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(columns, -1, block).astype("float64") - 8
    weights = (numbers * scale.astype("float64").reshape(columns, -1, 1)).reshape(columns, depth)
    wanted = x.astype("float64") @ weights.T + bias.astype("float64")
    step = {TensorProto.FLOAT: 1e-6, TensorProto.FLOAT16: 2.0**-11, TensorProto.BFLOAT16: 2.0**-8}[kind]
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype("float64"), wanted, rtol=1.01 * step, atol=1e-6 * np.abs(wanted).max())
    assert any(each["space"] in ("cpu.gemm_digits", "cpu.gemm_weight_only") for each in exe.metadata["functions"])


@pytest.mark.parametrize(("kind", "transposed"), [(TensorProto.INT4, False), (TensorProto.UINT4, True),
                                                  (TensorProto.INT8, True)])
def test_blocks_of_weights_are_read_as_integers(kind: int, transposed: bool) -> None:
    """``DequantizeLinear`` with a block size before a product, as exporters write weight-only quantisation."""
    rng, block = np.random.default_rng(kind), 32
    low, high = {TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16), TensorProto.INT8: (-128, 128)}[kind]
    shape, axis = ((96, 128), 1) if transposed else ((128, 96), 0)
    blocks = tuple(extent // block if i == axis else extent for i, extent in enumerate(shape))
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    scale = rng.uniform(0.01, 0.02, blocks).astype("float32")
    nodes = [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=axis, block_size=block)]
    if transposed:
        nodes.append(helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "t" if transposed else "d"], ["y"]))
    constants = {"w": rng.integers(low, high, shape).astype(dtype), "s": scale,
                 "z": rng.integers(low, high, blocks).astype(dtype)}
    graph = helper.make_graph(
        nodes, "blocks", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 96])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = rng.standard_normal((3, 128), dtype=np.float32)
    exe = mlc.compile(model, target="native")
    digits = has_digits(resolve("native"), 8 if kind == TensorProto.INT8 else 4, len(x), block)
    assert [entry["space"] for entry in exe.metadata["functions"]] == [
        "cpu.gemm_digits" if digits else "cpu.gemm_weight_only"]
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    assert wanted.std() > 0.1
    np.testing.assert_allclose(exe(x)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "rows", "depth", "block"), [(0, 1, 256, 64), (1, 5, 240, 32), (1, 6, 256, 128)])
def test_codes_of_a_table_stay_codes(kind: int, rows: int, depth: int, block: int) -> None:
    """``MatMulBnb4``, FP4 and NF4, whose weights do not stay in a cache: half a byte each, and a scale for the longest
    part of a block that divides rows. The tables are those of the papers, in any order of their codes."""
    rng, columns = np.random.default_rng(kind), 96
    codes = rng.integers(0, 16, (columns, depth)).astype("uint8")
    largest = rng.uniform(0.5, 2, columns * depth // block).astype("float32")
    constants = {"b": (codes[:, ::2] << 4 | codes[:, 1::2]).ravel(), "m": largest}
    node = helper.make_node("MatMulBnb4", ["x", "b", "m"], ["y"], domain="com.microsoft", K=depth, N=columns,
                            block_size=block, quant_type=kind, transB=1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("x", [rows, depth]), ("y", [rows, columns]))]
    graph = helper.make_graph([node], "codes", ends[:1], ends[1:],
                              [numpy_helper.from_array(array, name) for name, array in constants.items()])
    model = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    target = resolve("native -model=l3=16K", threads=1)
    if not has_lookup(target, rows, columns * depth, columns * depth):
        pytest.skip("this CPU has no lookups in registers that are worth their time")
    exe = mlc.compile(model, target=target, log=False)
    assert [entry["space"] for entry in exe.metadata["functions"]] == ["cpu.gemm_lookup"]
    sizes = [int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize for entry in exe.metadata["weights"]]
    assert sum(sizes) == columns * depth // 2 + columns * depth // np.gcd(block, depth) * 4 + 16 * 4
    levels = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
    table = np.array([*levels, *(-level for level in levels)] if kind == 0 else [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
    x = rng.standard_normal((rows, depth), dtype=np.float32)
    weights = table[codes] * np.repeat(largest.astype("float64"), block).reshape(columns, depth)
    wanted = x.astype("float64") @ weights.T
    np.testing.assert_allclose(exe(x)[0], wanted, rtol=0, atol=2e-6 * wanted.std())
