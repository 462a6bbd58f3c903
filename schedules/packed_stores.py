"""Packed narrowing stores: four vectors of 32-bit integers are clipped to bytes and stored with one instruction.

A requantised sum of products ends as ``uint8(max(min(sum, 255), 0))``. For single vectors, LLVM clips, narrows with an
instruction of two micro-operations, and stores a quarter of a vector. If four (or two) vectors go to adjacent
addresses, they are narrowed together: first to 16 bits and then to 8, both with saturation, which does all the clipping
(``packssdw``, ``packuswb``, ``packsswb``). These instructions work within lanes of 128 bits, which one shuffle puts in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.analysis import loads

__all__ = ["with_packed_stores"]

#: bytes of the pieces that x86 narrows separately
_PIECE_WORDS = 4
#: by lanes of 32 bits: what the target must have, and how the names of instructions on so many begin and end
_FORMS = {
    4: ("sse2", "llvm.x86.sse2.{}.128"),
    8: ("avx2", "llvm.x86.avx2.{}"),
    16: ("avx512bw", "llvm.x86.avx512.{}.512"),
}
#: the instruction that narrows 16 bits to each type of 8, and the type's ends
_BYTES = {"uint8": ("packuswb", 0, 255), "int8": ("packsswb", -128, 127)}


@dataclass(frozen=True)
class _Store:
    """A vector of bytes that is stored at ``base``: ``value`` is of 32 bits and saturated by the store."""

    buffer: tirx.Var
    base: Any
    value: Any
    dtype: str
    lanes: int


def with_packed_stores(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A lowered function of an x86 target whose clipped bytes are stored several vectors at a time; the same object
    where there are none.

    ``B[i:i+16] = uint8(clip(x)); B[i+16:i+32] = uint8(clip(y)); ..   -->   B[i:i+64] = narrowed(x, y, ..)``
    """
    target = func.attrs["target"] if func.attrs and "target" in func.attrs else None
    if target is None or str(target.kind.name) != "llvm":
        return func
    with target:
        lanes = [n for n, (feature, _) in _FORMS.items() if tvm.target.codegen.llvm_cpu_has_features(feature, target)]
    changed: list[bool] = []

    def join(sequence: tirx.SeqStmt) -> tirx.Stmt:
        statements = _joined(list(sequence.seq), lanes)
        if statements is None:
            return sequence
        changed.append(True)
        return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, join)) if lanes else func.body
    return func.with_body(body) if changed else func


def _joined(statements: Sequence[tirx.Stmt], lanes: Sequence[int]) -> list[tirx.Stmt] | None:
    """The statements of a sequence with neighbouring stores joined, None where there are no such."""
    made: list[tirx.Stmt] = []
    run: list[tuple[tirx.Stmt, _Store]] = []
    joined = False
    for statement in (*statements, None):
        store = _clipped(statement, lanes) if isinstance(statement, tirx.BufferStore) else None
        if run and (store is None or not _follows(run[-1][1], store)):
            while run:
                count = next(n for n in (4, 2, 1) if n <= len(run))
                joined = joined or count > 1
                made.append(_narrowed([each for _, each in run[:count]]) if count > 1 else run[0][0])
                run = run[count:]
        if store is not None:
            run.append((statement, store))
        elif statement is not None:
            made.append(statement)
    return made if joined else None


def _follows(before: _Store, store: _Store) -> bool:
    """Whether ``store`` goes to where ``before`` ends, in the same manner."""
    alike = before.buffer.same_as(store.buffer) and (before.dtype, before.lanes) == (store.dtype, store.lanes)
    return alike and tvm.sym.Analyzer().can_prove_equal(store.base - before.base, before.lanes)


def _clipped(store: tirx.BufferStore, lanes: Sequence[int]) -> _Store | None:
    """A store of a vector of bytes that are clipped integers of 32 bits, None where it is any other. What is stored
    may not depend on what the buffer held: it is computed later."""
    value = store.value
    if len(store.indices) != 1 or not isinstance(store.indices[0], tirx.Ramp) or not isinstance(value, tirx.Cast):
        return None
    place, known = store.indices[0], tvm.runtime.DataType(str(value.ty))
    dtype, count = f"{'uint' if str(value.ty).startswith('u') else 'int'}{known.bits}", known.lanes
    if dtype not in _BYTES or count not in lanes or str(value.value.ty) != f"int32x{count}" or int(place.stride) != 1:
        return None
    if getattr(store, "predicate", None) is not None or any(load.source.same_as(store.buffer) for load in loads(value)):
        return None
    found = _without_ends(value.value, *_BYTES[dtype][1:])
    return None if found is None else _Store(store.buffer, place.base, found, dtype, count)


def _without_ends(value: Any, low: int, high: int) -> Any:
    """A value that is clipped to between ``low`` and ``high``, without the bounds that are these; None where it may
    be outside."""
    bounds: dict[type, int] = {}
    kept: list[tuple[type, Any]] = []
    while isinstance(value, (tirx.Max, tirx.Min)) and type(value) not in bounds and isinstance(value.b, tirx.Broadcast):
        bound = value.b.value
        if not isinstance(bound, tirx.IntImm):
            break
        bounds[type(value)] = int(bound)
        if int(bound) != (low if isinstance(value, tirx.Max) else high):
            kept.append((type(value), value.b))
        value = value.a
    if not low <= bounds.get(tirx.Max, low - 1) <= bounds.get(tirx.Min, high + 1) <= high:
        return None
    for bounded, bound in reversed(kept):
        value = bounded(value, bound)
    return value


def _narrowed(stores: Sequence[_Store]) -> tirx.Stmt:
    """One store of what two or four stores that follow each other write."""
    first = stores[0]
    name, halves, words = _FORMS[first.lanes][1], f"int16x{2 * first.lanes}", f"int32x{first.lanes}"
    values = [store.value for store in stores]
    pairs = [tirx.call_llvm_pure_intrin(halves, name.format("packssdw"), *values[i : i + 2])
             for i in range(0, len(values), 2)]
    narrow = name.format(_BYTES[first.dtype][0])
    whole = tirx.call_llvm_pure_intrin(f"int8x{4 * first.lanes}", narrow, pairs[0], pairs[-1])
    pieces = first.lanes // _PIECE_WORDS
    order = [piece * _PIECE_WORDS + number for number in range(len(stores)) for piece in range(pieces)]
    vector = tirx.reinterpret(words, whole)
    if order != list(range(first.lanes)):
        vector = tirx.Shuffle([vector], [tirx.const(each, "int32") for each in order])
    count = first.lanes * len(stores)
    return tirx.BufferStore(first.buffer, tirx.reinterpret(f"{first.dtype}x{count}", vector),
                            [tirx.Ramp(first.base, 1, count)])
