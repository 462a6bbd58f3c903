"""How a range of sizes is divided into pieces, each with its own schedule where that is worth it.

One schedule serves sizes from a small part of the usual one upwards: chunks end with the last row, and register tiles
that are not full cost what full ones do. Sizes far below have less than one tile, or too little work to wake the
threads for, and are a part of their own where the schedule made for them is another one. The usual sizes themselves are
a part where the log has a record of them. Where the work of one image is shared by the cores only if there are several,
as a schedule for a batch of four may have it, odd numbers of them leave cores waiting: such sizes are a part where the
schedule made for them is a more even one. For few rows there may be another kind of kernel, as for attention: each
number of them is a part then, since such a kernel holds its rows in registers. One row alone, as of one token or one
image, is a part where the schedule made for it is another one: in a tile of several rows it is computed as often.

Tiles of GPUs are as large as leave no multiprocessor idle: for one free size, its parts are those of a factor of eight.
Up to 64 rows are computed as so many (:mod:`schedules.capped`), so that their sums can be cut over blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from tvm import tirx

from mlc.graph.task import Task, normalise
from schedules import registry
from schedules.analysis import walk
from schedules.capped import capped, of_most_rows
from schedules.free import SIZES, variables
from schedules.load_balance import imbalance
from schedules.machine import cpu_machine
from schedules.pieces import Box, Piece, boxed, with_pieces

__all__ = ["Scheduled", "bands", "in_pieces", "octaves"]

#: what a schedule of a task was made of, to be told apart from others, and the scheduled function
Scheduled = tuple[Any, tirx.PrimFunc]

#: the schedule for a size serves sizes down to this part of it, and, of functions of one free size, its rows, down to
#: those of a register tile: where there may be fewer, each row has an address of its own, of which registers hold eight
_DOWN, _TILE = 16, 12
#: the most rows that may have a kernel of another kind: each number of them costs half a second to compile
_FEW = 2
#: where GPUs' ranges are cut: larger tiles than those for the most suit nothing
_CUTS = (8, 64, 512, 4096)
#: sizes are a part of their own where cores that wait make them this many times slower than their own schedule's do,
#: and at most so many such parts are made, each of which is compiled
_UNEVEN, _MOST_UNEVEN = 1.15, 3


def in_pieces(
    task: Task, whole: Scheduled, tuned: Callable[[Task], Scheduled | None],
    seeded: Callable[[Task], Scheduled | None],
) -> tirx.PrimFunc:
    """The function of a task with free sizes, scheduled for ``whole`` of their ranges, with the pieces that serve parts
    of them better.

    ``tuned`` gives the log's schedule of the task for a part, ``seeded`` its space's; None where there is none.
    """
    few = _for_most_rows(task, seeded)
    even = list(_evened(task, whole[1], seeded))
    apart: list[tuple[Box, Scheduled]] = []  # the narrowest boxes last
    for box, usual in _boxes(task):
        func = boxed(task.func, box, usual)
        part = replace(task, func=func if SIZES in func.attrs else normalise(func))
        found = tuned(part)
        if found is None and not _usual(task.func, box) and not any(each.box == box for each in even):
            found = _for_most_rows(part, seeded) or seeded(part)
            others = next((made for around, made in reversed(apart) if _holds(around, box)), whole)
            if found is not None and found[0] == others[0] and _parallel(found[1]) == _parallel(others[1]):
                found = None
        if found is not None:
            apart.append((box, found))
    pieces = [*even, *(Piece(box, made[1]) for box, made in reversed(apart))]
    if few is not None:
        pieces.append(Piece(tuple((int(low), int(high)) for low, high, _ in task.func.attrs[SIZES]), few[1]))
    return with_pieces(whole[1], pieces)


def _for_most_rows(task: Task, seeded: Callable[[Task], Scheduled | None]) -> Scheduled | None:
    """The schedule of a GPU's function for as many rows as there may be, where these are few and need not all be there;
    None for other functions, and for kernels that lowering writes out for any number."""
    sizes = task.func.attrs.get(SIZES, [])
    most = of_most_rows(task.func) if task.target.kind == "cuda" and len(sizes) == 1 else None
    if most is None or int(sizes[0][1]) > _CUTS[1]:
        return None
    func, axes = most
    found = seeded(replace(task, func=normalise(func)))
    space = None if found is None else registry.by_name(found[0][0], "cuda")
    if found is None or space is None or space.written_out:
        return None
    return found[0], capped(found[1], axes)


def _holds(around: Box, box: Box) -> bool:
    return all(low <= first and last <= high for (low, high), (first, last) in zip(around, box, strict=True))


def _evened(
    task: Task, whole: tirx.PrimFunc, seeded: Callable[[Task], Scheduled | None]
) -> Iterator[Piece]:
    """Pieces for single sizes at which ``whole`` leaves cores waiting and a schedule of their own does not."""
    for size, waiting in _uneven(task, whole):
        box = ((size, size),)
        found = seeded(replace(task, func=normalise(boxed(task.func, box, [size]))))
        own = None if found is None else imbalance(found[1], cpu_machine(task.target.tvm).cores)
        if found is not None and own is not None and own * _UNEVEN <= waiting:
            yield Piece(box, found[1])


def _uneven(task: Task, whole: tirx.PrimFunc) -> list[tuple[int, float]]:
    """The sizes at which ``whole`` leaves cores waiting, the worst first, each with how much that costs.

    Where several sizes have as many parallel iterations, the last of these is a short one for most of them, and what
    the cores wait for is not known.
    """
    if task.target.kind != "llvm" or len(task.func.attrs[SIZES]) != 1:
        return []
    (low, high, usual), = ([int(each) for each in size] for size in task.func.attrs[SIZES])
    low, high, _ = list(bands(low, high, usual, least=_TILE))[-1]
    (var,) = variables(whole)
    waiting = imbalance(whole, cpu_machine(task.target.tvm).cores, {var: np.arange(low, high + 1)})
    if waiting is None or waiting.size < 2:
        return []
    alone = np.diff(waiting, prepend=np.nan) != 0, np.diff(waiting, append=np.nan) != 0
    found = np.flatnonzero((waiting >= _UNEVEN) & alone[0] & alone[1])
    return sorted(((low + int(at), float(waiting[at])) for at in found), key=lambda each: -each[1])[:_MOST_UNEVEN]


def _parallel(func: tirx.PrimFunc) -> int:
    """How many loops run in parallel: some spaces decide that by sizes alone."""
    kinds: list[int] = []
    walk(func.body, (tirx.For, lambda loop: kinds.append(int(loop.kind))))
    return sum(kind == tirx.ForKind.PARALLEL for kind in kinds)


def _usual(func: tirx.PrimFunc, box: Box) -> bool:
    return all(low == high == int(usual) for (low, high), (_, _, usual) in zip(box, func.attrs[SIZES], strict=True))


def _boxes(task: Task) -> Iterator[tuple[Box, Sequence[int]]]:
    """The parts of a function's range that may be pieces, each with the sizes that it would be scheduled for; one that
    lies in another comes after it, and the usual sizes last."""
    sizes = [(int(low), int(high), int(usual)) for low, high, usual in task.func.attrs[SIZES]]
    least, alone = _TILE if len(sizes) == 1 else 0, task.target.kind == "cuda" and len(sizes) == 1
    few = [_few(task, sizes, axis) for axis in range(len(sizes))]
    cuts = [list(octaves(low, high, usual, own) if alone else bands(low, high, usual, own, least))
            for (low, high, usual), own in zip(sizes, few, strict=True)]
    for parts in product(*cuts):
        whole = all(usual == own for (*_, usual), (*_, own) in zip(parts, sizes, strict=True))
        if not whole:  # what is left of the range
            yield tuple((low, high) for low, high, _ in parts), [usual for *_, usual in parts]
    if all(low == 1 for low, *_ in sizes) and any(usual > 1 for (*_, usual), *_ in cuts):
        yield ((1, 1),) * len(sizes), [1] * len(sizes)
    yield tuple((usual, usual) for *_, usual in sizes), [usual for *_, usual in sizes]


def _few(task: Task, sizes: Sequence[tuple[int, int, int]], axis: int) -> list[int]:
    """The lowest sizes of one variable that another kind of kernel is for; none where it is one for all of them."""
    low, high, usual = sizes[axis]
    if not low:
        return []
    usuals = [each for *_, each in sizes]
    target = task.target.tvm
    own, found = registry.find(task.func, target), []
    for size in range(low, min(_FEW, high - 1, usual - 1) + 1):
        box = tuple((size, size) if i == axis else (first, last) for i, (first, last, _) in enumerate(sizes))
        part = boxed(task.func, box, [size if i == axis else each for i, each in enumerate(usuals)])
        if registry.find(part, target) is own:
            break
        found.append(size)
    return found


def octaves(low: int, high: int, usual: int, few: Sequence[int] = ()) -> Iterator[tuple[int, int, int]]:
    """A range cut at powers of eight up to 4096, each part with the size that it is scheduled for, the usual one or
    half of the largest: ``1..5000`` with 100 as the usual size is ``1..8``, ``9..64``, ``65..512``, ``513..4096`` and
    ``4097..5000``. ``few`` are the lowest sizes, each of which is a part of its own."""
    for size in few:
        yield size, size, size
        low = size + 1
    for most in (*(cut for cut in _CUTS if low <= cut < high), high):
        yield low, most, usual if low <= usual <= most else max(low, min(most, 4 * _CUTS[-1]) // 2)
        low = most + 1


def bands(
    low: int, high: int, usual: int, few: Sequence[int] = (), least: int = 0
) -> Iterator[tuple[int, int, int]]:
    """A range cut into bands, each with the size that it is scheduled for: ``1..4096`` with 512 as the usual size is
    ``1..2``, ``3..32`` and ``33..4096``; with 12 as the ``least`` of a band that has such usual sizes it is ``1..11``,
    ``12..32`` and ``33..4096``. What begins at 0, the length of what is remembered, is not cut: other sizes say how
    many rows are computed. ``few`` are the lowest sizes, each of which is a band of its own."""
    for size in few:
        yield size, size, size
        low = size + 1
    most = max(usual // _DOWN, least - 1 if usual >= least else 0)
    if most < low or not low:
        yield low, high, usual
        return
    yield from bands(low, most, max(low, most // 2), least=least)
    yield most + 1, high, usual
