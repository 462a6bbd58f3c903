"""Channels-last layout for convolutions on tensor cores.

A GPU's kernel copies 16 bytes of an image at a time, which are neighbours of a product's sum where the channels of a
pixel lie together. An image is then one block of all its channels, ``[N, 1, H, W, C]``, padded with zeros to whole
copies; everything between such convolutions that keeps the channels works there too, so that nothing is transposed
from layer to layer. Which values are kept so is chosen for the whole graph, as CPUs' blocks are. Images of a few
channels, of which whole copies would be zeros for the greater part, may become lines of narrower pixels
(:mod:`mlc.graph.kernels.few_channels`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial

import tvm
from tvm import relax

from mlc.graph.estimate import Convolution
from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.constants import constant, tensor_of
from mlc.graph.ir.patterns import PRODUCT
from mlc.graph.ir.rewrite import bindings, dtype_of, shape_of
from mlc.graph.kernels import few_channels
from mlc.graph.kernels.channels_last import conv2d_channels_last, pack_conv
from mlc.graph.kernels.few_channels import LANES, Lines, conv2d_lines, pack_lines, pixel_lines
from mlc.graph.layout.assign import Alternative
from mlc.graph.layout.blocked import Rewriter
from mlc.graph.layout.convolutions import convolution, is_depthwise, is_image, name_of
from mlc.graph.layout.convolver import Convolver
from mlc.graph.layout.regions import (
    IMAGES,
    Choice,
    Planner,
    Rows,
    any_rows_of,
    channel_slice,
    concatenated,
    moves_batch,
    takes_operand,
)
from mlc.graph.layout.values import Values, in_blocks
from mlc.graph.precision.integer import is_signed_product
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target
from schedules.cuda.attention import available as has_tensor_cores
from schedules.machine import gpu_machine

__all__ = ["ChannelsLast", "lines_of"]

#: channels of which a copy takes 16 bytes, of 16 bits each
_COPY = 8
#: filters whose products with a pixel are computed of one copy of it: a block's tile
_TILE = 128
#: instructions for a copy to shared memory: where it begins, whether it is inside of the image, and itself; and the
#: time of so many that one takes which threads make by themselves, waiting for what they read (on an H200)
_INSTRUCTIONS, _WAITING = 8, 160
#: filters of a group, and products of each of their sums, that tensor cores take at least
_LEAST_ROWS, _LEAST_DEPTH = 16, 32
#: bytes that the least asynchronous copy takes; the products of a sum that are multiplied at a time, and the cycles for
#: which threads wait for what they copy by themselves before
_ASYNCHRONOUS, _STEP, _LATENCY = 4, 64, 600


def ChannelsLast(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tvm.transform.Pass:
    """Module pass: convolutions on the tensor cores of GPUs, and what lies between them, keep the channels of a pixel
    together where that pays. Others, float32 that may not be rounded and small groups among them, stay as they are."""

    @tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "cuda" or not has_tensor_cores(target.tvm):
            return mod
        if not any(_bits(binding.value, options) for binding in bindings(mod["main"])):
            return mod
        choices = _Planner(mod["main"], target, options).choose()
        return _Rewriter(mod, target, options, choices).run()

    return run


def _has_constant(call: relax.Expr) -> bool:
    """Whether the expression is a convolution of plain images with a constant."""
    if name_of(call) != "relax.nn.conv2d" or not is_image(call.args[0]):
        return False
    plain = call.attrs.data_layout == "NCHW" and call.attrs.kernel_layout == "OIHW"
    return plain and tensor_of(call.args[1]) is not None


def _bits(call: relax.Expr, options: CompileOptions) -> int:
    """Of an operand of a convolution that tensor cores multiply with a constant, which is 8 where they add up integers;
    0 for any other."""
    if not _has_constant(call) or is_depthwise(call):
        return 0
    types = {dtype_of(arg) for arg in call.args}
    if int(call.attrs.groups) > 1 and not _has_whole_groups(call):
        return 0
    if is_signed_product(call):
        return 8
    if dtype_of(call) != "float32":
        return 0
    if types in ({"float16"}, {"bfloat16"}):
        return 16
    return 32 if types == {"float32"} and options.precision == "tf32" else 0


def _has_whole_groups(call: relax.Call) -> bool:
    """Whether a grouped convolution's groups are worth a product on tensor cores each, and no channels are added."""
    filters, channels, *kernel = shape_of(call.args[1])
    rows, depth = filters // int(call.attrs.groups), channels * math.prod(kernel)
    return rows >= _LEAST_ROWS and depth >= _LEAST_DEPTH and not (_last(call).padded or _last(call.args[0]).padded)


def _last(image: relax.Expr) -> ChannelBlocks:
    """One block of all channels, in whole copies."""
    channels = shape_of(image)[1]
    return ChannelBlocks(channels, size=-(-channels // _COPY) * _COPY)


def _rows_of(value: relax.Expr) -> Rows | None:
    """A transpose between images and rows of channels, whose whole copies lie in place."""
    rows = any_rows_of(value)
    return None if rows is None or rows.layout.channels % _COPY else rows


def _takes(expr: relax.Expr, layout: ChannelBlocks) -> bool:
    """Constant images too: what a zero point adds near the border of one."""
    constant_image = tensor_of(expr) is not None and len(shape_of(expr)) == 4
    return takes_operand(expr, layout) or (constant_image and shape_of(expr)[:2] == (1, layout.channels))


class _Planner(Planner):
    """The plain layout or channels last."""

    rows_of, takes = staticmethod(_rows_of), staticmethod(_takes)

    def __init__(self, func: relax.Function, target: Target, options: CompileOptions) -> None:
        super().__init__(func, target, options)
        self._gpu = gpu_machine(target.tvm)

    def _relate_convolution(self, var: relax.Var, value: relax.Call) -> None:
        if is_depthwise(value) and _has_constant(value) and isinstance(value.args[0], relax.Var):
            self._join(var, value.args[0])
        if _bits(value, self._options):
            for image in (var, value.args[0]):
                if isinstance(image, relax.Var):
                    self._family(image).layouts[_last(image)] = None

    def _spread(self, var: relax.Var, value: relax.Expr) -> None:
        images = [*concatenated(value), var]
        whole = len(images) > 1 and not any(_last(image).padded for image in images)
        if whole and any(self._family(i).layouts for i in images if isinstance(i, relax.Var)):
            for image in images:
                if isinstance(image, relax.Var):
                    self._family(image).layouts[_last(image)] = None

    def _convolutions(self, var: relax.Var, value: relax.Call) -> Iterator[Choice]:
        data, bits = value.args[0], _bits(value, self._options)
        out, inner = _last(var), _last(data)
        reads: dict[Hashable, ChannelBlocks | None] = {data: inner} if isinstance(data, relax.Var) else {}
        if bits:
            conv = convolution(value, inner, out)
            yield Alternative(out, reads, self._seconds(conv, bits, math.gcd(conv.channels // conv.groups, _COPY)))
            lines = _lines(value) if bits == 16 else None
            if lines is not None:
                yield Alternative(out, {data: None}, self._lines_seconds(value, lines))
        elif is_depthwise(value) and out in self._family(var).layouts and _has_constant(value):
            moved = self._estimate.copy(self._bytes(data, inner) + self._bytes(var, out))
            yield Alternative(out, reads, moved)

    def _lines_seconds(self, value: relax.Call, lines: Lines) -> float:
        """The estimated seconds of a convolution of lines that are prepared for it."""
        conv = convolution(value, None, _last(value))
        made = 2.0 * conv.n * lines.lines * lines.columns * LANES
        moved = self._estimate.copy(self._bytes(value.args[0], None) + made)
        return moved + self._seconds(replace(conv, channels=LANES, kernel=(lines.window[0], lines.taps)), 16, _COPY)

    def _concatenations(self, var: relax.Var, value: relax.Call) -> Iterator[Choice]:
        fields = concatenated(value)
        if fields and not any(_last(image).padded for image in fields):
            yield Alternative(_last(var), {f: _last(f) for f in fields if isinstance(f, relax.Var)})

    def _slices(self, var: relax.Var, source: relax.Var, _begin: int, _end: int) -> Iterator[Choice]:
        if _last(var) in self._family(var).layouts and not _last(source).padded:
            yield Alternative(_last(var), {source: _last(source)})

    def _plain_seconds(self, var: relax.Var, value: relax.Expr) -> float:
        bits = _bits(value, self._options)
        if bits:
            conv = convolution(value)
            rows = conv.kernel == conv.strides == (1, 1) and not any(conv.pads) and bits > 8
            fitting = (v for v in (8, 4, 2, 1) if math.prod(conv.size) % v == 0)
            return self._seconds(conv, bits, next(fitting) if rows else 1)
        depthwise = _has_constant(value) and is_depthwise(value)
        if is_image(var) and (name_of(value) in IMAGES or depthwise):
            return self._estimate.copy(self._bytes(value.args[0], None) + self._bytes(var, None))
        return super()._plain_seconds(var, value)

    def _seconds(self, conv: Convolution, bits: int, vector: int) -> float:
        """The estimated seconds of a product on tensor cores that copies so many elements of an image at a time."""
        gpu, conv = self._gpu, replace(conv, element=bits // 8)
        depth, filters = conv.channels // conv.groups * math.prod(conv.kernel), conv.filters // conv.groups
        patches = conv.n * math.prod(conv.out) * depth * conv.groups
        products = 2.0 * patches * filters / gpu.tensor_flops(bits)
        copies = patches * math.ceil(filters / _TILE) / vector
        alone = vector * conv.element < _ASYNCHRONOUS
        copying = copies * (_WAITING if alone else _INSTRUCTIONS) / (gpu.lanes * gpu.multiprocessors * gpu.hz)
        waiting = depth / _STEP * _LATENCY / gpu.hz if alone else 0.0
        return max(products, copying, conv.image_bytes / gpu.memory_rate) + waiting + gpu.launch_seconds


def _lines(call: relax.Call) -> Lines | None:
    """The lines that a convolution of 16-bit floats may be computed of."""
    if not isinstance(call.args[0], relax.Var):
        return None
    return lines_of(convolution(call))


def lines_of(conv: Convolution) -> Lines | None:
    """The lines of a convolution of at most :data:`LANES` channels, of 16 bits, whose pieces begin where copies may;
    else None."""
    aligned = not conv.strides[1] * LANES % few_channels.COPY and conv.dilation[1] == 1
    if not conv.fixed or conv.groups != 1 or conv.channels > LANES or not aligned:
        return None
    taps = -(-conv.kernel[1] * LANES // few_channels.DEPTH) * few_channels.DEPTH // LANES
    return Lines(conv.kernel, taps, (conv.strides[0], conv.strides[1]), conv.dilation[0], conv.out, conv.pads,
                 conv.size[0])


class _Values(Values):
    """Makes channels last of plain images."""

    def block(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        """In one kernel with what makes ``x``, where a single pixel is no view."""
        if not layout.padded and shape_of(x)[2:] == (1, 1):
            return super().block(x, layout)
        return self.bb.call_te(in_blocks, x, layout.blocks, layout.size, layout.channels, layout.size,
                               primfunc_name_hint="channels_last")


class _Convolver(Convolver):
    """Convolutions as products on tensor cores."""

    def conv2d(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        """The call's result, all of its channels in one block."""
        weight = tensor_of(call.args[1])
        if is_depthwise(call) or weight is None:
            return super().conv2d(call, out, choice)
        data = call.args[0]
        lines = _lines(call)
        if lines is not None and choice.reads.get(data, out) is None:
            x = self._bb.emit(self._bb.call_te(partial(pixel_lines, lines=lines), self._values.plain(data),
                                               primfunc_name_hint="pixel_lines"))
            packed = constant(pack_lines(weight.numpy(), out.lanes, lines))
            return self._bb.call_te(partial(conv2d_lines, lines=lines), x, packed, primfunc_name_hint="conv2d",
                                    primfunc_attrs={"op_pattern": PRODUCT})
        inner = _last(call.args[0])
        conv = convolution(call, inner, out)
        packed = constant(pack_conv(weight.numpy(), out.lanes, inner.lanes // conv.groups))
        convolve = partial(conv2d_channels_last, strides=conv.strides, pads=conv.pads, dilation=conv.dilation,
                           groups=conv.groups)
        return self._bb.call_te(convolve, self._values.blocked(call.args[0], inner), packed,
                                primfunc_name_hint="conv2d", primfunc_attrs={"op_pattern": PRODUCT})


class _Rewriter(Rewriter):
    """Emits what was chosen."""

    values, convolver = _Values, _Convolver
    rows_of = staticmethod(_rows_of)

    def _concat(self, call: relax.Call, _layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.op.concat([self._values.blocked(field, _last(field)) for field in call.args[0].fields], axis=4)

    def _slice(self, call: relax.Call, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        cut = None if moves_batch(call) else channel_slice(call)
        if cut is None:
            return super()._slice(call, layout, choice)
        source, begin, end = cut
        return relax.op.strided_slice(self._values.blocked(source, _last(source)), [4], [begin], [end])
