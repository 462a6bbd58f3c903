"""The contract that every search space keeps, of whichever target. A test class inherits :class:`SpaceContract` and
lists its cases; ``test_space_contract.py`` tells which registered space has none."""

from __future__ import annotations

import contextlib
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

from mlc.cpu import host_cpu, native_attrs
from mlc.target import resolve
from mlc.testing import aarch64, cuda_emulator, cuda_twin
from mlc.testing.cases import Case
from schedules import intrin
from schedules.amx_tiles import called_names
from schedules.analysis import walk
from schedules.intrin.tiles import helper
from schedules.lowering import PIPELINE
from schedules.math import expand_math
from schedules.registry import find
from schedules.space import Decisions, InvalidDecision, Space, best_seed, schedule_with
from schedules.trace import replay, trace_json

__all__ = [
    "CORES", "TARGET", "Case", "SpaceContract", "build_and_run", "check_orders", "emulate",
    "emulated_error", "pytest_generate_tests", "refusal", "without_each",
]

CORES = 2
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": CORES, **native_attrs(host_cpu())})
CUDA = resolve("cuda:sm_80").tvm
#: what those spaces are tried for that an older GPU has no instructions for
_CUDA_OF = dict.fromkeys(("cuda.wgmma", "cuda.attention_wgmma"), resolve("cuda:sm_90a").tvm)
#: a machine with other vectors than any that runs the tests
ELSEWHERE = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n2", threads=CORES).tvm
#: seeds of a case whose results are compared, of all that are carried out
_COMPARED = 3


def build_and_run(
    mod: tvm.IRModule, arrays: Sequence[np.ndarray], target: tvm.target.Target = TARGET
) -> list[np.ndarray]:
    """Build for this machine, or a ``target`` that it runs, run once, and return every parameter as it is then."""
    tvm.get_global_func("runtime.config_threadpool")(1, CORES)
    executable = tvm.compile(mod, target=target, tir_pipeline=PIPELINE)
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    executable["main"](*tensors)
    return [t.numpy() for t in tensors]


def refusal(func: tirx.PrimFunc, trace: str, target: tvm.target.Target | None = None) -> str:
    """Why a trace does not replay; empty where it does."""
    try:
        replay(func, trace, target)
    except InvalidDecision as error:
        return str(error)
    return ""


#: what keeps copies, fetches and what is computed of them apart
_ORDERS = re.compile(r"__syncthreads\(\);|tvm_builtin_ptx_cp_async_wait_group_async_wait_group_\d\(\);")

#: read when the program runs, so that it is compiled once for all that is left out
_LEFT_OUT = """
static const int left_out = std::atoi(std::getenv("LEFT_OUT"));
#define LEFT_OUT(place) (left_out == place)
"""


def check_orders(
    monkeypatch: pytest.MonkeyPatch, case: Case, scheduled: tirx.PrimFunc, target: tvm.target.Target = CUDA,
    which: re.Pattern[str] = _ORDERS,
) -> int:
    """The scheduled kernel is right, and wrong without any one of its waits and barriers; how many there are."""
    orders, errors = without_each(monkeypatch, case, scheduled, target, which)
    assert min(errors) > 10 * case.rtol, list(zip(orders, errors, strict=True))
    return len(orders)


def without_each(
    monkeypatch: pytest.MonkeyPatch, case: Case, scheduled: tirx.PrimFunc, target: tvm.target.Target = CUDA,
    which: re.Pattern[str] = _ORDERS,
) -> tuple[list[str], list[float]]:
    """The waits and barriers of a scheduled kernel, which is right, and its error without each, the larger of those of
    two orders in which warps run."""
    source = cuda_emulator.cuda_source(scheduled, target)
    orders = list(which.finditer(source, source.rindex('extern "C" __global__')))
    for place, order in reversed(list(enumerate(orders))):
        source = f"{source[: order.start()]}if (!LEFT_OUT({place})) {source[order.start() :]}"
    assert emulated_error(monkeypatch, case, scheduled, source) <= case.rtol
    errors = []
    for place in range(len(orders)):
        error = emulated_error(monkeypatch, case, scheduled, source, left_out=place)
        if error <= 10 * case.rtol:  # what one warp does too early another may do in time
            error = emulated_error(monkeypatch, case, scheduled, source, repeats=2, left_out=place)
        errors.append(error)
    return [order[0] for order in orders], errors


def emulate(
    case: Case, scheduled: tirx.PrimFunc, target: tvm.target.Target = CUDA
) -> tuple[float, list[cuda_emulator.Cost]]:
    """The error of a scheduled function's kernels on the emulator, and what each of their accesses cost."""
    inputs, outputs = case.arrays()
    costs = cuda_emulator.run(scheduled, target, inputs, outputs)
    return case.error(inputs, outputs), costs


def emulated_error(
    monkeypatch: pytest.MonkeyPatch, case: Case, scheduled: tirx.PrimFunc, source: str, repeats: int = 1,
    left_out: int = -1,
) -> float:
    """The error of a scheduled function that was written as ``source``, where ``LEFT_OUT(i)`` is true for the i that is
    ``left_out``; infinite where the emulator stops, since what is asynchronous is not waited for, or never comes."""
    inputs, outputs = case.arrays()
    place = source.rindex("#endif", 0, source.index('extern "C" __global__')) + len("#endif")
    source = source[:place] + _LEFT_OUT + source[place:]
    with monkeypatch.context() as patched:
        patched.setenv("LEFT_OUT", str(left_out))
        patched.setattr(cuda_emulator, "cuda_source", lambda _func, _target: source)
        try:
            cuda_emulator.run(scheduled, CUDA, inputs, outputs, repeats)
        except RuntimeError as reason:
            assert "kernels failed with 3: " in str(reason), reason
            return np.inf
    return case.error(inputs, outputs)


def loop_kinds(func: tirx.PrimFunc) -> set[int]:
    """The kinds of loops in a scheduled function; an intrinsic on whole vectors or tiles is a vectorised loop."""
    found: set[int] = set()
    if any(helper(name) for name in called_names(func.body)):
        found.add(int(tirx.ForKind.VECTORIZED))
    walk(
        func.body,
        (tirx.For, lambda loop: found.add(int(loop.kind))),
        (tirx.Ramp, lambda _: found.add(int(tirx.ForKind.VECTORIZED))),
    )
    return found


def thread_axes(func: tirx.PrimFunc) -> list[dict[str, int]]:
    """For each nest under the root of a GPU's function: the extents of its thread axes."""
    body = func.body.block.body
    nests = []
    for nest in list(body) if isinstance(body, tirx.SeqStmt) else [body]:
        loops: list[tirx.For] = []
        walk(nest, (tirx.For, loops.append))
        bound = [(loop.thread_binding, loop.extent) for loop in loops if loop.thread_binding is not None]
        nests.append({str(binding.thread_tag): int(extent) for binding, extent in bound})
    return nests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and metafunc.cls is not None and hasattr(metafunc.cls, "cases"):
        cases: Sequence[Any] = metafunc.cls.cases
        metafunc.parametrize("case", cases, ids=str)


def not_its_own() -> Iterator[tirx.PrimFunc]:
    """Functions of different kinds, of which no space but one that matches everything takes all."""
    x, y = te.placeholder((24, 32), name="x"), te.placeholder((32, 40), name="y")
    k = te.reduce_axis((0, 32), name="k")
    yield te.create_prim_func([x, te.compute(x.shape, lambda i, j: x[i, j] + 1.0, name="added")])
    yield te.create_prim_func([x, te.compute((24,), lambda i: te.sum(x[i, k], axis=k), name="summed")])
    yield te.create_prim_func(
        [x, y, te.compute((24, 40), lambda i, j: te.sum(x[i, k] * y[k, j], axis=k), name="product")])


class SpaceContract:
    """What must hold for every space and every function that it takes: on the CPU that runs the tests, or on the twin
    of a GPU."""

    space: Space
    cases: Sequence[Case]
    #: cases of which this space is the first in the registry's order
    first = True

    @property
    def target(self) -> tvm.target.Target:
        return _CUDA_OF.get(self.space.name, CUDA) if self.space.target_kind == "cuda" else TARGET

    def scheduled(self, func: tirx.PrimFunc) -> Iterator[tuple[Decisions, s_tir.Schedule]]:
        """The seeds that can be carried out."""
        for decisions in self.space.seeds(func, self.target):
            with contextlib.suppress(InvalidDecision):
                yield decisions, schedule_with(self.space, func, self.target, decisions)

    def check(self, case: Case, sch: s_tir.Schedule) -> None:
        """The scheduled function computes the reference."""
        inputs, outputs = case.arrays()
        if self.space.target_kind == "cuda":
            outputs = cuda_twin.run(cuda_twin.twin(sch, case.func()), inputs, outputs)
        else:
            outputs = build_and_run(sch.mod, [*inputs, *outputs], self.target)[len(inputs) :]
        assert case.error(inputs, outputs) <= case.rtol

    def test_matches_and_is_found(self, case: Case) -> None:
        func = case.func()
        assert self.space.matches(func, self.target)
        if self.first:
            assert find(func, self.target) is self.space

    def test_refuses_what_is_not_its_own(self) -> None:
        taken = [self.space.matches(func, self.target) for func in not_its_own()]
        assert all(taken) if self.space.name.endswith(".fallback") else not all(taken)

    @pytest.mark.sampled(3)
    def test_every_seed_is_correct(self, case: Case) -> None:
        func = case.func()
        names = {k.name for k in self.space.knobs(func, self.target)}
        assert all(set(decisions) == names for decisions in self.space.seeds(func, self.target))
        compared = set()
        for _, sch in self.scheduled(func):
            digest = tvm_ffi.structural_hash(sch.mod)
            if digest not in compared and len(compared) < _COMPARED:
                self.check(case, sch)
                compared.add(digest)
        assert compared

    def test_trace_replays(self, case: Case) -> None:
        """On an equal function, to the same schedule."""
        sch, again = (best_seed(self.space, case.func(), self.target) for _ in range(2))
        assert tvm_ffi.structural_equal(sch.mod, again.mod), "a schedule must be deterministic"
        assert tvm_ffi.structural_equal(replay(case.func(), trace_json(sch), self.target).mod, sch.mod)

    def test_traces_of_seeds(self, case: Case) -> None:
        """They say what a stored trace may say, hold every decision as a sample of its knob's values, so that
        what mutates a trace sees all there is to change, and use the intrinsics that were promised."""
        func = case.func()
        knobs = self.space.knobs(func, self.target)
        for count, (decisions, sch) in enumerate(self.scheduled(func)):
            problem = refusal(func, trace_json(sch), self.target)
            assert not problem, f"{problem}: what a new instruction needs is a line in schedules/language.py"
            instructions, taken = json.loads(trace_json(sch))
            samples = {i: step for i, step in enumerate(instructions) if step[0].startswith("Sample")}
            assert {step[0] for step in samples.values()} <= {"SampleCategorical"}
            chosen = [(tuple(samples[i][2][0]), samples[i][2][0][position]) for i, position in taken]
            assert sorted(chosen) == sorted((knob.values, decisions[knob.name]) for knob in knobs)
            used = {step[2][0] for step in instructions if step[0] == "Tensorize"}
            if self.space.tensorizes:
                promised = [i for i in intrin.declared() if i.name in used]
                assert promised and all(i.computes.startswith(self.space.tensorizes) for i in promised)
                if count == 0:
                    code = self.code(sch.mod["main"])
                    assert all(re.search(i.instruction, code) for i in promised)

    @pytest.mark.sampled(3)
    def test_random_decisions_are_refused_or_correct(self, case: Case) -> None:
        func = case.func()
        rng = random.Random(zlib.crc32(case.name.encode()))
        knobs = self.space.knobs(func, self.target)
        for _ in range(2):
            decisions = {k.name: rng.choice(k.values) for k in knobs}
            with contextlib.suppress(InvalidDecision):
                self.check(case, schedule_with(self.space, func, self.target, decisions))

    def code(self, func: tirx.PrimFunc) -> str:
        """What the target's code generator writes."""
        if self.space.target_kind == "cuda":
            return cuda_emulator.cuda_source(func, self.target)
        built = tvm.compile(tvm.IRModule({"main": func}), self.target, tir_pipeline=PIPELINE)
        return str(built.mod.inspect_source("s"))

    def test_no_naive_loop_nest(self, case: Case) -> None:
        func = case.func()
        found = best_seed(self.space, func, self.target).mod["main"]
        if self.space.target_kind == "cuda":
            for axes in thread_axes(found):
                assert "blockIdx.x" in axes, "every nest under the root is a kernel"
                threads = prod(extent for axis, extent in axes.items() if axis.startswith("threadIdx"))
                assert threads <= 1024
                assert threads >= 32 or self.space.name in ("cuda.fallback", "cuda.elementwise")
            return
        kinds = loop_kinds(found)
        largest = max(prod(int(s) for s in buffer.shape) for buffer in func.params)
        if largest >= 64:
            assert tirx.ForKind.VECTORIZED in kinds
        if largest > 128 * 1024:
            assert tirx.ForKind.PARALLEL in kinds
        if largest < 1024:
            assert tirx.ForKind.PARALLEL not in kinds

    @pytest.mark.sampled(1_000_000)
    def test_results_of_an_emulated_machine(self, case: Case) -> None:
        """The code itself where this machine cannot run it: a GPU's kernels, barriers and all, or NEON."""
        func, (inputs, outputs) = case.func(), case.arrays()
        if self.space.target_kind == "cuda":
            cuda_emulator.run(best_seed(self.space, func, self.target).mod["main"], self.target, inputs, outputs)
        elif aarch64.missing():
            pytest.skip(f"{aarch64.missing()} must be installed")
        elif not self.space.matches(func, ELSEWHERE):
            pytest.skip("the function is packed for this machine's instructions")
        else:
            kernel = expand_math(best_seed(self.space, func, ELSEWHERE).mod["main"])
            outputs = aarch64.run(tvm.IRModule({"main": kernel}), ELSEWHERE, [*inputs, *outputs])[len(inputs) :]
        assert case.error(inputs, outputs) <= case.rtol
