"""``--precision`` for a GPU that is not here says what it costs all the same."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.cli import precision
from mlc.cli.main import main
from mlc.cli.models import find_model


def layers(path: Path, sizes: Sequence[int], rows: int | str = 64) -> str:
    """A file of a model of products with ReLUs behind them, by its path."""
    rng, nodes, weights = np.random.default_rng(0), [], []
    for i, (depth, columns) in enumerate(pairwise(sizes)):
        weights.append(numpy_helper.from_array(rng.standard_normal((depth, columns)).astype("float32"), f"w{i}"))
        nodes += [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"p{i}"]),
                  helper.make_node("Relu", [f"p{i}"], [f"x{i + 1}"])]
    graph = helper.make_graph(
        nodes, "layers", [helper.make_tensor_value_info("x0", TensorProto.FLOAT, (rows, sizes[0]))],
        [helper.make_tensor_value_info(f"x{len(weights)}", TensorProto.FLOAT, (rows, sizes[-1]))], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


def arguments(shapes: Sequence[str] = ()) -> argparse.Namespace:
    return argparse.Namespace(precision="bf16", log=None, shapes=list(shapes), values=[], winograd=None,
                              substitutions=None, integers=None)


@pytest.fixture
def dense(tmp_path: Path) -> str:
    return layers(tmp_path / "dense.onnx", (256, 128))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compile_and_tune_say_it(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlc.gpu.find_gpu", lambda: None)
    words = [dense, "--target", "cuda:sm_80", "--log", str(tmp_path / "own.db")]
    assert main(["tune", *words, "--trials", "1", "--precision", "f16"]) == 0
    text, errors = capsys.readouterr().out, {}
    for name in ("tf32", "f16", "bf16"):
        command = ["compile", *words, "-o", str(tmp_path / "x.so"), "--json", "--precision", name]
        assert main(command) == 0
        document = json.loads(capsys.readouterr().out)
        assert not document["ran"] and document["max_rel_err_from"] == "cpu"
        errors[name] = document["max_rel_err"]
    assert min(errors.values()) > 1e-5 and max(errors["tf32"], errors["f16"]) < 2e-3
    assert 2 * errors["f16"] < errors["bf16"] < 2e-2
    assert f"error against f32 on random inputs {errors['f16']:.2g} of" in text and "as this CPU computes it" in text


def test_free_sizes_are_the_usual_ones(tmp_path: Path) -> None:
    """Functions of bfloat16 follow each other, which TVM's code for CPUs refuses of free sizes (0.27)."""
    model = find_model(layers(tmp_path / "free.onnx", (256, 256, 128), "batch"))
    document = precision.facts(arguments(["x0=1..64,256"]), model, "cuda:sm_80", None)
    assert document["max_rel_err_from"] == "cpu" and 1e-4 < document["max_rel_err"] < 2e-2


@pytest.mark.parametrize("target", ["cuda:sm_80", "llvm -mcpu=sapphirerapids"])
def test_a_figure_that_nothing_gives_is_unknown(
    dense: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another CPU, and where the GPU's graph cannot be built here: no command fails for that."""
    def fails(*_given: object) -> None:
        raise AssertionError("no schedule fits")

    monkeypatch.setattr("mlc.artifact.gpu_on_cpu.for_cpu", fails)
    args = arguments()
    document = precision.facts(args, find_model(dense), target, None)
    assert document == {"precision": "bf16", "max_rel_err": None}
    assert "unknown, since it has not run here" in precision.line(document)
    monkeypatch.setattr("mlc.compilation.Compilation.of", fails)
    assert precision.facts(args, find_model(dense), target, None, wait=False) == document
