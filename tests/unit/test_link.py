"""Linking uses whatever the machine has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mlc import link
from mlc.artifact import compile_module
from mlc.errors import BuildError
from mlc.target import resolve
from mlc.testing.programs import dense

TARGET = resolve("native", threads=1)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A search path with nothing on it but the named tools."""

    def keep(*names: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(str(shutil.which(name)))
        monkeypatch.setenv("PATH", str(folder))

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return keep


@pytest.mark.skipif(shutil.which("ld") is None, reason="needs ld")
def test_a_bare_linker_is_enough(only) -> None:
    only("ld")
    assert link.find_linker() == ["ld"]
    case = dense()
    x = np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32)
    np.testing.assert_allclose(compile_module(case.mod, TARGET)(x)[0], case.reference(x)[0], rtol=1e-5, atol=1e-5)


def test_the_environment_names_the_compiler(only, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(tool for tool in ("g++", "cc", "ld") if shutil.which(tool))
    only(name)
    monkeypatch.setenv("CXX", f"{name} -O1")
    assert link.find_linker() == [name, "-O1"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert link.find_linker() == [name]


def test_no_linker_is_one_clear_line(only) -> None:
    only()
    with pytest.raises(BuildError, match="neither a C compiler nor ld was found; install one") as caught:
        compile_module(dense().mod, TARGET)
    assert "\n" not in str(caught.value)


def test_for_another_architecture_its_own_tools_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"aarch64-linux-gnu-gcc", "ld.lld", "g++"}
    monkeypatch.setattr(link.shutil, "which", lambda name: f"/bin/{name}" if name in found else None)
    monkeypatch.setattr(link.platform, "machine", lambda: "x86_64")
    assert link.find_linker("aarch64") == ["aarch64-linux-gnu-gcc"]
    found.remove("aarch64-linux-gnu-gcc")
    assert link.find_linker("aarch64") == ["ld.lld"]
    assert link.find_linker("x86_64") == link.find_linker() == ["g++"]
    found.remove("ld.lld")
    monkeypatch.setattr(link.importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    assert link.find_linker("aarch64")[-2:] == ["ziglang", "ld.lld"]
    monkeypatch.setattr(link.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"aarch64 on x86_64 needs a linker .*`pip install ziglang`") as caught:
        link.find_linker("aarch64")
    assert "\n" not in str(caught.value)


def test_what_the_linker_says_is_passed_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken.o"
    broken.write_bytes(b"no object file")
    with pytest.raises(BuildError, match="must link the compiled code, but it refused: ") as caught:
        link.link_shared(str(tmp_path / "out.so"), [str(broken)])
    assert "\n" not in str(caught.value)
