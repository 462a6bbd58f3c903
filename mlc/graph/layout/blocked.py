"""Blocked layouts for whole regions of the graph.

Convolutions run in ``NCHW[c]c`` (:mod:`mlc.graph.kernels.blocked`), and everything between them that supports that
layout stays in it: pooling, resizing, elementwise operators, concatenation by whole blocks, means over the image. The
regions and block sizes are chosen for the whole graph at once (:mod:`mlc.graph.layout.regions`). Each value is kept in
the layouts that are requested; conversions are ordinary operators at the borders of regions, done once, and fused with
the data movement around them. Weights are packed here, so that the compiled module holds them ready for use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import tvm
from tvm import relax

from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, emit_result, shape_of
from mlc.graph.layout.convolutions import CONVOLUTIONS, name_of
from mlc.graph.layout.convolver import Convolver
from mlc.graph.layout.regions import (
    BINARY,
    BINARY_EXACT,
    IMAGES,
    UNARY,
    UNARY_EXACT,
    Choice,
    Planner,
    channel_slice,
    moves_batch,
    pads_space,
    rows_of,
)
from mlc.graph.layout.values import Values
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target

__all__ = ["BlockedLayouts", "Rewriter"]


def BlockedLayouts(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tvm.transform.Pass:
    """Module pass: convolutions of CPU targets, and the operators between them, move to blocked layouts where that
    pays.

    ``options`` restrict the algorithms of convolutions, more of which make blocked layouts pay more often, and whether
    convolutions may multiply bfloat16, which they do if that is estimated to be faster.
    """

    @tvm.transform.module_pass(opt_level=0, name="BlockedLayouts")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        operators = {name_of(b.value) for b in bindings(mod["main"])}
        if target.kind != "llvm" or operators.isdisjoint((*CONVOLUTIONS, *IMAGES)):
            return mod
        return Rewriter(mod, target, options, Planner(mod["main"], target, options).choose()).run()

    return run


class Rewriter:
    """Rebuilds the function, binding by binding, each in the layout that was chosen for it."""

    #: what converts values between layouts, and what computes convolutions in them
    values, convolver = Values, Convolver
    #: what a transpose between images and rows of channels does, where that is no copy
    rows_of = staticmethod(rows_of)

    def __init__(
        self, mod: tvm.IRModule, target: Target, options: CompileOptions, choices: Mapping[Hashable, Choice]
    ) -> None:
        self._mod, self._choices = mod, choices
        self._bb = builder_of(mod)
        self._values = self.values(self._bb)
        convolver = self.convolver(mod["main"], target, options, self._values)
        self._rules: dict[str, Callable[[relax.Call, ChannelBlocks, Choice], relax.Expr]] = {
            "relax.nn.conv2d": convolver.conv2d,
            "relax.nn.conv2d_transpose": convolver.conv2d_transpose,
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
        func, bb = self._mod["main"], self._bb
        for param in func.params:
            self._values.keep(param, param)
        with bb.function("main", list(func.params), attrs=dict(func.attrs) if func.attrs else {}):
            with bb.dataflow():
                for binding in bindings(func):
                    if binding.var in self._choices:
                        layout, made = self._made(binding, self._choices[binding.var])
                        self._values.keep(binding.var, bb.emit(made, name_hint=binding.var.name), layout)
                result = emit_result(bb, self._values.substitute(func.body.body))
            bb.emit_func_output(result)
        return relax.transform.DeadCodeElimination()(bb.finalize())

    def _made(self, binding: relax.VarBinding, choice: Choice) -> tuple[ChannelBlocks | None, relax.Expr]:
        """The binding's value, and the layout in which it is made."""
        value = binding.value
        if (rows := self.rows_of(value)) is not None and [choice.layout, *choice.reads.values()].count(rows.layout):
            return choice.layout, self._in_place(binding, rows.layout, choice)
        if choice.layout is not None:
            return choice.layout, self._rules[name_of(value)](value, choice.layout, choice)
        return None, self._values.substitute(value)

    def _in_place(self, binding: relax.VarBinding, layout: ChannelBlocks, choice: Choice) -> relax.Expr:
        """An image of rows of channels, or they of an image, without a copy."""
        source, (n, *sizes) = binding.value.args[0], shape_of(binding.var)
        if choice.layout is None:
            return relax.op.reshape(self._values.blocked(source, layout), (n, *sizes))
        channels, height, width = sizes
        return relax.op.reshape(self._values.plain(source), (n, 1, height, width, channels))

    # -- rules: the call that makes an operator's result in the layout that was chosen

    def _pool(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        attrs = call.attrs
        make = relax.op.nn.max_pool2d if name_of(call) == "relax.nn.max_pool2d" else relax.op.nn.avg_pool2d
        blocked = f"NCHW{layout.size}c"
        return make(
            self._values.blocked(call.args[0], layout), pool_size=list(attrs.pool_size), strides=list(attrs.strides),
            padding=list(attrs.padding), dilation=list(attrs.dilation), ceil_mode=attrs.ceil_mode,
            count_include_pad=attrs.count_include_pad, layout=blocked, out_layout=blocked,
        )

    def _resize(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        attrs = call.attrs
        return relax.op.image.resize2d(
            self._values.blocked(call.args[0], layout), call.args[1], roi=tuple(map(float, attrs.roi)),
            layout=f"NCHW{layout.size}c", method=attrs.method,
            coordinate_transformation_mode=attrs.coordinate_transformation_mode,
            rounding_method=attrs.rounding_method, cubic_alpha=attrs.cubic_alpha, cubic_exclude=attrs.cubic_exclude,
            extrapolation_value=attrs.extrapolation_value,
        )

    def _unary(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data, *rest = call.args
        return relax.Call(call.op, [self._values.blocked(data, layout), *rest], call.attrs)

    def _binary(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.Call(call.op, [self._operand(arg, layout) for arg in call.args], call.attrs)

    def _operand(self, expr: relax.Expr, layout: ChannelBlocks) -> relax.Expr:
        array = array_of(expr)
        if array is None:
            return self._values.blocked(expr, layout)
        if array.size == 1:
            return relax.const(array.reshape(()))
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        return constant(layout.cut(array, 1).transpose(0, 1, 3, 4, 2))

    def _concat(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        (parts,) = call.args
        blocked = [self._values.blocked(f, ChannelBlocks(shape_of(f)[1], size=layout.size)) for f in parts.fields]
        return relax.op.concat(blocked, axis=1)

    def _batch(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data, *rest = call.args
        return relax.Call(call.op, [self._values.blocked(data, layout), *rest], call.attrs, call.ty_args)

    def _pad(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        data = self._values.blocked(call.args[0], layout)
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
        blocked = self._values.blocked(source, ChannelBlocks(shape_of(source)[1], size=layout.size))
        return relax.op.strided_slice(blocked, [1], [begin // layout.size], [end // layout.size])

    def _mean(self, call: relax.Call, layout: ChannelBlocks, _choice: Choice) -> relax.Expr:
        return relax.op.mean(self._values.blocked(call.args[0], layout), axis=[2, 3], keepdims=True)
