"""Every way in which a compiled model cannot be loaded: one line that says what must hold, what came, what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlc.artifact import Executable, artifact, compile_module, cpu_features, load, runtime
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
    data[data.index(b"mlc\x00art\n") + 8] = artifact.BUNDLE + 1
    path = tmp_path / "later.so"
    path.write_bytes(data)
    said = f"has format {artifact.BUNDLE + 1}, but this mlc reads formats {artifact.FORMAT} and {artifact.BUNDLE}"
    assert said in _refused(path)


def test_a_cpu_without_the_instructions(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = _changed(built, tmp_path, features=["avx2", "avx512f", "fma"])
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: frozenset({"avx", "avx2", "fma"}))
    message = _refused(path)
    assert "needs the instructions avx512f, which this" in message and "`mlc targets` lists them" in message


def test_another_architecture(built: Path, tmp_path: Path) -> None:
    assert "needs a riscv64 CPU, which this" in _refused(_changed(built, tmp_path, machine="riscv64"))


def test_compiling_for_another_cpu_is_fine_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: frozenset({"sse4_2"}))
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
    code = "import sys, mlc.artifact as b\ntry: b.load(sys.argv[1])\nexcept Exception as e: print(type(e).__name__, e)"
    done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("ArtifactError the module was built for cuda (sm_90), but this machine has no NVIDIA")
    assert len(done.stdout.strip().splitlines()) == 1


def test_saving_where_nothing_can_be_written(built: Path, tmp_path: Path) -> None:
    exe: Executable = load(built)
    with pytest.raises(ArtifactError, match="must be writable") as caught:
        exe.save(tmp_path / "no" / "folder" / "model.so")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["shape", "dtype", "order", "outputs"])
def test_metadata_that_the_code_contradicts(built: Path, tmp_path: Path, change: str) -> None:
    found = artifact.read(built)
    weights, metadata = found.weights, json.loads(json.dumps(found.metadata))
    match change:
        case "shape":
            metadata["weights"][0]["shape"].append(1)
        case "dtype":
            metadata["weights"][0]["dtype"] = "int32"
        case "order":
            metadata["weights"], weights = metadata["weights"][::-1], weights[::-1]
        case "outputs":
            metadata["outputs"][0]["shape"] = [24, 5]
    path = tmp_path / "crafted.so"
    artifact.write(path, found.code, metadata, weights)
    with pytest.raises(ArtifactError, match=r"must (run on|return) what its metadata describes, but") as caught:
        load(path)(np.zeros((5, 24), np.float32))
    assert "\n" not in str(caught.value)


def test_metadata_that_makes_no_sense(built: Path, tmp_path: Path) -> None:
    message = _refused(_changed(built, tmp_path, threads="many"))
    assert "must describe a compiled model: threads must be a whole number from 1 to 65536, got 'many'" in message


@pytest.mark.parametrize("way", ["truncate", "overwrite"])
def test_overwriting_a_loaded_file_changes_nothing(built: Path, tmp_path: Path, way: str) -> None:
    """In a process of its own: a file that is still mapped would end it."""
    path = tmp_path / "model.so"
    shutil.copy(built, path)
    code = (
        "import sys, numpy as np, mlc\n"
        "x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)\n"
        "exe, later = mlc.load(sys.argv[1]), mlc.load(sys.argv[1])\n"
        "(before,) = exe(x)\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        f"    {'file.truncate(100)' if way == 'truncate' else 'file.write(bytes(1 << 20))'}\n"
        "assert all((e(x)[0] == before).all() for e in (exe, later))\n"
        "exe.profile(x, repeats=1)\n"
        "exe.save(sys.argv[1])\n"
        "assert (mlc.load(sys.argv[1])(x)[0] == before).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_many_loads_in_one_process_are_not_mixed_up(tmp_path: Path) -> None:
    paths = []
    for size in (8, 16, 24):
        paths.append(tmp_path / f"{size}.so")
        compile_module(dense(size=size, seed=size).mod, resolve("native", threads=1)).save(paths[-1])
    for path in paths * 3:
        size = int(path.stem)
        x = np.random.default_rng(0).standard_normal((5, size), dtype=np.float32)
        np.testing.assert_allclose(load(path)(x)[0], dense(size=size, seed=size).reference(x)[0], rtol=1e-4, atol=1e-4)


def test_code_loads_where_there_are_no_files_in_memory(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    (expected,) = load(built)(x)
    monkeypatch.setattr("os.memfd_create", refused)
    np.testing.assert_array_equal(load(built)(x)[0], expected)
