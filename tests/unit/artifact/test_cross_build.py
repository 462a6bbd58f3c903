"""Models built for another architecture: the file says so, holds its machine code, and is refused here."""

from __future__ import annotations

import platform
import struct
from pathlib import Path

import numpy as np
import pytest

import mlc
from mlc.artifact.artifact import read
from mlc.artifact.smoke_test import save_tested
from mlc.errors import ArtifactError, BuildError
from mlc.link import find_linker
from mlc.testing.aarch64 import Emulated, missing_python
from mlc.testing.programs import dense

_AARCH64 = 183  # e_machine of ELF

if platform.machine() == "aarch64":
    pytest.skip("aarch64 is this machine's own architecture", allow_module_level=True)


@pytest.fixture(scope="module")
def linker() -> None:
    try:
        find_linker("aarch64")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("target", ["aarch64", "aarch64:cortex-a76 -num-cores=4"])
def test_the_file_is_for_the_other_architecture_alone(linker: None, tmp_path: Path, target: str) -> None:
    exe = mlc.compile(dense().mod, target=target, log=False)
    path = tmp_path / "dense.so"
    assert not save_tested(exe, path, native=False), "it cannot run here"
    found = read(path)
    assert found.code[:4] == b"\x7fELF" and struct.unpack_from("<H", found.code, 18) == (_AARCH64,)
    metadata = found.metadata
    assert metadata["machine"] == "aarch64" and "asimd" in metadata["features"]
    assert ("asimddp" in metadata["features"]) == ("a76" in target)
    with pytest.raises(ArtifactError, match="aarch64") as caught:
        mlc.load(path)
    assert "\n" not in str(caught.value)


def test_without_a_linker_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.link.shutil.which", lambda name: None)
    monkeypatch.setattr("mlc.link.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install ziglang") as caught:
        mlc.compile(dense().mod, target="aarch64", log=False)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(bool(missing_python()), reason=missing_python())
def test_it_runs_there(linker: None, tmp_path: Path) -> None:
    """With Python and TVM's runtime for aarch64, emulated."""
    case = dense()
    mlc.compile(case.mod, target="aarch64:cortex-a76", log=False).save(tmp_path / "dense.so")
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    Emulated().run("import sys, numpy, mlc; f = sys.argv[1]; "
                   "numpy.save(f + '/y.npy', mlc.load(f + '/dense.so')(numpy.load(f + '/x.npy'))[0])", str(tmp_path))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), case.reference(x)[0], rtol=1e-5, atol=1e-5)
