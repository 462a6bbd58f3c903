"""Running code for aarch64 on another machine: a cross compiler links a function with a driver, QEMU runs it.

Needs ``aarch64-linux-gnu-gcc`` and ``qemu-aarch64`` (Debian: ``gcc-aarch64-linux-gnu``, ``qemu-user``). It shows that
code computes the right numbers with instructions that this machine lacks, and nothing about time.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tvm

__all__ = ["missing", "run"]

_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_SECONDS = 120.0
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
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4}


def missing() -> str:
    """What is not installed of what :func:`run` needs; empty where it can run."""
    return ", ".join(name for name in (_COMPILER, _EMULATOR) if shutil.which(name) is None)


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
        _call(_COMPILER, "-O1", "-w", "-static", f"-I{headers}", symbol, *files, "-lm", "-o", str(folder / "program"))
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


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[:800]}")
