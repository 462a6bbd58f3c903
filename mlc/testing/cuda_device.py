"""A simulated GPU: TVM's CUDA runtime loads artifacts, copies, captures graphs and launches kernels as on a real one,
and the kernels run in the :mod:`emulator <mlc.testing.cuda_emulator>`.

What is NVIDIA's alone is replaced: the driver and its runtime (``cuda_device.cc``) and the compiler. What a stream is
given is done as late as it may be, so that a wait that is missing shows in the numbers. So
:func:`install` must be called before anything loads TVM, in a process of its own. It is an ``sm_80``; kernels that copy
boxes by a tensor map are not for it. Only for small models.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Counts", "counts", "install", "journal", "limit_memory"]

_SOURCE = Path(__file__).with_name("cuda_device.cc")
_RUNTIME, _DRIVER = "libcudart.so.13", "libcuda.so.1"
_numbers = itertools.count()
_loaded: list[Any] = []


class Counts(NamedTuple):
    """What happened since the process began: kernels ``started`` one by one, ``graphs`` launched and the kernels
    ``replayed`` by them, and ``copies`` of memory, of which so many bytes are ``held``. ``pageable`` copies have an end
    in memory that is not CUDA's."""

    started: int
    graphs: int
    replayed: int
    copies: int
    held: int
    pageable: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def install(folder: Path) -> None:
    """Put the GPU into this process; ``folder`` holds its libraries and what kernels are compiled to."""
    (folder / "versions").write_text(f"{_RUNTIME} {{ global: *; }};\n", encoding="ascii")
    for name, flags in ((_RUNTIME, [f"-Wl,--version-script={folder}/versions"]), (_DRIVER, ["-DDRIVER"])):
        _compile(_SOURCE, folder / name, *flags, f"-Wl,-soname,{name}")
        _loaded.append(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL))
    from mlc.codegen import cuda
    from mlc.testing.cuda_emulator import included, same_object

    def compile_source(source: str, archs: Sequence[str]) -> bytes:
        path = folder / f"kernels{next(_numbers)}.so"
        path.with_suffix(".cc").write_text(_library(source), encoding="utf-8")
        _compile(path.with_suffix(".cc"), path, *included(), same_object())
        return f"{path}\0".encode()

    cuda._compiler = lambda: compile_source


def counts() -> Counts:
    """What the GPU has done so far."""
    values = (ctypes.c_int64 * len(Counts._fields))()
    _loaded[0].device_counts(values)
    return Counts(*values)


def journal() -> list[tuple[str, int]]:
    """What streams were given since this was asked last, in order: a ``copy``, ``kernel`` or ``graph``, to ``record``
    an event or to ``wait`` for one; and what the host waited for, a stream (``synchronise``) or an event on one
    (``await``)."""
    function = _loaded[0].device_journal
    function.restype = ctypes.c_char_p
    return [(what, int(stream)) for what, stream in map(str.split, function().decode("ascii").splitlines())]


def limit_memory(size: int) -> None:
    """How many bytes may be allocated."""
    _loaded[0].device_limit(ctypes.c_size_t(size))


def _compile(source: Path, library: Path, *flags: str) -> None:
    command = ["g++", "-O1", "-w", "-std=c++17", "-fPIC", "-shared", *flags, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"g++ failed with {done.returncode}: {done.stderr.strip()[:800]}")


def _library(source: str) -> str:
    """For each kernel a function that takes a launch's grid, blocks and arguments, and gives what runs it."""
    from mlc.testing import cuda_emulator
    from mlc.testing.cuda_asm import emulated

    weak = "atomicInc" in source
    lines = [f'#include "{cuda_emulator.HEADER}"', emulated(cuda_emulator._in_cpp(source)),
             'extern "C" char* device_block(const void*, size_t*);']
    for kernel in cuda_emulator._KERNEL.finditer(source):
        types = [re.sub(r"\b__restrict__\b", "", parameter).rsplit(None, 1)[0]
                 for parameter in kernel[2].split(",") if parameter.strip()]
        values = ", ".join(f"a{i} = *({kind}*)a[{i}]" for i, kind in enumerate(types))
        lines += [
            f'extern "C" std::function<void()>* bind_{kernel[1]}(const unsigned* g, const unsigned* b, void** a) {{',
            "  Index grid{g[0], g[1], g[2]}, block{b[0], b[1], b[2]};",
            f"  return new std::function<void()>([={', ' if values else ''}{values}] {{",
            "    emulator::arrays.clear();",
            *([_ARRAY.format(i) for i, kind in enumerate(types) if "*" in kind] if weak else []),
            f"    emulate(grid, block, [&] {{ {kernel[1]}({', '.join(f'a{i}' for i in range(len(types)))}); }}, "
            f"{'true' if weak else 'false'});",
            "  });",
            "}",
        ]
    return "\n".join([*lines, ""])


#: the memory that a pointer leads to, once, for what blocks tell each other of it
_ARRAY = """    {{
      size_t size = 0;
      char* data = device_block((const void*)a{0}, &size);
      bool known = false;
      for (auto& each : emulator::arrays) known |= each.data == data;
      if (!known) emulator::arrays.push_back({{data, size}});
    }}"""
