"""Model files that are damaged, or ask for too much: one line that says what and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.frontend.model import imported
from mlc.frontend.onnx_file import read_model
from tests.fuzz.networks import network


def _refused(model: onnx.ModelProto | Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(model)
    line = str(caught.value)
    assert "\n" not in line
    return line


def _copy(name: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(network(name))
    return model


@pytest.mark.parametrize("suffix", ["textproto", "json", "onnxtxt"])
def test_models_as_text_are_read(suffix, tmp_path) -> None:
    path = tmp_path / f"m.{suffix}"
    onnx.save(network("dense"), path)
    assert [str(o) for o in load_model(path).outputs] == ["y: float32[4, 7]"]
    path.write_bytes(path.read_bytes()[:400])
    assert "cannot be parsed (" in _refused(path)
    path.write_bytes(b"\xff\xfe")
    assert "cannot be parsed" in _refused(path)


@pytest.mark.parametrize("word", [b"Sigmoid", b"LeakyRelu", b"w3"])
def test_names_that_are_no_utf8(word, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(network("dense").SerializeToString().replace(word, b"\xff" * len(word)))
    assert "every name must be UTF-8, but m.onnx has b'\\xff\\xff" in _refused(path)


@pytest.mark.parametrize("place", ["../../../../etc/passwd", "/etc/passwd", "nothing.bin", "", "a" * 5000])
def test_weights_in_other_places(place, tmp_path) -> None:
    model = _copy("dense")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert "must lie beside it" in _refused(tmp_path / "m.onnx")


def test_a_weight_of_more_bytes_than_its_shape_says() -> None:
    model = _copy("dense")
    model.graph.initializer[0].raw_data += b"12345678"
    assert "every weight must hold the elements that its shape and type say, but w1" in _refused(model)


@pytest.mark.parametrize("consumer", ["Size", "Cast"])
@pytest.mark.parametrize("size", [2**31, 2**62])
def test_shapes_of_huge_vectors_are_not_followed(consumer, size) -> None:
    """Shape inference would make an object of every element."""
    model = _copy("dense")
    bounds = [helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in (("from", 0), ("to", size), ("by", 1))]
    model.graph.initializer.extend(bounds)
    model.graph.node.extend([helper.make_node("Range", ["from", "to", "by"], ["long"]),
                             helper.make_node(consumer, ["long"], ["z"], **({"to": 7} if consumer == "Cast" else {}))])
    shape = [] if consumer == "Size" else ["n"]
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT64, shape))
    assert "must take at most 1 GiB, but with Range (long)" in _refused(model)


def test_constants_are_folded_within_a_bound() -> None:
    """Each fits, all together do not."""
    model = _copy("dense")
    shape = np.array([1 << 26], np.int64)  # 256 MiB of float32
    model.graph.initializer.append(numpy_helper.from_array(shape, "large"))
    for i in range(8):
        model.graph.node.append(helper.make_node("ConstantOfShape", ["large"], [f"c{i}"]))
        model.graph.output.append(helper.make_tensor_value_info(f"c{i}", TensorProto.FLOAT, [1 << 26]))
    assert "must take at most 1 GiB, but with ConstantOfShape (c4)" in _refused(model)


def test_an_unreadable_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"x")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(onnx, "load", denied)
    with pytest.raises(ModelError, match=r"must be readable, but .* is not: Permission denied"):
        read_model(path)


def test_results_of_one_name_are_refused() -> None:
    model = _copy("dense")
    model.graph.output.append(model.graph.output[0])
    assert "y" in _refused(model)


@pytest.mark.parametrize("opset", [13, 17, 22])
@pytest.mark.parametrize(("operator", "attributes"), [
    ("LeakyRelu", {"alpha": np.inf}), ("LeakyRelu", {"alpha": np.nan}), ("Elu", {"alpha": np.inf}),
    ("HardSigmoid", {"beta": -np.inf}), ("ThresholdedRelu", {"alpha": np.inf}), ("PRelu", {}),
])
def test_infinite_attributes_make_no_other_numbers(operator, attributes, opset) -> None:
    """They compile to what they say, at 0 too, which an infinity must not be multiplied with; or they are refused."""
    x = np.array([[-1, 0, 2, 3, -4, 0.5]], np.float32)
    slopes = [numpy_helper.from_array(np.full((1, 6), np.inf, np.float32), "s")] if operator == "PRelu" else []
    node = helper.make_node(operator, ["x", *(each.name for each in slopes)], ["y"], **attributes)
    ends = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 6])] for name in "xy")
    model = helper.make_model(helper.make_graph([node], "g", *ends, slopes),
                              opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if attributes and operator != "ThresholdedRelu":  # which only compares
        (named,) = attributes
        assert f"1 are not: {operator} with {named} {attributes[named]:g} (used by y); " in _refused(model)
    else:
        meant = np.zeros_like(x) if attributes else np.where(x < 0, -np.inf, x)
        np.testing.assert_array_equal(mlc.compile(model, log=False)(x)[0], meant)


def test_numbers_that_are_neither_true_nor_false_are_refused() -> None:
    """Any number but 1 keeps no axis for ONNX; TVM's importer keeps it for any but 0."""
    model = _copy("reductions")
    next(a for n in model.graph.node if n.op_type == "ReduceMax" for a in n.attribute if a.name == "keepdims").i = 2
    assert "1 are not: ReduceMax with keepdims 2 (used by b)" in _refused(model)


def test_a_result_that_is_no_tensor_is_refused_in_one_line() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.shape_of(x)))
    with pytest.raises(ModelError, match=r"every input and output must be a tensor, but .* is a ShapeType"):
        imported(builder.finalize(), "shape")


@pytest.mark.parametrize(("readers", "message"), [
    (False, "at most 20000 nodes .* but wide has 20001; split the model"),
    (True, "read by at most 2000 nodes, but x of wide is read by 2001; split the model"),
])
def test_graphs_that_would_take_hours(readers: bool, message: str) -> None:
    count = 2000 if readers else 20000
    nodes = [helper.make_node("Sigmoid", ["x"] if readers else [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    parts = [f"v{i + 1}" for i in range(count)] if readers else [f"v{count}"]
    nodes += [helper.make_node("Sum", ["x", *parts], ["y"])]
    if not readers:
        nodes[0].input[0] = "x"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "wide", ends[:1], ends[1:]),
                              opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ModelError, match=message):
        load_model(model)
