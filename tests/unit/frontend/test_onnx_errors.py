"""What a broken, unsupported or symbolic ONNX model is answered with: one line that names the thing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.errors import ModelError, UnsupportedOperators, UsageError
from mlc.frontend import load_model


def model_of(nodes, inputs, outputs, initializers=(), opset=17, extra_opsets=(), functions=()):
    """A model whose inputs and outputs are ``(name, shape)`` f32 tensors."""
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in pairs] for pairs in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *values, list(initializers))
    opsets = [helper.make_opsetid("", opset), *extra_opsets]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def relu_model(shape):
    return model_of([helper.make_node("Relu", ["x"], ["y"])], [("x", shape)], [("y", ["any"] * len(shape or ()))])


def refused(source, error=ModelError, **options):
    with pytest.raises(error) as caught:
        load_model(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_file_names_the_path(tmp_path):
    assert str(tmp_path / "no.onnx") in refused(tmp_path / "no.onnx")


def test_folder_is_refused(tmp_path):
    assert "folder" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_truncated_file_is_called_truncated(tmp_path, kept):
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, 64])], [("y", [1, 64])], [weights])
    path = tmp_path / "cut.onnx"
    data = model.SerializeToString()
    path.write_bytes(data[: int(len(data) * kept)])
    assert "truncated" in refused(path)


def test_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("this is not a protobuf\n" * 20)
    assert "cannot be parsed" in refused(path)


def test_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.onnx"
    path.touch()
    assert "empty" in refused(path)


def test_missing_external_weights_name_the_file(tmp_path):
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, 64])], [("y", [1, 64])], [weights])
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert load_model(path).inputs[0].shape == (1, 64)
    (tmp_path / "weights.bin").unlink()
    assert "weights.bin" in refused(path)


def test_model_that_fails_the_checker_is_refused_with_its_reason():
    model = model_of([helper.make_node("Relu", ["nowhere"], ["y"])], [("x", [1, 4])], [("y", [1, 4])])
    message = refused(model)
    assert "onnx.checker" in message and "nowhere" in message


def test_shapes_that_do_not_fit_together_are_refused():
    model = model_of([helper.make_node("MatMul", ["x", "z"], ["y"])], [("x", [2, 3]), ("z", [4, 5])], [("y", [2, 5])])
    assert "shapes of graph must fit together" in refused(model)


def test_every_unsupported_operator_is_listed_with_its_nodes():
    model = model_of(
        [
            helper.make_node("Frobnicate", ["x"], ["a"], name="first"),
            helper.make_node("Frobnicate", ["a"], ["b"], name="second"),
            helper.make_node("Tune", ["b"], ["c"], name="radio", domain="org.example"),
            helper.make_node("Det", ["c"], ["d"]),
            helper.make_node("Relu", ["d"], ["y"]),
        ],
        [("x", [2, 2])], [("y", [])], extra_opsets=[helper.make_opsetid("org.example", 1)],
    )
    with pytest.raises(UnsupportedOperators) as caught:
        load_model(model)
    operators = caught.value.operators
    assert operators["Frobnicate (unknown in opset 17)"] == ["first", "second"]
    assert operators["org.example.Tune"] == ["radio"]
    assert operators["Det"] == ["d"]  # a node without a name goes by its output's
    assert len(operators) == 3


def test_known_operator_without_converter_is_unsupported():
    model = model_of([helper.make_node("Det", ["x"], ["y"], name="det")], [("x", [3, 3])], [("y", [])])
    with pytest.raises(UnsupportedOperators) as caught:
        load_model(model)
    assert caught.value.operators == {"Det": ["det"]}


@pytest.mark.parametrize(("node", "initializers", "opset", "said"), [
    (helper.make_node("Upsample", ["x", "s"], ["y"]), {"s": np.array([1, 1, 2, 2], "float32")}, 9,
     "Upsample without scales in an attribute"),
    (helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
     {"i": np.arange(4).reshape(1, 1, 2, 2), "s": np.array([1, 1, 5, 5])}, 11, "MaxUnpool with output_shape"),
], ids=["Upsample", "MaxUnpool"])
def test_a_use_that_has_no_converter_is_called_by_name(node, initializers, opset, said):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("x", [1, 1, 2, 2]), ("y", list("abcd")))]
    graph = helper.make_graph([node], "use", ends[:1], ends[1:],
                              [numpy_helper.from_array(array, name) for name, array in initializers.items()])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])
    with pytest.raises(UnsupportedOperators) as caught:
        load_model(model)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("operator", ["GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"])
def test_a_global_pool_of_a_matrix_is_refused(operator):
    """onnxruntime refuses it, and onnx's evaluator makes one number of all."""
    node = helper.make_node(operator, ["x"], ["y"], "pool")
    text = refused(model_of([node], [("x", [3, 10])], [("y", ["a", "b"])]))
    assert operator in text and "at least one axis besides batch and channels, got 2" in text


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_transposed_convolution_with_weights_that_are_no_numbers_is_refused(value):
    """By zeros between the inputs one of infinity would make NaN of all results that do not see it."""
    weights = np.random.default_rng(0).standard_normal((2, 3, 2, 2), "float32")
    weights[1, 0, 0, 1] = value
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "wider", strides=[2, 2])
    text = refused(model_of([node], [("x", [1, 2, 4, 4])], [("y", [1, 3, 8, 8])],
                            [numpy_helper.from_array(weights, "w")]))
    assert "ConvTranspose" in text and "must be finite" in text


def test_operator_of_another_domain_is_not_taken_for_the_standard_one():
    node = helper.make_node("Relu", ["x"], ["y"], name="theirs", domain="org.example")
    model = model_of([node], [("x", [3])], [("y", [3])], extra_opsets=[helper.make_opsetid("org.example", 1)])
    with pytest.raises(UnsupportedOperators) as caught:
        load_model(model)
    assert caught.value.operators == {"org.example.Relu": ["theirs"]}


def test_symbolic_dimensions_are_free():
    imported = load_model(relu_model(["batch", 3, None, 224]))
    assert str(imported.inputs[0]) == "x: float32[1..512,3,1..512,224]"
    assert imported.outputs[0].shape == imported.inputs[0].shape


def test_unknown_rank_is_refused():
    assert "shape" in refused(relu_model(None))


def test_shapes_fix_symbolic_dimensions():
    imported = load_model(relu_model(["batch", 3, None]), shapes={"x": (2, 3, 5)})
    assert imported.inputs[0].shape == imported.outputs[0].shape == (2, 3, 5)


@pytest.mark.parametrize("shapes", [{"x": (2, 4, 5)}, {"x": (2, 3)}, {"x": (0, 3, 5)}, {"z": (1, 3, 5)}])
def test_shapes_that_do_not_fit_the_model_are_a_usage_error(shapes):
    refused(relu_model(["batch", 3, None]), UsageError, shapes=shapes)


def test_output_size_that_depends_on_the_data_is_refused():
    model = model_of([helper.make_node("ArgMax", ["x"], ["i"], axis=1, keepdims=0),
                      helper.make_node("Tile", ["x", "i"], ["y"])], [("x", [2, 2])], [("y", ["a", "b"])])
    assert "static shape" in refused(model)


def test_a_sequence_input_of_which_nothing_is_known_is_refused():
    info = helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])))
    node = helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["any"])
    model = helper.make_model(helper.make_graph([node], "graph", [info], [out]), ir_version=8)
    assert "x of graph is a sequence; give the shape of each of its tensors" in refused(model)


def test_something_else_is_a_usage_error():
    assert "got int" in refused(7, UsageError)
