"""The layouts that each operator supports and their costs: which regions of a graph may be blocked, and how.

:meth:`Planner.choose` hands every alternative of every operator to :func:`mlc.graph.layout.assign.assign`. Layouts
spread along operators that keep the channels; a convolution may read one blocking and write another. One block of all
channels is what lies in rows of channels, a pixel each, as layers around attention have them: no copy is needed from
there nor back, and what treats each channel by itself is as fast. Prices are
analytic: arithmetic on whole blocks, so that padding lanes cost what they cost, and conversions by the bytes that they
move.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.registry import fastest
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import BLOCK, ChannelBlocks, merged_groups
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.movement import permutation, window
from mlc.graph.ir.rewrite import bindings, dtype_of, leaves, shape_of
from mlc.graph.layout.assign import Alternative, assign
from mlc.graph.layout.convolutions import (
    CONVOLUTIONS,
    TRANSPOSED,
    convolution,
    is_depthwise,
    is_image,
    name_of,
    phases,
    transposed_axes,
    weight_of,
    with_zeros,
)
from mlc.graph.precision.integer import is_integer_product
from mlc.graph.simplify.channel_shuffles import shuffle_source
from mlc.operators import relax_where
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import Size
from mlc.target import Target

__all__ = ["BINARY", "BINARY_EXACT", "IMAGES", "NARROW", "UNARY", "UNARY_EXACT", "Choice", "Layout", "Planner",
           "Rows", "any_rows_of", "call_of", "channel_slice", "concatenated", "constant_bytes", "moves_batch",
           "pads_space", "rows_of", "takes_operand"]

#: blocks of channels, or None for the plain layout
Layout = ChannelBlocks | None
#: what is chosen for a value
Choice = Alternative[Layout]

#: below this many input channels a convolution may read one narrow block ``[N, 1, H, W, C]`` instead of padding
NARROW = 8

def _elementwise(arity: int, tame: bool) -> set[str]:
    return {f"relax.{name}" for name in relax_where(
        lambda each: each.pointwise and each.arity == arity and each.tame is tame
    )}


# operators whose result on the padding lanes stays finite, since those lanes hold functions of zeros
_QUANTISING = {"relax.quantize", "relax.dequantize"}
UNARY, BINARY = _elementwise(1, True) | _QUANTISING, _elementwise(2, True)
# operators that could make them infinite, for layouts without padding lanes
UNARY_EXACT, BINARY_EXACT = _elementwise(1, False), _elementwise(2, False)

#: transposes between ``[N, H, W, C]`` and ``[N, C, H, W]``
_TO_IMAGE, _TO_ROWS = [0, 3, 1, 2], [0, 2, 3, 1]

_RESIZE = "relax.image.resize2d"
#: of pixels, each channel by itself
IMAGES = ("relax.nn.max_pool2d", "relax.nn.avg_pool2d", _RESIZE)
#: how many times slower windows slide over the plain layout, whose vectors run along the row
_PLAIN_WINDOWS = 2.0
#: how many times slower than products of floats those of integers are there, which no dot product adds up
_PLAIN_INTEGERS = 4.0
#: and how many times slower interpolation is there, whose neighbours do not lie in vectors
_PLAIN_INTERPOLATION = 8.0
#: how many times slower both are where rows are of free width, the last vector of which is computed lane by lane
#: (measured on Zen 5 of widths of 7 to 57: depthwise convolutions 8 to 15, pools 3 to 10)
_PLAIN_FREE = 8.0


def call_of(bound: Mapping[relax.Var, relax.Expr], expr: relax.Expr, name: str) -> relax.Call | None:
    """The call that a variable is bound to, if it is of the operator ``name`` (without ``relax.``)."""
    value = bound.get(expr) if isinstance(expr, relax.Var) else None
    return value if value is not None and name_of(value) == f"relax.{name}" else None


@dataclass
class _Family:
    """Values whose channels are the same, and the layouts that somebody could use one of them in."""

    layouts: dict[ChannelBlocks, None]


def constant_bytes(func: relax.Function) -> int:
    """Bytes of the constants that operators of ``func`` read."""
    arguments = (arg for b in bindings(func) if isinstance(b.value, relax.Call) for arg in b.value.args)
    return sum(array.nbytes for arg in arguments if (array := array_of(arg)) is not None)


class Planner:
    """The choice of layouts for a straight-line function on CPUs."""

    def __init__(self, func: relax.Function, target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> None:
        self._func = func
        self._bound = {binding.var: binding.value for binding in bindings(func)}
        self._options = options
        self._estimate = Estimate(target.tvm, constant_bytes(func))
        self._families: dict[relax.Var, _Family] = {}
        for var, value in self._bound.items():
            self._relate(var, value)
        for _ in range(2):  # a part of a concatenation may be one itself
            for var, value in self._bound.items():
                self._spread(var, value)

    @staticmethod
    def takes(expr: relax.Expr, layout: ChannelBlocks) -> bool:
        """Whether elementwise arithmetic in ``layout`` can read the operand."""
        return takes_operand(expr, layout)

    @staticmethod
    def rows_of(value: relax.Expr) -> Rows | None:
        """The effect of a transpose between images and rows of channels, if that is not a copy; as in the rewriter."""
        return rows_of(value)

    def choose(self) -> dict[Hashable, Choice]:
        """The alternative of each variable that is needed; the result is plain."""
        wanted = [(var, None) for var in dict.fromkeys(leaves(self._func.body.body))]
        return assign(self.values(), wanted, self.conversion)

    def values(self) -> dict[Hashable, list[Choice]]:
        """Every variable with its alternatives, the plain one last: an epilogue stays with its convolution.

        Elementwise operators and concatenations are free, since they become part of other kernels.
        """
        made: dict[Hashable, list[Choice]] = {param: [Alternative(None)] for param in self._func.params}
        for var, value in self._bound.items():
            made[var] = [*self._blocked(var, value), *self._views(var, value), self._plain(var, value)]
        return made

    def conversion(self, var: Hashable, layout: Layout) -> float:
        """Seconds of having a value in one more layout."""
        assert isinstance(var, relax.Var)
        if not is_image(var):
            return 0.0
        blocks = layout or ChannelBlocks(shape_of(var)[1])
        if shape_of(var)[2:] == (1, 1) and not any(each.padded for each in [blocks, *self._family(var).layouts]):
            return 0.0  # a view
        return self._estimate.copy(self._bytes(var, None) + self._bytes(var, blocks))

    # -- which layouts there are to choose from

    def _family(self, var: relax.Var) -> _Family:
        return self._families.setdefault(var, _Family({}))

    def _join(self, a: relax.Var, b: relax.Var) -> None:
        first, second = self._family(a), self._family(b)
        if first is second:
            return
        first.layouts.update(second.layouts)
        for var, family in self._families.items():
            if family is second:
                self._families[var] = first

    def _relate(self, var: relax.Var, value: relax.Expr) -> None:
        """Join what keeps its channels, and note the layouts that a convolution wants."""
        name = name_of(value)
        kept = name in UNARY | UNARY_EXACT | BINARY | BINARY_EXACT or name in IMAGES or name == "relax.mean"
        if kept or moves_batch(value) or pads_space(value):
            for arg in value.args if is_image(var) else ():
                if isinstance(arg, relax.Var) and is_image(arg) and shape_of(arg)[1] == shape_of(var)[1]:
                    self._join(var, arg)
            if name in IMAGES and is_image(var) and isinstance(shape_of(var)[3], Size):  # blocks are not cut by widths
                for layout in _blockings(shape_of(var)[1], 1):
                    self._family(var).layouts[layout] = None
        elif (rows := self.rows_of(value)) is not None:
            image = var if rows.made else value.args[0]
            if isinstance(image, relax.Var):
                self._family(image).layouts[rows.layout] = None
        elif name in CONVOLUTIONS:
            self._relate_convolution(var, value)

    def _relate_convolution(self, var: relax.Var, value: relax.Call) -> None:
        if weight_of(value) is None:
            return
        data, groups = value.args[0], int(value.attrs.groups)
        if is_depthwise(value):
            if isinstance(data, relax.Var):
                self._join(var, data)
            groups = 1
        for layout in _blockings(shape_of(var)[1], groups):
            self._family(var).layouts[layout] = None
        if isinstance(data, relax.Var):
            for layout in _blockings(shape_of(data)[1], groups):
                self._family(data).layouts[layout] = None
            for image, layout in zip((data, var), _merging(value), strict=False):
                self._family(image).layouts[layout] = None

    def _spread(self, var: relax.Var, value: relax.Expr) -> None:
        """Parts of a concatenation, and of a tensor that is cut, are blocked alike where that leaves no padding."""
        fields = concatenated(value)
        cut = channel_slice(value) if is_image(var) else None
        if cut is not None:
            source, begin, end = cut
            for size in (BLOCK, BLOCK // 2):
                if all(c % size == 0 for c in (begin, end, shape_of(source)[1])):
                    for each in (source, var):
                        self._family(each).layouts[ChannelBlocks(shape_of(each)[1], size=size)] = None
                    return
        sizes = [size for size in (BLOCK, BLOCK // 2) if fields and all(shape_of(f)[1] % size == 0 for f in fields)]
        if not sizes or not any(self._family(f).layouts for f in [*fields, var] if isinstance(f, relax.Var)):
            return
        for each in [*fields, var]:
            if isinstance(each, relax.Var):
                self._family(each).layouts[ChannelBlocks(shape_of(each)[1], size=sizes[0])] = None

    # -- alternatives

    def _plain(self, var: relax.Var, value: relax.Expr) -> Choice:
        reads: dict[Hashable, Layout] = dict.fromkeys(leaves(value))
        return Alternative(None, reads, self._plain_seconds(var, value))

    def _plain_seconds(self, var: relax.Var, value: relax.Expr) -> float:
        name, slower = name_of(value), _PLAIN_FREE if is_image(var) and isinstance(shape_of(var)[3], Size) else 1.0
        if name in CONVOLUTIONS and is_image(var) and is_image(value.args[0]):
            conv = with_zeros(value) if name == TRANSPOSED else convolution(value)
            return (_PLAIN_INTEGERS if is_integer_product(value) else 1.0) * slower * self._estimate.plain(conv)
        if name in IMAGES and is_image(var):
            between = name == _RESIZE and value.attrs.method != "nearest_neighbor"
            factor = _PLAIN_INTERPOLATION if between else _PLAIN_WINDOWS
            return factor * slower * self._estimate.copy(self._bytes(value.args[0], None) + self._bytes(var, None))
        if name == "relax.permute_dims":
            return self._estimate.copy(8.0 * math.prod(shape_of(var)))
        return 0.0

    def _views(self, var: relax.Var, value: relax.Expr) -> Iterator[Choice]:
        """An image that lies in rows of channels, and such rows of an image, which are in place."""
        rows = self.rows_of(value)
        if rows is not None and isinstance(value.args[0], relax.Var):
            yield Alternative(rows.layout, {value.args[0]: None}) if rows.made else (
                Alternative(None, {value.args[0]: rows.layout}))

    def _blocked(self, var: relax.Var, value: relax.Expr) -> Iterator[Choice]:
        name = name_of(value)
        if not is_image(var) or self.rows_of(value) is not None:
            return
        if name in CONVOLUTIONS:
            yield from self._convolutions(var, value)
        elif name == "relax.concat":
            yield from self._concatenations(var, value)
        elif (cut := channel_slice(value)) is not None:
            yield from self._slices(var, *cut)
        elif var in self._families:
            for layout in self._families[var].layouts:
                reads = self._reads(name, value, layout)
                if reads is not None:
                    yield Alternative(layout, reads, self._blocked_seconds(name, var, value, layout))

    def _reads(self, name: str, value: relax.Expr, layout: ChannelBlocks) -> dict[Hashable, Layout] | None:
        """The operands that an operator which keeps channels reads to work in ``layout``; None if it cannot."""
        exact = name in UNARY_EXACT | BINARY_EXACT
        within = name in IMAGES or name == "relax.mean" or moves_batch(value) or pads_space(value)
        if name in UNARY | UNARY_EXACT or within:
            data = value.args[0]
            suits = isinstance(data, relax.Var) and is_image(data) and _keeps_channels(value)
            return {data: layout} if suits and not (exact and layout.padded) else None
        if name in BINARY | BINARY_EXACT and not (exact and layout.padded):
            operands = [self.takes(arg, layout) for arg in value.args]
            if all(operands):
                return {arg: layout for arg in value.args if isinstance(arg, relax.Var)}
        return None

    def _blocked_seconds(self, name: str, var: relax.Var, value: relax.Call, layout: ChannelBlocks) -> float:
        if name in IMAGES:
            return self._estimate.copy(self._bytes(value.args[0], layout) + self._bytes(var, layout))
        return 0.0

    def _convolutions(self, var: relax.Var, value: relax.Call) -> Iterator[Choice]:
        data, weight = value.args[0], weight_of(value)
        if weight is None:
            return
        key = {data: None} if isinstance(data, relax.Var) else {}
        channels, groups = shape_of(data)[1], int(value.attrs.groups)
        if name_of(value) == TRANSPOSED:
            for out in self._blockings(var, groups):
                for inner in self._blockings(data, groups):
                    seconds = DIRECT.seconds(phases(value, inner, out), self._estimate)
                    yield Alternative(out, dict.fromkeys(key, inner), seconds + self._cropping(var, value, out))
            return
        if is_depthwise(value):
            for layout in self._family(var).layouts:
                conv = convolution(value, layout, layout)
                yield Alternative(layout, dict.fromkeys(key, layout), self._kernel(conv))
            return
        whole = _merging(value)
        if whole and key:  # several groups in a block, as one with zeros between them
            inner, out = whole
            conv = convolution(value, inner, out)
            conv = replace(conv, groups=groups // merged_groups(groups, inner, out))
            yield Alternative(out, dict.fromkeys(key, inner), self._kernel(conv))
        shuffled = shuffle_source(data, lambda e, name: call_of(self._bound, e, name))
        for out in self._blockings(var, groups):
            for inner in [*self._blockings(data, groups), *self._patches(value)]:
                conv = convolution(value, inner, out)
                yield Alternative(out, dict.fromkeys(key, inner), self._kernel(conv))
            if groups == 1 and channels < NARROW:
                moved = self._estimate.copy(2 * self._bytes(data, None))
                conv = replace(convolution(value, None, out), block_in=channels)
                yield Alternative(out, dict(key), self._kernel(conv) + moved)
            if shuffled is not None and isinstance(shuffled[0], relax.Var) and not is_integer_product(value):
                seconds = DIRECT.seconds(convolution(value, None, out), self._estimate)  # no other reads a shuffle
                for layout in self._family(shuffled[0]).layouts:
                    yield Alternative(out, {shuffled[0]: layout}, seconds)

    def _slices(self, var: relax.Var, source: relax.Var, begin: int, _end: int) -> Iterator[Choice]:
        for layout in self._family(var).layouts:
            whole = ChannelBlocks(shape_of(source)[1], size=layout.size)
            if not layout.padded and not whole.padded and begin % layout.size == 0:
                yield Alternative(layout, {source: whole})

    def _cropping(self, var: relax.Var, call: relax.Call, layout: ChannelBlocks) -> float:
        """Seconds of cutting off what the phases of a transposed convolution compute beyond its result."""
        whole = all(axis.out % axis.stride == 0 for axis in transposed_axes(call))
        return 0.0 if whole else self._estimate.copy(2.0 * self._bytes(var, layout))

    def _blockings(self, image: relax.Expr, groups: int) -> list[ChannelBlocks]:
        """The blockings that a convolution could read or write: those that suit it, and those of its neighbours."""
        channels = shape_of(image)[1]
        family = self._family(image).layouts if isinstance(image, relax.Var) else ()
        sizes = [layout.size for layout in [*_blockings(channels, groups), *family] if layout.size <= BLOCK]
        return [ChannelBlocks(channels, groups, size).canonical() for size in dict.fromkeys(sizes)]

    def _patches(self, call: relax.Call) -> list[ChannelBlocks]:
        """The rows of channels that a convolution of patches beside each other can read."""
        data, attrs = call.args[0], call.attrs
        apart = [int(s) for s in attrs.strides] == list(shape_of(call.args[1])[2:]) != [1, 1]
        if not apart or int(attrs.groups) > 1 or any(map(int, attrs.padding)) or not isinstance(data, relax.Var):
            return []
        return [layout for layout in self._family(data).layouts if layout.size == layout.channels > BLOCK]

    def _kernel(self, conv: Convolution) -> float:
        """The kernel of the fastest algorithm; the final choice is made when the epilogue is known."""
        return fastest(conv, self._options, self._estimate)

    def _concatenations(self, var: relax.Var, value: relax.Call) -> Iterator[Choice]:
        fields = concatenated(value)
        for size in dict.fromkeys(layout.size for layout in self._family(var).layouts) if fields else ():
            if all(shape_of(field)[1] % size == 0 for field in fields):
                reads = {f: ChannelBlocks(shape_of(f)[1], size=size) for f in fields if isinstance(f, relax.Var)}
                layout = ChannelBlocks(shape_of(var)[1], size=size)
                yield Alternative(layout, reads)

    # -- prices

    def _bytes(self, expr: relax.Expr, layout: Layout) -> float:
        n, channels, height, width = shape_of(expr)
        size = np.dtype(dtype_of(expr)).itemsize
        return float(size * n * (layout.lanes if layout else channels) * height * width)


def _blockings(channels: int, groups: int) -> list[ChannelBlocks]:
    """Whole blocks, and half ones where they save lanes."""
    rest = (channels // groups) % BLOCK
    sizes = (BLOCK, BLOCK // 2) if 0 < rest <= BLOCK // 2 else (BLOCK,)
    return [ChannelBlocks(channels, groups, size).canonical() for size in sizes]


def _merging(call: relax.Call) -> tuple[ChannelBlocks, ...]:
    """The blocks that a convolution reads and writes if groups too narrow for a block share one; else nothing."""
    groups = int(call.attrs.groups)
    inner, out = (ChannelBlocks(shape_of(image)[1]) for image in (call.args[0], call))
    narrow = name_of(call) == "relax.nn.conv2d" and not is_depthwise(call)
    return (inner, out) if narrow and merged_groups(groups, inner, out) > 1 else ()


def concatenated(value: relax.Expr) -> list[relax.Expr]:
    """The parts of a concatenation of images along their channels, else nothing."""
    if name_of(value) != "relax.concat" or not isinstance(value.args[0], relax.Tuple):
        return []
    fields = list(value.args[0].fields)
    return fields if int(value.attrs.axis) in (1, -3) and all(map(is_image, fields)) else []


def channel_slice(value: relax.Expr) -> tuple[relax.Var, int, int] | None:
    """``(x, begin, end)`` of a slice of an image's channels."""
    cut = window(value)
    if cut is None or cut[0] != 1 or not is_image(value) or not isinstance(value.args[0], relax.Var):
        return None
    return value.args[0], cut[1], cut[2]


@dataclass(frozen=True)
class Rows:
    """``made``: whether an image is made of rows of channels, or they of it; ``layout`` is that of both."""

    made: bool
    layout: ChannelBlocks


def rows_of(value: relax.Expr) -> Rows | None:
    """What a transpose from ``[N, H, W, C]`` to ``[N, C, H, W]`` does or its inverse, of float32 whose channels CPUs
    have whole vectors of; None for anything else."""
    rows = any_rows_of(value)
    if rows is None or dtype_of(value) != "float32" or rows.layout.channels <= BLOCK:
        return None
    return None if rows.layout.channels % (BLOCK // 2) else rows  # vectors would be cut


def any_rows_of(value: relax.Expr) -> Rows | None:
    """:func:`rows_of` for all types and numbers of channels."""
    if name_of(value) != "relax.permute_dims" or not is_image(value):
        return None
    order, shape = permutation(value), shape_of(value)
    if order not in (_TO_IMAGE, _TO_ROWS) or not all(isinstance(size, int) for size in shape):
        return None  # a view divides by free sizes
    channels = shape[1] if order == _TO_IMAGE else shape[3]
    return Rows(order == _TO_IMAGE, ChannelBlocks(channels, size=channels))


def _keeps_channels(call: relax.Call) -> bool:
    if name_of(call) in _QUANTISING:
        return all(shape_of(arg) == () for arg in call.args[1:])
    if name_of(call) == "relax.mean":
        return sorted(int(a) % 4 for a in call.attrs.axis or ()) == [2, 3] and bool(call.attrs.keepdims)
    return name_of(call) not in IMAGES or call.attrs.layout == "NCHW"


def pads_space(value: relax.Expr) -> bool:
    """Whether rows and columns of one value are put around images."""
    if name_of(value) != "relax.nn.pad" or not is_image(value) or str(value.attrs.pad_mode) != "constant":
        return False
    return not any(value.attrs.pad_width[:4])


def moves_batch(value: relax.Expr) -> bool:
    """Whether whole images are picked from a batch, or images of one value put around it."""
    name = name_of(value)
    if name == "relax.nn.pad":
        return is_image(value) and str(value.attrs.pad_mode) == "constant" and not any(value.attrs.pad_width[2:])
    if name == "relax.take":
        return is_image(value) and value.attrs.axis is not None and int(value.attrs.axis) == 0
    if name != "relax.strided_slice" or not isinstance(value.args[1], relax.Tuple):
        return False
    return is_image(value) and [int(axis) for axis in value.args[1].fields] == [0]


def takes_operand(expr: relax.Expr, layout: ChannelBlocks) -> bool:
    """Whether an operand of elementwise arithmetic can be had in ``layout``."""
    array = array_of(expr)
    if array is not None:
        return array.size == 1 or (1,) * (4 - array.ndim) + array.shape == (1, layout.channels, 1, 1)
    return isinstance(expr, relax.Var) and is_image(expr) and shape_of(expr)[1] == layout.channels
