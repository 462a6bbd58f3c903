"""Code generation: what fails is named, and GPU code is made without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from mlc.artifact import artifact, compile_module, load
from mlc.config import get
from mlc.errors import ArtifactError, BuildError
from mlc.target import resolve
from mlc.testing.programs import dense


@T.prim_func(private=True, s_tir=True)
def _ragged(a: T.Buffer((5, 24), "float32"), b: T.Buffer((5, 24), "float32")) -> None:
    """A vectorised loop of no fixed extent, which no backend takes."""
    T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
    for i in T.serial(5):
        for j in T.vectorized(i + 1):
            b[i, j] = a[i, j]


def test_the_function_that_does_not_compile_is_named() -> None:
    good = dense().mod
    builder = relax.BlockBuilder(tvm.IRModule({v: f for v, f in good.functions.items() if v.name_hint != "main"}))
    x = relax.Var("x", relax.TensorType((5, 24), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            bad = builder.add_func(_ragged, "ragged_copy")
            result = builder.emit_output(relax.call_tir(bad, (x,), relax.TensorType((5, 24), "float32")))
        builder.emit_func_output(result)
    with pytest.raises(BuildError, match=r"function ragged_copy must compile for llvm/.*but TVM refused it") as caught:
        compile_module(builder.finalize(), resolve("native", threads=1))
    assert "\n" not in str(caught.value) and "vectorize" in str(caught.value).lower()


@pytest.mark.skipif(shutil.which(get("MLC_NVCC")) is None, reason="needs nvcc")
def test_an_artifact_for_a_gpu_holds_machine_code(tmp_path: Path) -> None:
    """Made anywhere; run where there is a GPU, and refused in one line where there is none."""
    case = dense()
    exe = compile_module(case.mod, resolve("cuda:sm_80"))
    exe.save(tmp_path / "model.so")
    found = artifact.read(tmp_path / "model.so")
    assert (found.metadata["kind"], found.metadata["target"]) == ("cuda", "cuda/sm_80")
    assert [f["space"].partition(".")[0] for f in found.metadata["functions"]] == ["cuda", "cuda"]
    assert b"\x50\xed\x55\xba" in found.code  # a fat binary, not source that is compiled on arrival
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    if tvm.cuda(0).exist:
        for each in (exe, load(tmp_path / "model.so")):
            np.testing.assert_allclose(each(x)[0], case.reference(x)[0], rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(ArtifactError, match=r"cuda \(sm_80\).*(no NVIDIA|none that its driver shows)") as caught:
            load(tmp_path / "model.so")
        assert "\n" not in str(caught.value)
