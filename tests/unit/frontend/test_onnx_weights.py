"""Large weights outside of the message: the same numbers, wherever the model has them, and a word where it has not."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from mlc.errors import ModelError
from mlc.frontend.load import load_model
from mlc.frontend.onnx_file import check_model, read_model, whole
from mlc.frontend.onnx_weights import Model, outside, tensor_of
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import bindings, op_name

_RNG = np.random.default_rng(0)
_ARRAYS = {
    "f32": _RNG.standard_normal((256, 300), np.float32),
    "f16": _RNG.standard_normal((300, 256)).astype(np.float16),
    "i8": _RNG.integers(-128, 128, (256, 300)).astype(np.int8),
    "b": _RNG.random((256, 300)) < 0.5,
    "i64": _RNG.integers(-9, 9, (256, 300)),
    "small": np.arange(3, dtype=np.float32),
}


def _model(arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Every constant is an output, but for the first, which is added to an input."""
    first, *others = arrays
    shape = list(arrays[first].shape)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", first], ["y"]),
         *(helper.make_node("Identity", [name], [f"{name}_out"]) for name in others)], "weights",
        [helper.make_tensor_value_info("x", kinds[first], shape)],
        [helper.make_tensor_value_info("y", kinds[first], shape),
         *(helper.make_tensor_value_info(f"{n}_out", kinds[n], list(arrays[n].shape)) for n in others)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _saved(path: Path, how: str) -> Path:
    model = _model(_ARRAYS)
    if how == "beside":
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


@pytest.mark.parametrize("how", ["inside", "beside", "message"])
def test_weights_outside_are_those_of_the_model(how, tmp_path) -> None:
    model = outside(_model(_ARRAYS)) if how == "message" else read_model(_saved(tmp_path / "m.onnx", how))
    assert set(model.weights) == set(_ARRAYS) - {"small"}
    assert model.proto.ByteSize() < 2000
    check_model(model, "m")
    for name, weight in model.weights.items():
        array = weight.array()
        assert array.dtype == _ARRAYS[name].dtype and array.ctypes.data % 64 == 0
        np.testing.assert_array_equal(array, _ARRAYS[name])
        assert weight.array() is array  # read once
    message = whole(model)
    for tensor in message.graph.initializer:
        tensor.ClearField("data_location")  # where it is said of a weight that it lies in its message
    assert message.graph == _model(_ARRAYS).graph


@pytest.mark.parametrize("how", ["inside", "beside", "message"])
def test_they_become_the_constants_of_the_module(how, tmp_path) -> None:
    source = _model(_ARRAYS) if how == "message" else _saved(tmp_path / "m.onnx", how)
    main = load_model(source).mod["main"]
    add = next(binding.value for binding in bindings(main) if isinstance(binding.value, relax.Call))
    assert op_name(add) == "relax.add"
    np.testing.assert_array_equal(array_of(add.args[1]), _ARRAYS["f32"])


def test_a_model_of_bfloat16_is_read_as_such(tmp_path) -> None:
    bits = (_RNG.standard_normal(40000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensor = TensorProto(name="w", dims=[200, 200], data_type=TensorProto.BFLOAT16, raw_data=bits.tobytes())
    model = _model({"f32": _ARRAYS["f32"]})
    model.graph.initializer.append(tensor)
    onnx.save(model, tmp_path / "m.onnx")
    array = read_model(tmp_path / "m.onnx").weights["w"].array()
    assert array.dtype.name == "bfloat16"
    np.testing.assert_array_equal(array.view(np.uint16).ravel(), bits)
    assert str(tensor_of(array).dtype) == "bfloat16"


def _longer(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data += b"1234"


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def _empty(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [0]


@pytest.mark.parametrize("damage", [_longer, _twice, _empty])
def test_what_is_not_whole_stays_in_the_message_and_is_refused(damage, tmp_path) -> None:
    model = _model({"f32": _ARRAYS["f32"]})
    damage(model)
    onnx.save(model, tmp_path / "m.onnx")
    for found in (read_model(tmp_path / "m.onnx"), outside(model)):
        assert not found.weights and whole(found) == model
    with pytest.raises(ModelError):
        load_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("part", [0.3, 0.999])
def test_a_file_that_is_cut_short_cannot_be_parsed(part, tmp_path) -> None:
    path = _saved(tmp_path / "m.onnx", "inside")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ModelError, match="cannot be parsed"):
        read_model(path)


@pytest.mark.parametrize("how", ["inside", "beside"])
def test_a_file_that_changes_meanwhile(how, tmp_path) -> None:
    path = _saved(tmp_path / "m.onnx", how)
    holds = path if how == "inside" else tmp_path / "weights.bin"
    before = read_model(path)
    holds.rename(tmp_path / "old")
    holds.write_bytes(b"another file of that name")
    np.testing.assert_array_equal(before.weights["f32"].array(), _ARRAYS["f32"])
    (tmp_path / "old").write_bytes(b"")
    with pytest.raises(ModelError, match=r"must stay as it is while its model is compiled, but became shorter"):
        before.weights["i64"].array()


@pytest.mark.parametrize("entries", [{"offset": "-1"}, {"offset": str(1 << 40)}, {"length": str(1 << 40)}])
def test_places_outside_of_the_file_are_refused(entries, tmp_path) -> None:
    path = _saved(tmp_path / "m.onnx", "beside")
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    kept = {entry.key: entry.value for entry in tensor.external_data} | entries
    tensor.ClearField("external_data")
    for key, value in kept.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="must lie beside it"):
        read_model(path)


def test_constants_are_the_memory_that_was_read(tmp_path) -> None:
    array = read_model(_saved(tmp_path / "m.onnx", "inside")).weights["f32"].array()
    assert tensor_of(array).data_ptr() == array.ctypes.data


def test_a_module_that_is_taken_is_nobody_elses(tmp_path) -> None:
    model = load_model(_saved(tmp_path / "m.onnx", "inside"))
    mod = weakref.ref(model.taken())
    assert mod() is None


def test_arrays_that_cannot_be_shared_are_copied() -> None:
    plain = np.zeros(4, np.float32)
    plain.flags.writeable = False
    strided = np.arange(64, dtype=np.float32).reshape(8, 8).T
    for array in (plain, strided, np.empty((0, 3), np.float32)):
        np.testing.assert_array_equal(tensor_of(array).numpy(), array)
    assert isinstance(outside(_model({"small": _ARRAYS["small"]})), Model)
