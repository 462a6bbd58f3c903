"""What a tensor function computes, block by block, as far as a schedule needs to know.

Everything here reads; nothing transforms. Two views exist: :func:`analyse` looks at a fresh function (which
blocks, of which kind, who feeds whom) and :func:`nest` at one block of a schedule under way (its loops, and how
each access moves when a loop advances by one).
"""

from schedules.analysis.access import Access, accesses
from schedules.analysis.blocks import BlockInfo, FuncInfo, analyse, is_empty
from schedules.analysis.expressions import (
    evaluate,
    expensive_calls,
    op_name,
    reads_wide_indices,
    stores_wide_positions,
    uses,
    walk,
)
from schedules.analysis.memo import remembered
from schedules.analysis.nests import Loop, Nest, nest

__all__ = [
    "Access", "BlockInfo", "FuncInfo", "Loop", "Nest", "accesses", "analyse", "evaluate", "expensive_calls",
    "is_empty", "nest", "op_name", "reads_wide_indices", "remembered", "stores_wide_positions", "uses", "walk",
]
