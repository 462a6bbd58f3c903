"""onnxruntime's products of packed weights: in blocks, in tables, and in the order of activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from microsoft_nodes import Case, model_of_node, numbers_of, wide
from onnx import helper
from quantised_nodes import MICROSOFT, model_of, operators
from tvm import relax

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model
from mlc.frontend.accuracy import level_of
from mlc.frontend.onnx_quantised import unpacked
from mlc.graph.ir.rewrite import bindings, op_name


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Along the last axis, as many numbers as a byte holds, the first in the lowest bits."""
    each = 8 // bits
    whole = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    return sum(whole[..., place::each] << bits * place for place in range(each)).astype("uint8")


def _blocks_case(bits: int, block: int, length: int, zeros: str) -> Case:
    rng, rows, count = np.random.default_rng(3), 6, -(-length // block)
    numbers = rng.integers(0, 1 << bits, (rows, count, block)).astype("uint8")
    scale = (rng.uniform(0.01, 0.1, (rows, count)) * rng.choice([-1, 1], (rows, count))).astype("float32")
    offsets = rng.integers(0, 1 << bits, (rows, count)).astype("uint8")
    constants = {"b": _packed(numbers, bits), "s": scale.ravel(), "bias": rng.standard_normal(rows).astype("float32")}
    points = np.full((rows, count), 1 << (bits - 1), "float64")
    if zeros == "packed":
        constants["z"], points = _packed(offsets, bits).ravel(), wide(offsets)
    elif zeros == "float":
        constants["z"] = rng.uniform(0, (1 << bits) - 1, (rows, count)).astype("float32")
        points = wide(constants["z"])
    x = rng.standard_normal((2, 3, length)).astype("float32")
    weights = ((wide(numbers) - points[..., None]) * scale[..., None]).reshape(rows, -1)[:, :length]
    return Case("MatMulNBits", f"x b s {'z' if zeros else '-'} - bias", {"x": x}, constants, ("float32", 3),
                lambda: wide(x) @ weights.T + constants["bias"],
                {"bits": bits, "block_size": block, "K": length, "N": rows}, here=(bits, zeros) != (8, "float"))


@pytest.mark.parametrize("zeros", ["", "packed", "float"])
@pytest.mark.parametrize(("block", "length"), [(16, 64), (32, 96), (32, 40)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_in_blocks(bits: int, block: int, length: int, zeros: str) -> None:
    case = _blocks_case(bits, block, length, zeros)
    np.testing.assert_allclose(numbers_of(case), case.wanted(), rtol=1e-5, atol=1e-5)


def test_weights_in_blocks_stay_integers() -> None:
    """Signed about the middle, so that symmetric weights have no zero point; no float32 copy of them is made."""
    case = _blocks_case(4, 32, 64, "")
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain=MICROSOFT, **case.attributes)
    constants = {name: case.constants[name] for name in "bs"}
    model = model_of([node], case.feeds, constants, {"y": ("float32", 3)}, opset=17)
    assert operators(model) == ["relax.reshape", "relax.astype", "relax.multiply", "relax.reshape",
                                "relax.permute_dims", "relax.matmul"]
    weights = load_model(model).mod["main"].body.blocks[0].bindings[0].value.args[0]
    assert str(weights.ty.dtype) == "int8" and weights.value.numpy().min() == -8 and weights.value.numpy().max() == 7


#: the numbers of bitsandbytes' two tables, in steps of 1/192 and as the paper on NF4 lists them
_CODES = (np.array([0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48]) / 192, np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]))


def _bnb4_case(kind: int, rows: int, columns: int, turned: int, dtype: Any = np.float32) -> Case:
    rng, block, size = np.random.default_rng(18), 16, rows * columns
    codes = rng.permutation(np.resize(np.arange(16), size)).astype("uint8")
    largest = rng.uniform(0.5, 2, -(-size // block)).astype(dtype)
    even = np.append(codes, np.zeros(size % 2, "uint8"))
    weights = (_CODES[kind][codes] * np.repeat(wide(largest), block)[:size]).reshape(rows, columns)
    x = rng.standard_normal((2, 3, columns if turned else rows)).astype(dtype)
    constants = {"b": even[::2] << 4 | even[1::2], "m": largest}
    return Case("MatMulBnb4", "x b m", {"x": x}, constants, (np.dtype(dtype).name, 3),
                lambda: wide(x) @ (weights.T if turned else weights),
                {"N": rows, "K": columns, "block_size": block, "quant_type": kind, "transB": turned},
                here=bool(turned) and dtype == np.float32)  # its kernel takes K for N where nothing is turned


@pytest.mark.parametrize(("rows", "columns", "turned"), [(6, 32, 1), (7, 40, 1), (3, 5, 1), (6, 40, 0)])
@pytest.mark.parametrize("kind", [0, 1], ids=["fp4", "nf4"])
def test_weights_in_tables(kind: int, rows: int, columns: int, turned: int) -> None:
    """Blocks go on from row to row, and the last may be short."""
    case = _bnb4_case(kind, rows, columns, turned)
    np.testing.assert_allclose(numbers_of(case), case.wanted(), rtol=1e-5, atol=1e-5)
    case = _bnb4_case(kind, rows, columns, turned, np.float16)
    np.testing.assert_allclose(numbers_of(case), case.wanted(), rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize(("changed", "message"), [
    ({"b": np.zeros(15, "uint8")}, r"B must be uint8 of \[96\] for 6 rows of 32 numbers, got uint8 of \[15\]"),
    ({"m": np.ones(11, "float32")}, r"absmax must be of \[12\], one for each block, got \[11\]; quantise"),
    ({"m": np.full(12, np.inf, "float32")}, "absmax must be finite, got inf; quantise the weights again"),
    ({"N": -6, "K": -32}, "N and K must be at least 1, got -6 and -32; quantise the weights again"),
    ({"quant_type": 2}, "quant_type must be 0 or 1, got 2; quantise the weights again"),
    ({"block_size": 24}, "block_size must be a power of two of at least 16, got 24; quantise it again"),
    ({"block_size": None}, "its inputs and attributes must be those of the operator .*; export the model again"),
])
def test_tables_that_do_not_fit(changed: Mapping[str, Any], message: str) -> None:
    case = _bnb4_case(1, 6, 32, 1)
    constants = {name: changed.get(name, array) for name, array in case.constants.items()}
    attributes = {name: changed.get(name, value) for name, value in case.attributes.items()}
    given = {name: value for name, value in attributes.items() if value is not None}
    node = helper.make_node("MatMulBnb4", ["x", "b", "m"], ["y"], name="lin", domain=MICROSOFT, **given)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model_of([node], case.feeds, constants, {"y": ("float32", 3)}, opset=17))
    assert "\n" not in str(caught.value) and "lin" in str(caught.value)


def _blocks_model(changed: Mapping[str, Any], depth: int = 64) -> Any:
    case = _blocks_case(4, 32, depth, "packed")
    constants = {**case.constants, **{k: v for k, v in changed.items() if isinstance(v, np.ndarray)}}
    attributes = {**case.attributes, **{k: v for k, v in changed.items() if isinstance(v, int)}}
    inputs = ["x", "b", "s", "z", *(["g"] if "g" in constants else [])]
    node = helper.make_node("MatMulNBits", inputs, ["y"], name="lin", domain=MICROSOFT, **attributes)
    return model_of([node], case.feeds, {name: constants[name] for name in inputs[1:]}, {"y": ("float32", 3)}, opset=17)


@pytest.mark.parametrize(("changed", "message"), [
    ({"b": np.zeros((6, 2, 15), "uint8")}, r"B must be uint8 of \[6, 2, 16\].*got uint8 of \[6, 2, 15\]"),
    ({"s": np.ones(11, "float32")}, r"one scale for each of \[6, 2\] blocks, got \[11\]"),
    ({"z": np.zeros(7, "uint8")}, r"zero_points must be of \[6, 1\] bytes.*got \[7\]"),
    ({"z": np.zeros((6, 3), "float32")}, r"zero_points must be of \[6, 2\], one for each block, got \[6, 3\]"),
    ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
    ({"block_size": 24}, "block_size must be a power of two of at least 16, got 24"),
    ({"s": np.full(12, np.inf, "float32")}, "its scale must be finite, got inf"),
    ({"z": np.full((6, 2), np.nan, "float32")}, "zero_points must be finite"),
    ({"N": -6}, "N and K must be at least 1, got -6 and 64"),
    ({"K": 0}, "N and K must be at least 1, got 6 and 0"),
    ({"z": np.zeros((6, 2), "int8")}, "zero_points must be uint8 or floating-point numbers, got int8"),
    ({"g": np.arange(64, dtype="int32") // 16}, "g_idx must hold numbers of the 2 blocks, got 2"),
    ({"g": np.full(64, -1, "int32")}, "g_idx must hold numbers of the 2 blocks, got -1"),
    ({"g": np.zeros(3, "int32")}, r"g_idx must be of \[64\], one block's number for each column, got \[3\]"),
])
def test_weights_that_do_not_fit(changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(_blocks_model(changed))
    assert "\n" not in str(caught.value) and "lin" in str(caught.value)


@pytest.mark.parametrize(("depth", "listed"), [(64, 64), (40, 40), (40, 64)])
def test_an_order_that_is_that_of_the_blocks(depth: int, listed: int) -> None:
    """It may go on to the end of the last block."""
    load_model(_blocks_model({"g": np.arange(listed, dtype="int32") // 32}, depth))


def _ordered_case(bits: int, zeros: str, order: str, length: int, dtype: Any = np.float32) -> Case:
    """Numbers whose blocks' scales lie in another order, as those do that GPTQ quantises by their activations."""
    rng, block, rows = np.random.default_rng(11), 32, 6
    case, count = _blocks_case(bits, block, length, zeros), -(-length // 32)
    owners = {"blocks": np.arange(length)[::-1] // block, "activations": rng.permutation(np.arange(length) // block),
              "halves": rng.permutation(np.repeat([0, 1, 1, 1], length // 4)),
              "any": rng.integers(0, count, length)}[order]
    numbers = wide(unpacked(case.constants["b"].reshape(rows, count, -1), bits).reshape(rows, -1)[:, :length])
    points: Any = 1 << (bits - 1)
    if zeros:
        points = case.constants["z"]
        if zeros == "packed":
            points = unpacked(points.reshape(rows, -1), bits)[:, :count]
        points = wide(points)[:, owners]
    scales = case.constants["s"].reshape(rows, count).astype(dtype)
    weights = (numbers - points) * wide(scales)[:, owners]
    constants = {**case.constants, "s": scales.ravel(), "g": owners.astype("int32"),
                 "bias": case.constants["bias"].astype(dtype)}
    x = case.feeds["x"].astype(dtype)
    return Case("MatMulNBits", f"x b s {'z' if zeros else '-'} g bias", {"x": x}, constants,
                (np.dtype(dtype).name, 3), lambda: wide(x) @ weights.T + constants["bias"], case.attributes,
                here=bits == 4 and zeros != "packed")  # else onnxruntime fails, or passes over the zero points


@pytest.mark.parametrize(("bits", "zeros", "order", "length"), [
    (4, "packed", "activations", 128), (4, "", "blocks", 96), (2, "packed", "halves", 128), (8, "", "activations", 64),
    (4, "packed", "any", 96), (4, "float", "activations", 96), (4, "packed", "activations", 104),
])
def test_weights_in_the_order_of_activations(bits: int, zeros: str, order: str, length: int) -> None:
    case = _ordered_case(bits, zeros, order, length)
    np.testing.assert_allclose(numbers_of(case), case.wanted(), rtol=1e-5, atol=1e-5)
    exe = mlc.compile(model_of_node(case), log=False)
    np.testing.assert_allclose(exe(**case.feeds)[0], case.wanted(), rtol=1e-5, atol=1e-5)
    few = [entry for entry in exe.metadata["weights"] if entry["dtype"] in ("uint32", "uint8")]
    assert bool(few) is (order != "any"), "they stay integers where enough of them have a scale"


@pytest.mark.parametrize("level", [0, 1, 4])
def test_the_accuracy_that_is_asked_for_goes_with_the_product(level: int) -> None:
    found = load_model(_blocks_model({"accuracy_level": level})).mod["main"]
    (product,) = [b.var.name for b in bindings(found)
                  if isinstance(b.value, relax.Call) and op_name(b.value) == "relax.matmul"]
    assert level_of(product, found.attrs) == level and level_of("lv1", found.attrs) == 0
