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
from tvm import relax, tirx

from mlc.graph.estimate import Convolution
from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.constants import array_of, constant, tensor_of
from mlc.graph.ir.patterns import INJECTIVE, PRODUCT
from mlc.graph.ir.rewrite import bindings, dtype_of, shape_of
from mlc.graph.kernels import few_channels
from mlc.graph.kernels.channels_last import conv2d_channels_last, pack_conv
from mlc.graph.kernels.few_channels import LANES, Lines, conv2d_lines, pack_lines, pixel_lines
from mlc.graph.kernels.pixel_rows import conv2d_pixel_rows, interleave_phases, phases_of_pixel_rows
from mlc.graph.kernels.transposed import Phases, conv2d_transpose_channels_last, pack_phases, phases_of
from mlc.graph.layout.assign import Alternative
from mlc.graph.layout.blocked import Rewriter
from mlc.graph.layout.convolutions import (
    CONVOLUTIONS,
    TRANSPOSED,
    convolution,
    is_depthwise,
    is_image,
    name_of,
    transposed_axes,
    with_zeros,
)
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
from mlc.sizes import Size
from mlc.target import Target
from schedules.cuda.attention import available as has_tensor_cores
from schedules.machine import gpu_machine

__all__ = ["ChannelsLast", "lines_of"]

#: channels of which a copy takes 16 bytes, of 16 bits each
_COPY = 8
#: filters whose products with a pixel are computed of one copy of it: a block's tile, and the least one
_TILE, _LEAST_TILE = 128, 64
#: instructions for a copy to shared memory: where it begins, whether it is inside of the image, and itself; and the
#: time of so many that one takes which threads make by themselves, waiting for what they read (on an H200)
_INSTRUCTIONS, _WAITING = 8, 160
#: how much longer a product takes that no tile shares operands in
_UNTILED = 40
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
    if name_of(call) not in CONVOLUTIONS or not is_image(call.args[0]):
        return False
    attrs, transposed = call.attrs, name_of(call) == TRANSPOSED
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == ("IOHW" if transposed else "OIHW")
    if transposed and (int(attrs.groups) > 1 or any(int(d) > 1 for d in attrs.dilation)):
        return False
    return plain and tensor_of(call.args[1]) is not None


def _bits(call: relax.Expr, options: CompileOptions) -> int:
    """Of an operand of a convolution that tensor cores multiply with a constant, which is 8 where they add up integers;
    0 for any other."""
    if not _has_constant(call) or is_depthwise(call):
        return 0
    types = {dtype_of(arg) for arg in call.args}
    if int(call.attrs.groups) > 1 and not _has_whole_groups(call):
        return 0
    if is_signed_product(call) and name_of(call) != TRANSPOSED:
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


def _phases(call: relax.Call) -> tuple[Phases, Phases]:
    """Of rows and columns of a transposed convolution. Of free sizes, products of one kernel cannot be several."""
    return phases_of(*transposed_axes(call), _last(call).lanes, _LEAST_TILE, 1 if _is_free(call.args[0]) else 2)


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
        if bits and name_of(value) == TRANSPOSED:
            yield Alternative(out, reads, self._transposed_seconds(value, bits) + self._cropping(var, value, out))
        elif bits:
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

    def _transposed_seconds(self, value: relax.Call, bits: int) -> float:
        """Of all groups of phases of a transposed convolution, with the phases of a group as filters."""
        rows, columns = _phases(value)
        n, inner, out = shape_of(value)[0] * rows.groups * columns.groups, _last(value.args[0]), _last(value)
        conv = Convolution(
            n, inner.lanes, rows.count * columns.count * out.lanes, (rows.axis.steps, columns.axis.steps),
            (rows.taps, columns.taps), (1, 1), (rows.taps - 1, columns.taps - 1, 0, 0), (1, 1), 1, inner.size, out.size)
        return self._seconds(conv, bits, _COPY)

    def _concatenations(self, var: relax.Var, value: relax.Call) -> Iterator[Choice]:
        fields = concatenated(value)
        if fields and not any(_last(image).padded for image in fields):
            yield Alternative(_last(var), {f: _last(f) for f in fields if isinstance(f, relax.Var)})

    def _slices(self, var: relax.Var, source: relax.Var, _begin: int, _end: int) -> Iterator[Choice]:
        if _last(var) in self._family(var).layouts and not _last(source).padded:
            yield Alternative(_last(var), {source: _last(source)})

    def _plain_seconds(self, var: relax.Var, value: relax.Expr) -> float:
        bits = _bits(value, self._options)
        if bits and name_of(value) == TRANSPOSED:  # by no tensor core, of an image that is filled up with zeros
            conv = with_zeros(value)
            products = conv.n * math.prod(conv.out) * conv.filters * conv.channels * math.prod(conv.kernel)
            return 2.0 * products / self._gpu.flops + self._gpu.launch_seconds
        if bits and not convolution(value).fixed:  # a reduction for each result, which reads all that it adds up
            conv = convolution(value)
            products = conv.n * math.prod(conv.out) * conv.filters * conv.channels * math.prod(conv.kernel)
            return _UNTILED * 2.0 * products / self._gpu.flops + self._gpu.launch_seconds
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


def _is_free(image: relax.Expr) -> bool:
    """Whether a call decides the height or the width of an image."""
    return not all(isinstance(size, int) for size in shape_of(image)[2:])


def _exprs(*sizes: int | Size) -> tuple[int | tirx.Expr, ...]:
    return tuple(size.expr if isinstance(size, Size) else size for size in sizes)


def _count(*sizes: int | Size) -> tirx.Expr:
    """Their product, written in one way."""
    return tvm.sym.Analyzer().simplify(math.prod(_exprs(*sizes)))


class _Values(Values):
    """Makes channels last of plain images."""

    def rows(self, image: relax.Expr) -> relax.Expr:
        """A row of channels for each pixel of an image in its block, a view: what the image is a view of, if it is."""
        known = self.known_rows(image)
        if known is not None:
            return known
        n, _, height, width, lanes = shape_of(image)
        return self.bb.emit(relax.op.reshape(image, (_count(n, height, width), lanes)))

    def known_rows(self, image: relax.Expr) -> relax.Expr | None:
        """The rows that an image is a view of, if it is."""
        value = self.bb.lookup_binding(image) if isinstance(image, relax.Var) else None
        if value is None or name_of(value) != "relax.reshape" or len(shape_of(value.args[0])) != 2:
            return None
        return value.args[0]

    def image(self, rows: relax.Expr, like: relax.Expr, lanes: int) -> relax.Expr:
        """The image of these rows, of the size of a plain one."""
        n, _, height, width = _exprs(*shape_of(like))
        return relax.op.reshape(self.bb.emit(rows), (n, 1, height, width, lanes))

    def block(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        """In one kernel with what makes ``x``, where a single pixel is no view."""
        if not layout.padded and shape_of(x)[2:] == (1, 1):
            return super().block(x, layout)
        return self.bb.call_te(in_blocks, x, layout.blocks, layout.size, layout.channels, layout.size,
                               primfunc_name_hint="channels_last")


class _Convolver(Convolver):
    """Convolutions as products on tensor cores."""

    _values: _Values

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
        if not conv.fixed and conv.groups == 1:
            convolve = partial(conv2d_pixel_rows, strides=conv.strides, pads=conv.pads, dilation=conv.dilation)
            rows = self._bb.call_te(
                convolve, self._values.rows(self._values.blocked(data, inner)), packed,
                _count(conv.n, *conv.out), *_exprs(*conv.size, *conv.out), primfunc_name_hint="conv2d",
                primfunc_attrs={"op_pattern": PRODUCT})
            return self._values.image(rows, call, out.lanes)
        convolve = partial(conv2d_channels_last, strides=conv.strides, pads=conv.pads, dilation=conv.dilation,
                           groups=conv.groups)
        return self._bb.call_te(convolve, self._values.blocked(call.args[0], inner), packed,
                                primfunc_name_hint="conv2d", primfunc_attrs={"op_pattern": PRODUCT})


    def conv2d_transpose(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        """The same of a transposed one."""
        data, weight, (rows, columns) = call.args[0], tensor_of(call.args[1]), _phases(call)
        assert weight is not None
        inner = _last(data)
        packed = constant(pack_phases(weight.numpy(), out.lanes, inner.lanes, rows, columns))
        if _is_free(data):
            n, _, *size = shape_of(data)
            steps = rows.axis.steps, columns.axis.steps
            made = self._bb.emit(self._bb.call_te(
                partial(phases_of_pixel_rows, rows=rows, columns=columns),
                self._values.rows(self._values.blocked(data, inner)), packed, _count(n, *steps),
                *_exprs(*size, *steps),
                primfunc_name_hint="conv2d_transpose", primfunc_attrs={"op_pattern": PRODUCT}))
            out_size = rows.axis.out, columns.axis.out
            pixels = self._bb.call_te(interleave_phases, made, _count(n, *out_size), *_exprs(*out_size, *steps),
                                      primfunc_name_hint="interleaved", primfunc_attrs={"op_pattern": INJECTIVE})
            return self._values.image(pixels, call, out.lanes)
        convolve = partial(conv2d_transpose_channels_last, rows=rows, columns=columns)
        image = self._bb.call_te(convolve, self._values.blocked(data, inner), packed,
                                 primfunc_name_hint="conv2d_transpose", primfunc_attrs={"op_pattern": PRODUCT})
        return self._without_rest(image, rows.axis, columns.axis)


class _Rewriter(Rewriter):
    """Emits what was chosen."""

    values, convolver = _Values, _Convolver
    rows_of = staticmethod(_rows_of)
    _values: _Values

    def _unary(self, call: relax.Call, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        return self._of_rows(call, super()._unary(call, layout, choice), layout)

    def _binary(self, call: relax.Call, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        return self._of_rows(call, super()._binary(call, layout, choice), layout)

    def _of_rows(self, call: relax.Call, made: relax.Call, layout: ChannelBlocks) -> relax.Expr:
        """What is elementwise on images of free sizes, on the rows that a kernel before it makes."""
        if not any(self._values.known_rows(arg) is not None for arg in made.args):
            return made
        args = []
        for arg in made.args:
            array = array_of(arg)
            if array is not None and array.ndim == 5:
                args.append(constant(array.reshape(array.shape[0], array.shape[-1])))
            else:
                image = isinstance(arg.ty, relax.TensorType) and arg.ty.ndim == 5
                args.append(self._values.rows(arg) if image else arg)
        return self._values.image(relax.Call(made.op, args, made.attrs, made.ty_args), call, layout.lanes)

    def _concat(self, call: relax.Call, _layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.op.concat([self._values.blocked(field, _last(field)) for field in call.args[0].fields], axis=4)

    def _slice(self, call: relax.Call, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        cut = None if moves_batch(call) else channel_slice(call)
        if cut is None:
            return super()._slice(call, layout, choice)
        source, begin, end = cut
        return relax.op.strided_slice(self._values.blocked(source, _last(source)), [4], [begin], [end])
