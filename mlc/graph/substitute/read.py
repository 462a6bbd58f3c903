"""Relax to terms: what of a model the operator table knows, and the rest as opaque leaves.

A concatenation of many becomes one of pairs, a slice along several axes one slice an axis, an operand of lower rank
gets axes of length 1 in front; writing the terms undoes all that. Constants of one element are tensors of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tvm import relax, tirx

from mlc.graph.constants import array_of
from mlc.graph.ir.movement import permutation
from mlc.graph.rewrite import bindings, dtype_of, leaves, op_name, shape_of
from mlc.graph.substitute.terms import CONSTANT, INPUT, OPAQUE, TermBuilder, TermGraph

__all__ = ["Reading", "read"]

_POINTWISE = {
    "nn.relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "log": "log", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "erf": "erf", "negative": "neg",
}
_BINARY = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "maximum": "maximum", "minimum": "minimum",
}
#: operators that the table lacks and that are not defined everywhere
_PARTIAL = ("acos", "acosh", "asin", "atanh", "divide", "floor_divide", "floor_mod", "log", "log10", "log1p", "log2",
            "mod", "power", "rsqrt", "sqrt", "tan")
_REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "max"}


@dataclass
class Reading:
    """The terms of ``main`` and what its leaves stand for.

    ``inputs``, ``constants`` and ``opaques`` are by the leaf's ``id``: a parameter of main; an array; the variable
    that an expression of main is bound to, whose operands in the language are the leaf's inputs.
    """

    graph: TermGraph
    inputs: list[relax.Var] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)
    opaques: list[relax.Var] = field(default_factory=list)
    #: the expressions behind opaque leaves, and those between them that are no tensors of the language
    bound: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    #: the tensors of the language that the result is made of, in the order of the outputs
    results: list[relax.Var] = field(default_factory=list)
    #: the places of variables of main
    places: dict[relax.Var, int] = field(default_factory=dict)


def read(func: relax.Function) -> Reading:
    """The terms of a straight-line function. Outputs are the tensors that its result is made of."""
    return _Reader(func).run()


class _Reader:
    def __init__(self, func: relax.Function) -> None:
        self._func = func
        self._out = Reading(TermGraph((), ()))
        self._build = TermBuilder()
        self._ids: dict[tuple[object, ...], int] = {}
        self._kept: list[relax.Expr] = []  # keeps the ids of constants unique
        self._rules: dict[str, Callable[[relax.Call], int | None]] = {
            "nn.conv2d": self._conv2d, "matmul": self._matmul, "permute_dims": self._transpose,
            "reshape": self._reshape, "concat": self._concat, "strided_slice": self._slice, "nn.pad": self._pad,
            "nn.max_pool2d": self._pool, "nn.avg_pool2d": self._pool,
            **dict.fromkeys(_POINTWISE, self._pointwise), **dict.fromkeys(_BINARY, self._binary),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
        }

    def run(self) -> Reading:
        out = self._out
        for param in self._func.params:
            if isinstance(param.ty, relax.TensorType):
                out.places[param] = self._build.add(INPUT, (), shape_of(param), id=len(out.inputs))
                out.inputs.append(param)
        for binding in bindings(self._func):
            place = self._value(binding.var, binding.value)
            if place is not None:
                out.places[binding.var] = place
        out.results = list(dict.fromkeys(self._result_vars()))
        out.graph = self._build.graph([out.places[var] for var in out.results])
        return out

    def _result_vars(self) -> list[relax.Var]:
        """The tensors of the language that the result depends on directly."""
        pending, found = list(leaves(self._func.body.body)), []
        while pending:
            var = pending.pop(0)
            if var in self._out.places:
                found.append(var)
            elif var in self._out.bound:
                pending.extend(leaves(self._out.bound[var]))
        return found

    # -- one binding

    def _value(self, var: relax.Var, value: relax.Expr) -> int | None:
        """Its place; None for what is no tensor, which opaque leaves alone can read."""
        if isinstance(value, relax.Var) and value in self._out.places:
            return self._out.places[value]
        if isinstance(value, relax.Call) and isinstance(var.ty, relax.TensorType):
            rule = self._rules.get(op_name(value).removeprefix("relax."))
            known = rule is not None and dtype_of(var) == "float32" and all(map(self._suits, value.args))
            known = known and 0 not in shape_of(var)  # operators of the language have something to compute
            place = rule(value) if rule is not None and known else None
            if place is not None:
                assert self._build.shape(place) == shape_of(var), f"{value} must keep its shape as terms"
                return place
        self._out.bound[var] = value
        if not isinstance(var.ty, relax.TensorType) or not isinstance(var.ty.shape, relax.ShapeExpr):
            return None
        sources = list(dict.fromkeys(self._tensors(value)))
        self._out.opaques.append(var)
        number = len(self._out.opaques) - 1
        name = op_name(value).removeprefix("relax.") if isinstance(value, relax.Call) else ""
        marks = {"whole": 0} if name in _PARTIAL else {}
        return self._build.add(OPAQUE, sources, shape_of(var), id=number, **marks)

    def _tensors(self, value: relax.Expr) -> list[int]:
        """The places that an expression reads, through tuples and the like."""
        found: list[int] = []
        for leaf in leaves(value):
            if leaf in self._out.places:
                found.append(self._out.places[leaf])
            elif leaf in self._out.bound:
                found += self._tensors(self._out.bound[leaf])
        return found

    def _suits(self, arg: relax.Expr) -> bool:
        """Whether an argument is in the language, or no tensor."""
        if isinstance(arg, relax.Var):
            return arg in self._out.places and dtype_of(arg) == "float32"
        if isinstance(arg, relax.Tuple):
            return all(map(self._suits, arg.fields))
        if not isinstance(arg.ty, relax.TensorType):
            return True
        array = array_of(arg)
        return array is not None and array.dtype == np.float32

    def _operand(self, arg: relax.Expr) -> int:
        if isinstance(arg, relax.Var):
            return self._out.places[arg]
        array = array_of(arg)
        assert array is not None
        return self._constant(array, (arg.value.data_ptr(), array.shape), arg)

    def _constant(self, array: np.ndarray, key: tuple[object, ...], kept: relax.Expr) -> int:
        if key not in self._ids:
            self._ids[key] = len(self._out.constants)
            self._out.constants.append(array)
            self._kept.append(kept)
        marks = {} if np.isfinite(array).all() else {"whole": 0}
        return self._build.add(CONSTANT, (), array.shape, id=self._ids[key], **marks)

    # -- operators; None where one is used in a way that the language lacks

    def _conv2d(self, call: relax.Call) -> int | None:
        attrs = call.attrs
        plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "OIHW" and attrs.out_layout in ("NCHW", "")
        if not plain:
            return None
        data, weight = map(self._operand, call.args)
        return self._build.add(
            "conv2d", (data, weight), shape_of(call), stride=_ints(attrs.strides), padding=_ints(attrs.padding),
            dilation=_ints(attrs.dilation), groups=int(attrs.groups),
        )

    def _matmul(self, call: relax.Call) -> int | None:
        a, b = (shape_of(arg) for arg in call.args)
        if not len(a) == len(b) in (2, 3) or (len(a) == 3 and a[0] != b[0]):
            return None
        return self._build.add("matmul", [self._operand(arg) for arg in call.args], shape_of(call))

    def _transpose(self, call: relax.Call) -> int:
        return self._build.add("transpose", [self._operand(call.args[0])], shape_of(call), perm=permutation(call))

    def _reshape(self, call: relax.Call) -> int:
        return self._reshaped(self._operand(call.args[0]), shape_of(call))

    def _reshaped(self, place: int, shape: tuple[int, ...]) -> int:
        if self._build.shape(place) == shape:
            return place
        return self._build.add("reshape", [place], shape, shape=shape)

    def _concat(self, call: relax.Call) -> int | None:
        if not isinstance(call.args[0], relax.Tuple):
            return None
        axis = int(call.attrs.axis) % len(shape_of(call))
        first, *rest = [self._operand(field) for field in call.args[0].fields]
        for part in rest:
            shape = list(self._build.shape(first))
            shape[axis] += self._build.shape(part)[axis]
            first = self._build.add("concat", (first, part), shape, axis=axis)
        return first

    def _slice(self, call: relax.Call) -> int | None:
        numbers = [_numbers(arg) for arg in call.args[1:]]
        if any(n is None for n in numbers) or (len(numbers) > 3 and set(numbers[3] or ()) - {1}):
            return None
        place = self._operand(call.args[0])
        axes, begins, ends = (n or [] for n in numbers[:3])
        for axis, begin, end in zip(axes, begins, ends, strict=True):
            shape = list(self._build.shape(place))
            axis, extent = axis % len(shape), shape[axis]
            begin, end = (min(max(v + extent if v < 0 else v, 0), extent) for v in (begin, end))
            shape[axis] = end - begin
            if (begin, end) != (0, extent):
                place = self._build.add("slice", [place], shape, axis=axis, begin=begin, end=end)
        return place

    def _pad(self, call: relax.Call) -> int | None:
        widths = _ints(call.attrs.pad_width)
        if str(call.attrs.pad_mode) != "constant" or float(call.attrs.pad_value) != 0.0 or min(widths) < 0:
            return None
        before, after = widths[::2], widths[1::2]
        return self._build.add("pad", [self._operand(call.args[0])], shape_of(call), before=before, after=after)

    def _pool(self, call: relax.Call) -> int | None:
        attrs, shape = call.attrs, shape_of(call.args[0])
        kernel, stride, padding = _ints(attrs.pool_size), _ints(attrs.strides), _ints(attrs.padding)
        plain = attrs.layout == "NCHW" and attrs.out_layout in ("NCHW", "") and set(_ints(attrs.dilation)) == {1}
        if not plain or len(padding) != 4:
            return None
        floor = [(shape[2 + i] + padding[i] + padding[2 + i] - kernel[i]) // stride[i] + 1 for i in range(2)]
        if tuple(floor) != shape_of(call)[2:]:
            return None  # rounded up
        given = {"kernel": kernel, "stride": stride, "padding": padding}
        if op_name(call) == "relax.nn.avg_pool2d":
            return self._build.add("avg_pool2d", [self._operand(call.args[0])], shape_of(call), **given,
                                   count_include_pad=int(attrs.count_include_pad))
        return self._build.add("max_pool2d", [self._operand(call.args[0])], shape_of(call), **given)

    def _pointwise(self, call: relax.Call) -> int:
        name = _POINTWISE[op_name(call).removeprefix("relax.")]
        return self._build.add(name, [self._operand(call.args[0])], shape_of(call))

    def _binary(self, call: relax.Call) -> int:
        rank = len(shape_of(call))
        operands = []
        for arg in call.args:
            array = array_of(arg)
            if array is not None:
                own = () if array.size == 1 else (1,) * (rank - array.ndim) + array.shape
                operands.append(self._constant(array.reshape(own), (arg.value.data_ptr(), own), arg))
            else:
                place = self._operand(arg)
                shape = self._build.shape(place)
                operands.append(self._reshaped(place, (1,) * (rank - len(shape)) + shape))
        if math.prod(shape_of(call)) == 1 and any(self._build.shape(o) != shape_of(call) for o in operands):
            operands = [self._reshaped(o, shape_of(call)) for o in operands]
        return self._build.add(_BINARY[op_name(call).removeprefix("relax.")], operands, shape_of(call))

    def _reduction(self, call: relax.Call) -> int:
        rank = len(shape_of(call.args[0]))
        axes = range(rank) if call.attrs.axis is None else sorted({int(a) % rank for a in call.attrs.axis})
        return self._build.add(
            _REDUCTIONS[op_name(call).removeprefix("relax.")], [self._operand(call.args[0])], shape_of(call),
            axes=tuple(axes), keepdims=int(call.attrs.keepdims),
        )


def _ints(values: object) -> tuple[int, ...]:
    return tuple(int(v) for v in values)  # type: ignore[attr-defined]


def _numbers(expr: relax.Expr) -> list[int] | None:
    """The elements of a tuple of numbers."""
    values = [getattr(item, "value", None) for item in getattr(expr, "fields", [None])]
    numbers = [int(v) for v in values if isinstance(v, int | tirx.IntImm)]
    return numbers if len(numbers) == len(values) else None
