"""``precision`` of the options: what is rounded, by how much, and which targets take it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, evaluate, network, weight
from tvm import relax
from tvm.relax import op

import mlc
from mlc.errors import UsageError
from mlc.graph.ir.constants import array_of
from mlc.graph.ir.rewrite import bindings
from mlc.graph.kernels.bfloat import has_bfloat_dot
from mlc.graph.pipeline import lower
from mlc.graph.precision import RoundConstants, check_precision
from mlc.options import PRECISIONS, CompileOptions
from mlc.target import resolve
from schedules.registry import find

NATIVE, ZEN4, V3 = (resolve(name, threads=2) for name in ("native", "llvm -mcpu=znver4", "x86-64-v3"))


def options(precision: str) -> CompileOptions:
    return CompileOptions.of(precision=precision)


def model() -> tvm.IRModule:
    """1x1, 3x3 and depthwise convolutions, GELU before a product, and products of odd depths and widths."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        x = b.emit(op.nn.relu(b.emit(op.nn.conv2d(x, weight(32, 3, 3, 3), padding=1))))
        y = b.emit(op.nn.relu(b.emit(op.nn.conv2d(x, weight(64, 32, 1, 1)))))
        y = b.emit(op.nn.conv2d(y, weight(64, 1, 3, 3), padding=1, groups=64))
        y = b.emit(op.nn.conv2d(y, weight(32, 64, 3, 3, low=-0.1, high=0.1), padding=1))
        y = b.emit(op.nn.relu(b.emit(op.add(x, y))))
        rows = b.emit(op.reshape(b.emit(op.mean(y, [2])), (1, 32 * 9)))
        rows = b.emit(op.strided_slice(rows, [1], [0], [283]))
        rows = b.emit(op.nn.gelu(b.emit(op.matmul(rows, weight(283, 70)))))
        return b.emit(op.matmul(rows, weight(70, 33)))

    return network((1, 3, 9, 9), body)


def spaces(mod: tvm.IRModule, target: Any, precision: str) -> list[str]:
    return [find(task.func, target.tvm).name for task in lower(mod, target, options=options(precision)).tasks]


def test_products_with_constants_multiply_bfloat16() -> None:
    found = spaces(model(), ZEN4, "bf16")
    assert found.count("cpu.gemm_bfloat") == 2 and "cpu.gemm" not in found
    assert found.count("cpu.conv2d_bfloat") == 2, "but for the first layer, whose channels are no pairs"
    assert "cpu.depthwise" in found and "cpu.conv2d_nchwc" in found
    assert not {name for name in spaces(model(), ZEN4, "f32") if "bfloat" in name}


@pytest.mark.skipif(not has_bfloat_dot(NATIVE), reason="this machine does not multiply pairs of bfloat16")
def test_results_differ_from_float32_by_the_rounding_of_operands() -> None:
    mod, x = model(), RNG.standard_normal((1, 3, 9, 9)).astype("float32")
    (exact,) = evaluate(mod, x)
    (found,) = mlc.compile(mod, log=False, precision="bf16")(x)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 2e-2, "rounded, and summed in float32"
    (plain,) = mlc.compile(mod, log=False)(x)
    assert np.abs(plain - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.skipif(not has_bfloat_dot(NATIVE), reason="this machine does not multiply pairs of bfloat16")
def test_a_product_is_that_of_rounded_operands() -> None:
    matrix = RNG.standard_normal((283, 70)).astype("float32")
    x = RNG.standard_normal((9, 283)).astype("float32")
    mod = network((9, 283), lambda b, v: b.emit(op.matmul(v, relax.const(matrix))))
    (found,) = mlc.compile(mod, log=False, precision="bf16")(x)
    left, right = (a.astype(ml_dtypes.bfloat16).astype("float64") for a in (x, matrix))
    np.testing.assert_allclose(found, left @ right, rtol=0, atol=1e-4)
    assert np.abs(found - x.astype("float64") @ matrix).max() > 1e-3


def test_constants_of_products_are_rounded_to_float16() -> None:
    big = RNG.standard_normal((64, 64)).astype("float32")
    big[3, 5] = 1e6  # beyond float16
    matrices = [weight(64, 64), relax.const(big), weight(4, 4)]

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = b.emit(op.matmul(b.emit(op.matmul(x, matrices[0])), matrices[1]))
        return b.emit(op.matmul(b.emit(op.strided_slice(y, [1], [0], [4])), matrices[2]))

    mod = network((5, 64), body)
    assert all(RoundConstants(options(name))(mod).same_as(mod) for name in PRECISIONS if name != "f16")
    rounded = RoundConstants(options("f16"))(mod)
    products = [b.value for b in bindings(rounded["main"]) if b.value.op.name == "relax.matmul"]
    before, after = ([array_of(each) for each in found] for found in (matrices, [p.args[1] for p in products]))
    assert (before[0] != after[0]).any()
    np.testing.assert_array_equal(after[0], before[0].astype("float16").astype("float32"))
    for old, new in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(old, new)


def test_artifacts_of_rounded_constants_take_half_the_bytes(tmp_path) -> None:
    mod = network((5, 600), lambda b, x: b.emit(op.matmul(x, weight(600, 800))))
    x = RNG.standard_normal((5, 600)).astype("float32")
    exact, rounded = (mlc.compile(mod, log=False, precision=name) for name in ("f32", "f16"))
    sizes = []
    for number, exe in enumerate((exact, rounded)):
        exe.save(tmp_path / f"{number}.so")
        sizes.append((tmp_path / f"{number}.so").stat().st_size)
    assert 0.95 * 600 * 800 * 2 < sizes[0] - sizes[1] < 1.05 * 600 * 800 * 2
    (wanted,), (found,) = exact(x), mlc.load(tmp_path / "1.so")(x)
    assert 0 < np.abs(found - wanted).max() <= 2**-11 * np.abs(wanted).max() * 4


@pytest.mark.parametrize(("precision", "target", "message"), [
    ("bf16", V3, "a target of precision bf16 must multiply bfloat16 .* llvm/x86-64-v3/2 does not; take f32 or f16"),
    ("tf32", ZEN4, "a target of precision tf32 must have tensor cores, but llvm/znver4/2 is a CPU"),
    ("tf32", resolve("cuda:sm_75"), "a GPU target of precision tf32 must be sm_80 or later, but cuda/sm_75 is not"),
    ("f16", resolve("cuda:sm_75,sm_80"), "a GPU target of precision f16 must be sm_80 or later"),
])
def test_targets_without_the_arithmetic_are_refused(precision: str, target: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_precision(options(precision), target)
    with pytest.raises(UsageError, match=message):
        mlc.compile("missing.onnx", target, precision=precision)
    with pytest.raises(UsageError, match=message):
        lower(model(), target, options=options(precision))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="the precision must be one of f32, tf32, f16, bf16, got 'int4'"):
        options("int4")
