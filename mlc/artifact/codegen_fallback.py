"""Fallback schedules for functions that fail in code generation, so that one of them does not fail the whole model.

A module is compiled as a whole, so functions are compiled one by one only after that has failed. Each one that does not
compile alone goes through the next seeds of its space, then the fallback's, then its loops as they stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import tvm
from tvm import tirx

from mlc.artifact.emit import refusal
from mlc.artifact.schedule import BuiltFunction, ready
from mlc.errors import BuildError, CodeGenerationError
from mlc.graph.task import Task
from mlc.graph.tasks import Called
from mlc.target import Target
from schedules import registry
from schedules.space import feasible_seeds

__all__ = ["replace_refused"]

#: seeds that are tried of a function's own space and of the fallback
_SEEDS = 4


def replace_refused(
    scheduled: tvm.IRModule, functions: Sequence[BuiltFunction], called: Sequence[Called], target: Target,
    error: CodeGenerationError,
) -> tuple[tvm.IRModule, list[BuiltFunction]]:
    """``scheduled`` and what is said of its ``functions``, with another schedule for each that does not compile.

    Warns of each one. Raises :class:`BuildError` naming a function that compiles in no way, and ``error``, which the
    module as a whole met, where each function compiles alone.
    """
    of = {found.symbols[0]: found.task for found in called}
    result = tvm.IRModule(scheduled.functions, attrs=scheduled.attrs)
    entries = []
    for entry in functions:
        reason = refusal(scheduled[entry.symbol], target)
        if reason:
            entry, func = _replaced(entry, of[entry.symbol], target, reason)
            result.update_func(scheduled.get_global_var(entry.symbol), func)
        entries.append(entry)
    if not any(entry.replaced for entry in entries):
        raise error
    return result, entries


@dataclass(frozen=True)
class _Schedule:
    """One way to lay a function out: ``space`` is empty for its loops as they stand."""

    func: tirx.PrimFunc
    space: str = ""
    decisions: dict[str, int] = field(default_factory=dict)


def _replaced(entry: BuiltFunction, task: Task, target: Target, reason: str) -> tuple[BuiltFunction, tirx.PrimFunc]:
    """The first schedule that compiles, and what is said of the function from now on."""
    failed = 1
    for other in () if entry.source == "given" else _others(entry, task, target):
        func = ready(other.func, entry.symbol, target)
        if refusal(func, target):
            failed += 1
            continue
        what = "its schedule" if failed == 1 else f"{failed} of its schedules"
        replaced = f"{what} failed in code generation: {reason}"
        source = "seed" if other.space else "plain"
        warnings.warn(f"{entry.described}: {replaced}; {_said(other)} instead", stacklevel=2)
        return replace(entry, space=other.space, source=source, decisions=other.decisions, seconds=None,
                       replaced=replaced), func
    raise BuildError(f"function {entry.described} must compile for {target.canonical}, but TVM refused it: {reason}; "
                     "MLC_DUMP_DIR=DIR writes what it was given")


def _said(other: _Schedule) -> str:
    return f"{other.space} lays it out" if other.space else "its loops are compiled as they stand, which is slow,"


def _others(entry: BuiltFunction, task: Task, target: Target) -> Iterator[_Schedule]:
    """The schedules to try instead, best first. Unscheduled loops do not work on a GPU, since they are bound to no
    threads."""
    spaces = (registry.find(task.func, target.tvm), *registry.matching(task.func, target.tvm))
    for space in dict.fromkeys(spaces):
        for sch, decisions in islice(feasible_seeds(space, task.func, target.tvm), _SEEDS):
            if (space.name, decisions) != (entry.space, entry.decisions):
                yield _Schedule(sch.mod["main"], space.name, decisions)
    if target.kind == "llvm":
        yield _Schedule(task.func)
