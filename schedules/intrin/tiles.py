"""AMX: products of tiles, of which x86 has eight with 16 rows of 64 bytes each.

A step of the sum multiplies ``m`` tiles of activations by ``n`` tiles of weights, each as deep as ``depth`` steps of
four bytes, and adds to ``m x n`` tiles of sums of 16 x 16. What a weight's tile holds is what
:mod:`schedules.intrin.dot` takes of a panel of 16 columns, step by step, so that both read one packing:

``quads``    uint8 by int8 to int32, ``tdpbusd``: exact
``bfloats``  bfloat16 to float32, ``tdpbf16ps``: products of even and odd places are added up apart, fused, and both to
             the sum; subnormal numbers are zero

The sums are a buffer in the functions here, but tiles in what they become: :func:`zero` clears them, :func:`product`
adds to them, :func:`store` writes them to memory, and no other statement may name that buffer. Tiles are numbered here,
once for all, so that LLVM allots none and spills none. Their shapes (:func:`configuration`) hold for a thread, which

"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare
from schedules.intrin.dot import BFLOATS, QUADS

__all__ = [
    "CONFIGURE", "DEPTHS", "LOAD", "PASSING", "PRODUCT", "RELEASE", "SHAPES", "STORE", "TILE", "ZERO", "called",
    "configuration", "helper", "in_turn", "loaded", "product", "store", "written", "zero",
]

#: rows of a tile, and 32-bit elements of a row
TILE = 16
#: tiles of rows by tiles of columns of the sums, best first: loads are the fewer for each product
SHAPES = ((2, 2), (3, 1), (1, 3), (2, 1), (1, 2), (1, 1))
#: steps of four bytes that a tile's row may hold, best first
DEPTHS = (16, 12, 8, 4)
#: which operand passes by: it is loaded with the hint that it is not read again soon (``tileloaddt1``), so that the
#: other one stays in the first cache
PASSING = ("", "rows", "weights")
#: by form: the types, what multiplies, its feature, and what it may be off by
_FORMS = {
    QUADS: (("uint8", "int8", "int32"), "tdpbusd", "amx-int8", 0.0),
    BFLOATS: (("bfloat16", "bfloat16", "float32"), "tdpbf16ps", "amx-bf16", 4e-6),
}
_WORD, _ROW = 4, 64


def product(form: str, m: int, n: int, depth: int, passing: str = "") -> str:
    """What an intrinsic computes that adds a step's products to ``m x n`` tiles; with one of :data:`PASSING`, which
    there are for whole tiles alone, the name of one that loads so."""
    return f"tiles_{form}{m}x{n}x{depth}{passing and f'.{passing}'}"


def zero(dtype: str, m: int, n: int) -> str:
    """The same of one that sets the sums of ``dtype`` to zero."""
    return f"tiles_zero_{dtype}_{m}x{n}"


def store(dtype: str, m: int, n: int, scope: str) -> str:
    """The same of one that writes the sums of ``dtype`` to a buffer of a ``scope``: ``global``, or ``local``."""
    return f"tiles_store_{dtype}_{m}x{n}_{scope}"


def configuration(m: int, n: int, depth: int) -> bytes:
    """The operand of LDTILECFG (Intel's manual, volume 1, 18.2): the sums come first, then the activations, then the
    weights, whose rows are the steps."""
    rows = [TILE] * (m * n + m) + [depth] * n
    widths = [_ROW] * (m * n) + [_WORD * depth] * m + [_ROW] * n
    spare = 8 - len(rows)
    return bytes([1, *[0] * 15]) + np.array([*widths, *[0] * (8 + spare)], "<u2").tobytes() + bytes(
        [*rows, *[0] * (8 + spare)])


#: how the names of the functions begin that are an instruction each
_HELPER = "mlc_tiles_"
CONFIGURE, RELEASE, ZERO, STORE, PRODUCT, LOAD, _PASS = (
    _HELPER + word for word in ("configure", "release", "zero", "store", "tdp", "load", "pass"))


def called(name: str, *arguments: Any) -> tirx.Stmt:
    """A call of a function whose body is :func:`helper`'s."""
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))


def helper(name: str) -> str:
    """The function of LLVM's language that a name of this module's calls means; empty for any other name."""
    if not name.startswith(_HELPER):
        return ""
    word, *numbers = name.removeprefix(_HELPER).split("_")
    memory, before, parameters = '"~{memory}"', "", ""
    if word == "configure":
        content = "".join(f"\\{byte:02x}" for byte in configuration(*map(int, numbers)))
        before = f'@{name}_data = private unnamed_addr constant [64 x i8] c"{content}", align 64\n'
        assembly = f'"ldtilecfg ($0)", "r,~{{memory}}"(ptr @{name}_data)'
    elif word in ("load", "pass", "store"):
        parameters = "ptr %at, i64 %stride"
        tile = f"%tmm{numbers[0]}"
        text = {"load": f"tileloadd ($0,$1), {tile}", "pass": f"tileloaddt1 ($0,$1), {tile}",
                "store": f"tilestored {tile}, ($0,$1)"}[word]
        assembly = f'"{text}", "r,r,~{{memory}}"({parameters})'
    elif word == "release":
        assembly = f'"tilerelease", {memory}()'
    elif word == "zero":
        assembly = f'"tilezero %tmm{numbers[0]}", ""()'
    else:  # the second operand comes first in AT&T's order
        total, left, right = numbers
        assembly = f'"{word} %tmm{right}, %tmm{left}, %tmm{total}", ""()'
    return (f"{before}define linkonce_odr i32 @{name}({parameters}) alwaysinline {{\n"
            f"  call void asm sideeffect {assembly}\n  ret i32 0\n}}")


def _rows(buffer: tirx.Buffer, start: Sequence[int], axis: int) -> tuple[tirx.Expr, tirx.Expr]:
    """The address of a tile's rows, and the stride in bytes along ``axis``."""
    item = tirx.const(int(tirx.const(0, buffer.dtype).ty.dtype.itemsize), "int64")
    stride = tirx.Cast("int64", buffer.strides[axis]) * item
    return tirx.address_of(tirx.BufferLoad(buffer, list(start))), stride


def _sums(m: int, n: int) -> list[tuple[int, list[int]]]:
    """The number and the first element of each tile of sums."""
    return [(i * n + j, [i * TILE, j * TILE]) for i in range(m) for j in range(n)]


def loaded(memory: tirx.Buffer, m: int, n: int) -> tirx.Stmt:
    """The sums, read from memory."""
    return in_turn([called(f"{LOAD}_{c}", *_rows(memory, at, 0)) for c, at in _sums(m, n)])


def written(memory: tirx.Buffer, m: int, n: int) -> tirx.Stmt:
    """The sums, written to memory."""
    return in_turn([called(f"{STORE}_{c}", *_rows(memory, at, 0)) for c, at in _sums(m, n)])


def in_turn(steps: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Statements one after the other, as one."""
    return tirx.SeqStmt(list(steps)) if len(steps) > 1 else steps[0]


def _with_body(description: tirx.PrimFunc, steps: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
    block = description.body.block
    body = s_tir.SBlock([], block.reads, block.writes, "root", in_turn(steps))
    return description.with_body(s_tir.SBlockRealize([], True, body))


def _zeros(dtype: str, m: int, n: int) -> tirx.PrimFunc:
    rows, columns = m * TILE, n * TILE

    @T.prim_func(s_tir=True)
    def description(z: T.handle) -> None:
        c = T.match_buffer(z, (rows, columns), dtype, strides=[T.int32(), 1], offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads()
            T.writes(c[0:rows, 0:columns])
            for i, j in T.grid(rows, columns):
                with T.sblock("zero"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    c[vi, vj] = T.Cast(dtype, 0)

    return description


def _zeroed(m: int, n: int, description: tirx.PrimFunc) -> tirx.PrimFunc:
    return _with_body(description, [called(f"{ZERO}_{c}") for c, _ in _sums(m, n)])


def _stores(dtype: str, m: int, n: int, scope: str) -> tirx.PrimFunc:
    rows, columns = m * TILE, n * TILE

    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle) -> None:
        c = T.match_buffer(x, (rows, columns), dtype, strides=[T.int32(), 1], offset_factor=1, scope="local")
        memory = T.match_buffer(y, (rows, columns), dtype, strides=[T.int32(), 1], offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(c[0:rows, 0:columns])
            T.writes(memory[0:rows, 0:columns])
            for i, j in T.grid(rows, columns):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    memory[vi, vj] = c[vi, vj]

    return description


def _stored(m: int, n: int, description: tirx.PrimFunc) -> tirx.PrimFunc:
    (memory,) = (region.source for region in description.body.block.writes)
    return _with_body(description, [written(memory, m, n)])


def _products(types: tuple[str, str, str], m: int, n: int, depth: int) -> tirx.PrimFunc:
    left, right, total = types
    rows, columns, size = m * TILE, n * TILE, _WORD if right == "int8" else 2

    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (rows, depth * size), left, strides=[T.int32(), 1], offset_factor=1)
        b = T.match_buffer(y, (n, depth, TILE, size), right, strides=[T.int32(), T.int32(), size, 1], offset_factor=1)
        c = T.match_buffer(z, (rows, columns), total, strides=[T.int32(), 1], offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:rows, 0:columns], a[0:rows, 0 : depth * size], b[0:n, 0:depth, 0:TILE, 0:size])
            T.writes(c[0:rows, 0:columns])
            for i, j, k, e in T.grid(rows, columns, depth, size):
                with T.sblock("product"):
                    vi, vj, vk, ve = T.axis.remap("SSRR", [i, j, k, e])
                    c[vi, vj] = c[vi, vj] + T.Cast(total, a[vi, vk * size + ve]) * T.Cast(
                        total, b[vj // TILE, vk, vj % TILE, ve])

    return description


def _multiplied(instruction: str, m: int, n: int, passing: str, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """Tiles are loaded just before the first product that reads them: loads and products overlap."""
    _, a, b = (region.source for region in description.body.block.reads)
    rows, weights = (_PASS if passing == operand else LOAD for operand in ("rows", "weights"))
    steps = []
    for i in range(m):
        for j in range(n):
            if j == 0:
                steps.append(called(f"{rows}_{m * n + i}", *_rows(a, [i * TILE, 0], 0)))
            if i == 0:
                steps.append(called(f"{weights}_{m * n + m + j}", *_rows(b, [j, 0, 0, 0], 1)))
            steps.append(called(f"{_HELPER}{instruction}_{i * n + j}_{m * n + i}_{m * n + m + j}"))
    return _with_body(description, steps)


def _added(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Add the products with weights ``[n, depth, 16, size]``."""
    n, depth, _, size = b.shape
    return c + a.astype(c.dtype) @ b.astype(c.dtype).transpose(1, 3, 0, 2).reshape(depth * size, n * TILE)


for _form, (_types, _instruction, _feature, _tolerance) in _FORMS.items():
    for _m, _n in SHAPES:
        declare(
            *(Intrinsic(
                PREFIX + product(_form, _m, _n, _depth, _passing), _types, ((_feature,),),
                partial(_products, _types, _m, _n, _depth), partial(_multiplied, _instruction, _m, _n, _passing),
                _added, _instruction, tolerance=_tolerance,
            ) for _depth in DEPTHS for _passing in (PASSING if _depth == DEPTHS[0] else PASSING[:1])),
            Intrinsic(
                PREFIX + zero(_types[2], _m, _n), _types[2:], (("amx-tile",),), partial(_zeros, _types[2], _m, _n),
                partial(_zeroed, _m, _n), np.zeros_like, "tilezero",
            ),
            *(Intrinsic(
                PREFIX + store(_types[2], _m, _n, _scope), (_types[2], _types[2]), (("amx-tile",),),
                partial(_stores, _types[2], _m, _n, _scope), partial(_stored, _m, _n), lambda c, _: c, "tilestored",
            ) for _scope in ("global", "local")),
        )
