"""Machine code for NVIDIA GPUs with ``nvcc``, with or without a GPU in the machine.

TVM's CUDA runtime library turns generated source into a module, and asks a callback to compile it. Three things keep
that from doing the right thing on a machine without a GPU, and this file sees to each:

* the library needs the driver's ``libcuda.so.1``, which is installed with a GPU. Without it TVM would put *source* into
  the artifact and compile it wherever that is loaded. A stand-in for the driver, whose every function fails, is
  compiled in a temporary folder and loaded into this process, and only then: an artifact always holds machine code;
* TVM's own callback always passes ``--use_fast_math``. Ours calls ``nvcc`` (the setting ``MLC_NVCC``), or NVRTC where
  there is none, for the architectures asked for and keeps IEEE arithmetic unless told otherwise;
* buffer names come from the model and are printed into the source as they are, so they are made C identifiers.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc import config
from mlc.codegen import nvrtc
from mlc.errors import BuildError, CodeGenerationError
from mlc.runtime import CUDART

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

__all__ = [
    "PASS_CONFIG", "Compile", "architectures", "clustered", "distinct_shared", "find_nvcc", "has_nvcc", "keeping_nan",
    "legal_names", "machine_code", "nvcc", "options", "run_tool",
]

#: TVM's common-subexpression pass leaves its variables unused in CUDA source, and nvcc does that work itself;
#: copies that a schedule declares asynchronous are
PASS_CONFIG: Mapping[str, Any] = {"tirx.disable_cse_tir": True, "tirx.use_async_copy": True}

#: what makes machine code of a source for architectures
Compile = Callable[[str, Sequence[str]], bytes]

_CREATE = "ffi.Module.create.cuda"
_CALLBACK = "tvm_callback_cuda_compile"
_DRIVER = "libcuda.so.1"
#: the driver functions which that library names; 100 is CUDA_ERROR_NO_DEVICE
_DRIVER_FUNCTIONS = (
    "cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString", "cuLaunchKernelEx",
    "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled",
)
_NO_DEVICE = 100
_KERNEL = 'extern "C" __global__ '
#: how what TVM declares before kernels ends
_DECLARED = "#endif"
#: extrema as TVM writes them, of whichever type
_EXTREMUM = re.compile(r"(?<![\w.:])(max|min)\(")
#: CUDA's own extrema of floats give the number where one side is NaN; those of integers go on to them
_WITH_NAN = """
template <typename A, typename B> static __device__ __forceinline__ auto nan_{0}(A a, B b) {{ return {0}(a, b); }}
static __device__ __forceinline__ float nan_{0}(float a, float b) {{
#if __CUDA_ARCH__ >= 800
  float r;
  asm("{0}.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a != a || b != b ? a + b : {0}(a, b);
#endif
}}
static __device__ __forceinline__ double nan_{0}(double a, double b) {{
  return a != a || b != b ? a + b : {0}(a, b);
}}
"""
_NARROW_WITH_NAN = """
static __device__ __forceinline__ {1} nan_{0}({1} a, {1} b) {{ return __h{0}_nan(a, b); }}
"""
#: the header that declares a type of 16-bit floats, and its name
_NARROW = {"cuda_fp16.h": "__half", "cuda_bf16.h": "__nv_bfloat16"}
#: a kernel's call that lets a cluster of so many blocks meet
_MEET = re.compile(r"\bmlc_meet_cluster_(\d+)\(")
#: dynamic shared memory: alignment and type, and the name
_SHARED = re.compile(r"extern __shared__ (__align__\(\d+\) [\w ]+?) (\w+)\[\];")


def architectures(target: tvm.target.Target) -> tuple[str, ...]:
    """The GPU architectures (``sm_90``) that code for a ``cuda`` target is made for."""
    return tuple(str(target.attrs["arch"]).split(","))


@contextmanager
def machine_code(archs: Sequence[str], compile_with: Compile | None = None) -> Iterator[list[str]]:
    """Inside this context TVM builds CUDA functions into machine code for ``archs``; yields the sources so far.
    ``compile_with`` takes a compiler's place.

    Raises :class:`BuildError` on entry where there is no compiler, and :class:`CodeGenerationError` on exit where it
    refused the source.
    """
    import tvm

    compile_code = compile_with or _compiler()
    _load_runtime()
    previous = tvm.get_global_func(_CALLBACK, allow_missing=True)
    failures: list[CodeGenerationError] = []
    sources: list[str] = []

    def compile_source(source: str) -> bytes:
        sources.append(clustered(keeping_nan(distinct_shared(source))))
        try:
            return compile_code(sources[-1], archs)
        except BuildError as error:  # its type would not survive the way through TVM
            failures.append(CodeGenerationError(str(error)))
            raise

    tvm.register_global_func(_CALLBACK, compile_source, override=True)
    try:
        yield sources
    except Exception:
        if failures:
            raise failures[0] from None
        raise
    finally:
        if previous is not None:
            tvm.register_global_func(_CALLBACK, previous, override=True)


def distinct_shared(source: str) -> str:
    """Rename shared memory that kernels of a source declare with the same name but different types, since such
    declarations are global in a source."""
    first, *chunks = re.split(rf"(?=^{_KERNEL})", source, flags=re.MULTILINE)
    declared: dict[str, str] = {}
    parts = [first]
    for number, chunk in enumerate(chunks):
        for kind, name in _SHARED.findall(chunk):
            if declared.setdefault(name, kind) != kind:
                chunk = re.sub(rf"\b{name}\b", f"{name}_{number}", chunk)
        parts.append(chunk)
    return "".join(parts)


def keeping_nan(source: str) -> str:
    """Make maxima and minima of floats propagate NaN, as in ONNX and numpy; one instruction does so from ``sm_80`` on.
    """
    at = source.find(_KERNEL)
    used = sorted(set(_EXTREMUM.findall(source, at))) if at >= 0 else []
    if not used:
        return source
    declared = source.rindex(_DECLARED, 0, at) + len(_DECLARED)
    narrow = [name for header, name in _NARROW.items() if header in source[:declared]]
    definitions = "".join(
        _WITH_NAN.format(name) + "".join(_NARROW_WITH_NAN.format(name, kind) for kind in narrow) for name in used)
    return (f"{source[:declared]}\n#ifndef NAN_EXTREMA\n{definitions}{_DECLARED}\n{source[declared:at]}"
            + _EXTREMUM.sub(r"nan_\1(", source[at:]))


def clustered(source: str) -> str:
    """Declare the cluster size of kernels whose blocks form clusters (:func:`schedules.cuda.hopper.meet_cluster`): then
    neighbouring blocks are one however the kernel is launched."""
    first, *chunks = re.split(rf"(?=^{_KERNEL})", source, flags=re.MULTILINE)
    parts = [first]
    for chunk in chunks:
        found = _MEET.search(chunk)
        dims = f"void __cluster_dims__({found[1]}, 1, 1) " if found else "void "
        parts.append(chunk.replace("void ", dims, 1))
    return "".join(parts)


def _compiler() -> Compile:
    """nvcc, or else NVRTC; raises :class:`BuildError` where there is neither."""
    if not has_nvcc() and nvrtc.available():
        return nvrtc.compile_source
    find_nvcc()
    return nvcc


def nvcc(source: str, archs: Sequence[str], *, fast_math: bool = False) -> bytes:
    """Compile CUDA source to one fat binary: machine code for each of ``archs``, and PTX for later GPUs.

    Raises :class:`BuildError` with nvcc's first error.
    """
    command = [find_nvcc(), "--fatbin", *options(fast_math=fast_math), *_gencode(archs)]
    with tempfile.TemporaryDirectory(prefix="mlc-nvcc-") as folder:
        text, binary = Path(folder, "kernels.cu"), Path(folder, "kernels.fatbin")
        text.write_text(source, encoding="utf-8")
        run_tool([*command, "-o", str(binary), str(text)], f"CUDA source must compile for {', '.join(archs)}")
        return binary.read_bytes()


def options(*, fast_math: bool = False) -> list[str]:
    """How nvcc compiles everything, for whichever architecture."""
    return ["-O3", "-w", *(["--use_fast_math"] if fast_math else [])]


def _gencode(archs: Sequence[str]) -> list[str]:
    pairs = []
    for arch in archs:
        number = arch.removeprefix("sm_")
        pairs += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    plain = [arch.removeprefix("sm_") for arch in archs if arch[-1].isdigit()]  # sm_90a's PTX runs nowhere else
    if plain:
        newest = max(plain, key=int)
        pairs += ["-gencode", f"arch=compute_{newest},code=compute_{newest}"]
    return pairs


def has_nvcc() -> bool:
    """Whether the CUDA toolkit's compiler is there."""
    return shutil.which(config.get("MLC_NVCC")) is not None


def find_nvcc() -> str:
    """The CUDA toolkit's compiler; raises :class:`BuildError` where there is none."""
    name = config.get("MLC_NVCC")
    path = shutil.which(name)
    if path is None:
        raise BuildError(
            f"building for cuda needs nvcc or NVRTC, but {name!r} was not found, nor are PyPI's packages; "
            "install the CUDA toolkit 13 or set MLC_NVCC, or `pip install mlc[nvrtc]`"
        )
    return path


def run_tool(command: Sequence[str], must: str) -> str:
    """The output of a tool of the CUDA toolkit; raises :class:`BuildError` in one line that begins with ``must``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"{must}, but {command[0]} could not be run ({error.strerror}); check MLC_NVCC") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), "")
        reason = first or (lines[0] if lines else f"exit status {done.returncode}")
        name = Path(command[0]).name
        raise BuildError(f"{must}, but {name} refused: {reason}; see MLC_NVCC and the architectures it knows")
    return done.stdout + done.stderr


def _load_runtime() -> None:
    """Load TVM's CUDA runtime library, over a stand-in for the driver where this machine has none."""
    import tvm
    from tvm.base import _LOADED_LIBS
    from tvm_ffi.libinfo import load_lib_ctypes

    if tvm.get_global_func(_CREATE, allow_missing=True) is not None:
        return
    _load_cudart()
    try:
        ctypes.CDLL(_DRIVER, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        _load_stand_in()
    folder = Path(_LOADED_LIBS["tvm_runtime"]._name).resolve().parent
    try:
        library = load_lib_ctypes(
            package="tvm", target_name="tvm_runtime_cuda", extra_lib_paths=[folder], mode="RTLD_LOCAL"
        )
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"TVM's CUDA runtime library must load, but it did not ({error}); reinstall apache-tvm"
        ) from error
    _LOADED_LIBS["tvm_runtime_cuda"] = library


def _load_cudart() -> None:
    """Make ``libcudart`` known to the loader: from its own search path, else from beside the compiler."""
    folders = nvrtc.packaged("lib")
    if has_nvcc():
        root = Path(find_nvcc()).resolve().parent.parent
        folders += [root / "lib64", root / "lib"]
    for candidate in (CUDART, *(folder / CUDART for folder in folders)):
        try:
            ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise BuildError(
        f"building for cuda needs {CUDART}, but it is neither on the library path nor in the compiler's folders; "
        "install the CUDA toolkit 13 or set MLC_NVCC to its nvcc"
    )


def _load_stand_in() -> None:
    functions = "".join(f'extern "C" int {name}() {{ return {_NO_DEVICE}; }}\n' for name in _DRIVER_FUNCTIONS)
    names = (os.environ.get("CXX"), "g++", "gcc", "clang")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("building for cuda needs a C++ compiler, but g++, gcc and clang were not found; install g++")
    with tempfile.TemporaryDirectory(prefix="mlc-driver-") as folder:
        text, library = Path(folder, "driver.cc"), Path(folder, _DRIVER)
        text.write_text(functions, encoding="ascii")
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}"]
        run_tool([compiler, *flags, "-o", str(library), str(text)], "a stand-in for the driver must compile")
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # stays mapped after its file is gone


def legal_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same function with C identifiers for the names of parameters (``gpu_0/data_0`` is a model's input), and of
    the buffers that are called after them. They are of small letters: TVM (0.27) writes an ``mma`` with ``A``, ``B``
    and ``C`` for the operands, puts one name after the other in their place, and finds them in names too."""
    import tvm
    import tvm_ffi
    from tvm import s_tir

    named = list(func.params)
    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, lambda block: named.extend(block.alloc_buffers))])
    taken: set[str] = set()
    renamed: dict[Any, Any] = {}
    for param in named:
        name = re.sub(r"\W", "_", str(param.name), flags=re.ASCII).lower()
        if not name or name[0].isdigit():
            name = f"p_{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        if name != param.name:
            renamed[param] = tvm.ir.Var(name, param.ty)
    if not renamed:
        return func
    return tvm_ffi.structural_map(func, (tvm.ir.Var, lambda var: renamed.get(var, var)), order="pre")
