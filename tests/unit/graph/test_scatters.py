"""Scattered elements on GPUs: what each element finds among the updates."""

from __future__ import annotations

import numpy as np
import pytest
from relax_evaluation import RNG, evaluate
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import lower
from mlc.target import resolve
from schedules.registry import find

GPU = resolve("cuda:sm_80")
COMBINED = {"update": lambda old, new: new, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def scattered(operator, x: np.ndarray, places: np.ndarray, updates: np.ndarray, **how) -> np.ndarray:  # type: ignore[no-untyped-def]
    """By a module that is lowered for a GPU, of functions that its spaces know."""
    builder, given = relax.BlockBuilder(), (x, places, updates)
    params = [relax.Var(f"p{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(given)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(operator(*params, **how))
        builder.emit_func_output(result)
    made = lower(builder.finalize(), GPU)
    assert "cuda.fallback" not in {find(task.func, GPU.tvm).name for task in made.tasks}
    return evaluate(made.module, *given)[0]


def elements(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.uniform(0.5, 1.5, shape).astype("float32")


@pytest.mark.parametrize("reduction", COMBINED)
@pytest.mark.parametrize(("shape", "rows", "axis"), [((6, 5), (3, 5), 0), ((2, 7, 4), (2, 5, 3), 1), ((9,), (4,), -1)])
def test_elements_along_an_axis(
    shape: tuple[int, ...], rows: tuple[int, ...], axis: int, reduction: str
) -> None:
    """Some counted from the end; fewer rows than there are, which the others do not meet."""
    x, updates = elements(shape), elements(rows)
    extent = shape[axis]
    places = np.argsort(RNG.random((*rows[:axis % len(rows)], extent, *rows[axis % len(rows) + 1:])), axis)
    places = np.take(places, range(rows[axis]), axis)
    if reduction != "update":
        places = places // 2  # several updates of one element
    signed = np.where(places % 2 == 0, places, places - extent).astype("int64")
    expected = x.copy()
    for at in np.ndindex(rows):
        to = list(at)
        to[axis] = places[at]
        expected[tuple(to)] = COMBINED[reduction](expected[tuple(to)], updates[at])
    found = scattered(op.scatter_elements, x, signed, updates, axis=axis, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("reduction", COMBINED)
@pytest.mark.parametrize(("shape", "depth"), [((5, 4), 1), ((4, 3, 6), 2), ((7,), 1), ((2, 3), 2)])
def test_tuples_of_indices(shape: tuple[int, ...], depth: int, reduction: str) -> None:
    """Rows, and single elements; of several updates the last counts."""
    x, updates = elements(shape), elements((2, 3, *shape[depth:]))
    places = np.stack([RNG.integers(-extent, extent, (2, 3)) for extent in shape[:depth]], -1)
    expected = x.copy()
    for at in np.ndindex(2, 3):
        to = tuple(places[at])
        expected[to] = COMBINED[reduction](expected[to], updates[at])
    found = scattered(op.scatter_nd, x, places, updates, reduction=reduction)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
