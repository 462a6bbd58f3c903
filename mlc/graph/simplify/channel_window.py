"""Sums over a window of neighbouring channels (local response normalisation), as a convolution.

Before::

    p = R.nn.pad(x, [0, 0, 2, 2, 0, 0, 0, 0])
    y = p[:, 0:C] + p[:, 1:C+1] + p[:, 2:C+2] + p[:, 3:C+3] + p[:, 4:C+4]      # strided slices

After: ``R.nn.conv2d(x, W)`` with a 1x1 kernel ``W[o, i] = 1`` for ``|o - i| <= 2``.

Most of that matrix is zero, but the product runs on the blocked layout that the convolutions around it use, takes the
rest of the normalisation as its epilogue, and saves both changes of layout. There it reads the band alone
(:mod:`mlc.graph.layout.blocked`); elsewhere it costs ``2 C^2`` flops a pixel, so that it is left alone for more than
512 channels. Values must be finite, as infinity times zero is no number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.constants import constant
from mlc.graph.ir.movement import window
from mlc.graph.ir.rewrite import Rules, Scope, dtype_of, rewrite_pass, shape_of

__all__ = ["ConvolveChannelWindows"]

_MAX_CHANNELS = 512


def _terms(expr: relax.Expr, scope: Scope) -> Iterator[relax.Expr]:
    """What a chain of additions adds up, last first: who stops at the first term that is no slice does not walk down a
    chain of hundreds for each of its sums. Sums that something else needs are terms of their own."""
    left = [expr]
    while left:
        last = left.pop()
        total = scope.call(last, "add")
        if total is None or not (isinstance(last, relax.Call) or scope.once(last)):
            yield last
        else:
            left.extend(total.args)


def _channel_slice(expr: relax.Expr, channels: int, scope: Scope) -> tuple[relax.Var, int] | None:
    """``(p, b)`` of ``p[:, b:b+C]``."""
    part = scope.call(expr, "strided_slice")
    if part is None or not scope.once(expr) or len(shape_of(part)) != 4 or shape_of(part)[1] != channels:
        return None
    cut = window(part)
    return (part.args[0], cut[1]) if cut is not None and cut[0] == 1 else None


def _padded_channels(expr: relax.Expr, scope: Scope) -> tuple[relax.Expr, int] | None:
    """``(x, before)`` of a tensor padded by zeros along its channels only."""
    pad = scope.call(expr, "nn.pad")
    if pad is None or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != 0.0:
        return None
    before, after, *others = (int(p) for p in pad.attrs.pad_width[2:])
    first = [int(p) for p in pad.attrs.pad_width[:2]]
    return (pad.args[0], before) if not any(others + first) and before >= 0 and after >= 0 else None


def convolve(call: relax.Call, scope: Scope) -> relax.Expr | None:
    """A sum of slices that are each the same tensor shifted along its channels."""
    shape = shape_of(call)
    if len(shape) != 4 or not 1 < shape[1] <= _MAX_CHANNELS or dtype_of(call) != "float32":
        return None
    source, starts = None, []
    for term in _terms(call, scope):
        part = _channel_slice(term, shape[1], scope)
        if part is None or not (source is None or source.same_as(part[0])):
            return None
        source = part[0]
        starts.append(part[1])
    padded = _padded_channels(source, scope) if source is not None and len(starts) >= 3 else None
    if padded is None or scope.uses(source) != len(starts) or shape_of(padded[0]) != shape:
        return None
    band = np.zeros((shape[1], shape[1]), "float32")
    for start in starts:
        band += np.eye(shape[1], k=start - padded[1], dtype="float32")
    return op.nn.conv2d(padded[0], constant(band[:, :, None, None]))


RULES: Rules = {"relax.add": (convolve,)}

ConvolveChannelWindows = rewrite_pass("ConvolveChannelWindows", RULES)
