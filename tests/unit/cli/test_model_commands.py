"""compile, run, tune and bench on a small network, through the command line alone."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _convolution(path: Path, channels: int, filters: int, size: int) -> Path:
    """``(1, C, H, H) -> conv 3x3, bias, relu -> mean -> dense -> (1, 10)``, and a second output."""
    rng = np.random.default_rng(0)
    shapes = {"w": (filters, channels, 3, 3), "b": (filters,), "d": (filters, 10)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype("float32") * 0.1, n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["image", "w", "b"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["features"]), helper.make_node("Flatten", ["features"], ["f"]),
        helper.make_node("MatMul", ["f", "d"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, channels, size, size])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 10]),
         helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, filters, 1, 1])], weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return _convolution(tmp_path_factory.mktemp("model") / "small.onnx", 8, 16, 14)


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory):
    """A model whose convolution is large enough for Winograd."""
    return _convolution(tmp_path_factory.mktemp("model") / "wide.onnx", 64, 64, 28)


@pytest.fixture(scope="module")
def artifact(model_path):
    path = model_path.with_suffix(".so")
    log = model_path.with_name("empty.db")
    from mlc.log import TuningLog

    TuningLog(log).close()
    assert main(["compile", str(model_path), "--log", str(log), "-o", str(path)]) == 0
    return path


def _json(capsys, *words: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _reference(model_path, image: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    return onnxruntime.InferenceSession(model_path, providers=["CPUExecutionProvider"]).run(None, {"image": image})


def test_compile_tells_what_it_made(model_path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    document = _json(capsys, "compile", model_path, "--report", tmp_path / "report", "--threads", "1")
    assert document["ran"] is True
    assert document["threads"] == 1 and document["target"].endswith("/1")
    assert document["output"] == "small.so" and (tmp_path / "small.so").stat().st_size == document["bytes"]
    assert [i["name"] for i in document["inputs"]] == ["image"] and document["outputs"][0]["shape"] == [1, 10]
    assert document["functions"] and not any(f["tuned"] for f in document["functions"])
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(f["name"] in page for f in document["functions"])
    assert page.count("<details") == len(document["functions"]) and "T.vectorized" in page
    assert "MLC_DUMP_DIR" not in os.environ


def test_run_gives_the_models_outputs(artifact, model_path, tmp_path, capsys) -> None:
    image = np.random.default_rng(3).standard_normal((1, 8, 14, 14), dtype="float32")
    np.save(tmp_path / "image.npy", image)
    out = tmp_path / "out.npz"
    document = _json(capsys, "run", artifact, "--input", f"image={tmp_path / 'image.npy'}", "-o", out, "--repeat", "5")
    with np.load(out) as found:
        assert list(found) == ["scores", "features"]
        for name, expected in zip(found, _reference(model_path, image), strict=True):
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
        assert document["outputs"][0]["max"] == pytest.approx(float(found["scores"].max()))
    latency = document["latency"]
    assert latency["runs"] == 5 and 0 < latency["min_ms"] <= latency["median_ms"] <= latency["p90_ms"]


def test_run_takes_and_writes_bfloat16(tmp_path, capsys) -> None:
    """As numpy.save writes it: two bytes an element, whose type has no name in the file."""
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [4, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.so")]) == 0
    x = np.random.default_rng(4).standard_normal((4, 8)).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", x)
    document = _json(capsys, "run", tmp_path / "m.so", "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_array_equal(found["y"].view(ml_dtypes.bfloat16), x + x)
    assert document["outputs"][0]["max"] == float((x + x).max())
    assert _json(capsys, "run", tmp_path / "m.so")["outputs"][0]["dtype"] == "bfloat16"


def test_run_draws_missing_inputs_from_the_seed(artifact, tmp_path, capsys) -> None:
    drawn = [_json(capsys, "run", artifact, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] and drawn[0]["outputs"] != drawn[2]["outputs"]
    assert drawn[0]["inputs"][0]["source"] == "random, seed 1"
    assert main(["run", str(artifact), "--repeat", "2"]) == 0
    text = capsys.readouterr().out
    assert "1×8×14×14" in text and "latency over 2 runs: median" in text


@pytest.mark.parametrize(("name", "array", "says"), [
    ("picture", np.zeros((1, 8, 14, 14), "float32"), "must be one of image, got picture"),
    ("image", np.zeros((1, 8, 14, 15), "float32"), "15"),
    ("image", np.zeros((1, 8, 14, 14), "int64"), "int64"),
    ("image", "not an array", "what numpy.save writes"),
    ("image", None, "does not exist"),
], ids=["name", "shape", "type", "content", "missing"])
def test_run_refuses_a_wrong_input(name, array, says, artifact, tmp_path, capsys) -> None:
    path = tmp_path / "x.npy"
    if isinstance(array, np.ndarray):
        np.save(path, array)
    elif array is not None:
        path.write_text(array)
    assert main(["run", str(artifact), "--input", f"{name}={path}"]) == 1
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF and then nothing"])
def test_run_refuses_what_is_no_artifact(content, tmp_path, capsys) -> None:
    path = tmp_path / "x.so"
    if content is not None:
        path.write_bytes(content)
    assert main(["run", str(path)]) == 1
    line = capsys.readouterr().err
    assert str(path) in line and line.count("\n") == 1


@pytest.fixture(scope="module")
def twin_path(tmp_path_factory):
    """A model with two products of one row, which may become one, each read by another."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("model") / "twin.onnx"
    shapes = {"u": (64, 48), "v": (64, 48), "p": (48, 32), "q": (48, 32)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype("float32"), n) for n, s in shapes.items()]
    nodes = [helper.make_node("MatMul", list(pair), [result])
             for pair, result in ((("x", "u"), "a"), (("x", "v"), "b"), (("a", "p"), "c"), (("b", "q"), "d"))]
    graph = helper.make_graph(nodes, "twin", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
                              [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 32]) for n in "cd"], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def merging(monkeypatch) -> None:
    """The rules are one: two products of a matrix become one."""
    import mlc.graph.substitute.rules as installed
    from mlc.graph.substitute.match import Pattern
    from mlc.substitution.codec import load_rule
    from mlc.substitution.prove import certified

    def node(op: str, *inputs: str, **attributes: object) -> dict:
        return {"op": op, "inputs": list(inputs), "attributes": attributes}

    rule = certified(load_rule({
        "name": "merge-columns", "inputs": {"x": ["m", "k"], "u": ["k", "a"], "v": ["k", "b"]},
        "source": {"nodes": [node("matmul", "x", "u"), node("matmul", "x", "v")], "outputs": ["%0", "%1"]},
        "target": {"nodes": [node("concat", "u", "v", axis=1), node("matmul", "x", "%0"),
                             node("slice", "%1", axis=1, begin=0, end="a"),
                             node("slice", "%1", axis=1, begin="a", end="a+b")], "outputs": ["%2", "%3"]},
    }))
    monkeypatch.setattr(installed, "shipped_patterns", lambda _rank: (Pattern(rule),))


def test_explain_tells_of_substitutions_and_draws_them(twin_path, tmp_path, capsys, merging) -> None:
    document = _json(capsys, "compile", twin_path, "-o", tmp_path / "x.so", "--explain", tmp_path / "why")
    found = document["substitutions"]
    assert found["chosen"] == 1
    assert found["candidates"][1]["rules"] == {"merge-columns": 3}
    assert found["candidates"][1]["tasks"]["basis"] == "estimate"
    page = (tmp_path / "why" / "substitutions.html").read_text()
    assert page.count("<svg") == 2
    assert "merge-columns" in page
    assert main(["compile", str(twin_path), "-o", str(tmp_path / "x.so"), "--explain", str(tmp_path / "why")]) == 0
    assert "3 x merge-columns" in capsys.readouterr().out


def test_no_substitutions_keeps_the_models_graph(twin_path, tmp_path, capsys, merging, monkeypatch) -> None:
    words = ("compile", twin_path, "-o", tmp_path / "x.so", "--explain", tmp_path / "why")
    merged = _json(capsys, *words)["functions"]
    off = _json(capsys, *words, "--no-substitutions")
    assert off["substitutions"] is None
    assert sum(f["calls"] for f in off["functions"]) > sum(f["calls"] for f in merged)
    monkeypatch.setenv("MLC_SUBSTITUTIONS", "0")
    assert _json(capsys, *words)["functions"] == off["functions"]


def test_compile_takes_what_tune_decided_and_says_so(twin_path, tmp_path, capsys, merging) -> None:
    log = tmp_path / "own.db"
    tuned = _json(capsys, "tune", twin_path, "--trials", "8", "--log", log)["graph"]
    assert tuned["others"] == 1
    words = ("compile", twin_path, "-o", tmp_path / "x.so", "--explain", tmp_path / "why", "--log", log)
    found = _json(capsys, *words)["substitutions"]
    assert found["reason"] == "decided"
    assert bool(found["chosen"]) == tuned["substituted"]
    assert found["measured"] == {name: tuned[name] for name in ("own_seconds", "seconds")}
    assert main([*map(str, words)]) == 0
    out = capsys.readouterr().out
    assert "a tuning run has decided so" in out and "measured in turn as wholes" in out
    page = (tmp_path / "why" / "substitutions.html").read_text()
    assert "measured in turn as wholes" in page


@pytest.mark.parametrize("command", ["compile", "tune"])
def test_an_artifact_is_no_model(command, artifact, capsys) -> None:
    assert main([command, str(artifact)]) == 2
    assert "is compiled already" in capsys.readouterr().err


def test_tune_fills_the_log_and_compile_uses_it(model_path, tmp_path, capsys) -> None:
    log = tmp_path / "own.db"
    document = _json(capsys, "tune", model_path, "--trials", "6", "--log", log, "--seed", "3")
    assert document["reason"] in ("trials", "finished") and document["log"] == str(log)
    assert 0 < document["trials"] <= 6 and document["best_latency"] <= document["default_latency"]
    shown = _json(capsys, "log", "show", "--log", log)
    assert {t["key"] for t in shown["tasks"]} == {t["key"] for t in document["tasks"] if t["trials"]} != set()
    built = _json(capsys, "compile", model_path, "--log", log, "-o", tmp_path / "x.so")
    assert all(f["tuned"] for f in built["functions"] if f["key"] in {t["key"] for t in shown["tasks"]})


def test_no_winograd(wide_path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path))
    names = {}
    for words in ((), ("--no-winograd",)):
        document = _json(capsys, "compile", wide_path, "-o", tmp_path / "x.so", *words)
        names[words] = [f["name"] for f in document["functions"]]
    assert any("winograd" in name for name in names[()])
    assert not any("winograd" in name for name in names["--no-winograd",])
    assert any("conv2d" in name for name in names["--no-winograd",])
    assert main(["compile", str(wide_path), "-o", str(tmp_path / "x.so"), "--no-winograd"]) == 0
    assert "mlc tune" in (text := capsys.readouterr().out) and "--no-winograd" in text


def test_precision_says_what_it_costs(model_path, tmp_path, capsys) -> None:
    output = tmp_path / "x.so"
    exact = _json(capsys, "compile", model_path, "-o", output)
    assert exact["precision"] == "f32" and "max_rel_err" not in exact
    rounded = _json(capsys, "compile", model_path, "-o", output, "--precision", "f16")
    assert rounded["precision"] == "f16" and 0 < rounded["max_rel_err"] < 1e-2
    elsewhere = _json(capsys, "compile", model_path, "-o", output, "--precision", "bf16", "--target",
                      "llvm -mcpu=sapphirerapids")
    assert (elsewhere["max_rel_err"] is None) == (not elsewhere["ran"])
    assert main(["compile", str(model_path), "-o", str(output), "--precision", "f16"]) == 0
    text = capsys.readouterr().out
    assert "precision f16: error against f32 on random inputs" in text and "--precision f16\n" in text
    tuned = _json(capsys, "tune", model_path, "--trials", "2", "--log", tmp_path / "own.db", "--precision", "f16")
    assert tuned["precision"] == "f16" and 0 < tuned["max_rel_err"] < 1e-2
    assert main(["compile", str(model_path), "--precision", "bf16", "--target", "x86-64-v3"]) == 2
    assert "must multiply bfloat16" in capsys.readouterr().err


def test_tuning_times_the_alternatives_and_compile_takes_the_fastest(wide_path, tmp_path, capsys) -> None:
    log = tmp_path / "own.db"
    document = _json(capsys, "tune", wide_path, "--trials", "24", "--log", log)
    alternatives = [t for t in document["tasks"] if t["choice"]]
    assert len(alternatives) == 3 and len({t["choice"] for t in alternatives}) == 1
    rivals = [t for t in alternatives if t["trials"]]  # not those that cannot win
    assert rivals and all(t["best_seconds"] for t in rivals)
    built = _json(capsys, "compile", wide_path, "--log", log, "-o", tmp_path / "x.so")
    (used,) = [f for f in built["functions"] if f["key"] in {t["key"] for t in alternatives}]
    direct = alternatives[0]["choice"]
    seconds = {t["key"]: t["best_seconds"] for t in rivals}
    fastest = used["key"] == min(seconds, key=seconds.__getitem__)
    assert fastest or len(seconds) == 1 or seconds.get(direct, math.inf) * 0.97 <= min(seconds.values())
    again = _json(capsys, "compile", wide_path, "--log", log, "-o", tmp_path / "y.so")
    assert [f["key"] for f in again["functions"]] == [f["key"] for f in built["functions"]]
    assert not any("winograd" in t["name"] for t in _json(
        capsys, "tune", wide_path, "--trials", "1", "--log", log, "--no-winograd")["tasks"])


def test_tuning_for_a_gpu_that_is_not_here_needs_its_compiler(model_path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("mlc.gpu.find_gpu", lambda: None)
    monkeypatch.setenv("MLC_NVCC", "no-such-nvcc")
    assert main(["tune", str(model_path), "--target", "cuda:sm_90", "--log", str(tmp_path / "log.db")]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == (
        "mlc: error: tuning for cuda:sm_90 without a GPU needs nvcc to say what becomes of candidates, but it was not "
        "found; install the CUDA toolkit 13 or set MLC_NVCC, or tune where `nvidia-smi` lists a GPU")


def test_a_run_in_which_everything_failed_is_a_failure(model_path, tmp_path, capsys, monkeypatch) -> None:
    from mlc.measure.measurer import MeasureResult

    class Failing:
        def measure(self, requests, on_result=None):
            results = [MeasureResult(failure="build", detail="no") for _ in requests]
            for number, result in enumerate(results):
                if on_result:
                    on_result(number, result)
            return results

        def compare(self, requests, rounds):
            return self.measure(requests)

        def close(self):
            pass

    monkeypatch.setattr("mlc.measure.local_measurer", lambda target: Failing())
    assert main(["tune", str(model_path), "--trials", "4", "--log", str(tmp_path / "own.db")]) == 1
    assert "all 4 failed (4 build)" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_cannot_work_stops_early_in_one_line(model_path, tmp_path, capsys, monkeypatch) -> None:
    from mlc.log import TuningLog
    from mlc.testing.misbehaving import Refuser

    refuser = Refuser("crash", "the worker ended with SIGILL")
    monkeypatch.setattr("mlc.measure.local_measurer", lambda target: refuser)
    log = tmp_path / "own.db"
    assert main(["tune", str(model_path), "--seconds", "100", "--log", str(log)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mlc: error: some candidate must run, but all") and "crash: SIGILL" in line
    assert "--target x86-64-v3" in line and len(refuser.measured) < 10
    with TuningLog(log, readonly=True) as kept:
        assert kept.count() == len(refuser.measured)


def _report(trials: int, best: float, failed: int):
    from mlc.tuning.report import TaskReport, TuneReport

    task = TaskReport("k", "dense", 1, "cpu.gemm", trials, 1.0, math.inf, best, 5e-4, {"crash": failed}, "", "tuned")
    return TuneReport("trials", "s", trials, 1.0, trials, (task,))


@pytest.mark.parametrize(("trials", "best", "failed", "refused"), [
    (4, math.inf, 4, True), (4, math.inf, 3, True), (40, 1e-3, 40, True), (40, 1e-3, 39, False), (2, 1e-3, 2, False),
    (0, math.inf, 0, False),
])
def test_no_command_succeeds_after_nothing_worked(trials: int, best: float, failed: int, refused: bool) -> None:
    """``best`` may be known from an earlier run; a few failures after that say nothing."""
    from contextlib import nullcontext

    from mlc.cli.tune import refuse_nothing
    from mlc.errors import MeasureError

    says = rf"all {trials} failed \({failed} crash\); `mlc log show --task fused --log x.db` says why"
    with pytest.raises(MeasureError, match=says) if refused else nullcontext():
        refuse_nothing(_report(trials, best, failed), "x.db")


def test_the_demo_fails_where_nothing_works(model_path, tmp_path, capsys, monkeypatch) -> None:
    from mlc.cli import demo
    from mlc.testing.misbehaving import Refuser

    monkeypatch.setattr("mlc.measure.local_measurer", lambda target: Refuser("crash", "the worker ended with SIGILL"))
    words = ["--model", str(model_path), "--seconds", "5", "--directory", str(tmp_path), "--target", "llvm"]
    assert demo.main(words) == 1
    seen = capsys.readouterr()
    assert seen.out == "" and "crash: SIGILL" in seen.err.splitlines()[-1]
    assert "llvm/generic" in seen.err.splitlines()[-1], "the target is passed on"


def test_compile_refuses_a_module_that_dies(model_path, tmp_path, capsys, monkeypatch) -> None:
    from mlc.artifact import smoke_test

    dying = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(smoke_test.subprocesses, "command", lambda module, *arguments: [sys.executable, "-c", dying])
    assert main(["compile", str(model_path), "-o", str(tmp_path / "small.so")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "must run once here, but its process ended with SIGILL" in line and not (tmp_path / "small.so").exists()


def test_resume_goes_on_with_the_budget(model_path, tmp_path, capsys) -> None:
    log = tmp_path / "own.db"
    first = _json(capsys, "tune", model_path, "--trials", "4", "--log", log)
    capsys.readouterr()
    assert main(["tune", str(model_path), "--trials", "4", "--log", str(log), "--resume"]) == 0
    seen = capsys.readouterr()
    if first["trials"] == 4:
        assert "0 trials in" in seen.out and "4 trials spent before" in seen.err


def test_an_interrupt_keeps_the_log_and_says_how_to_go_on(model_path, tmp_path) -> None:
    log = tmp_path / "own.db"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlc.cli.main", "tune", "light:squeezenet", "--log", str(log), "--strategy", "random"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while ": trial " not in lines[-1] and process.poll() is None:
        lines.append(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, lines
    assert f"mlc tune light:squeezenet --log {log} --strategy random --resume" in out
    assert "interrupted: " in out
    from mlc.log import TuningLog

    with TuningLog(log, readonly=True) as kept:
        assert kept.count() >= 1


def test_bench_prints_the_settled_document(model_path, artifact, tmp_path, capsys) -> None:
    started = time.perf_counter()
    document = _json(capsys, "bench", artifact, "--onnx", model_path, "--against", "onnxruntime", "--rounds", "2")
    assert set(document) == {"model", "machine", "threads", "results", "speedup_over_best_peer"}
    ours, theirs = document["results"]
    assert (ours["engine"], theirs["engine"]) == ("mlc", "onnxruntime")
    for row in document["results"]:
        assert set(row) == {"engine", "median_ms", "p10_ms", "p90_ms", "max_abs_err", "max_rel_err"}
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert ours["max_rel_err"] < 1e-4
    assert document["speedup_over_best_peer"] == pytest.approx(theirs["median_ms"] / ours["median_ms"])
    assert time.perf_counter() - started < 120


def test_bench_tells_what_each_function_takes(artifact, capsys) -> None:
    document = _json(capsys, "bench", artifact, "--tasks", "--rounds", "3")
    rows = document["tasks"]
    spent = [row["calls"] * row["seconds"] for row in rows]
    assert spent == sorted(spent, reverse=True) and all(0 < s < 0.05 for s in spent)
    assert document["median_ms"] > 0 and all(row["roofline_seconds"] > 0 and row["flops"] >= 0 for row in rows)
    (conv,) = (row for row in rows if "conv2d" in row["task"])
    assert conv["flops"] == pytest.approx(2 * 16 * 8 * 9 * 14 * 14, rel=0.1) and conv["source"] in ("seed", "shipped")
    assert main(["bench", str(artifact), "--tasks"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("of roofline", "its functions together", *(row["task"] for row in rows)))


def test_bench_compiles_a_model_and_tells_of_an_engine_that_fails(model_path, tmp_path, capsys) -> None:
    document = _json(
        capsys, "bench", model_path, "--against", "mlc-untuned,torch-eager", "--rounds", "1", "--threads", "1", code=1
    )
    rows = {row["engine"]: row for row in document["results"]}
    assert document["threads"] == 1 and rows["mlc"]["median_ms"] and rows["mlc-untuned"]["median_ms"]
    assert "torch.nn.Module" in rows["torch-eager"]["error"] and rows["torch-eager"]["median_ms"] is None


def test_bench_builds_for_a_target_and_says_so(model_path, capsys) -> None:
    words = ["bench", str(model_path), "--target", "llvm", "--against", "mlc-untuned", "--rounds", "1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "mlc is built for llvm/generic/" in text and "the others run as they come" in text


def test_an_artifact_has_its_target(artifact, capsys) -> None:
    assert main(["bench", str(artifact), "--target", "x86-64-v3"]) == 2
    assert "is built already, for the target that it names" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "says"), [
    (["--against", "tensorrt"], "got 'tensorrt'"),
    (["--against", "tvm-metaschedule"], "give --seconds"),
    (["--onnx", "x.onnx"], "goes with a compiled"),
    (["--tasks", "--against", "onnxruntime"], "mlc alone"),
])
def test_bench_usage(words, says, model_path, capsys) -> None:
    assert main(["bench", str(model_path), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("untuned", "said"), [
    (2e-3, "functions together 1.00 ms, untuned 2.00 ms (2.00×)"), (math.inf, "functions together 1.00 ms\n"),
])
def test_a_run_that_did_not_time_all_untuned_compares_with_nothing(untuned: float, said: str) -> None:
    from argparse import Namespace
    from io import StringIO

    from rich.console import Console

    from mlc.cli.tune import _render
    from mlc.tuning.report import TaskReport, TuneReport

    task = TaskReport("k", "dense", 1, "cpu.gemm", 4, 1.0, untuned, 1e-3, 5e-4, {}, "", "tuned")
    out = StringIO()
    _render(Namespace(), TuneReport("interrupted", "s", 4, 1.0, 4, (task,)), {"log": "x.db", "resume": "-"},
            Console(file=out, width=200))
    assert said in out.getvalue()
