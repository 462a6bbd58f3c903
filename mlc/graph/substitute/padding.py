"""Paddings of sliding windows by number and by name: what a rule says of one holds for the other where they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlc.graph.substitute.terms import Attributes, freeze

__all__ = ["explicit", "named"]


def explicit(attributes: Attributes, extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """``(top, left, bottom, right)`` of a window ``kernel`` over an image of ``extents``."""
    given = dict(attributes)
    padding = given.get("padding", "valid")
    if padding == "valid":
        return (0, 0, 0, 0)
    return _same(given, extents, kernel) if padding == "same" else tuple(padding)


def named(attributes: Attributes, extents: Sequence[int], kernel: Sequence[int]) -> Attributes | None:
    """The attributes with padding "same" where that is what the numbers come to, else None."""
    given = dict(attributes)
    if given.get("padding") == _same(given, extents, kernel):
        return freeze(**{**given, "padding": "same"})
    return None


def _same(given: dict[str, Any], extents: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    before, after = [], []
    dilation = given.get("dilation", (1, 1))
    for extent, window, stride, apart in zip(extents, kernel, given["stride"], dilation, strict=True):
        needed = max(0, ((extent + stride - 1) // stride - 1) * stride + (window - 1) * apart + 1 - extent)
        before.append(needed // 2)
        after.append(needed - needed // 2)
    return (*before, *after)
