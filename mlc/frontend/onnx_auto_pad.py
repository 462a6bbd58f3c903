"""``auto_pad`` and ``ceil_mode`` of convolutions and poolings on images of free size: the padding depends on the call.

TVM counts those of ``auto_pad`` in Python, where a size must be a number; and with ``ceil_mode`` its shapes have a
window that is there for some sizes only, whose bounds it cannot derive.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.frontend.onnx_sizes import Sizes
from mlc.frontend.onnx_values import dtype_of, text
from mlc.sizes import Size, size_of

__all__ = ["padded"]

_POOLS = ("AveragePool", "LpPool", "MaxPool")


@dataclass(frozen=True)
class _Axis:
    """Windows of ``taps`` elements, ``dilation`` apart and ``stride`` after each other, over ``size`` elements with
    ``before`` and ``after`` around them. A mean divides by how many of the ``counted`` elements it has, of which
    ``lead`` lie before the image."""

    size: Any
    taps: int
    stride: int
    dilation: int
    before: Any
    after: Any
    lead: Any
    counted: Any

    @property
    def known(self) -> list[Any]:
        """The sizes that :meth:`divisor` needs."""
        return [self.before - self.lead, self.counted]

    def divisor(self, window: Any, first: Any, counted: Any) -> Any:
        """The elements that the mean of ``window`` is over: of ``counted`` ones, the first of which is the ``first`` of
        all."""
        from tvm import tirx

        start = window * self.stride - first
        low = tirx.max(tirx.floordiv(self.dilation - 1 - start, self.dilation), 0)
        high = tirx.min(tirx.floordiv(counted - start + self.dilation - 1, self.dilation), self.taps)
        return tirx.max(high - low, 1)


Finish = Callable[[Any], Any]


def padded(bb: Any, name: str, inputs: Any, attrs: Mapping[str, Any]) -> tuple[Any, dict[str, Any], Finish | None]:
    """A node's inputs and attributes with what its windows need around its image ``[batch, channels, ...]``, where a
    size of that is free and TVM does not know how; and what is done to its result then, if anything. Else as they are.
    """
    given, made = copy(inputs), dict(attrs)  # a list of the importer, which has no end
    same = text(made, "auto_pad", "NOTSET").startswith("SAME")
    if name not in ("Conv", *_POOLS) or not (same or made.get("ceil_mode", 0)) or isinstance(given[0], Sizes):
        return given, made, None
    image = [size_of(size) for size in given[0].ty.shape.values[2:]]
    ones = [1] * len(image)
    kernel = [int(size) for size in made.get("kernel_shape") or given[1].ty.shape.values[2:]]
    strides, dilations = (list(made.get(key, ones)) for key in ("strides", "dilations"))
    if not any(isinstance(size, Size) for size in image):
        return given, made, None
    of_all = list(zip(image, kernel, strides, dilations, strict=True))
    counts = bool(made.get("count_include_pad", 0))
    if same:
        if name == "Conv" and max(strides) == 1:  # the same for every size
            return given, made, None
        axes = [_same(*each, upper=text(made, "auto_pad", "") == "SAME_UPPER") for each in of_all]
    else:
        pads = list(made.get("pads", [0] * 2 * len(image)))
        ends = list(zip(pads[: len(image)], pads[len(image) :], strict=True))
        if all(end + stride <= (taps - 1) * dilation + 1
               for (_, end), (_, taps, stride, dilation) in zip(ends, of_all, strict=True)):
            return given, made, None  # no window begins behind the image
        axes = [_up(*each, *end, counts=counts) for each, end in zip(of_all, ends, strict=True)]
    least_value = _least(dtype_of(given[0])) if name == "MaxPool" else 0.0
    given[0] = _with_border(bb, given[0], [axis.before for axis in axes], [axis.after for axis in axes], least_value)
    made.pop("auto_pad", None)
    made.update(pads=[0] * 2 * len(image), ceil_mode=0, **({"count_include_pad": 1} if name == "AveragePool" else {}))
    whole = name != "AveragePool" or (same and counts)
    return given, made, None if whole else lambda mean: _over_counted(bb, mean, axes)


def _same(size: Any, taps: int, stride: int, dilation: int, *, upper: bool) -> _Axis:
    """Windows of ``auto_pad``: one for each ``stride`` elements, rounded up."""
    reach = (taps - 1) * dilation + 1
    total = reach - 1 - (size - 1) % stride  # negative where steps leave out the last elements
    least = total if reach >= stride else _at_least_zero(total)
    before = least // 2 if upper else (least + 1) // 2
    after = (size - 1) // stride * stride + reach - size - before
    return _Axis(size, taps, stride, dilation, before, after, 0, size)


def _up(size: Any, taps: int, stride: int, dilation: int, before: int, end: int, *, counts: bool) -> _Axis:
    """Windows of ``ceil_mode``: those that begin in the image or in the padding before it; the last may reach beyond
    the padding."""
    reach = (taps - 1) * dilation + 1
    last = (size + before - 1 + min(end + stride - reach, 0)) // stride
    after = last * stride + reach - size - before
    lead, counted = (before, before + size + end) if counts else (0, size)
    return _Axis(size, taps, stride, dilation, before, after, lead, counted)


def _over_counted(bb: Any, mean: Any, axes: Sequence[_Axis]) -> Any:
    """Means over all elements of their windows as means over those that count."""
    from tvm import te, tirx

    dtype, taps = dtype_of(mean), math.prod(axis.taps for axis in axes)
    known = [each.expr if isinstance(each, Size) else each for axis in axes for each in axis.known]

    def counted(tensor: te.Tensor, *sizes: Any) -> te.Tensor:
        def of(*index: Any) -> Any:
            divisors = [axis.divisor(window, *sizes[2 * i : 2 * i + 2])
                        for i, (axis, window) in enumerate(zip(axes, index[2:], strict=True))]
            many = functools.reduce(operator.mul, divisors).astype("float32")
            return tensor(*index) * (tirx.const(float(taps), "float32") / many).astype(dtype)

        return te.compute(tensor.shape, of, name="mean")

    return bb.emit_te(counted, mean, *known, primfunc_name_hint="mean")


def _at_least_zero(size: Any) -> Any:
    from tvm import tirx

    return Size(tirx.max(size.expr, tirx.const(0, "int64"))) if isinstance(size, Size) else max(size, 0)


def _least(dtype: str) -> float:
    return float(np.iinfo(dtype).min) if "int" in dtype else -np.inf


def _with_border(bb: Any, x: Any, before: Sequence[Any], after: Sequence[Any], value: float) -> Any:
    from tvm import tirx, topi

    widths = [[0, 0, *(each.expr if isinstance(each, Size) else each for each in ends)] for ends in (before, after)]
    return bb.emit_te(topi.nn.pad, x, *widths, tirx.const(value, dtype_of(x)), primfunc_name_hint="pad")
