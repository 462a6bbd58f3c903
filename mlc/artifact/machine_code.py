"""Compiles a model's tensor functions with LLVM, on all cores.

LLVM takes half of the time that a build does, and TVM hands it a whole model as one module, which one core compiles.
Here the functions are dealt to a module for each of several threads, which TVM lets go on beside each other, and the
linker has them together again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import vm_build

from mlc.artifact.schedule import last_line
from mlc.codegen import code_generation, pipeline
from mlc.config import physical_cores
from mlc.errors import CodeGenerationError, MlcError
from mlc.target import Target

__all__ = ["generated", "object_names"]

_LOG = logging.getLogger("mlc.build")

#: the most modules that the functions are dealt to, and how many for each core, so that none waits long for the last
_PARTS, _EACH = 64, 3
#: models of fewer functions are one module
_SEVERAL = 4


def generated(mod: tvm.IRModule, target: Target, folder: Path) -> tuple[relax.VMExecutable, list[str]]:
    """The virtual machine's executable of a finalised module, and the object files in ``folder`` that go with it, which
    are some of :func:`object_names`.

    TVM's lowering is called without the pipelines around it, which would legalise and schedule once more. Raises
    :class:`CodeGenerationError`, and OSError for an object that cannot be written.
    """
    builder = relax.ExecBuilder()
    try:
        left = vm_build._vmcodegen(builder, mod)
    except Exception as error:
        raise _refused(target, error) from error
    functions = {var: func for var, func in left.functions_items() if isinstance(func, tirx.PrimFunc)}
    parts = [tvm.IRModule(part, attrs=left.attrs) for part in _dealt(functions, target)]
    objects = [str(folder / name) for name in object_names()[: max(0, len(parts) - 1)]]
    with ThreadPoolExecutor(physical_cores(), "mlc-code") as pool:
        others = [pool.submit(_object, *each, target) for each in zip(parts[1:], objects, strict=True)]
        try:
            _LOG.info("generating code")
            first = _library(parts[0], target) if parts else None
            for place, other in enumerate(as_completed(others), 2):
                other.result()
                _LOG.info("generating code, part %d of %d done", place, len(parts))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    try:
        return relax.VMExecutable(vm_build._ffi_api.VMLink(builder, target.tvm, first, [], {})), objects
    except Exception as error:
        raise _refused(target, error) from error


def object_names() -> list[str]:
    """The possible names of the object files of :func:`generated`, in order."""
    return [f"part{place}.o" for place in range(1, min(_EACH * physical_cores() + 1, _PARTS))]


def _dealt(functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc], target: Target) -> list[dict[Any, tirx.PrimFunc]]:
    """The functions of each module. Of several, the first one is written by whoever exports the executable, after all
    others: it has one function."""
    names = sorted(functions, key=lambda var: str(var.name_hint))
    cores = physical_cores()
    if target.kind != "llvm" or cores == 1 or len(names) < _SEVERAL:
        return [dict(functions)] if functions else []
    count = min(len(object_names()), len(names) - 1)
    rest: Sequence[tvm.ir.GlobalVar] = names[1:]
    return [{var: functions[var] for var in part} for part in (names[:1], *(rest[i::count] for i in range(count)))]


def _object(part: tvm.IRModule, path: str, target: Target) -> None:
    _library(part, target).write_to_file(path)


def _library(part: tvm.IRModule, target: Target) -> tvm.runtime.Module:
    try:
        with code_generation(target.tvm) as single:
            return tirx.build(part, target=single, pipeline=pipeline(single))
    except MlcError:
        raise
    except Exception as error:
        raise _refused(target, error) from error


def _refused(target: Target, error: Exception) -> CodeGenerationError:
    return CodeGenerationError(f"the module must compile for {target.canonical}, but TVM refused it: "
                               f"{last_line(error)}; MLC_DUMP_DIR=DIR writes what it was given")
