"""Where a task's reference is computed, and which worker does which job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tvm import te

from mlc.measure.compiling_runner import CompilingRunner
from mlc.measure.pool import Job, Pool
from mlc.target import resolve


def product(size: int):
    a, b = (te.placeholder((size, size), name=name, dtype="float16") for name in "ab")
    k = te.reduce_axis((0, size), name="k")
    return te.create_prim_func([a, b, te.compute(
        (size, size), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=[k]), name="c")])


@pytest.mark.parametrize(("size", "on_gpu"), [(64, False), (2048, True)])
def test_a_large_reference_is_computed_on_the_gpu(size: int, on_gpu: bool) -> None:
    """In plain loops of one CPU thread it would take longer than a user waits."""
    target = resolve("cuda:sm_80").tvm
    module, waits, _ = CompilingRunner(1)._plain(product(size), target, {"target": str(target)})
    assert len(waits) == on_gpu
    assert (module.imports != []) == on_gpu and module.get_function("main", True) is not None


def test_the_reference_of_a_cpu_is_plain_loops() -> None:
    target = resolve("x86-64-v3").tvm
    module, waits, tensor = CompilingRunner(1)._plain(product(8), target, {"target": str(target)})
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((8, 8)).astype(np.float16) for _ in range(2))
    c = tensor(np.zeros((8, 8), np.float32))
    module.get_function("main", True)(tensor(a), tensor(b), c)
    assert waits == ()
    np.testing.assert_allclose(c.numpy(), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_a_job_that_names_a_worker_is_done_by_it(tmp_path: Path) -> None:
    pool, done = Pool(2, 1, tmp_path, "loading"), []
    try:
        pool.serve([Job({"job": "none"}, 30.0, lambda worker, _answer: done.append(pool.slot_of(worker)), slot)
                    for slot in (1, 1, 1, 0)])
    finally:
        pool.close()
    assert sorted(done) == [0, 1, 1, 1]
