"""Tables are made from results alone and go between the markers of results.md and the README."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.performance import table, written
from tests.performance.results import PAGE, inserted, publish

ROOT = Path(__file__).parents[3]


def _row(model: str, **medians: float | None) -> dict:
    results = [{"engine": engine.replace("_", "-"), "median_ms": m, "max_rel_err": None if m is None else 2e-6}
               for engine, m in medians.items()]
    return {"model": model, "machine": "CPU, 2 cores", "threads": 2, "results": results, "build_seconds": 12.3,
            "tuning_seconds": 600.0, "trials": 900}


def test_the_fastest_is_bold_and_ratios_are_to_the_best_peer() -> None:
    text = table.markdown([_row("squeezenet", mlc=4.0, mlc_untuned=6.4, onnxruntime=5.1, openvino=5.2)])
    line = text.splitlines()[2]
    assert line == "| squeezenet | 6.4 | **4** | 5.1 | 5.2 | 1.27 | 0.80 | no | 2e-06 | 2e-06 |", "two peers were timed"
    assert "geometric mean" not in text and "600 s" in text and "12 s" in text


def test_a_failed_engine_is_told() -> None:
    row = _row("vgg19", mlc=1516.4, mlc_untuned=None, onnxruntime=None, openvino=553.0, torch_compile=560.0)
    line = table.markdown([row]).splitlines()[2]
    assert line == "| vgg19 | failed | 1516 | failed | **553** | 560 | 0.36 | - | - | - | 2e-06 |"


def test_the_mean_is_geometric_and_a_regression_stands_out() -> None:
    rows = [_row("a", mlc=1.0, mlc_untuned=2.0, onnxruntime=4.0), _row("b", mlc=1.1, mlc_untuned=1.0, onnxruntime=1.1)]
    first, second, mean = table.markdown(rows).splitlines()[2:5]
    assert first.split(" | ")[-3] == "no" and second.split(" | ")[-3] == "**10%**"
    assert mean == "| geometric mean |  |  |  | **2.00** | **1.48** |  |  |  |"
    assert len({line.count("|") for line in (first, second, mean)}) == 1


@pytest.mark.parametrize(("tuned", "verdict"), [(1.0, "no"), (1.019, "no"), (1.03, "**3%**"), (None, "-")])
def test_noise_is_no_regression(tuned: float | None, verdict: str) -> None:
    assert table._regression(tuned, 1.0) == verdict


def test_models_that_are_there_are_skipped_unless_asked_for(tmp_path: Path, monkeypatch, capsys) -> None:
    measured: list[str] = []

    def measure(
        name: str, seconds: float, log: Path | None, folder: Path, rounds: int, target: str, peers: list[str]
    ) -> dict:
        measured.append(name)
        return _row(name, mlc=1.0 + len(measured), onnxruntime=2.0)

    monkeypatch.setattr(table, "measure", measure)
    base = ["--output", str(tmp_path), "--seconds", "0"]
    for words in (["--models", "vgg19,squeezenet"], ["--models", "squeezenet,resnet50"]):
        assert table.main([*base, *words]) == 0
    assert measured == ["vgg19", "squeezenet", "resnet50"]
    table.main([*base, "--models", "vgg19", "--again"])
    assert measured[3:] == ["vgg19"]
    rows = json.loads((tmp_path / "results.json").read_text())
    stored = {row["model"]: row["results"][0]["median_ms"] for row in rows}
    assert stored == {"vgg19": 5.0, "squeezenet": 3.0, "resnet50": 4.0}
    names = [line.split(" | ")[0] for line in (tmp_path / "table.md").read_text().splitlines()[2:6]]
    assert names == ["| resnet50", "| squeezenet", "| vgg19", "| geometric mean"], "in the order of the benchmark"


SECTIONS = ("models", "models-avx2", "quantised", "quantised-vnni", "quantised-avx-vnni", "quantised-amx", "sixteen",
            "decoder", "unseen", "unseen-avx2", "tuner", "ablation", "written", "dynamic", "dynamic-integers",
            "substitutions", "torch",
            "decoder-llama", "decoder-gpt2", "recurrent")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_replaces_what_is_between_its_markers(section: str, tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE.read_text(encoding="utf-8"))
    publish(section, "A\n", page)
    once = page.read_text(encoding="utf-8")
    assert f"<!-- {section}: begin -->\nA\n<!-- {section}: end -->" in once
    assert inserted(once, section, "B\n") == inserted(PAGE.read_text(encoding="utf-8"), section, "B\n")
    assert once.count("begin -->") == len(SECTIONS)
    with pytest.raises(ValueError, match="substring not found"):
        inserted(once, "elsewhere", "B\n")


def test_what_substitutions_gain_is_told_the_greatest_first() -> None:
    rows = [_row("even", neither=2.0, substitutions=2.0, onnxruntime=3.0),
            _row("won", neither=3.0, substitutions=2.0, onnxruntime=None, openvino=1.0)]
    lines = written.markdown(rows).splitlines()
    assert lines[2] == "| won | 3 | 2 | - | 1 | 1.50 | 0.50 | 2e-06 |"
    assert lines[3] == "| even | 2 | 2 | 3 | - | 1.00 | 1.50 | 2e-06 |"
    assert "1 of 2 gain at least 5%" in lines[-1]
    failed = _row("failed", neither=1.0, substitutions=None)
    assert written._gain(failed) is None and not written._error(failed) <= written.TOLERANCE


def test_the_readme_has_what_the_table_comes_to() -> None:
    rows = [_row("a", mlc=1.0, mlc_untuned=2.0, onnxruntime=4.0, torch_compile=0.5), _row("b", mlc=None, openvino=1.1)]
    lines = table.summary(rows).splitlines()
    assert lines[2:4] == ["| a | **1** | 4 | - | 4.00 |", "| b | failed | - | **1.1** | - |"]
    assert "CPU, 2 cores, 2 threads" in lines[-1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert inserted(readme, "measured", "B\n") != readme
