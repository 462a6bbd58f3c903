"""Weights of 4 bits that a model unpacks from words of 32 by shifts and masks, as GPTQ and AWQ store them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc

_DEPTH, _COLUMNS, _BLOCK, _EACH = 256, 64, 32, 8
_SHIFTS = np.arange(0, 32, 4, dtype="uint32")


def _node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def _model(form: str, dtype: Any) -> tuple[onnx.ModelProto, np.ndarray]:
    """The model and its weights in float64. ``rows``: a word holds eight rows, and blocks are an axis of their own;
    ``columns``: it holds eight columns, and scales and zero points are repeated for each row; ``order``: and rows of
    one scale lie apart, as GPTQ quantises them in the order of their activations."""
    rng, kind = np.random.default_rng(1), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    count, owners = _DEPTH // _BLOCK, np.arange(_DEPTH) // _BLOCK
    if form == "order":
        owners = rng.permutation(owners)
    numbers, zeros = rng.integers(0, 16, (_DEPTH, _COLUMNS)), rng.integers(0, 16, (count, _COLUMNS))
    scales = rng.uniform(0.01, 0.1, (count, _COLUMNS)).astype(dtype)
    axis = 0 if form == "rows" else 1
    along = np.moveaxis(numbers, axis, -1).reshape(_DEPTH * _COLUMNS // _EACH, _EACH)
    words = np.bitwise_or.reduce(along.astype("uint32") << _SHIFTS, axis=-1)
    repeated = zeros.astype("int16")
    if form == "rows":
        words, shifts = words.reshape(_COLUMNS, -1).T[:, None], _SHIFTS[:, None]
        shape, repeated = np.array([count, _BLOCK, _COLUMNS]), repeated[:, None]
    else:
        words, shifts, shape = words.reshape(_DEPTH, -1, 1), _SHIFTS, np.array([_DEPTH, _COLUMNS])
        repeated = repeated[owners]
    constants = {"w": words, "h": shifts, "m": np.uint32(15), "z": repeated, "n": shape, "p": scales,
                 "one": np.array([1]), "k": np.array([_DEPTH, _COLUMNS]), "i": owners}
    nodes = [_node("BitShift", "w h", "a", direction="RIGHT"), _node("BitwiseAnd", "a m", "b"),
             _node("Reshape", "b n", "c"), _node("Cast", "c", "d", to=TensorProto.INT16), _node("Sub", "d z", "e"),
             _node("Cast", "e", "f", to=kind),
             _node("Unsqueeze", "p one", "s") if form == "rows" else _node("Gather", "p i", "s"),
             _node("Mul", *(("s f", "g") if form == "rows" else ("f s", "g"))), _node("Reshape", "g k", "v"),
             _node("MatMul", "x v", "y")]
    graph = helper.make_graph(
        nodes, "packed", [helper.make_tensor_value_info("x", kind, [3, _DEPTH])],
        [helper.make_tensor_value_info("y", kind, [3, _COLUMNS])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    weights = (numbers - zeros[owners]) * scales[owners].astype("float64")
    return model, weights


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", ["rows", "columns", "order"])
def test_they_stay_of_4_bits(form: str, dtype: Any) -> None:
    model, weights = _model(form, dtype)
    x = np.random.default_rng(2).standard_normal((3, _DEPTH)).astype(dtype)
    wanted = x.astype("float64") @ weights
    if dtype == np.float32:
        np.testing.assert_allclose(ReferenceEvaluator(model).run(None, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)
    exe = mlc.compile(model, log=False)
    (found,) = exe(x)
    # a scale of 16 bits makes weights of 16, which it may round but need not
    step = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[np.dtype(dtype).name]
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype("float64"), wanted, rtol=0, atol=step * np.abs(wanted).max())
    taken = sum(int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize for entry in exe.metadata["weights"])
    places = 4 * _DEPTH if form == "order" else 0
    assert taken <= _DEPTH * _COLUMNS // 2 + 2 * 4 * _DEPTH // _BLOCK * _COLUMNS + places


def test_few_integers_of_more_bits_are_right() -> None:
    """A block of which the integers lie farther apart stays of 8 bits."""
    rng = np.random.default_rng(3)
    integers = rng.integers(-100, 101, (_DEPTH, _COLUMNS)).astype("int16")
    constants = {"w": integers, "s": rng.uniform(0.01, 0.1, _COLUMNS).astype("float32")}
    nodes = [_node("Cast", "w", "c", to=TensorProto.FLOAT), _node("Mul", "c s", "v"), _node("MatMul", "x v", "y")]
    graph = helper.make_graph(
        nodes, "bytes", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, _DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, _COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = rng.standard_normal((3, _DEPTH)).astype("float32")
    exe = mlc.compile(model, log=False)
    wanted = x.astype("float64") @ (integers * constants["s"].astype("float64"))
    np.testing.assert_allclose(exe(x)[0], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert sum(int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize for entry in exe.metadata["weights"]
               if entry["dtype"] in ("uint32", "uint8")) == _DEPTH * _COLUMNS


@pytest.mark.parametrize(("integers", "scale"), [((4096, 1), (1, 8)), ((1, 4096), (16, 1))])
def test_integers_that_scales_spread(integers: tuple[int, int], scale: tuple[int, int]) -> None:
    """An outer product is no matrix of integers."""
    rng = np.random.default_rng(4)
    constants = {"w": rng.integers(-100, 101, integers).astype("int16"),
                 "s": rng.uniform(0.01, 0.1, scale).astype("float32")}
    depth, columns = np.broadcast_shapes(integers, scale)
    nodes = [_node("Cast", "w", "c", to=TensorProto.FLOAT), _node("Mul", "c s", "v"), _node("MatMul", "x v", "y")]
    graph = helper.make_graph(
        nodes, "outer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, columns])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = rng.standard_normal((3, depth)).astype("float32")
    wanted = x.astype("float64") @ (constants["w"] * constants["s"].astype("float64"))
    np.testing.assert_allclose(mlc.compile(model, log=False)(x)[0], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
