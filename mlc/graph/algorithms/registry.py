"""The algorithms for a convolution in blocked layouts: what an algorithm must define, and the list of them.

A module of this package that holds an :class:`Algorithm` names it in ``ALGORITHMS`` and is found by that alone: layouts
price a convolution by the fastest algorithm, :mod:`mlc.graph.lowering.select` offers each of them where the epilogue is
known, and the search over graphs weighs what they cost. All algorithms of a convolution read and write the same blocks,
so that the choice is each kernel's own.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module

import numpy as np
from tvm import te, tirx

import mlc.graph.algorithms as package
from mlc.errors import UsageError
from mlc.graph.estimate import Convolution, Estimate
from mlc.options import CompileOptions

__all__ = ["Algorithm", "algorithms", "check_options", "fastest", "offered"]


class Algorithm(ABC):
    """A way to compute float32 convolutions ``[N, I/i, H, W, i] -> [N, O/o, OH, OW, o]``.

    ``name`` is what kernels are called by, and ``family`` what several of one kind (tile sizes, say) are forbidden by
    together. ``op`` is the ``mlc.op`` annotation of the block that multiplies, by which spaces know it; it must be the
    algorithm's own, since times of its products say nothing of other products.
    """

    name: str
    family: str
    op: str
    #: whether layouts make it wherever it is applicable, so that each other one is an alternative to it; such a one
    #: rounds as a sum does and cannot be forbidden
    direct: bool = False

    @abstractmethod
    def applicable(self, conv: Convolution) -> bool:
        """Whether the convolution can be computed so. Of integers (``element`` 1), which are asked about too, only
        direct algorithms are carried out so far."""

    @abstractmethod
    def weight_shape(self, conv: Convolution) -> tuple[int, ...]:
        """The shape of :meth:`pack`'s result."""

    @abstractmethod
    def pack(self, weight: np.ndarray, conv: Convolution) -> np.ndarray:
        """``[O, I/groups, KH, KW]`` as the kernel reads it, float32, made once when a model is compiled.

        Both channel counts may be those of the model or count the lanes that pad blocks, whose weights are zero; they
        do count them where each channel is convolved by itself, since such lanes may lie anywhere.
        """

    @abstractmethod
    def kernel(self, data: te.Tensor, weight: te.Tensor, conv: Convolution) -> te.Tensor:
        """The result as a tensor expression of blocked ``data`` and a packed ``weight``."""

    @abstractmethod
    def seconds(self, conv: Convolution, estimate: Estimate) -> float:
        """The estimated seconds of a call on the described machine."""

    @abstractmethod
    def error_bound(self, conv: Convolution) -> float:
        """Bound on ``max |error| / max |result|`` for Gaussian operands, over summation in float64; held with a factor
        of four to spare (``tests/unit/graph/test_algorithms.py``)."""

    def function(self, conv: Convolution) -> tirx.PrimFunc:
        """The kernel as a tensor function of data, weight and result."""
        height, width = conv.size
        data = te.placeholder((conv.n, conv.channels // conv.block_in, height, width, conv.block_in), name="data")
        weight = te.placeholder(self.weight_shape(conv), name="weight")
        func = te.create_prim_func([data, weight, self.kernel(data, weight, conv)], index_dtype_override="int64")
        return func.without_attr("global_symbol").with_attr("tirx.noalias", True)


@cache
def algorithms() -> dict[str, Algorithm]:
    """All algorithms by name, those that layouts make first, the others by module and in their order there."""
    modules = sorted(each.name for each in pkgutil.iter_modules(package.__path__))
    found = [each for name in modules
             for each in getattr(import_module(f"{package.__name__}.{name}"), "ALGORITHMS", ())]
    return {each.name: each for each in sorted(found, key=lambda each: not each.direct)}


def offered(conv: Convolution, options: CompileOptions) -> list[Algorithm]:
    """The algorithms that can compute a convolution of blocked images, the default one first."""
    return [each for each in algorithms().values() if each.applicable(conv)
            and (each.direct or not options.forbidden & {each.name, each.family})]


def fastest(conv: Convolution, options: CompileOptions, estimate: Estimate) -> float:
    """The estimated seconds of the algorithm that has the least."""
    return min(each.seconds(conv, estimate) for each in offered(conv, options))


def check_options(options: CompileOptions) -> None:
    """Raises :class:`UsageError` where an algorithm is forbidden that there is not, or that nothing replaces."""
    others = [each for each in algorithms().values() if not each.direct]
    names = sorted({name for each in others for name in (each.family, each.name)})
    for name in sorted(options.forbidden.difference(names)):
        raise UsageError(f"what is forbidden must be one of the algorithms {', '.join(names)}, got {name!r}")
