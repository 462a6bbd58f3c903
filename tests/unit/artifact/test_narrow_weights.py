"""Weights in 16 bits: which may be, and that they come back to the bit."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mlc.artifact import artifact
from mlc.artifact.compact_weights import buffers, narrowed, stored_type, widened
from mlc.artifact.runtime import ALIGNMENT
from tests.unit.artifact.test_artifact import _elf

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _all_numbers(kind: str) -> np.ndarray:
    """Every 16-bit float that converting to float32 and back leaves alone: all but signalling NaNs."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(TYPES[kind])
    quiet = 1 << (9 if kind == "float16" else 6)
    with np.errstate(invalid="ignore"):
        return values[~np.isnan(values) | (bits & quiet != 0)].astype(np.float32)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


@pytest.mark.parametrize("kind", TYPES)
def test_every_16_bit_number_comes_back_to_the_bit(kind: str) -> None:
    data = _bytes(_all_numbers(kind))
    assert stored_type("float32", data) == kind
    stored = narrowed(data, kind)
    assert 2 * stored.size == data.size
    np.testing.assert_array_equal(widened(stored, kind, np.empty_like(data)), data)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("bits", [1, 1 << 12, 0x477FF000, 0x33000001, 0x7F800001])
def test_one_other_number_keeps_all_float32(kind: str, bits: int) -> None:
    """The last of many numbers: one that needs more digits, overflows float16, is too small for it, or is a NaN."""
    values = np.repeat(_all_numbers(kind), 2)
    values.view(np.uint32)[-1] = bits
    assert stored_type("float32", _bytes(values)) == "float32"


def test_other_types_and_few_numbers_stay() -> None:
    ones = np.ones(4096, np.float32)
    assert stored_type("int32", _bytes(ones)) == "int32"
    assert stored_type("float32", _bytes(ones[:1000])) == "float32"
    assert stored_type("float32", _bytes(ones[:0])) == "float32"
    assert stored_type("float32", _bytes(ones)) == "bfloat16"


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_holds_half_the_bytes(tmp_path: Path, verify: bool) -> None:
    rng = np.random.default_rng(3)
    full = rng.standard_normal((64, 300), dtype=np.float32)
    arrays = [full.astype(np.float16).astype(np.float32), full, full.astype(ml_dtypes.bfloat16).astype(np.float32)]
    table = [{"shape": list(a.shape), "dtype": "float32"} for a in arrays]
    artifact.write(tmp_path / "m.so", _elf(300), {"weights": table}, arrays)
    found = artifact.read(tmp_path / "m.so", verify)
    assert [entry["stored"] for entry in found.metadata["weights"]] == ["float16", "float32", "bfloat16"]
    assert [entry["bytes"] for entry in found.metadata["weights"]] == [38400, 76800, 38400]
    for data, array in zip(found.weights, arrays, strict=True):
        assert data.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(data.view(np.float32).reshape(array.shape), array)


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_widened_lies_in_one_piece(tmp_path: Path, verify: bool) -> None:
    """For systems back large pieces of memory alone with large pages. One weight ends between multiples of 64 bytes."""
    rng = np.random.default_rng(4)
    narrow = [rng.standard_normal(shape).astype(kind).astype(np.float32)
              for shape, kind in (((64, 300), np.float16), ((1025,), ml_dtypes.bfloat16), ((64, 64), np.float16))]
    arrays = [*narrow[:1], rng.standard_normal((32, 64), dtype=np.float32), *narrow[1:]]
    artifact.write(tmp_path / "m.so", _elf(300),
                   {"weights": [{"shape": list(a.shape), "dtype": "float32"} for a in arrays]}, arrays)
    found = artifact.read(tmp_path / "m.so", verify).weights
    for data, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(data.view(np.float32).reshape(array.shape), array)
    first, _, second, third = (data.ctypes.data for data in found)
    assert (second - first, third - second) == (narrow[0].nbytes, 4096 + ALIGNMENT)


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 64, 65, 4), (200, 64)])
def test_rooms_are_aligned_and_apart(sizes: tuple[int, ...]) -> None:
    made = buffers(sizes)
    assert [each.nbytes for each in made] == list(sizes)
    assert all(each.ctypes.data % ALIGNMENT == 0 for each in made if each.size)
    for number, each in enumerate(made):
        each[:] = number
    assert [set(each.tolist()) for each in made] == [{n} if size else set() for n, size in enumerate(sizes)]
