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
