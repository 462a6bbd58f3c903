"""ONNX ``LSTM``, ``GRU`` and ``RNN``.

Up to :data:`MOST_UNROLLED` steps they are unrolled, so that simplification and substitutions see every step; what
compiles a step takes for each grows with their number. Longer ones, and those of a free number, become one call that
:mod:`mlc.graph.lowering.recurrent` makes a kernel of, or unrolls for a target without one.

The inputs' part of the gates is one product for all steps, biases included; a step adds one product with the state
(GRU: two where the reset comes before its product) and elementwise arithmetic. The reverse direction walks the steps
backwards, so that nothing is flipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, dtype_of, input_at, text
from mlc.sizes import Size, size_of

__all__ = ["LONG", "MOST_UNROLLED", "activations", "arguments_of", "gru", "lstm", "rnn", "unless_zero", "unrolled"]

#: longer layers are one call of :data:`LONG`, where a kernel may hold the loop over their steps
MOST_UNROLLED = 16
#: ``LONG(description, inputs that are there ...) -> (Y, final states ...)``
LONG = "mlc.recurrent"

Activation = Callable[[Any], Any]
#: (the inputs' part of the gates, states before) --> states after; a state that is zero everywhere is None
Step = Callable[[Any, list[Any]], list[Any]]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


class _Emitter:
    """Binds calls of Relax operators to variables: a state is read more than once. Numbers become constants."""

    def __init__(self, bb: Any, dtype: str) -> None:
        self._bb, self._dtype = bb, dtype

    def __call__(self, name: str, *args: Any, **attrs: Any) -> Any:
        from tvm import relax

        given = [relax.const(arg, self._dtype) if isinstance(arg, float) else arg for arg in args]
        return self._bb.emit(getattr(relax.op, name)(*given, **attrs))

    def cut(self, expr: Any, axis: int, begin: int, end: int) -> Any:
        """``expr[..., begin:end, ...]``; of a constant, a constant."""
        array = array_of(expr)
        if array is not None:
            return _constant(array.take(range(begin, end), axis))
        whole = (begin, end) == (0, int(expr.ty.shape[axis]))
        return expr if whole else self("strided_slice", expr, [axis], [begin], [end])

    def at(self, expr: Any, index: int) -> Any:
        """``expr[index]``; of a constant, a constant."""
        part = self.cut(expr, 0, index, index + 1)
        return self.shaped(part, list(expr.ty.shape)[1:])

    def shaped(self, expr: Any, shape: Sequence[Any]) -> Any:
        array = array_of(expr)
        if array is not None:
            return _constant(array.reshape([int(extent) for extent in shape]))
        return self("reshape", expr, [each.expr if isinstance(each, Size) else each for each in shape])

    def transposed(self, expr: Any, axes: Sequence[int]) -> Any:
        array = array_of(expr)
        return _constant(array.transpose(axes)) if array is not None else self("permute_dims", expr, list(axes))

    def total(self, a: Any, b: Any) -> Any:
        """``a + b``, where None is zero everywhere; of constants, a constant."""
        if a is None or b is None:
            return a if b is None else b
        first, second = array_of(a), array_of(b)
        return _constant(first + second) if first is not None and second is not None else self("add", a, b)


class _Layer:
    """What the three operators share: sizes, the weights of each direction, the walk over the steps.

    Weights are stored as ``[directions, gates * hidden, ...]``. ``defaults`` are a direction's activations, ``states``
    the inputs that hold the initial ones: the hidden state, which is also what a step puts out, first.
    """

    def __init__(
        self, bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], defaults: Sequence[str],
        states: Sequence[int] = (5,),
    ) -> None:
        data, weights, recurrent, bias = (input_at(inputs, index) for index in range(4))
        self.emit = _Emitter(bb, dtype_of(data))
        self.batch_first = bool(attrs.get("layout", 0))
        self.data = self.emit.transposed(data, [1, 0, 2]) if self.batch_first else data
        self.steps, self.batch, self.features = (size_of(extent) for extent in self.data.ty.shape)
        self.hidden = int(recurrent.ty.shape[2])
        self.backwards = _directions(text(attrs, "direction", "forward"))
        self._weights, self._recurrent, self._bias = weights, recurrent, unless_zero(bias)
        self._initial = [unless_zero(input_at(inputs, index)) for index in states]
        self._clip = float(attrs["clip"]) if attrs.get("clip") else None
        self._functions = activations(self.emit, attrs, len(self.backwards) * len(defaults), defaults)
        if attrs.get("input_forget", 0):
            raise ValueError("input_forget must be 0")

    def functions(self, direction: int) -> list[Activation]:
        """A direction's activations, each with the clipping of what goes in."""
        each = len(self._functions) // len(self.backwards)
        chosen = self._functions[direction * each : (direction + 1) * each]
        return [self._clipped(function) for function in chosen]

    def _clipped(self, function: Activation) -> Activation:
        limit = self._clip
        if limit is None:
            return function
        return lambda x: function(self.emit("minimum", self.emit("maximum", x, -limit), limit))

    def recurrent(self, direction: int, begin: int, end: int) -> Any:
        """The weights from the hidden state to some gates, ``[hidden, gates * hidden]``."""
        rows = self.gates(self.emit.at(self._recurrent, direction), 0, begin, end)
        return self.emit.transposed(rows, [1, 0])

    def biases(self, direction: int) -> tuple[Any, Any]:
        """``(of the inputs, of the hidden state)``, each ``[gates * hidden]``; None where there are none."""
        if self._bias is None:
            return None, None
        both = self.emit.at(self._bias, direction)
        half = int(both.ty.shape[0]) // 2
        return self.emit.cut(both, 0, 0, half), self.emit.cut(both, 0, half, 2 * half)

    def gates(self, expr: Any, axis: int, begin: int, end: int) -> Any:
        """The gates ``begin`` to ``end - 1`` of what has all of them along ``axis``."""
        return self.emit.cut(expr, axis, begin * self.hidden, end * self.hidden)

    def run(self, make_step: Callable[[int], tuple[Any, Step]]) -> Any:
        """``(Y, final states ...)``. ``make_step`` gives, for a direction, a bias of all steps' gates and a step."""
        from tvm import relax

        _fixed(self.steps, "the number of steps of a layer that no kernel computes")
        results = [self._walk(direction, *make_step(direction)) for direction in range(len(self.backwards))]
        count, size = len(results), (self.batch, self.hidden)
        outputs = [self._joined([hidden[t] for t in range(self.steps) for hidden, _ in results])]
        outputs[0] = self.emit.shaped(outputs[0], (self.steps, count, *size))
        if self.batch_first:
            outputs[0] = self.emit.transposed(outputs[0], [2, 0, 1, 3])
        for index in range(len(self._initial)):
            final = self.emit.shaped(self._joined([states[index] for _, states in results]), (count, *size))
            outputs.append(self.emit.transposed(final, [1, 0, 2]) if self.batch_first else final)
        return relax.Tuple(outputs)

    def _joined(self, parts: Sequence[Any]) -> Any:
        from tvm import relax

        return self.emit("concat", relax.Tuple(parts), axis=0) if len(parts) > 1 else parts[0]

    def _walk(self, direction: int, bias: Any, step: Step) -> tuple[list[Any], list[Any]]:
        """The hidden state after each step, by time, and the states after the last."""
        weights = self.emit.transposed(self.emit.at(self._weights, direction), [1, 0])
        rows = self.emit.shaped(self.data, (self.steps * self.batch, self.features))
        product = self.emit("matmul", rows, weights)
        if bias is not None:
            product = self.emit("add", product, bias)
        if isinstance(self.batch, Size):  # rows of a step begin where a call says
            product = self.emit.shaped(product, (self.steps, self.batch, product.ty.shape[1]))
        states = [self._start(initial, direction) for initial in self._initial]
        hidden = [None] * self.steps
        for t in reversed(range(self.steps)) if self.backwards[direction] else range(self.steps):
            own = self.emit.at(product, t) if isinstance(self.batch, Size) else \
                self.emit.cut(product, 0, t * self.batch, (t + 1) * self.batch)
            states = step(own, states)
            hidden[t] = states[0]
        return hidden, states

    def _start(self, initial: Any, direction: int) -> Any:
        if initial is None:  # zeros, whose product is left out, unless it is no number
            array = array_of(self._recurrent)
            left_out = array is None or bool(np.isfinite(array).all()) or isinstance(self.batch, Size)
            return None if left_out else _constant(np.zeros((self.batch, self.hidden), dtype_of(self._recurrent)))
        if self.batch_first:
            initial = self.emit.transposed(initial, [1, 0, 2])
        return self.emit.at(initial, direction)


def rnn(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``h' = f(x W + h R + b)`` --> ``(Y, Y_h)``."""
    return _converted("RNN", bb, inputs, attrs)


def gru(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``h' = (1 - z) n + z h`` with the update gate ``z``, the reset gate ``r`` and the candidate ``n``.

    ``n = g(x W + (r h) R + b)``, or with ``linear_before_reset`` ``g(x W + r (h R + b_R) + b_W)``. --> ``(Y, Y_h)``.
    """
    return _converted("GRU", bb, inputs, attrs)


def lstm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``c' = f c + i g``, ``h' = o tanh(c')`` with ONNX's order of gates, ``i o f g``. --> ``(Y, Y_h, Y_c)``."""
    return _converted("LSTM", bb, inputs, attrs)


def unrolled(operator: str, bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """The results of a layer as a tuple, step by step."""
    return {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}[operator](bb, inputs, attrs)


def _converted(operator: str, bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """One call for a layer of many steps that a kernel may compute, else the steps one after another."""
    data, batch_first = inputs[0], int(bool(attrs.get("layout", 0)))
    steps, batch = (size_of(data.ty.shape[axis]) for axis in (batch_first, 1 - batch_first))
    long = isinstance(steps, Size) or (steps > MOST_UNROLLED and not isinstance(batch, Size))
    if not long or dtype_of(data) != "float32":
        _fixed(steps, "the number of steps of other than float32")
        return unrolled(operator, bb, inputs, attrs)
    return _long(operator, bb, inputs, attrs)


def _long(operator: str, bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """One call of :data:`LONG`."""
    import tvm
    from tvm import relax

    states = (5, 6) if operator == "LSTM" else (5,)
    defaults = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}[operator]
    layer = _Layer(bb, inputs, attrs, defaults, states)  # raises for what is not supported
    said = {name: value for name, value in attrs.items() if name != "tvm_custom"}
    given = {index: expr for index, expr in enumerate(inputs) if expr is not None and index != 4}
    text = json.dumps([operator, said, list(given)], default=_plain)
    count, size = len(layer.backwards), (layer.batch, layer.hidden)
    shapes = [(layer.steps, count, *size), *[(count, *size)] * len(states)]
    if layer.batch_first:
        shapes = [(layer.batch, layer.steps, count, layer.hidden), *[(layer.batch, count, layer.hidden)] * len(states)]
    types = [relax.TensorType([getattr(size, "expr", size) for size in shape], "float32") for shape in shapes]
    call = relax.op.call_pure_packed(LONG, tvm.ir.StringImm(text), *given.values(), ty_args=relax.TupleType(types))
    made = bb.emit(call)
    return relax.Tuple([bb.emit(relax.TupleGetItem(made, index)) for index in range(len(shapes))])


def arguments_of(call: Any) -> tuple[str, dict[str, Any], list[Any]]:
    """The operator, the attributes and the inputs, None for those that are left out, of a call of :data:`LONG`."""
    text, *given = call.args[1:]
    operator, attrs, places = json.loads(text.value)
    found = dict(zip(places, given, strict=True))
    return operator, attrs, [found.get(index) for index in range(max(places) + 1)]


def _plain(value: Any) -> Any:
    """Attributes as JSON has them."""
    return value.decode() if isinstance(value, bytes) else value.tolist() if hasattr(value, "tolist") else list(value)


def _rnn(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    layer = _Layer(bb, inputs, attrs, ("Tanh",))
    emit = layer.emit

    def make_step(direction: int) -> tuple[Any, Step]:
        (f,) = layer.functions(direction)
        weights = layer.recurrent(direction, 0, 1)

        def step(gates: Any, states: list[Any]) -> list[Any]:
            return [f(_plus_product(emit, gates, states[0], weights))]

        return emit.total(*layer.biases(direction)), step

    return layer.run(make_step)


def _gru(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    layer = _Layer(bb, inputs, attrs, ("Sigmoid", "Tanh"))
    emit = layer.emit

    def mixed(update: Any, candidate: Any, hidden: Any) -> list[Any]:
        if hidden is None:
            return [emit("multiply", emit("subtract", 1.0, update), candidate)]
        return [emit("add", candidate, emit("multiply", update, emit("subtract", hidden, candidate)))]

    def reset_after(direction: int) -> tuple[Any, Step]:
        f, g = layer.functions(direction)
        weights = layer.recurrent(direction, 0, 3)
        bias, inner = layer.biases(direction)
        # only the candidate's bias of the hidden state is inside the reset
        candidate_bias = None if inner is None else unless_zero(layer.gates(inner, 0, 2, 3))
        bias = emit.total(bias, None if inner is None else _without(emit, inner, 2 * layer.hidden))

        def step(gates: Any, states: list[Any]) -> list[Any]:
            (hidden,) = states
            own = [layer.gates(gates, 1, index, index + 1) for index in range(3)]
            inside = candidate_bias
            if hidden is not None:
                product = emit("matmul", hidden, weights)
                first, second, inside = (layer.gates(product, 1, index, index + 1) for index in range(3))
                own[:2] = emit("add", own[0], first), emit("add", own[1], second)
                inside = emit.total(inside, candidate_bias)
            if inside is not None:
                own[2] = emit("add", own[2], emit("multiply", f(own[1]), inside))
            return mixed(f(own[0]), g(own[2]), hidden)

        return bias, step

    def reset_before(direction: int) -> tuple[Any, Step]:
        f, g = layer.functions(direction)
        weights, candidate_weights = layer.recurrent(direction, 0, 2), layer.recurrent(direction, 2, 3)

        def step(gates: Any, states: list[Any]) -> list[Any]:
            (hidden,) = states
            both = _plus_product(emit, layer.gates(gates, 1, 0, 2), hidden, weights)
            candidate = layer.gates(gates, 1, 2, 3)
            if hidden is not None:
                kept = emit("multiply", f(layer.gates(both, 1, 1, 2)), hidden)
                candidate = _plus_product(emit, candidate, kept, candidate_weights)
            return mixed(f(layer.gates(both, 1, 0, 1)), g(candidate), hidden)

        return emit.total(*layer.biases(direction)), step

    return layer.run(reset_after if attrs.get("linear_before_reset", 0) else reset_before)


def _lstm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    layer = _Layer(bb, inputs, attrs, ("Sigmoid", "Tanh", "Tanh"), states=(5, 6))
    emit, peepholes = layer.emit, unless_zero(input_at(inputs, 7))

    def make_step(direction: int) -> tuple[Any, Step]:
        f, g, h = layer.functions(direction)
        weights = layer.recurrent(direction, 0, 4)
        peeps = [None] * 3
        if peepholes is not None:
            row = emit.at(peepholes, direction)
            peeps = [layer.gates(row, 0, index, index + 1) for index in range(3)]

        def peeped(gate: Any, index: int, cell: Any) -> Any:
            if cell is None or peeps[index] is None:
                return gate
            return emit("add", gate, emit("multiply", peeps[index], cell))

        def step(gates: Any, states: list[Any]) -> list[Any]:
            hidden, cell = states
            gates = _plus_product(emit, gates, hidden, weights)
            into, out, forget, candidate = (layer.gates(gates, 1, index, index + 1) for index in range(4))
            after = emit("multiply", f(peeped(into, 0, cell)), g(candidate))
            if cell is not None:
                after = emit("add", emit("multiply", f(peeped(forget, 2, cell)), cell), after)
            return [emit("multiply", f(peeped(out, 1, after)), h(after)), after]

        return emit.total(*layer.biases(direction)), step

    return layer.run(make_step)


def _plus_product(emit: _Emitter, gates: Any, hidden: Any, weights: Any) -> Any:
    """``hidden @ weights + gates``, in the order that fuses the sum into the product."""
    return gates if hidden is None else emit("add", emit("matmul", hidden, weights), gates)


def _without(emit: _Emitter, bias: Any, kept: int) -> Any:
    """The first ``kept`` elements of a vector, zeros after them."""
    from tvm import relax

    rest = int(bias.ty.shape[0]) - kept
    array = array_of(bias)
    if array is not None:
        return _constant(np.concatenate([array[:kept], np.zeros(rest, array.dtype)]))
    zeros = _constant(np.zeros(rest, dtype_of(bias)))
    return emit("concat", relax.Tuple([emit.cut(bias, 0, 0, kept), zeros]), axis=0)


# Inputs and attributes


def _constant(array: np.ndarray) -> Any:
    from tvm import relax

    return relax.const(np.ascontiguousarray(array), str(array.dtype))


def unless_zero(expr: Any) -> Any:
    """None for a constant that is zero everywhere: exporters write initial states and biases out."""
    array = array_of(expr)
    return None if array is not None and not array.any() else expr


def _fixed(size: Any, what: str) -> int:
    if isinstance(size, Size):
        raise ValueError(f"{what} must not be free, got {size}; fix it, as in --shape NAME=32,1,64")
    return int(size)


def _directions(name: str) -> tuple[bool, ...]:
    """For each direction, whether it runs backwards."""
    if name not in _DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(_DIRECTIONS)}, got {name}")
    return _DIRECTIONS[name]


# Activations


def _hard_sigmoid(emit: _Emitter, x: Any, alpha: float, beta: float) -> Any:
    line = emit("add", emit("multiply", x, alpha), beta)
    return emit("minimum", emit("maximum", line, 0.0), 1.0)


def _below_zero(emit: _Emitter, x: Any) -> Any:
    return emit("minimum", x, 0.0)


def _leaky_relu(emit: _Emitter, x: Any, alpha: float, _: float) -> Any:
    return emit("add", emit("maximum", x, 0.0), emit("multiply", _below_zero(emit, x), alpha))


def _elu(emit: _Emitter, x: Any, alpha: float, _: float) -> Any:
    curve = emit("subtract", emit("exp", _below_zero(emit, x)), 1.0)
    return emit("add", emit("maximum", x, 0.0), emit("multiply", curve, alpha))


def _softsign(emit: _Emitter, x: Any, *_: float) -> Any:
    return emit("divide", x, emit("add", emit("abs", x), 1.0))


def _softplus(emit: _Emitter, x: Any, *_: float) -> Any:
    """``log(1 + exp(x))`` without overflow."""
    small = emit("exp", emit("negative", emit("abs", x)))
    return emit("add", emit("maximum", x, 0.0), emit("log", emit("add", small, 1.0)))


#: ONNX's name in lower case --> the function of ``(emit, x, alpha, beta)`` and the defaults of what it takes of them
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "elu": (_elu, (1.0,)),
    "hardsigmoid": (_hard_sigmoid, (0.2, 0.5)),
    "leakyrelu": (_leaky_relu, (0.01,)),
    "relu": (lambda emit, x, *_: emit("maximum", x, 0.0), ()),
    "sigmoid": (lambda emit, x, *_: emit("sigmoid", x), ()),
    "softplus": (_softplus, ()),
    "softsign": (_softsign, ()),
    "tanh": (lambda emit, x, *_: emit("tanh", x), ()),
}


def activations(
    emit: Callable[..., Any], attrs: dict[str, Any], count: int, defaults: Sequence[str]
) -> list[Activation]:
    """The activations of all directions. Alphas and betas are given in order to those that take one."""
    named = [name.decode() if isinstance(name, bytes) else name for name in attrs.get("activations", ())]
    if len(named) == 2 * len(defaults) > count:  # onnxruntime writes ONNX's default out, which is of both directions
        named = named[:count]
    names = named or list(defaults) * (count // len(defaults))
    unknown = [name for name in names if name.lower() not in _ACTIVATIONS]
    if unknown or len(names) != count:
        raise ValueError(f"activations must be {count} of {', '.join(sorted(_ACTIVATIONS))}, got {', '.join(names)}")
    given = [iter(attrs.get(name, ())) for name in ("activation_alpha", "activation_beta")]

    def made(name: str) -> Activation:
        function, parameters = _ACTIVATIONS[name.lower()]
        values = [float(next(g, default)) for g, default in zip(given, parameters, strict=False)]
        values += [0.0] * (2 - len(values))
        return lambda x: function(emit, x, *values)

    return [made(name) for name in names]
