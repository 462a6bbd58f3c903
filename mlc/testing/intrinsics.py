"""The test of a tensor intrinsic, derived from its declaration.

The loops that it describes and the function that stands for them are built and run on the same data, random with
extremes, and compared with the entry's numpy; so any entry is tested, and on whatever can run its instruction. What a
warp of a GPU does together becomes a kernel of one warp, between copies from and to ordinary memory, and so does what
is done with the tiles of a matrix unit, which are configured for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

    from schedules.intrin import Intrinsic

__all__ = ["in_tiles", "is_for_warps", "kernel_of", "largest_errors", "on_cpu"]

#: builds the one function of a module, calls it on arrays, and returns them as they are afterwards
Run = Callable[["tvm.IRModule", list[np.ndarray]], list[np.ndarray]]

#: sums start within this, so that none of them overflows
_SUMS = 1 << 20


def largest_errors(intrinsic: Intrinsic, run: Run, seed: int = 0) -> tuple[float, float]:
    """How far the description's and the implementation's results are from the specification, relative to the largest
    element. Raises ``ValueError`` where the description has other types than the entry."""
    import tvm

    description = intrinsic.description()
    types = tuple(str(buffer.dtype) for buffer in description.params)
    if types != intrinsic.types:
        raise ValueError(f"{intrinsic.name} must describe a function of its types {intrinsic.types}, got {types}")
    rng = np.random.default_rng(seed)
    shapes = [[int(extent) for extent in buffer.shape] for buffer in description.params]
    arrays = [_data(rng, shape, dtype, sums=False) for shape, dtype in zip(shapes[:-1], types[:-1], strict=True)]
    arrays.append(_data(rng, shapes[-1], types[-1], sums=True))
    exact = [a.astype("int64" if a.dtype.kind in "iu" else "float64") for a in arrays]
    expected = np.asarray(intrinsic.specification(*exact))
    found = []
    for func in (description, in_tiles(intrinsic, intrinsic.implementation(description))):
        got = run(tvm.IRModule({"main": func}), [a.copy() for a in arrays])[-1]
        scale = np.abs(expected).max() or 1
        if got.shape != expected.shape:
            raise ValueError(f"{intrinsic.name} must specify a result of the shape {got.shape}, got {expected.shape}")
        found.append(float(np.abs(got.astype(expected.dtype) - expected).max() / scale))
    return found[0], found[1]


def is_for_warps(func: tirx.PrimFunc) -> bool:
    """Whether a function binds loops to threads."""
    import tvm_ffi
    from tvm import tirx as tir

    bound: list[bool] = []
    tvm_ffi.structural_walk(func.body, [(tir.For, lambda loop: bound.append(loop.thread_binding is not None))])
    return any(bound)


def on_cpu(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A description with all its buffers in ordinary memory."""
    return _with_buffers(func, lambda _scope: "global")[0]


def in_tiles(intrinsic: Intrinsic, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The implementation of an entry of :mod:`schedules.intrin.tiles` with its tiles configured, the sums read from
    ordinary memory before and written to it after it; that of any other entry as it is."""
    from tvm import s_tir
    from tvm import tirx as tir

    from schedules.intrin import tiles

    sizes = re.fullmatch(r"tiles_\D*?(?:32_)?(\d+)x(\d+)(?:x(\d+))?(?:_\w+)?", intrinsic.computes)
    if sizes is None:
        return func
    m, n, depth = (int(size or tiles.TILE) for size in sizes.groups())
    inner, buffers = _with_buffers(func, lambda _scope: "global", strided=True)
    sums = buffers[0] if "_store_" in intrinsic.computes else buffers[-1]
    steps = [tiles.called(f"{tiles.CONFIGURE}_{m}_{n}_{depth}"), tiles.loaded(sums, m, n), inner.body,
             *([] if "_store_" in intrinsic.computes else [tiles.written(sums, m, n)]), tiles.called(tiles.RELEASE)]
    root = s_tir.SBlock([], [], [], "root", tir.SeqStmt(steps))
    return tir.PrimFunc(buffers, s_tir.SBlockRealize([], True, root), attrs=func.attrs)


def kernel_of(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel of one warp that does what ``func`` does to buffers of its scopes; the parameters lie in ordinary
    memory."""
    from tvm import s_tir
    from tvm import tirx as tir

    inner, buffers = _with_buffers(func, lambda scope: scope)
    outer = [tir.decl_buffer(buffer.shape, buffer.dtype, f"outer{i}") for i, buffer in enumerate(buffers)]
    # threads that store a result for others need no old one, and nothing would keep the two apart
    old = [i for i, buffer in enumerate(buffers) if buffer is not buffers[-1] or buffer.scope() == "warp"]
    steps = [_copied(outer[i], buffers[i]) for i in old]
    steps += [inner.body, _copied(buffers[-1], outer[-1])]
    body = _bound(tir.Var("bx", "int32"), 1, "blockIdx.x", tir.SeqStmt(steps))
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    return tir.PrimFunc(outer, s_tir.SBlockRealize([], True, root)).with_attr("s_tir", True)


def _with_buffers(
    func: tirx.PrimFunc, scope: Callable[[str], str], strided: bool = False
) -> tuple[tirx.PrimFunc, list[tirx.Buffer]]:
    """The function on dense buffers of other scopes, which name their strides where they are to be ``strided``."""
    import tvm
    import tvm_ffi
    from tvm import tirx as tir

    buffers, known = [], {}
    for i, param in enumerate(func.params):
        shape = [int(extent) for extent in param.shape]
        steps = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        buffers.append(tir.decl_buffer(shape, param.dtype, f"inner{i}", scope=scope(param.scope()),
                                       strides=steps if strided else None))
        known[param] = buffers[-1]
        symbols = [*zip(param.strides, steps, strict=False), (param.elem_offset, 0)]
        known |= {symbol: tir.const(value, symbol.ty.dtype) for symbol, value in symbols if isinstance(symbol, tir.Var)}
    body = tvm_ffi.structural_map(func.body, (tvm.ir.Var, lambda var: known.get(var, var)), order="pre")
    return tir.PrimFunc(buffers, body, attrs=func.attrs), buffers


def _bound(variable: tirx.Var, extent: int, axis: str, body: tirx.Stmt) -> tirx.For:
    from tvm import tirx as tir

    binding = tir.IterVar(None, tir.Var(axis, "int32"), tir.IterVar.ThreadIndex, axis)
    return tir.For(variable, 0, extent, tir.ForKind.THREAD_BINDING, body, binding)


def _copied(source: tirx.Buffer, target: tirx.Buffer) -> tirx.Stmt:
    """Rows are dealt out to the lanes of a warp; of a fragment, each lane's own."""
    from tvm import tirx as tir

    rows, columns = (int(extent) for extent in source.shape)
    lane, turn, column = (tir.Var(name, "int32") for name in ("lane", "turn", "column"))
    row = turn * min(rows, 32) + lane
    store = tir.BufferStore(target, tir.BufferLoad(source, [row, column]), [row, column])
    across = tir.For(column, 0, columns, tir.ForKind.SERIAL, store)
    inside = tir.For(turn, 0, -(-rows // 32), tir.ForKind.SERIAL, across)
    return _bound(lane, 32, "threadIdx.x", inside if rows >= 32 else tir.IfThenElse(lane < rows, inside, None))


def _data(rng: np.random.Generator, shape: list[int], dtype: str, sums: bool) -> np.ndarray:
    if "int" not in dtype:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    low, high = (-_SUMS, _SUMS) if sums else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    extremes = rng.choice([low, high], shape)
    return np.where(rng.random(shape) < 1 / 3, extremes, rng.integers(low, high + 1, shape)).astype(dtype)
