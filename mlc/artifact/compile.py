"""From a lowered module to an executable: apply the log's schedules, plan memory, generate code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from mlc.artifact import emit, runtime, weights
from mlc.artifact.codegen_fallback import replace_refused
from mlc.artifact.cpu_features import required_features
from mlc.artifact.executable import Executable
from mlc.artifact.schedule import Lookup, Origins, schedule_functions
from mlc.config import get
from mlc.errors import CodeGenerationError
from mlc.frontend.model import TensorSpec, imported
from mlc.graph.algorithms.filters import TRANSFORMED, Filters, transform_weight
from mlc.graph.ir.printed import as_script
from mlc.graph.tasks import called_functions
from mlc.shapes import to_json
from mlc.target import Target
from schedules.alignment import BYTES

__all__ = ["ModelMeta", "compile_module"]


@dataclass(frozen=True)
class ModelMeta:
    """The model's metadata in an artifact: its name, and the names, shapes and types of inputs and outputs in
    ``main``'s order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: the inputs that are memory of the caller's to which a call adds
    states: tuple[str, ...] = ()
    #: for each tensor function, by symbol, the model's nodes that each call of it comes from
    origins: Origins = field(default_factory=dict)
    #: by the address of a constant, the filters that it is made of, which are stored in its place
    filters: Mapping[int, Filters] = field(default_factory=dict)


def compile_module(
    mod: tvm.IRModule, target: Target, lookup: Lookup | None = None, meta: ModelMeta | None = None
) -> Executable:
    """Compile a module that :func:`mlc.graph.pipeline.optimise` has lowered.

    ``lookup`` gives the log's best record of a task; where it has none, the function's search space decides.
    A function that fails in code generation gets another schedule, with a warning
    (:mod:`mlc.artifact.codegen_fallback`). ``meta``, if left out, is read from ``main``. With ``MLC_DUMP_DIR``, the
    modules that are compiled are written there as text. Raises :class:`mlc.errors.BuildError` in one line, with the
    name of the function that cannot be scheduled or compiled.
    """
    if meta is None:
        model = imported(mod, "module")
        meta = ModelMeta(model.name, model.inputs, model.outputs)
    scheduled, functions, twins = schedule_functions(mod, target, lookup or (lambda _task: None), meta.origins)
    try:
        made = _generate(scheduled, twins, target)
    except CodeGenerationError as error:
        scheduled, functions = replace_refused(scheduled, functions, called_functions(mod, target), target, error)
        made = _generate(scheduled, twins, target)
    stored = [_stored(tensor, meta.filters) for tensor in made.tensors]
    metadata = {
        **_border(meta, made.aliased), **_place(target),
        "functions": [function.to_json() for function in functions],
        "weights": [entry for entry, _ in stored],
    }
    return Executable(made.code, metadata, [data for _, data in stored])


@dataclass(frozen=True)
class _Made:
    """A shared library, the weights that it is called with, and which outputs are its own memory."""

    code: bytes
    tensors: Sequence[tvm.runtime.Tensor]
    aliased: Sequence[bool]


def _generate(scheduled: tvm.IRModule, twins: Mapping[str, str], target: Target) -> _Made:
    lifted, tensors = weights.lift(scheduled, twins)
    aliased = weights.aliased_outputs(lifted["main"])
    _dump("scheduled", scheduled)
    final = emit.finalise(lifted, target)
    _dump("final", final)
    return _Made(emit.shared_library(final, target), tensors, aliased)


def _border(meta: ModelMeta, aliased: Sequence[bool]) -> dict[str, Any]:
    def entry(spec: TensorSpec) -> dict[str, Any]:
        length = {"length": list(spec.length)} if spec.length is not None else {}
        return {"name": spec.name, "shape": to_json(spec.shape), "dtype": spec.dtype, **length}

    return {
        "name": meta.name,
        **({"states": list(meta.states)} if meta.states else {}),
        "inputs": [entry(spec) for spec in meta.inputs],
        "outputs": [{**entry(spec), "aliased": own} for spec, own in zip(meta.outputs, aliased, strict=True)],
    }


def _place(target: Target) -> dict[str, Any]:
    """Metadata of the device, the alignment of inputs, and the versions of what built the code."""
    return {
        **({"alignment": BYTES} if target.kind == "llvm" else {}),
        "target": target.canonical, "target_attrs": target.attrs, "kind": target.kind, "threads": target.threads,
        "machine": target.architecture, "features": list(required_features(target.tvm)), "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    from importlib import metadata

    return {
        "mlc": metadata.version("mlc"), "tvm": runtime.version(),
        "llvm": str(tvm.target.codegen.llvm_version_major(allow_none=True)),
    }


def _stored(tensor: tvm.runtime.Tensor, filters: Mapping[int, Filters]) -> tuple[dict[str, Any], np.ndarray]:
    """A weight's entry in the metadata, and its bytes: those of the untransformed filters if it was made of some."""
    data, found = _bytes(tensor), filters.get(int(tensor.data_ptr()))
    if found is not None:  # an address may have come to belong to another constant
        again = transform_weight(found.weight, TRANSFORMED[found.algorithm])
        if np.array_equal(again.reshape(-1).view(np.uint8), data):
            entry = {"shape": list(found.weight.shape), "dtype": "float32", "made": found.algorithm}
            return entry, found.weight.reshape(-1).view(np.uint8)
    return {"shape": [int(d) for d in tensor.shape], "dtype": str(tensor.dtype)}, data


def _bytes(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """A tensor's memory as bytes; copied only where it is not aligned as compiled code wants it."""
    size = int(np.prod(tensor.shape, dtype=np.int64)) * ((tensor.dtype.bits + 7) // 8)
    if not size:
        return np.empty(0, np.uint8)
    data = np.from_dlpack(runtime.view(tensor, (size,), "uint8"))
    if data.ctypes.data % runtime.ALIGNMENT:
        aligned = np.from_dlpack(runtime.empty_tensor((size,), "uint8"))
        aligned[...] = data
        return aligned
    return data


def _dump(name: str, mod: tvm.IRModule) -> None:
    if get("MLC_DUMP_DIR"):
        folder = Path(get("MLC_DUMP_DIR"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"build_{name}.py").write_text(as_script(mod), encoding="utf-8")
