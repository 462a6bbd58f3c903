"""``auto_pad`` of images of free size: as many elements around them as the windows need, which each call computes.

TVM counts them in Python, where a size must be a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from mlc.frontend.onnx_sizes import Sizes
from mlc.frontend.onnx_values import dtype_of, text
from mlc.sizes import Size, size_of

__all__ = ["padded"]

_POOLS = ("AveragePool", "LpPool", "MaxPool")


def padded(bb: Any, name: str, inputs: Any, attrs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A node's inputs and attributes with the padding of ``SAME_UPPER`` and ``SAME_LOWER`` around its image
    ``[batch, channels, ...]`` where a size of that is free and TVM does not know how; else as they are.

    Raises ``ValueError`` for a mean over the elements of the image alone, whose number differs then.
    """
    given, made = copy(inputs), dict(attrs)  # a list of the importer, which has no end
    if name not in ("Conv", *_POOLS) or not text(made, "auto_pad", "NOTSET").startswith("SAME") \
            or isinstance(given[0], Sizes):
        return given, made
    image = [size_of(size) for size in given[0].ty.shape.values[2:]]
    ones = [1] * len(image)
    kernel = [int(size) for size in made.get("kernel_shape") or given[1].ty.shape.values[2:]]
    strides, dilations = (list(made.get(key, ones)) for key in ("strides", "dilations"))
    counted = name == "Conv" and max(strides) == 1  # the same for every size
    if counted or not any(isinstance(size, Size) for size in image):
        return given, made
    if name == "AveragePool" and not made.get("count_include_pad", 0):
        raise ValueError("auto_pad of a mean over an image of free size must count what lies around it "
                         "(count_include_pad=1); fix the size, as in --shape NAME=1,3,224,224")
    before, after = [], []
    for size, taps, stride, dilation in zip(image, kernel, strides, dilations, strict=True):
        reach = (taps - 1) * dilation + 1
        total = reach - 1 - (size - 1) % stride  # negative where steps leave out the last elements
        least = total if reach >= stride else _at_least_zero(total)
        before.append(least // 2 if text(made, "auto_pad", "") == "SAME_UPPER" else (least + 1) // 2)
        after.append((size - 1) // stride * stride + reach - size - before[-1])
    least_value = _least(dtype_of(given[0])) if name == "MaxPool" else 0.0
    given[0] = _with_border(bb, given[0], before, after, least_value)
    del made["auto_pad"]
    return given, {**made, "pads": [0] * 2 * len(image)}


def _at_least_zero(size: Any) -> Any:
    from tvm import tirx

    return Size(tirx.max(size.expr, tirx.const(0, "int64"))) if isinstance(size, Size) else max(size, 0)


def _least(dtype: str) -> float:
    return float(np.iinfo(dtype).min) if "int" in dtype else -np.inf


def _with_border(bb: Any, x: Any, before: Sequence[Any], after: Sequence[Any], value: float) -> Any:
    from tvm import tirx, topi

    widths = [[0, 0, *(each.expr if isinstance(each, Size) else each for each in ends)] for ends in (before, after)]
    return bb.emit_te(topi.nn.pad, x, *widths, tirx.const(value, dtype_of(x)), primfunc_name_hint="pad")
