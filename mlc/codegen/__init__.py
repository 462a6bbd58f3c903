"""Code generation through TVM, in the same way for the candidates that are timed and for what is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from mlc.codegen import cuda
from mlc.codegen.inspection import DynamicShared, write_dump
from mlc.config import get
from schedules.cuda.lowering import PIPELINE as CUDA_PIPELINE
from schedules.lowering import PIPELINE
from schedules.math import expand_math
from schedules.nan_comparisons import keep_unordered

__all__ = ["code_generation", "pipeline", "prepared"]


def prepared(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """A scheduled function as code is generated from it."""
    return keep_unordered(expand_math(func) if target.kind.name == "llvm" else cuda.legal_names(func))


def pipeline(target: tvm.target.Target) -> str:
    """The name of TVM's lowering for a target's tensor functions."""
    return PIPELINE if target.kind.name == "llvm" else CUDA_PIPELINE


@contextmanager
def code_generation(
    target: tvm.target.Target, instruments: Sequence[Any] = (), compile_with: cuda.Compile | None = None
) -> Iterator[tvm.target.Target]:
    """Inside this context TVM builds functions for ``target``, watched by ``instruments``; ``compile_with`` takes the
    place of a GPU's compiler.

    Yields the target to build for: TVM's code generator for GPUs reads one architecture, and what it writes for the
    least is compiled for each of several. With ``MLC_DUMP_DIR``, the CUDA source is kept there.

    Raises :class:`mlc.errors.BuildError` and :class:`mlc.errors.CodeGenerationError` as
    :func:`mlc.codegen.cuda.machine_code` does.
    """
    config: dict[str, Any] = {}
    with ExitStack() as stack:
        if target.kind.name == "cuda":
            shared = DynamicShared()
            instruments = [*instruments, shared]
            config, archs = dict(cuda.PASS_CONFIG), cuda.architectures(target)
            target = tvm.target.Target({**target.export(), "arch": archs[0]})
            sources = stack.enter_context(cuda.machine_code(archs, compile_with))
        stack.enter_context(tvm.transform.PassContext(config=config, instruments=list(instruments)))
        stack.enter_context(target)
        yield target
        if target.kind.name == "cuda" and sources and get("MLC_DUMP_DIR"):
            write_dump(Path(get("MLC_DUMP_DIR")), sources[-1], shared.bytes)
