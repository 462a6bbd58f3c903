"""The benchmark of GPUs, with this CPU in the GPU's place: what it builds, checks and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlc.networks.models import Network
from tests.performance import bench_gpu
from tests.performance.bench_gpu import Case, cases, main, run


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
    ("convolution", (1, 4, 9, 6, 3, 2), "float16"),
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
    monkeypatch.setattr(bench_gpu, "_events", lambda _, call: shapes.append(tuple(call(0).shape)) or [1.0])
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


def test_names_differ() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


def test_models_are_known_and_take_their_batch() -> None:
    models = [case for case in cases() if case.shape is None]
    assert models and all(shape[0] == case.batch for case in models for shape in case.network().inputs.values())
