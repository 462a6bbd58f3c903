"""Machine code for GPUs, made without one: what is in it, and what is said where it can't be made or run."""

from __future__ import annotations

import json
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te, tirx

import mlc
from mlc.artifact import cuda as artifact_cuda
from mlc.artifact import emit, weights
from mlc.artifact.capture import captured
from mlc.artifact.schedule import schedule_functions
from mlc.cli.main import main
from mlc.codegen import code_generation, cuda, nvrtc, pipeline, prepared
from mlc.codegen.inspection import dumped, find_nvdisasm, kernels
from mlc.compilation import Compilation
from mlc.errors import ArtifactError, BuildError
from mlc.graph.pipeline import lower
from mlc.measure.lowered import compile_hashed
from mlc.networks.light import light_model
from mlc.networks.models import bert_base
from mlc.target import resolve
from mlc.testing.cuda_cases import CASES
from mlc.testing.cuda_emulator import launches
from schedules import registry
from schedules.machine import GPUS
from schedules.space import best_seed
from tests.performance.quantised import halved

BY_NAME = {case.name: case for case in CASES}
FATBIN = bytes.fromhex("50ed55ba")  # the magic number at the head of a fat binary
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_no_gpu = pytest.mark.skipif(artifact_cuda._exists(tvm.cuda(0)), reason="this machine has a GPU")


def scheduled(name: str, target: tvm.target.Target) -> tirx.PrimFunc:
    func = BY_NAME[name].func()
    return cuda.legal_names(best_seed(registry.find(func, target), func, target).mod["main"])


@needs_nvcc
def test_several_architectures_in_one_module(tmp_path: Path) -> None:
    target = resolve("cuda:sm_80,sm_90a")
    names = ("conv3x3_residual", "dense_bias_gelu", "layer_norm", "vector_matrix", "transpose", "argmax")
    functions = {n: scheduled(n, target.tvm).with_attr("global_symbol", n) for n in names}
    with code_generation(target.tvm) as single:
        module = tvm.compile(tvm.IRModule(functions), target=single, tir_pipeline=pipeline(single))
    module.export_library(str(tmp_path / "kernels.so"))
    code = (tmp_path / "kernels.so").read_bytes()
    assert FATBIN in code
    assert code.count(b"\x7fELF") >= 3, "the library itself and machine code for two architectures"
    assert b"__global__" not in code, "an artifact holds machine code, not source"


@needs_nvcc
def test_candidates_are_compiled_as_the_build_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same source by the same command, whether a worker times a candidate or an artifact is made of it."""
    target, seen = resolve("cuda:sm_80,sm_90a"), []
    run = cuda.run_tool

    def recorded(command: Sequence[str], must: str) -> str:
        if "--fatbin" in command:
            source, output = Path(command[-1]), command.index("-o")
            seen.append((re.sub(r"\w+_kernel", "kernel", source.read_text()), command[:output]))
        return run(command, must)

    monkeypatch.setattr(cuda, "run_tool", recorded)
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x/0", (32, 40)), ("w", (40, 48))))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(result)
    mod = builder.finalize()
    exe = mlc.compile(mod, target=target, log=False)
    (task,) = lower(mod, target).tasks
    scheduled = best_seed(registry.find(task.func, target.tvm), task.func, target.tvm).mod["main"]
    compile_hashed(prepared(scheduled, target.tvm), target.tvm)
    assert [f["source"] for f in exe.metadata["functions"]] == ["seed"]
    (built, timed) = seen
    assert built == timed
    assert "-gencode" in built[1] and "arch=compute_90a,code=sm_90a" in built[1] and "--use_fast_math" not in built[1]


@needs_nvcc
@needs_no_gpu
def test_squeezenet_without_a_gpu(tmp_path: Path) -> None:
    exe = mlc.compile(light_model("squeezenet"), target="cuda:sm_90", log=False)
    spaces = {f["space"] for f in exe.metadata["functions"]}
    assert "cuda.conv" in spaces
    assert spaces <= {"cuda.gemm", "cuda.conv", "cuda.rows", "cuda.columns", "cuda.reduce", "cuda.elementwise"}
    path = tmp_path / "model.so"
    exe.save(path)
    assert FATBIN in path.read_bytes()
    with pytest.raises(ArtifactError, match=r"built for cuda \(sm_90\).*--target native"):
        mlc.load(path)
    # and in a process that has built nothing, where no stand-in for the driver is loaded
    script = "import sys, mlc, mlc.errors\ntry: mlc.load(sys.argv[1])\nexcept mlc.errors.ArtifactError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "built for cuda (sm_90)" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_large_models(name: str, arch: str) -> None:
    model = bert_base() if name == "bert_base" else light_model(name)
    exe = mlc.compile(model, target=f"cuda:{arch}", log=False)
    spaces = {f["space"] for f in exe.metadata["functions"]}
    assert spaces <= {"cuda.attention_f32", "cuda.gemm", "cuda.conv", "cuda.rows", "cuda.columns", "cuda.reduce",
                      "cuda.elementwise"}


_MOST_LAUNCHES = {"resnet50": 60, "bert_base": 100}


@pytest.mark.parametrize(("name", "precision", "arch"), [
    ("resnet50", "f32", "sm_90a"),
    *(pytest.param(name, precision, arch, marks=pytest.mark.slow)
      for name in _MOST_LAUNCHES for precision in ("f32", "f16", "bf16", "model") for arch in ("sm_80", "sm_90a")
      if (name, precision, arch) != ("resnet50", "f32", "sm_90a")),
])
def test_launches_of_large_models(name: str, precision: str, arch: str) -> None:
    """Kernels that one run starts, untuned, of a model of float32 in each precision and of a ``model`` of float16:
    elementwise operators, transposes, conversions and sums of parts have none. All of them are one CUDA graph, whose
    memory is allocated once."""
    model = bert_base() if name == "bert_base" else light_model(name)
    model, precision = (halved(model), "f32") if precision == "model" else (model, precision)
    compilation = Compilation.of(model, f"cuda:{arch}", precision=precision)
    lowered = compilation.lowered()
    functions, built, twins = schedule_functions(lowered.module, compilation.target, lambda _task: None)
    count = sum(entry.calls * len(list(launches(functions[entry.symbol]))) for entry in built)
    assert count <= _MOST_LAUNCHES[name]
    final = emit.finalise(weights.lift(functions, twins)[0], compilation.target)
    assert captured(final) == [sum(entry.calls for entry in built)]
    allocated = re.findall(r"alloc_storage", final["main_into"].script())
    assert not allocated, "the graph's memory is allocated by what is called once"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", _MOST_LAUNCHES)
def test_an_untuned_build_takes_a_minute_of_one_core(name: str, arch: str, precision: str, tmp_path: Path) -> None:
    """From the file to the artifact, compilers included, in seconds of the processor: others may use this machine."""
    model = "light:resnet50"
    if name == "bert_base":
        model = str(tmp_path / "model.onnx")
        onnx.save(bert_base(), model)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "mlc.cli.main", "compile", model, "--target", f"cuda:{arch}", "--precision",
               precision, "-o", str(tmp_path / "model.so")]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (tmp_path / "model.so").stat().st_size > 1 << 20
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 60


def test_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_NVCC", "no-such-nvcc")
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    missing = r"needs nvcc or NVRTC, but 'no-such-nvcc' was not found, .*; install .* or set MLC_NVCC, or `pip"
    with pytest.raises(BuildError, match=missing), cuda.machine_code(("sm_90",)):
        pytest.fail("the context must not be entered")


def test_nvrtc_is_taken_where_nvcc_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not nvrtc.available():
        pytest.skip("needs the packages of mlc[nvrtc]")
    monkeypatch.setenv("MLC_NVCC", "no-such-nvcc")
    target = resolve("cuda:sm_90")
    func = scheduled("mma_bf16", target.tvm)
    with code_generation(target.tvm) as single:
        built = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), single,
                            tir_pipeline=pipeline(single))
    built.export_library(str(tmp_path / "kernels.so"))
    code = (tmp_path / "kernels.so").read_bytes()
    assert code.count(b"\x7fELF") >= 2 and b"__global__" not in code
    with pytest.raises(BuildError, match=r"but NVRTC refused: .*error"):
        nvrtc.compile_source("nonsense", ("sm_90",))


def test_nvrtc_makes_one_architecture() -> None:
    with pytest.raises(BuildError, match="must be made by nvcc, but NVRTC alone is there and sm_80, sm_90a were asked"):
        nvrtc.compile_source("", ("sm_80", "sm_90a"))


def fake_nvcc(folder: Path, script: str) -> str:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_nvcc_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    complaint = "echo 'kernels.cu(3): warning: odd'; echo 'kernels.cu(7): error: expected a )' >&2; exit 2"
    monkeypatch.setenv("MLC_NVCC", fake_nvcc(tmp_path, complaint))
    with pytest.raises(BuildError) as caught:
        cuda.nvcc("nonsense", ("sm_80", "sm_90"))
    assert str(caught.value).startswith("CUDA source must compile for sm_80, sm_90, but nvcc refused: kernels.cu(7)")
    assert "\n" not in str(caught.value)


@needs_nvcc
def test_a_refusal_comes_through_tvm_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = resolve("cuda:sm_80")
    func = scheduled("add_relu", target.tvm)
    before = tvm.get_global_func("tvm_callback_cuda_compile", allow_missing=True)
    real = shutil.which("nvcc")
    # a toolkit whose compiler makes the stand-in for the driver, but no kernels
    script = f'case "$*" in *--fatbin*) echo "ptxas fatal: too old" >&2; exit 1;; *) exec {real} "$@";; esac'
    with cuda.machine_code(("sm_80",)), pytest.raises(BuildError, match="ptxas fatal: too old"):
        monkeypatch.setenv("MLC_NVCC", fake_nvcc(tmp_path, script))
        with cuda.machine_code(("sm_80",)):
            tvm.compile(tvm.IRModule({"main": func}), target=target.tvm)
    after = tvm.get_global_func("tvm_callback_cuda_compile", allow_missing=True)
    assert (before is None) == (after is None)


@needs_nvcc
@pytest.mark.parametrize(("fast", "found"), [(False, False), (True, True)])
def test_fast_arithmetic_only_when_asked(fast: bool, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: commands.append(command) or run(command, **kw))
    binary = cuda.nvcc('extern "C" __global__ void f(float* x) { x[0] = expf(x[1]); }', ("sm_90",), fast_math=fast)
    assert binary[:4] == FATBIN
    assert ("--use_fast_math" in commands[0]) == found


@needs_nvcc
def test_without_a_disassembler_kernels_have_no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.codegen.inspection.find_nvdisasm", lambda: None)
    source = 'extern "C" __global__ void __launch_bounds__(32) copy(float* x) { x[threadIdx.x] = x[threadIdx.x + 32]; }'
    (kernel,) = kernels(source, "sm_80")
    assert (kernel.name, kernel.threads, kernel.spilled_bytes) == ("copy", 32, 0)
    assert kernel.registers > 0 and not kernel.instructions


def test_architecture_specific_code_has_no_ptx() -> None:
    assert cuda._gencode(("sm_90a",)) == ["-gencode", "arch=compute_90a,code=sm_90a"]
    assert cuda._gencode(("sm_80", "sm_90"))[-1] == "arch=compute_90,code=compute_90", "PTX for what comes later"


@pytest.mark.parametrize(("arch", "version", "runs"), [
    ("sm_80", "8.0", True), ("sm_80", "9.0", True), ("sm_90", "8.9", False), ("sm_90", "12.0", True),
    ("sm_90a", "9.0", True), ("sm_90a", "10.0", False),
])
def test_which_gpu_runs_what(arch: str, version: str, runs: bool) -> None:
    assert artifact_cuda._runs_on(arch, version) is runs


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        exist = True
        compute_version = "7.5"

    monkeypatch.setattr(tvm, "cuda", lambda _index: Old())
    with pytest.raises(ArtifactError, match="built for sm_80, but this GPU is sm_75; compile with --target"):
        artifact_cuda.require_gpu(("sm_80",))


def test_names_become_identifiers_and_stay_apart() -> None:
    shape = (3,)
    names = ("gpu_0/data_0", "gpu_0.data_0", "0", "fine", "größe")
    inputs = [te.placeholder(shape, name=n) for n in names]
    func = te.create_prim_func([*inputs, te.compute(shape, lambda i: sum((x[i] for x in inputs[1:]), inputs[0][i]))])
    legal = cuda.legal_names(func)
    found = [str(p.name) for p in legal.params[:-1]]
    assert len(set(found)) == len(names)
    assert all(n.isidentifier() and n.isascii() for n in found)
    assert found[3] == "fine"
    tvm.ir.assert_structural_equal(func, legal)
    values = [np.full(shape, float(10**i), "float32") for i in range(len(names))]
    out = tvm.runtime.tensor(np.zeros(shape, "float32"))
    tvm.compile(legal, target="llvm")["main"](*map(tvm.runtime.tensor, values), out)
    np.testing.assert_allclose(out.numpy(), 11111.0)


@needs_nvcc
def test_a_report_says_what_became_of_each_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensor cores, copies ahead, and how many blocks a multiprocessor holds, in the page and as JSON."""
    half = TensorProto.FLOAT16
    values = np.random.default_rng(0).standard_normal((256, 128)).astype("float16")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", half, (128, 256))], [helper.make_tensor_value_info("y", half, (128, 128))],
        [numpy_helper.from_array(values, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "product.onnx")
    command = ["compile", str(tmp_path / "product.onnx"), "--target", "cuda:sm_80", "--json", "--report",
               str(tmp_path / "report"), "-o", str(tmp_path / "product.so")]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    (kernel,) = [kernel for kernel in found["kernels"] if kernel["shared_bytes"]]
    assert kernel["arch"] == "sm_80" and kernel["registers"] >= 32 and kernel["blocks"] >= 1
    assert kernel["spilled_bytes"] == kernel["stack_bytes"] == 0
    assert kernel["blocks"] == GPUS["80"].resident(kernel["threads"], kernel["registers"], kernel["shared_bytes"])
    if find_nvdisasm():
        assert kernel["instructions"]["HMMA"] and kernel["instructions"]["LDGSTS"] and kernel["instructions"]["LDSM"]
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Kernels" in page and f">{kernel['registers']}</td>" in page and kernel["name"] in page
    (function,) = [f for f in found["functions"] if f["symbol"] == kernel["function"]]
    assert function["bytes"] == 2 * (128 * 256 + 256 * 128 + 128 * 128)
    assert function["roofline_seconds"] >= function["bytes"] / GPUS["80"].l2_rate


#: of Hopper's kernels: what multiplies and what copies
OPCODES = {"wgmma_f16_gelu": ("HGMMA", "UTMALDG"), "mma_tf32_columns": ("HMMA", "LDGSTS"),
           "attention_f16_causal": ("HMMA", "LDGSTS"), "attention_wgmma_f16_odd": ("HGMMA", "UTMALDG"),
           "dense_even": ("FFMA", "LDG"), "layer_norm": ("FFMA", "LDG")}


@needs_nvcc
@pytest.mark.skipif(shutil.which("nvcc") is not None and find_nvdisasm() is None, reason="needs nvdisasm")
def test_every_kind_of_kernel_is_told_by_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DUMP_DIR", str(tmp_path))
    target = resolve("cuda:sm_90a")
    functions = {name: scheduled(name, target.tvm).with_attr("global_symbol", name) for name in OPCODES}
    with code_generation(target.tvm) as single:
        tvm.compile(tvm.IRModule(functions), target=single, tir_pipeline=pipeline(single))
    found = {kernel.name.partition("_kernel")[0]: kernel.to_json() for kernel in dumped(tmp_path, "sm_90a")}
    assert found.keys() == OPCODES.keys()
    for name, opcodes in OPCODES.items():
        assert found[name]["instructions"].keys() >= {*opcodes}, name
        assert found[name]["spilled_bytes"] == found[name]["stack_bytes"] == 0 < found[name]["blocks"], name
        assert found[name]["shared_bytes"] > 0, name
