"""Attention as one tensor expression for CPUs, its queries in blocks; :mod:`schedules.cpu.attention` says how its
kernel is made. :mod:`mlc.graph.kernels.attention` has the expression for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from mlc.graph.ir.views import i64
from mlc.sizes import Size, renamed, usual_size
from schedules.cpu.attention import FEW, KEYS, TOGETHER
from schedules.cpu.attention_few import WHOLE_KEYS
from schedules.present import PRESENT, STAGE

__all__ = ["QUERIES", "Sizes", "attention", "block_of", "joined", "whole_blocks"]

#: queries of one block: one AVX-512 or two AVX2 vectors of float32
QUERIES = 16

#: less than any sum of powers of which one is 1
_TINY = 1e-30

#: an element by its indices
Load = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """One attention: ``batch`` dimensions in front, ``tokens`` queries and ``keys`` keys of ``depth`` features, values
    of ``features`` features."""

    batch: tuple[int, ...]
    tokens: int
    keys: int
    depth: int
    features: int

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.batch, self.tokens, self.keys, self.depth, self.features)

    def renamed(self, image: Mapping[tirx.Var, tirx.Var]) -> Sizes:
        """The same sizes in terms of a function's own variables."""
        *batch, tokens, keys, depth, features = (renamed(size, image) for size in self.all)
        return Sizes(tuple(batch), tokens, keys, depth, features)


def attention(
    sizes: Sizes, scale: float, query: Load, key: Load, value: Load, mask: Load | None, order: Sequence[int],
    zeros: bool = False, staged: tuple[bool, bool] = (False, False),
) -> te.Tensor:
    """``softmax(scale * Q K' + mask) V`` as a tensor expression.

    ``query``, ``key`` and ``value`` load an element of ``[*batch, token, feature]``; ``mask`` one of
    ``[*batch, key, query]``, where ``query`` runs to the end of the last block. ``order`` are the axes of
    ``[*batch, token, feature]`` in the order of the result. Queries are cut into blocks, the last one padded with
    zeros; scores are laid out ``[*batch, block, key, query]``. Few queries are one block without padding. Free numbers
    of keys are padded to multiples of :data:`WHOLE_KEYS`, as all are with few queries, and those of queries to pairs of
    blocks where there are usually two or more. With ``zeros`` the result of a query whose scores are all minus infinity
    is 0 instead of NaN. ``staged`` says whether key and value are :func:`joined` ones, which are read through a stage.
    """
    n, block = len(sizes.batch), block_of(sizes.tokens)
    batch = [i64(extent) for extent in sizes.batch]  # what Relax has its shapes in
    padded, given = sizes.keys, (key, value)
    if isinstance(sizes.keys, Size) or (block < QUERIES and sizes.keys % WHOLE_KEYS):
        # whole tiles of keys, the last of which are given no weight
        key, value, mask = _padded(i64(sizes.keys), key, value, mask or (lambda *_: tirx.const(0.0, "float32")))
        padded = -(-sizes.keys // WHOLE_KEYS) * WHOLE_KEYS
    tokens, keys, depth, features, width = map(i64, (sizes.tokens, padded, sizes.depth, sizes.features, block))
    if staged[0]:
        key = _staged((*batch, keys, depth), i64(sizes.keys), given[0])
    if staged[1]:
        value = _staged((*batch, keys, features), i64(sizes.keys), given[1])
    one, zero, factor, tiny = (tirx.const(v, "float32") for v in (1.0, 0.0, scale, _TINY))
    rd, rj, rs, rv = (te.reduce_axis((0, e), name=name) for e, name in
                      ((depth, "rd"), (keys, "rj"), (keys, "rs"), (keys, "rv")))

    def row(*x: Any) -> Any:
        i = x[n] * block + x[n + 1]
        loaded = query(*x[:n], i, x[-1])
        loaded = loaded if scale == 1.0 else loaded * factor
        return loaded if sizes.tokens % block == 0 else tirx.if_then_else(i < tokens, loaded, zero)

    def score(*x: Any) -> Any:
        return te.sum(key(*x[:n], x[-2], rd.var) * queries(*x[: n + 1], rd.var, x[-1]), axis=[rd])

    def logit(*x: Any) -> Any:
        if mask is None:
            return scores(*x)
        i = x[n] * block + x[-1]
        return scores(*x) + mask(*x[:n], x[-2], i)

    def weighted(*x: Any) -> Any:
        return te.sum(powers(*x[:-2], rv.var, x[-2]) * value(*x[:n], rv.var, x[-1]), axis=[rv])

    def result(*index: Any) -> Any:
        at = [index[list(order).index(axis)] for axis in range(n + 2)]
        place = (at[n] // block, at[n] % block) if block == QUERIES else (i64(0), at[n])
        return values(*at[:n], *place, at[-1]) * inverse(*at[:n], *place)

    front = (*batch, i64(whole_blocks(sizes.tokens) // block))
    rows = te.compute((*front, width, depth), row, name="rows")
    queries = te.compute((*front, depth, width), lambda *x: rows(*x[:-2], x[-1], x[-2]), name="queries")
    said: dict[str, Any] = {"mlc.op": "attention"}
    if isinstance(sizes.tokens, Size):
        said[TOGETHER] = _together(sizes.tokens)
    if isinstance(sizes.keys, Size):
        said[KEYS] = WHOLE_KEYS
    scores = te.compute((*front, keys, width), score, name="scores", attrs=said)
    logits = te.compute(scores.shape, logit, name="logits")
    peak = te.compute((*front, width), lambda *x: te.max(logits(*x[:-1], rj, x[-1]), axis=[rj]), name="peak")
    least = tirx.min_value("float32")

    def power(*x: Any) -> Any:
        most = peak(*x[:-2], x[-1])
        return tirx.exp(logits(*x) - (tirx.max(most, least) if zeros else most))

    powers = te.compute(scores.shape, power, name="powers")
    total = te.compute((*front, width), lambda *x: te.sum(powers(*x[:-1], rs, x[-1]), axis=[rs]), name="total")
    inverse = te.compute(total.shape, lambda *x: one / (tirx.max(total(*x), tiny) if zeros else total(*x)),
                         name="inverse")
    values = te.compute((*front, width, features), weighted, name="values")
    shape = (*batch, tokens, features)
    return te.compute([shape[axis] for axis in order], result, name="attention")


def _staged(shape: Sequence[Any], keys: Any, load: Load) -> te.Tensor:
    """Keys or values ``[*batch, key, feature]``; more than ``keys`` are the last one again, which has no weight there.
    """
    last = (lambda j: j) if tvm.sym.Analyzer().can_prove_equal(shape[-2], keys) else (lambda j: tirx.min(j, keys - 1))
    return te.compute(shape, lambda *x: load(*x[:-2], last(x[-2]), x[-1]), name="stage", attrs={STAGE: 1})


def joined(shape: Sequence[Any], axis: int, past: Load, length: Any, new: Load) -> te.Tensor:
    """Keys or values of former tokens, ``length`` along ``axis``, and new ones behind them, as a result of its own that
    :func:`attention` reads all of."""
    def element(*x: Any) -> Any:
        behind = (*x[:axis], x[axis] - length, *x[axis + 1 :])
        return tirx.if_then_else(x[axis] < length, past(*x), new(*behind))

    return te.compute(shape, element, name="present", attrs={PRESENT: 1})


def block_of(tokens: int | Size) -> int:
    """Queries of one block."""
    return tokens if isinstance(tokens, int) and tokens < FEW else QUERIES


def _together(tokens: int | Size) -> int:
    """How many blocks of queries are always computed together: what is free is padded to whole numbers of them, so that
    no tile has to ask whether its queries are there."""
    return 2 if isinstance(tokens, Size) and usual_size(tokens) >= 2 * QUERIES else 1


def whole_blocks(tokens: Any) -> Any:
    """The number of queries with those that fill the last blocks."""
    step = _together(tokens) * block_of(tokens)
    return -(-tokens // step) * step


def _padded(keys: tirx.Expr, key: Load, value: Load, mask: Load) -> tuple[Load, Load, Load]:
    """Loads of keys, values and masks, padded to more keys than there are: the scores of padding are minus infinity."""
    zero, never = tirx.const(0.0, "float32"), tirx.const(float("-inf"), "float32")
    return (
        lambda *x: key(*x[:-2], tirx.min(x[-2], keys - 1), x[-1]),
        lambda *x: tirx.if_then_else(x[-2] < keys, value(*x), zero),
        lambda *x: tirx.if_then_else(x[-2] < keys, mask(*x), never),
    )
