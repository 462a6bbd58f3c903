"""Weights of products that an instruction multiplies two rows at a time, as the graph packs them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from relax_evaluation import RNG, evaluate, network
from tvm import relax
from tvm.relax import op

from cost_model.machine import machine
from cost_model.roofline import estimate
from mlc.graph.pipeline import lower
from mlc.options import CompileOptions
from mlc.target import Target, resolve
from schedules.registry import find

N1, V1 = resolve("aarch64:cortex-a76", threads=1), resolve("aarch64:neoverse-v1", threads=1)


def extreme(*shape: int) -> np.ndarray:
    return np.where(RNG.random(shape) < 1 / 3, RNG.choice([-128, 127], shape), RNG.integers(-128, 128, shape)).astype(
        "int8")


def integers(rows: int, depth: int = 38, columns: int = 70) -> tuple:  # type: ignore[type-arg]
    """A product of bytes whose sums come out as they are, with what it is by definition."""
    weight = extreme(depth, columns)

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return b.emit(op.matmul(x, relax.const(weight), out_dtype="int32"))

    x = np.where(RNG.random((rows, depth)) < 1 / 3, 255, RNG.integers(0, 256, (rows, depth))).astype("uint8")
    return network((rows, depth), body, "uint8"), x, x.astype("int64") @ weight.astype("int64")


def spaces(mod, target: Target, **options: str) -> list[tuple[str, list[tuple[int, ...]]]]:  # type: ignore[no-untyped-def]
    """By each task's space the shapes of what it reads and writes."""
    tasks = lower(mod, target, options=CompileOptions.of(**options)).tasks
    return [(find(task.func, target.tvm).name, [tuple(map(int, p.shape)) for p in task.func.params]) for task in tasks]


@pytest.mark.parametrize("rows", [1, 16, 31, 50])
def test_integers_are_exact_and_rows_are_padded_to_pairs(rows: int) -> None:
    mod, x, expected = integers(rows)
    lowered = lower(mod, V1)
    np.testing.assert_array_equal(evaluate(lowered.module, x)[0], expected)
    products = [shapes for space, shapes in spaces(mod, V1) if space == "cpu.gemm_matrix"]
    even = rows + rows % 2
    assert [shapes[:2] for shapes in products] == ([[(even, 40), (5, 5, 16, 8)]] if rows > 1 else [])
    assert not [space for space, _ in spaces(mod, N1) if space == "cpu.gemm_matrix"]


def test_one_weight_is_packed_for_each_number_of_rows() -> None:
    """A row by itself takes dot products, many rows pairs, of one weight."""
    weight = extreme(40, 64)

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        w = relax.const(weight)
        first = b.emit(op.strided_slice(x, [0], [0], [1]))
        whole, part = (b.emit(op.matmul(each, w, out_dtype="int32")) for each in (x, first))
        return b.emit(op.add(whole, part))

    x = RNG.integers(0, 256, (32, 40)).astype("uint8")
    mod = network((32, 40), body, "uint8")
    exact = x.astype("int64") @ weight.astype("int64")
    np.testing.assert_array_equal(evaluate(lower(mod, V1).module, x)[0], exact + exact[:1])
    assert {"cpu.gemm_matrix", "cpu.gemm_integer"} <= {space for space, _ in spaces(mod, V1)}


def test_both_operands_may_be_activations() -> None:
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        wide = b.emit(op.subtract(b.emit(op.astype(x, "int16")), relax.const(np.array(128, "int16"))))
        turned = b.emit(op.permute_dims(b.emit(op.astype(wide, "int8")), [0, 2, 1]))
        return b.emit(op.matmul(x, turned, out_dtype="int32"))

    x = np.where(RNG.random((3, 33, 20)) < 1 / 3, 255, RNG.integers(0, 256, (3, 33, 20))).astype("uint8")
    mod = network(x.shape, body, "uint8")
    wide = x.astype("int64")
    np.testing.assert_array_equal(evaluate(lower(mod, V1).module, x)[0], wide @ (wide - 128).transpose(0, 2, 1))
    assert "cpu.gemm_matrix" in [space for space, _ in spaces(mod, V1)]


def test_bfloats_are_packed_in_steps_of_four() -> None:
    weight = (0.1 * RNG.standard_normal((50, 70))).astype(ml_dtypes.bfloat16)
    mod = network((33, 50), lambda b, x: b.emit(op.matmul(x, relax.const(weight.astype("float32")))))
    x = RNG.standard_normal((33, 50)).astype("float32")
    rounded = x.astype(ml_dtypes.bfloat16).astype("float64")
    (found,) = evaluate(lower(mod, V1, options=CompileOptions.of(precision="bf16")).module, x)
    np.testing.assert_allclose(found, rounded @ weight.astype("float64"), rtol=0, atol=2e-5)
    products = [shapes for space, shapes in spaces(mod, V1, precision="bf16") if space == "cpu.gemm_matrix"]
    assert [shapes[:2] for shapes in products] == [[(34, 52), (5, 13, 16, 4)]]


def test_integers_are_priced_by_what_multiplies_them() -> None:
    """Four products of a lane by a dot product in the time of one of float32, eight in pairs of rows."""
    described = [machine(target.tvm) for target in (N1, V1)]
    assert [(on.dot, on.pairs) for on in described] == [(4.0, 0.0), (4.0, 8.0)]
    task = next(task for task in lower(integers(512, 512, 512)[0], V1).tasks if len(task.func.params) == 3)
    assert find(task.func, V1.tvm).name == "cpu.gemm_matrix"
    assert estimate(task.func, V1.tvm) == pytest.approx(2 * 512**3 / (8 * described[1].flops), rel=0.2)
