"""One kernel of the benchmark: a tensor function, what it should compute, and what it should reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import tvm
from tvm import relax, tirx

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.pipeline import optimise
from mlc.target import Target
from mlc.testing.programs import program

__all__ = ["BLOCK", "STREAM", "Kernel", "blocked", "bytes_of", "dims", "of_graph", "plain", "shifted"]

BLOCK = 16  # channels of a block of NCHW[c]c, columns of a packed panel
STREAM = 0.80  # what part of the bandwidth kernels that only move data are to reach


@dataclass(frozen=True)
class Kernel:
    """One tensor function to time.

    ``build`` gives it for a target; ``reference`` maps its inputs, in float64, to its output. ``flops`` is the number
    of multiplications and additions that the result needs, 0 for a kernel that only moves data; ``goal`` is the part
    of the roofline to reach, if one is set. The inputs at ``cold`` come from memory, not from a cache, in each call.
    ``kind`` is the arithmetic whose peak counts: multiply-adds of float32, or dot products, by their names in
    :data:`schedules.machine.FACTS`.
    """

    name: str
    build: Callable[[Target], tirx.PrimFunc]
    reference: Callable[..., np.ndarray]
    flops: float = 0.0
    goal: float | None = None
    cold: tuple[int, ...] = ()
    kind: str = "fma"


def plain(x: np.ndarray) -> np.ndarray:
    """``[N, C/c, H, W, c] --> [N, C, H, W]``."""
    n, blocks, h, w, c = x.shape
    return x.transpose(0, 1, 4, 2, 3).reshape(n, blocks * c, h, w)


def blocked(x: np.ndarray) -> np.ndarray:
    """``[N, C, H, W] --> [N, C/c, H, W, c]`` in blocks of 16 channels."""
    n, channels, h, w = x.shape
    return x.reshape(n, channels // BLOCK, BLOCK, h, w).transpose(0, 1, 3, 4, 2)


def shifted(image: np.ndarray, i: int, j: int, stride: int, out: int) -> np.ndarray:
    """What tap ``(i, j)`` of a window sees of an image ``[..., H, W]`` at all its places."""
    return image[..., i : i + stride * (out - 1) + 1 : stride, j : j + stride * (out - 1) + 1 : stride]


def dims(shape: Sequence[int]) -> str:
    """``64x512x512``"""
    return "x".join(map(str, shape))


def of_graph(
    name: str, inputs: dict[str, tuple[int, ...]], body: Callable[..., relax.Expr],
    reference: Callable[..., np.ndarray], goal: float | None = None,
) -> Kernel:
    """The tensor function that a compiled model has for ``body`` of its ``inputs``."""

    def build(target: Target) -> tirx.PrimFunc:
        return _only_function(inputs, lambda _builder, params: [body(*params)], target)

    return Kernel(name, build, reference, goal=goal)


def _only_function(
    inputs: dict[str, tuple[int, ...]], body: Callable[..., Sequence[relax.Expr]], target: Target
) -> tirx.PrimFunc:
    """The one tensor function that the graph passes make of a program.

    It takes the inputs in their order; raises ``ValueError`` where there are several functions.
    """
    mod = optimise(program({key: (shape, "float32") for key, shape in inputs.items()}, body), target)
    calls = [b.value for b in bindings(mod["main"]) if op_name(b.value) == "relax.call_tir"]
    if len(calls) != 1 or list(calls[0].args[1].fields) != list(mod["main"].params):
        raise ValueError(f"a kernel must be one function of its inputs, got:\n{mod['main'].script()}")
    return mod[calls[0].args[0]]


def bytes_of(func: tirx.PrimFunc) -> int:
    """The bytes of all arguments: what a kernel must move at least."""
    return sum(
        prod(int(d) for d in p.shape) * tvm.runtime.DataType(str(p.dtype)).bits // 8 for p in func.params
    )
