"""Images whose channels lie together, as the operand of an implicit matrix product: a row for each window of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from tvm import sym, tirx
from tvm.ir import Range, TensorLoad

from schedules.analysis import BlockInfo, branches, evaluate, replaced
from schedules.cuda.common import Leaf, ceil_div, leaves, scratch
from schedules.cuda.contraction import BATCH, Contraction, K, M
from schedules.cuda.emit import i32, i64
from schedules.cuda.hopper import MOST_SPAN, MOST_STEP, SWIZZLE_BYTES

__all__ = ["WIDE", "Boxes", "Image", "image_of"]

#: channels of a pixel that are copied at a time
WIDE = SWIZZLE_BYTES // 2
#: pixels lie at multiples of so many bytes
_ALIGNED_BYTES = 16
#: rows of a warp's slice of results, that are pixels of a box too where they leave in one
_SLICE = 16


@dataclass(frozen=True)
class Boxes:
    """Results ``[images, height, width]`` as boxes of as many images, lines and columns: a tile has the pixels of
    one."""

    shape: tuple[int, int, int]
    results: tuple[int, int, int]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of boxes."""
        images, lines, columns = (ceil_div(size, of) for size, of in zip(self.results, self.shape, strict=True))
        return images, lines, columns

    @property
    def count(self) -> int:
        images, lines, columns = self.counts
        return images * lines * columns

    @property
    def pixels(self) -> int:
        """Of a box."""
        images, lines, columns = self.shape
        return images * lines * columns

    @property
    def slice(self) -> tuple[int, int, int]:
        """The box of a warp's slice of a box whose sides are powers of two."""
        columns = min(_SLICE, self.shape[2])
        lines = min(_SLICE // columns, self.shape[1])
        return _SLICE // columns // lines, lines, columns


@dataclass(frozen=True)
class Image:
    """Windows ``[rows, depth]`` of images ``[n, 1, height, width, channels]`` in ``buffer``: a row has, place after
    place of a window of ``window`` lines and columns, all channels, zeros outside of the image. ``results`` are the
    images, lines and columns of windows, ``strides`` and ``dilation`` of lines and columns, and ``pads`` the lines
    above an image and columns left of it. Of several products, ``batches`` has for each axis that numbers them how many
    there are, and by how many lines and columns the windows of one lie behind those of the one before."""

    buffer: tirx.Buffer
    results: tuple[int, int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int]
    batches: tuple[tuple[int, int, int], ...] = ()

    #: neighbours in memory are steps along ``depth``
    across = False

    @property
    def batch(self) -> int:
        """Of products."""
        return prod(count for count, _, _ in self.batches)

    @property
    def channels(self) -> int:
        return int(self.buffer.shape[-1])

    @property
    def pieces(self) -> int:
        """Of a pixel's channels, the last one filled up with zeros."""
        return ceil_div(self.channels, WIDE)

    @property
    def depth(self) -> int:
        """Of a row, zeros that pieces are filled up with included."""
        return self.window[0] * self.window[1] * self.pieces * WIDE

    @property
    def first(self) -> TensorLoad:
        return tirx.BufferLoad(self.buffer, [i64(0)] * len(self.buffer.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """As :func:`schedules.cuda.hopper.encode` takes them: channels, columns, lines, images."""
        n, _, height, width, channels = (int(size) for size in self.buffer.shape)
        return channels, width, height, n

    @property
    def byte_strides(self) -> tuple[int, ...]:
        channels, width, height, _ = self.sizes
        return 2 * channels, 2 * channels * width, 2 * channels * width * height

    def shift(self, batch: Any) -> tuple[Any, Any]:
        """The lines and columns by which the windows of a product lie behind those of the first one."""
        lines: Any = i32(0)
        columns: Any = i32(0)
        for count, down, right in reversed(self.batches):
            batch, number = batch // count, batch % count
            lines, columns = lines + number * down, columns + number * right
        return lines, columns

    def boxes(self, rows: int, *, boxed: bool) -> Boxes:
        """How tiles of so many rows have the pixels of the results; ``boxed``: results leave in boxes too."""
        return _boxes(self.results, self.strides, rows, boxed)


@lru_cache(maxsize=256)
def _boxes(results: tuple[int, int, int], strides: tuple[int, int], rows: int, boxed: bool) -> Boxes:
    """The fewest boxes of at most so many pixels, and of these the smallest, of as few images as may be; where results
    leave in boxes too, of just as many, their sides powers of two."""
    found = (Boxes(shape, results) for shape in _shapes(results, strides, rows, boxed))
    return min(found, key=lambda boxes: (boxes.count, boxes.pixels, boxes.shape))


def _shapes(
    results: tuple[int, int, int], strides: tuple[int, int], rows: int, boxed: bool
) -> Iterator[tuple[int, int, int]]:
    spans = MOST_SPAN, *(MOST_SPAN // stride for stride in strides)
    if boxed:
        powers = [1 << p for p in range(rows.bit_length())]
        for images, lines in product(powers, powers):
            columns = rows // (images * lines)
            if columns and images <= spans[0] and lines <= spans[1] and columns <= spans[2]:
                yield images, lines, columns
        return
    for lines in range(1, min(rows, results[1], spans[1]) + 1):
        for columns in range(1, min(rows // lines, results[2], spans[2]) + 1):
            yield min(rows // (lines * columns), results[0], spans[0]), lines, columns


def image_of(contraction: Contraction, func: tirx.PrimFunc) -> Image | None:
    """The image that the convolution of a function reads, where boxes of it can be copied; else None."""
    found = leaves(scratch(func))
    main = next(leaf.info for leaf in found if leaf.info.kind == "reduction")
    axes = {role: [i for i, its in enumerate(contraction.roles) if its == role] for role in (BATCH, M, K)}
    if main.factors is None or contraction.group is not None or len(axes[M]) != 4 or len(axes[K]) != 3:
        return None
    load: Any = main.factors[0 if contraction.lhs_is_a else 1]
    guard, load = _source(load, found)
    if len(load.source.shape) != 5 or not any(p.same_as(load.source) for p in func.params):
        return None
    places = [_linear(index, main) for index in load.indices]
    if any(place is None for place in places) or not _pads(guard, load, main):
        return None
    return _image(load.source, [place for place in places if place is not None], main.extents, axes)


def _source(load: Any, found: Sequence[Leaf]) -> tuple[Any, Any]:
    """What is loaded of the function's parameter, where ``load`` is of what a block pads it to, and where it is."""
    for leaf in found:
        block, info = leaf.info.block, leaf.info
        if not leaf.writes_to(load.source) or info.kind != "injective" or not isinstance(block.body, tirx.BufferStore):
            continue
        own = all(var.same_as(index) for var, index in zip(info.variables, block.body.indices, strict=False))
        choice = branches(replaced(block.body.value, dict(zip(info.variables, load.indices, strict=True))))
        if own and choice is not None and isinstance(choice[1], TensorLoad) and _is_zero(choice[2]):
            return choice[0], choice[1]
    return None, load


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm) and float(value.value) == 0.0


def _linear(index: Any, main: BlockInfo) -> list[int] | None:
    """The steps of an index for each iterator, and where it begins."""
    analyzer = sym.Analyzer()
    for variable, extent in zip(main.variables, main.extents, strict=True):
        analyzer.bind(variable, Range(0, extent))
    found = sym.detect_linear_equation(analyzer.simplify(index), list(main.variables))
    if not found or not all(isinstance(each, tirx.IntImm) for each in found):
        return None
    return [int(each) for each in found]


def _pads(guard: Any, load: TensorLoad, main: BlockInfo) -> bool:
    """Whether what is loaded is all of the image that windows have: elsewhere the function has zeros."""
    return guard is None or all(_follows(each, load, main) for each in _conjuncts(guard))


def _conjuncts(guard: Any) -> Iterator[Any]:
    if isinstance(guard, tirx.And):
        yield from _conjuncts(guard.a)
        yield from _conjuncts(guard.b)
    else:
        yield guard


def _follows(condition: Any, load: TensorLoad, main: BlockInfo) -> bool:
    """Whether a condition holds wherever the indices that it depends on are the image's."""
    free = tirx.analysis.undefined_vars(condition)
    used = [i for i, var in enumerate(main.variables) if any(var.same_as(each) for each in free)]
    grids = np.meshgrid(*(np.arange(main.extents[i]) for i in used), indexing="ij")
    values = {main.variables[i]: grid for i, grid in zip(used, grids, strict=True)}
    inside: Any = True
    for index, size in zip(load.indices, load.source.shape, strict=True):
        at = evaluate(index, values)
        if at is not None:  # it depends on no other
            inside = inside & (np.asarray(at) >= 0) & (np.asarray(at) < int(size))
    holds = evaluate(condition, values)
    return holds is not None and bool(np.all(np.where(inside, holds, True)))


def _image(
    buffer: tirx.Buffer, places: list[list[int]], extents: tuple[int, ...], axes: Mapping[str, Sequence[int]]
) -> Image | None:
    """Iterators of the role M are images, 1, lines and columns of the results, of K lines and columns of a window and
    channels."""
    def steps(dimension: int) -> dict[int, int]:
        return {i: step for i, step in enumerate(places[dimension][:-1]) if step and extents[i] > 1}

    (image, one, line, column), (down, right, channel) = axes[M], axes[K]
    channels = extents[channel]
    if extents[one] != 1 or channels != int(buffer.shape[-1]) or 2 * channels % _ALIGNED_BYTES:
        return None
    begins = [place[-1] for place in places]
    alone = all(steps(d) == ({i: 1} if extents[i] > 1 else {}) and not begins[d] for d, i in ((0, image), (4, channel)))
    along, batches = [steps(2), steps(3)], axes[BATCH]
    allowed = {line, down, *batches}, {column, right, *batches}
    if not alone or steps(1) or begins[1] or any(set(each) - of for each, of in zip(along, allowed, strict=True)):
        return None
    strides, dilation = along[0].get(line, 1), along[1].get(column, 1)
    reach = along[0].get(down, 1), along[1].get(right, 1)
    if not all(0 < step <= MOST_STEP for step in (strides, dilation)) or min(reach) < 1:
        return None
    return Image(
        buffer, (extents[image], extents[line], extents[column]), (extents[down], extents[right]), (strides, dilation),
        reach, (-begins[2], -begins[3]),
        tuple((extents[i], along[0].get(i, 0), along[1].get(i, 0)) for i in batches if extents[i] > 1))
