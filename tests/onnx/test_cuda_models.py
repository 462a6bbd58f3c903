"""Every kernel of real models built for CUDA, run by the emulator against the same function as TVM lowers it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tvm

from mlc.frontend import load_model
from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.networks.models import model_named
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cuda_twin import run
from schedules import registry
from schedules.space import best_seed

TARGET = resolve("cuda:sm_90")

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++"),
]


def array(parameter: tvm.ir.Var, rng: np.random.Generator) -> np.ndarray:
    shape, dtype = [int(n) for n in parameter.ty.shape], str(parameter.ty.dtype)
    if dtype.startswith("float"):
        return (0.5 * rng.standard_normal(shape)).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    return np.zeros(shape, dtype)  # an index that is valid for every dimension


@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "bert_base", "gpt2_tiny"])
def test_every_kernel(name: str) -> None:
    model = model_named(name)
    tasks = extract_tasks(optimise(load_model(model).mod, TARGET), TARGET)
    rng = np.random.default_rng(0)
    for task in tasks:
        space = registry.find(task.func, TARGET.tvm)
        assert space.name != "cuda.fallback", task.name
        *inputs, output = [array(p, rng) for p in task.func.params]
        (want,) = run(task.func, inputs, [output.copy()])
        got = np.full_like(output, np.nan) if output.dtype.kind == "f" else np.zeros_like(output)
        scheduled = best_seed(space, task.func, TARGET.tvm).mod["main"]
        cuda_emulator.run(scheduled, TARGET.tvm, inputs, [got])
        # sums of a few thousand products in another order: 1e-4 of the largest term
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=f"{task.name} by {space.name}")
