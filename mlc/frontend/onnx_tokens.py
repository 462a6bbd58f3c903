"""The numbers of past and new tokens in a call of attention: constants, or expressions where sizes are free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlc.frontend.onnx_expand import Nodes

__all__ = ["Tokens"]


@dataclass(frozen=True)
class Tokens:
    """``length`` queries and ``new`` keys behind ``past`` others; -1 for a number that a call decides.

    ``query`` and ``key`` are values with a row for each token along axis ``axis``, ``past_key`` one of (batch, heads,
    past, size), or empty.
    """

    nodes: Nodes
    query: str
    key: str
    past_key: str
    axis: int
    length: int
    new: int
    past: int

    @classmethod
    def of(cls, nodes: Nodes, query: str, key: str, past_key: str, axis: int = 1) -> Tokens:
        sizes = [nodes.size_of(query, axis), nodes.size_of(key, axis), nodes.size_of(past_key, 2) if past_key else 0]
        return cls(nodes, query, key, past_key, axis, *(-1 if size is None else size for size in sizes))

    @property
    def known(self) -> bool:
        """Whether all are numbers."""
        return min(self.length, self.new, self.past) >= 0

    @property
    def total(self) -> int:
        """The number of keys; -1 where a call decides that."""
        return self.past + self.new if min(self.past, self.new) >= 0 else -1

    def begin(self) -> str:
        """How many tokens are before, a value without axes."""
        return self.nodes.constant(np.array(self.past)) if self.past >= 0 else self.nodes.size(self.past_key, 2)

    def end(self) -> str:
        """How many keys there are, those before included, a value without axes."""
        if self.total >= 0:
            return self.nodes.constant(np.array(self.total))
        return self._behind(self.key)

    def _behind(self, rows: str) -> str:
        count = self.nodes.size(rows, self.axis)
        return count if self.past == 0 else str(self.nodes("Add", self.begin(), count))

    def places(self) -> str:
        """The position of each query, [length]."""
        if self.known:
            return self.nodes.constant(list(range(self.past, self.past + self.length)))
        return str(self.nodes("Range", self.begin(), self._behind(self.query), self.nodes.constant(np.array(1))))

    def keys(self) -> str:
        """The position of each key, those before included, [past + new]."""
        if self.total >= 0:
            return self.nodes.constant(list(range(self.total)))
        zero, one = (self.nodes.constant(np.array(number)) for number in (0, 1))
        return str(self.nodes("Range", zero, self.end(), one))

    def shape(self, batch: str, heads: int, rows: int | None = None) -> str:
        """(batch, heads, rows, past + new) as a value, a row for each query where ``rows`` is left out."""
        apart = self.nodes.constant([0])
        length = self.nodes.size(self.query, self.axis)
        middle = self.nodes.constant([heads]) if rows is None else self.nodes.constant([heads, rows])
        parts = [self.nodes("Unsqueeze", batch, apart), middle]
        parts += [self.nodes("Unsqueeze", length, apart)] if rows is None else []
        return str(self.nodes("Concat", *parts, self.nodes("Unsqueeze", self.end(), apart), axis=0))
