"""``mlc bench --precision``: who is asked to round operands, and what the errors are relative to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.bench import EngineSpec
from mlc.bench.engines import Job, load_engine
from mlc.cli import bench
from mlc.cli.main import main
from mlc.cli.models import find_model
from mlc.graph.kernels.bfloat import has_bfloat_dot
from mlc.target import resolve

rounds = pytest.mark.skipif(not has_bfloat_dot(resolve("native")), reason="this CPU does not multiply bfloat16")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``[8, 256] x [256, 64]``, of numbers that bfloat16 has not."""
    weight = np.random.default_rng(0).standard_normal((256, 64), dtype="float32")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 64])], [numpy_helper.from_array(weight, "w")])
    path = tmp_path_factory.mktemp("model") / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@rounds
@pytest.mark.parametrize(("against", "says"), [
    ("onnxruntime,openvino", "bf16: mlc, openvino; onnxruntime: as the model has it"),
    ("openvino", "bf16: mlc, openvino; the reference: mlc without rounding"),
])
def test_the_error_of_rounding_is_seen_whoever_else_rounds(
    against: str, says: str, product: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in against.split(","):
        pytest.importorskip(engine)
    words = ["bench", str(product), "--precision", "bf16", "--against", against, "--rounds", "1"]
    assert main([*words, "--json"]) == 0
    rows = {row["engine"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert {name for name, row in rows.items() if row.get("precision") == "bf16"} == {"mlc", "openvino"}
    assert all(5e-4 < rows[name]["max_rel_err"] < 2e-2 for name in ("mlc", "openvino"))
    assert main(words) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_openvino_alone_is_asked_and_for_bfloat16_alone(product: Path, tmp_path: Path) -> None:
    def asked(engine: str, precision: str) -> str:
        args = argparse.Namespace(precision=precision, seconds=None)
        return bench._spec(engine, find_model(str(product)), args, tmp_path).precision

    assert asked("openvino", "bf16") == "bf16"
    assert not any(asked(*each) for each in (("openvino", "f32"), ("openvino", "f16"), ("onnxruntime", "bf16")))


def test_openvino_computes_what_the_file_asks_for_unless_it_is_asked(product: Path) -> None:
    pytest.importorskip("openvino")
    feeds = {"x": np.random.default_rng(1).standard_normal((8, 256), dtype="float32")}
    (weight,) = (numpy_helper.to_array(each).astype(np.float64) for each in onnx.load(product).graph.initializer)
    exact = feeds["x"] @ weight
    for precision, low, high in (("", 0.0, 1e-6), ("bf16", 5e-4, 2e-2)):
        job = Job(EngineSpec("openvino", precision=precision), 1, str(product))
        (got,) = load_engine(job).bind(feeds)()
        error = np.abs(got - exact).max() / np.abs(exact).max()
        assert low <= error < high or (precision and not has_bfloat_dot(resolve("native")))


def test_a_built_module_has_its_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = tmp_path / "built.so"
    built.touch()
    assert main(["bench", str(built), "--precision", "bf16"]) == 2
    assert "is built already, with the precision that it has; leave --precision out" in capsys.readouterr().err


def test_a_cpu_that_cannot_is_refused_in_one_line(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(product), "--precision", "bf16", "--target", "x86-64-v3", "--against", ""]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must multiply bfloat16" in line
