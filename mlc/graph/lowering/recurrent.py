"""Recurrent layers of many steps: one kernel over the steps, or unrolled for targets that have none.

Before: ``Y, states = R.call_pure_packed("mlc.recurrent", X, W, R, ...)``. After, on CPUs::

    gates = R.matmul(X, W) + b               # of all steps and directions at once
    y = R.call_tir(recurrent, (gates, R packed in panels, h, c))

Hidden units are padded to whole panels, where zeros stay zeros of no effect: padded rows of the state are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from mlc.frontend.onnx_recurrent import LONG, activations, arguments_of, unless_zero, unrolled
from mlc.graph.ir.constants import constant
from mlc.graph.ir.patterns import OPAQUE
from mlc.graph.ir.rewrite import bindings, op_name, rebuilt, shape_of
from mlc.graph.kernels.blocked import PANEL
from mlc.graph.kernels.recurrent import Cell, Recurrence, recurrent
from mlc.sizes import Size, renamed, usual_size, variables_of
from mlc.target import Target
from schedules.machine import cpu_machine

__all__ = ["LowerRecurrent", "UnrollRecurrent"]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def LowerRecurrent(target: Target) -> tvm.transform.Pass:
    """Module pass: calls of :data:`mlc.frontend.onnx_recurrent.LONG` become kernels on CPUs, and steps one after
    another elsewhere."""
    return _pass("LowerRecurrent", target if target.kind == "llvm" else None)


def _pass(name: str, target: Target | None) -> tvm.transform.Pass:
    def lowered(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        if not _is_long(value):
            return value
        operator, attrs, inputs = arguments_of(value)
        inputs += [None] * (8 - len(inputs))
        if target is None or not _alike(operator, attrs):
            return unrolled(operator, builder, inputs, attrs)
        return _Layer(builder, target, operator, attrs, inputs, var.name).emitted()

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bound = {binding.var: binding.value for binding in bindings(mod["main"])}
        return rebuilt(mod, bound, lowered) if any(map(_is_long, bound.values())) else mod

    return run


#: every step by itself, for whoever else compiles a model
UnrollRecurrent = _pass("UnrollRecurrent", None)


def _is_long(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or op_name(value) != "relax.call_pure_packed":
        return False
    return isinstance(value.args[0], relax.ExternFunc) and str(value.args[0].global_symbol) == LONG


def _alike(operator: str, attrs: Mapping[str, Any]) -> bool:
    """Whether both directions have the same activations, as far as the names say."""
    names = [name.lower() for name in attrs.get("activations") or []]
    each = len(_DEFAULTS[operator])
    numbers = attrs.get("activation_alpha") or attrs.get("activation_beta")
    return len(names) <= each or (names[:each] == names[each:] and not numbers)


class _Layer:
    """One layer on its way to a kernel."""

    def __init__(
        self, builder: relax.BlockBuilder, target: Target, operator: str, attrs: Mapping[str, Any],
        inputs: Sequence[Any], name: str,
    ) -> None:
        data, self._weights, self._recurrent, bias, _, hidden, cell, peepholes = inputs
        self._builder, self._operator, self._attrs, self._name = builder, operator, attrs, name
        self._batch_first = bool(attrs.get("layout", 0))
        self._bias, self._peepholes = unless_zero(bias), unless_zero(peepholes)
        self._data = self._turned(data)
        steps, batch, self._features = shape_of(self._data)
        backwards = _DIRECTIONS[str(attrs.get("direction", "forward"))]
        self._count, self._gates = len(backwards), _GATES[operator]
        units = shape_of(self._recurrent)[2]
        parts = _parts(target, steps, batch, len(backwards), self._gates * units * units)
        self._steps, self._batch = steps, batch
        shares = _shares(target, units, len(backwards) * parts)
        (inside, rows), self._given = _own_sizes(steps, batch)
        self._sizes = Recurrence(inside, rows, units, backwards, parts, shares)
        self._states = [self._start(state) for state in ((hidden, cell) if operator == "LSTM" else (hidden,))]

    def emitted(self) -> relax.Expr:
        """``(Y, final states ...)``."""
        sizes, op = self._sizes, relax.op
        cell, extras = self._cell()
        own = [var for var, _ in self._given]
        func = recurrent(sizes, cell, own).with_attr("op_pattern", OPAQUE).without_attr("global_symbol")
        gvar = self._builder.add_func(func, "recurrent")
        state = (self._count, self._batch, sizes.padded)
        slots = self._steps + int(not cell.hidden_before)
        given = relax.Tuple([self._inputs(), *self._panels(cell), *extras, *self._states,
                             *(size for _, size in self._given)])
        whole = relax.TensorType(tuple(map(_plain, (slots, *state))), "float32")
        made = hidden = self._cut(self._emit(op.call_tir(gvar, given, whole)))
        final = []
        if not cell.hidden_before:
            hidden, last = self._parted(made)
            final = [self._shaped(last, (*state[:2], sizes.hidden))]
        final = [self._last(hidden), *final]
        if self._batch_first:
            hidden = self._emit(op.permute_dims(hidden, [2, 0, 1, 3]))
            final = [self._emit(op.permute_dims(each, [1, 0, 2])) for each in final]
        return relax.Tuple([hidden, *final])

    # operands

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        return self._builder.emit(expr, self._name)

    def _shaped(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        return self._emit(relax.op.reshape(expr, tuple(map(_plain, shape))))

    def _turned(self, expr: relax.Expr) -> relax.Expr:
        return self._emit(relax.op.permute_dims(expr, [1, 0, 2])) if self._batch_first else expr

    def _padded(self, expr: relax.Expr, axis: int) -> relax.Expr:
        """With zeros for the units that fill the last panel."""
        missing = self._sizes.padded - self._sizes.hidden
        if not missing:
            return expr
        widths = [0] * (2 * len(shape_of(expr)))
        widths[2 * axis + 1] = missing
        return self._emit(relax.op.nn.pad(expr, widths))

    def _cut(self, expr: relax.Expr) -> relax.Expr:
        """Without those units."""
        if self._sizes.padded == self._sizes.hidden:
            return expr
        return self._emit(relax.op.strided_slice(expr, [len(shape_of(expr)) - 1], [0], [self._sizes.hidden]))

    def _start(self, state: relax.Expr | None) -> relax.Expr:
        """A state before the first step, ``[directions, batch, padded]``."""
        state = unless_zero(state)
        if state is None and isinstance(self._batch, Size):
            shape = relax.ShapeExpr([self._count, self._batch.expr, self._sizes.padded])
            return self._emit(relax.op.zeros(shape, "float32"))
        if state is None:
            return constant(np.zeros((self._count, self._sizes.batch, self._sizes.padded), "float32"))
        return self._padded(self._turned(state), 2)

    def _parted(self, made: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        """What the kernel has made, as the hidden states by time and what is behind the last of them."""
        steps = self._steps
        if not isinstance(steps, Size):
            ends = ((0, steps), (steps, steps + 1))
            first, last = (self._emit(relax.op.strided_slice(made, [0], [begin], [end])) for begin, end in ends)
            return first, last

        def behind(a: te.Tensor) -> Any:
            return tvm.sym.Analyzer().simplify(a.shape[0] - 1)

        def first_of(a: te.Tensor) -> te.Tensor:
            return te.compute((behind(a), *a.shape[1:]), lambda *index: a[index], name="by_time")

        def last_of(a: te.Tensor) -> te.Tensor:
            return te.compute(a.shape[1:], lambda *index: a[(behind(a), *index)], name="last")

        return (self._builder.emit_te(first_of, made, primfunc_name_hint="by_time"),
                self._builder.emit_te(last_of, made, primfunc_name_hint="last"))

    def _last(self, hidden: relax.Expr) -> relax.Expr:
        """The hidden state after each direction's last step, of those by time."""
        steps, _, batch, units = shape_of(hidden)
        backwards = self._sizes.backwards
        if isinstance(steps, Size):
            def last_of(a: te.Tensor) -> te.Tensor:
                ends = [tirx.const(0, "int64") if each else a.shape[0] - 1 for each in backwards]
                return te.compute(a.shape[1:],
                                  lambda d, b, j: a[tirx.Select(d == 0, ends[0], ends[-1]), d, b, j], name="last")

            return self._builder.emit_te(last_of, hidden, primfunc_name_hint="last")
        ends = [0 if each else steps - 1 for each in backwards]
        each = [self._emit(relax.op.strided_slice(hidden, [0, 1], [end, d], [end + 1, d + 1]))
                for d, end in enumerate(ends)]
        each = [self._shaped(part, (1, batch, units)) for part in each]
        return each[0] if len(each) == 1 else self._emit(relax.op.concat(relax.Tuple(each), axis=0))

    def _inputs(self) -> relax.Expr:
        """The inputs' part of all gates, ``[steps, batch, directions, gates, padded]``, one product for all."""
        sizes, op = self._sizes, relax.op
        weights = self._padded(self._by_gate(self._weights), 2)
        columns = self._count * self._gates * sizes.padded
        weights = self._emit(op.permute_dims(self._shaped(weights, (columns, self._features)), [1, 0]))
        product = self._emit(op.matmul(self._shaped(self._data, (self._steps * self._batch, self._features)), weights))
        if self._bias is not None:
            product = self._emit(op.add(product, self._shaped(self._input_bias(), (columns,))))
        return self._shaped(product, (self._steps, self._batch, self._count, self._gates, sizes.padded))

    def _by_gate(self, expr: relax.Expr) -> relax.Expr:
        """``[directions, gates * hidden, ...] --> [directions, gates, hidden, ...]``"""
        count, _, *rest = shape_of(expr)
        return self._shaped(expr, (count, self._gates, self._sizes.hidden, *rest))

    def _biases(self) -> tuple[relax.Expr, relax.Expr]:
        """Of the inputs and of the hidden state, ``[directions, gates, padded]``."""
        both = self._shaped(self._bias, (self._count, 2 * self._gates, self._sizes.hidden))
        both = self._padded(both, 2)
        halves = [(0, self._gates), (self._gates, 2 * self._gates)]
        first, second = (self._emit(relax.op.strided_slice(both, [1], [begin], [end])) for begin, end in halves)
        return first, second

    def _input_bias(self) -> relax.Expr:
        """What is added before the steps: both, but for a GRU's candidate whose second is inside the reset."""
        first, second = self._biases()
        if self._operator == "GRU" and self._attrs.get("linear_before_reset", 0):
            kept = constant(np.array([1, 1, 0], "float32").reshape(1, 3, 1))
            second = self._emit(relax.op.multiply(second, kept))
        return self._emit(relax.op.add(first, second))

    def _panels(self, cell: Cell) -> list[relax.Expr]:
        """The recurrent weights ``[directions, panels, hidden, gates, panel]`` of each product of a step."""
        sizes = self._sizes
        weights = self._padded(self._by_gate(self._recurrent), 2)
        shape = (self._count, self._gates, sizes.padded // PANEL, PANEL, sizes.hidden)
        whole = self._emit(relax.op.permute_dims(self._shaped(weights, shape), [0, 2, 4, 1, 3]))
        if len(cell.stages) == 1:
            return [whole]
        ends = list(accumulate(cell.stages, initial=0))
        return [self._emit(relax.op.strided_slice(whole, [3], [begin], [end])) for begin, end in pairwise(ends)]

    # the cell

    def _cell(self) -> tuple[Cell, list[relax.Expr]]:
        """The cell and the extra vectors that it reads."""
        functions = self._functions()
        if self._operator == "RNN":
            (f,) = functions
            return Cell(1, lambda x, p, e, before: f(p[0] + x[0]), lambda x, p, e, inner, before: inner, True), []
        if self._operator == "GRU":
            return self._gru(*functions)
        return self._lstm(*functions)

    def _gru(self, f: Callable[[Any], Any], g: Callable[[Any], Any]) -> tuple[Cell, list[relax.Expr]]:
        if not self._attrs.get("linear_before_reset", 0):
            return self._reset_before(f, g), []
        extras = []
        if self._bias is not None:
            extras = [self._emit(relax.op.strided_slice(self._biases()[1], [1], [2], [3]))]

        def candidate(x: list[Any], p: list[Any], e: list[Any], before: Any) -> Any:
            return g(x[2] + f(x[1] + p[1]) * (p[2] + e[0] if e else p[2]))

        def hidden(x: list[Any], p: list[Any], e: list[Any], inner: Any, before: Any) -> Any:
            return inner + f(x[0] + p[0]) * (before - inner)

        return Cell(3, candidate, hidden, True, len(extras)), extras

    def _reset_before(self, f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Cell:
        """A GRU whose candidate's product is with what the reset gate leaves of the state."""

        def reset(x: list[Any], p: list[Any], e: list[Any], before: Any) -> tuple[Any, Any]:
            return f(x[1] + p[1]) * before, f(x[0] + p[0])

        def candidate(x: list[Any], p: list[Any], e: list[Any], before: Any) -> Any:
            return g(x[2] + p[1])

        def hidden(x: list[Any], p: list[Any], e: list[Any], inner: Any, before: Any) -> Any:
            return inner + p[0] * (before - inner)

        return Cell(3, candidate, hidden, True, reset=reset)

    def _lstm(self, f: Callable[[Any], Any], g: Callable[[Any], Any], h: Callable[[Any], Any]) -> \
            tuple[Cell, list[relax.Expr]]:
        extras = []
        if self._peepholes is not None:
            rows = self._shaped(self._peepholes, (self._count, 3, self._sizes.hidden))
            extras = [self._padded(rows, 2)]

        def peeped(gate: Any, e: list[Any], index: int, cell: Any) -> Any:
            return gate + e[index] * cell if e else gate

        def after(x: list[Any], p: list[Any], e: list[Any], before: Any) -> Any:
            into, forget = peeped(x[0] + p[0], e, 0, before), peeped(x[2] + p[2], e, 2, before)
            return f(forget) * before + f(into) * g(x[3] + p[3])

        def hidden(x: list[Any], p: list[Any], e: list[Any], inner: Any, before: Any) -> Any:
            return f(peeped(x[1] + p[1], e, 1, inner)) * h(inner)

        return Cell(4, after, hidden, False, 3 if extras else 0), extras

    def _functions(self) -> list[Callable[[Any], Any]]:
        """The activations as expressions, each with the clipping of what goes in."""
        defaults, limit = _DEFAULTS[self._operator], self._attrs.get("clip")
        chosen = activations(_expression, dict(self._attrs), self._count * len(defaults), defaults)[: len(defaults)]

        def clipped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            if not limit:
                return function
            return lambda x: function(_expression("minimum", _expression("maximum", x, -float(limit)), float(limit)))

        return [clipped(function) for function in chosen]


_EXPRESSIONS: Mapping[str, Callable[..., Any]] = {
    "abs": tirx.abs, "add": lambda a, b: a + b, "divide": lambda a, b: a / b, "exp": tirx.exp, "log": tirx.log,
    "maximum": tirx.max, "minimum": tirx.min, "multiply": lambda a, b: a * b, "negative": lambda a: -a,
    "sigmoid": tirx.sigmoid, "subtract": lambda a, b: a - b, "tanh": tirx.tanh,
}


def _expression(name: str, *args: Any) -> Any:
    """An operator of Relax on elements."""
    return _EXPRESSIONS[name](*(tirx.const(a, "float32") if isinstance(a, float) else a for a in args))


def _plain(size: Any) -> Any:
    """A size as Relax has it."""
    return size.expr if isinstance(size, Size) else size


def _own_sizes(*sizes: Any) -> tuple[list[Any], list[tuple[tirx.Var, tirx.Var]]]:
    """Sizes as the kernel has them, and which of its variables are parameters that stand for which outside: shapes give
    those that are sizes themselves, in 32 bits, but not what ``n`` is where there are ``n // 4`` steps."""
    free = variables_of(sizes)
    alone = {size.expr for size in sizes if isinstance(size, Size) and isinstance(size.expr, tirx.Var)}
    bits = "int32" if alone.issuperset(free) else "int64"
    own = {var: tirx.Var(str(var.name), bits) for var in free}
    inside = [renamed(size, own).expr if isinstance(size, Size) else size for size in sizes]
    return inside, [(own[var], var) for var in free if var not in alone]


def _parts(target: Target, steps: Any, batch: Any, count: int, products: int) -> int:
    """Into how many parts the batch is cut, each with a core of its own for all steps: as many as the directions leave
    cores for, where that saves more than starting them costs. ``products`` are those of a row in a step."""
    machine = cpu_machine(target.tvm)
    if isinstance(batch, Size):
        return 1
    most = max(1, machine.cores // count)
    seconds = usual_size(steps) * batch * products / machine.macs_per_cycle() / machine.hz
    if seconds < 4 * machine.launch_seconds:
        return 1
    return max(part for part in range(1, batch + 1) if batch % part == 0 and part <= most)


def _shares(target: Target, units: int, tasks: int) -> int:
    """Into how many runs of panels a step may be shared out, where one task leaves cores without any."""
    cores, panels = cpu_machine(target.tvm).cores, -(-units // PANEL)
    return cores if tasks == 1 and panels % cores == 0 else 1
