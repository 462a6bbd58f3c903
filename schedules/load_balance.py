"""How evenly a scheduled function's parallel loops divide among cores, for each value of its free sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import s_tir, tirx

from schedules.analysis import evaluate

__all__ = ["imbalance"]


def imbalance(func: tirx.PrimFunc, cores: int, sizes: Mapping[tirx.Var, np.ndarray] | None = None) -> np.ndarray | None:
    """How many times longer the iterations of parallel loops take than on cores that all work to the end, where each
    takes as long as the others: an odd number of them on two cores leaves one of them waiting.

    For each of the values that ``sizes`` has for the free variables. None where nothing runs in parallel, or where it
    is not known how often a loop runs.
    """
    found = _work(func.body, cores, sizes or {}, False)
    if found is None or not found[2]:
        return None
    taken, shared, _ = found
    return np.asarray(taken * cores / np.maximum(shared, 1))


#: iterations one after the other, of all cores together, and whether any run in parallel
_Work = tuple[Any, Any, bool]


def _work(stmt: Any, cores: int, sizes: Mapping[tirx.Var, Any], inside: bool) -> _Work | None:
    """``inside``: in a parallel loop, whose cores run what is nested one after the other."""
    if isinstance(stmt, tirx.For):
        return _loop(stmt, cores, sizes, inside)
    if isinstance(stmt, s_tir.SBlockRealize):
        return _work(stmt.block.body, cores, sizes, inside)  # sums are initialised for little
    if isinstance(stmt, tirx.SeqStmt):
        parts = [_work(part, cores, sizes, inside) for part in stmt.seq]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return sum(p[0] for p in known), sum(p[1] for p in known), any(p[2] for p in known)
    if isinstance(stmt, tirx.IfThenElse):
        return _work(stmt.then_case, cores, sizes, inside)
    if isinstance(getattr(stmt, "body", None), tirx.Stmt):
        return _work(stmt.body, cores, sizes, inside)
    return 1.0, 1.0, False


def _loop(loop: tirx.For, cores: int, sizes: Mapping[tirx.Var, Any], inside: bool) -> _Work | None:
    shared = loop.kind == tirx.ForKind.PARALLEL and not inside
    body = _work(loop.body, cores, sizes, inside or shared)
    times = evaluate(loop.extent, sizes)
    if body is None or times is None:
        return None
    turns = -(-times // cores) if shared else times
    return body[0] * turns, body[1] * times, shared or body[2]
