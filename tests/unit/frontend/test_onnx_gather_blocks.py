"""``GatherBlockQuantized`` as onnxruntime computes it and as its definition does in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper
from quantised_nodes import MICROSOFT, imported_numbers, model_of, onnxruntime_numbers, operators

import mlc
from mlc.errors import ModelError
from mlc.frontend import load_model


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Several numbers a byte along the last axis, the first in the lowest bits."""
    each = 8 // bits
    filled = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    parts = [filled[..., place::each].astype("uint8") << bits * place for place in range(each)]
    return np.bitwise_or.reduce(parts)


def _model(
    indices: np.ndarray, constants: dict[str, np.ndarray], **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """``i`` comes when the model runs."""
    inputs = ["d", "i", "s", *(["z"] if "z" in constants else [])]
    node = helper.make_node("GatherBlockQuantized", inputs, ["y"], name="table", domain=MICROSOFT, **attributes)
    rank = constants["s"].ndim - 1 + indices.ndim
    feeds = {"i": indices}
    return model_of([node], feeds, constants, {"y": (constants["s"].dtype.name, rank)}, opset=21), feeds


def _table(
    kind: str, bits: int, shape: tuple[int, ...], along: int, block: int, zeros: bool, scale: Any = np.float32
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The constants, and the table in float64."""
    rng = np.random.default_rng(0)
    low, high = (-8, 7) if kind == "int4" else (0, (1 << bits) - 1)
    counts = tuple(-(-extent // block) if each == along else extent for each, extent in enumerate(shape))
    numbers, points = (rng.integers(low, high, each, endpoint=True) for each in (shape, counts))
    steps = (rng.uniform(0.1, 1, counts) * rng.choice([-1, 1], counts)).astype(scale)
    if not zeros:
        points = np.full(counts, 1 << (bits - 1) if kind == "uint8" else 0)

    def stored(array: np.ndarray) -> np.ndarray:
        return _packed(array, bits) if kind == "uint8" else array.astype(getattr(ml_dtypes, kind))

    every = [np.repeat(each.astype("float64"), block, along).take(range(shape[along]), along)
             for each in (points, steps)]
    constants = {"d": stored(numbers), "s": steps, **({"z": stored(points)} if zeros else {})}
    return constants, (numbers - every[0]) * every[1]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("kind", "bits", "shape", "axis", "along"), [
    ("uint8", 8, (9, 48), 0, 1), ("uint8", 4, (9, 48), 0, 1), ("uint8", 2, (9, 48), 0, 1),
    ("uint8", 4, (9, 3, 40), 0, 2), ("int4", 4, (9, 48), 0, 1), ("uint4", 4, (9, 40), 0, -1),
    ("int4", 4, (40, 9), 1, 0), ("uint4", 4, (9, 40, 7), 0, 1), ("int4", 4, (5, 36, 9), 2, 1),
    ("uint4", 4, (5, 9, 36), 1, 2), ("int4", 4, (40, 7), 0, 0), ("uint4", 4, (3, 40), 1, 1),
])
def test_rows_of_integers(kind: str, bits: int, shape: tuple[int, ...], axis: int, along: int, zeros: bool) -> None:
    """Of indices from the end and beyond both ends, which give zeros; the last block may be short."""
    rows = shape[axis]
    indices = np.array([[0, rows - 1, -1, 2], [-rows, rows, -rows - 1, 3]], "int64")
    constants, table = _table(kind, bits, shape, along % len(shape), 16, zeros)
    model, feeds = _model(indices, constants, bits=bits, block_size=16, gather_axis=axis, quantize_axis=along)
    (found,) = imported_numbers(model, feeds)
    inside = ((indices >= -rows) & (indices < rows)).reshape(*indices.shape, *[1] * (len(shape) - 1 - axis))
    wanted = np.where(inside, np.take(table, indices, axis, mode="wrap"), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, onnxruntime_numbers(model, feeds)[0], rtol=1e-6)
    assert len(np.unique(found)) > 10


@pytest.mark.parametrize("scale", [np.float16, ml_dtypes.bfloat16])
def test_scales_of_16_bits(scale: Any) -> None:
    """Of one index, which has no axis, in the type of the scales."""
    indices = np.array(5, "int32")
    constants, table = _table("uint8", 4, (9, 48), 1, 16, True, scale)
    model, feeds = _model(indices, constants, block_size=16)
    (found,) = imported_numbers(model, feeds)
    assert found.shape == (48,) and found.dtype == scale
    np.testing.assert_array_equal(found, table[5].astype(scale))


def test_constant_indices_of_the_table_need_no_check() -> None:
    constants, table = _table("uint4", 4, (9, 48), 1, 16, True)
    constants["i"] = np.array([3, -2])
    node = helper.make_node("GatherBlockQuantized", ["d", "i", "s", "z"], ["t"], domain=MICROSOFT, block_size=16)
    x = np.random.default_rng(1).standard_normal((2, 48)).astype("float32")
    model = model_of([node, helper.make_node("Mul", ["x", "t"], ["y"])], {"x": x}, constants, {"y": ("float32", 2)})
    assert "relax.where" not in operators(model)
    np.testing.assert_allclose(imported_numbers(model, {"x": x})[0], x * table[[3, -2]], rtol=1e-6)


def test_a_compiled_table_takes_its_bits() -> None:
    """With a free number of tokens, as a decoder's embedding."""
    constants, table = _table("uint8", 4, (500, 128), 1, 32, True)
    model, _ = _model(np.zeros((2, 3), "int64"), constants, block_size=32)
    for axis, name in enumerate(("batch", "tokens")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    exe = mlc.compile(model, log=False, shapes={"i": ((1, 4), (1, 64))})
    for shape in ((1, 1), (2, 5), (4, 64)):
        indices = np.random.default_rng(2).integers(0, 500, shape)
        np.testing.assert_allclose(exe(indices)[0], table[indices], rtol=1e-6)
    taken = sum(int(np.prod(each["shape"])) * np.dtype(each["dtype"]).itemsize for each in exe.metadata["weights"])
    assert taken < 500 * 128 // 2 + 500 * 128 // 32 * 5 + 100


@pytest.mark.parametrize(("changed", "message"), [
    ({"bits": 3}, "bits must be 2, 4 or 8 for data of uint8, got 3; quantise the table again"),
    ({"block_size": 24}, "block_size must be a power of two of at least 16, got 24; quantise"),
    ({"gather_axis": 2}, "gather_axis must be from -2 to 1, got 2; write the model again"),
    ({"gather_axis": 1, "quantize_axis": 0}, "gather_axis must be 0 and quantize_axis the last, 1, .* got 1 and 0"),
    ({"s": np.ones((9, 2), "float32")}, r"scales must be of \[9, 3\], one for each block, got \[9, 2\]; quantise"),
    ({"s": np.full((9, 3), np.nan, "float32")}, "its scales must be finite, got nan; quantise the table again"),
    ({"z": np.zeros((9, 3), "uint8")}, r"zero_points must be uint8 of \[9, 2\], got uint8 of \[9, 3\]; quantise"),
    ({"d": np.zeros((9, 24), "int8")}, "its data must be int4, uint4 or uint8, got int8; quantise the table again"),
    ({"d": np.zeros((9, 48), ml_dtypes.int4)}, r"zero_points must be int4 of \[9, 3\], got uint8 of \[9, 2\]"),
    ({"d": np.zeros((9, 48), ml_dtypes.int4), "bits": 8}, "bits must be 4 for data of int4, got 8; quantise the table"),
])
def test_tables_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    constants, _ = _table("uint8", 4, (9, 48), 1, 16, True)
    constants |= {name: value for name, value in changed.items() if name in constants}
    attributes = {"block_size": 16} | {name: value for name, value in changed.items() if name not in constants}
    with pytest.raises(ModelError, match=message) as caught:
        load_model(_model(np.zeros((2, 3), "int64"), constants, **attributes)[0])
    assert "\n" not in str(caught.value) and "table" in str(caught.value)
