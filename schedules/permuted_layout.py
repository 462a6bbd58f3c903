"""Checks that all accesses of a swizzled (permuted) shared buffer are swizzled.

The block annotation ``permuted_layout`` makes TVM permute 16-byte pieces within the rows of the shared buffers that the
block accesses, to avoid bank conflicts. It does not affect other blocks: if one block writes a buffer with it and
another reads without, the function computes something else.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from schedules.space import InvalidDecision

__all__ = ["check_permuted"]

_PERMUTED, _ALIGNED = "permuted_layout", "buffer_dim_align"


def check_permuted(func: tirx.PrimFunc) -> None:
    """Raise :class:`InvalidDecision` where some blocks that access a buffer in shared memory permute it and others do
    not, or where a permuted buffer's rows are spaced out (TVM reckons with whole rows)."""
    accesses: list[tuple[Any, bool, bool]] = []
    _visit(func.body, False, accesses)
    for buffer, permuted, _ in accesses:
        own = [(marked, spaced) for other, marked, spaced in accesses if other.same_as(buffer)]
        if permuted and not all(marked and not spaced for marked, spaced in own):
            raise InvalidDecision(f"every access of a permuted buffer must permute it, but not all of {buffer.name} do")


def _visit(stmt: tirx.Stmt, permuted: bool, accesses: list[tuple[Any, bool, bool]]) -> bool:
    """Note the accesses of innermost blocks; whether there was a block."""
    if isinstance(stmt, s_tir.SBlockRealize):
        block = stmt.block
        permuted = permuted or bool(int(block.annotations.get(_PERMUTED, 0)))
        inner = [_visit(part, permuted, accesses) for part in (block.init, block.body) if part is not None]
        if not any(inner):
            accesses += [
                (region.source, permuted, _ALIGNED in block.annotations)
                for region in (*block.reads, *block.writes) if region.source.scope().startswith("shared")
            ]
        return True
    if isinstance(stmt, tirx.SeqStmt):
        return any([_visit(part, permuted, accesses) for part in stmt.seq])
    if isinstance(stmt, tirx.IfThenElse):
        parts = [part for part in (stmt.then_case, stmt.else_case) if part is not None]
        return any([_visit(part, permuted, accesses) for part in parts])
    body = getattr(stmt, "body", None)
    return _visit(body, permuted, accesses) if isinstance(body, tirx.Stmt) else False
