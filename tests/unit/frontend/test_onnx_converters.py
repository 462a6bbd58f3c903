"""Our own converters of ONNX operators, where TVM's hide what a node does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name


def clip(bounds: Mapping[str, float], opset: int) -> onnx.ModelProto:
    """``Clip`` with constant bounds: attributes before opset 11, inputs since."""
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    inputs, initializers, attributes = ["x"], [], {}
    if opset < 11:
        attributes = dict(bounds)
    else:
        inputs += [name if name in bounds else "" for name in ("min", "max")]
        initializers = [numpy_helper.from_array(np.float32(value), name) for name, value in bounds.items()]
    graph = helper.make_graph(
        [helper.make_node("Clip", inputs, ["y"], **attributes)], "clip", [image],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 4])], initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [6, 13])
@pytest.mark.parametrize("bounds", [{"min": 0.0, "max": 6.0}, {"min": -1.5}, {"max": 0.25}, {}], ids=str)
def test_clip_is_made_of_operators(bounds: Mapping[str, float], opset: int) -> None:
    model = clip(bounds, opset)
    values = [b.value for b in bindings(load_model(model).mod["main"])]
    names = [op_name(v) for v in values if isinstance(v, relax.Call)]
    assert names == [{"min": "relax.maximum", "max": "relax.minimum"}[name] for name in bounds]
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32") * 5
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(mlc.compile(model)(x)[0], expected)


def test_a_bound_that_is_no_number_does_not_bound() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype("float32")
    actual = mlc.compile(clip({"min": float("nan"), "max": 0.5}, 13))(x)[0]
    np.testing.assert_array_equal(actual, np.minimum(x, 0.5))


@pytest.mark.parametrize("attributes", [{}, {"exclusive": 1}, {"reverse": 1}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_cumulative_sums(dtype: str, attributes: Mapping[str, int]) -> None:
    """Position ids of RoBERTa are one."""
    x = (np.random.default_rng(2).standard_normal((3, 7, 5)) * 9).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node("CumSum", ["x", "axis"], ["y"], **attributes)], "scan",
        [helper.make_tensor_value_info("x", kind, x.shape)], [helper.make_tensor_value_info("y", kind, x.shape)],
        [numpy_helper.from_array(np.array(1), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(mlc.compile(model)(x)[0], expected, rtol=1e-5, atol=1e-4)


def _node(op: str, x: np.ndarray, constants: Mapping[str, np.ndarray], **attributes: object) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *constants], ["y"], **attributes)], op,
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", kind, [None] * (x.ndim + (op == "Col2Im") + (op == "STFT")))],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _assert_like_onnxruntime(model: onnx.ModelProto, x: np.ndarray) -> None:
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (got,) = mlc.compile(model)(x)
    assert got.shape == expected.shape and expected.std() > 0
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("axis", "length"), [(-2, 20), (1, 24), (2, 9)])
@pytest.mark.parametrize("form", [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0)], ids=str)
def test_fourier_transforms(axis: int, length: int, form: tuple[int, int, int]) -> None:
    parts, inverse, onesided = form
    x = np.random.default_rng(3).standard_normal((2, 3, 20, parts)).astype("float32")
    constants = {"length": np.array(length), "axis": np.array(axis)}
    _assert_like_onnxruntime(_node("DFT", x, constants, inverse=inverse, onesided=onesided), x)


def test_a_spectrogram() -> None:
    x = np.random.default_rng(4).standard_normal((2, 400, 1)).astype("float32")
    constants = {"step": np.array(40), "window": np.hanning(128).astype("float32"), "length": np.array(128)}
    _assert_like_onnxruntime(_node("STFT", x, constants), x)


def test_a_long_transform_is_refused() -> None:
    x = np.zeros((1, 4096, 1), dtype="float32")
    with pytest.raises(ModelError, match="at most 2048 points, got 4096"):
        mlc.compile(_node("DFT", x, {"length": np.array(4096), "axis": np.array(1)}))


@pytest.mark.parametrize(("patch", "strides", "pads"), [((4, 5), (4, 5), 0), ((3, 3), (2, 2), 1), ((3, 2), (1, 1), 0)])
def test_patches_become_an_image(patch: tuple[int, int], strides: tuple[int, int], pads: int) -> None:
    image = (12, 15)
    counts = [(extent + 2 * pads - size) // stride + 1
              for extent, size, stride in zip(image, patch, strides, strict=True)]
    x = np.random.default_rng(5).standard_normal((2, 3 * patch[0] * patch[1], counts[0] * counts[1]))
    constants = {"image": np.array(image), "patch": np.array(patch)}
    model = _node("Col2Im", x.astype("float32"), constants, strides=strides, pads=[pads] * 4)
    _assert_like_onnxruntime(model, x.astype("float32"))


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
@pytest.mark.parametrize(("axis", "largest"), [(-1, 1), (0, 0)])
def test_the_first_of_equals_are_taken(dtype: str, axis: int, largest: int) -> None:
    x = np.random.default_rng(6).integers(0, 9, (12, 30)).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["values", "indices"], axis=axis, largest=largest)], "top",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info(name, t, [None, None]) for name, t in (("values", kind), ("indices", 7))],
        [numpy_helper.from_array(np.array([5]), "k")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    order = np.argsort(-x.astype("int64") if largest else x.astype("int64"), axis=axis, kind="stable")
    indices = np.take(order, range(5), axis=axis)
    values, found = mlc.compile(model)(x)
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, axis))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_gathered_elements_in_ragged_rows(axis: int, dtype: str) -> None:
    rng = np.random.default_rng(7)
    x, indices = rng.standard_normal((6, 40, 33)).astype("float32"), rng.integers(-6, 6, (6, 5, 33)).astype(dtype)
    _assert_like_onnxruntime(_node("GatherElements", x, {"indices": indices}, axis=axis), x)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_hot(axis: int) -> None:
    x = np.random.default_rng(8).integers(-11, 11, (7, 19))
    constants = {"depth": np.array(11), "values": np.array([0.5, 2.0], dtype="float32")}
    graph = helper.make_graph(
        [helper.make_node("OneHot", ["x", *constants], ["y"], axis=axis)], "one_hot",
        [helper.make_tensor_value_info("x", TensorProto.INT64, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    _assert_like_onnxruntime(model, x)


def _position_of(op: str, shape: tuple[int, ...], axis: int, dtype: str, **attributes: int) -> onnx.ModelProto:
    kept = bool(attributes.get("keepdims", 1))
    result = [1 if i == axis % len(shape) else d for i, d in enumerate(shape) if kept or i != axis % len(shape)]
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], axis=axis, **attributes)], "position",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT64, result)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(("shape", "axis", "dtype", "attributes"), [
    ((16, 50), -1, "float32", {}),
    ((16, 50), -1, "float32", {"keepdims": 0, "select_last_index": 1}),
    ((16, 50), 0, "float64", {"keepdims": 0}),
    ((3, 7, 33), 0, "int32", {"select_last_index": 1}),
    ((3, 7, 33), 1, "int64", {}),
    ((3, 7, 33), 2, "float32", {"keepdims": 0}),
], ids=str)
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_positions_of_extremes(
    op: str, shape: tuple[int, ...], axis: int, dtype: str, attributes: Mapping[str, int]
) -> None:
    """Of small whole numbers, so that the first and the last of equals differ. Ragged vectors of positions, which are
    64 bits wide, used to fail in code generation."""
    model = _position_of(op, shape, axis, dtype, **attributes)
    x = np.random.default_rng(3).integers(-4, 5, shape).astype(dtype)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    for target in ("native", "llvm"):
        exe = mlc.compile(model, target=target, log=False)
        assert not any(function["replaced"] for function in exe.metadata["functions"])
        np.testing.assert_array_equal(exe(x)[0], expected)


@pytest.mark.parametrize(("base", "exponent"), [
    ("int32", "int32"), ("int64", "int64"), ("int32", "int8"), ("int64", "uint32"), ("int32", "int64"),
])
def test_powers_of_whole_numbers(base: str, exponent: str) -> None:
    """Of negative exponents, what is left of a fraction: 0, but for 1 and -1."""
    x, y = (a.reshape(-1) for a in np.meshgrid([-3, -2, -1, 1, 2, 7], [-2, -1, 0, 1, 2, 5, 10]))
    y = np.abs(y) if exponent.startswith("u") else y
    x, y = np.append(x, [-1, -1, 0]).astype(base), np.append(y, [100, 101, 3]).astype(exponent)
    wanted = np.trunc(np.power(x.astype("float64"), y.astype("float64"))).astype(base)
    graph = helper.make_graph(
        [helper.make_node("Pow", ["x", "y"], ["z"])], "power",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
         for name, a in (("x", x), ("y", y))],
        [helper.make_tensor_value_info("z", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    np.testing.assert_array_equal(mlc.compile(model, log=False)(x=x, y=y)[0], wanted)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_the_first_of_numbers_without_a_sign(dtype: str) -> None:
    x = np.array([[3, np.iinfo(dtype).max, 0, np.iinfo(dtype).max // 2 + 1, 3]], dtype)
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["values", "indices"])], "top",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_tensor_value_info(name, t, [None, None])
         for name, t in (("values", helper.np_dtype_to_tensor_dtype(x.dtype)), ("indices", 7))],
        [numpy_helper.from_array(np.array([4]), "k")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    values, indices = mlc.compile(model, log=False)(x)
    np.testing.assert_array_equal(indices, [[1, 3, 0, 4]])
    np.testing.assert_array_equal(values, x[:, [1, 3, 0, 4]])


@pytest.mark.parametrize("shape", [(3, 1, 1), (1,), (5,), (4, 5), (3, 1, 5)], ids=str)
def test_slopes_below_zero(shape: tuple[int, ...]) -> None:
    """Those of other axes than the channels' were refused by an assertion of TVM's."""
    rng = np.random.default_rng(9)
    x, slope = rng.standard_normal((2, 3, 4, 5)).astype("float32"), rng.standard_normal(shape).astype("float32")
    _assert_like_onnxruntime(_node("PRelu", x, {"slope": slope}), x)


@pytest.mark.parametrize(("slope", "said"), [
    (np.ones((7, 1, 1), "float32"), "PRelu|PRELU"), (np.ones(2, "int64"), "PRelu|PRELU|type"),
], ids=["number", "type"])
def test_slopes_that_do_not_fit(slope: np.ndarray, said: str) -> None:
    x = np.zeros((2, 3, 4, 5), "float32")
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(_node("PRelu", x, {"slope": slope}))
    assert "\n" not in str(caught.value) and "AssertionError" not in str(caught.value)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("taken", [
    {"starts": [1, 1], "ends": [3, 4]}, {"starts": [-3], "ends": [2**31 - 1], "axes": [-1]},
    {"starts": [0, 1], "ends": [-1, 100]},
], ids=str)
def test_what_attributes_say_is_taken(taken: dict[str, list[int]], free: bool) -> None:
    """Before opset 10; of a shape too, by which a tensor is reshaped."""
    x = np.random.default_rng(0).standard_normal((4, 5), dtype="float32")
    nodes = [helper.make_node("Slice", ["x"], ["y"], **taken), helper.make_node("Shape", ["x"], ["whole"]),
             helper.make_node("Slice", ["whole"], ["rows"], starts=[0], ends=[1]),
             helper.make_node("Concat", ["rows", "five"], ["shape"], axis=0),
             helper.make_node("Reshape", ["x", "shape"], ["z"])]
    graph = helper.make_graph(
        nodes, "slice", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n" if free else 4, 5])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in (("y", 2), ("z", 3))],
        [numpy_helper.from_array(np.array([5, 1]), "five")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=8)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for got, wanted in zip(mlc.compile(model, log=False)(x), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_slices_whose_ends_are_fewer_are_refused_in_one_line() -> None:
    model = _node("Slice", np.zeros((4, 5), "float32"), {}, starts=[1, 1], ends=[3, 4], axes=[0])
    model.opset_import[0].version = 9
    with pytest.raises(ModelError) as error:
        mlc.compile(model, log=False)
    assert "\n" not in str(error.value)
