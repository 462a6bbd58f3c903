"""``precision`` of the options on GPUs: who takes rounded operands, where conversions go, and what it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, evaluate, network, weight
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import tensor_of
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name
from mlc.graph.pipeline import Lowered, lower
from mlc.graph.precision import NarrowOperands, WidenFloats, WidenSums
from mlc.graph.simplify import EliminateCommonSubexpressions, SinkMovement
from mlc.options import PRECISIONS, CompileOptions
from mlc.target import resolve
from schedules.registry import find

GPU = resolve("cuda:sm_80")
ROUNDED = [name for name in PRECISIONS if name != "f32"]


def lowered(mod: tvm.IRModule, precision: str) -> Lowered:
    return lower(mod, GPU, options=CompileOptions.of(precision=precision))


def spaces(mod: tvm.IRModule, precision: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for task in lowered(mod, precision).tasks:
        found[find(task.func, GPU.tvm).name] += task.weight
    return found


def layer(tokens: int = 48, heads: int = 4, depth: int = 16) -> tvm.IRModule:
    """A transformer's layer: attention of projections with biases, and two products around a GELU."""
    width = heads * depth

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        def dense(y: relax.Expr, outputs: int) -> relax.Expr:
            product = b.emit(op.matmul(y, weight(int(y.ty.shape.values[-1]), outputs, low=-0.3, high=0.3)))
            return b.emit(op.add(product, weight(outputs)))

        def split(y: relax.Expr, axes: list[int]) -> relax.Expr:
            return b.emit(op.permute_dims(b.emit(op.reshape(y, (1, tokens, heads, depth))), axes))

        q, k, v = (split(dense(x, width), axes) for axes in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        scores = b.emit(op.multiply(b.emit(op.matmul(q, k)), relax.const(depth**-0.5, "float32")))
        mixed = b.emit(op.matmul(b.emit(op.nn.softmax(scores)), v))
        mixed = b.emit(op.reshape(b.emit(op.permute_dims(mixed, [0, 2, 1, 3])), (1, tokens, width)))
        y = b.emit(op.nn.layer_norm(b.emit(op.add(dense(mixed, width), x)), weight(width), weight(width), axes=[-1]))
        inner = b.emit(op.nn.gelu(dense(y, 3 * width)))
        return b.emit(op.add(dense(inner, width), y))

    return network((1, tokens, width), body)


@pytest.mark.parametrize("precision", ROUNDED)
def test_products_and_attention_are_on_tensor_cores(precision: str) -> None:
    found = spaces(layer(), precision)
    assert found["cuda.mma"] == 4 and not found["cuda.gemm"], "queries, keys and values are one product"
    assert found["cuda.attention_tf32" if precision == "tf32" else "cuda.attention"] == 1
    exact = spaces(layer(), "f32")
    assert exact["cuda.attention_f32"] == 1 and exact["cuda.gemm"] == 4 and not exact["cuda.mma"]
    assert found.total() <= exact.total() + (0 if precision == "tf32" else 1), "what is given is read otherwise too"


@pytest.mark.parametrize(("precision", "most"), [("tf32", 0.0), ("f16", 3e-3), ("bf16", 3e-2)])
def test_results_differ_from_float32_by_the_rounding_of_operands(precision: str, most: float) -> None:
    """As TVM computes the functions on a CPU, which does not round what only may be."""
    mod, x = layer(), RNG.standard_normal((1, 48, 64)).astype("float32")
    (exact,), (found,) = evaluate(mod, x), evaluate(lowered(mod, precision).module, x)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error <= max(most, 1e-5) and error > most / 1000


def narrowed(mod: tvm.IRModule, precision: str = "f16") -> list[tuple[str, Any]]:
    """The products of ``main`` afterwards, and each one's operands."""
    after = NarrowOperands(GPU, CompileOptions.of(precision=precision))(mod)
    return [(op_name(b.value), b.value.args) for b in bindings(after["main"])
            if op_name(b.value) in ("relax.matmul", "relax.nn.conv2d")]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_of_sixteen_bits_rounds_what_it_multiplies_and_adds_once(dtype: str) -> None:
    """A sum that a norm's result and what products make of it are added to reads it as they do: no kernel converts."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def given(*shape: int, scale: float = 1.0) -> relax.Expr:
        return relax.const(tvm.runtime.tensor((scale * RNG.standard_normal(shape)).astype(kind)))

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        x = b.emit(op.matmul(x, given(64, 64, scale=0.1)))
        for _ in range(2):
            y = b.emit(op.nn.layer_norm(x, given(64), given(64), axes=[-1]))
            inner = b.emit(op.nn.gelu(b.emit(op.matmul(y, given(64, 96, scale=0.1)))))
            x = b.emit(op.add(b.emit(op.matmul(inner, given(96, 64, scale=0.1))), y))
        return x

    mod = network((40, 64), body, dtype)
    tasks = lower(mod, GPU).tasks
    assert sum(task.weight for task in tasks) == 7, "two norms and five products"
    x = RNG.standard_normal((40, 64)).astype(kind)
    (exact,), (found,) = evaluate(WidenFloats(mod), x), evaluate(WidenSums(mod), x)
    error = np.abs(found.astype("float64") - exact.astype("float64")).max() / np.abs(exact.astype("float64")).max()
    assert 1e-5 < error < (2e-3 if dtype == "float16" else 1.6e-2)


def test_what_the_type_does_not_hold_stays_float32() -> None:
    big = RNG.standard_normal((32, 32)).astype("float32")
    big[1, 2] = 1e6

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return b.emit(op.matmul(b.emit(op.matmul(x, relax.const(big))), weight(32, 32)))

    mod = network((5, 32), body)
    assert [[dtype_of(arg) for arg in args] for _, args in narrowed(mod)] == [["float32"] * 2, ["float16"] * 2]
    assert [dtype_of(args[1]) for _, args in narrowed(mod, "bf16")] == ["bfloat16"] * 2
    for precision in ("f32", "tf32"):
        assert NarrowOperands(GPU, CompileOptions.of(precision=precision))(mod).same_as(mod)
    assert NarrowOperands(resolve("native"), CompileOptions.of(precision="f16"))(mod).same_as(mod)


def test_depthwise_convolutions_stay_float32() -> None:
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.nn.conv2d(x, weight(16, 1, 3, 3), padding=1, groups=16))
        return b.emit(op.nn.conv2d(y, weight(24, 16, 1, 1)))

    found = narrowed(network((1, 16, 9, 9), body))
    assert [dtype_of(args[1]) for _, args in found] == ["float32", "float16"]


def test_weights_are_stored_as_they_are_multiplied() -> None:
    matrix = RNG.standard_normal((32, 24)).astype("float32")
    mod = network((5, 32), lambda b, x: b.emit(op.matmul(x, relax.const(matrix))))
    ((_, (_, constant)),) = narrowed(mod)
    np.testing.assert_array_equal(tensor_of(constant).numpy(), matrix.astype("float16"))


def test_slices_are_taken_of_what_was_converted_once() -> None:
    """As of the queries, keys and values that come from one product."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.matmul(x, weight(32, 96)))
        left, right = (b.emit(op.strided_slice(y, [1], [n], [n + 32])) for n in (0, 32))
        return b.emit(op.matmul(left, b.emit(op.permute_dims(right, [1, 0]))))

    mod = network((40, 32), body)
    tidy = EliminateCommonSubexpressions, SinkMovement
    after = NarrowOperands(GPU, CompileOptions.of(precision="bf16"), tidy)(mod)
    names = Counter(op_name(b.value) for b in bindings(after["main"]))
    assert names["relax.astype"] == 2 and names["relax.strided_slice"] == 2
    x = RNG.standard_normal((40, 32)).astype("float32")
    (exact,), (found,) = evaluate(mod, x), evaluate(after, x)
    assert 1e-5 < np.abs(found - exact).max() / np.abs(exact).max() < 2e-2
