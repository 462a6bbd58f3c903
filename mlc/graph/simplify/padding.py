"""Zero padding becomes the padding of the convolution or average pooling that reads it.

===================================================  ============================================
before                                               after
===================================================  ============================================
``conv(pad(x, p), W, padding=q)``                    ``conv(x, W, padding=p + q)``
``avg_pool(pad(x, p), padding=q)``, if ``q`` counts  ``avg_pool(x, padding=p + q)``, which counts
===================================================  ============================================

For convolutions of rank 1 to 3 in channels-first layouts, where zeros are added to the spatial axes only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import Rules, Scope, rewrite_pass, shape_of

__all__ = ["FoldPadding"]

_LAYOUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


def _padding(data: relax.Expr, layout: str, own: Sequence[int], scope: Scope) -> tuple[relax.Expr, list[int]] | None:
    """``(x, p + q)`` of ``data = pad(x, p)`` and ``q = own``: the spatial axes' befores, then their afters."""
    pad, rank = scope.call(data, "nn.pad"), len(shape_of(data))
    if pad is None or layout != _LAYOUTS.get(rank) or str(pad.attrs.pad_mode) != "constant":
        return None
    widths = [int(width) for width in pad.attrs.pad_width]
    if float(pad.attrs.pad_value) != 0.0 or any(widths[:4]) or min(widths) < 0 or len(own) != 2 * (rank - 2):
        return None
    return pad.args[0], [a + int(b) for a, b in zip(widths[4::2] + widths[5::2], own, strict=True)]


def into_convolution(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``conv(pad(x, p), W, padding=q) --> conv(x, W, padding=p + q)``."""
    attrs = call.attrs
    found = _padding(call.args[0], str(attrs.data_layout), list(attrs.padding), scope)
    if found is None:
        return None
    data, padding = found
    build = {3: op.nn.conv1d, 4: op.nn.conv2d, 5: op.nn.conv3d}[len(shape_of(call))]
    return build(
        data, call.args[1], strides=list(attrs.strides), padding=padding, dilation=list(attrs.dilation),
        groups=int(attrs.groups), data_layout=str(attrs.data_layout), kernel_layout=str(attrs.kernel_layout),
        out_layout=str(attrs.out_layout), out_dtype=attrs.out_dtype,
    )


def into_average(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """``avg_pool(pad(x, p), padding=q) --> avg_pool(x, padding=p + q)`` where padding counts."""
    attrs = call.attrs
    found = _padding(call.args[0], str(attrs.layout), list(attrs.padding), scope)
    counts = bool(attrs.count_include_pad) or not any(int(p) for p in attrs.padding)
    if found is None or bool(attrs.ceil_mode) or not counts:
        return None
    data, padding = found
    build = {3: op.nn.avg_pool1d, 4: op.nn.avg_pool2d, 5: op.nn.avg_pool3d}[len(shape_of(call))]
    return build(
        data, pool_size=list(attrs.pool_size), strides=list(attrs.strides), padding=padding,
        dilation=list(attrs.dilation), ceil_mode=False, count_include_pad=True, layout=str(attrs.layout),
        out_layout=str(attrs.out_layout),
    )


RULES: Rules = {
    **{f"relax.nn.conv{rank}d": (into_convolution,) for rank in (1, 2, 3)},
    **{f"relax.nn.avg_pool{rank}d": (into_average,) for rank in (1, 2, 3)},
}

FoldPadding = rewrite_pass("FoldPadding", RULES)
