"""The table of what substitutions do to whole networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from mlc.networks.ablation import rnn_unrolled
from mlc.networks.writer import GraphWriter
from tests.performance import substitutions


def _row(model: str, times: dict[str, float | None], compared: bool = True, taken: int = 7) -> dict[str, Any]:
    results = [{"engine": name, "median_ms": ms, "max_rel_err": 1e-6} for name, ms in times.items()]
    return {"model": model, "compared": compared, "operators": 9, "taken": taken, "rules": {}, "reason": "prices",
            "search_seconds": 1.24, "same": "without" not in times, "machine": "CPU", "threads": 2, "results": results}


def test_what_is_gained_stands_beside_the_peers() -> None:
    lines = substitutions.markdown([
        _row("a", {"without": 6.0, "with": 4.0, "onnxruntime": 8.0, "openvino": None}),
        _row("b", {"with": 4.0, "onnxruntime": 8.0, "openvino": 2.0}, taken=9)]).splitlines()
    assert lines[2] == "| a | 9 to 7 | 1.2 | 6 | 4 | 8 | failed | 1.50 | 2.00 | 1e-06 |"
    assert lines[3] == "| b | 9 | 1.2 | same | 4 | 8 | 2 | 1, same file | 0.50 | 1e-06 |"
    assert lines[4].split("|")[1:3] == [" geometric mean ", " "] and "**1.00**" in lines[4]


def test_what_is_not_changed_is_counted_and_what_costs_is_told() -> None:
    kept = {**_row("c", {"with": 1.0}, compared=False), "results": []}
    text = substitutions.markdown([
        kept, _row("d", {"without": 5.0, "with": 5.2}, compared=False),
        _row("e", {"without": 5.0, "with": 4.0}, compared=False)])
    assert "Of 3 other models 1 keep their own graph" in text
    assert "of the others 1 gain at least 5%, and 1 lose more than 2%" in text
    assert "| c |" not in text and "| d |" in text


def test_every_network_is_listed_once() -> None:
    names = substitutions.everything()
    assert len(names) == len(set(names)) == 9 + 11 + 36  # bert_base, squeezenet and vgg19 are among the first nine


@pytest.mark.slow
def test_builds_that_differ_are_told_from_those_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = GraphWriter("one")
    models = {"one": writer.model({"x": (4, 64)}, {writer.dense("x", 64, 32): (4, 32)}), "rnn": rnn_unrolled(steps=3)}
    monkeypatch.setattr(substitutions, "network", models.__getitem__)
    for name, same in (("one", True), ("rnn", False)):
        files, said = substitutions.built(name, tmp_path, "native")
        assert said["same"] is same and (said["taken"] < said["operators"]) is not same
        assert all(file.stat().st_size for file in files.values()) and not list(tmp_path.glob("*.onnx"))
        assert json.loads((tmp_path / f"{name}.json").read_text()) == said
        assert substitutions.built(name, tmp_path, "native") == (files, said)  # what is there is not built again


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["nas_rnn", "resnext50", "inception_v3", "nasnet_a", "csrnet", "resnet3d_18"])
def test_networks_have_the_weights_of_their_papers(name: str) -> None:
    """Millions of parameters as published, batch normalisations folded."""
    published = {"nas_rnn": 4.2, "nasnet_a": 5.3, "resnext50": 25.0, "inception_v3": 23.8, "csrnet": 16.3,
                 "resnet3d_18": 33.7}
    model = substitutions.network(name)
    onnx.checker.check_model(model, full_check=True)  # whether the shapes that are declared are those that follow
    sizes = [onnx.numpy_helper.to_array(tensor).size for tensor in model.graph.initializer]
    assert sum(sizes) == pytest.approx(published[name] * 1e6, rel=0.01)
