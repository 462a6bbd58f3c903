"""Dispatch by size: a range of sizes is divided into pieces, each with its own schedule.

A schedule that suits a few rows does not suit thousands, and one for a single size has no ragged tiles at all. A
scheduled function carries the others that may stand in for it in an attribute, :data:`PIECES`, each with the box of
sizes that it is for; lowering makes functions of them, and each call goes to the first one whose box it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from schedules.alignment import ANYWHERE
from schedules.flatten_spatial import FLAT, FUSED
from schedules.free import SIZES, specialised, variables
from schedules.merged import MERGED
from schedules.trimmed import trimmed

__all__ = ["FITS", "PIECES", "Box", "Piece", "boxed", "expanded", "pieces_of", "with_pieces"]

#: the attribute of a scheduled function: ``[box, function]`` of each piece, in the order in which calls try them
PIECES = "mlc.pieces"

#: the attribute of a function whose arguments are known to be what it was compiled for: it does not check them
FITS = "mlc.fits"

#: the lowest and the highest size of each free variable, in the order of :func:`schedules.free.variables`
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A scheduled function for the sizes in ``box``; it has parameters for those sizes only that the box leaves free.
    """

    box: Box
    func: tirx.PrimFunc


def boxed(func: tirx.PrimFunc, box: Box, usual: Sequence[int]) -> tirx.PrimFunc:
    """A function with free sizes for the sizes in ``box``, of which ``usual`` are what decisions are taken for.

    Sizes of which the box has one only are numbers in it, and what the box does not need is not computed. What no size
    needs stays: it is there on purpose, as the columns that fill the last panel of packed weights.
    """
    free = variables(func)
    fixed = {var: low for var, (low, high) in zip(free, box, strict=True) if low == high}
    free_sizes = [[low, high, size] for (low, high), size in zip(box, usual, strict=True) if low != high]
    made = specialised(func, fixed) if fixed else func
    made = made.with_attr(SIZES, free_sizes) if free_sizes else made.without_attr(MERGED)
    return trimmed(made) if trimmed(func) is func else made


def with_pieces(func: tirx.PrimFunc, pieces: Sequence[Piece]) -> tirx.PrimFunc:
    """The scheduled function with others for parts of its range."""
    if not pieces:
        return func
    return func.with_attr(PIECES, [[[list(ends) for ends in piece.box], piece.func] for piece in pieces])


def pieces_of(func: tirx.PrimFunc) -> list[Piece]:
    """The pieces of a scheduled function; none where it has but one schedule."""
    if not (func.attrs and PIECES in func.attrs):
        return []
    return [Piece(tuple((int(low), int(high)) for low, high in box), piece) for box, piece in func.attrs[PIECES]]


def expanded(mod: tvm.IRModule) -> tvm.IRModule:
    """Every function with pieces as one that calls the piece for the sizes at hand, or the function itself.

    That one has checked its arguments, and hands bfloat16 on as TVM stores it, as uint16, which a check would refuse.
    """
    made: dict[Any, tirx.PrimFunc] = {}
    for var, func in mod.functions_items():
        if not (isinstance(func, tirx.PrimFunc) and pieces_of(func)):
            made[var] = func
            continue
        symbol = str(func.attrs["global_symbol"])
        pieces = pieces_of(func)
        if pieces[-1].box == tuple((int(low), int(high)) for low, high, _ in func.attrs[SIZES]):
            general = pieces.pop().func  # which serves all sizes
        else:
            general = _general(func, [piece.box for piece in pieces])
        names = [f"{symbol}__{number}" for number in range(len(pieces) + 1)]
        for name, piece in zip(names, [*(piece.func for piece in pieces), general], strict=True):
            made[tvm.ir.GlobalVar(name)] = _called(_like(piece, func)).with_attrs(
                {"global_symbol": name, FITS: True})
        made[var] = _dispatch(func.without_attr(PIECES), names, [piece.box for piece in pieces])
    return tvm.IRModule(made, attrs=mod.attrs)


def _called(piece: tirx.PrimFunc) -> tirx.PrimFunc:
    """A piece, which is given the tensors that it has: sizes and axes are put together where it is called."""
    for key in (MERGED, FUSED, FLAT) if piece.attrs and FUSED in piece.attrs else (MERGED,):
        piece = piece.without_attr(key)
    return piece


def _general(func: tirx.PrimFunc, boxes: Sequence[Box]) -> tirx.PrimFunc:
    """The function for the sizes that no box holds: with one free size, none as small as the lowest boxes' are."""
    func = func.without_attr(PIECES)
    if len(func.attrs[SIZES]) != 1:
        return func
    (low, high, usual), = ([int(each) for each in size] for size in func.attrs[SIZES])
    for (first, last), in sorted(boxes):
        low = last + 1 if first <= low <= last else low
    return func.with_attr(SIZES, [[low, high, usual]]) if low <= usual else func


def _dispatch(func: tirx.PrimFunc, names: Sequence[str], boxes: Sequence[Box]) -> tirx.PrimFunc:
    """``f(n, ..) { if (n is in the first box) f__0(n, ..) else .. else f__k(n, ..) }``."""
    free = variables(func)
    ranges = [(int(low), int(high)) for low, high, _ in func.attrs[SIZES]]
    body = tirx.Evaluate(tirx.call_cpacked(names[-1], *func.params))
    for name, box in reversed(list(zip(names, boxes, strict=False))):
        fixed = [var for var, (low, high) in zip(free, box, strict=True) if low == high]
        given = [param for param in func.params if not any(param.same_as(var) for var in fixed)]
        inside = _inside(free, box, ranges)
        body = tirx.IfThenElse(inside, tirx.Evaluate(tirx.call_cpacked(name, *given)), body)
    made = tirx.PrimFunc(func.params, body, func.ret_type)
    return _like(made, func).with_attr("global_symbol", func.attrs["global_symbol"])


def _like(made: tirx.PrimFunc, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``made``, built for the target of ``func``."""
    known = ("target", "tirx.noalias", "tirx.is_scheduled", ANYWHERE, FLAT, FUSED, MERGED)
    kept = {key: func.attrs[key] for key in known if key in func.attrs}
    for key, value in kept.items():
        made = made.with_attr(key, value)
    return made


def _inside(free: Sequence[tirx.Var], box: Box, ranges: Sequence[tuple[int, int]]) -> Any:
    tests: list[Any] = []
    for var, (low, high), (least, most) in zip(free, box, ranges, strict=True):
        if low == high:
            tests.append(var == tirx.const(low, str(var.ty)))
        else:
            tests += [var >= tirx.const(low, str(var.ty))] if low > least else []
            tests += [var <= tirx.const(high, str(var.ty))] if high < most else []
    return tirx.all(*tests) if tests else tirx.const(True, "bool")
