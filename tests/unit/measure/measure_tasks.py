"""Small tasks and candidates, good and evil, for the tests of measuring."""

from __future__ import annotations

import random
from collections.abc import Callable

from tvm import te, tirx
from tvm.script import tirx as T

from mlc.graph.kernels.blocked import dense_packed
from mlc.graph.task import normalise, task_key, to_json
from mlc.measure import MeasureRequest
from mlc.target import resolve
from schedules import registry, space
from schedules.trace import trace_json

TARGET = resolve("native", threads=2)
SIZE = 4096


def gemm(m: int = 48, n: int = 64, k: int = 40) -> tirx.PrimFunc:
    """``[m, k] * [n/16, k, 16]`` followed by a ReLU."""
    a, w = te.placeholder((m, k), name="a"), te.placeholder((n // 16, k, 16), name="w")
    product = dense_packed(a, w)
    out = te.compute(product.shape, lambda *i: tirx.max(product(*i), tirx.const(0.0, "float32")), name="relu")
    return normalise(te.create_prim_func([a, w, out]))


def elementwise(body: Callable[[object], object], dtype: str = "float32") -> tirx.PrimFunc:
    """A function of one input and one output."""
    a = te.placeholder((SIZE,), name="a", dtype=dtype)
    return normalise(te.create_prim_func([a, te.compute((SIZE,), lambda i: body(a[i]), name="out")]))


def traces(func: tirx.PrimFunc, count: int) -> list[str]:
    """Candidates of the task's own space: its first seeds, then random points."""
    target = TARGET.tvm
    chosen = registry.find(func, target)
    knobs, rng, seeds, found = chosen.knobs(func, target), random.Random(0), iter(chosen.seeds(func, target)), []
    while len(found) < count:
        decisions = next(seeds, None) or {knob.name: rng.choice(knob.values) for knob in knobs}
        try:
            found.append(trace_json(space.schedule_with(chosen, func, target, decisions)))
        except space.InvalidDecision:
            continue
    return found


def request(func: tirx.PrimFunc, trace: str = "", scheduled: tirx.PrimFunc | None = None) -> MeasureRequest:
    """A request for the candidate that ``trace`` or ``scheduled`` describes."""
    given = to_json(normalise(scheduled)) if scheduled is not None else ""
    return MeasureRequest(task_key(func, TARGET), to_json(func), TARGET.attrs, trace, given)


def doubled() -> tirx.PrimFunc:
    """The task of the candidates below: each output is twice the input."""
    return elementwise(lambda x: x + x)


# Candidates for `doubled`. The buffers are Buffer(SIZE, float32) throughout.


@T.prim_func(s_tir=True)
def good(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(4096):
        out[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def unrolled(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i, j in T.grid(512, 8):
        out[i * 8 + j] = a[i * 8 + j] + a[i * 8 + j]


@T.prim_func(s_tir=True)
def slow(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "usleep", 3000))
    for i in range(4096):
        out[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def half_written(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(2048):
        out[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def tripled(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(4096):
        out[i] = a[i] * T.float32(3)


@T.prim_func(s_tir=True)
def one_nan(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(4096):
        out[i] = a[i] * T.float32(2)
    out[77] = T.sqrt(T.float32(-1))


@T.prim_func(s_tir=True)
def segfault(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "raise", 11))
    out[0] = a[0]


@T.prim_func(s_tir=True)
def abort(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "abort"))
    out[0] = a[0]


@T.prim_func(s_tir=True)
def leave(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "_exit", 3))
    out[0] = a[0]


@T.prim_func(s_tir=True)
def far_write(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(4096):
        out[i * 100000] = a[i]


@T.prim_func(s_tir=True)
def hang(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    while T.call_extern("int32", "usleep", 1000) == 0:
        out[0] = a[0]


@T.prim_func(s_tir=True)
def chatter(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "puts", "\x00\x00\x00\x02{}"))
    for i in range(4096):
        out[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def spoils_input(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    for i in range(4096):
        out[i] = a[i] * T.float32(2)
        a[i] = T.float32(7)


@T.prim_func(s_tir=True)
def leaves_trap(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("int32", "umask", 0))
    for i in range(4096):
        out[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def steps_into_trap(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):
    if T.call_extern("int32", "umask", 18) == 0:
        T.evaluate(T.call_extern("int32", "raise", 11))
    for i in range(4096):
        out[i] = a[i] * T.float32(2)
