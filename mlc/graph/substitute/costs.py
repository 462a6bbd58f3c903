"""The cost of an operator within a fused program, as extraction weighs it.

Additive figures that know what becomes one kernel: an elementwise operator costs next to nothing behind a product or
another elementwise one, and a kernel behind anything else; a slice or concatenation of neighbouring memory is a view.
They only propose graphs; :mod:`mlc.graph.substitute.price` then looks at the tensor functions that come of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import tvm

from cost_model.machine import machine
from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.registry import offered
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import BLOCK, ChannelBlocks
from mlc.operators import OPERATORS
from mlc.operators.sliding import explicit
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import usual_size
from mlc.substitution.egraph import ENode

__all__ = ["Cost", "Costs"]

#: part of a call's time that a view takes, which the virtual machine makes of a tensor
_VIEW = 0.3
#: part of a copy's time that is charged for a slice that is none of one piece
_READ_THROUGH = 0.3
#: charged for a byte of weights, as part of the time that reading it once takes: memory is not free
_HELD = 0.02

_VIEWED = ("slice", "concat")


@dataclass(frozen=True)
class Cost:
    """``seconds`` whatever is chosen around the option, and ``alone`` more where no input is ``fusable``: where it
    cannot be part of the kernel that makes one of them."""

    seconds: float
    fusable: bool = False
    alone: float = 0.0


class Costs:
    """Costs on a target, for a model with ``weights`` bytes of constants, at the usual sizes of what is free. ``scale``
    corrects the estimates of products by what was measured."""

    def __init__(
        self, target: tvm.target.Target, weights: float, options: CompileOptions = DEFAULT_OPTIONS, *,
        scale: Mapping[str, float] | None = None,
    ) -> None:
        self._scale = {"conv2d": 1.0, "matmul": 1.0, **(scale or {})}
        self._estimate = Estimate(target, weights)
        self._on = machine(target)
        #: from one kernel's last instruction to the next one's first, besides the start of its threads
        self.call_seconds = self._on.call_seconds
        self._options = options

    def held(self, shape: tuple[int, ...]) -> float:
        """The charge for a constant that is kept for the run."""
        return _HELD * _bytes(shape) / self._on.bandwidth

    def of(self, option: ENode, shape: tuple[int, ...], shapes: Mapping[int, tuple[int, ...]],
           constant: Collection[int]) -> Cost:
        """What ``option`` costs that makes a tensor of ``shape`` of classes with ``shapes``."""
        sources = [tuple(map(usual_size, shapes[i])) for i in option.inputs]
        moved = _bytes(shape) + sum(_bytes(shapes[i]) for i in option.inputs if i not in constant)
        if option.leaf:
            return Cost(0.0)
        if option.op == "conv2d":
            seconds = self._scale["conv2d"] * self._conv2d(option, sources)
            return Cost(seconds + self._packing(option, shapes, constant), fusable=True)
        if option.op == "matmul":
            seconds = self._scale["matmul"] * self._matmul(sources)
            return Cost(seconds + self._packing(option, shapes, constant), fusable=True)
        if option.op == "gather":  # of a table the rows that are taken, and where they are
            return Cost(self._moving(2 * _bytes(shape) + _bytes(shapes[option.inputs[1]])), fusable=True)
        if OPERATORS[option.op].pointwise:
            others = moved - _bytes(shape) - max(_bytes(s) for s in sources)
            return Cost(self._moving(max(0.0, others)) - self._moving(0.0) + 1e-9, True, self._moving(moved))
        if option.op == "reshape":
            return Cost(_VIEW * self.call_seconds / 2, fusable=True)
        if option.op in _VIEWED and _neighbouring(option, sources):
            copied = sum(_bytes(shapes[i]) for i in option.inputs if i in constant) if option.op == "concat" else 0.0
            return Cost(self._moving(2 * copied) if copied else _VIEW * self.call_seconds)
        if option.op in _VIEWED:
            moved = 2 * _bytes(shape)
            if option.op == "slice":  # mostly part of the kernel that reads it
                return Cost(_READ_THROUGH * self._moving(moved))
        return Cost(self._moving(moved), fusable=option.op == "transpose")

    def _moving(self, touched: float) -> float:
        return self._estimate.copy(touched) + self.call_seconds

    def _packing(self, option: ENode, shapes: Mapping[int, tuple[int, ...]], constant: Collection[int]) -> float:
        """Products of activations read their right side as it lies, in no panels."""
        weight = option.inputs[1]
        return self.call_seconds + (0.0 if weight in constant else self._moving(2 * _bytes(shapes[weight])))

    def _matmul(self, sources: list[tuple[int, ...]]) -> float:
        (*batch, rows, depth), columns = sources[0], sources[1][-1]
        columns += -columns % BLOCK
        return DIRECT.seconds(Convolution(
            math.prod(batch), depth, columns, (1, rows), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1, BLOCK, BLOCK
        ), self._estimate)

    def _conv2d(self, option: ENode, sources: list[tuple[int, ...]]) -> float:
        (n, channels, *size), (filters, _, *kernel) = sources
        given = dict(option.attributes)
        groups, padding = int(given["groups"]), explicit(given, size, kernel)
        depthwise = groups > 1 and groups == channels == filters
        inner = ChannelBlocks(channels, 1 if depthwise else groups).lanes
        outer = ChannelBlocks(filters, 1 if depthwise else groups).lanes
        conv = Convolution(
            n, inner, outer, (size[0], size[1]), (kernel[0], kernel[1]), given["stride"], padding, given["dilation"],
            inner if depthwise else groups, BLOCK, BLOCK,
        )
        # which algorithms apply is asked of the channels that there are: a block of few is read as a narrow one
        actual = conv if depthwise else replace(conv, channels=channels, filters=filters)
        return min(each.seconds(conv, self._estimate) for each in offered(actual, self._options))


def _bytes(shape: tuple[int, ...]) -> float:
    return 4.0 * math.prod(map(usual_size, shape))


def _neighbouring(option: ENode, sources: list[tuple[int, ...]]) -> bool:
    """Whether parts lie one behind the other, each where a kernel can write or read it."""
    axis = int(dict(option.attributes)["axis"])
    given = dict(option.attributes)
    inner = math.prod(sources[0][axis + 1 :])
    if len(sources[0]) == 4 and axis == 1:
        inner = 1  # channels come in blocks
    cuts = [sources[0][axis]] if option.op == "concat" else [given["begin"], given["end"]]
    extent = sources[0][axis] if option.op == "slice" else -1
    return math.prod(sources[0][:axis]) == 1 and all(cut * inner % BLOCK == 0 or cut == extent for cut in cuts)
