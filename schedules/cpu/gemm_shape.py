"""The shape of a matrix product: its extents, and the memory layout of its operands."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import tvm
from tvm import s_tir, tirx

from schedules.analysis import BlockInfo, analyse, describe, remembered, uses
from schedules.cpu.steps import FLOAT, SATURATING, Step, step_of

__all__ = ["BFLOAT", "BYTES", "INTEGER", "GemmShape", "dot_shape", "gemm_shape", "read"]

#: the annotations of products with a packed weight that an intrinsic takes: of integers, of bytes whose
#: pairs saturate, and of bfloat16
INTEGER, BYTES, BFLOAT = "dense_integer", "dense_bytes", "dense_bfloat"


@dataclass(frozen=True)
class GemmShape:
    """``[batch, m, k] x [batch, k, n]``; ``packed`` is the width of a packed weight's block, 0 for a plain operand.
    ``weight`` is the number of the parameter that holds the packed weight, -1 if none does. ``transposed`` tells for
    the two operands whether the sum runs along their other axis: ``[k, m]`` and ``[n, k]``. ``separate`` is False where
    both are the same buffer. ``k`` counts the steps of the sum, which take several products of integers or bfloat16."""

    batch: int
    m: int
    n: int
    k: int
    packed: int
    weight: int
    transposed: tuple[bool, bool]
    separate: bool
    dtype: str
    step: Step = FLOAT


def read(sch: s_tir.Schedule) -> tuple[s_tir.schedule.SBlockRV, GemmShape] | None:
    """The one contraction block and its extents; None where the function is no product of two operands."""
    blocks = [(block, describe(sch.get(block))) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    reductions = [(block, info) for block, info in blocks if info.reduced]
    if len(reductions) != 1:
        return None
    block, info = reductions[0]
    if info.kind != "reduction" or len(info.reduces) < 3 or info.reduced != (len(info.reduces) - 1,):
        return None
    operands = _operands(info)
    if operands is None:
        return None
    left, right = operands
    *_, m_axis, n_axis, reduced = info.variables
    *batch, m, n, depth = info.extents
    left_turned = _order(left, m_axis, reduced)
    right_turned = _order(right, reduced, n_axis)
    packed = 0
    if len(right.indices) == 3 and _is(right.indices[1], reduced) and uses(right.indices[0], [n_axis]):
        packed, right_turned = int(right.source.shape[-1]), False
    if left_turned is None or right_turned is None:
        return None
    params = sch.mod["main"].params
    weight = next((i for i, param in enumerate(params) if packed and param.same_as(right.source)), -1)
    shape = GemmShape(
        prod(batch), m, n, depth, packed, weight, (left_turned, right_turned),
        not left.source.same_as(right.source), str(left.source.dtype),
    )
    return block, shape


def _order(load: tvm.ir.TensorLoad, row: tirx.Var, column: tirx.Var) -> bool | None:
    """Whether a load ends in ``[column, row]`` instead of ``[row, column]``; None where it ends in neither."""
    if _is(load.indices[-2], row) and _is(load.indices[-1], column):
        return False
    return True if _is(load.indices[-2], column) and _is(load.indices[-1], row) else None


def _is(expr: tirx.Expr, var: tirx.Var) -> bool:
    return isinstance(expr, tirx.Var) and expr.same_as(var)


def _operands(info: BlockInfo) -> tuple[tvm.ir.TensorLoad, tvm.ir.TensorLoad] | None:
    """The two loads of ``C = C + A * B``, that of the left operand first, where all are of one type of floats."""
    if info.factors is None:
        return None
    left, right = info.factors
    types = {str(buffer.dtype) for buffer in (left.source, right.source, *info.writes)}
    if len(left.indices) < 2 or len(right.indices) < 2 or len(types) != 1 or not types.pop().startswith("float"):
        return None
    return left, right


@remembered
def gemm_shape(func: tirx.PrimFunc) -> GemmShape | None:
    """The extents of ``func``, if it is a matrix product."""
    found = read(s_tir.Schedule(tvm.IRModule({"main": func})))
    return found[1] if found else None


@remembered
def dot_shape(func: tirx.PrimFunc, op: str) -> GemmShape | None:
    """The extents of a product annotated ``op``: of uint8 ``[..., M, K]`` with a weight ``[..., N/n, K/4, n, 4]``, of
    int16 or bfloat16 with ``[..., N/n, K/2, n, 2]``; None for any other function."""
    block = next((b for b in analyse(func).blocks if b.annotation == op), None)
    if block is None:
        return None
    *batch, m, n = (block.extents[i] for i in block.spatial)
    column = block.spatial[-1]
    packed = next(a.buffer for a in block.reads if a.depends(column))
    step, width = SATURATING if op == BYTES else step_of(packed), int(packed.shape[-2])
    steps = int(packed.shape[-2 - step.axes])
    shared = prod(int(extent) for extent in packed.shape[: -3 - step.axes]) == 1  # by the whole batch
    weight = next((i for i, param in enumerate(func.params) if shared and param.same_as(packed)), -1)
    return GemmShape(prod(batch), m, n, steps, width, weight, (False, False), True, str(block.writes[0].dtype), step)
