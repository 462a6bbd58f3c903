"""Compiled models with free sizes: right at every size of their ranges, and what is said of any other."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import InputError, MlcError, UsageError
from mlc.networks.inputs import random_inputs
from mlc.shapes import Free

SIZES = 20


class Model:
    """An ONNX model under construction; weights are drawn so that values stay near 1."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        values = (scale * self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
        return self.constant(values)

    def constant(self, values: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def done(self, inputs: dict[str, list[str | int]], output: str, rank: int) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"]))
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()]
        result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)
        graph = helper.make_graph(self.nodes, "free", values, [result], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def perceptron() -> onnx.ModelProto:
    m = Model()
    hidden = m.add("Relu", m.add("Add", m.add("MatMul", "x", m.weight(40, 64)), m.weight(64)))
    return m.done({"x": ["batch", 40]}, m.add("Softmax", m.add("MatMul", hidden, m.weight(64, 10)), axis=-1), 2)


def residual(height: int | str = 32, width: int | str = 32) -> onnx.ModelProto:
    """Convolutions with a shortcut, a stride, pooling, and a classifier."""
    m = Model()

    def convolution(x: str, inner: int, outer: int, kernel: int, stride: int = 1) -> str:
        weight, bias = m.weight(outer, inner, kernel, kernel), m.weight(outer)
        return m.add("Conv", x, weight, bias, strides=[stride] * 2, pads=[kernel // 2] * 4)

    stem = m.add("Relu", convolution("x", 3, 16, 7, 2))
    pooled = m.add("MaxPool", stem, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    block = convolution(m.add("Relu", convolution(pooled, 16, 16, 3)), 16, 16, 3)
    whole = m.add("Relu", m.add("Add", pooled, block))
    down = m.add("Add", convolution(whole, 16, 32, 3, 2), convolution(whole, 16, 32, 1, 2))
    flat = m.add("Flatten", m.add("GlobalAveragePool", down))
    return m.done({"x": ["batch", 3, height, width]}, m.add("Gemm", flat, m.weight(32, 10), m.weight(10)), 2)


def heads() -> onnx.ModelProto:
    """A detector's scores at two strides: out of blocks of channels into rows of one matrix."""
    m = Model()

    def convolution(x: str, inner: int, outer: int, stride: int = 1) -> str:
        return m.add("Conv", x, m.weight(outer, inner, 3, 3), m.weight(outer), strides=[stride] * 2, pads=[1] * 4)

    levels = [m.add("Relu", convolution("x", 3, 16, 2))]
    levels.append(m.add("Relu", convolution(levels[0], 16, 32, 2)))
    rows = m.constant(np.array([0, -1, 3], np.int64))
    scores = [m.add("Reshape", m.add("Transpose", convolution(level, width, 24), perm=[0, 2, 3, 1]), rows)
              for level, width in zip(levels, (16, 32), strict=True)]
    return m.done({"x": [1, 3, "height", "width"]}, m.add("Concat", *scores, axis=1), 3)


def encoder(width: int = 32, heads: int = 2) -> onnx.ModelProto:
    """A layer of a transformer whose shapes are computed as exporters do, with a mask and positions."""
    m = Model()
    numbers = {n: m.constant(np.array([n], np.int64)) for n in (0, 1, heads, width // heads, width)}
    shape = m.add("Shape", "x")
    batch, length = (m.add("Gather", shape, m.constant(np.array(axis, np.int64)), axis=0) for axis in (0, 1))
    batch, length = (m.add("Unsqueeze", size, numbers[0]) for size in (batch, length))
    positions = m.add("Slice", m.weight(64, width, scale=3.0), numbers[0], length, numbers[0])
    x = m.add("Add", "x", positions)

    def norm(value: str) -> str:
        scale = m.constant((1 + 0.1 * m.rng.standard_normal(width)).astype(np.float32))
        return m.add("LayerNormalization", value, scale, m.weight(width), axis=-1)

    def linear(value: str, inner: int, outer: int) -> str:
        return m.add("Add", m.add("MatMul", value, m.weight(inner, outer, scale=2.0)), m.weight(outer))

    def head(value: str, order: list[int]) -> str:
        apart = m.add("Concat", batch, length, numbers[heads], numbers[width // heads], axis=0)
        return m.add("Transpose", m.add("Reshape", linear(value, width, width), apart), perm=order)

    x = norm(x)
    query, key, value = head(x, [0, 2, 1, 3]), head(x, [0, 2, 3, 1]), head(x, [0, 2, 1, 3])
    scores = m.add("Mul", m.add("MatMul", query, key), m.constant(np.array((width // heads) ** -0.5, np.float32)))
    hidden = m.add("Mul", m.add("Sub", m.constant(np.array(1.0, np.float32)), "mask"),
                   m.constant(np.array(-1e4, np.float32)))
    hidden = m.add("Unsqueeze", hidden, m.constant(np.array([1, 2], np.int64)))
    weights = m.add("Softmax", m.add("Add", scores, hidden), axis=-1)
    mixed = m.add("Transpose", m.add("MatMul", weights, value), perm=[0, 2, 1, 3])
    joined = m.add("Reshape", mixed, m.constant(np.array([0, 0, -1], np.int64)))
    x = norm(m.add("Add", x, linear(joined, width, width)))
    inner = linear(x, width, 2 * width)
    root, one = (m.constant(np.array(value, np.float32)) for value in (0.5**0.5, 1.0))
    gelu = m.add("Mul", inner, m.add("Add", m.add("Erf", m.add("Mul", inner, root)), one))
    x = norm(m.add("Add", x, linear(gelu, 2 * width, width)))
    return m.done({"x": ["batch", "length", width], "mask": ["batch", "length"]}, x, 3)


def trials(exe: mlc.artifact.Executable) -> list[dict[str, int]]:
    """Every edge of the ranges, and random sizes inside."""
    free = {size.name: size.range for spec in exe.inputs for size in spec.shape if isinstance(size, Free)}
    rng = np.random.default_rng(1)
    edges = list(itertools.product(*((each.low, each.high) for each in free.values())))
    inside = [tuple(int(rng.integers(r.low, r.high + 1)) for r in free.values()) for _ in range(SIZES - len(edges))]
    return [dict(zip(free, sizes, strict=True)) for sizes in (*edges, *inside)]


def arrays_of(exe: mlc.artifact.Executable, seed: int, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    arrays = random_inputs(exe.inputs, seed, sizes)
    if "mask" in arrays:
        batch, length = arrays["mask"].shape
        lengths = np.random.default_rng(seed).integers(1, length + 1, batch)
        arrays["mask"] = (np.arange(length) < lengths[:, None]).astype(np.float32)
    return arrays


@pytest.mark.parametrize(("model", "shapes"), [
    (perceptron, {"x": "1..32,40"}), (residual, {"x": ((1, 8), 3, 32, 32)}),
    (lambda: residual("height", "width"), {"x": "1..2,3,33..56,40..48"}),
    (heads, {"x": "1,3,33..56,40..48"}),
    (encoder, {"x": "1..8,1..64,32"}), (encoder, {"x": "2,1..64,32"}), (encoder, {"x": "1..8,33,32"}),
], ids=["perceptron", "residual", "residual-image", "heads-image", "encoder", "encoder-length", "encoder-batch"])
def test_every_size_is_right(model, shapes):
    proto = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a kernel that no schedule fits
        exe = mlc.compile(proto, log=False, shapes=shapes)
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for seed, sizes in enumerate(trials(exe)):
        arrays = arrays_of(exe, seed, sizes)
        (expected,), (found,) = reference.run(None, arrays), exe(**arrays)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=str(sizes))


def test_no_place_is_found_by_dividing_by_free_sizes():
    """The simplifier of TVM may not come to an end on what a kernel of such a reshape divides by."""
    lowered = mlc.Compilation.of(heads(), "x86-64-v3", shapes={"x": "1,3,33..512,40..512"}).lowered()
    assert [gvar.name_hint for gvar, _ in lowered.module.functions_items() if "reshape" in gvar.name_hint] == []


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("free") / "perceptron.so"
    mlc.compile(perceptron(), log=False, shapes={"x": "2..6,40"}).save(path)
    return path


def test_a_saved_artifact_says_what_is_free_and_takes_it(artifact):
    exe = mlc.load(artifact)
    assert str(exe.inputs[0]) == "x: float32[2..6,40]"
    assert str(exe.outputs[0]) == "y: float32[2..6,10]"
    first = {n: exe(np.full((n, 40), 0.5, np.float32))[0] for n in (2, 6, 3)}
    assert [first[n].shape for n in first] == [(2, 10), (6, 10), (3, 10)]
    np.testing.assert_array_equal(first[2], first[6][:2])  # outputs are the caller's own: later calls left them alone


@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (3, 39), (3,), (0, 40)])
def test_sizes_out_of_range_are_refused_in_one_line(artifact, shape):
    with pytest.raises(InputError, match=r"must have a shape in \[2\.\.6,40\], got \[") as caught:
        mlc.load(artifact)(np.zeros(shape, np.float32))
    assert "\n" not in str(caught.value)


def test_arrays_that_are_not_contiguous_are_copied_at_every_size(artifact):
    exe, rng = mlc.load(artifact), np.random.default_rng(0)
    for n in (3, 5, 2, 5):
        array = rng.standard_normal((40, n)).astype(np.float32).T
        np.testing.assert_array_equal(exe(array)[0], exe(np.ascontiguousarray(array))[0])


def test_inputs_must_agree_on_a_size():
    m = Model()
    proto = m.done({"a": ["n", 4], "b": ["n", 4]}, m.add("Add", "a", "b"), 2)
    exe = mlc.compile(proto, log=False, shapes={"a": "1..4,4"})
    with pytest.raises(InputError, match="agree on n, but it is 2 in a and 3 in b"):
        exe(np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32))


def test_functions_that_are_equal_but_for_a_size_keep_their_ranges():
    """What is made for one free size is not taken for another of a larger range."""
    m = Model()
    both = [m.add("Tanh", m.add("MatMul", name, m.constant(np.eye(8, dtype=np.float32)[:, ::-1]))) for name in "ab"]
    proto = m.done({"a": ["n", 8], "b": ["k", 8]}, m.add("Concat", *both, axis=0), 2)
    exe = mlc.compile(proto, log=False, shapes={"a": "1..2,8", "b": "1..300,8"})
    rng = np.random.default_rng(0)
    for n, k in ((1, 300), (2, 1), (2, 299)):
        a, b = (rng.standard_normal((size, 8)).astype(np.float32) for size in (n, k))
        expected = np.tanh(np.concatenate([a, b]).astype(np.float64)[:, ::-1])
        np.testing.assert_allclose(exe(a, b)[0], expected, rtol=1e-5, atol=1e-6)


def test_tuning_free_sizes_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"tuning measures fixed sizes, but batch=1\.\.32 .* --shape x=8,40"):
        mlc.tune(perceptron(), shapes={"x": "1..32,40"}, trials=1, log=tmp_path / "log.db")


def test_sizes_that_depend_on_data_are_refused():
    m = Model()
    proto = m.done({"x": ["n", 4]}, m.add("Softmax", m.add("Unique", "x")), 1)
    with pytest.raises(MlcError, match="it must work on each by itself; end the model before it") as caught:
        mlc.compile(proto, log=False)
    assert "\n" not in str(caught.value)


def _numbers(m: Model, *values: int) -> str:
    return m.constant(np.array(values, np.int64))


@pytest.mark.parametrize(("operator", "arguments", "said"), [
    ("Reshape", [(1, 8)], "as many elements as"), ("Reshape", [(3, -1)], "-1 of a reshape"),
    ("Slice", [(3,), (5,), (0,)], "must have bounds that can be derived"), ("Expand", [(3, 4)], "must be equal or 1"),
])
def test_shapes_that_no_free_size_can_hold_are_refused(operator, arguments, said):
    m = Model()
    result = m.add(operator, "x", *(_numbers(m, *values) for values in arguments))
    with pytest.raises(MlcError, match=said) as caught:
        mlc.compile(m.done({"x": ["n", 4]}, result, 2), log=False, shapes={"x": "1..8,4"})
    assert "\n" not in str(caught.value)


def test_movement_along_a_free_axis():
    """Slices that count from the end, reshapes that keep or merge the free axis, broadcasts to it."""
    m = Model()
    x = m.add("Relu", "x")
    length = m.add("Shape", x, start=0, end=1)
    tail = m.add("Slice", x, _numbers(m, -3), _numbers(m, np.iinfo(np.int64).max), _numbers(m, 0))
    flat = m.add("Reshape", m.add("Slice", x, _numbers(m, 1), _numbers(m, -1), _numbers(m, 0)), _numbers(m, -1, 2))
    whole = m.add("Expand", m.weight(1, 2), m.add("Concat", length, _numbers(m, 2), axis=0))
    back = m.add("Reshape", m.add("Concat", x, x, axis=1), m.add("Concat", m.add("Mul", length, _numbers(m, 4)),
                                                                _numbers(m, 2), axis=0))
    rows = m.add("Reshape", tail, _numbers(m, 6, 2))
    proto = m.done({"x": ["n", 4]}, m.add("Concat", flat, whole, back, rows, axis=0), 2)
    exe = mlc.compile(proto, log=False, shapes={"x": "3..40,4"})
    reference = onnxruntime.InferenceSession(proto.SerializeToString())
    for n in (3, 4, 17, 40):
        arrays = random_inputs(exe.inputs, n, {"n": n})
        (expected,), (found,) = reference.run(None, arrays), exe(**arrays)
        np.testing.assert_array_equal(found, expected)
