"""Models whose products are of bfloat16, on CPUs that multiply pairs of it."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from relax_evaluation import RNG, operators
from tvm import relax
from tvm.relax import op

import mlc
from mlc.graph.kernels.bfloat import has_bfloat_dot
from mlc.graph.pipeline import lower
from mlc.graph.precision import WidenFloats
from mlc.graph.precision.bfloats import OF_BFLOATS
from mlc.graph.simplify import FoldAffine
from mlc.options import CompileOptions
from mlc.target import resolve
from mlc.testing.programs import program
from schedules.registry import find

NATIVE, ZEN4, V3 = (resolve(name, threads=2) for name in ("native", "llvm -mcpu=znver4", "x86-64-v3"))


def weight(*shape: int, dtype: str = "bfloat16", scale: float = 0.1) -> relax.Expr:
    values = (scale * RNG.standard_normal(shape)).astype(getattr(ml_dtypes, dtype, dtype))
    return relax.const(tvm.runtime.tensor(values))


def network(
    shape: tuple[int, ...], body: Callable[[relax.BlockBuilder, relax.Expr], relax.Expr], dtype: str = "bfloat16"
) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.finalize()


def convolutions(dtype: str) -> tvm.IRModule:
    """Convolutions of 1x1 and 3x3, the first with a scale and a shift of channels, and a product after a mean."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.nn.conv2d(x, weight(64, 32, 1, 1, dtype=dtype)))
        y = b.emit(op.multiply(y, weight(1, 64, 1, 1, dtype=dtype, scale=1.0)))
        y = b.emit(op.nn.relu(b.emit(op.add(y, weight(1, 64, 1, 1, dtype=dtype)))))
        y = b.emit(op.nn.conv2d(y, weight(32, 64, 3, 3, dtype=dtype), padding=1, strides=2))
        return b.emit(op.matmul(b.emit(op.mean(y, [2, 3])), weight(32, 40, dtype=dtype)))

    return network((1, 32, 9, 9), body, dtype)


def spaces(mod: tvm.IRModule, target, precision: str = "f32") -> list[str]:  # type: ignore[no-untyped-def]
    tasks = lower(mod, target, options=CompileOptions.of(precision=precision)).tasks
    return [find(task.func, target.tvm).name for task in tasks]


def test_products_of_bfloat16_multiply_pairs_where_the_target_does() -> None:
    found = spaces(convolutions("bfloat16"), ZEN4)
    assert found.count("cpu.conv2d_bfloat") == 2, "the scale of a batch norm does not make float32 of its weight"
    assert found.count("cpu.gemm_bfloat") == 1
    for mod, target in ((convolutions("bfloat16"), V3), (convolutions("float16"), ZEN4)):
        assert not [name for name in spaces(mod, target) if "bfloat" in name]


def test_models_of_float16_are_those_of_bfloat16_where_that_is_asked_for() -> None:
    assert spaces(convolutions("float16"), ZEN4, "bf16") == spaces(convolutions("bfloat16"), ZEN4)


@pytest.mark.skipif(not has_bfloat_dot(NATIVE), reason="this machine does not multiply pairs of bfloat16")
def test_operands_of_float16_are_rounded_where_that_is_asked_for() -> None:
    """Weights and activations once each; without that, products of float16 stay exact."""
    matrix = (0.1 * RNG.standard_normal((301, 70))).astype("float16")
    x = RNG.standard_normal((37, 301)).astype("float16")
    mod = network((37, 301), lambda b, v: b.emit(op.astype(b.emit(op.matmul(v, relax.const(matrix))), "float32")),
                  "float16")
    exact = x.astype("float64") @ matrix.astype("float64")
    left, right = (each.astype(ml_dtypes.bfloat16).astype("float64") for each in (x, matrix))
    for precision, wanted in (("bf16", left @ right), ("f32", exact)):
        (found,) = mlc.compile(mod, log=False, precision=precision)(x)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    assert np.abs(left @ right - exact).max() > 1e-3


def test_a_model_that_multiplies_float32_too_is_computed_in_it() -> None:
    def mixed(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.astype(b.emit(op.matmul(x, weight(64, 64))), "float32"))
        return b.emit(op.matmul(y, relax.const(RNG.integers(-3, 3, (64, 64)).astype("float32"))))

    mod = network((4, 64), mixed)
    assert OF_BFLOATS not in (WidenFloats(mod)["main"].attrs or {})
    assert "cpu.gemm_bfloat" not in spaces(mod, ZEN4)


@pytest.mark.skipif(not has_bfloat_dot(NATIVE), reason="this machine does not multiply pairs of bfloat16")
def test_results_are_exact_up_to_the_sums_of_float32() -> None:
    """Two products, between them what the model rounds to bfloat16, once."""
    first, second = ((0.1 * RNG.standard_normal(s)).astype(ml_dtypes.bfloat16) for s in ((301, 96), (96, 70)))

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.matmul(x, relax.const(tvm.runtime.tensor(first))))
        y = b.emit(op.matmul(b.emit(op.nn.relu(y)), relax.const(tvm.runtime.tensor(second))))
        return b.emit(op.astype(y, "float32"))

    x = RNG.standard_normal((37, 301)).astype(ml_dtypes.bfloat16)
    (found,) = mlc.compile(network((37, 301), body), log=False)(x)
    between = np.maximum(x.astype("float64") @ first.astype("float64"), 0)
    wanted = between.astype(ml_dtypes.bfloat16).astype("float64") @ second.astype("float64")
    # a sum that lies between two numbers of bfloat16 may be rounded to either: few are
    error = np.abs(found - wanted) / np.abs(wanted).max()
    assert np.median(error) < 1e-6
    assert error.max() < 2.0**-8
    plain = between @ second.astype("float64")
    assert np.abs(found - plain).max() < 2.0**-8 * np.abs(plain).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_sixteen_bits_stay_such(dtype: str) -> None:
    """Only powers of two are folded into them."""
    def after(scale: np.ndarray) -> tvm.IRModule:
        matrix = weight(64, 64, dtype=dtype).value.numpy().astype("float32")
        return FoldAffine(network((4, 64), lambda b, x: b.emit(op.multiply(
            b.emit(op.matmul(x, relax.const(matrix))), relax.const(scale))), "float32"))

    assert operators(after(np.float32([0.3] * 64))) == ["matmul", "multiply"]
    assert operators(after(np.float32([-0.125, 1, 0, 4] * 16))) == ["matmul"]


ROUNDED = np.array([[np.nan, np.inf, -np.inf, 3.4e38, 1e-40, -0.0, 1.00390625, 1.01171875]], "float32")  # ties as well


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", ["native", "x86-64-v2"])
def test_a_cast_within_a_kernel_rounds(target: str, dtype: str) -> None:
    """TVM computes bfloat16 in float32, where a conversion there and back would be none."""
    def body(b: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        narrow = b.emit(op.astype(p[0], dtype))
        wide = b.emit(op.astype(narrow, "float32"))
        total = b.emit(op.nn.relu(b.emit(op.add(b.emit(op.matmul(p[0], p[1])), p[0]))))
        rounded = b.emit(op.astype(b.emit(op.astype(total, dtype)), "float32"))
        return [b.emit(op.multiply(wide, relax.const(2.0))), b.emit(op.negative(rounded)), narrow]

    shapes = {"x": ((9, 8), "float32"), "y": ((8, 8), "float32")}
    x = np.concatenate([ROUNDED, RNG.normal(size=(8, 8)).astype("float32")])
    y = np.eye(8, dtype="float32") * 4  # whose products and sums are exact
    y[0, 1:] = y[1:, 0] = 0
    exe = mlc.compile(program(shapes, body), target=target, log=False)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    with np.errstate(all="ignore"):
        wanted = x.astype(kind)
        doubled, rounded, narrow = exe(x, y)
        np.testing.assert_array_equal(doubled, wanted.astype("float32") * 2)
        np.testing.assert_array_equal(narrow.view("uint16")[1:], wanted.view("uint16")[1:])
        sums = np.maximum(x[1:] @ y + x[1:], 0).astype(kind).astype("float32")
        np.testing.assert_array_equal(rounded[1:], -sums)
        assert (sums != np.maximum(x[1:] @ y + x[1:], 0)).any()


def test_bfloat16_is_quantised_by_quotients_of_bfloat16() -> None:
    scale, zero = np.array(0.05, ml_dtypes.bfloat16), np.array(128, "uint8")
    ends = [helper.make_tensor_value_info(name, kind, [64, 64])
            for name, kind in (("x", TensorProto.BFLOAT16), ("y", TensorProto.UINT8))]
    graph = helper.make_graph([helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])], "g", ends[:1], ends[1:],
                              [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(zero, "z")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = (RNG.normal(size=(64, 64)) * 3).astype(ml_dtypes.bfloat16)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(mlc.compile(model, log=False)(x)[0], wanted)


def test_products_of_free_rows() -> None:
    weight = np.random.default_rng(3).standard_normal((64, 48)).astype(ml_dtypes.bfloat16)
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ("n", size)) for name, size in (
        ("x", 64), ("y", 48)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", [x], [y],
                              [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    exe = mlc.compile(model, log=False, shapes={"x": "1..48,64"})
    for rows in (1, 2, 11, 48):
        given = np.random.default_rng(rows).standard_normal((rows, 64)).astype(ml_dtypes.bfloat16)
        (found,) = exe(given)
        wanted = given.astype("float64") @ weight.astype("float64")
        assert np.abs(found.astype("float64") - wanted).max() <= 5e-3 * np.abs(wanted).max()
