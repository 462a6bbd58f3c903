"""What a worker does with one task at hand: references, building, checking, timing."""

from __future__ import annotations

import math
import os
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.instrument import pass_instrument

from mlc import threads
from mlc.graph.task import from_json
from mlc.measure.data import STYLES, Param, mismatch, numpy_dtype, poison, random_arrays
from mlc.measure.protocol import Message
from schedules.math import expand_math
from schedules.trace import replay

__all__ = ["Failure", "Workbench", "params_of"]

_LAST_SHARED_PASS = "tirx.MakePackedAPI"  # afterwards host and device code go separate ways
_CACHE_BYTES = 1 << 30  # of inputs and references kept in a worker, besides those in use


class Failure(Exception):
    """A candidate failed in an orderly way; ``failure`` is the word for it in a record."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


@dataclass(frozen=True)
class _Built:
    """A candidate's machine code, ready to run."""

    module: Any
    function: Any
    code_hash: str


@dataclass
class _Data:
    """A task's inputs on the device and its reference outputs by position."""

    params: tuple[Param, ...]
    tensors: list[Any]
    reference: dict[int, np.ndarray]

    @property
    def size(self) -> int:
        return sum(math.prod(p.shape) * numpy_dtype(p.dtype).itemsize for p in self.params)


class Workbench:
    """The jobs of :mod:`mlc.measure.worker`, each a method from a message to its answer."""

    def __init__(self, thread_count: int) -> None:
        threads.configure(thread_count)
        self._built: dict[int, _Built] = {}
        self._batch = -1
        self._data: OrderedDict[str, _Data] = OrderedDict()

    def reference(self, job: Message) -> Message:
        """Run the task's function as it stands, on the CPU, and leave its outputs in the file ``path``."""
        func = _function(job["func"])
        target = tvm.target.Target(job["target"])
        host = target if target.kind.name == "llvm" else target.host or tvm.target.Target("llvm")
        try:
            built = _build(func.without_attr("tirx.is_scheduled") if func.attrs else func, host)
        except Exception as error:
            raise Failure("build", _last_line(error)) from error
        params = params_of(func)
        for style in STYLES:
            arrays = random_arrays(params, style)
            tensors = [tvm.runtime.tensor(a) for a in arrays]
            built.function(*tensors)
            outputs = {i: t.numpy() for i, (p, t) in enumerate(zip(params, tensors, strict=True)) if p.output}
            if not any(_has_nan(a) for a in outputs.values()):
                _save(Path(job["path"]), style, outputs)
                return {}
        raise Failure("run", "its output has NaN for random inputs, so nothing can be compared with it")

    def build(self, job: Message) -> Message:
        """Replay, lower and compile; the code stays here under ``id`` until the next batch."""
        if job["batch"] != self._batch:
            self._built.clear()
            self._batch = job["batch"]
        start = time.perf_counter()
        target = tvm.target.Target(job["target"])
        try:
            func = _candidate(job, target)
            # as the compiled model has it; the reference keeps the library's functions and so checks these too
            built = _build(expand_math(func) if target.kind.name == "llvm" else func, target)
        except Exception as error:
            raise Failure("build", _last_line(error)) from error
        self._built[job["id"]] = built
        return {"code_hash": built.code_hash, "build_seconds": time.perf_counter() - start}

    def prepare(self, job: Message) -> Message:
        """Draw the task's inputs and read its reference, so that a run need not."""
        self._task_data(job, _device(job["target"]))
        return {}

    def run(self, job: Message) -> Message:
        """Compare the outputs with the reference, then time. The answer has ``times`` and ``run_seconds``."""
        start = time.perf_counter()
        built = self._built[job["id"]]
        device = _device(job["target"])
        problem = self._check(built, job, device)
        if problem:
            # an earlier candidate may have written over the data that this one is blamed with
            self._data.pop(job["func"], None)
            problem = self._check(built, job, device)
            if problem:
                raise Failure("wrong", problem)
        tensors = self._task_data(job, device).tensors
        times = _time(built, device, tensors, job)
        return {"times": times, "run_seconds": time.perf_counter() - start}

    def interleave(self, job: Message) -> Message:
        """Time the built candidates ``ids`` in turn, ``rounds`` times each, in a new random order every round."""
        device = _device(job["target"])
        tensors = self._task_data(job, device).tensors
        evaluators = {}
        for number, estimate in zip(job["ids"], job["estimates"], strict=True):
            count = max(1, math.ceil(job["min_repeat_seconds"] / estimate))
            evaluators[number] = self._built[number].module.time_evaluator("main", device, number=count, repeat=1)
        order, rng = list(evaluators), random.Random(0)
        times: dict[int, list[float]] = {number: [] for number in order}
        for _ in range(job["rounds"]):
            rng.shuffle(order)
            for number in order:
                times[number].extend(evaluators[number](*tensors).results)
        return {"times": [times[number] for number in job["ids"]]}

    def _check(self, built: _Built, job: Message, device: Any) -> str:
        data = self._task_data(job, device)
        for position, expected in data.reference.items():
            data.tensors[position].copyfrom(poison(expected))
        built.function(*data.tensors)
        for position, expected in data.reference.items():
            problem = mismatch(data.tensors[position].numpy(), expected, job["rtol"])
            if problem:
                return problem
        return ""

    def _task_data(self, job: Message, device: Any) -> _Data:
        key = job["func"]
        data = self._data.pop(key, None)
        if data is None:
            data = _load(job, device)
            while self._data and sum(d.size for d in self._data.values()) + data.size > _CACHE_BYTES:
                self._data.popitem(last=False)
        self._data[key] = data
        return data


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
    """What ``param``'s integers must stay below, where other loads are indexed with them; see :class:`Param`."""
    if "int" not in str(param.dtype):
        return ()
    found: list[tuple[Any, int]] = []  # the place in the last axis (None: any) and the extent that is indexed

    def note(load: tvm.ir.TensorLoad) -> None:
        for extent, index in zip(load.source.shape, load.indices, strict=True):
            tvm_ffi.structural_walk(index, [(tvm.ir.TensorLoad, lambda inner, n=int(extent): uses(inner, n))])

    def uses(inner: tvm.ir.TensorLoad, extent: int) -> None:
        if inner.source.same_as(param):
            last = inner.indices[-1] if inner.indices else None
            found.append((int(last) if isinstance(last, tirx.IntImm) else None, extent))

    tvm_ffi.structural_walk(func.body, [(tvm.ir.TensorLoad, note)])
    if not found:
        return ()
    last_axis = int(param.shape[-1]) if len(param.shape) else 1
    if last_axis == 1 or any(place is None for place, _ in found):
        return (min(extent for _, extent in found),)
    largest = max(extent for _, extent in found)
    return tuple(min((e for p, e in found if p == k), default=largest) for k in range(last_axis))


@lru_cache(maxsize=8)
def _function(text: str) -> tirx.PrimFunc:
    return from_json(text)


def _candidate(job: Message, target: tvm.target.Target) -> tirx.PrimFunc:
    if job["trace"]:
        with target:
            return replay(_function(job["func"]), job["trace"]).mod["main"]
    return from_json(job["scheduled"]) if job["scheduled"] else _function(job["func"])


@pass_instrument
class _Lowered:
    """Catches the module when it is lowered as far as host and device share, to hash what will be compiled."""

    def __init__(self) -> None:
        self.code_hash = ""

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name == _LAST_SHARED_PASS:
            self.code_hash = f"{tvm_ffi.structural_hash(mod, map_free_vars=True) & (2**64 - 1):016x}"


def _build(func: tirx.PrimFunc, target: tvm.target.Target) -> _Built:
    """Compile in this process; for the CPU the code goes straight to memory, without a linker."""
    lowered = _Lowered()
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with target, tvm.transform.PassContext(instruments=[lowered]):
        runtime = tvm.compile(module, target).jit()
    return _Built(runtime, runtime.get_function("main", query_imports=True), lowered.code_hash)


def _load(job: Message, device: Any) -> _Data:
    params = params_of(_function(job["func"]))
    with np.load(job["reference"]) as saved:
        style = str(saved["style"])
        reference = {i: _reinterpret(saved[f"output{i}"], p.dtype) for i, p in enumerate(params) if p.output}
    tensors = [tvm.runtime.tensor(array, device) for array in random_arrays(params, style)]
    return _Data(params, tensors, reference)


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


def _reinterpret(array: np.ndarray, dtype: str) -> np.ndarray:
    """Inverse of :func:`_nameable`."""
    wanted = numpy_dtype(dtype)
    return array if array.dtype == wanted else array.view(wanted)[..., 0]


def _time(built: _Built, device: Any, tensors: list[Any], job: Message) -> list[float]:
    """Seconds a call, one figure for each repeat; inputs stay in the caches, as far as they fit, between calls."""
    for _ in range(job["warmup_runs"] - 1):  # the check was a run too
        built.function(*tensors)
    single = built.module.time_evaluator("main", device, number=1, repeat=1)
    first = float(single(*tensors).results[0])
    if job["cutoff"] and first > job["cutoff"]:
        return [first]
    count, repeats, shortest = 1, job["repeats"] - 1, 0
    if first < job["min_repeat_seconds"]:  # one call is too short to be timed alone
        count = math.ceil(job["min_repeat_seconds"] / max(first, 1e-7))
        repeats, shortest = job["repeats"], math.ceil(job["min_repeat_seconds"] * 1e3)
    if not repeats:
        return [first]
    timed = built.module.time_evaluator("main", device, number=count, repeat=repeats, min_repeat_ms=shortest)
    times = [float(t) for t in timed(*tensors).results]
    return times if shortest else [first, *times]


def _device(target: str) -> Any:
    return tvm.device("cuda", 0) if tvm.target.Target(target).kind.name == "cuda" else tvm.cpu(0)


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind not in "biu" and bool(np.isnan(array.astype(np.float32)).any())


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:500]
