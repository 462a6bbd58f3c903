"""Blocked layouts for whole regions of the graph.

Convolutions run in ``NCHW[c]c`` (:mod:`mlc.graph.kernels.blocked`), and everything between them that can work on that
layout stays in it: pooling, resizing, elementwise operators, concatenation by whole blocks, means over the image. Which
regions, and in which blocks, is chosen for the whole graph at once (:mod:`mlc.graph.layout.regions`). Each value is
kept in the layouts that somebody asked for; conversions are ordinary operators at the borders, made once, and fuse with
the data movement around them. Weights are rearranged here, so the compiled module holds them ready for use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np
import tvm
from tvm import relax, te, tirx

from mlc.graph.algorithms.direct import DEPTHWISE, DIRECT
from mlc.graph.algorithms.registry import Algorithm, fastest
from mlc.graph.algorithms.winograd_integer import conv2d_winograd_integer, integer_tile, transform_integers
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import ChannelBlocks, block_diagonal, merged_groups
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.patterns import INJECTIVE, PRODUCT
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, emit_result, leaves, replaced, shape_of
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
from mlc.graph.kernels.transposed import conv2d_transpose_nchwc, phase_weight
from mlc.graph.kernels.windows import filters_matrix, gathered
from mlc.graph.layout.convolutions import CONVOLUTIONS, convolution, is_depthwise, name_of, transposed_axes
from mlc.graph.layout.regions import (
    BINARY,
    BINARY_EXACT,
    UNARY,
    UNARY_EXACT,
    Choice,
    Planner,
    call_of,
    channel_slice,
    constant_bytes,
    moves_batch,
    pads_space,
    rows_of,
)
from mlc.graph.precision.bfloats import reads_bfloats
from mlc.graph.precision.integer import is_integer_product
from mlc.graph.simplify.shuffles import shuffle_source
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import Size
from mlc.target import Target
from schedules.cpu.gemm_tiles import pays as tiles_pay
from schedules.intrin.dot import BFLOATS, QUADS

__all__ = ["BlockedLayouts", "Rewriter", "in_blocks"]


#: part of the channels that a band reaches, from which on it is a kernel of its own
_NARROW_BAND = 2


def in_blocks(x: te.Tensor, blocks: int, size: int, each: int, full: int) -> te.Tensor:
    """``[N, C, H, W] -> [N, blocks, H, W, size]``, of groups of ``each`` channels in ``full`` lanes."""
    n, _, h, w = x.shape

    def block(ni, bi, hi, wi, li):  # type: ignore[no-untyped-def]
        lane = bi * size + li
        if each == full:
            return x[ni, lane, hi, wi]
        zero = tirx.const(0, x.dtype)
        return tirx.if_then_else(lane % full < each, x[ni, lane // full * each + lane % full, hi, wi], zero)

    return te.compute((n, blocks, h, w, size), block, name="blocked")


def _unblocked(x: te.Tensor, channels: int, each: int, full: int) -> te.Tensor:
    """``[N, C/c, H, W, c] -> [N, channels, H, W]``, of groups of ``each`` channels in ``full`` lanes."""
    n, _, h, w, lanes = x.shape

    def plain(ni, ci, hi, wi):  # type: ignore[no-untyped-def]
        lane = ci if each == full else ci // each * full + ci % each
        return x[ni, lane // lanes, hi, wi, lane % lanes]

    return te.compute((n, channels, h, w), plain, name="unblocked")


@dataclass
class _Value:
    """One value of the graph in the layouts made of it so far."""

    plain: relax.Expr | None = None
    blocked: dict[ChannelBlocks, relax.Expr] = field(default_factory=dict)


def _first_pixels(x: te.Tensor, rows: int, columns: int) -> te.Tensor:
    """``[N, C, H, W, c] -> [N, C, rows, columns, c]``."""
    return te.compute((*x.shape[:2], rows, columns, x.shape[4]), lambda *place: x(*place), name="first_pixels")


def BlockedLayouts(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tvm.transform.Pass:
    """Module pass: convolutions of CPU targets and what lies between them move to blocked layouts where that pays.

    ``options`` say by which algorithms convolutions may be computed there, which makes blocks pay more, and whether
    they may multiply bfloat16, which they do where the estimate is that it is faster.
    """

    @tvm.transform.module_pass(opt_level=0, name="BlockedLayouts")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "llvm" or not any(name_of(b.value) in CONVOLUTIONS for b in bindings(mod["main"])):
            return mod
        return Rewriter(mod, target, options, Planner(mod["main"], target, options).choose()).run()

    return run


class Rewriter:
    """Emits the function again, binding by binding, each in the layout that was chosen for it."""

    def __init__(
        self, mod: tvm.IRModule, target: Target, options: CompileOptions, choices: Mapping[Hashable, Choice]
    ) -> None:
        self._mod, self._target, self._options, self._choices = mod, target, options, choices
        self._estimate = Estimate(target.tvm, constant_bytes(mod["main"]))
        self._reads_bfloats = reads_bfloats(mod["main"], target, options)
        self._bb = builder_of(mod)
        self._values: dict[relax.Var, _Value] = {}
        self._rules: dict[str, Callable[[relax.Call, ChannelBlocks, Choice], relax.Expr]] = {
            "relax.nn.conv2d": self._conv2d,
            "relax.nn.conv2d_transpose": self._conv2d_transpose,
            "relax.nn.max_pool2d": self._pool,
            "relax.nn.avg_pool2d": self._pool,
            "relax.image.resize2d": self._resize,
            "relax.concat": self._concat,
            "relax.strided_slice": self._slice,
            "relax.take": self._batch,
            "relax.nn.pad": self._pad,
            "relax.mean": self._mean,
            **dict.fromkeys(UNARY | UNARY_EXACT, self._unary),
            **dict.fromkeys(BINARY | BINARY_EXACT, self._binary),
        }

    def run(self) -> tvm.IRModule:
        func = self._mod["main"]
        bb = self._bb
        self._bound = {binding.var: binding.value for binding in bindings(func)}
        for param in func.params:
            self._values[param] = _Value(plain=param)
        with bb.function("main", list(func.params), attrs=dict(func.attrs) if func.attrs else {}):
            with bb.dataflow():
                for binding in bindings(func):
                    if binding.var in self._choices:
                        self._values[binding.var] = self._bind(binding, self._choices[binding.var])
                result = emit_result(bb, self._substitute(func.body.body))
            bb.emit_func_output(result)
        return relax.transform.DeadCodeElimination()(bb.finalize())

    def _bind(self, binding: relax.VarBinding, choice: Choice) -> _Value:
        value = binding.value
        if (rows := rows_of(value)) is not None and [choice.layout, *choice.reads.values()].count(rows.layout):
            return self._in_place(binding, rows.layout, choice)
        if choice.layout is not None:
            made = self._rules[name_of(value)](value, choice.layout, choice)
            return _Value(blocked={choice.layout: self._bb.emit(made, name_hint=binding.var.name)})
        return _Value(plain=self._bb.emit(self._substitute(value), name_hint=binding.var.name))

    def _in_place(self, binding: relax.VarBinding, layout: ChannelBlocks, choice: Choice) -> _Value:
        """An image of rows of channels, or they of an image, without a copy."""
        source, (n, *sizes) = binding.value.args[0], shape_of(binding.var)
        if choice.layout is None:
            rows = relax.op.reshape(self._as(source, layout), (n, *sizes))
            return _Value(plain=self._bb.emit(rows, name_hint=binding.var.name))
        channels, height, width = sizes
        image = relax.op.reshape(self._plain(source), (n, 1, height, width, channels))
        return _Value(blocked={layout: self._bb.emit(image, name_hint=binding.var.name)})

    # -- values and their layouts

    def _value(self, expr: relax.Expr) -> _Value:
        return self._values.get(expr, _Value(plain=expr)) if isinstance(expr, relax.Var) else _Value(plain=expr)

    def _substitute(self, expr: relax.Expr) -> relax.Expr:
        """``expr`` with every variable in its plain layout."""
        return replaced(expr, {var: self._plain(var) for var in leaves(expr)})

    def _plain(self, var: relax.Var) -> relax.Expr:
        value = self._value(var)
        if value.plain is None:
            layout, expr = next(iter(value.blocked.items()))
            value.plain = self._bb.emit(self._unblock(expr, layout))
        return value.plain

    def _as(self, expr: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        value = self._value(expr)
        if layout not in value.blocked:
            plain = self._plain(expr) if isinstance(expr, relax.Var) else expr
            value.blocked[layout] = self._bb.emit(self._block(plain, layout))
        return value.blocked[layout]

    def _block(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        n, c, h, w = shape_of(x)
        each, full = c // layout.groups, layout.per_group * layout.size
        op = relax.op
        if isinstance(h, Size) or isinstance(w, Size):  # reshapes divide by them
            return self._bb.call_te(in_blocks, x, layout.blocks, layout.size, each, full, primfunc_name_hint="blocked")
        if layout.padded:
            x = self._bb.emit(op.reshape(x, (n, layout.groups, each, h, w)))
            x = self._bb.emit(op.nn.pad(x, [0, 0, 0, 0, 0, full - each, 0, 0, 0, 0]))
        if h == w == 1:
            return op.reshape(x, (n, layout.blocks, 1, 1, layout.size))
        x = self._bb.emit(op.reshape(x, (n, layout.blocks, layout.size, h, w)))
        return op.permute_dims(x, [0, 1, 3, 4, 2])

    def _unblock(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        n, _, h, w, _ = shape_of(x)
        op = relax.op
        each, full = layout.channels // layout.groups, layout.per_group * layout.size
        if isinstance(h, Size) or isinstance(w, Size):  # reshapes divide by them
            return self._bb.call_te(_unblocked, x, layout.channels, each, full, primfunc_name_hint="unblocked")
        if not h == w == 1:
            x = self._bb.emit(op.permute_dims(x, [0, 1, 4, 2, 3]))
        if layout.padded:
            x = self._bb.emit(op.reshape(x, (n, layout.groups, full, h, w)))
            x = self._bb.emit(op.strided_slice(x, [2], [0], [each]))
        return op.reshape(x, (n, layout.channels, h, w))

    # -- rules: the call that makes an operator's result in the layout that was chosen

    def _conv2d(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        data, weight = call.args
        array = array_of(weight)
        assert array is not None
        channels, groups = shape_of(data)[1], int(call.attrs.groups)
        integer = is_integer_product(call)
        if is_depthwise(call):
            conv = convolution(call, out, out)
            array = out.cut(array, 0).reshape(-1, *array.shape[1:])  # lanes that pad lie where the layout has them
            if not integer:
                return self._direct(DEPTHWISE, self._as(data, out), array, conv)
            if (tapped := self._tapped(self._as(data, out), array, conv)) is not None:
                return tapped
            packed = constant(DEPTHWISE.pack(array, conv))
            return self._bb.call_te(depthwise_nchwc_integer, self._as(data, out), packed, conv.strides, conv.pads,
                                    conv.dilation, 0, primfunc_name_hint=DEPTHWISE.name)
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
            x, size = self._as(data, inner), inner.size
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
        rounded = DIRECT.seconds(replace(conv, element=2), self._estimate)
        if conv.fixed and rounded > fastest(conv, self._options, self._estimate):
            return None
        narrow = self._bb.emit(relax.op.astype(x, "bfloat16"))
        if any(conv.pads):
            top, left, bottom, right = conv.pads
            narrow = self._bb.emit(relax.op.nn.pad(narrow, [0, 0, 0, 0, top, bottom, left, right, 0, 0]))
        if self._tiles_pay(x, conv, BFLOATS, bfloat.STEP):
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
        return self._bb.call_te(convolve, self._as(x, layout), packed, primfunc_name_hint=DIRECT.name)

    def _conv2d_transpose(self, call: relax.Call, out: ChannelBlocks, choice: Choice) -> relax.Expr:
        data, weight = call.args
        array, groups = array_of(weight), int(call.attrs.groups)
        assert array is not None
        inner = choice.reads[data] if isinstance(data, relax.Var) else ChannelBlocks(array.shape[0], groups).canonical()
        assert inner is not None
        rows, columns = transposed_axes(call)
        phases = phase_weight(array, rows, columns, groups)
        cut = ChannelBlocks(phases.shape[1], groups, out.size).cut(phases, 1)
        cut = ChannelBlocks(array.shape[0] // groups, size=inner.size).cut(cut, 3)  # [P, OC/o, o, IC/i, i, TH, TW]
        packed = constant(cut.transpose(0, 1, 3, 5, 6, 4, 2).reshape(-1, *(cut.shape[i] for i in (3, 5, 6, 4, 2))))
        convolve = partial(conv2d_transpose_nchwc, rows=rows, columns=columns, groups=groups)
        image = self._bb.call_te(convolve, self._as(data, inner), packed, primfunc_name_hint="conv2d_transpose")
        if all(axis.out % axis.stride == 0 for axis in (rows, columns)):
            return image
        # by itself: no schedule interleaves phases that the result has but a part of
        ends = (axis.out.expr if isinstance(axis.out, Size) else axis.out for axis in (rows, columns))
        return self._bb.call_te(_first_pixels, self._bb.emit(image), *ends,
                                primfunc_name_hint="first_pixels", primfunc_attrs={"op_pattern": INJECTIVE})

    def _narrow(self, data: relax.Expr, size: int) -> relax.Expr:
        """All channels, padded to ``size``, as one block."""
        n, c, h, w = shape_of(data)
        x = self._bb.emit(relax.op.permute_dims(self._substitute(data), [0, 2, 3, 1]))
        if size > c:
            x = self._bb.emit(relax.op.nn.pad(x, [0, 0, 0, 0, 0, 0, 0, size - c]))
        return self._bb.emit(relax.op.reshape(x, (n, 1, h, w, size)))

    def _pool(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        attrs = call.attrs
        make = relax.op.nn.max_pool2d if name_of(call) == "relax.nn.max_pool2d" else relax.op.nn.avg_pool2d
        blocked = f"NCHW{layout.size}c"
        return make(
            self._as(call.args[0], layout), pool_size=list(attrs.pool_size), strides=list(attrs.strides),
            padding=list(attrs.padding), dilation=list(attrs.dilation), ceil_mode=attrs.ceil_mode,
            count_include_pad=attrs.count_include_pad, layout=blocked, out_layout=blocked,
        )

    def _resize(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        attrs = call.attrs
        return relax.op.image.resize2d(
            self._as(call.args[0], layout), call.args[1], roi=tuple(map(float, attrs.roi)),
            layout=f"NCHW{layout.size}c", method=attrs.method,
            coordinate_transformation_mode=attrs.coordinate_transformation_mode,
            rounding_method=attrs.rounding_method, cubic_alpha=attrs.cubic_alpha, cubic_exclude=attrs.cubic_exclude,
            extrapolation_value=attrs.extrapolation_value,
        )

    def _unary(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data, *rest = call.args
        return relax.Call(call.op, [self._as(data, layout), *rest], call.attrs)

    def _binary(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.Call(call.op, [self._operand(arg, layout) for arg in call.args], call.attrs)

    def _operand(self, expr: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        array = array_of(expr)
        if array is None:
            return self._as(expr, layout)
        if array.size == 1:
            return relax.const(array.reshape(()))
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        return constant(layout.cut(array, 1).transpose(0, 1, 3, 4, 2))

    def _concat(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        (parts,) = call.args
        blocked = [self._as(f, ChannelBlocks(shape_of(f)[1], size=layout.size)) for f in parts.fields]
        return relax.op.concat(blocked, axis=1)

    def _batch(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data, *rest = call.args
        return relax.Call(call.op, [self._as(data, layout), *rest], call.attrs, call.ty_args)

    def _pad(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data = self._as(call.args[0], layout)
        if not pads_space(call):
            return self._between(call, data)
        return relax.op.nn.pad(data, [*map(int, call.attrs.pad_width), 0, 0], pad_value=float(call.attrs.pad_value))

    def _between(self, pad: relax.Call, images: relax.Expr) -> relax.Expr:
        """Images of one value around others: a concatenation, into which the others are written where they are made."""
        before, after = (int(width) for width in pad.attrs.pad_width[:2])
        shape, value = shape_of(images)[1:], relax.const(float(pad.attrs.pad_value), dtype_of(images))
        front, back = (
            [self._bb.emit(relax.op.full((count, *shape), value))] if count else [] for count in (before, after)
        )
        return relax.op.concat([*front, images, *back], axis=0)

    def _slice(self, call: relax.Call, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        if moves_batch(call):
            return self._batch(call, layout, choice)
        found = channel_slice(call)
        assert found is not None
        source, begin, end = found
        blocked = self._as(source, ChannelBlocks(shape_of(source)[1], size=layout.size))
        return relax.op.strided_slice(blocked, [1], [begin // layout.size], [end // layout.size])

    def _mean(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.op.mean(self._as(call.args[0], layout), axis=[2, 3], keepdims=True)
