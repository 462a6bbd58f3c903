"""Lookups of 4-bit codes in a table of 16 floats that stays in registers.

``lookup``
    The eight fields of each lane's 32-bit word, the lowest first, as the elements of the table that they number. A
    permutation of a vector by indices takes 16 floats at once (``vpermps`` of AVX-512, which reads the lowest four bits
    of an index alone). Shorter vectors do not hold the table: there four lookups of bytes (``vpshufb``, ``tbl``) take a
    byte each of as many floats as a vector has bytes, and eight interleavings put four vectors of floats together.
    Two permutations of eight floats (AVX2) and a choice by the
    field's upper bit take 1.5 times as long: measured on Zen 2, a row by 1024 x 512 and by 4096 x 4096.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare

__all__ = ["FIELDS", "element", "lookup"]

#: fields of a word, and their bits
FIELDS, _BITS = 8, 4
_TABLE, _BYTES = 1 << _BITS, 4
#: the lower half of each byte
_LOWER = 0x0F0F0F0F

#: the fields' elements, in order, of the table and of the lanes' words
_Look = Callable[[tirx.Buffer, Any], list[Any]]


def lookup(lanes: int) -> str:
    """The name of the computation that looks up the fields of ``lanes`` words."""
    return f"lookup{lanes}"


def element(table: Callable[[int], Any], word: Any, field: Any) -> Any:
    """The element of the table that a field of the word numbers, chosen bit by bit: loops that are replaced may not
    read one buffer where another says."""
    index = word >> (field * _BITS).astype("uint32")

    def among(first: int, count: int) -> Any:
        if count == 1:
            return table(first)
        half = count // 2
        upper = (index & tirx.const(half, "uint32")) != tirx.const(0, "uint32")
        return tirx.Select(upper, among(first + half, half), among(first, half))

    return among(0, _TABLE)


def _lookups(lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        w = T.match_buffer(x, (lanes,), "uint32", offset_factor=1)
        t = T.match_buffer(y, (16,), "float32", offset_factor=1)
        n = T.match_buffer(z, (8, lanes), "float32", strides=[T.int32(), 1], offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(w[0:lanes], t[0:16])
            T.writes(n[0:8, 0:lanes])
            for k, i in T.grid(8, lanes):
                with T.sblock("lookup"):
                    vk, vi = T.axis.remap("SS", [k, i])
                    n[vk, vi] = element(lambda at: t[at], w[vi], vk)

    return description


def _looked_up(look: _Look, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that looks up the fields of a vector of words."""
    block = description.body.block
    (words, table), (numbers,) = ((region.source for region in regions) for regions in (block.reads, block.writes))
    lanes = int(words.shape[0])
    found = tirx.Var("words", f"uint32x{lanes}")
    steps: list[tirx.Stmt] = [tirx.Bind(found, words.vload([0], f"uint32x{lanes}"))]
    steps += [tirx.BufferStore(numbers, value, [k, tirx.Ramp(0, 1, lanes)])
              for k, value in enumerate(look(table, found))]
    body = s_tir.SBlock([], block.reads, block.writes, "root", tirx.SeqStmt(steps))
    return description.with_body(s_tir.SBlockRealize([], True, body))


def _permuted(table: tirx.Buffer, words: Any) -> list[Any]:
    values = table.vload([0], "float32x16")
    places = [words >> tirx.const(_BITS * k, "uint32x16") if k else words for k in range(FIELDS)]
    return [tirx.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", values,
                                       tirx.reinterpret("int32x16", place)) for place in places]


def _by_bytes(lanes: int, name: str, table: tirx.Buffer, words: Any) -> list[Any]:
    """Within each 128 bits, of four lanes: the four bytes of a word go to the four vectors that are put together, one
    of the lower fields and one of the upper ones."""
    count, whole = 4 * lanes, f"int8x{4 * lanes}"
    stored = tirx.reinterpret("int8x64", table.vload([0], "float32x16"))
    tables = [_shuffled([stored], [_BYTES * (i % _TABLE) + byte for i in range(count)]) for byte in range(_BYTES)]
    turned = _shuffled([tirx.reinterpret(whole, words)],
                       [i - i % 16 + i % 4 * 4 + i % 16 // 4 for i in range(count)])
    packed = tirx.reinterpret(f"uint32x{lanes}", turned)
    mask = tirx.const(_LOWER, f"uint32x{lanes}")
    found: list[Any] = [None] * FIELDS
    for upper, fields in enumerate((packed & mask, (packed >> tirx.const(_BITS, f"uint32x{lanes}")) & mask)):
        index = tirx.reinterpret(whole, fields)
        first, second, third, fourth = (tirx.call_llvm_pure_intrin(whole, name, each, index) for each in tables)
        for half in (0, 1):
            pairs = [tirx.reinterpret(f"int16x{count // 2}", _interleaved(a, b, count, 16, half))
                     for a, b in ((first, second), (third, fourth))]
            for quarter in (0, 1):
                value = _interleaved(pairs[0], pairs[1], count // 2, 8, quarter)
                found[2 * (2 * half + quarter) + upper] = tirx.reinterpret(f"float32x{lanes}", value)
    return found


def _shuffled(vectors: list[Any], places: list[int]) -> Any:
    return tirx.Shuffle(vectors, [tirx.const(place, "int32") for place in places])


def _interleaved(first: Any, second: Any, count: int, each: int, half: int) -> Any:
    """Of every ``each`` of ``count`` elements one half, those of both vectors in turn."""
    return _shuffled([first, second], [i - i % each + i % each // 2 + half * (each // 2) + i % 2 * count
                                       for i in range(count)])


def _of_fields(words: np.ndarray, table: np.ndarray, _numbers: np.ndarray) -> np.ndarray:
    return table[np.stack([words // _TABLE**k % _TABLE for k in range(FIELDS)])]


_TYPES = ("uint32", "float32", "float32")
declare(*(
    Intrinsic(PREFIX + lookup(lanes) + suffix, _TYPES, ((feature,),), partial(_lookups, lanes),
              partial(_looked_up, look), _of_fields, instruction)
    for lanes, suffix, feature, look, instruction in (
        (16, "", "avx512f", _permuted, "vperm(ps|d)"),
        (8, "", "avx2", partial(_by_bytes, 8, "llvm.x86.avx2.pshuf.b"), "vpshufb"),
        (4, "", "ssse3", partial(_by_bytes, 4, "llvm.x86.ssse3.pshuf.b.128"), "pshufb"),
        (4, ".tbl", "neon", partial(_by_bytes, 4, "llvm.aarch64.neon.tbl1.v16i8"), "tbl"),
    )
))
