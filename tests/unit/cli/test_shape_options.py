"""--shape and --size through the command line: what is free is printed, and every mistake is one line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.cli.main import main


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((6, 16), np.float32), "w")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", n]) for name, n in (("x", 6), ("y", 16))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "product", values[:1], values[1:], [weight])
    path = tmp_path_factory.mktemp("model") / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def artifact(model_path):
    path = model_path.with_suffix(".so")
    assert main(["compile", str(model_path), "--shape", "x=2..9,6", "-o", str(path)]) == 0
    return path


def refused(capsys, code, *words):
    assert main([*map(str, words)]) == code
    *_, line = [line for line in capsys.readouterr().err.splitlines() if line.strip()]  # a busy machine has a warning
    return line


def test_compile_prints_what_is_free(model_path, tmp_path, capsys):
    assert main(["compile", str(model_path), "-o", str(tmp_path / "any.so")]) == 0
    assert "free sizes: rows=1..512 (usual: 32)" in capsys.readouterr().out


def test_run_takes_sizes_and_files(artifact, tmp_path, capsys):
    def shapes(*words):
        assert main(["run", str(artifact), "--json", *words]) == 0
        document = json.loads(capsys.readouterr().out)
        return [entry["shape"] for entry in (*document["inputs"], *document["outputs"])]

    capsys.readouterr()
    assert shapes() == [[4, 6], [4, 16]]  # the usual size
    assert shapes("--size", "rows=9") == [[9, 6], [9, 16]]
    np.save(tmp_path / "x.npy", np.zeros((3, 6), np.float32))
    assert shapes("--input", f"x={tmp_path / 'x.npy'}") == [[3, 6], [3, 16]]


def test_rooflines_are_of_the_usual_sizes(artifact, capsys):
    def known(*words):
        capsys.readouterr()
        assert main(["bench", str(artifact), "--tasks", "--rounds", "2", "--json", *words]) == 0
        rows = json.loads(capsys.readouterr().out)["tasks"]
        return all(row["roofline_seconds"] and row["flops"] for row in rows), any(row["flops"] for row in rows)

    assert known() == known("--size", "rows=4") == (True, True)
    assert known("--size", "rows=9") == (False, False)


def test_an_input_out_of_range_is_one_line_and_exit_code_1(artifact, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((10, 6), np.float32))
    line = refused(capsys, 1, "run", artifact, "--input", f"x={tmp_path / 'x.npy'}")
    assert "input x must have a shape in [2..9,6], got [10, 6]" in line


@pytest.mark.parametrize(("word", "said"), [
    ("rows=10", "rows must be one of 2..9, got 10"), ("columns=3", "(rows), got columns"), ("rows", "NAME=N"),
])
def test_sizes_that_make_no_sense_are_usage_errors(artifact, capsys, word, said):
    assert said in refused(capsys, 2, "run", artifact, "--size", word)


@pytest.mark.parametrize(("word", "said"), [
    ("x=9..2,6", "got 9..2"), ("x=0..2,6", "got 0..2"), ("x=-1,6", "got -1..-1"), ("x=1..2,7", "(rows, 6)"),
    ("z=1,6", "inputs of product"), ("x", "NAME="),
])
def test_shapes_that_make_no_sense_are_usage_errors(model_path, tmp_path, capsys, word, said):
    assert said in refused(capsys, 2, "compile", model_path, "--shape", word, "-o", tmp_path / "none.so")
    assert not (tmp_path / "none.so").exists()


def test_tune_asks_for_sizes(model_path, tmp_path, capsys):
    line = refused(capsys, 2, "tune", model_path, "--trials", "1", "--log", tmp_path / "log.db")
    assert "rows=1..512 of product are free" in line and "--shape x=32,6" in line
