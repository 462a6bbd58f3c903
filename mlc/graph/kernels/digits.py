"""Float32 activations times 4-bit or 8-bit weights in integer arithmetic: activations are split into 8-bit digits, as
exact as float32 sums.

Each block of a row that meets one scale of the weights becomes whole multiples of a step, integers of 24 bits, each of
three signed digits to the base 256. A digit meets the weights like an activation of 8 bits does (``nibbles`` and
``octets`` of :mod:`schedules.intrin.dot`), so that a block's part of a sum is::

    step * scale * (65536 * sum(d2 * w) + 256 * sum(d1 * w) + sum(d0 * w)),   w = integer - zero

An activation is off by at most half a step, 6e-8 of the block's largest magnitude, and 1.2e-7 of itself; what is in
brackets is exact but for two roundings to float32. A sum of multiply-adds of float32 rounds each partial sum by up to
6e-8 of it instead. Tests compare both with float64; measured, 1024 terms, relative to the results: 1.3 to 5.1e-7 by
digits, more the longer the block and the fewer its large elements; 5.2 to 6.5e-7 added in order; block by block, as
:mod:`~mlc.graph.kernels.weight_only` adds, 2.2 to 5.7e-7 by 4 bits and 1.4 to 3.2e-7 by 8.

For 16 columns and eight rows of 4 bits six products of bytes and three operations that unpack take the place of eight
multiply-adds and sixteen operations; of 8 bits six products that of as many.

Weights are those of :func:`mlc.graph.kernels.rounded.pack_bytes`.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from mlc.graph.kernels.rounded import by_blocks, half_range
from mlc.graph.kernels.weight_only import PANEL, rows_of_word
from mlc.target import Target
from schedules.intrin import dot, select
from schedules.machine import cpu_machine

__all__ = ["DIGITS", "LONGEST", "dense_digits", "has_digits"]

#: the product's annotation
DIGITS = "dense_digits"
#: Rows of the longest block: an outlier makes the steps of its whole block longer. With one more the sums of weights of
#: 8 bits, ``256 * sum(d2 * w) + sum(d1 * w)``, would leave the 32 bits of an integer
LONGEST = 256

_FORMS, _COUNT = {4: dot.NIBBLES, 8: dot.OCTETS}, 3
#: Operations of a vector: to unpack both halves of bytes, to unpack a vector for a multiply-add, a digit's products by
#: both halves in pairs, to put a block's three sums together and add them to the result, and to add one
_HALVES, _UNPACK, _PAIRS, _TOGETHER, _ADDED = 3, 2, 5, 9, 3
#: the largest integer but for what rounds it up, less than three digits' 8,355,711; and what the largest magnitude is
#: taken for where it is less, so that a step is a normal number
_LARGEST, _SMALLEST = 8355000.0, 1e-30


def has_digits(target: Target, bits: int, rows: int, block: int) -> bool:
    """Whether the target makes products of so many rows by weights of ``bits`` bits in blocks in less time by digits
    than by multiply-adds: whether a word's rows of the weights take fewer operations. A dot product of bytes is one,
    for each half of a byte; where ``pmaddubsw`` is the nearest, one digit by both halves takes five."""
    form, lanes = _FORMS.get(bits), cpu_machine(target.tvm).lanes()
    name = select(dot.dot(form, lanes), target.tvm) if form is not None else None
    if name is None or block > LONGEST:
        return False
    word, halves = rows_of_word(bits), 8 // bits
    each = _COUNT * (_PAIRS if name.endswith(".pairs") else halves) + _TOGETHER * word / block
    unpacked = _HALVES if halves > 1 else 0
    return unpacked + rows * each < word * _UNPACK + rows * (word + _ADDED * word / block)


def dense_digits(
    data: te.Tensor, weight: te.Tensor, scale: te.Tensor, zero: te.Tensor | None, bits: int, block: int
) -> te.Tensor:
    """Product of float32 ``[..., M, K]`` with a weight of :func:`~mlc.graph.kernels.rounded.pack_bytes` of 4 or 8
    ``bits`` to float32 ``[..., M, N]``, ``N`` whole panels.

    ``scale`` and ``zero`` are float32 ``[N/32, ceil(K/block), 32]``; a ``zero`` is moved by
    :func:`~mlc.graph.kernels.rounded.half_range`, and left out it is 0 before that. A block with infinities or without
    numbers makes its row not numbers. One with magnitudes of less than 1e-30 alone is rounded as if it held that.
    """
    assert bits in _FORMS, "other weights have kernels of their own"
    panels, each, blocks = weight.shape[0], rows_of_word(bits), int(scale.shape[1])
    rows, steps = data.shape[:-1], int(weight.shape[1]) // blocks
    wide = steps * each  # rows of a block, and of its words
    value, largest = by_blocks(data, blocks, wide)

    def number(i: int) -> Any:
        return tirx.const(i, "int32")

    def stepped(*index: Any) -> Any:
        found = tirx.max(tirx.const(_SMALLEST, "float32"), tirx.reinterpret("float32", largest[index]))
        return found * tirx.const(1 / _LARGEST, "float32")

    step = te.compute((*rows, blocks), stepped, name="step")
    inverses = te.compute((*rows, blocks), lambda *i: tirx.const(1.0, "float32") / step[i], name="inverses")
    wholes = te.compute(
        (*rows, blocks, wide), lambda *i: tirx.nearbyint(value(i[:-2], *i[-2:]) * inverses[i[:-1]]).astype("int32"),
        name="wholes")

    def digit(*index: Any) -> Any:
        """The first is of the highest place; what those below it carry is added before it is cut out."""
        *row, b, place, k = index
        found = wholes[(*row, b, k)]
        high, middle = (found + number(0x8080)) >> number(16), (found + number(0x80)) >> number(8)
        return tirx.Select(place == 0, high, tirx.Select(place == 1, middle, found)).astype("int8")

    digits = te.compute((*rows, blocks, _COUNT, wide), digit, name="digits")
    rt = te.reduce_axis((0, wide), name="rt")

    def added(*index: Any) -> Any:
        *row, b = index
        return te.sum((wholes[(*row, b, rt)] + number(0x80)) >> number(8), axis=[rt])

    def lowest(*index: Any) -> Any:
        *row, b = index
        return te.sum(wholes[(*row, b, rl)].astype("int8").astype("int32"), axis=[rl])

    rl = te.reduce_axis((0, wide), name="rl")
    upper, lower = (te.compute((*rows, blocks), of, name=name) for of, name in ((added, "upper"), (lowest, "lower")))

    moved = "float32" if zero is not None else "int32"

    def shift(sums: te.Tensor) -> Any:
        factor = tirx.const(half_range(bits) if zero is None else 1, moved)
        return lambda *i: sums[i].astype(moved) * factor

    shifts = [te.compute((*rows, blocks), shift(sums), name=f"{sums.op.name}_shift") for sums in (upper, lower)]
    rs, re = te.reduce_axis((0, steps), name="rs"), te.reduce_axis((0, 4), name="re")

    def part(*index: Any) -> Any:
        *row, b, place, j = index
        byte, at = weight[j // PANEL, b * steps + rs, j % PANEL, re], rs * each + re
        if bits == 8:
            return te.sum(digits[(*row, b, place, at)].astype("int32") * byte.astype("int32"), axis=[rs, re])
        low, high = byte & tirx.const(15, "uint8"), byte >> tirx.const(4, "uint8")
        return te.sum(digits[(*row, b, place, at)].astype("int32") * low.astype("int32")
                      + digits[(*row, b, place, at + 4)].astype("int32") * high.astype("int32"), axis=[rs, re])

    parts = te.compute((*rows, blocks, _COUNT, panels * PANEL), part, name="parts")
    rb = te.reduce_axis((0, blocks), name="rb")

    def product(*index: Any) -> Any:
        *row, j = index
        place, at = (j // PANEL, rb, j % PANEL), (*row, rb)
        high, middle, low = (parts[(*row, rb, digit, j)] for digit in range(_COUNT))
        sums = ((high << number(8)) + middle, low)
        if zero is None:
            above, below = ((found - moved[at]).astype("float32") for found, moved in zip(sums, shifts, strict=True))
        else:
            above, below = (found.astype("float32") - zero[place] * moved[at]
                            for found, moved in zip(sums, shifts, strict=True))
        return te.sum((above * tirx.const(256.0, "float32") + below) * (scale[place] * step[at]), axis=[rb])

    return te.compute((*rows, panels * PANEL), product, name=DIGITS, attrs={"mlc.op": DIGITS})
