"""Paddings of sliding windows by number and by name: what a rule says of one holds for the other where they agree."""

from __future__ import annotations

from collections.abc import Sequence

from mlc.graph.substitute.terms import Attributes, freeze
from mlc.operators.sliding import explicit

__all__ = ["named"]


def named(attributes: Attributes, extents: Sequence[int], kernel: Sequence[int]) -> Attributes | None:
    """The attributes with padding "same" where that is what the numbers come to, else None."""
    given = dict(attributes)
    same = {**given, "padding": "same"}
    return freeze(**same) if given.get("padding") == explicit(same, extents, kernel) else None
