"""The contract between a search space and its users.

A :class:`Space` says *how a tensor function may be laid out*. It is a finite table of knobs plus a program
over :class:`tvm.s_tir.Schedule` that takes every decision through :meth:`Pick.__call__`, which records a
``sample_categorical`` in the schedule's trace. The trace therefore *is* the candidate: it can be stored,
replayed on an equal function without this package, and compared.
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
    """Takes decisions in a schedule and records each one as ``sample_categorical`` in its trace."""

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
    """What decisions ask of a GPU, reckoned before a compiler has seen them.

    A block has ``threads`` of so many ``registers`` and ``shared_bytes``; ``resident`` blocks fit a multiprocessor,
    whose threads they are the part ``occupancy`` of. These have at most ``under_way`` bytes of their operands on the
    way, in ``stages`` of which one is computed with; ``cluster`` blocks share what they copy.
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
    #: what intrinsics compute of which every schedule uses one, as their names begin; empty where it needs none
    tensorizes: str = ""
    #: whether a function may have free sizes (see :mod:`schedules.free`)
    free_sizes: bool = True
    #: whether it decides by how large they are
    by_size: bool = True
    #: whether a schedule marks what lowering writes out as a kernel
    written_out: bool = False
    #: opcodes of machine code of which every kernel's sums use one, as their names begin; empty where any will do
    opcodes: tuple[str, ...] = ()

    @abc.abstractmethod
    def matches(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
        """Whether this space schedules ``func`` on ``target``. Never raises."""

    @abc.abstractmethod
    def knobs(self, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Knob, ...]:
        """The decisions of :meth:`schedule` for this function, in the order in which they are taken."""

    @abc.abstractmethod
    def seeds(self, func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Decisions]:
        """Good complete assignments from arithmetic on the machine, best first; never empty. Where ``func`` stands for
        a range of sizes, :func:`schedules.free.least_function` gives that for the smallest."""

    def price(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions, resident: int = 0
    ) -> float | None:
        """Seconds that arithmetic on the machine gives decisions; None for a space that has none but for the order of
        its seeds. ``resident`` is how many blocks a multiprocessor holds, where a compiler has said so. Raises
        :class:`InvalidDecision` for decisions that do not fit the machine."""
        return None

    def footprint(
        self, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions
    ) -> Footprint | None:
        """What decisions that fit the machine ask of a GPU; None for a space that says nothing of it."""
        return None

    @abc.abstractmethod
    def schedule(self, sch: s_tir.Schedule, target: tvm.target.Target, pick: Pick) -> None:
        """Transform ``sch`` (one function, ``main``). Raises :class:`InvalidDecision` where it can't."""


def schedule_with(
    space: Space, func: tirx.PrimFunc, target: tvm.target.Target, decisions: Decisions
) -> s_tir.Schedule:
    """Run ``space``'s program on ``func``; the result carries the trace of what was done.

    Raises :class:`InvalidDecision` where the decisions do not fit the function (TVM's own ``ScheduleError``
    is turned into it), so one bad candidate is an ordinary event for the caller. A function with free sizes is
    scheduled by the decisions for its usual ones.
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
    """What a schedule of ``func`` is made of: a copy where blocks below the root hold blocks, since TVM's primitives on
    those change the loops of the function itself. Any other function as it is."""
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
    """The schedule of the first seed that can be carried out, and that seed's decisions."""
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
    """The schedules of the seeds that can be carried out, best first, with the decisions of each."""
    for decisions in space.seeds(deciding(func, target), target):
        try:
            sch = schedule_with(space, func, target, decisions)
        except InvalidDecision:
            continue
        yield sch, dict(decisions)


def best_seed(space: Space, func: tirx.PrimFunc, target: tvm.target.Target) -> s_tir.Schedule:
    """The schedule of the first seed that can be carried out."""
    return first_seed(space, func, target)[0]
