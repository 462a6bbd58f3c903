"""What kernels of attention share: tiles of keys and values that come ahead, and softmax from tile to tile.

The maximum and the total of each query are kept up to date, and the sums rescaled, as tiles of keys go by. Tiles beyond
a causal limit are not visited, and only those that a limit crosses look at it. Rows in shared memory are an odd number
of 16-byte pieces apart, and eight lanes copy the same piece of eight rows, so that copies and reads of rows meet in no
bank. After Dao, "FlashAttention-2" (2023), and Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).

A few queries over many keys are too few blocks for a GPU: there the keys are cut into ``splits``, each a block's own,
which writes its sums with their maximum and total; the block that finds itself the last one joins them, in their
order. After Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from schedules.cuda.common import ceil_div
from schedules.cuda.emit import (
    Registers,
    barrier,
    commit,
    copy_ahead,
    count_of,
    i32,
    i64,
    kernel,
    loop,
    over_lanes,
    substituted,
    wait,
    when,
)
from schedules.cuda.heads import LOG2E, Heads, Load
from schedules.cuda.joined import last_of

__all__ = ["WARP", "Online", "Tiles"]

WARP = 32
_PIECE_BYTES = 16
_NEVER = float("-inf")
_SERIAL, _VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED
#: ``visit(index, row, column)`` of one of a thread's scores or sums: where it is kept, which of the thread's queries it
#: belongs to, and which key or feature
Visit = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Tiles:
    """``warps`` of a block, of ``rows`` queries each; ``keys`` of a tile, ``stages`` of the ring of tiles; ``splits``
    blocks that share the keys of their queries.

    Of shared memory, features of ``granule`` elements are filled up; ``kept`` bytes for a query and a key stay there.
    ``helpers`` are a block's warps that compute nothing, ``most_registers`` those of a thread that does, and
    ``most_lanes`` the multiply-adds of a multiprocessor in a cycle that such products reach; ``issued`` are the
    instructions by which a score becomes a weight.
    """

    warps: int
    keys: int
    stages: int
    splits: int = 1

    rows = 16
    granule = 16
    kept = 0
    helpers = 0
    issued = 6
    #: beyond which the compiler for sm_90a spilled some though there were more
    most_registers = 168
    most_lanes = 1024

    @property
    def threads(self) -> int:
        """That compute."""
        return self.warps * WARP

    @property
    def numbers(self) -> list[int]:
        """What a schedule's mark says of them."""
        every = [self.warps, self.keys, self.stages, self.splits]
        return every[:3] if self.splits == 1 else every

    def exposed(self, steps: int) -> float:
        """The part of what becomes of the scores of so many tiles that products do not hide."""
        return 0.5

    def misfit(self, heads: Heads) -> str | None:
        """Why there is no such kernel of this attention, or None."""
        return None

    @property
    def launched(self) -> int:
        """Threads of a block."""
        return (self.warps + self.helpers) * WARP

    @property
    def readers(self) -> int:
        """How often shared memory gives each key and value."""
        return self.warps

    def launched_registers(self, heads: Heads) -> int:
        """That each thread has when a block begins, about."""
        return self.registers(heads)

    @property
    def queries(self) -> int:
        return self.warps * self.rows

    def padded(self, extent: int) -> int:
        """Features as they are reckoned with."""
        return ceil_div(extent, self.granule) * self.granule

    def stride(self, extent: int, bits: int) -> int:
        """Elements between rows in shared memory."""
        piece = _PIECE_BYTES * 8 // bits
        return (ceil_div(self.padded(extent), piece) | 1) * piece

    def registers(self, heads: Heads) -> int:
        """That a thread needs, about."""
        raise NotImplementedError

    def elements(self, heads: Heads) -> int:
        """Of shared memory: queries, the ring, and weights where they go through it."""
        bits = heads.bits
        ring = self.keys * (self.stride(heads.depth, bits) + self.stride(heads.features, bits))
        weights = self.stride(self.keys, bits) if self.kept else 0
        return self.queries * (self.stride(heads.depth, bits) + weights) + self.stages * ring

    def shared_bytes(self, heads: Heads) -> int:
        return self.elements(heads) * heads.bits // 8


class Online:
    """One kernel under construction; how products are computed is the subclass's."""

    #: of a thread's queries
    rows: int
    #: bits of a lane's number that tell keys of one query apart
    joined: tuple[int, ...]

    def __init__(self, func: tirx.PrimFunc, heads: Heads, tiles: Tiles) -> None:
        self.func, self.heads, self.tiles = func, heads, tiles
        self.depth, self.features = tiles.padded(heads.depth), tiles.padded(heads.features)
        self.row_k, self.row_v = tiles.stride(heads.depth, heads.bits), tiles.stride(heads.features, heads.bits)
        self.ring = tiles.queries * self.row_k  # where the first stage begins
        self.stage = tiles.keys * (self.row_k + self.row_v)
        self.registers = Registers()
        self.memory = self.registers.shared(tiles.elements(heads), heads.dtype)
        own = tiles.queries * tiles.keys // tiles.threads
        self.scores = self.registers(own, "float32", "scores")
        self.sums = self.registers(tiles.queries * self.features // tiles.threads, "float32", "sums")
        self.peak, self.total, self.base, self.scale = (
            self.registers(self.rows, "float32", name) for name in ("peak", "total", "base", "scale"))
        #: blocks of queries of all heads
        self.places = heads.count * count_of(heads.queries, tiles.queries)
        self.handed: list[tirx.Buffer] = []
        if tiles.splits > 1:
            self._hand_over()

    def _hand_over(self) -> None:
        """Make what the blocks that share keys write: each thread's sums, and the maxima and totals of queries."""
        tiles, own = self.tiles, int(self.sums.shape[0])
        self.some = next(v for v in (4, 2, 1) if own // self.rows % v == 0)
        self.piece = self.registers(self.some, "float32", "piece")
        shared = tiles.splits * self.places
        self.parts = tirx.decl_buffer((shared * own * tiles.threads,), "float32", "parts")
        self.tops = tirx.decl_buffer((shared * 2 * tiles.queries,), "float32", "tops")
        self.handed = [self.parts, self.tops]

    # what subclasses say

    def load_queries(self) -> list[Any]:
        """Bring what is needed of the queries from shared memory, if it is kept elsewhere."""
        return []

    def multiply_keys(self, at: Any) -> list[Any]:
        """Add the products of queries and the keys at ``at`` to the scores."""
        raise NotImplementedError

    def keep(self, index: Any, row: Any, column: Any) -> tirx.Stmt:
        """Keep a weight, which its score has become, for the second product."""
        raise NotImplementedError

    def multiply_values(self, at: Any) -> list[Any]:
        """Add the products of weights and the values at ``at`` to the sums."""
        raise NotImplementedError

    def each_score(self, visit: Visit) -> tirx.Stmt:
        """Visit a thread's scores; the column is the key's number in the tile."""
        raise NotImplementedError

    def each_sum(self, visit: Visit) -> tirx.Stmt:
        """Visit a thread's sums."""
        raise NotImplementedError

    def sum_of(self, row: Any, number: Any) -> Any:
        """Where the sum of this number of one of a thread's queries is kept."""
        raise NotImplementedError

    def query(self, row: Any) -> Any:
        """The number of one of a thread's queries in the block."""
        raise NotImplementedError

    def regrouped(self) -> list[Any]:
        """Give lanes sums that lie side by side in memory, before they are stored, if they have others."""
        return []

    def store(self, row: Any) -> tirx.Stmt:
        """Store the results of one of a thread's queries."""
        raise NotImplementedError

    # the kernel

    def function(self) -> tirx.PrimFunc:
        grid = self.places * self.tiles.splits
        return kernel(self.func, grid, self.tiles.launched, self.registers.buffers, self._body, self.handed)

    def _body(self, block: Any, thread: Any) -> list[Any]:
        heads, tiles = self.heads, self.tiles
        count = count_of(heads.queries, tiles.queries)
        self.thread, self.lane, self.warp = thread, thread % WARP, thread // WARP
        self.place, split = (block, i32(0)) if tiles.splits == 1 else (block % self.places, block // self.places)
        self.batch = heads.at(self.place % heads.count)
        place = self.place // heads.count
        # the last queries see the most keys, so they begin first
        self.first = (place if heads.causal is None else count - 1 - place) * tiles.queries
        steps, ahead = self._steps(), tiles.stages - 1
        self.begun = i32(0)  # the first tile
        if tiles.splits > 1:
            each = count_of(count_of(heads.keys, tiles.keys), tiles.splits)
            self.begun = split * each
            steps = tirx.max(tirx.min(steps - self.begun, i32(each)), i32(0))
        return [
            *self._clear(),
            self._copy(heads.query, self.first, heads.queries, i32(0), tiles.queries, heads.depth, self.row_k),
            *(self._fetch(i32(s), steps) for s in range(ahead)),
            loop(self.rows, lambda r: [self.set(self.peak, r, _NEVER), self.set(self.total, r, 0.0)]),
            self.each_sum(lambda i, _r, _f: self.set(self.sums, i, 0.0)),
            wait(ahead - 1), barrier(), *self.load_queries(),
            loop(steps, lambda j: self._step(j, steps), _SERIAL),
            *self._join(self.total, lambda a, b: a + b),
            *(self._store() if tiles.splits == 1 else self._store_last(split)),
        ]

    def _store(self) -> list[Any]:
        """Store the results of the block's queries."""
        one, zero = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
        zeros = [self.each_sum(lambda i, r, _: self.set(
            self.sums, i, tirx.Select(self.total[r] > zero, self.sums[i], zero))),
            loop(self.rows, lambda r: self.set(self.total, r, tirx.Select(self.total[r] > zero, self.total[r], one)))]
        return [
            *(zeros if self.heads.zeros else []),
            loop(self.rows, lambda r: self.set(self.scale, r, one / self.total[r])),
            *self.regrouped(),
            loop(self.rows, lambda r: self._if_asked(r, self.store(r))),
        ]

    def _if_asked(self, row: Any, body: tirx.Stmt) -> tirx.Stmt:
        """``body`` where one of a thread's queries is one of the function's."""
        return when(self.first + self.query(row) < self.heads.queries, body)

    def _store_last(self, split: Any) -> list[Any]:
        """Write what came of a split; and if it is the last one, store what came of all of them."""
        tiles = self.tiles
        written = loop(self.rows, lambda r: self._if_asked(r, tirx.SeqStmt([
            self._top(split, 0, r, self.peak), self._top(split, 1, r, self.total),
            loop(self._pieces, lambda n: [
                loop(self.some, lambda v: self.set(
                    self.piece, v, self.sums[self.sum_of(r, n * self.some + v)])),
                loop(self.some, lambda v: self.set(
                    self.parts, self._part(split, r, n) + v, self.piece[v]), _VECTORIZED),
            ]),
        ])))
        return [written, when(last_of(tiles.splits, self.places, self.place), tirx.SeqStmt(self._joined()))]

    def _joined(self) -> list[Any]:
        """Join what came of all splits, in their order."""
        tiles, zero, never = self.tiles, tirx.const(0.0, "float32"), tirx.const(_NEVER, "float32")
        log2e = self._log2e()

        def add(split: Any, row: Any) -> tirx.Stmt:
            return tirx.SeqStmt([
                self.set(self.base, row, tirx.exp2((self.tops[self._at(split, 0, row)] - self.scale[row]) * log2e)),
                self.set(self.total, row,
                         self.total[row] + self.tops[self._at(split, 1, row)] * self.base[row]),
                loop(self._pieces, lambda n: [
                    loop(self.some, lambda v: self.set(
                        self.piece, v, self.parts[self._part(split, row, n) + v]), _VECTORIZED),
                    loop(self.some, lambda v: self.set(
                        self.sums, self.sum_of(row, n * self.some + v),
                        self.sums[self.sum_of(row, n * self.some + v)] + self.piece[v] * self.base[row])),
                ]),
            ])

        return [
            loop(self.rows, lambda r: [self.set(self.peak, r, _NEVER), self.set(self.total, r, 0.0)]),
            self.each_sum(lambda i, _r, _f: self.set(self.sums, i, 0.0)),
            loop(self.rows, lambda r: self._if_asked(r, loop(tiles.splits, lambda s: self.set(
                self.peak, r, tirx.max(self.peak[r], self.tops[self._at(s, 0, r)])), _SERIAL))),
            loop(self.rows, lambda r: self.set(
                self.scale, r, tirx.Select(self.peak[r] == never, zero, self.peak[r]))),
            loop(self.rows, lambda r: self._if_asked(r, loop(tiles.splits, lambda s: add(s, r), _SERIAL))),
            *self._store(),
        ]

    @property
    def _pieces(self) -> int:
        """Of a thread's sums of one query, each as much as one access takes."""
        return int(self.sums.shape[0]) // self.rows // self.some

    def _part(self, split: Any, row: Any, number: Any) -> Any:
        """Where one of a thread's pieces begins: neighbouring threads' lie side by side."""
        place = ((split * self.places + self.place) * self.rows + row) * self._pieces + number
        return (place * self.tiles.threads + self.thread) * self.some

    def _at(self, split: Any, which: int, row: Any) -> Any:
        return ((split * self.places + self.place) * 2 + which) * self.tiles.queries + self.query(row)

    def _top(self, split: Any, which: int, row: Any, value: tirx.Buffer) -> tirx.Stmt:
        return self.set(self.tops, self._at(split, which, row), value[row])

    def set(self, buffer: tirx.Buffer, index: Any, value: Any) -> tirx.Stmt:
        """``buffer[index] = value``."""
        stored = tirx.const(value, str(buffer.dtype)) if isinstance(value, int | float) else value
        return tirx.BufferStore(buffer, stored, [index])

    def _steps(self) -> Any:
        """Tiles of keys that the block's queries see any key of."""
        heads, tiles = self.heads, self.tiles
        every = i32(count_of(heads.keys, tiles.keys))
        if heads.causal is None:
            return every
        seen = self.first + tiles.queries + heads.causal  # one more than the last query's last key
        return tirx.max(tirx.min(every, (seen + tiles.keys - 1) // tiles.keys), i32(0))

    def _clear(self) -> list[Any]:
        """Zeros behind features that fill no granule: what lies there is multiplied too."""
        heads = self.heads
        if heads.depth == self.depth and heads.features == self.features:
            return []
        size, each = int(self.memory.shape[0]), self.tiles.threads

        def clear(i: Any) -> tirx.Stmt:
            at = i * each + self.thread
            return when(at < size, self.set(self.memory, at, tirx.const(0, heads.dtype)))

        return [loop(ceil_div(size, each), clear, _SERIAL), barrier()]

    def _fetch(self, step: Any, steps: Any) -> tirx.Stmt:
        """Begin to bring a tile of keys and of values, and make a group of it though there be none."""
        heads, tiles = self.heads, self.tiles
        at = i32(self.ring) + step % tiles.stages * self.stage
        row = (self.begun + step) * tiles.keys
        copies = tirx.SeqStmt([
            self._copy(heads.key, row, heads.keys, at, tiles.keys, heads.depth, self.row_k),
            self._copy(heads.value, row, heads.keys, at + tiles.keys * self.row_k, tiles.keys, heads.features,
                       self.row_v),
        ])
        return tirx.SeqStmt([when(step < steps, copies), commit()])

    def _copy(self, load: Load, first: Any, rows: Any, at: Any, count: int, extent: int, stride: int) -> tirx.Stmt:
        """Copy ``count`` rows to ``at``; those from ``rows`` on are the last one again, which no score lets through."""
        vector = self.heads.vector(load, extent)
        pieces, each = extent // vector, self.tiles.threads
        whole = count * pieces % each == 0

        def copy(i: Any) -> tirx.Stmt:
            number = i * each + self.thread
            row = number // (8 * pieces) * 8 + number % 8
            column = number // 8 % pieces * vector
            source = load.at(self.batch, i64(tirx.min(first + row, i32(rows - 1))), i64(column))
            to = at + row * stride + column
            ahead = vector * self.heads.bits >= 32
            piece = copy_ahead(self.memory, to, source, vector) if ahead else self.set(self.memory, to, source)
            return piece if whole else when(number < count * pieces, piece)

        return loop(ceil_div(count * pieces, each), copy)

    def _step(self, j: Any, steps: Any) -> list[Any]:
        """One tile of keys."""
        tiles = self.tiles
        at = i32(self.ring) + j % tiles.stages * self.stage
        return [
            wait(tiles.stages - 2), barrier(), self._fetch(j + (tiles.stages - 1), steps),
            self.each_score(lambda i, _r, _c: self.set(self.scores, i, 0.0)),
            *self.multiply_keys(at),
            *self._logits((self.begun + j) * tiles.keys),
            *self._weights(),
            *self.multiply_values(at + tiles.keys * self.row_k),
        ]

    def _logits(self, first: Any) -> list[Any]:
        """Scores with their mask and limits."""
        heads, tiles = self.heads, self.tiles
        never = tirx.const(_NEVER, "float32")

        def logit(i: Any, r: Any, column: Any) -> tirx.Stmt:
            query = tirx.min(self.first + self.query(r), i32(heads.queries - 1))
            key = tirx.min(first + column, i32(heads.keys - 1))
            at = {**self.batch, heads.i: i64(query), heads.j: i64(key)}
            return self.set(self.scores, i, substituted(heads.mask, at, {heads.scores: self.scores[i]}))

        def limit(i: Any, r: Any, column: Any) -> tirx.Stmt:
            last = i32(heads.keys - 1)
            if heads.causal is not None:
                last = tirx.min(last, self.first + self.query(r) + heads.causal)
            return self.set(self.scores, i, tirx.Select(first + column > last, never, self.scores[i]))

        seen = i32(heads.keys)
        if heads.causal is not None:
            seen = tirx.min(seen, self.first + heads.causal + 1)  # keys that all the block's queries see
        limited = heads.causal is not None or not isinstance(heads.keys, int) or heads.keys % tiles.keys
        return [
            *([self.each_score(logit)] if heads.mask is not None else []),
            *([when(first + tiles.keys > seen, self.each_score(limit))] if limited else []),
        ]

    def _log2e(self) -> tirx.Expr:
        """What differences of scores are multiplied by to be exponents of two."""
        return tirx.const(LOG2E * (self.heads.scale if self.heads.mask is None else 1.0), "float32")

    def power(self, exponent: Any) -> Any:
        """Two to this power."""
        return tirx.exp2(exponent)

    def _exponent(self, score: Any, row: Any) -> Any:
        """Of two, by which a score's weight is beside the maximum, which :attr:`scale` has: where no mask makes scores
        of any size, multiplied already, so that one instruction does it."""
        if self.heads.mask is None:
            return score * self._log2e() - self.scale[row]
        return (score - self.scale[row]) * self._log2e()

    def _weights(self) -> list[Any]:
        """Weights of a tile's scores, with what the tiles before have seen."""
        def weigh(i: Any, r: Any, column: Any) -> list[tirx.Stmt]:
            return [*self._power(i, r), self.keep(i, r, column)]

        return [*self._peaks(), self._rescaled(), self.each_score(weigh)]

    def _peaks(self) -> list[Any]:
        """The maxima with a tile's scores, and totals as those say."""
        base, scale, peak, total = self.base, self.scale, self.peak, self.total
        zero, never = tirx.const(0.0, "float32"), tirx.const(_NEVER, "float32")
        factor = self._log2e() if self.heads.mask is None else tirx.const(1.0, "float32")
        return [
            loop(self.rows, lambda r: self.set(base, r, peak[r])),
            self.each_score(lambda i, r, _: self.set(peak, r, tirx.max(peak[r], self.scores[i]))),
            *self._join(peak, tirx.max),
            loop(self.rows, lambda r: [
                # where no key was seen yet, every exponent would be a difference of infinities
                self.set(scale, r, tirx.Select(peak[r] == never, zero, peak[r] * factor)),
                # exactly 1 where the maximum stays: what ``scale`` was rounded by would add up from tile to tile
                self.set(base, r, self.power(
                    (base[r] - tirx.Select(peak[r] == never, zero, peak[r])) * self._log2e())),
                self.set(total, r, total[r] * base[r]),
            ]),
        ]

    def _rescaled(self) -> tirx.Stmt:
        """Sums as the maxima say."""
        return self.each_sum(lambda i, r, _: self.set(self.sums, i, self.sums[i] * self.base[r]))

    def _power(self, i: Any, r: Any) -> list[tirx.Stmt]:
        """A score becomes its weight, and part of the total."""
        return [
            self.set(self.scores, i, self.power(self._exponent(self.scores[i], r))),
            self.set(self.total, r, self.total[r] + self.scores[i]),
        ]

    def _join(self, buffer: tirx.Buffer, how: Callable[[Any, Any], Any]) -> list[Any]:
        """Give each lane of a query what all of them have."""
        def with_lane(distance: int) -> tirx.Stmt:
            return loop(self.rows, lambda r: self.set(buffer, r, how(buffer[r], over_lanes(buffer[r], distance))))

        return [with_lane(distance) for distance in self.joined]

    def element(self, row: Any, index: Any, feature: Any) -> tirx.Stmt:
        """Store one of a thread's sums."""
        value = self.sums[index] * self.scale[row]
        return self.heads.store(self.batch, i64(self.first + self.query(row)), i64(feature), value)


