"""Analysis of a tensor function, block by block, as far as a schedule needs it.

Everything here reads; nothing transforms. :func:`analyse` looks at a fresh function: which blocks there are, of which
kind, who feeds whom. Of a schedule under way, :func:`describe` looks at one block as it is by then, and
:func:`nest_of` at its loops, and how each access moves when a loop advances by one.
"""

from schedules.analysis.access import Access, accesses, linear_offset, widest_run
from schedules.analysis.blocks import BlockInfo, FuncInfo, analyse, describe, is_empty
from schedules.analysis.expressions import (
    branches,
    choices,
    evaluate,
    expensive_calls,
    expression_size,
    loads,
    op_name,
    reads_wide_indices,
    replaced,
    stores_wide_positions,
    uses,
    walk,
)
from schedules.analysis.memo import remembered
from schedules.analysis.nests import Loop, Nest, nest_of

__all__ = [
    "Access", "BlockInfo", "FuncInfo", "Loop", "Nest", "accesses", "analyse", "branches", "choices", "describe",
    "evaluate", "expensive_calls", "expression_size", "is_empty", "linear_offset", "loads", "nest_of", "op_name",
    "reads_wide_indices", "remembered", "replaced", "stores_wide_positions", "uses", "walk", "widest_run",
]
