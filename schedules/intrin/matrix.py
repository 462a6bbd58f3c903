"""Products of small matrices, ``C[i, j] += sum_k A[i, k] * B[j, k]``, with one instruction.

``bytes``    2 x 8 by 2 x 8 of aarch64's ``smmla``, ``ummla`` and, for unsigned ``A``, ``usmmla``: exact in int32
``bfloats``  2 x 4 by 2 x 4 of ``bfmmla``: float32 sums

The two rows of ``A`` lie anywhere, and are put together in a register; those of ``B``, which is packed, and of ``C``
lie one after the other.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare

__all__ = ["BFLOAT_PAIRS", "BYTE_PAIRS", "COLUMNS", "DEPTHS", "ROWS", "matrix", "product"]

#: rows of ``A`` and of ``B``, which are columns of the product
ROWS = COLUMNS = 2
#: Forms of packed weights, as those of :mod:`schedules.intrin.dot`: uint8 by int8, and bfloat16. By each of them the
#: weight's type, and how many of a column are multiplied at once
BYTE_PAIRS, BFLOAT_PAIRS = "byte_pairs", "bfloat_pairs"
DEPTHS = {BYTE_PAIRS: ("int8", 8), BFLOAT_PAIRS: ("bfloat16", 4)}

#: of four products and four additions, each rounded
_ROUNDED = 1e-6


def matrix(left: str, right: str) -> str:
    """The name of the computation that multiplies 2 x k elements of the two types."""
    return f"matrix_{left}_{right}"


def product(form: str) -> str:
    """The name of the computation that multiplies operands of a form."""
    return matrix("uint8", "int8") if form == BYTE_PAIRS else matrix("bfloat16", "bfloat16")


def _description(types: tuple[str, str, str], depth: int) -> tirx.PrimFunc:
    left, right, total = types

    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (2, depth), left, strides=[T.int32(), 1], offset_factor=1)
        b = T.match_buffer(y, (2, depth), right, offset_factor=1)
        c = T.match_buffer(z, (2, 2), total, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:2, 0:2], a[0:2, 0:depth], b[0:2, 0:depth])
            T.writes(c[0:2, 0:2])
            for i, j, k in T.grid(2, 2, depth):
                with T.sblock("product"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    c[vi, vj] = c[vi, vj] + T.Cast(total, a[vi, vk]) * T.Cast(total, b[vj, vk])

    return description


def _implementation(instruction: str, description: tirx.PrimFunc) -> tirx.PrimFunc:
    block = description.body.block
    sums, left, right = (region.source for region in block.reads)
    total, depth = f"{sums.dtype}x4", int(left.shape[1])
    halves = [left.vload([row, 0], f"{left.dtype}x{depth}") for row in range(ROWS)]
    # bfloat16 is words until schedules.lowering hands them to the instruction
    half, whole = ("int8x8", "int8x16") if depth == 8 else ("uint16x4", "uint16x8")
    rows = tirx.Shuffle([tirx.reinterpret(half, each) for each in halves], list(range(ROWS * depth)))
    values = [rows, tirx.reinterpret(whole, right.vload([0, 0], f"{right.dtype}x{ROWS * depth}"))]
    index = [0, tirx.Ramp(0, 1, 4)]  # both rows
    result = tirx.call_llvm_pure_intrin(total, instruction, tirx.BufferLoad(sums, index), *values)
    body = s_tir.SBlock([], block.reads, block.writes, "root", tirx.BufferStore(sums, result, index))
    return description.with_body(s_tir.SBlockRealize([], True, body))


def _product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return c + a @ b.T


for _name, _left, _right, _total, _depth, _feature in (
    ("smmla", "int8", "int8", "int32", 8, "i8mm"), ("ummla", "uint8", "uint8", "int32", 8, "i8mm"),
    ("usmmla", "uint8", "int8", "int32", 8, "i8mm"), ("bfmmla", "bfloat16", "bfloat16", "float32", 4, "bf16"),
):
    _llvm = f"llvm.aarch64.neon.{_name}" + (".v4i32.v16i8" if _depth == 8 else "")
    declare(Intrinsic(
        f"{PREFIX}{matrix(_left, _right)}.{_name}", (_left, _right, _total), ((_feature, "neon"),),
        partial(_description, (_left, _right, _total), _depth), partial(_implementation, _llvm), _product, _name,
        tolerance=0.0 if _depth == 8 else _ROUNDED,
    ))
