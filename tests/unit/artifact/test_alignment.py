"""Inputs that begin at a multiple of 16 bytes and of no more, as numpy's do, are read where they are, by every kind of
kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.artifact import Executable
from mlc.frontend.model import TensorSpec
from mlc.testing.targets import runs
from schedules.alignment import ANYWHERE, relax_alignment

RNG = np.random.default_rng(0)
LEVELS = ("x86-64-v3", "x86-64-v4")


def _begun(array: np.ndarray, start: int) -> np.ndarray:
    """A copy that begins so many bytes after a multiple of 64."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + start
    found = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def _model(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, ...]], weights: dict[str, np.ndarray],
    kind: int = TensorProto.FLOAT, result: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    results = [helper.make_tensor_value_info("y", result, [f"d{i}" for i in range(len(inputs["x"]))])]
    graph = helper.make_graph(
        nodes, "model", values, results,
        [numpy_helper.from_array(weight, name) for name, weight in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def _weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))


def _convolution() -> onnx.ModelProto:
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4), helper.make_node("Relu", ["c"], ["y"])]
    return _model(nodes, {"x": (1, 16, 13, 11)}, {"w": _weight(32, 16, 3, 3)})


def _depthwise() -> onnx.ModelProto:
    return _model([helper.make_node("Conv", ["x", "w"], ["y"], group=32, pads=[1] * 4)], {"x": (1, 32, 9, 14)},
                  {"w": _weight(32, 1, 3, 3)})


def _pooling() -> onnx.ModelProto:
    return _model([helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2])],
                  {"x": (1, 16, 17, 15)}, {})


def _products() -> onnx.ModelProto:
    return _model([helper.make_node("MatMul", ["x", "z"], ["y"])], {"x": (3, 37, 64), "z": (3, 64, 48)}, {})


def _dense() -> onnx.ModelProto:
    weights = {"w": _weight(96, 80), "b": _weight(80)}
    return _model([helper.make_node("Gemm", ["x", "w", "b"], ["y"])], {"x": (5, 96)}, weights)


def _softmax() -> onnx.ModelProto:
    return _model([helper.make_node("Softmax", ["x"], ["y"])], {"x": (7, 83)}, {})


def _sum() -> onnx.ModelProto:
    nodes = [helper.make_node("Transpose", ["z"], ["t"], perm=[1, 0]), helper.make_node("Add", ["x", "t"], ["y"])]
    return _model(nodes, {"x": (48, 32), "z": (32, 48)}, {})


def _halves() -> onnx.ModelProto:
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (6, 64)},
                  {"w": _weight(64, 48).astype(np.float16)}, TensorProto.FLOAT16, TensorProto.FLOAT16)


def _bytes() -> onnx.ModelProto:
    weights = {"w": RNG.integers(-127, 128, (64, 48), dtype=np.int8)}
    return _model([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], {"x": (9, 64)}, weights, TensorProto.UINT8,
                  TensorProto.INT32)


MODELS = (_convolution, _depthwise, _pooling, _products, _dense, _softmax, _sum, _halves, _bytes)


def _arrays(exe: Executable) -> list[np.ndarray]:
    def one(spec: TensorSpec) -> np.ndarray:
        values = RNG.integers(0, 256, spec.sized()) if spec.dtype == "uint8" else RNG.standard_normal(spec.sized())
        return values.astype(spec.dtype)

    return [one(spec) for spec in exe.inputs]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__.strip("_"))
def test_inputs_are_read_where_they_are(make: Callable[[], onnx.ModelProto], level: str) -> None:
    model = make()
    exe = mlc.compile(model, level, log=False)
    arrays = _arrays(exe)
    starts = [_begun(array, 16 * (1 + index)) for index, array in enumerate(arrays)]
    for slot, array in zip(exe._slots, starts, strict=True):
        assert slot.tensor(array).data_ptr() == array.ctypes.data
    if not runs(level):
        pytest.skip(f"this CPU does not run {level}")
    (wanted,) = exe(*(_begun(array, 0) for array in arrays))
    (got,) = exe(*starts)
    np.testing.assert_array_equal(got, wanted)
    feeds = {spec.name: array for spec, array in zip(exe.inputs, arrays, strict=True)}
    (reference,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    assert np.std(reference.astype(np.float64)) > 0.01
    np.testing.assert_allclose(got, reference, rtol=1e-2 if got.dtype == np.float16 else 1e-4, atol=1e-4)


def test_a_past_is_read_where_it_is() -> None:
    """What is read most of all inputs: a free past, of which attention makes the present."""
    shape = (1, 2, "past", 32)
    nodes = [helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "tk", "tv"])]
    kinds = {"q": (1, 2, 3, 32), "k": (1, 2, 3, 32), "v": (1, 2, 3, 32), "pk": shape, "pv": shape}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in kinds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [*"abcd"]) for name in ("y", "tk", "tv")]
    graph = helper.make_graph(nodes, "past", values, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    exe = mlc.compile(model, log=False, shapes={"pk": (1, 2, "1..64", 32), "pv": (1, 2, "1..64", 32)})
    for past in (5, 16, 64):
        arrays = [RNG.standard_normal((1, 2, past if "past" in dims else 3, 32), dtype=np.float32)
                  for dims in kinds.values()]
        starts = [_begun(array, 16 * (index % 3 + 1)) for index, array in enumerate(arrays)]
        for slot, array in zip(exe._slots, starts, strict=True):
            assert slot.tensor(array).data_ptr() == array.ctypes.data
        for got, wanted in zip(exe(*starts), exe(*(_begun(array, 0) for array in arrays)), strict=True):
            np.testing.assert_array_equal(got, wanted)
        (reference, *_) = onnx.reference.ReferenceEvaluator(model).run(None, dict(zip(kinds, arrays, strict=True)))
        np.testing.assert_allclose(exe(*starts)[0], reference, rtol=1e-4, atol=1e-4)


def test_artifacts_of_before_have_their_inputs_copied() -> None:
    """Their code reads vectors where they begin at multiples of 64 bytes alone."""
    exe = mlc.compile(_softmax(), log=False)
    old = Executable(exe.variant.code, {k: v for k, v in exe.metadata.items() if k != "alignment"}, exe.variant.weights)
    (array,) = _arrays(exe)
    array = _begun(array, 16)
    assert old._slots[0].tensor(array).data_ptr() != array.ctypes.data
    np.testing.assert_array_equal(old(array)[0], exe(array)[0])


def test_functions_without_such_arguments_stay() -> None:
    from tvm import te

    x = te.placeholder((4, 8), "float32", "x")
    func = te.create_prim_func([x, te.compute((4, 8), lambda i, j: x[i, j] * 2.0, "y")])
    assert relax_alignment(func).same_as(func)
    lowered = relax_alignment(func.with_attr(ANYWHERE, [0]))
    assert [int(param.data_alignment) for param in lowered.params] == [16, 64]
