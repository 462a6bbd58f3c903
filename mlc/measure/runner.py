"""The part of a worker that is independent of where code comes from: it makes inputs, checks outputs and times a
candidate. Subclasses obtain the code: :mod:`mlc.measure.compiling_runner` compiles it, and
:mod:`mlc.measure.prebuilt_runner` loads libraries that were built elsewhere.

Needs only numpy and TVM's runtime library, and so does everything that it imports.
"""

from __future__ import annotations

import math
import random
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np

from mlc import runtime, threads
from mlc.cpu import tiles_granted
from mlc.measure.data import Param, mismatch, numpy_dtype, poison, random_arrays
from mlc.measure.gauge import Gauge, undisturbed
from mlc.measure.protocol import Message
from mlc.measure.rotation import Rotation, copies_of
from mlc.measure.timing import Pace, Plan, time_candidate
from schedules.caches import native_last_level

__all__ = ["ENTRY", "Built", "Failure", "Runner", "last_line"]

#: the function of a candidate's module
ENTRY = "main"
#: candidates whose code is kept beyond their batch: the first of a task, and those that took at most so many times as
#: long as the best
_FIRST, _PROMISING, _KEPT = 2, 1.05, 48
_CACHE_BYTES = 1 << 30  # of inputs and references kept in a worker, besides those in use
#: seconds of a run after which nothing is timed again: its limit is near
_LONG = 1.0
#: seconds of a baseline's call beyond which candidates are timed without it: they take long enough by themselves
_LONG_BASELINE = 0.25
#: a candidate that takes this many times as long as the best, the machine's slowness taken out, is not timed again
_HOPELESS = 1.15


class Failure(Exception):
    """A candidate failed in an orderly way; ``failure`` is the word for it in a record."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


@dataclass(frozen=True)
class Built:
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


class Runner:
    """The jobs of :mod:`mlc.measure.worker` that need no compiler, each a method from a message to its answer."""

    def __init__(self, thread_count: int) -> None:
        threads.configure(thread_count)
        tiles_granted()  # a candidate may use them
        self._threads = thread_count
        self._gauge: Gauge | None = None
        self._built: dict[int, Built] = {}
        self._promising: OrderedDict[tuple[str, ...], Built] = OrderedDict()
        self._baselines: dict[str, Built] = {}
        self._batch = -1
        self._data: OrderedDict[str, _Data] = OrderedDict()

    def build(self, job: Message) -> Message:
        """Make a candidate's code ready to run; it stays here under ``id`` until the next batch.

        What was promising when it ran stays longer: it is likely to be compared with others in the end.
        """
        if job["batch"] != self._batch:
            self._built.clear()
            self._batch = job["batch"]
        start = time.perf_counter()
        built = self._built[job["id"]] = self._made(job)
        return {"code_hash": built.code_hash, "build_seconds": time.perf_counter() - start}

    def hold(self, job: Message) -> Message:
        """Make a task's baseline ready, until a later job's ``forget`` has its ``name``."""
        for name in job["forget"]:
            self._baselines.pop(name, None)
        self._baselines[job["name"]] = self._made(job)
        return {}

    def prepare(self, job: Message) -> Message:
        """Draw the task's inputs and read its reference, so that a run need not."""
        self._task_data(job)
        return {}

    def run(self, job: Message) -> Message:
        """Compare the outputs with the reference, then time. The answer has ``times`` and ``run_seconds``."""
        start = time.perf_counter()
        built = self._built[job["id"]]
        problem = self._check(built, job)
        if problem:
            # an earlier candidate may have written over the data that this one is blamed with
            self._data.pop(_data_key(job), None)
            problem = self._check(built, job)
            if problem:
                raise Failure("wrong", problem)
        plan = Plan(**{field.name: job[field.name] for field in fields(Plan)})
        timer = self._timer(built, job)

        def may_win(times: list[float], slowness: float) -> bool:
            if time.perf_counter() - start > _LONG:
                return False
            return not plan.best or median(times) < slowness * _HOPELESS * plan.best

        baseline = self._baselines.get(job["baseline"])
        if baseline is not None and 0 < job["baseline_seconds"] < _LONG_BASELINE:
            pace = Pace(self._timer(baseline, job), job["baseline_seconds"], plan.min_repeat_seconds)
            times, slowness = time_candidate(timer, plan, pace), 1.0
        elif self._on_cpu(job):
            times, slowness = undisturbed(lambda: time_candidate(timer, plan), self._machine(job), may_win)
        else:  # of its own machine a GPU is the only user
            times, slowness = time_candidate(timer, plan), 1.0
        # of a task's first candidates, which have no best to beat, the first is its default
        if median(times) < _PROMISING * plan.best or (not plan.best and job["id"] < _FIRST):
            self._keep(built)
        return {"times": times, "slowness": slowness, "run_seconds": time.perf_counter() - start}

    def interleave(self, job: Message) -> Message:
        """Time the built candidates of ``runs`` in turn, ``rounds`` times each, in a new random order every round."""
        timers = {run["id"]: self._timer(self._built[run["id"]], run) for run in job["runs"]}
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

    # -- what differs between workers

    def _module(self, job: Message) -> tuple[Any, str]:
        """A candidate's module of one function, :data:`ENTRY`, and its code's hash."""
        raise NotImplementedError

    def _entry(self, module: Any) -> Callable[..., Any]:
        """The module's function."""
        found: Callable[..., Any] = module.get_function(ENTRY, True)
        return found

    def _params(self, job: Message) -> tuple[Param, ...]:
        """The parameters of a job's function."""
        raise NotImplementedError

    def _clock(self, job: Message) -> Callable[[], float]:
        """The clock of the gauge, see :func:`mlc.measure.gauge.clock_of`."""
        raise NotImplementedError

    def _on_cpu(self, job: Message) -> bool:
        """Whether a candidate runs on the CPU, which others use too."""
        return True

    def _last_level(self, job: Message) -> int:
        """Bytes of the largest cache of what a candidate runs on."""
        return native_last_level()

    def _synchronise(self, job: Message) -> tuple[Callable[[], None], ...]:
        """A function that waits for asynchronous calls, if there may be any."""
        return ()

    def _tensor(self, array: np.ndarray, job: Message) -> Any:
        """A tensor with the values of ``array``, where the candidate runs."""
        tensor = runtime.empty_tensor(array.shape, str(array.dtype))
        self._write(tensor, array)
        return tensor

    def _read(self, tensor: Any, dtype: str) -> np.ndarray:
        """A tensor's values."""
        return _bytes_of(tensor).view(numpy_dtype(dtype)).reshape(tuple(tensor.shape)).copy()

    def _write(self, tensor: Any, array: np.ndarray) -> None:
        """Replace a tensor's values."""
        _bytes_of(tensor)[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    # -- inside

    def _machine(self, job: Message) -> Gauge:
        if self._gauge is None:
            self._gauge = Gauge(self._clock(job))
        return self._gauge

    def _made(self, job: Message) -> Built:
        """A candidate's code, built if it is not here yet."""
        code = (job["func"], job["target"], job["trace"], job["scheduled"])
        here = self._promising.get(code) or next((b for b in self._built.values() if b.code == code), None)
        if here is not None:
            return here
        try:
            module, code_hash = self._module(job)
        except Exception as error:
            raise Failure("build", last_line(error)) from error
        return Built(module, self._entry(module), code_hash, code)

    def _keep(self, built: Built) -> None:
        self._promising[built.code] = built
        self._promising.move_to_end(built.code)
        while len(self._promising) > _KEPT:
            self._promising.popitem(last=False)

    def _check(self, built: Built, job: Message) -> str:
        data = self._task_data(job)
        for position, expected in data.reference.items():
            self._write(data.tensors[position], poison(expected))
        built.function(*data.tensors)
        for position, expected in data.reference.items():
            found = self._read(data.tensors[position], data.params[position].dtype)
            problem = mismatch(found, expected, job["rtol"])
            if problem:
                return problem
        return ""

    def _task_data(self, job: Message) -> _Data:
        key = _data_key(job)
        data = self._data.pop(key, None)
        if data is None:
            data = self._load(job)
            while self._data and sum(d.size for d in self._data.values()) + data.size > _CACHE_BYTES:
                self._data.popitem(last=False)
        self._data[key] = data
        return data

    def _load(self, job: Message) -> _Data:
        params = self._params(job)
        with np.load(job["reference"]) as saved:
            style = str(saved["style"])
            reference = {i: _reinterpret(saved[f"output{i}"], p.dtype) for i, p in enumerate(params) if p.output}
        arrays = random_arrays(params, style)
        tensors = [self._tensor(array, job) for array in arrays]
        return _Data(params, tensors, reference, self._turns(job, params, arrays, tensors))

    def _turns(
        self, job: Message, params: Sequence[Param], arrays: Sequence[np.ndarray], tensors: list[Any]
    ) -> list[list[Any]]:
        """Argument lists with weights of their own, so many that a call finds them as cold as the model does."""
        constants = [i for i in job["constants"] if not params[i].output]
        size = sum(_size(params[i]) for i in constants)
        count = copies_of(size, job["constant_bytes"], self._last_level(job))
        turns = [tensors]
        while len(turns) < count:
            turns.append([self._tensor(arrays[i], job) if i in constants else t for i, t in enumerate(tensors)])
        return turns

    def _timer(self, built: Built, job: Message) -> Callable[[int], float]:
        """Mean seconds a call of so many calls; activations stay in the caches, as far as they fit, between calls."""
        data = self._task_data(job)
        if len(data.turns) > 1:
            return Rotation(built.function, data.turns, *self._synchronise(job)).seconds
        kind, number = data.tensors[0].__dlpack_device__()

        def seconds(calls: int) -> float:
            # at least no time for a repeat, at most 100 of no time, and no pauses between
            evaluate = runtime.function("runtime.RPCTimeEvaluator")(
                built.module, ENTRY, int(kind), int(number), calls, 1, 0, 100, 0, 1, 0, "")
            (found,) = struct.unpack("@d", evaluate(*data.tensors))
            return float(found)

        return seconds


def _bytes_of(tensor: Any) -> np.ndarray:
    """The memory of a tensor of this machine's."""
    size = math.prod(tensor.shape) * -(-int(tensor.dtype.bits) // 8)
    return np.from_dlpack(runtime.view(tensor, (size,), "uint8")) if size else np.empty(0, np.uint8)


def _data_key(job: Message) -> str:
    return f"{job['constants']}/{job['constant_bytes']}/{job['func']}"


def _size(param: Param) -> int:
    return math.prod(param.shape) * numpy_dtype(param.dtype).itemsize


def _reinterpret(array: np.ndarray, dtype: str) -> np.ndarray:
    """Inverse of :func:`_nameable`."""
    wanted = numpy_dtype(dtype)
    return array if array.dtype == wanted else array.view(wanted)[..., 0]


def last_line(error: Exception) -> str:
    """The last line of an error's message, in at most 500 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:500]
