"""Matrices of one batch as those of another with as many, ``[8, row, column]`` as ``[2, 4, row, column]``."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import tvm
from tvm import relax, sym, tirx

from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.rewrite import shape_of
from mlc.graph.ir.views import View, i64
from mlc.sizes import size_of
from schedules.analysis import replaced as substituted

__all__ = ["of_batch", "rebatched"]


def rebatched(expr: relax.Expr, old: tuple[int, ...], new: tuple[int, ...]) -> relax.Expr | None:
    """What broadcasts to ``[*new, query, key]`` as ``expr`` does to ``[*old, query, key]``; None where that takes more
    than a reshape."""
    shape = _shape(expr)
    lead = (*(1,) * (len(old) + 2 - len(shape)), *shape[:-2])
    if old == new or all(extent == 1 for extent in lead):
        kept = shape if old == new else shape[-2:]
    elif _wide(old) == _wide(new):
        along = iter(own for own, extent in zip(lead, old, strict=True) if extent != 1)
        kept = (*(1 if extent == 1 else next(along) for extent in new), *shape[-2:])
    elif lead == old:
        kept = (*new, *shape[-2:])
    else:
        return None
    if kept == shape:
        return expr
    array = array_of(expr)
    if array is not None:
        return constant(array.reshape(kept))
    source = expr.args[0] if isinstance(expr, relax.Call) else expr
    return relax.op.reshape(source, kept)


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor, or of a reshape that no pass has seen yet."""
    return tuple(map(size_of, expr.args[1].values)) if isinstance(expr, relax.Call) else shape_of(expr)


def _wide(batch: tuple[int, ...]) -> list[int]:
    return [extent for extent in batch if extent != 1]


def of_batch(view: View, old: tuple[int, ...], new: tuple[int, ...]) -> View:
    """The view of a tensor ``[*old, row, column]`` as one of ``[*new, row, column]``."""
    variables = tuple(tirx.Var(f"b{axis}", "int64") for axis in range(len(new)))
    given: list[Any]
    if _wide(old) == _wide(new):
        along = iter(variable for variable, extent in zip(variables, new, strict=True) if extent != 1)
        given = [i64(0) if extent == 1 else next(along) for extent in old]
    else:
        number: Any = i64(0)
        for variable, extent in zip(variables, new, strict=True):
            number = number * i64(extent) + variable
        given = [tirx.floormod(tirx.floordiv(number, i64(prod(old[axis + 1 :]))), i64(extent))
                 for axis, extent in enumerate(old)]
    analyzer = sym.Analyzer()
    for variable, extent in zip(variables, new, strict=True):
        analyzer.bind(variable, tvm.ir.Range(i64(0), i64(extent)))
    image = dict(zip(view.variables, [*given, *view.variables[-2:]], strict=True))
    indices = tuple(analyzer.simplify(substituted(index, image)) for index in view.indices)
    return replace(view, variables=(*variables, *view.variables[-2:]), indices=indices)
