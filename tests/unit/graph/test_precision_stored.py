"""Precision of what is stored: 16-bit floats, and weights of few bits that products read as integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from precision_programs import V3, Body, assert_same, dequantise, numbers, targets_here, weights
from relax_evaluation import RNG, evaluate, network, operators, weight
from tvm import relax
from tvm.relax import op

import mlc
from mlc.frontend.accuracy import LEVELS
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name
from mlc.graph.kernels.digits import has_digits
from mlc.graph.pipeline import lower
from mlc.graph.precision import WeightOnlyProducts, WidenFloats, WidenSums
from mlc.options import CompileOptions
from mlc.target import resolve
from schedules.analysis import analyse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_floats_are_stored_and_not_computed_in(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    matrix = RNG.standard_normal((300, 8)).astype(kind)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 300), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(op.matmul(x, relax.const(tvm.runtime.tensor(matrix)), out_dtype=dtype))
            softmax = builder.emit(op.nn.softmax(product))
            result = builder.emit_output(relax.Tuple([softmax, product]))
        builder.emit_func_output(result)
    mod = builder.finalize()
    wide = WidenFloats(mod)
    calls = [b.value for b in bindings(wide["main"]) if isinstance(b.value, relax.Call)]
    inner = [dtype_of(call) for call in calls if op_name(call) in ("relax.matmul", "relax.nn.softmax")]
    assert inner == ["float32", "float32"]
    assert [str(ty.dtype) for ty in wide["main"].ret_ty.fields] == [dtype, dtype]
    values = RNG.standard_normal((4, 300)).astype(kind)
    got = evaluate(wide, values)[1]
    exact = values.astype("float64") @ matrix.astype("float64")
    step = 2.0 ** (-11 if dtype == "float16" else -8)  # half a unit in the last place
    np.testing.assert_allclose(got.astype("float64"), exact, rtol=1.01 * step, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores_take_sixteen_bits_and_every_sum_has_float32(dtype: str) -> None:
    """The operands of the model's products stay as they are; convolutions, means and softmax add up in float32."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def constant(*shape: int) -> relax.Expr:
        return relax.const(tvm.runtime.tensor((0.1 * RNG.standard_normal(shape)).astype(kind)))

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 16, 14, 14), dtype))
    kernel, matrix = constant(32, 16, 3, 3), constant(32, 40)
    with builder.function("main", [x]):
        with builder.dataflow():
            image = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, kernel, padding=1))))
            product = builder.emit(op.matmul(builder.emit(op.mean(image, [2, 3])), matrix))
            result = builder.emit_output(builder.emit(op.nn.softmax(product)))
        builder.emit_func_output(result)
    mod = builder.finalize()
    wide = WidenSums(mod)
    calls = {op_name(b.value): b.value for b in bindings(wide["main"]) if isinstance(b.value, relax.Call)}
    for name in ("relax.nn.conv2d", "relax.matmul"):
        assert [dtype_of(arg) for arg in calls[name].args] == [dtype, dtype] and dtype_of(calls[name]) == "float32"
    assert {dtype_of(calls[f"relax.{name}"]) for name in ("nn.relu", "mean", "nn.softmax")} == {"float32"}
    assert str(wide["main"].ret_ty.dtype) == dtype
    sums = [
        str(buffer.dtype) for task in lower(mod, resolve("cuda:sm_80")).tasks
        for block in analyse(task.func).reductions for buffer in block.writes
    ]
    assert len(sums) >= 4 and set(sums) == {"float32"}
    values = RNG.standard_normal((1, 16, 14, 14)).astype(kind)
    (got,) = evaluate(wide, values)
    (expected,) = evaluate(WidenFloats(mod), values)
    step = 2.0 ** (-11 if dtype == "float16" else -8)
    np.testing.assert_allclose(got.astype("float64"), expected.astype("float64"), rtol=8 * step, atol=step / 40)


def test_a_cast_to_sixteen_bits_rounds_and_other_models_stay() -> None:
    mod = network((5, 7), lambda b, x: b.emit(op.astype(b.emit(op.astype(x, "float16")), "float32")))
    x = numbers(5, 7)
    (got,) = evaluate(WidenFloats(mod), x)
    np.testing.assert_array_equal(got, x.astype("float16").astype("float32"))
    assert (got != x).any()
    plain = network((5, 7), lambda b, x: b.emit(op.nn.relu(x)))
    assert WidenFloats(plain).same_as(plain)


def blocks(
    b: relax.BlockBuilder, k: int, n: int, block: int, axis: int, dtype: str = "int8", zeros: bool = False,
    limits: tuple[int, int] = (-8, 8),
) -> relax.Expr:
    """A constant ``[k, n]``, or ``[n, k]`` where the blocks are along axis 1, as the ONNX importer writes blocks."""
    shape = (k, n) if axis == 0 else (n, k)
    whole = [*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :]]
    single = [*shape[:axis], shape[axis] // block, 1, *shape[axis + 1 :]]
    integers = RNG.integers(*limits, shape).astype(dtype)
    wide = b.emit(op.astype(b.emit(op.reshape(relax.const(integers), whole)), "float32"))
    if zeros:
        wide = b.emit(op.subtract(wide, relax.const(RNG.integers(*limits, single).astype("float32"))))
    scaled = b.emit(op.multiply(wide, relax.const(RNG.uniform(0.01, 0.1, single).astype("float32"))))
    return b.emit(op.reshape(scaled, shape))


def turned(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return b.emit(op.permute_dims(x))


WEIGHT_ONLY: dict[str, tuple[tuple[int, ...], Body]] = {
    "rows of blocks": ((3, 128), lambda b, x: b.emit(op.matmul(x, blocks(b, 128, 70, 32, 0)))),
    "columns of blocks": ((1, 128), lambda b, x: b.emit(op.matmul(x, turned(b, blocks(b, 128, 64, 64, 1))))),
    "zero points": ((2, 3, 64), lambda b, x: b.emit(op.matmul(x, turned(b, blocks(b, 64, 40, 16, 1, zeros=True))))),
    "unsigned": ((1, 5, 64), lambda b, x: b.emit(op.matmul(x, blocks(
        b, 64, 32, 32, 0, "uint8", zeros=True, limits=(0, 16))))),
    "bytes": ((2, 64), lambda b, x: b.emit(op.matmul(x, blocks(b, 64, 33, 32, 0, limits=(-128, 128))))),
    "blocks of no whole words of 4 bits": ((2, 60), lambda b, x: b.emit(op.matmul(x, blocks(b, 60, 33, 20, 0)))),
    "unsigned bytes": ((33, 64), lambda b, x: b.emit(op.matmul(x, blocks(
        b, 64, 33, 32, 0, "uint8", zeros=True, limits=(0, 256))))),
    "cut short": ((2, 50), lambda b, x: b.emit(op.matmul(x, turned(b, b.emit(op.strided_slice(
        blocks(b, 64, 40, 16, 1, zeros=True), [1], [0], [50])))))),
    "one scale for each column": ((2, 60), lambda b, x: b.emit(op.matmul(x, weights(b, (60, 24), 1, zero=3)))),
    "one scale for each row, transposed": ((2, 60), lambda b, x: b.emit(op.matmul(x, turned(
        b, weights(b, (24, 60), 0, "uint8", zero=250))))),
    "one scale": ((2, 60), lambda b, x: b.emit(op.matmul(x, dequantise(
        b, relax.const(RNG.integers(-128, 128, (60, 24)).astype("int8")), 0.02, -5)))),
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_products_read_the_integers_of_weights(name: str) -> None:
    shape, body = WEIGHT_ONLY[name]
    mod = network(shape, body)
    changed = WeightOnlyProducts(resolve("x86-64-v3"))(mod)
    assert "matmul" not in operators(changed) and "multiply" not in operators(changed)
    x = numbers(*shape)
    assert_same(mod, changed, x, tolerance=1e-6 * float(np.abs(evaluate(mod, x)[0]).max()))


@pytest.mark.parametrize(("block", "bits"), [(32, 4), (128, 8)])
def test_compiled_weights_take_their_bits(block: int, bits: int) -> None:
    half = 1 << (bits - 1)
    mod = network((1, 512), lambda b, x: b.emit(op.matmul(x, blocks(b, 512, 256, block, 0, limits=(-half, half)))))
    x = numbers(1, 512)
    (wanted,) = evaluate(mod, x)
    for target in targets_here():
        exe = mlc.compile(mod, target)
        space = "cpu.gemm_digits" if has_digits(target, bits, 1, block) else "cpu.gemm_weight_only"
        assert [entry["space"] for entry in exe.metadata["functions"]] == [space]
        weights = exe.metadata["weights"]
        size = sum(int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize for entry in weights)
        assert size == 512 * 256 * bits // 8 + 512 // block * 256 * 4
        np.testing.assert_allclose(exe(x)[0], wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_activations_are_rounded_where_the_model_allows_it() -> None:
    """By onnxruntime's levels: 4 is int8, what is less exact is not allowed by the others."""
    b, made = relax.BlockBuilder(), []
    x = relax.Var("x", relax.TensorType((2, 64), "float32"))
    with b.function("main", [x]):
        with b.dataflow():
            for place in range(3):
                made.append(b.emit(op.matmul(x, blocks(b, 64, 32, 32, 0)), f"n{place}_MatMul_"))
            result = b.emit_output(relax.Tuple(made))
        b.emit_func_output(result)
    mod = b.finalize()
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr(LEVELS, {"0": 4, "1": 3}))

    def kernels(*arguments: Any) -> list[str]:
        changed = WeightOnlyProducts(*arguments)(mod)
        values = (b.value for b in bindings(changed["main"]) if isinstance(b.value, relax.Call))
        called = [analyse(changed[call.args[0]]) for call in values if op_name(call) == "relax.call_tir"]
        return [next(block.annotation for block in func.blocks if block.annotation) for func in called]

    exact, digits = "dense_weight_only", "dense_digits"
    assert kernels(V3) == ["dense_rounded", exact, exact]
    assert kernels(resolve("x86-64-v4 -mattr=+avx512vnni")) == ["dense_rounded", digits, digits]
    assert kernels(V3, CompileOptions(integers=False)) == kernels(resolve("llvm -mcpu=x86-64")) == [exact] * 3


KEPT: dict[str, Body] = {
    "a scale for each row of the sum": lambda b, x: b.emit(op.matmul(x, weights(b, (64, 24), 0))),
    "small blocks": lambda b, x: b.emit(op.matmul(x, blocks(b, 64, 24, 8, 0))),
    "blocks of columns": lambda b, x: b.emit(op.matmul(x, turned(b, blocks(b, 32, 64, 16, 0)))),
    "numbers": lambda b, x: b.emit(op.matmul(x, weight(64, 24))),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_weights_stay(name: str) -> None:
    mod = network((2, 64), KEPT[name])
    assert WeightOnlyProducts(resolve("x86-64-v3"))(mod).same_as(mod)
