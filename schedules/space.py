"""The contract between a search space and its users.

A :class:`Space` defines *how a tensor function may be scheduled*. It is a finite table of knobs plus a program over
:class:`tvm.s_tir.Schedule` that makes every decision through :meth:`Pick.__call__`, which records a
``sample_categorical`` in the schedule's trace. The trace therefore *is* the candidate: it can be stored, replayed on an
equal function without this package, and compared.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import _type_checker

from schedules.analysis import walk
from schedules.errors import InvalidDecision
from schedules.free import deciding, shown_function
from schedules.lockstep import Lockstep
from schedules.machine import GpuMachine
from schedules.reducers import register

__all__ = [
    "Decisions", "Footprint", "InvalidDecision", "Knob", "Pick", "Space", "best_seed", "feasible_seeds", "first_seed",
    "schedule_with", "unshared",
]

# TVM takes the annotations of a schedule's method apart whenever it is called, which takes longer than many of them do
_type_checker._dispatcher = cache(_type_checker._dispatcher)

Decisions = Mapping[str, int]


@dataclass(frozen=True)
class Knob:
    """One named decision with its finite domain. Values are integers whose meaning the space documents."""

    name: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) != len(self.values):
            raise ValueError(f"a knob must have distinct values, got {self.name}={self.values}")


class Pick:
    """Makes decisions in a schedule, and records each as a ``sample_categorical`` in its trace."""

    def __init__(self, sch: s_tir.Schedule, knobs: tuple[Knob, ...], decisions: Decisions) -> None:
        self._sch = sch
        self._knobs = {k.name: k for k in knobs}
        self._decisions = decisions

    def __call__(self, name: str) -> int:
        """The value of knob ``name``; the trace holds the same decision afterwards."""
        knob = self._knobs[name]
        value = self._decisions[name]
        if value not in knob.values:
            raise InvalidDecision(f"knob {name} must be one of {knob.values}, got {value}")
        uniform = [1.0 / len(knob.values)] * len(knob.values)
        rv = self._sch.sample_categorical(list(knob.values), uniform, decision=knob.values.index(value))
        return int(self._sch.get(rv))


@dataclass(frozen=True)
class Footprint:
    """The resources of a GPU that a candidate uses, estimated before compilation.

    A block has ``threads`` with ``registers`` each, and ``shared_bytes`` of shared memory; ``resident`` blocks fit a
    multiprocessor, with ``occupancy`` the fraction of its threads. Together they have at most ``under_way`` bytes of
    operands in flight, in ``stages`` of copies, one of which is being computed on; ``cluster`` blocks share what they
    copy.
    """

    threads: int
    registers: int
    shared_bytes: int
    resident: int
    occupancy: float
    under_way: int
    stages: int
    cluster: int
    tensor_cores: bool

    @staticmethod
    def of(
        gpu: GpuMachine, threads: int, registers: int, shared_bytes: int, stages: int, stage_bytes: int,
        *, cluster: int = 1, tensor_cores: bool,
    ) -> Footprint:
        """Of blocks whose stages have so many bytes; with one stage, these come while nothing is computed."""
        resident = max(1, gpu.resident(threads, registers, shared_bytes))
        return Footprint(
            threads, registers, shared_bytes, resident, resident * threads / gpu.threads_per_multiprocessor,
            resident * max(1, stages - 1) * stage_bytes, stages, cluster, tensor_cores)


class Space(abc.ABC):
    """How one kind of computation may be scheduled on one kind of target.

    Subclasses are stateless; one instance is registered in ``schedules.registry``. Order matters there: the
    first space whose :meth:`matches` holds is used, and the last one of each target kind matches everything.
    """

    name: str
    target_kind: str  # "llvm" or "cuda"
    #: name prefixes of intrinsics, of which every schedule of the space uses one; empty if it needs none
    tensorizes: str = ""
    #: whether a function may have free sizes (see :mod:`schedules.free`)
    free_sizes: bool = True
    #: whether its decisions depend on how large these sizes are
    by_size: bool = True
    #: whether a schedule only marks a computation that lowering then generates as a whole kernel
    written_out: bool = False
    #: prefixes of machine-code opcodes, of which every kernel must contain one; empty if there is no requirement
    opcodes: tuple[str, ...] = ()

    @abc.abstractmethod
    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        """Whether this space schedules ``func`` on ``target``. Never raises."""

    @abc.abstractmethod
    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        """The decisions of :meth:`schedule` for this function, in the order in which they are made."""

    @abc.abstractmethod
    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        """Complete assignments that an analytic model of the machine suggests, best first; never empty. If ``func``
        stands for a range of sizes, :func:`schedules.free.least_function` gives the function for the smallest."""

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        """The estimated seconds of a candidate; None if the space has no estimate beyond the order of its seeds.

        ``resident`` is the number of blocks per multiprocessor, if a compiler has determined it. Raises
        :class:`InvalidDecision` for decisions that do not fit the machine.
        """
        return None

    def footprint(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions
    ) -> Footprint | None:
        """The resources that a candidate uses on a GPU; None if the space does not estimate them."""
        return None

    @abc.abstractmethod
    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        """Transform ``sch`` (one function, ``main``). Raises :class:`InvalidDecision` if the decisions do not fit."""


def schedule_with(
    space: Space, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions
) -> s_tir.Schedule:
    """Run ``space``'s program on ``func``; the result's trace records what was done.

    Raises :class:`InvalidDecision` if the decisions do not fit the function (TVM's ``ScheduleError`` is converted to
    it), so that an invalid candidate is an ordinary event for the caller. A function with free sizes is scheduled by
    the decisions for its usual sizes.
    """
    usual, gpu = shown_function(func, target), target.kind.name == "cuda"
    # what TVM cannot prove of a product with a free size holds as it does of the shown one, where it is checked
    sch = _schedule(func, check=usual is func or not gpu)
    shown: Any = sch if usual is func else Lockstep(_schedule(usual), sch, gpu=gpu)
    pick = Pick(shown, space.knobs(usual, target), decisions)
    with target:
        try:
            space.schedule(shown, target, pick)
        except s_tir.ScheduleError as error:
            raise InvalidDecision(str(error).strip().splitlines()[-1]) from error
    return sch


def unshared(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function to make a schedule of: a copy of ``func`` if it has nested blocks below the root, since TVM's
    primitives modify the loops of those in place; otherwise ``func`` itself."""
    inner: list[s_tir.SBlock] = []
    outer: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, outer.append))
    for block in outer[:-1]:  # the root comes last
        walk(block.body, (s_tir.SBlock, inner.append))
    return tvm.ir.load_json(tvm.ir.save_json(func)) if inner else func


def _schedule(func: tirx.PrimFunc, *, check: bool = True) -> s_tir.Schedule:
    register()
    return s_tir.Schedule(tvm.IRModule({"main": unshared(func)}), debug_mask="none", error_render_level="fast",
                          enable_check=check)


def first_seed(
    space: Space, func: tirx.PrimFunc, target: tvm.target.Target
) -> tuple[s_tir.Schedule, dict[str, int]]:
    """The schedule of the first feasible seed, and its decisions."""
    reason: Exception | None = None
    for decisions in space.seeds(deciding(func, target), target):
        try:
            return schedule_with(space, func, target, decisions), dict(decisions)
        except InvalidDecision as error:
            reason = error
    raise InvalidDecision(f"space {space.name} has no seed that fits this function: {reason}")


def feasible_seeds(
    space: Space, func: tirx.PrimFunc, target: tvm.target.Target
) -> Iterator[tuple[s_tir.Schedule, dict[str, int]]]:
    """The schedules of all feasible seeds, best first, each with its decisions."""
    for decisions in space.seeds(deciding(func, target), target):
        try:
            sch = schedule_with(space, func, target, decisions)
        except InvalidDecision:
            continue
        yield sch, dict(decisions)


def best_seed(space: Space, func: tirx.PrimFunc, target: tvm.target.Target) -> s_tir.Schedule:
    """The schedule of the first feasible seed."""
    return first_seed(space, func, target)[0]
