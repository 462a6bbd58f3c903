"""Whole benchmarks on small models: rows, agreement, deaths, and processes that rest while others run."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlc.bench import BenchResult, EngineResult, EngineSpec, Timing, run_bench
from mlc.bench.client import Worker, WorkerFailed
from mlc.bench.engines import Job, environment, expand
from mlc.bench.metaschedule import _drop_torn_records
from mlc.errors import UsageError
from mlc.networks.inputs import random_inputs
from mlc.networks.light import light_model
from mlc.networks.models import bert_tiny

pytestmark = pytest.mark.alone

QUICK = Timing(rounds=3, turn=0.02)


def mlp(width=64):
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((width, width), dtype=np.float32) / 8, n) for n in "ab"]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, width]) for n in "xy")
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("build", [lambda: light_model("squeezenet"), bert_tiny], ids=["squeezenet", "bert_tiny"])
def test_peers_agree_and_are_timed(build):
    result = run_bench(build(), ["openvino", "onnxruntime"], threads=2, timing=QUICK, name="it")
    assert result.reference == "onnxruntime"
    assert [r.engine for r in result.results] == ["openvino", "onnxruntime"]
    for row in result.results:
        assert not row.error and len(row.times) >= 3
        assert row.quantile_ms(0.1) <= row.quantile_ms(0.5) <= row.quantile_ms(0.9)
        assert row.max_rel_err < 1e-4
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert list(document) == ["model", "machine", "threads", "results", "speedup_over_best_peer"]
    columns = ["engine", "median_ms", "p10_ms", "p90_ms", "max_abs_err", "max_rel_err"]
    assert all(list(row) == columns for row in document["results"])
    assert document["model"] == "it" and document["threads"] == 2 and document["speedup_over_best_peer"] is None


def test_errors_are_relative_to_the_reference_that_is_given():
    inputs = {"x": np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)}
    model = mlp()
    a, b = (numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer)
    exact = np.maximum(inputs["x"] @ a, 0) @ b
    for factor, low, high in ((1.0, 0.0, 1e-6), (1.001, 0.9e-3, 1.1e-3)):
        result = run_bench(model, ["onnxruntime"], threads=1, timing=QUICK, inputs=inputs, reference=[exact * factor])
        assert result.reference == "the reference" and low < result.results[0].max_rel_err < high
    wrong = run_bench(model, ["onnxruntime"], threads=1, timing=QUICK, inputs=inputs, reference=[exact, exact])
    assert "1 outputs where the reference has 2" in wrong.results[0].error


def test_pytorch_runs_the_program_beside_the_others(tmp_path):
    import torch

    from mlc.frontend.pytorch import export_module

    class Mlp(torch.nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.from_numpy(w.copy())) for w in weights)

        def forward(self, x):
            return torch.relu(x @ self.a) @ self.b

    model = mlp()
    module = Mlp([numpy_helper.to_array(t) for t in model.graph.initializer])
    torch.export.save(export_module(module, (torch.ones(4, 64),), "mlp"), tmp_path / "mlp.pt2")
    result = run_bench(model, ["onnxruntime", "torch-eager"], threads=1, timing=QUICK, program=tmp_path / "mlp.pt2")
    assert all(not row.error and row.max_rel_err < 1e-5 for row in result.results)


def test_raw_tvm_runs_and_agrees():
    result = run_bench(mlp(), ["onnxruntime", "tvm"], threads=2, timing=QUICK)
    assert not result.results[1].error and result.results[1].max_rel_err < 1e-4


def test_torch_runs_a_module_and_onnx_engines_its_export():
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    result = run_bench(module, ["torch-eager", "onnxruntime"], threads=2, timing=QUICK,
                       example_inputs=(torch.randn(4, 32),))
    eager, ort = result.results
    assert not eager.error and not ort.error and 0 < eager.max_rel_err < 1e-4


def test_torch_without_a_module_says_so_and_the_rest_runs():
    result = run_bench(mlp(), ["torch", "onnxruntime"], threads=2, timing=QUICK)
    eager, compiled, ort = result.results
    assert "torch.nn.Module" in eager.error and "torch.nn.Module" in compiled.error
    assert not ort.error and ort.times


def test_an_engine_that_dies_leaves_its_reason_and_the_others_their_times():
    killed = []

    def kill_one(event):
        if event.kind == "round" and not killed:
            workers = [p for p in psutil.Process().children() if "mlc.bench.worker" in p.cmdline()]
            victim = max(workers, key=lambda p: p.create_time())  # the last that was started: openvino
            victim.kill()
            killed.append(victim.pid)

    result = run_bench(mlp(), ["onnxruntime", "openvino"], threads=2, timing=QUICK, on_event=kill_one)
    ort, openvino = result.results
    assert "SIGKILL" in openvino.error and openvino.quantile_ms(0.5) is None
    assert not ort.error and len(ort.times) >= 3
    assert openvino.to_json()["error"] == openvino.error


def test_no_worker_outlives_a_benchmark():
    run_bench(mlp(), ["onnxruntime"], threads=1, timing=QUICK)
    assert not [p for p in psutil.Process().children() if "mlc.bench.worker" in p.cmdline()]


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = (
        "import time\nfrom mlc.bench.client import Worker\nfrom mlc.bench.engines import environment\n"
        "worker = Worker(environment(1)); print(worker.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.0)
    parent.kill()
    parent.communicate()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_torn_metaschedule_record_is_dropped(tmp_path):
    path = tmp_path / "database_tuning_record.json"
    path.write_text('[0, [[], []]]\n[1, [[], [0.5]]]\n[2, [[], [0.')
    assert _drop_torn_records(path) == 2
    assert path.read_text() == '[0, [[], []]]\n[1, [[], [0.5]]]\n'


def test_a_compiled_module_that_is_none_fails_in_its_row(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a module")
    spec = EngineSpec("mlc", artifact=str(broken))
    result = run_bench(mlp(), [spec, "onnxruntime"], threads=2, timing=QUICK)
    assert result.results[0].error and not result.results[1].error


def test_the_callers_model_is_not_changed():
    model = mlp()
    before = model.SerializeToString(deterministic=True)
    run_bench(model, ["onnxruntime"], threads=1, timing=QUICK)
    assert model.SerializeToString(deterministic=True) == before


def test_given_inputs_are_used(tmp_path):
    path = tmp_path / "gather.onnx"
    x = helper.make_tensor_value_info("i", TensorProto.INT64, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    table = numpy_helper.from_array(np.float32([1, 2, 3]), "t")
    graph = helper.make_graph([helper.make_node("Gather", ["t", "i"], ["y"])], "lookup", [x], [y], [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    given = {"i": np.array([2, 0])}
    (row,) = run_bench(path, ["onnxruntime"], threads=1, timing=QUICK, inputs=given).results
    assert not row.error
    (row,) = run_bench(path, ["onnxruntime"], threads=1, timing=QUICK).results
    assert "out of bounds" in row.error or "indices" in row.error  # random token ids do not fit this table


def test_seconds_bound_the_timed_part():
    started = time.monotonic()
    result = run_bench(mlp(), ["onnxruntime"], threads=1, timing=Timing(seconds=1.0, turn=0.05))
    assert 1.0 < time.monotonic() - started < 6.0
    assert len(result.results[0].times) > 10


@pytest.mark.parametrize("kind", ["onnxruntime", "openvino", "tvm"])
def test_idle_workers_do_not_spin(kind, tmp_path):
    model = mlp(256)
    onnx.save(model, tmp_path / "mlp.onnx")
    worker = Worker(environment(2))
    try:
        (spec,) = expand([kind])
        inputs = worker.ask("load", Job(spec, 2, onnx_path=str(tmp_path / "mlp.onnx")), timeout=60)
        worker.ask("run", random_inputs(inputs), timeout=30)
        worker.ask("time", 2, 200, 0.2, timeout=30)
        worker.settle()
        process = psutil.Process(worker.pid)
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
    finally:
        worker.close()
    assert (after.user + after.system) - (before.user + before.system) <= 0.03


def test_a_worker_that_does_not_answer_is_ended():
    worker = Worker(environment(1))
    with pytest.raises(WorkerFailed, match="no answer"):
        worker.ask("load", Job(EngineSpec("tvm"), 1), timeout=0.01)
    assert not worker.alive
    with pytest.raises(WorkerFailed):
        worker.ask("run", {}, timeout=1)


@pytest.mark.parametrize("engines", [["warp"], ["tvm", "tvm"], []])
def test_engine_names_must_exist_and_differ(engines):
    with pytest.raises(UsageError):
        run_bench(mlp(), engines, timing=QUICK)


def test_speedup_is_the_best_peer_over_ours():
    rows = (EngineResult("tuned", (2e-3,)), EngineResult("a", (5e-3,)), EngineResult("b", (3e-3,)),
            EngineResult("c", error="dead"))
    result = BenchResult("m", "cpu", 2, rows, ours=("tuned",))
    assert result.speedup_over_best_peer == pytest.approx(1.5)
    assert BenchResult("m", "cpu", 2, rows[1:], ours=("tuned",)).speedup_over_best_peer is None
