"""Every way in which a compiled model cannot be loaded: one line that says what must hold, what came, what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlc.build import Executable, artifact, compile_module, features, load, runtime
from mlc.errors import ArtifactError
from mlc.target import resolve
from mlc.testing.programs import dense


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model.so"
    compile_module(dense().mod, resolve("native", threads=1)).save(path)
    return path


def _refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _changed(built: Path, tmp_path: Path, **metadata: object) -> Path:
    """The artifact with other metadata."""
    found = artifact.read(built)
    path = tmp_path / "changed.so"
    artifact.write(path, found.code, {**found.metadata, **metadata}, found.weights)
    return path


def test_missing_file(tmp_path: Path) -> None:
    assert _refused(tmp_path / "none.so") == (
        f"the compiled model must exist, but {tmp_path / 'none.so'} does not; make it with `mlc compile`")


def test_folder(tmp_path: Path) -> None:
    assert "must be readable" in _refused(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x08\x07\x12", b"PK\x03\x04" + bytes(200), b"\x7fELF\x01" + bytes(300)])
def test_some_other_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert "must be a file that `mlc compile` wrote" in _refused(path)


def test_some_other_shared_library(tmp_path: Path, built: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(artifact.read(built).code)  # what is left when the artifact is stripped
    assert "holds no compiled model" in _refused(path)


def test_cut_short_anywhere(tmp_path: Path, built: Path) -> None:
    data = built.read_bytes()
    found = artifact.read(built)
    path = tmp_path / "short.so"
    header_at = -(-len(found.code) // 4096) * 4096
    for size in (65, len(found.code) - 1, header_at + 5, header_at + 40, found.weights_at - 1, found.weights_at,
                 len(data) - 1):
        path.write_bytes(data[:size])
        assert "is cut short: it must have at least" in _refused(path), size


def test_damaged_metadata(tmp_path: Path, built: Path) -> None:
    data = bytearray(built.read_bytes())
    at = data.index(b'"name":"module"')
    data[at + 9] ^= 1
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    assert "must match its checksum" in _refused(path)


def test_a_later_format(tmp_path: Path, built: Path) -> None:
    data = bytearray(built.read_bytes())
    data[data.index(b"mlc\x00art\n") + 8] = 3
    path = tmp_path / "later.so"
    path.write_bytes(data)
    assert "has format 3, but this mlc reads format 2; compile the model again" in _refused(path)


def test_a_cpu_without_the_instructions(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _changed(built, tmp_path, features=["avx2", "avx512f", "fma"])
    monkeypatch.setattr(features, "host_flags", lambda: frozenset({"avx", "avx2", "fma"}))
    message = _refused(path)
    assert "needs the instructions avx512f, which this" in message and "--target x86-64-v3" in message


def test_another_architecture(built: Path, tmp_path: Path) -> None:
    assert "needs a riscv64 CPU, which this" in _refused(_changed(built, tmp_path, machine="riscv64"))


def test_compiling_for_another_cpu_is_fine_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "host_flags", lambda: frozenset({"sse4_2"}))
    exe = compile_module(dense().mod, resolve("native", threads=1))
    exe.save(tmp_path / "model.so")
    with pytest.raises(ArtifactError, match="needs the instructions"):
        exe(np.zeros((5, 24), np.float32))


def test_another_tvm(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "version", lambda: "0.99.0")
    message = _refused(built)
    assert "but TVM 0.99.0 is installed" in message and "pip install apache-tvm==" in message


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def test_code_that_does_not_load(built: Path, tmp_path: Path) -> None:
    found = artifact.read(built)
    path = tmp_path / "broken.so"
    code = bytearray(found.code)
    code[0x12] = 0xF3  # a shared library of another machine, under metadata that says otherwise
    artifact.write(path, bytes(code), found.metadata, found.weights)
    assert "must load, but TVM's runtime refused it" in _refused(path)


@pytest.mark.skipif(_has_gpu(), reason="needs a machine without an NVIDIA GPU")
def test_a_cuda_artifact_without_a_gpu(built: Path, tmp_path: Path) -> None:
    attrs = json.dumps({"kind": "cuda", "arch": "sm_90"})
    path = _changed(built, tmp_path, kind="cuda", target="cuda/sm_90", target_attrs=attrs)
    code = "import sys, mlc.build as b\ntry: b.load(sys.argv[1])\nexcept Exception as e: print(type(e).__name__, e)"
    done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("ArtifactError the module was built for cuda (sm_90), but this machine has no NVIDIA")
    assert len(done.stdout.strip().splitlines()) == 1


def test_saving_where_nothing_can_be_written(built: Path, tmp_path: Path) -> None:
    exe: Executable = load(built)
    with pytest.raises(ArtifactError, match="must be writable") as caught:
        exe.save(tmp_path / "no" / "folder" / "model.so")
    assert "\n" not in str(caught.value)
