"""Quantised graphs become integer kernels, and 16-bit floats are only stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from precision_programs import (
    NATIVE,
    SCALE,
    V3,
    Body,
    assert_same,
    dequantise,
    image,
    numbers,
    passed,
    quantise,
    targets_here,
    weights,
)
from relax_evaluation import RNG, evaluate, network, operators, weight
from tvm import relax
from tvm.relax import op

import mlc
from mlc.graph.ir.rewrite import bindings, dtype_of, op_name, shape_of
from mlc.graph.pipeline import lower
from mlc.graph.precision import ExpandRequantisation, IntegerProducts, MoveQuantisation, Rescale, UnsignedActivations
from mlc.graph.precision.integer import priced
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target, resolve

MOVED: dict[str, tuple[Body, list[str]]] = {
    "transposed": (lambda b, x: b.emit(op.permute_dims(image(b, x), [0, 2, 3, 1])),
                   ["quantize", "permute_dims", "dequantize"]),
    "reshaped": (lambda b, x: b.emit(op.reshape(image(b, x), (2, -1))), ["quantize", "reshape", "dequantize"]),
    "cut": (lambda b, x: b.emit(op.strided_slice(image(b, x), [1], [1], [3])),
            ["quantize", "strided_slice", "dequantize"]),
    "pooled": (lambda b, x: b.emit(op.nn.max_pool2d(image(b, x), (3, 3), (2, 2), (1, 1))),
               ["quantize", "nn.max_pool2d", "dequantize"]),
    "rectified": (lambda b, x: b.emit(op.nn.relu(image(b, x, 90))), ["quantize", "maximum", "dequantize"]),
    "rectified at zero": (lambda b, x: b.emit(op.nn.relu(image(b, x, 0))), ["quantize", "dequantize"]),
    "padded": (lambda b, x: b.emit(op.nn.pad(image(b, x, 7), [0, 0, 0, 0, 1, 2, 0, 1])),
               ["quantize", "nn.pad", "dequantize"]),
    "quantised twice": (lambda b, x: image(b, image(b, x)), ["quantize", "dequantize"]),
    "quantised otherwise": (lambda b, x: image(b, image(b, x), 4),
                            ["quantize", "dequantize", "quantize", "dequantize"]),
    "concatenated": (lambda b, x: b.emit(op.concat([image(b, x), image(b, b.emit(op.negative(x)))], 1)),
                     ["quantize", "negative", "quantize", "concat", "dequantize"]),
    "quantised after concatenation": (lambda b, x: image(b, b.emit(op.concat([x, b.emit(op.negative(x))], 1))),
                                      ["negative", "quantize", "quantize", "concat", "dequantize"]),
    "quantised after a rectifier": (lambda b, x: image(b, b.emit(op.nn.relu(x)), 0), ["quantize", "dequantize"]),
    "quantised after a rectifier that counts": (lambda b, x: image(b, b.emit(op.nn.relu(x)), 9),
                                                ["quantize", "maximum", "dequantize"]),
    "clipped at what integers stand for": (lambda b, x: confined(b, image(b, x, 90), 0.0, 45 * SCALE),
                                           ["quantize", "maximum", "minimum", "dequantize"]),
    "clipped beyond what integers stand for": (lambda b, x: confined(b, image(b, x, 0), 0.0, 7.7),
                                               ["quantize", "dequantize"]),
    "clipped between what integers stand for": (lambda b, x: confined(b, image(b, x), 0.0, 1.0),
                                                ["quantize", "maximum", "dequantize", "minimum"]),
    "quantised after clipping": (lambda b, x: image(b, confined(b, x, -1.0, 3.021), 60),
                                 ["quantize", "maximum", "minimum", "dequantize"]),
    "quantised after clipping to its own range": (lambda b, x: image(b, b.emit(op.clip(x, 0, 7.7)), 0),
                                                  ["quantize", "dequantize"]),
    "clipped between two": (lambda b, x: image(b, b.emit(op.clip(image(b, x), -0.5, 1.0)), 4),
                            ["quantize", "dequantize", "quantize", "minimum", "dequantize"]),
    "clipped for others too": (lambda b, x: clipped_for_two(b, x), ["minimum", "quantize", "dequantize", "add"]),
}


def confined(b: relax.BlockBuilder, x: relax.Expr, low: float, high: float) -> relax.Expr:
    """As the ONNX importer has ``Clip``; a bound may be on either side."""
    above = b.emit(op.maximum(x, relax.const(low, "float32")))
    return b.emit(op.minimum(relax.const(high, "float32"), above))


def clipped_for_two(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    six = b.emit(op.minimum(x, relax.const(1.02, "float32")))
    return b.emit(op.add(image(b, six), six))


@pytest.mark.parametrize("name", MOVED)
def test_quantising_moves_and_cancels_bit_for_bit(name: str) -> None:
    body, expected = MOVED[name]
    mod = network((2, 4, 6, 5), body)
    moved = MoveQuantisation(mod)
    assert operators(moved) == expected
    assert_same(mod, moved, numbers(2, 4, 6, 5))
    assert ExpandRequantisation(moved).same_as(moved), "only the results of products may be rounded otherwise"


@pytest.mark.parametrize("bounds", [(-0.125, 0.375), (-0.375, 0.625), (-0.625, 6.0), (-31.8, 40.0), (0.0, 70.0)])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_clipping_half_way_between_steps_is_rounded_as_the_model_says(
    dtype: str, channels: bool, bounds: tuple[float, float]
) -> None:
    """Bounds and numbers that are ties between two integers, to even, at either parity of the zero point."""
    zeros = np.array([3, 4, 99] if channels else 3, dtype)
    scales = np.full(zeros.shape, 0.25, "float32")

    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        other = confined(b, x, *bounds)
        return b.emit(op.quantize(other, relax.const(scales), relax.const(zeros), 1, dtype))

    mod = network((2, 3, 1024), body)
    moved = MoveQuantisation(mod)
    assert operators(moved)[0] == "quantize"
    x = np.broadcast_to(np.arange(-512, 512, dtype="float32") / 8, (2, 3, 1024)).copy()
    assert_same(mod, moved, x)
    wanted = np.rint(np.clip(x, *bounds) / 0.25) + zeros.reshape(-1, 1).astype("float32")
    limits = np.iinfo(dtype)
    np.testing.assert_array_equal(evaluate(moved, x)[0], np.clip(wanted, limits.min, limits.max))


def test_means_of_integers_that_lie_half_way_are_rounded_as_the_model_says() -> None:
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        made = b.emit(op.nn.conv2d(image(b, x), weights(b, (16, 4, 1, 1), 0)))
        step = dequantise(b, quantise(b, made, 0.11, 128), 0.11, 128)
        return quantise(b, b.emit(op.nn.avg_pool2d(step, (2, 2), (2, 2))), 0.11, 128)

    mod = network((2, 4, 12, 12), body)
    integers = passed(mod, MoveQuantisation, IntegerProducts())  # the same in arithmetic that nothing folds
    x = numbers(2, 4, 12, 12)
    (expected,) = evaluate(integers, x)
    for target in targets_here():
        (compiled,) = mlc.compile(mod, target)(x)
        assert expected.std() > 0 and (compiled == expected).mean() > 0.999


@pytest.mark.parametrize("zero", [-128, 0, 127])
def test_signed_activations_become_unsigned(zero: int) -> None:
    mod = network((2, 3, 4, 4), lambda b, x: image(b, x, zero, "int8"))
    unsigned = UnsignedActivations(mod)
    assert [dtype_of(b.value) for b in bindings(unsigned["main"])] == ["uint8", "float32"]
    assert_same(mod, unsigned, numbers(2, 3, 4, 4))


def test_signed_inputs_are_shifted() -> None:
    builder = relax.BlockBuilder()
    q = relax.Var("q", relax.TensorType((4, 256), "int8"))
    with builder.function("main", [q]):
        with builder.dataflow():
            result = builder.emit_output(dequantise(builder, q, 0.1, -7))
        builder.emit_func_output(result)
    mod = builder.finalize()
    every = np.tile(np.arange(-128, 128, dtype="int8"), (4, 1))
    assert_same(mod, passed(mod, UnsignedActivations, ExpandRequantisation), every)


def conv(shape: tuple[int, ...], zero: int, dtype: str = "int8", centre: int = 0, **options: Any) -> Body:
    return lambda b, x: b.emit(op.nn.conv2d(image(b, x, zero), weights(b, shape, 0, dtype, centre), **options))


PRODUCTS: dict[str, tuple[tuple[int, ...], Body]] = {
    "3x3": ((2, 8, 9, 7), conv((5, 8, 3, 3), 0, padding=1)),
    "padded by a zero point": ((2, 8, 9, 7), conv((5, 8, 3, 3), 117, padding=(1, 2, 0, 1), strides=2)),
    "groups": ((1, 8, 6, 6), conv((6, 4, 3, 3), 255, groups=2)),
    "depthwise": ((1, 8, 6, 6), conv((8, 1, 3, 3), 4, groups=8, padding=1)),
    "dilated": ((1, 4, 9, 9), conv((3, 4, 3, 3), 9, dilation=2)),
    "unsigned weights": ((1, 4, 5, 5), conv((3, 4, 1, 1), 9, "uint8", 128)),
    "matrix": ((2, 5, 12), lambda b, x: b.emit(op.matmul(image(b, x, 77), weights(b, (12, 7), 1)))),
    "activations": ((2, 5, 12), lambda b, x: b.emit(op.matmul(image(b, x, 77), b.emit(
        op.permute_dims(image(b, x, 140), [0, 2, 1]))))),
    "one matrix of activations": ((5, 12), lambda b, x: b.emit(op.matmul(image(b, x, 77), b.emit(
        op.permute_dims(image(b, x, 128)))))),
    "turned matrix": (
        (5, 12), lambda b, x: b.emit(op.matmul(image(b, x), b.emit(op.permute_dims(weights(b, (7, 12), 0)))))
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_quantised_operands_add_up_integers(name: str) -> None:
    shape, body = PRODUCTS[name]
    mod = network(shape, body)
    integers = passed(mod, MoveQuantisation, IntegerProducts())
    products = [b.value for b in bindings(integers["main"]) if op_name(b.value) in ("relax.nn.conv2d", "relax.matmul")]
    assert [[dtype_of(arg) for arg in p.args] for p in products] == [["uint8", "int8"]]
    assert dtype_of(products[0]) == "int32"
    x = numbers(*shape)
    (before,), (after,) = evaluate(mod, x), evaluate(integers, x)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())
    for target in targets_here():
        (compiled,) = mlc.compile(mod, target)(x)
        np.testing.assert_allclose(compiled, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


REFUSED: dict[str, tuple[tuple[int, ...], Body]] = {
    "weights that 8 bits around zero do not hold": ((1, 4, 5, 5), conv((3, 4, 1, 1), 9, "uint8", 3)),
    "a scale for each input channel": ((5, 12), lambda b, x: b.emit(op.matmul(image(b, x), weights(b, (12, 7), 0)))),
    "float weights": ((5, 12), lambda b, x: b.emit(op.matmul(image(b, x), weight(12, 7)))),
    "a float operand": ((5, 12), lambda b, x: b.emit(op.matmul(x, weights(b, (12, 7), 1)))),
    "activations with a float": ((5, 12), lambda b, x: b.emit(op.matmul(image(b, x), b.emit(op.permute_dims(x))))),
    "sums beyond int32": ((1, 66_000), lambda b, x: b.emit(op.matmul(image(b, x), weights(b, (66_000, 1), 1)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_products_stay(name: str) -> None:
    shape, body = REFUSED[name]
    mod = network(shape, body)
    assert IntegerProducts()(mod).same_as(mod)


def test_integers_are_taken_where_they_are_priced_faster() -> None:
    """Of bytes that a dot product adds up four at a time always; of 16-bit numbers, of which a dilated filter has no
    transform, not where floats have one."""
    def products(target: Target, options: CompileOptions, kernel: int, dilation: int = 1) -> list[str]:
        body = conv((256, 256, kernel, kernel), 0, padding=kernel // 2 * dilation, dilation=dilation)
        mod = network((1, 256, 28, 28), body)
        changed = passed(mod, MoveQuantisation, IntegerProducts(priced(target, options)))
        calls = [b.value for b in bindings(changed["main"]) if isinstance(b.value, relax.Call)]
        return [dtype_of(call) for call in calls if op_name(call) == "relax.nn.conv2d"]

    direct = CompileOptions.of(winograd=False)
    vnni = resolve("x86-64-v4 -mattr=+avx512vnni", threads=2)
    assert products(vnni, DEFAULT_OPTIONS, 1) == products(vnni, direct, 3) == products(V3, direct, 3) == ["int32"]
    assert products(vnni, DEFAULT_OPTIONS, 3) == ["int32"] and products(V3, DEFAULT_OPTIONS, 1) == ["int32"]
    assert products(V3, DEFAULT_OPTIONS, 3) == products(vnni, DEFAULT_OPTIONS, 3, 2) == ["int32"]
    assert products(V3, DEFAULT_OPTIONS, 3, 2) == ["float32"]


def test_layers_between_bytes_are_integers_where_one_unit_multiplies_them_too() -> None:
    """Zen 2 multiplies as many integers as floats; what is bytes at both ends has less to convert and to move."""
    def integers(cpu: str, shape: tuple[int, ...], body: Body) -> bool:
        target = resolve(f"llvm -mcpu={cpu}", threads=2)
        changed = passed(network(shape, body), MoveQuantisation, IntegerProducts(priced(target, DEFAULT_OPTIONS)))
        return "int32" in {dtype_of(b.value) for b in bindings(changed["main"])}

    def matrix(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return b.emit(op.matmul(image(b, x), weights(b, (768, 768), 1)))

    layers = {(1, 64, 56, 56): (256, 64, 1, 1), (1, 256, 14, 14): (256, 256, 3, 3), (1, 512, 7, 7): (512, 512, 3, 3),
              (1, 24, 56, 56): (144, 24, 1, 1), (1, 1024, 14, 14): (256, 1024, 1, 1)}
    for shape, filters in layers.items():
        for cpu in ("znver2", "znver3"):
            assert integers(cpu, shape, conv(filters, 0, padding=filters[2] // 2)), (cpu, shape)
    for cpu in ("znver1", "znver2", "znver3"):
        assert integers(cpu, (128, 768), matrix) and integers(cpu, (1, 768), matrix), cpu


def test_integers_may_be_forbidden() -> None:
    mod = network((2, 8, 9, 7), PRODUCTS["3x3"][1])
    lowered = lower(mod, NATIVE, options=CompileOptions.of(integers=False)).module
    calls = [b.value for b in bindings(lowered["main"]) if op_name(b.value) == "relax.call_tir"]
    assert calls and "int32" not in {dtype_of(call) for call in calls}
    assert not any("integer" in str(lowered[call.args[0]].script()) for call in calls)
    x = numbers(2, 8, 9, 7)
    (expected,), (found,) = evaluate(mod, x), mlc.compile(mod, NATIVE, integers=False)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_what_integer_products_give_is_quantised_within_one_step() -> None:
    body = PRODUCTS["3x3"][1]
    bias = relax.const(RNG.integers(-999, 999, 5).astype("int32"))

    def biased(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        shift = b.emit(op.reshape(dequantise(b, bias, 0.001, 0), (1, 5, 1, 1)))
        return quantise(b, b.emit(op.nn.relu(b.emit(op.add(body(b, x), shift)))), 0.07, 3)

    mod = network((2, 8, 9, 7), biased)
    integers = passed(mod, MoveQuantisation, IntegerProducts(), ExpandRequantisation)
    assert operators(integers).count("quantize") == 1, "that of the input, which is exact"
    x = numbers(2, 8, 9, 7)
    (before,), (after,) = evaluate(mod, x), evaluate(integers, x)
    assert before.std() > 0 and np.abs(before.astype(int) - after).max() <= 1


@pytest.mark.parametrize(("first", "second", "scale", "taken"), [
    ((0.031, 3), None, 0.0173, True), ((0.031, 3), (0.0177, 250), 0.0413, True), ((0.5, 128), (0.25, 0), 1.0, True),
    ((0.3, 7), (0.3, 0), 0.6, False), ((1e-30, 3), None, 1e-36, True), ((1e30, 3), None, 1e-30, False),
])
def test_quantising_of_few_values_multiplies_where_that_gives_the_same(
    first: tuple[float, int], second: tuple[float, int] | None, scale: float, taken: bool
) -> None:
    """All 65536 pairs. Of the fourth, halves between two steps are rounded the other way."""
    def body(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        one, *other = (
            dequantise(b, b.emit(op.astype(b.emit(op.strided_slice(x, [0], [place], [place + 1])), "uint8")), *affine)
            for place, affine in enumerate((first, second)) if affine is not None
        )
        return quantise(b, b.emit(op.add(one, *other)) if other else one, scale, 11)

    mod = network((2, 256, 256), body)
    changed = Rescale(mod)
    assert ("quantize" not in operators(changed)) == taken
    x = np.stack(np.meshgrid(np.arange(256.0), np.arange(256.0))).astype("float32")
    assert_same(mod, changed, x)


def test_sums_of_dequantised_tensors_read_integers() -> None:
    """Both products of a residual block write bytes, in two kernels and with no other."""
    def block(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        start = image(b, x, 0)
        sides = []
        for zero in (5, 12):
            made = b.emit(op.nn.conv2d(start, weights(b, (16, 16, 1, 1), 0)))
            sides.append(dequantise(b, quantise(b, made, 0.2, zero), 0.2, zero))
        return quantise(b, b.emit(op.nn.relu(b.emit(op.add(*sides)))), 0.1, 0)

    mod = network((1, 16, 14, 14), block)
    lowered = lower(mod, V3)
    calls = [b.value for b in bindings(lowered.module["main"]) if op_name(b.value) == "relax.call_tir"]
    images = [call for call in calls if len(shape_of(call)) == 5 and shape_of(call)[1] == 1]
    assert {dtype_of(call) for call in images} == {"uint8"}
    assert sum("conv2d" in call.args[0].name_hint for call in calls) == 2
    x = numbers(1, 16, 14, 14)
    (expected,) = evaluate(mod, x)
    for target in targets_here():
        (compiled,) = mlc.compile(mod, target)(x)
        # each side may be rounded to the next of its steps, which are two of the sum's
        off = np.abs(compiled.astype(int) - expected)
        assert expected.std() > 0 and off.max() <= 2 and (off > 1).mean() < 1e-2
