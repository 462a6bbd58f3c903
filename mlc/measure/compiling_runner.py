"""A worker's runner that compiles: reference outputs of a task, and candidates' code, either to run here or as
libraries for other machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from cost_model.nests import read_function
from mlc.codegen import prepared
from mlc.graph.task import from_json
from mlc.measure.data import STYLES, Param, random_arrays
from mlc.measure.gauge import arrays, clock_of
from mlc.measure.lowered import arithmetic, compile_hashed, export_hashed
from mlc.measure.protocol import Message
from mlc.measure.runner import Failure, Runner, last_line
from schedules.machine import gpu_machine
from schedules.registry import all_spaces
from schedules.space import schedule_with
from schedules.trace import replay

__all__ = ["CompilingRunner", "params_of"]

#: arithmetic operations that a thread of a CPU does in plain loops within a second or so
_MANY_STEPS = 1e9


class CompilingRunner(Runner):
    """The jobs of :mod:`mlc.measure.worker`, each a method from a message to its answer."""

    def reference(self, job: Message) -> Message:
        """Run the task's function as it stands, on the CPU, and leave its outputs in the file ``path``. The answer has
        its ``params``.

        A GPU's function of more than :data:`_MANY_STEPS` runs there, a thread for each result: in plain loops of one
        thread a product of 4,096 cubed takes minutes.
        """
        func = _function(job["func"])
        target = tvm.target.Target(job["target"])
        try:
            module, synchronise, tensor_of = self._plain(func, target, job)
        except Exception as error:
            raise Failure("build", last_line(error)) from error
        params = params_of(func)
        for style in STYLES:
            tensors = [tensor_of(a) for a in random_arrays(params, style)]
            self._entry(module)(*tensors)
            for wait in synchronise:
                wait()
            outputs = {i: t.numpy() for i, (p, t) in enumerate(zip(params, tensors, strict=True)) if p.output}
            if not any(_has_nan(a) for a in outputs.values()):
                _save(Path(job["path"]), style, outputs)
                return {"params": [asdict(param) for param in params]}
        raise Failure("run", "its output has NaN for random inputs, so nothing can be compared with it")

    def _plain(
        self, func: tirx.PrimFunc, target: tvm.target.Target, job: Message
    ) -> tuple[Any, tuple[Callable[[], None], ...], Callable[[np.ndarray], Any]]:
        """The function without a schedule that was searched for: a module, what waits for its calls, and what makes its
        tensors."""
        scheduled = bool(func.attrs) and "tirx.is_scheduled" in func.attrs
        if target.kind.name != "llvm" and not scheduled and _operations(func) > _MANY_STEPS:
            space = all_spaces(target.kind.name)[-1]
            plain = schedule_with(space, func, target, next(space.seeds(func, target))).mod["main"]
            module, _ = _build(prepared(plain, target), target)
            return module, self._synchronise(job), partial(self._tensor, job=job)
        host = target if target.kind.name == "llvm" else target.host or tvm.target.Target("llvm")
        module, _ = _build(func.without_attr("tirx.is_scheduled") if func.attrs else func, host)
        return module, (), tvm.runtime.tensor

    def export(self, job: Message) -> Message:
        """Replay, lower and compile for any CPU; the library is in the file ``path``."""
        start = time.perf_counter()
        target = tvm.target.Target(job["target"])
        try:
            func = arithmetic(job["threads"]) if job["gauge"] else prepared(_candidate(job, target), target)
            code_hash = export_hashed(func, target, Path(job["path"]), job["architecture"])
        except Exception as error:
            raise Failure("build", last_line(error)) from error
        return {"code_hash": code_hash, "build_seconds": time.perf_counter() - start}

    def _module(self, job: Message) -> tuple[Any, str]:
        """Replay, lower and compile."""
        target = tvm.target.Target(job["target"])
        # as the compiled model has it; the reference keeps the library's functions and so checks these too
        return _build(prepared(_candidate(job, target), target), target)

    def _params(self, job: Message) -> tuple[Param, ...]:
        return params_of(_function(job["func"]))

    def _clock(self, job: Message) -> Callable[[], float]:
        module, _ = compile_hashed(arithmetic(self._threads), tvm.target.Target(job["target"]))
        return clock_of(partial(self._entry(module), *(tvm.runtime.tensor(array) for array in arrays(self._threads))))

    def _on_cpu(self, job: Message) -> bool:
        return bool(tvm.target.Target(job["target"]).kind.name == "llvm")

    def _last_level(self, job: Message) -> int:
        target = tvm.target.Target(job["target"])
        return super()._last_level(job) if target.kind.name == "llvm" else gpu_machine(target).l2_bytes

    def _synchronise(self, job: Message) -> tuple[Callable[[], None], ...]:
        return () if self._on_cpu(job) else (tvm.device("cuda", 0).sync,)

    def _tensor(self, array: np.ndarray, job: Message) -> Any:
        return tvm.runtime.tensor(array, tvm.cpu(0) if self._on_cpu(job) else tvm.device("cuda", 0))

    def _read(self, tensor: Any, dtype: str) -> np.ndarray:
        found: np.ndarray = tensor.numpy()
        return found

    def _write(self, tensor: Any, array: np.ndarray) -> None:
        tensor.copyfrom(array)


def params_of(func: tirx.PrimFunc) -> tuple[Param, ...]:
    """The buffer parameters of a function with static shapes; one is an output if it is stored to.

    Where no store is found (a body of opaque calls), the last one is, as everywhere in TVM.
    """
    written: list[Any] = []

    def note(store: tirx.BufferStore) -> None:
        written.append(store.buffer)

    tvm_ffi.structural_walk(func.body, [(tirx.BufferStore, note)])
    stored = [any(p.same_as(buffer) for buffer in written) for p in func.params]
    if not any(stored):
        stored[-1] = True
    return tuple(
        Param(tuple(int(n) for n in p.shape), str(p.dtype), output, _index_limits(func, p))
        for p, output in zip(func.params, stored, strict=True)
    )


def _index_limits(func: tirx.PrimFunc, param: Any) -> tuple[int, ...]:
    """The bound of ``param``'s integers if other loads are indexed with them; see :class:`Param`."""
    if "int" not in str(param.dtype):
        return ()
    found: list[tuple[Any, int]] = []  # the place in the last axis (None: any) and the extent that is indexed
    sources = _copied_from(func, param)

    def note(load: tvm.ir.TensorLoad) -> None:
        for extent, index in zip(load.source.shape, load.indices, strict=True):
            tvm_ffi.structural_walk(index, [(tvm.ir.TensorLoad, lambda inner, n=int(extent): uses(inner, n))])

    def uses(inner: tvm.ir.TensorLoad, extent: int) -> None:
        if inner.source.same_as(param):
            last = inner.indices[-1] if inner.indices else None
            found.append((int(last) if isinstance(last, tirx.IntImm) else None, extent))
        elif any(inner.source.same_as(buffer) for buffer in sources):
            found.append((None, extent))

    tvm_ffi.structural_walk(func.body, [(tvm.ir.TensorLoad, note)])
    if not found:
        return ()
    last_axis = int(param.shape[-1]) if len(param.shape) else 1
    if last_axis == 1 or any(place is None for place, _ in found):
        return (min(extent for _, extent in found),)
    largest = max(extent for _, extent in found)
    return tuple(min((e for p, e in found if p == k), default=largest) for k in range(last_axis))


def _copied_from(func: tirx.PrimFunc, param: Any) -> list[Any]:
    """Intermediate buffers whose values are ``param``'s, rearranged or worked on."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(func.body, [(tirx.BufferStore, stores.append)])
    found = [param]
    for store in stores:  # producers come before consumers
        read: list[Any] = []
        tvm_ffi.structural_walk(store.value, [(tvm.ir.TensorLoad, lambda load, out=read: out.append(load.source))])
        if any(source.same_as(buffer) for source in read for buffer in found):
            found.append(store.buffer)
    return found[1:]


def _operations(func: tirx.PrimFunc) -> float:
    return sum(nest.flops for nest in read_function(func).nests)


@lru_cache(maxsize=8)
def _function(text: str) -> tirx.PrimFunc:
    return from_json(text)


def _candidate(job: Message, target: tvm.target.Target) -> tirx.PrimFunc:
    if job["trace"]:
        with target:
            return replay(_function(job["func"]), job["trace"], target).mod["main"]
    return from_json(job["scheduled"]) if job["scheduled"] else _function(job["func"])


def _build(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Any, str]:
    """Compile in this process."""
    return compile_hashed(func, target)


def _save(path: Path, style: str, outputs: dict[int, np.ndarray]) -> None:
    """Write the whole file or none: other workers read it."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    arrays = {f"output{i}": _nameable(array) for i, array in outputs.items()}
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, style=np.array(style), **arrays)
    part.replace(path)


def _nameable(array: np.ndarray) -> np.ndarray:
    """``array``, or its bytes along a last axis of their own if numpy's files have no name for its type."""
    if array.dtype.kind in "biuf":
        return array
    return np.ascontiguousarray(array)[..., None].view(np.uint8)


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind not in "biu" and bool(np.isnan(array.astype(np.float32)).any())
