"""Dot products of short integers: one instruction multiplies, adds within each lane and adds to 32-bit sums.

Activations are uint8 and weights signed, and every sum is exact. A step takes four activations, which every lane
shares, against four weights of each lane, in one of two forms:

``quads``
    ``vpdpbusd`` multiplies four bytes of each lane by four (AVX512-VNNI at any width, AVX-VNNI up to 256 bits).
``pairs``
    ``pmaddwd`` multiplies two 16-bit numbers of each lane by two, on any x86. The weights are stored as int16, since
    ``pmaddubsw``, which takes bytes, saturates. Of activations ``a0 a1 a2 a3`` in 32 bits, ``and 0x00ff00ff`` leaves
    the words ``a0 a2`` and a shift by 8 the words ``a1 a3``: this is the order in which the weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import Intrinsic, declare

__all__ = ["PAIRS", "QUADS", "dot", "dot_form"]

QUADS, PAIRS = "quads", "pairs"
#: LLVM's names by lanes, which are also those of the VEX forms
_QUAD_NAMES = {lanes: f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" for lanes in (4, 8, 16)}
_PAIR_NAMES = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
#: the low byte of each 16-bit word
_LOW_BYTES = 0x00FF00FF


def dot(form: str, lanes: int) -> str:
    """The name of the intrinsic that adds a step's products to ``lanes`` sums."""
    return f"mlc.dot_{form}{lanes}"


def dot_form(target: tvm.target.Target) -> str:
    """The better form that a target has: of its dot products of bytes, or of 16-bit numbers."""
    return QUADS if _has(target, "avx512vnni", "avx512vl") or _has(target, "avxvnni") else PAIRS


def _has(target: tvm.target.Target, *features: str) -> bool:
    if str(target.kind.name) != "llvm":
        return False
    with target:
        return all(tvm.target.codegen.llvm_cpu_has_features(feature, target) for feature in features)


def _has_quads(lanes: int, target: tvm.target.Target) -> bool:
    return _has(target, "avx512vnni", "avx512vl") or (lanes < 16 and _has(target, "avxvnni"))


def _has_pairs(lanes: int, target: tvm.target.Target) -> bool:
    return _has(target, {4: "sse2", 8: "avx2", 16: "avx512bw"}[lanes])


def _quads(lanes: int) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (4,), "uint8", offset_factor=1)
        b = T.match_buffer(y, (lanes, 4), "int8", offset_factor=1)
        c = T.match_buffer(z, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:4], b[0:lanes, 0:4])
            T.writes(c[0:lanes])
            for i, k in T.grid(lanes, 4):
                with T.sblock("dot"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + T.Cast("int32", a[vk]) * T.Cast("int32", b[vi, vk])

    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        shared = tirx.reinterpret(f"int8x{4 * lanes}", activations)
        values = weights.vload([0, 0], f"int8x{4 * lanes}")
        return tirx.call_llvm_pure_intrin(f"int32x{lanes}", _QUAD_NAMES[lanes], sums, shared, values)

    return description, _implemented(description, lanes, step)


def _pairs(lanes: int) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (4,), "uint8", offset_factor=1)
        b = T.match_buffer(y, (2, lanes, 2), "int16", strides=[T.int32(), 2, 1], offset_factor=1)
        c = T.match_buffer(z, (lanes,), "int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:4], b[0:2, 0:lanes, 0:2])
            T.writes(c[0:lanes])
            for i, p, k in T.grid(lanes, 2, 2):
                with T.sblock("dot"):
                    vi, vp, vk = T.axis.remap("SRR", [i, p, k])
                    c[vi] = c[vi] + T.Cast("int32", a[vp + vk * 2]) * T.Cast("int32", b[vp, vi, vk])

    def step(sums: Any, activations: Any, weights: tirx.Buffer) -> Any:
        words = tirx.reinterpret(f"int16x{2 * lanes}", activations)
        even = tirx.reinterpret(f"int16x{2 * lanes}", activations & tirx.const(_LOW_BYTES, f"int32x{lanes}"))
        odd = tirx.reinterpret(f"uint16x{2 * lanes}", words) >> tirx.const(8, f"uint16x{2 * lanes}")
        products = [
            tirx.call_llvm_pure_intrin(
                f"int32x{lanes}", _PAIR_NAMES[lanes], values, weights.vload([row, 0, 0], f"int16x{2 * lanes}")
            )
            for row, values in enumerate((even, tirx.reinterpret(f"int16x{2 * lanes}", odd)))
        ]
        return _fenced(sums + (products[0] + products[1]), lanes)

    return description, _implemented(description, lanes, step)


def _fenced(sums: Any, lanes: int) -> Any:
    """The same value, which LLVM may not take apart: else it adds up the products of several steps before it adds them
    to the sums, and has no registers left. No instruction comes of it."""
    real = f"float32x{lanes}"
    fence = tirx.call_llvm_pure_intrin(real, "llvm.arithmetic.fence", tirx.reinterpret(real, sums))
    return tirx.reinterpret(f"int32x{lanes}", fence)


def _implemented(
    description: tirx.PrimFunc, lanes: int, step: Callable[[Any, Any, tirx.Buffer], Any]
) -> tirx.PrimFunc:
    """The function that adds a ``step`` of the activations, four bytes in each of the lanes, to a vector of sums."""
    block = description.body.block
    sums, activations, weights = (region.source for region in block.reads)
    shared = tirx.Broadcast(tirx.reinterpret("int32", activations.vload([0], "uint8x4")), lanes)
    index = [tirx.Ramp(0, 1, lanes)]
    store = tirx.BufferStore(sums, step(tirx.BufferLoad(sums, index), shared, weights), index)
    body = s_tir.SBlock([], block.reads, block.writes, "root", store)
    return description.with_body(s_tir.SBlockRealize([], True, body))


for _lanes in (4, 8, 16):
    declare(Intrinsic(dot(QUADS, _lanes), partial(_has_quads, _lanes), partial(_quads, _lanes)))
    declare(Intrinsic(dot(PAIRS, _lanes), partial(_has_pairs, _lanes), partial(_pairs, _lanes)))
