"""What a worker does with one task at hand: references, building, checking, timing."""

from __future__ import annotations

import math
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from mlc import threads
from mlc.codegen import prepared
from mlc.graph.task import from_json
from mlc.measure.data import STYLES, Param, mismatch, numpy_dtype, poison, random_arrays
from mlc.measure.gauge import Gauge, undisturbed
from mlc.measure.lowered import compile_hashed
from mlc.measure.protocol import Message
from mlc.measure.rotation import Rotation, copies_of
from mlc.measure.timing import Plan, time_candidate
from schedules.machine import gpu_machine, native_last_level
from schedules.trace import replay

__all__ = ["Failure", "Workbench", "params_of"]

#: candidates whose code is kept beyond their batch: the first of a task, and those that took at most so many times as
#: long as the best
_FIRST, _PROMISING, _KEPT = 2, 1.05, 48
_CACHE_BYTES = 1 << 30  # of inputs and references kept in a worker, besides those in use
#: seconds of a run after which nothing is timed again: its limit is near
_LONG = 1.0
#: a candidate that takes this many times as long as the best, the machine's slowness taken out, is not timed again
_HOPELESS = 1.15


class Failure(Exception):
    """A candidate failed in an orderly way; ``failure`` is the word for it in a record."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


@dataclass(frozen=True)
class _Built:
    """A candidate's machine code, ready to run; ``code`` is what it was built from."""

    module: Any
    function: Any
    code_hash: str
    code: tuple[str, ...] = ()


@dataclass
class _Data:
    """A task's inputs on the device and its reference outputs by position.

    ``turns`` are argument lists to call with in turn: the same activations, other copies of the weights.
    """

    params: tuple[Param, ...]
    tensors: list[Any]
    reference: dict[int, np.ndarray]
    turns: list[list[Any]]

    @property
    def size(self) -> int:
        sizes = [_size(p) for p in self.params]
        return sum(sizes) + sum(
            size for size, first, other in zip(sizes, self.turns[0], self.turns[-1], strict=True) if first is not other
        ) * (len(self.turns) - 1)


class Workbench:
    """The jobs of :mod:`mlc.measure.worker`, each a method from a message to its answer."""

    def __init__(self, thread_count: int) -> None:
        threads.configure(thread_count)
        self._threads = thread_count
        self._gauge: Gauge | None = None
        self._built: dict[int, _Built] = {}
        self._promising: OrderedDict[tuple[str, ...], _Built] = OrderedDict()
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
        """Replay, lower and compile; the code stays here under ``id`` until the next batch.

        What was promising when it ran stays longer: it is likely to be compared with others in the end.
        """
        if job["batch"] != self._batch:
            self._built.clear()
            self._batch = job["batch"]
        start = time.perf_counter()
        known = self._promising.get(_code(job))
        if known is not None:
            self._built[job["id"]] = known
            return {"code_hash": known.code_hash, "build_seconds": time.perf_counter() - start}
        target = tvm.target.Target(job["target"])
        try:
            func = _candidate(job, target)
            # as the compiled model has it; the reference keeps the library's functions and so checks these too
            built = _build(prepared(func, target), target)
        except Exception as error:
            raise Failure("build", _last_line(error)) from error
        self._built[job["id"]] = replace(built, code=_code(job))
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
            self._data.pop(_data_key(job), None)
            problem = self._check(built, job, device)
            if problem:
                raise Failure("wrong", problem)
        plan = Plan(**{field.name: job[field.name] for field in fields(Plan)})
        timer = _timer(built, device, self._task_data(job, device))

        def may_win(times: list[float], slowness: float) -> bool:
            if time.perf_counter() - start > _LONG:
                return False
            return not plan.best or median(times) < slowness * _HOPELESS * plan.best

        if tvm.target.Target(job["target"]).kind.name == "llvm":
            times, slowness = undisturbed(lambda: time_candidate(timer, plan), self._machine(job["target"]), may_win)
        else:  # of its own machine a GPU is the only user
            times, slowness = time_candidate(timer, plan), 1.0
        # of a task's first candidates, which have no best to beat, the first is its default
        if median(times) < _PROMISING * plan.best or (not plan.best and job["id"] < _FIRST):
            self._keep(built)
        return {"times": times, "slowness": slowness, "run_seconds": time.perf_counter() - start}

    def interleave(self, job: Message) -> Message:
        """Time the built candidates of ``runs`` in turn, ``rounds`` times each, in a new random order every round."""
        timers = {}
        for run in job["runs"]:
            device = _device(run["target"])
            timers[run["id"]] = _timer(self._built[run["id"]], device, self._task_data(run, device))
        counts = {
            number: max(1, math.ceil(job["min_repeat_seconds"] / estimate))
            for number, estimate in zip(timers, job["estimates"], strict=True)
        }
        order, rng = list(timers), random.Random(0)
        times: dict[int, list[float]] = {number: [] for number in order}
        for _ in range(job["rounds"]):
            rng.shuffle(order)
            for number in order:
                timers[number](1)  # the others' code and temporaries are in the caches now
                times[number].append(timers[number](counts[number]))
        return {"times": list(times.values())}

    def _machine(self, target: str) -> Gauge:
        if self._gauge is None:
            self._gauge = Gauge(self._threads, tvm.target.Target(target))
        return self._gauge

    def _keep(self, built: _Built) -> None:
        self._promising[built.code] = built
        self._promising.move_to_end(built.code)
        while len(self._promising) > _KEPT:
            self._promising.popitem(last=False)

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
        key = _data_key(job)
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


@lru_cache(maxsize=8)
def _function(text: str) -> tirx.PrimFunc:
    return from_json(text)


def _candidate(job: Message, target: tvm.target.Target) -> tirx.PrimFunc:
    if job["trace"]:
        with target:
            return replay(_function(job["func"]), job["trace"], target).mod["main"]
    return from_json(job["scheduled"]) if job["scheduled"] else _function(job["func"])


def _code(job: Message) -> tuple[str, ...]:
    """What a job's code is built from."""
    return job["func"], job["target"], job["trace"], job["scheduled"]


def _build(func: tirx.PrimFunc, target: tvm.target.Target) -> _Built:
    """Compile in this process."""
    runtime, code_hash = compile_hashed(func, target)
    return _Built(runtime, runtime.get_function("main", query_imports=True), code_hash)


def _data_key(job: Message) -> str:
    return f"{job['constants']}/{job['constant_bytes']}/{job['func']}"


def _load(job: Message, device: Any) -> _Data:
    params = params_of(_function(job["func"]))
    with np.load(job["reference"]) as saved:
        style = str(saved["style"])
        reference = {i: _reinterpret(saved[f"output{i}"], p.dtype) for i, p in enumerate(params) if p.output}
    arrays = random_arrays(params, style)
    tensors = [tvm.runtime.tensor(array, device) for array in arrays]
    return _Data(params, tensors, reference, _turns(job, device, params, arrays, tensors))


def _turns(
    job: Message, device: Any, params: Sequence[Param], arrays: Sequence[np.ndarray], tensors: list[Any]
) -> list[list[Any]]:
    """Argument lists with weights of their own, so many that a call finds them as cold as the model does."""
    constants = [i for i in job["constants"] if not params[i].output]
    size = sum(_size(params[i]) for i in constants)
    target = tvm.target.Target(job["target"])
    last_level = native_last_level() if target.kind.name == "llvm" else gpu_machine(target).l2_bytes
    count = copies_of(size, job["constant_bytes"], last_level)
    turns = [tensors]
    while len(turns) < count:
        turns.append([tvm.runtime.tensor(arrays[i], device) if i in constants else t for i, t in enumerate(tensors)])
    return turns


def _size(param: Param) -> int:
    return math.prod(param.shape) * numpy_dtype(param.dtype).itemsize


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


def _timer(built: _Built, device: Any, data: _Data) -> Callable[[int], float]:
    """Mean seconds a call of so many calls; activations stay in the caches, as far as they fit, between calls."""
    if len(data.turns) > 1:
        synchronise = () if device == tvm.cpu(0) else (device.sync,)
        return Rotation(built.function, data.turns, *synchronise).seconds

    def seconds(count: int) -> float:
        evaluator = built.module.time_evaluator("main", device, number=count, repeat=1)
        return float(evaluator(*data.tensors).results[0])

    return seconds


def _device(target: str) -> Any:
    return tvm.device("cuda", 0) if tvm.target.Target(target).kind.name == "cuda" else tvm.cpu(0)


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind not in "biu" and bool(np.isnan(array.astype(np.float32)).any())


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:500]
