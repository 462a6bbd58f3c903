"""Running generated CUDA kernels on a machine without a GPU: the source as it is, a fiber for each thread.

The :mod:`twin <mlc.testing.cuda_twin>` shows that a schedule's transformations mean the same. This shows that the
kernels do, barriers, predicates, vector accesses and shuffles included: the CUDA source that TVM writes is compiled as
C++ against ``cuda_emulator.h`` and run thread block by thread block. Only for small shapes: it is a thousand times
slower than compiled code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.codegen.cuda import PASS_CONFIG, legal_names

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

__all__ = ["cuda_source", "run"]

_HEADER = Path(__file__).with_name("cuda_emulator.h")
_KERNEL = re.compile(r'^extern "C" __global__ void .*?(\w+)\(([^)]*)\) \{', re.MULTILINE)


def run(func: tirx.PrimFunc, target: tvm.target.Target, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    """Build the scheduled ``func`` for a CUDA ``target`` and run its kernels; ``outputs`` are written in place.

    Raises ``RuntimeError`` where the kernels do not compile, crash, or leave threads at a barrier.
    """
    func = legal_names(func)
    source = cuda_source(func, target)
    arrays = {_identifier(p): a for p, a in zip(func.params, (*inputs, *outputs), strict=True)}
    inner = [b for b in func.body.block.alloc_buffers if b.scope() in ("", "global")]
    # TVM lets one intermediate take over another's memory, so each gets as much as the largest
    room = max((prod(int(s) for s in b.shape) * 8 for b in inner), default=0)
    arrays |= {_identifier(b): np.full(room, 0x7F, "uint8") for b in inner}
    launches = list(_launches(func))
    with tempfile.TemporaryDirectory(prefix="mlc-emulator-") as name:
        folder = Path(name)
        for key, array in arrays.items():
            array.tofile(folder / key)
        text = _program(source, launches, {k: a.nbytes for k, a in arrays.items()}, folder)
        (folder / "kernels.cc").write_text(text)
        _call("g++", "-O1", "-w", "-std=c++17", "-o", f"{name}/kernels", f"{name}/kernels.cc")
        _call(f"{name}/kernels")
        for parameter, array in zip(func.params[len(inputs) :], outputs, strict=True):
            array[...] = np.fromfile(folder / _identifier(parameter), array.dtype).reshape(array.shape)


def _identifier(buffer: Any) -> str:
    """A buffer's name as the generated source spells it."""
    return re.sub(r"\W", "_", str(buffer.name))


def cuda_source(func: tirx.PrimFunc, target: tvm.target.Target) -> str:
    """The CUDA source that TVM writes for ``func``."""
    import tvm

    captured: list[str] = []

    def keep(code: str, _target: Any) -> str:
        captured.append(code)
        return code

    with (
        _registered("tvm_callback_cuda_postproc", keep),
        _registered("tvm_callback_cuda_compile", lambda _code: b"not needed"),
        tvm.transform.PassContext(config=dict(PASS_CONFIG)),
    ):
        tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=target)
    return captured[0]


@contextmanager
def _registered(name: str, function: Any) -> Iterator[None]:
    import tvm
    import tvm_ffi

    previous = tvm.get_global_func(name, allow_missing=True)
    tvm.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        if previous is None:
            tvm_ffi.registry.remove_global_func(name)
        else:
            tvm.register_global_func(name, previous, override=True)


def _launches(func: tirx.PrimFunc) -> Iterator[dict[str, int]]:
    """For each kernel in order: the extent of every thread axis it uses."""
    import tvm_ffi
    from tvm import tirx as tir

    body = func.body.block.body
    for nest in list(body) if isinstance(body, tir.SeqStmt) else [body]:
        extents: dict[str, int] = {}

        def visit(loop: Any, extents: dict[str, int] = extents) -> None:
            if loop.thread_binding is not None:
                extents[str(loop.thread_binding.thread_tag)] = int(loop.extent)

        tvm_ffi.structural_walk(nest, (tir.For, visit), order="post")
        yield extents


def _program(source: str, launches: list[dict[str, int]], sizes: dict[str, int], folder: Path) -> str:
    kernels = list(_KERNEL.finditer(source))
    if len(kernels) != len(launches):
        raise RuntimeError(f"one kernel for each nest is needed, got {len(kernels)} for {len(launches)} nests")
    code = source[source.index('extern "C" __global__') :].replace("__shared__ alignas(64)", "alignas(64) static")
    lines = [f'#include "{_HEADER}"', code, "int main() {"]
    for key, size in sizes.items():
        lines.append(f'  char* {key}_ptr = (char*)aligned_alloc(64, {-(-size // 64) * 64});')
        lines.append(f'  {{ FILE* f = fopen("{folder / key}", "rb"); fread({key}_ptr, 1, {size}, f); fclose(f); }}')
    for kernel, extents in zip(kernels, launches, strict=True):
        axes = ([str(extents.get(f"{axis}.{d}", 1)) for d in "xyz"] for axis in ("blockIdx", "threadIdx"))
        grid, block = map(", ".join, axes)
        parameters = [p.strip() for p in kernel[2].split(",")]
        arguments = ", ".join(_argument(p) for p in parameters)
        lines.append(f"  emulate({{{grid}}}, {{{block}}}, [&] {{ {kernel[1]}({arguments}); }});")
    for key, size in sizes.items():
        lines.append(f'  {{ FILE* f = fopen("{folder / key}", "wb"); fwrite({key}_ptr, 1, {size}, f); fclose(f); }}')
    return "\n".join([*lines, "}", ""])


def _argument(parameter: str) -> str:
    """What a kernel is given for ``float* __restrict__ x_ptr_1``; a scalar is an offset, which is 0."""
    if "*" not in parameter:
        return "0"
    name = re.sub(r"_ptr_\d+$", "_ptr", parameter.split()[-1])  # the same buffer, passed twice
    return f"({parameter.split('*')[0]}*){name}"


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed with {done.returncode}: {done.stderr.strip()[:800]}")
