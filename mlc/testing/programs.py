"""Small lowered programs with known results, for tests of everything after the graph passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, topi

__all__ = ["Program", "constant_result", "dense", "many_results", "program", "scalars", "twins", "two_of_one"]

#: inputs and weights as Relax values -> the outputs; bindings go through the builder
Body = Callable[[relax.BlockBuilder, list[relax.Var]], Sequence[relax.Expr]]


@dataclass(frozen=True)
class Program:
    """``mod`` is what :func:`mlc.graph.pipeline.optimise` would give; ``reference`` computes the same in numpy."""

    mod: tvm.IRModule
    reference: Callable[..., list[np.ndarray]]


def program(inputs: dict[str, tuple[tuple[int, ...], str]], body: Body) -> tvm.IRModule:
    """A module whose ``main`` takes ``inputs`` and returns what ``body`` says: one value, or a tuple of several."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, (shape, dtype) in inputs.items()]
    with builder.function("main", params):
        with builder.dataflow():
            outputs = list(body(builder, params))
            result = builder.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
        builder.emit_func_output(result)
    return builder.finalize()


def dense(rows: int = 5, size: int = 24, seed: int = 0) -> Program:
    """``relu(x @ w + b)``, one product and one elementwise function."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((size, size), dtype=np.float32)
    bias = rng.standard_normal(size, dtype=np.float32)

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        product = builder.emit_te(topi.matmul, params[0], relax.const(weight))
        return [builder.emit_te(lambda a, b: topi.nn.relu(topi.add(a, b)), product, relax.const(bias),
                                primfunc_name_hint="bias_relu")]

    mod = program({"x": ((rows, size), "float32")}, body)
    return Program(mod, lambda x: [np.maximum(x @ weight + bias, 0)])


def many_results() -> Program:
    """An input handed through, a weight, a reshaped sum, the sum itself, and its negation."""
    weight = np.random.default_rng(1).standard_normal((3, 4), dtype=np.float32)

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        constant = relax.const(weight)
        total = builder.emit_te(topi.add, params[0], constant)
        flat = builder.emit(relax.op.reshape(total, (12,)))
        return [params[0], constant, flat, total, builder.emit_te(topi.negative, total)]

    def reference(x: np.ndarray) -> list[np.ndarray]:
        return [x, weight, (x + weight).reshape(12), x + weight, -(x + weight)]

    return Program(program({"x": ((3, 4), "float32")}, body), reference)


def scalars() -> Program:
    """``(sum(x) * scale, count + 1, not mask)`` with a float scalar, an int64 scalar and a bool input."""

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        x, scale, count, mask = params
        return [
            builder.emit_te(topi.multiply, builder.emit_te(topi.sum, x), scale),
            builder.emit_te(lambda c: topi.add(c, topi.full((), "int64", 1)), count, primfunc_name_hint="increment"),
            builder.emit_te(topi.logical_not, mask),
        ]

    def reference(x: np.ndarray, scale: np.ndarray, count: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(x.sum() * scale, np.float32), np.asarray(count + 1), ~mask]

    shapes = {"x": ((6,), "float32"), "scale": ((), "float32"), "count.0": ((), "int64"), "mask": ((7,), "bool")}
    return Program(program(shapes, body), reference)


def constant_result() -> Program:
    """No inputs at all; the result is twice a weight."""
    weight = np.random.default_rng(2).standard_normal((2, 9), dtype=np.float32)

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        return [builder.emit_te(topi.add, relax.const(weight), relax.const(weight))]

    return Program(program({}, body), lambda: [weight + weight])


def twins() -> Program:
    """Two equal functions under two names, called in turn with different weights."""
    rng = np.random.default_rng(3)
    first, second = (rng.standard_normal((4, 8), dtype=np.float32) for _ in range(2))

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        once = builder.emit_te(topi.add, params[0], relax.const(first))
        # an attribute without meaning keeps the builder from taking it for the same function
        return [builder.emit_te(topi.add, once, relax.const(second), primfunc_name_hint="plus",
                                primfunc_attrs={"note": "twin"})]

    mod = program({"x": ((4, 8), "float32")}, body)
    return Program(mod, lambda x: [x + first + second])


def two_of_one() -> Program:
    """One function with two results: a sum, and what is made of it."""

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        def both(x: te.Tensor) -> list[te.Tensor]:
            total = topi.add(x, topi.full((3, 8), "float32", 1.0))
            return [total, topi.negative(total)]

        made = builder.emit_te(both, params[0])
        return [builder.emit(relax.TupleGetItem(made, i)) for i in (1, 0)]

    return Program(program({"x": ((3, 8), "float32")}, body), lambda x: [-(x + 1), x + 1])
