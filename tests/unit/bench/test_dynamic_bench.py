"""The table of models with free sizes, and the steps that fill it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.performance import bench_dynamic
from tests.performance.bench_dynamic import Dynamic, markdown


def _row(title: str, **medians: float | None) -> dict[str, Any]:
    results = [{"engine": name.replace("_", " "), "median_ms": m, "max_rel_err": 2e-6} for name, m in medians.items()]
    return {"model": title, "machine": "CPU", "threads": 2, "results": results}


def test_each_size_is_compared_with_the_best_peer_and_with_its_own_build() -> None:
    rows = [_row("net 1x2", mlc=2.0, onnxruntime=4.0, openvino=3.0, mlc_static=1.9),
            _row("net 4x2", mlc=4.0, onnxruntime=None, openvino=3.0, mlc_static=4.4)]
    first, second, mean = markdown({row["model"]: row for row in rows}).splitlines()[2:5]
    assert first == "| net | 1x2 | **2** | 4 | 3 | 1.50 | 1.9 | 0.95 | 2e-06 |"
    assert second == "| net | 4x2 | 4 | failed | **3** | 0.75 | 4.4 | 1.10 | 2e-06 |"
    assert mean == "| geometric mean | | | | | **1.06** | | **1.02** | |"


def test_outputs_are_compared_at_all_ends_and_at_different_sizes() -> None:
    known = Dynamic(onnx.ModelProto, "1..8,3,1..512", ())
    sizes = known.compared(20)
    assert sizes[:4] == [(1, 1), (1, 512), (8, 1), (8, 512)] and len(set(sizes)) == 20
    assert all(1 <= batch <= 8 and 1 <= length <= 512 for batch, length in sizes)
    assert known.dims((2, 5)) == (2, 3, 5)
    few = Dynamic(onnx.ModelProto, "1..4,3", ()).compared(20)
    assert sorted(few) == [(1,), (2,), (3,), (4,)]


def test_inputs_of_a_decoder_have_shapes_of_their_own() -> None:
    known = bench_dynamic.MODELS["llama"]
    assert known.ranges == [(0, 1024), (1, 128)]
    assert known.dims((500, 3), "attention_mask") == (1, 503) and known.dims((500, 3), "input_ids") == (1, 3)
    assert known.dims((500, 3), "past_key_values.7.value") == (1, 4, 500, 64)
    assert known.range("input_ids") == "1,1..128" and known.range("past_key_values.0.key") == "1,4,0..1024,64"
    assert known.range("attention_mask") is None  # it follows
    assert all(past + length <= 1152 for past, length in known.sizes)


def _network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    weight = numpy_helper.from_array(rng.standard_normal((16, 8)).astype("float32"), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "net", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_steps_are_kept_and_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Dynamic(_network, "1..6,16", ((3,),))
    monkeypatch.setitem(bench_dynamic.MODELS, "net", known)
    base = ["--models", "net", "--output", str(tmp_path), "--rounds", "1"]
    assert bench_dynamic.main([*base, "--build-only"]) == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    assert list(rows) == ["net build", "net right", "net build 3"]
    assert len(rows["net right"]["errors"]) == 6 and max(rows["net right"]["errors"].values()) < 1e-6
    seen: list[str] = []
    monkeypatch.setattr(bench_dynamic._Session, "_timed", lambda self, sizes: seen.append(sizes) or _row("", mlc=1.0))
    monkeypatch.setattr(bench_dynamic._Session, "_built", lambda self, sizes: pytest.fail("built again"))
    assert bench_dynamic.main(base) == 0
    assert seen == [(3,)]


def test_wrong_outputs_end_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_dynamic.MODELS, "net", Dynamic(_network, "1..6,16", ((3,),)))
    session = bench_dynamic._Session(tmp_path, "net", "native", False, 1)
    session.step("net build")
    other = _network()
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((16, 8), "float32"), "w"))
    onnx.save(other, session._path)
    with pytest.raises(ValueError, match=r"net at \(1,\) must be within"):
        session.step("net right")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detector", "resnet50", "bert_2_layers", "llama_2_layers"])
def test_a_network_is_right_at_twenty_sizes(name: str, tmp_path: Path) -> None:
    assert bench_dynamic.main(["--models", name, "--output", str(tmp_path), "--build-only", "--no-static"]) == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    assert len(rows[f"{name} right"]["errors"]) == (8 if name == "resnet50" else 20)
