"""Attention of float32 on tensor cores as tf32, where the function says that operands may be rounded.

As for 16 bits (:mod:`schedules.cuda.flash`), weights are read from the registers that their scores are left in. A
product of depth 8 takes keys ``t`` and ``t + 4`` from the thread ``t`` of a row, which holds keys ``2 t`` and
``2 t + 1``: since their order does not matter to a sum, keys are taken in the order in which weights lie, and values
are fetched in that order too.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from schedules.cuda.emit import loop
from schedules.cuda.flash import Flash, FlashTiles
from schedules.cuda.heads import Heads
from schedules.intrin import mma

__all__ = ["TensorFloatFlash", "TensorFloatTiles"]

_KIND = mma.TENSOR_FLOAT
_DEPTH, _TILE, _HELD = _KIND.depth, mma.TILE, _KIND.held


class TensorFloatTiles(FlashTiles):
    """Tiles of float32."""

    def registers(self, heads: Heads) -> int:
        """Scores and weights, the result's sums, the queries, a fragment, and some more."""
        return self.keys + self.padded(heads.features) // 2 + self.padded(heads.depth) // 2 + 20


class TensorFloatFlash(Flash):
    """The kernel of float32 rounded to tf32."""

    @property
    def kind(self) -> mma.Kind:
        return _KIND

    def _load_rounded(self, fragment: tirx.Buffer, to: Any, at: Any, side: str) -> list[Any]:
        return [
            self._load(fragment, to, at, side, False, self.row_k),
            loop(_HELD, lambda i: self.set(fragment, to + i, mma.rounded(fragment[to + i]))),
        ]

    def load_queries(self) -> list[Any]:
        at = self.warp * (_TILE * self.row_k)
        return [loop(self.depth // _DEPTH, lambda d: self._load_rounded(self.queries, d * _HELD, at + d * _DEPTH, "a"))]

    def multiply_keys(self, at: Any) -> list[Any]:
        return [loop(self.depth // _DEPTH, lambda d: loop(self.tiles.keys // _TILE, lambda u: [
            *self._load_rounded(self.fragment, 0, at + u * (_TILE * self.row_k) + d * _DEPTH, "b"),
            *self._multiply(self.queries, d * _HELD, self.scores, u * 8),
        ]))]

    def keep(self, index: Any, row: Any, column: Any) -> tirx.Stmt:
        """Of eight keys: both rows' even ones, then their odd ones."""
        return self.set(self.weights, index // 4 * 4 + index % 2 * 2 + row, mma.rounded(self.scores[index]))

    def multiply_values(self, at: Any) -> list[Any]:
        def fetch(u: Any, f: Any) -> tirx.Stmt:
            begin = at + (u * _DEPTH + self.lane % 4 * 2) * self.row_v + f * _TILE + self.lane // 4
            return loop(2, lambda half: loop(2, lambda odd: self.set(
                self.fragment, half * 2 + odd, mma.rounded(self.memory[begin + odd * self.row_v + half * 8]))))

        return [loop(self.tiles.keys // _DEPTH, lambda u: loop(self.features // _TILE, lambda f: [
            fetch(u, f), *self._multiply(self.weights, u * 4, self.sums, f * 8),
        ]))]
