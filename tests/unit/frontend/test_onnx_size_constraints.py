"""Free dimensions that a node needs to be equal are one, or a number; else a call could read what is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import InputError, ModelError, UsageError
from mlc.frontend.load import load_model
from mlc.shapes import Linear

Shape = Sequence[int | str | None]


def _model(
    nodes: Sequence[tuple[str, str, dict[str, Any]]], inputs: Mapping[str, Shape], out: Shape,
    weights: Mapping[str, Sequence[int]] | None = None, kinds: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Nodes are ``(operator, inputs, attributes)``; the last one's result is ``z``, the others' are ``v0``, ``v1``."""
    made = [helper.make_node(op, given.split(), ["z" if i == len(nodes) - 1 else f"v{i}"], **attrs)
            for i, (op, given, attrs) in enumerate(nodes)]
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(rng.standard_normal(dims).astype("float32"), name)
                 for name, dims in (weights or {}).items()]
    values = [helper.make_tensor_value_info(name, (kinds or {}).get(name, TensorProto.FLOAT), list(dims))
              for name, dims in inputs.items()]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, list(out))
    graph = helper.make_graph(made, "graph", values, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _shapes(model: onnx.ModelProto, **shapes: str) -> dict[str, str]:
    """Of the inputs as they were imported; free dimensions by their names."""
    found = load_model(model, shapes=shapes).inputs
    return {spec.name: ",".join(str(getattr(size, "name", size)) for size in spec.shape) for spec in found}


@pytest.mark.parametrize(("operator", "inputs", "attrs", "found"), [
    ("MatMul", {"x": ["a", "b"], "y": ["c", 8]}, {}, {"x": "a,b", "y": "b,8"}),
    ("MatMul", {"x": ["a", 4, 8], "y": ["b", 8, 4]}, {}, {"x": "a,4,8", "y": "a,8,4"}),
    ("MatMul", {"x": ["a", None], "y": [None, 8]}, {}, {"x": "a,x_1", "y": "x_1,8"}),
    ("MatMul", {"x": ["a", "b"], "y": ["a", 3]}, {}, {"x": "b,b", "y": "b,3"}),
    ("MatMul", {"x": [2, "b"], "y": [3, 8]}, {}, {"x": "2,3", "y": "3,8"}),
    ("Gemm", {"x": ["a", "b"], "y": [8, "c"]}, {"transB": 1}, {"x": "a,b", "y": "8,b"}),
    ("Einsum", {"x": ["a", "b"], "y": ["c", 8]}, {"equation": "ij,jk->ik"}, {"x": "a,b", "y": "b,8"}),
    ("Einsum", {"x": [2, "a", "b"], "y": [2, "c", 8]}, {"equation": "...ij,...jk->...ik"},
     {"x": "2,a,b", "y": "2,b,8"}),
    ("Add", {"x": ["a", 4], "y": ["b", 4]}, {}, {"x": "a,4", "y": "a,4"}),
    ("Add", {"x": ["a", 4], "y": ["b", "c"]}, {}, {"x": "a,4", "y": "a,4"}),
    ("Add", {"x": ["a", "b"], "y": [1, "b"]}, {}, {"x": "a,b", "y": "1,b"}),
    ("Concat", {"x": ["a", "b"], "y": [2, "c"]}, {"axis": 0}, {"x": "a,b", "y": "2,b"}),
    ("Conv", {"x": [1, "c", 8, "w"], "y": [4, 3, 3, 3]}, {}, {"x": "1,3,8,w", "y": "4,3,3,3"}),
    ("PRelu", {"x": ["a", "c"], "y": [8]}, {}, {"x": "a,8", "y": "8"}),
])
def test_what_a_node_needs_to_be_equal_is_one_size(
    operator: str, inputs: Mapping[str, Shape], attrs: dict[str, Any], found: dict[str, str],
) -> None:
    out = ["m", "n", "o", "p"][:max(map(len, inputs.values()))]
    assert _shapes(_model([(operator, "x y", attrs)], inputs, out)) == found


def test_a_size_that_follows_from_others_takes_part() -> None:
    model = _model([("Concat", "x y", {"axis": 0}), ("Add", "v0 m", {})],
                   {"x": ["past", 4], "y": ["new", 4], "m": ["past + new", "d"], "n": ["d + new", 4]}, ["total", 4])
    assert _shapes(model) == {"x": "past,4", "y": "new,4", "m": "past + new,4", "n": "new + 4,4"}


def test_a_sum_with_a_size_replaced() -> None:
    sum_ = Linear((("a", 1), ("b", 2)), 1)
    assert str(sum_.replaced("b", Linear((("a", 1),)))) == "3*a + 1"
    assert str(sum_.replaced("c", Linear((), 5))) == str(sum_)
    assert str(Linear((("b", 2),)).replaced("b", Linear((), 3))) == "6"


def test_calls_must_agree() -> None:
    model = _model([("MatMul", "x y", {})], {"x": ["a", "b"], "y": ["c", 8]}, ["a", 8])
    exe = mlc.compile(model, log=False, shapes={"x": "1..4,1..16"})
    x, y = (np.random.default_rng(1).standard_normal(shape).astype("float32") for shape in ((3, 5), (5, 8)))
    np.testing.assert_allclose(exe(x, y)[0], x.astype("float64") @ y, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="inputs must agree on b, but it is 5 in x and 4 in y"):
        exe(x, y[:4])


@pytest.mark.parametrize(("shapes", "reason"), [
    ({"x": "2,1..3", "y": "4..5,8"}, "b is one size wherever it stands, but shapes say 1..3 and 4..5"),
    ({"x": "2,3", "y": "2..5,8"}, r"shapes\['y'\] must fit the model's \(3, 8\), got \(2..5, 8\)"),
])
def test_ranges_that_contradict_each_other_are_refused(shapes: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        load_model(_model([("MatMul", "x y", {})], {"x": ["a", "b"], "y": ["c", 8]}, ["a", 8]), shapes=shapes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("nodes", "reason"), [
    ([("Concat", "x x", {"axis": 0}), ("Add", "v0 x", {})], "must be equal for every size that is free, but are not"),
    ([("Split", "x", {"axis": 0, "num_outputs": 1}), ("MatMul", "v0 x", {})], None),
])
def test_sizes_that_follow_from_one_and_differ_are_refused(nodes: list[Any], reason: str | None) -> None:
    model = _model(nodes, {"x": ["a", "a"]}, ["o", "p"])
    if reason is None:
        assert _shapes(model) == {"x": "a,a"}
        return
    with pytest.raises(ModelError, match=reason) as error:
        load_model(model)
    assert "\n" not in str(error.value)


def test_equal_sizes_that_are_computed_in_two_ways_pass() -> None:
    pools = [("MaxPool", "x", {"kernel_shape": [2, 2], "strides": [2, 2]}),
             ("Conv", "x w", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0]}), ("Add", "v0 v1", {})]
    assert _shapes(_model(pools, {"x": [1, 2, "h", "w"]}, [1, 2, "i", "j"], {"w": [2, 2, 3, 3]})) == {"x": "1,2,h,w"}


def test_indices_may_be_fewer_than_the_data() -> None:
    places = {"i": TensorProto.INT64}
    made = _model([("GatherElements", "x i", {"axis": 1})], {"x": [8, "a"], "i": [3, "k"]}, [3, "k"], kinds=places)
    assert _shapes(made) == {"x": "8,a", "i": "3,k"}
    made = _model([("GatherElements", "x i", {"axis": 1})], {"x": ["r", 8], "i": ["s", 2]}, ["s", 2], kinds=places)
    assert _shapes(made) == {"x": "r,8", "i": "r,2"}


def _windows() -> onnx.ModelProto:
    nodes = [("Conv", "x w", {}), ("MaxPool", "v0", {"kernel_shape": [2, 2], "strides": [2, 2]}),
             ("GlobalAveragePool", "v1", {})]
    return _model(nodes, {"x": [1, 2, "h", None]}, [1, 2, 1, 1], {"w": [2, 2, 3, 3]})


def test_sizes_begin_where_every_node_has_a_result() -> None:
    (spec,) = load_model(_windows()).inputs
    assert [str(size) for size in spec.shape] == ["1", "2", "h=4..512", "x_3=4..512"]
    assert load_model(_windows(), shapes={"x": "1,2,4..9,5"}).inputs[0].shape[3] == 5


@pytest.mark.parametrize(("shape", "reason"), [
    ("1,2,3..9,8", "h must be at least 4, of which MaxPool leaves something"),
    ("1,2,8,1..9", "x_3 must be at least 3, of which Conv leaves something"),
    ("1,2,1..2,8", "Conv must leave something for every size that is free, but of h=2 it leaves 0"),
])
def test_ranges_of_which_nothing_is_left_are_refused(shape: str, reason: str) -> None:
    with pytest.raises((UsageError, ModelError), match=reason) as error:
        load_model(_windows(), shapes={"x": shape})
    assert "\n" not in str(error.value)
