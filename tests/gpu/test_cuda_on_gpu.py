"""What the emulator and the twin promise, on a real GPU. Skipped where there is none."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tvm

import mlc
from mlc.artifact.cuda import _exists
from mlc.codegen import code_generation, cuda, pipeline
from mlc.networks.inputs import random_inputs
from mlc.networks.light import light_model
from mlc.target import Target, resolve
from mlc.testing.cases import Case
from mlc.testing.cuda_cases import CASES, epilogue_case
from mlc.testing.cuda_free import FREE, FreeCase
from schedules import registry
from schedules.cuda.hopper import available
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.space import InvalidDecision, best_seed, schedule_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _exists(tvm.cuda(0)) or shutil.which("nvcc") is None, reason="needs a GPU and nvcc"),
]


@cache
def here() -> Target:
    """This machine's GPU."""
    return resolve("cuda")


def built(sch: tvm.s_tir.Schedule) -> tvm.runtime.Module:
    with code_generation(here().tvm) as single:
        function = cuda.legal_names(sch.mod["main"])
        return tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), single,
                           tir_pipeline=pipeline(single))


def error_on_gpu(case: Case, sch: tvm.s_tir.Schedule) -> float:
    module = built(sch)
    inputs, outputs = case.arrays()
    arrays = [tvm.runtime.tensor(a, tvm.cuda(0)) for a in (*inputs, *outputs)]
    module["main"](*arrays)
    tvm.cuda(0).sync()
    return case.error(inputs, [a.numpy() for a in arrays[len(inputs) :]])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_best_seed(case: Case) -> None:
    func = case.func()
    assert error_on_gpu(case, best_seed(registry.find(func, here().tvm), func, here().tvm)) <= case.rtol


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_decisions(case: Case) -> None:
    func, rng = case.func(), random.Random(case.name)
    space = registry.find(func, here().tvm)
    for _ in range(4):
        try:
            sch = schedule_with(space, func, here().tvm, {
                k.name: rng.choice(k.values) for k in space.knobs(func, here().tvm)})
        except InvalidDecision:
            continue
        assert error_on_gpu(case, sch) <= case.rtol


@pytest.mark.parametrize("case", FREE, ids=str)
def test_free_sizes(case: FreeCase) -> None:
    func = case.func()
    module = built(best_seed(registry.find(func, here().tvm), func, here().tvm))
    for values in ((1, 1), (33, 5), (130, 64), (1000, 3)):
        sizes = {name: min(value, high) for (name, (_, high, _)), value in zip(case.free.items(), values, strict=False)}
        arguments, output = case.arguments(sizes), case.output(sizes)
        given = [tvm.runtime.tensor(a, tvm.cuda(0)) if isinstance(a, np.ndarray) else a for a in (*arguments, output)]
        module["main"](*given)
        tvm.cuda(0).sync()
        wanted = case.wanted(arguments)
        assert np.abs(given[-1].numpy() - wanted).max() <= case.rtol * max(np.abs(wanted).max(), 1e-6), sizes


@pytest.mark.parametrize("what", ["cast", "gelu", "residual"])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("persistent", [0, 1])
def test_warpgroups_in_clusters_that_store_boxes(what: str, cluster: int, persistent: int) -> None:
    """More tiles than multiprocessors, the last of which the edges cut."""
    case, target = epilogue_case("cuda.wgmma", what, (1500, 2056, 520), "float16"), here().tvm
    if not available(target):
        pytest.skip("needs sm_90a")
    space, func = WarpgroupGemm(), case.func()
    decisions = {"block_m": 128, "block_n": 128, "block_k": 64, "consumers": 2, "stages": 4, "panel": 8,
                 "boxed": int(what != "residual"), "cluster": cluster, "persistent": persistent}
    for _ in range(3):  # a barrier that is missing need not show at once
        assert error_on_gpu(case, schedule_with(space, func, target, decisions)) <= case.rtol


@pytest.mark.parametrize("name", ["squeezenet", "resnet50"])
def test_model(name: str, tmp_path: Path) -> None:
    model = light_model(name)
    on_cpu = mlc.compile(model, target="native", log=False)
    mlc.compile(model, target=here(), log=False).save(tmp_path / "model.so")
    on_gpu = mlc.load(tmp_path / "model.so")
    inputs = random_inputs(on_cpu.inputs)
    for got, want in zip(on_gpu(**inputs), on_cpu(**inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
