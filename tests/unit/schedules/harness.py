"""The contract that every CPU space keeps. A test class inherits :class:`SpaceContract` and lists its cases."""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.s_tir.schedule import Trace

from mlc.cpu import host_cpu, native_attrs
from schedules.analysis import walk
from schedules.lowering import PIPELINE
from schedules.registry import find
from schedules.space import InvalidDecision, Space, best_seed, schedule_with
from schedules.trace import replay, trace_json

__all__ = ["CORES", "TARGET", "Case", "SpaceContract", "build_and_run", "pytest_generate_tests", "random_arrays",
           "refusal"]

CORES = 2
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": CORES, **native_attrs(host_cpu())})


@dataclass(frozen=True)
class Case:
    """``build`` returns the tensors (inputs then outputs), ``reference`` maps float64 inputs to the outputs.

    ``high`` bounds integer inputs (exclusive), by position; ``parallel`` is False where threads must not be woken.
    """

    name: str
    build: Callable[[], Sequence[te.Tensor] | tirx.PrimFunc]
    reference: Callable[..., object]
    rtol: float = 1e-5
    high: dict[int, int] = field(default_factory=dict)
    low: float = -2.0

    def func(self) -> tirx.PrimFunc:
        built = self.build()
        return built if isinstance(built, tirx.PrimFunc) else te.create_prim_func(list(built))


def random_arrays(func: tirx.PrimFunc, case: Case) -> list[np.ndarray]:
    """Random arrays for every parameter; the outputs' are overwritten and start as garbage on purpose."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    arrays = []
    for position, buffer in enumerate(func.params):
        shape, dtype = tuple(int(s) for s in buffer.shape), str(buffer.dtype)
        if dtype.startswith("float"):
            arrays.append(rng.uniform(case.low, 2.0, shape).astype(dtype))
        elif dtype == "bool":
            arrays.append(rng.integers(0, 2, shape).astype(dtype))
        else:
            arrays.append(rng.integers(0, case.high.get(position, 100), shape).astype(dtype))
    return arrays


def build_and_run(mod: tvm.IRModule, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Build for this machine, run once, and return every parameter as it is afterwards."""
    tvm.get_global_func("runtime.config_threadpool")(1, CORES)
    executable = tvm.compile(mod, target=TARGET, tir_pipeline=PIPELINE)
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    executable["main"](*tensors)
    return [t.numpy() for t in tensors]


def check(case: Case, sch: s_tir.Schedule) -> None:
    """The scheduled function computes the reference."""
    func = sch.mod["main"]
    arrays = random_arrays(func, case)
    inputs = case.reference.__code__.co_argcount
    wide = [a.astype("float64") if a.dtype.kind == "f" else a for a in arrays[:inputs]]
    wanted = case.reference(*wide)
    wanted = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    got = build_and_run(sch.mod, arrays)[inputs:]
    assert len(got) == len(wanted)
    for have, want in zip(got, wanted, strict=True):
        want = np.asarray(want)
        assert have.shape == want.shape
        if have.dtype.kind != "f":
            np.testing.assert_array_equal(have, want)
            continue
        assert np.isfinite(have).all()
        np.testing.assert_allclose(have, want, rtol=case.rtol, atol=case.rtol * float(np.abs(want).max()))


def refusal(func: tirx.PrimFunc, trace: str) -> str:
    """Why a trace does not replay; empty where it does."""
    try:
        replay(func, trace)
    except InvalidDecision as error:
        return str(error)
    return ""


def loop_kinds(func: tirx.PrimFunc) -> set[int]:
    """The kinds of loops in a scheduled function; an intrinsic on whole vectors is a vectorised loop."""
    found: set[int] = set()
    walk(
        func.body,
        (tirx.For, lambda loop: found.add(int(loop.kind))),
        (tirx.Ramp, lambda _: found.add(int(tirx.ForKind.VECTORIZED))),
    )
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and metafunc.cls is not None and hasattr(metafunc.cls, "cases"):
        metafunc.parametrize("case", metafunc.cls.cases, ids=[c.name for c in metafunc.cls.cases])


class SpaceContract:
    """What must hold for every space and every function that it takes."""

    space: Space
    cases: Sequence[Case]
    #: cases of which this space is the first in the registry's order
    first = True

    def test_matches_and_is_found(self, case: Case) -> None:
        func = case.func()
        assert self.space.matches(func, TARGET)
        if self.first:
            assert find(func, TARGET) is self.space

    def test_every_seed_is_correct(self, case: Case) -> None:
        func = case.func()
        seeds = list(self.space.seeds(func, TARGET))
        assert seeds
        knobs = self.space.knobs(func, TARGET)
        carried, seen = 0, set()
        for decisions in seeds:
            assert set(decisions) == {k.name for k in knobs}
            try:
                sch = schedule_with(self.space, func, TARGET, decisions)
            except InvalidDecision:
                continue
            carried += 1
            digest = tvm_ffi.structural_hash(sch.mod)
            if digest not in seen and len(seen) < 3:
                check(case, sch)
            seen.add(digest)
        assert carried

    def test_trace_replays(self, case: Case) -> None:
        func = case.func()
        sch = best_seed(self.space, func, TARGET)
        again = best_seed(self.space, func, TARGET)
        assert tvm_ffi.structural_equal(sch.mod, again.mod), "a schedule must be deterministic"
        text = json.dumps(json.loads(tvm.ir.save_json(sch.trace.as_json())))
        fresh = s_tir.Schedule(tvm.IRModule({"main": case.func()}), debug_mask="none")
        Trace.apply_json_to_schedule(tvm.ir.load_json(text), fresh)
        assert tvm_ffi.structural_equal(fresh.mod, sch.mod)

    def test_every_seed_says_only_what_a_trace_may_say(self, case: Case) -> None:
        func = case.func()
        for decisions in self.space.seeds(func, TARGET):
            with contextlib.suppress(InvalidDecision):
                sch = schedule_with(self.space, func, TARGET, decisions)
                problem = refusal(func, trace_json(sch))
                assert not problem, f"{problem}: what a new instruction needs is a line in schedules/language.py"

    def test_random_decisions_are_refused_or_correct(self, case: Case) -> None:
        func = case.func()
        rng = random.Random(zlib.crc32(case.name.encode()))
        knobs = self.space.knobs(func, TARGET)
        for _ in range(2):
            decisions = {k.name: rng.choice(k.values) for k in knobs}
            try:
                sch = schedule_with(self.space, func, TARGET, decisions)
            except InvalidDecision:
                continue
            check(case, sch)

    def test_no_naive_loop_nest(self, case: Case) -> None:
        func = case.func()
        kinds = loop_kinds(best_seed(self.space, func, TARGET).mod["main"])
        largest = max(prod(int(s) for s in buffer.shape) for buffer in func.params)
        if largest >= 64:
            assert tirx.ForKind.VECTORIZED in kinds
        if largest > 128 * 1024:
            assert tirx.ForKind.PARALLEL in kinds
        if largest < 1024:
            assert tirx.ForKind.PARALLEL not in kinds
