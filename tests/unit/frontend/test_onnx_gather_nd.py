"""GatherND with free sizes against onnxruntime: indices that are data, and may count from the end."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

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
