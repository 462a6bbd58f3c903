"""Constant extents for the local buffers of functions with free sizes.

TVM derives a buffer's extents from what a block touches, without knowing the ranges: ``T.min((n - 1) // 16 + 1, 1) *
16`` is 16 for every ``n`` from 1 on, and a partial tile may have any extent for it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import replaced, walk
from schedules.free import SIZES, variables
from schedules.prefetch import insert_prefetches
from schedules.tail_tiles import whole_tiles

__all__ = ["compacted"]

#: elements of a local buffer that is a register tile, at most
_MAX_TILE = 4096

_TO_OPAQUE = tvm.transform.Sequential([
    s_tir.transform.CanonicalizeLoop(), s_tir.transform.LowerCrossThreadReduction(), s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(), s_tir.transform.ConvertBlocksToOpaque(),
])


def compacted(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with opaque blocks and compact buffers, and numbers for the extents of local ones."""
    opaque = _TO_OPAQUE(tvm.IRModule({"main": func, "tiles": insert_prefetches(whole_tiles(func))}))
    compact = s_tir.transform.CompactBufferAllocation()
    try:
        found = compact(opaque)["tiles"]
    except ValueError:  # to it a size is any number of 32 bits, and what it multiplies that by may need more
        opaque = tvm.IRModule({var: _clamped(each) for var, each in opaque.functions_items()})
        found = compact(opaque)["tiles"]
    analyzer = tvm.sym.Analyzer()
    for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True):
        bounds = (tirx.const(int(end), str(var.ty)) for end in (low, int(high) + 1))
        analyzer.bind(var, tvm.ir.Range(*bounds))
    made, all_given = _buffers(found), _buffers(opaque["tiles"])
    wrong = [_is_wrong(*pair, analyzer) for pair in zip(made, all_given, strict=True)]
    if not any(wrong):
        return found
    whole = compact(tvm.IRModule({"main": _without_predicates(opaque["main"])}))["main"]  # its tiles are all full
    image: dict[tirx.Var, tirx.Var] = {}
    for buffer, full, given, is_wrong in zip(made, _buffers(whole), all_given, wrong, strict=True):
        if is_wrong:
            if str(buffer.scope()) == "local":
                # along an axis that TVM has left whole, a tile does not begin at 0
                ends = zip(buffer.shape, full.shape, given.shape, strict=True)
                extents = [own if analyzer.can_prove_equal(own, all_of) else extent for own, extent, all_of in ends]
                shape = [tirx.const(_largest(extent, analyzer), str(extent.ty)) for extent in extents]
            else:  # what TVM has no bound of is as long as the whole axis
                pairs = zip(full.shape, given.shape, strict=True)
                shape = [all_of if _exceeds(extent, all_of, analyzer) else extent for extent, all_of in pairs]
            image[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), name=str(buffer.name), scope=buffer.scope())
    return found.with_body(replaced(found.body, image))


def _clamped(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its free sizes written so that their ranges can be read off."""
    image = {var: tirx.max(tirx.min(var, tirx.const(int(high), str(var.ty))), tirx.const(int(low), str(var.ty)))
             for var, (low, high, _) in zip(variables(func), func.attrs[SIZES], strict=True)}
    return func.with_body(replaced(func.body, image))


def _buffers(func: tirx.PrimFunc) -> list[tirx.Var]:
    """The buffers that a function's blocks allocate."""
    found: list[tirx.Var] = []
    walk(func.body, (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)))
    return found


def _largest(extent: Any, analyzer: Any) -> int:
    return int(analyzer.const_int_bound(analyzer.simplify(extent)).max_value)


def _is_wrong(buffer: tirx.Var, given: tirx.Var, analyzer: Any) -> bool:
    """Whether a compact buffer is larger than it need be: a local one is no small tile, or another has more of an axis
    than the buffer that was ``given``. A chunk of as many rows as two divisions are apart has any number to TVM."""
    if str(buffer.scope()) == "local":
        return not _is_small(buffer)
    return any(_exceeds(*pair, analyzer) for pair in zip(buffer.shape, given.shape, strict=True))


def _exceeds(extent: Any, whole: Any, analyzer: Any) -> bool:
    """Whether an extent is a number that the ``whole`` axis does not reach."""
    return isinstance(extent, tirx.IntImm) and int(extent) > _largest(whole, analyzer)


def _is_small(buffer: tirx.Var) -> bool:
    """Whether a local buffer has numbers for extents, as a tile has."""
    return all(isinstance(e, tirx.IntImm) for e in buffer.shape) and prod(map(int, buffer.shape)) <= _MAX_TILE


def _without_predicates(func: tirx.PrimFunc) -> tirx.PrimFunc:
    always = tirx.const(True, "bool")

    def without(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        return s_tir.SBlockRealize(realize.iter_values, always, realize.block)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, without)))
