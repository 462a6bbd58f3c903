"""Runs aarch64 code on another machine under QEMU. This shows that code computes the right numbers with instructions
that this machine lacks; it says nothing about speed.

:func:`run` links one function with a driver in C. Needs ``qemu-aarch64`` and ``aarch64-linux-gnu-gcc`` (Debian:
``qemu-user``, ``gcc-aarch64-linux-gnu``) or the compiler of the package ``ziglang``. :class:`Emulated` is a whole
Python with TVM's runtime: what artifacts and workers need. It lives in a folder that
``python -m mlc.testing.aarch64 FOLDER`` makes where Debian's ``apt-get`` and ``dpkg`` are, and that
``MLC_AARCH64_ROOT`` names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tvm

__all__ = ["Emulated", "missing", "missing_python", "prepare", "run"]

_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_ROOT = "MLC_AARCH64_ROOT"
#: Debian's packages with Python and what it and TVM's runtime link to, as ``{python}`` of this version
_DEBIAN = (
    "python{python}-minimal", "libpython{python}-minimal", "libpython{python}-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1",
)
#: wheels: what artifacts and workers need beside mlc, in the versions that are installed here
_WHEELS = ("numpy", "ml_dtypes", "typing_extensions", "xxhash", "apache-tvm", "apache-tvm-ffi")
#: the CPU that is described to mlc: QEMU shows the kernel's own list, which is of another architecture
_CPUINFO = """processor\t: 0
CPU implementer\t: 0x41
CPU part\t: 0xd0b
Features\t: fp asimd aes sha2 crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp
"""
#: for the emulator, and for a compiler that makes its C library first
_SECONDS = 300.0
#: what TVM's code calls of its runtime: parallel loops run on one thread, memory is the C library's
_RUNTIME = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

int TVM_SYMBOL(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < count; ++i) fputs(parts[i], stderr);
}
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) { fprintf(stderr, "%s: %s", kind, text); }
void* TVMBackendAllocWorkspace(int kind, int id, uint64_t size, int code, int bits) {
  return aligned_alloc(64, (size + 63) / 64 * 64);
}
int TVMBackendFreeWorkspace(int kind, int id, void* memory) { free(memory); return 0; }
typedef struct { void* sync; int32_t tasks; } Group;
int TVMBackendParallelLaunch(int (*body)(int, Group*, void*), void* data, int tasks) {
  Group group = {0, 1};
  return body(0, &group, data);
}
// generated code calls through these, which TVM's loader would set
void* __TVMBackendAllocWorkspace = &TVMBackendAllocWorkspace;
void* __TVMBackendFreeWorkspace = &TVMBackendFreeWorkspace;
void* __TVMBackendParallelLaunch = &TVMBackendParallelLaunch;

static DLTensor tensor(const char* path, int64_t* shape, int ndim, int code, int bits, int64_t bytes) {
  void* data = aligned_alloc(64, (bytes + 63) / 64 * 64);
  FILE* file = fopen(path, "rb");
  if (!file || fread(data, 1, bytes, file) != bytes) exit(3);
  fclose(file);
  return (DLTensor){data, {kDLCPU, 0}, ndim, {code, bits, 1}, shape, 0, 0};
}
static void keep(const char* path, DLTensor t, int64_t bytes) {
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(t.data, 1, bytes, file) != bytes) exit(4);
  fclose(file);
}
"""
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "b": 6}


def missing() -> str:
    """What is not installed of what :func:`run` needs; empty where it can run."""
    compiler = [] if _compiler() else [f"{_COMPILER} or ziglang"]
    return ", ".join(compiler + [name for name in (_EMULATOR,) if shutil.which(name) is None])


def _compiler() -> list[str]:
    """The command that compiles and links C for aarch64; empty where there is none."""
    if shutil.which(_COMPILER):
        return [_COMPILER]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    return []


def run(module: tvm.IRModule, target: tvm.target.Target, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compile the one function of ``module`` for an aarch64 ``target``, call it, and return every parameter as it is
    afterwards. Raises ``RuntimeError`` with what the linker, the emulator or the function says."""
    import tvm
    import tvm_ffi

    from schedules.lowering import PIPELINE

    (func,) = module.functions.values()
    name = "computed"
    built = tvm.compile(tvm.IRModule({name: func.with_attr("global_symbol", name)}), target, tir_pipeline=PIPELINE).mod
    with tempfile.TemporaryDirectory(prefix="mlc-aarch64-") as place:
        folder = Path(place)
        built.write_to_file(str(folder / "function.o"), "o")
        for i, array in enumerate(arrays):
            np.ascontiguousarray(array).tofile(folder / str(i))
        (folder / "driver.c").write_text(_driver(arrays, folder))
        headers = Path(tvm_ffi.__file__).parent / "include"
        symbol = f"-DTVM_SYMBOL=__tvm_ffi_{name}"
        files = [str(folder / file) for file in ("driver.c", "function.o")]
        options = ["-O1", "-w", "-static", f"-I{headers}", symbol, "-o", str(folder / "program")]
        _call(*_compiler(), *options, *files, "-lm")
        _call(_EMULATOR, "-cpu", "max", str(folder / "program"))
        return [np.fromfile(folder / str(i), array.dtype).reshape(array.shape) for i, array in enumerate(arrays)]


def _driver(arrays: Sequence[np.ndarray], folder: Path) -> str:
    lines = [_RUNTIME, "int main() {", f"  TVMFFIAny arguments[{len(arrays)}], result;",
             "  memset(arguments, 0, sizeof(arguments));"]
    for i, array in enumerate(arrays):
        shape, code = ", ".join(map(str, array.shape)), _CODES[array.dtype.kind]
        lines += [
            f"  int64_t s{i}[] = {{{shape}}};",
            f'  DLTensor t{i} = tensor("{folder / str(i)}", s{i}, {array.ndim}, {code}, {8 * array.itemsize}, '
            f"{array.nbytes});",
            f"  arguments[{i}].type_index = kTVMFFIDLTensorPtr; arguments[{i}].v_ptr = &t{i};",
        ]
    lines.append(f"  if (TVM_SYMBOL(0, arguments, {len(arrays)}, &result)) return 2;")
    lines += [f'  keep("{folder / str(i)}", t{i}, {array.nbytes});' for i, array in enumerate(arrays)]
    return "\n".join([*lines, "  return 0;", "}", ""])


def _call(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[:800]}")


def missing_python() -> str:
    """What is not there of what :class:`Emulated` needs; empty where it can run."""
    if not os.environ.get(_ROOT):
        return f"{_ROOT} names no folder with Python for aarch64 (`python -m mlc.testing.aarch64 FOLDER` makes one)"
    return "" if (Path(os.environ[_ROOT]) / "python").exists() else f"{os.environ[_ROOT]}/python must exist"


class Emulated:
    """Python with numpy and TVM's runtime, without TVM's compiler, as on a Cortex-A76; mlc is imported from here."""

    def __init__(self) -> None:
        self._root = Path(os.environ[_ROOT]).resolve()

    @property
    def python(self) -> list[str]:
        """The command that is Python there."""
        return [str(self._root / "python")]

    @property
    def environment(self) -> Mapping[str, str]:
        """What Python there must find in its environment."""
        repository = Path(__file__).resolve().parents[2]
        return {
            "PATH": os.environ["PATH"], "PYTHONHOME": str(self._root / "usr"), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(repository), str(self._root / "packages")]),
            "TVM_LIBRARY_PATH": str(self._root / "lib_tvm"), "MLC_CPUINFO": str(self._root / "cpuinfo"),
            "MLC_THREADS": "2", "TMPDIR": tempfile.gettempdir(),
        }

    def run(self, code: str, *arguments: str) -> str:
        """Run Python code; what it prints. Raises ``RuntimeError`` with its last words where it fails."""
        done = subprocess.run([*self.python, "-c", code, *arguments], env=self.environment, capture_output=True,
                              text=True, check=False, timeout=_SECONDS)
        if done.returncode:
            raise RuntimeError(f"Python for aarch64 failed with {done.returncode}: {done.stderr.strip()[-800:]}")
        return done.stdout


def prepare(folder: Path, emulator: str = _EMULATOR) -> None:
    """Fill a folder for :class:`Emulated` from Debian's archive and a package index. Raises ``RuntimeError`` with what
    a tool says."""
    from importlib.metadata import version

    folder = folder.resolve()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory() as place:
        state = Path(place)
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True)
        (state / "status").touch()
        apt = ["apt-get", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o",
               f"Dir::State::lists={state}/lists", "-o", f"Dir::State::status={state}/status", "-o",
               f"Dir::Cache={state}/cache", "-o", "APT::Sandbox::User=root"]
        _call(*apt, "update")
        _call(*apt, "download", *(name.format(python=python) for name in _DEBIAN), cwd=state)
        for package in state.glob("*.deb"):
            _call("dpkg", "-x", str(package), str(folder))
        pinned = [f"{name}=={version(name)}" for name in _WHEELS]
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 24, 17)]
        _call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target",
              str(folder / "packages"), *platforms, f"--python-version={python}", *pinned)
    packages = folder / "packages"
    (folder / "lib_tvm").mkdir(exist_ok=True)
    (packages / "tvm" / "lib" / "libtvm_runtime.so").replace(folder / "lib_tvm" / "libtvm_runtime.so")
    shutil.rmtree(packages / "tvm")  # its compiler: a board has none
    (folder / "cpuinfo").write_text(_CPUINFO)
    script = folder / "python"
    words = shlex.join([emulator, "-L", str(folder), "-cpu", "max", "-0"])
    script.write_text(f'#!/bin/sh\nexec {words} "$0" {shlex.quote(f"{folder}/usr/bin/python{python}")} "$@"\n')
    script.chmod(0o755)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
