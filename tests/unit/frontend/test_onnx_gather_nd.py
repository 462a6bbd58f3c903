"""GatherND with free sizes against onnxruntime: indices that are data, and may count from the end."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize(("axes", "taken", "batch"), [(3, 1, 0), (3, 2, 0), (3, 3, 0), (3, 1, 1), (4, 2, 1), (3, 1, 2)])
def test_indices_may_count_from_the_end_of_a_free_axis(axes: int, taken: int, batch: int, dtype: str) -> None:
    free = ["b", "n", 5, 4][:axes]
    rows = [*free[:batch], 6, taken]
    nodes = [helper.make_node("Cast", ["i"], ["wide"], to=TensorProto.INT64),
             helper.make_node("GatherND", ["x", "wide"], ["y"], batch_dims=batch)]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, free),
                     helper.make_tensor_value_info("i", getattr(TensorProto, dtype.upper()), rows)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*rows[:-1], *free[batch + taken:]])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    exe = mlc.compile(model, log=False, shapes={"x": tuple({"b": "1..4", "n": "1..9"}.get(d, d) for d in free)})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for b, n in ((2, 7), (1, 1), (4, 9)):
        shape = [{"b": b, "n": n}.get(d, d) for d in free]
        ends = np.array(shape[batch:batch + taken])
        indices = RNG.integers(-ends, ends, [*({"b": b, "n": n}.get(d, d) for d in rows[:-1]), taken]).astype(dtype)
        x = RNG.standard_normal(shape, dtype="float32")
        (wanted,) = session.run(None, {"x": x, "i": indices})
        assert (indices < 0).any() or n == 1
        np.testing.assert_array_equal(exe(x=x, i=indices)[0], wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("first", "count"), [(0, 2), (2, 3), (4, 3), (0, 7)])
def test_rows_written_one_behind_the_other_are_put_between_the_others(first: int, count: int) -> None:
    """No kernel scatters: TVM's takes no rows whose sizes are sums of free ones."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Concat", ["a", "b"], ["x"], axis=1), helper.make_node("Concat", ["c", "d"], ["u"], axis=1),
         helper.make_node("ScatterND", ["x", "i", "u"], ["y"])], "g",
        [value("a", TensorProto.FLOAT, [7, "p"]), value("b", TensorProto.FLOAT, [7, "n"]),
         value("c", TensorProto.FLOAT, [count, "p"]), value("d", TensorProto.FLOAT, [count, "n"])],
        [value("y", TensorProto.FLOAT, [7, None])],
        [numpy_helper.from_array(np.arange(first, first + count)[:, None], "i")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    exe = mlc.compile(model, log=False, shapes={"a": (7, "1..9"), "b": (7, "1..5"), "c": (count, "1..9"),
                                                "d": (count, "1..5")})
    assert not any("scatter" in entry["name"] for entry in exe.metadata["functions"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for p, n in ((4, 1), (9, 5)):
        feeds = {"a": RNG.standard_normal((7, p), "float32"), "b": RNG.standard_normal((7, n), "float32"),
                 "c": RNG.standard_normal((count, p), "float32"), "d": RNG.standard_normal((count, n), "float32")}
        np.testing.assert_array_equal(exe(**feeds)[0], session.run(None, feeds)[0])
