"""An emulator of generated CUDA kernels: compiles their source unchanged for the CPU, with a fiber per thread.

The :mod:`twin <mlc.testing.cuda_twin>` shows that a schedule's transformations mean the same. This shows that the
kernels do, barriers, predicates, vector accesses and shuffles included: the CUDA source that TVM writes is compiled as
C++ against ``cuda_emulator.h`` and run thread block by thread block. Only for small shapes: it is a thousand times
slower than compiled code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlc.codegen.cuda import PASS_CONFIG, clustered, keeping_nan, legal_names
from mlc.testing.cuda_asm import emulated
from schedules.analysis import evaluate
from schedules.capped import opened
from schedules.cuda.joined import joined
from schedules.cuda.lowering import PIPELINE
from schedules.cuda.written import written
from schedules.merged import restored

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

__all__ = [
    "HEADER", "Cost", "Launch", "TensorMap", "cuda_source", "included", "launches", "run", "run_source", "same_object",
]

_HEADER = Path(__file__).with_name("cuda_emulator.h")
#: what a program includes, by the options of :func:`included`
HEADER = "emulator.h"
#: what is the same in every program, by its files, and how all of it is compiled
_SAME = ("cuda_emulator.cc", "cuda_global.cc", "cuda_ptx.cc", "cuda_hopper.cc")
_COMPILE = ("g++", "-O1", "-w", "-std=c++17", "-fPIC")
_KERNEL = re.compile(r'^extern "C" __global__ void .*?(\w+)\(([^)]*)\) \{', re.MULTILINE)
#: the blocks of a kernel's clusters
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\)")


class Cost(NamedTuple):
    """What one access in the source cost: ``taken`` waves of shared memory or sectors of global memory in all requests
    of warps, and the least that so many bytes could take."""

    what: str
    shared: bool
    bytes: int
    requests: int
    taken: int
    least: int


class Launch(NamedTuple):
    """The shape of a kernel's grid and of its blocks."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


class TensorMap(NamedTuple):
    """What a host tells of the tensor that a kernel copies boxes of, as ``cuTensorMapEncodeTiled`` takes it: the name
    of its array, where it begins there and the size of an element in bytes; sizes and boxes in elements, innermost
    first; strides in bytes, without the innermost's; whether boxes are swizzled by 128 bytes; and every how many
    elements of those that a box spans are copied, 1 where nothing is said."""

    array: str
    offset: int
    bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True
    steps: tuple[int, ...] = ()

    def in_cpp(self) -> str:
        """The initialiser of a ``CUtensorMap`` of ``cuda_hopper.h``."""
        lists = ", ".join(f"{{{', '.join(map(str, each))}}}" for each in (self.sizes, self.strides, self.box))
        swizzled = "true" if self.swizzled else "false"
        steps = ", ".join(map(str, self.steps or [1] * len(self.sizes)))
        first = f"{self.array}_ptr + {self.offset}"
        return f"{{{first}, {len(self.sizes)}, {self.bytes}, {lists}, {swizzled}, {{{steps}}}}}"


def run(
    func: tirx.PrimFunc, target: tvm.target.Target, inputs: Sequence[np.ndarray | int], outputs: list[np.ndarray],
    repeats: int = 1,
) -> list[Cost]:
    """Build the scheduled ``func`` for a CUDA ``target`` and run its kernels; ``outputs`` are written in place. Among
    ``inputs`` are the free sizes that the function is given as numbers; the others are those of the arrays.

    With ``repeats`` they are run again on the same memory, but for outputs and intermediates as they were at first, the
    blocks and at first the warps of every other run from the last to the first.

    Raises ``RuntimeError`` where the kernels do not compile, crash, or leave threads at a barrier.
    """
    from tvm import tirx

    func = legal_names(func)
    whole = _written_out(func)
    given = list(zip(whole.params, (*inputs, *outputs), strict=True))
    sizes = dict(_sizes(given))
    arrays = {_identifier(p): a for p, a in given if isinstance(a, np.ndarray)}
    *steps, root = whole.body.seq if isinstance(whole.body, tirx.SeqStmt) else [whole.body]
    inner = [b for b in root.block.alloc_buffers if b.scope() in ("", "global")] + [
        step.buffer for step in steps if isinstance(step, tirx.AllocBuffer)]
    # TVM lets one intermediate take over another's memory, so each gets as much as the largest
    room = max((prod(_number(s, sizes) for s in b.shape) * 8 for b in inner), default=0)
    arrays |= {_identifier(b): np.full(room, 0x7F, "uint8") for b in inner}
    return run_source(cuda_source(func, target), list(_launches(whole, sizes)), arrays, repeats,
                      dict(_tensor_maps(whole, sizes)), {str(var.name): size for var, size in sizes.items()})


def _written_out(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function with its kernels as they are launched, and the parameters of its callers."""
    return restored(joined(opened(written(func))))


def _sizes(given: Sequence[tuple[Any, np.ndarray | int]]) -> Iterator[tuple[Any, int]]:
    """What each free size of a function is for these arguments."""
    from tvm import tirx as tir

    for param, argument in given:
        if not isinstance(argument, np.ndarray):
            yield param, int(argument)
            continue
        yield from ((size, extent) for size, extent in zip(param.shape, argument.shape, strict=True)
                    if isinstance(size, tir.Var))


def _number(size: Any, sizes: Mapping[Any, int]) -> int:
    """An expression of free sizes as a number."""
    from tvm import tirx as tir

    return int(size) if isinstance(size, int | tir.IntImm) else evaluate(size, sizes)


def run_source(
    source: str, launches: Sequence[Launch], arrays: Mapping[str, np.ndarray], repeats: int = 1,
    maps: Mapping[str, TensorMap] | None = None, sizes: Mapping[str, int] | None = None,
) -> list[Cost]:
    """Run the kernels of CUDA source in order. A parameter ``x_ptr`` is the array ``x``, which is written in place, a
    ``CUtensorMap`` what ``maps`` says of its name, and a number what ``sizes`` do."""
    program = _compiled(_program(source, launches, {k: a.nbytes for k, a in arrays.items()}, maps or {}, sizes or {}))
    with tempfile.TemporaryDirectory(prefix="mlc-emulator-") as name:
        folder = Path(name)
        for key, array in arrays.items():
            array.tofile(folder / key)
        _call(f"{program.name}/kernels", name, str(repeats))
        for key, array in arrays.items():
            array[...] = np.fromfile(folder / key, array.dtype).reshape(array.shape)
        rows = (line.split("\t") for line in (folder / "costs").read_text().splitlines())
        return [Cost(what, shared == "1", *map(int, numbers)) for what, shared, *numbers in rows]


@lru_cache(maxsize=4)
def _compiled(text: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of the program that ``text`` is; g++ takes longer than most programs run."""
    folder = tempfile.TemporaryDirectory(prefix="mlc-emulator-")
    source = Path(folder.name, "kernels.cc")
    source.write_text(text)
    _call(*_COMPILE, *included(), "-o", f"{folder.name}/kernels", str(source), same_object())
    return folder


def same_object() -> str:
    """The path of the object file that all emulated kernels are linked with, compiled once for this process: it is
    seven times the work of what is a program's own."""
    return f"{_same().name}/same.o"


@cache
def _same() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="mlc-emulator-")
    source = Path(folder.name, "same.cc")
    source.write_text("".join(f'#include "{_HEADER.with_name(name)}"\n' for name in _SAME))
    _call(*_COMPILE, "-fvisibility=hidden", "-c", "-o", f"{folder.name}/same.o", str(source))
    return folder


def included() -> tuple[str, str]:
    """The option of g++ for :data:`HEADER`, which is compiled once for this process, and C++'s own headers with it: to
    read them takes longer than most kernels. They are read again by a command of other options than ``_COMPILE``."""
    return "-I", _header().name


@cache
def _header() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="mlc-emulator-")
    text = Path(folder.name, HEADER)
    text.write_text(f'#include "{_HEADER}"\n')
    _call(*_COMPILE, "-x", "c++-header", "-o", f"{text}.gch", str(text))
    return folder


def _tensor_maps(func: tirx.PrimFunc, free: Mapping[Any, int]) -> Iterator[tuple[str, TensorMap]]:
    """What the host of a function tells its kernels of tensors, by the names of their parameters."""
    import tvm
    from tvm import tirx as tir
    from tvm.runtime import DataType

    body = func.body
    for step in body.seq if isinstance(body, tir.SeqStmt) else ():
        call = step.value if isinstance(step, tir.Evaluate) else None
        if not isinstance(call, tvm.ir.Call) or str(call.op.name) != "tirx.tensormap_encode_tiled":
            continue
        rank, size = int(call.attrs.rank), DataType(str(call.attrs.descriptor_dtype)).bits // 8
        first, numbers = call.args[1].args[0], [_number(n, free) for n in call.args[2:]]
        offset = 0
        for index, extent in zip(first.indices, first.source.shape, strict=True):
            offset = offset * _number(extent, free) + _number(index, free)
        sizes, strides, box = numbers[:rank], numbers[rank : 2 * rank - 1], numbers[2 * rank - 1 : 3 * rank - 1]
        yield str(call.args[0].name), TensorMap(
            _identifier(first.source), offset * size, size, tuple(sizes), tuple(strides), tuple(box),
            int(call.attrs.swizzle) == 3, tuple(numbers[3 * rank - 1 :]))


def _identifier(buffer: Any) -> str:
    """A buffer's name as the generated source spells it."""
    return re.sub(r"\W", "_", str(buffer.name))


def cuda_source(func: tirx.PrimFunc, target: tvm.target.Target, instruments: Sequence[Any] = ()) -> str:
    """The CUDA source of ``func`` as the compiler is given it; ``instruments`` watch how it is made."""
    import tvm

    captured: list[str] = []

    def keep(code: str, _target: Any) -> str:
        captured.append(code)
        return code

    with (
        _registered("tvm_callback_cuda_postproc", keep),
        _registered("tvm_callback_cuda_compile", lambda _code: b"not needed"),
        tvm.transform.PassContext(config=dict(PASS_CONFIG), instruments=list(instruments)),
    ):
        tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=target,
                    tir_pipeline=PIPELINE)
    return clustered(keeping_nan(captured[0]))


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


def launches(func: tirx.PrimFunc) -> Iterator[Launch]:
    """The kernels that are launched for a scheduled function without free sizes, in order."""
    return _launches(_written_out(func), {})


def _launches(func: tirx.PrimFunc, sizes: Mapping[Any, int]) -> Iterator[Launch]:
    import tvm_ffi
    from tvm import tirx as tir

    whole = func.body
    root = whole.seq[-1] if isinstance(whole, tir.SeqStmt) else whole  # behind what the host allocates
    body = root.block.body
    for nest in list(body) if isinstance(body, tir.SeqStmt) else [body]:
        extents: dict[str, int] = {}

        def visit(loop: Any, extents: dict[str, int] = extents) -> None:
            if loop.thread_binding is not None:
                extents[str(loop.thread_binding.thread_tag)] = _number(loop.extent, sizes)

        tvm_ffi.structural_walk(nest, (tir.For, visit), order="post")
        yield Launch(*((extents.get(f"{axis}.x", 1), extents.get(f"{axis}.y", 1), extents.get(f"{axis}.z", 1))
                       for axis in ("blockIdx", "threadIdx")))


def _program(
    source: str, launches: Sequence[Launch], sizes: dict[str, int], maps: Mapping[str, TensorMap],
    free: Mapping[str, int],
) -> str:
    """The program that takes the folder of the arrays' files and how often the kernels run."""
    kernels = list(_KERNEL.finditer(source))
    if len(kernels) != len(launches):
        raise RuntimeError(f"one kernel for each nest is needed, got {len(kernels)} for {len(launches)} nests")
    code = emulated(_in_cpp(source))
    lines = [f'#include "{HEADER}"', code, "int main(int, char** argv) {",
             "  if (chdir(argv[1])) return 1;"]
    for key, size in sizes.items():
        lines.append(f'  char* {key}_ptr = (char*)aligned_alloc(64, {-(-size // 64) * 64});')
        lines.append(f"  emulator::arrays.push_back({{{key}_ptr, {size}}});")
    lines += [f"  CUtensorMap {key} = {tensor.in_cpp()};" for key, tensor in maps.items()]
    lines.append("  for (int turn = 0; turn < atoi(argv[2]); ++turn) {")
    for key, size in sizes.items():
        lines.append(f'    {{ FILE* f = fopen("{key}", "rb"); fread({key}_ptr, 1, {size}, f); fclose(f); }}')
    for kernel, launch in zip(kernels, launches, strict=True):
        grid, block = (", ".join(map(str, extents)) for extents in launch)
        parameters = [p.strip() for p in kernel[2].split(",")]
        arguments = ", ".join(_argument(p, free) for p in parameters)
        cluster = _CLUSTER.search(kernel[0])
        weak = "true" if "atomicInc" in source else "false"
        lines.append(f"    emulate({{{grid}}}, {{{block}}}, [&] {{ {kernel[1]}({arguments}); }}, {weak}, turn % 2, "
                     f"{cluster[1] if cluster else 1});")
    lines.append("  }")
    for key, size in sizes.items():
        lines.append(f'  {{ FILE* f = fopen("{key}", "wb"); fwrite({key}_ptr, 1, {size}, f); fclose(f); }}')
    lines.append('  ptx::write_costs("costs");')
    return "\n".join([*lines, "}", ""])


def _in_cpp(source: str) -> str:
    """The kernels and what they call, behind the declarations that ``cuda_emulator.h`` has too."""
    first = source.index('extern "C" __global__')
    code = source[source.rindex("#endif", 0, first) + len("#endif") :]
    code = re.sub(r"extern __shared__ __align__\(\d+\) ([\w ]+?) (\w+)\[\];",
                  r"\1* \2 = (\1*)emulator::own_shared();", code)
    return re.sub(r"__shared__ alignas\(64\) ([\w ]+?) (\w+)\[(\d+)\];",
                  r"\1* \2 = emulator::shared_array<\1, \3, __COUNTER__>();", code)


def _argument(parameter: str, sizes: Mapping[str, int]) -> str:
    """What a kernel is given for ``float* __restrict__ x_ptr_1``; a number is a free size or an offset, which is 0."""
    if "CUtensorMap" in parameter:
        return parameter.split()[-1]
    if "*" not in parameter:
        return str(sizes.get(parameter.split()[-1], 0))
    name = re.sub(r"_ptr_\d+$", "_ptr", parameter.split()[-1])  # the same buffer, passed twice
    return f"({parameter.split('*')[0]}*){name}"


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed with {done.returncode}: {done.stderr.strip()[:800]}")
