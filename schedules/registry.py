"""The list of all spaces, in the order in which they are asked; the last of each target kind matches everything."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from schedules.analysis import is_empty
from schedules.free import shown_function
from schedules.space import Space

__all__ = ["all_spaces", "by_name", "find", "matching"]


def all_spaces(target_kind: str) -> tuple[Space, ...]:
    """The spaces of a target kind (``llvm`` or ``cuda``), most specific first."""
    if target_kind == "cuda":
        from schedules.cuda import SPACES as cuda

        return cuda
    from schedules.cpu import SPACES as cpu

    return cpu


def find(func: tirx.PrimFunc, target: tvm.target.Target) -> Space:
    """The first space that matches ``func``, at its usual sizes, on ``target``; the last one for empty tensors."""
    return next(matching(func, target))


def matching(func: tirx.PrimFunc, target: tvm.target.Target) -> Iterator[Space]:
    """All spaces that match ``func``, in the order in which :func:`find` asks them."""
    usual = shown_function(func, target)
    spaces = all_spaces(target.kind.name)
    if is_empty(usual):
        yield spaces[-1]
        return
    yield from (s for s in spaces if (usual is func or s.free_sizes) and _matches(s, usual, target))


def _matches(space: Space, func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    try:
        return space.matches(func, target)
    except s_tir.ScheduleError:  # the function is no sequence of blocks, and the space did not expect that
        return False


def by_name(name: str, target_kind: str) -> Space | None:
    """The space called ``name``, or None (a log may name a space that no longer exists)."""
    return next((s for s in all_spaces(target_kind) if s.name == name), None)
