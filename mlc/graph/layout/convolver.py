"""Builds convolutions in blocked layouts: the kernel of each, and its weight as that kernel reads it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
from tvm import relax, te, tirx

from mlc.graph.algorithms.direct import DEPTHWISE, DIRECT
from mlc.graph.algorithms.registry import Algorithm, fastest
from mlc.graph.algorithms.winograd_integer import conv2d_winograd_integer, integer_tile, transform_integers
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import ChannelBlocks, block_diagonal, merged_groups
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.patterns import INJECTIVE, PRODUCT
from mlc.graph.ir.rewrite import bindings, shape_of
from mlc.graph.kernels import bfloat
from mlc.graph.kernels.blocked import BANDED, CONVOLUTION, PANEL, conv2d_nchwc
from mlc.graph.kernels.integer import (
    STEP,
    conv2d_nchwc_integer,
    conv2d_nchwc_tiles,
    depthwise_nchwc_integer,
    depthwise_nchwc_taps,
    dot_form,
    has_taps,
    pack_conv,
    pack_dense,
    pack_taps,
)
from mlc.graph.kernels.saturating import Split, conv2d_nchwc_bytes, has_bytes
from mlc.graph.kernels.transposed import Axis, conv2d_transpose_nchwc, phase_weight
from mlc.graph.kernels.windows import filters_matrix, gathered
from mlc.graph.layout.convolutions import convolution, is_depthwise, transposed_axes
from mlc.graph.layout.regions import Choice, call_of, constant_bytes
from mlc.graph.layout.values import Values
from mlc.graph.precision.bfloats import reads_bfloats
from mlc.graph.precision.integer import is_integer_product
from mlc.graph.simplify.channel_shuffles import shuffle_source
from mlc.options import CompileOptions
from mlc.sizes import Size
from mlc.target import Target
from schedules.cpu.gemm_tiles import pays as tiles_pay
from schedules.intrin.dot import BFLOATS, QUADS

__all__ = ["Convolver"]

#: part of the channels that a band reaches, from which on it is a kernel of its own
_NARROW_BAND = 2


def _first_pixels(x: te.Tensor, rows: int, columns: int) -> te.Tensor:
    """``[N, C, H, W, c] -> [N, C, rows, columns, c]``."""
    return te.compute((*x.shape[:2], rows, columns, x.shape[4]), lambda *place: x(*place), name="first_pixels")


class Convolver:
    """Makes the calls of a function's convolutions in the layouts that were chosen, of its ``values`` in theirs."""

    def __init__(self, func: relax.Function, target: Target, options: CompileOptions, values: Values) -> None:
        self._target, self._options, self._values, self._bb = target, options, values, values.bb
        self._bound = {binding.var: binding.value for binding in bindings(func)}
        self._estimate = Estimate(target.tvm, constant_bytes(func))
        self._reads_bfloats = reads_bfloats(func, target, options)

    def conv2d(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        """A convolution, ``[N, O/o, H, W, o]``, by the kernel that suits its types, weight, and target best."""
        data, weight = call.args
        array = array_of(weight)
        assert array is not None
        channels, groups = shape_of(data)[1], int(call.attrs.groups)
        integer = is_integer_product(call)
        if is_depthwise(call):
            conv = convolution(call, out, out)
            array = out.cut(array, 0).reshape(-1, *array.shape[1:])  # lanes that pad lie where the layout has them
            if not integer:
                return self._direct(DEPTHWISE, self._values.blocked(data, out), array, conv)
            if (tapped := self._tapped(self._values.blocked(data, out), array, conv)) is not None:
                return tapped
            packed = constant(DEPTHWISE.pack(array, conv))
            return self._bb.call_te(depthwise_nchwc_integer, self._values.blocked(data, out), packed, conv.strides,
                                    conv.pads, conv.dilation, 0, primfunc_name_hint=DEPTHWISE.name)
        shuffled = isinstance(data, relax.Var) and data not in choice.reads
        inner = (choice.reads.get(data) if isinstance(data, relax.Var)
                 else ChannelBlocks(channels, groups).canonical())
        if groups > 1 and inner is not None and not (inner.padded or out.padded):
            merged = merged_groups(groups, inner, out)
            array, groups = block_diagonal(array, groups, merged), groups // merged
        conv = replace(convolution(call, inner, out), groups=groups)
        if shuffled:
            return self._shuffled_conv2d(data, array, replace(conv, block_in=channels // groups), choice)
        if inner is None:
            size = -(-channels // STEP) * STEP if integer else channels
            x = self._narrow(data, size)
        else:
            x, size = self._values.blocked(data, inner), inner.size
        if not integer:
            conv = replace(conv, block_in=size)
            for special in (self._banded, self._in_bfloat):
                if (made := special(x, array, conv)) is not None:
                    return made
            return self._direct(DIRECT, x, array, conv)
        tile = integer_tile(replace(conv, block_in=size), self._options, self._estimate, array)
        if tile:
            convolve = partial(conv2d_winograd_integer, m=tile, pads=conv.pads)
            return self._bb.call_te(convolve, x, constant(transform_integers(array, tile)),
                                    primfunc_name_hint=f"winograd_{tile}x{tile}")
        for special in (self._saturating, self._in_tiles):
            if (made := special(x, array, replace(conv, block_in=size))) is not None:
                return made
        packed = constant(pack_conv(array, size, out.size, groups, dot_form(self._target)))
        return self._bb.call_te(conv2d_nchwc_integer, x, packed, conv.strides, conv.pads, conv.dilation, groups, 0,
                                primfunc_name_hint=DIRECT.name)

    def _tapped(self, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr | None:
        """A depthwise convolution of integers by dot products of the pixels of a row, where it has several."""
        width, sizes = conv.kernel[1], shape_of(x)
        fixed = all(isinstance(size, int) for size in sizes)
        if not fixed or conv.dilation != (1, 1) or width < STEP - 1 or not has_taps(self._target, sizes[-1]):
            return None
        packed = constant(pack_taps(weight, sizes[-1]))
        return self._bb.call_te(depthwise_nchwc_taps, x, packed, width, conv.strides, conv.pads, 0,
                                primfunc_name_hint=DEPTHWISE.name)

    def _saturating(self, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr | None:
        """A pointwise convolution by bytes that are multiplied with saturation, where its weight allows no sum that
        saturates. To add what others leave out, as products of matrices do, takes what it saves (ResNet-50)."""
        pointwise = conv.kernel == conv.strides == (1, 1) and conv.groups == 1 and not any(conv.pads)
        if not pointwise or not has_bytes(self._target):
            return None
        split = Split.of(np.ascontiguousarray(weight[:, :, 0, 0].T))
        if split.rest.any():
            return None
        packed = constant(pack_conv(weight, conv.block_in, conv.block_out, 1, QUADS))
        return self._bb.call_te(conv2d_nchwc_bytes, x, packed, primfunc_name_hint=DIRECT.name,
                                primfunc_attrs={"op_pattern": PRODUCT})

    def _in_tiles(self, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr | None:
        """A convolution of integers as a product of matrices in the tiles of a matrix unit, where it is faster though
        each window's pixels must be gathered for it."""
        if not self._tiles_pay(x, conv, QUADS, STEP):
            return None
        packed = constant(pack_dense(filters_matrix(weight, conv.block_in, conv.block_out), QUADS))
        return self._bb.call_te(conv2d_nchwc_tiles, x, packed, conv.kernel, conv.strides, conv.pads, conv.dilation, 0,
                                conv.block_out, primfunc_name_hint=DIRECT.name, primfunc_attrs={"op_pattern": PRODUCT})

    def _tiles_pay(self, x: relax.Expr, conv: Convolution, form: str, step: int) -> bool:
        """Whether tiles are faster than dot products of ``step`` channels."""
        fixed = all(isinstance(extent, int) for extent in shape_of(x))
        if conv.groups > 1 or conv.block_out != PANEL or conv.block_in % step or not fixed:
            return False
        steps = prod(conv.kernel) * shape_of(x)[1] * conv.block_in // step
        return tiles_pay(prod(conv.out), conv.filters, steps, form, self._target.tvm, gathered=True)

    def _banded(self, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr | None:
        """The convolution, where all but a band of a 1x1 weight is zero: a block of outputs reads the channels that the
        band reaches, and no others."""
        if conv.kernel != (1, 1) or conv.groups > 1 or not weight.any():
            return None
        filters, channels = weight.shape[:2]
        out, into = np.nonzero(weight[:, :, 0, 0])
        first, last = int((into - out).min()), int((into - out).max())
        width, blocks = conv.block_out + last - first, conv.filters // conv.block_out
        if width * _NARROW_BAND > channels:
            return None
        packed = np.zeros((blocks, 1, 1, 1, width, conv.block_out), "float32")
        for block, lane in np.ndindex(blocks, conv.block_out):
            begin, row = block * conv.block_out + first, block * conv.block_out + lane
            inside = slice(max(0, begin), max(0, min(channels, begin + width)))
            if row < filters:
                packed[block, 0, 0, 0, inside.start - begin : inside.stop - begin, lane] = weight[row, inside, 0, 0]

        def source(block: tirx.Expr, channel: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
            place = tirx.max(tirx.min(block * conv.block_out + channel + first, channels - 1), 0)
            return tirx.floordiv(place, conv.block_in), tirx.floormod(place, conv.block_in)

        convolve = partial(conv2d_nchwc, strides=conv.strides, pads=conv.pads, dilation=conv.dilation, groups=blocks,
                           source=source)
        return self._bb.call_te(convolve, x, constant(packed), primfunc_name_hint=DIRECT.name,
                                primfunc_attrs={CONVOLUTION: {"algorithm": BANDED}})

    def _in_bfloat(self, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr | None:
        """The convolution as products of bfloat16, where its operands may be rounded and that is faster."""
        if conv.block_in % bfloat.STEP or not self._reads_bfloats(weight):
            return None
        tiled = self._tiles_pay(x, conv, BFLOATS, bfloat.STEP)
        rounded = DIRECT.seconds(replace(conv, element=2), self._estimate)
        if not tiled and conv.fixed and rounded > fastest(conv, self._options, self._estimate):
            return None
        narrow = self._bb.emit(relax.op.astype(x, "bfloat16"))
        if any(conv.pads):
            top, left, bottom, right = conv.pads
            narrow = self._bb.emit(relax.op.nn.pad(narrow, [0, 0, 0, 0, top, bottom, left, right, 0, 0]))
        if tiled:
            packed = constant(bfloat.pack_dense(filters_matrix(weight, conv.block_in, conv.block_out)))
            rows = self._bb.emit(self._bb.call_te(gathered, narrow, conv.kernel, conv.strides, conv.dilation,
                                                  primfunc_name_hint="windows"))
            return self._bb.call_te(bfloat.conv2d_of_windows, rows, packed, *conv.out, conv.block_out,
                                    primfunc_name_hint=DIRECT.name, primfunc_attrs={"op_pattern": PRODUCT})
        packed = constant(bfloat.pack_conv(DIRECT.pack(weight, conv)))
        return self._bb.call_te(bfloat.conv2d_nchwc_bfloat, narrow, packed, conv.strides, conv.dilation, conv.groups,
                                primfunc_name_hint=DIRECT.name)

    def _direct(self, algorithm: Algorithm, x: relax.Expr, weight: np.ndarray, conv: Convolution) -> relax.Expr:
        """The convolution by a direct algorithm, with what others of it need to know."""
        described = {"algorithm": algorithm.name, "strides": list(conv.strides), "pads": list(conv.pads),
                     "dilation": list(conv.dilation), "groups": conv.groups}
        return self._bb.call_te(
            partial(algorithm.kernel, conv=conv), x, constant(algorithm.pack(weight, conv)),
            primfunc_name_hint=algorithm.name, primfunc_attrs={CONVOLUTION: described},
        )

    def _shuffled_conv2d(
        self, data: relax.Expr, weight: np.ndarray, conv: Convolution, choice: Choice
    ) -> relax.Expr:
        """The convolution of a channel shuffle, which reads each channel where it is before the shuffle."""
        found = shuffle_source(data, partial(call_of, self._bound))
        assert found is not None
        (x, ways), channels, groups = found, shape_of(data)[1], conv.groups
        layout = choice.reads[x]
        assert layout is not None

        def source(group: tirx.Expr, channel: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
            place = group * (channels // groups) + channel
            return layout.place(tirx.floormod(place, ways), tirx.floordiv(place, ways), channels // ways)

        packed = constant(DIRECT.pack(weight, conv))
        convolve = partial(conv2d_nchwc, strides=conv.strides, pads=conv.pads, dilation=conv.dilation, groups=groups,
                           source=source)
        return self._bb.call_te(convolve, self._values.blocked(x, layout), packed, primfunc_name_hint=DIRECT.name)

    def conv2d_transpose(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        """A transposed convolution, ``[N, O/o, H, W, o]``."""
        data, weight = call.args
        array, groups = array_of(weight), int(call.attrs.groups)
        assert array is not None
        inner = choice.reads[data] if isinstance(data, relax.Var) else ChannelBlocks(array.shape[0], groups).canonical()
        assert inner is not None
        rows, columns = transposed_axes(call)
        phases = phase_weight(array, rows, columns, groups)
        cut = ChannelBlocks(phases.shape[1], groups, out.size).cut(phases, 1)
        cut = ChannelBlocks(array.shape[0] // groups, size=inner.size).cut(cut, 3)  # [P, OC/o, o, IC/i, i, TH, TW]
        blocks = cut.transpose(0, 1, 3, 5, 6, 4, 2).reshape(-1, *(cut.shape[i] for i in (3, 5, 6, 4, 2)))
        if is_integer_product(call):
            blocks = pack_conv(blocks, inner.size, out.size, groups, dot_form(self._target))
        packed = constant(blocks)
        convolve = partial(conv2d_transpose_nchwc, rows=rows, columns=columns, groups=groups)
        image = self._bb.call_te(convolve, self._values.blocked(data, inner), packed,
                                 primfunc_name_hint="conv2d_transpose")
        return self._without_rest(image, rows, columns)

    def _without_rest(self, image: relax.Expr, rows: Axis, columns: Axis) -> relax.Expr:
        """The rows and columns that a transposed convolution has, of whole phases."""
        if all(axis.out % axis.stride == 0 for axis in (rows, columns)):
            return image
        # by itself: no schedule interleaves phases that the result has but a part of
        ends = (axis.out.expr if isinstance(axis.out, Size) else axis.out for axis in (rows, columns))
        return self._bb.call_te(_first_pixels, self._bb.emit(image), *ends,
                                primfunc_name_hint="first_pixels", primfunc_attrs={"op_pattern": INJECTIVE})

    def _narrow(self, data: relax.Expr, size: int) -> relax.Expr:
        """All channels, padded to ``size``, as one block."""
        n, c, h, w = shape_of(data)
        x = self._bb.emit(relax.op.permute_dims(self._values.substitute(data), [0, 2, 3, 1]))
        if size > c:
            x = self._bb.emit(relax.op.nn.pad(x, [0, 0, 0, 0, 0, 0, 0, size - c]))
        return self._bb.emit(relax.op.reshape(x, (n, 1, h, w, size)))
