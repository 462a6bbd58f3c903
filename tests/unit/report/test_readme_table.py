"""The measured table is made from results alone and goes between the README's markers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tests" / "performance" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(model: str, **medians: float | None) -> dict:
    results = [{"engine": engine.replace("_", "-"), "median_ms": m, "max_rel_err": None if m is None else 2e-6}
               for engine, m in medians.items()]
    return {"model": model, "machine": "CPU, 2 cores", "threads": 2, "results": results, "build_seconds": 12.3,
            "tuning_seconds": 600.0, "trials": 900}


def test_the_fastest_is_bold_and_the_ratio_is_to_the_best_peer(table) -> None:
    text = table.markdown([_row("squeezenet", mlc=4.9, mlc_untuned=7.26, onnxruntime=5.1, openvino=5.2)])
    line = text.splitlines()[2]
    assert line == "| squeezenet | 12 s | 7.26 | **4.9** | 5.1 | 5.2 | 0.96 | 2e-06 |"


def test_a_failed_engine_is_told(table) -> None:
    row = _row("vgg19", mlc=1516.4, mlc_untuned=None, onnxruntime=None, openvino=553.0)
    line = table.markdown([row]).splitlines()[2]
    assert line == "| vgg19 | 12 s | failed | 1516 | failed | **553** | 2.74 | - |"


def test_it_replaces_what_is_between_the_markers_of_the_readme(table) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    once = table.inserted(readme, "A\n")
    assert table.inserted(once, "B\n") == table.inserted(readme, "B\n")
    assert f"{table.BEGIN}B\n{table.END}" in table.inserted(once, "B\n")
