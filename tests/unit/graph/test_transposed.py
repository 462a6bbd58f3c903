"""Transposed convolutions in blocked layouts against the reference evaluator of ONNX, with groups against onnxruntime:
the evaluator does not get them right."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from relax_evaluation import evaluate

from mlc.frontend import load_model
from mlc.graph.kernels.transposed import Axis, Phases, axes, pack_phases, phase_weight, phases_of
from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.target import resolve
from schedules import registry
from schedules.space import first_seed

CPU = resolve("native")
#: image, kernel, channels, filters, groups, and what else the node says
CASES = {
    "doubled": ((8, 8), (4, 4), 32, 48, 1, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "no overlap": ((5, 7), (2, 2), 16, 32, 1, {"strides": [2, 2]}),
    "odd result": ((7, 9), (3, 3), 32, 32, 1, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "output padding": ((7, 5), (3, 3), 16, 16, 1, {"strides": [2, 2], "pads": [1, 1, 1, 1],
                                                    "output_padding": [1, 1]}),
    "uneven pads": ((5, 6), (5, 4), 16, 40, 1, {"strides": [3, 2], "pads": [2, 0, 1, 1], "output_padding": [1, 0]}),
    "pads wider than taps": ((6, 6), (3, 3), 16, 16, 1, {"strides": [2, 2], "pads": [3, 2, 2, 3]}),
    "gaps": ((4, 5), (2, 1), 16, 16, 1, {"strides": [3, 2]}),
    "one input": ((1, 1), (4, 4), 100, 64, 1, {}),
    "stride one": ((6, 5), (3, 3), 24, 20, 1, {"pads": [1, 1, 1, 1]}),
    "single elements": ((6, 5), (1, 1), 16, 16, 1, {}),
    "few filters": ((9, 8), (4, 4), 64, 3, 1, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "groups": ((6, 7), (4, 4), 32, 64, 2, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "groups of part blocks": ((6, 7), (3, 2), 24, 30, 3, {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    "same upper": ((6, 7), (3, 3), 16, 16, 1, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "one axis": ((11,), (4,), 16, 32, 1, {"strides": [2], "pads": [1, 1]}),
}
#: what stays with the plain kernel
PLAIN = {
    "dilated": ((6, 7), (3, 3), 16, 16, 1, {"strides": [2, 2], "dilations": [2, 1]}),
    "each channel by itself": ((6, 7), (4, 4), 16, 16, 16, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
}


def _model(size, kernel, channels, filters, groups, attrs) -> onnx.ModelProto:  # type: ignore[no-untyped-def]
    """Transposed convolution with a bias, an activation, and the product with an ordinary convolution of it."""
    rng = np.random.default_rng(3)
    weights = {"w": (channels, filters // groups, *kernel), "b": (filters,), "v": (filters, filters, *(1,) * len(size))}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["t"], group=groups, **attrs),
        helper.make_node("LeakyRelu", ["t"], ["r"], alpha=0.2),
        helper.make_node("Conv", ["r", "v"], ["c"]),
        helper.make_node("Mul", ["c", "r"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, channels, *size))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arrays = [numpy_helper.from_array(rng.standard_normal(shape).astype("float32"), n) for n, shape in weights.items()]
    graph = helper.make_graph(nodes, "net", [x], [y], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_against_the_reference_evaluator(name: str) -> None:
    model = _model(*{**CASES, **PLAIN}[name])
    imported = load_model(model)
    mod = optimise(imported.mod, CPU)
    blocks = "\n".join(task.func.script() for task in extract_tasks(mod, CPU))
    assert ("conv2d_phases" in blocks) == (name in CASES)
    data = np.random.default_rng(4).standard_normal(imported.inputs[0].shape).astype("float32")
    grouped = any(a.name == "group" and a.i > 1 for a in model.graph.node[0].attribute)
    reference = onnxruntime.InferenceSession(model.SerializeToString()) if grouped else ReferenceEvaluator(model)
    (expected,) = reference.run(None, {"x": data})
    (actual,) = evaluate(mod, data)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_every_function_has_a_schedule(name: str, level: str) -> None:
    target = resolve(level)
    for task in extract_tasks(optimise(load_model(_model(*{**CASES, **PLAIN}[name])).mod, target), target):
        first_seed(registry.find(task.func, target.tvm), task.func, target.tvm)


def test_bias_and_activation_are_part_of_the_kernel() -> None:
    mod = optimise(load_model(_model(*CASES["doubled"])).mod, CPU)
    names = [task.name for task in extract_tasks(mod, CPU)]
    assert any("conv2d_transpose" in name and "leaky" in name.lower() for name in names), names


def test_every_element_of_the_kernel_is_in_one_phase() -> None:
    kernel = np.arange(1, 5 * 3 + 1, dtype="float32").reshape(1, 1, 5, 3)
    rows, columns = axes((7, 7), (5, 3), (2, 4), (1, 0, 0, 1), (0, 0))
    phases = phase_weight(kernel, rows, columns, 1)
    assert phases.shape == (2 * 4, 1, 1, 3, 1)
    np.testing.assert_array_equal(np.sort(phases[phases > 0]), np.arange(1, 16))


@pytest.mark.parametrize(("kernel", "stride", "pad", "groups", "taps"), [
    (2, 2, 0, 1, 1), (3, 2, 1, 1, 2), (4, 2, 1, 2, 2), (16, 8, 4, 2, 2), (5, 3, 1, 1, 3), (1, 3, 0, 1, 1)])
def test_phases_multiply_each_element_once(kernel: int, stride: int, pad: int, groups: int, taps: int) -> None:
    """In windows as narrow as the padding allows, and zeros in the rest of them."""
    axis = axes((9, 9), (kernel, kernel), (stride, stride), (pad,) * 4, (0, 0))[0]
    found, _ = phases_of(axis, axis, 64, 64)
    assert (found.groups, found.taps) == (groups, taps)
    assert sorted(found.elements[found.elements >= 0]) == list(range(kernel))
    ones = pack_phases(np.ones((3, 5, kernel, kernel), "float32"), 8, 4, found, found)
    assert ones.shape == (groups, groups, stride // groups, stride // groups, 8, taps, taps, 4)
    assert ones.sum() == 3 * 5 * kernel**2


def test_phases_of_few_filters_share_a_tile() -> None:
    """Whose columns would be zeros for the greater part: so fewer products, though of wider windows, are faster."""
    axis = axes((9, 9), (4, 4), (2, 2), (1,) * 4, (0, 0))[0]
    assert [phases_of(axis, axis, filters, 64)[0].groups for filters in (8, 64)] == [1, 2]
    assert Phases(axis, 1, -1, 3).padding == (1, 1)


def test_a_single_input_takes_one_tap() -> None:
    rows, columns = axes((1, 4), (4, 4), (1, 2), (0, 1, 0, 1), (0, 0))
    assert (rows.out, rows.taps, rows.padding) == (4, 1, (0, 0))
    assert columns == Axis(4, 4, 2, 1, 1, 0)
    assert (columns.out, columns.taps) == (8, 2)


def test_a_dilated_kernel_is_priced_by_its_outputs() -> None:
    """Which are none where the elements of the kernel lie side by side."""
    model = _model((6, 3), (3, 4), 16, 16, 1, {"dilations": [1, 2], "auto_pad": "SAME_UPPER"})
    imported = load_model(model)
    data = np.random.default_rng(5).standard_normal(imported.inputs[0].shape).astype("float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": data})
    (actual,) = evaluate(optimise(imported.mod, CPU), data)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
