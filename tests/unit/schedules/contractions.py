"""How scheduled products and convolutions are checked against float64 references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import s_tir, te, tirx

from mlc.target import resolve
from schedules.lowering import PIPELINE
from schedules.machine import cpu_machine
from schedules.space import Decisions, InvalidDecision, Space, schedule_with

__all__ = ["NATIVE", "TARGETS", "check", "random"]

#: one for each width of vectors: where ``native`` is an AVX2 machine it stands for ``x86-64-v3`` too
TARGETS = {cpu_machine(target).lanes(): target
           for target in (resolve(name).tvm for name in ("x86-64-v2", "x86-64-v3", "native"))}
NATIVE = resolve("native").tvm


def random(rng: np.random.Generator, tensor: te.Tensor) -> np.ndarray:
    """Normal float32 numbers of a tensor's shape."""
    return rng.standard_normal([int(d) for d in tensor.shape]).astype("float32")


Arrays = Sequence[np.ndarray]


def _run(sch: s_tir.Schedule, target: tvm.target.Target, arrays: Arrays, shape: tuple[int, ...]) -> np.ndarray:
    out = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    tvm.compile(sch.mod, target=target, tir_pipeline=PIPELINE)["main"](*[tvm.runtime.tensor(a) for a in arrays], out)
    return out.numpy()


def _decisions(
    space: Space, func: tirx.PrimFunc, target: tvm.target.Target, rng: np.random.Generator, count: int
) -> list[Decisions]:
    """The first seeds, and as many random points that the program accepts."""
    chosen: list[Decisions] = [d for d, _ in zip(space.seeds(func, target), range(2), strict=False)]
    knobs = space.knobs(func, target)
    for _ in range(400):
        if len(chosen) == 2 + count:
            break
        point = {k.name: int(rng.choice(k.values)) for k in knobs}
        tile = np.prod([point.get(n, 1) for n in ("ow", "oh", "oc", "m", "n", "ic", "k")])
        try:
            if tile <= 512:  # code size, hence build time
                schedule_with(space, func, target, point)
                chosen.append(point)
        except InvalidDecision:
            continue
    assert len(chosen) >= 3
    return chosen


def check(
    space: Space, func: tirx.PrimFunc, arrays: Arrays, expected: np.ndarray, rng: np.random.Generator, count: int = 2
) -> None:
    """The first seeds and ``count`` random decisions compute ``expected``, at each width of vectors."""
    for target in TARGETS.values():
        assert space.matches(func, target)
        for decisions in _decisions(space, func, target, rng, count):
            sch = schedule_with(space, func, target, decisions)
            actual = _run(sch, target, arrays, expected.shape)
            error = np.abs(actual - expected).max() / np.abs(expected).max()
            assert error < 1e-5, (decisions, error)
