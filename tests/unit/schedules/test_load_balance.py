"""How evenly parallel iterations divide among cores."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

from schedules.load_balance import imbalance

BATCH = tirx.Var("n", "int64")


def _scheduled(batch: object, *parallel: str) -> tirx.PrimFunc:
    """``B[n, i, j] = A[n, i, j] + 1`` with loops named ``n``, ``i`` and ``j`` of 5 and 8 iterations, some in
    parallel."""
    a = te.placeholder((batch, 5, 8), name="a")
    b = te.compute(a.shape, lambda n, i, j: a[n, i, j] + tirx.const(1.0, "float32"), name="b")
    sch = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    loops = dict(zip("nij", sch.get_loops(sch.get_sblock("b")), strict=True))
    for name in parallel:
        sch.parallel(loops[name])
    return sch.mod["main"]


@pytest.mark.parametrize(("batch", "cores", "expected"), [(1, 2, 2.0), (2, 2, 1.0), (3, 2, 4 / 3), (3, 8, 8 / 3)])
def test_the_last_core_leaves_the_others_waiting(batch: int, cores: int, expected: float) -> None:
    assert imbalance(_scheduled(batch, "n"), cores) == pytest.approx(expected)


def test_every_size_has_its_own() -> None:
    func = _scheduled(BATCH, "n")
    (param, _) = func.params
    found = imbalance(func, 2, {param.shape[0]: np.arange(1, 6)})
    assert found is not None
    np.testing.assert_allclose(found, [2, 1, 4 / 3, 1, 6 / 5])
    assert imbalance(func, 2) is None, "nothing is known of the batch"


def test_only_the_outer_of_nested_parallel_loops_shares() -> None:
    assert imbalance(_scheduled(1, "n", "i"), 4) == pytest.approx(4.0)
    assert imbalance(_scheduled(1, "i"), 4) == pytest.approx(2 * 4 / 5)
    assert imbalance(_scheduled(1), 4) is None
