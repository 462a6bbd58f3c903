"""Compiled models whose files were damaged or crafted: how, and what the bytes then are.

A crafted file has checksums that fit what it says; its code is never another one, since that would simply be another
program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from mlc.artifact import artifact, checksum

__all__ = ["CONTENTS", "Written", "parts", "some_range", "whole"]

_PAGE = 4096
#: what a value of the metadata is replaced by
_HOSTILE = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, "", "x", "\n\n", "\ud800", "é" * 5000, [], {}, [[]],
    [-1], [2**40, 2**40], [0], [1, "a"], {"a": []}, "float32", "int64", "float64", "cuda", "llvm", "/dev/null",
)


@cache
def whole() -> bytes:
    """An artifact of several megabytes with weights of several sizes and types, of which the loader transforms filters,
    compiled in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.so")
        subprocess.run([sys.executable, "-c", _COMPILE, path], check=True, capture_output=True)
        return path.read_bytes()


_COMPILE = """
import sys
import numpy as np
from tvm import relax, topi
from mlc.artifact import compile_module
from mlc.artifact.compile import ModelMeta
from mlc.frontend.model import imported
from mlc.graph.algorithms.filters import Filters, transform_weight
from mlc.graph.ir.constants import tensor_of
from mlc.target import resolve
from mlc.testing.programs import program

rng = np.random.default_rng(0)
def weight(*shape):
    return relax.const(rng.standard_normal(shape, dtype=np.float32))

filters = rng.standard_normal((32, 16, 3, 3)).astype(np.float16).astype(np.float32)
transformed = relax.const(transform_weight(filters, 2))

def body(builder, params):
    first, last = weight(64, 64), weight(64, 16384)
    hidden = builder.emit_te(topi.matmul, params[0], first)
    hidden = builder.emit_te(topi.matmul, hidden, weight(64, 64))
    hidden = builder.emit_te(topi.add, hidden, weight(64))
    points = builder.emit_te(topi.sum, transformed, axis=0)
    return [builder.emit_te(topi.matmul, hidden, last), last, builder.emit_te(topi.nn.relu, params[1]), points]

mod = program({"x": ((3, 64), "float32"), "y": ((3, 64), "float32")}, body)
model = imported(mod, "module")
meta = ModelMeta(model.name, model.inputs, model.outputs,
                 filters={int(tensor_of(transformed).data_ptr()): Filters(filters, "winograd_2x2")})
compile_module(mod, resolve("native", threads=1), meta=meta).save(sys.argv[1])
"""


@cache
def parts() -> dict[str, tuple[int, int]]:
    """Where each part of the whole artifact begins and ends."""
    with Written(whole()) as path:
        found = artifact.read(path)
    header_at = -(-len(found.code) // _PAGE) * _PAGE
    text_at = header_at + artifact._HEADER.size + artifact._CHECKSUM.size
    text_bytes = artifact._HEADER.unpack_from(whole(), header_at)[2]
    return {
        "code": (0, len(found.code)), "padding": (len(found.code), header_at), "header": (header_at, text_at),
        "metadata": (text_at, text_at + text_bytes), "gap": (text_at + text_bytes, found.weights_at),
        "weights": (found.weights_at, len(whole())),
    }


class Written:
    """A file that holds ``data``, for as long as the block runs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "model.so")
        path.write_bytes(self._data)
        return path

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _flip(part: str) -> Callable[[Random], bytes]:
    def damaged(rng: Random) -> bytes:
        data, (start, end) = bytearray(whole()), parts()[part]
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        return bytes(data)

    return damaged


def some_range(rng: Random) -> tuple[int, int]:
    """Some bytes of the file: of a page's length, of a sector's, or of any."""
    length = rng.choice((_PAGE, 512, rng.randrange(1, 100_000), 1 << 20))
    start = rng.randrange(len(whole()) - length)
    return (start // length * length, length) if rng.random() < 0.5 else (start, length)


def _zeroed(rng: Random) -> bytes:
    start, length = some_range(rng)
    return whole()[:start] + bytes(length) + whole()[start + length :]


def _torn(rng: Random) -> bytes:
    """A part is what another run of the compiler wrote there."""
    start, length = some_range(rng)
    return whole()[:start] + rng.randbytes(length) + whole()[start + length :]


def _swapped(rng: Random) -> bytes:
    data = bytearray(whole())
    start, end = parts()[rng.choice(("code", "weights", "weights"))]
    length = rng.choice((64, 512, _PAGE, checksum.CHUNK))
    length = min(length, (end - start) // 2)
    one = start + rng.randrange((end - start) // length) * length
    other = start + rng.randrange((end - start) // length) * length
    data[one : one + length], data[other : other + length] = data[other : other + length], data[one : one + length]
    return bytes(data)


def _shifted(rng: Random) -> bytes:
    """Bytes are missing in the middle, or some too many are there."""
    start, length = some_range(rng)
    rest = whole()[start + length :] if rng.random() < 0.5 else rng.randbytes(length) + whole()[start:]
    return whole()[:start] + rest


def _cut(rng: Random) -> bytes:
    if rng.random() < 0.5:
        start, end = parts()[rng.choice(list(parts()))]
        return whole()[: max(0, rng.choice((start, end - 1, start + 1, rng.randrange(start, end))))]
    return whole()[: rng.randrange(len(whole()))]


def _appended(rng: Random) -> bytes:
    return whole() + (rng.randbytes if rng.random() < 0.5 else bytes)(rng.choice((1, 64, _PAGE, 100_000)))


def _elf_header(rng: Random) -> bytes:
    """Offsets and counts of the shared library's own header, absurd ones above all."""
    data = bytearray(whole())
    at, size = rng.choice(((0x04, 1), (0x05, 1), (0x10, 2), (0x12, 2), (0x18, 8), (0x20, 8), (0x28, 8), (0x36, 2),
                           (0x38, 2), (0x3A, 2), (0x3C, 2), (0x3E, 2)))
    _overwrite(data, at, size, rng)
    return bytes(data)


def _overwrite(data: bytearray, at: int, size: int, rng: Random) -> None:
    before, bits = int.from_bytes(data[at : at + size], "little"), 8 * size
    value = rng.choice((0, 1, (1 << bits) - 1, 1 << (bits - 1), before + 1, before - 1, rng.getrandbits(bits)))
    data[at : at + size] = (value % (1 << bits)).to_bytes(size, "little")


def _container_header(rng: Random) -> bytes:
    """Magic, version and lengths are others; half of the time the checksum fits them."""
    data, (start, end) = bytearray(whole()), parts()["header"]
    at, size = rng.choice(((0, 8), (8, 4), (12, 4), (16, 8), (24, 8)))
    _overwrite(data, start + at, size, rng)
    if rng.random() < 0.5:
        _resealed(data, start, bytes(data[end : parts()["metadata"][1]]))
    return bytes(data)


def _resealed(data: bytearray, header_at: int, text: bytes) -> None:
    end = header_at + artifact._HEADER.size
    data[end : end + 8] = artifact._CHECKSUM.pack(checksum.checksum(bytes(data[header_at:end]) + text))


def _with_text(text: bytes, shrink: int = 0) -> bytes:
    """The artifact with another text for metadata, and with the lengths and the checksum that belong to it."""
    start, text_at = parts()["header"]
    weights_at = -(-(text_at + len(text)) // _PAGE) * _PAGE
    weights = whole()[parts()["weights"][0] : len(whole()) - shrink]
    header = artifact._HEADER.pack(artifact._MAGIC, artifact.FORMAT, len(text), weights_at + len(weights))
    sealed = header + artifact._CHECKSUM.pack(checksum.checksum(header + text)) + text
    return whole()[:start] + sealed.ljust(weights_at - start, b"\0") + weights


def _metadata() -> dict[str, Any]:
    return deepcopy(_text())


@cache
def _text() -> dict[str, Any]:
    start, end = parts()["metadata"]
    return dict(json.loads(whole()[start:end]))


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Each value inside another as the container and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        _places(item, found)
    return found


def _field(rng: Random) -> bytes:
    """One value of the metadata is something else, or gone, or there twice."""
    metadata = _metadata()
    sums = metadata.pop("checksums")
    container, key = rng.choice(_places(metadata, []))
    metadata["checksums"] = sums
    match rng.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        case _:
            container[key] = rng.choice(_HOSTILE)
    return _with_text(json.dumps(metadata).encode("utf-8", "surrogatepass"))


def _weight_table(rng: Random) -> bytes:
    """Shapes, types, offsets and order of the weights are others, all with the right checksums."""
    metadata = _metadata()
    table = metadata["weights"]
    entry = rng.choice(table)
    match rng.randrange(9):
        case 0:
            rng.shuffle(table)
        case 1:
            entry["offset"] = rng.choice(table)["offset"]
        case 2:
            entry["offset"] += rng.choice((-64, -1, 1, 4, 64, 1 << 20, 1 << 60))
        case 3:
            entry["shape"] = rng.choice(([*entry["shape"], 1], entry["shape"][::-1], [int(np.prod(entry["shape"]))]))
        case 4:
            entry["dtype"] = rng.choice(("int32", "uint32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int4"))
        case 5:
            kinds = ("float16", "bfloat16", "float32", "int16")  # one of as many bytes would tell of other weights
            entry["stored"] = rng.choice(kinds if entry["stored"] == "float32" else kinds[2:])
        case 6:
            entry["bytes"] = rng.choice((0, 1, entry["bytes"] - 1, 1 << 62))
        case 7:
            others = ("winograd_2x2", "winograd_4x4", "winograd_8x8", None)
            next(each for each in table if "made" in each)["made"] = rng.choice(others)
            entry["made"] = rng.choice(others)
            for each in table:
                if each.get("made", "") is None:
                    del each["made"]
        case _:
            table.append(deepcopy(entry)) if rng.random() < 0.5 else table.remove(entry)
    return _with_text(json.dumps(metadata).encode())


def _border(rng: Random) -> bytes:
    """Inputs and outputs are described otherwise than the code was made for."""
    metadata = _metadata()
    side = metadata[rng.choice(("inputs", "outputs"))]
    entry = rng.choice(side)
    match rng.randrange(6):
        case 0:
            side.append({**deepcopy(entry), "name": "one more"})
        case 1:
            side.remove(entry)
        case 2:
            entry["shape"] = rng.choice(([*entry["shape"], 1], entry["shape"][::-1], [], [1 << 40], [0]))
        case 3:
            entry["dtype"] = rng.choice(("int32", "float64", "float16", "bool", "complex64", "object", "V8"))
        case 4:
            entry["name"] = rng.choice((side[0]["name"], side[-1]["name"], "", "\n", "a" * 100_000))
        case _:
            entry["aliased"] = not entry.get("aliased", False)
    return _with_text(json.dumps(metadata).encode())


def _sums(rng: Random) -> bytes:
    metadata = _metadata()
    found = metadata["checksums"][rng.choice(("code", "weights"))]
    match rng.randrange(4):
        case 0:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(64)
        case 1:
            found.pop()
        case 2:
            found.append(0)
        case _:
            found[rng.randrange(len(found))] = rng.choice(_HOSTILE)
    return _with_text(json.dumps(metadata).encode("utf-8", "surrogatepass"))


def _text_of_any_kind(rng: Random) -> bytes:
    """Metadata that is no JSON object of the usual kind, under its right checksum."""
    usual = json.dumps(_metadata())
    text = rng.choice((
        "", "{}", "[]", "null", "0", '"text"', "[" * 200_000, '{"a":' * 100_000, "[" + "[]," * 2_500_000 + "[]]",
        "[" + "[]," * 100_000 + "[]]", "[" + "0.5," * 1_900_000 + "0]", "[" + '"ab",' * 1_400_000 + "0]",
        "{" + ",".join(f'"{i}":0' for i in range(700_000)) + "}",
        usual[:-1], usual + "}", usual.replace("{", '{"a":1,"a":2,', 1),
        usual.replace('"threads": 1', '"threads": NaN'),
        usual.replace('"threads": 1', '"threads": 1e999'), usual.replace('"threads": 1', '"threads": ' + "9" * 9000),
        usual + " " * 40_000_000, "\ufeff" + usual,
    )).encode()
    if rng.random() < 0.2:
        text = text[: len(text) // 2] + b"\xff\xfe" + text[len(text) // 2 :]
    return _with_text(text)


def _another_file(rng: Random) -> bytes:
    return rng.choice((
        b"", b"\0" * 100_000, b"\x7fELF", b"PK\x03\x04" + rng.randbytes(5000), rng.randbytes(rng.randrange(1, 10_000)),
        whole()[: parts()["code"][1]], whole()[parts()["header"][0] :], b"#!/bin/sh\nexit 1\n",
        b"\x7fELF\x02\x01" + bytes(80), Path(sys.executable).resolve().read_bytes()[: 1 << 20], whole()[: _PAGE] * 3,
    ))


#: how the content of a file is damaged: from random numbers to the bytes
CONTENTS: dict[str, Callable[[Random], bytes]] = {
    "a bit of the code": _flip("code"), "a bit of the padding": _flip("padding"),
    "a bit of the header": _flip("header"), "a bit of the metadata": _flip("metadata"),
    "a bit before the weights": _flip("gap"), "a bit of the weights": _flip("weights"),
    "a range zeroed": _zeroed, "a range torn": _torn, "ranges swapped": _swapped, "bytes lost or inserted": _shifted,
    "cut short": _cut, "bytes appended": _appended, "ELF header": _elf_header, "header, crafted": _container_header,
    "a field, crafted": _field, "weight table, crafted": _weight_table, "inputs and outputs, crafted": _border,
    "checksums, crafted": _sums, "metadata, crafted": _text_of_any_kind, "another file": _another_file,
}
