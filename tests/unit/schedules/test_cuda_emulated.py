"""The emulator of CUDA kernels finds what is wrong with them; that they are right is in test_space_contract."""

from __future__ import annotations

import re
import shutil

import pytest

from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES
from schedules import registry
from schedules.space import best_seed, schedule_with

TARGET = resolve("cuda:sm_80").tvm
BY_NAME = {case.name: case for case in CASES}
#: of each kind one
SMOKE = ("conv3x3_groups", "conv3x3_residual", "dense_odd", "dense_then_transpose", "dense_even", "softmax_middle",
         "layer_norm", "global_pool", "vector_matrix", "sum_all", "argmax", "split")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


@pytest.mark.parametrize("name", SMOKE)
def test_blocks_stay_within_their_limits(name: str) -> None:
    func = BY_NAME[name].func()
    source = cuda_emulator.cuda_source(best_seed(registry.find(func, TARGET), func, TARGET).mod["main"], TARGET)
    for kernel in source.split('extern "C" __global__')[1:]:
        assert int(re.search(r"__launch_bounds__\((\d+)", kernel)[1]) <= 1024
        shared = re.findall(r"__shared__ alignas\(64\) float \w+\[(\d+)\]", kernel)
        assert sum(int(n) * 4 for n in shared) <= 48 * 1024


def dense() -> tuple[Case, object, str]:
    case = BY_NAME["dense_even"]
    func = case.func()
    space = registry.find(func, TARGET)
    decisions = {**next(iter(space.seeds(func, TARGET))), "split_k": 1, "block_k": 8, "block_m": 32, "block_n": 64}
    scheduled = schedule_with(space, func, TARGET, decisions).mod["main"]
    return case, scheduled, cuda_emulator.cuda_source(scheduled, TARGET)


def run_changed(monkeypatch: pytest.MonkeyPatch, source: str) -> float:
    case, scheduled, _ = dense()
    monkeypatch.setattr(cuda_emulator, "cuda_source", lambda _func, _target: source)
    inputs, outputs = case.arrays()
    cuda_emulator.run(scheduled, TARGET, inputs, outputs)
    return case.error(inputs, outputs)


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_shows(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Each thread reads what others fetched: without either barrier of the loop the sums are wrong."""
    case, _, source = dense()
    barrier = "__syncthreads();"
    before, first, second = source.split(barrier)
    assert run_changed(monkeypatch, source) <= case.rtol
    without = [before + first + barrier + second, before + barrier + first + second][which]
    assert run_changed(monkeypatch, without) > 1e-2


def test_a_barrier_that_some_threads_skip_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, source = dense()
    skipping = "if (threadIdx.x == 5) __syncwarp(); else __syncthreads();"
    with pytest.raises(RuntimeError, match="wait at a barrier that the others never reach"):
        run_changed(monkeypatch, source.replace("__syncthreads();", skipping, 1))
