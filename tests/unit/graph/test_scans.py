"""Cumulative sums, sorts and rows of one element on GPUs: reductions and elements that any schedule there takes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, evaluate, network
from tvm import relax
from tvm.relax import op

from mlc.graph.lowering import scans
from mlc.graph.pipeline import lower
from mlc.target import resolve
from schedules.registry import find

GPU = resolve("cuda:sm_80")
#: where functions land that the spaces for GPUs find nothing in
NONE = "cuda.fallback"


def lowered(mod: tvm.IRModule) -> tvm.IRModule:
    """The module for a GPU, of functions that its spaces know."""
    made = lower(mod, GPU)
    spaces = {find(task.func, GPU.tvm).name for task in made.tasks}
    assert spaces and NONE not in spaces
    return made.module


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(("shape", "axis", "short"), [
    ((2, 24), 1, 2048), ((3, 5, 4), 1, 2048), ((2, 23), -1, 8), ((3, 16, 2), 1, 4), ((100,), 0, 4),
], ids=str)
def test_cumulative_sum(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], axis: int, short: int, exclusive: bool
) -> None:
    """Of a short row at once, of a long one in pieces."""
    monkeypatch.setattr(scans, "_SHORT", short)
    mod = lowered(network(shape, lambda b, x: op.cumsum(x, axis, exclusive=exclusive)))
    x = RNG.standard_normal(shape).astype("float32")
    before = x if exclusive else 0 * x
    np.testing.assert_allclose(evaluate(mod, x)[0], np.cumsum(x, axis) - before, rtol=1e-5, atol=1e-5)


def test_cumulative_sum_of_whole_numbers() -> None:
    """As positions are counted that are no padding."""
    mod = lowered(network((2, 9), lambda b, x: op.cumsum(x, 1, dtype="int64"), "int32"))
    x = RNG.integers(0, 2, (2, 9)).astype("int32")
    (found,) = evaluate(mod, x)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.cumsum(x, 1))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_sorts_keep_the_order_of_equals(axis: int, descending: bool) -> None:
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return relax.Tuple([b.emit(op.sort(x, axis, descending)), b.emit(op.argsort(x, axis, descending, "int64"))])

    x = RNG.integers(0, 5, (12, 10)).astype("float32")
    values, places = evaluate(lowered(network(x.shape, body)), x)
    wanted = np.argsort(-x if descending else x, axis, kind="stable")
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis))


@pytest.mark.parametrize("wanted", ["both", "values", "indices"])
def test_the_largest(wanted: str) -> None:
    """As a router of experts asks for them."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        found = b.emit(op.topk(x, 4, -1, wanted, True, "int32"))
        return relax.Tuple([b.emit(relax.TupleGetItem(found, i)) for i in (0, 1)]) if wanted == "both" else found

    x = RNG.standard_normal((6, 16)).astype("float32")
    x[2, 5] = x[2, 3] = np.nan  # the largest, as PyTorch has it
    mod = lowered(network(x.shape, body))
    places = np.argsort(-x, -1, kind="stable")[:, :4]
    places[2] = [3, 5, *places[2][:2]]
    expected = {"values": np.take_along_axis(x, places, -1), "indices": places}
    found = evaluate(mod, x)
    for got, name in zip(found, ["values", "indices"] if wanted == "both" else [wanted], strict=True):
        np.testing.assert_array_equal(got, expected[name])


def test_softmax_of_rows_of_one() -> None:
    """There is nothing to reduce, which the schedule for rows cannot do together with what follows."""
    x = np.array([[1.0], [-3e38], [np.inf], [np.nan]], "float32")
    mod = lowered(network((4, 1), lambda b, v: op.nn.softmax(v, 1)))
    np.testing.assert_array_equal(evaluate(mod, x)[0], [[1], [1], [np.nan], [np.nan]])
