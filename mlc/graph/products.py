"""Which matrix product or convolution a task computes, read from its blocks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tvm import tirx

from mlc.graph.algorithms.registry import algorithms
from schedules.analysis import BlockInfo, analyse

__all__ = ["Product", "product_of"]

Product: TypeAlias = Literal["conv2d", "matmul"]


def product_of(func: tirx.PrimFunc) -> Product | None:
    """The one product of ``func``: a convolution if it slides a window, else a matrix product.

    None for a function without a product, with several (attention), for one that computes a
    convolution other than directly, whose time says nothing of a direct one's, and for a depthwise convolution, which
    adds up nothing but its window.
    """
    blocks = analyse(func).blocks
    products = [block for block in blocks if block.contraction]
    indirect = {algorithm.op for algorithm in algorithms().values() if not algorithm.direct}
    if len(products) != 1 or any(block.annotation in indirect for block in blocks):
        return None
    if not products[0].windowed:
        return "matmul"
    return "conv2d" if _beyond_window(products[0]) else None


def _beyond_window(block: BlockInfo) -> bool:
    """Whether something is reduced that moves no window: channels."""
    slid = {
        v for access in block.reads for dim in access.dims if not all(block.reduces[v] for v in dim) for v in dim
    }
    return any(v not in slid and block.extents[v] > 1 for v in block.reduced)
