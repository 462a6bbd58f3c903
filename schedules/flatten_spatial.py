"""Fuses rows and columns of free size into one axis, for functions that treat each pixel independently of its position.

A pointwise convolution of ``h * w`` pixels is one of a line of ``p``: tiles go on from one row to the next, and there
is one free size instead of two. Tensors lie in memory as they did; :func:`restored` gives the lowered function the
parameters of its callers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from schedules.analysis import evaluate, replaced, uses, walk
from schedules.free import SIZES, variables

__all__ = ["FLAT", "FUSED", "flattened", "like", "restored", "with_indices"]

#: the attribute of such a function: for each parameter the axis of the rows, before that of the columns; -1 for none
FLAT = "mlc.flat"
#: that of a function with one axis in place of several (:mod:`schedules.flatten_elementwise`), of which :data:`FLAT` is
#: then the first: the extent of each, 0 for a free one
FUSED = "mlc.fused"

#: annotations of blocks that gain
_OPS = ("conv2d_nchwc", "conv2d_nchwc_integer", "conv2d_nchwc_bytes", "conv2d_nchwc_bfloat")


def flattened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with free sizes whose images have one row of all their pixels; the same object where a pixel depends
    on others, nothing is convolved, or rows and columns are not both free."""
    found = _blocks(func) if func.attrs and SIZES in func.attrs else []
    if not any(str(block.annotations.get("mlc.op", "")) in _OPS for block in found):
        return func
    sides = _sides(func.params[-1], variables(func))
    if sides is None:
        return func
    images = _Images(func, sides)
    return images.flat() if images.known and all(map(images.is_pointwise, found)) else func


def restored(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the parameters that its callers give: rows and columns apart, or all the axes that were fused.
    The one free size that stood for them is their product."""
    if not (func.attrs and FLAT in func.attrs):
        return func
    fused = [int(extent) for extent in func.attrs[FUSED]] if FUSED in func.attrs else None
    axes: list[Any] = []
    image, params = {}, []
    for param, axis in zip(func.params, map(int, func.attrs[FLAT]), strict=True):
        if axis < 0:
            params.append(param)
            continue
        last = axis if fused else axis + 1  # of images the axis of rows is left, of one row
        whole = param.shape[last]
        if not axes:
            axes = [tirx.const(extent, str(whole.ty)) if extent else tirx.Var(f"size{number}", str(whole.ty))
                    for number, extent in enumerate(fused or [0, 0])]
            if isinstance(whole, tirx.Var):
                image[whole] = reduce(mul, axes)
        params.append(like(param, [*param.shape[:axis], *axes, *param.shape[last + 1 :]]))
        image[param] = params[-1]
    body = func.body if fused is None else _apart(func, image, len(axes))
    made = tirx.PrimFunc(params, replaced(body, image), func.ret_type)
    for key, value in dict(func.attrs).items():
        made = made.with_attr(key, value) if key not in (FLAT, FUSED, SIZES) else made
    return made


def _apart(func: tirx.PrimFunc, image: Mapping[Any, Any], count: int) -> tirx.Stmt:
    """The body of a function whose parameters are their ``image``, with ``count`` axes in place of the fused one: a
    place along the last of them runs on over all."""
    places = {param: int(axis) for param, axis in zip(func.params, func.attrs[FLAT], strict=True) if int(axis) >= 0}
    one = tvm.ir.Range.from_min_extent(0, 1)

    def whole(indices: Sequence[Any], tensor: Any, nothing: Any) -> list[Any]:
        axis = places[tensor]
        return [*indices[:axis], *[nothing] * (count - 1), *indices[axis:]]

    def access(each: Any) -> Any:
        tensor = each.source if isinstance(each, TensorLoad) else each.buffer
        if tensor not in places:
            return each
        indices = whole(each.indices, tensor, tirx.const(0, str(tensor.shape[places[tensor]].ty)))
        if isinstance(each, TensorLoad):
            return tirx.BufferLoad(image[tensor], indices)
        return tirx.BufferStore(image[tensor], each.value, indices)

    def regions(found: Sequence[Any]) -> list[Any]:
        made = []
        for each in found:
            ranges = [tvm.ir.Range.from_min_extent(*(
                tvm_ffi.structural_map(end, (TensorLoad, access)) for end in (r.min, r.extent))) for r in each.region]
            if each.source in places:
                ranges = whole(ranges, each.source, one)
            made.append(tirx.BufferRegion(image.get(each.source, each.source), ranges))
        return made

    def block(each: s_tir.SBlock) -> s_tir.SBlock:
        return s_tir.SBlock(each.iter_vars, regions(each.reads), regions(each.writes), each.name_hint, each.body,
                            each.init, each.alloc_buffers, each.match_buffers, each.annotations)

    return tvm_ffi.structural_map(func.body, [(TensorLoad, access), (tirx.BufferStore, access), (s_tir.SBlock, block)])


def _blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    """The blocks that compute something."""
    found: list[s_tir.SBlock] = []
    walk(func.body, (s_tir.SBlock, found.append))
    return [block for block in found if len(block.iter_vars)]


def _sides(tensor: Any, free: Sequence[tirx.Var]) -> tuple[Any, Any] | None:
    """The sizes of rows and columns where these two axes of a tensor are free, one after the other."""
    axes = [axis for axis, size in enumerate(tensor.shape) if uses(size, free)]
    if len(axes) != 2 or axes[1] != axes[0] + 1:
        return None
    rows, columns = (tensor.shape[axis] for axis in axes)
    return None if tvm.sym.Analyzer().can_prove_equal(rows, columns) else (rows, columns)


def like(tensor: Any, shape: Sequence[Any]) -> Any:
    """A tensor of another ``shape``, alike otherwise."""
    return tirx.decl_buffer(shape, str(tensor.dtype), name=str(tensor.name), scope=str(tensor.scope()),
                            data_alignment=int(tensor.data_alignment))


class _Images:
    """The tensors and axes of a function that are of ``sides``."""

    def __init__(self, func: tirx.PrimFunc, sides: tuple[Any, Any]) -> None:
        self._func, self._sides, self._free = func, sides, variables(func)
        self._analyzer = tvm.sym.Analyzer()
        root = func.body.block
        tensors = [*(p for p in func.params if not isinstance(p.ty, tvm.ir.PrimType)), *root.alloc_buffers]
        self._axis = {tensor: self._axis_of(tensor.shape) for tensor in tensors}
        #: whether every tensor has these sides, or none that are free
        self.known = all(axis is not None for axis in self._axis.values())

    def _side(self, size: Any) -> int | None:
        """0 for the size of rows, 1 for that of columns."""
        if not uses(size, self._free):
            return None
        return next((i for i, side in enumerate(self._sides) if self._analyzer.can_prove_equal(side, size)), None)

    def _axis_of(self, shape: Sequence[Any]) -> int | None:
        """The axis of rows, -1 where nothing is free, None where something else is."""
        axes = [axis for axis, size in enumerate(shape) if uses(size, self._free)]
        if not axes:
            return -1
        whole = len(axes) == 2 and axes[1] == axes[0] + 1 and [self._side(shape[axis]) for axis in axes] == [0, 1]
        return axes[0] if whole else None

    def is_pointwise(self, block: s_tir.SBlock) -> bool:
        """Whether a block reads and writes images at its own pixel alone."""
        own: list[tirx.Var | None] = [None, None]
        single = {}
        for each in block.iter_vars:
            side = self._side(each.dom.extent)
            if side is not None:
                own[side] = each.var
            elif uses(each.dom.extent, self._free):
                return False
            elif isinstance(each.dom.extent, tirx.IntImm) and int(each.dom.extent) == 1:
                single[each.var] = tirx.const(0, str(each.var.ty))
        if None in own:
            return False
        alike: list[bool] = []

        def look(access: Any) -> Any:
            axis = self._axis.get(access.source if isinstance(access, TensorLoad) else access.buffer)
            if axis is None:
                alike.append(False)
                return access
            indices = list(access.indices)
            for side in (0, 1) if axis >= 0 else ():
                index = self._analyzer.simplify(replaced(indices[axis + side], single))
                alike.append(index.same_as(own[side]))
                indices[axis + side] = tirx.const(0, str(index.ty))
            return with_indices(access, indices)

        left = [tvm_ffi.structural_map(part, [(TensorLoad, look), (tirx.BufferStore, look)])
                for part in (block.body, block.init) if part is not None]
        return all(alike) and not any(uses(part, own) for part in left)

    def flat(self) -> tirx.PrimFunc:
        """The function with one row of pixels."""
        func = self._func
        kind = str(self._sides[1].ty)
        pixels, one = tirx.Var("pixels", kind), tirx.const(1, kind)
        extents = (one, pixels)
        image = {
            tensor: like(tensor, [*tensor.shape[:axis], *extents, *tensor.shape[axis + 2 :]])
            for tensor, axis in self._axis.items() if axis is not None and axis >= 0
        }

        def loop(each: tirx.For) -> tirx.For:
            side = self._side(each.extent)
            extent = each.extent if side is None else extents[side]
            return tirx.For(each.loop_var, each.min, extent, each.kind, each.body, annotations=dict(each.annotations))

        def block(each: s_tir.SBlock) -> s_tir.SBlock:
            axes = [axis if (side := self._side(axis.dom.extent)) is None else tirx.IterVar(
                tvm.ir.Range.from_min_extent(axis.dom.min, extents[side]), axis.var, axis.iter_type)
                for axis in each.iter_vars]
            allocated = [image.get(tensor, tensor) for tensor in each.alloc_buffers]
            return s_tir.SBlock(axes, each.reads, each.writes, each.name_hint, each.body, each.init, allocated,
                                each.match_buffers, each.annotations)

        body = tvm_ffi.structural_map(func.body, [(tirx.For, loop), (s_tir.SBlock, block)])
        params = [image.get(param, param) for param in func.params]
        made = tirx.PrimFunc(params, replaced(body, image), func.ret_type)
        known = dict(zip(self._free, func.attrs[SIZES], strict=True))
        ends = [{var: int(sizes[i]) for var, sizes in known.items()} for i in range(3)]
        area = [int(evaluate(self._sides[0], each)) * int(evaluate(self._sides[1], each)) for each in ends]
        sizes = [area if var.same_as(pixels) else list(known[var]) for var in variables(made)]
        for key, value in dict(func.attrs).items():
            made = made.with_attr(key, value)
        axes = [self._axis.get(param, -1) for param in func.params]
        return made.with_attr(SIZES, sizes).with_attr(FLAT, axes)


def with_indices(access: Any, indices: Sequence[Any]) -> Any:
    """The load or store at other ``indices``."""
    if isinstance(access, TensorLoad):
        return tirx.BufferLoad(access.source, list(indices))
    return tirx.BufferStore(access.buffer, access.value, list(indices))
