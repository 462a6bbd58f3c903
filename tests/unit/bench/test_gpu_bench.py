"""The benchmark of GPUs, with this CPU in the GPU's place: what it builds, checks and writes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlc
from mlc.artifact.artifact import read
from mlc.bench import metaschedule
from mlc.codegen import cuda
from mlc.gpu import Gpu, find_gpu
from mlc.log import TuningLog
from mlc.networks.models import Network
from mlc.target import resolve
from mlc.testing.cuda_cases import product_case
from tests.performance import bench_gpu, gpu_peers
from tests.performance.bench_gpu import main, run
from tests.performance.gpu_cases import Case, cases


def test_products_are_built_checked_and_timed(tmp_path: Path) -> None:
    chosen = [Case("7x24x33-float16", "float16", (7, 24, 33)), Case("5x8x16-float32", "float32", (5, 8, 16))]
    assert run(chosen, "native", tmp_path, only_build=True) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.so")) == sorted(case.name for case in chosen)
    assert not (tmp_path / "results.json").exists()
    assert run(chosen, "native", tmp_path) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["model"] for row in rows] == [case.name for case in chosen]
    assert all(row["seconds"] > 0 and 0 < row["error_of_numbers"] < 2e-3 and "error" not in row for row in rows)


@pytest.mark.parametrize(("kind", "shape", "dtype"), [
    ("softmax", (5, 24), "float32"), ("layer_norm", (5, 24), "float32"), ("attention", (1, 2, 9, 9, 8, 1), "float16"),
    ("convolution", (1, 4, 9, 6, 3, 2), "float16"), ("few_bits", (3, 40, 64), "float16"),
])
def test_kernels_are_compared_with_the_same_in_float32(
    tmp_path: Path, kind: str, shape: tuple[int, ...], dtype: str
) -> None:
    assert run([Case(kind, dtype, shape, kind)], "native", tmp_path) == 0
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert 0 < row["error_of_numbers"] < 2e-3 and row["torch_seconds"] is None
    assert row["gigabytes" if kind in ("softmax", "layer_norm") else "tflops"] > 0


@pytest.mark.parametrize(("kind", "shape", "result"), [
    ("product", (5, 6, 7), (5, 6)), ("softmax", (5, 24), (5, 24)), ("layer_norm", (5, 24), (5, 24)),
    ("attention", (1, 2, 9, 9, 8, 1), (1, 2, 9, 8)), ("attention", (1, 2, 1, 9, 8, 0), (1, 2, 1, 8)),
    ("convolution", (1, 4, 9, 6, 3, 2), (1, 6, 5, 5)),
])
def test_the_peer_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...], result: tuple[int, ...]
) -> None:
    """With the CPU in the GPU's place, which says nothing of its times."""
    import torch

    random, shapes = torch.randn, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", lambda shape, device: random(shape))
    monkeypatch.setattr(bench_gpu, "_events", lambda _, call, cold: shapes.append(tuple(call(0).shape)) or [1.0])
    assert bench_gpu._torch(Case("peer", "float32", shape, kind)) == 1.0 and shapes == [result]


def test_models_are_rounded_and_compared_with_the_compiled_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU in the GPU's place: the compiler's tuning is left out."""
    import torch

    compiled, small = [], Network(lambda: torch.nn.Conv2d(3, 4, 3), {"image": (1, 3, 8, 8)}, ["y"])
    monkeypatch.setattr(Case, "network", lambda case, fused=False: small.batched(case.batch))
    case = Case("small-2-float16", "float16", None, "small", 2)
    assert case.precision == "f16" and Case("p", "float16", (1, 2, 3)).precision == "f32"
    assert run([case], "native", tmp_path) == 0
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert row["error_of_numbers"] < 2e-2 and row["seconds"] > 0 and row["torch_seconds"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda module, mode: compiled.append(mode) or module.float())
    monkeypatch.setattr(bench_gpu, "_events", lambda _, call: [float(sum(call(0).shape))])
    monkeypatch.setattr(torch, "float16", torch.float32)
    assert bench_gpu._compiled(case, "cpu") == 2 + 4 + 6 + 6 and compiled == ["max-autotune"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """The architectures and the source of what mlc's own compiler is given."""
    found: list[tuple[list[str], str]] = []
    own = cuda.nvcc

    def noted(source: str, archs: Sequence[str]) -> bytes:
        found.append(([*archs], source))
        return own(source, archs)

    monkeypatch.setattr(cuda, "nvcc", noted)
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_tvm_multiplies_on_tensor_cores(tmp_path: Path, compiled: list[tuple[list[str], str]]) -> None:
    """It knows them by plain architectures alone, for all of which there is code. TVM imports its intrinsics for half a
    minute."""
    path = tmp_path / "product.so"
    gpu_peers.build(Case("p", "float32", (128, 128, 128)).model(), "f16", resolve("cuda:sm_80,sm_90a"), path)
    [(archs, source)] = compiled
    assert archs == ["sm_80", "sm_90"] and "wmma" in source and path.stat().st_size > 0


def test_tvm_is_given_plain_architectures() -> None:
    target, archs = gpu_peers.plain(resolve("cuda:sm_90a,sm_80"))
    assert target.name == "cuda:sm_80" and archs == ["sm_80", "sm_90"]
    assert gpu_peers.plain(resolve("native")) == (resolve("native"), [])


def small_models(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that :class:`Case` takes for one of the benchmark's models."""
    import torch

    small = Network(lambda: torch.nn.Conv2d(3, 4, 3), {"image": (1, 3, 8, 8)}, ["y"])
    monkeypatch.setattr(Case, "network", lambda case, fused=False: small.batched(case.batch))
    return Case("small-2-float16", "float16", None, "small", 2)


def test_models_are_timed_beside_tvms_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the CPU in the GPU's place, where dlight has no part in it."""
    plain = small_models(monkeypatch)
    case = plain.beside("dlight")
    assert run([case], "native", tmp_path, only_build=True) == 0
    built = sorted(path.name for path in tmp_path.glob("*.so"))
    assert built == ["small-2-float16-dlight.tvm.so", "small-2-float16.so"]
    capsys.readouterr()
    assert run([case], "native", tmp_path) == 0
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert 0 < row["peer_error_of_numbers"] < 2e-2 and 0 < row["error_of_numbers"] < 2e-2
    assert row["clock"] == "wall" and "torch_seconds" not in row
    faster = row["dlight_seconds"] / row["seconds"]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])["gains"]
    assert said == {"models, dlight": {"geometric_mean": pytest.approx(faster), "least": faster, "cases": 1}}


def test_both_tuners_have_the_same_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MetaSchedule, which takes 20 s to start, finds nothing here: what it left alone has default schedules."""
    given: list[tuple[str, float]] = []

    def nothing(mod: Any, attributes: str, folder: Path, seconds: float) -> int:
        for name in ("workload", "tuning_record"):
            (folder / f"database_{name}.json").touch()
        given.append(("metaschedule", seconds))
        return 0

    def tuned(*_: Any, seconds: float, log: Path, **__: Any) -> None:
        given.append(("mlc", seconds))
        TuningLog(log).close()

    monkeypatch.setattr(metaschedule, "tune", nothing)
    monkeypatch.setattr(mlc, "tune", tuned)
    case = small_models(monkeypatch).beside("metaschedule", 7.0)
    assert case.name == "small-2-float16-metaschedule-7"
    assert run([case], "native", tmp_path, only_build=True) == 0 and not list(tmp_path.glob("*.so"))
    assert run([case], "native", tmp_path) == 0
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert given == [("mlc", 7.0), ("metaschedule", 7.0)]
    assert row["metaschedule_seconds"] > 0 and 0 < row["peer_error_of_numbers"] < 2e-2


@pytest.mark.skipif(find_gpu() is not None, reason="this machine has a GPU")
def test_nothing_is_tuned_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_models(monkeypatch).beside("metaschedule", 7.0)
    assert run([case], "cuda:sm_80", tmp_path) == 1
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert row["error"] == ("tuning needs a GPU that this machine's driver shows, but it shows none; leave --tune out")


def test_gains_are_geometric_means_by_kind_and_peer() -> None:
    rows = [{"kind": "product", "dtype": "float16", "shape": [1, 2, 3], "seconds": 1.0, "torch_seconds": each}
            for each in (0.5, 8.0)]
    rows += [{"kind": "product", "dtype": "float16", "shape": [1, 2, 3], "arch": "sm_80", "seconds": 2.0,
              "torch_seconds": 1.0}]
    rows += [{"shape": None, "seconds": 2.0, "dlight_seconds": 6.0, "torch_seconds": None}]
    rows += [{"shape": None, "error": "none"}]
    assert bench_gpu.gains(rows) == {
        "product float16, torch": {"geometric_mean": pytest.approx(2.0), "least": 0.5, "cases": 2},
        "product float16 sm_80, torch": {"geometric_mean": pytest.approx(0.5), "least": 0.5, "cases": 1},
        "models, dlight": {"geometric_mean": pytest.approx(3.0), "least": 3.0, "cases": 1}}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_metaschedules_candidates_are_compiled_as_mlcs_are(
    monkeypatch: pytest.MonkeyPatch, compiled: list[tuple[list[str], str]]
) -> None:
    """Here for a GPU that is not there."""
    import tvm
    from tvm.s_tir import dlight

    # intrinsics for all targets, which take a minute to import and are not used
    name = "tvm.s_tir.tensor_intrin"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))

    target = gpu_peers.plain(resolve("cuda:sm_90a"))[0].tvm
    with target:
        scheduled = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(
            tvm.IRModule({"main": product_case("p", (8, 16), (16, 8), "float32", "float32").func()}))
    [code] = metaschedule.build_cuda(scheduled, target, None).imports
    assert code.kind == "cuda" and [archs for archs, _ in compiled] == [["sm_90"]]


def test_no_case_is_begun_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [Case(f"{n}x8x16-float32", "float32", (n, 8, 16)) for n in (3, 5)]
    for left in ("1 cases are left: call again", ""):
        assert run(chosen, "native", tmp_path, seconds=0.0) == 0
        assert left in capsys.readouterr().err
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2


def test_rates_count_what_must_be_done() -> None:
    assert Case("c", "float16", (1, 4, 9, 6, 3, 2), "convolution").rates(1.0) == {
        "tflops": pytest.approx(2e-12 * 6 * 5 * 5 * 4 * 9)}
    full, causal = (Case("a", "float16", (1, 2, 8, 8, 4, c), "attention").rates(1.0)["tflops"] for c in (0, 1))
    assert full == pytest.approx(2e-12 * 2 * 2 * 8 * 8 * 4) == 2 * causal
    assert Case("p", "float16", (1, 8, 4)).rates(1.0)["gigabytes"] == pytest.approx(1e-9 * 2 * (4 + 32 + 8))
    assert "gigabytes" not in Case("p", "float16", (17, 8, 4)).rates(1.0)
    assert Case("s", "float32", (5, 24), "softmax").rates(1.0) == {"gigabytes": pytest.approx(1e-9 * 2 * 5 * 24 * 4)}


def test_wrong_numbers_and_missing_compilers_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("5x8x16-float32", "float32", (5, 8, 16))
    assert run([case], "native", tmp_path, only_build=True) == 0
    monkeypatch.setattr("tests.performance.bench_gpu._error", lambda *_: 0.5)
    assert run([case], "native", tmp_path) == 1
    [row] = json.loads((tmp_path / "results.json").read_text())
    assert "within 0.0001 of the reference, got 0.5" in row["error"] and "seconds" not in row


def test_an_unknown_target_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--build", "--match", "1x4096x4096-float32", "--target", "cuda:sm_1", "--output", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("1x4096x4096-float32: ") and "sm_1" in line


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_products_are_timed_on_warpgroups_and_beside_them_on_mma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are built where there is no GPU: code for several architectures would have the least one's kernels."""
    monkeypatch.setattr(bench_gpu, "find_gpu", lambda: None)
    assert main(["--build", "--match", "4096x4096x4096-bfloat16", "--output", str(tmp_path)]) == 0
    assert {path.stem: [f["space"] for f in read(path).variants[0].metadata["functions"]]
            for path in tmp_path.glob("*.so")} == {
        "4096x4096x4096-bfloat16": ["cuda.wgmma"], "4096x4096x4096-bfloat16-sm_80": ["cuda.mma"]}


def test_what_is_built_is_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def archs(target: str) -> set[str]:
        return {case.arch for case in bench_gpu.chosen_for(target, cases())}

    for arch, others in (("sm_90a", {"", "sm_80"}), ("sm_80", {""}), ("sm_120", {"", "sm_80"})):
        monkeypatch.setattr(bench_gpu, "find_gpu", lambda arch=arch: Gpu("a GPU", arch, 1, 1e9, 1e12, 1))
        assert bench_gpu.own_target() == "cuda" and archs("cuda") == others
    monkeypatch.setattr(bench_gpu, "find_gpu", lambda: None)
    assert bench_gpu.own_target() == "cuda:sm_90a" and archs("cuda:sm_90a") == {"", "sm_80"}
    assert archs("cuda:sm_80") == archs("native") == {""}


def test_names_differ() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


def test_models_are_known_and_take_their_batch() -> None:
    models = [case for case in cases() if case.shape is None]
    assert models and all(shape[0] == case.batch for case in models for shape in case.network().inputs.values())
