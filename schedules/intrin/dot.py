"""Dot products of short integers and floats: an instruction multiplies, adds within each lane, and accumulates in 32
bits.

A step takes a few activations, which every lane shares, against as many weights of each lane. Of integers every sum
is exact:

``quads``
    Four activations of uint8 by weights of int8. ``vpdpbusd`` multiplies four bytes of each lane by four (AVX512-VNNI
    at any width, AVX-VNNI up to 256 bits), and so does ``usdot`` of aarch64. Where that has ``sdot`` alone, whose
    operands are both signed, 128 is taken from the activations and 128 times the sum of the weights added, which is the
    same for all rows.
``words``
    Two activations by two weights, all int16: ``pmaddwd``, on any x86 (with VNNI LLVM makes ``vpdpwssd`` of it and the
    addition). ``pmaddubsw``, which takes bytes, saturates. To widen the activations inside of the loop would take two
    more operations for each of them, on units that the multiplications and additions keep busy: they are widened once
    before.

``bytes``
    Four activations of uint8 by weights of int8 in two pairs, the sum of each of which *saturates* to 16 bits:
    ``pmaddubsw``, and ``pmaddwd`` with ones to add both to a sum. 1.4 times as many products a cycle as words (measured
    on Zen 3), and half the bytes. What the sums are is said in full, so that nothing is presumed about the weights;
    that no pair saturates is the business of whoever packs them.

``taps``
    Four pixels of uint8, of which each lane takes those of its own channel, by weights of int8: a row of a depthwise
    convolution's window. The pixels lie as they are stored; one shuffle makes quads of them (``vpermb``, or two).

``nibbles``, ``octets``
    The other way around: activations are int8, weights uint8. Of nibbles a byte holds two, the lower one for the first
    four of eight activations and the upper one for the last four; both are unpacked in registers, which LLVM does once
    for all rows. Where there is no dot product of bytes, ``pmaddubsw`` takes nibbles, of which no sum of four products
    saturates. Of aarch64, ``usdot`` takes both, and ``sdot`` nibbles.

Of bfloat16 it takes two:

``bfloats``
    ``vdpbf16ps`` (AVX512-BF16) and ``bfdot`` (aarch64) add two products to a float32, rounded once or twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare, select

__all__ = ["BFLOATS", "BYTES", "NIBBLES", "OCTETS", "QUADS", "TAPS", "WORDS", "dot", "dot_form"]

QUADS, WORDS, BYTES, TAPS, BFLOATS = "quads", "words", "bytes", "taps", "bfloats"
NIBBLES, OCTETS = "nibbles", "octets"
#: LLVM's names by lanes, which are also those of the VEX forms
_QUAD_NAMES = {lanes: f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" for lanes in (4, 8, 16)}
_WORD_NAMES = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
_BYTE_NAMES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_SDOT, _USDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8", "llvm.aarch64.neon.usdot.v4i32.v16i8"
#: the highest bit of each byte
_SIGN_BITS = -0x7F7F7F80
#: the lower half of each byte
_LOWER_NIBBLES = 0x0F0F0F0F
#: of two products and two additions, each rounded
_ROUNDED = 4e-7

#: the new sums of the old ones, of the activations as a vector of 32-bit words, and of the weights
_Step = Callable[[Any, Any, tirx.Buffer], Any]


def dot(form: str, lanes: int) -> str:
    """The name of the computation that adds a step's products to ``lanes`` sums."""
    return f"dot_{form}{lanes}"


def dot_form(target: tvm.target.Target) -> str:
    """The better form of integers that a target has: dot products of bytes, or of 16-bit numbers."""
    return QUADS if any(select(dot(QUADS, lanes), target) for lanes in (4, 8, 16)) else WORDS


def _products(lanes: int, count: int, activation: str, weight: str, result: str) -> tirx.PrimFunc:
    """``count`` products of each lane's weights with values that all lanes share, added to its sum."""

    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (count,), activation, offset_factor=1)
        b = T.match_buffer(y, (lanes, count), weight, offset_factor=1)
        c = T.match_buffer(z, (lanes,), result, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:count], b[0:lanes, 0:count])
            T.writes(c[0:lanes])
            for i, k in T.grid(lanes, count):
                with T.sblock("dot"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + T.Cast(result, a[vk]) * T.Cast(result, b[vi, vk])

    return description


def _quads(lanes: int) -> tirx.PrimFunc:
    return _products(lanes, 4, "uint8", "int8", "int32")


def _quad_step(lanes: int, name: str) -> _Step:
    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        shared = tirx.reinterpret(f"int8x{4 * lanes}", activations)
        return _call(f"int32x{lanes}", name, sums, shared, weights.vload([0, 0], f"int8x{4 * lanes}"))

    return step


def _signed_step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
    """``sdot`` of ``a - 128``, and 128 times the sum of the weights: LLVM computes that once for all rows."""
    signed = tirx.reinterpret("int8x16", activations ^ tirx.const(_SIGN_BITS, "int32x4"))
    values = weights.vload([0, 0], "int8x16")
    of_weights = _call("int32x4", _SDOT, tirx.const(0, "int32x4"), tirx.const(1, "int8x16"), values)
    return _call("int32x4", _SDOT, sums + (of_weights << tirx.const(7, "int32x4")), signed, values)


def _octets(lanes: int) -> tirx.PrimFunc:
    return _products(lanes, 4, "int8", "uint8", "int32")


def _octet_step(lanes: int, name: str) -> _Step:
    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        shared = tirx.reinterpret(f"int8x{4 * lanes}", activations)
        values = tirx.reinterpret(f"int8x{4 * lanes}", weights.vload([0, 0], f"uint8x{4 * lanes}"))
        return _call(f"int32x{lanes}", name, sums, values, shared)

    return step


def _nibbles(lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (8,), "int8", offset_factor=1)
        b = T.match_buffer(y, (lanes, 4), "uint8", offset_factor=1)
        c = T.match_buffer(z, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:8], b[0:lanes, 0:4])
            T.writes(c[0:lanes])
            for i, k in T.grid(lanes, 4):
                with T.sblock("dot"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + (
                        T.Cast("int32", a[vk]) * T.Cast("int32", T.bitwise_and(b[vi, vk], T.uint8(15)))
                        + T.Cast("int32", a[vk + 4]) * T.Cast("int32", T.shift_right(b[vi, vk], T.uint8(4)))
                    )

    return description


#: the new sums of the old ones, of the lower and the upper nibbles as bytes, and of the activations that each meets
_Halves = Callable[[Any, tuple[Any, Any], tuple[Any, Any]], Any]


def _nibbles_taken(added: _Halves, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that unpacks the nibbles of a vector and adds their products."""
    sums, activations, weights = (region.source for region in description.body.block.reads)
    lanes = int(sums.shape[0])
    four, words = f"int8x{4 * lanes}", f"uint32x{lanes}"
    shared = [tirx.reinterpret(four, tirx.Broadcast(tirx.reinterpret("int32", activations.vload([k], "int8x4")), lanes))
              for k in (0, 4)]
    packed = tirx.reinterpret(words, weights.vload([0, 0], f"uint8x{4 * lanes}"))
    mask = tirx.const(_LOWER_NIBBLES, words)
    halves = [tirx.reinterpret(four, part & mask) for part in (packed, packed >> tirx.const(4, words))]
    index = [tirx.Ramp(0, 1, lanes)]
    new = added(tirx.BufferLoad(sums, index), (halves[0], halves[1]), (shared[0], shared[1]))
    return _stored(description, new, index)


def _nibble_dots(lanes: int, name: str) -> _Halves:
    def added(sums: Any, halves: tuple[Any, Any], shared: tuple[Any, Any]) -> Any:
        for weights, activations in zip(halves, shared, strict=True):
            sums = _call(f"int32x{lanes}", name, sums, weights, activations)
        return sums

    return added


def _nibble_pairs(lanes: int) -> _Halves:
    """Sums of two products of both halves are within 16 bits, and so is the sum of both."""

    def added(sums: Any, halves: tuple[Any, Any], shared: tuple[Any, Any]) -> Any:
        words, whole = f"int16x{2 * lanes}", f"uint32x{lanes}"
        low, high = (_call(words, _BYTE_NAMES[lanes], w, a) for w, a in zip(halves, shared, strict=True))
        products = _call(f"int32x{lanes}", _WORD_NAMES[lanes], low + high, tirx.const(1, words))
        return _fenced(tirx.reinterpret(whole, sums) + tirx.reinterpret(whole, products), lanes)

    return added


def _of_nibbles(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A dot product of activations ``[8]`` with bytes ``[lanes, 4]`` of nibbles."""
    return c + (b % 16).astype(c.dtype) @ a[:4].astype(c.dtype) + (b // 16).astype(c.dtype) @ a[4:].astype(c.dtype)


def _words(lanes: int) -> tirx.PrimFunc:
    return _products(lanes, 2, "int16", "int16", "int32")


def _word_step(lanes: int) -> _Step:
    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        words = f"int16x{2 * lanes}"
        shared = tirx.reinterpret(words, activations)
        products = _call(f"int32x{lanes}", _WORD_NAMES[lanes], shared, weights.vload([0, 0], words))
        whole = f"uint32x{lanes}"  # sums may wrap, which those of signed numbers may not in LLVM
        return _fenced(tirx.reinterpret(whole, sums) + tirx.reinterpret(whole, products), lanes)

    return step


def _bytes(lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (4,), "uint8", offset_factor=1)
        b = T.match_buffer(y, (lanes, 4), "int8", offset_factor=1)
        c = T.match_buffer(z, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:4], b[0:lanes, 0:4])
            T.writes(c[0:lanes])
            for i, k in T.grid(lanes, 2):
                with T.sblock("dot"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + T.max(
                        T.min(
                            T.Cast("int32", a[vk * 2]) * T.Cast("int32", b[vi, vk * 2])
                            + T.Cast("int32", a[vk * 2 + 1]) * T.Cast("int32", b[vi, vk * 2 + 1]),
                            32767,
                        ),
                        -32768,
                    )

    return description


def _byte_step(lanes: int) -> _Step:
    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        words, whole = f"int16x{2 * lanes}", f"uint32x{lanes}"
        shared = tirx.reinterpret(f"int8x{4 * lanes}", activations)
        pairs = _call(words, _BYTE_NAMES[lanes], shared, weights.vload([0, 0], f"int8x{4 * lanes}"))
        products = _call(f"int32x{lanes}", _WORD_NAMES[lanes], pairs, tirx.const(1, words))
        return _fenced(tirx.reinterpret(whole, sums) + tirx.reinterpret(whole, products), lanes)

    return step


def _saturated(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    pairs = (a.astype(c.dtype) * b.astype(c.dtype)).reshape(len(b), 2, 2).sum(axis=-1)
    return c + pairs.clip(-32768, 32767).sum(axis=-1)


def _taps(lanes: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (4, lanes), "uint8", offset_factor=1)
        b = T.match_buffer(y, (lanes, 4), "int8", offset_factor=1)
        c = T.match_buffer(z, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:4, 0:lanes], b[0:lanes, 0:4])
            T.writes(c[0:lanes])
            for i, k in T.grid(lanes, 4):
                with T.sblock("dot"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + T.Cast("int32", a[vk, vi]) * T.Cast("int32", b[vi, vk])

    return description


def _taps_taken(name: str, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that adds the products of four pixels, shuffled into one quad for each lane."""
    sums, pixels, weights = (region.source for region in description.body.block.reads)
    lanes = int(sums.shape[0])
    stored = tirx.reinterpret(f"int8x{4 * lanes}", pixels.vload([0, 0], f"uint8x{4 * lanes}"))
    order = [tirx.const(tap * lanes + lane, "int32") for lane in range(lanes) for tap in range(4)]
    quads, index = tirx.Shuffle([stored], order), [tirx.Ramp(0, 1, lanes)]
    values = weights.vload([0, 0], f"int8x{4 * lanes}")
    return _stored(description, _call(f"int32x{lanes}", name, tirx.BufferLoad(sums, index), quads, values), index)


def _of_taps(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A dot product of pixels ``[4, lanes]`` with weights ``[lanes, 4]``."""
    return c + (a.T.astype(c.dtype) * b.astype(c.dtype)).sum(axis=-1)


def _bfloats(lanes: int) -> tirx.PrimFunc:
    return _products(lanes, 2, "bfloat16", "bfloat16", "float32")


def _bfloat_step(lanes: int, name: str) -> _Step:
    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        words = f"uint16x{2 * lanes}"  # schedules.lowering makes them bfloat16 again
        values = tirx.reinterpret(words, weights.vload([0, 0], f"bfloat16x{2 * lanes}"))
        return _call(f"float32x{lanes}", name, sums, tirx.reinterpret(words, activations), values)

    return step


def _call(dtype: str, name: str, *arguments: Any) -> Any:
    return tirx.call_llvm_pure_intrin(dtype, name, *arguments)


def _fenced(sums: Any, lanes: int) -> Any:
    """The same value, which LLVM may not take apart: else it adds up the products of several steps before it adds them
    to the sums, and has no registers left. No instruction comes of it."""
    real = f"float32x{lanes}"
    fence = _call(real, "llvm.arithmetic.fence", tirx.reinterpret(real, sums))
    return tirx.reinterpret(f"int32x{lanes}", fence)


def _implemented(step: _Step, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that adds a ``step`` of the activations, 32 bits in each of the lanes, to a vector of sums."""
    block = description.body.block
    sums, activations, weights = (region.source for region in block.reads)
    lanes, taken = int(sums.shape[0]), int(activations.shape[0])
    word = tirx.reinterpret("int32", activations.vload([0], f"{activations.dtype}x{taken}"))
    index = [tirx.Ramp(0, 1, lanes)]
    return _stored(description, step(tirx.BufferLoad(sums, index), tirx.Broadcast(word, lanes), weights), index)


def _stored(description: tirx.PrimFunc, sums: Any, index: Sequence[Any]) -> tirx.PrimFunc:
    """The described function that has the new ``sums`` already."""
    block = description.body.block
    store = tirx.BufferStore(block.writes[0].source, sums, index)
    body = s_tir.SBlock([], block.reads, block.writes, "root", store)
    return description.with_body(s_tir.SBlockRealize([], True, body))


def _added(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Add a step's products with weights ``[lanes, step]``."""
    return c + b.astype(c.dtype) @ a.astype(c.dtype)


_QUAD_TYPES, _WORD_TYPES = ("uint8", "int8", "int32"), ("int16", "int16", "int32")
_OCTET_TYPES = ("int8", "uint8", "int32")
_BFLOAT_TYPES = ("bfloat16", "bfloat16", "float32")
_VNNI, _AVX_VNNI = ("avx512vnni", "avx512vl"), ("avxvnni",)

for _lanes in (4, 8, 16):
    declare(
        Intrinsic(
            PREFIX + dot(QUADS, _lanes), _QUAD_TYPES, (_VNNI,) if _lanes == 16 else (_VNNI, _AVX_VNNI),
            partial(_quads, _lanes), partial(_implemented, _quad_step(_lanes, _QUAD_NAMES[_lanes])), _added, "vpdpbusd",
        ),
        Intrinsic(
            PREFIX + dot(OCTETS, _lanes), _OCTET_TYPES, (_VNNI,) if _lanes == 16 else (_VNNI, _AVX_VNNI),
            partial(_octets, _lanes), partial(_implemented, _octet_step(_lanes, _QUAD_NAMES[_lanes])), _added,
            "vpdpbusd",
        ),
        Intrinsic(
            PREFIX + dot(NIBBLES, _lanes), _OCTET_TYPES, (_VNNI,) if _lanes == 16 else (_VNNI, _AVX_VNNI),
            partial(_nibbles, _lanes), partial(_nibbles_taken, _nibble_dots(_lanes, _QUAD_NAMES[_lanes])), _of_nibbles,
            "vpdpbusd",
        ),
        Intrinsic(
            PREFIX + dot(WORDS, _lanes), _WORD_TYPES, (({4: "sse2", 8: "avx2", 16: "avx512bw"}[_lanes],),),
            partial(_words, _lanes), partial(_implemented, _word_step(_lanes)), _added, "pmaddwd|pdpwssd",
        ),
        Intrinsic(
            PREFIX + dot(BFLOATS, _lanes), _BFLOAT_TYPES, (("avx512bf16", "avx512vl"),), partial(_bfloats, _lanes),
            partial(_implemented, _bfloat_step(_lanes, f"llvm.x86.avx512bf16.dpbf16ps.{32 * _lanes}")), _added,
            "vdpbf16ps", tolerance=_ROUNDED,
        ),
    )
for _lanes in (8, 16):
    declare(
        Intrinsic(
            PREFIX + dot(TAPS, _lanes), _QUAD_TYPES, (_VNNI,), partial(_taps, _lanes),
            partial(_taps_taken, _QUAD_NAMES[_lanes]), _of_taps, "vpdpbusd",
        ),
        Intrinsic(
            PREFIX + dot(BYTES, _lanes), _QUAD_TYPES, (({8: "avx2", 16: "avx512bw"}[_lanes],),),
            partial(_bytes, _lanes), partial(_implemented, _byte_step(_lanes)), _saturated, "pmaddubsw",
        ),
        Intrinsic(  # after those of dot products
            f"{PREFIX}{dot(NIBBLES, _lanes)}.pairs", _OCTET_TYPES, (({8: "avx2", 16: "avx512bw"}[_lanes],),),
            partial(_nibbles, _lanes), partial(_nibbles_taken, _nibble_pairs(_lanes)), _of_nibbles, "pmaddubsw",
        ),
    )
declare(  # with signed operands alone last
    Intrinsic(
        f"{PREFIX}{dot(OCTETS, 4)}.usdot", _OCTET_TYPES, (("i8mm",),), partial(_octets, 4),
        partial(_implemented, _octet_step(4, _USDOT)), _added, "usdot",
    ),
    Intrinsic(
        f"{PREFIX}{dot(NIBBLES, 4)}.sdot", _OCTET_TYPES, (("dotprod",),), partial(_nibbles, 4),
        partial(_nibbles_taken, _nibble_dots(4, _SDOT)), _of_nibbles, "sdot",
    ),
    Intrinsic(
        f"{PREFIX}{dot(QUADS, 4)}.usdot", _QUAD_TYPES, (("i8mm",),), partial(_quads, 4),
        partial(_implemented, _quad_step(4, _USDOT)), _added, "usdot",
    ),
    Intrinsic(
        f"{PREFIX}{dot(QUADS, 4)}.sdot", _QUAD_TYPES, (("dotprod",),), partial(_quads, 4),
        partial(_implemented, _signed_step), _added, "sdot",
    ),
    Intrinsic(
        f"{PREFIX}{dot(BFLOATS, 4)}.bfdot", _BFLOAT_TYPES, (("bf16", "neon"),), partial(_bfloats, 4),
        partial(_implemented, _bfloat_step(4, "llvm.aarch64.neon.bfdot.v4f32.v8bf16")), _added, "bfdot",
        tolerance=_ROUNDED,
    ),
)
