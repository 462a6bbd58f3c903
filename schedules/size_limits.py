"""Limits on how much larger a schedule may make a function: memory, code and work beyond any good schedule are
rejected.

The primitives that a trace may use (:mod:`schedules.language`) preserve what a function computes, but not its cost: a
loop of a million iterations may be unrolled, or a buffer padded to gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis.expressions import loads, walk
from schedules.space import InvalidDecision

__all__ = ["check_growth", "check_inlining"]

#: a schedule's buffers may take this many times the bytes of the function's own and its parameters, and this much more
#: (good ones: up to 24 times of less than 2 MB, else about 2)
_MEMORY, _MORE_MEMORY = 4, 256 << 20
#: iterations of innermost statements. Padding to a GPU's tile makes up to 64 of one
_WORK, _MORE_WORK = 128, 1 << 28
#: elements of a vector; statements after unrolling, each element counted (good ones: up to 125 and 4,512)
_MAX_LANES, _MAX_STATEMENTS = 1024, 1 << 15
#: loads of a block after all that is inlined into it (good ones: up to 486, of Winograd's transforms)
_MAX_LOADS = 1 << 16
_INLINING = ("ComputeInline", "ReverseComputeInline")


@dataclass
class _Size:
    """``memory`` is in bytes. Sizes that are free at compile time count as one."""

    memory: int = 0
    work: int = 0
    statements: int = 0
    lanes: int = 1


def check_growth(before: tirx.PrimFunc, after: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` if ``after``, a schedule of ``before``, has other parameters or is far larger."""
    if len(before.params) != len(after.params) or not all(map(_same_buffer, before.params, after.params)):
        raise InvalidDecision("a schedule must leave the function's parameters as they are")
    own, now = _size(before), _size(after)
    parameters = sum(_bytes(param) for param in before.params if isinstance(param, tirx.Buffer))
    bounds = (
        ("bytes in buffers", now.memory, _MEMORY * (own.memory + parameters) + _MORE_MEMORY),
        ("iterations", now.work, _WORK * own.work + _MORE_WORK),
        ("elements of a vector", now.lanes, max(_MAX_LANES, own.lanes)),
        ("statements without loops", now.statements, max(_MAX_STATEMENTS, own.statements)),
    )
    for what, found, most in bounds:
        if found > most:
            raise InvalidDecision(f"a schedule of this function must have at most {most} {what}, got {found}")


def check_inlining(func: tirx.PrimFunc, instructions: Sequence[Any]) -> None:
    """Raise :class:`InvalidDecision` if a trace's instructions would make far more of an expression by inlining.

    Asked before a trace is applied: each of thirty blocks that read the one before twice doubles what there is.
    """
    named = {outputs[0]: attributes[0] for kind, _, attributes, outputs in instructions if kind == "GetSBlock"}
    moved = [named.get(inputs[0]) for kind, inputs, _, _ in instructions if kind in _INLINING]
    if len(moved) < 2:  # one alone squares a text that is of bounded length
        return
    into = {named.get(inputs[0]) for kind, inputs, _, _ in instructions if kind == "ReverseComputeInline"}
    made: dict[tirx.Buffer, tuple[str, int]] = {}  # the block that writes a buffer, and its loads
    for block in _blocks(func.body):
        name, found = str(block.name_hint), 0
        for load in loads(block.body):
            source, many = made.get(load.source, ("", 1))
            found += many if None in moved or source in moved or name in into else 1
        if found > _MAX_LOADS:
            raise InvalidDecision(f"what a schedule inlines must make at most {_MAX_LOADS} loads of a block, got "
                                  f"{found}")
        if block.init is None:  # nothing that is accumulated can be inlined
            made.update((region.source, (name, max(found, 1))) for region in block.writes)


def _blocks(node: Any) -> list[s_tir.SBlock]:
    """The innermost blocks, in the order of the program."""
    found: list[s_tir.SBlock] = []
    walk(node, (s_tir.SBlock, found.append))
    return [block for block in found if not (len(found) > 1 and _blocks(block.body))]


def _same_buffer(one: Any, other: Any) -> bool:
    if not isinstance(one, tirx.Buffer):
        return bool(tvm_ffi.structural_equal(one, other, map_free_vars=True))
    return (str(one.dtype), one.scope()) == (str(other.dtype), other.scope()) and all(
        tvm_ffi.structural_equal(list(a), list(b), map_free_vars=True)
        for a, b in ((one.shape, other.shape), (one.strides, other.strides))
    )


def _size(func: tirx.PrimFunc) -> _Size:
    size = _Size()
    _measure(func.body, size, 1, 1, 1)
    return size


def _measure(stmt: tirx.Stmt, size: _Size, work: int, unrolled: int, lanes: int) -> None:
    if isinstance(stmt, tirx.For):
        extent = _constant(stmt.extent)
        if stmt.kind == tirx.ForKind.UNROLLED:
            unrolled *= extent
        elif stmt.kind == tirx.ForKind.VECTORIZED:
            lanes *= extent
        size.lanes = max(size.lanes, lanes)
        _measure(stmt.body, size, work * extent, unrolled, lanes)
    elif isinstance(stmt, s_tir.SBlockRealize):
        size.memory += sum(map(_bytes, stmt.block.alloc_buffers))
        for part in (stmt.block.init, stmt.block.body):
            if part is not None:
                _measure(part, size, work, unrolled, lanes)
    elif isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            _measure(part, size, work, unrolled, lanes)
    elif isinstance(stmt, tirx.IfThenElse):
        _measure(stmt.then_case, size, work, unrolled, lanes)
        if stmt.else_case is not None:
            _measure(stmt.else_case, size, work, unrolled, lanes)
    elif isinstance(getattr(stmt, "body", None), tirx.Stmt):
        _measure(stmt.body, size, work, unrolled, lanes)
    else:
        size.work += work
        size.statements += unrolled * lanes


def _bytes(buffer: tirx.Buffer) -> int:
    dtype = tvm.runtime.DataType(str(buffer.dtype))
    return prod(map(_constant, buffer.shape)) * dtype.bits * dtype.lanes // 8


def _constant(extent: Any) -> int:
    return max(0, int(extent)) if isinstance(extent, int | tirx.IntImm) else 1
