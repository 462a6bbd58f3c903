"""Tensor cores through ``mma.sync`` (sm_80 and later): fragments held by a warp, their loads, and their products.

A warp multiplies a tile of A, 16 rows by ``depth``, with a tile of B, ``depth`` by 16 columns, and adds to a tile of
16 by 16 sums: two instructions of 16 by 8. Every thread holds a part of each tile, its fragment, as the PTX ISA's
figures "mma.m16n8k16" and so on lay out (section "Warp Level Matrix Multiply-Accumulate Instructions"). With ``width``
elements in a register of 32 bits, ``depth`` is 8 times ``width``, and all types share one layout:

* A ``[16, depth]``: the element ``(m, k)`` belongs to thread ``4 (m % 8) + (k % 4w) / w``, where it is the element
  ``2w (k / 4w) + w (m / 8) + k % w``;
* B, by columns ``[16, depth]``: ``(n, k)`` belongs to thread ``4 (n % 8) + (k % 4w) / w``, where it is the element
  ``2w (n / 8) + w (k / 4w) + k % w``;
* the sums ``[16, 16]``: ``(m, n)`` belongs to thread ``4 (m % 8) + (n % 8) / 2``, where it is the element
  ``4 (n / 8) + 2 (m / 8) + n % 2``.

Fragments are buffers ``[32, elements of a thread]`` of TVM's scope ``warp``. ``ldmatrix`` fetches four blocks of 8 rows
of 16 bytes from shared memory, and transposes them where elements have 16 bits and memory runs along ``m`` or ``n``;
elements of 32 bits are then fetched one by one. Operands of float32 are rounded to tf32 as they are fetched, to nearest
with ties away from zero (``cvt.rna``): the tensor cores would cut off what they do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from schedules.intrin import PREFIX, Intrinsic, declare

__all__ = [
    "KINDS", "TENSOR_FLOAT", "TILE", "WARP", "Kind", "fetch_offset", "kind_of", "load", "place", "place_sum", "point",
    "product", "rounded", "store", "zero",
]

TILE, WARP = 16, 32
_SHARED = "shared.dyn"
_HALF = TILE // 2


@dataclass(frozen=True)
class Kind:
    """The operands' type, the sums', how names call it, how PTX and TVM do, and what the instruction's name says."""

    operand: str
    result: str
    name: str
    ptx: str
    width: int  # elements in 32 bits

    @property
    def depth(self) -> int:
        """Products that an instruction adds to each sum."""
        return 8 * self.width

    @property
    def held(self) -> int:
        """Elements of an operand's tile in a thread."""
        return TILE * self.depth // WARP

    @property
    def step(self) -> int:
        """Elements that a tile's place in shared memory is a multiple of."""
        return TILE if self.width > 1 else 4


#: operands of float32, whose products are exact no more: never taken unless the function says that it may be
TENSOR_FLOAT = Kind("float32", "float32", "tf32", "tf32", 1)
KINDS = (
    Kind("float16", "float32", "f16", "fp16", 2),
    Kind("bfloat16", "float32", "bf16", "bf16", 2),
    Kind("int8", "int32", "s8", "int8", 4),
    TENSOR_FLOAT,
)


def kind_of(operand: str, result: str, *, tf32: bool = False) -> Kind | None:
    """The kind that multiplies ``operand`` and adds up in ``result``; None without one. ``tf32``: whether operands of
    float32 may be rounded."""
    return next((k for k in KINDS if (k.operand, k.result) == (operand, result) and (tf32 or k != TENSOR_FLOAT)), None)


_ROUND = """
__forceinline__ __device__ float mlc_to_tf32(float x) {
  unsigned int bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return *(float*)&bits;
}
"""


def rounded(value: Any) -> Any:
    """A float32 rounded to tf32, in a kernel's code."""
    from tvm.backend.cuda.op import cuda_func_call

    return cuda_func_call("mlc_to_tf32", value, source_code=_ROUND, return_type="float32")


def load(kind: Kind, side: str, transposed: bool) -> str:
    """What loads a fragment of A or B (``side``) from memory that runs along ``k``, or else across it."""
    return f"mma_load_{side}_{kind.name}{'_transposed' if transposed else ''}"


def product(kind: Kind, *, b_first: bool = False) -> str:
    """What adds a product of two fragments to a third; the function that it is taken for may name B's factor first."""
    return f"mma_{kind.name}{'_b_first' if b_first else ''}"


def zero(kind: Kind) -> str:
    """What clears a fragment of sums."""
    return f"mma_zero_{kind.result}"


def store(kind: Kind) -> str:
    """What writes a fragment of sums to shared memory."""
    return f"mma_store_{kind.result}"


_Place = Callable[[Any, Any], tuple[Any, Any]]


def _place_a(width: int, m: Any, k: Any) -> tuple[Any, Any]:
    """The thread of an element of A, and which of its elements it is."""
    chunk = 4 * width
    return 4 * (m % 8) + k % chunk // width, 2 * width * (k // chunk) + width * (m // 8) + k % width


def _place_b(width: int, n: Any, k: Any) -> tuple[Any, Any]:
    chunk = 4 * width
    return 4 * (n % 8) + k % chunk // width, 2 * width * (n // 8) + width * (k // chunk) + k % width


def place_sum(m: Any, n: Any) -> tuple[Any, Any]:
    """The thread that holds a sum of a tile, and which of its elements it is."""
    return 4 * (m % 8) + n % 8 // 2, 4 * (n // 8) + 2 * (m // 8) + n % 2


def place(kind: Kind, side: str, row: Any, k: Any) -> tuple[Any, Any]:
    """The thread that holds an element of an operand's tile, and which of its elements it is; ``row`` is ``m`` of A
    and ``n`` of B."""
    return (_place_a if side == "a" else _place_b)(kind.width, row, k)


def _element_of_sum(thread: Any, i: Any) -> tuple[Any, Any]:
    """The inverse of :func:`place_sum`."""
    return 8 * (i % 4 // 2) + thread // 4, 8 * (i // 4) + thread % 4 * 2 + i % 2


def _loads(kind: Kind, side: str, transposed: bool) -> tirx.PrimFunc:
    of = partial(place, kind, side)
    rows, columns = (kind.depth, TILE) if transposed else (TILE, kind.depth)

    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle) -> None:
        memory = T.match_buffer(x, (rows, columns), kind.operand, align=64, offset_factor=kind.step, scope=_SHARED)
        fragment = T.match_buffer(y, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        with T.sblock("root"):
            T.reads(memory[0:rows, 0:columns])
            T.writes(fragment[0:WARP, 0 : kind.held])
            for i, j in T.grid(rows, columns):
                with T.sblock("load"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    row, k = T.meta_var((vj, vi) if transposed else (vi, vj))
                    thread, element = T.meta_var(of(row, k))
                    T.reads(memory[vi, vj])
                    T.writes(fragment[thread, element])
                    fragment[thread, element] = memory[vi, vj]

    return description


def fetch_offset(kind: Kind, side: str, transposed: bool, lane: Any, stride: Any) -> Any:
    """Where in a tile with rows ``stride`` elements apart the 16 bytes begin whose place a lane names to ``ldmatrix``:
    eight lanes name the rows of a block, four blocks make the fragment."""
    chunk = 4 * kind.width
    if (side == "a") != transposed:  # the second block of eight lanes has the next rows, or columns
        return stride * (lane % 16) + chunk * (lane // 16)
    return stride * (lane % 8 + 8 * (lane // 16)) + chunk * (lane % 16 // 8)


def point(side: str, lane: Any, i: Any) -> tuple[Any, Any]:
    """The row and ``k`` of an element of a fragment of float32: the inverse of :func:`place`."""
    by_row, by_k = (i % 2, i // 2) if side == "a" else (i // 2, i % 2)
    return lane // 4 + 8 * by_row, lane % 4 + 4 * by_k


def _load_singly(side: str, _description: tirx.PrimFunc) -> tirx.PrimFunc:
    """Loads of float32 from memory that runs along ``m`` or ``n``."""
    kind = TENSOR_FLOAT

    @T.prim_func(s_tir=True)
    def implementation(x: T.handle, y: T.handle) -> None:
        stride = T.int32()
        one = T.int32()
        memory = T.match_buffer(
            x, (kind.depth, TILE), kind.operand, align=64, offset_factor=kind.step, scope=_SHARED, strides=[stride, one]
        )
        fragment = T.match_buffer(y, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        with T.sblock("root"):
            T.reads(memory[0 : kind.depth, 0:TILE])
            T.writes(fragment[0:WARP, 0 : kind.held])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for i in T.unroll(kind.held):
                    row, k = T.meta_var(point(side, lane, i))
                    fragment[lane, i] = rounded(memory[k, row])

    return implementation


def _load_rounded(side: str, description: tirx.PrimFunc) -> tirx.PrimFunc:
    """Loads of float32 from memory that runs along ``k``."""
    kind = TENSOR_FLOAT
    offset = partial(fetch_offset, kind, side, False)

    @T.prim_func(s_tir=True)
    def implementation(x: T.handle, y: T.handle) -> None:
        stride = T.int32()
        one = T.int32()
        memory = T.match_buffer(
            x, (TILE, kind.depth), kind.operand, align=64, offset_factor=kind.step, scope=_SHARED, strides=[stride, one]
        )
        fragment = T.match_buffer(y, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        with T.sblock("root"):
            T.reads(memory[0:TILE, 0 : kind.depth])
            T.writes(fragment[0:WARP, 0 : kind.held])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.ldmatrix(
                        False, 4, ".b16", fragment.data, fragment.elem_offset + kind.held * lane,
                        memory.access_ptr("r"), offset(lane, stride), dtype=kind.operand,
                    )
                )
                for i in T.unroll(kind.held):
                    fragment[lane, i] = rounded(fragment[lane, i])

    return implementation


def _load(kind: Kind, side: str, transposed: bool, description: tirx.PrimFunc) -> tirx.PrimFunc:
    if kind == TENSOR_FLOAT:
        return _load_singly(side, description) if transposed else _load_rounded(side, description)
    rows, columns = (kind.depth, TILE) if transposed else (TILE, kind.depth)
    offset = partial(fetch_offset, kind, side, transposed)

    @T.prim_func(s_tir=True)
    def implementation(x: T.handle, y: T.handle) -> None:
        stride = T.int32()
        one = T.int32()
        memory = T.match_buffer(
            x, (rows, columns), kind.operand, align=64, offset_factor=16, scope=_SHARED, strides=[stride, one]
        )
        fragment = T.match_buffer(y, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        with T.sblock("root"):
            T.reads(memory[0:rows, 0:columns])
            T.writes(fragment[0:WARP, 0 : kind.held])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.ldmatrix(
                        transposed, 4, ".b16", fragment.data, fragment.elem_offset + kind.held * lane,
                        memory.access_ptr("r"), offset(lane, stride), dtype=kind.operand,
                    )
                )

    return implementation


def _products(kind: Kind, b_first: bool) -> tirx.PrimFunc:
    of_x, of_y = (partial(place, kind, side) for side in ("ba" if b_first else "ab"))

    @T.prim_func(s_tir=True)
    def description(a_handle: T.handle, b_handle: T.handle, c_handle: T.handle) -> None:
        a = T.match_buffer(a_handle, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        b = T.match_buffer(b_handle, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        c = T.match_buffer(c_handle, (WARP, 8), kind.result, align=64, offset_factor=8, scope="warp")
        x, y = T.meta_var((b, a) if b_first else (a, b))
        with T.sblock("root"):
            T.reads(c[0:WARP, 0:8], x[0:WARP, 0 : kind.held], y[0:WARP, 0 : kind.held])
            T.writes(c[0:WARP, 0:8])
            for m, n, k in T.grid(TILE, TILE, kind.depth):
                with T.sblock("product"):
                    vm, vn, vk = T.axis.remap("SSR", [m, n, k])
                    xt, xi = T.meta_var(of_x(vn if b_first else vm, vk))
                    yt, yi = T.meta_var(of_y(vm if b_first else vn, vk))
                    ct, ci = T.meta_var(place_sum(vm, vn))
                    T.reads(c[ct, ci], x[xt, xi], y[yt, yi])
                    T.writes(c[ct, ci])
                    c[ct, ci] = c[ct, ci] + T.Cast(kind.result, x[xt, xi]) * T.Cast(kind.result, y[yt, yi])

    return description


def _product(kind: Kind, _description: tirx.PrimFunc) -> tirx.PrimFunc:
    shape, half = f"m16n8k{kind.depth}", kind.held // 2
    result = {"float32": "fp32", "int32": "int32"}[kind.result]

    @T.prim_func(s_tir=True)
    def implementation(x: T.handle, y: T.handle, z: T.handle) -> None:
        a = T.match_buffer(x, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        b = T.match_buffer(y, (WARP, kind.held), kind.operand, align=64, offset_factor=16, scope="warp")
        c = T.match_buffer(z, (WARP, 8), kind.result, align=64, offset_factor=8, scope="warp")
        with T.sblock("root"):
            T.reads(c[0:WARP, 0:8], a[0:WARP, 0 : kind.held], b[0:WARP, 0 : kind.held])
            T.writes(c[0:WARP, 0:8])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.mma(
                        shape, "row", "col", kind.ptx, kind.ptx, result, a.data, a.elem_offset + lane * kind.held,
                        b.data, b.elem_offset + lane * kind.held, c.data, c.elem_offset + lane * 8, False,
                        dtype=kind.result,
                    )
                )
                T.evaluate(
                    T.ptx_legacy.mma(
                        shape, "row", "col", kind.ptx, kind.ptx, result, a.data, a.elem_offset + lane * kind.held,
                        b.data, b.elem_offset + lane * kind.held + half, c.data, c.elem_offset + lane * 8 + 4, False,
                        dtype=kind.result,
                    )
                )

    return implementation


def _zeros(dtype: str) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle) -> None:
        c = T.match_buffer(x, (WARP, 8), dtype, align=64, offset_factor=8, scope="warp")
        with T.sblock("root"):
            T.reads()
            T.writes(c[0:WARP, 0:8])
            for m, n in T.grid(TILE, TILE):
                with T.sblock("zero"):
                    vm, vn = T.axis.remap("SS", [m, n])
                    thread, element = T.meta_var(place_sum(vm, vn))
                    T.reads()
                    T.writes(c[thread, element])
                    c[thread, element] = T.Cast(dtype, 0)

    return description


def _zero(dtype: str, _description: tirx.PrimFunc) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def implementation(x: T.handle) -> None:
        c = T.match_buffer(x, (WARP, 8), dtype, align=64, offset_factor=8, scope="warp")
        with T.sblock("root"):
            T.reads()
            T.writes(c[0:WARP, 0:8])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for i in T.unroll(8):  # one by one: TVM makes pairs of what is only ever accessed as pairs
                    c[lane, i] = T.Cast(dtype, 0)

    return implementation


def _stores(dtype: str) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def description(x: T.handle, y: T.handle) -> None:
        c = T.match_buffer(x, (WARP, 8), dtype, align=64, offset_factor=8, scope="warp")
        memory = T.match_buffer(y, (TILE, TILE), dtype, align=64, offset_factor=4, scope=_SHARED)
        with T.sblock("root"):
            T.reads(c[0:WARP, 0:8])
            T.writes(memory[0:TILE, 0:TILE])
            for m, n in T.grid(TILE, TILE):
                with T.sblock("store"):
                    vm, vn = T.axis.remap("SS", [m, n])
                    thread, element = T.meta_var(place_sum(vm, vn))
                    T.reads(c[thread, element])
                    T.writes(memory[vm, vn])
                    memory[vm, vn] = c[thread, element]

    return description


def _store(dtype: str, _description: tirx.PrimFunc) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def implementation(x: T.handle, y: T.handle) -> None:
        stride = T.int32()
        one = T.int32()
        c = T.match_buffer(x, (WARP, 8), dtype, align=64, offset_factor=8, scope="warp")
        memory = T.match_buffer(y, (TILE, TILE), dtype, align=64, offset_factor=4, scope=_SHARED, strides=[stride, one])
        with T.sblock("root"):
            T.reads(c[0:WARP, 0:8])
            T.writes(memory[0:TILE, 0:TILE])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for pair in T.unroll(4):
                    for i in T.vectorized(2):
                        row, column = T.meta_var(_element_of_sum(lane, pair * 2 + i))
                        memory[row, column] = c[lane, pair * 2 + i]

    return implementation


def _grid(of: _Place, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Thread and element of every point of a tile."""
    return of(*np.indices((rows, columns)))


def _loaded(kind: Kind, side: str, transposed: bool, memory: np.ndarray, old: np.ndarray) -> np.ndarray:
    tile = memory.T if transposed else memory
    result = np.empty_like(old)
    result[_grid(partial(place, kind, side), TILE, kind.depth)] = tile
    return result


def _multiplied(kind: Kind, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    tile_a = a[_grid(partial(place, kind, "a"), TILE, kind.depth)]
    tile_b = b[_grid(partial(place, kind, "b"), TILE, kind.depth)]
    result = c.copy()
    result[_grid(place_sum, TILE, TILE)] += tile_a.astype(c.dtype) @ tile_b.astype(c.dtype).T
    return result


def _stored(c: np.ndarray, _old: np.ndarray) -> np.ndarray:
    return c[_grid(place_sum, TILE, TILE)]


_SM80 = (("sm_80",),)
#: products of 16-bit floats are exact and their sums are not rounded to nearest (PTX ISA: "at least single precision")
_ROUNDED = 2e-6
#: what rounding to tf32 changes at most
_CUT = 2.0**-11


def _loaded_by(kind: Kind, side: str, transposed: bool) -> str:
    """What stands in the machine code of a load."""
    if kind == TENSOR_FLOAT:
        return r"cvt\.rna\.tf32\.f32" if transposed else r"(?s)cvt\.rna\.tf32\.f32.*ldmatrix\.sync\.aligned\.m8n8\.x4"
    return r"ldmatrix\.sync\.aligned\.m8n8\.x4" + (r"\.trans" if transposed else "")


for _kind in KINDS:
    _types = (_kind.operand, _kind.operand, _kind.result)
    declare(
        *(
            Intrinsic(
                PREFIX + product(_kind, b_first=_b_first), _types, _SM80, partial(_products, _kind, _b_first),
                partial(_product, _kind), partial(_multiplied, _kind), rf"mma\.sync\.aligned\.m16n8k{_kind.depth}",
                kind="cuda",
                tolerance={"s8": 0.0, "tf32": 4 * _CUT}.get(_kind.name, _ROUNDED),
            )
            for _b_first in (False, True)
        ),
        *(
            Intrinsic(
                PREFIX + load(_kind, _side, _transposed), _types[:2], _SM80, partial(_loads, _kind, _side, _transposed),
                partial(_load, _kind, _side, _transposed), partial(_loaded, _kind, _side, _transposed),
                _loaded_by(_kind, _side, _transposed), kind="cuda", tolerance=_CUT if _kind == TENSOR_FLOAT else 0.0,
            )
            for _side in "ab" for _transposed in ((False, True) if _kind.width < 4 else (False,))
        ),
    )
for _dtype in ("float32", "int32"):
    declare(
        Intrinsic(
            f"{PREFIX}mma_zero_{_dtype}", (_dtype,), _SM80, partial(_zeros, _dtype), partial(_zero, _dtype),
            np.zeros_like, "= 0", kind="cuda",
        ),
        Intrinsic(
            f"{PREFIX}mma_store_{_dtype}", (_dtype, _dtype), _SM80, partial(_stores, _dtype), partial(_store, _dtype),
            _stored, r"\*\(\w+2\*\)", kind="cuda",
        ),
    )
