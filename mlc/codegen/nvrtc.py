"""Machine code through NVRTC, NVIDIA's runtime compiler, without a CUDA toolkit: ``pip install mlc[nvrtc]``.

It makes code for one architecture at a time, and brings no headers: those come from the same packages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlc.errors import BuildError

__all__ = ["available", "compile_source", "packaged"]

#: what nvcc's own headers declare and generated code uses
_PREAMBLE = """#include <cuda/std/limits>
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif
struct alignas(64) CUtensorMap { unsigned long long words[16]; };
"""


def packaged(name: str) -> list[Path]:
    """Folders of that name (``lib``, ``include``) in NVIDIA's packages from PyPI."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    return sorted(folder for root in roots for folder in root.glob(f"cu*/{name}") if folder.is_dir())


def available() -> bool:
    """Whether the compiler and its headers are installed."""
    try:
        found = importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False
    return found and any((folder / "cuda_fp16.h").is_file() for folder in packaged("include"))


def compile_source(source: str, archs: Sequence[str], *, fast_math: bool = False) -> bytes:
    """Compile CUDA source for one architecture; raises :class:`BuildError` with the compiler's first error, and for
    several architectures."""
    if len(archs) > 1:
        raise BuildError(f"code for several architectures must be made by nvcc, but NVRTC alone is there and "
                         f"{', '.join(archs)} were asked for; install the CUDA toolkit 13 or name one")
    from cuda.bindings import nvrtc

    include = [flag for folder in packaged("include") for flag in (f"-I{folder}", f"-I{folder}/cccl")]
    flags = [f"--gpu-architecture={archs[0]}", "-default-device", "--device-int128", "-w", *include,
             *(["--use_fast_math"] if fast_math else [])]
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram((_PREAMBLE + source).encode(), b"kernels.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"CUDA source must compile for {archs[0]}, but NVRTC refused: {_reason(nvrtc, program)}")
        code = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, answer: Any) -> Any:
    """The value of a call's answer; raises :class:`BuildError` where its status is an error."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC must work, but it said {status.name}; reinstall cuda-bindings and nvidia-cuda-nvrtc")
    return values[0] if values else None


def _reason(nvrtc: Any, program: Any) -> str:
    log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    lines = [line.strip() for line in log.decode(errors="replace").strip("\0").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")
