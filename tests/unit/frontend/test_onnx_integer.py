"""``MatMulInteger`` and ``ConvInteger``: exact, and unsigned data times signed weights in the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from quantised_nodes import extremes, imported_numbers, model_of
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name


def _products(model: onnx.ModelProto) -> list[tuple[str, str, str]]:
    """The types of the factors and of the result of each product in the imported module."""
    calls = [b.value for b in bindings(load_model(model).mod["main"]) if isinstance(b.value, relax.Call)]
    return [(*(str(arg.ty.dtype) for arg in call.args), str(call.ty.dtype)) for call in calls
            if op_name(call) in ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")]


def _matmul(
    feeds: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray], inputs: Sequence[str], rank: int
) -> onnx.ModelProto:
    return model_of([helper.make_node("MatMulInteger", list(inputs), ["y"])], feeds, constants, {"y": ("int32", rank)})


@pytest.mark.parametrize("of_a", [None, "low", "high", "given"])
@pytest.mark.parametrize("of_b", [None, "low", "high", "columns"])
@pytest.mark.parametrize(("a_type", "b_type"), [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8"),
                                                ("int8", "uint8")])
def test_products_with_zero_points(a_type: str, b_type: str, of_a: str | None, of_b: str | None) -> None:
    """At both ends of the types; ``given`` comes when the model runs."""
    rng = np.random.default_rng(0)
    feeds, constants = {"a": extremes(rng, (2, 3, 40), a_type)}, {"b": extremes(rng, (40, 5), b_type)}
    ends = {"low": lambda dtype: np.array(np.iinfo(dtype).min, dtype),
            "high": lambda dtype: np.array(np.iinfo(dtype).max, dtype)}
    inputs = ["a", "b", "za" if of_a else "", "zb" if of_b else ""]
    if of_a:
        (feeds if of_a == "given" else constants)["za"] = ends.get(of_a, ends["high"])(a_type)
    if of_b:
        constants["zb"] = extremes(rng, (5,), b_type) if of_b == "columns" else ends[of_b](b_type)
    model = _matmul(feeds, constants, inputs, 3)
    assert _products(model) == [("uint8", "int8", "int32")]
    np.testing.assert_array_equal(imported_numbers(model, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0])


@pytest.mark.parametrize(("a", "b"), [((40,), (40, 5)), ((3, 40), (40,)), ((40,), (40,)), ((2, 3, 40), (2, 40, 5))])
def test_ranks_of_numpys_product(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Both factors and zero points given when the model runs."""
    rng = np.random.default_rng(1)
    feeds = {"a": extremes(rng, a, "int8"), "b": extremes(rng, b, "uint8"), "za": np.array(-3, "int8"),
             "zb": np.array(200, "uint8")}
    model = _matmul(feeds, {}, list(feeds), len(np.matmul(feeds["a"], feeds["b"]).shape))
    np.testing.assert_array_equal(imported_numbers(model, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0])


def test_a_zero_point_for_each_row() -> None:
    """In float64, since the reference takes them for columns."""
    rng = np.random.default_rng(2)
    feeds, zeros = {"a": extremes(rng, (4, 40), "uint8")}, extremes(rng, (4,), "uint8")
    constants = {"b": extremes(rng, (40, 5), "int8"), "z": zeros}
    model = _matmul(feeds, constants, ["a", "b", "z"], 2)
    wanted = (feeds["a"].astype("float64") - zeros[:, None]) @ constants["b"].astype("float64")
    np.testing.assert_array_equal(imported_numbers(model, feeds)[0], wanted)


def _conv(
    x: np.ndarray, w: np.ndarray, zeros: Mapping[str, np.ndarray | None], given: bool, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """``given``: the data's zero point comes when the model runs."""
    feeds, constants = {"x": x}, {"w": w}
    for name, value in zeros.items():
        if value is not None:
            (feeds if given and name == "zx" else constants)[name] = value
    inputs = ["x", "w", *(name if zeros.get(name) is not None else "" for name in ("zx", "zw"))]
    node = helper.make_node("ConvInteger", inputs, ["y"], **attributes)
    return model_of([node], feeds, constants, {"y": ("int32", x.ndim)}), feeds


def _conv_in_float64(
    x: np.ndarray, w: np.ndarray, zeros: Mapping[str, np.ndarray | None], **attributes: Any
) -> np.ndarray:
    """By the reference's convolution of the differences; those of its ``ConvInteger`` know no groups of weights."""
    zx, zw = (np.zeros(1) if zeros.get(name) is None else np.atleast_1d(zeros[name]) for name in ("zx", "zw"))
    data = x.astype("float64") - zx.astype("float64")
    weights = w.astype("float64") - zw.astype("float64").reshape(-1, *[1] * (w.ndim - 1))
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    model = model_of([node], {"x": data}, {"w": weights}, {"y": ("float64", x.ndim)})
    return np.asarray(ReferenceEvaluator(model).run(None, {"x": data})[0])


@pytest.mark.parametrize("given", [False, True], ids=["constant", "given"])
@pytest.mark.parametrize("case", [
    {"x": (2, 3, 7, 9), "w": (4, 3, 3, 3), "pads": [1, 0, 2, 1]},
    {"x": (1, 4, 8, 8), "w": (6, 2, 3, 3), "group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"x": (1, 4, 8, 8), "w": (4, 1, 3, 3), "group": 4, "dilations": [2, 1]},
    {"x": (1, 3, 9, 8), "w": (4, 3, 3, 2), "auto_pad": "SAME_UPPER", "strides": [2, 3]},
    {"x": (1, 3, 9, 8), "w": (4, 3, 3, 2), "auto_pad": "SAME_LOWER"},
    {"x": (1, 3, 11), "w": (4, 3, 3), "pads": [1, 1]},
    {"x": (1, 2, 5, 6, 7), "w": (3, 2, 2, 2, 2), "pads": [1, 0, 1, 0, 1, 0]},
], ids=str)
@pytest.mark.parametrize(("x_type", "w_type", "of_weights"), [
    ("uint8", "int8", "none"), ("int8", "int8", "one"), ("uint8", "uint8", "channels"),
])
def test_convolutions(case: Mapping[str, Any], x_type: str, w_type: str, of_weights: str, given: bool) -> None:
    rng = np.random.default_rng(3)
    shapes = {name: case[name] for name in ("x", "w")}
    attributes = {name: value for name, value in case.items() if name not in shapes}
    x, w = extremes(rng, shapes["x"], x_type), extremes(rng, shapes["w"], w_type)
    of_w = {"none": None, "one": np.array(-128 if w_type == "int8" else 255, w_type),
            "channels": extremes(rng, shapes["w"][:1], w_type)}[of_weights]
    zeros = {"zx": np.array(np.iinfo(x_type).max, x_type), "zw": of_w}
    model, feeds = _conv(x, w, zeros, given, **attributes)
    products = _products(model)
    assert products and all(each == ("uint8", "int8", "int32") for each in products)
    wanted = _conv_in_float64(x, w, zeros, **attributes)
    np.testing.assert_array_equal(imported_numbers(model, feeds)[0], wanted)


def test_compiled() -> None:
    rng = np.random.default_rng(4)
    x, w = extremes(rng, (1, 3, 12, 12), "int8"), extremes(rng, (8, 3, 3, 3), "uint8")
    zeros = {"zx": np.array(-128, "int8"), "zw": extremes(rng, (8,), "uint8")}
    model, feeds = _conv(x, w, zeros, True, pads=[1, 1, 1, 1])
    wanted = _conv_in_float64(x, w, zeros, pads=[1, 1, 1, 1])
    np.testing.assert_array_equal(mlc.compile(model, log=False)(**feeds)[0], wanted)
    feeds = {"a": extremes(rng, (7, 64), "int8"), "za": np.array(127, "int8")}
    constants = {"b": extremes(rng, (64, 33), "uint8"), "zb": np.array(3, "uint8")}
    model = _matmul(feeds, constants, ["a", "b", "za", "zb"], 2)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(mlc.compile(model, log=False)(**feeds)[0], wanted)


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 1, 0]])
def test_images_of_free_size_with_a_border_that_is_given(pads: list[int]) -> None:
    rng = np.random.default_rng(6)
    w, zeros = extremes(rng, (8, 3, 3, 3), "int8"), {"zx": np.array(200, "uint8"), "zw": None}
    model, _ = _conv(extremes(rng, (1, 3, 12, 12), "uint8"), w, zeros, True, pads=pads)
    for axis, name in ((2, "h"), (3, "w")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    executable = mlc.compile(model, log=False, shapes={"x": "1,3,3..20,3..20"})
    for size in ((3, 3), (7, 20), (12, 12), (20, 5)):
        x = extremes(rng, (1, 3, *size), "uint8")
        found = executable(x=x, zx=zeros["zx"])[0]
        np.testing.assert_array_equal(found, _conv_in_float64(x, w, zeros, pads=pads))


def test_nothing_is_added_where_all_zero_points_are_zero() -> None:
    rng = np.random.default_rng(5)
    feeds = {"a": extremes(rng, (3, 8), "uint8")}
    constants = {"b": extremes(rng, (8, 5), "uint8"), "za": np.array(0, "uint8"), "zb": np.full(5, 128, "uint8")}
    model = _matmul(feeds, constants, ["a", "b", "za", "zb"], 2)
    calls = [b.value for b in bindings(load_model(model).mod["main"]) if isinstance(b.value, relax.Call)]
    assert [op_name(call) for call in calls] == ["relax.matmul"]


@pytest.mark.parametrize(("zeros", "message"), [
    ({"za": np.array(1, "int8")}, "zero point of A must be of its type, uint8, got int8"),
    ({"za": np.zeros(5, "uint8")}, r"zero point of A must be one number or have the shape \[3\], got \[5\]"),
    ({"zb": np.zeros(3, "int8")}, r"zero point of B must be one number or have the shape \[5\], got \[3\]"),
])
def test_bad_zero_points(zeros: Mapping[str, np.ndarray], message: str) -> None:
    feeds, constants = {"a": np.zeros((3, 8), "uint8")}, {"b": np.zeros((8, 5), "int8"), **zeros}
    model = _matmul(feeds, constants, ["a", "b", "za" if "za" in zeros else "", "zb" if "zb" in zeros else ""], 2)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model)
    assert "\n" not in str(caught.value)
