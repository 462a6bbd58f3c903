"""What metadata must say, whatever its checksum says of it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from mlc.artifact import compile_module, metadata
from mlc.target import resolve
from mlc.testing.programs import dense


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return compile_module(dense().mod, resolve("native", threads=1)).metadata


def test_what_the_compiler_writes_is_taken(model: dict[str, Any]) -> None:
    metadata.check_model(metadata.parsed(metadata.encoded(model)))


@pytest.mark.parametrize(("path", "value", "words"), [
    (("name",), None, "name must be text"),
    (("target",), "llvm\nlines", "target must be printable text in one line"),
    (("inputs",), {}, "inputs must be a list"),
    (("inputs", 0), [], r"inputs\[0\] must be an object"),
    (("inputs", 0, "name"), "\ud800", r"inputs\[0\].name must be text"),
    (("inputs", 0, "shape"), [5, True], r"inputs\[0\].shape\[1\] must be a whole number"),
    (("inputs", 0, "shape"), [5, -24], r"inputs\[0\].shape\[1\] must be a whole number"),
    (("inputs", 0, "shape"), [1 << 30, 1 << 30], r"inputs\[0\].shape must be at most 64 sizes"),
    (("inputs", 0, "shape"), [1] * 65, r"inputs\[0\].shape must be at most 64 sizes"),
    (("inputs", 0, "dtype"), "object", r"inputs\[0\].dtype must be one of bfloat16, bool, float16"),
    (("outputs", 0, "aliased"), 1, r"outputs\[0\].aliased must be true or false"),
    (("threads",), 0, "threads must be a whole number from 1"),
    (("threads",), 1.0, "threads must be a whole number from 1"),
    (("kind",), "opencl", "kind must be one of cuda, llvm"),
    (("kind",), "cuda", "target_attrs must be of cuda"),
    (("target_attrs",), "[" * 100_000, "target_attrs must be of llvm"),
    (("features",), ["avx2", None], r"features\[1\] must be printable text"),
    (("versions",), {"mlc": "1"}, "versions must be an object with tvm"),
    (("functions", 0, "flops"), float("inf"), r"functions\[0\].flops must be a finite number"),
    (("functions", 0, "decisions"), [], r"functions\[0\].decisions must be an object"),
])
def test_what_makes_no_sense_is_named(model: dict[str, Any], path: tuple[Any, ...], value: Any, words: str) -> None:
    changed = deepcopy(model)
    container: Any = changed
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    with pytest.raises(ValueError, match=words) as caught:
        metadata.check_model(changed)
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()


def test_no_field_may_be_missing(model: dict[str, Any]) -> None:
    for name in set(model) - {"weights", "alignment"}:  # inputs of former versions' code are aligned as all else is
        with pytest.raises(ValueError, match=f"it must be an object with {name}"):
            metadata.check_model({key: value for key, value in model.items() if key != name})


@pytest.mark.parametrize("value", [0, 8, 16.0, True, None, "16", 1 << 70])
def test_inputs_begin_where_code_can_read_them(model: dict[str, Any], value: object) -> None:
    for fine in (16, 64):
        metadata.check_model({**model, "alignment": fine})
    with pytest.raises(ValueError, match="alignment must be 16 or 64, got"):
        metadata.check_model({**model, "alignment": value})


def test_names_are_distinct(model: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="names of inputs must be distinct, got 'x'"):
        metadata.check_model({**model, "inputs": model["inputs"] * 2})


@pytest.mark.parametrize("text", [
    b"", b"[1]", b"{", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 1}}', b"\xff{}",
    b"[" * 1_000_000, b"[" * 100_000, b"[" + b"[]," * 2_000_000 + b"[]]", b'{"a": ' + b"9" * 5000 + b"}",
])
def test_other_texts(text: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        metadata.parsed(text)
    assert str(caught.value) and "\n" not in str(caught.value)


def test_metadata_may_not_be_endless() -> None:
    with pytest.raises(ValueError, match="its text must be at most"):
        metadata.encoded({"a": " " * metadata.MOST_BYTES})
    with pytest.raises(ValueError, match="not JSON compliant"):
        metadata.encoded({"a": float("nan")})


def _weight(offset: int, size: int, shape: list[int], dtype: str = "float32", stored: str = "") -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "stored": stored or dtype, "offset": offset, "bytes": size}


def test_weights_lie_one_after_the_other() -> None:
    table = [_weight(0, 24, [2, 3]), _weight(64, 0, [0, 9]), _weight(64, 5, [5], "bool"),
             _weight(128, 6, [3], "bfloat16"), _weight(192, 3, [3], "float8_e4m3fn"), _weight(256, 8, [], "int64"),
             _weight(320, 10, [5], stored="bfloat16"), _weight(384, 12, [6], stored="float16")]
    assert metadata.payload_bytes(table) == 396 and metadata.payload_bytes([]) == 0


@pytest.mark.parametrize(("second", "words"), [
    (_weight(0, 4, [1]), r"weights\[1\].offset must be 64, got 0"),  # over the first one
    (_weight(128, 4, [1]), r"weights\[1\].offset must be 64, got 128"),  # behind a gap
    (_weight(64, 8, [1]), r"weights\[1\].bytes must be 4, got 8"),
    (_weight(64, 4, [1], "float64"), r"weights\[1\].bytes must be 8, got 4"),
    (_weight(64, 4, [1], stored="float16"), r"weights\[1\].bytes must be 2, got 4"),
    (_weight(64, 4, [2], stored="int16"), r"weights\[1\].stored must be one of float32, bfloat16, float16"),
    (_weight(64, 4, [2], "int32", "float16"), r"weights\[1\].stored must be one of int32, got 'float16'"),
    (_weight(64, 4, [1], "handle"), r"weights\[1\].dtype must be a type"),
    (_weight(64, 1 << 62, [1 << 60]), r"weights\[1\].shape\[0\] must be a whole number"),
    ({"shape": [1], "dtype": "float32"}, r"weights\[1\] must be an object with offset"),
])
def test_there_is_one_place_for_a_weight(second: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        metadata.payload_bytes([_weight(0, 24, [2, 3]), second])


def test_every_chunk_has_its_checksum() -> None:
    sums: dict[str, list[int]] = {"code": [1], "weights": []}
    assert metadata.checked_sums(sums, {"code": 1, "weights": 0}) == sums
    for value in (None, {"code": [1]}, {"code": [1, 2], "weights": []}, {"code": [1 << 64], "weights": []},
                  {"code": ["1"], "weights": []}):
        with pytest.raises(ValueError, match="checksums"):
            metadata.checked_sums(value, {"code": 1, "weights": 0})
