"""Blocked layouts for whole regions of the graph.

Convolutions run in ``NCHW[c]c`` (:mod:`mlc.graph.blocked`), and everything between them that can work on that layout
stays in it: pooling, elementwise operators, concatenation by whole blocks, means over the image. Each value is kept
in the layouts that somebody asked for; conversions are ordinary operators at the borders, made once, and fuse with
the data movement around them. Weights are rearranged here, so the compiled module holds them ready for use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tvm
from tvm import relax, tirx

from mlc.graph.blocked import conv2d_nchwc, depthwise_nchwc
from mlc.graph.constants import array_of, constant
from mlc.graph.rewrite import bindings, dtype_of, leaves, op_name, replaced, shape_of
from mlc.graph.select import CONVOLUTION
from mlc.graph.simplify.shuffles import shuffle_source
from mlc.target import Target

__all__ = ["BLOCK", "BlockedLayouts", "ChannelBlocks"]

#: channels of one block: one AVX-512 or two AVX2 vectors of float32
BLOCK = 16

#: below this many input channels a convolution reads one narrow block ``[N, 1, H, W, C]`` instead of padding to BLOCK
_NARROW = 8

# operators whose result on the padding lanes stays finite, since those lanes hold functions of zeros
_UNARY = {
    "relax.nn.relu", "relax.nn.leakyrelu", "relax.sigmoid", "relax.tanh", "relax.clip", "relax.nn.silu",
    "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.abs", "relax.negative", "relax.erf",
}
_BINARY = {"relax.add", "relax.subtract", "relax.multiply", "relax.maximum", "relax.minimum"}

# operators that could make them infinite, for layouts without padding lanes
_UNARY_EXACT = {"relax.exp", "relax.log", "relax.rsqrt", "relax.sqrt"}
_BINARY_EXACT = {"relax.divide", "relax.power"}


@dataclass(frozen=True)
class ChannelBlocks:
    """How ``channels`` are cut: each of ``groups`` equal groups fills whole blocks, the last padded with zeros."""

    channels: int
    groups: int = 1

    @property
    def per_group(self) -> int:
        """Blocks that one group fills."""
        return -(-(self.channels // self.groups) // BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.groups * self.per_group

    @property
    def padded(self) -> bool:
        """Whether some lanes are padding."""
        return self.blocks * BLOCK != self.channels

    def canonical(self) -> ChannelBlocks:
        """Groups that fill their blocks need no mention."""
        return self if self.padded else ChannelBlocks(self.channels)

    def place(self, part: tirx.Expr, index: tirx.Expr, size: int) -> tuple[tirx.Expr, tirx.Expr]:
        """Block and lane of channel ``part * size + index``, for ``index < size``."""
        each = self.channels // self.groups
        if each != size:  # else the parts are the groups
            channel = part * size + index
            part, index = tirx.floordiv(channel, each), tirx.floormod(channel, each)
        return part * self.per_group + tirx.floordiv(index, BLOCK), tirx.floormod(index, BLOCK)

    def cut(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Replace ``axis`` of length ``channels`` by two axes ``[blocks, BLOCK]``."""
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        each = self.channels // self.groups
        array = array.reshape(*before, self.groups, each, *after)
        widths = [(0, 0)] * array.ndim
        widths[axis + 1] = (0, self.per_group * BLOCK - each)
        return np.pad(array, widths).reshape(*before, self.blocks, BLOCK, *after)


@dataclass
class _Value:
    """One value of the graph in the layouts made of it so far."""

    plain: relax.Expr | None = None
    blocked: dict[ChannelBlocks, relax.Expr] = field(default_factory=dict)

    @property
    def home(self) -> ChannelBlocks | None:
        """The blocked layout it was produced in, if any."""
        return next(iter(self.blocked), None)


def BlockedLayouts(target: Target) -> tvm.transform.Pass:
    """Module pass: convolutions of CPU targets and what lies between them move to blocked layouts."""

    @tvm.transform.module_pass(opt_level=0, name="BlockedLayouts")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "llvm" or not _has_convolution(mod["main"]):
            return mod
        return _Rewriter(mod).run()

    return run


def _has_convolution(func: relax.Function) -> bool:
    return any(_name(b.value) == "relax.nn.conv2d" for b in bindings(func))


def _name(expr: relax.Expr) -> str:
    return op_name(expr) if isinstance(expr, relax.Call) else ""


def _is_image(expr: relax.Expr) -> bool:
    ty = expr.ty
    return isinstance(ty, relax.TensorType) and ty.ndim == 4 and dtype_of(expr) == "float32"


class _Rewriter:
    """Emits the function again, binding by binding, choosing each operator's layout from those of its inputs."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._bb = relax.BlockBuilder(tvm.IRModule({g: f for g, f in mod.functions_items() if g.name_hint != "main"}))
        self._values: dict[relax.Var, _Value] = {}
        self._rules: dict[str, Callable[[relax.Call], tuple[ChannelBlocks, relax.Expr] | None]] = {
            "relax.nn.conv2d": self._conv2d,
            "relax.nn.max_pool2d": self._pool,
            "relax.nn.avg_pool2d": self._pool,
            "relax.concat": self._concat,
            "relax.mean": self._mean,
            **dict.fromkeys(_UNARY | _UNARY_EXACT, self._unary),
            **dict.fromkeys(_BINARY | _BINARY_EXACT, self._binary),
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
                    self._values[binding.var] = self._bind(binding)
                result = bb.emit_output(self._substitute(func.body.body))
            bb.emit_func_output(result)
        return relax.transform.DeadCodeElimination()(bb.finalize())

    def _bind(self, binding: relax.VarBinding) -> _Value:
        value = binding.value
        rule = self._rules.get(_name(value))
        if rule is not None:
            made = rule(value)
            if made is not None:
                layout, expr = made
                return _Value(blocked={layout: self._bb.emit(expr)})
        return _Value(plain=self._bb.emit(self._substitute(value), name_hint=binding.var.name))

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
        each, full = c // layout.groups, layout.per_group * BLOCK
        op = relax.op
        if layout.padded:
            x = self._bb.emit(op.reshape(x, (n, layout.groups, each, h, w)))
            x = self._bb.emit(op.nn.pad(x, [0, 0, 0, 0, 0, full - each, 0, 0, 0, 0]))
        if h == w == 1:
            return op.reshape(x, (n, layout.blocks, 1, 1, BLOCK))
        x = self._bb.emit(op.reshape(x, (n, layout.blocks, BLOCK, h, w)))
        return op.permute_dims(x, [0, 1, 3, 4, 2])

    def _unblock(self, x: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        n, _, h, w, _ = shape_of(x)
        op = relax.op
        each, full = layout.channels // layout.groups, layout.per_group * BLOCK
        if not h == w == 1:
            x = self._bb.emit(op.permute_dims(x, [0, 1, 4, 2, 3]))
        if layout.padded:
            x = self._bb.emit(op.reshape(x, (n, layout.groups, full, h, w)))
            x = self._bb.emit(op.strided_slice(x, [2], [0], [each]))
        return op.reshape(x, (n, layout.channels, h, w))

    # -- rules: the blocked layout of the result and the call that makes it, or None for the plain operator

    def _conv2d(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        data, weight = call.args
        attrs = call.attrs
        array = array_of(weight)
        if array is None or not _is_image(data) or attrs.data_layout != "NCHW" or attrs.kernel_layout != "OIHW":
            return None
        channels, groups = shape_of(data)[1], int(attrs.groups)
        strides, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
        pads = [int(p) for p in attrs.padding]
        out = ChannelBlocks(array.shape[0], groups)
        if groups > 1 and groups == channels == array.shape[0]:
            layout = self._value(data).home or ChannelBlocks(channels)
            packed = layout.cut(array, 0).transpose(0, 2, 3, 4, 1)[:, :, :, :, None, :]
            te_args = (self._as(data, layout), constant(packed), strides, pads, dilation)
            return layout, self._bb.call_te(depthwise_nchwc, *te_args, primfunc_name_hint="depthwise")
        shuffled = self._shuffled_conv2d(data, out.cut(array, 0), strides, pads, dilation, groups)
        if shuffled is not None:
            return out.canonical(), shuffled
        if groups == 1 and channels < _NARROW:
            x, packed = self._narrow(data), out.cut(array, 0).transpose(0, 3, 4, 2, 1)[:, None]
        else:
            inner = ChannelBlocks(channels, groups).canonical()
            x = self._as(data, inner)
            packed = ChannelBlocks(channels // groups).cut(out.cut(array, 0), 2).transpose(0, 2, 4, 5, 3, 1)
        args = (x, constant(packed), strides, pads, dilation, groups)
        convolution = {"strides": strides, "pads": pads, "dilation": dilation, "groups": groups}
        return out.canonical(), self._bb.call_te(
            conv2d_nchwc, *args, primfunc_name_hint="conv2d", primfunc_attrs={CONVOLUTION: convolution}
        )

    def _shuffled_conv2d(
        self, data: relax.Expr, weight: np.ndarray, strides: list[int], pads: list[int], dilation: list[int],
        groups: int,
    ) -> relax.Expr | None:
        """The convolution of a channel shuffle, which reads each channel where it is before the shuffle.

        ``weight`` is ``[OC/o, o, IC/groups, KH, KW]``.
        """
        found = shuffle_source(data, self._call)
        layout = self._value(found[0]).home if found is not None else None
        if found is None or layout is None:
            return None
        (x, ways), channels = found, shape_of(data)[1]

        def source(group: tirx.Expr, channel: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
            place = group * (channels // groups) + channel
            return layout.place(tirx.floormod(place, ways), tirx.floordiv(place, ways), channels // ways)

        packed = constant(weight.transpose(0, 3, 4, 2, 1)[:, None])
        convolve = partial(conv2d_nchwc, strides=strides, pads=pads, dilation=dilation, groups=groups, source=source)
        return self._bb.call_te(convolve, self._as(x, layout), packed, primfunc_name_hint="conv2d")

    def _call(self, expr: relax.Expr, name: str) -> relax.Call | None:
        value = self._bound.get(expr) if isinstance(expr, relax.Var) else None
        return value if value is not None and _name(value) == f"relax.{name}" else None

    def _narrow(self, data: relax.Expr) -> relax.Expr:
        n, c, h, w = shape_of(data)
        x = self._bb.emit(relax.op.permute_dims(self._substitute(data), [0, 2, 3, 1]))
        return self._bb.emit(relax.op.reshape(x, (n, 1, h, w, c)))

    def _pool(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        (data,) = call.args
        layout = self._value(data).home
        if layout is None or call.attrs.layout != "NCHW":
            return None
        attrs = call.attrs
        make = relax.op.nn.max_pool2d if _name(call) == "relax.nn.max_pool2d" else relax.op.nn.avg_pool2d
        blocked = f"NCHW{BLOCK}c"
        return layout, make(
            self._as(data, layout), pool_size=list(attrs.pool_size), strides=list(attrs.strides),
            padding=list(attrs.padding), dilation=list(attrs.dilation), ceil_mode=attrs.ceil_mode,
            count_include_pad=attrs.count_include_pad, layout=blocked, out_layout=blocked,
        )

    def _unary(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        data, *rest = call.args
        layout = self._value(data).home
        if layout is None or (layout.padded and _name(call) in _UNARY_EXACT):
            return None
        return layout, relax.Call(call.op, [self._as(data, layout), *rest], call.attrs)

    def _binary(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        layout = next((v.home for v in map(self._value, call.args) if v.home is not None), None)
        if layout is None or len(shape_of(call)) != 4 or (layout.padded and _name(call) in _BINARY_EXACT):
            return None
        operands = [self._operand(arg, layout) for arg in call.args]
        if any(o is None for o in operands):
            return None
        return layout, relax.Call(call.op, operands, call.attrs)

    def _operand(self, expr: relax.Expr, layout: ChannelBlocks) -> relax.Expr | None:
        array = array_of(expr)
        if array is not None:
            if array.size == 1:
                return relax.const(array.reshape(()))
            shape = (1,) * (4 - array.ndim) + array.shape
            if shape != (1, layout.channels, 1, 1):
                return None
            return constant(layout.cut(array.reshape(shape), 1).transpose(0, 1, 3, 4, 2))
        if not _is_image(expr) or shape_of(expr)[1] != layout.channels:
            return None
        return self._as(expr, layout)

    def _concat(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        (parts,) = call.args
        if not isinstance(parts, relax.Tuple) or int(call.attrs.axis) not in (1, -3):
            return None
        fields = list(parts.fields)
        if not all(_is_image(f) and shape_of(f)[1] % BLOCK == 0 for f in fields):
            return None
        if not any(self._value(f).home for f in fields):
            return None
        channels = [ChannelBlocks(shape_of(f)[1]) for f in fields]
        blocked = [self._as(f, layout) for f, layout in zip(fields, channels, strict=True)]
        return ChannelBlocks(sum(layout.channels for layout in channels)), relax.op.concat(blocked, axis=1)

    def _mean(self, call: relax.Call) -> tuple[ChannelBlocks, relax.Expr] | None:
        (data,) = call.args
        layout = self._value(data).home
        axes = sorted(int(a) % 4 for a in call.attrs.axis or ())
        if layout is None or axes != [2, 3] or not call.attrs.keepdims:
            return None
        return layout, relax.op.mean(self._as(data, layout), axis=[2, 3], keepdims=True)
