"""Links scheduled functions and the calls between them into a shared library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import tvm
from tvm import tirx
from tvm.relax import transform

from mlc.artifact.argument_checks import CheckCalls, CheckWeights
from mlc.artifact.capture import CaptureGraph
from mlc.artifact.machine_code import generated, object_names
from mlc.artifact.memory import AddEntryInto, ViewConcats, ViewSlices, WriteStates
from mlc.artifact.schedule import last_line
from mlc.codegen import code_generation, pipeline
from mlc.errors import BuildError, MlcError
from mlc.link import find_linker, link_shared
from mlc.target import Target

__all__ = ["FINALISE", "finalise", "refusal", "shared_library"]

#: from calls in the dataflow form to the virtual machine's instructions; nothing here chooses or schedules anything
FINALISE: tuple[tvm.transform.Pass, ...] = (
    transform.ToNonDataflow(),
    transform.RemovePurityChecking(),
    transform.CallTIRRewrite(),
    CheckCalls,
    WriteStates,
    ViewConcats,
    ViewSlices,
    AddEntryInto,
    transform.StaticPlanBlockMemory(),
    CaptureGraph,
    CheckWeights,
    transform.LowerAllocTensor(),
    transform.KillAfterLastUse(),
    transform.LowerRuntimeBuiltin(),
    transform.ComputePrimValue(),
    transform.VMShapeLower(),
    transform.AttachGlobalSymbol(),
)

#: what TVM's export calls its object files: tensor functions of one target or two, and the calls between them
_OBJECTS = ("lib0.o", "lib1.o", "devc.o")


def finalise(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Plan the memory of ``main`` and lower it to calls of the virtual machine; raises :class:`BuildError`."""
    try:
        with target.tvm:
            passes = [each for each in FINALISE if each is not CaptureGraph or target.kind == "cuda"]
            return tvm.transform.Sequential(passes)(mod)
    except Exception as error:
        raise BuildError(f"the calls of main must lower for {target.canonical}, but a pass failed: {last_line(error)}; "
                         "MLC_DUMP_DIR=DIR writes what it was given") from error


def shared_library(mod: tvm.IRModule, target: Target) -> bytes:
    """Compile and link a finalised module of scheduled functions.

    Raises :class:`CodeGenerationError` where some function cannot be compiled (:func:`refusal` tells which) and
    :class:`BuildError` where the code cannot be linked.
    """
    find_linker(target.architecture)  # says what is missing before minutes are spent
    try:
        with tempfile.TemporaryDirectory(prefix="mlc-build-") as folder, _objects_in_memory(Path(folder)) as files:
            executable, objects = generated(mod, target, Path(folder))
            path = Path(folder, "code.so")
            link = partial(link_shared, files=files, architecture=target.architecture)
            executable.export_library(str(path), fcompile=link, workspace_dir=folder, addons=objects)
            return path.read_bytes()
    except MlcError:
        raise
    except OSError as error:
        raise BuildError(f"the compiled code must fit into the folder for temporary files, but {error}; make room, "
                         "or name another folder in TMPDIR") from error
    except Exception as error:
        raise BuildError(f"the code for {target.canonical} must be written as a library, but that failed: "
                         f"{last_line(error)}") from error


def refusal(func: tirx.PrimFunc, target: Target) -> str:
    """Why a scheduled function does not compile alone, in one line; empty where it does."""
    mod = tvm.IRModule({str(func.attrs["global_symbol"]): func})
    try:
        with code_generation(target.tvm) as single:
            tirx.build(mod, target=single, pipeline=pipeline(single))
    except Exception as error:
        return last_line(error)
    return ""


@contextmanager
def _objects_in_memory(folder: Path) -> Iterator[Sequence[int]]:
    """The object files that TVM will write into ``folder`` as links to files in memory, where the system has such.

    LLVM ends the whole process where an object file finds no room. Yields the descriptors that a linker must inherit.
    """
    if not hasattr(os, "memfd_create"):
        yield ()
        return
    with ExitStack() as stack:
        files = []
        for name in (*_OBJECTS, *object_names()):
            files.append(os.memfd_create(name))
            stack.callback(os.close, files[-1])
            Path(folder, name).symlink_to(f"/proc/self/fd/{files[-1]}")
        yield files
