"""Pricing seeds by a model that is not mlc's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.performance import outside_model


def test_fifty_products_are_priced() -> None:
    assert len(set(outside_model.SHAPES)) == 50


def test_a_missing_model_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(outside_model, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        outside_model.main([])
    assert capsys.readouterr().err.splitlines()[-1].endswith(
        "the model must be on PYTHONPATH, but it is not; install nvidia-matmul-heuristics into a folder")


@pytest.mark.skipif(find_spec("nvMatmulHeuristics") is None, reason="needs nvidia-matmul-heuristics")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_first_seeds_are_near_the_models_best(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outside_model.main(["--arch", arch, "--output", str(tmp_path / "rows.json")]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert float(last.split()[1]) <= 1.15, last


@pytest.mark.skipif(find_spec("nvMatmulHeuristics") is None, reason="needs nvidia-matmul-heuristics")
@pytest.mark.parametrize("shape", [(2048, 768, 768), (2048, 2304, 768), (2048, 3072, 768), (2048, 768, 3072)], ids=str)
def test_tiles_of_128_by_256_are_no_faster_where_they_leave_multiprocessors_idle(shape: tuple[int, int, int]) -> None:
    [row] = outside_model.rows("sm_90a", [shape])
    large = {**row["decisions"], "block_m": 128, "block_n": 256, "block_k": 64, "consumers": 2, "stages": 4}
    model = outside_model.Outside("sm_90a")
    others = [model.seconds(shape, row["space"], {**large, "cluster": cluster}) for cluster in (1, 2)]
    assert row["seconds"] <= min(others) and row["ratio"] <= 1.01, row
