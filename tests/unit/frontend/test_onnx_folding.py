"""Shape arithmetic, functions and constant branches disappear at import; what is left means the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from mlc.frontend import load_model
from mlc.networks.inputs import random_inputs


def build(nodes, inputs, outputs, constants=None, opset=17, functions=(), extra_opsets=()):
    """``inputs`` and ``outputs`` as ``name -> shape`` of f32 tensors."""
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *extra_opsets]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def operators(mod):
    return [b.value.op.name for block in mod["main"].body.blocks for b in block.bindings
            if isinstance(b.value, relax.Call)]


def run(imported, feeds):
    built = tvm.compile(imported.mod, tvm.target.Target("llvm"))
    arguments = [tvm.runtime.tensor(feeds[s.name]) for s in imported.inputs]
    result = relax.VirtualMachine(built, tvm.cpu())["main"](*arguments)
    return [r.numpy() for r in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def check_against_onnxruntime(model, shapes=None):
    imported = load_model(model, shapes=shapes)
    feeds = random_inputs(imported.inputs)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for ours, theirs, spec in zip(run(imported, feeds), expected, imported.outputs, strict=True):
        assert ours.shape == theirs.shape == spec.shape and ours.dtype == theirs.dtype == np.dtype(spec.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
    return imported


def test_reshape_argument_computed_from_shapes_is_folded():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["batch"], axis=0),
        helper.make_node("Unsqueeze", ["batch", "axes"], ["b1"]),
        helper.make_node("Concat", ["b1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["r"]),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    constants = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1])}
    model = build(nodes, {"x": ["n", 3, 4]}, {"y": ["a", "b"]}, constants)
    imported = check_against_onnxruntime(model, shapes={"x": (2, 3, 4)})
    assert operators(imported.mod) == ["relax.reshape", "relax.nn.relu"]
    assert imported.outputs[0].shape == (2, 12)


def test_expand_below_its_input_broadcasts_both_ways():
    nodes = [helper.make_node("Expand", ["x", "shape"], ["e"]), helper.make_node("Abs", ["e"], ["y"])]
    model = build(nodes, {"x": [3, 1, 4]}, {"y": ["a", "b", "c"]}, {"shape": np.array([5, 1])})
    assert check_against_onnxruntime(model).outputs[0].shape == (3, 5, 4)


def test_branch_of_a_constant_condition_is_taken():
    def branch(name, op):
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2, 3])
        return helper.make_graph([helper.make_node(op, ["x"], [f"{name}_out"])], name, [], [out])

    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Size", ["s"], ["rank"]),
        helper.make_node("Equal", ["rank", "two"], ["flat"]),
        helper.make_node("If", ["flat"], ["y"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Abs")),
    ]
    imported = check_against_onnxruntime(build(nodes, {"x": [2, 3]}, {"y": [2, 3]}, {"two": np.int64(2)}))
    assert operators(imported.mod) == ["relax.negative"]


def test_function_without_converter_is_inlined():
    model = build([helper.make_node("Celu", ["x"], ["y"], alpha=0.7)], {"x": [4, 5]}, {"y": [4, 5]})
    check_against_onnxruntime(model)


def test_standard_attention_is_inlined_and_not_taken_for_the_other_attention():
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["y"])]
    shape = [1, 2, 5, 8]
    model = build(nodes, {"q": shape, "k": shape, "v": shape}, {"y": shape}, opset=23)
    imported = load_model(model)
    feeds = random_inputs(imported.inputs)
    scores = np.einsum("bhqd,bhkd->bhqk", feeds["q"], feeds["k"]).astype(np.float64) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True)) @ feeds["v"]
    np.testing.assert_allclose(run(imported, feeds)[0], expected, rtol=1e-4, atol=1e-5)


def test_local_function_is_inlined():
    body = [helper.make_node("Mul", ["a", "b"], ["m"]), helper.make_node("Add", ["m", "a"], ["c"])]
    opset = helper.make_opsetid("", 17)
    function = helper.make_function("org.example", "MulAdd", ["a", "b"], ["c"], body, [opset])
    node = helper.make_node("MulAdd", ["x", "z"], ["y"], domain="org.example")
    model = build([node], {"x": [3, 4], "z": [3, 4]}, {"y": [3, 4]}, functions=[function],
                  extra_opsets=[helper.make_opsetid("org.example", 1)])
    assert operators(check_against_onnxruntime(model).mod) == ["relax.multiply", "relax.add"]


def test_sum_of_three_is_a_chain_of_adds():
    nodes = [helper.make_node("Sum", ["a", "b", "c"], ["y"])]
    imported = check_against_onnxruntime(build(nodes, {"a": [2, 3], "b": [3], "c": [2, 1]}, {"y": [2, 3]}))
    assert operators(imported.mod) == ["relax.add", "relax.add"]


@pytest.mark.parametrize("op", ["Max", "Min", "Mean"])
def test_variadic_operators(op):
    nodes = [helper.make_node(op, ["a", "b", "c"], ["y"])]
    check_against_onnxruntime(build(nodes, {"a": [2, 3], "b": [3], "c": [2, 1]}, {"y": [2, 3]}))


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, 0.75, 1.7])
def test_power_with_a_constant_exponent(exponent):
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Pow", ["a", "e"], ["y"])]
    imported = check_against_onnxruntime(build(nodes, {"x": [3, 7]}, {"y": [3, 7]}, {"e": np.float32(exponent)}))
    assert ("relax.power" in operators(imported.mod)) == (exponent == 1.7)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("beta", [0.75, 0.6])
def test_local_response_normalisation(size, beta):
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.3, beta=beta, bias=1.5)
    check_against_onnxruntime(build([node], {"x": [2, 7, 3, 4]}, {"y": [2, 7, 3, 4]}))


def test_local_response_normalisation_over_an_even_window():
    """onnxruntime refuses these; ONNX defines the window as c - floor((size-1)/2) .. c + ceil((size-1)/2)."""
    node = helper.make_node("LRN", ["x"], ["y"], size=4, alpha=0.3, beta=0.75, bias=1.5)
    imported = load_model(build([node], {"x": [2, 7, 3, 4]}, {"y": [2, 7, 3, 4]}))
    x = random_inputs(imported.inputs)["x"]
    sums = np.stack([np.square(x[:, max(0, c - 1) : c + 3]).sum(1) for c in range(7)], axis=1)
    np.testing.assert_allclose(run(imported, {"x": x})[0], x / (1.5 + 0.3 / 4 * sums) ** 0.75, rtol=1e-5)


def test_gather_takes_negative_indices_and_leaves_no_shape_arithmetic():
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    model = build([node], {"x": [3, 5, 2]}, {"y": ["a", "b", "c", "d"]}, {"i": np.array([[-1, 0], [4, -5]])})
    assert operators(check_against_onnxruntime(model).mod) == ["relax.take"]


def test_gather_with_a_computed_index_out_of_bounds_stays_inside():
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["y"])], "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
         helper.make_tensor_value_info("i", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    x = np.arange(4, dtype=np.float32)
    out = run(imported, {"x": x, "i": np.array([-1, 2, 10**9], dtype=np.int64)})[0]
    np.testing.assert_array_equal(out, [3, 2, 3])


def test_gather_nd_leaves_no_shape_arithmetic():
    graph = helper.make_graph(
        [helper.make_node("GatherND", ["x", "i"], ["y"])], "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5]),
         helper.make_tensor_value_info("i", TensorProto.INT64, [3, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert not {"relax.shape_of", "relax.shape_to_tensor"} & set(operators(imported.mod))
    x = np.random.default_rng(0).standard_normal((4, 5), np.float32)
    i = np.array([[0, -1], [-4, 2], [3, 4]])
    np.testing.assert_array_equal(run(imported, {"x": x, "i": i})[0], x[i[:, 0], i[:, 1]])


def test_unused_mask_of_an_old_dropout_is_ignored():
    nodes = [helper.make_node("Dropout", ["x"], ["d", "mask"], ratio=0.5), helper.make_node("Relu", ["d"], ["y"])]
    imported = check_against_onnxruntime(build(nodes, {"x": [2, 3]}, {"y": [2, 3]}, opset=9))
    assert operators(imported.mod) == ["relax.nn.relu"]


def test_weights_are_constants_even_when_listed_as_inputs():
    model = build([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 4], "w": [4, 3]}, {"y": [1, 3]},
                  {"w": np.random.default_rng(0).standard_normal((4, 3), np.float32)})
    imported = check_against_onnxruntime(model)
    assert [s.name for s in imported.inputs] == ["x"]
    assert len(imported.mod["main"].params) == 1


def test_the_callers_model_is_not_changed():
    nodes = [helper.make_node("Dropout", ["x"], ["d", "mask"]), helper.make_node("Expand", ["d", "s"], ["y"])]
    model = build(nodes, {"x": ["n", 1]}, {"y": ["n", 3]}, {"s": np.array([1, 3])})
    before = model.SerializeToString(deterministic=True)
    load_model(model, shapes={"x": (2, 1)})
    assert model.SerializeToString(deterministic=True) == before


def test_output_that_is_a_constant_or_an_input():
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Identity", ["x"], ["y"])]
    constants = {"a": np.float32([1, 2]), "b": np.float32([3, 5])}
    imported = check_against_onnxruntime(build(nodes, {"x": [2]}, {"y": [2], "c": [2]}, constants))
    assert [s.name for s in imported.outputs] == ["y", "c"]


def test_path_and_proto_import_the_same(tmp_path):
    model = build([helper.make_node("Relu", ["x"], ["y"])], {"x": [2, 3]}, {"y": [2, 3]})
    onnx.save(model, tmp_path / "tiny.onnx")
    from_path = load_model(tmp_path / "tiny.onnx")
    assert from_path.name == "tiny"
    tvm.ir.assert_structural_equal(from_path.mod, load_model(model).mod)


def test_a_function_of_constants():
    """The inliner wants the type of every input, those of constants too: rotary embeddings keep their tables there."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 4, 8), np.float32)
    tables = [numpy_helper.from_array(rng.standard_normal((1, 4, 4), np.float32), name) for name in ("cos", "sin")]
    graph = helper.make_graph(
        [helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"])], "rotary",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)], tables,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = run(load_model(model), {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("operator", "wanted"), [("Squeeze", (3, 4)), ("Unsqueeze", (1, 1, 3, 4)),
                                                  ("ReduceSum", (1, 3, 4)), ("ReduceMax", (1, 3, 4))])
def test_one_axis_without_an_axis_of_its_own(operator, wanted):
    """Which is not that there are none: a sum over all of them."""
    node = helper.make_node(operator, ["x", "a"], ["y"])
    model = build([node], {"x": (1, 3, 4)}, {"y": wanted}, {"a": np.int64(0)}, opset=18)
    x = np.random.default_rng(0).standard_normal((1, 3, 4)).astype("float32")
    (found,) = run(load_model(model), {"x": x})
    np.testing.assert_array_equal(found, x.reshape(wanted))
